#!/usr/bin/env python3
"""Write a small synthetic data set in COCO's own format and layout.

    python tools/make_sample_coco.py sample
    python tools/make_sample_coco.py full --annotations_only --images 118287 --annotations 860001

The first command writes what a run of `demo_coco_resnet18.py` needs, about a minute on two cores:

    sample/train2017/000000000123.jpg ...       sample/annotations/instances_train2017.json
    sample/val2017/...                          sample/annotations/instances_val2017.json
    sample/sample.json                          the arguments, written last

The second writes instances files of train2017's full size and no pictures, to time an index.

The pictures are real JPEG files of COCO's usual sizes, as heavy to decode as COCO's. Each shows
one large object, listed first among the picture's annotations, and smaller ones on top of it.
Colour and texture tell the category; eight categories stand first in 95 % of the pictures, so a
network trained from scratch learns something within two epochs. Some pictures are greyscale, some
have no annotation, some annotations are crowds: what real COCO has, and what breaks loaders.

The same arguments give the same bytes (with the same versions of numpy and Pillow). Needs nothing
but these two. Exit codes: 0 done, or there already; 1 error; 2 bad arguments; 128 + signal when
stopped.
"""

import argparse
import contextlib
import errno
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    from PIL import Image, ImageDraw
except ImportError as error:
    sys.exit(f"make_sample_coco.py: error: {error}; install it: pip install numpy pillow")

# Raise this when the same arguments give other files than before.
FORMAT = 1

# COCO's 80 categories with their ids (2017 release); ten ids between 1 and 90 are unused there.
CATEGORY_TABLE = """
person: 1 person
vehicle: 2 bicycle, 3 car, 4 motorcycle, 5 airplane, 6 bus, 7 train, 8 truck, 9 boat
outdoor: 10 traffic light, 11 fire hydrant, 13 stop sign, 14 parking meter, 15 bench
animal: 16 bird, 17 cat, 18 dog, 19 horse, 20 sheep, 21 cow, 22 elephant, 23 bear, 24 zebra
animal: 25 giraffe
accessory: 27 backpack, 28 umbrella, 31 handbag, 32 tie, 33 suitcase
sports: 34 frisbee, 35 skis, 36 snowboard, 37 sports ball, 38 kite, 39 baseball bat
sports: 40 baseball glove, 41 skateboard, 42 surfboard, 43 tennis racket
kitchen: 44 bottle, 46 wine glass, 47 cup, 48 fork, 49 knife, 50 spoon, 51 bowl
food: 52 banana, 53 apple, 54 sandwich, 55 orange, 56 broccoli, 57 carrot, 58 hot dog, 59 pizza
food: 60 donut, 61 cake
furniture: 62 chair, 63 couch, 64 potted plant, 65 bed, 67 dining table, 70 toilet
electronic: 72 tv, 73 laptop, 74 mouse, 75 remote, 76 keyboard, 77 cell phone
appliance: 78 microwave, 79 oven, 80 toaster, 81 sink, 82 refrigerator
indoor: 84 book, 85 clock, 86 vase, 87 scissors, 88 teddy bear, 89 hair drier, 90 toothbrush
"""


def parse_categories(table):
    """The table above as COCO's list of {supercategory, id, name}, in order of id."""
    categories = []
    for line in table.strip().splitlines():
        group, members = line.split(": ")
        for member in members.split(", "):
            number, name = member.split(" ", 1)
            categories.append({"supercategory": group, "id": int(number), "name": name})
    return categories


CATEGORIES = parse_categories(CATEGORY_TABLE)
CATEGORY_IDS = np.array([category["id"] for category in CATEGORIES])

