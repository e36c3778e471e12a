"""Whether runs may be compared, their ratios, and what one run lets expect of another link.

The projection is time alone: a step takes its own work (data wait and compute), and of the
all-reduce what is not hidden behind the backward pass.
    alone   one step's all-reduce with nothing beside it: the probe's, else bytes over the rate
    hidden  alone less the exposed communication; over a faster link as large a part of it
    waited  exposed communication beyond alone, for other ranks and for cores; it stays
    step    work + alone over the other link - hidden + waited
Over a slower link the backward pass may hide more than it did: there the step is an upper bound.
"""

import itertools
import math

from analysis.logs import UserError
from analysis.runs import rate

RATES_GBPS = (1, 10, 25, 56, 100, 200, 400)
# The share of an Ethernet line that is TCP's payload, MTU 1500: a packet without the headers of IP
# (20), TCP (20) and its time stamp (12), over the packet with Ethernet header 14, checksum 4,
# preamble 8 and gap 12. 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)
SAME_RATE = 1.2  # rates within this factor can be those of one wire

# Settings of the Run record that must be the same,
MUST_MATCH = {
    "precision": "precision",
    "image_size": "image size",
    "picture_sizes": "size of the images in the files",
    "grad_compression": "compression",
}
# and those that may explain a difference but do not forbid the comparison.
OTHER_SETTINGS = ["backend", "seed", "weights", "lr", "compile", "workers", "threads"]
OTHER_SETTINGS += ["accumulate_steps", "checkpoint_every", "log_every", "lr_scaling", "sync_bn"]
OTHER_SETTINGS += ["warmup_steps", "bucket_cap_mb", "val_images", "versions", "devices"]


# --- Like with like ------------------------------------------------------------------------------


def differences(base, run, scaling=False):
    """What keeps `run` from being compared with `base`, one text each.

    `scaling`: they may train other numbers of images, in other global batches.
    """
    facts = [one.record("Run") for one in (base, run)]
    keys = list(MUST_MATCH)
    if all(fact.get("grad_compression") == "powersgd" for fact in facts):
        keys.append("powersgd_rank")
    pairs = [(MUST_MATCH.get(key, key), *(fact.get(key) for fact in facts)) for key in keys]
    own = {"images": "image count", "parameters": "model (parameters)"}
    if not scaling:
        own |= {"epochs": "epoch count", "global_batch": "global batch"}
        own |= {"steps": "number of steps"}
    pairs += [(text, getattr(base, name), getattr(run, name)) for name, text in own.items()]
    return [
        f"{text} differs: {a} in {base.name}, {b} in {run.name}"
        for text, a, b in pairs
        if None not in (a, b) and a != b
    ]


def other_settings(base, run):
    one, two = base.record("Run"), run.record("Run")
    found = [key for key in OTHER_SETTINGS if key in one and key in two and one[key] != two[key]]
    if base.processes != run.processes and "devices" in found:  # a list of them: of each rank
        kinds = [{str(device) for device in each.setting("devices", list)} for each in (base, run)]
        if kinds[0] == kinds[1]:
            found.remove("devices")
    return found


def same_wire(runs):
    """For each two runs that used the same interfaces at the same rate, a sentence."""
    found = []
    able = [run for run in runs if run.complete and run.nodes != 1 and run.wire_gbps]
    for a, b in itertools.combinations(able, 2):
        used = [[(i.host, i.transport, i.names) for i in run.networks] for run in (a, b)]
        slow, fast = sorted([a.wire_gbps, b.wire_gbps])
        alike = a.processes == b.processes and used[0] == used[1]
        if alike and fast < SAME_RATE * slow:
            who = "Both runs" if len(runs) == 2 else f"{a.name} and {b.name}"
            found.append(
                f"{who} went over the same wire: {a.network.way}, by {a.network.basis}, "
                f"{rate(a.wire_gbps)} and {rate(b.wire_gbps)} measured."
            )
    return found


