"""Real processes, real networks and a real SLURM cluster for the tests.

Nothing here imitates anything: `run_demo` starts the script as a user would, `NamespacePair` makes
two network namespaces joined by a link, and `SlurmCluster` starts slurmctld, munged and two slurmd
in them. Everything is named after the process that made it, so several pytest workers may run at
once, and everything is removed on exit, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
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
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "demo_coco_resnet18.py"
MARK = "DEMO_TEST_ID"  # in the environment of every process that a test starts
_counter = itertools.count()
LONG = pytest.mark.skipif(
    os.environ.get("DEMO_LONG") != "1", reason="takes a minute: tests/run.sh --ci runs it"
)

# A surrounding scheduler or launcher would tell the script a rank of its own, and a GPU would
# change what the tests compare: both stay outside.
_FOREIGN = re.compile(
    r"^(SLURM|SBATCH|OMPI|PMIX?|PRTE|TORCHELASTIC|GROUP|ROLE)_|"
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NNODES|NODE_RANK|GPUS|GPUS_PER_NODE)$|"
    r"^(MASTER_ADDR|MASTER_PORT|RUN_NAME|RESTARTS)$"
)


def require(ok: object, reason: str) -> None:
    """Skip the test with `reason` unless `ok`; fail instead where DEMO_REQUIRE_ALL=1 says nothing
    may be skipped.
    """
    if ok:
        return
    if os.environ.get("DEMO_REQUIRE_ALL") == "1":
        pytest.fail(f"DEMO_REQUIRE_ALL=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def free_port() -> int:
    """A TCP port that was free a moment ago, in this network namespace."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def new_test_id() -> str:
    return f"{os.getpid()}-{next(_counter)}-{time.time_ns()}"


def base_env(test_id: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a run: this Python first in PATH, CPU only, one thread a process, marked
    by `test_id`.

    A value of `extra` wins over these; an empty string is passed on as such.
    """
    env = {key: value for key, value in os.environ.items() if not _FOREIGN.search(key)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    env[MARK] = test_id
    env.update(extra or {})
    return env


def wait_until(
    condition: Callable[[], object], timeout: float, what: str, interval: float = 0.05
) -> object:
    """The first true value of `condition()`; fails after `timeout` seconds, naming `what`."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s for {what}")
        time.sleep(interval)


# --- Processes -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str
    env: dict[str, str]


def processes(test_id: str) -> list[Process]:
    """Each process still alive that was started under `test_id`, wherever it has moved.

    torchrun gives each rank a session of its own and SLURM runs tasks under its daemons, so
    neither process group nor parent finds them all; the environment is inherited by every one. A
    zombie has none and is not counted. Empty where there is no /proc.
    """
    mark = f"{MARK}={test_id}"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            env = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if mark not in env:
                continue
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            # The name, in parentheses, may itself hold spaces: state and parent follow the last.
            stat = (folder / "stat").read_text(errors="replace").rpartition(") ")[2].split()
            variables = dict(item.split("=", 1) for item in env if "=" in item)
            command = command.replace("\0", " ").strip()
            found.append(Process(int(folder.name), int(stat[1]), command, variables))
    return found


def leftover(test_id: str, kill: bool = False) -> list[str]:
    """`PID command` of each process still alive that was started under `test_id`."""
    found = processes(test_id)
    if kill:
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
    return [f"{process.pid} {process.command[:200]}" for process in found]


def kill_leftover(test_id: str) -> list[str]:
    """Kill what is left of `test_id` until nothing is; returns what the first look found."""
    first = leftover(test_id, kill=True)
    deadline = time.monotonic() + 10
    while leftover(test_id, kill=True) and time.monotonic() < deadline:
        time.sleep(0.05)
    return first


def assert_none_left(test_id: str, within: float = 5.0) -> None:
    """Fails, after having killed it, when a process of `test_id` is still alive `within` seconds
    from now.
    """
    deadline = time.monotonic() + within
    while leftover(test_id):
        if time.monotonic() > deadline:
            pytest.fail(f"still alive {within:g} s after the run: {kill_leftover(test_id)}")
        time.sleep(0.1)


_LINE = re.compile(r"^\[(?:GPU|CPU|MPS) (\d+)\] (.*)$")
_STEP = re.compile(r"^Epoch (\d+) \| Step (\d+) \| Loss: (\S+)")


