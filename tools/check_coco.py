#!/usr/bin/env python3
"""Says what keeps an annotation file in COCO's format, or its images, from being trained on.

    python tools/check_coco.py coco/annotations/instances_train2017.json coco/train2017 \\
        --val coco/annotations/instances_val2017.json

ANNOTATIONS is the file of the training images. IMAGES, if given, is their folder: it must hold
every labelled image. --val gives the file of the validation images: the training file must have
their classes, by name. To look for the validation images, give their file and folder alone.

Each kind of fault gets a line with the first fault and how many more there are. Images are looked
for, and classes compared, once the files themselves have no fault. If nothing is wrong, it prints
what is there: images, those without a label, and the number of images of each class. An image's
class, its label, is the category of its first annotation. No image is opened.

The result, also a fault, is printed on stdout; only wrong arguments are reported on stderr. Exit
code: 0: no fault; 2: faults, a file that cannot be read, or wrong arguments.

It needs nothing but Python. prepare_coco.py reads its files with the functions of this one.
"""

import argparse
import gc
import json
import math
import os
import signal
import sys
import unicodedata
from collections import Counter
from pathlib import Path

WIDTH = 100  # characters of a line with columns


class UserError(Exception):
    """What a user can fix: a line for each kind of fault."""

    def __str__(self):
        return "\n".join(self.args)


def first_and_count(texts, advice=""):
    """The line for the faults of one kind, in a list, which is empty if there are none."""
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return [f"{text}{more}{advice}" for text in texts[:1]]


# ---- Reading a file

ARCHIVES = {b"PK": "zip", b"\x1f\x8b": "gzip"}  # how they begin


def read_instances(path, folder=None):
    """The content of an annotation file, without outlines. Raises UserError.

    Of each image file_name is set: its name in the folder of images.
    """
    content = read_json(path)
    faults = faults_of_lists(content)
    if not faults:
        # Ids are compared when all are ids: otherwise one fault would make thousands of others.
        faults = faults_of_fields(content, IDS) or faults_of_ids(content)
        faults += faults_of_fields(content, OTHERS)
        faults += set_file_names(content, folder)
    if faults:
        raise UserError(*(f"annotation file {path}{text}" for text in faults))
    return content


