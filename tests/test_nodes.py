"""Two nodes as a user's machines are: their own names at 127.0.1.1, no variable set for Gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

import test_faults as faults
from support.datasets import make_set
from support.forks import ForkServer, write
from support.nodes import NamespacePair
from support.processes import LONG, SCRIPT


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    data = make_set(tmp_path_factory.mktemp("data"), 16)
    return [*faults.FAST, *data, "--max_steps", 1, "--timeout", 20]


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamespacePair]:
    with NamespacePair() as pair:
        pair.usual_hosts()
        yield pair


def test_two_nodes_train_where_the_own_name_is_loopback(demo, nodes, argv):
    ended = demo.run(argv, 2, nodes=nodes)
    assert ended.json_line("Run")["env"]["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert ended.json_line("Run")["hosts"] == [*nodes.hostnames]
    assert ended.json_line("Summary")["replicas_identical"] is True
    assert ended.steps(0) != ended.steps(1)  # each node has images of its own


@LONG
def test_bare_torchrun_trains_where_the_own_name_is_loopback(nodes, argv):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    torchrun += ["--rdzv_backend=static", f"--rdzv_endpoint={nodes.addresses[0]}:29500"]
    runs = [nodes.popen(n, [*torchrun, f"--node_rank={n}", SCRIPT, *argv]) for n in (0, 1)]
    first, _ = (run.finish(150) for run in runs)
    assert first.json_line("Run")["env"]["GLOO_SOCKET_IFNAME"] == nodes.interface
    assert first.json_line("Summary")["replicas_identical"] is True


def test_interface_that_is_set_stays(demo, nodes, argv):
    """Here one that is not there: Gloo says so, and nothing else is tried."""
    ended = demo.run(argv, 2, nodes=nodes, env={"GLOO_SOCKET_IFNAME": "none0"}, expect=1)
    found = faults.errors(ended)
    assert len(found) == 2 and all("none0" in line for line in found), ended.tail()


MORE = ("10.77.0.{}1/24", "10.78.0.{}/24", "fd77::{}/64")


@pytest.fixture
def many() -> Iterator[NamespacePair]:
    """Two nodes with four addresses each: a second one, a second subnet, IPv6."""
    with NamespacePair() as pair:
        for node in (0, 1):
            for address in MORE:
                nodad = "nodad" if ":" in address.format(0) else ""
                pair.ip(node, f"addr add {address.format(node + 1)} dev eth0 {nodad}")
        yield pair


MASTERS = [address.format(1).partition("/")[0] for address in MORE]


def chosen_interfaces(demo, result, addresses):
    """What the script takes for Gloo where each of the addresses is MASTER_ADDR."""
    process, found = demo.Process(world_size=2, backend="gloo"), []
    for address in addresses:
        os.environ["MASTER_ADDR"] = address
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        demo.choose_interface(process)
        found.append(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    write(result, found)


def test_script_finds_an_interface_by_each_of_its_addresses(demo: ForkServer, many):
    job = demo.run((), 2, call=chosen_interfaces, nodes=many, addresses=MASTERS)
    assert job.result(0) == job.result(1) == ["eth0"] * len(MASTERS)
