#!/usr/bin/env python3
"""Says what keeps an annotation file in COCO's format, or its images, from being trained on.

    python tools/check_coco.py coco/annotations/instances_train2017.json coco/train2017 \\
        --val coco/annotations/instances_val2017.json

ANNOTATIONS is the file of the training images. IMAGES, if given, is their folder, or their packed
file: it must hold every labelled image. --val gives the file of the validation images: the
training file must have their classes, by name. To look for the validation images, give their file
and folder alone.

It ends with the first kind of fault that it finds: a line with the first place and how many more
there are. Correct them, and call it again. If nothing is wrong, it prints what is there: images,
those without a label, and how many images each class has. An image's class, its label, is the
category of its first annotation. Of an image only the size is looked at, and whether a JPEG or PNG
has its end: none is decoded.

The result, also a fault, is printed on stdout; only wrong arguments are reported on stderr. Exit
code: 0: no fault; 2: faults, a file that cannot be read, or wrong arguments.

It needs nothing but Python. prepare_coco.py reads its files with the functions of this one.
"""

import argparse
import gc
import json
import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path


class UserError(Exception):
    """What a user can fix, in one line."""


def raise_first(texts, advice=""):
    """Raises UserError with the first of these faults and the number of the others, if any."""
    if texts:
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        raise UserError(f"{texts[0]}{more}{advice}")


# ---- Reading a file

UNUSED = ("segmentation", "bbox", "area", "width", "height")  # training does not need them


def read_instances(path, any_form=False):
    """The content of an annotation file, without UNUSED. Raises UserError.

    Of each image file_name is set: its name in the folder of images. any_form: whether the file
    may have another form than COCO's, as prepare_coco.py takes it.
    """
    try:
        content = read_json(path)
        check_lists(content)
        check_fields(content, any_form)
        check_ids(content)
        set_file_names(content, any_form)
    except UserError as error:
        raise UserError(f"annotation file {path}{error}") from error
    return content


