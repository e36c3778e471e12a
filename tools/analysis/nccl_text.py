"""Reads NCCL's own debug text: which network was used, why not another, what went wrong.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. `Assigned NET plugin X to comm`, `Initialized NET plugin X`, where the text ends before 2
  4. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints of networks is a wish, a possibility or start-up traffic.
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
from analysis.nccl_rules import (
    ADVICE,
    BEGINNINGS,
    KNOWN_NAMES,
    OVER_ADAPTERS,
    REASONS,
    RULES,
    SLOWEST,
    SUSPECT_INTERFACES,
    UNREACHABLE,
    Rule,
)

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"
LINE_LIMIT = 1 << 20  # characters read at once, so that a file without line ends fits into memory
MESSAGE_LIMIT = 4096  # NCCL's own limit was 1,023 to 2.28.9; the longest lists have some 2,000
QUOTE_LIMIT = 300  # characters of a line that a finding quotes

# --- from lines to messages --------------------------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Where a message begins. The host name is all word characters before the pid, so that the end of
# a torn message that touches it is lost with it, never taken for a whole one.
BEGINNING = re.compile(
    r"(?<![\w.-])[\w.-]{1,253}:\d+:\d+ \["
    r"(?:-?\d+\] (?:\S+:\d+ (?:\(\S*\) )?)?NCCL (?:INFO|WARN)\b)?"
    r"|NCCL (?:INFO|WARN)\b"
)


def messages(line: str) -> Iterator[tuple[str, bool]]:
    """The messages of a line, and of each whether another one that follows may have cut it."""
    starts = [0, *(match.start() for match in BEGINNING.finditer(line)), len(line)]
    for begin, end in itertools.pairwise(starts):
        yield line[begin:end][:MESSAGE_LIMIT], end < len(line)


# --- the finding -------------------------------------------------------------------------------


@dataclass
class Problem:
    id: str
    line: str
    advice: str


@dataclass
class Finding:
    """What a text says of the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm;
    gpudirect is the number of those over the network that have GPUDirect RDMA.
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
    reason: str | None = None  # why sockets, where nothing failed: somebody asked for them
    problems: list[Problem] = field(default_factory=list)

    @property
    def decided(self) -> bool:
        return self.transport != "unknown" or self.network is not None

    def to_dict(self) -> dict:
        return asdict(self)