# Categories that stand first in most pictures, with their share; the other 72 part the rest.
FIRST_SHARE = {1: 0.22, 3: 0.15, 18: 0.12, 62: 0.12, 17: 0.11, 7: 0.09, 59: 0.08, 16: 0.06}
# (width, height) in pixels and share, after train2017's commonest sizes.
SIZES = [
    (640, 480),
    (640, 427),
    (480, 640),
    (427, 640),
    (500, 375),
    (375, 500),
    (612, 612),
    (500, 333),
]
SIZE_SHARE = [0.45, 0.17, 0.12, 0.07, 0.07, 0.04, 0.04, 0.04]
LARGEST_SIDE = 640
# Categories of the smaller objects, cumulated: three in ten are persons, as in COCO.
OTHERS_UP_TO = np.cumsum(np.where(CATEGORY_IDS == 1, 0.3, 0.7 / 79))
OTHERS_UP_TO[-1] = 1.0  # whatever the sum was rounded to

ANNOTATIONS_PER_IMAGE = 860_001 / 118_287  # train2017
UNLABELLED_SHARE = 1_021 / 118_287  # train2017: pictures without an annotation
CROWD_SHARE = 10_052 / 860_001  # train2017
GREY_SHARE = 0.003  # a few in a thousand, as in COCO
SHUFFLE_BLOCK = 1_024  # pictures whose annotations are mixed, in memory


class Failure(Exception):
    """An error that the user can mend; its text is the one line that is shown."""


class Split(NamedTuple):
    """What is known of a split's pictures before any is drawn: one entry a picture."""

    name: str  # "train2017"
    number: int  # 0 or 1: keeps the splits' random numbers apart
    seed: int
    ids: np.ndarray  # (n,) image ids, ascending
    sizes: np.ndarray  # (n, 2) width and height, pixels
    firsts: np.ndarray  # (n,) category id of the first annotation, where counts is not 0
    counts: np.ndarray  # (n,) annotations
    grey: np.ndarray  # (n,) bool


class Item(NamedTuple):
    """One annotated object."""

    category_id: int
    outline: np.ndarray  # (points, 2) x and y, pixels
    segmentation: object  # as in the instances file: a list of polygons, or a run-length code
    area: float  # pixels
    bbox: list  # x, y, width, height, pixels
    iscrowd: int


def generator(purpose, seed, split=0, index=0):
    """Random numbers that depend on these four alone, so no picture depends on another."""
    # NOTE: always four numbers: numpy takes [5] and [5, 0] for the same seed.
    return np.random.default_rng(
        [("ids", "painter", "plan", "items", "paint").index(purpose), seed, split, index]
    )


def unlabelled_count(images):
    """How many of a split's pictures get no annotation: about 1 %, at least 1 of 4 or more."""
    return max(1, round(UNLABELLED_SHARE * images)) if images >= 4 else 0


def plan_split(name, number, seed, ids, annotations):
    """Choose size, label and number of annotations of each picture.

    `annotations` is the exact total, at least one for each picture that gets any.
    """
    rng = generator("plan", seed, number)
    n = len(ids)
    shuffled = rng.permutation(n)
    labelled = shuffled[unlabelled_count(n) :]
    # A skewed share for each: most pictures have a few annotations, some have dozens.
    share = rng.gamma(0.8, size=len(labelled)) + 0.02
    counts = np.zeros(n, dtype=np.int64)
    counts[labelled] = 1 + rng.multinomial(annotations - len(labelled), share / share.sum())
    grey = np.zeros(n, dtype=bool)
    grey[labelled[: max(1, round(GREY_SHARE * n))]] = True

    weight = np.array([FIRST_SHARE.get(number, 0.0) for number in CATEGORY_IDS.tolist()])
    weight[weight == 0] = (1 - weight.sum()) / np.count_nonzero(weight == 0)
    firsts = rng.choice(CATEGORY_IDS, n, p=weight / weight.sum())
    sizes = np.array(SIZES)[rng.choice(len(SIZES), n, p=SIZE_SHARE)]
    return Split(name, number, seed, ids, sizes, firsts, counts, grey)


