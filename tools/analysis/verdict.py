"""The verdict on a run, in three lines: what its step is made of and what limits it; its network,
and which share of the stated rate that delivered; whether the training's bytes went there.

All is measured (the split of a step, the probe, counters of bytes), or quoted from NCCL.
"""

import re
from dataclasses import dataclass, field, replace

from analysis.advice import marked_words, network_words, next_steps
from analysis.logs import get, objects
from analysis.nccl import quotes
from analysis.network import ADAPTERS, carriers
from analysis.runs import usual_times
from analysis.words import megabytes, ms, part, rate

MOST_WARNINGS = 3  # of a complete run
WORTH = 0.05  # below this share of a step, a part of it is not told
IN_PART = 0.2  # above this share of a step, communication limits it in part
USUAL = 0.8  # of the stated rate, from here on headers and start-up account for the rest
POOR = 0.5  # below this share "only"
TOO_FAST = 1.05  # above this share what it states is wrong
LOSSY = 0.01  # TCP that sends this share of its segments again is told
OWN_CORE = 0.8  # a process that computes has at least this much CPU time, if the core is its own
# The training's own bytes may be so much less or more than those of its gradients: headers and a
# node's small traffic are counted, too.
LEAST_SENT, MOST_SENT = 0.97, 1.10


@dataclass
class Verdict:
    """`bound`: link, overlap (communication, most of it beyond an all-reduce alone), compression
    (PowerSGD's, and communication), wait (for other ranks), input, compute, slow rank, unknown.
    """

    bound: str = "unknown"
    says: list = field(default_factory=list)  # the step, network, training, NCCL's warnings
    advice: list = field(default_factory=list)  # what to do next, three things at most


def judge(run):
    """The Verdict on a run."""
    warned = quotes(run.log.nccl, failed=not run.complete)
    if not run.complete:
        start = "" if run.log.failed else "incomplete, not scored: "
        says = [start + "; ".join(run.problems)]
        says += [f"timed out: {work}" for work in run.log.nccl.get("timeouts", [])]
        says += warned + [f"meaning: {text}" for text in run.log.nccl.get("means", [])]
        words = {"failed", run.network.transport if run.network else ""} if warned else set()
        return Verdict(says=says, advice=next_steps(run, words))
    elsewhere, own = own_bytes(run)
    if elsewhere:  # the probe's link is not the training's
        run = replace(run, networks=[], link_gbps=None, probe_s=None)
    says = [*say_network(run, own), *own, *warned[:MOST_WARNINGS]]
    if not run.has_split:
        text = "its log does not split a step: what limits it cannot be told"
        if run.step_s is None:
            text = "its log states no step time: only losses and wall times can be compared"
        if run.steps and run.steps <= run.start_step:
            text = "it was resumed at its end, and made no step"
        return Verdict(says=[text, *says])
    parts = parts_of_step(run)
    bound = max(parts, key=parts.get)
    return Verdict(bound, [say_step(run, parts, bound), *says], steps_to_take(run, parts, bound))


# --- What limits it ------------------------------------------------------------------------------


def parts_of_step(run):
    """{part: seconds}, together a step: means over the ranks. With a slow rank they are those that
    a usual rank has, and its excess, which the others wait for.
    """
    # Far above the all-reduce's own time it is not the wire's: on a CPU compute and network share
    # the cores.
    kind = "overlap" if run.probe_s and run.probe_s < run.link_s / 2 else "link"
    if run.setting("grad_compression") == "powersgd":
        kind = "compression"
    if run.straggler is None:
        wait = run.exposed_s - run.link_s
        return {kind: run.link_s, "wait": wait, "input": run.data_s, "compute": run.compute_s}
    own = run.ranks[run.straggler][:2]
    data, compute = map(min, own, usual_times(run.ranks))
    excess = sum(own) - data - compute
    return {"slow rank": excess, kind: run.link_s, "input": data, "compute": compute}


def communication(parts):
    return next(name for name in ("link", "overlap", "compression") if name in parts)


def say_step(run, parts, bound):
    places = 0 if run.step_s >= 0.1 else 1
    step, compute, data, exposed, wait, beyond = (
        f"{1000 * seconds:,.{places}f}"
        for seconds in (
            run.step_s,
            run.compute_s,
            run.data_s,
            run.exposed_s,
            run.exposed_s - run.link_s,
            run.link_s - (run.probe_s or run.link_s),
        )
    )
    name = "compressing and communicating" if "compression" in parts else "communicating"
    text = f"a step of {step} ms: {compute} computing, {data} waiting for images, {exposed} {name}"
    text += f" ({part(run.exposed_s, run.step_s)}"
    if run.exposed_s - run.link_s > WORTH * run.step_s:
        text += f", {wait} of it waiting for other ranks"
    if is_beyond(run):
        text += f", {beyond} of it beyond an all-reduce alone"
    limit = {
        "link": f"{name_link(run)} limits it",
        "overlap": "communication limits it, most of it not explained by an all-reduce alone",
        "compression": "PowerSGD limits it, whose computing and communicating are one call",
        "wait": "its ranks wait for each other",
        "input": "waiting for images limits it",
        "compute": "computing limits it",
        "slow rank": f"rank {run.straggler} limits it, whose own work takes "
        f"{ms(parts.get('slow rank', 0))} longer than the others'",
    }[bound]
    if bound in ("compute", "input") and parts[communication(parts)] > IN_PART * run.step_s:
        limit += ", communication in part"
    return f"{text}): {limit}{say_crowd(run)}"


