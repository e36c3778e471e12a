"""Who may import whom, and that tools/ shows nothing but commands (docs/development.md)."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import preflight
from launcher import rendezvous, supervisor, torchrun_command
from support.forks import ForkServer, write
from support.processes import ROOT

TOOLS = ROOT / "tools"
COMMANDS = sorted(path for path in TOOLS.glob("*.*"))
# What the modules of a folder may import of ours; those of tools/ itself are commands.
ALLOWED = {
    "": {"launcher", "analysis", "common"},
    "launcher": {"launcher", "common"},
    "analysis": {"analysis", "common"},
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


def test_the_script_imports_nothing_of_ours():
    names = {name.partition(".")[0] for name in imported(ROOT / "demo_coco_resnet18.py")}
    assert not names & {"tools", *(name.partition(".")[0] for name in modules())}


def constant(name: str) -> object:
    """A constant of the script, which is not imported for it."""
    for node in ast.parse((ROOT / "demo_coco_resnet18.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def test_facts_of_which_the_script_or_the_launcher_has_a_copy():
    """The script imports nothing of ours, and bash no Python."""
    script, launcher = ROOT / "demo_coco_resnet18.py", ROOT / "launch_multinode.sh"
    assert constant("TIMEOUT") == torchrun_command.TIMEOUT
    assert supervisor.STOPPED == os.EX_TEMPFAIL and "os.EX_TEMPFAIL" in script.read_text()
    patience = re.search(r"^number CONNECT_TIMEOUT .* (\d+)$", launcher.read_text(), re.MULTILINE)
    assert int(patience[1]) == rendezvous.CONNECT_TIMEOUT
    # A job's ports: below those that Linux takes for outgoing connections, 32768 and more.
    texts = script.read_text(), (TOOLS / "launcher/slurm.sh").read_text()
    ports = [re.search(r"\b(20000) \+ .* % \(?(\d+)", text).groups() for text in texts]
    assert ports == [("20000", "12000")] * 2


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
    own = [preflight.interface_address(name) for _, name in socket.if_nameindex()]
    elsewhere = "203.0.113.1"  # of addresses for examples: by the default route, if there is one
    addresses = ["127.0.0.1", elsewhere, *(address for address in own if "." in address)]
    theirs = [preflight.interface_of(preflight.route_to(address)[0]) for address in addresses]
    assert demo.run(call=chosen_interfaces, addresses=addresses).result() == theirs


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_each_command_says_for_whom_it_is(path):
    assert os.access(path, os.X_OK) and path.read_text().startswith("#!/usr/bin/env ")
    if path.suffix == ".sh":
        done = subprocess.run([path, "--help"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("For anyone who ")
        return
    first = ast.get_docstring(ast.parse(path.read_text())).partition("\n")[0]
    assert first.startswith("For anyone who ") and first.endswith(".")
    if path.name == "probe_link.py":
        return  # imports torch, which takes seconds; its parser has the docstring, too
    done = subprocess.run(
        [sys.executable, path, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert first in done.stdout


def test_development_page_has_each_file_of_tools():
    page = (ROOT / "docs" / "development.md").read_text()
    files = [path for path in TOOLS.rglob("*.*") if path.suffix in (".py", ".sh")]
    assert len(files) > 30
    for path in files:
        assert path.name == "__init__.py" or f"`{path.name}`" in page, f"the map lacks {path.name}"
    for name in re.findall(r"`(\w+\.(?:py|sh))`", page):
        assert [*ROOT.glob(name), *TOOLS.rglob(name), *(ROOT / "tests").rglob(name)], name
