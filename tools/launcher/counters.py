"""What this node's interfaces and RDMA adapters carried, and what went wrong on them meanwhile.

    before = read_counters()
    ...
    carried = difference(before, read_counters())  # {"interfaces": [...], "tcp": {...}}

The figures are the kernel's own (/sys/class/net, /sys/class/infiniband, /proc/net/snmp): all
traffic of the node, whoever caused it. A file that is not there is normal, and what it would have
said is left out: on a Mac, which has none of them, there is nothing to report. In a record:
    interfaces  the busiest first, the idle left out; of each {name, kind, speed_Gbps (stated, or
                null), tx_bytes, rx_bytes}, and where there is such a thing carrier (of an IP
                interface over InfiniBand: its adapter's port), members (of a bond) and errors
                {name of the kernel's file: how many more}
    tcp         {segments, retransmits} that this node sent, of all connections
kind: ethernet, infiniband, roce (RDMA over Ethernet), efa, ipoib, loopback, other. An adapter's
port is named as NCCL does, mlx5_0:1. Of RoCE it counts RDMA alone, and the Ethernet interface of
that port lacks those bytes.

Each byte stands once. A bond stands for its members; IP over InfiniBand, a VLAN or a bridge keeps
what it counted, and what lies below it has the rest. What a tunnel of other kinds carries is
counted on the interface that its packets leave by as well: the kernel does not tell which.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from common.thresholds import HARMLESS, LOSSY

KINDS = {1: "ethernet", 32: "ipoib", 772: "loopback"}  # linux/if_arp.h
LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}
WAYS = ("tx_bytes", "rx_bytes")
NET_ERRORS = ["carrier_changes"]
NET_ERRORS += [
    f"statistics/{way}_{what}" for way in ("rx", "tx") for what in ("dropped", "errors")
]
PORT_ERRORS = [
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence",
    "hw_counters/rx_drops",
    "counters/port_xmit_wait",
    "counters/link_downed",
    "counters/symbol_error",
]
BUSY = 0.01  # what carried less than this part of what was sent and received does not count
RAIL = 0.25  # of the busiest: rails of one network carry about the same
# What lies below another interface counts headers of its own, and TCP's once for each packet.
HEADERS = 0.1


# --- Reading -----------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    """A small file's text; empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def number(path: Path) -> float:
    """The number that a file begins with; 0 where there is none or it is negative."""
    with contextlib.suppress(ValueError, IndexError):  # down, an interface states no speed
        return max(0.0, float(text_of(path).split()[0]))
    return 0.0


def errors(folder: Path, names: list[str]) -> dict[str, float]:
    return {name.rpartition("/")[2]: number(folder / name) for name in names}


def read_counters(root: str | Path = "/") -> dict:
    """What the kernel has counted so far: {"interfaces": {name: facts}, "tcp": {...} or None}."""
    classes = Path(root, "sys/class")
    found = {net.name: read_interface(net) for net in sorted(classes.glob("net/*"))}
    for port in sorted(classes.glob("infiniband/*/ports/*")):
        found[f"{port.parts[-3]}:{port.name}"] = adapter_port(port)
    for facts in found.values():
        if "carrier" in facts and not facts["speed_Gbps"] and facts["carrier"] in found:
            facts["speed_Gbps"] = found[facts["carrier"]]["speed_Gbps"]
    return {"interfaces": found, "tcp": tcp_segments(Path(root, "proc/net/snmp"))}


def read_interface(net: Path) -> dict:
    """Of a folder of /sys/class/net. below: what lies under it and counts its bytes too."""
    kind = KINDS.get(number(net / "type"), "other")
    facts = {"kind": kind, "speed_Gbps": number(net / "speed") / 1e3 or None}
    facts |= {way: number(net / "statistics" / way) for way in WAYS}
    facts["errors"] = errors(net, NET_ERRORS)
    facts["below"] = [lower.name.removeprefix("lower_") for lower in net.glob("lower_*")]
    if members := text_of(net / "bonding/slaves").split():
        facts["members"] = facts["below"] = members
    adapter = next((net / "device/infiniband").glob("*"), None)
    if kind == "ipoib" and adapter:
        facts["carrier"] = f"{adapter.name}:{number(net / 'dev_port') + 1:.0f}"
        facts["below"] = [facts["carrier"]]
    own, other = number(net / "ifindex"), number(net / "iflink")
    facts["ends"] = [own, other] if 0 < own != other > 0 else []  # of a veth, or on another one
    return facts


