"""docs/your_own.md: what it shows is taken from the page and run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import test_demo
import test_show_results
from support.datasets import numbered, write_images
from support.forks import run_to_the_end
from support.processes import LONG, ROOT, SCRIPT, base_env, new_test_id

PAGE = (ROOT / "docs" / "your_own.md").read_text()
COUNTS = {"cat": 11, "dog": 6}  # images of each class; 5 of them for validation
COPY = "demo_resnet50.py"
# In place of python: writes down how it was called, in one line.
NOTE = r"""python() { printf '%q ' "$@"; echo; }"""


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def blocks(title: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)


def run_copy(demo, result):
    """A changed copy of the script, whose name comes before its arguments."""
    spec = importlib.util.spec_from_file_location("changed", sys.argv.pop(1))
    changed = sys.modules["changed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    run_to_the_end(changed)


@pytest.fixture(scope="module")
def own(demo, tmp_path_factory) -> SimpleNamespace:
    """The page's folder of folders, the files that its lines make of it, its commands."""
    folder = tmp_path_factory.mktemp("own data")
    for number, (name, count) in enumerate(COUNTS.items()):
        write_images(folder / "photos" / name, numbered(count), seed=number)
    shutil.copy(SCRIPT, folder / "demo_coco_resnet18.py")
    (code,) = blocks("A folder of folders", "python")
    (folder / "make_coco.py").write_text(code)
    shown = [NOTE, *blocks("A folder of folders", "bash"), *blocks("ResNet-50", "bash")]
    how = dict(cwd=folder, env=base_env(new_test_id()), text=True, timeout=60, check=True)
    done = subprocess.run(["bash", "-euc", "\n".join(shown)], stdout=subprocess.PIPE, **how)
    calls = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [Path(call[0]).name for call in calls[:3]] == [
        "make_coco.py",
        "demo_coco_resnet18.py",
        "show_results.py",
    ]
    subprocess.run([sys.executable, *calls[0]], **how)
    return SimpleNamespace(folder=folder, code=code, calls=calls)


def looked_at(demo, own, trained, argv) -> None:
    """show_results, as the page calls it, prints what the run printed, and draws."""
    job = demo.run(argv, call=test_show_results.show, of_rank=lambda _: {"cwd": own.folder})
    top_1 = re.findall(r"Top-1: .* images", trained.out)[-1].rsplit(" | ", 1)[0]
    assert job.out.startswith(top_1 + " | ")
    assert re.search(r"Top-1: .*%$", top_1) and job.out.endswith("Picture: results.png\n")
    (own.folder / "results.png").unlink()


def test_folder_of_folders_becomes_two_files_in_15_lines(own):
    assert sum(map(bool, own.code.splitlines())) == 15 and "these 15 lines" in PAGE
    seen = []
    for part, places in (("val", (0, 5, 10)), ("train", (1, 2, 3, 4, 6, 7, 8, 9))):
        content = json.loads((own.folder / f"photos_{part}.json").read_text())
        names = {category["id"]: category["name"] for category in content["categories"]}
        assert [*names.values()] == [*COUNTS]
        files = {image["id"]: image["file_name"] for image in content["images"]}
        label = {a["image_id"]: names[a["category_id"]] for a in content["annotations"]}
        wanted = [(name, i) for name, count in COUNTS.items() for i in places if i < count]
        assert [*files.values()] == [f"{name}/{i:04d}.jpg" for name, i in wanted]
        assert [label[image] for image in files] == [name for name, _ in wanted]
        seen += files.values()
    assert len({*seen}) == len(seen) == sum(COUNTS.values())


def test_own_classes_are_trained_from_imagenets_weights_and_looked_at(demo, own, tmp_path):
    file = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth"  # as if it had been downloaded
    file.parent.mkdir(parents=True)
    demo.run(call=test_demo.make_weights, path=str(file), classes=1000)
    _, train, show, *_ = own.calls
    place = {"cwd": own.folder, "env": {"TORCH_HOME": str(tmp_path)}}
    job = demo.run(train[1:], of_rank=lambda _: place)
    assert job.json_line("Run")["classes"] == 2
    assert "the last layer, of 1000 other classes, is left out: here are 2\n" in job.out
    assert job.json_line("Summary")["steps"] == 2
    looked_at(demo, own, job, show[1:])


def test_two_places_name_the_model(own):
    """The page's table has them with their functions; its sed changes nothing else."""
    old, new = (
        (own.folder / name).read_text().splitlines() for name in ("demo_coco_resnet18.py", COPY)
    )
    changed = [(a.strip(), b.strip()) for a, b in zip(old, new, strict=True) if a != b]
    table = re.findall(r"^\| `(\w+)` \| `(.*)` \|$", section("ResNet-50"), re.MULTILINE)
    assert [before for before, _ in changed] == [line for _, line in table]
    assert [line.replace("net18", "net50").replace("Net18", "Net50") for _, line in table] == [
        after for _, after in changed
    ]
    functions = {
        node.name: ast.get_source_segment("\n".join(old), node)
        for node in ast.walk(ast.parse("\n".join(old)))
        if isinstance(node, ast.FunctionDef)
    }
    for name, line in table:
        assert line in functions[name], f"{name} has no {line}"


@LONG
def test_resnet_50_is_trained_and_looked_at(demo, own):
    """At 64 pixels and without weights, which would have to be downloaded."""
    _, _, _, train, show = own.calls
    fast = ["--weights", "none", "--image_size", "64", "--max_steps", "1", "--workers", "0"]
    place = {"cwd": own.folder}
    job = demo.run([*train, *fast], call=run_copy, of_rank=lambda _: place)
    assert job.json_line("Run")["parameters"] == 23_512_130  # ResNet-50 with two classes
    looked_at(demo, own, job, show[1:])


@pytest.mark.parametrize("title", re.findall(r"^## (In a .*|On .*)$", PAGE, re.MULTILINE))
def test_each_place_says_whether_it_was_run(title):
    assert re.search(r"\*\((not )?run here\b", section(title), re.IGNORECASE)
