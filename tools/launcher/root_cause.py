"""Why a start failed: from torchelastic's error files, and from what the output says.

The script writes a file for each rank that fails, with what it said, the kind of error and the
moment; those of torch's own @record have no kind. Where a rank could write none, torchrun's report
says which signal ended it, and the output what NCCL and CUDA said before. `first_cause` chooses
among all that the nodes have found in this way.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from common.records import PREFIX, RECORD, STEP, STOP, decode, get


@dataclass
class Cause:
    text: str
    kind: str
    time: float = 0  # by its node's clock, or since the start there: only for order on that node
    rank: int | None = None  # where it is known


# Each may be the cause of those after it. "asked": stopped on a signal, which is no failure;
# "unknown": ended without a word; "stopped": its torchrun is gone, or that of another node.
KINDS = ("killed", "user", "bug", "asked", "unknown", "lost", "stopped")
# Bugs that a restart would meet again: the code is wrong, or its data. RuntimeError is left out:
# PyTorch reports a device's fault under that name, as well as wrong shapes.
CERTAIN = re.compile(
    r"(Assertion|Attribute|Import|Index|Key|Lookup|ModuleNotFound|Name|NotImplemented|Syntax|Type"
    r"|UnboundLocal|Value|ZeroDivision)Error\b"
)
GIVEN_UP = "given up: it had not ended in time after a failure"
# Where a rank stands after a failure; each may have let those after it wait.
HOW = ("stood still in", "had not begun", "was in", "ended in", "waited in")


def recorded_causes(folder: str | Path, since: float) -> list[Cause]:
    """What the ranks have left in the error files that torchrun gives them, from `since` on."""
    found = []
    for path in Path(folder).rglob("error.json"):
        # Cut short by a kill, or of another program: then it says nothing.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            message = json.loads(path.read_text(errors="replace"))["message"]
            message = {"message": message} if isinstance(message, str) else message
            about, text = message.get("extraInfo", {}), message["message"].strip()
            kind = about.get("kind", "bug")  # without one torch's own @record has written it
            when = float(about.get("timestamp", 0))
            if path.stat().st_mtime >= since and text and kind in KINDS:
                found.append(Cause(text.partition("\n")[0], kind, when, about.get("rank")))
    return found


class OutputReader:
    """What the output of one start says, beside the error files."""

    # torchrun's report of the ranks that failed, and its own messages.
    RANK = re.compile(r"\s+rank\s+: (\d+) \(local_rank: \d+\)")
    SIGNAL = re.compile(r"\s+exitcode\s+: -(\d+) \(pid: ")
    OF_TORCHRUN = re.compile(r"[EWI]\d{4} .*torch/distributed/")
    # NCCL's watchdog ends a process by signal 6, and no rank can say why but in these words.
    NCCL = re.compile(
        r"Watchdog caught collective operation timeout|Operation timed out after \d"
        r"|Some NCCL operations have failed or timed out|NCCL error in:"
        r"|remote process exit(ed|ing)"
    )
    LAST_ERROR = re.compile(r"Last error: *(\S.*)")
    MEMORY = re.compile(r"OutOfMemoryError|(CUDA|Cuda|cuda)\b.*out of memory")

    def __init__(self) -> None:
        self.step, self.start_step = 0, None
        self.last, self.rank, self.failed = "", "", False
        self.asked = self.closing = self.told_to_stop = False
        self.killed: list[Cause] = []
        self.said: list[Cause] = []  # by NCCL and CUDA

    def read(self, line: str) -> None:
        if match := PREFIX.match(line):
            self._read_rank(int(match[2]), line[match.end() :])
        elif match := self.RANK.match(line):
            self.rank = match[1]
        elif (match := self.SIGNAL.match(line)) and match[1] not in ("6", "15"):
            # These two follow from an error that is told elsewhere; others come from outside.
            text = f"rank {self.rank} was ended by signal {match[1]}"
            rank = int(self.rank) if self.rank else None
            self.killed.append(Cause(text, "killed", time.time(), rank))
        own = self.OF_TORCHRUN.match(line)
        self.failed |= bool(own and "failed (exitcode:" in line)
        # Torchrun ends its ranks and gives them 30 s: after a failure, unless it was told to stop.
        self.told_to_stop |= bool(own and "death signal, shutting down" in line)
        ending = self.failed or (own and "closing signal" in line)
        self.closing |= bool(ending and not self.told_to_stop)
        if line.strip() and not own and not self.failed:
            self._read_nccl(line.strip()[:300])
            self.last = line.strip()

    def _read_rank(self, rank: int, said: str) -> None:
        """A line of the script, without its prefix."""
        if step := STEP.match(said):
            self.step = max(self.step, int(step[2]))
        elif rank == 0 and (record := RECORD.match(said)) and record[1] == "Run":
            self.start_step = get(decode(record[2]), "start_step", int)
        elif stop := STOP.match(said):
            self.asked |= bool(re.match("Stopped on SIG", stop[1]))

    def _read_nccl(self, line: str) -> None:
        if self.last.endswith("Last error:"):  # NCCL's own reason stands in the next line
            line = "Last error: " + re.sub(r"\[rank\d+\]: *", "", line)
        if match := self.LAST_ERROR.search(line):  # says more than torch's words before it
            self.said = [cause for cause in self.said if "NCCL error in:" not in cause.text]
            self.said.append(Cause(f"NCCL's last error: {match[1]}", "lost", time.time()))
        elif self.MEMORY.search(line):  # a restart would meet it again
            self.said.append(Cause(line, "user", time.time()))
        elif self.NCCL.search(line):
            self.said.append(Cause(line, "lost", time.time()))


WARNINGS = 50  # of NCCL that are copied after a start, and the characters of one
WARNING_LENGTH = 500
PIECE = 1 << 16  # bytes that are read at once of a line without an end
OF_A_PROCESS = re.compile(r"/dev/(stdout|stderr|fd/.*)|/proc/.*")  # another file for each one


def not_to_be_read(pattern: str) -> str:
    """What to say where NCCL_DEBUG_FILE names none that can be read after a start; else empty."""
    regular = not os.path.exists(pattern) or os.path.isfile(pattern)
    if regular and not OF_A_PROCESS.fullmatch(pattern):
        return ""
    return (
        f"NCCL_DEBUG_FILE={pattern} is no file that can be read afterwards: what NCCL warns of is "
        "not copied here from there"
    )


def nccl_warnings(pattern: str, since: float) -> list[bytes]:
    """NCCL's first warnings in the files that NCCL_DEBUG_FILE names, if written to since then."""
    found: list[bytes] = []
    if OF_A_PROCESS.fullmatch(pattern):
        return found
    for path in sorted(glob.glob(re.sub("%[hp]", "*", glob.escape(pattern)))):
        with contextlib.suppress(OSError):
            if os.path.isfile(path) and os.stat(path).st_mtime >= since:
                found += islice(warnings_in(path), WARNINGS - len(found))
    return found


