"""On one machine: training, the loader, the way from the launch to the first step, the loss."""

import itertools
import math
import os
import re
import statistics
import sys
from functools import partial
from pathlib import Path

from benchmarks import children, settings
from benchmarks.children import PHASES
from benchmarks.figures import record, records, row, speed, step_times
from benchmarks.runner import Failure, rounds, say

PEER_STEP = re.compile(r"Epoch: \[0\]\[ *\d+/\d+\]\s+Time +(\S+) \(")


def measure_step(bench):
    """training from JPEG files against a resident batch, and against another script"""
    # On a GPU what the loader has ready would feign a rate; see settings.fed.
    args, change = (settings.fed(bench.args), "+emptied") if children.GPU else (bench.args, "")
    folder = settings.pictures(bench, settings.needed(args))

    def train(how, precision, **more):
        given = settings.options(args, folder, precision=precision, **more)
        return speed(bench.script(how, given), args) | {"peak": bench.peak}

    kinds, cases = {"as shipped": "auto", "fp32": "fp32"}, {}
    for kind, precision in kinds.items():
        cases[kind] = partial(train, f"demo{change}", precision)
        if args.against:
            cases[f"{kind}, the other"] = partial(train, f"other{change}", precision)
        else:
            cases[f"{kind}, resident batch"] = partial(
                train, "demo+resident", precision, workers=0
            )
    if args.peer:
        cases["peer"] = peer_case(bench, folder / "train2017")
    found, rows = rounds(bench, cases), []
    for kind in kinds:
        mine = found[kind]
        for other in (f"{kind}, the other", f"{kind}, resident batch", "peer"):
            if other in found:
                pair = mine["img_per_s"], found[other]["img_per_s"]
                rows.append(row(f"{kind} / {other.rpartition(', ')[2]}", "img/s", *pair))
        rows.append(row(f"{kind}: share of a step that waits for data", "%", mine["waiting"]))
        other = found.get(f"{kind}, the other", {})
        rows.append(row(f"{kind}: peak memory", "MB", mine["peak"], other.get("peak")))
    return rows


def peer_case(bench, images):
    """pytorch/examples' imagenet script on the same pictures, timed by the meters it prints."""
    args, folder = bench.args, bench.folder / "peer"
    names = sorted(entry.name for entry in os.scandir(images))[: settings.needed(args) + 4]
    for split, part in (("train", names), ("val", names[:1])):
        (folder / split / "any").mkdir(parents=True)
        for name in part:
            os.symlink(Path(images, name).resolve(), folder / split / "any" / name)
    own = f"-a resnet18 -b {args.batch_size} -j {settings.worker_count(args)} --epochs 1 -p 1"
    command = [sys.executable, args.peer, *own.split(), folder]

    def run():
        seconds = [float(found) for found in PEER_STEP.findall(bench.run(command))]
        counted = seconds[args.warm_steps :][: args.steps]
        return {"img_per_s": args.batch_size * len(counted) / sum(counted)}

    return run


