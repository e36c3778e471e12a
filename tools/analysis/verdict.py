"""Why a run took its time: which network carried it, what bounds it, what to check next."""

import math
from dataclasses import dataclass, field

from analysis.advice import nccl_advice, next_checks, on_cpu, only_sockets
from analysis.cost_model import (
    algorithm,
    all_reduce_seconds,
    implied_gbps,
    payload_rate,
    ring_seconds,
    told_algorithm,
)
from analysis.runs import busy_of_ranks, usually_busy
from analysis.units import in_unit, megabytes, ms, part, rate, span
from analysis.used_network import ADAPTERS, say_fallback
from common.records import get, objects
from common.thresholds import (
    DELIVERS,
    EXPOSED_IN_PART,
    FALLEN_PORT_GBPS,
    HARMLESS,
    HEALTHY,
    LINK_FREE_SHARE,
    LOSSY,
    RANGE_TOLERANCE,
)

ON_ROCE = "; packets were lost or overtaken on the way, in a switch more often than in a cable"
FALLEN = "which a port on the way that fell back to 100 Mb/s, or a limit there, would explain"


@dataclass
class Verdict:
    """Why a run took its time.

    `bound`: link, overlap, input, compute, slow rank, not the link, unknown.
    """

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
        text = "No step time: give --steps (or images, epochs, batch)."
        if run.steps and run.steps <= run.start_step:
            text = "It was resumed at its end, and made no step."
        verdict.says.append(text)
        return verdict
    size = (run.wire_bytes, run.processes, run.nodes)
    if all(size) and run.nodes > 1 and run.steps:
        excess_s = run.exposed_s if run.has_split else run.step_s - run.floor_s
        carrying_s = run.probe_s or (excess_s if excess_s > 0.02 * run.step_s else None)
        implied = implied_gbps(*size, carrying_s) if carrying_s else None
        verdict.implied_gbps = run.wire_gbps or implied
        if run.link_gbps and run.steps > run.start_step:  # a log may contradict itself
            set_range(verdict, run, size)
    (judge_split if run.has_split else judge_whole)(verdict, run)
    if verdict.range_s:
        verdict.says.append(say_range(verdict, run))
    verdict.checks = next_checks(run, verdict.bound, verdict.implied_gbps, bool(trouble))
    return verdict


def set_range(verdict, run, size):
    """From the better algorithm, all of it hidden, to the other, none of it hidden."""
    quick = all_reduce_seconds(run, *size, run.link_gbps * 1e9 / 8)
    slow = all_reduce_seconds(run, *size, payload_rate(run.link_gbps), run.message_s, unknown=max)
    # Where ranks differ, no step is quicker than the work of the slowest.
    floor_s = max([run.floor_s, *busy_of_ranks(run.ranks).values()])
    low, high = max(floor_s, quick), floor_s + slow
    steps = run.steps - run.start_step
    verdict.range_s = (low * steps, high * steps)
    above = run.step_s > high * (1 + RANGE_TOLERANCE)
    verdict.inside = not above and run.step_s >= low * (1 - RANGE_TOLERANCE)


def judge_split(verdict, run):
    """A log with data wait, compute and exposed communication: the largest share bounds."""
    parts = parts_of_step(run)
    verdict.bound = max(parts, key=parts.get)
    # Exposed time far above the all-reduce's own is not the wire's: with CPU training the two
    # share the cores, and ranks wait for each other.
    link = name_link(run)
    if run.mostly_waits(parts["link"]):
        link = "communication, but not by the wire"
        if verdict.bound == "link":
            verdict.bound = "overlap"
    title = {
        "input": "its input (waiting for images)",
        "compute": "compute",
        "slow rank": f"one slow rank, {run.straggler}, for which the others wait",
    }.get(verdict.bound, link)
    if verdict.bound in ("compute", "input") and parts["link"] > EXPOSED_IN_PART * run.step_s:
        title += f", in part by {link}"
    compute, data, exposed = (
        f"{ms(seconds)} ({part(seconds, run.step_s)})"
        for seconds in (run.compute_s, run.data_s, run.exposed_s)
    )
    mean = "" if run.straggler is None else ", mean over the ranks"
    verdict.says.append(
        f"Bound by {title}: of a step of {ms(run.step_s)}, compute is {compute}, data wait "
        f"{data}, exposed communication {exposed}, as measured{mean}."
    )
    if run.straggler is not None:
        verdict.says.append(say_slow_rank(run))


