"""The launchers as a user starts them: on this machine, or on two nodes in network namespaces."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.nodes import NamespacePair
from support.processes import ROOT, Run, Started, assert_none_left, free_ports, start

SINGLE = ROOT / "launch_single.sh"
MULTINODE = ROOT / "launch_multinode.sh"
# A small training: 40 pixels, steps of some 0.1 s, every step in the log.
FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --log_every 1")
FAST += ["--precision", "fp32"]
BUSY = 40  # seconds more than a promised bound: other tests run on the same cores meanwhile
SAVED = 75  # exit code after a stop signal


def launch_single(*arguments: object, cwd: Path, **variables: object) -> Started:
    """Starts launch_single.sh in a folder; `variables` are its environment."""
    env = {name: str(value) for name, value in variables.items()}
    return start(["bash", SINGLE, *arguments], env=env, cwd=cwd)


class TwoNodes:
    """launch_multinode.sh on both nodes of a NamespacePair.

    Each node has a folder of its own, `folder(k)`, in which it is started; its log is
    `folder(k)/logs/run/node{k}.log`.
    """

    def __init__(self, pair: NamespacePair, tmp_path: Path) -> None:
        self.pair = pair
        self.tmp_path = tmp_path
        self.port = free_ports(1)  # namespaces have ports of their own: any number serves

    def folder(self, node: int) -> Path:
        path = self.tmp_path / f"node{node}"
        path.mkdir(exist_ok=True)
        return path

    def log(self, node: int, run: str = "run") -> str:
        path = self.folder(node) / "logs" / run / f"node{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self, node: int, *arguments: object, **variables: object) -> Started:
        """Starts the launcher on one node; `variables` are its environment, and win."""
        env = {
            "NNODES": "2",
            "NODE_RANK": str(node),
            "MASTER_ADDR": self.pair.addresses[0],
            "MASTER_PORT": str(self.port),
            "RUN_NAME": "run",
            "PROBE": "0",
            "CONNECT_TIMEOUT": "40",
            "PYTHON": sys.executable,
        }
        env |= {name: str(value) for name, value in variables.items()}
        command = ["bash", MULTINODE, *arguments]
        return self.pair.popen(node, command, env=env, cwd=self.folder(node))

    def start_both(self, *arguments: object, **variables: object) -> list[Started]:
        """The same on both nodes."""
        return [self.start(node, *arguments, **variables) for node in (0, 1)]


@contextmanager
def two_nodes(tmp_path: Path, rate: str | None = None) -> Iterator[TwoNodes]:
    with NamespacePair(rate) as pair:
        yield TwoNodes(pair, tmp_path)


def finish_all(started: list[Started], timeout: float = 120, expect: int | None = 0) -> list[Run]:
    """Waits for the end of each; fails on another exit code (None: any) and on what is left."""
    return [one.finish(timeout, expect, clean=10) for one in started]


def end_within(seconds: float, started: list[Started], expect: int | None = None) -> list[Run]:
    """Waits until all have ended; fails on another exit code than `expect` (None: any), and on a
    process that is left 10 s later. `seconds` is what a user is promised on a quiet machine.
    """
    deadline = time.monotonic() + seconds + BUSY
    runs = [one.finish(deadline - time.monotonic(), expect, clean=None) for one in started]
    for one in started:
        assert_none_left(one.test_id, 10)
    return runs
