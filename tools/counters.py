#!/usr/bin/env python3
"""Prints what this node's interfaces and adapters have carried, by the kernel's counters.

    python tools/counters.py                    # one line, Counters {...}, for the run's log
    python tools/counters.py --since node0.log  # also what was carried since the log's last one

analysis/kernel.py reads the counters, says what they count, and what a node is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from pathlib import Path

from analysis.kernel import difference, read_node, settled_counters, traffic
from analysis.logs import Log, UserError, lines_of, parse_lines

BUSY = 0.01  # an interface with less than this share of the traffic is not mentioned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    text = "also say what was carried since the last Counters line in this log, if it has one"
    parser.add_argument("--since", metavar="LOG", type=Path, help=text)
    args = parser.parse_args()
    log = Log()
    if args.since and args.since.is_file() and os.access(args.since, os.R_OK):
        # NOTE: it is read first, because what is printed here may go into it.
        with contextlib.suppress(UserError):
            parse_lines(lines_of(args.since), log)
    now = {"host": socket.gethostname(), "time": round(time.time(), 3), **settled_counters()}
    now["node"] = read_node()
    print("Counters " + json.dumps(now))
    for before in log.counters.get(now["host"], [])[-1:]:
        if sentence := describe_traffic(difference(before, now)):
            print(f"{sentence} in {now['time'] - before['time']:.0f} s")


def describe_traffic(carried: dict) -> str:
    """As "Sent 9.2 MB and received 4.1 MB on eth0 (ethernet)"; empty where there was none."""
    least = BUSY * sum(map(traffic, carried["interfaces"]))
    said = [
        f"sent {link['tx_bytes'] / 1e6:,.1f} MB and received {link['rx_bytes'] / 1e6:,.1f} MB on "
        f"{label(link)}"
        for link in carried["interfaces"]
        if traffic(link) >= least
    ]
    text = "; ".join(said)
    return text[:1].upper() + text[1:]


def label(link: dict) -> str:
    """As eth0 (ethernet), ib0 (ipoib over mlx5_0:1) or eth0 (ethernet, carrier_changes 2)."""
    over = f" over {link['carrier']}" if "carrier" in link else ""
    errors = "".join(f", {name} {count:,}" for name, count in link.get("errors", {}).items())
    return f"{link['name']} ({link['kind']}{over}{errors})"


if __name__ == "__main__":
    main()
