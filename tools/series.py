#!/usr/bin/env python3
"""Several runs by the launchers, and their comparison: of networks, or of numbers of processes.

    tools/series.py --network ethernet=eth0 --network infiniband=mlx5_0 --repeats 4 -- ARGUMENTS
    tools/series.py --processes 1,2,4 -- ARGUMENTS

Networks: called on each node, with NNODES, NODE_RANK, MASTER_ADDR and so on as for
launch_multinode.sh, with the same labels in the same order; interfaces and adapters may differ.
Processes: on one machine, as for launch_single.sh. ARGUMENTS go to demo_coco_resnet18.py; without
data among them random images (--dummy), on CPUs so few and small ones that a link of 1 Gb/s shows.
With --repeats there are rounds, every other one in reverse. The logs are
LOG_DIR/RUN_NAME/LABEL/nodeK.log or, with --repeats, LOG_DIR/RUN_NAME/LABEL/rN/nodeK.log.
A label is dropped after two failed runs in a row, and all end where the other nodes did not come
twice in a row. Exit code: 0: all runs have ended well; 1: some failed; else as the launchers'.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

if sys.version_info < (3, 10):  # a system's own: the launchers look for a newer one
    sys.exit("series.py: error: needs Python 3.10 or newer: activate an environment with one")

import run
from run import ROOT, UserError, option, whole

AGAIN = 30  # seconds to wait for other nodes that did not come to the run before
MOST_FAILURES = 2  # in a row
BLOCK = 40  # ports, which the runs use in turn
# They would win over a network's, and another network would be measured.
MOVES = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET"]
# A launcher's exit codes after an error that would come again, and after a stop: the series ends.
ENDS_ALL = {run.USER, run.STOPPED, *(128 + number for number in run.SIGNALS)}
SETTINGS = {"CONNECT_TIMEOUT": "wait", "RESTARTS": "restarts", "MASTER_PORT": "port"}
# Without data: random images. On CPUs so few and small ones that a link of 1 Gb/s shows.
ON_GPUS = ["--dummy", "--batch_size", "64", "--max_steps", "200"]
ON_CPUS = ["--dummy", "--batch_size", "4", "--image_size", "64", "--max_steps", "40"]


def main(words: list[str]) -> int:
    try:
        return Series(words).train()
    except UserError as error:
        say(f"error: {error}")
        return run.USER


def say(text: str) -> None:
    run.tell("series.py", text)


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    text = "a network; names as for IFNAME: eth0, mlx5_0 or mlx5_0,ib0; adapters: all of a node"
    parser.add_argument("--network", action="append", default=[], metavar="LABEL=NAMES", help=text)
    parser.add_argument("--processes", default="", metavar="N,N", help="numbers of processes")
    parser.add_argument("--repeats", default="1", help="runs of each, in rounds")
    text = "a network's rate, of all adapters of a node together"
    parser.add_argument("--link_gbps", action="append", default=[], metavar="LABEL=N", help=text)
    begin = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:begin])
    args.repeats = whole("--repeats", args.repeats, 1, 1000)
    if bool(args.network) == bool(args.processes):
        raise UserError("give --network LABEL=NAMES for each network, or --processes 1,2,4")
    if "--resume" in words[begin:]:
        raise UserError("--resume: each run would continue the one before, drop it")
    return args, words[begin + 1 :]


def networks_of(given: list[str]) -> dict[str, str]:
    """{label: names} of the networks."""
    found: dict[str, str] = {}
    for network in given:
        label, _, names = network.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*=[^=]+", network) or label in found:
            text = "write LABEL=NAMES, as in ethernet=eth0, with a label of its own"
            raise UserError(f"--network {network}: {text}")
        found[label] = names
    return found


def processes_of(given: str, arguments: list[str], gpus: int) -> dict[str, str]:
    """{label: number} of the numbers of processes; none above that of the GPUs."""
    shared = option("--device", arguments) == "cpu" or option("--backend", arguments) == "gloo"
    found = {}
    for number in [whole("--processes", word, 1, 4096) for word in given.split(",")]:
        if not shared and 0 < gpus < number:
            say(f"note: no run with {number} processes: there are {gpus} GPU(s) here")
        else:
            found[f"p{number}"] = str(number)
    if not found:
        raise UserError(f"--processes {given} leaves no run: there are {gpus} GPU(s) here")
    return found


def in_order(labels: list[str], repeats: int) -> list[tuple[str, int]]:
    """(label, round) of each run. Every other round is reversed: the first run of all reads the
    images from disk, the others from memory.
    """
    rounds = range(1, repeats + 1)
    return [(label, n) for n in rounds for label in (labels if n % 2 else labels[::-1])]


class Series:
    """The runs of this node."""

    def __init__(self, words: list[str]) -> None:
        self.args, self.arguments = parse_arguments(words)
        self.env = dict(os.environ)  # of the launchers
        self.env["PYTHON"] = self.python = self.env.get("PYTHON") or find_python()
        self.stopped = 0
        self.child: subprocess.Popen | None = None
        for number in run.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.stop)

    def stop(self, number: int, _frame: object) -> None:
        self.stopped = self.stopped or number
        if self.child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)

    def call(self, *words: object, **variables: str) -> int:
        """Runs a command, in a group of its own: Ctrl-C reaches it through `stop` alone."""
        env = self.env | variables
        self.child = subprocess.Popen([*map(str, words)], env=env, start_new_session=True)
        if self.stopped:  # before there was a child
            self.stop(self.stopped, None)
        code = self.child.wait()
        self.child = None
        return 128 - code if code < 0 else code

    def plan(self) -> dict[str, str]:
        """{label: a network's names or a number of processes}; completes the environment and the
        arguments that all runs share.
        """
        gpus = run.count_gpus(self.python)
        if self.args.network:
            runs = networks_of(self.args.network)
            moved = [name for name in MOVES if name in os.environ]
            if moved:
                text = "would take all runs to one network"
                raise UserError(f"{', '.join(moved)} {text}: unset {' '.join(moved)}")
            for names in runs.values():
                run.check_interfaces(names)
            self.env |= run.job(os.environ, lambda: gpus)
            for other in ("WORLD_SIZE", "GPUS"):  # names of what is now set
                self.env.pop(other, None)
        else:
            runs = processes_of(self.args.processes, self.arguments, gpus)
            threads = max(1, run.usable_cores() // max(map(int, runs.values())))
            self.env.setdefault("OMP_NUM_THREADS", str(threads))  # the same in all runs
        if run.names_no_data(self.arguments):
            on_gpus = gpus and option("--device", self.arguments) != "cpu"
            self.arguments = [*(ON_GPUS if on_gpus else ON_CPUS), *self.arguments]
        return runs

    def train(self) -> int:
        """The runs and, on node 0, their comparison, as far as it came. Returns the exit code."""
        runs, env = self.plan(), self.env
        self.folder = run.folder_of(env.get("LOG_DIR", "logs"), env.get("RUN_NAME", ""))
        order = in_order([*runs], self.args.repeats)
        self.check_settings()
        ended, failures, complete, apart, code = set(), Counter(), 0, 0, 0
        began = time.monotonic()
        for n, (label, number) in enumerate(order):
            if failures[label] == MOST_FAILURES:
                continue
            place = f"{label}/r{number}" if self.args.repeats > 1 else label
            left = ""
            if n:
                minutes = (time.monotonic() - began) / n * (len(order) - n) / 60
                left = f", about {minutes:.0f} min left"
            say(f"run {n + 1} of {len(order)}: {label}, round {number}{left}")
            code = self.run(n, runs[label], place, apart)
            complete += not code
            if not code or not (self.stopped or code in ENDS_ALL):
                ended.add(label)
            if self.stopped or code in ENDS_ALL:
                break
            # Both count failures in a row.
            failures[label] = failures[label] + 1 if code else 0
            apart = apart + 1 if code and self.were_apart(place) else 0
            if code:
                say(f"error: {place} has failed, see {self.folder / place}")
            if failures[label] == MOST_FAILURES:
                say(f"{label} has failed twice in a row: it is left out from here on")
            if apart == MOST_FAILURES:
                say("error: the other nodes did not come twice in a row: the series ends")
                break
            code = 0
        self.stopped = 0  # what has ended the runs does not end their comparison
        if not complete:
            return code or run.FAILED
        compared = self.compare(self.folder, [label for label in runs if label in ended])
        return code or (run.FAILED if complete < len(order) else compared)

    def check_settings(self) -> None:
        """The launchers' variables that this program counts with. Raises UserError."""
        default = run.OPTIONS
        value = {name: self.env.get(name) or default[key] for name, key in SETTINGS.items()}
        self.wait = whole("CONNECT_TIMEOUT", value["CONNECT_TIMEOUT"], 1, 1_000_000)
        self.ports = 2 + whole("RESTARTS", value["RESTARTS"], 0, 1000)  # of a run
        block = max(BLOCK, 2 * self.ports)
        self.port = whole("MASTER_PORT", value["MASTER_PORT"], 1, 65536 - block)
        self.turns = block // self.ports

    def run(self, n: int, value: str, place: str, apart: int) -> int:
        """The run number n, of this network or number of processes. Returns its exit code."""
        # A node may come late by as much as another one's run takes to fail.
        wait = run.wait_later(self.wait, self.arguments) if n else self.wait
        name = self.env.get("RUN_NAME", "")
        variables = {
            # The nodes may have no name in common except the run's.
            "RUN_NAME": f"{name}/{place}" if name else place,
            "LOG_DIR": self.env.get("LOG_DIR", "logs") if name else str(self.folder),
            "CONNECT_TIMEOUT": str(min(AGAIN, wait) if apart else wait),
            "MASTER_PORT": str(self.port + n % self.turns * self.ports),
        }
        if self.args.network:
            launcher, variables["IFNAME"] = "launch_multinode.sh", value
        else:
            launcher, variables["GPUS"] = "launch_single.sh", value
        given = {name: option(name, self.arguments) for name in ("--checkpoint", "--profile")}
        folder = self.folder / place
        own = [f"{name}={folder / Path(file).name}" for name, file in given.items() if file]
        return self.call("bash", ROOT / launcher, *self.arguments, *own, **variables)

    def were_apart(self, place: str) -> bool:
        """Whether the last line of a run says that its nodes did not meet."""
        log = self.folder / place / f"node{self.env.get('NODE_RANK', 0)}.log"
        with contextlib.suppress(OSError):
            return run.APART in log.read_text(errors="replace").rstrip().rpartition("\n")[2]
        return False

    def compare(self, folder: Path, labels: list[str]) -> int:
        if self.args.network:
            if self.env["NODE_RANK"] != "0":
                return 0
            time.sleep(3)  # in a shared folder the other nodes' last lines may come later
        words = ["--report", folder / "compare.md", *(f"{x}={folder / x}" for x in labels)]
        for rate in self.args.link_gbps:
            words += ["--link_gbps", rate]
        # Agg: a notebook's backend may be missing here.
        can_plot = [self.python, "-c", "import matplotlib.figure"]
        picture = folder / "compare.png"
        drawn = self.call(*can_plot, MPLBACKEND="Agg") == 0
        if drawn:
            words += ["--plot", picture]
        code = self.call(self.python, ROOT / "tools/compare_logs.py", *words)
        if code != run.USER:  # 1: some run has failed
            text = f"picture: {picture}" if drawn else "no picture: matplotlib is missing"
            say(f"report: {folder / 'compare.md'}; {text}")
        return code


def find_python() -> str:
    command = [ROOT / "tools/environment.sh", "here"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError("there is no Python with PyTorch: see above")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
