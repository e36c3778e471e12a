"""One truth on all nodes: what came first, whether to go on, and with which exit code.

Real supervisors, with the stand-ins of torchrun and of the script, all on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import test_faults as faults
from analysis.logs import read_log
from launcher import nodes
from launcher.ending import End, Ending, make_ending, read_ending, tell_end, tell_ending
from launcher.root_cause import GIVEN_UP, Cause, OutputReader, find_causes, first_cause
from support.datasets import make_set
from support.nodes import NamespacePair
from support.processes import LONG, ROOT, SCRIPT, WITH_STAND_IN, Started, free_ports

TIMEOUT = 4  # the script's --timeout, seconds
IN_TIME = 20  # seconds from a failure to the end on all nodes, as docs/faults.md has it
HANG_IN_TIME = TIMEOUT + 15
STEPS = ROOT / "tests" / "support" / "stand_in" / "steps.py"

# All nodes may be this machine: the loopback address, which a user's node 0 must not have, is
# right. $GRACE: seconds from a failure until what has not ended is killed.
SUPERVISE = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import supervise
from launcher import supervisor
supervisor.check_master = lambda host, node_rank: None
supervisor.GRACE = int(os.environ.get("GRACE", supervisor.GRACE))
sys.exit(supervise.main())
"""


# --- The choice --------------------------------------------------------------------------------

# Each may have caused those after it.
ORDER = ["killed", "user", "bug", "asked", "unknown", "lost", "stopped"]
WAITING = ["stood still in", "had not begun", "was in", "ended in", "waited in"]
CASES = [*itertools.product([None, *ORDER], repeat=3)]  # of three nodes; None: nothing is told


def told_by(kinds: tuple) -> dict[int, list[Cause]]:
    """Two ranks a node, of which the second failed first; the clocks of the nodes disagree."""
    return {
        node: [
            Cause(f"rank {rank}", kind, 1000 * (3 - node) - rank, rank)
            for rank in (2 * node, 2 * node + 1)
            if kind
        ]
        for node, kind in enumerate(kinds)
    }


def test_first_cause_is_that_of_the_first_kind_then_of_the_lowest_rank():
    assert len(CASES) == 512
    for kinds in CASES:
        found = first_cause(told_by(kinds))
        if not any(kinds):
            assert found is None
            continue
        kind = next(kind for kind in ORDER if kind in kinds)
        node, cause = found
        assert (node, cause.kind) == (kinds.index(kind), kind), kinds
        assert cause.rank == 2 * node + 1, "on one node the earliest"


def test_first_cause_knows_no_order_of_answers_and_no_clock_of_another_node():
    for kinds in CASES:
        causes, found = told_by(kinds), first_cause(told_by(kinds))
        for order in itertools.permutations(causes):
            assert first_cause({node: causes[node] for node in order}) == found, kinds
        for node in causes:
            later = [replace(cause, time=cause.time + 5000) for cause in causes[node]]
            moved = first_cause(causes | {node: later})
            assert (moved and (moved[0], moved[1].text)) == (found and (found[0], found[1].text))


def test_missing_answer_makes_no_other_cause_appear():
    """Only where the answer with the cause itself is missing another one of those told counts."""
    for kinds in CASES:
        causes, found = told_by(kinds), first_cause(told_by(kinds))
        for missing in causes:
            rest = {node: causes[node] for node in causes if node != missing}
            without = first_cause(rest)
            if found is None or found[0] != missing:
                assert without == found, (kinds, missing)
            else:
                assert without is None or without[1] in rest[without[0]], (kinds, missing)


def test_of_lost_connections_who_was_waited_for_comes_first():
    for hows in itertools.product(WAITING, repeat=3):
        causes = {node: [Cause(f"rank {node}", "lost", -node, node)] for node in range(3)}
        standing = {node: [[node, how, "step 3"]] for node, how in enumerate(hows)}
        first = min(range(3), key=lambda node: WAITING.index(hows[node]))
        assert first_cause(causes, standing)[0] == first, hows
        # One that has failed by itself need not have been late.
        bugs = {node: [Cause("", "bug", -node, node)] for node in range(3)}
        assert first_cause(bugs, standing)[0] == 0, hows


