#!/usr/bin/env python3
"""Compare runs of the demo over different networks, from their logs alone.

    python tools/compare_logs.py ethernet=logs/eth infiniband=logs/ib --plot compare.png
    python tools/compare_logs.py slow=a.log fast=b.log --link_gbps slow=1 --link_gbps fast=56

A run is NAME=PATH: a log file, or a run's folder with node0.log, node1.log, ...; node 0's alone
will do. A name that is given again adds a file to its run, such as the probe's (`slow=probe.log
slow=train.log`). The base of every ratio is the first run that has not failed. The logs are those
of demo_coco_resnet18.py, or of the original demo of the talk, which have no Run and no Summary
line: what they lack is given as an option, for all runs (`--steps 1850`) or for one (`--steps
slow=1850`). A log's own figure wins, but `--link_gbps` replaces the stated speed.

Exit code: 0 compared; 1 compared, but a run failed or is incomplete; 2 bad usage, or not like with
like.

A verdict says what it rests on: measured (the split of a step, the probe's all-reduces, counters
of bytes and errors), NCCL's word (its debug text), or the model (B = bytes each rank hands to the
all-reduce, n = processes on N nodes, r = bytes/s in one direction of all the interfaces of a node
that carry it, a = latency of one message: the probe's small all-reduces over their turns):
  ring   a node sends 2(n-1)/n B in each direction, as the ring enters and leaves it once:
         T = 2(n-1) a + 2(n-1)/n B/r     (n = 4 on N = 2: 1.5 B; n = 2 on N = 2: 1 B)
  tree   two pipelined binary trees over the nodes; a node is an inner node of one and a leaf of
         the other and sends 2 B, or B where there are only two nodes:
         T = 2 ceil(log2 N) a + 2 B/r
  step   from full overlap, max(floor, T), to none, floor + T; floor = data wait + compute. Where
         the log does not tell the algorithm, T is the quicker one's, but for a run that is judged
         in floor + T the ring's, which sends the most
  best   with a probe of P: the mean of max(floor, measured step + T - P), where the same time of
         an all-reduce stays hidden, and floor + T min(1, (step - floor)/P), where the same share,
         though no more than a backward pass, 2/3 floor
Traffic inside a node counts as free, and all gradients as one message (buckets repeat a).
Sources: latency-bandwidth cost: Thakur, Rabenseifner, Gropp, Int. J. High Perf. Comp. Appl. 19(1),
2005. Ring: Patarasuk, Yuan, J. Parallel Distrib. Comput. 69(2), 2009. Two trees: Sanders, Speck,
Traeff, Parallel Computing 35(12), 2009. Algorithm and bus bandwidth: PERFORMANCE.md of nccl-tests.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare_links import (
    ADAPTERS,
    HARMLESS,
    STRAY,
    get,
    link_of,
    objects,
    rate,
    say_fallback,
    slow_link_checks,
)


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""


# --- the comparison ----------------------------------------------------------------------------


def main(argv=None):
    try:
        code = run_command(parse_arguments(argv))
        sys.stdout.flush()
    except UserError as error:
        print(f"compare_logs.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def run_command(args):
    for option, file in (("json", args.json), ("plot", args.plot)):
        if file and not Path(file).absolute().parent.is_dir():
            raise UserError(f"--{option} {file}: no such folder")
    draw = None
    if args.plot:  # before anything else, so that nothing is half done
        try:
            from compare_plot import draw
        except ImportError:
            raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    paths = named_paths(args.runs)
    given = given_figures(args, paths)
    runs = [make_run(name, read_log(files), given[name]) for name, files in paths.items()]
    result = compare(runs, args.latency_us * 1e-6, args.force, args.project)
    print(report(result))
    for option, file, write in (("json", args.json, write_json), ("plot", args.plot, draw)):
        try:
            if file:
                write(result, file)
        except (OSError, ValueError) as error:
            raise UserError(f"--{option} {file}: cannot be written: {error}") from None
    return 0 if all(run.complete for run in runs) else 1


def compare(runs, latency_s, force=False, project_from=None):
    """Everything the report holds, from Runs; raises UserError where they are not alike."""
    base = next((run for run in runs if not run.log.failed), runs[0])
    others = [run for run in runs if run is not base]
    unlike = [text for run in others for text in differences(base, run)]
    if unlike and not force:
        raise UserError("; ".join(unlike) + " (--force compares all the same)")
    for run in others:
        if settings := other_settings(base, run):
            run.notes.append(f"other settings than {base.name}: {', '.join(settings)}")
    set_losses(runs)
    for run in runs:
        set_floor(run, runs)
        run.message_s = latency_s if run.message_s is None else run.message_s
    return {
        "runs": runs,
        "base": base,
        "differences": unlike,
        "losses": [text for run in others if (text := losses_apart(base, run))],
        "same_wire": same_wire(runs),
        "verdicts": {run.name: judge(run) for run in runs},
        "scaling": scaling(runs),
        "cross_checks": cross_checks(runs),
        "projections": {run.name: project(run) for run in runs if run.can_project},
        "projected": projected(runs, project_from),
    }


# --- reading logs ------------------------------------------------------------------------------

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?)")
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d{1,6})\] ")
# Fixed numbers of decimals tell a whole number from one that was cut off.
LOSS = r"(-?inf|nan|-?\d{1,12}\.\d{4}(?!\d))"
STEP = re.compile(
    r"Epoch (\d{1,9}) \| Step (\d{1,9}) \| Loss: " + LOSS + r"(?: \| (\d{1,12}\.\d) img/s)?"
    r"(?: \| data (\d{1,12}\.\d) ms \| step (\d{1,12}\.\d) ms)?"
)
EPOCH = re.compile(r"Epoch (\d{1,9}) complete \| Avg loss: " + LOSS)
VALIDATION = re.compile(r"Epoch \d{1,9} validation \| Top-1: (\d{1,3}\.\d\d)%")
END = re.compile(r"Cleanup complete\. Total wall time: [\dhms. ]*\((\d{1,12}\.\d{3})s\)")
STOP = re.compile(r"(Stopped\b.*|ERROR: .*)")
RECORD = re.compile(r"(Run|Probe|Summary) (\{.*)")
OURS = re.compile(
    r"\] (Run|Probe|Summary|Data)(:| \{)|\d img/s"
)  # not in the original demo's logs
# A launcher's own lines: its record, a start, and how it ended where it did not end well.
LAUNCHER = re.compile(
    r"(?:^|\s)[\w./-]+\.(?:sh|py): (?:Node (?P<node>\{.*)|(?P<start>\d{4}-\d\d-\d\d [\d:]{8}) "
    r"|failed\b.*; first cause:\s*(?P<cause>.*)|error: (?P<error>.+))"
)


@dataclass
class Step:
    """One step line: loss, this rank's images/s, and data wait and step in ms (or None)."""

    loss: float
    img_per_s: float | None
    data_ms: float | None
    step_ms: float | None


@dataclass
class Log:
    """What the files of one run say, the last attempt's line where several say the same."""

    records: dict = field(default_factory=dict)  # Run, Summary of the last attempt, last Probe
    nodes: list = field(default_factory=list)  # the launchers' Node records
    attempts: int = 0
    steps: dict = field(default_factory=dict)  # (rank, epoch, step) -> Step
    last_step: dict = field(default_factory=dict)  # rank -> step of its last step line
    epochs: dict = field(default_factory=dict)  # (rank, epoch) -> mean loss
    ended: dict = field(default_factory=dict)  # rank -> wall time in s, no step line after it
    top1: float | None = None  # percent, of the last validation
    ranks: set = field(default_factory=set)
    kinds: set = field(default_factory=set)  # GPU, CPU
    ours: bool = False  # False: the original demo's format
    torn: int = 0
    stop: str | None = None  # the last reason a rank gave for stopping
    failed: str | None = None  # the first cause, where a launcher says that it failed


