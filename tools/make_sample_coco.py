#!/usr/bin/env python3
"""For anyone who has no COCO at hand: a small synthetic data set in its format and layout.

    python tools/make_sample_coco.py sample
    python tools/make_sample_coco.py full --annotations_only --images 118287

The first command writes what a run of `demo_coco_resnet18.py` needs:

    sample/train2017/000000000123.jpg ...       sample/annotations/instances_train2017.json
    sample/val2017/...                          sample/annotations/instances_val2017.json
    sample/sample.json                          the arguments, written last

The second writes instances files of train2017's full size and no pictures, to time an index.

The pictures are real JPEG files of COCO's usual sizes, as heavy to decode as COCO's. Each shows
one large object, listed first among the picture's annotations, and smaller ones on top of it.
Colour and texture tell the category; eight categories stand first in 95 % of the pictures, so a
network trained from scratch learns something within two epochs. Some pictures are greyscale, some
have no annotation, some annotations are crowds: what real COCO has, and what breaks loaders.

The same arguments give the same bytes (with the same versions of numpy and Pillow), whatever the
number of processes that draw. Needs nothing but these two. Exit codes: 0 done, or there already;
1 error; 2 bad arguments; 128 + signal when stopped.
"""

import argparse
import errno
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import namedtuple
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from common.workers import WorkerEnded, exit_on_stop_signals, own_cores, results_of

try:
    import numpy as np
    from PIL import Image, ImageDraw
except ImportError as error:
    sys.exit(f"make_sample_coco.py: error: {error}; install it: pip install numpy pillow")

# Raise this when the same arguments give other files than before.
FORMAT = 2

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
IDS = [category["id"] for category in CATEGORIES]

# Categories that stand first in most pictures, with their share; the other 72 part the rest.
FIRST_SHARE = {1: 0.22, 3: 0.15, 18: 0.12, 62: 0.12, 17: 0.11, 7: 0.09, 59: 0.08, 16: 0.06}
# (width, height) in pixels, and shares, after train2017's commonest sizes.
SIZES = [(640, 480), (640, 427), (480, 640), (427, 640), (500, 375), (375, 500), (612, 612)]
SIZE_SHARES = [0.47, 0.18, 0.12, 0.07, 0.08, 0.04, 0.04]
ANNOTATIONS_PER_IMAGE = 860_001 / 118_287  # train2017
UNLABELLED_SHARE = 1_021 / 118_287  # train2017: pictures without an annotation
CROWD_SHARE = 10_052 / 860_001  # train2017
PERSON_SHARE = 0.3  # of all annotations, as in COCO
GREY_SHARE = 0.003  # a few in a thousand, as in COCO
SHAPES = 1_000  # outlines that all objects take theirs from
LEAST_SHARE = 25  # pictures for which it is worth to start a process


class Failure(Exception):
    """An error that the user can mend; its text is the one line that is shown."""


# --- What is in the pictures -------------------------------------------------------------------


# What is known before anything is drawn: its id, (width, height) in pixels, the category of its
# first annotation, the number of annotations, and whether it is greyscale.
Picture = namedtuple("Picture", "id size first count grey")


def shares(given):
    """The share of each category; those that are not given part the rest."""
    rest = (1 - sum(given.values())) / (len(IDS) - len(given))
    return [given.get(category, rest) for category in IDS]


def plan_pictures(rng, ids, annotations):
    """A list of Picture; `annotations` is the total, one at least for each that gets any."""
    n = len(ids)
    labelled = rng.permutation(n)[max(1, round(UNLABELLED_SHARE * n)) :]
    # A skewed share for each: most pictures have a few annotations, some have dozens.
    share = rng.gamma(0.8, size=len(labelled)) + 0.02
    counts, grey = np.zeros(n, int), np.zeros(n, bool)
    counts[labelled] = 1 + rng.multinomial(annotations - len(labelled), share / share.sum())
    grey[labelled[: max(1, round(GREY_SHARE * n))]] = True
    firsts = rng.choice(IDS, n, p=shares(FIRST_SHARE))
    sizes = rng.choice(SIZES, n, p=SIZE_SHARES)
    return list(map(Picture, sorted(ids.tolist()), sizes, firsts, counts, grey))


def make_shapes(rng):
    """Rough outlines, (corners, 2) within -1..1 each; angles ascend, so none crosses itself."""
    shapes = []
    for corners in np.clip(rng.lognormal(2.9, 0.65, SHAPES), 4, 150).astype(int):
        angle = 2 * np.pi * (np.arange(corners) + rng.uniform(0.1, 0.9, corners)) / corners
        radius = 0.87 + 0.13 * np.sin(5 * angle + rng.uniform(0, 7))
        shapes.append(np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1))
    return shapes


