"""Keeps one node's part of a run: log, signals, the other nodes, restarts, the first cause.

    python tools/supervise.py --log logs/run/node0.log --restarts 3 -- \\
        torchrun --nnodes=2 --node_rank=0 --rdzv_backend=static --rdzv_endpoint=10.0.0.1:29500 \\
        --nproc_per_node=2 demo_coco_resnet18.py --coco_image_path ...

The launchers call it; by hand it goes before any torchrun, srun or python line. With static
rendezvous the supervisors of all nodes meet for a moment before each start: start k of a series
(probe, training, restarts) uses the endpoint's port + k, and node 0 says k by listening there.
Exit code: 0 done; 75 stopped by SIGTERM, SIGINT, SIGUSR1, with --checkpoint saved; else failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from counters import difference, in_words, read_counters
from first_cause import Cause, Facts, first_cause, recorded_causes
from meeting import Meeting, Plan, Refused, Stopped, check_master

ROOT = Path(__file__).parent.parent


def option(words: list[str], name: str, default: str) -> str:
    """The value of --name, as --name=value or --name value, with _ or -; the last one counts."""
    for word, following in itertools.pairwise([*words, default]):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            default = value if equals else following
    return default


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
        one = nnodes == option(self.launcher, "nproc_per_node", "1") == "1"
        self.several = not (self.is_torchrun and one)  # processes
        static = option(self.launcher, "rdzv_backend", "static") == "static"
        self.nnodes = int(nnodes) if self.is_torchrun and static and nnodes.isdigit() else 1
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
        threads = os.environ.get("OMP_NUM_THREADS")
        return f"OMP_NUM_THREADS={threads} " * bool(threads) + shlex.join(words)


# ---- Output ---------------------------------------------------------------------------------


class Output:
    """Whole lines to the terminal and to the log; neither ends the other, or the run."""

    RECORD = re.compile(rb"(\[[A-Z]+ \d+\] (Run|Summary|Probe)|\S+: Node) \{")

    def __init__(self, name: str, log: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # a signal may come while a line is written
        try:
            os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
            self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            why = f"the log {log} cannot be written ({error.strerror}): set LOG_DIR or RUN_NAME"
            raise Refused(why) from None
        self.for_people = os.isatty(1)

    def copy(self, lines: list[bytes]) -> None:
        shown = [x for x in lines if not (self.for_people and self.RECORD.match(x))]
        self._write(1, b"".join(shown))
        self._write(self.log, b"".join(lines))

    def say(self, text: str) -> None:
        self.line(f"{self.name}: {text}")

    def line(self, text: str) -> None:
        """To people, by stderr, and to the log."""
        for descriptor in (2, self.log):
            self._write(descriptor, f"{text}\n".encode(errors="replace"))

    def _write(self, descriptor: int, data: bytes) -> None:
        # A terminal may be gone, a disk full; what comes later may fit again.
        with self.lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(descriptor, data) :]


# ---- The run --------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
STOPPED = 75  # as the script's: the same command goes on later
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def descendants() -> list[int]:
    """Processes under this one that are alive, torchrun's ranks included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def tied_to(parent: int) -> None:
    """In the child: torchrun does not outlive its supervisor; the ranks then end by themselves."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Supervisor:
    """One node's run: starts the command until it is done, stopped, or has failed for good."""

    def __init__(self, options: argparse.Namespace, command: Command, output: Output) -> None:
        self.options, self.command, self.output = options, command, output
        self.say, self.host = output.say, socket.gethostname()
        self.probe = options.probe if command.several else ""
        settings = {"NNODES": command.nnodes, "RESTARTS": options.restarts}
        settings["PROBE"] = int(bool(self.probe))
        node = {"node_rank": command.node_rank, "host": self.host, "settings": settings}
        last = options.restarts + settings["PROBE"]  # start of the series
        self.meeting = Meeting(command.host.strip("[]"), command.port, node, last, self.say)
        self.process: subprocess.Popen | None = None
        self.stopped = ""  # the name of the first signal
        self.starts, self.began, self.before = 0, time.time(), read_counters()

    def run(self) -> int:
        """Starts until there is nothing more to start; returns the exit code."""
        if self.command.nnodes > 1:
            check_master(self.meeting.host, self.command.node_rank)
        self._keep_checkpoint()
        plan, reached = Plan(probe=bool(self.probe)), 0
        while True:
            if self.command.nnodes > 1:
                plan = self.meeting.agree(plan, self._patience(plan))
            code, cause, facts = self._start(plan)
            self._say_repeated(plan, facts, reached)
            if code == 0 and plan.probe and not self.stopped:
                plan = Plan(plan.start + 1, restarts=plan.restarts)
                continue
            final = code == 0 or self.stopped or cause.kind in ("asked", "user")
            if final or plan.restarts >= self.options.restarts:
                return self._end(plan, code, cause)
            reached = max(reached, facts.step)
            plan = Plan(plan.start + 1, restarts=plan.restarts + 1)
            self.say(f"restart {plan.restarts} of {self.options.restarts} after: {cause.text}")

    def _patience(self, plan: Plan) -> int:
        """Seconds to wait for the other nodes: some may take --timeout to notice a failure."""
        given = re.match(r"\d{1,7}", option(self.command.arguments, "timeout", "300"))
        timeout = int(given[0]) if given else 300  # the script's default
        return self.options.connect_timeout + (timeout if plan.restarts else 0)

    def _keep_checkpoint(self) -> None:
        """Restarts need a checkpoint, and none of an earlier run."""
        if not self.options.restarts:
            return
        arguments = self.command.arguments
        path = option(arguments, "checkpoint", "")
        if not path:
            path = str(Path(self.options.log).parent / "checkpoint.pt")
            arguments += ["--checkpoint", path]
        if "--resume" not in arguments and self.command.node_rank == 0 and os.path.exists(path):
            os.rename(path, f"{path}.{time.strftime('%Y%m%d-%H%M%S')}")
            why = "is from an earlier run and not asked for with --resume"
            self.say(f"{path} {why}: kept under its name with the time added")

    def _start(self, plan: Plan) -> tuple[int, Cause, Facts]:
        """Runs the command to its end and ends what it has left behind."""
        words, facts, now = self.command.at(plan, self.probe), Facts(), time.time()
        self.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.shown(words)}")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            self._spawn(words, folder, plan)
            from_child = (self.process.stdout, facts)
            copier = threading.Thread(target=self._copy, args=from_child, daemon=True)
            copier.start()
            if self.stopped:  # before there was a child to take it
                self._pass_on(self.stopped)
            code = self.process.wait()
            self._end_the_rest(30 if self.stopped else 10)
            copier.join(30)
            recorded = recorded_causes(option(self.command.launcher, "log_dir", folder), now)
        self.process = None
        program, passed_on = self.command.program, bool(self.stopped)
        return code, first_cause(program, code, recorded, facts, passed_on), facts

    def _spawn(self, words: list[str], folder: str, plan: Plan) -> None:
        env = dict(os.environ)
        if self.command.is_torchrun:  # which takes its options from PET_ variables, too
            env["PET_LOG_DIR"] = folder
            env["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"
            env["PET_RDZV_CONF"] = f"timeout={self._patience(plan)}"
        parent = os.getpid()
        try:
            # A session of its own: Ctrl-C reaches it once, through this process.
            self.process = subprocess.Popen(
                words,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: tied_to(parent)) if LIBC else None,
            )
        except OSError as error:
            raise Refused(f"{words[0]} cannot be started ({error.strerror})") from None
        self.starts += 1

    def _copy(self, pipe, facts: Facts) -> None:
        """The command's output, by whole lines, until the last process that may write is gone."""
        rest, piece = b"", b"."
        while piece:
            piece = os.read(pipe.fileno(), 1 << 16)
            *lines, rest = (rest + piece).split(b"\n")
            if rest and not piece:
                lines, rest = [rest], b""
            self.output.copy([line + b"\n" for line in lines])
            for line in lines:
                facts.read(line.decode(errors="replace"))

    def _end_the_rest(self, seconds: int) -> None:
        """Gives processes that are left so long to end by themselves, then kills them.

        NOTE: no SIGTERM: one rank that stops on a signal makes all stop, on every node, for good.
        """
        end, kills = time.monotonic() + seconds, 0
        while True:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            left = descendants()
            if not left or kills == 12:  # some a kernel's driver does not let go
                return
            if time.monotonic() > end:
                self.say(f"killing what is left of this attempt: {len(left)} processes")
                self._kill(left)
                end, kills = time.monotonic() + 5, kills + 1
            time.sleep(0.1)

    def _kill(self, processes: list[int]) -> None:
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _say_repeated(self, plan: Plan, facts: Facts, reached: int) -> None:
        """What the failure before this start has cost; only rank 0 says where it went on."""
        if plan.restarts and facts.start_step is not None:
            self.say(
                f"restart {plan.restarts} went on from step {facts.start_step}; the log had come "
                f"to step {reached}: {max(0, reached - facts.start_step)} steps repeated"
            )

    def _end(self, plan: Plan, code: int, cause: Cause) -> int:
        """Says how it ended; returns the exit code."""
        self.report()
        if code == 0 and not (self.stopped and plan.probe):
            return 0
        code = code if code >= 0 else 128 - code  # as a shell has it
        if cause.kind == "asked":
            more = "with --checkpoint FILE --resume the same command goes on"
            self.say(f"stopped on a signal, exit code {STOPPED}; {more}")
            return STOPPED
        if self.stopped:
            self.say(f"stopped by {self.stopped}, with no checkpoint saved")
            return code or 143
        if plan.restarts:
            self.say(f"gave up after {plan.restarts} restarts")
        what = "failed in the probe of the link (PROBE=0: none)" if plan.probe else "failed"
        self.say(f"{what}, see {self.options.log}; first cause:")
        self.output.line(cause.text)
        return code

    def report(self) -> None:
        """The node's own record: what its interfaces carried while this ran."""
        seconds, links = time.time() - self.began, difference(self.before, read_counters())
        record = {"node": self.command.node_rank, "host": self.host}
        record |= {"seconds": round(seconds, 3), "starts": self.starts, "interfaces": links}
        self.output.copy([f"{self.output.name}: Node {json.dumps(record)}\n".encode()])
        if links:
            self.say(f"this node {in_words(links)} in {seconds:.0f} s")

    def on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.stopped:
            if name == "SIGINT":
                self._kill(descendants())
                self.say("SIGINT again: killing the run")
            return
        self.stopped = name
        self.meeting.stopped = True
        if self.process:
            self._pass_on(name)
            to = self.command.program
            self.say(f"{name}: passed on to {to}; the ranks save a checkpoint and stop")

    def _pass_on(self, name: str) -> None:
        # The script does not handle a hang-up.
        self.process.send_signal(signal.SIGTERM if name == "SIGHUP" else signal.Signals[name])


