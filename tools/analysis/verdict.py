"""The verdict on a run: what bounds it, and which share of its stated rate the link delivered.

A verdict says what it rests on: measured (the split of a step, the probe, counters of bytes and
errors), NCCL's word (its debug text), or the model in projection.py.
"""

import math
from dataclasses import dataclass, field

from analysis.advice import (
    DELIVERS,
    FALLEN_GBPS,
    IN_PART,
    is_fallen,
    nccl_advice,
    next_checks,
    only_sockets,
    tunnel_of,
)
from analysis.logs import get, objects
from analysis.nccl import REASONS, message
from analysis.network import ADAPTERS
from analysis.projection import can_model, payload_rate, ring_bytes, sent_bytes
from analysis.runs import usual_times
from analysis.words import in_unit, megabytes, ms, part, rate

# TCP that sends this share of its segments again is slowed by it: its rate falls with the root of
# the loss (Mathis et al., Computer Communication Review 27(3), 1997).
LOSSY = 0.01
# These rise on sound links too: frames of protocols that nobody listens to, waiting for credit.
HARMLESS = ("rx_dropped", "port_xmit_wait")
LOST_ON_ROCE = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
HEALTHY = 0.5  # a link below this share of its stated speed is not the link that was meant
TOLERANCE = 0.10  # a time this far outside the model's range still counts as inside
LINK_FREE_SHARE = 0.10  # an all-reduce below this share of a step cannot be what bounds it

FALLEN = "Likely cause: a port that negotiated 100 Mb/s, or a rate limit."


@dataclass
class Verdict:
    """`bound`: link, overlap (communication, but not by the wire), compression (PowerSGD's, and
    communication), input, compute, slow rank, not the link, unknown.
    """

    bound: str = "unknown"
    says: list = field(default_factory=list)  # what bounds it, then its network, then the rest
    checks: list = field(default_factory=list)  # most likely first
    wire_gbps: float | None = None  # by counters, else what the time of an all-reduce implies


def judge(run):
    """The Verdict on a run whose work_s is set."""
    if not run.complete:
        start = "" if run.log.failed else "incomplete, not scored: "
        says = [f"{start}{'; '.join(run.problems)}."]
        says += [f"Timed out: {work}." for work in get(run.log.nccl, "timeouts", list)]
        return Verdict(says=says, checks=nccl_advice(run))
    trouble = say_trouble(run)
    if run.step_s is None:
        text = "No step time: give --steps (or images, epochs, batch)."
        if run.steps and run.steps <= run.start_step:
            text = "It was resumed at its end, and made no step."
        return Verdict(says=[text, *say_network(run), *trouble])
    verdict = Verdict()
    if can_model(run) and run.steps:
        took_s = all_reduce_s(run)
        verdict.wire_gbps = run.wire_gbps or (took_s and ring_bytes(run) * 8e-9 / took_s)
    (judge_split if run.has_split else judge_whole)(verdict, run)
    verdict.says += [*say_network(run), *trouble]
    if run.straggler is not None:
        verdict.says.append(say_slow_rank(run))
    gbps = verdict.wire_gbps or 0.0
    slow = verdict.bound == "link" and 0 < gbps < HEALTHY * (run.link_gbps or 0)
    verdict.checks = next_checks(run, verdict.bound, gbps if slow else None, bool(trouble))
    return verdict


def all_reduce_s(run):
    """How long a step's all-reduce took: by the probe, or in a log without a split all that is
    beyond the work. Exposed time does not say it: it counts waiting, and not what was hidden.
    """
    if run.has_split and (not run.network or run.network.transport == "local"):
        return None
    if run.probe_s or run.has_split:
        return run.probe_s
    excess_s = run.step_s - run.work_s
    return excess_s if excess_s > 0.02 * run.step_s else None


# --- What bounds it ------------------------------------------------------------------------------


