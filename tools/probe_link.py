#!/usr/bin/env python3
"""Measures what the link between a training's processes delivers, by all-reduces alone.

It stands in the training's own torchrun or srun line in the script's place, with the same
arguments, of which it takes --backend, --device and --timeout:
    torchrun --nnodes=2 --node_rank=0 ... tools/probe_link.py --coco_image_path DIR ...

All processes add up tensors of rising size (all-reduce), as DDP does with the gradients in each
step, and nothing else goes on. One of the sizes is that of the gradients with COCO's 80 classes.
Rank 0 writes a record for compare_logs.py, `[CPU 0] Probe {...}`:
    world_size        processes
    all_reduce_bytes  of the gradients: 4 for each parameter
    all_reduce_ms     of one: the median of the rounds, of the ranks' mean in each
    latency_ms        the median of the sizes up to 4 KB
    sizes             for each, rising, {bytes, ms, algbw_GBps: bytes over that time, in 10^9
                      bytes/s, busbw_GBps: what each rank's link then has to carry}. Source:
                      PERFORMANCE.md of nccl-tests
    nodes             for each {host, interfaces, tcp, node, nccl}, as counters.py and nccl_log.py
                      print them; nccl is null without NCCL or its NCCL_DEBUG_FILE. An
                      interface also has wire_Gbps (of the busier direction)
What interfaces and tcp have counted is that of the gradients' rounds, whoever sent it. The first
round of each size is a warm-up.

Exit code: 0: success, or one process alone, which has no link; otherwise an error.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import demo_coco_resnet18 as demo
import torch
import torch.distributed as dist
import torchvision

from analysis import nccl
from analysis.kernel_counters import difference, settled_counters
from analysis.network import read_network
from analysis.node import read_node
from analysis.words import digits, megabytes, rate

CLASSES = 80  # COCO's; another number changes the gradients' size by little
SIZES = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24]  # bytes; the gradients', 44.9 MB, come last
SMALL = 2**12  # bytes: up to here the time is latency
SECONDS = 3  # of one size: no other round starts after that
ROUNDS, LEAST_ROUNDS = 6, 2  # of one size, warm-up included
SHORT_SECONDS = 0.1  # of one size: until then there are more rounds, for a steady median
# To start NCCL and to wait for it takes longer than a small all-reduce: ten are timed together,
# or as many as take no longer than this.
CALLS, TIMING_MS = 10, 100


def main(process: demo.ProcessInfo) -> None:
    """Probes as one of the processes. Raises UserError as the script's own set-up does."""
    args = parse_arguments(sys.argv[1:])
    demo.read_environment(process)
    demo.join_process_group(args, process)
    if process.world_size == 1:
        demo.log(process, "Probe: one process has no link to probe")
    else:
        record = probe(process)
        if process.rank == 0:
            for line in ["Probe " + json.dumps(record), *in_words(record)]:
                demo.log(process, line)
            if "SLURM_STEP_ID" in os.environ:
                time.sleep(0.3)  # srun mixes lines of over 1 KB


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The script's; none is required. Raises UserError."""
    parser = demo.make_parser()
    parser.description = __doc__.split("\n\n")[0]

    def refuse(text: str) -> None:
        raise demo.UserError(f"{parser.prog}: {text}; see --help")

    parser.error = refuse
    return parser.parse_known_args(argv)[0]


# --- Measuring -----------------------------------------------------------------------------------


