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
}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    r"NET/|NET plugin|NCCL_|CCL version|nNodes| via |Using |libibverbs|network plugin|WARN "
    "|Last error|GPU Direct|Watchdog"
)
# Where a message begins, which may have broken off another process's: time (2.26 on), host,
# process, GPU.
BEGINNING = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)\] ?)?"
    r"(?<![\w.-])([\w.-]{1,253}):(\d+):\d+ \[(\d+)\]"
)
RANK = re.compile(r"\bcomm \S+ rank (\d+) n[Rr]anks")
# Of a list: number, and a name with port and kind, or several of them that are used as one.
LISTED = re.compile(r"\[(\d+)\](=\{[^}]*\}?|[^\s;{]+)")
ADAPTER = re.compile(r"([^\s:\[\],{}/]+:\d+)[\d:]*/(IB|RoCE)\b")
INTERFACE = re.compile(r" \[\d+\]([^\s:\[\]]+):")
# The slowest first: if ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")
QUOTE_LIMIT = 300  # characters of a line that is quoted
LAST = 3  # warnings of a failed run's rank that are quoted, beside the first one
MOST_QUOTES = 6

# What a line means, where nobody could look it up.
VERBS = "https://www.rdmamojo.com/2013/02/15/ibv_poll_cq/"
NVIDIA = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
STATUS = r"Got completion .*(?:error |status=)(?:\w+\(|\(\w+\))?"
# What tells of an error elsewhere, or before.
AFTER = re.compile(rf"(?i)remote peer|closed by|reset by peer|broken pipe|{STATUS}5\b")
TRANSLATIONS = {
    STATUS + r"4\b": f"status 4: this node's adapter may not access the memory ({VERBS})",
    STATUS + r"5\b": f"status 5: flushed after an error before it ({VERBS})",
    STATUS + r"(?:9|10|11)\b": f"status 9, 10, 11: the other end refused the request ({VERBS})",
    STATUS + r"12\b": f"status 12: the other end did not answer, after all retries ({VERBS})",
    STATUS + r"13\b": f"status 13: the other end was not ready to receive ({VERBS})",
    r"NET/IB : No device found": "no adapter that a process may use: in a container "
    f"/dev/infiniband may be missing, or a library ({NVIDIA})",
    r"Call to ibv_\w+ failed with error Cannot allocate memory": "RDMA locks memory: the limit is "
    f"that of the job (ulimit -l), not of a login shell ({NVIDIA})",
    # Of a timeout, where all connections are direct ones.
    r"number [01] \(\S+ elements\), after": "the first collective timed out, and all connections "
    f"are from GPU to GPU: NCCL_P2P_DISABLE=1 shows whether that path works ({NVIDIA})",
}

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
        self.seen: dict = {name: {} for name in EVIDENCE}  # groups of a match -> lines with them
        self.warnings: dict = defaultdict(dict)  # (host, process, GPU) -> {message: time}
        self.ranks: dict = {}  # the same -> rank
        self.prefix: str | None = None  # torch quotes NCCL's last error on the next line with it

    def read_files(self, files: Iterable[Path]) -> None:
        for file in files:
            for line in lines_of(file):
                self.read(line)

    def read(self, line: str) -> None:
        """One line; without its end it may be cut there."""
        prefix, last_error, _ = line.partition("Last error:")
        if last_error:
            self.prefix = prefix
        elif self.prefix is not None and line.startswith(self.prefix):
            if line.removeprefix(self.prefix).strip():
                self.warnings["", "", ""].setdefault(line.strip()[:QUOTE_LIMIT], "")
            self.prefix = None
        if WORDS.search(line):
            parts = BEGINNING.split(COLOURS.sub("", line))
            self.read_message(parts[0], "", ("", "", ""))
            for n in range(1, len(parts), 5):
                time, *process, text = parts[n : n + 5]
                self.read_message(text, time or "", tuple(process))

    def read_message(self, text: str, time: str, process: tuple) -> None:
        quote = message(text)[:QUOTE_LIMIT]
        if found := RANK.search(text):
            self.ranks[process] = int(found[1])
        for name, pattern in EVIDENCE.items():
            for match in re.finditer(pattern, text):
                self.seen[name].setdefault(match.groups(), []).append(quote)
        if re.search(r"NCCL WARN \S", text):
            self.warnings[process].setdefault(quote, time)

    @property
    def has_text(self) -> bool:
        return any(self.seen.values()) or bool(self.warnings)

    def texts(self, name: str) -> list[str]:
        """What this evidence names."""
        return once(groups[0] for groups in self.seen[name])

    def quotes(self, name: str) -> list[str]:
        """A line with each text of this evidence."""
        return once(lines[0] for lines in self.seen[name].values())

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
            for number, adapters in LISTED.findall(text)
            for adapter in ADAPTER.findall(adapters)
        ]
        connected = {number for _, number, _ in self.seen["network_channel"]}
        used = [adapter for adapter in listed if adapter[0] in connected]
        found.devices = once(name for _, name, _ in used)
        found.unused = once(name for _, name, _ in listed if name not in found.devices)
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
            found.gpudirect = sum(len(lines) for (*_, direct), lines in channels if direct)
            if found.gpudirect < found.channels["network"] and found.transport != "sockets":
                lines = self.quotes("no_gpudirect")  # a distance says most
                found.no_gpudirect = max(lines, key=lambda line: "distance" in line, default="")
        if found.transport == "sockets":
            found.interfaces = once(interfaces)
            found.devices, found.unused = [], found.devices + found.unused
        lines = found.no_network + [line for one in found.warnings for line in one["lines"]]
        if found.channels.keys() == {"p2p"}:
            lines += found.timeouts
        said = "\n".join(lines)
        found.means = [text for pattern, text in TRANSLATIONS.items() if re.search(pattern, said)]
        return found

    def all_warnings(self) -> list[dict]:
        """By time, where NCCL has written it, then by rank."""
        said = []
        for process, lines in self.warnings.items():
            each, rank = list(lines), self.ranks.get(process)
            host, _, gpu = process
            who = f"GPU {gpu} of {host}" if host else "a rank"
            who = who if rank is None else f"rank {rank} on {host or 'a node'}"
            kept = each[:1] + each[1:][-LAST:]
            said.append({"who": who, "time": lines[each[0]], "lines": kept, "count": len(each)})
        return sorted(said, key=lambda one: (one["time"], one["who"]))

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
        for (way,), lines in self.seen["local_channel"].items():
            counts[{"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(way, "shm")] += len(lines)
        for (*_, direct), lines in self.seen["network_channel"].items():
            counts["network"] += len(lines) * (direct is not None)
        return dict(+counts)


def once(names: Iterable[str]) -> list[str]:
    """In the order in which they came, each once."""
    return list(dict.fromkeys(names))


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
        several = ", ".join(found.networks)
        lines.append(f"Ranks, or starts, differ ({several}): the slowest rank sets the pace")
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


def asked_for(asked: dict) -> str:
    """Which variable asked for an adapter, or a plugin; empty: none, or sockets were wanted."""
    without = asked.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    if without or asked.get("NCCL_NET", "").lower() == "socket":
        return ""
    return next((f"{n}={asked[n]}" for n in ("NCCL_NET", "NCCL_IB_HCA") if asked.get(n)), "")


def reason(finding: dict) -> str:
    """The last warning that is not the effect of an error elsewhere. Without any, where an adapter
    was asked for, why none was used; empty: NCCL wrote nothing of the kind.
    """
    lines = finding.get("no_network", []) if asked_for(finding.get("asked", {})) else []
    lines = lines + [line for one in finding.get("warnings", []) for line in one["lines"]]
    own = [line for line in lines if not AFTER.search(line)]
    return next(reversed(own or lines), "")


# --- Files ---------------------------------------------------------------------------------------


def find_in_files(paths: list[str], every: bool = False) -> Finding:
    """What the text of one start says, of all of its ranks and nodes; `every`: of all starts.

    Of a folder all files are read that may be text: a checkpoint has gigabytes.
    """
    reader, files = Reader(), []
    try:
        for path in map(Path, paths):
            if path.is_fifo():
                raise UserError(f"{path} is a pipe, and is read twice: give a file")
            inside = filter(Path.is_file, sorted(path.rglob("*")))
            texts = [file for file in inside if "\0" not in next(lines_of(file), "")]
            files += texts if path.is_dir() else [path]
        reader.read_files(files if every else of_newest_start(files))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths}: {error.strerror}") from None
    if not reader.has_text:
        raise UserError(f"no text of NCCL on networks in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_newest_start(files: Iterable[Path]) -> list[Path]:
    """Without what an earlier start has left: of each rank, or GPU of a node, the newest file.

    A file that is not named after a process, such as a job's log, is never left out.
    """
    newest: dict = {}
    for file in sorted(files, key=lambda f: (os.path.getmtime(f), len(f.name), f.name)):
        head = "".join(itertools.islice(lines_of(file), 500)).lstrip()
        process, rank = BEGINNING.search(head.partition("\n")[0]), RANK.search(head)
        key: object = file
        if process and process[3] in file.name:
            gpu = f"GPU {process[4]}"
            key = file.parent, file.name.replace(process[3], ""), rank[1] if rank else gpu
        newest[key] = file
    return list(newest.values())


def beside(log: Path) -> list[Path]:
    """Where NCCL has written beside a node's log at the newest start: nccl.node0.HOST.PID.log."""
    node = log.name.partition(".")[0]
    return of_newest_start(filter(Path.is_file, log.parent.glob(f"nccl.{node}.*")))


def of_last_run(path: Path) -> list[str]:
    """The lines of a log's last run, from the end of the run before it, without its steps."""
    lines = [line for line in lines_of(path) if " | Step " not in line]
    starts = [n for n, line in enumerate(lines) if "] Run {" in line] or [0]
    before = enumerate(lines[: starts[-1]], 1)
    return lines[max((n for n, line in before if "] Cleanup complete" in line), default=0) :]


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    pattern = pattern.replace("%h", host.partition(".")[0])
    paths = {pattern.replace("%p", str(pid)) for pid in pids}
    reader = Reader()
    reader.read_files(filter(Path.is_file, map(Path, sorted(paths))))
    return reader.finding() if reader.has_text else None
