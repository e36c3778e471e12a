"""The formats of tools/common/records.py, on what real script, probe and supervisor write."""

from __future__ import annotations

import subprocess
import sys

import pytest

import compare_logs
from analysis.logs import parse_text
from analysis.report import as_json, report
from analysis.runs import make_run
from common import records
from support.datasets import make_set
from support.processes import ROOT
from test_probe import SMALL, probe

TRAFFIC = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
    for _ in range(1000):
        datagrams.sendto(bytes(1000), ("127.0.0.1", 9))  # nobody has to receive them
"""
# What a record has where there is such a thing; "": what only an option gives.
NOT_IN_EACH = {"", "env.NCCL_ALGO", "nodes.interfaces.members", "nodes.interfaces.errors"}
NOT_IN_EACH |= {"interfaces.errors", "interfaces.errors.link_downed"}


class Noted(dict):
    """A record that notes in `read` which fields are asked for; those of its parts: part.field."""

    def __init__(self, fields: dict, read: set[str], part: str = "") -> None:
        def noted(name: str, value: object) -> object:
            if isinstance(value, dict):
                return Noted(value, read, f"{part}{name}.")
            if isinstance(value, list):
                return [noted(name, item) for item in value]
            return value

        super().__init__({name: noted(name, value) for name, value in fields.items()})
        self.read, self.part = read, part

    def get(self, name, default=None):
        self.read.add(self.part + name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(self.part + name)
        return super().__getitem__(name)


def fields(record: dict, part: str = "") -> set[str]:
    """The names of a record's fields, those of its parts as part.field."""
    found = set()
    for name, value in record.items():
        found.add(part + name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                found |= fields(item, f"{part}{name}.")
    return found


@pytest.fixture(scope="module")
def texts(demo, tmp_path_factory) -> str:
    """What a run of two ranks, its probe and its supervisor write."""
    folder = tmp_path_factory.mktemp("records")
    argv = [*make_set(folder / "set", 16, val=4), "--weights", "none", "--num_epochs", "2"]
    argv += ["--image_size", "64", "--batch_size", "2", "--workers", "0", "--log_every", "1"]
    log = folder / "node0.log"
    supervise = [sys.executable, ROOT / "tools/supervise.py", "--log", log, "--", sys.executable]
    supervise += ["-c", TRAFFIC]
    subprocess.run(supervise, check=True, timeout=60)
    probed = demo.run(argv, 2, call=probe, settings=SMALL)
    return probed.out + demo.run(argv, 2).out + log.read_text()


def test_each_line_of_the_script_is_known(texts):
    log = parse_text(texts)
    assert log.torn == 0 and log.ours and log.failed is None and log.attempts == 1
    assert log.ranks == {0, 1} and log.ended.keys() == {0, 1}
    assert {(rank, epoch, step) for rank, epoch, step in log.steps} == {
        (rank, 1 + (step - 1) // 4, step) for rank in (0, 1) for step in range(1, 9)
    }
    assert all(None not in vars(step).values() for step in log.steps.values())
    assert log.epochs.keys() == {(rank, epoch) for rank in (0, 1) for epoch in (1, 2)}
    assert log.top1 is not None and log.records.keys() == {"Run", "Probe", "Summary"}
    assert len(log.nodes) == 1
    for line in texts.splitlines():
        is_record = any(f" {word} {{" in line for word in ("Run", "Summary", "Probe", "Node"))
        assert records.is_for_programs(line) == is_record, line


def test_fields_are_read_or_listed_as_for_people(texts):
    """One that nobody reads costs whoever looks for its meaning; one that is gone, a figure."""
    asked = {word: set() for word in records.FOR_PEOPLE}
    runs = []
    for name in ("one", "two"):
        log = parse_text(texts)
        there = {word: fields(record) for word, record in log.records.items()}
        there["Node"] = fields(log.nodes[0])
        log.nodes[0]["interfaces"][0]["errors"] = {"link_downed": 1}
        log.records = {word: Noted(log.records[word], asked[word]) for word in log.records}
        log.nodes = [Noted(node, asked["Node"]) for node in log.nodes]
        runs.append(make_run(name, log, {}))
    result = compare_logs.compare(runs, 1e-5)
    assert report(result) and as_json(result) and all(run.complete for run in runs)
    assert "link_downed 1 on lo" in report(result)
    for word, names in there.items():
        unread = {name for name in names - asked[word] if name.partition(".")[0] != "env"}
        assert unread == records.FOR_PEOPLE[word].keys(), word
        assert asked[word] - names <= NOT_IN_EACH, f"{word}: read, and written by nobody"
        assert all(records.FOR_PEOPLE[word].values())
