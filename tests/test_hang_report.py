"""Who is missing: ranks that hang, a link that is cut, launchers that are killed, from outside.

Real supervisors, ranks, signals and links, in namespaces. Torchrun and the script are stand-ins,
which need no torch: a failure takes seconds to be noticed, and all of these run at once. The last
test here has the real ones, and test_first_cause.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import test_faults as faults
from launcher import hang_report, root_cause, torchrun_command
from support.datasets import make_set
from support.nodes import NamespacePair
from support.processes import LONG, Run
from test_first_cause import Place

TIMEOUT = 4  # the script's --timeout, seconds
GRACE = 6  # of the supervisors here, which have 10 s; the real script's test has those
IN_TIME = TIMEOUT + GRACE + 5  # what is promised

ENDLESS = 99999  # seconds
PHASES = re.compile(r"^PHASES (/.+)$", re.MULTILINE)


def finish(place: Place, node: int) -> Run:
    """How it ended; `seconds` are since the place was hit."""
    run = place.runs[node]
    run.process.wait(90)
    seconds = time.time() - place.hit_at
    return dataclasses.replace(run.finish(1, expect=None, clean=IN_TIME), seconds=seconds)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Run]]]:
    """All that can happen, at once: what takes the time is waiting. {place: its nodes' runs}"""
    folder, places = tmp_path_factory.mktemp("missing"), {}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(20) as pool:

        def start(name: str, *arguments: object, nnodes: int = 2, **options) -> None:
            pair = stack.enter_context(NamespacePair())
            places[name] = Place(folder / name, nnodes, pair)
            stack.callback(places[name].kill)
            places[name].start(*arguments, GRACE=str(GRACE), **options)

        start("link")
        start("alone")
        start("launcher", "--orphan")
        start("rank", nproc=2)
        hit = [*places]
        start("again", "--fault", "1:3:hang", "--steps", 19, options=("--restarts", 1))
        for phase, seconds in (("rendezvous", ENDLESS), ("validation", TIMEOUT + GRACE + 2)):
            start(phase, "--first", f"{phase}:{seconds}", "--steps", 4, nnodes=1, nproc=2)
        for name in hit:
            places[name].training()
        for name, rank in (("rank", 2), ("alone", 1)):
            places[name].hit(os.kill, places[name].runs[1].rank_pid(rank), signal.SIGSTOP)
        places["launcher"].hit(os.kill, places["launcher"].runs[1].pid, signal.SIGKILL)
        for name in ("link", "alone"):
            places[name].hit(places[name].pair.link_down)
        ends = {
            name: [pool.submit(finish, place, node) for node in range(place.nnodes)]
            for name, place in places.items()
        }
        yield {name: [end.result() for end in ends[name]] for name in places}


def failed_in_time(run: Run, late: float = 0) -> None:
    assert run.returncode != 0 and TIMEOUT < run.seconds < IN_TIME + late, run.out


def the_line(run: Run, pattern: str) -> str:
    """The only line that matches."""
    found = [line for line in run.lines() if re.search(pattern, line)]
    assert len(found) == 1, run.out
    return found[0].removeprefix("supervise.py: ")


STEP = r"(?:the data of )?step \d+"


def test_rank_that_hangs_ends_all_nodes_and_is_named(ended):
    for run in ended["rank"]:
        failed_in_time(run)
        where = the_line(run, "rank 2 stood still")
        assert re.fullmatch(
            rf"rank 2 stood still in {STEP}; ranks 0, 1, 3 waited in step \d+: "
            r"look at node 1 \(node1\)",
            where,
        )
        assert "ended by signal" not in run.out, run.out
        assert run.lines()[-1] == where, "what the others waited for is the root cause"
    said = f"killing this attempt: it has not ended {GRACE} s after a failure"
    assert [said in run.out for run in ended["rank"]] == [False, True]


def test_rank_that_hangs_alone_on_its_node_is_the_root_cause_and_restarted(ended):
    for run in ended["again"]:
        assert run.returncode == 0, run.out
        assert "rank 1 stood still in" in the_line(run, "restart 1 of 1 after: ")
        assert "| Step 19 |" in run.out


def test_link_that_is_cut_ends_both_nodes_which_name_each_other(ended):
    for node, run in enumerate(ended["link"]):
        failed_in_time(run)
        where = the_line(run, "did not answer")
        other = r"node 0 \(10\.77\.0\.1\)" if node else r"node 1 \(node1\)"
        said = rf"rank {node} waited in step \d+; {other} did not answer: look at {other} and "
        assert re.fullmatch(said + "the link", where), where
        assert ("on all nodes: its log has the whole" in run.out) == (node == 1), run.out


def test_launcher_that_is_killed_ends_the_other_node(ended):
    """Its ranks, here without a parent, would have gone on."""
    run = ended["launcher"][0]
    assert run.returncode != 0 and run.seconds < GRACE + 5, run.out
    assert the_line(run, "did not answer: look at").endswith("look at node 1 (node1) and the link")


def test_ranks_that_meet_for_longer_than_their_timeout_are_ended(ended):
    """As NCCL's do, which has no time limit there. On one node no other is there to look at."""
    run = ended["rendezvous"][0]
    failed_in_time(run)
    assert run.lines()[-1] == "ranks 0, 1 stood still in rendezvous"


def test_long_phase_in_which_nobody_waits_is_no_failure(ended):
    run = ended["validation"][0]
    assert run.returncode == 0 and "| Step 4 |" in run.out, run.out


def test_node_behind_a_cut_link_whose_own_rank_hangs_ends_too(ended):
    """Nothing of it can fail by itself, and nobody can tell it."""
    run = ended["alone"][1]
    failed_in_time(run, late=TIMEOUT / 4)
    said = (
        rf"rank 1 stood still in {STEP}; node 0 \(\S+\) did not answer: look at node 1 \(node1\)"
    )
    assert re.fullmatch(said, run.lines()[-1]), run.out


def test_phases_leave_nothing_in_memory(ended):
    for name, nodes in ended.items():
        for node, run in enumerate(nodes):
            folders = {*PHASES.findall(run.out)}
            killed = (name, node) == ("launcher", 1)  # by SIGKILL: it could not
            assert folders, run.out
            assert sum(map(os.path.exists, folders)) == killed, (name, node, folders)


def test_phases_lie_on_the_disk_where_memory_has_no_room(monkeypatch):
    """As in a container whose /dev/shm is tiny: there no rank could say where it stands."""
    monkeypatch.setattr(hang_report.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 10))
    with hang_report.phases_folder() as folder:
        assert Path(folder).parent == Path(tempfile.gettempdir())


