"""The verdict on a run, in three lines: what its step is made of, what limits it, and what is
unusual; the probe's network, and which share of the stated rate that delivered; whether the
training's bytes went there.

All is measured (the split of a step, the probe, counters of bytes), or quoted from NCCL.
"""

import re
from dataclasses import replace

from analysis.advice import network_words, next_steps
from analysis.figures import usual_times
from analysis.nccl import asked_for, quotes, reason
from analysis.network import ADAPTERS, carriers
from analysis.words import megabytes, ms, rate

MOST_WARNINGS = 3  # of a complete run
WORTH = 0.05  # below this share of a step, a part of it is not told
IN_PART = 0.2  # above this share of a step, communication limits it in part
USUAL = 0.8  # of the stated rate, from here on headers and start-up account for the rest
POOR = 0.5  # below this share "only"
TOO_FAST = 1.05  # above this share what it states is wrong
ROUNDED = 0.01  # of a step: its parts add up to it but for this
LOSSY = 0.01  # TCP that sends this share of its segments again is told
FALLEN_GBPS = 0.1  # an Ethernet port falls back to this where two pairs of its cable are bad
UNSEEN = "no counter shows the rest"  # of the training's bytes
OWN_CORE = 0.8  # a process that computes has at least this much CPU time, if the core is its own
# The training's own bytes may be so much less or more than those of its gradients: headers and a
# node's small traffic are counted, too.
LEAST_SENT, MOST_SENT = 0.97, 1.10


def judge(run):
    """(what is said of a run, line by line; what to do next) with the step first, then network,
    training and NCCL's warnings.
    """
    finding = run.log.nccl
    warned = quotes(finding, failed=not run.complete)
    if not run.complete:
        start = "" if run.log.failed else "incomplete, not scored: "
        quoted = f'; NCCL: "{reason(finding)}"' if reason(finding) else ""
        says = [start + "; ".join(run.problems) + quoted]
        if run.network:
            whose = "of the probe" if run.network.host else "that NCCL chose"
            unused = ", ".join(run.network.finding.get("unused", []))
            found = f"; it found {unused}" if unused else ""
            rate_known = "" if run.network.gbps else "; at what rate is not known"
            says.append(f"network {whose}: {run.network.way}{found}{rate_known}")
        says += [f"timed out: {work}" for work in finding.get("timeouts", [])]
        says += warned
        if quoted or finding.get("timeouts"):
            says += [f"meaning: {text}" for text in finding.get("means", [])]
        words = {"failed", run.network.transport if run.network else ""} if warned else set()
        return says, next_steps(run, words)
    elsewhere, own = own_bytes(run)
    says = [*say_network(run, own, elsewhere), *own, *warned[:MOST_WARNINGS]]
    if elsewhere:  # the probe's link is not the training's
        run = replace(run, networks=[], link_gbps=None, probe_s=None)
    if not run.has_split:
        return ["its log does not split a step: what limits it cannot be told", *says], []
    wrong, words = contradiction(run)
    if wrong:
        first = f"{say_parts(run)}: its figures contradict each other: {wrong}"
        return [first, *says], next_steps(run, words)
    parts = parts_of_step(run)
    bound = max(parts, key=parts.get)
    if bound == "compute" and parts.get("slow-rank", 0) > IN_PART * run.step_s:
        bound = "slow-rank"  # one rank can be fixed
    in_part = bound == "link" or parts["link"] > IN_PART * run.step_s
    unusual = find_unusual(run, elsewhere, in_part)
    if "slow-rank" in parts and bound != "slow-rank":
        longer = f"takes {ms(parts['slow-rank'])} longer than the others'"
        unusual.append(("slow-rank", f"rank {run.straggler}'s own work {longer}", ()))
    first = f"{say_parts(run)}: {say_limit(run, parts, bound, in_part)}"
    first += "".join(f"; unusual: {what}" for _, what, _ in unusual[:1]) + say_crowd(run)
    words = words_of_step(run, bound, in_part) - ({"unmoved"} if elsewhere == UNSEEN else set())
    words |= {word for word, *_ in unusual} | ({"unusual"} if unusual else set())
    marked = next((place for *_, place in unusual if place), ())
    return [first, *says], next_steps(run, words, *marked)


# --- What limits it ------------------------------------------------------------------------------


