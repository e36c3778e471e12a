"""Who may import whom, and that tools/ shows nothing but commands (docs/development.md)."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.processes import ROOT

TOOLS = ROOT / "tools"
SOURCED = ("environment.sh", "launching.sh", "network.sh")
COMMANDS = [path for path in sorted(TOOLS.glob("*.*")) if path.name not in SOURCED]
# What the modules of a folder may import of ours; those of tools/ itself are commands.
ALLOWED = {
    "": {"analysis", "common", "benchmarks", "counters"},
    "analysis": {"analysis", "common", "counters"},
    "benchmarks": {"benchmarks", "analysis", "common"},
    "common": set(),
}


def imported(path: Path) -> set[str]:
    """The modules that a file names in its imports, `from a import b` as a and as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def modules() -> dict[str, Path]:
    """Our modules by the name under which they are imported."""
    found = {}
    for path in sorted(TOOLS.rglob("*.py")):
        name = ".".join(path.relative_to(TOOLS).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def test_imports_go_one_way_and_in_no_circle():
    ours = modules()
    graph = {name: imported(path) & ours.keys() - {name} for name, path in ours.items()}
    assert sum(map(len, graph.values())) > 25
    for name, path in ours.items():
        folder = path.relative_to(TOOLS).parent.as_posix().replace(".", "")
        allowed = ALLOWED[folder]
        for other in graph[name]:
            assert other.partition(".")[0] in allowed, f"{name} imports {other}"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_script_imports_nothing_of_ours_nor_what_a_user_has_to_add():
    names = {name.partition(".")[0] for name in imported(ROOT / "demo_coco_resnet18.py")}
    allowed = shlex.split("numpy torch torchvision PIL pycocotools")
    assert names <= {*sys.stdlib_module_names, *allowed}


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_each_command_says_for_whom_it_is(path):
    text, command = path.read_text(), [path, "--help"]
    assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env ")
    first = "For anyone who "
    if path.suffix == ".py":
        command.insert(0, sys.executable)
        first = ast.get_docstring(ast.parse(text)).partition("\n")[0]
        assert first.startswith("For anyone who ") and first.endswith(".")
    if path.name == "probe_link.py":
        return  # imports torch, which takes seconds; its parser has the docstring, too
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert first in done.stdout if path.suffix == ".py" else done.stdout.startswith(first)


def test_development_page_has_each_file_of_tools():
    page = (ROOT / "docs" / "development.md").read_text()
    named = {*re.findall(r"`(?:tools/)?(\w+\.(?:py|sh))`", page)}
    there = {path.name for path in TOOLS.rglob("*.*") if path.suffix in (".py", ".sh")}
    assert len(there) > 20
    assert there - named <= {"__init__.py"}, "the map lacks them"
    for name in named:
        assert [*ROOT.glob(name), *TOOLS.rglob(name), *(ROOT / "tests").rglob(name)], name
