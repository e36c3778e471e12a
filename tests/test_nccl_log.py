"""tools/nccl_log.py: against lines made from each message's C format, against the traps that real
logs hold, against NCCL's own library where it is installed, and from its command line.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

import nccl_log
from analysis import nccl
from support.processes import ROOT

TOOL = ROOT / "tools/nccl_log.py"
SUPPORT = ROOT / "tests/support"

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
    for line in (SUPPORT / "nccl_formats.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            first, last, text = line.split(maxsplit=2)
            by = "NCCL" if first[0].isdigit() else first
            found.append(Format(name, first, last.strip("-"), by, text))
    return found


ALL_FORMATS = read_formats()
FORMATS = [form for form in ALL_FORMATS if form.name != "nothing"]
# What the strings of a message are, by its format or else its name; those that are left are "x".
OWN_LIBRARY = "libfabric.so.1: cannot open shared object file"
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "using_network": ("IB",),
    "plugin": ("IB",),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "adapter": ("mlx5_0", "uverbs0", "IB", "mlx5", "/sys/devices/pci"),
    "NET/IB: [%d] %s:%d/%s": ("mlx5_0", "RoCE"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "NET : Using interface %s:%s": ("eth0", "10.0.0.1<0>"),
    "wish": ("NCCL_IB_DISABLE",),
    "%s/Plugin: Plugin name set by env to %s": ("NET", "foo"),
    "no_plugin": ("NET",),
    "NET/Plugin: Could not find:%s. Using internal network plugin.": (" foo",),
    "plugin_failed": (OWN_LIBRARY,),
    "%s/Plugin: %s": ("NET", OWN_LIBRARY),
    "%s/Plugin: %s: %s": ("NET", "libnccl-net.so", "libc.so.6: version `GLIBC_2.38' not found"),
    "NET/Plugin : Plugin load (%s) returned %d : %s": ("libnccl-net.so", "/a.so: bad ELF"),
    "verbs_library_missing": ("libibverbs.so.1",),
    "memlock": ("Cannot allocate memory",),
    "NET/%s : GPU Direct RDMA %s for HCA %d '%s'": ("IB", "Disabled", "mlx5_0"),
    "GPU Direct RDMA Disabled for %s": ("GPU/0-1 - NET/0-2",),
    "socketProgressOpt: Call to %s %s failed : %s": ("recv from", "10.0.0.1<4000>"),
    "ncclOsSocketProgressOpt: Call to %s %s failed : %s": ("send to", "10.0.0.1<4000>"),
    "NET/IB : Got async event : %s": ("port error",),
    "link_renegotiated": ("mlx5_0", "port active"),
    "comm %p rank %d nranks %d cudaDev %d busId %lx - %s COMPLETE": ("Abort",),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format; 12 is what a completion's error has to be."""
    strings = iter(STRINGS.get(form.text, STRINGS.get(form.name, ())))

    def value(match: re.Match) -> str:
        if match[0][-1] == "s":
            return next(strings, "" if form.name.endswith("_channel") else "x")
        return "12"

    return re.sub(r"%\d*l*[dupsx]", value, form.text) if form.by == "NCCL" else form.text


def find(*lines: str) -> nccl.Finding:
    """What whole lines say."""
    reader = nccl.Reader()
    for line in lines:
        reader.read(line + "\n")
    return reader.finding()


def told(*lines: str) -> dict[str, str]:
    """The problems of a text, each with its line."""
    return {problem["id"]: problem["line"] for problem in find(*lines).problems}


INFO = "node1:101:115 [0] NCCL INFO "
IB_LIST = INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"
NO_DEVICE = INFO + "NET/IB : No device found."
SOCKETS = INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0>"
TWO = ["mlx5_0:1", "mlx5_1:1"]


def using(name: str) -> str:
    return INFO + "Using network " + name


def channel(end: str) -> str:
    return INFO + f"Channel 00/0 : 0[0] -> 1[1] [send] via {end}"


def job(network: str, lists: list[str], ends: list[str]) -> list[str]:
    """What one rank of a job on two nodes prints."""
    texts = [
        "NCCL version 2.30.7+cuda13.3",
        "NET/Plugin: Could not find: libnccl-net.so",
        *lists,
        f"Using network {network}",
        "comm 0x55 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
        *(f"Channel 00/0 : 0[0] -> 3[1] [send] via {end}" for end in ends),
        "Connected all rings, use ring PXN 0 GDR 1",
    ]
    return [INFO + text for text in texts]


