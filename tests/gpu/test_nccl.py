"""What only NCCL shows: two ranks on one GPU, which NCCL takes for two hosts. It prints figures.

The ranks share the GPU in turns, so that their times mean little. With GPU_HARNESS=gloo the same
runs over Gloo on CPUs: that proves the tests' own code, and nothing about NCCL.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.datasets import data_args, make_set
from support.gpus import AS_NODES, HARNESS, VISIBLE, check_parts, errors, needs_gpus
from support.launchers import FAST, HERE, MULTINODE, SAVED
from support.nodes import require_namespaces
from support.processes import ROOT, SCRIPT, Run, Started, free_ports, require, start

BACKEND = "gloo" if HARNESS else "nccl"
pytestmark = [] if HARNESS else needs_gpus(1)
TIMEOUT = 20  # seconds, of --timeout
STEP_5 = r"\| Step 5 "
LIMIT = 100  # seconds of a test
BYTES = 4 * 11_217_552  # of the gradients of ResNet-18 with COCO's 80 classes, as fp32


class Pair:
    """Two nodes on this machine, each with one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports(4)
        self.started: list[Started] = []

    def start(self, node: int, command: list[object], **variables: str | None) -> Started:
        """A command with the environment of this node."""
        env = VISIBLE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        env |= {name: value.replace("{rank}", str(node)) for name, value in AS_NODES.items()}
        folder = self.folder / f"node{node}"
        folder.mkdir(exist_ok=True)
        self.started.append(start(command, env=env | variables, cwd=folder))
        return self.started[-1]

    def rank(
        self, rank: int, words: list[object], program: Path = SCRIPT, **variables: str | None
    ) -> Started:
        """A rank, started by hand."""
        debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
        debug |= {"NCCL_DEBUG_FILE": f"{self.folder}/nccl.%h.%p.log"}
        place = {"RANK": str(rank), "WORLD_SIZE": "2"}
        return self.start(rank, [sys.executable, program, *words], **debug, **place, **variables)

    def launcher(self, node: int, words: list[object], **variables: str) -> Started:
        place = {"NODE_RANK": str(node), "GPUS_PER_NODE": "1", "CONNECT_TIMEOUT": "60"}
        env = HERE | {"NNODES": "2"} | place | variables
        return self.start(node, ["bash", MULTINODE, *words], **env)

    def finish(self, expect: int | None = 0, timeout: float = LIMIT) -> list[Run]:
        """Waits for the end of all that was started, and prints how it ended."""
        runs = [one.finish(timeout, expect, clean=10) for one in self.started]
        for number, run in enumerate(runs):
            told = [line for line in run.lines() if line.strip()] or ["nothing"]
            show(f"{number}: {run.seconds:.1f} s, exit code {run.returncode}, last: {told[-1]}")
        return runs


def show(text: str) -> None:
    print(text[:1000])


@pytest.fixture
def pair(tmp_path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    try:
        yield made
    finally:
        for one in made.started:
            one.kill()


@pytest.fixture
def words(tmp_path) -> list[object]:
    """Options for 80 images: 10 steps an epoch."""
    images = make_set(tmp_path / "set", 80)
    return [*images, *FAST, "--backend", BACKEND, "--timeout", 60, "--num_epochs", 100]


@pytest.fixture
def impatient(words) -> list[object]:
    return [*words, "--timeout", TIMEOUT]


# --- It trains ----------------------------------------------------------------------------------


def check_training(runs: list[Run], steps: int) -> dict:
    """Both made these steps."""
    record, summary = runs[0].json_line("Run"), runs[0].json_line("Summary")
    assert (record["backend"], record["world_size"], record["nodes"]) == (BACKEND, 2, 2)
    for rank, run in enumerate(runs):
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, steps + 1))
    check_parts(summary)
    found = {name: summary[name] for name in ("step_ms", "exposed_ms", "wire_bytes_per_step")}
    show(f"NCCL {record['versions']['nccl']}, torch {record['versions']['torch']}: {found}")
    return summary


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ([], 1),
        (["--grad_compression", "bf16"], 0.5),
        (["--accumulate_steps", 2], 1),
        (["--bucket_cap_mb", 200], 1),  # one bucket
    ],
)
def test_replicas_are_identical_and_the_parts_of_a_step_add_up(options, share, pair, words):
    """`share`: of the gradients' bytes as fp32, which a step sends."""
    for rank in (0, 1):
        pair.rank(rank, [*words, *options, "--max_steps", 8])
    sent = check_training(pair.finish(), 8)["wire_bytes_per_step"] / BYTES
    assert sent == pytest.approx(share, rel=0.01)


