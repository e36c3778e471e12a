"""The picture of tools/compare_logs.py: one slide on where the time of each run went.

Drawn with matplotlib, which only a picture needs; everything is told apart without colour, by
hatching, line style and mark.
"""

import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which may look for a display

LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
COLOURS = ("#111111", "#1f5fa8", "#c1440e", "#4d8f3a", "#7a3f98")
MOST_RANKS = 8  # of a single run, each with a bar and a line of its own
PARTS = {  # of a step: colour, hatching
    "compute": ("#555555", ""),
    "data wait": ("#cccccc", ".."),
    "exposed communication": ("#ffffff", "///"),
    "step, not split in the log": ("#999999", ""),
    "over the fastest run (inferred)": ("#ffffff", "xx"),
}


def draw(result, file):
    """Split of the step, throughput, loss, and efficiency where there are several sizes.

    `result` is what compare_logs.compare returns. Raises OSError or ValueError (no such format).
    """
    panels, grid, size = [draw_split, draw_throughput, draw_loss], (1, 3), (16, 5.2)
    if result["scaling"]:
        panels, grid, size = [*panels, draw_efficiency], (2, 2), (13, 9)
    look = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=size, layout="constrained")
        for panel, axis in zip(panels, figure.subplots(*grid).flat, strict=True):
            panel(axis, result)
        if len(result["runs"]) == 1:
            figure.suptitle(headline(result["runs"][0]))
        figure.savefig(file, dpi=120, format=None if Path(file).suffix else "png")


def headline(run):
    """What a single run is: its name, processes, and that it is not whole."""
    text = run.name
    if run.processes and run.nodes:
        several = "processes" if run.processes > 1 else "process"
        text += f": {run.processes} {several} on {run.nodes} node{'s' * (run.nodes > 1)}"
    return text if run.complete else f"{text} ({run.status.lower()})"


def draw_split(axis, result):
    """Stacked bars, a run each; of a single run a bar for each rank, so that a slow one shows."""
    bars = bars_of_ranks(result["runs"]) or {
        run.name: parts_of(run) for run in result["runs"] if run.step_s
    }
    bottom = [0.0] * len(bars)
    for i, (name, (colour, hatch)) in enumerate(PARTS.items()):
        heights = [1000 * parts[i] for parts in bars.values()]
        if any(heights):
            look = {"label": name, "color": colour, "hatch": hatch, "edgecolor": "#111111"}
            axis.bar(range(len(bars)), heights, 0.6, bottom, **look)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, top in enumerate(bottom):
        text = f"{top:,.0f} ms" if top >= 100 else f"{top:,.1f} ms"
        axis.annotate(text, (i, top), (0, 3), textcoords="offset points", ha="center")
    axis.set_xticks(range(len(bars)), list(bars))
    if len(bars) == 1:
        axis.set_xlim(-1, 1)  # it does not fill the panel
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set(ylabel="time per step (ms)", title="Where a step's time goes")
    axis.set_ylim(0, max(bottom, default=1) * 1.45)  # room for the legend above the bars
    finish(axis, "no step times in these logs")


def bars_of_ranks(runs):
    """{rank 0: seconds in the order of PARTS} of a single run; empty where there is no such."""
    if len(runs) > 1 or not 1 < len(runs[0].ranks) <= MOST_RANKS:
        return {}
    return {
        f"rank {rank}": (compute, data, exposed, 0, 0)
        for rank, (data, compute, exposed) in sorted(runs[0].ranks.items())
    }


def parts_of(run):
    """Seconds of a step in the order of PARTS; without a split floor and excess, where known."""
    if run.has_split:
        return run.compute_s, run.data_s, run.exposed_s, 0, 0
    return 0, 0, 0, run.floor_s, run.step_s - run.floor_s


def series(run, value):
    """(step, mean over ranks of value(Step)) for the steps where every rank has one."""
    by_step = {}
    for (_, epoch, step), line in sorted(run.log.steps.items()):
        if value(line) is not None and math.isfinite(value(line)):
            by_step.setdefault((epoch, step), []).append(value(line))
    most = max(map(len, by_step.values()), default=0)
    return [(step, sum(v) / len(v)) for (_, step), v in by_step.items() if len(v) == most]


def elapsed(run, steps):
    """Seconds of training after each of `steps`, from the step times between the lines."""
    times = dict(series(run, lambda line: line.step_ms))
    clock, before, out = 0.0, run.start_step, []
    for step in steps:
        clock += max(step - before, 0) * times.get(step, 0) / 1000
        before = step
        out.append(clock)
    return out


