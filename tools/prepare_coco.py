#!/usr/bin/env python3
"""Makes a smaller copy of COCO, which loads faster.

    python tools/prepare_coco.py coco coco256

SOURCE (here coco) is COCO's folder, as much of it as is there; it is only read:

    coco/train2017/000000000009.jpg ...    coco/annotations/instances_train2017.json
    coco/val2017/...                       coco/annotations/instances_val2017.json

TARGET gets the same layout and file names. Images are resized to a shorter side of 256 pixels and
written as JPEG, whatever their names end with, in RGB or in grey of 8 bits (of 16 bits, 0 to
65,535 becomes 0 to 255; of 32 bits, the image's own range does). Smaller images are copied. So are
damaged ones, which are named: when one is repaired, remove its copy. An instances file has the
first annotation of each image alone, without boxes and outlines. One that is there and has
something else is never replaced.

With --packed TARGET gets the pixels of all images of a split in one file, such as train2017.rgb,
and train2017.rgb.index: nothing has to be decoded in training. The file of train2017 has some
33 GB. Give it to the demo in place of a folder: --coco_image_path coco256/train2017.rgb. A
--shorter_side beyond that of the images keeps their size.

A run that was stopped or killed goes on when it is started again. An image that is in TARGET is
not made again: another --shorter_side needs another TARGET. Start one run at a time. What a killed
run has left, *.unfinished, may be removed.

Exit code: 0: TARGET is complete; 2: an error, which is one line, or wrong arguments.
"""

import argparse
import gc
import json
import os
import signal
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path

from PIL import Image

from check_coco import UserError, check_images, first_annotations, read_index, read_instances

PROGRESS_S = 5  # seconds from one line of progress to the next
MOST_AHEAD = 256  # images that may wait to be written


# ---- Files


def write_whole(path, data):
    """Writes these bytes to a file, which gets its name when it is complete."""
    unfinished = path.with_name(f"{uuid.uuid4().hex}.unfinished")  # its own may be too long for it
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---- Images


def copy_of(args, split, name):
    """The file of a smaller image; with --packed its height, width and rows of RGB bytes.

    None, with a warning, if the image is damaged. Raises OSError.
    """
    source = args.source / split / name
    data = source.read_bytes()
    try:
        with Image.open(BytesIO(data)) as image:
            if args.packed:
                image = resize(image, args.shorter_side).convert("RGB")
                return image.height, image.width, image.tobytes()
            if min(image.size) <= args.shorter_side and not has_more_bits(image):
                image.load()  # shows whether it is damaged
                return data
            # NOTE: into a file on a full disk Pillow may write a part of it, and raise no error.
            made = BytesIO()
            resize(image, args.shorter_side).save(made, "JPEG", quality=90, subsampling="4:2:0")
            return made.getvalue()
    except Exception as error:  # damaged data raises anything
        why = str(error).partition(" <_io")[0]
        print(f"WARNING: image {source} is damaged: {why}", file=sys.stderr, flush=True)
    return None


def resize(image, side):
    """The image in RGB or in grey of 8 bits, with this shorter side unless it is smaller."""
    if has_more_bits(image):
        image = to_8_bits(image)
    elif image.mode not in ("L", "RGB"):  # with a palette a mean of two pixels means nothing
        image = image.convert("RGB")
    if min(image.size) <= side:
        return image
    new_size = tuple(round(pixels * side / min(image.size)) for pixels in image.size)
    # libjpeg decodes no more than twice the new size needs: faster, and as sharp.
    image.draft(None, tuple(2 * pixels for pixels in new_size))
    return image.resize(new_size, Image.Resampling.BICUBIC, reducing_gap=2)


def has_more_bits(image):
    """Whether a pixel has more than 8 bits a colour."""
    return image.mode[0] in "IF"  # I, I;16, F: 16 or 32 bits


def to_8_bits(image):
    """A grey image of 16 or 32 bits in 8 bits. NOTE: convert("L") would only clip its values."""
    is_16_bit = image.mode.startswith("I;16")
    is_16_bit |= image.mode == "I" and image.format in ("PNG", "PPM")  # they have no 32 bits
    image = image.convert("I").convert("F") if image.mode != "F" else image
    low, high = (0, 2**16 - 1) if is_16_bit else image.getextrema()
    scale = 255 / (high - low or 1)
    return image.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")


def copies(args, split, names):
    """Yields each name and the copy of its image, with a line of progress now and then."""
    began = shown = time.monotonic()
    # Threads are enough to use all cores: Pillow lets others run while it decodes and resizes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(names), MOST_AHEAD):
            some = names[first : first + MOST_AHEAD]
            yield from zip(some, pool.map(partial(copy_of, args, split), some), strict=True)
            done, now = first + len(some), time.monotonic()
            if now > shown + PROGRESS_S:
                shown = now
                left = (len(names) - done) * (now - began) / done
                print(f"{done} of {len(names)} images, {left:.0f} s left", flush=True)


