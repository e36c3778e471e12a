"""The probe by size, with delay, losses and a rate: real ranks on two namespaces; and what NCCL
wrote on each node. What the probe says of the gradients alone is in test_interconnect.py.

Ranks are forked, as there, from one Python that has the script imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import test_interconnect as links
from analysis import nccl_text
from support.forks import ForkServer, write
from support.nodes import NamespacePair
from support.processes import LONG, require
from support.tun_link import TunLink

GRADIENTS = links.GRADIENT_BYTES
SMALL = {"SIZES": [2**10, 2**12], "gradients": 2**16}  # bytes: for latency alone


# --- What runs in forked processes -------------------------------------------------------------


def probe(demo, result, settings: Mapping[str, Any] = {}, nccl="", hiccup=0, first=False):
    """The probe with other constants.

    nccl: this rank writes it as NCCL would, and the group passes for one of NCCL. hiccup: in the
    third call with the gradients this rank stands still for so many seconds. first: before all
    else that computes on this machine, so that what is measured is the link.
    """
    link = links.probe_module(demo)
    if first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    settings = dict(settings)
    if gradients := settings.pop("gradients", 0):
        link.gradient_bytes = lambda: gradients
    vars(link).update(settings)
    if nccl:
        pass_for_nccl(demo, nccl)
    if hiccup:
        stand_still(link, hiccup)
    demo.one_line_errors(link.main)


def pass_for_nccl(demo, text):
    set_up = demo.set_up

    def set_up_as_nccl(args, process):
        set_up(args, process)
        process.backend = "nccl"
        pattern = Path(os.environ["NCCL_DEBUG_FILE"])
        (pattern.parent / f"nccl.{os.uname().nodename}.{os.getpid()}.log").write_text(text)
        (pattern.parent / f"nccl.{os.uname().nodename}.1.log").write_text(VERBS)  # an earlier run

    demo.set_up = set_up_as_nccl


def stand_still(link, seconds):
    all_reduce, seen = link.dist.all_reduce, []

    def late(tensor):
        seen.extend([1] * (tensor.numel() == link.gradient_bytes() // 4))
        time.sleep(seconds * (sum(seen) == 3))
        return all_reduce(tensor)

    link.dist.all_reduce = late


def rounds(demo, result, backend, pause_ms):
    """Of a tensor of 1 KB, each all-reduce of which takes so much longer."""
    link, process = links.probe_module(demo), demo.Process()
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
    link = links.probe_module(demo)
    demo.gather = lambda *values: [[value] for value in values]
    write(result, link.of_all_nodes(demo.Process(), carried, whole)[0])


def call(demo, result, name, arguments):
    write(result, getattr(links.probe_module(demo), name)(*arguments))


# --- By size -----------------------------------------------------------------------------------


def tun_link(nodes: NamespacePair, **options: float) -> TunLink:
    reason = "a link with delay or losses needs /dev/net/tun"
    require(os.access("/dev/net/tun", os.R_OK | os.W_OK), reason)
    return TunLink(nodes.names, **options)


def over(link: TunLink) -> Mapping[str, str]:
    """The environment that puts the traffic on this link between the nodes."""
    return {"MASTER_ADDR": link.addresses[0], "GLOO_SOCKET_IFNAME": link.interface}


def probed(demo: ForkServer, **options: Any) -> dict:
    """The record of a probe with two ranks."""
    return demo.run([], 2, call=probe, **options).json_line("Probe")


def check_sizes(record: dict, wanted: list[int]) -> None:
    """Rising, with figures that agree with each other and with those of the gradients."""
    assert [size["bytes"] for size in record["sizes"]] == wanted
    for size in record["sizes"]:
        assert size["algbw_GBps"] == pytest.approx(size["bytes"] / size["ms"] / 1e6)
        assert size["busbw_GBps"] == pytest.approx(size["algbw_GBps"])  # 2 (n - 1) / n, n = 2
    (own,) = (s for s in record["sizes"] if s["bytes"] == record["all_reduce_bytes"])
    facts = {"ms": record["all_reduce_ms"]} | {k: record[k] for k in ("algbw_GBps", "busbw_GBps")}
    assert own == {"bytes": record["all_reduce_bytes"], **facts}


@LONG
def test_eight_sizes_with_the_gradients_among_them(demo):
    run = demo.run([], 2, call=probe)
    record = run.json_line("Probe")
    wanted = [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENTS, 2**26]
    check_sizes(record, wanted)
    small = [size["ms"] for size in record["sizes"][:2]]
    assert min(small) <= record["latency_ms"] <= max(small)
    # The table has these figures, in the units of nccl-tests.
    rows = [line.split() for line in run.lines(0) if re.fullmatch(r"[\d.e+\s-]+", line)]
    assert [int(row[0]) for row in rows] == wanted
    for row, size in zip(rows, record["sizes"], strict=True):
        figures = [1e3 * size["ms"], size["algbw_GBps"], size["busbw_GBps"]]
        assert [float(cell) for cell in row[1:]] == pytest.approx(figures, rel=0.01, abs=0.06)


def test_size_that_would_take_too_long_is_not_begun_but_for_the_gradients(demo):
    settings = {"ALL_SECONDS": 0.0, "gradients": 2**20}
    record = probed(demo, settings=settings)
    check_sizes(record, [2**10, 2**20])


def test_what_a_size_will_take_is_told_by_the_one_before(demo):
    """Two rounds at the pace of the last size, whose first round is a warm-up."""
    rounds = {2**18: [[1, 90.0], [10, 9.0]], 2**21: [[1, 900.0], [1, 80.0], [1, 70.0], [1, 75.0]]}
    job = demo.run(call=forwarded, rounds=[*rounds.items()], size=2**24)
    assert job.result() == pytest.approx(2 * 0.075 * 8)


def forwarded(demo, result, rounds, size):
    """NOTE: JSON has no numbers for keys."""
    call(demo, result, "expected_seconds", (dict(rounds), size))


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


def test_hiccup_does_not_count(demo):
    of_rank = [{}, {"options": {"hiccup": 0.5}}]
    settings = {"SIZES": [2**10], "gradients": 2**20}
    record = probed(demo, settings=settings, of_rank=lambda rank: of_rank[rank])
    assert record["all_reduce_ms"] < 50


@pytest.mark.parametrize(
    ("ms", "bandwidth"), [((100, 200), 0.25), ((200, 200), None), ((200, 100), None)]
)
def test_bandwidth_is_the_slope_where_there_is_one(demo, ms, bandwidth):
    sizes = [{"bytes": 15e6, "ms": ms[0]}, {"bytes": 40e6, "ms": ms[1]}]
    assert demo.run(call=call, name="slope", arguments=sizes).result() == bandwidth


RATE = 0.3  # Gb/s


def undisturbed(check: Callable[[], Any]) -> Any:
    """What `check` returns. Others at work on this machine make a link look slower, for a while:
    it may fail twice.
    """
    usual = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, usual, os.sched_param(0))
    except PermissionError:  # and its quota would be measured, not the link
        require(False, "needs root, and a cgroup with time for real-time processes")
    for _ in range(2):
        with contextlib.suppress(AssertionError):
            return check()
    return check()


def check_rate(demo: ForkServer, **options: Any) -> dict:
    """The record, once it has been found right."""
    with NamespacePair("300mbit") as nodes:
        record = probed(demo, nodes=nodes, first=True, **options)
    # The gradients' own, by the clock and by the counters, and the slope's.
    assert 8 * record["algbw_GBps"] == pytest.approx(RATE, rel=0.1)
    assert 8 * record["bandwidth_GBps"] == pytest.approx(RATE, rel=0.1)
    for node in record["nodes"]:
        assert node["interfaces"][0]["wire_Gbps"] == pytest.approx(RATE, rel=0.1)
    return record


def test_known_rate_by_the_gradients_and_by_the_slope(demo):
    settings = {"SIZES": [2**10, 2**24], "gradients": 2**23, "ROUNDS": 4}
    undisturbed(lambda: check_rate(demo, settings=settings))


@LONG
def test_known_rate_by_all_sizes_in_bounded_time(demo):
    record = undisturbed(lambda: check_rate(demo))
    # 64 MB, at 1.8 s each, would have passed the ten seconds.
    check_sizes(record, [2**10, 2**12, 2**15, 2**18, 2**21, 2**24, GRADIENTS])


@LONG
@pytest.mark.parametrize("delay_ms", [2, 10])
def test_latency_of_a_known_delay(demo, delay_ms):
    """Gloo's small all-reduce crosses the link four times."""

    def check() -> None:
        found = []
        with NamespacePair() as nodes:
            for delay in (0, delay_ms):
                with tun_link(nodes, delay_ms=delay) as link:
                    where = {"nodes": nodes, "env": over(link)}
                    record = probed(demo, settings=SMALL, first=True, **where)
                found.append(record["latency_ms"])
        assert found[1] == pytest.approx(4 * delay_ms + found[0], rel=0.2), found

    undisturbed(check)


