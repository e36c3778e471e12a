"""NCCL's own debug text: which network was used, why not another one, what went wrong.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints about networks is a wish, a possibility or start-up traffic.
A name that does not end its line, because that was cut, counts as not written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from analysis.logs import COLOURS, PREFIX, UserError, lines_of
from analysis.network import ADAPTERS, TITLES

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"

# --- Messages; tests/support/nccl_formats.txt has each as the sources of NCCL and torch have it --

# A network's name ends its line or quotation.
NAME = r"""(?!interface\b)([\w-]+(?: [\w-]+)*)(?=\s*\n|["'`\\])"""

# What is used, and what was asked for.
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
    "wish": r"(NCCL_IB_(?:HCA|DISABLE)) set (?:by environment )?to ([^\s.]+)",
    "collective": r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+), NumelOut=\d+, Timeout\(ms\)=(\d+)\)",
    # Its status, an ibv_wc_status of libibverbs.
    "completion": r"Got completion .*(?:error |status=)(?:\w+\(|\(\w+\))?(\d+)\b",
}
# What went wrong: (pattern or None, advice), causes before what follows from them.
PROBLEMS = {
    "no_ib_device": (
        r"NET/IB : No device found",
        "NCCL sees no adapter that it may use: in a container, is /dev/infiniband in it? Then "
        "ibv_devinfo, which looks as NCCL does (libibverbs and its providers), NCCL_IB_HCA",
    ),
    "verbs_library_missing": (
        # The plain name is tried first and alone proves nothing.
        r"Failed to open libibverbs\.so\[\.1\]|Cou(?:nt|ld) not open libibverbs\.so\.1\b",
        "install libibverbs (rdma-core) where the job runs, in a container inside it",
    ),
    "memlock": (
        r"Call to ibv_\w+ failed with error Cannot allocate memory",
        "RDMA pins memory: raise the limit of locked memory (ulimit -l unlimited) in the job "
        "itself, not in a login shell",
    ),
    "plugin_failed": (
        # NCCL's own two, IB and Socket, fail for reasons that have problems of their own. Most
        # machines have no libnccl-net.so; libnccl-net-NAME.so was asked for.
        r"Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S|NET/OFI .*initialization failed"
        r"|External network plugin .+ is unsupported|Failed to find ncclNetPlugin symbol \("
        r"|NET/Plugin ?: Could not find: *(?!none\b|lib[nr]ccl-\w+\.so)\S"
        r"|NET/Plugin ?: (?:Plugin load.* returned -?\d+ : )?"
        r"(?!(?:\S+: )?\S*lib[nr]ccl-(?:net-none|\w+)\.so: cannot open shared)\S+: \S",
        "the network plugin could not be used: check its path, its own libraries and that it "
        "fits this NCCL; if a job ends here, NCCL_NET_PLUGIN=none does without it",
    ),
    "network_not_found": (
        r"Error: network .+ not found|Failed to initialize any NET plugin",
        "NCCL_NET names a network that does not exist, or none could start: unset NCCL_NET, or "
        "fix that network",
    ),
    "fell_back_to_sockets": (
        None,
        "the faster network was asked for and TCP was used: see the other findings, or "
        "NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
    ),
    "gpudirect_off": (
        r"NET/(?!Socket )[^/\n]+ : GPU Direct RDMA Disabled for HCA \d",
        "data passes through host memory: modprobe nvidia-peermem on each node (lsmod shows "
        "nvidia_peermem) or DMA-BUF; nvidia-smi topo -m shows whether adapters are near the GPUs",
    ),
    "no_interface": (
        r"no socket interface found|NET/(?:IB|Socket) : [Nn]o .*\binterface found"
        r"|No interface found in the same subnet"
        r"|no device found (?:matching|after excluding) .*NCCL_OOB_NET_IFNAME",
        "NCCL found no network interface that it may use: compare NCCL_SOCKET_IFNAME and "
        "NCCL_OOB_NET_IFNAME with `ip addr` on each node",
    ),
    "local_protection": (
        None,
        "status 4, local protection: NCCL_NET_GDR_LEVEL=LOC tells whether GPUDirect is the cause "
        "(then ACS, IOMMU, nvidia-peermem); else this node's memory and driver",
    ),
    "peer_unreachable": (
        r"onnect (?:to \S+ )?(?:failed|returned)\b(?!.*, retrying).*"
        r"(?:No route to host|Network is unreachable|Connection timed out)",
        "the other end did not answer: check cable, switch, routes and firewall between these two "
        "nodes, on RoCE the GID index",
    ),
    "completion_failed": (
        None,
        "look for the first error of any rank, and in dmesg; status 9, 10 or 11: the other end "
        "refused the request, the access or the operation; 13: it was not ready to receive, so is "
        "its process stopped or busy?",
    ),
    "flushed": (
        None,
        "status 5, flushed, follows another error: look for the first one of any rank",
    ),
    "connection_failed": (
        r"onnect to \S+ (?:failed : |failed with error |returned -?\d+\()"
        r"|Connection closed by remote peer|Call to (?:recv|send)\b.* failed : "
        r"|exceeded (?:retries|timeouts|error retry count)\b",
        "look at the other end first: it may have failed before; otherwise a firewall or the "
        "wrong interface",
    ),
    "direct_path": (
        None,
        "the GPUs' direct path may not work here: NCCL_P2P_DISABLE=1 proves it; then IOMMU and "
        "ACS",
    ),
    "timeout": (
        r"Watchdog caught collective operation timeout",
        "a rank did not come: look for one that is not named here, for the first error of any "
        "rank, and where it stands (py-spy dump --pid PID); ranks that wait in different "
        "collectives do not run the same steps",
    ),
}
SIGNS = {name: pattern for name, (pattern, _) in PROBLEMS.items() if pattern}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    r"NET/|NET plugin|NCCL_|CCL version|nNodes| via |Using |libibverbs|ibv_|network plugin"
    "|Error: network|Got completion|onnect|Call to |exceeded |nterface found|Watchdog"
)
# Where a message begins: another process may have broken off the one before it.
BEGINNING = re.compile(r"(?<![\w.-])(?=[\w.-]{1,253}:\d+:\d+ \[)")
# Of these: why no faster network was used, the most telling first.
REASONS = ("verbs_library_missing", "no_ib_device", "plugin_failed", "network_not_found")
# Of a list: number, name, port, kind.
ADAPTER = re.compile(r"\[(\d+)\] ?([^\s:\[\],{}/]+):(\d+)[\d:]*/(IB|RoCE)\b")
INTERFACE = re.compile(r" \[\d+\]([^\s:\[\]]+):")
# The slowest first: if ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")
QUOTE_LIMIT = 300  # characters of a line that a finding quotes

