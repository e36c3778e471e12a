"""Two nodes that cannot reach each other, or disagree, say what to check and end in time."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from support.datasets import make_set
from support.launchers import FAST, TwoNodes, end_within, finish_all, two_nodes
from support.nodes import NamespacePair
from support.processes import LONG, Run, Started, processes, wait_until

TIMEOUT = 8  # seconds, of --timeout
CONNECT = 10  # seconds, of CONNECT_TIMEOUT
MARGIN = 15  # seconds that an end may take beyond these
STEP_3 = r"\| Step 3 "
BOTH = "one=eth0 two=eth1"


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 24 steps on two nodes."""
    images = make_set(tmp_path_factory.mktemp("set"), 64)
    return [*FAST, *images, "--num_epochs", "3", "--timeout", str(TIMEOUT)]


def fail_within(seconds: float, started: list[Started]) -> list[Run]:
    """The same with an exit code other than 0."""
    runs = end_within(seconds, started)
    for run in runs:
        assert run.returncode != 0, run.tail()
    return runs


def said(run: Run, pattern: str) -> None:
    assert re.search(pattern, run.out), f"no {pattern!r} in\n{run.tail()}"


def second_cable(pair: NamespacePair) -> None:
    """Joins the nodes by eth1, too."""
    pair.ip(0, f"link add eth1 type veth peer name eth1 netns {pair.names[1]}")
    for node in (0, 1):
        pair.ip(node, f"addr add 10.78.0.{node + 1}/24 dev eth1", "link set eth1 up")


def swallow(pair: NamespacePair, interface: str, but: str) -> None:
    """A firewall on node 1 drops all TCP of an interface, except to and from these ports."""
    rules = f"""
    table inet demo {{
        chain input {{
            type filter hook input priority 0;
            iifname {interface} tcp sport != {but} tcp dport != {but} drop
        }}
        chain output {{
            type filter hook output priority 0;
            oifname {interface} tcp sport != {but} tcp dport != {but} drop
        }}
    }}"""
    command = ["ip", "netns", "exec", pair.names[1], "nft", "-f", "-"]
    subprocess.run(command, input=rules, text=True, check=True)


# --- The link ---------------------------------------------------------------------------------


