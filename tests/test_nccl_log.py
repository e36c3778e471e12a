"""tools/nccl_log.py: against lines made from each message's C format, against the traps that real
logs hold, against NCCL's own library where it is installed, and from its command line."""

from __future__ import annotations

import importlib.metadata
import io
import itertools
import json
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

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


class Format(NamedTuple):
    """A message of nccl_formats.txt; `last` is empty where the newest release looked at has it."""

    rule: nccl_rules.Rule
    problem: str
    first: str
    last: str
    by: str
    text: str


def read_formats() -> list[Format]:
    rules, found = {rule.name: rule for rule in nccl_rules.RULES}, []
    for line in (Path(__file__).parent / "nccl_formats.txt").read_text().splitlines():
        if line.startswith("["):
            name, problem = line[1:].split("]")
            rule = rules.pop(name)
        elif line and not line.startswith("#"):
            first, last, text = line.split(maxsplit=2)
            by = "NCCL" if first[0].isdigit() else first
            found.append(Format(rule, problem.strip(), first, last.strip("-"), by, text))
    assert not rules, f"rules without a message: {[*rules]}"
    return found


FORMATS = read_formats()
# What the strings of a message are, by its format or else its rule; those that are left are "x".
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "adapter": ("mlx5_0", "uverbs0", "IB", "mlx5", "/sys/devices/pci"),
    "NET/IB: [%d] %s:%d/%s": ("mlx5_0", "RoCE"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "wish": ("NCCL_IB_DISABLE",),
    "plugin_not_loaded": ("libfabric.so.1: cannot open shared object file",),
    "%s/Plugin: %s": ("NET", "libfabric.so.1: cannot open shared object file"),
    "%s/Plugin: %s: %s": ("NET", "libnccl-net.so", "libc.so.6: version `GLIBC_2.38' not found"),
    "NET/Plugin : Plugin load (%s) returned %d : %s": ("libnccl-net.so", "/a.so: bad ELF"),
    "plugin_not_found": ("NET",),
    "verbs_library": ("libibverbs.so.1",),
    "memlock": ("Cannot allocate memory",),
    "gpudirect_of_adapter": ("IB", "Disabled", "mlx5_0"),
    "GPU Direct RDMA Disabled for %s": ("GPU/0-1 - NET/0-2",),
    "receive_failed": ("send to", "10.0.0.1<4000>", "Connection reset by peer"),
    "socketProgressOpt: Call to recv from %s failed : %s": (),
    "Net : Call to recv from %s failed : %s": (),
    "port_event": ("mlx5_0", "port active"),
    "NET/IB : Got async event : %s": ("port error",),
    "aborted": ("Abort",),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format; 12 is what a completion's error has to be."""
    name = form.rule.name
    strings = iter(STRINGS.get(form.text, STRINGS.get(name, ())))
    number = 12 if name == "peer" else 31

    def value(match: re.Match) -> str:
        kind = match[0][-1]
        if kind == "s":
            return next(strings, "" if name.endswith("_channel") else "x")
        return f"0x{number:x}" if kind == "p" else format(number, "x" if kind == "x" else "d")

    return re.sub(r"%\d*l*[dupsx]", value, form.text) if form.by == "NCCL" else form.text


def find_in(text: str) -> nccl_text.Finding:
    """What a file of this text says."""
    reader = nccl_text.Reader()
    for line in io.StringIO(text, newline=None):
        reader.read(line)
    return reader.finding()


def find(*lines: str) -> nccl_text.Finding:
    """What whole lines say."""
    return find_in("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))


def names_of(found) -> dict:
    """What a text says, and of its problems the names alone: their lines have prefixes."""
    return found.to_dict() | {"problems": [problem.id for problem in found.problems]}


def told(*lines: str) -> dict[str, str]:
    """The problems of a text, each with its line."""
    return {problem.id: problem.line for problem in find(*lines).problems}


INFO = "node1:101:115 [0] NCCL INFO "
IB_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"
ROCE_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
SOCKET_LIST = INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0>"
NO_DEVICE = INFO + "NET/IB : No device found."
HCA = INFO + "NCCL_IB_HCA set to mlx5_0"
OFI = INFO + "NET/OFI Selected Provider is {} (found 4 nics)"
TWO_NODES = INFO + "comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 1 MNNVL 0"
OTHER = "node2:7:8 [1] NCCL INFO comm 0x5"


def using(name: str) -> str:
    return INFO + "Using network " + name


def channel(end: str) -> str:
    return INFO + f"Channel 00/0 : 0[0] -> 1[1] [send] via {end}"


def job(rank: int, network: str, lists: list[str], ends: list[str]) -> list[str]:
    """What one rank of a job on two nodes prints, without prefix."""
    return [
        "NCCL version 2.30.7+cuda13.3",
        "NET/Plugin: Could not find: libnccl-net.so",
        *lists,
        f"Using network {network}",
        f"comm 0x55 rank {rank} nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
        *(f"Channel 00/0 : {rank}[0] -> 3[1] [send] via {end}" for end in ends),
        "Connected all rings, use ring PXN 0 GDR 1",
    ]


JOBS = {  # network, lists, ends of the connections
    "infiniband": (
        "IB",
        ["NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"],
        ["P2P/CUMEM/read", "NET/IB/0/GDRDMA", "NET/IB/1(1)/GDRDMA(PCI)/Shared"],
    ),
    "sockets": (
        "Socket",
        [
            "NET/IB : No device found.",
            "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
            "NET/Socket : Using [0]eth0:10.0.0.1<0>",
        ],
        ["SHM/direct/direct", "NET/Socket/0", "NET/Socket/0"],
    ),
    "efa": (
        "AWS Libfabric",
        ["NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"],
        ["NET/AWS Libfabric/0/GDRDMA"],
    ),
}


PREFIXES = {
    "NCCL": "node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "WARN": "[2026-01-31 12:00:00] node{rank}:10{rank}:1 [0] a.cc:7 (f) NCCL WARN {text}",
    "torchrun": "[default{rank}]:node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "Ray": "\x1b[36m(Worker pid=7{rank})\x1b[0m node:10{rank}:115 [0] NCCL INFO {text}",
    "collector": "2026-01-31T12:00:00.123Z | node{rank}:10{rank}:115 [0] NCCL INFO {text}",
    "colour": "\x1b[36mnode{rank}:10{rank}:115 [0] NCCL INFO {text}\x1b[0m",
}


def text_of(kind: str, ranks: int, prefix: str = "{text}") -> list[list[str]]:
    """The lines of each rank, with line ends."""
    return [
        [prefix.format(rank=rank, text=text) + "\n" for text in job(rank, *JOBS[kind])]
        for rank in range(ranks)
    ]


# --- each message of the tables ----------------------------------------------------------------


def test_each_format_filled_in_is_found_by_its_pattern_and_described():
    for form in FORMATS:
        rule, text, found = form.rule, filled(form), find(filled(form))
        assert rule.literal in text and rule.pattern.search(text), (rule.name, text)
        # Whose plugin was asked for is said by the text before it.
        assert rule.name == "plugin_asked" or rule.pattern.search(INFO + text), (rule.name, text)
        if rule.name == "network_channel":
            assert (found.networks, found.gpudirect) == (["IB"], 1), text
        assert found.transport in nccl_text.TRANSPORTS and nccl_text.describe(found), text
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict(), text


OF_TORCH = "ncclSystemError: System call failed, NCCL version 2.14.3"


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        (["NCCL version 2.30.7+cuda13.3"], "2.30.7+cuda13.3"),
        (["RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+"], "2.18.3+hip6.0"),
        (["RCCL version : 2.30.4-HEAD:0123abc"], "2.30.4"),
        ([OF_TORCH, "NCCL version 2.18.5+cuda12.1"], "2.18.5+cuda12.1"),
        (["This application was compiled with NCCL version 2.29.3, but is running"], None),
        (["NCCL version 2.30"], None),
    ],
)
def test_version(lines, version):
    assert find(*lines).version == find(*reversed(lines)).version == version


@pytest.mark.parametrize(
    ("end", "kind", "network", "gpudirect"),
    [
        ("NET/Socket/0", "network", "Socket", 0),
        ("NET/IBext_v10/7/GDRDMA/Shared", "network", "IBext_v10", 1),
        ("NET/NCCL RDMA Plugin v9/0", "network", "NCCL RDMA Plugin v9", 0),
        ("NET/IB/0 comm 0x7f nRanks 04", "network", "IB", 0),
        ("direct shared memory", "shm", None, None),
        ("SHM/direct", "shm", None, None),
        ("P2P/MNNVL", "mnnvl", None, None),
    ],
)
def test_one_connection_tells_its_kind_network_and_gpudirect(end, kind, network, gpudirect):
    found = find(channel(end))
    assert (found.channels, found.network, found.gpudirect) == ({kind: 1}, network, gpudirect)
    assert (found.transport == "local") == (network is None)


TWO = ["mlx5_0:1", "mlx5_1:1"]


@pytest.mark.parametrize(
    ("listed", "transport", "names"),
    [
        ("NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [RO]; OOB", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1:2:0/IB [1]mlx5_1:1::1/IB ; OOB a:b<0>", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB ; OOB a:b<0>", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/I", "infiniband", TWO[:1]),
        ("NET/IB : Using [0]mlx5_0:1/IB [1]={[1] mlx5_1:1/IB, [2] mlx5_", "infiniband", TWO),
        ("NET/IB: [0] mlx5_0:uverbs0:1/RoCE provider=mlx5", "unknown", TWO[:1]),  # no proof
        ("NET/Socket : Using [0]eth0:fe80::1%eth0<0> [1]ib0:10.<0>", "sockets", ["eth0", "ib0"]),
        ("NET/Socket : Using [0]br-1a2b:172.17.0.1<0> [1]et", "sockets", ["br-1a2b"]),
        ("NET : Using interface eth0:10.0.0.1<0>", "sockets", ["eth0"]),  # to 2.3
    ],
)
def test_adapters_and_interfaces_of_a_list_are_named_once(listed, transport, names):
    found = find(INFO + listed, INFO + listed)
    assert (found.transport, found.network) == (transport, None)
    assert found.devices + found.interfaces == names


def test_nodes_are_the_most_of_any_communicator():
    line = INFO + "comm 0x55 rank 0 nRanks 2 nNodes {} localRanks 2 localRank 0 MNNVL 0"
    assert find(line.format(1), line.format(4), line.format(2)).nodes == 4


# What stands for a longer line in the table.
PIECES = {
    "IB list": IB_LIST,
    "RoCE list": ROCE_LIST,
    "both list": INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB a:b<0>",
    "socket list": SOCKET_LIST,
    "EFA": OFI.format("efa"),
    "CXI": OFI.format("cxi"),
    "channel 0": channel("NET/IB/0"),
    "channel 1": channel("NET/IB/1"),
    "P2P": channel("P2P/CUMEM"),
    "2 nodes": TWO_NODES,
}


@pytest.mark.parametrize(
    ("said", "network", "transport"),
    [
        ("RoCE list|Using network IB", "IB", "roce"),
        ("NET/IB: [0] mlx5_0:1/RoCE |Using network IB", "IB", "roce"),
        ("Using network IB", "IB", "unknown"),
        ("RoCE list|Using network IBext_v10", "IBext_v10", "roce"),
        ("Using network IBext", "IBext", "plugin"),
        ("IB list|Using network NCCL RDMA Plugin v9", "NCCL RDMA Plugin v9", "infiniband"),
        ("EFA|Using network Libfabric", "Libfabric", "efa"),
        ("CXI|Using network Libfabric", "Libfabric", "plugin"),
        ("Using external Network FooNet", "FooNet", "plugin"),
        ("IB list|Assigned NET plugin IB to comm", None, "infiniband"),
        ("RoCE list|Initialized NET plugin FooNet", None, "plugin"),
        # An announced network outranks plugins and lists.
        ("Initialized NET plugin IB|IB list|Using network Socket", "Socket", "sockets"),
        # Sockets that are always started first say nothing before adapters or a plugin.
        ("socket list|IB list", None, "infiniband"),
        ("socket list|NET/IB : No device found.", None, "sockets"),
        ("socket list|EFA", None, "unknown"),
        # Adapters of both kinds are told apart by the connections.
        ("both list|Using network IB", "IB", "unknown"),
        ("both list|channel 1", "IB", "roce"),
        ("both list|channel 0|channel 1", "IB", "unknown"),
        # One node is local though a network is announced; a rank amid its node is not all of it.
        ("IB list|Using network IB|P2P", "IB", "local"),
        ("2 nodes|Using network IB|IB list|P2P", "IB", "infiniband"),
        ("2 nodes|P2P", None, "unknown"),
    ],
)
def test_from_evidence_to_network_and_transport(said, network, transport):
    lines = [PIECES.get(piece, INFO + piece) for piece in said.split("|")]
    for found in (find(*lines), find(*reversed(lines))):
        assert (found.network, found.transport) == (network, transport)


def test_connections_outrank_what_was_announced():
    found = find(using("Socket"), IB_LIST, channel("NET/IB/0/GDRDMA"), channel("NET/IB/1"))
    assert (found.network, found.transport) == ("IB", "infiniband")
    text = "Connections seen: 2 over the network, 1 of them with GPUDirect RDMA."
    assert nccl_text.describe(found)[1] == text


def test_where_ranks_differ_the_slowest_counts_and_it_is_said():
    lines = [using("IB"), IB_LIST, using("Socket")]
    for found in (find(*lines), find(*reversed(lines))):
        assert (found.transport, found.networks) == ("sockets", ["Socket", "IB"])
        assert "Ranks differ (Socket, IB); the slowest" in "".join(nccl_text.describe(found))


def test_nvlink_between_nodes_is_said():
    text = nccl_text.describe(find(TWO_NODES, using("IB"), channel("P2P/MNNVL")))[0]
    assert text == "NCCL used no network, but NVLink, between nodes too (MNNVL), 2 nodes."


# --- problems ----------------------------------------------------------------------------------


PROBLEMS = {form.problem for form in FORMATS} - {""}


@pytest.mark.parametrize("problem", sorted(PROBLEMS))
def test_a_problem_is_told_with_its_line(problem):
    for text in [filled(form) for form in FORMATS if form.problem == problem]:
        line = "node1:101:115 [0] misc/socket.cc:7 NCCL WARN " + text
        assert told(line).get(problem) == line.strip(), text
        assert problem in told(text), text


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("Could not open libibverbs.so.1", ["verbs_library_missing"]),
        ("Connect to A<4> failed : No route to host", ["peer_unreachable", "connection_failed"]),
        (
            "connect to A<4> returned Connection timed out, exceeded error retry count",
            ["peer_unreachable", "connection_failed"],
        ),
    ],
)
def test_what_the_values_of_a_message_tell(text, problems):
    assert list(told(text)) == problems


def test_every_problem_has_its_advice_and_a_test():
    assert set(nccl_rules.ADVICE) == PROBLEMS | {"suspect_interface", "fell_back_to_sockets"}
    assert all(form.rule.problem in ("", form.problem) for form in FORMATS)
    assert all(len(advice) > 30 and "\n" not in advice for advice in nccl_rules.ADVICE.values())


def test_interfaces_that_seldom_join_nodes_are_suspect():
    suspects = ["lo", "docker0", "veth12ab", "br-12ab", "virbr0", "tailscale0"]
    for name in (*suspects, "eth0", "ib0", "ens5", "bond0", "br0", "lan0", "enp129s0", "hsn0"):
        line = INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>"
        assert told(line) == ({"suspect_interface": line} if name in suspects else {}), name


@pytest.mark.parametrize(
    "text",
    [
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file",
        "NET/Plugin: Failed to find ncclCollNetPlugin_v9 symbol.",
        "TUNER/Plugin: libfoo.so: cannot open shared object file: No such file or directory",
        "Failed to initialize NET plugin IB",
        "Could not open libibverbs.so",
        "Call to ibv_reg_mr failed with error Bad address",
        "Got completion from peer A<4> with error 5, opcode 0, len 12, vendor err 12",
        "Got completion from peer A<4> with status=129 opcode=12",
        "socketConnect: connect to A<4> returned Connection timed out, retrying (3/34) after",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1000 - Destroy COMPLETE",
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
        "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'",
    ],
)
def test_what_is_normal_is_no_problem(text):
    assert told(INFO + text) == {}


@pytest.mark.parametrize(
    "text", ["Could not find: {}", "Plugin load returned 2 : {}: cannot open shared object file"]
)
@pytest.mark.parametrize("name", ["libnccl-net.so", "foo"])
def test_a_missing_plugin_is_a_problem_only_where_it_was_asked_for(text, name):
    line = INFO + "NET/Plugin: " + text.format(name)
    for asked in ("NCCL_NET_PLUGIN set by environment to foo", "Plugin name set by env to foo"):
        assert told(INFO + asked, line)["plugin_failed"] == line
        assert "plugin_failed" not in told(INFO + asked, line, using("AWS Libfabric"))
    line = INFO + "NET/Plugin: " + text.format("libnccl-net.so")
    for other in (
        "NCCL_NET_PLUGIN set by environment to none",
        "TUNER/Plugin: Plugin name set by env to foo",
    ):
        assert told(INFO + other, line) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NCCL_IB_HCA set to mlx5_0", "NCCL_IB_HCA set to mlx5_0"),
        ("NCCL_IB_DISABLE set by environment to 0.", "set by environment to 0."),
        ("NCCL_NET set by environment to IB", "NCCL_NET set by environment to IB"),
        ("0: export NCCL_IB_HCA=mlx5_0,mlx5_1", "NCCL_IB_HCA=mlx5_0"),
        ('[GPU 0] Run {"env": {"NCCL_IB_HCA": "mlx5_0"}}', "NCCL_IB_HCA"),
        ("NCCL_NET_PLUGIN set by environment to foo\nNET/Plugin: Could not find: foo", "foo"),
        ("", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_IB_DISABLE set by environment to 1.", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_NET=Socket", None),
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


START_UP = [
    "Bootstrap : Using [0]ib7:10.0.0.1<0>",
    "NET/IB : Using interface ib7 for sideband communication",
    "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
    "NCCL_NET set by environment to IB",
    "NCCL_IB_HCA set to mlx5_7",
    "NET/Plugin: Loaded net plugin IBext_v10 (v10)",
    "Channel 00/02 :    0   1",
    "CollNet 00/0 : 0 [send] via COLLNET/IB/0",
    "Using non-device net plugin version 0",
    "Failed to initialize NET plugin IB",
]


@pytest.mark.parametrize("text", START_UP)
def test_start_up_wishes_and_possibilities_decide_nothing(text):
    found = find(INFO + text)
    assert not found.decided
    assert (found.gpudirect, found.channels, found.devices, found.interfaces) == (None, {}, [], [])
    for kind in JOBS:
        (lines,) = text_of(kind, 1)
        whole = find(*lines).to_dict() | {"problems": []}
        for found in (find(INFO + text + "\n", *lines), find(*lines, INFO + text + "\n")):
            assert found.to_dict() | {"problems": []} == whole


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", JOBS)
@QUICK
@given(turns=st.lists(st.integers(0, 2), max_size=40))
def test_neither_prefix_nor_turns_of_ranks_change_what_a_text_says(kind, prefix, turns):
    queues, mixed = text_of(kind, 3, PREFIXES[prefix]), []
    for turn in turns + [0] * 12 + [1] * 12 + [2] * 12:
        mixed += [queues[turn].pop(0)] if queues[turn] else []
    found = names_of(find(*mixed))
    assert found["transport"] == kind
    assert found == names_of(find(*itertools.chain(*text_of(kind, 3))))


@QUICK
@given(kind=st.sampled_from(sorted(JOBS)), share=st.floats(0, 1))
def test_a_text_cut_anywhere_says_what_the_whole_says_or_nothing(kind, share):
    text = "".join(*text_of(kind, 1, PREFIXES["NCCL"]))
    whole, found = find_in(text), find_in(text[: int(share * len(text))])
    # Without a last word of the network an adapter list may be the last evidence.
    assert found.transport in ("unknown", whole.transport)
    assert found.network in (None, whole.network)
    assert set(found.devices) <= set(whole.devices)
    assert found.version in (None, whole.version, "2.30.7")
    if found.gpudirect is not None and kind != "sockets":
        assert found.gpudirect == found.channels["network"]


@QUICK
@given(
    kind=st.sampled_from(sorted(JOBS)),
    prefix=st.sampled_from(["NCCL", "torchrun", "Ray", "colour"]),
    share=st.floats(0, 1),
)
def test_a_text_that_breaks_into_another_changes_nothing_but_counts(kind, prefix, share):
    broken, other = map("".join, text_of(kind, 2, PREFIXES[prefix]))
    cut = int(share * len(broken))
    text = broken[:cut] + other + broken[cut:]
    whole, found = find_in(other), find_in(text)
    for name in ("networks", "transport", "devices", "interfaces", "nodes"):
        assert getattr(found, name) == getattr(whole, name), name
    if kind != "sockets":
        assert found.gpudirect == found.channels["network"]


HALF_PROVIDER = INFO + "NET/OFI Selected provider is ef"


@pytest.mark.parametrize("start", [" ", "", "[default1]:"])
def test_what_another_text_cuts_is_taken_only_if_it_is_whole(start):
    other = start + OTHER
    for name in ("I", "Sock", "AWS Libfab", "Lib", "NCCL RDMA Plugin v", "", "FooNe"):
        assert not find(using(name) + other).decided, name
    assert find(using("IB") + " " + OTHER).network == "IB"
    assert find("NCCL version 2.30.1" + other).version is None
    assert find("NCCL version 2.30.7+cuda1" + other).version in (None, "2.30.7")
    assert find(HALF_PROVIDER + other, using("Libfabric")).transport == "plugin"
    found = find(HALF_PROVIDER + other, OFI.format("efa"), using("Libfabric"))
    assert found.transport == "efa"
    # Without its end a connection proves the network, but not GPUDirect.
    found = find(channel("NET/IB/0/GDR") + other, channel("NET/IB/1/GDRDMA"))
    assert (found.network, found.gpudirect, found.channels) == ("IB", 1, {"network": 1})


@pytest.mark.parametrize("name", ["I", "AWS Libfab", "NCCL RDMA Plugin v", ""])
def test_half_a_name_at_the_end_of_a_text_or_line_is_none(name):
    for text in (using(name), using(name) + "\n"):
        assert not find_in(text).decided


@pytest.mark.parametrize(
    "line",
    [
        using("FooNet") + "\n",
        # Neither colours nor a quotation are part of a name.
        f"\x1b[36m{using('FooNet')}\x1b[0m\n",
        f'{{"log": "{using("FooNet")}\\n", "stream": "stderr"}}\n',
        f"it said `{using('FooNet')}`, twice",
    ],
)
def test_a_name_ends_with_its_line_or_quotation(line):
    assert find(line).network == "FooNet"


def test_messages_on_one_line_are_all_read():
    found = names_of(find(f"{NO_DEVICE} {SOCKET_LIST} NCCL INFO Using network Socket\n"))
    assert (found["network"], found["interfaces"]) == ("Socket", ["eth0"])
    assert found["problems"] == ["no_ib_device"]
    # Carriage returns end lines.
    found = find(f"\r 5%|###  |\r{using('FooNet')}\r{IB_LIST}\r 6%|###  |")
    assert (found.network, found.devices) == ("FooNet", TWO)


# --- against the installed library -------------------------------------------------------------


def test_each_format_of_the_installed_version_is_in_its_library():
    """Of the distribution that torch brings."""
    try:
        nccl = importlib.metadata.distribution("nvidia-nccl-cu13")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution nvidia-nccl-cu13 is not installed")
    (path,) = (file.locate() for file in nccl.files if file.name == "libnccl.so.2")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        # Texts lie close together: to search among them takes a hundredth of the whole file's
        # time.
        middle = image.find(b"Using network %s\0")
        texts = image[max(0, middle - (1 << 21)) : middle + (1 << 21)]
    missing = [
        form.text
        for form in FORMATS
        if form.by == "NCCL"
        and form.rule.name != "version"  # that one the compiler puts together
        and Version(form.first) <= Version(nccl.version) <= Version(form.last or "9.9.9")
        and form.text.encode() + b"\0" not in texts
    ]
    assert missing == []


# --- command line ------------------------------------------------------------------------------


@pytest.fixture
def call(capsys):
    """Exit code, output and errors of the tool, called in this process."""

    def called(*arguments: object) -> tuple[int, str, str]:
        try:
            code = nccl_log.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return called


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_says_in_sentences_what_was_used_and_why_not_another(tmp_path):
    """-S hides the installed packages: the tool needs none of them, so not torch either. The
    terminal lacks a character of the log.
    """
    path = write(tmp_path / "node0.log", HCA + "\u2713", *job(0, *JOBS["sockets"]))
    command, env = [sys.executable, "-S", TOOL, path], {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "NCCL 2.30.7+cuda13.3 used TCP sockets (network Socket) over eth0, 2 nodes.",
        "Connections seen: 2 over the network; 1 without a network.",
        'Why not another network: NCCL says "NET/IB : No device found.".',
        "no_ib_device: NET/IB : No device found.",
        f"    -> {nccl_rules.ADVICE['no_ib_device']}",
        f"fell_back_to_sockets: {HCA}?",
        f"    -> {nccl_rules.ADVICE['fell_back_to_sockets']}",
    ]


def test_files_and_folders_are_read_as_one_text_and_told_as_one_json_object(tmp_path, call):
    (tmp_path / "run/rank1").mkdir(parents=True)
    for rank, name in enumerate(("run/nccl.a.101", "run/rank1/nccl.b.102")):
        lines = "\n".join(job(rank, *JOBS["infiniband"]))
        # Neither bytes that are no text nor a last line without its end stop the reading.
        (tmp_path / name).write_bytes(b"\xff\xfe tqdm\r" + lines.encode() + b"\n\xc3")
    (tmp_path / "run/checkpoint.pt").write_bytes(b"\0" * 100 + b"\nvia NET/Socket/0\n")
    (tmp_path / "other.log").write_text("first line\n" + NO_DEVICE)
    code, out, err = call(tmp_path / "other.log", tmp_path / "run", "--json")
    advice = nccl_rules.ADVICE["no_ib_device"]
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "version": "2.30.7+cuda13.3",
        "network": "IB",
        "networks": ["IB"],
        "transport": "infiniband",
        "devices": TWO,
        "interfaces": [],
        "gpudirect": 4,
        "channels": {"p2p": 2, "network": 4},
        "nodes": 2,
        "reason": None,
        "problems": [{"id": "no_ib_device", "line": NO_DEVICE, "advice": advice}],
    }


