"""tools/nccl_log.py: against lines made from each message's C format, against the traps that real
logs hold, against NCCL's own library where it is installed, and from its command line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import mmap
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nccl_log
from analysis import nccl_rules, nccl_text
from support.processes import ROOT, WITH_LONG

TOOL = ROOT / "tools/nccl_log.py"

QUICK = settings(
    max_examples=60 if WITH_LONG else 20,
    deadline=None,
    database=None,  # leaves no folder behind
    suppress_health_check=[HealthCheck.too_slow],
)

# --- texts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A message of nccl_formats.txt; `last` is empty where the newest release looked at has it."""

    text: str
    first: str
    last: str
    by: str


def read_formats() -> list[tuple[nccl_rules.Rule, Format]]:
    rules, found = {rule.name: rule for rule in nccl_rules.RULES}, []
    for line in (Path(__file__).parent / "nccl_formats.txt").read_text().splitlines():
        if line.startswith("["):
            rule = rules.pop(line.strip("[]"))
        elif line and not line.startswith("#"):
            first, last, text = line.split(maxsplit=2)
            released = first[0].isdigit()
            by = "NCCL" if released else first
            found.append((rule, Format(text, first if released else "", last.strip("-"), by)))
    assert not rules, f"rules without a message: {[*rules]}"
    return found


FORMATS = read_formats()
BY_NCCL = [(rule, form) for rule, form in FORMATS if form.by == "NCCL"]
# What the strings of a message are; without an entry "x".
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "local_channel": ("CUMEM", "/read", "/CE"),
    "using_network": ("IB",),
    "plugin_assigned": ("IBext_v10",),
    "plugin_initialized": ("NCCL RDMA Plugin v9",),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "adapter": ("mlx5_0", "uverbs0", "IB", "mlx5", "/sys/devices/pci"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "socket_interface": ("eth0", "10.0.0.1<0>"),
    "wish": ("NCCL_IB_DISABLE",),
    "plugin_not_loaded": ("libfabric.so.1: cannot open shared object file",),
    "plugin_not_initialized": ("IBext_v10",),
    "no_ib_device": ("libibverbs.so.1",),
    "verbs_library": ("libibverbs.so.1",),
    "memlock": ("Cannot allocate memory",),
    "gpudirect_of_pair": ("IB", "mlx5_0"),
    "receive_failed": ("send to", "10.0.0.1<4000>", "Connection reset by peer"),
    "port_event": ("port error",),
}
FORMAT_STRINGS = {
    "NET/IB : Using%s ; OOB %s:%s": (" [0]mlx5_0:1/IB", "ib0", "10.0.0.1<0>"),
    "NET/IB: [%d] %s:%d/%s": ("mlx5_0", "RoCE"),
    "NCCL_IB_HCA set to %s": ("mlx5_0",),
    "NCCL_NET_PLUGIN set by environment to %s": ("none",),
    "%s/Plugin: Plugin name set by env to %s": ("NET", "libfoo.so"),
    "%s/Plugin: %s": ("NET", "libfabric.so.1: cannot open shared object file"),
    "%s/Plugin: %s: %s": ("NET", "libnccl-net.so", "libc.so.6: version `GLIBC_2.38' not found"),
    "NET/Plugin : Plugin load (%s) returned %d : %s": ("libnccl-net.so", "/a.so: bad ELF"),
    "%s/Plugin: Could not find:%s. %s": ("NET", " libnccl-net.so", ""),
    "%s/Plugin: Could not find:%s%s%s": ("NET", " libnccl-net.so", "", ""),
    "NET/%s : GPU Direct RDMA %s for HCA %d '%s'": ("IB", "Disabled", "mlx5_0"),
    "GPU Direct RDMA Disabled for %s": ("GPU/0-1 - NET/0-2",),
    "NET/IB : %s:%d Got async event : %s": ("mlx5_0", "port error"),
    "NET/IB : %s:%d Got async error event: %s": ("mlx5_0", "port active"),
    "NET/IB : %s:%d async fatal event: %s": ("mlx5_0", "port error"),
    "NET/IB : %s:%d Got non-fatal async event: %s(%d)": ("mlx5_0", "port active"),
    "socketProgressOpt: Call to recv from %s failed : %s": ("10.0.0.1<4000>", "Broken pipe"),
    "Net : Call to recv from %s failed : %s": ("10.0.0.1<4000>", "Broken pipe"),
    "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETE": ("Abort",),
}


def filled(rule, form, number=0) -> str:
    """A line as NCCL writes it from a format; 12 is what a completion's error has to be."""
    strings = iter(FORMAT_STRINGS.get(form.text, STRINGS.get(rule.name, ())))
    number = 12 if rule.name == "peer" else number
    number = 0 if "GPUDirect" in rule.name else number

    def value(match: re.Match) -> str:
        kind = match[0][-1]
        if kind == "s":
            return next(strings, "" if rule.name.endswith("_channel") else "x")
        return f"0x{number:x}" if kind == "p" else format(number, "x" if kind == "x" else "d")

    return re.sub(r"%\d*l*[dupsx]", value, form.text) if form.by == "NCCL" else form.text


def find(*lines: str):
    return nccl_text.find(lines)


def said(*lines: str) -> dict:
    """What a text says, and of its problems the names alone: their lines have prefixes."""
    found = find(*lines).to_dict()
    return found | {"problems": [problem["id"] for problem in found["problems"]]}


def told(*lines: str) -> dict[str, str]:
    """The problems of a text, each with its line."""
    return {problem.id: problem.line for problem in find(*lines).problems}


INFO = "node1:101:115 [0] NCCL INFO "
IB_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"
ROCE_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
SOCKET_LIST = INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0>"
PROVIDER = INFO + "NET/OFI Selected Provider is "
NO_DEVICE = INFO + "NET/IB : No device found."
HCA = INFO + "NCCL_IB_HCA set to mlx5_0"


