"""tools/preflight.py: one line for each thing that would go wrong, where it would."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import preflight
import test_networks as networks
from launcher import rendezvous
from support.nodes import NamespacePair
from support.processes import ROOT, Run, Started, free_port, long, require

TOOLS = ROOT / "tools"

TIMEOUT = 20  # as CONNECT_TIMEOUT, seconds
PORT = 29500


@pytest.fixture
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


def start(nodes, node: int, host: str = "10.77.0.1", split: bool = True, **env: str) -> Started:
    """Preflight on one node; `split` keeps what it says apart from the interface, on stdout."""
    command = [sys.executable, TOOLS / "preflight.py", "--nnodes=2", f"--node_rank={node}"]
    command += [f"--rdzv_endpoint={host}:{PORT}", "--connect_timeout", TIMEOUT]
    return nodes.popen(node, command, env=env, split=split)


def run(nodes, expect: int = 0, **options: object) -> list[Run]:
    """On both nodes, to the end; nobody waits longer than CONNECT_TIMEOUT for it."""
    started = [start(nodes, node, **options) for node in (0, 1)]
    ended = [one.finish(60, expect=expect) for one in started]
    assert all(one.seconds < TIMEOUT for one in ended), [one.err for one in ended]
    return ended


def lines(run: Run, kind: str) -> list[str]:
    """Its errors or warnings, without the program's name."""
    return re.findall(rf"^preflight.py: {kind}: (.*)$", run.err, re.MULTILINE)


# --- The interface ---------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["10.77.0.1", "node0"])
def test_interface_of_the_route_is_chosen_where_the_own_name_is_loopback(nodes, master):
    """Also of SLURM's node 0, whose own name, the master's, is a loopback address there."""
    nodes.usual_hosts()
    name = {}
    if master == "node0":
        name = {"SLURMD_NODENAME": "node0"}
        with nodes.hosts(1).open("a") as hosts:
            hosts.write(f"{nodes.addresses[0]} node0\n")
    for ended in run(nodes, host=master, **name):
        assert ended.out == "eth0\n"
        assert "GLOO_SOCKET_IFNAME=eth0: it leads to the other nodes" in ended.err
        assert not lines(ended, "error") and not lines(ended, "warning")


def test_interface_that_is_set_stays(nodes):
    for ended in run(nodes, GLOO_SOCKET_IFNAME="eth0"):
        assert (ended.out, lines(ended, "error")) == ("", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lo", "GLOO_SOCKET_IFNAME is lo, which reaches no other node"),
        ("eth7", "this node has no interface or adapter eth7 that is up (none of that name)"),
    ],
)
def test_interface_that_reaches_nobody_is_an_error_on_both_nodes(nodes, name, text):
    other = {0: {"GLOO_SOCKET_IFNAME": "eth0"}, 1: {"GLOO_SOCKET_IFNAME": name}}
    started = [start(nodes, node, **other[node]) for node in (0, 1)]
    first, second = (one.finish(60, expect=1) for one in started)
    (own,), (told,) = lines(second, "error"), lines(first, "error")
    assert own.startswith(text) and told == f"node 1 (node1): {own}"


# --- The way between the nodes ---------------------------------------------------------------


def close(nodes, node: int, rule: str) -> None:
    """A firewall on one node: of what comes in, only the port of the master passes `rule`."""
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    text = f"""
        add table inet demo
        add chain inet demo input {{ type filter hook input priority 0; }}
        add rule inet demo input ct state established,related accept
        add rule inet demo input tcp dport {PORT} accept
        add rule inet demo input {rule}
        """
    enter = ["nsenter", f"--net=/run/netns/{nodes.names[node]}", "nft", "-f", "-"]
    subprocess.run(enter, input=text, text=True, check=True, timeout=20)


CLOSED = {
    "node 0 is silent": (0, "tcp dport 1024-65535 drop", "node 1 (node1) cannot reach node 0"),
    "node 1 is silent": (1, "tcp dport 1024-65535 drop", "node 0 (node0) cannot reach node 1"),
    "node 1 refuses": (1, "tcp dport 1024-65535 reject", "node 0 (node0) cannot reach node 1"),
}


