"""tools/make_sample_coco.py: the real command; its files are read with pycocotools and Pillow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from PIL import Image

import make_sample_coco
from support.datasets import COCO_IDS, digests, read_coco
from support.processes import FACTOR, ROOT, assert_none_left, processes, wait_until

SMALL = ["--images", "6", "--val_images", "2"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tools" / "make_sample_coco.py", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([*map(str, command)], **pipes, start_new_session=True)


def make(*arguments: object, expect: int = 0) -> str:
    """The one line that the command prints."""
    process = start(*arguments)
    out, _ = process.communicate(timeout=60 * FACTOR)
    assert process.returncode == expect and out.count("\n") == 1, out
    return out


def test_layout_categories_and_annotations_are_those_of_coco(sample):
    """As in COCO some images are grey, and some have no label. The first annotation is that of a
    large icon, and the icons are as frequent.
    """
    split = "train2017"
    coco = read_coco(sample, split)
    assert [*coco.cats] == COCO_IDS
    assert coco.cats[67] == {"id": 67, "name": "dining table"}
    assert len(os.listdir(sample / split)) == len(coco.imgs) == 96
    assert len(os.listdir(sample / "val2017")) == len(read_coco(sample, "val2017").imgs) == 20
    modes, firsts = Counter(), Counter()
    for image in coco.imgs.values():
        with Image.open(sample / split / image["file_name"]) as file:
            assert file.size == (image["width"], image["height"]) and file.format == "JPEG"
            modes[file.mode] += 1
    for annotation in coco.anns.values():
        image = coco.imgs[annotation["image_id"]]
        x, y, width, height = annotation["bbox"]
        assert min(x, y) >= 0 and min(width, height) > 0
        assert x + width <= image["width"] and y + height <= image["height"]
        assert annotation["area"] == width * height and annotation["category_id"] in coco.cats
    for first, *others in coco.imgToAnns.values():
        assert all(other["area"] < first["area"] / 2 for other in others)
        firsts[first["category_id"]] += 1
    assert {*modes} == {"L", "RGB"} and modes["L"] < 10
    assert 0 < len(coco.imgs) - len(coco.imgToAnns) < 10
    assert len(firsts) >= 10 and max(firsts.values()) <= min(firsts.values()) + 2


def test_own_set_is_left_alone_and_anything_else_refused(sample, tmp_path, monkeypatch):
    """An image depends on its number alone, so those of another set are the same, and those that
    one process has drawn or several.
    """
    folder, mine = tmp_path / "set", tmp_path / "mine"
    make(folder, *SMALL)
    made = digests(folder)
    for number in range(1, 9):  # in the other set all are for training
        (path,) = folder.glob(f"*2017/*{number}.jpg")
        assert path.read_bytes() == (sample / "train2017" / path.name).read_bytes()
    assert f"{folder} is there, and left as it is" in make(folder, *SMALL)
    make_sample_coco.make_set(folder, 6, 2)  # as if another node had just made it on the same disk
    assert digests(folder) == made
    mine.mkdir()
    (mine / "thesis.tex").touch()
    assert f"{mine}: holds something else" in make(mine, expect=1)
    with pytest.raises(OSError):
        make_sample_coco.make_set(mine, 1, 1)
    below = mine / "thesis.tex/set"
    assert make(below, expect=1).startswith(f"make_sample_coco.py: error: {below}: ")
    for count in (1, 3):
        monkeypatch.setattr(make_sample_coco, "cores", lambda count=count: count)
        make_sample_coco.make_set(tmp_path / f"by {count}", 6, 2)
        assert digests(tmp_path / f"by {count}") == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by 1", "by 3", "mine", "set"]


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ("SIGTERM", 128 + signal.SIGTERM, ""),
        ("SIGKILL", -signal.SIGKILL, ""),
        ("one that draws", 1, "make_sample_coco.py: error: a process that draws was killed"),
    ],
)
def test_a_call_that_is_ended_leaves_no_process_and_no_half_set(tmp_path, ended, code, said):
    """A killed one leaves something, but the next call makes the set."""
    call = start(tmp_path / "set", "--images", 2000)
    wait_until(lambda: [*tmp_path.rglob("*.jpg")], 30, "an image")
    if ended == "one that draws":
        # The newest: Python 3.14 starts those that draw by a server.
        newest = max(found.pid for found in processes(str(call.pid), but=call.pid))
        os.kill(newest, signal.SIGKILL)
    else:
        call.send_signal(signal.Signals[ended])
    out, _ = call.communicate(timeout=20 * FACTOR)
    assert call.returncode == code and out.startswith(said), out
    assert_none_left(str(call.pid))
    assert ended == "SIGKILL" or not [*tmp_path.iterdir()]
    make(tmp_path / "set", *SMALL)
