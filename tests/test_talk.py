"""docs/talk.md: the talk's commands and logs, and what compare_logs.py makes of them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support.datasets import instances, numbered, write_images
from support.forks import ForkServer
from support.processes import LONG, ROOT, SCRIPT, base_env, new_test_id, require, run_demo
from test_pages import PAGES

TALK = PAGES["docs/talk.md"]
LOGS = ROOT.parent / "shared" / "talk"
NAMES = ("ethernet", "infiniband")


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """What the page's two comparisons print, after the logs have been taken from it."""
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
    """The page's blocks are to be printed anew by its commands where the tool's words change."""
    shown = [[line.rstrip() for line in text.splitlines()] for text in TALK.printed]
    found = [[line.rstrip() for line in text.strip().splitlines()] for text in printed]
    assert found == shown


def test_conclusions_in_the_text_are_the_tools(printed):
    verdict, text = " ".join(printed[2].split()), " ".join(TALK.prose.split())
    assert "a wire that ran at 72 Mb/s (1,850 steps" in verdict and "72 Mb/s explain them" in text
    assert "this is not a 1 Gb/s result" in verdict and "1 Gb/s cannot explain 4 h 9 min" in text
    assert "4h 8m 59.79s against 19m 24.99s" in verdict
    # 11,217,552 gradients of 4 bytes, 1.5 times, 1,850 steps
    sent = 1.5 * 4 * 11_217_552 * 8 / 1e9
    assert f"{sent:.3f} s a step" in text and f"{1850 * sent:.0f} s, 17 minutes" in text


def test_logs_of_the_page_are_the_talks(printed):
    require(LOGS.is_dir(), f"the talk's logs are not there: {LOGS}")
    assert printed[:2] == [(LOGS / f"{name}.log").read_text() for name in NAMES]


# --- Its first command -------------------------------------------------------------------------


def first_command() -> list[str]:
    return shlex.split(TALK.commands[0])


@pytest.fixture
def coco(tmp_path) -> Path:
    """A folder in which coco is laid out as COCO is, with eight small images."""
    write_images(tmp_path / "coco" / "train2017", numbered(8))
    notes = tmp_path / "coco" / "annotations"
    notes.mkdir()
    (notes / "instances_train2017.json").write_text(json.dumps(instances(numbered(8))))
    return tmp_path


def fetched(demo, result, path):
    Path(path).parent.mkdir(parents=True)
    demo.torch.save(demo.torchvision.models.resnet18().state_dict(), path)


def weights(demo: ForkServer, folder: Path) -> dict[str, str]:
    """The environment in which ImageNet's weights are there; their values are made up."""
    file = folder / "torch" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    demo.run(call=fetched, path=str(file))
    return {"TORCH_HOME": str(folder / "torch")}


def test_first_command_runs_with_the_pages_words(demo, coco):
    words = first_command()
    assert words[:4] == ["torchrun", "--standalone", "--nnodes=1", "--nproc_per_node=1"]
    arguments = words[words.index(SCRIPT.name) + 1 :]
    place = {"cwd": coco, "env": weights(demo, coco)}
    job = demo.run(arguments, torchrun=True, of_rank=lambda _: place, timeout=200)
    check(job)


@LONG
def test_first_command_runs_by_torchrun(demo, coco):
    arguments = first_command()[first_command().index(SCRIPT.name) + 1 :]
    check(run_demo(arguments, env=weights(demo, coco), cwd=coco, timeout=400))


def check(job):
    record = job.json_line("Run")
    assert (record["num_epochs"], record["weights"]) == (2, "imagenet")
    assert {epoch for epoch, _, _ in job.steps()} == {1, 2}
    assert re.search(r"^\[CPU 0\] Cleanup complete\. Total wall time: ", job.out, re.MULTILINE)
