#!/usr/bin/env python3
"""Measures what the link between a training's processes delivers, by all-reduces alone.

It stands in the training's own torchrun or srun line in the script's place, with the same
arguments, of which it takes --backend, --device and --timeout:
    torchrun --nnodes=2 --node_rank=0 ... tools/probe_link.py --coco_image_path DIR ...

All processes add up tensors of rising size (all-reduce), as DDP does with the gradients in each
step, and nothing else goes on. One of the sizes is that of the gradients with COCO's 80 classes;
larger ones come if memory and time allow. Rank 0 writes a record, `[CPU 0] Probe {...}`:
    world_size        processes
    all_reduce_bytes  of the gradients: 4 for each parameter
    all_reduce_ms     of one: the median of the rounds, of the ranks' mean in each
    latency_ms        the median of the sizes up to 4 KB
    sizes             for each, rising, {bytes, ms, algbw_GBps: bytes over that time, busbw_GBps:
                      what each rank's link then has to carry}, as nccl-tests' PERFORMANCE.md
    continuous_ms     of one of the gradients, when they follow each other without a pause
    nodes             for each {host, seconds, nccl (null without NCCL or its NCCL_DEBUG_FILE) and
                      what analysis/kernel.py says was carried in these seconds amid the
                      all-reduces without a pause, whoever sent it}
The first round of each size is a warm-up.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import demo_coco_resnet18 as demo
import torch
import torch.distributed as dist
import torchvision

from analysis import nccl
from analysis.kernel import free_memory, read_counters, read_meanwhile
from analysis.network import TITLES, Network, carriers, digits, megabytes, nccl_words, rate

CLASSES = 80  # COCO's; another number changes the gradients' size by little
SIZES = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24]  # bytes; then the gradients', 44.9 MB
LARGE = [2**26, 2**28, 2**30]  # only if two rounds are within SECONDS, and the memory is there
SPARE = 4  # of this many times a size's bytes: for the library's own buffers, and other programs
SMALL = 2**12  # bytes: up to here the time is latency
SECONDS = 3  # of one size: no other round starts after that
ROUNDS, LEAST_ROUNDS = 6, 2  # of one size, warm-up included
SHORT_SECONDS = 0.1  # of one size: until then there are more rounds, for a steady median
# Starting NCCL and waiting takes longer than a small all-reduce: so many are timed together.
CALLS, TIMING_MS = 10, 100  # or as many as take no longer than this
BATCH_S = 0.5  # of all-reduces without a pause: so often the ranks ask whether to go on


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


def probe(process: demo.ProcessInfo) -> dict:
    """The record, on every rank."""
    gradients = gradient_bytes()
    buffer = torch.zeros(gradients // 4, device=process.device)
    dist.barrier()  # makes connections
    before = read_counters()
    rounds = {size: measure(process, buffer[: size // 4]) for size in [*SIZES, gradients]}
    own = timing(process, gradients, rounds[gradients])
    continuous_ms, carried = count(process, buffer, own["ms"], before)
    for size in LARGE:
        if not worth(process, size, own["ms"] * size / gradients):
            break
        rounds[size] = measure(process, torch.zeros(size // 4, device=process.device))
    sizes = [timing(process, size, rounds[size]) for size in rounds]
    return {
        "world_size": process.world_size,
        "all_reduce_bytes": gradients,
        "all_reduce_ms": own["ms"],
        "continuous_ms": continuous_ms,
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
    algbw, share = size / ms / 1e6, 2 * (process.world_size - 1) / process.world_size
    return {"bytes": size, "ms": ms, "algbw_GBps": algbw, "busbw_GBps": algbw * share}


def worth(process: demo.ProcessInfo, size: int, ms: float) -> bool:
    """Whether each rank has memory for this size, and LEAST_ROUNDS of so many ms end in time."""
    free = torch.cuda.mem_get_info(process.device)[0] if process.gpu else free_memory()
    short = mean_of_ranks(process, free / process.local_world_size < SPARE * size)
    return not short and LEAST_ROUNDS * ms / 1e3 < SECONDS


def count(process: demo.ProcessInfo, buffer: torch.Tensor, ms: float, before: dict) -> tuple:
    """All-reduces of about `ms`, until all nodes have read their counters twice meanwhile. Returns
    the milliseconds of one, and on the first rank of a node what was carried.
    """
    calls, batch, going = 0, max(1, int(1e3 * BATCH_S / ms)), True
    with ThreadPoolExecutor(1) as thread:
        dist.barrier()
        start = time.perf_counter()
        reading = thread.submit(read_meanwhile, before) if process.local_rank == 0 else None
        while going:
            for _ in range(batch):
                dist.all_reduce(buffer)
            torch.get_device_module(process.device).synchronize()
            calls += batch
            going = mean_of_ranks(process, bool(reading and not reading.done())) > 0
        took = 1e3 * (time.perf_counter() - start) / calls
        return took, reading.result() if reading else {}


def of_all_nodes(process: demo.ProcessInfo, carried: dict) -> list[dict]:
    """What each node's interfaces have counted, and what NCCL wrote."""
    host = socket.gethostname()
    places = demo.all_gather((host, os.getpid()))
    node = None
    if process.local_rank == 0:  # all processes of a node read the same counters
        node = {"host": host, **carried}
        pattern = os.environ.get("NCCL_DEBUG_FILE", "") if process.backend == "nccl" else ""
        found = nccl.of_processes(pattern, host, [pid for name, pid in places if name == host])
        node["nccl"] = found and found.to_dict()
    return [node for node in demo.all_gather(node) if node]


def in_words(record: dict) -> list[str]:
    """The record for people: the slowest node's rate, the latency, what NCCL used."""
    networks = []
    for node in record["nodes"]:
        links = carriers(node.get("interfaces", []), node["nccl"] or {}, node["host"])
        networks.append(Network(node["host"], node["nccl"] or {}, links))
    slowest = min(networks, key=lambda network: network.gbps)
    moved, way = 8e-6 * record["all_reduce_bytes"] / record["all_reduce_ms"], "one node"
    if slowest.gbps:
        kind = TITLES.get(slowest.links[0]["kind"], "TCP")
        way = f"{kind} over {', '.join(slowest.names)}"
    elif len(networks) > 1:
        way = "no interface counts its bytes"
    size, took = megabytes(record["all_reduce_bytes"]), digits(record["all_reduce_ms"])
    lines = [f"Probe: all-reduce of {size} in {took} ms: {rate(slowest.gbps or moved)}, {way}"]
    lines.append(f"Link: latency {digits(record['latency_ms'])} ms (up to 4 KB)")
    words = {network.host: nccl_words(network.finding) for network in networks}
    return lines + [f"{host}: {text}" for host, text in words.items() if text]


if __name__ == "__main__":
    demo.run_and_exit(main, log_wall_time=False)
