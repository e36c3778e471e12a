#!/usr/bin/env python3
"""Draws a small data set in COCO's format and layout, for a first run without COCO.

    python tools/make_sample_coco.py FOLDER

    FOLDER/train2017/000000000001.jpg ...    FOLDER/annotations/instances_train2017.json
    FOLDER/val2017/...                       FOLDER/annotations/instances_val2017.json

Each image shows one large icon, which is its first annotation, and up to two small ones. Some
images are greyscale, and some have no annotation, as in COCO. An image depends on its number
alone. FOLDER appears when the set is complete.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw, ImageEnhance, ImageFont

# COCO's 80 categories in the order of their ids, 1 to 90. Where a name is empty, COCO has none.
NAMES = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,,"
    "backpack,umbrella,,,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
    "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,,wine glass,cup,fork,"
    "knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,"
    "chair,couch,potted plant,bed,,dining table,,,toilet,,tv,laptop,mouse,remote,keyboard,"
    "cell phone,microwave,oven,toaster,sink,refrigerator,,book,clock,vase,scissors,teddy bear,"
    "hair drier,toothbrush"
)
IDS = {name: number for number, name in enumerate(NAMES.split(","), 1) if name}
MOST_PROCESSES = 16
SIZES = [(640, 480), (640, 427), (480, 640), (427, 640), (500, 375), (612, 612)]  # as in COCO


# ---- Icons, on a square of SIDE pixels. Each function has the name of its category.

SIDE = 400
BLACK, WHITE, GREY, BROWN = "#181818", "#f8f8f4", "#808080", "#a8662a"
RED, ORANGE, YELLOW, GREEN = "#d0201c", "#f08a1c", "#ffd23a", "#2fae42"
BLUE, PURPLE, PINK = "#3a78e0", "#8a3ab8", "#f06eb4"


def traffic_light(draw):
    draw.rounded_rectangle((105, 5, 295, 395), 45, BLACK, GREY, 8)
    for y, lamp in ((75, RED), (200, YELLOW), (325, GREEN)):
        draw.circle((200, y), 52, lamp)


def stop_sign(draw):
    draw.regular_polygon((200, 200, 199), 8, fill=RED, outline=WHITE, width=15)
    draw.text((200, 200), "STOP", WHITE, ImageFont.load_default(125), "mm", stroke_width=4)


def umbrella(draw):
    draw.line((200, 10, 200, 340), BLACK, 15)
    draw.arc((115, 290, 207, 385), 0, 180, BLACK, 15)
    draw.pieslice((5, 25, 395, 415), 180, 360, PURPLE)
    draw.arc((130, 30, 270, 410), 180, 360, BLACK, 7)


def sports_ball(draw):
    draw.circle((200, 200), 190, ORANGE, BLACK, 11)
    draw.line((200, 12, 200, 388), BLACK, 11)
    draw.arc((-190, 40, 130, 360), -56, 56, BLACK, 11)
    draw.arc((270, 40, 590, 360), 124, 236, BLACK, 11)


def kite(draw):
    draw.polygon([(200, 5), (330, 150), (200, 295), (70, 150)], GREEN)
    draw.polygon([(200, 5), (330, 150), (70, 150)], YELLOW)
    draw.line([(200, 295), (240, 330), (190, 360), (230, 395)], BLACK, 10, "curve")


def cup(draw):
    draw.arc((230, 110, 390, 290), -90, 90, BLUE, 40)
    draw.rounded_rectangle((20, 40, 310, 370), 60, BLUE)
    draw.ellipse((35, 20, 295, 100), BROWN, WHITE, 15)


def pizza(draw):
    draw.polygon([(30, 80), (370, 80), (200, 390)], YELLOW)
    draw.rounded_rectangle((10, 30, 390, 100), 34, BROWN)
    for middle in ((120, 150), (250, 165), (190, 255)):
        draw.circle(middle, 38, RED)


def donut(draw):
    draw.circle((200, 200), 192, None, BROWN, 130)
    draw.circle((200, 200), 176, None, PINK, 100)
    for x, y in ((80, 130), (150, 60), (260, 60), (320, 150), (330, 250), (230, 340), (90, 280)):
        draw.line((x - 8, y - 12, x + 8, y + 12), WHITE, 10)


def tv(draw):
    draw.line([(110, 5), (200, 90), (290, 5)], GREY, 12)
    draw.rounded_rectangle((5, 80, 395, 385), 24, BLACK)
    draw.rectangle((35, 110, 365, 355), BLUE)


def clock(draw):
    draw.circle((200, 200), 195, WHITE, GREEN, 30)
    for middle in ((200, 65), (335, 200), (200, 335), (65, 200)):
        draw.circle(middle, 14, BLACK)
    draw.line([(130, 160), (200, 200), (275, 105)], BLACK, 20, "curve")


ICONS = [traffic_light, stop_sign, umbrella, sports_ball, kite, cup, pizza, donut, tv, clock]


# ---- Images and annotations


def draw_object(rng, image, icon, size, middle):
    """Draws an icon. Returns its annotation, without ids; the box is in COCO's form, in pixels.

    size: a share of the image's shorter side. middle: shares of its width and height.
    """
    drawn = Image.new("RGBA", (SIDE, SIDE))
    icon(ImageDraw.Draw(drawn))
    drawn = ImageEnhance.Brightness(drawn).enhance(rng.uniform(0.8, 1.1))
    side = round(size * min(image.size))
    drawn = drawn.resize((side, side)).rotate(rng.uniform(-25, 25), expand=True)
    x, y = (round(share * pixels) for share, pixels in zip(middle, image.size, strict=True))
    layer = Image.new("RGBA", image.size)
    layer.paste(drawn, (x - drawn.width // 2, y - drawn.height // 2))
    image.paste(layer, mask=layer)
    left, top, right, bottom = layer.getbbox()
    box = [left, top, right - left, bottom - top]
    category_id = IDS[icon.__name__.replace("_", " ")]
    return {"category_id": category_id, "iscrowd": 0, "bbox": box, "area": box[2] * box[3]}


def draw_image(number):
    """Image `number` and its annotations, without ids."""
    rng = random.Random(number)
    width, height = rng.choice(SIZES)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(175, 245) for _ in range(3)))
    annotations = []
    if number % 53 != 5:  # some images have no annotation
        icon = ICONS[number % len(ICONS)]  # each category is as frequent
        size, middle = rng.uniform(0.5, 1.0), (rng.uniform(0.46, 0.54), rng.uniform(0.46, 0.54))
        annotations.append(draw_object(rng, image, icon, size, middle))
        for _ in range(rng.randrange(3)):
            corner = rng.choice((0.12, 0.88)), rng.choice((0.12, 0.88))
            annotations.append(draw_object(rng, image, rng.choice(ICONS), 0.17, corner))
    noise = Image.frombytes("RGB", image.size, rng.randbytes(3 * width * height))
    image = Image.blend(image, noise, 0.08)  # as heavy to decode as a photograph
    if number % 41 == 2:  # a few are greyscale
        image = image.convert("L")
    return image, annotations


def draw_file(folder, number):
    """Writes an image. Returns its entry in an instances file, and its annotations without ids."""
    image, annotations = draw_image(number)
    name, (width, height) = f"{number:012d}.jpg", image.size
    image.save(folder / name, "JPEG", quality=91, subsampling="4:4:4")
    return {"id": number, "file_name": name, "width": width, "height": height}, annotations


def draw_split(pool, folder, split, numbers):
    """Writes the images of a split, and its instances file."""
    (folder / split).mkdir()
    images, annotations = [], []
    for image, found in pool.map(partial(draw_file, folder / split), numbers, chunksize=4):
        images.append(image)
        for annotation in found:
            numbered = {"id": len(annotations) + 1, "image_id": image["id"]} | annotation
            annotations.append(numbered)
    categories = [{"id": number, "name": name} for name, number in IDS.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = folder / "annotations" / f"instances_{split}.json"
    path.write_text(json.dumps(content) + "\n")


def end_with_parent():
    """In each process that draws: it ends with the command, by which it is stopped."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def cores():
    """How many this process may use; not every system can tell them from the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# ---- The set


def is_set(folder):
    return (folder / "annotations").is_dir()


def make_set(folder, images, val_images):
    """Draws the set in a folder beside its own, which it becomes when it is complete."""
    parent = folder.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".unfinished", f"{folder.name}.", parent) as unfinished:
        made = Path(unfinished) / "set"
        (made / "annotations").mkdir(parents=True)
        with ProcessPoolExecutor(min(cores(), MOST_PROCESSES), None, end_with_parent) as pool:
            draw_split(pool, made, "train2017", range(1, 1 + images))
            draw_split(pool, made, "val2017", range(1 + images, 1 + images + val_images))
        try:
            made.rename(folder)
        except OSError:
            if not is_set(folder):  # another process may have made it meanwhile
                raise


def stop(number, _):
    """Ends the command, so that the unfinished folder is removed: a second signal is ignored."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="to make; left as it is if it has a set")
    add("--images", type=int, default=512, metavar="N", help="for training (%(default)s)")
    add("--val_images", type=int, default=64, metavar="N", help="and validation (%(default)s)")
    args = parser.parse_args()
    if min(args.images, args.val_images) < 1:
        parser.error("--images and --val_images are at least 1")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        if is_set(args.folder):
            print(f"{args.folder} is there, and left as it is")
            return
        if args.folder.exists() and any(args.folder.iterdir()):
            sys.exit(f"make_sample_coco.py: error: {args.folder}: holds something else: remove it")
        make_set(args.folder, args.images, args.val_images)
    except OSError as error:
        sys.exit(f"make_sample_coco.py: error: {args.folder}: {error.strerror}")
    except BrokenExecutor:
        sys.exit("make_sample_coco.py: error: a process that draws was killed: start again")
    print(f"{args.folder}: {args.images} + {args.val_images} images")


if __name__ == "__main__":
    main()
