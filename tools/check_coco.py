#!/usr/bin/env python3
"""Says what keeps an annotation file in COCO's format, or its images, from being trained on.

    python tools/check_coco.py coco/annotations/instances_train2017.json coco/train2017 \\
        --val coco/annotations/instances_val2017.json

ANNOTATIONS is the file of the training images. IMAGES, if given, is their folder, or their packed
file: it must hold every labelled image. --val gives the file of the validation images: the
training file must have their classes, by name.

It ends with the first kind of fault that it finds: one line. If nothing is wrong, it prints how
many images each class has. An image's class is the category of its first annotation. No image is
decoded, but whether a file is an image, and whether a JPEG or PNG has its end, is looked at. With
--decode all are decoded, on all cores, and each one at which a training would end has a line.

Exit code: 0: no fault; 2: a fault, or wrong arguments.

It needs nothing but Python; --decode needs Pillow. prepare_coco.py reads its files with the
functions of this one.
"""

import argparse
import gc
import json
import os
import signal
import sys
import textwrap
import warnings
from collections import Counter
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path


class UserError(Exception):
    """What a user can fix, in one line."""


def raise_first(texts, advice=""):
    """Raises UserError with the first of these faults and the number of the others, if any."""
    if texts:
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        raise UserError(f"{texts[0]}{more}{advice}")


# ---- A file: what UserError says of it goes on after the file's name

UNUSED = ("segmentation", "bbox", "area", "width", "height")  # training does not need them
FIELDS = {
    "images": {"id": int, "file_name": str},
    "categories": {"id": int, "name": str},  # a whole number will do as a name
    "annotations": {"category_id": int, "image_id": int, "id": None},  # None: of any type
}
# Ids that belong together: all of such a pair may be text, or written as 1.0.
PAIRS = [
    [("images", "id"), ("annotations", "image_id")],
    [("categories", "id"), ("annotations", "category_id")],
]
WORDS = {int: "a whole number", str: "text", None: "one of its own"}
FORM = "Give an instances file of COCO's form, such as instances_train2017.json"
LVIS = "This is LVIS's form: write the last part of each coco_url as file_name"
NUMBERS = "Write ids alike in all three lists, without quotes"


def read_instances(path):
    """The content of an annotation file, without UNUSED. Raises UserError."""
    try:
        content = read_json(path)
        check_lists(content)
        check_fields(content)
        check_ids(content)
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


def check_lists(content):
    """There must be three lists of objects."""
    for name in FIELDS:
        entries = content.get(name) if isinstance(content, dict) else None
        is_list = isinstance(entries, list) and all(isinstance(each, dict) for each in entries)
        if not entries or not is_list:
            raise UserError(f" has no {name}: expected a list of objects. {FORM}")


def check_fields(content):
    """Each entry must have what FIELDS says."""
    alike = {}  # the type of such a pair
    for pair in PAIRS:
        types = {type(entry.get(key)) for name, key in pair for entry in content[name]}
        if len(types) == 1 and types <= {str, float}:
            alike |= dict.fromkeys(pair, *types)
    for name, fields in FIELDS.items():
        for key, kind in fields.items():
            kinds = {kind, int} if key == "name" else {kind}
            if (name, key) in alike:
                kinds = {alike[name, key]}
            elif (name, key) in PAIRS[1]:
                kinds = {int, float}
            wrong = [
                (index, entry)
                for index, entry in enumerate(content[name])
                if key not in entry or (kind and type(entry[key]) not in kinds) or entry[key] == ""
            ]
            texts = [
                f": {name}[{index}] {has(entry, key)}: expected {WORDS[kind]}"
                for index, entry in wrong
            ]
            advice = FORM
            if wrong and key == "file_name" and "coco_url" in wrong[0][1]:
                advice = LVIS
            if wrong and kind is int and isinstance(wrong[0][1].get(key), str):
                advice = NUMBERS
            raise_first(texts, f". {advice}")


def has(entry, key):
    """'has no id', 'has null as id'."""
    return f"has {shown(entry[key])} as {key}" if key in entry else f"has no {key}"


def shown(value):
    return json.dumps(value)[:60]


