"""A live series is not harmed by a second start, by nodes of other jobs, or by what comes in."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import rendezvous, series, wire
from launcher.errors import Refused
from support.launcher_folder import LauncherFolder
from support.nodes import NamespacePair
from support.processes import ROOT, Run, free_port, require, wait_until
from test_supervise import Node

TOOLS = ROOT / "tools"


class Launchers(LauncherFolder):
    """Of two nodes, with torchrun's stand-in."""

    def __init__(self, path: Path, nodes: NamespacePair) -> None:
        super().__init__(path)
        self.nodes = nodes

    def start(self, node: int, *arguments: str, **variables: object):
        job = {"RESTARTS": 1, "SLURM_JOB_ID": 7}
        return self.start_on(self.nodes, node, *arguments, **job | variables)

    def end(self, started) -> Run:
        """Of one that is refused: at once, with one line."""
        run = started.finish(20, expect=1)
        assert run.out.count("error: ") == 1 and "Traceback" not in run.out, run.out
        return run

    def files(self) -> dict[str, str]:
        """What the run has written, which nobody else may touch."""
        found = [path for path in (self.path / "logs").rglob("*") if path.is_file()]
        return {str(path): path.read_text() for path in [*found, self.path / "own.pt"]}


# --- A series that runs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Two nodes whose ranks run until they get a signal; a checkpoint, which this run writes."""
    with NamespacePair() as nodes:
        folder = Launchers(tmp_path_factory.mktemp("live"), nodes)
        folder.plan("wait")
        runs = [folder.start(node, "--checkpoint", "own.pt") for node in (0, 1)]
        for run in runs:
            run.wait_for(r"\] waiting", 40)
        (folder.path / "own.pt").write_text("of the live run")
        yield SimpleNamespace(folder=folder, runs=runs)
        for run in runs:
            run.kill()


def test_second_start_on_node_0_names_the_series_and_touches_nothing(live):
    before = live.folder.files()
    run = live.folder.end(live.folder.start(0, "--checkpoint", "own.pt"))
    (line,) = run.out.splitlines()
    assert "launch_multinode.sh: error: port 29500 has a series that goes on (pid " in line
    pid, log = re.search(r"\(pid (\d+) on node0, since [\d-]+ [\d:]+, log (\S+)\)", line).groups()
    assert int(pid) == live.runs[0].pid and str(live.folder.path / log) in before
    assert live.folder.files() == before and run.seconds < 15


def test_second_start_of_node_1_is_told_that_its_place_is_taken(live):
    before = live.folder.files()
    run = live.folder.end(live.folder.start(1, "--checkpoint", "own.pt"))
    assert "(node0) has its node 1 already and goes on (pid " in run.out
    assert live.folder.files() == before and run.seconds < 15


def test_node_of_another_job_is_told_so_while_the_series_runs(live):
    run = live.folder.end(live.folder.start(1, "x", SLURM_JOB_ID=8))
    assert "is of another job: SLURM_JOB_ID is 7 on node 0 but 8 there: give" in run.out
    live.runs[0].wait_for("turned away node 1 .node1., which belongs to another job")


def test_live_series_ends_as_if_nobody_had_come(live):
    """After all that, and with one name for the run on both nodes; the next one has another."""
    for run in live.runs:
        run.signal(signal.SIGTERM)
    for run in live.runs:
        assert run.finish(30, expect=75).out.count("] Stopped on SIGTERM") == 1
    folders = [*(live.folder.path / "logs").iterdir()]
    assert len(folders) == 1, folders
    for node in (0, 1):
        text = (folders[0] / f"node{node}.log").read_text()
        assert text.count("] Stopped on SIGTERM") == 1 and "error: " not in text
    live.folder.plan("done")
    for run in [live.folder.start(node, "x") for node in (0, 1)]:
        run.finish(40)
    (new,) = {*(live.folder.path / "logs").iterdir()} - {*folders}
    for node in (0, 1):
        assert "REPORT" in (new / f"node{node}.log").read_text()


# --- Nodes of another job, while node 0 waits ---------------------------------------------------


