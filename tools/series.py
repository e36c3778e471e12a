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
Exit code: 0: all runs have ended well; 1: some failed; else as the launchers'.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import run
from run import ROOT, UserError, option, whole

AGAIN = 30  # seconds to wait for the other nodes over a network that has failed
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
    text = "a network; names as for IFNAME: eth0, mlx5_0 or mlx5_0,ib0"
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
    return args, words[begin + 1 :]


def networks_of(given: list[str]) -> dict[str, str]:
    """{label: names} of the networks."""
    for network in given:
        if not re.fullmatch(r"[A-Za-z0-9._-]+=[^=]+", network):
            text = "write LABEL=NAMES, as in ethernet=eth0"
            raise UserError(f"--network {network}: {text}")
    return labelled("--network", [network.partition("=")[::2] for network in given])


def processes_of(given: str, arguments: list[str], gpus: int) -> dict[str, str]:
    """{label: number} of the numbers of processes; none above that of the GPUs."""
    shared = option("--device", arguments) == "cpu" or option("--backend", arguments) == "gloo"
    total = option("--global_batch_size", arguments)
    found = []
    for word in given.split(","):
        number = whole("--processes", word, 1, 4096)
        if not shared and 0 < gpus < number:
            say(f"note: no run with {number} processes: there are {gpus} GPU(s) here")
            continue
        if total.isdecimal() and int(total) % number:
            raise UserError(f"--global_batch_size {total} is not a multiple of {number} processes")
        found.append((f"p{number}", str(number)))
    if not found:
        raise UserError(f"--processes {given} leaves no run: there are {gpus} GPU(s) here")
    return labelled("--processes", found)


def labelled(name: str, runs: list[tuple[str, str]]) -> dict[str, str]:
    twice = [label for n, (label, _) in enumerate(runs) if label in dict(runs[:n])]
    if twice:
        raise UserError(f"{name} has {twice[0]} twice: each run needs a label of its own")
    return dict(runs)


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
        if "--resume" in self.arguments:
            raise UserError("--resume: each run would continue the one before, drop it")
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
        if self.stopped:
            return 128 + self.stopped
        env = {**os.environ, **variables}
        self.child = subprocess.Popen([*map(str, words)], env=env, start_new_session=True)
        code = self.child.wait()
        self.child = None
        return 128 - code if code < 0 else code

    def train(self) -> int:
        """The runs and, on node 0, their comparison. Returns the exit code."""
        args, base = self.args, dict(os.environ)
        base["PYTHON"] = python = base.get("PYTHON") or find_python()
        gpus = run.count_gpus(python)
        if args.network:
            runs, kind, launcher = networks_of(args.network), "network", "launch_multinode.sh"
            for names in runs.values():
                run.check_interfaces(names)
            base |= run.job(os.environ, lambda: gpus)
            base.pop("WORLD_SIZE", None)
        else:
            runs, kind = processes_of(args.processes, self.arguments, gpus), "run"
            launcher = "launch_single.sh"
            threads = max(1, run.usable_cores() // max(map(int, runs.values())))
            base.setdefault("OMP_NUM_THREADS", str(threads))  # the same in all runs
        if run.names_no_data(self.arguments):
            on_gpus = gpus and option("--device", self.arguments) != "cpu"
            self.arguments = [*(ON_GPUS if on_gpus else ON_CPUS), *self.arguments]
        name = base.get("RUN_NAME", "")
        log_dir = base.get("LOG_DIR", "logs")
        folder = run.make_folder(log_dir, name)
        order, failed = in_order([*runs], args.repeats), set()
        wait = whole("CONNECT_TIMEOUT", base.get("CONNECT_TIMEOUT", "300"), 1, 1_000_000)
        ports = 2 + whole("RESTARTS", base.get("RESTARTS", "0"), 0, 1000)
        most = 65536 - ports * len(order)
        port = whole("MASTER_PORT", base.get("MASTER_PORT", "29500"), 1, most)
        for n, (label, number) in enumerate(order):
            place = f"{label}/r{number}" if args.repeats > 1 else label
            say(f"run {n + 1} of {len(order)}: {label}, round {number}")
            variables = {"GPUS": runs[label]}
            if kind == "network":
                variables = {"IFNAME": runs[label], "NETWORK": ""}
            # The nodes may have no name in common but the run's.
            variables["RUN_NAME"] = f"{name}/{place}" if name else place
            variables["LOG_DIR"] = log_dir if name else str(folder)
            # A node may come late by as much as another one's run takes to fail.
            later = run.wait_later(wait, self.arguments) if n else wait
            variables["CONNECT_TIMEOUT"] = str(min(AGAIN, later) if label in failed else later)
            variables["MASTER_PORT"] = str(port + n * ports)
            own = []
            for kept in ("--checkpoint", "--profile"):
                if file := option(kept, self.arguments):
                    own += [kept, str(folder / place / Path(file).name)]
            words = [ROOT / launcher, *self.arguments, *own]
            code = self.call("bash", *words, **(base | variables))
            if code in (run.USER, run.STOPPED) or code > 128 or self.stopped:
                return code
            if code:
                say(f"error: {kind} {place} has failed, see {folder / place}")
                failed.add(label)
        if base.get("NODE_RANK", "0") != "0" and kind == "network":
            return int(bool(failed))
        if kind == "network":
            time.sleep(3)  # in a shared folder the other nodes' last lines may come later
        compared = self.compare(python, folder, [*runs])
        return run.FAILED if failed else compared

    def compare(self, python: str, folder: Path, labels: list[str]) -> int:
        words = ["--report", folder / "compare.md", *(f"{x}={folder / x}" for x in labels)]
        for rate in self.args.link_gbps:
            words += ["--link_gbps", rate]
        # Agg: a notebook's backend may be missing here.
        has_matplotlib = self.call(python, "-c", "import matplotlib.figure", MPLBACKEND="Agg") == 0
        if has_matplotlib:
            words += ["--plot", folder / "compare.png"]
        else:
            say("skipping the picture, because matplotlib cannot be imported")
        return self.call(python, ROOT / "tools/compare_logs.py", *words)


def find_python() -> str:
    done = subprocess.run(
        [ROOT / "tools/environment.sh", "here"], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise UserError("there is no Python with PyTorch: see above")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
