"""run.py and series.py: what decides, as functions of values. For processes see acceptance/."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import signal
from pathlib import Path

import pytest

import run
import series
from run import Record, UserError
from support.processes import SCRIPT

OWN, PEER = Record("RuntimeError", "full"), Record("PeerLost", "reset")
UNMET = Record("NotConnected", "no connection to all ranks in 8 s")
OWN_LINE = "RuntimeError: full"
USER, LONE = Record("UserError", "no file"), Record("LoneUserError", "a damaged image")
SAVED = Record("Stopped", "Stopped on SIGTERM | step 3 | saved | exit code 75")
UNSAVED = Record(
    "Stopped", "Stopped on SIGUSR1 | step 3 | not saved: no --checkpoint | exit code 1"
)
SIGNAL = Record("SignalException", "Process 7 got signal: 15")
NOBODY = Record("DistStoreError", "Timed out after 9 seconds. 1/2 clients joined.")
UNKNOWN = "torchrun ended with 1, see above"
ENDS = [  # torchrun's code, its ranks' records, its own one, a quoted line; outcome and reason
    (0, [None], None, "", ("complete", "")),
    (1, [OWN, PEER], None, "Signal 9", ("lost", OWN_LINE)),
    (1, [PEER, OWN], None, "Signal 9", ("lost", OWN_LINE)),
    (1, [PEER, None], None, "Signal 9", ("lost", "Signal 9")),
    (1, [PEER, None], None, "", ("lost", PEER.text)),
    (1, [UNMET, UNMET], None, "", ("unreached", UNMET.text)),
    (1, [UNMET, None], None, "", ("unreached", UNMET.text)),
    (1, [UNMET, OWN], None, "", ("lost", OWN_LINE)),
    (1, [UNMET, USER], None, "", ("user", USER.text)),
    (1, [None, None], None, "", ("lost", UNKNOWN)),
    (-9, [PEER], None, "", ("lost", PEER.text)),
    (1, [SAVED, SAVED], SIGNAL, "", ("saved", SAVED.text)),
    (-15, [SAVED], None, "", ("saved", SAVED.text)),
    (1, [UNSAVED, UNSAVED], None, "", ("unsaved", UNSAVED.text)),
    (1, [SAVED, None], SIGNAL, "", ("lost", UNKNOWN)),
    (1, [SAVED, OWN], SIGNAL, "", ("lost", OWN_LINE)),
    (1, [PEER, USER], None, "Signal 15", ("user", USER.text)),
    (1, [PEER, LONE], None, "Signal 15", ("user", LONE.text)),
    (1, [USER, None], None, "", ("user", USER.text)),
    (2, [], None, "", ("user", "torchrun ended with 2, see above")),
    (1, [], NOBODY, "", ("apart", "Timed out after 9 seconds. 1/2 clients joined.")),
    (1, [], SIGNAL, "", ("lost", UNKNOWN)),
    (1, [None], NOBODY, "", ("lost", UNKNOWN)),
]


@pytest.mark.parametrize(("code", "ranks", "agent", "quote", "expected"), ENDS)
def test_exit_codes_and_records_decide_how_a_start_ended(code, ranks, agent, quote, expected):
    assert run.judge(code, ranks, agent, quote) == expected


def error_file(text: str) -> str:
    return json.dumps({"message": {"message": text}})


RECORDS = [  # a rank's error.json, and what is made of it
    (error_file("UserError: no: file"), Record("UserError", "no: file")),
    (error_file("Stopped: Stopped on SIGTERM\nmore"), Record("Stopped", "Stopped on SIGTERM")),
    (error_file("ValueError: of another script"), Record("ValueError", "of another script")),
    ("", None),
    ("{", None),
    ('{"message": "a text alone"}', None),
]


@pytest.mark.parametrize(("content", "expected"), RECORDS)
def test_a_record_is_an_errors_class_and_text_and_a_damaged_one_is_none(content, expected):
    assert run.parse_record(content) == expected


def test_only_the_last_attempt_of_a_start_counts_and_a_rank_without_a_record_is_none(tmp_path):
    for attempt, rank, text in ((9, 0, "KeyError: a"), (10, 0, "PeerLost: b"), (10, 1, "")):
        folder = tmp_path / f"id_x/attempt_{attempt}/{rank}"
        folder.mkdir(parents=True)
        if text:
            (folder / "error.json").write_text(error_file(text))
    first, second = run.read_records(tmp_path)
    assert first == Record("PeerLost", "b") and second is None
    assert run.read_records(tmp_path / "none") == []


LOST = "[Rank 0] Collective WorkNCCL raised the following async exception: NCCL error: remote"
LINES = """  exitcode  : -15 (pid: 8)
  Signal 15 (SIGTERM) received by PID 8
  traceback : Signal 9 (SIGKILL) received by PID 7
