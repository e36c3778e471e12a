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
from pytest import approx

from analysis import kernel as module
from analysis.kernel import difference, joined, merged, pcie_Gbps, ports_of, read_node, slot_of
from counters import describe_traffic
from support.made_logs import carried
from support.processes import FACTOR, ROOT


class Kernel:
    """Files as the kernel has them in /sys, made in another folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, folder: str, **files: object) -> None:
        for name, text in files.items():
            path = self.root / "class" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    def net(self, name: str, count: int = 0, below: str = "", **files: object) -> None:
        """An interface that has moved so many bytes each way, and the interfaces below it."""
        self.write(f"net/{name}/statistics", tx_bytes=1000 + count, rx_bytes=2000 + count)
        self.write(f"net/{name}", **{"type": 1} | files)
        for lower in below.split():
            self.write(f"net/{name}/lower_{lower}", mtu=1500)

    def port(self, place: str, count: int = 0, layer: str = "InfiniBand", rate: str = "") -> None:
        """An adapter's port that has moved so many bytes each way."""
        rate = rate or "56 Gb/sec (4X FDR)"
        self.write(f"infiniband/{place}", link_layer=layer, rate=rate)
        words = 10 + count // 4
        self.write(f"infiniband/{place}/counters", port_xmit_data=words, port_rcv_data=words)

    def driver(self, folder: str, driver: str) -> None:
        """What the link of an interface or an adapter to its driver shows."""
        self.write(f"drivers/{driver}", module="")
        self.write(f"{folder}/device", vendor="")
        link = self.root / "class" / folder / "device/driver"
        link.symlink_to(self.root / f"class/drivers/{driver}")

    def read(self) -> dict:
        return module.read_counters(self.root)

    def since(self, before: dict, which: str = "interfaces") -> dict[str, dict]:
        """The interfaces that carried something, by name."""
        return {link["name"]: link for link in difference(before, self.read())[which]}


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path / "sys")


# --- What a file says --------------------------------------------------------------------------

# Of IP over InfiniBand: the port below it, as a folder of its own and below the interface.
PORT, BELOW = "mlx4_0/ports/2", "net/ib0/device/infiniband/mlx4_0/ports/2"
INTERFACES = {  # driver, Mb/s, what lies below it; then what is stated, in Gb/s, and by whom
    "eth0": ("ice", 10_000, "", 10, "its port"),
    "eth1": ("ice", 10_000, "", 10, "its port"),
    "slow": ("igb", 1_000, "", 1, "its port"),
    "unplugged": ("ice", -1, "", None, ""),
    "ens5": ("ena", 100_000, "", 100, "a virtual function's driver"),
    "virtio0": ("virtio_net", 100_000, "", 100, "a driver of virtual machines"),
    "azure": ("hv_netvsc", 50_000, "eth0", 10, "a driver of virtual machines"),
    "veth0": ("", 10_000, "", 10, "a virtual interface"),
    "bond0": ("", 20_000, "eth0 eth1", 20, "the bond of eth0 and eth1"),
    "bond1": ("", 10_000, "eth0 eth1", 10, "the bond of eth0 and eth1"),  # one is active
    "bond2": ("", 20_000, "veth0", 20, "a virtual interface"),
    "eth0.7": ("", 10_000, "eth0", 10, "the port below the VLAN"),
    "bond0.7": ("", 20_000, "bond0", 20, "the bond of eth0 and eth1 below the VLAN"),
    "br0": ("", 10_000, "slow veth0", 1, "the port below the bridge"),
    "br1": ("", 10_000, "eth0 eth1", 10, "the ports below the bridge"),
    "team0": ("", -1, "eth0", 10, "the port below the interface"),
}
TYPES = {"br0": "bridge", "br1": "bridge", "eth0.7": "vlan", "bond0.7": "vlan"}


