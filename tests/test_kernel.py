"""The kernel's counters and facts, read in made folders of /sys: each byte is counted once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis import kernel as module
from analysis.kernel import (
    difference,
    joined,
    merged,
    pcie_Gbps,
    ports_of,
    read_counters,
    read_node,
    read_tcp,
    settled_counters,
    slot_of,
)
from counters import describe_traffic
from support.made_logs import carried
from support.processes import FACTOR, ROOT

TOOL = ROOT / "tools" / "counters.py"


class Kernel:
    """Files as the kernel has them in /sys, made in another folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, folder: str, **files: object) -> None:
        for name, text in files.items():
            path = self.root / "class" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def net(self, name: str, sent: int = 0, received: int = 0, **files: object) -> None:
        """An interface that has sent and received so many bytes."""
        self.write(f"net/{name}/statistics", tx_bytes=1000 + sent, rx_bytes=2000 + received)
        self.write(f"net/{name}", **{"type": 1} | files)

    def driver(self, folder: str, driver: str) -> Path:
        """What the link of an interface or an adapter to its driver shows; its device's folder."""
        self.write(f"drivers/{driver}", module="")
        self.write(f"{folder}/device", vendor="")
        device = self.root / "class" / folder / "device"
        (device / "driver").symlink_to(self.root / f"class/drivers/{driver}")
        return device

    def port(self, place: str, count: int = 0, layer: str = "InfiniBand") -> None:
        """An adapter's port that has moved so many bytes each way."""
        self.write(f"infiniband/{place}", link_layer=layer, rate="56 Gb/sec (4X FDR)")
        words = 10 + count // 4
        self.write(f"infiniband/{place}/counters", port_xmit_data=words, port_rcv_data=words)

    def read(self) -> dict:
        return read_counters(self.root)

    def since(self, before: dict) -> dict[str, dict]:
        """The interfaces that carried something, by name."""
        links = difference(before, self.read())["interfaces"]
        return {link["name"]: link for link in links}


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def sent_and_received(links: dict[str, dict]) -> dict[str, tuple[int, int]]:
    return {name: (link["tx_bytes"], link["rx_bytes"]) for name, link in links.items()}


# --- What a file says --------------------------------------------------------------------------

# Of IP over InfiniBand: the port below it, as a folder of its own and below the interface.
PORT, BELOW = "mlx4_0/ports/2", "net/ib0/device/infiniband/mlx4_0/ports/2"


def test_kind_and_stated_speed_of_each_interface(kernel):
    kernel.net("eth0", speed=400_000)
    kernel.driver("net/eth0", "mlx5_core")
    kernel.net("down", speed=-1)
    kernel.net("lo", type=772)
    kernel.net("tun0", type=65534, speed=10)
    kernel.net("ib0", type=32, dev_port=1, speed=-1)
    kernel.write(BELOW, rate="56 Gb/sec (4X FDR)")
    kernel.port(PORT)
    kernel.port("mlx5_0/ports/1", layer="Ethernet")
    kernel.write("infiniband/efa_0/ports/1", link_layer="Unspecified")
    kernel.driver("infiniband/efa_0", "efa")
    kernel.write("infiniband/new_0/ports/1", link_layer="Unspecified")
    found = kernel.read()["interfaces"]
    assert {name: (link["kind"], link["speed_Gbps"]) for name, link in found.items()} == {
        "eth0": ("ethernet", 400),
        "down": ("ethernet", None),
        "lo": ("loopback", None),
        "tun0": ("other", 0.01),
        "ib0": ("ipoib", 56),
        "mlx4_0:2": ("infiniband", 56),
        "mlx5_0:1": ("roce", 56),
        "efa_0:1": ("efa", None),
        "new_0:1": ("unknown", None),
    }


