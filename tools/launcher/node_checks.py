"""What this node has to reach the others with, and what is wrong with it: no packet is sent."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

from launcher.counters import text_of

SYS, PROC, DEV = Path("/sys"), Path("/proc"), Path("/dev")
# linux/sockios.h: all IPv4 addresses, each in an entry of that many bytes with its interface.
SIOCGIFCONF, ENTRY = 0x8912, 24 + 2 * struct.calcsize("P")
CAP_IPC_LOCK = 1 << 14  # linux/capability.h: may lock any amount of memory
PINNED = 1 << 30  # bytes; NCCL's buffers, 4 MiB a channel and connection, add up to some 100 MiB


# --- Interfaces and their addresses ------------------------------------------------------------


def addresses() -> list[tuple[str, str]]:
    """(interface, address) of all that this node has, IPv4 first, as the script finds them."""
    found, room = [], array.array("B", bytes(1 << 16))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        asked = struct.pack("iP", len(room), room.buffer_info()[0])
        used, _ = struct.unpack("iP", fcntl.ioctl(any_one, SIOCGIFCONF, asked))
        for n in range(0, used, ENTRY):
            name = room[n : n + 16].tobytes().partition(b"\0")[0].decode().partition(":")[0]
            found.append((name, socket.inet_ntoa(room[n + 20 : n + 24].tobytes())))
    for line in text_of(PROC / "net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope == "00":  # global: a link's own would need its name, too
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def interface_address(name: str) -> str:
    """The interface's first address, which Gloo and NCCL take; empty without any."""
    return next((address for owner, address in addresses() if owner == name), "")


def interface_of(address: str) -> str:
    """The interface that has this address; never loopback, which leads to no other node."""
    return next((name for name, own in addresses() if own == address and name != "lo"), "")


def is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def route_to(host: str) -> tuple[str, str]:
    """(this node's address on the way to a host, the host's); empty if there is no way."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.connect(place)  # a datagram socket: nothing is sent
            return trial.getsockname()[0], trial.getpeername()[0]
    return "", ""


def interfaces_up() -> list[str]:
    net = SYS / "class/net"
    return [path.name for path in sorted(net.glob("*")) if text_of(path / "carrier") == "1"]


def usable_interfaces() -> list[str]:
    """Those that are up and have an address, as NCCL counts them: a link's own is one."""
    ipv6 = [line.split()[-1] for line in text_of(PROC / "net/if_inet6").splitlines()]
    return [name for name in interfaces_up() if name in ipv6 or interface_address(name)]


def mtu_of(interface: str) -> str:
    return text_of(SYS / "class/net" / interface / "mtu")


def ports_of(adapter: str) -> list[str]:
    """The states of an InfiniBand adapter's ports, `mlx5_0:1` of one, as `4: ACTIVE`."""
    name, _, port = adapter.partition(":")
    pattern = f"class/infiniband/{name}/ports/{port or '*'}/state"
    return [text_of(path) for path in SYS.glob(pattern)]


def is_active(adapter: str) -> bool:
    return any("ACTIVE" in state for state in ports_of(adapter))


def active_adapters() -> list[str]:
    adapters = [path.name for path in sorted((SYS / "class/infiniband").glob("*"))]
    return [name for name in adapters if is_active(name)]


# --- What is wrong -----------------------------------------------------------------------------


def check_names(names: list[str]) -> list[str]:
    """Errors of interfaces and adapters that are to carry the traffic."""
    net, adapters = SYS / "class/net", SYS / "class/infiniband"
    has = [path.name for folder in (net, adapters) for path in sorted(folder.glob("*"))]
    found = []
    for name in names if has else []:
        # The cable's own state: operstate follows it a second later, for the message early enough.
        if text_of(net / name / "carrier") != "1" and not is_active(name):
            states = [*ports_of(name), text_of(net / name / "operstate")]
            state = ", ".join(filter(None, states)) or "none of that name"
            found.append(
                f"this node has no interface or adapter {name} that is up ({state}); it has "
                f"{', '.join(has)}: name one of them in IFNAME or GLOO_SOCKET_IFNAME"
            )
    return found


