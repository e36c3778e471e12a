"""tools/supervise.py and its parts, with commands that cost nothing in torchrun's place.

What torchrun itself does is tested with the launchers, where the real one runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import supervise
from launcher import rendezvous, root_cause
from launcher.counters import size
from launcher.torchrun_command import Command
from support.processes import LONG, ROOT, free_port, wait_until

TOOLS = ROOT / "tools"

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

    def fake(self, body: str, name: str = "torchrun") -> str:
        program = self.path / name
        program.write_text(SHELL + body)
        program.chmod(0o755)
        return f"./{name}"

    def start(self, *words: object, command: tuple = (), **options) -> subprocess.Popen:
        """`words` are supervise.py's options, `command` what it is to run."""
        line = [sys.executable, TOOLS / "supervise.py", "--log", self.log_path, *words, "--"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
        line = [str(word) for word in (*line, *command)]
        return subprocess.Popen(line, cwd=self.path, text=True, **options)

    def run(self, *words: object, body: str = "", one: bool = True) -> tuple[int, str]:
        nproc = "--nproc_per_node=1" if one else "--nproc_per_node=2"
        command = (self.fake(body), "--standalone", nproc, "train.py", "--lr", "1")
        process = self.start(*words, command=command)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def log(self) -> str:
        return self.log_path.read_text()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def starts(output: str) -> list[str]:
    """The arguments of each start."""
    return re.findall(r"^started x*: (.*)$", output, re.MULTILINE)


def read_to(process: subprocess.Popen, pattern: str) -> str:
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no {pattern}")


# --- Output ----------------------------------------------------------------------------------

RECORDS = [
    '[CPU 0] Run {"demo": 1}',
    '[GPU 12] Summary {"steps": 3}',
    '[CPU 0] Probe {"ms": 3}',
]
SENTENCES = ["[CPU 0] Summary: 3 steps", "Run {} of another program", "[CPU 0] Run of 3 steps"]
ECHO = "".join(f"echo '{line}'\n" for line in [*RECORDS, *SENTENCES]) + "printf 'no newline'"


def test_pipe_and_log_get_every_line_and_a_record_of_the_node(folder):
    code, output = folder.run(body=ECHO)
    assert code == 0
    for line in [*RECORDS, *SENTENCES, "no newline"]:
        assert f"{line}\n" in output
    assert folder.log() == output
    record = json.loads(re.search(r"^supervise.py: Node (\{.*\})$", output, re.MULTILINE)[1])
    assert (record["node"], record["starts"]) == (0, 1)
    assert record["host"] == socket.gethostname() and 0 < record["seconds"] < 20
    if record["interfaces"]:
        assert re.search(r"this node sent \S+ [kMGT]?B and received .* in \d+ s\n", output)


def test_terminal_gets_no_records_and_the_log_gets_all(folder):
    ours, theirs = pty.openpty()
    process = folder.start(command=(folder.fake(ECHO), "train.py"), stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    assert process.wait(20) == 0
    os.close(ours)
    lines = shown.decode().replace("\r\n", "\n").splitlines()
    assert set(SENTENCES) | {"no newline"} <= set(lines)
    assert not set(RECORDS) & set(lines)
    assert not [line for line in lines if "Node {" in line]
    assert set(RECORDS) <= set(folder.log().splitlines())
    assert "supervise.py: Node {" in folder.log()


@pytest.mark.parametrize("terminal", [False, True])
def test_terminal_that_is_gone_ends_neither_run_nor_log(folder, terminal):
    ours, theirs = pty.openpty() if terminal else os.pipe()
    body = "while [ ! -e go ]; do sleep 0.05; done\nfor n in 1 2 3; do echo later $n; done"
    process = folder.start(command=(folder.fake(body), "train.py"), stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_until(lambda: folder.log_path.exists() and starts(folder.log()), 20, "the start")
    os.close(ours)
    (folder.path / "go").touch()
    assert process.wait(20) == 0
    assert "later 1\nlater 2\nlater 3\n" in folder.log()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1350, "1.35 kB"), (999_900, "1 MB"), (1.35e9, "1.35 GB")],
)
def test_sizes_for_people(count, text):
    assert size(count) == text


# --- The root cause -------------------------------------------------------------------------


def write_error(folder: Path, rank: int, message: object) -> Path:
    path = folder / f"none_x/attempt_0/{rank}/error.json"
    path.parent.mkdir(parents=True)
    path.write_text(message if isinstance(message, str) else json.dumps({"message": message}))
    return path