def adapter_port(port: Path) -> dict:
    """Of a folder of /sys/class/infiniband/*/ports."""
    folders = [port / "hw_counters", port.parent.parent / "hw_counters"]
    # Words of 4 bytes in counters/; EFA and some RoCE adapters have bytes in hw_counters/ instead.
    own = {way: max(number(folder / way) for folder in folders) for way in WAYS}
    neither = "efa" if any((folder / "tx_bytes").exists() for folder in folders) else "other"
    return {
        "kind": LINK_LAYERS.get(text_of(port / "link_layer"), neither),
        "speed_Gbps": number(port / "rate") or None,
        "tx_bytes": 4 * number(port / "counters/port_xmit_data") or own["tx_bytes"],
        "rx_bytes": 4 * number(port / "counters/port_rcv_data") or own["rx_bytes"],
        "errors": errors(port, PORT_ERRORS),
        "below": [],
        "ends": [],
    }


def tcp_segments(snmp: Path) -> dict | None:
    """What TCP sent: a line of names and a line of values."""
    lines = [line.split() for line in text_of(snmp).splitlines() if line.startswith("Tcp:")]
    with contextlib.suppress(ValueError, KeyError):
        names, values = lines
        found = dict(zip(names, values, strict=True))
        return {"segments": int(found["OutSegs"]), "retransmits": int(found["RetransSegs"])}
    return None


# --- Between two readings ----------------------------------------------------------------------


def difference(before: dict, after: dict) -> dict:
    """What was carried between two readings, as in a record.

    An interface that was not there before is left out: nobody knows what it had counted.
    """
    old, new = before["interfaces"], after["interfaces"]
    entries = {name: change(old[name], new[name]) for name in new if name in old}
    kept = counted_once(entries)
    found = []
    for name, entry in kept.items():
        reported = {"name": name, "kind": entry["kind"], "speed_Gbps": entry["speed_Gbps"]}
        reported |= {way: entry[way] for way in WAYS}
        reported |= {key: entry[key] for key in ("carrier", "members") if key in entry}
        if wrong := errors_of(name, entries, kept):
            reported["errors"] = wrong
        found.append(reported)
    carried = {"interfaces": sorted(found, key=traffic, reverse=True)}
    if before["tcp"] and after["tcp"]:
        carried["tcp"] = {name: after["tcp"][name] - before["tcp"][name] for name in after["tcp"]}
    return carried


def traffic(entry: dict) -> int:
    return entry["tx_bytes"] + entry["rx_bytes"]


def change(then: dict, now: dict) -> dict:
    """The facts of one interface with what was added; an adapter that was reset added nothing."""
    added = {way: max(0, int(now[way] - then[way])) for way in WAYS}
    wrong = {name: int(count - then["errors"][name]) for name, count in now["errors"].items()}
    return now | added | {"errors": {name: count for name, count in wrong.items() if count > 0}}


def counted_once(entries: dict[str, dict]) -> dict[str, dict]:
    """Those that carried something, without what one above them has counted as well."""
    left = {name: dict(entry) for name, entry in entries.items()}
    for upper in entries.values():
        for way in WAYS:
            rest, below = upper[way], [name for name in upper["below"] if name in entries]
            for name in sorted(below, key=lambda name: -entries[name][way]):
                taken = min(rest, left[name][way])
                left[name][way] -= taken
                rest -= taken
    return {
        name: entry
        for name, entry in left.items()
        if not any(name in upper.get("members", ()) for upper in entries.values())
        and traffic(entry) > HEADERS * traffic(entries[name])
        and not passes_on(name, entries)
        and not is_other_end(name, entries)
    }