# --- The finding ---------------------------------------------------------------------------------


@dataclass
class Finding:
    """What a text says about the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm.
    gpudirect is the number of those over the network that have GPUDirect RDMA.
    timeouts are collectives; problems are {id, line, advice}.
    """

    version: str | None = None
    network: str | None = None  # NCCL's own name for it
    networks: list[str] = field(default_factory=list)  # more than one: ranks differ
    transport: str = "unknown"  # infiniband, roce, sockets, efa, plugin, local
    devices: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # the devices with their kinds, if these differ
    interfaces: list[str] = field(default_factory=list)
    gpudirect: int | None = None
    channels: dict[str, int] = field(default_factory=dict)
    nodes: int | None = None
    reason: str | None = None  # why sockets, if nothing failed: somebody asked for them
    timeouts: list[str] = field(default_factory=list)
    problems: list[dict] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return self.transport != "unknown" or self.network is not None

    def to_dict(self) -> dict:
        return asdict(self)


class Reader:
    """Takes the lines of a text, in whatever order, and keeps what they say."""

    def __init__(self) -> None:
        self.seen = {name: Counter() for name in EVIDENCE}  # groups of a match -> how often
        self.lines: dict = {}  # the first line of each problem, and of each (name, *groups)

    def read(self, line: str) -> None:
        """One line; without its end it may be cut there."""
        if WORDS.search(line):
            for text in BEGINNING.split(COLOURS.sub("", line)):
                self.read_message(text)

    def read_message(self, text: str) -> None:
        quote = text.strip()[:QUOTE_LIMIT]
        for name, pattern in EVIDENCE.items():
            for match in re.finditer(pattern, text):
                self.seen[name][match.groups()] += 1
                self.lines.setdefault((name, *match.groups()), quote)
        for name, pattern in SIGNS.items():
            if name not in self.lines and re.search(pattern, text):
                self.lines[name] = quote

    def add(self, other: Reader) -> None:
        """What another text of the same run says."""
        for name, seen in other.seen.items():
            self.seen[name] += seen
        self.lines = other.lines | self.lines

    def texts(self, name: str) -> list[str]:
        """What this evidence names, in the order in which it came, each once."""
        return list(dict.fromkeys(groups[0] for groups in self.seen[name]))

    def line_of(self, name: str) -> str | None:
        """The first line with this evidence."""
        return next((line for key, line in self.lines.items() if key[0] == name), None)

    def finding(self) -> Finding:
        adapters = [found for text in self.texts("adapters") for found in ADAPTER.findall(text)]
        interfaces = [name for text in self.texts("sockets") for name in INTERFACE.findall(text)]
        found = Finding(
            version=next(iter(self.texts("version")), None),
            devices=list(dict.fromkeys(f"{name}:{port}" for _, name, port, _ in adapters)),
            channels=self.channels(),
            nodes=max(map(int, self.texts("nodes")), default=None),
            timeouts=self.timeouts(),
        )
        if len({kind for *_, kind in adapters}) > 1:
            named = (f"{name}:{port}/{kind}" for _, name, port, kind in adapters)
            found.kinds = list(dict.fromkeys(named))
        adapter_kind = self.adapter_kind(adapters)
        names = self.texts("network_channel") or self.texts("using_network")
        used = {name: transport_of(name, adapter_kind, self.texts("provider")) for name in names}
        found.networks = sorted(used, key=lambda name: SLOWEST.index(used[name]))
        found.network = next(iter(found.networks), None)
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (found.nodes or 1) > 1 and "mnnvl" not in found.channels
        if found.channels and not self.seen["network_channel"] and not amid_node:
            found.transport = "local"
        elif used:
            found.transport = used[found.network]
        elif adapters:
            found.transport = adapter_kind
        elif interfaces:
            found.transport = "sockets"
        if "network" in found.channels:
            channels = self.seen["network_channel"].items()
            found.gpudirect = sum(count for (*_, direct), count in channels if direct)
        if found.transport == "sockets":
            found.interfaces = list(dict.fromkeys(interfaces))
            found.reason = self.reason()
        lines = self.problem_lines(found)
        found.problems = [
            {"id": name, "line": lines[name], "advice": PROBLEMS[name][1]}
            for name in PROBLEMS
            if name in lines
        ]
        return found

    def adapter_kind(self, adapters: list[tuple]) -> str:
        """That of the adapters which connections name, else of all."""
        connected = {number for _, number, _ in self.seen["network_channel"]}
        kinds = {kind for number, *_, kind in adapters if number in connected}
        kinds = kinds or {kind for *_, kind in adapters}
        of_one_kind = {"IB": "infiniband", "RoCE": "roce"}
        return of_one_kind[kinds.pop()] if len(kinds) == 1 else "unknown"

    def timeouts(self) -> list[str]:
        """Each collective that PyTorch's watchdog gave up, and the ranks that waited for it."""
        ranks = defaultdict(set)
        for rank, number, kind, elements, limit in self.seen["collective"]:
            size, seconds = f"{int(elements):,} elements", f"{int(limit) / 1000:,g} s"
            ranks[f"{kind} number {number} ({size}), after {seconds}"].add(int(rank))
        names = {work: ", ".join(map(str, sorted(ranks[work]))) for work in ranks}
        return [f"{work}, on rank {name}" for work, name in names.items()]

    def channels(self) -> dict[str, int]:
        """{network, p2p, mnnvl, shm: how many connections}, without those that have none."""
        counts: Counter[str] = Counter()
        for (way,), count in self.seen["local_channel"].items():
            counts[{"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(way, "shm")] += count
        for (*_, direct), count in self.seen["network_channel"].items():
            counts["network"] += count * (direct is not None)
        return dict(+counts)

    def reason(self) -> str | None:
        """Who asked for sockets."""
        disabled = dict(self.seen["wish"].keys()).get("NCCL_IB_DISABLE", "0")
        off = f"NCCL_IB_DISABLE={disabled} turned InfiniBand and RoCE off"
        return off if disabled != "0" else None

    def problem_lines(self, found: Finding) -> dict[str, str]:
        """Each problem's id, and the line that told it."""
        lines = {name: line for name, line in self.lines.items() if name in PROBLEMS}
        names = {"4": "local_protection", "5": "flushed", "12": "peer_unreachable"}
        for (status,) in self.seen["completion"]:
            name = names.get(status, "completion_failed")
            lines.setdefault(name, self.lines["completion", status])
        if len(self.seen["completion"]) > 1:
            lines.pop("flushed", None)
        if found.network not in (None, "IB", "Socket"):  # on the slowest rank a plugin works
            lines.pop("plugin_failed", None)
        asked = self.line_of("wish") or lines.get("plugin_failed")
        if found.transport == "sockets" and not found.reason and asked:
            lines["fell_back_to_sockets"] = asked
        # The first collective has timed out, and all connections are direct ones.
        first = any(int(number) <= 1 for _, number, *_ in self.seen["collective"])
        if first and found.channels.keys() == {"p2p"}:
            lines["direct_path"] = self.line_of("local_channel")
        rdma = found.transport in (*ADAPTERS, "unknown")
        if rdma and found.gpudirect == 0:  # counted, and on no connection
            lines.setdefault("gpudirect_off", self.line_of("network_channel"))
        everywhere = found.gpudirect and found.gpudirect == found.channels["network"]
        if everywhere or found.transport in ("sockets", "local"):
            lines.pop("gpudirect_off", None)
        return lines


def transport_of(network: str, adapter_kind: str, providers: list[str]) -> str:
    """What moves the data of a network that goes by this name."""
    if network == "Socket":
        return "sockets"
    if network.startswith(("IB", "NCCL RDMA Plugin")):  # NCCL's own, and HPC-X's: both list them
        return adapter_kind
    return "efa" if network.endswith("Libfabric") and providers == ["efa"] else "plugin"


# --- For people ----------------------------------------------------------------------------------


def describe(found: Finding) -> list[str]:
    """Sentences: what was used, then why nothing faster, then what to do."""
    sentences = [f"{used(found)}."]
    if found.channels:  # each rank writes its own end of a connection
        over = found.channels.get("network", 0)
        rdma = over and found.transport != "sockets"
        direct = f" ({found.gpudirect} with GPUDirect RDMA)" if rdma else ""
        local = sum(found.channels.values()) - over
        sentences.append(f"Connections seen: {over} over the network{direct}, {local} without.")
    if len(found.networks) > 1:
        names = ", ".join(found.networks)
        sentences.append(f"Ranks differ ({names}); the slowest sets the pace.")
    if found.transport == "sockets":
        lines = {problem["id"]: problem["line"] for problem in found.problems}
        said = [f'NCCL says "{message(lines[name])}"' for name in REASONS if name in lines]
        # NOTE: with NCCL_NET=Socket NCCL says nothing of other networks, nor of the variable.
        unknown = "unknown. NCCL does not print NCCL_NET=Socket. "
        unknown += f"To see another reason, {HOW_TO_ASK}"
        why = [found.reason] if found.reason else [*said, unknown]
        sentences.append(f"Why not another network: {why[0]}.")
    sentences += [f"Timed out: {work}." for work in found.timeouts]
    return sentences + ["{id}: {line}\n    -> {advice}".format(**p) for p in found.problems]


def used(found: Finding) -> str:
    if not found.decided:
        return "NCCL's text names no network"
    version = f"NCCL {found.version}" if found.version else "NCCL"
    what = TITLES.get(found.transport, "InfiniBand or RoCE adapters")
    if found.transport == "local":
        what = "no network, only NVLink, PCIe or memory"
    elif found.network:
        what += f" (network {found.network})"
    over = found.interfaces if found.transport == "sockets" else found.kinds or found.devices
    if over and found.transport in ("sockets", "infiniband", "roce", "unknown"):
        what += f" over {', '.join(over)}"
    nodes = f", {found.nodes} node{'s' * (found.nodes > 1)}" if found.nodes else ""
    return f"{version} used {what}{nodes}"


def message(line: str) -> str:
    """What stands behind NCCL's prefix."""
    return re.split(r"NCCL (?:INFO|WARN) ", line)[-1].strip()


def in_one_line(found: Finding) -> str:
    """What was used and, if it was sockets, why; problems stand in the record."""
    return " ".join(text for text in describe(found) if "\n" not in text)


# --- Files ---------------------------------------------------------------------------------------


def files_in(paths: list[str]) -> list[Path]:
    """The files named, and of each folder those that may be text: a checkpoint has gigabytes."""
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        inside = filter(Path.is_file, sorted(path.rglob("*")))
        found += [file for file in inside if is_text(file)] if path.is_dir() else [path]
    return found


def is_text(path: Path) -> bool:
    """Whether it is no checkpoint, nor a trace of --profile."""
    return not path.name.endswith(".json.gz") and "\0" not in next(lines_of(path), "")


def find_in_files(paths: list[str]) -> Finding:
    """What the text of one job says, of any of its ranks and nodes."""
    reader = Reader()
    try:
        for path in files_in(paths):
            for line in lines_of(path):
                reader.read(line)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths}: {error.strerror}") from None
    if not reader.lines:
        raise UserError(f"no text of NCCL on networks in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_last_run(path: Path) -> Reader:
    """What NCCL's text in a log says of its last run: since a rank went on after its last line."""
    reader, later, ended = Reader(), Reader(), set()
    for line in lines_of(path):
        mark = PREFIX.search(line)
        if mark and "] Cleanup complete" in line:
            ended.add(mark[2])
        elif mark and mark[2] in ended:
            reader, later, ended = later, Reader(), set()
        if " | Step " not in line:
            (later if ended else reader).read(line)
    reader.add(later)
    return reader


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    pattern = pattern.replace("%h", host.partition(".")[0])
    paths = {pattern.replace("%p", str(pid)) for pid in pids}
    with contextlib.suppress(UserError):
        return find_in_files(sorted(filter(os.path.isfile, paths)))
    return None