def using(name: str) -> str:
    return INFO + "Using network " + name


def channel(end: str, number: int = 0) -> str:
    return INFO + f"Channel {number:02d}/0 : 0[0] -> 1[1] [send] via {end}"


def job(rank: int, network: str, lists: list[str], channels: list[str]) -> list[str]:
    """What one rank of a job on two nodes prints, without prefix."""
    return [
        "NCCL version 2.30.7+cuda13.3",
        "NET/Plugin: Could not find: libnccl-net.so",
        *lists,
        f"Using network {network}",
        f"comm 0x55 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
        f"Channel 00/02 :    0   1   2   3 of rank {rank}",
        *(
            f"Channel 0{n}/0 : {rank}[0] -> 3[1] [send] via {end}"
            for n, end in enumerate(channels)
        ),
        "Connected all rings, use ring PXN 0 GDR 1",
    ]


def ib_job(rank: int) -> list[str]:
    lists = ["NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"]
    ends = ["P2P/CUMEM/read", "NET/IB/0/GDRDMA", "NET/IB/1(1)/GDRDMA(PCI)/Shared"]
    return job(rank, "IB", lists, ends)


def socket_job(rank: int) -> list[str]:
    lists = [
        "NET/IB : No device found.",
        "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
        "NET/Socket : Using [0]eth0:10.0.0.1<0>",
    ]
    return job(rank, "Socket", lists, ["SHM/direct/direct", "NET/Socket/0", "NET/Socket/0"])


def efa_job(rank: int) -> list[str]:
    lists = ["NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"]
    return job(rank, "AWS Libfabric", lists, ["NET/AWS Libfabric/0/GDRDMA"])


JOBS = {"infiniband": ib_job, "sockets": socket_job, "efa": efa_job}
PREFIXES = {
    "bare": "{text}",
    "short": "[0] NCCL INFO {text}",
    "NCCL": "node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "WARN": "node{rank}:10{rank}:115 [0] transport/net_ib.cc:207 NCCL WARN {text}",
    "WARN, 2.30.7": "[2026-01-31 12:00:00] node{rank}:10{rank}:1 [0] a.cc:7 (f) NCCL WARN {text}",
    "torchrun": "[default{rank}]:node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "torch": "[rank{rank}]:[W1031 12:00:00.1 a.cpp:7] node:10{rank}:115 [0] NCCL INFO {text}",
    "srun": "{rank}: node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "mpirun": "[1,{rank}]<stdout>:node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "Ray": "\x1b[36m(Worker pid=7{rank})\x1b[0m node:10{rank}:115 [0] NCCL INFO {text}",
    "collector": "2026-01-31T12:00:00.123Z | node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "colour": "\x1b[36mnode{rank}:10{rank}:115 [0] NCCL INFO {text}\x1b[0m",
}


def text_of(jobs, prefix: str) -> list[list[str]]:
    """The lines of each rank, with line ends."""
    return [
        [PREFIXES[prefix].format(rank=rank, text=text) + "\n" for text in lines]
        for rank, lines in enumerate(jobs)
    ]


# --- each message of the tables ----------------------------------------------------------------


def test_each_format_filled_in_is_found_by_its_pattern():
    for number, (rule, form) in itertools.product((0, 7, 31), FORMATS):
        text = filled(rule, form, number)
        assert rule.literal in text, (rule.name, text)
        assert rule.pattern.search(text), (rule.name, text)
        for prefix in ("before ", "1: node:1:2 [0] NCCL INFO "):
            # Whose plugin was asked for is said by the text before it.
            found = rule.name == "plugin_asked" or rule.pattern.search(prefix + text)
            assert found, (rule.name, text)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NCCL version 2.30.7+cuda13.3", "2.30.7+cuda13.3"),
        ("NCCL version 2.3.7+cuda10.0", "2.3.7+cuda10.0"),
        ("RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+", "2.18.3+hip6.0"),
        ("RCCL version : 2.30.4-HEAD:0123abc", "2.30.4"),
        ("ncclSystemError: System call failed, NCCL version 2.14.3", "2.14.3"),
        ("This application was compiled with NCCL version 2.29.3, but is running", None),
        ("Mismatched NCCL version detected : rank 0 version 22903 rank 1 version 23007", None),
        ("NCCL version 2.30", None),
    ],
)
def test_version(line, version):
    assert find(INFO + line).version == version


def test_the_version_that_nccl_says_is_preferred_to_that_of_an_error_of_torch():
    lines = ["unhandled cuda error, NCCL version 2.14.3", "NCCL version 2.18.5+cuda12.1"]
    assert find(*lines).version == find(*reversed(lines)).version == "2.18.5+cuda12.1"


def test_each_format_of_a_connection_over_a_network_tells_network_and_gpudirect():
    for rule, form in FORMATS:
        if rule.name == "network_channel":
            found = find(INFO + filled(rule, form))
            assert (found.network, found.gpudirect, found.channels) == ("IB", 1, {"network": 1})


@pytest.mark.parametrize(
    ("end", "network", "gpudirect"),
    [
        ("Socket/0", "Socket", 0),
        ("IB/0/GDRDMA/GDCopy", "IB", 1),
        ("IBext_v10/7/GDRDMA/Shared", "IBext_v10", 1),
        ("AWS Libfabric/3/GDRDMA", "AWS Libfabric", 1),
        ("NCCL RDMA Plugin v9/0", "NCCL RDMA Plugin v9", 0),
        ("IB/0/GDRDMA/flush=None", "IB", 1),
        ("IB/0 comm 0x7f nRanks 04", "IB", 0),
    ],
)
def test_one_connection_over_a_network_tells_network_and_gpudirect(end, network, gpudirect):
    found = find(channel("NET/" + end))
    assert (found.network, found.gpudirect) == (network, gpudirect)
    assert found.channels == {"network": 1}


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("Ring 00 : 0[0] -> 1[1] via P2P/direct pointer", "p2p"),
        ("Ring 00 : 0[0] -> 1[1] via direct shared memory", "shm"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read", "p2p"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/CE", "p2p"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/MNNVL", "mnnvl"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/indirect/2[2]/read", "p2p"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "shm"),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct", "shm"),
    ],
)
def test_a_connection_without_network_is_local(end, kind):
    found = find(INFO + end)
    assert (found.transport, found.channels, found.gpudirect) == ("local", {kind: 1}, None)


