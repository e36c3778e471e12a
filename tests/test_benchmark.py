"""tools/benchmark.py: its arithmetic here; under --ci every subcommand for real, at sizes that say
nothing about speed.
"""

import ast
import json
import os
import re
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

import benchmark as tool
from support.nodes import why_no_namespaces
from support.processes import LONG, ROOT, SCRIPT, require, start, wait_until

TOOL = ROOT / "tools" / "benchmark.py"

ONCE = ["--steps", "2", "--warm_steps", "1", "--batch_size", "2", "--image_size", "64"]
TINY = [*ONCE, "--repeats", "1"]


@pytest.fixture
def scratch():
    """A short TMPDIR: sockets of loader workers lie in it, and their paths are limited to 107."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        yield {"TMPDIR": folder}
        assert not list(Path(folder).glob("demo-benchmark-*"))  # the tool tidies up


def run_tool(args, scratch, expect=0):
    with start([sys.executable, TOOL, *args], split=True, env=scratch) as started:
        return started.finish(timeout=900, expect=expect)


def check_result(result, printed):
    """The JSON's own arithmetic, and the printed table against it, row by row."""
    settings, lines = result["settings"], printed.splitlines()
    how = "median of 1, a trial" if "repeats" in settings else "one run each"
    at = lines.index(f"{settings['command']}, {how}: {result['machine']}")
    head, *lines = lines[at + 1 :]
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
    return {row["what"]: row for row in result["rows"]}


# --- Every subcommand for real ---------------------------------------------------------------


@LONG
def test_step_compares_files_with_a_resident_batch(sample, scratch):
    rows = table_of(["step", *TINY, "--data", sample], scratch)
    assert list(rows) == [
        f"{kind}{what}"
        for kind in ("as shipped", "fp32")
        for what in (" / resident batch", ": share of a step that waits for data", ": peak memory")
    ]
    assert 0 <= rows["fp32: share of a step that waits for data"]["demo"] <= 100
    assert 300 < rows["fp32: peak memory"]["demo"] < 5000


@LONG
def test_input_shows_original_and_prepared_pictures(scratch):
    rows = table_of(["input", *TINY, "--batch_size", "16"], scratch)
    assert list(rows) == [
        f"loader on one core, {kind}: the demo / {other}"
        for other in ("without a worker", "the bare decoder")
        for kind in ("original", "prepared")
    ] + [
        f"{which} on one core: prepared / original"
        for which in ("the demo", "without a worker", "the bare decoder")
    ]
    # by construction: a third of the pixels to decode
    assert rows["the bare decoder on one core: prepared / original"]["ratio"] > 1.5
    assert rows["the demo on one core: prepared / original"]["ratio"] > 1


SETS = ("original", "prepared", "first annotations")


