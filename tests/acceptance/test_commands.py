"""The tools, as a user types them: data sets that train, comparisons of real logs, pictures."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from support.datasets import data_args
from support.forks import run_forked
from support.launchers import FAST
from support.processes import LONG, ROOT, Run, run_demo, start

TALK = ROOT / "docs" / "talk"


def tool(name: str, *arguments: object, expect: int | None = 0, timeout: float = 120) -> Run:
    """Runs a tool to its end; `err` holds what it wrote to stderr."""
    command = [sys.executable, ROOT / "tools" / name, *arguments]
    with start(command, split=True) as started:
        return started.finish(timeout, expect)


def the_error(run: Run) -> str:
    """The one line of a tool that refuses its arguments."""
    assert run.out == ""
    (line,) = run.err.splitlines()
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sample set, and what a run of two ranks on it has left: run.pt, run.log."""
    folder = tmp_path_factory.mktemp("commands")
    tool("make_sample_coco.py", folder / "set", "--images", 24, "--val_images", 12)
    words = [*data_args(folder / "set", val=True), *FAST, "--checkpoint", folder / "run.pt"]
    (run,) = run_forked([(2, words)])
    (folder / "run.log").write_text(run.out)
    return folder


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def verdict(run: Run, name: str) -> str:
    """The paragraph on a run that stands below the table."""
    return re.search(rf"^{name}: (.+)", run.out, re.MULTILINE)[1]


# --- Data sets ---------------------------------------------------------------------------------


def test_sample_set_trains(folder):
    log = (folder / "run.log").read_text()
    assert re.search(r"Epoch 2 validation \| Top-1: ", log)
    assert re.search(r"Summary: .*replicas identical: True", log)


def test_prepared_copy_is_smaller_and_trains(folder, tmp_path):
    tool("prepare_coco.py", folder / "set", tmp_path / "copy", "--shorter_side", 64)
    sizes = [
        sum(path.stat().st_size for path in place.rglob("*.jpg"))
        for place in (folder / "set", tmp_path / "copy")
    ]
    assert 0 < sizes[1] < sizes[0]
    arguments = [*data_args(tmp_path / "copy", val=True), *FAST, "--max_steps", 2]
    run = run_demo(arguments, launcher="python")
    assert run.json_line("Summary")["steps"] == 2


# --- What a run has left -----------------------------------------------------------------------


def test_results_of_a_checkpoint_are_drawn(folder, tmp_path):
    notes = folder / "set/annotations/instances_val2017.json"
    data = ["--coco_image_path", folder / "set/val2017", "--annotation_path", notes]
    run = tool("show_results.py", folder / "run.pt", *data, "--output", tmp_path / "drawn.png")
    assert is_png(tmp_path / "drawn.png")
    accuracy = re.compile(r"Top-1: (\d+\.\d\d%)")
    log = (folder / "run.log").read_text()
    assert accuracy.search(run.out)[1] == accuracy.findall(log)[-1]


def test_one_run_gets_a_table_a_verdict_and_files(folder, tmp_path):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "png")}
    options = ["--json", files["json"], "--csv", files["csv"], "--plot", files["png"]]
    run = tool("compare_logs.py", folder / "run.log", *options)
    assert re.search(r"^\| steps +\| +6 \|$", run.out, re.MULTILINE)
    assert re.search(r"(?i)\bbound by\b", verdict(run, "run"))
    assert json.loads(files["json"].read_text())["runs"][0]["name"] == "run"
    with files["csv"].open() as file:
        rows = [(row["rank"], row["step"]) for row in csv.DictReader(file)]
    assert sorted(rows) == [(rank, str(step)) for rank in "01" for step in range(1, 7)]
    assert is_png(files["png"])


@LONG
def test_runs_are_compared_in_one_table_and_refused_if_they_are_not_alike(folder, tmp_path):
    """The second is the first one, as if each rank had taken a tenth longer."""
    log = (folder / "run.log").read_text()
    longer = re.sub(
        r"\((\d+\.\d{3})s\)$", lambda m: f"({1.1 * float(m[1]):.3f}s)", log, flags=re.M
    )
    (tmp_path / "second.log").write_text(longer)
    names = {"first": folder / "run.log", "second": tmp_path / "second.log"}
    run = tool("compare_logs.py", *(f"{name}={path}" for name, path in names.items()))
    assert re.search(r"^\| +\| +first \| +second \|$", run.out, re.MULTILINE)
    assert re.search(r"^second took 1\.10 times as long as first\b", run.out, re.MULTILINE)
    assert all(re.search(r"(?i)\bbound by\b", verdict(run, name)) for name in names)
    other = (tmp_path / "second.log").read_text().replace('"image_size": 40', '"image_size": 48')
    (tmp_path / "other.log").write_text(other)
    run = tool("compare_logs.py", folder / "run.log", tmp_path / "other.log", expect=2)
    assert "image size differs: 40 in run, 48 in other" in the_error(run)


def test_log_of_an_interrupted_run_is_called_incomplete_with_exit_code_1(folder, tmp_path):
    """What a killed run leaves: the lines up to some step."""
    before, _, _ = (folder / "run.log").read_text().partition("[CPU 0] Epoch 2 | Step 5 ")
    (tmp_path / "killed.log").write_text(before)
    run = tool("compare_logs.py", tmp_path / "killed.log", expect=1)
    assert "incomplete" in verdict(run, "killed").lower()


def test_file_that_is_no_log_is_no_result(tmp_path):
    missing = tmp_path / "missing.log"
    assert str(missing) in the_error(tool("compare_logs.py", missing, expect=2))
    (tmp_path / "garbage.log").write_bytes(bytes(range(256)))
    run = tool("compare_logs.py", tmp_path / "garbage.log", expect=None)
    assert run.returncode != 0 and "Traceback" not in run.output
    assert re.search(r"garbage\b.*\bno line\b", run.output)


# --- Networks ----------------------------------------------------------------------------------


def test_talks_two_logs_differ_12_8_times_and_the_link_bounds_ethernet():
    lacking = "--images 118287 --epochs 2 --global_batch 128 --parameters 11217552"
    lacking += " --processes 4 --nodes 2 --link_gbps ethernet=1 --link_gbps infiniband=56"
    logs = [f"{name}={TALK / name}.log" for name in ("ethernet", "infiniband")]
    run = tool("compare_logs.py", *logs, *shlex.split(lacking))
    assert re.search(r"\b12\.82?\b.* (faster|as long as)\b", run.out)
    assert re.search(r"(?i)^bound by its link\b", verdict(run, "ethernet"))
    assert re.search(r"(?i)\bnot bound by its link\b", verdict(run, "infiniband"))
