"""tools/prepare_coco.py: the real command; what it writes is read with Pillow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.datasets import data_args, digests, instances, numbered, truncate, write_images
from support.launchers import FAST
from support.processes import LONG, ROOT, run_demo


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


def refusal(*arguments: object) -> str:
    out, err = prepare(*arguments, expect=1)
    assert out == "" and err.startswith("prepare_coco.py: error: ") and err.count("\n") == 1, err
    return err


def content(folder: Path, split: str = "train2017", kind: str = "instances") -> dict:
    return json.loads((folder / "annotations" / f"{kind}_{split}.json").read_text())


def write_content(folder: Path, text: str) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / "instances_train2017.json").write_text(text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four images, with one annotation each."""
    folder = tmp_path / "coco"
    write_images(folder / "train2017", numbered(4), size=(200, 150))
    write_content(folder, json.dumps(instances(numbered(4))))
    return folder


@pytest.fixture(scope="module")
def prepared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample set of 96 and 20 images, prepared in one go."""
    target = tmp_path_factory.mktemp("prepared") / "small"
    out, err = prepare(sample, target)
    assert "116 images in " in out and err == ""
    return target


# ---- What a prepared set is


@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_sizes_boxes_and_areas_are_scaled_and_all_else_stays(sample, prepared, split):
    assert sorted(os.listdir(sample / split)) == sorted(os.listdir(prepared / split))
    old, new = content(sample, split), content(prepared, split)
    factors = {}
    for before, after in zip(old["images"], new["images"], strict=True):
        size = np.array([before.pop("width"), before.pop("height")])
        name = after["file_name"]
        with Image.open(sample / split / name) as a, Image.open(prepared / split / name) as b:
            assert b.size == (after.pop("width"), after.pop("height"))
            assert min(b.size) == 256 and b.mode == a.mode and b.format == "JPEG"
            factors[after["id"]] = np.divide(b.size, size)
    for before, after in zip(old["annotations"], new["annotations"], strict=True):
        factor = factors[after["image_id"]]
        box = np.array(before.pop("bbox")) * [*factor, *factor]
        assert after.pop("bbox") == pytest.approx(box, abs=0.01)
        assert after.pop("area") == pytest.approx(before.pop("area") * factor.prod(), abs=0.01)
    assert old == new


def test_first_annotations_are_those_of_the_whole_file(prepared):
    whole, first = content(prepared), content(prepared, kind="first_instances")
    numbers = [annotation["image_id"] for annotation in whole["annotations"]]
    places = sorted(map(numbers.index, {*numbers}))
    whole["annotations"] = [whole["annotations"][place] for place in places]
    assert first == whole and len(places) < len(numbers)


def test_outlines_are_left_out_and_own_data_needs_no_boxes_or_sizes(source, tmp_path):
    plain = content(source)
    plain["images"] = [{"id": i["id"], "file_name": i["file_name"]} for i in plain["images"]]
    for annotation in plain["annotations"]:
        del annotation["bbox"], annotation["area"]
    outlined = [annotation | {"segmentation": [[1] * 6]} for annotation in plain["annotations"]]
    write_content(source, json.dumps(plain | {"annotations": outlined}))
    prepare(source, tmp_path / "small", "--shorter_side", 64)
    assert content(tmp_path / "small")["annotations"] == plain["annotations"]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_shrunk_images_look_as_before(source, tmp_path, mode):
    paths = [folder / "train2017" / "0002.jpg" for folder in (source, tmp_path / "small")]
    Image.open(paths[0]).convert(mode).save(paths[0])
    prepare(source, tmp_path / "small", "--shorter_side", 64)
    with Image.open(paths[0]) as old, Image.open(paths[1]) as new:
        assert new.size == (85, 64) and new.mode == mode
        difference = np.subtract(old.resize(new.size), new, dtype=float)
        assert abs(difference).mean() < 8 and np.std(new) > 20


def test_small_damaged_and_unusual_images_are_copied(source, tmp_path):
    images = [source / "train2017" / name for name in numbered(4)]
    Image.open(images[0]).resize((80, 60)).save(images[0])
    Image.open(images[1]).convert("CMYK").save(images[1])
    truncate(images[2])
    _, err = prepare(source, tmp_path / "small", "--shorter_side", 64)
    assert err.count("\n") == 1 and f"{images[2]} is damaged" in err
    old, new = digests(source / "train2017"), digests(tmp_path / "small" / "train2017")
    assert [name for name in old if old[name] != new[name]] == ["0003.jpg"]


@LONG
def test_a_prepared_set_trains(prepared):
    words = [*data_args(prepared, val=True), *FAST, "--max_steps", 2]
    assert run_demo(words, launcher="python").json_line("Summary")["steps"] == 2


# ---- Stopped and started again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_run_goes_on_when_started_again(sample, prepared, tmp_path, number):
    target = tmp_path / "small"
    run = start(sample, target)
    deadline = time.monotonic() + 30
    while not [*target.glob("train2017/*.jpg")]:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    run.send_signal(number)
    _, err = run.communicate(timeout=20)
    assert run.returncode == -number and err == ""
    made = {path: path.stat().st_mtime_ns for path in target.glob("train2017/*.jpg")}
    assert len(made) < 96
    prepare(sample, target)
    assert digests(target) == digests(prepared)
    assert made == {path: path.stat().st_mtime_ns for path in made}


# ---- Refusals


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON, or not all of it is there (1 bytes): "),
        ('{"images": []}', "has no images: expected a list"),
        (json.dumps(instances(["../a.jpg"])), "../a.jpg leaves"),
    ],
)
def test_file_that_is_no_instances_file(source, tmp_path, text, words):
    write_content(source, text)
    error = refusal(source, tmp_path / "small")
    assert words in error and "instances_train2017.json" in error
    assert not (tmp_path / "small").exists()


def test_source_that_lacks_something(source, tmp_path):
    (source / "train2017" / "0002.jpg").unlink()
    line = "train2017 lacks 1 of 4 listed images, the first is 0002.jpg"
    assert line in refusal(source, tmp_path / "small")
    assert "train2017.json with" in refusal(tmp_path, tmp_path / "other")


@pytest.mark.parametrize("kind", ["the source", "not empty", "another size"])
def test_target_that_must_not_be_written(source, tmp_path, kind):
    target = source if kind == "the source" else tmp_path / "small"
    words = "is not empty, and not made by this program"
    if kind == "not empty":
        target.mkdir()
        (target / "thesis.tex").write_text("years of work")
    if kind == "another size":
        prepare(source, target, "--shorter-side", 65)
        words = "was made with {'shorter_side': 65}: give another TARGET"
    before = digests(tmp_path)
    assert f"{target} {words}" in refusal(source, target)
    assert digests(tmp_path) == before
