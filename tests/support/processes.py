"""Real processes for the tests: started, watched, and found again wherever they have moved.

Every process that a test starts is marked in its environment, so that what is left of it can be
found and ended, whatever happened in between, while several pytest workers run at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Another copy of the script can be put to the tests, to see that they find what is broken in it.
SCRIPT = Path(os.environ.get("TEST_SCRIPT", ROOT / "demo_coco_resnet18.py"))
MARK = "TEST_ID"  # in the environment of every process that a test starts
counter = itertools.count()
# How many times as long as on the machine where the limits were set a start of Python takes here
# (conftest.py measures it when the session begins): each limit in seconds is multiplied by it.
FACTOR = float(os.environ.get("TEST_FACTOR", "1"))
# The lines that the script promises: "[GPU 3] ", then a step with its loss.
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d+)\] ")
STEP = re.compile(r"Epoch (\d+) \| Step (\d+) \| Loss: (-?[\d.]+|-?inf|nan)")


# A surrounding scheduler or launcher would tell the script a rank of its own, and a GPU would
# change what the tests compare: both stay outside.
_FOREIGN = re.compile(
    r"^(SLURM|SBATCH|OMPI|PMIX?|PRTE|TORCHELASTIC|GROUP|ROLE|NCCL|GLOO)_|"
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NNODES|NODE_RANK|GPUS|GPUS_PER_NODE)$|"
    r"^(MASTER_ADDR|MASTER_PORT|RUN_NAME|RESTARTS|REPEATS|PROBE|CONNECT_TIMEOUT)$|"
    r"^(NETWORKS?|IFNAME|LINK_GBPS)$|"
    r"^(LOG_DIR|CONDA_PREFIX|CDPATH|SUDO_UID|SUDO_GID|SYSFS_ROOT)$"
)


def require(ok: object, reason: str) -> None:
    """Skip the test with `reason` unless `ok`; fail instead where TEST_REQUIRE_ALL=1 says nothing
    may be skipped.
    """
    if ok:
        return
    if os.environ.get("TEST_REQUIRE_ALL") == "1":
        pytest.fail(f"TEST_REQUIRE_ALL=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def free_port() -> int:
    """A TCP port that was free a moment ago, in this network namespace."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many TCP ports in a row that were free a moment ago. They lie below those
    that the kernel gives to connections: one of these may be a later run's port.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8  # each has its own range
    first = 10000 + worker * 2700
    while True:
        port = random.SystemRandom().randrange(first, first + 2700 - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for n in range(count):
                stack.enter_context(socket.create_server(("", port + n)))
            return port


def new_test_id() -> str:
    return f"{os.getpid()}-{next(counter)}-{time.time_ns()}"


# To give back each step's memory and to get it again is a good part of a small step's time.
# What warns of its end is an error, in the tests (pyproject.toml) and in what they start.
WARNINGS = ",".join(
    f"error::{kind}Warning" for kind in ("Deprecation", "Future", "PendingDeprecation")
)
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}  # as the launchers


