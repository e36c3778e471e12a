"""--profile: a trace of each rank, what took the most time, and no profiled step in a figure."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from support.datasets import make_set
from support.forks import QUICK, run_forked
from support.launchers import FAST
from support.processes import FACTOR, SCRIPT, Run, run_demo, start

pytestmark = pytest.mark.slow
RECORDED, LEFT_OUT = (8, 9, 10), (6, 7, 8, 9, 10)  # steps
SLOW = 6 * FACTOR  # seconds that rank 1 writes its trace
# The script, of which rank 1 writes its trace slowly.
SLOWLY = f"""
import os, time
import demo_coco_resnet18 as demo

def export(profiler, path):
    time.sleep({SLOW} * int(os.environ["RANK"]))
    plain(profiler, path)

profile = demo.torch.profiler.profile
plain, profile.export_chrome_trace = profile.export_chrome_trace, export
main, run_and_exit = demo.main, demo.run_and_exit
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def words(folder) -> list[str]:
    """Options for 88 images, of which two ranks make 11 steps an epoch."""
    return [*make_set(folder, 88, val=4), *FAST]


@pytest.fixture(scope="module")
def profiled(folder, words) -> Run:
    """Two ranks of 14 steps."""
    (folder / "slowly.py").write_text(SLOWLY)
    words = [*words, "--max_steps", 14, "--profile", folder / "mein Gerät"]
    (run,) = run_forked([(2, words)], program=folder / "slowly.py")
    return run


def spans(rank: int, folder: Path, name: str) -> list[tuple[float, float]]:
    """Begin and end of a rank's events whose name matches, in microseconds."""
    with gzip.open(folder / "mein Gerät" / f"rank{rank}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if re.match(name, event["name"]) and event["ph"] == "X"]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def within(span: tuple[float, float], others: list[tuple[float, float]]) -> list:
    """Those of the others that begin in the span."""
    return [other for other in others if span[0] <= other[0] < span[1]]


@pytest.mark.usefixtures("profiled")
@pytest.mark.parametrize("rank", [0, 1])
def test_the_trace_of_each_rank_has_the_parts_of_each_step(folder, rank):
    """In some step an all-reduce overlaps with the backward pass. ResNet-18 has 20 convolutions;
    its gradients are at least two buckets, and the ranks agree by one more all-reduce. Batch
    norm's statistics do not travel.
    """
    steps = spans(rank, folder, "ProfilerStep#")
    forward = spans(rank, folder, r"DistributedDataParallel\.forward$")
    backward = spans(rank, folder, r"autograd::engine::evaluate_function: ConvolutionBackward0$")
    all_reduces = spans(rank, folder, "gloo:all_reduce$")
    broadcasts = spans(rank, folder, "gloo:broadcast")
    assert len(steps) == len(forward) == len(RECORDED)
    overlaps = 0
    for step in steps:
        assert len(within(step, forward)) == 1
        assert len(within(step, backward)) == 20
        assert len(within(step, all_reduces)) >= 3
        assert not within(step, broadcasts)
        for begin, end in within(step, all_reduces):
            overlaps += any(begin < own_end and own_begin < end for own_begin, own_end in backward)
    assert overlaps


def test_profiled_steps_are_in_no_figure(profiled):
    for rank in (0, 1):
        lines = re.findall(rf"^\[CPU {rank}\] .*\| Step (\d+) \| .*$", profiled.out, re.MULTILINE)
        assert [int(step) for step in lines] == list(range(1, 15))
        without = rf"^\[CPU {rank}\] .*\| Step (\d+) \| Loss: [\d.]+ \| profiled$"
        assert [int(n) for n in re.findall(without, profiled.out, re.M)] == [*LEFT_OUT]
    times = [float(ms) for ms in re.findall(r"\| step ([\d.]+) ms", profiled.out)]
    assert len(times) == 2 * (14 - len(LEFT_OUT))
    # A step with the wait takes longer than the others by all of it.
    assert max(times) - min(times) < 1e3 * SLOW * 0.75
    summary = profiled.json_line("Summary")
    assert summary["steps"] == 14 and summary["replicas_identical"] is True
    assert summary["measured_steps"] == 14 - len(LEFT_OUT) - 3
    rank_0 = summary["ranks"][0]["step_ms"]
    assert summary["img_per_s"] == pytest.approx(8 / rank_0 * 1e3)
    own = [float(ms) for ms in re.findall(r"^\[CPU 0\].*\| step (\S+) ms", profiled.out, re.M)]
    assert summary["train_s"] == pytest.approx(sum(own) / 1e3, abs=0.01)
    assert rank_0 == pytest.approx(sum(own[3:]) / 6, abs=0.1)


@pytest.mark.parametrize(
    ("taken", "line"),
    [
        ("p", r"--profile \S+/p cannot be written: .*exists"),
        ("p/rank1.json.gz", r"--profile \S+/rank1\.json\.gz cannot be written: Is a directory"),
    ],
)
def test_a_trace_that_one_rank_cannot_write_ends_all_in_one_line(words, tmp_path, taken, line):
    """A folder that cannot be made does so before the training."""
    (tmp_path / "p/rank1.json.gz").mkdir(parents=True)
    if taken == "p":
        shutil.rmtree(tmp_path / "p")
        (tmp_path / "p").touch()
    (run,) = run_forked([(2, [*words, "--profile", tmp_path / "p"])], QUICK, expect=2)
    (error,) = [line for line in run.lines() if "ERROR" in line]
    assert re.search(line, error)
    assert bool(run.steps()) == (taken != "p")


@pytest.mark.parametrize("steps", [7, 9])
def test_a_run_that_is_too_short_for_a_trace_says_so_and_ends_with_0(words, tmp_path, steps):
    """By plain python: a profiler that is left at work crashes Python's own end."""
    words = [*words, "--max_steps", steps, "--profile", tmp_path / "none"]
    run = run_demo(words, launcher="python")
    assert run.steps()[-1][1] == steps
    assert f"WARNING: no --profile: it needs 10 steps, and {steps} are left" in run.out
    assert not (tmp_path / "none").exists()


# The process stops itself at this step, after which the ranks agree in each.
STOPS_AT = f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import demo_coco_resnet18 as demo

def note_line(training, *rest):
    plain(training, *rest)
    training.agree_at_step = 0
    if training.step == int(os.environ["STOP_AT"]):
        os.kill(os.getpid(), signal.SIGTERM)

plain, demo.note_line = demo.note_line, note_line
if __name__ == "__main__":
    demo.run_and_exit(demo.main)
"""


@pytest.mark.parametrize("step", ["6", "9"])
def test_a_stop_while_steps_are_profiled_ends_with_75(words, tmp_path, step):
    program = tmp_path / "program.py"
    program.write_text(STOPS_AT)
    words = [*words, "--checkpoint", tmp_path / "c.pt", "--profile", tmp_path / "p"]
    with start([sys.executable, program, *words], env={"STOP_AT": step}) as started:
        run = started.finish(60, expect=75)
    assert f"Stopped on SIGTERM | step {step} | saved" in run.out
