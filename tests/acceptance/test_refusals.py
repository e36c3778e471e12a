"""What a user gets wrong ends the run with one line that names it, soon, and leaves nothing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
import torchvision

from support.datasets import Payload, instances, make_set, numbered
from support.forks import run_forked
from support.launchers import FAST
from support.processes import (
    LONG,
    SCRIPT,
    WITH_LONG,
    Run,
    Started,
    demo_command,
    free_port,
    start,
    wait_until,
)

# The processes of a test are started in a folder that has this data set.
GOOD = shlex.split("--coco_image_path set/images --annotation_path set/instances.json")
SECONDS = 60  # within which a run has to end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good data set, and files that are wrong in one thing each."""
    folder = tmp_path_factory.mktemp("refusals")
    make_set(folder / "set", 8)
    make_set(folder / "other", 4)
    good = instances(numbered(8))
    contents = {
        "missing_image.json": instances([*numbered(7), "gone.jpg"]),
        "no_annotations.json": {**good, "annotations": []},
        "no_categories.json": {**good, "categories": []},
        "outside.json": instances([*numbered(7), "../outside.jpg"]),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    shutil.copy(folder / "set/images/0000.jpg", folder / "set/outside.jpg")
    (folder / "broken.json").write_text('{"images": [')
    (folder / "text.pt").write_text("no weights")
    foreign = {"model": {}, "optimizer": {}, "scaler": {}, "step": 0}
    for name, settings in (("none.pt", {}), ("list.pt", [1])):
        torch.save({**foreign, "settings": settings}, folder / name)
    torch.save(Payload(folder / "made_by_a_weights_file"), folder / "code.pt")
    return folder


def the_error(output: str) -> str:
    """The one line that says what is wrong."""
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if re.search(r"\bERROR: |\berror: ", line)]
    assert len(errors) == 1, output
    return errors[0]


# --- One process -------------------------------------------------------------------------------

BAD_INPUT = {  # options, and what the line names
    "--batch_size 0": r"--batch_size\b.*\b0\b",
    "--annotation_path missing_image.json": r"set/images\b.*\bgone\.jpg",
    # From here on they run under --ci alone.
    "--coco_image_path no_folder": "no_folder",
    "--annotation_path broken.json": r"broken\.json",
    "--batchsize 4": "--batchsize",
    "--lr 0": r"--lr: 0 is not at least 1e-09",
    "--seed 3000000000": r"--seed\b.*3000000000 is not below",
    "--resume": "--checkpoint",
    "--annotation_path=": "--annotation_path is empty",
    "--val_image_path set/images": "--val_annotation_path",
    "--annotation_path no_file.json": r"no_file\.json",
    "--annotation_path no_annotations.json": r"no_annotations\.json",
    "--annotation_path no_categories.json": r"no_categories\.json",
    "--annotation_path outside.json": r"outside\.jpg",
    "--global_batch_size 7 --accumulate_steps 2": r"--global_batch_size\b.*\b7\b",
    "--weights no_file.pt": r"no_file\.pt",
    "--weights text.pt": r"text\.pt",
    "--checkpoint no_folder/run.pt": r"no_folder/run\.pt",
    "--checkpoint text.pt --resume": r"text\.pt",
    "--checkpoint none.pt --resume --precision auto": r"none\.pt was saved with",
    "--checkpoint list.pt --resume --precision auto": r"list\.pt is not one of this demo",
    "--workers 1 --timeout 1e7 --lr 1e9 --num_epochs 20": "finite",  # a timeout without end
    "--lr 1e9 --num_epochs 20": r"(?i)\bloss\b.*\b(finite|nan)\b",
    "--backend nccl": r"--backend nccl: 1 processes for 0 GPU",
    "--device mps": r"--device mps needs a Mac",
    "--compile --sync_bn": r"--sync_bn needs NVIDIA GPUs",
    "--grad_compression powersgd --precision fp16": r"powersgd .* fp16",
    "--compile --bucket_cap_mb 0.5": r"--compile needs --bucket_cap_mb 1 or more",
    "--checkpoint set": r"checkpoint set is a folder",
    "--weights code.pt": r"code\.pt",
    "--checkpoint run.pt --resume --image_size 48": r"run\.pt\b.*--image_size",
}


GIVEN = list(BAD_INPUT) if WITH_LONG else list(BAD_INPUT)[:2]
OTHER = {  # what rank 1 has, and what the one line names
    "--coco_image_path other/images --annotation_path other/instances.json": r"\b0004\.jpg",
    "--lr 0.5": "--lr",
}