def loader_speed(bench, how, folder, steps, **more):
    """Images/s of a loader, after half as many batches of warm-up."""
    given = settings.options(bench.args, folder, max_steps=steps * 3 // 2, **more)
    return record(bench.script(how, given), "FIGURES")


def measure_input(bench):
    """the loader on one core, with a worker and without: original and prepared pictures"""
    if not hasattr(os, "sched_setaffinity"):
        raise Failure("input times one core, to which this system cannot bind a process")
    args = bench.args
    steps = 3 * args.steps  # which cost little: nothing trains
    original = settings.pictures(bench, args.batch_size * (steps * 3 // 2 + 3))
    sets, rows = {"original": original, "prepared": settings.prepared(bench, original)}, []
    hows = {"the demo": ("demo+core+loader", 1)}  # what runs, with so many workers
    if args.against:
        hows["the other"] = "other+core+loader", 1
    else:
        hows["without a worker"] = "demo+core+loader", 0
        hows["the bare decoder"] = "demo+core+decode", 0
    cases = {
        f"{which}, {kind}": partial(loader_speed, bench, how, folder, steps, workers=workers)
        for which, (how, workers) in hows.items()
        for kind, folder in sets.items()
    }
    found = {name: f["img_per_s"] for name, f in rounds(bench, cases).items()}
    for which, kind in itertools.product(list(hows)[1:], sets):
        pair = found[f"the demo, {kind}"], found[f"{which}, {kind}"]
        rows.append(row(f"loader on one core, {kind}: the demo / {which}", "img/s", *pair))
    for which in hows if not args.against else ():
        pair = found[f"{which}, prepared"], found[f"{which}, original"]
        rows.append(row(f"{which} on one core: prepared / original", "img/s", *pair))
    return rows


def measure_start(bench):
    """launch to first step of two ranks at full size: original, prepared, and a tiny set"""
    args = bench.args
    original = settings.pictures(bench, args.images)
    small = settings.prepared(bench, original)
    tiny = settings.sample(bench, max(48, 6 * args.batch_size))

    def start(folder, **more):
        given = settings.options(args, folder, max_steps=2, **settings.TWO, **more)
        ranks = records(bench.script("demo+phases", given, 2), "FIGURES")
        first, second = sorted(ranks, key=lambda rank: rank["rank"])
        whole = sum(first["phases"].values())
        return first["phases"] | {"launch to first step": whole, "peak": second["peak"]}

    sets = {"original": original, "prepared": small, "tiny": tiny}
    cases = {name: partial(start, folder) for name, folder in sets.items()}
    first = settings.first_annotations(small)
    cases["first annotations"] = partial(start, small, annotation_path=first)
    cases["COCO()"] = lambda: record(
        bench.script("demo+pycocotools", settings.options(args, original)), "FIGURES"
    )
    found, rows = rounds(bench, cases), []

    def compare(what, figure, demo, reference, unit="s"):
        rows.append(row(what, unit, found[demo][figure], found[reference][figure]))

    index, launch = "image list", "launch to first step"
    for phase in [*PHASES.values(), launch]:
        compare(f"{phase}: prepared / original", phase, "prepared", "original")
    first = "prepared, first annotations"
    compare(f"{index}: {first} / original", index, "first annotations", "original")
    for name in ("original", "prepared", "first annotations"):
        compare(f"{launch}: {name} / tiny set", launch, name, "tiny")
    compare(f"{index}: original / pycocotools' COCO(file)", index, "original", "COCO()")
    compare("peak memory of rank 1: original / tiny set", "peak", "original", "tiny", "MB")
    return rows


def measure_loss(bench):
    """the loss with each compression, and on prepared pictures, against none's, over all seeds

    A run's loss is the mean over both ranks and the last quarter of its steps: single steps
    scatter by their batch, and all runs of a seed see the same images in the same order. With
    accumulation they see as many in a quarter of the steps.
    """
    args, found, rows = bench.args, {}, []
    original = args.data or settings.sample(bench, 480)
    prepared = settings.prepared(bench, original) if "prepared" in args.methods else None
    for method, seed in itertools.product(args.methods, range(args.seeds)):
        folder = prepared if method == "prepared" else original
        more = settings.LOSS_METHODS[method]
        steps = args.steps // more.get("accumulate_steps", 1)
        more = settings.TWO | {"seed": seed, "num_epochs": 1000, "max_steps": steps} | more
        given = settings.options(args, folder, **more)
        text = bench.script("demo", given, 2, OMP_NUM_THREADS="1")
        skip = steps - math.ceil(steps / 4)
        losses = [loss for rank in (0, 1) for loss, *_ in step_times(text, skip, 1, rank)]
        found.setdefault(method, []).append(statistics.mean(losses))
        say(f"{method}, seed {seed}: loss {found[method][-1]:.4f}")
    for method in args.methods[1:]:
        pair, name = (found[method], found["none"]), f"{method} / none"
        for seed, losses in enumerate(zip(*pair, strict=True)):
            rows.append(row(f"seed {seed}: loss, {name}", "nats", *([x] for x in losses)))
        rows.append(row(f"mean loss, {name}", "nats", *([statistics.mean(x)] for x in pair)))
        if args.seeds > 1:
            spread = ([max(x) - min(x)] for x in pair)
            rows.append(row(f"largest - smallest loss, {name}", "nats", *spread))
    return rows
