"""Why a run took its time: which network carried it, what bounds it, what to check next."""

import math
from dataclasses import dataclass, field

from analysis.advice import nccl_advice, next_checks, on_cpu
from analysis.cost_model import (
    algorithm,
    all_reduce_seconds,
    implied_gbps,
    payload_rate,
    ring_seconds,
)
from analysis.units import in_unit, megabytes, ms, part, rate, span
from analysis.used_network import ADAPTERS, say_fallback
from common.records import get, objects
from common.thresholds import (
    DELIVERS,
    FALLEN_PORT_GBPS,
    HARMLESS,
    HEALTHY,
    LINK_FREE_SHARE,
    LOSSY,
    RANGE_TOLERANCE,
)


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
    trouble = say_trouble(run)
    verdict = Verdict(says=say_carried(run) + trouble)
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
    verdict.checks = next_checks(run, verdict.bound, verdict.implied_gbps, bool(trouble))
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
        near = f"within {RANGE_TOLERANCE:.0%} of that"
        return f"{text}: {'inside' if low <= took <= high else near}."
    if took < low:
        return f"{text}: faster than {stated} can be; the traffic went another way."
    if run.wire_gbps and run.wire_gbps >= HEALTHY * run.link_gbps:
        why = "ranks wait for each other"
        if run.straggler is not None:
            why = f"ranks wait for rank {run.straggler}"
        elif on_cpu(run):
            why = f"all-reduce and backward pass share cores, or {why}"
        return f"{text}: above, though the probe found no fault in the link; {why}."
    result = "" if run.wire_gbps else f": this is not a {stated} result"
    return f"{text}, {took / high:.1f} times the slowest{result}."


def say_carried(run):
    """The verdict's first words: which network carried the all-reduces, and how fast it was."""
    network = run.network
    if not network:
        return []
    basis = f"by {network.basis}"
    if run.nodes == 1 and network.transport != "local" and network.gbps:
        return [f"Inside one node, over {network.shown}, {basis}: {rate(network.gbps)}."]
    if run.nodes == 1 or network.transport == "local":
        where = "Inside one node, through" if run.nodes == 1 else "Between nodes through"
        if network.transport != "local":
            basis = "as no counter of bytes moved"
        return [f"{where} NVLink, PCIe or memory, {basis}: no network is judged."]
    says = [text for text in [say_fallback(network)] if text]
    channels = get(get(network.finding, "channels", dict), "network", int)
    if channels and network.transport in ADAPTERS:
        direct = get(network.finding, "gpudirect", int)
        basis += f" (GPUDirect on {direct or 0} of {channels} connections)"
    if network.gbps is None:
        return [*says, f"Over {network.way}, {basis}; no counter of bytes moved with it."]
    if network.kind != "ipoib":
        return [*says, f"Over {network.way}, {basis}: {delivered(run)}"]
    text = f"IP over InfiniBand: the probe ran at {rate(network.gbps)} on {network.names[0]}"
    if can := network.adapter_gbps:
        text += f", {network.gbps / can:.0%} of what {network.adapter or 'its adapter'} can do "
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
    if reached < DELIVERS:
        return f"{text}."
    fallen = run.link_gbps <= FALLEN_PORT_GBPS and run.network.transport == "sockets"
    but = ", at a speed to which a port falls back" if fallen else ""
    return f"{text}: the link delivers{but}."


def say_trouble(run):
    """What went wrong on the link, by the kernel's counters: sentences, none where nothing did."""
    says, used = [], []
    for network in run.networks:
        used += [*network.names, network.adapter]
    probed = objects(run.record("Probe"), "nodes")
    for when, nodes in (("during the probe", probed), ("during the run", run.log.nodes)):
        tcp = [get(node, "tcp", dict) for node in nodes]
        sent = sum(get(one, "segments") or 0 for one in tcp)
        again = sum(get(one, "retransmits") or 0 for one in tcp)
        over_tcp = run.network is None or run.network.transport == "sockets"
        if sent and again > LOSSY * sent and over_tcp:
            says.append(
                f"TCP sent {again / sent:.2%} of its segments again {when} ({again:,.0f} of "
                f"{sent:,.0f}, counted): the link loses packets."
            )
        found = [
            f"{key} {count:,.0f} on {interface['name']} of {get(node, 'host', str)}"
            for node in nodes
            for interface in objects(node, "interfaces")
            if interface.get("name") in used
            for key in get(interface, "errors", dict)
            if key not in HARMLESS and (count := get(interface["errors"], key))
        ]
        if found:
            says.append(f"Errors of the link {when} (counted): {', '.join(found)}.")
    return says
