"""tools/show_results.py: the script's own answers, the picture, and one line for bad input."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import show_results as tool
from support.datasets import Payload, instances, numbered, write_images
from support.forks import run_forked
from support.launchers import NOTEBOOK
from support.processes import ROOT, SCRIPT, start

CLASSES = [4, 6, 7, 9]
FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --batch_size 8")
LABELS = np.random.default_rng(0).choice(CLASSES, 40).tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of four classes: its checkpoint, its last line on the validation, and the tool's
    arguments for the same 40 images. For the run they have other ids.
    """
    folder = tmp_path_factory.mktemp("trained")
    options = []
    for part, labels in (("", CLASSES * 4), ("val_", LABELS)):
        images, notes = folder / f"{part}images", folder / f"{part}instances.json"
        write_images(images, numbered(len(labels)))
        content = instances(numbered(len(labels)), labels, CLASSES)
        notes.write_text(json.dumps(content))
        options += [f"--{part or 'coco_'}image_path", images, f"--{part}annotation_path", notes]
    for category in content["categories"]:
        category["id"] = 90 - category["id"]
    for annotation in content["annotations"]:
        annotation["category_id"] = 90 - annotation["category_id"]
    content["categories"].insert(0, {"id": 1, "name": "of no image"})
    (folder / "turned.json").write_text(json.dumps(content))
    words = [*options, *FAST, "--checkpoint", folder / "c.pt"]
    (run,) = run_forked([(0, [*words, "--val_annotation_path", folder / "turned.json"])])
    argv = [folder / "c.pt", "--coco_image_path", images, "--annotation_path", notes]
    line = re.findall(r"validation \| (.*)", run.out)[-1]
    argv = [str(word) for word in [*argv, "--script", SCRIPT]]
    return SimpleNamespace(folder=folder, line=line, argv=argv)


def test_top_1_and_baseline_are_those_of_the_scripts_validation(
    trained, tmp_path, capsys, monkeypatch
):
    """Classes go by name, whatever their ids and their order, in the script and here. The
    precision is that of the training. The command runs also in a cell of a notebook.
    """
    picture = tmp_path / "a picture.png"
    theirs = re.fullmatch(r"(Top-1: (.*)%) \| (40 images) \| .*s \| (baseline .*%)", trained.line)
    assert 0 < float(theirs[2]) < 100, "could not tell one model from another"
    most = max(Counter(LABELS).values()) / 40
    assert theirs[4] == f"baseline {most:.2%}"
    command = [sys.executable, ROOT / "tools/show_results.py", *trained.argv, "--output", picture]
    with start(command, env=NOTEBOOK) as started:
        line, where = started.finish().lines()[-2:]
    assert line.startswith(f"{theirs[1]} | {theirs[3]} | {theirs[4]} (always category ")
    assert where == f"Picture: {picture}"
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 1000
    found = []
    monkeypatch.setattr(tool, "draw", lambda results, _: found.append(results.confidence))
    turned = ["--annotation_path", str(trained.folder / "turned.json"), "--output", str(picture)]
    tool.main([*trained.argv, *turned])
    out = capsys.readouterr().out
    assert out == f"{line}\nPicture: {picture} (the one that was there is replaced)\n"
    state = torch.load(trained.argv[0], weights_only=True)
    state["settings"]["--precision"] = "bf16"
    torch.save(state, tmp_path / "bf16.pt")
    tool.main([str(tmp_path / "bf16.pt"), *trained.argv[1:]])
    assert {confidence.dtype for confidence in found} == {torch.float32}
    assert not torch.allclose(*found)


def test_half_of_the_images_are_wrong_ones_from_the_surest_on():
    """If there are as many. Here every second answer is wrong, then 3 of 33 are."""
    confidence = torch.linspace(0.99, 0.5, 60)
    chosen = tool.choose(torch.arange(60) % 2 == 0, confidence)
    assert [position % 2 for position in chosen] == [0] * 8 + [1] * 8
    assert chosen == sorted(chosen[:8]) + sorted(chosen[8:])
    assert chosen[::7][:2] == [0, 58] and chosen[8::7] == [1, 59]
    chosen = tool.choose(torch.arange(33) < 30, confidence[:33])
    assert len({*chosen}) == 16 and chosen[13:] == [30, 31, 32]


