"""What the tests of tests/gpu/ share: they need an NVIDIA GPU, which all other tests hide."""

from __future__ import annotations

import os

import pytest
import torch

from support.processes import SCRIPT, Run, Started, start

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# None takes the variable away, with which base_env would hide the GPUs.
VISIBLE: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
# Two ranks of one machine, started by hand, as two nodes: NCCL, too, takes these for two hosts.
# (Within a host it refuses two ranks on one GPU.) In the values {rank} stands for the rank's.
AS_NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "node{rank}"}
AS_NODES |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
# GPU_HARNESS=gloo: without a GPU, tests of two ranks over NCCL run over Gloo on CPUs. That proves
# the tests' own code, and nothing about NCCL.
HARNESS = os.environ.get("GPU_HARNESS") == "gloo"
# The first lines of a program that changes a function of the script and then runs it.
CHANGED = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch
import demo_coco_resnet18 as demo
"""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test where PyTorch can use fewer GPUs."""
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    reason = f"needs {gpus}: PyTorch {torch.__version__} can use {GPUS} here"
    return pytest.mark.skipif(count > GPUS, reason=reason)


def on_gpu(index: int) -> dict[str, str | None]:
    """The environment in which this GPU is the only one."""
    names = (VISIBLE["CUDA_VISIBLE_DEVICES"] or "").split(",")
    return {
        "CUDA_VISIBLE_DEVICES": names[index] if index < len(names) and names[0] else str(index)
    }


def start_program(command: list[object], **env: str | None) -> Started:
    """Starts a command that sees the GPUs."""
    return start(command, env=VISIBLE | env)


def check_parts(summary: dict) -> None:
    """The replicas are identical; on each rank the parts of a step add up."""
    assert summary["replicas_identical"] is True
    for times in summary["ranks"]:
        parts = [times[f"{name}_ms"] for name in ("data", "compute", "exposed")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(times["step_ms"])


def errors(run: Run) -> list[str]:
    """Its lines of ranks that say ERROR."""
    return [line for line in run.lines() if "] ERROR: " in line]
