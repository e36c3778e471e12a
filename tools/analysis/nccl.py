"""NCCL's own words: which network it used, over which devices, and what it warned of first.

What decides, in this order; a text that holds none of it gives "unknown":
  1. connections that were made: `via NET/X/n`; all of them `via P2P` or `via SHM`: local
  2. `Using network X`
  3. the adapters of `NET/IB : Using`, else the interfaces of `NET/Socket : Using`
Everything else that NCCL prints about networks is a wish, a possibility or start-up traffic.
A name that does not end its line, because that was cut, counts as not written.
"""

import itertools
import os
import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from analysis.logs import COLOURS, UserError, lines_of

HOW_TO_ASK = "start the job with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,ENV"

# --- Messages; tests/data/nccl_formats.txt has each as the sources of NCCL and torch have it --

EVIDENCE = {
    "version": r"CCL(?<!with NCCL) version(?: :)? (\d+\.\d+\.\d+(?:\+\w+\.\d+)?)(?![\d:])",
    "nodes": r"nRanks \d+ nNodes (\d+) localRanks",
    # "" is without GPUDirect; of a line that is cut before the word nobody knows.
    "network_channel": r"via NET/([^/\n]+)/(\d+)"
    r"""(?:(?:\(\d+\))?(/GDRDMA|(?=(?:/Shared)?(?:/flush=\w+)?[\s"'`\\])))?""",
    "local_channel": r" via (P2P/MNNVL|P2P/|SHM/)",
    # The name ends its line or quotation.
    "using_network": r"""Using network (?!interface\b)([\w-]+(?: [\w-]+)*)(?=\s*\n|["'`\\])""",
    "adapters": r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}?|[^\s;]+))+)",
    "merged": r"NET/IB : Made virtual device \[(\d+)\] name=(\S+) speed",
    "sockets": r"NET/Socket : Using((?: \[\d+\]\S+<\d+>)+)",
    "provider": r"NET/OFI Selected [Pp]rovider is ([\w;-]+)[\s,*]",
    "asked": r"(NCCL_\w+) set (?:by environment )?to "
    r"([^\s.]\S*?(?: (?!NCCL )(?:[A-Z]\w*|v\d+))*)\.?(?=\s)",  # AWS Libfabric
    # torch's own prefix has the rank in the whole job, "Rank n]" the one in the process group.
    "collective": r"(?:\[rank(\d+)\]:[^\n]*?)?(?:Rank (\d+)\] )?"
    r"(?:Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), "
    r"NumelIn=(\d+), NumelOut=\d+, Timeout\(ms\)=(\d+)\)"
    r"|(Watchdog caught collective operation timeout: NCCL operation timed out"
    r"|ProcessGroupNCCL's watchdog got stuck for \d+ seconds|Heartbeat monitor timed out))",
    # Why a faster network or GPUDirect was not used; a healthy machine may print these, too.
    "no_network": r"(NET/IB : No device found|Failed to open libibverbs\.so\[\.1\]"
    # The plain name is tried first and alone proves nothing.
    r"|Cou(?:nt|ld) not open libibverbs\.so\.1\b|External network plugin .+ is unsupported"
    r"|Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S|NET/OFI .*[Ff]ailed"
    # That there is no plugin is no failure of it.
    r"|NET/Plugin ?: (?:.*[ =])?(?!lib[nr]ccl-net[\w.-]*: cannot)"
    r"[\w./+-]+\.so[\w.]*: (?:cannot open|undefined symbol|version `)"
    r"|Failed to initialize any NET plugin)",
    "no_gpudirect": r"(?<!NET/Socket : )(GPU Direct RDMA Disabled for [^\n]*)",
}
# One of these words is in every message above: most lines of a log need no more than this search.
WORDS = re.compile(
    r"NET/|NET plugin|NCCL_|CCL version| n[Rr]anks | via |Using |libibverbs|network plugin|WARN "
    "|GPU Direct|[Ww]atchdog|Heartbeat"
)
# Where a message begins, which may have broken off another process's: time (2.26 on), host,
# process, GPU.
BEGINNING = re.compile(
    r"(?:\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)\] ?)?"
    r"(?<![\w.-])([\w.-]{1,253}):(\d+):\d+ \[(\d+)\]"
)
# A warning may have more lines, which have no prefix of NCCL's.
CONTINUED = re.compile(r"(?:This is|Disable|Do not|Set|Try|Please|If) .*\.$")
RANK = re.compile(r"\bcomm \S+ rank (\d+) n[Rr]anks (\d+)")
TORCH_RANK = re.compile(r"\[rank(\d+)\]")
# Of a list: number, and a name with port and kind, or several of them that are used as one.
LISTED = re.compile(r"\[(\d+)\](=\{[^}]*\}?|[^\s;{]+)")
ADAPTER = re.compile(r"([^\s:\[\],{}/]+:\d+)[\d:]*/(IB|RoCE)\b")
INTERFACE = re.compile(r" \[\d+\]([^\s:\[\]]+):")
TITLES = {  # the slowest first: if ranks differ, it sets the pace
    "sockets": "TCP",
    "plugin": "a plugin's network",
    "unknown": "InfiniBand or RoCE adapters",
    "efa": "EFA",
    "roce": "RoCE",
    "infiniband": "InfiniBand",
    "local": "no network: NVLink, PCIe or memory",
}
QUOTE_LENGTH = 300  # characters of a line that is quoted
MOST_QUOTES = 6

