"""The arrows between files, as CONTRIBUTING.md has them: imports run down, and one way."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import demo_coco_resnet18
import pytest

from analysis import report
from support.processes import ROOT, SCRIPT

TOOLS = ROOT / "tools"
COMMANDS = {path.stem: path for path in sorted(TOOLS.glob("*.py"))}
ANALYSIS = {path.stem: path for path in sorted(TOOLS.glob("analysis/*.py"))}
MAP = (ROOT / "CONTRIBUTING.md").read_text()
# From the lowest on; each may import those before it.
ORDER = re.findall(r"`(\w+)\.py`", MAP.partition("| `tools/analysis/` |")[2].partition("\n")[0])


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, as a.b, or loads by its path."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "analysis" else {node.module}
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            assert name not in ("import_module", "__import__", "runpy"), path
            found |= {SCRIPT.stem} if name == "spec_from_file_location" else set()
    return found


def own(path: Path) -> set[str]:
    """Those of this repository."""
    tops = {"analysis", "support", SCRIPT.stem, *COMMANDS}
    return {name for name in imports(path) if name.partition(".")[0] in tops}


def test_script_imports_nothing_of_this_repository():
    tops = {name.partition(".")[0] for name in imports(SCRIPT)}
    assert tops <= {*sys.stdlib_module_names, "torch", "torchvision", "PIL", "pycocotools"}


def test_map_has_each_file_of_tools_and_each_module_of_analysis_once():
    assert sorted(ORDER) == list(ANALYSIS)
    named = {*re.findall(r"`(?:\w+/)*(\w+\.(?:py|sh))`", MAP)}
    assert named >= {path.name for path in TOOLS.rglob("*.*") if path.suffix in (".py", ".sh")}
    assert all([*ROOT.glob(name), *ROOT.glob(f"[td]*/**/{name}")] for name in named)


@pytest.mark.parametrize("name", ANALYSIS)
def test_module_of_analysis_imports_only_those_above_it_in_the_map(name):
    below = {f"analysis.{other}" for other in ORDER[: ORDER.index(name)]}
    assert own(ANALYSIS[name]) <= below


def test_commands_import_analysis_and_four_of_them_the_script():
    """Each by an import, or by its path."""
    found = {name: own(path) for name, path in COMMANDS.items()}
    script = {name for name, modules in found.items() if SCRIPT.stem in modules}
    assert script == {"probe_link", "show_results", "step_log", "benchmark"}
    assert found["prepare_coco"] == {"check_coco"} and not found["check_coco"]
    assert found["run"] == {"analysis.kernel"} and found["series"] == {"run"}
    modules = {f"analysis.{name}" for name in ANALYSIS} | {SCRIPT.stem, "check_coco", "run"}
    assert set().union(*found.values()) <= modules
    assert [name for name in found if "check_coco" in found[name]] == ["prepare_coco"]


def test_check_coco_needs_python_alone():
    """So it has a UserError of its own; the script, too, which needs no other file. --decode alone
    imports Pillow.
    """
    tops = {name.partition(".")[0] for name in imports(COMMANDS["check_coco"])}
    assert tops - {"PIL"} <= sys.stdlib_module_names


def test_what_the_script_and_the_tools_both_write_is_written_alike():
    """The script needs no other file, and the tools that read logs need no PyTorch."""
    for seconds in (0, 1.234, 59.996, 60, 3599.994, 3599.996, 3600, 14939.79):
        assert report.duration(seconds) == demo_coco_resnet18.duration(seconds)


def test_commands_have_the_run_bit_and_what_is_sourced_or_imported_has_not():
    imported = TOOLS / "step_log.py"  # by a program of one's own
    for path in {*TOOLS.glob("*.py"), *TOOLS.glob("*.sh"), *ROOT.glob("*.sh")} - {imported}:
        assert os.access(path, os.X_OK), path
    for path in [imported, *TOOLS.glob("*/*.sh"), *TOOLS.glob("*/*.py")]:
        assert not path.stat().st_mode & 0o111, path


def test_gpu_tests_change_functions_that_the_script_has():
    """They are skipped on most machines, where a name of before would not be seen."""
    names = {
        name
        for path in (ROOT / "tests" / "gpu").glob("*.py")
        for name in re.findall(r"\bdemo\.(\w+)", path.read_text())
    }
    assert names and all(hasattr(demo_coco_resnet18, name) for name in names), names
