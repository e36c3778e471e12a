"""Runs: the figures of one, medians and ranges of its repeats, likeness, what a difference is
made of, scaling.

Times are in milliseconds, as in the log; the wall time is in seconds.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low

from analysis import nccl
from analysis.logs import Log

LEAST = 1.02  # the ratio of two medians from which runs differ
ENOUGH = 4  # runs of each, from which disjoint ranges are taken for a difference
OWN_WORK = 1.2  # a rank or node that works this many times as long as the median is named

# --- The figures of a run ------------------------------------------------------------------------


@dataclass
class Run:
    """One run, or the medians of its repeats; a figure that the log does not have is missing."""

    name: str
    log: Log
    problems: list = field(default_factory=list)  # why it is not whole
    notes: list = field(default_factory=list)
    figures: dict = field(default_factory=dict)
    ranks: dict = field(default_factory=dict)  # rank -> its own work of a step, ms
    repeats: list = field(default_factory=list)  # the complete Runs of which it has the medians
    given_gbps: float | None = None  # the rate of a node's link, if the user gives it

    @property
    def complete(self):
        return not self.problems

    def record(self, name):
        """The Run, Probe or Summary of the log; empty where there is none."""
        return self.log.records.get(name, {})

    def setting(self, name, default=None):
        value = self.record("Run").get(name)
        return default if value is None else value

    @property
    def processes(self):
        return self.setting("world_size")

    @property
    def nodes(self):
        return self.setting("nodes")

    @property
    def gradient_bytes(self):
        """Of a step, as a rank hands them to the all-reduces."""
        sent = self.record("Summary").get("wire_bytes_per_step")
        return sent or 4 * self.setting("parameters", 0)

    @property
    def partial(self):
        """Whether the wall time covers the last of several attempts alone."""
        return any(one.log.attempts > 1 or one.setting("start_step") for one in self.each)

    @property
    def each(self):
        return self.repeats or [self]

    def values(self, figure):
        """The figure of each repeat that has it; of a run alone its own."""
        return [one.figures[figure] for one in self.each if figure in one.figures]

    def has(self, *figures):
        return all(figure in self.figures for figure in figures)


def make_run(name, log, given_gbps=None):
    """A run's figures from its log."""
    run = Run(name, log, given_gbps=given_gbps)
    run.problems = find_problems(run)
    run.notes = find_notes(run)
    if run.complete:
        run.figures["wall_s"] = max(log.ended.values())
        add_step(run, run.record("Summary"))
    add_probe(run, run.record("Probe"))
    return run


def add_step(run, summary):
    """The figures of a step. A run that was resumed at its end has made none."""
    if not summary.get("step_ms"):
        return
    names = ["step_ms", "median_step_ms", "slowest_of_100_step_ms", "data_ms", "compute_ms"]
    names += ["exposed_ms", "link_ms", "wait_ms", "cpu_ms", "img_per_s"]
    run.figures |= {name: summary[name] for name in names if summary.get(name) is not None}
    for rank in summary.get("ranks", []):
        run.ranks[rank["rank"]] = rank["data_ms"] + rank["compute_ms"]


def add_probe(run, probe):
    """What the probe measured, unless it is of another number of processes."""
    count = probe.get("world_size")
    if count and run.processes and count != run.processes:
        run.notes.append(f"its probe is not used: {count} processes, the run has {run.processes}")
        del run.log.records["Probe"]
        return
    if probe.get("all_reduce_ms"):
        run.figures["probe_ms"] = probe["all_reduce_ms"]
    if probe.get("latency_ms"):
        run.figures["latency_ms"] = probe["latency_ms"]


def find_problems(run):
    """Every reason why this log is not that of a whole run.

    Node 0's log alone is enough: in its Summary rank 0 writes what all ranks have measured.
    """
    log, problems = run.log, []
    if log.failed:
        return [f"it failed: {log.failed}"]
    if not log.ranks:
        return ["no line of a rank in it"]
    if log.ours and not run.record("Run"):
        problems.append("no Run line: the beginning of the log is missing or damaged")
    if log.ours and not run.record("Summary"):
        reason = f"; it says: {log.stop}" if log.stop else ""
        problems.append(f"no Summary line: the run did not end, or the end is missing{reason}")
    hosts = run.setting("hosts", [])
    for rank in sorted(log.ranks - log.ended.keys()):
        # In a shared folder the lines of another node may come later.
        other = rank < len(hosts) and hosts[rank] != hosts[0]
        if not (log.ours and other) or problems:
            step = f" (last step {log.last_step[rank]:,})" if rank in log.last_step else ""
            problems.append(f"no end line from rank {rank}{step}")
    if len(problems) > 3:
        problems = [*problems[:3], f"and {len(problems) - 3} more"]
    return problems


