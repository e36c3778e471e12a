#!/usr/bin/env python3
"""Compare runs of the demo over different networks, from their logs alone.

    python tools/compare_logs.py ethernet=logs/eth infiniband=logs/ib --plot compare.png
    python tools/compare_logs.py slow=a.log fast=b.log --link_gbps slow=1 --link_gbps fast=56

A run is NAME=PATH: a log file, or a run's folder with node0.log, node1.log, ...; a name that is
given again adds a file to its run, such as the probe's (`slow=probe.log slow=train.log`). The
first run is the base of every ratio. The logs are those of demo_coco_resnet18.py, or of the
original demo of the talk, which have no Run and no Summary line: what they lack is given as an
option, for all runs (`--steps 1850`) or for one (`--steps slow=1850`). A log's own figure wins,
but `--link_gbps` replaces the stated speed.

Exit code: 0 compared; 1 compared, but a run is incomplete; 2 bad usage, or not like with like.

Model (B = bytes each rank hands to the all-reduce, n = processes on N nodes, r = bytes/s of a
node's link in one direction, a = latency of one message):
  ring   a node sends 2(n-1)/n B in each direction, as the ring enters and leaves it once:
         T = 2(n-1) a + 2(n-1)/n B/r     (n = 4 on N = 2: 1.5 B; n = 2 on N = 2: 1 B)
  tree   two pipelined binary trees over the nodes; a node is an inner node of one and a leaf of
         the other and sends 2 B, or B where there are only two nodes:
         T = 2 ceil(log2 N) a + 2 B/r
  step   from full overlap, max(floor, T), to none, floor + T; floor = data wait + compute
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

# TCP's payload out of the bytes that an Ethernet line is busy for, at MTU 1500: the packet less
# the headers of IPv4 (20), TCP (20) and its time stamp option (12, RFC 7323), over the packet plus
# Ethernet header 14, checksum 4, preamble 8 and gap 12 (IEEE 802.3): 1448/1538, 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)
# NCCL's own estimate for one hop over a network with its Simple protocol, rings and trees alike
# (hwLat in NCCL's src/graph/tuning.cc). Plain TCP sockets need a few times as much.
LATENCY_US = 14.0
# A training step of ResNet-18 at 224 px in fp32 on an RTX 2080 Ti runs at 750 img/s or more; a GPU
# that gets a quarter of that is most likely waiting for images.
SLOW_GPU_IMG_PER_S = 190
# A backward pass, which all-reduces hide behind, computes two products for the forward pass's one.
BACKWARD_SHARE = 2 / 3
RATES_GBPS = (1, 10, 25, 56, 100, 200, 400)
PROCESSES = tuple(2**k for k in range(11))
RANGE_TOLERANCE = 0.10  # measured times this far outside the model's range still count as inside
LINK_FREE_SHARE = 0.10  # an all-reduce below this part of a step cannot be what bounds it
HEALTHY_SHARE = 0.5  # a link below this part of its stated speed is not the link that was meant
STRAGGLER = 1.2  # a rank this many times as busy as the usual one keeps the others waiting
LOSS_TOLERANCE = 0.03  # rounding differs between runs; data order and seed do not have to


class UserError(Exception):
    """Something the user can put right; shown as one line, exit code 2."""


# --- model -------------------------------------------------------------------------------------


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


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` 10^9 bits/s carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def step_range(floor_s, fast_s, slow_s):
    """(full overlap, no overlap) seconds of a step whose all-reduce takes `fast_s` to `slow_s`."""
    return max(floor_s, fast_s), floor_s + slow_s


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


# --- reading logs ------------------------------------------------------------------------------

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?)")
PREFIX = re.compile(r"\[(GPU|CPU|MPS) (\d{1,6})\] ")
# Fixed numbers of decimals tell a whole number from one that was cut off.
LOSS = r"(-?inf|nan|-?\d{1,12}\.\d{4}(?!\d))"
STEP = re.compile(
    r"Epoch (\d{1,9}) \| Step (\d{1,9}) \| Loss: " + LOSS + r"(?: \| (\d{1,12}\.\d) img/s)?"
    r"(?: \| data (\d{1,12}\.\d) ms \| step (\d{1,12}\.\d) ms)?"
)
EPOCH = re.compile(r"Epoch (\d{1,9}) complete \| Avg loss: " + LOSS + r"( \| \d[\d.]* img/s)?")
END = re.compile(r"Cleanup complete\. Total wall time: [\dhms. ]*\((\d{1,12}\.\d{3})s\)")
STOP = re.compile(r"(Stopped\b.*|ERROR: .*)")
RECORD = re.compile(r"(Run|Probe|Summary) \{")
SENTENCE = re.compile(r"(Run|Probe|Summary|Data): ")  # what the records say, for people


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
    attempts: int = 0
    steps: dict = field(default_factory=dict)  # (rank, epoch, step) -> Step
    last_step: dict = field(default_factory=dict)  # rank -> step of its last step line
    epochs: dict = field(default_factory=dict)  # (rank, epoch) -> mean loss
    ended: dict = field(default_factory=dict)  # rank -> wall time in s, no step line after it
    ranks: set = field(default_factory=set)
    kinds: set = field(default_factory=set)  # GPU, CPU, MPS
    ours: bool = False  # False: the original demo's format
    torn: int = 0
    stop: str | None = None  # the last reason a rank gave for stopping
    files: list = field(default_factory=list)


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
    log = Log()
    for path in [file for given in paths for file in log_files(Path(given))]:
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        one = parse_text(text)
        if not one.ours and one.ranks & log.ranks:
            # The original demo counts GPUs on each node from 0; ours prints the global rank.
            one = shift_ranks(one, max(log.ranks) + 1)
        merge(log, one)
        log.files.append(path.name)
    return log


def parse_text(text):
    """Parse one file's text into a Log.

    A record is looked for after each `[KIND rank] ` wherever it stands in a line, so that other
    programs' lines, prefixes and two lines torn into each other do no harm; a record that is not
    whole is left out and counted.
    """
    log = Log()
    for line in re.split(r"[\r\n]+", ESCAPES.sub("", text)):
        for mark in PREFIX.finditer(line):
            log.kinds.add(mark[1])
            log.ranks.add(int(mark[2]))
            parse_body(log, int(mark[2]), line[mark.end() :])
    return log


def parse_body(log, rank, body):
    """Enter into `log` what stands at the start of `body`, the text after one prefix."""
    if RECORD.match(body):
        add_record(log, body)
    elif SENTENCE.match(body):
        log.ours = True
    elif found := STEP.match(body):
        epoch, step = int(found[1]), int(found[2])
        numbers = [None if n is None else float(n) for n in found.group(3, 4, 5, 6)]
        log.steps[rank, epoch, step] = Step(*numbers)
        log.last_step[rank] = step
        log.ended.pop(rank, None)
        log.ours |= found[4] is not None
    elif found := EPOCH.match(body):
        log.epochs[rank, int(found[1])] = float(found[2])
        log.ours |= found[3] is not None
    elif found := END.match(body):
        log.ended[rank] = float(found[1])
    elif found := STOP.match(body):
        log.stop = found[1].strip()[:200]
    elif body.startswith(("Epoch ", "Cleanup ")) and " validation " not in body:
        log.torn += 1


def add_record(log, text):
    """Enter a Run, Probe or Summary line; a new Run opens a new attempt.

    The Probe stays: it comes before the first attempt and is not repeated for the others. (In logs
    of before it comes after each Run.)
    """
    word, brace, _ = text.partition("{")
    word = word.strip()
    log.ours = True
    if word == "Run":  # even a torn one: what came before it is not this attempt's end
        log.attempts += 1
        log.records.pop("Summary", None)
        log.ended.clear()
        log.stop = None
    log.records.pop(word, None)
    try:
        record, _ = json.JSONDecoder().raw_decode(text, text.index(brace))
    except (ValueError, RecursionError):
        log.torn += 1
    else:
        log.records[word] = record


def shift_ranks(log, by):
    """The same log with `by` added to every rank."""
    log.steps = {(r + by, e, s): v for (r, e, s), v in log.steps.items()}
    log.epochs = {(r + by, e): v for (r, e), v in log.epochs.items()}
    log.last_step = {r + by: v for r, v in log.last_step.items()}
    log.ended = {r + by: v for r, v in log.ended.items()}
    log.ranks = {r + by for r in log.ranks}
    return log


def merge(log, other):
    """Add another file's lines to `log`; rank 0's file brings the records."""
    for name in ("records", "steps", "last_step", "epochs", "ended"):
        getattr(log, name).update(getattr(other, name))
    log.attempts = max(log.attempts, other.attempts)
    log.ranks |= other.ranks
    log.kinds |= other.kinds
    log.ours |= other.ours
    log.torn += other.torn
    log.stop = log.stop or other.stop


# --- figures of a run --------------------------------------------------------------------------


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
    wire_bytes: float | None = None  # per step and rank, after compression
    link_gbps: float | None = None  # stated
    wall_s: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    img_per_s: float | None = None  # whole job
    probe_s: float | None = None  # all-reduce alone, scaled to wire_bytes
    wire_gbps: float | None = None  # by the interface's byte counters, headers included
    interface: str | None = None
    first_interface: str | None = None  # of the node of rank 0
    straggler: int | None = None
    losses: dict = field(default_factory=dict)  # epoch -> mean over ranks
    top1: float | None = None

    @property
    def complete(self):
        return not self.problems

    @property
    def attempted_again(self):
        """True where the wall time covers only the last of several attempts."""
        return self.start_step > 0 or self.log.attempts > 1

    @property
    def has_split(self):
        return None not in (self.data_s, self.compute_s, self.exposed_s)


def number(mapping, key):
    """mapping[key] where it is a finite number >= 0, else None (a damaged log may hold any)."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
    return value if good else None