class Reader:
    """Takes the lines of a text, in whatever order, and keeps what they say."""

    def __init__(self) -> None:
        self.any_text = False
        self.version = self.version_in_error = None
        self.nodes: int | None = None
        self.channels: Counter[str] = Counter()
        self.with_gpudirect = 0
        # Names in the order in which they come.
        self.connected: dict[str, None] = {}
        self.using: dict[str, None] = {}
        self.assigned: dict[str, None] = {}
        self.initialized: dict[str, None] = {}
        self.adapters_used: set[int] = set()
        self.adapter_list = False
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
        rules = [rule for rule in RULES if rule.literal in line]
        if not rules:
            return
        for text, followed in messages(COLOURS.sub("", line).rstrip()):
            for rule in rules:
                if match := rule.pattern.search(text):
                    self.take(rule, match, quote(text), followed or cut_at_end)

    def take(self, rule: Rule, match: re.Match, text: str, cut: bool) -> None:
        self.notes.setdefault(rule.problem or rule.name, text)
        if method := getattr(self, f"on_{rule.name}", None):
            method(match, text, cut)

    def on_version(self, match, text, cut):
        if cut and match.end() == len(match.string.rstrip()):  # its last number may lack a digit
            self.version_in_error = self.version_in_error or (match[1] if match[2] else None)
        elif match[2]:
            self.version = self.version or match[1] + match[2]
        else:
            self.version_in_error = self.version_in_error or match[1]

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
        self.name(self.using, match[1], cut)

    def on_plugin_assigned(self, match, text, cut):
        self.name(self.assigned, match[1], cut=False)

    def on_plugin_initialized(self, match, text, cut):
        self.name(self.initialized, match[1], cut)

    def name(self, names: dict[str, None], name: str, cut: bool) -> None:
        name = name.strip()
        half = cut or any(known.startswith(name) for known in BEGINNINGS)
        if not half or KNOWN_NAMES.fullmatch(name):
            names.setdefault(name)

    def on_adapters(self, match, text, cut):
        for number, merged, alone in re.findall(r"\[(\d+)\](?:=\{([^}]*)|([^\s;]+))", match[1]):
            for device, port, kind in re.findall(
                r"([^\s:\[\],{}/]+):(\d+)[\d:]*/(IB|RoCE)\b", merged or alone
            ):
                self.adapter_list = True
                self.adapter(int(number), f"{device}:{port}", kind)

    def on_adapter(self, match, text, cut):
        self.adapter(int(match[1]), match[2] + match[3], match[4])

    def adapter(self, number: int, name: str, kind: str) -> None:
        self.devices.setdefault(name)
        self.kinds.setdefault(number, set()).add(kind)

    def on_sockets(self, match, text, cut):
        for name in re.findall(r"\[\d+\]([^\s:\[\]]+):[^\s<>]+<\d+>", match[1]):
            self.interfaces.setdefault(name, text)

    def on_socket_interface(self, match, text, cut):
        self.interfaces.setdefault(match[1], text)

    def on_provider(self, match, text, cut):
        if not cut or match.end() < len(match.string.rstrip()):
            self.providers.add(match[1])

    def on_wish(self, match, text, cut):
        name, value = (group for group in match.groups() if group)
        self.wishes.setdefault(name, (value.rstrip("."), text))

    def on_plugin_asked(self, match, text, cut):
        self.wishes.setdefault("NCCL_NET_PLUGIN", (match[1], text))

    def on_plugin_not_loaded(self, match, text, cut):
        asked = re.escape(self.wishes.get("NCCL_NET_PLUGIN", ("ccl-net", ""))[0])
        # A plugin that nobody asked for and that is not there is what most machines have.
        own = rf"[^\s:]*(?:ccl-net|{asked})[^\s:]*: cannot open shared object file"
        if re.search(rf"(?:^|\s){own}", match[1]):
            self.notes.setdefault("plugin_not_found", text)
        elif re.search(r"\S: \S", match[1]):
            self.notes.setdefault("plugin_failed", text)

    def on_connect_failed(self, match, text, cut):
        if UNREACHABLE.search(text):
            self.notes.setdefault("peer_unreachable", text)

    on_retries_exceeded = on_connect_failed

    # What it all amounts to.

    def finding(self) -> Finding:
        names, transport = self.decision()
        networks = sorted(names, key=self.speed)
        found = Finding(
            version=self.version or self.version_in_error,
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
        found.problems = [Problem(id, lines[id], ADVICE[id]) for id in ADVICE if id in lines]
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
        if plugins := self.assigned or self.initialized:
            return (), self.slowest(plugins)
        if self.adapter_list:
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
        """Of the adapters listed; where they are of both kinds, of those that are connected."""
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
        if "plugin_not_found" in lines and asked and not plugin_works:
            lines.setdefault("plugin_failed", lines["plugin_not_found"])
        if found.transport == "sockets":
            if not found.reason and (line := self.asked_for_more(lines)):
                lines["fell_back_to_sockets"] = line
            for name in filter(suspect, found.interfaces):
                lines.setdefault("suspect_interface", self.interfaces[name])
        if line := self.gpudirect_line(found):
            lines["gpudirect_off"] = line
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

    def gpudirect_line(self, found: Finding) -> str | None:
        """The line that shows GPUDirect RDMA off where the network could do it."""
        if found.transport in ("sockets", "local"):
            return None
        over_network = found.channels.get("network", 0)
        if found.gpudirect == over_network:
            return None
        if line := self.notes.get("gpudirect_of_adapter"):
            return line
        if found.gpudirect:  # a pair that is far apart is off on healthy machines too
            return None
        if line := self.notes.get("gpudirect_of_pair"):
            return line
        rdma = found.transport in ("infiniband", "roce", "efa") or found.network == "IB"
        return self.notes["network_channel"] if over_network and rdma else None


def suspect(interface: str) -> bool:
    return any(fnmatch.fnmatchcase(interface, pattern) for pattern in SUSPECT_INTERFACES)


def quote(text: str) -> str:
    text = text.strip()
    return text if len(text) <= QUOTE_LIMIT else text[: QUOTE_LIMIT - 1] + "…"


# --- for people --------------------------------------------------------------------------------

TRANSPORTS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE, RDMA over Ethernet",
    "sockets": "TCP sockets",
    "efa": "EFA",
    "plugin": "the network of a plugin",
    "local": "no network, but NVLink, PCIe or memory inside a node",
    "unknown": "RDMA adapters, though the text does not say whether InfiniBand or RoCE",
}


