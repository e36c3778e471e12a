#!/usr/bin/env python3
"""Makes a smaller copy of COCO, which loads faster.

    python tools/prepare_coco.py coco coco256

SOURCE (here coco) is COCO's folder, as much of it as is there; it is only read:

    coco/train2017/000000000009.jpg ...    coco/annotations/instances_train2017.json
    coco/val2017/...                       coco/annotations/instances_val2017.json

TARGET gets the same layout, file names and ids. Colour and grey images are resized to a shorter
side of 256 pixels and written as JPEG (whatever their names end with: Pillow goes by the content).
Smaller images and other kinds are copied. So are damaged images, which are named. An instances
file has only what the demo needs of it, and is read faster: the first annotation of each image,
without sizes, boxes and outlines, which would be those of the large images. It is in COCO's form,
also where that of SOURCE has ids that are text or fractions, LVIS's coco_url in place of a file
name, names with backslashes, or classes without a name.

Grey images of 16 or 32 bits, also small ones, become JPEGs of 8 bits, as the demo needs them: in
RGB Pillow would show them white or black. 0 to 65,535 becomes 0 to 255; of 32 bits the least value
of the image becomes 0, the greatest one 255.

With --packed TARGET gets no JPEGs: the pixels of all images of a split are in one file, such as
train2017.rgb, which has an index, train2017.rgb.index. Training then has nothing to decode, and
reads several times as many images a second. The file of train2017 has some 33 GB. Give it to the
demo in place of a folder: --coco_image_path coco256/train2017.rgb. A --shorter_side beyond that of
the images keeps their size.

A run that was stopped or killed goes on when it is started again. An image that is in TARGET is
not made again, also if its source has changed. Two runs at once may make one TARGET, except with
--packed. What a killed run has left, *.unfinished, may be removed; with --packed it is what the
next run goes on from.

Exit code: 0: TARGET is complete; 2: an error, which is one line, or wrong arguments.
"""

import argparse
import fcntl
import gc
import json
import os
import shutil
import signal
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

try:
    from PIL import Image
except ImportError:
    sys.exit("prepare_coco.py: error: Pillow is missing: pip install pillow")

from check_coco import UserError, check_images, class_name, first_annotations, read_instances

PROGRESS_S = 5  # seconds from one line of progress to the next
MOST_AHEAD = 256  # images that may wait to be written


class Job(NamedTuple):
    """What is the same for all images."""

    source: Path
    target: Path
    side: int  # pixels
    packed: bool = False
    skip_damaged: bool = False


# ---- Files


@contextmanager
def whole_file(path):
    """A file to write bytes to. It gets its name when it is complete. Raises UserError."""
    unfinished = path.with_name(f"{uuid.uuid4().hex}.unfinished")  # two runs must not share it
    try:
        with unfinished.open("xb") as file:
            yield file
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


# ---- Images


def shrink(data, side):
    """The file of a smaller image, of 8 bits. The same data if it is small, or of another kind.

    Raises an error of any type if the image is damaged.
    """
    with Image.open(BytesIO(data)) as image:
        if image.mode[0] in "IF":  # I, I;16, F: 16 or 32 bits
            image = to_8_bits(image)
        elif min(image.size) <= side or image.mode not in ("L", "RGB"):
            image.load()  # shows whether it is damaged
            return data
        # NOTE: into a file on a full disk Pillow may write a part of it, and raise no error.
        made = BytesIO()
        resize(image, side).save(made, "JPEG", quality=90, subsampling="4:2:0")
    return made.getvalue()


def resize(image, side):
    """The image with this shorter side; the same one if it is not larger."""
    if min(image.size) <= side:
        return image
    new_size = tuple(round(pixels * side / min(image.size)) for pixels in image.size)
    # libjpeg decodes no more than twice the new size needs: faster, and as sharp.
    image.draft(None, tuple(2 * pixels for pixels in new_size))
    return image.resize(new_size, Image.Resampling.BICUBIC, reducing_gap=2)


def to_8_bits(image):
    """A grey image of 16 or 32 bits in 8 bits. NOTE: convert("L") would only clip its values."""
    is_16_bit = image.mode.startswith("I;16")
    is_16_bit |= image.mode == "I" and image.format in ("PNG", "PPM")  # they have no 32 bits
    image = image.convert("I").convert("F") if image.mode != "F" else image
    low, high = (0, 2**16 - 1) if is_16_bit else image.getextrema()
    scale = 255 / (high - low or 1)
    return image.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")


