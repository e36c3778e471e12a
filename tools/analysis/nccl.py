"""NCCL's own words: which network it used, over which devices, what it warned of. All is quoted.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints about networks is a wish, a possibility or start-up traffic.
A name that does not end its line, because that was cut, counts as not written.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from analysis.logs import COLOURS, UserError, lines_of
from analysis.network import TITLES

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"

# --- Messages; tests/support/nccl_formats.txt has each as the sources of NCCL and torch have it --

# A network's name ends its line or quotation.
NAME = r"""(?!interface\b)([\w-]+(?: [\w-]+)*)(?=\s*\n|["'`\\])"""
EVIDENCE = {
    "version": r"CCL(?<!with NCCL) version(?: :)? (\d+\.\d+\.\d+(?:\+\w+\.\d+)?)(?![\d:])",
    "nodes": r"nRanks \d+ nNodes (\d+) localRanks",
    # "" is without GPUDirect; of a line that is cut before the word nobody knows.
    "network_channel": r"via NET/([^/\n]+)/(\d+)"
    r"""(?:(?:\(\d+\))?(/GDRDMA|(?=(?:/Shared)?(?:/flush=\w+)?[\s"'`\\])))?""",
    "local_channel": r" via (P2P/MNNVL|P2P/|SHM/)",
    "using_network": rf"Using network {NAME}",
    "adapters": r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}?|[^\s;]+))+)",
    "sockets": r"NET/Socket : Using((?: \[\d+\]\S+<\d+>)+)",
    "provider": r"NET/OFI Selected [Pp]rovider is (\w+)[\s,*]",
    "asked": r"(NCCL_\w+) set (?:by environment )?to ([^\s.]\S*?)\.?(?=\s)",
    "collective": r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+), NumelOut=\d+, Timeout\(ms\)=(\d+)\)",
    # Why a faster network or GPUDirect was not used; a healthy machine may print these, too.
    "no_network": r"(NET/IB : No device found|Failed to open libibverbs\.so\[\.1\]"
    # The plain name is tried first and alone proves nothing.
    r"|Cou(?:nt|ld) not open libibverbs\.so\.1\b|External network plugin .+ is unsupported"
    r"|Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S|NET/OFI .*[Ff]ailed"
    r"|Failed to initialize any NET plugin)",
    "no_gpudirect": r"(?<!NET/Socket : )(GPU Direct RDMA Disabled for [^\n]*)",
    "warning": r"NCCL WARN ()\S",
}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    r"NET/|NET plugin|NCCL_|CCL version|nNodes| via |Using |libibverbs|network plugin|WARN "
    "|Last error|GPU Direct|Watchdog"
)
# Where a message begins: another process may have broken off the one before it.
BEGINNING = re.compile(r"(?<![\w.-])(?=[\w.-]{1,253}:\d+:\d+ \[)")
PROCESS = re.compile(r"([\w.-]{1,253}):(\d+):\d+ \[(\d+)\]")
RANK = re.compile(r"\bcomm \S+ rank (\d+) n[Rr]anks")
TIME = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)\] ?$")  # before NCCL's line, 2.26 on
# Of a list: number, and a name with port and kind, or several of them that are used as one.
LISTED = re.compile(r"\[(\d+)\](?:=\{([^}]*)\}?|([^\s;{]+))")
ADAPTER = re.compile(r"([^\s:\[\],{}/]+):(\d+)[\d:]*/(IB|RoCE)\b")
INTERFACE = re.compile(r" \[\d+\]([^\s:\[\]]+):")
# The slowest first: if ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")
QUOTE_LIMIT = 300  # characters of a line that is quoted
LAST = 3  # warnings of a failed run's rank that are quoted, beside the first one
MOST_QUOTES = 6
OF_PEER = re.compile(r"(?i)remote peer|closed by|reset by peer|broken pipe")

