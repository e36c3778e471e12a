"""Counters of the node's interfaces: against made trees of kernel files and the kernel's own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import counters
from launcher.counters import difference, read_counters
from support.nodes import NamespacePair
from support.processes import ROOT, require


class Tree:
    """Kernel files under a folder; `grow` adds to counters, as traffic does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = root / "sys/class"

    def write(self, path: Path, **files: object) -> None:
        """Files of a folder; in their names / is written as __."""
        for name, text in files.items():
            file = path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    def net(self, name: str, type: object = 1, speed: object = "", **files: object) -> None:
        facts = {"statistics__tx_bytes": 1000, "statistics__rx_bytes": 2000} | files
        self.write(self.classes / "net" / name, type=type, speed=speed, **facts)

    def port(self, device: str, number: int = 1, **files: object) -> None:
        self.write(self.classes / "infiniband" / device / "ports" / str(number), **files)

    def adapter(self, device: str, layer: str, rate: str, number: int = 1) -> None:
        """A port that counts as most do, in words of 4 bytes."""
        words = {"counters__port_xmit_data": 10, "counters__port_rcv_data": 20}
        self.port(device, number, link_layer=layer, rate=rate, state="4: ACTIVE", **words)

    def above(self, name: str, *lower: str) -> None:
        """A VLAN or a bridge, with the links to what it lies on."""
        for other in lower:
            (self.classes / "net" / name / f"lower_{other}").mkdir(parents=True)

    def ipoib(self, name: str, device: str, dev_port: int = 0) -> None:
        self.net(name, type=32, dev_port=dev_port)
        (self.classes / "net" / name / "device/infiniband" / device).mkdir(parents=True)

    def grow(self, where: str, **counts: int) -> None:
        for name, count in counts.items():
            file = self.classes / where / name.replace("__", "/")
            before = int(file.read_text()) if file.exists() else 0
            self.write(file.parent, **{file.name: before + count})

    def send(self, name: str, tx: int, rx: int) -> None:
        self.grow(f"net/{name}", statistics__tx_bytes=tx, statistics__rx_bytes=rx)

    def rdma(self, device: str, tx: int, rx: int, number: int = 1) -> None:
        """So many bytes, a multiple of 4 each way."""
        counts = {"counters__port_xmit_data": tx // 4, "counters__port_rcv_data": rx // 4}
        self.grow(f"infiniband/{device}/ports/{number}", **counts)

    def tcp(self, segments: int, retransmits: int) -> None:
        lines = ["Tcp: RtoMin OutSegs RetransSegs", f"Tcp: 200 {segments} {retransmits}"]
        text = "\n".join(["Ip: Forwarding", "Ip: 1", *lines, "Udp: InDatagrams", "Udp: 5"])
        self.write(self.root / "proc/net", snmp=text)

    def read(self) -> dict:
        return read_counters(self.root)

    def carried(self, before: dict) -> dict[str, dict]:
        """What was carried since, by name."""
        return {link["name"]: link for link in difference(before, self.read())["interfaces"]}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def bytes_of(link: dict) -> tuple[int, int]:
    return link["tx_bytes"], link["rx_bytes"]


# --- What a file says --------------------------------------------------------------------------


def test_kind_and_stated_speed_of_each_interface(tree):
    tree.net("eth0", speed=1000)
    tree.net("fast", speed=400000)
    tree.net("lo", type=772)
    tree.net("down", speed=-1)
    tree.net("ib0", type=32, speed=56000)
    tree.net("tun0", type=65534, speed=10)
    tree.adapter("mlx4_0", "InfiniBand", "56 Gb/sec (4X FDR)")
    tree.adapter("mlx4_0", "InfiniBand", "2.5 Gb/sec (1X SDR)", number=2)
    tree.adapter("mlx5_0", "Ethernet", "100 Gb/sec (4X EDR)")
    tree.port("mlx5_1", rate="100 Gb/sec (4X EDR)")  # says nothing else: no guess
    found = tree.read()["interfaces"]
    assert {name: (link["kind"], link["speed_Gbps"]) for name, link in found.items()} == {
        "eth0": ("ethernet", 1),
        "fast": ("ethernet", 400),
        "lo": ("loopback", None),
        "down": ("ethernet", None),
        "ib0": ("ipoib", 56),
        "tun0": ("other", 0.01),
        "mlx4_0:1": ("infiniband", 56),
        "mlx4_0:2": ("infiniband", 2.5),
        "mlx5_0:1": ("roce", 100),
        "mlx5_1:1": ("other", 100),
    }
    assert bytes_of(found["eth0"]) == (1000, 2000)
    assert bytes_of(found["mlx4_0:1"]) == (40, 80)  # words
    assert bytes_of(found["mlx5_1:1"]) == (0, 0)


@pytest.mark.parametrize(
    ("layer", "kind", "of_port"),
    [("Unknown", "efa", True), ("Unknown", "efa", False), ("Ethernet", "roce", True)],
)
def test_adapter_that_counts_bytes_for_port_or_device(tree, layer, kind, of_port):
    """Operations are told as well, and are not to be added."""
    device = "efa_0" if kind == "efa" else "bnxt_re0"
    tree.port(device, link_layer=layer, rate="100 Gb/sec (4X EDR)")
    folder = tree.classes / "infiniband" / device
    files = {"hw_counters__tx_bytes": 70, "hw_counters__rx_bytes": 80}
    if kind == "efa":
        files |= {"hw_counters__send_bytes": 60, "hw_counters__rdma_write_bytes": 10}
    tree.write(folder / "ports/1" if of_port else folder, **files)
    link = tree.read()["interfaces"][f"{device}:1"]
    assert (link["kind"], link["speed_Gbps"], *bytes_of(link)) == (kind, 100, 70, 80)


def test_counters_of_what_is_no_interface_are_zero(tree):
    tree.net("eth0", speed=100)
    tree.net("junk", type="?", speed="Unknown!", statistics__tx_bytes="many")
    folder = tree.classes / "net"
    tree.write(folder / "bytes")
    (folder / "bytes/statistics").mkdir(parents=True)
    (folder / "bytes/statistics/tx_bytes").write_bytes(b"\xff\xfe")
    (folder / "empty").mkdir()
    (folder / "bonding_masters").write_text("bond0\n")
    (folder / "nowhere").symlink_to(tree.root / "gone")
    (tree.classes / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    before = tree.read()
    found = {name: link["tx_bytes"] for name, link in before["interfaces"].items()}
    assert found.pop("eth0") == 1000 and set(found.values()) == {0}
    tree.send("eth0", 5, 6)
    assert list(tree.carried(before)) == ["eth0"]


def test_nothing_there_is_nothing_to_report(tree):
    assert tree.read() == {"interfaces": {}, "tcp": None}
    assert difference(tree.read(), tree.read()) == {"interfaces": []}
    assert counters.describe_traffic(difference(tree.read(), tree.read())) == ""


def test_counters_of_this_machine():
    require(Path("/sys/class/net/lo").exists(), "there is no /sys/class/net/lo here")
    before = read_counters()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        for _ in range(10):
            datagram.sendto(bytes(1000), ("127.0.0.1", 9))  # nobody has to receive them
    carried = difference(before, read_counters())
    (lo,) = (link for link in carried["interfaces"] if link["name"] == "lo")
    assert lo["kind"] == "loopback" and lo["tx_bytes"] >= 10_000
    assert carried["tcp"]["segments"] >= carried["tcp"]["retransmits"] >= 0


# On a node, with tools/ on its path: sends 4 MB; prints what was carried meanwhile.
SENDER = """
import json, socket, time
from launcher.counters import difference, read_counters
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
    datagram.sendto(b".", ("10.77.0.2", 9))
    time.sleep(0.3)  # now the other node's address is known
    before = read_counters()
    for _ in range(500):
        datagram.sendto(bytes(8000), ("10.77.0.2", 9))  # nobody has to receive them
    print(json.dumps(difference(before, read_counters())))
"""


def test_bridge_of_this_machine_is_counted_once():
    with NamespacePair() as nodes:
        for command in (
            "link add br0 type bridge",
            "link set eth0 master br0",
            "addr flush dev eth0",
            "addr add 10.77.0.1/24 dev br0",
            "link set br0 mtu 9000 up",
        ):
            done = subprocess.run(["ip", "-n", nodes.names[0], *command.split()], check=False)
            require(done.returncode == 0, f"no bridge can be made here: ip {command}")
        sender = [sys.executable, "-c", SENDER]
        run = nodes.popen(0, sender, env={"PYTHONPATH": str(ROOT / "tools")}).finish(30)
    (link,) = json.loads(run.out)["interfaces"]
    assert link["name"] == "br0" and 4_000_000 < link["tx_bytes"] < 4_400_000


# --- Between two readings ----------------------------------------------------------------------


def test_difference_has_the_busiest_first_and_leaves_out_what_carried_nothing(tree):
    for name, speed in (("lo", 0), ("eth0", 10_000), ("eth1", 1000)):
        tree.net(name, type=772 if name == "lo" else 1, speed=speed)
    before = tree.read()
    tree.send("lo", 5, 5)
    tree.send("eth0", 3000, 500)
    tree.net("tun0")  # nobody knows what it had counted
    lo = link("lo", "loopback", 5, 5, speed_Gbps=None)
    found = difference(before, tree.read())
    assert found == {"interfaces": [link("eth0", "ethernet", 3000, 500), lo]}
    assert type(found["interfaces"][0]["tx_bytes"]) is int


def test_counter_that_was_reset_counts_nothing(tree):
    tree.adapter("mlx5_0", "InfiniBand", "100 Gb/sec")
    before = tree.read()
    tree.port("mlx5_0", counters__port_xmit_data=0, counters__port_rcv_data=120)
    (link,) = tree.carried(before).values()
    assert bytes_of(link) == (0, 400)


def test_ip_over_infiniband_is_known_with_its_adapter_and_counted_once(tree):
    """The second port of an adapter, as dev_port says; it counts its headers too."""
    tree.adapter("mlx4_0", "InfiniBand", "56 Gb/sec (4X FDR)", number=1)
    tree.adapter("mlx4_0", "InfiniBand", "56 Gb/sec (4X FDR)", number=2)
    tree.ipoib("ib1", "mlx4_0", dev_port=1)
    before = tree.read()
    tree.send("ib1", 1_000_000, 1_000_000)
    tree.rdma("mlx4_0", 1_040_000, 1_040_000, number=2)
    tree.grow("infiniband/mlx4_0/ports/2", counters__link_downed=1)
    tree.grow("net/ib1", carrier_changes=2)
    (link,) = tree.carried(before).values()
    assert (link["name"], link["kind"], link["carrier"]) == ("ib1", "ipoib", "mlx4_0:2")
    assert bytes_of(link) == (1_000_000, 1_000_000)
    assert link["speed_Gbps"] == 56  # it states none itself
    assert link["errors"] == {"link_downed": 1, "carrier_changes": 2}
    assert counters.describe_traffic({"interfaces": [link]}) == (
        "sent 1 MB and received 1 MB on ib1 (ipoib over mlx4_0:2); "
        "ib1: link_downed 1, carrier_changes 2"
    )


def test_rdma_beside_ip_over_infiniband_is_what_the_port_has_left(tree):
    tree.adapter("mlx5_0", "InfiniBand", "100 Gb/sec (4X EDR)")
    tree.ipoib("ib0", "mlx5_0")
    before = tree.read()
    tree.send("ib0", 10_000, 20_000)
    tree.rdma("mlx5_0", 1_010_000, 1_020_000)
    found = tree.carried(before)
    assert list(found) == ["mlx5_0:1", "ib0"] and "carrier" not in found["mlx5_0:1"]
    assert bytes_of(found["mlx5_0:1"]) == (1_000_000, 1_000_000)


def test_roce_leaves_its_ethernet_interface_alone(tree):
    """The interface lacks what RDMA moved, and what it has itself is no RDMA."""
    tree.adapter("mlx5_0", "Ethernet", "100 Gb/sec (4X EDR)")
    tree.net("eth0", speed=100_000)
    (tree.classes / "net/eth0/device/infiniband/mlx5_0").mkdir(parents=True)
    before = tree.read()
    tree.send("eth0", 4000, 4000)
    tree.rdma("mlx5_0", 800_000, 800_000)
    found = tree.carried(before)
    assert {name: (link["kind"], *bytes_of(link)) for name, link in found.items()} == {
        "mlx5_0:1": ("roce", 800_000, 800_000),
        "eth0": ("ethernet", 4000, 4000),
    }
    assert "carrier" not in found["eth0"]


def counted(tree: Tree, sent: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What counts of interfaces that sent and received so many bytes."""
    before = tree.read()
    for name, count in sent.items():
        tree.send(name, count, count)
    return {name: bytes_of(link) for name, link in tree.carried(before).items()}


def bond(tree: Tree) -> None:
    tree.net("bond0", speed=20_000, bonding__slaves="eth0 eth1")
    tree.net("eth0", speed=10_000)
    tree.net("eth1", speed=10_000)
    tree.above("bond0", "eth0", "eth1")


def test_bond_stands_for_its_members(tree):
    """Whatever these count beside: a member in reserve hears what the bond does not take."""
    bond(tree)
    before = tree.read()
    tree.send("bond0", 300, 500)
    tree.send("eth0", 200, 500)
    tree.send("eth1", 100, 400)
    tree.grow("net/eth0", carrier_changes=1)
    tree.grow("net/eth1", carrier_changes=2)
    (link,) = tree.carried(before).values()
    assert (link["name"], link["speed_Gbps"], *bytes_of(link)) == ("bond0", 20, 300, 500)
    assert link["members"] == ["eth0", "eth1"] and link["errors"] == {"carrier_changes": 3}


def test_vlan_on_a_bond_is_counted_once(tree):
    bond(tree)
    tree.net("bond0.7", speed=20_000)
    tree.above("bond0.7", "bond0")
    found = counted(tree, {"bond0.7": 800, "bond0": 1000, "eth0": 500, "eth1": 500})
    assert found == {"bond0.7": (800, 800), "bond0": (200, 200)}


def test_bridge_and_its_ports_are_counted_once(tree):
    """The host's own traffic is on br0 and eth0, a container's on veth1 and eth0."""
    tree.net("br0")
    tree.net("eth0", speed=1000)
    tree.net("veth1", speed=10_000, ifindex=7, iflink=2)  # the other end is in a container
    tree.above("br0", "eth0", "veth1")
    found = counted(tree, {"br0": 900, "eth0": 1500, "veth1": 600})
    assert found == {"br0": (900, 900), "eth0": (600, 600)}


def test_veth_on_a_bridge_of_its_own_stays(tree):
    """As Docker has it: the bridge leads to the host alone."""
    tree.net("docker0")
    tree.net("veth1", ifindex=7, iflink=2)
    tree.above("docker0", "veth1")
    found = counted(tree, {"docker0": 900, "veth1": 1500})
    assert found == {"docker0": (900, 900), "veth1": (600, 600)}


@pytest.mark.parametrize("pair", [True, False])
def test_both_ends_of_a_veth_are_counted_once(tree, pair):
    """An index of another namespace may be that of a stranger here, with other traffic."""
    tree.net("veth0", ifindex=4, iflink=5)
    tree.net("veth1", ifindex=5, iflink=4)
    before = tree.read()
    tree.send("veth0", 100_000, 300_000)
    tree.send("veth1", *((300_000, 100_000) if pair else (100_000, 300_000)))
    assert list(tree.carried(before)) == (["veth0"] if pair else ["veth0", "veth1"])


# --- What went wrong ---------------------------------------------------------------------------


def test_errors_are_differences_and_only_those_that_came(tree):
    tree.net("eth0", carrier_changes=8, statistics__rx_dropped=100, statistics__tx_errors=3)
    tree.adapter("mlx5_0", "InfiniBand", "100 Gb/sec")
    tree.port("mlx5_0", hw_counters__packet_seq_err=7, counters__symbol_error=4)
    tree.tcp(5000, 90)
    before = tree.read()
    tree.send("eth0", 5000, 5000)
    tree.rdma("mlx5_0", 4000, 4000)
    tree.grow("net/eth0", carrier_changes=2, statistics__rx_dropped=5)
    port = "infiniband/mlx5_0/ports/1"
    tree.grow(port, hw_counters__packet_seq_err=11, counters__port_xmit_wait=10**9)
    tree.tcp(7000, 120)
    carried = difference(before, tree.read())
    found = {link["name"]: link["errors"] for link in carried["interfaces"]}
    assert found == {
        "eth0": {"carrier_changes": 2, "rx_dropped": 5},
        "mlx5_0:1": {"packet_seq_err": 11, "port_xmit_wait": 10**9},
    }
    assert carried["tcp"] == {"segments": 2000, "retransmits": 30}
    # Waiting is no error.
    assert counters.went_wrong(carried) == [
        "TCP sent 30 of 2,000 segments again",
        "eth0: carrier_changes 2",
        "mlx5_0:1: packet_seq_err 11",
    ]


def test_healthy_link_has_no_errors_and_no_word_of_them(tree):
    tree.net("eth0", statistics__rx_dropped=100)
    tree.tcp(5000, 90)
    before = tree.read()
    tree.send("eth0", 5000, 5000)
    tree.tcp(25_000, 100)  # one in 2,000
    carried = difference(before, tree.read())
    assert carried["interfaces"][0].get("errors") is None
    assert carried["tcp"]["retransmits"] == 10 and counters.went_wrong(carried) == []


@pytest.mark.parametrize(
    "text", ["", "Tcp: OutSegs\n", "Tcp: OutSegs\nTcp: 5\n", "Tcp: A\nTcp:\n"]
)
def test_tcp_is_left_out_where_the_kernel_does_not_tell(tree, text):
    tree.write(tree.root / "proc/net", snmp=text)
    assert tree.read()["tcp"] is None


# --- For people --------------------------------------------------------------------------------


def link(name, kind, tx, rx, **more):
    return {"name": name, "kind": kind, "speed_Gbps": 10, "tx_bytes": tx, "rx_bytes": rx} | more


def test_sentence_names_what_carried_the_traffic_loopback_too():
    """Several processes of a node talk over loopback, which may carry more than any link."""
    links = [
        link("lo", "loopback", 5e8, 5e8),
        link("eth0", "ethernet", 9e7, 8e7),
        link("eth1", "ethernet", 7e5, 0, errors={"tx_dropped": 9}),  # under 1 %
    ]
    assert counters.describe_traffic({"interfaces": links}) == (
        "sent 500 MB and received 500 MB on lo (loopback); "
        "sent 90 MB and received 80 MB on eth0 (ethernet)"
    )


def test_rails_are_summed():
    """Four of InfiniBand; the Ethernet interface beside them is another network, and so is one
    that carried far less.
    """
    links = [link(f"mlx5_{n}:1", "infiniband", 1e9 - n, 1e9) for n in range(4)]
    links += [link("eth0", "ethernet", 2e8, 2e8), link("mlx5_9:1", "infiniband", 1.5e8, 1.5e8)]
    assert counters.describe_traffic({"interfaces": links}) == (
        "sent 4 GB and received 4 GB on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1 (infiniband); "
        "sent 200 MB and received 200 MB on eth0 (ethernet); "
        "sent 150 MB and received 150 MB on mlx5_9:1 (infiniband)"
    )
