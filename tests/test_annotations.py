"""Annotation files and image folders as people have them: what trains, and what the line says."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import sys
import time
import unicodedata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torchvision

import prepare_coco
from support.datasets import instances, make_set, numbered, write_images
from support.forks import load, run_forked
from support.launchers import FAST
from support.processes import LONG, ROOT, SCRIPT, free_port, start

PYTHON_NAME = r"\b\w*(Error|Exception)\b|Errno|NoneType|Traceback"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script as a module."""
    return load(str(SCRIPT))


def good() -> dict:
    """Four images with three annotations each, of three categories."""
    content = instances(numbered(4), [7, 5, 9, 7], [5, 7, 9])
    more = [{**a, "id": 10 * n + a["id"]} for n in (1, 2) for a in content["annotations"]]
    content["annotations"] += more
    return content


def write(path: Path, content: object) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def said(demo: ModuleType, path: Path, folder: Path) -> str:
    """The script's line about a file, which must also be that of prepare_coco.py; "" if it trains
    and is prepared.
    """
    lines = []
    for read, kind in (
        (demo.read_image_list, demo.UserError),
        (prepare_coco.read_instances, prepare_coco.UserError),
    ):
        try:
            read(path, folder)
            lines.append("")
        except kind as error:
            lines.append(str(error))
    assert lines[0] == lines[1]
    assert not re.search(PYTHON_NAME, lines[0]) and "\n" not in lines[0]
    return lines[0]


# --- The cases that come with the project ------------------------------------------------------

OTHER_FILE = r"Of COCO's files give the instances file, such as instances_train2017\.json"
CASES = {
    "00": "",
    "01": r"annotations\[0\] has no id: expected a number",
    "02": "",
    "03": "",
    "04": r'annotations\[0\] has the text "4" as category_id: expected a number',
    "05": rf"has no categories: expected a list of them\. {OTHER_FILE}",
    "06": rf"annotations\[0\] has no category_id: .*\. {OTHER_FILE}",
    "07": r"begins with a byte order mark: save it as UTF-8 without one",
    "08": r"is not JSON in UTF-8: it is a zip archive: unpack it",
    "09": r"is a list: expected an object with images, annotations and categories",
    "10": "",
    "11": r"annotations\[1\] has null as category_id: expected a number",
    "12": "",
    "13": "",
    "14": "",
}


@pytest.fixture(scope="module")
def cases(tiny_coco: Path) -> dict[str, Path]:
    """By number; they lie beside the checkout, as the images do."""
    found = {path.name[:2]: path for path in tiny_coco.parent.glob("annotation_cases/*.json")}
    if not found:
        pytest.skip("the annotation cases are not there")
    assert {*found} == {*CASES}
    return found


@pytest.mark.parametrize("case", CASES)
def test_case_of_the_table_is_read_or_named(demo, cases, tiny_coco, case):
    line = said(demo, cases[case], tiny_coco / "train2017")
    assert line.startswith(f"annotation file {cases[case]}") == bool(CASES[case])
    assert re.search(CASES[case] or "^$", line)


@pytest.mark.parametrize(("case", "folder"), [("02", "train2017"), ("03", "."), ("10", ".")])
def test_names_of_such_a_file_are_those_of_the_images(demo, cases, tiny_coco, case, folder):
    names = demo.read_image_list(cases[case], tiny_coco / folder).names
    assert len(demo.check_images(tiny_coco / folder, names)) == 6


HINTS = {
    "03": r"train2017/000000391895\.jpg is in {}: give that folder",
    "10": r"train2017/000000391895\.jpg is in {}: give that folder",
    "12": r"000000391895\.jpg is there, in another case",
}


@pytest.mark.parametrize("case", HINTS)
def test_images_of_such_a_file_are_found_elsewhere(demo, cases, tiny_coco, case):
    names = demo.read_image_list(cases[case], tiny_coco / "train2017").names
    with pytest.raises(demo.UserError) as error:
        demo.check_images(tiny_coco / "train2017", names)
    assert "lacks 6 of 6 listed images" in str(error.value)
    assert re.search(HINTS[case].format(tiny_coco), str(error.value))


