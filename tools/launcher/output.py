"""Where a supervisor's lines go, its command's and its own: the terminal and the node's log."""

from __future__ import annotations

import contextlib
import os
import threading

from common.records import is_for_programs
from launcher.errors import Refused


def counted(number: int, one: str, more: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {one if number == 1 else more}"


class Output:
    """Whole lines to the terminal and to the log; neither ends the other, or the run."""

    def __init__(self, name: str, log: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # a signal may come while a line is written
        try:
            os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
            self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            why = f"the log {log} cannot be written ({error.strerror}): set LOG_DIR or RUN_NAME"
            raise Refused(why) from None
        self.for_people = os.isatty(1)

    def copy(self, line: bytes) -> None:
        """Of the command, or a record."""
        if not (self.for_people and is_for_programs(line.decode(errors="replace"))):
            self._write(1, line + b"\n")
        self._write(self.log, line + b"\n")

    def say(self, text: str) -> None:
        self.line(f"{self.name}: {text}")

    def line(self, text: str) -> None:
        """To people, by stderr, and to the log."""
        for descriptor in (2, self.log):
            self._write(descriptor, f"{text}\n".encode(errors="replace"))

    def _write(self, descriptor: int, data: bytes) -> None:
        # A terminal may be gone, a disk full; what comes later may fit again.
        with self.lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]