def warnings_in(path: str) -> Iterator[bytes]:
    """Line by line: such a file can have any size."""
    with open(path, "rb") as file:
        while line := file.readline(PIECE):
            if b"NCCL WARN" in line:
                yield line.rstrip(b"\r\n")[:WARNING_LENGTH]


def find_causes(
    program: str,
    code: int,
    recorded: list[Cause],
    said: OutputReader,
    stopped: bool = False,
    given_up: bool = False,
) -> list[Cause]:
    """On this node, of the command's end with an exit code, or by the signal -code.

    That signal is no cause where it is the supervisor's own: one that was passed on (`stopped`),
    or the last of an attempt that did not end (`given_up`).
    """
    if code == 0:
        return []
    causes = [*recorded, *said.killed, *said.said]
    if said.asked and not recorded:  # as under srun, which gives no error files
        causes.append(Cause("", "asked"))
    if given_up:
        causes.append(Cause(GIVEN_UP, "lost", time.time()))
    elif code < 0 and not (code == -signal.SIGABRT and causes):
        kind = "stopped" if stopped else "killed"
        causes.append(Cause(f"{program} was ended by signal {-code}", kind))
    if not causes:
        text = f"{program} ended with code {code}; its last line: {said.last}"
        causes.append(Cause(text, "unknown", time.time()))
    return causes


def first_cause(
    causes: dict[int, list[Cause]],
    standing: dict[int, list[list]] | None = None,
    stopped: bool = False,
) -> tuple[int, Cause] | None:
    """Of what all nodes have found, {node: causes}: the node where it began, and what it was.

    By kind; among ranks that have lost others, one that stood still comes before one that waited
    for it, as `standing` has it: {node: [[rank, how, phase], ...]}. Then on one node the earliest,
    of several nodes that with the lowest rank: their clocks are not compared. `stopped`: a signal
    was passed on to the ranks, and what failed after they had saved and stopped is no failure.
    None where no node has found anything.
    """

    def order(node: int, cause: Cause) -> tuple:
        asked = stopped and cause.kind == "asked"
        waiting = waited(cause, (standing or {}).get(node, []))
        return (not asked, KINDS.index(cause.kind), waiting)

    def on_one_node(node: int) -> Cause:
        return min(causes[node], key=lambda cause: (*order(node, cause), cause.time, rank(cause)))

    def rank(cause: Cause) -> float:
        return math.inf if cause.rank is None else cause.rank

    firsts = {node: on_one_node(node) for node, found in causes.items() if found}
    if not firsts:
        return None
    return min(firsts.items(), key=lambda item: (*order(*item), rank(item[1]), item[0]))


def waited(cause: Cause, ranks: list[list]) -> int:
    """The place in HOW of a rank that has lost others; of a whole node: that of its first rank."""
    if cause.kind != "lost":  # a rank that failed by itself need not have been late
        return 0
    places = {rank: HOW.index(how) for rank, how, _ in ranks}
    if cause.rank in places:
        return places[cause.rank]
    return min(places.values(), default=len(HOW)) if cause.rank is None else len(HOW)
