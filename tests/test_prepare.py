"""tools/prepare_coco.py: the real command; what it writes is read with Pillow and the decoder that
the script uses.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import prepare_coco as tool
from support.datasets import digests, instances
from support.processes import ROOT

SIDE = 64  # of the small sets that tests make
OPTIONS = ["--shorter_side", str(SIDE), "--workers", "2"]


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tools" / "prepare_coco.py", *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*map(str, command)], **pipes)


def prepare(*arguments: object, expect: int = 0) -> tuple[str, str]:
    """What the command prints: stdout, stderr."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == expect and "Traceback" not in err, out + err
    return out, err


def refusal(*arguments: object, code: int = 1) -> str:
    out, err = prepare(*arguments, expect=code)
    assert out == "" and err.startswith("prepare_coco.py: error: ") and err.count("\n") == 1, err
    return err


def content(folder: Path, split: str = "train2017", kind: str = "instances") -> dict:
    return json.loads((folder / "annotations" / f"{kind}_{split}.json").read_text())


def encoded(image: Image.Image, name: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def smooth(number: int, size: tuple[int, int] = (200, 150)) -> Image.Image:
    """An image with another colour in each corner."""
    corners = np.random.default_rng(number).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize(size, Image.Resampling.BILINEAR)


def make_source(folder: Path, files: dict[str, bytes]) -> Path:
    """A set of one split and one annotation for each of these image files."""
    (folder / "annotations").mkdir(parents=True)
    for name, data in files.items():
        path = folder / "train2017" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    text = json.dumps(instances([*files]))
    (folder / "annotations" / "instances_train2017.json").write_text(text)
    return folder


@pytest.fixture
def source(tmp_path) -> Path:
    """Four images."""
    return make_source(tmp_path / "coco", {f"{n}.jpg": encoded(smooth(n)) for n in range(4)})


@pytest.fixture(scope="module")
def prepared(sample, tmp_path_factory) -> Path:
    """The sample set of 96 and 20 images, prepared in one go."""
    target = tmp_path_factory.mktemp("prepared") / "small"
    out, err = prepare(sample, target)
    assert "116 images in " in out and err == ""
    return target


# ---- What a prepared set is


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_images_have_the_same_names_and_a_shorter_side_of_256(sample, prepared, split):
    assert sorted(os.listdir(sample / split)) == sorted(os.listdir(prepared / split))
    for path in (sample / split).iterdir():
        with Image.open(path) as old, Image.open(prepared / split / path.name) as new:
            factor = 256 / min(old.size)
            assert new.size == tuple(round(pixels * factor) for pixels in old.size)
            assert new.mode == old.mode and new.format == "JPEG"
    parts = {"annotations", "prepare_coco.json", "train2017", "val2017"}
    assert {*os.listdir(prepared)} == parts


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_boxes_and_areas_are_scaled_and_all_else_stays(sample, prepared, split):
    old, new = content(sample, split), content(prepared, split)
    sizes = {}
    for before, after in zip(old["images"], new["images"], strict=True):
        with Image.open(prepared / split / after["file_name"]) as image:
            assert image.size == (after["width"], after["height"])
        sizes[after["id"]] = [(i.pop("width"), i.pop("height")) for i in (before, after)]
    for before, after in zip(old["annotations"], new["annotations"], strict=True):
        factors = np.divide(*sizes[after["image_id"]][::-1])
        assert after.pop("bbox") == pytest.approx(
            [*factors, *factors] * np.array(before.pop("bbox")), abs=0.01
        )
        assert after.pop("area") == pytest.approx(before.pop("area") * factors.prod(), abs=0.01)
        del before["segmentation"]
    assert old == new


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_first_annotations_are_those_of_the_whole_file(prepared, split):
    whole, first = content(prepared, split), content(prepared, split, "first_instances")
    numbers = [annotation["image_id"] for annotation in whole["annotations"]]
    places = sorted(map(numbers.index, {*numbers}))
    whole["annotations"] = [whole["annotations"][place] for place in places]
    assert first == whole and len(places) < len(numbers)


def test_own_data_without_boxes_and_sizes(source, tmp_path):
    plain = content(source)
    plain["images"] = [{"id": i["id"], "file_name": i["file_name"]} for i in plain["images"]]
    for annotation in plain["annotations"]:
        del annotation["bbox"], annotation["area"]
    (source / "annotations" / "instances_train2017.json").write_text(json.dumps(plain))
    prepare(source, tmp_path / "small", *OPTIONS)
    assert content(tmp_path / "small")["annotations"] == plain["annotations"]


def several_kinds() -> dict[str, bytes]:
    """Files of many kinds; what stands before the dash says what becomes of them."""
    see_through = smooth(7).convert("RGBA")
    see_through.putalpha(100)
    deep = Image.fromarray(np.full((90, 99), 999, np.uint16))
    return {
        "shrunk-colour.jpg": encoded(smooth(1)),
        "shrunk-grey.jpg": encoded(smooth(3).convert("L")),
        "shrunk-cmyk.jpg": encoded(smooth(4).convert("CMYK")),
        "shrunk-large.jpg": encoded(smooth(6, (1700, 1100))),
        "shrunk-alpha.png": encoded(see_through, "PNG"),
        "shrunk-palette.png": encoded(smooth(9).convert("P"), "PNG"),
        "shrunk-long.jpg": encoded(smooth(11, (900, 70))),
        "shrunk-webp.webp": encoded(smooth(12), "WEBP"),
        "sub/folder/shrunk-é.jpg": encoded(smooth(13)),
        "copied-small.jpg": encoded(smooth(13, (300, SIDE))),
        "copied-16-bits.png": encoded(deep, "PNG"),
        "damaged-cut.jpg": encoded(smooth(16))[:-400],
        "damaged-empty.jpg": b"",
    }


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> tuple[Path, Path, str]:
    """A set of such images, its prepared form, and what stderr said."""
    folder = tmp_path_factory.mktemp("kinds")
    source = make_source(folder / "coco", several_kinds())
    _, err = prepare(source, folder / "small", *OPTIONS)
    return source / "train2017", folder / "small" / "train2017", err


@pytest.mark.parametrize("name", several_kinds())
def test_each_kind_looks_as_before_or_is_copied(kinds, name):
    from torchvision.io import decode_image

    source, target, err = kinds
    assert (f"{name} is damaged" in err) == ("damaged" in name)
    if "shrunk" not in name:
        assert (source / name).read_bytes() == (target / name).read_bytes()
        return
    old, new = (decode_image(str(folder / name), "RGB").float() for folder in (source, target))
    assert min(new.shape[1:]) == SIDE
    corners = [image[:, :: image.shape[1] - 1, :: image.shape[2] - 1] for image in (old, new)]
    assert (corners[0] - corners[1]).abs().mean() < 12  # inverted colours are off by 60 and more
    assert old.std() > 8, "too flat to tell"


# ---- Stopped and started again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ended_run_goes_on_when_started_again(sample, prepared, tmp_path, number):
    target = tmp_path / "small"
    run = start(sample, target, "--workers", 1)
    deadline = time.monotonic() + 30
    while not [*target.glob("train2017/*")]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(number)
    _, err = run.communicate(timeout=20)  # its workers have closed the pipes, too
    if number == signal.SIGKILL:
        assert run.returncode == -9
    else:
        assert run.returncode == 128 + number
        assert err == "prepare_coco.py: error: stopped; started again it goes on\n"
    made = {path: path.stat().st_mtime_ns for path in target.glob("train2017/*")}
    assert len(made) < 96
    prepare(sample, target)
    assert digests(target) == digests(prepared)
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_progress_says_how_many_are_done_and_the_time_left(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "PROGRESS_S", 0)
    tool.prepare(tool.Job(source, tmp_path / "small", SIDE, 90), workers=1)
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(r"\d of 4 images, \d+ s left", line) for line in lines)
    assert lines[-1] == "4 of 4 images, 0 s left"