def judge_split(verdict, run):
    """A log with data wait, compute and exposed communication: the largest part bounds."""
    parts = {"link": run.exposed_s, "input": run.data_s, "compute": run.compute_s}
    if run.straggler is not None:
        parts = parts_around_slow_rank(run)
    verdict.bound = max(parts, key=parts.get)
    link = name_link(run)
    if run.exposed_name != "exposed communication":
        link = "PowerSGD's compression and communication, of which no log tells how much is which"
        if verdict.bound == "link":
            verdict.bound = "compression"
    elif run.probe_s and run.probe_s < parts["link"] / 2:
        # Exposed time far above the all-reduce's own is not the wire's: on a CPU compute and
        # network share the cores, and ranks wait for each other.
        link = f"communication, but not by the wire (an all-reduce alone takes {ms(run.probe_s)})"
        if verdict.bound == "link":
            verdict.bound = "overlap"
    title = {
        "input": "its input (waiting for images)",
        "compute": "compute",
        "slow rank": f"one slow rank, {run.straggler}, for which the others wait",
    }.get(verdict.bound, link)
    if verdict.bound in ("compute", "input") and parts["link"] > IN_PART * run.step_s:
        title += f", in part by {link}"
    compute, data, exposed = (
        f"{ms(seconds)} ({part(seconds, run.step_s)})"
        for seconds in (run.compute_s, run.data_s, run.exposed_s)
    )
    mean = "" if run.straggler is None else ", mean over the ranks"
    verdict.says.append(
        f"Bound by {title}: of a step of {ms(run.step_s)}, compute is {compute}, data wait "
        f"{data}, {run.exposed_name} {exposed}, as measured{mean}."
    )


def parts_around_slow_rank(run):
    """{part of a step: seconds} on the slow rank's way through it.

    Its exposed time is communication; that of the others is waiting for it as well.
    """
    data, compute, exposed = run.ranks[run.straggler]
    usual = usual_times(run.ranks)
    slow = data + compute - sum(usual)
    return {"slow rank": slow, "link": exposed, "input": usual[0], "compute": usual[1]}


def say_slow_rank(run):
    data, compute, _ = run.ranks[run.straggler]
    return (
        f"Rank {run.straggler} itself works {ms(data + compute)} of a step (data wait {ms(data)}, "
        f"compute {ms(compute)}), the others {ms(sum(usual_times(run.ranks)))}."
    )


def name_link(run):
    if run.nodes == 1:
        return "communication inside its node"
    if not (run.network and run.probe_s):  # nothing shows that the link is what is slow
        return "communication between its nodes"
    if run.network.kind == "ipoib":
        return f"TCP over {run.network.names[0]}, not InfiniBand itself"
    if tunnel := tunnel_of(run):
        return f"communication through {tunnel}"
    trouble = say_trouble(run)
    if any("packets are lost" in text for text in trouble):
        return "its network, which loses packets"
    if run.network.transport == "roce" and any(name in " ".join(trouble) for name in LOST_ON_ROCE):
        return "its network, which loses or reorders packets"
    if through_host_memory(run):
        return "communication between its nodes, which passes through host memory"
    return "its link"


