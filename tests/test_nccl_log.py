"""tools/nccl_log.py: against lines made from each message's C format, against the traps that real
logs hold, against NCCL's own library where it is installed, and from its command line.
"""

from __future__ import annotations

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
# What the strings of a message are, by its name; those that are left are "x".
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "using_network": ("IB",),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "wish": ("NCCL_IB_DISABLE",),
    "verbs_library_missing": ("libibverbs.so.1",),
    "memlock": ("Cannot allocate memory",),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format; 12 is what a completion's error has to be."""
    strings = iter(STRINGS.get(form.name, ()))

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
    assert pattern.search(text) and nccl.WORDS.search(text), text
    if form.name in nccl.PROBLEMS:
        assert told(INFO + text) == {form.name: INFO + text}
    if form.name == "network_channel":
        assert (find(text).networks, find(text).gpudirect) == (["IB"], 1)


def test_each_pattern_has_its_formats():
    assert {form.name for form in FORMATS} == {*nccl.EVIDENCE, *nccl.SIGNS}


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

# What stands for a longer line in the table.
PIECES = {
    "IB list": IB_LIST,
    "RoCE list": INFO + "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
    "both list": INFO + "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB a:b<0>",
    "socket list": INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "EFA": INFO + "NET/OFI Selected Provider is efa (found 4 nics)",
    "channel": channel("NET/IB/0"),
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
        "NET/Plugin: Loaded net plugin IBext_v10 (v10)",
        "Channel 00/02 :    0   1",
        "CollNet 00/0 : 0 [send] via COLLNET/IB/0",
        "Using non-device net plugin version 0",
        "Failed to initialize NET plugin IB",
        # Cut, or broken by another text: half a name is none.
        "Using network Sock",
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


# --- Problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
        "Failed to initialize NET plugin IB",
        "Could not open libibverbs.so",
        "Call to ibv_reg_mr failed with error Bad address",
        "Got completion from peer A<4> with error 5, opcode 0, len 12, vendor err 12",
        "Got completion from peer A<4> with status=129 opcode=12",
        "socketConnect: connect to A<4> returned Connection timed out, retrying (3/34) after",
    ],
)
def test_what_is_normal_is_no_problem(text):
    assert told(INFO + text) == {}


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
