"""NCCL's own debug text: which network was used, why not another one, what went wrong.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints about networks is a wish, a possibility or start-up traffic.
A message that is cut, or broken by another one, counts as not written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from analysis.logs import COLOURS, UserError, lines_of

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"

# --- Messages; tests/nccl_formats.txt has each as the sources of NCCL and torch have it ----------

# What is used. A name that ends in another text is not whole.
EVIDENCE = {
    "version": r"NCCL version (\d+\.\d+\.\d+\+cuda\d+\.\d+)",
    "nodes": r"nRanks \d+ nNodes (\d+) localRanks",
    "network_channel": r"via NET/([^/\n]+)/\d+(?:\(\d+\))?(/GDRDMA)?",
    "local_channel": r" via (P2P/MNNVL|P2P/|SHM/|direct shared memory)",
    "using_network": r"Using network (Socket|IB|IBext\w*|(?:AWS )?Libfabric|"
    r"NCCL RDMA Plugin v\d+)(?=\W|$)",
    "adapters": r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}|[^\s;]+))+)",
    "sockets": r"NET/Socket : Using((?: ?\[\d+\]\S+<\d+>)+)",
    "provider": r"NET/OFI Selected [Pp]rovider is (\w+)[ ,]",
    "wish": r"\b(NCCL_IB_HCA|NCCL_IB_DISABLE|NCCL_NET) set (?:by environment )?to ([^\s.]+)",
}
# What went wrong: (pattern or None, advice), causes before what follows from them.
PROBLEMS = {
    "no_ib_device": (
        r"NET/IB : No device found\.",
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
        # NCCL's own two, IB and Socket, fail for reasons that have problems of their own.
        r"Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S|NET/OFI .*initialization failed",
        "the network plugin could not be used: check its own libraries and that it fits this NCCL",
    ),
    "fell_back_to_sockets": (
        None,
        "the faster network was asked for and TCP was used: see the other findings, or "
        "NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
    ),
    "gpudirect_off": (
        None,
        "data passes through host memory: modprobe nvidia-peermem on each node (lsmod shows "
        "nvidia_peermem) or DMA-BUF; nvidia-smi topo -m shows whether adapters are near the GPUs",
    ),
    "connection_failed": (
        # 12 is IBV_WC_RETRY_EXC_ERR; 5, flushed, only follows another error.
        r"[Cc]onnect to \S+ (?:failed : |returned -?\d+\()|Connection closed by remote peer"
        r"|Got completion .*(?:error |status=)(?:12\b|\w+\(12\))",
        "look at the other end first: it may have failed before; otherwise a firewall, the wrong "
        "interface, a cable, or on RoCE the GID index",
    ),
}
EVIDENCE = {name: re.compile(pattern) for name, pattern in EVIDENCE.items()}
SIGNS = {name: re.compile(pattern) for name, (pattern, _) in PROBLEMS.items() if pattern}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    "NET/|NET plugin|NCCL_|NCCL version|nNodes| via |Using network|libibverbs|ibv_|"
    "Got completion|onnect"
)
# Of these: why no faster network was used, the most telling first.
REASONS = ("verbs_library_missing", "no_ib_device", "plugin_failed")
ADAPTER = re.compile(r"([^\s:\[\],{}/]+:\d+)[\d:]*/(IB|RoCE)\b")  # of a list: name, kind
INTERFACE = re.compile(r"\[\d+\]([^\s:\[\]]+):")
# The slowest first: if ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")
QUOTE_LIMIT = 300  # characters of a line that a finding quotes

# --- The finding ---------------------------------------------------------------------------------


@dataclass
class Finding:
    """What a text says about the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm.
    gpudirect is the number of those over the network that have GPUDirect RDMA.
    problems are {id, line, advice}.
    """

    version: str | None = None
    network: str | None = None  # NCCL's own name for it
    networks: list[str] = field(default_factory=list)  # more than one: ranks differ
    transport: str = "unknown"  # infiniband, roce, sockets, efa, plugin, local
    devices: list[str] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    gpudirect: int | None = None
    channels: dict[str, int] = field(default_factory=dict)
    nodes: int | None = None
    reason: str | None = None  # why sockets, if nothing failed: somebody asked for them
    problems: list[dict] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return self.transport != "unknown" or self.network is not None

    def to_dict(self) -> dict:
        return asdict(self)


class Reader:
    """Takes the lines of a text, in whatever order, and keeps what they say."""

    def __init__(self) -> None:
        self.any_text = False
        self.seen = {name: Counter() for name in EVIDENCE}  # groups of a match -> how often
        self.lines: dict = {}  # the first line of each problem and of each match

    def read(self, line: str) -> None:
        """One line. Without its end it may be cut, and is left out."""
        self.any_text = self.any_text or "NCCL INFO" in line or "NCCL WARN" in line
        if not line.endswith("\n") or not WORDS.search(line):
            return
        text = COLOURS.sub("", line).strip()
        quote = text if len(text) <= QUOTE_LIMIT else text[: QUOTE_LIMIT - 1] + "…"
        for name, pattern in EVIDENCE.items():
            for match in pattern.finditer(text):  # texts of two processes may share a line
                self.seen[name][match.groups()] += 1
                self.lines.setdefault(match.groups(), quote)
        for name, pattern in SIGNS.items():
            if name not in self.lines and pattern.search(text):
                self.lines[name] = quote

    def texts(self, name: str) -> list[str]:
        """What this evidence names, in the order in which it came, each once."""
        return list(dict.fromkeys(groups[0] for groups in self.seen[name]))

    def finding(self) -> Finding:
        adapters = [pair for text in self.texts("adapters") for pair in ADAPTER.findall(text)]
        interfaces = [name for text in self.texts("sockets") for name in INTERFACE.findall(text)]
        found = Finding(
            version=next(iter(self.texts("version")), None),
            devices=list(dict.fromkeys(name for name, _ in adapters)),
            channels=self.channels(),
            nodes=max(map(int, self.texts("nodes")), default=None),
        )
        kinds = {kind for _, kind in adapters}
        adapter_kind = "unknown"  # of both kinds, or without a list
        if len(kinds) == 1:
            adapter_kind = "infiniband" if "IB" in kinds else "roce"
        providers = self.texts("provider")
        used = {
            name: transport_of(name, adapter_kind, providers)
            for name in self.texts("network_channel") or self.texts("using_network")
        }
        found.networks = sorted(used, key=lambda name: SLOWEST.index(used[name]))
        found.network = next(iter(found.networks), None)
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (found.nodes or 1) > 1 and "mnnvl" not in found.channels
        if found.channels and "network" not in found.channels and not amid_node:
            found.transport = "local"
        elif used:
            found.transport = used[found.network]
        elif adapters:
            found.transport = adapter_kind
        elif interfaces and not providers:  # to 2.4.7 they were listed before a plugin was tried
            found.transport = "sockets"
        if "network" in found.channels:
            gpudirect = self.seen["network_channel"].items()
            found.gpudirect = sum(count for (_, direct), count in gpudirect if direct)
        if found.transport == "sockets":
            found.interfaces = list(dict.fromkeys(interfaces))
            found.reason = self.reason()
        lines = self.problem_lines(found)
        found.problems = [
            {"id": name, "line": lines[name], "advice": advice}
            for name, (_, advice) in PROBLEMS.items()
            if name in lines
        ]
        return found

    def channels(self) -> dict[str, int]:
        """{network, p2p, mnnvl, shm: how many connections}, without those that have none."""
        counts: Counter[str] = Counter()
        for (way,), count in self.seen["local_channel"].items():
            counts[{"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(way, "shm")] += count
        if over_network := self.seen["network_channel"].total():
            counts["network"] = over_network
        return dict(counts)

    def reason(self) -> str | None:
        """Who asked for sockets."""
        wishes = dict(self.seen["wish"].keys())
        disabled = wishes.get("NCCL_IB_DISABLE", "0")
        if disabled != "0":
            return f"NCCL_IB_DISABLE={disabled} turned InfiniBand and RoCE off"
        socket = wishes.get("NCCL_NET") == "Socket"
        return "NCCL_NET=Socket asked for sockets" if socket else None

    def problem_lines(self, found: Finding) -> dict[str, str]:
        """Each problem's id, and the line that told it."""
        lines = {name: line for name, line in self.lines.items() if name in PROBLEMS}
        asked = [self.lines[wish] for wish in self.seen["wish"]]
        if "plugin_failed" in lines:
            asked.append(lines["plugin_failed"])
        if found.transport == "sockets" and not found.reason and asked:
            lines["fell_back_to_sockets"] = asked[0]
        rdma = found.transport in ("infiniband", "roce", "efa") or found.network == "IB"
        if rdma and found.gpudirect == 0:  # counted, and on no connection
            lines["gpudirect_off"] = self.lines[next(iter(self.seen["network_channel"]))]
        return lines