def test_rank_that_did_not_end_comes_before_those_that_waited_for_it():
    waits = {node: [Cause("timed out", "lost", 1, node)] for node in (0, 1)}
    standing = {0: [[0, "waited in", "step 3"]], 1: [[1, "waited in", "step 3"]]}
    standing[2] = [[2, "stood still in", "step 3"], [3, "waited in", "step 3"]]
    killed = [Cause("timed out", "lost", 1, 3), Cause("rank 2 stood still", "lost", 9)]
    assert first_cause(waits | {2: killed}, standing) == (2, killed[1])


@pytest.mark.parametrize("stopped", [True, False])
def test_what_fails_after_a_stop_that_was_asked_for_is_no_cause(stopped):
    for kinds in CASES:
        if "asked" in kinds:
            _, found = first_cause(told_by(kinds), stopped=stopped)
            first = "asked" if stopped else next(kind for kind in ORDER if kind in kinds)
            assert found.kind == first, kinds


REPORT = """\
E1122 08:34:31 10583 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: {0})
  rank      : 1 (local_rank: 1)
  exitcode  : {0} (pid: 10596)"""


@pytest.mark.parametrize(
    ("code", "signal_of_rank", "how", "kind"),
    [
        (1, -15, {}, "unknown"),  # by torchrun
        (-9, 0, {"given_up": True}, "lost"),  # by the launcher
        (-15, 0, {"stopped": True}, "stopped"),
    ],
)
def test_kill_by_launcher_or_torchrun_is_no_cause(code, signal_of_rank, how, kind):
    """One from outside is: test_supervise.py."""
    said = OutputReader()
    for line in REPORT.format(signal_of_rank).splitlines() if signal_of_rank else ():
        said.read(line)
    assert [cause.kind for cause in find_causes("torchrun", code, [], said, **how)] == [kind]


NAMES = ["node 0 (a)", "node 1 (b)"]


@pytest.mark.parametrize(
    ("first", "second", "kind", "text", "code", "stopped"),
    [
        (End(), End(), "done", "", 0, ""),
        (
            End(1, [Cause("x", "lost", 1, 0)]),
            End(137, [Cause("y", "killed")]),
            "killed",
            "Y",
            137,
            "",
        ),
        (End(1, [Cause("x", "lost", 1, 0)]), End(0), "lost", "node 0 (a): x", 1, ""),
        (End(1, [Cause("x", "asked")]), End(1, [Cause("y", "lost")]), "asked", "X", 75, ""),
        (End(1, [Cause("x", "bug")]), End(1, [], "SIGINT"), "bug", "X", 1, "SIGINT on node 1 (b)"),
    ],
)
def test_ending_of_two_nodes(first, second, kind, text, code, stopped):
    text = {"X": "node 0 (a): x", "Y": "node 1 (b): y"}.get(text, text)
    ending = make_ending({0: first, 1: second}, [], NAMES)
    assert ending == Ending(kind, text, code, stopped)
    assert ending.final == (kind in ("done", "asked") or bool(stopped))


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("[CPU 3] KeyError: 'x'", True),
        ("TypeError: of @record", True),
        ("[CPU 3] RuntimeError: CUDA error: unspecified launch failure", False),
        ("[CPU 3] ConnectionError: x", False),
    ],
)
def test_bug_that_is_certain_to_come_again_is_final_on_all_nodes(text, final):
    ending = make_ending({0: End(), 1: End(1, [Cause(text, "bug")])}, [], NAMES)
    assert ending.final == read_ending(tell_ending(ending)).final == final


def test_one_node_is_not_named_and_a_line_that_names_nodes_stays_as_it_is():
    end = End(1, [Cause("x" * 400, "user")])
    assert make_ending({0: end}, [], ["node 0 (a)"]).text == "x" * 400
    long = "step " + 400 * "3"
    waits = End(1, [Cause("timed out", "lost", 1, 0)], ranks=[[0, "waited in", long]])
    hangs = End(1, [Cause(GIVEN_UP, "lost")], ranks=[[1, "stood still in", long]])
    line = f"rank 1 stood still in {long}; rank 0 waited in {long}: look at node 1 (b)"
    ending = make_ending({0: waits, 1: hangs}, [], NAMES)
    assert (ending.text, ending.where) == (line, line)
    # Where no rank has told its phase, and where a node has said nothing.
    hangs.ranks = []
    assert make_ending({1: hangs}, [], NAMES).text == f"node 1 (b): {GIVEN_UP}"
    assert make_ending({1: hangs}, [0], NAMES).text.startswith("node 0 (a) did not answer: look")


