"""The formats of tools/common/records.py, on what real script, probe and counters write."""

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
socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(9000), ("127.0.0.1", 9))
"""  # nobody has to receive it
# What a record has where there is such a thing; "": what only an option gives.
NOT_IN_EACH = {"", "env.NCCL_ALGO", "nodes.interfaces.members", "nodes.interfaces.errors"}


class Noted(dict):
    """A record that notes in `there` which fields it has, and in `read` which of them are asked
    for; those of its parts: part.field.
    """

    def __init__(self, fields: dict, there: set[str], read: set[str], part: str = "") -> None:
        def noted(name: str, value: object) -> object:
            if isinstance(value, dict):
                return Noted(value, there, read, f"{name}.")
            if isinstance(value, list):
                return [noted(name, item) for item in value]
            return value

        super().__init__({name: noted(part + name, value) for name, value in fields.items()})
        there |= {part + name for name in fields}
        self.read, self.part = read, part

    def get(self, name, default=None):
        self.read.add(self.part + name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(self.part + name)
        return super().__getitem__(name)


@pytest.fixture(scope="module")
def texts(demo, tmp_path_factory) -> str:
    """What a run of two ranks, its probe and counters.py write."""
    folder = tmp_path_factory.mktemp("records")
    argv = [*make_set(folder / "set", 16, val=4), "--weights", "none", "--num_epochs", "2"]
    argv += ["--image_size", "64", "--batch_size", "2", "--workers", "0", "--log_every", "1"]
    probed = demo.run(argv, 2, call=probe, settings=SMALL)
    before = counters()
    subprocess.run([sys.executable, "-c", TRAFFIC], check=True, timeout=60)
    return probed.out + before + demo.run(argv, 2).out + counters()


def counters() -> str:
    """The line of tools/counters.py."""
    command = [sys.executable, ROOT / "tools" / "counters.py"]
    return subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stdout


def test_each_line_of_the_script_is_known(texts):
    log = parse_text(texts)
    assert log.torn == 0 and log.ours and log.failed is None and log.attempts == 1
    assert log.ranks == {0, 1} and log.ended.keys() == {0, 1}
    steps = [(1 + n // 4, n + 1) for n in range(8)]
    assert log.steps.keys() == {(rank, *step) for rank in (0, 1) for step in steps}
    assert all(None not in vars(step).values() for step in log.steps.values())
    assert log.epochs.keys() == {(rank, epoch) for rank in (0, 1) for epoch in (1, 2)}
    assert log.top1 is not None and log.baseline == 25  # 4 images of 4 classes
    assert log.records.keys() == {"Run", "Probe", "Summary"}
    assert len(log.nodes) == 1


def test_fields_are_read_or_listed_as_for_people(texts):
    """One that nobody reads costs whoever looks for its meaning; one that is gone, a figure."""
    there, asked = ({word: set() for word in records.FOR_PEOPLE} for _ in range(2))
    runs = []
    for name in ("one", "two"):
        log = parse_text(texts)
        log.nodes[0]["interfaces"][0]["errors"] = {"link_downed": 1}
        for word, record in log.records.items():
            log.records[word] = Noted(record, there[word], asked[word])
        log.nodes = [Noted(node, there["Node"], asked["Node"]) for node in log.nodes]
        runs.append(make_run(name, log, {}))
    result = compare_logs.compare(runs, 1e-5)
    assert report(result) and as_json(result) and all(run.complete for run in runs)
    assert "link_downed 1 on lo" in report(result)
    for word, names in there.items():
        unread = {name for name in names - asked[word] if name.partition(".")[0] != "env"}
        assert unread == records.FOR_PEOPLE[word].keys(), word
        assert asked[word] - names <= NOT_IN_EACH, f"{word}: read, and written by nobody"
        assert all(records.FOR_PEOPLE[word].values())
