"""A start by the launchers to its end: signals, restarts, and the last line that says why."""

from __future__ import annotations

import mmap
import os
import re
import shlex
import signal
import subprocess
import traceback
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from support.datasets import make_set
from support.launchers import (
    COMMAND,
    FAST,
    HERE,
    LOG,
    MULTINODE,
    NO_SAMPLE,
    OTHER_RANK,
    SAVED,
    SINGLE,
    STOPS,
    copy_project,
    guarded,
    launch,
    project_with,
    starts,
)
from support.nodes import require_namespaces, small_disk
from support.processes import (
    LONG,
    ROOT,
    free_ports,
    processes,
    start,
    wait_until,
)

guards = pytest.mark.guards


# --- Real trainings ----------------------------------------------------------------------------


@LONG
def test_under_nohup_a_hang_up_is_ignored_and_a_killed_loader_worker_costs_a_restart(folder):
    training = [*make_set(folder / "set", 64), *FAST, "--num_epochs", 2]
    words = [*training, "--checkpoint_every", 4, "--timeout", 8, "--workers", 1]
    with start(
        ["nohup", "bash", SINGLE, *words], env=HERE | {"RESTARTS": "1"}, cwd=folder
    ) as started:
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


@LONG
def test_a_read_only_checkout_trains(folder):
    require_namespaces()
    words = [copy_project(folder) / SINGLE.name, *make_set(folder / "set", 8), *FAST]
    read_only = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec bash "$@"'
    unshared = ["unshare", "-m", "sh", "-ec", read_only, folder / "project", *words]
    with start(unshared, env=HERE, cwd=folder) as started:
        run = started.finish(120)
    assert "| Step 2 " in run.out and "[CPU 0] Cleanup complete" in run.out


# --- Ends: a real torchrun, and a script that does at once what a training may come to ---------


ECHOES = """
for n in range(3):
    line = f"[CPU {os.environ['RANK']}] {n} {sys.argv[-1]}\\n"
    os.write(1, os.fsencode(line))  # in one piece, as the real script does
"""


@guards("log-is-complete")
def test_started_in_the_background_of_a_script_it_logs_all_lines_of_two_processes(folder):
    """SIGINT is ignored there. The argument has a space and an accent, of which the locale knows
    nothing. For a training of two processes see test_machines.py.
    """
    words = [project_with(folder, ECHOES) / SINGLE.name, *NO_SAMPLE, "ein Gerät"]
    background = ["bash", "-c", 'bash "$@" & wait "$!"', "bash", *words]
    with start(background, env=HERE | {"GPUS": "2", "LC_ALL": "C"}, cwd=folder) as started:
        run = started.finish(60)
    log = (folder / LOG).read_text()
    for text in (run.out, log):
        lines = text.splitlines()
        begin = lines.index(COMMAND.search(text)[0])
        for rank in (0, 1):
            own = [f"[CPU {rank}] {n} ein Gerät" for n in range(3)]
            assert [line for line in lines[begin:] if line.startswith(f"[CPU {rank}]")] == own


