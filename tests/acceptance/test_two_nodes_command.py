"""tools/two_nodes.sh makes two nodes of one machine, trains on them, and leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import FAST
from support.nodes import namespaces, require_namespaces
from support.processes import LONG, ROOT, Run, start

COMMAND = ROOT / "tools" / "two_nodes.sh"


def two_nodes(
    folder: Path, *arguments: object, expect: int | None = 0, **variables: object
) -> Run:
    """The command to its end; no namespace of it stays."""
    require_namespaces()
    env = {"PYTHON": sys.executable, "PROBE": "0"}
    env |= {name: str(value) for name, value in variables.items()}
    with start(["bash", COMMAND, *arguments], env=env, cwd=folder) as started:
        run = started.finish(400, expect=expect, clean=10)
        assert not namespaces(started)
    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--lr 1", "--lr"),
        ("--rate", "--rate"),
        ("--gpus_per_node 0 -- x", "(?i)gpus_per_node"),
        ("--rate fast -- x", "rate.* fast"),
        ("--links slow -- x", "slow.*NAME=RATE"),
        ("--links lo=1gbit,fast=unshaped -- x", r"\blo\b"),
        ("--links a=1gbit,a=2gbit -- x", r"\ba\b"),
        ("--links a=fast,b=2gbit -- x", " fast"),
    ],
)
def test_wrong_options_are_refused_in_one_line(tmp_path, options, words):
    run = two_nodes(tmp_path, *options.split(), expect=None)
    assert run.returncode not in (0, 75)
    errors = [line for line in run.lines() if "error: " in line]
    assert errors == run.lines()[-1:] and re.search(words, errors[0]), run.tail()
    assert not (tmp_path / "logs").exists()


@pytest.fixture(scope="module")
def caller() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def python_for(user: pwd.struct_passwd) -> dict[str, str]:
    """The variables of a Python that the user can run: this one may lie in a home of root."""
    code = "import torch, torchvision, pycocotools, PIL"
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*as_user, "sh", "-c", '"$0" -c "$1"', python, code]
        if subprocess.run(command, env=env, capture_output=True).returncode == 0:
            return {"PYTHON": python, "PYTHONPATH": env["PYTHONPATH"]}
    pytest.skip(f"{user.pw_name} cannot run a Python that has torch")


@pytest.fixture(scope="module")
def folder(caller) -> Iterator[Path]:
    """The folder of a user behind sudo, where a training over a slow cable was started."""
    require_namespaces()
    variables = {**python_for(caller), "SUDO_UID": caller.pw_uid, "SUDO_GID": caller.pw_gid}
    with tempfile.TemporaryDirectory(prefix="mein Gerät-") as name:  # pytest's own is for root
        os.chown(name, caller.pw_uid, caller.pw_gid)
        path = Path(name)
        path.chmod(0o755)
        command = ["--rate", "100mbit", "--name", "slow", "--", *make_set(path / "set", 32), *FAST]
        two_nodes(path, *command, "--max_steps", 3, TMPDIR=path, **variables)
        yield path


@LONG
def test_both_nodes_train_over_a_cable_of_the_rate_asked_for(folder):
    """A step sends 45 MB of gradients each way: 3.6 s at 100 Mb/s."""
    for node in (0, 1):
        log = (folder / f"logs/slow/node{node}.log").read_text()
        times = re.findall(rf"^\[CPU {node}\] .*\| step (\S+) ms", log, re.MULTILINE)
        assert len(times) == 3 and all(float(time) > 3000 for time in times)
    facts = Run([], 0, (folder / "logs/slow/node0.log").read_text(), 0).json_line("Run")
    assert facts["hosts"] == ["node0", "node1"]


@LONG
def test_what_it_makes_belongs_to_the_user_behind_sudo(folder, caller):
    made = [folder / "logs", *(folder / "logs").rglob("*")]
    assert {"node0.log", "node1.log"} <= {path.name for path in made}
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in made}
    assert owners == {(caller.pw_uid, caller.pw_gid)}
    assert (folder / "set").stat().st_uid == os.geteuid()  # which was there before


@LONG
def test_links_are_compared_in_a_table_and_a_picture(tmp_path):
    """Of each network there is the log of each node, and of both a comparison, on node 0."""
    links = ["--links", "slow=500mbit,fast=unshaped", "--name", "both"]
    arguments = [*make_set(tmp_path / "set", 32), *FAST, "--max_steps", 3]
    run = two_nodes(tmp_path, *links, "--", *arguments, PROBE=1)
    logs = tmp_path / "logs/both"
    summaries = []
    for label in ("slow", "fast"):
        log = Run([], 0, (logs / label / "node0.log").read_text(), 0)
        assert "[CPU 1] " in (logs / label / "node1.log").read_text()
        assert log.json_line("Run")["env"]["GLOO_SOCKET_IFNAME"] == label
        assert log.json_line("Probe")["world_size"] == 2
        summaries.append(log.json_line("Summary"))
    slow, fast = summaries
    assert slow["weights_sha256"] == fast["weights_sha256"] and slow["steps"] == 3
    assert "Emulated: two network namespaces" in run.out
    head = re.search(r"^\|.*\| +slow +\| +fast +\|$", run.out, re.MULTILINE)
    assert head and head[0] in (logs / "compare.md").read_text()
    assert (logs / "compare.png").stat().st_size > 10_000
