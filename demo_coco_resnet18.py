#!/usr/bin/env python3
"""ResNet-18 on COCO with DistributedDataParallel (DDP): one script from a laptop to a cluster.

An image's label is the category of its first annotation. torchrun starts this script several
times, usually once for each GPU. Each process trains its own copy of the model (a replica) on its
own share of the images. In each step DDP averages the gradients of all processes, so the replicas
stay equal.

It needs Linux or macOS (on Windows: WSL2), Python 3.10 or newer, and what requirements.txt lists.

One GPU, or the CPU if there is none (python in place of torchrun and its options does the same):
    torchrun --standalone --nnodes=1 --nproc_per_node=1 demo_coco_resnet18.py \
        --coco_image_path DIR --annotation_path FILE
(If torchrun hangs, this machine's own name does not resolve: add --local-addr=127.0.0.1.)
All GPUs of one machine:
    torchrun --standalone --nnodes=1 --nproc_per_node=gpu demo_coco_resnet18.py ...
Two nodes (machines) with two GPUs each. They meet (rdzv: rendezvous) at 10.0.0.1:29500, the first
node's address and a free port there. static: --node_rank decides the ranks. 123 is any number. On
the second node the command is the same except for --node_rank=1:
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --rdzv_id=123 --rdzv_backend=static \
        --rdzv_endpoint=10.0.0.1:29500 demo_coco_resnet18.py ...
The same under SLURM, which starts the processes itself:
    srun --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 python demo_coco_resnet18.py ...
--weights none trains from scratch; by default rank 0 downloads ImageNet's weights. --checkpoint
FILE --resume continues where an earlier run with that FILE stopped. --help lists all options.

Two nodes with two GPUs each have four processes. Their number, 4, is the world size:
    node (--node_rank)                      0   0   1   1
    rank: the process's number among all    0   1   2   3
    local rank: its number on its node      0   1   0   1    selects its GPU

With N processes a step covers N times as many images, so an epoch has 1/N as many steps:
    images per step (global batch size) = world size x batch size x accumulate steps
--batch_size sets the images of one process; --global_batch_size sets those of all, for any N.
With --accumulate_steps each process adds up the gradients of several batches (micro-batches)
before a step. A step of N processes does what one process would do with all these images, but also
sends gradients (5/6) and waits for the slowest process. Three things differ: batch norm sees the
images of its own process only, an epoch may end with repeated images (3/6), and sums may differ in
their last bits. The learning rate does not depend on N unless you ask for --lr_scaling.

Six changes make a training script distributed. Each is marked in the code:
    1/6  a process learns its rank from the environment       read_environment
    2/6  it chooses its GPU and joins the process group       join_process_group
    3/6  each rank gets its own share of the images           make_train_loader
    4/6  DDP makes the models of all ranks equal              wrap_model
    5/6  backward averages the gradients over all ranks       train_one_epoch
    6/6  results are put together, and rank 0 writes them     evaluate

One rule applies to all of them: ALL RANKS MAKE THE SAME COLLECTIVE CALLS IN THE SAME ORDER. A
collective call is an exchange between all ranks: all-reduce (every rank gets the sum, mean or
maximum of all values), all-gather (every rank gets a list of all values), broadcast (every rank
gets one rank's value) or barrier (no value: the ranks only wait). In such a call the ranks wait
for each other. If one leaves a call out, the others fail after --timeout seconds. Calls that do
not match hang, or mix up data. The docstring of a function with such calls begins "All ranks:".

The first part of this file, up to "Part two", is the lesson: it can be read alone. Part two has
what the first part calls, in the order of use: look up what you need.

Exit codes: 0 done; 1 a failure outside (StartError: in 2/6), or a bug; 2 something that you can
fix, such as a wrong argument (UserError); 75 stopped by a signal (Stopped: --checkpoint is saved).
torchrun makes 1 of all but 0; the launchers return them.
"""

import argparse
import gc
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
import warnings
import zlib
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import fmean
from time import perf_counter

if sys.platform == "win32":
    raise SystemExit("demo_coco_resnet18.py needs Linux or macOS: on Windows start it inside WSL2")

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from pycocotools.coco import COCO
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import v2

# What to change first. Each is the default of the option with its name; --help lists all options.
NUM_EPOCHS = 2  # passes over the images
BATCH_SIZE = 64  # images per process, in one forward pass
LR = 1e-3  # learning rate of Adam
IMAGE_SIZE = 224  # pixels a side
SEED = 0  # decides the first weights, the order of the images and the crops
TIMEOUT = 300  # seconds without an answer after which a process counts as lost
LOG_EVERY = 5  # steps from one log line to the next


def main(process):
    """Every process runs all of this. `process` says which one it is."""
    args = parse_arguments(sys.argv[1:])
    read_environment(process)  # 1/6
    join_process_group(args, process)  # 2/6

    # Rank 0 reads, every rank receives: only the images have to be on every node.
    log_from_rank_0(process, "Reading the annotations")
    train_list = from_rank_0(lambda: read_image_list(args.annotation_path, args.coco_image_path))
    val_list = from_rank_0(
        lambda: read_image_list(args.val_annotation_path, args.val_image_path, train_list)
    )
    # Here all ranks end if one lacks an image, or was started with other arguments than rank 0.
    size_digest = check_start(args, process, train_list, val_list)
    checkpoint = read_checkpoint(args, process)  # None if the run starts from the beginning
    # The number of steps, the precision, and what else depends on the hardware and the images.
    fill_in_arguments(args, process, len(train_list.names), checkpoint)
    train_loader = make_train_loader(args, process, train_list)  # 3/6
    val_loader = make_val_loader(args, process, val_list)

    model = build_model(args, process, train_list, load=checkpoint is None)
    ddp, powersgd = wrap_model(args, process, model)  # 4/6
    # ddp holds the model, so both have the same weights. The optimizer can take them from either.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    training = Training(args, process, train_list, size_digest, model, ddp, optimizer, powersgd)
    if checkpoint:  # every rank has the same one, so the replicas stay equal
        load_checkpoint(training, checkpoint)
    catch_stop_signals(process)  # from now on such a signal saves, and ends all ranks
    start_workers(train_loader, val_loader)  # the processes that load images
    rebuild_buckets(training)  # so that a resumed run adds up in the order of an unbroken one
    log_run(training, val_list)

    # The checkpoint of an epoch is saved before its validation. A run that resumes from it has no
    # step of that epoch left, but validates it.
    first_epoch = max(1, math.ceil(training.step / args.steps_per_epoch))
    last_epoch = math.ceil(args.max_steps / args.steps_per_epoch)
    for epoch in range(first_epoch, last_epoch + 1):
        train_one_epoch(training, train_loader, epoch)  # 5/6
        # Like all calls in main, each rank makes this one, though only rank 0 writes.
        save_checkpoint(training)
        if val_loader is not None:
            evaluate(training, val_loader, epoch)  # 6/6
    # The proof: rank 0 logs whether the replicas are still equal.
    log_summary(training, digests_of_replicas(model))
    # Then the caller, run_and_exit at the end of this file, calls leave_process_group.


@dataclass
class ProcessInfo:
    """The place of this process among the others, and the device that it computes on."""

    launcher: str = "python"  # or srun, mpirun, torchrun (also where RANK was set by hand)
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = ""  # what moves tensors between the processes: nccl or gloo
    restarts: int = 0  # by torchrun --max-restarts
    parent: int = field(default_factory=os.getppid)  # the process that has started this one
    stop: int = 0  # number of the stop signal that has come

    @property
    def gpu(self):
        return self.device.type == "cuda"  # of NVIDIA or AMD, not a Mac's

    @property
    def memory_format(self):
        """channels_last makes convolutions faster. NOTE: on a Mac's GPU it fails."""
        return torch.contiguous_format if self.device.type == "mps" else torch.channels_last

    @property
    def exchange_device(self):
        """Where the numbers of a collective call are put: NCCL takes those of GPUs alone."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def name(self):
        """Device and rank, such as [GPU 3]: the beginning of each log line."""
        return f"[{self.device.type.replace('cuda', 'gpu').upper()} {self.rank}]"


@dataclass
class Training:
    """What is trained, how, and the progress."""

    args: argparse.Namespace
    process: ProcessInfo
    train_list: "ImageList"  # names and labels of the images, and the classes
    size_digest: str  # a digest of the sizes of some training images
    model: torch.nn.Module
    ddp: torch.nn.Module  # the model in DDP: the same weights, in the same memory
    optimizer: torch.optim.Optimizer
    powersgd: powerSGD_hook.PowerSGDState | None  # with --grad_compression powersgd
    step: int = 0  # optimizer steps so far
    agree_at_step: int = 0  # the step after which the ranks next agree to go on
    loss_sum: torch.Tensor | float = 0.0  # in this epoch, over this rank's images

    def __post_init__(self):
        self.timer = StepTimer(self.process.device, self.model)
        self.profiler = start_profiler(self.process) if self.args.profile else None
        # The pretrained weights expect images with ImageNet's mean and standard deviation.
        self.mean, self.std = MEAN.to(self.process.device), STD.to(self.process.device)
        # In fp16 small gradients would become 0. The scaler multiplies the loss by a large number
        # and divides the gradients by it. With other precisions it does nothing.
        fp16 = self.args.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.process.device.type, enabled=fp16)


# ---- The six changes


def read_environment(process):
    """Learns this process's rank. Raises UserError."""
    # DDP 1/6: torchrun starts the processes and tells each its rank through the environment.
    process.launcher = find_launcher()  # gives the variables of mpirun and srun torchrun's names
    if process.launcher == "python":  # started by hand: it is rank 0 of one process
        return
    process.rank = int(os.environ["RANK"])  # over all nodes: 0 to world_size - 1
    process.world_size = int(os.environ["WORLD_SIZE"])  # the number of processes, not of nodes
    process.local_rank = int(os.environ["LOCAL_RANK"])  # on its own node, from 0
    process.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    process.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    set_meeting_point(process)  # MASTER_ADDR and MASTER_PORT, where those given do not serve


