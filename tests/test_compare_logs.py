"""tools/compare_logs.py: its reports on runs whose cause is known, damaged logs, its pictures.

A folder in data/reports holds logs and report.txt: what the case shows, then commands, each with
all that it prints. data/made_runs.txt has reports on made-up runs. `pytest --record
tests/test_compare_logs.py` writes both anew: read their diff.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import shlex
import subprocess
import sys
from urllib.parse import unquote

import pytest
from pytest import approx

import compare_logs
from analysis import network, report, runs
from analysis.logs import Log, log_files, parse_lines, read_log
from support.datasets import make_set
from support.forks import run_forked
from support.made_logs import REPORTS, made_runs
from support.processes import FACTOR, ROOT

TOOL = ROOT / "tools" / "compare_logs.py"
WHOLE = REPORTS / "unfinished" / "whole.log"
TEXT = WHOLE.read_text()
SCALED = [REPORTS / "strong_scaling" / f"p{count}.log" for count in (1, 2, 4)]


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


def made_of(name: str, **figures: list[float]) -> runs.Run:
    """Repeats with these figures, and their medians."""
    each = []
    for n in range(len(figures["step_ms"])):
        one = runs.Run(f"{name}/r{n + 1}", Log())
        one.figures = {figure: values[n] for figure, values in figures.items()}
        each.append(one)
    return runs.gather(name, each)


# --- Recorded reports ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(REPORTS.glob("*/report.txt")), ids=lambda f: f.parent.name)
def test_report_is_as_recorded(file, monkeypatch, assert_recorded):
    monkeypatch.chdir(file.parent)
    recorded = file.read_text()
    text = recorded.partition("\n$ ")[0]
    for command in re.findall(r"^\$ (compare_logs\.py.*)$", recorded, re.MULTILINE):
        out, err, code = run_tool(*shlex.split(command)[1:])
        text += f"\n$ {command}\n{out}{err}" + (f"exit code {code}\n" if code else "")
    assert_recorded(file, text)


def test_report_on_made_up_runs_is_as_recorded(tmp_path, assert_recorded):
    file = ROOT / "tests/data/made_runs.txt"
    text, *cases = file.read_text().split("\n== ")
    for n, case in enumerate(cases):
        made, *_ = case.partition("\n--\n")
        folders = [run.write(tmp_path / str(n)) for run in made_runs(made.splitlines()[1:])]
        out, *_ = re.split(r"\n\n(?:Exposed communication: |Figures\n)", run_tool(*folders)[0])
        text += f"\n== {made}\n--\n{out.strip()}\n"
    assert_recorded(file, text)


def test_of_logs_with_wall_times_alone_the_ratio_is_told():
    """Of the talk's: 14939.79 s and 1164.99 s."""
    out, *_ = run_tool(ROOT / "docs/talk/ethernet.log", ROOT / "docs/talk/infiniband.log")
    assert "ethernet took 12.82 times as long as infiniband" in out
    assert "these logs do not say" in out


# --- Figures -------------------------------------------------------------------------------------


def test_link_takes_the_least_time_of_all_ranks_in_each_step():
    """A link of 5 ms. Jitter keeps one rank waiting in a step, the other in the next one."""
    from demo_coco_resnet18 import link_and_wait  # with PyTorch, which takes seconds

    assert link_and_wait([[0.005, 0.025] * 9, [0.025, 0.005] * 9]) == approx((0.005, 0.010))


HOSTS = {"hosts": ["n0", "n0", "n1", "n1"]}
SLOW = [  # the ranks' own work, settings, who is named, with how many times the median's
    ([1.25, 1], {}, ("rank 0", 1.25)),
    ([1, 1, 1.3, 1.4], HOSTS, ("all ranks of n1", 1.3)),
    ([1, 1, 1.1, 1.4], HOSTS, ("rank 3 on n1", 1.4)),
    ([1, 1.15], {}, None),
    ([1, 2, 2, 2], {}, None),
]


@pytest.mark.parametrize(("work", "settings", "slow"), SLOW)
def test_a_rank_or_node_that_works_a_fifth_longer_is_named(work, settings, slow):
    run = runs.Run("a", Log(records={"Run": settings}), ranks=dict(enumerate(work)))
    assert runs.slow_rank(run) == slow


