"""Whether two runs may be compared: settings, losses, and the wire that they went over."""

import itertools
import math
import statistics

from analysis.units import rate
from common.thresholds import LOSS_TOLERANCE, SAME_RATE

# Settings of the Run record that must be the same for times to be comparable,
MUST_MATCH = {
    "precision": "precision",
    "image_size": "image size",
    "picture_sizes": "size of the pictures in the files",
    "grad_compression": "compression",
}
# and those that may explain a difference but do not forbid the comparison.
OTHER_SETTINGS = ["backend", "seed", "weights", "lr", "compile", "workers", "threads"]
OTHER_SETTINGS += ["accumulate_steps", "checkpoint_every", "log_every", "lr_scaling", "sync_bn"]
OTHER_SETTINGS += ["warmup_steps", "bucket_cap_mb", "val_images", "versions", "devices"]


def is_weak_pair(a, b):
    """More processes with the same batch each: the global batch and the steps differ by design."""
    if None in (a.processes, b.processes, a.global_batch, b.global_batch):
        return False
    same = a.global_batch * b.processes == b.global_batch * a.processes
    return a.processes != b.processes and same


def differences(base, run):
    """What keeps `run` from being compared with `base`, one text each."""
    facts = [one.record("Run") for one in (base, run)]
    keys = list(MUST_MATCH)
    if all(fact.get("grad_compression") == "powersgd" for fact in facts):
        keys.append("powersgd_rank")
    pairs = [(MUST_MATCH.get(key, key), *(fact.get(key) for fact in facts)) for key in keys]
    own = {"images": "image count", "epochs": "epoch count", "parameters": "model (parameters)"}
    if not is_weak_pair(base, run):
        own |= {"global_batch": "global batch", "steps": "number of steps"}
    pairs += [(text, getattr(base, name), getattr(run, name)) for name, text in own.items()]
    return [
        f"{text} differs: {a} in {base.name}, {b} in {run.name}"
        for text, a, b in pairs
        if None not in (a, b) and a != b
    ]


def other_settings(base, run):
    one, two = base.record("Run"), run.record("Run")
    keys = [key for key in OTHER_SETTINGS if key in one and key in two and one[key] != two[key]]
    return keys if base.processes == run.processes else [k for k in keys if k != "devices"]


def same_wire(runs):
    """Of each two runs that used the same interfaces at the same rate, a sentence."""
    found = []
    able = [run for run in runs if run.complete and run.nodes != 1 and run.wire_gbps]
    for a, b in itertools.combinations(able, 2):
        used = [[(i.host, i.transport, i.names) for i in run.networks] for run in (a, b)]
        slow, fast = sorted([a.wire_gbps, b.wire_gbps])
        if used[0] == used[1] and fast < SAME_RATE * slow:
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


def loss_noise(run):
    """Standard error of an epoch's mean loss, from the scatter between neighbouring step lines.

    Differences of neighbours hold twice the scatter's variance and none of the trend.
    """
    squares = []
    for rank in run.log.ranks:
        series = [s.loss for key, s in sorted(run.log.steps.items()) if key[0] == rank]
        squares += [(b - a) ** 2 / 2 for a, b in itertools.pairwise(series)]
    squares = [s for s in squares if math.isfinite(s)]
    if not squares:
        return 0.0
    samples = (run.steps or len(squares)) / (run.epochs or 1) * len(run.log.ranks)
    return math.sqrt(statistics.fmean(squares) / max(samples, 1))


def losses_apart(base, run):
    """The first epoch whose losses part by more than noise, as text, or None."""
    for epoch in sorted(base.losses.keys() & run.losses.keys()):
        a, b = base.losses[epoch], run.losses[epoch]
        noise = 3 * math.hypot(loss_noise(base), loss_noise(run))
        # Written so that a loss of nan or inf on one side parts too.
        if not abs(a - b) <= max(LOSS_TOLERANCE * abs(a), noise) and repr(a) != repr(b):
            return (
                f"losses part by more than noise in epoch {epoch}: "
                f"{a:.4f} in {base.name}, {b:.4f} in {run.name}; the runs did not learn the same"
            )
    return None
