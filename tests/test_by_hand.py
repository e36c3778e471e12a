"""The comparison by hand, as README prints it: torchrun, output through tee, no launcher.

Under --ci the lines run in two network namespaces, two ranks a node, over two links; by default a
made-up pair of node 0's files is read.
"""

from __future__ import annotations

import re

import compare_logs
from support.datasets import data_args
from support.nodes import NamespacePair
from support.processes import LONG, ROOT
from test_compare_logs import as_text, carried, one_run
from test_pages import PAGES, README

LINKS = {"slow": "200mbit", "fast": None}  # label: rate as tc writes it; None: not shaped
SIZE = 44_870_208  # bytes of the gradients


def readme_block(words: str) -> list[str]:
    """The lines of README's bash block in which these words stand."""
    (block,) = [text for text in PAGES[README].commands if words in text]
    return block.splitlines()


FIVE = readme_block("tee ethernet-probe.log")


def test_readme_shows_it_in_five_lines():
    assert len(FIVE) == 5
    assert FIVE[2].endswith("| tee ethernet-probe.log") and FIVE[3].endswith("| tee ethernet.log")
    (two_nodes,) = [text for text in PAGES[README].commands if text.startswith("# on node 0:\nt")]
    words = re.search(r"torchrun .*:29500", two_nodes)[0]
    assert FIVE[0] == f"run=({words})"  # as the reader has typed it before


def given_paths() -> list[str]:
    """Those of README's compare_logs line, with these links' labels."""
    words = FIVE[4].split()
    assert words[:2] == ["python", "tools/compare_logs.py"]
    text = " ".join(words[2:]).replace("ethernet", "slow").replace("infiniband", "fast")
    return text.split()


def verdicts(folder, monkeypatch, capsys) -> dict[str, str]:
    """What compare_logs.py says of each, from the files in this folder."""
    monkeypatch.chdir(folder)
    assert compare_logs.main(given_paths()) == 0
    report = capsys.readouterr().out
    return {name: re.search(rf"^(?:\W*){name}\b.*Bound by.*$", report, re.M)[0] for name in LINKS}


def check(found: dict[str, str]) -> None:
    assert "Bound by its link" in found["slow"]
    assert "Bound by its link" not in found["fast"]
    assert all("Over TCP on eth0 (ethernet)" in text for text in found.values())


# --- Node 0's files, made up -----------------------------------------------------------------


def made_up(gbps: float, exposed_ms: float) -> tuple[str, str]:
    """What tee keeps of the probe, and of a training of ten steps: node 0's ranks alone."""
    ms = 1.5 * 8e-6 * SIZE / gbps
    eth0 = carried("eth0", "ethernet", 10.0, gbps)
    link = {"nodes": [{"host": f"n{n}", "interfaces": [eth0]} for n in (0, 1)]}
    link |= {"latency_ms": 0.3, "bandwidth_GBps": SIZE / ms / 1e6}
    options = {"world": 4, "steps": 10, "epochs": 1, "facts": {"env": {}}, "link": link}
    options |= {"data_ms": 5.0, "compute_ms": 200.0, "exposed_ms": exposed_ms, "probe_ms": ms}
    probe, *train = one_run(**options)
    return as_text([probe]), as_text([line for line in train if line[0] in (0, 1)])


def test_node_0s_files_alone_give_the_verdict(tmp_path, monkeypatch, capsys):
    for label, (gbps, exposed_ms) in {"slow": (0.2, 2600.0), "fast": (6.5, 60.0)}.items():
        probe, train = made_up(gbps, exposed_ms)
        (tmp_path / f"{label}-probe.log").write_text(probe)
        (tmp_path / f"{label}.log").write_text(train)
    check(verdicts(tmp_path, monkeypatch, capsys))


# --- The lines themselves --------------------------------------------------------------------


def as_typed(lines: list[str], node: int, label: str, data: list[str], folder) -> list[str]:
    """README's lines for this node and this data set; where the files go is the reader's."""
    words = " ".join(f"'{word}'" for word in data)
    text = "\n".join(["set -euo pipefail", f"coco=({words})", *lines])
    text = text.replace("10.0.0.1", NamespacePair.addresses[0])
    text = text.replace("--node_rank=0", f"--node_rank={node}").replace("--max_steps 200", "")
    text = text.replace("tee ethernet", f"tee '{folder}'/node{node}-{label}")
    return ["bash", "-c", text]


@LONG
def test_lines_of_readme_over_two_links(tmp_path, sample, monkeypatch, capsys):
    """The one-GPU line, then probe and training with two ranks on each of two nodes."""
    options = "--weights none --image_size 64 --batch_size 2 --num_epochs 1 --workers 0"
    data = [*data_args(sample), *options.split(), "--max_steps", "6"]
    (alone,) = [line for line in readme_block("--standalone") if line.startswith("torchrun")]
    for label, rate in LINKS.items():
        with NamespacePair(rate) as nodes:
            if label == "fast":
                line = f"{alone.replace('--num_epochs 2', '')} | tee ethernet-alone.log"
                command = as_typed([line], 0, label, data, tmp_path)
                nodes.popen(0, command, cwd=ROOT).finish(200)
            typed = [as_typed(FIVE[:4], node, label, data, tmp_path) for node in (0, 1)]
            started = [nodes.popen(node, typed[node], cwd=ROOT) for node in (0, 1)]
            for one in started:
                one.finish(400)
    text = (tmp_path / "node0-fast-alone.log").read_text()
    assert "Run: 1 process on 1 node" in text and "Summary: " in text
    kept = tmp_path / "node 0"
    kept.mkdir()
    for path in tmp_path.glob("node0-*.log"):
        path.rename(kept / path.name.removeprefix("node0-"))
    check(verdicts(kept, monkeypatch, capsys))
