"""tools/two_nodes.sh makes two nodes of one machine, trains on them, and leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.datasets import make_set
from support.launchers import (
    FAST,
    SAVED,
    SINGLE,
    STEP_3,
    assert_scaling_is_compared,
    copy_project,
    launch,
)
from support.nodes import namespaces, require_namespaces
from support.processes import LONG, ROOT, Run, require, start

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


def test_without_root_it_is_refused():
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    tried = subprocess.run([*other, "test", "-r", COMMAND], capture_output=True)
    require(tried.returncode == 0, "no other user can be made that reads this checkout")
    with start([*other, "bash", COMMAND, "--", "--lr", 1], cwd="/") as started:
        (line,) = started.finish(20, expect=1).lines()
    assert "error: " in line and "root" in line


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
    """The folder of a user behind sudo, who has trained with four ranks over a slow cable."""
    require_namespaces()
    variables = {**python_for(caller), "SUDO_UID": caller.pw_uid, "SUDO_GID": caller.pw_gid}
    with tempfile.TemporaryDirectory(prefix="mein Gerät-") as name:  # pytest's own is for root
        os.chown(name, caller.pw_uid, caller.pw_gid)
        path = Path(name)
        path.chmod(0o755)
        command = ["--rate", "100mbit", "--gpus_per_node", 2, "--name", "slow", "--"]
        command += [*make_set(path / "set", 32), *FAST, "--max_steps", 2]
        two_nodes(path, *command, TMPDIR=path, **variables)
        yield path


@LONG
def test_both_nodes_train_over_a_cable_of_the_rate_asked_for(folder):
    """A step sends 1.5 times 45 MB of gradients each way: 5.4 s at 100 Mb/s."""
    for node, ranks in enumerate([(0, 1), (2, 3)]):
        log = Run([], 0, (folder / f"logs/slow/node{node}.log").read_text(), 0)
        assert [rank for rank in range(4) if log.steps(rank)] == [*ranks]
        times = re.findall(r"\| step (\S+) ms", log.out)
        assert len(times) == 4 and all(float(time) > 4500 for time in times)
    facts = Run([], 0, (folder / "logs/slow/node0.log").read_text(), 0).json_line("Run")
    assert facts["hosts"] == ["node0", "node0", "node1", "node1"]


@LONG
def test_what_it_makes_belongs_to_the_user_behind_sudo(folder, caller):
    made = [folder / "logs", *(folder / "logs").rglob("*")]
    assert {"node0.log", "node1.log"} <= {path.name for path in made}
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in made}
    assert owners == {(caller.pw_uid, caller.pw_gid)}
    assert (folder / "set").stat().st_uid == os.geteuid()  # which was there before


@LONG
def test_the_sample_set_belongs_to_the_user_behind_sudo(tmp_path, caller):
    """It is stopped as soon as the set is made."""
    require_namespaces()
    project = copy_project(tmp_path)
    drawing = project / "tools/make_sample_coco.py"
    drawing.write_text(drawing.read_text().replace("default=512", "default=48"))
    env = {"PYTHON": sys.executable}
    env |= {"SUDO_UID": str(caller.pw_uid), "SUDO_GID": str(caller.pw_gid)}
    with start(["bash", project / "tools/two_nodes.sh"], env=env, cwd=tmp_path) as started:
        started.wait_for("Emulated: ")
        started.signal(signal.SIGTERM)
        started.finish(30, expect=None, clean=10)
    made = [project / "data", *(project / "data").rglob("*")]
    assert len(made) > 48
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in made}
    assert owners == {(caller.pw_uid, caller.pw_gid)}


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
        probe = log.json_line("Probe")
        assert probe["world_size"] == 2
        if label == "slow":
            links = [link for node in probe["nodes"] for link in node["interfaces"]]
            rates = [link["wire_Gbps"] for link in links if link["name"] == "slow"]
            assert rates == pytest.approx([0.5, 0.5], rel=0.1)
        summaries.append(log.json_line("Summary"))
    slow, fast = summaries
    assert slow["weights_sha256"] == fast["weights_sha256"] and slow["steps"] == 3
    assert "Emulated: two network namespaces" in run.out
    head = re.search(r"^\|.*\| +slow +\| +fast +\|$", run.out, re.MULTILINE)
    assert head and head[0] in (logs / "compare.md").read_text()
    assert (logs / "compare.png").stat().st_size > 10_000
    # Its interface states 10 Gb/s; the cable that was made is judged by its own rate.
    (says,) = re.findall(r"^slow: Bound by .*", run.out, re.MULTILINE)
    assert "of the stated 500 Mb/s: the link delivers" in says
    (says,) = re.findall(r"^fast: Bound by .*", run.out, re.MULTILINE)
    assert "of the stated 10 Gb/s" in says


@LONG
def test_one_process_and_two_on_one_node_and_on_two_are_compared(tmp_path):
    """With the same arguments and threads. Two processes train the same wherever they are."""
    words = [*make_set(tmp_path / "set", 64), *FAST, "--max_steps", 8]
    threads = {"OMP_NUM_THREADS": "1", "RUN_NAME": "one"}
    for count, name in ((1, "one"), (2, "two")):
        with launch(SINGLE, tmp_path, *words, GPUS=count, **threads | {"RUN_NAME": name}) as run:
            run.finish(120)
    two_nodes(tmp_path, "--name", "nodes", "--", *words, OMP_NUM_THREADS=1)
    logs = {name: tmp_path / "logs" / name for name in ("one", "two", "nodes")}
    found = {}
    for name, folder in logs.items():
        log = Run([], 0, (folder / "node0.log").read_text(), 0)
        facts, summary = log.json_line("Run"), log.json_line("Summary")
        place = facts["world_size"], facts["nodes"], facts["threads"]
        found[name] = place, summary["weights_sha256"], summary["steps"]
    assert [place for place, *_ in found.values()] == [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
    assert found["two"][1:] == found["nodes"][1:] and found["one"][1:] != found["two"][1:]
    with start([sys.executable, ROOT / "tools/compare_logs.py", *logs.values()]) as started:
        assert_scaling_is_compared(started.finish(60, expect=None), *logs)


@LONG
def test_a_stop_saves_on_both_nodes_and_leaves_no_namespace(tmp_path):
    require_namespaces()
    words = ["--", *make_set(tmp_path / "set", 32), *FAST, "--num_epochs", 99, "--timeout", 30]
    env = {"PYTHON": sys.executable, "PROBE": "0", "RUN_NAME": "run"}
    with start(["bash", COMMAND, *words], env=env, cwd=tmp_path) as started:
        for rank in (0, 1):
            started.wait_for(rf"\[CPU {rank}\] .*{STEP_3}")
        started.signal(signal.SIGTERM)
        started.finish(20, SAVED, clean=10)
    assert not namespaces(started)
    for node in (0, 1):
        log = (tmp_path / f"logs/run/node{node}.log").read_text()
        assert f"[CPU {node}] Stopped on SIGTERM" in log
