"""What a user gets wrong ends the run with one line that names it, soon, and leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
from pathlib import Path

import pytest

from support.datasets import Payload, instances, make_set, numbered, truncate, write_images
from support.forks import QUICK, run_forked
from support.launchers import FAST
from support.processes import SCRIPT

# The processes of a test are started in a folder that has this data set.
GOOD = shlex.split("--coco_image_path set/images --annotation_path set/instances.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good data set, and files that are wrong in one thing each. No test changes them."""
    folder = tmp_path_factory.mktemp("refusals")
    make_set(folder / "set", 8)
    make_set(folder / "other", 4)
    write_images(folder / "larger", numbered(8), size=(60, 50))
    good = instances(numbered(8))
    contents = {
        "missing_image.json": instances([*numbered(7), "gone.jpg"]),
        "no_annotations.json": {**good, "annotations": []},
        "no_categories.json": {**good, "categories": []},
        "relabelled.json": instances(numbered(8), [1] * 8),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "broken.json").write_text('{"images": [')
    (folder / "saved").mkdir()
    (folder / "text.pt").write_text("no weights")
    for copy in ("empty", "cut", "linked"):
        shutil.copytree(folder / "set/images", folder / copy)
    for name in numbered(8):
        (folder / "empty" / name).write_bytes(b"")
        truncate(folder / "cut" / name)
    (folder / "linked/0003.jpg").unlink()
    (folder / "linked/0003.jpg").symlink_to(folder / "gone.jpg")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A test's own copy of them."""
    folder = shutil.copytree(made, tmp_path / "a folder", symlinks=True)
    os.mkfifo(folder / "pipe")
    (folder / "code.pt").write_bytes(pickle.dumps(Payload(folder / "made_by_a_weights_file")))
    return folder


def write_foreign(folder: Path) -> None:
    """Checkpoints that are almost one of the script."""
    import torch
    import torchvision

    foreign = {"model": {}, "optimizer": {}, "scaler": {}, "step": 0}
    for name, settings in (("none.pt", {}), ("list.pt", [1])):
        torch.save({**foreign, "settings": settings}, folder / name)
    torch.save({**foreign, "settings": {}, "step": "7"}, folder / "step.pt")
    wide = torchvision.models.wide_resnet50_2(num_classes=90).state_dict()
    names = ("conv1.weight", "fc.weight", "fc.bias")
    torch.save(
        {name: wide[name][:, :1] if "conv" in name else wide[name] for name in names},
        folder / "wide.pt",
    )


def the_error(output: str) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if re.search(r"\bERROR: |\berror: ", line)]
    assert len(errors) == 1, output
    return errors[0]


# --- One process -------------------------------------------------------------------------------

BAD_INPUT = [  # options, and what the one line names
    ("--batch_size 0", r"--batch_size\b.*\b0\b"),
    ("--annotation_path missing_image.json", r"set/images\b.*\bgone\.jpg"),
    ("--weights code.pt", r"code\.pt"),
    (
        "--coco_image_path no_folder",
        "the folder of images no_folder is not there",
    ),
    ("--device cuda", "sees no GPU: .*--device cpu"),
    ("--checkpoint pipe", r"checkpoint pipe is not a regular file"),
    ("--coco_image_path cut", r"image cut/\d+\.jpg cannot be decoded: .*--decode"),
    (
        "--coco_image_path linked",
        r"linked lacks 1 of 8 listed images, the first is 0003\.jpg",
    ),
    (
        "--checkpoint run.pt --resume --annotation_path relabelled.json",
        r"run\.pt was saved with data set",
    ),
    ("--lr nan", "--lr: nan is not at least 1e-09"),
]
MORE_BAD_INPUT = [
    ("--annotation_path broken.json", r"broken\.json"),
    ("--batchsize 4", "--batchsize"),
    ("--lr 0", r"--lr: 0 is not at least 1e-09"),
    ("--seed 3000000000", r"--seed\b.*3000000000 is not below"),
    ("--resume", "--checkpoint"),
    ("--annotation_path=", "--annotation_path is empty"),
    ("--dummy", "--dummy reads no data: leave --coco_image_path out"),
    ("--checkpoint saved", "checkpoint saved is not a regular file"),
    ("--val_image_path set/images", "--val_annotation_path"),
    ("--annotation_path no_file.json", r"no_file\.json"),
    ("--annotation_path no_annotations.json", r"no_annotations\.json"),
    ("--annotation_path no_categories.json", r"no_categories\.json"),
    ("--global_batch_size 7 --accumulate_steps 2", r"--global_batch_size\b.*\b7\b"),
    ("--weights no_file.pt", r"no_file\.pt"),
    ("--weights text.pt", r"text\.pt"),
    ("--checkpoint no_folder/run.pt", r"no_folder/run\.pt"),
    ("--checkpoint text.pt --resume", r"text\.pt"),
    ("--checkpoint none.pt --resume --precision auto", r"none\.pt was saved with"),
    ("--checkpoint list.pt --resume --precision auto", r"list\.pt is not one of this demo"),
    ("--lr 1e9 --num_epochs 20", r"(?i)\bloss\b.*\b(finite|nan)\b"),
    ("--backend nccl", r"--backend nccl: 1 processes for 0 GPU"),
    ("--device mps", r"--device mps needs a Mac"),
    ("--compile --sync_bn", r"--sync_bn needs NVIDIA GPUs"),
    ("--compile --bucket_cap_mb 0.5", r"--compile needs --bucket_cap_mb 1 or more"),
    ("--checkpoint set", r"checkpoint set is not a regular file"),
    ("--checkpoint new/", r"checkpoint new/ is not a regular file"),
    ("--weights wide.pt", r"not weights of ResNet-18: .*: Missing key"),
    ("--checkpoint step.pt --resume", r"step\.pt is not one of this demo"),
    ("--coco_image_path empty", r"image empty/\d+\.jpg cannot be decoded: .*--decode"),
    ("--checkpoint run.pt --resume --image_size 48", r"run\.pt\b.*--image_size"),
]
BAD_INPUT += [pytest.param(*row, marks=pytest.mark.slow) for row in MORE_BAD_INPUT]


