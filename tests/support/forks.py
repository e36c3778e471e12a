"""Runs of the script as forks of one process that has loaded PyTorch, which takes seconds.

The first test that needs it starts this fork server; all workers of a test session share it. A
run is a session of processes with a leader, whose children are the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1]))  # in the server
from support.processes import SCRIPT, Run, Started, free_port, start

QUICK = Path(__file__).with_name("quick.py")


def run_forked(
    runs: Iterable[Sequence[Any]],
    program: object = SCRIPT,
    expect: int | None = 0,
    timeout: float = 90,
    env: Mapping[str, str | None] | None = None,
    **options: Any,
) -> list[Run]:
    """Runs the script once for each (ranks, arguments) or (ranks, arguments, variables), one after
    another, to their ends.

    See `Forked`. `expect` is the exit code of each rank (None: any), `timeout` seconds for each
    run. `env` are variables that must be set when Python starts: for a fork server of their own.
    """
    ended = []
    with contextlib.ExitStack() as stack:
        if env:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(start_server(f"{folder}/forks", env=env))
            options |= {"server": f"{folder}/forks", "env": env}
        for ranks, arguments, *variables in runs:
            run = Forked(ranks, arguments, *variables, program=program, **options)
            ended.append(run.finish(timeout, expect))
    return ended


def changed(path: Path, code: str) -> Path:
    """A file with a program that is quick.py changed by this code."""
    path.write_text(QUICK.read_text() + code)
    return path


class Forked(Started):
    """A run of the fork server.

    Each rank is a process with the variables that torchrun would give it; 0 ranks: one process
    without them. `variables` win over these; in their values {rank} is the rank's. `arguments` may
    be a list of those of each rank, `program` another module with `main` and `run_and_exit`. The
    rest are options of `Started`.
    """

    def __init__(
        self,
        ranks: int,
        arguments: Iterable[object],
        variables: Mapping[str, str] | None = None,
        program: object = SCRIPT,
        server: str | None = None,
        **options: Any,
    ) -> None:
        words = [*arguments]
        self.ranks, self.variables, self.server = ranks, dict(variables or {}), server
        each = words if words and isinstance(words[0], list) else [words] * max(1, ranks)
        self.words = [[str(program), *map(str, own)] for own in each]
        super().__init__(self.words[0], **options)
        # Its processes have the environment of the server: they are found by their session.
        self.test_id = str(self.pid)

    def _popen(self, command: list[str], env: dict, cwd: Any, out: BinaryIO, err: BinaryIO) -> Any:
        connection = Client(self.server) if self.server else connect()
        files = out.name, err.name
        connection.send(
            (self.ranks, self.words, env, self.variables, str(cwd or os.getcwd()), files)
        )
        return Leader(connection)

    def rank_pid(self, rank: int) -> int:
        return self.process.ranks[rank]

    def finish(
        self, timeout: float = 120, expect: int | None = 0, clean: float | None = 5.0
    ) -> Run:
        """As of `Started`; all ranks have to end with the expected code."""
        run = super().finish(timeout, expect, clean)
        assert expect is None or {*self.process.codes} == {expect}, run.tail()
        return run


class Leader:
    """What `Started` needs of a process, for the leader of a forked run."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.returncode, self.codes = connection, None, []
        self.pid, *self.ranks = connection.recv()

    def wait(self, timeout: float | None = None) -> int:
        """The code of the first rank that has not ended with 0, or 0."""
        if self.returncode is None:
            if not self.connection.poll(timeout):
                raise subprocess.TimeoutExpired("a forked run", timeout)
            try:
                self.codes = self.connection.recv()
            except EOFError:
                self.codes = [-signal.SIGKILL]
            self.returncode = next((code for code in self.codes if code), 0)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To each rank."""
        for rank in self.ranks:
            os.kill(rank, number)


def connect() -> Connection:
    """To the fork server of this test session, which is started unless it is there."""
    address = f"{os.environ['TMPDIR']}/forks"
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            start_server(address)._forget()  # it stays until the session ends
    return Client(address)


def start_server(address: str, **options: Any) -> Started:
    server = start([sys.executable, "-u", __file__, address], **options)
    server.wait_for("READY")
    return server


# --- In the server -----------------------------------------------------------------------------


def load(program: str) -> Any:
    """The module in this file."""
    name = Path(program).stem
    spec = importlib.util.spec_from_file_location(name, program)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_rank(script: Any, words: list[str], variables: dict[str, str]) -> None:
    """In a process of its own: the script, or another program, with these arguments. It does not
    return.
    """
    sys.argv = words
    os.environ.update(variables)
    code: Any = 1
    try:
        module = script if words[0] == script.__file__ else load(words[0])
        module.run_and_exit(module.main)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception:  # of the program itself
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # Python's own end takes a second after a fork


def lead(script: Any, connection: Connection) -> None:
    """In a process of its own: starts the ranks of a run, and tells their codes when all have
    ended. If the test ends before, so does the run.
    """
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    ranks, words, env, own, cwd, files = connection.recv()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    port, pids = free_port(), []
    for rank in range(max(1, ranks)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        place |= {"LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} if ranks else {}
        pids.append(os.fork())
        if pids[-1] == 0:
            connection.close()
            own = {name: value.replace("{rank}", str(rank)) for name, value in own.items()}
            run_rank(script, words[rank], variables | own)
    connection.send([os.getpid(), *pids])

    def end_with_the_test() -> None:
        connection.poll(None)  # until its process, which sends no more, has gone
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_test, daemon=True).start()
    codes = dict(os.wait() for _ in pids)
    connection.send([os.waitstatus_to_exitcode(codes[pid]) for pid in pids])
    os._exit(0)


def look_around(*_: object) -> None:
    """Once a second: takes note of leaders that have ended, and ends with the test session."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    try:
        os.kill(int(os.environ["TEST_SESSION"]), 0)
    except ProcessLookupError:
        os._exit(0)


def main() -> None:
    multiprocessing.set_start_method("fork")  # loader workers find the module in no other way
    script = load(str(SCRIPT))
    importlib.import_module("torch._dynamo")  # otherwise each rank would, for its optimizer
    gc.freeze()  # a collection in a rank would copy all that is imported, page by page
    signal.signal(signal.SIGALRM, look_around)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    with Listener(sys.argv[1]) as listener:
        print("READY")
        while True:
            with listener.accept() as connection:
                if os.fork() == 0:
                    lead(script, connection)


if __name__ == "__main__":
    main()
