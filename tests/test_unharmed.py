"""What a lost terminal, a full disk, odd interfaces and stray processes may not harm."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import preflight
import supervise
import test_networks as networks
import test_preflight
from launcher import addresses, hang_report, process_tree, root_cause
from launcher import networks as network_series
from launcher.errors import Stopped
from support.forks import ForkServer, write
from support.nodes import NamespacePair, _ip, namespaces, require_namespaces, small_disk
from support.processes import ROOT, Run, Started, require, start, wait_until
from test_first_cause import SUPERVISE
from test_layout import chosen_interfaces
from test_supervise import Folder as Supervised

TOOLS = ROOT / "tools"
SOON = 3  # seconds for what takes one: this machine may be busy


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


@pytest.fixture
def folder(tmp_path: Path) -> networks.Folder:
    return networks.Folder(tmp_path)


def supervise_it(path: Path, body: str, before: tuple = (), **env: str) -> Started:
    """supervise.py, with a program that has torchrun's name."""
    return start([*before, *Supervised(path).command(body=body)], env=env, cwd=path)


# --- A lost terminal -------------------------------------------------------------------------

UNTIL_GO = "trap 'exit 4' TERM\necho ready; while [ ! -e go ]; do sleep 0.05; done"


def test_nohup_keeps_a_run_from_a_hang_up(tmp_path):
    with supervise_it(tmp_path, UNTIL_GO, before=("nohup",)) as started:
        started.wait_for("^ready")
        started.signal(signal.SIGHUP)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        assert "SIGHUP" not in started.finish(20).out


WAITING = {
    "preflight": lambda folder: [sys.executable, TOOLS / "preflight.py", *NODE_0],
    "supervise": lambda folder: [
        *[sys.executable, TOOLS / "supervise.py", "--log", folder.path / "log", "--", "torchrun"],
        *[*NODE_0, "train.py"],
    ],
    "networks": lambda folder: ["bash", folder.path / "launch_multinode.sh", "x"],
    "launcher": lambda folder: ["bash", folder.path / "launch_multinode.sh", "x"],
}
NODE_0 = ["--nnodes=2", "--node_rank=0", "--rdzv_endpoint=10.77.0.1:29500"]


def wait_alone(nodes, folder, name: str, before: tuple = ()) -> Started:
    """Node 0 of two, which waits for the other one."""
    more = {"NETWORKS": networks.BOTH} if name == "networks" else {}
    command = [*before, *WAITING[name](folder)]
    started = nodes.popen(0, command, env=folder.env(0, **more), cwd=folder.path)
    started.wait_for("node 0 waits up to")
    return started


@pytest.mark.parametrize("name", ["preflight", "networks"])
def test_nohup_keeps_the_wait_for_others_from_a_hang_up(nodes, folder, name):
    started = wait_alone(nodes, folder, name, before=("nohup",))
    started.signal(signal.SIGHUP)
    time.sleep(0.5)
    assert started.process.poll() is None
    started.signal(signal.SIGTERM)
    assert "stopped by " in started.finish(10, expect=143).out


# --- Ctrl-C and SIGTERM while something waits ------------------------------------------------

CODES = {"SIGINT": 130, "SIGTERM": 143}


def end_by(started: Started, name: str) -> Run:
    """By a signal to the started process alone."""
    started.signal(signal.Signals[name])
    began = time.monotonic()
    run = started.finish(20, expect=CODES[name])
    assert time.monotonic() - began < SOON, run.tail()
    return run


@pytest.mark.parametrize("signal_name", CODES)
@pytest.mark.parametrize("name", WAITING)
def test_signal_ends_the_wait_for_others_at_once(nodes, folder, name, signal_name):
    run = end_by(wait_alone(nodes, folder, name), signal_name)
    assert "stopped by " in run.out and "Traceback" not in run.out


SLOW_SAMPLE = """
import time
print("SAMPLE", flush=True)
time.sleep(60)
"""


