"""The figures of one run, from its log's records: Run, Summary, Probe; whether it is whole."""

import statistics
from dataclasses import dataclass, field

from analysis.kernel_counters import difference
from analysis.logs import Log
from analysis.network import read_network
from analysis.node import joined, merged, rows_of

STRAGGLER = 1.2  # a rank this many times as busy as usual keeps the others waiting

# Figures of a Run, and their names in the log's Run record.
SETTINGS = {
    "images": "images",
    "epochs": "num_epochs",
    "global_batch": "global_batch_size",
    "steps": "max_steps",
    "processes": "world_size",
    "nodes": "nodes",
    "parameters": "parameters",
}


@dataclass
class Run:
    """One run's figures; None where the log does not say."""

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
    repeats: list = field(default_factory=list)  # complete Runs, of which it has the medians
    wall_s: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    link_s: float | None = None  # of it the link's part: a lower bound, see link_by_step
    link_by_step: bool = False  # else the least of the ranks' means
    cpu_s: float | None = None  # CPU time of a process
    ranks: dict = field(default_factory=dict)  # rank -> its data_s, compute_s, exposed_s
    img_per_s: float | None = None  # whole job: images of the counted steps / their seconds
    straggler: int | None = None
    losses: dict = field(default_factory=dict)  # epoch -> mean over the ranks in the log
    wire_bytes: float | None = None  # per step and rank, after compression
    link_gbps: float | None = None  # of all interfaces of a node that carried it: as they state
    rate_is: str = "stated"  # or given, by the user
    probe_s: float | None = None  # all-reduce alone, scaled to wire_bytes
    latency_s: float | None = None  # of an all-reduce of up to 4 KB
    networks: list = field(default_factory=list)  # a Network for each probed node
    traffic: list = field(default_factory=list)  # of each node in the run: host, interfaces, tcp
    facts: dict = field(default_factory=dict)  # host -> its facts, and rows of its ports

    @property
    def complete(self):
        return not self.problems

    @property
    def partial(self):
        """Whether the wall time covers only the last of several attempts."""
        each = self.repeats or [self]
        return any(run.start_step > 0 or run.log.attempts > 1 for run in each)

    @property
    def has_split(self):
        return None not in (self.step_s, self.data_s, self.compute_s, self.exposed_s)

    @property
    def network(self):
        """That of the slowest node, which sets the pace of all."""
        return min(self.networks, key=lambda network: network.order, default=None)

    @property
    def wire_gbps(self):
        return self.network and self.network.gbps

    @property
    def share(self):
        """Of the link's rate, what the probe reached; None: one of them is not known."""
        return self.wire_gbps / self.link_gbps if self.wire_gbps and self.link_gbps else None

    @property
    def on_cpu(self):
        return self.log.kinds == {"CPU"}

    def record(self, name):
        """The Run, Probe or Summary of the log; empty where there is none."""
        return self.log.records.get(name, {})

    def setting(self, name, default=""):
        return self.record("Run").get(name, default)

    def env(self, name):
        """A variable of rank 0's environment."""
        return self.setting("env", {}).get(name, "")


def make_run(name, log, link_gbps=None):
    """A run's figures from its log. link_gbps: the rate of a node's link, if the user gives it."""
    run = Run(name, log, link_gbps=link_gbps, rate_is="given" if link_gbps else "stated")
    run.start_step = run.setting("start_step", 0)
    for figure, key in SETTINGS.items():
        setattr(run, figure, run.setting(key, None) or None)
    run.problems = find_problems(run)
    summary = run.record("Summary")
    if run.complete:
        add_times(run, summary)
    run.wire_bytes = summary.get("wire_bytes_per_step")
    if not run.wire_bytes and run.parameters:
        run.wire_bytes = 4 * run.parameters  # fp32 gradients
    if last := max((epoch for _, epoch in log.epochs), default=None):
        run.losses[last] = statistics.mean(
            n for (_, epoch), n in log.epochs.items() if epoch == last
        )
    add_probe(run, run.record("Probe"))
    add_own_text(run)
    for host, records in log.counters.items():
        if len(records) > 1:
            run.traffic.append({"host": host, **difference(*records)})
    add_facts(run)
    add_notes(run)
    return run


# --- Times ---------------------------------------------------------------------------------------


