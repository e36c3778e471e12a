"""The command that supervise.py is to run, and what it says of the nodes."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
from pathlib import Path

from launcher.errors import Refused
from launcher.rendezvous import Plan

ROOT = Path(__file__).parents[2]
TIMEOUT = 300  # seconds: the default of the script's --timeout


def option(words: list[str], name: str, default: str) -> str:
    """The value of --name, as --name=value or --name value, with _ or -; the last one counts."""
    for word, following in itertools.pairwise([*words, default]):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            default = value if equals else following
    return default


def timeout_of(arguments: list[str]) -> int:
    """The script's --timeout, in seconds: after so long ranks that wait for another give up."""
    given = float("nan")
    with contextlib.suppress(ValueError):
        given = float(option(arguments, "timeout", ""))
    return math.ceil(given) if 0 < given < 1e7 else TIMEOUT


class Command:
    """The command to run, and what it says of the nodes."""

    def __init__(self, words: list[str]) -> None:
        scripts = (n for n, word in enumerate(words) if n and re.fullmatch(r"[^-].*\.py", word))
        at = next(scripts, len(words))
        self.launcher, self.script = words[:at], words[at : at + 1]
        self.arguments = words[at + 1 :]
        module = "torch.distributed.run" in self.launcher
        self.is_torchrun = module or Path(words[0]).name == "torchrun"
        self.program = "torchrun" if self.is_torchrun else Path(words[0]).name
        nnodes = option(self.launcher, "nnodes", "1")
        per_node = option(self.launcher, "nproc_per_node", "1")
        one_process = self.is_torchrun and nnodes == "1" and per_node == "1"
        self.several = not one_process
        static = option(self.launcher, "rdzv_backend", "static") == "static"
        self.nnodes = int(nnodes) if self.is_torchrun and static and nnodes.isdigit() else 1
        self.rdzv_id = option(self.launcher, "rdzv_id", "")
        self.endpoint = option(self.launcher, "rdzv_endpoint", "")
        self.host, _, port = self.endpoint.rpartition(":")
        node_rank = option(self.launcher, "node_rank", "0")
        if self.nnodes > 1 and not (port.isdigit() and node_rank.isdigit()):
            given = f"--rdzv_endpoint is '{self.endpoint}' and --node_rank '{node_rank}'"
            raise Refused(f"{given}: give HOST:PORT of node 0, and this node's number from 0 on")
        self.port, self.node_rank = (int(port), int(node_rank)) if self.nnodes > 1 else (0, 0)

    def at(self, plan: Plan, probe: str | None) -> list[str]:
        """Its words for one start."""
        words = [*self.launcher, *([probe] if plan.probe else self.script), *self.arguments]
        if plan.restarts and not plan.probe and "--resume" not in self.arguments:
            words.append("--resume")
        if self.nnodes > 1:
            moved = f"{self.host}:{self.port + plan.start}"
            n = next(n for n, word in enumerate(words) if self.endpoint in word)
            words[n] = words[n].replace(self.endpoint, moved)
        return words

    def shown(self, words: list[str]) -> str:
        """As a person would type it."""
        if words[1:3] == ["-m", "torch.distributed.run"]:
            words = ["torchrun", *words[3:]]
        words = [word.removeprefix(f"{ROOT}/") if word.endswith(".py") else word for word in words]
        if threads := os.environ.get("OMP_NUM_THREADS"):
            return f"OMP_NUM_THREADS={threads} {shlex.join(words)}"
        return shlex.join(words)
