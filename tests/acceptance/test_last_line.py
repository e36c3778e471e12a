"""A start by the launchers to its end: signals, restarts, and the last line that says why."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from run import QUOTED
from support.datasets import make_set
from support.launchers import (
    COMMAND,
    FAST,
    HERE,
    LOG,
    NO_SAMPLE,
    SAVED,
    SINGLE,
    STOPS,
    launch,
    launch_series,
    project_with,
    starts,
)
from support.made_logs import made_runs
from support.nodes import small_disk
from support.processes import free_ports, processes, start, wait_until

# --- Real trainings ----------------------------------------------------------------------------


@pytest.mark.slow
def test_under_nohup_only_a_killed_loader_worker_costs_a_restart(folder):
    """And a hang-up is ignored."""
    words = [*make_set(folder / "set", 64), *FAST, "--num_epochs", 2, "--checkpoint_every", 4]
    command = ["nohup", "bash", SINGLE, *words, "--timeout", 8, "--workers", 1]
    with start(command, env=HERE | {"RESTARTS": "1"}, cwd=folder) as started:
        started.wait_for(r"\| Step 5 ")
        os.killpg(started.pid, signal.SIGHUP)  # as a terminal does when it is closed
        rank = started.rank_pid(0)
        (worker,) = [p.pid for p in processes(started.test_id) if p.parent == rank]
        os.kill(worker, signal.SIGKILL)
        run = started.finish(180)
    assert starts(run.out) == 2 and "Stopped on" not in run.out
    resumed = run.json_line("Run")["start_step"]
    steps = [step for _, step, _ in run.steps()]
    assert 4 <= resumed < 32 and steps[resumed - 32 :] == list(range(resumed + 1, 33))
    assert (folder / "logs/run/checkpoint.pt").is_file()


# --- Ends: a real torchrun, and a script that does at once what a training may come to ---------


ECHOES = """
for n in range(3):
    line = f"[CPU {os.environ['RANK']}] {n} {sys.argv[-1]}\\n"
    os.write(1, os.fsencode(line))  # in one piece, as the real script does
