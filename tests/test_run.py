"""run.py and series.py: what decides, as functions of values. For processes see acceptance/."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

import run
import series
from run import Record, UserError

guards = pytest.mark.guards
OWN, PEER = Record("own", "[CPU 0] ERROR: full", 5), Record("peer", "[CPU 1] ERROR: reset", 3)
SHARED, STOPPED = Record("shared", "ERROR: no file"), Record("stopped", "Stopped on SIGTERM")
SIGNAL = Record("own", "SignalException: Process 7 got signal: 15")
NOBODY = Record("own", "DistStoreError: Timed out after 9 seconds. 1/2 clients joined.")
ENDS = [  # torchrun's code, its ranks' records, its own one, a quoted line; outcome and reason
    (0, [None], None, "", ("complete", "")),
    (1, [OWN, PEER], None, "Signal 9", ("lost", OWN.text)),
    (1, [PEER, None], None, "Signal 9", ("lost", "Signal 9")),
    (1, [PEER, None], None, "", ("lost", PEER.text)),
    (1, [None, None], None, "", ("lost", "torchrun ended with 1")),
    (-9, [PEER], None, "", ("lost", PEER.text)),
    (1, [STOPPED, STOPPED], SIGNAL, "", ("asked", STOPPED.text)),
    (-15, [STOPPED], None, "", ("asked", STOPPED.text)),
    (1, [STOPPED, None], SIGNAL, "", ("lost", "torchrun ended with 1")),
    (1, [STOPPED, OWN], SIGNAL, "", ("lost", OWN.text)),
    (1, [PEER, SHARED], None, "Signal 15", ("user", SHARED.text)),
    (1, [SHARED, None], None, "", ("user", SHARED.text)),
    (2, [], None, "", ("user", "torchrun ended with 2")),
    (1, [], NOBODY, "", ("apart", "Timed out after 9 seconds. 1/2 clients joined.")),
    (1, [], SIGNAL, "", ("lost", "torchrun ended with 1")),
    (1, [None], NOBODY, "", ("lost", "torchrun ended with 1")),
]


@guards("phrase-stopped", "stop-beside-failure", "phrase-exitcode", "phrase-apart")
@guards("phrase-other-rank", "signal-is-not-apart")
@pytest.mark.parametrize(("code", "ranks", "agent", "quote", "expected"), ENDS)
def test_exit_codes_and_records_decide_how_a_start_ended(code, ranks, agent, quote, expected):
    assert run.judge(code, ranks, agent, quote) == expected


def test_an_exit_code_that_torchrun_lists_says_less_than_a_rank_that_lost_its_peer():
    assert run.judge(1, [PEER], None, "", "exitcode  : 1") == ("lost", PEER.text)
    assert run.judge(1, [None], None, "", "exitcode  : 7") == ("lost", "exitcode  : 7")


@guards("first-own-record")
def test_of_two_own_records_the_first_in_time_is_the_reason():
    late, early = Record("own", "late", 7), Record("own", "early", 6)
    for ranks in ([late, early], [early, late]):
        assert run.judge(1, ranks, None, "")[1] == "early"


def error_file(text: str, when: object = "5") -> str:
    return json.dumps({"message": {"message": text, "extraInfo": {"timestamp": when}}})


RECORDS = [  # a rank's error.json, and what is made of it
    (error_file("Ended: shared: [CPU 0] ERROR: no: file"), "shared"),
    (error_file("Ended: stopped: [CPU 0] Stopped on SIGTERM\nmore"), "stopped"),
    (error_file("RuntimeError: peer: of another script"), "peer"),
    (error_file("ValueError: of another script"), "own"),
    ("", None),
    ("{", None),
    ('{"message": "a text alone"}', None),
    (error_file("x", None), None),
]


@pytest.mark.parametrize(("content", "word"), RECORDS)
def test_a_damaged_record_is_none_and_another_scripts_one_is_its_own_error(content, word):
    record = run.parse_record(content)
    assert (record and record.word) == word
    assert record is None or "\n" not in record.text


@guards("last-attempt")
def test_only_the_last_attempt_of_a_start_counts_and_a_rank_without_a_record_is_none(tmp_path):
    for attempt, rank, text in ((9, 0, "own: a"), (10, 0, "peer: b"), (10, 1, "")):
        folder = tmp_path / f"id_x/attempt_{attempt}/{rank}"
        folder.mkdir(parents=True)
        if text:
            (folder / "error.json").write_text(error_file(f"Ended: {text}"))
    first, second = run.read_records(tmp_path)
    assert first == Record("peer", "b", 5) and second is None
    assert run.read_records(tmp_path / "none") == []


LOST = "[Rank 0] Collective WorkNCCL raised the following async exception: NCCL error: remote"
LINES = b"""[CPU 0] ERROR: no Signal 9 received here
  exitcode  : -15 (pid: 8)
  exitcode  : 7 (pid: 7)
  Signal 15 (SIGTERM) received by PID 8
  traceback : Signal 9 (SIGKILL) received by PID 7
