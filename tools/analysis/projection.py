"""The model of a link: bytes and seconds of an all-reduce; what a run lets expect at other rates.

A step takes its own work (data wait and compute), and of the all-reduce what is not hidden behind
the backward pass.
    alone   one step's all-reduce with nothing beside it: the probe's
    hidden  alone less the exposed communication; over a faster link as large a part of it
    waited  exposed communication beyond alone, for other ranks and for cores; it stays
    step    work + alone over the other link - hidden + waited
Over a slower link the backward pass may hide more than it did: there the step is an upper bound.
"""

from analysis.logs import UserError

RATES_GBPS = (1, 10, 25, 56, 100, 200, 400)
# The share of an Ethernet line that is TCP's payload, MTU 1500: a packet without the headers of IP
# (20), TCP (20) and its time stamp (12), over the packet with Ethernet header 14, checksum 4,
# preamble 8 and gap 12. 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)


def can_model(run):
    """Whether the parts of a step, and the bytes that each node sends in it, are known."""
    return bool(run.has_split and run.wire_bytes and run.processes and (run.nodes or 0) > 1)


def ring_bytes(run):
    """Bytes that a node sends in each direction in an all-reduce of a step's gradients: a ring's.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009. NCCL may take a tree
    instead, which on two nodes sends wire_bytes: then trust the probe.
    """
    return 2 * (run.processes - 1) / run.processes * run.wire_bytes


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def step_over(run, there_s):
    """Seconds of this run's step where an all-reduce alone takes there_s; see the docstring."""
    here_s, work_s = run.probe_s, run.data_s + run.compute_s
    if not here_s:
        return work_s + there_s  # nothing is known to be hidden
    hidden = max(0.0, here_s - run.exposed_s) * min(1.0, there_s / here_s)
    waited = max(0.0, run.exposed_s - here_s)
    return work_s + there_s - hidden + waited


def projected(runs, name):
    """The run to project from: the named one; with "" the one best known; with None none.

    Raises UserError if there is no such run.
    """
    if name is None:
        return None
    if name and name not in [run.name for run in runs]:
        raise UserError(f"--project {name}: no such run; without a name, put --project at the end")
    able = [run for run in runs if can_model(run) and name in ("", run.name)]
    if not able:
        which = name or "the logs"
        raise UserError(f"--project: {which} lack a split step, bytes a step, processes or nodes")
    return min(able, key=lambda run: (not run.probe_s, run.step_s))


def link_bytes(run):
    """(what says so, bytes that a node's link carries for a step's all-reduce, headers too)."""
    if run.probe_s and run.wire_gbps:
        return "by the probe's counters", run.wire_gbps * 1e9 / 8 * run.probe_s
    way = f"in a ring of {run.processes} on {run.nodes}, with headers"
    return way, ring_bytes(run) / TCP_SHARE


def project(run):
    """Expected step at RATES_GBPS: dicts of gbps, alone_s, step_s, bound."""
    rows, here_s = [], run.probe_s
    for gbps in RATES_GBPS:
        there_s = link_bytes(run)[1] * 8e-9 / gbps
        bound = not here_s or there_s > here_s
        step_s = step_over(run, there_s)
        rows.append({"gbps": gbps, "alone_s": there_s, "step_s": step_s, "bound": bound})
    return rows
