#!/usr/bin/env python3
"""What the link between the processes of a training delivers, measured before it starts.

It stands in the training's own torchrun or srun line in the script's place, with the same
arguments, of which it takes --backend and --timeout:
    torchrun --nnodes=2 --node_rank=0 ... tools/probe_link.py --coco_image_path DIR ...

All processes average as many bytes as the gradients of a step have, several times, as DDP does in
each step (all-reduce), and nothing else goes on. Rank 0 writes the times and what each node's
interfaces carried meanwhile, as a record for compare_logs.py, `[CPU 0] Probe {...}`:
    world_size        processes
    all_reduce_bytes  of one all-reduce, and of each rank: 4 for each parameter
    all_reduce_ms     of one: the median of the rounds, of the ranks' mean in each
    algbw_GBps        all_reduce_bytes over that time, in 10^9 bytes/s; busbw_GBps: what each
                      rank's link then has to carry. Source: PERFORMANCE.md of nccl-tests
    nodes             of each {host, interfaces: [{name, kind, speed_Gbps (stated, or null),
                      tx_bytes, rx_bytes, wire_Gbps (of the busier direction), share (of the
                      stated speed, or null)}]}, the busiest first
The first round is a warm-up; the bytes are those of all rounds, whoever sent them.

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
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torchvision
from counters import difference, read_counters

import demo_coco_resnet18 as demo

ROUNDS = 5  # at most, after the warm-up
SECONDS = 5  # no other round starts after that
SEEN = 0.05  # an interface that carried less than this part of the gradients was not the link


def main(process: demo.Process) -> None:
    """Probes as one of the processes. Raises UserError as the script's own set-up does."""
    args = parse_arguments(sys.argv[1:])
    demo.read_environment(process)
    demo.set_up(args, process)
    process.phase = "probe"
    if process.world_size == 1:
        demo.log(process, "Probe: one process has no link to probe")
    else:
        record = probe(process)
        if process.rank == 0:
            demo.log(process, "Probe " + json.dumps(record))
            demo.log(process, "Probe: " + sentence(record))
            time.sleep(0.3 * ("SLURM_STEP_ID" in os.environ))  # srun mixes lines of over 1 KB
    sys.exit()  # as good as 0, but without the line with a training's wall time at its end


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """--backend and --timeout, with the script's defaults and limits; all others are ignored."""
    options = {name: default for name, default, _ in demo.OPTIONS}
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", choices=options["backend"], default=options["backend"][0])
    parser.add_argument("--timeout", type=float, default=options["timeout"], help="seconds")

    def refuse(text: str) -> None:
        text = f"{parser.prog}: error: {text}; see --help"
        demo.report(demo.Process(), "user", text, to=0)
        parser.exit(2, text + "\n")

    parser.error = refuse
    args, _ = parser.parse_known_args(argv)
    if not demo.MINIMA["timeout"] <= args.timeout < 2**31:
        refuse(f"--timeout {args.timeout} is not at least {demo.MINIMA['timeout']}")
    return args


def probe(process: demo.Process) -> dict:
    """The record: what all-reduces of the gradients' size take, and what carried them."""
    with torch.device("meta"):  # the number of parameters alone
        model = torchvision.models.resnet18(num_classes=demo.CLASSES)
    parameters, ranks = sum(map(torch.numel, model.parameters())), process.world_size
    gradients = torch.zeros(parameters, device=process.device)
    dist.barrier()  # makes connections
    before = read_counters()
    times = measure(process, lambda: dist.all_reduce(gradients))
    carried = difference(before, read_counters())
    count, ms = 4 * parameters, statistics.median(times[1:])
    for link in carried:
        busier = max(link["tx_bytes"], link["rx_bytes"])
        link["wire_Gbps"] = 8e-6 * busier / (len(times) * ms)
        link["share"] = link["wire_Gbps"] / link["speed_Gbps"] if link["speed_Gbps"] else None
    first = process.local_rank == 0  # all processes of a node read the same counters
    node = {"host": socket.gethostname(), "interfaces": carried} if first else None
    (nodes,) = demo.gather(node)
    return {
        "world_size": ranks,
        "all_reduce_bytes": count,
        "all_reduce_ms": ms,
        "algbw_GBps": count / ms / 1e6,
        "busbw_GBps": count / ms / 1e6 * 2 * (ranks - 1) / ranks,
        "nodes": [node for node in nodes if node],
    }


def measure(process: demo.Process, work: Callable[[], object]) -> list[float]:
    """Milliseconds of each round of `work`, means over the ranks; the first is the warm-up."""
    rounds: list[float] = []
    while len(rounds) < 2 or (len(rounds) <= ROUNDS and sum(rounds) < 1e3 * SECONDS):
        dist.barrier()
        start = time.perf_counter()
        work()
        torch.get_device_module(process.device).synchronize()
        (ranks,) = demo.gather(1e3 * (time.perf_counter() - start))
        rounds.append(statistics.fmean(ranks))
    return rounds


def sentence(record: dict) -> str:
    """The record for people: of the slowest node, whose pace is that of all."""
    count, ms = record["all_reduce_bytes"], record["all_reduce_ms"]
    text = f"all-reduce of {count / 1e6:.1f} MB in {shown(ms)} ms"
    links = [busiest(node["interfaces"], len(record["nodes"])) for node in record["nodes"]]
    link = min(filter(None, links), key=lambda link: link["wire_Gbps"], default=None)
    if link is None or link["wire_Gbps"] < SEEN * 8e-6 * count / ms:
        alone = len(record["nodes"]) == 1
        where = "inside the node, on no interface" if alone else "on no interface"
        where += "" if alone else " whose bytes are counted"
        return f"{text}: {shown(8 * record['algbw_GBps'])} Gb/s {where}"
    text += f": {shown(link['wire_Gbps'])} Gb/s on {link['name']} ({link['kind']})"
    if link["share"] is None:
        return text
    return f"{text}, {100 * link['share']:.0f} % of its stated {link['speed_Gbps']:g} Gb/s"


def busiest(interfaces: list[dict], nodes: int) -> dict | None:
    """The one that carried most; with several nodes loopback is not what joins them."""
    able = [link for link in interfaces if nodes == 1 or link["kind"] != "loopback"]
    return max(able, key=lambda link: link["wire_Gbps"], default=None)


def shown(value: float) -> str:
    """With two or three digits that count: 0.99, 6.9, 364, 3,760."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


if __name__ == "__main__":
    demo.one_line_errors(main)
