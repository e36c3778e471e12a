#!/usr/bin/env python3
"""For anyone who works on the demo: its speed against its own ceilings, and against other ways.

    python tools/benchmark.py step --repeats 9
    python tools/benchmark.py COMMAND --help

Each command prints one table: what (unit), demo, reference, ratio = demo / reference. Figures are
medians over `--repeats` rounds; a round runs every case once, side by side, and every second round
in reverse order, so that a machine that warms up or is shared favours none. What `gpu` measures is
run once. docs/speed.md says what each command is for.

The demo is the real script in processes of its own, and its figures come from its log: a step's
time and its wait for data from the step lines after the warm-up, within one epoch. There is one
for each step, but on a GPU, which each of them makes wait. img/s are images over the sum of these
times, of all processes. Where a case needs more than the log, main() of the script runs with
changes (benchmarks/children.py). Nothing probes, but in `links` and `predictions`. Pictures are
generated (make_sample_coco.py) unless --data names COCO's folder; names of larger sets are links
to some of them. Prepared is what prepare_coco.py makes. All are in the page cache. Peak memory is
the kernel's figure (ru_maxrss) of the largest process.

Needs Linux and what the demo needs. Exit codes: 0 done; 2 wrong arguments, or a run that failed,
in one line; 128 + signal when stopped. Whatever it started ends with it.
"""

import argparse
import shutil
import sys
import tempfile
from argparse import ArgumentTypeError
from pathlib import Path

from benchmarks import children, links, one_machine, settings
from benchmarks.figures import result_of, table, write_json
from benchmarks.gpu import PARTS, measure_gpu
from benchmarks.runner import Bench, Failure, say
from common.workers import exit_on_stop_signals

MEASURE = {
    "step": one_machine.measure_step,
    "input": one_machine.measure_input,
    "start": one_machine.measure_start,
    "links": links.measure_links,
    "predictions": links.measure_predictions,
    "loss": one_machine.measure_loss,
    "gpu": measure_gpu,
    "overlap": links.measure_overlap,
}
METHODS = {"links": settings.METHODS, "loss": settings.LOSS_METHODS}
SMALL = {"batch_size": 16, "image_size": 64}  # what two processes of one thread do quickly
DEFAULTS = {  # where a command has others than the rest
    "input": {"repeats": 15},  # a run is over in a second or two: lest that second's luck decides
    "links": SMALL | {"warm_steps": 6},  # PowerSGD has to have started by then
    "predictions": SMALL | {"steps": 20},
    "loss": SMALL | {"steps": 200},
    "gpu": {"steps": 40, "warm_steps": 10, "batch_size": 256, "limit": 240},
}


# --- Arguments: what a text must be ------------------------------------------------------------


def at_least(least):
    def whole_number(text):
        if int(text) < least:
            raise ArgumentTypeError(f"{text} is not at least {least}")
        return int(text)

    return whole_number


def words(text):
    return text.split(",")


def numbers(text):
    return [int(part) for part in text.split(",")]


def rates(text):
    found = text.split(",")
    for rate in found:
        if not links.gbps(rate) and rate != "unshaped":
            raise ArgumentTypeError(f"{rate}: write unshaped, 100mbit or 1gbit")
    return found


def path(text):
    return Path(text).resolve()


def script(text):
    if not path(text).is_file():
        raise ArgumentTypeError(f"{text} is not there: give the path of a script")
    return path(text)


# --- Arguments: what there are -----------------------------------------------------------------


def add_options(add, name):
    def count(option, default, text, least=1):
        add(f"--{option}", type=at_least(least), default=default, metavar="N", help=text)

    add("--json", type=path, metavar="FILE", help="write the table as JSON, too")
    if name == "overlap":
        return
    count("steps", 12, "measured steps of a run")
    count("warm_steps", 3, "steps before them", least=0)
    count("batch_size", 256 if children.GPU else 32, "images per process")
    count("image_size", 224, "pixels a side")
    count("workers", None, "loader workers; unset: the script's own", least=0)
    count("limit", 1800, "seconds of a run, or of a part of gpu")
    add("--data", type=path, metavar="DIR", help="COCO's folder; unset: generated pictures")
    add("--data_folder", type=path, metavar="DIR", help="keeps generated sets for the next time")
    text = "the script to measure"
    add("--script", type=script, metavar="FILE", default=children.SCRIPT, help=text)
    if name not in ("loss", "gpu"):
        count("repeats", 5, "rounds; fewer than 5 are a trial")
    if name in ("start", "gpu"):
        count("images", settings.FULL, "of the full-size set")
    if name in ("step", "input"):
        add("--against", type=script, metavar="FILE", help="another version of it, in turns")
    if name == "step":
        add("--peer", type=script, metavar="FILE", help="imagenet/main.py of pytorch/examples")
    if name in ("links", "loss"):
        known = [*METHODS[name]]
        add("--methods", type=words, default=known, metavar="M,M", help="none is first")
    if name == "links":
        given = ["unshaped", "1gbit", "100mbit"]
        add("--rates", type=rates, default=given, metavar="R,R", help="as tc writes them")
    if name == "predictions":
        given, text = ["unshaped", "1gbit"], "two or more, as tc writes them"
        add("--rates", type=rates, default=given, metavar="R,R", help=text)
        add("--old_cpu", action="store_true", help="as on a CPU without bf16")
    if name == "loss":
        count("seeds", 3, "runs of each kind")
    if name == "gpu":
        add("--part", choices=PARTS, help="one of them; unset: all, one after another")
        sizes = [256, 64, 512, 128]
        add("--batch_sizes", type=numbers, default=sizes, metavar="N,N", help="to try")
        add("--cpu", action="store_true", help="on the CPU: tries the parts, measures no GPU")


def parse_arguments(argv):
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.error = lambda text: parser.exit(2, f"benchmark.py: error: {text}; see --help\n")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, measure in MEASURE.items():
        text = measure.__doc__.split("\n")[0]
        sub = commands.add_parser(name, help=text, description=text, formatter_class=formatter)
        sub.error = parser.error
        add_options(sub.add_argument, name)
        sub.set_defaults(log_every=1, cpu=False, **DEFAULTS.get(name, {}))
    args = parser.parse_args(argv)
    check(args, parser.error)
    return args


def check(args, error):
    """Ends with one line where arguments do not fit together."""
    if args.command == "step" and args.peer and args.image_size != 224:
        error("--peer crops to 224 pixels: leave --image_size at 224")
    if args.command == "predictions" and len({*args.rates}) < 2:
        error(f"--rates {','.join(args.rates)}: give two or more, to tell one from another")
    known = [*METHODS.get(args.command, ())]
    if known and (args.methods[0] != "none" or not {*args.methods} <= {*known}):
        given, others = ",".join(args.methods), ", ".join(known)
        error(f"--methods {given}: give none, then others of {others}")


# --- The run -----------------------------------------------------------------------------------


def main(argv=None):
    args = parse_arguments(argv)
    exit_on_stop_signals()
    folder = tempfile.mkdtemp(prefix="demo-benchmark-")
    try:
        write_json(args, [])  # so that a place where none can be written is known now
        bench = Bench(args, folder)
        rows = MEASURE[args.command](bench)
        print(table(result_of(args, rows)))
        write_json(args, rows)
        if bench.failed:
            raise Failure("; ".join(bench.failed)[:300])
    except (Failure, OSError) as error:
        say(f"benchmark.py: error: {error}")
        sys.exit(2)
    except SystemExit:
        say("benchmark.py: error: stopped on a signal; nothing is left running")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