@LONG
def test_start_parts_the_time_to_the_first_step(tmp_path, scratch):
    args = ["start", *TINY, "--images", "100", "--data_folder", tmp_path]
    rows = table_of(args, scratch)
    kept = ["coco-107-prepared", "sample-107-annotations_only", "sample-48", "sample-96"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    for side in ("demo", "reference"):
        parts = [rows[f"{phase}: prepared / original"][side] for phase in tool.PHASES.values()]
        whole = rows["launch to first step: prepared / original"][side]
        assert sum(parts) == pytest.approx(whole)
    assert rows["launch to first step: original / tiny set"]["demo"] == whole
    index = rows["image list: prepared / original"]["reference"]
    assert rows["image list: prepared, first annotations / original"]["reference"] == index
    tiny = {rows[f"launch to first step: {name} / tiny set"]["reference"] for name in SETS}
    assert len(tiny) == 1
    assert rows["image list: original / pycocotools' COCO(file)"]["demo"] == index
    assert rows["peak memory of rank 1: original / tiny set"]["reference"] > 100


@LONG
def test_links_shapes_a_real_link(sample, scratch):
    """Rates and times depend on the machine, in one direction: no link is faster than shaped."""
    reason = why_no_namespaces()
    require(not reason, reason)
    args = ["links", *TINY, "--warm_steps", "4", "--rates", "unshaped,200mbit", "--delays", "10"]
    rows = table_of([*args, "--methods", "none,bf16", "--data", sample], scratch)
    assert 0.3 < rows["200mbit: rate measured / shaped"]["ratio"] < 1.05
    # 44.9 MB of gradients at 0.2 Gb/s, all within a step
    assert rows["200mbit, none: step / none"]["demo"] > 1e3 * 44.87 * 8 / 200 * 0.95
    for rate in ("unshaped", "200mbit"):
        assert rows[f"{rate}, none: bytes of a step / none"]["demo"] == pytest.approx(
            44.87, abs=0.01
        )
        for what in ("bytes of a step", "received per step of the run"):
            half = rows[f"{rate}, bf16: {what} / none"]
            assert half["ratio"] == pytest.approx(0.5, abs=0.02), what
    # nor does a packet arrive before its delay is over, which an all-reduce waits for four times
    assert rows["latency, delay of 10 ms / without + 4 delays"]["demo"] > 40
    both_ways = [what for what in rows if what.startswith("step at ")]
    assert len(both_ways) == 2


@LONG
def test_loss_of_each_compression(sample, scratch):
    args = ["loss", *ONCE, "--steps", "8", "--seeds", "1", "--data", sample]
    rows = table_of([*args, "--methods", "none,accumulate"], scratch)
    assert list(rows) == [f"{what} loss, accumulate / none" for what in ("seed 0:", "mean")]
    assert all(row["ratio"] == pytest.approx(1, abs=0.7) for row in rows.values())


class Noted(tool.Bench):
    """Starts no process: notes each command in `commands`, and answers as a script would."""

    def __init__(self, args, folder, answer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tool, "adopt_orphans", lambda: None)  # this is pytest's own process
            super().__init__(tool.parse_arguments(args), folder)
        self.commands, self.answer = [], answer

    def run(self, command, until=None, **env):
        self.commands.append(" ".join([*map(str, command), env.get("BENCHMARK_SCRIPT", "")]))
        return self.answer(self.commands[-1])


@pytest.mark.parametrize("command", ["step", "input"])
def test_two_versions_are_compared(tmp_path, command):
    """The other one is half as fast."""
    other = tmp_path / "other.py"
    other.touch()
    (tmp_path / "coco/annotations").mkdir(parents=True)
    (tmp_path / "coco/annotations/instances_train2017.json").touch()
    args = [command, *TINY, "--data", str(tmp_path / "coco"), "--against", str(other)]

    def answer(text):
        ms = 20 if str(other) in text else 10
        lines = (LINE.format(0, step, 0, ms) for step in (1, 2, 3))
        return "".join(lines) + f'FIGURES {{"img_per_s": {1000 / ms}}}\n'

    bench = Noted(args, tmp_path, answer)
    bench.peak = 500.0
    rows = {row["what"]: row for row in tool.MEASURE[command](bench)}
    compared = [row["ratio"] for what, row in rows.items() if what.endswith(" / the other")]
    assert compared == [2.0, 2.0] and not any("resident" in what for what in rows)
    assert sum(f" {other}" in text for text in bench.commands) == 2
    assert sum(f" {SCRIPT}" in text for text in bench.commands) == 2


def test_losses_by_seed_with_their_spread(tmp_path):
    def answer(text):
        seed = int((re.findall(r"--seed=(\d)", text) or ["0"])[-1])
        loss = 3 + ("-prepared" in text)
        line = LINE.replace("Loss: 4.5000", f"Loss: {loss + seed / 10:.4f}")
        return "".join(line.format(rank, step, 0, 1) for rank in (0, 1) for step in range(1, 5))

    bench = Noted(["loss", "--methods", "none,prepared", "--steps", "4"], tmp_path, answer)
    rows = tool.measure_loss(bench)
    assert [row["what"].partition(",")[0] for row in rows] == [
        *(f"seed {seed}: loss" for seed in range(3)),
        "mean loss",
        "largest - smallest loss",
    ]
    assert [row["demo"] for row in rows] == pytest.approx([4, 4.1, 4.2, 4.1, 0.2])
    assert [row["reference"] for row in rows] == pytest.approx([3, 3.1, 3.2, 3.1, 0.2])


@LONG
@pytest.mark.parametrize("part", sorted({*tool.PARTS} - {"compile"}))  # which takes a minute
def test_each_part_for_gpus_runs_on_a_cpu(part, scratch):
    args = ["gpu", "--cpu", *ONCE, "--part", part, "--batch_sizes", "2", "--images", "20"]
    steps = "6" if part == "split" else "2"  # the profile begins after the script's warm-up
    rows = table_of([*args, "--batch_size", "4", "--steps", steps], scratch)
    if part == "train":
        one, two = rows
        assert one.startswith("1 process(es) on ") and two.startswith("2 process(es) on ")
    if part == "step":
        assert list(rows) == ["resident batch of 2: as shipped / strict fp32"]
    if part == "input":
        loader = rows["prepared: loader of 1 workers / resident batch"]
        least = min(loader["demo"], loader["reference"])
        assert rows["prepared: fed / the lower of both"]["reference"] == least
    if part == "split":
        # operators take most of what is not waiting; loader and logging are operators, too
        assert 0.5 < rows["resident: compute and exposed / kernels running"]["ratio"] < 1.5
    if part == "job":
        whole, training = list(rows.values())[:2]
        assert whole["what"].startswith("2 epochs of 2") and whole["demo"] > training["demo"]


@LONG
def test_failing_run_ends_in_one_line(sample, tmp_path, scratch):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_train2017.json").write_text("{")
    os.symlink(sample / "train2017", tmp_path / "train2017")
    run = run_tool(["step", *TINY, "--data", tmp_path], scratch, expect=2)
    (line,) = run.err.splitlines()
    assert line.startswith("benchmark.py: error: ") and run.out == ""
    assert "instances_train2017.json" in line


@LONG
def test_signal_ends_everything(sample, scratch):
    longer = ["--steps", "40", "--image_size", "640"]  # than the wait below, by far
    command = [sys.executable, TOOL, "step", *TINY, *longer, "--data", sample]
    with start(command, env=scratch) as started:
        wait_until(lambda: len(started.pids("demo_coco_resnet18.py")) > 1, 60, "a worker")
        started.signal(signal.SIGINT)
        run = started.finish(timeout=20, expect=130)  # also fails where a process is left
    assert "stopped on a signal" in run.out.splitlines()[-1]


# --- Processes of a stand-in for the script --------------------------------------------------


STAND_IN = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


@LONG
@pytest.mark.parametrize("how", ["signal", "limit"])
def test_what_a_run_has_started_ends_with_it(sample, tmp_path, scratch, how):
    script = tmp_path / "script.py"
    script.write_text(STAND_IN)
    args = ["step", *TINY, "--data", sample, "--script", script]
    args += ["--limit", "2" if how == "limit" else "60"]
    with start([sys.executable, TOOL, *args], env=scratch) as started:
        wait_until(lambda: len(started.pids("time.sleep")) > 0, 20, "the child's child")
        if how == "signal":
            started.signal(signal.SIGTERM)
        run = started.finish(timeout=20, expect=143 if how == "signal" else 2)
    last = run.out.splitlines()[-1]
    assert ("stopped on a signal" if how == "signal" else "the time limit is over") in last


# --- Arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "part"), [
    ([], "COMMAND"),
    (["step", "--repeats", "0"], "--repeats 0 is not at least 1"),
    (["step", "--repeats", "many"], "invalid int value: 'many'"),
    (["step", "--data", "nowhere"], "lacks annotations/instances_train2017.json"),
    (["step", "--script", "nowhere.py"], "nowhere.py is not there"),
    (["input", "--against", "nowhere.py"], "nowhere.py is not there"),
    (["start", "--against", str(TOOL)], "unrecognized arguments"),
    (["step", "--peer", "nowhere.py"], "nowhere.py is not there"),
    (["step", "--peer", str(TOOL), "--image_size", "64"], "224 pixels"),
    (["step", "--json", "nowhere/table.json"], "cannot be written"),
    (["links", "--methods", "none,zip"], "give none, then others"),
    (["links", "--methods", "bf16"], "give none, then others"),
    (["links", "--methods", "none,prepared"], "give none, then others"),
    (["links", "--rates", "1gbit,slow"], "--rates slow"),
    (["gpu", "--part", "all"], "invalid choice: 'all'"),
    (["gpu", "--batch_sizes", "64,x"], "--batch_sizes"),
])  # fmt: skip
def test_wrong_arguments_end_in_one_line(capsys, args, part):
    with pytest.raises(SystemExit, match="2"):
        tool.parse_arguments(args)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmark.py: error: ") and part in line


