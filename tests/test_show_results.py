"""tools/show_results.py: the script's own answers, the picture, and one line for bad input."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import show_results as tool
from support.datasets import Payload, instances, numbered, write_images
from support.forks import run_forked
from support.launchers import NOTEBOOK
from support.processes import ROOT, SCRIPT, start

CLASSES = [4, 6, 7, 9]
FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --batch_size 8")
LABELS = np.random.default_rng(0).choice(CLASSES, 40).tolist()


def write_set(folder: Path, part: str, labels: list) -> list[str]:
    """Folder of images, and their instances file."""
    names = numbered(len(labels))
    write_images(folder / part, names)
    (folder / f"{part}.json").write_text(json.dumps(instances(names, labels, CLASSES)))
    return [str(folder / part), str(folder / f"{part}.json")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run of four classes: its checkpoint, its last line on the validation, and the tool's
    arguments for the same 40 images. For the run they have other ids.
    """
    folder = tmp_path_factory.mktemp("trained")
    images, notes = write_set(folder, "train", CLASSES * 4)
    val_images, val_notes = write_set(folder, "val", LABELS)
    turned = [90 - label for label in LABELS], [1, *(90 - label for label in CLASSES)]
    content = instances(numbered(len(LABELS)), *turned)
    for category in content["categories"][1:]:  # the first one no image needs
        category["name"] = f"category {90 - category['id']}"
    (folder / "turned.json").write_text(json.dumps(content))
    options = ["--coco_image_path", images, "--annotation_path", notes]
    options += ["--val_image_path", val_images, "--val_annotation_path", folder / "turned.json"]
    words = [*options, *FAST, "--checkpoint", folder / "c.pt"]
    (run,) = run_forked([(0, words)])
    argv = [str(folder / "c.pt"), "--coco_image_path", val_images, "--annotation_path", val_notes]
    line = re.findall(r"validation \| (.*)", run.out)[-1]
    return SimpleNamespace(folder=folder, line=line, argv=[*argv, "--script", str(SCRIPT)])


def test_top_1_and_baseline_are_those_of_the_scripts_validation(
    trained, tmp_path, capsys, monkeypatch
):
    """Classes go by name, whatever their ids and their order, in the script and here. The
    precision is that of the training.
    """
    picture = tmp_path / "a picture.png"
    theirs = re.fullmatch(r"(Top-1: (.*)%) \| (40 images) \| .*s \| (baseline .*%)", trained.line)
    assert 0 < float(theirs[2]) < 100, "could not tell one model from another"
    most = max(Counter(LABELS).values()) / 40
    assert theirs[4] == f"baseline {most:.2%}"
    tool.main([*trained.argv, "--output", str(picture)])
    line, where = capsys.readouterr().out.splitlines()[-2:]
    assert line.startswith(f"{theirs[1]} | {theirs[3]} | {theirs[4]} (always category ")
    assert where == f"Picture: {picture}"
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 1000
    found = []
    monkeypatch.setattr(tool, "draw", lambda results, _: found.append(results.confidence))
    tool.main([*trained.argv, "--annotation_path", str(trained.folder / "turned.json")])
    assert line in capsys.readouterr().out
    state = torch.load(trained.argv[0], weights_only=True)
    state["settings"]["--precision"] = "bf16"
    torch.save(state, tmp_path / "bf16.pt")
    tool.main([str(tmp_path / "bf16.pt"), *trained.argv[1:]])
    assert not torch.allclose(*found)


def test_changed_copy_of_the_script_has_its_own_model(trained, tmp_path, capsys, monkeypatch):
    """One of fewer layers."""
    resnet = torchvision.models.resnet
    state = torch.load(trained.argv[0], weights_only=True)
    state["model"] = resnet.ResNet(resnet.BasicBlock, [1] * 4, len(CLASSES)).state_dict()
    del state["optimizer"]
    torch.save(state, tmp_path / "10.pt")
    copy = tmp_path / "demo10.py"
    smaller = "models.ResNet(torchvision.models.resnet.BasicBlock, [1] * 4, "
    copy.write_text(SCRIPT.read_text().replace("models.resnet18(", smaller))
    monkeypatch.setattr(tool, "draw", lambda *_: None)
    tool.main([str(tmp_path / "10.pt"), *trained.argv[1:], "--script", str(copy)])
    assert "Top-1: " in capsys.readouterr().out


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


@pytest.mark.parametrize(("classes", "images"), [(200, 3000), (3, 2)])
def test_frames_signs_and_words_tell_right_from_wrong(tmp_path, monkeypatch, classes, images):
    figures = []
    make = tool.Figure
    monkeypatch.setattr(tool, "Figure", lambda **o: figures.append(make(**o)) or figures[0])
    draw = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (images,), generator=draw)
    guesses = labels.where(torch.rand(images, generator=draw) < 0.6, 0)
    found = SimpleNamespace(
        names=[f"$class_{{{i}$" for i in range(classes)],  # which would be no formula
        labels=labels,
        guesses=guesses,
        confidence=torch.rand(images, generator=draw),
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


@pytest.mark.slow
def test_pictures_are_drawn_also_where_a_notebook_names_another_backend(trained, tmp_path):
    logs = [ROOT / "docs/emulated" / name for name in ("slow", "fast")]
    compare = ["compare_logs.py", *logs, "--plot", tmp_path / "1.png"]
    for name, *words in (
        compare,
        ["show_results.py", *trained.argv, "--output", tmp_path / "2.png"],
    ):
        with start([sys.executable, ROOT / "tools" / name, *words], env=NOTEBOOK) as started:
            started.finish()
    assert min(path.stat().st_size for path in tmp_path.glob("[12].png")) > 10_000


# What is given in place of what is right, {} being the folder of the checkpoint, and what the
# line says.
BAD = {
    "code": (["{}/code.pt"], "code.pt is no checkpoint of the demo: "),
    "weights alone": (["{}/weights.pt"], "weights.pt is no checkpoint of the demo: "),
    "another model": (["{}/empty.pt"], "empty.pt has another model, see --script: "),
    "no annotations": (["--annotation_path", "{}/none.json"], "annotation file {}/none.json"),
    "no such format": (["--output", "{}/a.xyz"], "Format 'xyz' is not supported"),
}


def test_bad_input_is_one_line_and_runs_no_code(trained):
    folder = trained.folder
    state = torch.load(trained.argv[0], weights_only=True)
    torch.save({"fc.weight": state["model"]["fc.weight"]}, folder / "weights.pt")
    torch.save(state | {"model": {}, "optimizer": {}}, folder / "empty.pt")
    torch.save(Payload(folder / "made"), folder / "code.pt")
    for given, words in BAD.values():
        given = [part.format(folder) for part in given]
        argv = trained.argv[1:] if not given[0].startswith("-") else trained.argv
        with pytest.raises(SystemExit) as ended:
            tool.main([*argv, *given])
        (line,) = ended.value.code.splitlines()
        assert line.startswith("show_results.py: error: ") and words.format(folder) in line
    assert not (folder / "made").exists()


def test_a_picture_that_is_there_is_not_overwritten_without_a_word(
    trained, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("results.png").write_text("mine")
    said = ""
    try:
        tool.main(trained.argv)
    except SystemExit as end:
        said = str(end.code)
    said += capsys.readouterr().out
    is_mine = Path("results.png").read_bytes() == b"mine"
    assert is_mine or re.search("is there already|overwritten|replaced", said)
