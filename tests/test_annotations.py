"""Annotation files and image folders as people have them: what trains, and what the line says."""

from __future__ import annotations

import argparse
import json
import re
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch

import check_coco
from support.annotation_cases import GOOD, cases, is_said, plain_id, write, write_case
from support.datasets import make_set, write_images
from support.forks import load, run_forked
from support.launchers import FAST
from support.processes import SCRIPT

PYTHON_NAME = r"\b\w*(Error|Exception)\b|Errno|NoneType|Traceback"
LABELS = [1, 0, 2, 1]  # of the good file
# Not COCO's types, but images and classes are clear.
TRAINS_AS_WELL = [
    "categories[0].id = 1; annotations[*].category_id = [1, 5, 9, true, 5, 9]",
    'categories[1].name = ""',
    *(name for name, _ in cases() if name.startswith("images[*].id as floats; categories")),
]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script as a module."""
    return load(str(SCRIPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images of the good file, one of them in a folder of its own as well."""
    folder = tmp_path_factory.mktemp("annotations")
    (folder / "part").mkdir()
    names = ["part/0000.jpg", *(image["file_name"] for image in json.loads(GOOD)["images"])]
    write_images(folder, names)
    (folder / "good.json").write_text(GOOD)
    return folder


# --- The tables --------------------------------------------------------------------------------


def test_label_is_the_category_of_the_first_annotation(demo, folder):
    """Categories are sorted by their ids, and an image without an annotation is left out."""
    found = demo.read_image_list(folder / "good.json")
    assert found.names == [f"000{i}.jpg" for i in range(4)] and found.unlabelled == 1
    assert found.labels == LABELS
    assert found.categories == {5: "apple", 7: "bird", 9: "clock"}


@pytest.mark.parametrize(("name", "line"), cases(), ids=[plain_id(name) for name, _ in cases()])
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


def test_images_that_the_folder_lacks_are_counted_and_the_first_is_named(demo, tmp_path):
    write_images(tmp_path, ["1.jpg"])
    with pytest.raises(demo.UserError) as error:
        demo.look_for_images(tmp_path, ["1.jpg", "part/2.jpg", "3\0.jpg"])
    words = f"the folder of images {tmp_path} lacks 2 of 3 listed images, the first is part/2.jpg"
    assert str(error.value) == f"{words} (tools/check_coco.py says more)"


# --- Classes by name ---------------------------------------------------------------------------

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
        train = write(tmp_path / "one.json", f"{TWO_BIRDS}{[used] * 6}")
        train_list = demo.read_image_list(train)
        val = write(tmp_path / "val.json", "annotations[*].category_id = [7, 7, 7, 7, 7, 7]")
        assert demo.read_image_list(val, train_list).labels == train_list.labels


# --- The last layer of a checkpoint ------------------------------------------------------------


def weights(path: Path) -> argparse.Namespace:
    return argparse.Namespace(weights=str(path), timeout=300)


def small_model(classes: int) -> torch.nn.Module:
    layers = {"conv1": torch.nn.Linear(4, 4), "fc": torch.nn.Linear(4, classes)}
    return torch.nn.Sequential(OrderedDict(layers))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the script saves it, of a model of the three classes of the good file."""
    path = tmp_path_factory.mktemp("checkpoint") / "c.pt"
    model = small_model(3).state_dict()
    torch.save({"categories": ["apple", "bird", "clock"], "model": model}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("", ""),
        ('categories[0].name = "cow"', "of 3 other classes, is left out: 3 classes"),
        ('categories[3] = {"id": 1, "name": "cow"}', "of 3 other classes, is left out: 4 classes"),
    ],
)
def test_last_layer_is_kept_if_its_classes_have_the_same_names(
    demo, tmp_path, checkpoint, capfd, changes, line
):
    found = demo.read_image_list(write(tmp_path / "file.json", changes))
    model = small_model(len(found.categories))
    before = model.fc.weight.detach().clone()
    demo.load_weights(weights(checkpoint), demo.ProcessInfo(), model, found)
    theirs = torch.load(checkpoint)["model"]
    assert torch.equal(model.conv1.weight, theirs["conv1.weight"])
    assert torch.equal(model.fc.weight, before if line else theirs["fc.weight"])
    out = capfd.readouterr().out
    assert line in out and ("the last layer" in out) == bool(line)


FORMS = {
    "DDP": lambda state: {f"module.{name}": value for name, value in state.items()},
    "state_dict": lambda state: {"state_dict": state},
    "both": lambda state: {"state_dict": FORMS["DDP"](state), "epoch": 7},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_loaded_as_other_programs_save_them(demo, tmp_path, form):
    theirs, model = small_model(3), small_model(3)
    torch.save(FORMS[form](theirs.state_dict()), tmp_path / "a.pt")
    image_list = demo.read_image_list(write(tmp_path / "file.json"))
    demo.load_weights(weights(tmp_path / "a.pt"), demo.ProcessInfo(), model, image_list)
    for name, value in model.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


def test_weights_beside_an_object_of_python_are_refused_with_that_reason(demo, tmp_path):
    content = {"args": argparse.Namespace(lr=0.1), "model": small_model(3).state_dict()}
    torch.save(content, tmp_path / "a.pt")
    image_list = demo.read_image_list(write(tmp_path / "file.json"))
    with pytest.raises(demo.UserError) as error:
        demo.load_weights(
            weights(tmp_path / "a.pt"), demo.ProcessInfo(), small_model(3), image_list
        )
    assert "Namespace" in str(error.value) and "\n" not in str(error.value)


# --- Words of the script -----------------------------------------------------------------------


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


def test_two_ranks_end_with_one_line_about_a_file_that_rank_0_alone_reads(tmp_path):
    words = [*make_set(tmp_path, 8, val=4), *FAST]
    path = tmp_path / "val_instances.json"
    path.write_text(path.read_text().replace('"category 4"', '"cow"'))
    (run,) = run_forked([(2, words)], expect=2)
    assert not re.search(PYTHON_NAME, run.output)
    (line,) = [line for line in run.output.splitlines() if "ERROR: " in line]
    words = "it has images of the class 'cow', and the training images have 0 classes of this name"
    assert f"{path}: {words}" in line
