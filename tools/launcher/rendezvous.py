"""How the supervisors of all nodes find each other before a start: node 0 listens, others come.

Start k of a series has it at the endpoint's port + k, which torchrun then uses. Nobody has to know
k but node 0: the others look at all ports of the series, and one at which an earlier start has not
ended yet does not greet them. So a launcher that was itself started anew finds the others.

A node of another job is turned away alone; nodes of this one whose settings differ end together.
While the command runs node 0 tells those who come then (Rendezvous.guard).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

from launcher.addresses import connect, create_server
from launcher.errors import Refused, Stopped
from launcher.guests import Door, Guest, Guests
from launcher.series import Series, stranger
from launcher.wire import fits, host_name, is_text, lost_after, pack, printable, read_line, unpack

PROTOCOL = 5  # of what the launchers of all nodes tell each other; another number: another version
LATE = 10  # seconds in which nodes that come after an error are told of it, too
ECHO = 1  # seconds for the answer of a machine that knows nothing of a connection
LABELS = "NETWORKS (its labels, in their order)"  # a setting that the nodes compare
CONNECT_TIMEOUT = 300  # seconds to wait for the other nodes: the launcher's default


@dataclass
class Plan:
    """What comes next. Node 0's is that of all nodes."""

    start: int = 0  # its number in the series, and so the port
    probe: bool = False
    restarts: int = 0  # so many of them so far


