"""tools/supervise.py and its parts, with commands that cost nothing in torchrun's place.

What torchrun itself does is tested with the launchers, where the real one runs.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import supervise
from analysis.logs import read_log
from launcher import rendezvous, root_cause
from launcher.counters import size
from launcher.ending import Ending
from launcher.errors import Refused, Stopped
from launcher.root_cause import Cause
from launcher.torchrun_command import Command
from support.processes import ROOT, Started, free_port, free_ports, start, wait_until

# What a fake torchrun may call: `fail TEXT KIND`, as a rank does that writes an error file.
SHELL = """#!/bin/bash
fail() {
    echo "$1"
    mkdir -p "$PET_LOG_DIR/run/attempt_0/0"
    printf '{"message": {"message": "%s", "extraInfo": {"kind": "%s", "rank": 0}}}' "$1" "$2" \\
        >"$PET_LOG_DIR/run/attempt_0/0/error.json"
    exit 1
}
count=$(cat count 2>/dev/null)
echo "x$count" >count   # x, xx, xxx: the number of this start
echo "started $count: $*"
"""


class Folder:
    """Where a test's fake torchrun lies, and its log."""

    def __init__(self, path: Path) -> None:
        self.path, self.log_path = path, path / "logs/node0.log"
        (path / "train.py").touch()
        (path / "probe.py").touch()

    def command(self, *words: object, body: str = "", nproc: int = 1) -> list[object]:
        """`words` are supervise.py's options, `body` what torchrun does."""
        program = self.path / "torchrun"
        program.write_text(SHELL + body)
        program.chmod(0o755)
        torchrun = f"./torchrun --standalone --nproc_per_node={nproc} train.py --lr 1".split()
        supervisor = [sys.executable, ROOT / "tools/supervise.py", "--log", self.log_path]
        return [*supervisor, *words, "--", *torchrun]

    def start(self, *words: object, env: dict | None = None, **options) -> Started:
        return start(self.command(*words, **options), cwd=self.path, env=env)

    def run(self, *words: object, expect: int = 0, **options) -> str:
        return self.start(*words, **options).finish(30, expect).out

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def starts(output: str) -> list[str]:
    """The arguments of each start."""
    return re.findall(r"^started x*: (.*)$", output, re.MULTILINE)


# --- Output ----------------------------------------------------------------------------------

RECORDS = [
    '[CPU 0] Run {"demo": 1}',
    '[GPU 12] Summary {"steps": 3}',
    '[CPU 0] Probe {"ms": 3}',
]
SENTENCES = ["[CPU 0] Summary: 3 steps", "Run {} of another program", "[CPU 0] Run of 3 steps"]
ECHO = "".join(f"echo '{line}'\n" for line in [*RECORDS, *SENTENCES]) + "printf 'no newline'"


def test_pipe_and_log_get_every_line_and_a_record_of_the_node(folder):
    output = folder.run("--probe", "probe.py", body=ECHO)
    for line in [*RECORDS, *SENTENCES, "no newline"]:
        assert f"{line}\n" in output
    assert folder.log() == output
    record = json.loads(re.search(r"^supervise.py: Node (\{.*\})$", output, re.MULTILINE)[1])
    assert (record["node"], record["starts"]) == (0, 1)  # one process has no link to probe
    assert record["host"] == socket.gethostname() and 0 < record["seconds"] < 20
    if record["interfaces"]:
        assert re.search(r"this node sent \S+ [kMGT]?B and received .* in \d+ s\n", output)


def test_terminal_gets_no_records_and_the_log_gets_all(folder):
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [sys.executable, "-c", spawn, *folder.command(body=ECHO)]
    lines = start(command, cwd=folder.path).finish(20).out.splitlines()
    assert set(SENTENCES) | {"no newline"} <= set(lines)
    assert not set(RECORDS) & set(lines)
    assert not [line for line in lines if "Node {" in line]
    assert set(RECORDS) <= set(folder.log().splitlines())
    assert "supervise.py: Node {" in folder.log()


def test_reader_that_is_gone_ends_neither_run_nor_log(folder):
    body = "while [ ! -e go ]; do sleep 0.05; done\nfor n in 1 2 3; do echo later $n; done"
    command = [str(word) for word in folder.command(body=body)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder.path, stdout=pipe, stderr=pipe) as process:
        wait_until(lambda: starts(folder.log()), 20, "the start")
        process.stdout.close()
        process.stderr.close()
        (folder.path / "go").touch()
        assert process.wait(20) == 0
    assert "later 1\nlater 2\nlater 3\n" in folder.log()