# Of each interface: its driver, what it states in Mb/s, what lies below it. Then what the first
# states by its hardware, in Gb/s; None: it is virtual.
RATES = {
    "an adapter": ({"eth0": ("bnxt_en", 10_000, "")}, 10),
    "veth": ({"eth0": ("", 10_000, "")}, None),
    "virtio": ({"eth0": ("virtio_net", 100_000, "")}, None),
    "Azure": ({"eth0": ("hv_netvsc", 50_000, "vf"), "vf": ("mlx5_core", 40_000, "")}, 40),
    "a bond of two": (
        {"b": ("", 20_000, "e0 e1"), "e0": ("i40e", 10_000, ""), "e1": ("i40e", 10_000, "")},
        20,
    ),
    "one of two active": (
        {"b": ("", 25_000, "e0 e1"), "e0": ("ice", 25_000, ""), "e1": ("ice", 25_000, "")},
        25,
    ),
    "a bond of virtual ones": ({"b": ("", 20_000, "v0"), "v0": ("", 10_000, "")}, None),
    "a bridge": (
        {"br0": ("", 10_000, "e0 v0"), "e0": ("igb", 1_000, ""), "v0": ("", 10_000, "")},
        1,
    ),
    "a VLAN on a bond": (
        {"v7": ("", 10_000, "b"), "b": ("", 10_000, "e0"), "e0": ("ixgbe", 10_000, "")},
        10,
    ),
    "a team that states nothing": ({"t": ("", -1, "e0"), "e0": ("ixgbe", 10_000, "")}, 10),
}


@pytest.mark.parametrize(("links", "expected"), RATES.values(), ids=RATES)
def test_an_interface_states_what_the_hardware_below_it_does(kernel, links, expected):
    for name, (driver, speed, below) in links.items():
        kernel.net(name, speed=speed, **{f"lower_{lower}/mtu": 1500 for lower in below.split()})
        if driver:
            kernel.driver(f"net/{name}", driver)
    facts = kernel.read()["interfaces"][next(iter(links))]
    stated = None if facts.get("virtual") else facts["speed_Gbps"]
    assert stated == expected


# What an adapter's port states, and what carries data.
STATED = {
    ("10 Gb/sec (4X)", "InfiniBand"): 8,
    ("10 Gb/sec (4X SDR)", "InfiniBand"): 8,
    ("20 Gb/sec (4X DDR)", "InfiniBand"): 16,
    ("40 Gb/sec (4X QDR)", "InfiniBand"): 32,
    ("40 Gb/sec (4X FDR10)", "InfiniBand"): 40,
    ("200 Gb/sec (4X HDR)", "InfiniBand"): 200,
    ("40 Gb/sec (4X QDR)", "Ethernet"): 40,  # Ethernet's rates have InfiniBand's names there
}


@pytest.mark.parametrize(("stated", "expected"), STATED.items(), ids=map(" ".join, STATED))
def test_rate_of_infiniband_is_what_carries_data(kernel, stated, expected):
    rate, layer = stated
    kernel.port("mlx4_0/ports/1", layer=layer)
    kernel.write("infiniband/mlx4_0/ports/1", rate=rate)
    if layer == "InfiniBand":  # IP over it has the rate of its port
        kernel.net("ib0", type=32)
        kernel.write("net/ib0/device/infiniband/mlx4_0/ports/1", rate=rate)
    found = kernel.read()["interfaces"]
    assert {link["speed_Gbps"] for link in found.values()} == {expected}
    assert {link["stated_by"] for link in found.values()} == {"its port"}
    facts = read_node(kernel.root)["ports"]["mlx4_0:1"]
    assert (facts["rate"], facts["speed_Gbps"]) == (rate, expected)


