#!/usr/bin/env python3
"""ResNet-18 on COCO with DistributedDataParallel (DDP): one script from a laptop to a cluster.

An image's label is the category of its first annotation. torchrun starts this script several
times, usually once for each GPU. Every process trains its own copy of the model (a replica) on its
own share of the images. In each step DDP averages the gradients of all processes, so the replicas
stay equal.

One GPU, or the CPU where there is none:
    torchrun --standalone --nnodes=1 --nproc_per_node=1 demo_coco_resnet18.py \
        --coco_image_path DIR --annotation_path FILE
All GPUs of one machine:
    torchrun --standalone --nnodes=1 --nproc_per_node=gpu demo_coco_resnet18.py ...
Two nodes (machines) with two GPUs each. 10.0.0.1 is the address of the first one, 29500 any port
that is free there, --rdzv_id any number, the same on both. On the second node the command is the
same, but for --node_rank=1:
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --rdzv_id=123 --rdzv_backend=static \
        --rdzv_endpoint=10.0.0.1:29500 demo_coco_resnet18.py ...

The four processes of the last example. The world size, the number of all processes, is 4:
    node (--node_rank)                      0   0   1   1
    rank: the process's number among all    0   1   2   3
    local rank: among those of its node     0   1   0   1    it takes the GPU of this number

N processes make a step of N times as many images, and an epoch of N times fewer steps:
    images per step (global batch size) = world size x batch size x accumulate steps
The batch size is that of a process. Accumulate steps is 1, unless --accumulate_steps has each
process add up the gradients of several batches before a step. A step of N processes does what one
process would do with so large a batch, but for batch norm, which sees the images of its own
process alone. The learning rate is not adapted to N: raise --lr for a much larger batch.

Part one is the lesson. Six points make a training script distributed:
    1/6  a process learns its rank from the environment       read_environment
    2/6  it chooses its GPU and joins the process group       set_up
    3/6  each rank gets its own share of the images           make_loader
    4/6  DDP makes the models of all ranks equal              wrap_model
    5/6  backward averages the gradients over all ranks       train_step
    6/6  results are put together, and rank 0 writes them     validate, then tear_down

One rule ("the rule" below) stands behind all: ALL RANKS MAKE THE SAME COLLECTIVE CALLS IN THE SAME
ORDER. A collective call is an exchange between all ranks: all-reduce (every rank gets the sum or
mean of what all have), broadcast (every rank gets what one has), gather (a list of what each has)
or barrier (they only wait). Each rank waits in it for the others. Where one leaves a call out, the
others end with an error after --timeout seconds; calls that do not match hang, or mix up data.

Part two, below the banner, is the safety net: arguments, errors, damaged images, checkpoints.
"""

# Most of these are for part two.
import argparse
import ctypes
import gc
import hashlib
import inspect
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from glob import iglob
from io import BytesIO
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from pycocotools.coco import COCO
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info
from torchvision.transforms import RandomResizedCrop

# What to change first. Each is the default of the option with its name; --help lists all options.
NUM_EPOCHS = 2  # passes over the images
BATCH_SIZE = 64  # images per process, in one forward pass (a micro-batch)
LR = 1e-3  # learning rate of Adam
IMAGE_SIZE = 224  # pixels a side
SEED = 0  # of weights, order and crops
TIMEOUT = 300  # seconds: a process that has not answered by then counts as lost


def main(process):
    """Every process runs all of this.

    `process` tells which one of them this is: its rank, the world size, later its device.
    """
    args = parse_arguments(sys.argv[1:])
    read_environment(process)  # 1/6
    set_up(args, process)  # 2/6

    # Rank 0 reads, every rank receives: only the images have to be on all nodes. A list has the
    # names of the image files and their labels.
    lists = from_rank_0(process, "image list broadcast", lambda: read_image_lists(args))
    train_list, val_list = lists
    complete_arguments(args, process, len(train_list.names))
    settings = compare_ranks(args, process, train_list, val_list)  # is it the same run on all?
    loader = make_loader(args, process, train_list, val_list)  # 3/6

    categories = list(train_list.categories.values())  # names; a label is a place in this list
    model = build_model(args, process, len(categories))
    ddp = wrap_model(args, process, model)  # 4/6
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    run = Run(args, process, model, ddp, optimizer, loader, settings, categories)
    # With --resume rank 0 reads the checkpoint, and every rank receives it. Not before this line,
    # because a checkpoint has the optimizer's state as well as the weights.
    start_or_resume(run, train_list, val_list)

    for epoch in epochs_left(run):
        train_epoch(run, epoch)  # 5/6
        # The weights are equal on all ranks, so rank 0's are enough: it alone writes the file. But
        # all ranks make the call: the others wait until it is written, or stop where it cannot be.
        save_checkpoint(run, last=run.step == args.max_steps)
        validate(run, epoch)  # 6/6
    summarize(run)  # speed, and whether the replicas are equal
    # The caller, one_line_errors, then calls tear_down: all leave the process group together.


def read_environment(process):
    """Which one of the processes is this? Raises UserError where the launcher does not say."""
    # DDP 1/6: torchrun starts the processes and tells each its rank through the environment
    process.launcher = find_launcher()  # renames mpirun's and srun's variables to torchrun's
    if process.launcher == "python":  # started by none of them: it is alone, rank 0 of one
        return
    with as_user_error(
        f"{process.launcher} should set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
    ):
        process.rank = int(os.environ["RANK"])  # over all nodes: 0 to world_size - 1
        process.world_size = int(os.environ["WORLD_SIZE"])  # the number of processes, not of nodes
        process.local_rank = int(os.environ["LOCAL_RANK"])  # on its own node, from 0
        process.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])


def set_up(args, process):
    """Chooses the device and the backend, and joins the process group. Raises UserError."""
    # DDP 2/6: first a device of its own, then the group of all processes: NCCL connects the GPUs
    # that they have by then. The group's backend moves tensors between them: NCCL between NVIDIA
    # GPUs, one for each process; Gloo between CPUs, or where processes share a GPU.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    process.backend = choose_backend(args, gpus)
    check_process(process, gpus)
    process.phase = "rendezvous"  # what it is doing, for error messages
    if gpus:
        # The local rank gives each process of a node a GPU of its own. Otherwise all would take
        # GPU 0: NCCL refuses that, and the other GPUs would be idle.
        process.device = torch.device("cuda", process.local_rank % gpus)
        with as_user_error(f"this build of PyTorch cannot use {process.device}"):
            torch.cuda.set_device(process.device)
            torch.ones(1, device=process.device).item()
    share_cpu(process)
    choose_interface(process)  # the network interface by which Gloo reaches the other nodes

    where = f"rendezvous at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with (
        as_user_error(f"{where}: did all nodes start, with rank 0's address?", LostConnection),
        time_limit(process, args.timeout, where),
    ):
        # The torchruns of all nodes have met before, at --rdzv_endpoint. Now the processes that
        # they have started meet, at MASTER_ADDR:MASTER_PORT on rank 0's node. torchrun has set
        # both; with the static rendezvous it is the same address and port. Each process waits here
        # until all have come, at most --timeout seconds.
        dist.init_process_group(
            process.backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=args.timeout),
            # NCCL is told the device, and so connects the ranks now, not in their first exchange.
            device_id=process.device if process.backend == "nccl" else None,
            store=store_of_one(process),  # None, unless it is alone and has nobody to meet
        )


def make_loader(args, process, train_list, val_list):
    """The loader of this rank's share of the images, and of the validation images.

    One loader for both, so that its workers are not there twice. Its sampler says what is next.
    """
    dataset = FirstCategory(args, process, train_list, val_list)  # decodes and crops the images
    # DDP 3/6: DistributedSampler gives each rank its own share of the images, in each epoch
    # another one (set_epoch, in train_epoch). A step has collective calls (5/6): by the rule all
    # ranks must make the same number of steps. So all shares are equally long: of 10 images each
    # of 4 ranks gets 3, and two images come twice. ResumableSampler is a DistributedSampler that
    # can also begin in the middle of an epoch.
    sampler = ResumableSampler(
        train_list.names, process.world_size, process.rank, shuffle=True, seed=args.seed
    )
    if val_list:
        # Every world_size-th image, none twice: those that DistributedSampler repeats would count
        # twice. Here one share may have an image more than another, because validation has no
        # collective call in each batch, but only at its end.
        sampler.val_positions = range(process.rank, len(val_list.names), process.world_size)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=args.batch_size,
        num_workers=args.workers,
        worker_init_fn=set_up_worker,
        pin_memory=process.gpu,
        persistent_workers=args.workers > 0,
        collate_fn=tuple,  # __getitems__ makes whole batches: there is nothing to collate
    )


