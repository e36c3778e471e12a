"""tools/benchmark.py: its commands on tiny runs, which say nothing about speed.

What can be told of a busy machine: that figures agree with each other, and which of two is larger.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import benchmark as tool
from support.processes import LONG, ROOT, SCRIPT, refusal, start

TOOL = ROOT / "tools" / "benchmark.py"
TINY = ["--steps", "2", "--batch_size", "4", "--image_size", "40"]
ONCE = [*TINY, "--rounds", "1", "--precision", "fp32"]
SLEEP = 3  # seconds: much longer than a step, also on a busy machine

# Trains a few batches of the images, prints nothing. It takes the options of imagenet/main.py.
PEER = """
import argparse, time
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
parser = argparse.ArgumentParser()
for name in ("-a", "--epochs", "-b", "-j", "data"):
    parser.add_argument(name)
args = parser.parse_args()
crop = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
assert len(datasets.ImageFolder(args.data + "/val", crop)) == 1
for images, labels in DataLoader(datasets.ImageFolder(args.data + "/train", crop), int(args.b)):
    time.sleep(SECONDS)
"""


def benchmark(*words: object, expect: int = 0, **options) -> str:
    """What a command prints."""
    with start(["python", TOOL, *words], **options) as started:
        return started.finish(timeout=400, expect=expect).out


def rates(out: str) -> dict[str, float]:
    """{case: img/s} of the medians."""
    found = re.findall(r"^(?!round)(.+): ([\d.]+) img/s", out, re.MULTILINE)
    return {name: float(rate) for name, rate in found}


def ratio(out: str) -> float:
    (found,) = re.findall(r"^img/s, .*: ([\d.]+) \(", out, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("spin", "argument COMMAND: invalid choice: 'spin'"),
        ("step --steps 0", "argument --steps: 0 is not at least 1"),
        ("step --batch_size many", "argument --batch_size: invalid positive value: 'many'"),
        ("ceiling --against x.py", "unrecognized arguments: --against x.py"),
        ("peer", "the following arguments are required: --peer"),
        ("peer --peer x.py --image_size 64", "the peer crops to 224 pixels"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(capsys, words, line):
    said = refusal(capsys, tool.parse_arguments, words)
    assert said.startswith(f"benchmark.py: error: {line}") and said.endswith("; see --help")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("gpu", "PyTorch finds no NVIDIA GPU here: run gpu where nvidia-smi lists one"),
        ("peer --peer none.py", f"--peer {Path.cwd() / 'none.py'} is no file"),
        ("step --data {set} --against none", "--against none: no file and no commit that has one"),
        ("step --data none", f"cannot use {Path.cwd()}/none/annotations/instances_train2017.json"),
        ("step --data {set} --image_size 9", r"exit code 2: .*--image_size: 9 is not at least 33"),
        ("step --data {set} --limit 1", "not done after 1 s, see --limit: .*python"),
        ("input --data {set} --against {other}", "exit code 1: .* has other names than this"),
    ],
)
def test_what_cannot_run_ends_in_one_line(monkeypatch, capsys, sample, tmp_path, words, line):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "other.py").write_text("print('another program')")
    words = words.format(set=sample, other=tmp_path / "other.py")
    steps = [] if "--image_size" in words else ["--image_size", "224"]
    with pytest.raises(SystemExit, match="2"):
        tool.main([*words.split(), *steps, "--steps", "1", "--batch_size", "2"])
    errors = capsys.readouterr().err.splitlines()
    said = [one for one in errors if not one.startswith("round ")]
    assert len(said) == 1 and re.match(f"benchmark.py: error: {line}", said[0]), errors


def test_another_copy_that_sleeps_comes_out_slower(sample, tmp_path):
    """The ratio is this script's rate to the other one's."""
    slow = tmp_path / "slow copy.py"
    before = "        timer.end_step(images_in_step)\n"
    assert SCRIPT.read_text().count(before) == 1
    sleeping = f"        __import__('time').sleep({SLEEP})\n{before}"
    slow.write_text(SCRIPT.read_text().replace(before, sleeping))
    out = benchmark("step", "--data", sample, *ONCE, "--against", slow)
    this, other = rates(out)["this script"], rates(out)[str(slow)]
    assert 4 / other > SLEEP and ratio(out) > 1
    assert ratio(out) == pytest.approx(this / other, rel=0.2)
    low, high = map(float, re.search(r"\(([\d.]+) to ([\d.]+) in 1 round", out).groups())
    assert low == high == pytest.approx(ratio(out), abs=0.01)


def test_a_commit_is_taken_from_this_repository(sample):
    out = benchmark("input", "--data", sample, *ONCE, "--against", "HEAD")
    assert list(rates(out)) == ["this script", "HEAD"]
    assert min(rates(out).values()) > 0 and ratio(out) > 0


def test_ceiling_tells_a_step_without_the_loader(sample):
    out = benchmark("ceiling", "--data", sample, *ONCE)
    fed, resident = (1e3 * 4 / rates(out)[name] for name in ("fed", "resident"))
    cost, step = re.search(r"cost (-?[\d.]+) ms of a step of ([\d.]+) ms", out).groups()
    assert float(step) == pytest.approx(fed, rel=0.1)
    assert float(cost) == pytest.approx(fed - resident, abs=0.1 * (fed + resident))


@LONG
def test_peer_is_measured_by_the_clock_alone(sample, tmp_path):
    """This one waits for 5 seconds in each batch."""
    (tmp_path / "main.py").write_text(PEER.replace("SECONDS", "5"))
    words = ["--steps", "3", "--batch_size", "2", "--rounds", "1", "--precision", "fp32"]
    out = benchmark("peer", "--data", sample, "--peer", tmp_path / "main.py", *words)
    assert list(rates(out)) == ["launch_single.sh", "bare torchrun", "peer"]
    assert rates(out)["peer"] == pytest.approx(2 / 5, rel=0.3)
    assert "The demo's precision: fp32. Loader workers: 1" in out


@LONG
def test_gpu_prints_a_row_for_each_case_and_projects_the_talks_job(sample, monkeypatch, capsys):
    """Here on CPUs: two processes in place of two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tool, "gpu_count", lambda: 2)
    tool.main(["gpu", "--data", str(sample), *TINY])
    out = capsys.readouterr().out
    row = r"^(\d) GPU\(s\), (\w+), (\w+) +([\d.]+) +([\d.]+) +([\d.]+)"
    rows = re.findall(row, out, re.MULTILINE)
    kinds = [(p, kind) for p in ("bf16", "fp32") for kind in ("fed", "resident")]
    assert [row[:3] for row in rows] == [(n, *kind) for n in "12" for kind in kinds]
    for processes, _, _, rate, step_ms, _ in rows:
        assert float(rate) == pytest.approx(1e3 * int(processes) * 4 / float(step_ms), rel=0.2)
    waits = {kind: sum(float(row[5]) for row in rows if row[2] == kind) for _, kind in kinds}
    assert waits["resident"] < waits["fed"] / 2
    steps = 2 * -(-118_287 // 16)
    fed = re.search(r"bf16 rows it takes (\d+) s fed", out)
    assert float(fed[1]) == pytest.approx(steps * float(rows[4][4]) / 1e3, rel=0.01)