def whole(mapping, key):
    value = number(mapping, key)
    return None if value is None or value != int(value) else int(value)


def entries(mapping, key):
    """mapping[key] where it is a list, else an empty one."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, list) else []


def section(log, name):
    """The Run, Probe or Summary object of a log; empty where there is none."""
    value = log.records.get(name)
    return value if isinstance(value, dict) else {}


def make_run(name, log, given):
    """Take a run's figures from its log, and from `given` (option -> number) what it lacks."""
    facts, summary = section(log, "Run"), section(log, "Summary")
    own = {
        "processes": whole(facts, "world_size"),
        "nodes": whole(facts, "nodes"),
        "images": whole(facts, "images"),
        "epochs": whole(facts, "num_epochs"),
        "steps": whole(facts, "steps"),
        "global_batch": global_batch(facts),
        "parameters": whole(facts, "parameters"),
    }
    run = Run(name, log, start_step=whole(facts, "start_step") or 0)
    for key, value in own.items():
        setattr(run, key, value or given.get(key))
        if value and given.get(key) not in (None, value):
            run.notes.append(f"--{key} is not used: the log itself says {value:,}")
    if run.steps is None and None not in (run.images, run.global_batch, run.epochs):
        run.steps = math.ceil(run.images / run.global_batch) * run.epochs
    run.problems = find_problems(run)
    add_times(run, summary)
    add_link(run, facts, given.get("link_gbps"))
    add_losses(run, summary)
    add_notes(run)
    return run


def global_batch(facts):
    """Images in a step over all processes, by the Run record; logs of before have it in `batch`.

    Raises nothing: None where it does not say.
    """
    said = whole(facts.get("batch"), "global") or whole(facts, "global_batch_size")
    factors = [whole(facts, k) for k in ("batch_size", "accumulate_steps", "world_size")]
    return said or (None if None in factors else math.prod(factors))


def find_straggler(summary):
    """The rank whose data wait and compute take over STRAGGLER times the usual, or None.

    The usual is the lower median of all ranks, so that of two the quicker one counts as usual.
    """
    if "straggler" in summary:  # logs of before say it themselves
        return whole(summary, "straggler")
    busy = {}
    for entry in entries(summary, "ranks"):
        rank, *parts = whole(entry, "rank"), number(entry, "data_ms"), number(entry, "compute_ms")
        if None not in (rank, *parts):
            busy[rank] = sum(parts)
    slowest = max(busy, key=busy.get, default=None)
    usual = statistics.median_low(busy.values()) if busy else 0
    return slowest if busy and busy[slowest] > STRAGGLER * usual else None


def find_problems(run):
    """Every reason why this log is not that of a whole run."""
    log, problems = run.log, []
    if not log.ranks:
        return ["no line of the demo in it"]
    if log.ours and not section(log, "Run"):
        problems.append("no Run line: the beginning of the log is missing or damaged")
    if log.ours and not section(log, "Summary"):
        reason = f"; it says: {log.stop}" if log.stop else ""
        problems.append(f"no Summary line: the run did not end, or the end is missing{reason}")
    expected = expected_ranks(run)
    missing = sorted(expected - log.ranks)
    if missing:
        problems.append(f"no line from {name_ranks(missing, run)}")
    if extra := sorted(log.ranks - expected):
        problems.append(f"lines from {name_ranks(extra, run)}, which the run should not have")
    present = sorted(log.ranks & expected)
    if endless := [r for r in present if r not in log.ended]:
        problems.append(f"no end line from {name_ranks(endless, run)}{progress(run, endless)}")
    if short := [r for r in present if r in log.ended and not reached_end(run, r)]:
        problems.append(f"the end came early for {name_ranks(short, run)}{progress(run, short)}")
    return problems


def expected_ranks(run):
    """Ranks that must have written: all of ours; of the original, the GPUs of the files given."""
    log = run.log
    if log.ours:
        ranks = entries(section(log, "Summary"), "ranks")
        hosts = entries(section(log, "Run"), "hosts")
        # The largest of the three: damage that makes one smaller must not hide a rank.
        return set(range(min(max(run.processes or 0, len(ranks), len(hosts)), 100_000)))
    if run.processes and run.nodes:
        count = min(run.processes, math.ceil(run.processes / run.nodes) * len(log.files or [1]))
        first = min(log.ranks)  # a later node's log may begin with a global rank
        return set(range(first, first + min(count, 100_000)))
    return set(range(min(log.ranks), max(log.ranks) + 1))


