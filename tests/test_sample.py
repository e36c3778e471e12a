"""tools/make_sample_coco.py: the real command; its files are read with pycocotools and Pillow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from support.datasets import COCO_IDS, digests, read_coco
from support.processes import ROOT

SIZE = ["--images", "60", "--val_images", "12"]
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


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "set"
    make(folder, *SIZE)
    return folder


@pytest.fixture(params=["train2017", "val2017"])
def coco(made, request):
    """A split as pycocotools reads it; `folder` has its images."""
    coco = read_coco(made, request.param)
    coco.folder = made / request.param
    return coco


def test_layout_is_that_of_coco(made):
    assert {path.name for path in made.iterdir()} >= {"train2017", "val2017", "annotations"}
    assert [path.name for path in made.parent.iterdir()] == ["set"]  # nothing unfinished
    names = [os.listdir(made / split) for split in ("train2017", "val2017")]
    assert [*map(len, names)] == [60, 12] and not {*names[0]} & {*names[1]}


def test_categories_are_those_of_coco(coco):
    named = {c["id"]: (c["supercategory"], c["name"]) for c in coco.dataset["categories"]}
    assert [*named] == COCO_IDS and len({group for group, _ in named.values()}) == 12
    assert named[1] == ("person", "person") and named[90] == ("indoor", "toothbrush")
    assert named[27] == ("accessory", "backpack") and named[67] == ("furniture", "dining table")


def test_annotations_fit_the_images(coco):
    for annotation in coco.anns.values():
        image = coco.imgs[annotation["image_id"]]
        x, y, width, height = annotation["bbox"]
        assert min(x, y) >= 0 and min(width, height) > 0
        assert x + width <= image["width"] and y + height <= image["height"]
        assert annotation["area"] == width * height and annotation["category_id"] in coco.cats
    for image in coco.imgs.values():
        with Image.open(coco.folder / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"]) and file.format == "JPEG"


def test_what_breaks_loaders_is_among_the_images(made):
    coco = read_coco(made, "train2017")
    modes = [Image.open(path).mode for path in (made / "train2017").iterdir()]
    assert {*modes} == {"L", "RGB"} and modes.count("L") < 6
    unlabelled = len(coco.imgs) - len(coco.imgToAnns)
    assert 0 < unlabelled < 6
    assert 0 < len(coco.getAnnIds(iscrowd=True)) < len(coco.anns) / 2


def test_first_annotation_is_the_large_icon_and_all_icons_are_as_frequent(made):
    firsts = Counter()
    for first, *others in read_coco(made, "train2017").imgToAnns.values():
        assert all(other["area"] < first["area"] / 2 for other in others)
        firsts[first["category_id"]] += 1
    assert len(firsts) >= 10 and max(firsts.values()) <= min(firsts.values()) + 2


def test_same_seed_same_bytes(tmp_path):
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        make(tmp_path / name, *SMALL, "--seed", seed)
    one, two, other = (digests(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two
    assert {*one.values()} & {*other.values()} == {"folder"}


def test_complete_set_is_left_alone(made):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    assert "has this set already" in make(made, *SIZE)
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


@pytest.mark.parametrize("kind", ["another seed", "an image missing", "a letter"])
def test_folder_with_something_else_is_refused(tmp_path, kind):
    folder = tmp_path / "set"
    if kind == "a letter":
        folder.mkdir()
        (folder / "letter").write_text("mine")
    else:
        make(folder, *SMALL, "--seed", int(kind == "another seed"))
    if kind == "an image missing":
        next(folder.glob("train2017/*")).unlink()
    before = digests(folder)
    assert f"{folder}: holds something else" in make(folder, *SMALL, "--seed", 0, expect=1)
    assert digests(folder) == before and os.listdir(tmp_path) == ["set"]


def test_two_calls_at_once_make_one_set(tmp_path):
    """As two nodes do that share a disk."""
    calls = [start(tmp_path / "set", *SMALL) for _ in range(2)]
    ends = [call.communicate(timeout=60)[1] for call in calls]
    assert [call.returncode for call in calls] == [0, 0], ends
    assert os.listdir(tmp_path) == ["set"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_call_leaves_no_half_set_and_the_next_makes_it(tmp_path, number):
    call = start(tmp_path / "set", "--images", 2000)
    deadline = time.monotonic() + 30
    while not [*tmp_path.rglob("*.jpg")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    call.send_signal(number)
    call.communicate(timeout=20)
    assert call.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "set").exists()
    if number != signal.SIGKILL:
        assert not [*tmp_path.iterdir()]
    make(tmp_path / "set", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["{}/set", "--images", "-1"], "--images: invalid", 2),
        (["{}/set", "--seed", "x"], "--seed: invalid", 2),
        ([], "FOLDER", 2),
        (["{}/file/set"], "{}/file/set: ", 1),
        (["/proc/set"], "/proc/set: ", 1),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, arguments, words, code):
    (tmp_path / "file").touch()
    line = make(*[word.format(tmp_path) for word in arguments], expect=code)
    assert line.startswith("make_sample_coco.py: error: ") and words.format(tmp_path) in line