# What a line means, where nobody could look it up.
VERBS = "https://www.rdmamojo.com/2013/02/15/ibv_poll_cq/"
NVIDIA = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
STATUS = r"Got completion .*(?:error |status=)(?:\w+\(|\(\w+\))?"
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
# Warnings that tell of an error elsewhere, or before: never the cause while there is another one.
AFTER = re.compile(
    r"(?i)remote peer|closed by|reset by peer|broken pipe|recv failed|closing connection"
    rf"|failed to execute operation|port active|{STATUS}5\b"
)
# Warnings that healthy runs print, too: never the cause.
HEALTHY = re.compile(
    r"(?i)GID table change|client re-?registration|LID change|SM change|P_Key table change"
    r"|mismatched physical devices|iommu=pt|NUMA auto balancing"
    r"|NET/OFI .*failed|libibverbs"  # no_network has these
)

# --- The finding ---------------------------------------------------------------------------------


@dataclass
class Finding:
    """What a text says about the network. None and empty: the text does not say it.

    channels counts lines of connections: network, p2p, mnnvl (NVLink between nodes), shm.
    gpudirect is the number of those over the network that have GPUDirect RDMA.
    warnings: of each rank its earliest one, the cause first: {who, time, line, count}.
    """

    version: str | None = None
    network: str | None = None  # NCCL's own name for it
    networks: list = field(default_factory=list)  # more than one: ranks differ
    transport: str = "unknown"  # infiniband, roce, sockets, efa, plugin, local
    providers: list = field(default_factory=list)  # of libfabric
    devices: list = field(default_factory=list)  # adapters of the connections
    devices_by_host: dict = field(default_factory=dict)
    unused: list = field(default_factory=list)  # adapters that NCCL found beside them
    interfaces: list = field(default_factory=list)
    channels: dict = field(default_factory=dict)
    gpudirect: int | None = None
    no_gpudirect: str = ""  # NCCL's line that says why not
    nodes: int | None = None
    asked: dict = field(default_factory=dict)  # what the environment asked for
    no_network: list = field(default_factory=list)  # lines on networks that could not be used
    warnings: list = field(default_factory=list)
    timeouts: list = field(default_factory=list)  # of PyTorch's watchdog
    means: list = field(default_factory=list)  # what some lines mean, with a source

    @property
    def decided(self):
        return self.transport != "unknown" or self.network is not None

    def to_dict(self):
        return asdict(self)


