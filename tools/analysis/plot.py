"""The picture of tools/compare_logs.py: where the time of each run went, throughput, loss.

Drawn with matplotlib, which only a picture needs. Hatching, line style and mark tell the runs
apart without colour.
"""

import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which may look for a display

LINES = ("-", "--", ":", "-.", "-")
COLOURS = ("#111111", "#1f5fa8", "#c1440e", "#4d8f3a", "#7a3f98")
PARTS = {  # of a step: colour, hatching
    "compute": ("#555555", ""),
    "data wait": ("#cccccc", ".."),
    "exposed communication": ("#ffffff", "///"),
    "step, not split in the log": ("#999999", ""),
    "over the fastest run (inferred)": ("#ffffff", "xx"),
}


def draw(result, file):
    """`result` is what compare_logs.compare_runs returns. Raises OSError or ValueError."""
    runs = result["runs"]
    with matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(16, 5.2), layout="constrained")
        split, throughput, loss = figure.subplots(1, 3)
        draw_split(split, runs)
        for i, run in enumerate(runs):
            draw_line(throughput, i, run, "img_per_s", run.processes or 1)
            draw_line(loss, i, run, "loss", 1)
        throughput.set_ylim(0, max(throughput.get_ylim()[1], 1e-9) * 1.2)
        throughput.set(xlabel="step", ylabel="images/s, whole job", title="Throughput")
        loss.set(xlabel="step", ylabel="cross entropy, mean over ranks", title="Loss")
        finish(throughput, "no throughput in these logs")
        finish(loss, "no step lines in these logs")
        figure.savefig(file, dpi=120, format=None if Path(file).suffix else "png")


def draw_split(axis, runs):
    """A stacked bar for each run."""
    bars = {run.name: parts_of(run) for run in runs if run.step_s}
    bottom = [0.0] * len(bars)
    for i, (name, (colour, hatch)) in enumerate(PARTS.items()):
        heights = [1000 * parts[i] for parts in bars.values()]
        if any(heights):
            look = {"label": name, "color": colour, "hatch": hatch, "edgecolor": "#111111"}
            axis.bar(range(len(bars)), heights, 0.6, bottom, **look)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, top in enumerate(bottom):
        place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{top:,.0f} ms", (i, top), **place)
    axis.set_xticks(range(len(bars)), list(bars))
    axis.set_ylim(0, max(bottom, default=1) * 1.45)  # room for the legend above the bars
    axis.set(ylabel="time per step (ms)", title="Where a step's time goes")
    finish(axis, "no step times in these logs")


def parts_of(run):
    """Seconds of a step in the order of PARTS; without a split its work and what is over it."""
    if run.has_split:
        return run.compute_s, run.data_s, run.exposed_s, 0, 0
    return 0, 0, 0, run.work_s, run.step_s - run.work_s


def draw_line(axis, i, run, name, factor):
    """Run i's mean over ranks of that figure, times factor, for steps that every rank has."""
    by_step = {}
    for (_, epoch, step), line in sorted(run.log.steps.items()):
        value = getattr(line, name)
        if value is not None and math.isfinite(value):
            by_step.setdefault((epoch, step), []).append(value)
    most = max(map(len, by_step.values()), default=0)
    points = [(step, sum(v) / most) for (_, step), v in by_step.items() if len(v) == most]
    if points:
        label = run.name if run.complete else f"{run.name} (incomplete)"
        look = {"label": label, "color": COLOURS[i % 5], "linestyle": LINES[i % 5], "linewidth": 2}
        # The mark stands at the end, so that a short run is seen too.
        look |= {"marker": "osD^v"[i % 5], "markevery": [-1]}
        axis.plot([step for step, _ in points], [factor * mean for _, mean in points], **look)


def finish(axis, otherwise):
    """A legend, or a word where there is nothing to show."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")
    else:
        axis.text(0.5, 0.5, otherwise, ha="center", transform=axis.transAxes)
