"""tools/check_coco.py: what it says of annotation files and folders of images."""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import prepare_coco
from check_coco import TAIL, UserError, check, fault_of
from support.annotation_cases import write
from support.datasets import instances, numbered, write_images
from support.processes import ROOT


def fault(*arguments: object, val: object = None) -> str:
    """The line about them; "" if there is no fault."""
    try:
        check(*arguments, val=val)
    except UserError as error:
        return str(error)
    return ""


def test_the_first_fault_of_a_kind_and_the_number_of_the_others(tmp_path: Path):
    """Here of entries, then of classes that validation cannot find by their names."""
    path = write(tmp_path / "file.json", "annotations[*].id is gone")
    words = (
        "annotations[0] has no id: expected one of its own (and 5 more). Give an instances file"
    )
    assert fault(path).startswith(f"annotation file {path}: {words}")
    good = write(tmp_path / "good.json")
    other = write(
        tmp_path / "other.json", 'categories[1].name = "cow"; categories[2].name = "hen"'
    )
    lacks = "it has images of the class 'cow', which the training classes lack: give both files"
    line = f"annotation file {other}: {lacks} the same names (and 1 more)"
    assert fault(good, val=other) == line


# --- Images ------------------------------------------------------------------------------------


def make_files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"GIF89a")
    return folder


def test_labelled_images_that_the_folder_lacks_are_counted(tmp_path: Path):
    path = write(tmp_path / "file.json")  # of its five images 0004.jpg has no label
    folder = make_files(tmp_path / "images", "0000.jpg", "0003.jpg")
    (folder / "0001.jpg").symlink_to("gone.jpg")
    words = " lacks 2 of 4 listed images, the first is 0001.jpg: check the path"
    assert words in fault(path, folder)
    for name in ("gone.jpg", "0002.jpg"):
        (folder / name).symlink_to("0000.jpg")
    assert fault(path, folder) == ""
    gone = tmp_path / "gone"
    assert fault(path, gone) == f"there is no folder of images {gone}: check the path"


def test_a_packed_file_is_whole_and_has_all_images(tmp_path: Path):
    path = write(tmp_path / "file.json")
    images = tmp_path / "coco/images"
    write_images(images, numbered(5))
    words = [str(images.parent), str(tmp_path), "--shorter_side=64", "--packed"]
    args = prepare_coco.parse_arguments(words)
    prepare_coco.pack(args, "images", numbered(5))
    packed = tmp_path / "images.rgb"
    assert fault(path, packed) == ""
    with packed.open("ab") as file:
        file.write(b"more")
    assert fault(path, packed).startswith(f"{packed} and {packed}.index do not belong together")
    args.target = tmp_path / "coco"
    prepare_coco.pack(args, "images", numbered(3))
    packed = tmp_path / "coco/images.rgb"
    line = f"the packed file {packed} lacks 1 of 4 listed images, the first is 0003.jpg"
    assert fault(path, packed).startswith(line)


def encoded(kind: str, size: int = 300, **options: object) -> bytes:
    """A JPEG or PNG that is larger than what is looked at first."""
    file = io.BytesIO()
    noise = Image.frombytes("RGB", (size, size), random.Random(0).randbytes(3 * size * size))
    noise.save(file, kind, quality=95, **options)
    assert size < 300 or len(file.getvalue()) > 10 * TAIL
    return file.getvalue()


def test_images_that_are_empty_or_cut_off_are_told_from_whole_ones(tmp_path: Path):
    """Whole are also a JPEG of a phone, which has a film behind it, and what is no JPEG or PNG."""
    small = b"Exif" + b"\xff\xd8 a small one \xff\xd9"
    jpeg, png, both = encoded("JPEG"), encoded("PNG"), encoded("JPEG", exif=small)
    image = tmp_path / "image"
    small_junk = encoded("JPEG", size=40) + b"film" * TAIL
    whole = (jpeg, png, both, jpeg + bytes(2 * TAIL), jpeg + b"\n", png + b"\n", b"GIF89a")
    for content in (*whole, small_junk, png + b"film" * TAIL):
        image.write_bytes(content)
        assert fault_of(image) is None
    cut = {"JPEG": [jpeg[:-2], jpeg[: 8 * TAIL], jpeg[:2], both[: 2 * TAIL]]}
    cut["PNG"] = [png[:-9], png[: 8 * TAIL], png[:8]]
    for kind, contents in cut.items():
        for content in contents:
            image.write_bytes(content)
            assert fault_of(image)[0] == f"is cut off: no end of a {kind}"
    folder = make_files(tmp_path / "images", "0000.jpg")
    for number in (1, 2, 3):
        (folder / f"000{number}.jpg").touch()
    line = f"image {folder}/0001.jpg is empty (and 2 more). Fetch it again, or take it out of the"
    assert fault(write(tmp_path / "file.json"), folder).startswith(line)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_zero_bytes_behind_the_end_of_a_small_image_are_no_fault(tmp_path: Path, kind: str):
    image = tmp_path / "image"
    Image.new("RGB", (40, 40)).save(image, kind)
    whole = image.read_bytes()
    image.write_bytes(whole + bytes(2 * TAIL))
    assert fault_of(image) is None
    image.write_bytes(whole[:-20] + bytes(2 * TAIL))  # as a broken download
    assert fault_of(image)[0] == f"is cut off: no end of a {kind}"


NO_IMAGES = {
    "LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "HTML": b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99),
}


@pytest.mark.parametrize("kind", NO_IMAGES)
def test_a_file_that_is_no_image_is_called_what_it_is(tmp_path: Path, kind: str):
    folder = make_files(tmp_path / "images", *numbered(4))
    (folder / "0002.jpg").write_bytes(NO_IMAGES[kind])
    said = fault(write(tmp_path / "file.json"), folder)
    assert f"{folder}/0002.jpg" in said and kind in said