def reached_end(run, rank):
    """True where the rank wrote its last planned step, or the end of its last epoch."""
    last = run.log.last_step.get(rank)
    if not run.log.ours:  # its counter may start again with each epoch: go by the other ranks
        return last is not None and last > 0.9 * max(run.log.last_step.values())
    if (last or run.start_step) == run.steps:
        return True
    # That line may be torn; the epoch's end will do, if it is of this attempt.
    return (rank, run.epochs) in run.log.epochs and (last or 0) > run.start_step


def name_ranks(ranks, run):
    hosts = entries(section(run.log, "Run"), "hosts")
    shown = [f"{r} ({hosts[r]})" if r < len(hosts) else str(r) for r in ranks[:8]]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown) + more


def progress(run, ranks):
    steps = [run.log.last_step.get(rank, 0) for rank in ranks]
    of = f" of {run.steps:,}" if run.steps and run.log.ours else ""
    return f" (last step {min(steps):,}{of})"


def add_times(run, summary):
    """Wall time and the split of a step; none for a run that is not complete."""
    if not run.complete:
        return
    run.wall_s = max(run.log.ended.values(), default=None) or number(summary, "wall_s")
    done = (run.steps or 0) - run.start_step
    for key in ("step", "data", "compute", "exposed"):
        value = number(summary, f"{key}_ms")
        setattr(run, f"{key}_s", None if value is None else value / 1000)
    if run.processes == 1 and None not in (run.step_s, run.data_s):  # nothing to communicate
        run.compute_s, run.exposed_s = run.step_s - run.data_s, 0.0
    if run.step_s is None and run.wall_s and done > 0:
        run.step_s = run.wall_s / done
    run.img_per_s = number(summary, "img_per_s")
    if run.img_per_s is None and run.wall_s and not run.log.ours and run.images and run.epochs:
        run.img_per_s = run.images * run.epochs / run.wall_s
    run.straggler = find_straggler(summary)


def add_link(run, facts, stated_gbps):
    """Bytes on the wire, and what the probe saw of the link."""
    probe, summary = probe_of(run), section(run.log, "Summary")
    run.wire_bytes = number(summary, "wire_bytes_per_step") or number(facts, "gradient_bytes")
    if not run.wire_bytes and run.parameters:
        run.wire_bytes = 4 * run.parameters  # fp32 gradients, as in the original demo
    milliseconds, size = number(probe, "all_reduce_ms"), number(probe, "all_reduce_bytes")
    if milliseconds and size and run.wire_bytes:
        run.probe_s = milliseconds / 1000 * run.wire_bytes / size
    run.link_gbps = stated_gbps
    carriers = [c for node in entries(probe, "nodes") if (c := carrier(node, run.nodes))]
    if carriers:  # the ring is as fast as its slowest node
        slowest = min(carriers, key=lambda c: number(c, "wire_Gbps"))
        run.wire_gbps = number(slowest, "wire_Gbps") or None
        run.interface = f"{slowest.get('name')} ({slowest.get('kind')})"
        # the environment in the Run line is rank 0's, and so is the first node
        run.first_interface = f"{carriers[0].get('name')} ({carriers[0].get('kind')})"
        run.link_gbps = stated_gbps or number(slowest, "speed_Gbps") or None


def probe_of(run):
    """The Probe record; empty, and a note, where it is of another number of processes."""
    probe = section(run.log, "Probe")
    count = whole(probe, "world_size")
    if not count or not run.processes or count == run.processes:
        return probe
    run.notes.append(f"its probe is not used: {count} processes, the run has {run.processes}")
    return {}


def carrier(node, nodes):
    """The interface of a probed node that carried most; loopback only on a single node."""
    found = [i for i in entries(node, "interfaces") if number(i, "wire_Gbps") is not None]
    if (nodes or 1) > 1:
        found = [i for i in found if i.get("kind") != "loopback"] or found
    return max(found, key=lambda i: number(i, "wire_Gbps"), default=None)


def add_losses(run, summary):
    """Mean loss of each epoch over the ranks: epoch lines first, they tell a resumed run whole."""
    by_epoch = {}
    for (_, epoch), loss in run.log.epochs.items():
        by_epoch.setdefault(epoch, []).append(loss)
    run.losses = {epoch: sum(v) / len(v) for epoch, v in sorted(by_epoch.items())}
    if not run.losses:
        listed = entries(summary, "loss_by_epoch")
        run.losses = {i: x for i, x in enumerate(listed, 1) if number({"x": x}, "x") is not None}
    for entry in entries(summary, "val"):
        run.top1 = number(entry, "top1")


def add_notes(run):
    log = run.log
    if log.torn:
        run.notes.append(f"{log.torn} torn line(s) left out")
    if log.ours and log.attempts > 1:
        run.notes.append(
            f"restarted {log.attempts - 1} time(s), the last time from step {run.start_step:,}: "
            "wall time is that of the last attempt"
        )
    elif run.start_step:
        run.notes.append(f"resumed from step {run.start_step:,}: wall time is of this part alone")
    counts = {rank: sum(key[0] == rank for key in log.steps) for rank in sorted(log.ranks)}
    for rank, count in counts.items():
        if log.ours and run.complete and count < max(counts.values()):
            run.notes.append(f"rank {rank}: {max(counts.values()) - count} step line(s) missing")
    if not log.ours and run.nodes and len(log.files) < run.nodes:
        run.notes.append(f"log of {len(log.files)} of {run.nodes} nodes (original demo's format)")
    if name := expected_interface(run):
        run.notes.append(f"{name}, but {run.first_interface} carried the traffic")


def expected_interface(run):
    """The *_SOCKET_IFNAME setting that the probed traffic did not follow, as text, or None."""
    facts = section(run.log, "Run")
    key = "GLOO_SOCKET_IFNAME" if facts.get("backend") == "gloo" else "NCCL_SOCKET_IFNAME"
    env = facts.get("env")
    wanted = env.get(key) if isinstance(env, dict) else None
    carrier_name = run.first_interface
    if not isinstance(wanted, str) or not carrier_name or wanted.startswith("^"):
        return None
    if run.nodes == 1:  # nothing has to leave the machine
        return None
    names = [n for n in wanted.lstrip("=").split(",") if n]
    matches = "infiniband" in carrier_name or any(carrier_name.startswith(n) for n in names)
    return None if matches or not names else f"{key}={wanted}"


# --- like with like ----------------------------------------------------------------------------


def setting(run, key):
    return section(run.log, "Run").get(key)


def must_match(run):
    """Settings that must be the same for times to be comparable."""
    facts = {
        "image count": run.images,
        "epoch count": run.epochs,
        "model (parameters)": run.parameters,
        "precision": setting(run, "precision"),
        "image size": setting(run, "image_size"),
        "size of the pictures in the files": setting(run, "picture_sizes"),
        "compression": setting(run, "grad_compression"),
    }
    if facts["compression"] == "powersgd":
        facts["compression"] = f"powersgd, rank {setting(run, 'powersgd_rank')}"
    return facts