def prepares(folder, command: str) -> Started:
    """A command that makes the sample, which takes long here."""
    (folder.path / "tools/make_sample_coco.py").write_text(SLOW_SAMPLE)
    env = {"PYTHON": sys.executable, "LOG_DIR": str(folder.path / "logs")}
    started = start(["bash", folder.path / command], env=env, cwd=folder.path)
    started.wait_for("^SAMPLE")
    return started


@pytest.mark.parametrize("signal_name", CODES)
@pytest.mark.parametrize("command", ["launch_single.sh", "tools/two_nodes.sh"])
def test_signal_ends_what_prepares_a_run_at_once(folder, command, signal_name):
    if command == "tools/two_nodes.sh":
        require_namespaces()
    run = end_by(prepares(folder, command), signal_name)
    assert "stopped by " in run.lines()[-1]


def test_signal_ends_an_install_that_a_launcher_waits_for(folder):
    """It is a program of its own, whose answer the launcher needs."""
    install = folder.path / "tools/launcher/python_env.sh"
    install.write_text("echo INSTALLS >&2\nexec sleep 60\n")
    with start(["bash", folder.path / "launch_single.sh", "x"], cwd=folder.path) as started:
        started.wait_for("^INSTALLS")
        end_by(started, "SIGINT")


def test_connection_that_nobody_answers_is_given_up_on_a_signal():
    """A full queue of connections takes no more: packets are lost, as at a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as s:
        for _ in range(4):
            waiting = s.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        began = time.monotonic()

        def look() -> None:
            if time.monotonic() - began > 0.3:
                raise Stopped

        with pytest.raises(Stopped):
            addresses.connect(*server.getsockname(), 20, look)
        assert time.monotonic() - began < SOON
        with pytest.raises(OSError, match="timed out"):
            addresses.connect(*server.getsockname(), 0.5, lambda: None)


# --- NCCL's text -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stdout", "FIFO"])
def test_nccl_file_that_is_none_is_not_read(tmp_path, kind):
    path = "/dev/stdout" if kind == "stdout" else str(tmp_path / "fifo")
    if kind == "FIFO":
        os.mkfifo(path)
    # To open either for reading would wait for somebody who writes.
    with supervise_it(tmp_path, "echo done", NCCL_DEBUG_FILE=path) as started:
        began = time.monotonic()
        wait_until(lambda: started.process.poll() is not None, 20, "the end")
        run = started.finish(1)
    assert f"NCCL_DEBUG_FILE={path} is no file that can be read afterwards" in run.out
    assert time.monotonic() - began < 20


def test_fifo_among_nccls_files_is_not_read(tmp_path):
    """One that only the pattern's own files show, when the run is over."""
    os.mkfifo(tmp_path / "nccl.1.log")
    found: list = []
    pattern = str(tmp_path / "nccl.%p.log")
    reader = threading.Thread(
        target=lambda: found.append(root_cause.nccl_warnings(pattern, 0)), daemon=True
    )
    reader.start()
    reader.join(5)
    if reader.is_alive():  # let it go before the test fails
        os.close(os.open(tmp_path / "nccl.1.log", os.O_WRONLY | os.O_NONBLOCK))
    assert found == [[]]


MOST = 2 << 20  # bytes of memory for a text of 16 MB


