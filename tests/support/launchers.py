"""The launchers as a user starts them: on this machine, or on two nodes in network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import demo_coco_resnet18 as demo
import pytest

from support.nodes import NamespacePair
from support.processes import (
    ROOT,
    SCRIPT,
    Run,
    Started,
    assert_none_left,
    free_ports,
    processes,
    start,
)

SINGLE = ROOT / "launch_single.sh"
MULTINODE = ROOT / "launch_multinode.sh"
# A small training: 40 pixels, steps of some 0.1 s, every step in the log.
FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --log_every 1")
FAST += ["--precision", "fp32"]
BUSY = 40  # seconds more than a promised bound: other tests run on the same cores meanwhile
# Jupyter and Colab set such a name for the commands of a cell. No package has it.
NOTEBOOK = {"MPLBACKEND": "backend_of_a_notebook"}
SAVED = 75  # exit code after a stop signal
STEP_3 = r"\| Step 3 "
LOG = "logs/run/node0.log"  # of a launcher on this machine
NO_SAMPLE = ["--annotation_path", "none"]  # with a path the launchers make no sample set
HERE = {"PYTHON": sys.executable, "RUN_NAME": "run", "NNODES": "1", "PROBE": "0"}
# The line with the torchrun command, which a launcher prints before it runs it.
COMMAND = re.compile(r"^\S+\.(?:sh|py): [\d-]+ [\d:]+ (.*\btorchrun .*)$", re.MULTILINE)


def launch(launcher: Path, folder: Path, *arguments: object, **variables: object) -> Started:
    """Starts a launcher on this machine; `variables` are its environment, None unsets one."""
    return here(["bash", launcher, *arguments], folder, variables)


def launch_series(folder: Path, *arguments: object, **variables: object) -> Started:
    """Starts tools/series.py on this machine, of the project or of a copy in the folder."""
    copy = folder / "project/tools/series.py"
    command = copy if copy.exists() else ROOT / "tools/series.py"
    return here([sys.executable, command, *arguments], folder, variables)


def here(command: list, folder: Path, variables: dict[str, object]) -> Started:
    env = HERE | {"MASTER_PORT": str(free_ports(30))}
    env |= {name: None if value is None else str(value) for name, value in variables.items()}
    return start(command, env=env, cwd=folder)


# In place of PYTHON where only what a launcher starts is looked at. The launcher's own questions
# are for the Python of the tests, except that GPUs are shown by CUDA_VISIBLE_DEVICES alone. Of
# what it starts the variables and the words are printed.
STUB = """#!/usr/bin/env bash
case $* in
*device_count*)
    tr ',' '\\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^-/,$d' | grep -c . || true
    exit
    ;;
-c*) exec '{python}' "$@" ;;
*/run.py* | */series.py*) exec -a "$0" '{python}' "$@" ;;
esac
mapfile -t variables < <(env | grep -E '^(NCCL|GLOO|G?OMP|PET)_')
printf 'GIVEN'; printf ' %q' "${{variables[@]}}" "$@"; echo
"""


def stub_python(folder: Path) -> Path:
    path = folder / "stub"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    return path


def programs(folder: Path, **texts: str) -> str:
    """PATH with these shell programs first; an underscore stands for a dash."""
    folder.mkdir()
    for name, text in texts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def given(started: Started) -> list[list[str]]:
    """What torchrun was given at each start of a launcher whose PYTHON is `stub_python`: variables
    and words. They are those of the command that the launcher prints.
    """
    run = started.finish(60)
    found = []
    for line in run.lines():
        variables, torchrun, words = line.partition(" -m torch.distributed.run ")
        if line.startswith("GIVEN") and torchrun:
            found.append([shlex.split(part) for part in (variables.removeprefix("GIVEN"), words)])
    assert found, run.tail()
    for (variables, words), line in zip(found, COMMAND.findall(run.out), strict=True):
        printed = shlex.split(line)
        begin = printed.index("torchrun")
        assert {*printed[:begin]} <= {*variables} and printed[begin + 1 :] == words
    return [variables + words for variables, words in found]


def copy_project(folder: Path) -> Path:
    """A copy of the project, without its tests and what a user has made there: data, logs,
    checkpoints, environments.
    """

    def left_out(path: str, names: list[str]) -> list[str]:
        made = re.compile(r"\..*|data|logs|tests|__pycache__|.*\.pt")
        return [n for n in names if made.fullmatch(n) or Path(path, n, "pyvenv.cfg").exists()]

    return shutil.copytree(ROOT, folder / "project", ignore=left_out)


def changed_project(folder: Path, code: str) -> Path:
    """A copy of the project in which the script has been given this code, before it runs."""
    project = copy_project(folder)
    script = project / SCRIPT.name
    before, main, after = script.read_text().partition('if __name__ == "__main__":')
    script.write_text(before + code + main + after)
    return project


# How a script records its end, without the time that PyTorch takes to load.
RECORD = """
import json, os, signal, sys, time

