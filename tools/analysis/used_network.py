"""Which network carried the probe's all-reduces on a node, and what to check where it was slow.

From the `nodes` of a Probe record: NCCL's own word first (what nccl_text.py found in its
debug text), else the bytes that interfaces and adapters carried meanwhile. For compare_logs.py.
"""

import math
import re
from dataclasses import dataclass, field

from analysis.nccl_rules import REASONS
from analysis.units import digits, rate
from common.records import get, objects
from common.thresholds import FAST_SOCKETS_GBPS

# --- what carried it ---------------------------------------------------------------------------

ADAPTERS = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}
TITLES = ADAPTERS | {"sockets": "TCP", "plugin": "a plugin's network"}


@dataclass
class UsedNetwork:
    """What carried the probe's all-reduces on one node; rates in Gb/s, None where not known."""

    host: str
    transport: str  # infiniband, roce, efa, plugin, sockets, local (no network), or unknown
    basis: str  # what says so: NCCL's word, or byte counters
    finding: dict = field(default_factory=dict)  # what nccl_text.py says of NCCL's text
    names: list = field(default_factory=list)  # of the interfaces or adapters
    kind: str = ""
    members: list = field(default_factory=list)  # of a bond
    gbps: float | None = None  # measured, of all of them together, headers included
    stated: float | None = None
    adapter: str = ""  # under IP over InfiniBand
    adapter_gbps: float | None = None  # stated

    @property
    def order(self):
        """The slowest first: where a node had to use sockets, then by rate."""
        return self.transport in ADAPTERS, math.inf if self.gbps is None else self.gbps

    @property
    def connections(self):
        """How many NCCL's text shows that leave the node."""
        return get(get(self.finding, "channels", dict), "network", int) or 0

    @property
    def shown(self):
        """eth0 (ethernet); None where no interface is known to have carried it."""
        more = ["..."] if len(self.names) > 4 else []
        names = ", ".join(self.names[:4] + more)
        kind = " of ".join(filter(None, [self.kind, " + ".join(self.members)]))
        kind += f" over {self.adapter}" if self.adapter else ""
        return f"{names} ({kind})" if kind else names or None

    @property
    def way(self):
        """TCP on eth0 (ethernet); RoCE on mlx5_0:1."""
        title = TITLES.get(self.transport, "a network that NCCL does not name")
        where = ", ".join(self.names) if self.transport in ADAPTERS else self.shown
        return f"{title} on {where}" if where else title


def used_network(node, several, least_gbps):
    """What carried the all-reduces on a node of the Probe: NCCL's word first, then the bytes."""
    finding = get(node, "nccl", dict)
    seen = [i for i in objects(node, "interfaces") if wire_gbps(i) > least_gbps]
    # Within a node bytes cross no interface but loopback; nodes that share one host use it too.
    inside = [i for i in seen if i.get("kind") == "loopback"]
    outside = [i for i in seen if i not in inside] if several else []
    rails = carriers(outside or inside, finding)
    network = UsedNetwork(
        get(node, "host", str), get(finding, "transport", str), "NCCL's word", finding
    )
    network.kind = get(rails[0], "kind", str) if rails else ""
    if network.transport not in (*TITLES, "local"):
        by_kind = network.kind if network.kind in ADAPTERS else "sockets" if rails else "unknown"
        network.transport, network.basis = by_kind, "byte counters"
    if not rails:
        said = "interfaces" if network.transport == "sockets" else "devices"
        network.names = [str(name) for name in get(finding, said, list)]
        return network
    network.names = [get(rail, "name", str) for rail in rails]
    network.gbps = sum(map(wire_gbps, rails))
    speeds = [get(rail, "speed_Gbps") for rail in rails]
    network.stated = sum(speeds) if all(speeds) else None
    network.members = [str(member) for member in get(rails[0], "members", list)]
    if network.kind == "ipoib":  # its stated speed is its adapter's, which may be left out
        adapter = adapter_under(rails[0], seen) or {}
        network.adapter = get(rails[0], "carrier", str) or get(adapter, "name", str)
        network.adapter_gbps = get(adapter, "speed_Gbps") or network.stated
    return network


def wire_gbps(interface):
    return get(interface, "wire_Gbps") or 0.0


def carriers(seen, finding):
    """Of the interfaces with traffic those that carried the gradients, none of them twice."""
    transport, named = finding.get("transport"), get(finding, "interfaces", list)
    if transport == "local":
        return []
    if transport == "sockets":
        seen = [i for i in seen if i.get("kind") not in list(ADAPTERS)]
        seen = [i for i in seen if i.get("name") in named] or seen
    elif transport in list(ADAPTERS):
        seen = [i for i in seen if i.get("kind") in list(ADAPTERS)]
    else:  # the bytes of IP over InfiniBand pass the adapter too
        twice = [adapter_under(i, seen) for i in seen if i.get("kind") == "ipoib"]
        seen = [i for i in seen if i not in twice]
    top = max(seen, key=wire_gbps, default={})
    # Adapters work together, and so do interfaces that NCCL names; else a bridge or tunnel and
    # what is under it would count twice.
    together = get(top, "kind", str) in ADAPTERS or top.get("name") in named
    return [i for i in seen if i is top or (together and i.get("kind") == top.get("kind"))]