@pytest.mark.parametrize(
    ("adapters", "devices"),
    [
        (" [0]mlx5_0:1/IB ; OOB ib0:10.0.0.1<0>", ["mlx5_0:1"]),
        (" [0]mlx5_0:1/IB [1]mlx5_1:2/IB [RO]; OOB ib0:10.0.0.1<0>", ["mlx5_0:1", "mlx5_1:2"]),
        (" [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [RO]; OOB a:b<0>", ["mlx5_0:1", "mlx5_1:1"]),
        (" [0]mlx5_0:1:2:0/IB [1]mlx5_1:1::1/IB ; OOB a:b<0>", ["mlx5_0:1", "mlx5_1:1"]),
        (" [0]mlx5_0:1/IB/SHARP [1]mlx5_2:1/IB ; OOB a:b<0>", ["mlx5_0:1", "mlx5_2:1"]),
        (" [0]mlx5_0:1/IB [RO]; OOB", ["mlx5_0:1"]),
        (" [0]mlx5_0:1/IB [1]mlx5_1:1/I", ["mlx5_0:1"]),
        (" [0]mlx5_0:1/IB [1]={[1] mlx5_1:1/IB, [2] mlx5_", ["mlx5_0:1", "mlx5_1:1"]),
    ],
)
def test_adapters_of_the_list(adapters, devices):
    found = find(INFO + "NET/IB : Using" + adapters)
    assert (found.devices, found.transport, found.network) == (devices, "infiniband", None)


def test_adapters_are_named_once_over_all_ranks():
    assert find(IB_LIST, IB_LIST, ROCE_LIST).devices == ["mlx5_0:1", "mlx5_1:1"]


def test_single_adapter_lines_tell_kind_but_are_no_proof():
    for line in (
        "NET/IB: [0] mlx5_0:1/RoCE ",
        "NET/IB: [0] mlx5_0:uverbs0:1/RoCE provider=mlx5 speed=100000 context=0x1 pciPath=/",
    ):
        assert find(INFO + line).transport == "unknown"
        assert find(INFO + line, using("IB")).transport == "roce"
        assert find(INFO + line).devices == ["mlx5_0:1"]


@pytest.mark.parametrize(
    ("text", "interfaces"),
    [
        ("NET/Socket : Using [0]eth0:10.0.0.1<0>", ["eth0"]),
        ("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]ib0:fe80::1%ib0<0>", ["eth0", "ib0"]),
        ("NET/Socket : Using [0]br-1a2b:172.17.0.1<0> [1]et", ["br-1a2b"]),
    ],
)
def test_interfaces_where_sockets_carry_the_data(text, interfaces):
    found = find(INFO + text)
    assert (found.transport, found.interfaces) == ("sockets", interfaces)


def test_interfaces_of_nccl_2_3():
    lines = (
        INFO + "NET : Using interface eth0:10.0.0.1<0>",
        INFO + "Using internal Network Socket",
    )
    found = find(*lines)
    assert (found.network, found.transport, found.interfaces) == ("Socket", "sockets", ["eth0"])


def test_nodes_are_the_most_of_any_communicator():
    line = INFO + "comm 0x55 rank 0 nRanks 2 nNodes {} localRanks 2 localRank 0 MNNVL 0"
    assert find(line.format(1), line.format(4), line.format(2)).nodes == 4


@pytest.mark.parametrize(
    ("before", "text", "network", "transport"),
    [
        (IB_LIST, "Using network IB", "IB", "infiniband"),
        (ROCE_LIST, "Using network IB", "IB", "roce"),
        ("", "Using network IB", "IB", "unknown"),
        ("", "Using network Socket", "Socket", "sockets"),
        (ROCE_LIST, "Using network IBext_v10", "IBext_v10", "roce"),
        ("", "Using network IBext", "IBext", "plugin"),
        (IB_LIST, "Using network NCCL RDMA Plugin v9", "NCCL RDMA Plugin v9", "infiniband"),
        ("", "Using network NCCL RDMA Plugin v9", "NCCL RDMA Plugin v9", "plugin"),
        ("", "Using network FasTrak", "FasTrak", "plugin"),
        (PROVIDER + "efa (found 4 nics)", "Using network AWS Libfabric", "AWS Libfabric", "efa"),
        (PROVIDER + "efa, fabric is efa", "Using network Libfabric", "Libfabric", "efa"),
        (PROVIDER + "cxi (found 4 nics)", "Using network Libfabric", "Libfabric", "plugin"),
        ("", "Using network Libfabric", "Libfabric", "plugin"),
        ("", "Using internal Network Socket", "Socket", "sockets"),
        ("", "Using external Network FooNet", "FooNet", "plugin"),
        ("", "Assigned NET plugin Socket to comm", None, "sockets"),
        (IB_LIST, "Assigned NET plugin IB to comm", None, "infiniband"),
        (ROCE_LIST, "Initialized NET plugin IB", None, "roce"),
        ("", "Initialized NET plugin IBext_v10", None, "plugin"),
        (IB_LIST, "", None, "infiniband"),
        (SOCKET_LIST, "", None, "sockets"),
        ("", "NCCL version 2.30.7+cuda13.3", None, "unknown"),
    ],
)
def test_from_evidence_to_network_and_transport(before, text, network, transport):
    for lines in ((before, INFO + text), (INFO + text, before)):
        found = find(*lines)
        assert (found.network, found.transport) == (network, transport)


