"""Parts of logs of runs that never were; whole ones lie in tests/data/reports."""

from __future__ import annotations

import json
import re

from analysis.logs import Log, parse_lines
from support.processes import ROOT

REPORTS = ROOT / "tests" / "data" / "reports"


def log_of(text: str) -> Log:
    """What compare_logs.py reads in a file of this text."""
    log = Log()
    parse_lines(text.splitlines(keepends=True), log)
    return log


def carried(name: str, kind: str, stated: float | None, gbps: float, **more: object) -> dict:
    """An interface of the Probe that carried `gbps` during it."""
    sent = {"tx_bytes": int(gbps * 1e8), "rx_bytes": int(gbps * 1e8), "wire_Gbps": gbps}
    return {"name": name, "kind": kind, "speed_Gbps": stated} | sent | more


def on_gpus(interfaces: list[dict]) -> str:
    """A whole run on two nodes whose Probe saw these interfaces on each."""
    text = (REPORTS / "infiniband" / "delivers.log").read_text()
    return re.sub(r'"interfaces": \[\{.*?\}\]', f'"interfaces": {json.dumps(interfaces)}', text)
