"""What root can make of one machine: two nodes, namespaces joined by a link, and a small disk."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.processes import Run, Started, counter, require, start

# Beside its rate: the burst holds a segment that TCP hands down in one piece (64 KB).
SHAPE = "burst 128kb latency 100ms"


def _ip(command: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {command}: {done.stderr.strip()}")
    return done.stdout


def no_namespaces() -> str:
    """Why network namespaces cannot be made here; nothing if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "nsenter", "unshare", "mount"):
        if not shutil.which(tool):
            return f"network namespaces need the command {tool} (packages iproute2, util-linux)"
    name = f"demo-{os.getpid()}-{next(counter)}-x"
    try:
        _ip(f"netns add {name}")
        _ip(f"-n {name} link add eth0 type veth peer name eth1")
        subprocess.run(["unshare", "-mu", "true"], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        _ip(f"netns del {name}", check=False)
    return ""


def require_namespaces() -> None:
    """Skips a test where network namespaces cannot be made."""
    reason = no_namespaces()
    require(not reason, reason)


NAMELESS = 'ip link set lo up; hostname nowhere.example; mount --bind "$0" /etc/hosts; exec "$@"'


def nameless(tmp_path: Path, *command: object, timeout: float = 100, **env: str) -> Run:
    """A run on a machine of which nobody knows the name, and with no way to ask for one."""
    require_namespaces()
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    isolated = ["unshare", "--uts", "--mount", "--net", "sh", "-ec", NAMELESS, tmp_path / "hosts"]
    with start([*isolated, *command], env=env, cwd=tmp_path) as started:
        return started.finish(timeout)


def python_for(user: pwd.struct_passwd) -> dict[str, str]:
    """The variables of a Python that the user can run: this one may lie in a home of root."""
    code = "import torch, torchvision, pycocotools, PIL"
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*as_user, "sh", "-c", '"$0" -c "$1"', python, code]
        if subprocess.run(command, env=env, capture_output=True).returncode == 0:
            return {"PYTHON": python, "PYTHONPATH": env["PYTHONPATH"]}
    require(False, f"{user.pw_name} cannot run a Python that has torch")
    raise AssertionError("require has skipped or failed")


@contextlib.contextmanager
def real_quota(quota: int, period: int) -> Iterator[list[object]]:
    """The beginning of a command that runs in a cgroup of the kernel that has this CPU quota, in
    microseconds, and sees it as its own.
    """
    can = os.geteuid() == 0 and shutil.which("unshare")
    if can:
        can = not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    require(can, "a mount namespace needs root and unshare (util-linux), and not a chroot")
    v1, v2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    parent = v1 if v1.is_dir() else v2
    cgroup = parent / f"demo-{os.getpid()}-{next(counter)}"
    enter = 'echo $$ >"$0/cgroup.procs"; mount --bind "$0" "$1"; shift; exec "$@"'
    try:
        cgroup.mkdir()
        if parent == v1:
            (cgroup / "cpu.cfs_period_us").write_text(str(period))
            (cgroup / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (cgroup / "cpu.max").write_text(f"{quota} {period}")
        yield ["unshare", "--mount", "sh", "-ec", enter, cgroup, parent]
    except OSError as error:
        require(False, f"a cgroup with a CPU quota cannot be made here: {error}")
    finally:
        with contextlib.suppress(OSError):
            cgroup.rmdir()


# For a mount namespace. Its /dev has these alone, and perhaps a file that stands for a device.
_DEVICE = """
mount -t tmpfs none /dev
mknod -m 666 /dev/null c 1 3
mknod -m 666 /dev/urandom c 1 9
[ -z "$1" ] || mkdir -p "$(dirname "/dev/$1")"
[ -z "$1" ] || touch "/dev/$1"
shift
exec "$@"
"""


def with_device(name: str, unshare: bool = True) -> list[str]:
    """The beginning of a command that sees /dev/`name`, such as nvidia0, or no such device. A node
    of a NamespacePair has a mount namespace already.
    """
    require_namespaces()
    return [*["unshare", "--mount"] * unshare, "sh", "-ec", _DEVICE, "sh", name]


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
        tag = f"demo-{os.getpid()}-{next(counter)}"
        self.names = (f"{tag}-0", f"{tag}-1")
        self._started: list[Started] = []

    def __enter__(self) -> NamespacePair:
        require_namespaces()
        tc = shutil.which("tc") or not self.rate
        require(tc, "a link with a rate needs the command tc (package iproute2)")
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
        self.ip(0, f"link add {link} type veth peer name {link} netns {self.names[1]}")
        for node, name in enumerate(self.names):
            self.ip(node, f"addr add {self.addresses[node]}/24 dev {link}")
            # A veth counts the headers of a large packet once, but tbf those of all frames that it
            # would make: with large frames the interface's counters and the rate agree within 1 %.
            self.ip(node, f"link set {link} mtu 9000 up")
            (self.folder / f"sys{node}").mkdir()
            lines = [f"{self.addresses[n]} {self.hostnames[n]}\n" for n in (0, 1)]
            self.hosts(node).write_text("127.0.0.1 localhost\n" + "".join(lines))
            if self.rate:
                shaped = f"root tbf rate {self.rate} {SHAPE}"
                command = f"tc -n {name} qdisc replace dev {link} {shaped}"
                subprocess.run(command.split(), check=True)

    def hosts(self, node: int) -> Path:
        """The file that is /etc/hosts on `node`; a test may rewrite it, in place."""
        return self.folder / f"hosts{node}"

    def usual_hosts(self) -> None:
        """As Debian and Ubuntu write them: the own name is loopback, the other one unknown."""
        for node, name in enumerate(self.hostnames):
            self.hosts(node).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")

    def ip(self, node: int, *commands: str) -> None:
        """What the command ip does on a node, such as "link set eth0 mtu 1500"."""
        for command in commands:
            _ip(f"-n {self.names[node]} {command}")

    def second_cable(self, *names: str) -> None:
        """Joins the nodes once more, 10.78.0.1 and 10.78.0.2, by interfaces with these names."""
        end = f"peer name {names[1]} netns {self.names[1]}"
        self.ip(0, f"link add {names[0]} type veth {end}")
        for node, name in enumerate(names):
            self.ip(node, f"addr add 10.78.0.{node + 1}/24 dev {name}")
            self.ip(node, f"link set {name} mtu 9000 up")

    def output(self, node: int, *command: str, text: str = "") -> bytes:
        """What a command prints that is run on the network of a node."""
        words = ["ip", "netns", "exec", self.names[node], *command]
        return subprocess.run(
            words, input=text.encode(), check=True, stdout=subprocess.PIPE
        ).stdout

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


@contextlib.contextmanager
def start_two_nodes(command: Sequence[object], **options: Any) -> Iterator[Started]:
    """A start of tools/two_nodes.sh: fails when namespaces of it stay, and removes them also after
    another failure.
    """
    with start(command, **options) as started:
        try:
            yield started
        finally:
            started.kill()
            left = [path.name for path in Path("/run/netns").glob(f"two_nodes{started.pid}-[01]")]
            for name in left:
                _delete_namespace(name)
        assert not left


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, of a size such as "64m"."""
    require(os.geteuid() == 0, "mounting a small disk needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    require(done.returncode == 0, f"a disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
