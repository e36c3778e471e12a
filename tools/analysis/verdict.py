"""The verdict on a run: what bounds it, and which share of its stated rate the link delivered.

A verdict says what it rests on: measured (the split of a step, the probe, counters of bytes and
errors) or NCCL's debug text.
"""

import math
from dataclasses import dataclass, field, replace

from analysis.advice import (
    DELIVERS,
    IN_PART,
    WORTH,
    Advice,
    nccl_advice,
    next_checks,
    only_sockets,
    tunnel_of,
)
from analysis.logs import get, objects
from analysis.nccl import REASONS, message
from analysis.network import ADAPTERS, AS_NCCL, BY_BYTES, carriers, named_by
from analysis.projection import can_model, ring_bytes
from analysis.runs import usual_times
from analysis.words import megabytes, ms, part, rate

# TCP that sends this share of its segments again is slowed by it: its rate falls with the root of
# the loss (Mathis et al., Computer Communication Review 27(3), 1997).
LOSSY = 0.01
# Of RDMA's packets: lost, or in another order, which adaptive routing makes on sound links.
LOST_OF_RDMA = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")
ALIKE = 0.01  # ranks that wait for each other for less of a step show the same figures
HEALTHY = 0.5  # a link below this share of its stated speed is not the link that was meant
TOO_FAST = 1.05  # above this share what it states is wrong
# The training's own bytes may be so much less or more than those of its gradients: headers and a
# node's small traffic are counted, too.
LEAST_SENT, MOST_SENT = 0.97, 1.10


@dataclass
class Verdict:
    """`bound`: link, overlap (communication, most of it beyond an all-reduce alone), compression
    (PowerSGD's, and communication), input, compute, slow rank, unknown.
    """

    bound: str = "unknown"
    says: list = field(default_factory=list)  # what bounds it, then its network, then the rest
    advice: list = field(default_factory=list)  # Advice on parts of a step, the costliest first


def judge(run):
    """The Verdict on a run."""
    if not run.complete:
        start = "" if run.log.failed else "incomplete, not scored: "
        says = [f"{start}{'; '.join(run.problems)}."]
        says += [f"Timed out: {work}." for work in get(run.log.nccl, "timeouts", list)]
        checks = nccl_advice(run)
        return Verdict(says=says, advice=[Advice("", None, checks)] if checks else [])
    elsewhere, own = own_bytes(run)
    if elsewhere:  # the probe's link is not the training's
        run = replace(run, networks=[], link_gbps=None, probe_s=None)
    trouble, harmless = say_trouble(run)
    if not run.has_split:
        text = "The log does not split a step: what bounds it cannot be told."
        if run.step_s is None:
            text = "The log states no step time: only losses and wall times can be compared."
        if run.steps and run.steps <= run.start_step:
            text = "It was resumed at its end, and made no step."
        return Verdict(says=[text, *say_network(run), *trouble, *harmless])
    parts = parts_of_step(run)
    says = [say_split(run, parts), *say_network(run), *own, *trouble, *harmless]
    if run.straggler is not None:
        says.append(say_slow_rank(run, parts["slow rank"]))
    gbps = run.wire_gbps or 0.0
    slow = 0 < gbps < HEALTHY * (run.link_gbps or 0) and not size_limits(run)
    advice = next_checks(run, parts, gbps if slow else None, bool(trouble))
    return Verdict(max(parts, key=parts.get), says, advice)


# --- What bounds it ------------------------------------------------------------------------------