def set_losses(runs):
    """Mean loss of each epoch, of ranks whose lines all logs have: they saw the same images."""
    written = [set(run.log.epochs) for run in runs if run.log.epochs]
    shared = set.intersection(*written) if written else set()
    if len({run.processes for run in runs}) > 1:  # then they did not
        shared = set()
    for run in runs:
        for epoch in sorted({epoch for _, epoch in run.log.epochs}):
            lines = {key: loss for key, loss in run.log.epochs.items() if key[1] == epoch}
            same = [loss for key, loss in lines.items() if key in shared] or lines.values()
            run.losses[epoch] = sum(same) / len(same)


# --- Ratios --------------------------------------------------------------------------------------


def time_ratio(base, run):
    """How many times as long as the base the run took; None if that cannot be said."""
    if None in (base.wall_s, run.wall_s) or base.partial or run.partial:
        return None
    return run.wall_s / base.wall_s


def set_work(run, runs):
    """Seconds of data wait and compute in a step, and the name of the run they come from.

    A log without a split takes the whole step of the fastest run of the same shape.
    """
    if run.has_split:
        run.work_s, run.work_from = run.data_s + run.compute_s, run.name
        return
    alike = [other for other in runs if other.step_s and other.shape == run.shape]
    if best := min(alike, key=lambda other: other.step_s, default=None):
        run.work_s, run.work_from = best.step_s, best.name


# --- The model -----------------------------------------------------------------------------------


def can_model(run):
    """Whether the bytes that each node sends in a step are known."""
    return bool(all((run.step_s, run.wire_bytes, run.processes, run.nodes)) and run.nodes > 1)


def ring_bytes(run):
    """Bytes that a node sends in each direction in an all-reduce of a step's gradients: a ring's.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009. NCCL may take a tree
    instead: then trust the probe.
    """
    return 2 * (run.processes - 1) / run.processes * run.wire_bytes


def sent_bytes(run):
    """The same for each way that NCCL may take: a ring; on two nodes a tree, if it sends less.

    A tree on two nodes sends each gradient once in each direction, and NCCL often takes it there
    for large sizes: NVIDIA/nccl issues 812 and 946, NVIDIA/nccl-tests issue 196.
    """
    ways = {"a ring": ring_bytes(run)}
    if run.nodes == 2 and run.processes > 2:
        ways["a tree"] = run.wire_bytes
    return ways


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def alone_s(run):
    """Seconds of a step's all-reduce with nothing beside it, or None."""
    if run.probe_s or not (can_model(run) and run.link_gbps):
        return run.probe_s
    return ring_bytes(run) / payload_rate(run.link_gbps)


def step_over(run, there_s):
    """Seconds of this run's step where an all-reduce alone takes there_s; see the docstring."""
    here_s = alone_s(run)
    if not (run.has_split and here_s):
        return run.work_s + there_s  # nothing is known to be hidden
    hidden = max(0.0, here_s - run.exposed_s) * min(1.0, there_s / here_s)
    waited = max(0.0, run.exposed_s - here_s)
    return run.work_s + there_s - hidden + waited


def projected(runs, name):
    """The run to project from: the named one; with "" the one best known; with None none.

    Raises UserError if there is no such run.
    """
    if name is None:
        return None
    if name and name not in [run.name for run in runs]:
        raise UserError(f"--project {name}: no such run; without a name, put --project at the end")
    able = [run for run in runs if can_model(run) and name in ("", run.name)]
    if not able:
        which = name or "the logs"
        raise UserError(f"--project: {which} lack step time, bytes a step, processes or nodes")
    return min(able, key=lambda run: (not run.probe_s, not run.has_split, run.step_s))


def project(run):
    """Expected step and epoch at RATES_GBPS: dicts of gbps, alone_s, step_s, bound, epoch_s."""
    rows, here_s = [], alone_s(run)
    for gbps in RATES_GBPS:
        there_s = ring_bytes(run) / payload_rate(gbps)
        step_s, epoch_s = step_over(run, there_s), None
        if run.images and run.global_batch:
            epoch_s = step_s * math.ceil(run.images / run.global_batch)
        bound = not (run.has_split and here_s) or there_s > here_s
        row = {"gbps": gbps, "alone_s": there_s, "step_s": step_s}
        rows.append(row | {"bound": bound, "epoch_s": epoch_s})
    return rows