def join_process_group(args, process):
    """All ranks: chooses the device, and joins the group. Raises UserError or StartError."""
    # The backend moves tensors between the processes: NCCL between NVIDIA GPUs, one for each
    # process; Gloo between CPUs, or with --backend gloo between processes that share a GPU.
    process.backend = choose_backend(args, process)
    # DDP 2/6: each process takes a GPU of its own, by its local rank. Otherwise all would take
    # GPU 0: NCCL refuses that, and the other GPUs would be idle.
    if args.device in ("auto", "cuda") and torch.cuda.is_available():
        # (%: srun's --gpus-per-task hides the other GPUs, so that each process sees one, GPU 0.)
        process.device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(process.device)
    elif args.device == "mps":
        process.device = torch.device("mps")  # a Mac's GPU
    prepare_hardware(process)  # the number of threads, and other settings of PyTorch
    # Then all processes meet at MASTER_ADDR:MASTER_PORT, on rank 0's node, and leave each other
    # their addresses in a store. torchrun has set both. Each waits until all have joined. If one
    # has not come after --timeout seconds, the others end with a StartError, exit code 1.
    with connecting_ranks(args, process) as store:
        dist.init_process_group(
            process.backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=args.timeout),
            device_id=process.device if process.backend == "nccl" else None,  # binds it to a GPU
            store=store,
        )
        # In its first collective call NCCL connects the ranks for data. item() waits for its end.
        probe = torch.ones(1, device=process.exchange_device)
        dist.all_reduce(probe)
        probe.item()


def make_train_loader(args, process, train_list):
    """The batches of this rank's share of the training images."""
    transform = v2.Compose([v2.RandomResizedCrop(args.image_size), v2.RandomHorizontalFlip()])
    dataset = CocoFirstCategory(args, process, args.coco_image_path, train_list, transform)
    # DDP 3/6: the sampler gives each rank its own share of the images. All ranks shuffle all
    # images alike, by seed and epoch. Of N ranks, rank r takes number r, r + N, r + 2N, ...
    # Each step has a collective call (5/6), so all ranks must make the same number of steps, and
    # all shares have the same length: of 10 images each of 4 ranks gets 3, with two repeated as
    # padding.
    sampler = EpochSampler(dataset, process.world_size, process.rank, seed=args.seed)
    return make_loader(args, process, dataset, sampler, args.workers)


class EpochSampler(DistributedSampler):
    """PyTorch's DistributedSampler, which deals out the images, with two additions.

    It yields (epoch, index) in place of index, as key for the dataset: in each epoch an image is
    cropped in another way. set_epoch does not reach the dataset, because copies of it live in the
    loader's worker processes. And a share can begin later, in a run that resumes, or end earlier.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start, self.end = 0, None  # the part of this rank's share that is used

    def __iter__(self):
        part = islice(super().__iter__(), self.start, self.end)
        return ((self.epoch, index) for index in part)

    def __len__(self):
        return len(range(self.num_samples)[self.start : self.end])


def make_val_loader(args, process, val_list):
    """The batches of this rank's share of the validation images, or None."""
    if not val_list:
        return None
    transform = v2.Compose([v2.Resize(args.image_size * 8 // 7), v2.CenterCrop(args.image_size)])
    dataset = CocoFirstCategory(args, process, args.val_image_path, val_list, transform)
    sampler = EpochSampler(dataset, process.world_size, process.rank, shuffle=False)
    # Padding would count some images twice. DistributedSampler puts it at the end of some shares:
    # these end one image earlier here. Shares of different lengths do no harm, because the ranks
    # exchange no gradients: they meet after all batches (6/6).
    sampler.end = len(dataset) // process.world_size
    if process.rank < len(dataset) % process.world_size:
        sampler.end += 1
    return make_loader(args, process, dataset, sampler, args.val_workers)


def build_model(args, process, train_list, load=True):
    """All ranks: ResNet-18 on this process's device.

    load: whether rank 0 loads the weights of --weights. Until 4/6 no other rank has them.
    """
    torch.manual_seed(args.seed)  # makes a run repeatable; DDP (4/6) makes the ranks equal
    # For another model change this line, load_weights and download_weights, and StepTimer if its
    # first parameter is not the last one that gets a gradient.
    model = torchvision.models.resnet18(num_classes=len(train_list.categories))
    with errors_end_all_ranks():
        if process.rank == 0 and load and args.weights != "none":
            load_weights(process, model, args.weights, train_list)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()
    return model.to(process.device, memory_format=process.memory_format)


def wrap_model(args, process, model):
    """All ranks: the model in DDP, and the state of --grad_compression powersgd or None."""
    if process.device.type == "mps":  # a Mac's GPU: one process, and DDP has no backend for it
        model.no_sync = nullcontext
        return model, None
    # DDP 4/6: DDP copies rank 0's weights into the model of every rank, here and now, so that all
    # start equal. ddp(images) then computes what model(images) does, and its backward pass also
    # averages the gradients (5/6). Validation has no gradients: it calls model(images).
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,  # avoids a second copy of all gradients
        bucket_cap_mb=args.bucket_cap_mb,  # a bucket: gradients that are sent together
    )
    # Each rank has batch-norm statistics of its own images. By default DDP copies rank 0's to all
    # ranks before each forward pass. Once an epoch is enough: share_statistics. (Set here, as
    # the argument's name, and its effect on the copy above, depend on the version of PyTorch.)
    ddp.broadcast_buffers = False
    return ddp, compress_gradients(args, ddp)


def train_one_epoch(training, loader, epoch):
    """All ranks: trains what is left of an epoch: all of it, unless the run was resumed in it."""
    args, process, ddp, timer = training.args, training.process, training.ddp, training.timer
    # Seed and epoch decide the order of the images, and so the shares. Without this call each
    # epoch would repeat the first one.
    loader.sampler.set_epoch(epoch)
    steps_done = training.step - (epoch - 1) * args.steps_per_epoch  # 0, unless it was resumed
    loader.sampler.start = steps_done * args.accumulate_steps * args.batch_size
    batches, began = iter(loader), perf_counter()
    training.loss_sum, images_seen = torch.zeros((), device=process.device), 0
    timer.start_step()  # it measures the wait for data, and how long averaging holds up a step
    while training.step < min(args.max_steps, epoch * args.steps_per_epoch):
        micro_batches = list(islice(batches, args.accumulate_steps))  # an epoch's last step: fewer
        timer.mark("data arrived")
        images_in_step = sum(len(labels) for _, labels in micro_batches)
        lr_factor = min(1, (training.step + 1) / max(1, args.warmup_steps))  # rises to 1
        training.optimizer.param_groups[0]["lr"] = args.lr * lr_factor
        loss_of_step = torch.zeros((), device=process.device)
        for index, (images, labels) in enumerate(micro_batches):
            # The gradients of the micro-batches add up on this rank. Only the last backward pass
            # has to send them: in no_sync DDP sends nothing, which saves the other all-reduces.
            # The forward pass must be in no_sync as well: DDP prepares to send during it.
            is_last = index == len(micro_batches) - 1
            with nullcontext() if is_last else ddp.no_sync():
                logits = forward(training, ddp, images)
                labels = labels.to(process.device, non_blocking=process.gpu)
                # Its part of the mean over all images that this rank has in the step.
                loss = cross_entropy(logits, labels, reduction="sum") / images_in_step
                # DDP 5/6: backward works from the last layer to the first. As soon as the
                # gradients of some layers (a bucket) are ready, DDP starts to average them over
                # all ranks (an all-reduce), while backward goes on with the layers before. An
                # all-reduce waits for the slowest rank, and the optimizer for the last all-reduce.
                # All ranks have equally many images, n. So the mean over N ranks is the gradient
                # of the mean loss over the whole batch (g: gradient of one image's loss):
                #     1/N sum over ranks (1/n sum over its images (g)) = 1/(N n) sum over all (g)
                training.scaler.scale(loss).backward()
            loss_of_step += loss.detach()  # of this rank's images: each rank logs its own loss
        timer.mark("gradients averaged")
        # Equal weights and equal gradients on all ranks: the weights stay equal. (With fp16 the
        # scaler skips a step that overflows: on all ranks, because their gradients are equal.)
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad()
        training.step += 1
        images_seen += images_in_step
        training.loss_sum += loss_of_step * images_in_step
        finish_step(training, epoch, loss_of_step, images_in_step)  # logs, saves or stops when due
    share_statistics(training)
    agree_to_continue(training, timer.last_step_seconds())  # all go on, or on a signal all end
    log_epoch(training, epoch, images_seen, began)


def share_statistics(training):
    """All ranks: take rank 0's batch-norm statistics, so that all validate the same model."""
    if training.process.world_size > 1:
        for buffer in training.model.buffers():
            dist.broadcast(buffer, src=0)


def forward(training, model, images):
    """Logits, float32 (n, classes), of images, uint8 (n, 3, size, size)."""
    process, precision = training.process, training.args.precision
    images = images.to(process.device, non_blocking=process.gpu)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with torch.autocast(process.device.type, dtype=dtype, enabled=dtype is not None):
        images = ((images - training.mean) / training.std).to(memory_format=process.memory_format)
        return model(images).float()


@torch.inference_mode()
def evaluate(training, loader, epoch):
    """All ranks: logs the accuracy over all validation images."""
    process, model, began = training.process, training.model, perf_counter()
    correct = images_seen = 0
    model.eval()
    for images, labels in batches_until_stop(training, loader):
        guesses = forward(training, model, images).argmax(1).cpu()
        correct += (guesses == labels).sum().item()
        images_seen += len(labels)
    model.train()
    # DDP 6/6: each rank has counted its own share. all_reduce makes sums of the counts, on every
    # rank. They are then the same everywhere, and rank 0 alone logs them.
    counts = torch.tensor([correct, images_seen], device=process.exchange_device)
    dist.all_reduce(counts)
    if process.rank == 0:
        log_validation(training, loader, epoch, *counts.tolist(), began)


def save_checkpoint(training):
    """All ranks: rank 0 writes the checkpoint; if it cannot, all ranks end. Raises UserError."""
    step, path = training.step, training.args.checkpoint
    with errors_end_all_ranks():
        if not all(parameter.isfinite().all() for parameter in training.model.parameters()):
            raise UserError(f"weights not finite after step {step}: lower --lr; not saved")
        if path and training.process.rank == 0:
            write_checkpoint(training, path)


def digests_of_replicas(model):
    """All ranks: a digest of each rank's weights. If they are the same, so are the replicas."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return all_gather(digest.hexdigest())


# ---- What all ranks do together


def all_gather(value):
    """All ranks: a list of the ranks' values, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(read):
    """All ranks: what read() returns on rank 0. Its UserError is raised on all ranks, too."""
    result = [None]
    with errors_end_all_ranks():
        if dist.get_rank() == 0:
            result = [read()]
    dist.broadcast_object_list(result, src=0)
    return result[0]


@contextmanager
def errors_end_all_ranks():
    """All ranks: a block after which the ranks tell each other their errors.

    If the block raises UserError on one rank, all ranks raise it. Example: an image is missing on
    the node of rank 1. Without this, rank 1 would end alone. Rank 0 would wait for it in the next
    collective call, and fail with an error about a lost connection.
    """
    error = ""
    try:
        yield
    except UserError as failure:
        error = str(failure)
    errors = all_gather(error)
    failed = [rank for rank, text in enumerate(errors) if text]
    if failed:
        which = f" (rank {', '.join(map(str, failed))})" if len(failed) < len(errors) else ""
        raise UserError(errors[failed[0]] + which)


def leave_process_group():
    """All ranks: the end of a run, also after an error that all ranks share."""
    if not dist.is_initialized():
        return
    # A rank that is done waits here for all others. If it ended first, its connections would
    # break while others still use them. And after an error torchrun, which kills all processes as
    # soon as one has failed, could kill some before they have said why.
    dist.barrier()
    # NOTE: this frees DDP. Threads of the group that still run could abort Python at its end.
    gc.collect()
    dist.destroy_process_group()


# ==== Part two: what part one calls, in the order of use. Part one can be read without it.

# ---- Arguments: their defaults and limits, and what follows from them

LR_BATCH = 64  # the global batch size for which --lr is meant, with --lr_scaling linear
MOST_WORKERS, MOST_VAL_WORKERS = 16, 4  # each worker has batches in shared memory
DATA_PATHS = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
# These may differ from node to node.
PER_NODE = [*DATA_PATHS, "checkpoint", "profile", "workers", "val_workers"]


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add_data_options(parser.add_argument_group("data").add_argument)
    add_training_options(parser.add_argument_group("training").add_argument)
    add_hardware_options(parser.add_argument_group("hardware").add_argument)
    add_communication_options(parser.add_argument_group("communication").add_argument)
    add_output_options(parser.add_argument_group("output").add_argument)
    return parser


def add_data_options(add):
    add("--coco_image_path", required=True, help="folder of the training images")
    add("--annotation_path", required=True, help="their COCO instances file")
    add("--val_image_path", help="folder of the validation images")
    add("--val_annotation_path", help="their COCO instances file")
    add("--image_size", type=at_least(int, 33), default=IMAGE_SIZE, help="pixels a side")
    text = "loader processes of each rank; unset: 1 on a CPU, else as many as it has cores - 1, "
    text += f"at most {MOST_WORKERS}, and {MOST_VAL_WORKERS} for validation"
    add("--workers", type=at_least(int, 0), help=text)


def add_training_options(add):
    add("--num_epochs", type=at_least(int, 1), default=NUM_EPOCHS, help="passes over the images")
    text = "images per process and micro-batch"
    add("--batch_size", type=at_least(int, 1), default=BATCH_SIZE, help=text)
    text = "images per step of all processes together; replaces --batch_size"
    add("--global_batch_size", type=at_least(int, 1), help=text)
    text = "micro-batches per optimizer step"
    add("--accumulate_steps", type=at_least(int, 1), default=1, help=text)
    add("--lr", type=at_least(float, 1e-9), default=LR, help="learning rate of Adam")
    text = f"linear: --lr times global batch size / {LR_BATCH}"
    add("--lr_scaling", choices=["none", "linear"], default="none", help=text)
    text = "steps in which the learning rate rises to its value"
    add("--warmup_steps", type=at_least(int, 0), default=0, help=text)
    add("--weights", default="imagenet", help="imagenet, none, or a FILE with a state dict")
    text = "decides the first weights, the order of the images and the crops"
    add("--seed", type=at_least(int, 0), default=SEED, help=text)
    text = "stop after this number of optimizer steps"
    add("--max_steps", type=at_least(int, 1), help=text)


def add_hardware_options(add):
    text = "auto: the fastest one of this hardware"
    add("--precision", choices=["auto", "fp32", "fp16", "bf16"], default="auto", help=text)
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync_bn", action="store_true", help="batch norm over the images of all GPUs")
    text = "auto: NVIDIA GPU, else CPU; mps: a Mac's GPU"
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help=text)


def add_communication_options(add):
    text = "auto: nccl on NVIDIA GPUs, else gloo"
    add("--backend", choices=["auto", "nccl", "gloo"], default="auto", help=text)
    text = "seconds without an answer after which a process counts as lost"
    add("--timeout", type=at_least(float, 0.1), default=float(TIMEOUT), help=text)
    text = "MiB of gradients in one all-reduce; unset: DDP's default"
    add("--bucket_cap_mb", type=at_least(float, 0.1), help=text)
    kinds, text = ["none", "fp16", "bf16", "powersgd"], "how gradients are made smaller to send"
    add("--grad_compression", choices=kinds, default="none", help=text)
    text = "rank of PowerSGD's matrices: a lower one sends less, and is less exact"
    add("--powersgd_rank", type=at_least(int, 1), default=8, help=text)


def add_output_options(add):
    text = "steps from one log line to the next; a GPU has to finish all its work for each line"
    add("--log_every", type=at_least(int, 1), default=LOG_EVERY, help=text)
    add("--checkpoint", help="FILE, saved at the end of each epoch and on a stop signal")
    text = "FOLDER for a trace of each rank, of steps 8 to 10 of this run: what ran when"
    add("--profile", metavar="FOLDER", help=text)
    text = "also save every N optimizer steps; 0: do not"
    add("--checkpoint_every", type=at_least(int, 0), default=0, help=text)
    add("--resume", action="store_true", help="continue from --checkpoint if that file exists")


def at_least(kind, least):
    """A type for add_argument: an int or float that is not below `least`."""

    def convert(text):
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least:g}")
        if value >= 2**31:
            raise argparse.ArgumentTypeError(f"{text} is not below {2**31}")
        return value

    convert.__name__ = kind.__name__  # argparse then says "invalid int value"
    return convert