def read_json(path):
    """What a file holds, without outlines. Raises UserError."""
    try:
        data = Path(path).read_bytes()
        for beginning, kind in ARCHIVES.items():
            if data.startswith(beginning):
                raise UserError(f"annotation file {path} is a {kind} archive: unpack it")
        return json.loads(data, object_hook=without_outline)  # in UTF-8, UTF-16 or UTF-32
    except OSError as error:
        raise UserError(f"annotation file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        text = f"is not text in UTF-8 (from byte {error.start} on): save it as UTF-8"
        raise UserError(f"annotation file {path} {text}") from error
    except (ValueError, RecursionError) as error:
        text = f"annotation file {path} is not JSON, or not all of it is there"
        raise UserError(f"{text} ({len(data)} bytes): {error}") from error


def without_outline(found):
    """For each JSON object as it is parsed: the outlines of COCO would fill gigabytes."""
    found.pop("segmentation", None)
    return found


# ---- Faults of a file: each text goes on after the file's name

# What training needs of the entries of a list: a field, and what its values are.
IDS = [
    ("images", "id", "ids of images"),
    ("categories", "id", "ids of categories"),
    ("annotations", "category_id", "ids of categories"),
    ("annotations", "image_id", "ids of images"),
]
OTHERS = [
    ("annotations", "id", "ids of annotations"),
    ("images", "file_name", "names"),
    ("categories", "name", "names"),
]
INSTANCES = "Of COCO's files give the instances file, such as instances_train2017.json"


def faults_of_lists(content):
    """There must be three lists of objects."""
    if not isinstance(content, dict):
        text = "expected an object with images, annotations and categories"
        return [f" is {shown(content)}: {text}. {INSTANCES}"]
    lists = {name: content.get(name) for name in ("images", "categories", "annotations")}
    texts = [
        f" {has(content, name)}: expected a list of them"
        for name, entries in lists.items()
        if not entries or not isinstance(entries, list)
    ]
    faults = first_and_count(texts, f". {INSTANCES}")
    for name, entries in lists.items():
        texts = [
            f": {name}[{index}] is {shown(entry)}: expected an object"
            for index, entry in enumerate(entries if isinstance(entries, list) else [])
            if not isinstance(entry, dict)
        ]
        faults += first_and_count(texts)
    return faults


def faults_of_fields(content, fields):
    """Each entry must have these fields, with values of the right type."""
    faults = []
    for name, key, kind in fields:
        types = types_of(content, kind)
        expected = "text" if types == [str] else "a number"
        if "ids" in kind:
            expected += f", as {kind} are"
        texts = [
            f": {name}[{index}] {has(entry, key)}: expected {expected}"
            for index, entry in enumerate(content[name])
            if is_wrong(value_of(entry, key), types)
        ]
        is_panoptic = key == "category_id" and key not in content[name][0]
        faults += first_and_count(texts, f". {INSTANCES}" if is_panoptic else "")
    return faults


def types_of(content, kind):
    """Names are text, ids are numbers. Ids may also all be text."""
    fields = [(name, key) for name, key, its_kind in IDS + OTHERS if its_kind == kind]
    values = (value_of(entry, key) for name, key in fields for entry in content[name])
    return [str] if all(isinstance(v, str) for v in values) or kind == "names" else [int, float]


def is_wrong(value, types):
    """A float from 2**53 on may stand for its neighbours, so it is no id."""
    is_inexact = type(value) is float and not abs(value) < 2**53
    return type(value) not in types or value == "" or is_inexact


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


def faults_of_ids(content):
    """Ids must be unique, a label the id of a category, and some image must have a label."""
    faults = []
    for name in ("images", "categories"):
        indices, texts = {}, []
        for index, entry in enumerate(content[name]):
            first = indices.setdefault(entry["id"], index)
            if first != index:
                text = f"{name}[{index}] has the id {entry['id']}, as {name}[{first}] has"
                texts.append(f": {text}: expected another one")
        faults += first_and_count(texts)
    labels = first_annotations(content).values()
    categories = {category["id"] for category in content["categories"]}
    texts = [
        f": annotations[{index}] has {label} as category_id: expected the id of a category"
        for index, label in labels
        if label not in categories
    ]
    faults += first_and_count(texts)
    if not labels:
        faults.append(": no image has an annotation: no image_id is the id of an image")
    return faults


def first_annotations(content):
    """{id of an image: (index, category_id) of its first annotation}. Training uses no other."""
    images = {image["id"] for image in content["images"]}
    first = {}
    for index, annotation in enumerate(content["annotations"]):
        if annotation["image_id"] in images:
            first.setdefault(annotation["image_id"], (index, annotation["category_id"]))
    return first


def set_file_names(content, folder):
    """Sets each image's file_name to its name in the folder, which must not be outside of it."""
    outside = []
    for image in content["images"]:
        name = file_name(image)
        if not isinstance(name, str):
            continue  # a fault of its field
        if "\\" in name and not (folder and os.path.isfile(os.path.join(folder, name))):
            name = name.replace("\\", "/")  # an export made on Windows
            content["has_backslashes"] = True
        if os.path.isabs(name) or ".." in name.split("/"):
            outside.append(f": {name} leaves the image folder")
        image["file_name"] = name
    return first_and_count(outside)


# ---- Images that are not in the folder

# Of file names; labelling tools leave text files beside the images.
ENDINGS = ".apng .avif .bmp .dib .gif .jfif .jp2 .jpe .jpeg .jpg .pbm .pfm .pgm .png .pnm .ppm"
ENDINGS = {*ENDINGS.split(), ".tga", ".tif", ".tiff", ".webp"}


def faults_of_images(folder, names):
    """All images must be in the folder."""
    # Listing each folder once is faster than looking for each of 118,287 files.
    files = {}
    for subfolder in {os.path.dirname(name) for name in names}:
        try:
            with os.scandir(os.path.join(folder, subfolder)) as entries:
                files[subfolder] = {entry.name for entry in entries if is_file(entry)}
        except (OSError, ValueError):  # ValueError: a name that no file can have
            files[subfolder] = set()
    lost = [name for name in names if os.path.basename(name) not in files[os.path.dirname(name)]]
    if not lost:
        return []
    text = f"lacks {len(lost)} of {len(names)} listed images, the first is {lost[0]}"
    return [f"the folder of images {folder} {text}: {look_around(folder, lost[0])}"]


def is_file(entry):
    """Of os.scandir; or a link to one. NOTE: entry.is_file() fails for a link to itself."""
    return entry.is_file(follow_symlinks=False) or os.path.isfile(entry.path)


def look_around(folder, name):
    """Where an image is that the folder lacks, or what it is called there; and what to do."""
    try:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if not is_file(entry)][:1000]
    except OSError as error:
        return f"{error.strerror}: check the path"
    above = Path(os.path.abspath(folder)).parents
    for other in [*list(above)[: name.count("/")], *below]:
        if os.path.isfile(os.path.join(other, name)):
            return f"{name} is in {other}: give that folder"
    for wanted in (name, os.path.basename(name)):
        if found := find_alike(folder, wanted):
            if found == name:
                return "there it is a folder, or a link to a file that is gone: check it"
            how = "under another name"
            if one_form(found) == one_form(name):
                how = "with the same letters in another Unicode form (NFC, NFD)"
            elif loose_form(found) == loose_form(name):
                how = "in another case"
            elif os.path.basename(found) == os.path.basename(name):
                how = "in another folder"
            return f"{found} is there, {how}: name it in the annotation file as it is there"
    return "check the path"