def probe(process: demo.ProcessInfo) -> dict:
    """The record, on every rank."""
    gradients = gradient_bytes()
    buffer = torch.zeros(gradients // 4, device=process.device)
    dist.barrier()  # makes connections
    rounds = {size: measure(process, buffer[: size // 4]) for size in SIZES}
    before = settled_counters()
    dist.barrier()  # all have read theirs
    rounds[gradients] = measure(process, buffer[: gradients // 4])
    carried = difference(before, settled_counters())
    carried["node"] = facts_under_load(buffer, rounds[gradients][-1][0])
    sizes = [timing(process, size, rounds[size]) for size in rounds]
    own = sizes[-1]  # the gradients'
    calls = sum(calls for calls, _ in rounds[gradients])
    for link in carried["interfaces"]:
        busier = max(link["tx_bytes"], link["rx_bytes"])
        link["wire_Gbps"] = 8e-6 * busier / (calls * own["ms"])
    return {
        "world_size": process.world_size,
        "all_reduce_bytes": gradients,
        "all_reduce_ms": own["ms"],
        "latency_ms": statistics.median(s["ms"] for s in sizes if s["bytes"] <= SMALL),
        "sizes": sizes,
        "nodes": of_all_nodes(process, carried),
    }


def gradient_bytes() -> int:
    with torch.device("meta"):  # the number of parameters alone
        model = torchvision.models.resnet18(num_classes=CLASSES)
    return 4 * sum(map(torch.numel, model.parameters()))


def measure(process: demo.ProcessInfo, tensor: torch.Tensor) -> list[tuple[int, float]]:
    """For each round of all-reduces (calls, milliseconds of one); the first is the warm-up."""
    rounds: list[tuple[int, float]] = []
    calls, spent = 1, 0.0
    while len(rounds) < LEAST_ROUNDS or spent < (
        SECONDS if len(rounds) < ROUNDS else SHORT_SECONDS
    ):
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        torch.get_device_module(process.device).synchronize()
        # The exchange is also what makes all start the next round together.
        ms = mean_of_ranks(process, 1e3 * (time.perf_counter() - start) / calls)
        rounds.append((calls, ms))
        spent += calls * ms / 1e3
        if process.backend == "nccl":
            calls = max(1, min(CALLS, int(TIMING_MS / ms)))
    return rounds


def mean_of_ranks(process: demo.ProcessInfo, value: float) -> float:
    """The same on all ranks, so that they decide alike."""
    values = torch.tensor(value, dtype=torch.float64, device=process.device)
    dist.all_reduce(values)
    return values.item() / process.world_size


def timing(process: demo.ProcessInfo, size: int, rounds: list[tuple[int, float]]) -> dict:
    ms = statistics.median(ms for _, ms in rounds[1:])
    algbw, ranks = size / ms / 1e6, process.world_size
    busbw = algbw * 2 * (ranks - 1) / ranks
    return {"bytes": size, "ms": ms, "algbw_GBps": algbw, "busbw_GBps": busbw}


def facts_under_load(buffer: torch.Tensor, calls: int) -> dict:
    """Read while all-reduces run: an idle link of PCIe may be slower."""
    works = [dist.all_reduce(buffer, async_op=True) for _ in range(calls)]
    facts = read_node()
    for work in works:
        work.wait()
    return facts


def of_all_nodes(process: demo.ProcessInfo, carried: dict) -> list[dict]:
    """What each node's interfaces and TCP have counted, and what NCCL wrote."""
    host = socket.gethostname()
    places = demo.all_gather((host, os.getpid()))
    node = None
    if process.local_rank == 0:  # all processes of a node read the same counters
        node = {"host": host, **carried}
        pattern = os.environ.get("NCCL_DEBUG_FILE", "") if process.backend == "nccl" else ""
        found = nccl.of_processes(pattern, host, [pid for name, pid in places if name == host])
        node["nccl"] = found and found.to_dict()
    return [node for node in demo.all_gather(node) if node]


# --- For people ----------------------------------------------------------------------------------


def in_words(record: dict) -> list[str]:
    """The record for people: the slowest node's link, the latency, what NCCL used."""
    moved, several = 8 * record["sizes"][-1]["algbw_GBps"], len(record["nodes"]) > 1
    networks = [read_network(node, several, moved) for node in record["nodes"]]
    slowest = min(networks, key=lambda network: network.order)
    way = slowest.way if slowest.gbps else "no interface counts its bytes"
    size, took = megabytes(record["all_reduce_bytes"]), digits(record["all_reduce_ms"])
    lines = [f"Probe: all-reduce of {size} in {took} ms: {rate(slowest.gbps or moved)}, {way}"]
    lines.append(f"Link: latency {digits(record['latency_ms'])} ms (up to 4 KB)")
    found = [(node["host"], node["nccl"]) for node in record["nodes"] if node["nccl"]]
    return lines + [f"{host}: {nccl.used(nccl.Finding(**text))}" for host, text in found]


if __name__ == "__main__":
    demo.run_and_exit(main, log_wall_time=False)
