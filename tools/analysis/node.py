"""Facts of a node, as its kernel states them: its GPUs, what each interface and adapter is.

They are in the records Probe and Counters, so from every node, also during the training. A report
shows them and concludes nothing. A link of PCIe may be slower while it is idle: the probe reads it
under load, and of several readings the fastest counts.
"""

from __future__ import annotations

import resource
from collections import Counter
from math import prod
from pathlib import Path

from analysis.kernel_counters import CONGESTION, SYSFS, number, text_of, traffic

GPUDIRECT_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
CAP_IPC_LOCK = 14  # linux/capability.h
LEFT = "(1X "  # lanes of an InfiniBand port that lost some of its 4; a split cable has 2X
BUSY = 0.1  # of the busiest one's bytes: below it a port is not shown

# --- Reading -------------------------------------------------------------------------------------


def read_node(sysfs: Path = SYSFS) -> dict:
    """{gpus: names, module: of GPUDirect, locked: bytes or null, ports: {name: facts}}"""
    models = sorted((sysfs.parent / "proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in models for line in text_of(path).splitlines()]
    loaded = [name for name in GPUDIRECT_MODULES if (sysfs / "module" / name).is_dir()]
    ports = {}
    for net in sorted(sysfs.glob("class/net/*")):
        if net.is_dir():
            ports[net.name] = read_facts(net / "device") | {
                "state": text_of(net / "operstate"),
                "mtu": int(number(net / "mtu")),
            }
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        adapter = port.parents[1]
        state = text_of(port / "state").rpartition(" ")[2]  # 4: ACTIVE
        facts = {"state": state, "rate": text_of(port / "rate")}
        ports[f"{adapter.name}:{port.name}"] = read_facts(adapter / "device") | facts
    return {
        "gpus": [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")],
        "module": ", ".join(loaded),
        "locked": most_locked(),
        "ports": ports,
    }


def read_facts(device: Path) -> dict:
    """Of a PCI device; empty where the interface has none."""
    if not device.exists():
        return {}
    device = device.resolve()
    links = [
        [number(folder / f"{which}_link_{what}") for what in ("speed", "width")]
        for folder, which in ((device, "current"), (device, "max"), (device.parent, "max"))
    ]
    now, *most = links
    return {
        "device": device.name,
        "driver": (device / "driver").resolve().name if (device / "driver").exists() else "",
        "numa": text_of(device / "numa_node"),
        "pcie": now,  # GT/s, lanes
        # The lesser of the device and of the port above it; 0: neither states it.
        "pcie_most": [min(filter(None, pair), default=0) for pair in zip(*most, strict=True)],
    }


def most_locked() -> int | None:
    """Bytes of memory that this process may lock, which RDMA needs; None: all."""
    lines = text_of(Path("/proc/self/status")).splitlines()
    capable = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if int(capable, 16) >> CAP_IPC_LOCK & 1 or limit == resource.RLIM_INFINITY:
        return None
    return limit


# --- In a report ---------------------------------------------------------------------------------


def merged(readings: list[dict]) -> dict:
    """The facts of the last of a node's readings, with the fastest PCIe links of all."""
    ports: dict[str, dict] = {}
    for reading in readings:
        for name, facts in reading.get("ports", {}).items():
            links = [ports.get(name, {}).get("pcie", [0, 0]), facts.get("pcie", [0, 0])]
            ports[name] = facts | {"pcie": max(links, key=prod)}
    return readings[-1] | {"ports": ports} if readings else {}


def joined(readings: list[list[dict]]) -> list[dict]:
    """What was carried and counted in the probe and in the training together, by interface."""
    found: dict[str, dict] = {}
    for link in (link for links in readings for link in links):
        none = {"tx_bytes": 0, "rx_bytes": 0, "errors": Counter()}
        same = found.setdefault(link["name"], link | none)
        same["tx_bytes"] += link["tx_bytes"]
        same["rx_bytes"] += link["rx_bytes"]
        same["errors"].update(link.get("errors", {}))
    return list(found.values())


def shown(link: list) -> str:
    """16 GT/s x8; empty where the kernel does not say."""
    return f"{link[0]:g} GT/s x{link[1]:g}" if all(link) else ""


def rows_of(node: dict, links: list[dict]) -> list[dict]:
    """The rows of a table, one for each port of a node that carried its bytes. marks: {word of
    advice.py: what is to be looked at}.

    links: what was carried, as kernel.difference() says it.
    """
    rows = []
    least = BUSY * max(map(traffic, links), default=0)
    for link in links:
        if link["kind"] == "loopback" or traffic(link) < max(1, least):
            continue
        for name in [link["name"], *link.get("members", [])]:
            facts = node.get("ports", {}).get(name, {})
            pcie, most = facts.get("pcie", [0, 0]), facts.get("pcie_most", [0, 0])
            below = 0 < prod(pcie) < prod(most)
            counted = link.get("errors", {}) if name == link["name"] else {}
            states = facts.get("rate", "")
            marks = {}
            if below and pcie[1] < most[1]:
                marks["pcie"] = f"has {pcie[1]:g} of {most[1]:g} PCIe lanes"
            elif below:
                marks["pcie"] = f"has PCIe at {pcie[0]:g} of {most[0]:g} GT/s"
            if link["kind"] == "infiniband" and LEFT in states:
                marks["lanes"] = "has 1X of 4X lanes"
            errors = counted.keys() - {path.split("/")[-1] for path in CONGESTION}
            if errors:
                names = ", ".join(sorted(errors))
                marks[f"errors-{link['kind']}"] = f"counted {names} in this run"
            if link["speed_Gbps"] and not states:
                made = ", made up" if link.get("virtual") else ""
                states = f"{link['speed_Gbps']:g} Gb/s{made}"
            row = {key: facts.get(key, "") for key in ("state", "driver", "numa", "device")}
            row |= {"port": name, "kind": link["kind"], "states": states}
            row["MTU"] = str(facts.get("mtu") or "")
            row["PCIe"] = f"{shown(pcie)} of {shown(most)}" if below else shown(pcie)
            row["counted"] = ", ".join(f"{key} {count:,}" for key, count in counted.items())
            rows.append(row | {"marks": marks})
    return rows
