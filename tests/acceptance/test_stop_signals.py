"""A stop signal saves and ends a run on all nodes with exit code 75, and a wait at once."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal

import pytest

from support.datasets import make_set
from support.forks import run_forked
from support.launchers import (
    FAST,
    MULTINODE,
    SAVED,
    SINGLE,
    STEP_3,
    copy_project,
    end_within,
    has_rank,
    launch,
    launch_series,
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
    """For SIGINT and SIGHUP see the tests of one launcher below, for SIGUSR1 to both SLURM's."""
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
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_stop_signal_to_every_process_saves_and_the_run_can_be_resumed(training, tmp_path, name):
    """To launcher, torchrun, ranks and loader workers, as SLURM sends it."""
    words = [*training, "--workers", 1, "--checkpoint", tmp_path / "c.pt"]
    with launch(SINGLE, tmp_path, *words, GPUS=2) as started:
        for rank in (0, 1):
            started.wait_for(rf"\[CPU {rank}\] .*\| Step 3 ")
        for pid in started.pids():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.Signals[name])
        (run,) = end_within(10, [started], SAVED)
    (last,) = {int(step) for step in re.findall(r"Stopped on SIG\w+ \| step (\d+)", run.out)}
    assert [stops(run.out, rank) for rank in (0, 1)] == [1, 1]
    (resumed,) = run_forked([(2, [*words, "--resume", "--max_steps", last + 3])])
    for rank in (0, 1):
        steps = [step for _, step, _ in run.steps(rank) + resumed.steps(rank)]
        assert steps == [*range(1, last + 4)]


@pytest.mark.slow
def test_a_stop_that_saves_nothing_ends_with_128_and_the_signals_number(training, tmp_path):
    with launch(SINGLE, tmp_path, *training) as started:
        started.wait_for(STEP_3)
        started.signal(signal.SIGINT)
        end_within(10, [started], 128 + signal.SIGINT)


@pytest.mark.slow
def test_a_stop_of_one_node_that_saves_nothing_ends_both_with_its_number(training, tmp_path):
    with two_nodes(tmp_path) as nodes:
        started = nodes.train(*training)
        started[1].signal(signal.SIGTERM)
        end_within(10, started, 128 + signal.SIGTERM)


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


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.slow)]
)
def test_a_stop_while_waiting_for_the_other_node_ends_at_once(training, tmp_path, name, code):
    with two_nodes(tmp_path) as nodes:
        started = nodes.start(0, *training)
        wait_until(nodes.listens, 60, "node 0 to wait for the other")
        started.signal(signal.Signals[name])
        end_within(5, [started], code)


@pytest.mark.slow
def test_a_stop_before_the_first_step_ends_at_once_and_is_not_called_saved(training, tmp_path):
    """While the ranks still load their libraries; a file of that name is of an earlier run."""
    (tmp_path / "old.pt").touch()
    with launch(SINGLE, tmp_path, *training, "--checkpoint", "old.pt") as started:
        wait_until(lambda: has_rank(started), 60, "a rank")
        started.signal(signal.SIGTERM)
        (run,) = end_within(10, [started], 128 + signal.SIGTERM)
    assert not run.steps()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored_except_usr1(training, tmp_path, name):
    """As SIGINT is where a script starts the run with "&". Each epoch ends with an agreement."""
    ignoring = ["sh", "-c", 'trap "" INT TERM USR1; exec "$@"', "sh"]
    command = demo_command([*training, "--checkpoint", tmp_path / "c.pt"], launcher="python")
    with start([*ignoring, *command]) as started:
        started.wait_for(r"\| Step 1 ")
        started.signal(signal.Signals[name])
        epoch = started.text().count(" complete | ")
        started.wait_for(f"Epoch {epoch + 2} complete")
        started.signal(signal.SIGUSR1)
        end_within(10, [started], SAVED)


TWO_NODES = ROOT / "tools" / "two_nodes.sh"
LAUNCHERS = [
    SINGLE,
    *(pytest.param(other, marks=pytest.mark.slow) for other in (MULTINODE, TWO_NODES)),
]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda path: path.name)
def test_a_stop_while_the_sample_set_is_made_ends_at_once(tmp_path, launcher):
    if launcher == TWO_NODES:
        require_namespaces()
    project = copy_project(tmp_path)
    with launch(project / launcher.relative_to(ROOT), tmp_path) as started:
        wait_until(lambda: started.pids("make_sample"), 60, "the sample set")
        started.signal(signal.SIGTERM)
        started.finish(10, 128 + signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "first"),
    [("--network one=lo --network two=lo", "one"), ("--processes 1,2", "p1")],
)
def test_a_hang_up_in_the_first_of_two_runs_saves_and_ends_the_series(
    training, tmp_path, runs, first
):
    """The checkpoint is in the run's own folder, under the name that was given."""
    words = [*runs.split(), "--", *training, "--checkpoint", tmp_path / "c.pt"]
    with launch_series(tmp_path, *words) as started:
        started.wait_for(STEP_3)
        started.signal(signal.SIGHUP)
        end_within(10, [started], SAVED)
    assert [path.name for path in (tmp_path / "logs/run").iterdir()] == [first]
    assert (tmp_path / "logs/run" / first / "c.pt").stat().st_size > 0


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