def test_connections_outrank_what_was_announced():
    found = find(using("Socket"), IB_LIST, channel("NET/IB/0/GDRDMA"))
    assert (found.network, found.transport) == ("IB", "infiniband")


def test_an_announced_network_outranks_plugins_and_lists():
    found = find(INFO + "Initialized NET plugin IB", IB_LIST, SOCKET_LIST, using("Socket"))
    assert (found.network, found.transport) == ("Socket", "sockets")


def test_where_ranks_differ_the_slowest_counts_and_it_is_said():
    for lines in (
        [using("IB"), IB_LIST, using("Socket")],
        [using("Socket"), IB_LIST, using("IB")],
    ):
        found = find(*lines)
        assert (found.network, found.networks) == ("Socket", ["Socket", "IB"])
        assert found.transport == "sockets"
        assert any("Ranks differ (Socket, IB)" in text for text in nccl_text.describe(found))


def test_adapters_of_both_kinds_are_told_apart_by_the_connections():
    both = INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB a:b<0>"
    assert find(both, using("IB")).transport == "unknown"
    assert find(both, channel("NET/IB/1")).transport == "roce"
    assert find(both, channel("NET/IB/0")).transport == "infiniband"
    assert find(both, channel("NET/IB/0"), channel("NET/IB/1")).transport == "unknown"
    assert find(IB_LIST, ROCE_LIST, using("IB")).transport == "unknown"  # nodes that differ


def test_gpudirect_is_told_in_words_for_all_networks_but_sockets():
    text = nccl_text.describe(find(IB_LIST, channel("NET/IB/0/GDRDMA"), channel("NET/IB/1")))[1]
    assert text == "Connections seen: 2 over the network, 1 of them with GPUDirect RDMA."


def test_nvlink_between_nodes_is_local():
    nodes = INFO + "comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 1"
    found = find(nodes, using("IB"), channel("P2P/MNNVL"))
    assert (found.transport, found.nodes) == ("local", 2)
    assert "NVLink, between nodes too" in nccl_text.describe(found)[0]


# --- problems ----------------------------------------------------------------------------------


# Rules with a problem; the formats of each are the lines that tell it.
RULES_OF = {
    "no_ib_device": ("no_ib_device", "no_devices"),
    "verbs_library_missing": ("verbs_library",),
    "memlock": ("memlock",),
    "plugin_failed": (
        "plugin_not_loaded",
        "plugin_not_initialized",
        "plugin_unsupported",
        "plugin_symbol",
        "plugin_ofi",
    ),
    "network_not_found": ("no_such_network", "no_network"),
    "gpudirect_off": ("gpudirect_of_adapter", "gpudirect_of_pair"),
    "peer_unreachable": ("peer",),
    "connection_failed": (
        "connect_failed",
        "connection_lost",
        "receive_failed",
        "retries_exceeded",
    ),
    "no_interface": ("no_interface", "no_start_up_device"),
    "suspect_interface": (),
    "link_renegotiated": ("speed_change", "port_event"),
    "rank_twice": ("rank_twice",),
    "timeout": ("timeout", "watchdog"),
    "aborted": ("aborted",),
}
# What those formats, filled in as above, leave open.
OTHER_LINES = {
    "verbs_library_missing": ("Could not open libibverbs.so.1",),
    "peer_unreachable": (
        "Got completion from peer A<4> with status=IBV_WC_RETRY_EXC_ERR(12) o",
        "Connect to 10.0.0.2<40000> failed : No route to host",
        "socketConnect: connect to A<4> failed : Network is unreachable",
        "connect to A<4> returned Connection timed out, exceeded error retry count",
    ),
    "suspect_interface": ("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]docker0:172.17.0.1<0>",),
    "link_renegotiated": ("NET/IB : mlx5_0:1 async fatal event: port active",),
}


@pytest.mark.parametrize("problem", RULES_OF)
def test_a_problem_is_told_with_its_line(problem):
    named = RULES_OF[problem]
    texts = [filled(rule, form) for rule, form in FORMATS if rule.name in named]
    for text in (*texts, *OTHER_LINES.get(problem, ())):
        line = "node1:101:115 [0] misc/socket.cc:7 NCCL WARN " + text
        assert told(line).get(problem) == line.strip(), text
        assert problem in told(text), text


def test_every_problem_has_its_advice_and_a_test():
    noted = {rule.problem for rule in nccl_rules.RULES if rule.problem}
    derived = {"fell_back_to_sockets", "gpudirect_off", "suspect_interface"}
    assert set(nccl_rules.ADVICE) == noted | derived == {*RULES_OF, "fell_back_to_sockets"}
    named = {name for names in RULES_OF.values() for name in names}
    assert {rule.name for rule in nccl_rules.RULES if rule.problem} <= named
    assert all(len(advice) > 30 and "\n" not in advice for advice in nccl_rules.ADVICE.values())


def test_interfaces_that_seldom_join_nodes_are_suspect_and_usual_ones_are_not():
    suspect = ("lo", "docker0", "veth12ab", "br-12ab", "virbr0", "tailscale0")
    usual = ("eth0", "ib0", "ens5", "bond0", "br0", "lan0", "enp129s0", "hsn0")
    for name in (*suspect, *usual):
        line = INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>"
        assert told(line) == ({"suspect_interface": line} if name in suspect else {}), name


