"""analysis.nccl: three tables are its tests, with the messages by their C formats, rules for
several lines, and whole texts with the answer to each. NCCL's own library has to have the formats.
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
from analysis.logs import UserError
from support.processes import FACTOR, ROOT

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
    text = (SUPPORT / "nccl_formats.txt").read_text()
    for line in text.splitlines():
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
STRINGS = {
    "network_channel": ("IB", "/GDRDMA", "(PCI)", "/Shared"),
    "using_network": ("IB",),
    "adapters": (" [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE", "[RO]", "ib0", "10.0.0.1<0>"),
    "sockets": (" [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>",),
    "asked": ("NCCL_IB_DISABLE",),
    "no_network": ("libibverbs.so.1",),
    "NET/%s : GPU Direct RDMA %s for HCA %d '%s'": ("IB", "Disabled", "mlx5_0"),
}


def filled(form: Format) -> str:
    """A line as NCCL writes it from a format."""
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


INFO = "node1:101:115 [0] NCCL INFO "
NO_DEVICE = INFO + "NET/IB : No device found."


def using(name: str) -> str:
    return INFO + "Using network " + name


def channel(end: str) -> str:
    return INFO + f"Channel 00/0 : 0[0] -> 1[1] [send] via {end}"


# --- Whole texts, as reports and job logs have them ----------------------------------------------

CASES = SUPPORT / "nccl_cases.txt"


def read_texts(path: Path) -> dict[str, tuple[str, str]]:
    """{name: (text, answer)}"""
    found = {}
    for part in path.read_text(encoding="utf-8").split("\n== ")[1:]:
        name, rest = part.split("\n", 1)
        text, _, said = rest.partition("\n--\n")
        found[name] = text, said
    return found


def answer(name: str, text: str, folder: Path) -> list[str]:
    """What is said of a text; the name tells whether its last line lacks an end."""
    text = text.replace("\\x1b", "\x1b").replace("\\r", "\r")
    end = "" if "without end" in name else "\n"
    (folder / "job.log").write_bytes((text + end).encode())
    return nccl.describe(nccl.find_in_files([str(folder / "job.log")]))


TEXTS = {name: text for name, (text, _) in read_texts(CASES).items()}
JOBS = {
    "infiniband": TEXTS["a job over InfiniBand"].splitlines(),
    "sockets": TEXTS["a job over sockets, though InfiniBand was asked for"].splitlines(),
    "efa": TEXTS["a job on EFA"].splitlines(),
    "printed": TEXTS["NCCL 2.28.9 printed this on two nodes with NCCL_NET=Socket"].splitlines(),
}


def same_as_in_file(path: Path, made: str, request: pytest.FixtureRequest) -> None:
    """With --record the file is written anew."""
    if request.config.getoption("--record", False):
        path.write_text(made, encoding="utf-8")
    assert made.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_whole_texts_have_their_answers(tmp_path, request):
    made = CASES.read_text(encoding="utf-8").partition("\n== ")[0]
    for name, text in TEXTS.items():
        made += "\n".join(["", f"== {name}", text, "--", *answer(name, text, tmp_path), ""])
    same_as_in_file(CASES, made, request)


# --- Rules for several lines ---------------------------------------------------------------------

RULES = SUPPORT / "nccl_rules.txt"


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


def test_several_lines_have_their_answers_in_either_order(request):
    rows = RULES.read_text().splitlines()
    words = dict(row.split(" = ", 1) for row in rows if " = " in row)
    made = [answer_of_row(row, words) if " | " in row else row for row in rows]
    same_as_in_file(RULES, "\n".join(made) + "\n", request)


# --- Each message of the table -------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_format_filled_in_is_found_by_its_pattern(form):
    line = INFO + filled(form)
    reader = nccl.Reader()
    reader.read(line + "\n")
    if form.name == "completion":
        assert re.search(nccl.STATUS + r"12\b", line), line
    else:
        assert reader.seen[form.name], line
    if form.name == "network_channel":
        assert (reader.finding().networks, reader.finding().gpudirect) == (["IB"], 1)


def test_each_pattern_has_its_formats():
    names = {form.name for form in FORMATS}
    assert names ^ {*nccl.EVIDENCE} == {"completion"}  # a status


@pytest.mark.parametrize(
    "form", [form for form in ALL_FORMATS if form not in FORMATS], ids=lambda form: form.by
)
def test_a_message_without_pattern_says_nothing_and_changes_nothing(form):
    """The same for half a name: one that is cut, or broken by another text."""
    line = INFO + filled(form)
    found = find(line)
    assert (found.decided, found.no_network, found.devices) == (False, [], [])
    for job in JOBS.values():
        whole = find(*job).to_dict() | {"asked": {}}
        assert find(line, *job).to_dict() | {"asked": {}} == whole


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


def test_messages_on_one_line_are_all_read():
    more = INFO + "NET/Socket : Using [0]eth0:10.0.0.1<0> NCCL INFO Using network Socket"
    found = find(f"{NO_DEVICE} {more}")
    assert (found.network, found.interfaces) == ("Socket", ["eth0"])
    assert found.no_network == [nccl.message(NO_DEVICE)]


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


@pytest.mark.parametrize("end", ["", "/Shared", "(1)/Shared", "/flush=None", "/Shared/flush=None"])
def test_a_connection_without_gpudirect_counts_as_such(end):
    found = find(channel("NET/IB/0" + end))
    assert (found.channels, found.gpudirect) == ({"network": 1}, 0)


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


# --- The cause -----------------------------------------------------------------------------------


def warn(text: str, host: str = "n1", time: str = "") -> str:
    return f"{time and f'[2026-11-28 10:00:{time}] '}{host}:1:1 [0] file.cc:7 NCCL WARN {text}"


def cause(*lines: str) -> str:
    return nccl.cause(find(*lines).to_dict())


def test_the_cause_is_the_earliest_warning_by_nccls_own_time_whatever_the_order():
    lines = [warn("late", "n1", "09"), warn("early", "n2", "07"), warn("last", "n2", "11")]
    for turned in (lines, lines[::-1]):
        assert cause(*turned) == 'GPU 0 of n2 at 2026-11-28 10:00:07: "early" and 2 more warnings'


@pytest.mark.parametrize(
    "effect",
    [
        "Connection closed by remote peer n2<4>",
        "Call to recv from A failed : Connection reset by peer",
        "Call to send to A failed : Broken pipe",
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


def test_status_50_is_not_status_5():
    assert "error 50" in cause(warn("NET/IB : Got completion from A with error 50"), warn("own"))


@pytest.mark.parametrize(
    "line",
    [
        "NET/IB : mlx5_0:1 async fatal event: GID table change",
        "NET/IB : mlx5_0:1 GID table changed",
        "NET/IB : mlx5_0:1 Got async event : client reregistration",
        "NET/IB : There are mismatched physical devices between local (a) and remote (b).",
        "NET/OFI aws-ofi-nccl initialization failed",
        'Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
    ],
)
def test_what_healthy_runs_print_is_no_cause(line):
    assert cause(warn(line)) == ""
    assert cause(warn(line), warn("own")) == 'GPU 0 of n1: "own"'


def test_no_warning_is_no_cause():
    assert (cause(NO_DEVICE), nccl.cause({})) == ("", "")


def test_a_warning_is_quoted_with_the_lines_that_continue_it():
    hint = "Disable NVLS (NCCL_NVLS_ENABLE=0) if you wish to avoid this error."
    said = "This is usually caused by the Fabric Manager."
    whole = f'GPU 0 of n1: "Failed to bind. {said} {hint}"'
    assert cause(warn("Failed to bind."), said, hint) == whole
    assert cause(*[f"1: {line}" for line in (warn("Failed to bind."), said, hint)]) == whole
    assert cause(warn("Failed to bind."), said, hint, warn("Failed to bind."), said, hint) == whole
    # Another program's line, and one that is not the next.
    assert cause(warn("w"), "epoch 3: loss 0.1", hint) == 'GPU 0 of n1: "w"'
    assert cause("1: " + warn("w"), "2: " + hint) == 'GPU 0 of n1: "w"'
    assert cause("1: " + warn("w"), hint) == 'GPU 0 of n1: "w"'
    assert cause("[rank2]: Last error:", "[rank2]: w", "[rank2]: " + hint) == f'rank 2: "w {hint}"'


def test_torchs_quotation_counts_where_nccls_own_line_is_missing():
    quotation = "[rank2]: Last error:", "[rank2]: Failed"
    assert cause(*quotation) == 'rank 2: "Failed"'
    assert cause(warn("Failed"), *quotation) == 'GPU 0 of n1: "Failed"'
    assert (
        cause(warn("closed by remote peer"), *quotation) == 'rank 2: "Failed" and 1 more warning'
    )


@pytest.mark.parametrize("turned", [1, -1])
def test_a_rank_is_that_of_the_largest_communicator(turned):
    sizes = [(7, 16), (1, 2), (3, 16)][::turned]
    lines = [
        f"n1:1:1 [0] NCCL INFO comm 0x5 rank {rank} nranks {n} cudaDev 0" for rank, n in sizes
    ]
    rank = 7 if turned == 1 else 3  # of equal ones the first
    assert cause(*lines, warn("own")) == f'rank {rank} on n1: "own"'


def test_what_is_said_around_quotes_judges_nothing(tmp_path):
    for name, text in TEXTS.items():
        said = re.sub('"[^"]*"', "", " ".join(answer(name, text, tmp_path)))
        assert not re.search(r"\b(limits|only|usually|delivers)\b", said), name


# --- Adapters ------------------------------------------------------------------------------------


def on(host: str, text: str) -> str:
    return f"{host}:1:1 [0] NCCL INFO {text}"


def test_adapters_are_told_by_host_where_hosts_have_different_ones():
    lists = [
        on("n1", "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB a:b<0>"),
        on("n2", "NET/IB : Using [0]mlx5_2:1/IB [1]mlx5_1:1/IB [RO]; OOB a:b<0>"),
    ]
    via = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0"
    found = find(*lists, on("n1", via), on("n2", via))
    assert found.devices_by_host == {"n1": ["mlx5_0:1"], "n2": ["mlx5_2:1"]}
    assert (found.devices, found.unused) == (["mlx5_0:1", "mlx5_2:1"], ["mlx5_1:1"])
    assert nccl.used(found).endswith(" over mlx5_0:1 on n1; mlx5_2:1 on n2")
    found = find(*lists, on("n1", via))  # n2 names no connection
    assert (found.devices, found.unused) == (["mlx5_0:1"], ["mlx5_1:1", "mlx5_2:1"])
    sockets = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"
    assert find(*lists, on("n1", sockets)).devices == []


def test_a_list_that_is_cut_before_its_first_adapter_counts_for_nothing():
    cut = on("n1", "NET/IB : Using [0]mlx5_0:1/I")
    sockets = on("n1", "NET/Socket : Using [0]eth0:10.0.0.1<0>")
    assert find(cut).transport == "unknown"
    assert find(cut, sockets).transport == "sockets"


def test_a_merged_device_is_its_members_and_an_unknown_number_may_be_any():
    listed = on("n1", "NET/IB : Using [0]a:1/IB [1]a:2/IB [2]b:1/IB [3]c:1/IB [RO]; OOB a:b<0>")
    merged = on("n1", "NET/IB : Made virtual device [4] name=a+b speed=1 ndevs=2")
    via = on("n1", "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/4")
    found = find(listed, merged, via)
    assert (found.devices, found.unused) == (["a:1", "a:2", "b:1"], ["c:1"])
    found = find(listed, via)
    assert (found.devices, found.unused, found.transport) == ([], [], "infiniband")
    elsewhere = merged.replace("n1:1", "n2:1")
    assert find(listed, elsewhere, via).devices == []


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
    for age, (pid, rank, name) in enumerate(
        [(11, 0, "IB"), (12, 1, "IB"), (9, 0, "Socket"), (10, 1, "Socket")]
    ):
        file = tmp_path / f"nccl.node0.n0.{pid}.log"
        prefix = f"n0:{pid}:{pid} [0] NCCL INFO "  # each process sees its own GPU alone
        comm = f"comm 0x5 rank {rank} nRanks 2 nNodes 1 localRanks 2 localRank 0"
        write(file, f"{prefix}Using network {name}", prefix + comm)
        os.utime(file, (age, age))
    write(tmp_path / "nccl.node1.n1.9.log", "n1:9:9 [0] NCCL INFO Using network IB")
    beside = nccl.beside(tmp_path / "node0.log")
    assert sorted(file.name.split(".")[3] for file in beside) == ["10", "9"]
    (tmp_path / "nccl.node1.n1.9.log").unlink()
    told = nccl.used(nccl.find_in_files([str(tmp_path)]))
    assert told == "NCCL used TCP (network Socket), 1 node"
    for file in tmp_path.iterdir():  # as a copy of the folder may have them
        os.utime(file, (7, 7))
    told = nccl.used(nccl.find_in_files([str(tmp_path)]))
    assert told == "NCCL chose InfiniBand or RoCE adapters (network IB), 1 node"


def test_of_a_log_the_last_run_is_read(tmp_path):
    log = write(
        tmp_path / "node0.log",
        "first",
        "[GPU 0] Run {}",
        "[GPU 0] Cleanup complete. Total wall time: 1s (1.000s)",
        using("IB"),
        "[GPU 0] Run {}",
        "[GPU 0] Epoch 1 | Step 1 | Loss: 1.0000",
        using("Socket"),
    )
    lines = [using("IB"), "[GPU 0] Run {}", using("Socket")]
    assert nccl.of_last_run(log) == [line + "\n" for line in lines]
    assert len(nccl.of_last_run(write(log, "a", "b"))) == 2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["log", "gone"], "cannot read gone: No such file or directory"),
        (["empty"], "no text of NCCL on networks in empty: start the job with NCCL_"),
        (["folder"], "no text of NCCL on networks in folder"),
        (["pipe"], "pipe is a pipe, and is read twice: give a file"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(names, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("log"), *JOBS["efa"])
    Path("empty").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    with pytest.raises(UserError, match=re.escape(message)) as told:
        nccl.find_in_files(names)
    assert "\n" not in str(told.value)


def test_files_of_a_nodes_processes(tmp_path):
    """What the probe asks for: this run's processes alone; a host's name ends at the first dot."""
    for pid, name in ((11, "ib0"), (12, "ib1"), (13, "ib2")):
        file = tmp_path / f"nccl.gpu7.{pid}.log"
        write(file, NO_DEVICE, INFO + f"NET/Socket : Using [0]{name}:10.0.0.1<0>")
    pattern = f"{tmp_path}/nccl.%h.%p.log"
    found = nccl.of_processes(pattern, "gpu7.cluster.example", [11, 12, 14])
    assert found.interfaces == ["ib0", "ib1"]
    assert nccl.used(found) == "NCCL used TCP over ib0, ib1"
    assert found.no_network == ["NET/IB : No device found."]
    assert nccl.of_processes("", "gpu7", [11]) is None


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


def test_the_command_prints_the_answer_without_packages_and_to_an_old_terminal(tmp_path):
    """-S hides the installed packages. The terminal lacks a character of the log."""
    name = "a job over sockets, though InfiniBand was asked for"
    expected = answer(name, TEXTS[name], tmp_path)
    assert any("✓" in line for line in expected)
    command = [sys.executable, "-S", TOOL, tmp_path]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    how = {"capture_output": True, "text": True, "timeout": 60 * FACTOR}
    result = subprocess.run(command, env=env, **how)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "\n".join(expected).replace("✓", "?") + "\n"


def test_a_text_that_decides_nothing_is_told_with_exit_code_1(tmp_path, call):
    name = next(name for name in TEXTS if "watchdog" in name)
    expected = answer(name, TEXTS[name], tmp_path)
    code, out, err = call(tmp_path)
    assert code == 1 and err.startswith("nccl_log.py: nothing decided: start the job with ")
    assert out.splitlines() == "\n".join(expected).splitlines()


def test_a_file_that_is_not_there_is_an_error_in_one_line(call):
    code, out, err = call("gone")
    assert (code, out) == (
        2,
        "",
    ) and err == "nccl_log.py: error: cannot read gone: No such file or directory\n"