@pytest.mark.parametrize("case", ["node 1 refuses", *long("node 0 is silent", "node 1 is silent")])
def test_firewall_that_opens_the_masters_port_alone_is_one_line_on_both(nodes, case):
    node, rule, text = CLOSED[case]
    close(nodes, node, rule)
    first, second = run(nodes, expect=1)
    (line,) = lines(first, "error")
    assert lines(second, "error") == [line] and line.startswith(text)
    assert f"at {nodes.addresses[node]}, port " in line
    assert "a firewall that opens MASTER_PORT alone is not enough" in line
    assert first.out == second.out == ""


def test_two_networks_without_a_way_between_them(nodes):
    """Each node names an interface of its own, of which the other knows nothing."""
    for node, name in enumerate(nodes.names):
        for command in (
            f"link add own{node} type veth peer name peer{node}",
            f"addr add 10.78.{node}.1/24 dev own{node}",
            f"link set own{node} up",
            f"link set peer{node} up",
        ):
            subprocess.run(["ip", "-n", name, *command.split()], check=True)
    started = [start(nodes, node, GLOO_SOCKET_IFNAME=f"own{node}") for node in (0, 1)]
    first, second = (one.finish(60, expect=1) for one in started)
    (line,) = lines(first, "error")
    assert lines(second, "error") == [line]
    assert line.startswith("node 1 (node1) cannot reach node 0 (node0) at 10.78.0.1, port ")
    assert "(Network is unreachable)" in line


def test_different_mtu_is_a_warning_on_both(nodes):
    subprocess.run(f"ip -n {nodes.names[1]} link set eth0 mtu 1500".split(), check=True)
    first, second = run(nodes)
    (mine,), (theirs,) = lines(first, "warning"), lines(second, "warning")
    assert mine.startswith("the MTU of eth0 is 9000 on this node and 1500 on node 1 (node1): ")
    assert theirs.startswith("the MTU of eth0 is 1500 on this node and 9000 on node 0: ")


# --- Waiting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_ends_the_wait_for_others(nodes, name):
    started = start(nodes, 0, split=False)
    started.wait_for("waits up to")
    number = signal.Signals[name]
    started.signal(number)
    ended = started.finish(5, expect=128 + number)
    assert "stopped by a signal before the start" in ended.out


def test_preflight_does_not_outlive_its_launcher(nodes, tmp_path):
    folder = networks.Folder(tmp_path)
    command = ["bash", tmp_path / "launch_multinode.sh", "x"]
    started = nodes.popen(0, command, env=folder.env(0, {}), cwd=tmp_path)
    started.wait_for("node 0 waits up to")
    assert started.pids("preflight.py")
    started.signal(signal.SIGKILL)
    started.finish(10, expect=-signal.SIGKILL, clean=5)


def visitor(rank: int, port: int) -> preflight.Preflight:
    words = ["--nnodes=2", f"--node_rank={rank}", f"--rdzv_endpoint=127.0.0.1:{port}"]
    options = preflight.parse_arguments([*words, "--starts=4", "--connect_timeout=15"])
    return preflight.Preflight(options, [], argparse.Namespace(say=lambda text: None))


def supervisor(rank: int, port: int) -> rendezvous.Rendezvous:
    settings = {"NNODES": 2, "RESTARTS": 3, "PROBE": 0}
    node = {"node_rank": rank, "host": f"node{rank}", "settings": settings}
    return rendezvous.Rendezvous("127.0.0.1", port, node, 3, lambda text: None)


