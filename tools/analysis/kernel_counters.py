"""The kernel's counters of this node's interfaces and adapters: bytes, errors, what lies below.

The figures are those of all traffic of the node, whoever caused it; a Mac has none. All bytes are
bytes here, whatever unit the kernel counts in. A port of an adapter is named as NCCL does,
mlx5_0:1. With RoCE it counts RDMA alone, and its Ethernet interface lacks those bytes. kind:
ethernet, infiniband, roce, efa, ipoib, loopback, other. virtual: no hardware states its speed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

# Where the kernel shows its devices. Tests give another folder.
SYSFS = Path(os.environ.get("SYSFS_ROOT") or "/sys")
KINDS = {1: "ethernet", 32: "ipoib", 772: "loopback"}  # linux/if_arp.h
LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}  # EFA has neither word
# Drivers of virtual machines' interfaces, which state any rate; vif: Xen's.
PARAVIRTUAL = {"virtio_net", "vmxnet3", "hv_netvsc", "vif"}
REFRESH_S = 1.1  # the drivers bnxt_en, tg3 and atlantic count once a second
ERRORS = [  # files of an interface or of an adapter's port that stand still on a healthy link
    "carrier_changes",
    "statistics/rx_errors",
    "statistics/tx_errors",
    "statistics/tx_dropped",
    "counters/link_downed",
    "counters/symbol_error",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence",
]
# These also move on a healthy link: waits for credit, RoCE's notifications of congestion.
CONGESTION = ["counters/port_xmit_wait", "hw_counters/np_cnp_sent", "hw_counters/rp_cnp_handled"]


# --- Reading -------------------------------------------------------------------------------------


def read_counters(sysfs: Path = SYSFS) -> dict:
    """What the kernel has counted so far: {"interfaces": {name: facts}, "tcp": {...} or None}."""
    nets = [path for path in sorted(sysfs.glob("class/net/*")) if path.is_dir()]
    found = {net.name: read_interface(net) for net in nets}
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        found[f"{port.parent.parent.name}:{port.name}"] = read_port(port)
    for net in nets:
        judge_speed(net, found)
    return {"interfaces": found, "tcp": read_tcp(text_of(Path("/proc/net/snmp")))}


def settled_counters(sysfs: Path = SYSFS) -> dict:
    """read_counters() when all that was sent before is counted."""
    counted = read_counters(sysfs)
    if all("virtual" in facts for facts in counted["interfaces"].values()):  # no driver is late
        return counted
    time.sleep(REFRESH_S)
    return read_counters(sysfs)


def judge_speed(net: Path, found: dict) -> float:
    """What hardware states that carries an interface's bytes, in Gb/s; 0: none.

    A bridge states its fastest port's speed, whatever it is, and a bond no more than is active:
    so the smaller of its own and the sum of those below it.
    """
    facts = found[net.name]
    own = facts["speed_Gbps"] or 0
    driver = (net / "device/driver").resolve().name
    if (net / "device").exists() and driver not in PARAVIRTUAL:
        return own
    below = sum(judge_speed(net.parent / name, found) for name in facts["below"] if name in found)
    if below:
        facts["speed_Gbps"] = min(own or below, below)
        return facts["speed_Gbps"]
    facts["virtual"] = True
    return 0.0


def read_tcp(snmp: str) -> dict | None:
    """What TCP sent: the file has a line of names and a line of values."""
    lines = [line.split() for line in snmp.splitlines() if line.startswith("Tcp:")]
    with contextlib.suppress(ValueError, KeyError):  # another kernel
        names, values = lines
        counts = dict(zip(names, values, strict=True))
        return {"segments": int(counts["OutSegs"]), "retransmits": int(counts["RetransSegs"])}
    return None


def read_interface(net: Path) -> dict:
    """Facts of a folder of /sys/class/net. below: what counts its bytes as well."""
    facts = {
        "kind": KINDS.get(number(net / "type"), "other"),
        "speed_Gbps": number(net / "speed") / 1000 or None,
        "tx_bytes": int(number(net / "statistics/tx_bytes")),
        "rx_bytes": int(number(net / "statistics/rx_bytes")),
        "below": [path.name.removeprefix("lower_") for path in sorted(net.glob("lower_*"))],
        "errors": read_errors(net),
    }
    if (net / "bonding").is_dir():
        facts["members"] = facts["below"]
    adapter = next((net / "device/infiniband").glob("*"), None)
    if facts["kind"] == "ipoib" and adapter:
        port = adapter / f"ports/{number(net / 'dev_port') + 1:.0f}"
        facts["carrier"] = f"{adapter.name}:{port.name}"
        facts["below"] = [facts["carrier"]]
        facts["speed_Gbps"] = number(port / "rate") or None
        facts["errors"] |= read_errors(port)
    return facts


def read_port(port: Path) -> dict:
    """Facts of a folder of /sys/class/infiniband/*/ports."""
    # In words of 4 bytes; EFA has another file, in bytes.
    sent = 4 * number(port / "counters/port_xmit_data") or number(port / "hw_counters/tx_bytes")
    received = 4 * number(port / "counters/port_rcv_data") or number(port / "hw_counters/rx_bytes")
    return {
        "kind": LINK_LAYERS.get(text_of(port / "link_layer"), "efa"),
        "speed_Gbps": number(port / "rate") or None,
        "tx_bytes": int(sent),
        "rx_bytes": int(received),
        "below": [],
        "errors": read_errors(port),
    }


def read_errors(folder: Path) -> dict[str, int]:
    """Those that were ever counted."""
    counts = {path.split("/")[-1]: int(number(folder / path)) for path in ERRORS + CONGESTION}
    return {name: count for name, count in counts.items() if count}


def number(path: Path) -> float:
    """The number that a file begins with; 0 where there is none or it is negative."""
    with contextlib.suppress(ValueError, IndexError):  # an interface without a cable has speed -1
        return max(0.0, float(text_of(path).split()[0]))
    return 0.0


def text_of(path: Path) -> str:
    """A file's text; empty where it cannot be read, which for a counter is normal."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


# --- Between two readings ------------------------------------------------------------------------


def difference(before: dict, after: dict) -> dict:
    """What was carried from one reading to the other, the busiest interface first, and TCP's part.

    What lies below a bond, a bridge, a VLAN or IP over InfiniBand is left out, unless it carried
    over twice as much for itself.
    """
    old, new = before["interfaces"], after["interfaces"]
    links = {name: added(old[name], new[name]) for name in new if name in old}
    found = []
    for name, link in links.items():
        above = sum(traffic(upper) for upper in links.values() if name in upper["below"])
        if traffic(link) > 2 * above:
            entry = {"name": name} | link
            found.append({key: fact for key, fact in entry.items() if fact not in ({}, [])})
    carried: dict = {"interfaces": sorted(found, key=traffic, reverse=True)}
    if before["tcp"] and after["tcp"]:
        carried["tcp"] = {key: after["tcp"][key] - before["tcp"][key] for key in after["tcp"]}
    return carried


def added(then: dict, now: dict) -> dict:
    """An interface's facts with what was added; a counter that was reset has added nothing."""
    more = {way: max(0, now[way] - then[way]) for way in ("tx_bytes", "rx_bytes")}
    return now | more | {"errors": Counter(now["errors"]) - Counter(then["errors"])}


def traffic(link: dict) -> int:
    return link["tx_bytes"] + link["rx_bytes"]
