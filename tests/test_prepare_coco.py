"""tools/prepare_coco.py: what it writes is read with Pillow."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from io import BytesIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import prepare_coco
from support.annotation_cases import changed
from support.datasets import digests, instances, numbered, truncate, write_images
from support.processes import FACTOR, ROOT

COMMAND = [sys.executable, ROOT / "tools" / "prepare_coco.py"]


def prepare(folder: Path, *words: object, side: int = 64, target: str = "small") -> int:
    """Returns how many images are new in the set, which is made of the folder coco."""
    words = [folder / "coco", folder / target, "--shorter_side", side, *words]
    return prepare_coco.prepare(prepare_coco.parse_arguments([*map(str, words)]))[1]


def pack(folder: Path, *words: object, **options: object) -> list[str]:
    """Makes the set packed. Returns the names of its images."""
    prepare(folder, "--packed", *words, **options)
    return [image["file_name"] for image in content(folder / "small")["images"]]


def refused(words: str) -> object:
    """A context in which a set cannot be prepared, and what the line about it has."""
    return pytest.raises(prepare_coco.UserError, match=re.escape(words))


def content(folder: Path) -> dict:
    return json.loads((folder / "annotations/instances_train2017.json").read_text())


def write_content(folder: Path, content: object) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(content))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Five images in the folder coco, with one annotation each."""
    folder = tmp_path / "coco"
    write_images(folder / "train2017", numbered(5), size=(200, 150))
    write_content(folder, instances(numbered(5)))
    return folder


def difference(image: Image.Image, expected: Image.Image) -> float:
    """The mean over all pixels, of a value of 0 to 255."""
    return np.abs(np.subtract(image, expected, dtype=float)).mean()


# ---- A folder of smaller images


def test_killed_and_repeated_it_makes_smaller_images(sample, tmp_path):
    """By a Python without PyTorch, which is ended twice on the way. What was there stays."""
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch here')")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipes["env"] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    target, made = tmp_path / "small", {}
    for number in (signal.SIGINT, signal.SIGKILL, 0):
        run = subprocess.Popen([*COMMAND, sample, target], **pipes)
        while number and len([*target.glob("train2017/*.jpg")]) <= len(made):
            assert run.poll() is None
            time.sleep(0.002)
        if number:
            run.send_signal(number)
        out, err = run.communicate(timeout=120 * FACTOR)
        assert err == "" and run.returncode == -number
        assert {path: path.stat().st_mtime_ns for path in made} == made
        made = {path: path.stat().st_mtime_ns for path in target.glob("train2017/*.jpg")}
    assert 0 < int(re.search(r": 116 images, (\d+) of them new, in ", out)[1]) < 116
    split = "val2017"
    assert {path.name for path in (target / split).iterdir()} == {*os.listdir(sample / split)}
    for copy in (target / split).iterdir():
        with Image.open(sample / split / copy.name) as a, Image.open(copy) as b:
            b.load()
            assert min(b.size) == 256 and b.mode == a.mode and b.format == "JPEG"


def test_an_instances_file_has_first_annotations_alone_without_sizes(source, tmp_path):
    old = changed("info = []; annotations[4].category_id = 8; annotations[3].bbox is gone")
    old["annotations"][0]["segmentation"] = {"a": 1}
    old["categories"][0]["name"] = 0
    name = old["images"][3]["file_name"] = "a" * 251 + ".jpg"  # the longest that a file may have
    (source / "train2017/0003.jpg").rename(source / "train2017" / name)
    write_content(source, old)
    assert prepare(tmp_path) == 5
    made = content(tmp_path / "small")
    assert made["info"] == [] and made["images"][3] == {"id": 103, "file_name": name}
    names = [(each["id"], each["name"]) for each in made["categories"]]
    assert names == [(7, "0"), (5, "apple"), (9, "clock")]
    kept = ("id", "image_id", "category_id", "iscrowd")
    firsts = [{key: annotation[key] for key in kept} for annotation in old["annotations"][:4]]
    assert made["annotations"] == firsts