# The rank is killed over the first network, and finds an error of the user's over the second one.
KILLED = """
if "/two/" in " ".join(sys.argv):
    print("[CPU 0] ERROR: folder nowhere: No such file or directory", flush=True)
    sys.exit(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@guards("restart-resumes", "start-has-own-port", "lost-network-goes-on", "user-error-restarted")
@guards("exit-2", "restarts-counted", "id-without-slash")
def test_a_lost_start_is_repeated_but_no_user_error_and_the_next_network_has_its_turn(folder):
    """Each start has a port and an id of its own: torchrun makes a folder of that name. The error
    is the last line.
    """
    project, port = project_with(folder, KILLED), free_ports(18)
    networks = {"NETWORKS": "one=lo two=lo three=lo", "REPEATS": 2, "RESTARTS": 1}
    networks["MASTER_PORT"] = port
    with launch(project / MULTINODE.name, folder, *NO_SAMPLE, **networks) as started:
        run = started.finish(180, expect=2)
    commands = [shlex.split(line) for line in COMMAND.findall(run.out)]
    told = {"--rdzv_endpoint": [], "--rdzv_id": []}
    for command in commands:
        options = dict(word.split("=", 1) for word in command if "=" in word)
        for name, values in told.items():
            values.append(options[name])
    assert told["--rdzv_id"] == ["run-one-r1-1", "run-one-r1-2", "run-two-r1-1"]
    assert told["--rdzv_endpoint"] == [f"localhost:{port + n}" for n in (1, 2, 4)]
    assert ["--resume" in command for command in commands] == [False, True, False]
    first = (folder / "logs/run/one/r1/node0.log").read_text().splitlines()
    reason = r".*(SIGKILL|exitcode *: -9)"
    assert [line for line in first if re.search(f"restart 1 of 1, after: {reason}", line)]
    assert re.search(f"error: network one/r1: {reason}", first[-1]) and first[-1] in run.lines()
    assert not (folder / "logs/run/three").exists()
    assert run.lines()[-1].endswith(
        "error: [CPU 0] ERROR: folder nowhere: No such file or directory"
    )


STOPPING = guarded(
    ("signal-passed-on tee-survives exit-75", signal.SIGINT, False),
    ("torchrun-lives-on-usr1", signal.SIGUSR1, True),
)


@pytest.mark.parametrize(("number", "to_all"), STOPPING)
def test_a_stop_signal_reaches_the_ranks_as_sigterm_and_their_last_lines_the_log(
    folder, number, to_all
):
    """SLURM may send SIGUSR1 to all processes. The signal is no failure: there is no restart."""
    project = project_with(folder, STOPS)
    with launch(project / SINGLE.name, folder, *NO_SAMPLE, RESTARTS=1) as started:
        started.wait_for(r"\] trains")
        for pid in started.pids() if to_all else [started.pid]:
            os.kill(pid, number)
        run = started.finish(60, SAVED)
    assert "got signal: 15" in run.out  # torchrun has lived to pass it on
    last = rf"stopped by {number.name}: --resume goes on from \S+/checkpoint\.pt$"
    for lines in (run.lines(), (folder / LOG).read_text().splitlines()):
        assert "[CPU 0] Stopped on SIGTERM | step 3 | exit code 75" in lines
        assert re.search(last, lines[-1])


DEAF = STOPS.replace("TERM, stop", "TERM, lambda *_: print('heard', flush=True)")
DEAF = DEAF.replace("sleep(15)", "sleep(200)")


@LONG
@guards("second-ctrl-c", "stop-not-restarted")
def test_a_second_ctrl_c_ends_at_once_ranks_that_do_not_answer(folder):
    project = project_with(folder, DEAF)
    with launch(project / SINGLE.name, folder, *NO_SAMPLE, RESTARTS=1) as started:
        started.wait_for(r"\] trains")
        started.signal(signal.SIGINT)
        started.wait_for("heard")
        assert started.running()
        started.signal(signal.SIGINT)
        wait_until(lambda: not started.running(), 5, "its end")
        assert started.process.returncode == 128 + signal.SIGINT
        assert starts(started.text()) == 1


MANY_LINES = """
for n in range(20000):
    print("[CPU 0] line", n, flush=True)