def build_model(args, process, classes):
    """ResNet-18 on this process's device. Before 4/6 only rank 0's has the weights asked for."""
    torch.manual_seed(args.seed)  # to repeat a run; what makes the ranks equal is DDP (4/6)
    model = torchvision.models.resnet18(num_classes=classes)
    with share_errors(process, "weights"):  # ends with a collective call: an error ends all ranks
        if process.rank == 0 and args.weights != "none":
            load_weights(process, model, args.weights)
    model = model.to(process.device, memory_format=torch.channels_last)
    adapt_model(args, process, model)  # as --sync_bn, --compile and --device ask
    return model


def wrap_model(args, process, model):
    """The model in DDP."""
    if process.mps:  # a Mac's GPU: one process, and no backend
        return WithoutDDP(model)
    # DDP 4/6: DDP copies rank 0's weights into the model of every rank, here and now, so that all
    # start equal. ddp(images) then computes what model(images) does, and its backward pass also
    # averages the gradients (5/6). Both have the same weights, in the same memory: the optimizer
    # is given the model's, and validation, which has no gradients, calls model(images).
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp_options(args))
    # DDP would also copy rank 0's batch-norm statistics before each forward pass, where all would
    # wait for it. Once an epoch is enough: train_epoch does it. (Not as an argument of the call
    # above, because PyTorch has renamed that one.)
    ddp.broadcast_buffers = False
    return ddp


def forward(run, model, images):
    """Logits float32 (n, classes) of images uint8 (n, 3, size, size), normalized as ImageNet's."""
    device, dtype = run.process.device, REDUCED.get(run.args.precision)
    images, mean, std = (t.to(device, non_blocking=run.process.gpu) for t in (images, MEAN, STD))
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        return model((images - mean) / std).float()


def train_step(run, micro_batches):
    """One step of the optimizer; returns the mean loss of this rank's images, as a tensor."""
    total = torch.zeros((), device=run.process.device)
    for number, (images, labels) in enumerate(micro_batches, 1):
        # The gradients of a step's micro-batches add up on this rank. Only the backward pass of
        # the last micro-batch sends them: no_sync keeps the earlier ones from sending. The forward
        # pass stands in no_sync, too: in it DDP decides whether the backward pass will send.
        last = number == len(micro_batches)
        with nullcontext() if last else run.ddp.no_sync():
            logits = forward(run, run.ddp, images)
            labels = torch.from_numpy(labels)
            if (labels != IGNORED).any():  # IGNORED is the label of a damaged image
                labels = labels.to(run.process.device, non_blocking=run.process.gpu)
                loss = cross_entropy(logits, labels, ignore_index=IGNORED)
            else:  # all images damaged: gradients of zero, because by the rule it must send some
                loss = 0 * logits.sum()
            # The loss is the mean over a micro-batch's images, the step's is the mean of these: a
            # shorter one, at the end of an epoch, counts as much as the others.
            loss = loss / len(micro_batches)
            # DDP 5/6: backward works from the last layer to the first. As soon as the gradients of
            # some layers (a bucket) are there, DDP starts to average them over all ranks (an
            # all-reduce), while backward computes those of layers nearer to the input. At the end
            # every gradient is the mean over all ranks, from equally large batches. The fast ranks
            # have waited for the slowest.
            run.scaler.scale(loss).backward()
        total += loss.detach()
    run.timer.note_moment("averaged")  # for the Summary, which says how long ranks have waited
    # Equal weights and equal gradients on all ranks: the weights stay equal. The scaler is for
    # fp16, whose range is small; otherwise it does nothing.
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return total


def train_epoch(run, epoch):
    """Trains what is left of an epoch."""
    # Seed and epoch decide the order of the images, and so the shares: without this call each
    # epoch repeats the first one.
    run.loader.sampler.set_epoch(epoch)
    # The batches of one step: --accumulate_steps of them, in an epoch's last step maybe fewer.
    for micro_batches in read_steps(run):
        set_learning_rate(run)
        loss = train_step(run, micro_batches)
        # Logs this rank's own loss. After a number of steps that all know, all agree to go on.
        finish_step(run, loss, micro_batches)
    if run.process.world_size > 1:
        # Batch norm's statistics come from each rank's own images. All shall validate the same
        # model: rank 0's statistics are copied to all. By the rule every rank makes these calls.
        for buffer in run.model.buffers():
            dist.broadcast(buffer, src=0)
    finish_epoch(run)


@torch.inference_mode()
def validate(run, epoch):
    """Logs the share of right answers over all validation images that are not damaged."""
    if not run.args.val_image_path:
        return
    start, hits, images = perf_counter(), 0, 0
    run.model.eval()
    run.loader.sampler.give("validation")
    for batch, labels in run.loader:
        if run.process.stop:  # a stop signal has come to this rank
            break
        guesses = forward(run, run.model, batch).argmax(1).cpu().numpy()
        hits += (guesses == labels).sum()
        images += (labels != IGNORED).sum()
    run.model.train()
    agree_to_continue(run)  # where a stop signal has come to any rank, all end here
    # DDP 6/6: each rank has counted its own share. gather (here dist.all_gather_object) hands the
    # numbers of every rank to every rank. Their sums are the same everywhere: rank 0 alone logs
    # them. At the very end all leave the process group (tear_down, below).
    all_hits, all_images = gather(hits, images)
    hits, images = sum(all_hits), sum(all_images)
    if run.process.rank == 0:
        result = f"Top-1: {100 * hits / max(1, images):.2f}% | {images} images"
        result += f" | {perf_counter() - start:.2f}s | baseline {baseline(run):.2f}%"
        log(run.process, f"Epoch {epoch} validation | {result}")


def tear_down(process, code):
    """Leaves the process group, at the end of a run and after an error that all ranks share."""
    if not dist.is_initialized():
        return
    # A rank that is done waits here for all others. If it ended first, its connections would
    # break while others still use them; and after an error torchrun, which kills all processes as
    # soon as one has failed, could kill some before they have said why.
    dist.barrier()
    gc.collect()  # frees DDP: threads of the group that still run could abort Python at its end
    dist.destroy_process_group()
    if code == 0:
        seconds = perf_counter() - process.started
        log(process, f"Cleanup complete. Total wall time: {duration(seconds)} ({seconds:.3f}s)")


# =============================================================================================
# PART TWO: the safety net. A first reading can end here.
# =============================================================================================

# --- System ------------------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # on Windows; check_system says what to do
    fcntl = None

LEAST_TORCH, LEAST_TORCHVISION = (2, 11), (0, 26)  # the oldest with which this script was run


def check_system():
    """Raises UserError where the system or the libraries cannot run this script at all."""
    if not fcntl:
        raise UserError(
            "this Python has no fcntl, as on Windows: start the script in WSL2, which is Linux "
            "inside Windows (wsl --install)"
        )
    for library, least in ((torch, LEAST_TORCH), (torchvision, LEAST_TORCHVISION)):
        name, version = library.__name__, str(library.__version__)
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and tuple(map(int, found.groups())) < least:
            raise UserError(
                f"{name} {version} is older than {least[0]}.{least[1]}: pip install --upgrade "
                "torch torchvision, or activate another environment"
            )


# --- Errors -----------------------------------------------------------------------------------

# Gloo and the loader raise plain RuntimeErrors: these parts of their texts tell them from bugs.
OUTSIDE = re.compile(r"/gloo/|pair closure|DataLoader worker")


class UserError(Exception):
    """What a user can mend: one line that says what is wrong, where, and what to do."""

    kind = "user"  # a restart would meet it again


class LostConnection(UserError):
    """Other processes that did not come, or the network: a restart may help."""

    kind = "lost"


@contextmanager
def as_user_error(what, error_type=UserError):
    """Makes one error, `what` and the cause, of any other error in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything; torch.save wraps the disk's
        cause = error if error.__suppress_context__ else error.__context__ or error
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, dist.DistBackendError):  # NCCL's own words stand at its end
            what, text = "NCCL", text.rpartition("Last error:")[2].strip()
        raise error_type(f"{what}: {' '.join(text.splitlines()[:2])[:300]}") from None


def kind_of(error):
    """lost: network, other ranks, loader workers, the system; user: a full GPU; else a bug."""
    if isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error):
        return "user"
    known = isinstance(error, RuntimeError) and OUTSIDE.search(str(error))
    return "lost" if known or isinstance(error, (OSError, dist.DistError)) else "bug"


def report(process, kind, text, to=2):
    """Logs why this process ends, and leaves it where torchrun looks for it, with its phase."""
    if to:
        log(process, text, to)
    extra = {"kind": kind, "rank": process.rank, "phase": process.phase, "timestamp": time.time()}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": {"message": f"{process.name} {text}", "extraInfo": extra}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(message))


def one_line_errors(main):
    """Runs main(process) and ends the process; errors are one line, or of a bug a traceback.

    Exit code: 0 done, 1 error, 2 wrong arguments, 75 stopped by a signal, with --checkpoint saved.
    """
    process, code = Process(), 0
    try:
        check_system()
        main(process)
    except UserError as error:
        code, others_tell = 1, process.local_rank > 0 and dist.is_initialized()
        report(process, error.kind, f"ERROR: {error}", to=0 if others_tell else 2)
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch would raise one more in here
        for worker in torch.multiprocessing.active_children():
            worker.kill()  # it takes no SIGTERM, and could outlive this process
        kind = kind_of(error)
        if kind == "bug":
            report(process, kind, f"{type(error).__name__}: {error}", to=0)
            sys.excepthook(*sys.exc_info())
        else:
            reason = str(error).strip().splitlines()[-1][:300]
            if kind == "user":
                reason += f" Give less than the present --batch_size {process.batch_size}"
            report(process, kind, f"ERROR: in {process.phase}: {reason}")
        # Nothing else: a tear-down could wait for ranks that are gone, and Python's own exit for a
        # lock that a killed worker held.
        os._exit(1)
    tear_down(process, code)
    sys.exit(code)


def gather(*values):
    """For each value the list of what it is on all ranks, in the order of the ranks."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    return zip(*ranks, strict=True)


