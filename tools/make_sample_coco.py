#!/usr/bin/env python3
"""Draws a small data set in COCO's format and layout, for a first run without COCO.

    python tools/make_sample_coco.py FOLDER

    FOLDER/train2017/000000000001.jpg ...    FOLDER/annotations/instances_train2017.json
    FOLDER/val2017/...                       FOLDER/annotations/instances_val2017.json

Each image shows one large icon, which is its first annotation, and up to two small ones. Some
images are greyscale, some have no annotation, some annotations are crowds, as in COCO. An image
depends on the seed and its number alone. FOLDER appears when the set is complete.
"""

import argparse
import colorsys
import json
import math
import random
import signal
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

# COCO's 80 categories in the order of their ids, 1 to 90. Where a name is empty, COCO has none.
CATEGORIES = {
    "person": "person",
    "vehicle": "bicycle,car,motorcycle,airplane,bus,train,truck,boat",
    "outdoor": "traffic light,fire hydrant,,stop sign,parking meter,bench",
    "animal": "bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe",
    "accessory": ",backpack,umbrella,,,handbag,tie,suitcase",
    "sports": "frisbee,skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,"
    "surfboard,tennis racket",
    "kitchen": "bottle,,wine glass,cup,fork,knife,spoon,bowl",
    "food": "banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake",
    "furniture": "chair,couch,potted plant,bed,,dining table,,,toilet",
    "electronic": ",tv,laptop,mouse,remote,keyboard,cell phone",
    "appliance": "microwave,oven,toaster,sink,refrigerator",
    "indoor": ",book,clock,vase,scissors,teddy bear,hair drier,toothbrush",
}
SIZES = [(640, 480), (640, 427), (480, 640), (427, 640), (500, 375), (612, 612)]  # as in COCO
VERSION = 3  # raise this when the same arguments draw other images than before


# ---- Icons, drawn on a square of SIDE pixels. `colour` varies around the icon's own hue.

SIDE = 400
BLACK, WHITE = "#181818", "#f8f8f4"


def stop_sign(draw, colour):
    for radius, fill in ((199, WHITE), (184, colour)):
        draw.regular_polygon((200, 200, radius), 8, fill=fill)
    draw.text((200, 200), "STOP", WHITE, ImageFont.load_default(125), "mm", stroke_width=4)


def clock(draw, colour):
    draw.circle((200, 200), 195, colour)
    draw.circle((200, 200), 178, WHITE)
    draw.circle((200, 200), 166, colour)
    for hour in range(12):
        draw.line([around(150, hour / 12), around(124, hour / 12)], WHITE, 14)
    draw.line([around(90, 10 / 12), (200, 200), around(125, 2 / 12)], WHITE, 20, "curve")
    draw.circle((200, 200), 18, WHITE)


def pizza(draw, colour):
    draw.polygon([(30, 80), (370, 80), (200, 390)], colour)
    draw.rounded_rectangle((10, 30, 390, 100), 34, "#a8662a")
    for x, y in ((120, 150), (250, 165), (190, 255)):
        draw.ellipse((x - 38, y - 38, x + 38, y + 38), "#b8281c")
    for x, y in ((185, 130), (310, 125), (165, 205), (205, 325)):
        draw.ellipse((x - 11, y - 11, x + 11, y + 11), "#3f6e22")


def donut(draw, colour):
    draw.circle((200, 200), 192, "#b5803f")
    draw.circle((200, 200), 174, colour)
    for i in range(28):
        x, y = around(112 + 40 * (i % 2), i / 28)
        dx, dy = 11 * math.cos(i * 2.4), 11 * math.sin(i * 2.4)
        sprinkle = (WHITE, "#3a78e0", "#ffe14a")[i % 3]
        draw.line((x - dx, y - dy, x + dx, y + dy), sprinkle, 9)
    draw.circle((200, 200), 76, "#b5803f")
    draw.circle((200, 200), 62, (0, 0, 0, 0))


def traffic_light(draw, colour):
    draw.rounded_rectangle((105, 5, 295, 395), 45, BLACK, "#808080", 8)
    for y, lamp in ((75, "#ff2a1a"), (200, "#ffc21a"), (325, "#22e04a")):
        draw.circle((200, y), 52, lamp)


def umbrella(draw, colour):
    draw.line((200, 10, 200, 340), "#503018", 15)
    draw.arc((130, 290, 215, 385), 0, 180, "#503018", 15)
    draw.pieslice((5, 25, 395, 415), 180, 360, colour)
    draw.arc((130, 30, 270, 410), 180, 360, BLACK, 7)
    for left, right in ((5, 133), (133, 267), (267, 395)):
        draw.ellipse((left, 192, right, 248), (0, 0, 0, 0))
    draw.line((200, 192, 200, 260), "#503018", 15)