# --- The messages ------------------------------------------------------------------------------


def of_a_pair(stack: contextlib.ExitStack) -> tuple[nodes.Nodes, socket.socket]:
    """Node 0's side of a run on two nodes, and a socket that speaks for node 1."""
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    node_0 = nodes.Nodes({1: ours}, 0, NAMES, 30)
    stack.callback(node_0.close)
    return node_0, theirs


def test_end_is_told_with_its_moment_and_at_most_300_characters():
    text = "\x1b[31m[CPU 0] Summary {}\n" + 400 * "x"
    sent = tell_end(End(1, [Cause(text, "bug", 1005.5, 3)] * 20, "SIGTERM"), began=1000)
    with contextlib.ExitStack() as stack:
        node_0, node_1 = of_a_pair(stack)
        node_1.sendall(json.dumps({"end": sent}).encode() + b"\n")
        node_0.listen(5)
        end = node_0.ends[1]
    assert (end.code, end.stopped, len(end.causes)) == (1, "SIGTERM", 8)
    cause = end.causes[0]
    assert (cause.kind, cause.time, cause.rank) == ("bug", 5.5, 3)
    assert len(cause.text) == 300 and cause.text.startswith("?[31m[CPU 0] Summary {}?xx")


GOOD = {"code": 1, "causes": [], "stopped": "", "ranks": []}
CAUSE = {"kind": "bug", "text": "x", "rank": 0, "time": 1}
BAD = [
    *(None, 3, "end", [], {}, {"end": None}, {"end": []}, {"end": {"code": 1}}),
    *({"end": GOOD | {"code": code}} for code in (None, "1", True, 1e9, 10**30)),
    *({"end": GOOD | {"ranks": ranks}} for ranks in (1, [1], [[0, "flew in", "x"]])),
    {"end": GOOD | {"ranks": [["0", "was in", "x"]]}},
    *({"end": GOOD | {"causes": [bad]}} for bad in (None, 1, {}, CAUSE | {"kind": "x"})),
    *({"end": GOOD | {"causes": [CAUSE | {"rank": rank}]}} for rank in ("0", 1.5, [])),
    *(
        {"end": GOOD | {"causes": [CAUSE | {"time": moment}]}}
        for moment in (None, "x", float("nan"), {})
    ),
    *({"ending": 3}, {"ending": {}}, {"stopped": 7}, {"stopped": "\x1b[2J"}),
]


@pytest.mark.parametrize(
    "text", [*map(json.dumps, BAD), "[" * 100_000, "\xff\xfe", "{" * 9], ids=range(len(BAD) + 3)
)
def test_message_of_another_form_says_nothing(text):
    with contextlib.ExitStack() as stack:
        node_0, node_1 = of_a_pair(stack)
        node_1.sendall(text.encode("latin1") + b"\n" + b'{"failed": true}\n')
        deadline = time.monotonic() + 5
        while not node_0.failed_at and time.monotonic() < deadline:
            node_0.listen(0.1)
        assert node_0.failed_at, "what comes after it is read"
        assert not (node_0.ends or node_0.stops or node_0.ending)


def test_message_without_an_end_loses_the_connection_not_the_memory(monkeypatch):
    monkeypatch.setattr(nodes, "LONGEST", 10_000)
    with contextlib.ExitStack() as stack:
        node_0, node_1 = of_a_pair(stack)
        node_1.sendall(b"x" * 20_000)
        node_0.listen(1)
        assert not node_0.connections and node_0.failed_at


def test_node_that_is_cut_off_has_its_own_view():
    ours, theirs = socket.socketpair()
    node_1 = nodes.Nodes({0: ours}, 1, NAMES, 30)
    theirs.close()
    assert (
        node_1.conclude(End(1, [Cause("x", "lost")]), 0, lambda: pytest.fail("not here")) is None
    )
    node_1.close()


