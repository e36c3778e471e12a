"""Figures out of what the script prints, and the table that they go into."""

import json
import platform
import re
import statistics
from pathlib import Path

from analysis.logs import parse_text
from benchmarks.runner import Failure
from common.workers import own_cores

# --- From an output ----------------------------------------------------------------------------


def records(text, kind):
    """All records of a kind (Run, Probe, Summary, or a child's FIGURES) in an output."""
    return [json.loads(found) for found in re.findall(rf"\b{kind} (\{{.*\}})$", text, re.M)]


def record(text, kind):
    return records(text, kind)[-1]


def step_times(text, skip, count, rank=0):
    """[(loss, ms waited for data, ms in all, steps)] of a rank's lines after step `skip`.

    The times of a line are the means of the steps since the line before.
    """
    found, before = [], 0
    for (of, _, number), line in parse_text(text).steps.items():
        if of == rank:
            if number > skip:
                found.append((line.loss, line.data_ms, line.step_ms, number - before))
            before = number
    if (steps := sum(steps for *_, steps in found)) < count:
        hint = "give more images, a smaller --batch_size or fewer --steps"
        raise Failure(f"{steps} steps after the warm-up, not {count}: {hint}")
    return found


def speed(text, args, rank=0):
    """Figures of a rank over the steps after the warm-up."""
    found = step_times(text, args.warm_steps, args.steps, rank)
    total = sum(steps * ms for _, _, ms, steps in found)
    waited = sum(steps * data for _, data, _, steps in found)
    images = args.batch_size * sum(steps for *_, steps in found)
    return {
        "img_per_s": 1e3 * images / total,
        "step_ms": statistics.median(ms for _, _, ms, _ in found),
        "waiting": 100 * waited / total,
    }


# --- The table ---------------------------------------------------------------------------------


def row(what, unit, demo, reference=None):
    """One line of the table, from the values of all rounds, in `unit`."""
    a, b = (statistics.median(v) if v else None for v in (demo, reference))
    ratio = a / b if a is not None and b else None
    every = {"demo_all": demo, "reference_all": reference}
    return {"what": what, "unit": unit, "demo": a, "reference": b, "ratio": ratio} | every


def cells(entry):
    """A row as text: what, demo, reference, ratio."""
    figures = ("-" if entry[k] is None else f"{entry[k]:.4g}" for k in ("demo", "reference"))
    ratio = "-" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
    return f"{entry['what']} ({entry['unit']})", *figures, ratio


def table(result):
    """The result as text: a line on the machine, then one line for each row."""
    lines = [("what", "demo", "reference", "ratio"), *map(cells, result["rows"])]
    wide = [max(len(line[k]) for line in lines) for k in range(4)]
    args = result["settings"]
    how = "by the model" if args["command"] == "overlap" else "one run each"
    if repeats := args.get("repeats"):
        how = f"median of {repeats}" + ", a trial" * (repeats < 5)
    shown = [f"{args['command']}, {how}: {result['machine']}"]
    for what, *figures in lines:
        pairs = zip(figures, wide[1:], strict=True)
        shown.append("  ".join([what.ljust(wide[0]), *(f.rjust(w) for f, w in pairs)]))
    return "\n".join(shown)


def result_of(args, rows):
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {"machine": machine(), "settings": settings, "rows": rows}


def write_json(args, rows):
    """Writes what --json asks for."""
    if args.json:
        text = json.dumps(result_of(args, rows), indent=1) + "\n"
        args.json.write_text(text, encoding="ascii")


def machine():
    """One line: processor, cores this process may use, GPU, versions."""
    import torch

    file = Path("/proc/cpuinfo")
    info = file.read_text() if file.exists() else ""
    name = re.search(r"^model name\s*: (.+)$", info, re.M)
    extras = [flag for flag in ("amx_bf16", "avx512_bf16") if f" {flag} " in info]
    extras += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    name = ", ".join([name[1] if name else platform.machine(), *extras])
    python = f"Python {platform.python_version()}"
    return f"{name}, {own_cores()} cores, torch {torch.__version__}, {python}"
