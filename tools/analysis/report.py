"""The report of a comparison: what differs and what that is made of, a few lines on each run,
checks that fail; then tables. Facts alone: nothing says what a network should do.
"""

import os
from pathlib import Path
from statistics import median
from urllib.parse import quote

from analysis import kernel, nccl
from analysis.network import Network, carriers, digits, megabytes, ms, nccl_words, rate
from analysis.runs import (
    ENOUGH,
    differ,
    parts_of,
    settings_that_differ,
    slow_rank,
    wrong_sum,
)

LEAST_WIRE, MOST_WIRE = 0.9, 2.2  # wire rate over size by time: a tree's is about 1, a ring's to 2
LEAST_SENT = 0.9  # of the training's gradients; below it they went elsewhere
LEGEND = (
    "Exposed communication: the time of a step in which a rank (a process) does not compute, but "
    "sends, receives or waits. link: what it takes on the rank that waits least; waiting for "
    "ranks: what the others wait longer, for slower ranks. docs/networks.md explains both."
)

# --- Figures in words ----------------------------------------------------------------------------


def duration(seconds):
    """Seconds as the demo's log writes them: 4h 8m 59.79s."""
    minutes, rest = divmod(round(seconds, 2), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{hours}h " if hours else ""
    return text + (f"{minutes}m " if hours or minutes else "") + f"{rest:.2f}s"


def shown(run, figure, show):
    """563 ms (551 to 570): a figure with the range of its repeats; empty if it is not known."""
    if figure not in run.figures:
        return ""
    values = run.values(figure)
    text, low, high = show(run.figures[figure]), show(min(values)), show(max(values))
    if low == high:
        return text
    unit = text.partition(" ")[2]
    if unit and low.endswith(f" {unit}") and high.endswith(f" {unit}"):
        low, high = low.removesuffix(f" {unit}"), high.removesuffix(f" {unit}")
    return f"{text} ({low} to {high})"


# --- Two runs ------------------------------------------------------------------------------------


def say_difference(base, run):
    """What two runs differ by, and what that is made of."""
    if not (base.has("step_ms") and run.has("step_ms")):
        return say_wall_times(base, run)
    quick, slow = sorted([base, run], key=lambda one: one.figures["step_ms"])
    a, b = quick.values("step_ms"), slow.values("step_ms")
    steps = f"{shown(base, 'step_ms', ms)} in {base.name} and {shown(run, 'step_ms', ms)} in"
    steps += f" {run.name}"
    counts = [len(base.values("step_ms")), len(run.values("step_ms"))]
    runs = f"{counts[0]} and {counts[1]} runs"
    if counts[0] == counts[1]:
        runs = f"{counts[0]} runs each" if counts[0] > 1 else "one run each"
    if not differ(a, b):
        return f"No difference shown by {runs}: a step takes {steps}.{say_links(base, run)}"
    if min(counts) < ENOUGH:
        few = f"{runs}: {ENOUGH} of each would show whether they differ"
        return f"A step takes {steps} ({few}): {say_parts_of_difference(quick, slow)}"
    ratio = f"{slow.figures['step_ms'] / quick.figures['step_ms']:.2f}"
    between = f"{min(b) / max(a):.2f} to {max(b) / min(a):.2f}"
    text = f"A step takes {ratio} times as long in {slow.name} as in {quick.name} ({between}; "
    return f"{text}{runs}): {say_parts_of_difference(quick, slow)}"


def say_links(base, run):
    """That the link's part differs, where steps do not: on cores that others use."""
    links = [base.values("link_ms"), run.values("link_ms")]
    if min(map(len, links)) < ENOUGH or not differ(*links):
        return ""
    each = ", ".join(f"{shown(one, 'link_ms', ms)} in {one.name}" for one in (base, run))
    return f" The link's part of it differs: {each}."


def say_parts_of_difference(quick, slow):
    """302 ms longer in slow, of which 300 exposed communication (298 link, 2 waiting for ranks),
    2 computing, 0 waiting for images.
    """
    longer = slow.figures["step_ms"] - quick.figures["step_ms"]
    text = f"{ms(longer)} longer in {slow.name}"
    one, two = parts_of(quick), parts_of(slow)
    if not (one and two):
        return f"{text}; what that is made of, these logs do not say."
    places = 0 if longer >= 10 else 1

    def show(*parts):
        more = sum(two[part] - one[part] for part in parts)
        return f"{round(more, places) + 0.0:,.{places}f}"  # without a minus before a zero

    text += f", of which {show('link_ms', 'wait_ms')} exposed communication"
    if quick.has("link_ms") and slow.has("link_ms"):
        text += f" ({show('link_ms')} link, {show('wait_ms')} waiting for ranks)"
    return f"{text}, {show('compute_ms')} computing, {show('data_ms')} waiting for images."


def say_wall_times(base, run):
    """Of logs that have wall times alone, as the talk's."""
    if not (base.has("wall_s") and run.has("wall_s")) or base.partial or run.partial:
        return ""
    quick, slow = sorted([base, run], key=lambda one: one.figures["wall_s"])
    ratio = slow.figures["wall_s"] / quick.figures["wall_s"]
    times = " and ".join(f"{duration(one.figures['wall_s'])} in {one.name}" for one in (base, run))
    return (
        f"{slow.name} took {ratio:.2f} times as long as {quick.name} ({times}, wall time). What "
        "it is made of, these logs do not say: see docs/networks.md, What the talk's logs show."
    )


# --- One run -------------------------------------------------------------------------------------


def say_step(run):
    """Its parts, and which is the largest; the rank or node that works longest."""
    parts = parts_of(run)
    if not parts:
        return [f"{run.name}: its log does not split a step"]
    step = run.figures["step_ms"]

    def show(value):
        return f"{value:,.{0 if step >= 100 else 1}f}"

    exposed = parts["link_ms"] + parts["wait_ms"]
    words = {
        f"{show(parts['compute_ms'])} computing": parts["compute_ms"],
        f"{show(parts['data_ms'])} waiting for images": parts["data_ms"],
    }
    if run.processes != 1:
        text = f"{show(exposed)} exposed communication"
        if run.has("link_ms"):
            text += f" ({show(parts['link_ms'])} link, {show(parts['wait_ms'])} waiting for ranks)"
        words[text] = exposed
    largest = max(words, key=words.get)
    texts = [f"{text}, the largest part" if text == largest else text for text in words]
    lines = [f"{run.name}: a step of {show(step)} ms: {'; '.join(texts)}"]
    if slow := slow_rank(run):
        who, times = slow
        lines.append(f"- {who}: own work {times:.2f} times the median rank's")
    return lines


def say_failed(run):
    lines = [f"{run.name} is not scored: {'; '.join(run.problems)}"]
    if cause := nccl.cause(run.log.nccl):
        lines.insert(0, f"{run.name}: NCCL warned, {cause}")
    lines += [f"- timed out: {work}" for work in run.log.nccl.get("timeouts", [])]
    lines += [f"- {text}" for text in run.log.nccl.get("means", [])]
    return lines


# --- Its network ---------------------------------------------------------------------------------


def networks_of(run):
    """A Network for each node of the Probe, the slowest first."""
    found = []
    for node in run.record("Probe").get("nodes", []):
        finding = node.get("nccl") or {}
        links = carriers(node.get("interfaces", []), finding, node.get("host", ""))
        found.append(Network(node.get("host", ""), finding, links))
    return sorted(found, key=lambda one: one.gbps)


def say_network(run):
    """Up to three lines: what carried it, the probe's rate, the training's bytes."""
    networks = networks_of(run)
    if run.nodes == 1:
        words = [text for one in networks if (text := nccl_words(one.finding))]
        return [f"- inside the node: {words[0]}"] if words else []
    if not run.log.ours or not (networks or run.log.nccl):
        return []
    of_probe = " of the probe" if networks else ""
    lines = [f"- network{of_probe}: {say_carrier(run, networks)}"]
    if networks and networks[0].gbps:
        lines.append(f"- probe: {say_probe(run, networks[0])}")
    if text := say_training(run, networks):
        lines.append(f"- training: {text}")
    return lines


def say_carrier(run, networks):
    texts = {}
    for network in networks:
        if text := nccl_words(network.finding):
            pass
        elif network.links:
            kinds = dict.fromkeys(link.get("kind", "") for link in network.links)
            text = f"by the bytes, {', '.join(network.names)} ({', '.join(kinds)})"
        else:
            text = "not known, no counter shows the probe's bytes"
        texts.setdefault(text, []).append(network.host)
    if not texts:  # without a probe: what NCCL writes into the run's own log
        return nccl_words(run.log.nccl) or "not known, the log has no probe"
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{text} on {', '.join(hosts)}" for text, hosts in texts.items())


def say_probe(run, network):
    """The slowest node's rate beside what is stated, and beside size over time."""
    probe, slowest = run.record("Probe"), [networks_of(one) for one in run.each]
    rates = [networks[0].gbps for networks in slowest if networks and networks[0].gbps]
    gbps = median(rates)
    text = f"{rate(gbps)} on the wire of the slowest node"
    if min(rates) < max(rates):
        text += f" ({rate(min(rates))} to {rate(max(rates))})"
    if (size := probe.get("all_reduce_bytes")) and run.has("probe_ms"):
        text = f"all-reduce of {megabytes(size)} alone in {ms(run.figures['probe_ms'])}, {text}"
    stated, whose = run.given_gbps or network.stated, "you gave"
    if not run.given_gbps:
        whose = f"{network.links[0].get('stated_by', 'an interface')} states"
        whose = whose if len(network.links) == 1 else "its ports state"
    if stated:
        text += f", {gbps / stated:.2f} of the {rate(stated)} that {whose}"
    elif any(link.get("virtual") for link in network.links):
        text += "; a virtual interface states any rate, whatever its cable carries (--link_gbps "
        text += "gives the cable's)"
    else:
        text += ", beside no stated rate (--link_gbps gives one)"
    if ratio := wire_ratio(run, network):
        text += f"; {ratio:.2f} times size over time (a tree: about 1; a ring of {run.processes}: "
        text += f"{2 * (run.processes - 1) / run.processes:.2f})"
    return text


def wire_ratio(run, network):
    """The wire's rate over that of the gradients' all-reduce, size by time."""
    probe = run.record("Probe")
    took = probe.get("continuous_ms") or probe.get("all_reduce_ms")  # while bytes were counted
    size = probe.get("all_reduce_bytes")
    return network.gbps / (8e-6 * size / took) if size and took and network.gbps else None


def traffic_of(run):
    """{host: what was carried from before the training to its end}"""
    counted = run.log.counters.items()
    return {host: kernel.difference(*two) for host, two in counted if len(two) == 2}


def say_training(run, networks):
    steps, probed = run.setting("max_steps"), {one.host: one.names for one in networks}
    if not steps or run.partial or not run.complete:
        return ""
    sent, names = [], []
    for host, carried in traffic_of(run).items():
        links = [link for link in carried["interfaces"] if link.get("kind") != "loopback"]
        own = [link for link in links if link["name"] in probed.get(host, [])]
        own = own or carriers(links, {}, host, size=lambda link: link["tx_bytes"])
        sent.append(sum(link["tx_bytes"] for link in own) / steps)
        names += [link["name"] for link in own]
    if not sent:
        return ""
    text, low, high = (megabytes(of(sent)) for of in (median, min, max))
    text += f" ({low} to {high})" if low != high else ""
    over = ", ".join(dict.fromkeys(names)) or "nothing"
    return (
        f"a node sent {text} a step over {over}; the gradients are {megabytes(run.gradient_bytes)}"
    )


# --- Checks --------------------------------------------------------------------------------------


def failed_checks(run):
    """What contradicts itself in a run, by name."""
    found = []
    if total := wrong_sum(run):
        step = ms(run.figures["step_ms"])
        found.append(f"parts: those of a step add up to {ms(total)}, the step is {step}")
    if run.nodes == 1 or not run.complete:
        return found
    networks, hosts = networks_of(run), {}
    for network in networks:
        texts = [wrong_wire_rate(run, network), elsewhere(run, network)]
        for text in filter(None, texts):
            hosts.setdefault(text, []).append(network.host)
    return found + [f"{text} (on {', '.join(each)})" for text, each in hosts.items()]


def wrong_wire_rate(run, network):
    ratio = wire_ratio(run, network)
    if not ratio or LEAST_WIRE <= ratio <= MOST_WIRE:
        return ""
    text = f"wire rate: {', '.join(network.names)} carried {ratio:.2f} times what the all-reduces"
    return f"{text} moved: other traffic, or the wrong counter"


def elsewhere(run, network):
    """That the training's bytes went over other interfaces than the probe's."""
    steps, links = run.setting("max_steps", 0), traffic_of(run).get(network.host, {})
    links = links.get("interfaces", [])
    own = sum(link["tx_bytes"] for link in links if link["name"] in network.names)
    due = LEAST_SENT * steps * run.gradient_bytes
    if run.partial or not (links and network.names and steps) or own >= due:
        return ""
    others = [link for link in links if link["name"] not in network.names]
    most = max(others, key=lambda link: link["tx_bytes"], default=None)
    text = f"bytes: the training sent {megabytes(own / steps)} a step over the probe's "
    text += ", ".join(network.names)
    if most and most["tx_bytes"] > due - own:
        text += f", and {megabytes(most['tx_bytes'] / steps)} over {most['name']}"
    return text


# --- The report ----------------------------------------------------------------------------------


def table(head, rows):
    """Lines of a Markdown table whose columns also line up in a terminal; no empty column."""
    filled = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    cells = [[row[n].replace("|", r"\|") for n in filled] for row in [head, *rows]]
    cells[1:] = [[cell or "-" for cell in row] for row in cells[1:]]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("| " + " | ".join([first.ljust(widths[0]), *right]) + " |")
    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [lines[0], f"|{'|'.join(rule)}|", *lines[1:]]


def heading(text):
    return [text, "-" * len(text), ""]


def report(comparison, picture=None):
    """The whole report: Markdown that reads well in a terminal too. `picture`: its address."""
    runs, base = comparison.runs, comparison.base
    lines = heading("Comparison" if len(runs) > 1 else "Run")
    failed = [run for run in runs if not run.complete]
    for run in failed:
        lines += [*say_failed(run), *(f"- note: {note}" for note in run.notes), ""]
    whole = [run for run in runs if run.complete]
    if comparison.scaling:
        says = [say_speed_up(base, *row) for row in comparison.scaling.rows if row[0] is not base]
    else:
        says = [say_difference(base, run) for run in whole if run is not base]
    lines += [line for text in says if text for line in (text, "")]
    for run in whole:
        lines += say_step(run)
        for one in run.each:
            which = f" in {one.name}" if run.repeats else ""
            lines += [f"- check failed{which}: {text}" for text in failed_checks(one)]
            if cause := nccl.cause(one.log.nccl):
                lines.append(f"- NCCL warned{which}, {cause}")
        lines += say_network(run)
        lines += [*(f"- note: {note}" for note in run.notes), ""]
    if any(parts_of(run) for run in whole if run.processes != 1):
        lines += [LEGEND, ""]
    if rows := figure_rows(runs):
        lines += heading("Figures")
        lines += [f"![Parts of a step, and more]({picture})", ""] if picture else []
        lines += [*table(["", *(run.name for run in runs)], rows), ""]
    if comparison.scaling:
        lines += [*scaling_lines(comparison.scaling), ""]
    if rows := port_rows(runs):
        lines += [*heading("Ports"), *table(PORT_HEAD, rows), ""]
    differing = settings_that_differ(whole) if len(whole) > 1 else {}
    if len(whole) > 1 and not differing:
        lines += ["Settings that differ: none.", ""]
    if differing:
        rows = [[name, *map(short, each)] for name, each in differing.items()]
        lines += [*heading("Settings that differ")]
        lines += [*table(["setting", *(run.name for run in whole)], rows), ""]
    return "\n".join(lines).rstrip()


def short(value):
    """A setting's value for a cell."""
    if isinstance(value, list):
        value = ", ".join(value)
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FIGURES = {  # figure: title, how it is shown
    "step_ms": ("step", ms),
    "compute_ms": ("- computing", ms),
    "data_ms": ("- waiting for images", ms),
    "exposed_ms": ("- exposed communication", ms),
    "link_ms": ("- - link", ms),
    "wait_ms": ("- - waiting for ranks", ms),
    "median_step_ms": ("median step", ms),
    "slowest_of_100_step_ms": ("slowest of a hundred steps", ms),
    "img_per_s": ("img/s", "{:,.1f}".format),
    "wall_s": ("wall time", duration),
    "probe_ms": ("probe: all-reduce of the gradients", ms),
    "latency_ms": ("probe: all-reduce of up to 4 KB", ms),
}


def figure_rows(runs):
    """Of the table of all runs, without rows that no run can fill."""
    rows = []
    for figure, (title, show) in FIGURES.items():
        rows.append([title, *(shown(run, figure, show) for run in runs)])
    on = [f"{run.processes} on {run.nodes or '?'}" if run.processes else "" for run in runs]
    rows.insert(0, ["processes on nodes", *on])
    wanted = [run.setting("max_steps") if run.complete else 0 for run in runs]
    steps = [f"{count:,}" if count else "" for count in wanted]
    rows.append(["steps", *steps])
    rows.append(["last loss of rank 0", *(last(run.log.curve, "{:.4f}") for run in runs)])
    rows.append(["Top-1 at the end", *(last(run.log.top1, "{:.2f} %") for run in runs)])
    # A run that failed keeps its column.
    return [[title, *(cell or "-" for cell in row)] for title, *row in rows if any(row)]


def last(curve, form):
    return form.format(curve[-1][1]) if curve else ""


def say_speed_up(base, run, speed_up, _low, _high, efficiency):
    more = run.processes / base.processes
    text = (
        f"{run.name} trains {speed_up:.2f} times the images/s of {base.name}, with {more:g} times"
    )
    counts = {len(one.values("img_per_s")) for one in (base, run)}
    each = ", by one run each" if counts == {1} else ""
    return f"{text} the processes: an efficiency of {efficiency:.0%}{each}."


def scaling_lines(scaling):
    each = {
        "strong": "Strong scaling: a step has the same number of images in every run.",
        "weak": "Weak scaling: each process has the same number of images in every run.",
        "": "Neither strong nor weak scaling: images/s alone are compared.",
    }[scaling.kind]
    rows = []
    for run, speed_up, low, high, efficiency in scaling.rows:
        text = f"{speed_up:.2f}" + (f" ({low:.2f} to {high:.2f})" if low != high else "")
        rows.append([run.name, str(run.processes), text, f"{efficiency:.0%}"])
    head = ["run", "processes", "speed-up", "efficiency"]
    return [
        *heading("Scaling"),
        f"{each} The base is {scaling.base.name}.",
        "",
        *table(head, rows),
    ]


PORT_HEAD = ["run", "node", "port", "kind", "state", "states", "who states it", "driver", "MTU"]
PORT_HEAD += ["PCIe now", "PCIe at most", "card", "sent in the probe", "in the training"]
PORT_HEAD += ["counters that rose"]


def port_rows(runs):
    """A row for each port of each node that is up, in probe and training together."""
    rows = []
    for run in runs:
        traffic = traffic_of(run)
        probed = {node.get("host"): node for node in run.record("Probe").get("nodes", [])}
        for host in dict.fromkeys([*probed, *traffic]):
            seen = [one for one in (probed.get(host), traffic.get(host)) if one]
            read = [one.get("node") for one in (*seen, *run.log.counters.get(host, []))]
            node = kernel.merged([one for one in read if one])
            links = [one.get("interfaces", []) + one.get("rest", []) for one in seen]
            sent = [sent_by(probed.get(host)), sent_by(traffic.get(host))]
            ports = kernel.ports_of(node, kernel.joined(links))
            rows += [
                [run.name, str(host), *port_cells(port, *sent)]
                for port in ports
                if port["kind"] != "loopback" and port["port"] != "lo"
            ]
    return rows


def sent_by(carried):
    """{port: bytes that it sent}; nothing where no counters were read."""
    if not carried:
        return {}
    links = carried.get("interfaces", []) + carried.get("rest", [])
    return {link["name"]: link["tx_bytes"] for link in links}


def port_cells(port, *sent):
    counters = []
    for name, counted in port["counters"].items():
        each = f" ({digits(counted['per_GB'])} a GB)" if counted["per_GB"] is not None else ""
        counters.append(f"{name} {counted['count']:,}{each}")
    cells = [
        port[name] for name in ("port", "kind", "state", "rate", "stated_by", "driver", "MTU")
    ]
    pcie = [port[name] for name in ("pcie_Gbps", "pcie_most_Gbps")]
    cells += [f"{digits(gbps)} Gb/s" if gbps else "" for gbps in pcie]
    cells.append(port["device"])
    cells += [megabytes(each.get(port["port"], 0)) if each else "not read" for each in sent]
    return [*(str(cell or "") for cell in cells), ", ".join(counters)]


def write_report(comparison, file, picture=None):
    """The report in a file, which names the picture from where it lies."""
    address = None
    if picture:
        address = quote(os.path.relpath(picture, Path(file).absolute().parent))
    # What other programs have said may look like HTML, which a viewer of Markdown would hide.
    text = report(comparison, address).replace("<", "&lt;")
    Path(file).write_text(text + "\n", encoding="utf-8")