# --- The line --------------------------------------------------------------------------------

LOST = root_cause.Cause("[CPU 0] ERROR: in step 3: Timed out", "lost", 5, 0)


def test_what_a_rank_is_at():
    phases = {0: ("step 3", 31), 1: ("step 2", 31), 2: ("step 3", 4), 3: ("step 3", 31)}
    failed = [LOST, root_cause.Cause("LookupError", "bug", 6, 3)]
    assert hang_report.standing(phases, failed, {0, 1, 2, 4}, 30) == [
        [0, "waited in", "step 3"],
        [1, "stood still in", "step 2"],
        [2, "was in", "step 3"],
        [3, "ended in", "step 3"],
        [4, "had not begun", ""],
    ]
    assert hang_report.standing(phases, [], {1}, 30)[0] == [0, "ended in", "step 3"]


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ("waited in", "stood still in", "rank 1 stood still in X; rank 0 waited in X: look at B"),
        ("waited in", "had not begun", "rank 1 had not begun; rank 0 waited in X: look at B"),
        ("waited in", "ended in", "rank 1 ended in X; rank 0 waited in X: look at B"),
        ("waited in", None, "rank 0 waited in X; B did not answer: look at B and the link"),
        ("", None, "B did not answer: look at B and the link"),
        ("waited in", "waited in", "ranks 0, 1 waited in X: look at the link between the nodes"),
        ("ended in", "ended in", ""),
        ("had not begun", "had not begun", ""),
    ],
)
def test_line_names_ranks_and_the_node_to_look_at(first, second, line):
    """None: that node did not answer; an empty word: it has no rank that says something."""
    ranks = {
        rank: [[rank, word, "" if word == "had not begun" else "X"]] if word else []
        for rank, word in enumerate((first, second))
        if word is not None
    }
    silent = [] if 1 in ranks else [1]
    assert hang_report.describe_standing(ranks, silent, ["node 0 (a)", "B"]) == line


def test_line_does_not_grow_with_the_number_of_ranks():
    ranks = {n: [[8 * n + r, "waited in", "step 7"] for r in range(8)] for n in range(64)}
    ranks[3][2] = [26, "stood still in", "step 7"]
    line = hang_report.describe_standing(ranks, [], [f"node {n} (host{n})" for n in range(64)])
    assert line == (
        "rank 26 stood still in step 7; ranks 0, 1, 2, 3, 4, 5, 6, 7 and 503 more waited in "
        "step 7: look at node 3 (host3)"
    )


@pytest.mark.parametrize(
    ("words", "seconds"), [("x.py", 300), ("--timeout=0.5", 1), ("--timeout x", 300)]
)
def test_ranks_are_judged_by_the_scripts_own_timeout(words, seconds):
    assert torchrun_command.timeout_of(words.split()) == seconds


# --- The real script -------------------------------------------------------------------------


@LONG
def test_real_script_and_torchrun_end_in_time_where_the_link_is_cut(tmp_path):
    """A rank that hangs: test_first_cause.py. The ranks know no more than where they waited."""
    argv = [*faults.FAST, *make_set(tmp_path / "set", 48), "--num_epochs", 99, "--timeout", 8]
    with NamespacePair() as nodes:
        runs = faults.on_two_nodes(nodes, argv, tmp_path)
        runs[1].wait_for(r"^\[CPU 1\] .*Step 3 ", 240)
        nodes.link_down()
        begin = time.monotonic()
        ended = [run.finish(8 + 15, expect=1) for run in runs]
        assert time.monotonic() - begin < 8 + 15
    for rank, run in enumerate(ended):
        faults.said(run.out, "did not answer: look at node . .* and the link")
        faults.said(run.out, rf"\[CPU {rank}\] ERROR: .*step \d+")