def read_bytes(path):
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def make_image(job, name):
    """Writes an image to TARGET unless it is there. Raises UserError."""
    source, target = job.source / name, job.target / name
    if target.exists():
        return
    data = read_bytes(source)
    try:
        data = shrink(data, job.side)
    except Exception as error:  # damaged data raises anything
        text = f"WARNING: image {source} is damaged, and copied as it is: {error}"
        print(text, file=sys.stderr, flush=True)
    with whole_file(target) as file:
        file.write(data)


def for_all(names, work):
    """What work(name) returns, in the order of the names, with a line of progress now and then."""
    began = shown = time.monotonic()
    # Threads are enough to use all cores: Pillow lets others run while it decodes and resizes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(names), MOST_AHEAD):
            some = names[first : first + MOST_AHEAD]
            for done, result in enumerate(pool.map(work, some), first + 1):
                yield result
                now = time.monotonic()
                if now > shown + PROGRESS_S:
                    shown = now
                    left = (len(names) - done) * (now - began) / done
                    print(f"{done} of {len(names)} images, {left:.0f} s left", flush=True)


# ---- Packed images


def pack(job, split, names):
    """Writes SPLIT.rgb and its index. Returns the names of its images. Raises UserError.

    The index has a line for each image whose pixels are whole in the file: a run that goes on
    begins after them. It gets its name when all images are there.
    """
    rows, index = job.target / f"{split}.rgb", job.target / f"{split}.rgb.index"
    unfinished = index.with_suffix(".unfinished")
    if index.exists():  # of an earlier call: what it lacks, and what its pixels lack, is added
        index.replace(unfinished)
    damaged = 0
    try:
        with rows.open("ab") as pixels, unfinished.open("a+b") as lines:
            fcntl.flock(pixels, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done, end = read_lines(lines, pixels.tell())
            pixels.truncate(end)
            left = [name for name in names if name not in done]
            check_room(job, split, left)
            work = partial(pixels_of, job.source / split, job.side)
            for name, image in zip(left, for_all(left, work), strict=True):
                if image is None:
                    damaged += 1
                    continue
                height, width, content = image
                pixels.write(content)
                pixels.flush()  # before its line
                lines.write(json.dumps([name, end, height, width]).encode() + b"\n")
                end += len(content)
    except BlockingIOError as error:
        raise UserError(f"{rows}: another run is writing it") from error
    except OSError as error:
        raise UserError(f"{rows} cannot be written: {error.strerror}") from error
    if damaged == len(names) or (damaged and not job.skip_damaged):
        text = f"{damaged} damaged, named above: repair them, or leave them out by --skip_damaged"
        raise UserError(f"{job.source / split}: {text}; then start again")
    unfinished.replace(index)
    return {json.loads(line)[0] for line in index.read_bytes().splitlines()}


def read_lines(lines, size):
    """The names in an index whose pixels are whole in a file of this size, and where they end.

    What follows in the index is cut off.
    """
    lines.seek(0)
    packed, end, length = set(), 0, 0
    for line in lines:
        try:
            name, first, height, width = json.loads(line)
        except ValueError:  # of a run that was killed, or after a power failure
            break
        if not line.endswith(b"\n") or first + 3 * height * width > size:
            break
        packed.add(name)
        end, length = first + 3 * height * width, length + len(line)
    lines.truncate(length)
    return packed, end


def check_room(job, split, names):
    """Raises UserError if the disk has too little room for the pixels of these images."""
    sizes = []
    for name in names[:: 1 + len(names) // 100]:
        with suppress(Exception), Image.open(job.source / split / name) as image:
            scale = min(1, job.side / min(image.size))
            sizes.append(3 * scale * scale * image.width * image.height)
    needed = len(names) * sum(sizes) / max(1, len(sizes))
    free = shutil.disk_usage(job.target).free
    if needed > free:
        text = f"{split} needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise UserError(f"{job.target}: {text}")


def pixels_of(folder, side, name):
    """Height, width and rows of RGB bytes of an image; None if it is damaged. Raises UserError."""
    source = folder / name
    data = read_bytes(source)
    try:
        with Image.open(BytesIO(data)) as image:
            image = to_8_bits(image) if image.mode[0] in "IF" else image
            # In other modes, such as that of a palette, a mean of two pixels means nothing.
            image = image if image.mode in ("L", "RGB") else image.convert("RGB")
            image = resize(image, side).convert("RGB")
            return image.height, image.width, image.tobytes()
    except Exception as error:  # damaged data raises anything
        print(f"WARNING: image {source} is damaged: {error}", file=sys.stderr, flush=True)
    return None


# ---- Annotations


def write_instances(path, content):
    """Writes an instances file of the first annotations. Raises UserError."""
    firsts = [content["annotations"][index] for index, _ in first_annotations(content).values()]
    content = in_coco_form(content | {"annotations": firsts})
    text = json.dumps(content, separators=(",", ":"))
    with whole_file(path) as file:
        file.write(text.encode())


def in_coco_form(content):
    """Ids become whole numbers in the order of the old ones, and a class's name is text."""
    for category in content["categories"]:
        category["name"] = class_name(category)
    for name, of_others in (
        ("images", "image_id"),
        ("categories", "category_id"),
        ("annotations", ""),
    ):
        ids = sorted({entry["id"] for entry in content[name]})
        if all(type(each) is int for each in ids):
            continue
        new = {old: number for number, old in enumerate(ids, 1)}
        for entry in content[name]:
            entry["id"] = new[entry["id"]]
        for annotation in content["annotations"] if of_others else []:
            annotation[of_others] = new[annotation[of_others]]
    return content


# ---- The run


def find_splits(source):
    """Names such as train2017, of which both instances file and images are there."""
    files = sorted((source / "annotations").glob("instances_*.json"))
    splits = [file.stem.removeprefix("instances_") for file in files]
    found = [split for split in splits if (source / split).is_dir()]
    if not found:
        raise UserError(f"{source} has no annotations/instances_train2017.json with train2017/")
    return found


def claim(job):
    """Makes TARGET, or finds it made with the same setting. Raises UserError or OSError."""
    record = job.target / "prepare_coco.json"
    settings = {"shorter_side": job.side} | ({"packed": True} if job.packed else {})
    job.target.mkdir(parents=True, exist_ok=True)
    # The record is the first file to be complete, also where two runs begin at once.
    others = [path for path in job.target.iterdir() if path.suffix != ".unfinished"]
    if record.exists():
        try:
            made_with = json.loads(record.read_bytes())
        except ValueError as error:
            text = f"{record} is damaged: remove {job.target}, or give another TARGET"
            raise UserError(text) from error
        if made_with != settings:
            raise UserError(f"{job.target} was made with {made_with}: give another TARGET")
    elif others:
        raise UserError(f"{job.target} is not empty, and not made by this program")
    else:
        with whole_file(record) as file:
            file.write(json.dumps(settings).encode())


def prepare(job):
    """Makes all of TARGET. Returns the number of images. Raises UserError or OSError."""
    contents = {}
    for split in find_splits(job.source):
        path = job.source / f"annotations/instances_{split}.json"
        contents[split] = read_instances(path, job.source / split, any_form=True)
        names = [image["file_name"] for image in contents[split]["images"]]
        check_images(job.source / split, names)
    claim(job)
    (job.target / "annotations").mkdir(exist_ok=True)
    count = 0
    for split, content in contents.items():
        names = list(dict.fromkeys(image["file_name"] for image in content["images"]))  # each once
        if job.packed:
            packed = pack(job, split, names)
            names = [name for name in names if name in packed]
            content["images"] = [i for i in content["images"] if i["file_name"] in packed]
        else:
            paths = [f"{split}/{name}" for name in names]
            for folder in set(map(os.path.dirname, paths)):
                (job.target / folder).mkdir(parents=True, exist_ok=True)
            for _ in for_all(paths, partial(make_image, job)):
                pass
        write_instances(job.target / f"annotations/instances_{split}.json", content)
        count += len(names)
    return count


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="COCO's folder")
    add("target", metavar="TARGET", type=Path, help="folder to make")
    text = "of the new images, pixels (%(default)s)"
    add("--shorter_side", "--shorter-side", type=int, default=256, metavar="N", help=text)
    text = "write the pixels of all images into one file, in place of JPEGs"
    add("--packed", action="store_true", help=text)
    text = "with --packed: leave damaged images out"
    add("--skip_damaged", "--skip-damaged", action="store_true", help=text)
    args = parser.parse_args(argv)
    if args.skip_damaged and not args.packed:
        parser.error("--skip_damaged is for --packed: JPEGs are copied as they are")
    if args.shorter_side < 32:
        parser.error("--shorter_side is at least 32")
    return args


def main():
    args = parse_arguments()
    gc.disable()  # it would look through millions of objects again and again
    # Files appear when they are complete, so the program may be ended at any moment.
    for number in (signal.SIGINT, signal.SIGPIPE):  # end on Ctrl-C and in `| head` without words
        signal.signal(number, signal.SIG_DFL)
    began = time.monotonic()
    try:
        job = Job(args.source, args.target, args.shorter_side, args.packed, args.skip_damaged)
        count = prepare(job)
        text = f"{args.target}: {count} images in {time.monotonic() - began:.0f} s"
        print(text, flush=True)
    except (UserError, OSError) as error:
        if isinstance(error, OSError):
            error = f"{error.filename or 'the output'}: {error.strerror}"
        print(f"prepare_coco.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
