"""Two nodes as a user's machines are: their own names at 127.0.1.1, no variable set for Gloo."""

from __future__ import annotations

import shlex
import sys

import pytest

import test_faults as faults
from support.datasets import make_set
from support.nodes import NamespacePair
from support.processes import LONG, SCRIPT

ARGUMENTS = shlex.split("--max_steps 1 --timeout 20")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 16 images."""
    return make_set(tmp_path_factory.mktemp("data"), 16)


def test_two_nodes_train_where_the_own_name_is_loopback(demo, data):
    with NamespacePair() as nodes:
        nodes.usual_hosts()
        ended = demo.run([*faults.FAST, *data, *ARGUMENTS], 2, nodes=nodes)
    assert ended.json_line("Run")["env"]["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert ended.json_line("Run")["hosts"] == [*nodes.hostnames]
    assert ended.json_line("Summary")["replicas_identical"] is True
    assert ended.steps(0) != ended.steps(1)  # each node has images of its own


@LONG
def test_bare_torchrun_trains_where_the_own_name_is_loopback(data):
    with NamespacePair() as nodes:
        nodes.usual_hosts()
        runs = []
        for node in (0, 1):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += [f"--node_rank={node}", "--nproc_per_node=1", "--rdzv_backend=static"]
            torchrun += [f"--rdzv_endpoint={nodes.addresses[0]}:29500", SCRIPT]
            runs.append(nodes.popen(node, [*torchrun, *faults.FAST, *data, *ARGUMENTS]))
        ended = [run.finish(150) for run in runs]
    env = ended[0].json_line("Run")["env"]
    assert env["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert ended[0].json_line("Summary")["replicas_identical"] is True


def test_interface_that_is_set_stays(demo, data):
    """Here one that is not there: Gloo says so, and nothing else is tried."""
    env = {"GLOO_SOCKET_IFNAME": "none0"}
    argv = [*faults.FAST, *data, *ARGUMENTS]
    with NamespacePair() as nodes:
        nodes.usual_hosts()
        ended = demo.run(argv, 2, nodes=nodes, env=env, expect=1)
    found = faults.errors(ended)
    assert len(found) == 2 and all("none0" in line for line in found), ended.tail()


@LONG
def test_srun_trains_where_the_own_name_is_loopback(slurm, data):
    """Node 0 sees MASTER_ADDR, its own name, as 127.0.1.1; node 1 sees its real address."""
    nodes = slurm.pair
    for node in (0, 1):
        own, other = nodes.hostnames[node], nodes.hostnames[1 - node]
        text = f"127.0.0.1 localhost\n127.0.1.1 {own}\n{nodes.addresses[1 - node]} {other}\n"
        nodes.hosts(node).write_text(text)
    command = [sys.executable, SCRIPT, *faults.FAST, *data, *ARGUMENTS]
    run = slurm.run("srun", "-N", 2, *command, timeout=120)
    # Gloo alone would take 127.0.1.1, and connect from there only to nodes of lower addresses.
    facts = run.json_line("Run")
    assert facts["env"]["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert (facts["launcher"], facts["hosts"]) == ("srun", [*nodes.hostnames])
    assert run.json_line("Summary")["replicas_identical"] is True