class Reader:
    """Takes the lines of a text and keeps what they say; the order is that of warnings alone."""

    def __init__(self):
        self.seen = {name: {} for name in EVIDENCE}  # groups of a match -> [(host, line)]
        self.warnings = {}  # ((host, process, GPU), first line) -> (time, lines)
        self.ranks = {}  # (host, process, GPU) -> (rank, ranks in its communicator)
        self.quoting = None  # torch quotes NCCL's last error on the next line with this prefix
        self.warned = None  # prefix and lines, if the line before was a warning

    def read_files(self, files):
        for file in files:
            for line in lines_of(file):
                self.read(line)

    def read(self, line):
        """One line; without its end it may be cut there."""
        if "\x1b" in line:
            line = COLOURS.sub("", line)
        if self.warned and self.continues_warning(line):
            return
        prefix, last_error, _ = line.partition("Last error:")
        if last_error:
            self.quoting = prefix
        elif self.quoting is not None and line.startswith(self.quoting):
            prefix, self.quoting = self.quoting, None
            rank = TORCH_RANK.search(prefix)
            if text := line.removeprefix(prefix).strip()[:QUOTE_LENGTH]:
                self.warn(("", rank[1] if rank else "", ""), text, "", prefix)
        if WORDS.search(line):
            parts = BEGINNING.split(line)
            self.read_message(parts[0], "", ("", "", ""), "")
            for n in range(1, len(parts), 5):
                time, *process, text = parts[n : n + 5]
                self.read_message(text, time or "", tuple(process), parts[0])

    def continues_warning(self, line):
        prefix, lines = self.warned
        text = line.removeprefix(prefix).strip()[:QUOTE_LENGTH]
        if not (line.startswith(prefix) and CONTINUED.match(text)):
            self.warned = None
            return False
        if text not in lines:
            lines.append(text)
        return True

    def read_message(self, text, time, process, prefix):
        quote = message(text)[:QUOTE_LENGTH]
        rank = world_rank(text, self.ranks.get(process))
        if rank and process[0]:
            self.ranks[process] = rank
        for name, pattern in EVIDENCE.items():
            for match in re.finditer(pattern, text):
                self.seen[name].setdefault(match.groups(), []).append((process[0], quote))
        if re.search(r"NCCL WARN \S", text):
            self.warn(process, quote, time, prefix)

    def warn(self, process, quote, time, prefix):
        self.warned = prefix, self.warnings.setdefault((process, quote), (time, [quote]))[1]

    @property
    def has_text(self):
        return any(self.seen.values()) or bool(self.warnings)

    def groups(self, name, host=""):
        """What this evidence names, of one host; a line without prefix may be of any."""
        return [
            groups
            for groups, places in self.seen[name].items()
            if not host or any(other in (host, "") for other, _ in places)
        ]

    def texts(self, name, host=""):
        return once(groups[0] for groups in self.groups(name, host))

    def quotes(self, name):
        """A line with each text of this evidence."""
        return once(places[0][1] for places in self.seen[name].values())

    def finding(self):
        found = Finding(
            version=next(iter(self.texts("version")), None),
            providers=self.texts("provider"),
            channels=self.channels(),
            nodes=max(map(int, self.texts("nodes")), default=None),
            asked=dict(self.groups("asked")),
            no_network=self.quotes("no_network"),
            warnings=self.all_warnings(),
            timeouts=self.timeouts(),
        )
        adapter_kind = self.add_devices(found)
        names = self.texts("network_channel") or self.texts("using_network")
        used = {
            name: transport_of(name, adapter_kind or "unknown", found.providers) for name in names
        }
        found.networks = sorted(used, key=lambda name: list(TITLES).index(used[name]))
        found.network = next(iter(found.networks), None)
        interfaces = [name for text in self.texts("sockets") for name in INTERFACE.findall(text)]
        # A rank amid its node has none but local channels, though others leave the node.
        amid_node = (found.nodes or 1) > 1 and "mnnvl" not in found.channels
        if found.channels and not self.seen["network_channel"] and not amid_node:
            found.transport = "local"
        elif used:
            found.transport = used[found.network]
        elif adapter_kind:
            found.transport = adapter_kind
        elif interfaces:
            found.transport = "sockets"
        if over := found.channels.get("network"):
            channels = self.seen["network_channel"].items()
            found.gpudirect = sum(len(places) for (*_, direct), places in channels if direct)
        if found.transport == "sockets":
            found.interfaces = once(interfaces)
            found.unused = found.devices + found.unused
            found.devices, found.devices_by_host = [], {}
        elif over and found.gpudirect < over:
            lines = self.quotes("no_gpudirect")  # a distance says most
            found.no_gpudirect = max(lines, key=lambda line: "distance" in line, default="")
        lines = found.no_network + [one["line"] for one in found.warnings]
        lines += found.timeouts if found.channels.keys() == {"p2p"} else []
        said = "\n".join(lines)
        found.means = [text for pattern, text in TRANSLATIONS.items() if re.search(pattern, said)]
        return found

    def add_devices(self, found):
        """Of each host the adapters that its connections name by number. Returns their kind."""
        all_listed, used, unused = [], [], []  # (number, name, kind)
        for host in once(host for some in self.seen["adapters"].values() for host, _ in some):
            listed = [
                (number, *adapter)
                for text in self.texts("adapters", host)
                for number, several in LISTED.findall(text)
                for adapter in ADAPTER.findall(several)
            ]
            numbers = {number for _, number, _ in self.groups("network_channel", host)}
            merged = {  # number of a device that NCCL has made of several -> names without ports
                number: name.split("+")
                for number, name in self.groups("merged", host)
                if number in numbers
            }
            members = {name for names in merged.values() for name in names}
            mine = [a for a in listed if a[0] in numbers or a[1].partition(":")[0] in members]
            if host and mine:
                found.devices_by_host[host] = once(name for _, name, _ in mine)
            # With a number that no line explains, any of them may have been used.
            if numbers <= merged.keys() | {number for number, *_ in listed}:
                unused += listed
            all_listed += listed
            used += mine
        found.devices = once(name for _, name, _ in used)
        found.unused = once(name for _, name, _ in unused if name not in found.devices)
        kinds = {kind for *_, kind in used or all_listed}
        if len(kinds) == 1:
            return {"IB": "infiniband", "RoCE": "roce"}[kinds.pop()]
        return "unknown" if kinds else ""

    def all_warnings(self):
        """Of each process the earliest warning that is no effect of another; the cause first.

        Without times the order within a process decides: what it says after an effect comes later
        than what another process says at first.
        """
        of_nccl = {" ".join(lines) for (key, _), (_, lines) in self.warnings.items() if key[2]}
        each = defaultdict(list)
        for number, ((process, _), (time, lines)) in enumerate(self.warnings.items()):
            text = " ".join(lines)
            again = not process[2] and text in of_nccl  # torch's quotation of the same
            if not again and not HEALTHY.search(text):
                each[process].append((bool(AFTER.search(text)), time or "~", number, text))
        rows = []
        for process, said in each.items():
            after, time, number, text = min(said)
            row = {"who": self.name_of(process), "time": time.strip("~"), "line": text}
            rows.append((after, time, said[0][0], number, row | {"count": len(said)}))
        return [row for *_, row in sorted(rows)]

    def name_of(self, process):
        host, number, gpu = process
        if process in self.ranks:
            return f"rank {self.ranks[process][0]} on {host}"
        if host:
            return f"GPU {gpu} of {host}"
        return f"rank {number}" if number else "a rank"

    def timeouts(self):
        """What PyTorch's watchdog gave up, and the ranks that waited for it."""
        ranks = defaultdict(set)
        for world, rank, number, kind, elements, limit, text in self.seen["collective"]:
            if number:
                text = f"{kind} number {number} ({int(elements):,} elements)"
                text += f", after {int(limit) / 1000:,g} s"
            ranks[text].add(int(world or rank or -1))
        numbers = {text: str(sorted(some - {-1}))[1:-1] for text, some in ranks.items()}
        return [text + (f", on rank {some}" if some else "") for text, some in numbers.items()]

    def channels(self):
        """{network, p2p, mnnvl, shm: how many connections}, without those that have none."""
        counts = Counter()
        for (way,), places in self.seen["local_channel"].items():
            counts[{"P2P/": "p2p", "P2P/MNNVL": "mnnvl"}.get(way, "shm")] += len(places)
        for (*_, direct), places in self.seen["network_channel"].items():
            counts["network"] += len(places) * (direct is not None)
        return dict(+counts)


