"""tools/compare_logs.py: what it reports of runs whose cause is known, as recorded pages; what
damage it survives, what it draws.

A folder in data/reports holds logs and report.txt: what the case shows, then commands, each with
all that it prints and writes. data/made_runs.txt has reports on made-up runs. `pytest --record
tests/test_compare_logs.py` writes both anew: read their diff.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from pytest import approx

import compare_logs
from analysis import report, runs
from analysis.logs import Log, log_files, parse_lines, read_log
from support.datasets import make_set
from support.forks import run_forked
from support.made_logs import REPORTS, made_runs
from support.processes import FACTOR, ROOT

TOOL = ROOT / "tools" / "compare_logs.py"
WHOLE = REPORTS / "not_whole" / "whole.log"
TEXT = WHOLE.read_text()
RECORDED = "report.txt"


def run_tool(*words: object) -> tuple[str, str, object]:
    """Calls the tool with a command line's words; returns stdout, stderr and exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = compare_logs.main(list(map(str, words)))
    return out.getvalue(), err.getvalue(), code


def log_of(text: str) -> Log:
    """What is read in a file of this text."""
    log = Log()
    parse_lines(text.splitlines(keepends=True), log)
    return log


# --- Recorded reports ----------------------------------------------------------------------------

FOLDERS = sorted(file.parent for file in REPORTS.glob(f"*/{RECORDED}"))


def answer(command: str) -> str:
    """What it prints and writes in this folder, and its exit code unless that is 0."""
    before = {*Path().iterdir()}
    out, err, code = run_tool(*shlex.split(command)[1:])
    text = out + err + (f"exit code {code}\n" if code else "")
    for file in sorted({*Path().iterdir()} - before):
        text += f"\n--- {file} ---\n{file.read_bytes().decode()}"  # with the ends of lines
        file.unlink()
    return text


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.name)
def test_report_is_as_recorded(case, tmp_path, monkeypatch, pytestconfig):
    folder = tmp_path / case.name  # the name of a run that has none
    folder.mkdir()
    for item in [*case.iterdir(), ROOT / "docs"]:
        (folder / item.name).symlink_to(item)
    monkeypatch.chdir(folder)
    recorded = (case / RECORDED).read_text()
    text = recorded.partition("\n$ ")[0]
    for command in re.findall(r"^\$ (compare_logs\.py.*)$", recorded, re.MULTILINE):
        text += f"\n$ {command}\n{answer(command)}"
    if pytestconfig.getoption("--record"):
        (case / RECORDED).write_text(text)
    assert text.split("\n") == (case / RECORDED).read_text().split("\n")


MADE_RUNS = ROOT / "tests/data/made_runs.txt"
MADE = [part.partition("\n--\n")[0] for part in MADE_RUNS.read_text().split("\n== ")[1:]]


@pytest.mark.parametrize("made", MADE, ids=lambda made: re.split("[:\n]", made)[0])
def test_report_on_made_up_runs_is_as_recorded(made, tmp_path, pytestconfig):
    folders = [run.write(tmp_path) for run in made_runs(made.splitlines()[1:])]
    out, err, _ = run_tool(*folders)
    answer = (out.partition("\n\nFigures\n---")[0] + "\n" + err).strip()
    text = MADE_RUNS.read_text()
    before, _, after = text.partition(f"\n== {made}\n--\n")
    if pytestconfig.getoption("--record"):
        rest = after[after.index("\n== ") :] if "\n== " in after else ""
        MADE_RUNS.write_text(f"{before}\n== {made}\n--\n{answer}\n{rest}")
    recorded = MADE_RUNS.read_text().partition(f"\n== {made}\n--\n")[2].partition("\n== ")[0]
    assert answer.splitlines() == recorded.strip().splitlines()
    assert not re.search(r"\b(limits|only|usually|delivers)\b", out)


def test_of_logs_with_wall_times_alone_the_ratio_is_told():
    """Of the talk's: 14939.79 s and 1164.99 s."""
    out, *_ = run_tool(ROOT / "docs/talk/ethernet.log", ROOT / "docs/talk/infiniband.log")
    assert "ethernet took 12.82 times as long as infiniband" in out
    assert "these logs do not say" in out