@pytest.mark.parametrize("case", ["13", "14"])
def test_a_validation_file_with_other_ids_has_the_same_labels(demo, cases, case):
    train_list = demo.read_image_list(cases["00"])
    found = demo.read_image_list(cases[case], None, train_list)
    assert found.labels == train_list.labels and found.categories == train_list.categories


# --- Every list, entry and field ---------------------------------------------------------------

MISSING = "missing"
IDS = [("images", "id"), ("categories", "id")]
IDS += [("annotations", key) for key in ("id", "image_id", "category_id")]
SHOWN = [(None, "null"), ("7", 'the text "7"'), (7, "7"), ([7], "a list"), ({"a": 7}, "an object")]
SHOWN += [(True, "true"), (math.nan, "NaN"), (math.inf, "Infinity"), ("", 'the text ""')]


def faults() -> list[tuple[tuple, object, str]]:
    """Of each list, entry and field: where it is, what is there, and what the line says."""
    rows: list[tuple[tuple, object, str]] = []
    for which in ("images", "categories", "annotations"):
        expected = f"expected a list of them. {INSTANCES}"
        rows += [((which,), empty, f"has no {which}: {expected}") for empty in (MISSING, [])]
        rows += [((which,), {}, f"has an object as {which}: {expected}")]
        for value, shown in SHOWN:
            if not isinstance(value, list):
                rows.append(((which,), value, f"has {shown} as {which}: {expected}"))
            if not isinstance(value, dict):
                for i in (0, 2):
                    line = f": {which}[{i}] is {shown}: expected an object"
                    rows.append(((which, i), value, line))
    for which, key in [*IDS, ("images", "file_name"), ("categories", "name")]:
        good = {"file_name": [str], "name": [str, int, float, type(None)]}.get(key, [int])
        expected = "expected a number" if key.endswith("id") else "expected text"
        for i in (0, 2):
            if key != "name":
                line = f": {which}[{i}] has no {key}: {expected}"
                rows.append(((which, i, key), MISSING, line))
            for value, shown in SHOWN:
                if type(value) not in good or (value == "" and key == "file_name"):
                    line = f": {which}[{i}] has {shown} as {key}: {expected}"
                    rows.append(((which, i, key), value, line))
    for name in ("../0001.jpg", "/0001.jpg", "..\\0001.jpg"):
        line = f": {name} leaves the image folder".replace("\\", "/")
        rows.append((("images", 1, "file_name"), name, line))
    line = "images[2] has the id 100, as images[0] has: expected another one"
    rows.append((("images", 2, "id"), 100, line))
    line = "categories[2] has the id 5, as categories[0] has: expected another one"
    rows.append((("categories", 2, "id"), 5, line))
    line = "annotations[2] has 8 as category_id: expected the id of a category"
    rows.append((("annotations", 2, "category_id"), 8, line))
    return rows


INSTANCES = prepare_coco.INSTANCES
FAULTS = {f"{where} {value}": (where, value, line) for where, value, line in faults()}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_with_list_index_and_field(demo, tmp_path, name):
    content, (where, value, line) = good(), FAULTS[name]
    inner = content
    for step in where[:-1]:
        inner = inner[step]
    if value is MISSING:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    path = write(tmp_path / "file.json", content)
    found = said(demo, path, tmp_path)
    assert found.startswith(f"annotation file {path}") and line in found


@pytest.mark.parametrize("key", ["category_id", "image_id"])
def test_true_is_no_id_though_it_equals_1(demo, tmp_path, key):
    content = good()
    which = {"category_id": "categories", "image_id": "images"}[key]
    content[which][0]["id"] = content["annotations"][0][key] = 1
    content["annotations"][4][key] = True
    line = said(demo, write(tmp_path / "file.json", content), tmp_path)
    assert f"annotations[4] has true as {key}: expected a number" in line