def base_env(test_id: str, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment for a run: this Python first in PATH, CPU only, one thread a process, memory
    that stays with it, marked by `test_id`.

    A value of `extra` wins over these; an empty string is passed on as such, None takes one away.
    """
    env = {key: value for key, value in os.environ.items() if not _FOREIGN.search(key)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    # The first process writes PyTorch's bytecode; otherwise each one would take seconds for it.
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="")
    env |= {MARK: test_id, "PYTHONWARNINGS": WARNINGS, **MALLOC, **(extra or {})}
    return {name: value for name, value in env.items() if value is not None}


def wait_until(condition: Callable[[], object], timeout: float, what: str) -> object:
    """The first true value of `condition()`; fails after `timeout` seconds, naming `what`."""
    timeout *= FACTOR
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s for {what}")
        time.sleep(0.05)
    return value


@dataclasses.dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    env: dict[str, str]


def processes(test_id: str, but: int | None = None) -> list[Process]:
    """Each process still alive that was started under `test_id`, except `but`, wherever it has
    moved.

    torchrun gives each rank a session of its own and SLURM runs tasks under its daemons, so
    neither process group nor parent finds them all; the environment is inherited by every one. Of
    a forked run (forks.py) `test_id` is its session. A zombie is not counted. Empty where there is
    no /proc.
    """
    mark = f"{MARK}={test_id}"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            # The name, in parentheses, may itself hold spaces: state and parent follow the last.
            stat = (folder / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            state, parent, _, session = stat[:4]
            env = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if (mark not in env and session != test_id) or state == "Z" or folder.name == str(but):
                continue
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            variables = dict(item.split("=", 1) for item in env if "=" in item)
            command = command.replace("\0", " ").strip()
            found.append(Process(int(folder.name), int(parent), command, variables))
    return found


def kill_leftover(test_id: str, but: int | None = None) -> None:
    """Kill what is left of `test_id`, except process `but`, until nothing is."""
    deadline = time.monotonic() + 10
    while (left := processes(test_id, but)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def assert_none_left(test_id: str, within: float = 5.0, but: int | None = None) -> None:
    """Fails, after having killed it, when a process of `test_id`, except `but`, is still alive
    `within` seconds from now.
    """
    within *= FACTOR
    deadline = time.monotonic() + within
    while left := processes(test_id, but):
        if time.monotonic() > deadline:
            kill_leftover(test_id, but)
            found = [f"{process.pid} {process.command[:200]}" for process in left]
            pytest.fail(f"still alive {within:g} s after the run: {found}")
        time.sleep(0.05)


@dataclasses.dataclass
class Run:
    """A run that ended. `out` holds stdout and, unless it was asked for in `err`, stderr;
    `seconds` is wall time.
    """

    command: list[str]
    returncode: int
    out: str
    seconds: float
    err: str = ""

    @property
    def output(self) -> str:
        """Stdout, then stderr."""
        return self.out + self.err

    def lines(self, rank: int | None = None) -> list[str]:
        """All lines, or those that `rank` wrote, without their `[CPU r] ` prefix.

        torchrun puts nothing before them; srun --label and mpirun --tag-output would, and are not
        used here.
        """
        if rank is None:
            return self.out.splitlines()
        found = [(PREFIX.match(line), line) for line in self.out.splitlines()]
        return [line[by.end() :] for by, line in found if by and int(by[2]) == rank]

    def json_line(self, kind: str) -> dict:
        """The JSON of rank 0's last `Run`, `Probe` or `Summary` line; fails when there is none."""
        for line in reversed(self.lines(0)):
            if line.startswith(f"{kind} {{"):
                return json.loads(line.removeprefix(kind))
        pytest.fail(f"no {kind} line from rank 0 in:\n{self.tail()}")

    def steps(self, rank: int = 0) -> list[tuple[int, int, float]]:
        """(epoch, step, loss) of each step line of `rank`, in the order of the log."""
        found = (STEP.match(line) for line in self.lines(rank))
        return [(int(m[1]), int(m[2]), float(m[3])) for m in found if m]

    def tail(self, lines: int = 60) -> str:
        """The end of the output, to be shown when a test fails."""
        text = "\n".join(self.output.splitlines()[-lines:])
        end = f"(exit code {self.returncode}, {self.seconds:.1f} s)"
        return f"$ {shlex.join(self.command)[:600]}\n{end}\n{text}"


class Started:
    """A command that runs in a session of its own and writes to a file, so that no reader can hold
    it up.
    """

    def __init__(
        self,
        command: Sequence[object],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        test_id: str | None = None,
        split: bool = False,
        shown: Sequence[object] | None = None,
    ) -> None:
        """`split` keeps stderr apart in `Run.err`. `env` is added to `base_env`. `shown` is the
        command that a failure shows, where it is not the one that is started.
        """
        command = [str(part) for part in command]
        self.command = [str(part) for part in shown or command]
        self.test_id = test_id or new_test_id()
        self._folder = Path(tempfile.mkdtemp(prefix="demo-run-"))
        self._err = self._folder / "err"
        self.log = self._folder / "out"
        self._begin = time.monotonic()
        self._done = False
        try:
            # Append mode keeps each write whole where several ranks share the file.
            with self.log.open("ab") as out, self._err.open("ab") as err:
                err = err if split else out
                self.process = self._popen(command, base_env(self.test_id, env), cwd, out, err)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _popen(self, command: list[str], env: dict, cwd: Any, out: BinaryIO, err: BinaryIO) -> Any:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What the command has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, pattern: str, timeout: float = 120) -> re.Match:
        """The first match of `pattern` (multi-line mode) in the text; fails at once when it ends
        without.
        """
        deadline = time.monotonic() + timeout * FACTOR
        while True:
            over = not self.running() or time.monotonic() > deadline
            if match := re.search(pattern, self.text(), re.MULTILINE):
                return match
            if over:
                self.fail(f"no {pattern!r} in the output")
            time.sleep(0.02)

    def pids(self, pattern: str = "") -> list[int]:
        """Process ids of this run whose command line contains `pattern`."""
        return [found.pid for found in processes(self.test_id) if pattern in found.command]

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank that torchrun started; fails when there is none."""
        # A worker has the environment of its rank; the rank is the one whose parent has not.
        found = [p for p in processes(self.test_id) if p.env.get("RANK") == str(rank)]
        ranks = {p.pid for p in found}
        chosen = [p.pid for p in found if p.parent not in ranks]
        if not chosen:
            self.fail(f"no process of rank {rank}")
        return chosen[0]

    def signal(self, number: int) -> None:
        """Send a signal to the started process alone."""
        self.process.send_signal(number)

    def finish(
        self, timeout: float = 120, expect: int | None = 0, clean: float | None = 5.0
    ) -> Run:
        """Wait for the end; the test fails, with the output, on another exit code than `expect`
        (None: any).

        After `timeout` seconds all processes of the run are killed and the test fails. `clean` is
        the time in seconds that processes of the run may take to be gone after that (None: not
        checked).
        """
        timeout *= FACTOR
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {timeout:g} s")
        if expect is not None and code != expect:
            self.fail(f"exit code {code}, expected {expect}")
        try:
            if clean is not None:
                assert_none_left(self.test_id, clean)
            return self._result()
        finally:
            self._forget()

    def kill(self) -> None:
        """End every process of the run, and forget its output; nothing happens after `finish`."""
        if not self._done:
            self._stop()
            self._forget()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _forget(self) -> None:
        self._done = True
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stop(self) -> None:
        # The group first: where there is no /proc, it is all that can be found.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        kill_leftover(self.test_id)
        self.process.wait(10)

    def _result(self) -> Run:
        seconds = time.monotonic() - self._begin
        err = self._err.read_text(errors="replace")
        code = self.process.returncode
        return Run(self.command, code, self.text(), seconds, err)

    def fail(self, why: str) -> NoReturn:
        self._stop()
        run = self._result()
        self._forget()
        pytest.fail(f"{why}\n{run.tail()}")


start = Started  # as a context manager, or with a call of `finish` or `kill`


def demo_command(args: Iterable[object], nproc: int = 1, launcher: str = "torchrun") -> list[str]:
    """The command line that runs the script with `torchrun` or plain `python`."""
    tail = [str(SCRIPT), *map(str, args)]
    if launcher == "python":
        return [sys.executable, *tail]
    options = ["--standalone", "--local-addr=127.0.0.1", "--nnodes=1", f"--nproc_per_node={nproc}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *tail]


def run_demo(
    args: Iterable[object],
    nproc: int = 1,
    timeout: float = 120,
    launcher: str = "torchrun",
    expect: int | None = 0,
    **options: Any,
) -> Run:
    """Run the real script to its end, with the options of `Started`. Fails on a timeout, on
    another exit code, and on a process that is left.
    """
    with start(demo_command(args, nproc, launcher), **options) as started:
        return started.finish(timeout, expect)
