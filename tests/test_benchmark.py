"""tools/benchmark.py: every subcommand for real, at sizes that say nothing about speed."""

import ast
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import ClassVar

import cluster as helpers
import pytest

TOOL = helpers.ROOT / "tools" / "benchmark.py"
spec = importlib.util.spec_from_file_location("benchmark", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

TINY = [
    "--repeats",
    "1",
    "--steps",
    "2",
    "--warm_steps",
    "1",
    "--batch_size",
    "2",
    "--image_size",
    "64",
]


@pytest.fixture
def scratch():
    """A short TMPDIR: sockets of loader workers lie in it, and their paths are limited to 107."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        yield {"TMPDIR": folder}


def run_tool(args, scratch, expect=0, split=True):
    """A finished run of the tool, which has left nothing in its folder for temporary files."""
    with helpers.start([sys.executable, TOOL, *args], split=split, env=scratch) as started:
        run = started.finish(timeout=180, expect=expect)
    assert not list(Path(scratch["TMPDIR"]).glob("demo-benchmark-*"))
    return run


def check_result(result, printed):
    """The JSON's own arithmetic, and the printed table against it, row by row."""
    first, head, *lines = printed.splitlines()
    how = "runs of 1 seeds" if result["settings"].get("loss") else "median of 1, a trial"
    assert first == f"{result['command']}, {how}: {result['machine']}"
    assert "cores, torch " in result["machine"]
    assert head.split() == ["what", "demo", "reference", "ratio"]
    assert len(lines) == len(result["rows"]) > 0
    for line, row in zip(lines, result["rows"], strict=True):
        what, *figures = line.rsplit(maxsplit=3)
        assert what == f"{row['what']} ({row['unit']})"
        assert row["demo"] >= 0 if row["unit"] == "%" else row["demo"] > 0
        assert figures[0] == f"{row['demo']:.4g}"
        if row["reference"] is None:
            assert row["ratio"] is None and figures[1:] == ["-", "-"]
        else:
            assert row["reference"] > 0
            assert row["ratio"] == pytest.approx(row["demo"] / row["reference"])
            assert figures[1:] == [f"{row['reference']:.4g}", f"{row['ratio']:.3f}"]


def table_of(args, scratch):
    """{what: row} of a run with --json FILE, checked."""
    file = Path(scratch["TMPDIR"], "table.json")
    run = run_tool([*args, "--json", file], scratch)
    result = json.loads(file.read_text())
    check_result(result, run.out)
    assert result["settings"]["repeats"] == 1
    return {row["what"]: row for row in result["rows"]}


@helpers.LONG
def test_step_compares_files_resident_batch_and_recipe(sample, scratch):
    args = ["step", *TINY, "--against", helpers.SCRIPT, *helpers.data_args(sample)]
    rows = table_of(args, scratch)
    assert len(rows) == 9
    files = rows["as shipped, JPEG files / resident batch"]["demo"]
    assert rows["as shipped / recipe, same workers"]["demo"] == files
    same, default = (
        rows[f"as shipped / recipe, {loader}"]["reference"]
        for loader in ("same workers", "default loader (no workers)")
    )
    assert same != default
    assert rows["as shipped / the other"]["demo"] == files != rows["fp32 / the other"]["demo"]
    for what in ("as shipped: peak / the other's", "fp32: peak / the other's"):
        assert 300 < rows[what]["demo"] < 5000 and rows[what]["ratio"] == pytest.approx(1, abs=0.1)


@helpers.LONG
def test_input_compares_one_core_with_bare_decoding(sample, scratch):
    args = ["input", *TINY, "--steps", "4", "--worker_counts", "2", *helpers.data_args(sample)]
    rows = table_of([*args, "--against", helpers.SCRIPT], scratch)
    assert len(rows) == 7
    assert rows["loader, 1 worker on 1 core / the other's"]["reference"] > 0
    loader = rows["loader, 1 worker on 1 core / bare decode on 1 core"]
    assert 0 < loader["ratio"] < 1.2  # the decoder alone cannot be slower
    assert 0 <= rows["step waits for data, workers 2"]["demo"] <= 100


@helpers.LONG
def test_start_parts_the_time_to_the_first_step(tmp_path, scratch):
    args = ["start", *TINY, "--images", "100", "--data_folder", tmp_path / "data"]
    rows = table_of(args, scratch)
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [
        "sample-100-annotations_only",
        "sample-48",
    ]
    for side in ("demo", "reference"):
        parts = [rows.get(f"rank 0: {phase} / recipe") for phase in tool.PHASES]
        wholes = [rows[f"rank {rank}: launch to first step / recipe"][side] for rank in (0, 1)]
        assert sum(part[side] or 0 for part in parts if part) == pytest.approx(wholes[0])
        assert wholes[1] == pytest.approx(wholes[0], rel=0.5)
        for rank in (0, 1):
            assert rows[f"rank {rank}: launch to first step, peak / recipe"][side] > 100
    own = rows["loader worker: USS, last / first step of an epoch"]
    assert own["demo"] < rows["loader worker: PSS, last / first step of an epoch"]["demo"]


@helpers.LONG
def test_scale_grows_processes_and_data(scratch):
    args = ["scale", *TINY, "--images", "60", "--processes", "1,2", "--sizes", "1,3"]
    run = run_tool([*args, "--json", "-"], scratch)
    result = json.loads(run.out)  # nothing else is on stdout
    assert len(result["rows"]) == 8
    table = run.err[run.err.index("scale, median") :]
    check_result(result, table)
    assert {row["what"].split(":")[0] for row in result["rows"]} == {
        "2 processes / 1 process",
        "data 3x / 1x",
    }


@helpers.LONG
def test_links_shapes_a_real_link(sample, scratch):
    reason = helpers.why_no_namespaces()
    helpers.require(not reason, reason)
    args = [
        "links",
        *TINY,
        "--warm_steps",
        "4",
        "--rates",
        "unshaped,200mbit",
        "--methods",
        "none,bf16",
        *helpers.data_args(sample),
    ]
    rows = table_of(args, scratch)
    shaped = rows["200mbit, none: step / none, unshaped"]
    # 44.9 MB of gradients need 1.8 s at that rate; some of it passes during the backward pass
    assert shaped["demo"] > 1200 and shaped["ratio"] > 1.5
    assert rows["200mbit, bf16: step / none, 200mbit"]["ratio"] < 0.8
    assert rows["200mbit, bf16: bytes of a step / none"]["ratio"] == pytest.approx(0.5)


@helpers.LONG
def test_links_compares_losses(sample, scratch):
    args = ["links", "--loss", *TINY, "--loss_steps", "8", "--seeds", "1", "--methods"]
    rows = table_of([*args, "none,powersgd,accumulate", *helpers.data_args(sample)], scratch)
    assert list(rows) == [
        f"{what} loss, {method} / none"
        for method in ("powersgd", "accumulate")
        for what in ("seed 0:", "mean")
    ]
    assert all(row["ratio"] == pytest.approx(1, abs=0.7) for row in rows.values())


def test_overhead_takes_turns_within_a_run(sample, scratch):
    args = ["overhead", *TINY, "--steps", "12", *helpers.data_args(sample)]
    (row,) = table_of(args, scratch).values()
    assert 0.3 < row["ratio"] < 3


def test_overhead_is_that_of_every_second_step(capfd, monkeypatch):
    clock = [0.0]  # a busy machine sleeps longer than it is told
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))

    class StepTimer:
        marks: ClassVar = []

        def mark(self, *_):
            time.sleep(0.02)
            self.marks.append(time.perf_counter())

        def end_step(self, images):
            self.mark()
            ends.append(self.marks[-1])

    process, ends = types.SimpleNamespace(rank=0), []
    run = types.SimpleNamespace(step=0, process=process, timer=StepTimer())
    run.args = types.SimpleNamespace(max_steps=20)
    demo = types.SimpleNamespace(
        StepTimer=StepTimer,
        train_step=lambda run, _: (time.sleep(0.01), run.timer.mark()),
        log=lambda *_: time.sleep(0.04),
    )
    tool.alternate(demo)
    for run.step in range(20):
        demo.train_step(run, [])
        demo.log(process, "a line")
        run.timer.end_step(4)
    found = json.loads(capfd.readouterr().out.removeprefix("OVERHEAD "))
    assert found["with"] == pytest.approx(90, abs=0.1)  # 10 + 20 + 40 + 20 at the end
    assert found["without"] == pytest.approx(30, abs=0.1)  # 10 + 20 at the end, which all have
    assert len(set(ends)) == 20


