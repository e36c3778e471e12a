"""The faults of mutants.py can be put into the files. That they are noticed, it shows itself."""

from __future__ import annotations

import pytest

from mutants import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_finds_its_text(fault):
    assert not fault.problem()


def test_faults_have_names_of_their_own():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
