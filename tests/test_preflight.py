"""tools/preflight.py: one line for each thing that would go wrong, where it would."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import pytest

import preflight
import test_networks as networks
from launcher import node_checks
from launcher.rendezvous import Plan
from support.nodes import NamespacePair
from support.processes import LONG, ROOT, Run, Started, free_port, refusal, require
from test_supervise import Node as SupervisedNode

TIMEOUT = 20  # as CONNECT_TIMEOUT, seconds
PORT = 29500


@pytest.fixture
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        yield pair


def start(nodes, node: int, host: str = "10.77.0.1", split: bool = True, **env: str) -> Started:
    """Preflight on one node; `split` keeps what it says apart from the interface, on stdout."""
    command = [sys.executable, ROOT / "tools/preflight.py", "--nnodes=2", f"--node_rank={node}"]
    command += [f"--rdzv_endpoint={host}:{PORT}", "--connect_timeout", TIMEOUT]
    return nodes.popen(node, command, env=env, split=split)


def run(nodes, expect: int = 0, of_node=({}, {}), **options: str) -> list[Run]:
    """On both nodes, to the end; nobody waits as long as CONNECT_TIMEOUT for it."""
    started = [start(nodes, node, **options, **of_node[node]) for node in (0, 1)]
    return [one.finish(TIMEOUT, expect=expect) for one in started]


def lines(run: Run, kind: str) -> list[str]:
    """Its errors or warnings, without the program's name."""
    return re.findall(rf"^preflight.py: {kind}: (.*)$", run.err, re.MULTILINE)


# --- The interface ---------------------------------------------------------------------------


def test_interface_of_the_route_is_chosen_where_the_own_name_is_loopback(nodes):
    """Also of SLURM's node 0, whose own name, the master's, is a loopback address there."""
    nodes.usual_hosts()
    with nodes.hosts(1).open("a") as hosts:
        hosts.write(f"{nodes.addresses[0]} node0\n")
    for ended in run(nodes, host="node0", SLURMD_NODENAME="node0"):
        assert ended.out == "eth0\n"
        assert "GLOO_SOCKET_IFNAME=eth0: it leads to the other nodes" in ended.err
        assert not lines(ended, "error") and not lines(ended, "warning")


def test_interface_that_reaches_nobody_is_an_error_on_both_nodes(nodes):
    first, second = run(nodes, 1, [{}, {"GLOO_SOCKET_IFNAME": "lo"}])
    (own,), (told,) = lines(second, "error"), lines(first, "error")
    assert own.startswith("GLOO_SOCKET_IFNAME is lo, which reaches no other node")
    assert told == f"node 1 (node1): {own}"


# --- The way between the nodes ---------------------------------------------------------------


def close(nodes, node: int, rule: str) -> None:
    """A firewall on one node: of what comes in, only the port of the master passes `rule`."""
    require(shutil.which("nft"), "a firewall needs the command nft (package nftables)")
    text = f"""
        add table inet demo
        add chain inet demo input {{ type filter hook input priority 0; }}
        add rule inet demo input ct state established,related accept
        add rule inet demo input tcp dport {PORT} accept
        add rule inet demo input tcp dport 1024-65535 {rule}
        """
    enter = ["nsenter", f"--net=/run/netns/{nodes.names[node]}", "nft", "-f", "-"]
    subprocess.run(enter, input=text, text=True, check=True, timeout=20)


@pytest.mark.parametrize(("node", "rule"), [(1, "reject"), pytest.param(0, "drop", marks=LONG)])
def test_firewall_that_opens_the_masters_port_alone_is_one_line_on_both(nodes, node, rule):
    close(nodes, node, rule)
    first, second = run(nodes, expect=1)
    (line,) = lines(first, "error")
    assert lines(second, "error") == [line]
    own, other = f"node {node} (node{node})", f"node {1 - node} (node{1 - node})"
    assert line.startswith(f"{other} cannot reach {own} at {nodes.addresses[node]}, port ")
    assert "a firewall that opens MASTER_PORT alone is not enough" in line
    assert first.out == second.out == ""


