#!/usr/bin/env python3
"""For anyone who trains on COCO more than once: a smaller copy, which loads three times as fast.

    python tools/prepare_coco.py coco coco256
    python tools/prepare_coco.py coco coco320 --shorter_side 320 --quality 92 --workers 8

SOURCE (here coco) is COCO's folder, as much of it as there is:

    coco/train2017/000000000009.jpg ...      coco/annotations/instances_train2017.json
    coco/val2017/...                         coco/annotations/instances_val2017.json

TARGET gets the same layout, with the same file names, ids and order. Pictures are shrunk to a
shorter side of 256 pixels and written as JPEG; their width and height, and the boxes and areas of
their annotations, are scaled with them. Outlines are left out (`"segmentation": []`): they are
most of an instances file. All other keys stay as they are. The demo, pycocotools and whatever else
reads boxes and labels work on TARGET with unchanged options. Beside each instances file comes one
with the first annotation of each picture alone, `annotations/first_instances_train2017.json`: all
that the demo needs of it, and read several times as fast. Other annotations (captions, keypoints)
and pictures that no instances file lists are not taken over.

Every picture looks as before, but for its size: what is grey stays grey, colours become RGB as the
demo reads them, and an orientation that a camera noted is not applied but kept as a note. A
picture that is small enough is copied as it is; so is one that is damaged, which is named, and
which the demo will then name and leave out as it does with SOURCE.

It can be stopped or killed at any moment: started again with the same arguments it goes on, and
ends with the same files, byte for byte (with the same version of Pillow). Needs Linux or macOS and
Pillow. Exit codes: 0 done; 1 error; 2 bad arguments; 128 + signal when stopped.
"""

import argparse
import errno
import fcntl
import gc
import hashlib
import io
import json
import math
import os
import shutil
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from analysis.units import duration, in_unit, megabytes
from common.workers import WorkerEnded, exit_on_stop_signals, own_cores, results_of

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    sys.exit(f"prepare_coco.py: error: {error}; install it: pip install pillow")

FORMAT = 2  # raise this when the same input and settings give other files than before
RECORD = "prepare_coco.json"  # in TARGET: how it is made
UNFINISHED = ".unfinished"  # in TARGET while a run goes on: files that are not whole yet
SAMPLE = 32  # pictures that are shrunk to estimate the space needed
PROGRESS_S = 5  # seconds from one line on the progress to the next

# Twice as many pixels count as damaged, here as in the demo.
Image.MAX_IMAGE_PIXELS = 2**25
# Of these Pillow and the demo's decoder make the same RGB. Others (16 bits) are copied.
MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK"}
ORIENTATION = 0x0112  # EXIF's tag
# Tried on 98 pictures of COCO, which are 4:4:4: written so at the same quality, files are a
# quarter larger and load a sixth slower. Lanczos comes at most 0.2 dB closer to crops of the
# original than bicubic does, and takes longer.
JPEG = {"format": "JPEG", "subsampling": "4:2:0"}


class Failure(Exception):
    """An error that the user can mend; its text is the one line that is shown."""


class Split(NamedTuple):
    """A folder of pictures and its instances file."""

    name: str  # "train2017"
    file: str  # "instances_train2017.json"
    bytes: int  # of the instances file
    digest: str  # SHA-256 of the instances file
    dataset: dict  # its content, without outlines


class Job(NamedTuple):
    """What each worker knows."""

    source: Path
    target: Path
    side: int  # pixels
    quality: int


class Result(NamedTuple):
    """What became of one picture. Sizes are (width, height), pixels."""

    name: str  # "train2017/000000000009.jpg"
    kind: str  # shrunk, copied, damaged or missing
    size: tuple | None = None  # of the original; None where that cannot be opened
    new_size: tuple | None = None
    before: int = 0  # bytes
    after: int = 0
    made: bool = True  # by this run, not by one before it
    reason: str = ""  # why it counts as damaged