def is_weak_pair(a, b):
    """More processes with the same batch each: the global batch and the steps differ by design."""
    if None in (a.processes, b.processes, a.global_batch, b.global_batch):
        return False
    same = a.global_batch * b.processes == b.global_batch * a.processes
    return a.processes != b.processes and same


def differences(base, run):
    """What keeps `run` from being compared with `base`, one text each."""
    pairs = [(key, a, must_match(run)[key]) for key, a in must_match(base).items()]
    if not is_weak_pair(base, run):
        pairs.append(("global batch", base.global_batch, run.global_batch))
        pairs.append(("number of steps", base.steps, run.steps))
    return [
        f"{key} differs: {a} in {base.name}, {b} in {run.name}"
        for key, a, b in pairs
        if None not in (a, b) and a != b
    ]


def other_settings(base, run):
    """Settings that may explain a difference but do not forbid the comparison."""
    keys = (
        "backend",
        "seed",
        "weights",
        "lr",
        "sync_bn",
        "compile",
        "workers",
        "threads",
        "bucket_cap_mb",
        "val_images",
        "versions",
        "devices",
    )
    if base.processes != run.processes:
        keys = tuple(k for k in keys if k != "devices")
    values = [(k, setting(base, k), setting(run, k)) for k in keys]
    return [k for k, a, b in values if None not in (a, b) and a != b]


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
    samples = (run.steps or len(squares)) / (run.epochs or 1) * (run.processes or 1)
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


@dataclass
class Verdict:
    """Why a run took its time. `bound`: link, overlap, input, compute, not the link, unknown."""

    bound: str
    says: list = field(default_factory=list)
    checks: list = field(default_factory=list)  # most likely first
    range_s: tuple | None = None  # whole run, full to no overlap
    inside: bool | None = None
    implied_gbps: float | None = None


def floor_of(run, runs):
    """(seconds of data wait and compute in a step, name of the run they come from).

    Where the log has no split, the fastest run of the same shape stands in with its whole step.
    """
    if run.has_split:
        return run.data_s + run.compute_s, run.name
    alike = [r for r in runs if r.complete and r.step_s and shape(r) == shape(run)]
    best = min(alike, key=lambda r: r.step_s, default=None)
    return (best.step_s, best.name) if best else (None, None)


def shape(run):
    return run.processes, run.nodes, run.global_batch


def judge(run, runs, latency_s):
    """The verdict on one run among `runs`."""
    if not run.complete:
        return Verdict("unknown", [f"incomplete, not scored: {'; '.join(run.problems)}."])
    if run.step_s is None:
        return Verdict("unknown", ["no step time: give --steps (or images, epochs, batch)."])
    floor_s, floor_name = floor_of(run, runs)
    verdict = Verdict("unknown")
    add_range(verdict, run, floor_s, latency_s)
    if run.has_split:
        judge_split(verdict, run)
    elif run.data_s and run.data_s > run.step_s / 2:  # the log has no split, but this is known
        verdict.bound = "input"
        wait = f"{ms(run.data_s)} of a step of {ms(run.step_s)}"
        verdict.says.append(f"bound by its input: it waits {wait} for images.")
    elif floor_name != run.name:
        judge_excess(verdict, run, floor_s, floor_name)
    else:
        judge_fastest(verdict, run)
    verdict.checks = next_checks(verdict, run)
    return verdict


def add_range(verdict, run, floor_s, latency_s):
    """Set the range that the stated link allows, and the wire rate that the run implies."""
    known = None not in (run.wire_bytes, run.processes, run.nodes, run.steps, floor_s)
    if not known or run.nodes < 2 or run.wire_bytes == 0:
        return
    size = (run.wire_bytes, run.processes, run.nodes)
    excess_s = run.exposed_s if run.has_split else run.step_s - floor_s
    if run.wire_gbps:
        verdict.implied_gbps = run.wire_gbps
    elif excess_s > 0.02 * run.step_s:
        verdict.implied_gbps = implied_gbps(*size, excess_s)
    if run.link_gbps:
        low, high = step_range(
            floor_s,
            ring_seconds(*size, run.link_gbps * 1e9 / 8),
            ring_seconds(*size, payload_rate(run.link_gbps), latency_s),
        )
        steps = run.steps - run.start_step
        verdict.range_s = (low * steps, high * steps)
        above = run.step_s > high * (1 + RANGE_TOLERANCE)
        verdict.inside = not above and run.step_s >= low * (1 - RANGE_TOLERANCE)


def judge_split(verdict, run):
    """A log with data wait, compute and exposed communication: the largest share bounds."""
    parts = {"link": run.exposed_s, "input": run.data_s, "compute": run.compute_s}
    bound = max(parts, key=parts.get)
    # Exposed time far above the all-reduce's own is not the wire's: with CPU training the two
    # share the cores, and a slow rank makes the others wait in the all-reduce.
    if bound == "link" and run.probe_s and run.probe_s < run.exposed_s / 2:
        bound = "overlap"
    verdict.bound = bound
    title = {
        "link": "bound by its link",
        "input": "bound by its input (waiting for images)",
        "compute": "bound by compute",
        "overlap": "bound by communication, but not by the wire",
    }[bound]
    verdict.says.append(
        f"{title}: of a step of {ms(run.step_s)}, compute is {ms(run.compute_s)} "
        f"({part(run.compute_s, run.step_s)}), data wait {ms(run.data_s)} "
        f"({part(run.data_s, run.step_s)}), exposed communication {ms(run.exposed_s)} "
        f"({part(run.exposed_s, run.step_s)})."
    )
    if run.wire_gbps and run.probe_s:
        verdict.says.append(probe_text(run))
    say_range(verdict, run)


def probe_text(run):
    text = (
        f"The probe's all-reduce ({ms(run.probe_s)} for a step's {megabytes(run.wire_bytes)}) "
        f"ran at {rate(run.wire_gbps)} on {run.interface}"
    )
    if not run.link_gbps:
        return f"{text}; its stated speed is not known (--link_gbps)."
    reached = run.wire_gbps / run.link_gbps
    text += f", {reached:.0%} of the stated {rate(run.link_gbps)}"
    if reached < HEALTHY_SHARE:
        return f"{text}: this is not a {rate(run.link_gbps)} result."
    return f"{text}: the link delivers." if reached >= 0.8 else f"{text}."


def say_range(verdict, run):
    """The sentence on the range that physics allows, and where the measured time lies."""
    if not verdict.range_s:
        return
    low, high = verdict.range_s
    took = run.step_s * (run.steps - run.start_step)
    text = (
        f"{rate(run.link_gbps)} allows {span(low, high)} (ring all-reduce, full overlap to none); "
        f"measured {in_unit(took, high)}"
    )
    if verdict.inside:
        verdict.says.append(f"{text}: inside.")
    elif took < low:
        verdict.says.append(
            f"{text}: faster than {rate(run.link_gbps)} can be; the traffic went another way, "
            "or the link is faster than stated."
        )
    elif run.wire_gbps and run.link_gbps and run.wire_gbps >= HEALTHY_SHARE * run.link_gbps:
        verdict.says.append(
            f"{text}: above, though the probe found no fault in the link; all-reduce and backward "
            "pass compete for the same cores, or ranks wait for each other."
        )
    else:
        result = "" if run.wire_gbps else f": this is not a {rate(run.link_gbps)} result"
        verdict.says.append(f"{text}, {took / high:.1f} times the slowest{result}.")


