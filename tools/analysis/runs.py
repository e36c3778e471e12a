"""The figures of one run, from its log, and whether the log is that of a whole run."""

import math
import statistics
from dataclasses import dataclass, field

from analysis.cost_model import all_reduce_seconds
from analysis.logs import Log
from analysis.used_network import used_network
from common.records import get, objects
from common.thresholds import STRAGGLER, STRAY

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
    ranks: dict = field(default_factory=dict)  # rank -> its part of data_s, compute_s, exposed_s
    img_per_s: float | None = None  # whole job
    straggler: int | None = None
    losses: dict = field(default_factory=dict)  # epoch -> mean over ranks
    top1: float | None = None
    baseline: float | None = None  # of top1
    wire_bytes: float | None = None  # per step and rank, after compression
    link_gbps: float | None = None  # stated, of all the interfaces of a node that carried it
    probe_s: float | None = None  # all-reduce alone, scaled to wire_bytes
    small_s: float | None = None  # all-reduce of up to 4 KB
    message_s: float | None = None  # one message: the model's latency
    bandwidth: float | None = None  # bytes/s of ever larger all-reduces
    networks: list = field(default_factory=list)  # a UsedNetwork of each probed node
    buckets: list = field(default_factory=list)  # of DDP: (share of the bytes, ready_s), in order
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
        return all((self.step_s, self.wire_bytes, self.processes, self.nodes))

    @property
    def can_predict(self):
        """Whether its step over another link can be told, not only a range for it."""
        return bool(self.can_project and self.has_split and self.probe_s and self.buckets)

    @property
    def has_split(self):
        return None not in (self.data_s, self.compute_s, self.exposed_s)

    def mostly_waits(self, exposed_s):
        """Whether most of an exposed time is not the all-reduce's own: for ranks, for cores."""
        return bool(self.probe_s) and self.probe_s < exposed_s / 2

    @property
    def network(self):
        """That of the slowest node, whose pace is that of all."""
        return min(self.networks, key=lambda network: network.order, default=None)

    @property
    def wire_gbps(self):
        return self.network and self.network.gbps

    @property
    def interface(self):
        return self.network and self.network.shown

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
    run.top1, run.baseline = log.top1, log.baseline
    add_probe(run, run.record("Probe"))
    add_notes(run)
    return run


def add_times(run, summary):
    """Wall time and the split of a step, means over the ranks."""
    run.wall_s = max(run.log.ended.values())
    if get(summary, "step_ms") == 0:  # resumed at its very end, it has made no step
        return
    for name in ("step", "data", "compute", "exposed"):
        if (milliseconds := get(summary, f"{name}_ms")) is not None:
            setattr(run, f"{name}_s", milliseconds / 1000)
    if run.processes == 1 and None not in (run.step_s, run.data_s):  # nothing to communicate
        run.compute_s, run.exposed_s = run.step_s - run.data_s, 0.0
    done = (run.steps or 0) - run.start_step
    if run.step_s is None and run.wall_s and done > 0:
        run.step_s = run.wall_s / done
    run.img_per_s = get(summary, "img_per_s")
    if run.img_per_s is None and run.step_s and run.global_batch:
        run.img_per_s = run.global_batch / run.step_s
    run.ranks = split_of_ranks(summary)
    run.buckets = read_buckets(summary)
    run.straggler = find_straggler(run.ranks)


def read_buckets(summary):
    """[(share of the bytes, seconds from its last gradient to the last of all)], or nothing."""
    found = [(get(b, "bytes"), get(b, "ready_ms")) for b in objects(summary, "buckets")]
    total = sum(size or 0 for size, _ in found)
    if not total or any(None in bucket for bucket in found):
        return []
    return [(size / total, milliseconds / 1000) for size, milliseconds in found]