class Rendezvous:
    """One node's part in it. `settings` must be the same on all nodes; they end in one line."""

    # What a rendezvous for another purpose, such as preflight.py's, has of its own.
    purpose = "start"
    # What an introduction and a greeting for that purpose must have, beside what all have.
    shape: ClassVar[dict] = {}
    greeting_shape: ClassVar[dict] = {}

    def __init__(
        self,
        host: str,
        port: int,
        node: dict,  # {"node_rank": 1, "host": "node1", "settings": {"NNODES": 2, ...}}
        last: int,  # start of the series
        say: Callable[[str], None],
        series: Series | None = None,
    ) -> None:
        self.host, self.port, self.last, self.say = host, port, last, say
        self.node = node | {"host": host_name(node["host"])}
        self.series = series or Series()
        self.nnodes = node["settings"]["NNODES"]
        self.door: Door | None = None
        self.turned_away: set[str] = set()
        # After agree: node 0's to all, others' to 0.
        self.connections: dict[int, socket.socket] = {}
        self.hosts = {node["node_rank"]: node["host"]}  # node 0 knows all of them
        self.stopped = False  # set by a signal
        self.watch: Callable[[], None] | None = None  # called while waiting; may raise
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
        self.series.token = answer["token"]
        self.series.run = answer["run"] or self.series.run
        return Plan(**{name: answer["plan"][name] for name in asdict(plan)})

    def close(self) -> None:
        if self.door:
            self.door.close()
            self.door = None
        for connection in self.connections.values():
            connection.close()
        self.connections = {}

    # What a rendezvous for another purpose may do in another way.

    def greeting(self) -> dict:
        """What node 0 says first, beside what all greetings have."""
        return {"purpose": self.purpose}

    def introduction(self, greeting: dict) -> dict:
        """What another node answers, beside what all introductions have."""
        return self.node

    def objection(self, nodes: list[dict]) -> str:
        """Node 0's, to what the others have said when all are there; empty: none."""
        return ""

    def _check(self, why: str = "") -> None:
        """Now and then while waiting: ends on a signal, and says from time to time what for."""
        if self.watch:
            self.watch()
        if self.stopped:
            raise Stopped(self.stopped)
        if why and time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self.say(f"still waiting for node 0, {self.told - self.began:.0f} s: {why}")

    # ---- Node 0

    def _hold(self, plan: Plan, seconds: int) -> dict:
        with self._listen(plan) as server:
            place = f"{self.host}:{self.port + plan.start}"
            self.say(f"node 0 waits up to {seconds} s at {place} for {self.nnodes - 1} more")
            answer, end = None, time.monotonic() + seconds
            guests = self._guests([server], lambda: max(0, end - time.monotonic()), self.greeting)
            while answer is None:
                late = time.monotonic() > end
                self._serve(guests)
                answer = self._answer(plan, guests, seconds if late else 0)
            if "error" in answer and not late:
                self._wait_for_the_late(guests)
            self._tell(answer, guests)
        return answer

    def _guests(
        self,
        servers: list[socket.socket],
        left: Callable[[], float],  # seconds that node 0 still waits
        more: Callable[[], dict],  # of the greeting
    ) -> Guests:
        """Those who come to these sockets, or to the lock."""

        def greet() -> dict:
            return {
                "protocol": PROTOCOL,
                "node_0_waits": left(),
                "about": self.series.about,
                "run": self.series.run,
            } | more()

        if self.series.lock:
            servers = [*servers, self.series.lock]
        return Guests(servers, greet, self.shape, self.nnodes, max(60, left()))

    def _wait_for_the_late(self, guests: Guests) -> None:
        """Nodes that are just starting shall end with the same line, not wait for nobody."""
        end = time.monotonic() + LATE
        if len(guests.nodes()) < self.nnodes - 1:
            self.say(f"the nodes cannot start together; up to {LATE} s more, to tell the others")
        while len(guests.nodes()) < self.nnodes - 1 and time.monotonic() < end:
            self._serve(guests)

    def _serve(self, guests: Guests) -> None:
        """Takes what the other nodes send in the next moment, and new ones among them."""
        self._check()
        for guest in guests.serve():
            if guest in guests.all:  # not turned away meanwhile, for one that came with it
                self._admit(guest, guests)

    def _admit(self, guest: Guest, guests: Guests) -> None:
        """Turns one away that belongs elsewhere, or whose place a node of this series has."""
        if why := self._foreign(guest.node):
            guests.dismiss(guest, {"error": why})
            return
        rank = guest.node["node_rank"]
        for other in guests.nodes():
            if other is guest or other.node["node_rank"] != rank:
                continue
            known = [one for one in (guest, other) if self._is_known(one.node)]
            if len(known) == 1:  # the other one of the two was started a second time
                second = other if known[0] is guest else guest
                guests.dismiss(second, {"error": self._full(rank)})
                return

    def _is_known(self, node: dict) -> bool:
        return bool(self.series.token) and node.get("token") == self.series.token

    def _foreign(self, node: dict) -> str:
        """What to tell a node of another job; empty for one of ours, or that may be."""
        why = stranger(self.series.job, node.get("job") or {})
        if not why:
            return ""
        name = f"node {node['node_rank']} ({node['host']})"
        if name not in self.turned_away and len(self.turned_away) < 20:
            self.turned_away.add(name)
            self.say(f"turned away {name}, which belongs to another job: {why}")
        return printable(
            f"node 0 at {self.host}:{self.port} ({self.node['host']}) is of another job: {why}: "
            "give each job its own MASTER_ADDR or MASTER_PORT"
        )

    def _full(self, rank: int) -> str:
        has = f"its node {rank} already" if rank < self.nnodes else f"no node {rank}"
        about = f" ({self.series.about})" if self.series.about else ""
        return printable(
            f"the series of node 0 at {self.host}:{self.port} ({self.node['host']}) has {has} and "
            f"goes on{about}: end it first, or give another MASTER_PORT"
        )

    def guard(self, plan: Plan) -> None:
        """On node 0, while the command runs: tells those who come that the series is full.

        At a port of the series that the command does not use, and at the lock.
        """
        if self.node["node_rank"] or self.nnodes == 1:
            return
        # A port that is used already rather than one that is still to come.
        ports = [*range(plan.start), *range(self.last, plan.start, -1)]
        servers = []
        for n in ports:
            with contextlib.suppress(OSError):
                servers.append(create_server(self.port + n))
                break
        guests = self._guests(servers, lambda: 0, lambda: {"purpose": "full"})
        self.door = Door(guests, self._at_the_door)

    def _at_the_door(self, node: dict) -> dict:
        if why := self._foreign(node):
            return {"error": why}
        if node["protocol"] != PROTOCOL:
            return {"error": other_version(node, self.node["host"])}
        if self._is_known(node) or self._is_free(node["node_rank"]):
            return {"wait": "node 0's start has not ended yet"}
        return {"error": self._full(node["node_rank"])}

    def _is_free(self, rank: int) -> bool:
        """Whether the node of this rank is gone, and its place waits for it at the next start."""
        connection = self.connections.get(rank)
        return rank < self.nnodes and (connection is None or is_gone(connection))

    def _listen(self, plan: Plan) -> socket.socket:
        while True:
            port = self.port + plan.start
            try:
                return create_server(port)
            except OSError as error:
                # What is left of an earlier start may hold its port for a while.
                if error.errno != errno.EADDRINUSE or not 0 < plan.start < self.last:
                    why = os.strerror(error.errno or 0)
                    raise Refused(
                        f"port {port} cannot be used on this node ({why}): end what holds it "
                        "(ss -ltnp), or set MASTER_PORT on every node"
                    ) from None
                plan.start += 1

    def _answer(self, plan: Plan, guests: Guests, waited: int) -> dict | None:
        """The plan once all nodes are there, an error for all of them, or nothing yet."""
        hosts = {0: self.node["host"]}
        own = f"node 0 ({hosts[0]})"
        nodes = [guest.node for guest in guests.nodes()]
        for node in nodes:
            rank, host = node["node_rank"], node["host"]
            if node["protocol"] != PROTOCOL:
                return {"error": other_version(node, hosts[0])}
            for name, ours in self.node["settings"].items():
                theirs = node["settings"].get(name)
                if theirs != ours:
                    both = f"{shown(ours)} on {own} but {shown(theirs)} on node {rank} ({host})"
                    return {"error": f"{name} is {both}: give it the same value on all nodes"}
            if rank in hosts:
                both = f"{hosts[rank]} and {host}"
                return {"error": f"NODE_RANK {rank} came twice, from {both}: give each its own"}
            hosts[rank] = host
        self.hosts = hosts
        missing = [str(rank) for rank in range(self.nnodes) if rank not in hosts]
        if missing and waited:
            return {
                "error": f"the other nodes did not all come within {waited} s (missing: node "
                f"{', '.join(missing[:20])}): start the launcher on each node with its NODE_RANK"
            }
        if missing:
            return None
        why = self.objection(nodes)
        if why:
            return {"error": printable(why)}
        return {"plan": asdict(plan), "token": self.series.token, "run": self.series.run}

    def _tell(self, answer: dict, guests: Guests) -> None:
        for guest in [*guests.all]:
            if "error" in answer:
                guests.dismiss(guest, answer)
            elif guest.node:
                self.connections[guest.node["node_rank"]] = guest.peer
                guests.tell(guest, answer)
            else:  # whoever it is, it was not admitted: no plan for it, and no token
                guests.dismiss(guest)
        guests.ready.close()

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
        node_0 = connect(self.host, port, 2, self._check)
        try:
            answer = self._exchange(port, node_0)
            if "error" not in answer:
                self.connections = {0: node_0}
            return answer
        finally:
            if not self.connections:
                node_0.close()

    def _exchange(self, port: int, node_0: socket.socket) -> dict:
        try:
            # Node 0 speaks first; a torchrun that still holds a port would not.
            greeting = unpack(read_line(node_0, time.monotonic() + 2, self._check))
        except (TimeoutError, ValueError):
            greeting = {}
        same_version = greeting.get("protocol") == PROTOCOL
        ours = same_version and greeting.get("purpose") == self.purpose
        if not fits(greeting, GREETING | (self.greeting_shape if ours else {})):
            raise OSError(f"port {port} is held by another program or an earlier start")
        end = time.monotonic() + greeting["node_0_waits"] + LATE + 2
        lost_after(node_0, max(60, greeting["node_0_waits"]))
        about = {"protocol": PROTOCOL, "token": self.series.token, "job": self.series.job}
        node = self.introduction(greeting) if same_version else self.node
        node_0.sendall(pack(node | about))
        if not same_version:
            raise Refused(
                f"node 0 at {self.host}:{port} runs another version of this demo (its launcher "
                f"speaks protocol {greeting['protocol']}, this one {PROTOCOL}): use the same "
                "version on all nodes"
            )
        return self._answer_of(node_0, greeting, end)

    def _answer_of(self, node_0: socket.socket, greeting: dict, end: float) -> dict:
        """What node 0 says to all when all have come, or to this node alone."""
        missing = "node 0 is there, other nodes are missing"
        try:
            # Only the answer: what node 0 says later is for others to read.
            answer = unpack(read_line(node_0, end, lambda: self._check(missing)))
        except TimeoutError:
            raise OSError("node 0 does not answer any more") from None
        except ValueError:
            raise OSError("node 0's answer is damaged") from None
        if fits(answer, {"error": is_text}):
            return answer
        if fits(answer, {"wait": is_text}):
            raise OSError(answer["wait"])
        if greeting["purpose"] != self.purpose:
            raise OSError("node 0 was started anew, and is not yet so far")
        if not fits(answer, ANSWER):
            raise OSError("node 0's answer is damaged")
        return answer


GREETING = {
    "protocol": int,
    "node_0_waits": float,
    "purpose": is_text,
    "about": (None, is_text),
    "run": (None, is_text),
}
ANSWER = {
    "plan": {"start": int, "probe": bool, "restarts": int},
    "token": lambda value: is_text(value, 64),
    "run": lambda value: is_text(value, 255),
}


def shown(setting: object) -> object:
    return "not set" if setting is None else setting


def other_version(node: dict, host_0: str) -> str:
    return (
        f"node {node['node_rank']} ({node['host']}) runs another version of this demo than node 0 "
        f"({host_0}): its launcher speaks protocol {node['protocol']}, that of node 0 {PROTOCOL}: "
        "use the same version on all nodes"
    )


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end is; also that of a machine that has been started anew since.

    Such a one says so only when it is sent something: here a message that tells nothing.
    """
    events = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it is closed, here too
        events.register(connection, 0)  # its end alone
        connection.sendall(pack({}))
        return bool(events.poll(1000 * ECHO))
    return True
