"""tools/preflight.py by hand, before a job: it finds what is wrong on a node and between nodes."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import preflight
from support.launchers import guarded
from support.nodes import NamespacePair
from support.processes import FACTOR, LONG, ROOT, Run, Started, require, start
from support.slurm import SlurmCluster

PREFLIGHT = [sys.executable, ROOT / "tools" / "preflight.py"]
PORT = 29500
HEALTHY = "reach each other in both directions, MTU 9000"


@pytest.fixture(scope="module")
def pair() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


@pytest.fixture
def nodes(pair: NamespacePair) -> Iterator[NamespacePair]:
    """The same for all tests, without what the last one changed."""
    hosts = pair.hosts(0).read_text()
    yield pair
    for node in (0, 1):
        pair.hosts(node).write_text(hosts)
        pair.ip(node, "link set eth0 mtu 9000")
        if shutil.which("nft"):
            pair.output(node, "nft", "flush", "ruleset")


def check(nodes: NamespacePair, node: int, **variables: object) -> Started:
    """Starts preflight on one of two nodes; `variables` are its environment, and win."""
    env: dict[str, object] = {"NNODES": 2, "NODE_RANK": node, "MASTER_ADDR": nodes.addresses[0]}
    env |= {"CONNECT_TIMEOUT": math.ceil(20 * FACTOR)} | variables
    return nodes.popen(node, PREFLIGHT, env={name: str(value) for name, value in env.items()})


def check_both(nodes: NamespacePair, expect: int | None = 0, **variables: object) -> list[Run]:
    started = [check(nodes, node, **variables) for node in (0, 1)]
    return [one.finish(40, expect) for one in started]


def check_alone(*before: object, nodes: NamespacePair | None = None, **variables: object) -> Run:
    """On this machine or on node 0, neither told of another one; `before` starts the command."""
    env = {name: value and str(value) for name, value in variables.items()}
    command = [*before, *PREFLIGHT]
    with nodes.popen(0, command, env=env) if nodes else start(command, env=env) as started:
        run = started.finish(40, expect=None)
    assert run.returncode == bool(wrong(run))
    return run


def wrong(run: Run, kind: str = "WRONG: ") -> list[str]:
    """Its findings, or its notes. Each line has to be of one of its three kinds."""
    lines = run.out.splitlines()
    assert all(line.startswith(("ok: ", "note: ", "WRONG: ")) for line in lines), run.tail()
    return [line.removeprefix(kind) for line in lines if line.startswith(kind)]


def firewall(nodes: NamespacePair, node: int, *rules: str) -> None:
    """Gives a node rules for what comes in, in place of those that it has."""
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    lines = [
        "flush ruleset",
        "table inet test {",
        "chain input {",
        "type filter hook input priority 0",
        *rules,
    ]
    nodes.output(node, "nft", "-f", "-", text="\n".join([*lines, "}", "}"]))


# --- This node ---------------------------------------------------------------------------------


def sysfs(folder: Path, *files: str) -> Path:
    """A folder in place of /sys, with files such as net/eth0/speed=100."""
    for file in files:
        name, _, text = file.partition("=")
        path = folder / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def test_interfaces_that_cannot_be_used_are_found_and_a_fault_if_named(nodes, tmp_path):
    for name in ("one", "two"):
        nodes.ip(0, f"link add {name} up type veth peer name end{name}")
    nodes.ip(0, "link set endtwo up")
    run = check_alone(nodes=nodes, IFNAME="eth0,eth7,one,two")
    first, second, third = wrong(run)
    assert first.startswith("there is no eth7 ") and second.startswith("one is down")
    assert third.startswith("two is up but has no address")
    run = check_alone(nodes=nodes)
    assert not wrong(run) and "ok: eth0 is up" in run.out
    slow = sysfs(tmp_path, "net/eth0/carrier=1", "net/eth0/speed=100")
    said = "eth0 states a speed of only 100 Mb/s"
    (line,) = wrong(check_alone(nodes=nodes, IFNAME="eth0", SYSFS_ROOT=slow))
    assert line.startswith(said)
    run = check_alone(nodes=nodes, SYSFS_ROOT=slow)
    assert not wrong(run) and f"note: {said}" in run.out


def libibverbs(folder: Path, empty: bool = False) -> str:
    """A folder with a library of that name, or with an empty file, which does not load."""
    folder.mkdir()
    (library,) = {*re.findall(r"\S+/libm[-.]\S+", Path("/proc/self/maps").read_text())}
    shutil.copy("/dev/null" if empty else library, folder / "libibverbs.so.1")
    return str(folder)


# For one process on a node that has an adapter's device, and for one that has none.
DEVICE = """
mount -t tmpfs none /dev
mknod /dev/null c 1 3
mkdir /dev/infiniband
[ -z "$1" ] || touch "/dev/infiniband/$1"
shift
exec "$@"
"""


@pytest.mark.guards("port-not-active")
def test_adapters_that_cannot_be_used_are_found_and_a_fault_if_named(nodes, tmp_path):
    device, without = (["sh", "-ec", DEVICE, "sh", name] for name in ("uverbs0", ""))
    files = ("0/ports/1/state=1: DOWN", "0/ports/1/rate=100 Gb/sec", "1/ports/1/state=1: DOWN")
    down = [f"infiniband/mlx5_{file}" for file in files]
    one = sysfs(tmp_path / "one", *down, "infiniband/mlx5_0/ports/2/state=4: ACTIVE")
    none = sysfs(tmp_path / "none", *down)
    loads = libibverbs(tmp_path / "loads")
    fine = {"nodes": nodes, "LD_LIBRARY_PATH": loads, "SYSFS_ROOT": one}
    run = check_alone(*device, **fine, IFNAME="mlx5_0,mlx5_0:1,mlx5_0:2,mlx5_1")
    first, second = wrong(run)
    assert first.startswith("no port of mlx5_0:1 is ACTIVE ['1: DOWN, 100 Gb/sec']")
    assert second.startswith("no port of mlx5_1 is ACTIVE")
    for line in ("libibverbs loads", "/dev/infiniband has ['uverbs0']"):
        assert f"ok: {line}\n" in run.out
    run = check_alone(*device, **fine)  # takes those that are ready
    assert not wrong(run) and "adapter mlx5_0" in run.out and "mlx5_1" not in run.out
    run = check_alone(*device, **fine | {"SYSFS_ROOT": none})
    assert not wrong(run) and "note: no port of mlx5_1 is ACTIVE" in run.out
    missing = fine | {"LD_LIBRARY_PATH": libibverbs(tmp_path / "empty", empty=True)}
    words = ("libibverbs.so.1 does not load: install", "there is no /dev/infiniband/uverbs*")
    # A job over another network does not need them.
    for names, kind, count in (("mlx5_0", "WRONG: ", 1), ("", "note: ", 1), ("eth0", "", 0)):
        run = check_alone(*without, **missing, IFNAME=names)
        assert [run.out.count(f"{kind}{start}") for start in words] == [count] * 2, run.tail()


@pytest.mark.guards("preflight-memlock")
def test_too_little_memory_that_may_be_locked_is_found(monkeypatch, capsys):
    """8 MiB, which many systems give, is too little; root may lock all."""
    said = []
    for user, limit in ((1000, 8 << 20), (1000, 4 << 30), (1000, resource.RLIM_INFINITY), (0, 0)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        preflight.check_verbs(named=True)
        said.append("WRONG: only 8192 KiB may be locked" in capsys.readouterr().out)
    assert said == [True, False, False, False]


# What preflight asks of PyTorch, on machines that no test has.
STUB = """
import types, warnings
__version__, version = "2.15.0", types.SimpleNamespace(cuda="13.2")

