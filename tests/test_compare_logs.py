"""tools/compare_logs.py: its parser against damage, its formulas against arithmetic by hand, its
verdicts against runs whose cause is known. The logs are made here, in the demo's own format."""

import contextlib
import io
import json
import math
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import approx

import compare_logs
from analysis.comparable import loss_noise
from analysis.cost_model import (
    LATENCY_US,
    implied_gbps,
    payload_rate,
    ring_bytes,
    ring_seconds,
    tree_seconds,
)
from analysis.logs import parse_text, read_log
from analysis.report import as_json, report
from analysis.runs import find_straggler, make_run, split_of_ranks
from analysis.units import duration
from support.processes import LONG, ROOT, WITH_LONG
from test_nccl_log import find

TOOL = ROOT / "tools" / "compare_logs.py"

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
    loss_scale=1.0,
    busy=(),
    probe=True,
    facts=(),
    summary=(),
    link=(),
):
    """A whole run's lines by rank: [(rank, text), ...] in the order in which they are written.

    busy: for the first ranks, how many times the usual their compute is. facts, summary, link:
    more of the Run, the Summary and the Probe record.
    """
    batch = per_process * world
    step_ms = data_ms + compute_ms + exposed_ms
    speed = f"{per_process / step_ms * 1000:.1f} img/s"
    wall_s = (steps - start_step) * step_ms / 1000 + 3
    run = {
        "world_size": world,
        "nodes": nodes,
        "backend": "gloo",
        "hosts": [f"n{rank * nodes // world}" for rank in range(world)],
        "global_batch_size": batch,
        "precision": "bf16",
        "grad_compression": "none",
        "image_size": 64,
        "images": images or batch * steps // epochs,
        "num_epochs": epochs,
        "max_steps": steps,
        "start_step": start_step,
        "parameters": PARAMETERS,
        "env": {"GLOO_SOCKET_IFNAME": "veth0"},
    } | dict(facts)
    measured = {
        "world_size": world,
        "all_reduce_bytes": GRADIENT_BYTES,
        "all_reduce_ms": probe_ms,
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
    } | dict(link)
    busy = [*busy, *[1] * (world - len(busy))]
    parts = {"data_ms": data_ms, "exposed_ms": exposed_ms, "step_ms": step_ms}
    end = parts | {
        "img_per_s": batch / step_ms * 1000,
        "compute_ms": compute_ms * sum(busy) / world,
        "ranks": [
            {"rank": rank} | parts | {"compute_ms": compute_ms * times}
            for rank, times in enumerate(busy)
        ],
        "wire_bytes_per_step": GRADIENT_BYTES,
        "buckets": [
            {"bytes": 29_016_384, "ready_ms": 50.0},
            {"bytes": 15_853_824, "ready_ms": 0.0},
        ],
    }
    lines = [(0, f"Run {json.dumps(run)}")]
    if world > 1 and probe:
        lines.insert(0, (0, f"Probe {json.dumps(measured)}"))
    for step in range(start_step + 1, steps + 1):
        epoch = (step - 1) * epochs // steps + 1
        if step % 5 == 1 or step == steps:
            for rank in range(world):
                loss = loss_scale * (4.5 - 2 * step / steps + 0.01 * rank)
                text = f"Epoch {epoch} | Step {step} | Loss: {loss:.4f} | {speed} | "
                text += f"data {data_ms:.1f} ms | step {step_ms:.1f} ms | ETA 0m 3s"
                lines.append((rank, text))
        if step * epochs % steps == 0:
            for rank in range(world):
                mean = loss_scale * (4 - epoch + 0.01 * rank)
                text = f"Epoch {epoch} complete | Avg loss: {mean:.4f} | {speed} | 2.42s"
                lines.append((rank, text))
            lines.append((0, f"Epoch {epoch} validation | Top-1: 41.67% | 48 images | 1.23s"))
    lines.append((0, f"Summary {json.dumps(end | dict(summary))}"))
    return lines + [(rank, end_line(wall_s)) for rank in range(world)]


def end_line(wall_s):
    return f"Cleanup complete. Total wall time: {duration(wall_s)} ({wall_s:.3f}s)"


def as_text(lines, kind="CPU"):
    return "".join(f"[{kind} {rank}] {text}\n" for rank, text in lines)


