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
    """Returns how many images the set has."""
    words = [folder / "coco", folder / target, "--shorter_side", side, *words]
    return prepare_coco.prepare(prepare_coco.parse_arguments([*map(str, words)]))[0]


def refusal(*arguments: object, **options: object) -> str:
    """The line about a set that cannot be prepared."""
    with pytest.raises(prepare_coco.UserError) as error:
        prepare(*arguments, **options)
    return str(error.value)


def content(folder: Path, split: str = "train2017") -> dict:
    return json.loads((folder / "annotations" / f"instances_{split}.json").read_text())


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


@pytest.fixture(scope="module")
def prepared(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample set of 96 and 20 images, prepared by a Python without PyTorch, which is ended
    twice on the way. What was there stays.
    """
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "torch.py").write_text("raise ImportError('no PyTorch here')")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipes["env"] = {**os.environ, "PYTHONPATH": str(folder)}
    made: dict[Path, int] = {}
    for number in (signal.SIGINT, signal.SIGKILL, 0):
        run = subprocess.Popen([*COMMAND, sample, folder / "small"], **pipes)
        while number and len([*folder.glob("small/train2017/*.jpg")]) <= len(made):
            assert run.poll() is None
            time.sleep(0.002)
        if number:
            run.send_signal(number)
        out, err = run.communicate(timeout=120 * FACTOR)
        assert err == "" and run.returncode == -number
        assert {path: path.stat().st_mtime_ns for path in made} == made
        paths = [*folder.glob("small/train2017/*.jpg")]
        made = {path: path.stat().st_mtime_ns for path in paths}
    made_before = int(re.search(r": 116 images, (\d+) of them new, in ", out)[1])
    assert 0 < made_before < 116
    return folder / "small"


# ---- What a prepared set is


def test_images_are_smaller_and_have_the_same_names_and_labels(sample, prepared):
    split = "val2017"
    copies = sorted(path.name for path in (prepared / split).glob("*.jpg"))  # also *.unfinished
    assert copies == sorted(os.listdir(sample / split))
    old, new = content(sample, split), content(prepared, split)
    for name in os.listdir(sample / split):
        with Image.open(sample / split / name) as a, Image.open(prepared / split / name) as b:
            b.load()
            assert min(b.size) == 256 and b.mode == a.mode and b.format == "JPEG"
    labels = {}
    for annotation in old["annotations"]:
        labels.setdefault(annotation["image_id"], annotation["category_id"])
    kept = [
        (annotation["image_id"], annotation["category_id"]) for annotation in new["annotations"]
    ]
    assert kept == [*labels.items()] and len(kept) < len(old["annotations"])
    assert new["categories"] == old["categories"]


def test_an_instances_file_has_the_first_annotation_of_each_image_without_sizes(source, tmp_path):
    old = changed("info = []; annotations[4].category_id = 8; annotations[3].bbox is gone")
    old["annotations"][0]["segmentation"] = {"a": 1}
    name = old["images"][3]["file_name"] = "a" * 251 + ".jpg"  # the longest that a file may have
    (source / "train2017/0003.jpg").rename(source / "train2017" / name)
    write_content(source, old)
    assert prepare(tmp_path) == 5
    made = content(tmp_path / "small")
    assert made["info"] == [] and made["categories"] == old["categories"]
    assert made["images"][3] == {"id": 103, "file_name": name}
    kept = ("id", "image_id", "category_id", "iscrowd")
    firsts = [{key: annotation[key] for key in kept} for annotation in old["annotations"][:4]]
    assert made["annotations"] == firsts


def test_a_class_called_0_keeps_its_name(source, tmp_path):
    write_content(source, changed("categories[0].name = 0"))
    prepare(tmp_path)
    names = {entry["id"]: entry["name"] for entry in content(tmp_path / "small")["categories"]}
    assert names == {7: "0", 5: "apple", 9: "clock"}


def test_the_line_about_an_absolute_path_does_not_recommend_this_program(source, tmp_path):
    write_content(source, changed('images[0].file_name = "/data/0000.jpg"'))
    said = refusal(tmp_path)
    assert "/data/0000.jpg" in said and "prepare_coco.py" not in said


def test_images_look_as_before_and_small_and_damaged_ones_are_copied(
    source, tmp_path, capfd, monkeypatch
):
    """Each three images take 10 s."""
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


def test_a_full_disk_leaves_no_part_of_a_file_and_the_next_run_goes_on(source, tmp_path):
    """A limit of 1 KiB a file is as a full disk: the beginning of a file can still be written."""
    arguments = ["--shorter_side", "100", source, tmp_path / "small"]
    code = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); "
    code += "os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-c", code, sys.executable, *COMMAND[1:], *arguments]
    run = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert run.stderr == f"prepare_coco.py: error: {tmp_path}/small: File too large\n"
    assert (run.returncode, run.stdout) == (2, "")
    left = [path.name for path in tmp_path.glob("small/**/*") if path.is_file()]
    assert left == []
    subprocess.run([*COMMAND, *arguments], check=True)
    assert prepare(tmp_path, side=100, target="never full") == 5
    made = digests(tmp_path / "small")
    assert "train2017/0004.jpg" in made and made == digests(tmp_path / "never full")


# ---- Packed


PACKED = [*COMMAND, "coco", "packed", "--packed", "--shorter_side", "64"]


def pack(folder: Path, *words: object, expect: int = 0) -> str:
    """What the command prints."""
    words = [*map(str, [*PACKED, *words])]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60 * FACTOR)
    assert run.returncode == expect, run.stderr
    return run.stdout + run.stderr


def packed_images(folder: Path) -> dict[str, np.ndarray]:
    """By name: rows of pixels, as the index tells."""
    pixels = np.fromfile(folder / "packed/train2017.rgb", dtype=np.uint8)
    found, end = {}, 0
    for line in (folder / "packed/train2017.rgb.index").read_text().splitlines():
        name, first, height, width = json.loads(line)
        assert first == end
        end = first + 3 * height * width
        found[name] = pixels[first:end].reshape(height, width, 3)
    assert end == len(pixels)
    return found


@pytest.mark.parametrize("side", [64, 999])
def test_packed_images_are_the_resized_ones_or_the_images_themselves(source, tmp_path, side):
    """In RGB: here also of a grey image and of one with a palette."""
    images = [source / "train2017" / name for name in numbered(5)]
    Image.open(images[1]).convert("L").save(images[1])
    Image.open(images[2]).convert("P").save(images[2], "PNG")
    pack(tmp_path, "--shorter_side", side)
    found = packed_images(tmp_path)
    assert [*found] == numbered(5)
    for path in images:
        with Image.open(path) as image:
            image = image.convert("RGB")
        size = (85, 64) if side == 64 else (200, 150)
        assert found[path.name].shape == (size[1], size[0], 3)
        assert difference(Image.fromarray(found[path.name]), image.resize(size)) < 4
    assert len(content(tmp_path / "packed")["images"]) == 5


def test_another_run_that_packs_at_the_same_time_is_noticed_and_spoils_nothing(
    source, tmp_path, monkeypatch
):
    """It has written an image in the middle of this one's work. The next run makes all right."""

    def copies(*words: object):
        for number, copy in enumerate(alone(*words)):
            if number == 2:
                with (tmp_path / "packed/train2017.rgb").open("ab") as pixels:
                    pixels.write(copy[1][2])
            yield copy

    alone = prepare_coco.copies
    with monkeypatch.context() as patch:
        patch.setattr(prepare_coco, "copies", copies)
        line = refusal(tmp_path, "--packed", target="packed")
    rows = tmp_path / "packed/train2017.rgb"
    assert line == f"{rows}: another run is writing it: end both, then start one alone"
    assert not [*tmp_path.glob("packed/annotations/*")]
    prepare(tmp_path, "--packed", target="packed")
    prepare(tmp_path, "--packed", target="never disturbed")
    assert digests(tmp_path / "packed") == digests(tmp_path / "never disturbed")
    (tmp_path / "packed/train2017.rgb.index").unlink()
    assert "train2017.rgb has no train2017.rgb.index beside it" in refusal(
        tmp_path, "--packed", target="packed"
    )


def test_packing_that_was_killed_goes_on_and_makes_the_same_bytes(source, tmp_path):
    """Killed while it writes an image, and while it writes a line of the index. The first image
    is not written again. Images that are new in the source are added.
    """
    pack(tmp_path)
    expected = digests(tmp_path / "packed")
    rows, index = tmp_path / "packed/train2017.rgb", tmp_path / "packed/train2017.rgb.index"
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
        assert digests(tmp_path / "packed") == expected
    (tmp_path / "packed/annotations/instances_train2017.json").unlink()
    write_images(source / "train2017", numbered(7)[5:], size=(200, 150))
    write_content(source, instances(numbered(7)))
    pack(tmp_path)
    assert [*packed_images(tmp_path)] == numbered(7)
    assert len(content(tmp_path / "packed")["images"]) == 7


def test_damaged_images_are_listed_and_left_out_on_demand(source, tmp_path):
    path = source / "train2017/0001.jpg"
    whole = path.read_bytes()
    truncate(path)
    line = "prepare_coco.py: error: coco/train2017: 1 damaged, named above: repair them, or leave"
    for _ in range(2):
        text = pack(tmp_path, expect=2)
        assert text.startswith("WARNING: image coco/train2017/0001.jpg is damaged: ")
        assert text.splitlines()[1].startswith(line) and text.count("\n") == 2
        assert not [*tmp_path.glob("packed/annotations/*")]
    path.write_bytes(whole)
    pack(tmp_path)
    assert [*packed_images(tmp_path)] == [f"000{n}.jpg" for n in (0, 2, 3, 4, 1)]
    truncate(path)
    shutil.rmtree(tmp_path / "packed")
    for _ in range(2):
        pack(tmp_path, "--skip_damaged")
        assert [*packed_images(tmp_path)] == [f"000{n}.jpg" for n in (0, 2, 3, 4)]
        assert len(content(tmp_path / "packed")["images"]) == 4
    shutil.rmtree(tmp_path / "packed")
    for path in (source / "train2017").iterdir():
        truncate(path)
    assert "5 damaged, named above" in pack(tmp_path, "--skip_damaged", expect=2)


def test_a_reader_that_has_gone_ends_it_without_words(source, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    words = [*COMMAND, source, tmp_path / "small"]
    run = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=60 * FACTOR)
    os.close(writer)
    assert (run.returncode, run.stderr) == (-signal.SIGPIPE, b"")


def test_two_runs_make_one_target_at_once(source, tmp_path):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    words = [*COMMAND, source, tmp_path / "small", "--shorter_side", "64"]
    runs = [subprocess.Popen(words, **pipes) for _ in range(3)]
    for run in runs:
        out = run.communicate(timeout=120 * FACTOR)[0]
        assert run.returncode == 0 and " 5 images, " in out, out
    prepare(tmp_path, target="alone")
    assert digests(tmp_path / "small") == digests(tmp_path / "alone")


def picture() -> Image.Image:
    """A smooth one, in grey."""
    coarse = Image.frombytes("L", (3, 2), bytes(range(20, 260, 40)))
    return coarse.resize((60, 40), Image.Resampling.BILINEAR)


def difference(image: Image.Image, expected: Image.Image) -> float:
    """The mean over all pixels, of a value of 0 to 255."""
    return np.abs(np.subtract(image, expected, dtype=float)).mean()


STRETCHED = [("I", "TIFF"), ("F", "TIFF")]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF"), ("I", "PPM"), *STRETCHED],
)
def test_an_image_of_16_or_32_bits_looks_in_its_copy_as_its_original_of_8(tmp_path, mode, kind):
    """One of 32 bits is stretched to the whole range."""
    values = picture().convert("F").point(lambda value: value * 257 + 0)
    values = values.convert("I").convert(mode) if mode != "F" else values
    values.save(tmp_path / "image", kind)
    args = prepare_coco.parse_arguments([str(tmp_path), "target", "--shorter_side", "32"])
    image = Image.open(BytesIO(prepare_coco.copy_of(args, "", "image")))
    assert (image.format, image.mode) == ("JPEG", "L")
    low, high = picture().getextrema() if (mode, kind) in STRETCHED else (0, 255)
    expected = picture().point(lambda value: round(255 * (value - low) / (high - low)))
    assert difference(image, expected.resize((48, 32))) < 1


