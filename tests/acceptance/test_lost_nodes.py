"""Two nodes survive what is killed, and otherwise end in time and say what to check."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from support.datasets import make_set, met_by, truncate
from support.launchers import (
    BUSY,
    COMMAND,
    FAST,
    TwoNodes,
    end_within,
    finish_all,
    has_rank,
    starts,
    two_nodes,
)
from support.processes import Run, Started, processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.root]
TIMEOUT = 8  # seconds, of --timeout
CONNECT = 10  # seconds, of CONNECT_TIMEOUT
MARGIN = 15  # seconds that an end may take beyond these
BOTH = ["--network", "one=eth0", "--network", "two=eth1"]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 12 steps on two nodes."""
    images = make_set(tmp_path_factory.mktemp("set"), 32)
    return [*FAST, *images, "--num_epochs", "3", "--timeout", str(TIMEOUT)]


def weights(run: Run) -> str:
    return run.json_line("Summary")["weights_sha256"]


def said(run: Run, pattern: str) -> None:
    assert re.search(pattern, run.out, re.MULTILINE), f"no {pattern!r} in\n{run.tail()}"


def victim(started: Started, what: str) -> int:
    """A process of node 1: its rank or its torchrun."""
    rank = started.rank_pid(1)
    if what == "rank":
        return rank
    return next(p.parent for p in processes(started.test_id) if p.pid == rank)


# --- What a restart survives, and what not ------------------------------------------------------


def test_after_each_fault_both_nodes_restart_and_end_with_the_weights_of_an_unbroken_run(
    training, tmp_path
):
    """A rank is killed, a torchrun is killed, a cable is pulled until both nodes have noticed: all
    over the first of two networks. Nothing happens over the second one, which no restart meets.
    Each node logs its command and its own ranks; the hosts files map their own names to loopback.
    """
    steps = set(range(1, 17))
    saves = ["--num_epochs", 4, "--checkpoint_every", 2]
    folder = tmp_path / "mein Gerät"
    folder.mkdir()
    with two_nodes(folder) as nodes:
        nodes.pair.usual_hosts()
        nodes.second_cable()
        started = nodes.train(*training, *saves, runs=BOTH, RESTARTS=3)
        for restart, what in enumerate(["rank", "torchrun", "cable"], 1):
            if what == "cable":
                nodes.pair.link_down()
            else:
                os.kill(victim(started[1], what), signal.SIGKILL)
            for one in started:
                one.wait_for(f"restart {restart} of 3", TIMEOUT + MARGIN + BUSY)
            if what == "cable":
                nodes.pair.ip(1, "link set eth0 up")
            else:
                started[1].wait_for(rf"restart {restart} of 3[\s\S]*\| Step ")
        runs = finish_all(started, 300)
        digests = []
        for label, interface, begun in (("one", "eth0", 4), ("two", "eth1", 1)):
            logs = [nodes.log(node, f"run/{label}") for node in (0, 1)]
            for node in (0, 1):
                assert steps_of(logs[node], node) == steps
                assert len(endpoints(nodes, node, label)) == begun
            assert set(re.findall(r'Run \{.*"GLOO_SOCKET_IFNAME": "(\w+)"', logs[0])) == {
                interface
            }
            first = Run([], 0, logs[0], 0)
            digests.append(weights(first))
            assert logs[0].count("Resumed from") == begun - 1
            assert first.json_line("Run")["hosts"] == ["node0", "node1"]
            assert first.json_line("Summary")["replicas_identical"] is True
            for node, log in enumerate(logs):
                told = {"--rdzv_backend=static", f"--node_rank={node}", f"--rdzv_id=run-{label}-0"}
                words = COMMAND.search(log)
                assert told <= {*shlex.split(words[1])} and words.start() < log.index("[CPU ")
                assert f"[CPU {1 - node}]" not in log
        assert digests[0] == digests[1]
        for node in (0, 1):
            assert not endpoints(nodes, node, "one") & endpoints(nodes, 1 - node, "two")
            both = nodes.log(node, "run/one") + nodes.log(node, "run/two")
            assert all(f"[CPU {node}] {line}\n" in both for line in runs[node].lines(node))
    assert not re.search(r"exitcode +: 2\b", runs[0].out + runs[1].out)


