#!/usr/bin/env python3
"""For anyone who compares networks: what the link between a training's processes delivers.

It stands in the training's own torchrun or srun line in the script's place, with the same
arguments, of which it takes --backend and --timeout:
    torchrun --nnodes=2 --node_rank=0 ... tools/probe_link.py --coco_image_path DIR ...

All processes add up tensors of rising size (all-reduce), as DDP does with the gradients in each
step, and nothing else goes on. One of the sizes is that of the gradients with COCO's 80 classes:
the probe reads no annotations, and other classes change it by little. Rank 0 writes a table as
nccl-tests does, and a record for compare_logs.py, `[CPU 0] Probe {...}`:
    world_size        processes
    all_reduce_bytes  of the gradients: 4 for each parameter
    all_reduce_ms     of one: the median of the rounds, of the ranks' mean in each
    algbw_GBps        all_reduce_bytes over that time, in 10^9 bytes/s; busbw_GBps: what each
                      rank's link then has to carry. Source: PERFORMANCE.md of nccl-tests
    latency_ms        the median of the sizes up to 4 KB
    bandwidth_GBps    the slope between the two largest sizes, as algbw; null where it has none
    sizes             of each {bytes, ms, algbw_GBps, busbw_GBps}, rising
    nodes             of each {host, interfaces, tcp, nccl}, as counters.py and nccl_text.py have
                      them; nccl is null without NCCL or its NCCL_DEBUG_FILE. An interface has
                      also wire_Gbps (of the busier direction)
The bytes of an interface are those of the gradients' rounds, whoever sent them; errors and tcp are
of the whole probe. The first round of each size is a warm-up.

Exit codes: 0 done, or one process alone, which has no link; 1 error; 2 wrong arguments.
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

from analysis import nccl_text
from common.thresholds import LOSSY, STRAY
from counters import difference, label, read_counters

SIZES = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, 2**26]  # bytes, beside the gradients'
SMALL = 2**12  # bytes: up to here the time is latency
ALL_SECONDS = 10  # no size but the gradients' is begun that would end later
SECONDS = 3  # of one size: no other round starts after that
ROUNDS, LEAST_ROUNDS = 6, 2  # of one size, warm-up included
SHORT_SECONDS = 0.1  # of one size: until then there are more rounds, for a steady median
# To start NCCL and to wait for it takes longer than a small all-reduce: ten are timed together,
# or as many as take no longer than this.
CALLS, TIMING_MS = 10, 100
LEAST_TIMEOUT = 0.1  # seconds
RAIL = 0.25  # of the busiest: rails of one network carry about the same


def main(process: demo.Process) -> None:
    """Probes as one of the processes. Raises UserError as the script's own set-up does."""
    args = parse_arguments(sys.argv[1:])
    demo.read_environment(process)
    demo.set_up(args, process)
    process.phase = "probe"
    if process.world_size == 1:
        demo.log(process, "Probe: one process has no link to probe")
    else:
        record, nccl_said = probe(process)
        if process.rank == 0:
            lines = [*table(record), "Probe " + json.dumps(record), "Probe: " + sentence(record)]
            for line in [*lines, *remarks(record, nccl_said)]:
                demo.log(process, line)
            if "SLURM_STEP_ID" in os.environ:
                time.sleep(0.3)  # srun mixes lines of over 1 KB
    sys.exit()  # as good as 0, but without the line with a training's wall time at its end


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """--backend and --timeout, with the script's defaults and limits; all others are ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--timeout", type=float, default=demo.TIMEOUT, help="seconds")

    def refuse(text: str) -> None:
        text = f"{parser.prog}: error: {text}; see --help"
        demo.report(demo.Process(), "user", text, to=0)
        parser.exit(2, text + "\n")

    parser.error = refuse
    args, _ = parser.parse_known_args(argv)
    if not LEAST_TIMEOUT <= args.timeout < 2**31:
        refuse(f"--timeout {args.timeout} is not at least {LEAST_TIMEOUT}")
    return args


# --- Measuring ---------------------------------------------------------------------------------


def probe(process: demo.Process) -> tuple[dict, list[tuple[str, str]]]:
    """The record; and (host, what NCCL said in words) of each node where it said something."""
    gradients = gradient_bytes()
    buffer = torch.zeros(max(*SIZES, gradients) // 4, device=process.device)
    dist.barrier()  # makes connections
    start, begin, rounds = read_counters(), time.perf_counter(), {}
    for size in sorted({*SIZES, gradients}):
        before = read_counters()
        spent = mean_of_ranks(process, time.perf_counter() - begin)  # all have read theirs
        if size != gradients and rounds and spent + expected_seconds(rounds, size) > ALL_SECONDS:
            continue
        rounds[size] = measure(process, buffer[: size // 4])
        if size == gradients:
            carried = difference(before, read_counters())
    sizes = [timing(process, size, median(rounds[size])) for size in rounds]
    own = timing(process, gradients, median(rounds[gradients]))
    add_rates(carried["interfaces"], sum(calls for calls, _ in rounds[gradients]), own["ms"])
    nodes, nccl_said = of_all_nodes(process, carried, difference(start, read_counters()))
    record = {
        "world_size": process.world_size,
        "all_reduce_bytes": gradients,
        "all_reduce_ms": own["ms"],
        "algbw_GBps": own["algbw_GBps"],
        "busbw_GBps": own["busbw_GBps"],
        "latency_ms": statistics.median(s["ms"] for s in sizes if s["bytes"] <= SMALL),
        "bandwidth_GBps": slope(*sizes[-2:]),
        "sizes": sizes,
        "nodes": nodes,
    }
    return record, nccl_said


def gradient_bytes() -> int:
    with torch.device("meta"):  # the number of parameters alone
        model = torchvision.models.resnet18(num_classes=demo.COCO_CLASSES)
    return 4 * sum(map(torch.numel, model.parameters()))


def measure(process: demo.Process, tensor: torch.Tensor) -> list[tuple[int, float]]:
    """Of each round of all-reduces (calls, milliseconds of one); the first is the warm-up."""
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


def mean_of_ranks(process: demo.Process, value: float) -> float:
    """The same on all ranks, so that they decide alike."""
    values = torch.tensor(value, dtype=torch.float64, device=process.device)
    dist.all_reduce(values)
    return values.item() / process.world_size


def median(rounds: list[tuple[int, float]]) -> float:
    return statistics.median(ms for _, ms in rounds[1:])


def expected_seconds(rounds: dict[int, list[tuple[int, float]]], size: int) -> float:
    """What the fewest rounds of a size will take, by the one before it."""
    before = max(rounds)
    return LEAST_ROUNDS * median(rounds[before]) / 1e3 * size / before


def timing(process: demo.Process, size: int, ms: float) -> dict:
    algbw, ranks = size / ms / 1e6, process.world_size
    busbw = algbw * 2 * (ranks - 1) / ranks
    return {"bytes": size, "ms": ms, "algbw_GBps": algbw, "busbw_GBps": busbw}


def slope(smaller: dict, larger: dict) -> float | None:
    ms = larger["ms"] - smaller["ms"]
    return (larger["bytes"] - smaller["bytes"]) / ms / 1e6 if ms > 0 else None


# --- What carried it ---------------------------------------------------------------------------


def add_rates(links: list[dict], calls: int, ms: float) -> None:
    for link in links:
        link["wire_Gbps"] = 8e-6 * max(link["tx_bytes"], link["rx_bytes"]) / (calls * ms)


def of_all_nodes(
    process: demo.Process, carried: dict, whole: dict
) -> tuple[list[dict], list[tuple[str, str]]]:
    """The record's nodes; and (host, NCCL's finding in words) of those that have one."""
    host = socket.gethostname()
    hosts, pids = demo.gather(host, os.getpid())
    node = said = None
    if process.local_rank == 0:  # all processes of a node read the same counters
        errors = {link["name"]: link.get("errors") for link in whole["interfaces"]}
        for link in carried["interfaces"]:
            if wrong := errors.get(link["name"]):
                link["errors"] = wrong
        own = [pid for name, pid in zip(hosts, pids, strict=True) if name == host]
        pattern = os.environ.get("NCCL_DEBUG_FILE", "")
        found = nccl_text.of_processes(pattern, host, own) if process.backend == "nccl" else None
        node = {"host": host, "interfaces": carried["interfaces"]}
        node |= {"tcp": whole["tcp"]} if "tcp" in whole else {}
        node["nccl"] = found and found.to_dict()
        said = found and (host, nccl_text.in_one_line(found))
    nodes, all_said = demo.gather(node, said)
    return [node for node in nodes if node], [said for said in all_said if said]


# --- For people --------------------------------------------------------------------------------


def table(record: dict) -> list[str]:
    """Columns and units as nccl-tests has them."""
    rows = [("size", "time", "algbw", "busbw"), ("(B)", "(us)", "(GB/s)", "(GB/s)")]
    for size in record["sizes"]:
        rates = (f"{size[name]:.3g}" for name in ("algbw_GBps", "busbw_GBps"))
        rows.append((str(size["bytes"]), f"{1e3 * size['ms']:.1f}", *rates))
    return ["".join(f"{cell:>12}" for cell in row) for row in rows]


def sentence(record: dict) -> str:
    """The record for people: of the slowest node, whose pace is that of all."""
    count, ms = record["all_reduce_bytes"], record["all_reduce_ms"]
    text = f"all-reduce of {count / 1e6:.1f} MB in {shown(ms)} ms"
    links = [busiest(node["interfaces"], len(record["nodes"])) for node in record["nodes"]]
    rails = min(filter(None, links), key=rate, default=[])
    if rate(rails) < STRAY * 8e-6 * count / ms:
        where = "inside the node, on no interface"
        if len(record["nodes"]) > 1:
            where = "on no interface whose bytes are counted"
        return f"{text}: {shown(8 * record['algbw_GBps'])} Gb/s {where}"
    text += f": {shown(rate(rails))} Gb/s on {names(rails)}"
    stated = [link["speed_Gbps"] for link in rails]
    if not all(stated):
        return text
    share, whose = rate(rails) / sum(stated), "their" if len(rails) > 1 else "its"
    return f"{text}, {100 * share:.0f} % of {whose} stated {sum(stated):g} Gb/s"


def rate(rails: list[dict]) -> float:
    return sum(link["wire_Gbps"] for link in rails)


def busiest(interfaces: list[dict], nodes: int) -> list[dict]:
    """The interface that carried most, and rails beside it: of its kind, and nearly as busy."""
    able = [link for link in interfaces if nodes == 1 or link["kind"] != "loopback"]
    most = max(able, key=lambda link: link["wire_Gbps"], default=None)
    return [
        link
        for link in able
        if link["kind"] == most["kind"] and link["wire_Gbps"] >= RAIL * most["wire_Gbps"]
    ]


def names(rails: list[dict]) -> str:
    """As eth0 (ethernet), or mlx5_0:1, mlx5_1:1 (infiniband)."""
    if len(rails) == 1:
        return label(rails[0])
    return f"{', '.join(link['name'] for link in rails)} ({rails[0]['kind']})"


def remarks(record: dict, nccl_said: list[tuple[str, str]]) -> list[str]:
    """Latency and bandwidth, what went wrong meanwhile, and what NCCL used."""
    smaller, larger = (f"{size['bytes'] / 1e6:.1f}" for size in record["sizes"][-2:])
    bandwidth = record["bandwidth_GBps"]
    text = f"no bandwidth: {larger} MB took no longer than {smaller} MB"
    if bandwidth:
        text = f"bandwidth {shown(8 * bandwidth)} Gb/s (from {smaller} MB to {larger} MB)"
    said = [f"Link: latency {shown(record['latency_ms'])} ms (up to 4 KB), {text}"]
    for node in record["nodes"]:
        tcp = node.get("tcp", {"segments": 0, "retransmits": 0})
        if tcp["retransmits"] > LOSSY * tcp["segments"]:
            again = f"{tcp['retransmits']:,} of {tcp['segments']:,} segments again"
            said.append(f"Link of {node['host']}: TCP sent {again}")
    texts = [words for _, words in nccl_said]
    alike = len(set(texts)) == 1 and len(texts) == len(record["nodes"])
    return said + (texts[:1] if alike else [f"{host}: {words}" for host, words in nccl_said])


def shown(value: float) -> str:
    """With two or three digits that count: 0.99, 6.9, 364, 3,760."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


if __name__ == "__main__":
    demo.one_line_errors(main)
