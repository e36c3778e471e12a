"""One node's run from the first start to the exit code: what tools/supervise.py does."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.records import PREFIX
from launcher import process_tree
from launcher.addresses import check_master
from launcher.counters import describe_traffic, difference, read_counters
from launcher.ending import STOPPED, End, Ending, make_ending
from launcher.errors import Refused
from launcher.hang_report import phases_folder, read_phases, standing
from launcher.nodes import GRACE, NOTICE, SAVING, Nodes
from launcher.output import Output, counted
from launcher.rendezvous import Plan, Rendezvous
from launcher.root_cause import OutputReader, find_causes, nccl_warnings, recorded_causes
from launcher.series import Series
from launcher.torchrun_command import Command, option, timeout_of

BY_SIGNAL = 143  # stopped with nothing saved: as a shell has SIGTERM


@dataclass
class Attempt:
    """One start of the command."""

    errors: str  # folder of the ranks' error files
    phases: str  # and of their phases
    began: float = field(default_factory=time.time)
    facts: OutputReader = field(default_factory=OutputReader)
    end: End = field(default_factory=End)


class Ended(Exception):
    """Another start was agreed, but a signal has come before it."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending


class Supervisor:
    """One node's run: starts the command until it is done, stopped, or has failed for good."""

    def __init__(
        self,
        options: argparse.Namespace,
        command: Command,
        output: Output,
        series: Series | None = None,
    ) -> None:
        self.options, self.command, self.output = options, command, output
        self.say, self.host = output.say, socket.gethostname()
        self.probe = options.probe if command.several else ""
        settings = {"NNODES": command.nnodes, "RESTARTS": options.restarts}
        settings["PROBE"] = int(bool(self.probe))
        node = {"node_rank": command.node_rank, "host": self.host, "settings": settings}
        last = options.restarts + settings["PROBE"]  # start of the series
        self.timeout = timeout_of(command.arguments)
        place = command.host.strip("[]"), command.port
        self.rendezvous = Rendezvous(*place, node, last, self.say, series)
        self.process: subprocess.Popen | None = None
        self.attempt: Attempt | None = None
        self.nodes: Nodes | None = None
        self.stopped = ""  # the name of the first signal
        self.bug = ""  # that has ended the last start
        self.starts, self.began, self.before = 0, time.time(), read_counters()

    def run(self) -> int:
        """Starts until there is nothing more to start; returns the exit code."""
        if self.command.nnodes > 1:
            check_master(self.rendezvous.host, self.command.node_rank)
        self._name_checkpoint()
        plan, reached = Plan(probe=bool(self.probe)), 0
        while True:
            if self.command.nnodes > 1:
                try:
                    plan = self._agree(plan)
                except Ended as end:
                    return self._end(plan, end.ending)
                self.rendezvous.guard(plan)
            if not self.starts:  # what is renamed belongs to no live run: the nodes have met
                self._keep_checkpoint()
            ending, facts = self._start(plan)
            self._say_repeated(plan, facts, reached)
            if ending.kind == "done" and plan.probe and not ending.stopped:
                plan = Plan(plan.start + 1, restarts=plan.restarts)
                continue
            if ending.final or plan.restarts >= self.options.restarts:
                return self._end(plan, ending)
            reached = max(reached, facts.step)
            plan = Plan(plan.start + 1, restarts=plan.restarts + 1)
            self.say(f"restart {plan.restarts} of {self.options.restarts} after: {ending.text}")

    def _agree(self, plan: Plan) -> Plan:
        """On the next start. Raises Ended where a signal to any node says that there is none."""
        self.rendezvous.connections = {}  # those of the start before stay open until the next
        self.rendezvous.watch = self._hear_of_a_stop
        plan = self.rendezvous.agree(plan, self._patience(plan))
        if self.nodes:
            self.nodes.close()
        return plan

    def _hear_of_a_stop(self) -> None:
        if self.nodes and (ending := self.nodes.stop(self.stopped, self._farewell)):
            raise Ended(ending)

    def _patience(self, plan: Plan) -> int:
        """Seconds to wait for the other nodes: some may take --timeout to notice a failure."""
        return self.options.connect_timeout + (self.timeout if plan.restarts else 0)

    def _name_checkpoint(self) -> None:
        """Restarts need one."""
        arguments = self.command.arguments
        if self.options.restarts and not option(arguments, "checkpoint", ""):
            arguments += ["--checkpoint", str(Path(self.options.log).parent / "checkpoint.pt")]

    def _keep_checkpoint(self) -> None:
        """Restarts need none of an earlier run; one that a live run writes is left alone."""
        arguments = self.command.arguments
        path = option(arguments, "checkpoint", "")
        if not self.options.restarts or "--resume" in arguments or self.command.node_rank:
            return
        if not os.path.exists(path):
            return
        if is_in_use(path):
            raise Refused(
                f"checkpoint {path} is in use by another run: give this one its own --checkpoint, "
                "or end the other"
            )
        os.rename(path, f"{path}.{time.strftime('%Y%m%d-%H%M%S')}")
        why = "is from an earlier run and not asked for with --resume"
        self.say(f"{path} {why}: kept under its name with the time added")

    def _start(self, plan: Plan) -> tuple[Ending, OutputReader]:
        """Runs the command to its end, ends what it has left behind, and hears from the others."""
        words = self.command.at(plan, self.probe)
        self.say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.command.shown(words)}")
        names = [self._name(node) for node in range(self.command.nnodes)]
        node_rank, connections = self.command.node_rank, self.rendezvous.connections
        nodes = self.nodes = Nodes(connections, node_rank, names, self.timeout)
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            phases_folder() as phases,
        ):
            log_dir = option(self.command.launcher, "log_dir", folder)
            attempt = self.attempt = Attempt(log_dir, phases)
            self._spawn(words, folder, phases, plan)
            from_child = (self.process.stdout, attempt.facts)
            copier = threading.Thread(target=self._copy, args=from_child, daemon=True)
            copier.start()
            if self.stopped:  # before there was a child to take it
                self._pass_on(self.stopped)
            given_up = self._watch(attempt, nodes)
            code = 1 if given_up else self.process.returncode
            copier.join(30)
            recorded = recorded_causes(attempt.errors, attempt.began)
        self.process = None
        for line in nccl_warnings(os.environ.get("NCCL_DEBUG_FILE", ""), attempt.began):
            self.output.copy(line)
        own = attempt.end
        own.code = code if code >= 0 else 128 - code  # as a shell has it
        own.stopped = self.stopped
        own.causes = find_causes(
            self.command.program, code, recorded, attempt.facts, bool(self.stopped), given_up
        )
        ending = self._conclude(attempt, nodes, plan)
        said = ending.kind not in ("user", "bug", "asked")
        if said and ending.where not in ("", ending.text):
            self.say(ending.where)
        return ending, attempt.facts

    def _conclude(self, attempt: Attempt, nodes: Nodes, plan: Plan) -> Ending:
        """How the start ended on all nodes, by node 0's word; by the own view where that fails."""

        def make() -> Ending:
            expected = range(len(nodes.names)) if nodes.node_rank == 0 else [0]
            silent = [node for node in expected if node not in nodes.ends]
            ending = make_ending(nodes.ends, silent, nodes.names)
            ending.again |= self._is_met_again(ending, attempt)
            confirmed = ending.kind == "asked" or (ending.kind == "done" and not plan.probe)
            return self.stop(ending) if ending.stopped and not confirmed else ending

        if ending := nodes.conclude(attempt.end, attempt.began, make):
            return ending
        if attempt.end.code:
            self.say("node 0 did not say what came first on all nodes: its log has the whole")
        nodes.ends = {self.command.node_rank: attempt.end}
        return make()

    def _is_met_again(self, ending: Ending, attempt: Attempt) -> bool:
        """Whether a bug has ended this start as the one before, and no checkpoint was saved."""
        before, self.bug = self.bug, ""
        if ending.kind == "bug":
            self.bug = PREFIX.sub("", ending.text)  # on whichever rank
        return bool(self.bug) and self.bug == before and self._saved() < attempt.began

    def _watch(self, attempt: Attempt, nodes: Nodes) -> bool:
        """Waits until nothing of the attempt is left; once it has failed anywhere, GRACE seconds.

        Notes where its ranks stood then. Returns whether it had to be killed.
        """
        while self.process.poll() is None and not self._failed(attempt, nodes):
            nodes.listen(0.2)
        end = time.monotonic() + GRACE
        if self.stopped:
            end += SAVING
        elif self.process.poll() != 0 and not self._has_saved(attempt):
            nodes.fail()
            noticed = time.monotonic() + NOTICE
            while not self._is_over() and time.monotonic() < noticed:
                nodes.listen(0.1)
            attempt.end.ranks = self._standing(attempt)
        while self.process.poll() is None and not self.stopped and time.monotonic() < end:
            nodes.listen(0.1)
        given_up = self.process.poll() is None and not self.stopped
        if given_up:
            self.say(f"killing this attempt: it has not ended {GRACE} s after a failure")
            process_tree.kill([self.process.pid, *process_tree.own_descendants()])
        self.process.wait()
        process_tree.end_the_rest(max(0, end - time.monotonic()), self.say)
        return given_up

    def _name(self, node: int) -> str:
        host = self.rendezvous.hosts.get(node, self.rendezvous.host if node == 0 else "")
        return f"node {node} ({host})" if host else f"node {node}"

    def _failed(self, attempt: Attempt, nodes: Nodes) -> bool:
        """Whether it has failed here, or elsewhere; not while a signal makes the ranks stop.

        That a rank stands still alone is no failure: reading, compiling and validating take long.
        Those that wait for it fail by themselves after --timeout, except at their rendezvous: NCCL
        has no time limit there.
        """
        phases = read_phases(attempt.phases).values()
        at_rendezvous = [
            phase == "rendezvous" and seconds > self.timeout for phase, seconds in phases
        ]
        hang = bool(at_rendezvous) and all(at_rendezvous)
        failed = attempt.facts.closing or nodes.failed_at or hang
        return bool(failed) and not self.stopped

    def _has_saved(self, attempt: Attempt) -> bool:
        """Whether its ranks have stopped on a signal, which somebody has sent to one of them."""
        causes = recorded_causes(attempt.errors, attempt.began)
        return any(cause.kind == "asked" for cause in causes)

    def _is_over(self) -> bool:
        return self.process.poll() is not None and not process_tree.own_descendants()

    def _standing(self, attempt: Attempt) -> list[list]:
        """Of each rank of this node: what it is at."""
        if not (process_tree.LIBC and self.command.is_torchrun):
            return []
        recorded = recorded_causes(attempt.errors, attempt.began)
        alive = process_tree.ranks_alive(self.process.pid)
        return standing(read_phases(attempt.phases), recorded, alive, self.timeout)

    def _spawn(self, words: list[str], folder: str, phases: str, plan: Plan) -> None:
        env = os.environ | process_tree.OWN | {"DEMO_PHASES": phases}
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
                preexec_fn=lambda: process_tree.tied_to(parent),
            )
        except OSError as error:
            raise Refused(f"{words[0]} cannot be started ({error.strerror})") from None
        self.starts += 1

    def _copy(self, pipe, facts: OutputReader) -> None:
        """The command's output, by whole lines, until the last process that may write is gone."""
        rest, piece = b"", b"."
        while piece:
            # Not by the pipe's own buffer, which a thread that still waits at the end would hold.
            piece = os.read(pipe.fileno(), 1 << 16)
            *lines, rest = (rest + piece).split(b"\n")
            if rest and not piece:
                lines = [rest]
            for line in lines:
                self.output.copy(line)
                facts.read(line.decode(errors="replace"))

    def _say_repeated(self, plan: Plan, facts: OutputReader, reached: int) -> None:
        """What the failure before this start has cost; only rank 0 says where it went on."""
        if plan.restarts and facts.start_step is not None:
            steps = counted(max(0, reached - facts.start_step), "step", "steps")
            self.say(
                f"restart {plan.restarts} went on from step {facts.start_step}; the log had come "
                f"to step {reached}: {steps} repeated"
            )

    def _end(self, plan: Plan, ending: Ending) -> int:
        """Says how it ended; returns the exit code."""
        self.report()
        if ending.kind == "done" and not (ending.stopped and plan.probe):
            return 0
        if ending.kind == "asked":
            more = "with --checkpoint FILE --resume the same command goes on"
            self.say(f"stopped on a signal, exit code {STOPPED}; {more}")
            return STOPPED
        if ending.stopped:
            self.say(ending.text)
            return ending.code
        if plan.restarts:
            self.say(f"gave up after {counted(plan.restarts, 'restart', 'restarts')}")
        what = "failed in the probe of the link (PROBE=0: none)" if plan.probe else "failed"
        self.say(f"{what}, see {self.options.log}; root cause:")
        self.output.line(ending.text)
        return ending.code

    # ---- A stop that the ranks did not answer with a checkpoint

    def stop(self, ending: Ending) -> Ending:
        """With what is said of it, and the exit code. Only node 0 need see the checkpoint."""
        ending.text, ending.code = self.stopped_by(ending.stopped), ending.code or BY_SIGNAL
        # What a user has to mend, a full disk say, the same command would meet again.
        if self._saved() and ending.kind != "user":
            ending.code = STOPPED
        return ending

    def _farewell(self, by: str) -> Ending:
        """Of a stop between two starts."""
        return self.stop(Ending("stopped", "", 0, by))

    def _saved(self) -> float:
        """When the checkpoint was saved from which this run would go on; 0: there is none."""
        arguments = self.command.arguments
        with contextlib.suppress(OSError):
            saved = os.stat(option(arguments, "checkpoint", "")).st_mtime
            return saved if saved >= self.began or "--resume" in arguments else 0
        return 0

    def stopped_by(self, by: str = "") -> str:
        path, by = option(self.command.arguments, "checkpoint", ""), by or self.stopped
        by = f"stopped by {by}"
        if saved := self._saved():
            moment = time.strftime("%H:%M:%S", time.localtime(saved))
            return f"{by}; the checkpoint {path} is of {moment}: --resume goes on from there"
        if path and self.command.node_rank:
            return f"{by}; whether a checkpoint was saved is known to node 0, which writes it"
        return f"{by}, with no checkpoint saved"

    def report(self) -> None:
        """The node's own record: what its interfaces carried while this ran."""
        seconds, carried = time.time() - self.began, difference(self.before, read_counters())
        record = {"node": self.command.node_rank, "host": self.host}
        record |= {"seconds": round(seconds, 3), "starts": self.starts, **carried}
        self.output.copy(f"{self.output.name}: Node {json.dumps(record)}".encode())
        if carried["interfaces"]:
            self.say(f"this node {describe_traffic(carried)} in {seconds:.0f} s")

    def on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.stopped:
            if name == "SIGINT":
                process_tree.kill(process_tree.own_descendants())
                self.say("SIGINT again: killing the run")
            return
        self.stopped = name
        self.rendezvous.stopped = True
        if self.attempt:  # which may have ended, and wait for the other nodes
            self.attempt.end.stopped = name
        if self.process:
            self._pass_on(name)
            to = self.command.program
            self.say(f"{name}: passed on to {to}; the ranks save a checkpoint and stop")

    def _pass_on(self, name: str) -> None:
        # The script does not handle a hang-up.
        self.process.send_signal(signal.SIGTERM if name == "SIGHUP" else signal.Signals[name])


def is_in_use(checkpoint: str) -> bool:
    """Whether a live run writes it: the script's rank 0 holds this lock as long as it lives."""
    try:
        with open(f"{checkpoint}.lock", "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:  # nobody has ever locked it, or the file system knows no locks
        return False
    return False
