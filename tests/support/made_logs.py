"""Logs of runs that never were, made from a few words; recorded ones lie in tests/data/reports."""

from __future__ import annotations

import json
from pathlib import Path

from analysis import nccl
from support.processes import ROOT

REPORTS = ROOT / "tests" / "data" / "reports"
GRADIENTS = 44_870_208  # bytes
STEPS = 20


def carried(name: str, kind: str, stated: float | None, gbps: float) -> dict:
    """An interface of the Probe that carried `gbps` during it."""
    moved = {"tx_bytes": int(gbps * 1e8), "rx_bytes": int(gbps * 1e8), "wire_Gbps": gbps}
    facts = {"name": name, "kind": kind, "speed_Gbps": stated, "stated_by": "its port"}
    return facts | moved


class MadeRun:
    """A run on two nodes, n0 and n1, with two GPUs each, changed by lines of words.

    A line is a word and its values:
        ms DATA COMPUTE EXPOSED     of a step, on each rank; given again: on the next rank
        probe MS                    of the gradients' all-reduce; "none": no probe
        net NAME KIND STATED GBPS   an interface of the probe; HOST behind it: of this node alone
        nccl LINE                   of NCCL's text, for the probe
        sent NAME KIND MB           of each node in a step of the training
        run JSON, summary JSON, probed JSON     of these records, and of the Probe
        failed TEXT                 the run failed, with the launcher's last line
        file NAME LINE              of a file beside the log
    """

    def __init__(self, name: str) -> None:
        self.name, self.took, self.failed = name, 100.0, ""
        self.ms: list[list[float]] = []
        self.links: list[tuple[list[str], dict]] = []  # hosts, none for all; the facts
        self.reader = nccl.Reader()
        self.sent: dict[str, dict] = {}
        self.records: dict[str, dict] = {"run": {}, "summary": {}, "probed": {}}
        self.files: dict[str, str] = {}

    def change(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        values = rest.split()
        if word == "ms":
            self.ms.append([float(value) for value in values])
        elif word == "probe":
            self.took = 0 if rest == "none" else float(rest)
        elif word == "net":
            name, kind, stated, gbps, *hosts = values
            self.links.append((hosts, carried(name, kind, float(stated), float(gbps))))
        elif word == "nccl":
            self.reader.read(f"n:7:7 [0] NCCL INFO {rest}\n")
        elif word == "sent":
            self.sent[values[0]] = {"kind": values[1], "MB": float(values[2])}
        elif word == "failed":
            self.failed = rest
        elif word == "file":
            file, _, text = rest.partition(" ")
            self.files[file] = self.files.get(file, "") + text + "\n"
        else:
            self.records[word] |= json.loads(rest)

    def counters(self, host: str, steps: int) -> str:
        """As counters.py prints them, after so many steps."""
        links = {}
        for name, facts in self.sent.items():
            count = int(facts["MB"] * 1e6 * steps)
            links[name] = {"kind": facts["kind"], "speed_Gbps": None, "below": [], "errors": {}}
            links[name] |= {"tx_bytes": count, "rx_bytes": count}
        record = {"host": host, "time": 100 + steps, "interfaces": links, "tcp": None}
        return f"Counters {json.dumps(record)}\n"

    def text(self) -> str:
        run = {"world_size": 4, "nodes": 2, "backend": "nccl", "global_batch_size": 64}
        run |= {"precision": "bf16", "grad_compression": "none", "images": 1280, "compile": True}
        run |= {"max_steps": STEPS, "parameters": GRADIENTS // 4, "env": {}}
        run |= self.records["run"]
        count, per_node = run["world_size"], run["world_size"] // run["nodes"]
        hosts = [f"n{rank // per_node}" for rank in range(count)]
        counting = ["n0", "n1"] if self.sent else []
        kind = "[GPU" if run["backend"] == "nccl" else "[CPU"
        lines = []
        if self.took:
            finding = self.reader.finding().to_dict() if self.reader.has_text else None
            probe = {"world_size": count, "all_reduce_bytes": GRADIENTS}
            probe |= {"all_reduce_ms": self.took}
            probe["nodes"] = []
            for host in dict.fromkeys(hosts):
                own = [facts for of, facts in self.links if host in (of or hosts)]
                probe["nodes"].append({"host": host, "interfaces": own, "nccl": finding})
            lines.append(f"{kind} 0] Probe {json.dumps(probe | self.records['probed'])}\n")
        lines += [self.counters(host, 0) for host in counting]
        lines.append(f"{kind} 0] Run {json.dumps({'hosts': hosts} | run)}\n")
        if self.failed:
            return "".join(lines) + f"run.py: error: {self.failed}\n"
        each = self.ms or [[1, 60, 30]]
        ranks = [each[min(rank, len(each) - 1)] for rank in range(count)]
        names = ("data_ms", "compute_ms", "exposed_ms")
        means = {name: sum(rank[n] for rank in ranks) / count for n, name in enumerate(names)}
        summary = means | {"step_ms": sum(means.values()), "measured_steps": STEPS - 3}
        summary["img_per_s"] = 1000 * run["global_batch_size"] / summary["step_ms"]
        summary["wire_bytes_per_step"] = GRADIENTS
        summary["link_ms"] = min(rank[2] for rank in ranks)
        summary["wait_ms"] = means["exposed_ms"] - summary["link_ms"]
        parts = [dict(zip(names, rank, strict=True)) for rank in ranks]
        summary["ranks"] = [{"rank": rank, **own} for rank, own in enumerate(parts)]
        lines.append(f"{kind} 0] Summary {json.dumps(summary | self.records['summary'])}\n")
        for rank in range(count):
            lines.append(f"{kind} {rank}] Cleanup complete. Total wall time: 9.00s (9.000s)\n")
        lines += [self.counters(host, STEPS) for host in counting]
        return "".join(lines)

    def write(self, folder: Path) -> Path:
        """The run's folder, with its log and the files beside it."""
        folder = folder / self.name
        folder.mkdir(parents=True)
        for name, text in {"node0.log": self.text(), **self.files}.items():
            (folder / name).write_text(text)
        return folder


def made_runs(lines: list[str]) -> list[MadeRun]:
    """Each after a line `= NAME`."""
    runs: list[MadeRun] = []
    for line in lines:
        if line.startswith("= "):
            runs.append(MadeRun(line[2:]))
        elif line:
            runs[-1].change(line)
    return runs
