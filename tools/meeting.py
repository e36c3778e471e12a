"""Where the supervisors of all nodes meet before each start: node 0 listens, the others come.

Start k of a series is met at the endpoint's port + k, which torchrun then uses. Nobody has to know
k but node 0: the others look at all ports of the series, and one at which an earlier start has not
ended yet does not greet them. So a launcher that was itself started anew finds the others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


class Refused(Exception):
    """Ends everything with one line: a setting that is wrong, a node that does not come."""


class Stopped(Exception):
    """A signal has come while the nodes wait for each other."""


@dataclass
class Plan:
    """What comes next. Node 0's is that of all nodes."""

    start: int = 0  # its number in the series, and so the port
    probe: bool = False
    restarts: int = 0  # so many of them so far


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


class Meeting:
    """One node's part in it. `settings` must be the same on all nodes; they end in one line."""

    def __init__(
        self,
        host: str,
        port: int,
        node: dict,  # {"node_rank": 1, "host": "node1", "settings": {"NNODES": 2, ...}}
        last: int,  # start of the series
        say: Callable[[str], None],
    ) -> None:
        self.host, self.port, self.node, self.last, self.say = host, port, node, last, say
        self.nnodes = node["settings"]["NNODES"]
        self.stopped = False  # set by a signal
        self.began = self.told = 0.0

    def agree(self, plan: Plan, seconds: int) -> Plan:
        """Returns node 0's plan when all nodes are there; Refused after so many seconds."""
        if self.node["node_rank"] == 0:
            answer = self._hold(plan, seconds)
        else:
            answer = self._join(plan.start, seconds)
        if "error" in answer:
            raise Refused(answer["error"])
        return Plan(**answer)

    def _check(self, why: str = "") -> None:
        """Now and then while waiting: ends on a signal, and says from time to time what for."""
        if self.stopped:
            raise Stopped
        if why and time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self.say(f"still waiting for node 0, {self.told - self.began:.0f} s: {why}")

    # ---- Node 0

    def _hold(self, plan: Plan, seconds: int) -> dict:
        with self._listen(plan) as server, selectors.DefaultSelector() as ready:
            place = f"{self.host}:{self.port + plan.start}"
            self.say(f"node 0 waits up to {seconds} s at {place} for {self.nnodes - 1} more")
            ready.register(server, selectors.EVENT_READ)
            heard: dict[socket.socket, bytes] = {}
            answer, end = None, time.monotonic() + seconds
            while answer is None:
                self._check()
                late = time.monotonic() > end
                for key, _ in ready.select(0.2):
                    if key.fileobj is server:
                        self._greet(server, ready, heard, end)
                    else:
                        self._hear(key.fileobj, ready, heard)
                answer = self._answer(plan, heard.values(), seconds if late else 0)
            self._tell(answer, heard)
        return answer

    def _listen(self, plan: Plan) -> socket.socket:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        while True:
            port = self.port + plan.start
            try:
                return socket.create_server(("", port), family=family, dualstack_ipv6=both)
            except OSError as error:
                # What is left of an earlier start may hold its port for a while.
                if error.errno != errno.EADDRINUSE or not 0 < plan.start < self.last:
                    why = os.strerror(error.errno or 0)
                    raise Refused(
                        f"port {port} cannot be used on this node ({why}): end what holds it "
                        "(ss -ltnp), or set MASTER_PORT on every node"
                    ) from None
                plan.start += 1

    def _greet(self, server: socket.socket, ready, heard: dict, end: float) -> None:
        with contextlib.suppress(OSError):
            guest, _ = server.accept()
            # Node 0 speaks first, because a torchrun that still holds a port would not.
            seconds = max(0, end - time.monotonic())
            guest.sendall(json.dumps({"node_0_waits": seconds}).encode() + b"\n")
            ready.register(guest, selectors.EVENT_READ)
            heard[guest] = b""

    def _hear(self, guest: socket.socket, ready, heard: dict[socket.socket, bytes]) -> None:
        text = b""
        with contextlib.suppress(OSError):
            text = guest.recv(65536)
        heard[guest] += text
        if not text:  # it has left, and may come again
            ready.unregister(guest)
            del heard[guest]
            guest.close()

    def _answer(self, plan: Plan, texts, waited: int) -> dict | None:
        """The plan once all nodes are there, an error for all of them, or nothing yet."""
        hosts, mine = {0: self.node["host"]}, self.node["settings"]
        for text in texts:
            try:
                node = json.loads(text)
                rank, host, settings = node["node_rank"], node["host"], node["settings"]
            except (ValueError, TypeError, KeyError):
                continue  # not yet all of it, or another program that has found this port
            for name in [name for name in mine if settings.get(name) != mine[name]]:
                theirs = f"{settings.get(name)} on node {rank} ({host})"
                here = f"{name} is {mine[name]} on node 0 ({hosts[0]})"
                return {"error": f"{here} but {theirs}: give it the same value on all nodes"}
            if rank in hosts:
                both = f"{hosts[rank]} and {host}"
                return {"error": f"NODE_RANK {rank} came twice, from {both}: give each its own"}
            hosts[rank] = host
        missing = [str(rank) for rank in range(self.nnodes) if rank not in hosts]
        if missing and waited:
            return {
                "error": f"the other nodes did not all come within {waited} s (missing: node "
                f"{', '.join(missing)}): start the launcher on each node with its NODE_RANK"
            }
        return None if missing else asdict(plan)

    def _tell(self, answer: dict, heard: dict) -> None:
        for guest in heard:
            with contextlib.suppress(OSError):
                guest.settimeout(2)
                guest.sendall(json.dumps(answer).encode() + b"\n")
        for guest in heard:  # they close first, so that nothing lingers on the port
            with contextlib.suppress(OSError):
                guest.recv(1)
            guest.close()

    # ---- The others

    def _join(self, start: int, seconds: int) -> dict:
        place = f"{self.host}:{self.port + start}"
        self.say(f"waiting up to {seconds} s for node 0 at {place}")
        self.began = time.monotonic()
        self.told = self.began - 8  # first news after two seconds: node 0 is often just starting
        series = [*range(start, max(start, self.last) + 1), *range(start)]
        while True:
            for n in series:
                try:
                    return self._ask(self.port + n)
                except OSError as error:
                    why = error.strerror or str(error)
                self._check(why)
                if time.monotonic() - self.began > seconds:
                    raise Refused(
                        f"node 0 did not answer at {place} within {seconds} s ({why}): start the "
                        "launcher there with NODE_RANK=0, and open the port to this node"
                    )
            time.sleep(0.5)

    def _ask(self, port: int) -> dict:
        node_0 = socket.create_connection((self.host, port), timeout=2)
        with node_0, node_0.makefile("rwb") as stream:
            try:
                greeting = json.loads(stream.readline(100))
                end = time.monotonic() + greeting["node_0_waits"] + 10
            except (TimeoutError, ValueError, TypeError, KeyError):
                why = f"port {port} is held by another program or an earlier start"
                raise OSError(why) from None
            stream.write(json.dumps(self.node).encode() + b"\n")
            stream.flush()
            while not select.select([node_0], [], [], 0.2)[0]:
                self._check("node 0 is there, other nodes are missing")
                if time.monotonic() > end:
                    raise OSError("node 0 does not answer any more")
            answer = stream.readline()
        if not answer:
            raise OSError("node 0 has left")
        return json.loads(answer)