def parse_arguments(argv):
    """The arguments. Wrong ones end the process with one line and exit code 2."""
    parser = make_parser()

    def refuse(text):
        parser.exit(EXIT_USER, f"{parser.prog}: error: {text}; see --help\n")

    parser.error = refuse  # one line, without argparse's usage
    # Dashes inside a name are accepted: --batch-size is --batch_size.
    argv = [re.sub(r"^--[a-z-]+", lambda m: "--" + m[0][2:].replace("-", "_"), a) for a in argv]
    args = parser.parse_args(argv)
    for name in DATA_PATHS:
        if getattr(args, name) == "":  # as "$COCO" is where nobody has set it
            refuse(f"--{name} is empty: give a path")
    if bool(args.val_image_path) != bool(args.val_annotation_path):
        refuse("--val_image_path and --val_annotation_path go together: give both")
    if args.resume and not args.checkpoint:
        refuse("--resume needs --checkpoint FILE")
    if args.compile and (args.bucket_cap_mb or 1) < 1:
        refuse("--compile needs --bucket_cap_mb 1 or more: PyTorch's first bucket has 1 MB")
    args.val_workers = args.workers
    return args


def check_start(args, process, train_list, val_list):
    """All ranks: raises UserError unless all were started alike, and have the images.

    Returns a digest of the sizes of some images, which tells resized images from the originals.
    """
    # By a torchrun that starts its ranks again; another node's may have started its first ones.
    process.restarts = max(all_gather(process.restarts))
    own = {f"--{name}": value for name, value in vars(args).items() if name not in PER_NODE}
    own["--checkpoint given"] = bool(args.checkpoint)  # all ranks take part in saving it
    own["--profile given"] = bool(args.profile)
    own["PyTorch"] = str(torch.__version__)
    count = len(train_list.names) + len(val_list.names if val_list else [])
    log_from_rank_0(process, f"Looking for {counted(count, 'image')}")
    with errors_end_all_ranks():
        sizes = check_images(args.coco_image_path, train_list.names)
        if val_list and not args.val_image_path:
            raise UserError("--val_image_path is given on rank 0 only: start all ranks alike")
        if val_list:
            check_images(args.val_image_path, val_list.names)
        if args.checkpoint and process.rank == 0:
            check_checkpoint(args, process)
    note_unused_classes(process, train_list)
    own["sizes of the images"] = digest(sizes)
    if max(map(min, sizes), default=math.inf) < args.image_size:
        text = "the images are smaller than --image_size: prepared for a smaller one?"
        log_from_rank_0(process, f"WARNING: {text}")
    expected = from_rank_0(lambda: own)
    with errors_end_all_ranks():
        for name, value in expected.items():
            if own.get(name) != value:
                text = f"{name} is {own.get(name)} here, but {value} on rank 0"
                raise UserError(f"{text}: start all ranks alike")
    return own["sizes of the images"]


def fill_in_arguments(args, process, image_count, checkpoint=None):
    """All ranks: sets what depends on the hardware, the number of images and the checkpoint."""
    # Collective calls in here depend on arguments. All ranks have the same ones: check_start.
    with errors_end_all_ranks():
        if args.sync_bn and not process.gpu:
            raise UserError("--sync_bn needs NVIDIA GPUs: PyTorch has no other SyncBatchNorm")
        if args.device == "mps" and args.grad_compression != "none":
            raise UserError("--grad_compression needs DDP, which --device mps does not use")
        micro_batches = process.world_size * args.accumulate_steps  # of all ranks in a step
        global_batch = args.global_batch_size or args.batch_size * micro_batches
        if global_batch % micro_batches:
            raise UserError(
                f"--global_batch_size {global_batch} is not a multiple of {micro_batches}, "
                "the number of micro-batches of all ranks in a step"
            )
        args.global_batch_size, args.batch_size = global_batch, global_batch // micro_batches
    args.steps_per_epoch = math.ceil(image_count / global_batch)
    all_steps = args.num_epochs * args.steps_per_epoch
    args.max_steps = min(all_steps, args.max_steps or all_steps)
    if args.profile:
        check_profile(args, process, checkpoint)
    if args.lr_scaling == "linear":
        base, args.lr = args.lr, args.lr * global_batch / LR_BATCH
        log_from_rank_0(process, f"--lr {base:g} x {global_batch} / {LR_BATCH} = {args.lr:g}")
    if args.workers is None:
        workers = max(1, own_cores(process) - 1) if process.gpu else 1
        args.workers, args.val_workers = min(workers, MOST_WORKERS), min(workers, MOST_VAL_WORKERS)
    if args.precision == "auto":  # that of the checkpoint, or the fastest one that suits all ranks
        saved = checkpoint and checkpoint["settings"].get("--precision", "fp32")
        args.precision = saved or min(all_gather(fastest_precision(process)), key=PRECISIONS.index)
    if args.grad_compression == "powersgd":
        args.bucket_cap_mb = 1024  # NOTE: over Gloo PowerSGD hangs with two buckets
        if args.precision == "fp16":  # it would not recover from an overflow
            raise UserError("--grad_compression powersgd needs --precision bf16 or fp32, not fp16")