def once(names):
    """In the order in which they came, each once."""
    return list(dict.fromkeys(names))


def world_rank(text, known=None):
    """(rank, ranks) of the first and largest communicator, which has all ranks of the job."""
    for rank, ranks in RANK.findall(text):
        if known is None or int(ranks) > known[1]:
            known = int(rank), int(ranks)
    return known


def transport_of(network, adapter_kind, providers):
    """What moves the data of a network that goes by this name."""
    if network == "Socket":
        return "sockets"
    if network.startswith(("IB", "NCCL RDMA Plugin")):  # NCCL's own, and HPC-X's: both list them
        return adapter_kind
    return "efa" if network.endswith("Libfabric") and providers == ["efa"] else "plugin"


def message(line):
    """What stands behind NCCL's prefix."""
    return re.split(r"NCCL (?:INFO|WARN) ", line)[-1].strip()


# --- For people ----------------------------------------------------------------------------------


def cause(finding):
    """NCCL's earliest warning, with its rank, and how many more there are; empty: none."""
    warnings = finding.get("warnings")
    if not warnings:
        return ""
    more = sum(one["count"] for one in warnings) - 1
    first = warnings[0]
    when = f" at {first['time']}" if first["time"] else ""
    rest = f" and {more} more warning{'s' * (more > 1)}" if more else ""
    return f'{first["who"]}{when}: "{first["line"]}"{rest}'