def test_a_line_without_end_is_read_in_parts(tmp_path, call, monkeypatch):
    monkeypatch.setattr(nccl_text, "LINE_LIMIT", 1000)
    path = write(tmp_path / "log", "x" * 4900 + " " + using("IB") + " " + "y" * 5000)
    assert call(path)[0] == 1  # "IB yyy…" is no name that could be trusted
    assert all(len(line) <= 1000 for line in nccl_text.lines_of(path))


def test_a_text_that_decides_nothing_ends_in_one_line_and_code_1(tmp_path, call):
    path = write(tmp_path / "log", NO_DEVICE)
    code, out, err = call(path)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("nccl_log.py: nothing decided: start the job with NCCL_DEBUG")
    assert "no_ib_device: " + NO_DEVICE in out
    code, out, err = call("--json", path)
    assert (code, json.loads(out)["transport"], err.count("\n")) == (1, "unknown", 1)
    assert call(write(path, INFO + "Bootstrap : Using eth0:10.0.0.1<0>"))[:2] == (1, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["log", "gone"], "no such file or folder: "),
        (["empty"], "no text of NCCL in "),
        (["folder"], "no text of NCCL in "),
        (["--xml", "folder"], "unrecognized arguments: --xml"),
    ],
)
def test_wrong_usage_ends_in_one_line_and_code_2(arguments, message, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("log"), *job(0, *JOBS["efa"]))
    Path("empty").touch()
    Path("folder").mkdir()
    code, out, err = call(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("nccl_log.py: error: " + message)
    assert ("NCCL_DEBUG=INFO" in err) == ("no text of NCCL" in message)


def test_a_file_that_cannot_be_read_is_named(tmp_path, call, monkeypatch):
    def fail(path):  # a read: without the name
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(nccl_text, "lines_of", fail)
    path = write(tmp_path / "log", using("IB"))
    assert call(path) == (2, "", f"nccl_log.py: error: cannot read {path}: Input/output error\n")


def test_a_full_disk_is_one_line(tmp_path):
    path = write(tmp_path / "log", *job(0, *JOBS["efa"]))
    command = [sys.executable, TOOL, path]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("nccl_log.py: error: its output cannot be written: ")
