"""tools/benchmark.py: its arithmetic here; under --ci every subcommand for real, at sizes that say
nothing about speed.
"""

import functools
import json
import re
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

import benchmark as tool
from benchmarks import children, figures, gpu, links, one_machine, runner, settings
from support.nodes import require_namespaces
from support.processes import LONG, ROOT, SCRIPT, refusal, start, wait_until

TOOL = ROOT / "tools" / "benchmark.py"

ONCE = ["--steps", "2", "--warm_steps", "1", "--batch_size", "2", "--image_size", "64"]
TINY = [*ONCE, "--repeats", "1"]


@pytest.fixture
def scratch():
    """A short TMPDIR: sockets of loader workers lie in it, and their paths are limited to 107."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        yield {"TMPDIR": folder}
        assert not list(Path(folder).glob("demo-benchmark-*"))  # the tool tidies up


def table_of(args, scratch):
    """{what: row} of a run with --json FILE, which has printed the same."""
    file = Path(scratch["TMPDIR"], "table.json")
    with start([sys.executable, TOOL, *args, "--json", file], split=True, env=scratch) as started:
        printed = started.finish(timeout=900).out
    result = json.loads(file.read_text())
    assert printed.endswith(figures.table(result) + "\n")
    assert "cores, torch " in result["machine"] and result["rows"]
    for row in result["rows"]:
        assert row["demo"] >= 0 if row["unit"] == "%" else row["demo"] > 0, row
        assert row["reference"] is None or row["reference"] > 0, row
    return {row["what"]: row for row in result["rows"]}


# --- Every subcommand for real ---------------------------------------------------------------


@LONG
def test_step_compares_files_with_a_resident_batch(sample, scratch):
    rows = table_of(["step", *TINY, "--data", sample], scratch)
    whats = (" / resident batch", ": share of a step that waits for data", ": peak memory")
    assert list(rows) == [kind + what for kind in ("as shipped", "fp32") for what in whats]
    assert 300 < rows["fp32: peak memory"]["demo"] < 5000


@LONG
def test_input_shows_original_and_prepared_pictures(scratch):
    rows = table_of(["input", *TINY, "--batch_size", "16"], scratch)
    assert len(rows) == 2 * 2 + 3  # of both against two others, and prepared against original
    # by construction: a third of the pixels to decode
    assert rows["the bare decoder on one core: prepared / original"]["ratio"] > 1.5
    assert rows["the demo on one core: prepared / original"]["ratio"] > 1


@LONG
def test_start_parts_the_time_to_the_first_step(tmp_path, scratch):
    rows = table_of(["start", *TINY, "--images", "100", "--data_folder", tmp_path], scratch)
    kept = ["coco-107-prepared", "sample-107-annotations_only", "sample-48", "sample-96"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    launch, index = "launch to first step", "image list"
    for side in ("demo", "reference"):
        parts = [rows[f"{phase}: prepared / original"][side] for phase in children.PHASES.values()]
        assert sum(parts) == pytest.approx(rows[f"{launch}: prepared / original"][side])
    # each measured once, and shown wherever it is compared
    original = rows[f"{index}: prepared / original"]["reference"]
    assert rows[f"{index}: original / pycocotools' COCO(file)"]["demo"] == original
    original = rows[f"{launch}: prepared / original"]["reference"]
    assert rows[f"{launch}: original / tiny set"]["demo"] == original
    assert rows["peak memory of rank 1: original / tiny set"]["reference"] > 100


@LONG
def test_links_shapes_a_real_link(sample, scratch):
    """Rates and times depend on the machine, in one direction: no link is faster than shaped."""
    require_namespaces()
    args = ["links", *TINY, "--warm_steps", "4", "--rates", "unshaped,200mbit"]
    rows = table_of([*args, "--methods", "none,bf16", "--data", sample], scratch)
    assert 0.3 < rows["200mbit: rate measured / shaped"]["ratio"] < 1.05
    # 44.9 MB of gradients at 0.2 Gb/s, all within a step
    assert rows["200mbit, none: step / none"]["demo"] > 1e3 * 44.87 * 8 / 200 * 0.95
    for rate in ("unshaped", "200mbit"):
        sent = rows[f"{rate}, bf16: bytes of a step / none"]
        assert (sent["reference"], sent["ratio"]) == pytest.approx((44.87, 0.5), abs=0.01)
        received = rows[f"{rate}, bf16: received per step of the run / none"]
        assert received["ratio"] == pytest.approx(0.5, abs=0.02)


@LONG
def test_loss_of_each_compression(sample, scratch):
    args = ["loss", *ONCE, "--steps", "8", "--seeds", "1", "--data", sample]
    rows = table_of([*args, "--methods", "none,accumulate"], scratch)
    assert list(rows) == ["seed 0: loss, accumulate / none", "mean loss, accumulate / none"]


class Noted(runner.Bench):
    """Starts no process: notes each command in `commands`, and answers as a script would."""

    def __init__(self, args, folder, answer):
        super().__init__(tool.parse_arguments(args), folder)
        self.commands, self.answer, self.peak = [], answer, 500.0

    def run(self, command, **env):
        self.commands.append(" ".join([*map(str, command), env.get("BENCHMARK_SCRIPT", "")]))
        return self.answer(self.commands[-1])


@pytest.mark.parametrize("command", ["step", "input"])
def test_two_versions_are_compared(sample, tmp_path, command):
    """The other one is half as fast."""
    other = tmp_path / "other.py"
    other.touch()

    def answer(text):
        ms = 20 if str(other) in text else 10
        lines = (LINE.format(0, step, 0, ms) for step in (1, 2, 3))
        return "".join(lines) + f'FIGURES {{"img_per_s": {1000 / ms}}}\n'

    args = [command, *TINY, "--data", str(sample), "--against", str(other)]
    bench = Noted(args, tmp_path, answer)
    rows = tool.MEASURE[command](bench)
    compared = [row["ratio"] for row in rows if row["what"].endswith(" / the other")]
    assert compared == [2.0, 2.0] and not any("resident" in row["what"] for row in rows)
    for script in (other, SCRIPT):
        assert sum(f" {script}" in text for text in bench.commands) == 2


def test_losses_by_seed_with_their_spread(tmp_path):
    def answer(text):
        seed = int((re.findall(r"--seed=(\d)", text) or ["0"])[-1])
        line = LINE.replace("4.5000", f"{3 + ('-prepared' in text) + seed / 10:.4f}")
        return "".join(line.format(rank, step, 0, 1) for rank in (0, 1) for step in range(1, 5))

    bench = Noted(["loss", "--methods", "none,prepared", "--steps", "4"], tmp_path, answer)
    rows = one_machine.measure_loss(bench)  # of three seeds, then their mean and their spread
    assert [row["demo"] for row in rows] == pytest.approx([4, 4.1, 4.2, 4.1, 0.2])
    assert [row["reference"] for row in rows] == pytest.approx([3, 3.1, 3.2, 3.1, 0.2])


@LONG
@pytest.mark.parametrize("part", sorted({*gpu.PARTS} - {"compile"}))  # which takes a minute
def test_each_part_for_gpus_runs_on_a_cpu(part, scratch):
    steps = "6" if part == "split" else "2"  # the profile begins after the script's warm-up
    args = ["gpu", "--cpu", *ONCE, "--part", part, "--batch_sizes", "2", "--images", "20"]
    args += ["--limit", "800"]  # a busy machine is no GPU
    rows = table_of([*args, "--batch_size", "4", "--steps", steps], scratch)
    if part == "split":
        # operators take most of what is not waiting; loader and logging are operators, too
        assert 0.5 < rows["resident: compute and exposed / kernels running"]["ratio"] < 1.5
    if part == "job":
        whole, training, _ = rows.values()
        assert whole["what"].startswith("2 epochs of 2") and whole["demo"] > training["demo"]


STAND_IN = """
import subprocess, sys, time
apart = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **apart)
time.sleep(60 * __file__.endswith("slow.py"))
sys.exit("[CPU 0] ERROR: no such folder")
"""


@LONG
@pytest.mark.parametrize(
    ("script", "limit", "code", "text"),
    [
        ("slow.py", 60, 143, "stopped on a signal; nothing is left running"),
        ("slow.py", 2, 2, "slow.py: the time limit is over"),
        ("fails.py", 60, 2, "fails.py ended with 1: [CPU 0] ERROR: no such folder"),
    ],
    ids=["signal", "limit", "failure"],
)
def test_what_a_run_has_started_ends_with_it(sample, tmp_path, scratch, script, limit, code, text):
    (tmp_path / script).write_text(STAND_IN)
    args = ["step", *TINY, "--data", sample, "--script", tmp_path / script, "--limit", limit]
    with start([sys.executable, TOOL, *args], env=scratch) as started:
        if code == 143:
            wait_until(lambda: started.pids("time.sleep"), 20, "the child's child")
            started.signal(signal.SIGTERM)
        run = started.finish(timeout=20, expect=code)  # also fails where a process is left
    assert run.out.splitlines()[-1] == f"benchmark.py: error: {text}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "COMMAND"),
        ("step --repeats 0", "--repeats: 0 is not at least 1"),
        ("step --script nowhere.py", "nowhere.py is not there"),
        (f"step --image_size 64 --peer {TOOL.name}", "224 pixels"),
        ("links --methods bf16,none", "give none, then others"),
        ("links --methods none,prepared", "give none, then others"),
        ("links --rates 1gbit,slow", "--rates: slow"),
        ("gpu --batch_sizes 64,x", "--batch_sizes"),
    ],
)
def test_wrong_arguments_end_in_one_line(capsys, monkeypatch, words, text):
    monkeypatch.chdir(TOOL.parent)
    line = refusal(capsys, tool.parse_arguments, words)
    assert line.startswith("benchmark.py: error: ") and text in line


def test_defaults_fit_together():
    for name in tool.MEASURE:
        args = tool.parse_arguments([name])
        if name != "overlap":
            assert args.script == SCRIPT and args.limit == (240 if name == "gpu" else 1800), name


@pytest.mark.skipif(children.GPU, reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path):
    with pytest.raises(runner.Failure, match="gpu: torch finds no NVIDIA GPU here"):
        gpu.measure_gpu(Noted(["gpu"], tmp_path, answer=None))


def test_parts_for_gpus_go_on_after_one_that_fails(monkeypatch, capsys, tmp_path):
    """Each figure is written as soon as it is known, and each part has its own 4 minutes; table
    and file have those of all.
    """
    clock, deadlines, file = [1000.0], [], tmp_path / "table.json"

    def part(bench, name):
        deadlines.append(bench.deadline)
        yield figures.row(f"{name}, first", "ms", [1.0])
        assert f"{name}, first (ms)  1" in capsys.readouterr().out
        assert json.loads(file.read_text())["rows"][-1]["what"] == f"{name}, first"
        clock[0] += 100
        if name == "b":
            raise runner.Failure("it broke")
        yield figures.row(f"{name}, second", "ms", [3.0], [2.0])

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this is pytest's own process
    monkeypatch.setattr(figures, "machine", lambda: "here")
    monkeypatch.setattr(gpu, "PARTS", {x: functools.partial(part, name=x) for x in "abc"})
    with pytest.raises(SystemExit, match="2"):
        tool.main(["gpu", "--cpu", "--json", str(file)])
    printed, said = capsys.readouterr()
    assert said.splitlines()[-1] == "benchmark.py: error: part b: it broke"
    result = json.loads(file.read_text())
    assert [row["what"][0] for row in result["rows"]] == ["a", "a", "b", "c", "c"]
    assert figures.table(result) in printed and deadlines == [1240.0, 1340.0, 1440.0]


def test_plan_for_gpus_covers_what_only_they_show():
    args = tool.parse_arguments(["gpu"])
    assert args.batch_sizes == [256, 64, 512, 128] and args.images == settings.FULL
    first = ["train", "step", "input", "split", "job", "compile", "candidates"]
    assert list(gpu.PARTS) == first  # the most valuable
    page = (ROOT / "docs" / "speed.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [*tool.MEASURE, *gpu.PARTS]


def test_union_of_kernels_counts_no_moment_twice():
    assert children.union([(5, 9), (0, 2), (1, 3), (2.5, 2.75), (9, 10)]) == 3 + 5
    assert children.union([]) == 0


# --- Arithmetic ------------------------------------------------------------------------------


def test_present_script_has_the_names_that_are_changed():
    """Else a case would measure something else, without a word."""
    text = SCRIPT.read_text()
    functions = {"make_loader", "train_step", "summarize", "one_line_errors", *children.PHASES}
    assert functions <= {*re.findall(r"^def (\w+)\(", text, re.MULTILINE)}
    assert "\nWARM_UP = " in text


def test_phases_add_up_and_count_their_first_end_alone(capfd, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[-1])
    monkeypatch.setenv("BENCHMARK_BEGAN", "90")
    monkeypatch.setenv("RANK", "1")
    five_seconds = dict.fromkeys(children.PHASES, lambda: clock.append(clock[-1] + 5))
    demo = types.SimpleNamespace(**five_seconds)
    children.phases(demo)
    for name in children.PHASES:
        getattr(demo, name)()
        demo.from_rank_0()  # is called again and again
    found = figures.record(capfd.readouterr().out, "FIGURES")
    took = [10, 5, 15, 10, 10, 10, 10]
    assert found["phases"] == dict(zip(children.PHASES.values(), took, strict=True))
    assert found["rank"] == 1 and found["peak"] > 10


def test_rounds_take_turns():
    order = []
    cases = {name: lambda name=name: order.append(name) or {"x": len(order)} for name in "abc"}
    args = types.SimpleNamespace(repeats=3)
    found = runner.rounds(types.SimpleNamespace(args=args), cases)
    assert "".join(order) == "abccbaabc"
    assert found == {"a": {"x": [1, 6, 7]}, "b": {"x": [2, 5, 8]}, "c": {"x": [3, 4, 9]}}


def test_table_has_medians_and_their_ratio():
    rows = [figures.row("a / c", "ms", [1, 6, 7], [9, 4, 3]), figures.row("share", "%", [12.3456])]
    settings = {"command": "step", "repeats": 3}
    assert figures.table({"settings": settings, "machine": "here", "rows": rows}).splitlines() == [
        "step, median of 3, a trial: here",
        "what         demo  reference  ratio",
        "a / c (ms)      6          4  1.500",
        "share (%)   12.35          -      -",
    ]


LINE = (
    "[CPU {}] Epoch 1 | Step {} | Loss: 4.5000 | 9.9 img/s | data {:.1f} ms | step {:.1f} ms"
    " | ETA 1s\n"
)
STEPS = [(0, 1, 900, 1000), (0, 2, 50, 100), (1, 2, 7, 7000), (0, 3, 0, 100), (0, 4, 10, 400)]


ARGS = types.SimpleNamespace(batch_size=8, warm_steps=1, steps=3)


def test_speed_leaves_warm_up_and_other_ranks_out():
    text = "".join(LINE.format(*step) for step in STEPS)
    # by hand: 3 steps of 8 images in 0.6 s, of which 0.06 s were waiting; the median is 100 ms
    wanted = {"img_per_s": 40, "step_ms": 100, "waiting": 10}
    assert figures.speed(text, ARGS) == pytest.approx(wanted)


def test_rates_as_tc_writes_them():
    found = [links.gbps(rate) for rate in ("1gbit", "100mbit", "2.5gbit", "unshaped")]
    assert found == [1, 0.1, 2.5, None]


def node(*links):
    names = ("name", "kind", "rx_bytes", "wire_Gbps")
    return {"interfaces": [dict(zip(names, link, strict=True)) for link in links]}


def test_figures_of_a_link_are_those_of_its_slower_node():
    lo = ("lo", "loopback", 9e9, 44.0)
    nodes = [node(("veth0", "ethernet", 1e8, rate), lo) for rate in (0.98, 0.97)]
    probe = {"latency_ms": 0.3, "bandwidth_GBps": 0.12, "nodes": nodes}
    summary, carried = {"wire_bytes_per_step": 8e6, "steps": 4}, ("veth0", "ethernet", 3e8, 0)
    text = "".join(LINE.format(*step) for step in STEPS)
    for kind, facts in [("Probe", probe), ("Run", {"accumulate_steps": 4}), ("Summary", summary)]:
        text += f"[CPU 0] {kind} {json.dumps(facts)}\n"
    text += f"launch_multinode.sh: Node {json.dumps(node(lo, carried))}\n"
    wanted = {"ms": 25, "MB": 2, "received": 15, "wire": 0.97, "slope": 0.96, "latency": 0.3}
    assert links.link_figures(text, ARGS) == pytest.approx(wanted)
    del wanted["slope"]
    assert links.link_figures(text.replace("0.12", "null"), ARGS) == pytest.approx(wanted)


def test_rate_without_a_slope_leaves_that_figure_out():
    found = {"wire": [0.97], "slope": [0.96], "latency": [0.3]}
    ratios = [row["ratio"] for row in links.rate_rows("1gbit", found)]
    assert ratios == [0.97, 0.96, None]
    del found["slope"]
    _, slope, _ = links.rate_rows("1gbit", found)
    assert (slope["demo"], slope["ratio"]) == (None, None)