def test_an_interface_states_what_the_hardware_below_it_does(kernel):
    """Only a port states what its link carries."""
    for name, (driver, speed, below, *_) in INTERFACES.items():
        kernel.net(name, below=below, speed=speed)
        if driver:
            kernel.driver(f"net/{name}", driver)
        if name in TYPES:
            kernel.write(f"net/{name}", uevent=f"DEVTYPE={TYPES[name]}\nINTERFACE=x")
    for name in ("bond0", "bond1", "bond2"):
        kernel.write(f"net/{name}/bonding", slaves="eth0 eth1")
    found = kernel.read()["interfaces"]
    stated = {name: (link["speed_Gbps"], link["stated_by"]) for name, link in found.items()}
    assert stated == {name: row[-2:] for name, row in INTERFACES.items()}
    virtual = {name for name, link in found.items() if link.get("virtual")}
    assert virtual == {"virtio0", "veth0", "bond2"}


def test_kind_of_an_interface_is_by_its_type(kernel):
    kinds = {1: "ethernet", 32: "ipoib", 772: "loopback", 65534: "other"}
    for number in kinds:
        kernel.net(f"net{number}", type=number)
    found = kernel.read()["interfaces"]
    assert {int(name[3:]): link["kind"] for name, link in found.items()} == kinds


ADAPTERS = {  # link layer and rate; then kind, what is stated, in Gb/s, and by whom
    "ib_0": ("InfiniBand", "200 Gb/sec (4X HDR)", "infiniband", 200, "its port"),
    "ib_1": ("InfiniBand", "40 Gb/sec (4X FDR10)", "infiniband", 40, "its port"),
    "ib_2": ("InfiniBand", "40 Gb/sec (4X QDR)", "infiniband", 32, "its port"),
    "ib_3": ("InfiniBand", "20 Gb/sec (4X DDR)", "infiniband", 16, "its port"),
    "ib_4": ("InfiniBand", "10 Gb/sec (4X)", "infiniband", 8, "its port"),
    "roce_0": ("Ethernet", "40 Gb/sec (4X QDR)", "roce", 40, "its port"),  # of Ethernet's 40
    "roce_1": ("Ethernet", "100 Gb/sec (4X EDR)", "roce", 100, "a virtual function's driver"),
    "efa_0": ("Unspecified", "100 Gb/sec", "efa", 100, "EFA's driver"),
    "new_0": ("Unspecified", "0", "unknown", None, ""),
}


def test_rate_of_an_adapter_is_what_carries_data(kernel):
    """Also that of IP over it."""
    for name, (layer, rate, *_) in ADAPTERS.items():
        kernel.port(f"{name}/ports/1", layer=layer, rate=rate)
    kernel.driver("infiniband/efa_0", "efa")
    kernel.write("infiniband/roce_1/device/physfn", vendor="")
    expected = {f"{name}:1": row[-3:] for name, row in ADAPTERS.items()}
    kernel.net("ib0", type=32, dev_port=1)
    kernel.write(BELOW, rate="40 Gb/sec (4X QDR)")
    expected["ib0"] = ("ipoib", 32, "its port")
    nodes = read_node(kernel.root)["ports"]
    for ports in (kernel.read()["interfaces"], nodes):
        facts = {n: (p["kind"], p["speed_Gbps"], p["stated_by"]) for n, p in ports.items()}
        assert facts == expected
    assert nodes["ib_2:1"]["rate"] == "40 Gb/sec (4X QDR)"


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


def test_ports_count_words_and_efa_counts_bytes(kernel):
    counters = {"port_xmit_data": 10, "port_rcv_data": 20}
    kernel.write("infiniband/mlx5_0/ports/1/counters", **counters)
    kernel.write("infiniband/efa_0/ports/1/hw_counters", tx_bytes=70, rx_bytes=80, send_bytes=60)
    links = kernel.read()["interfaces"]
    found = {name: (link["tx_bytes"], link["rx_bytes"]) for name, link in links.items()}
    assert found == {"mlx5_0:1": (40, 80), "efa_0:1": (70, 80)}


