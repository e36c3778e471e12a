"""How a run ends: what one rank alone meets, stops that come at bad moments, failed starts.

The script of a changed copy of the project does what hardware would do.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from support.datasets import make_set
from support.forks import Forked, run_forked
from support.launchers import (
    BUSY,
    FAST,
    SAVED,
    SINGLE,
    STEP_3,
    changed_project,
    end_within,
    launch,
    starts,
)
from support.nodes import NamespacePair
from support.processes import LONG, SCRIPT, Run, demo_command, start

pytestmark = LONG


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 12 steps of two processes that saves every second one."""
    images = make_set(tmp_path_factory.mktemp("set"), 32)
    saves = ["--checkpoint_every", "2", "--num_epochs", "3"]
    return [*FAST, *images, *saves, "--timeout", "8"]


# --- What one rank alone meets -----------------------------------------------------------------

# PyTorch's words, and the signal with which its watchdog ends a process. It has threads of its
# own, so the main thread is deaf meanwhile: that of the other rank, too, until it is killed.
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
OpType=ALLREDUCE, NumelIn=11217552, NumelOut=11217552, Timeout(ms)=8000) ran for 8045 \
milliseconds before timing out."
# At step 3 of the first start, and at step 5 of the second one.
FAULTS = f"""
def failing(training, *rest):
    plain(training, *rest)
    if training.step == 3 and not training.args.resume:
        one_raises(training.process)
    if training.step == 5:
        both_are_ended(training.process)

plain, finish_step = finish_step, failing

def both_are_ended(process):
    if process.rank == 0:
        os.write(2, b"[rank0]:[E101 12:00:00.1 ProcessGroupNCCL.cpp:683] {WATCHDOG}\\n")
        os.kill(os.getpid(), signal.SIGABRT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(5)
    os.kill(os.getpid(), signal.SIGKILL)

def one_raises(process):
    if process.rank == 0:
        time.sleep(1)
        raise RuntimeError("something of rank 0 alone")
    signal.signal(signal.SIGTERM, lambda *_: stopped(process))
    time.sleep(60)

def stopped(process):
    log(process, "Stopped on SIGTERM | step 3 | exit code 75")
    end_process(75)

"""


@pytest.fixture(scope="module")
def failed_twice(training, tmp_path_factory) -> Run:
    """Two ranks that are restarted once, and fail in each start."""
    folder = tmp_path_factory.mktemp("failed")
    project = changed_project(folder, FAULTS)
    with launch(project / SINGLE.name, folder, *training, GPUS=2, RESTARTS=1) as started:
        return started.finish(240, expect=1)


def test_a_rank_that_torchrun_stops_after_another_has_failed_is_no_stop_of_the_user(failed_twice):
    """It is restarted."""
    reason = r"restart 1 of 1, after: \[CPU 0\] ERROR: .*rank 0 alone.*\n.*torchrun .* --resume$"
    first, second = re.split(reason, failed_twice.out, flags=re.MULTILINE)
    assert "[CPU 1] Stopped on SIGTERM" in first and starts(second) == 0


def test_what_nccls_watchdog_says_is_the_last_line(failed_twice):
    """Beside a rank that is killed. For the reason of a restart, and a watchdog alone, see
    `judge_end` in test_launchers.py.
    """
    assert WATCHDOG in failed_twice.lines()[-1]


# Of the rank that the last argument names.
NAN = """
def not_a_number(*inputs, **options):
    loss = plain(*inputs, **options)
    return loss * float("nan") if os.environ["RANK"] == sys.argv[-1] else loss

plain, cross_entropy = cross_entropy, not_a_number

"""


def test_a_loss_of_either_rank_that_is_not_a_number_ends_the_run(training, tmp_path):
    program = changed_project(tmp_path, NAN) / SCRIPT.name
    runs = [(2, [*training, "--seed", rank]) for rank in (0, 1)]
    for run in run_forked(runs, program=program, expect=2):
        assert re.search("ERROR: a loss up to step 1 is not finite: lower --lr", run.out)


# --- A stop at a bad moment --------------------------------------------------------------------

SLOW_VALIDATION = """
def slow(dataset, path):
    if "val_images" in path and os.environ["RANK"] == "1":
        time.sleep(1)
    return plain(dataset, path)

plain, CocoFirstCategory.load_image = CocoFirstCategory.load_image, slow

"""


