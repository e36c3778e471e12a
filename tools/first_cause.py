"""Why a start failed: from torchelastic's error files, and from what the output says.

The script writes a file for each rank that fails, with what it said, the kind of error and the
moment; those of torch's own @record have no kind. Where a rank could write none, torchrun's report
says which signal ended it.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Cause:
    text: str
    kind: str
    time: float = 0


# Each may be the cause of those after it. "asked": stopped on a signal, which is no failure;
# "stopped": because the torchrun of some node is gone.
KINDS = ("killed", "user", "bug", "asked", "lost", "stopped")


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
            if kind == "stopped" and "Stopped on SIG" in text:
                kind = "asked"
            when = float(about.get("time", about.get("timestamp", 0)))
            if path.stat().st_mtime >= since and text and kind in KINDS:
                found.append(Cause(text.partition("\n")[0], kind, when))
    return found


class Facts:
    """What the output of one start says, beside the error files."""

    # torchrun's report of the ranks that failed, and its own messages.
    RANK = re.compile(r"\s+rank\s+: (\d+) \(local_rank: \d+\)")
    SIGNAL = re.compile(r"\s+exitcode\s+: -(\d+) \(pid: ")
    OF_TORCHRUN = re.compile(r"[EWI]\d{4} .*torch/distributed/")
    STEP = re.compile(r"\[[A-Z]+ \d+\] Epoch \d+ \| Step (\d+) ")
    START_STEP = re.compile(r'\[[A-Z]+ 0\] Run .*"start_step": *(\d+)')

    def __init__(self) -> None:
        self.step, self.start_step = 0, None
        self.last, self.rank, self.failed = "", "", False
        self.asked = False
        self.killed: list[Cause] = []

    def read(self, line: str) -> None:
        if match := self.STEP.match(line):
            self.step = max(self.step, int(match[1]))
        elif match := self.START_STEP.match(line):
            self.start_step = int(match[1])
        elif match := self.RANK.match(line):
            self.rank = match[1]
        elif (match := self.SIGNAL.match(line)) and match[1] not in ("6", "15"):
            # These two follow from an error that is told elsewhere; others come from outside.
            text = f"rank {self.rank} was ended by signal {match[1]}"
            self.killed.append(Cause(text, "killed"))
        self.asked |= "] Stopped on SIG" in line
        own = self.OF_TORCHRUN.match(line)
        self.failed |= bool(own and "failed (exitcode:" in line)
        if line.strip() and not own and not self.failed:
            self.last = line.strip()


def first_cause(
    program: str, code: int, recorded: list[Cause], facts: Facts, passed_on: bool
) -> Cause:
    """Of the command's end with an exit code that is not 0, or by the signal -code."""
    causes = [*recorded, *facts.killed]
    if facts.asked and not recorded:  # as under srun, which gives no error files
        causes.append(Cause("", "asked"))
    for cause in causes:
        if passed_on and cause.kind == "asked":
            return cause
    if code < 0:
        return Cause(f"{program} was ended by signal {-code}", "killed")
    if causes:
        return min(causes, key=lambda cause: (KINDS.index(cause.kind), cause.time))
    return Cause(f"{program} ended with code {code}; its last line: {facts.last}", "unknown")
