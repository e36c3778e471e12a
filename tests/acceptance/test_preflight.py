"""tools/preflight.py by hand, before a job: it finds what is wrong on a node and between nodes."""

from __future__ import annotations

import contextlib
import json
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
        for link in json.loads(pair.output(node, "ip", "-j", "link")):
            if link["ifname"] not in ("lo", "eth0"):
                with contextlib.suppress(RuntimeError):  # it went with its other end
                    pair.ip(node, f"link del {link['ifname']}")
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


def check_names(nodes: NamespacePair, *names: str, expect: int = 0) -> list[Run]:
    """On both nodes, with an IFNAME of its own for each."""
    started = [check(nodes, node, IFNAME=name) for node, name in enumerate(names)]
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


def second_network(nodes: NamespacePair, *names: str) -> None:
    """Joins the nodes by one more link, 10.78.0.1 and 10.78.0.2, with a name on each."""
    end = f"peer name {names[1]} netns {nodes.names[1]}"
    nodes.ip(0, f"link add {names[0]} mtu 9000 up type veth {end}")
    nodes.ip(1, f"link set {names[1]} mtu 9000 up")
    for node in (0, 1):
        nodes.ip(node, f"addr add 10.78.0.{node + 1}/24 dev {names[node]}")


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


def libibverbs(folder: Path, empty: bool = False) -> str:
    """A folder with a library of that name, or with an empty file, which does not load."""
    folder.mkdir()
    (library,) = {*re.findall(r"\S+/libm[-.]\S+", Path("/proc/self/maps").read_text())}
    shutil.copy("/dev/null" if empty else library, folder / "libibverbs.so.1")
    return str(folder)


def test_adapters_that_cannot_be_used_are_found_and_a_fault_if_named(nodes, tmp_path):
    device, without = (with_device(name, unshare=False) for name in ("infiniband/uverbs0", ""))
    files = ("0/ports/1/state=1: DOWN", "0/ports/1/rate=100 Gb/sec", "1/ports/1/state=1: DOWN")
    down = [f"infiniband/mlx5_{file}" for file in files]
    one = sysfs(tmp_path / "one", *down, "infiniband/mlx5_0/ports/2/state=4: ACTIVE")
    loads = libibverbs(tmp_path / "loads")
    fine = {"nodes": nodes, "LD_LIBRARY_PATH": loads, "SYSFS_ROOT": one}
    run = check_alone(*device, **fine, IFNAME="mlx5_0,mlx5_0:1,mlx5_0:2,mlx5_1")
    first, second = wrong(run)
    assert first.startswith("mlx5_0:1 is down ['DOWN']")
    assert second.startswith("mlx5_1 is down")
    for line in ("libibverbs loads", "/dev/infiniband has ['uverbs0']"):
        assert f"ok: {line}\n" in run.out
    run = check_alone(*device, **fine)
    assert not wrong(run) and "ok: mlx5_0:2 is up" in run.out
    assert "note: mlx5_1:1 is down" in run.out
    missing = fine | {"LD_LIBRARY_PATH": libibverbs(tmp_path / "empty", empty=True)}
    words = ("libibverbs.so.1 does not load: install", "there is no /dev/infiniband/uverbs*")
    # A job over another network does not need them.
    for names, kind, count in (("mlx5_0", "WRONG: ", 1), ("", "note: ", 1), ("eth0", "", 0)):
        run = check_alone(*without, **missing, IFNAME=names)
        assert [run.out.count(f"{kind}{start}") for start in words] == [count] * 2, run.tail()


