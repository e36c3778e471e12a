"""tools/nccl_log.py: against lines made from each message's C format, against the traps that real
logs hold, against NCCL's own library where it is installed, and from its command line.
"""

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
from analysis import logs, nccl
from support.processes import ROOT, WITH_LONG

TOOL = ROOT / "tools/nccl_log.py"
QUICK = settings(
    max_examples=60 if WITH_LONG else 20,
    deadline=None,
    database=None,  # leaves no folder behind
    suppress_health_check=[HealthCheck.too_slow],
)

# --- Texts ---------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A message of nccl_formats.txt; `last` is empty if the newest release looked at has it."""

    name: str
    first: str
    last: str
    by: str
    text: str


def read_formats() -> list[Format]:
    found, name = [], ""
    for line in (Path(__file__).parent / "nccl_formats.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            first, last, text = line.split(maxsplit=2)
            by = "NCCL" if first[0].isdigit() else first
            found.append(Format(name, first, last.strip("-"), by, text))
    return found


FORMATS = read_formats()
PATTERNS = nccl.EVIDENCE | nccl.SIGNS
# What the strings of a message are, by its format or its name; those that are left are "x".
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "wish": ("NCCL_IB_DISABLE",),
    "plugin_missing": ("NET",),
    "verbs_library_missing": ("libibverbs.so.1",),
    "memlock": ("Cannot allocate memory",),
    "socketProgressOpt: Call to %s %s failed : %s": ("send to", "A<4>", "Connection reset"),
    "ncclOsSocketProgressOpt: Call to %s %s failed : %s": ("recv from", "A<4>", "reset"),
    "NET/IB : Got async event : %s": ("port error",),
    "link_renegotiated": ("mlx5_0", "port active"),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format; 12 is what a completion's error has to be."""
    strings = iter(STRINGS.get(form.text, STRINGS.get(form.name, ())))
    number = 12 if form.name == "peer_unreachable" else 31

    def value(match: re.Match) -> str:
        kind = match[0][-1]
        if kind == "s":
            return next(strings, "" if form.name.endswith("_channel") else "x")
        return f"0x{number:x}" if kind == "p" else format(number, "x" if kind == "x" else "d")

    return re.sub(r"%\d*l*[dupsx]", value, form.text) if form.by == "NCCL" else form.text


def find_in(text: str) -> nccl.Finding:
    """What a file of this text says."""
    reader = nccl.Reader()
    for line in io.StringIO(text, newline=None):
        reader.read(line)
    return reader.finding()


def find(*lines: str) -> nccl.Finding:
    """What whole lines say."""
    return find_in("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))


def told(*lines: str) -> dict[str, str]:
    """The problems of a text, each with its line."""
    return {problem["id"]: problem["line"] for problem in find(*lines).problems}


INFO = "node1:101:115 [0] NCCL INFO "
IB_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"
SOCKET_LIST = INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0>"
NO_DEVICE = INFO + "NET/IB : No device found."
OFI = INFO + "NET/OFI Selected Provider is {} (found 4 nics)"
TWO_NODES = INFO + "comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 1 MNNVL 0"
OTHER = "node2:7:8 [1] NCCL INFO comm 0x5"
TWO = ["mlx5_0:1", "mlx5_1:1"]


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


# --- Each message of the table -------------------------------------------------------------------


def test_each_format_filled_in_is_found_by_its_pattern_and_by_no_other_problems():
    """Also with the prefix of a warning; a problem is told with its line."""
    assert {form.name for form in FORMATS} == PATTERNS.keys()
    for form in FORMATS:
        text = filled(form)
        assert PATTERNS[form.name].search(text) and nccl.WORDS.search(text), (form.name, text)
        line = "node1:101:115 [0] misc/socket.cc:7 NCCL WARN " + text
        found = find(line)
        assert nccl.describe(found) and json.dumps(found.to_dict()), text
        if form.name in nccl.PROBLEMS:
            assert told(line).get(form.name) == line.strip(), text
            assert form.name in told(text), text
        if form.name == "network_channel":
            assert (found.networks, found.gpudirect) == (["IB"], 1), text


def test_each_format_of_the_installed_version_is_in_its_library():
    """Of the distribution that torch brings."""
    try:
        library = importlib.metadata.distribution("nvidia-nccl-cu13")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the distribution nvidia-nccl-cu13 is not installed")
    (path,) = (file.locate() for file in library.files if file.name == "libnccl.so.2")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        # Texts lie close together, and the whole file would take a hundred times as long.
        middle = image.find(b"Using network %s\0")
        texts = image[max(0, middle - (1 << 21)) : middle + (1 << 21)]
    missing = [
        form.text
        for form in FORMATS
        if form.by == "NCCL"
        and form.name != "version"  # that one the compiler puts together
        and Version(form.first) <= Version(library.version) <= Version(form.last or "9.9.9")
        and form.text.encode() + b"\0" not in texts
    ]
    assert missing == []


# --- What was used -------------------------------------------------------------------------------

# What stands for a longer line in the tables.
PIECES = {
    "IB list": IB_LIST,
    "RoCE list": INFO + "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
    "both list": INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB a:b<0>",
    "socket list": SOCKET_LIST,
    "EFA": OFI.format("efa"),
    "CXI": OFI.format("cxi"),
    "channel 0": channel("NET/IB/0"),
    "channel 1": channel("NET/IB/1"),
    "P2P": channel("P2P/CUMEM"),
    "MNNVL": channel("P2P/MNNVL"),
    "2 nodes": TWO_NODES,
}


@pytest.mark.parametrize(
    ("said", "network", "transport"),
    [
        ("RoCE list|Using network IB", "IB", "roce"),
        ("Using network IB", "IB", "unknown"),
        ("RoCE list|Using network IBext_v10", "IBext_v10", "roce"),
        ("Using network IBext", "IBext", "plugin"),
        ("IB list|Using network NCCL RDMA Plugin v9", "NCCL RDMA Plugin v9", "infiniband"),
        ("EFA|Using network Libfabric", "Libfabric", "efa"),
        ("CXI|Using network Libfabric", "Libfabric", "plugin"),
        # An announced network outranks lists; connections outrank all.
        ("IB list|Using network Socket", "Socket", "sockets"),
        ("Using network Socket|IB list|channel 0", "IB", "infiniband"),
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
        ("2 nodes|Using network IB|MNNVL", "IB", "local"),
    ],
)
def test_from_evidence_to_network_and_transport(said, network, transport):
    lines = [PIECES.get(piece, INFO + piece) for piece in said.split("|")]
    for found in (find(*lines), find(*reversed(lines))):
        assert (found.network, found.transport) == (network, transport)


@pytest.mark.parametrize(
    ("listed", "transport", "names"),
    [
        ("NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [RO]; OOB", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1:2:0/IB [1]mlx5_1:1::1/IB ; OOB a:b<0>", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB ; OOB a:b<0>", "infiniband", TWO),
        ("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/I", "infiniband", TWO[:1]),
        ("NET/IB : Using [0]mlx5_0:1/IB [1]={[1] mlx5_1:1/IB, [2] mlx5_", "infiniband", TWO),
        ("NET/Socket : Using [0]eth0:fe80::1%eth0<0> [1]ib0:10.<0>", "sockets", ["eth0", "ib0"]),
        ("NET/Socket : Using [0]br-1a2b:172.17.0.1<0> [1]et", "sockets", ["br-1a2b"]),
    ],
)
def test_adapters_and_interfaces_of_a_list_are_named_once(listed, transport, names):
    found = find(INFO + listed, INFO + listed)
    assert (found.transport, found.devices + found.interfaces) == (transport, names)


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        (["NCCL version 2.30.7+cuda13.3"], "2.30.7+cuda13.3"),
        (["RCCL version : 2.30.4-HEAD:0123abc"], "2.30.4"),
        (
            ["System call failed, NCCL version 2.14.3", "NCCL version 2.18.5+cuda12.1"],
            "2.18.5+cuda12.1",
        ),
        (["This application was compiled with NCCL version 2.29.3, but is running"], None),
        (["NCCL version 2.30"], None),
    ],
)
def test_version(lines, version):
    assert find(*lines).version == find(*reversed(lines)).version == version