def split_of_ranks(summary):
    """{rank: [data_s, compute_s, exposed_s]} of the ranks of which all is known."""
    found = {}
    for entry in objects(summary, "ranks"):
        rank = get(entry, "rank", int)
        parts = [get(entry, f"{name}_ms") for name in ("data", "compute", "exposed")]
        if None not in (rank, *parts):
            found[rank] = [part / 1000 for part in parts]
    return found


def busy_of_ranks(ranks):
    """{rank: seconds of a step that are its own: data wait and compute}"""
    return {rank: data + compute for rank, (data, compute, _) in ranks.items()}


def usually_busy(busy):
    """The lower median of all ranks, so that of two the quicker one counts as usual."""
    return statistics.median_low(busy.values())


def find_straggler(ranks):
    """The rank whose data wait and compute take over STRAGGLER times the usual, or None."""
    busy = busy_of_ranks(ranks)
    slowest = max(busy, key=busy.get, default=None)
    return slowest if busy and busy[slowest] > STRAGGLER * usually_busy(busy) else None


def find_problems(run):
    """Every reason why this log is not that of a whole run."""
    log, problems = run.log, []
    if log.failed:
        return [f"failed; root cause: {log.failed}"]
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
    if log.earlier:
        run.notes.append(f"{log.earlier} other run(s) before it in the same log, left out")
    if log.attempts > 1:
        run.notes.append(
            f"restarted {log.attempts - 1} time(s), the last time from step {run.start_step:,}: "
            "wall time is that of the last attempt"
        )
    elif run.start_step:
        run.notes.append(f"resumed from step {run.start_step:,}: wall time is of this part alone")
    if run.record("Summary").get("replicas_identical") is False:
        run.notes.append("its replicas are not identical: the ranks have trained different models")
    if run.complete and run.nodes and len(log.ranks) < (run.processes or 0):
        seen = max(1, len(log.ranks) * run.nodes // run.processes)
        run.notes.append(f"log of {seen} of {run.nodes} nodes: loss and lines are of its ranks")


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
    for node in objects(probe, "nodes"):
        network = used_network(node, several, STRAY * moved_gbps)
        if network.names or network.finding or not several:
            run.networks.append(network)
    run.link_gbps = run.link_gbps or (run.network and run.network.stated)
    run.small_s = (get(probe, "latency_ms") or 0) / 1000 or None
    run.bandwidth = (get(probe, "bandwidth_GBps") or 0) * 1e9 or None
    if run.small_s and several and (run.processes or 0) > 1:
        run.message_s = run.small_s / all_reduce_seconds(run, 0, run.processes, run.nodes, 1, 1)
    if name := unused_interface(run):
        run.notes.append(f"{name}, but {run.networks[0].shown} carried the traffic")


def unused_interface(run):
    """The *_SOCKET_IFNAME setting that the probed traffic did not follow, as text, or None."""
    facts, network = run.record("Run"), run.networks[0] if run.networks else None
    if not network or network.transport != "sockets" or run.nodes == 1:
        return None  # nothing has to leave the machine, or only start-up goes there
    # The environment in the Run line is rank 0's, and so is the first node.
    key = "GLOO_SOCKET_IFNAME" if facts.get("backend") == "gloo" else "NCCL_SOCKET_IFNAME"
    wanted = get(get(facts, "env", dict), key, str)
    names = tuple(name for name in wanted.lstrip("=").split(",") if name)
    followed = wanted.startswith("^") or any(name.startswith(names) for name in network.names)
    return f"{key}={wanted}" if names and not followed else None


def set_floor(run, runs):
    """The seconds of data wait and compute in a step, and the name of the run they come from.

    Where the log has no split, the fastest run of the same shape stands in with its whole step.
    """
    if run.has_split:
        run.floor_s, run.floor_from = run.data_s + run.compute_s, run.name
        return
    alike = [r for r in runs if r.step_s and r.shape == run.shape]
    if best := min(alike, key=lambda r: r.step_s, default=None):
        run.floor_s, run.floor_from = best.step_s, best.name
