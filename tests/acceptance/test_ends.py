"""How a run ends: what one rank alone meets, stops that come at bad moments, failed starts.

The script of a changed copy of the project does what hardware would do.
"""

from __future__ import annotations

import os
import re
import shutil
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
    finish_all,
    launch,
    starts,
    two_nodes,
)
from support.nodes import NamespacePair
from support.processes import LONG, SCRIPT, Run, demo_command, free_port, require, start

pytestmark = LONG


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 12 steps of two processes that saves every second one."""
    images = make_set(tmp_path_factory.mktemp("set"), 32)
    saves = ["--checkpoint_every", "2", "--num_epochs", "3"]
    return [*FAST, *images, *saves, "--timeout", "8"]


# --- What one rank alone meets -----------------------------------------------------------------

# At step 3 of the first start.
FAILS = """
def failing(training, *rest):
    plain(training, *rest)
    if training.step == 3 and not training.args.resume:
        fail(training.process)

plain, finish_step = finish_step, failing

"""
FULL = (
    FAILS
    + """
def fail(process):
    if process.rank == 1:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

"""
)


def test_a_memory_that_is_full_on_one_node_alone_restarts_both(training, tmp_path):
    project = changed_project(tmp_path, FULL)
    with two_nodes(tmp_path) as nodes:
        nodes.launcher = project / MULTINODE.name
        runs = finish_all(nodes.start_both(*training, RESTARTS=1), 180)
    assert [starts(run.out) for run in runs] == [2, 2]
    assert "use a smaller --batch_size" in runs[1].out
    assert not re.search(r"exitcode +: 2\b", runs[0].out + runs[1].out)


# PyTorch's words, and the signal with which its watchdog ends a process. It has threads of its
# own, so the main thread is deaf meanwhile.
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, \
OpType=ALLREDUCE, NumelIn=11217552, NumelOut=11217552, Timeout(ms)=8000) ran for 8045 \
milliseconds before timing out."
ABORTED = (
    FAILS
    + f"""
def fail(process):
    if process.rank == 0:
        os.write(2, b"[rank0]:[E101 12:00:00.1 ProcessGroupNCCL.cpp:683] {WATCHDOG}\\n")
        os.kill(os.getpid(), signal.SIGABRT)
    if {{deaf}}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

"""
)


@pytest.mark.parametrize("deaf", [False, True], ids=["alone", "beside a rank that is killed"])
def test_what_nccls_watchdog_says_is_the_last_line_and_the_reason_of_a_restart(
    training, tmp_path, deaf
):
    project = changed_project(tmp_path, ABORTED.format(deaf=deaf))
    with launch(project / SINGLE.name, tmp_path, *training, GPUS=2, RESTARTS=1) as started:
        assert "Watchdog caught collective" in started.wait_for("restart 1 of 1, .*", 120)[0]
        started.finish(120)
    if not deaf:
        with launch(project / SINGLE.name, tmp_path, *training, GPUS=2, RUN_NAME="2") as started:
            run = started.finish(60, expect=1)
        assert WATCHDOG in run.lines()[-1]


ENDED_BY_TORCHRUN = (
    FAILS
    + """
def fail(process):
    if process.rank == 0:
        time.sleep(1)
        raise RuntimeError("something of rank 0 alone")
    signal.signal(signal.SIGTERM, lambda *_: stopped(process))
    time.sleep(60)

def stopped(process):
    log(process, "Stopped on SIGTERM | step 3 | exit code 75")
    end_process(75)

"""
)


def test_a_rank_that_torchrun_stops_after_another_has_failed_is_no_stop_of_the_user(
    training, tmp_path
):
    project = changed_project(tmp_path, ENDED_BY_TORCHRUN)
    with launch(project / SINGLE.name, tmp_path, *training, GPUS=2, RESTARTS=1) as started:
        run = started.finish(120)
    assert "Stopped on SIGTERM" in run.out and starts(run.out) == 2
    assert "restart 1 of 1, after: [CPU 0] ERROR: " in run.out


NAN = """
def not_a_number(*inputs, **options):
    loss = plain(*inputs, **options)
    return loss * float("nan") if os.environ["RANK"] == "{rank}" else loss

plain, cross_entropy = cross_entropy, not_a_number

"""


def test_a_loss_of_either_rank_that_is_not_a_number_ends_the_run(training, tmp_path):
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        project = changed_project(tmp_path / f"{rank}", NAN.format(rank=rank))
        program = project / SCRIPT.name
        (run,) = run_forked([(2, training)], program=program, expect=2)
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


def two_ranks(pair: NamespacePair, words: list[str], **variables: object) -> list[Run]:
    """By hand on two nodes; `variables` win."""
    place = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    place |= {"MASTER_ADDR": pair.addresses[0], "GLOO_SOCKET_IFNAME": pair.interface} | variables
    env = {name: str(value) for name, value in place.items()}
    command = [sys.executable, SCRIPT, *words]
    ranks = [pair.popen(n, command, env=env | {"RANK": str(n)}) for n in (0, 1)]
    return [rank.finish(60, expect=1) for rank in ranks]


def error(run: Run) -> str:
    (line,) = [line for line in run.lines() if "ERROR: " in line]
    return line


def test_an_interface_that_does_not_exist_is_named_and_no_rendezvous(training):
    with NamespacePair() as pair:
        for run in two_ranks(pair, training, GLOO_SOCKET_IFNAME="nope0"):
            assert "GLOO_SOCKET_IFNAME (nope0)" in error(run)
            assert "rendezvous" not in error(run)


@pytest.mark.parametrize("wrong", ["address", "port"])
def test_a_wrong_address_or_port_is_called_a_rendezvous(training, wrong):
    other = {"MASTER_ADDR": "10.77.0.9"} if wrong == "address" else {"MASTER_PORT": "29777"}
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "1"}
    place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"} | other
    with NamespacePair() as pair:
        command = [sys.executable, SCRIPT, *training, "--timeout", 4]
        run = pair.popen(1, command, env=place).finish(60, expect=1)
    assert "rendezvous at " in error(run) and next(iter(other.values())) in error(run)


def rank_of_mpirun(training: list[str], rank: int, local_size: int) -> str:
    """The error of one of two ranks that Open MPI should have started."""
    require(shutil.which("mpirun.openmpi"), "mpirun.openmpi (openmpi-bin) is not installed")
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    env |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with start([sys.executable, SCRIPT, *training, "--timeout", 4], env=env) as started:
        return error(started.finish(60, expect=1))


def test_an_absent_rank_of_mpirun_is_called_a_rendezvous(training):
    line = rank_of_mpirun(training, rank=0, local_size=2)
    assert "1/2 clients joined" in line and "did all nodes start" in line


def test_a_wrong_port_under_mpirun_is_called_a_rendezvous(training):
    line = rank_of_mpirun(training, rank=1, local_size=1)
    assert "rendezvous at 127.0.0.1:" in line and "did all nodes start" in line