# What happens on node 1, and what the last lines of node 0 and of node 1 name.
ENDS = [
    ("rank", "another rank", "SIGKILL"),
    ("torchrun", "parent process", "parent process"),
    ("cable", "another rank", "another rank"),
]


@pytest.mark.parametrize(("what", "first", "second"), ENDS, ids=["rank", "torchrun", "cable"])
def test_without_restarts_the_last_line_of_each_node_names_the_cause(
    training, tmp_path, what, first, second
):
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training, "--num_epochs", 99)
        if what == "cable":
            nodes.pair.link_down()
        else:
            os.kill(victim(started[1], what), signal.SIGKILL)
        runs = end_within(TIMEOUT + MARGIN, started, 1)
    for run, cause in zip(runs, (first, second), strict=True):
        assert re.search(f"run.py: error: .*{cause}", run.lines()[-1]), run.tail()


def test_a_stopped_rank_ends_the_other_node_and_its_own_after_a_second_signal(training, tmp_path):
    """SIGSTOP: the rank does nothing, and cannot be asked to stop. torchrun waits two minutes."""
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training, "--num_epochs", 99)
        os.kill(victim(started[1], "rank"), signal.SIGSTOP)
        (first,) = end_within(TIMEOUT + MARGIN, started[:1])
        started[1].signal(signal.SIGINT)
        started[1].wait_for("closing signal", 30)
        started[1].signal(signal.SIGINT)
        end_within(5, started[1:], 128 + signal.SIGINT)
    said(first, r"^\[CPU 0\] .*ERROR")


def test_an_image_that_is_damaged_on_one_node_ends_it_without_a_restart(tmp_path):
    """The other one has lost a connection, and may try again."""
    paths = [make_set(tmp_path / f"{node}", 32, size=(200, 160)) for node in (0, 1)]
    damaged = tmp_path / "1/images" / met_by(1, 32)
    truncate(damaged)
    words = [*FAST, "--workers", 1, "--num_epochs", 2, "--timeout", TIMEOUT]
    with two_nodes(tmp_path) as nodes:
        own = {"RESTARTS": 1, "CONNECT_TIMEOUT": CONNECT}
        started = [nodes.start(node, *words, *paths[node], **own) for node in (0, 1)]
        wait_until(lambda: all(map(has_rank, started)), 60, "the ranks")
        rank = started[0].rank_pid(0)
        words = rf"{re.escape(str(damaged))}.*truncated.*check_coco.py --decode"
        started[1].wait_for(rf"^\[CPU 1\] ERROR: .*{words}")
        wait_until(lambda: not started[1].pids(), 10, "the end of node 1")
        wait_until(lambda: rank not in started[0].pids(), 5, "the end of the rank of node 0")
        assert started[1].process.wait() == 2
        started[0].signal(signal.SIGTERM)
        end_within(10, started[:1])
        log = nodes.log(1)
    assert len(re.findall(rf"^\[CPU 1\] .*{damaged.name}", log, re.MULTILINE)) == 1
    assert starts(log) == 1
    assert not re.search(r"^\[CPU 1\] .*(Traceback|DataLoader)", log, re.MULTILINE)


# --- Nodes that do not reach each other, or come otherwise -------------------------------------


def test_a_launcher_that_refuses_on_one_node_says_why_and_the_other_ends(training, tmp_path):
    """The other one says how many nodes came, and what to check."""
    with two_nodes(tmp_path) as nodes:
        first = nodes.start(0, *training, CONNECT_TIMEOUT=CONNECT)
        second = nodes.start(1, *training, CONNECT_TIMEOUT=CONNECT, RESTARTS="many")
        runs = end_within(CONNECT + MARGIN, [first, second])
    said(runs[1], "^.*error: RESTARTS is 'many'")
    said(runs[0], "1/2")
    said(runs[0], "NODE_RANK|firewall|MASTER_ADDR")