def judge_excess(verdict, run, floor_s, floor_name):
    """A log without a split, slower than another run of its shape."""
    excess = (run.step_s - floor_s) / run.step_s
    size = (run.wire_bytes, run.processes, run.nodes)
    if excess < 0.5 or run.nodes == 1:
        verdict.says.append(
            f"its step of {ms(run.step_s)} is {part(run.step_s - floor_s, floor_s)} above "
            f"{floor_name}'s; the log does not split it into data wait, compute, communication."
        )
    else:
        verdict.bound = "link"
        verdict.says.append(
            f"bound by its link, or by what stood in for it: {excess:.0%} of its step of "
            f"{ms(run.step_s)} comes on top of {floor_name}'s {ms(floor_s)}."
        )
    if verdict.range_s:
        line, tcp = run.link_gbps * 1e9 / 8, payload_rate(run.link_gbps)
        verdict.says.append(
            f"At {rate(run.link_gbps)} an all-reduce takes {ms(ring_seconds(*size, line))} at "
            f"line rate and {ms(ring_seconds(*size, tcp))} at what TCP leaves."
        )
    say_range(verdict, run)
    if verdict.implied_gbps:
        verdict.says.append(
            f"The excess implies a wire that ran at {rate(verdict.implied_gbps)} "
            f"({run.steps:,} steps, no overlap)."
        )
    elif verdict.range_s is None and run.nodes != 1:
        verdict.says.append("To judge the link: --link_gbps, --parameters, --processes, --nodes.")


def judge_fastest(verdict, run):
    """A log without a split that has no faster one beside it: only the link's part is known."""
    verdict.says.append("The log does not split a step into data wait, compute, communication.")
    if run.nodes == 1:
        verdict.says.append("On a single node, its all-reduce crosses no network.")
    if not verdict.range_s:
        return
    steps = run.steps - run.start_step
    size = (run.wire_bytes, run.processes, run.nodes)
    line = ring_seconds(*size, run.link_gbps * 1e9 / 8) * steps
    tcp = ring_seconds(*size, payload_rate(run.link_gbps)) * steps
    total = run.step_s * steps
    of = f"all-reduces at {rate(run.link_gbps)} take {line:,.0f} to {tcp:,.0f} s of {total:,.0f} s"
    if tcp < LINK_FREE_SHARE * total:
        verdict.bound = "not the link"
        verdict.says.insert(0, f"not bound by its link: even with no overlap, {of}.")
    else:
        verdict.says.append(f"With no overlap, {of}: what bounds it cannot be told.")


def next_checks(verdict, run):
    """What to check or change next, most likely first."""
    name = run.interface.split(" ")[0] if run.interface else "IFNAME"
    implied, stated = verdict.implied_gbps, run.link_gbps
    if verdict.bound == "link" and implied and stated and implied < HEALTHY_SHARE * stated:
        return slow_wire_checks(name, implied, stated)
    checks = {
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
            "lower precision: --precision bf16 or tf32 where the hardware has it; --compile",
            "a larger --batch_size, if the device is not full",
            "more processes: see the projection",
        ],
        "not the link": [
            "a run of this demo over the same link: its Summary splits the step",
            "the loader: --workers, disk, processor load (`top`, `iostat -x 5`)",
            "the device: `nvidia-smi dmon` shows whether it waits",
        ],
    }.get(verdict.bound, [])
    if verdict.bound == "not the link" and is_starved(run):
        checks[0:0] = [
            f"the input pipeline: {run.img_per_s / run.processes:.0f} img/s per GPU is far below "
            "what ResNet-18 reaches on any recent one (an RTX 2080 Ti: 750 to 920 in fp32)"
        ]
    if verdict.bound in ("compute", "input") and (run.exposed_s or 0) > 0.2 * run.step_s:
        checks.append("the exposed communication: --grad_compression bf16, --accumulate_steps")
    if run.straggler is not None:
        checks = [f"rank {run.straggler}: it takes longer than the others", *checks]
    return checks


def is_starved(run):
    known = run.img_per_s and run.processes and "GPU" in run.log.kinds
    return bool(known) and run.img_per_s / run.processes < SLOW_GPU_IMG_PER_S


def slow_wire_checks(name, implied, stated):
    negotiated = f"the negotiated speed on both ends and the switch: `ethtool {name} | grep Speed`"
    if implied <= 0.1 < stated:
        negotiated += "; up to 94 Mb/s is what a port that fell back to 100 Mb/s gives"
    return [
        negotiated,
        "the interface: NETWORK= and IFNAME= of launch_multinode.sh keep the traffic on one; "
        f"watch /sys/class/net/{name}/statistics/tx_bytes",
        "an overlay, tunnel, bridge or shaper on the way: `ip route get PEER`, "
        f"`tc qdisc show dev {name}`",
        f"the link without training: `iperf3 -c PEER` should show {rate(stated * TCP_SHARE)}",
    ]


# --- scaling and projection --------------------------------------------------------------------


def scaling(runs):
    """Speed-up and efficiency against the smallest run; empty where all have one size."""
    sized = [r for r in runs if r.complete and r.processes and r.img_per_s]
    if len({r.processes for r in sized}) < 2:
        return []
    base = min(sized, key=lambda r: r.processes)
    rows = []
    for run in sorted(sized, key=lambda r: r.processes):
        speedup = run.img_per_s / base.img_per_s
        kind = "base" if run.processes == base.processes else "mixed"
        if is_weak_pair(base, run):
            kind = "weak"
        elif kind == "mixed" and run.global_batch == base.global_batch:
            kind = "strong"
        rows.append(
            {
                "run": run.name,
                "processes": run.processes,
                "kind": kind,
                "speedup": speedup,
                "efficiency": speedup * base.processes / run.processes,
            }
        )
    return rows


def can_project(run):
    known = (run.step_s, run.wire_bytes, run.processes, run.nodes)
    return run.complete and all(known)