def test_ranks_that_differ_are_said_and_the_slowest_counts():
    lines = [using("IB"), IB_LIST, using("Socket")]
    for found in (find(*lines), find(*reversed(lines))):
        assert (found.transport, found.networks) == ("sockets", ["Socket", "IB"])
        assert "Ranks differ (Socket, IB); the slowest" in "".join(nccl.describe(found))


# --- Problems ------------------------------------------------------------------------------------


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
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
    ],
)
def test_what_is_normal_is_no_problem(text):
    assert told(INFO + text) == {}


def test_values_of_a_message_and_a_plugin_that_was_asked_for():
    both = ["peer_unreachable", "connection_failed"]
    assert list(told("Connect to A<4> failed : No route to host")) == both
    line = INFO + "NET/Plugin: Could not find: libfoo.so"
    asked = INFO + "NCCL_NET_PLUGIN set by environment to foo"
    assert told(asked, line)["plugin_failed"] == line
    assert "plugin_failed" not in told(asked, line, using("AWS Libfabric"))
    assert told(asked.replace("foo", "none"), line) == {}


def test_interfaces_that_seldom_join_nodes_are_suspect():
    suspects = ["lo", "docker0", "veth12ab", "br-12ab", "virbr0", "tailscale0"]
    for name in (*suspects, "eth0", "ib0", "ens5", "bond0", "br0", "lan0", "enp129s0", "hsn0"):
        line = INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>"
        assert told(line) == ({"suspect_interface": line} if name in suspects else {}), name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NCCL_IB_HCA set to mlx5_0", "NCCL_IB_HCA set to mlx5_0"),
        ("NCCL_IB_DISABLE set by environment to 0.", "set by environment to 0."),
        ("NCCL_NET set by environment to IB", "NCCL_NET set by environment to IB"),
        ("0: export NCCL_IB_HCA=mlx5_0,mlx5_1", "NCCL_IB_HCA=mlx5_0"),
        ('[GPU 0] Run {"env": {"NCCL_IB_HCA": "mlx5_0"}}', "NCCL_IB_HCA"),
        ("", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_IB_DISABLE set by environment to 1.", None),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_NET=Socket", None),
        (INFO + "set NCCL_NET=IB to use it", None),
    ],
)
def test_sockets_are_a_fall_back_only_where_more_was_asked_for(text, why):
    problems = told(*text.splitlines(), using("Socket"))
    assert ("fell_back_to_sockets" in problems) == (why is not None)
    assert (why or "") in problems.get("fell_back_to_sockets", "")
    assert "fell_back_to_sockets" not in told(*text.splitlines(), using("IB"), IB_LIST)