def adapter_under(interface, seen):
    """The adapter most of whose bytes are those of an IPoIB interface, or None."""
    for adapter in seen:
        above = get(interface, "carrier", str) in ("", adapter.get("name"))
        most = wire_gbps(interface) > wire_gbps(adapter) / 2
        if adapter.get("kind") == "infiniband" and above and most:
            return adapter
    return None


def say_fallback(network):
    """That a faster network was asked for and sockets were used, and why; None if not so."""
    lines = {str(p.get("id")): get(p, "line", str) for p in objects(network.finding, "problems")}
    asked = lines.get("fell_back_to_sockets")
    if asked is None:
        return None
    what = "InfiniBand" if "IB" in asked else "A faster network"
    where = ", ".join(network.names) or "an interface that it does not name"
    cause = next((lines[reason] for reason in REASONS if reason in lines), "")
    said = re.split("NCCL (?:INFO|WARN) ", cause)[-1].strip()
    why = f'because NCCL says "{said}"' if said else "and its text does not say why"
    return f"{what} was asked for; NCCL used sockets over {where}, {why}."


# --- what to check where it was slow -----------------------------------------------------------

# Of a link well below its stated speed, by what carried the bytes.
PORT = "the port: `ibstat {device}` should show State Active, Rate {gbps}"
BANDWIDTH = (
    "the link alone: `ib_write_bw -d {device} --report_gbits`, then with PEER on the other node: "
    "near {gbps} Gb/s from host memory clears {what}"
)
GPUDIRECT = (
    "GPUDirect: nvidia-peermem loaded, or DMA-BUF; adapters near their GPU (`nvidia-smi topo -m`)"
)
LOCKED = "locked memory: `ulimit -l` in the job itself should say unlimited"
MEMORY = [GPUDIRECT, LOCKED]
ROCE_LOSSES = (
    "what is lost: `rdma statistic show link {link}` (out_of_sequence, packet_seq_err, "
    "local_ack_timeout_err), `ethtool -S` of its interface (discards, pauses), the switch's own"
)
SLOW_LINK = {
    "infiniband": [
        f"{PORT}; one bad lane lowers it",
        BANDWIDTH.replace("{what}", "the link, not the way from GPU to adapter"),
        *MEMORY,
    ],
    "roce": [
        ROCE_LOSSES,
        "a lossless path: PFC for one class on adapters and switch, that of NCCL_IB_TC, with ECN",
        BANDWIDTH.replace("{what}", "adapter and cable, not the switch under load"),
        PORT,
        "the GID: NCCL_IB_GID_INDEX, where set, a RoCE v2 entry of this network (`show_gids`)",
        *MEMORY,
    ],
    "efa": [
        "the adapters: `fi_info -p efa` on each node should list all of them",
        "the security group: all traffic from and to itself allowed",
        *MEMORY,
    ],
    "sockets": [
        "the negotiated speed: the switch's ports, `ethtool {name} | grep Speed` on both nodes",
        "the interface: NETWORK= and IFNAME= of launch_multinode.sh keep the traffic on one",
        "an overlay, tunnel, bridge or shaper: `ip route get PEER`, `tc qdisc show dev {name}`",
        "the link without training: `iperf3 -c PEER` should show {tcp}",
    ],
    "ipoib": [
        "if it has to be IP, IPoIB's mode: `cat /sys/class/net/{name}/mode`; connected, where "
        "the driver has it, takes an MTU of 65520",
        "the link without training: `iperf3 -P 8 -c PEER`",
    ],
}
MORE_CONNECTIONS = {
    "nccl": "NCCL's threads: NCCL_SOCKET_NTHREADS=4, NCCL_NSOCKS_PERTHREAD=4 (at most 64 in all)",
    "gloo": "Gloo has one connection a pair of ranks: more processes a node; try `iperf3 -P 8`",
}
BOND = "a bond sends a connection over one member: more connections, hashed by layer3+4"


def what_nccl_shows(network):
    """The checks that NCCL's own text has answered: it used the adapters, and how."""
    direct = get(network.finding, "gpudirect", int)
    off = any(p.get("id") == "gpudirect_off" for p in objects(network.finding, "problems"))
    shown = [LOCKED] if network.connections else []
    all_direct = network.connections and direct == network.connections
    return shown + ([GPUDIRECT] if all_direct or off else [])


def slow_link_checks(network, stated, tcp, backend):
    """For a link that ran well below the `stated` Gb/s; TCP could have `tcp`."""
    if not network or not network.names:
        network = UsedNetwork("", "sockets", "", names=["IFNAME"])
    sockets = network.transport not in ADAPTERS
    kind = network.transport if not sockets else "ipoib" if network.adapter else "sockets"
    known = what_nccl_shows(network)
    checks = [text for text in SLOW_LINK[kind] if text not in known]
    if sockets and stated >= FAST_SOCKETS_GBPS and backend in MORE_CONNECTIONS:
        # Over InfiniBand these are for who has to stay with IP.
        checks.insert(0 if kind == "sockets" else len(checks), MORE_CONNECTIONS[backend])
    if network.members:
        checks.insert(0, BOND)
    facts = {
        "name": network.names[0],
        "device": network.names[0].partition(":")[0],
        "link": network.names[0].replace(":", "/"),
        "gbps": digits(stated / len(network.names)),
        "tcp": rate(tcp),
    }
    return [text.format(**facts) for text in checks]
