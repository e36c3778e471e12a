"""Node 0's address and ports: whether they can be right, how to listen there and to connect."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable

from launcher.errors import Refused


def check_master(host: str, node_rank: int) -> None:
    """Ends with one line where node 0's address cannot be that of this run."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Refused(
            f"MASTER_ADDR '{host}' does not resolve ({getattr(error, 'strerror', error)}): "
            "give node 0's address on the network that the nodes share"
        ) from None
    addresses = {info[4][0] for info in found}
    if all(address == "::1" or address.startswith("127.") for address in addresses):
        # Many a machine has its own name at 127.0.1.1: on SLURM's node 0 that is no mistake.
        if node_rank == 0 and host == os.environ.get("SLURMD_NODENAME"):
            return
        raise Refused(
            f"MASTER_ADDR '{host}' is a loopback address on this node, which no other node can "
            "reach: give node 0's address on the network that the nodes share (ip -br addr)"
        )
    if node_rank == 0 and (why := why_not_own(found)):
        raise Refused(
            f"NODE_RANK is 0, but MASTER_ADDR '{host}' is not an address of this node ({why}): "
            "NODE_RANK 0 belongs to the node of MASTER_ADDR, and each other node has its own"
        )


def why_not_own(found: list[tuple]) -> str:
    """Empty if one of the addresses can be bound, as only one of this machine's can."""
    why = ""
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as trial:
                trial.bind(address)
                return ""
        except OSError as error:
            why = why or error.strerror
    return why


def why_no_port(port: int, starts: int) -> str:
    """Empty if a series of so many starts has a port for each, from this one on."""
    last = 65536 - starts
    if 0 < port <= last:
        return ""
    return f"port {port}: give one from 1 to {last} (each start needs its own, up to 65535)"


def connect(host: str, port: int, seconds: float, look: Callable[[], None]) -> socket.socket:
    """As socket.create_connection; look() is called now and then, and may end the wait."""
    failed: OSError | None = None
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        trial = socket.socket(family, kind)
        try:
            trial.setblocking(False)
            code, end = trial.connect_ex(address), time.monotonic() + seconds
            while code == errno.EINPROGRESS:
                look()
                if select.select([], [trial], [], 0.2)[1]:
                    code = trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                elif time.monotonic() > end:
                    code = errno.ETIMEDOUT
            if code:
                raise OSError(code, os.strerror(code))
            trial.settimeout(seconds)
            return trial
        except BaseException as error:
            trial.close()
            if not isinstance(error, OSError):
                raise
            failed = error
    raise failed or OSError("no address")


def create_server(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    # All nodes may come at one moment, and nobody take what arrives.
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