# --- Pictures ----------------------------------------------------------------------------------


def shrunk_size(size, side):
    """(width, height) with `side` pixels on the shorter side; the same where it has no more."""
    if min(size) <= side:
        return size
    return tuple(max(1, round(pixels * side / min(size))) for pixels in size)


def shrink(data, side, quality):
    """(file to write, size, new size) of a picture file; the same bytes where it is only copied.

    Raises whatever a decoder raises on damaged data.
    """
    with Image.open(io.BytesIO(data)) as image:
        size, new_size = image.size, shrunk_size(image.size, side)
        deep = data.startswith(b"\x89PNG") and data[24:25] == b"\x10"  # 16 bits: not for the demo
        animated = image.format != "MPO" and getattr(image, "n_frames", 1) > 1  # nor is that
        if new_size == size or image.mode not in MODES or deep or animated:
            image.load()
            return data, size, size
        options = JPEG | {"quality": quality}
        with suppress(Exception):  # damaged EXIF data are no reason to lose a picture
            if (turned := image.getexif().get(ORIENTATION, 1)) != 1:
                options["exif"] = Image.Exif()
                options["exif"][ORIENTATION] = turned
        # libjpeg leaves out what is not needed for twice the new size: fast, and as sharp.
        image.draft(None, tuple(2 * pixels for pixels in new_size))
        picture = image if image.mode in ("L", "RGB") else image.convert("RGB")
        picture = picture.resize(new_size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    file = io.BytesIO()
    picture.save(file, **options)
    return file.getvalue(), size, new_size


def finished(job, name):
    """The Result of a picture that an earlier run has shrunk, or None.

    Copies are not looked for: there are few, and whether they are damaged is found out anew.
    """
    source, target = job.source / name, job.target / name
    with suppress(Exception), Image.open(source) as old, Image.open(target) as new:
        if old.size != new.size == shrunk_size(old.size, job.side):
            sizes = source.stat().st_size, target.stat().st_size
            return Result(name, "shrunk", old.size, new.size, *sizes, made=False)
    return None


def make_picture(job, name):
    """Writes one picture to TARGET. Raises OSError where it cannot."""
    if found := finished(job, name):
        return found
    size = new_size = None
    kind, reason, data = "shrunk", "", b""
    try:
        data = file = (job.source / name).read_bytes()
        file, size, new_size = shrink(data, job.side, job.quality)
        kind = "copied" if file is data else "shrunk"
    except FileNotFoundError:
        return Result(name, "missing")
    except Exception as error:  # damaged data raises anything
        # Of a file that cannot be read at all an empty one stands for it: the demo names both.
        kind, reason, file = "damaged", explain(error), data
    write_whole(job, name, file)
    return Result(name, kind, size, new_size, len(data), len(file), reason=reason)


def make_pictures(job, names):
    """In a worker process: writes them one after the other, and yields the Result of each."""
    for name in names:
        yield make_picture(job, name)


def explain(error):
    """Why a picture counts as damaged, in the same words each time: Pillow names objects."""
    if isinstance(error, UnidentifiedImageError):
        return "no picture in a format that Pillow knows"
    return str(error) or type(error).__name__


def write_whole(job, name, data):
    """Writes a file of TARGET that appears only when it is complete. Raises OSError."""
    unfinished = job.target / UNFINISHED / str(os.getpid())
    unfinished.write_bytes(data)
    os.replace(unfinished, job.target / name)


# --- Annotations -------------------------------------------------------------------------------


# What content of another form can raise.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def without_outline(found):
    """For each JSON object as it is parsed: a whole file's outlines would fill gigabytes."""
    if "segmentation" in found:
        found["segmentation"] = []
    return found


def read_split(source, path):
    """The Split of an instances file. Raises Failure where it is not one."""
    name = path.stem.removeprefix("instances_")
    try:
        data = path.read_bytes()
        size, digest = len(data), hashlib.sha256(data).hexdigest()
        text = data.decode("utf-8-sig")
        del data
        dataset = json.loads(text, object_hook=without_outline)
        check_dataset(dataset)
    except MALFORMED as error:
        cause = f"no {error}" if isinstance(error, KeyError) else error
        raise Failure(f"{path} is no usable COCO instances file: {cause}") from None
    return Split(name, path.name, size, digest, dataset)


def check_dataset(dataset):
    """Raises one of MALFORMED where something is not as this program needs it."""
    for image in dataset["images"]:
        name = image["file_name"]
        hash(image["id"])
        round(image.get("width", 0)), round(image.get("height", 0))
        leaves = os.path.isabs(name) or ".." in name.split("/") or not os.path.basename(name)
        if leaves or "\0" in os.fsdecode(os.fsencode(name)):
            raise ValueError(f"file name {name!r:.60} leaves the image folder")
    for annotation in dataset["annotations"]:
        hash(annotation["image_id"])
        math.fsum([*annotation.get("bbox", ()), annotation.get("area", 0)])
        if len(annotation.get("bbox", "1234")) != 4:
            raise ValueError(f"a box without four numbers: {annotation['bbox']!r:.60}")


def picture_names(split):
    """Of the split's pictures with its folder, each once, in the order of the file."""
    return [f"{split.name}/{n}" for n in {i["file_name"]: 0 for i in split.dataset["images"]}]


def scale(split, results):
    """Scales what the dataset says of pictures that were shrunk, in place."""
    factors = {}
    for image in split.dataset["images"]:
        result = results[f"{split.name}/{image['file_name']}"]
        if result.kind != "shrunk":
            continue
        x, y = (new / old for new, old in zip(result.new_size, result.size, strict=True))
        factors[image["id"]] = x, y
        for key, factor in (("width", x), ("height", y)):
            if key in image:
                image[key] = round(image[key] * factor)
    for annotation in split.dataset["annotations"]:
        x, y = factors.get(annotation["image_id"], (1, 1))
        if x == y == 1:
            continue
        if "bbox" in annotation:  # two digits, as COCO has them
            box = zip(annotation["bbox"], (x, y, x, y), strict=True)
            annotation["bbox"] = [round(pixels * factor, 2) for pixels, factor in box]
        if "area" in annotation:
            annotation["area"] = round(annotation["area"] * x * y, 4)


# --- Checks ------------------------------------------------------------------------------------


def find_files(source):
    """The instances files whose pictures are there. Raises Failure where there are none."""
    if not source.is_dir():
        raise Failure(f"{source} is no folder")
    files = sorted((source / "annotations").glob("instances_*.json"))
    files = [file for file in files if file.stem.removeprefix("instances_").strip(".")]
    if not files:
        raise Failure(f"{source} has no annotations/instances_*.json: is it COCO's folder?")
    found = [f for f in files if (source / f.stem.removeprefix("instances_")).is_dir()]
    for file in sorted({*files} - {*found}):
        say(f"{file} is left out: its pictures are not in {source}")
    if not found:
        raise Failure(f"{source} has none of the folders of pictures, such as train2017")
    return found


def check_places(source, target, files):
    """Raises Failure if anything would be written to where the originals are."""
    folders = ["", "annotations", *(f.stem.removeprefix("instances_") for f in files)]
    for folder in folders:
        real = (target / folder).resolve()  # NOTE: a folder in TARGET may be a link into SOURCE
        above = [place for place in (real, *real.parents) if place.exists()]
        for own in folders:
            if any(os.path.samefile(source / own, place) for place in above):
                raise Failure(f"{target / folder} is in {source / own}: give another TARGET")


def check_space(job, splits, names):
    """Raises Failure unless TARGET's disk has room for what is still to be made."""
    sizes = []
    for name in names[:: 1 + len(names) // SAMPLE]:
        with suppress(OSError):  # missing, or not readable
            data = (job.source / name).read_bytes()
            with suppress(Exception):  # damaged: as large as it is
                data, _, _ = shrink(data, job.side, job.quality)
            sizes.append(len(data))
    if not sizes:
        raise Failure(f"{job.source} lacks the pictures that its instances files list")
    there = sum(len(files) for s in splits for *_, files in os.walk(job.target / s.name))
    blocks = sum(4096 * math.ceil(size / 4096) for size in sizes) / len(sizes)
    need = blocks * max(0, len(names) - there) + sum(split.bytes for split in splits)
    free = shutil.disk_usage(job.target).free
    if free < need:
        room = f"about {megabytes(need)} needed, {megabytes(free)} free"
        raise Failure(f"no room in {job.target}: {room}; make room, or give another TARGET")


@contextmanager
def claimed(job, splits):
    """Holds TARGET for this process, with a record of the settings. Raises Failure.

    Half-written files are in a folder of their own, which is emptied here and goes at the end.
    """
    path, unfinished = job.target / RECORD, job.target / UNFINISHED
    job.target.mkdir(parents=True, exist_ok=True)
    if not path.exists() and {*os.listdir(job.target)} - {UNFINISHED}:
        raise Failure(f"{job.target} is not empty, and not made by prepare_coco.py: give another")
    path.touch()
    with open(path, "r+b", buffering=0) as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another prepare_coco.py is writing to {job.target}") from None
        text = json.dumps(merge(job, splits, record.read()), indent=1) + "\n"
        os.pwrite(record.fileno(), text.encode(), 0)  # in one call: whole, or not there
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def merge(job, splits, recorded):
    """The settings, with those recorded before. Raises Failure where they differ."""
    now = {"format": FORMAT, "shorter_side": job.side, "quality": job.quality}
    files = {split.file: split.digest for split in splits}
    if not recorded:
        return now | {"annotations": files}
    try:
        then = json.loads(recorded)
        before = then["annotations"]
        different = [f"{key} {then[key]}, not {now[key]}" for key in now if then[key] != now[key]]
        changed = [name for name in files if before.get(name, files[name]) != files[name]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Failure(f"{job.target / RECORD} is damaged: remove {job.target}") from None
    if different or changed:
        how = f"made with {different[0]}" if different else f"made from another {changed[0]}"
        raise Failure(f"{job.target} was {how}: give another TARGET, or remove that one")
    return now | {"annotations": before | files}


# --- What a person sees ------------------------------------------------------------------------


def say(text, file=None):
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    print(text, file=file, flush=True)


class Progress:
    """A line with the speed and the time left, now and then."""

    def __init__(self, total):
        self.total, self.made, self.done = total, 0, 0
        self.began = self.shown = time.monotonic()

    def count(self, result):
        now = time.monotonic()
        if not self.made:  # what an earlier run has made goes much faster: not in the speed
            self.began = now
        self.made, self.done = self.made + result.made, self.done + 1
        if now < self.shown + PROGRESS_S:
            return
        self.shown = now
        text = f"{self.done} of {self.total} pictures"
        if self.made > 1:
            speed = (self.made - 1) / (now - self.began)
            left = (self.total - self.done) / speed
            text += f" | {speed:.1f} img/s | ETA {in_unit(left, left)}"
        say(text)


# --- The run -----------------------------------------------------------------------------------


def prepare(job, splits, workers):
    """Makes all pictures, then the instances files; returns {name: Result}."""
    names = [name for split in splits for name in picture_names(split)]
    check_space(job, splits, names)
    for folder in {"annotations", *map(os.path.dirname, names)}:
        (job.target / folder).mkdir(parents=True, exist_ok=True)
    progress, results = Progress(len(names)), {}
    workers = min(workers, len(names))
    shares = [(make_pictures, job, names[number::workers]) for number in range(workers)]
    for result in results_of(shares, "fork"):
        results[result.name] = result
        if result.kind == "damaged":
            text = f"WARNING: picture {result.name} is damaged, copied as it is: {result.reason}"
            say(text, sys.stderr)
        progress.count(result)
    return results


def write_annotations(job, split, results):
    """Writes a split's instances file, returns its bytes; and one of first annotations alone."""
    scale(split, results)
    annotations = split.dataset["annotations"]
    first = {a["image_id"]: a for a in reversed(annotations)}
    for name, chosen in (
        (f"first_{split.file}", [a for a in annotations if first[a["image_id"]] is a]),
        (split.file, annotations),
    ):
        dataset = split.dataset | {"annotations": chosen}
        data = json.dumps(dataset, separators=(",", ":")).encode()
        write_whole(job, f"annotations/{name}", data)
    return len(data)


def summarize(job, results, before, after, seconds):
    """The last lines; `before` and `after` are the bytes of all instances files."""
    kinds = Counter(result.kind for result in results)
    if missing := [result.name for result in results if result.kind == "missing"]:
        listed = f"{len(missing)} listed pictures are missing, one is {min(missing)}"
        say(f"WARNING: {listed}: the demo will refuse both sets", sys.stderr)
    if count := kinds["damaged"]:
        say(f"WARNING: {count} pictures are damaged: see above", sys.stderr)
    counts = ", ".join(f"{kinds[k]} {k}" for k in ("shrunk", "copied", "damaged", "missing"))
    old, new = sum(result.before for result in results), sum(result.after for result in results)
    say(
        f"{job.target}: {len(results)} pictures: {counts}; {megabytes(old)} -> {megabytes(new)}, "
        f"annotations {megabytes(before)} -> {megabytes(after)}; {duration(seconds)}"
    )


def run(args):
    started = time.monotonic()
    job = Job(args.source, args.target, args.shorter_side, args.quality)
    files = find_files(job.source)
    check_places(job.source, job.target, files)
    splits = [read_split(job.source, file) for file in files]
    with claimed(job, splits):
        results = prepare(job, splits, args.workers)
        written = sum(write_annotations(job, split, results) for split in splits)
    read = sum(split.bytes for split in splits)
    summarize(job, results.values(), read, written, time.monotonic() - started)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="prepare_coco.py",
        description=__doc__.partition("\n")[0],
        epilog="Started again after a stop or an error it goes on. See the top of this file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    parser.add_argument("source", metavar="SOURCE", type=Path, help="COCO's folder; only read")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to make")
    names, text = ["--shorter_side", "--shorter-side"], "of the new pictures, pixels"
    parser.add_argument(*names, type=int, default=256, metavar="N", help=text)
    text = "of the new JPEG files, 1 to 100; their chroma is 4:2:0"
    parser.add_argument("--quality", type=int, default=90, metavar="N", help=text)
    text = "processes; unset: one for each core"
    parser.add_argument("--workers", type=int, default=own_cores(), metavar="N", help=text)
    args = parser.parse_args(argv)
    limits = {"shorter_side": (32, 16384), "quality": (1, 100), "workers": (1, 4096)}
    for name, (least, most) in limits.items():
        if not least <= getattr(args, name) <= most:
            parser.error(f"--{name} {getattr(args, name)} is not from {least} to {most}")
    return args


def main(argv=None):
    args = parse_arguments(argv)
    gc.disable()  # it would walk millions of objects again and again, and copy them in workers
    warnings.simplefilter("ignore")  # Pillow's, of odd files
    exit_on_stop_signals()
    text, code = "", 1
    try:
        run(args)
    except Failure as failure:
        text = str(failure)
    except WorkerEnded as ended:
        text = f"{ended}; start again: it goes on"
    except OSError as error:
        text = f"{error.filename or args.target}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{error.strerror} at {args.target}; make room and start again: it goes on"
    except SystemExit as stop:
        text, code = "stopped on a signal; start again: it goes on", stop.code
    if text:
        say(f"prepare_coco.py: error: {text}", sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
