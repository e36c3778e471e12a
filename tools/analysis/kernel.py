"""What the kernel states of this node: its interfaces and adapters, what they counted, its GPUs.

The counters are those of all traffic of the node, whoever caused it; a Mac has none. All bytes are
bytes here, whatever unit the kernel counts in. A port of an adapter is named as NCCL does,
mlx5_0:1. With RoCE it counts RDMA alone, and its Ethernet interface lacks those bytes.

Facts of an interface, in the records Counters and Probe:
    kind        ethernet, infiniband, roce, efa, ipoib, loopback, other, unknown
    speed_Gbps  the stated rate, as far as it carries data
    stated_by   who states it: "its port", "the port below the VLAN", "EFA's driver" and so on
    virtual     true if no hardware states a rate; else it is missing
    below       what counts its bytes as well: members of a bond, the parent of a VLAN
    errors      the counters of COUNTERS that are not 0
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections import Counter
from math import prod
from pathlib import Path

# Where the kernel shows its devices. Tests give another folder.
SYSFS = Path(os.environ.get("SYSFS_ROOT") or "/sys")
KINDS = {1: "ethernet", 32: "ipoib", 772: "loopback"}  # linux/if_arp.h
LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}
# Drivers of virtual machines' interfaces, which state any rate; vif: Xen's.
PARAVIRTUAL = {"virtio_net", "vmxnet3", "hv_netvsc", "vif"}
# Drivers of a cloud's or of a host's virtual functions, as a virtual machine has them.
VIRTUAL_FUNCTIONS = {"ena", "gve", "mana", "iavf", "igbvf", "ixgbevf"}
# SDR, DDR and QDR of InfiniBand send 10 bits for 8, and state them all; SDR may go without a name.
ENCODED = re.compile(r"\(\d+X( SDR| DDR| QDR)?\)")
REFRESH_S = 1.1  # the drivers bnxt_en, tg3 and atlantic count once a second
COUNTERS = [  # files of an interface or of an adapter's port
    "carrier_changes",
    "statistics/rx_errors",
    "statistics/tx_errors",
    "statistics/tx_dropped",
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/local_link_integrity_errors",
    "counters/symbol_error",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "counters/port_xmit_wait",  # ticks of waiting for credit: congestion
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence",  # also moves under adaptive routing, without loss
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/np_ecn_marked_roce_packets",  # these four: RoCE's control of congestion
    "hw_counters/np_cnp_sent",
    "hw_counters/rp_cnp_handled",
    "hw_counters/roce_slow_restart",
]
# Under load: before the first reading, and between the two; longer where a driver may be late.
LEAD_S, COUNTED_S, LATE_S, POLL_S = 0.2, 1.5, 2.5, 0.01
UP = ("up", "ACTIVE")
CAP_IPC_LOCK = 14  # linux/capability.h
FIRST_USER_NAMESPACE = "user:[4026531837]"  # the kernel's own; linux/proc_ns.h

# --- Files ---------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    """A file's text; empty where it cannot be read, which for a counter is normal."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def number(path: Path) -> float:
    """The number that a file begins with; 0 where there is none or it is negative."""
    with contextlib.suppress(ValueError, IndexError):  # an interface without a cable has speed -1
        return max(0.0, float(text_of(path).split()[0]))
    return 0.0


def driver_of(device: Path) -> str:
    return (device / "driver").resolve().name if (device / "driver").exists() else ""


# --- Counters ------------------------------------------------------------------------------------


def read_counters(sysfs: Path = SYSFS) -> dict:
    """What the kernel has counted so far: {"interfaces": {name: facts}}."""
    nets = [path for path in sorted(sysfs.glob("class/net/*")) if path.is_dir()]
    found = {net.name: read_interface(net) for net in nets}
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        found[f"{port.parent.parent.name}:{port.name}"] = read_port(port)
    for net in nets:
        judge_speed(net, found)
    return {"interfaces": found}


def settled_counters(sysfs: Path = SYSFS) -> dict:
    """read_counters() when all that was sent before is counted."""
    counted = read_counters(sysfs)
    if not may_be_late(counted):
        return counted
    time.sleep(REFRESH_S)
    return read_counters(sysfs)


def may_be_late(counted: dict) -> bool:
    """Virtual interfaces count at once; a driver may do so once a second."""
    return not all("virtual" in facts for facts in counted["interfaces"].values())