@pytest.mark.parametrize("name", tool.MEASURE)
def test_defaults_fit_together(name):
    args = tool.parse_arguments([name])
    assert (args.command, args.script) == (name, SCRIPT)
    assert args.limit == (240 if name == "gpu" else 1800)


# --- What only a GPU can show ----------------------------------------------------------------


@pytest.mark.skipif(tool.GPU, reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(scratch):
    begin = time.monotonic()
    run = run_tool(["gpu"], scratch, expect=2)
    assert time.monotonic() - begin < 10
    (line,) = run.err.splitlines()
    assert line.startswith("benchmark.py: error: gpu: torch finds no NVIDIA GPU here")
    assert run.out == ""


@LONG
def test_part_that_takes_too_long_ends_in_one_line(tmp_path, scratch):
    """What was measured before it is in the table and in the file."""
    file = tmp_path / "table.json"
    args = ["gpu", "--cpu", "--part", "train", "--limit", "1", "--json", file]
    run = run_tool([*args, "--batch_size", "100000"], scratch, expect=2)
    last = run.err.splitlines()[-1]
    assert last == "benchmark.py: error: part train: make_sample_coco.py: the time limit is over"
    assert json.loads(file.read_text())["rows"] == [] and run.out.startswith("gpu, one run each: ")


def gpu_bench(*more):
    args = tool.parse_arguments(["gpu", "--cpu", *more])
    return types.SimpleNamespace(args=args, deadline=None, failed=[])


def test_parts_for_gpus_go_on_after_one_that_fails(monkeypatch, capsys):
    """Each figure is written as soon as it is known, and each part has its own 4 minutes."""
    clock, seen = [1000.0], []

    def part(name, fails=False):
        def measure(bench):
            seen.append((name, bench.deadline))
            yield tool.row(f"{name}, first", "ms", [1.0])
            assert f"{name}, first (ms)  1" in capsys.readouterr().out
            clock[0] += 100
            if fails:
                raise tool.Failure("it broke")
            yield tool.row(f"{name}, second", "ms", [3.0], [2.0])

        return measure

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        tool, "PARTS", {"a": part("a"), "b": part("b", fails=True), "c": part("c")}
    )
    bench = gpu_bench()
    assert [row["what"][0] for row in tool.measure_gpu(bench)] == ["a", "a", "b", "c", "c"]
    assert bench.failed == ["part b: it broke"]
    assert seen == [("a", 1240.0), ("b", 1340.0), ("c", 1440.0)]
    bench.args.part = "c"
    assert [row["ratio"] for row in tool.measure_gpu(bench)] == [None, 1.5]


