"""What a link delivers, and what it costs a step: emulated, as root, and by the cost model."""

import itertools
import json
import os
import re
import sys
from functools import partial

from analysis import cost_model
from analysis.logs import parse_text
from benchmarks import settings
from benchmarks.figures import record, records, row, speed
from benchmarks.runner import TOOLS, Failure, rounds, say

# Options and environment of a CPU without bf16.
OLD_CPU = {"precision": "fp32"}, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def gbps(rate):
    """Gb/s of a rate as tc writes it; None: unshaped."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    return float(found[1]) * {"k": 1e-6, "m": 1e-3, "g": 1}[found[2]] if found else None


def need_root(args):
    if os.geteuid():
        why = "needs root for its network namespaces: start it with sudo"
        raise Failure(f"{args.command} {why}")


def over_link(bench, rate, name, ranks, options, **env):
    """Trains on two nodes of so many ranks over a link of this rate; the folder of its logs."""
    shape = ["--rate", rate] if gbps(rate) else []
    command = ["bash", TOOLS / "two_nodes.sh", *shape, "--gpus_per_node", ranks, "--name", name]
    bench.run([*command, "--", *options], OMP_NUM_THREADS="1", **env)
    return bench.folder / "logs" / name


# --- links -------------------------------------------------------------------------------------


def measure_links(bench):
    """links of known rates: what the probe says, and compressed gradients"""
    args, turn = bench.args, itertools.count()
    need_root(args)
    folder = settings.pictures(bench, 480)

    def train(rate, method):
        more = settings.TWO | settings.METHODS[method]
        given = settings.options(args, folder, num_epochs=1000, **more)
        name, probe = f"{next(turn)}-{rate}-{method}", str(int(method == "none"))
        logs = over_link(bench, rate, name, 1, given, PROBE=probe)
        return link_figures((logs / "node0.log").read_text(errors="replace"), args)

    pairs = list(itertools.product(args.rates, args.methods))
    found = rounds(bench, {f"{rate}, {how}": partial(train, rate, how) for rate, how in pairs})
    rows = [entry for rate in args.rates for entry in rate_rows(rate, found[f"{rate}, none"])]
    for rate, method in pairs:
        name = f"{rate}, {method}"
        mine, none = found[name], found[f"{rate}, none"]
        rows.append(row(f"{name}: step / none", "ms", mine["ms"], none["ms"]))
        rows.append(row(f"{name}: bytes of a step / none", "MB", mine["MB"], none["MB"]))
        if method != "none":  # whose interface carries the probe, too
            received = mine["received"], none["MB"]
            rows.append(row(f"{name}: received per step of the run / none", "MB", *received))
    return rows


def link_figures(log, args):
    """Figures of one run over a link, from node 0's log; with accumulation of a quarter step."""

    def highest(node, key):
        return max(link[key] for link in node["interfaces"] if link["kind"] != "loopback")

    summary, parts = record(log, "Summary"), record(log, "Run")["accumulate_steps"]
    # From the other node come its parts of all-reduces, but none of the weights. One more than
    # there are steps: of the pass before the first one.
    received = highest(parse_text(log).nodes[0], "rx_bytes") / (summary["steps"] + 1)
    found = {
        "ms": speed(log, args)["step_ms"] / parts,
        "MB": summary["wire_bytes_per_step"] / parts / 1e6,
        "received": received / parts / 1e6,
    }
    for probe in records(log, "Probe"):
        found["wire"] = min(highest(node, "wire_Gbps") for node in probe["nodes"])
        if probe["bandwidth_GBps"]:  # others at work on the machine leave it without one
            found["slope"] = 8 * probe["bandwidth_GBps"]
        found["latency"] = probe["latency_ms"]
    return found


def rate_rows(rate, found):
    """What a link delivers against its shaped rate, all by the probe."""
    shaped = [gbps(rate)] if gbps(rate) else None
    return [
        row(f"{rate}: rate measured / shaped", "Gb/s", found["wire"], shaped),
        row(f"{rate}: bandwidth by the slope / shaped", "Gb/s", found.get("slope"), shaped),
        row(f"{rate}: latency of a small all-reduce", "ms", found["latency"]),
    ]


# --- predictions -------------------------------------------------------------------------------

RANKS_A_NODE = 1, 2