SAID = [  # steps of two runs, and what is said
    ([100, 101, 102, 103], [300, 301, 302, 303], r" in a \(2\.91 to 3\.03; 4 runs each\): 200 ms"),
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
        run = made_of(f"p{processes}", step_ms=[9, 9, 9], img_per_s=rates)
        run.log.records["Run"] = {"world_size": processes, "global_batch_size": 8}
        each.append(run)
    scaling = runs.scale(each)
    assert scaling.kind == "strong" and scaling.base is each[0]
    _, *figures = scaling.rows[1]
    assert figures == approx([200 / 110, 180 / 125, 220 / 100, 100 / 110])


def link(name: str, gbps: float, **more: object) -> dict:
    return {"name": name, "kind": "ethernet", "wire_Gbps": gbps} | more


CARRIED = [  # interfaces of the probe, NCCL's words, those that carried it
    ([link("eth0", 9), link("lo", 20, kind="loopback")], {}, ["eth0"]),
    ([link("eth0", 9), link("eth1", 8), link("eth2", 1)], {}, ["eth0", "eth1"]),
    ([link("br0", 9, virtual=True), link("eth0", 9)], {}, ["eth0"]),
    ([link("veth0", 9, virtual=True)], {}, ["veth0"]),
    ([link("eth0", 9), link("eth1", 5)], {"interfaces": ["eth1"]}, ["eth1"]),
    ([link("mlx5_0:1", 90), link("eth0", 95)], {"devices": ["mlx5_0:1"]}, ["mlx5_0:1"]),
    ([link("eth0", 9)], {"transport": "local"}, []),
    ([], {}, []),
]


@pytest.mark.parametrize(("links", "finding", "names"), CARRIED)
def test_what_carried_the_probe_by_nccls_words_or_the_bytes(links, finding, names):
    assert [one["name"] for one in network.carriers(links, finding, "n0")] == names


# --- Which runs, and whether they are whole ------------------------------------------------------


def test_all_runs_of_a_folder_are_compared_even_if_interrupted(tmp_path):
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


def test_a_failed_network_is_told_and_the_other_one_compared(tmp_path):
    """Each run had a probe. Of a start that was refused there is an empty log."""
    for label in ("bad", "good", "refused"):
        for n in (1, 2):
            (made,) = made_runs([f"= r{n}", "net eth0 ethernet 10 9"])
            made.failed = "a rank was killed" if label == "bad" else ""
            log = made.write(tmp_path / label) / "node0.log"
            if label == "refused":
                log.write_text("")
    out, err, code = run_tool(tmp_path)
    assert (err, code) == ("", 1)
    assert "bad is not scored: it failed: a rank was killed" in out
    assert "refused is not scored: no line of a rank in it" in out
    assert re.search(r"^good: a step of", out, re.MULTILINE)


def test_checks_and_warnings_are_told_with_the_repeats_name(tmp_path):
    """Also of one that is not the median; of one that failed, NCCL's words."""
    good, wrong, failed = made_runs(["= r1", "= r2", "= r3"])
    wrong.change('summary {"step_ms": 900}')
    failed.change("failed a rank was killed")
    for made in (wrong, failed):
        made.change("file nccl.node0.n0.7.log n0:7:7 [0] NCCL WARN Call to ibv_x failed")
    for made in (good, wrong, failed):
        made.write(tmp_path)
    out, *_ = run_tool(tmp_path)
    assert re.findall(r"^- check failed in \S+/(r\d): parts: ", out, re.MULTILINE) == ["r2"]
    assert len(re.findall(r"^- NCCL warned in \S+/r2, GPU 0 of n0: ", out, re.MULTILINE)) == 1
    assert re.search(r"/r3 is left out: it failed: a rank was killed; NCCL warned, GPU 0", out)


def test_nccls_words_in_an_earlier_run_of_a_log_are_not_told(tmp_path):
    (made,) = made_runs(["= a"])
    log = made.write(tmp_path) / "node0.log"
    warning = "n0:7:7 [0] NCCL WARN Call to ibv_x failed\n"
    between = f"run.py: {log} has a run already, to which this one is appended\n"
    for before, told in (
        (f"{warning}run.py: error: x\n{between}", False),
        (f"{between}{warning}", True),
        (f"{warning}{TEXT}", False),
        (f"{TEXT}{warning}", True),
    ):
        log.write_text(before + made.text())
        assert ("NCCL warned" in run_tool(log)[0]) == told, before


def test_node_0s_log_is_enough_where_another_nodes_comes_late():
    records = {"Run": {"world_size": 4, "nodes": 2, **HOSTS}, "Summary": {"step_ms": 9}}
    log = Log(records=records, ranks={0, 1, 2, 3}, ended={0: 9.0, 1: 9.0}, ours=True)
    assert runs.make_run("a", log).complete
    log.ended = {0: 9.0, 2: 9.0, 3: 9.0}
    assert runs.make_run("a", log).problems == ["no end line from rank 1"]


def test_of_several_runs_or_attempts_in_a_log_the_last_counts():
    resumed = TEXT.replace('"start_step": 0', '"start_step": 5')
    assert runs.make_run("a", log_of(TEXT + resumed)).complete
    assert not runs.make_run("a", log_of(TEXT + resumed.replace("Summary {", "Summary"))).complete
    probe = TEXT[: TEXT.index("[CPU 0] Run")]
    for second in (TEXT, TEXT.replace('"start_step": 0', '"resume": false, "start_step": 0')):
        anew = log_of(TEXT + second)  # step_log.py's record says nothing of --resume
        assert (anew.earlier, anew.attempts) == (1, 1) and "Probe" in anew.records
        assert "Probe" not in log_of(TEXT + second.removeprefix(probe)).records
    assert (log_of(TEXT + resumed).earlier, log_of(TEXT + resumed).attempts) == (0, 2)


@pytest.mark.parametrize("lost", [r"0\] Run {", r"0\] Summary {", r"0\] Cleanup", r"1\] Cleanup"])
def test_a_run_that_lacks_an_essential_line_is_incomplete(lost):
    one_node = TEXT.replace('"n1"]', '"n0"]').replace('"nodes": 2', '"nodes": 1')
    text = re.sub(rf"\[CPU {lost}.*\n", "", one_node)
    run = runs.make_run("a", log_of(text))
    assert text != one_node and not run.complete
    assert not {"wall_s", "step_ms", "img_per_s"} & run.figures.keys()


# --- Lines ---------------------------------------------------------------------------------------

DRESSED = [
    "[default0]:{}",
    "2025-01-01T10:00:00.123Z {}",
    "{} W0101 torchrun] noise",
    "é\x00\xff[rank0]: Traceback\n\n{}",
    "n0:41:77 [0] NCCL INFO Channel 00/02 :    0   1\n{}",
    '{}\n[CPU 0] Summary: 2 epochs, 20 steps, 37.0 img/s\nCounters {{"steps": 5}}',
]


@pytest.mark.parametrize("dress", DRESSED)
def test_prefixes_colours_and_foreign_lines_change_nothing(dress):
    dressed = "\n".join(dress.format(line) for line in TEXT.splitlines())
    assert log_of(dressed) == log_of(TEXT)
    assert log_of(dressed.replace("[CPU ", "[MPS ")).ended == log_of(TEXT).ended
    coloured = re.sub(r"(\[CPU \d\])", "\x1b[36m\\1\x1b[0m", dressed)
    assert log_of(coloured) == log_of(TEXT)


def test_a_log_that_gzip_or_powershell_has_written_is_read(tmp_path):
    packed, utf16 = tmp_path / "run.log.gz", tmp_path / "run.log"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    utf16.write_bytes(TEXT.encode("UTF-16"))
    for file in (packed, utf16):
        out, err, code = run_tool(file)
        assert "run: a step of " in out and (err, code) == ("", 0)
    packed.write_bytes(packed.read_bytes()[:-100])
    out, err, code = run_tool(packed)
    assert out == "" and code == 2 and re.fullmatch(r".*run\.log\.gz: cannot be read: .*\n", err)


def test_a_line_torn_at_any_place_gives_its_loss_or_none():
    line = "[CPU 0] Epoch 1 | Step 3 | Loss: 12.0805 | 66.1 img/s | data 1.0 ms | step 60.5 ms | "
    for cut in range(len(line)):
        for after in ("[CPU 1] Epoch 1 | Step 3 | Loss: 3.0000", " noise", "\n"):
            for text in (line[:cut] + after + line[cut:], line[:cut] + after):
                assert [loss for _, loss in log_of(text).curve] in ([], [12.0805])


# --- Pictures and files --------------------------------------------------------------------------


DRAWN = [  # logs, how many pictures beside each other
    ([REPORTS / "unfinished/stopped.log"], 1),  # with nothing to draw
    (SCALED, 2),
    ([REPORTS / "repeats/slow", REPORTS / "repeats/fast"], 3),  # parts, probe's sizes, losses
]


@pytest.mark.parametrize(("logs", "count"), DRAWN)
def test_picture_of_much_and_of_little(tmp_path, logs, count):
    """A name with dollars is no formula."""
    pytest.importorskip("matplotlib")
    names = [f"$\\{n}_{{$={log}" for n, log in enumerate(logs)]
    _, err, _ = run_tool(*names, "--plot", tmp_path / "run.png")
    drawn = (tmp_path / "run.png").read_bytes()
    assert err == "" and drawn[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(drawn[n : n + 4], "big") for n in (16, 20))
    assert (width, height) == (160 + 800 * count, 704)


def test_a_bar_has_the_parts_of_a_step_and_a_curve_bus_bandwidth():
    """The step's value stands beside its bar and below the title, also with a wide range."""
    plot = pytest.importorskip("analysis.plot")
    from matplotlib.container import BarContainer

    figures = {"step_ms": [105, 205, 905], "compute_ms": [90, 190, 890], "data_ms": [5, 5, 5]}
    run = made_of("a", **figures, exposed_ms=[10] * 3, link_ms=[8] * 3)
    axis = plot.Figure().subplots()
    plot.draw_split(axis, [run])
    bars = [bar for bar in axis.containers if isinstance(bar, BarContainer)]
    places = {bar.get_label(): (bar[0].get_y(), bar[0].get_height()) for bar in bars}
    assert places == {
        "computing": (0, 190),
        "waiting for images": (190, 5),
        "link": (195, 8),
        "waiting for ranks": (203, 2),
    }
    (text,) = axis.texts
    assert text.get_text() == "205 ms" and text.xy[0] >= 0.25 and text.xy[1] == 205
    assert axis.get_ylim()[1] > 905
    assert plot.whiskers([205], [[105, 205, 905]]) == [[100], [700]]
    size = {"bytes": 8, "algbw_GBps": 1, "busbw_GBps": 1.5}
    run = runs.make_run("a", Log(records={"Probe": {"sizes": [size]}}))
    assert plot.bandwidth_of(run) == {8: [12.0]}


def test_speed_up_stands_beside_the_ideal_line():
    """Which begins at 1 with the fewest processes."""
    plot = pytest.importorskip("analysis.plot")
    each = [runs.make_run("a", read_log(log)) for log in SCALED[1:]]
    axis = plot.Figure().subplots()
    plot.draw_speed_up(axis, runs.scale(each))
    ideal, measured, *_ = axis.lines
    assert [*ideal.get_ydata()] == [1, 2]
    assert [*measured.get_ydata()] == approx([1, 177.8 / 106.7], rel=1e-3)


def test_losses_and_top1_are_drawn_over_the_time_of_training():
    line = "[CPU 0] Epoch 1 | Step {} | Loss: {:.4f} | 9.9 img/s | data 1.0 ms | step 500.0 ms |\n"
    text = '[CPU 0] Run {"start_step": 0}\n' + line.format(1, 4) + line.format(6, 3)
    text += "[CPU 0] Epoch 1 validation | Top-1: 41.67% | 48 images | 2.00s | baseline 9.00%\n"
    log = log_of(text)
    assert log.curve == [(0.5, 4.0), (3.0, 3.0)] and log.top1 == [(5.0, 41.67)]


def test_report_names_its_picture_from_where_it_lies(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept here" / "compare.md"
    kept.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    logs = [REPORTS / "unfinished" / f"{name}.log" for name in ("slow", "timed-out")]
    out, _, _ = run_tool(*logs, "--plot", "of both.png", "--report", kept)
    (line,) = re.findall(r"^!\[.*\n\n", kept.read_text(), re.MULTILINE)
    address = re.fullmatch(r"!\[.+\]\((\S+)\)\n\n", line)[1]
    assert (kept.parent / unquote(address)).resolve() == tmp_path / "of both.png"
    assert "n1<4>" in out  # NCCL's, which looks like HTML
    assert kept.read_text().replace(line, "") == out.replace("<", "&lt;")


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


def test_repeats_of_one_run_that_are_unlike_are_refused(tmp_path):
    """Their median would be of two things."""
    first, second, third = made_runs(["= a/r1", "= a/r2", "= b"])
    second.records["run"] = {"precision": "fp32"}
    for one in (first, second, third):
        one.write(tmp_path)
    out, err, code = run_tool(tmp_path / "a", tmp_path / "b")
    assert (out, code) == ("", 2) and "precision differs: bf16 in a/r1, fp32 in a/r2" in err


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


def test_why_a_run_failed_is_what_the_launcher_says_at_its_end(capfd):
    """As run.py writes it, also below a whole log; a later start takes it back."""
    from run import tell

    start, error = (tell("run.py", text) for text in ("2026-11-28 06:43:46 torchrun", "error: x"))
    capfd.readouterr()
    assert log_of((start + error).decode()).failed == "x"
    assert runs.make_run("a", log_of(TEXT + error.decode())).problems == ["it failed: x"]
    assert log_of((error + start).decode()).failed is None
    assert log_of(start.decode()).ours
