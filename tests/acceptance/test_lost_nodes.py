"""Two nodes survive what is killed or lost, or else end in time and say what to check."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time

import pytest

from support.datasets import make_set, met_by, truncate
from support.launchers import (
    BUSY,
    COMMAND,
    FAST,
    end_within,
    has_rank,
    starts,
    two_nodes,
)
from support.processes import Run, Started, processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.root]
TIMEOUT = 8  # seconds, of --timeout
CONNECT = 10  # seconds, of CONNECT_TIMEOUT
MARGIN = 15  # seconds that an end may take beyond these
CABLE_OUT = "link set eth0 down"  # packets are lost without an error, connections stay open
BOTH = ["--network", "one=eth0", "--network", "two=eth1"]


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 12 steps on two nodes."""
    images = make_set(tmp_path_factory.mktemp("set"), 32)
    return [*FAST, *images, "--num_epochs", "3", "--timeout", str(TIMEOUT)]


def said(text: str, pattern: str) -> None:
    assert re.search(pattern, text, re.MULTILINE), f"no {pattern!r} in\n{text[-9000:]}"


def victim(started: Started, what: str) -> int:
    """A process of node 1: its rank or its torchrun."""
    rank = started.rank_pid(1)
    if what == "rank":
        return rank
    return next(p.parent for p in processes(started.test_id) if p.pid == rank)


def steps_of(log: str, rank: int) -> set[int]:
    return {int(step) for step in re.findall(rf"\[CPU {rank}\] .*\| Step (\d+) ", log)}


# --- What a restart survives, and what not ------------------------------------------------------


def test_after_each_fault_both_nodes_restart_as_if_unbroken(training, folder):
    """A rank is killed, a torchrun is killed, a cable is pulled until both nodes have noticed: all
    over the first of two networks. Nothing happens over the second one, which no restart meets.
    Each node logs its command and its own ranks; the hosts files map their own names to loopback.
    """
    saves = ["--num_epochs", 4, "--checkpoint_every", 2]
    with two_nodes(folder) as nodes:
        nodes.pair.usual_hosts()
        nodes.pair.second_cable("eth1", "eth1")
        started = nodes.train(*training, *saves, runs=BOTH, RESTARTS=3)
        for restart, what in enumerate(["rank", "torchrun", "cable"], 1):
            if what == "cable":
                nodes.pair.ip(1, CABLE_OUT)
            else:
                os.kill(victim(started[1], what), signal.SIGKILL)
            for one in started:
                one.wait_for(f"restart {restart} of 3", TIMEOUT + MARGIN + BUSY)
            if what == "cable":
                nodes.pair.ip(1, "link set eth0 up")
            else:
                started[1].wait_for(rf"restart {restart} of 3[\s\S]*\| Step ")
        runs = [one.finish(300, clean=10) for one in started]
        digests, met = set(), {}
        for label, interface, begun in (("one", "eth0", 4), ("two", "eth1", 1)):
            logs = [nodes.log(node, f"run/{label}") for node in (0, 1)]
            for node, log in enumerate(logs):
                assert steps_of(log, node) == set(range(1, 17))
                met[label, node] = set(re.findall(r"--rdzv_endpoint=(\S+)", log))
                assert len(met[label, node]) == begun
                told = {"--rdzv_backend=static", f"--node_rank={node}", f"--rdzv_id=run-{label}-0"}
                command = COMMAND.search(log)
                assert told <= {*shlex.split(command[1])} and command.start() < log.index("[CPU ")
                own = Run([], 0, log, 0)
                assert {*own.lines(node)} <= {*runs[node].lines(node)} and not own.lines(1 - node)
            named = re.findall(r'Run \{.*"GLOO_SOCKET_IFNAME": "(\w+)"', logs[0])
            assert {*named} == {interface} and logs[0].count("Resumed from") == begun - 1
            first = Run([], 0, logs[0], 0)
            assert first.json_line("Run")["hosts"] == ["node0", "node1"]
            assert first.json_line("Summary")["replicas_identical"] is True
            digests.add(first.json_line("Summary")["weights_sha256"])
        assert len(digests) == 1
        assert not met["one", 0] & met["two", 1] and not met["one", 1] & met["two", 0]
    assert not re.search(r"exitcode +: 2\b", runs[0].out + runs[1].out)


# What happens on node 1, and what the last lines of node 0 and of node 1 name.
ENDS = [
    ("rank", "another rank", "SIGKILL"),
    ("torchrun", "parent process", "parent process"),
    ("cable", "another rank", "another rank"),
]


