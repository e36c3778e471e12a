"""Which network carried the bytes of a node, and figures in words: for the probe's lines and for
the report.
"""

from dataclasses import dataclass, field

from analysis import nccl

TITLES = {"infiniband": "InfiniBand", "roce": "RoCE", "efa": "EFA", "ipoib": "TCP over InfiniBand"}


def digits(value):
    """With three digits that count, and never as a power of ten: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value >= 1e-3 else "0"


def rate(gbps):
    """Gb/s as text, in Mb/s below 1 Gb/s."""
    return f"{digits(gbps)} Gb/s" if gbps >= 0.9995 else f"{digits(gbps * 1000)} Mb/s"


def ms(value):
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def megabytes(count):
    return f"{digits(count / 1e6)} MB"


@dataclass
class Network:
    """What carried the probe's all-reduces on one node."""

    host: str
    finding: dict  # what nccl.py reads in NCCL's text
    links: list = field(default_factory=list)  # interfaces or adapters, as kernel.difference()

    @property
    def names(self):
        return [link["name"] for link in self.links]

    @property
    def gbps(self):
        return sum(link.get("wire_Gbps") or 0 for link in self.links)

    @property
    def stated(self):
        rates = [link.get("speed_Gbps") for link in self.links]
        virtual = any(link.get("virtual") for link in self.links)
        return sum(rates) if rates and all(rates) and not virtual else None


def carriers(links, finding, host, size=lambda link: link.get("wire_Gbps") or 0):
    """Of the interfaces those that NCCL names, else those that carried most."""
    if finding.get("transport") == "local":
        return []
    devices = finding.get("devices_by_host", {}).get(host) or finding.get("devices", [])
    named = [*devices, *finding.get("interfaces", [])]
    own = [link for link in links if link["name"] in named]
    if own and any(map(size, own)):
        return own
    outside = [link for link in links if link.get("kind") != "loopback" and size(link)]
    most = max(map(size, outside), default=0)
    large = [link for link in outside if 2 * size(link) > most]
    # A bridge or a tunnel carries the same bytes as the hardware below it.
    return [link for link in large if not link.get("virtual")] or large[:1]


def nccl_words(finding):
    """NCCL's own, of which network it used; empty if it names none."""
    known = nccl.Finding.__dataclass_fields__
    found = nccl.Finding(**{name: each for name, each in (finding or {}).items() if name in known})
    if not found.decided:
        return ""
    text = f"by NCCL's text, {nccl.used(found)}"
    over = found.channels.get("network", 0)
    if over and found.transport != "sockets":
        text += f"; GPUDirect RDMA on {found.gpudirect} of {over} connections"
        text += f' ("{found.no_gpudirect}")' if found.no_gpudirect else ""
    return text