JOBS = {
    "infiniband": job(
        "IB",
        ["NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>"],
        ["P2P/CUMEM/read", "NET/IB/0/GDRDMA", "NET/IB/1(1)/GDRDMA(PCI)/Shared"],
    ),
    "sockets": job(
        "Socket",
        [
            "NET/IB : No device found.",
            "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
            "NET/Socket : Using [0]eth0:10.0.0.1<0>",
        ],
        ["SHM/direct/direct", "NET/Socket/0", "NET/Socket/0"],
    ),
    "efa": job(
        "AWS Libfabric",
        ["NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)"],
        ["NET/AWS Libfabric/0/GDRDMA"],
    ),
}

# --- Each message of the table -------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_format_filled_in_is_found_by_its_pattern(form):
    text = filled(form)
    pattern = (nccl.EVIDENCE | nccl.SIGNS)[form.name]
    assert pattern.search(text + "\n") and nccl.WORDS.search(text), text
    if form.name in nccl.PROBLEMS:
        assert told(INFO + text) == {form.name: INFO + text}
    if form.name == "network_channel":
        assert (find(text).networks, find(text).gpudirect) == (["IB"], 1)


def test_each_pattern_has_its_formats():
    assert {form.name for form in FORMATS} == {*nccl.EVIDENCE, *nccl.SIGNS}


@pytest.mark.parametrize("form", [f for f in ALL_FORMATS if f not in FORMATS], ids=str)
def test_a_format_without_pattern_says_nothing(form):
    found = find(INFO + filled(form))
    assert (found.decided, found.problems, found.devices) == (False, [], [])