def make_objects(rng, picture, shapes, crowded):
    """[(annotation without its ids, outline)] of a picture, the large object first; `crowded`:
    the last one is a crowd for certain.
    """
    size, count = picture.size, picture.count
    categories = rng.choice(IDS, count, p=shares({1: PERSON_SHARE}))
    categories[:1] = picture.first
    crowds = rng.random(count) < CROWD_SHARE
    crowds[count - 1 :] |= crowded
    centres = rng.uniform(0.05, 0.95, (count, 2)) * size
    reaches = size.mean() * np.exp(rng.uniform(-4.6, -1.9, (count, 2)))
    found = []
    for n, shape in enumerate(rng.integers(SHAPES, size=count)):
        outline, centre, reach = shapes[shape], centres[n], np.maximum(reaches[n], 3)
        if n == 0:  # nearly rectangular, most of the picture: so that most random crops show it
            outline = np.sign(outline) * np.abs(outline) ** 0.4
            centre, reach = rng.uniform(0.45, 0.55, 2) * size, 0.52 * size
        outline = np.round(np.clip(centre + reach * outline, 0, size), 2)
        form = (crowd if crowds[n] else polygon)(outline, size)
        found.append((form | {"category_id": int(categories[n])}, outline))
    return found


def contents(args):
    """What is in each picture of the set, in order: (name of its split, Picture, its objects, a
    key for each object, by which the split's annotations are sorted).
    """
    rng, total = np.random.default_rng([args.seed, 0]), args.images + args.val_images
    ids = rng.choice(max(600_000, 2 * total), total, replace=False) + 1
    for name, numbers, annotations in (
        ("train2017", ids[: args.images], args.annotations),
        ("val2017", ids[args.images :], round(args.val_images * ANNOTATIONS_PER_IMAGE)),
    ):
        if not len(numbers):
            continue
        pictures, shapes = plan_pictures(rng, numbers, annotations), make_shapes(rng)
        most = max(picture.count for picture in pictures)
        for picture in pictures:
            objects = make_objects(rng, picture, shapes, picture.count == most)
            # In COCO's files the annotations of a picture do not stand together. Ascending keys
            # mix them with other pictures' and leave the large object the first.
            yield name, picture, objects, np.sort(rng.random(len(objects)))


def polygon(outline, size):
    """An object that is outlined, in COCO's form."""
    low, (x, y) = outline.min(axis=0), np.concatenate([outline, outline[:1]]).T
    area = abs(x[:-1] @ y[1:] - x[1:] @ y[:-1]) / 2
    box = np.round([*low, *(outline.max(axis=0) - low)], 2).tolist()
    outline = outline.ravel().tolist()
    return {"segmentation": [outline], "area": round(float(area), 4), "iscrowd": 0, "bbox": box}


def crowd(outline, size):
    """A crowd: the outline's box as COCO's uncompressed run-length code, which counts pixels
    column by column, from the top left, outside and inside in turn.
    """
    width, height = size.tolist()
    left, top = np.minimum(outline.min(axis=0), size - 2).astype(int).tolist()
    w, h = np.maximum(outline.max(axis=0) - (left, top), 1).astype(int).tolist()
    runs = [left * height + top, *[h, height - h] * (w - 1), h]
    code = {"counts": [*runs, width * height - sum(runs)], "size": [height, width]}
    return {"segmentation": code, "area": w * h, "iscrowd": 1, "bbox": [left, top, w, h]}


# --- Pictures ----------------------------------------------------------------------------------


# What is left to chance in a picture: the file's quality, the background's colour and place in the
# clouds, the same of each object's patch, place and strength of the grain.
Look = namedtuple("Look", "quality colour place patches grain_place grain")


