"""docs/your_script.md: a script that shares nothing with the demo, and the tools around it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import compare_logs
from analysis.logs import read_log
from analysis.runs import make_run
from analysis.verdict import judge
from support.nodes import NamespacePair
from support.processes import LONG, ROOT
from test_pages import FENCED, PAGES

PAGE = PAGES["docs/your_script.md"]
(MINE,) = [match[2] for match in FENCED.finditer(PAGE.text) if match[1] == "python"]


def test_it_imports_nothing_of_the_demo():
    names = set(re.findall(r"^(?:import|from) (\w+)", MINE, re.MULTILINE))
    assert names == {"json", "os", "time", "torch"}


def run_mine(demo, result, code):
    exec(compile(code, "mine.py", "exec"), {"__name__": "__main__"})


def test_its_lines_are_a_whole_run_with_a_split(demo, tmp_path, capsys):
    """Two processes, without a launcher."""
    job = demo.run(nproc=2, call=run_mine, code=MINE)
    (tmp_path / "mine.log").write_text(job.output)
    run = make_run("mine", read_log([tmp_path / "mine.log"]), {})
    assert run.problems == [] and (run.processes, run.nodes, run.steps) == (2, 1, 20)
    parts = run.data_s, run.compute_s, run.exposed_s
    assert all(part > 0 for part in parts) and abs(sum(parts) - run.step_s) < 1e-6
    assert run.wire_bytes == 4 * run.parameters == 4 * (2 * 512 * 2048 + 2048 + 512)
    assert compare_logs.main([f"{name}={tmp_path / 'mine.log'}" for name in ("a", "b")]) == 0
    assert capsys.readouterr().out.count("Bound by") == 2


def test_page_says_which_fields_the_records_have():
    prose = {name for name in re.findall(r"`(\w+)`", PAGE.prose)}
    assert {"world_size", "nodes", "max_steps", "global_batch_size"} <= prose
    assert {"step_ms", "data_ms", "compute_ms", "exposed_ms", "wire_bytes_per_step"} <= prose


@LONG
def test_tools_around_it_judge_its_link(tmp_path):
    """The page's commands on two nodes, over a link of 100 Mb/s."""
    (tmp_path / "mine.py").write_text(MINE)
    shutil.copy(ROOT / "demo_coco_resnet18.py", tmp_path)  # the probe is of it
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    with NamespacePair("100mbit") as nodes:
        text = PAGE.commands[0].replace("10.0.0.1", nodes.addresses[0])
        started = []
        for node in (0, 1):
            typed = text.replace("node0", f"node{node}").replace(
                "node_rank=0", f"node_rank={node}"
            )
            command = ["bash", "-c", f"set -euo pipefail\n{typed}"]
            started.append(nodes.popen(node, command, cwd=tmp_path))
        for one in started:
            one.finish(300)
    log = read_log([Path(tmp_path, "logs/ethernet")])
    run = make_run("ethernet", log, {})
    assert run.problems == [] and len(log.nodes) == 2
    assert run.record("Probe")["world_size"] == 2 and 0.05 < run.wire_gbps < 0.11
    run.floor_s = run.data_s + run.compute_s
    verdict = judge(run)
    assert verdict.bound == "link", verdict.says
    assert "Over TCP on eth0 (ethernet)" in verdict.says[0], json.dumps(verdict.says)