# ---- Launchers and devices: who started this process, and on what it computes

# The same four numbers, as each launcher names them.
TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
MPICH = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]  # and Intel MPI
# SLURM_NTASKS is the number of tasks of the job. srun starts those of a job step.
SRUN = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
PRECISIONS = ["fp32", "fp16", "bf16"]  # hardware that is fast in one is fast in those before it


def find_launcher():
    """Who started this process. Gives the variables of mpirun and srun torchrun's names."""
    env = os.environ
    launcher, names = launcher_and_variables(env)
    if launcher == "python":
        return launcher
    for name, other_name in zip(TORCHRUN, names, strict=True):
        env[name] = env.get(other_name, "")
    job = None
    if launcher == "srun":
        job = read_job_step(env)
    elif launcher == "mpirun":  # Open MPI 5 and 4 name a job; MPICH does not
        name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        job = zlib.crc32(name.encode())
    if job:  # a port of its own: other jobs may use the node
        env.setdefault("MASTER_PORT", str(20000 + job % 12000))
    try:
        rank, world_size, *_ = (int(env[name]) for name in TORCHRUN)
    except ValueError as error:
        raise UserError(f"{launcher} should set {', '.join(TORCHRUN)} to whole numbers") from error
    if not 0 <= rank < world_size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {world_size}")
    return launcher


def launcher_and_variables(env):
    """The launcher, and what it calls the four numbers."""
    if "RANK" in env:
        return "torchrun", TORCHRUN
    if "OMPI_COMM_WORLD_RANK" in env:
        return "mpirun", OPEN_MPI
    if {*MPICH[:3]} <= env.keys():  # before srun, which MPICH uses inside a SLURM job
        return "mpirun", MPICH
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # in a job step: no batch script is
        return "srun", SRUN
    for name in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        if env.get(name, "").lstrip("0") not in ("", "1"):
            text = f"{name} is {env[name]}: an unknown launcher has started several processes"
            raise UserError(f"{text}: set {', '.join(TORCHRUN)} for each, or use torchrun")
    return "python", []


def read_job_step(env):
    """The number of SLURM's job step; sets what srun does not set. Raises UserError."""
    try:
        env["LOCAL_WORLD_SIZE"] = tasks_of_this_node(env)
        # node[01-04] is a list of nodes; the first one is node01.
        name, digits = re.match(r"([^\[,]+)\[?(\d*)", env["SLURM_STEP_NODELIST"]).groups()
        env.setdefault("MASTER_ADDR", name + digits)
        return int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"])
    except (LookupError, ValueError, AttributeError) as error:
        text = f"{', '.join(SRUN)} or SLURM_STEP_NODELIST is missing or wrong"
        raise UserError(f"inside a SLURM step, but {text}: start with srun") from error


def tasks_of_this_node(env):
    """How many tasks srun has started here. SLURM lists them as 2(x3),1: three nodes with 2."""
    tasks = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        number, _, times = part.rstrip(")").partition("(x")
        tasks += [number] * int(times or 1)
    return tasks[int(env.get("SLURM_NODEID", 0))]