def parts_of_step(run):
    """{part: seconds}, together a step: means over the ranks. With a slow rank they are those that
    a usual rank has, and its excess, which the others wait for.
    """
    if run.straggler is None:
        wait = run.exposed_s - run.link_s
        return {"link": run.link_s, "wait": wait, "input": run.data_s, "compute": run.compute_s}
    own = run.ranks[run.straggler][:2]
    data, compute = map(min, own, usual_times(run.ranks))
    excess = sum(own) - data - compute
    return {"slow-rank": excess, "link": run.link_s, "input": data, "compute": compute}


def contradiction(run):
    """(which figures of a run cannot all be right, or nothing; words of advice.py)"""
    for one in run.repeats or [run]:
        total_s = one.data_s + one.compute_s + one.exposed_s if one.has_split else 0
        if total_s and abs(total_s - one.step_s) > ROUNDED * one.step_s:
            return f"the parts add up to {ms(total_s)}", set()
    if not run.link_gbps or run.nodes == 1 or (run.network and run.network.transport == "local"):
        return "", set()
    link = f"a link whose {run.rate_is} rate is {rate(run.link_gbps)}"
    if run.share and run.share > TOO_FAST:
        return f"the probe moved {rate(run.wire_gbps)} over {link}", {"wrong-rate"}
    sent_gbps = 8e-9 * (run.wire_bytes or 0) / run.step_s
    if sent_gbps > TOO_FAST * run.link_gbps:
        text = f"to send {megabytes(run.wire_bytes)} in such a step takes {rate(sent_gbps)}"
        return f"{text}, over {link}", {"wrong-rate"}
    return "", set()


def say_parts(run):
    def show(seconds):
        return f"{1000 * seconds:,.{0 if run.step_s >= 0.1 else 1}f}"

    wait_s = run.exposed_s - run.link_s
    text = f"a step of {show(run.step_s)} ms: {show(run.compute_s)} computing, "
    text += f"{show(run.data_s)} waiting for images, {show(run.exposed_s)} exposed communication "
    text += f"({run.exposed_s / run.step_s:.0%}"
    if wait_s > WORTH * run.step_s:
        text += f", {show(wait_s)} of it waiting for other ranks"
    if is_beyond(run):
        text += f", {show(run.link_s - run.probe_s)} of it beyond an all-reduce alone"
    return text + ")"


def say_limit(run, parts, bound, in_part):
    text = {
        "link": f"{name_link(run)} limits it",
        "wait": "its ranks wait for each other",
        "input": "waiting for images limits it",
        "compute": "computing limits it",
        "slow-rank": f"rank {run.straggler} limits it, whose own work takes "
        f"{ms(parts.get('slow-rank', 0))} longer than the others'",
    }[bound]
    return text + (", communication in part" if in_part and bound in ("compute", "input") else "")


def is_beyond(run):
    return bool(run.probe_s) and run.link_s - run.probe_s > WORTH * run.step_s


def name_link(run):
    if run.nodes == 1:
        return "communication inside its node"
    # Far above the all-reduce's own time it is not the wire's: on a CPU computing and network
    # share the cores. Only a link that delivers what it states is known to be what limits.
    if run.probe_s and run.probe_s >= run.link_s / 2 and run.share and run.share >= USUAL:
        return "its link"
    return "communication"


def say_crowd(run):
    """That a CPU's cores were not the processes' own; empty where nothing shows it."""
    threads, cores = run.setting("threads", 0), run.setting("node_cores", 0)
    each = (run.processes or 0) // (run.nodes or 1)
    if not run.on_cpu or run.compute_s < IN_PART * run.step_s:
        return ""
    if 0 < cores < each * threads:
        return f"; {each} processes with {threads} threads each on {cores} cores"
    if run.cpu_s is not None and run.cpu_s < OWN_CORE * run.compute_s:
        return f"; others may have used its cores: it got {ms(run.cpu_s)} of CPU time a step"
    return ""


def words_of_step(run, bound, in_part):
    words = {bound, "cpu" if run.on_cpu else "gpu", run.setting("precision")}
    words |= {f"sends-{run.setting('grad_compression')}", run.setting("backend")}
    words |= {"compiled"} if run.record("Run").get("compile") else set()
    words |= {"crowded"} if say_crowd(run) else set()
    if run.straggler is not None:
        data, compute, _ = run.ranks[run.straggler]
        usual_data, usual_compute = usual_times(run.ranks)
        words |= {"images"} if data - usual_data > compute - usual_compute else set()
    if in_part:
        words |= {"communication"} | ({"beyond"} if is_beyond(run) else set())
        if run.nodes == 1:
            words.add("inside")
        else:
            words |= network_words(run) | ({"small"} if size_limits(run) else set())
            words |= {"again"} if run.network and sent_again(run) else set()
    return words