def make_items(rng, split, index, forced_crowd):
    """The objects of one picture as a list of Item, the large one first."""
    count = int(split.counts[index])
    if count == 0:
        return []
    size = split.sizes[index]
    categories = CATEGORY_IDS[np.searchsorted(OTHERS_UP_TO, rng.random(count))]
    centre = rng.uniform(0.05, 0.95, (count, 2)) * size
    reach = math.sqrt(size[0] * size[1]) * np.exp(
        rng.uniform(-4.4, -2.1, (count, 1)) + rng.uniform(-0.4, 0.4, (count, 2))
    )
    reach = np.maximum(reach, 3.0)
    points = np.clip(rng.lognormal(2.81, 0.65, count), 4, 150).astype(int)
    power = np.full(count, 2.2)  # nearly elliptic
    crowd = rng.random(count) < CROWD_SHARE
    crowd[-1] |= forced_crowd
    # The first object fills most of the picture, so that most random crops show it.
    categories[0] = split.firsts[index]
    centre[0] = rng.uniform(0.45, 0.55, 2) * size
    reach[0] = rng.uniform(0.44, 0.55, 2) * size
    points[0] += 10
    power[0] = 5.0  # nearly rectangular

    items = polygon_items(rng, categories, centre, reach, points, power, size)
    for i in np.flatnonzero(crowd):
        items[i] = crowd_item(rng, int(categories[i]), centre[i], reach[i], *size.tolist())
    return items


def polygon_items(rng, categories, centre, reach, points, power, size):
    """Objects given as one polygon each, with as many corners as `points` says.

    A corner lies at its angle on a superellipse |x|^p + |y|^p = 1 scaled to `reach` (half width
    and height, pixels), pulled in by up to a quarter so that the edge is rough, and kept inside
    the picture. Angles ascend, so the outline does not cross itself.
    """
    owner = np.repeat(np.arange(len(points)), points)
    ends = np.cumsum(points)
    starts = ends - points
    step = np.arange(len(owner)) - starts[owner]
    angle = 2 * np.pi * (step + rng.uniform(0.1, 0.9, len(owner))) / points[owner]
    unit = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    p = power[owner]
    radius = (np.abs(unit) ** p[:, None]).sum(axis=1) ** (-1 / p)
    wave = rng.uniform(0, 2 * np.pi, (2, len(points)))[:, owner]
    radius *= 0.87 + 0.065 * np.sin(2 * angle + wave[0]) + 0.065 * np.sin(5 * angle + wave[1])
    corners = centre[owner] + reach[owner] * unit * radius[:, None]
    corners = np.round(np.clip(corners, 0, size), 2)

    low = np.minimum.reduceat(corners, starts)
    boxes = np.round(np.hstack([low, np.maximum.reduceat(corners, starts) - low]), 2).tolist()
    following = np.arange(1, len(owner) + 1)
    following[ends - 1] = starts
    x, y = corners.T
    cross = x * y[following] - x[following] * y
    areas = np.round(np.abs(np.add.reduceat(cross, starts)) / 2, 4).tolist()
    flat = corners.ravel().tolist()
    spans = zip(categories.tolist(), starts.tolist(), ends.tolist(), areas, boxes, strict=True)
    return [
        Item(category, corners[start:end], [flat[2 * start : 2 * end]], area, box, 0)
        for category, start, end, area, box in spans
    ]


