"""What a step would take over another link: the model by hand, and against runs that were made."""

import json
import os
import re
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from pytest import approx

import benchmark
from analysis.cost_model import estimate_step, exposed_seconds, waited_seconds
from analysis.runs import read_buckets
from benchmarks import links
from support.datasets import make_set
from support.forks import SMALL
from support.nodes import require_namespaces
from support.processes import LONG, refusal, start
from test_benchmark import Noted
from test_compare_logs import (
    FREE,
    GIGABIT,
    HUNDRED,
    as_text,
    carried,
    compared,
    one_run,
    probed_run,
    project_first,
    read,
    run_tool,
)

# Of one_run, as DDP makes them of ResNet-18 with --bucket_cap_mb 25.
FIRST, LAST = 29_016_384 / 44_870_208, 15_853_824 / 44_870_208


# --- what is exposed of an all-reduce -----------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "small", "buckets", "exposed"),
    [
        (0.100, 0, [(1.0, 0)], 0.100),  # one bucket is complete when the backward pass ends
        (0.100, 0, [(0.6, 0.080), (0.4, 0)], 0.040),  # 60 ms are done 20 ms before the end
        (0.200, 0, [(0.6, 0.080), (0.4, 0)], 0.120),  # 120 ms end 40 ms after it, then 80 ms
        (0.000, 0, [(0.6, 0.080), (0.4, 0)], 0.0),
        # from -100 to -70, from -60 (it was not ready) to -10, and 20 ms from 0
        (0.100, 0, [(0.3, 0.100), (0.5, 0.060), (0.2, 0)], 0.020),
        # from -100 to -40, to 60 (it has waited), to 100
        (0.200, 0, [(0.3, 0.100), (0.5, 0.060), (0.2, 0)], 0.100),
        # each has a latency of 10 ms, and a part of the other 100: from -50 to 20, to 70
        (0.110, 0.010, [(0.6, 0.050), (0.4, 0)], 0.070),
    ],
)
def test_exposed_by_hand(total, small, buckets, exposed):
    assert exposed_seconds(total, small, buckets) == approx(exposed)


def made(**options):
    """A run of 140 ms of compute and 1 of data wait, whose first bucket is there 50 ms early."""
    return compared(as_text(one_run(**options)))["runs"][0]


def test_what_a_run_waited_stays_at_another_link():
    run = made(exposed_ms=60.0, probe_ms=100.0)
    # 65 ms of the first bucket from -50 to 14.7, 35.3 of the last: 50; it waited for 10 more
    assert waited_seconds(run) == approx(0.010)
    # of 300 ms: 194 to 144, and 106
    assert estimate_step(run, 0.300, 0.0) == approx(0.141 + 0.250 + 0.010)
    # of 10 ms: the last bucket's 3.5
    assert estimate_step(run, 0.010, 0.0) == approx(0.141 + 0.010 * LAST + 0.010)


def test_what_a_run_hid_beyond_its_buckets_stays_a_share():
    run = made(exposed_ms=25.0, probe_ms=100.0)  # of the 50 ms of above
    assert waited_seconds(run) == 0
    assert estimate_step(run, 0.300, 0.0) == approx(0.141 + 0.250 / 2)
    assert estimate_step(run, 0.0, 0.0) == approx(0.141)  # no link is faster than the floor


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([{"bytes": 30, "ready_ms": 5}, {"bytes": 10, "ready_ms": 0}], [(0.75, 0.005), (0.25, 0)]),
        ([{"bytes": 30, "ready_ms": 5}, {"bytes": 10}], []),  # of a part alone nothing is told
        ([{"bytes": 0, "ready_ms": 0}], []),
        (["x"], []),
        (None, []),
    ],
)
def test_buckets_are_read_whole_or_not(entries, found):
    assert read_buckets({"buckets": entries}) == found


# --- predictions --------------------------------------------------------------------------------


def predictions(*texts):
    return {(r["from"], r["to"]): r for r in compared(*texts, force=True)["cross_checks"]}


