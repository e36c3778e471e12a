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

from launcher import node_checks, rendezvous, supervisor, torchrun_command
from support.forks import ForkServer, write
from support.processes import ROOT

TOOLS = ROOT / "tools"
COMMANDS = sorted(TOOLS.glob("*.*"))
# What the modules of a folder may import of ours; those of tools/ itself are commands.
ALLOWED = {
    "": {"launcher", "analysis", "common", "benchmarks"},
    "launcher": {"launcher", "common"},
    "analysis": {"analysis", "common"},
    "benchmarks": {"benchmarks", "launcher", "analysis", "common"},
    "common": set(),
}
ALONE = {"launcher/python_check.py", "launcher/uv_install.py"}  # run by any Python there is


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
    assert sum(map(len, graph.values())) > 40
    for name, path in ours.items():
        folder = path.relative_to(TOOLS).parent.as_posix().replace(".", "")
        allowed = ALLOWED[folder]
        for other in graph[name]:
            assert other.partition(".")[0] in allowed, f"{name} imports {other}"
        if path.relative_to(TOOLS).as_posix() in ALONE:
            assert not graph[name], f"{name} is run by a Python that may have nothing"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_script_imports_nothing_of_ours_nor_what_a_user_has_to_add():
    names = {name.partition(".")[0] for name in imported(ROOT / "demo_coco_resnet18.py")}
    allowed = shlex.split("numpy torch torchvision PIL pycocotools")
    assert names <= {*sys.stdlib_module_names, *allowed}


def test_facts_of_which_the_script_or_the_launcher_has_a_copy():
    """The script imports nothing of ours, and bash no Python."""
    files = ("demo_coco_resnet18.py", "launch_multinode.sh", "tools/launcher/slurm.sh")
    script, launcher, slurm = ((ROOT / name).read_text() for name in files)
    (timeout,) = re.findall(r"(?m)^TIMEOUT = (\d+)", script)
    assert int(timeout) == torchrun_command.TIMEOUT
    assert supervisor.STOPPED == os.EX_TEMPFAIL and "os.EX_TEMPFAIL" in script
    (patience,) = re.findall(r"(?m)^number CONNECT_TIMEOUT .* (\d+)$", launcher)
    assert int(patience) == rendezvous.CONNECT_TIMEOUT
    # A job's ports: below those that Linux takes for outgoing connections, 32768 and more.
    for text in (script, slurm):
        assert re.findall(r"\b(20000) \+ .* % \(?(\d+)", text)[0] == ("20000", "12000")


def chosen_interfaces(demo, result, addresses):
    """What the script takes for Gloo where each of the addresses is MASTER_ADDR."""
    process, found = demo.Process(world_size=2, backend="gloo"), []
    for address in addresses:
        os.environ["MASTER_ADDR"] = address
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        demo.choose_interface(process)
        found.append(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    write(result, found)


def test_script_and_preflight_find_the_same_interface(demo: ForkServer):
    own = [address for _, address in node_checks.addresses()]
    elsewhere = "203.0.113.1"  # of addresses for examples: by the default route, if there is one
    addresses = ["127.0.0.1", elsewhere, *own]
    theirs = [node_checks.interface_of(node_checks.route_to(address)[0]) for address in addresses]
    assert demo.run(call=chosen_interfaces, addresses=addresses).result() == theirs


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
    named = {*re.findall(r"`(\w+\.(?:py|sh))`", page)}
    there = {path.name for path in TOOLS.rglob("*.*") if path.suffix in (".py", ".sh")}
    assert len(there) > 30
    assert there - named <= {"__init__.py"}, "the map lacks them"
    for name in named:
        assert [*ROOT.glob(name), *TOOLS.rglob(name), *(ROOT / "tests").rglob(name)], name