# What a line means, where nobody could look it up.
VERBS = "https://www.rdmamojo.com/2013/02/15/ibv_poll_cq/"
NVIDIA = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
STATUS = r"Got completion .*(?:error |status=)(?:\w+\(|\(\w+\))?"
TRANSLATIONS = [
    (STATUS + r"4\b", "status 4: this node's adapter may not access the memory", VERBS),
    (STATUS + r"5\b", "status 5: flushed after an error before it", VERBS),
    (STATUS + r"(?:9|10|11)\b", "status 9, 10, 11: the other end refused the request", VERBS),
    (STATUS + r"12\b", "status 12: the other end did not answer, after all retries", VERBS),
    (STATUS + r"13\b", "status 13: the other end was not ready to receive", VERBS),
    (
        r"NET/IB : No device found",
        "no adapter that a process may use: in a container /dev/infiniband may be missing, or a "
        "library",
        NVIDIA,
    ),
    (
        r"Call to ibv_\w+ failed with error Cannot allocate memory",
        "RDMA locks memory: the limit is that of the job (ulimit -l), not of a login shell",
        NVIDIA,
    ),
]
P2P = (
    "the first collective timed out, and all connections are from GPU to GPU: NCCL_P2P_DISABLE=1 "
    "shows whether that path works",
    NVIDIA,
)

# --- The finding ---------------------------------------------------------------------------------


@dataclass
class Finding:
    """What a text says about the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm.
    gpudirect is the number of those over the network that have GPUDirect RDMA.
    warnings: of each rank {who, time, lines: the first and the last three, count}.
    """

    version: str | None = None
    network: str | None = None  # NCCL's own name for it
    networks: list[str] = field(default_factory=list)  # more than one: ranks differ
    transport: str = "unknown"  # infiniband, roce, sockets, efa, plugin, local
    devices: list[str] = field(default_factory=list)  # adapters of the connections
    unused: list[str] = field(default_factory=list)  # adapters that NCCL found beside them
    interfaces: list[str] = field(default_factory=list)
    channels: dict[str, int] = field(default_factory=dict)
    gpudirect: int | None = None
    no_gpudirect: str = ""  # NCCL's line that says why not
    nodes: int | None = None
    asked: dict[str, str] = field(default_factory=dict)  # what the environment asked for
    no_network: list[str] = field(default_factory=list)  # lines on networks that could not be used
    warnings: list[dict] = field(default_factory=list)
    timeouts: list[str] = field(default_factory=list)  # collectives
    means: list[str] = field(default_factory=list)  # what some lines mean, with a source

    @property
    def decided(self) -> bool:
        return self.transport != "unknown" or self.network is not None

    def to_dict(self) -> dict:
        return asdict(self)


