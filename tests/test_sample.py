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

import make_sample_coco
from support.datasets import COCO_IDS, digests, read_coco
from support.processes import FACTOR, ROOT, assert_none_left, processes

SMALL = ["--images", "6", "--val_images", "2"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tools" / "make_sample_coco.py", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*map(str, command)], **pipes, start_new_session=True)


def make(*arguments: object, expect: int = 0) -> str:
    """The one line that the command prints."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60 * FACTOR)
    assert process.returncode == expect and (out + err).count("\n") == 1, out + err
    return out + err


def test_layout_categories_and_annotations_are_those_of_coco(sample):
    split = "train2017"
    coco = read_coco(sample, split)
    assert [*coco.cats] == COCO_IDS
    assert coco.cats[67] == {"id": 67, "name": "dining table"}
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


def test_own_set_is_left_alone_and_anything_else_refused(sample, tmp_path, monkeypatch):
    """An image depends on its number alone, so those of another set are the same, and those that
    one process has drawn or several.
    """
    folder = tmp_path / "set"
    make(folder, *SMALL)
    made = digests(folder)
    for number in range(1, 9):  # in the other set all are for training
        (path,) = folder.glob(f"*2017/*{number}.jpg")
        assert path.read_bytes() == (sample / "train2017" / path.name).read_bytes()
    assert f"{folder} is there, and left as it is" in make(folder, *SMALL)
    make_sample_coco.make_set(folder, 6, 2)  # as if another node had just made it on the same disk
    assert digests(folder) == made
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert f"{tmp_path}/mine: holds something else" in make(tmp_path / "mine", expect=1)
    with pytest.raises(OSError):
        make_sample_coco.make_set(tmp_path / "mine", 1, 1)
    for count in (1, 3):
        monkeypatch.setattr(make_sample_coco, "cores", lambda count=count: count)
        make_sample_coco.make_set(tmp_path / f"by {count}", 6, 2)
        assert digests(tmp_path / f"by {count}") == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by 1", "by 3", "mine", "set"]


def test_stopped_call_leaves_no_half_set_and_no_process_and_the_next_makes_it(tmp_path):
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
        assert_none_left(str(call.pid))
    make(tmp_path / "set", *SMALL)


def test_a_process_that_draws_and_is_killed_ends_the_call_with_one_line(tmp_path):
    call = start(tmp_path / "set", "--images", 2000)
    deadline = time.monotonic() + 30 * FACTOR
    while not [*tmp_path.rglob("*.jpg")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(processes(str(call.pid), but=call.pid)[0].pid, signal.SIGKILL)
    assert call.communicate(timeout=20 * FACTOR)[1].startswith("make_sample_coco.py: error: a pro")
    assert call.returncode == 1 and not [*tmp_path.iterdir()]


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "set"
    assert make(folder, expect=1).startswith(f"make_sample_coco.py: error: {folder}: ")
