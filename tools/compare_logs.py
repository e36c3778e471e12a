#!/usr/bin/env python3
"""Compares runs by their logs: what differs, what that is made of, which network carried it.

    python tools/compare_logs.py ethernet=logs/eth infiniband=logs/ib --plot compare.png
    python tools/compare_logs.py slow=a.log fast=b.log --link_gbps slow=1 --link_gbps fast=56
    python tools/compare_logs.py logs/both --plot both.png

A run is NAME=PATH: a log file, or a run's folder with node0.log, node1.log, ... Node 0's log is
enough; one that gzip has packed will do. Without NAME= it is called after its folder or file. A
folder with r1, r2, ... in it holds repeats of one run; a name that is given again adds one. Of a
folder that holds runs, such as one of series.py, all are taken. What NCCL has written beside a log
is read, too. Figures of repeats are medians, with their range. Runs are compared with the first
that has not failed. The logs are those of demo_coco_resnet18.py, of step_log.py, or of the talk's
original demo, which have losses and wall times alone. `--link_gbps 10` (or `slow=10`, for one run)
replaces the stated rate of a node's link. Runs with different numbers of processes are compared as
scaling: speed-up and efficiency.

Exit code: 0: success; 1: compared, but a run is incomplete or failed; 2: usage error, or unlike
runs.
"""

import argparse
import contextlib
import functools
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from analysis import nccl, runs
from analysis.logs import NODE_LOG, UserError, log_files, read_log
from analysis.report import report, write_report


@dataclass
class Comparison:
    """Everything the report holds."""

    runs: list  # of runs.Run
    base: runs.Run
    scaling: runs.Scaling | None


def main(argv=None):
    try:
        return run_command(parse_arguments(argv))
    except UserError as error:
        print(f"compare_logs.py: error: {error}", file=sys.stderr)
        return 2


def run_command(args):
    outputs = outputs_of(args)
    if not args.runs:
        raise UserError("give at least one run: NAME=PATH, or PATH")
    paths = named_paths(runs_in(args.runs))
    stated = stated_rates(args.link_gbps, paths)
    every = {name: [] for name in paths}
    for name, each in every.items():
        for own, path in runs.find_repeats(name, paths[name]).items():
            each.append(runs.make_run(own, read_files(path), stated.get(name)))
    comparison = compare([runs.gather(name, each) for name, each in every.items()])
    with contextlib.suppress(AttributeError):  # stdout is closed, or a test's
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a log's characters
    print(report(comparison))
    for file, write in outputs:
        try:
            write(comparison, file)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be written: {error}") from None
    return 0 if all(run.complete for each in every.values() for run in each) else 1


def read_files(path):
    """The Log of a run, with what NCCL's text in and beside its files says."""
    log, reader = read_log(path), nccl.Reader()
    for file in log_files(Path(path)):
        for line in nccl.of_last_run(file):
            reader.read(line)
        reader.read_files(nccl.beside(file))
    if reader.has_text:
        log.nccl = reader.finding().to_dict()
    return log


def compare(each):
    """Raises UserError if the runs are not alike."""
    scaled = runs.is_scaling(each)
    scaling = runs.scale(each) if scaled else None
    base = scaling.base if scaling else next((run for run in each if run.complete), each[0])
    unlike = [t for run in each if run is not base for t in runs.unlike(base, run, scaled)]
    unlike += runs.unlike_scaling(each) if scaled else []
    for run in each:
        for other in run.repeats[1:]:
            unlike += runs.unlike(run.repeats[0], other)
    if unlike:
        raise UserError("; ".join(unlike))
    return Comparison(each, base, scaling)


def outputs_of(args):
    """[(file, what writes it)]; refused before anything is done, so that none is half."""
    outputs = []
    if args.plot:
        os.environ["MPLBACKEND"] = "Agg"  # matplotlib may lack that of a notebook
        try:
            from analysis.plot import draw
        except ImportError as error:
            text = f"--plot needs matplotlib: pip install matplotlib ({error})"
            raise UserError(text) from None
        outputs.append((args.plot, draw))
    if args.report:
        outputs.append((args.report, functools.partial(write_report, picture=args.plot)))
    for file, _ in outputs:
        if not Path(file).absolute().parent.is_dir():
            raise UserError(f"{file}: no such folder")
    return outputs


def parse_arguments(argv):
    first, _, rest = __doc__.partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare_logs.py", None, first, rest, formatter_class=form)
    add = parser.add_argument
    add("runs", nargs="*", metavar="[NAME=]PATH", help="log or folder of a run")
    add("--plot", metavar="FILE", help="write a picture (PNG, or by the suffix)")
    text = "write the report as Markdown, with the picture of --plot"
    add("--report", metavar="FILE", help=text)
    text = "rate of a node's link, Gb/s; replaces what the log says that it states"
    rate = {"default": [], "action": "append", "metavar": "[NAME=]N"}
    add("--link_gbps", "--link-gbps", **rate, help=text)
    return parser.parse_intermixed_args(argv)


def named_paths(items):
    """NAME=PATH or PATH texts -> {name: [path, ...]} in the order given."""
    paths = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not equals or os.path.exists(item):  # a path may have a = in it
            name, path = own_name(item), item
            if name in paths:
                raise UserError(f"{item}: a run is named {name} already: write NAME=PATH")
        elif not (name and path):
            raise UserError(f"{item}: write NAME=PATH, for example ethernet=logs/eth")
        paths.setdefault(name, []).append(path)
    return paths


def runs_in(items):
    """The items, with the runs that it holds in place of a folder that is none itself."""
    found = []
    for item in items:
        folder = Path(item)
        inside = [] if is_run(folder) else [path for path in folder.glob("*/") if is_run(path)]
        inside.sort(key=lambda path: (len(path.name), path.name))  # p2 before p16
        found += map(str, inside or [item])
    return found


def is_run(folder):
    return any(folder.glob("node*.log*")) or any(folder.glob("r*/node*.log*"))


def own_name(path):
    """What a run without a name is called: its folder, or its file."""
    path = Path(path).resolve()
    folder = path.parent if re.fullmatch(NODE_LOG, path.name) else path
    return folder.name or "run" if folder.is_dir() else path.name.partition(".")[0]


def stated_rates(items, names):
    """{run: Gb/s} from [NAME=]N texts; a run's own after that of all runs."""
    stated = {}
    for item in sorted(items, key=lambda text: "=" in text):
        name, equals, text = item.rpartition("=")
        if equals and name not in names:
            raise UserError(f"--link_gbps {item}: no run is named {name}: {', '.join(names)}")
        if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
            raise UserError(f"--link_gbps {item}: not a number above 0")
        stated |= dict.fromkeys([name] if equals else names, float(text))
    return stated


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough is no error
    sys.exit(main())
