"""The faults of mutants.py can be put into the files. That they are noticed, it shows itself."""

from __future__ import annotations

from mutants import FAULTS


def test_each_fault_finds_its_lines_and_has_a_name_of_its_own():
    assert not {fault.name: problem for fault in FAULTS if (problem := fault.problem())}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