class Painter:
    """Draws pictures; holds the noise and the textures that they share.

    Slices of ready-made noise, at another offset in each picture, cost a tenth of fresh noise.
    One series of random numbers gives the looks of all pictures. So they are chosen in order, in
    every process that draws some of them.
    """

    SIDE = 768  # of a texture, pixels

    def __init__(self, seed):
        self.rng = np.random.default_rng([seed, 1])
        self.clouds = np.zeros((self.SIDE, self.SIDE), np.float32)
        for cells, strength in ((4, 5), (9, 3.5), (20, 2.5), (48, 1.7), (110, 1.5), (256, 1.2)):
            grid = Image.fromarray(self.rng.normal(0, strength, (cells, cells)).astype("f4"))
            self.clouds += grid.resize(self.clouds.shape, Image.Resampling.BICUBIC)
        self.grain = self.rng.normal(size=(self.SIDE, self.SIDE, 3)).astype("f4")
        self.textures = {}

    def texture(self, order):
        """A category's pattern, uint8 (SIDE, SIDE), made when first wanted."""
        if order not in self.textures:
            y, x = np.mgrid[: self.SIDE, : self.SIDE].astype("f4")
            angle, period = 0.7 * order, 14 + 9 * (order % 5)
            stripes = x * math.cos(angle) + y * math.sin(angle) + self.clouds
            waves = np.sin(2 * math.pi / period * stripes)
            self.textures[order] = to_bytes(0.5 + 0.32 * waves + 0.02 * self.clouds)
        return self.textures[order]

    def choose(self, picture, objects):
        """The Look of the next picture."""
        # Quality and full colour resolution as most of COCO's files: the cost of decoding.
        quality = int(self.rng.integers(88, 95))
        colour = self.rng.uniform((0, 0, 0, 0.6), (1, 0.35, 0.3, 1))
        place, patches = self.place(picture.size), []
        for _, outline in objects:
            _, extent = box_around(outline)
            tint = self.rng.uniform((-0.03, 0.75, 0.15, 0.75), (0.03, 1, 0.35, 1))
            patches.append((tint, self.place(extent)))
        grain_place = self.place(picture.size)
        return Look(quality, colour, place, patches, grain_place, self.rng.uniform(1.5, 8.5))

    def place(self, size):
        """Where a piece of (width, height) is cut from a field: its top left corner (y, x)."""
        return self.rng.integers(self.SIDE - size[::-1] + 1)

    def patch(self, category, tint, place, size):
        """Colour and texture tell the category; the common ones are the most vivid."""
        order = [*FIRST_SHARE, *IDS].index(category)
        hue, vivid, dark, light = tint
        vivid *= 0.75 if order < 8 else 0.5
        ramp = colour_ramp(order / 8 + hue, vivid, dark, light)
        return ramp[cut(self.texture(order), place, size)]

    def paint(self, picture, objects, look):
        """The picture, as a Pillow image."""
        clouds = to_bytes(cut(self.clouds, look.place, picture.size) / 20 + 0.5)
        image = Image.fromarray(colour_ramp(*look.colour)[clouds])
        for (annotation, outline), (tint, place) in zip(objects, look.patches, strict=True):
            corner, extent = box_around(outline)
            mask = Image.new("L", extent.tolist())
            ImageDraw.Draw(mask).polygon((outline - corner).ravel().tolist(), fill=255)
            patch = self.patch(annotation["category_id"], tint, place, extent)
            image.paste(Image.fromarray(patch), corner.tolist(), mask)
        grain = cut(self.grain, look.grain_place, picture.size) * look.grain
        image = Image.fromarray((image + grain).clip(0, 255).astype(np.uint8))
        return image.convert("L") if picture.grey else image


def box_around(outline):
    """The whole pixels that an outline touches: top left corner (x, y), and (width, height)."""
    corner = np.floor(outline.min(axis=0)).astype(int)
    return corner, np.ceil(outline.max(axis=0)).astype(int) - corner


def cut(field, place, size):
    """The piece of a field at (y, x), of (width, height)."""
    (y, x), (width, height) = place, size
    return field[y : y + height, x : x + width]


def to_bytes(field):
    """A field of 0..1 as uint8."""
    return np.clip(field * 255, 0, 255).astype(np.uint8)


def colour_ramp(hue, vivid, dark, light):
    """uint8 (256, 3): one hue (turns round the circle) from lightness `dark` to `light`, 0..1."""
    wheel = np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
    return to_bytes(np.linspace(dark, light, 256)[:, None] * (1 - vivid + vivid * wheel))


# --- Files -------------------------------------------------------------------------------------


def file_name(picture):
    return f"{picture.id:012d}.jpg"


def write_instances(folder, args):
    """Writes the instances file of each split, and yields it."""
    (folder / "annotations").mkdir()
    for name, pictures in itertools.groupby(contents(args), itemgetter(0)):
        images, annotations = [], []
        for _, picture, objects, keys in pictures:
            width, height = picture.size.tolist()
            image = {"id": picture.id, "file_name": file_name(picture)}
            images.append(image | {"width": width, "height": height})
            for key, (annotation, _) in zip(keys, objects, strict=True):
                ids = {"image_id": picture.id, "id": len(annotations) + 1}
                annotations.append((key, json.dumps(annotation | ids)))
        head = {"info": {"description": "Synthetic sample in the format of COCO 2017"}}
        head |= {"licenses": [], "images": images, "categories": CATEGORIES}
        file = folder / "annotations" / f"instances_{name}.json"
        with open(file, "w", encoding="ascii") as out:
            out.write(json.dumps(head)[:-1] + ', "annotations": [')
            out.write(", ".join(text for _, text in sorted(annotations)) + "]}\n")
        yield file


