"""Two ranks: over Gloo and over NCCL on one GPU that they share, and over NCCL on two GPUs.

With GPU_HARNESS=gloo also over Gloo on CPUs, as two nodes: that proves the harness, not NCCL.
"""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
import torch

from support.datasets import make_set
from support.forks import run_forked
from support.gpus import AS_NODES, GPUS, HARNESS, VISIBLE, check_parts, errors, needs_gpus, on_gpu
from support.launchers import FAST, SINGLE, launch
from support.processes import SCRIPT, Run, free_port, run_demo, start
from test_script import ONE_STEP, OPTIONS

# A backend, and the variables that make two nodes of the ranks: NCCL refuses two ranks of one node
# on one GPU.
WAYS = [
    pytest.param(("nccl", AS_NODES), marks=needs_gpus(1), id="nccl_one_gpu"),
    pytest.param(("gloo", {}), marks=needs_gpus(1), id="gloo"),
    pytest.param(("nccl", {}), marks=needs_gpus(2), id="nccl"),
]
if HARNESS:
    WAYS.append(pytest.param(("gloo", AS_NODES), id="gloo_cpus"))


@pytest.fixture(scope="module", params=WAYS)
def way(request) -> tuple[str, dict[str, str]]:
    return request.param


# --- Gradients ----------------------------------------------------------------------------------

# In eval mode batch norm does the same on one rank and on two. In training that takes --sync_bn.
ONE_RANK, TWO_RANKS = "--batch_size 16", "--batch_size 8"
ACCUMULATED = "--batch_size 4 --accumulate_steps 2"
PROGRAMS = {"eval": ONE_STEP, "train": ONE_STEP.replace("    model.eval()\n", "")}
CASES = [(1, "eval", ONE_RANK), (2, "eval", TWO_RANKS), (2, "eval", ACCUMULATED)]
CASES += [(1, "eval", f"{ONE_RANK} --device cpu"), (1, "eval", ACCUMULATED.replace("2", "4"))]
CASES += [(1, "train", ONE_RANK), (2, "train", TWO_RANKS)]
if GPUS:  # PyTorch's SyncBatchNorm needs them
    CASES += [(2, "train", f"{TWO_RANKS} --sync_bn")]


@pytest.fixture(scope="module")
def gradients(way, tmp_path_factory) -> dict:
    """By case: what a step of SGD with a learning rate of 1 takes from the weights."""
    assert PROGRAMS["eval"] != PROGRAMS["train"]
    backend, variables = way
    folder = tmp_path_factory.mktemp("gradients")
    found = {}
    for mode, program in PROGRAMS.items():
        path = folder / f"{mode}.py"
        path.write_text(program)
        cases = [case for case in CASES if case[1] == mode]
        runs = []
        for number, (ranks, _, options) in enumerate(cases):
            words = [*OPTIONS, *FAST, "--num_epochs", 1, "--lr", 1, *options.split()]
            if ranks == 2:
                words += ["--backend", backend]
            own = variables if ranks == 2 else {}
            runs.append((ranks, [folder / f"{mode}-{number}.pt", *words], own))
        run_forked(runs, program=path, env=VISIBLE)
        for case, (_, words, _) in zip(cases, runs, strict=True):
            found[case] = torch.load(words[0], map_location="cpu", weights_only=True)["gradients"]
    return found


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a layer's gradients, as a part of them."""
    return max(
        ((found[name] - values).norm() / values.norm()).item() for name, values in expected.items()
    )


@pytest.mark.parametrize("case", CASES[1:5], ids=lambda case: "-".join(map(str, case)))
def test_gradients_are_those_of_one_rank_with_twice_the_batch(case, gradients):
    """Or with half of it twice, or on the CPU. A change of the weights by one part in 100,000, as
    another kernel of cuDNN makes it, changes some gradients by 2 percent.
    """
    assert apart(gradients[case], gradients[CASES[0]]) < 0.05


@needs_gpus(1)
def test_sync_bn_is_the_batch_norm_of_all_images(gradients):
    """Without it each rank normalizes its own ones. A change of the weights by one part in 100,000
    changes some gradients by 2 percent.
    """
    expected, without, with_it = (gradients[case] for case in CASES[5:])
    assert apart(with_it, expected) < 0.1 < 0.5 < apart(without, expected)


# --- Runs of the script -------------------------------------------------------------------------


def trained(variables: dict[str, str], words: list[object]) -> Run:
    """A run of two ranks: by torchrun, or with these variables by hand."""
    if not variables:
        return run_demo(words, nproc=2, env=VISIBLE)
    return run_forked([(2, words, variables)], env=VISIBLE)[0]


def test_replicas_stay_identical(way, tmp_path):
    backend, variables = way
    words = [*make_set(tmp_path, 34, val=5), *FAST, "--num_epochs", 2, "--accumulate_steps", 2]
    words += ["--workers", 1]  # forked after CUDA and NCCL have started
    words += ["--backend", backend, "--precision", "bf16" if backend == "nccl" else "fp32"]
    run = trained(variables, words)
    record, summary = run.json_line("Run"), run.json_line("Summary")
    assert (record["backend"], record["nodes"]) == (backend, 2 if variables else 1)
    names = {torch.cuda.get_device_name(n) for n in range(GPUS)} or {os.uname().machine}
    assert set(record["devices"]) <= names
    for rank in (0, 1):
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, 7))
    assert len(re.findall(r"^\[[CG]PU 0\] Epoch . validation .* \| 5 images", run.out, re.M)) == 2
    check_parts(summary)


# --- NCCL alone: what goes wrong -----------------------------------------------------------------


@needs_gpus(2)
def test_a_run_with_a_killed_rank_is_restarted_and_ends(tmp_path):
    """Of 300 steps, with a checkpoint in each epoch of 30. torchrun gives a rank that waits in
    NCCL 30 seconds.
    """
    words = [*make_set(tmp_path / "set", 240), *FAST, "--num_epochs", 10]
    with launch(SINGLE, tmp_path, *words, GPUS=2, RESTARTS=1, **VISIBLE) as started:
        started.wait_for(r"\| Step 40 ")
        os.kill(started.rank_pid(1), signal.SIGKILL)
        run = started.finish(180)
    assert "restart 1 of 1" in run.out
    assert int(re.search(r"Resumed from .* at step (\d+)", run.out)[1]) >= 30
    assert run.steps(1)[-1][1] == 300
    assert run.json_line("Summary")["replicas_identical"] is True


@needs_gpus(1)
def test_an_interface_that_does_not_exist_is_named_on_two_nodes(tmp_path):
    """Two torchruns, each with one of this machine's GPUs, or both with the only one."""
    words = [*make_set(tmp_path, 16), *FAST, "--max_steps", 1, "--timeout", 10]
    options = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=static", "--rdzv_id=1"]
    options += [f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    nodes = []
    try:
        for node in (0, 1):
            command = [sys.executable, "-m", "torch.distributed.run", *options]
            env = on_gpu(node % GPUS) | {"NCCL_SOCKET_IFNAME": "nowhere0"}
            nodes.append(start([*command, f"--node_rank={node}", SCRIPT, *words], env=env))
        runs = [one.finish(90, expect=1) for one in nodes]
    finally:
        for one in nodes:
            one.kill()
    first, second = map(errors, runs)
    (line,) = first  # the other one may only see that this one, with the store, has ended
    assert line.startswith("[GPU 0]") and "NCCL_SOCKET_IFNAME" in line
    assert second