def test_images_look_as_before_and_small_and_damaged_ones_are_copied(
    source, tmp_path, capfd, monkeypatch
):
    """Each three images take 10 s. Small is also one that has the size already."""
    monkeypatch.setattr(prepare_coco, "MOST_AHEAD", 3)
    monkeypatch.setattr(prepare_coco, "time", SimpleNamespace(monotonic=count(0, 10).__next__))
    images = [source / "train2017" / name for name in numbered(5)]
    Image.open(images[0]).resize((80, 60)).save(images[0])
    Image.open(images[1]).convert("CMYK").save(images[1])
    truncate(images[2])
    Image.open(images[3]).convert("L").save(images[3])
    prepare(tmp_path)
    out, err = capfd.readouterr()
    assert out == "3 of 5 images, 7 s left\n5 of 5 images, 0 s left\n"
    assert err.count("\n") == 1 and f"{images[2]} is damaged" in err
    old, new = digests(source / "train2017"), digests(tmp_path / "small" / "train2017")
    assert [name for name in old if old[name] != new[name]] == ["0001.jpg", "0003.jpg", "0004.jpg"]
    for number, mode in {1: "RGB", 3: "L", 4: "RGB"}.items():
        before = Image.open(images[number]).convert(mode)
        with Image.open(tmp_path / "small/train2017" / images[number].name) as after:
            assert after.size == (85, 64) and after.mode == mode
            assert after.quantization[0][0] < 6  # a quality of 90 has 3, of 60 13
            assert difference(after, before.resize(after.size)) < 8 and np.std(after) > 20
    prepare(tmp_path, side=150, target="as large")
    assert digests(tmp_path / "as large/train2017") == old


STRETCHED = [("I", "TIFF"), ("F", "TIFF")]


@pytest.mark.parametrize(
    ("mode", "kind"), [("I;16", "PNG"), ("I;16B", "TIFF"), ("I", "PPM"), *STRETCHED]
)
def test_an_image_of_16_or_32_bits_looks_as_its_original_of_8(tmp_path, mode, kind):
    """One of 32 bits is stretched to the whole range."""
    coarse = Image.frombytes("L", (3, 2), bytes(range(20, 260, 40)))
    smooth = coarse.resize((60, 40), Image.Resampling.BILINEAR)
    values = smooth.convert("F").point(lambda value: value * 257 + 0)
    values = values.convert("I").convert(mode) if mode != "F" else values
    values.save(tmp_path / "image", kind)
    args = prepare_coco.parse_arguments([str(tmp_path), "target", "--shorter_side", "32"])
    image = Image.open(BytesIO(prepare_coco.copy_of(args, "", "image")))
    assert (image.format, image.mode) == ("JPEG", "L")
    low, high = smooth.getextrema() if (mode, kind) in STRETCHED else (0, 255)
    expected = smooth.point(lambda value: round(255 * (value - low) / (high - low)))
    assert difference(image, expected.resize((48, 32))) < 1


def test_a_full_disk_leaves_no_part_of_a_file_and_the_next_run_goes_on(source, tmp_path):
    """A limit of 1 KiB a file is as a full disk: the beginning of a file can still be written."""
    arguments = ["--shorter_side", "100", source, tmp_path / "small"]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *COMMAND, *arguments]
    run = subprocess.run([*map(str, limited)], capture_output=True, text=True)
    assert run.stderr == f"prepare_coco.py: error: {tmp_path}/small: File too large\n"
    assert (run.returncode, run.stdout) == (2, "")
    assert not [path for path in tmp_path.glob("small/**/*") if path.is_file()]
    subprocess.run([*COMMAND, *arguments], check=True)
    assert prepare(tmp_path, side=100, target="never full") == 5
    made = digests(tmp_path / "small")
    assert "train2017/0004.jpg" in made and made == digests(tmp_path / "never full")


def test_what_is_in_target_is_not_replaced(source, tmp_path):
    """What a killed run leaves is in nobody's way; the images of another size stay, and are told
    as not new.
    """
    (tmp_path / "small").mkdir()
    (tmp_path / "small/1234.unfinished").touch()
    assert [prepare(tmp_path, side=side) for side in (65, 65, 70)] == [5, 0, 0]
    before = digests(tmp_path)
    for target in ("coco", "coco/train2017", "coco/new"):
        with refused(f"{tmp_path / target} is in SOURCE, which is only read"):
            prepare(tmp_path, target=target)
    assert digests(tmp_path) == before
    write_content(source, instances(numbered(4)))
    with refused("json is there, and has something else"):
        prepare(tmp_path, side=65)


def test_source_that_cannot_be_prepared_makes_no_target(source, tmp_path):
    write_content(source, instances(["gone.jpg"]))
    with refused("train2017 lacks 1 of 1 listed images, the first is gone.jpg"):
        prepare(tmp_path)
    shutil.rmtree(source / "annotations")
    with refused("coco has no annotations/instances_train2017.json with train2017/"):
        prepare(tmp_path)
    assert not (tmp_path / "small").exists()


# ---- Packed