def parts_of_step(run):
    """{part: seconds}: together a step at most. The parts of a slow rank are those that a usual
    rank has too, and its excess.

    They are those of the slowest rank: its exposed time, the least, is the link's. What a rank has
    above it is the wait for the slowest.
    """
    mean = run.data_s, run.compute_s, run.exposed_s
    data, compute, exposed = min(run.ranks.values(), key=lambda times: times[2], default=mean)
    # Exposed time far above the all-reduce's own is not the wire's: on a CPU compute and network
    # share the cores, and ranks wait for each other.
    kind = "overlap" if run.probe_s and run.probe_s < exposed / 2 else "link"
    if run.setting("grad_compression") == "powersgd":
        kind = "compression"
    if run.straggler is None:
        return {kind: exposed, "input": data, "compute": compute}
    own = run.ranks[run.straggler][:2]
    data, compute = map(min, own, usual_times(run.ranks))
    excess = sum(own) - data - compute
    return {"slow rank": excess, kind: exposed, "input": data, "compute": compute}


def say_split(run, parts):
    """What bounds it: the largest part of a step."""
    kind = next(key for key in ("link", "overlap", "compression") if key in parts)
    titles = {
        "input": "its input (waiting for images)",
        "compute": "compute",
        "slow rank": f"one slow rank, {run.straggler}, for which the others wait",
        "link": name_link(run),
        "overlap": "communication, most of it beyond what an all-reduce alone takes "
        f"({run.about}{ms(run.probe_s or 0)} by the probe)",
        "compression": "PowerSGD's compression and communication, of which no log tells how much "
        "is which",
    }
    bound = max(parts, key=parts.get)
    title = titles[bound]
    if bound in ("compute", "input") and parts[kind] > IN_PART * run.step_s:
        title += f", in part by {titles[kind]}"
    shown_s = run.compute_s, run.data_s, run.exposed_s
    wait_s = run.exposed_s - parts[kind]
    more_s = parts[kind] - (run.probe_s or math.inf)
    wait, more = (f"{ms(seconds)} ({part(seconds, run.step_s)})" for seconds in (wait_s, more_s))
    waits = wait_s > WORTH * run.step_s
    alike = wait_s < ALIKE * run.step_s
    waited, where = "", ""
    if run.straggler is not None:
        where = ", mean over the ranks"
        waited = f", {wait} of it the wait for the slowest rank" if waits else ""
    elif not alike:
        shown_s = parts["compute"], parts["input"], parts[kind]
        where = " on the slowest rank"
        where += f"; the others wait for it, {wait} in the mean over all ranks" if waits else ""
    if kind == "link" and more_s > WORTH * run.step_s:
        waited += f", {more} of it beyond an all-reduce alone, which the probe does not explain"
    compute, data, exposed = (
        f"{ms(seconds)} ({part(seconds, run.step_s)})" for seconds in shown_s
    )
    return (
        f"Bound by {title}: of a step of {ms(run.step_s)}, compute is {compute}, data wait "
        f"{data}, {run.exposed_name} {exposed}{waited}, as measured{where}."
    )


def say_slow_rank(run, costs_s):
    data, compute, _ = run.ranks[run.straggler]
    return (
        f"Rank {run.straggler} itself takes {ms(data + compute)} of a step (data wait {ms(data)}, "
        f"compute {ms(compute)}), the others {ms(sum(usual_times(run.ranks)))}: it costs "
        f"{ms(costs_s)}, {part(costs_s, run.step_s)} of the step."
    )


def name_link(run):
    if run.nodes == 1:
        return "communication inside its node"
    if not (run.wire_gbps and run.probe_s):  # nothing shows that the link is what is slow
        return "communication between its nodes"
    if run.network.kind == "ipoib":
        return f"TCP over {run.network.names[0]} (IP over InfiniBand)"
    if tunnel := tunnel_of(run):
        return f"communication through {tunnel}"
    trouble, _ = say_trouble(run)
    if run.link_gbps and any("packets are lost" in text for text in trouble):
        return "its network, which loses or delays packets"
    if run.network.transport == "roce" and any(name in " ".join(trouble) for name in LOST_OF_RDMA):
        return "its network, which loses or reorders packets"
    if through_host_memory(run):
        return "communication between its nodes, which passes through host memory"
    return "its link"


# --- The network that carried it -----------------------------------------------------------------