@dataclasses.dataclass
class Run:
    """A run that ended. `out` holds stdout and, unless it was asked for in `err`, stderr;
    `seconds` is wall time.
    """

    command: list[str]
    returncode: int
    out: str
    seconds: float
    test_id: str
    err: str = ""

    def lines(self, rank: int | None = None) -> list[str]:
        """All lines, or those that `rank` wrote, without their `[CPU r] ` prefix.

        torchrun puts nothing before them; srun --label and mpirun --tag-output would, and are not
        used here.
        """
        if rank is None:
            return self.out.splitlines()
        found = (_LINE.match(line) for line in self.out.splitlines())
        return [match[2] for match in found if match and int(match[1]) == rank]

    def json_line(self, kind: str, rank: int = 0) -> dict:
        """The JSON of the last `Run`, `Probe` or `Summary` line of `rank`; fails when there is
        none.
        """
        for line in reversed(self.lines(rank)):
            if line.startswith(f"{kind} {{"):
                return json.loads(line.removeprefix(kind))
        pytest.fail(f"no {kind} line from rank {rank} in:\n{self.tail()}")

    def steps(self, rank: int = 0) -> list[tuple[int, int, float]]:
        """(epoch, step, loss) of each step line of `rank`, in the order of the log."""
        found = (_STEP.match(line) for line in self.lines(rank))
        return [(int(m[1]), int(m[2]), float(m[3])) for m in found if m]

    def tail(self, lines: int = 60) -> str:
        """The end of the output, to be shown when a test fails."""
        text = "\n".join((self.out + self.err).splitlines()[-lines:])
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
                self.process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=base_env(self.test_id, env),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err if split else out,
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What the command has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match:
        """The first match of `pattern` (multi-line mode); fails at once when the command ends
        without it.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.text(), re.MULTILINE)
            if match:
                return match
            if ended or time.monotonic() > deadline:
                why = "ended" if ended else f"waited {timeout:g} s"
                self._fail(f"{why} without {pattern!r} in the output")
            time.sleep(0.05)

    def pids(self, pattern: str = "") -> list[int]:
        """Process ids of this run whose command line contains `pattern`."""
        return [found.pid for found in processes(self.test_id) if pattern in found.command]

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank that torchrun started; fails when there is none."""
        return self._of_rank(rank, top=True)[0]

    def worker_pids(self, rank: int) -> list[int]:
        """Process ids of what a rank has started: its data-loader workers."""
        return self._of_rank(rank, top=False)

    def _of_rank(self, rank: int, top: bool) -> list[int]:
        # A worker has the environment of its rank; the rank is the one whose parent has not.
        found = [p for p in processes(self.test_id) if p.env.get("RANK") == str(rank)]
        ranks = {p.pid for p in found}
        chosen = [p.pid for p in found if (p.parent not in ranks) == top]
        if top and not chosen:
            self._fail(f"no process of rank {rank}")
        return chosen

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
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"still running after {timeout:g} s")
        if expect is not None and code != expect:
            self._fail(f"exit code {code}, expected {expect}")
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
        return Run(self.command, code, self.text(), seconds, self.test_id, err)

    def _fail(self, why: str) -> NoReturn:
        self._stop()
        run = self._result()
        self._forget()
        pytest.fail(f"{why}\n{run.tail()}")


def start(command: Sequence[object], **options: Any) -> Started:
    """Start a command in the background, with the options of `Started`. Use it as a context
    manager, or call `finish` or `kill`.
    """
    return Started(command, **options)


def demo_command(
    args: Iterable[object], nproc: int = 1, launcher: str = "torchrun", script: Path | str = SCRIPT
) -> list[str]:
    """The command line that runs the script with `torchrun`, `mpirun` or plain `python`."""
    tail = [str(script), *map(str, args)]
    if launcher == "python":
        return [sys.executable, *tail]
    if launcher == "mpirun":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options = shlex.split(f"--oversubscribe --bind-to none -n {nproc}")
        return ["mpirun", *root, *options, sys.executable, *tail]
    if launcher == "torchrun":
        options = shlex.split(f"--standalone --nnodes=1 --nproc_per_node={nproc}")
        return [sys.executable, "-m", "torch.distributed.run", *options, *tail]
    raise ValueError(f"unknown launcher {launcher!r}")


def run_demo(
    args: Iterable[object],
    nproc: int = 1,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    launcher: str = "torchrun",
    expect: int | None = 0,
    cwd: Path | str | None = None,
    split: bool = False,
    script: Path | str = SCRIPT,
) -> Run:
    """Run the real script to its end. Fails on a timeout, on another exit code, and on a process
    that is left.
    """
    command = demo_command(args, nproc, launcher, script)
    with start(command, env=env, cwd=cwd, split=split) as started:
        return started.finish(timeout, expect)


