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
import torch
import torchvision

from support.datasets import Payload, instances, make_set, numbered, truncate
from support.forks import QUICK, run_forked
from support.launchers import FAST
from support.processes import SCRIPT

# The processes of a test are started in a folder that has this data set.
WORDS = shlex.split("--coco_image_path set/images --annotation_path set/instances.json") + FAST


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good data set, and files that are wrong in one thing each. No test changes them."""
    folder = tmp_path_factory.mktemp("refusals")
    make_set(folder / "set", 8)
    make_set(folder / "other", 4)
    good = instances(numbered(8))
    contents = {
        "missing_image.json": instances([*numbered(7), "gone.jpg"]),
        "no_annotations.json": {**good, "annotations": []},
        "relabelled.json": instances(numbered(8), [1] * 8),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "broken.json").write_text('{"images": [')
    (folder / "saved").mkdir()
    (folder / "text.pt").write_text("no weights")
    torch.save({"fc.weight": torch.zeros(80, 2)}, folder / "other.pt")
    foreign = {"model": {}, "optimizer": {}, "scaler": {}, "settings": [1], "step": 0}
    torch.save(foreign, folder / "list.pt")
    torch.save(foreign | {"settings": {}, "step": "7"}, folder / "step.pt")
    for copy in ("cut", "linked"):
        shutil.copytree(folder / "set/images", folder / copy)
    for name in numbered(8):
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


def the_error(output: str) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in output, output
    (line,) = (line for line in output.splitlines() if re.search(r"\b(ERROR|error): ", line))
    return line


BAD_INPUT = [  # options, and what the one line names
    ("--batch_size 0", r"--batch_size\b.*\b0\b"),
    ("--annotation_path missing_image.json", r"set/images\b.*\bgone\.jpg"),
    ("--weights code.pt", r"code\.pt"),
    ("--coco_image_path no_folder", "the folder of images no_folder is not there"),
    ("--device cuda", "sees no GPU here.*--device cpu"),
    ("--checkpoint pipe", "checkpoint pipe is not a regular file"),
    ("--coco_image_path cut", r"image cut/\d+\.jpg cannot be decoded: .*--decode"),
    ("--coco_image_path linked", r"linked lacks 1 of 8 listed images, the first is 0003\.jpg"),
    ("--checkpoint run.pt --resume --annotation_path relabelled.json", "saved with data set"),
    ("--lr nan", "--lr: nan is not at least 1e-09"),
]
MORE_BAD_INPUT = [
    ("--annotation_path broken.json", r"broken\.json"),
    ("--batchsize 4", "--batchsize"),
    ("--seed 3000000000", r"--seed\b.*3000000000 is not below"),
    ("--resume", "--checkpoint"),
    ("--checkpoint_every 5", "--checkpoint_every needs --checkpoint FILE"),
    ("--checkpoint=", "--checkpoint is empty"),  # as "$FILE" is where nobody has set it
    ("--dummy", "--dummy reads no data: leave --coco_image_path out"),
    ("--checkpoint saved", "checkpoint saved is not a regular file"),
    ("--checkpoint new/", r"checkpoint new/ is not a regular file"),
    ("--val_image_path set/images", "--val_annotation_path"),
    ("--annotation_path no_file.json", r"no_file\.json"),
    ("--annotation_path no_annotations.json", r"no_annotations\.json"),
    ("--global_batch_size 7 --accumulate_steps 2", r"--global_batch_size\b.*\b7\b"),
    ("--weights no_file.pt", r"no_file\.pt"),
    ("--weights text.pt", r"text\.pt"),
    ("--weights other.pt", "not weights of ResNet-18: .*: Missing key"),
    ("--checkpoint no_folder/run.pt", r"no_folder/run\.pt"),
    ("--checkpoint text.pt --resume", r"text\.pt"),
    ("--checkpoint list.pt --resume --precision auto", r"list\.pt is not one of this demo"),
    ("--checkpoint step.pt --resume", r"step\.pt is not one of this demo"),
    ("--checkpoint run.pt --resume --image_size 48", r"run\.pt\b.*--image_size"),
    ("--lr 1e9 --num_epochs 20", r"(?i)\bloss\b.*\b(finite|nan)\b"),
    ("--backend nccl", "--backend nccl: 1 processes for 0 GPU"),
    ("--device mps", "--device mps needs a Mac"),
    ("--compile --sync_bn", "--sync_bn needs NVIDIA GPUs"),
    ("--compile --bucket_cap_mb 0.5", "--compile needs --bucket_cap_mb 1 or more"),
]
BAD_INPUT += [pytest.param(*row, marks=pytest.mark.slow) for row in MORE_BAD_INPUT]


@pytest.mark.parametrize(("options", "named"), BAD_INPUT)
def test_bad_input_ends_with_one_line_that_names_it(options, named, folder):
    """And no code in a file is run."""
    if "run.pt --resume" in options:
        first = [*WORDS, "--max_steps", 1, "--checkpoint", "run.pt"]
        run_forked([(0, first)], QUICK, cwd=folder)
    program = SCRIPT if "--lr 1e9" in options else QUICK  # with which no loss becomes infinite
    ranks = 2 if "broken.json" in options else 0  # rank 0 alone reads it
    words = [*WORDS, *shlex.split(options)]
    (run,) = run_forked([(ranks, words)], program, expect=2, cwd=folder)
    assert re.search(named, the_error(run.output)), run.tail()
    assert "usage:" not in run.output  # which argparse would print
    assert not (folder / "made_by_a_weights_file").exists()


# --- Two ranks that were not given the same, and others ----------------------------------------

IMAGES = "--coco_image_path other/images --annotation_path other/instances.json"
VALIDATION = shlex.split("--val_image_path set/images --val_annotation_path set/instances.json")
OTHER = [(IMAGES, r"\b0004\.jpg"), ("--lr 0.5", "--lr"), ("--profile p", "--profile given")]
EACH_ON_A_NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(("other", "named"), OTHER)
def test_nodes_with_other_data_or_arguments_end_and_one_line_names_what(other, named, folder):
    """What rank 1 has, and what the line names."""
    words = [*WORDS, "--timeout", 10, "--max_steps", 1]
    each = [words, [*words, *shlex.split(other)]]
    (run,) = run_forked([(2, each, EACH_ON_A_NODE)], QUICK, expect=2, cwd=folder)
    assert len({the_error(line) for line in run.output.splitlines() if "ERROR" in line}) == 2
    assert re.search(named, run.output)
    assert not run.steps(0) and not run.steps(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("each", "name"),
    [
        ([WORDS, ["--dummy", "--image_size", 40]], "--dummy"),
        ([WORDS, [*WORDS, *VALIDATION]], "--val_image_path given"),
    ],
)
def test_what_one_rank_alone_was_given_is_named(folder, each, name):
    runs = run_forked([(2, each), (2, each[::-1])], QUICK, expect=2, cwd=folder)
    for run, given in zip(runs, (True, False), strict=True):  # to rank 1
        line = f"{name} is {given} here, but {not given} on rank 0: start all ranks alike (rank 1)"
        assert the_error(run.output).endswith(line)


@pytest.mark.slow
def test_a_download_of_weights_that_fails_says_what_to_do(folder):
    """One before it says how long the other ranks wait, and which file to fetch first."""
    env = {"TORCH_HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
    words = [*WORDS, "--weights", "imagenet", "--timeout", 77]
    (run,) = run_forked([(2, words, env)], QUICK, expect=2, cwd=folder)
    error = the_error(run.output)
    assert "resnet18-" in error and str(folder / "home") in error and "--weights none" in error
    before, _, _ = run.output.partition("ERROR: ")
    assert re.search(r"^.*\b77 s.*resnet18-", before, re.MULTILINE)


@pytest.mark.slow
def test_only_rank_0_needs_the_annotations_and_the_weights(folder, tmp_path):
    """Rank 1 is in a folder that has the images alone, and it writes nothing there. A node has
    paths and workers of its own.
    """
    torch.save(torchvision.models.resnet18(num_classes=80).state_dict(), tmp_path / "good.pt")
    shutil.copytree(folder / "set", tmp_path / "set")
    shutil.copytree(folder / "set/images", tmp_path / "1/set/images")
    program = tmp_path / "elsewhere.py"
    program.write_text(
        "import os\n"
        "from demo_coco_resnet18 import main, run_and_exit\n"
        "os.chdir({'0': '.', '1': '1'}[os.environ['RANK']])\n"
    )
    words = [*WORDS, "--weights", "good.pt", "--max_steps", 1, "--checkpoint"]
    each = [[*words, "a.pt"], [*words, "b.pt", "--workers", 1]]
    (run,) = run_forked([(2, each)], program, cwd=tmp_path)
    assert run.json_line("Summary")["replicas_identical"] is True
    assert (tmp_path / "a.pt").exists() and os.listdir(tmp_path / "1") == ["set"]