def say_network(run):
    """Which network carried the all-reduces, and what it delivered of what it states."""
    network = run.network
    if not network:
        if not run.log.ours or run.nodes == 1 or own_bytes(run)[1]:
            return []
        text = "Which network carried it is not known"
        if run.probe_s:
            text += ": no interface that the probe could read moved its all-reduce"
            return [f"{text}{of_probe(run)}."]
        text += " (no probe of this run)."
        if run.traffic:
            return [text]
        text += " On node 0 `python tools/counters.py 2>&1 | tee -a LOG` before and after it tells"
        if run.setting("backend") == "nccl":
            text += ", as does `export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV` before it"
        return [f"{text}."]
    basis = network.basis
    if run.nodes == 1 and network.gbps:
        return [f"Inside one node, over {network.shown}, {basis}: {rate(network.gbps)}."]
    if run.nodes == 1 or network.transport == "local":
        where = "Inside one node" if run.nodes == 1 else "Between nodes"
        if network.transport == "local":
            return [f"{where}, {way_inside(network)}, {basis}: no network is judged."]
        return [f"{where}: no network is judged."]
    says = say_fallback(network)
    if network.transport != "sockets" and network.connections:
        direct = f"{network.with_gpudirect} of {network.connections} connections"
        basis += f" (GPUDirect on {direct})"
    if network.over:
        named = any(name in named_by(network.finding) for name in network.over)
        how = f", {AS_NCCL}" if named else f", {BY_BYTES}" if basis != BY_BYTES else ""
        basis += f"; through {', '.join(network.over)} too{how}"
    if kept := only_sockets(run):
        basis += f", as {kept} keeps NCCL from InfiniBand and RoCE"
    if network.gbps is None:
        return [*says, f"Over {network.way}, {basis}; the log has no counter of its bytes."]
    return [*says, f"Over {network.way}, {basis}: {delivered(run)}"]


def own_bytes(run):
    """(whether others than the probe's carried the training itself, a sentence on its bytes), by
    the counters before and after it.

    Each step sends the gradients, in the script a blank pass before them, too: on two nodes once
    in a tree, as ring_bytes says in a ring; on more nodes up to twice in a tree. Rank 0 also sends
    its model.
    """
    steps, hosts = run.steps or 0, run.setting("hosts", list)
    inside = run.network and run.network.transport == "local"
    unknown = run.partial or run.setting("grad_compression") == "powersgd"
    if not can_model(run) or steps < 1 or inside or unknown:
        return False, []
    most = ring_bytes(run) if run.nodes == 2 else 2 * run.wire_bytes
    model, says = 4 * (run.parameters or 0), []
    for node in run.traffic:
        host = node["host"]
        links = [link for link in node["interfaces"] if link["kind"] != "loopback"]
        of_node = [network for network in run.networks if network.host in ("", host)]
        names = [name for network in of_node for name in network.names]
        names = names or [link["name"] for link in carriers(links, {}, sent)]
        total = sum(sent(link) for link in links if link["name"] in names)
        low = LEAST_SENT * (steps * run.wire_bytes + (model if hosts[:1] == [host] else 0))
        high = MOST_SENT * ((steps + 1) * most + model)
        text = f"{megabytes(total / steps)} a step over {', '.join(names) or 'any interface'}"
        expected = f"{megabytes(low / steps)} to {megabytes(high / steps)}"
        if total < low:
            others = [link for link in links if link["name"] not in names]
            rest = [
                f"{link['name']} sent {megabytes(sent(link) / steps)}"
                for link in others
                if 2 * sent(link) > low - total
            ]
            unseen = "no counter here shows the rest"
            if run.setting("backend") == "nccl":
                unseen += " (NCCL's shared memory, if both are containers of one machine?)"
            text += f", less than the {expected} expected: {', '.join(rest) or unseen}"
            text += "; the probe's rate is not the training's" if run.probe_s else ""
            says.append((0, f"During the training {host} sent {text}."))
        elif total > high:
            text += f", more than the {expected} expected: other traffic (`ss -tnp` lists its "
            text += "connections), or more all-reduces than one a step"
            says.append((1, f"During the training {host} sent {text}."))
        else:
            text += f", as expected: {expected} with headers, on {host}"
            says.append((2, f"The training itself sent {text}."))
    return 0 in dict(says), [text for _, text in sorted(says)[:1]]


