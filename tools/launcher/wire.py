"""What comes over the network is checked here before anything else reads it.

A message is one line of JSON. Whoever can reach a port can send one, so that nothing in it is
believed: not its length, not its depth, not a type, and no text that a terminal or a log would
take for something else.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import select
import socket
import time
from collections.abc import Callable

from common.records import LAUNCHER, PREFIX

LINE = 1 << 15  # bytes of a message at most
DEPTH = 100  # brackets that open in a message at most: ours have ten, json fails at a thousand
TEXT = 4000  # characters of a text for people at most
KEEPALIVE = 60  # seconds: some firewalls forget a connection that is silent for 350
COUNT = 127  # unanswered keep-alives at most, as Linux takes it


def pack(message: dict) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode(errors="replace") + b"\n"


def unpack(line: bytes) -> dict:
    """The message in a line. Raises ValueError for anything that is none."""
    if len(line) > LINE or line.count(b"{") + line.count(b"[") > DEPTH:
        raise ValueError("too long or too deep")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def fits(value: object, shape: object) -> bool:
    """Whether a value from outside has this shape.

    A dict has a shape for each key that will be read; a list one for all its parts; a tuple has
    several, of which one will do; a function decides by itself. Of a number it is the type: int,
    float (which may be whole), bool.
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(fits(value.get(k), s) for k, s in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if shape is None or shape is bool:
        return value is None if shape is None else isinstance(value, bool)
    if shape is int or shape is float:
        return type(value) in (int, shape) and 0 <= value < 2**31
    return shape(value)


def is_text(value: object, longest: int = TEXT) -> bool:
    """Printable, and nothing that compare_logs.py would take for a line of the run."""
    return (
        isinstance(value, str)
        and len(value) <= longest
        and value.isprintable()
        and not PREFIX.search(value)
        and not LAUNCHER.search(value)
    )


def host_name(name: str) -> str:
    """This node's own name as the others take it."""
    return re.sub(r"[^\w.-]", "_", name)[:255] or "_"


def is_host(value: object) -> bool:
    return isinstance(value, str) and value == host_name(value)


def printable(text: str, longest: int = TEXT) -> str:
    """This node's own text as the others take it."""
    text = "".join(c if c.isprintable() else "?" for c in text)[:longest]
    return text if is_text(text, longest) else text.replace("[", "(").replace(": ", "; ")


def read_line(connection: socket.socket, end: float, check: Callable[[], None]) -> bytes:
    """The next line and nothing of what follows; check() is called while it waits.

    Raises TimeoutError at the moment `end`, OSError where the other one leaves or goes on and on.
    """
    text = b""
    while not text.endswith(b"\n"):
        if len(text) >= LINE:
            raise OSError("what it says has no end")
        while not select.select([connection], [], [], 0.2)[0]:
            check()
            if time.monotonic() > end:
                raise TimeoutError("it says nothing")
        seen = connection.recv(LINE - len(text), socket.MSG_PEEK)
        if not seen:
            raise OSError("node 0 has left")
        text += connection.recv(seen.find(b"\n") + 1 or len(seen))
        if time.monotonic() > end:
            raise TimeoutError("it is too slow")
    return text


def lost_after(connection: socket.socket, seconds: float) -> None:
    """The kernel asks each minute whether the other end is there; if not, it counts as closed.

    Not before so many seconds: the ranks survive a link that comes back within their --timeout.
    """
    pause = max(1, min(KEEPALIVE, math.ceil(seconds / 4)))
    pause = min(32767, max(pause, math.ceil(seconds / COUNT)))  # as long as Linux takes it
    count = min(COUNT, math.ceil(seconds / pause))
    connection.settimeout(2)  # of a sender, if the connection is cut
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", pause), ("TCP_KEEPINTVL", pause), ("TCP_KEEPCNT", count)):
        if option := getattr(socket, name, None):  # not every system has them
            with contextlib.suppress(OSError):  # gone meanwhile, or not TCP: the lock
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