def crowd_item(rng, category_id, centre, reach, width, height):
    """A crowd: an area given as COCO's uncompressed run-length code.

    The code counts pixels column by column, from the top left, outside and inside in turn. Here
    each column has one run, which leaves at least the first and the last row free.
    """
    left = int(np.clip(centre[0] - reach[0], 0, width - 2))
    right = int(np.clip(centre[0] + reach[0], left + 1, width - 1))
    columns = np.arange(left, right)
    across = (columns + 0.5 - left) / (right - left) * 2 - 1
    half = reach[1] * (1 - across**4) * rng.uniform(0.8, 1.0, len(columns))
    top = np.clip(centre[1] - half, 1, height - 3).astype(int)
    bottom = np.maximum(np.clip(centre[1] + half, 2, height - 1).astype(int), top + 1)
    edges = np.stack([columns * height + top, columns * height + bottom], axis=1).ravel()
    counts = np.diff(edges, prepend=0, append=width * height).tolist()
    outline = np.concatenate(
        [np.stack([columns, top], axis=1), np.stack([columns, bottom], axis=1)[::-1]]
    ).astype(float)
    box = [left, int(top.min()), right - left, int(bottom.max() - top.min())]
    code = {"counts": counts, "size": [height, width]}
    return Item(category_id, outline, code, int((bottom - top).sum()), box, 1)


class Painter:
    """Draws pictures; holds the noise and the textures that they share.

    Slices of ready-made noise, at another offset in each picture, cost a tenth of fresh noise.
    """

    FIELD = LARGEST_SIDE + 128  # side of a texture, pixels

    def __init__(self, seed):
        rng = generator("painter", seed)
        side = self.FIELD
        clouds = np.zeros((side, side), dtype=np.float32)
        for cells, strength in ((4, 1), (9, 0.7), (20, 0.5), (48, 0.35), (110, 0.3), (256, 0.25)):
            grid = Image.fromarray(rng.normal(size=(cells, cells)).astype(np.float32))
            clouds += strength * np.asarray(grid.resize((side, side), Image.Resampling.BICUBIC))
        self.clouds = to_bytes(clouds / 4 + 0.5)
        self.warp = (clouds * 5).astype(np.float32)
        self.grain = rng.normal(size=(side, side, 3)).astype(np.float32)
        self.textures = {}

    def texture(self, category_id):
        """The category's pattern, (FIELD, FIELD) uint8, made when first wanted."""
        if category_id not in self.textures:
            rank = int(np.searchsorted(CATEGORY_IDS, category_id))
            order = list(FIRST_SHARE).index(category_id) if category_id in FIRST_SHARE else rank
            y, x = np.mgrid[: self.FIELD, : self.FIELD].astype(np.float32)
            angle, period = order * 0.7, 14.0 + 9 * (order % 5)
            u = (x * math.cos(angle) + y * math.sin(angle) + self.warp) * (2 * math.pi / period)
            v = (y * math.cos(angle) - x * math.sin(angle) + self.warp) * (2 * math.pi / period)
            pattern = {
                0: np.sin(u),
                1: np.sin(u) * np.sin(v) * 1.3,
                2: np.maximum(np.cos(u), np.cos(v)),
            }[order % 3]
            self.textures[category_id] = to_bytes(0.5 + 0.32 * pattern + 0.1 * (self.warp / 5))
        return self.textures[category_id]

    def ramp(self, rng, category_id):
        """(256, 3) uint8: the colours, dark to light, that the category's pattern takes here."""
        if category_id in FIRST_SHARE:
            hue = list(FIRST_SHARE).index(category_id) / len(FIRST_SHARE)
            vivid = 0.75
        else:
            hue = int(np.searchsorted(CATEGORY_IDS, category_id)) * 0.618034 % 1
            vivid = 0.5
        return colour_ramp(
            hue + rng.uniform(-0.03, 0.03),
            vivid * rng.uniform(0.75, 1.0),
            rng.uniform(0.15, 0.35),
            rng.uniform(0.75, 1.0),
        )

    def cut(self, rng, field, width, height):
        """A (height, width) piece of a field, from a random place."""
        y, x = rng.integers(0, self.FIELD - height + 1), rng.integers(0, self.FIELD - width + 1)
        return field[y : y + height, x : x + width]

    def paint(self, rng, width, height, items, grey):
        """The picture, as a Pillow image of mode RGB, or L where `grey`."""
        ramp = colour_ramp(
            rng.uniform(), rng.uniform(0.0, 0.35), rng.uniform(0.0, 0.3), rng.uniform(0.6, 1.0)
        )
        picture = Image.fromarray(ramp[self.cut(rng, self.clouds, width, height)])
        for item in items:
            left, top = np.floor(item.outline.min(axis=0)).astype(int)
            w, h = np.ceil(item.outline.max(axis=0)).astype(int) - (left, top)
            if w < 1 or h < 1:
                continue
            colours = self.ramp(rng, item.category_id)
            patch = colours[self.cut(rng, self.texture(item.category_id), w, h)]
            mask = Image.new("L", (int(w), int(h)))
            ImageDraw.Draw(mask).polygon((item.outline - (left, top)).ravel().tolist(), fill=255)
            picture.paste(Image.fromarray(patch), (int(left), int(top)), mask)
        pixels = np.asarray(picture, dtype=np.float32)
        grain = self.cut(rng, self.grain, width, height)
        pixels = pixels + grain * np.float32(rng.uniform(1.5, 8.5))
        np.clip(pixels, 0, 255, out=pixels)
        picture = Image.fromarray(pixels.astype(np.uint8))
        return picture.convert("L") if grey else picture