def choose_backend(args, process):
    """nccl or gloo. Raises UserError if this node's hardware is not what the options need."""
    gpus = usable_gpus(args)
    backend = ("nccl" if gpus else "gloo") if args.backend == "auto" else args.backend
    # srun's --gpus-per-task, or a script around mpirun's command, may hide the others.
    own_gpu = process.launcher in ("srun", "mpirun") and gpus == 1
    if backend == "nccl" and process.local_world_size > gpus and not own_gpu:
        raise UserError(
            f"--backend nccl: {process.local_world_size} processes for {gpus} GPU(s) on this "
            "node: start one for each GPU, or use --backend gloo"
        )
    if args.device == "mps" and (process.world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps needs a Mac, and one process")
    return backend


def prepare_hardware(process):
    """Settings of PyTorch for this device and backend."""
    if process.device.type == "mps":
        log(process, "One process on a Mac's GPU, without DDP, which has no backend for it")
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32, also in convolutions
    torch.backends.cudnn.benchmark = True  # tries out which convolutions are the fastest
    # NOTE: by its source, the new process group of NCCL in PyTorch 2.15 makes backward wait for
    # each all-reduce. 0 selects the former one, in which they overlap.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_cores(process))


def own_cores(process):
    """The number of CPU cores for this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pinned = process.launcher in ("srun", "mpirun") and cores < os.cpu_count()  # to its own cores
    return cores if pinned else max(1, cores // process.local_world_size)


def usable_gpus(args):
    """The number of NVIDIA GPUs to choose from. Raises UserError if PyTorch cannot use them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()  # warns of the reason, the first time
    if args.device in ("cpu", "mps"):
        return 0
    gpus = torch.cuda.device_count()
    if gpus and not usable:
        reasons = [str(warning.message) for warning in caught] or ["without a reason from PyTorch"]
        reason = reasons[0].partition(" (Triggered internally")[0].partition(" Please update")[0]
        raise UserError(
            f"PyTorch {torch.__version__} cannot use this node's {counted(gpus, 'GPU')}: "
            f"{reason} | Install a build for this driver (UV_TORCH_BACKEND=auto, or a wheel for "
            "CUDA 12.x: driver 525 or newer; for CUDA 13: 580), or a newer driver, or give "
            "--device cpu"
        )
    if args.device == "cuda" and not gpus:
        raise UserError("--device cuda: PyTorch sees no GPU: see nvidia-smi, CUDA_VISIBLE_DEVICES")
    return gpus


def fastest_precision(process):
    """bf16 if the hardware multiplies faster in it, fp16 on older tensor cores, else fp32."""
    if process.gpu:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"
    if process.device.type == "mps":
        return "fp32"
    # CPUs with bf16 instructions multiply several times faster in it, others many times slower, so
    # a short measurement is enough.
    seconds = {torch.float32: [], torch.bfloat16: []}
    for _ in range(50):
        for dtype in seconds:
            matrix = torch.ones(256, 256, dtype=dtype)
            began = perf_counter()
            torch.mm(matrix, matrix)
            seconds[dtype].append(perf_counter() - began)
    # The fastest measurements are those that other programs have not disturbed.
    return "bf16" if min(seconds[torch.bfloat16]) < min(seconds[torch.float32]) else "fp32"


# ---- Meeting: where the processes find each other, and what is said if they do not


def set_meeting_point(process):
    """Sets MASTER_ADDR and MASTER_PORT where torchrun has not. Raises UserError."""
    if process.world_size == process.local_world_size:
        # On one node they meet at its own address. torchrun would give its name, which does not
        # resolve on every machine.
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set: export it (mpirun -x), with rank 0's address")
    port = os.environ.setdefault("MASTER_PORT", "29500")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UserError(f"MASTER_PORT is {port!r}: give a free port of rank 0's node, 1 to 65535")


@contextmanager
def connecting_ranks(args, process):
    """A block in which the ranks connect, with the store of their addresses. Raises StartError.

    NOTE: meeting and connecting may take longer than their own timeout. PyTorch tries a port that
    refuses up to two times as long, Gloo waits several times as long for an address that does not
    answer, and NCCL waits for ever. So a timer ends the process.
    """
    port = os.environ.get("MASTER_PORT")
    meeting = f"rendezvous at {os.environ.get('MASTER_ADDR')}:{port}: "
    meeting += "did all nodes start, with rank 0's address and port?"
    interface = f"{process.backend.upper()}_SOCKET_IFNAME"
    connection = f"{process.backend} on the {process.device.type} of {socket.gethostname()}"
    stuck = f"{connection} is not connected to all ranks after {args.timeout:g} s: do the "
    stuck += f"others use {process.backend}, too? A firewall that opens port {port} alone, or "
    stuck += f"the wrong interface (export {interface}=NAME)? Try tools/preflight.py"
    try:
        with time_limit(args, process, f"{meeting} No answer in {args.timeout:g} s"):
            store = find_store(args, process)
        with time_limit(args, process, stuck):
            yield store
    except (RuntimeError, ValueError) as error:
        cause = one_line(error)
        if "clients joined" in cause or isinstance(error, dist.DistNetworkError):
            text = f"{meeting} {cause}"
        elif "wait timeout" in cause:  # for another rank's address, in the store where they met
            text = f"another rank does not connect to this one, {connection}: has it ended, or "
            text += f"another backend or device? {cause}"
        else:
            text = f"{connection} cannot connect to the other ranks: {cause}"
            if interface in os.environ or process.world_size > process.local_world_size:
                now = os.environ.get(interface, "not set")
                text += f" | Is {interface} ({now}) the interface between the nodes? A firewall?"
        raise StartError(text) from error


@contextmanager
def time_limit(args, process, text):
    """A block that ends the process with this error after --timeout and five seconds."""
    ending = (EXIT_FAILED, process, f"ERROR: {text}")
    timer = threading.Timer(args.timeout + 5, end_process, ending)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def find_store(args, process):
    """Where the ranks find each other's addresses: on rank 0's node, at MASTER_ADDR."""
    if process.launcher == "python":
        return dist.HashStore()  # nobody to meet: no port, a store in this process's memory
    timeout = timedelta(seconds=args.timeout)
    store, *_ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    if not process.restarts or process.world_size > process.local_world_size:
        return store
    # NOTE: torchrun of 2.8 keeps its store, so that it has the addresses of the start before. (On
    # several nodes its restarts do not work in any case.)
    return dist.PrefixStore(f"start {process.restarts}", store)


# ---- Annotation files: from COCO's JSON to file names, labels and classes

# The images that have a label: their file names, and their labels, which are indices of
# `categories`, {id: name}. `unlabelled` counts the images without an annotation: left out.
ImageList = namedtuple("ImageList", "names labels categories unlabelled")


def read_image_list(path, folder=None, train_list=None):
    """ImageList of a COCO instances file; None without a path. Raises UserError.

    folder: that of the images. train_list: that of the training images, for validation images:
    their labels are then those of its classes.
    """
    if not path:
        return None
    with as_user_error(f"cannot use annotation file {path}"):
        try:
            gc.disable()  # it would search millions of new objects again and again
            with redirect_stdout(None):  # pycocotools prints
                coco = COCO(path)
            image_list = list_labelled(coco)
        except Exception:
            check_instances(path, read_json(path))  # says what is wrong with the file
            raise
        finally:
            gc.enable()
        if not image_list.names or not is_well_formed(coco, image_list):
            check_instances(path, coco.dataset)
    names, labels, categories, unlabelled = image_list
    if folder and any("\\" in name for name in names):  # an export made on Windows
        absent = set(missing_images(folder, names))
        names = [name.replace("\\", "/") if name in absent else name for name in names]
    outside = [name for name in names if os.path.isabs(name) or ".." in name.split("/")]
    if outside:
        raise UserError(f"annotation file {path}: {outside[0]} leaves the image folder")
    image_list = ImageList(names, labels, categories, unlabelled)
    return match_classes(image_list, path, train_list) if train_list else image_list


def list_labelled(coco):
    """ImageList of what pycocotools has read. Raises an error of any type for a faulty file."""
    categories = {i: class_name(coco.cats[i]) for i in sorted(coco.cats)}
    label_of = {category: label for label, category in enumerate(categories)}
    # The label is the category of the first annotation in the file, crowds included.
    first = {image: of_it[0]["category_id"] for image, of_it in coco.imgToAnns.items()}
    images = coco.dataset["images"]
    names = [file_name(image) for image in images if image["id"] in first]
    labels = [label_of[first[image["id"]]] for image in images if image["id"] in first]
    return ImageList(names, labels, categories, len(images) - len(names))


def is_well_formed(coco, image_list):
    """Whether all ids are unique whole numbers, and all names are text. Nearly always they are."""
    images, _, annotations = lists = [coco.dataset[name] for name in LISTS]
    ids = {type(entry["id"]) for entries in lists for entry in entries}
    ids |= {type(entry[key]) for entry in annotations for key in ("image_id", "category_id")}
    names = [*map(file_name, images), *image_list.categories.values()]
    unique = [len(coco.imgs), len(coco.cats), len(coco.anns)] == [*map(len, lists)]
    return unique and all(names) and ids == {int} and {*map(type, names)} == {str}


def match_classes(image_list, path, train_list):
    """The ImageList with labels of the training classes of the same names. Raises UserError."""
    check_names("of the training images", train_list)
    check_names(path, image_list)
    train_names, names = (list(found.categories.values()) for found in (train_list, image_list))
    # Of two training classes of one name, that with images comes last.
    used_last = [*range(len(train_names)), *train_list.labels]
    label_of = {train_names[label]: label for label in used_last}
    lacking = [names[label] for label in image_list.labels if names[label] not in label_of]
    if lacking:
        text = f"it has images of the class {lacking[0]!r}, which the training classes lack"
        raise UserError(f"annotation file {path}: {text}: give both files the same names")
    labels = [label_of[names[label]] for label in image_list.labels]
    return ImageList(image_list.names, labels, train_list.categories, image_list.unlabelled)


def check_names(path, image_list):
    """Raises UserError if two classes that have images have the same name."""
    classes, ids = list(image_list.categories.items()), {}
    for label in sorted(set(image_list.labels)):
        category, name = classes[label]
        other = ids.setdefault(name, category)
        if other != category:
            text = f"categories {other} and {category} have images, and both are called {name!r}"
            raise UserError(f"annotation file {path}: {text}: rename one, names tell them apart")


def note_unused_classes(process, train_list):
    used = set(train_list.labels)
    names = [n for label, n in enumerate(train_list.categories.values()) if label not in used]
    if names:
        text = counted(len(names), "class has", "classes have")
        more = ", ..." if len(names) > 3 else ""
        log_from_rank_0(process, f"Note: {text} no training image: {', '.join(names[:3])}{more}")


# ---- What is wrong with an annotation file (tools/prepare_coco.py has the same lines)

LISTS = ("images", "categories", "annotations")
# What training needs of COCO's format: of each entry of a list a field, and what its values are.
FIELDS = [
    ("images", "id", "ids of images"),
    ("images", "file_name", "names"),
    ("categories", "id", "ids of categories"),
    ("categories", "name", "names"),
    ("annotations", "category_id", "ids of categories"),
    ("annotations", "image_id", "ids of images"),
    ("annotations", "id", "ids of annotations"),
]
INSTANCES = "Of COCO's files give the instances file, such as instances_train2017.json"
UTF_16 = "it is UTF-16: save it as UTF-8"
BEGINNINGS = {  # of files that are not what they should be
    b"PK": "it is a zip archive: unpack it",
    b"\x1f\x8b": "it is a gzip archive: unpack it",
    b"\xef\xbb\xbf": "it begins with a byte order mark: save it as UTF-8 without one",
    **dict.fromkeys([b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0["], UTF_16),
}


def read_json(path, **options):
    """What json.loads makes of an annotation file with these options. Raises UserError."""
    try:
        data = Path(path).read_bytes()
        for beginning, what in BEGINNINGS.items():
            if data.startswith(beginning):
                raise UserError(f"annotation file {path} is not JSON in UTF-8: {what}")
        return json.loads(data.decode(), **options)
    except OSError as error:
        raise UserError(f"annotation file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        text = f"annotation file {path} is not JSON, or not all of it is there"
        raise UserError(f"{text} ({len(data)} bytes): {error}") from error


def check_instances(path, content):
    """Raises UserError if training cannot use the content of an annotation file."""
    file = f"annotation file {path}"
    check_lists(file, content)
    for name, key, kind in FIELDS:
        types = types_of(content, kind)
        expected = "text" if types == [str] else "a number"
        if "ids" in kind:
            expected += f", as {kind} are"
        for index, entry in enumerate(content[name]):
            value = value_of(entry, key)
            if type(value) not in types or value == "" or not is_exact(value):
                if key == "category_id" and key not in entry:  # as in COCO's panoptic files
                    expected += f". {INSTANCES}"
                text = f"{file}: {name}[{index}] {has(entry, key)}"
                raise UserError(f"{text}: expected {expected}")
    check_ids(file, content)


def check_lists(file, content):
    """Raises UserError unless there are three lists of objects."""
    if not isinstance(content, dict):
        text = "expected an object with images, annotations and categories"
        raise UserError(f"{file} is {shown(content)}: {text}. {INSTANCES}")
    for name in LISTS:
        if not content.get(name) or not isinstance(content[name], list):
            raise UserError(f"{file} {has(content, name)}: expected a list of them. {INSTANCES}")
        for index, entry in enumerate(content[name]):
            if not isinstance(entry, dict):
                raise UserError(f"{file}: {name}[{index}] is {shown(entry)}: expected an object")


def check_ids(file, content):
    """Raises UserError if ids are not unique, or the label of an image has no category."""
    indices = {"images": {}, "categories": {}}
    for name, seen in indices.items():
        for index, entry in enumerate(content[name]):
            first = seen.setdefault(entry["id"], index)
            if first != index:
                text = f"{name}[{index}] has the id {entry['id']}, as {name}[{first}] has"
                raise UserError(f"{file}: {text}: expected another one")
    labelled = set()
    for index, annotation in enumerate(content["annotations"]):
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in indices["images"] or image in labelled:
            continue  # training uses the first annotation of each image
        labelled.add(image)
        if category not in indices["categories"]:
            text = f"annotations[{index}] has {category} as category_id"
            raise UserError(f"{file}: {text}: expected the id of a category")
    if not labelled:
        raise UserError(f"{file}: no image has an annotation: no image_id is the id of an image")


def is_exact(value):
    """Whether it is surely this number. A float from 2**53 on may stand for its neighbours."""
    return not isinstance(value, float) or abs(value) < 2**53


def types_of(content, kind):
    """Names are text, ids are numbers. Ids may also all be text."""
    fields = [(name, key) for name, key, its_kind in FIELDS if its_kind == kind]
    values = (value_of(entry, key) for name, key in fields for entry in content[name])
    return [str] if all(isinstance(v, str) for v in values) or kind == "names" else [int, float]


def value_of(entry, key):
    if key == "file_name":
        return file_name(entry)
    return class_name(entry) if key == "name" else entry.get(key)


def file_name(image):
    """In LVIS it is the last part of the URL."""
    return image.get("file_name") or str(image.get("coco_url") or "").rpartition("/")[2]


def class_name(category):
    """A class without a name is called by its id."""
    name = category.get("name")
    name = category.get("id") if name in (None, "") else name
    return str(name).removesuffix(".0") if type(name) in (int, float) else name


def has(entry, key):
    """'has no id', 'has null as id'."""
    missing = key not in entry or entry[key] == []
    return f"has no {key}" if missing else f"has {shown(entry[key])} as {key}"


def shown(value):
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)[:60]
    return f"the text {text}" if isinstance(value, str) else text


# ---- Images: from a file to a batch

# Mean and standard deviation of ImageNet's red, green and blue, on a scale of 0 to 255.
MEAN = 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
Image.MAX_IMAGE_PIXELS = None  # Pillow would refuse very large images
MOST_LOADER_SECONDS = 2_000_000  # 23 days; poll() counts milliseconds in 32 bits


class CocoFirstCategory(Dataset):
    """Images, each with the category of its first annotation as its label.

    A key is (epoch, index). Key and seed alone decide how an image is cropped, so it looks the
    same on whichever rank, and in a resumed run. For another kind of data write a Dataset with
    such keys and with `labels`, and functions in place of read_image_list and check_images.
    """

    def __init__(self, args, process, folder, image_list, transform):
        self.size, self.seed, self.process = args.image_size, args.seed, process
        self.folder, self.names, self.labels = folder, image_list.names, image_list.labels
        self.transform = transform

    def __len__(self):
        return len(self.names)

    def __getitem__(self, key):
        """An image, uint8 (3, size, size), and its label."""
        epoch, index = key
        image = self.load_image(os.path.join(self.folder, self.names[index]))
        # Python's hash of integers is the same in every process. torch.manual_seed would do as
        # well, but it also seeds the GPUs, which would make a crop a third slower.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**32)
        return self.transform(image), self.labels[index]

    def load_image(self, path):
        """uint8 (3, height, width), RGB. An image that cannot be decoded becomes black."""
        content = Path(path).read_bytes()  # its OSError ends the run: the storage may be gone
        try:
            return decode(content)
        except Exception as error:  # damaged images raise errors of any type
            reason = one_line(error).partition(" <_io")[0]
            text = f"image {path} is damaged, a black one takes its place"
            log(self.process, f"WARNING: {text}: {reason}")
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8)


def decode(content):
    """uint8 (3, height, width), RGB, of a file's bytes: its first frame, as Pillow shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow also warns of images that it can decode
        image = Image.open(BytesIO(content))
        if image.mode[0] in "IF":
            image = to_8_bits(image)
        if image.mode != "RGB":  # convert would copy the image in any case
            image = image.convert("RGB")
        # As pil_to_tensor, with a copy less. PyTorch warns that nobody may write to these bytes.
        pixels = torch.frombuffer(image.tobytes(), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


def to_8_bits(image):
    """A grey image of 16 or 32 bits in 8 bits. NOTE: convert("RGB") would only clip its values."""
    # 16 bits have a range of their own. Of 32 bits the least value becomes black, the greatest
    # one white.
    is_16_bit = image.mode.startswith("I;16")
    is_16_bit |= image.mode == "I" and image.format in ("PNG", "PPM")  # they have no 32 bits
    image = image.convert("I").convert("F") if image.mode != "F" else image
    low, high = (0, 2**16 - 1) if is_16_bit else image.getextrema()
    if not 0 < high - low < math.inf:
        raise ValueError(f"its values, from {low} to {high}, have no range to scale")
    scale = 255 / (high - low)
    return image.point(lambda value: value * scale + (0.5 - low * scale)).convert("L")


def make_loader(args, process, dataset, sampler, workers):
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        persistent_workers=workers > 0,
        pin_memory=process.gpu,
        timeout=min(args.timeout, MOST_LOADER_SECONDS) if workers else 0,
    )


def ignore_stop_signals(_):
    """In a loader worker: SLURM signals all processes of a job, but the ranks decide."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)


def start_workers(*loaders):
    """Starts the loader workers, with nothing to do yet."""
    # NOTE: before the first backward pass, which starts threads. A fork after it may hang.
    for loader in loaders:
        if loader is not None:
            loader.sampler.start = loader.sampler.num_samples  # the share is empty
            iter(loader)
            loader.sampler.start = 0


def check_images(folder, names):
    """Raises UserError unless all images are in the folder; returns the sizes of some of them."""
    missing = missing_images(folder, names)
    if missing:
        raise UserError(
            f"the folder of images {folder} lacks {len(missing)} of {len(names)} listed images, "
            f"the first is {missing[0]}: {look_around(folder, missing[0])}"
        )
    sizes = []
    for name in names[:: 1 + len(names) // 64]:
        with warnings.catch_warnings(), suppress(Exception):  # a damaged image has no size
            warnings.simplefilter("ignore")
            with Image.open(os.path.join(folder, name)) as image:
                sizes.append(image.size)
    return sizes


def missing_images(folder, names):
    """Those of the names that the folder lacks."""
    # Listing each folder once is faster than looking for each of 118,287 files.
    files = {}
    for subfolder in {os.path.dirname(name) for name in names}:
        try:
            files[subfolder] = set(os.listdir(os.path.join(folder, subfolder)))
        except (OSError, ValueError):  # ValueError: a name that no file can have
            files[subfolder] = set()
    return [name for name in names if os.path.basename(name) not in files[os.path.dirname(name)]]


def look_around(folder, name):
    """Where an image is that the folder lacks, or what it is called there; and what to do."""
    try:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir()][:1000]
    except OSError as error:
        return f"{error.strerror}: check the path"
    above = Path(os.path.abspath(folder)).parents
    for other in [*list(above)[: name.count("/")], *below]:
        if os.path.isfile(os.path.join(other, name)):
            return f"{name} is in {other}: give that folder"
    for wanted in (name, os.path.basename(name)):
        if found := find_alike(folder, wanted):
            how = "under another name"
            if one_form(found) == one_form(name):
                how = "with the same letters in another Unicode form (NFC, NFD)"
            elif loose_form(found) == loose_form(name):
                how = "in another case"
            elif os.path.basename(found) == os.path.basename(name):
                how = "in another folder"
            return f"{found} is there, {how}: name it in the annotation file as it is there"
    return "check the path"


def find_alike(folder, name):
    """A file of the folder whose name has another case, extension or Unicode form; or None."""
    found = ""
    for part in name.split("/"):
        try:
            entries = os.listdir(os.path.join(folder, found))
        except OSError:
            return None
        for form in (one_form, loose_form, without_extension):
            alike = [entry for entry in entries if form(entry) in (form(part), loose_form(part))]
            if form is without_extension:  # labelling tools leave a text file beside each image
                known = Image.registered_extensions()
                alike = [entry for entry in alike if os.path.splitext(entry)[1].lower() in known]
            if alike:
                break
        else:
            return None
        found = os.path.join(found, part if part in alike else min(alike))
    return found


def one_form(name):
    return unicodedata.normalize("NFC", name)  # macOS writes an accent as a character of its own


def loose_form(name):
    return one_form(name).casefold()


def without_extension(name):
    return os.path.splitext(loose_form(name))[0]


# ---- Weights and compression: where a model begins, and how it sends less


def load_weights(process, model, source, train_list):
    """Loads ImageNet's weights or a file's, without a last layer of other classes."""
    log(process, f"Loading weights: --weights {source}")
    with as_user_error(f"--weights {source}: these are not weights of ResNet-18"):
        state = download_weights() if source == "imagenet" else read_file(source)
        names = list(train_list.categories.values())
        their_names = state.get("categories")  # a checkpoint has more than weights
        state = state.get("model", state)
        their_classes, classes = len(state["fc.weight"]), len(names)
        if their_names is not None and not are_names(their_names, their_classes):
            text = f"expected a list of the names of its {their_classes} classes"
            raise UserError(f"--weights {source}: its categories are wrong: {text}")
        reason = ""
        if source == "imagenet" or their_classes != classes:
            reason = f", of {their_classes} other classes, is left out: {classes} classes here"
        elif their_names and list(their_names) != names:
            pairs = zip(their_names, names, strict=True)
            theirs, own = next((theirs, own) for theirs, own in pairs if theirs != own)
            reason = f" is left out: its class {theirs!r} is {own!r} here"
        elif their_names:
            check_names("of the training images", train_list)
        if reason:
            state |= {"fc.weight": model.fc.weight, "fc.bias": model.fc.bias}
            log(process, f"--weights {source}: the last layer{reason}")
        model.load_state_dict(state)


def are_names(value, count):
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return False
    return all(isinstance(name, str) for name in value)


def download_weights():
    """ImageNet's weights, from the folder of earlier downloads if they are there."""
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
    prefix = (
        f"no ImageNet weights: on a machine with internet access download {weights.url} into "
        f"{torch.hub.get_dir()}/checkpoints (TORCH_HOME moves this folder), or use --weights none"
    )
    with as_user_error(prefix):
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)


def read_file(path):
    """What torch.save has written. Code in the file is not run. Raises UserError."""
    with as_user_error(f"cannot read {path}, which torch.save should have written"):
        return torch.load(path, map_location="cpu", weights_only=True)


def compress_gradients(args, ddp):
    """Makes DDP send less, as --grad_compression says. Returns PowerSGD's state, or None.

    fp16 and bf16 round each gradient to 2 bytes, for sending only. PowerSGD sends two thin
    matrices in place of each large one, and adds what they lack to the gradients of the next
    step. A checkpoint does not have this remainder, so a run that resumes differs a little.
    """
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if args.grad_compression in hooks:
        ddp.register_comm_hook(None, hooks[args.grad_compression])
    if args.grad_compression != "powersgd":
        return None
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=args.powersgd_rank,
        start_powerSGD_iter=UNMEASURED_STEPS + 1,  # + 1 for the pass of rebuild_buckets
        orthogonalization_epsilon=1e-8,  # avoids a division by 0
    )
    hook = powerSGD_hook.powerSGD_hook
    if args.precision == "bf16":  # halves the memory traffic, the largest part of its cost
        hook = default_hooks.bf16_compress_wrapper(hook)
    ddp.register_comm_hook(state, hook)
    return state


def rebuild_buckets(training):
    """All ranks: a forward and a backward pass over blank images, before any step.

    After its first backward pass DDP changes which gradients are in which bucket. The buckets
    decide the order in which the ranks' gradients are added, and so the last bits of the sums.
    Without this pass a resumed run would not equal an unbroken one bit for bit.
    """
    before = [buffer.clone() for buffer in training.model.buffers()]
    size = training.args.image_size
    blank = torch.zeros(training.args.batch_size, 3, size, size, dtype=torch.uint8)
    forward(training, training.ddp, blank).sum().backward()
    training.optimizer.zero_grad()
    for buffer, old in zip(training.model.buffers(), before, strict=True):
        buffer.copy_(old)  # undoes what the blank images did to the batch-norm statistics


def bytes_per_step(training):
    """Bytes that each rank hands to the all-reduces of a step, after compression."""
    args, powersgd = training.args, training.powersgd
    sent_as = args.precision if powersgd else args.grad_compression
    size = sum(map(torch.numel, training.model.parameters())) * (2 if "16" in sent_as else 4)
    _, before, after = powersgd.compression_stats() if powersgd else (1, 1, 1)
    return size * after // before if before else size


# ---- Time: how long each part of a step takes, for the log; and PyTorch's profiler

UNMEASURED_STEPS = 3  # the first ones are slower. PowerSGD does not begin before they are over
# Three times in seconds, and the number of this rank's images.
StepTime = namedtuple("StepTime", "data exposed whole images")


class StepTimer:
    """Measures the parts of each step, by the clock of the device.

    data: the wait for images. exposed: the exposed communication, from the moment when this rank
    has all its own gradients until they are averaged. In this time a rank computes nothing: it
    sends and receives, and waits for slower ranks. The rest is called compute; a step with a log
    line writes that line in it, and the ranks agree to go on.
    """

    def __init__(self, device, model):
        self.device_type = device.type
        self.moments = {}  # of the present step, by name
        self.unread = []  # (moments, number of images) of steps that a GPU may not have finished
        self.step_times = []
        self.logged = 0  # how many of them have been in a log line
        # Backward ends with the first layer: its gradient is the last one to be ready.
        next(model.parameters()).register_post_accumulate_grad_hook(
            lambda parameter: self.mark("own gradients")
        )

    def mark(self, name):
        """Notes this moment. A GPU runs behind the script: there, when the GPU gets here."""
        if self.device_type == "cuda":
            self.moments[name] = torch.cuda.Event(enable_timing=True)
            self.moments[name].record()
            return
        if self.device_type == "mps":
            torch.mps.synchronize()
        self.moments[name] = perf_counter()

    def start_step(self):
        """Leaves out what happened before: it is not part of the next step."""
        self.moments = {}
        self.mark("begin")
        self.mark("waiting for data")

    def end_step(self, image_count):
        self.mark("end")
        self.unread.append((self.moments, image_count))
        self.moments = {"begin": self.moments["end"]}

    def last_step_seconds(self):
        self.read()
        return self.step_times[-1].whole if self.step_times else 1

    def since_last_line(self):
        """The StepTimes of the steps after those of the last call."""
        self.read()
        new = self.step_times[self.logged :]
        self.logged = len(self.step_times)
        return new

    def read(self):
        """Fills in `step_times`; waits for a GPU."""
        if self.device_type == "cuda" and self.unread:
            self.unread[-1][0]["end"].synchronize()
        for moments, image_count in self.unread:
            data = self.seconds(moments["waiting for data"], moments["data arrived"])
            exposed = self.seconds(moments["own gradients"], moments["gradients averaged"])
            whole = self.seconds(moments["begin"], moments["end"])
            self.step_times.append(StepTime(data, exposed, whole, image_count))
        self.unread.clear()

    def seconds(self, begin, end):
        return begin.elapsed_time(end) / 1e3 if self.device_type == "cuda" else end - begin


def mean_time(times):
    """The StepTime of an average step; zeros without any step."""
    return StepTime(*map(fmean, zip(*times, strict=True))) if times else StepTime(0, 0, 0, 0)


# Steps: before the profiler starts, while it starts, and in the trace.
PROFILED = {"wait": 5, "warmup": 2, "active": 3}


def check_profile(args, process, checkpoint):
    """All ranks: raises UserError if the run is too short, or a rank cannot write its trace."""
    needed = sum(PROFILED.values())
    with errors_end_all_ranks():
        if args.max_steps < needed:
            raise UserError(f"--profile needs {needed} steps: this run makes {args.max_steps}")
        with as_user_error(f"--profile {args.profile} cannot be written"):
            os.makedirs(args.profile, exist_ok=True)
            tempfile.TemporaryFile(dir=args.profile).close()
    if checkpoint and args.max_steps - checkpoint["step"] < needed:
        log_from_rank_0(process, f"Note: no --profile, because fewer than {needed} steps are left")
        args.profile = None


def start_profiler(process):
    """PyTorch's profiler. It does nothing in the first steps, see PROFILED."""
    if not process.gpu:  # Kineto, the profiler's library, would print errors about that
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA] if process.gpu else [kinds.CPU],
        schedule=torch.profiler.schedule(**PROFILED, repeat=1),
    )
    profiler.start()
    return profiler


