"""Two nodes as a user's machines are: their own names at 127.0.1.1, no variable set for Gloo."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import cluster as helpers
import pytest
import test_faults as faults

ARGUMENTS = shlex.split("--max_steps 2 --timeout 20")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 16 images."""
    return faults.make_set(tmp_path_factory.mktemp("data") / "set", 16)


def usual_hosts(nodes: helpers.NamespacePair) -> None:
    """As Debian and Ubuntu write them: the own name is a loopback address, the other unknown."""
    for node, name in enumerate(nodes.hostnames):
        nodes.hosts(node).write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")


def test_bare_torchrun_trains_where_the_own_name_is_loopback(data):
    with helpers.NamespacePair() as nodes:
        usual_hosts(nodes)
        runs = []
        for node in (0, 1):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
            torchrun += [f"--node_rank={node}", "--nproc_per_node=1", "--rdzv_backend=static"]
            torchrun += [f"--rdzv_endpoint={nodes.addresses[0]}:29500", faults.SCRIPT]
            runs.append(nodes.popen(node, [*torchrun, *faults.FAST, *data, *ARGUMENTS]))
        ended = [run.finish(60) for run in runs]
    env = ended[0].json_line("Run")["env"]
    assert env["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert ended[0].json_line("Summary")["replicas_identical"] is True


@helpers.LONG
def test_launcher_trains_where_the_own_name_is_loopback(data, tmp_path: Path):
    with helpers.NamespacePair() as nodes:
        usual_hosts(nodes)
        runs = faults.on_two_nodes(nodes, [*data, *ARGUMENTS], folder=tmp_path)
        ended = [run.finish(90) for run in runs]
    assert ended[0].json_line("Summary")["replicas_identical"] is True


def test_interface_that_is_set_stays(data):
    """Here one that is not there: Gloo says so, and nothing else is tried."""
    with helpers.NamespacePair() as nodes:
        usual_hosts(nodes)
        runs = []
        for node in (0, 1):
            places = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            places |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": nodes.addresses[0]}
            places |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "none0"}
            command = [sys.executable, faults.SCRIPT, *faults.FAST, *data, *ARGUMENTS]
            runs.append(nodes.popen(node, command, env=places))
        ended = [run.finish(60, expect=1) for run in runs]
    assert all("none0" in faults.the_error(run) for run in ended)
