"""Work shared out to processes, each of which sends what it has; none outlives this one."""

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait


class WorkerEnded(Exception):
    """A process has ended before its work was done; the text says how."""


def exit_on_stop_signals():
    """The first stop signal raises SystemExit, so that what is half done is cleaned up.

    A signal that this process was started to ignore, as SIGHUP by nohup, stays ignored.
    """

    def stop(number, _frame):
        for name in names:
            signal.signal(name, signal.SIG_IGN)
        sys.exit(128 + number)  # as a shell has it

    names = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
    for name in names:
        if signal.getsignal(name) != signal.SIG_IGN:
            signal.signal(name, stop)


def own_cores():
    """How many cores this process may use; not every system can tell them from the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def results_of(calls, method=None):
    """Yields what each call, (function, *arguments), yields in a process of its own, in any order.

    `method` starts the processes: fork, spawn, forkserver; None: the system's default. Raises an
    OSError of theirs or of their start, and WorkerEnded. Each sends through a pipe of its own: a
    queue is one that a killed process could leave locked.
    """
    context, processes = multiprocessing.get_context(method), {}
    try:
        # They inherit that these are blocked: Ctrl-C reaches all, and this one then ends them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for call in calls:
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=send_results, args=(writer, *call))
                process.start()
                processes[reader] = process
                writer.close()  # the process's alone: when it ends, so does the pipe
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while processes:
            for reader in wait([*processes]):
                try:
                    result = reader.recv()
                except EOFError:
                    check_end(processes.pop(reader))
                    continue
                if isinstance(result, OSError):
                    raise result
                yield result
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def send_results(pipe, function, *arguments):
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        for result in function(*arguments):
            pipe.send(result)
    except OSError as error:
        pipe.send(error)


def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def check_end(process):
    process.join()
    if code := process.exitcode:
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = " (9 is also how a system ends processes when it is out of memory)"
        raise WorkerEnded(f"a worker was ended {how}{hint}")
