"""What the probe says of the link, by size, with losses and a rate: real ranks on two namespaces;
and what NCCL wrote on each node.

Ranks are forked from one Python that has the script imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from analysis import nccl_text
from support.forks import ForkServer, write
from support.nodes import NamespacePair
from support.processes import LONG, require
from support.tun_link import TunLink
from test_interconnect import GRADIENT_BYTES, check_carried
from test_nccl_log import find_in

SMALL = [2**10, 2**12]  # bytes: for latency alone


# --- What runs in forked processes -------------------------------------------------------------


def probe_module(demo):
    """tools/probe_link.py, which then works with the script that was imported here."""
    sys.modules["demo_coco_resnet18"] = demo
    import probe_link  # here, as it imports torch

    return probe_link


def probe(demo, result, gradients=2**16, nccl="", first=False, dies=False, **constants):
    """The probe with other constants and `gradients` bytes of them; None: the model's own.

    nccl: this rank writes it as NCCL would, and the group passes for one of NCCL. first: before
    all else that computes on this machine, so that what is measured is the link. dies: this
    process is gone when the probe has begun.
    """
    link = probe_module(demo)
    if first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if gradients:
        link.gradient_bytes = lambda: gradients
    vars(link).update(constants)
    if nccl:
        pass_for_nccl(demo, nccl)
    if dies:
        link.measure = lambda *_: os._exit(9)
    demo.one_line_errors(link.main)


def sentences(demo, result, records):
    write(result, [probe_module(demo).sentence(record) for record in records])


def pass_for_nccl(demo, text):
    set_up = demo.set_up

    def set_up_as_nccl(args, process):
        set_up(args, process)
        process.backend = "nccl"
        pattern = Path(os.environ["NCCL_DEBUG_FILE"])
        (pattern.parent / f"nccl.{os.uname().nodename}.{os.getpid()}.log").write_text(text)
        (pattern.parent / f"nccl.{os.uname().nodename}.1.log").write_text(VERBS)  # an earlier run

    demo.set_up = set_up_as_nccl


def rounds(demo, result, backend, pause_ms):
    """Of a tensor of 1 KB, each all-reduce of which takes so much longer."""
    link, process = probe_module(demo), demo.Process()
    demo.read_environment(process)
    demo.set_up(link.parse_arguments([]), process)
    process.backend, all_reduce = backend, link.dist.all_reduce
    link.dist.all_reduce = lambda tensor: (
        time.sleep(pause_ms / 1e3 * (tensor.numel() == 256)),
        all_reduce(tensor),
    )
    write(result, link.measure(process, link.torch.zeros(256)))


def one_node(demo, result, carried, whole):
    """What the record has of the only node, in a group of one process."""
    link = probe_module(demo)
    demo.gather = lambda *values: [[value] for value in values]
    write(result, link.of_all_nodes(demo.Process(), carried, whole)[0])


def figures(demo, result):
    """What a size will take, in s, by rounds of smaller ones; a slope, in GB/s, by two times."""
    link = probe_module(demo)
    times = [(1, 900.0), (1, 80.0), (1, 70.0), (1, 500.0), (1, 75.0), (1, 60.0)]
    found = {
        "expected": link.expected_seconds({2**18: [(1, 90.0), (9, 9.0)], 2**21: times}, 2**24)
    }
    for name, a, b in (("slope", 100, 200), ("flat", 200, 200), ("falling", 200, 100)):
        found[name] = link.slope({"bytes": 15e6, "ms": a}, {"bytes": 40e6, "ms": b})
    write(result, found)


# --- By size -----------------------------------------------------------------------------------


def probed(demo: ForkServer, **options: Any) -> dict:
    """The record of a probe with two ranks."""
    return demo.run([], 2, call=probe, **options).json_line("Probe")


def check_sizes(record: dict, wanted: list[int]) -> None:
    """Rising, with figures that agree with each other and with those of the gradients."""
    assert [size["bytes"] for size in record["sizes"]] == wanted
    for size in record["sizes"]:
        assert size["algbw_GBps"] == pytest.approx(size["bytes"] / size["ms"] / 1e6)
        assert size["busbw_GBps"] == pytest.approx(size["algbw_GBps"])  # 2 (n - 1) / n, n = 2
    names = ("all_reduce_bytes", "all_reduce_ms", "algbw_GBps", "busbw_GBps")
    assert [record[name] for name in names] in [[*size.values()] for size in record["sizes"]]


@LONG
def test_eight_sizes_with_the_gradients_among_them(demo):
    run = demo.run([], 2, call=probe, gradients=None)
    record = run.json_line("Probe")
    wanted = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENT_BYTES, 2**26]
    check_sizes(record, wanted)
    small = [size["ms"] for size in record["sizes"][:2]]
    assert min(small) <= record["latency_ms"] <= max(small)
    # The table has these figures, in the units of nccl-tests.
    rows = [line.split() for line in run.lines(0) if re.fullmatch(r"[\d.e+\s-]+", line)]
    for row, size in zip(rows, record["sizes"], strict=True):
        figures = [size["bytes"], 1e3 * size["ms"], size["algbw_GBps"], size["busbw_GBps"]]
        assert [float(cell) for cell in row] == pytest.approx(figures, rel=0.01, abs=0.06)


def test_size_that_would_take_too_long_is_not_begun_but_for_the_gradients(demo):
    check_sizes(probed(demo, ALL_SECONDS=0.0), [2**10, 2**16])


def test_warm_up_and_hiccup_do_not_count_and_bandwidth_is_a_slope_where_there_is_one(demo):
    """A size takes two rounds at the pace of the one before."""
    wanted = {"expected": pytest.approx(2 * 0.075 * 8), "slope": 0.25}
    assert demo.run(call=figures).result() == wanted | {"flat": None, "falling": None}


@pytest.mark.parametrize(
    ("backend", "pause_ms", "least", "most"),
    [("nccl", 0, 10, 10), ("nccl", 24, 2, 4), ("gloo", 0, 1, 1)],
)
def test_with_nccl_ten_calls_are_timed_together(demo, backend, pause_ms, least, most):
    """Or as many as take a tenth of a second, of one at its time in the round before."""
    job = demo.run([], 2, call=rounds, backend=backend, pause_ms=pause_ms)
    found = job.result()
    assert found == job.result(1) and len(found) >= 6  # the ranks decide alike
    assert found[0][0] == 1 and least <= max(n for n, _ in found) <= most, found
    assert all(pause_ms < ms for _, ms in found)


def test_known_rate_by_the_gradients_and_by_the_slope(demo):
    """Others at work on this machine make a link look slower, for a while: it may fail twice."""
    usual = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, usual, os.sched_param(0))
    except PermissionError:  # and its quota would be measured, not the link
        require(False, "needs root, and a cgroup with time for real-time processes")
    options = {"SIZES": [2**10, 2**24], "gradients": 2**23, "ROUNDS": 4, "first": True}
    for _ in range(3):
        with NamespacePair("300mbit") as nodes:
            record = probed(demo, nodes=nodes, **options)
        # The gradients' own, by the clock and by the counters, and the slope's.
        found = [8 * record[f"{name}_GBps"] for name in ("algbw", "bandwidth")]
        found += [node["interfaces"][0]["wire_Gbps"] for node in record["nodes"]]
        if found == pytest.approx([0.3] * 4, rel=0.1):
            return
    pytest.fail(f"by the clock, the slope and on both nodes: {found} Gb/s")


@pytest.fixture
def over_tun() -> dict[str, str]:
    """The variables with which ranks meet over a TunLink."""
    require(os.access("/dev/net/tun", os.R_OK | os.W_OK), "this needs the device /dev/net/tun")
    return {"MASTER_ADDR": TunLink.addresses[0], "GLOO_SOCKET_IFNAME": TunLink.interface}


def test_latency_follows_the_delay_of_the_link(demo, over_tun):
    """Gloo's small all-reduce between two processes crosses it four times.

    No packet comes before its delay is over; what a busy machine adds without a delay need not
    come on top of one.
    """
    found = {}
    for delay_ms in (0, 10):
        with NamespacePair() as nodes, TunLink(nodes.names, delay_ms):
            options = {"SIZES": SMALL, "nodes": nodes, "env": over_tun}
            found[delay_ms] = probed(demo, **options)["latency_ms"]
    assert 4 * 10 < found[10] < 1.2 * (4 * 10 + found[0])


def test_losses_are_seen(demo, over_tun):
    """And told: no other test's link loses anything."""
    options = {"SIZES": [2**10], "gradients": 2**21, "env": over_tun}
    with NamespacePair() as nodes, TunLink(nodes.names, delay_ms=0, loss=0.02):
        job = demo.run([], 2, call=probe, nodes=nodes, **options)
    for node in job.json_line("Probe")["nodes"]:
        tcp = node["tcp"]
        assert tcp["segments"] > 1000 > tcp["retransmits"] > 5
        words = f"TCP sent {tcp['retransmits']:,} of {tcp['segments']:,} segments again"
        assert f"Link of {node['host']}: {words}" in job.lines(0)