def check_addresses() -> list[str]:
    """Errors of interfaces that are named for sockets, are up, and have no address.

    Of those that NCCL may take one will do. An adapter needs no interface with an address: only
    the interfaces that are named count.
    """
    have, up = {name for name, _ in addresses()}, interfaces_up()
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    if not gloo and not nccl:  # by hand, without the launcher
        gloo = os.environ.get("IFNAME", "")
    lacking = [name for name in gloo.split(",") if name in up and name not in have]
    exact, named = nccl.startswith("="), nccl.removeprefix("=").split(",")
    if nccl and not nccl.startswith("^"):  # that names those that it does not take
        able = [n for n in up if any(n == p if exact else n.startswith(p) for p in named)]
        lacking += able if not have.intersection(able) else []
    return [
        f"{name} is up but has no address, which sockets need: give it one (ip address add ... "
        f"dev {name}), or name another interface in IFNAME, GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME"
        for name in dict.fromkeys(lacking)
    ]


def check_infiniband() -> list[str]:
    """Errors of what InfiniBand needs beside an adapter that was named."""
    found = []
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        found.append(
            "libibverbs.so.1 is missing, without which NCCL has no InfiniBand: install "
            "libibverbs1 (Debian, Ubuntu) or libibverbs, in a container inside of it"
        )
    if not list(DEV.glob("infiniband/uverbs*")):
        found.append(
            "there is no /dev/infiniband/uverbs*, the way to the adapters: load the kernel module "
            "ib_uverbs, or start the container with --device=/dev/infiniband"
        )
    if not is_active("*"):
        found.append("no InfiniBand port of this node is ACTIVE: see ibstat, cable and switch")
    return found


def check_locked_memory() -> list[str]:
    """A warning where RDMA may not be allowed to pin its buffers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = dict(line.split(":\t", 1) for line in text_of(PROC / "self/status").splitlines())
    able = int(status.get("CapEff", "0"), 16) & CAP_IPC_LOCK
    if able or limit == resource.RLIM_INFINITY or limit >= PINNED:
        return []
    return [
        f"only {limit >> 10} KiB of memory may be locked, and RDMA locks its buffers: `ulimit -l "
        "unlimited`, for SLURM's jobs LimitMEMLOCK=infinity in slurmd's unit"
    ]


def check_node(several: bool) -> tuple[list[str], list[str]]:
    """(errors, warnings) of this node alone; a run that does not leave it has no such errors."""
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if several else []
    asked = [name for name in os.environ.get("IFNAME", "").split(",") if name]
    errors, warnings = check_names([*dict.fromkeys([*asked, *filter(None, gloo)])]), []
    errors += check_addresses() if several else []
    if "lo" in gloo:
        errors.append("GLOO_SOCKET_IFNAME is lo, which reaches no other node: see `ip -br addr`")
    if os.environ.get("NETWORK") == "infiniband":
        # Without an adapter's name NCCL chooses, and Gloo, over ib0, needs nothing of it.
        by_name = any(ports_of(name) or not (SYS / "class/net" / name).exists() for name in asked)
        if by_name:
            errors += check_infiniband()
        else:
            warnings += check_infiniband()
        warnings += check_locked_memory()
    return (errors, warnings) if several else ([], errors + warnings)


def check_host_name(interface: str) -> list[str]:
    """A warning where Gloo would go by a host name that only this node knows."""
    if interface:
        return []
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        if all(is_loopback(info[4][0]) for info in socket.getaddrinfo(name, 0)):
            return [
                f"this node's own name {name} is a loopback address here (/etc/hosts), which Gloo "
                "would take: set GLOO_SOCKET_IFNAME to the interface that leads to the others"
            ]
    return []