def to_bytes(field):
    """A field of 0..1 as uint8."""
    return np.clip(field * 255, 0, 255).astype(np.uint8)


def colour_ramp(hue, vivid, dark, light):
    """(256, 3) uint8: one hue (0..1 round the circle) from lightness `dark` to `light` (0..1)."""
    wheel = np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
    colour = 1 - vivid + vivid * wheel
    level = np.linspace(dark, light, 256)[:, None]
    return to_bytes(level * colour)


def image_record(split, index):
    width, height = split.sizes[index].tolist()
    number = int(split.ids[index])
    clock = f"{number % 24:02d}:{number % 60:02d}:00"
    file_name = f"{number:012d}.jpg"
    # The host name is one that can never exist: no picture of this id is to be had anywhere.
    return {
        "license": 1,
        "file_name": file_name,
        "coco_url": f"http://images.sample.invalid/{split.name}/{file_name}",
        "height": height,
        "width": width,
        "date_captured": f"2013-11-{1 + number % 28:02d} {clock}",
        "flickr_url": f"http://pictures.sample.invalid/{number % 9973}/{number:010d}_z.jpg",
        "id": number,
    }


def annotation_text(item, image_id, number):
    """The annotation as JSON; str() of a list of numbers is JSON too, and several times faster."""
    shape = json.dumps(item.segmentation) if item.iscrowd else str(item.segmentation)
    return (
        f'{{"segmentation": {shape}, "area": {item.area}, "iscrowd": {item.iscrowd}, '
        f'"image_id": {image_id}, "bbox": {item.bbox}, "category_id": {item.category_id}, '
        f'"id": {number}}}'
    )


def file_head():
    """The file's part before its images, open at the end."""
    head = {
        "info": {
            "description": "Synthetic sample in the format of COCO 2017",
            "url": "",
            "version": "1.0",
            "year": 2017,
            "contributor": "make_sample_coco.py",
            "date_created": "2017/09/01",
        },
        "licenses": [
            {
                "url": "http://creativecommons.org/publicdomain/zero/1.0/",
                "id": 1,
                "name": "CC0 1.0 Universal",
            }
        ],
    }
    return json.dumps(head)[:-1]


