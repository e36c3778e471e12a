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

from check_coco import HEAD, TAIL, UserError, check, check_images
from support.annotation_cases import Case, cases, changed, marked, plain_id, rows
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


# --- The tables in tests/data ------------------------------------------------------------------


@pytest.mark.guards("check-other-kinds", "check-form", "large-floats")
@pytest.mark.parametrize(
    "case", [case for case, _ in cases()], ids=lambda case: plain_id([case.name])
)
def test_each_file_of_the_table_is_fine_or_its_fault_is_named(tmp_path: Path, case: Case):
    path, good = tmp_path / "file.json", write(tmp_path / "good.json")
    case.write(path)
    line = fault(good, val=path) if case.validation else fault(path)
    line = re.sub(r" \(and \d+ more\)", "", line)
    assert case.fits(line, path) if case.line else line == "", line


@pytest.mark.parametrize("row", marked(rows("missing_images.txt")), ids=plain_id)
def test_where_a_lost_image_is(tmp_path: Path, row: list[str]):
    files, folder, name, words = (json.loads(f'"{part}"') for part in row)
    for file in files.split("; "):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    place = tmp_path / folder
    begin = f"the folder of images {place} lacks 1 of 1 listed images, the first is {name}: "
    assert lost(place, name) == begin + words.replace("ROOT", str(tmp_path))


# --- Several entries, several files -----------------------------------------------------------


@pytest.mark.guards("check-count")
def test_the_first_fault_of_a_kind_and_the_number_of_the_others(tmp_path: Path):
    path = write(tmp_path / "file.json", "annotations[*].id is gone; images[1].file_name is gone")
    words = "annotations[0] has no id: expected a number, as ids of annotations are (and 5 more)"
    assert fault(path) == f"annotation file {path}: {words}"


def test_a_panoptic_file_is_the_wrong_one_of_cocos(tmp_path: Path):
    """Its annotations have neither an id nor a category."""
    changes = "annotations[*].category_id is gone; annotations[*].id is gone"
    line = fault(write(tmp_path / "file.json", changes))
    assert "annotations[0] has no category_id" in line
    assert line.endswith(
        "(and 5 more). Of COCO's files give the instances file, such as instances_train2017.json"
    )


@pytest.mark.guards("check-classes")
def test_classes_that_validation_cannot_find_by_name(tmp_path: Path):
    good = write(tmp_path / "good.json")
    same = write(tmp_path / "same.json", 'categories[2].name = "bird"')
    other = write(
        tmp_path / "other.json", 'categories[1].name = "cow"; categories[2].name = "hen"'
    )
    twice = "2 categories that have images are called 'bird': rename all but one"
    lacks = "it has images of the class 'cow', which the training classes lack: give both files"
    assert fault(same, val=good).startswith(f"annotation file {same}: {twice}")
    line = fault(good, val=other)
    assert line.startswith(f"annotation file {other}: {lacks}")
    assert line.endswith("the same names (and 1 more)")
    assert fault(same) == ""  # alone it trains


# --- Images ------------------------------------------------------------------------------------


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


def test_a_folder_of_images_that_is_not_there_is_said(tmp_path: Path):
    path = write(tmp_path / "file.json")
    gone = tmp_path / "gone"
    assert fault(path, gone) == f"there is no folder of images {gone}: check the path"


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
        ("annotations[*].id is gone", "has no id: expected a number, as ids of annotations are"),
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


def test_wrong_arguments_are_on_stderr():
    code, out, err = command()
    assert (code, out) == (2, "") and "required: ANNOTATIONS" in err