# ---- The command line -----------------------------------------------------------------------


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Command]:
    at = argv.index("--") if "--" in argv else len(argv)
    usage = "%(prog)s --log FILE [options] -- torchrun ..."
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.partition("\n")[0])
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    add = parser.add_argument
    add("--log", required=True, metavar="FILE", help="gets every line, after what it has")
    add("--restarts", type=int, default=0, metavar="N", help="after failures; 0")
    add("--probe", default="", metavar="FILE.py", help="run once before, in the script's place")
    add("--connect_timeout", type=int, default=300, metavar="S", help="seconds; 300")
    add("--name", default="supervise.py", help="before each message; supervise.py")
    options, words = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not words:
        parser.error("no command: give it after --")
    if options.probe and not os.path.isfile(options.probe):
        parser.error(f"--probe {options.probe}: no such file")
    command = Command(words)
    if not command.script and (options.probe or options.restarts):
        parser.error("--probe and --restarts need a command with a script that ends in .py")
    if command.port + options.restarts + 1 > 65535:
        parser.error(f"port {command.port}: with the restarts' own it goes beyond 65535")
    return options, command


def main() -> int:
    try:
        options, command = parse_arguments(sys.argv[1:])
        output = Output(options.name, options.log)
    except Refused as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
    supervisor = Supervisor(options, command, output)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, supervisor.on_signal)
    if LIBC:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        return supervisor.run()
    except Stopped:
        code, why = 143, f"stopped by {supervisor.stopped}, with no checkpoint saved"
    except (Refused, OSError) as error:
        code, why = 1, f"error: {error}"
    if supervisor.starts:
        supervisor.report()
    output.say(why)
    return code


if __name__ == "__main__":
    sys.exit(main())