[rank0]:[E1] Watchdog caught collective operation timeout: WorkNCCL
""".splitlines()


@guards("phrase-watchdog", "phrase-signal")
def test_of_the_log_nccls_words_are_quoted_first_then_torchruns():
    seven = "exitcode  : 7 (pid: 7)"
    assert "Watchdog" in run.quote(LINES)[0] and run.quote(LINES)[1] == seven
    assert run.quote([*LINES[:5], LOST.encode()])[0] == LOST
    assert run.quote(LINES[1:5]) == ("Signal 9 (SIGKILL) received by PID 7", seven)
    assert run.quote(LINES[1:2]) == run.quote([]) == ("", "")


def test_a_command_is_filled_up_to_the_scripts_path_only():
    words = ["torchrun", "--nnodes=1", "--nproc_per_node=2", "--rdzv_endpoint=a:{port}"]
    words += ["--rdzv_id=x-{start}", "--rdzv_conf=timeout={wait},y={z}", "train.py", "{port}"]
    command = run.parse_command(words)
    assert run.filled(command.options, 2, 500, 30)[2:] == [
        "--rdzv_endpoint=a:502",
        "--rdzv_id=x-2",
        "--rdzv_conf=timeout=30,y={z}",
    ]
    assert (command.script, command.arguments) == ("train.py", ["{port}"])
    assert command.number("--nproc_per_node", 1) == 2 and command.number("--nnodes", 1) == 1


@pytest.mark.parametrize(
    "words", [[], ["python", "x.py"], ["torchrun", "--nproc_per_node=1"]], ids=str
)
def test_what_is_no_torchrun_command_is_refused(words):
    with pytest.raises(UserError, match="torchrun"):
        run.parse_command(words)


def test_the_last_value_of_an_option_counts_and_dashes_are_underscores():
    words = ["--a_b", "1", "--a-b=2", "--c"]
    assert run.option("--a_b", words) == "2"
    assert run.option("--c", words) == run.option("--d", []) == ""
    assert not run.names_no_data(["--dummy"])
    assert run.names_no_data(["--lr", "1"]) and not run.names_no_data(["--val-image-path=x"])


def test_a_later_start_waits_as_long_as_another_node_may_need_to_notice():
    assert run.wait_later(7, ["--timeout", "1e2"]) == 167
    assert run.wait_later(7, []) == run.wait_later(7, ["--timeout", "x"]) == 7 + 300 + 60


@guards("folder-of-its-own")
def test_two_runs_that_start_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    times = iter(["now", "now", "later"])
    monkeypatch.setattr(run.time, "strftime", lambda _: next(times))
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    folders = [run.make_folder(str(tmp_path / "logs"), "") for _ in range(2)]
    assert folders == [tmp_path / "logs/now", tmp_path / "logs/later"]


def test_several_runs_are_told_their_command():
    env = {"NETWORKS": "a=eth0 b=ib0", "REPEATS": "4", "GPUS": "2"}
    words = "series.py --network a=eth0 --network b=ib0 --repeats 4 -- ARGUMENTS"
    with pytest.raises(UserError, match=re.escape(words)):
        run.refuse_series(env)
    with pytest.raises(UserError, match=r"series\.py --processes 1,2 -- ARG"):
        run.refuse_series({"GPUS": "1 2"})
    run.refuse_series({"GPUS": "2"})


JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
JOB |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}


def test_a_job_is_what_the_variables_say_or_slurm(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    found = run.job(JOB | {"MASTER_ADDR": "a", "RUN_NAME": "x"}, lambda: 4)
    assert [*found.values()] == ["2", "1", "a", "20280", "4", "x"]
    found = run.job({"WORLD_SIZE": "1"}, lambda: 0)
    assert [*found.values()] == ["1", "0", "localhost", "29500", "1", ""]
    for wrong in ({"GPUS_PER_NODE": "all", "NNODES": "1"}, {"NNODES": "2"}, {"REPEATS": "2"}):
        with pytest.raises(UserError):
            run.job(wrong, lambda: 0)


SHOWN = b"""[CPU 0] Epoch 1 | Step 5
[CPU 0] Run {"a": 1}
Counters {"host": "x"}
Traceback (most recent call last):
  File "train.py", line 1, in <module>
