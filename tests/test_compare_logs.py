"""tools/compare_logs.py: its parser against damage, its formulas against arithmetic by hand, its
verdicts against runs whose cause is known. The logs are made here, in the demo's own format."""

import contextlib
import io
import json
import math
import os
import re
import shlex
import statistics
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compare_logs
from analysis.comparable import loss_noise
from analysis.cost_model import (
    LATENCY_US,
    estimate_step,
    implied_gbps,
    payload_rate,
    ring_bytes,
    ring_seconds,
    tree_seconds,
)
from analysis.logs import parse_text, read_log
from analysis.nccl_rules import ADVICE
from analysis.nccl_text import find
from analysis.report import as_json, report
from analysis.runs import find_straggler, make_run
from analysis.units import duration
from support.processes import LONG, WITH_LONG

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "compare_logs.py"
TALK = ROOT.parent / "shared" / "talk"

PARAMETERS = 11_217_552  # ResNet-18 with an 80-class layer
GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552
QUICK = settings(
    max_examples=30 if WITH_LONG else 10,
    deadline=None,
    database=None,  # leaves no folder behind
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# --- logs in the demo's format -----------------------------------------------------------------


def carried(name, kind, stated, gbps, **more):
    """An interface of the Probe that carried `gbps` during it."""
    sent = {"tx_bytes": int(gbps * 1e8), "rx_bytes": int(gbps * 1e8), "wire_Gbps": gbps}
    return {"name": name, "kind": kind, "speed_Gbps": stated} | sent | more


def one_run(
    *,
    world=2,
    nodes=2,
    steps=20,
    epochs=2,
    per_process=16,
    images=None,
    start_step=0,
    data_ms=1.0,
    compute_ms=140.0,
    exposed_ms=101.0,
    probe_ms=52.0,
    wire_gbps=6.9,
    stated_gbps=10,
    wall_s=None,
    loss_scale=1.0,
    busy=(),
    probe=True,
    facts=None,
    summary=None,
    link=None,
):
    """A whole run's lines by rank: [(rank, text), ...] in the order in which they are written.

    busy: for the first ranks, how many times the usual their compute is. link: more of the Probe
    record.
    """
    batch = per_process * world
    images = images or batch * steps // epochs
    step_ms = data_ms + compute_ms + exposed_ms
    speed = f"{per_process / step_ms * 1000:.1f} img/s"
    wall_s = wall_s or (steps - start_step) * step_ms / 1000 + 3
    run = {
        "started": "2025-01-01T00:00:00+00:00",
        "versions": {"torch": "2.15.0"},
        "world_size": world,
        "nodes": nodes,
        "backend": "gloo",
        "hosts": [f"n{rank * nodes // world}" for rank in range(world)],
        "devices": ["cpu"] * world,
        "batch_size": per_process,
        "accumulate_steps": 1,
        "global_batch_size": batch,
        "precision": "bf16",
        "compile": False,
        "grad_compression": "none",
        "powersgd_rank": 2,
        "image_size": 64,
        "workers": 1,
        "seed": 0,
        "images": images,
        "num_epochs": epochs,
        "steps_per_epoch": steps // epochs,
        "max_steps": steps,
        "start_step": start_step,
        "parameters": PARAMETERS,
        "env": {"GLOO_SOCKET_IFNAME": "veth0"},
    }
    run |= facts or {}
    algbw = GRADIENT_BYTES / probe_ms / 1e6
    measured = {
        "world_size": world,
        "all_reduce_bytes": GRADIENT_BYTES,
        "all_reduce_ms": probe_ms,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * 2 * (world - 1) / world,
        "nodes": [
            {
                "host": f"n{node}",
                "interfaces": [
                    carried("lo", "loopback", None, 99.0),
                    carried(f"veth{node}", "ethernet", stated_gbps, wire_gbps + node / 1000),
                ],
            }
            for node in range(nodes)
        ],
    }
    measured |= link or {}
    busy = [*busy, *[1] * (world - len(busy))]
    parts = {"data_ms": data_ms, "exposed_ms": exposed_ms, "step_ms": step_ms}
    end = {
        "epochs": epochs,
        "steps": steps,
        "train_s": wall_s - 3,
        "img_per_s": batch / step_ms * 1000,
        **parts,
        "compute_ms": compute_ms * statistics.fmean(busy),
        "ranks": [
            {"rank": rank} | parts | {"compute_ms": compute_ms * times}
            for rank, times in enumerate(busy)
        ],
        "wire_bytes_per_step": GRADIENT_BYTES,
        "weights_sha256": "0123",
        "replicas_identical": True,
    }
    end |= summary or {}
    lines = [(0, f"Run {json.dumps(run)}"), (0, "Run: 2 processes")]
    if world > 1 and probe:
        said = (0, "Probe: all-reduce of 44.9 MB in 52 ms")
        lines = [(0, f"Probe {json.dumps(measured)}"), said, *lines]
    for step in range(start_step + 1, steps + 1):
        epoch = (step - 1) * epochs // steps + 1
        for rank in range(world):
            if step % 5 == 1 or step == steps:
                loss = loss_scale * (4.5 - 2 * step / steps + 0.01 * rank)
                lines.append(
                    (
                        rank,
                        f"Epoch {epoch} | Step {step} | Loss: {loss:.4f} | {speed} | "
                        f"data {data_ms:.1f} ms | step {step_ms:.1f} ms | ETA 0m 3s",
                    )
                )
        if step * epochs % steps == 0:
            for rank in range(world):
                mean = loss_scale * (4 - epoch + 0.01 * rank)
                lines.append(
                    (rank, f"Epoch {epoch} complete | Avg loss: {mean:.4f} | {speed} | 2.42s")
                )
            lines.append(
                (
                    0,
                    f"Epoch {epoch} validation | Top-1: 41.67% | 48 images | 1.23s",
                )
            )
    lines += [(0, f"Summary {json.dumps(end)}"), (0, "Summary: 2 epochs, 20 steps, 37.0 img/s")]
    for rank in range(world):
        text = duration(wall_s)
        lines.append((rank, f"Cleanup complete. Total wall time: {text} ({wall_s:.3f}s)"))
    return lines


def as_text(lines, kind="CPU"):
    return "".join(f"[{kind} {rank}] {text}\n" for rank, text in lines)


def write_folder(folder, lines, nodes=2):
    """A run's folder as the launcher writes it: nodeK.log holds the ranks of node K."""
    folder.mkdir()
    world = max(rank for rank, _ in lines) + 1
    for node in range(nodes):
        own = [(rank, text) for rank, text in lines if rank * nodes // world == node]
        (folder / f"node{node}.log").write_text(as_text(own))
    return folder


def talk_log(wall_s, losses=(1.08, 1.13, 1.31, 1.44), mean=1.8165):
    """The last lines of a log as the original demo wrote them, on one of two nodes."""
    lines = [
        (rank, f"Epoch 1 | Step {step} | Loss: {loss + 0.01 * rank:.4f}")
        for step, loss in zip((906, 911, 916, 921), losses, strict=True)
        for rank in (0, 1)
    ]
    lines.append((1, f"Epoch 1 complete | Avg loss: {mean:.4f}"))
    for rank in (0, 1):
        took = wall_s - 0.2 * rank
        lines.append((rank, f"Cleanup complete. Total wall time: {duration(took)} ({took:.3f}s)"))
    return as_text(lines, "GPU")


# The measured runs of one set-up on three rates: 64 px, batch 16, two ranks on two nodes.
FREE = {"exposed_ms": 101.0, "probe_ms": 52.0, "wire_gbps": 6.9}
GIGABIT = {"exposed_ms": 401.0, "probe_ms": 376.0, "wire_gbps": 0.998}
HUNDRED = {"exposed_ms": 3828.0, "probe_ms": 3760.0, "wire_gbps": 0.0998}


@pytest.fixture
def save(tmp_path):
    """save(name, one_run's options or a text) -> NAME=PATH."""

    def write(name, content=None, **options):
        file = tmp_path / f"{name}.log"
        file.write_text(content if content is not None else as_text(one_run(**options)))
        return f"{name}={file}"

    return write


def run_tool(*arguments, code=0):
    """Call the tool with a command line's words; returns (stdout, stderr); exit code checked."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found = compare_logs.main([str(argument) for argument in arguments])
        except SystemExit as end:
            found = end.code
    assert found == code, (found, out.getvalue()[-500:], err.getvalue())
    return out.getvalue(), err.getvalue()


def run_process(*arguments, python=(), code=0):
    """The same by a process of its own, as a user does; `python`: its options."""
    done = subprocess.run(
        [sys.executable, *python, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"MPLBACKEND": "Agg"},
    )
    assert done.returncode == code, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def error_of(*arguments, run=run_tool, **options):
    """The one line of a refused call."""
    out, err = run(*arguments, code=2, **options)
    assert out == "" and len(err.strip().splitlines()) == 1, (out, err)
    return err.strip()


def compared(*logs, **options):
    """compare() over one_run's lines given as texts."""
    runs = [make_run(f"run{i}", parse_text(text), {}) for i, text in enumerate(logs)]
    return compare_logs.compare(runs, LATENCY_US * 1e-6, **options)


def read(text, **given):
    return make_run("a", parse_text(text), given)


# --- model, by hand ----------------------------------------------------------------------------


def test_ring_bytes_by_hand():
    # 4 ranks on 2 nodes: 2 * 3/4 = 1.5; 1.5 * 44,870,208 = 67,305,312
    assert ring_bytes(GRADIENT_BYTES, 4, 2) == 67_305_312
    # 2 ranks on 2 nodes: 2 * 1/2 = 1
    assert ring_bytes(GRADIENT_BYTES, 2, 2) == GRADIENT_BYTES
    assert ring_bytes(GRADIENT_BYTES, 4, 1) == 0  # nothing leaves a single node


def test_ring_and_tree_seconds_by_hand():
    # 8 ranks, 4 nodes, 1 MB at 1 MB/s, 1 ms: 2*7 turns * 0.001 + 2*7/8 * 1 = 0.014 + 1.75
    assert ring_seconds(1e6, 8, 4, 1e6, 1e-3) == pytest.approx(1.764)
    # 4 nodes: 2 * log2(4) * 0.001 + 2 * 1 = 0.004 + 2; 5 nodes need a third level: 0.006 + 2
    assert tree_seconds(1e6, 4, 1e6, 1e-3) == pytest.approx(2.004)
    assert tree_seconds(1e6, 5, 1e6, 1e-3) == pytest.approx(2.006)
    # 2 nodes: each sends its half to the other and gets the sum's: 2 * 0.001 + 1
    assert tree_seconds(1e6, 2, 1e6, 1e-3) == pytest.approx(1.002)
    assert ring_seconds(1e6, 2, 1, 1e6, 1) == tree_seconds(1e6, 1, 1e6, 1) == 0


def test_tcp_leaves_941_of_1000():
    # 1500 - 52 = 1448 of 1500 + 38 = 1538 bytes: 0.94148
    assert payload_rate(1) * 8 / 1e6 == pytest.approx(941.48, abs=0.01)


def test_seconds_and_implied_rate_by_hand():
    # 67,305,312 * 8 = 538,442,496 bits: 0.538 s at 1 Gb/s, / 0.94148 = 0.572 s over TCP
    size = (GRADIENT_BYTES, 4, 2)
    line = ring_seconds(*size, 1e9 / 8)
    tcp = ring_seconds(*size, payload_rate(1))
    assert line == pytest.approx(0.5384, abs=1e-4) and tcp == pytest.approx(0.5719, abs=1e-4)
    # (14,939.786 - 1,164.994) / 1850 = 7.4458 s; 538.44 Mb / 7.4458 s = 72.3 Mb/s
    assert implied_gbps(*size, 13774.792 / 1850) == pytest.approx(0.0723, abs=1e-4)
    assert implied_gbps(*size, 13774.792 / 924) == pytest.approx(0.0361, abs=1e-4)


def test_estimate_keeps_the_floor():
    # 242 ms with an all-reduce of 52 ms, none of it hidden; one of 376 ms adds 324 to that: 566,
    # or all of it to the floor of 141: 517 (measured: 542)
    assert estimate_step(0.141, 0.242, 0.376, 0.052) == pytest.approx((0.566 + 0.517) / 2)
    # 200 ms with 100, half of it hidden; 200 ms: 300 if that time stays hidden, 250 if that share
    assert estimate_step(0.150, 0.200, 0.200, 0.100) == pytest.approx((0.300 + 0.250) / 2)
    # with 3,000 ms a share of half would be 1,500, but a backward pass takes 100 ms of the 150
    assert estimate_step(0.150, 0.200, 3.000, 0.100) == pytest.approx((3.100 + 3.050) / 2)
    # 542 - 376 = 166, and no link is faster than the floor of 170
    assert estimate_step(0.170, 0.542, 0.0, 0.376) == 0.170


def test_projection_predicts_other_rates_both_ways(save, tmp_path):
    out, _ = run_tool(
        save("free", **FREE),
        save("gigabit", **GIGABIT),
        save("hundred", **HUNDRED),
        "--json",
        tmp_path / "out.json",
    )
    result = json.loads((tmp_path / "out.json").read_text())
    pairs = {(row["from"], row["to"]): row for row in result["cross_checks"]}
    assert len(pairs) == 6
    for row in pairs.values():
        assert abs(row["error"]) < 0.15, row
    # free -> gigabit by hand: 44.87 MB * 8 / 52 ms = 6.90 Gb/s, all that was counted, so that a
    # ring takes 44.87 MB * 8 / 0.998 Gb/s = 359.7 ms at the other rate;
    # the mean of 242 + 359.7 - 52 = 549.7 and 141 + 359.7 = 500.7 is 525.2 against 542: -3.1 %
    row = pairs["free", "gigabit"]
    assert row["predicted_s"] == pytest.approx(0.5252, abs=0.001)
    assert row["error"] == pytest.approx(-0.031, abs=0.003)
    assert "free -> gigabit at 998 Mb/s: predicted 525 ms, measured 542 ms (-3%)" in out
    # gigabit -> hundred: 44.87 MB * 8 / 376 ms = 0.9547 Gb/s, 0.9566 of what was counted, so that
    # a ring takes 44.87 MB * 8 / (0.0998 * 0.9566 Gb/s) = 3760 ms;
    # the mean of 542 + 3760 - 376 = 3926 and 141 + 3760 = 3901 is 3913.5 against 3969
    assert pairs["gigabit", "hundred"]["predicted_s"] == pytest.approx(3.9135, abs=0.002)


def test_projection_table_covers_rates_and_processes():
    result = compared(as_text(one_run(**FREE)), as_text(one_run(**GIGABIT)))
    cells = {(c["gbps"], c["processes"]): c for c in result["projections"]["run0"]}
    assert {g for g, _ in cells} == {1, 10, 25, 56, 100, 200, 400}
    assert {n for _, n in cells} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
    # floor 1 + 140 ms; 2 ranks on 2 nodes at 1 Gb/s: 2 * 14 us + 358.96 ms / 0.94148 = 381.3 ms
    cell = cells[1, 2]
    assert cell["ring_s"] == pytest.approx(0.3813, abs=1e-4)
    assert cell["step_s"] == (pytest.approx(0.3813, abs=1e-4), pytest.approx(0.5223, abs=1e-4))
    # the mean of 242 + 381.3 - 52 and 141 + 381.3
    assert cell["best_s"] == pytest.approx((0.5713 + 0.5223) / 2, abs=1e-4)
    # 320 images, 16 a process: 20 steps on 1, 10 on 2, 1 on 1,024
    assert cell["epoch_s"][1] == pytest.approx(10 * 0.5223, abs=1e-3)
    assert cells[1, 1]["epoch_s"] == (pytest.approx(20 * 0.141),) * 2
    assert cells[400, 1024]["epoch_s"] == cells[400, 1024]["step_s"]
    # at 1,024 ranks the ring's 2,046 turns of 14 us cost 28.6 ms, the tree's 20 only 0.28 ms
    assert cells[400, 1024]["ring_s"] - 0.0286 < cells[400, 1024]["tree_s"]
    assert cells[400, 1024]["ring_s"] > cells[400, 1024]["tree_s"]


# --- the talk's logs ---------------------------------------------------------------------------

LACKING = (
    f"--steps 1850 --parameters {PARAMETERS} --processes 4 --nodes 2 --link_gbps ethernet=1 "
    "--link-gbps infiniband=56 --images 118,287 --epochs 2 --global_batch 128"
).split()


def talk_runs(tmp_path, made):
    if made:
        (tmp_path / "ethernet.log").write_text(talk_log(14939.786))
        (tmp_path / "infiniband.log").write_text(talk_log(1164.994, mean=1.7999))
    elif not TALK.is_dir():
        pytest.skip("the talk's own logs are not beside this checkout")
    folder = tmp_path if made else TALK
    return [f"{name}={folder / name}.log" for name in ("ethernet", "infiniband")]


@pytest.mark.parametrize("made", [True, False], ids=["made", "real"])
def test_talk(tmp_path, made):
    out, _ = run_process(*talk_runs(tmp_path, made), *LACKING)
    ethernet, infiniband = out.split("Verdict\n")[1].split("\ninfiniband: ")
    assert "12.82 times as long as infiniband: 4h 8m 59.79s against 19m 24.99s" in out
    assert "12.82 x faster" in out
    assert ethernet.startswith("\nethernet: Bound by its link, or by what stood in for it: 92% of")
    # 1165 s / 1850 = 0.6297 s hides 0.538 s; not hidden 0.6297 + 0.5719 = 1.2016 s: 37 min
    assert "1 Gb/s allows 19 to 37 min" in ethernet and "measured 249 min" in ethernet
    assert "6.7 times the slowest: this is not a 1 Gb/s result." in ethernet  # 249 / 37 min
    assert "a wire that ran at 72 Mb/s (1,850 steps" in ethernet
    assert "538 ms at line rate and 572 ms" in ethernet
    assert "fell back to 100 Mb/s" in ethernet
    assert infiniband.startswith("Not bound by its link: even with no overlap, all-reduces")
    # 1.5 * 44.87 MB * 8 / 56 Gb/s = 9.6 ms, * 1850 = 17.8 s, / 0.94148 = 18.9 s
    assert "take 18 to 19 s of 1,165 s (model)" in infiniband
    assert "1. the input pipeline: 51 img/s per GPU" in infiniband
    assert "1.8165" in out and "1.7999" in out and "losses part" not in out
    assert "log of 1 of 2 nodes" in out


def test_talk_with_other_options(tmp_path):
    logs = talk_runs(tmp_path, True)
    out, _ = run_tool(*logs, *LACKING, "--steps", 924)
    assert "36 Mb/s (924 steps" in out
    # what is lacking is asked for
    out, _ = run_tool(*logs)
    assert "12.82 times as long" in out and "give --steps" in out
    out, _ = run_tool(*logs, "--steps", 1850)
    assert "--link_gbps, --parameters, --processes, --nodes" in out


def test_steps_follow_from_images_epochs_and_batch():
    # 118,287 / 128 = 924.1: 925 steps an epoch
    run = read(talk_log(100.0), images=118287, epochs=2, global_batch=128)
    assert run.steps == 1850


def test_original_format_of_two_nodes_counts_gpus_per_node(tmp_path):
    for name, wall in (("a", 60.0), ("b", 50.0)):
        (tmp_path / name).mkdir()
        for node in (0, 1):
            (tmp_path / name / f"node{node}.log").write_text(talk_log(wall))
    log = read_log([tmp_path / "a"])
    assert log.ranks == {0, 1, 2, 3}
    both = [f"{name}={tmp_path / name}" for name in "ab"]
    run_tool(*both, "--processes", 4, "--nodes", 2)
    (tmp_path / "a" / "node1.log").unlink()
    run_tool(*both, "--processes", 4, "--nodes", 2)
    out, _ = run_tool(*both, "--processes", 6, "--nodes", 2, code=1)
    assert "no line from rank 2" in out


# --- verdicts ----------------------------------------------------------------------------------


def verdict_of(**options):
    other = as_text(one_run(**FREE))
    result = compared(as_text(one_run(**options)), other)
    verdict = result["verdicts"]["run0"]
    return verdict, " ".join(verdict.says)


def test_bound_by_a_link_that_delivers():
    verdict, says = verdict_of(**GIGABIT, stated_gbps=1)
    assert verdict.bound == "link" and "Bound by its link: of a step of 542 ms, compute" in says
    first = "Over TCP on veth0 (ethernet), by byte counters: the probe's all-reduce (376 ms for a "
    first += "step's 44.9 MB) ran at 998 Mb/s, 100% of the stated 1 Gb/s: the link delivers."
    assert verdict.says[0] == first
    # floor 141 + 381.3 = 522 ms a step, 20 steps: 10.4 s; 542 ms * 20 = 10.8 s is within 10 %
    assert verdict.inside and "allows 7.2 to 10 s" in says and "inside" in says
    assert "--grad_compression" in verdict.checks[0]


def test_bound_by_a_link_slower_than_stated():
    verdict, says = verdict_of(**GIGABIT, stated_gbps=10)
    assert verdict.bound == "link" and "10% of the stated 10 Gb/s" in says
    assert "not a 10 Gb/s result" in says and verdict.inside is False
    assert "ethtool veth0" in verdict.checks[0] and "100 Mb/s" not in verdict.checks[0]
    verdict, _ = verdict_of(**HUNDRED, stated_gbps=1)
    assert "fell back to 100 Mb/s" in verdict.checks[0]


def test_bound_by_input():
    verdict, says = verdict_of(data_ms=300.0, exposed_ms=20.0)
    assert verdict.bound == "input" and "data wait 300 ms (65%)" in says
    assert "--workers" in verdict.checks[0]


def test_without_a_split_nothing_bounds_it():
    verdict, says = verdict_of(summary={"compute_ms": None}, exposed_ms=125.4)
    assert verdict.bound == "unknown" and "The log does not split a step" in says


def test_bound_by_compute():
    verdict, says = verdict_of(**FREE)
    assert verdict.bound == "compute" and "compute is 140 ms (58%)" in says
    # 141 + 38.1 ms is less than 242: the wire is not to blame, and the text says so
    assert "above, though the probe found no fault" in says and "not a" not in says


def test_exposed_beyond_the_wire_is_not_the_links():
    verdict, says = verdict_of(exposed_ms=300.0, probe_ms=52.0)
    assert verdict.bound == "overlap" and "not by the wire" in says


def test_faster_than_the_link_can_be():
    _, says = verdict_of(exposed_ms=10.0, probe_ms=50.0, wire_gbps=6.9, stated_gbps=1)
    assert "faster than 1 Gb/s can be" in says


def test_straggler_is_the_first_check():
    # of 141 ms a step: 140 * 1.3 + 1 = 183 is over 1.2 times as much, 140 * 1.1 + 1 = 155 is not
    for world, busy, wanted in (
        (2, [1, 1.3], "rank 1"),
        (2, [1.3, 1], "rank 0"),
        (4, [1, 1, 1.3, 1.4], "rank 3"),
        (4, [1.4, 1, 1, 1], "rank 0"),
        (2, [1, 1.1], None),
        (4, [1, 1.4, 1.4, 1.4], None),  # three of four are the usual
        (1, [1], None),
    ):
        verdict, _ = verdict_of(world=world, nodes=1, busy=busy, per_process=32 // world)
        found = verdict.checks[0] if verdict.checks[0].startswith("rank ") else ""
        assert found.startswith(f"{wanted}:") if wanted else not found, (busy, verdict.checks)
    # more input than the others have to read makes a rank slow as well
    ranks = [{"rank": 0, "data_ms": 90, "compute_ms": 9}, {"rank": 1, "data_ms": 2}, "junk"]
    ranks += [{"rank": 2, "data_ms": 9, "compute_ms": 30}]
    assert find_straggler({"ranks": ranks}) == 0
    assert find_straggler({"ranks": ranks[1:3]}) is None


# --- verdicts by transport ----------------------------------------------------------------------

IB = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>|Using network IB"
SOCKET = "NET/Socket : Using [0]{0}:10.0.0.1<0>|Using network Socket"
ASKED = "NCCL_IB_HCA set by environment to mlx5_0.|"
CHANNEL = "|Channel 00/0 : 0[0] -> 1[0] [send] via {0}"
SENT = "the probe's all-reduce ran at"


def finding(text, *fields):
    """What tools/nccl_log.py says of NCCL's lines, parted by `|`."""
    lines = [f"n0:1:2 [0] NCCL INFO {line}\n" for line in text.format(*fields).split("|")]
    return find(lines).to_dict()


STRAY = carried("eth0", "ethernet", 1, 0.3)  # under 1 % of what the adapters carry
IPOIB = (
    carried("ib0", "ipoib", 100, 45.0, carrier="mlx5_0:1"),
    carried("mlx5_0:1", "infiniband", 100, 46.0),
)
RAILS = [carried(f"mlx5_{n}:1", "infiniband", 200, 180.0 + n) for n in range(4)]
BOND = carried("bond0", "ethernet", 50, 24.5, members=["eth0", "eth1"])


def probed_run(interfaces, nccl=None, backend="nccl", nodes=2, world=2, tcp=None, **options):
    """A run on nodes that all saw the same. It is bound by its link unless told otherwise.

    gbps: 10^9 bits/s of gradients in the probe, and in each step.
    """
    moving_ms = 8e-6 * GRADIENT_BYTES / options.pop("gbps", 90)
    node = {"interfaces": list(interfaces), "nccl": nccl} | ({"tcp": tcp} if tcp else {})
    link = {"nodes": [{"host": f"n{n}"} | node for n in range(nodes)]} | options.pop("link", {})
    facts = {"backend": backend, "env": {}} | options.pop("facts", {})
    times = {"probe_ms": moving_ms, "compute_ms": 1.0, "exposed_ms": moving_ms} | options
    return as_text(one_run(world=world, nodes=nodes, link=link, facts=facts, **times), "GPU")


def judged(*texts):
    """The verdicts on runs, and the report on all of them."""
    result = compared(*texts, force=True)
    return list(result["verdicts"].values()), report(result)


FIRST = {
    "infiniband": (
        probed_run([carried("mlx5_0:1", "infiniband", 100, 90), STRAY],
                   finding(IB + CHANNEL, "NET/IB/0/GDRDMA")),
        "Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 1 of 1 connections): "
        f"{SENT} 90 Gb/s, 90% of the stated 100 Gb/s: the link delivers.",
    ),
    "roce": (
        probed_run([carried("mlx5_0:1", "roce", 100, 60), STRAY],
                   finding(IB.replace("/IB [", "/RoCE [") + CHANNEL, "NET/IB/0"), gbps=60),
        "Over RoCE on mlx5_0:1, by NCCL's word (GPUDirect on 0 of 1 connections): "
        f"{SENT} 60 Gb/s, 60% of the stated 100 Gb/s.",
    ),
    "roce without NCCL's text": (
        probed_run([carried("mlx5_0:1", "roce", 100, 90)]),
        f"Over RoCE on mlx5_0:1, by byte counters: {SENT} 90 Gb/s, 90% of the stated "
        "100 Gb/s: the link delivers.",
    ),
    "fallback to IP over InfiniBand": (
        probed_run(IPOIB, finding(ASKED + "NET/IB : No device found.|" + SOCKET, "ib0"),
                   gbps=44),
        "InfiniBand was asked for; NCCL used sockets over ib0, because NCCL says "
        '"NET/IB : No device found.". IP over InfiniBand: the probe ran at 45 Gb/s on ib0, '
        "45% of what mlx5_0:1 can do (100 Gb/s stated), by byte counters.",
    ),
    "fallback to Ethernet": (
        probed_run([carried("eth0", "ethernet", 10, 9.4)], finding(ASKED + SOCKET, "eth0"),
                   gbps=9),
        "InfiniBand was asked for; NCCL used sockets over eth0, and its text does not say "
        "why. Over TCP on eth0 (ethernet), by NCCL's word: ",
    ),
    "Gloo over IP over InfiniBand": (
        probed_run(IPOIB, backend="gloo", gbps=44),
        "IP over InfiniBand: the probe ran at 45 Gb/s on ib0, 45% of what mlx5_0:1 can do",
    ),
    "IP over InfiniBand by its bytes alone": (
        probed_run([IPOIB[0] | {"carrier": None, "speed_Gbps": None}, IPOIB[1]], gbps=44),
        "IP over InfiniBand: the probe ran at 45 Gb/s on ib0, 45% of what mlx5_0:1 can do",
    ),
    "IP over InfiniBand, its adapter left out": (
        probed_run(IPOIB[:1], gbps=44),
        "IP over InfiniBand: the probe ran at 45 Gb/s on ib0, 45% of what mlx5_0:1 can do "
        "(100 Gb/s stated), by byte counters.",
    ),
    "four rails": (
        probed_run([STRAY, *RAILS], finding(IB + CHANNEL, "NET/IB/3/GDRDMA"), gbps=720),
        "Over InfiniBand on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1, by NCCL's word (GPUDirect "
        "on 1 of 1 connections): the probe's all-reduce ran at "
        "726 Gb/s, 91% of the stated 800 Gb/s: the link delivers.",
    ),
    "efa": (
        probed_run([carried("rdmap0s6:1", "efa", 100, 88.0), STRAY],
                   finding("NET/OFI Selected Provider is efa (found 1 nics)|Using network "
                           "AWS Libfabric" + CHANNEL, "NET/AWS Libfabric/0/GDRDMA")),
        "Over EFA on rdmap0s6:1, by NCCL's word (GPUDirect on 1 of 1 connections): "
        f"{SENT} 88 Gb/s, 88% of the stated 100 Gb/s: the link delivers.",
    ),
    "infiniband whose counters cannot be read": (
        probed_run([STRAY], finding(IB + CHANNEL, "NET/IB/0/GDRDMA")),
        "Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 1 of 1 connections); no "
        "counter of bytes moved with it.",
    ),
    "NVLink on one node": (
        probed_run([STRAY], finding(CHANNEL[1:], "P2P/CUMEM"), nodes=1),
        "Inside one node, through NVLink, PCIe or memory, by NCCL's word: no network is "
        "judged.",
    ),
    "NVLink on one node without NCCL's text": (
        probed_run([carried("eth0", "ethernet", 10, 9.0)], nodes=1),
        "Inside one node, through NVLink, PCIe or memory, as no counter of bytes moved: no "
        "network is judged.",
    ),
    "NVLink between nodes": (
        probed_run([carried("eth0", "ethernet", 10, 9.0)],
                   finding(CHANNEL[1:], "P2P/MNNVL")),
        "Between nodes through NVLink, PCIe or memory, by NCCL's word: no network is judged.",
    ),
    "stray bytes alone": (
        probed_run([STRAY]),
        "Bound by its link: of a step of",
    ),
    "interface under a bridge": (
        probed_run([carried("br0", "other", 100, 9.5), carried("eth0", "ethernet", 10, 9.4)],
                   finding(SOCKET, "eth0"), gbps=9),
        f"Over TCP on eth0 (ethernet), by NCCL's word: {SENT} 9.4 Gb/s, 94% of the stated "
        "10 Gb/s: the link delivers.",
    ),
    "two interfaces": (
        probed_run([carried(f"eth{n}", "ethernet", 10, 9.0 + n / 10) for n in range(2)],
                   finding(SOCKET.replace("|", " [1]eth1:10.0.1.1<0>|"), "eth0"), gbps=17),
        f"Over TCP on eth0, eth1 (ethernet), by NCCL's word: {SENT} 18.1 Gb/s, 90% of the "
        "stated 20 Gb/s: the link delivers.",
    ),
    "bond": (
        probed_run([BOND], finding(SOCKET, "bond0"), gbps=24),
        "Over TCP on bond0 (ethernet of eth0 + eth1), by NCCL's word: the probe's all-reduce "
        "ran at 24.5 Gb/s, 49% of the stated 50 Gb/s: this is "
        "not a 50 Gb/s result.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "first"), FIRST.values(), ids=FIRST)
def test_first_sentence(run, first):
    """It says which network carried the gradients, and by what that is known."""
    (verdict, _), out = judged(run, run)
    says = re.sub(r" \([\d.]+ ms for a step's 44.9 MB\)", "", " ".join(verdict.says))
    assert says.startswith(first), says
    assert "faster than" not in says and f"run0: {first[:30]}" in out


ADAPTERS = {
    "infiniband": ["ibstat mlx5_0`", "ib_write_bw -d mlx5_0`", "nvidia-peermem", "ulimit -l"],
    "roce": ["ibstat mlx5_0`", "NCCL_IB_GID_INDEX", "ib_write_bw -d mlx5_0 -x", "nvidia-peermem"],
    "efa": ["fi_info -p efa", "security group", "nvidia-peermem", "ulimit -l"],
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_advice_for_an_adapter_is_an_adapters(kind):
    """Its link ran at a fifth of what it states."""
    name = "mlx5_0:1"
    (verdict, _), _ = judged(*[probed_run([carried(name, kind, 100, 20.0)], gbps=20)] * 2)
    checks = "\n".join(verdict.checks)
    assert all(word in checks for word in ADAPTERS[kind]), checks
    assert not re.search(r"ethtool|iperf3|NETWORK=|\{", checks), checks


def test_advice_for_sockets_on_a_fast_link():
    """NCCL's threads before the cable; on 10 Gb/s the cable; Gloo has no such threads."""
    fast, slow = (
        probed_run([carried("eth0", "ethernet", stated, 4.5)], gbps=4.4) for stated in (25, 10)
    )
    (verdict, other), _ = judged(fast, slow)
    assert verdict.checks[0].startswith("NCCL's threads: NCCL_SOCKET_NTHREADS=4, NCCL_NSOCKS_PER")
    assert "ethtool eth0" in verdict.checks[1] and "ethtool eth0" in other.checks[0]
    (verdict, _), _ = judged(fast.replace('"nccl",', '"gloo",', 1), slow)
    assert verdict.checks[0].startswith("Gloo has one connection a pair of ranks")
    (verdict, _), _ = judged(probed_run([BOND], gbps=24), slow)
    assert verdict.checks[0].startswith("a bond sends a connection over one member")


def test_advice_of_ncclss_own_text_comes_first():
    text = finding(ASKED + "NET/IB : No device found.|" + SOCKET, "ib0")
    (verdict, _), _ = judged(*[probed_run(IPOIB, text)] * 2)
    assert verdict.checks[0] == ADVICE["no_ib_device"]
    assert verdict.checks[1] == ADVICE["fell_back_to_sockets"]
    assert verdict.checks[2] == "the adapter itself: NETWORK=infiniband IFNAME=mlx5_0"


def test_tree_on_two_nodes_is_not_faster_than_the_link():
    """16 ranks on 2 nodes at 10 Gb/s: a ring sends 1.875 B in 67.3 ms, a tree B in 35.9 ms."""
    options = {"world": 16, "probe_ms": 38.0, "compute_ms": 10.0, "exposed_ms": 28.0}
    says = {}
    for told in ("", "Tree", "Ring"):
        env = {"env": {"NCCL_ALGO": told}}
        run = probed_run([carried("eth0", "ethernet", 10, 9.4)], facts=env, **options)
        (verdict, _), _ = judged(run, run)
        says[told] = verdict.says[-1]
    for told, by in (("", "the quicker of ring and tree, to the ring"), ("Tree", "tree")):
        assert f"by the model ({by}; all hidden to none)" in says[told], says
        assert says[told].endswith("inside."), says
    assert "(ring; all hidden to none)" in says["Ring"]
    assert "faster than 10 Gb/s can be" in says["Ring"]


def test_both_runs_over_the_same_wire():
    """Same interfaces on the same hosts, at the same rate: whatever the runs are called."""
    eth = [carried("eth0", "ethernet", 10, 9.4), carried("ib0", "ipoib", 100, 0.01)]
    fallback = probed_run(eth, finding(ASKED + SOCKET, "eth0"))
    said = "Both runs went over the same wire: TCP on eth0 (ethernet), by NCCL's word, 9.4 Gb/s "
    said += "and 9.4 Gb/s measured."
    _, out = judged(probed_run(eth, finding(SOCKET, "eth0")), fallback)
    assert out.split("Verdict\n\n")[1].startswith(said)
    # a shaped one has another rate, and an adapter is another way
    slower = [carried("eth0", "ethernet", 10, 0.99)]
    for other in (
        probed_run([carried("eth1", "ethernet", 10, 9.4)], finding(SOCKET, "eth1")),
        probed_run(slower, finding(SOCKET, "eth0")),
        probed_run(IPOIB, finding(SOCKET, "ib0")),
        probed_run(eth, finding(SOCKET, "eth0"), nodes=1),
        probed_run(eth, finding(SOCKET, "eth0"))[:3000],
    ):
        assert "the same wire" not in judged(fallback, other)[1]
    assert "run0 and run1 went over the same wire" in judged(fallback, fallback, fallback)[1]


def test_slowest_node_sets_the_pace():
    """Node 1 alone fell back to sockets: that is what the verdict is about."""
    nodes = [
        {"interfaces": [carried("mlx5_0:1", "infiniband", 100, 9.0)], "nccl": finding(IB)},
        {
            "interfaces": [carried("eth0", "ethernet", 10, 9.0)],
            "nccl": finding(ASKED + SOCKET, "eth0"),
        },
    ]
    nodes = [{"host": f"n{n}"} | node for n, node in enumerate(nodes)]
    run = probed_run([], link={"nodes": nodes}, gbps=9)
    (verdict, _), _ = judged(run, run)
    assert verdict.says[0].startswith("InfiniBand was asked for; NCCL used sockets over eth0")


def test_what_went_wrong_on_the_link_is_said():
    bad = {"packet_seq_err": 120, "rx_dropped": 9}
    lossy = {"segments": 50_000, "retransmits": 1150}
    node = {"node": 0, "host": "n0", "interfaces": [carried("mlx5_0:1", "infiniband", 0, 0)]}
    node["interfaces"][0]["errors"] = {"link_downed": 1}
    node = f"launch_multinode.sh: Node {json.dumps(node)}\n"
    sockets = probed_run([carried("eth0", "ethernet", 10, 9.4)], tcp=lossy)
    adapter = probed_run([carried("mlx5_0:1", "infiniband", 100, 90.0, errors=bad)], tcp=lossy)
    (tcp, rdma), out = judged(sockets, adapter + node)
    lost = "TCP sent 2.30% of its segments again during the probe (2,300 of 100,000, counted): "
    assert lost + "the link loses packets." in tcp.says
    assert any("`ethtool -S eth0`" in check for check in tcp.checks)
    assert out.count("TCP sent") == 1  # what TCP does matters where it carries the gradients
    counted = "packet_seq_err 120 on mlx5_0:1 of n0, packet_seq_err 120 on mlx5_0:1 of n1"
    assert f"Errors of the link during the probe (counted): {counted}." in rdma.says
    assert "Errors of the link during the run (counted): link_downed 1 on mlx5_0:1 of n0." in out
    assert any("`rdma statistic show link mlx5_0/1`" in check for check in rdma.checks)
    # a few are usual on a busy link, and stray interfaces are not the link
    fine = {"segments": 50_000, "retransmits": 150}
    quiet = [carried("eth0", "ethernet", 10, 9.4), carried("eth1", "ethernet", 1, 0.1, errors=bad)]
    assert not re.search("TCP sent|Errors", judged(*[probed_run(quiet, tcp=fine)] * 2)[1])


# --- latency and bandwidth of the probe ---------------------------------------------------------


def test_probes_latency_replaces_the_models_constant():
    """Gloo's ring of 4 takes 6 turns for few bytes, where NCCL may take a tree's 2."""
    for backend, turns in (("gloo", 6), ("nccl", 2)):
        run = probed_run([], backend=backend, world=4, link={"latency_ms": 0.6}, probe_ms=300.0)
        result = compared(run, run)
        assert result["runs"][0].message_s == pytest.approx(0.6e-3 / turns)
        cells = {(c["gbps"], c["processes"]): c for c in result["projections"]["run0"]}
        # 1.5 * 44.87 MB * 8 / (0.94148 * 400 Gb/s) = 1.43 ms, and what the turns take
        assert cells[400, 4]["ring_s"] == pytest.approx(0.00143 + 6 * 0.6e-3 / turns, abs=1e-5)
        assert f"{600 / turns:.3g} us a message, probed" in report(result)
    assert "14 us a message, assumed" in judged(*[probed_run([])] * 2)[1]


def test_step_is_predicted_over_the_other_links_latency_and_bandwidth():
    """Bandwidth of ever larger all-reduces: 44.87 MB take 10 ms + 44.87 MB / 1 GB/s = 54.9 ms."""
    slow = {"latency_ms": 10.0, "bandwidth_GBps": 1.0}
    fast = {"latency_ms": 0.1, "bandwidth_GBps": 10.0}
    eth = [carried("eth0", "ethernet", 10, 9.4)]
    runs = [
        probed_run(eth, backend="gloo", link=slow, compute_ms=139.0, probe_ms=54.9, exposed_ms=55),
        probed_run(eth, backend="gloo", link=fast, compute_ms=139.0, probe_ms=4.6, exposed_ms=4.6),
    ]
    rows = {row["from"]: row for row in compared(*runs, force=True)["cross_checks"]}
    assert rows["run1"]["predicted_s"] == pytest.approx(0.140 + 0.0549, abs=1e-3)
    assert rows["run0"]["predicted_s"] == pytest.approx(0.140 + 0.0046, abs=1e-3)


# --- a network that failed ----------------------------------------------------------------------

CAUSE = "[CPU 1] ERROR: rendezvous at 10.0.0.1:29500: refused"
START = "launch_multinode.sh: 2025-01-01 12:00:00 torchrun --nnodes=2 demo.py\n"
FAILED = "launch_multinode.sh: failed, see logs/ib/node0.log; root cause:"


@pytest.mark.parametrize(
    "end",
    [
        f"{FAILED}\n{CAUSE}\n",
        f"{FAILED} {CAUSE}\n",
        f"0: {FAILED.replace('failed', 'failed in the probe of the link (PROBE=0)')}\n{CAUSE}",
        f"supervise.py: error: {CAUSE}\n",
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["at once", "in training"])
def test_failed_network_is_a_column_and_comes_first(save, begun, end):
    text = START + as_text(one_run())[: 3000 * begun] + "\n" + end
    out, _ = run_tool(save("ethernet"), save("infiniband", text), code=1)
    assert re.search(r"\| status +\| +complete \| +failed \|", out)
    assert f"Verdict\n\ninfiniband: failed; root cause: {CAUSE}.\n" in out
    assert "ethernet: Over TCP on veth0" in out and "times as long" not in out


def test_failure_that_a_later_start_mended_is_none(tmp_path):
    """The launcher appends to the logs; node 1 has no Run line that opens its next attempt."""
    failed = START + f"{FAILED}\n{CAUSE}\n"
    folder = write_folder(tmp_path / "run", one_run())
    for node in (0, 1):
        file = folder / f"node{node}.log"
        file.write_text(failed + START + file.read_text())
    assert make_run("a", read_log([folder]), {}).complete
    (folder / "node1.log").write_text((folder / "node1.log").read_text() + failed)
    run = make_run("a", read_log([folder]), {})
    assert run.status == "failed" and run.problems == [f"failed; root cause: {CAUSE}"]


def test_failure_as_the_launcher_writes_it(tmp_path):
    """The launcher's own text, by the real one: a command that fails, and one that is none."""
    supervise = [sys.executable, ROOT / "tools" / "supervise.py", "--log", tmp_path / "node0.log"]
    fails = [sys.executable, "-c", "import sys; print('no space left'); sys.exit(3)"]
    for command, cause in ((fails, "no space left"), (["no-such-program"], "no-such-program")):
        subprocess.run([*supervise, "--", *command], capture_output=True, timeout=60)
        (problem,) = make_run("a", read_log([tmp_path]), {}).problems
        assert re.fullmatch(f"failed; root cause: .*{cause}.*", problem), problem


def test_failure_without_its_cause_says_so():
    assert read(START + FAILED).problems == ["failed; root cause: not in this log"]


def test_failed_first_run_leaves_the_others_compared(save):
    """The base of the ratios is one that ended."""
    out, _ = run_tool(save("ib", START + FAILED), save("a"), save("b", **GIGABIT), code=1)
    assert "b took 1.77 times as long as a" in out


# --- the probe's record ------------------------------------------------------------------------


def probed(text):
    """(milliseconds of the probe's all-reduce, wire rate, interface) of a log."""
    run = read(text)
    assert run.complete, run.problems
    return run.probe_s and 1000 * run.probe_s, run.wire_gbps, run.interface


def test_probe_before_the_run_belongs_to_it_whatever_the_files(save, tmp_path):
    text = as_text(one_run(**GIGABIT))
    wanted = pytest.approx(376), 0.998, "veth0 (ethernet)"
    assert probed(text) == wanted and text.index("Probe {") < text.index("Run {")
    lines = text.splitlines(True)
    alone = tmp_path / "probe.log"
    alone.write_text("".join(line for line in lines if "Probe" in line))
    rest = save("rest", "".join(line for line in lines if "Probe" not in line))
    for pair in ([f"rest={alone}", rest], [rest, f"rest={alone}"]):
        out, _ = run_tool(*pair, save("b", text))
        assert len(re.findall(r"on veth0 .* ran at 998 Mb/s", out)) == 2
        assert re.search(r"\| wall time .*\| +13.84s \| +13.84s \|", out)


def test_probe_stays_over_restarts_and_goes_with_its_run():
    first = as_text(one_run(**GIGABIT)).split("[CPU 0] Epoch 2 | Step 16")[0]
    again = as_text(one_run(**GIGABIT, start_step=10, probe=False))
    assert probed(first + again) == (pytest.approx(376), 0.998, "veth0 (ethernet)")
    other = as_text(one_run(**FREE))
    assert probed(first + again + other) == (pytest.approx(52), 6.9, "veth0 (ethernet)")
    cut = other.index("Probe {") + 300  # a torn probe is not that of the run before it
    assert probed(first + again + other[:cut] + other[other.index("\n") :])[1:] == (None, None)


def test_split_is_that_of_the_summary():
    """Means over the ranks; without one of them the log does not split a step."""
    means = {"data_ms": 3, "compute_ms": 110, "exposed_ms": 39, "step_ms": 152, "img_per_s": None}
    run = read(as_text(one_run(summary=means)))
    found = run.data_s, run.compute_s, run.exposed_s, run.step_s
    assert found == pytest.approx((0.003, 0.110, 0.039, 0.152))
    assert run.img_per_s == pytest.approx(32 / 0.152)  # 2 x 16 images a step
    assert not read(as_text(one_run(summary=means | {"exposed_ms": None}))).has_split


def test_run_without_a_probe_is_judged_by_its_split():
    verdict, says = verdict_of(**GIGABIT, probe=False)
    assert verdict.bound == "link" and "exposed communication 401 ms (74%)" in says
    assert "probe" not in says
    # what is exposed stands in for the all-reduce: 44.87 MB * 8 / 401 ms = 895 Mb/s
    assert verdict.implied_gbps == pytest.approx(0.895, abs=0.001)


def test_probe_of_another_number_of_processes_is_not_used():
    text = as_text(one_run()).replace('Probe {"world_size": 2', 'Probe {"world_size": 4')
    run = read(text)
    assert run.complete and (run.probe_s, run.wire_gbps) == (None, None)
    assert run.notes == ["its probe is not used: 4 processes, the run has 2"]


def test_probe_that_had_no_link_is_no_other_rank(tmp_path):
    """One process says so in a sentence: no line of the talk's format, whose ranks are shifted."""
    (tmp_path / "run.log").write_text(as_text(one_run(world=1, nodes=1)))
    (tmp_path / "probe.log").write_text("[CPU 0] Probe: one process has no link to probe\n")
    for names in (("run", "probe"), ("probe", "run")):
        log = read_log([tmp_path / f"{name}.log" for name in names])
        run = make_run("a", log, {})
        assert run.complete and log.ranks == {0}, run.problems


def test_stated_link_option_replaces_the_logs(save):
    out, _ = run_tool(save("a", **GIGABIT), save("b", **FREE), "--link_gbps", "a=1")
    assert "100% of the stated 1 Gb/s" in out and "69% of the stated 10 Gb/s" in out


def test_traffic_that_left_the_named_interface(save):
    wrong = {"env": {"GLOO_SOCKET_IFNAME": "eth9"}}
    out, _ = run_tool(save("a", facts=wrong), save("b"))
    assert "GLOO_SOCKET_IFNAME=eth9, but veth0 (ethernet) carried the traffic" in out
    assert out.count("carried the traffic") == 1
    out, _ = run_tool(save("c", nodes=1), save("d", nodes=1))  # nothing has to leave the machine
    assert "carried the traffic" not in out


def test_named_interface_is_that_of_rank_0s_node(save):
    slower_node_1 = as_text(one_run()).replace('"wire_Gbps": 6.9}', '"wire_Gbps": 7.9}')
    out, _ = run_tool(save("a", slower_node_1), save("b", slower_node_1))
    assert "veth1 (ethernet)" in out and "carried the traffic" not in out


def test_three_runs_split_adds_up_in_the_table(save):
    out, _ = run_tool(save("free", **FREE), save("gigabit", **GIGABIT), save("x", **HUNDRED))
    assert re.search(r"\| wall time .*\| +7.84s \| +13.84s \| +1m 22.38s \|", out)
    assert re.search(r"\| against free +\| +base \| +1.77 x as long \| +10.51 x as long \|", out)
    assert re.search(r"exposed communication \| +101 ms \(42%\) \| +401 ms \(74%\)", out)
    assert re.search(r"\| loss, epoch 2 +\| +2.0050 \|", out)
    widths = {len(line) for line in out.split("\n\n")[0].splitlines()}
    assert len(widths) == 1  # the columns line up


# --- like with like ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("global batch", {"per_process": 8, "images": 320}),
        ("image count", {"images": 319}),
        ("epoch count", {"epochs": 1, "images": 320}),
        ("number of steps", {"steps": 10, "images": 320}),
        ("precision", {"facts": {"precision": "fp32"}}),
        ("compression", {"facts": {"grad_compression": "bf16"}}),
        ("image size", {"facts": {"image_size": 224}}),
        ("model", {"facts": {"parameters": 11_689_512}}),
    ],
)
def test_unlike_runs_are_refused_by_name(save, word, options):
    pair = (save("a"), save("b", **options))
    error = error_of(*pair)
    assert word in error and "in a" in error and "in b" in error and "--force" in error
    out, _ = run_tool(*pair, "--force")
    assert re.search(f"^FORCED, not like with like: {word}", out)


def test_pictures_of_other_sizes_are_refused(save):
    """A smaller copy of the data set is quicker to read and is another data set."""
    large, small = (save(n, facts={"picture_sizes": n}) for n in ("3f0a11bc", "99e0d2c4"))
    error = error_of(large, small)
    assert "size of the pictures in the files differs: 3f0a11bc in 3f0a11bc, 99e0d2c4" in error
    out, _ = run_tool(large, small, "--force")
    assert "FORCED, not like with like: size of the pictures" in out
    run_tool(large, save("same", facts={"picture_sizes": "3f0a11bc"}))
    run_tool(large, save("before"))  # a log without this field, made before there was one


def test_powersgd_ranks_are_told_apart(save):
    ranks = [{"grad_compression": "powersgd", "powersgd_rank": n} for n in (1, 2)]
    error = error_of(save("a", facts=ranks[0]), save("b", facts=ranks[1]))
    assert "powersgd_rank differs: 1 in a, 2 in b" in error
    # without PowerSGD its rank is no setting
    run_tool(save("a", facts={"powersgd_rank": 1}), save("b", facts={"powersgd_rank": 2}))


def test_other_settings_are_noted_not_refused(save):
    out, _ = run_tool(save("a"), save("b", facts={"workers": 7, "seed": 3}))
    assert "other settings than a: seed, workers" in out


def test_losses_that_part_are_pointed_out(save):
    out, _ = run_tool(save("a"), save("b", loss_scale=1.01))
    assert "losses part" not in out
    out, _ = run_tool(save("a", steps=2000), save("b", steps=2000, loss_scale=1.08))
    assert "losses part by more than noise in epoch 1: 3.0050 in a, 3.2454 in b" in out


def test_nan_loss_parts_and_stays_out_of_json(save, tmp_path):
    broken = re.sub(r"Avg loss: 2\.\d{4}", "Avg loss: nan", as_text(one_run()))
    out, _ = run_tool(save("a"), save("b", broken), "--json", tmp_path / "x.json")
    assert "losses part by more than noise in epoch 2" in out
    text = (tmp_path / "x.json").read_text()
    assert "NaN" not in text and json.loads(text)["runs"][1]["losses"]["2"] is None


# --- scaling -----------------------------------------------------------------------------------


def test_weak_scaling(save):
    alone = {"rank": 0, "step_ms": 142.0, "data_ms": 1.0}  # it has nothing to expose
    one = {"ranks": [alone]}
    pair = [save("p1", world=1, nodes=1, images=320, steps=40, exposed_ms=0.0, summary=one)]
    for n, exposed in ((2, 47.0), (4, 141.0)):
        options = {"world": n, "nodes": n, "images": 320, "steps": 40 // n}
        pair.append(save(f"p{n}", **options, exposed_ms=exposed))
    out, _ = run_tool(*pair)
    assert "p1: Bound by compute" in out
    # ranks of jobs of other sizes see other images: each run's mean is over all of its own
    assert re.search(r"loss, epoch 1 +\| +3.0000 \| +3.0050 \| +3.0150 \|", out)
    # 141, 188, 282 ms: 2 * 141/188 = 1.50 (75 %), 4 * 141/282 = 2.00 (50 %)
    assert re.search(r"\| p2 +\| +2 \| +weak \| +1.50 \| +75% \|", out)
    assert re.search(r"\| p4 +\| +4 \| +weak \| +2.00 \| +50% \|", out)


def test_strong_scaling(save):
    same = {"nodes": 1, "images": 320, "data_ms": 0.0}
    alone = save("p1", world=1, per_process=32, compute_ms=200.0, exposed_ms=0.0, **same)
    out, _ = run_tool(alone, save("p2", compute_ms=100.0, exposed_ms=60.0, **same))
    # 200 / 160 ms = 1.25 times, on twice as many: 62.5 %
    assert re.search(r"\| p2 +\| +2 \| strong \| +1.25 \| +62% \|", out)


# --- incomplete runs ---------------------------------------------------------------------------


def test_node_0s_log_is_enough(tmp_path, save):
    """It has what all ranks measured; losses are then compared over the ranks that both have."""
    folder = write_folder(tmp_path / "run", one_run(world=4))
    other = write_folder(tmp_path / "other", one_run(world=4))
    (folder / "node1.log").unlink()
    out, _ = run_tool(f"a={folder}", f"whole={other}")
    assert re.search(r"\| status +\| +complete \| +complete \|", out)
    assert "log of 1 of 2 nodes" in out
    assert re.search(r"loss, epoch 1 +\| +3.0050 \| +3.0050 \|", out)  # of ranks 0 and 1
    # without it nobody knows what ran
    (other / "node0.log").rename(folder / "node1.log")
    out, _ = run_tool(f"a={other}", f"whole={folder}", code=1)
    assert "no Run line" in out and "times as long" not in out


def test_missing_rank_of_a_node_is_named(tmp_path):
    folder = write_folder(tmp_path / "run", one_run(world=4))
    node1 = folder / "node1.log"
    lines = node1.read_text().splitlines(True)
    node1.write_text("".join(line for line in lines if "[CPU 3]" not in line))
    run = make_run("a", read_log([folder]), {})
    assert run.problems == ["no line from rank 3 (n1)"] and run.wall_s is None
    out, _ = run_tool(f"a={folder}", f"b={folder}", code=1)
    assert "INCOMPLETE" in out and "times as long" not in out
    # the second file given under the same name makes it whole
    node1.write_text("".join(lines))
    names = [f"a={folder / 'node1.log'}", f"a={folder / 'node0.log'}"]
    run_tool(*names, f"b={folder}")


@pytest.mark.parametrize("marker", ["Run {", "Summary {", "[CPU 1] Cleanup", "[CPU 0] Cleanup"])
def test_a_lost_line_makes_it_incomplete(marker):
    text = as_text(one_run())
    kept = "".join(line for line in text.splitlines(True) if marker not in line)
    assert kept != text and read(text).complete
    assert not read(kept).complete and read(kept).wall_s is None


def test_truncated_log_names_its_last_step(save):
    text = as_text(one_run())
    cut = text[: text.index("[CPU 1] Epoch 2 | Step 16")]
    stopped = cut + "[CPU 0] Stopped on SIGTERM | step 17\n"
    out, _ = run_tool(save("a"), save("b", stopped), code=1)
    assert "no Summary line" in out and "last step 11 of 20" in out
    assert "it says: Stopped on SIGTERM | step 17" in out


def test_restarted_run():
    first = as_text(one_run())
    first = first[: first.index("[CPU 0] Epoch 2 | Step 16")]
    second = as_text(one_run(start_step=10, loss_scale=0.9, probe=False))
    run = read(first + second)
    assert run.complete and run.attempted_again and run.log.attempts == 2
    assert any("restarted 1 time(s), the last time from step 10" in note for note in run.notes)
    steps = sorted({step for _, _, step in run.log.steps})
    assert steps == [1, 6, 11, 16, 20]
    assert run.log.steps[0, 1, 6].loss == pytest.approx(3.9)  # of the first attempt
    assert run.log.steps[0, 2, 11].loss == pytest.approx(0.9 * 3.4)  # of the last
    # a whole run with a restart that did not end is not whole
    whole = as_text(one_run())
    for end in range(second.index("\n"), len(second) - 1, 97):
        assert not read(whole + second[:end]).complete


def test_an_earlier_attempt_lends_nothing_to_the_last():
    whole = as_text(one_run())
    second = as_text(one_run(start_step=10)).splitlines(True)
    unsummed = "".join(line for line in second if "Summary" not in line)
    assert not read(whole + unsummed).complete
    # resumed at its very end, so that no step line comes before the end lines
    last = as_text(one_run(start_step=20)).splitlines(True)
    assert read(whole + "".join(last)).complete
    assert not read(whole + "".join(last[:-1])).complete


def test_an_epoch_that_an_earlier_attempt_broke_off_is_no_end():
    # --max_steps 18 ended the first attempt in the last epoch; rank 1 is silent in the second
    first = as_text(one_run()).replace("Step 20", "Step 18")
    second = as_text([line for line in one_run(start_step=18) if line[0] == 0])
    end = "[CPU 1] Cleanup complete. Total wall time: 1.00s (1.000s)\n"
    run = read(first + second + end)
    assert run.problems == ["the end came early for rank 1 (n1) (last step 18 of 20)"]


def test_restart_is_seen_in_the_files_without_a_run_line(tmp_path):
    first, second = one_run(), one_run(start_step=10)
    folder = write_folder(tmp_path / "run", first + second)
    assert make_run("a", read_log([folder]), {}).complete
    node1 = folder / "node1.log"
    text = node1.read_text()
    node1.write_text(text[: text.rindex("[CPU 1] Epoch 2 | Step 16")])
    run = make_run("a", read_log([folder]), {})
    assert not run.complete and "no end line from rank 1" in run.problems[0]


def test_restarted_runs_give_no_ratio(save):
    first = as_text(one_run()).split("[CPU 0] Epoch 2 | Step 16")[0]
    out, _ = run_tool(save("a"), save("b", first + as_text(one_run(start_step=10))))
    assert "times as long" not in out
    assert re.search(r"\| wall time +\| +7.84s \| +5.42s\* \|", out)


# --- damage ------------------------------------------------------------------------------------

FOREIGN = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from(
            [
                "W0101 12:00:00 torch/distributed/run.py:774] *****",
                "",
                "[rank0]: Traceback",
                "n0:41:77 [0] NCCL INFO Channel 00/02 :    0   1",
                "launch_multinode.sh: 2025-01-01 12:00:00 torchrun --nnodes=2 demo.py",
                "gcc: error: no input files",
                "launch_multinode.sh: this node sent 44.9 MB on veth0 (ethernet) in 9 s",
                "[CPU 0] Run: 2 processes on 2 nodes, gloo, fp32; 20 steps of 32 images",
                "[CPU 0] Summary: 2 epochs, 20 steps, 37.0 img/s; replicas identical: True",
                "[CPU 0] Probe: all-reduce of 44.9 MB in 364 ms: 0.99 Gb/s on veth0 (ethernet)",
                "Epoch 1 | Step 3 | Loss: 9.9999",
                "loading annotations into memory...",
                "\x1b[31mred\x1b[0m",
                "[GPU x] Epoch 1",
                "é\x00\xff",
            ]
        ),
    ),
    max_size=8,
)


@QUICK
@given(FOREIGN)
def test_foreign_lines_change_nothing(extra):
    lines = as_text(one_run()).splitlines()
    want = parse_text("\n".join(lines))
    for position, text in extra:
        lines.insert(position, text)
    assert parse_text("\n".join(lines)) == want


@pytest.mark.parametrize(
    "dress",
    [
        "[default0]:{}",
        "2025-01-01T10:00:00.123Z {}",
        "0: {}",
        "\x1b[32m{}\x1b[0m",
        "\x1b]0;title\x07[default1]:\x1b[1m{}",
        "{}\r",
        "{} W0101 torchrun] noise",
    ],
)
def test_prefixes_and_colours_change_nothing(dress):
    text = as_text(one_run())
    dressed = "\n".join(dress.format(line) for line in text.splitlines())
    assert parse_text(dressed) == parse_text(text)
    coloured = text.replace("] ", "] \x1b[1m").replace(" | ", " \x1b[2m|\x1b[0m ")
    assert parse_text(coloured) == parse_text(text)


def test_a_line_torn_at_any_place_gives_its_loss_or_none():
    line = "[CPU 0] Epoch 1 | Step 906 | Loss: 12.0805 | 66.1 img/s | data 1.2 ms | step 78.8 ms"
    for cut in range(len(line)):
        for after in ("[CPU 1] Epoch 1 complete | Avg loss: 3.0000", " noise", "\n"):
            for text in (line[:cut] + after + line[cut:], line[:cut] + after):
                steps = parse_text(text).steps
                assert {key: step.loss for key, step in steps.items()} in (
                    {(0, 1, 906): 12.0805},
                    {},
                ), text
    for number in ("12.08059", "12.080", "12.", "1e3", "-"):
        assert not parse_text(line.replace("12.0805", number)).steps, number


def test_a_smaller_world_size_does_not_hide_a_rank():
    lines = one_run(nodes=1, facts={"world_size": 1, "hosts": ["n0", "n0"]})
    lines = [(rank, text) for rank, text in lines if rank == 0]
    assert "no line from rank 1 (n0)" in read(as_text(lines)).problems


def essential(text):
    """Groups of lines of which each must have one line left in a log that may count as whole."""
    groups = [r"\] Run {", r"\] Summary {"]
    for rank in (0, 1):
        groups.append(rf"\[CPU {rank}\] Cleanup")
        groups.append(rf"\[CPU {rank}\] Epoch 2 (\| Step 20|complete)")
    lines = text.splitlines(True)
    return [[line for line in lines if re.search(group, line)] for group in groups]


@st.composite
def damaged(draw, text):
    """`text` with lines lost, doubled and torn into each other, and bytes overwritten."""
    lines = text.splitlines(True)
    for _ in range(draw(st.integers(0, 6))):
        if len(lines) < 3:
            break
        at = draw(st.integers(0, len(lines) - 2))
        kind = draw(st.sampled_from(["lose", "double", "tear"]))
        if kind == "lose":
            del lines[at]
        elif kind == "double":
            lines.insert(at, lines[at])
        else:  # the next line breaks into this one
            cut = draw(st.integers(0, len(lines[at])))
            lines[at : at + 2] = [lines[at][:cut] + lines[at + 1] + lines[at][cut:]]
    data = list("".join(lines))
    for _ in range(draw(st.integers(0, 8))):
        if data:
            at = draw(st.integers(0, len(data) - 1))
            data[at] = draw(st.sampled_from('#\x00\x1b[]{}"~é\n\r'))
    return "".join(data)


@QUICK
@given(st.data())
def test_an_incomplete_run_never_counts_as_complete(data):
    text = as_text(one_run(nodes=1))  # on two a lost rank could be one of another node
    assert read(text).complete
    if data.draw(st.booleans()):
        end = text.rindex("[CPU 1] Cleanup")  # anywhere before the last end line
        short = text[: data.draw(st.integers(0, end))]
    else:
        lost = data.draw(st.sampled_from(essential(text)))
        short = "".join(line for line in text.splitlines(True) if line not in lost)
    run = read(data.draw(damaged(short)))
    assert not run.complete and run.problems
    assert (run.wall_s, run.step_s, run.img_per_s) == (None, None, None)


@QUICK
@given(st.data())
def test_damage_never_invents_a_loss(data):
    text = as_text(one_run())
    want = parse_text(text)
    got = parse_text(data.draw(damaged(text)))
    for key, step in got.steps.items():
        assert step.loss == want.steps[key].loss
    assert got.ended.items() <= want.ended.items() and got.epochs.items() <= want.epochs.items()


@QUICK
@given(st.data())
def test_damage_never_crashes_the_report(data):
    runs = []
    for name in ("a", "b"):
        text = data.draw(damaged(as_text(one_run())))
        runs.append(make_run(name, parse_text(text), {}))
    result = compare_logs.compare(runs, 1e-5, force=True)
    assert "Verdict" in report(result)
    json.dumps(as_json(result), allow_nan=False)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = (  # of the Run record and of the Summary
    "world_size nodes images num_epochs max_steps start_step parameters env hosts step_ms data_ms "
    "exposed_ms ranks wire_bytes_per_step val all_reduce_ms all_reduce_bytes img_per_s precision "
    "picture_sizes batch_size global_batch_size"
)


@QUICK
@given(st.dictionaries(st.sampled_from(KEYS.split()), ODD, max_size=4))
def test_any_json_value_is_survived(odd):
    text = as_text(one_run(facts=odd, summary=odd))
    runs = [make_run(name, parse_text(text), {}) for name in "ab"]
    result = compare_logs.compare([*runs, read(as_text(one_run()))], 1e-5, force=True)
    report(result)
    json.dumps(as_json(result), allow_nan=False)


@QUICK
@given(st.data())
def test_any_json_value_of_the_link_is_survived(data):
    """In the Probe's own fields, in a node's, in an interface's and in what NCCL said."""

    def odd(mapping):
        at = st.dictionaries(st.sampled_from([*mapping]), ODD, max_size=2)
        return mapping | data.draw(at)

    text = finding(ASKED + "NET/IB : No device found.|" + SOCKET, "ib0")
    text["problems"] = [odd(text["problems"][0]), 7]
    rails = [odd(rail | {"errors": odd({"tx_dropped": 3}), "members": ["a"]}) for rail in IPOIB]
    node = {"host": "n0", "interfaces": rails, "nccl": odd(text), "tcp": odd({"segments": 5})}
    probe = odd({"nodes": [odd(node), node], "latency_ms": 1, "bandwidth_GBps": 2})
    run = probed_run([], link=probe, facts=data.draw(st.sampled_from([{}, {"world_size": 1}])))
    run += f"launch_multinode.sh: Node {json.dumps(odd(node))}\n"
    _, out = judged(run, run, as_text(one_run()))
    assert "Verdict" in out


@QUICK
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(tmp_path, data):
    file = tmp_path / "any.log"
    file.write_bytes(data)
    run = make_run("a", read_log([file]), {})
    assert not run.complete


def test_torn_pair_keeps_the_whole_line():
    text = "[CPU 0] Epoch 1 | Step 9[CPU 1] Epoch 1 | Step 906 | Loss: 1.0290\n06 | Loss: 1.0805\n"
    log = parse_text(text)
    assert {key: step.loss for key, step in log.steps.items()} == {(1, 1, 906): 1.029}
    assert log.torn == 1


def test_deep_nesting_is_survived():
    assert not read("[CPU 0] Run {" + '"a": ' + "[" * 100_000).complete


# --- the command -------------------------------------------------------------------------------


def test_starts_on_the_standard_library_alone(save):
    # -S hides the installed packages, so an import of torch, numpy or matplotlib would fail
    pair = (save("a"), save("b"))
    out, _ = run_process(*pair, python=("-S",))
    assert "Verdict" in out
    error = error_of(*pair, "--plot", "x.png", run=run_process, python=("-S",))
    assert "matplotlib" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "NAME=PATH"),
        (["a=x.log"], "two runs"),
        (["a=no/such.log", "b=no/such.log"], "no such file"),
        (["a=.", "b=."], "no node0.log"),
        (["a=x", "b=y", "--steps", "many"], "--steps many"),
        (["a=x", "b=y", "--steps", "0"], "--steps 0"),
        (["a=x", "b=y", "--link_gbps", "c=1"], "no run is named c"),
        (["a=x", "b=y", "--latency_us", "nan"], "--latency_us nan"),
    ],
)
def test_bad_usage_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(*words)


def test_unwritable_outputs_are_one_line(save, tmp_path):
    (tmp_path / "taken").mkdir()
    for option in ("--json", "--plot"):
        error = error_of(save("a"), save("b"), option, tmp_path / "no" / "x")
        assert f"{option} {tmp_path / 'no' / 'x'}: no such folder" in error
    _, err = run_tool(save("a"), save("b"), "--json", tmp_path / "taken", code=2)
    assert f"--json {tmp_path / 'taken'}: cannot be written: " in err
    assert "no such run" in error_of(save("a"), save("b"), "--project", "c")


def test_closed_pipe_is_quiet(save):
    command = f"{shlex.join([sys.executable, str(TOOL), save('a'), save('b')])} | head -1"
    command += "; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def plotted(save, tmp_path):
    """Arguments for runs of every kind: whole and cut, of several sizes, and of the talk."""
    many = [save(f"p{n}", world=n, nodes=n, images=320, steps=40 // n) for n in (1, 2, 4)]
    cut = as_text(one_run())[:3000]
    return [*many, save("cut", cut), save("none", "nothing\n"), *talk_runs(tmp_path, True)]


@LONG
def test_picture_of_every_kind_of_run(save, tmp_path):
    """Small, and in this process: what its panels show."""
    plot = pytest.importorskip("analysis.plot", exc_type=ImportError)
    named = compare_logs.named_paths(plotted(save, tmp_path))
    runs = [make_run(name, read_log(paths), {}) for name, paths in named.items()]
    result = compare_logs.compare(runs, 1e-5, force=True)
    plot.draw(result, tmp_path / "slide.png", dpi=10)
    assert png_size(tmp_path / "slide.png") == (130, 90)
    free, talk = runs[1], runs[-1]
    assert plot.parts_of(free) == pytest.approx((0.140, 0.001, 0.101, 0, 0))
    assert [step for step, _ in plot.series(free, lambda line: line.loss)] == [1, 6, 11, 16, 20]
    # a step that a rank's line is missing of has no mean over the ranks
    torn = read(as_text(one_run()).replace("[CPU 1] Epoch 1 | Step 6 ", "[CPU 1] Epoch 1 | Ste"))
    assert [step for step, _ in plot.series(torn, lambda line: line.loss)] == [1, 11, 16, 20]
    # a step takes 242 ms
    assert plot.elapsed(free, [1, 6, 20]) == pytest.approx([0.242, 6 * 0.242, 20 * 0.242])
    assert plot.series(talk, lambda line: line.img_per_s) == [] and talk.step_s is None


@LONG
def test_picture_by_the_command(save, tmp_path):
    pytest.importorskip("matplotlib")
    slide = tmp_path / "slide.png"
    run_tool(save("free", **FREE), save("gigabit", **GIGABIT), "--plot", slide)
    assert png_size(slide) == (1920, 624)
    run_tool(*plotted(save, tmp_path), "--force", "--plot", slide, code=1)
    assert png_size(slide) == (1560, 1080)  # a fourth part: efficiency


def test_loss_noise_by_hand():
    # one rank, losses 1, 3, 1: differences 2 and 2, variance 4 / 2 = 2 each; 8 samples an epoch
    losses = ((1, 1.0), (2, 3.0), (3, 1.0))
    text = "".join(f"[CPU 0] Epoch 1 | Step {i} | Loss: {x:.4f}\n" for i, x in losses)
    assert loss_noise(read(text, steps=8, epochs=1)) == pytest.approx(math.sqrt(2 / 8))
    two = read(text + "[CPU 1] Epoch 1\n", steps=8, epochs=1)  # the mean of two ranks' losses
    assert loss_noise(two) == pytest.approx(math.sqrt(2 / 16))