class cuda:
    def is_available():
        warnings.warn("CUDA initialization: Error 802 (Triggered internally at a.cpp:1)")

    def device_count():
        return 2
"""
DRIVER = """
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
echo "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Fri" >/proc/driver/nvidia/version
exec "$@"
"""


def test_what_the_kernel_says_of_the_driver_and_pytorch_of_the_gpus_is_told(nodes, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(STUB)
    variables = {"PYTHONPATH": tmp_path, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": None}
    (line,) = wrong(check_alone("sh", "-ec", DRIVER, "sh", nodes=nodes, **variables))
    assert line == (
        "torch 2.15.0 (CUDA 13.2) cannot use the NVIDIA driver 580.65.06: "
        "CUDA initialization: Error 802; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.guards("old-driver")
@pytest.mark.parametrize(
    ("driver", "cuda", "usable", "words"),
    [
        ("535.104.05", "13.2", False, "535.104.05: it needs 580 or newer; install a newer driver"),
        ("470.57", "12.6", False, "470.57: it needs 525 or newer; install a newer driver"),
        ("580.65.06", None, False, "it has no CUDA; install another build"),
        ("580.65.06", "13.0", False, "the reason; see nvidia-smi"),
        ("525.60.13", "12.6", True, "can use the NVIDIA driver 525.60.13"),
        ("550.54", "13.0", True, ""),  # by NVIDIA's package for forward compatibility
    ],
)
def test_a_driver_that_pytorch_cannot_use_is_found(
    monkeypatch, capsys, driver, cuda, usable, words
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "driver_version", lambda: driver)
    says = json.dumps(["2.15.0", cuda, 2, usable, "the reason"])
    monkeypatch.setattr(preflight, "ask", lambda *_: says)
    preflight.check_driver("python")
    out = capsys.readouterr().out
    assert out.startswith("ok: " if usable else "WRONG: ") and words in out
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        preflight.check_driver("python")
        out = capsys.readouterr().out
        assert out.startswith(f"note: CUDA_VISIBLE_DEVICES='{hidden}' hides")


@pytest.mark.guards("preflight-exit-code", "preflight-python")
def test_the_python_that_the_launchers_would_take_is_looked_at(tmp_path):
    """One without torch that is named, then one that is active."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS "$@"\n')
    python.chmod(0o755)
    (line,) = wrong(check_alone(PYTHON=python))
    assert line.startswith(f"PYTHON is '{python}', which has no torch")
    run = check_alone(PYTHON=None, VIRTUAL_ENV=sys.prefix)
    assert not wrong(run) and f"ok: {sys.prefix}/bin/python3 has torch" in run.out


