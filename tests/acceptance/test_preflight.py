"""tools/preflight.py by hand, before a job: it finds what is wrong on a node and between nodes."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import preflight
from support.nodes import NamespacePair, with_device
from support.processes import FACTOR, ROOT, Run, Started, require, start
from support.slurm import SlurmCluster

PREFLIGHT = [sys.executable, ROOT / "tools" / "preflight.py"]
PORT = 29500
HEALTHY = "ok: this node was looked at; node "


@pytest.fixture
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


def check(nodes: NamespacePair, node: int, **variables: object) -> Started:
    """Starts preflight on one of two nodes; `variables` are its environment, and win."""
    env: dict[str, object] = {"NNODES": 2, "NODE_RANK": node, "MASTER_ADDR": nodes.addresses[0]}
    env |= {"CONNECT_TIMEOUT": math.ceil(20 * FACTOR)} | variables
    return nodes.popen(node, PREFLIGHT, env={name: str(value) for name, value in env.items()})


def check_both(
    nodes: NamespacePair, expect: int | None = 0, *names: str, **variables: object
) -> list[Run]:
    """On both nodes; `names` are an IFNAME of its own for each."""
    own = [variables | ({"IFNAME": names[node]} if names else {}) for node in (0, 1)]
    started = [check(nodes, node, **own[node]) for node in (0, 1)]
    return [one.finish(40, expect) for one in started]


def check_alone(*before: object, nodes: NamespacePair | None = None, **variables: object) -> Run:
    """On this machine or on node 0, neither told of another one; `before` starts the command."""
    env = {name: value and str(value) for name, value in variables.items()}
    command = [*before, *PREFLIGHT]
    with nodes.popen(0, command, env=env) if nodes else start(command, env=env) as started:
        run = started.finish(40, expect=None)
    assert run.returncode == bool(wrong(run))
    return run


def wrong(run: Run) -> list[str]:
    """Its findings. Each line has to be of one of its three kinds."""
    lines = run.out.splitlines()
    assert all(line.startswith(("ok: ", "note: ", "WRONG: ")) for line in lines), run.tail()
    return [line.removeprefix("WRONG: ") for line in lines if line.startswith("WRONG: ")]


def firewall(nodes: NamespacePair, node: int, *rules: str) -> None:
    """Gives a node rules for what comes in, in place of those that it has."""
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    chain = "type filter hook input priority 0\n" + "\n".join(rules)
    text = f"flush ruleset\ntable inet test {{\nchain input {{\n{chain}\n}}\n}}\n"
    nodes.output(node, "nft", "-f", "-", text=text)


# --- This node ---------------------------------------------------------------------------------


def sysfs(folder: Path, *files: str) -> Path:
    """A folder in place of /sys, with files such as net/eth0/speed=100."""
    for file in files:
        name, _, text = file.partition("=")
        path = folder / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def test_interfaces_that_cannot_be_used_are_found_and_a_fault_if_named(nodes):
    for name in ("one", "two"):
        nodes.ip(0, f"link add {name} up type veth peer name end{name}")
    nodes.ip(0, "link set endtwo up")
    run = check_alone(nodes=nodes, IFNAME="eth0,eth7,one,two")
    first, second, third = wrong(run)
    assert first.startswith("there is no eth7 ") and second.startswith("one is down")
    assert third.startswith("two is up but has no IPv4 address")
    run = check_alone(nodes=nodes)
    assert not wrong(run) and "ok: eth0 is up" in run.out and "note: one is down" in run.out


def test_adapters_that_cannot_be_used_are_found_and_a_fault_if_named(nodes, tmp_path):
    device, without = (with_device(name, unshare=False) for name in ("infiniband/uverbs0", ""))
    files = ("0/ports/1/state=1: DOWN", "0/ports/1/rate=100 Gb/sec", "1/ports/1/state=1: DOWN")
    down = [f"infiniband/mlx5_{file}" for file in files]
    one = sysfs(tmp_path / "one", *down, "infiniband/mlx5_0/ports/2/state=4: ACTIVE")
    for name in ("loads", "empty"):
        (tmp_path / name).mkdir()
    (library,) = {*re.findall(r"\S+/libm[-.]\S+", Path("/proc/self/maps").read_text())}
    shutil.copy(library, tmp_path / "loads/libibverbs.so.1")
    (tmp_path / "empty/libibverbs.so.1").touch()
    fine = {"nodes": nodes, "LD_LIBRARY_PATH": tmp_path / "loads", "SYSFS_ROOT": one}
    run = check_alone(*device, **fine, IFNAME="mlx5_0,mlx5_0:1,mlx5_0:2,mlx5_1")
    first, second = wrong(run)
    assert first.startswith("mlx5_0:1 is down ['DOWN']")
    assert second.startswith("mlx5_1 is down")
    for line in ("libibverbs loads", "/dev/infiniband has ['uverbs0']"):
        assert f"ok: {line}\n" in run.out
    run = check_alone(*device, **fine)
    assert not wrong(run) and "ok: mlx5_0:2 is up" in run.out
    assert "note: mlx5_1:1 is down" in run.out
    missing = fine | {"LD_LIBRARY_PATH": tmp_path / "empty"}
    words = ("libibverbs.so.1 does not load: install", "there is no /dev/infiniband/uverbs*")
    # A job over another network does not need them.
    for names, kind, count in (("mlx5_0", "WRONG: ", 1), ("", "note: ", 1), ("eth0", "", 0)):
        run = check_alone(*without, **missing, IFNAME=names)
        assert [run.out.count(f"{kind}{start}") for start in words] == [count] * 2, run.tail()


STATES = {"mlx5_0:1": "INIT", "mlx5_0:2": "DOWN", "mlx5_1:1": "INIT", "mlx5_1:2": "ACTIVE"}
STATES |= {"mlx5_2:1": "DOWN", "mlx5_20:1": "ACTIVE"}


def test_states_of_an_adapter_are_told_apart(monkeypatch, capsys):
    """One that no subnet manager has set up, and one without a cable. Of two ports one is enough;
    that of an adapter whose name goes on does not count.
    """
    monkeypatch.setattr(preflight, "PORTS", {port: {"state": x} for port, x in STATES.items()})
    monkeypatch.setattr(preflight, "adapter", lambda _: Path("/"))
    for name in ("mlx5_0", "mlx5_0:2", "mlx5_1", "mlx5_2"):
        preflight.check_port(name, True)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("WRONG: mlx5_0 has a cable but waits for a subnet manager")
    assert "opensm" in first and "sminfo" in first and "ip link" not in first
    words = ["WRONG: mlx5_0:2 is down", "ok: mlx5_1 is up", "WRONG: mlx5_2 is down"]
    assert [line[: len(start)] for line, start in zip(others, words, strict=True)] == words


def test_too_little_memory_that_may_be_locked_is_found(monkeypatch, capsys):
    """8 MiB, which many systems give, is too little. None: all may be locked."""
    said = []
    for limit in (8 << 20, 4 << 30, None):
        monkeypatch.setattr(preflight, "most_locked", lambda limit=limit: limit)
        preflight.check_verbs(named=True)
        said.append("WRONG: only 8192 KiB may be locked" in capsys.readouterr().out)
    assert said == [True, False, False]


@pytest.mark.slow
def test_a_gpu_that_pytorch_does_not_count_is_a_fault(nodes):
    """As where driver and library are of different versions."""
    device = with_device("nvidia0", unshare=False)
    run = check_alone(*device, nodes=nodes, CUDA_VISIBLE_DEVICES=None)
    (line,) = [line for line in wrong(run) if "PyTorch" in line]
    assert "sees no GPU" in line and "no NVIDIA GPU" not in run.out


def test_the_python_that_the_launchers_would_take_is_looked_at(tmp_path):
    """Here one without torch. For one that is active see the healthy nodes."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS "$@"\n')
    python.chmod(0o755)
    (line,) = wrong(check_alone(PYTHON=python))
    assert line.startswith(f"PYTHON is '{python}', which has no torch")


