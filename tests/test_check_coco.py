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

from check_coco import UserError, check
from support.annotation_cases import Case, cases, changed, plain_id
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
        return str(error).partition("\n")[0]
    return ""


# --- The tables in tests/data ------------------------------------------------------------------


@pytest.mark.guards("check-other-kinds")
@pytest.mark.parametrize(
    "case", [case for case, _ in cases()], ids=lambda case: plain_id([case.name])
)
def test_each_file_of_the_table_is_fine_or_its_fault_is_named(tmp_path: Path, case: Case):
    path, good = tmp_path / "file.json", write(tmp_path / "good.json")
    case.write(path)
    line = fault(good, val=path) if case.validation else fault(path)
    line = re.sub(r" \(and \d more\)", "", line)
    assert case.fits(line, path) if case.line else line == "", line


# --- Several entries, several files -----------------------------------------------------------


@pytest.mark.guards("check-count")
def test_the_first_fault_of_a_kind_and_the_number_of_the_others(tmp_path: Path):
    path = write(tmp_path / "file.json", "annotations[*].id is gone; images[1].file_name is gone")
    words = "annotations[0] has no id: expected a number, as ids of annotations are (and 5 more)"
    assert fault(path) == f"annotation file {path}: {words}"


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
    words = " lacks 2 of 4 listed images, the first is 0001.jpg: check the path"
    assert words in fault(path, folder)
    for name in ("0001.jpg", "0002.jpg"):
        (folder / name).touch()
    assert fault(path, folder) == ""


def test_names_of_windows_and_of_lvis(tmp_path: Path):
    changes = r'images[0].file_name = "part\\0000.jpg"; images[1].file_name = "a\\b.jpg"; '
    changes += 'images[2].file_name is gone; images[2].coco_url = "http://coco.example/c/2.jpg"'
    path = write(tmp_path / "file.json", changes)
    folder = make_files(tmp_path / "images", r"a\b.jpg", "2.jpg", "0003.jpg")
    make_files(folder / "part", "0000.jpg")
    assert fault(path, folder) == ""


# --- What is there -----------------------------------------------------------------------------


# --- The command -------------------------------------------------------------------------------


def command(*arguments: object, **env: str) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr, where Python has nothing but itself (-S)."""
    words = [sys.executable, "-S", ROOT / "tools" / "check_coco.py", *arguments]
    done = subprocess.run(
        [*map(str, words)], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


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


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path):
    words = [sys.executable, ROOT / "tools" / "check_coco.py", write(tmp_path / "file.json")]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*map(str, words)], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
