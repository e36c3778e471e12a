"""What is read in NCCL's text, by three tables: the formats of its messages as in C, what several
lines say together, and whole texts with their answers. `pytest --record` writes the answers anew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

import nccl_log
from analysis import nccl
from support.processes import FACTOR, ROOT

TOOL = ROOT / "tools/nccl_log.py"
CASES, RULES, FORMATS = (
    ROOT / f"tests/data/nccl_{name}.txt" for name in ("cases", "rules", "formats")
)
INFO = "node1:101:115 [0] NCCL INFO "
NO_DEVICE = INFO + "NET/IB : No device found."


def find(*lines: str) -> nccl.Finding:
    """What whole lines say."""
    reader = nccl.Reader()
    for line in lines:
        reader.read(line + "\n")
    return reader.finding()


def using(name: str) -> str:
    return INFO + "Using network " + name


def channel(end: str) -> str:
    return INFO + f"Channel 00/0 : 0[0] -> 1[1] [send] via {end}"


# --- Whole texts, as reports and job logs have them ----------------------------------------------

HEAD, *parts = CASES.read_text(encoding="utf-8").split("\n== ")
TEXTS = dict(part.partition("\n--\n")[0].split("\n", 1) for part in parts)
JOBS = {
    kind: next(text for name, text in TEXTS.items() if begin in name).splitlines()
    for kind, begin in (
        ("infiniband", "job over InfiniBand"),
        ("sockets", "job over sockets"),
        ("efa", "job on EFA"),
        ("printed", "NCCL 2.28.9 printed this"),
    )
}


def answer(name: str, folder: Path) -> list[str]:
    """What is said of a text; the name tells whether its last line lacks an end."""
    text = TEXTS[name].replace("\\x1b", "\x1b").replace("\\r", "\r")
    end = "" if "without end" in name else "\n"
    (folder / "job.log").write_bytes((text + end).encode())
    return nccl.describe(nccl.find_in_files([str(folder / "job.log")]))


def test_whole_texts_have_their_answers(tmp_path, assert_recorded):
    made = HEAD
    for name, text in TEXTS.items():
        made += "\n".join(["", f"== {name}", text, "--", *answer(name, tmp_path), ""])
    assert_recorded(CASES, made)


# --- What several lines say together -------------------------------------------------------------


def answer_of_row(row: str, words: dict[str, str]) -> str:
    said = row.split(" | ", 4)[-1]
    lines = [INFO + words.get(word, word) for word in said.split(" & ")]
    found, turned = find(*lines), find(*reversed(lines))
    assert (turned.transport, turned.network) == (found.transport, found.network), row
    assert sorted(turned.means) == sorted(found.means), row
    over = found.interfaces + found.devices + [f"({name})" for name in found.unused]
    bare = [nccl.message(line) for line in lines]
    quoted = [f"no_network {bare.index(line) + 1}" for line in found.no_network]
    quoted += [f"no_gpudirect {bare.index(found.no_gpudirect) + 1}"] if found.no_gpudirect else []
    quoted += [re.split("[:,]", text)[0] for text in found.means]
    columns = [found.transport, found.network, " ".join(over), "; ".join(quoted), said]
    return " | ".join(column or "-" for column in columns)


def test_several_lines_have_their_answers_in_either_order(assert_recorded):
    rows = RULES.read_text().splitlines()
    words = dict(row.split(" = ", 1) for row in rows if " = " in row)
    made = [answer_of_row(row, words) if " | " in row else row for row in rows]
    assert_recorded(RULES, "\n".join(made) + "\n")


# --- Each message --------------------------------------------------------------------------------


class Format(NamedTuple):
    """A message of nccl_formats.txt; `last` is "-" if the newest release looked at has it."""

    name: str
    first: str  # release, or another author than NCCL
    last: str
    text: str

    @property
    def of_nccl(self) -> bool:
        return self.first[0].isdigit()


def read_formats() -> list[Format]:
    found, name = [], ""
    for line in FORMATS.read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append(Format(name, *line.split(maxsplit=2)))
    return found


READ = [form for form in read_formats() if form.name != "nothing"]
NOTHING = [form for form in read_formats() if form.name == "nothing"]
# What the strings of a message are, by its name; those that are left are "x".
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "using_network": ("IB",),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "asked": ("NCCL_IB_DISABLE",),
    "no_network": ("libibverbs.so.1",),
    "no_gpudirect": ("IB", "Disabled", "mlx5_0"),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format."""
    strings = iter(STRINGS.get(form.name, ()))

    def value(match: re.Match) -> str:
        if match[0][-1] == "s":
            return next(strings, "" if form.name.endswith("_channel") else "x")
        return "12"

    return INFO + (re.sub(r"%\d*l*[dupsx]", value, form.text) if form.of_nccl else form.text)