def test_an_adapter_that_no_subnet_manager_has_set_up_is_told_from_one_without_a_cable(
    monkeypatch, capsys
):
    """Of two ports one is enough."""
    states = {"mlx5_0:1": "INIT", "mlx5_0:2": "DOWN", "mlx5_1:1": "INIT", "mlx5_1:2": "ACTIVE"}
    monkeypatch.setattr(preflight, "PORTS", {port: {"state": x} for port, x in states.items()})
    monkeypatch.setattr(preflight, "adapter", lambda _: Path("/"))
    for name in ("mlx5_0", "mlx5_0:2", "mlx5_1"):
        preflight.check_port(name, True)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("WRONG: mlx5_0 has a cable but waits for a subnet manager")
    assert "opensm" in first and "sminfo" in first and "ip link" not in first
    assert second.startswith("WRONG: mlx5_0:2 is down") and third.startswith("ok: mlx5_1 is up")


def test_too_little_memory_that_may_be_locked_is_found(monkeypatch, capsys):
    """8 MiB, which many systems give, is too little. None: all may be locked."""
    said = []
    for limit in (8 << 20, 4 << 30, None):
        monkeypatch.setattr(preflight, "most_locked", lambda limit=limit: limit)
        preflight.check_verbs(named=True)
        said.append("WRONG: only 8192 KiB may be locked" in capsys.readouterr().out)
    assert said == [True, False, False]


# What the script may say; it is not asked here.
REFUSED = "print('PyTorch 2.15.0 cannot use this node')"
NO_MODULE = "raise ImportError('no libcudart')"
SAID = [  # whether there is a GPU, what the script says, the line
    (True, "print(2)", r"ok: PyTorch can use 2 GPU\(s\)"),
    (True, REFUSED, "WRONG: .*cannot use this node"),
    (True, NO_MODULE, "WRONG: .*no libcudart"),
    (False, REFUSED, "note: .*uses the CPU"),
]