def test_sizes_for_people():
    texts = {0: "0 B", 999: "999 B", 1350: "1.35 kB", 999_900: "1 MB", 1.35e9: "1.35 GB"}
    assert {count: size(count) for count in texts} == texts


# --- The root cause -------------------------------------------------------------------------

REPORT = """\
E1122 08:34:31 10583 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: -9)
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10595) (SIGTERM)
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 10596) (SIGKILL)
=====
"""
KINDS = ("killed", "user", "bug", "asked", "lost", "stopped")


def cause(recorded=(), said="", program="torchrun", code=1) -> Cause:
    """What has ended a command whose ranks have recorded this and which has said that."""
    output = root_cause.OutputReader()
    for line in said.splitlines():
        output.read(line)
    causes = root_cause.find_causes(program, code, [*recorded], output)
    return root_cause.first_cause({0: causes})[1]


def test_root_cause_is_the_kind_that_causes_the_others():
    """Whatever their times: each kind here is later than those that it causes."""
    causes = [Cause(kind, kind, time=-n) for n, kind in enumerate(KINDS)]
    assert [cause(causes[n:]).kind for n in range(len(KINDS))] == [*KINDS]


def test_error_files_of_others_are_read_or_left_out(tmp_path):
    about = {"kind": "user", "timestamp": "1700000000", "rank": 5}
    messages = [
        {"message": "RuntimeError: of @record\nwith a second line"},
        "a bare text",
        {"message": "", "extraInfo": about},
        {"message": "no such folder", "extraInfo": about},
        {"message": "of an earlier start", "extraInfo": about},
    ]
    texts = ["ValueError: not JSON, or cut short", "[1, 2]"]
    texts += [json.dumps({"message": message}) for message in messages]
    for rank, text in enumerate(texts):
        path = tmp_path / f"none_x/attempt_0/{rank}/error.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    os.utime(path, (5, 5))
    found = root_cause.recorded_causes(tmp_path, since=10)
    assert sorted(found, key=lambda cause: cause.text) == [
        Cause("RuntimeError: of @record", "bug"),
        Cause("a bare text", "bug"),
        Cause("no such folder", "user", 1.7e9, 5),
    ]


WATCHDOG = (
    "[rank1]:[E1122 08:34:31.1 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=8000) ran for 8012 ms"
)
FAILED = "[rank1]: DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error"
MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
REMOTE = "ncclRemoteError: remote process exited or there was a network error"
LAST_ERROR = "ncclSystemError: System call\n[rank1]: Last error:\n[rank1]: no route"
GAVE_UP = "[rank0]: Some NCCL operations have failed or timed out. Due to the"


@pytest.mark.parametrize(
    ("said", "text", "kind"),
    [
        (f"{WATCHDOG}\nterminate called after", WATCHDOG, "lost"),
        (f"{GAVE_UP}\nx", GAVE_UP, "lost"),
        ("Operation timed out after 8000 ms\nx", "Operation timed out after 8000 ms", "lost"),
        (f"{FAILED}\nwhat():  x", FAILED, "lost"),
        (f"{FAILED}\n{LAST_ERROR}", "NCCL's last error: no route", "lost"),
        (f"{REMOTE}\nx", REMOTE, "lost"),
        (f"{WATCHDOG}\n{MEMORY}\nx", MEMORY, "user"),  # a restart would meet it again
        ("CUDA error: out of memory\nx", "CUDA error: out of memory", "user"),
    ],
)
def test_what_nccl_and_cuda_said_before_signal_6(said, text, kind):
    """To a rank of torchrun, which reports it, or to the command itself."""
    of_rank = cause(said=f"{said}\n{REPORT.replace('-9', '-6')}")
    alone = cause(said=said, program="python", code=-signal.SIGABRT)
    for found in (of_rank, alone):
        assert (found.text, found.kind) == (text, kind)


LAST_WORDS = f"the last words\n{REPORT.replace('-9', '1')}"
NO_FILE = "[CPU 0] Stopped on SIGUSR1 | step 3 | exit code 75"  # as under srun


@pytest.mark.parametrize(
    ("said", "code", "text", "kind"),
    [
        (LAST_WORDS, 3, "torchrun ended with code 3; its last line: the last words", "unknown"),
        (REPORT, 1, "rank 1 was ended by signal 9", "killed"),
        ("", -9, "torchrun was ended by signal 9", "killed"),
        ("", -6, "torchrun was ended by signal 6", "killed"),
        (NO_FILE, 75, "", "asked"),
    ],
)
def test_root_cause_without_an_error_file(said, code, text, kind):
    found = cause(said=said, code=code)
    assert (found.text, found.kind) == (text, kind)