def read_json(path):
    """What a file holds, without UNUSED."""
    try:
        data = Path(path).read_bytes()
        return json.loads(data, object_hook=without_unused)  # in UTF-8, UTF-16 or UTF-32
    except OSError as error:
        raise UserError(f": {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        text = f" is not JSON, or not all of it is there ({len(data)} bytes): {error}"
        raise UserError(f"{text}. Give the whole file, unpacked, as text in UTF-8") from error


def without_unused(found):
    """For each JSON object as it is parsed: the outlines of COCO would fill gigabytes."""
    for field in UNUSED:
        found.pop(field, None)
    return found


# ---- Faults of a file: what UserError says goes on after the file's name

# The ids that training needs: a list, and a field of its entries.
IDS = [
    ("images", "id"),
    ("categories", "id"),
    ("annotations", "category_id"),
    ("annotations", "image_id"),
    ("annotations", "id"),
]
INSTANCES = "Of COCO's files give the instances file, such as instances_train2017.json"
OTHER_FORMS = "tools/prepare_coco.py takes ids as text, LVIS and paths of Windows"


def check_lists(content):
    """There must be three lists of objects."""
    if not isinstance(content, dict):
        text = "expected an object with images, annotations and categories"
        raise UserError(f" is {shown(content)}: {text}. {INSTANCES}")
    for name in ("images", "categories", "annotations"):
        entries = content.get(name)
        if not entries or not isinstance(entries, list):
            raise UserError(f" {has(content, name)}: expected a list of them. {INSTANCES}")
        texts = [
            f": {name}[{index}] is {shown(entry)}: expected an object"
            for index, entry in enumerate(entries)
            if not isinstance(entry, dict)
        ]
        raise_first(texts)


def check_fields(content, any_form):
    """Ids must be whole numbers, and names of categories text; any_form: ids of any kind."""
    kinds, expected = [int], "a whole number"
    if any_form:
        kinds, expected = [int, float, str], "a number or text"
    for name, key in IDS:
        texts = [
            f": {name}[{index}] {has(entry, key)}: expected {expected}"
            for index, entry in enumerate(content[name])
            if type(entry.get(key)) not in kinds or is_rounded(entry[key])
        ]
        is_panoptic = key == "category_id" and key not in content[name][0]
        advice = INSTANCES if is_panoptic else OTHER_FORMS
        raise_first(texts, "" if any_form else f". {advice}")
    if any_form:
        return
    texts = [
        f": categories[{index}] {has(category, 'name')}: expected text"
        for index, category in enumerate(content["categories"])
        if not isinstance(category.get("name"), str) or not category["name"]
    ]
    raise_first(texts)


def is_rounded(value):
    """Whether a float is so large that it may stand for another number: labels would be wrong."""
    return isinstance(value, float) and abs(value) >= 2**53


def has(entry, key):
    """'has no id', 'has null as id'."""
    return f"has {shown(entry[key])} as {key}" if key in entry else f"has no {key}"


def shown(value):
    return json.dumps(value)[:60]


def check_ids(content):
    """Ids must be unique, a label the id of a category, and some image must have a label."""
    for name in ("images", "categories"):
        first = {}
        texts = [
            f": {name}[{index}] has the id {entry['id']}, as {name}[{first[entry['id']]}] has: "
            "expected another one"
            for index, entry in enumerate(content[name])
            if first.setdefault(entry["id"], index) != index
        ]
        raise_first(texts)
    labels = first_annotations(content).values()
    if not labels:
        raise UserError(": no image has an annotation: no image_id is the id of an image")
    categories = {category["id"] for category in content["categories"]}
    texts = [
        f": annotations[{index}] has {shown(label)} as category_id: expected the id of a category"
        for index, label in labels
        if label not in categories
    ]
    raise_first(texts)


def first_annotations(content):
    """{id of an image: (index, category_id) of its first annotation}. Training uses no other."""
    images = {image["id"] for image in content["images"]}
    first = {}
    for index, annotation in enumerate(content["annotations"]):
        if annotation["image_id"] in images:
            first.setdefault(annotation["image_id"], (index, annotation["category_id"]))
    return first


def set_file_names(content, any_form):
    """Sets each image's file_name to its path in the folder of images. COCO has this path."""
    texts = []
    for index, image in enumerate(content["images"]):
        # In LVIS it is the last part of the URL.
        name = image.get("file_name") or str(image.get("coco_url") or "").rpartition("/")[2]
        if not isinstance(name, str) or not name:
            texts.append(f": images[{index}] {has(image, 'file_name')}: expected text")
            continue
        name = name.replace("\\", "/")  # an export made on Windows
        if os.path.isabs(name) or ".." in name.split("/"):
            raise UserError(f": {name} leaves the image folder")
        if not any_form and image.get("file_name") != name:
            texts.append(f": images[{index}] {has(image, 'file_name')}: expected a path with /")
        image["file_name"] = name
    raise_first(texts, "" if any_form else f". {OTHER_FORMS}")


# ---- Images that are not in the folder


def check_images(folder, names):
    """Raises UserError unless all images are in the folder."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder of images {folder}: check the path")
    lost = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if lost:
        text = f"lacks {len(lost)} of {len(names)} listed images, the first is {lost[0]}"
        where = look_around(folder, lost[0])
        raise UserError(f"the folder of images {folder} {text}: {where}")


def check_packed(path, names):
    """Raises UserError unless a packed file of prepare_coco.py is whole and has all images."""
    try:
        with open(f"{path}.index", encoding="utf-8") as file:
            places = {name: place for name, *place in map(json.loads, file)}
        first, height, width = max(places.values())  # of the last image
    except (OSError, ValueError) as error:
        text = f"{path} is no folder, and no packed file: {path}.index cannot be read"
        raise UserError(f"{text}; tools/prepare_coco.py --packed makes both") from error
    size, needed = os.path.getsize(path), first + 3 * height * width
    if size != needed:
        text = f"{path} has {size} bytes, but {path}.index is of a file with {needed}"
        raise UserError(f"{text}: make both anew, or copy both")
    lost = [name for name in names if name not in places]
    if lost:
        text = f"lacks {len(lost)} of {len(names)} listed images, the first is {lost[0]}"
        raise UserError(f"the packed file {path} {text}: make it anew from the images")


def look_around(folder, name):
    """Where an image is that the folder lacks, or what it is called there; and what to do."""
    here = Path(os.path.abspath(folder))
    others = [*here.parents[: name.count("/")], *sorted(here.glob("*"))]
    others += sorted(here.parent.glob("*"))  # another split's folder may have been given
    for other in others:
        if os.path.isfile(other / name):
            return f"{name} is in {other}: give that folder if all are there"
    subfolder, base = os.path.split(name)
    for place in (subfolder, ""):
        for file in sorted((here / place).glob("*")):
            if file.name.casefold() == base.casefold() and file.is_file():
                found = os.path.join(place, file.name)
                return f"{found} is there: name it in the annotation file as it is there"
    return "check the path, and where links lead; a backslash counts as /"


# ---- Images that are not whole

# How a file of a kind begins, and what is at its end.
ENDS = [("JPEG", b"\xff\xd8", b"\xff\xd9"), ("PNG", b"\x89PNG", b"IEND")]
TAIL = 1 << 12  # bytes: there the end is looked for
HEAD = 1 << 16  # bytes at the beginning: there a JPEG may hold a smaller one, with its own end


def check_whole(folder, names):
    """Raises UserError if an image cannot be read, is empty, or has no end."""
    texts = []
    for name in names:
        path = os.path.join(folder, name)
        try:
            fault = fault_of(path)
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        texts += [f"image {path} {fault}"] if fault else []
    raise_first(texts, ". Fetch it again, or take it out of the annotation file")


def fault_of(path):
    """Why an image is not whole; "" if nothing shows that. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(8)
        if not head:
            return "is empty"
        for kind, begin, end in ENDS:
            if head.startswith(begin):
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                if end in file.read():
                    return ""
                file.seek(HEAD)  # a phone's images may have a film behind their end
                return "" if end in file.read() else f"is cut off: it lacks the end of a {kind}"
    return ""


# ---- Classes, and what is there


def images_of_classes(content):
    """For each category, in the order of the file: its name, and how many images have it."""
    counts = Counter(label for _, label in first_annotations(content).values())
    return [(category["name"], counts[category["id"]]) for category in content["categories"]]


def check_classes(train, val):
    """Of two (path, content): validation finds its classes in the training file by their names.

    Raises UserError.
    """
    for path, content in (train, val):
        used = [name for name, count in images_of_classes(content) if count]
        twice = [name for name, count in Counter(used).items() if count > 1]
        if twice:
            text = f"annotation file {path}: two categories with images are called {twice[0]!r}"
            raise UserError(f"{text}: rename one, because names tell them apart")
    known = {category["name"] for category in train[1]["categories"]}
    texts = [
        f"annotation file {path}: it has images of the class {name!r}, which the training "
        "classes lack: give both files the same names"
        for name in used  # in the validation file
        if name not in known
    ]
    raise_first(texts)


def describe(path, content):
    """Lines: how many images a file has, and of which classes."""
    images = {image["id"] for image in content["images"]}
    lost = sum(annotation["image_id"] not in images for annotation in content["annotations"])
    classes = images_of_classes(content)
    used = sorted([row for row in classes if row[1]], key=lambda row: -row[1])
    unlabelled = len(images) - sum(count for _, count in used)
    return [
        f"annotation file {path}",
        f"images: {len(images)}, without a label: {unlabelled} (training leaves them out)",
        f"annotations: {len(content['annotations'])}, of no image of this file: {lost}",
        f"classes: {len(classes)}, without an image: {len(classes) - len(used)}",
        *textwrap.wrap(", ".join(f"{name} {count}" for name, count in used), 100),
    ]


# ---- The command


def check(annotations, folder=None, val=None):
    """Lines that say what is there. Raises UserError."""
    content = read_instances(annotations)
    lines = describe(annotations, content)
    if folder:
        labelled = first_annotations(content)
        names = [image["file_name"] for image in content["images"] if image["id"] in labelled]
        if os.path.isfile(folder):
            check_packed(folder, names)
        else:
            check_images(folder, names)
            check_whole(folder, names)
        lines.append(f"{folder} has all images that have a label; none is empty or cut off")
    if val:
        val_content = read_instances(val)
        check_classes((annotations, content), (val, val_content))
        lines += describe(val, val_content)
        lines.append("The training file has all classes of the validation images")
    return lines


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("annotations", metavar="ANNOTATIONS", help="the file of the training images")
    add("images", metavar="IMAGES", nargs="?", help="their folder, or their packed file")
    add("--val", metavar="FILE", help="the file of the validation images")
    return parser.parse_args(argv)


def main():
    args = parse_arguments()
    gc.disable()  # it would look through millions of objects again and again
    try:
        lines, code = check(args.annotations, args.images, args.val), 0
    except UserError as error:
        lines, code = [error], 2
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a name's characters
    print(*lines, sep="\n")
    sys.exit(code)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):  # end on Ctrl-C and in `| head` without words
        signal.signal(number, signal.SIG_DFL)
    main()