# --- Between the nodes -------------------------------------------------------------------------


def test_healthy_nodes_have_no_finding(nodes):
    nodes.usual_hosts()
    for node, run in enumerate(check_both(nodes, IFNAME="eth0")):
        reached = f"{1 - node} (node{1 - node}) was reached in both directions at "
        reached += f"{nodes.addresses[1 - node]} (eth0); not tried: RDMA, NCCL, the speed"
        assert not wrong(run) and run.lines()[-1] == HEALTHY + reached
        assert f"ok: eth0 is up: {nodes.addresses[node]}\n" in run.out
        assert "torch, torchvision, pycocotools and pillow" in run.out
        assert "note: this node has no NVIDIA GPU" in run.out


FIREWALLS = [(0, "drop"), (1, "reject")]


def test_a_firewall_in_one_direction_is_named_by_both_nodes(nodes):
    """It lets MASTER_PORT through, as many do."""
    for node, verdict in FIREWALLS:
        rules = ["ct state established,related accept", f"tcp dport {PORT} accept"]
        firewall(nodes, 1 - node)
        firewall(nodes, node, *rules, f"tcp dport 1024-65535 {verdict}")
        for run in check_both(nodes, expect=1):
            (line,) = wrong(run)
            way = f"node {1 - node} (node{1 - node}) cannot reach node {node} (node{node})"
            assert line.startswith(f"{way} at {nodes.addresses[node]}, random port ")
            assert "firewall" in line