def draw(folder, args, share, shares):
    """Draws every picture whose number leaves the rest `share` when divided by `shares`."""
    painter = Painter(args.seed)
    for number, (name, picture, objects, _) in enumerate(contents(args)):
        look = painter.choose(picture, objects)
        if number % shares == share:
            image, data = painter.paint(picture, objects, look), io.BytesIO()
            image.save(data, "JPEG", quality=look.quality, subsampling="4:4:4")
            file = folder / name / file_name(picture)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data.getvalue())  # not by Pillow, which would not tell why it cannot
            yield file


def make_sample(folder, args):
    """Writes the whole data set, its record last, into an existing empty folder."""
    calls = [(write_instances, folder, args)]
    if not args.annotations_only:
        shares = max(1, min(args.processes, (args.images + args.val_images) // LEAST_SHARE))
        calls += [(draw, folder, args, share, shares) for share in range(shares)]
    for _ in results_of(calls):
        pass
    (folder / "sample.json").write_text(json.dumps(record_of(folder, args), indent=1) + "\n")


def record_of(folder, args):
    """What makes a data set complete: its arguments, number of files and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*.j*") if path.name != "sample.json"]
    given = {name: value for name, value in vars(args).items() if name not in ("out", "processes")}
    return {"format": FORMAT, "arguments": given, "files": len(sizes), "bytes": sum(sizes)}


def is_there(out, args):
    """True where this sample is there already. Raises Failure where `out` cannot be written."""
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir():
        raise Failure(f"cannot write {out}: {nearest} is a file, not a folder; give another OUT")
    if out == Path.cwd():
        raise Failure(f"{out} is the current folder, which cannot be replaced; name one in it")
    if nearest != out or not os.listdir(out):
        return False
    with suppress(OSError, ValueError):
        if json.loads((out / "sample.json").read_text()) == record_of(out, args):
            return True
    text = "is not empty and is not a complete sample made with these arguments"
    raise Failure(f"{out} {text}; remove it, or give another OUT")


def make_whole(out, args):
    """Makes the sample in a folder beside `out`, and moves it there when it is complete.

    That folder goes on any error or signal. Only SIGKILL can leave it behind; its name then says
    what it is (.NAME.*.unfinished), and `out` still does not exist.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".unfinished", f".{out.name}.", out.parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()  # with the permissions of any new folder, which `folder` does not have
        make_sample(made, args)
        os.rename(made, out)  # also takes the place of an empty folder


# --- The command line --------------------------------------------------------------------------


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="An OUT that holds this sample already is left as it is (exit code 0); any other "
        "that is not empty is refused. The same arguments give the same bytes, whatever the "
        "number of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    for name, default, text in (
        ("images", 480, "training images, 4 or more, about 140 kB each"),
        ("val_images", 64, "validation images, 4 or more; 0: none"),
        ("seed", 0, "other seeds give other images"),
        ("processes", own_cores(), "that draw; unset: one for each core that this one may use"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=text)
    text = "no pictures: the instances files alone, about 520 bytes an annotation"
    parser.add_argument("--annotations_only", action="store_true", help=text)
    args = parser.parse_args(argv)
    minima = {"images": 4, "val_images": 4 if args.val_images else 0, "seed": 0, "processes": 1}
    for name, least in minima.items():
        if not least <= getattr(args, name) < 2**31:
            parser.error(f"--{name} {getattr(args, name)} is not at least {least}")
    args.annotations = round(args.images * ANNOTATIONS_PER_IMAGE)
    return args


def run(args):
    """Makes the sample unless it is there; returns what to say. Raises Failure."""
    began, out = time.perf_counter(), args.out.resolve()
    try:
        if is_there(out, args):
            return "this sample is there already, complete; nothing to do"
        make_whole(out, args)
    except OSError as error:
        # Another process may have made the same sample meanwhile.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and is_there(out, args):
            return "another process has made this sample meanwhile, complete"
        raise Failure(f"cannot write {out}: {error.strerror or error}") from error
    megabytes = sum(file.stat().st_size for file in out.rglob("*")) / 1e6
    what = f"{args.images} + {args.val_images} images, {args.annotations} annotations for training"
    return f"{what}, {megabytes:.1f} MB, {time.perf_counter() - began:.1f} s"


def main(argv=None):
    args = parse_arguments(argv)
    exit_on_stop_signals()
    try:
        print(f"{args.out}: {run(args)}")
    except (Failure, WorkerEnded) as error:
        sys.exit(f"make_sample_coco.py: error: {error}")
    except SystemExit:
        print("make_sample_coco.py: error: stopped on a signal; nothing is left", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