"""


def test_of_the_log_nccls_words_are_quoted_first_then_torchruns():
    watchdog = "[rank0]:[E1] Watchdog caught collective operation timeout: WorkNCCL"
    assert run.quote(f"{LINES}{watchdog}\n{LOST}") == watchdog
    assert run.quote(f"{LINES}{LOST}\n") == LOST
    assert run.quote(LINES) == "Signal 9 (SIGKILL) received by PID 7"
    assert run.quote("Signal 15 (SIGTERM) received by PID 8") == run.quote("") == ""


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
    assert (command.nodes, command.node, command.processes, command.host) == (1, 0, 2, "a")


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
    assert run.wait_later(7, ["--timeout", "1e2"]) == 280
    assert run.wait_later(600, ["--timeout", "1e2"]) == 600
    default = int(re.search(r"^TIMEOUT = (\d+)", SCRIPT.read_text(), re.MULTILINE)[1])
    assert run.wait_later(7, []) == run.wait_later(7, ["--timeout", "x"]) == default + 180


def test_two_runs_that_start_in_one_second_have_a_folder_each(monkeypatch):
    monkeypatch.setattr(run.time, "strftime", lambda _: "now")
    numbers = iter([7, 8])
    monkeypatch.setattr(run.os, "getpid", lambda: next(numbers))
    folders = [run.folder_of("logs", "") for _ in range(2)]
    assert folders == [Path("logs/now-7"), Path("logs/now-8")]


# --- This node ---------------------------------------------------------------------------------

NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "203.0.113.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_a_job_is_what_the_variables_say_or_slurm(no_terminal):
    found = run.job(STEP | {"MASTER_ADDR": "a", "RUN_NAME": "x"}, lambda: 4)
    assert [*found.values()] == ["2", "1", "a", "20280", "4", "x"]
    found = run.job({"WORLD_SIZE": "1"}, lambda: 0)
    assert [*found.values()] == ["1", "0", "localhost", "29500", "1", ""]
    assert run.job({"GPUS": "3", "NNODES": "1"}, lambda: 0)["GPUS_PER_NODE"] == "3"
    assert run.job({"GPUS_PER_NODE": "all", "NNODES": "1"}, lambda: 0)["GPUS_PER_NODE"] == "0"
    of_slurm = {"MASTER_ADDR": "a", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS": "4"}
    assert run.job(STEP | of_slurm, lambda: 8)["GPUS_PER_NODE"] == "2"


def test_of_several_interfaces_none_is_taken_as_node_0s_route(monkeypatch):
    """Another one may be a container's bridge. One without a cable does not count."""
    monkeypatch.setattr(run, "is_up", lambda name: name != "docker0")
    for names, route in ((["eth0", "docker0"], "eth0"), (["br-x", "eth0"], "")):
        found = {f"10.0.0.{n}": name for n, name in enumerate(names)}
        monkeypatch.setattr(run, "own_addresses", lambda found=found: found)
        assert run.route_to("127.0.0.1") == route


HIDES = [("", False), ("-1", False), ("NoDevFiles", False), ("0", True), (None, True)]