"""


def test_in_the_background_it_logs_all_lines_of_two_processes(folder):
    """SIGINT is ignored there. The argument has a space and an accent, of which the locale knows
    nothing.
    """
    words = [project_with(folder, ECHOES) / SINGLE.name, *NO_SAMPLE, "ein Gerät"]
    background = ["bash", "-c", 'bash "$@" & wait "$!"', "bash", *words]
    with start(background, env=HERE | {"GPUS": "2", "LC_ALL": "C"}, cwd=folder) as started:
        run = started.finish(60)
    for text in (run.out, (folder / LOG).read_text()):
        lines = text[COMMAND.search(text).end() :].splitlines()
        for rank in (0, 1):
            own = [f"[CPU {rank}] {n} ein Gerät" for n in range(3)]
            assert [line for line in lines if line.startswith(f"[CPU {rank}]")] == own


# The rank is killed over the first network, and finds an error of the user's over the second one.
KILLED = """
if "/two/" in " ".join(sys.argv):
    record("UserError", "folder nowhere: No such file or directory")
    sys.exit(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_start_is_repeated_but_no_user_error(folder):
    """Nor is there a run after that one. Each start has a port and an id of its own: torchrun
    makes a folder of that name. The error is the last line.
    """
    project_with(folder, KILLED)
    port = free_ports(18)
    words = [word for label in ("one", "two", "three") for word in ("--network", f"{label}=lo")]
    words += ["--repeats", 2, "--", *NO_SAMPLE]
    with launch_series(folder, *words, RESTARTS=1, MASTER_PORT=port) as started:
        run = started.finish(180, expect=2)
    commands = [shlex.split(line) for line in COMMAND.findall(run.out)]
    ids = ["run-one-r1-0", "run-one-r1-2", "run-two-r1-0"]
    for command, n, name in zip(commands, (0, 2, 3), ids, strict=True):
        assert {f"--rdzv_endpoint=localhost:{port + n}", f"--rdzv_id={name}"} <= {*command}
        assert ("--resume" in command) == (n == 2)
    first = (folder / "logs/run/one/r1/node0.log").read_text().splitlines()
    reason = r".*(SIGKILL|exitcode *: -9)"
    assert [line for line in first if re.search(f"restart 1 of 1, after: {reason}", line)]
    assert re.search(f"error: {reason}", first[-1]) and first[-1] in run.lines()
    assert "error: one/r1 has failed" in run.out
    assert run.lines()[-1].endswith("error: folder nowhere: No such file or directory")


# A run of one process that is over at once, with all of its records. One of a series is killed.
COMPLETE = """
if "/one/r2/" in " ".join(sys.argv):
    os.kill(os.getpid(), signal.SIGKILL)
print({text!r}, end="", flush=True)
"""


@pytest.mark.slow
def test_one_lost_run_amid_four_leaves_three_to_be_compared(folder):
    words = ["= x", "probe none", 'run {"world_size": 1, "nodes": 1, "backend": "gloo"}']
    (made,) = made_runs(words)
    project_with(folder, COMPLETE.format(text=made.text()))
    words = ["--network", "one=lo", "--network", "two=lo", "--repeats", 4, "--", *NO_SAMPLE]
    with launch_series(folder, *words, "--checkpoint", "c.pt") as started:
        run = started.finish(240, expect=1)
    assert starts(run.out) == 8 and "error: one/r2 has failed" in run.out
    assert "report: logs/run/compare.md" in run.lines()[-1]
    report = (folder / "logs/run/compare.md").read_text()
    assert "medians of 3 runs" in report and "medians of 4 runs" in report
    assert "one/r2 is left out" in report


def test_a_stop_signal_reaches_the_ranks_as_sigterm(folder):
    """It is no failure: there is no restart. The last lines are in the log, too. For signals to
    all processes see test_stop_signals.py.
    """
    project = project_with(folder, STOPS)
    with launch(project / SINGLE.name, folder, *NO_SAMPLE, RESTARTS=1) as started:
        started.wait_for(r"\] trains")
        started.signal(signal.SIGINT)
        run = started.finish(60, SAVED)
    assert "got signal: 15" in run.out  # torchrun has lived to pass it on
    last = r"stopped by SIGINT: --resume goes on from \S+/checkpoint\.pt$"
    for lines in (run.lines(), (folder / LOG).read_text().splitlines()):
        assert "Stopped on SIGTERM | step 3 | saved | exit code 75" in lines
        assert re.search(last, lines[-1])


@pytest.mark.slow
def test_ranks_that_fail_after_a_stop_signal_are_not_started_again(folder):
    project = project_with(folder, STOPS.replace("TERM, stop", "TERM, lambda *_: os._exit(1)"))
    with launch(project / SINGLE.name, folder, *NO_SAMPLE, RESTARTS=1) as started:
        started.wait_for(r"\] trains")
        started.signal(signal.SIGINT)
        run = started.finish(60, expect=128 + signal.SIGINT)
    assert starts(run.out) == 1


DEAF = STOPS.replace("TERM, stop", "TERM, lambda *_: print('heard', flush=True)")
DEAF = DEAF.replace("sleep(15)", "sleep(200)")


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_no_rank(folder):
    """Of two that do not answer, at once, and without a restart."""
    project = project_with(folder, DEAF)
    with launch(project / SINGLE.name, folder, *NO_SAMPLE, GPUS=2, RESTARTS=1) as started:
        for rank in (0, 1):
            started.wait_for(rf"CPU {rank}\] trains")
        started.signal(signal.SIGINT)
        started.wait_for("heard")
        assert started.running()
        started.signal(signal.SIGINT)
        run = started.finish(10, expect=128 + signal.SIGINT)
    assert starts(run.out) == 1


# --- The log -----------------------------------------------------------------------------------

SLOW_LINES = """
for n in range(50):
    print("[CPU 0] line", n, flush=True)
    time.sleep(0.1)
open("over", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_kill_or_a_stop_of_run_py_the_log_is_whole(folder, number):
    """And the training goes on. Ctrl-Z stops it as SIGSTOP does."""
    project = project_with(folder, SLOW_LINES)
    with launch(project / SINGLE.name, folder, *NO_SAMPLE) as started:
        started.wait_for("line 5")
        os.kill(started.pid, number)  # the launcher has become run.py
        wait_until((folder / "over").exists, 30, "its end")
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGCONT)
        wait_until(lambda: not started.pids("run.py"), 10, "the end of the log's writer")
    assert "[CPU 0] line 49" in (folder / LOG).read_text()


MANY_LINES = """
for n in range(20000):
    print("[CPU 0] line", n, flush=True)
open("over", "w").close()
"""


@pytest.mark.slow
def test_a_full_disk_of_the_log_is_no_reason_to_stop_but_is_said(folder):
    project = project_with(folder, MANY_LINES)
    with small_disk(folder / "disk", "100k") as disk:
        own = {"LOG_DIR": disk, "RESTARTS": 1, "RUN_NAME": "full"}
        with launch(project / SINGLE.name, folder, *NO_SAMPLE, **own) as started:
            run = started.finish(60, expect=1)
        assert (disk / "full/node0.log").stat().st_size < 2**17
    assert starts(run.out) == 1
    assert f"error: the log {disk}/full/node0.log cannot be written" in run.lines()[-1]
    assert "[CPU 0] line 19999" in run.lines() and (folder / "over").exists()


# Runs a command whose screen is a pipe that does not block, as with some CI systems. After the
# first line of the script it reads nothing for some seconds; then it shows all that has come.
LATE_READER = """
import os, subprocess, sys, time

source, pipe = os.pipe()
os.set_blocking(pipe, False)
process = subprocess.Popen(sys.argv[1:], stdout=pipe, stderr=pipe)
os.close(pipe)
text = b""
while b"[CPU 0] line" not in text and (more := os.read(source, 100)):
    text += more
time.sleep(5)
while more := os.read(source, 1 << 16):
    text += more
os.write(1, text[-4000:])
sys.exit(process.wait())
"""
READERS = {
    "late": [sys.executable, "-c", LATE_READER],
    "gone": ["bash", "-c", '"$@" 2>&1 | head -n 1; exit "${PIPESTATUS[0]}"', "bash"],
}


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_that_goes_away_or_is_late_changes_nothing(folder, reader):
    words = ["bash", project_with(folder, MANY_LINES) / SINGLE.name, *NO_SAMPLE]
    with start([*READERS[reader], *words], env=HERE, cwd=folder) as started:
        run = started.finish(90)
    lines = [x for x in (folder / LOG).read_text().splitlines() if x.startswith("[CPU 0]")]
    assert lines == [f"[CPU 0] line {n}" for n in range(20000)]
    assert (folder / "over").exists()
    assert ("[CPU 0] line 19999" in run.out) == (reader == "late")


def test_torchrun_and_pytorch_have_the_words_that_are_quoted():
    """What decides are exit codes and records, see test_run_and_series.py."""
    nccl, killed = QUOTED
    rank = ProcessFailure(local_rank=0, pid=7, exitcode=-9, error_file="none")
    report = ChildFailedError("script", {0: rank}).format_msg()
    assert re.search(killed, report), report
    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if library.exists():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            assert [text.find(words.encode()) > 0 for words in nccl.split("|")] == [True] * 3