@pytest.fixture(scope="module")
def library() -> tuple[Version, bytes]:
    """Version of the NCCL that torch has brought, and the part of its library that has texts."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.distribution(name)
            break
    else:
        pytest.skip("neither nvidia-nccl-cu13 nor nvidia-nccl-cu12 is installed")
    (path,) = (file.locate() for file in installed.files if file.name == "libnccl.so.2")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
        # Texts lie close together, and the whole file would take a hundred times as long.
        middle = image.find(b"Using network %s\0")
        texts = image[max(0, middle - (1 << 21)) : middle + (1 << 21)]
    return Version(installed.version), texts


def in_range(form: Format, version: Version) -> bool:
    # The compiler puts the version's text together.
    own = form.by == "NCCL" and form.name != "version"
    return own and Version(form.first) <= version <= Version(form.last or "999")


def test_each_format_of_the_installed_version_is_in_its_library(library):
    version, texts = library
    forms = [form for form in FORMATS if in_range(form, version)]
    missing = [form.text for form in forms if form.text.encode() + b"\0" not in texts]
    assert forms and missing == []


def test_a_newer_library_has_no_wording_about_networks_that_nobody_has_looked_at(library):
    version, texts = library
    if version < Version("2.30.7") and version != Version("2.28.9"):
        pytest.skip(f"[nothing] of nccl_formats.txt was not made for NCCL {version}")
    about = rb"via NET/|NET/IB : |NET/Socket : | NET plugin |Using network|GPU Direct RDMA"
    about += rb"|not open %s"
    found = {text.decode() for text in texts.split(b"\0") if re.search(about, text)}
    kept = {form.text for form in ALL_FORMATS if in_range(form, version)}
    assert len(found) > 40 and found - kept == set()


# --- What was used -------------------------------------------------------------------------------

# What stands for a longer line in the table.
PIECES = {
    "IB list": IB_LIST,
    "RoCE list": INFO + "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
    "both list": INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB a:b<0>",
    "socket list": SOCKETS,
    "EFA": INFO + "NET/OFI Selected Provider is efa (found 4 nics)",
    "channel": channel("NET/IB/0"),
    "channel 1": channel("NET/IB/1"),
    "P2P": channel("P2P/CUMEM"),
    "MNNVL": channel("P2P/MNNVL"),
    "2 nodes": INFO + "comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 1 MNNVL 0",
}


@pytest.mark.parametrize(
    ("said", "network", "transport"),
    [
        ("RoCE list|Using network IB", "IB", "roce"),
        ("Using network IB", "IB", "unknown"),
        ("both list|Using network IB", "IB", "unknown"),
        ("RoCE list|Using network IBext_v10", "IBext_v10", "roce"),
        ("IB list|Using network NCCL RDMA Plugin v9", "NCCL RDMA Plugin v9", "infiniband"),
        ("EFA|Using network Libfabric", "Libfabric", "efa"),
        ("Using network Libfabric", "Libfabric", "plugin"),
        ("Using network IBext", "IBext", "plugin"),
        ("Using external Network FooNet", "FooNet", "plugin"),
        ("NET/IB: [0] mlx5_0:1/RoCE |Using internal Network IB", "IB", "roce"),
        ("NET/IB: [0] mlx5_0:uverbs0:1/RoCE provider=mlx5", None, "unknown"),
        ("IB list|Assigned NET plugin IB to comm", None, "infiniband"),
        ("RoCE list|Initialized NET plugin FooNet", None, "plugin"),
        ("Initialized NET plugin IB|IB list|Using network Socket", "Socket", "sockets"),
        # Of adapters of both kinds, those that are connected count.
        ("both list|channel", "IB", "infiniband"),
        ("both list|channel 1", "IB", "roce"),
        ("both list|channel|channel 1", "IB", "unknown"),
        # An announced network outranks lists; connections outrank all.
        ("IB list|Using network Socket", "Socket", "sockets"),
        ("Using network Socket|IB list|channel", "IB", "infiniband"),
        # Sockets that are always started first say nothing before adapters or a plugin.
        ("socket list|IB list", None, "infiniband"),
        ("socket list|NET/IB : No device found.", None, "sockets"),
        ("socket list|EFA", None, "unknown"),
        # One node is local though a network is announced; a rank amid its node is not all of it.
        ("IB list|Using network IB|P2P", "IB", "local"),
        ("2 nodes|Using network IB|IB list|P2P", "IB", "infiniband"),
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
    ],
)
def test_adapters_and_interfaces_of_a_list_are_named_once(listed, transport, names):
    found = find(INFO + listed, INFO + listed)
    assert (found.transport, found.devices + found.interfaces) == (transport, names)


def test_ranks_that_differ_are_said_and_the_slowest_counts():
    found = find(using("IB"), IB_LIST, using("Socket"))
    assert (found.transport, found.networks) == ("sockets", ["Socket", "IB"])
    assert "Ranks differ (Socket, IB); the slowest" in "".join(nccl.describe(found))


@pytest.mark.parametrize(
    "text",
    [
        "Bootstrap : Using [0]ib7:10.0.0.1<0>",
        "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
        "NCCL_NET set by environment to IB",
        "NET/IB : Using interface ib7 for sideband communication",
        "NET/IB : Using [RO]; OOB ib7:10.0.0.1<0>",
        "Connected all rings, use ring PXN 0 GDR 1",
        "NET/Plugin: Loaded net plugin IBext_v10 (v10)",
        "Channel 00/02 :    0   1",
        "CollNet 00/0 : 0 [send] via COLLNET/IB/0",
        "Using non-device net plugin version 0",
        "Failed to initialize NET plugin IB",
        # Cut, or broken by another text: half a name is none.
        "Using network Sock",
        "Using network AWS Libfab",
        "Using network NCCL RDMA Plugin v",
        "Using network interface eth0",
        "Using network IBnode2:7:8 [1] NCCL INFO comm 0x5",
    ],
)
@pytest.mark.parametrize("kind", JOBS)
def test_start_up_wishes_and_halves_decide_nothing(kind, text):
    assert not find(INFO + text).decided
    whole = find(*JOBS[kind]).to_dict() | {"problems": []}
    assert find(INFO + text, *JOBS[kind]).to_dict() | {"problems": []} == whole


@pytest.mark.parametrize("prefix", ["", "[default1]:", "2026-01-31T12:00:00.123Z | ", "\x1b[36m"])
@pytest.mark.parametrize("kind", JOBS)
def test_neither_prefix_nor_order_changes_what_a_text_says(kind, prefix):
    found, whole = find(*(prefix + line for line in reversed(JOBS[kind]))), find(*JOBS[kind])
    assert whole.transport == kind
    assert found.to_dict() | {"problems": []} == whole.to_dict() | {"problems": []}


@pytest.mark.parametrize("kind", JOBS)
def test_a_text_cut_anywhere_says_what_the_whole_says_or_nothing(kind):
    text = "\n".join(JOBS[kind]) + "\n"
    whole = find(*JOBS[kind])
    for cut in range(0, len(text), 7):
        reader = nccl.Reader()
        for line in text[:cut].splitlines(keepends=True):
            reader.read(line)
        found = reader.finding()
        assert found.transport in ("unknown", "local", whole.transport)
        assert set(found.devices) <= set(whole.devices)
        assert "gpudirect_off" not in [problem["id"] for problem in found.problems]


def test_messages_on_one_line_are_all_read():
    found = find(f"{NO_DEVICE} {SOCKETS} NCCL INFO Using network Socket")
    assert (found.network, found.interfaces) == ("Socket", ["eth0"])
    assert found.problems[0]["line"] == NO_DEVICE


@pytest.mark.parametrize("start", [" ", "", "[default1]:", "1: "])
def test_what_another_text_breaks_is_taken_only_if_it_is_whole(start):
    other = start + "node2:7:8 [1] NCCL INFO comm 0x5"
    for name in ("I", "Sock", "AWS Libfab", "NCCL RDMA Plugin v", "", "FooNe"):
        assert not find(using(name) + other).decided, name
    assert find("NCCL version 2.30.1" + other).version in (None, "2.30.1")
    found = find(channel("NET/IB/0") + other, channel("NET/IB/1/GDR") + other)
    assert found.network == "IB" and (start == " ") == ("network" in found.channels)
    if start:  # else the break is taken for a part of the other's host name
        assert find(channel("NET/IB/0/GDRDMA") + other).gpudirect == 1


def test_a_name_ends_with_its_line_or_quotation():
    for line in (
        using("FooNet"),
        f"\x1b[36m{using('FooNet')}\x1b[0m",
        f'{{"log": "{using("FooNet")}\\n", "stream": "stderr"}}',
        f"it said `{using('FooNet')}`, twice",
    ):
        assert find(line).network == "FooNet", line


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NCCL version 2.2.13+cuda9.0", "2.2.13+cuda9.0"),
        ("RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+", "2.18.3+hip6.0"),
        ("ncclSystemError: System call failed, NCCL version 2.14.3", "2.14.3"),
        ("was compiled with NCCL version 2.29.3, but is running", None),
        ("NCCL version 2.30", None),
    ],
)
def test_version(line, version):
    assert find(line).version == version
    assert find(line, "NCCL version 2.9.6+cuda11.0").version != "2.14.3"


# --- Problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "NET/Plugin: libnccl-net.so: libnccl-net.so: cannot open shared object file: No such file",
        "NET/Plugin : dlerror=librccl-net.so: cannot open shared object file: No such file",
        "NET/Plugin : Plugin load returned 17 : libnccl-net.so: cannot open shared object file.",
        "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
        "NET/Plugin: Failed to find ncclNetPlugin_v9 symbol.",
        "NET/Plugin: Failed to find ncclCollNetPlugin symbol (>= v5).",
        "TUNER/Plugin: libfoo.so: cannot open shared object file: No such file or directory",
        "ncclOsDlopen(libnccl-net.so) failed",
        "No network plugin found.",
        "Failed to initialize NET plugin IB",
        "Could not open libibverbs.so",
        "Count not open libibverbs.so",
        "Call to ibv_reg_mr failed with error Bad address",
        "Got completion from peer A<4> with error 5, opcode 0, len 12, vendor err 12",
        "Got completion from peer A<4> with status=129 opcode=12",
        "Got completion from peer A<4> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_SEND(12)",
        "socketConnect: connect to A<4> returned Connection timed out, retrying (3/34) after",
        "comm 0x5 rank 0 nranks 2 cudaDev 0 busId 1000 - Destroy COMPLETE",
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
        "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'",
        "DMA-BUF is available on GPU device 0",
    ],
)
def test_what_is_normal_is_no_problem(text):
    assert told(INFO + text) == {}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("Connect to A<4> failed : No route to host", ["peer_unreachable", "connection_failed"]),
        ("Connect to A<4> failed : Connection refused", ["connection_failed"]),
        (
            "connect to A<4> returned Connection timed out, exceeded error retry count after 34",
            ["peer_unreachable", "connection_failed"],
        ),
        ("connect to A<4> failed : Software caused connection abort", ["connection_failed"]),
        ("no device found matching ib9, verify NCCL_OOB_NET_IFNAME", ["no_interface"]),
        ("Call to ibv_create_qp failed with error Cannot allocate memory errno 12", ["memlock"]),
    ],
)
def test_what_the_values_of_a_message_tell(text, problems):
    assert list(told(text)) == problems


def test_interfaces_that_seldom_join_nodes_are_suspect():
    suspects = ["lo", "docker0", "veth12ab", "br-12ab", "virbr0", "tailscale0"]
    for name in (*suspects, "eth0", "ib0", "ens5", "bond0", "br0", "lan0", "enp129s0", "hsn0"):
        line = SOCKETS.replace("eth0", name)
        assert told(line) == ({"suspect_interface": line} if name in suspects else {}), name
        assert told(line, IB_LIST) == {}


@pytest.mark.parametrize(
    "text", ["Could not find: {}", "Plugin load returned 2 : {}: cannot open shared object file"]
)
def test_a_missing_plugin_is_a_problem_only_if_it_was_asked_for(text):
    line = INFO + "NET/Plugin: " + text.format("libnccl-net.so")
    for asked in ("NCCL_NET_PLUGIN set by environment to foo", "Plugin name set by env to foo"):
        assert told(INFO + asked, line)["plugin_failed"] == line
        assert "plugin_failed" not in told(INFO + asked, line, using("AWS Libfabric"))
        assert "plugin_failed" in told(asked, line, using("AWS Libfabric"), using("Socket"))
    for other in (
        "NCCL_NET_PLUGIN set by environment to none",
        "TUNER/Plugin: Plugin name set by env to foo",
    ):
        assert told(INFO + other, line) == {}


@pytest.mark.parametrize(
    ("text", "fell_back"),
    [
        ("NCCL_IB_HCA set to mlx5_0", True),
        ("NCCL_IB_DISABLE set by environment to 0.", True),
        ("NCCL_NET set by environment to IB", True),
        ("NET/OFI aws-ofi-nccl initialization failed", True),
        ("Connected all rings", False),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_IB_DISABLE set by environment to 1.", False),
        ("NCCL_IB_HCA set to mlx5_0\nNCCL_NET set by environment to Socket", False),
    ],
)
def test_sockets_are_a_fall_back_only_where_more_was_asked_for(text, fell_back):
    problems = told(*text.splitlines(), using("Socket"))
    assert ("fell_back_to_sockets" in problems) == fell_back
    assert "fell_back_to_sockets" not in told(*text.splitlines(), using("IB"), IB_LIST)


def test_gpudirect_is_off_if_no_connection_of_rdma_has_it():
    first, with_it = channel("NET/IB/0"), channel("NET/IB/0/GDRDMA")
    assert told(IB_LIST, first, channel("NET/IB/1")) == {"gpudirect_off": first}
    assert told(IB_LIST, first, with_it) == {}
    assert told(channel("NET/Socket/0")) == told(channel("NET/FooNet/0")) == {}
    pair = INFO + "GPU Direct RDMA Disabled for GPU 0 / HCA 1 (distance 6 > 4)"
    adapter = INFO + "NET/IB : GPU Direct RDMA Disabled for HCA 1 'mlx5_1'"
    assert told(adapter) == {"gpudirect_off": adapter} and told(pair) == {"gpudirect_off": pair}
    # An adapter's line counts while a connection has none, a far pair's while all have none.
    assert told(adapter, IB_LIST, with_it, first) == {"gpudirect_off": adapter}
    assert told(adapter, IB_LIST, with_it) == told(pair, IB_LIST, with_it, first) == {}
    assert told(pair, IB_LIST, first) == {"gpudirect_off": pair}
    # It does not concern sockets or one node.
    assert told(pair, adapter, using("Socket")) == told(pair, adapter, channel("P2P/IPC")) == {}


# --- Whole texts, as reports and job logs have them ----------------------------------------------


def read_reports() -> dict[str, tuple[list[str], str]]:
    """{name: (what is expected, text)} of nccl_reports.txt."""
    whole = (SUPPORT / "nccl_reports.txt").read_text()
    reports = (part.split("\n", 2) for part in whole.split("\n== ")[1:])
    signs = {"\\x1b": "\x1b", "\\r": "\r"}
    return {
        name: (expected.split(" | "), re.sub(r"\\x1b|\\r", lambda sign: signs[sign[0]], text))
        for name, expected, text in reports
    }


REPORTS = read_reports()


@pytest.mark.parametrize("name", REPORTS)
def test_texts_as_reports_have_them(tmp_path, name):
    expected, text = REPORTS[name]
    text = text.rstrip("\n") if "without end" in name else text
    (tmp_path / "job.log").write_bytes(text.encode())
    found = nccl.find_in_files([str(tmp_path / "job.log")])
    over = found.interfaces if found.transport == "sockets" else found.devices
    told = [problem["id"] for problem in found.problems]
    words = [" ".join(told), found.transport, found.network, " ".join(over)]
    assert [word or "-" for word in words] == expected


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
    path = write(tmp_path / "node0.log", wish + " \u2713", *JOBS["sockets"])
    command, env = [sys.executable, "-S", TOOL, path], {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "NCCL 2.30.7+cuda13.3 used TCP sockets (network Socket) over eth0, 2 nodes.",
        "Connections seen: 2 over the network, 1 without.",
        'Why not another network: NCCL says "NET/IB : No device found.".',
        f"no_ib_device: {NO_DEVICE}",
        f"    -> {nccl.PROBLEMS['no_ib_device'][1]}",
        f"fell_back_to_sockets: {wish} ?",
        f"    -> {nccl.PROBLEMS['fell_back_to_sockets'][1]}",
    ]


def test_the_watchdog_alone_says_which_collective_timed_out(tmp_path, call):
    """As PyTorch 2.2 to 2.15 write it, and 1.13, which has no sizes."""
    line = "[E ProcessGroupNCCL.cpp:607] [Rank {}] Watchdog caught collective operation timeout: "
    line += "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, {}Timeout(ms)=600000) ran for 600060 "
    line += "milliseconds before timing out."
    sizes = "NumelIn=466119168, NumelOut=466119168, "
    lines = [line.format(rank, sizes) for rank in (10, 2, 10)] + [line.format(3, "")]
    lines.append(lines[0].removeprefix("[E ProcessGroupNCCL.cpp:607] [Rank 10] "))
    code, out, err = call(write(tmp_path / "job.log", *lines))
    assert code == 1 and err.startswith("nccl_log.py: nothing decided: start the job with ")
    assert out.splitlines() == [
        "NCCL's text names no network.",
        "Timed out: ALLREDUCE number 1580 (466,119,168 elements), after 600 s, on rank 2, 10.",
        "Timed out: ALLREDUCE number 1580, after 600 s, on rank 3.",
        f"timeout: {lines[0]}",
        f"    -> {nccl.PROBLEMS['timeout'][1]}",
    ]


def test_files_and_folders_are_read_as_one_text_and_told_as_one_json_object(tmp_path, call):
    (tmp_path / "run/rank1").mkdir(parents=True)
    for name in ("run/nccl.a.101", "run/rank1/nccl.b.102"):
        lines = "\n".join(JOBS["infiniband"])
        # Neither bytes that are no text nor a last line without its end stop the reading.
        (tmp_path / name).write_bytes(b"\xff\xfe tqdm\r" + lines.encode() + b"\n\xc3")
    (tmp_path / "run/checkpoint.pt").write_bytes(b"\0" * 100 + b"\nvia NET/Socket/0\n")
    write(tmp_path / "other.log", NO_DEVICE)
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
        "timeouts": [],
        "problems": [{"id": "no_ib_device", "line": NO_DEVICE, "advice": advice}],
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["undecided"], 1, "nothing decided: start the job with NCCL_DEBUG=INFO"),
        (["log", "gone"], 2, "error: no such file or folder: gone"),
        (["empty"], 2, "error: no text of NCCL in empty: start the job with NCCL_DEBUG=INFO"),
        (["folder"], 2, "error: no text of NCCL in folder"),
        (["--xml", "log"], 2, "error: unrecognized arguments: --xml"),
    ],
)
def test_wrong_usage_ends_in_one_line(arguments, code, message, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("log"), *JOBS["efa"])
    write(Path("undecided"), INFO + "Bootstrap : Using eth0:10.0.0.1<0>")
    Path("empty").touch()
    Path("folder").mkdir()
    found, out, err = call(*arguments)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("nccl_log.py: " + message)


def test_files_of_a_nodes_processes(tmp_path):
    """What the probe asks for: this run's processes alone; a host's name ends at the first dot."""
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
    assert nccl.of_processes("", "gpu7", [11]) is None