@pytest.mark.parametrize("form", READ, ids=lambda form: form.name)
def test_each_format_filled_in_is_found_by_its_pattern(form):
    reader = nccl.Reader()
    reader.read(filled(form) + "\n")
    if form.name == "completion":  # a status
        assert re.search(nccl.STATUS + r"12\b", filled(form))
    else:
        assert reader.seen[form.name]
    if form.name == "network_channel":
        assert (reader.finding().networks, reader.finding().gpudirect) == (["IB"], 1)


def test_each_pattern_has_its_formats():
    assert {form.name for form in READ} == {*nccl.EVIDENCE, "completion"}


@pytest.mark.parametrize("form", NOTHING, ids=lambda form: form.text[:30])
def test_a_message_without_pattern_changes_nothing(form):
    """The same for half a name: one that is cut, or broken by another text."""
    found = find(filled(form))
    assert (found.decided, found.no_network, found.devices) == (False, [], [])
    for job in JOBS.values():
        whole = find(*job).to_dict() | {"asked": {}}
        assert find(filled(form), *job).to_dict() | {"asked": {}} == whole


def test_each_format_of_the_installed_nccl_is_in_its_library():
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
    version = Version(installed.version)
    own = [  # the compiler puts the version's text together
        form.text
        for form in READ
        if form.of_nccl
        and form.name != "version"
        and Version(form.first) <= version <= Version(form.last.strip("-") or "999")
    ]
    assert own and [text for text in own if text.encode() + b"\0" not in texts] == []


# --- Torn texts and names ------------------------------------------------------------------------


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


@pytest.mark.parametrize("start", [" ", "", "[default1]:", "1: "])
def test_what_another_text_breaks_is_taken_only_if_it_is_whole(start):
    other = start + "node2:7:8 [1] NCCL INFO comm 0x5"
    for name in ("I", "IB", "AWS Libfab", "NCCL RDMA Plugin v", "", "FooNe"):
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


# --- The cause -----------------------------------------------------------------------------------


def warn(text: str, host: str = "n1", time: str = "") -> str:
    return f"{time and f'[2026-11-28 10:00:{time}] '}{host}:1:1 [0] file.cc:7 NCCL WARN {text}"


def cause(*lines: str) -> str:
    return nccl.cause(find(*lines).to_dict())


def test_the_cause_is_the_earliest_warning_whatever_the_order():
    """By NCCL's own time."""
    lines = [warn("late", "n1", "09"), warn("early", "n2", "07"), warn("last", "n2", "11")]
    for turned in (lines, lines[::-1]):
        assert cause(*turned) == 'GPU 0 of n2 at 2026-11-28 10:00:07: "early" and 2 more warnings'


@pytest.mark.parametrize(
    "effect",
    [
        "Connection closed by remote peer n2<4>",
        "Call to recv from A failed : Connection reset by peer",
        "Socket recv failed while polling for opId=0x5, res=3",
        "NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)",
        "NET/IB : Got completion from peer A<5> with error 5, opcode 0",
        "NET/IB: Got completion from peer A<5> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=0",
    ],
)
def test_an_effect_of_another_error_is_the_cause_of_nothing(effect):
    own = "Cuda failure 'out of memory'"
    said = f'"{own}" and 1 more warning'
    assert cause(warn(effect, "n1", "01"), warn(own, "n1", "02")).endswith(said)
    assert cause(warn(effect, "n1"), warn(own, "n2")) == f"GPU 0 of n2: {said}"
    # What a process says after an effect comes after what another one says at first.
    said = cause(warn(effect, "n1"), warn("then", "n1"), warn(own, "n2"))
    assert said == f'GPU 0 of n2: "{own}" and 2 more warnings'
    assert effect in cause(warn(effect))  # all that there is


def test_what_healthy_runs_print_is_no_cause():
    for line in (
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
        "NET/IB : mlx5_0:1 Got async event : client reregistration",
        "NET/IB : There are mismatched physical devices between local (a) and remote (b).",
        "NET/OFI aws-ofi-nccl initialization failed",
        'Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
    ):
        assert cause(warn(line)) == ""
        assert cause(warn(line), warn("own")) == 'GPU 0 of n1: "own"'
    assert (cause(NO_DEVICE), nccl.cause({})) == ("", "")