def test_a_masters_port_that_is_closed_or_taken_is_found(nodes):
    firewall(nodes, 0, f"tcp dport {PORT} drop")
    first, second = check_both(nodes, expect=1, CONNECT_TIMEOUT=3)
    assert "node 1 did not come" in wrong(first)[0] and "firewall" in wrong(first)[0]
    assert "cannot reach node 0" in wrong(second)[0] and "firewall" in wrong(second)[0]
    assert max(first.seconds, second.seconds) < 3 + 10 * FACTOR
    firewall(nodes, 0)
    with nodes.popen(0, [sys.executable, "-u", "-m", "http.server", PORT]) as other:
        other.wait_for("Serving")
        first, second = check_both(nodes, expect=1, CONNECT_TIMEOUT=1)
    assert re.search("Address already in use.*MASTER_PORT", wrong(first)[0])
    assert "another program at that port" in wrong(second)[0]


def test_each_network_in_ifname_is_tried(nodes):
    """Here the second one does not join the nodes. Only the first one is claimed."""
    for node in (0, 1):
        nodes.ip(node, "link add own up type veth peer name end", "link set end up")
        nodes.ip(node, f"addr add 10.7{node}.0.1/24 dev own")
    for run in check_both(nodes, expect=1, IFNAME="eth0,own"):
        assert re.search(r"10\.7[01]\.0\.1", "".join(wrong(run)))
        assert re.search(r"^note: .* at 10\.77\.0\.[12] \(eth0\); not tried: ", run.lines()[-1])
    for run in check_both(nodes, 1, "own", "eth0"):
        (line,) = wrong(run)
        assert line.startswith("node 1 (node1) cannot reach node 0 (node0) at 10.70.0.1, ")


def test_interfaces_of_other_names_are_paired_by_their_position(nodes):
    nodes.second_cable("own", "other")
    first, second = check_both(nodes, 0, "own,eth0", "other,eth0")
    assert " at 10.78.0.2 (other), 10.77.0.2 (eth0); not tried" in first.lines()[-1]
    assert " at 10.78.0.1 (own), 10.77.0.1 (eth0); not tried" in second.lines()[-1]
    for run in check_both(nodes, 1, "own,eth0", "other"):
        (line,) = wrong(run)
        assert line.startswith("node 0 (node0) has own, eth0, node 1 (node1) has other: ")
        assert re.search(r" at 10\.78\.0\.[12] \(\w+\); not tried", run.lines()[-1])