@LONG
def test_a_cable_that_is_pulled_ends_both_nodes(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        started = nodes.start_both(*training, "--num_epochs", 99)
        for one in started:
            one.wait_for(STEP_3)
        nodes.pair.link_down(1)
        fail_within(TIMEOUT + MARGIN, started)
        for node in (0, 1):
            assert re.search(rf"^\[CPU {node}\] ERROR", nodes.log(node), re.MULTILINE)


@LONG
def test_hosts_files_that_call_the_own_name_loopback_do_not_matter(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        nodes.pair.usual_hosts()
        runs = finish_all(nodes.start_both(*training, "--max_steps", 3))
    for node, run in enumerate(runs):
        assert run.steps(node)[-1][1] == 3


def has_rank(started: Started) -> bool:
    return any("RANK" in process.env for process in processes(started.test_id))


@LONG
def test_a_firewall_that_opens_the_rendezvous_alone_is_named(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        swallow(nodes.pair, "eth0", but=f"{nodes.port}-{nodes.port + 9}")
        started = nodes.start_both(*training)
        wait_until(lambda: all(map(has_rank, started)), 60, "both ranks")
        runs = fail_within(TIMEOUT + MARGIN, started)
        for node, run in enumerate(runs):
            said(run, rf"(?m)^\[CPU {node}\] ERROR.*firewall")
            assert not run.steps(node)


# --- A node that does not come, or comes otherwise --------------------------------------------


def test_a_node_that_never_comes_is_counted_and_what_to_check_is_said(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        started = nodes.start(0, *training, CONNECT_TIMEOUT=5)
        (run,) = fail_within(5 + MARGIN, [started])
    said(run, r"1/2|1 of 2|missing: node 1")
    said(run, "NODE_RANK|firewall|MASTER_ADDR")


@LONG
def test_a_launcher_that_refuses_on_one_node_says_why_and_the_other_ends(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        first = nodes.start(0, *training, CONNECT_TIMEOUT=CONNECT)
        second = nodes.start(1, *training, CONNECT_TIMEOUT=CONNECT, RESTARTS="many")
        runs = fail_within(CONNECT + MARGIN, [first, second])
    said(runs[1], r"(?m)^.*error: RESTARTS is 'many'")
    said(runs[0], "NODE_RANK|firewall|MASTER_ADDR")


@LONG
def test_a_rank_that_fails_before_the_process_group_ends_the_other_node(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        first = nodes.start(0, *training)
        second = nodes.start(1, *training, "--batch_size", 0)
        second.wait_for("batch_size.*0")
        runs = fail_within(TIMEOUT + MARGIN, [first, second])
    said(runs[1], r"(?m)error: .*--batch_size")
    assert not runs[0].steps()


@LONG
def test_another_argument_on_one_node_is_named(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        first = nodes.start(0, *training, CONNECT_TIMEOUT=CONNECT)
        second = nodes.start(1, *training, "--lr", 0.5, CONNECT_TIMEOUT=CONNECT)
        runs = fail_within(CONNECT + MARGIN, [first, second])
    said(runs[0], r"(?m)^\[CPU 0\] ERROR.*--lr")


@LONG
def test_two_nodes_with_the_same_rank_end_and_say_what_to_check(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        variables = {"NODE_RANK": 0, "CONNECT_TIMEOUT": CONNECT}
        runs = fail_within(CONNECT + MARGIN, nodes.start_both(*training, **variables))
    for run in runs:
        said(run, "NODE_RANK")


@LONG
def test_a_port_that_is_taken_is_named(training, tmp_path):
    """By a server that takes connections and never answers what it does not understand. For such
    a one the other node may wait until it is told to stop.
    """
    with two_nodes(tmp_path) as nodes:
        for port in (nodes.port, nodes.port + 1):  # one of them is that of the training
            nodes.pair.popen(0, [sys.executable, "-m", "http.server", port], cwd=tmp_path)
        wait_until(lambda: len(listening(nodes.pair)) == 2, 20, "both servers")
        first, second = nodes.start_both(*training, CONNECT_TIMEOUT=CONNECT)
        (run,) = fail_within(CONNECT + MARGIN, [first])
        if second.running():
            second.signal(signal.SIGTERM)
        fail_within(5, [second])
    said(run, rf"error: .*\b({nodes.port}|{nodes.port + 1})\b")
    said(run, "error: .*port")


def listening(pair: NamespacePair) -> list[bytes]:
    """Sockets on node 0 that wait for connections."""
    command = ["ip", "netns", "exec", pair.names[0], "ss", "-Hltn"]
    return subprocess.run(command, capture_output=True, check=True).stdout.splitlines()


# --- Several networks --------------------------------------------------------------------------


@LONG
def test_of_two_networks_one_that_a_node_does_not_have_starts_nothing(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        spare = "link add eth1 type veth peer name spare"
        nodes.pair.ip(0, spare, "link set spare up", "link set eth1 up")
        started = nodes.start_both(*training, NETWORKS=BOTH, CONNECT_TIMEOUT=CONNECT)
        runs = fail_within(CONNECT + MARGIN, started)
        assert not (nodes.folder(0) / "logs" / "run" / "two").exists()
    said(runs[1], "(?m)^.*error: .*eth1")
    assert not any("| Step " in run.out for run in runs)
    assert "torchrun" not in runs[1].out


@LONG
def test_a_network_whose_probe_fails_is_left_out_and_the_other_is_compared(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        second_cable(nodes.pair)
        swallow(nodes.pair, "eth1", but="1")
        started = nodes.start_both(*training, NETWORKS="two=eth1 one=eth0", PROBE=1)
        runs = [one.finish(240, None, clean=10) for one in started]
        logs = [(nodes.log(node, "run/two"), nodes.log(node, "run/one")) for node in (0, 1)]
        comparison = (nodes.folder(0) / "logs" / "run" / "compare.md").read_text()
    for bad, good in logs:
        assert "| Step 1 " not in bad and "| Step 24 " in good
    assert all(run.returncode for run in runs)
    assert re.search(r"(?m)^.*\btwo\b.*(missing|no |not |incomplete|failed)", comparison)


def steps_of(log: str, rank: int) -> set[int]:
    return {int(step) for step in re.findall(rf"\[CPU {rank}\] .*\| Step (\d+) ", log)}


def endpoints(nodes: TwoNodes, node: int, label: str) -> set[str]:
    """Where this node has met, or waited for, the other one for a network."""
    return set(re.findall(r"--rdzv_endpoint=(\S+)", nodes.log(node, f"run/{label}")))


@LONG
def test_a_restart_over_one_network_never_meets_the_next_network(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        second_cable(nodes.pair)
        started = nodes.start_both(*training, NETWORKS=BOTH, RESTARTS=1)
        for one in started:
            one.wait_for(STEP_3)
        subprocess.run(["kill", "-KILL", str(started[1].rank_pid(1))], check=True)
        finish_all(started, 240)
        for label, interface in (("one", "eth0"), ("two", "eth1")):
            first, second = (nodes.log(node, f"run/{label}") for node in (0, 1))
            assert steps_of(first, 0) == steps_of(second, 1) == set(range(1, 25))
            assert set(re.findall(r'Run \{.*"GLOO_SOCKET_IFNAME": "(\w+)"', first)) == {interface}
        for node in (0, 1):
            assert len(endpoints(nodes, node, "one")) == 2, "a start and its restart"
            assert not endpoints(nodes, node, "one") & endpoints(nodes, 1 - node, "two")


@LONG
def test_nodes_that_started_different_numbers_of_times_do_not_meet(training, tmp_path):
    """torchrun of node 1 is killed while it waits for node 0, which has not been started yet."""
    variables = {"NETWORKS": BOTH, "RESTARTS": 1, "CONNECT_TIMEOUT": CONNECT}
    with two_nodes(tmp_path) as nodes:
        second_cable(nodes.pair)
        second = nodes.start(1, *training, **variables)
        wait_until(lambda: second.pids("distributed.run"), 60, "torchrun on node 1")
        subprocess.run(["kill", "-KILL", *map(str, second.pids("distributed.run"))], check=True)
        second.wait_for("restart 1")
        first = nodes.start(0, *training, **variables)
        fail_within(CONNECT + MARGIN, [first])
        second.signal(signal.SIGTERM)
        fail_within(10, [second])
        assert "| Step " not in nodes.log(0, "run/one") + nodes.log(1, "run/one")
        assert not (nodes.folder(0) / "logs" / "run" / "two").exists()