def test_plan_for_gpus_covers_what_only_they_show():
    args = tool.parse_arguments(["gpu"])
    assert args.batch_sizes == [256, 64, 512, 128] and args.images == tool.FULL
    first = ["train", "step", "input", "split", "job", "compile", "candidates"]
    assert list(tool.PARTS) == first  # the most valuable
    for name in tool.PARTS:
        assert f"\n  {name} " in tool.__doc__


def test_union_of_kernels_counts_no_moment_twice():
    spans = [(5, 9), (0, 2), (1, 3), (2.5, 2.75), (9, 10)]
    assert tool.union(spans) == 3 + 5
    assert tool.union([]) == 0


# --- Arithmetic ------------------------------------------------------------------------------


def test_present_script_has_the_names_that_are_changed():
    """Else a case would measure something else, without a word."""
    tree = ast.parse(SCRIPT.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted = {"make_loader", "train_epoch", "train_step", "summarize", "one_line_errors"}
    assert wanted | {*tool.PHASES} <= {*functions}
    # in the order in which main calls them, or what it calls
    named = [n for n in ast.walk(functions["main"]) if isinstance(n, ast.Name)]
    called = [n.id for n in sorted(named, key=lambda n: n.lineno) if n.id in tool.PHASES]
    assert list(dict.fromkeys(called)) == list(tool.PHASES)[:-1]
    assert "WARM_UP" in [
        getattr(n.targets[0], "id", "") for n in tree.body if hasattr(n, "targets")
    ]


def test_phases_add_up_and_count_their_first_end_alone(capfd, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("BENCHMARK_BEGAN", "90")
    monkeypatch.setenv("RANK", "1")

    def work(*_):
        clock[0] += 5

    demo = types.SimpleNamespace(**dict.fromkeys(tool.PHASES, work))
    tool.note_phases(demo)
    for name in tool.PHASES:
        getattr(demo, name)()
        demo.from_rank_0()  # is called again and again
    found = tool.record(capfd.readouterr().out, "FIGURES")
    assert found["rank"] == 1 and list(found["phases"]) == list(tool.PHASES.values())
    assert list(found["phases"].values()) == [10, 5, 15, 10, 10, 10, 10]
    assert found["peak"] > 10


def test_rounds_take_turns():
    order = []
    cases = {name: lambda name=name: order.append(name) or {"x": len(order)} for name in "abc"}
    bench = types.SimpleNamespace(args=types.SimpleNamespace(repeats=3))
    found = tool.rounds(bench, cases)
    assert "".join(order) == "abccbaabc"
    assert found == {"a": {"x": [1, 6, 7]}, "b": {"x": [2, 5, 8]}, "c": {"x": [3, 4, 9]}}
    row = tool.row("a / c", "ms", found["a"]["x"], found["c"]["x"])
    assert (row["demo"], row["reference"], row["ratio"]) == (6, 4, 1.5)
    assert tool.cells(row) == ("a / c (ms)", "6", "4", "1.500")


LINE = (
    "[CPU {}] Epoch 1 | Step {} | Loss: 4.5000 | 9.9 img/s | data {:.1f} ms | step {:.1f} ms"
    " | ETA 1s\n"
)
STEPS = [(0, 1, 900, 1000), (0, 2, 50, 100), (1, 2, 7, 7000), (0, 3, 0, 100), (0, 4, 10, 400)]


def test_speed_leaves_warm_up_and_other_ranks_out():
    text = "".join(LINE.format(*step) for step in STEPS)
    # by hand: 3 steps of 8 images in 0.6 s, of which 0.06 s were waiting; the median is 100 ms
    args = types.SimpleNamespace(batch_size=8, warm_steps=1, steps=3)
    found = tool.speed(text, args)
    assert found == pytest.approx({"img_per_s": 40, "step_ms": 100, "waiting": 10})
    assert tool.speed(text, args, 16)["img_per_s"] == pytest.approx(80)
    args.steps = 4
    with pytest.raises(tool.Failure, match="3 steps after the warm-up, not 4"):
        tool.speed(text, args)


@pytest.mark.parametrize(
    ("rate", "wanted"), [("1gbit", 1), ("100mbit", 0.1), ("2.5gbit", 2.5), ("unshaped", None)]
)
def test_rates_as_tc_writes_them(rate, wanted):
    assert tool.gbps(rate) == (wanted and pytest.approx(wanted))


def interface(name, kind, rx, wire):
    return {"name": name, "kind": kind, "rx_bytes": rx, "tx_bytes": 1, "wire_Gbps": wire}


def test_figures_of_a_link_are_those_of_its_slower_node():
    nodes = [[("veth0", "ethernet", 1e8, 0.98), ("lo", "loopback", 9e9, 44.0)]]
    nodes.append([("lo", "loopback", 9e9, 43.0), ("veth1", "ethernet", 9, 0.97)])
    nodes = [{"interfaces": [interface(*link) for link in node]} for node in nodes]
    probe = {"nodes": nodes, "latency_ms": 0.3, "bandwidth_GBps": 0.12}
    carried = [interface("lo", "loopback", 9e9, 0), interface("veth0", "ethernet", 3e8, 0)]
    text = f"[CPU 0] Probe {json.dumps(probe)}\n[CPU 0] Run " + '{"accumulate_steps": 4}\n'
    text += "".join(LINE.format(*step) for step in STEPS)
    text += '[CPU 0] Summary {"wire_bytes_per_step": 8000000, "steps": 4}\n'
    text += f"launch_multinode.sh: Node {json.dumps({'interfaces': carried})}\n"
    args = types.SimpleNamespace(batch_size=8, warm_steps=1, steps=3)
    found = tool.link_figures(text, args)
    wanted = {"ms": 25, "MB": 2, "received": 15, "wire": 0.97, "slope": 0.96, "latency": 0.3}
    assert found == pytest.approx(wanted)
    rows = tool.rate_rows("1gbit", {name: [value] for name, value in found.items()})
    assert [row["ratio"] for row in rows] == [pytest.approx(0.97), pytest.approx(0.96), None]
    without = text.replace('"bandwidth_GBps": 0.12', '"bandwidth_GBps": null')
    found = tool.link_figures(without, args)
    assert found == pytest.approx({name: wanted[name] for name in wanted if name != "slope"})
    (_, slope, _) = tool.rate_rows("1gbit", {name: [value] for name, value in found.items()})
    assert (slope["demo"], slope["ratio"]) == (None, None)
