#!/usr/bin/env python3
"""Makes a smaller copy of COCO, which loads faster.

    python tools/prepare_coco.py coco coco256

SOURCE (here coco) is COCO's folder, as much of it as is there; it is only read:

    coco/train2017/000000000009.jpg ...    coco/annotations/instances_train2017.json
    coco/val2017/...                       coco/annotations/instances_val2017.json

TARGET gets the same layout, file names and ids. Images are resized to a shorter side of 256
pixels and written as JPEG; boxes and areas are scaled with them, outlines (`segmentation`) are
left out. Smaller images are copied. So are damaged ones, which are named. Beside each instances
file comes one with the first annotation of each image alone, first_instances_train2017.json: all
that the demo needs of it, and read faster.

A run that was stopped or killed goes on when it is started again.
"""

import argparse
import gc
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

try:
    from PIL import Image
except ImportError:
    sys.exit("prepare_coco.py: error: Pillow is missing: pip install pillow")

MODES = {
    "1",
    "L",
    "LA",
    "P",
    "RGB",
    "RGBA",
    "CMYK",
}  # images of others, such as 16 bits, are copied
UNFINISHED = ".unfinished"  # in TARGET: files that are not whole yet
PROGRESS_S = 5  # seconds from one line of progress to the next


class UserError(Exception):
    """What a user can fix, in one line."""


class Job(NamedTuple):
    """What is the same for all images."""

    source: Path
    target: Path
    side: int  # pixels
    quality: int  # of JPEG


# ---- Images


def shrunk_size(size, side):
    """(width, height) with `side` pixels on the shorter side; unchanged if it has no more."""
    if min(size) <= side:
        return size
    return tuple(round(pixels * side / min(size)) for pixels in size)


def shrink(data, job):
    """An image file made smaller, or the same bytes. Raises an error of any type if damaged."""
    with Image.open(io.BytesIO(data)) as image:
        new_size = shrunk_size(image.size, job.side)
        if new_size == image.size or image.mode not in MODES:
            image.load()
            return data
        # libjpeg decodes no more than twice the new size needs: faster, and as sharp.
        image.draft(None, tuple(2 * pixels for pixels in new_size))
        image = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image = image.resize(new_size, Image.Resampling.BICUBIC, reducing_gap=2)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=job.quality, subsampling="4:2:0")
    return file.getvalue()


def make_image(job, name):
    """Writes an image to TARGET unless it is there.

    Returns its size in SOURCE and in TARGET, (width, height), and a warning. Raises OSError.
    """
    source, target = job.source / name, job.target / name
    warning = ""
    if not target.exists():
        data = source.read_bytes()
        try:
            data = shrink(data, job)
        except Exception as error:  # damaged data raises anything
            warning = f"WARNING: image {source} is damaged, and copied as it is: {error}"
        write_whole(job, name, data)
    try:
        with Image.open(source) as old, Image.open(target) as new:
            return old.size, new.size, warning
    except Exception:  # damaged: it has no size
        return None, None, warning


def write_whole(job, name, data):
    """Writes a file of TARGET, which appears there when it is complete. Raises OSError."""
    unfinished = job.target / UNFINISHED / f"{os.getpid()}-{Path(name).name}"
    unfinished.write_bytes(data)
    unfinished.replace(job.target / name)


