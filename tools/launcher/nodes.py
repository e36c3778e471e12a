"""The supervisors of all nodes while the command runs, over the connections of their rendezvous.

Node 0 is in the middle. Messages are lines of JSON. Both ways: {"failed": true}, so that all end
soon. To node 0: {"end": ...}, how the start ended on a node; {"stopped": signal}, after that. From
node 0: {"ending": ...}, how the start ended for all, or that there is no other.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Callable

from launcher.ending import (
    End,
    Ending,
    is_line,
    read_end,
    read_ending,
    tell_end,
    tell_ending,
)
from launcher.wire import fits, lost_after, pack

GRACE = 10  # seconds to end for an attempt that has failed; torchrun alone would give them 30
SAVING = 20  # more of them after a signal, as torchrun gives the ranks 30 s to save
NOTICE = 2  # seconds in which a node hears of a failure, and in which ranks that wait notice it
ANSWER = 5  # seconds after a failure in which each node has said that it knows, or is cut off
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
        self.know: set[int] = set()  # nodes that have told of a failure, or of their end
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
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                self._take(node, json.loads(line))
        if not text or len(self.rest[node]) > LONGEST:
            self.ready.unregister(connection)
            self.connections.pop(node).close()
            if node not in self.ends:
                self.fail()

    def _take(self, node: int, message: dict) -> None:
        if "failed" in message:
            self.know.add(node)
            self.fail()
        if "end" in message:
            end = self.ends[node] = read_end(message["end"])
            self.know.add(node)
            if end.code and not is_stop(end):
                self.fail()
        if "stopped" in message and fits(message, {"stopped": is_line}):
            self.stops[node] = message["stopped"]
        if "ending" in message:
            self.ending = read_ending(message["ending"])

    def tell(self, **message: object) -> None:
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(pack(message))

    def fail(self) -> None:
        """Notes a failure, here or elsewhere, and tells of the first."""
        if not self.failed_at:
            self.failed_at = time.monotonic()
            self.tell(failed=True)

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
        while not self._is_concluded() and time.monotonic() < min(hurry, self._until(own, since)):
            self.listen(0.1)
            if own.stopped and not stopped:
                stopped, hurry = own.stopped, time.monotonic() + SPARE
                if self.node_rank:
                    self.tell(end=tell_end(own, began))
        if self.node_rank == 0:
            self.ending = make()
            self.tell(ending=tell_ending(self.ending))
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
        if self.connections.keys() - self.know:  # somebody is cut off, or very slow
            return self.failed_at + ANSWER + spare / 2
        return self.failed_at + GRACE + spare

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
            self.tell(ending=tell_ending(self.ending))
        return self.ending

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self.ready.close()


def is_stop(end: End) -> bool:
    """Whether the ranks have saved and stopped on a signal: no failure."""
    return any(cause.kind == "asked" for cause in end.causes)
