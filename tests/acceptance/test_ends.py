"""How a run ends: what one rank alone meets, torchrun's own restart, failed starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket

import pytest

from support.datasets import make_set, met_by, truncate
from support.forks import QUICK, Forked, changed, run_forked
from support.launchers import FAST, SINGLE, STEP_3, changed_project, launch, starts
from support.processes import Run, demo_command, free_port, start, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 12 steps of two processes that saves every second one."""
    folder = tmp_path_factory.mktemp("set")
    saves = ["--checkpoint", str(folder / "c.pt"), "--checkpoint_every", "2", "--num_epochs", "3"]
    return [*FAST, *make_set(folder, 32), *saves, "--timeout", "8"]


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

plain, note_line = note_line, failing

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
    log(process, "Stopped on SIGTERM | step 3 | saved | exit code 75")
    end_process(75, process)

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
    reason = r"restart 1 of 1, after: RuntimeError: .*rank 0 alone.*\n.*torchrun .* --resume$"
    first, second = re.split(reason, failed_twice.out, flags=re.MULTILINE)
    assert "[CPU 1] Stopped on SIGTERM" in first and starts(second) == 0


def test_what_nccls_watchdog_says_is_the_last_line(failed_twice):
    """Beside a rank that is killed. For the reason of a restart, and a watchdog alone, see
    `judge` in test_last_line.py.
    """
    assert WATCHDOG in failed_twice.lines()[-1]


def test_a_damaged_image_that_one_rank_meets_ends_all_within_seconds_with_one_line(tmp_path):
    """There is no restart."""
    images = make_set(tmp_path, 32, size=(200, 160))
    words = [*FAST, *images, "--workers", 1, "--num_epochs", 2]
    damaged = tmp_path / "images" / met_by(1, 32)
    truncate(damaged)
    with launch(SINGLE, tmp_path, *words, GPUS=2, RESTARTS=1) as started:
        name = re.escape(str(damaged))
        started.wait_for(rf"^\[CPU 1\] ERROR: .*{name}.*truncated.*check_coco.py --decode")
        wait_until(lambda: not started.pids(), 10, "the end of all processes")
        assert started.process.wait() == 2
        text = started.text()
    assert len(re.findall(rf"^\[CPU \d\] .*{damaged.name}", text, re.MULTILINE)) == 1
    assert starts(text) == 1
    assert not re.search(r"^\[CPU 1\] .*(Traceback|DataLoader)", text, re.MULTILINE)


# A validation batch takes rank 1 this much longer: 20 batches more than --timeout.
SLOW_RANK = """
class Slow(Small):
    def forward(self, images):
        if not self.training and os.environ["RANK"] == "1":
            time.sleep(0.6)
        return super().forward(images)

demo.torchvision.models.resnet18 = Slow
"""


def test_a_rank_that_is_slower_in_validation_by_more_than_the_timeout_is_waited_for(tmp_path):
    """Each of its batches is quicker than that."""
    words = [*FAST, *make_set(tmp_path, 8, val=80), "--batch_size", 2, "--num_epochs", 1]
    program = changed(tmp_path / "slow.py", SLOW_RANK)
    (run,) = run_forked([(2, [*words, "--timeout", 8])], program)
    (seconds,) = re.findall(r"validation \| .* \| 80 images \| ([\d.]+)s", run.out)
    assert float(seconds) > 8


NO_MEMORY = """
def failing(training, *rest):
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 602112000 bytes."
    raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {text} Error code 12")

note_line = failing

"""


def test_a_run_that_is_out_of_memory_is_not_started_again(training, tmp_path):
    project = changed_project(tmp_path, NO_MEMORY)
    saves = ["--checkpoint", tmp_path / "c.pt"]
    with launch(project / SINGLE.name, tmp_path, *training, *saves, GPUS=1, RESTARTS=1) as started:
        run = started.finish(240, expect=None)
    assert run.returncode != 0 and "can't allocate memory" in run.out
    assert starts(run.out) == 1


# --- What torchrun learns of an end ------------------------------------------------------------

RAISES = """
def failing(training, *rest):
    plain(training, *rest)
    if training.step == 3 and dist.get_rank() == 0:
        raise RuntimeError("something of rank 0 alone")

plain, demo.note_line, dist = demo.note_line, failing, demo.dist
"""


