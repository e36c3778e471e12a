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
from check_coco import HEAD, TAIL, UserError, check, check_images
from support.annotation_cases import changed
from support.datasets import numbered, write_images
from support.processes import ROOT


def write(path: Path, changes: str = "") -> str:
    """The good annotation file with changes, as tests/data/annotation_cases.txt has them."""
    path.write_text(json.dumps(changed(changes)))
    return str(path)


def fault(*arguments: object, val: object = None) -> str:
    """The line about them; "" if there is no fault."""
    try:
        check(*arguments, val=val)
    except UserError as error:
        return str(error)
    return ""


def lost(folder: Path, *names: str) -> str:
    """The line about images that the folder lacks; "" if it has all."""
    try:
        check_images(folder, names)
    except UserError as error:
        return str(error)
    return ""


# --- Entries, and several files ----------------------------------------------------------------


@pytest.mark.guards("check-count")
def test_the_first_fault_of_a_kind_and_the_number_of_the_others(tmp_path: Path):
    path = write(tmp_path / "file.json", "annotations[*].id is gone; images[1].file_name is gone")
    words = "annotations[0] has no id: expected a whole number (and 5 more). tools/prepare_coco.py"
    assert fault(path).startswith(f"annotation file {path}: {words}")


@pytest.mark.guards("check-classes")
def test_classes_that_validation_cannot_find_by_name(tmp_path: Path):
    good = write(tmp_path / "good.json")
    same = write(tmp_path / "same.json", 'categories[2].name = "bird"')
    other = write(
        tmp_path / "other.json", 'categories[1].name = "cow"; categories[2].name = "hen"'
    )
    twice = "two categories with images are called 'bird': rename one"
    assert fault(same, val=good).startswith(f"annotation file {same}: {twice}")
    lacks = "it has images of the class 'cow', which the training classes lack: give both files"
    line = f"annotation file {other}: {lacks} the same names (and 1 more)"
    assert fault(good, val=other) == line
    assert fault(same) == ""  # alone it trains


# --- Images ------------------------------------------------------------------------------------


PLACES = [  # the files that are there, the folder that is given, the listed name, what is said
    (
        "set/train/1.jpg",
        "set/train",
        "train/1.jpg",
        "train/1.jpg is in ROOT/set: give that folder",
    ),
    ("set/train/1.jpg", "set", "1.jpg", "1.jpg is in ROOT/set/train: give that folder"),
    ("set/train/1.jpg", "set/val", "1.jpg", "1.jpg is in ROOT/set/train: give that folder"),
    ("set/1.jpg", "set", "part/1.jpg", "1.jpg is there: name it in the annotation file"),
    ("set/part/1.JPG", "set", "part/1.jpg", "part/1.JPG is there: name it in the annotation file"),
    ("set/1.jpg", "set", "2.jpg", "check the path, and where links lead"),
    ("set/1.jpg", "set", "a\0b/2.jpg", "check the path, and where links lead"),
]


@pytest.mark.guards("hint-folder", "hint-split", "hint-case")
def test_where_a_lost_image_is(tmp_path: Path):
    for number, (file, folder, name, words) in enumerate(PLACES):
        root = tmp_path / str(number)
        for path in (root / file, root / folder / "2.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        begin = f"the folder of images {root / folder} lacks 1 of 1 listed images, the first is "
        line = lost(root / folder, name)
        assert line.startswith(f"{begin}{name}: {words.replace('ROOT', str(root))}"), line


def make_files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"GIF89a")
    return folder


@pytest.mark.guards("check-lost-images")
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


@pytest.mark.guards("check-packed-size", "check-packed-lacks")
def test_a_packed_file_is_whole_and_has_all_images(tmp_path: Path):
    path = write(tmp_path / "file.json")
    images = tmp_path / "coco/images"
    write_images(images, numbered(5))
    words = [str(images.parent), str(tmp_path), "--shorter_side=64", "--packed"]
    args = prepare_coco.parse_arguments(words)
    prepare_coco.pack(args, "images", numbered(5))
    packed = tmp_path / "images.rgb"
    assert fault(path, packed) == ""
    size = packed.stat().st_size
    with packed.open("ab") as file:
        file.write(b"more")
    line = f"{packed} has {size + 4} bytes, but {packed}.index is of a file with {size}"
    assert fault(path, packed).startswith(line)
    args.target = tmp_path / "coco"
    prepare_coco.pack(args, "images", numbered(3))
    packed = tmp_path / "coco/images.rgb"
    line = f"the packed file {packed} lacks 1 of 4 listed images, the first is 0003.jpg"
    assert fault(path, packed).startswith(line)


