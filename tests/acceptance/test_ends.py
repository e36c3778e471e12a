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
from support.forks import run_forked
from support.launchers import (
    FAST,
    MULTINODE,
    SAVED,
    SINGLE,
    STEP_3,
    changed_project,
    end_within,
    launch,
    starts,
    two_nodes,
)
from support.nodes import NamespacePair
from support.processes import LONG, SCRIPT, demo_command, start

pytestmark = LONG


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 12 steps of two processes that saves every second one."""
    images = make_set(tmp_path_factory.mktemp("set"), 32)
    saves = ["--checkpoint_every", "2", "--num_epochs", "3"]
    return [*FAST, *images, *saves, "--timeout", "8"]


# --- What one rank alone meets -----------------------------------------------------------------

# At step 3 of each start.
FAILS = """
def failing(training, *rest):
    plain(training, *rest)
    if training.step == 3:
        fail(training)

plain, finish_step = finish_step, failing

"""
# PyTorch's words, and the signal with which its watchdog ends a process. It has threads of its
# own, so the main thread is deaf meanwhile: that of the other rank, too, until it is killed.
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
OpType=ALLREDUCE, NumelIn=11217552, NumelOut=11217552, Timeout(ms)=8000) ran for 8045 \
milliseconds before timing out."
ABORTED = (
    FAILS
    + f"""
def fail(training):
    if training.process.rank == 0:
        os.write(2, b"[rank0]:[E101 12:00:00.1 ProcessGroupNCCL.cpp:683] {WATCHDOG}\\n")
        os.kill(os.getpid(), signal.SIGABRT)
    if not training.args.resume:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(5)
        os.kill(os.getpid(), signal.SIGKILL)

"""
)


def test_what_nccls_watchdog_says_is_the_reason_of_a_restart_and_the_last_line(training, tmp_path):
    """Beside a rank that is killed in the first start, alone in the second."""
    project = changed_project(tmp_path, ABORTED)
    with launch(project / SINGLE.name, tmp_path, *training, GPUS=2, RESTARTS=1) as started:
        run = started.finish(240, expect=1)
    (reason,) = re.findall("restart 1 of 1, after: (.*)", run.out)
    assert WATCHDOG in reason and WATCHDOG in run.lines()[-1]


ENDED_BY_TORCHRUN = (
    FAILS
    + """
def fail(training):
    if training.process.rank == 0:
        time.sleep(1)
        raise RuntimeError("something of rank 0 alone")
    signal.signal(signal.SIGTERM, lambda *_: stopped(training.process))
    time.sleep(60)

def stopped(process):
    log(process, "Stopped on SIGTERM | step 3 | exit code 75")
    end_process(75)

"""
)


def test_a_rank_that_torchrun_stops_after_another_has_failed_is_no_stop_of_the_user(
    training, tmp_path
):
    """It is restarted."""
    project = changed_project(tmp_path, ENDED_BY_TORCHRUN)
    with launch(project / SINGLE.name, tmp_path, *training, GPUS=2, RESTARTS=1) as started:
        started.wait_for(r"restart 1 of 1, after: \[CPU 0\] ERROR: .*\n.*torchrun .* --resume$")
        assert "Stopped on SIGTERM" in started.text() and starts(started.text()) == 2


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


def test_a_stop_in_the_validation_of_a_minute_on_one_node_saves_on_both(tmp_path):
    project = changed_project(tmp_path, SLOW_VALIDATION)
    words = [*make_set(tmp_path / "set", 8, val=120), *FAST, "--checkpoint", tmp_path / "c.pt"]
    with two_nodes(tmp_path) as nodes:
        nodes.launcher = project / MULTINODE.name
        started = nodes.start_both(*words)
        started[0].wait_for("Epoch 1 complete", 60)
        started[0].signal(signal.SIGTERM)
        end_within(15, started, SAVED)
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
    words = demo_command([*training, "--checkpoint", tmp_path / "c.pt"], nproc=2)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    with start(words) as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(1), signal.SIGKILL)
        run = started.finish(120)
    assert run.json_line("Run")["start_step"] >= 2 and run.steps(1)[-1][1] == 12
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
        ended = run_forked(runs, enter=pair.enter(1, []), expect=1, trains=False)
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