def test_a_stop_in_the_validation_of_a_minute_on_one_rank_saves_on_both(tmp_path):
    program = changed_project(tmp_path, SLOW_VALIDATION) / SCRIPT.name
    words = [*make_set(tmp_path / "set", 8, val=120), *FAST, "--checkpoint", tmp_path / "c.pt"]
    with Forked(2, words, program=program) as started:
        started.wait_for("Epoch 1 complete", 60)
        os.kill(started.rank_pid(0), signal.SIGTERM)
        started.finish(BUSY, expect=75)
    assert (tmp_path / "c.pt").stat().st_size > 0


SLOW_STORAGE = """
def slow(dataset, path):
    number = next(numbers)
    time.sleep(0.25 if number > 120 else 0)
    return plain(dataset, path)

import itertools
numbers = itertools.count()
plain, CocoFirstCategory.load_image = CocoFirstCategory.load_image, slow

"""


def test_a_stop_after_the_storage_has_become_slow_saves(tmp_path):
    """A step takes a second then. The ranks agree at the latest after 20 of them."""
    project = changed_project(tmp_path, SLOW_STORAGE)
    words = [*make_set(tmp_path / "set", 400), *FAST, "--checkpoint", tmp_path / "c.pt"]
    words += ["--log_every", 31]
    with start([sys.executable, project / SCRIPT.name, *words]) as started:
        started.wait_for(r"\| Step 32 ", 60)
        time.sleep(2)
        started.signal(signal.SIGTERM)
        (run,) = end_within(25, [started], SAVED)
    assert "Stopped on SIGTERM" in run.lines(0)[-1]


def test_torchruns_own_restart_resumes(training, tmp_path):
    """It repeats the first command, which has no --resume. A checkpoint that was there before is
    not what it goes on from.
    """
    (tmp_path / "c.pt").write_text("of an earlier run")
    words = [*training, "--max_steps", 8, "--checkpoint", tmp_path / "c.pt"]
    words = demo_command(words, nproc=2)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    with start(words) as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(1), signal.SIGKILL)
        run = started.finish(120)
    assert run.json_line("Run")["start_step"] >= 2 and run.steps(1)[-1][1] == 8
    (earlier,) = tmp_path.glob("c.pt.*")
    assert earlier.read_text() == "of an earlier run" and f"renamed to {earlier}" in run.out


# --- A start that fails ------------------------------------------------------------------------

NODE_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
NODE_1 |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OPEN_MPI |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
STARTS = {  # ranks, their variables
    "interface": (2, {"GLOO_SOCKET_IFNAME": "nope0"}),
    "address": (0, NODE_1 | {"MASTER_ADDR": "10.77.0.9"}),
    "port": (0, NODE_1 | {"MASTER_PORT": "29777"}),
    "absent rank of mpirun": (
        0,
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ),
    "port under mpirun": (
        0,
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    ),
}


@pytest.fixture(scope="module")
def errors(training) -> dict[str, list[str]]:
    """The error lines of each of these starts, on node 1 of two nodes."""
    words = [*training, "--timeout", 4]
    runs = [(ranks, words, variables) for ranks, variables in STARTS.values()]
    with NamespacePair() as pair:
        ended = run_forked(runs, enter=pair.enter(1, []), expect=1)
    found = [[line for line in run.lines() if "ERROR: " in line] for run in ended]
    assert [len(lines) for lines in found] == [max(1, ranks) for ranks, _ in STARTS.values()]
    return dict(zip(STARTS, found, strict=True))


def test_an_interface_that_does_not_exist_is_named_by_each_rank_and_no_rendezvous(errors):
    for line in errors["interface"]:
        assert "GLOO_SOCKET_IFNAME (nope0)" in line and "rendezvous" not in line


@pytest.mark.parametrize(("wrong", "value"), [("address", "10.77.0.9"), ("port", "29777")])
def test_a_wrong_address_or_port_is_called_a_rendezvous(errors, wrong, value):
    (line,) = errors[wrong]
    assert "rendezvous at " in line and value in line


def test_an_absent_rank_of_mpirun_is_called_a_rendezvous(errors):
    (line,) = errors["absent rank of mpirun"]
    assert "1/2 clients joined" in line and "did all nodes start" in line


def test_a_wrong_port_under_mpirun_is_called_a_rendezvous(errors):
    (line,) = errors["port under mpirun"]
    assert "rendezvous at 127.0.0.1:" in line and "did all nodes start" in line