@pytest.mark.parametrize("line", [b"x" * 999 + b"\n", b"x" * 1000], ids=["lines", "no line ends"])
def test_nccl_text_is_read_in_little_memory(tmp_path, line):
    path = tmp_path / "nccl.log"
    with path.open("wb") as file:
        for _ in range(16):
            file.write(line * 1000)
        file.write(b"\nhost:1:2 [0] x.cc:1 NCCL WARN the last line\n")
    tracemalloc.start()
    try:
        (found,) = root_cause.nccl_warnings(str(path), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.endswith(b"NCCL WARN the last line") and peak < MOST


# --- Stray processes -------------------------------------------------------------------------


def test_sweep_leaves_alone_what_the_run_did_not_start(tmp_path):
    """What the shell has started that became the launcher, and what comes to it later as to the
    first process of a container; not what the run has left behind."""
    require(process_tree.LIBC, "only Linux tells which processes there are")
    body = "setsid sleep 303 & touch began; while [ ! -e adopted ]; do sleep 0.05; done; sleep 0.3"
    python, _, *words = Supervised(tmp_path).command(body=body)
    later = "{ while [ ! -e began ]; do sleep 0.05; done; sleep 302 & touch adopted; } & "
    line = shlex.join(map(str, [python, "-c", SUPERVISE, *words]))
    line = f"sleep 301 & {later} exec {line}"
    command = ["bash", "-c", line]
    with start(command, env={"GRACE": "2"}, cwd=tmp_path) as started:
        run = started.finish(30, clean=None)
        left = [pid for n in (301, 302) for pid in started.pids(f"sleep {n}")]
        assert len(left) == 2 and not started.pids("sleep 303"), run.tail()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert "killing what is left of this attempt: 1 process\n" in run.out


def test_process_is_told_by_its_environment():
    """One that shows none, as under a title that it gave itself, may be a rank."""
    require(process_tree.LIBC, "only Linux tells which processes there are")
    for env, own in (({}, True), ({"PATH": "/"}, False), (process_tree.OWN, True)):
        with subprocess.Popen(["/bin/sleep", "60"], env=env) as child:
            found = process_tree.has_own_mark(child.pid)
            child.kill()
        assert found == own, env


# --- Interfaces ------------------------------------------------------------------------------

MORE = ("10.77.0.{}1/24", "10.78.0.{}/24", "fd77::{}/64")


@pytest.fixture
def many() -> Iterator[NamespacePair]:
    """Two nodes with four addresses each: a second one, a second subnet, IPv6."""
    with NamespacePair() as pair:
        for node in (0, 1):
            for address in MORE:
                nodad = "nodad" if ":" in address.format(0) else ""
                pair.ip(node, f"addr add {address.format(node + 1)} dev eth0 {nodad}")
        yield pair


MASTERS = [address.format(1).partition("/")[0] for address in MORE]


@pytest.mark.parametrize("master", MASTERS)
def test_each_address_of_an_interface_leads_to_it(many, master):
    host = f"[{master}]" if ":" in master else master
    for ended in test_preflight.run(many, host=host):
        assert ended.out == "eth0\n"
        assert not test_preflight.lines(ended, "warning")


def test_script_finds_an_interface_by_each_of_its_addresses(demo: ForkServer, many):
    job = demo.run((), 2, call=chosen_interfaces, nodes=many, addresses=MASTERS)
    assert job.result(0) == job.result(1) == ["eth0"] * len(MASTERS)


def test_network_without_an_address_fails_on_both_nodes_and_the_series_goes_on(folder):
    with NamespacePair() as nodes:
        nodes.ip(0, f"link add bare type veth peer name bare netns {nodes.names[1]}")
        for node in (0, 1):
            nodes.ip(node, "link set bare up")
        runs = folder.run(nodes, "x", NETWORKS="bare=bare two=eth0", expect=1)
    text = "bare is up but has no address, which sockets need"
    assert f"error: {text}" in networks.errors(runs[1])[0]
    for run in runs:
        (line,) = networks.errors(run)
        assert text in line and "networks.py: network bare failed with code 1\n" in run.out
        assert [r["env"]["RUN_NAME"] for r in networks.reports(run)] == ["two"]
    assert "COMPARED bare=logs/series/bare two=logs/series/two" in runs[0].out
    log = folder.path / "logs/series/bare/node0.log"
    assert text in log.read_text()  # the root cause, where compare_logs.py looks for it


# --- A full disk, and what cannot be written -------------------------------------------------


def test_full_disk_does_not_change_which_network_is_chosen(folder):
    logs = folder.path / "logs/ethernet"
    logs.mkdir(parents=True)
    (logs / "node0.log").symlink_to("/dev/full")
    env = {"NETWORK": "ethernet", "IFNAME": "lo", "NCCL_IB_DISABLE": "0", "PYTHON": sys.executable}
    command = ["bash", folder.path / "launch_single.sh", "x"]
    unset = {"NCCL_NET": None, "LOG_DIR": None}
    with start(command, env={**networks.WITH_STAND_IN, **env, **unset}, cwd=folder.path) as one:
        run = one.finish(30)
    assert "would set NCCL_IB_DISABLE=1, but it is set to '0'" in run.out
    found = networks.reports(run)[0]["env"]
    assert (found["NCCL_IB_DISABLE"], found["NCCL_NET"]) == ("0", "Socket")


@pytest.mark.parametrize(
    ("words", "log"),
    [
        (["preflight.py", "--nnodes=1", "--log_dir=/proc", "--run_name=none"], "none/node0.log"),
        (["supervise.py", "--log=/proc/none/log", "--", "true"], "none/log"),
    ],
)
def test_log_that_cannot_be_written_is_one_line(words, log):
    name, *options = words
    (line,) = start([sys.executable, TOOLS / name, *options]).finish(20, expect=1).lines()
    assert line.startswith(f"{name}: error: the log /proc/{log} cannot be written")


@pytest.fixture
def comparison(tmp_path, monkeypatch, capfd):
    """compare(body): networks.py with such a compare_logs.py; exit code, stdout, stderr."""
    monkeypatch.setattr(network_series, "TOOLS", tmp_path)
    monkeypatch.setenv("DEMO_NOTE", "Emulated: here\n")
    monkeypatch.setattr(network_series.importlib.util, "find_spec", lambda name: True)
    series = SimpleNamespace(networks={"a": "x", "b": "y"}, folder=tmp_path / "series")
    series.folder.mkdir()

    def compare(body: str) -> tuple[int, str, str]:
        (tmp_path / "compare_logs.py").write_text(f"import sys\nprint('THE TABLE')\n{body}\n")
        code = network_series.Comparison.compare(series)
        return code, *capfd.readouterr()

    compare.folder = series.folder
    return compare


def test_report_that_cannot_be_written_is_printed(comparison):
    (comparison.folder / "compare.md").symlink_to("/dev/full")
    code, out, err = comparison("")
    assert (code, out) == (1, "Emulated: here\nTHE TABLE\n")
    text = f"error: {comparison.folder}/compare.md cannot be written (No space left on device)"
    assert err.splitlines()[-1].startswith(f"networks.py: {text}")


def test_earlier_picture_is_not_shown_as_this_ones(comparison):
    (comparison.folder / "compare.png").write_text("of yesterday")
    code, out, err = comparison("sys.exit('compare_logs.py: error: no picture')")
    assert (code, out) == (1, "Emulated: here\nTHE TABLE\n")
    assert f"this is {comparison.folder}/compare.md\n" in err and "its picture" not in err
    (kept,) = comparison.folder.glob("compare.png*")
    assert kept.name != "compare.png" and kept.read_text() == "of yesterday"


# --- Ports, orphans, /dev/shm ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "restarts", "ok"), [(65535, 0, True), (65535, 1, False), (65534, 1, True)]
)
def test_last_port_is_allowed_by_all_that_fit(tmp_path, port, restarts, ok):
    """As by launch_multinode.sh: each start has a port of its own."""
    static = ["--nnodes=2", "--node_rank=1", f"--rdzv_endpoint=10.0.0.1:{port}"]
    options = ["--log", str(tmp_path / "log"), f"--restarts={restarts}"]
    error = contextlib.nullcontext() if ok else pytest.raises(SystemExit, match="2")
    with error:
        supervise.parse_arguments([*options, "--", "torchrun", *static, "train.py"])
    with error:
        preflight.parse_arguments([*static, f"--starts={restarts + 1}"])


