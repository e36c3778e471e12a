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

BAD_INPUT = {  # options: the exit code, and what the line names
    "--batch_size 0": (2, r"--batch_size\b.*\b0\b"),
    "--annotation_path missing_image.json": (2, r"set/images\b.*\bgone\.jpg"),
    # From here on they run under --ci alone.
    "--coco_image_path no_folder": (2, "no_folder"),
    "--annotation_path broken.json": (2, r"broken\.json"),
    "--batchsize 4": (2, "--batchsize"),
    "--seed 3000000000": (2, r"--seed\b.*3000000000 is not below"),
    "--resume": (2, "--checkpoint"),
    "--annotation_path=": (2, "--annotation_path is empty"),
    "--val_image_path set/images": (2, "--val_annotation_path"),
    "--annotation_path no_file.json": (2, r"no_file\.json"),
    "--annotation_path no_annotations.json": (2, r"no_annotations\.json"),
    "--annotation_path no_categories.json": (2, r"no_categories\.json"),
    "--annotation_path outside.json": (2, r"outside\.jpg"),
    "--global_batch_size 7 --accumulate_steps 2": (2, r"--global_batch_size\b.*\b7\b"),
    "--weights no_file.pt": (2, r"no_file\.pt"),
    "--weights text.pt": (2, r"text\.pt"),
    "--checkpoint no_folder/run.pt": (2, r"no_folder/run\.pt"),
    "--checkpoint text.pt --resume": (2, r"text\.pt"),
    "--checkpoint none.pt --resume --precision auto": (2, r"none\.pt was saved with"),
    "--checkpoint list.pt --resume --precision auto": (2, r"list\.pt is not one of this demo"),
    "--workers 1 --timeout 1e7 --lr 1e9 --num_epochs 20": (2, "finite"),  # a timeout without end
    "--lr 1e9 --num_epochs 20": (2, r"(?i)\bloss\b.*\b(finite|nan)\b"),
    "--backend nccl": (2, r"--backend nccl: 1 processes for 0 GPU"),
    "--device mps": (2, r"--device mps needs a Mac"),
    "--compile --sync_bn": (2, r"--sync_bn needs NVIDIA GPUs"),
    "--grad_compression powersgd --precision fp16": (2, r"powersgd .* fp16"),
    "--compile --bucket_cap_mb 0.5": (2, r"--compile needs --bucket_cap_mb 1 or more"),
    "--checkpoint set": (2, r"checkpoint set is a folder"),
    "--weights code.pt": (2, r"code\.pt"),
    "--checkpoint run.pt --resume --image_size 48": (2, r"run\.pt\b.*--image_size"),
}


def test_bad_input_ends_with_one_line_that_names_it(folder):
    """And a checkpoint of another run is kept."""
    options = list(BAD_INPUT) if WITH_LONG else list(BAD_INPUT)[:2]
    made = [*GOOD, *FAST, "--max_steps", 1, "--checkpoint", "run.pt"]
    runs = [(0, made), *((0, [*GOOD, *FAST, *shlex.split(words)]) for words in options)]
    first, *others = run_forked(runs, cwd=folder, expect=None)
    assert first.returncode == 0, first.tail()
    for words, run in zip(options, others, strict=True):
        code, named = BAD_INPUT[words]
        assert run.returncode == code, run.tail()
        assert re.search(named, the_error(run.output)), run.tail()
    assert not (folder / "made_by_a_weights_file").exists()
    assert torch.load(folder / "run.pt", weights_only=True)["step"] == 1


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
def test_only_rank_0_needs_the_annotations_and_the_weights(folder, tmp_path):
    """Rank 1 is started in a folder that has the images alone."""
    torch.save(torchvision.models.resnet18(num_classes=80).state_dict(), folder / "good.pt")
    shutil.copytree(folder / "set/images", tmp_path / "set/images")
    port, weights = free_port(), ("--weights", "good.pt", "--max_steps", 2)
    with (
        start_rank(0, port, folder, *weights) as first,
        start_rank(1, port, tmp_path, *weights) as second,
    ):
        runs = [started.finish(SECONDS) for started in (first, second)]
    assert runs[0].json_line("Summary")["replicas_identical"] is True


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


# --- What ends before training: all share one start of Python -----------------------------------

OTHER = {  # what rank 1 has, and what the one line names
    "--coco_image_path other/images --annotation_path other/instances.json": r"\b0004\.jpg",
    "--lr 0.5": "--lr",
}


@pytest.fixture(scope="module")
def refused(folder) -> dict[str, Run]:
    """Runs of two ranks that were not given the same, by what differs; and of one process."""
    words = [*GOOD, *FAST]
    val = ["--val_image_path", GOOD[1], "--val_annotation_path", GOOD[3]]
    runs: dict[str, tuple] = {
        other: (2, [words, [*words, *shlex.split(other)]]) for other in OTHER
    }
    runs["val"] = 2, [[*words, *val], words]
    place = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    runs["rank"] = 0, words, place
    env = {"TORCH_HOME": str(folder / "home"), "https_proxy": "http://127.0.0.1:9"}
    runs["imagenet"] = 0, [*words, "--weights", "imagenet"], env
    ended = run_forked([*runs.values()], cwd=folder, expect=2, trains=False)
    return dict(zip(runs, ended, strict=True))


@LONG
def test_imagenet_weights_that_cannot_be_downloaded_are_one_line_that_says_what_to_do(
    refused, folder
):
    error = the_error(refused["imagenet"].output)
    assert "resnet18-" in error and str(folder / "home") in error and "--weights none" in error


@LONG
def test_rank_beyond_the_world_size_is_named(refused):
    error = the_error(refused["rank"].output)
    assert re.search(r"\bRANK\b.*\b2\b.*\bWORLD_SIZE\b", error)


@LONG
def test_validation_images_that_rank_0_alone_was_given_are_named(refused):
    run = refused["val"]
    assert "--val_image_path is given on rank 0 only: start all ranks alike" in run.output
    assert "Traceback" not in run.output


@LONG
@pytest.mark.parametrize("other", OTHER)
def test_ranks_with_other_data_or_arguments_end_and_one_line_names_what(refused, other):
    run = refused[other]
    assert re.search(OTHER[other], the_error(run.output))
    assert not run.steps(0) and not run.steps(1)
