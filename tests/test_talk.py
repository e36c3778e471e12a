"""docs/networks.md: the talk explained, emulated runs judged, expected times, by hand."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median

import demo_coco_resnet18 as demo
import pytest

import compare_logs
from support.datasets import data_args
from support.made_logs import REPORTS
from support.nodes import NamespacePair
from support.processes import FACTOR, ROOT, SCRIPT, Run, base_env, new_test_id
from test_readme import PAGES

PAGE = PAGES["docs/networks.md"]
PRINTED = re.findall(r"(?s)```bash\n([^`]+)\n```\n\n```text\n(.*?)```", PAGE.text)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("command", "printed"), PRINTED)
def test_page_shows_what_the_tool_prints(command, printed):
    """Some of its paragraphs. If the tool's words change, print them anew with the command."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60 * FACTOR}
    env = base_env(new_test_id())
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", command], env=env, **how)
    assert done.returncode == 0, done.stderr
    paragraphs = "\n".join(stripped(done.stdout)).split("\n\n")
    shown = "\n".join(stripped(printed)).split("\n\n")
    assert {*shown} <= {*paragraphs}
    found = [paragraphs.index(text) for text in shown]
    assert found and found == sorted(found)


def test_readme_says_how_much_longer_a_step_over_the_slow_cable_takes():
    steps = {}
    for log in (ROOT / "docs/emulated").rglob("node0.log"):
        summary = Run([], 0, log.read_text(), 0).json_line("Summary")
        steps.setdefault(log.parts[-3], []).append(summary["step_ms"])
    assert f"{median(steps['slow']) / median(steps['fast']):.1f}" == "3.5"
    assert "a step takes 3.5 times as long" in PAGES["README.md"].prose.replace("\n", " ")


# --- The talk's times ----------------------------------------------------------------------------

GRADIENTS = 4 * 11_217_552  # bytes
TCP_BITS = 1e9 * 1448 / 1538  # at 1 Gb/s


def test_pages_state_the_minutes_that_the_script_prints():
    command = [sys.executable, ROOT / "docs/talk/explain.py"]
    explained = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^\| (\d, .*?)\|(.*)$", explained, re.MULTILINE)
    rows = {name.strip(): cells for name, cells in rows}
    ring, restarted = (rows[f"{of}: a ring"] for of in ("4, 924, 256", "4, 1,850, 128"))
    page = PAGES["docs/networks.md"].prose.replace("\n", " ")
    for reported, report, stated, text in (
        ("230 min more", explained, "of the 230 minutes by which the Ethernet run was", page),
        (" 8.8 min ", ring, "at most about 9 of the 230 minutes", page),
        (" 18 min ", restarted, "over 1,850 steps at most about 18", page),
        (" 88 min ", ring, "would explain only 88 minutes", page),
        (": 203 images/s", explained, "its 203 images per second", page),
    ):
        assert reported in report and stated in text, (reported, stated)


def test_the_talks_repetition_has_as_many_steps_as_the_page_says():
    (repeat,) = [text for text in PAGE.commands if "RUN_NAME=talk" in text]
    args = demo.parse_arguments(repeat.replace("\\\n", "").partition(" -- ")[2].split())
    steps = args.num_epochs * math.ceil(117_266 / args.global_batch_size)
    assert f"{steps} steps, because" in PAGE.prose.replace("\n", " ")


def test_kept_logs_and_reports_hold_no_path_of_a_machine():
    files = [*(ROOT / "docs/emulated").rglob("*.log"), *REPORTS.rglob("*.*")]
    for file in filter(Path.is_file, files):
        text = file.read_text(errors="replace")
        assert re.findall(r"(?<![\w.])/(?:root|home|tmp|work|usr|opt|mnt|var)\b", text) == [], file


def test_logs_of_the_talk_are_unchanged():
    """These are the first digits of the SHA-256 of what its speaker handed out."""
    for name, digest in (("ethernet", "b600a9b49b69aa1b"), ("infiniband", "7218347cabb4b7b9")):
        log = (ROOT / f"docs/talk/{name}.log").read_bytes()
        assert hashlib.sha256(log).hexdigest().startswith(digest)


def test_expected_times_are_those_of_a_ring_at_tcps_rate():
    """One process and two on each of two nodes."""
    rows = re.findall(r"^\| (\d+) Gb/s \| ([\d.]+) ms \| ([\d.]+) ms \|$", PAGE.text, re.MULTILINE)
    assert len(rows) == 5
    for gbps, *times in rows:
        for factor, ms in zip((1, 1.5), times, strict=True):
            seconds = factor * 8 * GRADIENTS / (float(gbps) * TCP_BITS)
            assert 1000 * seconds == pytest.approx(float(ms), abs=0.5 if "." not in ms else 0.05)