def check_ids(content):
    """Ids must be unique, a label the id of a category, and some image must have a label."""
    for name in ("images", "categories"):
        counts = Counter(entry["id"] for entry in content[name])
        texts = [
            f": {count} of its {name} have the id {shown(number)}: each needs one of its own"
            for number, count in counts.items()
            if count > 1
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


# ---- Images that are not there


def check_images(folder, names):
    """Raises UserError unless all images are in the folder."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder of images {folder}: check the path")
    lost = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if lost:
        advice = "check the path, where links lead, and capital letters"
        if "\\" in lost[0]:
            advice = "names have a backslash, as paths of Windows: write / in its place"
        refuse_lost(f"folder of images {folder}", names, lost, advice)


def check_packed(path, names):
    """Raises UserError unless a packed file of prepare_coco.py is whole and has all images."""
    size = os.path.getsize(path)
    try:
        with open(f"{path}.index", "rb") as lines:
            packed, end, _ = read_index(lines, size)
    except OSError as error:
        text = f"{path} is no folder, and no packed file: {path}.index cannot be read"
        raise UserError(f"{text}; tools/prepare_coco.py --packed makes both") from error
    if end != size:
        raise UserError(f"{path} and {path}.index do not belong together: make or copy both anew")
    lost = [name for name in names if name not in packed]
    if lost:
        refuse_lost(f"packed file {path}", names, lost, "make it anew from the images")


def read_index(lines, size):
    """What an index tells of the images that are whole in the first `size` bytes of its file.

    Their names, where the last of them ends, and bytes of their lines.
    """
    packed, end, length = set(), 0, 0
    with suppress(ValueError, TypeError):  # a line may be cut off, or damaged
        for line in lines:
            name, first, height, width = json.loads(line)
            is_whole = line.endswith(b"\n") and first + 3 * height * width <= size
            if first != end or not is_whole:
                break
            packed.add(name)
            end, length = first + 3 * height * width, length + len(line)
    return packed, end, length


def refuse_lost(where, names, lost, advice):
    text = f"lacks {len(lost)} of {len(names)} listed images, the first is {lost[0]}"
    raise UserError(f"the {where} {text}: {advice}")


# ---- Files that are no images, or not whole

# How a file begins that is no image, from some byte on; what it is; what to do.
NO_IMAGES = [
    (0, b"version https://git-lfs", "a pointer of git-LFS", "Run git lfs pull"),
    (0, b"<!doctype html", "an HTML page", "Fetch the image again"),
    (0, b"<html", "an HTML page", "Fetch the image again"),
    (4, b"ftyphei", "HEIC, which Pillow cannot decode", "Convert it to JPEG"),
    (4, b"ftypmif1", "HEIC, which Pillow cannot decode", "Convert it to JPEG"),
]
# How an image of a kind begins, and what is at its end.
ENDS = [("JPEG", b"\xff\xd8", b"\xff\xd9"), ("PNG", b"\x89PNG", b"IEND")]
TAIL = 1 << 12  # bytes: there the end is looked for
SCAN = b"\xff\xda"  # with it the data of a JPEG begin
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".heic")
AGAIN = "Fetch it again, or take it out of the annotation file"


def fault_of(path):
    """(Why a file is no whole image, what to do); None if nothing shows that."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if not head:
                return "is empty", AGAIN
            for place, begin, what, advice in NO_IMAGES:
                if head[place:].lower().startswith(begin):
                    return f"is {what}", advice
            for kind, begin, end in ENDS:
                if head.startswith(begin) and not has_end(file, kind, end):
                    return f"is cut off: no end of a {kind}", AGAIN
    except OSError as error:
        return f"cannot be read: {error.strerror}", AGAIN
    return None


def has_end(file, kind, end):
    """Whether an open image has this end. Anything may be behind it, such as a phone's film."""
    file.seek(max(0, os.path.getsize(file.name) - TAIL))
    if end in file.read():
        return True
    file.seek(0)
    data = file.read()
    if kind == "JPEG":  # a smaller image in its head has an end, too: before its own data
        return data.rfind(end) > data.rfind(SCAN)
    return end in data


def check_whole(paths):
    """Raises UserError with the first fault, and how many more images have the same one."""
    faults = {path: fault for path in paths if (fault := fault_of(path))}
    if faults:
        first = next(iter(faults.values()))
        same = [f"image {path} {first[0]}" for path, fault in faults.items() if fault == first]
        raise_first(same, f". {first[1]}")


def decode(path):
    """Why a training would end at an image; "" if it can be decoded."""
    from PIL import Image

    fault = fault_of(path)
    if fault:
        return fault[0]
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode[0] in "IF":
                return f"has pixels of more than 8 bits (mode {image.mode})"
    except Image.DecompressionBombError:
        return f"is too large: Pillow decodes at most {2 * Image.MAX_IMAGE_PIXELS:,} pixels"
    except Exception as error:  # damaged images raise errors of any type
        return f"cannot be decoded: {str(error).partition(' <_io')[0] or type(error).__name__}"
    return ""


def decode_all(paths):
    """Raises UserError with a line for each image at which a training would end."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError("--decode needs Pillow: pip install pillow") from error
    faults = []
    warnings.simplefilter("ignore")  # Pillow also warns of images that it can decode
    with ThreadPool(os.cpu_count()) as pool:  # Pillow lets others run while it decodes
        for done, fault in enumerate(pool.imap(decode, paths, chunksize=8), 1):
            if fault:
                faults.append(f"image {paths[done - 1]} {fault}")
            if done % 1000 == 0 or done == len(paths):
                print(f"{done} of {len(paths)} images decoded", file=sys.stderr)
    if faults:
        text = f"{len(faults)} of {len(paths)} images cannot be trained on. Fetch them again, "
        text += "convert them to JPEG of 8 bits, or take them out of the annotation file"
        raise UserError("\n".join([*faults, text]))


# ---- Classes, and what is there


def count_classes(content):
    """(name of a class, number of images that have it), of those that have any."""
    labels = Counter(label for _, label in first_annotations(content).values())
    used = [category for category in content["categories"] if category["id"] in labels]
    return [(category["name"], labels[category["id"]]) for category in used]


def describe(path, content):
    """Lines: how many images a file has, and of which classes."""
    used = sorted(count_classes(content), key=lambda row: -row[1])
    images, classes = len(content["images"]), len(content["categories"])
    unlabelled = images - sum(count for _, count in used)
    ids = {image["id"] for image in content["images"]}
    lost = sum(annotation["image_id"] not in ids for annotation in content["annotations"])
    text = f"annotations: {lost} have an image_id that no image has (training leaves them out)"
    return [
        f"annotation file {path}",
        f"images: {images}, without a label: {unlabelled} (training leaves them out)",
        *([text] if lost else []),
        f"classes: {classes}, without an image: {classes - len(used)}",
        *textwrap.wrap(", ".join(f"{name} {count}" for name, count in used), 100),
    ]


def describe_others(folder, contents):
    """Lines: image files of a folder that none of the annotation files names."""
    images = [image for content in contents for image in content["images"]]
    listed = {os.path.normpath(image["file_name"]) for image in images}
    others = []
    for where, _, files in os.walk(folder):
        for name in files:
            path = os.path.relpath(os.path.join(where, name), folder)
            if path.lower().endswith(SUFFIXES) and path not in listed:
                others.append(path)
    if not others:
        return []
    return [f"image files in {folder} that are not listed: {len(others)}, such as {min(others)}"]


# ---- The command


def check(annotations, folder=None, val=None, every=False):
    """Lines that say what is there. every: decode all images. Raises UserError."""
    content = read_instances(annotations)
    lines, contents = describe(annotations, content), [content]
    if folder:
        labelled = first_annotations(content)
        names = [image["file_name"] for image in content["images"] if image["id"] in labelled]
        if os.path.isfile(folder):
            check_packed(folder, names)
        else:
            check_images(folder, names)
            paths = [os.path.join(folder, name) for name in dict.fromkeys(names)]
            if every:
                decode_all(paths)
            else:
                check_whole(paths)
        whole = "" if os.path.isfile(folder) else "; none is empty, no JPEG or PNG is cut off"
        lines.append(f"{folder} has all images that have a label{whole}")
    if val:
        val_content = read_instances(val)
        contents.append(val_content)
        lines += describe(val, val_content)
        wanted = Counter(name for name, _ in count_classes(val_content))
        used = Counter(name for name, _ in count_classes(content))
        listed = Counter(category["name"] for category in content["categories"])
        known = {name: used[name] or listed[name] for name in wanted}
        for path, counts in ((val, wanted), (annotations, known)):
            texts = [
                f"annotation file {path}: {count} categories are called {name!r}, which has "
                "validation images: rename one, because names tell them apart"
                for name, count in counts.items()
                if count > 1
            ]
            raise_first(texts)
        texts = [
            f"annotation file {val}: it has images of the class {name!r}, which the training "
            "classes lack: give both files the same names"
            for name, count in known.items()
            if not count
        ]
        raise_first(texts)
        lines.append("The training file has all classes of the validation images")
    return lines + (describe_others(folder, contents) if folder else [])


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("annotations", metavar="ANNOTATIONS", help="the file of the training images")
    add("images", metavar="IMAGES", nargs="?", help="their folder, or their packed file")
    add("--decode", action="store_true", help="decode all images, on all cores")
    add("--val", metavar="FILE", help="the file of the validation images")
    args = parser.parse_args(argv)
    if args.decode and not os.path.isdir(args.images or ""):
        parser.error(f"--decode needs a folder of images, not {args.images or 'none'}")
    return args


def main():
    args = parse_arguments()
    gc.disable()  # it would look through millions of objects again and again
    try:
        lines, code = check(args.annotations, args.images, args.val, args.decode), 0
    except UserError as error:
        lines, code = [error], 2
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a name's characters
    print(*lines, sep="\n")
    sys.exit(code)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):  # end on Ctrl-C and in `| head` without words
        signal.signal(number, signal.SIG_DFL)
    main()
