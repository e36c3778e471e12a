"""How the supervisors of all nodes find each other before a start: node 0 listens, others come.

Start k of a series has it at the endpoint's port + k, which torchrun then uses. Nobody has to know
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

LATE = 10  # seconds in which nodes that come after an error are told of it, too
CONNECT_TIMEOUT = 300  # seconds to wait for the other nodes: the launcher's default


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


def nodes_of(heard: dict[socket.socket, bytes]) -> dict[socket.socket, dict]:
    """What the nodes among those who came have said; others have found this port by chance."""
    nodes = {}
    for peer, text in heard.items():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # or not yet all of it
            node = json.loads(text)
            nodes[peer] = node | {key: node[key] for key in ("node_rank", "host", "settings")}
    return nodes


class Rendezvous:
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
        self.connections: dict[
            int, socket.socket
        ] = {}  # after agree: node 0's to all, others' to 0
        self.hosts = {node["node_rank"]: node["host"]}  # node 0 knows all of them
        self.stopped = False  # set by a signal
        self.began = self.told = 0.0

    def agree(self, plan: Plan, seconds: int) -> Plan:
        """Returns node 0's plan when all nodes are there; Refused after so many seconds.

        The connections stay open, for whoever wants them, until the next rendezvous.
        """
        self.close()
        if self.node["node_rank"] == 0:
            answer = self._hold(plan, seconds)
        else:
            answer = self._join(plan.start, seconds)
        if "error" in answer:
            raise Refused(answer["error"])
        return Plan(**answer)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections = {}

    # What a rendezvous for another purpose, such as preflight.py's, has of its own.
    purpose = "start"

    def greeting(self) -> dict:
        """What node 0 says first, beside how long it waits."""
        return {"purpose": self.purpose}

    def introduction(self, greeting: dict) -> dict:
        """What another node answers."""
        return self.node

    def objection(self, nodes: list[dict]) -> str:
        """Node 0's, to what the others have said when all are there; empty: none."""
        return ""

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
                late = time.monotonic() > end
                self._serve(server, ready, heard, end)
                answer = self._answer(plan, heard, seconds if late else 0)
            if "error" in answer and not late:
                self._wait_for_the_late(server, ready, heard)
            self._tell(answer, heard)
        return answer

    def _wait_for_the_late(self, server: socket.socket, ready, heard: dict) -> None:
        """Nodes that are just starting shall end with the same line, not wait for nobody."""
        end = time.monotonic() + LATE
        if len(nodes_of(heard)) < self.nnodes - 1:
            self.say(f"the nodes cannot start together; up to {LATE} s more, to tell the others")
        while len(nodes_of(heard)) < self.nnodes - 1 and time.monotonic() < end:
            self._serve(server, ready, heard, end)

    def _serve(self, server: socket.socket, ready, heard: dict, end: float) -> None:
        """Takes what the other nodes send in the next moment, and new ones among them."""
        self._check()
        for key, _ in ready.select(0.2):
            if key.fileobj is server:
                self._greet(server, ready, heard, end)
            else:
                self._hear(key.fileobj, ready, heard)

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
            peer, _ = server.accept()
            # Node 0 speaks first, because a torchrun that still holds a port would not.
            seconds = max(0, end - time.monotonic())
            greeting = {"node_0_waits": seconds} | self.greeting()
            peer.sendall(json.dumps(greeting).encode() + b"\n")
            ready.register(peer, selectors.EVENT_READ)
            heard[peer] = b""

    def _hear(self, peer: socket.socket, ready, heard: dict[socket.socket, bytes]) -> None:
        text = b""
        with contextlib.suppress(OSError):
            text = peer.recv(65536)
        heard[peer] += text
        if not text:  # it has left, and may come again
            ready.unregister(peer)
            del heard[peer]
            peer.close()

    def _answer(self, plan: Plan, heard: dict[socket.socket, bytes], waited: int) -> dict | None:
        """The plan once all nodes are there, an error for all of them, or nothing yet."""
        hosts, mine = {0: self.node["host"]}, self.node["settings"]
        for node in nodes_of(heard).values():
            rank, host, settings = node["node_rank"], node["host"], node["settings"]
            for name in [name for name in mine if settings.get(name) != mine[name]]:
                ours, theirs = (
                    "not set" if value is None else value
                    for value in (mine[name], settings.get(name))
                )
                text = f"{name} is {ours} on node 0 ({hosts[0]}) but {theirs} on node {rank} "
                return {"error": f"{text}({host}): give it the same value on all nodes"}
            if rank in hosts:
                both = f"{hosts[rank]} and {host}"
                return {"error": f"NODE_RANK {rank} came twice, from {both}: give each its own"}
            hosts[rank] = host
        self.hosts = hosts
        missing = [str(rank) for rank in range(self.nnodes) if rank not in hosts]
        if missing and waited:
            return {
                "error": f"the other nodes did not all come within {waited} s (missing: node "
                f"{', '.join(missing)}): start the launcher on each node with its NODE_RANK"
            }
        if missing:
            return None
        why = self.objection(list(nodes_of(heard).values()))
        return {"error": why} if why else asdict(plan)

    def _tell(self, answer: dict, heard: dict[socket.socket, bytes]) -> None:
        if "error" not in answer:
            nodes = nodes_of(heard).items()
            self.connections = {
                n["node_rank"]: peer for peer, n in nodes if n["node_rank"] in self.hosts
            }
        for peer in heard:
            with contextlib.suppress(OSError):
                peer.settimeout(2)
                peer.sendall(json.dumps(answer).encode() + b"\n")
        for peer in heard.keys() - set(self.connections.values()):
            with contextlib.suppress(OSError):  # they close first: nothing lingers on the port
                peer.recv(1)
            peer.close()

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
        try:
            # Without a buffer: what node 0 says later is not taken with the answer.
            with node_0.makefile("rb", buffering=0) as stream:
                answer = self._exchange(port, node_0, stream)
            if "error" not in answer:
                self.connections = {0: node_0}
            return answer
        finally:
            if not self.connections:
                node_0.close()

    def _exchange(self, port: int, node_0: socket.socket, stream) -> dict:
        try:
            greeting = json.loads(stream.readline(1000))
            end = time.monotonic() + greeting["node_0_waits"] + LATE + 2
        except (TimeoutError, ValueError, TypeError, KeyError):
            why = f"port {port} is held by another program or an earlier start"
            raise OSError(why) from None
        node_0.sendall(json.dumps(self.introduction(greeting)).encode() + b"\n")
        while not select.select([node_0], [], [], 0.2)[0]:
            self._check("node 0 is there, other nodes are missing")
            if time.monotonic() > end:
                raise OSError("node 0 does not answer any more")
        answer = stream.readline()
        if not answer:
            raise OSError("node 0 has left")
        if greeting.get("purpose") != self.purpose and b'"error"' not in answer:
            raise OSError("node 0 was started anew, and is not yet so far")
        return json.loads(answer)