def test_missing_and_odd_files_count_nothing(kernel):
    assert kernel.read()["interfaces"] == {}
    kernel.write("net", bonding_masters="bond0")
    kernel.write("net/eth0", type="?", speed="Unknown!")
    kernel.write("net/eth0/statistics", tx_bytes="many")
    before = kernel.read()
    assert before["interfaces"].keys() == {"eth0"} and kernel.since(before) == {}


def test_counters_are_read_when_the_drivers_have_refreshed_them(kernel, monkeypatch):
    """Some do so once a second; virtual interfaces are never late."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        kernel.net("eth0", 5000)

    monkeypatch.setattr(time, "sleep", wait)
    kernel.net("eth0", 3000)
    settled = module.settled_counters(kernel.root)["interfaces"]
    assert settled["eth0"]["tx_bytes"] == 4000 and not waits
    kernel.driver("net/eth0", "tg3")
    settled = module.settled_counters(kernel.root)["interfaces"]
    assert settled["eth0"]["tx_bytes"] == 6000 and len(waits) == 1 and waits[0] > 1


# --- Facts of a node -----------------------------------------------------------------------------


def test_of_several_readings_the_fastest_pcie_link_counts():
    """It was idle when the training's counters were read."""
    readings = [{"ports": {"eth0": {"pcie": [speed, 16]}}} for speed in (16, 2.5)]
    assert merged(readings)["ports"]["eth0"]["pcie"] == [16, 16]


def test_locked_memory_is_limited_unless_root_is_real(monkeypatch):
    """Bit 14 is CAP_IPC_LOCK. Root in a container may lack it, or have it in vain."""
    first, other, limit = "user:[4026531837]", "user:[4026532900]", 8 << 20
    for capable, namespace, given, most in (
        ("0", first, limit, limit),
        ("4000", first, limit, None),
        ("4000", other, limit, limit),
        ("0", other, resource.RLIM_INFINITY, None),
    ):
        monkeypatch.setattr(module, "text_of", lambda _, mask=capable: f"N: x\nCapEff:\t{mask}\n")
        monkeypatch.setattr(os, "readlink", lambda _, name=namespace: name)
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=given: (most, most))
        assert module.most_locked() == most, (capable, namespace)


def test_free_memory_is_no_more_than_the_containers(kernel):
    assert module.free_memory(kernel.root) == 0
    kernel.write("../../proc", meminfo="MemTotal: 9 kB\nMemAvailable:   4000 kB")
    assert module.free_memory(kernel.root) == 4_096_000
    for limit, free in (("max", 4_096_000), ("1000000", 1_000_000)):
        kernel.write("../fs/cgroup", **{"memory.max": limit})
        assert module.free_memory(kernel.root) == free


# --- Between two readings ----------------------------------------------------------------------


def test_busiest_comes_first_without_what_is_idle_new_or_reset(kernel):
    kernel.port(PORT, 400)
    for name in ("eth0", "eth1", "idle"):
        kernel.net(name)
    before = kernel.read()
    kernel.net("eth0", 5)
    kernel.net("eth1", 3000)
    kernel.net("new", 700)
    kernel.write(f"infiniband/{PORT}/counters", port_xmit_data=0, port_rcv_data=120)
    found = [(n, link["tx_bytes"], link["rx_bytes"]) for n, link in kernel.since(before).items()]
    assert found == [("eth1", 3000, 3000), ("mlx4_0:2", 0, 40), ("eth0", 5, 5)]


# Of each interface: bytes sent and received, what lies below it. Then which ones count.
STACKS = {
    "bond": ({"bond0": (800, "eth0 eth1"), "eth0": (400, ""), "eth1": (400, "")}, ["bond0"]),
    "VLAN": ({"v7": (900, "bond0"), "bond0": (1000, "eth0"), "eth0": (1000, "")}, ["v7"]),
    "bridge": ({"br0": (900, "eth0"), "eth0": (950, "")}, ["br0"]),
    "its own traffic": ({"br0": (90, "eth0"), "eth0": (1500, "")}, ["eth0", "br0"]),
}


