"""tools/preflight.py by hand, before a job: it finds what is wrong on a node and between nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.nodes import NamespacePair
from support.processes import LONG, ROOT, Run, Started, require, start
from support.slurm import SlurmCluster

PREFLIGHT = ROOT / "tools" / "preflight.py"
PORT = 29500
HEALTHY = "reach each other in both directions, MTU 9000"


@pytest.fixture
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


def check(nodes: NamespacePair, node: int, **variables: object) -> Started:
    """Starts preflight on one of two nodes; `variables` are its environment, and win."""
    env = {
        "NNODES": 2,
        "NODE_RANK": node,
        "MASTER_ADDR": nodes.addresses[0],
        "CONNECT_TIMEOUT": 20,
    }
    env = {name: str(value) for name, value in {**env, **variables}.items()}
    return nodes.popen(node, [sys.executable, PREFLIGHT], env=env)


def check_both(nodes: NamespacePair, expect: int | None = 0, **variables: object) -> list[Run]:
    started = [check(nodes, node, **variables) for node in (0, 1)]
    return [one.finish(40, expect) for one in started]


def check_alone(nodes: NamespacePair, command: list, **variables: str | None) -> Run:
    """On node 0, which is not told of another one."""
    run = nodes.popen(0, command, env=variables).finish(40, expect=None)
    assert run.returncode == bool(wrong(run))
    return run


def wrong(run: Run, kind: str = "WRONG: ") -> list[str]:
    """Its findings, or its notes. Each line has to be of one of its three kinds."""
    lines = run.out.splitlines()
    assert all(line.startswith(("ok: ", "note: ", "WRONG: ")) for line in lines), run.tail()
    return [line.removeprefix(kind) for line in lines if line.startswith(kind)]


def firewall(nodes: NamespacePair, node: int, *rules: str) -> None:
    """Gives a node rules for what comes in."""
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    lines = ["table inet test {", "chain input {", "type filter hook input priority 0", *rules]
    text = "\n".join([*lines, "}", "}"])
    enter = ["nsenter", f"--net=/run/netns/{nodes.names[node]}", "nft", "-f", "-"]
    subprocess.run(enter, input=text, text=True, check=True, timeout=20)


# --- This node ---------------------------------------------------------------------------------


def test_interfaces_that_cannot_be_used_are_found(nodes):
    for name in ("one", "two"):
        nodes.ip(0, f"link add {name} up type veth peer name end{name}")
    nodes.ip(0, "link set endtwo up")
    run = check_alone(nodes, [sys.executable, PREFLIGHT], IFNAME="eth0,eth7,one,two")
    first, second, third = wrong(run)
    assert first.startswith("there is no eth7 ") and second.startswith("one is down")
    assert third.startswith("two is up but has no address") and run.returncode == 1
    run = check_alone(nodes, [sys.executable, PREFLIGHT])
    assert not wrong(run) and "ok: eth0 is up" in run.out


# Gives the kernel's files of hardware that no machine for tests has, for this process alone.
SLOW = """
echo 100 >"$1/speed"
mount --bind "$1/speed" /sys/class/net/eth0/speed
"""
ADAPTER = """
cp -a /sys/class/net "$1"
mount -t tmpfs none /sys/class
mv "$1/net" /sys/class
mkdir -p /sys/class/infiniband/mlx5_0/ports/1
cd /sys/class/infiniband/mlx5_0/ports/1
echo "STATE" >state
echo "100 Gb/sec (4X EDR)" >rate
mount -t tmpfs none /dev
mknod /dev/null c 1 3
mkdir /dev/infiniband
touch /dev/infiniband/uverbs0
"""
DRIVER = """
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
echo "NVRM version: NVIDIA UNIX x86_64 Kernel Module  VERSION  Fri" >/proc/driver/nvidia/version
"""


def with_files(folder: Path, files: str) -> list:
    """The command of preflight with such files of the kernel."""
    return ["sh", "-ec", files + 'shift; exec "$@"', "sh", folder, sys.executable, PREFLIGHT]


@pytest.mark.parametrize("ifname", ["eth0", ""])
def test_an_interface_that_states_a_slow_speed_is_found_and_a_fault_if_named(
    nodes, tmp_path, ifname
):
    run = check_alone(nodes, with_files(tmp_path, SLOW), IFNAME=ifname)
    (line,) = wrong(run, "WRONG: " if ifname else "note: eth0 ")
    assert "states a speed of only 100 Mb/s" in line and run.returncode == bool(ifname)


@pytest.mark.parametrize(
    ("ifname", "state", "found"),
    [
        ("", "4: ACTIVE", 0),
        ("", "1: DOWN", 0),
        ("mlx5_0", "4: ACTIVE", 0),
        ("mlx5_0", "1: DOWN", 1),
        ("mlx5_0:1", "1: DOWN", 1),
    ],
)
def test_an_infiniband_port_that_is_not_active_is_a_fault_if_named(
    nodes, tmp_path, ifname, state, found
):
    command = with_files(tmp_path, ADAPTER.replace("STATE", state))
    verbs = libibverbs(tmp_path / "lib")
    run = check_alone(nodes, command, IFNAME=ifname, LD_LIBRARY_PATH=verbs)
    assert len(wrong(run)) == run.returncode == found, run.tail()
    assert f"{state}, 100 Gb/sec (4X EDR)" in run.out


def libibverbs(folder: Path, empty: bool = False) -> str:
    """A folder with a library of that name, or with an empty file, which does not load."""
    folder.mkdir()
    (library,) = {*re.findall(r"\S+/libm[-.]\S+", Path("/proc/self/maps").read_text())}
    shutil.copy("/dev/null" if empty else library, folder / "libibverbs.so.1")
    return str(folder)


@pytest.mark.parametrize("ifname", ["mlx5_0", ""])
def test_an_adapter_without_what_a_process_needs_for_it_is_a_fault_if_named(
    nodes, tmp_path, ifname
):
    files = ADAPTER.replace("STATE", "4: ACTIVE") + "rm /dev/infiniband/uverbs0\n"
    verbs = libibverbs(tmp_path / "lib", empty=True)
    run = check_alone(nodes, with_files(tmp_path, files), IFNAME=ifname, LD_LIBRARY_PATH=verbs)
    lines = wrong(run, "WRONG: " if ifname else "note: ")
    for words in ("libibverbs.so.1 does not load: install", "there is no /dev/infiniband/uverbs*"):
        assert any(line.startswith(words) for line in lines), run.tail()
    assert run.returncode == bool(ifname)
    run = check_alone(nodes, with_files(tmp_path, files), IFNAME="eth0", LD_LIBRARY_PATH=verbs)
    assert not wrong(run) and "uverbs" not in run.out


# What preflight asks of PyTorch, on machines that no test has.
STUB = """
import types, warnings
__version__, version = "2.15.0", types.SimpleNamespace(cuda=CUDA)

