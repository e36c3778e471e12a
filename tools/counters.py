"""What this node's network interfaces and InfiniBand ports have sent and received, in bytes.

    before = read_counters()
    ...
    carried = difference(before, read_counters())

The figures are the kernel's own (/sys/class/net, /sys/class/infiniband): all traffic of the node,
whoever caused it. Where there is no /sys, as on a Mac, nothing is found and nothing is reported.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

KINDS = {1: "ethernet", 32: "ipoib", 772: "loopback"}  # linux/if_arp.h


def number(path: Path) -> float:
    """The number that a file begins with; 0 where there is none or it is negative."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # down, it states no speed
        return max(0, float(path.read_text().split()[0]))
    return 0


def read_counters(root: str | Path = "/sys/class") -> dict[str, tuple[str, float, float, float]]:
    """{interface: (kind, stated Gb/s or 0, bytes sent, bytes received)} of this node."""
    found = {}
    for net in Path(root).glob("net/*"):
        kind = KINDS.get(number(net / "type"), "other")
        sent, received = (number(net / f"statistics/{way}_bytes") for way in ("tx", "rx"))
        found[net.name] = (kind, number(net / "speed") / 1e3, sent, received)
    for port in Path(root).glob("infiniband/*/ports/*"):
        # These count words of 4 bytes.
        sent, received = (4 * number(port / f"counters/port_{w}_data") for w in ("xmit", "rcv"))
        found[f"{port.parts[-3]}:{port.name}"] = (
            "infiniband",
            number(port / "rate"),
            sent,
            received,
        )
    return found


def difference(before: dict, after: dict) -> list[dict]:
    """What each interface carried between two readings, the busiest first, the idle left out.

    An interface that was not there before is left out too: nobody knows what it had counted.
    """
    carried = [
        {
            "name": name,
            "kind": kind,
            "speed_Gbps": speed or None,
            "tx_bytes": int(sent - before[name][2]),
            "rx_bytes": int(received - before[name][3]),
        }
        for name, (kind, speed, sent, received) in after.items()
        if name in before
    ]
    carried.sort(key=lambda interface: -interface["tx_bytes"] - interface["rx_bytes"])
    return [interface for interface in carried if interface["tx_bytes"] + interface["rx_bytes"]]


def in_words(links: list[dict]) -> str:
    """What a node sent and received, on each interface that carried 1 % of the busiest or more."""
    sums = [link["tx_bytes"] + link["rx_bytes"] for link in links]
    busy = [link for link, total in zip(links, sums, strict=True) if total >= 0.01 * max(sums)]
    return "; ".join(
        f"sent {size(link['tx_bytes'])} and received {size(link['rx_bytes'])} "
        f"on {link['name']} ({link['kind']})"
        for link in busy
    )


def size(count: float) -> str:
    """Of bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