# ---- Refusals


@pytest.mark.parametrize(
    ("old", "words"),
    [
        (
            changed("annotations[*].category_id as text"),
            'annotations[0] has "7" as category_id: expected a whole number (and 5 more)',
        ),
        (
            instances(["part/../../a.jpg"]),
            "part/../../a.jpg leads out of the folder of images",
        ),
        (instances(["gone.jpg"]), "train2017 lacks 1 of 1 listed images, the first is gone.jpg"),
    ],
)
def test_source_that_cannot_be_prepared_makes_no_target(source, tmp_path, old, words):
    write_content(source, old)
    assert words in refusal(tmp_path) and not (tmp_path / "small").exists()


def test_folder_that_is_not_cocos_is_one_line(tmp_path):
    run = subprocess.run([*COMMAND, tmp_path, tmp_path / "small"], capture_output=True, text=True)
    words = f"{tmp_path} has no annotations/instances_train2017.json with train2017/"
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"prepare_coco.py: error: {words}\n"


def test_what_is_in_target_is_not_replaced(source, tmp_path):
    """What a killed run leaves is in nobody's way; the images of another size stay, and are told
    as not new.
    """
    (tmp_path / "small").mkdir()
    (tmp_path / "small/1234.unfinished").touch()
    words = [str(source), str(tmp_path / "small"), "--shorter_side"]
    for side, new in (("65", 5), ("65", 0), ("70", 0)):
        args = prepare_coco.parse_arguments([*words, side])
        assert prepare_coco.prepare(args) == (5, new)
    before = digests(tmp_path)
    for target in ("coco", "coco/train2017", "coco/new"):
        line = f"{tmp_path / target} is in SOURCE, which is only read"
        assert refusal(tmp_path, target=target).startswith(line)
    swapped = prepare_coco.parse_arguments([*words[1::-1], "--shorter_side=65"])
    with pytest.raises(prepare_coco.UserError, match="json is there, and has something else"):
        prepare_coco.prepare(swapped)
    assert digests(tmp_path) == before