@pytest.mark.parametrize(("options", "named"), BAD_INPUT)
def test_bad_input_ends_with_one_line_that_names_it(options, named, folder):
    """And no code in a file is run."""
    words = [*GOOD, *FAST]
    if re.search(r"(none|list|step|wide)\.pt", options):
        write_foreign(folder)
    elif "run.pt" in options:
        first = [*words, "--max_steps", 1, "--checkpoint", "run.pt"]
        run_forked([(0, first)], QUICK, cwd=folder)
    program = SCRIPT if "--lr 1e9" in options else QUICK  # with which no loss becomes infinite
    (run,) = run_forked([(0, [*words, *shlex.split(options)])], program, expect=2, cwd=folder)
    assert re.search(named, the_error(run.output)), run.tail()
    assert "usage:" not in run.output  # which argparse would print
    assert not (folder / "made_by_a_weights_file").exists()


# --- Two ranks that were not given the same, and others ----------------------------------------

IMAGES = "--coco_image_path other/images --annotation_path other/instances.json"
OTHER = [(IMAGES, r"\b0004\.jpg"), ("--lr 0.5", "--lr"), ("--profile p", "--profile given")]
EACH_ON_A_NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(("other", "named"), OTHER)
def test_nodes_with_other_data_or_arguments_end_and_one_line_names_what(other, named, folder):
    """What rank 1 has, and what the line names."""
    words = [*GOOD, *FAST, "--timeout", 10, "--max_steps", 1]
    each = [words, [*words, *shlex.split(other)]]
    (run,) = run_forked([(2, each, EACH_ON_A_NODE)], QUICK, expect=2, cwd=folder)
    assert len({the_error(line) for line in run.output.splitlines() if "ERROR" in line}) == 2
    assert re.search(named, run.output)
    assert not run.steps(0) and not run.steps(1)


@pytest.mark.slow
@pytest.mark.parametrize("swap", [1, -1])
def test_dummy_on_one_rank_alone_is_named(folder, swap):
    words = [[*GOOD, *FAST], ["--dummy", "--image_size", 40]][::swap]
    (run,) = run_forked([(2, words)], QUICK, expect=2, cwd=folder)
    given = swap == 1  # to rank 1
    line = f"ERROR: --dummy is {given} here, but {not given} on rank 0: start all ranks alike"
    assert the_error(run.output).endswith(f"{line} (rank 1)")


@pytest.mark.slow
def test_validation_images_that_one_rank_alone_has_are_named(folder):
    words = [*GOOD, *FAST]
    val = ["--val_annotation_path", GOOD[3], "--val_image_path", GOOD[1]]
    (run,) = run_forked([(2, [[*words, *val], words])], QUICK, expect=2, cwd=folder)
    line = "--val_image_path given is False here, but True on rank 0: start all ranks alike"
    assert line in the_error(run.output)


@pytest.mark.slow
def test_imagenet_weights_that_cannot_be_downloaded_are_one_line_that_says_what_to_do(folder):
    env = {"TORCH_HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
    words = [*GOOD, *FAST, "--weights", "imagenet"]
    (run,) = run_forked([(0, words, env)], QUICK, expect=2, cwd=folder)
    error = the_error(run.output)
    assert "resnet18-" in error and str(folder / "home") in error and "--weights none" in error


@pytest.mark.slow
def test_before_a_download_one_line_says_how_long_the_other_ranks_wait(folder):
    """And which file to fetch first."""
    env = {"TORCH_HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
    words = [*GOOD, *FAST, "--weights", "imagenet", "--timeout", 77]
    (run,) = run_forked([(2, words, env)], QUICK, expect=2, cwd=folder)
    before, _, _ = run.output.partition("ERROR: ")
    assert re.search(r"^.*\b77 s.*", before, re.MULTILINE) and "resnet18-" in before


# Rank 1 is in the folder 1.
ELSEWHERE = """
import os
from demo_coco_resnet18 import main, run_and_exit

if os.environ["RANK"] == "1":
    os.chdir("1")
"""


@pytest.mark.slow
def test_only_rank_0_needs_the_annotations_and_the_weights(folder, tmp_path):
    """Rank 1 is in a folder that has the images alone, and it writes nothing there. A node has
    paths and workers of its own.
    """
    import torch
    import torchvision

    torch.save(torchvision.models.resnet18(num_classes=80).state_dict(), tmp_path / "good.pt")
    shutil.copytree(folder / "set", tmp_path / "set")
    shutil.copytree(folder / "set/images", tmp_path / "1/set/images")
    program = tmp_path / "elsewhere.py"
    program.write_text(ELSEWHERE)
    words = [*GOOD, *FAST, "--weights", "good.pt", "--max_steps", 1, "--checkpoint"]
    each = [[*words, "a.pt"], [*words, "b.pt", "--workers", 1]]
    (run,) = run_forked([(2, each)], program, cwd=tmp_path)
    assert run.json_line("Summary")["replicas_identical"] is True
    assert (tmp_path / "a.pt").exists() and os.listdir(tmp_path / "1") == ["set"]