def test_accuracy_and_rows_of_classes_count_each_answer_once():
    found = SimpleNamespace(
        names=["cat", "dog", "cow", "bus"],
        labels=torch.tensor([1, 1, 1, 1, 1, 0, 0, 2]),
        guesses=torch.tensor([1, 0, 0, 2, 1, 0, 0, 3]),
    )
    assert tool.class_rows(found) == [
        ("dog", 5, 2, "2 of 5, 2 × cat"),
        ("cat", 2, 2, "2 of 2"),
        ("cow", 1, 0, "0 of 1, 1 × bus"),
    ]
    words = "Top-1: 50.00% | 8 images | baseline 62.50% (always dog)"
    assert tool.in_words(found) == words


@pytest.mark.parametrize(("classes", "images"), [(200, 300), (3, 2)])
def test_frames_signs_and_words_tell_right_from_wrong(tmp_path, monkeypatch, classes, images):
    figures = []
    make = tool.Figure
    monkeypatch.setattr(tool, "Figure", lambda **o: figures.append(make(**o)) or figures[0])
    labels = torch.arange(1, images + 1) % classes
    guesses = labels.where(torch.arange(images) % 3 > 0, 0)
    found = SimpleNamespace(
        names=[f"$class_{{{i}$" for i in range(classes)],  # which would be no formula
        labels=labels,
        guesses=guesses,
        confidence=torch.linspace(0, 1, images),
        dataset={(0, i): (torch.zeros(8, 8, 3), label) for i, label in enumerate(labels)},
    )
    tool.draw(found, tmp_path / "picture.png")
    shown = [axis for axis in figures[0].axes if axis.images]
    chosen = tool.choose(labels == guesses, found.confidence)
    assert len(shown) == len(chosen) == min(images, 16)
    for axis, position in zip(shown, chosen, strict=True):
        right = bool(labels[position] == guesses[position])
        guess = found.names[guesses[position]]
        title = f"{'✓' if right else '✗'} {guess} {found.confidence[position]:.0%}"
        assert axis.axison and axis.get_title() == title
        assert {spine.get_linestyle() == "solid" for spine in axis.spines.values()} == {right}
        label = found.names[labels[position]]
        assert axis.get_xlabel() == ("" if right else f"is {label}")


# What is given in place of what is right, {} being the folder of the checkpoint, and what the
# line says.
BAD = [
    (["{}/code.pt"], "code.pt is no checkpoint of the demo: "),
    (["{}/weights.pt"], "weights.pt is no checkpoint of the demo: "),
    (["{}/empty.pt"], "empty.pt has another model, see --script: "),
    (["--annotation_path", "{}/none.json"], "annotation file {}/none.json"),
    (["--output", "{}/a.xyz"], "Format 'xyz' is not supported"),
]


def test_bad_input_is_one_line_and_runs_no_code(trained):
    folder = trained.folder
    state = torch.load(trained.argv[0], weights_only=True)
    torch.save({"fc.weight": state["model"]["fc.weight"]}, folder / "weights.pt")
    torch.save(state | {"model": {}, "optimizer": {}}, folder / "empty.pt")
    torch.save(Payload(folder / "made"), folder / "code.pt")
    for given, words in BAD:
        given = [part.format(folder) for part in given]
        argv = trained.argv[1:] if not given[0].startswith("-") else trained.argv
        with pytest.raises(SystemExit) as ended:
            tool.main([*argv, *given])
        (line,) = ended.value.code.splitlines()
        assert line.startswith("show_results.py: error: ") and words.format(folder) in line
    assert not (folder / "made").exists()