def transport_of(network: str, adapter_kind: str, providers: list[str]) -> str:
    """What moves the data of a network that goes by this name."""
    if network == "Socket":
        return "sockets"
    if network.endswith("Libfabric"):
        return "efa" if providers == ["efa"] else "plugin"
    # NCCL's own, and that of HPC-X.
    return adapter_kind if network.startswith(("IB", "NCCL RDMA Plugin")) else "plugin"


# --- For people ----------------------------------------------------------------------------------

TRANSPORTS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE, RDMA over Ethernet",
    "sockets": "TCP sockets",
    "efa": "EFA",
    "plugin": "the network of a plugin",
    "local": "no network, only NVLink, PCIe or memory inside a node",
    "unknown": "RDMA adapters, though the text does not say whether InfiniBand or RoCE",
}


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
        why = [found.reason] if found.reason else [*said, f"unknown; to see it, {HOW_TO_ASK}"]
        sentences.append(f"Why not another network: {why[0]}.")
    return sentences + ["{id}: {line}\n    -> {advice}".format(**p) for p in found.problems]


def used(found: Finding) -> str:
    if not found.decided:
        return "NCCL's text names no network"
    version = f"NCCL {found.version}" if found.version else "NCCL"
    what = TRANSPORTS[found.transport]
    if found.transport == "local" and "mnnvl" in found.channels:
        what = "no network, only NVLink, between nodes too (MNNVL)"
    elif found.network and found.transport != "local":
        what += f" (network {found.network})"
    over = found.interfaces if found.transport == "sockets" else found.devices
    if over and found.transport in ("sockets", "infiniband", "roce"):
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
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()]
            found += [file for file in inside if is_text(file)]
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"no such file or folder: {name}")
    return found


def is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


def find_in_files(paths: list[str]) -> Finding:
    """What the text of one job says, of any of its ranks and nodes."""
    reader = Reader()
    try:
        for path in files_in(paths):
            for line in lines_of(path):
                reader.read(line)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths}: {error.strerror}") from None
    if not (reader.lines or reader.any_text):
        raise UserError(f"no text of NCCL in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    pattern = pattern.replace("%h", host.partition(".")[0])
    paths = {pattern.replace("%p", str(pid)) for pid in pids}
    with contextlib.suppress(UserError):
        return find_in_files(sorted(filter(os.path.isfile, paths)))
    return None