def test_two_networks_without_a_way_between_them(nodes):
    """Each node names an interface of its own, of which the other knows nothing."""
    for node in (0, 1):
        add = f"link add own{node} up type veth peer name peer{node}"
        address = f"addr add 10.78.{node}.1/24 dev own{node}"
        nodes.ip(node, add, f"link set peer{node} up", address)
    first, second = run(nodes, 1, [{"GLOO_SOCKET_IFNAME": f"own{node}"} for node in (0, 1)])
    (line,) = lines(first, "error")
    assert lines(second, "error") == [line]
    assert line.startswith("node 1 (node1) cannot reach node 0 (node0) at 10.78.0.1, port ")
    assert "(Network is unreachable)" in line


def test_interface_that_is_set_stays_and_its_mtu_is_compared(nodes):
    nodes.ip(1, "link set eth0 mtu 1500")
    first, second = run(nodes, GLOO_SOCKET_IFNAME="eth0")
    (mine,), (theirs,) = lines(first, "warning"), lines(second, "warning")
    assert mine.startswith("the MTU of eth0 is 9000 on this node and 1500 on node 1 (node1): ")
    assert theirs.startswith("the MTU of eth0 is 1500 on this node and 9000 on node 0: ")
    assert first.out == second.out == ""


# --- Waiting ---------------------------------------------------------------------------------


def test_a_schedulers_signal_ends_the_wait_for_others(nodes):
    """Ctrl-C and SIGTERM: test_unharmed.py."""
    started = start(nodes, 0, split=False)
    started.wait_for("waits up to")
    started.signal(signal.SIGUSR1)
    ended = started.finish(5, expect=128 + signal.SIGUSR1)
    assert "stopped by a signal before the start" in ended.out


def test_preflight_does_not_outlive_its_launcher(nodes, tmp_path):
    started, _ = networks.Folder(tmp_path).start(
        nodes, "x", of_node=lambda n: {"NODE_RANK": 0, "RUN_NAME": f"of_node_{n}"}
    )
    started.wait_for("node 0 waits up to")
    assert started.pids("preflight.py")
    started.signal(signal.SIGKILL)
    started.finish(10, expect=-signal.SIGKILL, clean=5)