def test_errors_of_an_interface_are_those_of_the_whole_probe(demo):
    """Its bytes are those of the gradients; what had none of these is left out."""
    eth0, lo, eth1 = ({"name": name, "tx_bytes": 90} for name in ("eth0", "lo", "eth1"))
    one, three = ({"errors": {"tx_dropped": count}} for count in (1, 3))
    carried = {"interfaces": [eth0 | one, lo]}
    whole = {"interfaces": [eth0 | {"tx_bytes": 500} | three, lo, eth1 | three]}
    whole["tcp"] = {"segments": 70, "retransmits": 1}
    (node,) = demo.run(call=one_node, carried=carried, whole=whole).result()
    assert node["interfaces"] == [eth0 | three, lo] and node["tcp"] == whole["tcp"]


@LONG
def test_rounds_are_five_or_what_there_is_time_for(demo):
    """And one to warm up; by what goes over the link."""
    with NamespacePair("500mbit") as nodes:
        for seconds, rounds in ((9, 6), (0.1, 2)):
            record = probed(demo, gradients=None, nodes=nodes, SECONDS=seconds)
            assert [node["host"] for node in record["nodes"]] == ["node0", "node1"]
            for node in record["nodes"]:
                check_carried(node["interfaces"], rounds * GRADIENT_BYTES)