def test_signal_to_a_node_that_waits_for_the_ending_is_told():
    ours, node_0 = socket.socketpair()
    node_0.settimeout(10)
    node_1, own = nodes.Nodes({0: ours}, 1, NAMES, 30), End()
    found: list[Ending | None] = []
    waiting = threading.Thread(target=lambda: found.append(node_1.conclude(own, 0, Ending)))
    waiting.start()
    with node_0, node_0.makefile("rb") as told:
        assert json.loads(told.readline())["end"]["stopped"] == ""
        own.stopped = "SIGTERM"
        assert json.loads(told.readline())["end"]["stopped"] == "SIGTERM"
        ending = Ending("done", "", 0, "SIGTERM on node 1 (b)")
        node_0.sendall(json.dumps({"ending": tell_ending(ending)}).encode() + b"\n")
        waiting.join(10)
    assert found == [ending]
    node_1.close()


# --- Real supervisors --------------------------------------------------------------------------


class Place:
    """So many nodes, all on this machine or each on one of a pair; how each has ended is told by
    its log.
    """

    def __init__(self, folder: Path, nnodes: int = 3, pair: NamespacePair | None = None) -> None:
        self.folder, self.nnodes, self.pair = folder, nnodes, pair
        self.address = f"{pair.addresses[0]}:29500" if pair else f"127.0.0.1:{free_ports(6)}"
        self.runs: list[Started] = []
        self.ends: dict[int, float] = {}  # node: when it ended
        folder.mkdir(parents=True)

    def start(self, *arguments: object, options=(), timeout=TIMEOUT, nproc=1, **env: str) -> None:
        """The supervisors have `options`, the script's stand-in the arguments."""
        self.hit_at = time.time()
        how = {"cwd": self.folder, "env": WITH_STAND_IN | env}
        for node in range(self.nnodes):
            line = [sys.executable, "-c", SUPERVISE, "--log", self.folder / f"node{node}.log"]
            line += [*options, "--", sys.executable, "-m", "torch.distributed.run"]
            line += [f"--nnodes={self.nnodes}", f"--node_rank={node}", "--rdzv_backend=static"]
            line += [f"--rdzv_endpoint={self.address}", f"--nproc_per_node={nproc}", STEPS]
            line += ["--timeout", timeout, *arguments]
            start = partial(self.pair.popen, node) if self.pair else Started
            self.runs.append(start(line, **how))

    def training(self) -> None:
        for run in self.runs:
            run.wait_for(r"Step 3 ", 60)

    def hit(self, how: Callable, *arguments: int) -> None:
        self.hit_at = time.time()
        how(*arguments)

    def all_ended(self) -> bool:
        for node, run in enumerate(self.runs):
            if run.process.poll() is not None:
                self.ends.setdefault(node, time.time())
        return len(self.ends) == self.nnodes

    def kill(self) -> None:
        for node, run in enumerate(self.runs):
            run.kill()
            for folder in re.findall(r"^PHASES (/.+)$", self.log(node), re.MULTILINE):
                shutil.rmtree(folder, ignore_errors=True)  # of a supervisor that was killed

    def log(self, node: int) -> str:
        path = self.folder / f"node{node}.log"
        return path.read_text() if path.exists() else ""

    def last_lines(self, *nodes: int) -> set[str]:
        return {self.log(node).splitlines()[-1] for node in nodes or range(self.nnodes)}

    def codes(self, *nodes: int) -> set[int | None]:
        """None: it went on."""
        return {self.runs[node].process.poll() for node in nodes or range(self.nnodes)}

    def seconds(self) -> float:
        """From the fault, which its rank has told, to the last end."""
        text = "".join(self.log(node) for node in range(self.nnodes))
        if told := re.findall(r"^FAULT ([\d.]+)$", text, re.MULTILINE):
            self.hit_at = float(told[-1])
        return max(self.ends.values()) - self.hit_at


def wait_for(places: list[Place], seconds: float) -> None:
    """Until all have ended; after so many seconds the others are ended, and have no code."""
    deadline = time.monotonic() + seconds
    while not all([place.all_ended() for place in places]) and time.monotonic() < deadline:
        time.sleep(0.05)


FAULTS = {"memory": "2:3:user", "killed": "1:3:kill", "hang": "1:3:hang", "again": "1:1:again"}
RESTARTS = {"memory": 1, "again": 3}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    """All scenarios at once: what takes the time is waiting."""
    folder = tmp_path_factory.mktemp("first cause")
    places = {name: Place(folder / name) for name in (*FAULTS, "stop")}
    try:
        for name, fault in FAULTS.items():
            options = ("--restarts", RESTARTS.get(name, 0))
            places[name].start("--fault", fault, options=options)
        stop_between_restarts(places["stop"])
        wait_for([*places.values()], 45)
        yield places
    finally:
        for place in places.values():
            place.kill()