def test_warnings_of_nccl_are_copied_from_its_files(folder):
    body = (
        r"""printf 'NCCL INFO Using network Socket\n\nNCCL WARN NET/IB : %0700d\n' 0 >nccl.h.$$"""
    )
    (folder.path / "nccl.h.1").write_text("NCCL WARN of an earlier run\n")
    os.utime(folder.path / "nccl.h.1", (5, 5))
    output = folder.run(body=body, env={"NCCL_DEBUG_FILE": f"{folder.path}/nccl.%h.%p"})
    (line,) = [line for line in folder.log().splitlines() if "NCCL WARN" in line]
    assert line.startswith("NCCL WARN NET/IB : 000") and len(line) == 500
    assert line in output and "NCCL INFO" not in output


# --- Restarts and the probe ------------------------------------------------------------------

LOST = "fail '[CPU 0] ERROR: in step 3: reset' lost"


@pytest.mark.parametrize(("step", "repeated"), [(7, "3 steps"), (5, "1 step")])
def test_restart_resumes_without_a_probe_and_says_what_it_cost(folder, step, repeated):
    body = (
        'echo "[CPU 0] Run {\\"start_step\\": $((${#count} * 2))}"\n'
        f"echo '[CPU 1] Epoch 1 | Step {step} | Loss: 1.0000'\n"
        f"echo '[CPU 0] Epoch 1 | Step {step - 1} | Loss: 1.0000'\n"
        f'[ "$count" != x ] || {LOST}\n'  # the second start, which is the training
    )
    output = folder.run("--probe", "probe.py", "--restarts", 2, body=body, nproc=2)
    saved = f"--lr 1 --checkpoint {folder.path}/logs/checkpoint.pt"
    assert [start.partition("nproc_per_node=2 ")[2] for start in starts(output)] == [
        f"probe.py {saved}",
        f"train.py {saved}",
        f"train.py {saved} --resume",
    ]
    assert "restart 1 of 2 after: [CPU 0] ERROR: in step 3: reset\n" in output
    said = f"restart 1 went on from step 4; the log had come to step {step}: {repeated} repeated"
    assert f"{said}\n" in output


@pytest.mark.parametrize("restarts", [0, 1])
def test_probe_that_fails_is_a_failure_like_any_other(folder, restarts):
    options = ("--probe", "probe.py", "--restarts", restarts)
    output = folder.run(*options, body=f'[ "$count" ] || {LOST}', nproc=2, expect=1 - restarts)
    assert len(starts(output)) == 1 + restarts
    if restarts:
        assert "restart 1 of 1 after: [CPU 0] ERROR: in step 3: reset\n" in output
        assert "train.py" in starts(output)[1]
    else:
        assert "failed in the probe of the link (PROBE=0: none), see" in output
        assert output.splitlines()[-1] == "[CPU 0] ERROR: in step 3: reset"


@pytest.mark.parametrize(
    ("error", "saved", "count"),
    [
        ("KeyError", "", 1),  # certain to come again
        ("RuntimeError", "", 2),
        ("RuntimeError", "touch logs/checkpoint.pt; ", 4),  # it came further each time
    ],
)
def test_bug_ends_the_run_where_a_restart_would_meet_it_again(folder, error, saved, count):
    body = f"{saved}fail '[CPU 0] {error}: broken' bug"
    output = folder.run("--restarts", 3, body=body, expect=1)
    assert len(starts(output)) == count
    assert output.splitlines()[-1] == f"[CPU 0] {error}: broken"
    assert ("gave up after 1 restart\n" in output) == (count == 2)


# --- Signals ---------------------------------------------------------------------------------

WAIT = "trap 'echo got TERM; exit 4' TERM\ntrap '' INT\necho ready; while :; do sleep 0.05; done"


def test_signal_is_passed_on_and_ends_the_series(folder):
    """A hang-up as SIGTERM; the launchers' tests have those that the script knows."""
    started = folder.start("--restarts", 3, body=WAIT)
    started.wait_for("ready")
    started.signal(signal.SIGHUP)
    output = started.finish(20, expect=4).out
    assert "SIGHUP: passed on to torchrun; the ranks save a checkpoint and stop" in output
    assert "got TERM" in output and "restart 1" not in output
    assert "stopped by SIGHUP, with no checkpoint saved" in output