@pytest.mark.parametrize("anew", [0, 1])
def test_launcher_that_is_started_anew_finds_the_supervisor_of_the_other_node(monkeypatch, anew):
    """Its preflight first, then its supervisor. The other one, long past its own preflight, waits
    at start 2 of its series.
    """
    # Loopback then is an address that the other one reaches.
    monkeypatch.setattr(preflight, "check_master", lambda host, rank: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    port = free_port()
    other = SupervisedNode(port, 1 - anew, seconds=30, plan=Plan(start=2))
    words = f"--nnodes=2 --node_rank={anew} --rdzv_endpoint=127.0.0.1:{port} --starts=4"
    output = types.SimpleNamespace(say=print)
    visitor = preflight.Preflight(preflight.parse_arguments(words.split()), [], output)
    further = pytest.raises(preflight.NodeZeroIsFurther) if anew else contextlib.nullcontext()
    with further:
        visitor.agree(Plan(), 15)
    visitor.close()
    assert not other.met.done()  # nobody's preflight has been taken for a supervisor
    plan = SupervisedNode(port, anew, seconds=15).end()
    assert other.end() == plan and plan.start == 2 * anew  # node 0's


# --- This node alone: made-up /sys, /dev and /proc -------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an InfiniBand adapter that is as it should be; returns its root."""
    for name in ("sys", "dev", "proc"):
        monkeypatch.setattr(node_checks, name.upper(), tmp_path / name)
    for name, carrier in (("ib0", "1"), ("eth0", "1"), ("eth1", "0")):
        write(tmp_path / f"sys/class/net/{name}/carrier", carrier)
    write(tmp_path / "sys/class/net/eth1/operstate", "down")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(tmp_path / "sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN")
    write(tmp_path / "dev/infiniband/uverbs0", "")
    write(tmp_path / "proc/self/status", "Name:\tx\nCapEff:\t0000000000000000\n")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    have = [("lo", "127.0.0.1"), ("ib0", "10.0.0.1"), ("eth0", "10.1.0.1"), ("eth1", "10.2.0.1")]
    monkeypatch.setattr(node_checks, "addresses", lambda: have)
    for name in ("NETWORK", "IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def check(names: str = "", gloo: str = "", several: bool = True, network: str = "infiniband"):
    """(errors, warnings) where IFNAME and GLOO_SOCKET_IFNAME are these."""
    given = {"NETWORK": network, "IFNAME": names, "GLOO_SOCKET_IFNAME": gloo}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        return node_checks.check_node(several)


@pytest.mark.parametrize("names", ["mlx5_0", "mlx5_0:1", "mlx5_0,ib0", "ib0"])
def test_healthy_infiniband_gives_no_line(machine, names):
    assert check(names) == ([], [])


@pytest.mark.parametrize(
    ("names", "gloo", "what"),
    [
        ("mlx5_0:2", "", "mlx5_0:2 that is up (1: DOWN)"),
        ("", "eth1", "eth1 that is up (down)"),
        ("eth7", "", "eth7 that is up (none of that name)"),
    ],
)
def test_port_or_interface_that_is_down_or_missing(machine, names, gloo, what):
    (line,), warnings = check(names, gloo)
    has = "it has eth0, eth1, ib0, mlx5_0: name one of them"
    assert line.startswith(f"this node has no interface or adapter {what}; {has}") and not warnings
    assert check(gloo="eth1", several=False) == ([], [])  # nothing leaves this node


def test_library_and_device_of_infiniband_that_are_missing(machine, monkeypatch):
    missing = unittest.mock.Mock(side_effect=OSError("cannot open shared object file"))
    monkeypatch.setattr(ctypes, "CDLL", missing)
    shutil.rmtree(machine / "dev")
    errors, warnings = check("mlx5_0")
    said = ["libibverbs.so.1 is missing", "there is no /dev/infiniband/uverbs*"]
    assert [line.split(",")[0] for line in errors] == said and not warnings
    # Where the run may do without: Gloo over ib0, or a run that does not leave the node.
    assert check("ib0") == check("mlx5_0", several=False) == ([], errors)
    assert check("ib0", network="") == ([], [])


def test_no_active_port_at_all(machine):
    (machine / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("2: INIT")
    line = "no InfiniBand port of this node is ACTIVE: see ibstat, cable and switch"
    assert check("ib0") == ([], [line])


@pytest.mark.parametrize(
    ("limit", "capabilities", "warned"),
    [(8 << 20, 0, True), (8 << 20, 1 << 14, False), (64 << 30, 0, False)],
)
def test_little_memory_that_may_be_locked(machine, monkeypatch, limit, capabilities, warned):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    write(machine / "proc/self/status", f"CapEff:\t{capabilities:016x}\n")
    errors, warnings = check("mlx5_0")
    wanted = ["only 8192 KiB of memory may be locked, and "] * warned
    assert not errors and [line[:43] for line in warnings] == wanted


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
    monkeypatch.setattr(node_checks, "addresses", lambda: [("eth0", "10.1.0.1")])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    errors, _ = node_checks.check_node(several=True)
    text = "{} is up but has no address, which sockets need: give it one"
    assert [line.partition(" (")[0] for line in errors] == [text.format(name) for name in named]
    assert node_checks.check_node(several=False) == ([], [])  # nothing leaves this node


def test_machine_that_tells_nothing_gives_no_line(machine):
    shutil.rmtree(machine / "sys")
    assert check("eth0", gloo="eth0", network="") == ([], [])


def test_own_name_that_is_loopback_counts_where_no_interface_was_found(monkeypatch):
    monkeypatch.setattr(node_checks.socket, "gethostname", lambda: "localhost")
    (line,) = node_checks.check_host_name("")
    assert line.startswith("this node's own name localhost is a loopback address here")
    assert node_checks.check_host_name("eth0") == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--rdzv_endpoint=node0", "--rdzv_endpoint is 'node0': give node 0's ADDRESS:PORT"),
        ("--rdzv_backend=c10d", "invalid choice: 'c10d'"),
    ],
)
def test_wrong_options_are_one_line(capsys, words, text):
    assert text in refusal(capsys, preflight.parse_arguments, f"--nnodes=2 {words}")