def test_the_number_of_more_images_is_of_one_kind_of_fault(tmp_path: Path):
    folder = make_files(tmp_path / "images", *numbered(4))
    for name, content in (("0000.jpg", b""), ("0001.jpg", b"\xff\xd8 cut"), ("0002.jpg", b"")):
        (folder / name).write_bytes(content)
    said = fault(write(tmp_path / "file.json"), folder)
    assert f"image {folder}/0000.jpg is empty (and 1 more)" in said


# --- What is there -----------------------------------------------------------------------------


def test_a_file_without_faults_is_described(tmp_path: Path):
    train = write(tmp_path / "train.json", 'categories[3] = {"id": 3, "name": "cow"}')
    val = write(tmp_path / "val.json")
    folder = make_files(tmp_path / "images", *(f"000{i}.jpg" for i in range(4)))
    described = ["images: 5, without a label: 1 (training leaves them out)"]
    described += ["classes: 3, without an image: 0", "bird 2, apple 1, clock 1"]
    assert check(train, folder, val) == [
        f"annotation file {train}",
        described[0],
        "classes: 4, without an image: 1",
        described[2],
        f"{folder} has all images that have a label; none is empty, no JPEG or PNG is cut off",
        f"annotation file {val}",
        *described,
        "The training file has all classes of the validation images",
    ]


def test_decode_lists_each_image_at_which_a_training_would_end(tmp_path: Path):
    """One is damaged in its middle, where no look at its end shows it, one has 16 bits, one has
    more pixels than Pillow decodes, and one is no image at all. One is listed twice.
    """
    write_images(tmp_path, numbered(6), size=(160, 120))
    picture = io.BytesIO()
    Image.effect_noise((160, 120), 50).save(picture, format="PNG")
    content = bytearray(picture.getvalue())
    content[len(content) // 2] ^= 255
    (tmp_path / "0001.jpg").write_bytes(content)
    Image.new("I;16", (8, 8)).save(tmp_path / "0002.jpg", format="PNG")
    (tmp_path / "0003.jpg").write_bytes(b"P5 20000 20000 255\n")
    train = tmp_path / "train.json"
    train.write_text(json.dumps(instances([*numbered(6), "0002.jpg"])))
    assert check(train, tmp_path)[-1].endswith("none is empty, no JPEG or PNG is cut off")
    (tmp_path / "0004.jpg").write_bytes(NO_IMAGES["LFS"])
    with pytest.raises(UserError) as error:
        check(train, tmp_path, every=True)
    damaged, deep, large, none, last = str(error.value).splitlines()
    assert damaged.startswith(f"image {tmp_path}/0001.jpg cannot be decoded: ")
    assert deep == f"image {tmp_path}/0002.jpg has pixels of more than 8 bits (mode I;16)"
    assert large.startswith(f"image {tmp_path}/0003.jpg is too large: Pillow decodes at most 178,")
    assert none == f"image {tmp_path}/0004.jpg is a pointer of git-LFS"
    assert last.startswith("4 of 6 images cannot be trained on")


def said_of(*arguments: object) -> str:
    """The line about a fault, or the lines about what is there."""
    try:
        return "\n".join(check(*arguments))
    except UserError as error:
        return str(error)


def test_annotations_whose_image_id_is_that_of_no_image_are_counted(tmp_path: Path):
    changes = "annotations[4].image_id = 998; annotations[5].image_id = 999"
    said = said_of(write(tmp_path / "file.json", changes)).replace(str(tmp_path), "")
    lines = [line for line in said.splitlines() if "image_id" in line]
    assert any(re.search(r"\b2\b|and 1 more", line) for line in lines)


def test_images_of_the_folder_that_the_file_does_not_list_are_counted(tmp_path: Path):
    folder = make_files(tmp_path / "images", *numbered(4))
    (folder / "part").mkdir()
    for name in ("8.JPG", "9.png", *(f"part/{i}.jpeg" for i in range(5))):
        (folder / name).write_bytes(b"GIF89a")
    said = said_of(write(tmp_path / "file.json"), folder)
    assert re.search(r"\b7\b", said.replace(str(tmp_path), ""))


def test_a_path_from_the_root_is_called_absolute(tmp_path: Path):
    path = write(tmp_path / "file.json", 'images[1].file_name = "/data/0001.jpg"')
    said = fault(path).replace(path, "")
    assert "/data/0001.jpg" in said and "absolute" in said


# --- The command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ('categories[0].name = "Käse"', 0, "K?se 2"),
        ("annotations[*].id is gone", 2, "has no id: expected one of its own (and 5 more)"),
        ('images[0].file_name = "\\ud800"', 2, "lacks 1 of 4 listed images, the first is ?: "),
        (None, 2, "No such file or directory"),
    ],
)
def test_the_command_says_what_is_there_or_ends_with_2(
    tmp_path: Path, changes: str | None, code: int, words: str
):
    """Where Python has nothing but itself (-S), and a terminal few characters."""
    path = tmp_path / "file.json"
    if changes:
        write(path, changes)
    folder = make_files(tmp_path / "images", *(f"000{i}.jpg" for i in range(4)))
    command = [sys.executable, "-S", ROOT / "tools" / "check_coco.py", path, folder]
    how = dict(env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    done = subprocess.run(command, timeout=60, **how)
    assert (done.returncode, done.stderr) == (code, "") and words in done.stdout
    assert not code or done.stdout.count("\n") == 1
    assert not re.search(r"Error|Errno|Exception|Traceback", done.stdout)
