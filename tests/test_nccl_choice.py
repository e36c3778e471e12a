"""NCCL's own choice of a network is not made worse: what the launcher sets where nobody has, and
what it leaves to NCCL.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import preflight
from launcher import nccl_choice, node_checks
from support.nodes import NamespacePair
from support.processes import ROOT
from test_networks import Folder, reports

# What a node has that is up: its interfaces, with the one that leads to the other nodes first, and
# its adapters; what NCCL_SOCKET_IFNAME becomes, and what a warning names.
NODES = {
    "one port": ("eth0", "", "", ""),
    "Docker and libvirt": (
        "eth0 docker0 veth1a2b virbr0 lo",
        "",
        "^docker,lo,virbr,veth",
        "",
    ),
    "all kinds": (
        "eth0 br-1a cni0 tun0 wg0 veth1 docker0 lo",
        "",
        "^docker,lo,virbr,br-,veth,cni,tun,wg",
        "",
    ),
    "Docker without a container": ("eth0 docker0 lo", "", "", ""),
    "a bridge that has the node's address": ("br0 veth1", "", "^docker,lo,virbr,veth", ""),
    "two ports": ("eth0 eth1 tun0", "", "^docker,lo,virbr,tun", "eth0, eth1, all of them"),
    "IP over InfiniBand": ("eno1 ib0 tun0", "", "", "ib0, not eno1"),
    "route over it": ("ib0 docker0", "", "", ""),
    "adapters": ("eno1 ib0 docker0 br-1a", "mlx5_0 mlx5_1", "", "mlx5_0, mlx5_1, not eno1"),
    "joined by WireGuard": ("wg0 eth0 veth1", "", "", ""),
    "virtual alone": ("veth0 wg0 lo", "", "", "veth0, wg0, all of them"),
}


@pytest.mark.parametrize("case", NODES)
def test_virtual_interfaces_are_left_out_where_nccl_would_take_them(case):
    interfaces, adapters, value, warned = NODES[case]
    leads, *others = interfaces.split()
    up = (sorted([leads, *others]), adapters.split())
    found, out = nccl_choice.to_leave_out(leads, *up)
    assert found == value
    assert not any(name.startswith(("eth", "eno", "ib", "docker", "lo")) for name in out)
    warnings = nccl_choice.several(*up, out)
    assert len(warnings) == bool(warned)
    assert all(f" NCCL takes {warned}; IFNAME=" in text for text in warnings)


def test_nothing_is_left_out_where_the_way_to_the_nodes_is_not_known():
    assert nccl_choice.to_leave_out("", ["eth0", "tun0"], []) == ("", [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_NET", "IB"),
        ("NCCL_NET_PLUGIN", "ofi"),
        ("NCCL_IB_HCA", "mlx5"),
        ("IFNAME", "eth0"),
        ("NETWORK", "ethernet"),
    ],
)
def test_variable_of_the_user_has_chosen(monkeypatch, name, value):
    monkeypatch.setattr(nccl_choice, "FILES", ())
    assert nccl_choice.has_chosen({name: value})
    assert not nccl_choice.has_chosen({name: "", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "e"})


def test_nccls_own_file_has_chosen(monkeypatch, tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# of this cluster\nNCCL_DEBUG=WARN\n")
    monkeypatch.setattr(nccl_choice, "FILES", (str(file), str(tmp_path / "none")))
    assert not nccl_choice.has_chosen({})
    file.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=bond0\n")
    assert nccl_choice.has_chosen({})
    monkeypatch.setattr(nccl_choice, "FILES", ())
    assert nccl_choice.has_chosen({"NCCL_CONF_FILE": str(file)})


def test_adapter_counts_where_a_port_of_it_is_active(monkeypatch, tmp_path):
    """From a made-up tree of the kernel's files."""
    for adapter, state in {"mlx5_0": "1: DOWN", "mlx5_1": "4: ACTIVE"}.items():
        port = tmp_path / "class/infiniband" / adapter / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    monkeypatch.setattr(node_checks, "SYS", tmp_path)
    monkeypatch.setattr(preflight, "usable_interfaces", lambda: ["eth0", "tun0"])
    monkeypatch.setattr(nccl_choice, "has_chosen", lambda variables: False)
    said, options = [], SimpleNamespace(nccl="")
    output = SimpleNamespace(say=said.append)
    (warning,) = preflight.look_at_nccls_choice(options, "eth0", output)
    assert "NCCL takes mlx5_1, not eth0" in warning
    assert (options.nccl, said) == ("", [])
    (tmp_path / "class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
    assert preflight.look_at_nccls_choice(options, "eth0", output) == []
    assert options.nccl == "^docker,lo,virbr,tun" and "leaves out tun0" in said[0]


def test_launcher_sets_it_on_the_node_that_has_such_interfaces_and_says_so(tmp_path):
    """Node 0 has a bridge and a container's cable, node 1 has none."""
    folder = Folder(tmp_path)
    with NamespacePair() as nodes:
        nodes.ip(0, "link add br-1a2b3c type veth peer name veth77")
        for n, name in enumerate(("br-1a2b3c", "veth77"), 1):
            nodes.ip(0, f"link set {name} up", f"addr add 10.79.0.{n}/24 dev {name}")
        quiet = {"HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": ""}
        first, second = folder.run(nodes, "x", PROBE=0, **quiet)
    (with_them,), (without,) = reports(first), reports(second)
    value = "^docker,lo,virbr,br-,veth"
    assert with_them["env"]["NCCL_SOCKET_IFNAME"] == value
    names = "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"
    assert with_them["env"]["DEMO_SET_BY_LAUNCHER"] == names
    text = f"NCCL_SOCKET_IFNAME={value}: so that NCCL leaves out br-1a2b3c, veth77, virtual"
    log = (folder.path / "logs/series/node0.log").read_text()
    assert f"launch_multinode.sh: {text}" in first.out and text in log
    assert without["env"]["NCCL_SOCKET_IFNAME"] == ""
    assert without["env"]["DEMO_SET_BY_LAUNCHER"] == "GLOO_SOCKET_IFNAME"
    assert "leaves out" not in second.out


# --- EFA -------------------------------------------------------------------------------------


def set_network(ifname: str, adapters: Path) -> list[str]:
    """What the launcher's function sets, where this folder has the adapters."""
    text = (ROOT / "launch_multinode.sh").read_text()
    functions = text[text.index("die() {") : text.index("# Of CUDA_VISIBLE_DEVICES")]
    functions = functions.replace("/sys/class/infiniband", str(adapters))
    script = f"""
set -euo pipefail
say() {{ echo "SAID $*"; }}
{functions}
set_network
env | grep -E "^(NCCL_|GLOO_|NETWORK=)" | sort
"""
    env = {"PATH": "/usr/bin:/bin", "IFNAME": ifname}
    command = ["bash", "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "driver"), [("efa_0", None), ("rdmap0s6", "efa"), ("rdmap0s6,eth0", "efa")]
)
def test_efa_keeps_its_plugins_choice(tmp_path, name, driver):
    adapter, _, interface = name.partition(",")
    if driver:
        (tmp_path / adapter / "device").mkdir(parents=True)
        (tmp_path / adapter / "device/driver").symlink_to(f"../../bus/pci/drivers/{driver}")
    said, *variables = set_network(name, tmp_path)
    assert said.startswith(f"SAID {adapter} is of EFA: ")
    sockets = [f"GLOO_SOCKET_IFNAME={interface}", f"NCCL_SOCKET_IFNAME=={interface}"]
    expected = [*(sockets if interface else []), "NETWORK=infiniband"]
    assert sorted(variables) == sorted(expected)


def test_infinibands_adapters_are_named_and_all_rails_of_them(tmp_path):
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device/driver").symlink_to("../../bus/pci/drivers/mlx5_core")
    found = set_network("mlx5_0,mlx5_1", tmp_path)
    assert "NCCL_NET=IB" in found and "NCCL_IB_HCA==mlx5_0,mlx5_1" in found