def profile_step(training):
    """All ranks: tells the profiler that a step has ended, and writes the trace after the last."""
    args, process, profiler = training.args, training.process, training.profiler
    actions, action = torch.profiler.ProfilerAction, profiler.current_action
    profiler.step()
    if action == actions.NONE:  # in the step that has ended
        return
    if action == actions.RECORD_AND_SAVE:  # it was the last one
        path = os.path.join(args.profile, f"rank{process.rank}.json.gz")
        with errors_end_all_ranks():  # all wait: a later step has no wait for a rank that writes
            with as_user_error(f"--profile {path} cannot be written"):
                profiler.export_chrome_trace(path)
            if process.rank == 0:
                log_profile(process, profiler.events())
        training.profiler = None
    training.timer.unread.pop()  # a profiled step takes longer than others: no average has it
    training.timer.start_step()


def log_profile(process, events):
    """What took the most time in the profiled steps: on a GPU its kernels."""
    # An operation's time is without that of other operations inside it. What another thread does
    # beside them, such as an all-reduce over Gloo, counts in full.
    seconds, counts = Counter(), Counter()
    for event in events:
        of_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        is_block = event.is_user_annotation and not event.is_async  # a name for several operations
        if is_block or of_gpu != process.gpu:
            continue
        whole, own = event.time_range.elapsed_us(), event.self_cpu_time_total
        microseconds = whole if event.is_async or process.gpu else own
        seconds[event.name] += microseconds / 1e6
        counts[event.name] += 1
    for name, time_of_it in seconds.most_common(10):
        text = f"Profile of {PROFILED['active']} steps | {name[:80]} | {1e3 * time_of_it:.1f} ms"
        log(process, f"{text} | {counted(counts[name], 'time')}")


