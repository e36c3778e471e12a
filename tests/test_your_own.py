"""docs/your_own.md: its commands, taken from the page, train on own images and an own model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.datasets import numbered, write_images
from support.processes import LONG, ROOT, SCRIPT, start
from test_pages import FENCED, PAGES

PAGE = PAGES["docs/your_own.md"].text
COUNTS = {"cat": 11, "dog": 6}  # images of each class; 5 of them for validation
# A small, short training in place of each, without weights that would have to be downloaded.
FAST = """
python() {
    case $1 in
    demo_*) command python "$@" --weights none --image_size 64 --max_steps 2 --workers 0 ;;
    *) command python "$@" ;;
    esac
}
"""


def blocks(title: str, kind: str) -> str:
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    return "\n".join(match[2] for match in FENCED.finditer(section) if match[1] == kind)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A project in which photos/ has a folder for each class, after the page's own lines."""
    folder = tmp_path_factory.mktemp("own data")
    for number, (name, count) in enumerate(COUNTS.items()):
        write_images(folder / "photos" / name, numbered(count), seed=number)
    shutil.copy(SCRIPT, folder / "demo_coco_resnet18.py")
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "make_coco.py").write_text(blocks("A folder of folders", "python"))
    subprocess.run([sys.executable, "make_coco.py", "photos"], cwd=folder, check=True, timeout=60)
    return folder


def test_folder_of_folders_becomes_two_files(own):
    """Each image is in one of them, with the class of its folder."""
    for part, places in (("val", (0, 5, 10)), ("train", (1, 2, 3, 4, 6, 7, 8, 9))):
        content = json.loads((own / f"photos_{part}.json").read_text())
        names = {category["id"]: category["name"] for category in content["categories"]}
        files = {image["id"]: image["file_name"] for image in content["images"]}
        labels = {a["image_id"]: names[a["category_id"]] for a in content["annotations"]}
        wanted = [(name, i) for name, count in COUNTS.items() for i in places if i < count]
        assert [*names.values()] == [*COUNTS]
        assert [*files.values()] == [f"{name}/{i:04d}.jpg" for name, i in wanted]
        assert [labels[image] for image in files] == [name for name, _ in wanted]


def test_places_that_name_the_model_are_those_of_the_script():
    """The page's table has them with their functions; nothing else of the script names it."""
    functions = dict(re.findall(r"^def (\w+)(.*?)(?=^\S)", SCRIPT.read_text(), re.M | re.S))
    table = re.findall(r"^\| `(\w+)` \| `(.*)` \|$", PAGE, re.MULTILINE)
    assert all(f"    {line}\n" in functions[name] for name, line in table)
    assert len(re.findall(r"models\.resnet18\(|models\.ResNet18_W", SCRIPT.read_text())) == 2


@LONG
def test_commands_train_and_show_both_models(own):
    """show_results.py counts what the last validation counted."""
    commands = [blocks(title, "bash") for title in ("A folder of folders", "ResNet-50")]
    script = "\n".join(["set -euo pipefail", FAST, *commands])
    with start(["bash", "-c", script], cwd=own) as started:
        run = started.finish(400)
    found = re.findall(r"Top-1: (\S+)% \| 5 images", run.out)
    assert len(found) == 6 and found[1] == found[2] and found[4] == found[5]
    assert run.out.count('"classes": 2') == 2
    assert run.json_line("Run")["parameters"] == 23_512_130  # ResNet-50 with two classes
    assert (own / "results.png").is_file()