# --- Files ---------------------------------------------------------------------------------------


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_files_and_folders_are_read_as_one_text(tmp_path):
    (tmp_path / "run/rank1").mkdir(parents=True)
    lines = "\n".join(JOBS["infiniband"])
    # Neither bytes that are no text nor a last line without its end stop the reading.
    (tmp_path / "run/nccl.a.101").write_bytes(b"\xff tqdm\r" + lines.encode() + b"\n\xc3")
    (tmp_path / "run/rank1/nccl.b.102").write_text(lines)
    (tmp_path / "run/checkpoint.pt").write_bytes(b"\0" * 100 + b"\nvia NET/Socket/0\n")
    write(tmp_path / "other.log", NO_DEVICE)
    found = nccl.find_in_files([str(tmp_path / "other.log"), str(tmp_path / "run")])
    assert (found.version, found.network, found.nodes) == ("2.30.7+cuda13.3", "IB", 2)
    assert found.devices == ["mlx5_0:1", "mlx5_1:1"] and found.gpudirect == 4
    assert found.channels == {"p2p": 2, "network": 4}
    assert found.no_network == [nccl.message(NO_DEVICE)]
    assert nccl.Finding(**found.to_dict()) == found


def test_of_a_folder_the_newest_start_is_told(tmp_path):
    """The probe's two processes over InfiniBand, then the training's over sockets."""
    starts = [(11, 0, "IB"), (12, 1, "IB"), (9, 0, "Socket"), (10, 1, "Socket")]
    for age, (pid, rank, name) in enumerate(starts):
        prefix = f"n0:{pid}:{pid} [0] NCCL INFO "  # each process sees its own GPU alone
        comm = f"comm 0x5 rank {rank} nRanks 2 nNodes 1 localRanks 2 localRank 0"
        file = tmp_path / f"nccl.node0.n0.{pid}.log"
        os.utime(write(file, f"{prefix}Using network {name}", prefix + comm), (age, age))
    other_node = write(tmp_path / "nccl.node1.n1.9.log", "n1:9:9 [0] NCCL INFO Using network IB")
    beside = nccl.beside(tmp_path / "node0.log")
    assert sorted(file.name.split(".")[3] for file in beside) == ["10", "9"]
    other_node.unlink()
    told = nccl.used(nccl.find_in_files([str(tmp_path)]))
    assert told == "NCCL used TCP (network Socket), 1 node"
    for file in tmp_path.iterdir():  # as a copy of the folder may have them
        os.utime(file, (7, 7))
    told = nccl.used(nccl.find_in_files([str(tmp_path)]))
    assert told == "NCCL chose InfiniBand or RoCE adapters (network IB), 1 node"


def test_files_of_a_nodes_processes(tmp_path):
    """What the probe asks for: this run's processes alone; a host's name ends at the first dot."""
    for pid, name in ((11, "ib0"), (12, "ib1"), (13, "ib2")):
        file = tmp_path / f"nccl.gpu7.{pid}.log"
        write(file, NO_DEVICE, INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>")
    pattern = f"{tmp_path}/nccl.%h.%p.log"
    found = nccl.of_processes(pattern, "gpu7.cluster.example", [11, 12, 14])
    assert nccl.used(found) == "NCCL used TCP over ib0, ib1"
    assert found.no_network == ["NET/IB : No device found."]
    assert nccl.of_processes("", "gpu7", [11]) is None


# --- Command line --------------------------------------------------------------------------------


def test_the_command_needs_no_packages_and_no_modern_terminal(tmp_path):
    """-S hides the installed packages. The terminal lacks a character of the log."""
    expected = answer("a job over sockets, though InfiniBand was asked for", tmp_path)
    assert any("✓" in line for line in expected)
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    how = {"capture_output": True, "text": True, "timeout": 60 * FACTOR}
    result = subprocess.run([sys.executable, "-S", TOOL, tmp_path], env=env, **how)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "\n".join(expected).replace("✓", "?") + "\n"


def test_a_text_that_decides_nothing_is_told_with_exit_code_1(tmp_path, capsys):
    name = next(name for name in TEXTS if "watchdog" in name)
    expected = answer(name, tmp_path)
    assert nccl_log.main([str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("nccl_log.py: nothing decided: start the job with ")
    assert out.splitlines() == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["log", "gone"], "cannot read gone: No such file or directory"),
        (["empty"], "no text of NCCL on networks in empty: start the job with NCCL_"),
        (["folder"], "no text of NCCL on networks in folder"),
        (["pipe"], "pipe is a pipe, and is read twice: give a file"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(names, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("log"), *JOBS["efa"])
    Path("empty").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    assert nccl_log.main(names) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"nccl_log.py: error: {said}") and err.count("\n") == 1