@pytest.mark.parametrize(("visible", "present"), HIDES)
def test_a_gpu_is_present_by_its_device_file_unless_it_is_hidden(monkeypatch, visible, present):
    """The word is SLURM's. With a GPU the training is not for a CPU, unless the user says so."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    files = {"nvidia[0-9]*": [Path("/dev/nvidia0")]}
    monkeypatch.setattr(Path, "glob", lambda _, pattern: files.get(pattern, []))
    assert run.gpu_is_present() == present
    assert run.runs_on_gpus([]) == run.runs_nccl([]) == present
    assert not run.runs_on_gpus(["--device=cpu"]) and not run.runs_nccl(["--backend", "gloo"])
    assert run.runs_nccl(["--backend", "nccl"])


def test_only_a_second_ctrl_c_ends_a_run_at_once():
    one = run.Run.__new__(run.Run)
    one.process, one.stopped, one.interrupts = None, signal.SIGTERM, 0
    one.log = io.BytesIO()
    for number in (signal.SIGTERM, signal.SIGINT):
        one.stop(number, None)
    assert one.stopped == signal.SIGTERM
    with pytest.raises(SystemExit, match="130"):
        one.stop(signal.SIGINT, None)


NO_JOB = [
    (NODE | {"NODE_RANK": ""}, "NODE_RANK not set"),
    (NODE | {"NODE_RANK": "2"}, "NODE_RANK is '2'"),
    (NODE | {"WORLD_SIZE": "4"}, "NNODES is 2 but WORLD_SIZE is 4"),
    (NODE | {"GPUS": "4", "GPUS_PER_NODE": "2"}, "GPUS_PER_NODE is 2 but GPUS is 4"),
    (NODE | {"NNODES": "two"}, "NNODES is 'two'"),
    (STEP | {"SLURM_STEP_ID": ""}, "not started by srun"),
    (STEP | {"SLURM_STEP_ID": "4294967290"}, "not started by srun"),
    (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 2 nodes: .*-per-node=1"),
    (STEP, "without the command scontrol: set MASTER_ADDR"),
]


@pytest.mark.parametrize(("env", "words"), NO_JOB)
def test_a_node_that_does_not_know_its_place_is_refused(no_terminal, monkeypatch, env, words):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=words):
        run.job(env, lambda: 0)


def test_a_shell_of_srun_on_one_of_several_nodes_is_no_step(monkeypatch):
    """srun --pty gives a terminal to one task alone."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(UserError, match="not started by srun"):
        run.job(STEP, lambda: 0)


@pytest.fixture
def sysfs(tmp_path, monkeypatch) -> None:
    """Interfaces, and adapters, which no machine for tests has."""
    for name, carrier in (("eth0", "1\n"), ("loose0", "0\n")):
        (tmp_path / "class/net" / name).mkdir(parents=True)
        (tmp_path / "class/net" / name / "carrier").write_text(carrier)
    (tmp_path / "class/net/down0").mkdir()  # its carrier cannot be read
    for name, state in {"mlx5_0": "4: ACTIVE", "mlx5_2": "1: DOWN", "rdmap0s6": "ACTIVE"}.items():
        adapter = tmp_path / "class/infiniband" / name
        (adapter / "ports/1").mkdir(parents=True)
        (adapter / "ports/1/state").write_text(f"{state}\n")
        (adapter / "device").mkdir()
        driver = "efa" if name == "rdmap0s6" else "mlx5_core"
        (adapter / "device/driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    monkeypatch.setattr(run, "SYSFS", tmp_path)


def test_interfaces_and_adapters_that_are_missing_or_down_are_refused(sysfs):
    run.check_interfaces("eth0,mlx5_0,mlx5_0:1")
    odd = ("mlx5_0:2", "mlx5_0:*", "mlx5_0:", "eth0 mlx5_0")
    for wrong in ("none0", "loose0", "down0", "mlx5_2", *odd):
        with pytest.raises(UserError, match=re.escape(f"'{wrong}'")):
            run.check_interfaces(f"eth0,{wrong}")


VERBS = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
ETH0 = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}
TWO_OF_EACH = {"NCCL_IB_HCA": "=mlx5_0,mlx5_2"}
TWO_OF_EACH |= {name: value.replace("eth0", "eth0,loose0") for name, value in ETH0.items()}
CHOSEN = [  # IFNAME; with eth0 as the route to node 0
    ("eth0", SOCKETS | ETH0),
    ("mlx5_0,eth0", VERBS | {"NCCL_IB_HCA": "=mlx5_0"} | ETH0),
    ("mlx5_0", VERBS | {"NCCL_IB_HCA": "=mlx5_0"} | ETH0),
    ("rdmap0s6,eth0", ETH0),
    ("", ETH0),
    ("mlx5_0,mlx5_2,eth0,loose0", VERBS | TWO_OF_EACH),
]


