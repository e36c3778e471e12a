"""Counters of the node's interfaces: against a made /sys and against the kernel's own."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import cluster as helpers

_spec = importlib.util.spec_from_file_location("counters", helpers.ROOT / "tools/counters.py")
counters = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(counters)
read_counters, difference = counters.read_counters, counters.difference


def interface(root: Path, name: str, tx: object, rx: object, **files: object) -> None:
    """A folder as /sys/class/net has them."""
    folder = root / "net" / name
    (folder / "statistics").mkdir(parents=True)
    files |= {"statistics/tx_bytes": tx, "statistics/rx_bytes": rx}
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")


def port(root: Path, device: str, number: int, rate: str, xmit: int, rcv: int) -> None:
    """A folder as /sys/class/infiniband has them; the counters are in words of 4 bytes."""
    folder = root / "infiniband" / device / "ports" / str(number)
    (folder / "counters").mkdir(parents=True)
    (folder / "rate").write_text(f"{rate}\n")
    (folder / "counters" / "port_xmit_data").write_text(f"{xmit}\n")
    (folder / "counters" / "port_rcv_data").write_text(f"{rcv}\n")


def test_counters_of_each_kind_of_interface(tmp_path):
    interface(tmp_path, "eth0", 1000, 2000, type=1, speed=1000)
    interface(tmp_path, "fast", 2**53, 1, type=1, speed=400000)
    interface(tmp_path, "lo", 5, 5, type=772)
    interface(tmp_path, "down", 7, 8, type=1, speed=-1)
    interface(tmp_path, "silent", 9, 10, type=1, speed="")
    interface(tmp_path, "ib0", 11, 12, type=32, speed=56000)
    interface(tmp_path, "tun0", 13, 14, type=65534, speed=10)
    port(tmp_path, "mlx4_0", 1, "56 Gb/sec (4X FDR)", 250, 500)
    port(tmp_path, "mlx4_0", 2, "2.5 Gb/sec (1X SDR)", 1, 0)
    assert read_counters(tmp_path) == {
        "eth0": ("ethernet", 1, 1000, 2000),
        "fast": ("ethernet", 400, 2**53, 1),
        "lo": ("loopback", 0, 5, 5),
        "down": ("ethernet", 0, 7, 8),
        "silent": ("ethernet", 0, 9, 10),
        "ib0": ("ipoib", 56, 11, 12),
        "tun0": ("other", 0.01, 13, 14),
        "mlx4_0:1": ("infiniband", 56, 1000, 2000),
        "mlx4_0:2": ("infiniband", 2.5, 4, 0),
    }


def test_counters_of_what_is_no_interface_are_zero(tmp_path):
    interface(tmp_path, "eth0", 3, 4, type=1, speed=100)
    interface(tmp_path, "junk", "many", "-", type="?", speed="Unknown!")
    (tmp_path / "net" / "bytes" / "statistics").mkdir(parents=True)
    (tmp_path / "net" / "bytes" / "statistics" / "tx_bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "net" / "empty").mkdir()
    (tmp_path / "net" / "bonding_masters").write_text("bond0\n")
    (tmp_path / "net" / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    found = read_counters(tmp_path)
    assert found.pop("eth0") == ("ethernet", 0.1, 3, 4)
    assert all(speed == sent == received == 0 for _, speed, sent, received in found.values())


def test_counters_of_an_empty_tree(tmp_path):
    assert read_counters(tmp_path) == {}
    assert read_counters(tmp_path / "missing") == {}


def test_counters_of_this_machine():
    helpers.require(Path("/sys/class/net/lo").exists(), "there is no /sys/class/net/lo here")
    kind, _, before, _ = read_counters()["lo"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        for _ in range(10):
            datagram.sendto(bytes(1000), ("127.0.0.1", 9))  # nobody has to receive them
    assert kind == "loopback" and read_counters()["lo"][2] - before >= 10_000


def test_difference_has_the_busiest_first_and_leaves_out_what_carried_nothing():
    before = {
        "lo": ("loopback", 0, 10, 10),
        "eth0": ("ethernet", 10, 1000, 2000),
        "eth1": ("ethernet", 1, 5, 5),
    }
    after = {
        "lo": ("loopback", 0, 15.0, 15.0),
        "eth0": ("ethernet", 10, 4000.0, 2500.0),
        "eth1": ("ethernet", 1, 5, 5),
        "tun0": ("other", 0, 10**9, 10**9),
    }
    assert difference(before, after) == [
        {
            "name": "eth0",
            "kind": "ethernet",
            "speed_Gbps": 10,
            "tx_bytes": 3000,
            "rx_bytes": 500,
        },
        {"name": "lo", "kind": "loopback", "speed_Gbps": None, "tx_bytes": 5, "rx_bytes": 5},
    ]
    assert all(type(link["tx_bytes"]) is int for link in difference(before, after))


def test_sentence_names_what_carried_the_traffic_loopback_too():
    """Several processes of a node talk over loopback, which may carry more than any link."""
    links = [
        {"name": "lo", "kind": "loopback", "speed_Gbps": None, "tx_bytes": 5e8, "rx_bytes": 5e8},
        {"name": "eth0", "kind": "ethernet", "speed_Gbps": 10, "tx_bytes": 9e7, "rx_bytes": 8e7},
        {"name": "eth1", "kind": "ethernet", "speed_Gbps": 10, "tx_bytes": 7e5, "rx_bytes": 0},
    ]
    text = counters.in_words(links)
    assert text == (
        "sent 500 MB and received 500 MB on lo (loopback); "
        "sent 90 MB and received 80 MB on eth0 (ethernet)"
    )