class ForkServer:
    """A Python that has the script imported and forks ranks from itself, so that a test need not
    wait for torch; use as a context manager.

    It runs `file`, a test file, as a script, with the demo's path as its argument and requests on
    its stdin; a subclass says in `_ready` when it answers. On exit all that it forked is killed.
    """

    file: str
    script = SCRIPT

    def __enter__(self) -> ForkServer:
        self.test_id = new_test_id()
        self.folder = Path(tempfile.mkdtemp(prefix="demo-fork-"))
        self._jobs = 0
        with (self.folder / "server").open("wb") as err:
            self._server = subprocess.Popen(
                [sys.executable, self.file, str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=base_env(self.test_id),
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            self._ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        kill_leftover(self.test_id)
        self._server.wait(10)
        self._server.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self) -> None:
        raise NotImplementedError

    def _send(self, request: object) -> None:
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()

    def _why(self) -> str:
        """What the server has said on stderr, for one that ended."""
        return (self.folder / "server").read_text()[-3000:]

    def others(self) -> list[Process]:
        """What has been forked, and what that has started, as far as it is alive."""
        return [p for p in processes(self.test_id) if p.pid != self._server.pid]

    def clear(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.others()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)

    def none_left(self, within: float = 5) -> None:
        """Fails the test if the others do not end by themselves."""
        deadline = time.monotonic() + within
        while left := self.others():
            if time.monotonic() > deadline:
                self.clear()
                pytest.fail(f"still alive {within:g} s after the run: {[p.pid for p in left]}")
            time.sleep(0.05)


def enter_process(
    script: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, out: str, err: str
) -> None:
    """In a forked process: take on what a started one has of its own."""
    os.setsid()
    for descriptor, path in enumerate((os.devnull, out, err)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [script, *argv]


class _Prepared(BaseException):
    pass


def prepared(demo):
    """In a forked process: the Run that the script's main has prepared, before any step of it."""
    prepare, kept = demo.prepare, []

    def keep(run, *others):
        prepare(run, *others)
        kept.append(run)
        raise _Prepared

    demo.prepare = keep
    with contextlib.suppress(_Prepared):
        demo.main(demo.Process())
    return kept[0]


def data_args(folder: Path, val: bool = False) -> list[str]:
    """The script's options for a data set laid out as COCO's: FOLDER/train2017,
    FOLDER/annotations, ...
    """
    notes = folder / "annotations"
    args = ["--coco_image_path", folder / "train2017"]
    args += ["--annotation_path", notes / "instances_train2017.json"]
    if val:
        args += ["--val_image_path", folder / "val2017"]
        args += ["--val_annotation_path", notes / "instances_val2017.json"]
    return [str(arg) for arg in args]


# --- Two nodes -------------------------------------------------------------------------------


def _ip(command: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {command}: {done.stderr.strip()}")
    return done.stdout


def why_no_namespaces() -> str:
    """Empty where network namespaces can be made here, else the reason."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "nsenter", "unshare", "mount"):
        if not shutil.which(tool):
            return f"network namespaces need the command {tool} (packages iproute2 and util-linux)"
    name = f"demo-{os.getpid()}-{next(_counter)}-x"
    try:
        _ip(f"netns add {name}")
        _ip(f"-n {name} link add eth0 type veth peer name eth1")
        subprocess.run(["unshare", "-mu", "true"], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        _ip(f"netns del {name}", check=False)
    return ""


# What makes a namespace look like a machine: its own host name, /etc/hosts and /sys/class/net. A
# new sysfs hides /sys/fs/cgroup, without which slurmd refuses to start, so that is carried over.
# $1 host name, $2 hosts, $3 folder.
_ENTER = """
hostname "$1"
mount --bind "$2" /etc/hosts
if mount -t sysfs sysfs "$3" 2>/dev/null; then
    mount --rbind /sys/fs/cgroup "$3/fs/cgroup" 2>/dev/null || true
    mount --move "$3" /sys 2>/dev/null || { umount -l "$3"; }
fi
shift 3
exec "$@"
"""


def _sweep() -> None:
    """Remove namespaces whose maker was killed before it could."""
    listed = _ip("netns list", check=False)
    for name in re.findall(r"^(demo-\d+-\d+-\w)\b", listed, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _delete_namespace(name)


def _delete_namespace(name: str) -> None:
    for _ in range(100):
        pids = [int(pid) for pid in _ip(f"netns pids {name}", check=False).split()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.05)
    _ip(f"netns del {name}", check=False)


class NamespacePair:
    """Two nodes on one machine: namespaces `node0` (10.77.0.1) and `node1` (10.77.0.2), joined by
    interface eth0.

    Each has its own host name, /etc/hosts, loopback and /sys/class/net, and no way to anything
    outside. `rate` is a rate as tc writes it, such as "100mbit" or "1gbit", applied in both
    directions. A reason why it cannot work here skips the test. On exit every process in the
    namespaces is killed.
    """

    addresses = ("10.77.0.1", "10.77.0.2")
    hostnames = ("node0", "node1")
    interface = "eth0"

    def __init__(self, rate: str | None = None) -> None:
        self.rate = rate
        tag = f"demo-{os.getpid()}-{next(_counter)}"
        self.names = (f"{tag}-0", f"{tag}-1")
        self._started: list[Started] = []

    def __enter__(self) -> NamespacePair:
        reason = why_no_namespaces()
        require(not reason, reason)
        if self.rate:
            require(
                shutil.which("tc"), "a link with a rate needs the command tc (package iproute2)"
            )
        _sweep()
        self.folder = Path(tempfile.mkdtemp(prefix="demo-nodes-"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        for name in self.names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        link = self.interface
        _ip(f"-n {self.names[0]} link add {link} type veth peer name {link} netns {self.names[1]}")
        for node, name in enumerate(self.names):
            _ip(f"-n {name} addr add {self.addresses[node]}/24 dev {link}")
            # A veth counts the headers of a large packet once, but tbf those of all frames that it
            # would make: with large frames the interface's counters and the rate agree within 1 %.
            _ip(f"-n {name} link set {link} mtu 9000 up")
            (self.folder / f"sys{node}").mkdir()
            lines = [f"{self.addresses[n]} {self.hostnames[n]}\n" for n in (0, 1)]
            self.hosts(node).write_text("127.0.0.1 localhost\n" + "".join(lines))
        if self.rate:
            self.set_rate(self.rate)

    def set_rate(self, rate: str) -> None:
        """Shape the link, in both directions, to a rate such as "100mbit"."""
        for name in self.names:
            # 256 KB is more than the largest packet, and little of what is measured; a longer
            # queue than 50 ms would only add delay.
            qdisc = f"qdisc replace dev {self.interface} root tbf rate {rate}"
            command = f"tc -n {name} {qdisc} burst 256kb latency 50ms"
            subprocess.run(command.split(), check=True)

    def hosts(self, node: int) -> Path:
        """The file that is /etc/hosts on `node`; a test may rewrite it, in place."""
        return self.folder / f"hosts{node}"

    def link_down(self, node: int = 1) -> None:
        """Pull the cable: packets are lost without an error, connections stay open."""
        _ip(f"-n {self.names[node]} link set {self.interface} down")

    def link_up(self, node: int = 1) -> None:
        _ip(f"-n {self.names[node]} link set {self.interface} up")

    def enter(self, node: int, command: Sequence[object]) -> list[str]:
        """The command line that runs `command` on `node`; its process id stays that of the process
        started.
        """
        enter = f"nsenter --net=/run/netns/{self.names[node]} unshare -m -u sh -ec".split()
        facts = [self.hostnames[node], self.hosts(node), self.folder / f"sys{node}"]
        return [*enter, _ENTER, "sh", *map(str, facts), *map(str, command)]

    def popen(self, node: int, command: Sequence[object], **options: Any) -> Started:
        """Start a command on `node`, with the options of `Started`; it is killed at the latest
        when the pair is left.
        """
        started = Started(self.enter(node, command), shown=command, **options)
        self._started.append(started)
        return started

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _delete_namespace(name)
        for started in self._started:
            started.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- SLURM -----------------------------------------------------------------------------------


def why_no_slurm() -> str:
    """Empty where a SLURM cluster can be started here, else the reason."""
    for tool in ("slurmctld", "slurmd", "munged", "srun"):
        if not shutil.which(tool, path=_SBIN):
            return (
                f"a SLURM cluster needs the command {tool} (Debian packages slurm-wlm and munge)"
            )
    return why_no_namespaces()


_SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

# linuxproc and task/none: no cgroup is needed. config_overrides: the CPUs stated here count, not
# those of the machine, so two nodes fit a small one. cred_expire is also how long a requeued job
# waits before it starts again (default 120 s); the scheduler's own intervals are cut down to
# match. A job of partition `urgent` takes the nodes from one of `main`.
_SLURM_CONF = """
ClusterName=demo
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
KillWait=5
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node0 NodeAddr=10.77.0.1 CPUs=4 State=UNKNOWN
NodeName=node1 NodeAddr=10.77.0.2 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=40
PartitionName=urgent Nodes=ALL MaxTime=10 PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    """A SLURM cluster of two nodes, `node0` (with the controller) and `node1`, in a
    `NamespacePair`.

    The folder `self.folder` is the shared file system of both, as is every other path of the
    machine.
    """

    def __init__(self) -> None:
        self.pair = NamespacePair()
        self._daemons: list[tuple[str, subprocess.Popen]] = []

    def __enter__(self) -> SlurmCluster:
        reason = why_no_slurm()
        require(not reason, reason)
        self.pair.__enter__()
        try:
            # A socket's path may have 107 characters at most, and the usual temporary folders of
            # tests have more.
            self.folder = Path(tempfile.mkdtemp(prefix="demo-slurm-", dir="/tmp"))
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munged insists that others can reach its socket
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_SLURM_CONF.format(folder=folder).lstrip())
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # --force: a folder under /tmp, which others may write to, is otherwise refused.
        options = [
            f"--{name}={folder}/munge.{name.removesuffix('-file')}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        self._daemon("munged", 0, "munged", "--foreground", "--force", *options)
        self._wait((folder / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld", 0, "slurmctld", "-D", "-c")
        for node, name in enumerate(self.pair.hostnames):
            self._daemon(f"slurmd.{name}", node, "slurmd", "-D", "-N", name)
        self._wait(self._idle, "two idle nodes")

    def _idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", expect=None)
        return states.out.split() == ["idle", "idle"]

    def _env(self) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{_SBIN}",
        }

    def _daemon(self, name: str, node: int, *command: str) -> None:
        # Daemons carry no mark: a test's own processes are those that it starts through them.
        env = base_env("", self._env())
        del env[MARK]
        with (self.folder / f"{name}.out").open("wb") as out:
            daemon = subprocess.Popen(
                self.pair.enter(node, command),
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append((name, daemon))

    def _wait(self, condition: Callable[[], object], what: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [name for name, daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{', '.join(ended)} ended" if ended else f"waited {timeout:g} s"
                raise RuntimeError(f"SLURM cluster: {why}, without {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 15) -> str:
        """The end of each daemon's log, to be shown when something fails."""
        text = ""
        for file in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            end = file.read_text(errors="replace").splitlines()[-lines:]
            text += "\n".join([f"--- {file.name}", *end, ""])
        return text

    def start(
        self, *command: object, env: Mapping[str, str] | None = None, **options: Any
    ) -> Started:
        """Start a command on node0, such as `srun`, with the options of `Started`."""
        return self.pair.popen(0, command, env={**self._env(), **(env or {})}, **options)

    def run(
        self,
        *command: object,
        timeout: float = 60,
        expect: int | None = 0,
        clean: float | None = None,
        **options: Any,
    ) -> Run:
        """Run srun, sbatch, squeue, scontrol, ... on node0 to its end. `timeout`, `expect` and
        `clean` as in `Started.finish`, the rest as in `Started`.
        """
        return self.start(*command, **options).finish(timeout, expect, clean)

    def submit(self, script: Path | str, *args: object, **options: Any) -> int:
        """sbatch a script, with the options of `Started`; returns the job's id."""
        run = self.run("sbatch", "--parsable", script, *args, **options)
        return int(run.out.split()[-1])

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says of a job, such as JobState, Restarts, ExitCode."""
        out = self.run("scontrol", "--oneliner", "show", "job", job_id).out
        return dict(field.split("=", 1) for field in out.split() if "=" in field)

    def cancel_all(self) -> None:
        """End all jobs, so that the next test finds both nodes idle."""
        self.run("scancel", "--user=root", "--state=PENDING", expect=None)
        self.run("scancel", "--user=root", expect=None)
        self._wait(self._idle, "two idle nodes after all jobs were cancelled")

    def __exit__(self, *_: object) -> None:
        try:
            for _, daemon in reversed(self._daemons):
                daemon.terminate()
            deadline = time.monotonic() + 5
            while (
                any(daemon.poll() is None for _, daemon in self._daemons)
                and time.monotonic() < deadline
            ):
                time.sleep(0.05)
        finally:
            self.pair.__exit__()  # kills what is left, jobs included
            for _, daemon in self._daemons:
                daemon.wait(10)
            shutil.rmtree(getattr(self, "folder", "/nonexistent"), ignore_errors=True)
