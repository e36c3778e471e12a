"""Repeats of a run: where they lie, their medians and ranges, and when two runs differ.

Of two equal networks with n runs each, the ranges are disjoint by chance in 2 of C(2n, n) pairs: 1
in 3 with 2 runs each, 1 in 10 with 3, 1 in 35 with 4. So a difference is called from 4 on, if the
ranges are disjoint and the medians at least 2 % apart.
"""

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median

from analysis.figures import find_straggler
from analysis.words import ms, with_range

ENOUGH = 4  # runs of each network
LEAST = 1.02  # the ratio of two medians
FIGURES = ["wall_s", "step_s", "data_s", "compute_s", "exposed_s", "img_per_s"]
FIGURES += ["probe_s", "latency_s", "link_s", "cpu_s"]

# --- Where they lie ------------------------------------------------------------------------------


def find_repeats(name, paths):
    """{name of a run: its path}, of all repeats that `paths` hold; else of the one run.

    Repeats are the folders r1, r2, ... of one path, or several paths.
    """
    if len(paths) > 1:
        return {str(path): path for path in paths}
    rounds = [path for path in Path(paths[0]).glob("r*") if re.fullmatch(r"r\d+", path.name)]
    # Of a series that was interrupted, the last folder may be empty.
    rounds = [path for path in rounds if any(path.glob("node*.log"))]
    rounds.sort(key=lambda path: int(path.name[1:]))
    return {f"{name}/{path.name}": path for path in rounds} or {name: paths[0]}


# --- Medians and ranges --------------------------------------------------------------------------


def gather(name, runs):
    """One Run of all repeats: that with the median step, with the medians of those complete."""
    if len(runs) == 1:
        return replace(runs[0], name=name)
    whole = [run for run in runs if run.complete]
    by_step = sorted(whole, key=lambda run: run.step_s or 0) or runs[:1]
    chosen = by_step[(len(by_step) - 1) // 2]
    found = replace(chosen, name=name, repeats=whole, notes=[])
    for figure in FIGURES:
        each = values(found, figure)
        setattr(found, figure, median(each) if each else None)
    found.ranks = {
        rank: [median(run.ranks[rank][n] for run in whole if rank in run.ranks) for n in range(3)]
        for rank in chosen.ranks
    }
    found.straggler = find_straggler(found.ranks)
    found.networks = [replace(each, gbps=median_rate(each, whole)) for each in chosen.networks]
    found.notes = notes_on(found, chosen, runs)
    return found


def median_rate(network, runs):
    """Of the repeats' networks on the same interfaces of the same node."""
    where = network.host, network.names
    found = [one.gbps for run in runs for one in run.networks if (one.host, one.names) == where]
    return median(found) if found and None not in found else network.gbps


def notes_on(found, chosen, runs):
    whole = found.repeats
    lost = [run for run in runs if not run.complete and run is not chosen]
    notes = [f"{run.name} is left out: {'; '.join(run.problems)}" for run in lost]
    if len(whole) > 1:
        notes.insert(0, f"medians of {len(whole)} runs; counters and losses are {chosen.name}'s")
    for run in whole:
        for host, facts in run.facts.items() if run is not chosen else ():
            for row in facts["rows"]:
                marks = row["marks"].values()
                notes += [f"{run.name}: {row['port']} of {host} {mark}" for mark in marks]
    notes += [f"{run.name}: {note}" for run in whole or [chosen] for note in run.notes]
    ways = {run.network.way: run.name for run in whole if run.network}
    if len(ways) > 1:
        where = ", ".join(f"{way} ({name})" for way, name in ways.items())
        notes.append(f"its runs went over different networks: {where}")
    return notes


def values(run, figure):
    """The figure of each repeat that has it; of a run alone its own."""
    each = (getattr(one, figure) for one in run.repeats or [run])
    return [value for value in each if value is not None]


def shown(run, figure, show):
    """563 ms (551 to 570): a figure with its range, if it is known; `show` writes the unit."""
    value = getattr(run, figure)
    return value is not None and with_range(show, value, values(run, figure))


# --- Whether two runs differ ---------------------------------------------------------------------


def differ(a, b):
    """Whether repeated figures have disjoint ranges, and medians that are 2 % apart."""
    low, high = sorted([median(a), median(b)])
    return (max(a) < min(b) or max(b) < min(a)) and high >= LEAST * low


def is_called(a, b):
    """Whether that is by more than chance."""
    return min(len(a), len(b)) >= ENOUGH and differ(a, b)


def say_difference(base, run):
    """A sentence on how long a step takes in two runs; empty where a log does not measure it."""
    quick, slow = sorted([base, run], key=lambda one: one.step_s or 0)
    if not quick.step_s:
        return ""
    a, b = values(quick, "step_s"), values(slow, "step_s")
    counts = [len(values(one, "step_s")) for one in (base, run)]
    by = "{} and {} runs".format(*counts)
    if counts[0] == counts[1]:
        by = f"{counts[0]} runs each" if counts[0] > 1 else "one run each"
    texts = [f"{shown(one, 'step_s', ms)} in {one.name}" for one in (base, run)]
    text = " and ".join(texts)
    if not differ(a, b):
        what, end = "No difference", ""
        if max(a) < min(b):
            what += " of 2%"
            text += f", {median(b) / median(a) - 1:.2%} apart"
        links = [values(one, "link_s") for one in (quick, slow)]
        by_step = quick.link_by_step and slow.link_by_step  # not of PowerSGD
        if by_step and all(links) and is_called(*links):
            parts = [f"{shown(one, 'link_s', ms)} in {one.name}" for one in (base, run)]
            end = f" The link's part of it differs: {', '.join(parts)}."
        return f"{what} shown by {by}: a step took {text}.{end}"
    if is_called(a, b):
        between = f"{min(b) / max(a):.2f} to {max(b) / min(a):.2f}"
        ratio = f"{slow.step_s / quick.step_s:.2f} times as long in {slow.name} as in {quick.name}"
        return f"A step took {ratio} ({between}): {text}, {by}."
    if counts == [1, 1]:
        return f"A step took {text}, one run each."
    chance = Fraction(2, math.comb(sum(counts), counts[0]))
    return (
        f"A step took {text}, {by}. With so few, the ranges of equal networks lie apart by chance "
        f"in {chance.numerator} of {chance.denominator} pairs."
    )