@pytest.mark.parametrize(("what", "first", "second"), ENDS)
def test_without_restarts_the_last_line_of_each_node_names_the_cause(
    training, tmp_path, what, first, second
):
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training, "--num_epochs", 99)
        if what == "cable":
            nodes.pair.ip(1, CABLE_OUT)
        else:
            os.kill(victim(started[1], what), signal.SIGKILL)
        runs = end_within(TIMEOUT + MARGIN, started, 1)
    for run, cause in zip(runs, (first, second), strict=True):
        assert re.search(f"run.py: error: .*{cause}", run.lines()[-1]), run.tail()


def test_a_stopped_rank_ends_the_other_node(training, tmp_path):
    """SIGSTOP: the rank does nothing, and cannot be asked to stop. torchrun waits two minutes."""
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training, "--num_epochs", 99)
        os.kill(victim(started[1], "rank"), signal.SIGSTOP)
        (first,) = end_within(TIMEOUT + MARGIN, started[:1])
        started[1].signal(signal.SIGINT)
        started[1].wait_for("closing signal", 30)
        started[1].signal(signal.SIGINT)
        end_within(5, started[1:], 128 + signal.SIGINT)
    said(first.out, r"^\[CPU 0\] .*ERROR")


def test_an_image_that_is_damaged_on_one_node_ends_it(tmp_path):
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


APART = [  # what the launcher of each node is given more, and what its output says
    ([{}, {"RESTARTS": "many"}], ["1/2.*(NODE_RANK|firewall)", "^.*error: RESTARTS is 'many'"]),
    ([{}, {"NODE_RANK": 0}], ["NODE_RANK", "NODE_RANK"]),
]


@pytest.mark.parametrize(("own", "words"), APART, ids=["refused", "same rank"])
def test_nodes_that_do_not_meet_end_and_say_what_to_check(training, tmp_path, own, words):
    """One that refuses its own settings says why; the other one, how many nodes came."""
    with two_nodes(tmp_path) as nodes:
        given = [{"CONNECT_TIMEOUT": CONNECT} | more for more in own]
        started = [nodes.start(node, *training, **given[node]) for node in (0, 1)]
        for run, pattern in zip(end_within(CONNECT + MARGIN, started), words, strict=True):
            said(run.out, pattern)


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
    said(run.lines()[-1], rf"error: .*\b{port}\b.*\(MASTER_PORT\)")


# --- Several networks --------------------------------------------------------------------------


def test_a_run_that_fails_on_node_1_alone_costs_no_other_run(training, tmp_path):
    """Its run.py is killed over the first of two networks, where the training goes on."""
    with two_nodes(tmp_path) as nodes:
        nodes.pair.second_cable("eth1", "eth1")
        started = nodes.train(*training, runs=BOTH)
        launcher = min(started[1].pids("tools/run.py --"))  # the other is its log's writer
        os.kill(launcher, signal.SIGKILL)
        runs = [one.finish(200, code, clean=10) for one, code in zip(started, (0, 1), strict=True)]
        for label in ("one", "two"):
            for node in (0, 1):
                assert steps_of(nodes.log(node, f"run/{label}"), node) == set(range(1, 13))
    said(runs[1].out, "error: one has failed")
    said(runs[0].out, r"^\|.*\| +one +\| +two +\|$")  # they are compared


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
    said(refused.out, "^.*error: .*eth1")
    assert starts(refused.out) == 0 and "| Step " not in run.out


def test_networks_in_another_order_on_each_node_are_never_mixed(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        nodes.pair.second_cable("eth1", "eth1")
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


def test_nodes_that_started_different_numbers_of_times_do_not_meet(training, tmp_path):
    """torchrun of node 1 is killed while it waits for node 0, which has not been started yet."""
    variables = {"RESTARTS": 1, "CONNECT_TIMEOUT": CONNECT}
    with two_nodes(tmp_path) as nodes:
        second = nodes.start(1, *training, **variables)
        wait_until(lambda: second.pids("distributed.run"), 60, "torchrun on node 1")
        for pid in second.pids("distributed.run"):
            os.kill(pid, signal.SIGKILL)
        second.wait_for("restart 1")
        first = nodes.start(0, *training, **variables)
        end_within(CONNECT + MARGIN, [first])
        second.signal(signal.SIGTERM)
        end_within(10, [second])
        assert "| Step " not in nodes.log(0) + nodes.log(1)