def supervise(nodes, folder: Path, node: int, restarts: int = 0, **job: str):
    """A node's supervisor, of the job that `job` names; its command ends at once."""
    line = [sys.executable, TOOLS / "supervise.py", "--log", folder / f"node{node}.log"]
    line += ["--restarts", restarts, "--connect_timeout", 30, "--", folder / "torchrun"]
    line += ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1", "--rdzv_backend=static"]
    line += [f"--rdzv_endpoint={nodes.addresses[0]}:29500", "train.py"]
    return nodes.popen(node, line, cwd=folder, env=job)


@pytest.mark.parametrize("restarts", [0, 3], ids=["same settings", "other settings"])
def test_node_of_another_job_ends_alone_and_the_series_starts(tmp_path, restarts):
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho STARTED\n")
    (tmp_path / "torchrun").chmod(0o755)
    with NamespacePair() as nodes:
        first = supervise(nodes, tmp_path, 0, SLURM_JOB_ID="7")
        first.wait_for("node 0 waits")
        stray = supervise(nodes, tmp_path, 1, restarts, SLURM_JOB_ID="8").finish(20, expect=1)
        second = supervise(nodes, tmp_path, 1, SLURM_JOB_ID="7")
        ended = [first.finish(20), second.finish(20)]
        assert all("STARTED" in run.out for run in ended)
    why = "another job: SLURM_JOB_ID is 7 on node 0 but 8 there"
    assert why in stray.out and "STARTED" not in stray.out
    assert f"turned away node 1 (node1), which belongs to {why}" in ended[0].out


ALICE = {"user": "alice", "uid": "1000"}
BOB = {"user": "bob", "uid": "1001"}


@pytest.mark.parametrize(
    ("ours", "theirs", "foreign"),
    [
        ({}, {}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, True),
        ({"SLURM_JOB_ID": "7"}, {}, False),  # one of the nodes was entered by ssh
        ({"RUN_NAME": "ethernet"}, {"RUN_NAME": "infiniband"}, True),
        ({"RUN_NAME": "ethernet"}, {}, False),
        ({"--rdzv_id": "1"}, {"--rdzv_id": "2"}, True),
        (ALICE, BOB, True),
        (ALICE, ALICE | {"uid": "7"}, False),  # two machines, which number their users apart
        (ALICE, BOB | {"uid": "1000"}, False),
        (ALICE | {"RUN_NAME": "x"}, BOB | {"RUN_NAME": "x"}, False),
        (ALICE | {"RUN_NAME": "x", "--rdzv_id": "1"}, {"RUN_NAME": "x", "--rdzv_id": "2"}, True),
        (ALICE, {}, False),
    ],
)
def test_what_tells_another_job_from_a_setting_that_differs(ours, theirs, foreign):
    assert bool(series.stranger(ours, theirs)) == foreign


@pytest.mark.parametrize("first", ["the second start", "the node"])
def test_of_two_nodes_of_one_rank_the_one_that_was_admitted_before_stays(first):
    """Without a token none of them is known: then all end, as test_supervise.py has it."""
    port = free_port()
    node_0 = Node(port, 0, token="abc", NNODES=3)
    tokens = ["", "abc"] if first == "the second start" else ["abc", ""]
    ones = []
    for token in tokens:
        ones.append(Node(port, 1, token=token, NNODES=3))
        time.sleep(0.5)
    last = Node(port, 2, token="abc", NNODES=3)
    known, unknown = ones if tokens[0] else ones[::-1]
    assert [one.end() for one in (node_0, known, last)] == [rendezvous.Plan()] * 3
    assert isinstance(unknown.end(), Refused)
    assert "has its node 1 already" in str(unknown.end())


def test_second_start_that_comes_in_one_moment_with_the_node_is_turned_away_once():
    """And node 0 goes on: in the list of those who came it stands after the node itself."""
    node = {"node_rank": 0, "host": "host0", "settings": {"NNODES": 3}}
    node_0 = rendezvous.Rendezvous("127.0.0.1", 1, node, 0, print)
    node_0.series.token = "abc"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        guests = node_0._guests([server], lambda: 5, node_0.greeting)
        peers = {}
        for token in ("abc", ""):
            peers[token] = stack.enter_context(socket.create_connection(server.getsockname()))
            guests.serve()
        for token, peer in peers.items():
            peer.sendall(line(**GOOD | {"token": token}))
        time.sleep(0.1)
        node_0._serve(guests)
        assert [guest.node["token"] for guest in guests.all] == ["abc"]


