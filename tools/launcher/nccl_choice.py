"""Which interfaces NCCL takes where nobody has named one, and which it had better leave out.

NCCL takes an RDMA adapter that is up; without one, sockets over interfaces whose names begin with
ib; without those, over all that are up but docker*, lo* and, from 2.28 on, virbr*. Among these may
be a tunnel or the bridge of a container engine, which reach nobody or only slowly.

It is never held to the interface of the route to MASTER_ADDR: where that is a management port of
1 Gb/s, a job whose data belong on ib0 would go there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

OWN = ("docker", "lo", "virbr")  # left out by NCCL itself
VIRTUAL = (*OWN, "br-", "veth", "cni", "tun", "wg")
# Whoever sets one of them has chosen; NCCL's other variables say nothing of its network.
CHOOSING = ("NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_IB_", "NCCL_COMM_ID", "NCCL_CROSS_NIC")
FILES = ("~/.nccl.conf", "/etc/nccl.conf")  # that NCCL reads beside its variables


def has_chosen(variables: Mapping[str, str]) -> bool:
    """Whether a user, or who looks after the machine, has named a network."""
    if variables.get("NETWORK") or variables.get("IFNAME"):
        return True
    names = [name for name, value in variables.items() if value]
    for file in (*FILES, variables.get("NCCL_CONF_FILE", "")):
        try:
            names += Path(os.path.expanduser(file)).read_text(errors="replace").splitlines()
        except OSError:  # there is none
            continue
    return any(name.strip().startswith(CHOOSING) for name in names)


def to_leave_out(leads: str, interfaces: list[str], adapters: list[str]) -> tuple[str, list[str]]:
    """(what NCCL_SOCKET_IFNAME should be, the interfaces that NCCL then leaves out).

    Of a node's interfaces and adapters that are up; `leads` to the other nodes. Nothing where
    NCCL's rule leads to InfiniBand, where it would take no virtual one, or where the nodes
    themselves are joined by one: by WireGuard, say.
    """
    to_infiniband = adapters or any(name.startswith("ib") for name in interfaces)
    if to_infiniband or leads not in interfaces or leads.startswith(VIRTUAL):
        return "", []
    out = [name for name in interfaces if name.startswith(VIRTUAL) and not is_left_out(name)]
    if not out:
        return "", []
    there = [p for p in VIRTUAL if p in OWN or any(name.startswith(p) for name in interfaces)]
    return "^" + ",".join(there), out


def is_left_out(name: str) -> bool:
    return name.startswith(OWN[:2])  # by each version


def several(interfaces: list[str], adapters: list[str], out: list[str]) -> list[str]:
    """A warning where more networks than one could be meant."""
    able = [name for name in interfaces if name not in out and not is_left_out(name)]
    by_ip = [name for name in able if name.startswith("ib")]
    others = [name for name in able if name not in by_ip and not name.startswith(VIRTUAL)]
    if adapters or by_ip:
        text = f"{', '.join(adapters or by_ip)}, not {', '.join(others)}" if others else ""
    else:
        taken = others or able
        text = f"{', '.join(taken)}, all of them" if len(taken) > 1 else ""
    if not text:
        return []
    return [
        f"several networks could be meant, and none is named: NCCL takes {text}; IFNAME=... keeps "
        "it on the one that you mean"
    ]
