"""What a run saves: nothing that a user has trained is lost without a word."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from support.datasets import digests, make_set
from support.forks import QUICK, changed, run_forked
from support.launchers import FAST, SAVED
from support.processes import SCRIPT, start


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["step"]


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Options of a run that saves, on 16 images; four steps are an epoch."""
    return [*make_set(tmp_path, 16), *FAST, "--checkpoint", str(tmp_path / "c.pt")]


def test_a_start_without_resume_never_touches_a_file_that_is_there(words, tmp_path):
    """Also where it would take its first weights from it. A run that resumes goes on in it."""
    path = tmp_path / "c.pt"
    words += ["--global_batch_size", 4, "--max_steps"]
    run_forked([(2, [*words, 2])], program=QUICK)
    before = digests(tmp_path)
    runs = [(2, [*words, 1, *more]) for more in ([], ["--weights", path])]
    for run in run_forked(runs, program=QUICK, expect=2):
        (line,) = (line for line in run.output.splitlines() if "ERROR" in line)
        assert f"checkpoint {path} is there already: give --resume " in line
        assert "another FILE" in line
        assert "annotations" not in run.output, "they were read before"
    assert digests(tmp_path) == before
    again = [*words, 6, "--resume", "--weights", tmp_path / "gone.pt"]  # which it does not need
    (resumed,) = run_forked([(2, again)], program=QUICK)
    assert step_of(path) == 6
    assert re.search(r"Epoch 1 complete from step 3 \| Avg loss", resumed.out)
    assert re.search(r"Epoch 2 ends at step 2 of 4 \| Avg loss", resumed.out)


# A signal of its own, after which nothing can be saved.
STOPS_ITSELF = """
import signal

def note(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    note_line(*args)

def fail(*_):
    raise demo.UserError("checkpoint c.pt not saved at step 1: No space left on device")

note_line, demo.note_line, demo.write_checkpoint = demo.note_line, note, fail
"""


def test_a_stop_whose_save_fails_names_both(words, tmp_path):
    program = changed(tmp_path / "program.py", STOPS_ITSELF)
    (run,) = run_forked([(0, words)], program, expect=2)
    error = r"ERROR: Stopped on SIGTERM, but checkpoint c\.pt not saved at step 1"
    assert re.search(error, run.lines()[-1]) and "goes on" not in run.out


# Its folder of checkpoints is gone before the last save.
NO_FOLDER = """
import shutil

def remove(training, *rest):
    if training.step == training.args.max_steps:
        shutil.rmtree(os.path.dirname(training.args.checkpoint), ignore_errors=True)
    plain(training, *rest)

plain, demo.note_line = demo.note_line, remove
"""


def test_a_run_whose_last_save_fails_still_validates_and_has_a_summary(tmp_path):
    """It saves before it validates, which may fail. Its loader workers, which ignore SIGTERM, end
    with it.
    """
    (tmp_path / "saved").mkdir()
    words = [*make_set(tmp_path, 8, val=3), *FAST, "--num_epochs", 1, "--workers", 1]
    words += ["--checkpoint", tmp_path / "saved/c.pt"]
    (run,) = run_forked([(2, words)], changed(tmp_path / "program.py", NO_FOLDER), expect=2)
    saves, validates = map(run.out.index, ("not saved at step 1", "Epoch 1 validation | Top-1: "))
    assert saves < validates
    assert run.json_line("Summary")["steps"] == 1
    assert run.out.index("Summary") < run.out.index("ERROR: checkpoint ")
    assert run.out.count("ERROR: ") == 1


# The file that is written first cannot be written up to step 4.
NO_ROOM = """
write = demo.write_checkpoint

def write_checkpoint(training, path):
    blocked = f"{path}.new"
    if training.step == 2:
        os.mkdir(blocked)
    if training.step > LAST_BLOCKED and os.path.isdir(blocked):
        os.rmdir(blocked)
    write(training, path)

demo.write_checkpoint = write_checkpoint
"""


@pytest.mark.parametrize(("last_blocked", "code"), [(4, 0), (99, 2)])
def test_a_save_that_fails_is_a_warning_and_the_last_one_an_error(
    words, tmp_path, last_blocked, code
):
    program = changed(tmp_path / "program.py", NO_ROOM.replace("LAST_BLOCKED", str(last_blocked)))
    words += ["--checkpoint_every", 1, "--max_steps", 6]
    (run,) = run_forked([(0, words)], program=program, expect=code)
    warnings = re.findall(r"WARNING: checkpoint \S+ not saved at step (\d+)(.*)", run.out)
    saved_late = [2, 3, 4, 4]  # 4: the end of the epoch, too
    assert [int(step) for step, _ in warnings] == saved_late + ([] if code == 0 else [5, 6, 6])
    assert all("an older one is kept" in rest for _, rest in warnings)
    assert step_of(tmp_path / "c.pt") == (1 if code else 6)
    if code:
        assert re.search(r"ERROR: checkpoint \S+ not saved at step 6", run.output)


def test_a_checkpoint_that_is_a_link_stays_one_and_its_target_is_written(words, tmp_path):
    target, link = tmp_path / "disk/c.pt", tmp_path / "c.pt"
    target.parent.mkdir()
    run_forked([(0, [*words, "--checkpoint", target, "--max_steps", 1])], QUICK)
    link.symlink_to(target)
    run_forked([(0, [*words, "--resume", "--max_steps", 2])], QUICK)
    assert link.is_symlink() and step_of(target) == 2


# Rank 0 needs two seconds for each save.
SLOW_SAVE = """
def write(training, path):
    time.sleep(2)
    plain(training, path)

plain, demo.write_checkpoint = demo.write_checkpoint, write
"""


def test_the_time_of_a_save_is_in_no_ranks_step(words, tmp_path):
    """The others wait for rank 0 meanwhile: not in their next step, as if for its gradients."""
    program = changed(tmp_path / "program.py", SLOW_SAVE)
    words += ["--checkpoint_every", 1, "--max_steps", 4, "--batch_size", 2]
    (run,) = run_forked([(2, words)], program)
    for rank in run.json_line("Summary")["ranks"]:
        assert rank["exposed_ms"] <= rank["step_ms"] < 1500


# Workers of which each starts from a process of its own, as Python 3.14 starts them by default. A
# worker looks after five seconds without work whether that process is still there.
FORKSERVER = f"""
import multiprocessing, sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import demo_coco_resnet18 as demo

def slowly(training, *rest):
    time.sleep(6 if training.step else 0)
    return plain(training, *rest)

plain, demo.forward = demo.forward, slowly
if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    demo.run_and_exit(demo.main)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS starts workers in another way")
def test_a_stop_signal_saves_where_workers_start_by_forkserver(words, tmp_path):
    """As SLURM sends it. Here while a step of three slow micro-batches goes on. After a first step
    that was fast the ranks may agree to look again two steps later.
    """
    program = tmp_path / "program.py"
    program.write_text(FORKSERVER)
    words += ["--accumulate_steps", "3", "--batch_size", "2", "--workers", "2"]
    with start([sys.executable, program, *words]) as started:
        started.wait_for(r"\| Step 1 ")
        for pid in started.pids():
            os.kill(pid, signal.SIGTERM)
        run = started.finish(60, SAVED)
    assert "Stopped on SIGTERM" in run.out and step_of(tmp_path / "c.pt") in (2, 3)
