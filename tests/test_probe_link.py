"""tools/probe_link.py on two namespaces: rate, latency, counters, errors."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

import compare_logs
import probe_link
from analysis import nccl
from support.nodes import NamespacePair
from support.processes import start

GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters


@pytest.mark.slow
def test_record_and_words_of_a_link_of_a_known_rate(tmp_path, capsys):
    """It takes the training's arguments, and compare_logs.py reads what it writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--rdzv_id=1"]
    with NamespacePair("300mbit") as nodes:
        torchrun += ["--rdzv_backend=static", f"--rdzv_endpoint={nodes.addresses[0]}:29500"]
        words = [probe_link.__file__, "--coco_image_path", "x", "--max_steps", "2"]
        own = {"GLOO_SOCKET_IFNAME": nodes.interface, "OMP_NUM_THREADS": "1"}
        started = [
            nodes.popen(node, [*torchrun, f"--node_rank={node}", *words], env=own)
            for node in (0, 1)
        ]
        run, _ = [one.finish(90) for one in started]
    record = run.json_line("Probe")
    sizes = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENT_BYTES]
    assert [size["bytes"] for size in record["sizes"]] == sizes
    # By the clock and by the counters; a busy machine is slower.
    rates = [8 * record["sizes"][-1]["algbw_GBps"]]
    rates += [node["interfaces"][0]["wire_Gbps"] for node in record["nodes"]]
    assert all(0.2 < rate < 0.315 for rate in rates), rates
    # Of two nodes each sends as many bytes as the gradients have, and the headers.
    while_counted = 8e-6 * GRADIENT_BYTES / record["continuous_ms"]
    assert all(0.95 < rate / while_counted < 1.15 for rate in rates[1:]), rates
    assert all(node["seconds"] >= 1.5 and not node["rest"] for node in record["nodes"])
    ports = [node["node"]["ports"]["eth0"] for node in record["nodes"]]
    assert [port["stated_by"] for port in ports] == ["a virtual interface"] * 2
    assert [node["host"] for node in record["nodes"]] == ["node0", "node1"]
    assert [node["interfaces"][0]["name"] for node in record["nodes"]] == ["eth0", "eth0"]
    assert [node["nccl"] for node in record["nodes"]] == [None, None]
    assert 0 < record["latency_ms"] < record["all_reduce_ms"] / 10
    words = r"Probe: all-reduce of 44\.9 MB in [\d,]+ ms: \d+ Mb/s, TCP over eth0$"
    assert re.search(words, run.out, re.MULTILINE), run.tail()
    (tmp_path / "node0.log").write_text(run.out)
    assert compare_logs.main([str(tmp_path)]) == 1  # there is no training in it
    assert " is not scored: no Run line" in capsys.readouterr().out


def test_figures_are_those_after_the_warm_up():
    rounds = [(1, 900.0), (1, 2.0), (10, 3.0), (10, 4.0)]
    found = probe_link.timing(SimpleNamespace(world_size=4), 6000, rounds)
    # Of four ranks a ring carries one and a half times the bytes.
    expected = {"bytes": 6000, "ms": 3.0, "algbw_GBps": 0.002, "busbw_GBps": 0.003}
    assert found == pytest.approx(expected)


def test_a_link_of_over_100_ms_an_all_reduce_is_timed_by_single_ones(monkeypatch):
    monkeypatch.setattr(probe_link.dist, "all_reduce", lambda _: None)
    monkeypatch.setattr(probe_link, "mean_of_ranks", lambda *_: 700.0)
    process = SimpleNamespace(backend="nccl", device=torch.device("cpu"))
    assert probe_link.measure(process, torch.zeros(1)) == [(1, 700.0)] * 5


