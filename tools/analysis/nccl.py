"""NCCL's own debug text: which network was used, why not another one, what went wrong.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints about networks is a wish, a possibility or start-up traffic.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from analysis import UserError
from analysis.logs import lines_of

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"

# --- Messages; tests/nccl_formats.txt has each as the sources of NCCL, torch and RCCL have it ----

NAMES = "NCCL_IB_HCA|NCCL_IB_DISABLE|NCCL_NET_PLUGIN|NCCL_NET"
# The name of a network ends with the line, or with the string that a collector made of it.
NAME = r'([^"`\\\r\n]+)'
# What is used; Reader has a method for each.
EVIDENCE = {
    # Not in "was compiled with NCCL version" or "version mismatch".
    "version": r"(?<!with N)CCL version(?: :)? (\d+\.\d+\.\d+\w*(?:\+(?:cuda|hip)\d+(?:\.\d+)+)?)"
    r"(?=[\s,;:)-]|$)",
    "nodes": r"rank \d+ nRanks \d+ nNodes (\d+) localRanks",
    "network_channel": r"via NET/([^/]+)/(\d+)",
    "local_channel": r" via (P2P/MNNVL|P2P/|SHM/|direct shared memory)",
    "using_network": "Using network " + NAME,
    "adapters": r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}?|[^\s;]+))+)",
    "sockets": r"NET/Socket : Using((?: ?\[\d+\]\S+)+)",
    "provider": r"NET/OFI Selected [Pp]rovider is (\w+)(?=[ ,*]|$)",
    # NCCL's own words, or a line of the environment, or an entry of a record in JSON.
    "wish": rf"\b({NAMES}) set (?:by environment )?to ([^\s\"]+)"
    rf"|(?:^|[\]:>|)] )\s*(?:export |declare -x )?({NAMES})=\"?([^\s\"]+)"
    rf"|\"({NAMES})\": \"([^\"]+)\"",
    # Most machines lack a plugin that nobody has asked for.
    "plugin_missing": "NET/Plugin ?: (?:Could not find:|.*cannot open shared object file)",
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
        r"Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S|NET/OFI .*initialization failed"
        r"|External network plugin .+ is unsupported|Failed to find ncclNetPlugin symbol \(",
        "the network plugin could not be used: check its path, its own libraries and that it fits "
        "this NCCL; NCCL_NET_PLUGIN=none does without it",
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
    "suspect_interface": (
        None,
        "this interface seldom joins nodes: set NCCL_SOCKET_IFNAME to the one that does",
    ),
    "peer_unreachable": (
        # 12 is IBV_WC_RETRY_EXC_ERR; 5, flushed, only follows another error.
        r"Got completion .*(?:error |status=)(?:12\b|\w+\(12\)|\(\w+\)12\b)"
        r"|onnect.* (?:failed|returned|exceeded).*(?:No route to host|Network is unreachable)"
        r"|[Cc]onnect to \S+ (?:failed : |returned.*)Connection timed out(?!, retrying)",
        "the other end did not answer: check cable, switch, routes and firewall, on RoCE the GID "
        "index, between these two nodes",
    ),
    "connection_failed": (
        r"[Cc]onnect to \S+ (?:failed : |returned -?\d+\()|PollConnect to \S+ failed with error "
        r"|Connection closed by remote peer|exceeded (?:retries|timeouts|error retry count)\b"
        r"|Call to (?:recv(?: from \S+)?|send to \S+) failed : ",
        "look at the other end first: it may have failed before; otherwise a firewall or the "
        "wrong interface",
    ),
    "link_renegotiated": (
        r"NET/IB : .*speed change detected: "
        r"|async (?:fatal |error )?event\b.*\bport (?:error|active)",
        "a link changed its state or speed during the job: check cable, transceiver and switch "
        "port",
    ),
}
EVIDENCE = {name: re.compile(pattern) for name, pattern in EVIDENCE.items()}
SIGNS = {name: re.compile(pattern) for name, (pattern, _) in PROBLEMS.items() if pattern}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    "NET/|NET plugin|NCCL_|CCL version|nNodes| via |Using network"
    "|libibverbs|ibv_|Got completion|onnect|exceeded|Call to|network plugin"
    "|async |ncclNetPlugin"
)
# Of these: why no faster network was used, the most telling first.
REASONS = ("verbs_library_missing", "no_ib_device", "plugin_failed")

# If a text is cut, its last name may be half a name, except these. The beginning of one of these
# is half a name wherever it stands.
KNOWN_NAMES = re.compile(r"Socket|IB|IBext(?:_v\d+)?|(?:AWS )?Libfabric|NCCL RDMA Plugin v\d+")
BEGINNINGS = ("Socket", "IB", "Libfabric", "AWS Libfabric", "NCCL RDMA Plugin v")
# Networks of plugins that drive the adapters of the NET/IB list.
OVER_ADAPTERS = re.compile(r"IB|IBext.*|NCCL RDMA Plugin v.*")
SUSPECT_INTERFACES = ("lo", "docker*", "veth*", "br-*", "virbr*", "tailscale*")
# The slowest first: if ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")

# --- From lines to messages ----------------------------------------------------------------------

MESSAGE_LIMIT = 4096  # NCCL's own limit was 1,023 to 2.28.9; the longest lists have some 2,000
QUOTE_LIMIT = 300  # characters of a line that a finding quotes
COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Where a message begins. The host name is all word characters before the pid, so that the end of
# a torn message that touches it is lost with it, never taken for a whole one.
BEGINNING = re.compile(
    r"(?<![\w.-])[\w.-]{1,253}:\d+:\d+ \["
    r"(?:-?\d+\] (?:\S+:\d+ (?:\(\S*\) )?)?NCCL (?:INFO|WARN)\b)?"
    r"|NCCL (?:INFO|WARN)\b"
)


def messages(line: str) -> Iterator[tuple[str, bool]]:
    """The messages of a line; for each, whether another one that follows may have cut it."""
    starts = [0, *(match.start() for match in BEGINNING.finditer(line)), len(line)]
    for begin, end in itertools.pairwise(starts):
        yield line[begin:end][:MESSAGE_LIMIT], end < len(line)


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
        self.version: str | None = None
        self.nodes: int | None = None
        self.channels: Counter[str] = Counter()
        self.with_gpudirect = 0
        # Names, in the order in which they come.
        self.connected: dict[str, None] = {}
        self.using: dict[str, None] = {}
        self.adapters_used: set[int] = set()
        self.devices: dict[str, None] = {}  # mlx5_0:1
        self.kinds: dict[int, set[str]] = {}  # IB, RoCE: of the adapter of a number, on any node
        self.interfaces: dict[str, str] = {}  # with the first line that has it
        self.providers: set[str] = set()
        self.wishes: dict[str, tuple[str, str]] = {}
        self.notes: dict[str, str] = {}  # first lines, by problem or rule

    def read(self, line: str) -> None:
        """One line with its end; without it, it may be cut there."""
        cut_at_end = not line.endswith("\n")
        self.any_text = self.any_text or "NCCL INFO" in line or "NCCL WARN" in line
        if not WORDS.search(line):
            return
        for text, followed in messages(COLOURS.sub("", line).rstrip()):
            for name, pattern in EVIDENCE.items():
                if match := pattern.search(text):
                    self.notes.setdefault(name, quote(text))
                    if take := getattr(self, f"on_{name}", None):
                        take(match, quote(text), followed or cut_at_end)
            for name, pattern in SIGNS.items():
                if name not in self.notes and pattern.search(text):
                    self.notes[name] = quote(text)

    # What a message says: `text` is the message, `cut` whether its end may be missing.

    def on_version(self, match, text, cut):
        # torch's errors end in the version of NCCL without that of CUDA: a last resort.
        if "+" not in (self.version or "") and ("+" in match[1] or not self.version):
            self.version = match[1]

    def on_nodes(self, match, text, cut):
        self.nodes = max(self.nodes or 0, int(match[1]))

    def on_network_channel(self, match, text, cut):
        self.connected.setdefault(match[1])
        gpudirect = "/GDRDMA" in match.string[match.end() :]
        if cut and not gpudirect:  # its end may have said so: then it counts for neither
            return
        self.channels["network"] += 1
        self.with_gpudirect += gpudirect
        self.adapters_used.add(int(match[2]))

    def on_local_channel(self, match, text, cut):
        kind = {"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(match[1], "shm")
        self.channels[kind] += 1

    def on_using_network(self, match, text, cut):
        name = match[1].strip()
        half = cut or any(known.startswith(name) for known in BEGINNINGS)
        if not half or KNOWN_NAMES.fullmatch(name):
            self.using.setdefault(name)

    def on_adapters(self, match, text, cut):
        for number, merged, alone in re.findall(r"\[(\d+)\](?:=\{([^}]*)|([^\s;]+))", match[1]):
            for device, port, kind in re.findall(
                r"([^\s:\[\],{}/]+):(\d+)[\d:]*/(IB|RoCE)\b", merged or alone
            ):
                self.devices.setdefault(f"{device}:{port}")
                self.kinds.setdefault(int(number), set()).add(kind)

    def on_sockets(self, match, text, cut):
        for name in re.findall(r"\[\d+\]([^\s:\[\]]+):[^\s<>]+<\d+>", match[1]):
            self.interfaces.setdefault(name, text)

    def on_provider(self, match, text, cut):
        if not cut or match.end() < len(match.string.rstrip()):
            self.providers.add(match[1])

    def on_wish(self, match, text, cut):
        name, value = (group for group in match.groups() if group)
        self.wishes.setdefault(name, (value.rstrip("."), text))

    # What it all amounts to.

    def finding(self) -> Finding:
        names, transport = self.decision()
        networks = sorted(names, key=self.speed)
        found = Finding(
            version=self.version,
            network=networks[0] if networks else None,
            networks=networks,
            transport=transport,
            devices=list(self.devices),
            interfaces=list(self.interfaces) if transport == "sockets" else [],
            gpudirect=self.with_gpudirect if self.channels["network"] else None,
            channels=dict(+self.channels),
            nodes=self.nodes,
        )
        if transport == "sockets":
            found.reason = self.reason()
        lines = self.problem_lines(found)
        found.problems = [
            {"id": name, "line": lines[name], "advice": advice}
            for name, (_, advice) in PROBLEMS.items()
            if name in lines
        ]
        return found

    def decision(self) -> tuple[Iterable[str], str]:
        """The networks that the first two kinds of evidence name, and the transport."""
        if self.connected:
            return self.connected, self.slowest(self.connected)
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (self.nodes or 1) > 1 and not self.channels["mnnvl"]
        if self.channels and not amid_node:
            return self.using, "local"
        if self.using:
            return self.using, self.slowest(self.using)
        if self.devices:
            return (), self.adapter_kind()
        # To 2.4.7 sockets were listed before a plugin was tried.
        return (), "sockets" if self.interfaces and not self.providers else "unknown"

    def slowest(self, names: Iterable[str]) -> str:
        return SLOWEST[min(map(self.speed, names))]

    def speed(self, name: str) -> int:
        return SLOWEST.index(self.transport(name))

    def transport(self, name: str) -> str:
        """What moves the data of a network that goes by this name."""
        if name == "Socket":
            return "sockets"
        if name in ("Libfabric", "AWS Libfabric"):
            return "efa" if self.providers == {"efa"} else "plugin"
        if OVER_ADAPTERS.fullmatch(name) and (name == "IB" or self.devices):
            return self.adapter_kind()
        return "plugin"

    def adapter_kind(self) -> str:
        """Of the adapters listed; if they are of both kinds, of those that are connected."""
        kinds = set().union(*self.kinds.values())
        if len(kinds) > 1 and len(self.connected) == 1 and self.adapters_used <= set(self.kinds):
            kinds = set().union(*(self.kinds[number] for number in self.adapters_used))
        if len(kinds) != 1:
            return "unknown"
        return "infiniband" if "IB" in kinds else "roce"

    def wish(self, name: str) -> str:
        return self.wishes.get(name, ("", ""))[0]

    def reason(self) -> str | None:
        """Who asked for sockets."""
        if self.wish("NCCL_IB_DISABLE") not in ("", "0"):
            return f"NCCL_IB_DISABLE={self.wish('NCCL_IB_DISABLE')} turned InfiniBand and RoCE off"
        if self.wish("NCCL_NET") == "Socket":
            return "NCCL_NET=Socket asked for sockets"
        return None

    def problem_lines(self, found: Finding) -> dict[str, str]:
        """Each problem's id, and the line that told it."""
        lines = dict(self.notes)
        plugin_works = any(name not in ("IB", "Socket") for name in found.networks)
        asked = self.wish("NCCL_NET_PLUGIN").lower() not in ("", "none")
        if "plugin_missing" in lines and asked and not plugin_works:
            lines.setdefault("plugin_failed", lines["plugin_missing"])
        if found.transport == "sockets":
            if not found.reason and (line := self.asked_for_more(lines)):
                lines["fell_back_to_sockets"] = line
            for name in filter(suspect, found.interfaces):
                lines.setdefault("suspect_interface", self.interfaces[name])
        rdma = found.transport in ("infiniband", "roce", "efa") or found.network == "IB"
        if rdma and found.gpudirect == 0:  # counted, and on no connection
            lines["gpudirect_off"] = lines["network_channel"]
        return lines

    def asked_for_more(self, lines: dict[str, str]) -> str | None:
        """The line that shows that something faster than sockets was meant to be used.

        NCCL_IB_DISABLE is 0 here: any other value is a reason.
        """
        for name, (value, line) in self.wishes.items():
            names_one = name == "NCCL_NET" and OVER_ADAPTERS.fullmatch(value)
            if names_one or name in ("NCCL_IB_HCA", "NCCL_IB_DISABLE"):
                return line
        return lines.get("plugin_failed")


