"""What a step would take over another link or on more processes; the model tried on the runs."""

import itertools
import math

from analysis import UserError
from analysis.comparable import is_weak_pair
from analysis.cost_model import (
    all_reduce_seconds,
    estimate_step,
    implied_gbps,
    payload_rate,
    ring_seconds,
    tree_seconds,
    waited_seconds,
)

RATES_GBPS = (1, 10, 25, 56, 100, 200, 400)
PROCESSES = tuple(2**k for k in range(11))


def scaling(runs):
    """Speed-up and efficiency against the smallest run; empty where all have one size."""
    sized = [r for r in runs if r.processes and r.img_per_s]
    if len({r.processes for r in sized}) < 2:
        return []
    base, rows = min(sized, key=lambda r: r.processes), []
    for run in sorted(sized, key=lambda r: r.processes):
        speedup, kind = run.img_per_s / base.img_per_s, "mixed"
        if run.processes == base.processes:
            kind = "base"
        elif is_weak_pair(base, run) or run.global_batch == base.global_batch:
            kind = "weak" if is_weak_pair(base, run) else "strong"
        row = {"run": run.name, "processes": run.processes, "kind": kind, "speedup": speedup}
        rows.append(row | {"efficiency": speedup * base.processes / run.processes})
    return rows


def projected(runs, name):
    """The run to project from: the named one, with "" the one that is known best, with None none.

    Raises UserError where there is no such run.
    """
    if name is None:
        return None
    if name and name not in [run.name for run in runs]:
        raise UserError(f"--project {name}: no such run; without a name, put --project at the end")
    able = [run for run in runs if run.can_project and name in ("", run.name)]
    if not able:
        which = name or "the logs"
        raise UserError(f"--project: {which} lack step time, bytes a step, processes or nodes")
    # Then what the link has disturbed least.
    return min(able, key=lambda r: (not r.probe_s, not r.has_split, r.step_s))


def project(run):
    """Expected step and epoch at RATES_GBPS x PROCESSES (and this run's own number), weak scaling.

    Returns dicts: gbps, processes, nodes, ring_s, tree_s, step_s (low, high), best_s or None,
    epoch_s (low, high) or None where image count or batch is not known.
    """
    per_node, cells = max(1, run.processes // run.nodes), []
    for n, gbps in itertools.product(sorted({*PROCESSES, run.processes}), RATES_GBPS):
        nodes = run.nodes if n == run.processes else math.ceil(n / per_node)
        wire = payload_rate(gbps), run.message_s
        ring = ring_seconds(run.wire_bytes, n, nodes, *wire)
        tree = tree_seconds(run.wire_bytes, nodes, *wire)
        quick = all_reduce_seconds(run, run.wire_bytes, n, nodes, *wire)
        step = max(run.floor_s, quick), run.floor_s + quick
        best = epoch = None
        if quick and run.can_predict:
            small = all_reduce_seconds(run, 0, n, nodes, 1, run.message_s)
            repeated = (len(run.buckets) - 1) * small  # by the buckets after the first
            step = step[0], step[1] + repeated + waited_seconds(run)
            if n == run.processes:  # another size has another all-reduce
                best = min(max(step[0], estimate_step(run, quick, small)), step[1])
        if run.images and run.global_batch:  # the same batch per process
            steps = math.ceil(run.images / (run.global_batch / run.processes * n))
            epoch = tuple(seconds * steps for seconds in step)
        cell = {"gbps": gbps, "processes": n, "nodes": nodes, "ring_s": ring, "tree_s": tree}
        cells.append(cell | {"step_s": step, "best_s": best, "epoch_s": epoch})
    return cells


def predict(run, other):
    """Best estimate of this run's step in s over the other's link; both need a probe."""
    if other.small_s and other.bandwidth:
        total = other.small_s + run.wire_bytes / other.bandwidth
    else:
        size = (run.wire_bytes, run.processes, run.nodes)
        # the packets, and so their headers' share of what an interface counts, are the probe's
        share = min(1.0, implied_gbps(*size, run.probe_s) / run.wire_gbps)
        total = ring_seconds(*size, share * other.wire_gbps * 1e9 / 8, run.message_s)
    return estimate_step(run, total, other.small_s or 0.0)


def cross_checks(runs):
    """Each probed run's step predicted from each other one's log, at its measured rate."""
    probed = [r for r in runs if r.can_predict and r.wire_gbps and r.nodes > 1]
    rows = []
    for a, b in itertools.permutations(probed, 2):
        if a.shape == b.shape and abs(a.wire_bytes - b.wire_bytes) < 0.01 * a.wire_bytes:
            step = predict(a, b)
            row = {"from": a.name, "to": b.name, "gbps": b.wire_gbps, "predicted_s": step}
            rows.append(row | {"measured_s": b.step_s, "error": step / b.step_s - 1})
    return rows