def find_notes(run):
    log, notes = run.log, []
    if log.earlier:
        notes.append(f"{log.earlier} other run(s) before it in the same log, left out")
    start = run.setting("start_step", 0)
    if log.attempts > 1:
        restarts = f"restarted {log.attempts - 1} time(s), the last time from step {start:,}"
        notes.append(f"{restarts}: wall time is that of the last attempt")
    elif start:
        notes.append(f"resumed from step {start:,}: wall time is of this part alone")
    if run.record("Summary").get("replicas_identical") is False:
        notes.append("its replicas are not identical: the ranks have trained different models")
    return notes


# --- Repeats -------------------------------------------------------------------------------------


def find_repeats(name, paths):
    """{name of a run: its path}, of all repeats that `paths` hold; else of the one run.

    Repeats are the folders r1, r2, ... of one path, or several paths.
    """
    if len(paths) > 1:
        return {str(path): path for path in paths}
    rounds = [path for path in Path(paths[0]).glob("r*") if re.fullmatch(r"r\d+", path.name)]
    # Of a series that was interrupted, the last folder may be empty.
    rounds = [path for path in rounds if any(path.glob("node*.log*"))]
    rounds.sort(key=lambda path: int(path.name[1:]))
    return {f"{name}/{path.name}": path for path in rounds} or {name: paths[0]}