def sent(link):
    return get(link, "tx_bytes") or 0


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


def of_probe(run):
    """Bytes and time of the probe's all-reduce: " of 44.9 MB in 376 ms"."""
    size = get(run.record("Probe"), "all_reduce_bytes")
    took = size and run.probe_s and ms(run.probe_s * size / run.wire_bytes)
    return f" of {megabytes(size)} in {took}" if took else ""


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
    return times * (run.wire_gbps or 0) > HEALTHY * (run.link_gbps or 0)


def delivered(run):
    """What the probe's all-reduce reached of the stated speed, and what that shows."""
    text = f"the probe's all-reduce{of_probe(run)} ran at {rate(run.wire_gbps)} on the wire"
    if not run.link_gbps:
        virtual = run.network.virtual
        why = f"{virtual}, is not judged" if virtual else "its stated speed is not known"
        return f"{text}; {why} (--link_gbps, here or of series.py, gives the link's)."
    reached, stated = run.wire_gbps / run.link_gbps, rate(run.link_gbps)
    text += f", {reached:.0%} of the {run.rate_is} {stated}"
    lowest = run.link_gbps == run.network.stated and run.rate_is == "stated"
    if lowest and run.link_gbps < max(each.stated or 0 for each in run.networks):
        text += f" of {run.network.host}"
    if reached > TOO_FAST:
        return f"{text}, more than {run.rate_is}: the {run.rate_is} rate is wrong."
    if reached < HEALTHY and size_limits(run):
        return f"{text}: the probe's size may limit the answer; nccl-tests with 1 GiB tells."
    if reached < HEALTHY:
        text += f": this is not a {stated} result"
    elif reached >= DELIVERS:
        text += ": the link delivers"
    if through_host_memory(run):
        text += ". GPUDirect was not used: all bytes passed through host memory, which may be "
        text += "what limits them; the link itself is not shown to be at fault"
    return f"{text}."


def say_trouble(run):
    """Sentences by the kernel's counters: (what went wrong on the link, what did no harm)."""
    wrong, harmless = [], []
    used = [name for network in run.networks for name in network.names]
    probed = objects(run.record("Probe"), "nodes")
    over_tcp = run.network is None or run.network.transport == "sockets"
    healthy = run.wire_gbps and run.link_gbps and run.wire_gbps >= HEALTHY * run.link_gbps
    for when, nodes in (("during the probe", probed), ("during the run", run.traffic)):
        tcp = [get(node, "tcp", dict) for node in nodes]
        sent = sum(get(one, "segments") or 0 for one in tcp)
        again = sum(get(one, "retransmits") or 0 for one in tcp)
        if sent and again > LOSSY * sent and over_tcp and not healthy:
            unknown = "" if run.link_gbps else "; what that costs is not known"
            wrong.append(
                f"TCP sent {again / sent:.2%} of its segments again {when} ({again:,.0f} of "
                f"{sent:,.0f}, counted): packets are lost, or come late{unknown}."
            )
        errors, counted = [], []
        for node in nodes:
            for link in objects(node, "interfaces"):
                for key in get(link, "errors", dict) if link.get("name") in used else ():
                    if count := get(link["errors"], key):
                        of = f"{key} {count:,.0f} on {link['name']} of {get(node, 'host', str)}"
                        (counted if healthy and key in LOST_OF_RDMA else errors).append(of)
        if errors:
            wrong.append(f"Errors counted {when}: {', '.join(errors)}.")
        if counted:
            harmless.append(f"Counted {when}, without harm to its rate: {', '.join(counted)}.")
    return wrong, harmless