def add_times(run, summary):
    """Wall time and the split of a step, means over the ranks."""
    run.wall_s = max(run.log.ended.values())
    if summary.get("step_ms") == 0:  # resumed at its very end, it has made no step
        return
    for name in ("step", "data", "compute", "exposed", "link", "cpu"):
        if (milliseconds := summary.get(f"{name}_ms")) is not None:
            setattr(run, f"{name}_s", milliseconds / 1000)
    if summary.get("measured_steps"):  # in older logs it is of the first, slow steps, too
        run.img_per_s = summary.get("img_per_s")
    for entry in summary.get("ranks", []):
        parts = [entry.get(f"{name}_ms") for name in ("data", "compute", "exposed")]
        if None not in parts:
            run.ranks[entry["rank"]] = [part / 1000 for part in parts]
    if run.exposed_s is not None:
        run.link_by_step = run.link_s is not None
        least = min((exposed for *_, exposed in run.ranks.values()), default=run.exposed_s)
        run.link_s = min(run.exposed_s, run.link_s if run.link_by_step else least)
    run.straggler = find_straggler(run.ranks)


def usual_times(ranks):
    """Data wait and compute of a typical rank: the lower median, of two ranks the quicker one."""
    return [statistics.median_low(parts[n] for parts in ranks.values()) for n in (0, 1)]


def find_straggler(ranks):
    """The rank that is over STRAGGLER times as busy as a typical one, or None."""
    busy = {rank: data + compute for rank, (data, compute, _) in ranks.items()}
    slowest = max(busy, key=busy.get, default=None)
    if slowest is not None and busy[slowest] > STRAGGLER * statistics.median_low(busy.values()):
        return slowest
    return None


# --- Whether it is whole -------------------------------------------------------------------------


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
    if open_ended := sorted(log.ranks - log.ended.keys()):
        text = f"no end line from {name_ranks(open_ended, run)}"
        hosts = run.setting("hosts", [])
        others = [rank for rank in open_ended if rank < len(hosts) and hosts[rank] != hosts[0]]
        if log.ours and not problems and others == open_ended:  # in a shared folder it comes later
            run.notes.append(f"{text}, whose log is not whole")
        else:
            problems.append(text)
    return problems


def name_ranks(ranks, run):
    """rank 1 (n1) (last step 18 of 20)"""
    hosts = run.setting("hosts", [])
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


# --- Probe and counters --------------------------------------------------------------------------


def add_probe(run, probe):
    """What the probe measured; nothing, and a note, if it is of another number of processes."""
    count = probe.get("world_size")
    if count and run.processes and count != run.processes:
        run.notes.append(f"its probe is not used: {count} processes, the run has {run.processes}")
        del run.log.records["Probe"]
        return
    milliseconds, size = probe.get("all_reduce_ms"), probe.get("all_reduce_bytes")
    moved_gbps = 8e-6 * size / milliseconds if milliseconds and size else 0.0
    if moved_gbps and run.wire_bytes:
        run.probe_s = milliseconds / 1000 * run.wire_bytes / size
    nodes = probe.get("nodes", [])
    several = (run.nodes or len(nodes)) > 1
    for node in nodes:
        network = read_network(node, several, moved_gbps)
        if network.names or network.finding or not several:
            run.networks.append(network)
    run.link_gbps = run.link_gbps or (run.network and run.network.stated)
    run.latency_s = (probe.get("latency_ms") or 0) / 1000 or None


def add_own_text(run):
    """The network that NCCL's text in the run's own log names, where no probe shows one."""
    if not run.networks and run.log.nccl.get("transport", "unknown") != "unknown":
        node = {"host": "", "nccl": run.log.nccl}
        run.networks.append(read_network(node, run.nodes != 1, 0.0))


def add_facts(run):
    """What each node is, and what its ports have counted in probe and training."""
    probed = {node.get("host", ""): node for node in run.record("Probe").get("nodes", [])}
    counted = {node["host"]: node for node in run.traffic}
    for host in dict.fromkeys([*probed, *counted]):
        seen = [node for node in (probed.get(host), counted.get(host)) if node]
        readings = [one.get("node") for one in (*seen, *run.log.counters.get(host, []))]
        node = merged([reading for reading in readings if reading])
        links = joined([node["interfaces"] for node in seen])
        run.facts[host] = {"node": node, "rows": rows_of(node, links)}
