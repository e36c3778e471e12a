"""tools/make_sample_coco.py: the real command; its files are read with pycocotools and Pillow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from PIL import Image

from support.datasets import COCO_IDS, digests, read_coco
from support.processes import ROOT

SMALL = ["--images", "6", "--val_images", "2"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tools" / "make_sample_coco.py", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*map(str, command)], **pipes)


def make(*arguments: object, expect: int = 0) -> str:
    """The one line that the command prints."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == expect and (out + err).count("\n") == 1, out + err
    return out + err


@pytest.mark.parametrize(("split", "count"), [("train2017", 96), ("val2017", 20)])
def test_layout_categories_and_annotations_are_those_of_coco(sample, split, count):
    coco = read_coco(sample, split)
    assert [*coco.cats] == COCO_IDS
    assert coco.cats[67] == {"id": 67, "name": "dining table", "supercategory": "furniture"}
    assert len(os.listdir(sample / split)) == len(coco.imgs) == count
    for image in coco.imgs.values():
        with Image.open(sample / split / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"]) and file.format == "JPEG"
    for annotation in coco.anns.values():
        image = coco.imgs[annotation["image_id"]]
        x, y, width, height = annotation["bbox"]
        assert min(x, y) >= 0 and min(width, height) > 0
        assert x + width <= image["width"] and y + height <= image["height"]
        assert annotation["area"] == width * height and annotation["category_id"] in coco.cats


def test_some_images_are_grey_some_unlabelled_and_some_annotations_crowds(sample):
    coco = read_coco(sample, "train2017")
    modes = Counter(Image.open(path).mode for path in (sample / "train2017").iterdir())
    assert {*modes} == {"L", "RGB"} and modes["L"] < 10
    assert 0 < len(coco.imgs) - len(coco.imgToAnns) < 10
    assert 0 < len(coco.getAnnIds(iscrowd=True)) < len(coco.anns) / 2


def test_first_annotation_is_the_large_icon_and_all_icons_are_as_frequent(sample):
    firsts = Counter()
    for first, *others in read_coco(sample, "train2017").imgToAnns.values():
        assert all(other["area"] < first["area"] / 2 for other in others)
        firsts[first["category_id"]] += 1
    assert len(firsts) >= 10 and max(firsts.values()) <= min(firsts.values()) + 2


def test_same_seed_same_bytes(tmp_path):
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        make(tmp_path / name, *SMALL, "--seed", seed)
    one, two, other = (digests(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two and sum(name.endswith(".jpg") for name in one) == 8
    assert {*one.values()} & {*other.values()} == {"folder"}


def test_own_set_is_left_alone_and_anything_else_refused(tmp_path):
    folder = tmp_path / "set"
    make(folder, *SMALL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert "has this set already" in make(folder, *SMALL)
    assert f"{folder}: holds something else" in make(folder, *SMALL, "--seed", 1, expect=1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_two_calls_at_once_make_one_set(tmp_path):
    """As two nodes do that share a disk."""
    calls = [start(tmp_path / "set", *SMALL) for _ in range(2)]
    ends = [call.communicate(timeout=60)[1] for call in calls]
    assert [call.returncode for call in calls] == [0, 0], ends
    assert os.listdir(tmp_path) == ["set"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_call_leaves_no_half_set_and_the_next_makes_it(tmp_path, number):
    call = start(tmp_path / "set", "--images", 2000)
    deadline = time.monotonic() + 30
    while not [*tmp_path.rglob("*.jpg")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    call.send_signal(number)
    call.communicate(timeout=20)
    if number == signal.SIGTERM:
        assert call.returncode == 128 + number and not [*tmp_path.iterdir()]
    make(tmp_path / "set", *SMALL)


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "set"
    assert make(folder, expect=1).startswith(f"make_sample_coco.py: error: {folder}: ")
