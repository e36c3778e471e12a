"""What NCCL prints of networks and failures, what follows from it, and what to do.

tests/nccl_formats.txt has each message as the sources of NCCL, torch and RCCL have it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A message that says something: `literal` finds its lines fast, `pattern` takes it apart.

    Where the literal says it all, it is the pattern. `Reader` notes the first line of each problem
    and of each rule without one; what else a message says its method `on_NAME` takes.
    """

    name: str
    literal: str
    pattern: re.Pattern
    problem: str = ""


def rule(name: str, literal: str, pattern: str = "", problem: str = "") -> Rule:
    return Rule(name, literal, re.compile(pattern or re.escape(literal)), problem)


NAMES = "NCCL_IB_HCA|NCCL_IB_DISABLE|NCCL_NET_PLUGIN|NCCL_NET"
RULES = (
    rule(
        "version",
        "CCL version",
        # Not in "was compiled with NCCL version", "library version" or "version mismatch".
        r"(?<!with N)CCL version(?: :)? (\d+\.\d+\.\d+\w*)((?:\+(?:cuda|hip)\d+(?:\.\d+)+)?)"
        r"(?=[\s,;:)-]|$)",
    ),
    rule("nodes", " nNodes ", r"rank \d+ nRanks \d+ nNodes (\d+) localRanks"),
    rule(
        "network_channel",
        "via NET/",
        r"via NET/([^/]+)/(\d+)",  # the name of a network may hold spaces
    ),
    rule("local_channel", " via ", r" via (P2P/MNNVL|P2P/|SHM/|direct shared memory)"),
    rule(
        "using_network",
        "Using ",
        # To the end of the line, or of the string that a collector or an author made of it.
        r'Using (?:network|internal Network|external Network) ([^"`\\\r\n]+)',
    ),
    rule("plugin_assigned", "Assigned NET plugin ", r"Assigned NET plugin (.+?) to comm"),
    rule(
        "plugin_initialized", "Initialized NET plugin ", r'Initialized NET plugin ([^"`\\\r\n]+)'
    ),
    rule("adapters", "NET/IB : Using", r"NET/IB : Using((?: ?\[\d+\](?:=\{[^}]*\}?|[^\s;]+))+)"),
    rule("adapter", "NET/IB: [", r"NET/IB: \[(\d+)\] ([^\s:]+:)(?:\w+:)?(\d+)/(IB|RoCE)\b"),
    rule("sockets", "NET/Socket : Using", r"NET/Socket : Using((?: ?\[\d+\]\S+)+)"),
    rule("socket_interface", "NET : Using interface ", r"NET : Using interface ([^\s:]+):\S"),
    rule("provider", "NET/OFI Selected ", r"NET/OFI Selected [Pp]rovider is (\w+)(?=[ ,*]|$)"),
    rule(
        "wish",
        "NCCL_",
        # NCCL's own words, or a line of the environment, or an entry of a record in JSON.
        rf"\b({NAMES}) set (?:by environment )?to ([^\s\"]+)"
        rf"|(?:^|[\]:>|)] )\s*(?:export |declare -x )?({NAMES})=\"?([^\s\"]+)"
        rf"|\"({NAMES})\": \"([^\"]+)\"",
    ),
    rule(
        "plugin_asked",
        "Plugin name set by env to ",
        r"(?<!TUNER/Plugin: )(?<!PROFILER/Plugin: )Plugin name set by env to (\S+)",
    ),
    rule(
        "plugin_not_loaded",
        "NET/Plugin",
        r"NET/Plugin ?: (?:Plugin load(?: \([^)]*\))? returned -?\d+ : |dlerror=|(?=\S+: ))(.+)",
    ),
    rule("plugin_not_found", "NET/Plugin: Could not find:"),
    rule(
        "plugin_not_initialized",
        "Failed to initialize NET plugin ",
        # NCCL's own two fail for reasons that have problems of their own.
        r"Failed to initialize NET plugin (?!(?:IB|Socket)\b)\S",
        "plugin_failed",
    ),
    rule(
        "plugin_unsupported",
        "External network plugin ",
        r"External network plugin .+ is unsupported",
        "plugin_failed",
    ),
    rule("plugin_symbol", "Failed to find ncclNetPlugin symbol (", problem="plugin_failed"),
    rule("plugin_ofi", "NET/OFI", r"NET/OFI .*initialization failed", "plugin_failed"),
    rule("no_ib_device", "NET/IB : No device found.", problem="no_ib_device"),
    # Seen in a log of 2.3.7, not in its source.
    rule("no_devices", "call to devices() returned 0 devices", problem="no_ib_device"),
    rule(
        "verbs_library",
        "libibverbs.so",
        # The plain name is tried first and alone proves nothing.
        r"Failed to open libibverbs\.so\[\.1\]|Cou(?:nt|ld) not open libibverbs\.so\.1\b",
        "verbs_library_missing",
    ),
    rule(
        "memlock",
        "Cannot allocate memory",
        r"Call to ibv_\w+ failed with error Cannot allocate memory",
        "memlock",
    ),
    rule(
        "no_such_network", "Error: network ", r"Error: network .+ not found\.", "network_not_found"
    ),
    rule("no_network", "Failed to initialize any NET plugin", problem="network_not_found"),
    rule(
        "gpudirect_of_adapter",
        "GPU Direct RDMA Disabled for HCA ",
        r"NET/(?!Socket )[^/]+ : GPU Direct RDMA Disabled for HCA \d",
    ),
    rule(
        "gpudirect_of_pair",
        "GPU Direct RDMA Disabled for GPU",
        r"(?<!NET/Socket : )GPU Direct RDMA Disabled for GPU[ /]",
    ),
    rule(
        "peer",
        "Got completion ",
        # 12 is IBV_WC_RETRY_EXC_ERR; 5, flushed, only follows another error.
        r"Got completion .*(?:error |status=)(?:12\b|\w+\(12\)|\(\w+\)12\b)",
        "peer_unreachable",
    ),
    rule(
        "connect_failed",
        "onnect",
        r"[Cc]onnect to \S+ (?:failed : |returned -?\d+\()|PollConnect to \S+ failed with error "
        r"|Call to connect timeout : ",
        "connection_failed",
    ),
    rule("connection_lost", "Connection closed by remote peer", problem="connection_failed"),
    rule(
        "receive_failed",
        "Call to ",
        r"Call to (?:recv(?: from \S+)?|send to \S+) failed : ",
        "connection_failed",
    ),
    rule(
        "retries_exceeded",
        "exceeded ",
        r"exceeded (?:retries|timeouts|error retry count)\b",
        "connection_failed",
    ),
    rule(
        "no_interface",
        "nterface found",
        r"no socket interface found|NET/Socket : no interface found"
        r"|NET/IB : No IP interface found\.|No usable listening interface found"
        r"|No interface found in the same subnet as remote address",
        "no_interface",
    ),
    rule(
        "no_start_up_device",
        "no device found ",
        r"no device found (?:matching|after excluding) .*NCCL_OOB_NET_IFNAME",
        "no_interface",
    ),
    rule(
        "speed_change",
        "speed change detected",
        r"NET/IB : .*speed change detected: ",
        "link_renegotiated",
    ),
    rule(
        "port_event",
        "async ",
        r"async (?:fatal |error )?event\b.*\bport (?:error|active)",
        "link_renegotiated",
    ),
    rule("rank_twice", " ranks has already checked in", problem="rank_twice"),
    rule("timeout", "Some NCCL operations have failed or timed out", problem="timeout"),
    rule("watchdog", "Watchdog caught collective operation timeout", problem="timeout"),
    rule(
        "aborted",
        "bort",
        r"NCCL communicator was aborted|\bAbort (?:START|COMPLETE)\b|\bis in abort state",
        "aborted",
    ),
)

