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

from analysis.repeats import values
from analysis.words import digits, ms, with_range

PARTS = {  # of a step, in seconds
    "compute": lambda run: run.compute_s,
    "data wait": lambda run: run.data_s,
    "communication": lambda run: run.link_s,
    "waiting for ranks": lambda run: run.exposed_s - run.link_s,
}
HEAD = ["run", "speed-up", "efficiency", "ideal step", "lost", *PARTS]


def is_scaling(runs):
    return len({run.processes for run in runs if run.processes}) > 1


def scale(runs):
    """(the base, or None; what is said of all runs; the rows of a table) of runs that differ in
    their number of processes.
    """
    able = [run for run in runs if run.complete and run.processes and run.img_per_s]
    if not is_scaling(able):
        return None, "No speed-up: that needs complete runs of two numbers of processes.", []
    base = min(able, key=lambda run: run.processes)
    text = {
        "strong": f"Strong scaling: a step has {base.global_batch:,} images in every run.",
        "weak": f"Weak scaling: each process has {digits(base.global_batch / base.processes)} "
        "images in a step in every run.",
        "": "Neither strong nor weak scaling: only images/s are compared.",
    }[kind_of(runs)]
    counted = f"{base.processes} process{'es' if base.processes > 1 else ''}"
    text += f" The base is {base.name}, with {counted}."
    if not any(run.repeats for run in able):
        text += " One run each: how much such runs differ is not known."
    return base, text, [beside(base, run) for run in able if run is not base]


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
    return [f"neither strong nor weak scaling: the global batch is {batches}"]


def beside(base, run):
    """A run's row of the table."""
    slow, fast = values(base, "img_per_s"), values(run, "img_per_s")
    between = min(fast) / max(slow), max(fast) / min(slow)
    speed_up = run.img_per_s / base.img_per_s
    efficiency = speed_up * base.processes / run.processes
    share = (run.global_batch / run.processes) / (base.global_batch / base.processes)
    times = [share * base.step_s, run.step_s - share * base.step_s]
    if base.has_split and run.has_split:
        # Without a minus before a zero.
        times += [round(of(run) - share * of(base), 7) + 0.0 for of in PARTS.values()]
    cells = [ms(seconds) for seconds in times] + ["-"] * len(PARTS)
    shown = with_range("{:.2f}".format, speed_up, between)
    return [run.name, shown, f"{efficiency:.0%}", *cells][: len(HEAD)]