@pytest.mark.parametrize(("gpu", "code", "line"), SAID)
def test_gpus_that_the_script_cannot_use_are_found(monkeypatch, capsys, gpu, code, line):
    monkeypatch.setattr(preflight, "gpu_is_present", lambda: gpu)
    monkeypatch.setattr(preflight, "GPUS", code)
    preflight.check_gpus(sys.executable)
    assert re.match(line, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("visible", [None, "", "-1", "NoDevFiles"])  # the last is of SLURM
def test_a_gpu_that_pytorch_does_not_count_is_a_fault_unless_it_is_hidden(nodes, visible):
    """As where driver and library are of different versions."""
    device = with_device("nvidia0", unshare=False)
    run = check_alone(*device, nodes=nodes, CUDA_VISIBLE_DEVICES=visible)
    lines = [line for line in wrong(run) if "PyTorch" in line and "sees no GPU" in line]
    assert len(lines) == (visible is None), run.tail()
    assert ("note: this node has no NVIDIA GPU" in run.out) == (visible is not None)


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_does_not_hold_it_up(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 500\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    run = check_alone(PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES=None)
    assert "has torch" in run.out


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


def test_a_network_in_ifname_that_does_not_join_the_nodes_is_found(nodes):
    nodes.ip(0, "link add own up type veth peer name end", "link set end up")
    nodes.ip(0, "addr add 10.78.0.1/24 dev own")
    for run in check_names(nodes, "own", "eth0", expect=1):
        (line,) = wrong(run)
        assert line.startswith("node 1 (node1) cannot reach node 0 (node0) at 10.78.0.1, ")


def test_each_network_in_ifname_is_tried(nodes):
    """Here the second one does not join the nodes. Only the first one is claimed."""
    for node in (0, 1):
        nodes.ip(node, "link add own up type veth peer name end", "link set end up")
        nodes.ip(node, f"addr add 10.7{node}.0.1/24 dev own")
    for run in check_both(nodes, expect=1, IFNAME="eth0,own"):
        assert re.search(r"10\.7[01]\.0\.1", "".join(wrong(run)))
        assert re.search(r"^note: .* at 10\.77\.0\.[12] \(eth0\); not tried: ", run.lines()[-1])


def test_interfaces_of_other_names_are_paired_by_their_position(nodes):
    second_network(nodes, "own", "other")
    first, second = check_names(nodes, "own,eth0", "other,eth0")
    assert " at 10.78.0.2 (other), 10.77.0.2 (eth0); not tried" in first.lines()[-1]
    assert " at 10.78.0.1 (own), 10.77.0.1 (eth0); not tried" in second.lines()[-1]
    for run in check_names(nodes, "own,eth0", "other", expect=1):
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


def test_an_ipv6_address_ends_in_one_line():
    job = {"NNODES": 2, "NODE_RANK": "1", "MASTER_ADDR": "2001:db8::1"}
    (line,) = wrong(check_alone(**job, PYTHON=sys.executable))
    assert line.startswith("MASTER_ADDR 2001:db8::1 is no IPv4 address here (")


@pytest.mark.slow
def test_a_switch_that_loses_large_packets_is_found_on_the_network_that_the_job_will_use(nodes):
    second_network(nodes, "own", "own")
    for lossy, named in (("eth0", "eth0"), ("own", "own"), ("own", "eth0")):
        for node in (0, 1):
            firewall(nodes, node, f'iifname "{lossy}" meta length > 2000 drop')
        for node, run in enumerate(check_both(nodes, expect=int(lossy == named), IFNAME=named)):
            ways = [
                f"from node {1 - n} (node{1 - n}) to node {n} (node{n})" for n in (node, 1 - node)
            ]
            ways = ways if lossy == named else []
            assert [re.findall(r"large packets (.*) at .* get lost", x) for x in wrong(run)] == [
                [way] for way in ways
            ]


@pytest.mark.slow
def test_large_packets_that_get_lost_in_one_direction_are_told_by_both_nodes(nodes):
    firewall(nodes, 1, 'iifname "eth0" meta length > 2000 drop')
    for run in check_both(nodes, expect=1):
        (line,) = wrong(run)
        assert line.startswith("large packets from node 0 (node0) to node 1 (node1) at 10.77.0.2 ")
        assert "reached" not in run.lines()[-1]


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
    assert re.search("Address already in use.*MASTER_PORT", wrong(first)[0])
    assert "another program at that port" in wrong(second)[0]
    assert second.seconds < 1 + 10 * FACTOR


def test_an_adapter_is_not_taken_for_one_whose_name_goes_on(monkeypatch, capsys):
    ports = {"mlx5_1:1": {"state": "DOWN"}, "mlx5_10:1": {"state": "ACTIVE"}}
    monkeypatch.setattr(preflight, "PORTS", ports)
    preflight.check_port("mlx5_1", True)
    assert capsys.readouterr().out.startswith("WRONG: mlx5_1 is down ['DOWN']")


@pytest.mark.parametrize(
    ("count", "name"),
    [("NNODES", "MASTER_PORT"), ("NNODES", "CONNECT_TIMEOUT"), ("WORLD_SIZE", "MASTER_PORT")],
)
def test_a_number_that_is_none_is_named(count, name):
    job = {count: 2, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", name: "-1"}
    (text,) = [text for text in wrong(check_alone(**job)) if name in text]
    assert text.startswith(f"{name} is '-1': give a whole number from 1 to ")


def test_a_node_rank_that_two_nodes_have_is_found(nodes):
    started = [
        check(nodes, node, NNODES=3, CONNECT_TIMEOUT=math.ceil(5 * FACTOR)) for node in (0, 1, 1)
    ]
    run = started[0].finish(15, expect=1)
    assert "NODE_RANK=1 came twice" in wrong(run)[0]
    assert "node 2 did not come" in wrong(run)[1]


def test_in_a_job_step_it_listens_where_the_launcher_will(nodes, tmp_path):
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = check_alone(nodes=nodes, **step, PATH=path, CONNECT_TIMEOUT=1)
    assert "node 1 did not come, localhost port 20280" in wrong(run)[-1]


@pytest.mark.slow
def test_srun_tells_the_nodes_who_they_are(slurm: SlurmCluster):
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", *PREFLIGHT]
    run = slurm.run(*srun, env={"CONNECT_TIMEOUT": str(math.ceil(30 * FACTOR))})
    assert run.out.count(HEALTHY) == 2
