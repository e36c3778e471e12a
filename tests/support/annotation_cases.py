"""The files of tests/data/annotation_cases.txt, and what must be said of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import check_coco

DATA = Path(__file__).resolve().parents[1] / "data"
GOOD = (DATA / "good_annotations.json").read_text()
CHANGE = re.compile(r"(\w+)(?:\[(\d+|\*)])?(?:\.(\w+))? (?:= (.*)|(is gone|as floats|as text))")
FILES = {
    "cut": GOOD[:500].encode(),
    "zip archive": b"PK\x03\x04",
    "byte order mark": GOOD.encode("utf-8-sig"),
    "UTF-16": GOOD.encode("utf-16"),
    "Latin-1": GOOD.replace("apple", "Käse").encode("latin-1"),
}


def cases() -> list[tuple[str, str]]:
    """What each file has; and what is said of it: "" if it trains."""
    lines = (DATA / "annotation_cases.txt").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return [(name, "" if line == "trains" else line) for name, line in rows]


def write(path: Path, changes: str = "") -> str:
    """Writes the good file with these changes."""
    path.write_text(json.dumps(changed(changes)))
    return str(path)


def write_case(name: str, path: Path) -> None:
    """Writes the file, unless there shall be none, or a folder."""
    if name == "file folder":
        path.mkdir()
    elif not name.startswith("file "):
        write(path, name)
    elif name != "file not there":
        path.write_bytes(FILES[name.removeprefix("file ")])


def is_said(line: str, said: str, path: Path) -> bool:
    """Whether this is the line of the table, in which "..." are words of Python."""
    for name in ("FORM", "LVIS", "NUMBERS"):
        line = line.replace(name, getattr(check_coco, name))
    line = line.replace("FILE", f"annotation file {path}")
    return re.fullmatch(".*".join(map(re.escape, line.split("..."))), said) is not None


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
    if how == "is gone":
        del holder[key]
    elif how:
        holder[key] = (float if how == "as floats" else str)(holder[key])
    elif isinstance(holder, list) and key == len(holder):
        holder.append(json.loads(value))
    else:
        holder[key] = json.loads(value)