def judge_whole(verdict, run):
    """A log without a split: beside a faster run of its shape, and against its stated link."""
    excess_s, stated = run.step_s - run.work_s, rate(run.link_gbps or 0)
    steps = (run.steps or 0) - run.start_step
    known = can_model(run) and run.link_gbps and steps > 0
    line_s = ring_bytes(run) / (run.link_gbps * 1e9 / 8) if known else math.inf
    tcp_s = ring_bytes(run) / payload_rate(run.link_gbps) if known else math.inf
    says = verdict.says
    if excess_s > run.step_s / 2 and run.nodes != 1:
        verdict.bound = "link"
        says.append(
            "Bound by its link, or by what carried the traffic instead: of its step of "
            f"{ms(run.step_s)}, {part(excess_s, run.step_s)} is time beyond {run.work_from}'s "
            f"whole step of {ms(run.work_s)}."
        )
        if (gbps := verdict.wire_gbps) and not run.probe_s:
            fallen = is_fallen(gbps) and (run.link_gbps or 0) > FALLEN_GBPS
            of = f", {gbps / run.link_gbps:.0%} of the stated {stated}" if run.link_gbps else ""
            says.append(
                f"That implies a wire that ran at {rate(gbps)}{of} ({run.steps:,} steps, a ring, "
                f"no overlap).{f' {FALLEN}' if fallen else ''}"
            )
        if known:
            says.append(say_explained(run, steps, steps * excess_s))
    elif tcp_s < LINK_FREE_SHARE * run.step_s:
        verdict.bound = "not the link"
        says.append(
            f"Not bound by its link: even with no overlap, all-reduces at {stated} take at most "
            f"{steps * tcp_s:,.0f} s of {steps * run.step_s:,.0f} s (model)."
        )
    else:
        says.append("The log does not split a step: what bounds it cannot be told.")
    if known and run.work_from != run.name:
        low_s, high_s = max(run.work_s, line_s), run.work_s + tcp_s
        says.append(say_range(steps * low_s, steps * high_s, steps * run.step_s, stated))
    elif not known and run.nodes != 1:
        says.append("To judge the link: --link_gbps, --parameters, --processes, --nodes.")


def say_explained(run, steps, excess_s):
    """How much of the seconds beyond the faster run's the link explains: as stated, and as a port
    at 100 Mb/s where that is not enough.
    """

    def times(nbytes, speed):
        return in_unit(steps * nbytes / speed, excess_s)

    stated, line, tcp = rate(run.link_gbps), run.link_gbps * 1e9 / 8, payload_rate(run.link_gbps)
    sent = sent_bytes(run)
    ring = sent["a ring"]
    ways = [f"{way} {times(n, line)} and {times(n, tcp)}" for way, n in sent.items()]
    most = "all" if steps * ring / tcp >= excess_s else f"at most {times(ring, tcp)}"
    text = (
        f"Of the {in_unit(excess_s, excess_s)} beyond {run.work_from}'s time, {stated} explains "
        f"{most}: at line rate and at the rate that TCP leaves, {', '.join(ways)} (model, no "
        "overlap)."
    )
    if steps * ring * 8e-9 / excess_s < DELIVERS * FALLEN_GBPS < run.link_gbps:
        text += f" A port that negotiated {rate(FALLEN_GBPS)} would explain "
        text += f"{times(ring, payload_rate(FALLEN_GBPS))}."
    return text


def say_range(low_s, high_s, took_s, stated):
    """What the stated link gives, from all communication hidden to none, and what was measured."""
    shortest, longest, took = (in_unit(seconds, high_s) for seconds in (low_s, high_s, took_s))
    text = f"By the model of a ring, {stated} gives a run of {shortest} (communication fully "
    text += f"hidden) to {longest} (not hidden); measured {took}"
    if took_s < low_s * (1 - TOLERANCE):
        return f"{text}: faster than that; NCCL took a tree, or the traffic went another way."
    if took_s <= high_s * (1 + TOLERANCE):
        return f"{text}: within that."
    times = f"{took_s / high_s:.1f} times the longer of these"
    return f"{text}, {times}: this is not a {stated} result."


# --- The network that carried it -----------------------------------------------------------------


