"""The supervisors of all nodes while the command runs, over the connections of their rendezvous.

Node 0 is in the middle. Messages are lines of JSON. To node 0: {"ranks": standing}, where a node's
ranks stand after a failure; {"end": ...}, how the start ended there; {"stopped": signal}, later.
From node 0: {"line": text}, where the ranks of all nodes stood; {"ending": ...}, how the start
ended for all, or that there is no other. Both ways: {"failed": true}.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict

from launcher.ending import (
    LINE,
    End,
    Ending,
    printable,
    read_end,
    read_ending,
    read_standing,
    tell_end,
)
from launcher.hang_report import describe_standing
from launcher.wire import lost_after

GRACE = 10  # seconds to end for an attempt that has failed; torchrun alone would give them 30
SAVING = 20  # more of them after a signal, as torchrun gives the ranks 30 s to save
NOTICE = 2  # seconds in which the ranks that wait notice that another one has failed
ANSWER = 3  # seconds after that for the answers of all nodes
SPARE = 4  # seconds after those of its own in which a node waits for how it ended elsewhere
LONGEST = 2**20  # bytes of a message


class Nodes:
    """This node's connections to the others; node 0 has all of them, each other one node 0's."""

    def __init__(
        self,
        connections: dict[int, socket.socket],
        node_rank: int,
        names: list[str],
        timeout: float,
    ) -> None:
        self.connections, self.node_rank, self.names = dict(connections), node_rank, names
        self.timeout = timeout
        self.failed_at = 0.0  # when this node failed, heard that another did, or lost it
        self.ranks: dict[int, list[list]] = {}  # what nodes have answered
        self.line: str | None = None
        self.ends: dict[int, End] = {}
        self.ending: Ending | None = None
        self.stops: dict[int, str] = {}  # signals that came to nodes after the start
        self.rest = dict.fromkeys(connections, b"")
        self.ready = selectors.DefaultSelector()
        for node, connection in self.connections.items():
            self.ready.register(connection, selectors.EVENT_READ, node)
            lost_after(connection, timeout)

    def listen(self, seconds: float) -> None:
        """Takes what the others say within so many seconds."""
        if not self.connections:
            time.sleep(seconds)
            return
        for key, _ in self.ready.select(seconds):
            self._hear(key.data, key.fileobj)

    def _hear(self, node: int, connection: socket.socket) -> None:
        text = b""
        with contextlib.suppress(OSError):  # it is cut, or its supervisor was killed
            text = connection.recv(65536)
        *lines, self.rest[node] = (self.rest[node] + text).split(b"\n")
        for line in lines:
            # What is not of this form tells nothing.
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                self._take(node, json.loads(line))
        if not text or len(self.rest[node]) > LONGEST:
            self.ready.unregister(connection)
            self.connections.pop(node).close()
            if node not in self.ends:
                self.fail()

    def _take(self, node: int, message: dict) -> None:
        if "failed" in message:
            self.fail()
        if "ranks" in message:
            self.ranks[node] = read_standing(message["ranks"])
        if "end" in message:
            end = self.ends[node] = read_end(message["end"])
            if end.code and not is_stop(end):
                self.fail()
        if "line" in message:
            self.line = printable(message["line"], LINE)
        if "stopped" in message:
            self.stops[node] = printable(message["stopped"], 20)
        if "ending" in message:
            self.ending = read_ending(message["ending"])

    def tell(self, **message: object) -> None:
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

    def fail(self) -> None:
        """Notes a failure, here or elsewhere, and tells of the first."""
        if not self.failed_at:
            self.failed_at = time.monotonic()
            self.tell(failed=True)

    # ---- Where the ranks stand, once it has failed anywhere

    def settle(self, own: Callable[[], list[list]], over: Callable[[], bool]) -> str:
        """The line that says where all ranks stand.

        own() is this node's part of it; over() tells that nothing can change that any more.
        """
        self.fail()
        end = time.monotonic() + NOTICE
        while not over() and time.monotonic() < end:
            self.listen(0.1)
        self.ranks[self.node_rank] = own()
        return self._ask() if self.node_rank else self._collect()

    def _collect(self) -> str:
        end = time.monotonic() + ANSWER
        while time.monotonic() < end and self._lacks_answers():
            self.listen(0.1)
        nodes = range(len(self.names))
        silent = [n for n in nodes if n not in self.ranks and n not in self.ends]
        self.line = describe_standing(self.ranks, silent, self.names)
        self.tell(line=self.line)
        return self.line

    def _ask(self) -> str:
        self.tell(ranks=self.ranks[self.node_rank])
        end = time.monotonic() + ANSWER + NOTICE  # node 0 may be waiting for its own ranks
        while self.connections and self.line is None and time.monotonic() < end:
            self.listen(0.1)
        silent = [0] if self.line is None else []
        return self.line or describe_standing(self.ranks, silent, self.names)

    # ---- How the start has ended, on all nodes together

    def conclude(self, own: End, began: float, make: Callable[[], Ending]) -> Ending | None:
        """What make() makes of all ends on node 0; None on one that node 0 does not tell it.

        `own` may get a signal's name meanwhile, which others then hear of, too.
        """
        self.ends[self.node_rank] = own
        since, stopped, hurry = time.monotonic(), own.stopped, math.inf  # before it is told
        if own.code and not is_stop(own):
            self.fail()
        if self.node_rank:
            self.tell(end=tell_end(own, began))
        elif self.line is None:
            self.tell(line="")  # to those who ask where the ranks stand
        while not self._is_concluded() and time.monotonic() < min(hurry, self._until(own, since)):
            self.listen(0.1)
            if own.stopped and not stopped:
                stopped, hurry = own.stopped, time.monotonic() + SPARE
                if self.node_rank:
                    self.tell(end=tell_end(own, began))
        if self.node_rank == 0:
            self.ending = make()
            self.tell(ending=asdict(self.ending))
        return self.ending

    def _is_concluded(self) -> bool:
        if self.node_rank:
            return bool(self.ending) or not self.connections
        return self.connections.keys() <= self.ends.keys()

    def _until(self, own: End, since: float) -> float:
        """How long to wait for it: node 0 first gives up waiting for others."""
        spare = SPARE if self.node_rank == 0 else SPARE + 2
        if is_stop(own):  # other ranks may still be saving
            return since + GRACE + SAVING + spare
        if not self.failed_at:  # what is done here is soon done everywhere
            return since + self.timeout
        if self._lacks_answers():  # somebody is cut off, or very slow
            return self.failed_at + NOTICE + ANSWER + spare / 2
        return self.failed_at + GRACE + spare

    def _lacks_answers(self) -> bool:
        """Whether a node has not said where its ranks stand: it may be cut off."""
        if self.node_rank not in self.ranks:  # nobody has asked
            return False
        if self.node_rank:
            return self.line is None
        return bool(self.connections.keys() - self.ranks.keys() - self.ends.keys())

    # ---- Until the next start: a signal to one node ends all of them

    def stop(self, own: str, make: Callable[[str], Ending]) -> Ending | None:
        """The ending if a signal has come here, named in `own`, or to another node; else None.

        On node 0 make() makes it; another one asks node 0, and after a moment makes its own.
        """
        self.ending = self.ending if self.ending and self.ending.stopped else None
        self.listen(0)
        if own:
            self.stops[self.node_rank] = own
        if own and self.node_rank:
            self.tell(stopped=own)
            end = time.monotonic() + NOTICE
            while self.connections and not self.ending and time.monotonic() < end:
                self.listen(0.1)
        if self.stops and not self.ending:
            node, name = min(self.stops.items())
            self.ending = make(f"{name} on {self.names[node]}")
            self.tell(ending=asdict(self.ending))
        return self.ending

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self.ready.close()


def is_stop(end: End) -> bool:
    """Whether the ranks have saved and stopped on a signal: no failure."""
    return any(cause.kind == "asked" for cause in end.causes)