@pytest.mark.parametrize(("ifname", "expected"), CHOSEN)
def test_nccl_is_kept_on_the_adapters_or_interface_except_with_efa(sysfs, ifname, expected):
    assert run.network_variables(ifname, "eth0") == expected


def test_adapters_are_all_that_are_up(sysfs, monkeypatch, tmp_path):
    assert run.names_in("adapters,eth0") == ["mlx5_0", "rdmap0s6", "eth0"]
    monkeypatch.setattr(run, "SYSFS", tmp_path / "none")
    with pytest.raises(UserError, match="no adapter that is up"):
        run.check_interfaces("adapters")


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
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1000), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run.usable_cores(tmp_path) == cores


SHOWN = b"""[CPU 0] Epoch 1 | Step 5
[CPU 0] Run {"a": 1}
Counters {"host": "x"}
ImportError: of a rank
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
""".splitlines(keepends=True)


def test_a_terminal_shows_neither_records_nor_torchruns_own_traceback(capfdbinary, monkeypatch):
    """As each node of two_nodes.sh has one."""
    monkeypatch.setattr(run, "NODE", b"node 1 | ")
    run.show(io.BytesIO(b"".join(SHOWN)))
    assert capfdbinary.readouterr().out == b"node 1 | ".join([b"", SHOWN[0], SHOWN[3]])


# --- series.py -----------------------------------------------------------------------------------


def test_no_number_of_processes_is_above_that_of_the_gpus_unless_they_may_share(capfd):
    assert series.processes_of("1,2,4", [], 2) == {"p1": "1", "p2": "2"}
    assert "no run with 4 processes" in capfd.readouterr().err
    for options in (["--device", "cpu"], ["--backend=gloo"]):
        assert [*series.processes_of("1,2,4", options, 2)] == ["p1", "p2", "p4"]
    assert [*series.processes_of("1,2,4", [], 0)] == ["p1", "p2", "p4"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "--network LABEL=NAMES .* or --processes"),
        ("--processes 1 --repeats=0", "--repeats is '0'"),
        pytest.param("--processes 1,2 -- --resume", "each run"),
    ],
)
def test_what_several_runs_cannot_have_is_refused(words, text):
    with pytest.raises(UserError, match=text):
        series.parse_arguments(words.split())


def test_numbers_of_processes_of_which_none_can_be_are_refused():
    for numbers in ("2,4", "x"):
        with pytest.raises(UserError):
            series.processes_of(numbers, [], 1)


def test_networks_need_labels_of_their_own():
    assert series.networks_of(["a=eth0", "b=mlx5_0,ib0"]) == {"a": "eth0", "b": "mlx5_0,ib0"}
    for wrong in (["a"], ["a=x", "a=y"], ["a="], ["a/b=x"], ["-a=x"], ["..=x"]):
        with pytest.raises(UserError, match="LABEL=NAMES"):
            series.networks_of(wrong)


def made_series(**args: object) -> series.Series:
    one = series.Series.__new__(series.Series)
    one.args, one.arguments, one.env = argparse.Namespace(network=[], **args), [], {}
    one.python, one.stopped, one.child = "python", 0, None
    return one