def sports_ball(draw, colour):
    draw.circle((200, 200), 190, colour, BLACK, 11)
    draw.line((200, 12, 200, 388), BLACK, 11)
    draw.line((12, 200, 388, 200), BLACK, 11)
    draw.arc((-190, 40, 130, 360), -56, 56, BLACK, 11)
    draw.arc((270, 40, 590, 360), 124, 236, BLACK, 11)


def tv(draw, colour):
    draw.line([(110, 5), (200, 90), (290, 5)], "#808080", 12)
    draw.rounded_rectangle((5, 80, 395, 345), 24, BLACK)
    draw.rectangle((30, 105, 370, 310), colour)
    draw.polygon([(30, 310), (150, 170), (225, 260), (290, 200), (370, 310)], "#20307a")
    draw.circle((315, 150), 24, "#ffe14a")
    draw.polygon([(120, 395), (160, 345), (240, 345), (280, 395)], BLACK)


def book(draw, colour):
    draw.polygon([(5, 80), (200, 110), (395, 80), (395, 355), (200, 385), (5, 355)], colour)
    for side in (-1, 1):
        page = [(200, 85), (200 + 100 * side, 52), (200 + 178 * side, 58)]
        page += [(200 + 178 * side, 328), (200 + 100 * side, 322), (200, 358)]
        draw.polygon(page, WHITE, "#909090")
        for y in range(100, 300, 34):
            draw.line((200 + 28 * side, y + 18, 200 + 152 * side, y), "#707070", 10)
    draw.line((200, 85, 200, 372), "#606060", 8)


def apple(draw, colour):
    draw.ellipse((25, 95, 265, 390), colour)
    draw.ellipse((135, 95, 375, 390), colour)
    draw.line([(200, 130), (205, 70), (235, 15)], "#503018", 20, "curve")
    draw.pieslice((215, 10, 345, 140), 190, 350, "#2f7d32")
    draw.arc((55, 130, 200, 300), 170, 250, WHITE, 14)


# Each icon's function, the id of its category, and the hue, saturation and value of its colour.
ICONS = [
    (traffic_light, 10, (0, 0, 0)),
    (stop_sign, 13, (0.98, 0.9, 0.8)),
    (umbrella, 28, (0.76, 0.7, 0.75)),
    (sports_ball, 37, (0.075, 0.85, 0.95)),
    (apple, 53, (0.3, 0.75, 0.75)),
    (pizza, 59, (0.14, 0.65, 0.95)),
    (donut, 60, (0.9, 0.55, 0.95)),
    (tv, 72, (0.62, 0.75, 0.95)),
    (book, 84, (0.06, 0.7, 0.45)),
    (clock, 85, (0.48, 0.95, 0.7)),
]


def around(radius, turn):
    """A point on a circle around the icon's middle, clockwise from the top."""
    angle = 2 * math.pi * turn
    return 200 + radius * math.sin(angle), 200 - radius * math.cos(angle)


def draw_icon(rng, icon, side):
    """An icon, RGBA, cut to its outline, about `side` pixels large; colour and angle vary."""
    function, _, (hue, saturation, value) = icon
    hue, value = hue + rng.uniform(-0.02, 0.02), value * rng.uniform(0.85, 1)
    colour = [round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, saturation, value)]
    image = Image.new("RGBA", (SIDE, SIDE))
    function(ImageDraw.Draw(image), tuple(colour))
    image = image.resize((side, side), Image.Resampling.BILINEAR)
    image = image.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR, expand=True)
    return image.crop(image.getbbox())