@pytest.mark.parametrize(
    "text",
    [
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
        "NET/Plugin: No plugin found (libnccl-net.so)",
        "No network plugin found.",
        "NET/Plugin: Could not find: libnccl-net.so",
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NET/Plugin : Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No "
        "such file or directory.",
        "NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No "
        "such file or directory : when loading libnccl-net.so",
        "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: No such file or "
        "directory No plugin found (libnccl-net.so), using internal implementation",
        "NET/Plugin: Using internal network plugin.",
        "NET/Plugin: Loaded net plugin NCCL RDMA Plugin v6 (v6)",
        "ncclOsDlopen(libnccl-net.so) failed: libnccl-net.so: cannot open shared object file: No",
        "NET/Plugin: Failed to find ncclNetPlugin_v10 symbol.",
        "NET/Plugin: Failed to find ncclCollNetPlugin symbol (>= v5).",
        "NET/Plugin: Failed to find ncclCollNetPlugin_v9 symbol.",
        "TUNER/Plugin: libfoo.so: cannot open shared object file: No such file or directory",
        "TUNER/Plugin: Could not find: libnccl-tuner.so",
        "PROFILER/Plugin: Could not find: libnccl-profiler.so.",
        "ENV/Plugin: Could not find: libnccl-env.so",
        "GIN/Plugin: Could not find: libnccl-gin.so",
        "Failed to initialize any GIN plugin",
        "Failed to initialize NET plugin IB",
        "Failed to initialize NET plugin Socket",
        "Count not open libibverbs.so",
        "Call to ibv_reg_mr failed with error Bad address",
        "Got completion from peer A<4> with status=5 opcode=0 len=0 vendor err 249",
        "Got completion from peer A<4> with error 5, opcode 0, len 12, vendor err 12",
        "Got completion from peer A<4> with status=129 opcode=12",
        "Call to connect returned Connection refused, retrying",
        "socketConnect: connect to A<4> returned Connection timed out, retrying (3/34) after",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1000 - Destroy COMPLETE",
        "Call to connect failed: Software caused connection abort",
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
        "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'",
    ],
)
def test_what_is_normal_is_no_problem(text):
    assert told(INFO + text) == {}


def test_the_verbs_library_was_opened_where_only_its_first_name_failed():
    lines = [INFO + "Could not open libibverbs.so", NO_DEVICE, using("Socket")]
    assert set(told(*lines)) == {"no_ib_device"}


@pytest.mark.parametrize(
    "missing",
    [
        "NET/Plugin: Could not find: libnccl-net.so",
        "NET/Plugin : Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No",
    ],
)
def test_a_missing_plugin_is_a_problem_only_where_it_was_asked_for(missing):
    line = INFO + missing
    for asked in ("NCCL_NET_PLUGIN set by environment to foo", "Plugin name set by env to foo"):
        assert told(INFO + asked, line)["plugin_failed"] == line
        own = line.replace("libnccl-net.so", "foo")
        assert told(INFO + asked, own)["plugin_failed"] == own
        assert "plugin_failed" not in told(INFO + asked, own, using("AWS Libfabric"))
    asked_for_none = INFO + "NCCL_NET_PLUGIN set by environment to none"
    of_the_tuner = INFO + "TUNER/Plugin: Plugin name set by env to foo"
    assert told(line) == told(asked_for_none, line) == told(of_the_tuner, line) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NCCL_IB_HCA set to mlx5_0", "NCCL_IB_HCA set to mlx5_0"),
        ("NCCL_IB_DISABLE set by environment to 0.", "set by environment to 0."),
        ("NCCL_NET set by environment to IB", "NCCL_NET set by environment to IB"),
        ("NCCL_NET=IB", "NCCL_NET=IB"),
        ("0: export NCCL_IB_HCA=mlx5_0,mlx5_1", "NCCL_IB_HCA=mlx5_0"),
        ('[GPU 0] Run {"env": {"NCCL_IB_HCA": "mlx5_0"}}', "NCCL_IB_HCA"),
        ("Failed to initialize NET plugin SPCX", "SPCX"),
        (
            "NCCL_NET_PLUGIN set by environment to foo\nNET/Plugin: Could not find: foo",
            "Could not find: foo",
        ),
        ("", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_IB_DISABLE set by environment to 1.", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_NET=Socket", None),
        ("Failed to initialize NET plugin IB", None),
        (INFO + "set NCCL_NET=IB to use it", None),
    ],
)
def test_sockets_are_a_fall_back_only_where_more_was_asked_for(text, why):
    lines = text.splitlines()
    problems = told(*lines, using("Socket"))
    assert ("fell_back_to_sockets" in problems) == (why is not None)
    assert (why or "") in problems.get("fell_back_to_sockets", "")
    assert "fell_back_to_sockets" not in told(*lines, using("IB"), IB_LIST)


def test_channels_over_rdma_without_gpudirect_are_a_problem_told_by_the_first():
    first, second = channel("NET/IB/0"), channel("NET/IB/1")
    with_it = channel("NET/IB/0/GDRDMA")
    assert told(IB_LIST, first, second) == {"gpudirect_off": first}
    assert "gpudirect_off" in told(first)
    assert told(IB_LIST, first, with_it) == {}
    assert told(channel("NET/Socket/0")) == told(channel("NET/FooNet/0")) == {}
    pair = INFO + "GPU Direct RDMA Disabled for GPU 0 / HCA 1 (distance 6 > 4)"
    adapter = INFO + "NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'"
    # An adapter's line counts while some channel has none, a far pair's where no channel has it.
    assert told(adapter, IB_LIST, with_it, second) == {"gpudirect_off": adapter}
    assert told(adapter, IB_LIST, with_it) == told(pair, IB_LIST, with_it, second) == {}
    assert told(pair, IB_LIST, second) == {"gpudirect_off": pair}
    # It is no matter of sockets or of one node.
    assert told(pair, adapter, using("Socket")) == told(pair, adapter, channel("P2P/IPC")) == {}