def write_split(folder, split, first_number, painter):
    """Write a split's instances file, and its pictures where there is a painter.

    Annotations are numbered from `first_number`. The file is written as it grows: what is held
    in memory does not depend on its length, but for the few numbers a picture that `split` has.
    """
    crowded = int(np.argmax(split.counts))  # gets a crowd for certain
    if painter:
        (folder / split.name).mkdir()
    path = folder / "annotations" / f"instances_{split.name}.json"
    with open(path, "w", encoding="ascii") as out:
        out.write(file_head() + ', "images": [')
        for index in range(len(split.ids)):
            out.write((", " if index else "") + json.dumps(image_record(split, index)))
        out.write('], "annotations": [')
        number, separator = first_number, ""
        for start in range(0, len(split.ids), SHUFFLE_BLOCK):
            block = []
            for index in range(start, min(start + SHUFFLE_BLOCK, len(split.ids))):
                image_id = int(split.ids[index])
                rng = generator("items", split.seed, split.number, index)
                items = make_items(rng, split, index, forced_crowd=index == crowded)
                # In COCO's files the annotations of a picture do not stand together. Ascending
                # keys mix them with other pictures' and leave the large object the first.
                for key, item in zip(np.sort(rng.random(len(items))), items, strict=True):
                    block.append((key, number, annotation_text(item, image_id, number)))
                    number += 1
                if painter:
                    save_picture(folder / split.name, split, index, items, painter)
            for _, _, text in sorted(block):
                out.write(separator + text)
                separator = ", "
        out.write('], "categories": ' + json.dumps(CATEGORIES) + "}")


def save_picture(folder, split, index, items, painter):
    rng = generator("paint", split.seed, split.number, index)
    width, height = split.sizes[index].tolist()
    picture = painter.paint(rng, width, height, items, bool(split.grey[index]))
    # Quality and full colour resolution as in most of COCO's files: they set the cost of decoding.
    options = {} if picture.mode == "L" else {"subsampling": "4:4:4"}
    picture.save(
        folder / f"{int(split.ids[index]):012d}.jpg", quality=int(rng.integers(88, 95)), **options
    )


def make_sample(folder, args):
    """Write the whole data set, its record last, into an existing empty folder."""
    (folder / "annotations").mkdir()
    rng = generator("ids", args.seed)
    total = args.images + args.val_images
    ids = rng.choice(max(600_000, 2 * total), total, replace=False) + 1
    painter = None if args.annotations_only else Painter(args.seed)
    plans = [
        ("train2017", ids[: args.images], args.annotations),
        ("val2017", ids[args.images :], round(args.val_images * ANNOTATIONS_PER_IMAGE)),
    ]
    first_number = 1
    for number, (name, numbers, annotations) in enumerate(plans):
        if len(numbers):
            split = plan_split(name, number, args.seed, np.sort(numbers), annotations)
            write_split(folder, split, first_number, painter)
            first_number += annotations
    record = {"arguments": arguments_of(args), "files": count_files(folder)}
    (folder / "sample.json").write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    return record


def arguments_of(args):
    return {
        "format": FORMAT,
        "images": args.images,
        "val_images": args.val_images,
        "annotations": args.annotations,
        "seed": args.seed,
        "annotations_only": args.annotations_only,
    }


def count_files(folder):
    """{subfolder: [files, bytes]} of a data set: shows files that are missing or cut short."""
    found = {}
    for name in ("train2017", "val2017", "annotations"):
        if (folder / name).is_dir():
            sizes = [entry.stat().st_size for entry in os.scandir(folder / name)]
            found[name] = [len(sizes), sum(sizes)]
    return found