def test_losses_are_seen(demo):
    """And told: no other test's link loses anything."""
    settings = {"SIZES": [2**10], "gradients": 2**21}
    with NamespacePair() as nodes, tun_link(nodes, loss=0.02) as link:
        job = demo.run([], 2, call=probe, settings=settings, nodes=nodes, env=over(link))
    for node in job.json_line("Probe")["nodes"]:
        tcp = node["tcp"]
        assert tcp["segments"] > 1000 > tcp["retransmits"] > 5
        words = f"TCP sent {tcp['retransmits']:,} of {tcp['segments']:,} segments again"
        assert f"Link of {node['host']}: {words}" in job.lines(0)


def test_errors_of_an_interface_are_those_of_the_whole_probe(demo):
    """Its bytes are those of the gradients; what had none of these is left out."""
    eth0 = {"name": "eth0", "kind": "ethernet", "speed_Gbps": 10, "tx_bytes": 90, "rx_bytes": 80}
    lo, wrong = eth0 | {"name": "lo"}, {"errors": {"tx_dropped": 3}}
    carried = {"interfaces": [eth0 | {"errors": {"tx_dropped": 1}}, lo]}
    whole = {"interfaces": [eth0 | {"tx_bytes": 500} | wrong, lo, eth0 | {"name": "eth1"} | wrong]}
    whole["tcp"] = {"segments": 70, "retransmits": 1}
    (node,) = demo.run(call=one_node, carried=carried, whole=whole).result()
    assert node["interfaces"] == [eth0 | wrong, lo] and node["tcp"] == whole["tcp"]


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
    texts = (SOCKETS, INFINIBAND)
    with NamespacePair() as nodes:

        def of_rank(rank):
            env = {"NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p.log"}
            return {"env": env, "options": {"nccl": texts[rank], "settings": SMALL}}

        run = demo.run([], 2, call=probe, nodes=nodes, of_rank=of_rank)
    found = [node["nccl"] for node in run.json_line("Probe")["nodes"]]
    assert [finding["transport"] for finding in found] == ["sockets", "infiniband"]
    assert found[0]["interfaces"] == ["ib0"] and found[1]["devices"] == ["mlx5_0:1"]
    assert [problem["id"] for problem in found[0]["problems"]] == ["no_ib_device"]
    sockets = "node0: NCCL used TCP sockets (network Socket) over ib0, because NCCL says "
    sockets += '"NET/IB : No device found."; problems: no_ib_device'
    infiniband = "node1: NCCL used InfiniBand (network IB) over mlx5_0:1"
    assert [line for line in run.lines(0) if "NCCL used" in line] == [sockets, infiniband]