# --- Between the nodes -------------------------------------------------------------------------


def test_healthy_nodes_have_no_finding_and_their_own_name_at_127_0_1_1_is_a_note(nodes):
    nodes.usual_hosts()
    for node, run in enumerate(check_both(nodes, IFNAME="eth0")):
        assert not wrong(run) and HEALTHY in run.out
        assert f"ok: eth0 is up: {nodes.addresses[node]}, 10000 Mb/s, MTU 9000" in run.out
        assert "torch, torchvision, pycocotools and pillow" in run.out
        (note,) = [line for line in run.lines() if f"note: node{node} is 127.0.1.1 here" in line]
        assert "export GLOO_SOCKET_IFNAME=" in note


FIREWALLS = guarded(("preflight-firewall", 0, "drop"), ("preflight-firewall-of-1", 1, "reject"))


@pytest.mark.parametrize(("node", "verdict"), FIREWALLS)
def test_a_firewall_in_one_direction_is_named_by_both_nodes(nodes, node, verdict):
    """It lets MASTER_PORT through, as many do."""
    answers, others = "ct state established,related accept", f"tcp dport 1024-65535 {verdict}"
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
    assert max(first.seconds, second.seconds) < 3 + 10 * FACTOR


@pytest.mark.guards("preflight-address", "preflight-mtu")
def test_a_network_in_ifname_that_does_not_join_the_nodes_and_mtus_that_differ_are_found(nodes):
    nodes.ip(0, "link add own mtu 1500 up type veth peer name end", "link set end up")
    nodes.ip(0, "addr add 10.78.0.1/24 dev own")
    for one in [check(nodes, node, IFNAME=name) for node, name in enumerate(["own", "eth0"])]:
        first, second = wrong(one.finish(40, 1))
        assert first.startswith("node 1 (node1) cannot reach node 0 (node0) at 10.78.0.1, ")
        assert re.search(r"have MTU (1500 and 9000|9000 and 1500): give both the same", second)
    nodes.ip(0, "link del own")


@pytest.mark.guards("preflight-large", "preflight-large-on-ifname")
def test_a_switch_that_loses_large_packets_is_found_on_the_network_that_the_job_will_use(nodes):
    nodes.ip(0, f"link add own mtu 9000 up type veth peer name own netns {nodes.names[1]}")
    nodes.ip(1, "link set own mtu 9000 up")
    for node in (0, 1):
        nodes.ip(node, f"addr add 10.78.0.{node + 1}/24 dev own")
    for lossy, named in (("eth0", "eth0"), ("own", "own"), ("own", "eth0")):
        for node in (0, 1):
            firewall(nodes, node, f'iifname "{lossy}" meta length > 2000 drop')
        for node, run in enumerate(check_both(nodes, expect=int(lossy == named), IFNAME=named)):
            lines = [f"large packets from node {1 - node} (node{1 - node}) get lost: "]
            lines = lines if lossy == named else []
            assert [line.partition("see")[0] for line in wrong(run)] == lines
    nodes.ip(0, "link del own")


@pytest.mark.guards("preflight-loopback")
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
        first, second = check_both(nodes, expect=1, CONNECT_TIMEOUT=1)
    assert f"port {PORT} cannot be used" in wrong(first)[0]
    assert "another program at that port" in wrong(second)[0]
    assert second.seconds < 1 + 10 * FACTOR


@pytest.mark.guards("preflight-node-rank")
def test_a_node_rank_that_two_nodes_have_is_found(nodes):
    started = [
        check(nodes, node, NNODES=3, CONNECT_TIMEOUT=math.ceil(5 * FACTOR)) for node in (0, 1, 1)
    ]
    run = started[0].finish(15, expect=1)
    assert "NODE_RANK=1 came twice" in wrong(run)[0]
    assert "node 2 did not come" in wrong(run)[1]


@pytest.mark.guards("preflight-port")
def test_in_a_job_step_it_listens_where_the_launcher_will(tmp_path):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = check_alone(**step, PATH=path, CONNECT_TIMEOUT=1)
    assert "node 1 did not come, localhost port 20280" in wrong(run)[-1]


@LONG
def test_srun_tells_the_nodes_who_they_are(slurm: SlurmCluster):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *PREFLIGHT]
    run = slurm.run(*srun, env={"CONNECT_TIMEOUT": str(math.ceil(30 * FACTOR))})
    assert run.out.count(HEALTHY) == 2
