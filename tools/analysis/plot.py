"""The pictures of tools/compare_logs.py.

They show where the time of each run went, and the bus bandwidth of the probe's sizes. Whiskers
are the range of repeats.

Drawn with matplotlib, which only a picture needs. Hatching, line style and mark tell the runs
apart without colour.
"""

from pathlib import Path
from statistics import median

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which may look for a display
from matplotlib.ticker import EngFormatter, LogLocator

from analysis.repeats import values

LINES = ("-", "--", ":", "-.", "-")
COLOURS = ("#111111", "#1f5fa8", "#c1440e", "#4d8f3a", "#7a3f98")
LOOK = {"axes.spines.top": False, "axes.spines.right": False}
LOOK["text.parse_math"] = False  # a name may have a $ in it
PARTS = {  # of a step: colour, hatching
    "compute": ("#555555", ""),
    "data wait": ("#cccccc", ".."),
    "exposed communication": ("#ffffff", "///"),
}


def draw(result, file):
    """`result` is what compare_logs.compare_runs returns. Raises OSError or ValueError."""
    runs = result["runs"]
    curves = {run.name: curve for run in runs if (curve := bandwidth_of(run))}
    with matplotlib.rc_context(LOOK):
        count = 1 + bool(curves)
        figure = Figure(figsize=(3 + 3 * count, 4.2), layout="constrained")
        split, *others = figure.subplots(1, count, squeeze=False).flat
        draw_split(split, runs)
        if curves:
            draw_bandwidth(*others, curves)
        figure.savefig(file, dpi=160, format=None if Path(file).suffix else "png")


def look_of(i):
    """Of the i-th run."""
    return {"color": COLOURS[i % 5], "linestyle": LINES[i % 5], "marker": "osD^v"[i % 5]}


def whiskers(middles, each):
    """How far the lowest and the highest of each list are from its middle; None: all the same."""
    below = [middle - min(values) for middle, values in zip(middles, each, strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, each, strict=True)]
    return [below, above] if any(below) else None


def bandwidth_of(run):
    """{bytes of an all-reduce: its bus bandwidth in GB/s, of each repeat}, from the probe."""
    found = {}
    for one in run.repeats or [run]:
        for size in one.record("Probe").get("sizes", []):
            count, busbw = size.get("bytes"), size.get("busbw_GBps")
            if count and busbw:
                found.setdefault(count, []).append(busbw)
    return dict(sorted(found.items()))


def draw_bandwidth(axis, curves):
    for i, (name, curve) in enumerate(curves.items()):
        middles = [median(each) for each in curve.values()]
        ranges = whiskers(middles, curve.values())
        axis.errorbar(list(curve), middles, ranges, label=name, capsize=3, **look_of(i))
    axis.set(xscale="log", yscale="log", title="All-reduces alone, by the probe")
    axis.set(xlabel="size", ylabel="bus bandwidth (GB/s)")
    axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.xaxis.set_minor_formatter("")  # its default writes formulas
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    finish(axis, "")


def draw_split(axis, runs):
    """A stacked bar for each run."""
    bars = {r.name: (r.compute_s, r.data_s, r.exposed_s) for r in runs if r.has_split}
    bottom = [0.0] * len(bars)
    for i, (name, (colour, hatch)) in enumerate(PARTS.items()):
        heights = [1000 * parts[i] for parts in bars.values()]
        if any(heights):
            look = {"label": name, "color": colour, "hatch": hatch, "edgecolor": "#111111"}
            axis.bar(range(len(bars)), heights, 0.6, bottom, **look)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    steps = [[1000 * each for each in values(run, "step_s")] for run in runs if run.has_split]
    middles = [median(each) for each in steps]
    if ranges := whiskers(middles, steps):
        look = {"fmt": "none", "ecolor": "#1f5fa8", "capsize": 6, "label": "range of the runs"}
        axis.errorbar(range(len(bars)), middles, ranges, **look)
    for i, (middle, top) in enumerate(zip(middles, bottom, strict=True)):
        place = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{middle:,.0f} ms", (i, max(top, *steps[i])), **place)
    axis.set_xticks(range(len(bars)), list(bars))
    axis.set_ylim(0, max(bottom, default=1) * 1.45)  # room for the legend above the bars
    axis.set(ylabel="time per step (ms)", title="Where a step's time goes")
    finish(axis, "no step times in these logs")


def finish(axis, otherwise):
    """A legend, or a word where there is nothing to show."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")
    else:
        axis.text(0.5, 0.5, otherwise, ha="center", transform=axis.transAxes)