@contextmanager
def share_errors(process, phase):
    """A block that all ranks run: a UserError of one ends all of them, with one line, no hang."""
    process.phase = phase
    error = None
    try:
        yield
    except UserError as failure:
        error = str(failure)
    (errors,) = gather(error)
    if failed := [rank for rank, text in enumerate(errors) if text]:
        which = f" (rank {', '.join(map(str, failed))})" if len(failed) < len(errors) else ""
        raise UserError(errors[failed[0]] + which)


def from_rank_0(process, phase, make):
    """What make() returns on rank 0, on every rank; or its UserError."""
    with share_errors(process, phase):
        result = [make() if process.rank == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


# --- Arguments ---------------------------------------------------------------------------------

REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what --precision computes in
PRECISIONS = ["fp32", "fp16", "bf16"]  # a GPU that is fast in one is so in those before it
LR_BATCH = 64  # images a step for which --lr is meant, by --lr_scaling linear
LOG_EVERY_CPU, LOG_EVERY_GPU = 5, 20  # steps: each line makes a GPU wait
SHARED_MEMORY = "/dev/shm"  # of Linux: here PyTorch's loader workers hand their batches over
# Each option's name; its type and default (! for one that must be given), or its choices, the
# default first; the least that a number may be; its meaning.
OPTIONS = f"""
coco_image_path     text!                     -     folder of the training images
annotation_path     text!                     -     their COCO instances file
val_image_path      text                      -     folder of the validation images
val_annotation_path text                      -     their COCO instances file
image_size          int={IMAGE_SIZE}          33    pixels a side
workers             int                       0     loader processes; unset: cores - 1, on a CPU 1
num_epochs          int={NUM_EPOCHS}          1     passes over the images
batch_size          int={BATCH_SIZE}          1     images per process and micro-batch
global_batch_size   int                       1     images per step of all processes together
accumulate_steps    int=1                     1     micro-batches per optimizer step
lr                  float={LR}                1e-9  learning rate of Adam
lr_scaling          none|linear               -     linear: --lr times global batch / {LR_BATCH}
warmup_steps        int=0                     0     steps in which the rate rises to its value
weights             text=imagenet             -     imagenet, none, or a state-dict FILE
seed                int={SEED}                0     of weights, order and crops
max_steps           int                       1     stop after this many optimizer steps in all
precision           auto|fp32|fp16|bf16       -     auto: what the hardware does best
compile             flag                      -     torch.compile the model
sync_bn             flag                      -     batch norm over the images of all GPUs
device              auto|mps                  -     auto: NVIDIA GPU, else CPU; mps: a Mac's GPU
backend             auto|nccl|gloo            -     auto: nccl on NVIDIA GPUs, else gloo
timeout             float={TIMEOUT}           0.1   seconds until a silent peer counts as lost
bucket_cap_mb       float                     0.1   MiB in one all-reduce; unset: as DDP has it
grad_compression    none|fp16|bf16|powersgd   -     what gradients are sent as
powersgd_rank       int=8                     1     of the matrices that PowerSGD sends
log_every           int                       1     steps from line to line; unset: 5, on GPUs 20
checkpoint          text                      -     FILE, saved at each epoch's end and at a stop
checkpoint_every    int=0                     0     and every N optimizer steps; 0: not
resume              flag                      -     go on from --checkpoint if that file exists
"""


def make_parser():
    """The parser of OPTIONS; its `least` holds the lower bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.least = {}
    for line in OPTIONS.strip().splitlines():
        name, kind, least, text = line.split(maxsplit=3)
        kind, _, default = kind.partition("=")
        how = {"type": {"int": int, "float": float}.get(kind), "default": default or None}
        if "|" in kind:
            how = {"choices": kind.split("|"), "default": kind.partition("|")[0]}
        elif kind == "flag":
            how = {"action": "store_true"}
        parser.add_argument(f"--{name}", help=text, required=kind == "text!", **how)
        parser.least |= {name: float(least)} if least != "-" else {}
    return parser


def parse_arguments(argv):
    """The arguments; ends with one line and exit code 2 where they are wrong."""
    parser = make_parser()

    def refuse(text):
        text = f"{parser.prog}: error: {text}; see --help"
        report(Process(), "user", text, to=0)
        parser.exit(2, text + "\n")

    parser.error = refuse
    dashes = r"(?<=^--[a-z])[a-z-]+"  # those inside a name are taken for underscores
    args = parser.parse_args([re.sub(dashes, lambda m: m[0].replace("-", "_"), a) for a in argv])
    for name, least in parser.least.items():
        value = getattr(args, name)
        if value is not None and not least <= value < 2**31:
            refuse(f"--{name} {value} is not at least {least:g}")
    if bool(args.val_image_path) != bool(args.val_annotation_path):
        refuse("--val_image_path and --val_annotation_path go together: give both")
    if args.resume and not args.checkpoint:
        refuse("--resume needs --checkpoint FILE")
    return args


def complete_arguments(args, process, images):
    """Fills in what depends on the machine and on the number of images. Raises UserError."""
    with share_errors(process, "check of the arguments"):
        complete_device(args, process)
        complete_batch(args, process.world_size * args.accumulate_steps, images)
        process.batch_size = args.batch_size
        complete_rate(args, process)
        complete_workers(args, process)
    fastest, gpus = gather(fastest_precision(process), process.gpu)
    complete_lines(args, gpus)
    with share_errors(process, "check of the arguments"):
        complete_precision(args, process, fastest)


def complete_device(args, process):
    """Takes a Mac's GPU, where --device asks for it. Raises UserError, of --sync_bn too."""
    if args.sync_bn and not process.gpu:
        raise UserError("--sync_bn needs NVIDIA GPUs: PyTorch has no other SyncBatchNorm")
    if args.device == "mps":
        if process.gpu or not torch.backends.mps.is_available():
            raise UserError("--device mps: PyTorch finds no Mac's GPU here: leave it out")
        if process.world_size > 1:
            raise UserError(f"--device mps takes one process, not {process.world_size}")
        if args.grad_compression != "none":
            raise UserError("--grad_compression goes with DDP, which --device mps is without")
        process.device = torch.device("mps")
        log(process, "One process on a Mac's GPU, without DDP, which has no backend there")


def complete_workers(args, process):
    """The number of loader processes, and whether they can work here."""
    chosen = args.workers is None
    if chosen:
        args.workers = 1 if process.device.type == "cpu" else max(1, process.cores - 1)
    if args.workers and sys.platform == "linux":
        fit_workers(args, process, chosen)
    if args.workers:
        with as_user_error("loader workers need a folder: export TMPDIR=DIR, or give --workers 0"):
            folder = tempfile.gettempdir()
        if len(folder) > 75:  # of 107 in a socket's name
            raise UserError(f"TMPDIR {folder} is too long for loader workers: export TMPDIR=/tmp")
    if process.gpu and process.cores < 2 and process.local_rank == 0:
        text = "WARNING: one core for this process, whose GPU will wait for images: give it more"
        log(process, f"{text} (srun --cpus-per-task=8)")


def fit_workers(args, process, chosen):
    """Compares shared memory with what the workers need; lowers a number that was chosen here.

    Where it is full, the kernel ends a worker by a bus error. Raises UserError.
    """
    free = free_bytes(SHARED_MEMORY) // process.local_world_size
    batch = 3 * args.batch_size * args.image_size**2
    # There are at most two batches of each worker, and those of this step and of the one before.
    fitting = max(0, (free // batch - 2 * args.accumulate_steps) // 2)
    if args.workers <= fitting:
        return
    sizes = [f"{size / 2**20:.3g} MiB" for size in (free, batch)]
    text = f"{SHARED_MEMORY} has {sizes[0]} for each process and a batch takes {sizes[1]}: "
    more = "enlarge it (docker: --shm-size=1g)"
    if not chosen and free < batch:
        raise UserError(f"{text}{more}, or give --workers 0")
    if chosen:
        text += f"--workers {fitting} in place of {args.workers}; for more {more}"
        args.workers = fitting
    else:
        text += f"--workers {args.workers} may end by a bus error; give fewer, or {more}"
    if process.local_rank == 0:
        log(process, f"WARNING: {text}")


def free_bytes(folder):
    """Of a file system; none where this user may not write."""
    try:
        found = os.statvfs(folder)
    except OSError:  # no such folder
        return 0
    if not os.access(folder, os.W_OK):
        return 0
    # A tmpfs without a limit has no blocks at all.
    return found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize


def complete_rate(args, process):
    """The learning rate for this global batch, by --lr_scaling."""
    if args.lr_scaling == "linear":
        given, args.lr = args.lr, args.lr * args.global_batch_size / LR_BATCH
        if process.rank == 0:
            log(process, f"--lr {given:g} x {args.global_batch_size} / {LR_BATCH} = {args.lr:g}")


def complete_batch(args, parts, images):
    """Batch sizes and numbers of steps; a step of all ranks has `parts` micro-batches."""
    size = args.global_batch_size or args.batch_size * parts
    if size % parts:
        raise UserError(f"--global_batch_size {size} is no multiple of {parts} (ranks x batches)")
    args.global_batch_size, args.batch_size = size, size // parts
    args.steps_per_epoch = math.ceil(images / size)
    args.max_steps = min(args.num_epochs * args.steps_per_epoch, args.max_steps or sys.maxsize)


def complete_lines(args, gpus):
    """Steps from log line to log line; `gpus` says of each rank whether it has one."""
    if args.log_every is None:
        args.log_every = LOG_EVERY_GPU if all(gpus) else LOG_EVERY_CPU


def complete_precision(args, process, fastest):
    """What to compute in, and to send gradients as; `fastest` is a list with each rank's."""
    if args.precision == "auto":
        args.precision = min(fastest, key=PRECISIONS.index)  # what all of them do well
        others = Counter(name for name in fastest if name != args.precision)
        if others and process.rank == 0:
            text = ", ".join(f"{number} could do {name}" for name, number in others.items())
            log(process, f"--precision auto is {args.precision}, which all ranks do ({text})")
    # fp32 means fp32: no TF32. NOTE: conv.fp32_precision = "ieee" does the same, but then
    # PyTorch raises an error where its compiler reads allow_tf32.
    torch.backends.cudnn.allow_tf32 = False
    if args.grad_compression == "powersgd":
        args.bucket_cap_mb = 1024  # NOTE: over Gloo PowerSGD hangs with two buckets
        if args.precision == "fp16":
            raise UserError(
                "PowerSGD would keep an overflow of --precision fp16: use bf16 or fp32"
            )


def fastest_precision(process):
    """bf16 where the hardware multiplies it faster, fp16 on older tensor cores, else fp32."""
    if process.gpu:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"
    if process.mps:
        return "fp32"
    with suppress(OSError):  # of Linux
        if re.search(r" (avx512|amx)_bf16\b", Path("/proc/cpuinfo").read_text(errors="replace")):
            return "bf16"
    return "fp32"


# --- Launchers and devices ---------------------------------------------------------------------

# Rank, world size, rank on the node, processes on it: what each launcher calls them.
LAUNCHERS = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    "mpirun": [f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "srun": ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
SIOCGIFCONF = 0x8912  # of linux/sockios.h: IPv4 addresses, of 40 bytes each with its interface
NVIDIA = "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"  # one is there with NVIDIA's driver


@dataclass
class Process:
    """This process's place among the others, and what it is doing."""

    launcher: str = "python"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    backend: str = ""
    cores: int = 1  # of this process
    batch_size: int = 0
    phase: str = "start"
    stop: str = ""  # why this process asks all ranks to stop
    parent: int = field(default_factory=os.getppid)
    started: float = field(default_factory=perf_counter)

    def ask_to_stop(self, number, _):
        """Handles a stop signal: the ranks decide between two steps, together."""
        self.stop = signal.Signals(number).name

    @property
    def gpu(self):
        return self.device.type == "cuda"

    @property
    def mps(self):
        """A Mac's GPU. NOTE: copies to it have to wait: PyTorch may read what is freed by then."""
        return self.device.type == "mps"

    @property
    def name(self):
        """[GPU 3]: with this each of its lines begins."""
        return f"[{self.device.type.replace('cuda', 'gpu').upper()} {self.rank}]"


def find_launcher():
    """Who started this process; sets torchrun's variables from the others'. Raises UserError."""
    env = os.environ
    for launcher, names in LAUNCHERS.items():  # mpirun before srun, which may start it
        # A batch script has SLURM's variables too, but is one process: srun alone makes steps.
        if names[0] in env and (launcher != "srun" or "SLURM_STEP_ID" in env):
            break
    else:
        return "python"
    for name, theirs in zip(LAUNCHERS["torchrun"], names, strict=True):
        env[name] = env.get(theirs, "").partition("(")[0]  # SLURM writes 2(x3)
    if launcher == "torchrun" and not env["LOCAL_RANK"] + env["LOCAL_WORLD_SIZE"]:
        # One process a node (of Kubernetes: a pod) needs no more than RANK and WORLD_SIZE.
        launcher, env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"] = "environment", "0", "1"
    if launcher == "srun":  # the first node, and a port of its own for each step of each job
        first = re.match(r"([^\[,]+)\[?(\d*)", env["SLURM_STEP_NODELIST"])
        port = int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_ADDR", first[1] + first[2])
        env.setdefault("MASTER_PORT", str(20000 + port % 12000))
    if "MASTER_ADDR" not in env:
        how = "mpirun -x" if launcher == "mpirun" else "export"
        raise UserError(f"MASTER_ADDR is not set: {how} MASTER_ADDR=HOST_OF_RANK_0")
    env.setdefault("MASTER_PORT", "29500")
    return launcher


def choose_backend(args, gpus):
    """What --backend asks for."""
    # Since PyTorch 2.15 "nccl" is another process group, which makes the backward pass wait for
    # each all-reduce. 0: the former one, in which they overlap. PyTorch reads this variable when
    # the backend is registered, for the first process group: after its import is soon enough.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    if args.backend != "auto":
        return args.backend
    return "nccl" if gpus else "gloo"


@contextmanager
def time_limit(process, seconds, where):
    """Ends this process if the block takes longer: while they connect the ranks, Gloo waits
    several times --timeout for an address that does not answer, and NCCL has no limit at all.
    """

    def end():
        reason = f"after {seconds:g} s this rank is not connected to all others"
        do = "a firewall between the nodes, or the wrong interface? Try tools/preflight.py"
        report(process, "lost", f"ERROR: {where}: {reason}: {do}")
        os._exit(1)

    timer = threading.Timer(seconds + 5, end)  # after the backend's own error, where it has one
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def store_of_one(process):
    """A store in memory for a process without a launcher, which has nobody to meet."""
    return dist.HashStore() if process.launcher == "python" else None


def check_process(process, gpus):
    """Raises UserError where rank or backend do not go with what is here."""
    if not 0 <= process.rank < process.world_size:
        raise UserError(f"RANK {process.rank} is not below WORLD_SIZE {process.world_size}")
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    if not gpus and wanted and any(map(os.path.exists, NVIDIA)) and not torch.version.hip:
        if torch.version.cuda:
            why = f"PyTorch cannot use this node's NVIDIA driver, with CUDA {torch.version.cuda}"
            do = "update it"
        else:
            why = f"this node has an NVIDIA driver, and PyTorch {torch.__version__} has no CUDA"
            do = "install a build that has, as pytorch.org says"
        raise UserError(f"{why}: {do}, or export CUDA_VISIBLE_DEVICES= to train on the CPU")
    own = process.launcher == "srun" and gpus == 1  # --gpus-per-task shows each task its own GPU
    if process.backend == "nccl" and process.local_world_size > gpus and not own:
        raise UserError(
            f"--backend nccl: {process.local_world_size} processes for {gpus} GPU(s) on this "
            "node: start one for each GPU, or use --backend gloo"
        )


def share_cpu(process):
    """Gives this process its part of the node's cores, and memory that it keeps."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bound = process.launcher in ("srun", "mpirun") and cores < os.cpu_count()  # to its own cores
    own = cores if bound else cores // process.local_world_size
    quota = cores_by_quota() / process.local_world_size
    process.cores = max(1, int(min(own, quota)))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(process.cores)
    keep_memory(2**22)


def cores_by_quota(listed="/proc/self/cgroup", mounted="/sys/fs/cgroup"):
    """How many cores' time a container or a job is given: the least quota of its cgroups.

    Such a limit, as of docker --cpus, leaves all cores in sight. Infinity where there is none.
    """
    least = math.inf
    with suppress(OSError, ValueError):  # not Linux
        for line in Path(listed).read_text().splitlines():  # 0::/a/b or, of version 1, 4:cpu:/a/b
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            own = Path(mounted, "cpu" if controllers else "", path.lstrip("/"))
            for folder in (own, *own.parents):  # a quota holds for all that is below it
                least = min(least, quota_of(folder))
    return least


def quota_of(cgroup):
    """Cores that a cgroup may use at a time, or infinity."""
    found = []
    with suppress(OSError, ValueError):  # "max" is no number
        found = [int(word) for word in (cgroup / "cpu.max").read_text().split()]
    with suppress(OSError, ValueError):  # of version 1
        files = [cgroup / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        found = [int(file.read_text()) for file in files]  # a quota of -1 is none
    return math.ceil(found[0] / found[1]) if found and min(found) > 0 else math.inf


def keep_memory(below=None):
    """Has glibc keep freed memory, of less than `below` bytes or of any size, for the next tensor.

    Left alone it gives the memory of large tensors back to the kernel and takes it again in each
    step, page by page. But what it keeps lies between what lives as long as the run, and fits less
    the more of that there is. So at first it keeps little: weights, buckets and the optimizer's
    state get mappings of their own. When they are there it keeps all.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        if below:
            mallopt(M_MMAP_THRESHOLD, below)
        else:
            mallopt(M_MMAP_MAX, 0)


def choose_interface(process):
    """Sets GLOO_SOCKET_IFNAME, where it is unset, to the interface that leads to MASTER_ADDR.

    Left alone Gloo takes the address of the host name, which Debian and Ubuntu map to 127.0.1.1:
    nodes could not reach each other.
    """
    one_node = process.world_size == process.local_world_size
    if one_node or process.backend != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(OSError):
        own = own_address(os.environ["MASTER_ADDR"])
        if own == "::1" or own.startswith(
            "127."
        ):  # so it is on rank 0's node, whose own name that is
            own = own_address(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", own))
        for name, address in interface_addresses():
            if address == own and name != "lo":
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


def own_address(host):
    """This node's on the way to a host. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]


def interface_addresses():
    """Yields (interface, address) of all that this node has, IPv4 first. Raises OSError."""
    room = np.zeros(2**16, np.uint8)
    asked = np.array([room.nbytes, room.ctypes.data], np.uintp).tobytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
        used = np.frombuffer(fcntl.ioctl(any_one, SIOCGIFCONF, asked), np.uintp)[0]
    for entry in room[: int(used)].reshape(-1, 40):
        name = entry[:16].tobytes().partition(b"\0")[0].decode()  # eth0, also as eth0:1
        yield name.partition(":")[0], socket.inet_ntoa(entry[20:24].tobytes())
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, _, _, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


# --- Image lists -------------------------------------------------------------------------------

PER_NODE = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
PER_NODE += ["checkpoint", "workers"]  # may differ from node to node

# Names (n,) bytes and labels (n,) as arrays (118,287 objects would be copied into each worker);
# categories {id: name}, whose order the labels count from 0; the number of images without labels.
ImageList = namedtuple("ImageList", "names labels categories unlabelled")


def read_image_lists(args):
    """(ImageList for training, ImageList for validation or None). Raises UserError."""
    gc.disable()  # it would walk millions of new objects again and again; none of them stays
    try:
        train_list, path = read_image_list(args.annotation_path), args.val_annotation_path
        return train_list, read_image_list(path, train_list.categories) if path else None
    finally:
        gc.enable()


def read_image_list(path, categories=None):
    """ImageList of a COCO instances file; categories: the training set's. Raises UserError."""
    with as_user_error(f"annotation file {path} is no usable COCO instances file"):
        with open(path, "rb") as file, redirect_stdout(None):  # pycocotools prints
            coco = COCO()  # it would make millions of floats, of polygons that nothing here reads
            no_number = {}.get  # None for each, in half the time
            coco.dataset = json.load(file, parse_float=no_number)
            coco.createIndex()
        if categories is None:
            categories = {i: str(coco.cats[i].get("name", i)) for i in sorted(coco.cats)}
        ids, images = list(categories), coco.dataset["images"]
        # the label is the category of the first annotation in the file, crowds included
        firsts = {image: found[0]["category_id"] for image, found in coco.imgToAnns.items()}
        labelled = [image for image in images if image["id"] in firsts]
        names = [image["file_name"] for image in labelled]
        unknown = {a["category_id"] for a in coco.dataset["annotations"]}.difference(ids)
        outside = [name for name in names if os.path.isabs(name) or ".." in name.split("/")]
        for wrong, what in (
            (not ids, "it has no categories"),
            (unknown, f"annotations of unknown categories {str(unknown)[:60]}"),
            (None in {*coco.imgs, *coco.imgToAnns}, "ids that are no integers"),
            (not names, "no image has an annotation, nothing to train on"),
            (outside, f"file name {outside[:1]} leaves the image folder"),
        ):
            if wrong:
                raise ValueError(what)
        coco.imgToAnns.clear()  # or all would be freed in its order, which takes longer
        return ImageList(
            np.array(list(map(os.fsencode, names))),
            np.searchsorted(ids, [firsts[image["id"]] for image in labelled]),
            categories,
            len(images) - len(names),
        )


def check_images(folder, image_list):
    """Raises UserError unless all images are there; returns the sizes of some of them."""
    names = list(map(os.fsdecode, image_list.names))
    present = set(iglob("**", root_dir=folder, recursive=True))  # one by one: 118,287 requests
    if missing := [name for name in names if name not in present]:
        raise UserError(
            f"the folder of images {folder} lacks {len(missing)} of {len(names)} listed images, "
            f"the first is {missing[0]}: check the path"
        )
    sizes = []
    for name in names[:: 1 + len(names) // 64]:
        with suppress(Exception), Image.open(os.path.join(folder, name)) as image:
            sizes.append(image.size)
    return sizes


def compare_ranks(args, process, train_list, val_list):
    """{name: value} of what is the same on all ranks. Raises UserError where it is not."""
    settings = {"number of classes": len(train_list.categories)}
    settings |= {f"--{name}": value for name, value in vars(args).items() if name not in PER_NODE}
    settings["data set"] = digest(train_list.names.tolist(), train_list.labels.tolist())
    settings["PyTorch"], settings["script"] = (
        str(torch.__version__),
        digest(Path(__file__).read_text()),
    )
    settings["--checkpoint given"] = bool(args.checkpoint)  # all ranks take part in saving it
    with share_errors(process, "check of the images"):
        sizes = check_images(args.coco_image_path, train_list)
        if val_list:
            check_images(args.val_image_path, val_list)
        if args.checkpoint and process.rank == 0:
            lock_checkpoint(args.checkpoint, process)
    if process.rank == 0 and max(map(min, sizes), default=math.inf) < args.image_size:
        log(process, "WARNING: the images are smaller than --image_size: made for another one?")
    settings["sizes of the images"] = digest(sizes)
    first = from_rank_0(process, "comparison of the ranks", lambda: settings)
    with share_errors(process, "comparison of the ranks"):
        for name, value in first.items():
            if settings.get(name) != value:
                raise UserError(
                    f"{name}: {settings.get(name)} here, {value} on rank 0: start all alike"
                )
    return settings


def digest(*parts):
    """The first digits of a SHA-256."""
    return hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()[:12]


# --- Images ------------------------------------------------------------------------------------

VALIDATION = -1  # in a key, in place of an epoch's number: a validation image
IGNORED = -100  # label of an image that cannot be decoded: cross_entropy leaves it out
MAX_DAMAGED = 0.01  # share of the images; more of them end the run
Image.MAX_IMAGE_PIXELS = 2**25  # twice as many are refused: decoded, they would fill the memory
MEAN, STD = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)


class FirstCategory(Dataset):
    """Images, each with the category of its first annotation as its label.

    A key is (epoch, position in the image list). Key and seed alone decide how an image is
    cropped, so that it looks the same on whichever rank, and in a resumed run.
    """

    def __init__(self, args, process, train_list, val_list):
        self.args, self.process = args, process
        self.training = args.coco_image_path, train_list
        self.validation = args.val_image_path, val_list

    def __getitems__(self, keys):  # a loader asks this for a whole batch
        """Images uint8 (n, 3, size, size) and labels int64 (n,) of n keys of one epoch."""
        folder, images = self.validation if keys[0][0] == VALIDATION else self.training
        positions = np.array(keys)[:, 1]
        paths = [os.path.join(folder, os.fsdecode(name)) for name in images.names[positions]]
        pixels, decoded = load_images(self.args, self.process, keys, paths)
        return pixels, np.where(decoded, images.labels[positions], IGNORED)


def load_images(args, process, keys, paths):
    """(uint8 (n, 3, size, size), a list: was each decoded?) of keys and files."""
    done = dict(enumerate(paths))
    images = torch.zeros(len(keys), args.image_size, args.image_size, 3, dtype=torch.uint8)
    images = (images.share_memory_() if get_worker_info() else images).permute(0, 3, 1, 2)
    places = images.unbind()  # at once: one by one, for each work, takes longer
    # One kind of work for all images, then the next: decoding empties a core's caches.
    for work in (lambda path, *_: np.fromfile(path, np.uint8), choose_crop, load_crop):
        for n in list(done):
            try:
                done[n] = work(done[n], keys[n], args.seed, places[n])
            except Exception as error:  # damaged data raises anything
                del done[n]
                text = f"WARNING: image {paths[n]} is damaged, left out: {error}"
                log(process, text.partition(" <_io")[0])  # Pillow's would end with an address
    return images, [n in done for n in range(len(keys))]


def choose_crop(data, key, seed, _):
    """(data, top, left, height, width, flip); data is its file's bytes, uint8 (n,).

    The size of the image, its key and the seed alone set the others.
    """
    image = Image.open(BytesIO(data))  # reads its header alone
    w, h = image.size
    if key[0] == VALIDATION:  # for validation the middle, 7/8 of the shorter side
        side = max(1, min(w, h) * 7 // 8)
        return data, (h - side) // 2, (w - side) // 2, side, side, False
    # The hash of integers is the same in every Python process: only that of texts is salted.
    torch.default_generator.manual_seed(hash((seed, *key)) % 2**32)
    crop = RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
    return data, *crop, torch.rand(()).item() < 0.5


def load_crop(crop, key, seed, to):
    """Decodes an image; its crop is scaled into `to`, uint8 (3, size, size)."""
    data, top, left, height, width, flip = crop
    part = decode(data)[None, :, top : top + height, left : left + width]
    part = part.contiguous(memory_format=torch.channels_last)
    image = interpolate(part, to.shape[1:], mode="bilinear", antialias=True)
    to[None] = image.flip(3) if flip else image


def decode(data):
    """uint8 (3, height, width), RGB, of a file's bytes."""
    # Pillow knows more formats, and torchvision's decoders are announced to go away.
    with suppress(RuntimeError, AttributeError):
        return torchvision.io.decode_image(torch.from_numpy(data), "RGB")
    return torch.from_numpy(np.array(Image.open(BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in the middle of an epoch, and give validation images.

    It yields FirstCategory's keys. They carry the epoch: loader workers are not told of set_epoch.
    """

    gives, skip, val_positions = "training", 0, ()

    def give(self, what, skip=0):
        """Says what comes from the next iter(loader) on: "training", "validation" or "nothing".

        skip: how many images of this rank's share of the epoch are left out.
        """
        self.gives, self.skip = what, skip

    def __iter__(self):
        if self.gives == "training":
            return ((self.epoch, i) for i in islice(super().__iter__(), self.skip, None))
        if self.gives == "validation":
            return ((VALIDATION, i) for i in self.val_positions)
        return iter(())


def set_up_worker(_):
    """In a loader worker: SLURM sends its stop signal to all processes, but the ranks decide."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_memory(2**25)  # for its batches: what lives longer is there


# --- Model -------------------------------------------------------------------------------------


def load_file(path, what):
    """What torch.save wrote; code in the file is not run. Raises UserError."""
    with as_user_error(
        f"{what} {path} cannot be read, or holds more than tensors and plain values"
    ):
        return torch.load(path, map_location="cpu", weights_only=True)


def load_weights(process, model, source):
    """Copies ImageNet's weights, or those of a file, into the model. Raises UserError.

    The last layer is left out where it tells other classes apart.
    """
    if source == "imagenet":
        weights = torchvision.models.ResNet18_Weights.DEFAULT
        text = f"fetch {weights.url} where internet is, into {torch.hub.get_dir()}/checkpoints"
        text += " (TORCH_HOME moves this folder)"
        socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
        with as_user_error(f"no ImageNet weights: {text}, or use --weights none"):
            state = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    else:
        state = load_file(source, "weights file")
    with as_user_error(f"weights file {source} does not fit ResNet-18"):
        state = state.get("model", state)  # of a checkpoint
        theirs, classes = len(state["fc.weight"]), model.fc.out_features
        others = source == "imagenet" or theirs != classes
        if others:
            state |= {"fc.weight": model.fc.weight, "fc.bias": model.fc.bias}
        model.load_state_dict(state)
    if others:
        text = f"the last layer, of {theirs} other classes, is left out: here are {classes}"
        log(process, f"--weights {source}: {text}")


def adapt_model(args, process, model):
    """Changes the model in place, before DDP sees it."""
    if args.sync_bn:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        if process.world_size == 1:  # there is nothing to overlap: it need not part the graph
            torch._dynamo.config.optimize_ddp = False
        compile_training(model, args.batch_size)
    if process.mps:  # NOTE: batch norm's backward pass has failed there on channels_last
        model.to(memory_format=torch.contiguous_format)
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))


def ddp_options(args):
    """What else DDP is given: a size of buckets that was asked for, and fewer, larger copies.

    Left alone, DDP makes the first bucket a small one, so that the last is smaller as well: the
    one that nothing is left to hide. NOTE: with its own default given as a number it does not.
    """
    options = {"bucket_cap_mb": args.bucket_cap_mb}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        options["batched_grad_copy"] = True  # which PyTorch 2.11 has not
    return options


class WithoutDDP(torch.nn.Module):
    """In DDP's place where a process is alone, on a device that DDP has no backend for."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, images):
        return self.module(images)

    def no_sync(self):
        return nullcontext()


def compile_training(model, batch_size):
    """Has torch.compile make the forward pass of whole training batches.

    Any other (an epoch's short last batch, validation) would be compiled anew, for a minute.
    """
    plain, compiled = model.forward, torch.compile(model.forward)

    def choose(images):
        chosen = compiled if model.training and len(images) == batch_size else plain
        return chosen(images)

    model.forward = choose


def compress_gradients(args, ddp):
    """Has DDP send smaller gradients as --grad_compression says; PowerSGD's state, or None."""
    kind, hook, state = args.grad_compression, powerSGD_hook.powerSGD_hook, None
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, args.powersgd_rank, WARM_UP, orthogonalization_epsilon=1e-8
        )
        # in bf16 the hook has half the memory traffic, which is most of what it costs a CPU
        if args.precision == "bf16":
            hook = default_hooks.bf16_compress_wrapper(hook)
        ddp.register_comm_hook(state, hook)
    elif kind != "none":
        ddp.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
    return state


def bytes_per_step(run):
    """What each rank hands to the all-reduces of a step, after compression."""
    sent_as = run.args.precision if run.powersgd else run.args.grad_compression
    plain = run.parameters * (2 if "16" in sent_as else 4)
    _, before, after = run.powersgd.compression_stats() if run.powersgd else (1, 1, 1)
    return plain * after // before if before else plain


# --- Training ----------------------------------------------------------------------------------

WARM_UP = 3  # steps that are left out of averages, and that PowerSGD leaves alone
StepTime = namedtuple("StepTime", "data exposed step images")  # seconds; images of this rank


class StepTimer:
    """The moments of each step, by the clock of the device.

    Communication is exposed from the moment when this rank has all gradients of its own until
    they are averaged: nothing but all-reduces goes on. The rest of a step is data or compute.
    """

    def __init__(self, process):
        self.gpu, self.mps = process.gpu, process.mps
        self.moments = {}  # of the present step, by name
        self.unread, self.steps = [], []
        self.bucket_bytes = []  # of DDP's buckets, in the order in which they are sent
        self.ready = []  # of a step: seconds from each bucket's last gradient to the last of all

    def note_moment(self, name):
        """Notes this moment; of a GPU, which works behind the script, when it gets here."""
        if self.mps:
            torch.mps.synchronize()  # a Mac's GPU is waited for
        moment = torch.cuda.Event(enable_timing=True) if self.gpu else perf_counter()
        if self.gpu:
            moment.record()
        self.moments[name] = moment

    def note_own_gradients(self, _):
        """Called for each gradient of the first layer: the last one of a backward pass."""
        self.note_moment("own gradients")

    def restart(self):
        """What came before is no part of the next step."""
        self.moments.clear()
        self.note_moment("begin")

    def end_step(self, images):
        self.note_moment("end")
        self.unread.append((images, self.moments))
        self.moments = {"begin": self.moments["end"]}

    def read(self):
        """Makes StepTimes of the marks; waits for a GPU."""
        if self.gpu and self.unread:
            _, last = self.unread[-1]
            last["end"].synchronize()  # elapsed_time fails where an event is pending
        for images, moments in self.unread:
            data = self.between(moments["waiting for data"], moments["data"])
            exposed = self.between(moments["own gradients"], moments["averaged"])
            step = self.between(moments["begin"], moments["end"])
            self.steps.append(StepTime(data, exposed, step, images))
            if 0 in moments:  # the first bucket's number
                complete = [moments[n] for n in range(len(self.bucket_bytes))]
                own = moments["own gradients"]
                self.ready.append([max(0, self.between(moment, own)) for moment in complete])
        self.unread.clear()

    def between(self, first, second):
        return first.elapsed_time(second) / 1e3 if self.gpu else second - first


@dataclass
class Run:
    """What the training loop works on, and how far it is."""

    args: argparse.Namespace
    process: Process
    model: torch.nn.Module
    ddp: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader
    settings: dict  # options and digests of the data by name, equal on all ranks
    categories: list  # their names, in the order of the labels

    def __post_init__(self):
        self.epoch, self.step = 1, 0  # optimizer steps in all
        self.sums = Counter()  # of this epoch: loss, images, damaged
        self.next_agreement = 0  # the step after which the ranks agree to go on
        self.unread_losses = []  # (tensor, images) since the last such step
        self.parameters = sum(map(torch.numel, self.model.parameters()))
        self.powersgd = compress_gradients(self.args, self.ddp)
        self.timer = StepTimer(self.process)
        self.scaler = torch.amp.GradScaler(
            self.process.device.type, enabled=self.args.precision == "fp16"
        )
        # NOTE: a hook that knows Run would keep its loader workers alive.
        next(self.model.parameters()).register_post_accumulate_grad_hook(
            self.timer.note_own_gradients
        )


def start_or_resume(run, train_list, val_list):
    """All that comes between the model and the first step. Raises UserError."""
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # loader workers inherit it
        signal.signal(stop, run.process.ask_to_stop)
    start_workers(run.loader)
    if run.process.world_size > 1 or run.powersgd:
        fix_bucket_order(run)
    resumed = load_checkpoint(run) if run.args.resume else "Not resumed"
    log_run(run, train_list, val_list, resumed)


def start_workers(loader):
    """Forks the loader's workers, with nothing to do yet.

    NOTE: now, because a fork may hang once a backward pass has threads.
    """
    loader.sampler.give("nothing")
    iter(loader)
    loader.sampler.give("training")


def fix_bucket_order(run):
    """Lets DDP arrange its buckets, as it does after its first backward pass, before any step.

    The order of a sum decides its last bits: else a resumed run would not equal an unbroken one.
    """
    run.process.phase = "warm-up"
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    n, size = run.args.batch_size, run.args.image_size
    forward(run, run.ddp, torch.zeros(n, 3, size, size, dtype=torch.uint8)).sum().backward()
    run.model.load_state_dict(weights)  # batch norm has seen the blank images
    run.optimizer.zero_grad()
    if run.powersgd:
        run.powersgd.iter -= 1


def epochs_left(run):
    """Yields the epochs to go; one at whose end a checkpoint was saved has no step left."""
    while run.step < run.args.max_steps or run.step == run.epoch * run.args.steps_per_epoch:
        yield run.epoch
        run.epoch, run.sums = run.epoch + 1, Counter()


def read_steps(run):
    """Yields the micro-batches of each step that is left of the epoch, and times the waiting."""
    args, process, timer = run.args, run.process, run.timer
    seen = run.step % args.steps_per_epoch  # of a resumed epoch
    run.loader.sampler.give("training", skip=seen * args.accumulate_steps * args.batch_size)
    batches, run.began = iter(run.loader), perf_counter()
    timer.restart()
    while run.step < min(args.max_steps, run.epoch * args.steps_per_epoch):
        process.phase = f"the data of step {run.step + 1}"
        timer.note_moment("waiting for data")
        micro_batches = list(islice(batches, args.accumulate_steps))
        timer.note_moment("data")
        process.phase = f"step {run.step + 1}"
        yield micro_batches


def set_learning_rate(run):
    """Rises to --lr in the first --warmup_steps."""
    share = (run.step + 1) / max(1, run.args.warmup_steps)
    run.optimizer.param_groups[0]["lr"] = run.args.lr * min(1, share)


def finish_step(run, loss, micro_batches):
    """Counts and logs a step; agrees with the other ranks and saves where it is time to."""
    args, timer = run.args, run.timer
    run.step += 1
    labels = np.concatenate([labels for _, labels in micro_batches])
    damaged = (labels == IGNORED).sum().item()
    run.sums["damaged"] += damaged
    run.unread_losses.append((loss, len(labels) - damaged))
    line_due = (run.step - 1) % args.log_every == 0 or run.step == args.max_steps
    shown = loss.item() if line_due else 0  # waits for a GPU: not in each step
    timer.end_step(len(labels))
    if not timer.bucket_bytes and len(timer.steps) < WARM_UP:
        watch_buckets(run)
    if len(timer.steps) == 1:  # this is the second: all is there that lives longer than a step
        keep_memory()
    if line_due:
        log_step(run, shown)
    save_due = args.checkpoint_every and run.step % args.checkpoint_every == 0
    if save_due or run.step >= run.next_agreement:
        agree_to_continue(run)
    if save_due:
        save_checkpoint(run)
        timer.restart()


def watch_buckets(run):
    """Has the timer note when each of DDP's buckets is complete, once DDP has arranged them.

    Its all-reduce can hide behind what is then left of the backward pass: by this
    compare_logs.py tells what a step would take over another network.
    """
    if run.process.world_size == 1:
        return
    found = run.ddp._get_ddp_logging_data()  # numbers of parameters, parted by spaces and commas
    buckets = found.get("rebuilt_per_bucket_param_indices")
    if not buckets:
        return
    timer, parameters = run.timer, [p for p in run.model.parameters() if p.requires_grad]
    timer.bucket_bytes = [int(size) for size in found["rebuilt_bucket_sizes"].split(", ")]
    for number, bucket in enumerate(buckets.split(", ")):
        last = parameters[int(bucket.split()[-1])]
        last.register_post_accumulate_grad_hook(lambda _, name=number: timer.note_moment(name))


def agree_to_continue(run):
    """All ranks go on, or all end. About once a second, because a GPU waits meanwhile."""
    collect_losses(run)
    slowest = stop_where_any_rank_must(run)
    run.next_agreement = run.step + max(1, int(1 / slowest))


def collect_losses(run):
    """Adds up the losses since the ranks last agreed to go on."""
    for loss, images in run.unread_losses:
        run.sums.update(loss=images * loss.item(), images=images)
    run.unread_losses.clear()
    run.timer.read()


def stop_where_any_rank_must(run):
    """Ends all ranks if one has to: UserError, or exit code 75 with a checkpoint saved.

    Returns the seconds of the last step on the slowest rank.
    """
    process, last = run.process, run.timer.steps[-1:]
    if process.launcher != "python" and os.getppid() != process.parent:
        process.stop = process.stop or "the end of its parent process"
    stops, losses, damaged, seconds = gather(
        process.stop, run.sums["loss"], run.sums["damaged"], last[0].step if last else 1
    )
    if not all(map(math.isfinite, losses)):
        raise UserError(f"a loss up to step {run.step} is not finite: lower --lr")
    if sum(damaged) > MAX_DAMAGED * len(run.loader.sampler.dataset):
        found = counted(sum(damaged), "image is", "images are")
        raise UserError(f"{found} damaged, over {MAX_DAMAGED:.0%}: repair them")
    if reason := next(filter(None, stops), ""):
        save_checkpoint(run, last=True)
        code = os.EX_TEMPFAIL  # 75, by sysexits.h: start it again later
        kind = "asked" if reason.startswith("SIG") else "stopped"
        text = f"Stopped on {reason} | step {run.step} | exit code {code}"
        saved = "" if run.args.checkpoint else " | not saved: no --checkpoint"
        report(process, kind, text + saved, 1)
        sys.exit(code)
    return max(seconds)


def finish_epoch(run):
    """Logs this rank's part of an epoch, of a resumed one what is trained here."""
    agree_to_continue(run)
    if images := run.sums["images"]:  # none where a run was resumed at an epoch's end
        seconds = perf_counter() - run.began
        log(
            run.process,
            f"Epoch {run.epoch} complete | Avg loss: {run.sums['loss'] / images:.4f} | "
            f"{images / seconds:.1f} img/s | {seconds:.2f}s",
        )


# --- Checkpoint --------------------------------------------------------------------------------

# What a run must share with the one it resumes, and what a checkpoint holds.
SHARED = ["number of classes", "--global_batch_size", "--image_size", "--lr", "--warmup_steps"]
SHARED += ["--precision", "--grad_compression", "--powersgd_rank", "--sync_bn", "--seed"]
SHARED += ["data set", "sizes of the images"]
STATEFUL = ["model", "optimizer", "scaler"]
COCO_CLASSES = 80  # of checkpoints from before other numbers were possible


def lock_checkpoint(path, process):
    """Keeps other runs from this file until this process ends. Raises UserError."""
    with as_user_error(f"checkpoint {path}: in use by another run, or not writable"):
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # loader workers do not inherit it
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another run has it
            raise
        except OSError as error:  # some file systems of networks and clusters know no locks
            text = f"WARNING: checkpoint {path} cannot be locked ({error.strerror}): "
            log(process, text + "see to it that no other run writes it")


def save_checkpoint(run, last=False):
    """Rank 0 writes; the old file stays until the new one is whole. Raises UserError if last."""
    path = run.args.checkpoint
    if not all(parameter.isfinite().all() for parameter in run.model.parameters()):
        raise UserError(f"weights not finite after step {run.step}: lower --lr; checkpoint kept")
    if not path:
        return
    with share_errors(run.process, "checkpoint"):
        if run.process.rank > 0:
            return
        state = {"facts": run.settings, "epoch": run.epoch, "step": run.step}
        state["categories"] = run.categories
        state |= {name: getattr(run, name).state_dict() for name in STATEFUL}
        what = f"checkpoint {path} not saved at step {run.step}"
        try:
            with as_user_error(what), open(f"{path}.new", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(f"{path}.new", path)
        except UserError as error:
            log(run.process, f"WARNING: {error}; an older one is kept", to=2)
            with suppress(OSError):
                os.unlink(f"{path}.new")
            if last:
                raise


def load_checkpoint(run):
    """Goes on where the checkpoint was saved; only rank 0 reads the file. Returns what to log."""
    path, process = run.args.checkpoint, run.process
    if not from_rank_0(process, "checkpoint", lambda: os.path.exists(path)):
        return f"No checkpoint {path} yet: the run starts afresh"
    state = from_rank_0(process, "checkpoint", lambda: load_file(path, "checkpoint"))
    newer = {"--sync_bn": False, "number of classes": COCO_CLASSES}  # than some checkpoints
    with (
        share_errors(process, "checkpoint"),
        as_user_error(f"checkpoint {path} is not one of this demo"),
    ):
        for name, value in run.settings.items():
            then = state["facts"].get(name, newer.get(name))
            if then != value and name in SHARED:
                do = what_to_give(run.args, name, then)
                raise UserError(f"checkpoint {path} has {name} {then}, not {value}: {do}")
        for name in STATEFUL:
            getattr(run, name).load_state_dict(state[name])
        run.epoch, run.step = state["epoch"], state["step"]
    return f"Resumed from {path} at step {run.step}"


def what_to_give(args, name, then):
    """What goes on with a checkpoint that has another value of an option, or other data."""
    if not name.startswith("--"):
        return "use the same"
    if isinstance(then, bool):
        return f"give {name}" if then else f"leave {name} out"
    scaled = name == "--lr" and args.lr_scaling != "none"
    return f"give {name} {then}" + " without --lr_scaling" * scaled


# --- Log ---------------------------------------------------------------------------------------

LOGGED = re.compile("NCCL_|GLOO_|OMP_|TORCH_NCCL_|TORCH_DIST_")  # of the environment


def log(process, text, to=1):
    """Writes a line in one piece to a file descriptor: the lines of several ranks do not mix."""
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    os.write(to, f"{process.name} {text}\n".encode(errors="replace"))


def duration(seconds, digits=2):
    """'4h 8m 59.79s' for 14939.79."""
    m, rest = divmod(round(seconds, digits), 60)
    h, m = divmod(int(m), 60)
    text = f"{rest:.{digits}f}s"
    if h or m:
        text = f"{m}m {text}"
    return f"{h}h {text}" if h else text


def counted(number, one, more):
    """'1 step', '2 steps'."""
    return f"{number} {one if number == 1 else more}"


def log_run(run, train_list, val_list, resumed):
    """Rank 0 writes what runs, on what, with which settings, and on which data."""
    args, process = run.args, run.process
    device = torch.cuda.get_device_name() if process.gpu else os.uname().machine
    device = f"MPS of {device}" if process.mps else device
    hosts, devices, local = gather(socket.gethostname(), device, process.local_rank)
    nccl = torch.cuda.nccl.version() if process.backend == "nccl" else None
    record = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl},
        **vars(args),
        "launcher": process.launcher,
        "backend": process.backend,
        "hosts": hosts,
        "devices": devices,
        "nodes": local.count(0),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "parameters": run.parameters,
        "start_step": run.step,
        "classes": len(run.categories),
        "images": len(train_list.names),
        "images_without_annotations": train_list.unlabelled,
        "picture_sizes": run.settings["sizes of the images"],
        "padding": -len(train_list.names) % process.world_size,
        "val_images": val_list and len(val_list.names),
        "env": {k: v for k, v in sorted(os.environ.items()) if LOGGED.match(k)},
    }
    if process.rank == 0:
        log(process, "Run " + json.dumps(record))
        log(process, f"Run: {run_in_words(record)}. {resumed}")
        if process.launcher == "environment":
            log_places(process, hosts)


def run_in_words(record):
    """The main record of the Run record."""
    processes = counted(record["world_size"], "process", "processes")
    nodes = counted(record["nodes"], "node", "nodes")
    steps = counted(record["max_steps"], "step", "steps")
    images = counted(record["global_batch_size"], "image", "images")
    labelled = counted(record["images"], "has a label", "have labels")
    others = counted(record["images_without_annotations"], "does not", "do not")
    twice = counted(record["padding"], "comes", "come")
    return (
        f"{processes} on {nodes}, {record['backend']}, {record['precision']}; "
        f"{steps} of {images}; {labelled}, {others}, {twice} twice an epoch"
    )


def baseline(run):
    """The share of the validation images that always guessing one class would reach, in %."""
    _, val_list = run.loader.dataset.validation
    return 100 * np.bincount(val_list.labels).max() / len(val_list.labels)


def log_places(process, hosts):
    """Rank 0 says where it takes the processes to be, which nobody has told them."""
    log(process, "LOCAL_RANK is not set: each process is taken for the only one of its node")
    host, number = Counter(hosts).most_common(1)[0]
    if number > 1:
        text = f"WARNING: {number} processes are on {host}, and each takes its first GPU: "
        log(process, text + "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start them by torchrun")


def log_step(run, loss):
    """The line of a step: speed and times are means since the line before."""
    since = (run.step - 1) % run.args.log_every or run.args.log_every
    run.timer.read()
    data, _, step, images = np.mean(run.timer.steps[-since:], axis=0)
    left = (run.args.max_steps - run.step) * step
    text = f"Epoch {run.epoch} | Step {run.step} | Loss: {loss:.4f} | {images / step:.1f} img/s"
    times = f"data {1e3 * data:.1f} ms | step {1e3 * step:.1f} ms | ETA {duration(left, 0)}"
    log(run.process, f"{text} | {times}")


def summarize(run):
    """Rank 0 writes the Summary; finds out whether all replicas are equal, bit for bit."""
    process, values = run.process, run.model.state_dict().values()
    weights = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in values))
    steps = run.timer.steps or [[0] * 4]
    # the first steps are slower: they count in the sums, but not in the means
    data, exposed, step, _ = (1e3 * np.mean(steps[WARM_UP:] or steps, axis=0)).tolist()
    compute = step - data - exposed
    own = {"data_ms": data, "compute_ms": compute, "exposed_ms": exposed, "step_ms": step}
    _, _, seconds, images = np.sum(steps, axis=0).tolist()
    mine = {"rank": process.rank} | own
    ready = np.mean(run.timer.ready or [[]], axis=0).tolist()
    digests, ranks, images, ready = gather(weights.hexdigest(), mine, images, ready)
    summary = {
        "epochs": run.step // run.args.steps_per_epoch,
        "steps": run.step,
        "train_s": seconds,
        "img_per_s": sum(images) / max(seconds, 1e-9),
        **{name: np.mean([times[name] for times in ranks]) for name in own},
        "ranks": ranks,
        "wire_bytes_per_step": bytes_per_step(run),
        "buckets": [
            {"bytes": size, "ready_ms": 1e3 * np.mean(seconds)}
            for size, *seconds in zip(run.timer.bucket_bytes, *ready, strict=False)
        ],
        "weights_sha256": digests[0],
        "replicas_identical": len(set(digests)) == 1,
    }
    if process.rank == 0:
        text = (
            "{img_per_s:.1f} img/s; a step of {step_ms:.0f} ms is {data_ms:.0f} data + "
            "{compute_ms:.0f} compute + {exposed_ms:.0f} exposed communication; "
            "replicas identical: {replicas_identical}"
        )
        log(process, "Summary " + json.dumps(summary))
        epochs = counted(summary["epochs"], "epoch", "epochs")
        steps = counted(summary["steps"], "step", "steps")
        log(process, f"Summary: {epochs}, {steps}, {text.format(**summary)}")
        if "SLURM_STEP_ID" in os.environ:
            time.sleep(0.3)  # srun mixes lines of over 1 KB


if __name__ == "__main__":
    one_line_errors(main)
