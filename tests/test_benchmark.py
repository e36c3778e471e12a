"""tools/benchmark.py: its commands on tiny runs, which say nothing about speed.

What can be told of a busy machine: that figures agree with each other, and which of two is larger.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import benchmark as tool
from support.launchers import copy_project
from support.processes import LONG, ROOT, SCRIPT

TINY = ["--steps", "2", "--batch_size", "4", "--image_size", "40"]
ONCE = [*TINY, "--rounds", "1", "--precision", "fp32"]
SLEEP = 1  # seconds: longer than a step, also on a busy machine

# Takes SLEEP for each batch of two images after a start of 3 s, and prints nothing.
PEER = f"""
import sys, time
from pathlib import Path
options, data = sys.argv[1:-1], Path(sys.argv[-1])
assert options == "-a resnet18 --epochs 1 -b 2 -j 1".split(), options
assert len([path.read_bytes() for path in data.glob("val/*/*.jpg")]) == 1
images = [path.read_bytes() for path in data.glob("train/*/*.jpg")]
time.sleep(3 + {SLEEP} * len(images) / 2)
"""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, sample: Path):
    """What a command prints; its runs are real."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def measure(command: str, *words: object) -> str:
        tool.main([command, "--data", str(sample), *map(str, words)])
        return capsys.readouterr().out

    return measure


def rates(out: str) -> dict[str, float]:
    """{case: img/s} of the medians."""
    found = re.findall(r"^(.+): ([\d.]+) img/s", out, re.MULTILINE)
    return {name: float(rate) for name, rate in found}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("gpu", "PyTorch finds no NVIDIA GPU here: run gpu where nvidia-smi lists one"),
        ("peer --peer none.py", f"--peer {Path.cwd() / 'none.py'} is no file"),
        ("step --against none", "--against none: no file and no commit that has one"),
        (
            "step --data none",
            f"annotation file {Path.cwd()}/none/annotations/instances_train2017.json",
        ),
        pytest.param(
            "step --image_size 9",
            r"exit code 2: .*--image_size: 9 is not at least 33",
            marks=LONG,
        ),
    ],
)
def test_what_cannot_run_ends_in_one_line(benchmark, words, line):
    command, *others = words.split()
    with pytest.raises(SystemExit) as ended:
        benchmark(command, "--steps", 1, *others)
    (said,) = ended.value.code.splitlines()
    assert re.match(f"benchmark.py: error: {line}", said)


def of_the_launchers(**given: str) -> dict[str, str]:
    """The variables that a launcher adds to an environment."""
    env = {"PATH": os.environ["PATH"], **given}
    command = ["bash", "-c", "source tools/environment.sh; env"]
    out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in out.stdout.splitlines())
    return {name: found[name] for name in found if re.match("MALLOC_|GOMP_", name)}


def test_runs_get_the_variables_of_the_launchers_which_the_page_names():
    assert of_the_launchers() == tool.FASTER
    words = " ".join(f"{name}={value}" for name, value in tool.FASTER.items())
    assert f"export {words}\n" in (ROOT / "docs" / "speed.md").read_text()
    given = {"MALLOC_MMAP_MAX_": "9", "MALLOC_TRIM_THRESHOLD_": "8"}
    assert of_the_launchers(**given, GOMP_SPINCOUNT="7") == given | {"GOMP_SPINCOUNT": "7"}
    assert of_the_launchers(**given, OMP_WAIT_POLICY="active") == given


def sleeping() -> str:
    """The script, in which each step takes SLEEP longer."""
    before = "    timer.end_step(image_count)\n"
    assert SCRIPT.read_text().count(before) == 1
    return SCRIPT.read_text().replace(before, f"    time.sleep({SLEEP})\n{before}")


@LONG
def test_another_copy_that_sleeps_comes_out_slower(benchmark, tmp_path):
    """The ratio is this script's rate to the other one's."""
    slow = tmp_path / "slow copy.py"
    slow.write_text(sleeping())
    out = benchmark("step", *ONCE, "--against", slow)
    this, other = rates(out)["this script"], rates(out)[str(slow)]
    line = re.search(r"^img/s, .*: ([\d.]+) \(([\d.]+) to ([\d.]+) in 1 round", out, re.MULTILINE)
    ratio, low, high = map(float, line.groups())
    assert 4 / other > SLEEP and ratio > 1
    assert ratio == pytest.approx(this / other, rel=0.2)
    assert low == high == pytest.approx(ratio, abs=0.01)


@LONG
def test_a_commit_is_taken_from_this_repository(benchmark):
    out = benchmark("input", *ONCE, "--against", "HEAD")
    assert list(rates(out)) == ["this script", "HEAD"]
    assert min(rates(out).values()) > 0


@LONG
def test_ceiling_tells_a_step_without_the_loader(benchmark):
    out = benchmark("ceiling", *ONCE)
    fed, resident = (1e3 * 4 / rates(out)[name] for name in ("fed", "resident"))
    cost, step = re.search(r"cost (-?[\d.]+) ms of a step of ([\d.]+) ms", out).groups()
    assert float(step) == pytest.approx(fed, rel=0.1)
    assert float(cost) == pytest.approx(fed - resident, abs=0.1 * (fed + resident))


@LONG
def test_peer_is_measured_by_the_clock_alone(benchmark, tmp_path, monkeypatch):
    """With steps that sleep: they take longer than starts differ, also on a busy machine."""
    (tmp_path / "main.py").write_text(PEER)
    project = copy_project(tmp_path)
    (project / SCRIPT.name).write_text(sleeping())
    monkeypatch.setattr(tool, "ROOT", project)
    monkeypatch.setattr(tool, "SCRIPT", project / SCRIPT.name)
    words = ["--steps", 20, "--batch_size", 2, "--rounds", 1, "--precision", "fp32"]
    out = benchmark("peer", "--peer", tmp_path / "main.py", *words)
    found = rates(out)
    assert list(found) == ["launch_single.sh", "bare torchrun", "peer"]
    assert found["peer"] == pytest.approx(2 / SLEEP, rel=0.3)
    assert "The demo's precision: fp32. Loader workers: 1" in out


@LONG
def test_gpu_prints_a_row_for_each_case_and_projects_the_talks_job(benchmark, monkeypatch):
    """Here on a CPU, in place of a GPU."""
    monkeypatch.setattr(tool, "gpu_count", lambda: 1)
    out = benchmark("gpu", *TINY)
    row = r"^1 GPU\(s\), (\w+), (\w+) +([\d.]+) +([\d.]+) +([\d.]+)"
    rows = {(p, kind): times for p, kind, *times in re.findall(row, out, re.MULTILINE)}
    assert [*rows] == [(p, kind) for p in ("bf16", "fp32") for kind in ("fed", "resident")]
    for rate, step_ms, _ in rows.values():
        assert float(rate) == pytest.approx(1e3 * 4 / float(step_ms), rel=0.2)
    for precision in ("bf16", "fp32"):
        assert float(rows[precision, "resident"][2]) < float(rows[precision, "fed"][2])
    steps = 2 * -(-118_287 // 16)
    fed = re.search(r"bf16 rows it takes (\d+) s fed", out)
    assert float(fed[1]) == pytest.approx(steps * float(rows["bf16", "fed"][1]) / 1e3, rel=0.01)