TCP_REPAIR = 19  # linux/tcp.h: its socket is closed without a word to the other end


@pytest.mark.parametrize("how", ["alive", "left", "rebooted"])
def test_place_of_a_node_is_free_when_its_machine_is_gone(how):
    """One that has lost its power does not say so; the connection seems to be there."""
    require(os.geteuid() == 0 and sys.platform == "linux", "only root closes without a word")
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    if how == "rebooted":
        node.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    if how != "alive":
        node.close()
    if how == "left":  # and the supervisor has noticed
        ours.close()
    with ours, node:
        assert rendezvous.is_gone(ours) == (how != "alive")


# --- What comes over the network ----------------------------------------------------------------

# Node 0 of two, in a process of its own: what it prints is what a terminal and a log would get.
NODE_0 = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
from launcher import rendezvous
node = {{"node_rank": 0, "host": "host0", "settings": {{"NNODES": 2, "RESTARTS": 3, "PROBE": 0}}}}
say = lambda text: print(text, flush=True)
met = rendezvous.Rendezvous("127.0.0.1", int(sys.argv[1]), node, 0, say)
say(met.agree(rendezvous.Plan(), 120))
"""
GOOD = {"node_rank": 1, "host": "host1", "settings": {"NNODES": 2, "RESTARTS": 3, "PROBE": 0}}
GOOD |= {"protocol": rendezvous.PROTOCOL, "token": "", "job": {}}
FORGED = '[GPU 0] Summary {"steps": 1}'
DEEP = 6000
JUNK = [
    None,
    [],
    {},
    -1,
    2**70,
    1.5,
    True,
    "",
    "x" * 3000,
    "\x1b[2J",
    FORGED,
    "a\nb",
    "\x00",
    [[1]],
]
JUNK_SETTINGS = [None, 7, "x", [], {"NNODES": {}}, {"NNODES": [2]}, {"NNODES": "\x1b]0;x\x07"}]
JUNK_SETTINGS += [{"NNODES": FORGED}, {str(n): n for n in range(500)}, {"NNODES": 2.5}]


def broken(draw: random.Random) -> bytes:
    """An introduction that is none."""
    way, text = draw.randrange(7), json.dumps(GOOD).encode()
    if way == 0:
        return json.dumps(GOOD | {"host": draw.choice(JUNK)}).encode() + b"\n"
    if way == 1:
        rank = draw.choice(
            [value for value in JUNK if not isinstance(value, int) or value is True]
        )
        return json.dumps(GOOD | {"node_rank": rank}).encode() + b"\n"
    if way == 2:
        return json.dumps(GOOD | {"settings": draw.choice(JUNK_SETTINGS)}).encode() + b"\n"
    if way == 3:  # cut short, with or without the end of the line
        return text[: draw.randrange(len(text))] + draw.choice([b"", b"\n"])
    if way == 4:
        return draw.randbytes(draw.randrange(1, 5000)) + b"\n"
    if way == 5:
        nested = draw.choice([b"[" * DEEP, b'{"a":' * DEEP, b'{"node_rank": ' + b"[" * DEEP])
        return nested + b"\n"
    return draw.choice([b"x", b"\xff", b'"']) * draw.choice([100_000, 1_000_000])  # without an end


def resident(pid: int) -> int:
    """KiB of memory that a process has."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def test_broken_introductions_harm_no_series():
    """500 of them, then the node that was meant: no traceback, no line of theirs, flat memory."""
    draw, port = random.Random(0), free_port()
    command = [sys.executable, "-c", NODE_0, str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    silent = []
    with subprocess.Popen(command, **pipes) as node_0:
        try:
            assert "node 0 waits" in node_0.stdout.readline()
            for n in range(500):
                guest = socket.create_connection(("127.0.0.1", port), 20)
                with contextlib.suppress(OSError):  # it may be shown the door before its end
                    guest.sendall(broken(draw))
                if n % 2:
                    guest.close()
                else:
                    silent.append(guest)  # these stay, and say no more
                if n == 50:
                    before = resident(node_0.pid)
            assert resident(node_0.pid) - before < 8000
            node_1 = Node(port, 1, 20)
            assert node_1.end() == rendezvous.Plan()
            said = node_0.communicate(timeout=20)[0]
        finally:
            node_0.kill()
            for guest in silent:
                guest.close()
    assert said == f"{rendezvous.Plan()}\n" and node_0.returncode == 0


def greeted(port: int, greeting: bytes, answer: bytes = b"") -> threading.Thread:
    """In node 0's place: says this to who comes, and that to what is answered."""
    server = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        with server:
            server.settimeout(20)
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(3)
                    try:
                        peer.sendall(greeting)
                        if answer and peer.recv(65536):
                            peer.sendall(answer)
                        peer.recv(65536)
                    except OSError:
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


START = {"protocol": rendezvous.PROTOCOL, "purpose": "start"}
HELLO = line(**START, node_0_waits=5)
HELD, NO_END = "is held by another program or an earlier start", "what it says has no end"
DAMAGED = "node 0's answer is damaged"
FALSE_NODE_0 = {
    "says nothing": (b"", b"", HELD),
    "waits for ever": (line(**START, node_0_waits=1e300), b"", HELD),
    "waits for a text": (line(**START, node_0_waits="x"), b"", HELD),
    "deep greeting": (b"[" * DEEP + b"\n", b"", HELD),
    "no object": (b"[1]\n", b"", HELD),
    "endless greeting": (b"x" * 200_000, b"", NO_END),
    "endless answer": (HELLO, b"x" * 200_000, NO_END),
    "deep answer": (HELLO, b'{"error":' + b"[" * DEEP + b"\n", DAMAGED),
    "error that is no text": (HELLO, line(error={"a": 1}), DAMAGED),
    "error with escapes": (HELLO, line(error="\x1b[2Jgone"), DAMAGED),
    "error that is a record": (HELLO, line(error=FORGED), DAMAGED),
    "plan that is none": (HELLO, line(plan=[], token="", run=""), DAMAGED),
    "plan of texts": (HELLO, line(start="1", probe="x", restarts=None), DAMAGED),
}


@pytest.fixture(scope="module")
def deceived():
    """{case: (port, node)} of nodes that wait for each false node 0, all at the same time."""
    nodes = {}
    for case, (greeting, answer, _) in FALSE_NODE_0.items():
        port = free_port()
        greeted(port, greeting, answer)
        nodes[case] = port, Node(port, 1, seconds=2, last=0)
    return nodes


@pytest.mark.parametrize("case", FALSE_NODE_0)
def test_false_node_0_ends_a_node_in_its_own_line(deceived, case):
    port, node = deceived[case]
    error = str(node.end())
    assert error.startswith(f"node 0 did not answer at 127.0.0.1:{port} within 2 s (")
    assert error.isprintable() and FALSE_NODE_0[case][2] in error
    assert "GPU 0" not in "".join([error, *node.said])


def test_launcher_of_another_version_ends_all_nodes_in_one_line():
    """As an earlier one speaks to this one, and this one to it."""
    port = free_port()
    first = Node(port, 0)
    wait_until(lambda: first.said, 5, "node 0 to listen")
    with socket.create_connection(("127.0.0.1", port), 10) as old, old.makefile("rb") as stream:
        assert json.loads(stream.readline())["node_0_waits"] > 0
        old.sendall(json.dumps(GOOD | {"protocol": 1}).encode() + b"\n")
        told = json.loads(stream.readline())["error"]
    assert str(first.end()) == told
    assert told.startswith("node 1 (host1) runs another version of this demo than node 0 (host0)")
    assert "use the same version on all nodes" in told

    port = free_port()
    greeted(port, line(protocol=1, node_0_waits=5, purpose="start"))
    told = str(Node(port, 1, last=0).end())
    assert f"node 0 at 127.0.0.1:{port} runs another version of this demo" in told


# --- Connections that nobody uses for long ------------------------------------------------------


@pytest.mark.parametrize("seconds", [1, 6, 300, 1800, 7200, 10**6])
def test_link_is_used_each_minute_and_given_up_in_time(seconds):
    """Some firewalls forget one that is silent for 350 s. Beyond two hours Linux cannot."""
    with socket.socket() as link:
        wire.lost_after(link, seconds)
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        values = [link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and link.gettimeout() == 2
    idle, pause, count = values
    assert seconds <= pause * count and idle + pause * count <= 1.5 * seconds + 2
    assert max(idle, pause) <= max(60, seconds / 100)