# Rank 1 is in the folder 1.
ELSEWHERE = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from demo_coco_resnet18 import main, run_and_exit

if os.environ["RANK"] == "1":
    os.chdir("1")
"""


@pytest.fixture(scope="module")
def ended(folder) -> dict[str, Run]:
    """Runs of one process, and of two ranks that were not given the same, by what is wrong. All
    share one start of Python.
    """
    words = [*GOOD, *FAST]
    runs: dict[str, tuple] = {"": (0, [*words, "--max_steps", 1, "--checkpoint", "run.pt"])}
    runs |= {options: (0, [*words, *shlex.split(options)]) for options in GIVEN}
    if WITH_LONG:
        runs |= {options: (2, [words, [*words, *shlex.split(options)]]) for options in OTHER}
        val = ["--val_image_path", GOOD[1], "--val_annotation_path", GOOD[3]]
        runs["val"] = 2, [[*words, *val], words]
        place = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        runs["rank"] = 0, words, place
        env = {"TORCH_HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
        runs["imagenet"] = 0, [*words, "--weights", "imagenet"], env
        torch.save(torchvision.models.resnet18(num_classes=80).state_dict(), folder / "good.pt")
        shutil.copytree(folder / "set/images", folder / "1/set/images")
        program = folder / "elsewhere.py"
        program.write_text(ELSEWHERE)
        words += ["--weights", "good.pt", "--max_steps", 2]
        runs["images alone"] = 2, words, {}, program
    codes = [0 if name in ("", "images alone") else 2 for name in runs]
    return dict(zip(runs, run_forked([*runs.values()], cwd=folder, expect=codes), strict=True))


def test_bad_input_ends_with_one_line_that_names_it(ended, folder):
    """And a checkpoint of another run is kept."""
    for words in GIVEN:
        run = ended[words]
        assert re.search(BAD_INPUT[words], the_error(run.output)), run.tail()
        assert "usage:" not in run.output  # which argparse would print
    assert not (folder / "made_by_a_weights_file").exists()
    assert torch.load(folder / "run.pt", weights_only=True)["step"] == 1


# --- Two ranks that were not given the same, and others ----------------------------------------


@LONG
def test_imagenet_weights_that_cannot_be_downloaded_are_one_line_that_says_what_to_do(
    ended, folder
):
    error = the_error(ended["imagenet"].output)
    assert "resnet18-" in error and str(folder / "home") in error and "--weights none" in error


@LONG
def test_rank_beyond_the_world_size_is_named(ended):
    error = the_error(ended["rank"].output)
    assert re.search(r"\bRANK\b.*\b2\b.*\bWORLD_SIZE\b", error)


@LONG
def test_validation_images_that_rank_0_alone_was_given_are_named(ended):
    run = ended["val"]
    assert "--val_image_path is given on rank 0 only: start all ranks alike" in run.output
    assert "Traceback" not in run.output


@LONG
def test_only_rank_0_needs_the_annotations_and_the_weights(ended):
    """Rank 1 is in a folder that has the images alone."""
    assert ended["images alone"].json_line("Summary")["replicas_identical"] is True


@LONG
@pytest.mark.parametrize("other", OTHER)
def test_ranks_with_other_data_or_arguments_end_and_one_line_names_what(ended, other):
    run = ended[other]
    assert re.search(OTHER[other], the_error(run.output))
    assert not run.steps(0) and not run.steps(1)


# --- Processes that are started by hand, with torchrun's variables ------------------------------


def start_rank(rank: int, port: int, folder: Path, *options: object) -> Started:
    """One of two processes."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {name: str(value) for name, value in place.items()}
    return start(demo_command([*GOOD, *FAST, *options], launcher="python"), env=env, cwd=folder)


@LONG
def test_port_that_is_taken_is_named(folder):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with start_rank(0, port, folder) as started:
            run = started.finish(SECONDS, expect=1)
    assert re.search(rf":{port}\b", the_error(run.output))


@LONG
def test_peer_that_never_comes_is_waited_for_no_longer_than_the_timeout(folder):
    """Within 10 s of it, counted from when rank 0 can be reached."""
    port = free_port()
    with start_rank(0, port, folder, "--timeout", 5) as started:
        wait_until(lambda: is_listening(port), 60, "rank 0 at its port")
        begin = time.monotonic()
        run = started.finish(5 + 10, expect=1)
    assert time.monotonic() - begin > 4
    assert "did all nodes start" in the_error(run.output)


def is_listening(port: int) -> bool:
    """Whether a process waits for connections at a port; 0A is a listening socket."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return any(re.search(rf":{port:04X} \S+ 0A ", table) for table in tables)