# --- In words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("torchrun", [True, False])
def test_one_process_has_no_link_to_probe(demo, torchrun):
    run = demo.run([], call=probe, torchrun=torchrun)
    assert run.out == "[CPU 0] Probe: one process has no link to probe\n" and run.err == ""


def test_probe_in_words(demo):
    """Of the slowest node, by the interface that joins the nodes; rails are summed."""
    lo, quick = ("lo", "loopback", None, 40.0), ("eth0", "ethernet", 10, 6.87)
    slow, tun = ("veth1", "ethernet", 10, 0.9934), ("tun0", "other", None, 0.0998)
    rails = [(f"mlx5_{n}:1", "infiniband", 100, 90.5 - n) for n in range(4)]
    cases = [
        ([[quick, lo], [lo, slow]], 364,
         "364 ms: 0.99 Gb/s on veth1 (ethernet), 10 % of its stated 10 Gb/s"),
        ([[tun, lo], [quick, lo]], 3760, "3,760 ms: 0.1 Gb/s on tun0 (other)"),
        ([[lo, slow]], 25, "25 ms: 40 Gb/s on lo (loopback)"),
        # NVLink, shared memory: 44.9 MB in 1 ms are 359 Gb/s, and what was counted is not they
        ([[slow]], 1, "1 ms: 359 Gb/s inside the node, on no interface"),
        ([[]], 1.9, "1.9 ms: 189 Gb/s inside the node, on no interface"),
        ([[lo], [lo]], 100, "100 ms: 3.59 Gb/s on no interface whose bytes are counted"),
        ([rails] * 2, 1, "1 ms: 356 Gb/s on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1 (infiniband), "
                         "89 % of their stated 400 Gb/s"),
    ]  # fmt: skip
    keys, records = ("name", "kind", "speed_Gbps", "wire_Gbps"), []
    for nodes, ms, _ in cases:
        record = {"all_reduce_bytes": GRADIENT_BYTES, "all_reduce_ms": ms}
        record |= {"algbw_GBps": GRADIENT_BYTES / ms / 1e6}
        links = [[dict(zip(keys, link, strict=True)) for link in node] for node in nodes]
        records.append(record | {"nodes": [{"interfaces": of_node} for of_node in links]})
    found = demo.run(call=sentences, records=records).result()
    assert found == [f"all-reduce of 44.9 MB in {text}" for _, _, text in cases]


@pytest.mark.parametrize(
    ("argv", "code", "kind", "part"),
    [
        (["--timeout", "0"], 2, "user", "--timeout 0.0 is not at least 0.1"),
        (["--backend", "smoke"], 2, "user", "argument --backend: invalid choice: 'smoke'"),
        (["--backend", "nccl"], 1, "user", "--backend nccl: 2 processes for 0 GPU(s)"),
        (["--timeout", "1"], 1, "lost", "ERROR: rendezvous at 127.0.0.1:"),
    ],
)
def test_error_of_the_probe_is_one_line(demo, tmp_path, argv, code, kind, part):
    """Rank 1 of 2 never comes, which matters in the last of these only."""
    file = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file)}
    job = demo.start(argv, 2, call=probe, env=env, only=[0]).finish(expect=code)
    (line,) = job.err.splitlines()
    assert part in line and job.out == ""
    message = json.loads(file.read_text())["message"]
    assert part in message["message"] and message["extraInfo"]["kind"] == kind


