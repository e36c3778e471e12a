"""docs/talk.md: what compare_logs.py makes of the talk's logs, and the talk's command."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.datasets import instances, numbered, write_images
from support.processes import LONG, ROOT, SCRIPT, base_env, new_test_id, require, run_demo
from test_pages import PAGES

TALK = PAGES["docs/talk.md"]
LOGS = ROOT.parent / "shared" / "talk"
NAMES = ("ethernet", "infiniband")


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """The two logs as the page's commands take them from it, and what its comparisons print."""
    folder = tmp_path_factory.mktemp("talk")
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    commands = [text for text in TALK.commands if "data/talk" in text]
    script = "\n".join(["set -euo pipefail", *(f"{text}\nprintf '\\0'" for text in commands)])
    how = dict(cwd=folder, capture_output=True, text=True, timeout=60)
    done = subprocess.run(["bash", "-c", script], env=base_env(new_test_id()), **how)
    assert done.returncode == 0, done.stderr
    taken = [(folder / "data" / "talk" / f"{name}.log").read_text() for name in NAMES]
    return [*taken, *done.stdout.split("\0")[:-1]]


def test_page_shows_what_the_tool_prints(printed):
    """Where the tool's words change, print the page's blocks anew with its commands."""
    shown = [[line.rstrip() for line in text.splitlines()] for text in TALK.printed]
    assert [[line.rstrip() for line in text.strip().splitlines()] for text in printed] == shown


def test_conclusions_in_the_text_are_the_tools(printed):
    verdict, text = " ".join(printed[2].split()), " ".join(TALK.prose.split())
    assert "a wire that ran at 72 Mb/s (1,850 steps" in verdict and "72 Mb/s explain them" in text
    assert "this is not a 1 Gb/s result" in verdict and "1 Gb/s cannot explain 4 h 9 min" in text


def test_logs_of_the_page_are_the_talks(printed):
    require(LOGS.is_dir(), f"the talk's logs are not there: {LOGS}")
    assert printed[:2] == [(LOGS / f"{name}.log").read_text() for name in NAMES]


def save_weights(hub: Path) -> None:
    """What a download of ImageNet's weights would leave there; the values are made up."""
    file = hub / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    code = "import sys, torch, torchvision as t; torch.save(t.models.resnet18().state_dict(), "
    subprocess.run([sys.executable, "-c", f"{code} sys.argv[1])", file], check=True, timeout=120)


@LONG
def test_first_command_trains_two_epochs(tmp_path):
    """With eight images in COCO's layout."""
    save_weights(tmp_path / "torch" / "hub")
    write_images(tmp_path / "coco" / "train2017", numbered(8))
    notes = tmp_path / "coco" / "annotations"
    notes.mkdir()
    (notes / "instances_train2017.json").write_text(json.dumps(instances(numbered(8))))
    words = shlex.split(TALK.commands[0])
    assert words[:4] == ["torchrun", "--standalone", "--nnodes=1", "--nproc_per_node=1"]
    arguments = words[words.index(SCRIPT.name) + 1 :]
    env = {"TORCH_HOME": str(tmp_path / "torch")}
    run = run_demo(arguments, env=env, cwd=tmp_path, timeout=400)
    assert (run.json_line("Run")["num_epochs"], run.json_line("Run")["weights"]) == (2, "imagenet")
    assert {epoch for epoch, _, _ in run.steps()} == {1, 2}