# ---- Refusals


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"images": []}', "KeyError: 'annotations'"),
        ('{"images": [{"id": 1}], "annotations": []}', "KeyError: 'file_name'"),
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": [1, 2]}]}', "IndexError"),
        ('{"images": [{"id": 1, "file_name": "/a.jpg"}], "annotations": []}', "/a.jpg leaves"),
        ('{"images": [{"id": 1, "file_name": "../a.jpg"}], "annotations": []}', "../a.jpg leaves"),
    ],
)
def test_file_that_is_no_instances_file(source, tmp_path, text, words):
    (source / "annotations" / "instances_train2017.json").write_text(text)
    error = refusal(source, tmp_path / "small")
    assert words in error and "instances_train2017.json" in error
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("kind", ["no folder", "no annotations", "no images", "an image missing"])
def test_source_that_lacks_something(source, tmp_path, kind):
    if kind == "no annotations":
        (source / "annotations" / "instances_train2017.json").unlink()
    if kind == "no images":
        (source / "train2017").rename(source / "pictures")
    if kind == "an image missing":
        (source / "train2017" / "2.jpg").unlink()
    wanted = (
        "train2017/2.jpg: No such file" if kind == "an image missing" else "train2017.json with"
    )
    folder = tmp_path / "none" if kind == "no folder" else source
    assert wanted in refusal(folder, tmp_path / "small", *OPTIONS)


@pytest.mark.parametrize("kind", ["the source", "a link", "not empty", "a file", "other settings"])
def test_target_that_must_not_be_written(source, tmp_path, kind):
    target = tmp_path / "small"
    words = {
        "the source": f"{source} is {source}",
        "a link": f"{target}/train2017 is {source}/train2017",
        "not empty": "is not empty, and not made by this program",
        "a file": "small: Not a directory",
        "other settings": "was made with {'shorter_side': 65, 'quality': 90}",
    }
    if kind == "the source":
        target = source
    if kind == "a link":
        target.mkdir()
        (target / "train2017").symlink_to(source / "train2017")
    if kind == "not empty":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    if kind == "a file":
        target.write_text("mine")
    if kind == "other settings":
        prepare(source, target, "--shorter-side", 65)
    before = digests(tmp_path)
    assert words[kind] in refusal(source, target, *OPTIONS)
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    "argv", ["x y --quality 0", "x y --workers x", "x y --shorter_side 9", "x"]
)
def test_wrong_arguments(argv):
    assert "--help" in refusal(*argv.split(), code=2)
