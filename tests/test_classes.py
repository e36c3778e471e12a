"""The number of classes is that of the training file's categories; Top-1 has a baseline."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import test_demo
from support.datasets import COCO_IDS, instances, numbered, write_images
from support.forks import STATE_TENSORS, run_to_the_end, write
from support.processes import LONG

FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --timeout 30")
FAST += ["--batch_size", "4", "--max_steps", "1"]
# Ids and names: one is missing, one a number, one half a character.
ODD = {4: "four", 6: None, 9: 7, 12: "\ud800"}


def data_of(folder: Path, categories: dict, val_labels: list) -> list[str]:
    """The script's options for 8 images of these categories, and some for validation."""
    argv = []
    for part, labels in (("", [*categories] * 8), ("val_", val_labels)):
        names = numbered(len(labels))[: None if part else 8]
        write_images(folder / f"{part}images", names)
        content = instances(names, labels[: len(names)], [*categories])
        for category, name in zip(content["categories"], categories.values(), strict=True):
            category["name"] = name
            if name is None:
                del category["name"]
        (folder / f"{part}instances.json").write_text(json.dumps(content))
        argv += [f"--{part or 'coco_'}image_path", folder / f"{part}images"]
        argv += [f"--{part}annotation_path", folder / f"{part}instances.json"]
    return [*map(str, argv)]


def numbered_categories(count: int) -> dict[int, str]:
    return {id: f"category {id}" for id in range(1, count + 1)}


def checkpoint_of(demo, result, path):
    """What a checkpoint says of its classes, read as show_results does: plain values alone."""
    state = demo.torch.load(path, weights_only=True)
    rows = len(state["model"]["fc.weight"])
    write(result, [rows, state["facts"]["number of classes"], state["categories"]])


def as_before_other_classes(demo, result, path):
    """Makes a checkpoint one of a script that knew COCO's 80 classes alone, and no --sync_bn."""
    state = demo.torch.load(path, weights_only=True)
    del state["categories"], state["facts"]["number of classes"], state["facts"]["--sync_bn"]
    demo.torch.save(state, path)


@pytest.mark.parametrize(
    ("categories", "names", "val_labels", "baseline"),
    [
        (ODD, ["four", "6", "7", "\ud800"], [9, 4, 9], "66.67"),
        ({5: "only one"}, ["only one"], [5, 5], "100.00"),
        pytest.param(
            numbered_categories(100),
            [*numbered_categories(100).values()],
            [9, 8],
            "50.00",
            marks=LONG,
        ),
    ],
    ids=["4", "1", "100"],
)
def test_classes_are_the_training_files_categories(
    demo, tmp_path, categories, names, val_labels, baseline
):
    argv = [*data_of(tmp_path, categories, val_labels), *FAST, "--checkpoint", tmp_path / "c.pt"]
    job = demo.run(argv, 2)
    assert job.json_line("Run")["classes"] == len(names)
    assert f"{len(val_labels)} images | " in job.out and "last layer" not in job.out
    (line,) = (line for line in job.out.splitlines() if " validation | " in line)
    assert line.endswith(f"s | baseline {baseline}%"), line
    found = demo.run(call=checkpoint_of, path=str(tmp_path / "c.pt")).result()
    assert found == [len(names), len(names), names]
    assert "Resumed from" in demo.run([*argv, "--max_steps", 2, "--resume"], 2).out


@pytest.mark.parametrize(("theirs", "ours"), [(80, 3), (80, 80), pytest.param(3, 80, marks=LONG)])
def test_checkpoint_of_other_classes_is_refused(demo, tmp_path, theirs, ours):
    """One line names both numbers. A checkpoint that does not say has COCO's 80."""
    data = {}
    for count in (3, 80):
        categories = dict.fromkeys(COCO_IDS[:count], "a name")
        data[count] = [*data_of(tmp_path / str(count), categories, [1]), *FAST]
        data[count] += ["--checkpoint", tmp_path / "c.pt", "--max_steps", 2]
    demo.run([*data[theirs], "--max_steps", 1])
    if theirs == 80:
        demo.run(call=as_before_other_classes, path=str(tmp_path / "c.pt"))
    before = (tmp_path / "c.pt").read_bytes()
    job = demo.run([*data[ours], "--resume"], expect=int(theirs != ours))
    if theirs == ours:
        assert "Resumed from" in job.out
        return
    (line,) = job.err.splitlines()
    assert line.startswith("[CPU 0] ERROR: checkpoint ")
    assert line.endswith(f"has number of classes {theirs}, not {ours}: use the same"), line
    assert (tmp_path / "c.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("source", "theirs", "ours"),
    [
        ("file", 80, 80),
        ("file", 80, 3),
        ("imagenet", 1000, 1000),
        pytest.param("imagenet", 1000, 80, marks=LONG),
    ],
)
def test_last_layer_of_other_classes_is_left_out_and_that_is_said(
    demo, tmp_path, source, theirs, ours
):
    """ImageNet's is one of other classes even where there are as many."""
    file = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    demo.run(call=test_demo.make_weights, path=str(file), classes=theirs)
    argv = [*data_of(tmp_path, numbered_categories(ours), [1]), *FAST]
    argv += ["--weights", file if source == "file" else "imagenet"]
    job = demo.run(argv, call=last_layer_kept, env={"TORCH_HOME": str(tmp_path)}, file=str(file))
    kept = source == "file" and theirs == ours
    assert job.result() == [STATE_TENSORS - 2, kept]
    said = f"the last layer, of {theirs} other classes, is left out: here are {ours}\n"
    assert job.out.count("last layer") == job.out.count(said) == int(not kept)


def last_layer_kept(demo, result, file):
    """How many of the other tensors are the file's before the first step; is the last layer?"""
    wanted, found = demo.torch.load(file, weights_only=True), []
    build_model = demo.build_model

    def look(*args):
        model = build_model(*args)
        for name, value in model.state_dict().items():
            theirs = wanted[name]
            found.append([name, value.shape == theirs.shape and bool((value == theirs).all())])
        return model

    demo.build_model = look
    run_to_the_end(demo)
    last = [same for name, same in found if name.startswith("fc.")]
    write(result, [sum(same for _, same in found) - sum(last), all(last)])


def one_category_less(demo, result, less):
    """The script's main; of a rank that has received one category less, if it is told so."""
    from_rank_0 = demo.from_rank_0

    def received(process, phase, make):
        value = from_rank_0(process, phase, make)
        if less and phase == "image list broadcast":
            value[0].categories.popitem()
        return value

    demo.from_rank_0 = received
    run_to_the_end(demo)


def test_ranks_that_disagree_on_the_classes_do_not_start(demo, tmp_path):
    argv = [*data_of(tmp_path, numbered_categories(5), [1]), *FAST]
    less = [{"options": {"less": False}}, {"options": {"less": True}}]
    job = demo.run(argv, 2, expect=1, call=one_category_less, of_rank=lambda rank: less[rank])
    (line,) = job.err.splitlines()
    assert "number of classes: 4 here, 5 on rank 0: start all alike (rank 1)" in line
