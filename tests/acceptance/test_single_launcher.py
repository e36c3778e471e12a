"""launch_single.sh trains on this machine, logs what it prints, and refuses in one line."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import FAST, SINGLE, launch_single
from support.processes import LONG, Started, start

USUAL = {"PYTHON": sys.executable, "RUN_NAME": "run", "PROBE": "0"}
COMMAND = r"torchrun .*--nproc[-_]per[-_]node[= ]{} .*demo_coco_resnet18\.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The launcher is started in a folder with a space and an accent in its name."""
    path = tmp_path / "mein Gerät"
    path.mkdir()
    return path


def single(folder: Path, *arguments: object, **variables: object) -> Started:
    return launch_single(*arguments, cwd=folder, **{**USUAL, **variables})


def test_two_processes_train_and_the_log_has_all_lines_and_the_command(folder):
    """The arguments have a space and an accent, of which the locale knows nothing."""
    arguments = [*make_set(folder / "größer", 16), *FAST, "--max_steps", 2]
    with single(folder, *arguments, GPUS=2, LC_ALL="C") as started:
        run = started.finish(120)
    assert [run.steps(rank)[-1][1] for rank in (0, 1)] == [2, 2]
    log = (folder / "logs/run/node0.log").read_text()
    for rank in (0, 1):
        assert all(f"[CPU {rank}] {line}\n" in log for line in run.lines(rank))
    command = re.search(COMMAND.format(2), log)
    assert command and command.start() < log.index("[CPU 0]")
    assert command[0] in run.out


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5", "all"])
def test_wrong_number_of_processes_is_refused_in_one_line(folder, value):
    """All GPUs are wrong where there is none."""
    with single(folder, "--lr", 1, GPUS=value) as started:
        (line,) = started.finish(20, expect=None).lines()
    assert started.process.returncode != 0
    assert "error: " in line and "GPUS" in line.upper() and value in line


def test_log_folder_that_cannot_be_written_is_refused_in_one_line(folder):
    (folder / "file").touch()
    with single(folder, *make_set(folder / "set", 4), LOG_DIR=folder / "file/logs") as started:
        (line,) = started.finish(20, expect=None).lines()
    assert started.process.returncode != 0
    assert "error: " in line and f"{folder}/file/logs" in line


def test_error_of_the_script_is_the_last_line_and_is_not_restarted(folder):
    _, *arguments = make_set(folder / "set", 4)
    arguments = ["--coco_image_path", folder / "nowhere", *arguments[1:], *FAST]
    with single(folder, *arguments, RESTARTS=1) as started:
        run = started.finish(120, expect=None)
    assert run.returncode not in (0, 75)
    assert len(re.findall(COMMAND.format(1), run.out)) == 1
    assert "ERROR: " in run.lines()[-1] and f"{folder}/nowhere" in run.lines()[-1]


@LONG
def test_rank_that_is_killed_is_restarted_from_the_checkpoint(folder):
    arguments = [*make_set(folder / "set", 64), *FAST, "--checkpoint_every", 3, "--max_steps", 60]
    with single(folder, *arguments, "--num_epochs", 9, GPUS=2, RESTARTS=1) as started:
        started.wait_for(r"\| Step 5 ")
        os.kill(started.rank_pid(1), signal.SIGKILL)
        run = started.finish(180)
    assert len(re.findall(COMMAND.format(2), run.out)) == 2
    assert (folder / "logs/run/checkpoint.pt").is_file()
    resumed = run.json_line("Run")["start_step"]
    steps = [step for _, step, _ in run.steps(1)]
    assert 3 <= resumed < 60 and steps[resumed - 60 :] == list(range(resumed + 1, 61))
    assert run.json_line("Summary")["replicas_identical"] is True


def test_it_trains_in_the_background_of_a_script_where_sigint_is_ignored(folder):
    arguments = [*make_set(folder / "set", 8), *FAST, "--max_steps", 2]
    background = ["bash", "-c", 'bash "$@" & wait "$!"', "bash", SINGLE, *arguments]
    with start(background, env=USUAL, cwd=folder) as started:
        run = started.finish(120)
    assert run.json_line("Summary")["steps"] == 2