@pytest.mark.parametrize(
    ("node_rank", "age", "more", "code", "said"),
    [
        (0, -5, "", 75, r"; the checkpoint \S+c.pt is of [\d:]+: --resume goes on from there"),
        (0, 5, "", 143, ", with no checkpoint saved"),
        (0, 5, "--resume", 75, r"; the checkpoint .* --resume goes on from there"),
        (1, 5, "", 143, "; whether a checkpoint was saved is known to node 0, which writes it"),
    ],
)
def test_stop_that_the_ranks_do_not_confirm_tells_what_is_saved(
    tmp_path, node_rank, age, more, code, said
):
    """As one that comes after the last step: the checkpoint is there, validation goes on. Of a run
    that was resumed, and has saved none yet, the one that it came from counts.
    """
    path = tmp_path / "c.pt"
    words = f"torchrun --nnodes=2 --node_rank={node_rank} --rdzv_endpoint=10.0.0.1:5000 train.py"
    command = Command([*words.split(), "--checkpoint", str(path), *more.split()])
    options, _ = supervise.parse_arguments(["--log", str(tmp_path / "log"), "--", "true"])
    supervisor = supervise.Supervisor(options, command, supervise.Output("x", options.log))
    supervisor.stopped = "SIGTERM"
    path.touch()
    os.utime(path, (0, supervisor.began - age))
    ending = supervisor.stop(Ending("stopped", "", 0, "SIGTERM"))
    assert re.fullmatch("stopped by SIGTERM" + said, ending.text) and ending.code == code


def test_second_ctrl_c_kills(folder):
    started = folder.start(body=WAIT)
    for said in ("ready", "passed on"):
        started.wait_for(said)
        started.signal(signal.SIGINT)
    assert "SIGINT again: killing the run" in started.finish(20, expect=137).out


def test_signal_while_the_nodes_wait_for_each_other():
    port = free_port()
    for node_rank in (0, 1):
        node = Node(port, node_rank, seconds=20)
        time.sleep(0.3)
        node.rendezvous.stopped = True
        assert isinstance(node.end(), Stopped)


# --- What is refused -------------------------------------------------------------------------

STATIC = "torchrun --nnodes=2 --node_rank={} --rdzv_backend=static --rdzv_endpoint={} train.py"


@pytest.mark.parametrize(
    ("words", "command", "text"),
    [
        ("", "", "no command: give it after --"),
        ("--probe none.py", "torchrun train.py", "--probe none.py: no such file"),
        ("--restarts 1", "torchrun -m module", "a script that ends in .py"),
        ("", "./none train.py", "./none cannot be started (No such file or directory)"),
        ("", STATIC.format(1, "10.0.0.1"), "--rdzv_endpoint is '10.0.0.1'"),
        ("--restarts 1", STATIC.format(1, "10.0.0.1:65535"), "give one from 1 to 65534"),
        ("", STATIC.format(0, "localhost:5000"), "'localhost' is a loopback address"),
        ("", STATIC.format(0, "192.0.2.1:5000"), "'192.0.2.1' is not an address of this node"),
        ("", STATIC.format(1, "no.such.invalid:5000"), "'no.such.invalid' does not resolve"),
    ],
)
def test_wrong_use_ends_in_one_line(folder, words, command, text):
    own = [sys.executable, ROOT / "tools/supervise.py", "--log", folder.log_path, *words.split()]
    run = start([*own, "--", *command.split()], cwd=folder.path).finish(20, expect=None)
    assert run.returncode in (1, 2)
    (line,) = [line for line in run.out.splitlines() if "error: " in line]
    assert text in line and "Traceback" not in run.out
    if "cannot be started" in text:  # the only one of these that has a log
        assert read_log([folder.log_path]).failed


def test_torchruns_options_in_all_their_forms():
    words = "torchrun --nnodes 2 --node-rank=1 --rdzv-endpoint a:29500 --rdzv_backend static"
    command = Command([*words.split(), "train.py", "--nnodes=7"])
    assert (command.nnodes, command.node_rank, command.host, command.port) == (2, 1, "a", 29500)
    assert (command.script, command.arguments) == (["train.py"], ["--nnodes=7"])
    at = command.at(rendezvous.Plan(start=3), None)
    assert at == [*words.replace("29500", "29503").split(), "train.py", "--nnodes=7"]
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"]
    command = Command([*module, f"{ROOT}/train.py", "--data", "a b"])
    assert command.is_torchrun and not command.several and command.nnodes == 1
    shown = command.shown(command.at(rendezvous.Plan(), None))
    assert shown.endswith("torchrun --nproc_per_node=1 train.py --data 'a b'")
    c10d = Command(["torchrun", "--nnodes=2", "--rdzv_backend=c10d", "train.py"])
    assert c10d.nnodes == 1 and c10d.several