# ---- Going on, or not: what happens between steps; a stop signal ends all ranks together

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]  # USR1: SLURM's, at a time limit
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup makes a process ignore it
    STOP_SIGNALS.append(signal.SIGHUP)
PARENT_ENDED = 1000  # in place of a signal's number, and above all of them
MOST_STEPS_WITHOUT_AGREEMENT = 20


def catch_stop_signals(process):
    """A stop signal is only noted, in process.stop. agree_to_continue then stops all ranks."""

    def note(signal_number, _):
        process.stop = signal_number

    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, note)


def finish_step(training, epoch, loss, image_count):
    """All ranks: logs, agrees to go on and saves, each in the steps in which it is due."""
    args, timer = training.args, training.timer
    # Steps 1, 6, 11, ... with --log_every 5, and the last one.
    log_due = (training.step - 1) % args.log_every == 0 or training.step == args.max_steps
    shown_loss = loss.item() if log_due else None  # waits for a GPU: not in each step
    timer.end_step(image_count)
    if training.profiler:
        profile_step(training)
    if log_due:
        log_step(training, epoch, shown_loss)  # on every rank: of its own images
    save_due = args.checkpoint_every and training.step % args.checkpoint_every == 0
    if log_due or save_due or training.step >= training.agree_at_step:
        steps = agree_to_continue(training, timer.last_step_seconds())
        training.agree_at_step = training.step + steps
    if save_due:
        save_checkpoint(training)
        timer.start_step()  # the time to save is not part of a step
    timer.mark("waiting for data")


def batches_until_stop(training, loader):
    """All ranks: the loader's batches. After some of them the ranks agree to go on."""
    # After the same batches on all ranks, which the shortest share has, too; and at the end.
    images_of_shortest = len(loader.dataset) // training.process.world_size
    shortest = math.ceil(images_of_shortest / training.args.batch_size)
    agree_at_batch, began = 1, perf_counter()
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == agree_at_batch <= shortest:
            agree_at_batch += agree_to_continue(training, perf_counter() - began)
        began = perf_counter()
    agree_to_continue(training, perf_counter() - began)


def agree_to_continue(training, seconds):
    """All ranks: all go on, or all end: by UserError, or with a checkpoint by Stopped.

    seconds: of the last step. Returns after how many steps the ranks should agree again: about
    once a second, because here they wait for each other and for their GPUs.
    """
    process, stop = training.process, training.process.stop
    # A torchrun that is killed leaves its ranks behind, with another parent. A rank that was
    # started by hand, with RANK set, may go on when its shell has ended.
    started_by_hand = process.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ
    watched = process.launcher != "python" and not started_by_hand
    if not stop and watched and os.getppid() != process.parent:
        stop = PARENT_ENDED
    not_finite = not math.isfinite(training.loss_sum)  # as a number: a maximum may leave out NaN
    # A stop signal may come to one rank alone. Here all learn of it, after the same step.
    facts = torch.tensor([stop, not_finite, seconds], dtype=torch.float64)
    facts = facts.to(process.exchange_device)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    stop, not_finite, slowest = facts.tolist()
    if not_finite:
        raise UserError(f"a loss up to step {training.step} is not finite: lower --lr")
    if stop:
        save_checkpoint(training)
        raise Stopped(training, int(stop))
    return max(1, min(MOST_STEPS_WITHOUT_AGREEMENT, int(1 / max(slowest, 1e-9))))


# ---- Checkpoint: what is saved, and who may resume from it

# A run can resume only with the same values of these. The number of processes may differ.
SAME_ON_RESUME = ["global_batch_size", "image_size", "lr", "warmup_steps", "precision"]
SAME_ON_RESUME += ["grad_compression", "powersgd_rank", "sync_bn", "seed"]


def settings_of(training):
    """{name: value} of what a run must have in common with the run that it resumes."""
    settings = {f"--{name}": getattr(training.args, name) for name in SAME_ON_RESUME}
    settings["number of classes"] = len(training.train_list.categories)
    settings["data set"] = digest(training.train_list.names, training.train_list.labels)
    settings["sizes of the images"] = training.size_digest
    return settings


def digest(*parts):
    """The first digits of a SHA-256."""
    return hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()[:12]


def check_checkpoint(args, process):
    """Raises UserError if a checkpoint cannot be saved there: now, not after an epoch."""
    path = args.checkpoint
    if os.path.isdir(path):
        raise UserError(f"checkpoint {path} is a folder: name a file in it")
    with as_user_error(f"checkpoint {path} cannot be written"):
        tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if may_restart and not process.restarts and not args.resume and os.path.exists(path):
        earlier = f"{path}.{time.strftime('%Y%m%d-%H%M%S')}"
        os.replace(path, earlier)  # or a restart would go on from it
        log(process, f"{path} is of an earlier run: renamed to {earlier}")