# --- traps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Bootstrap : Using [0]ib0:10.0.0.1<0>",
        "Bootstrap : Using ib0:10.0.0.1<0>",
        "Bootstrap: Using ib0:10.0.0.1<0>",
        "NET/IB : Using interface ib0 for sideband communication",
        "NET/IB : Using [RO]; OOB ib0:10.0.0.1<0>",
        "NET/IB : No device found.",
        "Connected all rings, use ring PXN 0 GDR 1",
        "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
        "NET/IB : GPU Direct RDMA (DMABUF) enabled for HCA 0 'mlx5_0'",
        "DMA-BUF is available on GPU device 0",
        "Support for DMA-BUF registrations: false",
        "GPU Direct RDMA Enabled for GPU 0 / HCA 1 (distance 3 <= 4), read 1 mode Default",
        "NCCL_NET set by environment to IB",
        "NCCL_SOCKET_IFNAME set by environment to ib0",
        "NCCL_IB_HCA set to mlx5_0",
        "NET/Plugin: Loaded net plugin IBext_v10 (v10)",
        "Successfully loaded external network plugin libnccl-net.so",
        "P2P plugin v9 IBext_v9",
        "Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",
        "NET/OFI Selected Provider is efa (found 4 nics)",
        "Channel 00/02 :    0   1",
        "CollNet 00/0 : 0 [send] via COLLNET/IB/0",
        "Using non-device net plugin version 0",
        "Failed to initialize NET plugin IB",
    ],
)
def test_start_up_wishes_and_possibilities_decide_nothing(text):
    found = find(INFO + text)
    assert (found.transport, found.network, found.decided) == ("unknown", None, False)
    assert (found.gpudirect, found.channels, found.devices, found.interfaces) == (None, {}, [], [])


def test_no_start_up_line_changes_a_decision():
    for lines in (socket_job(0), ib_job(0)):
        start_up = [
            "Bootstrap : Using [0]ib7:10.0.0.1<0>",
            "NET/IB : Using interface ib7 for sideband communication",
            "Connected all rings, use ring PXN 0 GDR 1",
            "DMA-BUF is available on GPU device 0",
            "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
            "Channel 00/02 :    0   1",
        ]
        assert find(*start_up, *lines).to_dict() == find(*lines, *start_up).to_dict()
        assert find(*start_up, *lines).to_dict() == find(*lines).to_dict()


def test_one_node_is_local_though_a_network_is_announced():
    for extra in (
        [],
        [INFO + "comm 0x5 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0"],
    ):
        found = find(using("IB"), IB_LIST, *extra, channel("P2P/CUMEM"), channel("SHM/direct"))
        assert (found.network, found.transport, found.gpudirect) == ("IB", "local", None)
        assert found.problems == []


def test_a_rank_amid_its_node_does_not_make_several_nodes_local():
    nodes = INFO + "comm 0x5 rank 1 nRanks 8 nNodes 2 localRanks 4 localRank 1 MNNVL 0"
    assert find(nodes, using("IB"), IB_LIST, channel("P2P/CUMEM")).transport == "infiniband"
    assert find(nodes, channel("P2P/CUMEM")).transport == "unknown"


def test_sockets_that_are_always_started_first_say_nothing_before_adapters():
    first = INFO + "NET/Socket : Using [0]ib0:10.0.0.1<0>"
    found = find(first, IB_LIST)
    assert (found.transport, found.interfaces) == ("infiniband", [])
    assert find(first, NO_DEVICE).transport == "sockets"


def test_sockets_that_are_started_before_a_plugin_are_no_proof():
    provider = INFO + "NET/OFI Selected Provider is efa (found 4 nics)"
    assert find(SOCKET_LIST, provider).transport == "unknown"


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", JOBS)
def test_no_prefix_changes_what_a_text_says(kind, prefix):
    lines = text_of([JOBS[kind](0), JOBS[kind](1)], prefix)
    found = said(*itertools.chain(*lines))
    assert found["transport"] == kind
    assert found == said(*JOBS[kind](0), *JOBS[kind](1))


@QUICK
@given(
    kind=st.sampled_from(sorted(JOBS)),
    prefix=st.sampled_from(sorted(PREFIXES)),
    turns=st.lists(st.integers(0, 2), max_size=60),
)
def test_interleaved_ranks_say_what_they_say_one_after_another(kind, prefix, turns):
    ranks = text_of([JOBS[kind](rank) for rank in range(3)], prefix)
    queues, mixed = [list(lines) for lines in ranks], []
    for turn in turns + [0] * 20 + [1] * 20 + [2] * 20:
        mixed += [queues[turn].pop(0)] if queues[turn] else []
    assert said(*mixed) == said(*itertools.chain(*ranks))


@QUICK
@given(kind=st.sampled_from(sorted(JOBS)), share=st.floats(0, 1))
def test_a_text_cut_anywhere_says_what_the_whole_says_or_nothing(kind, share):
    # Where no line has an end, as in a list of lines, none is taken for cut.
    text = "first line\n" + "".join(text_of([JOBS[kind](0)], "NCCL")[0])
    whole = find(*text.splitlines(keepends=True))
    found = find(*text[: int(share * len(text))].splitlines(keepends=True))
    # Without a last word of the network an adapter list may be the last evidence.
    assert found.transport in ("unknown", whole.transport)
    assert found.network in (None, whole.network)
    assert set(found.devices) <= set(whole.devices)
    assert found.version in (None, whole.version, "2.30.7")
    assert found.gpudirect in (None, *range(3))
    if found.gpudirect is not None and kind != "sockets":
        assert found.gpudirect == found.channels["network"]


@QUICK
@given(
    kind=st.sampled_from(sorted(JOBS)),
    prefix=st.sampled_from(["NCCL", "torchrun", "mpirun", "Ray", "colour"]),
    share=st.floats(0, 1),
)
def test_a_text_that_breaks_into_another_changes_nothing_but_counts(kind, prefix, share):
    broken, other = text_of([JOBS[kind](0), JOBS[kind](1)], prefix)
    broken, other = "".join(broken), "".join(other)
    cut = int(share * len(broken))
    text = broken[:cut] + other + broken[cut:]
    whole, found = find(*other.splitlines(keepends=True)), find(*text.splitlines(keepends=True))
    for name in ("network", "networks", "transport", "devices", "interfaces", "nodes"):
        assert getattr(found, name) == getattr(whole, name), name
    if kind != "sockets":
        assert found.gpudirect == found.channels["network"]