def about(text: str, **extra: object) -> dict:
    return {
        "message": text,
        "extraInfo": {"py_callstack": "...", "timestamp": "1700000000"} | extra,
    }


REPORT = """\
E1122 08:34:31 10583 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: -9)
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 10596) (SIGKILL)
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10595) (SIGTERM)
"""
KINDS = {
    "killed": None,
    "user": about("[CPU 1] ERROR: no such folder", kind="user", timestamp=9),
    "bug": about("LookupError: broken on purpose", timestamp="1700000001"),
    "asked": about("[CPU 0] Stopped on SIGTERM | step 3 | exit 75", kind="asked", timestamp=8),
    "lost": about("[CPU 0] ERROR: in step 3: Connection closed by peer", kind="lost", timestamp=7),
    "stopped": about("[CPU 0] Stopped on the end of its parent", kind="stopped", timestamp=6),
}


def cause(folder: Path, passed_on: bool = False, lines: list | tuple = ()) -> root_cause.Cause:
    """What has ended a torchrun that left these error files and wrote these lines."""
    output = root_cause.OutputReader()
    for line in lines:
        output.read(line)
    recorded = root_cause.recorded_causes(folder, 0)
    causes = root_cause.find_causes("torchrun", 1, recorded, output)
    return root_cause.first_cause({0: causes}, stopped=passed_on)[1]


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_root_cause_is_the_kind_that_causes_the_others(tmp_path, first):
    """Whatever their times: each kind here is earlier than those that it causes."""
    kinds = list(KINDS)[first:]
    for rank, kind in enumerate(kinds):
        if kind != "killed":
            write_error(tmp_path, rank, KINDS[kind])
    found = cause(tmp_path, lines=["[CPU 0] some output", *(REPORT.splitlines() * (first == 0))])
    assert found.kind == kinds[0]
    text = KINDS[found.kind]["message"] if first else "rank 1 was ended by signal 9"
    assert found.text == text


def test_root_cause_of_one_kind_is_the_earliest(tmp_path):
    for rank, when in enumerate((3.5, 3.25, 3.75)):
        write_error(tmp_path, rank, about(f"rank {rank}", kind="lost", timestamp=when))
    assert cause(tmp_path).text == "rank 1"


def test_error_files_of_others_are_read_or_left_out(tmp_path):
    write_error(tmp_path, 0, "ValueError: of @record\nsecond line")  # not JSON: cut short
    write_error(tmp_path, 1, {"message": "RuntimeError: of @record\nwith a second line"})
    write_error(tmp_path, 2, "[1, 2]")
    write_error(tmp_path, 3, about("", kind="user"))
    write_error(tmp_path, 4, "a str message, as torch may write it")
    write_error(tmp_path, 5, '{"message": "a bare text"}')
    old = write_error(tmp_path, 6, about("of an earlier start", kind="user"))
    os.utime(old, (5, 5))
    found = root_cause.recorded_causes(tmp_path, 10)
    assert {(cause.text, cause.kind) for cause in found} == {
        ("RuntimeError: of @record", "bug"),
        ("a bare text", "bug"),
    }


def test_signal_that_was_passed_on_is_no_failure_whatever_else_failed(tmp_path):
    write_error(tmp_path, 0, KINDS["asked"])
    write_error(tmp_path, 1, KINDS["bug"])
    assert [cause(tmp_path, passed_on).kind for passed_on in (True, False)] == ["asked", "bug"]


WATCHDOG = (
    "[rank1]:[E1122 08:34:31.1 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=8000) ran for 8012 ms"
)
FAILED = "[rank1]: DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error"
MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


REMOTE = "ncclRemoteError: remote process exited or there was a network error"
LAST_ERROR = ["ncclSystemError: System call", "[rank1]: Last error:", "[rank1]: no route"]
NCCL_SAID = [
    ([WATCHDOG, "terminate called after"], WATCHDOG, "lost"),
    (["[rank0]: Some NCCL operations have failed or timed out. Due to the", "x"], None, "lost"),
    (["Operation timed out after 8000 ms", "x"], None, "lost"),
    ([FAILED, "what():  x"], FAILED, "lost"),
    ([FAILED, *LAST_ERROR], "NCCL's last error: no route", "lost"),
    ([REMOTE, "x"], REMOTE, "lost"),
    ([WATCHDOG, MEMORY, "x"], MEMORY, "user"),
    (["RuntimeError: CUDA error: out of memory", "x"], None, "user"),
]