def is_veth(entry: dict) -> bool:
    return bool(entry["ends"]) and not entry["below"]


def passes_on(name: str, entries: dict[str, dict]) -> bool:
    """Whether it is a veth on a bridge that has a port of another kind, where its bytes go on."""
    bridges = [upper["below"] for upper in entries.values() if name in upper["below"]]
    others = [entries[port] for ports in bridges for port in ports if port in entries]
    return is_veth(entries[name]) and not all(map(is_veth, others))


def is_other_end(name: str, entries: dict[str, dict]) -> bool:
    """Whether it is a veth whose other end is here too, and the one of them to leave out.

    NOTE: an index is of one network namespace: the other end may be in another one, under the
    index of a stranger here; so what they carried has to agree as well.
    """
    entry = entries[name]
    for other, facts in entries.items():
        if is_veth(entry) and facts["ends"] == entry["ends"][::-1]:
            pairs = [
                (entry["tx_bytes"], facts["rx_bytes"]),
                (entry["rx_bytes"], facts["tx_bytes"]),
            ]
            if all(abs(a - b) <= BUSY * max(a, b) for a, b in pairs):
                return name > other
    return False


def errors_of(name: str, entries: dict[str, dict], kept: dict[str, dict]) -> dict[str, int]:
    """Its own, and those of what lies below it and is not named itself."""
    found: Counter[str] = Counter()
    for lower in entries[name]["below"]:
        if lower in entries and lower not in kept:
            found.update(errors_of(lower, entries, kept))
    return dict(found) | entries[name]["errors"]


# --- For people --------------------------------------------------------------------------------


def describe_traffic(carried: dict) -> str:
    """What a node sent and received, rails of one network added up, and what went wrong."""
    said = []
    for rails in groups(busy(carried["interfaces"]), traffic):
        sent, received = (size(sum(entry[way] for entry in rails)) for way in WAYS)
        said.append(f"sent {sent} and received {received} on {names(rails)}")
    return "; ".join([*said, *went_wrong(carried)])


def busy(entries: list[dict]) -> list[dict]:
    least = BUSY * sum(map(traffic, entries))
    return [entry for entry in entries if traffic(entry) >= least]


def groups(entries: list[dict], amount: Callable[[dict], float]) -> list[list[dict]]:
    """The rails of each network: of one kind, with about the same `amount`; busiest first."""
    found: list[list[dict]] = []
    for entry in entries:
        for rails in found:
            if rails[0]["kind"] == entry["kind"] and amount(entry) >= RAIL * amount(rails[0]):
                rails.append(entry)
                break
        else:
            found.append([entry])
    return found


def names(rails: list[dict]) -> str:
    """As eth0 (ethernet), ib0 (ipoib over mlx5_0:1) or mlx5_0:1, mlx5_1:1 (infiniband)."""
    kind, carriers = rails[0]["kind"], [entry["carrier"] for entry in rails if "carrier" in entry]
    over = f" over {', '.join(carriers)}" if carriers else ""
    return f"{', '.join(entry['name'] for entry in rails)} ({kind}{over})"


def went_wrong(carried: dict) -> list[str]:
    """Sentences of what a healthy link does not do, of the interfaces that count."""
    said = []
    tcp = carried.get("tcp", {"segments": 0, "retransmits": 0})
    if tcp["retransmits"] > LOSSY * tcp["segments"]:
        said.append(f"TCP sent {tcp['retransmits']:,} of {tcp['segments']:,} segments again")
    for entry in busy(carried["interfaces"]):
        wrong = {n: c for n, c in entry.get("errors", {}).items() if n not in HARMLESS}
        if wrong:
            said.append(f"{entry['name']}: " + ", ".join(f"{n} {c:,}" for n, c in wrong.items()))
    return said


def size(count: float) -> str:
    """Of bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