ImportError: of a rank
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
============================================================
train.py FAILED
[0]:
============================================================
last
""".splitlines(keepends=True)


@guards("terminal-shows-less")
def test_a_terminal_shows_neither_records_nor_torchruns_own_traceback():
    terminal = run.Terminal()
    shown = b"".join(map(terminal.shown, SHOWN))
    assert shown == b"".join([SHOWN[0], *SHOWN[3:6], SHOWN[-1]])


# --- series.py -----------------------------------------------------------------------------------


def test_every_other_round_is_reversed():
    assert series.in_order(["a", "b"], 3) == [
        ("a", 1),
        ("b", 1),
        ("b", 2),
        ("a", 2),
        ("a", 3),
        ("b", 3),
    ]


@guards("more-than-gpus")
def test_no_number_of_processes_is_above_that_of_the_gpus_unless_they_may_share(capfd):
    assert series.processes_of("1,2,4", [], 2) == {"p1": "1", "p2": "2"}
    assert "no run with 4 processes" in capfd.readouterr().err
    for options in (["--device", "cpu"], ["--backend=gloo"]):
        assert [*series.processes_of("1,2,4", options, 2)] == ["p1", "p2", "p4"]
    assert [*series.processes_of("1,2,4", [], 0)] == ["p1", "p2", "p4"]


WRONG = [("2,4", [], 1), ("1,2", ["--global_batch_size", "3"], 0), ("2,2", [], 0), ("x", [], 0)]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_numbers_of_processes_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError):
        series.processes_of(*wrong)


def test_networks_need_labels_of_their_own():
    assert series.networks_of(["a=eth0", "b=mlx5_0,ib0"]) == {"a": "eth0", "b": "mlx5_0,ib0"}
    for wrong in (["a"], ["a=x", "a=y"], ["a="], ["a/b=x"]):
        with pytest.raises(UserError):
            series.networks_of(wrong)


QUOTAS = [  # files of a cgroup, and the cores that they allow
    ({"cpu.max": "100000 100000\n"}, 1),
    ({"cpu.max": "10000 100000\n"}, 1),
    ({"cpu.max": "max 100000\n"}, 1000),
    ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1000),
    ({}, 1000),
]


@pytest.mark.parametrize(("files", "cores"), QUOTAS)
def test_cores_are_those_of_a_quota_rounded_up(tmp_path: Path, monkeypatch, files, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1000))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run.usable_cores(tmp_path) == cores
