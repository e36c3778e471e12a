"""run.py and series.py: what decides, as functions of values. For processes see acceptance/."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import run
import series
from run import Record, UserError
from support.processes import ROOT, SCRIPT

OWN, PEER = Record("RuntimeError", "full"), Record("PeerLost", "reset")
UNMET = Record("NotConnected", "no connection to all ranks in 8 s")
OWN_LINE = "RuntimeError: full"
USER, LONE = Record("UserError", "no file"), Record("LoneUserError", "a damaged image")
SAVED = Record("Stopped", "Stopped on SIGTERM | step 3 | saved | exit code 75")
UNSAVED = Record("Stopped", "Stopped on SIGUSR1 | step 3 | not saved: no --checkpoint")
SIGNAL = Record("SignalException", "Process 7 got signal: 15")
NOBODY = Record("DistStoreError", "Timed out after 9 seconds. 1/2 clients joined.")
UNKNOWN = "torchrun ended with 1, see above"
ENDS = [  # torchrun's code, its ranks' records, its own one, a quoted line; outcome and reason
    (0, [None], None, "", ("complete", "")),
    (1, [OWN, PEER], None, "Signal 9", ("lost", OWN_LINE)),
    (1, [PEER, OWN], None, "Signal 9", ("lost", OWN_LINE)),
    (1, [PEER, None], None, "Signal 9", ("lost", "Signal 9")),
    (1, [PEER, None], None, "", ("lost", PEER.text)),
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
    (2, [], None, "", ("user", "torchrun ended with 2, see above")),
    (1, [], NOBODY, "", ("apart", NOBODY.text)),
    (1, [], SIGNAL, "", ("lost", UNKNOWN)),
    (1, [None], NOBODY, "", ("lost", UNKNOWN)),
]


@pytest.mark.parametrize(("code", "ranks", "agent", "quote", "expected"), ENDS)
def test_exit_codes_and_records_decide_how_a_start_ended(code, ranks, agent, quote, expected):
    assert run.judge(code, ranks, agent, quote) == expected


def test_records_are_those_of_the_last_attempt(tmp_path):
    texts = {"9/0": "KeyError: a", "10/0": "PeerLost: b: c\nmore", "10/1": None, "10/2": None}
    for place, text in texts.items():
        folder = tmp_path / "id_x" / f"attempt_{place}"
        folder.mkdir(parents=True)
        if text:
            content = json.dumps({"message": {"message": text}})
            (folder / "error.json").write_text(content)
    (tmp_path / "id_x/attempt_10/2/error.json").write_text('{"message": "a text alone"}')
    assert run.read_records(tmp_path) == [Record("PeerLost", "b: c"), None, None]
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


def test_of_a_log_only_what_this_start_has_said_is_quoted(tmp_path):
    """An earlier one wrote into it, too."""
    path = tmp_path / "node0.log"
    path.write_text(LINES)
    one = run.Run.__new__(run.Run)
    one.args, one.variables, one.wait = argparse.Namespace(port=1, wait=1), {}, 1
    one.command = run.parse_command(["torchrun", "--nproc_per_node=1", "train.py"])
    one.execute = lambda *_, **__: 1
    with path.open("a+b", buffering=0) as one.log:
        assert one.start_torchrun(0, "train.py", []) == ("lost", UNKNOWN)


def test_the_last_value_of_an_option_counts_and_dashes_are_underscores():
    words = ["--a_b", "1", "--a-b=2", "--c"]
    assert run.option("--a_b", words) == "2"
    assert run.option("--c", words) == run.option("--d", []) == ""
    assert not run.names_no_data(["--dummy"])
    assert run.names_no_data(["--lr", "1"]) and not run.names_no_data(["--val-image-path=x"])


def test_a_later_start_waits_for_a_node_that_has_to_notice():
    assert run.wait_later(7, ["--timeout", "1e2"]) == 280
    assert run.wait_later(600, ["--timeout", "1e2"]) == 600
    default = int(re.search(r"^TIMEOUT = (\d+)", SCRIPT.read_text(), re.MULTILINE)[1])
    assert run.wait_later(7, []) == run.wait_later(7, ["--timeout", "x"]) == default + 180


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


# --- This node ---------------------------------------------------------------------------------

NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "203.0.113.1"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}
JOBS = [  # variables, how many GPUs there are; NNODES, NODE_RANK, ..., GPUS_PER_NODE, RUN_NAME
    (STEP | {"MASTER_ADDR": "a", "RUN_NAME": "x"}, 4, "2 1 a 20280 4 x"),
    (STEP | {"MASTER_ADDR": "a", "SLURM_GPUS_ON_NODE": "2"}, 8, "2 1 a 20280 2 job7-step0"),
    ({"WORLD_SIZE": "1"}, 0, "1 0 localhost 29500 1 "),
    ({"GPUS": "3", "NNODES": "1"}, 0, "1 0 localhost 29500 3 "),
    ({"GPUS_PER_NODE": "all", "NNODES": "1"}, 0, "1 0 localhost 29500 0 "),
]
NO_JOB = [
    (NODE | {"NODE_RANK": ""}, "NODE_RANK not set"),
    (NODE | {"NODE_RANK": "2"}, "NODE_RANK is '2'"),
    (NODE | {"WORLD_SIZE": "4"}, "NNODES is 2 but WORLD_SIZE is 4"),
    (NODE | {"GPUS": "4", "GPUS_PER_NODE": "2"}, "GPUS_PER_NODE is 2 but GPUS is 4"),
    (NODE | {"NNODES": "two"}, "NNODES is 'two'"),
    (STEP | {"SLURM_STEP_ID": ""}, "not started by srun"),
    (STEP | {"SLURM_STEP_ID": "4294967290"}, "not started by srun"),  # salloc's shell
    (STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 2 nodes: .*-per-node=1"),
    (STEP, "without the command scontrol: set MASTER_ADDR"),
]


def test_a_node_learns_its_place_from_the_variables_or_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # without scontrol
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for env, gpus, expected in JOBS:
        assert " ".join(run.job(env, lambda gpus=gpus: gpus).values()) == expected
    for env, words in NO_JOB:
        with pytest.raises(UserError, match=words):
            run.job(env, lambda: 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)  # srun --pty has one task alone
    with pytest.raises(UserError, match="not started by srun"):
        run.job(STEP, lambda: 0)


def test_a_gpu_is_present_by_its_device_file_unless_it_is_hidden(monkeypatch):
    """With a GPU the training is not for a CPU, unless the user says so."""
    files = {"nvidia[0-9]*": [Path("/dev/nvidia0")]}
    monkeypatch.setattr(Path, "glob", lambda _, pattern: files.get(pattern, []))
    for visible in ("", "-1", "NoDevFiles", "0", None):  # NoDevFiles is SLURM's
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        present = visible in ("0", None)
        assert run.gpu_is_present() == present, visible
        assert run.runs_on_gpus([]) == run.runs_nccl([]) == present, visible
    assert not run.runs_on_gpus(["--device=cpu"]) and not run.runs_nccl(["--backend", "gloo"])


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


def test_interfaces_and_adapters_that_are_missing_or_down_are_refused(
    sysfs, monkeypatch, tmp_path
):
    run.check_interfaces("eth0,mlx5_0,mlx5_0:1")
    odd = ("mlx5_0:2", "mlx5_0:*", "mlx5_0:", "eth0 mlx5_0")
    for wrong in ("none0", "loose0", "down0", "mlx5_2", *odd):
        with pytest.raises(UserError, match=re.escape(f"'{wrong}'")):
            run.check_interfaces(f"eth0,{wrong}")
    assert run.names_in("adapters,eth0") == ["mlx5_0", "rdmap0s6", "eth0"]  # all that are up
    monkeypatch.setattr(run, "SYSFS", tmp_path / "none")
    with pytest.raises(UserError, match="no adapter that is up"):
        run.check_interfaces("adapters")


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


QUOTAS = [  # files of a cgroup, and the cores that they allow
    ({"cpu.max": "100000 100000\n"}, 1),
    ({"cpu.max": "10000 100000\n"}, 1),
    ({"cpu.max": "max 100000\n"}, 1000),
    ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1000),
    ({}, 1000),
]


def test_cores_are_those_of_a_quota_rounded_up(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(1000), raising=False)
    for n, (files, cores) in enumerate(QUOTAS):
        (tmp_path / f"{n}/cpu").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / f"{n}" / name).write_text(text)
        assert run.usable_cores(tmp_path / f"{n}") == cores


# --- series.py -----------------------------------------------------------------------------------


def test_there_are_no_more_processes_than_gpus_unless_they_share(capfd):
    assert series.processes_of("1,2,4", [], 2) == {"p1": "1", "p2": "2"}
    assert "no run with 4 processes" in capfd.readouterr().err
    for options in (["--device", "cpu"], ["--backend=gloo"]):
        assert [*series.processes_of("1,2,4", options, 2)] == ["p1", "p2", "p4"]
    assert [*series.processes_of("1,2,4", [], 0)] == ["p1", "p2", "p4"]


def test_what_several_runs_cannot_have_is_refused():
    assert series.networks_of(["a=eth0", "b=mlx5_0,ib0"]) == {"a": "eth0", "b": "mlx5_0,ib0"}
    refused = [
        (series.parse_arguments, [], "--network LABEL=NAMES .* or --processes"),
        (series.parse_arguments, ["--processes", "1", "--repeats=0"], "--repeats is '0'"),
        (series.parse_arguments, ["--processes", "1,2", "--", "--resume"], "each run"),
        (lambda words: series.processes_of(*words, [], 1), ["2,4"], "leaves no run"),
        (lambda words: series.processes_of(*words, [], 1), ["x"], "'x'"),
    ]
    networks = ["a"], ["a=x", "a=y"], ["a="], ["a/b=x"], ["-a=x"], ["..=x"]
    refused += [(series.networks_of, names, "LABEL=NAMES") for names in networks]
    for function, words, text in refused:
        with pytest.raises(UserError, match=text):
            function(words)


@pytest.fixture
def ran(monkeypatch, tmp_path) -> Callable:
    """A function that runs four rounds over two networks, a and b, on node 0 of two. It is given
    the exit codes of runs, as {"a/r1": 1}, and the last line of their logs; the others end with 0.
    A code of 128 and more is a stop of this node. Returns the series' own code, the variables of
    each run, and what was compared.
    """
    node = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "RUN_NAME": "s"}
    for name, value in node.items():
        monkeypatch.setenv(name, value)
    for name in ("WORLD_SIZE", "GPUS", "GPUS_PER_NODE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run, "count_gpus", lambda _: 0)

    def train(
        codes: dict[str, int], last: str = "", repeats: int = 4
    ) -> tuple[int, list[dict], list]:
        one, calls, compared = series.Series.__new__(series.Series), [], []
        one.args = argparse.Namespace(network=["a=lo", "b=lo"], processes="", repeats=repeats)
        one.python, one.stopped, one.child, one.arguments = "python", 0, None, []
        one.env = {"LOG_DIR": str(tmp_path)}
        for place in codes:
            (tmp_path / "s" / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / "s" / place / "node0.log").write_text(f"run.py: error: {last}\n")

        def call(*_: object, **variables: str) -> int:
            calls.append(variables)
            code = codes.get(variables["RUN_NAME"].removeprefix("s/"), 0)
            one.stopped = max(0, code - 128)
            return code

        one.call = call
        one.compare = lambda _, labels: compared.append((one.stopped, labels)) or 0
        return one.train(), calls, compared

    return train


def test_a_series_reuses_its_forty_ports_in_turn(ran):
    """A run has two: the training's, and the probe's."""
    _, calls, _ = ran({}, repeats=21)
    ports = [int(each["MASTER_PORT"]) for each in calls]
    assert len(calls) == 42 and min(ports) == 29500 and max(ports) < 29539
    assert all(a != b for a, b in itertools.pairwise(ports))


def test_only_a_second_ctrl_c_ends_a_run_at_once():
    """Not the first one after another signal."""
    one = run.Run.__new__(run.Run)
    one.process, one.stopped, one.interrupts, one.log = None, 0, 0, io.BytesIO()
    for number in (signal.SIGTERM, signal.SIGINT):
        one.stop(number, None)
    assert one.stopped == signal.SIGTERM
    with pytest.raises(SystemExit, match="130"):
        one.stop(signal.SIGINT, None)


def test_a_series_that_is_stopped_is_compared_as_far_as_it_came(ran):
    """Here or on another node. A signal that is still noted would end the comparison, too."""
    for stop in (128 + signal.SIGINT, run.STOPPED):
        code, calls, compared = ran({"b/r2": stop})
        assert code == stop and len(calls) == 3 and compared == [(0, ["a", "b"])]


def test_a_series_whose_other_node_has_ended_waits_ten_minutes_in_all(ran):
    """It waits for the probe, and then perhaps for the training."""
    _, calls, _ = ran({"a/r1": run.FAILED, "b/r1": run.FAILED}, f"{run.APART} at a:1")
    assert [each["CONNECT_TIMEOUT"] for each in calls] == ["300", "30"]
    assert run.wait_later(300, []) + 30 < 600


def test_a_network_that_has_failed_twice_in_a_row_is_left_out(ran):
    _, calls, _ = ran({"a/r1": run.FAILED, "a/r2": run.FAILED}, "torchrun ended")
    assert [each["RUN_NAME"][2] for each in calls] == [*"abbabb"]
    _, calls, _ = ran({"b/r1": run.FAILED, "b/r3": run.FAILED}, "torchrun ended")
    assert len(calls) == 8


def test_a_stop_that_came_before_a_run_has_a_process_ends_this_run():
    one = series.Series.__new__(series.Series)
    one.env, one.child, one.stopped = dict(os.environ), None, signal.SIGTERM
    assert one.call("sleep", 20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("name", ["series", "preflight"])
def test_an_older_python_is_named(monkeypatch, name):
    """These two are started by the Python of the system."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=f"{name}.py: error: needs Python 3.10 or newer"):
        runpy.run_path(str(ROOT / f"tools/{name}.py"))
