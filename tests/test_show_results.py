"""tools/show_results.py: the script's own answers, the picture, and one line for bad input."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import show_results as tool
from support.datasets import instances, numbered, truncate, write_images
from support.processes import ROOT, SCRIPT

CLASSES = {4: "four", 6: "6", 7: "$odd$ 猫", 9: "\ud800"}  # the last is half a character
FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --batch_size 8")
LABELS = np.random.default_rng(0).choice([*CLASSES], 40).tolist()


def write_set(folder: Path, part: str, labels: list, classes: dict) -> list[str]:
    """Images and their instances file; returns the script's options for them."""
    names = numbered(len(labels))
    write_images(folder / part, names)
    content = instances(names, labels, [*classes])
    content["categories"] = [{"id": number, "name": classes[number]} for number in classes]
    (folder / f"{part}.json").write_text(json.dumps(content))
    return [str(folder / part), str(folder / f"{part}.json")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> SimpleNamespace:
    """A run of four classes: its checkpoint, its last line on the validation, and the tool's
    arguments for the same 40 images, one of which is damaged.
    """
    folder = tmp_path_factory.mktemp("trained")
    images, notes = write_set(folder, "train", [*CLASSES] * 4, CLASSES)
    val_images, val_notes = write_set(folder, "val", LABELS, CLASSES)
    truncate(folder / "val" / "0007.jpg")
    command = [sys.executable, SCRIPT, "--coco_image_path", images, "--annotation_path", notes]
    command += ["--val_image_path", val_images, "--val_annotation_path", val_notes]
    command += [*FAST, "--checkpoint", folder / "c.pt"]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    argv = [str(folder / "c.pt"), "--coco_image_path", val_images, "--annotation_path", val_notes]
    line = re.findall(r"validation \| (.*)", run.stdout)[-1]
    return SimpleNamespace(folder=folder, line=line, argv=[*argv, "--script", str(SCRIPT)])


def test_top_1_and_baseline_are_those_of_the_scripts_validation(trained, tmp_path):
    picture = tmp_path / "a picture.png"
    command = [sys.executable, ROOT / "tools" / "show_results.py", *trained.argv]
    command += ["--output", picture]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    theirs = re.fullmatch(r"(Top-1: (.*)%) \| (40 images) \| .*s \| (baseline .*%)", trained.line)
    assert 0 < float(theirs[2]) < 100, "could not tell one model from another"
    line, where = run.stdout.splitlines()[-2:]
    assert line.startswith(f"{theirs[1]} | {theirs[3]} | {theirs[4]} (always ")
    assert where == f"Picture: {picture}"
    assert "0007.jpg is damaged" in run.stdout + run.stderr
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 1000


def test_changed_copy_of_the_script_draws_its_own_model(trained, tmp_path, capsys):
    state = torch.load(trained.argv[0], weights_only=True)
    state["model"] = torchvision.models.resnet34(num_classes=len(CLASSES)).state_dict()
    torch.save(state, tmp_path / "34.pt")
    copy = tmp_path / "demo34.py"
    copy.write_text(SCRIPT.read_text().replace("models.resnet18(", "models.resnet34("))
    output = str(tmp_path / "34.png")
    argv = [str(tmp_path / "34.pt"), *trained.argv[1:], "--output", output]
    assert tool.main(argv) == 2 and "--script names the script" in capsys.readouterr().err
    assert tool.main([*argv, "--script", str(copy)]) == 0
    assert Path(output).is_file()


@pytest.mark.parametrize(
    ("right", "wrong", "shown"),
    [(30, 30, (8, 8)), (30, 3, (13, 3)), (2, 30, (2, 14)), (3, 2, (3, 2)), (0, 1, (0, 1))],
)
def test_half_of_the_images_are_wrong_ones_from_the_surest_on(right, wrong, shown):
    order = torch.randperm(right + wrong, generator=torch.Generator().manual_seed(right))
    is_right = order < right
    confidence = torch.linspace(0.5, 0.99, len(order))[order.flip(0)]
    chosen = tool.choose(is_right, confidence)
    assert len({*chosen}) == len(chosen)
    assert is_right[chosen].tolist() == [True] * shown[0] + [False] * shown[1]
    for kind, mine in ((is_right, chosen[: shown[0]]), (~is_right, chosen[shown[0] :])):
        sure = confidence[mine].tolist()
        assert sure == sorted(sure, reverse=True)
        if len(sure) > 1:
            assert sure[0] == confidence[kind].max() and sure[-1] == confidence[kind].min()


def test_rows_of_classes_count_each_answer_once():
    found = SimpleNamespace(
        names=["cat", "dog", "cow", "bus"],
        labels=torch.tensor([1, 1, 1, 1, 1, 0, 0, 2]),
        guesses=torch.tensor([1, 0, 0, 2, 1, 0, 0, 3]),
    )
    assert tool.class_rows(found) == [
        ("dog", 5, 2, "cat", 2),
        ("cat", 2, 2, "", 0),
        ("cow", 1, 0, "bus", 1),
    ]


@pytest.mark.parametrize(
    ("classes", "images", "name"),
    [
        (4, 40, "class {}"),
        (1, 20, "$only$ {}"),
        (200, 3000, "a name without much room {}"),
        (3, 2, "猫"),
    ],
)
def test_frames_signs_and_words_tell_right_from_wrong(
    tmp_path, monkeypatch, classes, images, name
):
    figures = []
    make = tool.Figure
    monkeypatch.setattr(tool, "Figure", lambda **o: figures.append(make(**o)) or figures[0])
    draw = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (images,), generator=draw)
    guesses = labels.where(torch.rand(images, generator=draw) < 0.6, 0)
    found = SimpleNamespace(
        names=[name.format(i) for i in range(classes)],
        labels=labels,
        guesses=guesses,
        confidence=torch.rand(images, generator=draw),
        dataset={(0, i): (torch.zeros(3, 8, 8), label) for i, label in enumerate(labels)},
    )
    tool.draw(found, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as image:
        assert image.format == "PNG"
    shown = [axis for axis in figures[0].findobj(tool.matplotlib.axes.Axes) if axis.images]
    chosen = tool.choose(labels == guesses, found.confidence)
    assert len(shown) == len(chosen) == min(images, 16)
    for axis, position in zip(shown, chosen, strict=True):
        right = bool(labels[position] == guesses[position])
        assert axis.get_title()[0] == ("✓" if right else "✗")
        assert {spine.get_linestyle() == "solid" for spine in axis.spines.values()} == {right}
        label = tool.short(found.names[labels[position]])
        assert axis.get_xlabel() == ("" if right else f"is {label}")


# What is given in place of what is right, {} being the folder of the checkpoint, and what the
# line says.
BAD = {
    "no checkpoint": (["{}/none.pt"], "{}/none.pt is no checkpoint of the demo: FileNotFound"),
    "an image": (["{}/val/0001.jpg"], "0001.jpg is no checkpoint of the demo: "),
    "a list": (["{}/list.pt"], "list.pt is no checkpoint of the demo: TypeError"),
    "weights alone": (["{}/weights.pt"], "weights.pt is no checkpoint of the demo: KeyError"),
    "other classes": (["--annotation_path", "{}/other.json"], "{}/other.json has other classes"),
    "no annotations": (["--annotation_path", "{}/none.json"], "annotation file {}/none.json"),
    "a list of them": (["--annotation_path", "{}/list.json"], "annotation file {}/list.json"),
    "no images": (["--coco_image_path", "{}/none"], "{}/none lacks 40 of 40 listed"),
    "no such folder": (["--output", "{}/none/a.png"], "none/a.png: its folder is not there"),
    "a folder": (["--output", "{}"], "--output {} cannot be written"),
    "no such format": (["--output", "{}/a.xyz"], "a.xyz cannot be written: Format 'xyz'"),
    "no script": (["--script", "{}/none.py"], "--script {}/none.py is no copy of the demo"),
    "another script": (["--script", tool.__file__], "is no copy of the demo's script: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_no_picture(trained, tmp_path, capsys, name):
    folder = trained.folder
    torch.save([1], folder / "list.pt")
    torch.save(torch.load(trained.argv[0], weights_only=True)["model"], folder / "weights.pt")
    (folder / "list.json").write_text("[]")
    write_set(folder, "other", [1, 2], {1: "one", 2: "two"})
    given, words = BAD[name]
    given = [part.format(folder) for part in given]
    argv = trained.argv[1:] if not given[0].startswith("-") else trained.argv
    code = tool.main([*argv, "--output", str(tmp_path / "picture.png"), *given])
    out, err = capsys.readouterr()
    assert code == 2 and "Top-1" not in out
    assert err.startswith("show_results.py: error: ") and err.count("\n") == 1
    assert words.format(folder) in err
    assert not [*tmp_path.iterdir()]
