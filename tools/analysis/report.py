"""The report: tables with sentences, and its figures as JSON."""

import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from analysis.logs import get
from analysis.network import ADAPTERS
from analysis.repeats import FIGURES, shown, values
from analysis.scaling import PARTS
from analysis.verdict import own_bytes
from analysis.words import digits, duration, megabytes, ms, part, rate


def table(head, rows):
    """Lines of a Markdown table whose columns also line up in a terminal."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in [head, *rows]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("| " + " | ".join([first.ljust(widths[0]), *right]) + " |")
    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def count_of(run):
    """4; or 3 of 4, where one has failed."""
    whole = len(run.repeats)
    return str(whole) if whole == run.tried else f"{whole} of {run.tried}"


def column(run, result):
    """A run's cells of the main table by their title; None, 0 or "" if the log does not say."""
    gbps, virtual = run.wire_gbps, run.network and run.network.virtual
    of = f", {gbps / run.link_gbps:.0%} of {run.rate_is}" if gbps and run.link_gbps else ""
    wire = shown(run, "wire_gbps", rate)
    transport = run.network and run.network.transport
    only = " (probe only)" if run.probe_s and own_bytes(run)[0] else ""
    per_process = run.img_per_s and run.processes and run.img_per_s / run.processes
    cells = {
        "status": run.status,
        "runs": run.repeats and count_of(run),
        "processes on nodes": run.processes and f"{run.processes} on {run.nodes or '?'}",
        "step": shown(run, "step_s", ms),
    }
    parts = {"data wait": "data_s", "compute": "compute_s", run.exposed_name: "exposed_s"}
    for title, name in parts.items():
        text = shown(run, name, ms)
        cells[f"- {title}"] = text and f"{text}, {part(getattr(run, name), run.step_s)}"
    cells["- - of it the link, at least"] = run.link_by_step and shown(run, "link_s", ms)
    if result["scaling"]:
        cells |= scaling_cells(run, result["scaling"])
    wall = shown(run, "wall_s", duration)
    cells |= {
        "img/s, job": shown(run, "img_per_s", "{:,.1f}".format),
        "img/s, process": per_process and f"{per_process:,.1f}",
        "steps": run.steps and f"{run.steps:,}",
        "wall time": wall and wall + (" (part)" if run.partial else ""),
        "- start, validation, saving, end": shown(run, "rest_s", duration),
    }
    top1, baseline = run.log.top1, run.log.baseline
    return cells | {
        "all-reduce alone": run.probe_s and run.about + shown(run, "probe_s", ms) + only,
        "- of up to 4 KB": shown(run, "latency_s", lambda s: f"{digits(s * 1000)} ms"),
        "bytes per step and rank": run.wire_bytes and megabytes(run.wire_bytes),
        "link's rate": f"{rate(run.link_gbps)}, {run.rate_is}{only}" if run.link_gbps else virtual,
        "wire rate": wire and wire + of + only,
        "transport": transport and f"{transport} ({run.network.basis[3:]}){only}",
        "interface": run.network and run.network.shown and run.network.shown + only,
        **{f"loss, epoch {epoch}": f"{loss:.4f}" for epoch, loss in run.losses.items()},
        "top-1 at the end": top1 is not None and f"{top1:.2f} %",
        "- baseline": baseline is not None and f"{baseline:.2f} %",
    }


def scaling_cells(run, scaling):
    """A run's cells beside the base. What is lost is below 0 where it is less than ideal."""
    titles = ["ideal step", *(f"- lost: {part}" for part in PARTS), "speed-up", "efficiency"]
    scaled = scaling.runs.get(run.name)
    if not scaled or run.name == scaling.base:
        return dict.fromkeys(titles) | {"speed-up": scaled and "base"}
    lost = [scaled.lost_s.get(part) for part in PARTS]
    texts = [ms(scaled.ideal_s), *(None if seconds is None else ms(seconds) for seconds in lost)]
    over = f"{scaled.shown_speed_up} over {scaling.base}"
    return dict(zip(titles, [*texts, over, f"{scaled.efficiency:.0%}"], strict=True))


def main_table(result):
    """The table of all runs, without rows that no run can fill and without most epochs."""
    runs = result["runs"]
    columns = [column(run, result) for run in runs]
    epochs = sorted({epoch for run in runs for epoch in run.losses})
    hidden = {f"loss, epoch {epoch}" for epoch in epochs[1:-3] if len(epochs) > 6}
    titles = dict.fromkeys(title for cells in columns for title in cells if title not in hidden)
    rows = [[title, *(cells.get(title) or "-" for cells in columns)] for title in titles]
    return table(["", *(run.name for run in runs)], [r for r in rows if set(r[1:]) != {"-"}])


NEVER_RUN = "This tool never met an adapter: what it says of InfiniBand, RoCE, EFA and GPUDirect "
NEVER_RUN += "rests on what the kernel and NCCL state."
PART = "(part): a part of the run only (restarted or resumed); compare the step times."