def is_complete(folder, args):
    """Whether the folder holds the sample that these arguments give."""
    try:
        record = json.loads((folder / "sample.json").read_text(encoding="ascii"))
        return record["arguments"] == arguments_of(args) and record["files"] == count_files(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def folder_that_appears_complete(out):
    """A temporary folder beside `out`, renamed to it at the end, removed on any error or signal.

    Only SIGKILL or a crash of the machine can leave it behind; its name then says what it is
    (.NAME.*.unfinished), and `out` still does not exist.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".unfinished", dir=out.parent))
    try:
        yield work
        mask = os.umask(0)
        os.umask(mask)
        work.chmod(0o777 & ~mask)  # mkdtemp makes a private folder
        os.rename(work, out)  # also takes the place of an empty folder
    finally:
        # A second signal must not cut the clean-up short.
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        shutil.rmtree(work, ignore_errors=True)


def check_out(out, args):
    """True where the sample is there already; raises Failure where `out` cannot be written."""
    if not out.exists():
        nearest = next(parent for parent in out.parents if parent.exists())
        if not nearest.is_dir():
            raise Failure(f"cannot write {out}: {nearest} is a file, not a folder")
        return False
    if not out.is_dir():
        raise Failure(f"{out} is a file, not a folder; give another OUT")
    if not any(out.iterdir()):
        if out == Path.cwd():
            raise Failure(f"{out} is the current folder, which cannot be replaced; name one in it")
        return False
    if is_complete(out, args):
        return True
    raise Failure(
        f"{out} is not empty and is not a complete sample made with these arguments; "
        "remove it, or give another OUT"
    )


def whole_number(least, most):
    """A parser for argparse: a whole number from least to most."""

    def parse(text):
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, where argparse would print the usage too."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def parse_arguments(argv):
    parser = Parser(
        prog="make_sample_coco.py",
        description="Write a small synthetic data set in COCO's own format and layout.",
        epilog="An OUT that holds this sample already is left as it is (exit code 0); any other "
        "that is not empty is refused. The same arguments give the same bytes.",
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder to make; it must not exist, or be empty"
    )
    parser.add_argument(
        "--images",
        type=whole_number(4, 10**6),
        default=480,
        metavar="N",
        help="training images, at least 4 (default: 480, about 75 MB)",
    )
    parser.add_argument(
        "--val_images",
        "--val-images",
        type=whole_number(0, 10**6),
        default=64,
        metavar="N",
        help="validation images; 0 writes no validation set (default: 64)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="other seeds give other images (default: 0)",
    )
    parser.add_argument(
        "--annotations",
        type=whole_number(1, 10**8),
        metavar="N",
        help="annotations of the training images in all, at least one for each "
        "image that has any (default: 7.27 an image, train2017's mean)",
    )
    parser.add_argument(
        "--annotations_only",
        "--annotations-only",
        action="store_true",
        help="write the instances files, the same as without this option, but no "
        "images (about 520 bytes an annotation)",
    )
    args = parser.parse_args(argv)
    if args.annotations is None:
        args.annotations = round(args.images * ANNOTATIONS_PER_IMAGE)
    labelled = args.images - unlabelled_count(args.images)
    if args.annotations < labelled:
        parser.error(
            f"argument --annotations: {args.annotations} is too few: {labelled} of "
            f"{args.images} images have at least one each"
        )
    return args


def stop_on_signal(number, _frame):
    raise SystemExit(128 + number)


def run(args):
    started = time.perf_counter()
    out = args.out.resolve()
    try:
        if check_out(out, args):
            print(f"{args.out}: this sample is there already, complete; nothing to do")
            return
        with folder_that_appears_complete(out) as work:
            record = make_sample(work, args)
    except OSError as error:
        # Another process may have made the same sample meanwhile.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not check_out(out, args):
            raise Failure(f"cannot write {out}: {error.strerror or error}") from error
        print(f"{args.out}: another process has made this sample meanwhile, complete")
        return
    size = sum(size for _, size in record["files"].values())
    print(
        f"{args.out}: {args.images} + {args.val_images} images"
        f"{' (annotations only)' * args.annotations_only}, {size / 1e6:.1f} MB, "
        f"{args.annotations} annotations for training, {time.perf_counter() - started:.1f} s"
    )


def main(argv=None):
    args = parse_arguments(argv)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop_on_signal)
    try:
        run(args)
    except Failure as failure:
        sys.exit(f"make_sample_coco.py: error: {failure}")
    except SystemExit as stop:
        print(
            "make_sample_coco.py: error: stopped on a signal; nothing was left behind",
            file=sys.stderr,
        )
        raise stop


if __name__ == "__main__":
    main()
