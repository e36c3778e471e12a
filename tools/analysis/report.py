"""The report: verdicts, then tables."""

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from analysis.network import ADAPTERS
from analysis.repeats import shown
from analysis.scaling import HEAD
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


NEVER_RUN = "How InfiniBand, RoCE, EFA and GPUDirect are read here was never tried on an adapter."
FACTS = ("port", "kind", "state", "states", "driver", "MTU", "PCIe", "numa", "counted")


def report(result, picture=None):
    """The whole report: Markdown that reads well in a terminal too. `picture`: its address."""
    runs = result["runs"]
    lines = []
    for text in result["differences"]:
        lines += [f"FORCED, not like with like: {text}", ""]
    lines += heading("Verdict")
    lines += [*result["says"], ""] if result["says"] else []
    for run in sorted(runs, key=lambda run: not run.log.failed):
        lines += verdict_lines(run, result["verdicts"][run.name])
    if any(run.network and run.network.transport in (*ADAPTERS, "plugin") for run in runs):
        lines += [NEVER_RUN, ""]
    lines += heading("Figures")
    lines += [f"![Parts of a step, and bandwidth]({picture})", ""] if picture else []
    lines += [*main_table(runs), ""]
    if result["scaling"]:
        _, text, rows = result["scaling"]
        lines += [*heading("Scaling"), text, "", *(table(HEAD, rows) if rows else []), ""]
    return "\n".join([*lines, *node_lines(runs)]).rstrip()


def heading(text):
    return [text, "-" * len(text), ""]


def verdict_lines(run, verdict):
    (first, *others), advice = verdict
    lines = [f"{run.name}: {first}", *(f"- {text}" for text in others)]
    lines += [f"- note: {note}" for note in run.notes]
    return [*lines, *(f"{i}. {text}" for i, text in enumerate(advice, 1)), ""]


# --- Tables --------------------------------------------------------------------------------------


def column(run):
    """A run's cells of the main table by their title; None or "" if the log does not say."""
    cells = {
        "processes on nodes": run.processes and f"{run.processes} on {run.nodes or '?'}",
        "step": shown(run, "step_s", ms),
    }
    parts = {"data wait": "data_s", "compute": "compute_s", "exposed communication": "exposed_s"}
    for title, name in parts.items():
        text = shown(run, name, ms)
        cells[f"- {title}"] = text and f"{text}, {part(getattr(run, name), run.step_s)}"
    return cells | {
        "- - of it the link, at least": run.link_by_step and shown(run, "link_s", ms),
        "img/s": shown(run, "img_per_s", "{:,.1f}".format),
        "steps": run.complete and run.steps and f"{run.steps:,}",
        "wall time": shown(run, "wall_s", duration),
        "probe: all-reduce alone": shown(run, "probe_s", ms),
        "- of up to 4 KB": shown(run, "latency_s", lambda s: f"{digits(s * 1000)} ms"),
        "- wire rate": shown(run, "wire_gbps", rate),
        **{f"loss, epoch {n}, ranks in the log": f"{loss:.4f}" for n, loss in run.losses.items()},
        "top-1 at the end": run.log.top1 is not None and f"{run.log.top1:.2f} %",
    }


def main_table(runs):
    """The table of all runs, without rows that no run can fill."""
    columns = [column(run) for run in runs]
    titles = dict.fromkeys(title for cells in columns for title in cells)
    rows = [[title, *(cells.get(title) or "-" for cells in columns)] for title in titles]
    return table(["", *(run.name for run in runs)], [r for r in rows if set(r[1:]) != {"-"}])


def node_lines(runs):
    """Lines on the ports that carried bytes, and on each node; empty for older logs."""
    rows = [
        (run.name, host, row)
        for run in runs
        for host, facts in run.facts.items()
        for row in facts["rows"]
        if facts["node"] or row["counted"]
    ]
    if not rows:
        return []
    places = {(host, row["device"], row["port"]) for _, host, row in rows if row["device"]}
    cells = []
    for name, host, row in rows:
        here = {port for at, device, port in places if (at, device) == (host, row["device"])}
        others = sorted(here - {row["port"]})
        marks = [*row["marks"].values(), *(f"is one device with {port}" for port in others)]
        cells.append([name, host, *(row[key] for key in FACTS), "; ".join(marks)])
    head = ["run", "node", *FACTS, "look at"]
    filled = [n for n in range(len(head)) if any(row[n] for row in cells)]
    lines = table([head[n] for n in filled], [[row[n] or "-" for n in filled] for row in cells])
    nodes = {host: facts["node"] for run in runs for host, facts in run.facts.items()}
    lines += ["", *(f"- {host}: {say_node(node)}" for host, node in nodes.items() if node), ""]
    return [*heading("Nodes"), *lines]


def say_node(node):
    gpus = Counter(node.get("gpus", [])).items()
    locked = node.get("locked")
    parts = [", ".join(f"{count} x {name}" for name, count in gpus) or "no name of a GPU known"]
    if gpus:
        module = node.get("module") or "none (DMA-BUF needs none)"
        parts.append(f"module for GPUDirect: {module}")
    parts.append(f"memory that may be locked: {megabytes(locked) if locked else 'all'}")
    return "; ".join(parts)


# --- Output --------------------------------------------------------------------------------------


def print_text(text):
    """Print it, also where the terminal lacks a log's characters."""
    with contextlib.suppress(AttributeError):  # stdout is closed, or a test's
        sys.stdout.reconfigure(errors="replace")
    print(text)


def write_report(result, file, picture=None):
    """The report in a file, which names the picture from where it lies."""
    address = None
    if picture:
        address = quote(os.path.relpath(picture, Path(file).absolute().parent))
    # What other programs have said may look like HTML, which a viewer of Markdown would hide.
    text = report(result, address).replace("<", "&lt;")
    Path(file).write_text(text + "\n", encoding="utf-8")
