"""Who is missing when a start fails: where the ranks stand, on this node and on the others.

Each rank keeps its phase ("step 12") in a file of the folder that DEMO_PHASES names, in memory:
the script writes it, the supervisor reads it after a failure. While the command runs, supervisors
keep the connections of their rendezvous. One whose part fails tells node 0, and node 0 all others;
each says where its ranks stand, and node 0 makes one line of it, the same for all nodes: who stood
still, who waited, and which node to look at.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from launcher.root_cause import Cause
from launcher.wire import lost_after

NOTICE = 2  # seconds in which the ranks that wait notice that another one has failed
ANSWER = 3  # seconds after that for the answers of all nodes
ROOM = 2**20  # bytes that memory must have for phases: a page for each rank
SHOWN = 8  # ranks of a kind that the line names, and nodes
HOW = ("stood still in", "had not begun", "was in", "ended in", "waited in")


def phases_folder() -> tempfile.TemporaryDirectory:
    """Where the ranks of one start keep their phases: in memory where the system has such a place.

    Never on a network's disk: a rank that waits for one would keep the others from writing.
    """
    with contextlib.suppress(OSError):
        if shutil.disk_usage("/dev/shm").free >= ROOM:
            return tempfile.TemporaryDirectory(prefix="demo-phases-", dir="/dev/shm")
    return tempfile.TemporaryDirectory(prefix="demo-phases-")


def read_phases(folder: str) -> dict[int, tuple[str, float]]:
    """{rank: (its phase, for how many seconds)} of this node."""
    found = {}
    for path in Path(folder).glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it is just being written anew
            phase = path.read_text(errors="replace").strip()[:80]
            found[int(path.name)] = (phase, time.time() - path.stat().st_mtime)
    return found


def standing(
    phases: dict[int, tuple[str, float]], causes: list[Cause], alive: set[int], timeout: float
) -> list[list]:
    """[rank, how, phase] of each rank of this node, `how` one of HOW.

    A rank that waits for another one notices its failure, and says so in its error file. One that
    is there, silent, and long in its phase is what the others have waited for.
    """
    kinds, found = {cause.rank: cause.kind for cause in causes}, []
    for rank in sorted({*phases, *alive}):
        phase, seconds = phases.get(rank, ("", 0))
        if rank in kinds:
            how = "waited in" if kinds[rank] == "lost" else "ended in"
        elif rank not in alive:
            how = "ended in"
        elif not phase:
            how = "had not begun"
        else:
            how = "stood still in" if seconds > timeout / 2 else "was in"
        found.append([rank, how, phase])
    return found


def describe_standing(ranks: dict[int, list[list]], silent: list[int], names: list[str]) -> str:
    """The line for people: of {node: standing}, nodes that did not answer, and nodes' names.

    Empty where nobody waited for another one, or no rank has told its phase.
    """
    alike: dict[tuple, list[int]] = {}  # a line that does not grow with the number of ranks
    nodes: dict[str, set[int]] = {}
    known = any(phase for found in ranks.values() for _, _, phase in found)
    for node, found in ranks.items() if known else ():
        for rank, how, phase in found:
            alike.setdefault((HOW.index(how), phase), []).append(rank)
            nodes.setdefault(how, set()).add(node)
    if not silent and not nodes.keys() & {"stood still in", "waited in"}:
        return ""
    parts = [f"{numbers(alike[key])} {HOW[key[0]]} {key[1]}".strip() for key in sorted(alike)]
    line = "; ".join([*parts, *(f"{names[node]} did not answer" for node in silent[:SHOWN])])
    if len(names) == 1:
        return line
    if nodes.keys() == {"waited in"} and not silent:
        return f"{line}: look at the link between the nodes"
    nodes["did not answer"] = set(silent)
    for how in (*HOW[:2], "did not answer", "ended in"):
        if guilty := sorted(nodes.get(how, ())):
            several = ", ".join(names[node] for node in guilty[:SHOWN])
            link = " and the link" if how == "did not answer" else ""
            return f"{line}: look at {several}{link}"
    return line


def numbers(ranks: list[int]) -> str:
    text = "rank " if len(ranks) == 1 else "ranks "
    text += ", ".join(map(str, sorted(ranks)[:SHOWN]))
    more = len(ranks) - SHOWN
    return f"{text} and {more} more" if more > 0 else text


class Nodes:
    """The supervisors of the other nodes while the command runs. Node 0 is in the middle.

    Messages are lines of JSON: {"failed": true}; {"done": true}; {"ranks": standing}, to node 0;
    {"line": text}, from node 0.
    """

    def __init__(
        self,
        connections: dict[int, socket.socket],
        node_rank: int,
        names: list[str],
        timeout: float,
    ) -> None:
        self.connections, self.node_rank, self.names = dict(connections), node_rank, names
        self.failed = False  # a node has said so, or its supervisor is gone
        self.ranks: dict[int, list[list]] = {}  # what nodes have answered
        self.done: set[int] = {node_rank}
        self.line: str | None = None
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
        with contextlib.suppress(
            OSError
        ):  # a connection that is cut, or a supervisor that was killed
            text = connection.recv(65536)
        *lines, self.rest[node] = (self.rest[node] + text).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.failed |= "failed" in message
            self.line = message.get("line", self.line)
            if "done" in message:
                self.done.add(node)
            if "ranks" in message:
                self.ranks[node] = message["ranks"]
        if not text:
            self.ready.unregister(connection)
            self.connections.pop(node).close()
            self.failed |= node not in self.done

    def tell(self, **message: object) -> None:
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")

    def settle(self, own: Callable[[], list[list]], over: Callable[[], bool]) -> str:
        """After a failure here or elsewhere: the line that says where all ranks stand.

        own() is this node's part of it; over() tells that nothing can change that any more.
        """
        self.tell(failed=True)
        end = time.monotonic() + NOTICE
        while not over() and time.monotonic() < end:
            self.listen(0.1)
        self.ranks[self.node_rank] = own()
        return self._ask() if self.node_rank else self._collect()

    def _collect(self) -> str:
        end = time.monotonic() + ANSWER
        while not self.connections.keys() <= self.ranks.keys() and time.monotonic() < end:
            self.listen(0.1)
        nodes = range(len(self.names))
        silent = [n for n in nodes if n not in self.ranks and n not in self.done]
        line = describe_standing(self.ranks, silent, self.names)
        self.tell(line=line)
        return line

    def _ask(self) -> str:
        self.tell(ranks=self.ranks[self.node_rank])
        end = time.monotonic() + ANSWER + NOTICE  # node 0 may be waiting for its own ranks
        while self.connections and self.line is None and time.monotonic() < end:
            self.listen(0.1)
        if self.line is not None:
            return self.line
        silent = [] if 0 in self.done else [0]
        return describe_standing(self.ranks, silent, self.names)

    def leave(self, done: bool) -> None:
        """Closes the connections; without `done` the others take it for a failure."""
        if done:
            self.tell(done=True)
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self.ready.close()
