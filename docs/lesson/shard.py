"""What a rank keeps and sends with DDP, ZeRO and FSDP: torchrun starts it for each process"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Sequential, Tanh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

LAYERS = 8
WIDTH = 256  # a layer has 256 x 256 weights of 4 bytes
BATCH_SIZE = 16  # rows in a step, over all ranks
STEPS = 3
# Adam divides by a gradient's size + EPS. Its usual 1e-8 would enlarge rounding errors.
EPS = 1e-4
# How often each weight crosses a ring in a step, nearly: exactly (N - 1) / N times that.
CROSSINGS = {
    "DDP": 2,  # the all-reduce of a gradient: a sum, then its copies
    "ZeRO": 3,  # the all-reduce, then a broadcast of the new weight
    "FSDP": 3,  # a weight before forward and before backward, then the sum of its gradient
}

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])


def say(text):
    """Prints text and line end at once: the lines of several processes do not mix."""
    print(f"[rank {rank}] {text}\n", end="")


def kept_bytes(tensors):
    """Bytes of these tensors on this rank. Of a DTensor, which is dealt out, only its own part."""
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def make_parallel(method, model):
    """The model to call, its optimizer, and the optimizer that has this rank's state."""
    if method == "FSDP":  # each rank keeps a part of each tensor
        mesh = init_device_mesh("cpu", (world_size,))  # the ranks in a row; with GPUs: "cuda"
        for layer in model:  # a layer is put together while it computes
            fully_shard(layer, mesh=mesh)
            # Sum, then divide: Gloo of PyTorch 2.8 gives the sum where it should give the mean.
            layer.set_force_sum_reduction_for_comms(True)
        fully_shard(model, mesh=mesh)
        optimizer = Adam(model.parameters(), eps=EPS)  # after fully_shard, which deals them out
        return model, optimizer, optimizer
    # The gradients are parts of DDP's buckets. Otherwise the buckets would be a second copy.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if method == "DDP":  # each rank keeps everything
        optimizer = Adam(model.parameters(), eps=EPS)
        return ddp, optimizer, optimizer
    # ZeRO-1: each rank updates some of the tensors, and sends them to the others.
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, eps=EPS)
    return ddp, optimizer, optimizer.optim


def train(method):
    """Says what this rank keeps. Returns the losses of the steps, over all ranks."""
    torch.manual_seed(0)  # the same weights and rows for each method and rank
    layers = [Sequential(Linear(WIDTH, WIDTH, bias=False), Tanh()) for _ in range(LAYERS)]
    model = Sequential(*layers)
    rows, targets = torch.rand(2, BATCH_SIZE, WIDTH)
    own = slice(rank, None, world_size)  # this rank's rows
    parallel, optimizer, with_state = make_parallel(method, model)
    losses = torch.zeros(STEPS)
    for step in range(STEPS):
        loss = mse_loss(parallel(rows[own]), targets[own])
        optimizer.zero_grad()
        loss.backward()
        gradients = kept_bytes(weight.grad for weight in model.parameters())
        optimizer.step()
        losses[step] = loss.item()
    weights = kept_bytes(model.parameters())
    state = kept_bytes(each for found in with_state.state.values() for each in found.values())
    sent = CROSSINGS[method] * LAYERS * WIDTH * WIDTH * 4 * (world_size - 1) // world_size
    kept = f"weights {weights:,}, gradients {gradients:,}, optimizer {state:,}"
    say(f"{method}: {kept} bytes; sends {sent:,} bytes a step")
    dist.all_reduce(losses)
    losses /= world_size
    return losses


dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # with GPUs: "nccl"
methods = ["DDP", "ZeRO", "FSDP"]
if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
    methods.remove("FSDP")
    say("FSDP is left out: on CPUs it needs PyTorch 2.8 or newer")
losses = {method: train(method) for method in methods}
if rank == 0:
    for method, found in losses.items():
        say(f"{method}: losses {', '.join(f'{loss:.6f}' for loss in found.tolist())}")
    alike = all(torch.allclose(losses["DDP"], found, rtol=1e-5) for found in losses.values())
    say(f"all train alike: {alike}")
# NOTE: the last all_reduce's tensor must live until here, or PyTorch 2.6 may hang in this call.
dist.destroy_process_group()