open("over", "w").close()
"""


@LONG
@guards("full-disk", "log-is-not-whole")
def test_a_full_disk_of_the_log_is_no_reason_to_stop_but_is_said_at_the_end(folder):
    project = project_with(folder, MANY_LINES)
    with small_disk(folder / "disk", "100k") as disk:
        own = {"LOG_DIR": disk, "RESTARTS": 1, "RUN_NAME": "full"}
        with launch(project / SINGLE.name, folder, *NO_SAMPLE, **own) as started:
            run = started.finish(60, expect=1)
        assert (disk / "full/node0.log").stat().st_size < 2**17
    assert "[CPU 0] line 19999" in run.lines() and (folder / "over").exists()
    assert starts(run.out) == 1
    assert f"error: the log {disk}/full/node0.log cannot be written" in run.lines()[-1]


@LONG
@guards("reader-gone")
def test_a_reader_that_goes_away_changes_nothing(folder):
    words = ["bash", project_with(folder, MANY_LINES) / SINGLE.name, *NO_SAMPLE]
    pipe = ["bash", "-c", '"$@" 2>&1 | head -n 1; exit "${PIPESTATUS[0]}"', "bash"]
    with start([*pipe, *words], env=HERE, cwd=folder) as started:
        started.finish(60)
    assert "[CPU 0] line 19999" in (folder / LOG).read_text() and (folder / "over").exists()


def exit_codes(*codes: int) -> str:
    """As torchrun lists those of its ranks."""
    return "".join(f"\n  exitcode  : {code} (pid: 7)" for code in codes)


RESET = f"[CPU 0] ERROR: reset: {OTHER_RANK}"
STOPPED = "[CPU 0] Stopped on SIGTERM | step 3 | exit code 75"
BLACK = "[CPU 1] WARNING: image /exitcode  : 2/1.jpg is damaged, a black one takes its place"
APART = "torch.distributed.DistStoreError: Timed out. 1/2 clients joined."
USAGE = "demo_coco_resnet18.py: error: unrecognized arguments: --x"
WATCHDOG = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective operation timeout"
)
LOST = (
    "[rank0]:[E1 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=77) raised the "
    "following async exception: NCCL error: remote process exited or there was a network error"
)
SIGNALS = "  Signal 15 (SIGTERM) received by PID 8\n  Signal 9 (SIGKILL) received by PID 7"


SLIP = f"{RESET}\n{STOPPED}\n[CPU 1] ERROR: slip"
ENDS = guarded(  # fault, torchrun's code, its log, the outcome, words of the reason
    ("", 1, f"{RESET}\n{BLACK}{exit_codes(1, -9)}", "lost", "reset"),
    ("", 137, "[CPU 0] WARNING: image /Stopped on SIGTERM/1.jpg", "lost", "with 137"),
    ("stop-has-prefix", 143, "[CPU 0] Resumed from /Stopped on SIG.pt", "lost", "with 143"),
    ("", 1, "[CPU 0] No /ERROR: 1\n[CPU 1] ERROR: full", "lost", "full"),
    ("phrase-error", 1, f"[CPU 1] ERROR: none{exit_codes(2, -15)}", "user", "none"),
    ("phrase-usage phrase-exitcode", 1, f"{USAGE}{exit_codes(2)}", "user", "--x"),
    ("phrase-stopped", 143, STOPPED, "asked", ""),
    ("", 1, f"{STOPPED}{exit_codes(75, -15)}", "asked", ""),
    ("stop-beside-failure", 1, f"{STOPPED}\n{RESET}{exit_codes(75, 1)}", "lost", "reset"),
    ("phrase-other-rank", 1, f"{SLIP}{exit_codes(75, 1)}", "lost", "slip"),
    ("phrase-watchdog", 1, f"{RESET}\n{WATCHDOG}{exit_codes(1, -6)}", "lost", "Watchdog caught"),
    ("", 1, f"{RESET}\n{LOST}{exit_codes(-6)}", "lost", "remote process exited"),
    ("phrase-signal", 1, f"{SIGNALS}{exit_codes(-15, -9)}", "lost", "SIGKILL"),
    ("", 1, f"no rank says why{exit_codes(7)}", "lost", "exitcode  : 7"),
    ("phrase-apart", 1, APART, "apart", "1/2 clients"),
    ("", 1, RESET + "\n[CPU 1] ERROR: full" * 6000, "lost", "full"),
    ("", 1, "[CPU 1] ERROR: no \udcff.jpg", "lost", "no \udcff.jpg"),  # a name not in UTF-8
)


@pytest.mark.parametrize(("code", "log", "outcome", "words"), ENDS, ids=range(len(ENDS)))
def test_end_is_judged_by_the_lines_of_the_log_and_by_nothing_else_in_them(
    code, log, outcome, words
):
    """Names of images and classes may hold any text."""
    program = 'set -euo pipefail; source "$0"; lines=$(grep -aE "$telling" <<<"$2" || true); '
    program += 'judge_end "$1" "$lines" "${2##*$\'\\n\'}"; echo "$outcome"; echo "$reason"'
    command = ["bash", "-c", program, ROOT / "tools/launcher/common.sh", str(code), log]
    env = {**os.environ, "LC_ALL": "C.UTF-8"}  # in which one of the names is no text
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    found, reason = done.stdout.decode(errors="surrogateescape").splitlines()
    assert found == outcome and words in reason


def test_torchrun_and_pytorch_have_the_words_by_which_the_launchers_know_an_end():
    """The script's own are in what it prints in test_stop_signals.py and test_refusals.py."""
    program = 'source "$0"; for name; do echo "${!name}"; done'
    common = ROOT / "tools/launcher/common.sh"
    names = ["log_signal", "log_exitcode", "log_apart", "log_nccl"]
    told = subprocess.check_output(["bash", "-c", program, common, *names], text=True)
    killed, exitcode, apart, nccl = told.splitlines()
    rank = ProcessFailure(local_rank=0, pid=7, exitcode=-9, error_file="none")
    report = ChildFailedError("script", {0: rank}).format_msg()
    assert re.search(killed, report) and re.search(exitcode, report, re.MULTILINE), report
    refused = traceback.format_exception_only(torch.distributed.DistStoreError("none"))
    assert re.search(apart, refused[0])
    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if library.exists():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as text:
            assert [text.find(words.encode()) > 0 for words in nccl.split("|")] == [True] * 3
