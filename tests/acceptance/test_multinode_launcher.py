"""launch_multinode.sh trains on two nodes over the network chosen, and refuses wrong settings."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import FAST, MULTINODE, TwoNodes, finish_all, two_nodes
from support.processes import LONG, Run, start, wait_until


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[tuple[TwoNodes, list[Run]]]:
    """Three steps on two nodes, with no more settings than are needed."""
    folder = tmp_path_factory.mktemp("mein Gerät")
    data = make_set(folder / "set", 32)
    with two_nodes(folder) as nodes:
        yield nodes, finish_all(nodes.start_both(*data, *FAST, "--max_steps", 3))


def record(nodes: TwoNodes, kind: str) -> dict:
    """The last such record in node 0's log."""
    return Run([], 0, nodes.log(0), 0).json_line(kind)


def test_both_nodes_train_and_each_logs_its_own_ranks(trained):
    nodes, runs = trained
    for node, run in enumerate(runs):
        assert [step for _, step, _ in run.steps(node)] == [1, 2, 3], run.tail()
        assert all(f"[CPU {node}] {line}\n" in nodes.log(node) for line in run.lines(node))
        assert f"[CPU {1 - node}]" not in nodes.log(node)
    facts, summary = record(nodes, "Run"), record(nodes, "Summary")
    assert (facts["world_size"], facts["hosts"]) == (2, ["node0", "node1"])
    assert summary["steps"] == 3 and summary["replicas_identical"] is True


def test_torchrun_command_is_in_the_log_before_the_training(trained):
    nodes, _ = trained
    for node in (0, 1):
        log = nodes.log(node)
        command = re.search(r"torchrun .*--rdzv[-_]backend=static.*", log)
        assert command and command.start() < log.index("[CPU ")
        assert re.search(rf"--node[-_]rank[= ]{node} ", command[0])
        assert nodes.pair.addresses[0] in command[0]


def test_gloo_takes_the_interface_that_joins_the_nodes(trained):
    nodes, _ = trained
    assert record(nodes, "Run")["env"]["GLOO_SOCKET_IFNAME"] == nodes.pair.interface


# Of a node that is otherwise right; each with the words that the one line must have.
NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "203.0.113.1"}
WRONG = [
    ({"NODE_RANK": None}, "NODE_RANK"),
    ({"NODE_RANK": "2"}, "NODE_RANK is '?2"),
    ({"WORLD_SIZE": "4"}, "NNODES.*WORLD_SIZE"),
    ({"NNODES": "two"}, "NNODES is '?two"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR"),
    ({"MASTER_PORT": "abc"}, "MASTER_PORT is '?abc"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT is '?99999"),
    ({"RESTARTS": "-1"}, "RESTARTS is '?-1"),
    ({"GPUS_PER_NODE": "all"}, "GPU"),
    ({"NETWORK": "token-ring", "IFNAME": "lo"}, "NETWORK is '?token-ring"),
    ({"NETWORK": "ethernet"}, "IFNAME"),
    pytest.param({"IFNAME": "none0", "CONNECT_TIMEOUT": "2"}, "none0"),
    ({"NETWORKS": "ethernet infiniband"}, "NETWORKS .*=INTERFACE"),
    ({"NETWORKS": "a=lo a=lo"}, "NETWORKS .*a"),
    (dict.fromkeys(NODE), "NNODES.*NODE_RANK.*MASTER_ADDR"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_wrong_settings_are_refused_in_one_line(tmp_path, settings, words):
    env = NODE | {"PYTHON": sys.executable} | settings
    with start(["bash", MULTINODE, "--lr", 1], env=env, cwd=tmp_path) as started:
        run = started.finish(30, expect=None)
    assert run.returncode not in (0, 75)
    assert re.search(rf"^\S+: error: .*{words}", run.lines()[-1]), run.tail()
    assert run.out.count("error: ") == 1


@LONG
def test_probe_measures_the_link_before_the_training(tmp_path):
    data = make_set(tmp_path / "set", 32)
    with two_nodes(tmp_path) as nodes:
        finish_all(nodes.start_both(*data, *FAST, "--max_steps", 2, PROBE=1))
        log = nodes.log(0)
        assert log.index("[CPU 0] Probe {") < log.index("[CPU 0] Run {")
        assert record(nodes, "Probe")["world_size"] == 2
        assert record(nodes, "Summary")["steps"] == 2


@LONG
def test_network_sets_the_variables_of_nccl_and_gloo_but_never_the_users_own(tmp_path):
    """One value of each kind is the user's; a line says that it stays."""
    data = make_set(tmp_path / "set", 32)
    with two_nodes(tmp_path) as nodes:
        settings = {"NETWORK": "ethernet", "IFNAME": "eth0", "NCCL_IB_DISABLE": "0"}
        runs = finish_all(nodes.start_both(*data, *FAST, "--max_steps", 2, **settings))
        env = record(nodes, "Run")["env"]
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0"  # without the = it would match eth00, too
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert env["NCCL_NET"] == "Socket"
    assert env["NCCL_IB_DISABLE"] == "0"
    for run in runs:
        assert re.search(r"\.sh: .*NCCL_IB_DISABLE", run.out)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_while_it_waits_for_the_other_node_ends_it_at_once(tmp_path, name, code):
    data = make_set(tmp_path / "set", 8)
    with two_nodes(tmp_path) as nodes:
        alone = nodes.start(0, *data, *FAST)

        def listens() -> bool:
            """On any port of the node, where nothing else runs; 0A is a listening socket."""
            tables = [Path(f"/proc/{alone.pid}/net/{name}") for name in ("tcp", "tcp6")]
            return any(" 0A " in table.read_text() for table in tables)

        alone.wait_for("torchrun|waits")  # it is in its namespace
        wait_until(listens, 60, "the rendezvous of node 0")
        alone.signal(signal.Signals[name])
        alone.finish(10, expect=code, clean=5)