def describe(found: Finding) -> list[str]:
    """Sentences for people: what was used, then why nothing faster, then what to do."""
    sentences = [used(found)] if found.decided else ["NCCL's text names no network."]
    sentences += connections(found)
    if len(found.networks) > 1:
        names = ", ".join(found.networks)
        sentences.append(f"Ranks differ ({names}); the slowest sets the pace.")
    if found.transport == "sockets":
        sentences.append(why_sockets(found))
    for problem in found.problems:
        sentences.append(f"{problem.id}: {problem.line}\n    -> {problem.advice}")
    return sentences


def used(found: Finding) -> str:
    version = f"NCCL {found.version}" if found.version else "NCCL"
    what = TRANSPORTS[found.transport]
    if found.transport == "local" and "mnnvl" in found.channels:
        what = "no network, but NVLink, between nodes too (MNNVL)"
    elif found.network and found.transport != "local":
        what += f" (network {found.network})"
    over = found.interfaces if found.transport == "sockets" else found.devices
    if over and found.transport in ("sockets", "infiniband", "roce"):
        what += f" over {', '.join(over)}"
    nodes = f", {found.nodes} node{'s' * (found.nodes > 1)}" if found.nodes else ""
    return f"{version} used {what}{nodes}."


def connections(found: Finding) -> list[str]:
    """Of the lines of connections; each rank writes its own end."""
    parts = []
    if over_network := found.channels.get("network"):
        gpudirect = f", {found.gpudirect} of them with GPUDirect RDMA"
        parts.append(
            f"{over_network} over the network" + gpudirect * (found.transport != "sockets")
        )
    if local := sum(count for kind, count in found.channels.items() if kind != "network"):
        parts.append(f"{local} without a network")
    return [f"Connections seen: {'; '.join(parts)}."] if parts else []


def why_sockets(found: Finding) -> str:
    if why := cause(found):
        return f"Why not another network: {why}."
    return f"The text does not say why not another network; to see it, {HOW_TO_ASK}."


def cause(found: Finding) -> str:
    """Of sockets: who asked for them, or what NCCL says of the others; may be empty."""
    if found.reason:
        return found.reason
    lines = {problem.id: problem.line for problem in found.problems}
    for line in (lines[id] for id in REASONS if id in lines):
        message = re.split(r"NCCL (?:INFO|WARN) ", line)[-1]
        return f'NCCL says "{message}"'
    return ""


def in_one_line(found: Finding) -> str:
    """What was used and, of sockets, why; then the names of the problems, to be looked up."""
    said = used(found).removesuffix(".") if found.decided else "NCCL's text names no network"
    if found.transport == "sockets":
        said += f", because {why}" if (why := cause(found)) else ", and does not say why"
    names = ", ".join(problem.id for problem in found.problems)
    return f"{said}; problems: {names}" if names else said


# --- files -------------------------------------------------------------------------------------


def files_in(paths: list[str]) -> list[Path]:
    """The files named, and of each folder those that may be text."""
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
    """Whether a file of a folder is none to read: a checkpoint can have gigabytes."""
    with path.open("rb") as file:
        return b"\0" in file.read(4096)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file as they come; universal newlines end them at carriage returns too."""
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LINE_LIMIT):
            yield line


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
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None if nothing is there.

    By their ids, because earlier runs may have left files of theirs in the same folder.
    """
    names = {"h": host.partition(".")[0], "%": "%"}
    paths = set()
    for pid in pids:
        names["p"] = str(pid)
        paths.add(re.sub("%(.)", lambda match: names.get(match[1], match[0]), pattern))
    with contextlib.suppress(UserError):
        return find_in_files(sorted(filter(os.path.isfile, paths)))
    return None
