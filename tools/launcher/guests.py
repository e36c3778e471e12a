"""Those who come to node 0's ports: nodes of this series, of other jobs, and anybody else.

Node 0 speaks first, with one line; a node introduces itself with one; the rest is told or turned
away. However many come, and whatever they send, it costs a bounded amount of memory.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from launcher.wire import LINE, fits, is_host, is_text, lost_after, pack, unpack

SILENT = 256  # guests at most who have not introduced themselves, beside the nodes


def is_table(values: object, *shapes: object) -> bool:
    """{"NNODES": 2, ...}, of which each value has one of these shapes."""
    return (
        isinstance(values, dict)
        and len(values) < 20
        and all(is_text(name) and fits(value, shapes) for name, value in values.items())
    )


NODE = {
    "node_rank": int,
    "host": is_host,
    "settings": lambda settings: is_table(settings, None, int, is_text),
    "protocol": int,
    # What a launcher of another version may lack.
    "token": (None, is_text),
    "job": (None, lambda job: is_table(job, is_text)),
}


@dataclass(eq=False)
class Guest:
    """One connection; a node once it has introduced itself."""

    peer: socket.socket
    heard: bytes = b""
    node: dict | None = None


class Guests:
    """Takes what comes to some listening sockets. `greet()` is what node 0 says first."""

    def __init__(
        self,
        servers: list[socket.socket],
        greet: Callable[[], dict],
        shape: dict,  # of an introduction, beside NODE
        nnodes: int,
        seconds: float,  # keep-alives: a node may wait so long for the others
    ) -> None:
        self.servers, self.greet, self.shape, self.seconds = servers, greet, NODE | shape, seconds
        self.most = nnodes + SILENT
        self.all: list[Guest] = []
        self.ready = selectors.DefaultSelector()
        for server in servers:
            self.ready.register(server, selectors.EVENT_READ)

    def nodes(self) -> list[Guest]:
        return [guest for guest in self.all if guest.node]

    def serve(self) -> list[Guest]:
        """Those who have introduced themselves in the next moment."""
        came = []
        for key, _ in self.ready.select(0.2):
            if key.fileobj in self.servers:
                self._accept(key.fileobj)
            elif key.data in self.all and self._hear(key.data):
                came.append(key.data)
        return came

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer, _ = server.accept()
            guest = Guest(peer)
            self.ready.register(peer, selectors.EVENT_READ, guest)
            self.all.append(guest)
            lost_after(peer, self.seconds)
            # Node 0 speaks first, because a torchrun that still holds a port would not.
            self.tell(guest, self.greet())
        silent = [guest for guest in self.all if not guest.node]
        if len(silent) > self.most:
            self.dismiss(silent[0])

    def _hear(self, guest: Guest) -> bool:
        """Takes what one of them sends; True where that completes its introduction."""
        text = b""
        with contextlib.suppress(OSError):
            text = guest.peer.recv(LINE)
        if not text:  # it has left, and may come again
            self.dismiss(guest)
            return False
        if guest.node:  # nothing more is to come from it
            return False
        guest.heard += text
        line, newline, _ = guest.heard.partition(b"\n")
        if newline:
            guest.node, guest.heard = self._read(line), b""
        if len(guest.heard) > LINE or (newline and not guest.node):
            self.dismiss(guest)  # others have found this port by chance
        return bool(guest.node)

    def _read(self, line: bytes) -> dict | None:
        with contextlib.suppress(ValueError):
            node = unpack(line)
            return node if fits(node, self.shape) else None
        return None

    def tell(self, guest: Guest, message: dict) -> None:
        with contextlib.suppress(OSError):
            guest.peer.sendall(pack(message))

    def dismiss(self, guest: Guest, message: dict | None = None) -> None:
        """The last word to one of them."""
        self.all.remove(guest)
        self.ready.unregister(guest.peer)
        if message:
            self.tell(guest, message)
        if message and guest.node:
            with contextlib.suppress(OSError):  # it closes first: nothing lingers on the port
                guest.peer.settimeout(0.5)
                guest.peer.recv(1)
        guest.peer.close()


class Door(threading.Thread):
    """Node 0's, while its command runs: `decide` answers those who come then."""

    def __init__(self, guests: Guests, decide: Callable[[dict], dict]) -> None:
        super().__init__(daemon=True)
        self.guests, self.decide, self.closed = guests, decide, False
        self.start()

    def run(self) -> None:
        while not self.closed:
            for guest in self.guests.serve():
                self.guests.dismiss(guest, self.decide(guest.node))

    def close(self) -> None:
        self.closed = True
        self.join(10)
        for guest in [*self.guests.all]:
            self.guests.dismiss(guest)
        self.guests.ready.close()
