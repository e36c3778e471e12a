#!/usr/bin/env python3
"""What can explain the 230 minutes between the talk's two runs? A table, and the causes by size.

    python docs/talk/explain.py

The times are those of the two logs beside this file. A link explains most if nothing of its work
is hidden: that is calculated.
"""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

# The slides state these,
IMAGES, EPOCHS = 118_287, 2  # on two machines
ETHERNET_GBPS, INFINIBAND_GBPS = 1, 56
# and these are known of the model and the images.
PARAMETERS = 11_217_552  # ResNet-18 with a last layer of 80 outputs
EPOCH_BYTES = 19e9  # of train2017's images, by the size of COCO's archive
FALLEN_GBPS = 0.1  # an Ethernet port falls back to this where its cable is bad
# The share of an Ethernet line that is TCP's payload, MTU 1500: a packet without the headers of IP
# (20), TCP (20) and its time stamp (12), over the packet with Ethernet header 14, checksum 4,
# preamble 8 and gap 12. 941 of 1000 Mb/s.
TCP_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14 + 4 + 8 + 12)


@dataclass
class Reading:
    """What slides and logs leave open."""

    processes: int
    way: str  # that the all-reduces took
    steps: int  # of both epochs
    batch: int  # images in a step, over all processes


# The first one is the main one, for the reasons in docs/networks.md.
READINGS = [
    Reading(4, "a ring", 924, 256),
    Reading(4, "a tree", 924, 256),
    Reading(2, "a ring", 924, 256),
    Reading(4, "a ring", 1850, 128),
]


def main():
    (ethernet, ethernet_s), (infiniband, infiniband_s) = map(wall_time, ("ethernet", "infiniband"))
    excess_s = ethernet_s - infiniband_s
    print(f"Ethernet took {ethernet}, InfiniBand {infiniband}: {minutes(excess_s)} more.\n")
    print(*explain_by_link(excess_s), sep="\n")
    print("\nCauses, with 4 processes and 924 steps:\n")
    print(*list_causes(ethernet_s, infiniband_s), sep="\n")


def wall_time(name):
    """(as the log's last line has it, seconds); of several ranks the longest."""
    text = (HERE / f"{name}.log").read_text()
    found = re.findall(r"Total wall time: (.+?) ?\((\d+\.\d+)s\)", text)
    words, seconds = max(found, key=lambda one: float(one[1]))
    return words, float(seconds)


def payload_rate(gbps):
    """Bytes of gradients per second that a line of `gbps` carries over TCP."""
    return gbps * 1e9 / 8 * TCP_SHARE


def sent(reading):
    """Bytes that a node sends in each direction in the whole run.

    On two nodes: in a tree each gradient once, in a ring of N processes 2 (N - 1) / N times.
    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009.
    """
    gradients = 4 * PARAMETERS  # fp32
    ring = 2 * (reading.processes - 1) / reading.processes
    return reading.steps * gradients * (1 if reading.way == "a tree" else ring)


def explain_by_link(excess_s):
    """Lines of a table: what each reading lets a link explain."""
    slow, fast = rate(FALLEN_GBPS), rate(ETHERNET_GBPS)
    head = ["processes, steps, images a step", "sent a step", f"{fast}, line rate", f"{fast}, TCP"]
    head += [f"{slow}, TCP", "the same, images too", "rate for all"]
    rows = []
    for reading in READINGS:
        size = sent(reading)
        row = [f"{reading.processes}, {reading.steps:,}, {reading.batch}: {reading.way}"]
        row += [megabytes(size / reading.steps), minutes(size / (ETHERNET_GBPS * 1e9 / 8))]
        row += [minutes(size / payload_rate(gbps)) for gbps in (ETHERNET_GBPS, FALLEN_GBPS)]
        row.append(minutes((size + EPOCHS * EPOCH_BYTES) / payload_rate(FALLEN_GBPS)))
        rows.append([*row, rate(size * 8e-9 / excess_s)])
    return table(head, rows)


def list_causes(ethernet_s, infiniband_s):
    """Lines: the causes that stay open by size, and what bounds the other run."""
    main, epoch_s = READINGS[0], EPOCH_BYTES / payload_rate(ETHERNET_GBPS)
    size, images = sent(main), main.steps * main.batch
    link_s, port_s, fast_s = (
        size / payload_rate(gbps) for gbps in (ETHERNET_GBPS, FALLEN_GBPS, INFINIBAND_GBPS)
    )
    read = images / ethernet_s
    return [
        f"- the gradients over {rate(ETHERNET_GBPS)}: at most {minutes(link_s)}",
        f"- all images over {rate(ETHERNET_GBPS)} as well: {minutes(epoch_s)} for the "
        f"{EPOCH_BYTES / 1e9:.0f} GB of an epoch, {minutes(link_s + EPOCHS * epoch_s)} in all",
        f"- the gradients over a port that negotiated {rate(FALLEN_GBPS)}: {minutes(port_s)}",
        f"- cold or shared storage: everything, if it delivered {read:.1f} images/s "
        f"({megabytes(read * EPOCH_BYTES / IMAGES)}/s)",
        "- another wire, a rate limit, or another job on the machines: everything",
        "",
        f"InfiniBand: {images / infiniband_s:.0f} images/s. All-reduces at "
        f"{rate(INFINIBAND_GBPS)} take {fast_s:.0f} s, {fast_s / infiniband_s:.0%} of its time.",
    ]


def table(head, rows):
    """Lines of a Markdown table whose columns also line up in a terminal."""
    columns = zip(head, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = [
        f"| {row[0].ljust(widths[0])} | "
        + " | ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        + " |"
        for row in (head, *rows)
    ]
    rule = "|".join("-" * (width + 1) + ("-" if n == 0 else ":") for n, width in enumerate(widths))
    return [lines[0], f"|{rule}|", *lines[1:]]


def rate(gbps):
    return f"{digits(gbps)} Gb/s" if gbps >= 0.9995 else f"{1000 * gbps:.0f} Mb/s"


def megabytes(count):
    return f"{digits(count / 1e6)} MB"


def digits(value):
    """With three digits that count: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def minutes(seconds):
    return f"{seconds / 60:.2g} min" if seconds < 600 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    main()