# --- The meeting -----------------------------------------------------------------------------


class Node:
    """One node's meeting, in a thread of its own."""

    def __init__(self, port, node_rank, seconds=8, plan=None, last=3, token="", **more) -> None:
        self.said: list[str] = []
        settings = {"NNODES": 2, "RESTARTS": 3, "PROBE": 0} | more
        node = {"node_rank": node_rank, "host": f"host{node_rank}", "settings": settings}
        say = self.said.append
        self.rendezvous = rendezvous.Rendezvous("127.0.0.1", port, node, last, say)
        self.rendezvous.series.token = token
        thread = concurrent.futures.ThreadPoolExecutor(1)
        self.met = thread.submit(self.rendezvous.agree, plan or rendezvous.Plan(), seconds)

    def end(self) -> object:
        """What all have agreed on, or the error."""
        return self.met.exception(timeout=30) or self.met.result()


@pytest.fixture
def port():
    """Where the nodes meet, and three more."""
    return free_ports(4)


def test_nodes_meet_in_any_order_and_do_what_node_0_says(port):
    plan = rendezvous.Plan(start=2, probe=True, restarts=1)
    others = [Node(port, rank, NNODES=3) for rank in (2, 1)]
    time.sleep(0.3)
    first = Node(port, 0, plan=plan, NNODES=3)
    assert [node.end() for node in (first, *others)] == [plan] * 3
    assert first.said == [f"node 0 waits up to 8 s at 127.0.0.1:{port + 2} for 2 more"]
    assert others[0].said == [f"waiting up to 8 s for node 0 at 127.0.0.1:{port}"]
    with socket.create_server(("", port + 2)):  # free for torchrun at once
        pass


def test_different_settings_end_all_nodes_in_one_line_also_one_that_comes_later(port):
    """Within the while that node 0 stays for it, instead of waiting for nobody."""
    nodes = [Node(port, 0, NNODES=3), Node(port, 2, NNODES=3, PROBE=1)]
    wait_until(lambda: nodes[0].said[1:], 5, "node 0 to hear the difference")
    begin = time.monotonic()
    nodes.append(Node(port, 1, NNODES=3))
    errors = [node.end() for node in nodes]
    assert time.monotonic() - begin < rendezvous.LATE / 2
    line = "PROBE is 0 on node 0 (host0) but 1 on node 2 (host2): give it the same value on all"
    assert [*map(repr, errors)] == [repr(Refused(f"{line} nodes"))] * 3
    said = "the nodes cannot start together; up to 10 s more, to tell the others"
    assert nodes[0].said[1] == said


def test_rank_that_comes_twice_ends_all_nodes_in_one_line(port):
    nodes = [Node(port, rank, NNODES=3) for rank in (0, 1, 1)]
    line = "NODE_RANK 1 came twice, from host1 and host1: give each its own"
    assert [str(node.end()) for node in nodes] == [line] * 3


def test_strangers_disturb_no_meeting(port):
    """The token is for those who have introduced themselves."""
    first = Node(port, 0)
    wait_until(lambda: first.said, 5, "node 0 to listen")
    with socket.create_connection(("127.0.0.1", port), 5) as silent:
        node = Node(port, 1)
        assert node.end() == first.end() == rendezvous.Plan()
        assert b"token" not in silent.makefile("rb").read()


def test_node_that_leaves_may_come_again(port):
    first, left = Node(port, 0, NNODES=3), Node(port, 1, NNODES=3)
    time.sleep(0.5)
    left.rendezvous.stopped = True
    left.end()
    others = [Node(port, rank, NNODES=3) for rank in (1, 2)]
    assert [node.end() for node in (first, *others)] == [rendezvous.Plan()] * 3


def test_port_that_is_taken_is_passed_over(port):
    """By node 0, and by one that finds somebody there who says nothing. But for that of the first
    start: a test of the launchers has it.
    """
    with socket.create_server(("", port + 1)):
        first, node = Node(port, 0, plan=rendezvous.Plan(start=1)), Node(port, 1)
        assert first.end() == node.end() == rendezvous.Plan(start=2)
