"""The files of tests/data/annotation_cases.txt, and what must be said of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
GOOD = (DATA / "good_annotations.json").read_text()
CHANGE = re.compile(r"(\w+)(?:\[(\d+|\*)])?(?:\.(\w+))? (?:= (.*)|(is gone|as floats|as text))")
FILES = {  # None: there is no such file
    "empty": b"",
    "cut": GOOD[:500].encode(),
    "zip archive": b"PK\x03\x04",
    "gzip archive": b"\x1f\x8b\x08\0",
    "byte order mark": GOOD.encode("utf-8-sig"),
    "UTF-16 with a mark": GOOD.encode("utf-16"),
    "UTF-16 from the least byte": GOOD.encode("utf-16-le"),
    "UTF-16 from the greatest byte": GOOD.encode("utf-16-be"),
    "Latin-1": GOOD.replace("apple", "Käse").encode("latin-1"),
    "web page": b"<!DOCTYPE html>",
    "100,000 brackets": b"[" * 100_000,
    "list": json.dumps(json.loads(GOOD)["images"]).encode(),
    "text": b'"text"',
    "null": b"null",
    "not there": None,
}

FORM = "tools/prepare_coco.py takes such a file, and writes one as COCO's"


@dataclass(frozen=True)
class Case:
    """`line` is what is said of the file; "" if it trains."""

    name: str
    validation: bool
    line: str

    def write(self, path: Path) -> None:
        kind = self.name.removeprefix("file ")
        if kind == "folder":
            path.mkdir()
        elif kind not in FILES:
            path.write_text(json.dumps(changed(self.name)))
        elif FILES[kind] is not None:
            path.write_bytes(FILES[kind])

    def fits(self, said: str, path: Path) -> bool:
        line = self.line.replace("FORM", FORM).replace("FILE", f"annotation file {path}")
        words = line.split("...")
        return re.fullmatch(".*".join(map(re.escape, words)), said) is not None


def changed(changes: str) -> dict:
    """The content of the good file with these changes, as the table writes them."""
    content = json.loads(GOOD)
    for change in filter(None, changes.split("; ")):
        which, index, key, value, how = CHANGE.fullmatch(change).groups()
        if index is None:
            put(content, which, value, how)
        elif key is None:
            put(content[which], int(index), value, how)
        elif index != "*":
            put(content[which][int(index)], key, value, how)
        else:
            values = map(json.dumps, json.loads(value)) if value else [None] * 99
            for entry, own in zip(content[which], values, strict=bool(value)):
                put(entry, key, own, how)
    return content


def put(holder: dict | list, key: str | int, value: str | None, how: str | None) -> None:
    kinds: dict[str, Callable] = {"as floats": float, "as text": str}
    if how == "is gone":
        del holder[key]
    elif isinstance(holder, list) and key == len(holder):
        holder.append(json.loads(value))
    else:
        holder[key] = kinds[how](holder[key]) if how else json.loads(value)


def rows(name: str) -> list[tuple[list[str], list[str]]]:
    """The rows of a table in tests/data: its columns, and the faults that a row shows."""
    lines = (DATA / name).read_text().splitlines()
    lines = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    width = min(map(len, lines))
    return [(line[:width], " ".join(line[width:]).split()) for line in lines]


def cases() -> list[tuple[Case, list[str]]]:
    """The annotation files, each with the faults that it shows."""
    found = []
    for (text, line), faults in rows("annotation_cases.txt"):
        name = text.removeprefix("validation: ")
        found.append((Case(name, name != text, "" if line == "trains" else line), faults))
    return found


def marked(table: list) -> list:
    """Its rows, as parameters with the marks of the faults that they show."""
    return [pytest.param(row, marks=pytest.mark.guards(*faults)) for row, faults in table]


def plain_id(words: list[str]) -> str:
    """An id that can be given to pytest."""
    return re.sub(r"\W+", "-", " ".join(words))[:60]