def log_files(path):
    """The files of a run: `path` itself, or its node0.log, node1.log, ... in order."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{path}: no such file or folder; give a log or a run's folder")
        return [path]
    files = [f for f in path.glob("node*.log") if re.fullmatch(r"node\d+\.log", f.name)]
    if not files:
        raise UserError(f"{path}: no node0.log, node1.log, ... in this folder")
    return sorted(files, key=lambda f: int(re.sub(r"\D", "", f.name)))


def read_log(paths):
    """Parse the files at `paths` into one Log; damage never raises, a bad path does."""
    texts, log = [], Log()
    for path in [file for given in paths for file in log_files(Path(given))]:
        try:
            texts.append(path.read_bytes().decode("utf-8", "replace"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    for text in sorted(texts, key=lambda text: "] Run {" not in text):  # it opens an attempt
        parse_text(text, log)
    return log


def parse_text(text, log=None):
    """Parse one file's text into a Log, or into that of the run's other files.

    A record is looked for after each `[KIND rank] ` wherever it stands in a line, so that other
    programs' lines, prefixes and two lines torn into each other do no harm; a record that is not
    whole is left out and counted.
    """
    log, failed = log or Log(), None
    text = ESCAPES.sub("", text)
    ours, ranks = bool(OURS.search(text)), {int(rank) for _, rank in PREFIX.findall(text)}
    # The original demo counts GPUs on each node from 0; ours prints the global rank.
    first = max(log.ranks) + 1 if ranks & log.ranks and not ours else 0
    log.ours |= ours
    for line in re.split(r"[\r\n]+", text):
        if failed == "":  # the cause stands on the line after
            failed = line.strip()
        elif found := LAUNCHER.search(line):
            if found["node"]:
                log.nodes.append(decode(log, found["node"]))
            else:  # a start takes back how the series before it ended
                failed = None if found["start"] else (found["error"] or found["cause"]).strip()
        for mark in PREFIX.finditer(line):
            log.kinds.add(mark[1])
            log.ranks.add(first + int(mark[2]))
            parse_body(log, first + int(mark[2]), line[mark.end() :])
    if failed is not None:
        log.failed = log.failed or failed[:300] or "not in this log"
    return log


def parse_body(log, rank, body):
    """Enter into `log` what stands at the start of `body`, the text after one prefix."""
    if found := RECORD.match(body):
        add_record(log, found[1], found[2])
    elif found := STEP.match(body):
        epoch, step = int(found[1]), int(found[2])
        numbers = [None if n is None else float(n) for n in found.group(3, 4, 5, 6)]
        log.steps[rank, epoch, step] = Step(*numbers)
        log.last_step[rank] = step
        log.ended.pop(rank, None)
    elif found := EPOCH.match(body):
        log.epochs[rank, int(found[1])] = float(found[2])
    elif found := VALIDATION.match(body):
        log.top1 = float(found[1])
    elif found := END.match(body):
        log.ended[rank] = float(found[1])
    elif found := STOP.match(body):
        log.stop = found[1].strip()[:200]
    elif body.startswith(("Epoch ", "Cleanup ")):
        log.torn += 1


def add_record(log, word, text):
    """Enter a Run, Probe or Summary line; a new Run opens a new attempt.

    The Probe stays: it comes before the first attempt and is not repeated for the others.
    """
    if word == "Run":  # even a torn one: what came before it is not this attempt's end
        log.attempts += 1
        log.records.pop("Summary", None)
        log.ended.clear()
        log.stop = None
    log.records[word] = decode(log, text)


def decode(log, text):
    """The JSON object that `text` begins with; an empty one, and counted, where it is torn."""
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        log.torn += 1
        return {}


# --- figures of a run --------------------------------------------------------------------------

# What an option gives where the log lacks it: its field of the Run record, type, meaning.
LACKING = {
    "images": ("images", int, "images trained on in an epoch"),
    "epochs": ("num_epochs", int, "epochs"),
    "global_batch": ("global_batch_size", int, "images in a step over all processes"),
    "steps": ("max_steps", int, "steps in all (default: from images, global batch and epochs)"),
    "processes": ("world_size", int, "processes"),
    "nodes": ("nodes", int, "nodes"),
    "parameters": ("parameters", int, "parameters of the model, 4 bytes of gradient each"),
    "link_gbps": ("", float, "stated speed of a node's link, Gb/s; replaces what the log says"),
}
STRAGGLER = 1.2  # a rank this many times as busy as the usual one keeps the others waiting


@dataclass
class Run:
    """One run's figures; seconds, bytes, Gb/s, images/s; None where the log does not say."""

    name: str
    log: Log
    problems: list = field(default_factory=list)  # reasons why it does not count as complete
    notes: list = field(default_factory=list)
    processes: int | None = None
    nodes: int | None = None
    images: int | None = None
    epochs: int | None = None
    steps: int | None = None  # planned in all
    start_step: int = 0
    global_batch: int | None = None
    parameters: int | None = None
    wall_s: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    img_per_s: float | None = None  # whole job
    straggler: int | None = None
    losses: dict = field(default_factory=dict)  # epoch -> mean over ranks
    top1: float | None = None
    wire_bytes: float | None = None  # per step and rank, after compression
    link_gbps: float | None = None  # stated, of all the interfaces of a node that carried it
    probe_s: float | None = None  # all-reduce alone, scaled to wire_bytes
    small_s: float | None = None  # all-reduce of up to 4 KB
    message_s: float | None = None  # one message: the model's latency
    bandwidth: float | None = None  # bytes/s of ever larger all-reduces
    links: list = field(default_factory=list)  # a Link of each probed node
    floor_s: float | None = None  # data wait and compute of a step
    floor_from: str | None = None  # the run that they are of

    @property
    def complete(self):
        return not self.problems

    @property
    def status(self):
        return "complete" if self.complete else "failed" if self.log.failed else "INCOMPLETE"

    @property
    def attempted_again(self):
        """True where the wall time covers only the last of several attempts."""
        return self.start_step > 0 or self.log.attempts > 1

    @property
    def shape(self):
        return self.processes, self.nodes, self.global_batch

    @property
    def can_project(self):
        return self.complete and all((self.step_s, self.wire_bytes, self.processes, self.nodes))

    @property
    def has_split(self):
        return None not in (self.data_s, self.compute_s, self.exposed_s)

    @property
    def link(self):
        """That of the slowest node, whose pace is that of all."""
        return min(self.links, key=lambda link: link.order, default=None)

    @property
    def wire_gbps(self):
        return self.link and self.link.gbps

    @property
    def interface(self):
        return self.link and self.link.shown

    def record(self, name):
        """The Run, Probe or Summary of the log; empty where there is none."""
        return get(self.log.records, name, dict)


def make_run(name, log, given):
    """Take a run's figures from its log, and from `given` (option -> number) what it lacks."""
    run = Run(name, log)
    facts, summary = run.record("Run"), run.record("Summary")
    run.start_step = get(facts, "start_step", int) or 0
    for option, (key, _, _) in LACKING.items():
        value = get(facts, key, int)
        setattr(run, option, value or given.get(option))
        if value and given.get(option) not in (None, value):
            run.notes.append(f"--{option} is not used: the log itself says {value:,}")
    if run.steps is None and None not in (run.images, run.global_batch, run.epochs):
        run.steps = math.ceil(run.images / run.global_batch) * run.epochs
    run.problems = find_problems(run)
    if run.complete:
        add_times(run, summary)
    run.wire_bytes = get(summary, "wire_bytes_per_step")
    if not run.wire_bytes and run.parameters:
        run.wire_bytes = 4 * run.parameters  # fp32 gradients, as in the original demo
    validations = [get(entry, "top1") for entry in objects(summary, "val")]  # of older logs
    run.top1 = log.top1 if log.top1 is not None else next(reversed(validations), None)
    add_probe(run, run.record("Probe"))
    add_notes(run)
    return run