def test_floats_that_may_stand_for_another_id_are_named(demo, tmp_path):
    """As a table writes a column of large ids in which one is missing."""
    content = good()
    for number, category in enumerate(content["categories"]):
        category["id"] = 2**60 + number
    for annotation in content["annotations"]:
        annotation["category_id"] = float(2**60)
    line = said(demo, write(tmp_path / "file.json", content), tmp_path)
    assert re.search(r"annotations\[0\] has 1\.15\d+e\+18 as category_id: expected a number", line)


def test_ids_that_no_image_has_are_named(demo, tmp_path):
    content = good()
    for image in content["images"]:
        image["id"] += 50
    line = said(demo, write(tmp_path / "file.json", content), tmp_path)
    assert line.endswith("no image has an annotation: no image_id is the id of an image")


@pytest.mark.parametrize(("which", "key"), IDS[:2] + IDS[3:])
def test_ids_that_are_text_in_one_list_alone_are_named(demo, tmp_path, which, key):
    content = good()
    for entry in content[which]:
        entry[key] = str(entry[key])
    line = said(demo, write(tmp_path / "file.json", content), tmp_path)
    assert re.search(rf"{which}\[0\] has the text \"\d+\" as {key}: expected a number", line)


TEXT = json.dumps(good())
NO_JSON = {
    "empty": (b"", r"is not JSON, or not all of it is there \(0 bytes\): .*\(char 0\)"),
    "cut": (TEXT[:500].encode(), r"not all of it is there \(500 bytes\): .*\(char \d+\)"),
    "gzip": (b"\x1f\x8b\x08\0", "is a gzip archive: unpack it"),
    "utf-16": (TEXT.encode("utf-16"), "it is UTF-16: save it as UTF-8"),
    "utf-16-le": (TEXT.encode("utf-16-le"), "it is UTF-16: save it as UTF-8"),
    "utf-16-be": (TEXT.encode("utf-16-be"), "it is UTF-16: save it as UTF-8"),
    "latin-1": (TEXT.replace("category 5", "Käse").encode("latin-1"), "in position"),
    "web page": (b"<!DOCTYPE html>", r"is not JSON, .*\(char 0\)"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "long number": (b"[" + b"1" * 9999 + b"]", "is not JSON|is a list"),
    "text": (b'"text"', 'is the text "text": expected an object'),
    "null": (b"null", "is null: expected an object"),
}


@pytest.mark.parametrize("name", NO_JSON)
def test_file_that_is_no_json_says_so(demo, tmp_path, name):
    path = write(tmp_path / "file.json", NO_JSON[name][0])
    line = said(demo, path, tmp_path)
    assert line.startswith(f"annotation file {path}") and re.search(NO_JSON[name][1], line)


def test_file_that_cannot_be_read_says_why_in_the_systems_words(demo, tmp_path):
    assert said(demo, tmp_path, tmp_path) == f"annotation file {tmp_path}: Is a directory"
    gone = tmp_path / "gone.json"
    assert said(demo, gone, tmp_path) == f"annotation file {gone}: No such file or directory"


def as_floats(content: dict) -> None:
    for which, key in IDS:
        for entry in content[which]:
            entry[key] = float(entry[key])


def as_text(content: dict) -> None:
    for which, key in IDS:
        for entry in content[which]:
            entry[key] = f"n{entry[key]}"


def without_other_fields(content: dict) -> None:
    for entry in [*content["images"], *content["annotations"]]:
        for key in ("width", "height", "bbox", "area"):
            entry.pop(key, None)


def with_other_fields_spoilt(content: dict) -> None:
    content.update(info=[], licenses=None)
    for annotation in content["annotations"]:
        annotation.update(bbox=None, area="much", iscrowd=[], segmentation={"a": 1})
    for image in content["images"]:
        image.update(width="wide", height=None)


def by_url(content: dict) -> None:
    for image in content["images"]:
        image["coco_url"] = f"http://images.cocodataset.org/train2017/{image.pop('file_name')}"


TRAIN = {  # what is changed without a change of meaning
    "floats": as_floats,
    "text": as_text,
    "no other fields": without_other_fields,
    "other fields": with_other_fields_spoilt,
    "URLs": by_url,
    "annotations of others": lambda c: c["annotations"].insert(
        0, {"id": 99, "image_id": 7, "category_id": 9}
    ),
    "annotations with one id": lambda c: [a.update(id=1) for a in c["annotations"]],
    "a later annotation of no category": lambda c: c["annotations"][9].update(category_id=8),
}


@pytest.mark.parametrize("name", TRAIN)
def test_file_that_can_mean_one_thing_only_trains(demo, tmp_path, name):
    content = good()
    plain = demo.read_image_list(write(tmp_path / "plain.json", content))
    TRAIN[name](content)
    path = write(tmp_path / "file.json", content)
    assert said(demo, path, tmp_path) == ""
    found = demo.read_image_list(path)
    assert (found.names, found.labels) == (plain.names, plain.labels)


def test_prepared_set_of_such_a_file_is_written(tmp_path):
    content = good()
    with_other_fields_spoilt(content)
    by_url(content)
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    write_images(tmp_path / "coco" / "part", numbered(4), size=(200, 150))
    write(tmp_path / "coco" / "annotations" / "instances_part.json", content)
    job = prepare_coco.Job(tmp_path / "coco", tmp_path / "small", 64)
    assert prepare_coco.prepare(job) == 4
    assert sorted(os.listdir(tmp_path / "small" / "part")) == numbered(4)


def test_a_sound_file_is_not_looked_at_again(demo, tmp_path, monkeypatch):
    """It would cost seconds for a file of 860,001 annotations."""
    again = []
    for name in ("check_instances", "read_json"):
        monkeypatch.setattr(demo, name, lambda *found: again.append(found))
    demo.read_image_list(write(tmp_path / "file.json", good()))
    assert not again


def test_prepare_coco_has_the_scripts_lines():
    """It imports neither the script nor PyTorch."""

    def section(path: Path) -> str:
        text = path.read_text().partition("# ---- What is wrong with an annotation file")[2]
        return text.partition("\n")[2].partition("# ---- ")[0]

    own = section(ROOT / "tools" / "prepare_coco.py")
    assert own == section(SCRIPT) and "def check_instances" in own
    assert "torch" not in own and "coco_resnet18" not in own


# --- Two ranks, and Python's names elsewhere ---------------------------------------------------


@LONG
def test_two_ranks_end_with_one_line_within_10_s(tmp_path):
    words = [*make_set(tmp_path, 8), *FAST]
    content = instances(numbered(8))
    del content["annotations"][3]["id"]
    write(tmp_path / "instances.json", content)
    port, ranks = free_port(), []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {name: str(value) for name, value in place.items()}
        ranks.append(start([sys.executable, SCRIPT, *words], env=env))
    with ranks[0] as first, ranks[1] as second:
        first.wait_for("Reading the annotations")
        began = time.monotonic()
        runs = [started.finish(60, expect=None) for started in (first, second)]
        seconds = time.monotonic() - began
    assert all(run.returncode for run in runs) and seconds < 10
    output = "".join(run.output for run in runs)
    assert not re.search(PYTHON_NAME, output)
    (line,) = [line for line in output.splitlines() if "ERROR: " in line]
    assert "annotations[3] has no id: expected a number" in line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("id"), "no 'id'"),
        (FileNotFoundError(2, "No such file or directory", "a.pt"), "No such file or directory"),
        (ValueError("bad value"), "bad value"),
        (RuntimeError("Last error:\nno route"), "no route"),
    ],
)
def test_cause_of_an_error_has_no_name_of_python(demo, error, line):
    with pytest.raises(demo.UserError) as found, demo.as_user_error("cannot read a.pt"):
        raise error
    assert str(found.value).startswith("cannot read a.pt: ") and line in str(found.value)
    assert not re.search(r"\w+Error", str(found.value))


