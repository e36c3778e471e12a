"""Annotation files and weights as people have them: what trains, and what the line says."""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch

import check_coco
from support.annotation_cases import GOOD, cases, is_said, write, write_case
from support.datasets import write_images

PYTHON_NAME = r"\b\w*(Error|Exception)\b|Errno|NoneType|Traceback"
LABELS = [1, 0, 2, 1]  # of the good file
# Not COCO's types, but images and classes are clear.
TRAINS_AS_WELL = [
    "categories[0].id = 1; annotations[*].category_id = [1, 5, 9, true, 5, 9]",
    'categories[1].name = ""',
    *(name for name, _ in cases() if name.startswith("images[*].id as floats; categories")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of the good file, one of them in a folder of its own as well."""
    folder = tmp_path_factory.mktemp("annotations")
    (folder / "part").mkdir()
    names = ["part/0000.jpg", *(image["file_name"] for image in json.loads(GOOD)["images"])]
    write_images(folder, names)
    (folder / "good.json").write_text(GOOD)
    return folder


def test_label_is_the_category_of_the_first_annotation(demo, folder):
    """Categories are sorted by their ids, and an image without an annotation is left out."""
    found = demo.read_image_list(folder / "good.json")
    assert gc.isenabled(), "switched off while it reads"
    assert found.names == [f"000{i}.jpg" for i in range(4)] and found.unlabelled == 1
    assert found.labels == LABELS
    assert found.categories == {5: "apple", 7: "bird", 9: "clock"}


@pytest.mark.parametrize(("name", "line"), cases())
def test_file_trains_rightly_or_one_line_says_what_is_wrong(demo, folder, tmp_path, name, line):
    """The script says so in words of its own. It may also train rightly where check_coco.py asks
    for COCO's own form.
    """
    path = tmp_path / "file.json"
    changes = name.removeprefix("validation: ")
    train_path = folder / "good.json" if name != changes else None
    write_case(changes, path)
    good = demo.read_image_list(folder / "good.json")
    said = words = ""
    try:
        found = demo.read_image_list(path, good if train_path else None)
        demo.look_for_images(folder, found.names)
        assert [Path(name).name for name in found.names] == good.names
        if name not in TRAINS_AS_WELL:
            assert (found.labels, found.unlabelled) == (good.labels, good.unlabelled)
    except demo.UserError as error:
        said = str(error)
        assert said.startswith((f"annotation file {path}", f"the folder of images {folder} lacks"))
    assert bool(said) == bool(line) or name in TRAINS_AS_WELL, said
    assert not re.search(PYTHON_NAME, said) and "\n" not in said
    try:
        check_coco.check(*([train_path, None, path] if train_path else [path]))
    except check_coco.UserError as error:
        words = re.sub(r" \(and \d+ more\)", "", str(error))
    assert is_said(line, words, path), words


TWO_BIRDS = 'categories[2].name = "bird"; annotations[*].category_id = '


def test_training_with_two_classes_of_one_name(demo, tmp_path):
    """Without validation both count. With it that with images is meant; with images of both they
    are named.
    """
    good = write(tmp_path / "good.json")
    both = demo.read_image_list(write(tmp_path / "both.json", f"{TWO_BIRDS}[7, 9, 7, 9, 5, 5]"))
    assert both.labels == [1, 2, 1, 2]
    line = "class 'bird', and the training images have 2 classes of this name"
    with pytest.raises(demo.UserError, match=line):
        demo.read_image_list(good, both)
    with pytest.raises(check_coco.UserError, match="2 categories are called 'bird', which has"):
        check_coco.check(tmp_path / "both.json", None, good)
    for used in (7, 9):
        train_list = demo.read_image_list(write(tmp_path / "one.json", f"{TWO_BIRDS}{[used] * 6}"))
        val = write(tmp_path / "val.json", "annotations[*].category_id = [7, 7, 7, 7, 7, 7]")
        assert demo.read_image_list(val, train_list).labels == train_list.labels
        check_coco.check(tmp_path / "one.json", None, val)


# --- Weights -----------------------------------------------------------------------------------


def small_model(classes: int = 3) -> torch.nn.Module:
    layers = {"conv1": torch.nn.Linear(4, 4), "fc": torch.nn.Linear(4, classes)}
    return torch.nn.Sequential(OrderedDict(layers))


def load(demo: ModuleType, folder: Path, content: dict, changes: str = "") -> tuple[dict, dict]:
    """The weights of a model before and after it loads what a file has. Its classes are those of
    the good file with these changes.
    """
    torch.save(content, folder / "a.pt")
    image_list = demo.read_image_list(write(folder / "file.json", changes))
    model = small_model(len(image_list.categories))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = argparse.Namespace(weights=str(folder / "a.pt"), timeout=300)
    demo.load_weights(args, demo.ProcessInfo(), model, image_list)
    return before, model.state_dict()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("", ""),
        ('categories[0].name = "cow"', "of 3 other classes, is left out: 3 classes"),
        ('categories[3] = {"id": 1, "name": "cow"}', "of 3 other classes, is left out: 4 classes"),
    ],
)
def test_last_layer_is_kept_if_its_classes_have_the_same_names(
    demo, tmp_path, capfd, changes, line
):
    theirs = small_model().state_dict()
    content = {"categories": ["apple", "bird", "clock"], "model": theirs}  # as the script saves it
    before, found = load(demo, tmp_path, content, changes)
    assert torch.equal(found["conv1.weight"], theirs["conv1.weight"])
    assert torch.equal(found["fc.weight"], (before if line else theirs)["fc.weight"])
    out = capfd.readouterr().out
    assert line in out and ("the last layer" in out) == bool(line)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("key", ["", "state_dict"])
def test_weights_are_loaded_as_other_programs_save_them(demo, tmp_path, prefix, key):
    """As a whole or under a name; with DDP's names."""
    theirs = small_model().state_dict()
    state = {prefix + name: value for name, value in theirs.items()}
    _, found = load(demo, tmp_path, {key: state, "epoch": 7} if key else state)
    assert all(torch.equal(found[name], value) for name, value in theirs.items())


def test_weights_beside_an_object_of_python_are_refused_with_that_reason(demo, tmp_path):
    with pytest.raises(demo.UserError, match=r"^[^\n]*Namespace[^\n]*$"):
        load(demo, tmp_path, {"args": argparse.Namespace(lr=0.1)})