@pytest.mark.parametrize("before", [True, False])
def test_versions_of_the_script_are_told_apart(tmp_path, before):
    """One with the probe in the script, as b40073c, has other names than the present one."""
    step = "optimizer_step" if before else "train_step"
    lines = ["from dataclasses import dataclass", "import sys"]
    lines += ["@dataclass", "class Run:", "    step: int", f"def {step}(): ...", "RAN = []"]
    if before:
        lines += ["def main(): RAN.append(sys.argv)"]
    else:
        lines += ["def main(process): RAN.append(sys.argv)", "def one_line_errors(f): f(0)"]
    file = tmp_path / "script.py"
    file.write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCHMARK_SCRIPT", str(file))
        patch.setattr(sys, "argv", ["benchmark.py", "--resume"])
        patch.setitem(sys.modules, "demo", None)
        demo = tool.load_script()
        names = tool.names_of(demo)
        names[2]()
    assert names[:2] == (step, "probe" if before else "fix_bucket_order")
    assert [[str(file), "--resume"]] == demo.RAN


def test_present_script_has_the_names_that_are_changed():
    """Else a case would measure something else, without a word."""
    tree = ast.parse(helpers.SCRIPT.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    wanted = {"set_up", "check_images", "build_model", "fix_bucket_order", "train_step"}
    wanted |= {"summarize", "make_loaders", "one_line_errors", "log", "mark", "end_step"}
    assert wanted <= names and not names & {"optimizer_step", "probe"}


@pytest.mark.parametrize(("args", "part"), [
    ([], "COMMAND"),
    (["step", "--repeats", "0"], "--repeats"),
    (["step", "--repeats", "many"], "not a whole number"),
    (["step", "--coco_image_path", "."], "go together"),
    (["step", "--script", "nowhere.py"], "nowhere.py is not there"),
    (["input", "--against", "nowhere.py"], "nowhere.py is not there"),
    (["overhead", "--script", str(TOOL)], "unrecognized arguments"),
    (["step", "--peer", "nowhere.py"], "nowhere.py is not there"),
    (["step", "--peer", str(TOOL), "--image_size", "64"], "224 pixels"),
    (["step", "--json", "nowhere/table.json"], "cannot be written"),
    (["input", "--worker_counts", "1,x"], "--worker_counts"),
    (["scale", "--images", "50"], "give 1"),
    (["links", "--methods", "none,zip"], "'zip' is none of"),
    (["links", "--methods", "bf16"], "none is the reference"),
])  # fmt: skip
def test_wrong_arguments_end_in_one_line(args, part):
    done = subprocess.run([sys.executable, TOOL, *args], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("benchmark.py: error: ") and part in line


@pytest.mark.parametrize("name", tool.MEASURE)
def test_defaults_fit_together(name):
    assert tool.parse_arguments([name]).repeats == 5


def test_failing_run_ends_in_one_line(sample, tmp_path, scratch):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    args = ["step", *TINY, "--coco_image_path", sample / "train2017", "--annotation_path", broken]
    run = run_tool(args, scratch, expect=2)
    (line,) = run.err.splitlines()
    assert line.startswith("benchmark.py: error: ") and "broken.json" in line and run.out == ""


def test_signal_ends_everything(sample, scratch):
    longer = ["--steps", "40", "--image_size", "640"]  # than the wait below, by far
    command = [sys.executable, TOOL, "step", *TINY, *longer, *helpers.data_args(sample)]
    with helpers.start(command, env=scratch) as started:
        helpers.wait_until(lambda: len(started.pids("demo_coco_resnet18.py")) > 1, 60, "a worker")
        started.signal(signal.SIGINT)
        run = started.finish(timeout=20, expect=130)  # also fails where a process is left
    assert "stopped on a signal" in run.out.splitlines()[-1]
    assert not list(Path(scratch["TMPDIR"]).glob("demo-benchmark-*"))


def test_rounds_take_turns():
    order = []
    cases = {name: lambda name=name: order.append(name) or {"x": len(order)} for name in "abc"}
    bench = types.SimpleNamespace(args=types.SimpleNamespace(repeats=3))
    found = tool.rounds(bench, cases)
    assert "".join(order) == "abccbaabc"
    tool.rounds(bench, {"d": lambda: order.append("d") or {}}, times=2)
    assert order[9:] == ["d"] * 6
    assert found == {"a": {"x": [1, 6, 7]}, "b": {"x": [2, 5, 8]}, "c": {"x": [3, 4, 9]}}
    row = tool.row("a / c", "ms", found["a"]["x"], found["c"]["x"])
    assert (row["demo"], row["reference"], row["ratio"]) == (6, 4, 1.5)


def test_speed_leaves_warm_up_and_other_ranks_out():
    line = (
        "[CPU {}] Epoch 1 | Step {} | Loss: 4.5 | 9.9 img/s | data {:.1f} ms | step {:.1f} ms"
        " | ETA 1s\n"
    )
    steps = [(0, 1, 900, 1000), (0, 2, 50, 100), (1, 2, 7, 7000), (0, 3, 0, 100), (0, 4, 10, 400)]
    text = "".join(line.format(*step) for step in steps)
    # by hand: 3 steps of 8 images in 0.6 s, of which 0.06 s were waiting; the median is 100 ms
    found = tool.speed(text, 8, 1, 3)
    assert found == pytest.approx({"img_per_s": 40, "step_ms": 100, "waiting": 10})
    with pytest.raises(tool.Failure, match="3 steps after the warm-up, not 4"):
        tool.speed(text, 8, 1, 4)
