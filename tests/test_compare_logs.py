"""tools/compare_logs.py: its verdicts on runs whose cause is known, what it refuses, what damage
it survives, what it writes. The logs are made up (support/made_logs.py).
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import approx

import compare_logs
from analysis import nccl, projection
from analysis.logs import read_log
from analysis.report import as_json, report
from analysis.runs import find_straggler, make_run
from support.datasets import data_args
from support.made_logs import (
    ASKED,
    CHANNEL,
    EFA,
    FOUR,
    GDR,
    GRADIENT_BYTES,
    IB,
    ROCE,
    SOCKET,
    as_text,
    carried,
    end_line,
    ethernet,
    log_of,
    on_gpus,
    one_run,
)
from support.processes import LONG, ROOT, SCRIPT, base_env, new_test_id

TOOL = ROOT / "tools" / "compare_logs.py"
# One set-up as it was measured on two rates: 64 px, batch 16, two ranks on two nodes.
FREE = {"exposed_ms": 101.0, "probe_ms": 52.0}
GIGABIT = {"exposed_ms": 401.0, "probe_ms": 376.0, "interfaces": ethernet(10, 0.998, "veth0")}
TEXT = as_text(one_run())
HALF = TEXT[: len(TEXT) // 2]
FOUR_RANKS = as_text(one_run(world=4))


@pytest.fixture
def save(tmp_path):
    """save(name, text or one_run's options) -> NAME=PATH."""

    def write(name, text=None, **options):
        file = tmp_path / f"{name}.log"
        file.write_text(as_text(one_run(**options)) if text is None else text)
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


def read(text):
    return make_run("a", log_of(text), {})


def compared(*texts):
    runs = [make_run(f"run{i}", log_of(text), {}) for i, text in enumerate(texts)]
    return compare_logs.compare_runs(runs, force=True)


def verdict_on(text):
    verdict = compared(text)["verdicts"]["run0"]
    return verdict, " ".join(verdict.says), "\n".join(verdict.checks)


# --- Verdicts ------------------------------------------------------------------------------------


def rails(count, stated, gbps, kind="infiniband", name="mlx5_{}:1"):
    return [carried(name.format(n), kind, stated, gbps) for n in range(count)]


def waiting_for_rank_3():
    """Four ranks: 3 takes 150 ms for what the others do in 60; they wait for it."""
    parts = [{"data_ms": 2.0, "compute_ms": 60.0, "exposed_ms": 90.6} for _ in range(3)]
    parts.append({"data_ms": 2.0, "compute_ms": 150.0, "exposed_ms": 0.6})
    means = {name: sum(part[name] for part in parts) / 4 for name in parts[0]}
    ranks = [{"rank": rank} | part for rank, part in enumerate(parts)]
    return means | {"step_ms": sum(means.values()), "ranks": ranks}


def waiting_for_images():
    """Two ranks: 0 waits 200 ms for its images, and 1 for rank 0."""
    parts = [{"data_ms": 199.0, "compute_ms": 60.0, "exposed_ms": 52.0}]
    parts.append({"data_ms": 1.0, "compute_ms": 60.0, "exposed_ms": 250.0})
    means = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
    ranks = [{"rank": rank} | part for rank, part in enumerate(parts)]
    return means | {"step_ms": sum(means.values()), "ranks": ranks}


IPOIB = [
    carried("ib0", "ipoib", 100, 24.0, carrier="mlx5_0:1"),
    carried("mlx5_0:1", "infiniband", 100, 24.5),
]
BAD_LANE = {"symbol_error": 41, "link_downed": 0, "port_xmit_wait": 7}
OUT_OF_ORDER = {"out_of_sequence": 41_877}
LOST = {"tcp": {"segments": 80_000, "retransmits": 2_400}}
BOND = [carried("bond0", "ethernet", 50, 24.0, members=["eth0", "eth1"])]
FAST = rails(1, 200, 184.0)
# Name: the run; what bounds it; what is said, in this order; what is to be checked, the first of
# these first; what must not be in the verdict.
VERDICTS = {
    "InfiniBand": (
        on_gpus(FAST, IB + GDR),
        "compute",
        [
            "Bound by compute: ",
            ". Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 1 of 1 connections): ",
            "ran at 184 Gb/s on the wire, 92% of the stated 200 Gb/s: the link delivers.",
        ],
        ["--batch_size", "more GPUs"],
        ["--precision", "--compile", "compression"],
    ),
    "InfiniBand without GPUDirect": (
        on_gpus(rails(1, 200, 38.0), IB + CHANNEL + "NET/IB/0", small=True),
        "link",
        [
            "Bound by communication between its nodes, which passes through host memory",
            "19% of the stated 200 Gb/s: this is not a 200 Gb/s result. GPUDirect was not used",
            "not shown to be",
        ],
        ["modprobe nvidia-peermem", "ib_write_bw -d mlx5_0 --report_gbits"],
        ["GPUDirect: "],
    ),
    "InfiniBand with a bad lane": (
        on_gpus([carried("mlx5_0:1", "infiniband", 100, 19.0, errors=BAD_LANE)], IB, small=True),
        "link",
        [
            "Bound by its link: ",
            "19% of the stated 100 Gb/s: this is not a 100 Gb/s result. Errors counted during "
            "the probe: symbol_error 41 on mlx5_0:1 of n0, symbol_error",
        ],
        [
            "what loses data: cable, transceiver, switch port (`ibqueryerrors`",
            "mlxlink -d mlx5_0",
            "GPUDirect",
        ],
        ["xmit_wait"],
    ),
    "RoCE that loses packets": (
        on_gpus(
            [carried("mlx5_0:1", "roce", 100, 18.0, errors=OUT_OF_ORDER)], ROCE + GDR, small=True
        ),
        "link",
        [
            "Bound by its network, which loses or reorders packets",
            "Over RoCE on mlx5_0:1",
            "out_of_sequence 41,877 on mlx5_0:1 of n0",
        ],
        ["what is lost: `rdma statistic show link mlx5_0/1`", "a lossless path"],
        ["bad lane"],
    ),
    "IP over InfiniBand by NCCL's word": (
        on_gpus(
            IPOIB,
            ASKED + "NET/IB : No device found.|" + SOCKET.replace("eth0", "ib0"),
            small=True,
        ),
        "link",
        [
            "Bound by TCP over ib0, not InfiniBand itself: ",
            'InfiniBand was asked for; NCCL used sockets over ib0, because NCCL says "NET/IB : '
            'No device found.". IP over InfiniBand: the probe ran at 24 Gb/s on ib0, 24% of what '
            "mlx5_0:1 can do (100 Gb/s stated)",
        ],
        ["NCCL sees no adapter that it may use", "ib0/mode"],
        ["NETWORK=infiniband", "was asked for and"],
    ),
    "IP over InfiniBand by its bytes": (
        on_gpus(IPOIB, small=True),
        "link",
        [
            "24% of what mlx5_0:1 can do (100 Gb/s stated), by byte counters; NCCL's text, which "
            "would say why, is not in the log."
        ],
        ["NCCL_DEBUG=INFO shows why", "NETWORK=infiniband IFNAME=mlx5_0", "ib0/mode"],
        ["ethtool", "tc qdisc"],
    ),
    "four rails": (
        on_gpus(rails(4, 400, 370.0), FOUR + 4 * GDR, each=8),
        "compute",
        [
            "Over InfiniBand on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1, by",
            "1,480 Gb/s on the wire, 92% of the stated 1,600 Gb/s: the link delivers.",
        ],
        ["--batch_size"],
        [],
    ),
    "EFA": (
        on_gpus(
            rails(4, 100, 85.0, "efa", "rdmap{}s0:1"),
            EFA + 4 * (CHANNEL + "NET/Libfabric/0/GDRDMA"),
            each=4,
        ),
        "compute",
        ["Over EFA on rdmap0s0:1, ", "85% of the stated 400 Gb/s: the link delivers."],
        ["--batch_size"],
        [],
    ),
    "slow EFA": (
        on_gpus(rails(1, 100, 4.5, "efa", "efa{}:1"), EFA, small=True),
        "link",
        ["Over EFA on efa0:1"],
        ["the instance type's own limit", "fi_info -p efa", "fi_rma_bw", "efa_nv_peermem"],
        ["ethtool", "iperf3", "nvidia-peermem"],
    ),
    "bond": (
        on_gpus(BOND, small=True),
        "link",
        [
            "Over TCP on bond0 (ethernet of eth0 + eth1), by byte counters: ",
            "48% of the stated 50",
        ],
        [
            "a bond sends a connection over one member",
            "NCCL_NSOCKS_PERTHREAD=4",
            "between the nodes, a path slower than 50 Gb/s",
            "iperf3 -P 8 -c PEER` should show about 47.1 Gb/s",
        ],
        ["own ports", "IFNAME="],
    ),
    "NVLink on one node": (
        on_gpus(ethernet(10, 0.01), CHANNEL[1:] + "P2P/CUMEM", moving=2000, nodes=1, each=8),
        "compute",
        ["Inside one node, from GPU to GPU over NVLink or PCIe, by NCCL's word: no network is"],
        ["--batch_size"],
        [],
    ),
    "NVLink between nodes": (
        on_gpus(ethernet(10, 9.0), CHANNEL[1:] + "P2P/MNNVL", moving=100),
        "compute",
        ["Between nodes, through NVLink, by NCCL's word: no network is judged."],
        ["--batch_size"],
        [],
    ),
    "PCIe": (
        on_gpus(ethernet(10, 0.01), CHANNEL[1:] + "SHM/direct/direct", 36, nodes=1, small=True),
        "link",
        [
            "Bound by communication inside its node: ",
            "through the host's memory (NCCL's SHM), not",
        ],
        ["the way between the GPUs: `nvidia-smi topo -m`", "send less"],
        ["a faster link"],
    ),
    "processes of one CPU": (
        as_text(one_run(nodes=1, **GIGABIT | {"interfaces": ethernet(10, 0.001)})),
        "link",
        ["Bound by communication inside its node: ", "Inside one node: no network is judged."],
        ["fewer processes: ", "send less: "],
        ["nvidia", "a faster link"],
    ),
    "a port at 100 Mb/s": (
        on_gpus(ethernet(0.1, 0.094), SOCKET),
        "link",
        [
            "Bound by its link: ",
            "94% of the stated 100 Mb/s: the link delivers, but 100 Mb/s is what its port falls "
            "back to with a bad cable.",
        ],
        ["the port: 100 Mb/s is what it falls back to", "send less"],
        [],
    ),
    "a switch's port at 100 Mb/s": (
        on_gpus(ethernet(1, 0.094), SOCKET),
        "link",
        [
            "ran at 94 Mb/s on the wire, 9% of the stated 1 Gb/s: this is not a 1 Gb/s result. "
            "Likely cause: a port that negotiated 100 Mb/s, or a rate limit."
        ],
        [
            "between the nodes, a switch port that negotiated a lower speed: the nodes' own ports "
            "state 1 Gb/s",
            "tc qdisc show dev eth0",
            "iperf3 -c PEER` should show 941 Mb/s",
        ],
        ["100 Mb/s is what"],
    ),
    "slower than such a port": (
        on_gpus(ethernet(1, 0.036), SOCKET),
        "link",
        ["ran at 36 Mb/s on the wire, 4% of the stated 1 Gb/s: this is not a 1 Gb/s result."],
        [
            "tc qdisc show dev eth0",
            "between the nodes, a switch port that negotiated a lower speed: the nodes' own ports "
            "state 1 Gb/s",
            "iperf3 -c PEER` should show 941 Mb/s",
        ],
        ["100 Mb/s"],
    ),
    "the management port": (
        on_gpus(
            ethernet(1, 0.94, "eno1"),
            "NCCL_IB_DISABLE set by environment to 1.|" + SOCKET.replace("eth0", "eno1"),
            facts={"env": {"NCCL_IB_DISABLE": "1"}},
        ),
        "link",
        [
            "Over TCP on eno1 (ethernet), by NCCL's word, as NCCL_IB_DISABLE=1 keeps NCCL from "
            "InfiniBand and RoCE: ",
            "94% of the stated 1 Gb/s: the link delivers.",
        ],
        ["a faster link: without NCCL_IB_DISABLE=1 (environment, /etc/nccl.conf", "send less"],
        [],
    ),
    "Ethernet that loses packets": (
        on_gpus(ethernet(10, 1.1), SOCKET, node=LOST),
        "link",
        [
            "Bound by its network, which loses packets: ",
            "11% of the stated 10 Gb/s: this is not a 10 Gb/s result. TCP sent 3.00% of its "
            "segments again during the probe (4,800 of 160,000, counted): packets are lost",
        ],
        ["what loses data: cable, transceiver, switch port (`ethtool -S eth0`"],
        [],
    ),
    "a bridge over an interface": (
        on_gpus([carried("br0", "other", 100, 9.5), *ethernet(10, 9.4)], SOCKET, 9, small=True),
        "link",
        [
            "Over TCP on eth0 (ethernet), by NCCL's word; through br0 too, by byte counters: ",
            "94% of the stated",
        ],
        ["send less"],
        [],
    ),
    "a tunnel over an interface": (
        as_text(
            one_run(
                exposed_ms=50.0,
                interfaces=[carried("tun0", "other", 10, 6.7), *ethernet(10, 7.0)],
            )
        ),
        "compute",
        [
            "Bound by compute, in part by communication through tun0: ",
            "Over TCP on eth0 (ethernet), by byte counters; through tun0 too: ",
            "70% of the stated",
        ],
        ["the route: `ip route get`", "IFNAME=eth0", "what tun0 costs", "the exposed"],
        ["more machines"],
    ),
    "a slow tunnel": (
        on_gpus([carried("tun0", "other", 10, 2.9), *ethernet(25, 3.0)], SOCKET, small=True),
        "link",
        ["Bound by communication through tun0: ", "12% of the stated 25 Gb/s"],
        ["the route: `ip route get`", "what tun0 costs"],
        ["IFNAME=", "23.5", "a switch port"],
    ),
    "two interfaces at once": (
        as_text(
            one_run(
                exposed_ms=201.0,
                probe_ms=190.0,
                interfaces=[*ethernet(10, 1.0), *ethernet(10, 0.9, "eth1")],
            )
        ),
        "link",
        [
            "Bound by its link: ",
            "Over TCP on eth0, eth1 (ethernet), by byte counters: ",
            "ran at 1.9 Gb/s on the wire, 10% of the stated 20 Gb/s",
        ],
        [
            "the negotiated speed",
            "one interface alone: ",
            "each link without training",
            "9.41 Gb/s",
        ],
        ["own ports", "eth1 costs"],
    ),
    "a link that bounds in part": (
        on_gpus(ethernet(25, 22.5), SOCKET, exposed_ms=20.0),
        "compute",
        ["Bound by compute, in part by its link: ", "90% of the stated 25 Gb/s"],
        ["the exposed communication: --grad_compression"],
        ["more GPUs"],
    ),
    "the loader": (
        on_gpus(FAST, IB + GDR, data_ms=240.0, facts={"workers": 2}),
        "input",
        [
            "Bound by its input (waiting for images): of a step of 301 ms, compute is 60.0 ms "
            "(20%), data wait 240 ms (80%), exposed communication 0.6 ms (0%)"
        ],
        ["more loader processes: --workers (now 2)", "tools/prepare_coco.py"],
        [],
    ),
    "a hot GPU": (
        on_gpus(FAST, IB + GDR, summary=waiting_for_rank_3()),
        "slow rank",
        [
            "Bound by one slow rank, 3, for which the others wait: ",
            "mean over the ranks. Over ",
            "Rank 3 itself works 152 ms of a step (data wait 2.0 ms, compute 150 ms), the others "
            "62.0 ms.",
        ],
        ["rank 3 on n1: heat, power, clock and other load of its GPU"],
        ["compression", "--batch_size", "more GPUs"],
    ),
    "a rank that waits for images": (
        as_text(one_run(summary=waiting_for_images())),
        "slow rank",
        [
            "Bound by one slow rank, 0, for which the others wait: of a step of 311 ms, compute "
            "is 60.0 ms (19%), data wait 100 ms (32%), exposed communication 151 ms (49%)"
        ],
        ["rank 0 on n0: it waits for images; its disk and load"],
        [],
    ),
    "a CPU": (
        as_text(one_run(exposed_ms=9.0, facts={"precision": "fp32"})),
        "compute",
        ["Bound by compute: "],
        ["--precision bf16 where the CPU has it", "--compile", "more machines"],
        ["--batch_size", "fp16"],
    ),
    "compressed already": (
        as_text(
            one_run(
                exposed_ms=201.0,
                probe_ms=190.0,
                all_reduce_bytes=GRADIENT_BYTES // 2,
                interfaces=ethernet(1, 0.98),
                facts={"grad_compression": "bf16"},
                summary={"wire_bytes_per_step": GRADIENT_BYTES // 2},
            )
        ),
        "link",
        ["98% of the stated 1 Gb/s: the link delivers."],
        ["send less: --grad_compression powersgd (a small part of the bytes) in place of bf16"],
        ["half the bytes"],
    ),
    "communication that is not the wire's": (
        as_text(one_run(exposed_ms=300.0)),
        "overlap",
        ["Bound by communication, but not by the wire (an all-reduce alone takes 52.0 ms): "],
        ["cores shared", "send less"],
        [],
    ),
    "no probe": (
        as_text(one_run(**GIGABIT, probe=False)),
        "link",
        [
            "Bound by communication between its nodes: ",
            "Which network carried it is not known (no probe of this run).",
        ],
        ["a probe before the run (PROBE=1)"],
        ["a faster link"],
    ),
    "stray bytes alone": (
        as_text(one_run(**GIGABIT | {"interfaces": ethernet(10, 0.001)})),
        "link",
        [
            "Bound by communication between its nodes: ",
            "Which network carried it is not known: the probe's all-reduce took 376 ms for a "
            "step's 44.9 MB, but no interface that the probe could read moved these bytes.",
        ],
        ["the interface: `ip route get PEER`"],
        ["a faster link", "PROBE=1"],
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_names_the_cause_then_the_network_then_what_to_check(name):
    text, bound, said, wanted, never = VERDICTS[name]
    verdict, says, checks = verdict_on(text)
    assert verdict.bound == bound, says
    place = 0
    for words in said:
        assert words in says[place:], f"{words!r} is not in {says[place:]!r}"
        place = says.index(words, place) + len(words)
    assert wanted[0] in verdict.checks[0], checks
    assert all(words in checks for words in wanted), checks
    assert not any(words in says + checks for words in never), checks


def test_slowest_node_sets_the_pace():
    """Node 1 alone fell back to sockets."""
    text = on_gpus(ethernet(10, 9.0), ASKED + SOCKET)
    other = on_gpus(rails(1, 100, 9.0), IB)
    line = next(line for line in text.splitlines() if "Probe {" in line)
    probe, fast = (json.loads(t[t.index("{") : t.index("\n")]) for t in (text, other))
    nodes = {"nodes": [fast["nodes"][0], probe["nodes"][1]]}
    _, says, _ = verdict_on(text.replace(line, f"[GPU 0] Probe {json.dumps(probe | nodes)}"))
    assert "NCCL used sockets over eth0, and its text does not say why. Over TCP on eth0" in says


@pytest.mark.parametrize(
    ("busy", "slow"),
    [([1.25, 1], 0), ([1, 1, 1.3, 1.4], 3), ([1, 1.15], None), ([1, 2, 2, 2], None)],
)
def test_slow_rank_is_over_a_fifth_busier_than_usual(busy, slow):
    ranks = {rank: (0.001, 0.14 * times, 0.1) for rank, times in enumerate(busy)}
    assert find_straggler(ranks) == slow


def test_a_port_of_a_node_that_states_less_is_looked_at_first():
    """Node 1's own port states 1 Gb/s; the rate of the pair is node 0's by counters."""
    text = on_gpus(ethernet(10, 0.94), SOCKET)
    line = next(line for line in text.splitlines() if "Probe {" in line)
    probe = json.loads(line[line.index("{") :])
    probe["nodes"][1]["interfaces"][0]["speed_Gbps"] = 1
    checks = verdict_on(text.replace(line, f"[GPU 0] Probe {json.dumps(probe)}"))[2]
    assert checks.startswith(
        "the negotiated speed: the switch's ports, `ethtool eth0 | grep Speed"
    )


def test_both_runs_over_one_wire_are_pointed_out():
    """Same interfaces at the same rate, whatever the runs are called."""
    run, other = on_gpus(ethernet(10, 9.4), SOCKET), on_gpus(ethernet(10, 0.99), SOCKET)
    said = "Both runs went over the same wire: TCP on eth0 (ethernet), by NCCL's word, 9.4 Gb/s "
    assert report(compared(run, run)).split("Verdict\n-------\n\n")[1].startswith(said)
    assert "the same wire" not in report(compared(run, other))


# --- The model -----------------------------------------------------------------------------------


def test_projection_by_hand(save):
    """141 ms of work, and 401 - 376 = 25 ms waited; 376 ms hid nothing.

    44.87 MB * 8 / (1 Gb/s * 1448 of 1538 bytes) = 381.3 ms: an upper bound; 38.1 ms at 10 Gb/s.
    """
    words = [save("free", **FREE), save("gigabit", **GIGABIT)]
    out, _ = run_tool(*words, "--project", "gigabit")
    assert re.search(r"\| 1 Gb/s +\| +381 ms \| at most 547 ms \| +at most 5.5 s \|", out)
    assert re.search(r"\| 10 Gb/s +\| +38.1 ms \| +204 ms \|", out)
    assert "Projection" not in run_tool(*words)[0]


def test_hidden_part_shrinks_with_the_all_reduce():
    """376 ms alone, 100 exposed: 276 hidden; of 52 ms 52 * 276/376 = 38.2 hide."""
    (run,) = compared(as_text(one_run(**GIGABIT | {"exposed_ms": 100.0})))["runs"]
    assert projection.step_over(run, 0.052) == approx(0.141 + 0.052 - 0.0382, abs=1e-4)


# --- Like with like ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "one", "other"),
    [
        ("global batch differs: 32 in a, 16 in b", {}, {"per_process": 8}),
        ("number of steps", {}, {"steps": 10}),
        ("image count", {}, {"facts": {"images": 319}}),
        ("compression", {}, {"facts": {"grad_compression": "bf16"}}),
        ("model", {}, {"facts": {"parameters": 11_689_512}}),
        (
            "powersgd_rank differs: 1 in a, 2 in b",
            *({"facts": {"grad_compression": "powersgd", "powersgd_rank": n}} for n in (1, 2)),
        ),
    ],
)
def test_unlike_runs_are_refused_by_the_setting_that_differs(save, word, one, other):
    pair = (save("a", **one), save("b", **other))
    _, error = run_tool(*pair, code=2)
    assert word in error and "in a" in error and "in b" in error and "--force" in error
    out, _ = run_tool(*pair, "--force")
    assert "FORCED, not like with like: " in out and word in out


def test_other_settings_that_differ_are_noted(save, tmp_path):
    old = save("a", facts={"powersgd_rank": 1, "workers": 1, "seed": 0})
    facts = {"powersgd_rank": 2, "picture_sizes": "3f", "workers": 7, "seed": 3}
    out, _ = run_tool(old, save("b", facts=facts))
    assert "other settings than a: seed, workers" in out
    broken, kept = re.sub(r"Avg loss: 2\.\d{4}", "Avg loss: nan", TEXT), tmp_path / "all.json"
    run_tool(old, save("d", broken), "--json", kept)
    assert json.loads(kept.read_text())["runs"][1]["losses"]["2"] is None


# --- Which run, and whether it is whole ----------------------------------------------------------


def test_folder_files_and_node_0s_log_alone(tmp_path):
    folder = tmp_path / "eth"
    folder.mkdir()
    node0, node1 = folder / "node0.log", folder / "node1.log"
    lines = one_run(world=4)
    node0.write_text(as_text((rank, text) for rank, text in lines if rank < 2))
    node1.write_text(as_text((rank, text) for rank, text in lines if rank >= 2))
    for words in ([folder], [f"eth={node1}", f"eth={node0}"]):
        out, _ = run_tool(*words)
        assert out.splitlines()[0].split() == ["|", "|", "eth", "|"]
        assert re.search(r"loss, epoch 1 +\| +3\.0150", out)  # of all four ranks
    assert "of 2 nodes only the logs of 1 are here" in run_tool(node0)[0]
    assert "no Run line" in run_tool(node1, code=1)[0]  # nobody knows what ran
    node1.write_text("".join(x for x in node1.read_text().splitlines(True) if "CPU 3]" not in x))
    assert "no line from rank 3 (n1)" in run_tool(folder, code=1)[0]


@pytest.mark.parametrize(
    ("hosts", "written", "problem"),
    [
        (["n0", "n1", "n1", "n1"], [0], ""),
        (["n0", "n1", "n1", "n1"], [0, 1, 2, 3], ""),
        (["n0", "n1", "n1", "n1"], [0, 1], "no line from ranks 2 (n1), 3 (n1)"),
        (["n0", "n1", "n0", "n1"], [0], "no line from rank 2 (n0)"),
        # Two nodes with one name, a list of another run, a log without names: by equal numbers.
        (["n0", "n0", "n0", "n0"], [0, 1], ""),
        (["n0", "n0", "n0", "n0"], [0], "no line from rank 1 (n0)"),
        (["n0", "n1"], [0], "no line from rank 1 (n1)"),
        ([], [0, 1], ""),
    ],
)
def test_a_nodes_ranks_are_those_on_its_host(hosts, written, problem):
    lines = one_run(world=4, facts={"hosts": hosts})
    run = read(as_text(line for line in lines if line[0] in written))
    assert run.problems == ([problem] if problem else [])
    note = "of 2 nodes only the logs of 1 are here"
    assert problem or any(note in text for text in run.notes) == (len(written) < 4)


# --- NCCL's text in a run's own log --------------------------------------------------------------


def test_nccls_text_in_the_log_names_the_network_if_no_probe_does(save):
    text = "".join(f"n0:1:2 [0] NCCL INFO {line}\n" for line in (IB + GDR).split("|"))
    out, _ = run_tool(save("a", text + on_gpus(FAST, probe=False)))
    assert "Over InfiniBand on mlx5_0:1, by NCCL's word (GPUDirect on 1 of 1 connect" in out
    assert "the log has no counter of its bytes" in out
    # The probe's own word wins: it has counters as well.
    text = "".join(f"n0:1:2 [0] NCCL INFO {line}\n" for line in SOCKET.split("|"))
    out, _ = run_tool(save("b", text + on_gpus(FAST, IB + GDR)))
    assert "Over InfiniBand on mlx5_0:1, by NCCL's word" in out and "TCP" not in out


WATCHDOG = (
    "[rank1]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective "
)
WATCHDOG += "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
WATCHDOG += "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"


def test_a_run_that_did_not_end_tells_what_nccl_and_its_watchdog_said(save):
    refused = "n0:1:2 [0] NCCL WARN connect to n1<4> failed : No route to host\n"
    cut = HALF + "\n" + refused + WATCHDOG
    out, _ = run_tool(save("a", cut), code=1)
    assert "Timed out: ALLREDUCE number 7 (1 elements), after 600 s, on rank 1." in out
    places = [out.index(nccl.PROBLEMS[p][1]) for p in ("peer_unreachable", "timeout")]
    assert places == sorted(places)
    # What a restart has overcome is no advice for a run that has ended well.
    again = attempt(False).split("[CPU 0] Epoch 2 | Step 16")[0] + WATCHDOG + attempt(True)
    out, _ = run_tool(save("b", again))
    assert "Timed out" not in out and nccl.PROBLEMS["timeout"][1] not in out


def test_probe_in_a_file_of_its_own_belongs_to_the_run(save):
    (_, probe), *lines = one_run(**GIGABIT)
    one, two = save("p", f"[CPU 0] {probe}\n"), save("t", as_text(lines))
    for files in ((one, two), (two, one)):
        words = [f"run={word.partition('=')[2]}" for word in files]
        assert "ran at 998 Mb/s on the wire" in run_tool(*words)[0]
    other = TEXT.replace('Probe {"world_size": 2', 'Probe {"world_size": 4')
    assert "its probe is not used: 4 processes, the run has 2" in run_tool(save("o", other))[0]


def attempt(resume, **options):
    return as_text(one_run(probe=False, facts={"resume": resume}, **options))


CUT = attempt(False).split("[CPU 0] Epoch 2 | Step 16")[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (CUT + attempt(True, start_step=10), "restarted 1 time(s), the last time from step 10"),
        (CUT + attempt(True), "restarted 1 time(s)"),  # before there was a checkpoint
        (attempt(False) * 2, "1 other run(s) before it in the same log, left out"),
        (attempt(True, start_step=10), "resumed from step 10"),
        (TEXT.replace("Step 6 |", "Step 6 |\nx"), "2 torn line(s) left out"),
    ],
)
def test_restarts_and_several_runs_in_one_log_are_noted(save, text, note):
    out, _ = run_tool(save("a", text))
    assert f"Note: {note}" in out
    assert ("(part)" in out) == ("restarted" in note or "resumed" in note)


def test_an_earlier_attempt_lends_nothing_to_the_last():
    second = attempt(True, start_step=10)
    assert read(TEXT + second).complete
    assert not read(TEXT + second.replace("Summary {", "Summary")).complete
    for end in range(second.index("\n"), len(second) - 1, 97):
        assert not read(TEXT + second[:end]).complete


def test_cut_log_is_compared_with_its_last_step_and_exit_code_1(save):
    cut = TEXT[: TEXT.index("[CPU 1] Epoch 2 | Step 16")]
    stopped = cut + "[CPU 0] Stopped on SIGTERM | step 17\n"
    out, _ = run_tool(save("a"), save("b", stopped), code=1)
    assert "b: incomplete, not scored: no Summary line" in out and "last step 11 of 20" in out
    assert "it says: Stopped on SIGTERM | step 17" in out and "times as long" not in out


@pytest.mark.parametrize("lost", [r"0\] Run {", r"0\] Summary {", r"0\] Cleanup", r"1\] Cleanup"])
def test_a_run_that_lacks_an_essential_line_is_incomplete(lost):
    lines = TEXT.splitlines(True)
    run = read("".join(line for line in lines if not re.search(r"\[CPU " + lost, line)))
    assert not run.complete
    assert (run.wall_s, run.step_s, run.img_per_s) == (None, None, None)


START = "launch_multinode.sh: 2025-01-01 12:00:00 torchrun --nnodes=2 demo.py\n"
CAUSE = "[CPU 1] ERROR: rendezvous at 10.0.0.1:29500: refused"


def test_failed_network_is_a_column_and_leaves_the_others_compared(save):
    end = f"0: launch_multinode.sh: error: network ib: {CAUSE}"
    words = save("ib", f"{START}{HALF}\n{end}"), save("a"), save("b", **GIGABIT)
    out, _ = run_tool(*words, code=1)
    assert re.search(r"\| status +\| +failed \| +complete \| +complete \|", out)
    assert f"Verdict\n-------\n\nib: failed; root cause: network ib: {CAUSE}.\n" in out
    assert re.findall(r"(\w+) took (.*) times as long as (\w+)", out) == [("b", "1.77", "a")]
    assert read(f"{START}{end}\n{START}{TEXT}").complete  # a later start takes it back


# --- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dress",
    [
        "[default0]:{}",
        "2025-01-01T10:00:00.123Z {}",
        "\x1b[32m{}\x1b[0m",
        "{} W0101 torchrun] noise",
        "é\x00\xff[rank0]: Traceback\n\n{}",
        "n0:41:77 [0] NCCL INFO Channel 00/02 :    0   1\n{}",
        "{}\n[CPU 0] Summary: 2 epochs, 20 steps, 37.0 img/s; replicas identical: True",
    ],
)
def test_prefixes_colours_and_foreign_lines_change_nothing(dress):
    dressed = "\n".join(dress.format(line) for line in TEXT.splitlines())
    assert log_of(dressed) == log_of(TEXT)


def test_a_line_torn_at_any_place_gives_its_loss_or_none():
    line = "[CPU 0] Epoch 1 | Step 906 | Loss: 12.0805 | 66.1 img/s | data 1.2 ms | step 78.8 ms"
    for cut in range(len(line)):
        for after in ("[CPU 1] Epoch 1 complete | Avg loss: 3.0000", " noise", "\n"):
            for text in (line[:cut] + after + line[cut:], line[:cut] + after):
                steps = log_of(text).steps
                assert not steps or steps[0, 1, 906].loss == 12.0805


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ODD |= st.lists(ODD, max_size=3) | st.dictionaries(st.text(max_size=3), ODD, max_size=3)
KEYS = ["world_size", "nodes", "images", "max_steps", "start_step", "parameters", "env", "hosts"]
KEYS += ["step_ms", "data_ms", "exposed_ms", "ranks", "wire_bytes_per_step", "img_per_s"]


@settings(max_examples=15, deadline=None, database=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_no_damage_ends_in_a_traceback(data):
    """Odd values in every record, lines lost or doubled, bytes overwritten."""

    def odd(mapping, keys=None):
        at = st.dictionaries(st.sampled_from(keys or [*mapping]), ODD, max_size=2)
        return mapping | data.draw(at)

    own, links = odd({}, KEYS), [odd(link | {"errors": odd({"x": 3})}) for link in IPOIB]
    node = odd({"tcp": odd({"segments": 5}), "nccl": {"problems": 7}})
    text = as_text(one_run(facts=own, summary=own, latency_ms=1, interfaces=links, node=node))
    places = st.lists(st.integers(0, len(text)), max_size=8)
    for at in data.draw(places):
        text = text[:at] + data.draw(st.sampled_from('#\x00\x1b[]{}"~é\n\r')) + text[at + 1 :]
    lines = text.splitlines(True)
    shuffled = [lines[at % len(lines)] for at in data.draw(places)] + lines[len(lines) // 9 :]
    for broken in (text, "".join(shuffled), "[CPU 0] Run {" + '"a": ' + "[" * 100_000):
        for others in ([TEXT], [TEXT, FOUR_RANKS]):
            result = compared(broken, *others)
            json.dumps(as_json(result), allow_nan=False)
            assert "Verdict" in report(result)


# --- The command ---------------------------------------------------------------------------------


def test_run_with_all_rows_of_the_table(save):
    out, _ = run_tool(save("free", **FREE, latency_ms=0.6), save("gigabit", **GIGABIT))
    for row in (
        r"processes on nodes +\| +2 on 2 \| +2 on 2",
        r"wall time +\| +7.84s \| +13.84s",
        r"against free +\| +base \| +1.77 x as long",
        r"- exposed communication +\| +101 ms \(42%\) \| +401 ms \(74%\)",
        r"- of up to 4 KB +\| +0.6 ms \| +-",
        r"wire rate +\| +6.9 Gb/s, 69% of stated \| 998 Mb/s, 10% of stated",
        r"loss, epoch 2 +\| +2.0050 \| +2.0050",
        r"- baseline +\| +25.00 % \| +25.00 %",
    ):
        assert re.search(rf"^\| {row} \|", out, re.MULTILINE), row
    assert len({len(line) for line in out.split("\n\n")[0].splitlines()}) == 1  # columns line up
    assert "gigabit took 1.77 times as long as free: 13.84s against 7.84s." in out


def test_link_gbps_replaces_the_stated_speed(save):
    """Without it, 1 Gb/s on an interface that states 10 stays a mismatch."""
    out, _ = run_tool(save("a", **GIGABIT), "--link-gbps", "a=1")
    assert "100% of the stated 1 Gb/s: the link delivers." in out and "this is not" not in out
    out, _ = run_tool(save("a", **GIGABIT))
    assert "10% of the stated 10 Gb/s: this is not a 10 Gb/s result." in out


def test_exposed_time_alone_is_no_rate_of_a_wire(save):
    """It counts waiting, and leaves out what was hidden."""
    out, _ = run_tool(save("a", probe=False, **GIGABIT), "--link_gbps", "a=10")
    assert "Mb/s" not in out and "a probe before the run" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no.log"], "no.log: no such file or folder; give a log, a run's folder, or NAME=PATH"),
        (["=a log.txt"], "=a log.txt: write NAME=PATH"),
        (["a log.txt", "other/a log.txt"], "a run is named a log already: write NAME=PATH"),
        (["empty.log"], "empty.log: no line of the demo in it"),
        (["a log.txt", "x=binary.log"], "binary.log: no line of the demo in it"),
        (["a=."], "no node0.log"),
        (["a log.txt", "--steps", "many"], "--steps many"),
        (["a log.txt", "--link_gbps", "c=1"], "no run is named c"),
        (["a log.txt", "--project", "c"], "--project c: no such run"),
        (["a log.txt", "--csv", "no/x"], "--csv no/x: no such folder"),
        (["a log.txt", "--json", "."], "error: --json .: cannot be written: "),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    for name in ("a log.txt", "other/a log.txt"):
        Path(name).write_text(TEXT)
    Path("empty.log").touch()
    Path("binary.log").write_bytes(bytes(range(256)) * 40)
    before = sorted(tmp_path.rglob("*"))
    _, error = run_tool(*words, code=2)
    assert said in error and len(error.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_csv_has_each_step_line_in_the_order_of_time(save, tmp_path):
    table = tmp_path / "steps.csv"
    run_tool(save("odd", world=4), "--csv", table)
    assert b"\r" not in table.read_bytes()
    rows = list(csv.DictReader(io.StringIO(table.read_text(), newline="")))
    assert [(row["step"], row["rank"]) for row in rows[3:5]] == [("1", "3"), ("6", "0")]
    last = {"run": "odd", "rank": "3", "epoch": "2", "step": "20", "loss": "2.53"}
    # 16 images in 1 + 140 + 101 ms
    assert rows[-1] == last | {"img_per_s": "66.1", "data_ms": "1.0", "step_ms": "242.0"}


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_report_is_markdown_that_names_its_picture(save, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept here" / "compare.md"
    kept.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    cut = save("cut", HALF + "\n[CPU 0] ERROR: no answer of 10.0.0.1<0>\n")
    words = save("slow", **GIGABIT), cut, "--plot", "of both.png"
    out, _ = run_tool(*words, "--report", kept, code=1)
    text = kept.read_text()
    (line,) = re.findall(r"^!\[.*\n", text, re.MULTILINE)
    address = re.fullmatch(r"!\[.+\]\((\S+)\)\n", line)[1]
    picture = (kept.parent / unquote(address)).resolve()
    assert picture == tmp_path / "of both.png" and png_size(picture) == (1920, 672)
    assert "10.0.0.1<0>" in out and "10.0.0.1&lt;0>" in text  # a viewer takes <0> for HTML
    assert text.replace(f"{line}\n", "").replace("&lt;", "<") == out


@pytest.mark.parametrize("text", [HALF, "[GPU 0] " + end_line(9.0) + "\n"], ids=["cut", "end"])
def test_picture_of_what_little_a_log_has(save, tmp_path, text):
    pytest.importorskip("matplotlib")
    run_tool(save("run", text), "--plot", tmp_path / "run.png", code=int("Cleanup" not in text))
    assert png_size(tmp_path / "run.png") == (1920, 672)


def test_loss_is_drawn_as_a_mean_of_the_last_five_lines_beside_faint_points():
    plot = pytest.importorskip("analysis.plot")
    axis = plot.Figure().subplots()
    plot.draw_line(axis, 0, read(TEXT), "loss", 1, plot.RUNNING)
    points, line = (list(drawn.get_ydata()) for drawn in axis.get_lines())
    # (2 ranks) 4.5 - step / 10 at the steps 1, 6, 11, 16, 20
    assert points == approx([4.405, 3.905, 3.405, 2.905, 2.505], abs=1e-3)
    assert line == approx([4.405, 4.155, 3.905, 3.655, 3.425], abs=1e-3)
    assert axis.get_lines()[0].get_alpha() < 0.5


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("TOOL | :; exit ${PIPESTATUS[0]}", 0, ""),
        ("TOOL >&-", 0, ""),
        ("PYTHONIOENCODING=ascii TOOL >/dev/null", 0, ""),
        ("TOOL >/dev/full", 2, "error: the report cannot be printed: "),
        ("TOOL --plot x.png", 2, "error: --plot needs matplotlib"),
    ],
)
def test_output_that_cannot_go_anywhere(save, tmp_path, command, code, said):
    """-S: without any installed package."""
    words = [sys.executable, "-S", TOOL, save("a"), save("bé")]
    text = command.replace("TOOL", " ".join(f"'{word}'" for word in words))
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path}
    done = subprocess.run(["bash", "-c", text], **how)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == bool(said), done.stderr


@LONG
def test_a_gigabyte_takes_under_two_minutes_and_a_gigabyte_of_memory(tmp_path):
    file = tmp_path / "big.log"
    line = "[CPU {}] Epoch 1 | Step 1{:07} | Loss: 1.0805 | 812.4 img/s | data 1.2 ms | "
    line += "step 78.8 ms | ETA 3m 20s\n"
    beginning, _, end = TEXT.partition("[CPU 0] Epoch 1 | Step 1 ")
    with file.open("w") as target:
        target.write(beginning)
        while target.tell() < 2**30:
            start = target.tell() // 100
            target.write("".join(line.format(n % 2, start + n) for n in range(50_000)))
        target.write("\n[CPU 0] Epoch 1 | Step 1 " + end)
    # A process of its own, because the figures are those of all children that a process has had.
    code = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
    code += "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    code += "print('USED', used.ru_utime, used.ru_maxrss); sys.exit(done.returncode)"
    command = [sys.executable, "-c", code, sys.executable, TOOL, f"big={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "big: Bound by " in done.stdout, done.stderr
    seconds, kilobytes = map(float, re.search(r"USED (\S+) (\S+)", done.stdout).groups())
    assert seconds < 120  # of a core: others may be at work
    assert kilobytes < 2**20


# --- What the real programs write ----------------------------------------------------------------


def test_each_line_of_script_and_counters_is_known(sample, tmp_path):
    """A new wording of the script has to be told to analysis/logs.py."""
    options = "--weights none --num_epochs 1 --image_size 40 --batch_size 2 --workers 0"
    command = [sys.executable, SCRIPT, *data_args(sample), *options.split(), "--max_steps", "3"]
    how = {"check": True, "timeout": 120, "capture_output": True, "text": True}
    how["env"] = base_env(new_test_id())
    out = subprocess.run([*map(str, command), "--log_every", "1"], **how).stdout
    counted = subprocess.run([sys.executable, ROOT / "tools/counters.py"], **how).stdout
    (tmp_path / "run.log").write_text(counted + out + counted)
    assert "run: Bound by " in run_tool(tmp_path / "run.log")[0]
    log = read_log([tmp_path / "run.log"])
    assert log.torn == 0 and log.ours and log.attempts == 1
    assert log.records.keys() == {"Run", "Summary"} and len(*log.counters.values()) == 2
    assert log.steps.keys() == {(0, 1, 1), (0, 1, 2), (0, 1, 3)}
    assert all(None not in (step.img_per_s, step.step_ms) for step in log.steps.values())
    run = make_run("real", log, {})
    assert run.complete and run.has_split and run.wire_bytes, run.problems
    assert run.step_s == approx(run.data_s + run.compute_s + run.exposed_s, rel=0.05)
    assert GRADIENT_BYTES > run.wire_bytes > 0.9 * GRADIENT_BYTES or run.processes == 1