@pytest.mark.parametrize(("lines", "cause", "kind"), NCCL_SAID)
@pytest.mark.parametrize("of_torchrun", [True, False])
def test_what_nccl_and_cuda_said_before_signal_6(lines, cause, kind, of_torchrun):
    """The last line is torchrun's own here, or of a process that a signal has ended."""
    facts = root_cause.OutputReader()
    for line in [*lines, *(REPORT.replace("-9", "-6").splitlines() + ["====="]) * of_torchrun]:
        facts.read(line)
    name, code = ("torchrun", 1) if of_torchrun else ("python", -signal.SIGABRT)
    causes = root_cause.find_causes(name, code, [], facts)
    _, found = root_cause.first_cause({0: causes})
    assert (found.text, found.kind) == (cause or lines[0], kind)


@pytest.mark.parametrize(("lines", "cause", "kind"), [NCCL_SAID[4], NCCL_SAID[6]])
def test_what_nccl_and_cuda_said_is_the_last_line(folder, lines, cause, kind):
    """And tells whether another start may help."""
    text = "\n".join([*lines, REPORT.replace("-9", "-6"), "====="])
    code, output = folder.run("--restarts", 1, body=f"cat <<'EOF'\n{text}\nEOF\nexit 1")
    assert (code, len(starts(output))) == (1, 1 + (kind == "lost"))
    assert output.splitlines()[-1] == cause
    script = folder.path / "abort.py"
    script.write_text(f"import os\nprint({chr(10).join(lines)!r}, flush=True)\nos.abort()")
    process = folder.start(command=(sys.executable, script))
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 134 and output.splitlines()[-1] == cause


def test_warnings_of_nccl_are_copied_from_its_files(folder):
    body = (
        "cat >>nccl.node0.host.$$.log <<'EOF'\n"
        "host:1:2 [0] NCCL INFO Using network Socket\n\n"
        f"host:1:2 [0] ib.cc:9 NCCL WARN NET/IB : {'x' * 700}\nEOF\nexit 3"
    )
    (folder.path / "nccl.node0.host.1.log").write_text("NCCL WARN of an earlier run\n")
    os.utime(folder.path / "nccl.node0.host.1.log", (5, 5))
    env = os.environ | {"NCCL_DEBUG_FILE": f"{folder.path}/nccl.node0.%h.%p.log"}
    process = folder.start(command=(folder.fake(body), "train.py"), env=env)
    output, _ = process.communicate(timeout=20)
    (line,) = [line for line in folder.log().splitlines() if "NCCL WARN" in line]
    assert line.startswith("host:1:2 [0] ib.cc:9 NCCL WARN NET/IB : xxx") and len(line) == 500
    assert line in output and "NCCL INFO" not in output


LAST_WORDS = f"echo the last words\ncat <<'EOF'\n{REPORT.replace('-9', '1')}\n=====\nEOF\nexit 3"


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        (LAST_WORDS, 3, "torchrun ended with code 3; its last line: the last words"),
        ("kill -9 $$", 137, "torchrun was ended by signal 9"),
        ("kill -ABRT $$", 134, "torchrun was ended by signal 6"),
    ],
    ids=["code", "killed", "aborted"],
)
def test_root_cause_without_an_error_file(folder, body, code, line):
    found, output = folder.run(body=body)
    assert (found, output.splitlines()[-1]) == (code, line)
    assert "failed, see" in output.splitlines()[-2]


def test_other_commands_stop_with_75_by_what_they_print(folder):
    line = "[CPU 0] Stopped on SIGUSR1 | step 3 | exit code 75"
    command = (folder.fake(f"echo '{line}'; exit 75", "srun"), "-N", "2", "python", "train.py")
    process = folder.start("--restarts", 2, command=command)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75 and "stopped on a signal, exit code 75" in output
    assert len(starts(output)) == 1


# --- Restarts and the probe ------------------------------------------------------------------

LOST = "fail '[CPU 0] ERROR: in step 3: reset' lost"