def test_facts_say_who_states_a_rate(kernel):
    """Only a port states what its link carries."""
    kernel.net("eth0", speed=10_000)
    kernel.driver("net/eth0", "ice")
    kernel.net("eth1", speed=10_000)
    kernel.driver("net/eth1", "ice")
    kernel.net("unplugged", speed=-1)
    kernel.driver("net/unplugged", "ice")
    kernel.net("vf0", speed=25_000)
    kernel.write("net/vf0", **{"device/physfn/vendor": ""})
    kernel.net("ens5", speed=100_000)
    kernel.driver("net/ens5", "ena")
    kernel.net("virtio0", speed=100_000)
    kernel.driver("net/virtio0", "virtio_net")
    kernel.net("veth0", speed=10_000)
    kernel.net("bond0", speed=20_000, **{"lower_eth0/mtu": 1500, "lower_eth1/mtu": 1500})
    kernel.write("net/bond0", **{"bonding/slaves": "eth0 eth1"})
    vlan = {"uevent": "DEVTYPE=vlan\nINTERFACE=x"}
    kernel.net("eth0.7", speed=10_000, **{"lower_eth0/mtu": 1500}, **vlan)
    kernel.net("bond0.7", speed=20_000, **{"lower_bond0/mtu": 1500}, **vlan)
    lower = {"lower_eth0/mtu": 1500, "lower_eth1/mtu": 1500, "lower_veth0/mtu": 1500}
    kernel.net("br0", speed=10_000, **lower, uevent="DEVTYPE=bridge")
    kernel.write("infiniband/efa_0/ports/1", link_layer="Unspecified", rate="100 Gb/sec")
    kernel.driver("infiniband/efa_0", "efa")
    kernel.port("mlx5_0/ports/1")
    kernel.port("mlx5_9/ports/1", layer="Ethernet")
    kernel.write("infiniband/mlx5_9", **{"device/physfn/vendor": ""})
    found = kernel.read()["interfaces"]
    assert {name: link["stated_by"] for name, link in found.items()} == {
        "eth0": "its port",
        "eth1": "its port",
        "unplugged": "",
        "vf0": "a virtual function's driver",
        "ens5": "a virtual function's driver",
        "virtio0": "a driver of virtual machines",
        "veth0": "a virtual interface",
        "bond0": "the bond of eth0 and eth1",
        "eth0.7": "the port below the VLAN",
        "bond0.7": "the bond of eth0 and eth1 below the VLAN",
        "br0": "the ports below the bridge",
        "efa_0:1": "EFA's driver",
        "mlx5_0:1": "its port",
        "mlx5_9:1": "a virtual function's driver",
    }
    ports = read_node(kernel.root)["ports"]
    assert {name: facts["stated_by"] for name, facts in ports.items()} == {
        name: link["stated_by"] for name, link in found.items()
    }


@pytest.mark.parametrize("one_adapter", [True, False])
def test_rate_of_an_adapter_that_carries_a_bond_is_the_bonds(kernel, one_adapter):
    """RoCE has one adapter for both ports then; without, each port has its own."""
    kernel.port("mlx5_bond_0/ports/1", layer="Ethernet")
    kernel.write("net/bond0/bonding", slaves="eth0 eth1")
    for name in ("eth0", "eth1"):
        kernel.write(f"net/bond0/lower_{name}/device", vendor="")
    for name in ("eth0",) if one_adapter else ("eth0", "eth1"):
        kernel.write(f"net/bond0/lower_{name}/device/infiniband/mlx5_bond_0", node_type="1: CA")
    kernel.write("infiniband/mlx5_bond_0/device/net/eth0", mtu=1500)
    master = kernel.root / "class/infiniband/mlx5_bond_0/device/net/eth0/master"
    master.symlink_to(kernel.root / "class/net/bond0")
    expected = "the bond of eth0 and eth1" if one_adapter else "its port"
    assert kernel.read()["interfaces"]["mlx5_bond_0:1"]["stated_by"] == expected


