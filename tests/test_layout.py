"""The arrows between files, as CONTRIBUTING.md has them: imports run down, and one way."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import demo_coco_resnet18

from analysis import report
from support.processes import ROOT, SCRIPT

TOOLS = ROOT / "tools"
COMMANDS = {path.stem: path for path in sorted(TOOLS.glob("*.py"))}
MAP = (ROOT / "CONTRIBUTING.md").read_text()
# From the lowest on; each may import those before it.
ORDER = re.findall(r"`(\w+)\.py`", MAP.partition("| `tools/analysis/` |")[2].partition("\n")[0])


def imports(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it; of analysis as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "analysis" else {node.module}
    return found


def packages(path: Path) -> set[str]:
    """What a file imports beside Python's own."""
    return {name.partition(".")[0] for name in imports(path)} - sys.stdlib_module_names


def own(path: Path) -> set[str]:
    """The modules of this repository that a file imports."""
    tops = {"analysis", "support", SCRIPT.stem, *COMMANDS}
    return {name for name in imports(path) if name.partition(".")[0] in tops}


def test_script_imports_nothing_of_this_repository():
    assert packages(SCRIPT) <= {"torch", "torchvision", "PIL", "pycocotools"}


def test_map_has_each_file_of_tools():
    named = {*re.findall(r"`(?:\w+/)*(\w+\.(?:py|sh))`", MAP)}
    assert named >= {path.name for path in TOOLS.rglob("*.*") if path.suffix in (".py", ".sh")}
    assert all([*ROOT.glob(name), *ROOT.glob(f"[td]*/**/{name}")] for name in named)


def test_analysis_imports_only_what_is_before_it_in_the_map():
    assert sorted(ORDER) == sorted(path.stem for path in TOOLS.glob("analysis/*.py"))
    for n, name in enumerate(ORDER):
        below = {f"analysis.{other}" for other in ORDER[:n]}
        assert own(TOOLS / f"analysis/{name}.py") <= below, name


def test_commands_import_analysis_and_three_of_them_the_script():
    """show_results.py loads it by its path."""
    found = {name: own(path) for name, path in COMMANDS.items()}
    script = {name for name, modules in found.items() if SCRIPT.stem in modules}
    assert script == {"probe_link", "step_log", "benchmark"}
    assert found["run"] == {"analysis.kernel"} and found["series"] == {"run"}
    modules = {f"analysis.{name}" for name in ORDER} | {SCRIPT.stem, "check_coco", "run"}
    assert set().union(*found.values()) <= modules
    assert [name for name in found if "check_coco" in found[name]] == ["prepare_coco"]


def test_check_coco_needs_python_alone():
    """--decode alone imports Pillow."""
    assert packages(COMMANDS["check_coco"]) <= {"PIL"}


def test_script_and_tools_write_durations_alike():
    """The script needs no other file, and the tools that read logs need no PyTorch."""
    for seconds in (0, 1.234, 59.996, 60, 3599.994, 3599.996, 3600, 14939.79):
        assert report.duration(seconds) == demo_coco_resnet18.duration(seconds)


def test_commands_alone_have_the_run_bit():
    imported = TOOLS / "step_log.py"  # by a program of one's own
    for path in {*TOOLS.glob("*.py"), *TOOLS.glob("*.sh"), *ROOT.glob("*.sh")} - {imported}:
        assert os.access(path, os.X_OK), path
    for path in [imported, *TOOLS.glob("*/*.sh"), *TOOLS.glob("*/*.py")]:
        assert not path.stat().st_mode & 0o111, path


def test_gpu_tests_change_functions_that_the_script_has():
    """They are skipped on most machines, where a name of before would not be seen."""
    texts = [path.read_text() for path in (ROOT / "tests" / "gpu").glob("*.py")]
    names = {*re.findall(r"\bdemo\.(\w+)", "\n".join(texts))}
    assert names and all(hasattr(demo_coco_resnet18, name) for name in names), names
