"""How a run ends: a slow rank, what torchrun learns and restarts, failed starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket

import pytest

from support.datasets import make_set
from support.forks import QUICK, Forked, changed, run_forked
from support.launchers import FAST, STEP_3
from support.processes import demo_command, free_port, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of 12 steps of two processes that saves every second one."""
    folder = tmp_path_factory.mktemp("set")
    saves = ["--checkpoint", str(folder / "c.pt"), "--checkpoint_every", "2", "--num_epochs", "3"]
    return [*FAST, *make_set(folder, 32), *saves, "--timeout", "8"]


# A validation batch takes rank 1 this much longer: 20 batches more than --timeout.
SLOW_RANK = """
class Slow(Small):
    def forward(self, images):
        if not self.training and os.environ["RANK"] == "1":
            time.sleep(0.6)
        return super().forward(images)

demo.torchvision.models.resnet18 = Slow
"""


def test_a_rank_that_is_slow_in_validation_is_waited_for(tmp_path):
    """Each of its batches is quicker than that."""
    words = [*FAST, *make_set(tmp_path, 8, val=80), "--batch_size", 2, "--num_epochs", 1]
    program = changed(tmp_path / "slow.py", SLOW_RANK)
    (run,) = run_forked([(2, [*words, "--timeout", 8])], program)
    (seconds,) = re.findall(r"validation \| .* \| 80 images \| ([\d.]+)s", run.out)
    assert float(seconds) > 8


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
    words = training[: training.index("--checkpoint")]
    variables = {"TORCHELASTIC_ERROR_FILE": f"{tmp_path}/{{rank}}.json"}

    def recorded(rank):
        text = json.loads((tmp_path / f"{rank}.json").read_text())["message"]["message"]
        return text.split(": ", 1)

    run_forked([(1, ["--nothing"], variables)], program, expect=2)
    kind, text = recorded(0)
    assert kind == "UserError" and "--nothing" in text
    run_forked([(2, [*words, "--global_batch_size", 3], variables)], program, expect=2)
    assert [recorded(rank)[0] for rank in (0, 1)] == ["UserError", "UserError"]
    run_forked([(2, words, variables)], program, expect=1)
    assert recorded(0) == ["RuntimeError", "something of rank 0 alone"]
    assert recorded(1)[0] == "PeerLost"
    saves = ["--checkpoint", tmp_path / "c.pt"]
    for more, code, end in ((saves, 75, "| saved"), ([], 1, "| not saved: no --checkpoint")):
        with Forked(2, [*words, *more, "--num_epochs", 999], variables, QUICK) as started:
            started.wait_for(STEP_3)
            started.signal(signal.SIGTERM)
            started.finish(60, expect=code)
        kind, text = recorded(0)
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
OPEN_MPI |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
STARTS = [  # ranks, variables, and what each rank says
    (2, {"GLOO_SOCKET_IFNAME": "nope0"}, r"gloo on its cpu\? Is GLOO_SOCKET_IFNAME \(nope0\)"),
    (0, RANK_1, r"with 127\.0\.0\.1:PORT as rank 0's address"),
    (0, OPEN_MPI, "1/2 clients joined.*with .*:PORT as rank 0's address"),
    # A server that is not rank 0: it keeps this rank from its port, or does not answer it.
    (0, RANK_1 | {"RANK": "0", "MASTER_PORT": "TAKEN"}, "in use.*with .*:TAKEN as rank 0's"),
    (0, RANK_1 | {"MASTER_PORT": "TAKEN"}, "in 4 s. Has each rank started, with .*:TAKEN"),
]


def test_a_start_that_fails_says_what_to_check(training):
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