def test_the_time_while_counted_is_that_of_one_all_reduce(monkeypatch):
    """Two of 250 ms are made between two agreements. By the clock here each takes a second."""
    calls = []
    monkeypatch.setattr(probe_link.dist, "all_reduce", calls.append)
    monkeypatch.setattr(probe_link.dist, "barrier", lambda: None)
    monkeypatch.setattr(probe_link, "mean_of_ranks", lambda *_: len(calls) < 6)
    monkeypatch.setattr(probe_link.time, "perf_counter", lambda: len(calls))
    second = SimpleNamespace(local_rank=1, device=torch.device("cpu"))
    assert probe_link.count(second, torch.zeros(1), 250, {}) == (1000, {})
    assert len(calls) == 6


# Free memory in GB, milliseconds of one all-reduce, share of the ranks that lack the memory.
WORTH = [(8, 1400, 0, True), (8, 1600, 0, False), (4, 1400, 0, False), (8, 1400, 0.5, False)]


@pytest.mark.parametrize(("free", "ms", "others", "expected"), WORTH)
def test_a_large_size_is_taken_if_memory_and_time_allow(monkeypatch, free, ms, others, expected):
    """Two processes of a node share its memory."""
    monkeypatch.setattr(probe_link, "free_memory", lambda: free * 2**30)
    monkeypatch.setattr(probe_link, "mean_of_ranks", lambda _, short: max(short, others))
    process = SimpleNamespace(gpu=False, local_world_size=2)
    assert probe_link.worth(process, 2**30, ms) is expected


@pytest.mark.parametrize(("ms", "most"), [(1, 2**30), (100, 2**28), (1100, GRADIENT_BYTES)])
def test_sizes_rise_as_far_as_they_take_seconds(monkeypatch, ms, most):
    """ms: of the gradients."""
    measured = []

    def measure(_: object, tensor: torch.Tensor) -> list[tuple[int, float]]:
        measured.append(4 * len(tensor))
        return [(1, ms * measured[-1] / GRADIENT_BYTES)] * 2

    for name, stub in {
        "measure": measure,
        "free_memory": lambda: 2.0**40,
        "mean_of_ranks": lambda _, value: float(value),
        "count": lambda *_: (ms, {}),
        "of_all_nodes": lambda *_: [],
    }.items():
        monkeypatch.setattr(probe_link, name, stub)
    monkeypatch.setattr(probe_link.dist, "barrier", lambda: None)
    fields = {"gpu": False, "world_size": 2, "local_world_size": 2, "device": torch.device("meta")}
    record = probe_link.probe(SimpleNamespace(**fields))
    assert [size["bytes"] for size in record["sizes"]] == measured == sorted(measured)
    assert measured[-1] == most and GRADIENT_BYTES in measured
    assert (record["all_reduce_ms"], record["all_reduce_bytes"]) == (ms, GRADIENT_BYTES)


def test_the_slowest_nodes_network_is_told_and_each_node_counts_once(monkeypatch):
    links = [("infiniband", "mlx5_0:1", "infiniband", 90), ("sockets", "eth0", "ethernet", 9)]
    nodes = [
        {
            "host": name,
            "nccl": nccl.Finding(transport=way).to_dict(),
            "interfaces": [{"name": name, "kind": kind, "wire_Gbps": gbps}],
        }
        for way, name, kind, gbps in links
    ]
    record = {"nodes": nodes, "all_reduce_bytes": 1e6, "all_reduce_ms": 1, "latency_ms": 1}
    assert "TCP over eth0" in probe_link.in_words(record)[0]
    monkeypatch.setattr(probe_link.demo, "all_gather", lambda own: [own])
    second = SimpleNamespace(local_rank=1, backend="gloo")
    assert probe_link.of_all_nodes(second, {}) == []


def test_one_process_has_no_link_and_an_error_is_one_line():
    command = [sys.executable, probe_link.__file__]
    with start(command) as alone, start([*command, "--backend", "smoke"]) as wrong:
        run, error = alone.finish(60), wrong.finish(60, expect=2)
    # (Where the host name does not resolve, PyTorch warns of it.)
    assert run.lines(0) == ["Probe: one process has no link to probe"]
    refusal = "[CPU 0] ERROR: probe_link.py: argument --backend: invalid choice: "
    assert error.out.startswith(refusal) and error.out.count("\n") == 1, error.tail()