def test_peer_that_is_lost_in_the_probe(demo):
    of_rank = [{}, {"options": {"dies": True}}]
    job = demo.run([], 2, call=probe, expect=[1, 9], of_rank=lambda rank: of_rank[rank])
    (line,) = job.err.splitlines()
    assert line.startswith("[CPU 0] ERROR: in probe: ") and job.out == ""


# --- What NCCL wrote ---------------------------------------------------------------------------

SOCKETS = """\
node0:7:7 [0] NCCL INFO NET/IB : No device found.
node0:7:7 [0] NCCL INFO NET/Socket : Using [0]ib0:10.0.0.1<0>
node0:7:7 [0] NCCL INFO Using network Socket
"""
INFINIBAND = """\
node1:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.2<0>
node1:9:9 [0] NCCL INFO Using network IB
"""
VERBS = "node0:1:1 [0] NCCL INFO Failed to open libibverbs.so[.1]\n"


def test_record_has_what_nccl_wrote_on_each_node(demo, tmp_path):
    """Of this run's processes alone; node 0's log then has it for both."""
    of_rank = [{"options": {"nccl": text}} for text in (SOCKETS, INFINIBAND)]
    options = {"SIZES": SMALL, "env": {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log"}}
    with NamespacePair() as nodes:
        run = demo.run([], 2, call=probe, nodes=nodes, of_rank=of_rank.__getitem__, **options)
    first, second = (node["nccl"] for node in run.json_line("Probe")["nodes"])
    assert (first["transport"], first["interfaces"]) == ("sockets", ["ib0"])
    assert (second["transport"], second["devices"]) == ("infiniband", ["mlx5_0:1"])
    assert [problem["id"] for problem in first["problems"]] == ["no_ib_device"]
    why = 'because NCCL says "NET/IB : No device found."; problems: no_ib_device'
    assert [line for line in run.lines(0) if "NCCL used" in line] == [
        f"node0: NCCL used TCP sockets (network Socket) over ib0, {why}",
        "node1: NCCL used InfiniBand (network IB) over mlx5_0:1",
    ]


def test_without_nccl_there_is_no_finding(demo, tmp_path):
    """Even if a file of an NCCL is there."""
    (tmp_path / "nccl.log").write_text(SOCKETS)
    record = probed(demo, SIZES=SMALL, env={"NCCL_DEBUG_FILE": f"{tmp_path}/nccl.log"})
    assert [node["nccl"] for node in record["nodes"]] == [None]


BOTH = ["ib0", "ib1"]
PATTERNS = {"nccl.%h.%p.log": ("nccl.gpu7.{}.log", BOTH), "%%h.%x.%p": ("%h.%x.{}", BOTH)}
PATTERNS["nccl.%h.log"] = ("nccl.gpu7.log", ["ib1"])  # the second has written over the first


@pytest.mark.parametrize("pattern", PATTERNS)
def test_files_of_a_nodes_processes(tmp_path, pattern):
    name, interfaces = PATTERNS[pattern]
    for pid, used in ((11, "ib0"), (12, "ib1")):
        (tmp_path / name.format(pid)).write_text(SOCKETS.replace("ib0", used))
    found = nccl_text.of_processes(f"{tmp_path}/{pattern}", "gpu7.cluster.example", [11, 12, 13])
    assert found.interfaces == interfaces
    assert nccl_text.of_processes(f"{tmp_path}/{pattern}", "gpu8", [13]) is None
    assert nccl_text.of_processes("", "node0", [1]) is None


def test_finding_in_one_line():
    used = "NCCL used TCP sockets (network Socket) over ib0, "
    no_reason = SOCKETS.partition("\n")[2]
    wish = "NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
    cases = {
        wish + no_reason: f"{used}because NCCL_IB_DISABLE=1 turned InfiniBand and RoCE off",
        no_reason: f"{used}and does not say why",
        "NCCL version 2.30.7+cuda13.2\n": "NCCL's text names no network",
    }
    for text, said in cases.items():
        assert nccl_text.in_one_line(find_in(text)) == said