def write_checkpoint(training, path):
    """The old file stays until the new one is complete. Raises UserError."""
    state = {
        "settings": settings_of(training),
        "categories": list(training.train_list.categories.values()),
        "step": training.step,
        "model": training.model.state_dict(),  # in ddp's, names would begin with "module."
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    what = f"checkpoint {path} not saved at step {training.step}, an older one is kept"
    try:
        with as_user_error(what), open(f"{path}.new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it replaces the old one
            os.replace(f"{path}.new", path)
    finally:
        with suppress(OSError):
            Path(f"{path}.new").unlink(missing_ok=True)  # an incomplete one, if the disk is full


def read_checkpoint(args, process):
    """All ranks: what --checkpoint has; None if there is nothing to resume. Raises UserError."""
    if process.restarts and args.checkpoint:  # torchrun --max-restarts repeats the first command
        args.resume = True
    if not args.resume:
        return None
    path = args.checkpoint
    state = from_rank_0(lambda: read_file(path) if os.path.exists(path) else None)
    keys = {"settings", "step", "model", "optimizer", "scaler"}
    is_own = isinstance(state, dict) and keys <= state.keys()
    if state is not None and not (is_own and isinstance(state["settings"], dict)):
        raise UserError(f"checkpoint {path} is not one of this demo")
    return state


def load_checkpoint(training, state):
    """All ranks: restores what was saved. Raises UserError.

    With as many processes as before, a resumed run equals an unbroken one bit for bit. The order
    of the images and their crops depend on seed, epoch and index alone (EpochSampler,
    CocoFirstCategory). DDP adds up in the same order (rebuild_buckets). The rest is in the file.
    (Its batch-norm statistics are rank 0's: a step does not use them.) This does not hold for
    PowerSGD, nor for a GPU on which cuDNN changes an order of sums. A model with dropout would
    also need the state of torch's random generators.
    """
    path = training.args.checkpoint
    with errors_end_all_ranks(), as_user_error(f"checkpoint {path} is not one of this demo"):
        for name, value in settings_of(training).items():
            saved = state["settings"].get(name)
            if saved != value:
                text = f"checkpoint {path} was saved with {name} {saved}, not {value}"
                raise UserError(f"{text}: resume with the same")
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.scaler.load_state_dict(state["scaler"])
        training.step = state["step"]


# ---- Log: lines for people, and a line of JSON beside some of them for programs

STDOUT, STDERR = 1, 2  # file descriptors
LOGGED = ("NCCL_", "GLOO_", "OMP_", "TORCH_NCCL_", "TORCH_DIST_")  # of the environment


def log(process, text, to=STDOUT):
    """Writes a line in one piece, so that the lines of several ranks do not mix."""
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    with suppress(OSError):  # a full disk, or a reader that has gone, does not end a training
        os.write(to, f"{process.name} {text}\n".encode(errors="replace"))


def log_from_rank_0(process, text):
    if process.rank == 0:
        log(process, text)


def duration(seconds, digits=2):
    """'4h 8m 59.79s' for 14939.79."""
    minutes, rest = divmod(round(seconds, digits), 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:.{digits}f}s"
    if hours or minutes:
        text = f"{minutes}m {text}"
    return f"{hours}h {text}" if hours else text


def counted(number, one, more=None):
    """'1 step', '2 steps'."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def log_run(training, val_list):
    """All ranks: rank 0 writes what runs, on what hardware, with which settings and data."""
    args, process, train_list = training.args, training.process, training.train_list
    device = torch.cuda.get_device_name() if process.gpu else os.uname().machine
    if process.device.type == "mps":
        device = f"MPS of {device}"
    nccl = torch.cuda.nccl.version() if process.backend == "nccl" else None
    record = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl},
        **vars(args),
        "launcher": process.launcher,
        "backend": process.backend,
        "hosts": all_gather(socket.gethostname()),
        "devices": all_gather(device),
        "nodes": all_gather(process.local_rank).count(0),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "parameters": sum(map(torch.numel, training.model.parameters())),
        "start_step": training.step,
        "classes": len(train_list.categories),
        "images": len(train_list.names),
        "images_without_annotations": train_list.unlabelled,
        "picture_sizes": training.size_digest,  # a digest: equal in runs with the same images
        "padding": -len(train_list.names) % process.world_size,
        "val_images": len(val_list.names) if val_list else None,
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(LOGGED)},
    }
    log_from_rank_0(process, "Run " + json.dumps(record))
    processes = counted(process.world_size, "process", "processes")
    steps, images = counted(args.max_steps, "step"), counted(args.global_batch_size, "image")
    text = f"Run: {processes} on {counted(record['nodes'], 'node')}, {process.backend}, "
    text += f"{args.precision}; {steps} of {images}; {len(train_list.names)} labelled images, "
    text += f"{train_list.unlabelled} without a label, {record['padding']} repeated as padding. "
    if training.step:
        text += f"Resumed from {args.checkpoint} at step {training.step}"
    elif args.resume:
        text += f"No checkpoint {args.checkpoint} yet: the run starts from the beginning"
    else:
        text += "Not resumed"
    log_from_rank_0(process, text)


def log_step(training, epoch, loss):
    """The loss of this rank's images in this step; its img/s and times since the last line."""
    args, mean = training.args, mean_time(training.timer.since_last_line())
    text = f"Epoch {epoch} | Step {training.step} | Loss: {loss:.4f} | "
    if not mean.images:  # all steps since the last line were profiled
        log(training.process, f"{text}profiled")
        return
    left = duration((args.max_steps - training.step) * mean.whole, 0)
    text += f"{mean.images / mean.whole:.1f} img/s | data {1e3 * mean.data:.1f} ms | "
    log(training.process, f"{text}step {1e3 * mean.whole:.1f} ms | ETA {left}")


def log_epoch(training, epoch, images_seen, began):
    """This rank's part of an epoch, or of what is left of it in a resumed run."""
    seconds = perf_counter() - began
    if images_seen:  # none if the run was resumed at the end of the epoch
        steps = training.args.steps_per_epoch
        done = training.step - (epoch - 1) * steps
        state = "complete" if done == steps else f"ends at step {done} of {steps}"
        text = f"Epoch {epoch} {state} | Avg loss: {training.loss_sum.item() / images_seen:.4f} | "
        log(training.process, f"{text}{images_seen / seconds:.1f} img/s | {seconds:.2f}s")


def log_validation(training, loader, epoch, correct, seen, began):
    """Top-1: the accuracy. Baseline: the accuracy of always guessing the most frequent class."""
    most_frequent = max(Counter(loader.dataset.labels).values())
    text = f"Epoch {epoch} validation | Top-1: {100 * correct / seen:.2f}% | {seen} images | "
    text += f"{perf_counter() - began:.2f}s | baseline {100 * most_frequent / seen:.2f}%"
    log(training.process, text)


def log_summary(training, digests):
    """All ranks: rank 0 writes what the run did, its times, and whether the digests are equal."""
    process, times = training.process, training.timer.step_times
    mean = mean_time(times[UNMEASURED_STEPS:] or times)
    parts = {
        "data_ms": 1e3 * mean.data,
        "compute_ms": 1e3 * (mean.whole - mean.data - mean.exposed),
        "exposed_ms": 1e3 * mean.exposed,
        "step_ms": 1e3 * mean.whole,
    }
    ranks = all_gather({"rank": process.rank, **parts})
    images = sum(all_gather(sum(time.images for time in times)))
    seconds = sum(time.whole for time in times)
    peak = max(all_gather(torch.cuda.max_memory_allocated() if process.gpu else 0))
    summary = {
        "epochs": training.step // training.args.steps_per_epoch,
        "steps": training.step,
        "train_s": seconds,
        "img_per_s": images / max(seconds, 1e-9),
        **{name: fmean(rank[name] for rank in ranks) for name in parts},
        "ranks": ranks,
        "wire_bytes_per_step": bytes_per_step(training),
        "peak_gpu_bytes": peak or None,  # of tensors, on the rank with the most
        "weights_sha256": digests[0],
        "replicas_identical": len(set(digests)) == 1,
    }
    log_from_rank_0(process, "Summary " + json.dumps(summary))
    text = "{img_per_s:.1f} img/s; a step of {step_ms:.0f} ms is {data_ms:.0f} data + "
    text += "{compute_ms:.0f} compute + {exposed_ms:.0f} exposed communication; "
    text += f"at most {peak / 2**30:.2f} GiB of a GPU's memory; " if peak else ""
    text += "replicas identical: {replicas_identical}"
    epochs, steps = counted(summary["epochs"], "epoch"), counted(training.step, "step")
    log_from_rank_0(process, f"Summary: {epochs}, {steps}, {text.format(**summary)}")


# ---- Errors and the end: one line for an error, and ranks that end together

EXIT_FAILED, EXIT_USER = 1, 2
EXIT_STOPPED = os.EX_TEMPFAIL  # 75, from sysexits.h: try again later
# Puzzling errors of PyTorch and NCCL: a part of the text, and what to do.
ADVICE = [
    ("out of memory", "use a smaller --batch_size"),
    ("shared memory", "enlarge /dev/shm (docker: --shm-size=1g), or use --workers 0"),
    ("unable to find an engine", "is the GPU's memory full? Use a smaller --batch_size"),
    ("no kernel image", "this PyTorch has no code for this GPU: install a build that has"),
    ("DataLoader worker (pid", "something outside has ended it: is the memory full?"),
    ("DataLoader timed out", "does the storage of the images still answer?"),
    ("Duplicate GPU", "two ranks have the same GPU: start one process for each GPU"),
    ("unhandled system error", "NCCL_DEBUG=INFO says more"),
    ("/gloo/", "another rank has ended, or does not answer"),
    ("pair closure", "another rank has ended, or does not answer"),
]


class UserError(Exception):
    """Something that a user can fix: one line that says what is wrong, where, and what to do."""


class StartError(Exception):
    """The ranks do not meet or connect. Another start may help."""


class Stopped(Exception):
    """All ranks end before the training does. The checkpoint is saved."""

    def __init__(self, training, stop):
        # Nodes whose launcher can start again should do so after the end of a torchrun.
        by_parent = stop == PARENT_ENDED
        self.code = EXIT_FAILED if by_parent else EXIT_STOPPED
        cause = "the end of its parent process" if by_parent else signal.Signals(stop).name
        text = f"Stopped on {cause} | step {training.step} | exit code {self.code}"
        text += "" if training.args.checkpoint else " | not saved: no --checkpoint"
        super().__init__(text)


@contextmanager
def as_user_error(prefix):
    """Turns any error of the block into a UserError: the prefix and the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # torch.save hides the error of a full disk behind its own.
        cause = error if error.__suppress_context__ else error.__context__ or error
        raise UserError(f"{prefix}: {one_line(cause)}") from error


def one_line(error):
    """The most telling line of an error; its type if it has no words."""
    text = str(error).rpartition("Last error:")[2].strip()  # NCCL's own words follow this
    if isinstance(error, KeyError):
        text = f"no {text}"
    lines = text.splitlines() or [""]
    line = lines[-1] if "Traceback" in text else lines[0]  # an error of a loader worker has one
    return (line.removeprefix(f"{type(error).__name__}: ") or type(error).__name__)[:300]


def run_and_exit(main, log_wall_time=True):
    """Runs main(process) and ends the process with its exit code. Also for probe_link.py."""
    process, code, began = ProcessInfo(), 0, perf_counter()
    try:
        try:
            main(process)
        except Stopped as stop:
            code = stop.code
            log(process, str(stop))
        except StartError as error:
            end_process(EXIT_FAILED, process, f"ERROR: {error}")
        except UserError as error:
            code = EXIT_USER
            # Connected ranks share their errors: one line on each node is enough.
            if process.local_rank == 0 or not dist.is_initialized():
                log(process, f"ERROR: {error}", STDERR)
        leave_process_group()
        if code == 0 and log_wall_time:
            total = perf_counter() - began
            log(process, f"Cleanup complete. Total wall time: {duration(total)} ({total:.3f}s)")
    except Exception as error:
        # PyTorch's handler of this signal, for dead loader workers, could raise another error.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # With a code the reason is logged already: this is only a connection lost after it.
        end_process(code or EXIT_FAILED, process, "" if code else explain(process, error))
    sys.exit(code)


def explain(process, error):
    """The line for an error that the other ranks do not know. A bug's traceback is logged."""
    advice = [what_to_do for part, what_to_do in ADVICE if part in str(error)][:1]
    name = ""
    if not advice and not isinstance(error, (OSError, EOFError, dist.DistError)):
        name = f"{type(error).__name__}: "
        for line in traceback.format_exc().splitlines():
            log(process, line, STDERR)
    return f"ERROR: {name}" + ": ".join([one_line(error), *advice])


def end_process(code, process=None, text=""):
    """Ends a process that may not be able to end by itself: it could wait for others for ever."""
    if text:
        log(process, text, STDERR)
    # Loader workers ignore SIGTERM, and could outlive this process.
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(main)
