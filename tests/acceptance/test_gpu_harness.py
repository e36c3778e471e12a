"""The code of tests/gpu/ itself, tried on CPUs: those tests run where there is a GPU alone."""

from __future__ import annotations

import re
import sys

import pytest

from support.processes import ROOT, start

# They have the same code as two_nodes.sh's own tests, and take minutes.
LEFT_OUT = "two_nodes_sh"


@pytest.mark.slow
def test_the_tests_of_gpus_pass_over_gloo_on_cpus(tmp_path):
    words = ["-m", "pytest", "tests/gpu", "-m", "", "-k", f"not {LEFT_OUT}", "-rfE"]
    words += ["-p", "no:cacheprovider", "--basetemp", tmp_path / "gpu"]
    env = {"GPU_HARNESS": "gloo", "PYTEST_XDIST_WORKER": None, "PYTEST_ADDOPTS": None}
    with start([sys.executable, *words], env=env, cwd=ROOT) as started:
        run = started.finish(900)
    passed = re.search(r"(\d+) passed", run.lines()[-1])
    assert passed and int(passed[1]) >= 15, run.tail()