def write_images(args, split, names):
    """Writes the images that TARGET lacks; damaged ones as they are. Returns their number."""
    folder = args.target / split
    left = [name for name in names if not (folder / name).exists()]
    for name, data in copies(args, split, left):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, data or (args.source / split / name).read_bytes())
    return len(left)


# ---- Packed images


def pack(args, split, names):
    """Writes SPLIT.rgb and its index. Returns the names of its images, and how many are new.

    The index has a line for each image whose pixels are whole in the file: a run that goes on
    begins after them. Raises UserError.
    """
    rows, index = args.target / f"{split}.rgb", args.target / f"{split}.rgb.index"
    damaged = 0
    if rows.exists() and rows.stat().st_size and not index.exists():
        raise UserError(f"{rows} has no {index.name} beside it: fetch that, or remove {rows.name}")
    with rows.open("ab") as pixels, index.open("a+b") as lines:
        lines.seek(0)
        packed, end, length = read_index(lines, pixels.tell())
        pixels.truncate(end)
        lines.truncate(length)
        left = [name for name in names if name not in packed]
        for name, image in copies(args, split, left):
            if image is None:
                damaged += 1
                continue
            height, width, content = image
            pixels.write(content)
            pixels.flush()  # before its line
            if pixels.tell() != end + len(content):
                text = "another run is writing it: end both, then start one alone"
                raise UserError(f"{rows}: {text}")
            lines.write(json.dumps([name, end, height, width]).encode() + b"\n")
            lines.flush()
            end += len(content)
            packed.add(name)
    if not packed or (damaged and not args.skip_damaged):
        text = f"{damaged} damaged, named above: repair them, or leave them out by --skip_damaged"
        raise UserError(f"{args.source / split}: {text}; then start again")
    return packed, len(left) - damaged


# ---- The run


def find_splits(source):
    """Names such as train2017, of which both instances file and images are there."""
    files = sorted((source / "annotations").glob("instances_*.json"))
    splits = [file.stem.removeprefix("instances_") for file in files]
    found = [split for split in splits if (source / split).is_dir()]
    if not found:
        raise UserError(f"{source} has no annotations/instances_train2017.json with train2017/")
    return found


def write_annotations(path, content):
    """Writes an instances file. Raises UserError if there is one that has something else."""
    data = json.dumps(content, separators=(",", ":")).encode()
    if path.exists() and path.read_bytes() != data:
        text = "is there, and has something else: remove it, or give another TARGET"
        raise UserError(f"{path} {text}")
    write_whole(path, data)


def prepare(args):
    """Makes all of TARGET. Returns the numbers of all images and of new ones.

    Raises UserError or OSError.
    """
    contents = {}
    for split in find_splits(args.source):
        path = args.source / f"annotations/instances_{split}.json"
        contents[split] = read_instances(path)
        names = [image["file_name"] for image in contents[split]["images"]]
        for name in names:
            if os.path.isabs(name) or ".." in name.split("/"):
                text = "write a path in it, without .."
                raise UserError(f"{path}: {name} leads out of the folder of images: {text}")
        check_images(args.source / split, names)
    source, target = args.source.resolve(), args.target.resolve()
    if source in (target, *target.parents):
        raise UserError(f"{args.target} is in SOURCE, which is only read: give another TARGET")
    (args.target / "annotations").mkdir(parents=True, exist_ok=True)
    count = new = 0
    for split, content in contents.items():
        names = [image["file_name"] for image in content["images"]]
        if args.packed:
            packed, made = pack(args, split, names)
            content["images"] = [i for i in content["images"] if i["file_name"] in packed]
        else:
            made = write_images(args, split, names)
        firsts = first_annotations(content).values()
        content["annotations"] = [content["annotations"][index] for index, _ in firsts]
        for category in content["categories"]:
            category["name"] = str(category["name"])
        write_annotations(args.target / f"annotations/instances_{split}.json", content)
        count, new = count + len(content["images"]), new + made
    return count, new


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="COCO's folder")
    add("target", metavar="TARGET", type=Path, help="folder to make")
    text = "of the new images, pixels (%(default)s)"
    add("--shorter_side", type=int, default=256, metavar="N", help=text)
    text = "write the pixels of all images into one file, in place of JPEGs"
    add("--packed", action="store_true", help=text)
    text = "with --packed: leave damaged images out"
    add("--skip_damaged", action="store_true", help=text)
    args = parser.parse_args(argv)
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
        count, new = prepare(args)
        seconds = time.monotonic() - began
        print(f"{args.target}: {count} images, {new} of them new, in {seconds:.0f} s", flush=True)
    except (UserError, OSError) as error:
        if isinstance(error, OSError):  # one of a full disk has no file's name
            error = f"{error.filename or args.target}: {error.strerror}"
        print(f"prepare_coco.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