def suspect(interface: str) -> bool:
    return any(fnmatch.fnmatchcase(interface, pattern) for pattern in SUSPECT_INTERFACES)


def quote(text: str) -> str:
    text = text.strip()
    return text if len(text) <= QUOTE_LIMIT else text[: QUOTE_LIMIT - 1] + "…"


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
    parts = []
    if over_network := found.channels.get("network"):
        gpudirect = f", {found.gpudirect} of them with GPUDirect RDMA"
        gpudirect *= found.transport != "sockets"
        parts.append(f"{over_network} over the network{gpudirect}")
    if local := sum(count for kind, count in found.channels.items() if kind != "network"):
        parts.append(f"{local} without a network")
    if parts:  # each rank writes its own end of a connection
        sentences.append(f"Connections seen: {'; '.join(parts)}.")
    if len(found.networks) > 1:
        names = ", ".join(found.networks)
        sentences.append(f"Ranks differ ({names}); the slowest sets the pace.")
    if found.transport == "sockets" and (why := cause(found)):
        sentences.append(f"Why not another network: {why}.")
    elif found.transport == "sockets":
        sentences.append(
            f"The text does not say why not another network; to see it, {HOW_TO_ASK}."
        )
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


def cause(found: Finding) -> str:
    """Of sockets: who asked for them, or what NCCL says of the others; may be empty."""
    if found.reason:
        return found.reason
    lines = {problem["id"]: problem["line"] for problem in found.problems}
    for line in (lines[id] for id in REASONS if id in lines):
        message = re.split(r"NCCL (?:INFO|WARN) ", line)[-1]
        return f'NCCL says "{message}"'
    return ""


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
            found += [file for file in inside if not binary(file)]
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"no such file or folder: {name}")
    return found


def binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def find_in_files(paths: list[str]) -> Finding:
    """What the text of one job says, of any of its ranks and nodes."""
    reader = Reader()
    path: Path | str = ", ".join(paths)
    try:
        for path in files_in(paths):
            for line in lines_of(path):
                reader.read(line)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror}") from None
    if not (reader.notes or reader.any_text):
        raise UserError(f"no text of NCCL in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_processes(pattern: str, host: str, pids: Iterable[int]) -> Finding | None:
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    names = {"h": host.partition(".")[0], "%": "%"}
    paths = set()
    for pid in pids:
        names["p"] = str(pid)
        paths.add(re.sub("%(.)", lambda match: names.get(match[1], match[0]), pattern))
    with contextlib.suppress(UserError):
        return find_in_files(sorted(filter(os.path.isfile, paths)))
    return None