def stop_between_restarts(place: Place) -> None:
    """Node 1's launcher is killed, so that the others wait for it; node 2 gets a signal then."""
    place.start(options=("--restarts", 1))
    place.training()
    place.hit(os.kill, place.runs[1].pid, signal.SIGKILL)
    for node in (0, 2):
        place.runs[node].wait_for(r"restart 1 of 1 after", 60)
    time.sleep(1)
    place.hit(os.kill, place.runs[2].pid, signal.SIGTERM)


def test_out_of_memory_on_the_last_node_is_the_last_line_of_all(ended):
    """On the others it was "Connection closed by peer"."""
    (line,) = ended["memory"].last_lines()
    assert re.fullmatch(r"node 2 \(\S+\): \[CPU 2\] ERROR: in step 3: CUDA out of memory.*", line)


def test_log_of_node_0_alone_has_the_cause_for_compare_logs(ended):
    folder = ended["memory"].folder
    (line,) = ended["memory"].last_lines()
    alone, together = read_log([folder / "node0.log"]), read_log([folder])
    assert alone.failed == together.failed == line
    assert alone.ranks == {0, 2}
    assert together.ranks == {0, 1, 2}, "a rank that two logs name is one rank"


def test_cause_that_a_restart_would_meet_again_ends_all_nodes_in_time(ended):
    """They waited for a start that would not come, then gave a false reason."""
    place = ended["memory"]
    assert place.codes() == {1}
    assert place.seconds() < IN_TIME
    assert not any("restart 1 of" in place.log(node) for node in range(3))


def test_bug_that_a_restart_has_met_again_ends_all_nodes_in_time(ended):
    """It was started as often as RESTARTS allows."""
    place = ended["again"]
    (line,) = place.last_lines()
    assert re.fullmatch(r"node 1 \(\S+\): \[CPU 1\] RuntimeError: wrong shapes", line)
    assert place.codes() == {1} and place.seconds() < IN_TIME
    for node in range(3):
        assert re.findall(r"restart (\d) of 3 after", place.log(node)) == ["1"]


def test_rank_that_is_killed_is_the_last_line_of_all(ended):
    place = ended["killed"]
    (line,) = place.last_lines()
    assert re.fullmatch(r"node 1 \(\S+\): rank 1 was ended by signal 9", line)
    assert place.codes() == {1} and place.seconds() < IN_TIME
    where = r"rank 1 ended in .*step 3; ranks 0, 2 waited in step 3: look at node 1 \("
    assert re.search(where, place.log(0))


def test_rank_that_hangs_is_the_last_line_of_all(ended):
    place = ended["hang"]
    (line,) = place.last_lines()
    waited = r"ranks 0, 2 waited in step 3: look at node 1 \(\S+\)"
    assert re.fullmatch(rf"rank 1 stood still in the data of step 3; {waited}", line)
    assert place.codes() == {1} and TIMEOUT < place.seconds() < HANG_IN_TIME


def test_stop_between_two_restarts_ends_all_nodes_which_have_a_checkpoint(ended):
    """The node that got the signal ended with 143, and node 0 went on waiting."""
    place = ended["stop"]
    assert (place.folder / "checkpoint.pt").exists()
    assert place.codes(0, 2) == {75}
    (line,) = place.last_lines(0, 2)
    stop = r"stopped by SIGTERM on node 2 \(\S+\); the checkpoint .+/checkpoint.pt is of [\d:]+"
    assert re.fullmatch(rf"supervise.py: {stop}: --resume goes on from there", line)
    assert place.ends[0] - place.hit_at < 5 and place.ends[2] - place.hit_at < 5


# --- With torchrun and the script ----------------------------------------------------------------

