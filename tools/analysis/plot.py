"""The pictures of tools/compare_logs.py: the parts of a step; bus bandwidth over size; speed-up
beside the ideal line; loss and Top-1 over time. Whiskers are the range of repeats.

Drawn with matplotlib, which only a picture needs. Hatching, line style and mark tell the runs
apart without colour.
"""

from pathlib import Path
from statistics import median

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which may look for a display
from matplotlib.ticker import EngFormatter, LogLocator

from analysis.runs import parts_of

LINES = ("-", "--", ":", "-.", "-")
COLOURS = ("#111111", "#1f5fa8", "#c1440e", "#4d8f3a", "#7a3f98")
LOOK = {"axes.spines.top": False, "axes.spines.right": False}
LOOK["text.parse_math"] = False  # a name may have a $ in it
PARTS = {  # of a step: title, colour, hatching
    "compute_ms": ("computing", "#555555", ""),
    "data_ms": ("waiting for images", "#cccccc", ".."),
    "link_ms": ("link", "#ffffff", "///"),
    "wait_ms": ("waiting for ranks", "#ffffff", "xxx"),
}


def draw(comparison, file):
    """Raises OSError or ValueError."""
    runs, scaling = comparison.runs, comparison.scaling
    split = [run for run in runs if parts_of(run)]
    curves = {run.name: curve for run in runs if (curve := bandwidth_of(run))}
    learning = [run for run in runs if len(run.log.curve) > 1 and not run.setting("dummy")]
    drawings = [lambda axis: draw_split(axis, split)] if split else []
    drawings += [lambda axis: draw_bandwidth(axis, curves)] if curves else []
    drawings += [lambda axis: draw_speed_up(axis, scaling)] if scaling else []
    drawings += [lambda axis: draw_learning(axis, learning)] if learning else []
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(1 + 5 * max(1, len(drawings)), 4.4), layout="constrained")
        if not drawings:
            figure.text(0.5, 0.5, "no step times in these logs", ha="center")
        for number, drawing in enumerate(drawings, 1):
            axis = figure.add_subplot(1, len(drawings), number)
            drawing(axis)
            axis.grid(alpha=0.3)
            axis.set_axisbelow(True)
        figure.savefig(file, dpi=160, format=None if Path(file).suffix else "png")


def look_of(i):
    """Of the i-th run."""
    return {"color": COLOURS[i % 5], "linestyle": LINES[i % 5]}


def mark_of(i):
    return "osD^v"[i % 5]


def whiskers(middles, each):
    """How far the lowest and the highest of each list are from its middle; None: all the same."""
    below = [middle - min(values) for middle, values in zip(middles, each, strict=True)]
    above = [max(values) - middle for middle, values in zip(middles, each, strict=True)]
    return [below, above] if any([*below, *above]) else None


def draw_split(axis, runs):
    """A stacked bar for each run, with the step's value beside it."""
    bottom = [0.0] * len(runs)
    for part, (title, colour, hatch) in PARTS.items():
        heights = [parts_of(run)[part] for run in runs]
        if any(heights):
            look = {"label": title, "color": colour, "hatch": hatch, "edgecolor": "#111111"}
            axis.bar(range(len(runs)), heights, 0.5, bottom, **look)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    steps = [run.values("step_ms") for run in runs]
    middles = [run.figures["step_ms"] for run in runs]
    if ranges := whiskers(middles, steps):
        look = {"fmt": "none", "ecolor": "#1f5fa8", "capsize": 6, "label": "range of the runs"}
        axis.errorbar(range(len(runs)), middles, ranges, **look)
    for i, middle in enumerate(middles):
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(f"{middle:,.0f} ms", (i + 0.25, middle), **place)
    axis.set_xticks(range(len(runs)), [run.name for run in runs])
    axis.set_xlim(-0.6, len(runs) - 0.1)
    axis.set_ylim(0, 1.05 * max([*bottom, *map(max, steps)]))
    axis.set(ylabel="time per step (ms)", title="Parts of a step")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)


def bandwidth_of(run):
    """{bytes of an all-reduce: its bus bandwidth in Gb/s, of each repeat}, from the probe."""
    found = {}
    for one in run.each:
        for size in one.record("Probe").get("sizes", []):
            count, busbw = size.get("bytes"), size.get("busbw_GBps")
            if count and busbw:
                found.setdefault(count, []).append(8 * busbw)
    return dict(sorted(found.items()))


def draw_bandwidth(axis, curves):
    for i, (name, curve) in enumerate(curves.items()):
        middles = [median(each) for each in curve.values()]
        ranges = whiskers(middles, curve.values())
        look = look_of(i) | {"marker": mark_of(i), "capsize": 3}
        axis.errorbar(list(curve), middles, ranges, label=name, **look)
    axis.set(xscale="log", yscale="log", title="All-reduces alone, by the probe")
    axis.set(xlabel="size", ylabel="bus bandwidth (Gb/s)")
    axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.xaxis.set_minor_formatter("")  # its default writes formulas
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.legend()


def draw_speed_up(axis, scaling):
    """Over the number of processes, beside the ideal line."""
    rows = sorted(scaling.rows, key=lambda row: row[0].processes)
    counts = [run.processes for run, *_ in rows]
    speed_ups = [speed_up for _, speed_up, *_ in rows]
    ranges = whiskers(speed_ups, [(low, high) for _, _, low, high, _ in rows])
    ideal = [count / scaling.base.processes for count in counts]
    axis.plot(counts, ideal, label="ideal", **look_of(1))
    axis.errorbar(counts, speed_ups, ranges, label="measured", marker="o", capsize=3, **look_of(0))
    axis.set_xticks(sorted({*counts}))
    axis.set(xlabel="processes", ylabel="speed-up (images/s)", title="Speed-up")
    axis.legend()


def draw_learning(axis, runs):
    """Loss of rank 0, and Top-1 of all ranks, over the seconds of training and validation."""
    right = None
    for i, run in enumerate(runs):
        axis.plot(*zip(*run.log.curve, strict=True), label=run.name, **look_of(i))
        if run.log.top1:
            right = right or axis.twinx()
            look = {"color": COLOURS[i % 5], "marker": mark_of(i), "linestyle": "none"}
            right.plot(*zip(*run.log.top1, strict=True), label=f"{run.name}: Top-1", **look)
    axis.set(xlabel="time (s)", ylabel="loss of rank 0", title="Loss and Top-1 over time")
    if right:
        right.set(ylabel="Top-1 (%)", ylim=(0, 105))
    handles, labels = axis.get_legend_handles_labels()
    if right:
        more, names = right.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    axis.legend(handles, labels, loc="center right")  # points of Top-1 are above, lines below