def test_each_end_is_recorded_with_the_class_that_says_whose_it_is(training, tmp_path):
    """In the file that torchrun names."""
    program = changed(tmp_path / "raises.py", RAISES)
    words, place = training[: training.index("--checkpoint")], f"{tmp_path}/{{rank}}.json"
    variables = {"TORCHELASTIC_ERROR_FILE": place}

    def recorded(ranks):
        files = [tmp_path / f"{rank}.json" for rank in range(ranks)]
        texts = [json.loads(file.read_text())["message"]["message"] for file in files]
        return [text.split(": ", 1) for text in texts]

    run_forked([(1, ["--nothing"], variables)], program, expect=2)
    ((kind, text),) = recorded(1)
    assert kind == "UserError" and "--nothing" in text
    run_forked([(2, [*words, "--global_batch_size", 3], variables)], program, expect=2)
    assert [kind for kind, _ in recorded(2)] == ["UserError", "UserError"]
    run_forked([(2, words, variables)], program, expect=1)
    (own, text), (peer, _) = recorded(2)
    assert (own, peer) == ("RuntimeError", "PeerLost") and "something of rank 0 alone" in text
    saves = ["--checkpoint", tmp_path / "c.pt"]
    for more, code, end in ((saves, 75, "| saved"), ([], 1, "| not saved: no --checkpoint")):
        with Forked(2, [*words, *more, "--num_epochs", 999], variables, QUICK) as started:
            started.wait_for(STEP_3)
            started.signal(signal.SIGTERM)
            started.finish(60, expect=code)
        (kind, text), _ = recorded(2)
        assert kind == "Stopped" and "Stopped on SIGTERM" in text and end in text


# --- torchrun alone ----------------------------------------------------------------------------


def test_torchruns_own_restart_resumes_and_a_stop_of_torchrun_saves(training, tmp_path):
    """It repeats the first command, which therefore has --resume. After a signal torchrun itself
    ends with 1.
    """
    words = [*training, "--num_epochs", 999, "--checkpoint", tmp_path / "c.pt", "--resume"]
    words = demo_command(words, nproc=2)
    words.insert(words.index("--nnodes=1"), "--max-restarts=1")
    with start(words) as started:
        started.wait_for(STEP_3)
        os.kill(started.rank_pid(1), signal.SIGKILL)
        started.wait_for(r"Run \{[\s\S]*Run \{[\s\S]*\[CPU 1\] .*\| Step ")
        started.signal(signal.SIGTERM)
        run = started.finish(60, expect=1)
    assert run.json_line("Run")["start_step"] >= 2
    steps = re.findall(r"\[CPU \d\] Stopped on SIGTERM \| step (\d+)", run.out)
    assert len(steps) == 2 and steps[0] == steps[1]


# --- A start that fails ------------------------------------------------------------------------

RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MPI_0 = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPI_1 = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
STARTS = [  # ranks, variables, and what each rank says
    (2, {"GLOO_SOCKET_IFNAME": "nope0"}, r"gloo on its cpu\? Is GLOO_SOCKET_IFNAME \(nope0\)"),
    (0, RANK_1 | {"MASTER_ADDR": "127.0.0.9"}, r"with 127\.0\.0\.9:PORT as rank 0's address"),
    (0, RANK_1, r"with 127\.0\.0\.1:PORT as rank 0's address"),
    (0, OPEN_MPI | MPI_0, "1/2 clients joined.*with .*:PORT as rank 0's address"),
    (0, OPEN_MPI | MPI_1, r"with 127\.0\.0\.1:PORT as rank 0's address"),
    # A server that is not rank 0: it keeps this rank from its port, or does not answer it.
    (0, RANK_1 | {"RANK": "0", "MASTER_PORT": "TAKEN"}, "in use.*with .*:TAKEN as rank 0's"),
    (0, RANK_1 | {"MASTER_PORT": "TAKEN"}, "in 4 s. Has each rank started, with .*:TAKEN"),
]


def test_a_start_that_fails_ends_soon_after_the_timeout_and_says_what_to_check(training):
    with socket.create_server(("", 0)) as server, contextlib.ExitStack() as stack:
        ports = {"TAKEN": str(server.getsockname()[1])}
        started = []
        for ranks, variables, _ in STARTS:
            ports["PORT"] = str(free_port())
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports["PORT"]} if not ranks else {}
            place |= {name: ports.get(value, value) for name, value in variables.items()}
            run = Forked(ranks, [*training, "--timeout", 4], place, QUICK)
            started.append((stack.enter_context(run), ports["PORT"]))
        for (run, port), (ranks, _, words) in zip(started, STARTS, strict=True):
            lines = [line for line in run.finish(4 + 15, expect=1).lines() if "ERROR: " in line]
            assert len(lines) == max(1, ranks)
            words = words.replace("PORT", port).replace("TAKEN", ports["TAKEN"])
            for line in lines:
                assert re.search(words, line), line