def write_folder(folder, lines):
    """A run's folder as the launcher writes it: nodeK.log holds the ranks of node K of two."""
    folder.mkdir()
    world = max(rank for rank, _ in lines) + 1
    for node in (0, 1):
        own = [(rank, text) for rank, text in lines if rank * 2 // world == node]
        (folder / f"node{node}.log").write_text(as_text(own))
    return folder


def talk_log(wall_s):
    """The last lines of a log as the original demo wrote them, on one of two nodes."""
    lines = [
        (rank, f"Epoch 1 | Step {step} | Loss: {loss + 0.01 * rank:.4f}")
        for step, loss in ((906, 1.08), (911, 1.13), (916, 1.31), (921, 1.44))
        for rank in (0, 1)
    ]
    lines.append((1, "Epoch 1 complete | Avg loss: 1.8165"))
    return as_text([*lines, (0, end_line(wall_s)), (1, end_line(wall_s - 0.2))], "GPU")


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


def error_of(*arguments):
    """The one line of a refused call."""
    out, err = run_tool(*arguments, code=2)
    assert out == "" and len(err.splitlines()) == 1, (out, err)
    return err


def compared(*logs, force=False, project=None):
    """compare() over one_run's lines given as texts."""
    runs = [make_run(f"run{i}", parse_text(text), {}) for i, text in enumerate(logs)]
    return compare_logs.compare(runs, LATENCY_US * 1e-6, force, project)


def project_first(*logs):
    """The cells of the projection from the first of runs that are compared."""
    return compared(*logs, as_text(one_run()), force=True)["projections"]["run0"]


def read(text, **given):
    return make_run("a", parse_text(text), given)


def read_files(*paths):
    return make_run("a", read_log(paths), {})


# --- model, by hand ----------------------------------------------------------------------------


def test_all_reduce_by_hand():
    size = (GRADIENT_BYTES, 4, 2)
    assert ring_bytes(*size) == 67_305_312  # 2 * 3/4 * 44,870,208
    # 538 Mb: 0.538 s at 1 Gb/s, / (1448 of 1538 bytes) = 0.572 s over TCP
    assert ring_seconds(*size, 1e9 / 8) == approx(0.5384, abs=1e-4)
    assert ring_seconds(*size, payload_rate(1)) == approx(0.5719, abs=1e-4)
    # (14,939.786 - 1,164.994) / 1850 = 7.4458 s; 538.44 Mb / 7.4458 s = 72.3 Mb/s
    assert implied_gbps(*size, 13774.792 / 1850) == approx(0.0723, abs=1e-4)
    # 8 ranks, 4 nodes, 1 MB at 1 MB/s, 1 ms: 2*7 turns * 0.001 + 2*7/8 * 1 = 0.014 + 1.75
    assert ring_seconds(1e6, 8, 4, 1e6, 1e-3) == approx(1.764)
    assert ring_seconds(1e6, 2, 1, 1e6, 1) == 0  # nothing leaves a single node
    # 2 nodes: each sends its half to the other and gets the sum's: 2 * 0.001 + 1
    # 4 nodes: 2 * log2(4) * 0.001 + 2 * 1 = 0.004 + 2; 5 nodes need a third level: 0.006 + 2
    for nodes, seconds in ((1, 0), (2, 1.002), (4, 2.004), (5, 2.006)):
        assert tree_seconds(1e6, nodes, 1e6, 1e-3) == approx(seconds), nodes


def test_table_of_three_runs(save):
    out, _ = run_tool(save("free", **FREE), save("gigabit", **GIGABIT), save("hundred", **HUNDRED))
    for row in (
        r"wall time .*\| +7.84s \| +13.84s \| +1m 22.38s",
        r"against free +\| +base \| +1.77 x as long \| +10.51 x as long",
        r"exposed communication \| +101 ms \(42%\) \| +401 ms \(74%\)",
        r"loss, epoch 2 +\| +2.0050",
    ):
        assert re.search(rf"{row} \|", out), row
    assert len({len(line) for line in out.split("\n\n")[0].splitlines()}) == 1  # columns line up


# --- the talk's logs ---------------------------------------------------------------------------


def talk_runs(tmp_path):
    """What the tool makes of the talk's own logs: test_talk.py."""
    for name, wall_s in (("ethernet", 14939.786), ("infiniband", 1164.994)):
        (tmp_path / f"{name}.log").write_text(talk_log(wall_s))
    return [tmp_path / f"{name}.log" for name in ("ethernet", "infiniband")]


def test_talk_without_figures_asks_for_what_is_lacking(tmp_path):
    logs = talk_runs(tmp_path)
    assert "give --steps" in run_tool(*logs)[0]
    lacking = ["--images", "118,287", "--epochs", 2, "--global-batch", 128]
    out, _ = run_tool(*logs, *lacking)
    assert "--link_gbps, --parameters, --processes, --nodes" in out
    # 118,287 / 128 = 924.1: 925 steps an epoch; 14,939.8 s / 1850
    assert re.search(r"\| step +\| +8,076 ms", out)


def test_original_format_of_two_nodes_counts_gpus_per_node(tmp_path):
    logs = [tmp_path / "node0.log", tmp_path / "node1.log"]
    for log in logs:
        log.write_text(talk_log(60.0))
    given = {"processes": 4, "nodes": 2}
    assert make_run("a", read_log(logs), given).complete
    assert make_run("a", read_log(logs[:1]), given).complete
    (problem,) = make_run("a", read_log([tmp_path]), {"processes": 6, "nodes": 2}).problems
    assert problem == "no line from ranks 4, 5"


# --- verdicts ----------------------------------------------------------------------------------


def verdict_of(**options):
    result = compared(as_text(one_run(**options)), as_text(one_run(**FREE)))
    verdict = result["verdicts"]["run0"]
    return verdict, " ".join(verdict.says)


# What bounds a run: its options, what is said (parted by `|`), the first thing to check.
BOUNDS = {
    "link that delivers": (
        GIGABIT | {"stated_gbps": 1},
        "Over TCP on veth0 (ethernet), by byte counters: the probe's all-reduce (376 ms for a "
        "step's 44.9 MB) ran at 998 Mb/s on the wire, 100% of the stated 1 Gb/s: the link "
        "delivers."
        "|Bound by its link: of a step of 542 ms, compute"
        # floor 141 + 381.3 = 522 ms a step, 20 steps: 10.4 s; 542 ms * 20 = 10.8 s: within 10 %
        "|gives a run of 7.2 to 10 s|: just above, and the model is good to 10%.",
        "send less: --grad_compression",
    ),
    "link slower than stated": (
        GIGABIT,
        "10% of the stated 10 Gb/s: this is not a 10 Gb/s result|times the longer of these",
        "`ethtool veth0 | grep Speed`",
    ),
    # 141 + 38.1 ms is less than 251: the wire is not to blame, and the text says so
    "compute": (
        FREE | {"exposed_ms": 110.0},
        "compute is 140 ms (56%)|in part by communication, but not by the wire|above, though the "
        "probe found no fault",
        "--compile",
    ),
    "overlap": ({"exposed_ms": 300.0}, "not by the wire", "a slow rank"),
    "input beside a slow rank": (
        {"world": 4, "per_process": 8, "data_ms": 300.0, "exposed_ms": 9.0, "busy": [2]},
        "Rank 0 itself works 580 ms of a step (data wait 300 ms, compute 280 ms), the others 440",
        "rank 0 on n0: ",
    ),
    "unknown": ({"summary": {"compute_ms": None}}, "The log does not split a step", ""),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_bound_by(case):
    options, said, check = BOUNDS[case]
    verdict, says = verdict_of(**options)
    assert verdict.bound == case.split()[0]
    assert all(words in says for words in said.split("|")), says
    first = "".join(verdict.checks[:1])
    assert check in first and "100 Mb/s" not in first


@pytest.mark.parametrize(
    ("busy", "slow"),
    [
        # of 141 ms a step: 140 * 1.3 + 1 = 183 is over 1.2 times as much, 140 * 1.1 + 1 = 155 not
        ([1.3, 1], "rank 0 on n0:"),
        ([1, 1, 1.3, 1.4], "rank 3 on n1:"),
        ([1, 1.1], "a slow rank:"),
        ([1, 1.4, 1.4, 1.4], "a slow rank:"),  # three of four are the usual
    ],
)
def test_straggler_is_the_first_check(busy, slow):
    verdict, _ = verdict_of(
        world=len(busy), per_process=32 // len(busy), exposed_ms=200, busy=busy
    )
    assert verdict.checks[0].startswith(slow), verdict.checks


def test_rank_that_waits_longer_for_input_is_a_straggler():
    parts = {"compute_ms": 9, "exposed_ms": 5}
    ranks = [{"rank": n, "data_ms": data} | parts for n, data in ((0, 90), (2, 30))]
    ranks.append({"rank": 1, "data_ms": 200})  # cut off: it does not count
    assert find_straggler(split_of_ranks({"ranks": ranks})) == 0


# --- verdicts by transport ----------------------------------------------------------------------

IB = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>|Using network IB"
SOCKET = "NET/Socket : Using [0]{0}:10.0.0.1<0>|Using network Socket"
ASKED = "NCCL_IB_HCA set by environment to mlx5_0.|"
CHANNEL = "|Channel 00/0 : 0[0] -> 1[0] [send] via {0}"
SENT = "the probe's all-reduce ran at"


def finding(text, *fields):
    """What tools/nccl_log.py says of NCCL's lines, parted by `|`."""
    lines = [f"n0:1:2 [0] NCCL INFO {line}" for line in text.format(*fields).split("|")]
    return find(*lines).to_dict()


STRAY = carried("eth0", "ethernet", 1, 0.3)  # under 1 % of what the adapters carry
IPOIB = (
    carried("ib0", "ipoib", 100, 45.0, carrier="mlx5_0:1"),
    carried("mlx5_0:1", "infiniband", 100, 46.0),
)
NO_DEVICE = finding(ASKED + "NET/IB : No device found.|" + SOCKET, "ib0")
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


# A run, and how the verdict on it begins.
FIRST = {
    "roce without NCCL's text": (
        probed_run([carried("mlx5_0:1", "roce", 100, 60)], gbps=60),
        f"Over RoCE on mlx5_0:1, by byte counters: {SENT} 60 Gb/s on the wire, 60% of the stated "
        "100 Gb/s. ",
    ),
    "IP over InfiniBand by its bytes alone": (
        probed_run([IPOIB[0] | {"carrier": None, "speed_Gbps": None}, IPOIB[1]], gbps=44),
        "IP over InfiniBand: the probe ran at 45 Gb/s on ib0, 45% of what mlx5_0:1 can do",
    ),
    "IP over InfiniBand, its adapter left out": (
        probed_run(IPOIB[:1], backend="gloo", gbps=44),
        "IP over InfiniBand: the probe ran at 45 Gb/s on ib0, 45% of what mlx5_0:1 can do "
        "(100 Gb/s stated), by byte counters.",
    ),
    "infiniband whose counters cannot be read": (
        probed_run([STRAY], finding(IB)),
        "Over InfiniBand on mlx5_0:1, by NCCL's word; no counter of bytes moved with it.",
    ),
    "NVLink on one node without NCCL's text": (
        probed_run([carried("eth0", "ethernet", 10, 9.0)], nodes=1),
        "Inside one node, through NVLink, PCIe or memory, as no counter of bytes moved: no",
    ),
    "NVLink between nodes": (
        probed_run([carried("eth0", "ethernet", 10, 9.0)],
                   finding(CHANNEL[1:], "P2P/MNNVL")),
        "Between nodes, through NVLink, by NCCL's word: no network is judged.",
    ),
    "stray bytes alone": (probed_run([STRAY]), "Bound by its link: of a step of"),
    "interface under a bridge": (
        probed_run([carried("br0", "other", 100, 9.5), carried("eth0", "ethernet", 10, 9.4)],
                   finding(SOCKET, "eth0"), gbps=9),
        f"Over TCP on eth0 (ethernet), by NCCL's word: {SENT} 9.4 Gb/s on the wire, 94% of the "
        "stated",
    ),
    "two interfaces": (
        probed_run([carried(f"eth{n}", "ethernet", 10, 9.0 + n / 10) for n in range(2)],
                   finding(SOCKET.replace("|", " [1]eth1:10.0.1.1<0>|"), "eth0"), gbps=17),
        f"Over TCP on eth0, eth1 (ethernet), by NCCL's word: {SENT} 18.1 Gb/s on the wire, 90% "
        "of the stated",
    ),
    "bond": (
        probed_run([BOND], gbps=24),
        f"Over TCP on bond0 (ethernet of eth0 + eth1), by byte counters: {SENT} 24.5 Gb/s on the "
        "wire, 49% of the stated 50 Gb/s: this is not a 50 Gb/s result.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("run", "first"), FIRST.values(), ids=FIRST)
def test_first_sentence(run, first):
    """It says which network carried the gradients, and by what that is known."""
    (verdict, _), out = judged(run, run)
    says = re.sub(r" \([\d.]+ ms for a step's 44.9 MB\)", "", " ".join(verdict.says))
    assert says.startswith(first), says
    assert "faster than" not in says and f"run0: {first[:30]}" in out


@pytest.mark.parametrize(
    ("name", "kind", "stated", "backend", "checks"),
    [
        ("mlx5_0:1", "infiniband", 100, "nccl", "ibstat mlx5_0`.*ib_write_bw .*peermem.*ulimit"),
        ("efa0:1", "efa", 100, "nccl", "fi_info -p efa.*security group.*nvidia-peermem"),
        # NCCL's threads before the cable; on 10 Gb/s the cable; Gloo has no such threads
        ("eth0", "ethernet", 50, "nccl", "^NCCL's threads: NCCL_SOCKET_NTHREADS.*ethtool eth0"),
        (
            "eth0",
            "ethernet",
            10,
            "nccl",
            "^the negotiated speed: the switch's ports, `ethtool eth0",
        ),
        ("eth0", "ethernet", 50, "gloo", "^Gloo has one connection a pair of ranks"),
    ],
)
def test_advice_for_a_slow_link_is_of_its_kind(name, kind, stated, backend, checks):
    run = probed_run([carried(name, kind, stated, 4.5)], backend=backend, gbps=4.5)
    found = "\n".join(judged(run, run)[0][0].checks)
    assert re.search(checks, found, re.DOTALL), found
    foreign = "ibstat|peermem" if kind == "ethernet" else "ethtool mlx|iperf3|NETWORK="
    assert not re.search(foreign + r"|\{", found), found


@pytest.mark.parametrize(
    ("told", "by", "where"),
    [
        ("", "By the model, ", "within that."),
        ("Tree", "By the model of a tree, ", "within that."),
        (
            "Ring",
            "By the model of a ring, ",
            "faster than 10 Gb/s can be; the traffic went another way.",
        ),
    ],
)
def test_tree_on_two_nodes_is_not_faster_than_the_link(told, by, where):
    """16 ranks on 2 nodes at 10 Gb/s: a ring sends 1.875 B in 67.3 ms, a tree B in 35.9 ms."""
    options = {"world": 16, "probe_ms": 38.0, "compute_ms": 10.0, "exposed_ms": 28.0}
    env = {"env": {"NCCL_ALGO": told}}
    run = probed_run([carried("eth0", "ethernet", 10, 9.4)], facts=env, **options)
    says = judged(run, run)[0][0].says[-1]
    assert says.startswith(by) and says.endswith(where), says


def test_both_runs_over_the_same_wire():
    """Same interfaces on the same hosts, at the same rate: whatever the runs are called."""
    eth = [carried("eth0", "ethernet", 10, 9.4), carried("ib0", "ipoib", 100, 0.01)]
    text = finding(SOCKET, "eth0")
    run, fallback = probed_run(eth, text), probed_run(eth, finding(ASKED + SOCKET, "eth0"))
    said = "Both runs went over the same wire: TCP on eth0 (ethernet), by NCCL's word, 9.4 Gb/s "
    said += "and 9.4 Gb/s measured."
    assert judged(run, fallback)[1].split("Verdict\n-------\n\n")[1].startswith(said)
    assert "run0 and run1 went over the same wire" in judged(fallback, fallback, run)[1]
    for other in (
        probed_run([carried("eth1", "ethernet", 10, 9.4)]),
        probed_run([carried("eth0", "ethernet", 10, 0.99)]),  # shaped
        probed_run(eth, text, nodes=1),
        run[:3000],
    ):
        assert "the same wire" not in judged(fallback, other)[1]


def test_slowest_node_sets_the_pace():
    """Node 1 alone fell back to sockets: that is what the verdict is about."""
    seen = [
        ([carried("mlx5_0:1", "infiniband", 100, 9.0)], finding(IB)),
        ([carried("eth0", "ethernet", 10, 9.0)], finding(ASKED + SOCKET, "eth0")),
    ]
    nodes = [{"host": "n", "interfaces": links, "nccl": text} for links, text in seen]
    (verdict, _), _ = judged(*[probed_run([], link={"nodes": nodes}, gbps=9)] * 2)
    said = "InfiniBand was asked for; NCCL used sockets over eth0, and its text does not say why."
    assert verdict.says[0] == said


def test_what_went_wrong_on_the_link_is_said():
    bad = {"packet_seq_err": 120, "rx_dropped": 9}
    lossy = {"segments": 50_000, "retransmits": 1150}
    down = carried("mlx5_0:1", "infiniband", 0, 0, errors={"link_downed": 1})
    node = f"launch_multinode.sh: Node {json.dumps({'host': 'n0', 'interfaces': [down]})}\n"
    sockets = probed_run([carried("eth0", "ethernet", 10, 1.4)], tcp=lossy, gbps=1.3)
    adapter = probed_run([carried("mlx5_0:1", "infiniband", 100, 90.0, errors=bad)], tcp=lossy)
    (tcp, rdma), out = judged(sockets, adapter + node)
    lost = "TCP sent 2.30% of its segments again during the probe (2,300 of 100,000, counted): "
    assert lost + "packets are lost on the way." in tcp.says
    assert out.count("TCP sent") == 1  # what TCP does matters where it carries the gradients
    counted = "packet_seq_err 120 on mlx5_0:1 of n0, packet_seq_err 120 on mlx5_0:1 of n1"
    assert f"Errors counted during the probe: {counted}." in rdma.says
    assert "Errors counted during the run: link_downed 1 on mlx5_0:1 of n0." in out
    # a few are usual on a busy link, more do no harm where it is as fast as it should be, and
    # stray interfaces are not the link
    fast = probed_run([carried("eth0", "ethernet", 10, 9.4)], tcp=lossy)
    assert "TCP sent" not in judged(fast, fast)[1]
    fine = {"segments": 50_000, "retransmits": 150}
    quiet = [carried("eth0", "ethernet", 10, 9.4), carried("eth1", "ethernet", 1, 0.1, errors=bad)]
    assert not re.search("TCP sent|Errors", judged(*[probed_run(quiet, tcp=fine)] * 2)[1])


# --- latency and bandwidth of the probe ---------------------------------------------------------


@pytest.mark.parametrize(("backend", "turns"), [("gloo", 6), ("nccl", 2)])
def test_probes_latency_replaces_the_models_constant(backend, turns):
    """Gloo's ring of 4 takes 6 turns for few bytes, where NCCL may take a tree's 2."""
    run = probed_run([], backend=backend, world=4, link={"latency_ms": 0.6}, probe_ms=300.0)
    cells = {(c["gbps"], c["processes"]): c for c in project_first(run)}
    # 1.5 * 44.87 MB * 8 / (0.94148 * 400 Gb/s) = 1.43 ms, and what the turns take
    assert cells[400, 4]["ring_s"] == approx(0.00143 + 6 * 0.6e-3 / turns, abs=1e-5)
    for runs, said in (
        ([run], f"{600 / turns:.3g} us a message, probed"),
        ([probed_run([])], "14 us a message, assumed"),
    ):
        assert said in report(compared(*runs, project=""))


# --- a network that failed ----------------------------------------------------------------------

CAUSE = "[CPU 1] ERROR: rendezvous at 10.0.0.1:29500: refused"
START = "launch_multinode.sh: 2025-01-01 12:00:00 torchrun --nnodes=2 demo.py\n"
FAILED = "launch_multinode.sh: failed, see logs/ib/node0.log; root cause:"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (f"{FAILED} {CAUSE}", CAUSE),
        (f"0: {FAILED.replace('failed', 'failed in the probe of the link')}\n{CAUSE}", CAUSE),
        (f"launch_multinode.sh: error: {CAUSE}\n", CAUSE),
        (FAILED, "not in this log"),
    ],
)
def test_failed_network_is_a_column_and_leaves_the_others_compared(save, end, cause):
    text = START + as_text(one_run())[:3000] + "\n" + end
    out, _ = run_tool(save("ib", text), save("a"), save("b", **GIGABIT), code=1)
    assert re.search(r"\| status +\| +failed \| +complete \| +complete \|", out)
    assert f"Verdict\n-------\n\nib: failed; root cause: {cause}.\n" in out
    assert "a: Over TCP on veth0" in out
    assert re.findall(r"(\w+) took (.*) times as long as (\w+)", out) == [("b", "1.77", "a")]


def test_failure_that_a_later_start_mended_is_none(tmp_path):
    """The launcher appends to the logs; node 1 has no Run line that opens its next attempt."""
    failed = START + f"{FAILED}\n{CAUSE}\n"
    folder = write_folder(tmp_path / "run", one_run())
    for file in folder.iterdir():
        file.write_text(failed + START + file.read_text())
    assert read_files(folder).complete
    with (folder / "node1.log").open("a") as file:
        file.write(failed)
    run = read_files(folder)
    assert run.status == "failed" and run.problems == [f"failed; root cause: {CAUSE}"]


# --- the probe's record ------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
def test_probe_before_the_run_belongs_to_it_whatever_the_files(tmp_path, first):
    """One process that has no link says so in a sentence: a line of no other rank."""
    files = [tmp_path / "probe.log", tmp_path / "run.log"]
    alone = [(0, "Probe: one process has no link to probe"), *one_run(world=1, nodes=1)]
    for lines, wanted in ((one_run(**GIGABIT), 0.376), (alone, None)):
        files[0].write_text(as_text(lines[:1]))
        files[1].write_text(as_text(lines[1:]))
        run = read_files(files[first], files[1 - first])
        assert run.complete and run.probe_s == wanted, run.problems


def test_probe_stays_over_restarts_and_goes_with_its_run():
    first = as_text(one_run(**GIGABIT)).split("[CPU 0] Epoch 2 | Step 16")[0]
    first += as_text(one_run(**GIGABIT, start_step=10, probe=False))
    other = as_text(one_run(**FREE))
    cut = other.index("Probe {") + 300  # a torn probe is not that of the run before it
    texts = first, first + other, first + other[:cut] + other[other.index("\n") :]
    assert [read(text).probe_s for text in texts] == [0.376, approx(0.052), None]
    # and one of another number of processes is of another run
    run = read(other.replace('Probe {"world_size": 2', 'Probe {"world_size": 4'))
    assert run.complete and run.probe_s is None
    assert run.notes == ["its probe is not used: 4 processes, the run has 2"]


def test_split_is_that_of_the_summary():
    """Means over the ranks; without one of them the log does not split a step."""
    means = {"data_ms": 3, "compute_ms": 110, "exposed_ms": 39, "step_ms": 152, "img_per_s": None}
    run = read(as_text(one_run(summary=means)))
    found = run.data_s, run.compute_s, run.exposed_s, run.step_s
    assert found == approx((0.003, 0.110, 0.039, 0.152))
    assert run.img_per_s == approx(32 / 0.152)  # 2 x 16 images a step
    assert not read(as_text(one_run(summary=means | {"exposed_ms": None}))).has_split


def test_run_without_a_probe_is_judged_by_its_split():
    verdict, says = verdict_of(**GIGABIT, probe=False)
    assert verdict.bound == "link" and "exposed communication 401 ms (74%)" in says
    assert "probe" not in says
    # what is exposed stands in for the all-reduce: 44.87 MB * 8 / 401 ms = 895 Mb/s
    assert verdict.implied_gbps == approx(0.895, abs=0.001)


def test_stated_link_option_replaces_the_logs(save):
    out, _ = run_tool(save("a", **GIGABIT), save("b", **FREE), "--link_gbps", "a=1")
    assert "100% of the stated 1 Gb/s" in out and "69% of the stated 10 Gb/s" in out


def test_traffic_that_left_the_named_interface(save):
    wrong = {"env": {"GLOO_SOCKET_IFNAME": "eth9"}}
    out, _ = run_tool(save("a", facts=wrong), save("b"))
    assert "GLOO_SOCKET_IFNAME=eth9, but veth0 (ethernet) carried the traffic" in out
    assert out.count("carried the traffic") == 1
    # nothing has to leave one machine; and of two the setting is that of rank 0's
    slower_node_1 = as_text(one_run()).replace('"wire_Gbps": 6.9}', '"wire_Gbps": 7.9}')
    inside = as_text(one_run(nodes=1, facts=wrong))
    out, _ = run_tool(save("c", slower_node_1), save("d", inside))
    assert "veth1 (ethernet)" in out and "carried the traffic" not in out


# --- like with like ----------------------------------------------------------------------------


PICTURES = [{"facts": {"picture_sizes": sizes}} for sizes in ("3f", "99")]
POWERSGD = [{"facts": {"grad_compression": "powersgd", "powersgd_rank": n}} for n in (1, 2)]


@pytest.mark.parametrize(
    ("word", "one", "other"),
    [
        ("global batch differs: 32 in a, 16 in b", {}, {"per_process": 8, "images": 320}),
        ("image count", {}, {"images": 319}),
        ("epoch count", {}, {"epochs": 1, "images": 320}),
        ("number of steps", {}, {"steps": 10, "images": 320}),
        ("precision", {}, {"facts": {"precision": "fp32"}}),
        ("compression", {}, {"facts": {"grad_compression": "bf16"}}),
        ("model", {}, {"facts": {"parameters": 11_689_512}}),
        # a smaller copy of the data set is quicker to read and is another data set
        ("size of the pictures in the files differs: 3f in a, 99 in b", *PICTURES),
        ("powersgd_rank differs: 1 in a, 2 in b", *POWERSGD),
    ],
)
def test_unlike_runs_are_refused_by_name(save, word, one, other):
    pair = (save("a", **one), save("b", **other))
    error = error_of(*pair)
    assert word in error and "in a" in error and "in b" in error and "--force" in error
    out, _ = run_tool(*pair, "--force")
    assert re.search(f"^FORCED, not like with like: {word}", out)


def test_other_settings_are_noted_not_refused(save):
    # without PowerSGD its rank is no setting, and an older log does not say its pictures' sizes
    old = save("a", facts={"powersgd_rank": 1, "workers": 1, "seed": 0})
    facts = {"powersgd_rank": 2, "picture_sizes": "3f", "workers": 7, "seed": 3}
    out, _ = run_tool(old, save("b", facts=facts))
    assert "other settings than a: seed, workers" in out


def test_losses_that_part_are_pointed_out(save, tmp_path):
    out, _ = run_tool(save("a"), save("b", loss_scale=1.01))
    assert "losses part" not in out
    out, _ = run_tool(save("c", steps=2000), save("d", steps=2000, loss_scale=1.08))
    assert "losses part by more than noise in epoch 1: 3.0050 in c, 3.2454 in d" in out
    broken = re.sub(r"Avg loss: 2\.\d{4}", "Avg loss: nan", as_text(one_run()))
    out, _ = run_tool(save("a"), save("b", broken), "--json", tmp_path / "x.json")
    assert "losses part by more than noise in epoch 2" in out
    text = (tmp_path / "x.json").read_text()
    assert "NaN" not in text and json.loads(text)["runs"][1]["losses"]["2"] is None


# --- scaling -----------------------------------------------------------------------------------


def test_weak_scaling(save):
    alone = {"rank": 0, "step_ms": 142.0, "data_ms": 1.0}  # it has nothing to expose
    sizes = [
        save(
            f"p{n}",
            world=n,
            nodes=n,
            images=320,
            steps=40 // n,
            exposed_ms=exposed,
            summary={"ranks": [alone]} if n == 1 else {},
        )
        for n, exposed in ((1, 0.0), (2, 47.0), (4, 141.0))
    ]
    out, _ = run_tool(*sizes)
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


def test_node_0s_log_is_enough(tmp_path):
    """It has what all ranks measured; losses are then compared over the ranks that both have."""
    folder = write_folder(tmp_path / "run", one_run(world=4))
    nodes = [folder / "node0.log", folder / "node1.log"]
    out, _ = run_tool(f"a={nodes[0]}", f"whole={folder}")
    assert re.search(r"\| status +\| +complete \| +complete \|", out)
    assert "log of 1 of 2 nodes" in out
    assert re.search(r"loss, epoch 1 +\| +3.0050 \| +3.0050 \|", out)  # of ranks 0 and 1
    # without it nobody knows what ran
    assert "no Run line" in read_files(nodes[1]).problems[0]
    assert read_files(*nodes[::-1]).complete
    # of a node that is there each rank has to be
    lines = nodes[1].read_text().splitlines(True)
    nodes[1].write_text("".join(line for line in lines if "[CPU 3]" not in line))
    assert read_files(folder).problems == ["no line from rank 3 (n1)"]
    out, _ = run_tool(f"a={folder}", f"b={nodes[0]}", code=1)
    assert "INCOMPLETE" in out and "times as long" not in out


def test_truncated_log_names_its_last_step(save):
    text = as_text(one_run())
    cut = text[: text.index("[CPU 1] Epoch 2 | Step 16")]
    stopped = cut + "[CPU 0] Stopped on SIGTERM | step 17\n"
    out, _ = run_tool(save("a"), save("b", stopped), code=1)
    assert "no Summary line" in out and "last step 11 of 20" in out
    assert "it says: Stopped on SIGTERM | step 17" in out


def test_restarted_run(save):
    text = as_text(one_run()).split("[CPU 0] Epoch 2 | Step 16")[0]
    text += as_text(one_run(start_step=10, loss_scale=0.9, probe=False))
    run = read(text)
    assert run.complete and run.attempted_again
    assert run.notes[0].startswith("restarted 1 time(s), the last time from step 10: wall time")
    losses = [step.loss for (rank, _, _), step in run.log.steps.items() if rank == 0]
    # steps 1 and 6 are of the first attempt, 11, 16 and 20 of the last
    assert losses == approx([4.4, 3.9, 0.9 * 3.4, 0.9 * 2.9, 0.9 * 2.5])
    out, _ = run_tool(save("a"), save("b", text))
    assert "times as long" not in out
    assert re.search(r"\| wall time +\| +7.84s \| +5.42s \(part\) \|", out)


@pytest.mark.parametrize("start", [10, 20])  # at its very end no step line comes before the end
def test_an_earlier_attempt_lends_nothing_to_the_last(start):
    whole, second = as_text(one_run()), as_text(one_run(start_step=start, probe=False))
    assert read(whole + second).complete
    for end in range(second.index("\n"), len(second) - 1, 97):
        assert not read(whole + second[:end]).complete
    lines = second.splitlines(True)
    assert not read(whole + "".join(lines[:-1])).complete
    assert not read(whole + "".join(line for line in lines if "Summary" not in line)).complete


def test_a_run_that_was_resumed_at_its_end_has_no_step_to_judge():
    none = dict.fromkeys(("data_ms", "compute_ms", "exposed_ms", "step_ms", "img_per_s"), 0.0)
    verdict, says = verdict_of(**GIGABIT, start_step=20, summary=none)
    assert verdict.bound == "unknown" and "Bound by" not in says
    assert says.endswith("It was resumed at its end, and made no step.")
    run = read(as_text(one_run(start_step=20, summary=none)))
    assert run.complete and not (run.ranks or run.buckets or run.img_per_s)


def test_an_epoch_that_an_earlier_attempt_broke_off_is_no_end():
    # --max_steps 18 ended the first attempt in the last epoch; rank 1 is silent in the second
    first = as_text(one_run()).replace("Step 20", "Step 18")
    second = as_text([line for line in one_run(start_step=18) if line[0] == 0])
    end = "[CPU 1] Cleanup complete. Total wall time: 1.00s (1.000s)\n"
    run = read(first + second + end)
    assert run.problems == ["the end came early for rank 1 (n1) (last step 18 of 20)"]


def test_restart_is_seen_in_the_files_without_a_run_line(tmp_path):
    folder = write_folder(tmp_path / "run", one_run() + one_run(start_step=10))
    assert read_files(folder).complete
    node1 = folder / "node1.log"
    node1.write_text(node1.read_text().rpartition("[CPU 1] Epoch 2 | Step 16")[0])
    assert "no end line from rank 1" in read_files(folder).problems[0]


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dress",
    [
        "[default0]:{}",
        "2025-01-01T10:00:00.123Z {}",
        "\x1b[32m{}\x1b[0m",
        "\x1b]0;title\x07[default1]:\x1b[1m{}",
        "{}\r",
        "{} W0101 torchrun] noise",
        "é\x00\xff[rank0]: Traceback\n\n{}",
        "n0:41:77 [0] NCCL INFO Channel 00/02 :    0   1\n{}",
        "launch_multinode.sh: 2025-01-01 12:00:00 torchrun --nnodes=2 demo.py\n{}",
        "{}\nlaunch_multinode.sh: this node sent 44.9 MB on veth0 (ethernet) in 9 s",
        "{}\n[CPU 0] Summary: 2 epochs, 20 steps, 37.0 img/s; replicas identical: True",
        "{}\n[CPU 0] Probe: all-reduce of 44.9 MB in 364 ms: 0.99 Gb/s on veth0 (ethernet)",
        "{}\nEpoch 1 | Step 3 | Loss: 9.9999\n[GPU x] Epoch 1",
    ],
)
def test_prefixes_colours_and_foreign_lines_change_nothing(dress):
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
                assert not steps or (list(steps), steps[0, 1, 906].loss) == (
                    [(0, 1, 906)],
                    12.0805,
                )
    for number in ("12.08059", "12.", "1e3"):
        assert not parse_text(line.replace("12.0805", number)).steps, number
    log = parse_text(f"[CPU 0] Epoch 1 | Step 9{line}\n06 | Loss: 1.0805\n")
    assert (list(log.steps), log.torn) == ([(0, 1, 906)], 1)


def test_a_smaller_world_size_does_not_hide_a_rank():
    lines = one_run(nodes=1, facts={"world_size": 1, "hosts": ["n0", "n0"]})
    lines = [(rank, text) for rank, text in lines if rank == 0]
    assert "no line from rank 1 (n0)" in read(as_text(lines)).problems


# Of each of these lines one must be left in a log that may count as whole.
ESSENTIAL = [r"0\] Run {", r"0\] Summary {"]
ESSENTIAL += [
    f"{rank}] {line}" for rank in "01" for line in ("Cleanup", "Epoch 2 (complete|.* 20 )")
]


@st.composite
def damaged(draw, text):
    """`text` with lines lost, doubled and torn into each other, and bytes overwritten."""
    lines = text.splitlines(True)
    for kind in draw(st.lists(st.sampled_from(["lose", "double", "tear"]), max_size=6)):
        if len(lines) < 3:
            break
        at = draw(st.integers(0, len(lines) - 2))
        one, two = lines[at : at + 2]
        cut = draw(st.integers(0, len(one)))  # where the next line breaks into this one
        made = {"lose": [two], "double": [one, one, two], "tear": [one[:cut] + two + one[cut:]]}
        lines[at : at + 2] = made[kind]
    data = list("".join(lines))
    places, bytes_ = st.integers(0, len(data)), st.sampled_from('#\x00\x1b[]{}"~é\n\r')
    for at, byte in draw(st.dictionaries(places, bytes_, max_size=8)).items():
        data[at : at + 1] = byte
    return "".join(data)


@pytest.mark.parametrize("lost", [*ESSENTIAL, "end"])
@QUICK
@given(data=st.data())
def test_an_incomplete_run_never_counts_as_complete(lost, data):
    text = as_text(one_run(nodes=1))  # on two a lost rank could be one of another node
    assert read(text).complete
    if lost == "end":  # anywhere before the last end line
        short = text[: data.draw(st.integers(0, text.rindex("[CPU 1] Cleanup")))]
    else:
        lines = text.splitlines(True)
        short = "".join(line for line in lines if not re.search(r"\[CPU " + lost, line))
    run = read(data.draw(damaged(short)))
    assert not run.complete and run.problems
    assert (run.wall_s, run.step_s, run.img_per_s) == (None, None, None)


@QUICK
@given(st.data())
def test_damage_neither_invents_a_loss_nor_crashes_the_report(data):
    text = as_text(one_run())
    broken, want = data.draw(damaged(text)), parse_text(text)
    got = parse_text(broken)
    for name in ("steps", "ended", "epochs"):
        found, true = getattr(got, name), getattr(want, name)
        assert found.keys() <= true.keys()
        for key, value in found.items():
            assert getattr(value, "loss", value) == getattr(true[key], "loss", true[key])
    told(broken, data.draw(damaged(text)))


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


def told(*texts):
    """The report on runs, which is JSON too."""
    result = compared(*texts, force=True)
    json.dumps(as_json(result), allow_nan=False)
    assert "Verdict" in report(result)


@QUICK
@given(st.data())
def test_any_json_value_is_survived(data):
    """In Run and Summary, in the Probe's own fields, a node's, an interface's, in NCCL's text."""

    def odd(mapping, keys=None):
        at = st.dictionaries(st.sampled_from(keys or [*mapping]), ODD, max_size=2)
        return mapping | data.draw(at)

    own = odd({}, KEYS.split())
    text = NO_DEVICE | {"problems": [odd(NO_DEVICE["problems"][0]), 7]}
    rails = [odd(rail | {"errors": odd({"tx_dropped": 3}), "members": ["a"]}) for rail in IPOIB]
    node = {"host": "n0", "interfaces": rails, "nccl": odd(text), "tcp": odd({"segments": 5})}
    probe = odd({"nodes": [odd(node), node], "latency_ms": 1, "bandwidth_GBps": 2})
    run = probed_run([], link=probe, facts=own, summary=own)
    run += f"launch_multinode.sh: Node {json.dumps(odd(node))}\n"
    told(run, run, as_text(one_run(facts=own, summary=own)), as_text(one_run()))


@QUICK
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(tmp_path, data):
    file = tmp_path / "any.log"
    file.write_bytes(data)
    assert not read_files(file).complete


def test_deep_nesting_is_survived():
    assert not read("[CPU 0] Run {" + '"a": ' + "[" * 100_000).complete


# --- the command -------------------------------------------------------------------------------


def test_starts_on_the_standard_library_alone(save):
    # -S hides the installed packages, so an import of torch, numpy or matplotlib would fail
    pair = (save("a"), save("b"))
    for options, code, said in (([], 0, "Verdict"), (["--plot", "x.png"], 2, "matplotlib")):
        command = [sys.executable, "-S", TOOL, *pair, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and said in done.stdout + done.stderr, done.stderr


def test_output_that_cannot_be_written_loses_no_other(save, tmp_path, monkeypatch):
    """First the JSON, then the report; the picture comes all the same, drawn by a stand-in."""
    picture, figures = tmp_path / "x.png", tmp_path / "x.json"
    drawn = SimpleNamespace(draw=lambda result, file: Path(file).touch())
    monkeypatch.setitem(sys.modules, "analysis.plot", drawn)
    options = ["--json", tmp_path, "--plot", picture]
    out, err = run_tool(save("a"), save("b"), *options, code=2)
    assert out.count("img/s, job") == 1 and picture.exists()
    assert f"--json {tmp_path}: cannot be written: " in err
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, TOOL, save("a"), save("b"), "--json", figures],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, len(json.loads(figures.read_text())["runs"])) == (2, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("compare_logs.py: error: the report cannot be printed: ")


def test_closed_pipe_is_quiet(save):
    command = shlex.join([sys.executable, str(TOOL), save("a"), save("b")])
    command += " | :; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@LONG
def test_picture_of_runs_of_every_kind(save, tmp_path):
    """Whole and cut, of several sizes, and of the talk."""
    plot = pytest.importorskip("analysis.plot", exc_type=ImportError)
    slide, text = tmp_path / "slide.png", as_text(one_run())
    run_tool(save("free", **FREE), save("gigabit", **GIGABIT), "--plot", slide)
    assert png_size(slide) == (1920, 624)
    many = [save(f"p{n}", world=n, nodes=n, images=320, steps=40 // n) for n in (1, 2, 4)]
    bad = [save("cut", text[:3000]), save("none", "nothing\n")]
    run_tool(*many, *bad, *talk_runs(tmp_path), "--force", "--plot", slide, code=1)
    assert png_size(slide) == (1560, 1080)  # a fourth part: efficiency

    def steps(run):
        return [step for step, _ in plot.series(run, lambda line: line.loss)]

    free = read(text)
    assert plot.parts_of(free) == approx((0.140, 0.001, 0.101, 0, 0))
    assert steps(free) == [1, 6, 11, 16, 20]
    # a step that a rank's line is missing of has no mean over the ranks
    assert steps(read(text.replace("[CPU 1] Epoch 1 | Step 6 ", ""))) == [1, 11, 16, 20]
    assert plot.elapsed(free, [1, 6]) == approx([0.242, 6 * 0.242])
    assert plot.series(read(talk_log(60.0)), lambda line: line.img_per_s) == []


def test_loss_noise_by_hand():
    # one rank, losses 1, 3, 1: differences 2 and 2, variance 4 / 2 = 2 each; 8 samples an epoch
    losses = ((1, 1.0), (2, 3.0), (3, 1.0))
    text = "".join(f"[CPU 0] Epoch 1 | Step {i} | Loss: {x:.4f}\n" for i, x in losses)
    assert loss_noise(read(text, steps=8, epochs=1)) == approx(math.sqrt(2 / 8))
    two = read(text + "[CPU 1] Epoch 1\n", steps=8, epochs=1)  # the mean of two ranks' losses
    assert loss_noise(two) == approx(math.sqrt(2 / 16))


# --- What compare_logs.py makes of a log that several runs have written -------------------------


def attempt(resume: bool, first: int = 0) -> str:
    options = {"world": 1, "nodes": 1, "steps": 4, "epochs": 1, "start_step": first}
    return as_text(one_run(**options, facts={"resume": resume}))


WHOLE = attempt(False)
CUT = WHOLE[: WHOLE.index("[CPU 0] Epoch 1 | Step 4")]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (CUT + attempt(True, first=2), "restarted 1 time(s), the last time from"),
        (CUT + attempt(True), "restarted 1 time(s)"),  # without a checkpoint yet
        (WHOLE + WHOLE, "1 other run(s) before it in the same log"),
    ],
    ids=["restarted", "from the beginning", "another run"],
)
def test_restart_is_told_from_another_run_in_the_same_log(tmp_path, text, note):
    (tmp_path / "node0.log").write_text(text)
    run = make_run("x", read_log([tmp_path]), {})
    assert run.complete, run.problems
    assert len(run.notes) == 1 and note in run.notes[0], run.notes
    assert run.attempted_again == ("restarted" in note)
