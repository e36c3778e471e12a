"""How a start ended: what each node tells of it, and the one ending that node 0 makes of that."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from common.records import PREFIX
from launcher.hang_report import describe_standing
from launcher.root_cause import CERTAIN, GIVEN_UP, HOW, KINDS, Cause, first_cause
from launcher.wire import fits

STOPPED = 75  # as the script's: the same command goes on later
LENGTH = 300  # characters of a cause that is told
LINE = 3000  # and of a line at most, as the one on where the ranks of all nodes stood
TOLD = 8  # causes that a node tells
RANKS = 1024  # of a node, whose standing it tells


@dataclass
class End:
    """One node's end of a start."""

    code: int = 0  # 0: done
    causes: list[Cause] = field(default_factory=list)
    stopped: str = ""  # the name of the signal that came to this node's supervisor
    ranks: list[list] = field(default_factory=list)  # where they stood: hang_report.standing


@dataclass
class Ending:
    """Of a start on all nodes: the same for each of them."""

    kind: str  # of the first cause, or "done"
    text: str  # the line that tells it
    code: int  # the exit code, if nothing comes after this start
    stopped: str = ""  # by which signal, on which node
    again: bool = False  # whether it is a bug that a restart would meet again
    where: str = ""  # the line on where the ranks of all nodes stood

    @property
    def final(self) -> bool:
        """Whether a restart would change nothing, or is not wanted."""
        return bool(self.stopped) or self.again or self.kind in ("done", "asked", "user")


def make_ending(ends: dict[int, End], silent: list[int], names: list[str]) -> Ending:
    """Of {node: its end}, and of the nodes that should have told theirs and have not."""
    signals = [
        f"{end.stopped} on {names[node]}" if len(names) > 1 else end.stopped
        for node, end in sorted(ends.items())
        if end.stopped
    ]
    stopped = signals[0] if signals else ""
    standing = {node: end.ranks for node, end in ends.items()}
    causes = {node: end.causes for node, end in ends.items()}
    found = first_cause(causes, standing, bool(stopped))
    if found is None:
        return Ending("done", "", 0, stopped)
    node, cause = found
    where = "" if stopped else describe_standing(standing, silent, names)
    text = cause.text
    if where and text == GIVEN_UP:  # where they stood names nodes by itself
        text = where
    elif len(names) > 1:
        text = f"{names[node]}: {shown(text)}"
    code = STOPPED if cause.kind == "asked" else ends[node].code
    again = cause.kind == "bug" and bool(CERTAIN.match(PREFIX.sub("", cause.text)))
    return Ending(cause.kind, text, code, stopped, again, where)


# ---- As messages


def shown(text: str, length: int = LENGTH) -> str:
    """A text in one line that moves no cursor."""
    text = "".join(c if c.isprintable() else "?" for c in text[: length + 1])
    return text if len(text) <= length else text[: length - 3] + "..."


def is_line(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LINE and value.isprintable()


def is_standing(value: object) -> bool:
    """[rank, how, phase]"""
    shapes = [int, lambda how: how in HOW, is_line]
    return isinstance(value, list) and len(value) == 3 and all(map(fits, value, shapes))


CAUSE = {
    "text": is_line,
    "kind": lambda value: value in KINDS,
    "time": float,
    "rank": (None, int),
}
END = {"code": int, "causes": [CAUSE], "stopped": is_line, "ranks": [is_standing]}
ENDING = {
    "kind": is_line,
    "text": is_line,
    "code": int,
    "stopped": is_line,
    "again": bool,
    "where": is_line,
}


def tell_end(end: End, began: float) -> dict:
    """For node 0; a cause's moment is in seconds since the start on this node."""
    causes = [
        asdict(cause) | {"text": shown(cause.text), "time": max(0, cause.time - began)}
        for cause in end.causes[:TOLD]
    ]
    return asdict(end) | {"causes": causes, "ranks": end.ranks[:RANKS]}


def read_end(message: object) -> End:
    """Raises ValueError where it is none, as the next one does."""
    if not fits(message, END):
        raise ValueError("no end")
    causes = [Cause(**{name: cause[name] for name in CAUSE}) for cause in message["causes"]]
    return End(**{name: message[name] for name in END} | {"causes": causes})


def tell_ending(ending: Ending) -> dict:
    """For the other nodes."""
    return asdict(ending) | {"text": shown(ending.text, LINE), "where": shown(ending.where, LINE)}


def read_ending(message: object) -> Ending:
    if not fits(message, ENDING):
        raise ValueError("no ending")
    return Ending(**{name: message[name] for name in ENDING})