def gather(name, runs):
    """One Run of all repeats: that with the median step, with the medians of those complete."""
    if len(runs) == 1:
        return replace(runs[0], name=name)
    whole = [run for run in runs if run.complete]
    by_step = sorted(whole, key=lambda run: run.figures.get("step_ms", 0)) or runs[:1]
    chosen = by_step[(len(by_step) - 1) // 2]
    found = replace(chosen, name=name, repeats=whole, figures={}, ranks={})
    for figure in dict.fromkeys(name for run in whole for name in run.figures):
        found.figures[figure] = median(found.values(figure))
    for rank in chosen.ranks:
        found.ranks[rank] = median(run.ranks[rank] for run in whole if rank in run.ranks)
    lost = [run for run in runs if not run.complete and run is not chosen]
    found.notes = [f"{run.name} is left out: {'; '.join(reasons(run))}" for run in lost]
    if len(whole) > 1:
        text = f"medians of {len(whole)} runs, each by itself; network and ports are those of "
        text += chosen.name
        found.notes.insert(0, text)
    found.notes += [f"{run.name}: {note}" for run in whole or [chosen] for note in run.notes]
    return found


def reasons(run):
    """Why a run is not whole, NCCL's cause with it."""
    cause = nccl.cause(run.log.nccl)
    return [*run.problems, *([f"NCCL warned, {cause}"] if cause else [])]


def differ(a, b):
    """Whether repeated figures have disjoint ranges, and medians that are 2 % apart."""
    low, high = sorted([median(a), median(b)])
    return (max(a) < min(b) or max(b) < min(a)) and high >= LEAST * low


# --- Two runs ------------------------------------------------------------------------------------

# Settings of the Run record that must be the same; those of the work itself not in scaling,
MUST_MATCH = {
    "precision": "precision",
    "image_size": "image size",
    "dummy": "use of random images (--dummy)",
    "grad_compression": "compression",
    "images": "image count",
    "parameters": "model (parameters)",
}
WORK = {
    "num_epochs": "epoch count",
    "global_batch_size": "global batch",
    "max_steps": "number of steps",
    "world_size": "number of processes",
}
# and those that are shown where they differ, and do not forbid the comparison.
SHOWN = ["backend", "seed", "weights", "lr", "compile", "workers", "threads", "hosts", "devices"]
SHOWN += ["accumulate_steps", "checkpoint_every", "log_every", "lr_scaling", "sync_bn", "timeout"]
SHOWN += ["warmup_steps", "bucket_cap_mb", "val_images", "versions", "nodes"]
OWN_FILE = "NCCL_DEBUG_FILE"  # beside each run's log


def unlike(base, run, scaling=False):
    """What keeps `run` from being compared with `base`, one text each."""
    names = MUST_MATCH if scaling else MUST_MATCH | WORK
    found = []
    for name, text in names.items():
        a, b = base.setting(name), run.setting(name)
        if None not in (a, b) and a != b:
            found.append(f"{text} differs: {a} in {base.name}, {b} in {run.name}")
    return found


def settings_that_differ(runs):
    """{name: the value of each run} of settings, variables and hosts that differ between runs."""
    facts = [run.record("Run") for run in runs]
    table = {name: [without_repeats(fact.get(name)) for fact in facts] for name in SHOWN}
    variables = sorted({name for fact in facts for name in fact.get("env", {})} - {OWN_FILE})
    table |= {name: [fact.get("env", {}).get(name) for fact in facts] for name in variables}
    return {name: each for name, each in table.items() if any(one != each[0] for one in each)}


def without_repeats(value):
    """Of a list of the ranks' what is in it."""
    return [*dict.fromkeys(map(str, value))] if isinstance(value, list) else value


def parts_of(run):
    """{part: ms}: computing, images, and of exposed communication the link and the wait."""
    if not run.has("step_ms", "data_ms", "compute_ms", "exposed_ms"):
        return {}
    exposed = run.figures["exposed_ms"]
    link = min(exposed, run.figures.get("link_ms", exposed))
    own = {"compute_ms": run.figures["compute_ms"], "data_ms": run.figures["data_ms"]}
    return own | {"link_ms": link, "wait_ms": exposed - link}


def wrong_sum(run):
    """How much the parts of a step add up to, in ms, if that is not the step; else None."""
    for one in run.each:
        total, step = sum(parts_of(one).values()), one.figures.get("step_ms", 0)
        if total and abs(total - step) > 0.01 * step:
            return total
    return None


def slow_rank(run):
    """(the rank, or the host of a node all of whose ranks, that works over OWN_WORK times as long
    as the median; how many times as long), or None.
    """
    hosts = run.setting("hosts", [])
    if not run.ranks:
        return None
    usual = median_low(run.ranks.values())
    slow = {rank: own for rank, own in run.ranks.items() if own > OWN_WORK * usual}
    if not slow:
        return None
    worst = max(slow, key=slow.get)
    who = f"rank {worst}"
    if len(hosts) == len(run.ranks):
        of_node = [rank for rank, host in enumerate(hosts) if host == hosts[worst]]
        if len(of_node) > 1 and {*of_node} <= slow.keys():
            return f"all ranks of {hosts[worst]}", min(slow[rank] for rank in of_node) / usual
        who += f" on {hosts[worst]}"
    return who, slow[worst] / usual


# --- Scaling -------------------------------------------------------------------------------------


@dataclass
class Scaling:
    """Runs with different numbers of processes.

    kind: strong (the same global batch in all) or weak (the same images per process and step).
    speed-up: images/s / the base's; of repeats the medians, with the range that the slowest and
    the fastest runs of both give. efficiency: speed-up x the base's processes / processes.
    """

    kind: str
    base: Run  # of the complete runs that with the fewest processes; of several the first
    rows: list  # (Run, speed-up, its lowest, its highest, efficiency)


def is_scaling(runs):
    """Whether complete runs differ in their number of processes."""
    return len({run.processes for run in runs if run.processes and run.complete}) > 1


def scale(runs):
    """Scaling, or None if no two of the runs can be compared."""
    able = [run for run in runs if run.complete and run.processes and run.has("img_per_s")]
    if not is_scaling(able):
        return None
    base = min(able, key=lambda run: run.processes)
    rows = []
    for run in able:
        slow, fast = base.values("img_per_s"), run.values("img_per_s")
        speed_up = run.figures["img_per_s"] / base.figures["img_per_s"]
        efficiency = speed_up * base.processes / run.processes
        rows.append((run, speed_up, min(fast) / max(slow), max(fast) / min(slow), efficiency))
    return Scaling(kind_of(able), base, rows)


def kind_of(runs):
    """strong, weak, or empty."""
    known = [run for run in runs if run.processes and run.setting("global_batch_size")]
    batches = {run.setting("global_batch_size") for run in known}
    if len(batches) == 1:
        return "strong"
    each = {run.setting("global_batch_size") / run.processes for run in known}
    return "weak" if len(each) == 1 else ""


def unlike_scaling(runs):
    """Why these runs are neither strong nor weak scaling: one text, or none."""
    known = [run for run in runs if run.processes and run.setting("global_batch_size")]
    if kind_of(runs) or not known:
        return []
    batches = ", ".join(f"{run.setting('global_batch_size'):,} in {run.name}" for run in known)
    return [f"neither strong nor weak scaling: the global batch is {batches}"]