def used(found):
    """One sentence: version, network, adapters or interfaces, nodes."""
    if not found.decided:
        return "NCCL's text names no network"
    what = TITLES[found.transport]
    if found.network and found.transport != "local":
        provider = f", provider {', '.join(found.providers)}" if found.providers else ""
        what += f" (network {found.network}{provider if found.transport == 'plugin' else ''})"
    over = ", ".join(found.interfaces) if found.transport == "sockets" else devices_of(found)
    what += f" over {over}" if over else ""
    nodes = f", {found.nodes} node{'s' * (found.nodes > 1)}" if found.nodes else ""
    # An adapter that it has found, without a line on any connection, was perhaps never used.
    seen = over or found.channels or found.transport in ("sockets", "local")
    return f"NCCL {found.version or ''}".strip() + f" {'used' if seen else 'chose'} {what}{nodes}"


def devices_of(found):
    """The adapters; by host, where hosts have different ones."""
    hosts = {host: ", ".join(names) for host, names in found.devices_by_host.items()}
    if len(set(hosts.values())) > 1:
        return "; ".join(f"{names} on {host}" for host, names in hosts.items())
    return ", ".join(found.devices)


def describe(found):
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
        lines.append(f"Networks of the ranks: {', '.join(found.networks)}")
    if found.asked:
        asked = ", ".join(f"{name}={value}" for name, value in sorted(found.asked.items()))
        lines.append(f"The environment asked for: {asked}")
    lines += [f'NCCL on networks: "{line}"' for line in found.no_network[:MOST_QUOTES]]
    lines += [f"Timed out: {work}" for work in found.timeouts]
    if found.warnings:
        lines.append(f"NCCL warned first, {cause(found.to_dict())}")
    others = {one["line"]: one["who"] for one in reversed(found.warnings[1:])}
    lines += [f'Then {who}: "{line}"' for line, who in [*reversed(others.items())][:MOST_QUOTES]]
    return lines + [f"Meaning: {text}" for text in found.means]


# --- Files ---------------------------------------------------------------------------------------


def find_in_files(paths):
    """What the text of the newest start says, of all of its ranks and nodes. Raises UserError.

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
        reader.read_files(of_newest_start(files))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or paths}: {error.strerror}") from None
    if not reader.has_text:
        raise UserError(f"no text of NCCL on networks in {', '.join(paths)}: {HOW_TO_ASK}")
    return reader.finding()


def of_newest_start(files):
    """Without what an earlier start has left: of each rank, or GPU of a node, the newest file.

    A file that is not named after a process, such as a job's log, is never left out.
    """
    newest = {}
    for file in sorted(files, key=lambda f: (os.path.getmtime(f), len(f.name), f.name)):
        head = "".join(itertools.islice(lines_of(file), 500)).lstrip()
        process = BEGINNING.search(head.partition("\n")[0])
        key = file
        if process and process[3] in file.name:
            rank = world_rank(head)
            which = rank[0] if rank else f"GPU {process[4]}"
            key = file.parent, file.name.replace(process[3], ""), which
        newest[key] = file
    return list(newest.values())


def beside(log):
    """Where NCCL has written beside a node's log at the newest start: nccl.node0.HOST.PID.log."""
    node = log.name.partition(".")[0]
    return of_newest_start(filter(Path.is_file, log.parent.glob(f"nccl.{node}.*")))


def of_last_run(path):
    """The lines of a log's last run, from the end of the run before it, without its steps."""
    lines = [line for line in lines_of(path) if " | Step " not in line]
    # What run.py says on every node, also after a run that has failed.
    appended = [n for n, line in enumerate(lines) if "to which this one is appended" in line]
    lines = lines[max(appended, default=0) :]
    starts = [n for n, line in enumerate(lines) if "] Run {" in line] or [0]
    before = enumerate(lines[: starts[-1]], 1)
    return lines[max((n for n, line in before if "] Cleanup complete" in line), default=0) :]


def of_processes(pattern, host, pids):
    """What processes of one node wrote with NCCL_DEBUG_FILE=`pattern`; None: nothing.

    By their ids, because earlier runs may have left files in the same folder.
    """
    pattern = pattern.replace("%h", host.partition(".")[0])
    paths = {pattern.replace("%p", str(pid)) for pid in pids}
    reader = Reader()
    reader.read_files(filter(Path.is_file, map(Path, sorted(paths))))
    return reader.finding() if reader.has_text else None