# --- Figures -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    """Imports PyTorch, which the other tests here do without."""
    return importlib.import_module("demo_coco_resnet18")


def test_link_takes_the_least_time_of_all_ranks_in_each_step(demo):
    """A link of 5 ms. Jitter keeps one rank waiting in a step, the other in the next one."""
    link, wait = demo.link_and_wait([[0.005, 0.025] * 500, [0.025, 0.005] * 500])
    assert (link, wait) == (approx(0.005), approx(0.010))


@pytest.mark.parametrize(("count", "low"), [(2, 0.056), (16, 0.177)])
def test_links_time_is_a_lower_bound_that_noise_makes_lower(demo, count, low):
    """Of n normal values the least is on average 0.56 (n = 2) or 1.77 (16) deviations low."""
    draw = random.Random(0)
    ranks = [[draw.gauss(1, 0.1) for _ in range(1000)] for _ in range(count)]
    link, wait = demo.link_and_wait(ranks)
    assert 1 - link == approx(low, abs=0.01) and wait == approx(low, abs=0.01)


HOSTS = {"hosts": ["n0", "n0", "n1", "n1"]}
SLOW = [  # the ranks' own work, settings, who is named, with how many times the median's
    ([1.25, 1], {}, ("rank 0", 1.25)),
    ([1, 1, 1.3, 1.4], {}, ("rank 3", 1.4)),
    ([1, 1, 1.3, 1.4], HOSTS, ("all ranks of n1", 1.3)),
    ([1, 1, 1.1, 1.4], HOSTS, ("rank 3 on n1", 1.4)),
    ([1, 1.15], {}, None),
    ([1, 2, 2, 2], {}, None),
]


@pytest.mark.parametrize(("work", "settings", "slow"), SLOW)
def test_a_rank_or_a_node_that_works_over_a_fifth_longer_is_named(work, settings, slow):
    run = runs.Run("a", Log(records={"Run": settings}), ranks=dict(enumerate(work)))
    assert runs.slow_rank(run) == slow


def made_of(name: str, **figures: list[float]) -> runs.Run:
    """Repeats with these figures, and their medians."""
    count = len(next(iter(figures.values())))
    each = []
    for n in range(count):
        one = runs.Run(f"{name}/r{n + 1}", Log())
        one.figures = {figure: values[n] for figure, values in figures.items()}
        each.append(one)
    return runs.gather(name, each)


def test_equal_networks_are_called_different_as_rarely_as_by_chance():
    """The ranges of 4 and 4 equal runs are disjoint in 2 of C(8, 4) = 70 pairs, which is 2.9 %.
    Steps differ by 3 % from run to run.
    """
    draw = random.Random(0)
    lists = ([draw.lognormvariate(0, 0.03) for _ in range(4)] for _ in range(20_000))
    assert 200 < sum(runs.differ(*pair) for pair in zip(lists, lists, strict=True)) < 400


SAID = [  # steps of two runs, and what is said
    (
        [100, 101, 102, 103],
        [300, 301, 302, 303],
        r"2\.97 times as long in b as in a \(2\.91 to 3\.03; 4 runs each\): 200 ms",
    ),
    ([100, 101], [300, 301], r"\(2 runs each: 4 of each would show whether they differ\): 200 ms"),
    ([100], [300], r"in a and 300 ms in b \(one run each: 4 of each"),
    ([100, 101, 102, 103], [103, 104, 105, 106], "^No difference shown by 4 runs each: "),
    ([100, 100, 100, 100], [101, 101, 101, 101], "^No difference shown by 4 runs each: "),
]


@pytest.mark.parametrize(("first", "second", "said"), SAID)
def test_repeats_decide_whether_two_runs_differ(first, second, said):
    pair = made_of("a", step_ms=first), made_of("b", step_ms=second)
    assert re.search(said, report.say_difference(*pair))


def test_the_links_part_is_told_where_steps_do_not_differ():
    """On cores that others use: computing varies by more than the networks differ."""
    steps = [400, 450, 500, 550]
    slow = made_of("slow", step_ms=steps, link_ms=[91, 92, 93, 94])
    fast = made_of("fast", step_ms=steps, link_ms=[11, 12, 13, 14])
    end = r"\. The link's part of it differs: 92\.5 ms \(91\.0 to 94\.0\) in slow, 12\.5 ms .*"
    assert re.fullmatch(f".*{end}", report.say_difference(slow, fast))