@pytest.mark.parametrize("name", ["I", "Sock", "AWS Libfab", "Lib", "NCCL RDMA Plugin v", ""])
def test_half_a_network_name_is_none(name):
    for line in (
        using(name),
        using(name) + "node2:7:8 [1] NCCL INFO comm 0x5",
        using(name) + "\n",
    ):
        found = find("first line\n", line)
        assert (found.network, found.transport) == (None, "unknown")


def test_a_name_that_another_text_cuts_is_taken_only_if_nccl_knows_it():
    joined = "[default1]:node2:7:8 [1] NCCL INFO comm 0x5"
    assert find(using("FooNe") + " node2:7:8 [1] NCCL INFO comm 0x5").network is None
    assert find(using("FooNet") + "\n").network == "FooNet"
    assert find(using("IB") + " node2:7:8 [1] NCCL INFO comm 0x5").network == "IB"
    assert find(using("IB") + joined).network is None
    assert find("[0] NCCL INFO Using network FooNe[1] NCCL INFO comm 0x5").network is None


@pytest.mark.parametrize(
    "other",
    [" node2:7:8 [1] NCCL INFO x", "node2:7:8 [1] NCCL INFO x", "[default1]:node2:7:8 [1] x"],
)
def test_half_a_version_and_half_a_provider_are_none(other):
    assert find("NCCL version 2.30.1" + other).version is None
    assert find("NCCL version 2.30.7+cuda1" + other).version in (None, "2.30.7")
    half = INFO + "NET/OFI Selected provider is ef" + other
    whole = INFO + "NET/OFI Selected provider is efa"
    assert find(half, using("Libfabric")).transport == "plugin"
    assert find(half, whole, using("Libfabric")).transport == "efa"


def test_a_channel_that_lacks_its_end_proves_the_network_but_not_gpudirect():
    found = find(
        channel("NET/IB/0/GDR") + " node2:7:8 [1] NCCL INFO x", channel("NET/IB/1/GDRDMA")
    )
    assert (found.network, found.gpudirect, found.channels) == ("IB", 1, {"network": 1})
    assert find("x\n", channel("NET/IB/0")).gpudirect is None


def test_messages_on_one_line_are_all_read():
    line = f"{NO_DEVICE} {SOCKET_LIST} NCCL INFO Using network Socket\n"
    found = find(line)
    assert (found.network, found.interfaces) == ("Socket", ["eth0"])
    assert [problem.id for problem in found.problems] == ["no_ib_device"]


def test_carriage_returns_end_lines():
    bar = f"\r 5%|###  | 5/100\r{using('FooNet')}\r{IB_LIST}\r 6%|###  | 6/100\n"
    found = find("first line\n", bar)
    assert (found.network, found.devices) == ("FooNet", ["mlx5_0:1", "mlx5_1:1"])
    found = find("Channel 00/0 : via NET/IB/0\rChannel 01/0 : via NET/IB/1/GDRDMA\n")
    assert (found.gpudirect, found.channels) == (1, {"network": 2})


@pytest.mark.parametrize(
    "around",
    [
        "\x1b[36m{}\x1b[0m\n",
        '{{"log": "{}\\n", "stream": "stderr"}}\n',
        "it said `{}`, twice",
    ],
)
def test_neither_colours_nor_a_quotation_are_part_of_a_name(around):
    assert find(around.format(using("FooNet"))).network == "FooNet"


@QUICK
@given(lines=st.lists(st.text(max_size=80), max_size=20))
def test_text_of_anything_decides_nothing(lines):
    found = find(*lines)
    assert (found.transport, found.network) == ("unknown", None)


@QUICK
@given(data=st.data())
def test_any_mixture_of_pieces_ends_in_a_finding(data):
    pieces = [filled(rule, form) for rule, form in FORMATS] + [
        "node:1:2 [0] ",
        "NCCL INFO ",
        "\x1b[",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    found = find(text)
    assert found.transport in ("local", *nccl_rules.SLOWEST)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert all(problem.line and problem.advice for problem in found.problems)
    assert nccl_text.describe(found)


# --- against the installed library -------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    """NCCL's library of the distribution that torch brings, and its version."""
    try:
        files = importlib.metadata.files("nvidia-nccl-cu13") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(file.locate()) for file in files if file.name == "libnccl.so.2"]
    if not paths or not paths[0].is_file():
        pytest.skip("the distribution nvidia-nccl-cu13, with libnccl.so.2, is not installed")
    with paths[0].open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        version = re.search(rb"NCCL version (\d+\.\d+\.\d+)\+cuda", image)
        assert version, "a library that does not say its version"
        yield image, version[1].decode()


def number_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_each_format_of_the_installed_version_is_in_its_library(library):
    image, version = library
    # Texts lie close together: to search among them takes a hundredth of the whole file's time.
    middle = image.find(b"Using network %s\0")
    near = image[max(0, middle - (1 << 21)) : middle + (1 << 21)] if middle >= 0 else b""
    missing = [
        form.text
        for rule, form in BY_NCCL
        if rule.name != "version"  # that one the compiler puts together
        and number_of(form.first) <= number_of(version)
        and (not form.last or number_of(version) <= number_of(form.last))
        and form.text.encode() + b"\0" not in near
        and image.find(form.text.encode() + b"\0") < 0
    ]
    assert missing == []


def test_the_formats_are_written_as_releases():
    for _, form in BY_NCCL:
        assert re.fullmatch(r"2\.\d+\.\d+", form.first)
        assert not form.last or number_of(form.first) <= number_of(form.last)
    assert all(form.first == form.last == "" for _, form in FORMATS if form.by != "NCCL")