class Reader:
    """Takes the lines of a text, in whatever order, and keeps what they say."""

    def __init__(self) -> None:
        self.seen = {name: Counter() for name in EVIDENCE}  # groups of a match -> how often
        self.lines: dict = {}  # (name of evidence, *groups) -> the first line
        self.warnings: dict = defaultdict(dict)  # (host, process, GPU) -> {message: time}
        self.ranks: dict = {}  # the same -> rank
        self.quoted = False  # torch quotes NCCL's last error on the next line

    def read_files(self, files: Iterable[Path]) -> None:
        for file in files:
            for line in lines_of(file):
                self.read(line)

    def read(self, line: str) -> None:
        """One line; without its end it may be cut there."""
        if self.quoted and line.strip():
            self.warnings["", "", ""].setdefault(line.strip()[:QUOTE_LIMIT], "")
        self.quoted = "Last error:" in line
        if WORDS.search(line):
            before = ""
            for text in BEGINNING.split(COLOURS.sub("", line)):
                stamp = TIME.search(before)
                self.read_message(text, stamp[1] if stamp else "")
                before = text

    def read_message(self, text: str, time: str) -> None:
        quote = message(text)[:QUOTE_LIMIT]
        process = found.groups() if (found := PROCESS.match(text)) else ("", "", "")
        if found := RANK.search(text):
            self.ranks[process] = int(found[1])
        for name, pattern in EVIDENCE.items():
            for match in re.finditer(pattern, text):
                self.seen[name][match.groups()] += 1
                self.lines.setdefault((name, *match.groups()), quote)
        if re.search(EVIDENCE["warning"], text):
            self.warnings[process].setdefault(quote, time)

    @property
    def has_text(self) -> bool:
        return bool(self.lines or self.warnings)

    def texts(self, name: str) -> list[str]:
        """What this evidence names, in the order in which it came, each once."""
        return list(dict.fromkeys(groups[0] for groups in self.seen[name]))

    def quotes(self, name: str) -> list[str]:
        """The lines with this evidence."""
        return list(dict.fromkeys(line for key, line in self.lines.items() if key[0] == name))

    def finding(self) -> Finding:
        found = Finding(
            version=next(iter(self.texts("version")), None),
            channels=self.channels(),
            nodes=max(map(int, self.texts("nodes")), default=None),
            asked=dict(self.seen["asked"].keys()),
            no_network=self.quotes("no_network"),
            warnings=self.all_warnings(),
            timeouts=self.timeouts(),
        )
        listed = [
            (number, *adapter)
            for text in self.texts("adapters")
            for number, several, one in LISTED.findall(text)
            for adapter in ADAPTER.findall(several or one)
        ]
        connected = {number for _, number, _ in self.seen["network_channel"]}
        used = [adapter for adapter in listed if adapter[0] in connected]
        found.devices = names_of(used)
        found.unused = [name for name in names_of(listed) if name not in found.devices]
        of_one_kind = {"IB": "infiniband", "RoCE": "roce"}
        kinds = {kind for *_, kind in used or listed}
        adapter_kind = of_one_kind[kinds.pop()] if len(kinds) == 1 else "unknown"
        names = self.texts("network_channel") or self.texts("using_network")
        used = {name: transport_of(name, adapter_kind, self.texts("provider")) for name in names}
        found.networks = sorted(used, key=lambda name: SLOWEST.index(used[name]))
        found.network = next(iter(found.networks), None)
        interfaces = [name for text in self.texts("sockets") for name in INTERFACE.findall(text)]
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (found.nodes or 1) > 1 and "mnnvl" not in found.channels
        if found.channels and not self.seen["network_channel"] and not amid_node:
            found.transport = "local"
        elif used:
            found.transport = used[found.network]
        elif listed:
            found.transport = adapter_kind
        elif interfaces:
            found.transport = "sockets"
        if "network" in found.channels:
            channels = self.seen["network_channel"].items()
            found.gpudirect = sum(count for (*_, direct), count in channels if direct)
            if found.gpudirect < found.channels["network"] and found.transport != "sockets":
                lines = self.quotes("no_gpudirect")
                lines.sort(key=lambda line: "distance" not in line)  # it says most
                found.no_gpudirect = next(iter(lines), "")
        if found.transport == "sockets":
            found.interfaces = list(dict.fromkeys(interfaces))
            found.devices, found.unused = [], found.devices + found.unused
        found.means = self.meanings(found)
        return found

    def all_warnings(self) -> list[dict]:
        """By time, where NCCL has written it everywhere, else by rank."""
        said = []
        for process, lines in self.warnings.items():
            each, rank = list(lines), self.ranks.get(process)
            host, _, gpu = process
            who = f"GPU {gpu} of {host}" if host else "a rank"
            who = who if rank is None else f"rank {rank} on {host or 'a node'}"
            kept = each[:1] + each[1:][-LAST:]
            said.append({"who": who, "time": lines[each[0]], "lines": kept, "count": len(each)})
        timed = all(one["time"] for one in said)
        return sorted(said, key=lambda one: one["time"] if timed else one["who"])

    def meanings(self, found: Finding) -> list[str]:
        lines = found.no_network + [line for one in found.warnings for line in one["lines"]]
        means = [
            f"{text} ({source})"
            for pattern, text, source in TRANSLATIONS
            if any(re.search(pattern, line) for line in lines)
        ]
        # The first collective has timed out, and all connections are direct ones.
        first = any(int(number) <= 1 for _, number, *_ in self.seen["collective"])
        if first and found.channels.keys() == {"p2p"}:
            means.append("{} ({})".format(*P2P))
        return means

    def timeouts(self) -> list[str]:
        """Each collective that PyTorch's watchdog gave up, and the ranks that waited for it."""
        ranks = defaultdict(set)
        for rank, number, kind, elements, limit in self.seen["collective"]:
            work = f"{kind} number {number} ({int(elements):,} elements)"
            ranks[f"{work}, after {int(limit) / 1000:,g} s"].add(int(rank))
        return [f"{work}, on rank {str(sorted(each))[1:-1]}" for work, each in ranks.items()]

    def channels(self) -> dict[str, int]:
        """{network, p2p, mnnvl, shm: how many connections}, without those that have none."""
        counts: Counter[str] = Counter()
        for (way,), count in self.seen["local_channel"].items():
            counts[{"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(way, "shm")] += count
        for (*_, direct), count in self.seen["network_channel"].items():
            counts["network"] += count * (direct is not None)
        return dict(+counts)


def names_of(adapters: list[tuple]) -> list[str]:
    return list(dict.fromkeys(f"{name}:{port}" for _, name, port, _ in adapters))


def transport_of(network: str, adapter_kind: str, providers: list[str]) -> str:
    """What moves the data of a network that goes by this name."""
    if network == "Socket":
        return "sockets"
    if network.startswith(("IB", "NCCL RDMA Plugin")):  # NCCL's own, and HPC-X's: both list them
        return adapter_kind
    return "efa" if network.endswith("Libfabric") and providers == ["efa"] else "plugin"


def message(line: str) -> str:
    """What stands behind NCCL's prefix."""
    return re.split(r"NCCL (?:INFO|WARN) ", line)[-1].strip()


# --- For people ----------------------------------------------------------------------------------


def describe(found: Finding) -> list[str]:
    """Lines: what was used, what was asked for, what NCCL warned of."""
    lines = [used(found)]
    if found.channels:  # each rank writes its own end of a connection
        over = found.channels.get("network", 0)
        local = sum(found.channels.values()) - over
        lines.append(f"Connections: {over} over the network, {local} inside a node")
        if over and found.transport != "sockets":
            lines.append(f"GPUDirect RDMA: on {found.gpudirect} of {over} over the network")
            lines[-1] += f'; "{found.no_gpudirect}"' if found.no_gpudirect else ""
    if found.unused:
        seen = found.channels or found.transport == "sockets"
        what = "Found, not used" if seen else "Found, no connection seen"
        lines.append(f"{what}: {', '.join(found.unused)}")
    if len(found.networks) > 1:
        lines.append(f"Ranks differ ({', '.join(found.networks)}): the slowest sets the pace")
    if found.asked:
        asked = ", ".join(f"{name}={value}" for name, value in sorted(found.asked.items()))
        lines.append(f"The environment asked for: {asked}")
    lines += [f'NCCL on networks: "{line}"' for line in found.no_network[:MOST_QUOTES]]
    lines += [f"Timed out: {work}" for work in found.timeouts]
    lines += quotes(found.to_dict(), failed=True)
    return lines + [f"Meaning: {text}" for text in found.means]


def used(found: Finding) -> str:
    if not found.decided:
        return "NCCL's text names no network"
    what = TITLES.get(found.transport, "InfiniBand or RoCE adapters")
    if found.transport == "local":
        what = "no network, only NVLink, PCIe or memory"
    elif found.network:
        what += f" (network {found.network})"
    over = found.interfaces if found.transport == "sockets" else found.devices
    what += f" over {', '.join(over)}" if over else ""
    nodes = f", {found.nodes} node{'s' * (found.nodes > 1)}" if found.nodes else ""
    # An adapter that it has found, without a line on any connection, was perhaps never used.
    seen = over or found.channels or found.transport in ("sockets", "local")
    return f"NCCL {found.version or ''}".strip() + f" {'used' if seen else 'chose'} {what}{nodes}"


def quotes(finding: dict, failed: bool) -> list[str]:
    """Each rank's first warning and, if the run failed, its last three: equal ones together."""
    said: dict[str, list[str]] = {}
    for one in finding.get("warnings", []):
        for number, line in enumerate(one["lines"] if failed else one["lines"][:1]):
            first = f", first of {one['count']}" if one["count"] > 1 and not number else ""
            when = f" at {one['time']}" if one["time"] and not number else ""
            said.setdefault(line, []).append(one["who"] + first + when)
    lines = []
    for line, who in said.items():
        more = f"; {len(who) - 2} more" if len(who) > 2 else ""
        lines.append(f'NCCL warns, {"; ".join(who[:2])}{more}: "{line}"')
    if len(lines) > MOST_QUOTES:
        more = f"... {len(lines) - MOST_QUOTES} more, see nccl_log.py"
        lines = [*lines[: MOST_QUOTES - LAST], more, *lines[-LAST:]]
    return lines


def reason(finding: dict) -> str:
    """The last warning that does not tell of a lost peer; empty: NCCL wrote none."""
    warned = [line for one in finding.get("warnings", []) for line in one["lines"]]
    lines = finding.get("no_network", []) + warned
    own = [line for line in lines if not OF_PEER.search(line)]
    return next(reversed(own or lines), "")


# --- Files ---------------------------------------------------------------------------------------


def files_in(paths: list[str]) -> list[Path]:
    """The files named, and of each folder those that may be text: a checkpoint has gigabytes."""
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        inside = filter(Path.is_file, sorted(path.rglob("*")))
        texts = [file for file in inside if "\0" not in next(lines_of(file), "")]
        found += texts if path.is_dir() else [path]
    return found


def of_newest_start(files: Iterable[Path]) -> list[Path]:
    """Without what an earlier start has left: of each rank, or GPU of a node, the newest file.

    A file that does not begin with NCCL's prefix, such as a job's log, is not left out.
    """
    newest: dict = {}
    for file in sorted(files, key=lambda file: (os.path.getmtime(file), file.name)):
        head = list(itertools.islice(filter(str.strip, lines_of(file)), 500))
        process = PROCESS.search(head[0]) if head else None
        key: object = file
        if process and process[2] in file.name:
            ranks = (found[1] for line in head if (found := RANK.search(line)))
            key = file.parent, file.name.replace(process[2], ""), next(ranks, f"GPU {process[3]}")
        newest[key] = file
    return list(newest.values())


def find_in_files(paths: list[str], every: bool = False) -> Finding:
    """What the text of one start says, of all of its ranks and nodes; `every`: of all starts."""
    reader = Reader()
    try:
        files = files_in(paths)
        reader.read_files(files if every else of_newest_start(files))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths}: {error.strerror}") from None
    if not reader.has_text:
        raise UserError(f"no text of NCCL on networks in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def beside(log: Path) -> list[Path]:
    """Where NCCL has written beside a node's log at the newest start: nccl.node0.HOST.PID.log."""
    node = log.name.partition(".")[0]
    return of_newest_start(log.parent.glob(f"nccl.{node}.*"))


def of_last_run(path: Path) -> list[str]:
    """The lines of a log's last run, from the end of the run before it, without its steps."""
    lines, end = [], 0
    for line in lines_of(path):
        if " | Step " not in line:
            lines.append(line)
        if "] Cleanup complete" in line:
            end = len(lines)
        elif "] Run {" in line and end:
            lines, end = lines[end:], 0
    return lines


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    pattern = pattern.replace("%h", host.partition(".")[0])
    paths = {pattern.replace("%p", str(pid)) for pid in pids}
    reader = Reader()
    reader.read_files(filter(Path.is_file, map(Path, sorted(paths))))
    return reader.finding() if reader.has_text else None