@pytest.mark.parametrize(("stack", "counted"), STACKS.values(), ids=STACKS)
def test_what_lies_below_another_interface_is_counted_once(kernel, stack, counted):
    """The rest, with its errors, has a row in the report."""
    for name, (_, below) in stack.items():
        kernel.net(name, below=below)
    kernel.write("net/bond0/bonding", slaves="eth0 eth1")
    before = kernel.read()
    for name, (count, _) in stack.items():
        kernel.net(name, count)
    kernel.write("net/eth0/statistics", tx_errors=4)
    found, rest = kernel.since(before), kernel.since(before, "rest")
    assert list(found) == counted and {*rest} == {*stack} - {*found}
    # A comparison tells how many ports a bond has.
    assert "bond0" not in found or found["bond0"]["members"] == ["eth0", "eth1"]
    rows = {row["port"]: row for row in ports_of({}, [*found.values(), *rest.values()])}
    assert {name: row["sent"] for name, row in rows.items()} == {n: stack[n][0] for n in stack}
    assert rows["eth0"]["counters"]["tx_errors"]["count"] == 4


def test_ip_over_infiniband_is_counted_once(kernel):
    """The errors of its port are told with it, and in a report at the port."""
    kernel.port(PORT)
    kernel.net("ib0", type=32, dev_port=1)
    kernel.write(BELOW, rate="56 Gb/sec")
    before = kernel.read()
    kernel.net("ib0", 1_000_000, type=32)
    kernel.port(PORT, 1_040_000)  # its headers, too
    kernel.write(f"infiniband/{PORT}/counters", link_downed=1)
    kernel.write(f"{BELOW}/counters", link_downed=1)
    found, rest = kernel.since(before), kernel.since(before, "rest")
    assert found.keys() == {"ib0"} and found["ib0"]["carrier"] == "mlx4_0:2"
    assert found["ib0"]["errors"] == {"link_downed": 1}
    rows = {row["port"]: row for row in ports_of({}, [*found.values(), *rest.values()])}
    assert rows["ib0"]["counters"] == {} and "link_downed" in rows["mlx4_0:2"]["counters"]


def test_errors_are_those_between_the_readings(kernel):
    files = {
        "net/eth0": {"carrier_changes": 1},
        "net/eth0/statistics": {"rx_errors": 2, "tx_dropped": 4},
        f"infiniband/{PORT}/counters": {"symbol_error": 6, "port_xmit_wait": 12},
        f"infiniband/{PORT}/hw_counters": {"out_of_sequence": 9, "np_cnp_sent": 10},
    }

    def write(moved: int, factor: int) -> None:
        kernel.net("idle", moved, carrier_changes=20)
        kernel.net("eth0", moved)
        kernel.port(PORT, moved)
        for folder, counts in files.items():
            kernel.write(folder, **{name: 20 + factor * n for name, n in counts.items()})

    write(0, 0)
    before = kernel.read()
    write(4000, 1)
    of_eth0, more, of_port, hardware = files.values()
    found = {name: link.get("errors") for name, link in kernel.since(before).items()}
    assert found == {"idle": None, "eth0": of_eth0 | more, "mlx4_0:2": of_port | hardware}


# --- Under load --------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps or reads, and traffic that goes on meanwhile."""

    def __init__(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, **links: tuple) -> None:
        """links: of each, bytes sent in a second, seconds between its driver's counts, and the
        phase of these.
        """
        self.kernel, self.now, self.links = kernel, 100.0, links
        self.sleep(0)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for name, (rate, every, phase) in self.links.items():
            counted = (self.now - phase) // every * every + phase if every else self.now
            self.kernel.net(name, int(rate * counted))


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.69, 0.71])
def test_rate_of_a_driver_that_counts_once_a_second_is_exact(kernel, monkeypatch, phase):
    clock = Clock(kernel, monkeypatch, eth0=(125e6, 1.0, phase), eth1=(1e3, 0, 0))
    kernel.driver("net/eth0", "tg3")
    before = kernel.read()
    clock.sleep(3)
    found = module.read_meanwhile(before, kernel.root)
    eth0, eth1 = found["interfaces"]
    assert eth0["wire_Gbps"] == approx(1, rel=0.01) and eth1["name"] == "eth1"
    assert found["seconds"] >= 2.5 and found["node"]["ports"].keys() == {"eth0", "eth1"}