(BY_HAND,) = [text for text in PAGE.commands if text.startswith("( # on both nodes\n")]
# Each call, with the variables that choose the network.
NOTING = """
torchrun() { echo $(env | grep -E '^(NCCL|GLOO)_(NET|IB|SOCKET)' | sort) torchrun "$@"; }
python() { echo python "$@"; }
tee() { while IFS= read -r line; do echo "$line"; done; }
"""


def called_by_hand(**top: str) -> list[str]:
    """The calls of the block, with other values of the variables at its top."""
    text = BY_HAND
    for name, value in top.items():
        text, found = re.subn(rf"^{name}=\S+", f"{name}={value}", text, flags=re.MULTILINE)
        assert found == 1
    command = ["bash", "-c", NOTING + text.replace("mkdir -p", ": mkdir -p")]
    env = base_env(new_test_id())
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_block_by_hand_is_for_both_nodes_and_both_networks():
    """NODE_RANK, the interface and node 0's address stand at its top, and nowhere else. Each start
    has a port of its own.
    """
    ports = []
    for network, variables in (
        ("ethernet", "NCCL_IB_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET"),
        ("infiniband", "NCCL_IB_DISABLE=0 NCCL_IB_HCA==mlx5_0 NCCL_NET=IB NCCL_SOCKET"),
    ):
        first = called_by_hand(NETWORK=network)
        top = {"NODE_RANK": "1", "IFNAME": "enp5s0", "MASTER_ADDR": "10.0.0.9"}
        second = called_by_hand(NETWORK=network, **top)
        assert len(first) == 4 and variables in first[0] and variables in first[2]
        ports += re.findall(r":(295\d\d) ", "".join(first))
        for one, two in zip(first, second, strict=True):
            one = re.sub("(rank=|node)0", r"\g<1>1", one.replace("10.0.0.1", "10.0.0.9"))
            assert one.replace("eth0", "enp5s0") == two
    assert len(ports) == len({*ports}) == 4


@pytest.mark.slow
def test_the_block_by_hand_runs_and_is_compared(tmp_path, sample, capsys):
    """For Ethernet, on two nodes, with a small data set; one process a node."""
    options = "--weights none --image_size 64 --batch_size 2 --num_epochs 1 --workers 0"
    words = " ".join([*data_args(sample), options, "--max_steps 6"])
    with NamespacePair("200mbit") as nodes:
        started = []
        for node in (0, 1):
            text = BY_HAND.replace("10.0.0.1", nodes.addresses[0])
            text = text.replace("NODE_RANK=0", f"NODE_RANK={node}")
            text = re.sub(r"^coco=.*$", f"coco=({words})", text, flags=re.MULTILINE)
            text = text.replace("--max_steps 200", "").replace("per_node=2", "per_node=1")
            text = text.replace("logs=logs/", f"logs={tmp_path}/")
            command = ["bash", "-c", text]
            started.append(nodes.popen(node, command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"}))
        for one in started:
            one.finish(300)
    assert compare_logs.main([str(tmp_path / "ethernet")]) == 0
    out = capsys.readouterr().out
    assert "ethernet: a step of " in out and "by the bytes, eth0 (ethernet)" in out
    assert compare_logs.main([str(tmp_path / "ethernet" / "node0.log")]) == 0


@pytest.mark.slow
def test_the_blocks_for_two_nodes_train_without_gpus(tmp_path, sample):
    """Each node gets the block for both, that for nodes without GPUs, and its own."""
    words = ["sample=(", "GLOO_SOCKET_IFNAME", "--node_rank=0", "--node_rank=1"]
    blocks = PAGES["docs/running.md"].commands
    both, cpus, *own = [next(text for text in blocks if word in text) for word in words]
    with NamespacePair() as nodes:
        changes = {"python tools/make_sample_coco.py data/sample_coco\n": ""}
        changes |= {"data/sample_coco": str(sample), "10.0.0.1": nodes.addresses[0]}
        changes |= {"steps 200": "steps 6", "THREADS=4": "THREADS=1"}
        changes |= {SCRIPT.name: shlex.quote(str(SCRIPT))}
        started = []
        for node in (0, 1):
            text = "\n".join(["set -e", both, cpus, own[node]])
            for word, instead in changes.items():
                assert word in text
                text = text.replace(word, instead)
            started.append(nodes.popen(node, ["bash", "-c", text], cwd=tmp_path))
        first, _ = [one.finish(120) for one in started]
    assert first.json_line("Run")["batch_size"] == 4
    assert first.json_line("Summary")["replicas_identical"]


def test_the_block_by_hand_ends_at_what_fails_with_its_exit_code(tmp_path):
    text = BY_HAND.replace("logs=logs/", f"logs={tmp_path}/")
    failing = "torchrun() { echo cause >&2; return 7; }\npython() { echo too far; }\n"
    done = subprocess.run(["bash", "-c", failing + text], capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout == "cause\n"
    assert (tmp_path / "ethernet/node0.log").read_text() == "cause\n"