def start_worker():
    """The process that started a worker ends it, even if that process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # Pillow's, of odd files
    threading.Thread(target=lambda: parent_process().join() or os._exit(1), daemon=True).start()


def make_images(job, names, workers):
    """Writes all images. Returns {name: (size in SOURCE, size in TARGET)}."""
    sizes = {}
    began = shown = time.monotonic()
    with ProcessPoolExecutor(workers, initializer=start_worker) as pool:
        results = pool.map(partial(make_image, job), names, chunksize=8)
        for name, (old, new, warning) in zip(names, results, strict=True):
            sizes[name] = old, new
            if warning:
                print(warning, file=sys.stderr, flush=True)
            now = time.monotonic()
            if now > shown + PROGRESS_S:
                shown = now
                left = (len(names) - len(sizes)) * (now - began) / len(sizes)
                text = f"{len(sizes)} of {len(names)} images, {left:.0f} s left"
                print(text, end="  \r" if sys.stdout.isatty() else "\n", flush=True)
    return sizes


# ---- Annotations


def without_outline(found):
    """For each JSON object as it is parsed: the outlines of COCO would fill gigabytes."""
    found.pop("segmentation", None)
    return found


def read_instances(path):
    """The content of an instances file, without outlines. Raises UserError."""
    try:
        content = json.loads(path.read_bytes(), object_hook=without_outline)
        names = [image["file_name"] for image in content["images"]]
        outside = [name for name in names if os.path.isabs(name) or ".." in name.split("/")]
        for annotation in content["annotations"]:
            annotation["image_id"], annotation.get("bbox", "1234")[3]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"{path} is no instances file of COCO: {type(error).__name__}: {error}"
        raise UserError(text) from error
    if outside:
        raise UserError(f"{path}: {outside[0]} leaves the image folder")
    return content


def scale(content, sizes, split):
    """Scales widths, heights, boxes and areas with the images, in place."""
    factors = {}
    for image in content["images"]:
        old, new = sizes[f"{split}/{image['file_name']}"]
        if old != new:
            image["width"], image["height"] = new
            factors[image["id"]] = new[0] / old[0], new[1] / old[1]
    for annotation in content["annotations"]:
        x, y = factors.get(annotation["image_id"], (1, 1))
        if "bbox" in annotation:
            box = zip(annotation["bbox"], (x, y, x, y), strict=True)
            annotation["bbox"] = [round(pixels * factor, 2) for pixels, factor in box]
        if "area" in annotation:
            annotation["area"] = round(annotation["area"] * x * y, 4)


def write_instances(job, split, content):
    """Writes the instances file of a split, and one of the first annotations alone."""
    first = {}
    for annotation in content["annotations"]:
        first.setdefault(annotation["image_id"], annotation)
    firsts = content | {"annotations": list(first.values())}
    for name, found in (("first_instances", firsts), ("instances", content)):
        data = json.dumps(found, separators=(",", ":")).encode()
        write_whole(job, f"annotations/{name}_{split}.json", data)


# ---- The run


def find_splits(source):
    """Names such as train2017, of which both instances file and images are there."""
    files = sorted((source / "annotations").glob("instances_*.json"))
    splits = [file.stem.removeprefix("instances_") for file in files]
    found = [split for split in splits if split and (source / split).is_dir()]
    if not found:
        raise UserError(f"{source} has no annotations/instances_train2017.json with train2017/")
    return found


def claim(job, splits):
    """Makes TARGET, or finds it made with the same settings. Raises UserError."""
    for folder in ("", "annotations", *splits):
        source, target = job.source / folder, job.target / folder
        if target.exists() and target.samefile(source):  # a folder may be a link
            raise UserError(f"{target} is {source}, which must stay as it is: give another TARGET")
    record = job.target / "prepare_coco.json"
    settings = {"shorter_side": job.side, "quality": job.quality}
    if record.exists():
        made_with = json.loads(record.read_text())
        if made_with != settings:
            raise UserError(f"{job.target} was made with {made_with}: give another TARGET")
    elif job.target.exists() and any(path.name != UNFINISHED for path in job.target.iterdir()):
        raise UserError(f"{job.target} is not empty, and not made by this program")
    (job.target / UNFINISHED).mkdir(parents=True, exist_ok=True)
    write_whole(job, record.name, json.dumps(settings).encode())


def prepare(job, workers):
    """Makes all of TARGET. Returns what to say. Raises UserError or OSError."""
    began = time.monotonic()
    contents = {}
    for split in find_splits(job.source):
        contents[split] = read_instances(job.source / f"annotations/instances_{split}.json")
    claim(job, contents)
    listed = [f"{s}/{image['file_name']}" for s in contents for image in contents[s]["images"]]
    names = list(dict.fromkeys(listed))  # each once
    for folder in {"annotations", *map(os.path.dirname, names)}:
        (job.target / folder).mkdir(parents=True, exist_ok=True)
    sizes = make_images(job, names, workers)
    for split, content in contents.items():
        scale(content, sizes, split)
        write_instances(job, split, content)
    shutil.rmtree(job.target / UNFINISHED)
    return f"{job.target}: {len(names)} images in {time.monotonic() - began:.0f} s"


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="COCO's folder")
    add("target", metavar="TARGET", type=Path, help="folder to make")
    text = "of the new images, pixels (%(default)s)"
    add("--shorter_side", "--shorter-side", type=int, default=256, metavar="N", help=text)
    add("--quality", type=int, default=90, metavar="N", help="of the new JPEG files (%(default)s)")
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (%(default)s)")
    parser.error = lambda text: parser.exit(2, f"prepare_coco.py: error: {text}; see --help\n")
    args = parser.parse_args(argv)
    if args.shorter_side < 32 or not 1 <= args.quality <= 100 or args.workers < 1:
        parser.error("--shorter_side is at least 32, --quality 1 to 100, --workers at least 1")
    return args


def main():
    args = parse_arguments()
    gc.disable()  # it would look through millions of objects again and again
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    code = 1
    try:
        print(
            prepare(Job(args.source, args.target, args.shorter_side, args.quality), args.workers)
        )
        return
    except UserError as failure:
        error = str(failure)
    except OSError as failure:
        error = f"{failure.filename or args.target}: {failure.strerror}; started again it goes on"
    except BrokenProcessPool:
        error = "a worker was killed: is the memory full? Started again it goes on"
    except (KeyboardInterrupt, SystemExit) as stop:
        error = "stopped; started again it goes on"
        code = getattr(stop, "code", 128 + signal.SIGINT)
    print(f"prepare_coco.py: error: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