def measure_predictions(bench):
    """a step over one link as told from another link's log, against the step measured there

    Both ways, with one rank a node and with two. A round takes all links one after the other.
    """
    args, turn = bench.args, itertools.count()
    need_root(args)
    more, env = OLD_CPU if args.old_cpu else ({}, {})
    folder = settings.pictures(bench, 480)
    given = settings.options(args, folder, num_epochs=1000, **settings.TWO, **more)

    def train(ranks):
        name = f"{ranks}-{next(turn)}"
        runs = {
            rate: over_link(bench, rate, f"{name}-{rate}", ranks, given, PROBE="1", **env)
            for rate in args.rates
        }
        return cross_checks(bench, runs)

    return prediction_rows(rounds(bench, {n: partial(train, n) for n in RANKS_A_NODE}))


def cross_checks(bench, runs):
    """{(from, to, which): ms} that compare_logs.py tells of each run from each other one's log.

    runs: {name: folder}.
    """
    file, found = bench.folder / "compared.json", {}
    command = [sys.executable, TOOLS / "compare_logs.py", "--json", file]
    bench.run([*command, *(f"{name}={folder}" for name, folder in runs.items())])
    for check in json.loads(file.read_text())["cross_checks"]:
        for which in ("predicted", "measured"):
            found[check["from"], check["to"], which] = 1e3 * check[f"{which}_s"]
    return found


def prediction_rows(found):
    """Medians of the rounds, and between which errors a round's prediction lay."""
    rows = []
    for ranks, figures in found.items():
        for of, to in dict.fromkeys(key[:2] for key in figures):
            pair = [figures[of, to, which] for which in ("predicted", "measured")]
            name = f"{ranks} a node: step at {to}, from {of}'s log"
            rows.append(row(f"{name}: predicted / measured", "ms", *pair))
            errors = [100 * (a / b - 1) for a, b in zip(*pair, strict=True)]
            ends = {"demo": min(errors), "reference": max(errors), "ratio": None}
            rows.append({"what": f"{name}: least, largest error", "unit": "%"} | ends)
            rows[-1] |= {"demo_all": errors, "reference_all": None}
    return rows


# --- overlap -----------------------------------------------------------------------------------

PIXELS = {"conv1": 112**2, "layer1": 56**2, "layer2": 28**2, "layer3": 14**2, "layer4": 7**2}
RATES = 10, 25, 100  # Gb/s
FORWARD_MS, BACKWARD_MS = 4, 8  # of a step on each GPU
MIB = 2**20


def measure_overlap(bench):
    """by the cost model: a step with DDP's own bucket sizes against buckets of 25 MiB

    Two nodes with a GPU each. Nothing runs: of the time that the backward pass takes each layer
    has its share, by the multiplications in it.
    """
    kinds = {"own": [MIB, 25 * MIB], "given": [25 * MIB]}
    buckets = {kind: resnet_buckets(caps) for kind, caps in kinds.items()}
    for kind, found in buckets.items():
        say(f"{kind}: buckets of {', '.join(f'{size / 1e6:.1f}' for size, _ in found)} MB")
    rows = []
    for gbps in RATES:
        pair = [[modelled_step(found, gbps)] for found in buckets.values()]
        rows.append(row(f"step at {gbps} Gb/s: DDP's own buckets / of 25 MiB", "ms", *pair))
    return rows


def resnet_buckets(caps):
    """[(bytes, share of the backward pass after which they are there)] of ResNet-18's buckets.

    DDP makes them in the order in which gradients come: from the last layer to the first.
    """
    import torch.distributed
    import torchvision

    named = [*torchvision.models.resnet18(num_classes=80).named_parameters()][::-1]
    places, _ = torch.distributed._compute_bucket_assignment_by_size([p for _, p in named], caps)
    work = [p.numel() * PIXELS.get(name.split(".")[0], 1) * (p.dim() == 4) for name, p in named]
    done = [*itertools.accumulate(work)]
    sizes = [4 * sum(named[place][1].numel() for place in bucket) for bucket in places]
    return [(size, done[max(b)] / done[-1]) for size, b in zip(sizes, places, strict=True)]


def modelled_step(buckets, gbps):
    """ms of a step in which each bucket is sent when it is there and the one before is sent."""
    total = sum(size for size, _ in buckets)
    seconds = cost_model.ring_seconds(total, 2, 2, cost_model.payload_rate(gbps))
    parts = [(size / total, 1e-3 * (1 - done) * BACKWARD_MS) for size, done in buckets]
    exposed = max(0, cost_model.exposed_seconds(seconds, 0, parts))
    return FORWARD_MS + BACKWARD_MS + 1e3 * exposed