def test_a_series_on_cpus_is_small_and_lies_where_it_is_compared(monkeypatch):
    monkeypatch.setattr(run, "count_gpus", lambda _: 0)
    one, calls = made_series(processes="1,2", repeats=1, link_gbps=[]), []
    one.plan()
    assert one.arguments == series.ON_CPUS
    one.call = lambda *words, **variables: calls.append(variables) or 0
    one.compare = lambda folder, labels: calls.append(folder) or 0
    one.train()
    *runs, folder = calls
    found = [Path(each["LOG_DIR"], each["RUN_NAME"]) for each in runs]
    assert found == [folder / "p1", folder / "p2"]


def over_two_networks(
    monkeypatch, folder: Path, repeats: int, codes: dict[str, int], last: str = ""
) -> list[dict]:
    """The variables of each run of a series on node 0 of two. Its code is that of its network, or
    0, and its log's last line `last`.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(run, "count_gpus", lambda _: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    node = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "30000"}
    for name, value in node.items():
        monkeypatch.setenv(name, value)
    one, calls = made_series(processes="", repeats=repeats, link_gbps=[]), []
    one.args.network = ["a=lo", "b=lo"]

    def call(*_: object, **variables: str) -> int:
        calls.append(variables)
        log = Path(variables["LOG_DIR"], variables["RUN_NAME"], "node0.log")
        log.parent.mkdir(parents=True)
        log.write_text(f"run.py: error: {last}\n")
        return codes.get(log.parts[-3], 0)

    one.call = call
    one.compare = lambda *_: 0
    one.train()
    return calls


def test_a_series_reuses_its_forty_ports_in_turn(monkeypatch, tmp_path):
    """A run has two: the training's, and the probe's."""
    calls = over_two_networks(monkeypatch, tmp_path, 21, {})
    ports = [int(each["MASTER_PORT"]) for each in calls]
    assert len(calls) == 42 and min(ports) == 30000 and max(ports) < 30039
    assert all(a != b for a, b in itertools.pairwise(ports))


def test_a_series_whose_other_node_has_ended_waits_ten_minutes_in_all(monkeypatch, tmp_path):
    """It waits for the probe, and then perhaps for the training."""
    both = {"a": run.FAILED, "b": run.FAILED}
    calls = over_two_networks(monkeypatch, tmp_path, 4, both, f"{run.APART} at a:1")
    assert [each["CONNECT_TIMEOUT"] for each in calls] == ["300", "30"]
    assert run.wait_later(300, []) + 30 < 600


def test_a_network_that_has_failed_twice_in_a_row_is_left_out(monkeypatch, tmp_path):
    calls = over_two_networks(monkeypatch, tmp_path, 4, {"a": run.FAILED}, "torchrun ended")
    assert [each["RUN_NAME"][:1] for each in calls if each["CONNECT_TIMEOUT"] != "30"] == [
        *"abbabb"
    ]


def test_a_series_that_is_stopped_is_compared_as_far_as_it_came(monkeypatch):
    """A signal that is still noted would end the comparison, too."""
    monkeypatch.setattr(run, "count_gpus", lambda _: 0)
    one, found = made_series(processes="1,2", repeats=2, link_gbps=[]), []
    codes = iter([0, 0, run.STOPPED])

    def call(*_: object, **__: str) -> int:
        code = next(codes)
        one.stopped = signal.SIGINT if code else 0
        return code

    one.call = call
    one.compare = lambda _, labels: found.append((one.stopped, labels)) or 0
    assert one.train() == run.STOPPED and found == [(0, ["p1", "p2"])]


def test_a_series_hands_all_given_rates_on():
    one, calls = made_series(link_gbps=["a=1", "b=2"]), []
    one.call = lambda *words, **_: calls.append(words) or 0
    one.compare(Path("f"), ["a", "b"])
    assert {"a=1", "b=2"} <= {*calls[-1]}


def test_a_stop_that_came_before_a_run_has_a_process_ends_this_run():
    one = series.Series.__new__(series.Series)
    one.env, one.child, one.stopped = dict(os.environ), None, signal.SIGTERM
    assert one.call("sleep", 20) == 128 + signal.SIGTERM
