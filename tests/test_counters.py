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
    """Kernel files under a folder; in the names of files / is written as __."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = root / "sys/class"

    def write(self, path: Path | str, **files: object) -> None:
        """Files of a folder of /sys/class."""
        for name, text in files.items():
            file = self.classes / path / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    def net(self, name: str, **files: object) -> None:
        """A file under lower_eth0/ makes that what it lies on, one under device/infiniband/mlx5_0/
        its adapter.
        """
        self.send(name, 0, 0)
        self.write(f"net/{name}", **{"type": 1} | files)

    def adapter(self, port: str, layer: str = "InfiniBand", gbps: float = 100) -> None:
        """A port that counts as most do, in words of 4 bytes."""
        self.rdma(port, 0, link_layer=layer, rate=f"{gbps} Gb/sec (4X)")

    def send(self, name: str, tx: int, rx: int, **more: object) -> None:
        counts = {"statistics__tx_bytes": 1000 + tx, "statistics__rx_bytes": 2000 + rx}
        self.write(f"net/{name}", **counts, **more)

    def rdma(self, port: str, count: int, **more: object) -> None:
        """So many bytes, a multiple of 4, each way."""
        words = {"port_xmit_data": 10 + count // 4, "port_rcv_data": 20 + count // 4}
        self.write(f"infiniband/{port}/counters", **words)
        self.write(f"infiniband/{port}", **more)

    def tcp(self, segments: int, retransmits: int) -> None:
        text = "Ip: Forwarding\nIp: 1\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 {} {}\nUdp: 5"
        self.write(self.root / "proc/net", snmp=text.format(segments, retransmits))

    def read(self) -> dict:
        return read_counters(self.root)

    def carried(self, before: dict) -> list[dict]:
        return difference(before, self.read())["interfaces"]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def bytes_of(link: dict) -> tuple[int, int]:
    return link["tx_bytes"], link["rx_bytes"]


# --- What a file says --------------------------------------------------------------------------


PORT, PORT_2 = "mlx4_0/ports/1", "mlx4_0/ports/2"
ON_ADAPTER = {"device__infiniband__mlx4_0__node_type": 1}


def test_kind_and_stated_speed_of_each_interface(tree):
    tree.net("eth0", speed=400000)
    tree.net("lo", type=772)
    tree.net("down", speed=-1)
    tree.net("ib0", type=32, speed=56000)
    tree.net("tun0", type=65534, speed=10)
    tree.adapter(PORT, gbps=56)
    tree.adapter(PORT_2, gbps=2.5)
    tree.adapter("mlx5_0/ports/1", "Ethernet")
    tree.write("infiniband/mlx5_1/ports/1", rate="100 Gb/sec")  # says nothing else: no guess
    found = tree.read()["interfaces"]
    assert {name: (link["kind"], link["speed_Gbps"]) for name, link in found.items()} == {
        "eth0": ("ethernet", 400),
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


@pytest.mark.parametrize("where", ["", "/ports/1"])
@pytest.mark.parametrize(("layer", "kind"), [("Unknown", "efa"), ("Ethernet", "roce")])
def test_adapter_that_counts_bytes_for_port_or_device(tree, layer, kind, where):
    """Operations are told as well, and are not to be added."""
    tree.write("infiniband/efa_0/ports/1", link_layer=layer)
    count = {"tx_bytes": 70, "rx_bytes": 80, "send_bytes": 60, "rdma_write_bytes": 10}
    tree.write(f"infiniband/efa_0{where}/hw_counters", **count)
    link = tree.read()["interfaces"]["efa_0:1"]
    assert (link["kind"], *bytes_of(link)) == (kind, 70, 80)


def test_counters_of_what_is_no_interface_are_zero(tree):
    assert tree.read() == {"interfaces": {}, "tcp": None}
    tree.net("eth0", speed=100)
    tree.net("junk", type="?", speed="Unknown!", statistics__tx_bytes="many")
    tree.net("bytes")
    (tree.classes / "net/bytes/statistics/tx_bytes").write_bytes(b"\xff\xfe")
    tree.write("net", bonding_masters="bond0")
    (tree.classes / "net/nowhere").symlink_to(tree.root / "gone")
    (tree.classes / "infiniband/mlx5_0/ports/1").mkdir(parents=True)
    before = tree.read()
    found = {name: link["tx_bytes"] for name, link in before["interfaces"].items()}
    assert found.pop("eth0") == 1000 and set(found.values()) == {0}
    nothing = difference(before, tree.read())
    assert nothing == {"interfaces": []} and counters.describe_traffic(nothing) == ""


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


BRIDGE = """
link add br0 type bridge
link set eth0 master br0
addr flush dev eth0
addr add 10.77.0.1/24 dev br0
link set br0 mtu 9000 up
"""
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
        command = ["ip", "-n", nodes.names[0], "-batch", "-"]
        made = subprocess.run(command, input=BRIDGE, text=True, check=False)
        require(made.returncode == 0, "no bridge can be made here")
        sender = [sys.executable, "-c", SENDER]
        run = nodes.popen(0, sender, env={"PYTHONPATH": str(ROOT / "tools")}).finish(30)
    (link,) = json.loads(run.out)["interfaces"]
    assert link["name"] == "br0" and 4_000_000 < link["tx_bytes"] < 4_400_000


# --- Between two readings ----------------------------------------------------------------------


def test_difference_has_the_busiest_first_and_leaves_out_what_carried_nothing(tree):
    tree.net("lo", type=772)
    tree.net("eth0", speed=10_000)
    tree.net("eth1")
    tree.adapter(PORT)
    before = tree.read()
    tree.send("lo", 5, 5)
    tree.send("eth0", 3000, 500)
    tree.write(f"infiniband/{PORT}/counters", port_xmit_data=0, port_rcv_data=120)  # was reset
    tree.net("tun0")  # nobody knows what it had counted
    found = tree.carried(before)
    assert found == [
        link("eth0", "ethernet", 3000, 500),
        link("mlx4_0:1", "infiniband", 0, 400, speed_Gbps=100),
        link("lo", "loopback", 5, 5, speed_Gbps=None),
    ]
    assert type(found[0]["tx_bytes"]) is int


def test_ip_over_infiniband_is_known_with_its_adapter_and_counted_once(tree):
    """The second port of an adapter, as dev_port says; it counts its headers too."""
    tree.adapter(PORT)
    tree.adapter(PORT_2, gbps=56)
    tree.net("ib1", type=32, dev_port=1, **ON_ADAPTER)
    before = tree.read()
    tree.send("ib1", 1_000_000, 1_000_000, carrier_changes=2)
    tree.rdma(PORT_2, 1_040_000, counters__link_downed=1)
    found = tree.carried(before)
    wrong = {"link_downed": 1, "carrier_changes": 2}
    # It states no speed itself.
    more = {"speed_Gbps": 56, "carrier": "mlx4_0:2", "errors": wrong}
    assert found == [link("ib1", "ipoib", 1_000_000, 1_000_000, **more)]
    assert counters.describe_traffic({"interfaces": found}) == (
        "sent 1 MB and received 1 MB on ib1 (ipoib over mlx4_0:2); "
        "ib1: link_downed 1, carrier_changes 2"
    )


def test_rdma_over_ethernet_is_the_ports_alone(tree):
    """The interface lacks what RDMA moved, and has no RDMA itself."""
    tree.adapter(PORT, "Ethernet")
    tree.net("eth0", **ON_ADAPTER)
    before = tree.read()
    tree.send("eth0", 4000, 4000)
    tree.rdma(PORT, 1_004_000)
    port, net = tree.carried(before)
    assert bytes_of(port) == (1_004_000, 1_004_000) and bytes_of(net) == (4000, 4000)
    assert "carrier" not in net


# Of each interface: what it sent and received, what of that counts, and its files.
BOND = {"bonding__slaves": "eth0 eth1", "lower_eth0__mtu": 1500, "lower_eth1__mtu": 1500}
IN_CONTAINER = {"ifindex": 7, "iflink": 2}  # a veth whose other end is there
STACKS = {
    "VLAN on a bond": {
        "bond0.7": (800, 800, {"lower_bond0__mtu": 1500}),
        "bond0": (1000, 200, BOND),
        "eth0": (500, 0, {}),
        "eth1": (500, 0, {}),
    },
    # The host's own traffic is on br0 and eth0, a container's on veth1 and eth0.
    "bridge": {
        "br0": (900, 900, {"lower_eth0__mtu": 1500, "lower_veth1__mtu": 1500}),
        "eth0": (1500, 600, {}),
        "veth1": (600, 0, IN_CONTAINER),
    },
    # As Docker has it.
    "bridge to the host alone": {
        "docker0": (900, 900, {"lower_veth1__mtu": 1500}),
        "veth1": (1500, 600, IN_CONTAINER),
    },
}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_what_lies_on_another_interface_is_counted_once(tree, stack):
    for name, (_, _, facts) in stack.items():
        tree.net(name, **facts)
    before = tree.read()
    for name, (sent, _, _) in stack.items():
        tree.send(name, sent, sent)
    found = {link["name"]: bytes_of(link) for link in tree.carried(before)}
    assert found == {name: (left, left) for name, (_, left, _) in stack.items() if left}


def test_bond_stands_for_its_members(tree):
    """Whatever these count beside: a member in reserve hears what the bond does not take."""
    tree.net("bond0", speed=20_000, **BOND)
    tree.net("eth0")
    tree.net("eth1")
    before = tree.read()
    tree.send("bond0", 300, 500)
    tree.send("eth0", 200, 500, carrier_changes=1)
    tree.send("eth1", 100, 400, carrier_changes=2)
    more = {"speed_Gbps": 20, "members": ["eth0", "eth1"], "errors": {"carrier_changes": 3}}
    assert tree.carried(before) == [link("bond0", "ethernet", 300, 500, **more)]


def test_both_ends_of_a_veth_are_counted_once(tree):
    tree.net("veth0", ifindex=4, iflink=5)
    tree.net("veth1", ifindex=5, iflink=4)
    before = tree.read()
    tree.send("veth0", 100_000, 300_000)
    tree.send("veth1", 300_000, 100_000)
    assert [link["name"] for link in tree.carried(before)] == ["veth0"]
    # An index of another namespace may be that of a stranger here, with other traffic.
    tree.send("veth1", 300_000, 900_000)
    assert [link["name"] for link in tree.carried(before)] == ["veth1", "veth0"]


# --- What went wrong ---------------------------------------------------------------------------


def test_errors_are_differences_and_only_those_that_came(tree):
    tree.net("eth0", carrier_changes=8, statistics__rx_dropped=100, statistics__tx_errors=3)
    tree.adapter(PORT)
    tree.write(f"infiniband/{PORT}", hw_counters__packet_seq_err=7, counters__symbol_error=4)
    tree.tcp(5000, 90)
    before = tree.read()
    tree.send("eth0", 5000, 5000)
    tree.tcp(25_000, 100)  # one in 2,000 is usual
    healthy = difference(before, tree.read())
    assert healthy["interfaces"] == [link("eth0", "ethernet", 5000, 5000, speed_Gbps=None)]
    assert healthy["tcp"]["retransmits"] == 10 and counters.went_wrong(healthy) == []
    tree.write("net/eth0", carrier_changes=10, statistics__rx_dropped=105)
    tree.rdma(PORT, 4000, hw_counters__packet_seq_err=18, counters__port_xmit_wait=10**9)
    tree.tcp(7000, 120)
    carried = difference(before, tree.read())
    assert [link["errors"] for link in carried["interfaces"]] == [
        {"carrier_changes": 2, "rx_dropped": 5},
        {"packet_seq_err": 11, "port_xmit_wait": 10**9},
    ]
    assert carried["tcp"] == {"segments": 2000, "retransmits": 30}
    # Waiting is no error.
    assert counters.went_wrong(carried) == [
        "TCP sent 30 of 2,000 segments again",
        "eth0: carrier_changes 2",
        "mlx4_0:1: packet_seq_err 11",
    ]


def test_tcp_is_left_out_where_the_kernel_does_not_tell(tree):
    for text in ("Tcp: OutSegs\n", "Tcp: OutSegs\nTcp: 5\n"):
        tree.write(tree.root / "proc/net", snmp=text)
        assert tree.read()["tcp"] is None, text


# --- For people --------------------------------------------------------------------------------


def link(name, kind, tx, rx, **more):
    return {"name": name, "kind": kind, "speed_Gbps": 10, "tx_bytes": tx, "rx_bytes": rx} | more


def test_sentence_sums_the_rails_of_each_network_and_names_loopback_too():
    """Four of InfiniBand; the Ethernet interface beside them is another network, and so is one
    that carried far less. Processes of a node talk over loopback.
    """
    links = [link(f"mlx5_{n}:1", "infiniband", 1e9 - n, 1e9) for n in range(4)]
    links += [link("lo", "loopback", 2e8, 2e8), link("mlx5_9:1", "infiniband", 1.5e8, 1.5e8)]
    links += [link("eth1", "ethernet", 7e5, 0, errors={"tx_dropped": 9})]  # under 1 %
    assert counters.describe_traffic({"interfaces": links}) == (
        "sent 4 GB and received 4 GB on mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_3:1 (infiniband); "
        "sent 200 MB and received 200 MB on lo (loopback); "
        "sent 150 MB and received 150 MB on mlx5_9:1 (infiniband)"
    )
