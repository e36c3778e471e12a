"""How a start ended: what each node tells of it, and the one ending that node 0 makes of that.

What comes over the network is checked here for type, length and printable text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from common.records import PREFIX
from launcher.root_cause import CERTAIN, HOW, KINDS, Cause, first_cause

STOPPED = 75  # as the script's: the same command goes on later
LENGTH = 300  # characters of a cause that is told
LINE = 3000  # and of the line on where the ranks of all nodes stood
TOLD = 8  # causes that a node tells
RANKS = 1024  # of a node, whose standing it tells


@dataclass
class End:
    """One node's end of a start."""

    code: int = 0  # 0: done
    causes: list[Cause] = field(default_factory=list)
    stopped: str = ""  # the name of the signal that came to this node's supervisor


@dataclass
class Ending:
    """Of a start on all nodes: the same for each of them."""

    kind: str  # of the first cause, or "done"
    text: str  # the line that tells it
    code: int  # the exit code, if nothing comes after this start
    stopped: str = ""  # by which signal, on which node
    again: bool = False  # whether it is a bug that a restart would meet again

    @property
    def final(self) -> bool:
        """Whether a restart would change nothing, or is not wanted."""
        return bool(self.stopped) or self.again or self.kind in ("done", "asked", "user")


def make_ending(
    ends: dict[int, End], standing: dict[int, list[list]], names: list[str], line: str = ""
) -> Ending:
    """Of {node: its end}; nodes that have not told theirs add nothing.

    `line` is the one on where all ranks stood. As a cause it names nodes by itself.
    """
    signals = [
        f"{end.stopped} on {names[node]}" if len(names) > 1 else end.stopped
        for node, end in sorted(ends.items())
        if end.stopped
    ]
    stopped = signals[0] if signals else ""
    causes = {node: end.causes for node, end in ends.items()}
    found = first_cause(causes, standing, bool(stopped))
    if found is None:
        return Ending("done", "", 0, stopped)
    node, cause = found
    code = ends[node].code
    code = code if code >= 0 else 128 - code  # as a shell has it
    text = cause.text
    if line and printable(line) == printable(text):
        text = line
    elif len(names) > 1:
        text = f"{names[node]}: {printable(text)}"
    code = STOPPED if cause.kind == "asked" else code
    again = cause.kind == "bug" and bool(CERTAIN.match(PREFIX.sub("", cause.text)))
    return Ending(cause.kind, text, code, stopped, again)


# ---- As messages. Those who read them raise TypeError, ValueError or KeyError.


def printable(text: object, length: int = LENGTH) -> str:
    """A text in one line that moves no cursor."""
    if not isinstance(text, str):
        raise TypeError("not a text")
    shown = "".join(c if c.isprintable() else "?" for c in text[: length + 1])
    return shown if len(shown) <= length else shown[: length - 3] + "..."


def whole(value: object) -> int:
    """A number of a rank, or an exit code."""
    if type(value) is not int or abs(value) > 10**6:
        raise TypeError("not such a number")
    return value


def finite(value: object) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e12:  # nor "not a number"
        raise TypeError("no moment")
    return value


def tell_end(end: End, began: float) -> dict:
    """For node 0; a cause's moment is in seconds since the start on this node."""
    causes = [
        asdict(cause) | {"text": printable(cause.text), "time": cause.time and cause.time - began}
        for cause in end.causes[:TOLD]
    ]
    return {"code": end.code, "causes": causes, "stopped": end.stopped}


def read_end(message: dict) -> End:
    causes = []
    for told in message["causes"][:TOLD]:
        kind, rank, moment = KINDS[KINDS.index(told["kind"])], told["rank"], finite(told["time"])
        rank = None if rank is None else whole(rank)
        causes.append(Cause(printable(told["text"]), kind, moment, rank))
    return End(whole(message["code"]), causes, printable(message["stopped"], 20))


def read_ending(message: dict) -> Ending:
    kind, text = printable(message["kind"], 20), printable(message["text"], LINE)
    code, stopped = whole(message["code"]), printable(message["stopped"])
    return Ending(kind, text, code, stopped, message["again"] is True)


def read_standing(message: list) -> list[list]:
    return [
        [whole(rank), HOW[HOW.index(how)], printable(phase, 80)]
        for rank, how, phase in message[:RANKS]
    ]