def project(run, runs, latency_s):
    """Expected step and epoch at RATES_GBPS x PROCESSES (and this run's own number), weak scaling.

    Returns dicts: gbps, processes, nodes, ring_s, tree_s, step_s (low, high), best_s or None,
    epoch_s (low, high) or None where image count or batch is not known.
    """
    floor_s, _ = floor_of(run, runs)
    per_node = max(1, run.processes // run.nodes)
    cells = []
    for n in sorted({*PROCESSES, run.processes}):
        nodes = run.nodes if n == run.processes else math.ceil(n / per_node)
        for gbps in RATES_GBPS:
            ring = ring_seconds(run.wire_bytes, n, nodes, payload_rate(gbps), latency_s)
            tree = tree_seconds(run.wire_bytes, nodes, payload_rate(gbps), latency_s)
            quick = min(ring, tree)
            step = step_range(floor_s, quick, quick)
            best = None  # only where the probe was: another size has another all-reduce
            if run.probe_s and n == run.processes:
                best = estimate_step(floor_s, run.step_s, ring, run.probe_s)
            epoch_steps = steps_per_epoch(run, n)
            cells.append(
                {
                    "gbps": gbps,
                    "processes": n,
                    "nodes": nodes,
                    "ring_s": ring,
                    "tree_s": tree,
                    "step_s": step,
                    "best_s": best,
                    "epoch_s": epoch_steps and tuple(s * epoch_steps for s in step),
                }
            )
    return cells


def steps_per_epoch(run, processes):
    """Steps of an epoch with this run's batch per process on `processes`, or None."""
    if not run.images or not run.global_batch:
        return None
    return math.ceil(run.images / (run.global_batch / run.processes * processes))


def predict(run, runs, gbps, latency_s):
    """Best estimate of this run's step in s where counters show `gbps`; needs a probe."""
    floor_s, _ = floor_of(run, runs)
    size = (run.wire_bytes, run.processes, run.nodes)
    # the packets, and so their headers' share of what an interface counts, are those of the probe
    share = min(1.0, implied_gbps(*size, run.probe_s) / run.wire_gbps)
    modelled = ring_seconds(*size, share * gbps * 1e9 / 8, latency_s)
    return estimate_step(floor_s, run.step_s, modelled, run.probe_s)


def cross_checks(runs, latency_s):
    """Each probed run's step predicted from each other one's log, at its measured wire rate."""
    probed = [r for r in runs if can_project(r) and r.probe_s and r.wire_gbps and r.nodes > 1]
    rows = []
    for a in probed:
        for b in probed:
            same = shape(a) == shape(b) and abs(a.wire_bytes - b.wire_bytes) < 0.01 * a.wire_bytes
            if a is not b and same:
                step = predict(a, runs, b.wire_gbps, latency_s)
                rows.append(
                    {
                        "from": a.name,
                        "to": b.name,
                        "gbps": b.wire_gbps,
                        "predicted_s": step,
                        "measured_s": b.step_s,
                        "error": step / b.step_s - 1,
                    }
                )
    return rows


# --- text --------------------------------------------------------------------------------------


def ms(seconds):
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"


def part(value, total):
    return f"{value / total:.0%}" if total else "-"


def megabytes(nbytes):
    return f"{nbytes / 1e6:.3g} MB"


def rate(gbps):
    """Gb/s as text, in Mb/s below 1 Gb/s."""
    if gbps >= 0.9995:
        return f"{gbps:.3g} Gb/s"
    return f"{gbps * 1000:.0f} Mb/s" if gbps >= 0.01 else f"{gbps * 1000:.2g} Mb/s"


def duration(seconds):
    """Seconds as the demo's log writes them: 4h 8m 59.79s."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{int(hours)}h " if hours else ""
    return text + (f"{int(minutes)}m " if hours or minutes else "") + f"{rest:.2f}s"


def unit_of(seconds):
    if seconds >= 120:
        return 60, "min"
    return (1, "s") if seconds >= 2 else (1e-3, "ms")


def in_unit(seconds, like):
    divisor, unit = unit_of(like)
    value = seconds / divisor
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def span(low, high):
    """A range in one unit: 19 to 37 min; one figure where both ends read the same."""
    low_text, high_text = in_unit(low, high), in_unit(high, high)
    return high_text if low_text == high_text else f"{low_text.split(' ')[0]} to {high_text}"


def table(head, rows):
    """Lines of a Markdown table whose columns also line up in a terminal."""
    cells = [head, *rows]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        "| "
        + " | ".join(
            [r[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True)]
        )
        + " |"
        for r in cells
    ]
    rule = ["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def time_ratio(base, run):
    """How many times as long as the base the run took, or None where that cannot be said."""
    if None in (base.wall_s, run.wall_s) or base.attempted_again or run.attempted_again:
        return None
    return run.wall_s / base.wall_s


def main_table(runs, verdicts):
    """The table of all runs; a row that no run can fill is left out."""
    base = runs[0]

    def wire(run):
        gbps = verdicts[run.name].implied_gbps or run.wire_gbps
        if not gbps:
            return None
        of = f", {gbps / run.link_gbps:.0%} of stated" if run.link_gbps else ""
        return rate(gbps) + of + ("" if run.wire_gbps else " (implied)")

    def share(run, value):
        return None if value is None else f"{ms(value)} ({part(value, run.step_s)})"

    def ratio(run):
        value = time_ratio(base, run)
        if value is None or run is base:
            return None if value is None else "base"
        return f"{value:.2f} x as long" if value >= 1 else f"{1 / value:.2f} x faster"

    rows = [
        ("status", lambda r: "complete" if r.complete else "INCOMPLETE"),
        ("processes on nodes", lambda r: r.processes and f"{r.processes} on {r.nodes or '?'}"),
        ("wall time", lambda r: r.wall_s and duration(r.wall_s) + "*" * r.attempted_again),
        (f"against {base.name}", ratio),
        ("steps", lambda r: r.steps and f"{r.steps:,}"),
        ("img/s, job", lambda r: r.img_per_s and f"{r.img_per_s:,.1f}"),
        (
            "img/s, process",
            lambda r: r.img_per_s and r.processes and f"{r.img_per_s / r.processes:,.1f}",
        ),
        ("step", lambda r: r.step_s and ms(r.step_s)),
        ("- data wait", lambda r: share(r, r.data_s)),
        ("- compute", lambda r: share(r, r.compute_s)),
        ("- exposed communication", lambda r: share(r, r.exposed_s)),
        ("all-reduce alone", lambda r: r.probe_s and ms(r.probe_s)),
        ("bytes per step and rank", lambda r: r.wire_bytes and megabytes(r.wire_bytes)),
        ("link, stated", lambda r: r.link_gbps and rate(r.link_gbps)),
        ("wire rate", wire),
        ("interface", lambda r: r.interface),
        *[
            (f"loss, epoch {e}", lambda r, e=e: f"{r.losses[e]:.4f}" if e in r.losses else None)
            for e in shown_epochs(runs)
        ],
        ("top-1 at the end", lambda r: r.top1 is not None and f"{r.top1:.2f} %"),
    ]
    filled = [[title, *(make(run) or None for run in runs)] for title, make in rows]
    filled = [[cell or "-" for cell in row] for row in filled if any(row[1:])]
    return table(["", *(run.name for run in runs)], filled)


def shown_epochs(runs):
    """All epochs up to six, else the first and the last three."""
    epochs = sorted({epoch for run in runs for epoch in run.losses})
    return epochs if len(epochs) <= 6 else [epochs[0], *epochs[-3:]]


def projection_lines(run, runs, cells):
    floor_s, source = floor_of(run, runs)
    of = "data wait and compute" if run.has_split else f"{source}'s whole step, as none is split"
    lines = [
        f"Projection from {run.name}, by the model (not measured): from full to no overlap of "
        f"{megabytes(run.wire_bytes)} a step with {ms(floor_s)} ({of})",
        "",
    ]
    own = [c for c in cells if c["processes"] == run.processes]
    rows = [
        [
            rate(c["gbps"]),
            ms(c["ring_s"]),
            ms(c["tree_s"]),
            span(*c["step_s"]),
            ms(c["best_s"]) if c["best_s"] else "-",
            span(*c["epoch_s"]) if c["epoch_s"] else "-",
        ]
        for c in own
    ]
    head = [f"{run.processes} on {run.nodes}", "ring", "tree", "step", "best estimate", "epoch"]
    lines += [*table(head, rows), ""]
    for key, title in (("step_s", "step"), ("epoch_s", "epoch, same batch per process")):
        if own[0][key]:
            lines += [f"By processes, {title}, the quicker of ring and tree:", ""]
            lines += [*table(["processes", *map(rate, RATES_GBPS)], grid(cells, key)), ""]
    return lines


def grid(cells, key):
    sizes = sorted({c["processes"] for c in cells})
    at = {(c["processes"], c["gbps"]): c[key] for c in cells}
    return [[f"{n:,}", *(span(*at[n, g]) for g in RATES_GBPS)] for n in sizes]


def report(result):
    """The whole report as text."""
    runs, verdicts = result["runs"], result["verdicts"]
    lines = [f"FORCED, not like with like: {text}" for text in result["differences"]]
    lines += [*main_table(runs, verdicts), ""]
    if any(run.attempted_again for run in runs):
        lines += ["* a part of the run only (restarted or resumed): compare the step times", ""]
    for other in runs[1:]:
        if sentence := ratio_sentence(runs[0], other):
            lines.append(sentence)
    lines += [*result["losses"], "", "Verdict", ""]
    for run in runs:
        verdict = verdicts[run.name]
        lines.append(f"{run.name}: " + " ".join(verdict.says))
        if verdict.checks:
            lines.append("  Check or change next, most likely first:")
            lines += [f"  {i}. {text}" for i, text in enumerate(verdict.checks, 1)]
        lines += [f"  Note: {note}" for note in run.notes]
        lines.append("")
    if result["scaling"]:
        lines += [*scaling_lines(result["scaling"]), ""]
    if result["cross_checks"]:
        lines += [*cross_lines(result["cross_checks"]), ""]
    if chosen := result["projected"]:
        lines += projection_lines(chosen, runs, result["projections"][chosen.name])
    return "\n".join(lines).rstrip()


def ratio_sentence(base, run):
    value = time_ratio(base, run)
    if value is None:
        return None
    slow, quick, times = (run, base, value) if value >= 1 else (base, run, 1 / value)
    return (
        f"{slow.name} took {times:.2f} times as long as {quick.name}: "
        f"{duration(slow.wall_s)} against {duration(quick.wall_s)}."
    )


def scaling_lines(rows):
    cells = [
        [r["run"], str(r["processes"]), r["kind"], f"{r['speedup']:.2f}", f"{r['efficiency']:.0%}"]
        for r in rows
    ]
    head = ["Scaling", "processes", "kind", "speed-up", "efficiency"]
    return table(head, cells)


def cross_lines(rows):
    return ["The model against these logs (a step predicted from another run's log):"] + [
        f"  {r['from']} -> {r['to']} at {rate(r['gbps'])}: predicted {ms(r['predicted_s'])}, "
        f"measured {ms(r['measured_s'])} ({r['error']:+.0%})"
        for r in rows
    ]


# --- machine-readable output -------------------------------------------------------------------


def finite(value):
    """The same value with nan and infinity as null, which JSON has no word for."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(result):
    """The report's figures as plain objects: seconds, bytes, Gb/s, images/s."""
    runs = []
    for run in result["runs"]:
        figures = {k: v for k, v in vars(run).items() if k != "log"}
        figures |= {"complete": run.complete, "attempts": run.log.attempts}
        figures["wall_ratio"] = time_ratio(result["runs"][0], run)
        runs.append(figures | {"verdict": vars(result["verdicts"][run.name])})
    keys = ("differences", "losses", "scaling", "cross_checks", "projections")
    return finite({"base": result["runs"][0].name, "runs": runs} | {k: result[k] for k in keys})


# --- plot --------------------------------------------------------------------------------------


def need_matplotlib():
    """matplotlib.pyplot without a display; a missing one is the user's to install."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    return plt


LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
GREYS = ("#111111", "#1f5fa8", "#c1440e", "#4d8f3a", "#7a3f98")


def draw(result, file):
    """One slide: split of the step, throughput, loss, and efficiency where there are sizes."""
    plt = need_matplotlib()
    panels = [draw_split, draw_throughput, draw_loss]
    if result["scaling"]:
        panels.append(draw_efficiency)
    wide = {3: (1, 3, (16, 5.2)), 4: (2, 2, (13, 9))}[len(panels)]
    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(wide[0], wide[1], figsize=wide[2], layout="constrained")
        for panel, axis in zip(panels, axes.flat, strict=True):
            panel(axis, result)
        try:
            figure.savefig(file, dpi=120, format=None if Path(file).suffix else "png")
        except (OSError, ValueError) as error:
            raise UserError(f"--plot {file}: cannot be written: {error}") from None
        finally:
            plt.close(figure)


def draw_split(axis, result):
    """Stacked bars; a log without a split has one bar, told into floor and excess where known."""
    runs = [r for r in result["runs"] if r.step_s]
    kinds = {
        "compute": ("#555555", ""),
        "data wait": ("#cccccc", ".."),
        "exposed communication": ("#ffffff", "///"),
        "step, not split in the log": ("#999999", ""),
        "over the fastest run (inferred)": ("#ffffff", "xx"),
    }
    bars = {kind: [0.0] * len(runs) for kind in kinds}
    for i, run in enumerate(runs):
        if run.has_split:
            values = (run.compute_s, run.data_s, run.exposed_s, 0, 0)
        else:
            floor_s = floor_of(run, result["runs"])[0]
            values = (0, 0, 0, floor_s, run.step_s - floor_s)
        for kind, value in zip(kinds, values, strict=True):
            bars[kind][i] = value * 1000
    bottom = [0.0] * len(runs)
    for kind, heights in bars.items():
        if any(heights):
            face, hatch = kinds[kind]
            axis.bar(
                range(len(runs)),
                heights,
                0.6,
                bottom,
                label=kind,
                color=face,
                hatch=hatch,
                edgecolor="#111111",
            )
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for i, run in enumerate(runs):
        axis.annotate(
            ms(run.step_s), (i, bottom[i]), (0, 3), textcoords="offset points", ha="center"
        )
    axis.set_xticks(range(len(runs)), [r.name for r in runs])
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set(ylabel="time per step (ms)", title="Where a step's time goes")
    axis.set_ylim(0, max(bottom, default=1) * 1.45)  # room for the legend above the bars
    axis.legend(loc="upper right", fontsize=10)


def series(run, value):
    """(step, mean over ranks of value(Step)) for the steps where every rank has one."""
    by_step = {}
    for (_, epoch, step), line in sorted(run.log.steps.items()):
        if value(line) is not None and math.isfinite(value(line)):
            by_step.setdefault((epoch, step), []).append(value(line))
    most = max(map(len, by_step.values()), default=0)
    return [(key[1], sum(v) / len(v)) for key, v in by_step.items() if len(v) == most]


def elapsed(run, steps):
    """Seconds of training after each of `steps`, from the step times between the lines."""
    times = dict(series(run, lambda line: line.step_ms))
    clock, before, out = 0.0, run.start_step, []
    for step in steps:
        clock += max(step - before, 0) * times.get(step, 0) / 1000
        before = step
        out.append(clock)
    return out


def style(i):
    """Line style of run i; its mark stands at the end, so that a short run is seen too."""
    return {
        "color": GREYS[i % 5],
        "linestyle": LINES[i % 5],
        "linewidth": 2,
        "marker": "osD^v"[i % 5],
        "markevery": [-1],
    }


def label(run):
    return run.name if run.complete else f"{run.name} (incomplete)"


def draw_throughput(axis, result):
    longest = 0.0
    for i, run in enumerate(result["runs"]):
        points = series(run, lambda line: line.img_per_s)
        if points and (run.processes or 0):
            x = elapsed(run, [step for step, _ in points])
            y = [value * run.processes for _, value in points]
            axis.plot(x, y, label=label(run), **style(i))
        elif run.img_per_s and run.wall_s:
            x, y = [0, run.wall_s], [run.img_per_s] * 2
            axis.plot(x, y, label=f"{label(run)}, mean", **style(i))
        else:
            continue
        longest = max(longest, x[-1])
    axis.set_ylim(0, max(axis.get_ylim()[1], 1e-9) * 1.2)
    if longest > 180:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 60:g}")
        axis.xaxis.get_major_locator().set_params(steps=[1, 3, 6, 10])
    axis.set(
        xlabel="time (min)" if longest > 180 else "time (s)",
        ylabel="images/s, whole job",
        title="Throughput",
    )
    finish(axis, "no throughput in these logs")


def draw_loss(axis, result):
    for i, run in enumerate(result["runs"]):
        points = series(run, lambda line: line.loss)
        if points:
            axis.plot(*zip(*points, strict=True), label=label(run), **style(i))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="step", ylabel="cross entropy, mean over ranks", title="Loss")
    finish(axis, "no step lines in these logs")


def draw_efficiency(axis, result):
    rows = result["scaling"]
    sizes = sorted({r["processes"] for r in rows})
    axis.plot(sizes, [100] * len(sizes), color="#777777", linestyle="--", label="ideal")
    axis.plot(
        [r["processes"] for r in rows],
        [100 * r["efficiency"] for r in rows],
        "o",
        color="#111111",
        label="measured",
    )
    for r in rows:
        axis.annotate(
            r["run"],
            (r["processes"], 100 * r["efficiency"]),
            (0, -18),
            textcoords="offset points",
            ha="center",
            fontsize=10,
        )
    axis.set_xscale("log", base=2)
    axis.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.set_ylim(0, max(110, *(110 * r["efficiency"] for r in rows)))
    axis.set(xlabel="processes", ylabel="efficiency (%)", title="Scaling")
    finish(axis, "")


def finish(axis, otherwise):
    """A legend, or a word where there is nothing to show."""
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=10)
    else:
        axis.text(0.5, 0.5, otherwise, ha="center", transform=axis.transAxes)


# --- command line ------------------------------------------------------------------------------

LACKING = {
    "images": (int, "images trained on in an epoch"),
    "epochs": (int, "epochs"),
    "global_batch": (int, "images in a step over all processes"),
    "steps": (int, "steps in all (default: images / global batch, rounded up, x epochs)"),
    "processes": (int, "processes"),
    "nodes": (int, "nodes"),
    "parameters": (int, "parameters of the model, 4 bytes of gradient each"),
    "link_gbps": (float, "stated speed of the link, Gb/s; replaces what the log says"),
}


def parse_arguments(argv):
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="compare_logs.py",
        description=first,
        epilog=rest.partition("Model (")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=PATH", help="log or folder of a run")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (PNG, or by the suffix)")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--force", action="store_true", help="compare unlike runs, and mark it")
    parser.add_argument(
        "--project",
        metavar="NAME",
        help="run to project from (default: a probed or split one, else the fastest)",
    )
    parser.add_argument(
        "--latency_us",
        "--latency-us",
        type=float,
        default=LATENCY_US,
        help="latency of a message in microseconds (%(default)s)",
    )
    for key, (_, text) in LACKING.items():
        parser.add_argument(
            f"--{key}",
            *{f"--{key.replace('_', '-')}"} - {f"--{key}"},
            default=[],
            action="append",
            metavar="[NAME=]N",
            help=text,
        )
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
    for key, (kind, _) in LACKING.items():
        for item in sorted(getattr(args, key), key=lambda text: "=" in text):  # own after all
            name, equals, text = item.rpartition("=")
            if equals and name not in given:
                raise UserError(f"--{key} {item}: no run is named {name}: {', '.join(given)}")
            try:
                value = kind(text.replace(",", "").replace("_", ""))
            except ValueError:
                value = 0
            if not 0 < value < 1e15:
                raise UserError(f"--{key} {item}: not a number above 0")
            for target in [name] if equals else given:
                given[target][key] = value
    return given


def compare(runs, latency_s, force=False, project_from=None):
    """Everything the report holds, from Runs; raises UserError where they are not alike."""
    base = runs[0]
    unlike = [text for run in runs[1:] for text in differences(base, run)]
    if unlike and not force:
        raise UserError("; ".join(unlike) + " (--force compares all the same)")
    for run in runs[1:]:
        if others := other_settings(base, run):
            run.notes.append(f"other settings than {base.name}: {', '.join(others)}")
    able = [run for run in runs if can_project(run)]
    if project_from is not None:
        chosen = next((run for run in able if run.name == project_from), None)
        if chosen is None:
            raise UserError(f"--project {project_from}: no such run, or it lacks figures")
    else:
        # What is known best first, then what the link has disturbed least.
        rank = {r.name: (not r.probe_s, not r.has_split, r.step_s) for r in able}
        chosen = min(able, key=lambda r: rank[r.name], default=None)
    return {
        "runs": runs,
        "differences": unlike,
        "losses": [text for run in runs[1:] if (text := losses_apart(base, run))],
        "verdicts": {run.name: judge(run, runs, latency_s) for run in runs},
        "scaling": scaling(runs),
        "cross_checks": cross_checks(runs, latency_s),
        "projections": {run.name: project(run, runs, latency_s) for run in able},
        "projected": chosen,
    }


def run_command(argv):
    args = parse_arguments(argv)
    if args.plot:
        need_matplotlib()  # before anything else, so that nothing is half done
    paths = named_paths(args.runs)
    given = given_figures(args, paths)
    runs = [make_run(name, read_log(files), given[name]) for name, files in paths.items()]
    result = compare(runs, args.latency_us * 1e-6, args.force, args.project)
    print(report(result))
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(as_json(result), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json {args.json}: cannot be written: {error.strerror}") from None
    if args.plot:
        draw(result, args.plot)
    return 0 if all(run.complete for run in runs) else 1


def main(argv=None):
    try:
        code = run_command(argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"compare_logs.py: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
