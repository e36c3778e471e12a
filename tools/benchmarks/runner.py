"""Runs the commands that are measured, one at a time, and the rounds in which they take turns."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks import children

TOOLS = children.SCRIPT.parent / "tools"
FOREIGN = re.compile(  # what a launcher or scheduler around this process says to its own ranks
    "(SLURM|SBATCH|OMPI|PMIX?|TORCHELASTIC|GROUP|ROLE|MASTER|NCCL|GLOO)_|(LOCAL_)?(RANK|WORLD"
    "_SIZE)$|(NNODES|NODE_RANK|GPUS|GPUS_PER_NODE|RUN_NAME|RESTARTS|NETWORK|IFNAME)$"
)


class Failure(Exception):
    """What the user can mend, or a run that failed; its text is the one line that is shown."""


class Bench:
    """Runs commands in `folder` (temporary), one at a time; all that one started ends with it."""

    def __init__(self, args, folder):
        self.args, self.folder = args, Path(folder)
        self.deadline, self.failed = math.inf, []  # of a part of `gpu`; why parts have failed
        self.peak = None  # MB, of the largest process of the last command
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self.env = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}
        self.env |= {"PATH": path, "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        self.env |= {"PYTHONDONTWRITEBYTECODE": "1", "LOG_DIR": str(self.folder / "logs")}

    def run(self, command, **env):
        """Output of a command. Raises Failure where it fails, or takes over --limit seconds."""
        command = [*map(str, command)]
        scripts = [word for word in command if word.endswith((".py", ".sh"))]
        name = Path([*scripts, command[0]][0]).name

        def too_late(*_):
            raise Failure(f"{name}: the time limit is over")

        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env | {"BENCHMARK_BEGAN": str(time.monotonic())} | env,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        signal.signal(signal.SIGALRM, too_late)
        limit = min(self.args.limit, self.deadline - time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, limit))
        try:
            text = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.stop(process)
            process.stdout.close()
        self.peak = used.ru_maxrss * 1024 / 1e6
        if process.returncode:
            lines = text.splitlines() or ["?"]
            errors = [line for line in lines if re.search(r"(?i)error: \S", line)]
            why = f"{name} ended with {process.returncode}: {[*errors, lines[-1]][0]}"
            raise Failure(" ".join(why.split())[:300])
        return text

    def stop(self, process):
        """Ends a command in good order: torchrun ends its ranks, two_nodes.sh its namespaces."""
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def script(self, how, options, processes=0, launch=(), **env):
        """Output of a script, "demo" or "other", or with changes of children.py: "demo+loader".

        With `processes` torchrun starts them, with the options `launch`; else it is alone,
        without a launcher.
        """
        name, _, changes = how.partition("+")
        file = self.args.against if name == "other" else self.args.script
        command = [sys.executable]
        if processes:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={processes}", *launch]
        command += [children.__file__, changes] if changes else [file]
        return self.run([*command, *options], BENCHMARK_SCRIPT=str(file), **env)


def rounds(bench, cases):
    """{case: {figure: [value of each round]}} of {case: function that gives {figure: value}}."""
    found, count = {name: {} for name in cases}, bench.args.repeats
    for turn in range(count):
        for name in list(cases)[:: 1 - 2 * (turn % 2)]:
            begin, figures = time.monotonic(), cases[name]()
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
            shown = ", ".join(f"{k} {v:.4g}" for k, v in list(figures.items())[:4])
            took = time.monotonic() - begin
            say(f"round {turn + 1} of {count}: {name}: {shown} [{took:.0f} s]")
    return found


def say(text):
    print(text, file=sys.stderr, flush=True)