def is_beyond(run):
    return bool(run.probe_s) and run.link_s - run.probe_s > WORTH * run.step_s


def name_link(run):
    if run.nodes == 1:
        return "communication inside its node"
    # Only a link that delivers what it states is known to be what limits.
    if run.probe_s and run.share and USUAL <= run.share <= TOO_FAST:
        return "its link"
    return "communication between its nodes"


def say_crowd(run):
    """That a CPU's cores were not the processes' own; empty where nothing shows it."""
    threads, cores = run.setting("threads", int) or 0, run.setting("node_cores", int) or 0
    each = (run.processes or 0) // (run.nodes or 1)
    if not run.on_cpu or run.compute_s < IN_PART * run.step_s:
        return ""
    if 0 < cores < each * threads:
        return f"; {each} processes with {threads} threads each on {cores} cores"
    if run.cpu_s is not None and run.cpu_s < OWN_CORE * run.compute_s:
        return f"; others may have used its cores: it got {ms(run.cpu_s)} of CPU time a step"
    return ""


def steps_to_take(run, parts, bound):
    kind = communication(parts)
    words = {bound.replace(" ", "-"), "cpu" if run.on_cpu else "gpu"}
    words.add(f"sends-{run.setting('grad_compression')}")
    words.add(run.setting("precision"))
    words |= {"compiled"} if run.record("Run").get("compile") else set()
    words |= {"crowded"} if say_crowd(run) else set()
    if run.setting("backend") == "gloo":
        words.add("gloo")
    if run.straggler is not None:
        data, compute, _ = run.ranks[run.straggler]
        usual_data, usual_compute = usual_times(run.ranks)
        words |= {"images"} if data - usual_data > compute - usual_compute else set()
    if bound == kind or parts[kind] > IN_PART * run.step_s:
        words |= {"communication"} | ({"beyond"} if is_beyond(run) else set())
        if run.nodes == 1:
            words.add("inside")
        elif bound != "compression":
            words |= {"between"} | network_words(run) | marked_words(run)
            words |= {"asked"} if run.network and say_asked(run) else set()
            if run.share:
                slow = "small" if size_limits(run) and run.share < USUAL else "low"
                words.add("full" if run.share >= USUAL else slow)
    return next_steps(run, words)


# --- The network that carried it -----------------------------------------------------------------


def say_network(run, own):
    """Which network carried the all-reduces, and what it delivered of what it states."""
    network = run.network
    if not network:
        if not run.log.ours or run.nodes == 1 or (own and run.traffic):
            return []
        if run.probe_s:
            return ["network: not known, as no interface that the probe can read moved its bytes"]
        return ["network: not known, as the log has no probe"]
    if run.nodes == 1 or network.transport == "local":
        return [f"network: none, {way_inside(network)}"]
    text = f"network: {network.way}"
    if network.gbps:
        size = get(run.record("Probe"), "all_reduce_bytes")
        text += f", {rate(network.gbps)} in the probe's all-reduce of {megabytes(size or 0)}"
        text += say_share(run)
    else:
        text += ", no counter shows at what rate"
    if network.transport in ADAPTERS and network.connections:
        text += f"; GPUDirect on {network.with_gpudirect} of {network.connections} connections"
        if why := get(network.finding, "no_gpudirect", str):
            text += f' ("{why}")'
    unused = get(network.finding, "unused", list)
    if unused and get(network.finding, "devices", list):
        text += f"; {len(unused)} more adapters that NCCL found are not used"
    return [text + say_asked(run) + say_again(run)]


def say_share(run):
    """The share of the stated rate."""
    network = run.network
    if not run.link_gbps:
        why = "a virtual interface states any rate" if network.virtual else "none is stated"
        return f" ({why}: --link_gbps gives the link's)"
    stated = f"{run.rate_is} {rate(run.link_gbps)}"
    if run.rate_is == "stated" and run.link_gbps < max(n.stated or 0 for n in run.networks):
        stated += f" of {network.host}"
    share = f"{run.share:.0%} of the {stated}"
    if run.share > TOO_FAST:
        return f": {share}: that rate is wrong"
    if run.share >= USUAL:
        return f": {share}"
    if size_limits(run):
        return f": {share}, but so few bytes say little of so fast a link"
    if run.share >= POOR:
        return f": {share}, less than such a link usually delivers"
    return f": only {share}"