def test_range_of_a_speed_up_is_that_of_all_pairs_of_repeats():
    each = []
    for processes, rates in ((2, [100, 110, 125]), (4, [180, 200, 220])):
        run = made_of(f"p{processes}", img_per_s=rates)
        run.log.records["Run"] = {"world_size": processes, "global_batch_size": 8}
        each.append(run)
    scaling = runs.scale(each)
    assert scaling.kind == "strong" and scaling.base is each[0]
    _, *figures = scaling.rows[1]
    assert figures == approx([200 / 110, 180 / 125, 220 / 100, 100 / 110])


def test_parts_that_do_not_add_up_are_a_check_that_fails():
    run = made_of("a", step_ms=[100], data_ms=[10], compute_ms=[50], exposed_ms=[30], link_ms=[5])
    assert report.failed_checks(run) == [
        "parts: those of a step add up to 90.0 ms, the step is 100 ms"
    ]
    run.figures["exposed_ms"] = 40
    assert not report.failed_checks(run)


def link(name: str, gbps: float, kind: str = "ethernet", **more: object) -> dict:
    return {"name": name, "kind": kind, "wire_Gbps": gbps, "speed_Gbps": 10} | more


CARRIED = [  # interfaces of the probe, NCCL's words, those that carried it
    ([link("eth0", 9), link("lo", 20, "loopback")], {}, ["eth0"]),
    ([link("eth0", 9), link("eth1", 8), link("eth2", 1)], {}, ["eth0", "eth1"]),
    ([link("br0", 9, virtual=True), link("eth0", 9)], {}, ["eth0"]),
    ([link("veth0", 9, virtual=True)], {}, ["veth0"]),
    ([link("eth0", 9), link("eth1", 5)], {"interfaces": ["eth1"]}, ["eth1"]),
    ([link("mlx5_0:1", 90, "infiniband"), link("eth0", 95)], {"devices": ["mlx5_0:1"]}, None),
    ([link("eth0", 9)], {"transport": "local"}, []),
    ([], {}, []),
]


@pytest.mark.parametrize(("links", "finding", "expected"), CARRIED)
def test_what_carried_the_probe_is_what_nccl_names_else_what_has_most_bytes(
    links, finding, expected
):
    found = [one["name"] for one in report.carriers(links, finding, "n0")]
    assert found == (["mlx5_0:1"] if expected is None else expected)


def test_of_a_folder_all_runs_in_it_are_compared_also_of_an_interrupted_series(tmp_path):
    for name in ("p16/r10", "p16/r9", "p2/r1", "p1/r1"):
        (tmp_path / "both" / name).mkdir(parents=True)
        (tmp_path / "both" / name / "node9.log").write_text(TEXT)
        (tmp_path / "both" / name / "node10.log").touch()
    (tmp_path / "both/p1/r2").mkdir()  # it was made before its run began
    out, err, code = run_tool(tmp_path / "both")
    assert err == "" and code == 0
    assert re.findall(r"^(p\d+): a step of", out, re.MULTILINE) == ["p1", "p2", "p16"]
    repeats = runs.find_repeats("p", [tmp_path / "both/p16"])
    assert [*repeats] == ["p/r9", "p/r10"]
    assert [file.name for file in log_files(repeats["p/r9"])] == ["node9.log", "node10.log"]


def test_a_network_that_failed_in_all_rounds_is_told_and_the_other_one_compared(tmp_path):
    """Each run had a probe. Of a start that was refused there is an empty log."""
    for label in ("bad", "good", "refused"):
        for n in (1, 2):
            (made,) = made_runs([f"= r{n}", "net eth0 ethernet 10 9"])
            made.failed = "a rank was killed" if label == "bad" else ""
            (tmp_path / label).mkdir(exist_ok=True)
            log = made.write(tmp_path / label) / "node0.log"
            if label == "refused":
                log.write_text("")
    out, err, code = run_tool(tmp_path)
    assert (err, code) == ("", 1)
    assert "bad is not scored: it failed: a rank was killed" in out
    assert "refused is not scored: no line of a rank in it" in out
    assert re.search(r"^good: a step of", out, re.MULTILINE)