def test_two_nodes_with_the_same_rank_end_and_say_what_to_check(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        variables = {"NODE_RANK": 0, "CONNECT_TIMEOUT": CONNECT}
        for run in end_within(CONNECT + MARGIN, nodes.start_both(*training, **variables)):
            said(run, "NODE_RANK")


def test_a_port_that_is_taken_is_named(training, tmp_path):
    """By a server that takes connections and never answers what it does not understand. For such
    a one the other node may wait until it is told to stop.
    """
    with two_nodes(tmp_path) as nodes:
        port = nodes.port  # that of the training
        nodes.pair.popen(0, [sys.executable, "-m", "http.server", port], cwd=tmp_path)
        wait_until(nodes.listens, 20, "the server")
        first, second = nodes.start_both(*training, CONNECT_TIMEOUT=CONNECT)
        (run,) = end_within(CONNECT + MARGIN, [first])
        if second.running():
            second.signal(signal.SIGTERM)
        end_within(5, [second])
    said(run, rf"error: .*\b{port}\b.*port")


# --- Several networks --------------------------------------------------------------------------


def test_a_run_that_fails_on_node_1_alone_costs_no_other_run(training, tmp_path):
    """Its run.py is killed over the first of two networks, where the training goes on."""
    with two_nodes(tmp_path) as nodes:
        nodes.second_cable()
        started = nodes.train(*training, runs=BOTH)
        launcher = min(started[1].pids("tools/run.py --"))  # the other is its log's writer
        os.kill(launcher, signal.SIGKILL)
        runs = [one.finish(200, code, clean=10) for one, code in zip(started, (0, 1), strict=True)]
        for label in ("one", "two"):
            for node in (0, 1):
                assert steps_of(nodes.log(node, f"run/{label}"), node) == set(range(1, 13))
    said(runs[1], "error: one has failed")
    said(runs[0], r"^\|.*\| +one +\| +two +\|$")  # they are compared


def test_of_two_networks_one_that_a_node_does_not_have_starts_nothing(training, tmp_path):
    """The other node waits for it over both."""
    with two_nodes(tmp_path) as nodes:
        spare = "link add eth1 type veth peer name spare"
        nodes.pair.ip(0, spare, "link set spare up", "link set eth1 up")
        started = nodes.start_both(*training, runs=BOTH, CONNECT_TIMEOUT=CONNECT)
        (refused,) = end_within(MARGIN, started[1:], 2)
        started[0].wait_for(r"run 2 of 2: .* about \d+ min left", CONNECT + MARGIN + BUSY)
        started[0].signal(signal.SIGTERM)
        (run,) = end_within(MARGIN, started[:1])
    said(refused, "^.*error: .*eth1")
    assert starts(refused.out) == 0 and "| Step " not in run.out


def test_networks_in_another_order_on_each_node_are_never_mixed(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        nodes.second_cable()
        orders = enumerate([BOTH, BOTH[2:] + BOTH[:2]])
        started = [nodes.start(k, *training, runs=n, CONNECT_TIMEOUT=5) for k, n in orders]
        for one in started:
            one.wait_for("run 2 of 2", 5 + MARGIN + BUSY)
        started[1].wait_for(r"run 2 of 2[\s\S]*waiting for")
        wait_until(nodes.listens, 20, "node 0 to wait again")
        time.sleep(5)  # as long as they might need to meet
        for one in started:
            one.signal(signal.SIGTERM)
        runs = end_within(MARGIN, started)
    assert not any("| Step " in run.out for run in runs)


def steps_of(log: str, rank: int) -> set[int]:
    return {int(step) for step in re.findall(rf"\[CPU {rank}\] .*\| Step (\d+) ", log)}


def endpoints(nodes: TwoNodes, node: int, label: str) -> set[str]:
    """Where this node has met, or waited for, the other one for a network."""
    return set(re.findall(r"--rdzv_endpoint=(\S+)", nodes.log(node, f"run/{label}")))


def test_nodes_that_started_different_numbers_of_times_do_not_meet(training, tmp_path):
    """torchrun of node 1 is killed while it waits for node 0, which has not been started yet."""
    variables = {"RESTARTS": 1, "CONNECT_TIMEOUT": CONNECT}
    with two_nodes(tmp_path) as nodes:
        second = nodes.start(1, *training, **variables)
        wait_until(lambda: second.pids("distributed.run"), 60, "torchrun on node 1")
        subprocess.run(["kill", "-KILL", *map(str, second.pids("distributed.run"))], check=True)
        second.wait_for("restart 1")
        first = nodes.start(0, *training, **variables)
        end_within(CONNECT + MARGIN, [first])
        second.signal(signal.SIGTERM)
        end_within(10, [second])
        assert "| Step " not in nodes.log(0) + nodes.log(1)