def test_nccls_text_names_sockets_and_the_interface_as_the_probe_does(pair, words, tmp_path):
    """The probe reads the text of the ranks, and nccl_log.py that of a folder."""
    for rank in (0, 1):
        pair.rank(rank, words, ROOT / "tools/probe_link.py")
    first, _ = pair.finish()
    probe = first.json_line("Probe")
    assert probe["world_size"] == 2 and probe["sizes"][-1]["busbw_GBps"] > 0
    show(str({name: probe[name] for name in ("all_reduce_ms", "latency_ms")}))
    show(f"algbw_GBps {probe['sizes'][-1]['algbw_GBps']}")
    for line in first.lines(0)[-4:]:
        show(line)
    if BACKEND == "gloo":
        pytest.skip("over Gloo there is no text of NCCL; the probe itself ran")
    command = [sys.executable, ROOT / "tools/nccl_log.py", *tmp_path.glob("nccl.*.log")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    show(text.stdout + text.stderr)
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    version = ".".join(map(str, torch.cuda.nccl.version()))
    for found in (json.loads(done.stdout), probe["nodes"][0]["nccl"]):
        assert found["version"].partition("+")[0] == version  # "+cuda13.0" follows
        assert (found["network"], found["transport"]) == ("Socket", "sockets")
        assert found["interfaces"] == ["lo"] and found["nodes"] == 2
        assert found["channels"].keys() == {"network"}


# --- What goes wrong ----------------------------------------------------------------------------


def test_a_killed_rank_ends_the_other(pair, impatient):
    nodes = [pair.rank(rank, impatient) for rank in (0, 1)]
    nodes[0].wait_for(STEP_5)
    nodes[1].signal(signal.SIGKILL)
    first, second = pair.finish(expect=None)
    assert first.returncode not in (0, 2, SAVED) and second.returncode == -signal.SIGKILL


def test_a_stopped_rank_ends_the_other_after_the_timeout(pair, impatient):
    """SIGSTOP: its connections stay open, and it says nothing. The watchdog ends the other."""
    nodes = [pair.rank(rank, impatient) for rank in (0, 1)]
    nodes[0].wait_for(STEP_5)
    nodes[1].signal(signal.SIGSTOP)
    del pair.started[1:]
    try:
        (run,) = pair.finish(expect=None)
    finally:
        nodes[1].kill()
    assert run.returncode not in (0, 2, SAVED)
    if BACKEND == "nccl":
        assert "Watchdog caught collective operation timeout" in run.out


@pytest.mark.parametrize("how", ["not started", "over gloo"])
def test_a_rank_that_never_comes_is_named_after_the_timeout(how, pair, words):
    """Or one that comes, but does not connect NCCL, which waits for it without an end."""
    pair.rank(0, [*words, "--timeout", 8])
    if how == "over gloo":
        pair.rank(1, [*words, "--timeout", 8, "--backend", "gloo", "--device", "cpu"])
        if BACKEND == "gloo":
            pytest.skip("over Gloo both connect")
    runs = pair.finish(1)
    (line,) = errors(runs[0])
    assert "Has each rank started" in line


def test_two_ranks_of_one_host_on_one_gpu_are_refused(pair, words):
    """So it is NCCL_HOSTID that makes two hosts of one."""
    if BACKEND == "gloo":
        pytest.skip("Gloo takes them")
    for rank in (0, 1):
        pair.rank(rank, words, NCCL_HOSTID=None)
    for run in pair.finish(2):
        (line,) = errors(run)
        assert re.search("(Duplicate|the same) GPU.*start one process for each GPU$", line)


def test_other_arguments_on_one_rank_are_one_line_on_each_node(pair, words):
    pair.rank(0, words)
    pair.rank(1, [*words, "--lr", 0.5])
    for run in pair.finish(2):
        (line,) = errors(run)
        assert "--lr is 0.5 here, but 0.001 on rank 0: start all ranks alike" in line
        assert line == run.lines()[-1]


@pytest.mark.parametrize("how", ["by hand", "launcher"])
def test_sigterm_to_one_node_saves_and_ends_both(how, pair, words, tmp_path):
    words += ["--checkpoint", tmp_path / "saved.pt"]
    begin = pair.rank if how == "by hand" else pair.launcher
    nodes = [begin(node, words) for node in (0, 1)]
    for node in nodes:
        node.wait_for(STEP_5)
    nodes[1].signal(signal.SIGTERM)
    for rank, run in enumerate(pair.finish(SAVED)):
        assert re.search(rf"^\[.PU {rank}\] Stopped on SIGTERM \| step \d+ \| ", run.out, re.M)
    assert torch.load(tmp_path / "saved.pt", map_location="cpu")["step"] >= 5


def test_a_run_with_a_killed_rank_is_restarted_by_both_launchers(pair, impatient):
    words = [*impatient, "--checkpoint_every", 4, "--max_steps", 40]
    nodes = [pair.launcher(node, words, RESTARTS="1") for node in (0, 1)]
    nodes[0].wait_for(r"\| Step 10 ")
    os.kill(nodes[1].rank_pid(1), signal.SIGKILL)
    runs = pair.finish(timeout=2 * LIMIT)
    for run in runs:
        show(re.search(r"^.*restart 1 of 1.*$", run.out, re.M)[0])
    assert int(re.search(r"Resumed from .* at step (\d+)", runs[0].out)[1]) >= 8
    assert runs[1].steps(1)[-1][1] == 40
    assert runs[0].json_line("Summary")["replicas_identical"] is True


# --- Real photos, and emulated cables -----------------------------------------------------------


def test_trains_on_photos_in_bf16_with_workers(pair, tiny_coco):
    words = [*data_args(tiny_coco, val=True), "--weights", "none", "--batch_size", 4]
    words += ["--workers", 2, "--log_every", 1, "--precision", "bf16", "--backend", BACKEND]
    words += ["--image_size", 224 if BACKEND == "nccl" else 64, "--num_epochs", 1]
    for rank in (0, 1):
        pair.rank(rank, [*words, "--timeout", 60])
    runs = pair.finish()
    check_training(runs, runs[0].json_line("Summary")["steps"])
    show(re.search(r".* validation .*", runs[0].out)[0])


def test_two_nodes_sh_compares_two_cables(words, tmp_path):
    """Each node has a host name of its own: NCCL_HOSTID is not needed."""
    plain = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    require(plain.returncode == 0, f"unshare --net --uts: {plain.stderr.decode().strip()}")
    require(shutil.which("tc"), "emulated cables need the command tc (package iproute2)")
    require_namespaces()
    words += ["--max_steps", 12]
    command = ["bash", ROOT / "tools/two_nodes.sh", "--links", "slow=1gbit,fast=unshaped"]
    env = VISIBLE | {"PYTHON": sys.executable, "PROBE": "1", "RUN_NAME": "run"}
    with start([*command, "--", *words], env=env, cwd=tmp_path) as started:
        run = started.finish(2 * LIMIT, clean=10)
    for line in run.lines():
        if not re.match(r"\[.PU|W\d\d|Counters|.*torchrun", line):
            show(line)
    if BACKEND == "nccl":
        assert "Both nodes use the same GPUs" in run.out
    for label in ("slow", "fast"):
        log = (tmp_path / "logs/run" / label / "node0.log").read_text()
        summary = Run([], 0, log, 0).json_line("Summary")
        show(f"{label}: {summary['step_ms']:.0f} ms a step, {summary['exposed_ms']:.0f} exposed")
        assert summary["replicas_identical"] is True
        if BACKEND == "nccl":
            for node in Run([], 0, log, 0).json_line("Probe")["nodes"]:
                assert node["nccl"]["interfaces"] == [label]