def packed_images(folder: Path) -> dict[str, np.ndarray]:
    """By name: rows of pixels, as the index tells."""
    pixels = np.fromfile(folder / "small/train2017.rgb", dtype=np.uint8)
    found, end = {}, 0
    for line in (folder / "small/train2017.rgb.index").read_text().splitlines():
        name, first, height, width = json.loads(line)
        assert first == end
        end = first + 3 * height * width
        found[name] = pixels[first:end].reshape(height, width, 3)
    assert end == len(pixels)
    return found


@pytest.mark.parametrize(("side", "size"), [(64, (85, 64)), (999, (200, 150))])
def test_packed_images_are_the_resized_ones_or_the_images_themselves(source, tmp_path, side, size):
    """In RGB: here also of a grey image and of one with a palette."""
    images = [source / "train2017" / name for name in numbered(5)]
    Image.open(images[1]).convert("L").save(images[1])
    Image.open(images[2]).convert("P").save(images[2], "PNG")
    assert pack(tmp_path, side=side) == numbered(5)
    found = packed_images(tmp_path)
    assert [*found] == numbered(5)
    for path in images:
        image = Image.open(path).convert("RGB").resize(size)
        assert found[path.name].shape == (size[1], size[0], 3)
        assert difference(Image.fromarray(found[path.name]), image) < 4


def test_another_run_that_packs_at_the_same_time_is_noticed(source, tmp_path, monkeypatch):
    """It writes a byte in the middle of this one's work. The next run makes all right."""
    rows = tmp_path / "small/train2017.rgb"

    def copies(*words: object):
        for name, copy in alone(*words):
            if name == "0002.jpg":
                rows.write_bytes(rows.read_bytes() + b"1")
            yield name, copy

    alone = prepare_coco.copies
    monkeypatch.setattr(prepare_coco, "copies", copies)
    with refused(f"{rows}: another run is writing it: end both, then start one alone"):
        pack(tmp_path)
    assert not [*tmp_path.glob("small/annotations/*")]
    monkeypatch.undo()
    pack(tmp_path)
    prepare(tmp_path, "--packed", target="never disturbed")
    assert digests(tmp_path / "small") == digests(tmp_path / "never disturbed")
    rows.with_name("train2017.rgb.index").unlink()
    with refused("train2017.rgb has no train2017.rgb.index beside it"):
        pack(tmp_path)


def test_packing_that_was_killed_goes_on_and_makes_the_same_bytes(source, tmp_path):
    """Killed while it writes an image, and while it writes a line of the index. The first image
    is not written again. Images that are new in the source are added.
    """
    pack(tmp_path)
    expected = digests(tmp_path / "small")
    rows, index = tmp_path / "small/train2017.rgb", tmp_path / "small/train2017.rgb.index"
    lines, pixels = index.read_bytes().splitlines(keepends=True), rows.read_bytes()
    image = len(pixels) // 5
    for whole_lines, cut_line, size in (
        (2, b"", 2 * image + 100),
        (2, lines[2][:9], 3 * image),
        (4, b"", 3 * image),  # as a power failure may leave it
    ):
        index.write_bytes(b"".join(lines[:whole_lines]) + cut_line)
        rows.write_bytes(b"\1" * image + pixels[image:size])
        pack(tmp_path)
        assert rows.read_bytes() == b"\1" * image + pixels[image:]
        rows.write_bytes(pixels)
        assert digests(tmp_path / "small") == expected
    (tmp_path / "small/annotations/instances_train2017.json").unlink()
    write_images(source / "train2017", numbered(7)[5:], size=(200, 150))
    write_content(source, instances(numbered(7)))
    assert pack(tmp_path) == [*packed_images(tmp_path)] == numbered(7)


def test_damaged_images_are_listed_and_left_out_on_demand(source, tmp_path, capfd):
    path = source / "train2017/0001.jpg"
    whole = path.read_bytes()
    truncate(path)
    for _ in range(2):
        with refused("/train2017: 1 damaged, named above: repair them, or leave them out by"):
            pack(tmp_path)
        assert capfd.readouterr().err.startswith(f"WARNING: image {path} is damaged: ")
        assert not [*tmp_path.glob("small/annotations/*")]
    others = [f"000{n}.jpg" for n in (0, 2, 3, 4)]
    assert pack(tmp_path, "--skip_damaged") == [*packed_images(tmp_path)] == others
    (tmp_path / "small/annotations/instances_train2017.json").unlink()
    path.write_bytes(whole)
    assert pack(tmp_path) == numbered(5) and [*packed_images(tmp_path)] == [*others, path.name]
    shutil.rmtree(tmp_path / "small")
    for path in (source / "train2017").iterdir():
        truncate(path)
    with refused("5 damaged, named above"):
        pack(tmp_path, "--skip_damaged")
