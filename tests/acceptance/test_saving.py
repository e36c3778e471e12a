"""What a run saves: nothing that a user has trained is lost without a word."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from support.datasets import make_set
from support.forks import QUICK, changed, run_forked
from support.launchers import FAST, SAVED
from support.processes import LONG, SCRIPT, start

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
# Tells the order of what is read and computed.
IN_ORDER = """
read, forward = demo.CocoFirstCategory.__getitem__, demo.forward
def say(text, function):
    def called(*args):
        print(text, flush=True)
        return function(*args)
    return called
demo.CocoFirstCategory.__getitem__ = say("READ", read)
demo.forward = say("FORWARD", forward)
"""


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["step"]


@pytest.fixture
def words(tmp_path) -> list[str]:
    """Options of a run on 16 images; four steps are an epoch."""
    return [*make_set(tmp_path, 16), *FAST]


@pytest.mark.guards("earlier-kept", "earlier-weights", "epoch-from-step")
def test_a_run_without_resume_keeps_the_file_of_an_earlier_one(words, tmp_path):
    """Also where it takes its first weights from that file. A run that resumes goes on in it."""
    path = tmp_path / "c.pt"
    words += ["--checkpoint", path, "--max_steps"]
    runs = [(0, [*words, 2]), (0, [*words, 1, "--weights", path]), (0, [*words, 6, "--resume"])]
    first, again, resumed = run_forked(runs, program=QUICK)
    renamed = re.findall(r"c\.pt is of an earlier run: renamed to (\S+)", again.out)
    assert [step_of(Path(earlier)) for earlier in renamed] == [2]
    assert "renamed" not in first.out + resumed.out
    assert step_of(path) == 6
    assert re.search(r"Epoch 1 complete from step 2 \| Avg loss", resumed.out)
    assert re.search(r"Epoch 2 ends at step 2 of 4 \| Avg loss", resumed.out)


@pytest.mark.guards("earlier-at-once")
def test_a_restart_of_a_run_that_failed_early_does_not_go_on_with_an_older_one(words, tmp_path):
    """torchrun --max-restarts repeats the command, and the script then resumes."""
    words += ["--checkpoint", tmp_path / "c.pt", "--max_steps", 2]
    run_forked([(1, words)], program=QUICK)
    run_forked([(1, [*words, "--annotation_path", "gone.json"])], program=QUICK, expect=2)
    assert len([*tmp_path.glob("c.pt.*")]) == 1 and not (tmp_path / "c.pt").exists()
    (run,) = run_forked([(1, words, {"TORCHELASTIC_RESTART_COUNT": "1"})], program=QUICK)
    assert run.json_line("Run")["start_step"] == 0


@pytest.mark.guards("failed-save")
@pytest.mark.parametrize(("last_blocked", "code"), [(4, 0), (99, 2)])
def test_a_save_that_fails_is_a_warning_and_the_last_one_an_error(
    words, tmp_path, last_blocked, code
):
    program = changed(tmp_path / "program.py", NO_ROOM.replace("LAST_BLOCKED", str(last_blocked)))
    words += ["--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1, "--max_steps", 6]
    (run,) = run_forked([(0, words)], program=program, expect=code)
    warnings = re.findall(r"WARNING: checkpoint \S+ not saved at step (\d+)(.*)", run.out)
    saved_late = [2, 3, 4, 4]  # 4: the end of the epoch, too
    assert [int(step) for step, _ in warnings] == saved_late + ([] if code == 0 else [5, 6])
    assert all("an older one is kept" in rest for _, rest in warnings)
    assert step_of(tmp_path / "c.pt") == (1 if code else 6)
    if code:
        assert re.search(r"ERROR: checkpoint \S+ not saved at step 6", run.output)


@pytest.mark.guards("one-micro-batch")
def test_micro_batches_are_read_one_at_a_time(words, tmp_path):
    """Without workers: each is read when the one before it has been computed."""
    program = changed(tmp_path / "program.py", IN_ORDER)
    micro = ["--accumulate_steps", 3, "--batch_size", 2, "--max_steps", 1]
    (run,) = run_forked([(0, [*words, *micro])], program=program)
    order = re.findall(r"^(READ|FORWARD)$", run.out, re.MULTILINE)
    blank, *order = order  # of rebuild_buckets
    assert (blank, order) == ("FORWARD", ["READ", "READ", "FORWARD"] * 3)


def test_powersgds_time_is_not_called_communication_alone(words):
    options = ["--max_steps", 1, "--grad_compression", "powersgd"]
    (run,) = run_forked([(2, [*words, *options])], program=QUICK)
    assert re.search(r"Summary: .*\d+ compression and communication;", run.out)


def test_checkpoint_every_without_a_checkpoint_is_refused(words):
    (run,) = run_forked([(0, [*words, "--checkpoint_every", 5])], program=QUICK, expect=2)
    assert "--checkpoint_every needs --checkpoint FILE" in run.output


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


@LONG
@pytest.mark.skipif(sys.platform != "linux", reason="macOS starts workers in another way")
@pytest.mark.guards("fork-context")
def test_a_stop_signal_to_all_processes_saves_where_workers_start_by_forkserver(words, tmp_path):
    """As SLURM sends it. Here while a step of three slow micro-batches goes on."""
    program = tmp_path / "program.py"
    program.write_text(FORKSERVER)
    words += ["--accumulate_steps", "3", "--batch_size", "2", "--workers", "2"]
    command = [sys.executable, program, *words, "--checkpoint", tmp_path / "c.pt"]
    with start(command) as started:
        started.wait_for(r"\| Step 1 ")
        for pid in started.pids():
            os.kill(pid, signal.SIGTERM)
        run = started.finish(60, SAVED)
    assert "Stopped on SIGTERM" in run.out and step_of(tmp_path / "c.pt") == 2