def test_checks_and_warnings_of_each_repeat_are_told_with_its_name(tmp_path):
    """Also of one that is not the median; of one that failed, NCCL's words."""
    good, wrong, failed = made_runs(["= r1", "= r2", "= r3"])
    wrong.change('summary {"step_ms": 900}')
    failed.change("failed a rank was killed")
    for made in (wrong, failed):
        made.change("file nccl.node0.n0.7.log n0:7:7 [0] NCCL WARN Call to ibv_x failed")
    for made in (good, wrong, failed):
        made.write(tmp_path)
    out, *_ = run_tool(tmp_path)
    assert re.search(r"^- check failed in \S+/r2: parts: ", out, re.MULTILINE)
    assert len(re.findall(r"^- NCCL warned in \S+/r2, GPU 0 of n0: ", out, re.MULTILINE)) == 1
    assert re.search(r"/r3 is left out: it failed: a rank was killed; NCCL warned, GPU 0", out)


def test_what_nccl_wrote_in_an_earlier_run_of_a_log_is_not_told(tmp_path):
    (made,) = made_runs(["= a"])
    log = made.write(tmp_path) / "node0.log"
    first = "n0:7:7 [0] NCCL WARN Call to ibv_x failed\nrun.py: error: x\n"
    between = f"run.py: {log} has a run already, to which this one is appended\n"
    log.write_text(first + between + made.text())
    assert "NCCL warned" not in run_tool(log)[0]
    log.write_text(between + first + made.text())
    assert "NCCL warned" in run_tool(log)[0]


def test_a_failed_run_of_another_number_of_processes_makes_no_scaling(tmp_path):
    failed, *others = made_runs(["= p2", "failed x", "= a", "= b"])
    failed.records["run"] = {"world_size": 2}
    others[1].records["run"] = {"max_steps": 9}
    out, err, code = run_tool(*(one.write(tmp_path) for one in (failed, *others)))
    assert (out, code) == ("", 2) and "number of steps differs" in err


# --- Which lines belong to a run, and whether it is whole ----------------------------------------

LATE = [  # ranks that have written, ranks that have ended, the problems
    ([0, 1, 2, 3], [0, 1], []),
    ([0, 1, 2, 3], [0, 2, 3], ["no end line from rank 1"]),
]


@pytest.mark.parametrize(("written", "ended", "problems"), LATE)
def test_node_0s_whole_log_is_enough_where_another_nodes_comes_late(written, ended, problems):
    records = {"Run": {"world_size": 4, "nodes": 2, **HOSTS}, "Summary": {"step_ms": 9}}
    ended = dict.fromkeys(ended, 9.0)
    run = runs.make_run("a", Log(records=records, ranks={*written}, ended=ended, ours=True))
    assert run.problems == problems


def test_an_earlier_attempt_lends_nothing_to_the_last():
    second = TEXT.replace('"start_step": 0', '"start_step": 5')
    assert runs.make_run("a", log_of(TEXT + second)).complete
    assert not runs.make_run("a", log_of(TEXT + second.replace("Summary {", "Summary"))).complete


@pytest.mark.parametrize("lost", [r"0\] Run {", r"0\] Summary {", r"0\] Cleanup", r"1\] Cleanup"])
def test_a_run_that_lacks_an_essential_line_is_incomplete(lost):
    one_node = TEXT.replace('"n1"]', '"n0"]').replace('"nodes": 2', '"nodes": 1')
    lines = one_node.splitlines(keepends=True)
    text = "".join(line for line in lines if not re.search(r"\[CPU " + lost, line))
    run = runs.make_run("a", log_of(text))
    assert not run.complete and not {"wall_s", "step_ms", "img_per_s"} & run.figures.keys()