@pytest.mark.parametrize("port", [0, 65536])
@pytest.mark.parametrize("tool", ["preflight.py", "supervise.py"])
def test_port_that_is_none_is_one_line(tmp_path, tool, port):
    words = ["--nnodes=2", "--node_rank=1", f"--rdzv_endpoint=10.0.0.1:{port}"]
    if tool == "supervise.py":
        words = ["--log", tmp_path / "log", "--", "torchrun", *words, "train.py"]
    (line,) = start([sys.executable, TOOLS / tool, *words]).finish(20, expect=2).lines()
    assert f"{tool}: error: port {port}" in line and "65535" in line


# A parent that is killed in the moment before its child has tied itself to it: LIBC.prctl comes
# when it is gone.
TOO_LATE = f"""
import os, signal, sys, time
sys.path.insert(0, {str(TOOLS)!r})
from launcher import process_tree
real, parent = process_tree.LIBC, os.getpid()
class Late:
    def prctl(self, *words):
        if os.getpid() != parent:
            os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent and os.getpid() != parent:
            time.sleep(0.01)
        return real.prctl(*words)
process_tree.LIBC = Late()
"""
OF_NETWORKS = """
from pathlib import Path
from launcher import networks
networks.LAUNCHER = Path(sys.argv[1])
os.environ.update(NODE_RANK="0", MASTER_PORT="1", CONNECT_TIMEOUT="1", PROBE="0", RESTARTS="0")
os.environ.update(NNODES="2", MASTER_ADDR="x")
networks.Comparison({"a": "x"}, Path("."), []).train(0, "a")
"""