def add_times(run, summary):
    """Wall time and the split of a step, means over the ranks."""
    run.wall_s = max(run.log.ended.values(), default=None) or get(summary, "wall_s")
    for name in ("step", "data", "compute", "exposed"):
        said = get(summary, f"{name}_ms")  # older logs have the mean itself
        ranks = [get(rank, f"{name}_ms") for rank in objects(summary, "ranks")]
        values = ranks if said is None else [said]
        if values and None not in values:
            setattr(run, f"{name}_s", sum(values) / len(values) / 1000)
    if run.processes == 1 and None not in (run.step_s, run.data_s):  # nothing to communicate
        run.compute_s, run.exposed_s = run.step_s - run.data_s, 0.0
    done = (run.steps or 0) - run.start_step
    if run.step_s is None and run.wall_s and done > 0:
        run.step_s = run.wall_s / done
    run.img_per_s = get(summary, "img_per_s")
    if run.img_per_s is None and run.step_s and run.global_batch:
        run.img_per_s = run.global_batch / run.step_s
    run.straggler = find_straggler(summary)


def find_straggler(summary):
    """The rank whose data wait and compute take over STRAGGLER times the usual, or None.

    The usual is the lower median of all ranks, so that of two the quicker one counts as usual.
    """
    busy = {}
    for entry in objects(summary, "ranks"):
        rank, *parts = get(entry, "rank", int), get(entry, "data_ms"), get(entry, "compute_ms")
        if None not in (rank, *parts):
            busy[rank] = sum(parts)
    slowest = max(busy, key=busy.get, default=None)
    usual = statistics.median_low(busy.values()) if busy else 0
    return slowest if busy and busy[slowest] > STRAGGLER * usual else None


def find_problems(run):
    """Every reason why this log is not that of a whole run."""
    log, problems = run.log, []
    if log.failed:
        return [f"failed; first cause: {log.failed}"]
    if not log.ranks:
        return ["no line of the demo in it"]
    if log.ours and not run.record("Run"):
        problems.append("no Run line: the beginning of the log is missing or damaged")
    if log.ours and not run.record("Summary"):
        reason = f"; it says: {log.stop}" if log.stop else ""
        problems.append(f"no Summary line: the run did not end, or the end is missing{reason}")
    expected = expected_ranks(run)
    present = log.ranks & expected
    ended = present & log.ended.keys()
    # The original demo's step counter may start again with each epoch.
    early = {rank for rank in ended if log.ours and not reached_end(run, rank)}
    for what, ranks in (
        ("no line from", expected - present),
        ("lines that the run should not have, from", log.ranks - expected),
        ("no end line from", present - ended),
        ("the end came early for", early),
    ):
        if ranks:
            problems.append(f"{what} {name_ranks(sorted(ranks), run)}")
    return problems