def test_measured_runs_are_predicted_from_each_other(tmp_path):
    """Of one set-up, over a link of 6.9 Gb/s, 1 Gb/s and 100 Mb/s, as they were measured."""
    words = []
    for name, options in (("free", FREE), ("gigabit", GIGABIT), ("hundred", HUNDRED)):
        (tmp_path / f"{name}.log").write_text(as_text(one_run(**options)))
        words.append(tmp_path / f"{name}.log")
    out, _ = run_tool(*words, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["cross_checks"]
    assert len(rows) == 6 and all(abs(row["error"]) < 0.15 for row in rows), rows
    # free: of 52 ms the last bucket's 18.4 are exposed, so it waited for 101 - 18.4 = 82.6 ms.
    # 44.87 MB * 8 / 52 ms = 6.90 Gb/s, all that was counted: at 0.998 Gb/s a ring takes 359.7 ms,
    # of which 232.6 - 50 + 127.1 = 309.7 are exposed: 141 + 309.7 + 82.6 = 533.3 against 542
    assert "- free -> gigabit at 998 Mb/s: predicted 533 ms, measured 542 ms (-2%)" in out
    # gigabit: 376 ms, of which 326 are exposed; it waited for 75. 376 ms are 0.9547 Gb/s, 0.9566
    # of what was counted, so that at 6.9 Gb/s a ring takes 54.4 ms: 141 + 19.2 + 75 = 235.2
    assert "- gigabit -> free at 6.9 Gb/s: predicted 235 ms, measured 242 ms (-3%)" in out


def test_a_backward_pass_hides_its_buckets_up_to_its_end():
    """Of 56 ms all but the last bucket, of 724 ms no more than the 285 ms that were left."""
    slow_cpu = {"compute_ms": 569.0, "data_ms": 0.0}
    buckets = [{"bytes": 29_016_384, "ready_ms": 285.0}, {"bytes": 15_853_824, "ready_ms": 0.0}]
    texts = [
        as_text(one_run(**slow_cpu, summary={"buckets": buckets}, **options))
        for options in (
            {"exposed_ms": 20.0, "probe_ms": 56.0, "wire_gbps": 6.41},
            {"exposed_ms": 439.0, "probe_ms": 724.0, "wire_gbps": 0.4958},
        )
    ]
    found = predictions(*texts)
    assert all(abs(row["error"]) < 0.01 for row in found.values()), found


def test_step_over_the_other_links_latency_and_bandwidth():
    """Of ever larger all-reduces: 44.87 MB take 10 ms + 44.87 MB / 1 GB/s = 54.9 ms."""
    eth = [carried("eth0", "ethernet", 10, 9.4)]
    links = ((10.0, 1.0, 54.87), (0.1, 10.0, 4.587))
    runs = [
        probed_run(
            eth,
            link={"latency_ms": latency, "bandwidth_GBps": bandwidth},
            compute_ms=139.0,
            probe_ms=took,
            # the last bucket alone is exposed, with the latency that each bucket has
            exposed_ms=latency + (took - latency) * LAST,
        )
        for latency, bandwidth, took in links
    ]
    found = {key[0]: row["predicted_s"] for key, row in predictions(*runs).items()}
    from_run1, from_run0 = (140 + a + (took - a) * LAST for a, _, took in links)
    assert found == approx({"run1": from_run1 / 1000, "run0": from_run0 / 1000}, abs=1e-4)


def test_a_log_without_buckets_predicts_nothing():
    texts = [as_text(one_run(**options, summary={"buckets": None})) for options in (FREE, GIGABIT)]
    assert predictions(*texts) == {}
    assert all(cell["best_s"] is None for cell in project_first(*texts))
    assert read(texts[0]).can_project


# --- the projection -----------------------------------------------------------------------------


def test_projection_covers_rates_and_processes():
    cells = {(c["gbps"], c["processes"]): c for c in project_first(as_text(one_run(**FREE)))}
    assert len(cells) == 7 * 11
    # floor 1 + 140 ms; 2 ranks on 2 nodes at 1 Gb/s: 2 * 14 us + 358.96 ms / 0.94148 = 381.3 ms,
    # two buckets have the latency twice; it waited for 82.6 ms
    cell = cells[1, 2]
    assert cell["step_s"] == approx((0.3813, 0.5223 + 0.0826), abs=1e-4)
    # 246.6 - 50 + 134.7 ms are exposed
    assert cell["best_s"] == approx(0.141 + 0.3313 + 0.0826, abs=1e-4)
    # 320 images, 16 a process: 20 steps on 1, 10 on 2, 1 on 1,024
    assert cell["epoch_s"][1] == approx(10 * (0.5223 + 0.0826), abs=1e-3)
    assert cells[1, 1]["epoch_s"] == approx((20 * 0.141,) * 2)  # alone it waits for nobody
    most = cells[400, 1024]
    assert most["epoch_s"] == most["step_s"]
    # at 1,024 ranks the ring's 2,046 turns of 14 us cost 28.6 ms, the tree's 20 only 0.28 ms
    assert most["tree_s"] < most["ring_s"] < most["tree_s"] + 0.0286


@pytest.mark.parametrize("exposed_ms", [0.0, 10.0, 101.0, 376.0, 900.0])
@pytest.mark.parametrize("latency_ms", [0.1, 40.0])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_best_estimate_lies_within_its_range(exposed_ms, latency_ms, backend):
    """Also of a run that waited longer, or hid more, than its link accounts for."""
    options = {"probe_ms": 376.0, "wire_gbps": 0.998, "exposed_ms": exposed_ms}
    text = one_run(world=4, **options, link={"latency_ms": latency_ms}, facts={"backend": backend})
    cells = [c for c in project_first(as_text(text)) if c["processes"] == 4]
    assert len(cells) == 7
    for cell in cells:
        low, high = cell["step_s"]
        assert low <= cell["best_s"] <= high, cell


# --- what the script writes ---------------------------------------------------------------------


def summary_of(text):
    (found,) = re.findall(r"^\[CPU 0\] Summary (\{.*\})$", text, re.MULTILINE)
    return json.loads(found)


CAP = 1 if SMALL else 4  # MiB, for several buckets


@pytest.mark.parametrize(
    ("ranks", "options", "least", "most"),
    [
        (2, f"--bucket_cap_mb {CAP}", 3, 9),
        (2, f"--bucket_cap_mb {CAP} --accumulate_steps 2", 3, 9),
        (2, "--bucket_cap_mb 1024", 1, 1),
        (1, "", 0, 0),
    ],
)
def test_script_says_when_its_buckets_were_complete(demo, tmp_path, ranks, options, least, most):
    argv = [*make_set(tmp_path / "set", 40), *options.split(), "--weights", "none"]
    argv += ["--image_size", "64", "--batch_size", "2", "--workers", "0", "--num_epochs", "1"]
    summary = summary_of(demo.run([*argv, "--max_steps", "5"], ranks).out)
    buckets = summary["buckets"]
    assert least <= len(buckets) <= most
    if not most:  # one process sends nothing
        return
    assert sum(bucket["bytes"] for bucket in buckets) == summary["wire_bytes_per_step"]
    times = [bucket["ready_ms"] for bucket in buckets]
    assert all(earlier > later for earlier, later in pairwise(times))
    # the last one is complete with the last gradient; and all within the backward pass
    assert 0 <= times[-1] < 5 and times[0] < summary["compute_ms"]


# --- benchmark.py predictions -------------------------------------------------------------------


def test_rounds_of_predictions_in_a_table(tmp_path, monkeypatch):
    """Medians of what was predicted and measured, and the errors of the rounds, each its own."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(links, "RANKS_A_NODE", [2])
    words = ["predictions", "--repeats", "3", "--data", str(tmp_path / "coco"), "--old_cpu"]
    # slow from fast's log and the other way, in s; a round each
    rounds = iter([(0.9, 1.0, 0.4, 0.5), (1.1, 1.0, 0.5, 0.4), (1.2, 1.0, 0.5, 0.5)])

    def answer(command):
        if "compare_logs.py" in command:
            slow, slow_measured, fast, fast_measured = next(rounds)
            checks = [
                {"from": "fast", "to": "slow", "predicted_s": slow, "measured_s": slow_measured},
                {"from": "slow", "to": "fast", "predicted_s": fast, "measured_s": fast_measured},
            ]
            file = re.search(r"--json (\S+)", command)[1]
            Path(file).write_text(json.dumps({"cross_checks": checks}))
        return ""

    bench = Noted([*words, "--rates", "unshaped,1gbit"], tmp_path, answer)
    rows = {row["what"]: row for row in links.measure_predictions(bench)}
    slow, fast = ("2 a node: step at slow, from fast's", "2 a node: step at fast, from slow's")
    row = rows[f"{slow} log: predicted / measured"]
    assert (row["demo"], row["reference"]) == (approx(1100), approx(1000))
    errors = {
        name: (rows[what]["demo"], rows[what]["reference"])
        for name, what in (("slow", f"{slow} log"), ("fast", f"{fast} log"))
        for what in [f"{what}: least, largest error"]
    }
    assert errors == {"slow": approx((-10, 20)), "fast": approx((-20, 25))}
    runs = [command for command in bench.commands if "two_nodes.sh" in command]
    assert len(runs) == 6 and sum("--rate 1gbit" in command for command in runs) == 3
    assert all("--gpus_per_node 2" in run and "--precision=fp32" in run for run in runs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rates 1gbit", "--rates 1gbit: give two or more"),
        ("--rates 1gbit,fast", "--rates: fast: write"),
    ],
)
def test_wrong_words_are_one_line(capsys, words, said):
    assert said in refusal(capsys, benchmark.main, f"predictions {words}")


@LONG
def test_predictions_over_real_links(sample):
    """Whether they are good is a quiet machine's to say."""
    require_namespaces()
    words = "--repeats 1 --steps 4 --batch_size 2 --rates unshaped,200mbit"
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        words = ["predictions", *words.split(), "--old_cpu", "--data", sample]
        command = [sys.executable, benchmark.__file__, *words]
        with start(command, split=True, env={"TMPDIR": folder}) as started:
            run = started.finish(timeout=900)
    for of, to in (("unshaped", "200mbit"), ("200mbit", "unshaped")):
        name = f"1 a node: step at {to}, from {of}'s log"
        assert re.search(
            rf"^{name}: predicted / measured \(ms\) +[\d.e+]+ +", run.out, re.MULTILINE
        )
        assert f"{name}: least, largest error (%)" in run.out