def record(kind, line):
    print(line, flush=True)
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": f"{kind}: {line}"}}, file)

"""


def project_with(folder: Path, code: str) -> Path:
    """A copy of the project with this code as the script."""
    project = copy_project(folder)
    (project / SCRIPT.name).write_text(RECORD + code)
    return project


# The code of a script that a stop signal ends as it would end the real one, within 15 seconds.
STOPS = """
def stop(*_):
    time.sleep(0.5)
    record("Stopped", f"Stopped on SIGTERM | step 3 | saved | exit code 75")
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
print(f"[CPU {os.environ['RANK']}] trains", flush=True)
time.sleep(15)
"""


def starts(output: str) -> int:
    """How often a launcher has started torchrun."""
    return len(COMMAND.findall(output))


def has_rank(started: Started) -> bool:
    return any("RANK" in process.env for process in processes(started.test_id))


class TwoNodes:
    """launch_multinode.sh on both nodes of a NamespacePair.

    Each node has a folder of its own, `folder(k)`, in which it is started; its log is
    `folder(k)/logs/run/node{k}.log`.
    """

    def __init__(self, pair: NamespacePair, tmp_path: Path) -> None:
        self.pair = pair
        self.tmp_path = tmp_path
        self.port = free_ports(1)  # namespaces have ports of their own: any number serves

    def folder(self, node: int) -> Path:
        path = self.tmp_path / f"node{node}"
        path.mkdir(exist_ok=True)
        return path

    def log(self, node: int, run: str = "run") -> str:
        path = self.folder(node) / "logs" / run / f"node{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(
        self, node: int, *arguments: object, runs: list[str] | None = None, **variables: object
    ) -> Started:
        """Starts the launcher on one node, or series.py with `runs`; `variables` are its
        environment, and win.
        """
        env = HERE | {"NNODES": "2", "NODE_RANK": str(node), "CONNECT_TIMEOUT": "40"}
        env |= {"MASTER_ADDR": self.pair.addresses[0], "MASTER_PORT": str(self.port)}
        env |= {name: str(value) for name, value in variables.items()}
        command: list[object] = ["bash", MULTINODE, *arguments]
        if runs:
            command = [sys.executable, ROOT / "tools/series.py", *runs, "--", *arguments]
        return self.pair.popen(node, command, env=env, cwd=self.folder(node))

    def start_both(self, *arguments: object, **variables: Any) -> list[Started]:
        """The same on both nodes."""
        return [self.start(node, *arguments, **variables) for node in (0, 1)]

    def train(self, *arguments: object, **variables: Any) -> list[Started]:
        """Starts both nodes, and waits until each has logged step 3."""
        started = self.start_both(*arguments, **variables)
        for one in started:
            one.wait_for(STEP_3)
        return started

    def listens(self, node: int = 0) -> list[bytes]:
        """Sockets on a node that wait for connections."""
        return self.pair.output(node, "ss", "-Hltn").splitlines()


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    with NamespacePair() as pair:
        yield TwoNodes(pair, tmp_path)


def end_within(seconds: float, started: list[Started], expect: int | None = None) -> list[Run]:
    """Waits until all have ended; fails on another exit code than `expect` (None: any but 0), and
    on a process that is left 10 s later. `seconds` is what a user is promised on a quiet machine.
    """
    deadline = time.monotonic() + seconds + BUSY
    runs = [one.finish(deadline - time.monotonic(), expect, clean=None) for one in started]
    for one, run in zip(started, runs, strict=True):
        assert_none_left(one.test_id, 10)
        assert expect is not None or run.returncode != 0, run.tail()
    return runs


def place(env: dict[str, str]) -> tuple[str | None, ...]:
    """What the script makes of these variables: its launcher, rank 0's address, and the four
    numbers of torchrun. It adds to `env`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", env)
        launcher = demo.find_launcher()
    return (launcher, env.get("MASTER_ADDR"), *(env.get(name) for name in demo.TORCHRUN))