def test_launcher_of_a_network_is_no_orphan(tmp_path):
    """Also where the series is killed while it starts it."""
    require(process_tree.LIBC, "only Linux ties a process to its parent")
    (tmp_path / "launcher.sh").write_text("echo orphan >orphan")
    command = [sys.executable, "-c", TOO_LATE + OF_NETWORKS, tmp_path / "launcher.sh"]
    start(command, cwd=tmp_path).finish(20, expect=-signal.SIGKILL)
    assert not (tmp_path / "orphan").exists()


def test_nodes_of_a_two_nodes_that_is_gone_do_not_start(folder):
    """Killed in the moment before setpriv ties a launcher to it."""
    require_namespaces()
    (folder.path / "setpriv").write_text(
        '#!/bin/sh\nof_parent() { grep -qs two_nodes.sh "/proc/$PPID/cmdline"; }\n'
        'if of_parent; then kill -KILL "$PPID"; fi\nwhile of_parent; do sleep 0.05; done\n'
        'shift 2\nexec "$@"\n'
    )
    (folder.path / "setpriv").chmod(0o755)
    env = {"PATH": f"{folder.path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    command = ["bash", folder.path / "tools/two_nodes.sh", "--", "x"]
    started = start(command, env={**networks.WITH_STAND_IN, **env}, cwd=folder.path)
    try:
        started.finish(20, expect=-signal.SIGKILL)
    finally:
        for name in namespaces(started):
            _ip(f"netns del {name}")
    assert not (folder.path / "logs").exists()


def test_preflight_of_a_launcher_that_is_gone_ends():
    require(process_tree.LIBC, "only Linux ties a process to its parent")
    command = [sys.executable, TOOLS / "preflight.py", "--nnodes=1", "--parent"]
    assert not start([*command, os.getpid()]).finish(20).out
    start([*command, "1"]).finish(20, expect=1)


def note_phases(demo, result, disk):
    """The phases that the supervisor reads, first with room for them and then without."""
    sys.path.insert(0, os.environ["TOOLS"])
    from launcher import hang_report

    os.environ["DEMO_PHASES"] = disk
    process, found = demo.Process(rank=3), []
    for phase in ("step 1", "step 2"):
        process.note_phase(phase)
        phases = hang_report.read_phases(disk)
        found.append(hang_report.standing(phases, [], {3}, 300))
        with contextlib.suppress(OSError), open(f"{disk}/rest", "wb", 0) as rest:
            while rest.write(bytes(4096)):
                pass
    write(result, found)


def test_full_memory_for_phases_is_said(demo: ForkServer, tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        env = {"TOOLS": str(TOOLS)}
        found = demo.run((), 1, call=note_phases, disk=str(disk), env=env).result()
    assert found == [[[3, "was in", "step 1"]], [[3, "was in", hang_report.UNNOTED]]]
    line = hang_report.describe_standing(
        {0: [[0, "waited in", hang_report.UNNOTED]], 1: found[1]}, [], ["node 0", "node 1"]
    )
    assert line.startswith(
        f"rank 3 was in {hang_report.UNNOTED}; rank 0 waited in {hang_report.UNNOTED}"
    )