# What to do, in the order in which findings are told: causes before what follows from them.
ADVICE = {
    "no_ib_device": "NCCL sees no adapter that it may use: in a container, is /dev/infiniband in "
    "it? Then ibv_devinfo, which looks as NCCL does (libibverbs and its providers), NCCL_IB_HCA",
    "verbs_library_missing": "install libibverbs (rdma-core) where the job runs, "
    "in a container inside it",
    "memlock": "RDMA pins memory: raise the limit of locked memory (ulimit -l unlimited) "
    "in the job itself, not in a login shell",
    "plugin_failed": "the network plugin could not be used: check its path, its own libraries and "
    "that it fits this NCCL; NCCL_NET_PLUGIN=none does without it",
    "network_not_found": "NCCL_NET names a network that is not there, or none could start: "
    "unset NCCL_NET, or mend that network",
    "fell_back_to_sockets": "the faster network was asked for and TCP was used: "
    "see the other findings, or NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
    "gpudirect_off": "data passes through host memory: modprobe nvidia-peermem on each "
    "node (lsmod shows nvidia_peermem) or DMA-BUF; nvidia-smi topo -m shows whether adapters are "
    "near the GPUs",
    "no_interface": "no IP interface was left: check NCCL_SOCKET_IFNAME and NCCL_OOB_NET_IFNAME "
    "against ip addr on each node",
    "suspect_interface": "this interface seldom joins nodes: set NCCL_SOCKET_IFNAME to the one "
    "that does",
    "rank_twice": "two processes have the same rank: give each node another node rank",
    "peer_unreachable": "the other end did not answer: check cable, switch, routes and firewall, "
    "on RoCE the GID index, between these two nodes",
    "connection_failed": "look at the other end first: it may have failed before; "
    "else a firewall or the wrong interface",
    "link_renegotiated": "a link changed its state or speed during the job: "
    "check cable, transceiver and switch port",
    "timeout": "some rank did not come: look for the rank that failed or stands still, "
    "NCCL itself waits for ever",
    "aborted": "the communicator was given up because of an earlier error: "
    "look for the first error of any rank",
}
# Of these: why no faster network was used, the most telling first.
REASONS = ("verbs_library_missing", "no_ib_device", "plugin_failed", "network_not_found")

# A name that ends where the text was cut may be half a name, but for these; and the beginning of
# one of these is half a name wherever it stands.
KNOWN_NAMES = re.compile(r"Socket|IB|IBext(?:_v\d+)?|(?:AWS )?Libfabric|NCCL RDMA Plugin v\d+")
BEGINNINGS = ("Socket", "IB", "Libfabric", "AWS Libfabric", "NCCL RDMA Plugin v")
# Networks of plugins that drive the adapters of the NET/IB list.
OVER_ADAPTERS = re.compile(r"IB|IBext.*|NCCL RDMA Plugin v.*")
SUSPECT_INTERFACES = ("lo", "docker*", "veth*", "br-*", "virbr*", "tailscale*")
UNREACHABLE = re.compile(r"No route to host|Network is unreachable|Connection timed out")
# The slowest first: where ranks differ, it sets the pace.
SLOWEST = ("sockets", "plugin", "unknown", "efa", "roce", "infiniband")