def parts_of_step(run):
    """{what a part of a step went to: seconds}; with a slow rank as on its way through the step.

    Its exposed time is communication; that of the others is waiting for it as well.
    """
    if run.straggler is None:
        return {"link": run.exposed_s, "input": run.data_s, "compute": run.compute_s}
    busy = busy_of_ranks(run.ranks)
    usual = usually_busy(busy)
    data, compute, _ = next(run.ranks[rank] for rank, s in busy.items() if s == usual)
    return {
        "slow rank": busy[run.straggler] - usual,
        "link": run.ranks[run.straggler][2],
        "input": data,
        "compute": compute,
    }


def say_slow_rank(run):
    busy = busy_of_ranks(run.ranks)
    data, compute, _ = run.ranks[run.straggler]
    return (
        f"Rank {run.straggler} itself works {ms(busy[run.straggler])} of a step (data wait "
        f"{ms(data)}, compute {ms(compute)}), the others {ms(usually_busy(busy))}."
    )


def name_link(run):
    if run.nodes == 1:
        return "communication inside its node"
    if run.network and run.network.kind == "ipoib":
        return f"TCP over {run.network.names[0]}, not InfiniBand itself"
    if run.network and run.network.transport == "roce" and say_trouble(run):
        return "its network, which loses packets"
    if through_host_memory(run):
        return "communication between its nodes, which passes through host memory"
    return "its link"


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
            text += f"({run.steps:,} steps, no overlap)"
            fallen = verdict.implied_gbps <= FALLEN_PORT_GBPS < (run.link_gbps or 0)
            text += f", {FALLEN}." if fallen else "."
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
    known = algorithm(run)
    of = f" of a {known}" if known else ""
    ends = "all communication hidden, to none"
    if not known:
        ends = "the better of ring and tree, all of it hidden, to the other, none of it"
    text = f"By the model{of}, {stated} gives a run of {span(low, high)} ({ends}); "
    text += f"measured {in_unit(took, high)}"
    if verdict.inside:
        if low <= took <= high:
            so = "" if run.straggler is None else f", for ranks that wait for rank {run.straggler}"
            return f"{text}: within that{so}."
        beyond = "above" if took > high else "below"
        return f"{text}: just {beyond}, and the model is good to {RANGE_TOLERANCE:.0%}."
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
    return f"{text}, {took / high:.1f} times the longer of these{result}."


def say_carried(run):
    """The verdict's first words: which network carried the all-reduces, and how fast it was."""
    network = run.network
    if not network:
        return []
    basis = f"by {network.basis}"
    if run.nodes == 1 and network.gbps:
        return [f"Inside one node, over {network.shown}, {basis}: {rate(network.gbps)}."]
    if run.nodes == 1 or network.transport == "local":
        where = "Inside one node" if run.nodes == 1 else "Between nodes"
        if network.transport != "local":
            basis = "as no counter of bytes moved"
        return [f"{where}, {way_inside(network)}, {basis}: no network is judged."]
    says = [text for text in [say_fallback(network)] if text]
    if network.transport in ADAPTERS and network.connections:
        direct = get(network.finding, "gpudirect", int) or 0
        basis += f" (GPUDirect on {direct} of {network.connections} connections)"
    if told := told_algorithm(run):
        basis += f", with NCCL_ALGO={told}"
    if kept := only_sockets(run):
        basis += f", as {kept} keeps NCCL from InfiniBand and RoCE"
    if network.gbps is None:
        return [*says, f"Over {network.way}, {basis}; no counter of bytes moved with it."]
    if network.kind != "ipoib":
        return [*says, f"Over {network.way}, {basis}: {delivered(run)}"]
    text = f"IP over InfiniBand: the probe ran at {rate(network.gbps)} on {network.names[0]}"
    if can := network.adapter_gbps:
        text += f", {network.gbps / can:.0%} of what {network.adapter or 'its adapter'} can do "
        text += f"({rate(can)} stated)"
    text += ", by byte counters"
    if run.record("Run").get("backend") == "nccl" and not network.finding:
        text += "; NCCL's text, which would say why, is not in the log"
    return [*says, f"{text}."]


