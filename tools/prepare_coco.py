#!/usr/bin/env python3
"""Makes a smaller copy of COCO, which loads faster.

    python tools/prepare_coco.py coco coco256

SOURCE (here coco) is COCO's folder, as much of it as is there; it is only read:

    coco/train2017/000000000009.jpg ...    coco/annotations/instances_train2017.json
    coco/val2017/...                       coco/annotations/instances_val2017.json

TARGET gets the same layout, file names and ids. Colour and grey images are resized to a shorter
side of 256 pixels and written as JPEG; boxes and areas are scaled with them, outlines
(`segmentation`) are left out. Smaller images and other kinds are copied. So are damaged images,
which are named. Beside each instances file comes one with the first annotation of each image
alone, first_instances_train2017.json: all that the demo needs of it, and read faster.

A run that was stopped or killed goes on when it is started again.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

try:
    from PIL import Image
except ImportError:
    sys.exit("prepare_coco.py: error: Pillow is missing: pip install pillow")

PROGRESS_S = 5  # seconds from one line of progress to the next


class UserError(Exception):
    """What a user can fix, in one line."""


class Job(NamedTuple):
    """What is the same for all images."""

    source: Path
    target: Path
    side: int  # pixels


# ---- Images


def shrink(source, target, side):
    """Writes a smaller image. Returns False if it need not be smaller, or is of another kind.

    Raises an error of any type if the image is damaged.
    """
    with Image.open(source) as image:
        if min(image.size) <= side or image.mode not in ("L", "RGB"):
            image.load()  # shows whether it is damaged
            return False
        new_size = tuple(round(pixels * side / min(image.size)) for pixels in image.size)
        # libjpeg decodes no more than twice the new size needs: faster, and as sharp.
        image.draft(None, tuple(2 * pixels for pixels in new_size))
        image = image.resize(new_size, Image.Resampling.BICUBIC, reducing_gap=2)
    image.save(target, "JPEG", quality=90, subsampling="4:2:0")
    return True


def make_image(job, name):
    """Writes an image to TARGET unless it is there.

    Returns its size in SOURCE and in TARGET, (width, height). Raises OSError.
    """
    source, target = job.source / name, job.target / name
    if not target.exists():
        unfinished = unfinished_file(target)
        try:
            if not shrink(source, unfinished, job.side):
                shutil.copyfile(source, unfinished)
        except Exception as error:  # damaged data raises anything
            shutil.copyfile(source, unfinished)  # fails if it cannot be read at all
            text = f"WARNING: image {source} is damaged, and copied as it is: {error}"
            print(text, file=sys.stderr, flush=True)
        unfinished.replace(target)
    try:
        with Image.open(source) as old, Image.open(target) as new:
            return old.size, new.size
    except Exception:  # damaged: it has no size
        return None, None


def unfinished_file(path):
    """What a file of TARGET is called until it is complete."""
    return path.with_name(f"{path.name}.unfinished")


def make_images(job, names):
    """Writes all images. Returns {name: (size in SOURCE, size in TARGET)}."""
    sizes = {}
    began = shown = time.monotonic()
    # Threads are enough to use all cores: Pillow lets others run while it decodes and resizes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, both in zip(names, pool.map(partial(make_image, job), names), strict=True):
            sizes[name] = both
            now = time.monotonic()
            if now > shown + PROGRESS_S:
                shown = now
                left = (len(names) - len(sizes)) * (now - began) / len(sizes)
                print(f"{len(sizes)} of {len(names)} images, {left:.0f} s left", flush=True)
    return sizes


# ---- Annotations


def without_outline(found):
    """For each JSON object as it is parsed: the outlines of COCO would fill gigabytes."""
    found.pop("segmentation", None)
    return found


def read_instances(path, folder):
    """The content of an instances file, without outlines, with the images' names in the folder.

    Raises UserError.
    """
    gc.disable()  # it would look through millions of objects again and again
    content = read_json(path, object_hook=without_outline)
    check_instances(path, content)
    for image in content["images"]:
        name = file_name(image)
        if "\\" in name and not (folder / name).exists():  # an export made on Windows
            name = name.replace("\\", "/")
        if os.path.isabs(name) or ".." in name.split("/"):
            raise UserError(f"annotation file {path}: {name} leaves the image folder")
        image["file_name"] = name
    return content


def check_images(folder, names):
    """Raises UserError unless all images are in the folder."""
    # isfile is also False for a name that no file can have.
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        text = f"lacks {len(missing)} of {len(names)} listed images, the first is {missing[0]}"
        raise UserError(f"the folder of images {folder} {text}: check the path")


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
        # What is no number stays as it is: training does not need it.
        with suppress(TypeError, ValueError, OverflowError):
            box = zip(annotation.get("bbox"), (x, y, x, y), strict=True)
            annotation["bbox"] = [round(pixels * factor, 2) for pixels, factor in box]
        with suppress(TypeError, OverflowError):
            annotation["area"] = round(annotation.get("area") * x * y, 4)


def write_json(path, content):
    """The file appears when it is complete."""
    unfinished_file(path).write_text(json.dumps(content, separators=(",", ":")))
    unfinished_file(path).replace(path)


def write_instances(folder, split, content):
    """Writes the instances file of a split, and one of the first annotations alone."""
    first = {}
    for annotation in content["annotations"]:
        first.setdefault(annotation["image_id"], annotation)
    firsts = content | {"annotations": list(first.values())}
    write_json(folder / f"first_instances_{split}.json", firsts)
    write_json(folder / f"instances_{split}.json", content)


# ---- What is wrong with an annotation file (demo_coco_resnet18.py has the same lines)

LISTS = ("images", "categories", "annotations")
# What training needs of COCO's format: of each entry of a list a field, and what its values are.
FIELDS = [
    ("images", "id", "ids of images"),
    ("images", "file_name", "names"),
    ("categories", "id", "ids of categories"),
    ("categories", "name", "names"),
    ("annotations", "category_id", "ids of categories"),
    ("annotations", "image_id", "ids of images"),
    ("annotations", "id", "ids of annotations"),
]
INSTANCES = "Of COCO's files give the instances file, such as instances_train2017.json"
UTF_16 = "it is UTF-16: save it as UTF-8"
BEGINNINGS = {  # of files that are not what they should be
    b"PK": "it is a zip archive: unpack it",
    b"\x1f\x8b": "it is a gzip archive: unpack it",
    b"\xef\xbb\xbf": "it begins with a byte order mark: save it as UTF-8 without one",
    **dict.fromkeys([b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0["], UTF_16),
}


def read_json(path, **options):
    """What json.loads makes of an annotation file with these options. Raises UserError."""
    try:
        data = Path(path).read_bytes()
        for beginning, what in BEGINNINGS.items():
            if data.startswith(beginning):
                raise UserError(f"annotation file {path} is not JSON in UTF-8: {what}")
        return json.loads(data.decode(), **options)
    except OSError as error:
        raise UserError(f"annotation file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        text = f"annotation file {path} is not JSON, or not all of it is there"
        raise UserError(f"{text} ({len(data)} bytes): {error}") from error


def check_instances(path, content):
    """Raises UserError if training cannot use the content of an annotation file."""
    file = f"annotation file {path}"
    check_lists(file, content)
    for name, key, kind in FIELDS:
        types = types_of(content, kind)
        expected = "text" if types == [str] else "a number"
        if "ids" in kind:
            expected += f", as {kind} are"
        for index, entry in enumerate(content[name]):
            value = value_of(entry, key)
            if type(value) not in types or value == "" or not is_exact(value):
                if key == "category_id" and key not in entry:  # as in COCO's panoptic files
                    expected += f". {INSTANCES}"
                text = f"{file}: {name}[{index}] {has(entry, key)}"
                raise UserError(f"{text}: expected {expected}")
    check_ids(file, content)


def check_lists(file, content):
    """Raises UserError unless there are three lists of objects."""
    if not isinstance(content, dict):
        text = "expected an object with images, annotations and categories"
        raise UserError(f"{file} is {shown(content)}: {text}. {INSTANCES}")
    for name in LISTS:
        if not content.get(name) or not isinstance(content[name], list):
            raise UserError(f"{file} {has(content, name)}: expected a list of them. {INSTANCES}")
        for index, entry in enumerate(content[name]):
            if not isinstance(entry, dict):
                raise UserError(f"{file}: {name}[{index}] is {shown(entry)}: expected an object")


def check_ids(file, content):
    """Raises UserError if ids are not unique, or the label of an image has no category."""
    indices = {"images": {}, "categories": {}}
    for name, seen in indices.items():
        for index, entry in enumerate(content[name]):
            first = seen.setdefault(entry["id"], index)
            if first != index:
                text = f"{name}[{index}] has the id {entry['id']}, as {name}[{first}] has"
                raise UserError(f"{file}: {text}: expected another one")
    labelled = set()
    for index, annotation in enumerate(content["annotations"]):
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in indices["images"] or image in labelled:
            continue  # training uses the first annotation of each image
        labelled.add(image)
        if category not in indices["categories"]:
            text = f"annotations[{index}] has {category} as category_id"
            raise UserError(f"{file}: {text}: expected the id of a category")
    if not labelled:
        raise UserError(f"{file}: no image has an annotation: no image_id is the id of an image")


def is_exact(value):
    """Whether it is surely this number. A float from 2**53 on may stand for its neighbours."""
    return not isinstance(value, float) or abs(value) < 2**53


def types_of(content, kind):
    """Names are text, ids are numbers. Ids may also all be text."""
    fields = [(name, key) for name, key, its_kind in FIELDS if its_kind == kind]
    values = (value_of(entry, key) for name, key in fields for entry in content[name])
    return [str] if all(isinstance(v, str) for v in values) or kind == "names" else [int, float]


def value_of(entry, key):
    if key == "file_name":
        return file_name(entry)
    return class_name(entry) if key == "name" else entry.get(key)


def file_name(image):
    """In LVIS it is the last part of the URL."""
    return image.get("file_name") or str(image.get("coco_url") or "").rpartition("/")[2]


def class_name(category):
    """A class without a name is called by its id."""
    name = category.get("name")
    name = category.get("id") if name in (None, "") else name
    return str(name).removesuffix(".0") if type(name) in (int, float) else name


def has(entry, key):
    """'has no id', 'has null as id'."""
    missing = key not in entry or entry[key] == []
    return f"has no {key}" if missing else f"has {shown(entry[key])} as {key}"


def shown(value):
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)[:60]
    return f"the text {text}" if isinstance(value, str) else text


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
    """Makes TARGET, or finds it made with the same setting. Raises UserError."""
    record = job.target / "prepare_coco.json"
    settings = {"shorter_side": job.side}
    if record.exists():
        made_with = json.loads(record.read_text())
        if made_with != settings:
            raise UserError(f"{job.target} was made with {made_with}: give another TARGET")
    elif job.target.exists() and any(job.target.iterdir()):
        raise UserError(f"{job.target} is not empty, and not made by this program")
    else:
        job.target.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(settings))


def prepare(job):
    """Makes all of TARGET. Returns the number of images. Raises UserError or OSError."""
    contents = {}
    for split in find_splits(job.source):
        path = job.source / f"annotations/instances_{split}.json"
        contents[split] = read_instances(path, job.source / split)
        names = [image["file_name"] for image in contents[split]["images"]]
        check_images(job.source / split, names)
    claim(job)
    listed = [f"{s}/{image['file_name']}" for s in contents for image in contents[s]["images"]]
    names = list(dict.fromkeys(listed))  # each once
    for folder in {"annotations", *map(os.path.dirname, names)}:
        (job.target / folder).mkdir(parents=True, exist_ok=True)
    sizes = make_images(job, names)
    for split, content in contents.items():
        scale(content, sizes, split)
        write_instances(job.target / "annotations", split, content)
    return len(names)


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="COCO's folder")
    add("target", metavar="TARGET", type=Path, help="folder to make")
    text = "of the new images, pixels (%(default)s)"
    add("--shorter_side", "--shorter-side", type=int, default=256, metavar="N", help=text)
    args = parser.parse_args(argv)
    if args.shorter_side < 32:
        parser.error("--shorter_side is at least 32")
    return args


def main():
    args = parse_arguments()
    # Files appear when they are complete, so the program may be ended at any moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    began = time.monotonic()
    try:
        count = prepare(Job(args.source, args.target, args.shorter_side))
    except (UserError, OSError) as error:
        sys.exit(f"prepare_coco.py: error: {error}")
    print(f"{args.target}: {count} images in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