class cuda:
    def is_available():
        if not USABLE:
            warnings.warn("CUDA initialization: Error 802 (Triggered internally at a.cpp:1)")
        return USABLE

    def device_count():
        return 2
"""


@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "words"),
    [
        ("535.104.05", "13.2", False, "535.104.05: it needs 580 or newer; install a newer driver"),
        ("470.57", "12.6", False, "470.57: it needs 525 or newer; install a newer driver"),
        ("580.65.06", None, False, "it has no CUDA; install another build"),
        ("580.65.06", "13.0", False, "CUDA initialization: Error 802; see nvidia-smi"),
        ("525.60.13", "12.6", True, ""),
        ("550.54", "13.0", True, ""),  # by NVIDIA's package for forward compatibility
    ],
)
def test_a_driver_that_pytorch_cannot_use_is_found(nodes, tmp_path, driver, cuda, usable, words):
    stub = STUB.replace("CUDA)", f"{cuda!r})").replace("USABLE", str(usable))
    (tmp_path / "torch.py").write_text(stub)
    variables = {"PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    command = with_files(tmp_path, DRIVER.replace("VERSION", driver))
    run = check_alone(nodes, command, CUDA_VISIBLE_DEVICES=None, **variables)
    assert len(wrong(run)) == (not usable) and words in "".join(wrong(run)), run.tail()
    assert not usable or f"can use the NVIDIA driver {driver}" in run.out
    for hidden in ("", "-1"):
        run = check_alone(nodes, command, CUDA_VISIBLE_DEVICES=hidden, **variables)
        assert not wrong(run) and f"note: CUDA_VISIBLE_DEVICES='{hidden}' hides" in run.out


def test_a_python_without_torch_is_found(tmp_path):
    python = tmp_path / "bin" / "python3"
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path]
    subprocess.run(command, check=True, timeout=60)
    with start([sys.executable, PREFLIGHT], env={"PYTHON": str(python)}) as started:
        run = started.finish(40, expect=1)
    assert f"{python} lacks" in wrong(run)[0]


# --- Between the nodes -------------------------------------------------------------------------


def test_healthy_nodes_have_no_finding_and_their_own_name_at_127_0_1_1_is_a_note(nodes):
    nodes.usual_hosts()
    for node, run in enumerate(check_both(nodes, IFNAME="eth0")):
        assert not wrong(run) and HEALTHY in run.out
        assert f"ok: eth0 is up: {nodes.addresses[node]}, 10000 Mb/s, MTU 9000" in run.out
        assert "torch, torchvision, pycocotools, PIL" in run.out
        (note,) = [line for line in run.lines() if f"note: node{node} is 127.0.1.1 here" in line]
        assert "export GLOO_SOCKET_IFNAME=" in note


@pytest.mark.parametrize(("node", "verdict"), [(0, "drop"), (1, "reject")])
def test_a_firewall_in_one_direction_is_named_by_both_nodes(nodes, node, verdict):
    """It lets MASTER_PORT through, as many do."""
    answers = "ct state established,related accept"
    others = f"tcp dport 1024-65535 {verdict}"
    firewall(nodes, node, answers, f"tcp dport {PORT} accept", others)
    for run in check_both(nodes, expect=1):
        (line,) = wrong(run)
        way = f"node {1 - node} (node{1 - node}) cannot reach node {node} (node{node})"
        assert line.startswith(f"{way} at {nodes.addresses[node]}, random port ")
        assert "firewall" in line


def test_a_firewall_that_closes_the_masters_port_is_asked_about_on_both_nodes(nodes):
    firewall(nodes, 0, f"tcp dport {PORT} drop")
    first, second = check_both(nodes, expect=1, CONNECT_TIMEOUT=3)
    assert "node 1 did not come" in wrong(first)[0] and "firewall" in wrong(first)[0]
    assert "cannot reach node 0" in wrong(second)[0] and "firewall" in wrong(second)[0]
    assert max(first.seconds, second.seconds) < 3 + 10


def test_a_network_in_ifname_that_does_not_join_the_nodes_is_found(nodes):
    nodes.ip(0, "link add own up type veth peer name end", "link set end up")
    nodes.ip(0, "addr add 10.78.0.1/24 dev own")
    started = [check(nodes, node, IFNAME=name) for node, name in enumerate(["own", "eth0"])]
    for one in started:
        assert any(
            "cannot reach node 0 (node0) at 10.78.0.1" in line for line in wrong(one.finish(40, 1))
        )


def test_mtus_that_differ_are_named(nodes):
    nodes.ip(1, "link set eth0 mtu 1500")
    for run in check_both(nodes, expect=1):
        (line,) = wrong(run)
        assert "MTU" in line and "9000" in line and "1500" in line


def test_a_switch_that_loses_large_packets_is_found(nodes):
    for node in (0, 1):
        firewall(nodes, node, "meta length > 2000 drop")
    for node, run in enumerate(check_both(nodes, expect=1)):
        (line,) = wrong(run)
        assert line.startswith(f"large packets from node {1 - node} (node{1 - node}) get lost")


def test_master_addr_that_is_loopback_on_its_node_is_found(nodes):
    """As where Debian's hosts file has the own name at 127.0.1.1; the other node knows it well."""
    nodes.usual_hosts()
    nodes.hosts(1).write_text(f"127.0.0.1 localhost\n{nodes.addresses[0]} node0\n")
    first, second = check_both(nodes, expect=None, MASTER_ADDR="node0")
    (line,) = wrong(first)
    assert "MASTER_ADDR node0 is 127.0.1.1" in line and first.returncode == 1
    assert not wrong(second) and second.returncode == 0


def test_a_port_that_is_taken_is_found(nodes):
    with nodes.popen(0, [sys.executable, "-u", "-m", "http.server", PORT]) as other:
        other.wait_for("Serving")
        first, second = check_both(nodes, expect=1, CONNECT_TIMEOUT=3)
    assert f"port {PORT} cannot be used" in wrong(first)[0]
    assert "another program at that port" in wrong(second)[0]
    assert second.seconds < 3 + 10


def test_a_node_rank_that_two_nodes_have_is_found(nodes):
    started = [check(nodes, node, NNODES=3, CONNECT_TIMEOUT=5) for node in (0, 1, 1)]
    run = started[0].finish(5 + 10, expect=1)
    assert "NODE_RANK=1 came twice" in wrong(run)[0]
    assert "node 2 did not come" in wrong(run)[1]


@LONG
def test_srun_tells_the_nodes_who_they_are(slurm: SlurmCluster):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, PREFLIGHT]
    run = slurm.run(*srun, env={"CONNECT_TIMEOUT": "30"})
    assert run.out.count(HEALTHY) == 2