def say_asked(run):
    """That an adapter was asked for, by a variable or by the run's name, and sockets were used."""
    network = run.network
    names = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")
    asked = {name: run.env(name) for name in names} | get(network.finding, "asked", dict)
    wish = [f"{key}={asked[key]}" for key in ("NCCL_NET", "NCCL_IB_HCA") if asked.get(key)]
    wish = [text for text in wish if text != "NCCL_NET=Socket"]
    named = re.search(r"(?i)infiniband|roce|\befa|\bib\b", run.name)
    if network.transport != "sockets" or asked.get("NCCL_IB_DISABLE") not in (None, "", "0"):
        wish = []
    if not wish and not (named and network.transport == "sockets"):
        return ""
    what = f"{wish[0]} was set" if wish else f"the run is called {run.name}"
    said = [text for text in get(network.finding, "no_network", list) if isinstance(text, str)]
    why = f', which says "{said[0]}"' if said else ""
    by = "NCCL" if network.finding else "the run"
    return f"; {what}, but sockets were used by {by}{why}"


def say_again(run):
    """What TCP sent again, in the probe or in the run."""
    for when, nodes in (
        ("in the probe", objects(run.record("Probe"), "nodes")),
        ("in the training", run.traffic),
    ):
        tcp = [get(node, "tcp", dict) for node in nodes]
        sent = sum(get(one, "segments") or 0 for one in tcp)
        again = sum(get(one, "retransmits") or 0 for one in tcp)
        if again > LOSSY * sent > 0 and run.network.transport == "sockets":
            return f"; TCP sent {again / sent:.1%} of its segments again {when}"
    return ""


def way_inside(network):
    """Between the GPUs of a node, or of nodes that NVLink joins, as NCCL's text shows it."""
    if network.transport != "local":
        return "one node" + (f", over {network.shown}" if network.gbps else "")
    kinds = set(get(network.finding, "channels", dict))
    if "mnnvl" in kinds:
        return "NVLink between the nodes"
    if kinds == {"p2p"}:
        return "from GPU to GPU over NVLink or PCIe"
    if kinds == {"shm"}:
        return "through the host's memory (NCCL's SHM), not from GPU to GPU"
    return "NVLink, PCIe or memory"


def size_limits(run):
    """Whether the probe's all-reduce is too small to show what the link delivers: what its largest
    size has more than the one before it went at half of the stated rate.
    """
    sizes = objects(run.record("Probe"), "sizes")[-2:]
    points = [(get(size, "bytes"), get(size, "ms")) for size in sizes]
    if len(points) < 2 or None in (*points[0], *points[1]):
        return False
    (small, quick), (large, slow) = points
    if small >= large or quick >= slow:
        return False
    times = (large - small) / large * slow / (slow - quick)
    return times * (run.wire_gbps or 0) > POOR * (run.link_gbps or 0)


def own_bytes(run):
    """(whether others than the probe's carried the training itself, a line on its bytes), by the
    counters before and after it.

    Each step sends the gradients, in the script a blank pass before them, too: on two nodes once
    in a tree, as ring_bytes says in a ring; on more nodes up to twice in a tree. Rank 0 also sends
    its model.
    """
    steps, hosts = run.steps or 0, run.setting("hosts", list)
    inside = run.network and run.network.transport == "local"
    unknown = run.partial or run.setting("grad_compression") == "powersgd"
    known = run.wire_bytes and run.processes and (run.nodes or 0) > 1
    if not known or steps < 1 or inside or unknown:
        return False, []
    if not run.traffic:
        return False, ["training: its bytes were not counted"]
    most = ring_bytes(run) if run.nodes == 2 else 2 * run.wire_bytes
    model, says = 4 * (run.parameters or 0), []
    for node in run.traffic:
        host = node["host"]
        links = [link for link in node["interfaces"] if link["kind"] != "loopback"]
        of_node = [network for network in run.networks if network.host in ("", host)]
        names = list(dict.fromkeys(name for network in of_node for name in network.names))
        names = names or [link["name"] for link in carriers(links, {}, sent)]
        total = sum(sent(link) for link in links if link["name"] in names)
        low = LEAST_SENT * (steps * run.wire_bytes + (model if hosts[:1] == [host] else 0))
        high = MOST_SENT * ((steps + 1) * most + model)
        text = f"training: {megabytes(total / steps)} a step over {', '.join(names) or 'nothing'}"
        expected = f"the {megabytes(low / steps)} to {megabytes(high / steps)} expected, on {host}"
        if total < low:
            rest = [
                f"{link['name']} sent {megabytes(sent(link) / steps)}"
                for link in links
                if link["name"] not in names and 2 * sent(link) > low - total
            ]
            text += f", less than {expected}: {', '.join(rest) or 'no counter shows the rest'}"
            says.append((0, text))
        elif total > high:
            says.append((1, f"{text}, more than {expected}: other traffic, or more all-reduces"))
        else:
            says.append((2, f"{text}, as expected"))
    worst, text = min(says)
    unseen = (run.nodes or 0) - len(run.traffic)
    if unseen > 0:
        text += f"; the counters of {unseen} other node{'s' * (unseen > 1)} were not seen"
    return worst == 0, [text]


def ring_bytes(run):
    """Bytes that a node sends in each direction in an all-reduce of a step's gradients: a ring's.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009. NCCL may take a tree
    instead, which on two nodes sends wire_bytes.
    """
    return 2 * (run.processes - 1) / run.processes * run.wire_bytes


def sent(link):
    return get(link, "tx_bytes") or 0
