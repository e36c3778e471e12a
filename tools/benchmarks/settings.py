"""What a measured run is given: pictures, options, and how many of its steps count."""

import argparse
import functools
import itertools
import math
import os
import re
import sys

from benchmarks import children
from benchmarks.runner import TOOLS, say
from common.workers import own_cores

FULL = 118_287  # images of train2017
PICTURES = 96  # that are drawn; the names of a larger set link to them
LINE_EVERY = 20  # steps from line to line on a GPU, as the script has it
TWO = {"backend": "gloo"}  # of two processes that may have one GPU
METHODS = {
    "none": {"grad_compression": "none"},
    "fp16": {"grad_compression": "fp16"},
    "bf16": {"grad_compression": "bf16"},
    "powersgd": {"grad_compression": "powersgd"},
    "accumulate": {"accumulate_steps": 4},
}
LOSS_METHODS = METHODS | {"prepared": {}}  # on other pictures


# --- Pictures ----------------------------------------------------------------------------------


def sample(bench, images, *options):
    """Folder of a generated data set; it stays, and is found again, in --data_folder."""
    base = bench.args.data_folder or bench.folder
    folder = base / "-".join(["sample", str(images), *(o.strip("-") for o in options)])
    say(f"data: {images} images in {folder}")
    tool = TOOLS / "make_sample_coco.py"
    command = [sys.executable, tool, folder, "--images", images, "--val_images", 0]
    bench.run([*command, *options])
    return folder


def pictures(bench, images):
    """COCO's folder with at least so many labelled images: --data, or a generated one."""
    if bench.args.data:
        return bench.args.data
    images += 4 + images // 32  # some have no label
    drawn = sample(bench, min(images, PICTURES)) / "train2017"
    listed = sample(bench, images, "--annotations_only") / "annotations"
    folder = bench.folder / f"coco-{images}"
    if not folder.exists():
        (folder / "train2017").mkdir(parents=True)
        os.symlink(listed, folder / "annotations")
        names = re.findall(r'"file_name": "([^"]+)"', next(listed.iterdir()).read_text())
        for name, file in zip(names, itertools.cycle(sorted(drawn.iterdir()))):
            os.symlink(file, folder / "train2017" / name)
    return folder


def prepared(bench, folder):
    """The same set made smaller by prepare_coco.py."""
    target = (bench.args.data_folder or bench.folder) / f"{folder.name}-prepared"
    say(f"data: {target}")
    bench.run([sys.executable, TOOLS / "prepare_coco.py", folder, target])
    return target


def first_annotations(data):
    """The smaller instances file of a prepared set."""
    return data / "annotations" / "first_instances_train2017.json"


# --- Options and steps -------------------------------------------------------------------------


def options(args, data, **more):
    """The script's options for a run that stops in its first epoch, after the measured steps."""
    given = {
        "coco_image_path": data / "train2017",
        "annotation_path": data / "annotations" / "instances_train2017.json",
        "weights": "none",
        "num_epochs": 1,
        "log_every": args.log_every,
        "image_size": args.image_size,
        "batch_size": args.batch_size,
        "workers": args.workers,
        "max_steps": args.warm_steps + args.steps,
    } | more
    given = {name: value for name, value in given.items() if value is not None}
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in given.items()]


def worker_count(args):
    """What --workers says, or the script does without."""
    return args.workers or (max(1, cores_of_a_run() - 1) if children.GPU else 1)


@functools.cache
def cores_of_a_run():
    """As many as the script takes itself to have: no more than a quota leaves."""
    return int(min(own_cores(), children.load_script().cores_by_quota()))


def needed(args):
    """Images that keep all workers busy until the last measured step has ended.

    Two batches for each worker lie ready then, and three may have been thrown away.
    """
    return args.batch_size * (args.warm_steps + args.steps + 5 * worker_count(args) + 1)


def counted(args, every, warm, steps, **more):
    """`args` with at least so many steps to count after at least `warm`, and `every` a line.

    A line has the means of the steps since the one before; the first is of step 1. So both
    numbers are rounded up to where a line is.
    """
    warm, steps = (every * math.ceil(number / every) for number in (warm, steps))
    counts = {"log_every": every, "warm_steps": 1 + warm, "steps": steps}
    return argparse.Namespace(**vars(args) | counts | more)


def line_every(args):
    """On a GPU, which each line makes wait, lines are rare."""
    return 1 if args.cpu else LINE_EVERY


def fed(args, **more):
    """`args` for a run that a loader feeds: its figure depends on what the loader has ready.

    Workers that began together end their batches together, so batches come in waves of as many
    as there are workers, and each has two ready where training is slower. "emptied" throws these
    away after the first steps; four waves later none of it is left. Ten waves are counted, to a
    whole one: less would count a wave that began before, or leave out one that has.
    """
    args = argparse.Namespace(**vars(args) | more)
    workers = worker_count(args)
    every = workers * math.ceil(line_every(args) / workers)
    steps = max(10 * workers, args.steps)
    return counted(args, every, max(4 * workers, args.warm_steps), steps)


def unfed(args, size):
    """`args` for a run with a resident batch of this size: as many images of each size."""
    steps = args.steps * max(1, max(args.batch_sizes) // size)
    more = {"batch_size": size, "workers": 0}
    return counted(args, line_every(args), args.warm_steps, steps, **more)
