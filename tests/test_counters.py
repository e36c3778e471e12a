"""The kernel's counters tell which interface carried the bytes, each byte once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis import node
from analysis.kernel_counters import difference, read_counters, read_tcp, settled_counters
from analysis.node import merged, read_node
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

    def device(self, name: str, driver: str) -> None:
        """What the interface's link to its driver shows."""
        self.write(f"drivers/{driver}", module="")
        self.write(f"net/{name}/device", vendor="")
        (self.root / f"class/net/{name}/device/driver").symlink_to(
            self.root / f"class/drivers/{driver}"
        )

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
    kernel.device("eth0", "mlx5_core")
    kernel.net("down", speed=-1)
    kernel.net("lo", type=772)
    kernel.net("tun0", type=65534, speed=10)
    kernel.net("ib0", type=32, dev_port=1, speed=-1)
    kernel.write(BELOW, rate="56 Gb/sec (4X FDR)")
    kernel.port(PORT)
    kernel.port("mlx5_0/ports/1", layer="Ethernet")
    kernel.write("infiniband/efa_0/ports/1", link_layer="Unspecified")
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
            kernel.device(name, driver)
    facts = kernel.read()["interfaces"][next(iter(links))]
    stated = None if facts.get("virtual") else facts["speed_Gbps"]
    assert stated == expected


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
    kernel.device("eth0", "tg3")
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
        "eth0": {"state": "up", "mtu": 9000},
        "mlx5_0:1": {
            "device": "0000:3b:00.0",
            "driver": "",
            "numa": "1",
            "pcie": [16, 8],
            "pcie_most": [32, 8],
            "state": "ACTIVE",
            "rate": "25 Gb/sec (1X EDR)",
        },
    }


def test_of_several_readings_the_fastest_pcie_link_counts():
    """It was idle when the training's counters were read."""
    readings = [{"ports": {"eth0": {"pcie": [speed, 16]}}} for speed in (16, 2.5)]
    assert merged(readings)["ports"]["eth0"]["pcie"] == [16, 16]


@pytest.mark.parametrize(
    ("capable", "limit", "most"),
    [("0", 8 << 20, 8 << 20), ("4000", 8 << 20, None), ("0", resource.RLIM_INFINITY, None)],
)
def test_root_without_the_capability_may_lock_no_more_than_the_limit(
    monkeypatch, capable, limit, most
):
    """As in a container. Bit 14 is CAP_IPC_LOCK."""
    monkeypatch.setattr(node, "text_of", lambda path: f"Name: x\nCapEff:\t{capable}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert node.most_locked() == most


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
    assert describe_traffic({"interfaces": [*found.values()]}) == (
        "Sent 1.0 MB and received 1.0 MB on ib0 (ipoib over mlx4_0:2, link_downed 1)"
    )


def test_errors_are_those_between_the_readings(kernel):
    ways, waits = {"rx_errors": 2, "tx_errors": 3, "tx_dropped": 4}, {"port_xmit_wait": 12}
    lost = {"packet_seq_err": 7, "local_ack_timeout_err": 8, "out_of_sequence": 9}
    lost |= {"np_cnp_sent": 10, "rp_cnp_handled": 11}
    more = {
        "net/eth0": {"carrier_changes": 1},
        "net/eth0/statistics": ways,
        f"infiniband/{PORT}/counters": waits | {"link_downed": 5, "symbol_error": 6},
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
        "mlx4_0:2": waits | {"link_downed": 5, "symbol_error": 6} | lost,
    }


def test_segments_that_tcp_sent_again_are_those_between_the_readings():
    text = "Ip: 1 2\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 {} {}\nUdp: 5\n"
    before, after = (
        {"interfaces": {}, "tcp": read_tcp(text.format(*counts))}
        for counts in ((5000, 90), (7000, 120))
    )
    assert difference(before, after)["tcp"] == {"segments": 2000, "retransmits": 30}
    assert read_tcp("Tcp: OutSegs\nTcp: 5\n") is read_tcp("") is None


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