def test_restart_resumes_and_says_what_it_cost(folder):
    body = (
        'echo "[CPU 0] Run {\\"start_step\\": $((${#count} * 4))}"\n'
        "echo '[CPU 1] Epoch 1 | Step 7 | Loss: 1.0000'\n"
        "echo '[CPU 0] Epoch 1 | Step 6 | Loss: 1.0000'\n"
        f'[ "$count" ] || {LOST}\n'
    )
    code, output = folder.run("--restarts", 2, body=body)
    assert code == 0
    given = f"--standalone --nproc_per_node=1 train.py --lr 1 --checkpoint {folder.path}/logs"
    assert starts(output) == [f"{given}/checkpoint.pt", f"{given}/checkpoint.pt --resume"]
    assert "restart 1 of 2 after: [CPU 0] ERROR: in step 3: reset\n" in output
    said = "restart 1 went on from step 4; the log had come to step 7: 3 steps repeated"
    assert said in output


def test_probe_runs_once_and_not_after_a_restart(folder):
    body = f'[ "$count" != x ] || {LOST}\n'  # the second start, which is the training
    code, output = folder.run("--probe", "probe.py", "--restarts", 1, body=body, one=False)
    assert code == 0
    assert [re.search(r"\w+\.py", start)[0] for start in starts(output)] == [
        "probe.py",
        "train.py",
        "train.py",
    ]
    assert [start.endswith("--resume") for start in starts(output)] == [False, False, True]


def test_one_process_has_no_link_to_probe(folder):
    code, output = folder.run("--probe", "probe.py")
    assert (code, len(starts(output))) == (0, 1) and "probe.py" not in starts(output)[0]


@pytest.mark.parametrize("restarts", [0, 1])
def test_probe_that_fails_is_a_failure_like_any_other(folder, restarts):
    body = f'[ "$count" ] || {LOST}\n'
    options = ("--probe", "probe.py", "--restarts", restarts)
    code, output = folder.run(*options, body=body, one=False)
    assert (code, len(starts(output))) == ((0, 2) if restarts else (1, 1))
    if restarts:
        assert "restart 1 of 1 after: [CPU 0] ERROR: in step 3: reset\n" in output
        assert "train.py" in starts(output)[1]
    else:
        assert "failed in the probe of the link (PROBE=0: none), see" in output
        assert output.splitlines()[-1] == "[CPU 0] ERROR: in step 3: reset"


# --- Signals ---------------------------------------------------------------------------------

WAIT = "trap 'echo got USR1; exit 4' USR1\ntrap 'echo got TERM; exit 4' TERM\n"
WAIT += "trap '' INT\necho ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(("sent", "got"), [("SIGUSR1", "USR1"), ("SIGHUP", "TERM")])
def test_signal_is_passed_on_and_ends_the_series(folder, sent, got):
    process = folder.start("--restarts", 3, command=(folder.fake(WAIT), "train.py"))
    read_to(process, "ready")
    process.send_signal(signal.Signals[sent])
    output, _ = process.communicate(timeout=20)
    assert f"{sent}: passed on to torchrun; the ranks save a checkpoint and stop" in output
    assert f"got {got}" in output and "restart 1" not in output
    assert f"stopped by {sent}, with no checkpoint saved" in output
    assert process.returncode == 4


@pytest.mark.parametrize("node_rank", [0, 1])
@pytest.mark.parametrize("saved", [True, False])
def test_stop_that_the_ranks_do_not_confirm_tells_what_is_saved(tmp_path, node_rank, saved):
    """As one that comes after the last step: the checkpoint is there, validation goes on."""
    path = tmp_path / "c.pt"
    path.touch()
    words = f"torchrun --nnodes=2 --node_rank={node_rank} --rdzv_endpoint=10.0.0.1:5000 train.py"
    command = Command([*words.split(), "--checkpoint", str(path)])
    options, _ = supervise.parse_arguments(["--log", str(tmp_path / "log"), "--", "true"])
    supervisor = supervise.Supervisor(options, command, supervise.Output("x", options.log))
    supervisor.stopped = "SIGTERM"
    moment = time.time() + 5 if saved else supervisor.began - 5
    os.utime(path, (moment, moment))
    text = supervisor.stopped_by()
    if saved:
        assert re.fullmatch(
            r"stopped by SIGTERM; the checkpoint \S+c.pt is of [\d:]+: --r.*", text
        )
    elif node_rank:
        assert text.endswith("is known to node 0, which writes it")
    else:
        assert text == "stopped by SIGTERM, with no checkpoint saved"


def test_second_ctrl_c_kills(folder):
    process = folder.start(command=(folder.fake(WAIT), "train.py"))
    read_to(process, "ready")
    process.send_signal(signal.SIGINT)
    read_to(process, "passed on")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert "SIGINT again: killing the run" in output and process.returncode == 137