def encoded(kind: str, **options: object) -> bytes:
    """A JPEG or PNG that is larger than what is looked at first."""
    file = io.BytesIO()
    noise = Image.frombytes("RGB", (300, 300), random.Random(0).randbytes(3 * 300 * 300))
    noise.save(file, kind, quality=95, **options)
    assert len(file.getvalue()) > HEAD
    return file.getvalue()


@pytest.mark.guards("check-empty", "check-cut-off", "check-film", "check-small-one")
def test_images_that_are_empty_or_cut_off_are_told_from_whole_ones(tmp_path: Path):
    """Whole are also a JPEG of a phone, which has a film behind it, and what is no JPEG or PNG."""
    small = b"Exif" + b"\xff\xd8 a small one \xff\xd9"
    jpeg, png, both = encoded("JPEG"), encoded("PNG"), encoded("JPEG", exif=small)
    path, folder = write(tmp_path / "file.json"), make_files(tmp_path / "images")
    whole = [jpeg, png, both, jpeg + bytes(2 * TAIL), jpeg + b"\n", png + b"\n", b"GIF89a"]
    cut = {"JPEG": [jpeg[:-2], jpeg[: HEAD // 2], jpeg[:2], both[: 2 * TAIL]]}
    cut["PNG"] = [png[:-9], png[: HEAD // 2], png[:8]]
    names = [f"000{number}.jpg" for number in range(4)]  # 0004.jpg has no label
    for name in names:
        (folder / name).write_bytes(jpeg)
    first = folder / names[0]
    for content in whole:
        first.write_bytes(content)
        assert fault(path, folder) == ""
    advice = "Fetch it again, or take it out of the annotation file"
    for kind, contents in cut.items():
        for content in contents:
            first.write_bytes(content)
            words = f"is cut off: it lacks the end of a {kind}"
            assert fault(path, folder) == f"image {first} {words}. {advice}"
    for name in names[1:]:
        (folder / name).write_bytes(b"")
    first.write_bytes(jpeg)
    line = fault(path, folder)
    assert line == f"image {folder / names[1]} is empty (and 2 more). {advice}"


# --- What is there -----------------------------------------------------------------------------


def test_a_file_without_faults_is_described(tmp_path: Path):
    train = write(tmp_path / "train.json", 'categories[3] = {"id": 3, "name": "cow"}')
    val = write(tmp_path / "val.json", "annotations[*].image_id = [100, 101, 102, 103, 104, 999]")
    folder = make_files(tmp_path / "images", *(f"000{i}.jpg" for i in range(4)))
    assert check(train, folder, val) == [
        f"annotation file {train}",
        "images: 5, without a label: 1 (training leaves them out)",
        "annotations: 6, of no image of this file: 0",
        "classes: 4, without an image: 1",
        "bird 2, apple 1, clock 1",
        f"{folder} has all images that have a label; none is empty or cut off",
        f"annotation file {val}",
        "images: 5, without a label: 0 (training leaves them out)",
        "annotations: 6, of no image of this file: 1",
        "classes: 3, without an image: 0",
        "bird 2, apple 2, clock 1",
        "The training file has all classes of the validation images",
    ]


# --- The command -------------------------------------------------------------------------------


def command(*arguments: object, **env: str) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr, where Python has nothing but itself (-S)."""
    words = [sys.executable, "-S", ROOT / "tools" / "check_coco.py", *arguments]
    done = subprocess.run(
        [*map(str, words)], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.guards("check-python-alone")
def test_the_command_says_what_is_there(tmp_path: Path):
    path = write(tmp_path / "file.json", 'categories[0].name = "Käse"')
    code, out, err = command(path, "--val", path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "") and "K?se 2" in out and out.count("annotation file") == 2


@pytest.mark.guards("check-exit-code")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("annotations[*].id is gone", "has no id: expected a whole number (and 5 more)"),
        ('images[0].file_name = "\\ud800"', "lacks 4 of 4 listed images, the first is ?: "),
        (None, "No such file or directory"),
    ],
)
def test_the_command_ends_with_2_after_a_fault(tmp_path: Path, changes: str | None, words: str):
    path = tmp_path / "file.json"
    if changes:
        write(path, changes)
    code, out, err = command(path, make_files(tmp_path / "images"))
    assert (code, err, out.count("\n")) == (2, "", 1) and words in out
    assert not re.search(r"Error|Errno|Exception|Traceback", out)