def read_interface(net: Path) -> dict:
    """Facts of a folder of /sys/class/net."""
    facts = {
        "kind": KINDS.get(number(net / "type"), "other"),
        "speed_Gbps": number(net / "speed") / 1000 or None,
        "stated_by": "",
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
        facts["speed_Gbps"] = data_rate(port, "infiniband")
        facts["errors"] |= read_errors(port)
    return facts


def read_port(port: Path) -> dict:
    """Facts of a folder of /sys/class/infiniband/*/ports."""
    device = port.parents[1] / "device"
    # In words of 4 bytes; EFA has another file, in bytes.
    sent = 4 * number(port / "counters/port_xmit_data") or number(port / "hw_counters/tx_bytes")
    received = 4 * number(port / "counters/port_rcv_data") or number(port / "hw_counters/rx_bytes")
    kind = LINK_LAYERS.get(text_of(port / "link_layer"), "unknown")
    if driver_of(device) == "efa":
        kind = "efa"
    speed = data_rate(port, kind)
    return {
        "kind": kind,
        "speed_Gbps": speed,
        "stated_by": port_stated_by(device, kind) if speed else "",
        "tx_bytes": int(sent),
        "rx_bytes": int(received),
        "below": [],
        "errors": read_errors(port),
    }


def data_rate(port: Path, kind: str) -> float | None:
    """Of an adapter's port, in Gb/s. A port of RoCE says QDR, too, and carries what it states."""
    speed = number(port / "rate")
    if kind == "infiniband" and ENCODED.search(text_of(port / "rate")):
        speed *= 0.8
    return speed or None


def port_stated_by(device: Path, kind: str) -> str:
    """Who states the rate of an adapter's port."""
    if kind == "efa":
        return "EFA's driver"
    if (device / "physfn").exists():
        return "a virtual function's driver"
    for net in device.glob("net/*"):
        members = text_of(net / "master/bonding/slaves").split()
        # One adapter for a whole bond: the other members have none of their own.
        places = [net / "master" / f"lower_{name}" / "device/infiniband" for name in members]
        if not all(place.is_dir() for place in places):
            return f"the bond of {' and '.join(members)}"
    return "its port"


def judge_speed(net: Path, found: dict) -> float:
    """What hardware states that carries an interface's bytes, in Gb/s; 0: none. Also says who
    states it.

    A bridge states its fastest port's speed, whatever it is, and a bond no more than is active:
    so the smaller of its own and the sum of those below it.
    """
    facts = found[net.name]
    own = facts["speed_Gbps"] or 0
    driver = driver_of(net / "device")
    if (net / "device").exists() and driver not in PARAVIRTUAL:
        function = (net / "device/physfn").exists() or driver in VIRTUAL_FUNCTIONS
        said_by = "a virtual function's driver" if function else "its port"
        facts["stated_by"] = said_by if own else ""
        return own
    lower = {
        name: judge_speed(net.parent / name, found) for name in facts["below"] if name in found
    }
    hardware = [name for name, speed in lower.items() if speed]
    below = sum(lower.values())
    if below:
        facts["speed_Gbps"] = min(own or below, below)
    else:
        facts["virtual"] = True
    if driver in PARAVIRTUAL:
        facts["stated_by"] = "a driver of virtual machines" if facts["speed_Gbps"] else ""
    elif not below:
        facts["stated_by"] = "a virtual interface" if own else ""
    elif "members" in facts:
        facts["stated_by"] = f"the bond of {' and '.join(facts['members'])}"
    else:
        facts["stated_by"] = f"{those_below(hardware, found)} below the {type_of(net)}"
    return below and facts["speed_Gbps"]


def those_below(names: list[str], found: dict) -> str:
    said_by = {found[name]["stated_by"] for name in names}
    if said_by == {"its port"}:
        return "the port" if len(names) == 1 else "the ports"
    return " and ".join(sorted(said_by))


def type_of(net: Path) -> str:
    """VLAN, bridge and so on, as the kernel calls a virtual interface."""
    kind = re.search(r"^DEVTYPE=(\w+)", text_of(net / "uevent"), re.MULTILINE)
    return kind[1].replace("vlan", "VLAN") if kind else "interface"


def read_errors(folder: Path) -> dict[str, int]:
    """Those that were ever counted."""
    counts = {path.split("/")[-1]: int(number(folder / path)) for path in COUNTERS}
    return {name: count for name, count in counts.items() if count}


# --- Between two readings ------------------------------------------------------------------------


def difference(before: dict, after: dict) -> dict:
    """What was carried from one reading to the other: each byte once, in `interfaces`, the
    busiest first.

    What lies below a bond, a bridge, a VLAN or IP over InfiniBand is in `rest`, unless it carried
    over twice as much for itself; so is a port that counted errors and no bytes.
    """
    old, new = before["interfaces"], after["interfaces"]
    links = {name: added(old[name], new[name]) for name in new if name in old}
    found, rest = [], []
    for name, link in links.items():
        above = sum(traffic(upper) for upper in links.values() if name in upper["below"])
        entry = {"name": name} | link
        entry = {key: fact for key, fact in entry.items() if fact not in ({}, [])}
        if traffic(link) > 2 * above:
            found.append(entry)
        elif traffic(link) or link["errors"]:
            rest.append(entry)
    return {"interfaces": sorted(found, key=traffic, reverse=True), "rest": rest}


def added(then: dict, now: dict) -> dict:
    """An interface's facts with what was added; a counter that was reset has added nothing."""
    more = {way: max(0, now[way] - then[way]) for way in ("tx_bytes", "rx_bytes")}
    return now | more | {"errors": Counter(now["errors"]) - Counter(then["errors"])}


def traffic(link: dict) -> int:
    return link["tx_bytes"] + link["rx_bytes"]


# --- Facts of a node -----------------------------------------------------------------------------


def read_node(sysfs: Path = SYSFS) -> dict:
    """{"ports": {name: facts}}

    A link of PCIe may be slower while it is idle: the probe reads it under load.
    """
    ports = {}
    for name, link in read_counters(sysfs)["interfaces"].items():
        facts = {key: link[key] for key in ("kind", "speed_Gbps", "stated_by")}
        adapter, colon, port = name.rpartition(":")
        if colon and (sysfs / "class/infiniband" / adapter).is_dir():
            folder = sysfs / "class/infiniband" / adapter / "ports" / port
            state = text_of(folder / "state").rpartition(" ")[2]  # 4: ACTIVE
            facts |= {"state": state, "rate": text_of(folder / "rate")}
            device = sysfs / "class/infiniband" / adapter / "device"
        else:
            folder = sysfs / "class/net" / name
            facts |= {"state": text_of(folder / "operstate"), "mtu": int(number(folder / "mtu"))}
            device = folder / "device"
        ports[name] = read_device(device) | facts
    return {"ports": ports}


def read_device(device: Path) -> dict:
    """Of a PCI device; empty where the interface has none."""
    if not device.exists():
        return {}
    device = device.resolve()
    links = [
        [number(folder / f"{which}_link_{what}") for what in ("speed", "width")]
        for folder, which in ((device, "current"), (device, "max"), (device.parent, "max"))
    ]
    now, *most = links
    facts = {
        "device": device.name,
        "driver": driver_of(device),
        "pcie": now,  # GT/s, lanes
        # The lesser of the device and of the port above it; 0: neither states it.
        "pcie_most": [min(filter(None, pair), default=0) for pair in zip(*most, strict=True)],
    }
    if (device / "physfn").exists():
        facts["physical"] = (device / "physfn").resolve().name  # the card's own function
    return facts


def free_memory(sysfs: Path = SYSFS) -> float:
    """Bytes that programs may still use; 0 where the kernel does not say, as on a Mac."""
    found = re.search(r"^MemAvailable: +(\d+) kB", text_of(sysfs.parent / "proc/meminfo"), re.M)
    free = 1024.0 * int(found[1]) if found else 0.0
    return min(free, number(sysfs / "fs/cgroup/memory.max") or free)


def most_locked() -> int | None:
    """Bytes of memory that this process may lock, which RDMA needs; None: all."""
    lines = text_of(Path("/proc/self/status")).splitlines()
    capable = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    if unlimited or (int(capable, 16) >> CAP_IPC_LOCK & 1 and in_first_user_namespace()):
        return None
    return limit


def in_first_user_namespace() -> bool:
    """The kernel asks for the capability there; a container without root has one of its own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/user") == FIRST_USER_NAMESPACE
    return True  # a kernel without user namespaces


# --- Under load ----------------------------------------------------------------------------------


def read_meanwhile(before: dict, sysfs: Path = SYSFS) -> dict:
    """difference() of two readings while others send, and {node: read_node(), seconds}; each
    interface with wire_Gbps, of its busier direction. before: an earlier reading.
    """
    time.sleep(LEAD_S)
    start, first = refreshed_counters(before, sysfs)
    facts = read_node(sysfs)
    time.sleep(LATE_S if may_be_late(first) else COUNTED_S)
    end, second = refreshed_counters(before, sysfs)
    carried = difference(first, second) | {"node": facts, "seconds": end - start}
    for link in carried["interfaces"] + carried["rest"]:
        busier = max(link["tx_bytes"], link["rx_bytes"])
        link["wire_Gbps"] = 8e-9 * busier / (end - start)
    return carried


def refreshed_counters(before: dict, sysfs: Path = SYSFS) -> tuple[float, dict]:
    """The clock and the counters when those of the busiest interface since `before` have just
    moved: a driver that counts once a second is late by nothing then.
    """
    clock, counters = time.perf_counter(), read_counters(sysfs)
    busiest = [link["name"] for link in difference(before, counters)["interfaces"][:1]]
    seen = [counters["interfaces"][name] for name in busiest]
    until = clock + REFRESH_S
    while busiest and clock < until and seen == [counters["interfaces"][name] for name in busiest]:
        time.sleep(POLL_S)
        clock, counters = time.perf_counter(), read_counters(sysfs)
    return clock, counters


# --- For a report --------------------------------------------------------------------------------


def slot_of(facts: dict) -> str:
    """Domain, bus and device of a card: 0000:3b:00. A card with two ports has two functions."""
    device = facts.get("physical") or facts.get("device", "")
    return re.sub(r"^(\w+:\w+:\w+)\.\w+$", r"\1", device)


def pcie_Gbps(link: list) -> float:
    """Of [GT/s, lanes], what carries data; 0: not known. 8 GT/s x16: 126."""
    speed, lanes = link
    if speed <= 5:
        return speed * lanes * 8 / 10
    return speed * lanes * (128 / 130 if speed <= 32 else 242 / 256)


def merged(readings: list[dict]) -> dict:
    """The facts of the last of a node's readings, with the fastest PCIe links of all."""
    ports: dict[str, dict] = {}
    for reading in readings:
        for name, facts in reading.get("ports", {}).items():
            links = [ports.get(name, {}).get("pcie", [0, 0]), facts.get("pcie", [0, 0])]
            ports[name] = facts | {"pcie": max(links, key=prod)}
    return readings[-1] | {"ports": ports} if readings else {}


def joined(readings: list[list[dict]]) -> list[dict]:
    """What was carried and counted in several of difference()'s lists together, by interface."""
    found: dict[str, dict] = {}
    for link in (link for links in readings for link in links):
        none = {"tx_bytes": 0, "rx_bytes": 0, "errors": Counter()}
        same = found.setdefault(link["name"], link | none)
        same["tx_bytes"] += link["tx_bytes"]
        same["rx_bytes"] += link["rx_bytes"]
        same["errors"].update(link.get("errors", {}))
    return list(found.values())


def ports_of(node_facts: dict, links: list[dict]) -> list[dict]:
    """A row for each port of a node that is up or has carried bytes, the busiest first.

    node_facts: read_node()'s; links: difference()'s `interfaces` and `rest`. counters: {name:
    {count, per_GB of the port's own bytes, or None}}.
    """
    carried = {link["name"]: link for link in links}
    ports = node_facts.get("ports", {})
    nothing = {"tx_bytes": 0, "rx_bytes": 0}
    rows = []
    for name in dict.fromkeys([*carried, *ports]):
        facts, link = ports.get(name, {}), carried.get(name, nothing)
        if facts.get("state") not in UP and not traffic(link):
            continue
        known = facts | link
        speed = known.get("speed_Gbps")
        # Those of an adapter's port stand there, not at the IP over it, too.
        carrier = carried.get(link.get("carrier", ""), {}).get("errors", {})
        errors = {key: n for key, n in link.get("errors", {}).items() if key not in carrier}
        gigabytes = traffic(link) / 1e9
        row = {key: known.get(key, "") for key in ("kind", "state", "driver")}
        row |= {
            "port": name,
            "rate": known.get("rate") or (f"{speed:g} Gb/s" if speed else ""),
            "speed_Gbps": speed,
            "stated_by": known.get("stated_by", ""),
            "MTU": known.get("mtu") or None,
            "pcie_Gbps": pcie_Gbps(known.get("pcie", [0, 0])) or None,
            "pcie_most_Gbps": pcie_Gbps(known.get("pcie_most", [0, 0])) or None,
            "device": slot_of(known),
            "sent": link["tx_bytes"],
            "received": link["rx_bytes"],
            "counters": {
                key: {"count": n, "per_GB": n / gigabytes if gigabytes else None}
                for key, n in errors.items()
            },
        }
        rows.append(row)
    return sorted(rows, key=lambda row: row["sent"] + row["received"], reverse=True)
