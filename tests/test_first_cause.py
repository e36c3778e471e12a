"""One truth on all nodes: what came first, whether to go on, and with which exit code.

Real supervisors, with the stand-ins of torchrun and of the script, all on this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import ROOT, WITH_STAND_IN, Started, free_port

TIMEOUT = 4  # the script's --timeout, seconds
IN_TIME = 20  # seconds from a failure to the end on all nodes, as docs/faults.md has it
HANG_IN_TIME = TIMEOUT + 15
STEPS = ROOT / "tests" / "support" / "stand_in" / "steps.py"

# All nodes are this machine: the loopback address, which a user's node 0 must not have, is right.
SUPERVISE = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import supervise
from launcher import supervisor
supervisor.check_master = lambda host, node_rank: None
sys.exit(supervise.main())
"""


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for n in range(count):
                stack.enter_context(socket.create_server(("", port + n)))
            return port


class Nodes:
    """So many nodes with one rank each; how each has ended is told by its log."""

    def __init__(self, folder: Path, nnodes: int = 3) -> None:
        self.folder, self.nnodes, self.port = folder, nnodes, free_ports(6)
        self.runs: list[Started] = []
        self.ends: dict[int, float] = {}  # node: when it ended
        self.hit_at = 0.0
        folder.mkdir(parents=True)

    def start(self, *arguments: object, options: tuple = (), timeout: float = TIMEOUT) -> None:
        for node in range(self.nnodes):
            line = [sys.executable, "-c", SUPERVISE, "--log", self.folder / f"node{node}.log"]
            line += [*options, "--", sys.executable, "-m", "torch.distributed.run"]
            line += [f"--nnodes={self.nnodes}", f"--node_rank={node}", "--rdzv_backend=static"]
            line += [f"--rdzv_endpoint=127.0.0.1:{self.port}", "--nproc_per_node=1", STEPS]
            line += ["--timeout", timeout, *arguments]
            self.runs.append(Started(line, cwd=self.folder, env=WITH_STAND_IN))

    def training(self) -> None:
        for run in self.runs:
            run.wait_for(r"Step 3 ", 60)

    def hit(self, node: int, number: int) -> None:
        self.hit_at = time.time()
        os.kill(self.runs[node].pid, number)

    def all_ended(self) -> bool:
        for node, run in enumerate(self.runs):
            if run.process.poll() is not None:
                self.ends.setdefault(node, time.time())
        return len(self.ends) == self.nnodes

    def kill(self) -> None:
        for run in self.runs:
            run.kill()

    def log(self, node: int) -> str:
        return (self.folder / f"node{node}.log").read_text()

    def last_lines(self, *nodes: int) -> set[str]:
        return {self.log(node).splitlines()[-1] for node in nodes or range(self.nnodes)}

    def codes(self, *nodes: int) -> set[int | None]:
        """None: it went on."""
        return {self.runs[node].process.poll() for node in nodes or range(self.nnodes)}

    def seconds(self) -> float:
        """From the fault, which its rank has told, to the last end."""
        text = "".join(self.log(node) for node in range(self.nnodes))
        if told := re.search(r"^FAULT ([\d.]+)$", text, re.MULTILINE):
            self.hit_at = float(told[1])
        return max(self.ends.values()) - self.hit_at


def wait_for(places: list[Nodes], seconds: float) -> None:
    """Until all have ended; after so many seconds the others are ended, and have no code."""
    deadline = time.monotonic() + seconds
    while not all([place.all_ended() for place in places]) and time.monotonic() < deadline:
        time.sleep(0.05)


FAULTS = {"memory": "2:3:user", "killed": "1:3:kill", "hang": "1:3:hang"}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Nodes]]:
    """All scenarios at once: what takes the time is waiting."""
    folder = tmp_path_factory.mktemp("first cause")
    places = {name: Nodes(folder / name) for name in (*FAULTS, "stop")}
    try:
        for name, fault in FAULTS.items():
            options = ("--restarts", 1) if name == "memory" else ()
            places[name].start("--fault", fault, options=options)
        stop_between_restarts(places["stop"])
        wait_for([*places.values()], 45)
        yield places
    finally:
        for place in places.values():
            place.kill()


def stop_between_restarts(place: Nodes) -> None:
    """Node 1's launcher is killed, so that the others wait for it; node 2 gets a signal then."""
    place.start(options=("--restarts", 1))
    place.training()
    place.hit(1, signal.SIGKILL)
    for node in (0, 2):
        place.runs[node].wait_for(r"restart 1 of 1 after", 60)
    time.sleep(1)
    place.hit(2, signal.SIGTERM)


def test_out_of_memory_on_the_last_node_is_the_last_line_of_all(ended):
    """On the others it was "Connection closed by peer"."""
    (line,) = ended["memory"].last_lines()
    assert re.fullmatch(r"node 2 \(\S+\): \[CPU 2\] ERROR: in step 3: CUDA out of memory.*", line)


def test_cause_that_a_restart_would_meet_again_ends_all_nodes_in_time(ended):
    """They waited for a start that would not come, then gave a false reason."""
    place = ended["memory"]
    assert place.codes() == {1}
    assert place.seconds() < IN_TIME
    assert not any("restart 1 of" in place.log(node) for node in range(3))


def test_rank_that_is_killed_is_the_last_line_of_all(ended):
    place = ended["killed"]
    (line,) = place.last_lines()
    assert re.fullmatch(r"node 1 \(\S+\): rank 1 was ended by signal 9", line)
    assert place.codes() == {1} and place.seconds() < IN_TIME


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