# The script, whose rank $FAULT_RANK meets a fault in step 4.
FAULTY = f"""
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("demo", {str(SCRIPT)!r})
demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
step, what = demo.train_step, os.environ["FAULT"]
def faulty(run, micro_batches):
    if (run.process.rank, run.step) == (int(os.environ["FAULT_RANK"]), 3):
        if what == "memory":
            raise demo.torch.OutOfMemoryError("CUDA out of memory.")
        if what == "bug":
            raise LookupError("broken on purpose")
        if what in ("kill", "hang"):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    return step(run, micro_batches)
demo.train_step = faulty
demo.one_line_errors(demo.main)
"""
LAST_LINES = {
    "memory": r"node {0} \(node{0}\): \[CPU {0}\] ERROR: in step 4: CUDA out of memory.*",
    "bug": r"node {0} \(node{0}\): \[CPU {0}\] LookupError: broken on purpose",
    "kill": r"node {0} \(node{0}\): rank {0} was ended by signal 9",
    "hang": r"rank {0} stood still in .*: look at node {0} \(node{0}\)",
    "torchrun": r"node {0} \(node{0}\): torchrun was ended by signal 9",
    "stop": r"supervise.py: stopped on a signal, exit code 75; .*",
}


@LONG
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", LAST_LINES)
def test_real_torchrun_and_script_end_with_one_line_on_both_nodes(tmp_path, what, node):
    (tmp_path / "faulty.py").write_text(FAULTY)
    argv = [*faults.FAST, *make_set(tmp_path / "set", 48), "--num_epochs", 99, "--timeout", 8]
    argv += ["--checkpoint", tmp_path / "c.pt"]
    env = {"FAULT": what, "FAULT_RANK": str(node)}
    restarts = int(what in ("memory", "bug"))  # which a restart would meet again
    with NamespacePair() as pair:
        runs = []
        for rank in (0, 1):
            line = [sys.executable, ROOT / "tools" / "supervise.py", "--restarts", restarts]
            line += ["--log", tmp_path / f"node{rank}.log", "--", sys.executable, "-m"]
            line += ["torch.distributed.run", "--nnodes=2", f"--node_rank={rank}"]
            line += ["--rdzv_backend=static", f"--rdzv_endpoint={pair.addresses[0]}:29500"]
            line += ["--nproc_per_node=1", tmp_path / "faulty.py", *argv]
            runs.append(pair.popen(rank, line, env=env))
        runs[node].wait_for(rf"^\[CPU {node}\] .*Step 3 ", 240)
        if what == "torchrun":
            os.kill(faults.torchrun_pid(runs[node]), signal.SIGKILL)
        if what == "stop":
            os.kill(runs[node].pid, signal.SIGTERM)
        ended = [run.finish(8 + 15 + 2 if what == "hang" else IN_TIME + 2, None) for run in runs]
    lines = {run.out.splitlines()[-1] for run in ended}
    assert len(lines) == 1, [run.tail(20) for run in ended]
    assert re.fullmatch(LAST_LINES[what].format(node), lines.pop())
    code = {"stop": 75, "torchrun": 137}.get(what, 1)
    assert {run.returncode for run in ended} == {code}
    assert not any("restart 1 of" in run.out for run in ended)
    if what == "stop":
        faults.stopped_at("".join(run.out for run in ended), "SIGTERM", tmp_path / "c.pt")


# --- Many nodes ----------------------------------------------------------------------------------


def peak_memory(pid: int) -> int:
    """Bytes of a process, at most so far; 0 when it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


@LONG
@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_many_supervisors_meet_and_end_with_the_same_line(tmp_path, count):
    """Its figures are shown by pytest -rP."""
    place, memory = Place(tmp_path / "many", count), 0
    begin = time.monotonic()
    try:
        place.start("--fault", f"{count - 1}:3:user", options=("--restarts", 1), timeout=120)
        place.runs[-1].wait_for(r"^FAULT ", 300)
        met = time.monotonic() - begin
        deadline = time.monotonic() + 120
        while not place.all_ended() and time.monotonic() < deadline:
            memory = max(memory, peak_memory(place.runs[0].pid))
            time.sleep(0.1)
        (line,) = place.last_lines()
        assert line.startswith(f"node {count - 1} (") and "out of memory" in line
        assert place.codes() == {1}
        assert memory < 40e6, "it grows with the number of nodes"
        seconds = f"{met:.1f} s to step 3, {place.seconds():.1f} s from the fault to the last end"
        print(f"{count} supervisors: {seconds}, node 0: {memory / 1e6:.1f} MB")
    finally:
        place.kill()