DRESSED = [
    "[default0]:{}",
    "2025-01-01T10:00:00.123Z {}",
    "\x1b[32m{}\x1b[0m",
    "{} W0101 torchrun] noise",
    "é\x00\xff[rank0]: Traceback\n\n{}",
    "n0:41:77 [0] NCCL INFO Channel 00/02 :    0   1\n{}",
    "{}\n[CPU 0] Summary: 2 epochs, 20 steps, 37.0 img/s; replicas identical: True",
]


@pytest.mark.parametrize("dress", DRESSED)
def test_prefixes_colours_and_foreign_lines_change_nothing(dress):
    dressed = "\n".join(dress.format(line) for line in TEXT.splitlines())
    assert log_of(dressed) == log_of(TEXT)
    assert log_of(dressed.replace("[CPU ", "[MPS ")).ended == log_of(TEXT).ended


@pytest.mark.parametrize("kind", ["gz", "UTF-16"])
def test_a_log_that_was_compressed_or_was_written_by_powershell_is_read(tmp_path, kind):
    file = tmp_path / ("run.log.gz" if kind == "gz" else "run.log")
    file.write_bytes(gzip.compress(TEXT.encode()) if kind == "gz" else TEXT.encode(kind))
    out, err, code = run_tool(file)
    assert "run: a step of " in out and (err, code) == ("", 0)


def test_a_compressed_log_that_was_cut_off_is_an_error_in_one_line(tmp_path):
    (tmp_path / "run.log.gz").write_bytes(gzip.compress(TEXT.encode())[:-100])
    out, err, code = run_tool(tmp_path / "run.log.gz")
    assert out == "" and code == 2 and re.fullmatch(r".*run\.log\.gz: cannot be read: .*\n", err)


def test_a_line_torn_at_any_place_gives_its_loss_or_none():
    line = "[CPU 0] Epoch 1 | Step 3 | Loss: 12.0805 | 66.1 img/s | data 1.0 ms | step 60.5 ms | "
    for cut in range(len(line)):
        for after in ("[CPU 1] Epoch 1 | Step 3 | Loss: 3.0000", " noise", "\n"):
            for text in (line[:cut] + after + line[cut:], line[:cut] + after):
                assert [loss for _, loss in log_of(text).curve] in ([], [12.0805])


def test_of_several_runs_in_one_log_the_last_one_counts():
    log = log_of(TEXT + TEXT.replace('"start_step": 0', '"resume": false, "start_step": 0'))
    assert (log.earlier, log.attempts) == (1, 1) or log.attempts == 2


def test_counters_of_another_program_are_left_out():
    assert not log_of('Counters {"steps": 5}\n').counters


# --- Pictures and files --------------------------------------------------------------------------


def png_size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


DRAWN = [  # logs, how many pictures beside each other
    ("not_whole/stopped.log", 1),  # with nothing to draw
    ("strong_scaling/p1.log strong_scaling/p2.log strong_scaling/p4.log", 2),
    ("repeats/far.log repeats/close.log", 3),  # parts, the probe's sizes, the losses
]


@pytest.mark.parametrize(("logs", "count"), DRAWN)
def test_picture_of_much_and_of_little(tmp_path, logs, count):
    pytest.importorskip("matplotlib")
    run_tool(*(REPORTS / log for log in logs.split()), "--plot", tmp_path / "run.png")
    assert png_size(tmp_path / "run.png") == (160 + 800 * count, 704)


@pytest.mark.parametrize(("case", "logs"), [("repeats", "far"), ("strong_scaling", "p1 p2")])
def test_a_name_with_dollars_is_no_formula(tmp_path, case, logs):
    pytest.importorskip("matplotlib")
    words = [f"$\\{name}_{{$={REPORTS / case / name}.log" for name in logs.split()]
    assert run_tool(*words, "--plot", tmp_path / "run.png")[1:] == ("", 0)


def test_sizes_within_a_decade_have_no_formula_at_their_axis():
    plot = pytest.importorskip("analysis.plot")
    figure = plot.Figure()
    axis = figure.subplots()
    plot.draw_bandwidth(axis, {"a": {1 << 20: [0.1], 1 << 22: [0.2]}})
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axis.get_xticklabels(which="both")]
    assert "1 MB" in labels and "$" not in "".join(labels)