def way_inside(network):
    """Between the GPUs of a node (of nodes that NVLink joins), as far as NCCL's text shows it."""
    kinds = set(get(network.finding, "channels", dict))
    if "mnnvl" in kinds:
        return "through NVLink"
    if kinds == {"p2p"}:
        return "from GPU to GPU over NVLink or PCIe"
    if kinds == {"shm"}:
        return "through the host's memory (NCCL's SHM), not from GPU to GPU"
    return "through NVLink, PCIe or memory"


def through_host_memory(run):
    """Whether an adapter fell short that no connection used from GPU memory (GPUDirect)."""
    network = run.network
    return (
        network
        and network.transport in ADAPTERS
        and network.connections
        and not get(network.finding, "gpudirect", int)
        and (network.gbps or math.inf) < DELIVERS * (run.link_gbps or 0)
    )


def delivered(run):
    """What the probe's all-reduce reached of the stated speed, and what that shows."""
    of = f" ({ms(run.probe_s)} for a step's {megabytes(run.wire_bytes)})" if run.probe_s else ""
    text = f"the probe's all-reduce{of} ran at {rate(run.wire_gbps)} on the wire"
    if not run.link_gbps:
        return f"{text}; its stated speed is not known (--link_gbps)."
    reached, stated = run.wire_gbps / run.link_gbps, rate(run.link_gbps)
    text += f", {reached:.0%} of the stated {stated}"
    sockets = run.network.transport == "sockets"
    if reached < HEALTHY:
        text += f": this is not a {stated} result"
        if sockets and run.wire_gbps <= FALLEN_PORT_GBPS:
            return f"{text}, {FALLEN}."
    elif reached >= DELIVERS:
        text += ": the link delivers"
        if sockets and run.link_gbps <= FALLEN_PORT_GBPS:
            text += ", but 100 Mb/s is what its port falls back to with a bad cable"
    if through_host_memory(run):
        text += ". GPUDirect was not used: all bytes passed through host memory, which may be "
        text += "what limits them; the link itself is not shown to be at fault"
    return f"{text}."


def say_trouble(run):
    """What went wrong on the link, by the kernel's counters: sentences, none where nothing did."""
    says, used = [], []
    for network in run.networks:
        used += [*network.names, network.adapter]
    probed = objects(run.record("Probe"), "nodes")
    over_tcp = run.network is None or run.network.transport == "sockets"
    healthy = run.wire_gbps and run.link_gbps and run.wire_gbps >= HEALTHY * run.link_gbps
    for when, nodes in (("during the probe", probed), ("during the run", run.log.nodes)):
        tcp = [get(node, "tcp", dict) for node in nodes]
        sent = sum(get(one, "segments") or 0 for one in tcp)
        again = sum(get(one, "retransmits") or 0 for one in tcp)
        if sent and again > LOSSY * sent and over_tcp and not healthy:
            says.append(
                f"TCP sent {again / sent:.2%} of its segments again {when} ({again:,.0f} of "
                f"{sent:,.0f}, counted): packets are lost on the way."
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
            meant = ON_ROCE if run.network.transport == "roce" else ""
            says.append(f"Errors counted {when}: {', '.join(found)}{meant}.")
    return says