def test_counters_are_read_when_the_drivers_have_refreshed_them(kernel, monkeypatch):
    """Some do so once a second; virtual interfaces are never late."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        kernel.net("eth0", 5000)

    monkeypatch.setattr(time, "sleep", wait)
    kernel.net("veth0")
    kernel.net("eth0", 3000)
    assert settled_counters(kernel.root)["interfaces"]["eth0"]["tx_bytes"] == 4000 and not waits
    kernel.driver("net/eth0", "tg3")
    assert settled_counters(kernel.root)["interfaces"]["eth0"]["tx_bytes"] == 6000
    assert len(waits) == 1 and waits[0] > 1


def test_ports_count_words_and_efa_counts_bytes(kernel):
    counters = {"port_xmit_data": 10, "port_rcv_data": 20}
    kernel.write("infiniband/mlx5_0/ports/1/counters", **counters)
    kernel.write("infiniband/efa_0/ports/1/hw_counters", tx_bytes=70, rx_bytes=80, send_bytes=60)
    found = sent_and_received(kernel.read()["interfaces"])
    assert found == {"mlx5_0:1": (40, 80), "efa_0:1": (70, 80)}


def test_missing_and_odd_files_count_nothing(kernel):
    assert kernel.read()["interfaces"] == {}
    kernel.write("net", bonding_masters="bond0")
    kernel.write("net/eth0", type="?", speed="Unknown!")
    kernel.write("net/eth0/statistics", tx_bytes="many")
    before = kernel.read()
    assert before["interfaces"].keys() == {"eth0"}
    assert difference(before, kernel.read())["interfaces"] == []


# --- Facts of a node -----------------------------------------------------------------------------


def test_facts_of_ports_gpus_and_the_module_for_gpudirect(tmp_path):
    """The slot above the adapter has 8 lanes; GPUs stand beside /sys, in /proc."""
    kernel = Kernel(tmp_path / "sys")
    pci = kernel.root / "devices/slot/0000:3b:00.0"
    for folder, lanes in ((pci, 16), (pci.parent, 8)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "max_link_speed").write_text("32.0 GT/s PCIe\n")
        (folder / "max_link_width").write_text(f"{lanes}\n")
    for name, text in (("speed", "16.0 GT/s PCIe"), ("width", "8")):
        (pci / f"current_link_{name}").write_text(f"{text}\n")
    (pci / "numa_node").write_text("1\n")
    kernel.port("mlx5_0/ports/1")
    kernel.write("infiniband/mlx5_0/ports/1", state="4: ACTIVE", rate="25 Gb/sec (1X EDR)")
    (kernel.root / "class/infiniband/mlx5_0/device").symlink_to(pci)
    kernel.net("eth0", operstate="up", mtu=9000)
    (kernel.root / "module/nvidia_peermem").mkdir(parents=True)
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA H100\nIRQ: 1\n")
    found = read_node(kernel.root)
    assert (found["gpus"], found["module"]) == (["NVIDIA H100"], "nvidia_peermem")
    assert found["ports"] == {
        "eth0": {
            "kind": "ethernet",
            "speed_Gbps": None,
            "stated_by": "",
            "state": "up",
            "mtu": 9000,
        },
        "mlx5_0:1": {
            "device": "0000:3b:00.0",
            "driver": "",
            "numa": "1",
            "pcie": [16, 8],
            "pcie_most": [32, 8],
            "kind": "infiniband",
            "speed_Gbps": 25,
            "stated_by": "its port",
            "state": "ACTIVE",
            "rate": "25 Gb/sec (1X EDR)",
        },
    }


def test_of_several_readings_the_fastest_pcie_link_counts():
    """It was idle when the training's counters were read."""
    readings = [{"ports": {"eth0": {"pcie": [speed, 16]}}} for speed in (16, 2.5)]
    assert merged(readings)["ports"]["eth0"]["pcie"] == [16, 16]


FIRST, OTHER = "user:[4026531837]", "user:[4026532900]"


@pytest.mark.parametrize(
    ("capable", "namespace", "limit", "most"),
    [
        ("0", FIRST, 8 << 20, 8 << 20),
        ("4000", FIRST, 8 << 20, None),
        ("4000", OTHER, 8 << 20, 8 << 20),
        ("0", OTHER, resource.RLIM_INFINITY, None),
    ],
)
def test_only_a_capability_of_the_first_user_namespace_lifts_the_limit_of_locked_memory(
    monkeypatch, capable, namespace, limit, most
):
    """Bit 14 is CAP_IPC_LOCK. Root in a container may lack it, or have it in vain."""
    monkeypatch.setattr(module, "text_of", lambda path: f"Name: x\nCapEff:\t{capable}\n")
    monkeypatch.setattr(os, "readlink", lambda path: namespace)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert module.most_locked() == most


# --- Between two readings ----------------------------------------------------------------------


def test_busiest_comes_first_and_what_is_idle_new_or_reset_is_left_out(kernel):
    kernel.port(PORT, 400)
    for name in ("eth0", "eth1", "idle"):
        kernel.net(name)
    before = kernel.read()
    kernel.net("eth0", 5, 5)
    kernel.net("eth1", 3000, 500)
    kernel.net("new", 700, 700)
    kernel.write(f"infiniband/{PORT}/counters", port_xmit_data=0, port_rcv_data=120)
    found = sent_and_received(kernel.since(before))
    assert list(found.items()) == [
        ("eth1", (3000, 500)),
        ("mlx4_0:2", (0, 40)),
        ("eth0", (5, 5)),
    ]


