"""tools/make_sample_coco.py: the real command; its files are read with pycocotools and Pillow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

import make_sample_coco
from support.datasets import COCO_IDS, digests, read_coco
from support.processes import FACTOR, ROOT

SMALL = ["--images", "6", "--val_images", "2"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tools" / "make_sample_coco.py", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*map(str, command)], **pipes)


def make(*arguments: object, expect: int = 0) -> str:
    """The one line that the command prints."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60 * FACTOR)
    assert process.returncode == expect and (out + err).count("\n") == 1, out + err
    return out + err


@pytest.mark.guards("sample-boxes")
def test_layout_categories_and_annotations_are_those_of_coco(sample):
    split = "train2017"
    coco = read_coco(sample, split)
    assert [*coco.cats] == COCO_IDS
    assert coco.cats[67] == {"id": 67, "name": "dining table", "supercategory": "furniture"}
    assert len(os.listdir(sample / split)) == len(coco.imgs) == 96
    assert len(os.listdir(sample / "val2017")) == len(read_coco(sample, "val2017").imgs) == 20
    for image in coco.imgs.values():
        with Image.open(sample / split / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"]) and file.format == "JPEG"
    for annotation in coco.anns.values():
        image = coco.imgs[annotation["image_id"]]
        x, y, width, height = annotation["bbox"]
        assert min(x, y) >= 0 and min(width, height) > 0
        assert x + width <= image["width"] and y + height <= image["height"]
        assert annotation["area"] == width * height and annotation["category_id"] in coco.cats


def test_some_images_are_grey_and_some_unlabelled(sample):
    coco = read_coco(sample, "train2017")
    modes = Counter(Image.open(path).mode for path in (sample / "train2017").iterdir())
    assert {*modes} == {"L", "RGB"} and modes["L"] < 10
    assert 0 < len(coco.imgs) - len(coco.imgToAnns) < 10


def test_first_annotation_is_the_large_icon_and_all_icons_are_as_frequent(sample):
    firsts = Counter()
    for first, *others in read_coco(sample, "train2017").imgToAnns.values():
        assert all(other["area"] < first["area"] / 2 for other in others)
        firsts[first["category_id"]] += 1
    assert len(firsts) >= 10 and max(firsts.values()) <= min(firsts.values()) + 2


@pytest.mark.guards("sample-seed", "sample-at-once", "sample-same-set")
def test_own_set_is_left_alone_and_anything_else_refused(sample, tmp_path):
    """An image depends on its number alone, so those of another set are the same."""
    folder = tmp_path / "set"
    make(folder, *SMALL)
    assert same_images(folder, sample) == 8
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert "has this set already" in make(folder, *SMALL)
    assert f"{folder}: holds something else" in make(folder, "--images", 7, expect=1)
    record = (folder / "sample.json").read_text()
    args = SimpleNamespace(folder=folder, images=6, val_images=2)
    # As if another node had just made it on the same disk.
    make_sample_coco.make_set(args, record)
    with pytest.raises(OSError):
        make_sample_coco.make_set(args, "another record")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    args.folder = tmp_path / "again"
    make_sample_coco.make_set(args, record)
    assert digests(args.folder) == digests(folder)


def same_images(one: Path, other: Path) -> int:
    """The number of images that are also in the other set, by number; some are for validation
    in one of them alone.
    """
    names = {path.name: path.read_bytes() for path in one.glob("*2017/*.jpg")}
    assert len(names) == 8
    return sum((other / "train2017" / name).read_bytes() == names[name] for name in names)


@pytest.mark.guards("sample-unfinished")
def test_stopped_call_leaves_no_half_set_and_the_next_makes_it(tmp_path):
    for number in (signal.SIGTERM, signal.SIGKILL):
        call = start(tmp_path / "set", "--images", 2000)
        deadline = time.monotonic() + 30 * FACTOR
        while not [*tmp_path.rglob("*.jpg")]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        call.send_signal(number)
        call.communicate(timeout=20 * FACTOR)
        if number == signal.SIGTERM:
            assert call.returncode == 128 + number and not [*tmp_path.iterdir()]
    make(tmp_path / "set", *SMALL)


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "set"
    assert make(folder, expect=1).startswith(f"make_sample_coco.py: error: {folder}: ")
