#!/usr/bin/env python3
"""For anyone who is about to start: what would go wrong on this node, in one line each.

    python tools/preflight.py --nnodes=2 --node_rank=0 --rdzv_endpoint=10.0.0.1:29500

launch_multinode.sh calls it first, on each node. It looks at what NETWORK, IFNAME and
GLOO_SOCKET_IFNAME ask for, and with several nodes lets them meet at node 0's port, to see whether
each can reach a port of the other that was chosen at random, as Gloo's and NCCL's are, and whether
both ends have the same MTU. What a machine does not tell is left out.

Prints the interface that leads to the other nodes, where GLOO_SOCKET_IFNAME is not set: left alone
Gloo takes the address of the host name, which many machines have at 127.0.1.1. Messages go to
stderr and to the log. Exit code: 0, also with warnings; 1 an error on this node or another;
2 bad usage; 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

from launcher.output import Output
from launcher.process_tree import LIBC, PR_SET_PDEATHSIG
from launcher.rendezvous import CONNECT_TIMEOUT, Plan, Refused, Rendezvous, Stopped, check_master

SYS, PROC, DEV = Path("/sys"), Path("/proc"), Path("/dev")
SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
CAP_IPC_LOCK = 1 << 14  # linux/capability.h: may lock any amount of memory
PINNED = 1 << 30  # bytes; NCCL's buffers, 4 MiB a channel and connection, add up to some 100 MiB
SECONDS = 4  # to reach a port: TCP sends its first packet again after 1 s and after 3 s


def text_of(path: Path) -> str:
    """A small file's text; empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


# --- Interfaces and their addresses ------------------------------------------------------------


def interface_address(name: str) -> str:
    """The interface's first address, IPv4 if it has one; empty without any."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        answer = fcntl.ioctl(any_one, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    for line in text_of(PROC / "net/if_inet6").splitlines():
        digits, _, _, scope, _, owner = line.split()
        if owner == name and scope == "00":  # global: a link's own would need its name, too
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def interface_of(address: str) -> str:
    """The interface that has this address; never loopback, which leads to no other node."""
    if not address or is_loopback(address):
        return ""
    names = (name for _, name in socket.if_nameindex() if name != "lo")
    return next((name for name in names if interface_address(name) == address), "")


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


# --- This node alone ---------------------------------------------------------------------------


def ports_of(adapter: str) -> list[str]:
    """The states of an InfiniBand adapter's ports, `mlx5_0:1` of one, as `4: ACTIVE`."""
    name, _, port = adapter.partition(":")
    return [
        text_of(path) for path in SYS.glob(f"class/infiniband/{name}/ports/{port or '*'}/state")
    ]


def check_names(names: list[str]) -> list[str]:
    """Errors of interfaces and adapters that are to carry the traffic."""
    net, adapters = SYS / "class/net", SYS / "class/infiniband"
    has = [path.name for folder in (net, adapters) for path in sorted(folder.glob("*"))]
    found = []
    for name in names if has else []:
        states = ports_of(name)
        # The cable's own state: operstate follows it a second later, for the message early enough.
        if text_of(net / name / "carrier") != "1" and not any("ACTIVE" in s for s in states):
            states.append(text_of(net / name / "operstate"))
            state = ", ".join(filter(None, states)) or "none of that name"
            found.append(
                f"this node has no interface or adapter {name} that is up ({state}); it has "
                f"{', '.join(has)}: name one of them in IFNAME or GLOO_SOCKET_IFNAME"
            )
    return found


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
    if not any("ACTIVE" in state for state in ports_of("*")):
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


# --- Between the nodes -------------------------------------------------------------------------


class NodeZeroIsFurther(Exception):
    """Node 0's supervisor has answered: this launcher was started anew, the nodes have met."""