def test_signal_while_the_nodes_wait_for_each_other():
    place = {"host": "127.0.0.1", "port": free_port()}
    for node_rank in (0, 1):
        node = Node(place, node_rank, seconds=20)
        time.sleep(0.3)
        node.rendezvous.stopped = True
        assert isinstance(node.end(), rendezvous.Stopped)


# --- What is refused -------------------------------------------------------------------------

STATIC = "torchrun --nnodes=2 --node_rank={} --rdzv_backend=static --rdzv_endpoint={} train.py"


@pytest.mark.parametrize(
    ("words", "command", "text"),
    [
        ("", "", "no command: give it after --"),
        ("--restarts x", "torchrun train.py", "argument --restarts: invalid int value: 'x'"),
        ("--probe none.py", "torchrun train.py", "--probe none.py: no such file"),
        ("--restarts 1", "torchrun -m module", "a script that ends in .py"),
        ("--log /proc/none/log", "true", "the log /proc/none/log cannot be written (No such file"),
        ("", "./none train.py", "./none cannot be started (No such file or directory)"),
        ("", STATIC.format(1, "10.0.0.1"), "--rdzv_endpoint is '10.0.0.1'"),
        ("--restarts 1", STATIC.format(1, "10.0.0.1:65535"), "give one from 1 to 65534"),
        ("", STATIC.format(0, "localhost:5000"), "'localhost' is a loopback address"),
        ("", STATIC.format(0, "192.0.2.1:5000"), "'192.0.2.1' is not an address of this node"),
        ("", STATIC.format(1, "no.such.invalid:5000"), "'no.such.invalid' does not resolve"),
    ],
)
def test_wrong_use_ends_in_one_line(folder, words, command, text):
    process = folder.start(*words.split(), command=command.split())
    output, _ = process.communicate(timeout=20)
    assert process.returncode in (1, 2)
    (line,) = [line for line in output.splitlines() if "error: " in line]
    assert text in line and "Traceback" not in output


def test_torchruns_options_in_all_their_forms(tmp_path):
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

    def __init__(
        self, place: dict, node_rank: int, seconds: float = 8, plan=None, last=3, nnodes=2, **more
    ) -> None:
        self.said: list[str] = []
        settings = {"NNODES": nnodes, "RESTARTS": 3, "PROBE": 0} | more
        node = {"node_rank": node_rank, "host": f"host{node_rank}", "settings": settings}
        self.rendezvous = rendezvous.Rendezvous(
            **place, node=node, last=last, say=self.said.append
        )
        self.thread = threading.Thread(target=self._run, args=(plan or rendezvous.Plan(), seconds))
        self.thread.start()

    def _run(self, plan, seconds) -> None:
        try:
            self.result = self.rendezvous.agree(plan, seconds)
        except Exception as error:
            self.result = error

    def end(self) -> object:
        self.thread.join(30)
        assert not self.thread.is_alive(), "it hangs"
        return self.result