def find_unusual(run, elsewhere, in_part):
    """What was measured that is unusual: (word of advice.py, a few words, place), with a place of
    (port, PCI address, nodes), or ().

    Without `in_part`, where the network hardly matters, only what is wrong in any case.
    """
    network, found = run.network, []
    if asked := was_asked(run):
        found.append(("asked", f"sockets, though {asked}", ()))
    if elsewhere not in ("", UNSEEN):
        found.append(("unmoved", elsewhere, ()))
    delivers = run.share and run.share >= USUAL
    marked = {}  # -> nodes
    for host, facts in run.facts.items() if run.nodes != 1 else ():
        for row in facts["rows"]:
            for word, mark in row["marks"].items():
                if word != "pcie" or not delivers:
                    key = word, row["port"], row["device"], mark
                    marked.setdefault(key, []).append(host)
    for (word, port, slot, mark), hosts in marked.items():
        nodes = " and ".join(hosts)
        found.append((word, f"{port} of {nodes} {mark}", (port, slot, nodes)))
    if not network or not in_part or run.nodes == 1:
        return found
    made, direct, why = gpudirect(run)
    if made and (why or not direct):  # by default a GPU without NVLink uses it for one direction
        far = "far-gpu" if "distance" in why else "no-gpudirect"
        found.append((far, f"GPUDirect on {direct} of {made} connections", ()))
    rates = {one.stated for one in run.networks if one.stated}
    fallen = network.stated and network.stated <= FALLEN_GBPS * len(network.names)
    if len(rates) > 1 or (fallen and network.transport == "sockets"):
        text = f"{network.listed} of {network.host} states only {rate(min(rates))}"
        found.append(("slow-port", text, ()))
    if run.share and not delivers and not size_limits(run):
        whose = "given" if run.rate_is == "given" else "port's"
        found.append(
            ("low", f"{run.share:.0%} of the {whose} {rate(run.link_gbps)} delivered", ())
        )
    if (again := sent_again(run)) and not delivers:
        found.append(("again", again, ()))
    return found


# --- The network that carried it -----------------------------------------------------------------


def say_network(run, own, elsewhere):
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
    if elsewhere:
        if elsewhere == UNSEEN:
            return [f"network: in the probe {network.way}, in the training not known"]
        says = f"network: in the training not the probe's {network.way}: {elsewhere}"
        return [f"{says}; at what share of its rate is not known"]
    text, whose = f"network: {network.way}", "probe" if network.host else "training"
    if network.gbps:
        size = run.record("Probe").get("all_reduce_bytes")
        text += f", {rate(network.gbps)} in the probe's all-reduce of {megabytes(size or 0)}"
        text += say_share(run)
    else:
        text += f" in the {whose}, no counter shows at what rate"
    made, direct, why = gpudirect(run)
    if made:
        text += f"; GPUDirect on {direct} of the {whose}'s {made} connections"
        text += f' ("{why}")' if why else ""
    elif network.transport in ADAPTERS:
        text += "; GPUDirect: not known"
    unused = network.finding.get("unused", [])
    if unused and network.finding.get("devices", []):
        text += f"; {len(unused)} more adapters that NCCL found are not used"
    said = network.finding.get("no_network", [])
    if was_asked(run) and said:
        text += f'; NCCL says "{said[0]}"'
    again = sent_again(run)
    return [text + (f"; {again}" if again else "")]


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
    if run.share >= USUAL:
        return f": {share}"
    if size_limits(run):
        return f": {share}, but so few bytes say little of so fast a link"
    if run.share >= POOR:
        return f": {share}, less than such a link usually delivers"
    return f": only {share}"


def gpudirect(run):
    """(connections that leave a node, those with GPUDirect, NCCL's line that says why not)"""
    if run.network.transport not in ADAPTERS:  # the slowest node's: the others wait for it
        return 0, 0, ""
    findings = [one.finding for one in run.networks if one.transport in ADAPTERS]
    made = sum(finding.get("channels", {}).get("network", 0) for finding in findings)
    direct = sum(finding.get("gpudirect") or 0 for finding in findings)
    reasons = [finding.get("no_gpudirect", "") for finding in findings]
    return made, direct, next(filter(None, reasons), "")