def test_gpudirect_is_off_if_no_connection_of_rdma_has_it():
    first, with_it = channel("NET/IB/0"), channel("NET/IB/0/GDRDMA")
    assert told(IB_LIST, first, channel("NET/IB/1")) == {"gpudirect_off": first}
    assert told(first) == {"gpudirect_off": first}
    assert told(IB_LIST, first, with_it) == {}
    assert told(channel("NET/Socket/0")) == told(channel("NET/FooNet/0")) == {}


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


# --- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", JOBS)
@QUICK
@given(turns=st.lists(st.integers(0, 2), max_size=40))
def test_neither_prefix_nor_turns_of_ranks_change_what_a_text_says(kind, prefix, turns):
    def names_of(found):  # of the problems the names alone: their lines have prefixes
        return found.to_dict() | {"problems": [problem["id"] for problem in found.problems]}

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
    assert found.transport in ("unknown", whole.transport)
    assert found.network in (None, whole.network)
    assert set(found.devices) <= set(whole.devices)
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
    whole, found = find_in(other), find_in(broken[:cut] + other + broken[cut:])
    for name in ("networks", "transport", "devices", "interfaces", "nodes"):
        assert getattr(found, name) == getattr(whole, name), name
    if kind != "sockets":
        assert found.gpudirect == found.channels["network"]


@pytest.mark.parametrize("start", [" ", "", "[default1]:"])
def test_what_another_text_cuts_is_taken_only_if_it_is_whole(start):
    other = start + OTHER
    for name in ("I", "Sock", "AWS Libfab", "Lib", "NCCL RDMA Plugin v", "", "FooNe"):
        assert not find(using(name) + other).decided, name
    for name in ("I", "AWS Libfab", ""):  # at the end of a line as well
        assert not find(using(name)).decided
    assert find(using("IB") + " " + OTHER).network == "IB"
    half = INFO + "NET/OFI Selected provider is ef"
    assert find(half + other, OFI.format("efa"), using("Libfabric")).transport == "efa"
    # Without its end a connection proves the network, but not GPUDirect.
    found = find(channel("NET/IB/0/GDR") + other, channel("NET/IB/1/GDRDMA"))
    assert (found.network, found.gpudirect, found.channels) == ("IB", 1, {"network": 1})


