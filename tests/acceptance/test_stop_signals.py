"""A stop signal saves and ends a run on all nodes with exit code 75, and a wait at once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal

import pytest

from support.datasets import make_set
from support.launchers import (
    FAST,
    SAVED,
    SINGLE,
    STEP_3,
    copy_project,
    end_within,
    has_rank,
    launch,
    two_nodes,
)
from support.nodes import require_namespaces
from support.processes import ROOT, demo_command, require, start, wait_until


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> list[str]:
    """Options of a run that does not end by itself in a test's time."""
    images = make_set(tmp_path_factory.mktemp("set"), 64)
    return [*FAST, *images, "--num_epochs", "999", "--timeout", "30"]


def stops(log: str, rank: int) -> int:
    """How often a rank has said in a log that it stops on a signal."""
    return len(re.findall(rf"^\[CPU {rank}\] Stopped on SIG", log, re.MULTILINE))


def test_a_stop_signal_to_one_launcher_saves_and_ends_both_nodes(training, tmp_path):
    """For SIGINT and SIGHUP see below, for SIGUSR1 to all processes SLURM's tests."""
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training, "--checkpoint", tmp_path / "c.pt", RESTARTS=1)
        started[1].signal(signal.SIGTERM)
        end_within(10, started, SAVED)
        for node in (0, 1):
            log = nodes.log(node)
            assert stops(log, rank=node) == 1
            assert len(re.findall(r"\| Step 1 ", log)) == 1, "it was started again"
    assert (tmp_path / "c.pt").stat().st_size > 0


@pytest.mark.slow
def test_a_stop_that_saves_nothing_ends_with_128_and_the_signals_number(training, tmp_path):
    with launch(SINGLE, tmp_path, *training) as started:
        started.wait_for(STEP_3)
        started.signal(signal.SIGINT)
        end_within(10, [started], 128 + signal.SIGINT)


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_saves_and_keeps_the_last_lines(training, tmp_path):
    require(shutil.which("script"), "a terminal needs the command script (util-linux)")
    keyboard = tmp_path / "keyboard"
    os.mkfifo(keyboard)
    words = ["bash", SINGLE, *training, "--checkpoint", tmp_path / "c.pt"]
    command = shlex.quote("exec " + shlex.join(map(str, words)))  # dash would end with 130
    line = f"exec script -qec {command} /dev/null <{shlex.quote(str(keyboard))}"
    env = {"GPUS": "1", "RUN_NAME": "run"}
    with (
        start(["sh", "-c", line], env=env, cwd=tmp_path) as started,
        keyboard.open("wb", 0) as key,
    ):
        started.wait_for(STEP_3)
        key.write(b"\x03")
        end_within(10, [started], SAVED)
    assert stops((tmp_path / "logs/run/node0.log").read_text(), rank=0) == 1
    assert (tmp_path / "c.pt").exists()


def test_a_stop_while_waiting_for_the_other_node_ends_at_once(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        started = nodes.start(0, *training)
        wait_until(nodes.listens, 60, "node 0 to wait for the other")
        started.signal(signal.SIGTERM)
        end_within(5, [started], 128 + signal.SIGTERM)


@pytest.mark.slow
def test_a_stop_of_one_node_that_saves_nothing_ends_both(training, tmp_path):
    """With its number, though no signal came to the other node."""
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training)
        started[1].signal(signal.SIGTERM)
        end_within(10, started, 128 + signal.SIGTERM)


@pytest.mark.slow
def test_a_stop_before_the_first_step_is_not_called_saved(training, tmp_path):
    """While the ranks still load their libraries; a file of that name is of an earlier run."""
    (tmp_path / "old.pt").touch()
    with launch(SINGLE, tmp_path, *training, "--checkpoint", "old.pt") as started:
        wait_until(lambda: has_rank(started), 60, "a rank")
        started.signal(signal.SIGTERM)
        (run,) = end_within(10, [started], 128 + signal.SIGTERM)
    assert not run.steps()


@pytest.mark.slow
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(training, tmp_path):
    """As SIGHUP under nohup, and SIGINT where a script starts the run with "&". Each epoch ends
    with an agreement.
    """
    ignoring = ["sh", "-c", 'trap "" HUP INT TERM USR1; exec "$@"', "sh"]
    command = demo_command([*training, "--checkpoint", tmp_path / "c.pt"], launcher="python")
    with start([*ignoring, *command]) as started:
        started.wait_for(r"\| Step 1 ")
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            started.signal(number)
        epoch = started.text().count(" complete | ")
        started.wait_for(f"Epoch {epoch + 2} complete")
        started.signal(signal.SIGUSR1)
        end_within(10, [started], SAVED)


TWO_NODES = ROOT / "tools" / "two_nodes.sh"


@pytest.mark.parametrize("launcher", [SINGLE, pytest.param(TWO_NODES, marks=pytest.mark.slow)])
def test_a_stop_while_the_sample_set_is_made_ends_at_once(tmp_path, launcher):
    if launcher == TWO_NODES:
        require_namespaces()
    project = copy_project(tmp_path)
    with launch(project / launcher.relative_to(ROOT), tmp_path) as started:
        wait_until(lambda: started.pids("make_sample"), 60, "the sample set")
        started.signal(signal.SIGTERM)
        started.finish(10, 128 + signal.SIGTERM)


@pytest.mark.slow
def test_a_stop_between_two_starts_ends_with_75_where_a_checkpoint_is(training, tmp_path):
    saves = ["--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1]
    with two_nodes(tmp_path) as nodes:
        first, second = nodes.train(*training, *saves, RESTARTS=1)
        second.kill()  # the whole node is gone
        first.wait_for(r"(?i)\brestart(ing)? 1\b")
        wait_until(nodes.listens, 60, "node 0 to wait again")
        first.signal(signal.SIGTERM)
        end_within(5, [first], SAVED)
        log = nodes.log(0)
    assert len(re.findall(r"\| Step 1 ", log)) == 1