# --- command line ------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def called(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the tool, called in this process."""
    try:
        code = nccl_log.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_says_in_sentences_what_was_used_and_why_not_another(tmp_path):
    result = run(write(tmp_path / "node0.log", [HCA, *socket_job(0)]))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "NCCL 2.30.7+cuda13.3 used TCP sockets (network Socket) over eth0, 2 nodes.",
        "Connections seen: 2 over the network; 1 without a network.",
        'Why not another network: NCCL says "NET/IB : No device found.".',
        "no_ib_device: NET/IB : No device found.",
        f"    -> {nccl_rules.ADVICE['no_ib_device']}",
        f"fell_back_to_sockets: {HCA}",
        f"    -> {nccl_rules.ADVICE['fell_back_to_sockets']}",
    ]


def test_the_command_prints_one_json_object(tmp_path):
    result = run("--json", write(tmp_path / "node0.log", ib_job(0)))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "version": "2.30.7+cuda13.3",
        "network": "IB",
        "networks": ["IB"],
        "transport": "infiniband",
        "devices": ["mlx5_0:1", "mlx5_1:1"],
        "interfaces": [],
        "gpudirect": 2,
        "channels": {"p2p": 1, "network": 2},
        "nodes": 2,
        "reason": None,
        "problems": [],
    }


def test_files_and_folders_are_read_as_one_text(tmp_path, capsys):
    (tmp_path / "run/rank1").mkdir(parents=True)
    write(tmp_path / "run/nccl.a.101", ib_job(0))
    write(tmp_path / "run/rank1/nccl.b.102", ib_job(1))
    (tmp_path / "run/checkpoint.pt").write_bytes(b"\0" * 100 + b"\nvia NET/Socket/0\n")
    other = write(tmp_path / "other.log", [NO_DEVICE])
    code, out, _ = called(capsys, tmp_path / "run", other, "--json")
    found = json.loads(out)
    assert (code, found["networks"], found["channels"]) == (0, ["IB"], {"p2p": 2, "network": 4})
    assert [problem["id"] for problem in found["problems"]] == ["no_ib_device"]


def test_each_file_may_lack_its_last_line_end(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).write_text("first line\n" + using("Socket"))
    code, out, _ = called(capsys, tmp_path / "a", tmp_path / "b", "--json")
    assert (code, json.loads(out)["networks"]) == (0, ["Socket"])


def test_bytes_that_are_no_text_do_not_stop_the_reading(tmp_path, capsys):
    lines = "\n".join(ib_job(0)).encode()
    (tmp_path / "log").write_bytes(b"\xff\xfe\0\x80 tqdm\r" + lines + b"\n\xc3")
    code, out, _ = called(capsys, tmp_path / "log")
    assert (code, out.startswith("NCCL 2.30.7+cuda13.3 used InfiniBand")) == (0, True)


def test_a_line_without_end_is_read_in_parts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nccl_text, "LINE_LIMIT", 1000)
    (tmp_path / "log").write_text("x" * 4900 + " " + using("IB") + " " + "y" * 5000 + "\n")
    assert called(capsys, tmp_path / "log")[0] == 1  # "IB yyy…" is no name that could be trusted
    assert all(len(line) <= 1000 for line in nccl_text.lines_of(tmp_path / "log"))


def test_a_text_that_decides_nothing_ends_in_one_line_and_code_1(tmp_path, capsys):
    path = write(tmp_path / "log", [INFO + "Bootstrap : Using eth0:10.0.0.1<0>"])
    result = run(path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("nccl_log.py: nothing decided: start the job with NCCL_DEBUG")
    assert result.stderr.count("\n") == 1
    code, out, err = called(capsys, "--json", path)
    assert (code, json.loads(out)["transport"], err.count("\n")) == (1, "unknown", 1)
    code, out, err = called(capsys, write(path, [NO_DEVICE]))
    assert (code, err.count("\n")) == (1, 1)
    assert "no_ib_device: " + NO_DEVICE in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "no such file or folder: "),
        (["link"], "no such file or folder: "),
        (["log", "gone"], "no such file or folder: "),
        (["empty"], "no text of NCCL in "),
        (["binary"], "no text of NCCL in "),
        (["other"], "no text of NCCL in "),
        (["folder"], "no text of NCCL in "),
        ([], "the following arguments are required: FILE_OR_FOLDER"),
        (["--xml", "folder"], "unrecognized arguments: --xml"),
    ],
)
def test_wrong_usage_ends_in_one_line_and_code_2(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(Path("log"), ib_job(0))
    Path("link").symlink_to("gone")
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(256)) * 40)
    write(Path("other"), ["[GPU 0] Epoch 1 | Step 1"])
    Path("folder").mkdir()
    code, out, err = called(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("nccl_log.py: error: " + message)
    assert ("NCCL_DEBUG=INFO" in err) == ("no text of NCCL" in message)


def test_a_file_that_cannot_be_opened_or_fails_while_it_is_read_is_named(
    tmp_path, capsys, monkeypatch
):
    path = write(tmp_path / "log", ib_job(0))

    def fail(path):
        yield using("IB")
        raise OSError(5, "Input/output error")  # as a read fails: without the name

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    for where, name, broken in ((nccl_text, "lines_of", fail), (Path, "open", refuse)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, broken)
            code, _, err = called(capsys, path)
        why = "Permission denied" if broken is refuse else "Input/output error"
        assert (code, err) == (2, f"nccl_log.py: error: cannot read {path}: {why}\n")


def test_characters_that_the_terminal_lacks_are_no_error(tmp_path):
    path = write(tmp_path / "log", [using("Soc\u2713ket"), using("Socket")])
    for option in ("--json", "--"):
        result = subprocess.run(
            [sys.executable, TOOL, option, path],
            env={"PYTHONIOENCODING": "ascii"},
            capture_output=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, b"")


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path):
    path = write(tmp_path / "log", ib_job(0))
    command = f"set -o pipefail; {shlex.join([sys.executable, str(TOOL), str(path)])} | :"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_tool_needs_no_torch():
    code = (
        f"import sys; sys.argv = ['x']; sys.path.insert(0, {str(TOOL.parent)!r}); import nccl_log"
    )
    check = code + "; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
