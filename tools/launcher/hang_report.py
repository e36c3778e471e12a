"""Who is missing when a start fails: where the ranks stand, on this node and on the others.

Each rank keeps its phase ("step 12") in a file of the folder that DEMO_PHASES names, in memory:
the script writes it, the supervisor reads it after a failure, and tells node 0 with its end, which
makes one line of it for all: who stood still, who waited, and which node to look at.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

from launcher.root_cause import HOW, Cause

ROOM = 2**20  # bytes that memory must have for phases: a page for each rank
SHOWN = 8  # ranks of a kind that the line names, and nodes
UNNOTED = "a phase that could not be noted (no room in memory)"


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
            # Empty: its memory is full.
            phase = path.read_text(errors="replace").strip()[:80] or UNNOTED
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