# Of each interface: bytes sent and received, what lies below it. Then which ones count.
STACKS = {
    "bond": ({"bond0": (800, "eth0 eth1"), "eth0": (400, ""), "eth1": (400, "")}, ["bond0"]),
    "VLAN": ({"v7": (900, "bond0"), "bond0": (1000, "eth0"), "eth0": (1000, "")}, ["v7"]),
    "bridge": ({"br0": (900, "eth0"), "eth0": (950, "")}, ["br0"]),
    "its own traffic": ({"br0": (90, "eth0"), "eth0": (1500, "")}, ["eth0", "br0"]),
}


@pytest.mark.parametrize(("stack", "counted"), STACKS.values(), ids=STACKS)
def test_what_lies_below_another_interface_is_counted_once(kernel, stack, counted):
    for name, (_, below) in stack.items():
        kernel.net(name, **{f"lower_{lower}/mtu": 1500 for lower in below.split()})
    kernel.write("net/bond0", **{"bonding/slaves": "eth0 eth1"})
    before = kernel.read()
    for name, (count, _) in stack.items():
        kernel.net(name, count, count)
    found = kernel.since(before)
    assert list(found) == counted
    # A comparison tells how many ports a bond has.
    assert "bond0" not in found or found["bond0"]["members"] == ["eth0", "eth1"]


def test_ip_over_infiniband_is_counted_once_and_has_the_errors_of_its_port(kernel):
    kernel.port(PORT)
    kernel.net("ib0", type=32, dev_port=1)
    kernel.write(BELOW, rate="56 Gb/sec")
    before = kernel.read()
    kernel.net("ib0", 1_000_000, 1_000_000, type=32)
    kernel.port(PORT, 1_040_000)  # its headers, too
    kernel.write(f"{BELOW}/counters", link_downed=1)
    found = kernel.since(before)
    assert found.keys() == {"ib0"} and found["ib0"]["carrier"] == "mlx4_0:2"
    assert found["ib0"]["errors"] == {"link_downed": 1}


def test_errors_are_those_between_the_readings(kernel):
    ways, waits = {"rx_errors": 2, "tx_errors": 3, "tx_dropped": 4}, {"port_xmit_wait": 12}
    lost = {"packet_seq_err": 7, "local_ack_timeout_err": 8, "out_of_sequence": 9}
    lost |= {"np_cnp_sent": 10, "rp_cnp_handled": 11, "np_ecn_marked_roce_packets": 12}
    lost |= {"rnr_nak_retry_err": 13, "roce_slow_restart": 14}
    port = waits | {"link_downed": 5, "symbol_error": 6, "port_rcv_errors": 7}
    port |= {"port_xmit_discards": 8, "link_error_recovery": 9}
    port |= {"local_link_integrity_errors": 10}
    more = {
        "net/eth0": {"carrier_changes": 1},
        "net/eth0/statistics": ways,
        f"infiniband/{PORT}/counters": port,
        f"infiniband/{PORT}/hw_counters": lost,
    }

    def write(moved: int, factor: int) -> None:
        kernel.net("idle", moved, moved, carrier_changes=20)
        kernel.net("eth0", moved, moved)
        kernel.port(PORT, moved)
        for folder, counts in more.items():
            kernel.write(folder, **{name: 20 + factor * n for name, n in counts.items()})

    write(0, 0)
    before = kernel.read()
    write(4000, 1)
    found = {name: link.get("errors") for name, link in kernel.since(before).items()}
    assert found == {
        "idle": None,
        "eth0": {"carrier_changes": 1} | ways,
        "mlx4_0:2": port | lost,
    }


def test_segments_that_tcp_sent_again_are_those_between_the_readings():
    text = "Ip: 1 2\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 {} {}\nUdp: 5\n"
    before, after = (
        {"interfaces": {}, "tcp": read_tcp(text.format(*counts))}
        for counts in ((5000, 90), (7000, 120))
    )
    assert difference(before, after)["tcp"] == {"segments": 2000, "retransmits": 30}
    assert read_tcp("Tcp: OutSegs\nTcp: 5\n") is read_tcp("") is None


