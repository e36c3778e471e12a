"""docs/your_script.md: a script that prints four kinds of lines, and the tools around it."""

from __future__ import annotations

import re
import shutil

import compare_logs
from analysis.logs import parse_text, read_log
from analysis.runs import make_run
from support.nodes import NamespacePair
from support.processes import LONG, ROOT
from test_pages import PAGES

PAGE = PAGES["docs/your_script.md"]
(LINES,) = PAGE.printed
# A script that trains nothing: rank 0 prints these lines, the others the step and the end.
MINE = f"""
import os

for line in {LINES.splitlines()}:
    if os.environ["RANK"] == "0" or not line.endswith("}}"):
        print(line.replace("CPU 0", "CPU " + os.environ["RANK"]), flush=True)
"""


def test_the_four_lines_are_a_whole_run_with_a_split():
    step, end = (LINES.splitlines()[n].replace("CPU 0", "CPU 1") for n in (1, 3))
    run = make_run("mine", parse_text(f"{LINES}{step}\n{end}\n"), {})
    assert run.problems == [] and (run.processes, run.nodes, run.steps) == (2, 2, 20)
    parts = run.data_s, run.compute_s, run.exposed_s
    assert all(part > 0 for part in parts) and abs(sum(parts) - run.step_s) < 1e-6
    assert run.wire_bytes == 4 * run.parameters


@LONG
def test_tools_around_it_measure_its_link(tmp_path, capsys):
    """The page's commands on two nodes."""
    (tmp_path / "mine.py").write_text(MINE)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "demo_coco_resnet18.py", tmp_path)
    with NamespacePair("500mbit") as nodes:
        started = []
        for node in (0, 1):
            text = PAGE.commands[0].replace("10.0.0.1", nodes.addresses[0])
            text = re.sub(r"(node|NODE_RANK=|node_rank=)0", rf"\g<1>{node}", text)
            command = ["bash", "-c", f"set -euo pipefail\n{text}"]
            started.append(nodes.popen(node, command, cwd=tmp_path))
        checked, _ = (one.finish(300) for one in started)
    assert "WRONG" not in checked.out and "reach each other" in checked.out
    run = make_run("ethernet", read_log([tmp_path / "logs/ethernet"]), {})
    assert run.problems == [] and run.processes == 2 and 0.1 < run.wire_gbps < 0.55
    assert compare_logs.main([f"ethernet={tmp_path / 'logs/ethernet'}"]) == 0
    assert "Over TCP on eth0 (ethernet)" in capsys.readouterr().out
