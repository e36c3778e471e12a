"""tools/check_coco.py: what it says of annotation files and folders of images."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from check_coco import UserError, check, faults_of_images
from support.annotation_cases import Case, cases, changed, marked, plain_id, rows
from support.processes import ROOT

OTHER_FILE = "Of COCO's files give the instances file, such as instances_train2017.json"


def write(path: Path, changes: str = "") -> str:
    """The good annotation file with changes, as tests/data/annotation_cases.txt has them."""
    path.write_text(json.dumps(changed(changes)))
    return str(path)


def faults(*arguments: object, **options: object) -> list[str]:
    """The lines about them; [] if there is no fault."""
    try:
        check(*arguments, **options)
    except UserError as error:
        return list(error.args)
    return []


# --- The tables in tests/data ------------------------------------------------------------------


@pytest.mark.guards("check-other-kinds")
@pytest.mark.parametrize(
    "case", [case for case, _ in cases()], ids=lambda case: plain_id([case.name])
)
def test_each_file_of_the_table_is_fine_or_its_fault_is_named(tmp_path: Path, case: Case):
    path, good = tmp_path / "file.json", write(tmp_path / "good.json")
    case.write(path)
    lines = faults(good, val=path) if case.validation else faults(path)
    assert bool(lines) == bool(case.line)
    for line in lines[:1]:  # a wrong id of a category is also one that labels lack
        assert case.fits(re.sub(r" \(and \d more\)", "", line), path), line


@pytest.mark.parametrize("row", marked(rows("missing_images.txt")), ids=plain_id)
def test_where_a_lost_image_is(tmp_path: Path, row: list[str]):
    files, folder, name, words = (json.loads(f'"{part}"') for part in row)
    for file in files.split("; "):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    place = tmp_path / folder
    begin = f"the folder of images {place} lacks 1 of 1 listed images, the first is {name}: "
    assert faults_of_images(place, [name]) == [begin + words.replace("ROOT", str(tmp_path))]


# --- Several faults ----------------------------------------------------------------------------

SEVERAL = {
    "annotations[*].id is gone": [
        ": annotations[0] has no id: expected a number, as ids of annotations are (and 5 more)"
    ],
    "annotations[*].category_id is gone": [
        ": annotations[0] has no category_id: expected a number, as ids of categories are "
        f"(and 5 more). {OTHER_FILE}"
    ],
    "images is gone; categories = []": [
        f" has no images: expected a list of them (and 1 more). {OTHER_FILE}"
    ],
    "categories = 7; images[1] = null; images[3] = 7; annotations[2] = []": [
        f" has 7 as categories: expected a list of them. {OTHER_FILE}",
        ": images[1] is null: expected an object (and 1 more)",
        ": annotations[2] is a list: expected an object",
    ],
    # Of ids of two types no label is looked up: each would be wrong.
    "categories[*].id as text": [
        ': categories[0] has the text "7" as id: expected a number, as ids of categories are '
        "(and 2 more)"
    ],
    "images[*].id = [100, 101, 102, 101, 101]; categories[2].id = 7": [
        ": images[3] has the id 101, as images[1] has: expected another one (and 1 more)",
        ": categories[2] has the id 7, as categories[0] has: expected another one",
        ": annotations[2] has 9 as category_id: expected the id of a category",
    ],
    "annotations[*].category_id = [8, 8, 8, 7, 8, 8]; annotations[3].id is gone": [
        ": annotations[0] has 8 as category_id: expected the id of a category (and 2 more)",
        ": annotations[3] has no id: expected a number, as ids of annotations are",
    ],
    'images[1].file_name = "/1.jpg"; images[2].file_name = "../2.jpg"; images[3].file_name = 7; '
    "categories[0].name = true": [
        ": images[3] has 7 as file_name: expected text",
        ": categories[0] has true as name: expected text",
        ": /1.jpg leaves the image folder (and 1 more)",
    ],
}


@pytest.mark.guards("check-count")
@pytest.mark.parametrize("changes", SEVERAL)
def test_first_fault_of_each_kind_and_the_number_of_the_others(tmp_path: Path, changes: str):
    path = write(tmp_path / "file.json", changes)
    assert faults(path) == [f"annotation file {path}{line}" for line in SEVERAL[changes]]


def test_faults_of_both_files_are_named(tmp_path: Path):
    train = write(tmp_path / "train.json", "annotations[0].id is gone")
    val = write(tmp_path / "val.json", "categories is gone")
    first, second = faults(train, tmp_path / "none", val)
    assert first.startswith(f"annotation file {train}: annotations[0] has no id")
    assert second.startswith(f"annotation file {val} has no categories")


def test_after_a_fault_of_the_training_file_images_and_classes_wait(tmp_path: Path):
    train = write(tmp_path / "train.json", "annotations[0].id is gone")
    val = write(tmp_path / "val.json", 'categories[0].name = "cow"')
    (line,) = faults(train, tmp_path / "none", val)
    assert line.startswith(f"annotation file {train}: annotations[0] has no id")


@pytest.mark.guards("check-classes")
def test_classes_that_validation_cannot_find_by_name(tmp_path: Path):
    same = write(tmp_path / "same.json", 'categories[2].name = "bird"')
    other = write(
        tmp_path / "other.json", 'categories[1].name = "cow"; categories[2].name = "hen"'
    )
    twice = "categories 7 and 9 have images, and both are called 'bird': rename one"
    lacks = "it has images of the class 'cow', which the training classes lack: give both files"
    first, second = faults(same, val=other)
    assert first.startswith(f"annotation file {same}: {twice}")
    assert second.startswith(f"annotation file {other}: {lacks}")
    assert second.endswith("the same names (and 1 more)")
    assert faults(same) == []  # alone it trains


# --- Images ------------------------------------------------------------------------------------


def make_files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.guards("check-lost-images")
def test_labelled_images_that_the_folder_lacks_are_counted(tmp_path: Path):
    path = write(tmp_path / "file.json")  # of its five images 0004.jpg has no label
    folder = make_files(tmp_path / "images", "0000.jpg", "0003.jpg")
    (line,) = faults(path, folder)
    assert line.endswith(" lacks 2 of 4 listed images, the first is 0001.jpg: check the path")
    for name in ("0001.jpg", "0002.jpg"):
        (folder / name).touch()
    assert faults(path, folder) == []


@pytest.mark.guards("check-links")
@pytest.mark.parametrize("what", ["a folder", "a link"])
def test_what_is_no_file_is_a_lost_image(tmp_path: Path, what: str):
    if what == "a folder":
        (tmp_path / "1.jpg").mkdir()
    else:
        (tmp_path / "1.jpg").symlink_to("gone.jpg")
    (line,) = faults_of_images(tmp_path, ["1.jpg"])
    assert line.endswith("there it is a folder, or a link to a file that is gone: check it")
    (tmp_path / "gone.jpg").touch()
    assert faults_of_images(tmp_path, ["1.jpg"]) == [] or what == "a folder"


def test_names_of_windows_and_of_lvis(tmp_path: Path):
    changes = r'images[0].file_name = "part\\0000.jpg"; images[1].file_name = "a\\b.jpg"; '
    changes += 'images[2].file_name is gone; images[2].coco_url = "http://coco.example/c/2.jpg"'
    path = write(tmp_path / "file.json", changes)
    folder = make_files(tmp_path / "images", r"a\b.jpg", "2.jpg", "0003.jpg")
    make_files(folder / "part", "0000.jpg")
    assert faults(path, folder) == []


def test_a_lost_image_with_a_backslash_is_shown_as_it_was_looked_for(tmp_path: Path):
    path = write(tmp_path / "file.json", r'images[1].file_name = "part\\0001.jpg"')
    folder = make_files(tmp_path / "images", *(f"000{i}.jpg" for i in range(4)))
    (line,) = faults(path, folder)
    assert "the first is part/0001.jpg: 0001.jpg is there, in another folder" in line
    assert line.endswith(" (the file has \\ in place of /)")


def test_links_that_lead_nowhere_do_no_harm(tmp_path: Path):
    make_files(tmp_path / "part", "2.jpg")
    (tmp_path / "1.jpg").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    assert faults_of_images(tmp_path, ["1.jpg", "part/2.jpg"]) == []
    (line,) = faults_of_images(tmp_path, ["2.jpg", "self/2.jpg"])
    assert "lacks 2 of 2" in line and f"2.jpg is in {tmp_path}/part: give that folder" in line
    (line,) = faults_of_images(tmp_path, ["3.jpg"])
    assert line.endswith("the first is 3.jpg: check the path")


# --- What is there -----------------------------------------------------------------------------


def test_a_file_without_faults_is_described(tmp_path: Path):
    train = write(tmp_path / "train.json", 'categories[3] = {"id": 3, "name": "cow"}')
    val = write(tmp_path / "val.json", "annotations[*].image_id = [100, 101, 102, 103, 104, 999]")
    folder = make_files(tmp_path / "images", *(f"000{i}.jpg" for i in range(4)))
    assert check(train, folder, val) == [
        f"annotation file {train}",
        "images: 5, without a label: 1 (training leaves them out; the first is 0004.jpg)",
        "annotations: 6, of no image of this file: 0",
        "classes: 4, without an image: 1. Images of each class:",
        "2 bird    1 apple   1 clock   0 cow",
        f"annotation file {val}",
        "images: 5, without a label: 0",
        "annotations: 6, of no image of this file: 1",
        "classes: 3, without an image: 0. Images of each class:",
        "2 bird    2 apple   1 clock",
        f"{folder} has all images that have a label",
        "The training file has all classes of the validation images",
    ]


@pytest.mark.parametrize("name", ["is gone", "= null", '= ""', "= 5", "= 5.0"])
def test_a_class_without_a_name_is_called_by_its_id(tmp_path: Path, name: str):
    path = write(tmp_path / "file.json", f"categories[1].name {name}")
    assert check(path)[-1] == "2 bird    1 5       1 clock"


def test_eighty_classes_are_read_in_columns_the_largest_first(tmp_path: Path):
    names = [f"class {'x' * (number % 13)}{number}" for number in range(80)]
    content = changed("categories = []; images = []; annotations = []")
    content["categories"] = [{"id": i, "name": name} for i, name in enumerate(names)]
    for number in range(80 * 81 // 2):
        content["images"].append({"id": number, "file_name": "1.jpg"})
    labels = [label for label in range(80) for _ in range(label + 1)]
    for number, label in enumerate(labels):
        content["annotations"].append({"id": 1, "image_id": number, "category_id": label})
    (tmp_path / "file.json").write_text(json.dumps(content))
    lines = check(tmp_path / "file.json")[4:]
    assert len(lines) == 27 and max(map(len, lines)) <= 100
    columns = [re.findall(r"(\d+) (class \w+)", line) for line in lines]
    found = [row[column] for column in range(3) for row in columns if column < len(row)]
    assert found == [(str(label + 1), names[label]) for label in reversed(range(80))]


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
    path = write(tmp_path / "file.json", 'categories[0].name = "Käse\\n"')
    code, out, err = command(path, "--val", path, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "") and "2 K?se?" in out and out.count("annotation file") == 2


@pytest.mark.guards("check-exit-code")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("annotations[*].id is gone", "has no id: expected a number, as ids of annotations are"),
        ('images[0].file_name = "\\ud800\\n"', "lacks 4 of 4 listed images, the first is ??: "),
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


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path):
    words = [sys.executable, ROOT / "tools" / "check_coco.py", write(tmp_path / "file.json")]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*map(str, words)], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