# --- Under load --------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps or reads, and traffic that goes on meanwhile."""

    def __init__(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, **links: tuple) -> None:
        """links: of each, bytes sent in a second, seconds between its driver's counts, and the
        phase of these.
        """
        self.kernel, self.now, self.links, self.slept = kernel, 100.0, links, 0.0
        self.sleep(0)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        for name, (rate, every, phase) in self.links.items():
            counted = (self.now - phase) // every * every + phase if every else self.now
            self.kernel.net(name, int(rate * counted), int(rate * counted) // 2)


@pytest.mark.parametrize("phase", [0.0, 0.15, 0.3, 0.5, 0.69, 0.71, 0.9])
def test_rate_of_a_driver_that_counts_once_a_second_is_exact(kernel, monkeypatch, phase):
    clock = Clock(kernel, monkeypatch, eth0=(125e6, 1.0, phase), eth1=(1e3, 0, 0))
    kernel.driver("net/eth0", "tg3")
    before = kernel.read()
    clock.sleep(3)
    found = module.read_meanwhile(before, kernel.root)
    eth0, eth1 = found["interfaces"]
    assert eth0["wire_Gbps"] == pytest.approx(1, rel=0.01) and eth1["name"] == "eth1"
    assert found["seconds"] >= 2.5 and found["node"]["ports"].keys() == {"eth0", "eth1"}


def test_rates_are_of_the_time_between_the_readings_and_virtual_ones_need_less(
    kernel, monkeypatch
):
    """All traffic counts once, whoever sent it, below a bond as well."""
    clock = Clock(kernel, monkeypatch, br0=(250e6, 0, 0), veth0=(250e6, 0, 0))
    kernel.write("net/br0/lower_veth0", mtu=1500)
    before = kernel.read()
    clock.sleep(3)
    found = module.read_meanwhile(before, kernel.root)
    for (link,), name in ((found["interfaces"], "br0"), (found["rest"], "veth0")):
        assert link["name"] == name and link["wire_Gbps"] == pytest.approx(2, rel=1e-6)
        assert link["tx_bytes"] == pytest.approx(250e6 * found["seconds"])
    assert 1.5 <= found["seconds"] < 2


@pytest.mark.parametrize(("moved", "most"), [(0, 3), (9000, 6)])
def test_a_node_whose_traffic_has_stopped_is_not_waited_for(kernel, monkeypatch, moved, most):
    clock = Clock(kernel, monkeypatch, eth0=(0, 0, 0))
    kernel.driver("net/eth0", "tg3")
    before = kernel.read()
    monkeypatch.setattr(kernel, "net", lambda *_: None)
    kernel.write("net/eth0/statistics", tx_bytes=1000 + moved)
    found = module.read_meanwhile(before, kernel.root)
    assert found["interfaces"] == [] and clock.slept < most


def test_free_memory_is_no_more_than_the_containers(tmp_path):
    kernel = Kernel(tmp_path / "sys")
    assert module.free_memory(kernel.root) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4000 kB\n")
    assert module.free_memory(kernel.root) == 4_096_000
    for limit, free in (("max", 4_096_000), ("1000000", 1_000_000)):
        kernel.write("../fs/cgroup", **{"memory.max": limit})
        assert module.free_memory(kernel.root) == free


# --- A row for each port -----------------------------------------------------------------------


def test_each_port_that_is_up_or_has_carried_bytes_has_a_row_with_its_facts(tmp_path):
    """Also a second port that nobody uses; not one that is down."""
    kernel = Kernel(tmp_path / "sys")
    card = kernel.root / "devices/slot"
    for function, lanes in ((0, 16), (1, 8)):
        pci = card / f"0000:3b:00.{function}"
        pci.mkdir(parents=True)
        for which in ("current", "max"):
            (pci / f"{which}_link_speed").write_text("8.0 GT/s PCIe\n")
            (pci / f"{which}_link_width").write_text(f"{lanes if which == 'current' else 16}\n")
        (pci / "numa_node").write_text("1\n")
        kernel.port(f"mlx5_{function}/ports/1")
        kernel.write(f"infiniband/mlx5_{function}/ports/1", state="4: ACTIVE", rate="40 (4X QDR)")
        (kernel.root / f"class/infiniband/mlx5_{function}/device").symlink_to(pci)
    kernel.net("down", operstate="down")
    kernel.net("lo", operstate="unknown", type=772)
    before = kernel.read()
    kernel.port("mlx5_0/ports/1", 2_000_000_000)
    kernel.write("infiniband/mlx5_0/ports/1", rate="40 (4X QDR)")
    kernel.write("infiniband/mlx5_0/ports/1/counters", port_rcv_errors=6)
    kernel.write("infiniband/mlx5_1/ports/1/counters", link_downed=1)
    kernel.net("lo", 500, 500, operstate="unknown", type=772)
    carried = difference(before, kernel.read())
    first, second, third = ports_of(
        read_node(kernel.root), carried["interfaces"] + carried["rest"]
    )
    assert first == {
        "port": "mlx5_0:1",
        "kind": "infiniband",
        "state": "ACTIVE",
        "rate": "40 (4X QDR)",
        "speed_Gbps": 32,
        "stated_by": "its port",
        "driver": "",
        "MTU": None,
        "pcie_Gbps": pytest.approx(126, abs=0.1),
        "pcie_most_Gbps": pytest.approx(126, abs=0.1),
        "numa": "1",
        "device": "0000:3b:00",
        "sent": 2_000_000_000,
        "received": 2_000_000_000,
        "counters": {"port_rcv_errors": {"count": 6, "per_GB": 1.5}},
    }
    assert third["port"] == "mlx5_1:1" and third["device"] == first["device"]
    assert third["pcie_Gbps"] == pytest.approx(63, abs=0.1)
    assert (third["sent"], third["received"]) == (0, 0)
    assert third["counters"] == {"link_downed": {"count": 1, "per_GB": None}}
    assert (second["port"], second["sent"], second["rate"]) == ("lo", 500, "")


def test_what_ports_below_a_vlan_on_a_bond_counted_is_not_lost(kernel):
    lower = {"lower_eth0/mtu": 1500, "lower_eth1/mtu": 1500}
    stack = {"v7": {"lower_bond0/mtu": 1500}, "bond0": lower, "eth0": {}, "eth1": {}}
    for name, files in stack.items():
        kernel.net(name, operstate="up", speed=10_000, **files)
    for name in ("eth0", "eth1"):
        kernel.driver(f"net/{name}", "ice")
    before = kernel.read()
    for name, sent in (("v7", 2_000), ("bond0", 2_000), ("eth0", 1_500), ("eth1", 500)):
        kernel.net(name, sent, operstate="up")
    kernel.write("net/eth1/statistics", tx_errors=4)
    carried = difference(before, kernel.read())
    assert [link["name"] for link in carried["interfaces"]] == ["v7"]
    rows = ports_of(read_node(kernel.root), carried["interfaces"] + carried["rest"])
    found = {row["port"]: (row["sent"], row["driver"], row["counters"]) for row in rows}
    errors = {"tx_errors": {"count": 4, "per_GB": 4 / 500e-9}}
    assert found == {
        "v7": (2000, "", {}),
        "bond0": (2000, "", {}),
        "eth0": (1500, "ice", {}),
        "eth1": (500, "ice", errors),
    }


def test_counters_of_an_adapter_stand_at_its_port_and_not_at_the_ip_over_it():
    counted = {"errors": {"link_downed": 1}, "tx_bytes": 5, "rx_bytes": 5}
    links = [{"name": "ib0", "kind": "ipoib", "carrier": "mlx4_0:2"} | counted]
    counts = {"link_downed": {"count": 1, "per_GB": pytest.approx(1e8)}}
    # A log of before has not what lies below.
    assert [row["counters"] for row in ports_of({}, links)] == [counts]
    links.append({"name": "mlx4_0:2", "kind": "infiniband"} | counted)
    assert [row["counters"] for row in ports_of({}, links)] == [{}, counts]


def test_what_was_counted_in_probe_and_training_is_added_up():
    links = [
        {"name": name, "kind": "roce", "tx_bytes": sent, "rx_bytes": 0, "errors": errors}
        for name, sent, errors in (("a", 3, {"x": 1}), ("a", 4, {"x": 2, "y": 1}), ("b", 5, {}))
    ]
    found = joined([links[:1], links[1:]])
    assert [(link["name"], link["tx_bytes"], dict(link["errors"])) for link in found] == [
        ("a", 7, {"x": 3, "y": 1}),
        ("b", 5, {}),
    ]


@pytest.mark.parametrize(
    ("device", "slot"),
    [
        ({"device": "0000:3b:00.1"}, "0000:3b:00"),
        ({"device": "0000:3b:02.5", "physical": "0000:3b:00.0"}, "0000:3b:00"),
        ({"device": "virtio2"}, "virtio2"),
        ({}, ""),
    ],
)
def test_a_card_is_told_by_its_slot_without_the_function(device, slot):
    """A virtual function belongs to the card of its physical one."""
    assert slot_of(device) == slot


def test_a_virtual_function_names_the_physical_one(kernel):
    for name in ("0000:3b:00.0", "0000:3b:02.5"):
        (kernel.root / "devices" / name).mkdir(parents=True)
    pci = kernel.root / "devices/0000:3b:02.5"
    (pci / "physfn").symlink_to("../0000:3b:00.0")
    kernel.net("vf0", operstate="up")
    (kernel.root / "class/net/vf0/device").symlink_to(pci)
    (row,) = ports_of(read_node(kernel.root), [])
    assert row["device"] == "0000:3b:00"


@pytest.mark.parametrize(
    ("link", "gbps"),
    [
        ([2.5, 1], 2),
        ([5, 8], 32),
        ([8, 16], 126),
        ([16, 16], 252),
        ([32, 8], 252),
        ([64, 16], 968),
    ],
)
def test_pcie_carries_less_than_its_transfers(link, gbps):
    assert pcie_Gbps(link) == pytest.approx(gbps, abs=0.1)


# --- counters.py ---------------------------------------------------------------------------------


def test_sentence_names_each_busy_interface():
    links = [carried("mlx5_0:1", "infiniband", 100, 20), carried("lo", "loopback", None, 2)]
    links += [carried("eth1", "ethernet", 1, 0.1)]  # under 1 %
    assert describe_traffic({"interfaces": links}) == (
        "Sent 2,000.0 MB and received 2,000.0 MB on mlx5_0:1 (infiniband); "
        "sent 200.0 MB and received 200.0 MB on lo (loopback)"
    )
    assert describe_traffic({"interfaces": []}) == ""


# --- The command -------------------------------------------------------------------------------


def count(root: Path, *arguments: object) -> list[str]:
    """The lines that the command prints on a node with these files of the kernel."""
    command, env = [sys.executable, TOOL, *arguments], {"SYSFS_ROOT": str(root)}
    how = {"capture_output": True, "text": True, "check": True, "timeout": 30 * FACTOR}
    return subprocess.run(command, env={**os.environ, **env}, **how).stdout.splitlines()


def test_command_prints_a_record_and_what_was_carried_since_this_nodes_last_one(kernel, tmp_path):
    for name in ("eth0", "eth1"):
        kernel.net(name)
    log = tmp_path / "node0.log"
    (first,) = count(tmp_path, "--since", log)  # there is no log yet
    host = json.loads(first.removeprefix("Counters "))["host"]
    earlier = first.replace("1000", "3001000")
    other = earlier.replace(host, "another")
    log.write_text(f"Step 0\n{earlier}\nStep 1\n{first}\nStep 2\n{other}\n{first[:40]}\n")
    kernel.net("eth0", 4_000_000, 200_000)
    record, sentence = count(tmp_path, "--since", log)
    words = "Sent 4.0 MB and received 0.2 MB on eth0 (ethernet) in "
    assert sentence.startswith(words) and sentence.endswith(" s")
    for line in (first, record):
        word, _, text = line.partition(" ")
        assert word == "Counters" and [*json.loads(text)] == [
            "host",
            "time",
            "interfaces",
            "tcp",
            "node",
        ]