@pytest.mark.parametrize(
    "line",
    [
        using("FooNet") + "\n",
        # Neither colours nor a quotation are part of a name; carriage returns end lines.
        f"\x1b[36m{using('FooNet')}\x1b[0m\n",
        f'{{"log": "{using("FooNet")}\\n", "stream": "stderr"}}\n',
        f"it said `{using('FooNet')}`, twice",
        f"\r 5%|###  |\r{using('FooNet')}\r{IB_LIST}\r 6%|###  |",
    ],
)
def test_a_name_ends_with_its_line_or_quotation(line):
    assert find(line).network == "FooNet"


# --- Command line --------------------------------------------------------------------------------


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
    """-S hides the installed packages. The terminal lacks a character of the log."""
    wish = INFO + "NCCL_IB_HCA set to mlx5_0"
    path = write(tmp_path / "node0.log", wish + "\u2713", *job(0, *JOBS["sockets"]))
    command, env = [sys.executable, "-S", TOOL, path], {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "NCCL 2.30.7+cuda13.3 used TCP sockets (network Socket) over eth0, 2 nodes.",
        "Connections seen: 2 over the network; 1 without a network.",
        'Why not another network: NCCL says "NET/IB : No device found.".',
        "no_ib_device: NET/IB : No device found.",
        f"    -> {nccl.PROBLEMS['no_ib_device'][1]}",
        f"fell_back_to_sockets: {wish}?",
        f"    -> {nccl.PROBLEMS['fell_back_to_sockets'][1]}",
    ]


def test_a_closed_output_is_quiet_and_a_full_disk_one_line(tmp_path):
    path = write(tmp_path / "log", *job(0, *JOBS["efa"]))
    for target, code, said in ((">&-", 0, ""), (">/dev/full", 2, "error: its output cannot be")):
        command = f"'{sys.executable}' -S '{TOOL}' '{path}' {target}"
        how = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["bash", "-c", command], **how)
        assert done.returncode == code and said in done.stderr
        assert len(done.stderr.splitlines()) == bool(said), done.stderr


def test_files_and_folders_are_read_as_one_text_and_told_as_one_json_object(tmp_path, call):
    (tmp_path / "run/rank1").mkdir(parents=True)
    for rank, name in enumerate(("run/nccl.a.101", "run/rank1/nccl.b.102")):
        lines = "\n".join(job(rank, *JOBS["infiniband"]))
        # Neither bytes that are no text nor a last line without its end stop the reading.
        (tmp_path / name).write_bytes(b"\xff\xfe tqdm\r" + lines.encode() + b"\n\xc3")
    (tmp_path / "run/checkpoint.pt").write_bytes(b"\0" * 100 + b"\nvia NET/Socket/0\n")
    (tmp_path / "other.log").write_text("first line\n" + NO_DEVICE)
    code, out, err = call(tmp_path / "other.log", tmp_path / "run", "--json")
    advice = nccl.PROBLEMS["no_ib_device"][1]
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
    monkeypatch.setattr(logs, "LINE_LIMIT", 1000)
    path = write(tmp_path / "log", "x" * 4900 + " " + using("IB") + " " + "y" * 5000)
    assert call(path)[0] == 1  # "IB yyy…" is no name that could be trusted
    assert all(len(line) <= 1000 for line in logs.lines_of(path))


def test_a_text_that_decides_nothing_ends_in_one_line_and_code_1(tmp_path, call):
    path = write(tmp_path / "log", NO_DEVICE)
    code, out, err = call(path)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("nccl_log.py: nothing decided: start the job with NCCL_DEBUG")
    assert "no_ib_device: " + NO_DEVICE in out
    assert json.loads(call("--json", path)[1])["transport"] == "unknown"


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


# --- What the probe asks of it -------------------------------------------------------------------


def test_files_of_a_nodes_processes(tmp_path):
    """Of this run's processes alone; node0's own name ends at the first dot."""
    for pid, name in ((11, "ib0"), (12, "ib1"), (13, "ib2")):
        file = tmp_path / f"nccl.gpu7.{pid}.log"
        write(file, NO_DEVICE, INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>")
    pattern = f"{tmp_path}/nccl.%h.%p.log"
    found = nccl.of_processes(pattern, "gpu7.cluster.example", [11, 12, 14])
    assert found.interfaces == ["ib0", "ib1"]
    assert nccl.in_one_line(found) == (
        "NCCL used TCP sockets over ib0, ib1. Why not another network: NCCL says "
        '"NET/IB : No device found.".'
    )
    assert nccl.of_processes(pattern, "gpu8", [11]) is None
    assert nccl.of_processes("", "gpu7", [11]) is None