@pytest.fixture
def waiting(request, monkeypatch):
    """The supervisor of this node, long past its preflight, waits at start 2 of its series: its
    thread, its plans when it has met the other, and the port. Both nodes are here.
    """
    # Loopback then is an address that the other one reaches.
    monkeypatch.setattr(preflight, "check_master", lambda host, rank: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    port, plans = free_port(), []
    node = supervisor(request.param, port)
    thread = threading.Thread(
        target=lambda: plans.append(node.agree(rendezvous.Plan(start=2), 30)), daemon=True
    )
    thread.start()
    yield thread, plans, port
    node.close()


@pytest.mark.parametrize("waiting", [0], indirect=True)
def test_launcher_of_node_1_that_is_started_anew_finds_the_supervisor(waiting):
    thread, plans, port = waiting
    with pytest.raises(preflight.NodeZeroIsFurther):
        visitor(1, port).agree(rendezvous.Plan(), 15)
    assert not plans  # it has not been taken for node 1's supervisor
    node_1 = supervisor(1, port)
    assert node_1.agree(rendezvous.Plan(), 15).start == 2
    thread.join(15)
    assert plans[0].start == 2
    node_1.close()


@pytest.mark.parametrize("waiting", [1], indirect=True)
def test_launcher_of_node_0_that_is_started_anew_lets_the_supervisor_come_again(waiting):
    """It meets the preflight of node 0 and then its supervisor."""
    thread, plans, port = waiting
    first = visitor(0, port)
    first.agree(rendezvous.Plan(), 15)
    first.close()
    assert not plans
    node_0 = supervisor(0, port)
    node_0.agree(rendezvous.Plan(), 15)
    thread.join(15)
    assert plans[0].start == 0
    node_0.close()


# --- This node alone: made-up /sys, /dev and /proc -------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an InfiniBand adapter that is as it should be; returns its root."""
    for name, value in (("SYS", "sys"), ("DEV", "dev"), ("PROC", "proc")):
        monkeypatch.setattr(preflight, name, tmp_path / value)
    for name in ("ib0", "eth0"):
        write(tmp_path / f"sys/class/net/{name}/carrier", "1")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN")
    write(tmp_path / "dev/infiniband/uverbs0", "")
    write(tmp_path / "proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    have = [("lo", "127.0.0.1"), ("ib0", "10.0.0.1"), ("eth0", "10.1.0.1")]
    monkeypatch.setattr(preflight, "addresses", lambda: have)
    for name in ("NETWORK", "IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def check(monkeypatch, several: bool = True, **env: str) -> tuple[list[str], list[str]]:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return preflight.check_node(several)


@pytest.mark.parametrize("names", ["mlx5_0", "mlx5_0:1", "mlx5_0,ib0", "ib0"])
def test_healthy_infiniband_gives_no_line(machine, monkeypatch, names):
    assert check(monkeypatch, NETWORK="infiniband", IFNAME=names) == ([], [])


def test_port_that_is_not_active(machine, monkeypatch):
    errors, _ = check(monkeypatch, NETWORK="infiniband", IFNAME="mlx5_0:2")
    (line,) = errors
    text = "this node has no interface or adapter mlx5_0:2 that is up (1: DOWN); it has eth0, ib0,"
    assert line.startswith(f"{text} mlx5_0: name one of them")


def lacks_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def test_library_and_device_of_infiniband_that_are_missing(machine, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lacks_library)
    shutil.rmtree(machine / "dev")
    errors, warnings = check(monkeypatch, NETWORK="infiniband", IFNAME="mlx5_0")
    assert [line.split(",")[0] for line in errors] == [
        "libibverbs.so.1 is missing",
        "there is no /dev/infiniband/uverbs*",
    ]
    assert not warnings
    # Where the run may do without: Gloo over ib0, or a run that does not leave the node.
    for case in ({"IFNAME": "ib0"}, {"IFNAME": "mlx5_0", "several": False}):
        assert check(monkeypatch, NETWORK="infiniband", **case) == ([], errors)
    monkeypatch.delenv("NETWORK")
    assert check(monkeypatch, IFNAME="eth0") == ([], [])


def test_no_active_port_at_all(machine, monkeypatch):
    (machine / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("2: INIT")
    _, warnings = check(monkeypatch, NETWORK="infiniband", IFNAME="ib0")
    assert warnings == ["no InfiniBand port of this node is ACTIVE: see ibstat, cable and switch"]


@pytest.mark.parametrize(
    ("limit", "capabilities", "warned"),
    [(8 << 20, 0, True), (8 << 20, 1 << 14, False), (64 << 30, 0, False)],
)
def test_little_memory_that_may_be_locked(machine, monkeypatch, limit, capabilities, warned):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    write(machine / "proc/self/status", f"CapEff:\t{capabilities:016x}\n")
    errors, warnings = check(monkeypatch, NETWORK="infiniband", IFNAME="mlx5_0")
    assert not errors
    wanted = ["only 8192 KiB of memory may be locked, and "] * warned
    assert [line[:43] for line in warnings] == wanted


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["ib0"]),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, ["ib0"]),  # Gloo makes a device of each
        ({"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "=ib0"}, ["ib0"]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, ["ib0", "ib1"]),  # what begins so
        ({"NCCL_SOCKET_IFNAME": "=ib"}, []),
        ({"NCCL_SOCKET_IFNAME": "=ib0,eth0"}, []),  # it takes what has an address
        ({"NCCL_SOCKET_IFNAME": "^docker,ib"}, []),
        ({"IFNAME": "mlx5_0,ib0", "NETWORK": "infiniband"}, ["ib0"]),
        # As the launcher sets them: an adapter alone needs no address beside it.
        ({"IFNAME": "mlx5_0", "NETWORK": "infiniband"}, []),
        ({"IFNAME": "mlx5_0,ib0", "GLOO_SOCKET_IFNAME": "eth0"}, []),  # the user's own choice
        ({}, []),
    ],
)
def test_interface_for_sockets_that_has_no_address(machine, monkeypatch, variables, named):
    """As ib0 is before anybody has set it up."""
    write(machine / "sys/class/net/ib1/carrier", "1")
    monkeypatch.setattr(preflight, "addresses", lambda: [("eth0", "10.1.0.1")])
    errors, _ = check(monkeypatch, **variables)
    text = "{} is up but has no address, which sockets need: give it one"
    assert [line.partition(" (")[0] for line in errors] == [text.format(name) for name in named]
    assert check(monkeypatch, several=False) == ([], [])  # nothing leaves this node


def test_interface_that_is_down(machine, monkeypatch):
    write(machine / "sys/class/net/eth0/carrier", "0")
    write(machine / "sys/class/net/eth0/operstate", "down")
    (line,), _ = check(monkeypatch, GLOO_SOCKET_IFNAME="eth0")
    assert "no interface or adapter eth0 that is up (down)" in line
    assert check(monkeypatch, several=False) == ([], [])  # nothing leaves this node


def test_machine_that_tells_nothing_gives_no_line(machine, monkeypatch):
    shutil.rmtree(machine / "sys")
    assert check(monkeypatch, GLOO_SOCKET_IFNAME="eth0", IFNAME="eth0") == ([], [])


def test_own_name_that_is_loopback_counts_where_no_interface_was_found(monkeypatch):
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "localhost")
    (line,) = preflight.check_host_name("")
    assert line.startswith("this node's own name localhost is a loopback address here")
    assert preflight.check_host_name("eth0") == []


# --- The command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--nnodes=two", "argument --nnodes: invalid int value: 'two'"),
        ("--nnodes=2", "--rdzv_endpoint is '': give node 0's ADDRESS:PORT"),
        ("--nnodes=2 --rdzv_endpoint=node0", "--rdzv_endpoint is 'node0'"),
        ("--nnodes=2 --rdzv_backend=c10d", "invalid choice: 'c10d'"),
    ],
)
def test_wrong_options_are_one_line(words, text):
    command = [sys.executable, TOOLS / "preflight.py", *shlex.split(words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and text in line and done.stdout == ""


def test_one_node_needs_no_other():
    began = time.monotonic()
    env = {n: v for n, v in os.environ.items() if n not in ("NETWORK", "IFNAME")}
    command = [sys.executable, TOOLS / "preflight.py", "--standalone", "--nnodes=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - began < 15