def was_asked(run):
    """Who asked for an adapter, a variable or the run's name, where sockets were used."""
    if not run.network or run.network.transport != "sockets" or run.nodes == 1:
        return ""
    names = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA")
    asked = {name: run.env(name) for name in names} | run.network.finding.get("asked", {})
    if variable := asked_for(asked):
        return f"{variable} was set"
    named = re.search(r"(?i)infiniband|roce|\befa|\bib\b", run.name)
    return f"the run is called {run.name}" if named else ""


def sent_again(run):
    """What TCP sent again, in the probe or in the training."""
    probed = run.record("Probe").get("nodes", [])
    for when, nodes in (("probe", probed), ("training", run.traffic)):
        tcp = [node.get("tcp") or {} for node in nodes]
        sent = sum(one.get("segments", 0) for one in tcp)
        again = sum(one.get("retransmits", 0) for one in tcp)
        if again > LOSSY * sent > 0 and run.network.transport == "sockets":
            return f"TCP sent {again / sent:.1%} of its segments again in the {when}"
    return ""


WAYS = {
    "mnnvl": "NVLink between the nodes",
    "p2p": "from GPU to GPU over NVLink or PCIe",
    "shm": "through the host's memory (NCCL's SHM), not from GPU to GPU",
}


def way_inside(network):
    """Between the GPUs of a node, or of nodes that NVLink joins, as NCCL's text shows it."""
    if network.transport != "local":
        return "one node" + (f", over {network.listed}" if network.gbps else "")
    kinds = network.finding.get("channels", {})
    return ", ".join(way for kind, way in WAYS.items() if kind in kinds)


def size_limits(run):
    """Whether the probe's all-reduce is too small to show what the link delivers: what its largest
    size has more than the one before it went at half of the stated rate.
    """
    sizes = run.record("Probe").get("sizes", [])[-2:]
    points = [(size["bytes"], size["ms"]) for size in sizes]
    if not run.share or run.share >= USUAL or len(points) < 2:
        return False
    (small, quick), (large, slow) = points
    if small >= large or quick >= slow:
        return False
    times = (large - small) / large * slow / (slow - quick)
    return times * run.share > POOR


# --- The training's own bytes --------------------------------------------------------------------


def own_bytes(run):
    """(which others than the probe's carried the training itself, if they did, or UNSEEN; a line
    on its bytes), by the counters before and after it.

    Each step sends the gradients, in the script a blank pass before them, too: on two nodes once
    in a tree, as ring_bytes says in a ring; on more nodes up to twice in a tree. Rank 0 also sends
    its model.
    """
    steps, hosts = run.steps or 0, run.setting("hosts", [])
    ways = run.network.finding.get("channels", {}) if run.network else {}
    inside = "mnnvl" in ways or (run.network and run.network.transport == "local")
    known = run.has_split and run.wire_bytes and run.processes and (run.nodes or 0) > 1
    if not known or steps < 1 or inside or run.partial:
        return "", []
    if not run.traffic:
        by_nccl = run.network and not run.network.host
        so = "" if by_nccl else ", so its network is not known"
        return "", [f"training: its bytes were not counted{so}"]
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
            seen = f"{', '.join(rest)} a step on {host}" if rest else UNSEEN
            text += f", less than {expected}: {', '.join(rest) or UNSEEN}"
            says.append((0 if rest else 1, text, seen))
        elif total > high:
            more = f"{text}, more than {expected}: other traffic, or more all-reduces"
            says.append((2, more, ""))
        else:
            says.append((3, f"{text}, as its gradients need, on {host}", ""))
    worst, text, elsewhere = min(says)
    alike = sum(order == worst for order, *_ in says)
    text += f"; alike on {alike} of {len(says)} nodes" if len(says) > 1 else ""
    unseen = (run.nodes or 0) - len(run.traffic)
    if unseen > 0:
        text += f"; the counters of {unseen} other node{'s' * (unseen > 1)} were not seen"
    return elsewhere, [text]


def ring_bytes(run):
    """Bytes that a node sends in each direction in an all-reduce of a step's gradients: a ring's.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009. NCCL may take a tree
    instead, which on two nodes sends wire_bytes.
    """
    return 2 * (run.processes - 1) / run.processes * run.wire_bytes


def sent(link):
    return link["tx_bytes"]
