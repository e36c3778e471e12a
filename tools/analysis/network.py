"""Which network carried the probe's all-reduces on a node: as NCCL says, else by the bytes."""

import math
from dataclasses import dataclass, field

# An interface with less than this share of what the all-reduces moved was not the link: it carried
# other traffic of the node, or the few messages by which the ranks find each other.
STRAY = 0.01
ADAPTERS = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA"}
TITLES = ADAPTERS | {"sockets": "TCP", "plugin": "a plugin's network"}


@dataclass
class Network:
    """What carried the probe's all-reduces on one node; rates in Gb/s, None: not known."""

    host: str  # empty: of the training, by NCCL's text in its own log
    transport: str  # infiniband, roce, efa, plugin, sockets, local (no network), or unknown
    finding: dict  # what nccl.py reads in NCCL's text
    names: list  # of the interfaces or adapters
    kind: str = ""
    members: list = field(default_factory=list)  # of a bond
    gbps: float | None = None  # measured, of all of them together, headers included
    stated: float | None = None
    virtual: bool = False  # no hardware states its rate
    adapter: str = ""  # under IP over InfiniBand

    @property
    def order(self):
        """The slowest first: a node that had to use sockets, then by stated rate, then by rate."""
        return self.transport in ADAPTERS, self.stated or math.inf, self.gbps or math.inf

    @property
    def listed(self):
        return ", ".join(self.names[:4] + ["..."][: len(self.names[4:])])

    @property
    def way(self):
        """TCP over eth0; TCP over bond0 (eth0 + eth1); TCP over ib0 (on mlx5_0:1)."""
        unnamed = "InfiniBand and RoCE" if self.names else "a network that NCCL does not name"
        title = TITLES.get(self.transport, unnamed)
        below = " + ".join(self.members) or (self.adapter and f"on {self.adapter}")
        where = f" over {self.listed}" if self.names else ""
        return title + where + (f" ({below})" if below else "")


def read_network(node, several, moved_gbps):
    """What carried the all-reduces on a node of the Probe: NCCL's text first, then the bytes.

    `several`: whether there is more than one node; `moved_gbps`: size over time of an all-reduce.
    """
    finding = node.get("nccl") or {}
    transport = finding.get("transport", "")
    seen = [link for link in node.get("interfaces", []) if wire_gbps(link) > STRAY * moved_gbps]
    # Within a node bytes cross no interface except loopback; nodes on one host use it too.
    inside = [link for link in seen if link.get("kind") == "loopback"]
    outside = [link for link in seen if link not in inside] if several else []
    rails = carriers(outside or inside, finding)
    kind = rails[0]["kind"] if rails else ""
    if transport not in (*TITLES, "local"):
        transport = kind if kind in ADAPTERS else "sockets" if rails else "unknown"
    names = [rail["name"] for rail in rails]
    if not rails:
        said = "interfaces" if transport == "sockets" else "devices"
        names = finding.get(said, [])
    network = Network(node.get("host", ""), transport, finding, names, kind)
    if rails:
        speeds = [rail.get("speed_Gbps") for rail in rails]
        network.gbps = sum(map(wire_gbps, rails))
        network.virtual = any(rail.get("virtual") for rail in rails)
        network.stated = sum(speeds) if all(speeds) and not network.virtual else None
        network.members = rails[0].get("members", [])
        network.adapter = rails[0].get("carrier", "")
    return network


def wire_gbps(link):
    return link.get("wire_Gbps") or 0.0


def carriers(seen, finding, size=wire_gbps):
    """Of the interfaces with traffic, those that carried the gradients, none of them twice."""
    transport = finding.get("transport")
    if transport == "local":
        return []
    adapters = [link for link in seen if link.get("kind", "") in ADAPTERS]
    others = [link for link in seen if link not in adapters]
    if transport == "sockets":
        seen = others
    elif transport in list(ADAPTERS):
        seen = adapters
    else:  # the bytes of IP over InfiniBand pass its adapter too
        over_ip = sum(size(link) for link in others if link.get("kind") == "ipoib")
        seen = others + [link for link in adapters if size(link) > 2 * over_ip]
    # Two may have shared the bytes; one with less carried other traffic, such as storage's.
    largest = max(map(size, seen), default=0)
    large = [link for link in seen if 2 * size(link) > largest]
    # A bridge, a tunnel or a port of Open vSwitch carries the same bytes as the hardware under it.
    real = [link for link in large if not link.get("virtual")]
    named = finding.get("interfaces", []) + finding.get("devices", [])
    own = [link for link in seen if link["name"] in named]
    if own and not (real and all(link.get("virtual") for link in own)):
        return own
    top = max(real or large, key=size, default={})
    if top.get("kind") == "other" or top.get("virtual"):
        return [top]
    return [link for link in real if link.get("kind") == top.get("kind")]