def test_rates_are_of_the_time_between_the_readings(kernel, monkeypatch):
    """Virtual interfaces need less of it."""
    clock = Clock(kernel, monkeypatch, br0=(250e6, 0, 0), veth0=(250e6, 0, 0))
    kernel.net("br0", below="veth0")
    before = kernel.read()
    clock.sleep(3)
    found = module.read_meanwhile(before, kernel.root)
    for (link,), name in ((found["interfaces"], "br0"), (found["rest"], "veth0")):
        assert link["name"] == name and link["wire_Gbps"] == approx(2, rel=1e-6)
        assert link["tx_bytes"] == approx(250e6 * found["seconds"])
    assert 1.5 <= found["seconds"] < 2


@pytest.mark.parametrize(("moved", "most"), [(0, 3), (9000, 6)])
def test_a_node_whose_traffic_has_stopped_is_not_waited_for(kernel, monkeypatch, moved, most):
    clock = Clock(kernel, monkeypatch, eth0=(0, 0, 0))
    kernel.driver("net/eth0", "tg3")
    before = kernel.read()
    monkeypatch.setattr(kernel, "net", lambda *_: None)
    kernel.write("net/eth0/statistics", tx_bytes=1000 + moved)
    assert module.read_meanwhile(before, kernel.root)["interfaces"] == []
    assert clock.now < 100 + most


# --- A row for each port -----------------------------------------------------------------------


def test_each_port_that_is_up_or_has_carried_bytes_has_a_row(kernel):
    """Also a second port that nobody uses; not one that is down. The slot has 8 GT/s."""
    for function, lanes in ((0, 16), (1, 8)):
        place = f"../devices/slot/0000:3b:00.{function}"
        link = {"current_link_speed": "8.0 GT/s PCIe", "current_link_width": lanes}
        kernel.write(place, **link, max_link_speed="32.0 GT/s", max_link_width=16)
        kernel.port(f"mlx5_{function}/ports/1")
        kernel.write(f"infiniband/mlx5_{function}/ports/1", state="4: ACTIVE", rate="40 (4X QDR)")
        device = kernel.root / f"class/infiniband/mlx5_{function}/device"
        device.symlink_to(kernel.root / "class" / place)
    kernel.write("../devices/slot", max_link_speed="8.0 GT/s PCIe", max_link_width=16)
    kernel.net("down", operstate="down")
    kernel.net("lo", operstate="unknown", mtu=65536, type=772)
    before = kernel.read()
    kernel.port("mlx5_0/ports/1", 2_000_000_000, rate="40 (4X QDR)")
    kernel.write("infiniband/mlx5_0/ports/1/counters", port_rcv_errors=6)
    kernel.write("infiniband/mlx5_1/ports/1/counters", link_downed=1)
    kernel.net("lo", 500, type=772)
    moved = difference(before, kernel.read())
    first, lo, idle = ports_of(read_node(kernel.root), moved["interfaces"] + moved["rest"])
    assert first == {
        "port": "mlx5_0:1",
        "kind": "infiniband",
        "state": "ACTIVE",
        "rate": "40 (4X QDR)",
        "speed_Gbps": 32,
        "stated_by": "its port",
        "driver": "",
        "MTU": None,
        "pcie_Gbps": approx(126, abs=0.1),
        "pcie_most_Gbps": approx(126, abs=0.1),
        "device": "0000:3b:00",
        "sent": 2_000_000_000,
        "received": 2_000_000_000,
        "counters": {"port_rcv_errors": {"count": 6, "per_GB": 1.5}},
    }
    assert (idle["port"], idle["device"], idle["sent"]) == ("mlx5_1:1", "0000:3b:00", 0)
    assert idle["pcie_Gbps"] == approx(63, abs=0.1)
    assert idle["counters"] == {"link_downed": {"count": 1, "per_GB": None}}
    assert (lo["port"], lo["sent"], lo["rate"], lo["MTU"]) == ("lo", 500, "", 65536)


