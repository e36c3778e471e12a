"""Runs with different numbers of processes: how much faster, and what eats the rest.

    speed-up    images/s / the base's; of repeats, see repeats.py, the medians, with the range that
                the slowest and the fastest runs of both give
    efficiency  speed-up x the base's processes / processes
    strong      the same global batch in all runs, however it is accumulated
    weak        the same images per process and step in all runs
    base        of the complete runs that with the fewest processes; of several the first
    ideal step  the base's step (weak), or that x the base's processes / processes (strong). Both
                are the base's step x images per process / the base's images per process
    lost        step - ideal step; and so for each part, which may also be shorter than ideal

No law is fitted.
"""

from dataclasses import dataclass, field

from analysis.repeats import values
from analysis.words import digits, with_range

PARTS = {  # of a step, in seconds
    "compute": lambda run: run.compute_s,
    "data wait": lambda run: run.data_s,
    "communication": lambda run: run.link_s,
    "waiting for ranks": lambda run: run.exposed_s - run.link_s,
}


@dataclass
class Scaled:
    """One run beside its base."""

    speed_up: float
    between: tuple  # the lowest and highest speed-up of repeats
    efficiency: float
    ideal_s: float  # seconds of a step
    lost_s: dict = field(default_factory=dict)  # part of a step -> seconds; empty: not split

    @property
    def shown_speed_up(self):
        return with_range("{:.2f}".format, self.speed_up, self.between)


@dataclass
class Scaling:
    kind: str  # strong, weak, or empty: neither
    base: str = ""
    says: list = field(default_factory=list)  # about all runs
    runs: dict = field(default_factory=dict)  # name -> Scaled


def is_scaling(runs):
    return len({run.processes for run in runs if run.processes}) > 1


def scale(runs):
    """The Scaling of runs that differ in their number of processes."""
    able = [run for run in runs if run.complete and run.processes and run.img_per_s]
    found = Scaling(kind_of(runs))
    if not is_scaling(able):
        text = "No speed-up: that needs complete runs, with a Summary, of two numbers of processes"
        found.says.append(f"{text}.")
        return found
    base = min(able, key=lambda run: run.processes)
    found.base = base.name
    for run in able:
        if run is not base:
            found.runs[run.name] = beside(base, run)
    counted = f"{base.processes} process{'es' if base.processes > 1 else ''}"
    found.says = [say_kind(found.kind, base), f"The base is {base.name}, with {counted}."]
    if not any(run.repeats for run in able):
        found.says.append("One run each: how much such runs differ is not known.")
    return found


def kind_of(runs):
    """strong, weak, or empty."""
    known = [run for run in runs if run.processes and run.global_batch]
    if len({run.global_batch for run in known}) == 1:
        return "strong"
    return "weak" if len({run.global_batch / run.processes for run in known}) == 1 else ""


def differences(runs):
    """Why these runs are neither strong nor weak scaling: one text, or none."""
    known = [run for run in runs if run.processes and run.global_batch]
    if kind_of(runs) or not known:
        return []
    batches = ", ".join(f"{run.global_batch:,} in {run.name}" for run in known)
    each = ", ".join(f"{digits(run.global_batch / run.processes)} in {run.name}" for run in known)
    return [f"global batch differs: {batches}, and so do images per process and step: {each}"]


def beside(base, run):
    slow, fast = values(base, "img_per_s"), values(run, "img_per_s")
    between = min(fast) / max(slow), max(fast) / min(slow)
    speed_up = run.img_per_s / base.img_per_s
    efficiency = speed_up * base.processes / run.processes
    share = (run.global_batch / run.processes) / (base.global_batch / base.processes)
    found = Scaled(speed_up, between, efficiency, share * base.step_s)
    if base.has_split and run.has_split:
        found.lost_s = {
            # Without a minus before a zero.
            part: round(seconds(run) - share * seconds(base), 7) + 0.0
            for part, seconds in PARTS.items()
        }
    return found


def say_kind(kind, run):
    if kind == "strong":
        return f"Strong scaling: a step has {run.global_batch:,} images in every run."
    if kind == "weak":
        each = digits(run.global_batch / run.processes)
        return f"Weak scaling: each process has {each} images in a step in every run."
    return "Neither strong nor weak scaling: only images/s are compared."