def test_an_adapter_in_ifname_is_not_claimed(nodes, tmp_path):
    files = sysfs(tmp_path / "sys", "infiniband/mlx5_0/ports/1/state=4: ACTIVE")
    (files / "class/net/eth0").mkdir(parents=True)
    (files / "class/net/eth0/carrier").write_text("1")
    for run in check_both(nodes, expect=None, IFNAME="mlx5_0,eth0", SYSFS_ROOT=files):
        assert "(eth0); not tried: RDMA over mlx5_0, NCCL, the speed" in run.lines()[-1]


def test_another_torch_or_nccl_on_one_node_is_found(nodes, tmp_path):
    for package in ("torch", "nvidia_nccl_cu13"):
        info = tmp_path / f"{package}-9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    started = [check(nodes, 0), check(nodes, 1, PYTHONPATH=path)]
    own = f"torch {metadata.version('torch')}"
    for one in started:
        (line,) = wrong(one.finish(40, 1))
        assert line.startswith(f"node 0 (node0) has {own}")
        assert "; node 1 (node1) has torch 9, nvidia-nccl-cu13 9: install" in line


@pytest.mark.slow
def test_a_switch_that_loses_large_packets_is_found(nodes):
    """Both nodes name the directions in which they get lost."""
    nodes.second_cable("own", "own")
    drop = 'iifname "{}" meta length > 2000 drop'
    for lossy, named, at in (("eth0", "eth0", "01"), ("own", "eth0", "01"), ("own", "own", "1")):
        for node in (0, 1):
            firewall(nodes, node, *[drop.format(lossy)] * (str(node) in at))
        ways = {f"from node {1 - int(n)} (node{1 - int(n)}) to node {n} (node{n})" for n in at}
        ways = ways if lossy == named else set()
        for run in check_both(nodes, expect=int(lossy == named), IFNAME=named):
            found = re.findall(r"WRONG: large packets (.*) at .* get lost", run.out)
            assert {*found} == ways and len(wrong(run)) == len(ways)
            assert ("reached" in run.lines()[-1]) == (not ways)


def test_master_addr_that_is_loopback_on_its_node_is_found(nodes):
    """As where Debian's hosts file has the own name at 127.0.1.1; the other node knows it well."""
    nodes.usual_hosts()
    nodes.hosts(1).write_text(f"127.0.0.1 localhost\n{nodes.addresses[0]} node0\n")
    first, second = check_both(nodes, expect=None, MASTER_ADDR="node0")
    (line,) = wrong(first)
    assert "MASTER_ADDR node0 is 127.0.1.1" in line and first.returncode == 1
    assert not wrong(second) and second.returncode == 0


SETTINGS = [  # of one node of two, and the line
    ({"MASTER_ADDR": "2001:db8::1"}, "MASTER_ADDR 2001:db8::1 is no IPv4 address here ("),
    ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1': give a whole number from 1 to "),
    ({"CONNECT_TIMEOUT": "-1"}, "CONNECT_TIMEOUT is '-1': give a whole number from 1 to "),
]


def test_a_setting_that_is_none_is_named():
    for own, line in SETTINGS:
        job = {"WORLD_SIZE": 2, "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1"} | own
        (text,) = wrong(check_alone(**job))
        assert text.startswith(line)


def test_a_node_rank_that_two_nodes_have_is_found(nodes):
    started = [
        check(nodes, node, NNODES=3, CONNECT_TIMEOUT=math.ceil(5 * FACTOR)) for node in (0, 1, 1)
    ]
    run = started[0].finish(15, expect=1)
    assert "NODE_RANK=1 came twice" in wrong(run)[0]
    assert "node 2 did not come" in wrong(run)[1]


@pytest.mark.slow
def test_srun_tells_the_nodes_who_they_are(slurm: SlurmCluster):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *PREFLIGHT]
    run = slurm.run(*srun, env={"CONNECT_TIMEOUT": str(math.ceil(30 * FACTOR))})
    assert run.out.count(HEALTHY) == 2