def test_without_nccl_there_is_no_finding(demo, tmp_path):
    """Even if a file of an NCCL is there."""
    (tmp_path / "nccl.log").write_text(SOCKETS)
    env = {"NCCL_DEBUG_FILE": str(tmp_path / "nccl.log")}
    record = probed(demo, settings=SMALL, env=env)
    assert [node["nccl"] for node in record["nodes"]] == [None]


@pytest.mark.parametrize("pattern", ["nccl.%h.%p.log", "nccl.%h.log", "%%h.%x.%p"])
def test_files_of_a_nodes_processes(tmp_path, pattern):
    other = pattern.replace("%%h", "%h") if "%%" in pattern else pattern.replace("%h", "gpu7")
    for pid, text in ((11, SOCKETS), (12, SOCKETS.replace("ib0", "ib1"))):
        (tmp_path / other.replace("%p", str(pid))).write_text(text)
    found = nccl_text.of_processes(f"{tmp_path}/{pattern}", "gpu7.cluster.example", [11, 12, 13])
    assert found.interfaces == (["ib0", "ib1"] if "%p" in pattern else ["ib1"])
    assert nccl_text.of_processes(f"{tmp_path}/{pattern}", "gpu8", [13]) is None
    assert nccl_text.of_processes("", "node0", [1]) is None


def test_finding_in_one_line():
    wish = "NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
    cases = {
        wish + SOCKETS.partition("\n")[2]: "NCCL used TCP sockets (network Socket) over ib0, "
        "because NCCL_IB_DISABLE=1 turned InfiniBand and RoCE off",
        SOCKETS.partition("\n")[2]: "NCCL used TCP sockets (network Socket) over ib0, "
        "and does not say why",
        "NCCL version 2.30.7+cuda13.2\n": "NCCL's text names no network",
    }
    for text, said in cases.items():
        assert nccl_text.in_one_line(nccl_text.find(text.splitlines(keepends=True))) == said


# --- For people --------------------------------------------------------------------------------


def test_rails_are_summed_in_the_sentence(demo):
    """Of the slowest node, whose InfiniBand port carries IP here."""
    rail = {"kind": "infiniband", "speed_Gbps": 100}
    four = [rail | {"name": f"mlx5_{n}:1", "wire_Gbps": 90.5 - n} for n in range(4)]
    lo = {"name": "lo", "kind": "loopback", "speed_Gbps": None, "wire_Gbps": 500.0}
    ib0 = {"name": "ib0", "kind": "ipoib", "carrier": "mlx5_0:1", "speed_Gbps": 100}
    record = {"all_reduce_bytes": GRADIENTS, "all_reduce_ms": 1.0, "algbw_GBps": 44.87}
    cases = [
        ([four, four], "356 Gb/s on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1 (infiniband), "
         "89 % of their stated 400 Gb/s"),
        ([four, [lo, ib0 | {"wire_Gbps": 48.0}]], "48 Gb/s on ib0 (ipoib over mlx5_0:1), "
         "48 % of its stated 100 Gb/s"),
    ]  # fmt: skip
    for nodes, said in cases:
        found = record | {"nodes": [{"interfaces": interfaces} for interfaces in nodes]}
        text = demo.run(call=call, name="sentence", arguments=[found]).result()
        assert text == f"all-reduce of 44.9 MB in 1 ms: {said}"
