"""A run survives what is killed on a node, and ends in time when something is lost for good."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import FAST, end_within, finish_all, launch_single, two_nodes
from support.nodes import small_disk
from support.processes import LONG, Run, Started, processes

TIMEOUT = 8  # seconds, of --timeout
STEP_3 = r"\| Step 3 "


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run of 40 steps on two nodes, in five epochs."""
    images = make_set(tmp_path_factory.mktemp("set"), 64)
    return [*FAST, *images, "--num_epochs", "5", "--timeout", str(TIMEOUT)]


@pytest.fixture(scope="module")
def unbroken(training, tmp_path_factory) -> str:
    """The digest of the weights after a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    saves = ["--checkpoint", folder / "c.pt", "--checkpoint_every", 2]
    with two_nodes(folder) as nodes:
        runs = finish_all(nodes.start_both(*training, *saves))
    return runs[0].json_line("Summary")["weights_sha256"]


def victim(started: Started, what: str) -> int:
    """A process of node 1: its rank, its torchrun, or a loader worker."""
    rank = started.rank_pid(1)
    found = processes(started.test_id)
    chosen = {
        "rank": rank,
        "torchrun": next(p.parent for p in found if p.pid == rank),
        "worker": next((p.pid for p in found if p.parent == rank), None),
    }
    return chosen[what]


@LONG
@pytest.mark.parametrize(
    ("what", "workers"), [("rank", 0), ("torchrun", 0), ("worker", 1)], ids=str
)
def test_run_restarts_after_a_kill_and_ends_with_the_same_weights(
    training, unbroken, tmp_path, what, workers
):
    saves = ["--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 2, "--workers", workers]
    with two_nodes(tmp_path) as nodes:
        started = nodes.start_both(*training, *saves, RESTARTS=1)
        for one in started:
            one.wait_for(STEP_3)
        os.kill(victim(started[1], what), signal.SIGKILL)
        first, second = finish_all(started, 180)
        logs = [nodes.log(node) for node in (0, 1)]
    assert first.json_line("Run")["start_step"] >= 2, "it was not resumed"
    for node, log in enumerate(logs):
        assert f"[CPU {node}] Cleanup complete" in log
    assert first.steps(0)[-1][1] == second.steps(1)[-1][1] == 40
    assert first.json_line("Summary")["weights_sha256"] == unbroken


@LONG
def test_a_stopped_rank_ends_the_other_node_and_its_own_after_a_signal(training, tmp_path):
    """SIGSTOP: the rank is there, does nothing, and cannot be asked to stop."""
    with two_nodes(tmp_path) as nodes:
        started = nodes.start_both(*training, "--num_epochs", 99)
        for one in started:
            one.wait_for(STEP_3)
        os.kill(victim(started[1], "rank"), signal.SIGSTOP)
        (first,) = end_within(TIMEOUT + 15, started[:1])
        started[1].signal(signal.SIGTERM)
        (second,) = end_within(40, started[1:])
        logs = [nodes.log(node) for node in (0, 1)]
    assert first.returncode != 0 != second.returncode
    assert re.search(r"^\[CPU 0\] .*ERROR", logs[0], re.M)
    assert "[CPU 1] Epoch 1 | Step 3 " in logs[1]


@LONG
def test_an_image_that_disappears_on_one_node_is_named_and_ends_both(tmp_path):
    images = ["--coco_image_path", "images", "--annotation_path", "instances.json"]
    with two_nodes(tmp_path) as nodes:
        for node in (0, 1):
            make_set(nodes.folder(node), 64)
        started = nodes.start_both(*FAST, *images, "--num_epochs", 99, "--timeout", TIMEOUT)
        for one in started:
            one.wait_for(STEP_3)
        (nodes.folder(1) / "images" / "0005.jpg").unlink()
        started[1].wait_for(r"^\[CPU 1\] .*0005\.jpg")
        runs = end_within(20, started)
        logs = [nodes.log(node) for node in (0, 1)]
    assert all(run.returncode for run in runs)
    assert re.search(r"^\[CPU 1\] .*0005\.jpg", logs[1], re.M)
    assert re.search(r"^\[CPU 0\] ERROR", logs[0], re.M)


def test_a_log_folder_that_cannot_be_made_is_one_line_before_the_start(training, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    with launch_single(*training, cwd=tmp_path, LOG_DIR=folder) as started:
        run = started.finish(60, expect=None)
    refused(run, folder)


def refused(run: Run, folder: Path) -> None:
    assert run.returncode != 0
    assert len([line for line in run.lines() if str(folder) in line]) == 1, run.tail()
    assert "| Step " not in run.out and "Traceback" not in run.out


@LONG
def test_a_log_folder_that_is_not_writable_is_one_line_before_the_start(training, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with launch_single(*training, cwd=tmp_path, LOG_DIR=disk) as started:
            run = started.finish(60, expect=None)
    refused(run, disk)


@LONG
def test_training_goes_on_when_the_disk_of_the_log_is_full(training, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        variables = {"LOG_DIR": disk, "RUN_NAME": "run"}
        options = ["--num_epochs", 10]  # 160 steps, more lines than the log's last page can take
        with launch_single(*training, *options, cwd=tmp_path, **variables) as started:
            started.wait_for(STEP_3)
            with contextlib.suppress(OSError):
                (disk / "full").write_bytes(bytes(2**21))
            run = started.finish(120)
        log = (disk / "run" / "node0.log").read_text()
    assert run.steps()[-1][1] == 160 and "[CPU 0] Cleanup complete" in run.out
    assert "| Step 3 " in log and "Cleanup complete" not in log, "the disk was not full"