def expected_ranks(run):
    """Ranks that must have written: all of every node of which there is a line.

    Node 0's log alone will do, as rank 0 writes what all ranks measured.
    """
    listed = get(run.record("Run"), "hosts", list), get(run.record("Summary"), "ranks", list)
    # The largest of the three: damage that makes one smaller must not hide a rank.
    total = min(max(run.processes or 0, *map(len, listed)), 100_000)
    if not total:  # of the original demo, and nobody said how many
        return set(range(min(run.log.ranks), max(run.log.ranks) + 1))
    per_node = math.ceil(total / (run.nodes or 1))
    nodes = {rank // per_node for rank in run.log.ranks}
    return {rank for rank in range(total) if rank // per_node in nodes}


def reached_end(run, rank):
    """True where the rank wrote its last planned step, or the end of its last epoch."""
    last = run.log.last_step.get(rank)
    if (last or run.start_step) == run.steps:
        return True
    # That line may be torn; the epoch's end will do, if it is of this attempt.
    return (rank, run.epochs) in run.log.epochs and (last or 0) > run.start_step


def name_ranks(ranks, run):
    """rank 1 (n1) (last step 18 of 20)"""
    hosts = get(run.record("Run"), "hosts", list)
    shown = [f"{r} ({hosts[r]})" if r < len(hosts) else str(r) for r in ranks[:8]]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    text = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more
    steps = [run.log.last_step[rank] for rank in ranks if rank in run.log.last_step]
    of = f" of {run.steps:,}" if run.steps and run.log.ours else ""
    return text + (f" (last step {min(steps):,}{of})" if steps else "")


def add_notes(run):
    log = run.log
    if log.torn:
        run.notes.append(f"{log.torn} torn line(s) left out")
    if log.attempts > 1:
        run.notes.append(
            f"restarted {log.attempts - 1} time(s), the last time from step {run.start_step:,}: "
            "wall time is that of the last attempt"
        )
    elif run.start_step:
        run.notes.append(f"resumed from step {run.start_step:,}: wall time is of this part alone")
    if run.complete and run.nodes and len(log.ranks) < (run.processes or 0):
        seen = max(1, len(log.ranks) * run.nodes // run.processes)
        run.notes.append(f"log of {seen} of {run.nodes} nodes: loss and lines are of its ranks")


# --- which network carried it ------------------------------------------------------------------

# TCP that sends this part of its segments again is slow for it: its rate falls with the root of
# the loss (Mathis et al., Computer Communication Review 27(3), 1997). A sound cable loses none,
# but a virtual one between two busy processes repeats up to 0.008 of them.
LOSSY = 0.01
SAME_RATE = 1.2  # rates within this factor can be those of one wire
HEALTHY = 0.5  # a link below this part of its stated speed is not the link that was meant
DELIVERS = 0.8  # above it, headers and start-up account for the rest


def add_probe(run, probe):
    """What the probe measured; nothing, and a note, where it is of another number of processes."""
    count = get(probe, "world_size", int)
    if count and run.processes and count != run.processes:
        run.notes.append(f"its probe is not used: {count} processes, the run has {run.processes}")
        return
    milliseconds, size = get(probe, "all_reduce_ms"), get(probe, "all_reduce_bytes")
    moved_gbps = 8e-6 * size / milliseconds if milliseconds and size else 0.0
    if moved_gbps and run.wire_bytes:
        run.probe_s = milliseconds / 1000 * run.wire_bytes / size
    several = (run.nodes or 1) > 1
    links = [link_of(node, several, STRAY * moved_gbps) for node in objects(probe, "nodes")]
    run.links = [link for link in links if link.names or link.finding or not several]
    run.link_gbps = run.link_gbps or (run.link and run.link.stated)
    run.small_s = (get(probe, "latency_ms") or 0) / 1000 or None
    run.bandwidth = (get(probe, "bandwidth_GBps") or 0) * 1e9 or None
    if run.small_s and several and (run.processes or 0) > 1:
        run.message_s = run.small_s / all_reduce_seconds(run, 0, run.processes, run.nodes, 1, 1)
    if name := unused_interface(run):
        run.notes.append(f"{name}, but {run.links[0].shown} carried the traffic")


def unused_interface(run):
    """The *_SOCKET_IFNAME setting that the probed traffic did not follow, as text, or None."""
    facts, link = run.record("Run"), run.links[0] if run.links else None
    if not link or link.transport != "sockets" or run.nodes == 1:
        return None  # nothing has to leave the machine, or only start-up goes there
    # The environment in the Run line is rank 0's, and so is the first node.
    key = "GLOO_SOCKET_IFNAME" if facts.get("backend") == "gloo" else "NCCL_SOCKET_IFNAME"
    wanted = get(get(facts, "env", dict), key, str)
    names = tuple(name for name in wanted.lstrip("=").split(",") if name)
    followed = wanted.startswith("^") or any(name.startswith(names) for name in link.names)
    return f"{key}={wanted}" if names and not followed else None


def same_wire(runs):
    """Of each two runs that used the same interfaces at the same rate, a sentence."""
    found = []
    able = [run for run in runs if run.complete and run.nodes != 1 and run.wire_gbps]
    for a, b in itertools.combinations(able, 2):
        used = [[(i.host, i.transport, i.names) for i in run.links] for run in (a, b)]
        slow, fast = sorted([a.wire_gbps, b.wire_gbps])
        if used[0] == used[1] and fast < SAME_RATE * slow:
            who = "Both runs" if len(runs) == 2 else f"{a.name} and {b.name}"
            found.append(
                f"{who} went over the same wire: {a.link.way}, by {a.link.basis}, "
                f"{rate(a.wire_gbps)} and {rate(b.wire_gbps)} measured."
            )
    return found


def say_carried(run):
    """The verdict's first words: which network carried the all-reduces, and how fast it was."""
    link = run.link
    if not link:
        return []
    if run.nodes == 1 and link.transport != "local" and link.gbps:
        return [f"Inside one node, over {link.shown}, by {link.basis}: {rate(link.gbps)}."]
    if run.nodes == 1 or link.transport == "local":
        where = "Inside one node, through" if run.nodes == 1 else "Between nodes through"
        basis = f"by {link.basis}" if link.transport == "local" else "as no counter of bytes moved"
        return [f"{where} NVLink, PCIe or memory, {basis}: no network is judged."]
    says = [text for text in [say_fallback(link)] if text]
    channels = get(get(link.finding, "channels", dict), "network", int)
    basis = f"by {link.basis}"
    if channels and link.transport in ADAPTERS:
        direct = get(link.finding, "gpudirect", int)
        basis += f" (GPUDirect on {direct or 0} of {channels} connections)"
    if link.gbps is None:
        return [*says, f"Over {link.way}, {basis}; no counter of bytes moved with it."]
    if link.kind != "ipoib":
        return [*says, f"Over {link.way}, {basis}: {delivered(run)}"]
    text = f"IP over InfiniBand: the probe ran at {rate(link.gbps)} on {link.names[0]}"
    if can := link.adapter_gbps:
        text += f", {link.gbps / can:.0%} of what {link.adapter or 'its adapter'} can do "
        text += f"({rate(can)} stated)"
    return [*says, f"{text}, by byte counters."]


def delivered(run):
    """What the probe's all-reduce reached of the stated speed."""
    of = f" ({ms(run.probe_s)} for a step's {megabytes(run.wire_bytes)})" if run.probe_s else ""
    text = f"the probe's all-reduce{of} ran at {rate(run.wire_gbps)}"
    if not run.link_gbps:
        return f"{text}; its stated speed is not known (--link_gbps)."
    reached = run.wire_gbps / run.link_gbps
    text += f", {reached:.0%} of the stated {rate(run.link_gbps)}"
    if reached < HEALTHY:
        return f"{text}: this is not a {rate(run.link_gbps)} result."
    return f"{text}: the link delivers." if reached >= DELIVERS else f"{text}."


def say_trouble(run):
    """What went wrong on the link, by the kernel's counters: sentences, none where nothing did."""
    says, used = [], [name for link in run.links for name in [*link.names, link.adapter]]
    probed = objects(run.record("Probe"), "nodes")
    for when, nodes in (("during the probe", probed), ("during the run", run.log.nodes)):
        tcp = [get(node, "tcp", dict) for node in nodes]
        sent = sum(get(one, "segments") or 0 for one in tcp)
        again = sum(get(one, "retransmits") or 0 for one in tcp)
        over_tcp = run.link is None or run.link.transport == "sockets"
        if sent and again > LOSSY * sent and over_tcp:
            says.append(
                f"TCP sent {again / sent:.2%} of its segments again {when} ({again:,.0f} of "
                f"{sent:,.0f}, counted): the link loses packets."
            )
        found = [
            f"{key} {count:g} on {interface['name']} of {get(node, 'host', str)}"
            for node in nodes
            for interface in objects(node, "interfaces")
            if interface.get("name") in used
            for key in get(interface, "errors", dict)
            if key not in HARMLESS and (count := get(interface["errors"], key))
        ]
        if found:
            says.append(f"Errors of the link {when} (counted): {', '.join(found)}.")
    return says


# --- model -------------------------------------------------------------------------------------

# TCP's payload out of the bytes that an Ethernet line is busy for, at MTU 1500: the packet less
# the headers of IPv4 (20), TCP (20) and its time stamp option (12, RFC 7323), over the packet plus
# Ethernet header 14, checksum 4, preamble 8 and gap 12 (IEEE 802.3): 1448/1538, 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)
# Where no probe timed small all-reduces: NCCL's own estimate for one hop over a network with its
# Simple protocol, rings and trees alike (hwLat in NCCL's src/graph/tuning.cc).
LATENCY_US = 14.0
# A backward pass, which all-reduces hide behind, computes two products for the forward pass's one.
BACKWARD_SHARE = 2 / 3


def ring_bytes(nbytes, processes, nodes):
    """Bytes that one node sends, and as many it receives, in a ring all-reduce of `nbytes`."""
    return 0.0 if nodes < 2 else 2 * (processes - 1) / processes * nbytes


def ring_seconds(nbytes, processes, nodes, bytes_per_s, latency_s=0.0):
    """Seconds of a ring all-reduce; each of its 2(n-1) turns waits for a hop between nodes."""
    if nodes < 2:
        return 0.0
    return 2 * (processes - 1) * latency_s + ring_bytes(nbytes, processes, nodes) / bytes_per_s


def tree_seconds(nbytes, nodes, bytes_per_s, latency_s=0.0):
    """Seconds of an all-reduce over two pipelined binary trees, up and down again."""
    if nodes < 2:
        return 0.0
    sent = nbytes if nodes == 2 else 2 * nbytes
    return 2 * math.ceil(math.log2(nodes)) * latency_s + sent / bytes_per_s


def algorithm(run):
    """ring or tree where it is known: Gloo's is a ring, NCCL may have been told. Else None."""
    facts = run.record("Run")
    asked = get(get(facts, "env", dict), "NCCL_ALGO", str).lower()
    if facts.get("backend") == "gloo":
        return "ring"
    return asked if asked in ("ring", "tree") else None


def all_reduce_seconds(run, nbytes, processes, nodes, bytes_per_s, latency_s=0.0):
    """By the run's algorithm; by the better one where that is not known."""
    ring = ring_seconds(nbytes, processes, nodes, bytes_per_s, latency_s)
    tree = tree_seconds(nbytes, nodes, bytes_per_s, latency_s)
    return {"ring": ring, "tree": tree}.get(algorithm(run), min(ring, tree))


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` 10^9 bits/s carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def implied_gbps(nbytes, processes, nodes, seconds):
    """Rate in Gb/s of a wire on which a ring all-reduce would take `seconds`."""
    return ring_bytes(nbytes, processes, nodes) * 8 / seconds / 1e9


def estimate_step(floor_s, step_s, modelled_s, probed_s):
    """Seconds of a step after its all-reduce has changed from `probed_s` to `modelled_s`.

    What the backward pass hides of an all-reduce is a time where a window of it overlaps, and a
    share where its parts queue behind the computing; real steps lie between: the mean of both.
    """
    same_time_hidden = max(floor_s, step_s + modelled_s - probed_s)
    share_hidden = 1.0 - min(1.0, max(0.0, step_s - floor_s) / probed_s)
    hidden_s = min(share_hidden * modelled_s, BACKWARD_SHARE * floor_s)
    return (same_time_hidden + floor_s + modelled_s - hidden_s) / 2


def set_floor(run, runs):
    """The seconds of data wait and compute in a step, and the name of the run they come from.

    Where the log has no split, the fastest run of the same shape stands in with its whole step.
    """
    if run.has_split:
        run.floor_s, run.floor_from = run.data_s + run.compute_s, run.name
        return
    alike = [r for r in runs if r.complete and r.step_s and r.shape == run.shape]
    if best := min(alike, key=lambda r: r.step_s, default=None):
        run.floor_s, run.floor_from = best.step_s, best.name


# --- like with like ----------------------------------------------------------------------------

LOSS_TOLERANCE = 0.03  # rounding differs between runs; data order and seed do not have to
# Settings of the Run record that must be the same for times to be comparable,
MUST_MATCH = {
    "precision": "precision",
    "image_size": "image size",
    "picture_sizes": "size of the pictures in the files",
    "grad_compression": "compression",
}
# and those that may explain a difference but do not forbid the comparison.
OTHER_SETTINGS = ["backend", "seed", "weights", "lr", "compile", "workers", "threads"]
OTHER_SETTINGS += ["bucket_cap_mb", "val_images", "versions", "devices"]


def is_weak_pair(a, b):
    """More processes with the same batch each: the global batch and the steps differ by design."""
    if None in (a.processes, b.processes, a.global_batch, b.global_batch):
        return False
    same = a.global_batch * b.processes == b.global_batch * a.processes
    return a.processes != b.processes and same


def differences(base, run):
    """What keeps `run` from being compared with `base`, one text each."""
    facts = [one.record("Run") for one in (base, run)]
    keys = list(MUST_MATCH)
    if all(fact.get("grad_compression") == "powersgd" for fact in facts):
        keys.append("powersgd_rank")
    pairs = [(MUST_MATCH.get(key, key), *(fact.get(key) for fact in facts)) for key in keys]
    own = {"images": "image count", "epochs": "epoch count", "parameters": "model (parameters)"}
    if not is_weak_pair(base, run):
        own |= {"global_batch": "global batch", "steps": "number of steps"}
    pairs += [(text, getattr(base, name), getattr(run, name)) for name, text in own.items()]
    return [
        f"{text} differs: {a} in {base.name}, {b} in {run.name}"
        for text, a, b in pairs
        if None not in (a, b) and a != b
    ]


def other_settings(base, run):
    one, two = base.record("Run"), run.record("Run")
    keys = [key for key in OTHER_SETTINGS if key in one and key in two and one[key] != two[key]]
    return keys if base.processes == run.processes else [k for k in keys if k != "devices"]


def set_losses(runs):
    """Mean loss of each epoch, over the ranks whose lines all logs have: they saw the same images.

    A log may have the mean over all ranks in its Summary instead.
    """
    written = [set(run.log.epochs) for run in runs if run.log.epochs]
    shared = set.intersection(*written) if written else set()
    if len({run.processes for run in runs}) > 1:  # then they did not
        shared = set()
    for run in runs:
        for epoch in sorted({epoch for _, epoch in run.log.epochs}):
            lines = {key: loss for key, loss in run.log.epochs.items() if key[1] == epoch}
            same = [loss for key, loss in lines.items() if key in shared] or lines.values()
            run.losses[epoch] = sum(same) / len(same)
        if not run.losses:
            listed = enumerate(get(run.record("Summary"), "loss_by_epoch", list), 1)
            run.losses = {epoch: loss for epoch, loss in listed if isinstance(loss, float)}


def loss_noise(run):
    """Standard error of an epoch's mean loss, from the scatter between neighbouring step lines.

    Differences of neighbours hold twice the scatter's variance and none of the trend.
    """
    squares = []
    for rank in run.log.ranks:
        series = [s.loss for key, s in sorted(run.log.steps.items()) if key[0] == rank]
        squares += [(b - a) ** 2 / 2 for a, b in itertools.pairwise(series)]
    squares = [s for s in squares if math.isfinite(s)]
    if not squares:
        return 0.0
    samples = (run.steps or len(squares)) / (run.epochs or 1) * len(run.log.ranks)
    return math.sqrt(statistics.fmean(squares) / max(samples, 1))


def losses_apart(base, run):
    """The first epoch whose losses part by more than noise, as text, or None."""
    for epoch in sorted(base.losses.keys() & run.losses.keys()):
        a, b = base.losses[epoch], run.losses[epoch]
        noise = 3 * math.hypot(loss_noise(base), loss_noise(run))
        # Written so that a loss of nan or inf on one side parts too.
        if not abs(a - b) <= max(LOSS_TOLERANCE * abs(a), noise) and repr(a) != repr(b):
            return (
                f"losses part by more than noise in epoch {epoch}: "
                f"{a:.4f} in {base.name}, {b:.4f} in {run.name}; the runs did not learn the same"
            )
    return None


# --- verdict -----------------------------------------------------------------------------------

RANGE_TOLERANCE = 0.10  # measured times this far outside the model's range still count as inside
LINK_FREE_SHARE = 0.10  # an all-reduce below this part of a step cannot be what bounds it


@dataclass
class Verdict:
    """Why a run took its time. `bound`: link, overlap, input, compute, not the link, unknown."""

    bound: str = "unknown"
    says: list = field(default_factory=list)
    checks: list = field(default_factory=list)  # most likely first
    range_s: tuple | None = None  # whole run, full to no overlap
    inside: bool | None = None
    implied_gbps: float | None = None


def judge(run):
    """What carried it, what bounds it, and where it lies in what the model allows."""
    if not run.complete:
        start = "" if run.log.failed else "incomplete, not scored: "
        return Verdict(says=[f"{start}{'; '.join(run.problems)}."], checks=nccl_advice(run))
    verdict = Verdict(says=say_carried(run) + say_trouble(run))
    if run.step_s is None:
        verdict.says.append("No step time: give --steps (or images, epochs, batch).")
        return verdict
    size = (run.wire_bytes, run.processes, run.nodes)
    if all(size) and run.nodes > 1 and run.steps:
        excess_s = run.exposed_s if run.has_split else run.step_s - run.floor_s
        carrying_s = run.probe_s or (excess_s if excess_s > 0.02 * run.step_s else None)
        implied = implied_gbps(*size, carrying_s) if carrying_s else None
        verdict.implied_gbps = run.wire_gbps or implied
        if run.link_gbps:
            set_range(verdict, run, size)
    (judge_split if run.has_split else judge_whole)(verdict, run)
    if verdict.range_s:
        verdict.says.append(say_range(verdict, run))
    verdict.checks = next_checks(verdict, run)
    return verdict


def set_range(verdict, run, size):
    """From the better algorithm, all of it hidden, to the ring, which sends most, not hidden."""
    quick = all_reduce_seconds(run, *size, run.link_gbps * 1e9 / 8)
    slow = ring_seconds(*size, payload_rate(run.link_gbps), run.message_s)
    low, high = max(run.floor_s, quick), run.floor_s + slow
    steps = run.steps - run.start_step
    verdict.range_s = (low * steps, high * steps)
    above = run.step_s > high * (1 + RANGE_TOLERANCE)
    verdict.inside = not above and run.step_s >= low * (1 - RANGE_TOLERANCE)


def judge_split(verdict, run):
    """A log with data wait, compute and exposed communication: the largest share bounds."""
    parts = {"link": run.exposed_s, "input": run.data_s, "compute": run.compute_s}
    verdict.bound = max(parts, key=parts.get)
    # Exposed time far above the all-reduce's own is not the wire's: with CPU training the two
    # share the cores, and a slow rank makes the others wait in the all-reduce.
    if verdict.bound == "link" and run.probe_s and run.probe_s < run.exposed_s / 2:
        verdict.bound = "overlap"
    title = {
        "link": "its link" if run.nodes != 1 else "communication inside its node",
        "input": "its input (waiting for images)",
        "compute": "compute",
        "overlap": "communication, but not by the wire",
    }[verdict.bound]
    compute, data, exposed = (
        f"{ms(seconds)} ({part(seconds, run.step_s)})"
        for seconds in (run.compute_s, run.data_s, run.exposed_s)
    )
    verdict.says.append(
        f"Bound by {title}: of a step of {ms(run.step_s)}, compute is {compute}, data wait "
        f"{data}, exposed communication {exposed}, as measured."
    )


def judge_whole(verdict, run):
    """A log without a split: beside a faster run of its shape, or by the link's part alone."""
    excess_s, stated, tcp = run.step_s - run.floor_s, rate(run.link_gbps or 0), math.inf
    if verdict.range_s:
        size = (run.wire_bytes, run.processes, run.nodes)
        line = ring_seconds(*size, run.link_gbps * 1e9 / 8)
        tcp = ring_seconds(*size, payload_rate(run.link_gbps))
    if excess_s > run.step_s / 2 and run.nodes != 1:
        verdict.bound = "link"
        text = f"Bound by its link, or by what stood in for it: {part(excess_s, run.step_s)} of "
        text += f"its step of {ms(run.step_s)} comes on top of {run.floor_from}'s "
        text += f"{ms(run.floor_s)}."
        if verdict.implied_gbps:
            text += f" That implies a wire that ran at {rate(verdict.implied_gbps)} "
            text += f"({run.steps:,} steps, no overlap)."
        if verdict.range_s:
            text += f" At {stated} a ring all-reduce takes {ms(line)} at line rate and {ms(tcp)} "
            text += "at what TCP leaves (model)."
    elif tcp < LINK_FREE_SHARE * run.step_s:
        verdict.bound = "not the link"
        took, line, tcp = ((run.steps - run.start_step) * x for x in (run.step_s, line, tcp))
        text = f"Not bound by its link: even with no overlap, all-reduces at {stated} take "
        text += f"{line:,.0f} to {tcp:,.0f} s of {took:,.0f} s (model)."
    else:
        text = "The log does not split a step: what bounds it cannot be told."
    if not verdict.range_s and run.nodes != 1:
        text += " To judge the link: --link_gbps, --parameters, --processes, --nodes."
    verdict.says.append(text)


def say_range(verdict, run):
    """The range that the model allows, and where the measured time lies."""
    low, high = verdict.range_s
    took, stated = run.step_s * (run.steps - run.start_step), rate(run.link_gbps)
    by = algorithm(run) or "the quicker of ring and tree, to the ring"
    text = f"{stated} allows {span(low, high)} by the model ({by}; all hidden to none); "
    text += f"measured {in_unit(took, high)}"
    if verdict.inside:
        return f"{text}: inside."
    if took < low:
        return f"{text}: faster than {stated} can be; the traffic went another way."
    if run.wire_gbps and run.wire_gbps >= HEALTHY * run.link_gbps:
        why = "all-reduce and backward pass share cores, or ranks wait for each other"
        return f"{text}: above, though the probe found no fault in the link; {why}."
    result = "" if run.wire_gbps else f": this is not a {stated} result"
    return f"{text}, {took / high:.1f} times the slowest{result}."


# --- what to check next ------------------------------------------------------------------------

CHECKS = {
    "link": [
        "send less: --grad_compression bf16 (half the bytes) or powersgd (a small part)",
        "send less often: --accumulate_steps, or a larger --batch_size",
        "a faster link: see the projection",
    ],
    "overlap": [
        "a slow rank: compare compute times by rank in the Summary line",
        "cores shared by compute and network: fewer OMP_NUM_THREADS than cores",
        "send less: --grad_compression bf16 or powersgd",
    ],
    "input": [
        "more loader processes: --workers, up to the cores of a node / its processes",
        "storage: copy the images to a local disk, or run a second time with a warm cache",
        "smaller images on disk: decoding is most of the loader's work",
    ],
    "compute": [
        "lower precision: --precision bf16 or fp16 where the hardware has it; --compile",
        "a larger --batch_size, if the device is not full",
        "more processes: see the projection",
    ],
    "not the link": [
        "a run of this demo over the same link: its Summary splits the step",
        "the loader: --workers, disk, processor load (`top`, `iostat -x 5`)",
        "the device: `nvidia-smi dmon` shows whether it waits",
    ],
}
# A training step of ResNet-18 at 224 px in fp32 on an RTX 2080 Ti runs at 750 img/s or more; a GPU
# that gets a quarter of that is most likely waiting for images.
SLOW_GPU_IMG_PER_S = 190


def next_checks(verdict, run):
    """What to check or change next, most likely first."""
    implied, link, first = verdict.implied_gbps, run.link, []
    backend = get(run.record("Run"), "backend", str)
    checks = list(CHECKS.get(verdict.bound, []))
    if verdict.bound == "link" and implied and implied < HEALTHY * (run.link_gbps or 0):
        tcp = run.link_gbps * TCP_SHARE
        checks = slow_link_checks(link, implied, run.link_gbps, tcp, backend)
    elif verdict.bound == "link" and run.nodes == 1:
        checks[2] = "the way between the GPUs: NVLink rather than PCIe (`nvidia-smi topo -m`)"
    if verdict.bound in ("compute", "input") and (run.exposed_s or 0) > 0.2 * run.step_s:
        checks.append("the exposed communication: --grad_compression bf16, --accumulate_steps")
    if run.straggler is not None:
        first.append(f"rank {run.straggler}: it takes longer than the others")
    first += nccl_advice(run)
    if link and link.adapter and backend == "nccl":
        port = link.adapter.partition(":")[0]
        first.append(f"the adapter itself: NETWORK=infiniband IFNAME={port}")
    if link and link.names and say_trouble(run):
        tool = f"ethtool -S {link.names[0]}"
        if link.transport in ADAPTERS:
            tool = f"rdma statistic show link {link.names[0].replace(':', '/')}"
        first.append(f"what loses data: cable, transceiver, switch port (`{tool}`)")
    if verdict.bound == "not the link" and run.img_per_s and "GPU" in run.log.kinds:
        each = run.img_per_s / (run.processes or 1)
        if each < SLOW_GPU_IMG_PER_S:
            first.append(
                f"the input pipeline: {each:.0f} img/s per GPU is far below what ResNet-18 "
                "reaches on any recent one (an RTX 2080 Ti: 750 to 920 in fp32)"
            )
    return first + checks


def nccl_advice(run):
    """What tools/nccl_log.py advises for each problem that NCCL's text shows on any node."""
    problems = [p for link in run.links for p in objects(link.finding, "problems")]
    return list(dict.fromkeys(text for p in problems if (text := get(p, "advice", str))))


# --- scaling and projection --------------------------------------------------------------------

RATES_GBPS = (1, 10, 25, 56, 100, 200, 400)
PROCESSES = tuple(2**k for k in range(11))


def scaling(runs):
    """Speed-up and efficiency against the smallest run; empty where all have one size."""
    sized = [r for r in runs if r.complete and r.processes and r.img_per_s]
    if len({r.processes for r in sized}) < 2:
        return []
    base, rows = min(sized, key=lambda r: r.processes), []
    for run in sorted(sized, key=lambda r: r.processes):
        speedup, kind = run.img_per_s / base.img_per_s, "mixed"
        if run.processes == base.processes:
            kind = "base"
        elif is_weak_pair(base, run) or run.global_batch == base.global_batch:
            kind = "weak" if is_weak_pair(base, run) else "strong"
        row = {"run": run.name, "processes": run.processes, "kind": kind, "speedup": speedup}
        rows.append(row | {"efficiency": speedup * base.processes / run.processes})
    return rows


def projected(runs, name):
    """The run whose projection is printed: the named one, else what is known best."""
    able = [run for run in runs if run.can_project and name in (None, run.name)]
    if name is not None and not able:
        raise UserError(f"--project {name}: no such run, or it lacks figures")
    # Then what the link has disturbed least.
    return min(able, key=lambda r: (not r.probe_s, not r.has_split, r.step_s), default=None)


def project(run):
    """Expected step and epoch at RATES_GBPS x PROCESSES (and this run's own number), weak scaling.

    Returns dicts: gbps, processes, nodes, ring_s, tree_s, step_s (low, high), best_s or None,
    epoch_s (low, high) or None where image count or batch is not known.
    """
    per_node, cells = max(1, run.processes // run.nodes), []
    for n, gbps in itertools.product(sorted({*PROCESSES, run.processes}), RATES_GBPS):
        nodes = run.nodes if n == run.processes else math.ceil(n / per_node)
        link = payload_rate(gbps), run.message_s
        ring = ring_seconds(run.wire_bytes, n, nodes, *link)
        tree = tree_seconds(run.wire_bytes, nodes, *link)
        step = max(run.floor_s, min(ring, tree)), run.floor_s + min(ring, tree)
        best = epoch = None
        if run.probe_s and n == run.processes:  # another size has another all-reduce
            own = all_reduce_seconds(run, run.wire_bytes, n, nodes, *link)
            best = estimate_step(run.floor_s, run.step_s, own, run.probe_s)
        if run.images and run.global_batch:  # the same batch per process
            steps = math.ceil(run.images / (run.global_batch / run.processes * n))
            epoch = tuple(seconds * steps for seconds in step)
        cell = {"gbps": gbps, "processes": n, "nodes": nodes, "ring_s": ring, "tree_s": tree}
        cells.append(cell | {"step_s": step, "best_s": best, "epoch_s": epoch})
    return cells


def predict(run, other):
    """Best estimate of this run's step in s over the other's link; both need a probe."""
    if other.small_s and other.bandwidth:
        modelled = other.small_s + run.wire_bytes / other.bandwidth
    else:
        size = (run.wire_bytes, run.processes, run.nodes)
        # the packets, and so their headers' share of what an interface counts, are the probe's
        share = min(1.0, implied_gbps(*size, run.probe_s) / run.wire_gbps)
        modelled = ring_seconds(*size, share * other.wire_gbps * 1e9 / 8, run.message_s)
    return estimate_step(run.floor_s, run.step_s, modelled, run.probe_s)


def cross_checks(runs):
    """Each probed run's step predicted from each other one's log, at its measured rate."""
    probed = [r for r in runs if r.can_project and r.probe_s and r.wire_gbps and r.nodes > 1]
    rows = []
    for a, b in itertools.permutations(probed, 2):
        if a.shape == b.shape and abs(a.wire_bytes - b.wire_bytes) < 0.01 * a.wire_bytes:
            step = predict(a, b)
            row = {"from": a.name, "to": b.name, "gbps": b.wire_gbps, "predicted_s": step}
            rows.append(row | {"measured_s": b.step_s, "error": step / b.step_s - 1})
    return rows


# --- text --------------------------------------------------------------------------------------


def ms(seconds):
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"


def part(value, total):
    return f"{value / total:.0%}" if total else "-"


def megabytes(nbytes):
    return f"{nbytes / 1e6:.3g} MB"


def duration(seconds):
    """Seconds as the demo's log writes them: 4h 8m 59.79s."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{int(hours)}h " if hours else ""
    return text + (f"{int(minutes)}m " if hours or minutes else "") + f"{rest:.2f}s"


def in_unit(seconds, like):
    divisor, unit = (60, "min") if like >= 120 else (1, "s") if like >= 2 else (1e-3, "ms")
    value = seconds / divisor
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def span(low, high):
    """A range in one unit: 19 to 37 min; one figure where both ends read the same."""
    low_text, high_text = in_unit(low, high), in_unit(high, high)
    return high_text if low_text == high_text else f"{low_text.split(' ')[0]} to {high_text}"


def table(head, rows):
    """Lines of a Markdown table whose columns also line up in a terminal."""
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in [head, *rows]:
        cells = [c.rjust(width) for c, width in zip(others, widths[1:], strict=True)]
        lines.append("| " + " | ".join([first.ljust(widths[0]), *cells]) + " |")
    rule = ["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def time_ratio(base, run):
    """How many times as long as the base the run took, or None where that cannot be said."""
    if None in (base.wall_s, run.wall_s) or base.attempted_again or run.attempted_again:
        return None
    return run.wall_s / base.wall_s


def column(run, base, verdict):
    """A run's cells of the main table by their title; None, 0 or "" where the log does not say."""
    ratio, gbps = time_ratio(base, run), run.wire_gbps or verdict.implied_gbps
    against = f"{1 / ratio:.2f} x faster" if ratio and ratio < 1 else f"{ratio or 0:.2f} x as long"
    of = f", {gbps / run.link_gbps:.0%} of stated" if gbps and run.link_gbps else ""
    img_per_s = run.img_per_s or 0
    cells = {
        "status": run.status,
        "processes on nodes": run.processes and f"{run.processes} on {run.nodes or '?'}",
        "wall time": run.wall_s and duration(run.wall_s) + "*" * run.attempted_again,
        f"against {base.name}": ratio and ("base" if run is base else against),
        "steps": run.steps and f"{run.steps:,}",
        "img/s, job": img_per_s and f"{img_per_s:,.1f}",
        "img/s, process": img_per_s and run.processes and f"{img_per_s / run.processes:,.1f}",
        "step": run.step_s and ms(run.step_s),
    }
    for title in ("data wait", "compute", "exposed communication"):
        seconds = getattr(run, f"{title.split()[0]}_s")
        shown = seconds is not None and f"{ms(seconds)} ({part(seconds, run.step_s)})"
        cells[f"- {title}"] = shown
    return cells | {
        "all-reduce alone": run.probe_s and ms(run.probe_s),
        "- of up to 4 KB": run.small_s and f"{run.small_s * 1000:.3g} ms",
        "- of ever more bytes": run.bandwidth and f"{run.bandwidth / 1e9:.3g} GB/s",
        "bytes per step and rank": run.wire_bytes and megabytes(run.wire_bytes),
        "link, stated": run.link_gbps and rate(run.link_gbps),
        "wire rate": gbps and rate(gbps) + of + ("" if run.wire_gbps else " (implied)"),
        "transport": run.link and f"{run.link.transport} ({run.link.basis})",
        "interface": run.interface,
        **{f"loss, epoch {epoch}": f"{loss:.4f}" for epoch, loss in run.losses.items()},
        "top-1 at the end": run.top1 is not None and f"{run.top1:.2f} %",
    }


def main_table(runs, base, verdicts):
    """The table of all runs; a row that no run can fill is left out, and so are most epochs."""
    columns = [column(run, base, verdicts[run.name]) for run in runs]
    epochs = sorted({epoch for run in runs for epoch in run.losses})
    hidden = {f"loss, epoch {epoch}" for epoch in epochs[1:-3] if len(epochs) > 6}
    titles = dict.fromkeys(title for cells in columns for title in cells if title not in hidden)
    rows = [[title, *(cells.get(title) or "-" for cells in columns)] for title in titles]
    return table(["", *(run.name for run in runs)], [r for r in rows if set(r[1:]) != {"-"}])


def ratio_sentence(base, run):
    value = time_ratio(base, run)
    if value is None:
        return None
    slow, quick, times = (run, base, value) if value >= 1 else (base, run, 1 / value)
    return (
        f"{slow.name} took {times:.2f} times as long as {quick.name}: "
        f"{duration(slow.wall_s)} against {duration(quick.wall_s)}."
    )


def report(result):
    """The whole report as text."""
    runs, base, verdicts = result["runs"], result["base"], result["verdicts"]
    lines = [f"FORCED, not like with like: {text}" for text in result["differences"]]
    lines += [*main_table(runs, base, verdicts), ""]
    if any(run.attempted_again for run in runs):
        lines += ["* a part of the run only (restarted or resumed): compare the step times", ""]
    ratios = [ratio_sentence(base, run) for run in runs if run is not base]
    lines += [text for text in ratios if text]
    lines += [*result["losses"], "", "Verdict", ""]
    lines += [text for run in runs if run.log.failed for text in verdict_lines(run, verdicts)]
    lines += [line for text in result["same_wire"] for line in (text, "")]
    lines += [text for run in runs if not run.log.failed for text in verdict_lines(run, verdicts)]
    if rows := result["scaling"]:
        numbers = [[f"{r['speedup']:.2f}", f"{r['efficiency']:.0%}"] for r in rows]
        texts = [[r["run"], str(r["processes"]), r["kind"]] for r in rows]
        cells = [a + b for a, b in zip(texts, numbers, strict=True)]
        lines += [*table(["Scaling", "processes", "kind", "speed-up", "efficiency"], cells), ""]
    if result["cross_checks"]:
        lines.append("The model against these logs (a step predicted from another run's log):")
    for r in result["cross_checks"]:
        to = f"{r['from']} -> {r['to']} at {rate(r['gbps'])}: predicted {ms(r['predicted_s'])}"
        lines.append(f"  {to}, measured {ms(r['measured_s'])} ({r['error']:+.0%})")
    if chosen := result["projected"]:
        lines += [""] * bool(result["cross_checks"])
        lines += [*projection_lines(chosen, result["projections"][chosen.name])]
    return "\n".join(lines).rstrip()


def verdict_lines(run, verdicts):
    lines = [f"{run.name}: " + " ".join(verdicts[run.name].says)]
    if verdicts[run.name].checks:
        lines.append("  Check or change next, most likely first:")
        lines += [f"  {i}. {text}" for i, text in enumerate(verdicts[run.name].checks, 1)]
    return [*lines, *(f"  Note: {note}" for note in run.notes), ""]


def projection_lines(run, cells):
    of = "data wait and compute" if run.has_split else f"{run.floor_from}'s whole step"
    latency = f"{run.message_s * 1e6:.3g} us a message, {'probed' if run.small_s else 'assumed'}"
    text = f"Projection from {run.name}, by the model (not measured): from full to no overlap of "
    text += f"{megabytes(run.wire_bytes)} a step with {ms(run.floor_s)} ({of}); {latency}"
    rows = [
        [
            *(rate(c["gbps"]), ms(c["ring_s"]), ms(c["tree_s"]), span(*c["step_s"])),
            ms(c["best_s"]) if c["best_s"] else "-",
            span(*c["epoch_s"]) if c["epoch_s"] else "-",
        ]
        for c in cells
        if c["processes"] == run.processes
    ]
    head = [f"{run.processes} on {run.nodes}", "ring", "tree", "step", "best estimate", "epoch"]
    lines = [text, "", *table(head, rows), ""]
    for key, title in (("step_s", "step"), ("epoch_s", "epoch, same batch per process")):
        grid = {}
        for cell in cells:
            if cell[key]:
                grid.setdefault(cell["processes"], []).append(span(*cell[key]))
        if grid:
            lines += [f"By processes, {title}, the quicker of ring and tree:", ""]
            rows = [[f"{processes:,}", *spans] for processes, spans in grid.items()]
            lines += [*table(["processes", *map(rate, RATES_GBPS)], rows), ""]
    return lines


def as_json(result):
    """The report's figures as plain objects: seconds, bytes, Gb/s, images/s."""
    runs, more = [], ("complete", "status", "wire_gbps", "interface")
    for run in result["runs"]:
        figures = {key: value for key, value in vars(run).items() if key != "log"}
        figures |= {name: getattr(run, name) for name in more} | {"attempts": run.log.attempts}
        figures["wall_ratio"] = time_ratio(result["base"], run)
        runs.append(figures | {"verdict": result["verdicts"][run.name]})
    keys = ("differences", "losses", "same_wire", "scaling", "cross_checks", "projections")
    every = {"base": result["base"].name, "runs": runs} | {key: result[key] for key in keys}
    # JSON has no word for nan and infinity: null.
    return json.loads(json.dumps(every, default=vars), parse_constant=lambda name: None)


def write_json(result, file):
    Path(file).write_text(json.dumps(as_json(result), indent=1) + "\n")


# --- command line ------------------------------------------------------------------------------


def parse_arguments(argv):
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="compare_logs.py",
        description=first,
        epilog=rest.partition("A verdict says")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="NAME=PATH", help="log or folder of a run")
    add("--plot", metavar="FILE", help="write a picture (PNG, or by the suffix)")
    add("--json", metavar="FILE", help="write all figures as JSON")
    add("--force", action="store_true", help="compare unlike runs, and mark it")
    best = "run to project from (default: a probed or split one, else the fastest)"
    add("--project", metavar="NAME", help=best)
    latency = "latency of a message in microseconds, where no probe has it (%(default)s)"
    add("--latency_us", "--latency-us", type=float, default=LATENCY_US, help=latency)
    for option, (_, _, text) in LACKING.items():
        names = dict.fromkeys([f"--{option}", f"--{option.replace('_', '-')}"])
        add(*names, default=[], action="append", metavar="[NAME=]N", help=text)
    args = parser.parse_intermixed_args(argv)
    if not 0 <= args.latency_us < 1e6:
        raise UserError(f"--latency_us {args.latency_us}: give microseconds from 0 to 1e6")
    return args


def named_paths(items):
    """NAME=PATH texts -> {name: [path, ...]} in the order given."""
    paths = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise UserError(f"{item}: write NAME=PATH, for example ethernet=logs/eth")
        paths.setdefault(name, []).append(path)
    if len(paths) < 2:
        raise UserError("two runs or more are needed: NAME=PATH NAME=PATH")
    return paths


def given_figures(args, names):
    """{run: {option: number}} from the options for what a log lacks."""
    given = {name: {} for name in names}
    for option, (_, kind, _) in LACKING.items():
        for item in sorted(getattr(args, option), key=lambda text: "=" in text):  # own after all
            name, equals, text = item.rpartition("=")
            if equals and name not in given:
                raise UserError(f"--{option} {item}: no run is named {name}: {', '.join(given)}")
            try:
                value = kind(text.replace(",", "").replace("_", ""))
            except ValueError:
                value = 0
            if not 0 < value < 1e15:
                raise UserError(f"--{option} {item}: not a number above 0")
            for target in [name] if equals else given:
                given[target][option] = value
    return given


if __name__ == "__main__":
    sys.exit(main())