# --- Images that are not found -----------------------------------------------------------------

NFC, NFD = (unicodedata.normalize(form, "Käse") for form in ("NFC", "NFD"))
ELSEWHERE = {  # the file, the folder that is given, the name that is listed, the hint
    "above": ("set/train/1.jpg", "set/train", "train/1.jpg", "train/1.jpg is in {}/set: give"),
    "two above": ("a/b/c/1.jpg", "a/b/c", "b/c/1.jpg", "b/c/1.jpg is in {}/a: give"),
    "below": ("set/train/1.jpg", "set", "1.jpg", "1.jpg is in {}/set/train: give that folder"),
    "not in the part": ("set/1.jpg", "set", "part/1.jpg", "1.jpg is there, in another folder"),
    "case": ("set/1.jpg", "set", "1.JPG", "1.jpg is there, in another case"),
    "case of the part": ("set/Part/1.jpg", "set", "part/1.jpg", "Part/1.jpg is there, in another"),
    "extension": ("set/1.png", "set", "1.jpg", "1.png is there, under another name"),
    "no extension": ("set/1.jpg", "set", "1", "1.jpg is there, under another name"),
    "dots": ("set/1.a.jpg", "set", "1.a", "1.a.jpg is there, under another name"),
    "NFC": (f"set/{NFC}.jpg", "set", f"{NFD}.jpg", f"{NFC}.jpg is there, with the same letters"),
    "NFD": (f"set/{NFD}.jpg", "set", f"{NFC}.jpg", f"{NFD}.jpg is there, with the same letters"),
    "part in NFD": (f"set/{NFD}/1.jpg", "set", f"{NFC}/1.jpg", f"{NFD}/1.jpg is there, with"),
    "nowhere": ("set/1.jpg", "set", "2.jpg", "the first is 2.jpg: check the path"),
    "no folder": ("set/1.jpg", "gone", "1.jpg", "1.jpg: No such file or directory: check"),
    "no such name": ("set/1.jpg", "set", "a\0b/1.jpg", "check the path|in another folder"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_image_under_another_name_is_found(demo, tmp_path, name):
    file, folder, listed, hint = ELSEWHERE[name]
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    with pytest.raises(demo.UserError) as error:
        demo.check_images(str(tmp_path / folder), [listed])
    assert f"{tmp_path / folder} lacks 1 of 1 listed images, the first is " in str(error.value)
    assert re.search(hint.format(re.escape(str(tmp_path))), str(error.value)), error.value


@pytest.mark.parametrize("name", ["1.txt", "1.json", "1/a.jpg"])
def test_a_file_beside_the_images_is_no_hint(demo, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(demo.UserError, match=r"the first is 1\.jpg: check the path"):
        demo.check_images(tmp_path, ["1.jpg"])


@pytest.mark.parametrize("name", ["9.jpg", "9\0.jpg", "\ud800.jpg"])
def test_prepare_coco_names_an_image_that_is_not_there_as_the_script_does(demo, tmp_path, name):
    write_images(tmp_path, ["1.jpg"])
    lines = []
    for module in (demo, prepare_coco):
        with pytest.raises(module.UserError) as error:
            module.check_images(tmp_path, ["1.jpg", name])
        lines.append(str(error.value))
    assert lines[0] == lines[1] and "lacks 1 of 2 listed images, the first is " in lines[0]


def test_hint_ends_where_links_make_a_loop(demo, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/loop").symlink_to(tmp_path / "set")
    (tmp_path / "set/self").symlink_to("self")
    with pytest.raises(demo.UserError, match="check the path"):
        demo.check_images(tmp_path / "set", ["1.jpg"])


@pytest.mark.parametrize("suffix", ["JPG", "png", "jpg"])
def test_hint_comes_soon_with_118287_images_missing(demo, tmp_path, suffix):
    """Within 2 s, also if as many files are there under other names."""
    for number in range(20_000):
        os.mknod(tmp_path / f"{number:012d}.{suffix}")
    for number in range(300):
        (tmp_path / f"part {number}").mkdir()
    names = [f"more/{number:012d}.jpg" for number in range(118_287)]
    began = time.process_time()
    with pytest.raises(demo.UserError, match=r"lacks 118287 of 118287 .*is there"):
        demo.check_images(tmp_path, names)
    assert time.process_time() - began < 2


# --- Classes by name ---------------------------------------------------------------------------


def lists(demo, tmp_path, train: dict, val: dict):
    """The training list, and the validation list with its labels."""
    train_list = demo.read_image_list(write(tmp_path / "train.json", train))
    return train_list, demo.read_image_list(write(tmp_path / "val.json", val), None, train_list)


def turned() -> dict:
    """good() with other ids of its categories, in another order."""
    content = good()
    for entry, key in [(c, "id") for c in content["categories"]] + [
        (a, "category_id") for a in content["annotations"]
    ]:
        entry[key] = 20 - entry[key]
    return content


def rename(content: dict, old: str, new: str) -> dict:
    for category in content["categories"]:
        category["name"] = new if category["name"] == old else category["name"]
    return content


def test_labels_of_validation_go_by_name(demo, tmp_path):
    """Classes that no image needs do not matter, in either file."""
    train, val = good(), turned()
    train["categories"].insert(0, {"id": 1, "name": "only here"})
    val["categories"].append({"id": 99, "name": "only there"})
    train_list, val_list = lists(demo, tmp_path, train, val)
    assert val_list.labels == train_list.labels == [2, 1, 3, 2]
    assert val_list.categories == train_list.categories


def test_class_that_training_lacks_is_named_if_an_image_needs_it(demo, tmp_path):
    with pytest.raises(demo.UserError, match=r"val\.json: it has images of the class 'cow'"):
        lists(demo, tmp_path, good(), rename(turned(), "category 9", "cow"))


def two_of_one_name(*used: int) -> dict:
    """Category 7 is called as category 5 is; these have images."""
    content = rename(good(), "category 7", "category 5")
    for annotation, category in zip(content["annotations"], itertools.cycle(used), strict=False):
        annotation["category_id"] = category
    return content


@pytest.mark.parametrize("part", ["training images", "val.json"])
def test_two_classes_of_one_name_that_have_images_are_named(demo, tmp_path, part):
    train, val = two_of_one_name(5, 7), good()
    with pytest.raises(demo.UserError, match=rf"{part}.* 5 and 7 .*called 'category 5'"):
        lists(demo, tmp_path, *((train, val) if part.startswith("tr") else (val, train)))


def test_two_classes_of_one_name_train_where_names_do_not_matter(demo, tmp_path):
    path = write(tmp_path / "train.json", two_of_one_name(5, 7))
    assert demo.read_image_list(path).labels == [0, 1, 0, 1]


@pytest.mark.parametrize("used", [5, 7])
def test_of_two_classes_of_one_name_that_with_images_is_meant(demo, tmp_path, used):
    val = turned()
    val["annotations"] = [{"id": 1, "image_id": 100, "category_id": 15}]
    train_list, val_list = lists(demo, tmp_path, two_of_one_name(used), val)
    assert val_list.labels == [train_list.labels[0]] == [[5, 7].index(used)]


@pytest.mark.parametrize(("name", "called"), [(None, "5"), ("", "5"), (8, "8"), (8.0, "8")])
def test_class_without_a_name_is_called_by_its_id(demo, tmp_path, name, called):
    content = good()
    content["categories"][0]["name"] = name
    found = demo.read_image_list(write(tmp_path / "file.json", content))
    assert found.categories[5] == called
    del content["categories"][0]["name"]
    as_floats(content)
    assert demo.read_image_list(write(tmp_path / "file.json", content)).categories[5] == "5"


# --- Runs --------------------------------------------------------------------------------------


def options(folder: Path, train: dict, val: dict | None = None) -> list[str]:
    folder.mkdir(exist_ok=True)
    write_images(folder / "images", numbered(4))
    words = ["--coco_image_path", folder / "images"]
    words += ["--annotation_path", write(folder / "train.json", train), *FAST, "--num_epochs", 1]
    if val:
        words += ["--val_image_path", folder / "images"]
        words += ["--val_annotation_path", write(folder / "val.json", val)]
    return [*map(str, words)]


@LONG
def test_accuracy_is_that_of_a_file_with_equal_ids_and_unused_classes_are_noted_once(tmp_path):
    train = good()
    train["categories"] += [{"id": 90 + i, "name": f"unused {i}"} for i in range(4)]
    words = ["--batch_size", 2, "--num_epochs", 6]
    cases = {"equal": good(), "turned": turned()}
    runs = [(2, [*options(tmp_path / n, train, val), *words]) for n, val in cases.items()]
    equal, other = run_forked(runs)
    found = [
        re.findall(r"validation \| (Top-1: .*?%).*(baseline.*)", r.out) for r in (equal, other)
    ]
    assert found[0] == found[1] and {"Top-1: 0.00%"} != {top for top, _ in found[0]}
    notes = re.findall(r"Note: .*", equal.out)
    assert notes == ["Note: 4 classes have no training image: unused 0, unused 1, unused 2, ..."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the script saves it, of a model of the three classes of good()."""
    path = tmp_path_factory.mktemp("checkpoint") / "c.pt"
    model = torchvision.models.resnet18(num_classes=3).state_dict()
    names = [f"category {i}" for i in (5, 7, 9)]
    torch.save({"categories": names, "model": model}, path)
    return path


@pytest.mark.parametrize(
    ("change", "kept", "line"),
    [
        (lambda c: None, True, ""),
        (as_floats, True, ""),
        (lambda c: rename(c, "category 7", "cow"), False, "its class 'category 7' is 'cow' here"),
        (lambda c: c["categories"].pop(2), False, "of 3 other classes, is left out: 2 classes"),
    ],
)
def test_last_layer_of_a_checkpoint_is_kept_if_its_classes_have_the_same_names(
    demo, tmp_path, checkpoint, capfd, change, kept, line
):
    content = copy.deepcopy(good())
    content["annotations"] = content["annotations"][:2]
    change(content)
    found = demo.read_image_list(write(tmp_path / "file.json", content))
    model = torchvision.models.resnet18(num_classes=len(found.categories))
    before = model.fc.weight.detach().clone()
    demo.load_weights(demo.ProcessInfo(), model, str(checkpoint), found)
    assert (
        not torch.equal(model.fc.weight, before) if kept else torch.equal(model.fc.weight, before)
    )
    out = capfd.readouterr().out
    assert ("the last layer" not in out) if kept else (line in out)
    theirs = torch.load(checkpoint)["model"]["conv1.weight"]
    assert torch.equal(model.conv1.weight, theirs)


@pytest.mark.parametrize("names", [["a", "b"], [1, 2, 3], {5: "a"}, "abc", 3, torch.zeros(3)])
def test_categories_of_a_checkpoint_that_are_no_names_are_named(demo, tmp_path, checkpoint, names):
    torch.save(torch.load(checkpoint) | {"categories": names}, tmp_path / "c.pt")
    found = demo.read_image_list(write(tmp_path / "file.json", good()))
    line = r"c\.pt: its categories are wrong: expected a list of the names of its 3 classes"
    with pytest.raises(demo.UserError, match=line):
        demo.load_weights(demo.ProcessInfo(), torch.nn.Module(), str(tmp_path / "c.pt"), found)


def test_two_classes_of_one_name_are_named_where_a_checkpoint_names_its_own(
    demo, tmp_path, checkpoint
):
    path = write(tmp_path / "file.json", two_of_one_name(5, 7))
    found = demo.read_image_list(path)
    state = torch.load(checkpoint)
    torch.save(state | {"categories": [*found.categories.values()]}, tmp_path / "c.pt")
    model = torchvision.models.resnet18(num_classes=3)
    with pytest.raises(demo.UserError, match=r"5 and 7 .*called 'category 5'"):
        demo.load_weights(demo.ProcessInfo(), model, str(tmp_path / "c.pt"), found)


def test_unused_classes_are_noted_by_rank_0(demo, tmp_path, capfd):
    content = good()
    content["categories"].append({"id": 1, "name": "cow"})
    found = demo.read_image_list(write(tmp_path / "file.json", content))
    for rank in (0, 1):
        demo.note_unused_classes(SimpleNamespace(rank=rank, name=f"[CPU {rank}]"), found)
    assert capfd.readouterr().out == "[CPU 0] Note: 1 class has no training image: cow\n"