def look_of(i, run, more=""):
    """Line of run i; its mark stands at the end, so that a short run is seen too."""
    return {
        "label": run.name + (more if run.complete else " (incomplete)"),
        "color": COLOURS[i % 5],
        "linestyle": LINES[i % 5],
        "linewidth": 2,
        "marker": "osD^v"[i % 5],
        "markevery": [-1],
    }


def draw_throughput(axis, result):
    longest, runs = 0.0, result["runs"]
    for i, run in enumerate(runs):
        points = series(run, lambda line: line.img_per_s)
        if points and run.processes:
            times = elapsed(run, [step for step, _ in points])
            rates = [value * run.processes for _, value in points]
            axis.plot(times, rates, **look_of(i, run))
        elif run.img_per_s and run.wall_s:
            times = [0, run.wall_s]
            axis.plot(times, [run.img_per_s] * 2, **look_of(i, run, ", mean"))
        else:
            continue
        longest = max(longest, times[-1])
    if len(runs) == 1:
        name_lines(axis, "images/s")
        if mean := runs[0].img_per_s:
            axis.axhline(mean, color="#1f5fa8", linestyle="--", label=f"mean {mean:,.1f}")
    axis.set_ylim(0, max(axis.get_ylim()[1], 1e-9) * 1.2)
    if longest > 180:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 60:g}")
        axis.xaxis.get_major_locator().set_params(steps=[1, 3, 6, 10])
    unit = "min" if longest > 180 else "s"
    axis.set(xlabel=f"time ({unit})", ylabel="images/s, whole job", title="Throughput")
    finish(axis, "no throughput in these logs")


def draw_loss(axis, result):
    runs = result["runs"]
    if len(runs) == 1:
        draw_losses_of_ranks(axis, runs[0])
    for i, run in enumerate(runs):
        if points := series(run, lambda line: line.loss):
            axis.plot(*zip(*points, strict=True), **look_of(i, run))
    if len(runs) == 1:
        name_lines(axis, "mean over ranks" if len(runs[0].log.ranks) > 1 else "loss")
        draw_epoch_losses(axis, runs[0])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="step", ylabel="cross entropy, mean over ranks", title="Loss")
    finish(axis, "no step lines in these logs")


def name_lines(axis, text):
    """Names the last line of a single run's panel for what it is: the title has the run."""
    for line in axis.get_lines()[-1:]:
        line.set_label(text)


def draw_losses_of_ranks(axis, run):
    ranks = sorted({rank for rank, _, _ in run.log.steps})
    for rank in ranks if 1 < len(ranks) <= MOST_RANKS else []:
        own = sorted((key[2], line.loss) for key, line in run.log.steps.items() if key[0] == rank)
        label = "each rank" if rank == ranks[0] else None
        axis.plot(*zip(*own, strict=True), color="#777777", linewidth=0.8, label=label)


def draw_epoch_losses(axis, run):
    """The mean of each epoch, from its first step to its last."""
    if None in (run.images, run.global_batch, run.steps):
        return
    length, label = math.ceil(run.images / run.global_batch), "mean of an epoch"
    for epoch, loss in sorted(run.losses.items()):
        first = max((epoch - 1) * length, run.start_step)
        span = [first, min(epoch * length, run.steps)]
        look = {"color": "#1f5fa8", "linestyle": "--", "linewidth": 2, "label": label}
        axis.plot(span, [loss] * 2, **look)
        label = None


def draw_efficiency(axis, result):
    rows = result["scaling"]
    sizes = sorted({row["processes"] for row in rows})
    percent = [100 * row["efficiency"] for row in rows]
    axis.plot(sizes, [100] * len(sizes), color="#777777", linestyle="--", label="ideal")
    axis.plot([row["processes"] for row in rows], percent, "o", color="#111111", label="measured")
    for row, value in zip(rows, percent, strict=True):
        place = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center"}
        axis.annotate(row["run"], (row["processes"], value), fontsize=10, **place)
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_ylim(0, 1.1 * max(100, *percent))
    axis.set(xlabel="processes", ylabel="efficiency (%)", title="Scaling")
    finish(axis, "")


def finish(axis, otherwise):
    """A legend, or a word where there is nothing to show."""
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=10, loc="best")
    else:
        axis.text(0.5, 0.5, otherwise, ha="center", transform=axis.transAxes)