def repeats_of(name: str) -> runs.Run:
    paths = runs.find_repeats(name, [str(REPORTS / "repeats" / name)])
    return runs.gather(name, [runs.make_run(one, read_log(path)) for one, path in paths.items()])


def test_parts_of_a_bar_stand_on_each_other_and_curves_are_bus_bandwidth():
    plot = pytest.importorskip("analysis.plot")
    from matplotlib.container import BarContainer

    each, axis = [repeats_of("slow"), repeats_of("fast")], plot.Figure().subplots()
    plot.draw_split(axis, each)
    bars = [bar for bar in axis.containers if isinstance(bar, BarContainer)]
    found = {bar.get_label(): [(one.get_y(), one.get_height()) for one in bar] for bar in bars}
    for n, run in enumerate(each):
        parts = runs.parts_of(run)
        assert found["computing"][n] == approx((0, parts["compute_ms"]))
        below = parts["compute_ms"] + parts["data_ms"]
        assert found["link"][n] == approx((below, parts["link_ms"]))
    size = {"bytes": 8, "algbw_GBps": 1, "busbw_GBps": 1.5}
    run = runs.make_run("a", Log(records={"Probe": {"sizes": [size]}}))
    assert plot.bandwidth_of(run) == {8: [12.0]}


def test_a_value_stands_beside_its_bar_and_below_the_title_also_with_a_wide_range():
    plot = pytest.importorskip("analysis.plot")
    wide = {"step_ms": [100, 200, 900], "data_ms": [0, 0, 0], "compute_ms": [90, 190, 890]}
    run, axis = made_of("a", **wide, exposed_ms=[10, 10, 10]), plot.Figure().subplots()
    plot.draw_split(axis, [run])
    (text,) = axis.texts
    assert text.get_text() == "200 ms" and text.xy[0] >= 0.25 and text.xy[1] == 200
    assert axis.get_ylim()[1] > 900