@pytest.fixture
def place():
    """Where the nodes meet: four ports in a row that are free."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for n in range(4):
                stack.enter_context(socket.create_server(("", port + n)))
            return {"host": "127.0.0.1", "port": port}


def test_nodes_meet_in_any_order_and_do_what_node_0_says(place):
    plan = rendezvous.Plan(start=2, probe=True, restarts=1)
    others = [Node(place, rank, nnodes=3) for rank in (2, 1)]
    time.sleep(0.3)
    first = Node(place, 0, plan=plan, nnodes=3)
    assert [node.end() for node in (first, *others)] == [plan] * 3
    port = place["port"]
    assert first.said == [f"node 0 waits up to 8 s at 127.0.0.1:{port + 2} for 2 more"]
    assert others[0].said == [f"waiting up to 8 s for node 0 at 127.0.0.1:{port}"]
    with socket.create_server(("", port + 2)):  # free for torchrun at once
        pass


@pytest.mark.parametrize(("name", "value"), [("RESTARTS", 2), ("PROBE", 1), ("NNODES", 4)])
def test_different_settings_end_all_nodes_in_one_line(place, name, value):
    nodes = [
        Node(place, rank, nnodes=3, **({name: value} if rank == 2 else {})) for rank in range(3)
    ]
    lines = {str(node.end()) for node in nodes}
    theirs = f"{value} on node 2 (host2)"
    assert all(isinstance(node.result, rendezvous.Refused) for node in nodes)
    (line,) = lines
    assert line.startswith(f"{name} is ") and f" on node 0 (host0) but {theirs}" in line


def test_node_that_comes_after_a_difference_ends_with_the_same_line(place):
    """Within the while that node 0 stays for it, instead of waiting for nobody."""
    nodes = [Node(place, 0, nnodes=3), Node(place, 2, nnodes=3, PROBE=1)]
    wait_until(lambda: nodes[0].said[1:], 5, "node 0 to hear the difference")
    begin = time.monotonic()
    nodes.append(Node(place, 1, nnodes=3))
    lines = {str(node.end()) for node in nodes}
    assert time.monotonic() - begin < rendezvous.LATE / 2
    assert lines == {
        "PROBE is 0 on node 0 (host0) but 1 on node 2 (host2): give it the same value on all nodes"
    }
    assert (
        nodes[0].said[1] == "the nodes cannot start together; up to 10 s more, to tell the others"
    )


@pytest.mark.parametrize(
    ("ranks", "nnodes", "seconds", "line"),
    [
        ((0, 1, 1), 3, 8, "NODE_RANK 1 came twice, from host1 and host1: give each its own"),
        (
            (0, 2),
            4,
            1,
            "the other nodes did not all come within 1 s (missing: node 1, 3): start the launcher "
            "on each node with its NODE_RANK",
        ),
    ],
    ids=["rank twice", "missing"],
)
def test_nodes_that_cannot_start_end_in_one_line(place, ranks, nnodes, seconds, line):
    """`seconds`: those that node 0 waits for the others."""
    first, *others = ranks
    nodes = [Node(place, first, seconds, nnodes=nnodes)]
    nodes += [Node(place, rank, nnodes=nnodes) for rank in others]
    assert {str(node.end()) for node in nodes} == {line}


def test_node_0_that_does_not_come(place):
    line = str(Node(place, 1, seconds=1).end())
    assert line.startswith(f"node 0 did not answer at 127.0.0.1:{place['port']} within 1 s (Conn")
    assert "start the launcher there with NODE_RANK=0, and open the port" in line


@LONG
def test_what_listens_silently_is_no_meeting(place):
    """An attempt that has not ended yet, on the first port: node 0 is two starts further."""
    with socket.create_server(("", place["port"])):
        node = Node(place, 1, seconds=20)
        time.sleep(3)
        first = Node(place, 0, plan=rendezvous.Plan(start=2))
        assert node.end() == first.end() == rendezvous.Plan(start=2)
        line = str(Node(place, 1, seconds=1, last=0).end())
    assert f"port {place['port']} is held by another program or an earlier start" in line


@pytest.mark.parametrize("anew", [0, 1])
def test_node_that_was_started_anew_finds_the_others(place, anew):
    """Its own first start, while the other one is at its fourth."""
    plans = [rendezvous.Plan(start=3, restarts=3), rendezvous.Plan(start=3, restarts=3)]
    plans[anew] = rendezvous.Plan()
    nodes = [Node(place, rank, plan=plans[rank]) for rank in (0, 1)]
    assert [node.end() for node in nodes] == [plans[0]] * 2


def test_strangers_disturb_no_meeting(place):
    first = Node(place, 0)
    wait_until(lambda: first.said, 5, "node 0 to listen")
    for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b'{"node_rank": 1}\n', b"[1]\n", b"\xff\n"):
        with socket.create_connection(tuple(place.values())) as stranger:
            stranger.sendall(text)
    silent = socket.create_connection(tuple(place.values()))
    node = Node(place, 1)
    assert node.end() == first.end() == rendezvous.Plan()
    silent.close()


def test_node_that_leaves_may_come_again(place):
    first, left = Node(place, 0, nnodes=3), Node(place, 1, nnodes=3)
    time.sleep(0.5)
    left.rendezvous.stopped = True
    left.end()
    others = [Node(place, rank, nnodes=3) for rank in (1, 2)]
    assert [node.end() for node in (first, *others)] == [rendezvous.Plan()] * 3


def test_port_that_is_taken_is_passed_over_but_for_the_first(place):
    with socket.create_server(("", place["port"])):
        line = str(Node(place, 0).end())
    port = place["port"]
    assert line.startswith(f"port {port} cannot be used on this node (Address already in use)")
    with socket.create_server(("", port + 1)):
        first, node = Node(place, 0, plan=rendezvous.Plan(start=1)), Node(place, 1)
        assert first.end() == node.end() == rendezvous.Plan(start=2)