def draw_crowd(rng, icon, side):
    """Three small icons of one kind."""
    image = Image.new("RGBA", (2 * side, side))
    for n in range(3):
        image.paste(draw_icon(rng, icon, side // 2), (n * side // 2, rng.randrange(side // 3)))
    return image.crop(image.getbbox())


# ---- Images and annotations


def make_noise(seed):
    """What makes the files as heavy to decode as photographs."""
    return Image.frombytes("RGB", (900, 900), random.Random(seed).randbytes(3 * 900 * 900))


def background(rng, size):
    """A light, smooth image."""
    light = rng.randrange(190, 232)
    image = Image.new("RGB", (3, 3))
    image.putdata([tuple(light + rng.randrange(-16, 17) for _ in range(3)) for _ in range(9)])
    return image.resize(size, Image.Resampling.BICUBIC)


def paste(image, drawn, x, y):
    """Pastes an icon with its middle at (x, y). Returns its box in COCO's form, pixels."""
    left, top = round(x - drawn.width / 2), round(y - drawn.height / 2)
    image.paste(drawn, (left, top), drawn)
    right, bottom = min(left + drawn.width, image.width), min(top + drawn.height, image.height)
    left, top = max(left, 0), max(top, 0)
    return [left, top, right - left, bottom - top]


def draw_image(number, seed, noise):
    """Image `number` and its annotations."""
    rng = random.Random(f"{seed} {number}")
    width, height = rng.choice(SIZES)
    image = background(rng, (width, height))
    annotations = []
    objects = 1 + rng.randrange(3)
    if number % 53 == 5:  # some images have no annotation
        objects = 0
    for n in range(objects):
        crowd = n == 1 and number % 7 == 3
        if n == 0:  # the large icon; each category is as frequent
            icon, side = ICONS[number % len(ICONS)], rng.uniform(0.88, 1.05)
            x, y = rng.uniform(0.46, 0.54), rng.uniform(0.46, 0.54)
        else:  # in a corner
            icon, side = rng.choice(ICONS), rng.uniform(0.14, 0.2)
            x, y = rng.choice([0.12, 0.88]), rng.choice([0.12, 0.88])
        draw = draw_crowd if crowd else draw_icon
        drawn = draw(rng, icon, round(side * min(width, height)))
        box = paste(image, drawn, x * width, y * height)
        annotation = {"image_id": number, "category_id": icon[1], "iscrowd": int(crowd)}
        annotations.append(annotation | {"bbox": box, "area": box[2] * box[3]})
    x, y = rng.randrange(900 - width), rng.randrange(900 - height)
    image = Image.blend(image, noise.crop((x, y, x + width, y + height)), 0.08)
    if number % 41 == 2:  # a few are greyscale
        image = image.convert("L")
    return image, annotations


def draw_split(folder, split, seed, numbers):
    """Writes the images of a split, and its instances file."""
    (folder / split).mkdir()
    noise = make_noise(seed)
    images, annotations = [], []
    for number in numbers:
        image, found = draw_image(number, seed, noise)
        name = f"{number:012d}.jpg"
        image.save(folder / split / name, "JPEG", quality=91, subsampling="4:4:4")
        width, height = image.size
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        annotations += found
    for number, annotation in enumerate(annotations, 1):
        annotation["id"] = number
    content = {"images": images, "annotations": annotations, "categories": categories()}
    path = folder / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps(content) + "\n")


def categories():
    """COCO's list of {supercategory, id, name}."""
    named = [(group, name) for group in CATEGORIES for name in CATEGORIES[group].split(",")]
    return [
        {"supercategory": group, "id": number, "name": name}
        for number, (group, name) in enumerate(named, 1)
        if name
    ]


# ---- The set


def has_set(folder, record):
    """Whether the folder has the set that was made with these arguments."""
    path = folder / "sample.json"
    return path.is_file() and path.read_text() == record


def make_set(args, record):
    """Draws the set in a folder beside its own, which it becomes when it is complete."""
    parent = args.folder.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".unfinished", f"{args.folder.name}.", parent) as unfinished:
        folder = Path(unfinished) / "set"
        (folder / "annotations").mkdir(parents=True)
        numbers = range(1, 1 + args.images + args.val_images)
        draw_split(folder, "train2017", args.seed, numbers[: args.images])
        draw_split(folder, "val2017", args.seed, numbers[args.images :])
        (folder / "sample.json").write_text(record)
        try:
            folder.rename(args.folder)
        except OSError:
            if not has_set(args.folder, record):  # another process may have made it meanwhile
                raise


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="to make; left alone if it has this set")
    add("--images", type=int, default=512, metavar="N", help="for training (%(default)s)")
    add("--val_images", type=int, default=64, metavar="N", help="and validation (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="another one draws other images")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the unfinished folder is removed
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    settings = {name: vars(args)[name] for name in ("images", "val_images", "seed")}
    record = json.dumps({"version": VERSION} | settings) + "\n"
    try:
        if has_set(args.folder, record):
            print(f"{args.folder} has this set already")
            return
        if args.folder.exists() and any(args.folder.iterdir()):
            sys.exit(f"make_sample_coco.py: error: {args.folder}: holds something else: remove it")
        make_set(args, record)
    except OSError as error:
        sys.exit(f"make_sample_coco.py: error: {args.folder}: {error.strerror}")
    print(f"{args.folder}: {args.images} + {args.val_images} images")


if __name__ == "__main__":
    main()