def test_a_picture_of_several_numbers_of_processes_has_their_speed_up(tmp_path):
    """Beside the ideal one, which begins at 1 with the fewest processes."""
    plot = pytest.importorskip("analysis.plot")
    words = [REPORTS / "strong_scaling" / f"p{count}.log" for count in (1, 2, 4)]
    each, axis = [runs.make_run("a", read_log(log)) for log in words], plot.Figure().subplots()
    plot.draw_speed_up(axis, runs.scale(each[1:]))
    assert [*axis.lines[0].get_ydata()] == [1, 2]
    run_tool(*words, "--plot", tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text()  # a word stands in a comment beside its shape
    assert re.search("speed-up", drawn) and re.search("ideal", drawn)


def test_losses_and_top1_are_drawn_over_the_time_of_training_and_validation():
    line = (
        "[CPU 0] Epoch 1 | Step {} | Loss: {:.4f} | 9.9 img/s | data 1.0 ms | step 500.0 ms | E\n"
    )
    text = '[CPU 0] Run {"start_step": 0}\n' + line.format(1, 4) + line.format(6, 3)
    text += "[CPU 0] Epoch 1 validation | Top-1: 41.67% | 48 images | 2.00s | baseline 9.00%\n"
    log = log_of(text)
    assert log.curve == [(0.5, 4.0), (3.0, 3.0)] and log.top1 == [(5.0, 41.67)]


def test_report_names_its_picture_from_where_it_lies(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept here" / "compare.md"
    kept.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    logs = [REPORTS / "not_whole" / f"{name}.log" for name in ("slow", "stopped")]
    out, _, _ = run_tool(*logs, "--plot", "of both.png", "--report", kept)
    (line,) = re.findall(r"^!\[.*\n\n", kept.read_text(), re.MULTILINE)
    address = re.fullmatch(r"!\[.+\]\((\S+)\)\n\n", line)[1]
    assert (kept.parent / unquote(address)).resolve() == tmp_path / "of both.png"
    assert kept.read_text().replace(line, "") == out


OUTPUTS = [
    ("TOOL | :; exit ${PIPESTATUS[0]}", 141, ""),
    ("PYTHONIOENCODING=ascii TOOL >/dev/null", 0, ""),
    ("TOOL --plot x.png", 2, "error: --plot needs matplotlib"),
]


@pytest.mark.parametrize(("command", "code", "said"), OUTPUTS)
def test_output_that_cannot_go_anywhere(tmp_path, command, code, said):
    """-S: without any installed package."""
    words = [sys.executable, "-S", TOOL, f"a={WHOLE}", f"bé={WHOLE}"]
    text = command.replace("TOOL", " ".join(f"'{word}'" for word in words))
    how = {"capture_output": True, "text": True, "timeout": 60 * FACTOR, "cwd": tmp_path}
    done = subprocess.run(["bash", "-c", text], **how)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == bool(said), done.stderr


WRONG = [  # words, and what the one line says
    (["none.log"], "none.log: no such file or folder"),
    (["a=", WHOLE], "write NAME=PATH"),
    ([WHOLE, "--link_gbps", "b=1"], "no run is named b"),
    ([WHOLE, "--link_gbps", "fast"], "not a number above 0"),
    ([WHOLE, "--report", "none/x.md"], "none/x.md: no such folder"),
    ([ROOT / "pyproject.toml"], "no line of the demo in it"),
    ([], "give at least one run"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_use_is_one_line(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    out, err, code = run_tool(*words)
    assert (out, code, err.count("\n")) == ("", 2, 1) and said in err


UNLIKE = [  # a setting of the second run, what is said; None: it may differ
    ({"precision": "fp32"}, "precision differs: bf16 in a, fp32 in b"),
    ({"images": 9}, "image count differs: 1280 in a, 9 in b"),
    ({"dummy": True}, "use of random images (--dummy) differs: False in a, True in b"),
    ({"max_steps": 9}, "number of steps differs: 20 in a, 9 in b"),
    ({"lr": 0.1}, None),
    ({"world_size": 2, "global_batch_size": 48}, "neither strong nor weak scaling"),
]


@pytest.mark.parametrize(("settings", "said"), UNLIKE)
def test_unlike_runs_are_refused_with_what_differs(tmp_path, settings, said):
    first, second = made_runs(["= a", 'run {"dummy": false}', "= b"])
    second.records["run"] = {"dummy": False} | settings
    out, err, code = run_tool(*(one.write(tmp_path) for one in (first, second)))
    if said:
        assert (out, code) == ("", 2) and said in err
    else:
        assert code == 0 and re.search(r"^\| lr +\| +not set \| +0\.1 \|$", out, re.MULTILINE)


# --- What the real programs write ----------------------------------------------------------------


def test_each_line_of_script_and_counters_is_known(tmp_path):
    """A new wording of the script has to be told to analysis/logs.py."""
    words = [*make_set(tmp_path / "images", 6), "--weights", "none", "--num_epochs", 1]
    words += ["--image_size", 40, "--batch_size", 2, "--workers", 0, "--log_every", 1]
    (run,) = run_forked([(0, words)])
    how = {"check": True, "timeout": 60 * FACTOR, "capture_output": True, "text": True}
    counted = subprocess.run([sys.executable, ROOT / "tools/counters.py"], **how).stdout
    (tmp_path / "run.log").write_text(counted + run.out + counted)
    assert "run: a step of " in run_tool(tmp_path / "run.log")[0]
    log = read_log(tmp_path / "run.log")
    assert log.ours and log.attempts == 1 and len(log.curve) == 3
    assert log.records.keys() == {"Run", "Summary"} and len(*log.counters.values()) == 2
    assert log.last_step == {0: 3}
    run = runs.make_run("real", log)
    assert run.complete and runs.wrong_sum(run) is None, run.problems
    assert run.gradient_bytes == 4 * run.setting("parameters")
    assert os.path.basename(TOOL)


def test_what_the_launcher_says_at_its_end_is_why_a_run_has_failed(capfd):
    """As run.py writes it, also below a whole log; a later start takes it back."""
    from run import tell

    start, error = (tell("run.py", text) for text in ("2026-11-28 06:43:46 torchrun", "error: x"))
    capfd.readouterr()
    assert log_of((start + error).decode()).failed == "x"
    assert runs.make_run("a", log_of(TEXT + error.decode())).problems == ["it failed: x"]
    assert log_of((error + start).decode()).failed is None
    assert log_of(start.decode()).ours