def why_closed(address: str, port: int, seconds: float) -> str:
    """Empty if a connection to it can be made, else the reason."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or "no answer"
    return ""


class Preflight(Rendezvous):
    """The nodes' first meeting: each tells what it has found, and tries a port of the other's."""

    purpose = "preflight"

    def __init__(self, options: argparse.Namespace, errors: list[str], output: Output) -> None:
        # Of a series of runs over several networks the nodes agree before, of none they do here.
        settings = {"NNODES": options.nnodes, "NETWORKS": None}
        node = {"node_rank": options.node_rank, "host": socket.gethostname(), "settings": settings}
        host, last = options.host.strip("[]"), options.starts - 1
        super().__init__(host, options.port, node, last, output.say)
        check_master(host, options.node_rank)
        self.seconds = min(SECONDS, options.connect_timeout / 3)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        # Nobody takes what arrives: that the kernel has answered is enough.
        self.listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=4096
        )
        address, self.master = route_to(self.host)
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        if self.interface:
            address = interface_address(self.interface) or address
        else:
            self.interface = interface_of(address)
        self.facts = {"port": self.listener.getsockname()[1], "mtu": self.mtu()}
        self.facts["address"] = "" if is_loopback(address) else address
        self.error = "; ".join(errors)  # of this node alone
        self.warnings: list[str] = []

    def mtu(self) -> str:
        return text_of(SYS / "class/net" / (self.interface or "none") / "mtu")

    def greeting(self) -> dict:
        return {"purpose": self.purpose, "preflight": self.facts}

    def introduction(self, greeting: dict) -> dict:
        theirs = greeting.get("preflight")
        if theirs is None:
            raise NodeZeroIsFurther
        self.compare_mtu("node 0", theirs)
        # On SLURM's node 0 its own name may be loopback: there only the others know its address.
        address = theirs["address"] or self.master
        closed = why_closed(address, theirs["port"], self.seconds)
        reached = {"closed": closed, "tried": address, "master": self.master}
        return self.node | {"preflight": self.facts | reached, "error": self.error}

    def compare_mtu(self, node: str, theirs: dict) -> None:
        mine = self.facts["mtu"]
        if mine and theirs["mtu"] and mine != theirs["mtu"]:
            self.warnings.append(
                f"the MTU of {self.interface} is {mine} on this node and {theirs['mtu']} on {node}"
                ": large packets may get lost without an error; give both ends, and the switch "
                f"between them, the same (ip link set {self.interface} mtu ...)"
            )

    def objection(self, nodes: list[dict]) -> str:
        """What is wrong with any node, or the way between it and node 0."""
        if self.error:
            return f"node 0 ({self.node['host']}): {self.error}"
        # A supervisor that has come here says nothing of this: its node was looked at before.
        found = (self.fault(node) for node in nodes if "preflight" in node)
        return next(filter(None, found), "")

    def fault(self, node: dict) -> str:
        theirs, name = node["preflight"], f"node {node['node_rank']} ({node['host']})"
        if node["error"]:
            return f"{name}: {node['error']}"
        if not self.interface:
            self.interface = interface_of(theirs["master"])
        self.compare_mtu(name, theirs)
        own = f"node 0 ({self.node['host']})"
        if theirs["closed"]:
            return closed_port(name, own, theirs["tried"], self.facts["port"], theirs["closed"])
        closed = why_closed(theirs["address"], theirs["port"], self.seconds)
        if closed:
            return closed_port(own, name, theirs["address"], theirs["port"], closed)
        return ""


def closed_port(here: str, there: str, address: str, port: int, why: str) -> str:
    return (
        f"{here} cannot reach {there} at {address}, port {port}, which was chosen at random ({why}"
        "): a firewall that opens MASTER_PORT alone is not enough, Gloo and NCCL take any port "
        "from 1024 on; open them between the nodes, or name in IFNAME the interfaces of a network "
        "that joins them"
    )


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


# --- The command line --------------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    add = parser.add_argument
    add("--nnodes", type=int, required=True, metavar="N", help="as torchrun's, like the next")
    add("--node_rank", type=int, default=0, metavar="K", help="0 on the endpoint's node; 0")
    add("--rdzv_endpoint", default="", metavar="ADDRESS:PORT", help="of node 0")
    add("--rdzv_backend", choices=["static"], default="static", help="no other can be checked")
    add("--standalone", action="store_true", help="changes nothing")
    add("--starts", type=int, default=1, metavar="N", help="a port each: probe, restarts; 1")
    add("--connect_timeout", type=int, default=CONNECT_TIMEOUT, metavar="S", help="%(default)s s")
    add("--log", default=os.devnull, metavar="FILE", help="gets every message; none")
    add("--name", default="preflight.py", help="before each message; preflight.py")
    options = parser.parse_args(argv)
    options.host, _, port = options.rdzv_endpoint.rpartition(":")
    if options.nnodes > 1 and not (options.host and port.isdigit()):
        parser.error(f"--rdzv_endpoint is '{options.rdzv_endpoint}': give node 0's ADDRESS:PORT")
    options.port = int(port or 0)
    return options


def meet(options: argparse.Namespace, errors: list[str], output: Output) -> list[str]:
    """Checks between the nodes; warnings. Raises Refused, on all nodes together, and Stopped."""
    preflight = Preflight(options, errors, output)

    def stop(*_: object) -> None:
        preflight.stopped = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, stop)
    with contextlib.suppress(NodeZeroIsFurther), preflight.listener:
        preflight.agree(Plan(), options.connect_timeout)
    preflight.close()
    if "GLOO_SOCKET_IFNAME" not in os.environ and preflight.interface:
        print(preflight.interface)
        output.say(f"GLOO_SOCKET_IFNAME={preflight.interface}: it leads to the other nodes")
    return [*preflight.warnings, *check_host_name(preflight.interface)]


def main() -> int:
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a launcher that is killed leaves nothing
    options = parse_arguments(sys.argv[1:])
    output = Output(options.name, options.log)
    several = options.nnodes > 1
    errors, warnings = check_node(several)
    for error in errors:
        output.say(f"error: {error}")
    try:
        warnings += meet(options, errors, output) if several else []
    except Stopped:
        output.say("stopped by a signal before the start")
        return 143
    except (Refused, OSError) as error:
        if not errors:
            output.say(f"error: {error}")
        return 1
    for warning in warnings:
        output.say(f"warning: {warning}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