def report(result, picture=None):
    """The whole report: Markdown that reads well in a terminal too. `picture`: its address."""
    runs, verdicts, scaled = result["runs"], result["verdicts"], result["scaling"]
    lines = []
    for text in result["differences"]:
        lines += [f"FORCED, not like with like: {text}", ""]
    lines += [*main_table(result), ""]
    if any(run.partial for run in runs):
        lines += [PART, ""]
    lines += [f"![Parts of a step, and bandwidth]({picture})", ""] if picture else []
    if scaled:
        lines += [*heading("Scaling"), " ".join(scaled.says), ""]
        for name, one in scaled.runs.items():
            lines += [f"{name}: {one.says}", ""] if one.says else []
    lines += heading("Verdict")
    lines += [*result["says"], ""] if result["says"] else []
    of_nodes, marked = node_lines(runs)
    for run in sorted(runs, key=lambda run: not run.log.failed):
        lines += verdict_lines(run, verdicts[run.name], marked)
    lines += [line for text in result["same_wire"] for line in (text, "")]
    if any(run.network and run.network.transport in (*ADAPTERS, "plugin") for run in runs):
        lines += [NEVER_RUN, ""]
    lines += of_nodes
    return "\n".join(lines).rstrip()


def heading(text):
    return [text, "-" * len(text), ""]


def verdict_lines(run, verdict, marked):
    first, *others = verdict.says
    lines = [f"{run.name}: {first}", *(f"- {text}" for text in others)]
    marks = [f"{port} of {host}: {mark}" for name, host, port, mark in marked if name == run.name]
    if marks:
        more = f"; {len(marks) - MOST_MARKS} more" if len(marks) > MOST_MARKS else ""
        lines.append(f"- marked under Nodes: {'; '.join(marks[:MOST_MARKS])}{more}")
    lines += [f"- note: {note}" for note in run.notes]
    return [*lines, *(f"{i}. {text}" for i, text in enumerate(verdict.advice, 1)), ""]


MOST_MARKS = 4
FACTS = ("port", "kind", "state", "states", "driver", "MTU", "PCIe", "numa", "counted")


def node_lines(runs):
    """(lines on the ports that carried bytes and on each node, what is marked: run, host, port,
    mark); empty for older logs.
    """
    rows = [
        (run.name, host, row)
        for run in runs
        for host, facts in run.facts.items()
        for row in facts["rows"]
        if facts["node"] or row["counted"]
    ]
    if not rows:
        return [], []
    shared = {}  # a PCI device of a node -> its ports
    for _, host, row in rows:
        if row["device"]:
            shared.setdefault((host, row["device"]), {})[row["port"]] = row["kind"]
    cells, marked = [], []
    for name, host, row in rows:
        others = [port for port in shared.get((host, row["device"]), ()) if port != row["port"]]
        marks = row["marks"] + [f"one device with {port}" for port in others]
        marked += [(name, host, row["port"], mark) for mark in marks]
        cells.append([name, host, *(row[key] for key in FACTS), "; ".join(marks)])
    head = ["run", "node", *FACTS, "look at"]
    filled = [n for n in range(len(head)) if any(row[n] for row in cells)]
    lines = table([head[n] for n in filled], [[row[n] or "-" for n in filled] for row in cells])
    nodes = {host: facts["node"] for run in runs for host, facts in run.facts.items()}
    lines += ["", *(f"- {host}: {say_node(node)}" for host, node in nodes.items() if node), ""]
    return [*heading("Nodes"), *lines], marked


def say_node(node):
    gpus = Counter(map(str, get(node, "gpus", list))).items()
    locked = get(node, "locked", int)
    parts = [", ".join(f"{count} x {name}" for name, count in gpus) or "no NVIDIA GPU seen"]
    if gpus:
        parts.append(
            f"module for GPUDirect: {get(node, 'module', str) or 'none (DMA-BUF needs none)'}"
        )
    parts.append(f"memory that may be locked: {megabytes(locked) if locked else 'all'}")
    return "; ".join(parts)


# --- Output --------------------------------------------------------------------------------------


def print_text(text):
    """Print it, also where the terminal lacks a log's characters."""
    with contextlib.suppress(AttributeError):  # stdout is closed, or a test's
        sys.stdout.reconfigure(errors="replace")
    print(text)


def as_json(result):
    """The report's figures as plain objects: seconds, bytes, Gb/s, images/s."""
    runs = []
    for run in result["runs"]:
        figures = {key: value for key, value in vars(run).items() if key not in ("log", "repeats")}
        figures["of_repeats"] = {figure: values(run, figure) for figure in FIGURES if run.repeats}
        figures |= {name: getattr(run, name) for name in ("complete", "status", "wire_gbps")}
        figures |= {"interface": run.network and run.network.shown, "attempts": run.log.attempts}
        figures |= {"top1": run.log.top1, "baseline": run.log.baseline}
        runs.append(figures | {"verdict": result["verdicts"][run.name]})
    keys = ("differences", "says", "scaling", "same_wire")
    every = {"base": result["base"].name, "runs": runs} | {key: result[key] for key in keys}
    # JSON has no word for nan and infinity: null.
    return json.loads(json.dumps(every, default=vars), parse_constant=lambda name: None)


def write_json(result, file):
    Path(file).write_text(json.dumps(as_json(result), indent=1) + "\n")


def write_report(result, file, picture=None):
    """The report in a file, which names the picture from where it lies."""
    address = None
    if picture:
        address = quote(os.path.relpath(picture, Path(file).absolute().parent))
    # What other programs have said may look like HTML, which a viewer of Markdown would hide.
    text = report(result, address).replace("<", "&lt;")
    Path(file).write_text(text + "\n", encoding="utf-8")
