"""tests/breaks: its table fits the tree as it is; and its command, on a small tree of its own."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from breaks.table import BREAKS
from support.processes import LONG, ROOT, start, wait_until

FOLDER = ROOT / "tests" / "breaks"


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_break_fits_the_tree(one):
    broken = one.broken(ROOT)  # fails where its text is gone, or stands twice
    assert broken != (ROOT / one.file).read_text()
    if one.file.endswith(".py"):
        ast.parse(broken)  # a slip, no syntax error
    assert one.tests and one.missing_tests(ROOT) == []


def test_each_break_has_its_name_and_says_what_a_user_would_see():
    assert len({one.name for one in BREAKS}) == len(BREAKS)
    assert all(one.seen.endswith(".") for one in BREAKS)


# --- The command -----------------------------------------------------------------------------

TOOL = """
def double(x):
    return 2 * x

def half(x):
    return x / 2
"""
TESTS = """
import os, time
import pytest, tool

def test_double():
    assert os.environ.get("TEST_SCRIPT") is None
    assert tool.double(3) == 6

def test_half():
    assert tool.half(3) >= 1

def test_time():
    while tool.double(1) != 2:
        time.sleep(0.1)

def test_root():
    pytest.skip("needs what is not here")

def test_fails():
    assert tool.double(1) == 3

@pytest.mark.skipif(os.environ.get("TEST_LONG") != "1", reason="slow")
def test_long():
    assert tool.double(3) == 6
"""
DOUBLE, HALF = ("return 2 * x", "return 3 * x"), ("x / 2", "x // 1.9")
TIME, STALE = r"\(\d+\.\d s\)", "stale: text"
# Name, what is broken and how, test; and what is then said.
CASES = {
    "caught": (*DOUBLE, "test_double", f"caught by tests/test_tool.py::test_double {TIME}"),
    "long": (*DOUBLE, "test_long", f"caught by tests/test_tool.py::test_long {TIME}"),
    "not caught": (*HALF, "test_half", rf"NOT CAUGHT {TIME}: A user sees it\."),
    "hangs": (*DOUBLE, "test_time", "NOT CAUGHT: no end within 40 s"),
    "gone": ("x / 3", "x / 2", "test_half", f"{STALE} not found in tool.py any more"),
    "moved": ("x / 4", "x / 2", "test_half", f"{STALE} not found in tool.py, but in tools/a.py"),
    "twice": ("return ", "", "test_half", f"{STALE} stands 2 times in tool.py"),
    "no test": (*DOUBLE, "test_doubl", "stale: there is no tests/test_tool.py::test_doubl"),
    "skips": (*DOUBLE, "test_root", "not tried: skips: needs what is not here"),
    "fails": (*DOUBLE, "test_fails", "not tried: fails without the break: .*"),
}


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """The command, with a table of these cases, in a tree that it can break."""
    root = tmp_path / "root"
    for folder in ("tests/breaks", "tools", ".git"):
        (root / folder).mkdir(parents=True)
    table = (FOLDER / "table.py").read_text().partition("\nBREAKS = ")[0]
    lines = [
        f"Break({name!r}, 'A user sees it.', 'tool.py', {old!r}, {new!r}, "
        f"('tests/test_tool.py::{test}',), {name == 'long'})"
        for name, (old, new, test, _) in CASES.items()
    ]
    (root / "tests/breaks/table.py").write_text(f"{table}\nBREAKS = [{', '.join(lines)}]\n")
    (root / "tests/breaks/run.py").write_text((FOLDER / "run.py").read_text())
    (root / "tests/test_tool.py").write_text(TESTS)
    (root / "tool.py").write_text(TOOL)
    (root / "tools/a.py").write_text("x / 4")
    return root


@LONG
def test_command_says_of_each_break_whether_it_is_caught(small_tree, monkeypatch):
    monkeypatch.setenv("TEST_SCRIPT", "another")
    command = [sys.executable, small_tree / "tests/breaks/run.py", "--seconds=40"]
    more = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([*command, "--jobs=3"], **more)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert done.stderr == "" and done.returncode == 1
    for name, (*_, wanted) in CASES.items():
        assert re.fullmatch(wanted, said[name]), (name, said[name])
    assert re.fullmatch("2 caught, 8 not; .* s", said["10 breaks"])
    assert (small_tree / "tool.py").read_text() == TOOL
    done = subprocess.run([*command, "long", "caught"], **more)
    assert done.returncode == 0 and "2 breaks: 2 caught, 0 not" in done.stdout


@LONG
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_that_is_ended_leaves_nothing(small_tree, tmp_path, number):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, small_tree / "tests/breaks/run.py", "hangs"]
    with start(command, env={"TMPDIR": str(temporary)}) as run:
        run.wait_for("running 1 tests")
        tool = "demo-breaks-*/0/tree/tool.py"
        wait_until(lambda: any("3 * x" in p.read_text() for p in temporary.glob(tool)), 30, tool)
        time.sleep(2)  # now the test hangs
        run.signal(number)
        ended = run.finish(60, expect=128 + number)
    assert "Traceback" not in ended.out and not list(temporary.iterdir())


@LONG
@pytest.mark.parametrize("words", ["nothing-of-that-name", "--jobs=0", "--seconds=-1"])
def test_wrong_arguments_are_one_line(words):
    command = [sys.executable, FOLDER / "run.py", words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