def say_network(run):
    """Which network carried the all-reduces, and what it delivered of what it states."""
    network = run.network
    if not network:
        if not run.log.ours or run.nodes == 1:
            return []
        text = "Which network carried it is not known"
        if not run.probe_s:
            return [f"{text} (no probe of this run)."]
        took = f"the probe's all-reduce took {ms(run.probe_s)} for a step's "
        took += megabytes(run.wire_bytes)
        return [f"{text}: {took}, but no interface that the probe could read moved these bytes."]
    basis = f"by {network.basis}"
    if run.nodes == 1 and network.gbps:
        return [f"Inside one node, over {network.shown}, {basis}: {rate(network.gbps)}."]
    if run.nodes == 1 or network.transport == "local":
        where = "Inside one node" if run.nodes == 1 else "Between nodes"
        if network.transport == "local":
            return [f"{where}, {way_inside(network)}, {basis}: no network is judged."]
        return [f"{where}: no network is judged."]
    says = say_fallback(network)
    if network.transport in ADAPTERS and network.connections:
        direct = f"{network.with_gpudirect} of {network.connections} connections"
        basis += f" (GPUDirect on {direct})"
    if network.over:
        basis += f"; through {', '.join(network.over)} too"
        basis += "" if network.basis == "byte counters" else ", by byte counters"
    if kept := only_sockets(run):
        basis += f", as {kept} keeps NCCL from InfiniBand and RoCE"
    if network.gbps is None:
        return [*says, f"Over {network.way}, {basis}; the log has no counter of its bytes."]
    if network.kind != "ipoib":
        return [*says, f"Over {network.way}, {basis}: {delivered(run)}"]
    text = f"IP over InfiniBand: the probe ran at {rate(network.gbps)} on {network.names[0]}"
    if can := network.stated:  # the kernel states its adapter's rate
        text += f", {network.gbps / can:.0%} of what {network.adapter or 'its adapter'} can do "
        text += f"({rate(can)} stated)"
    text += ", by byte counters"
    if run.setting("backend") == "nccl" and not network.finding:
        text += "; NCCL's text, which would say why, is not in the log"
    return [*says, f"{text}."]


def way_inside(network):
    """Between the GPUs of a node, or of nodes that NVLink joins, as NCCL's text shows it."""
    kinds = set(get(network.finding, "channels", dict))
    if "mnnvl" in kinds:
        return "through NVLink"
    if kinds == {"p2p"}:
        return "from GPU to GPU over NVLink or PCIe"
    if kinds == {"shm"}:
        return "through the host's memory (NCCL's SHM), not from GPU to GPU"
    return "through NVLink, PCIe or memory"


def say_fallback(network):
    """That a faster network was asked for and sockets were used, and why; empty if not so."""
    asked = network.problem("fell_back_to_sockets")
    if not asked:
        return []
    what = "InfiniBand" if "IB" in asked else "A faster network"
    where = ", ".join(network.names) or "an interface that it does not name"
    cause = next(filter(None, map(network.problem, REASONS)), "")
    why = f'because NCCL says "{message(cause)}"' if cause else "and its text does not say why"
    return [f"{what} was asked for; NCCL used sockets over {where}, {why}."]


def through_host_memory(run):
    """Whether an adapter fell short that no connection used from GPU memory (GPUDirect)."""
    network = run.network
    return (
        network
        and network.transport in ADAPTERS
        and network.connections
        and not network.with_gpudirect
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
        if sockets and is_fallen(run.wire_gbps):
            return f"{text}. {FALLEN}"
    elif reached >= DELIVERS:
        text += ": the link delivers"
        if sockets and run.link_gbps <= FALLEN_GBPS:
            text += ", but 100 Mb/s is what its port falls back to with a bad cable"
    if through_host_memory(run):
        text += ". GPUDirect was not used: all bytes passed through host memory, which may be "
        text += "what limits them; the link itself is not shown to be at fault"
    return f"{text}."


def say_trouble(run):
    """What went wrong on the link, by the kernel's counters: sentences, none where nothing did."""
    says = []
    used = [name for network in run.networks for name in network.names]
    probed = objects(run.record("Probe"), "nodes")
    over_tcp = run.network is None or run.network.transport == "sockets"
    healthy = run.wire_gbps and run.link_gbps and run.wire_gbps >= HEALTHY * run.link_gbps
    for when, nodes in (("during the probe", probed), ("during the run", run.traffic)):
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
            says.append(f"Errors counted {when}: {', '.join(found)}.")
    return says