def find_alike(folder, name):
    """A file of the folder whose name has another case, extension or Unicode form; or None."""
    found = ""
    for part in name.split("/"):
        try:
            entries = os.listdir(os.path.join(folder, found))
        except OSError:
            return None
        for form in (one_form, loose_form, without_extension):
            alike = [entry for entry in entries if form(entry) in (form(part), loose_form(part))]
            if form is without_extension:
                alike = [e for e in alike if os.path.splitext(e)[1].lower() in ENDINGS]
            if alike:
                break
        else:
            return None
        found = os.path.join(found, part if part in alike else min(alike))
    return found


def one_form(name):
    return unicodedata.normalize("NFC", name)  # macOS writes an accent as a character of its own


def loose_form(name):
    return one_form(name).casefold()


def without_extension(name):
    return os.path.splitext(loose_form(name))[0]


# ---- Classes, and what is there


def images_of_classes(content):
    """For each category, in the order of the file: the number of images whose label it is."""
    counts = Counter(label for _, label in first_annotations(content).values())
    return [counts[category["id"]] for category in content["categories"]]


def faults_of_classes(train, val):
    """Of two (path, content): validation finds its classes in the training file by their names."""
    faults = []
    for path, content in (train, val):
        used = {}  # by name the ids of classes that have images
        for category, count in zip(content["categories"], images_of_classes(content), strict=True):
            if count:
                used.setdefault(class_name(category), []).append(category["id"])
        texts = [
            f"annotation file {path}: categories {ids[0]} and {ids[1]} have images, and both "
            f"are called {name!r}: rename one, names tell them apart"
            for name, ids in used.items()
            if len(ids) > 1
        ]
        faults += first_and_count(texts)
    known = {class_name(category) for category in train[1]["categories"]}
    texts = [
        f"annotation file {path}: it has images of the class {name!r}, which the training "
        "classes lack: give both files the same names"
        for name in used  # in the validation file
        if name not in known
    ]
    return faults + first_and_count(texts)


def describe(path, content):
    """Lines: how many images a file has, and of which classes."""
    counts, labelled = images_of_classes(content), first_annotations(content)
    names = [image["file_name"] for image in content["images"] if image["id"] not in labelled]
    left_out = f" (training leaves them out; the first is {names[0]})" if names else ""
    images = {image["id"] for image in content["images"]}
    lost = sum(annotation["image_id"] not in images for annotation in content["annotations"])
    digits = len(str(max(counts)))
    most_first = sorted(zip(counts, content["categories"], strict=True), key=lambda row: -row[0])
    cells = [f"{count:{digits}} {class_name(category)}" for count, category in most_first]
    width = max(map(len, cells)) + 3
    height = math.ceil(len(cells) / max(1, WIDTH // width))
    rows = [cells[row::height] for row in range(height)]  # columns, which are read down
    return [
        f"annotation file {path}",
        f"images: {len(content['images'])}, without a label: {len(names)}{left_out}",
        f"annotations: {len(content['annotations'])}, of no image of this file: {lost}",
        f"classes: {len(cells)}, without an image: {counts.count(0)}. Images of each class:",
        *("".join(f"{cell:{width}}" for cell in row).rstrip() for row in rows),
    ]


# ---- The command


def check(annotations, folder=None, val=None):
    """Lines that say what is there. Raises UserError."""
    files, faults = [], []
    for path, its_folder in [(annotations, folder)] + ([(val, None)] if val else []):
        try:
            files.append((path, read_instances(path, its_folder)))
        except UserError as error:
            faults += error.args
    if folder and not faults:
        content, labelled = files[0][1], first_annotations(files[0][1])
        names = [image["file_name"] for image in content["images"] if image["id"] in labelled]
        faults = faults_of_images(folder, names)
        if faults and content.get("has_backslashes"):
            faults = [f"{faults[0]} (the file has \\ in place of /)"]
    if val and len(files) == 2:
        faults = faults + faults_of_classes(*files)
    if faults:
        raise UserError(*faults)
    lines = [line for path, content in files for line in describe(path, content)]
    lines += [f"{folder} has all images that have a label"] if folder else []
    return lines + (["The training file has all classes of the validation images"] if val else [])


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("annotations", metavar="ANNOTATIONS", help="the file of the training images")
    add("images", metavar="IMAGES", nargs="?", help="their folder")
    add("--val", metavar="FILE", help="the file of the validation images")
    return parser.parse_args(argv)


def main():
    args = parse_arguments()
    gc.disable()  # it would look through millions of objects again and again
    try:
        lines, code = check(args.annotations, args.images, args.val), 0
    except UserError as error:
        lines, code = error.args, 2
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a name's characters
    for line in lines:  # a name in a file can hold anything, even what ends a line
        print("".join(c if c.isprintable() else "?" for c in line))
    sys.exit(code)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):  # end on Ctrl-C and in `| head` without words
        signal.signal(number, signal.SIG_DFL)
    main()