def test_what_was_counted_in_probe_and_training_is_added_up():
    links = [
        {"name": name, "kind": "roce", "tx_bytes": sent, "rx_bytes": 0, "errors": errors}
        for name, sent, errors in (("a", 3, {"x": 1}), ("a", 4, {"x": 2, "y": 1}), ("b", 5, {}))
    ]
    found = joined([links[:1], links[1:]])
    assert [(link["name"], link["tx_bytes"]) for link in found] == [("a", 7), ("b", 5)]
    assert found[0]["errors"] == {"x": 3, "y": 1}


def test_a_card_is_told_by_its_slot_without_the_function(kernel):
    """A virtual function belongs to the card of its physical one."""
    assert slot_of({"device": "0000:3b:00.1"}) == "0000:3b:00"
    assert (slot_of({"device": "virtio2"}), slot_of({})) == ("virtio2", "")
    kernel.write("../devices/0000:3b:00.0", vendor="")
    kernel.write("../devices/0000:3b:02.5", vendor="")
    pci = kernel.root / "devices/0000:3b:02.5"
    (pci / "physfn").symlink_to("../0000:3b:00.0")
    kernel.net("vf0", operstate="up")
    (kernel.root / "class/net/vf0/device").symlink_to(pci)
    (row,) = ports_of(read_node(kernel.root), [])
    assert row["device"] == "0000:3b:00"


def test_pcie_carries_less_than_its_transfers():
    rates = {(2.5, 1): 2, (5, 8): 32, (8, 16): 126, (16, 16): 252, (32, 8): 252, (64, 16): 968}
    assert {link: round(pcie_Gbps([*link])) for link in rates} == rates


# --- counters.py ---------------------------------------------------------------------------------


def test_sentence_names_each_busy_interface():
    links = [carried("mlx5_0:1", "infiniband", 100, 20), carried("lo", "loopback", None, 2)]
    links += [carried("eth1", "ethernet", 1, 0.1)]  # under 1 %
    assert describe_traffic({"interfaces": links}) == (
        "Sent 2,000.0 MB and received 2,000.0 MB on mlx5_0:1 (infiniband); "
        "sent 200.0 MB and received 200.0 MB on lo (loopback)"
    )
    assert describe_traffic({"interfaces": []}) == ""
    link = {"name": "eth0", "kind": "ethernet", "tx_bytes": 3_000_000, "rx_bytes": 1_000_000}
    words = "Sent 3.0 MB and received 1.0 MB on eth0 (ethernet)"
    assert describe_traffic({"interfaces": [link]}) == words


def test_command_prints_what_was_carried_since_the_last_record(kernel, tmp_path):
    """Since this node's last one in the log."""
    log = tmp_path / "node0.log"
    command = [sys.executable, ROOT / "tools" / "counters.py", "--since", log]
    how = {"capture_output": True, "text": True, "check": True, "timeout": 30 * FACTOR}
    how["env"] = {**os.environ, "SYSFS_ROOT": str(kernel.root)}
    kernel.net("eth0")
    kernel.net("eth1")
    (first,) = subprocess.run(command, **how).stdout.splitlines()  # there is no log yet
    host = json.loads(first.removeprefix("Counters "))["host"]
    earlier = first.replace("1000", "3001000")
    other = earlier.replace(host, "another")
    log.write_text(f"Step 0\n{earlier}\nStep 1\n{first}\nStep 2\n{other}\n{first[:40]}\n")
    kernel.net("eth0", 4_000_000)
    record, sentence = subprocess.run(command, **how).stdout.splitlines()
    words = "Sent 4.0 MB and received 4.0 MB on eth0 (ethernet) in "
    assert sentence.startswith(words) and sentence.endswith(" s")
    names = ["host", "time", "interfaces", "node"]
    assert [*json.loads(record.removeprefix("Counters "))] == names
