#!/usr/bin/env python3
"""ResNet-18 on COCO with DistributedDataParallel (DDP): one script from a laptop to a cluster.

torchrun starts this script several times, usually once for each GPU. Each process trains its own
copy of the model (a replica) on its own share of the images. In each step DDP averages the
gradients of all processes, so the replicas stay equal. It needs Linux or macOS (on Windows: WSL2),
Python 3.10 or newer, and what requirements.txt lists. --help lists all options.

One GPU, or the CPU if there is none (plain `python` works, too):
    torchrun --standalone --local-addr=127.0.0.1 --nnodes=1 --nproc_per_node=1 \
        demo_coco_resnet18.py --coco_image_path DIR --annotation_path FILE
All GPUs of one machine (without GPUs: OMP_NUM_THREADS=8 torchrun ... --nproc_per_node=2, for two
processes of eight cores each):
    torchrun --standalone --local-addr=127.0.0.1 --nnodes=1 --nproc_per_node=gpu \
        demo_coco_resnet18.py ...
Two nodes (machines) with two GPUs each. They meet (rdzv: rendezvous) at the first node's address
and a free port there; the id is arbitrary. The second node's command has --node_rank=1:
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=2 --rdzv_id=123 --rdzv_backend=static \
        --rdzv_endpoint=10.0.0.1:29500 demo_coco_resnet18.py ...

The last one starts four processes. Their number, 4, is the world size:
    node (--node_rank)                      0   0   1   1
    rank: the process's number among all    0   1   2   3
    local rank: its number on its node      0   1   0   1    selects its GPU

Six changes make a training script distributed. Each is marked in the code:
    1/6  a process learns its rank from the environment       read_environment
    2/6  it chooses its GPU and joins the process group       join_process_group
    3/6  each rank gets its own share of the images           make_train_loader
    4/6  DDP makes the models of all ranks equal              wrap_model
    5/6  backward averages the gradients over all ranks       train_one_epoch
    6/6  results are combined, and rank 0 writes them         evaluate

One rule applies to all of them: ALL RANKS MAKE THE SAME COLLECTIVE CALLS IN THE SAME ORDER. A
collective call is an exchange between all ranks: all-reduce (every rank gets the sum, mean or
maximum of all values), all-gather (every rank gets a list of all values), broadcast (every rank
gets one rank's value) or barrier (no value: the ranks only wait). In it the ranks wait for each
other. If one makes no more calls, the others fail after --timeout seconds. If one skips a call,
the next calls do not match: they fail, hang, or mix up data. The docstring of a function with
such calls begins "All ranks:".
"""

# The six changes, without what a real run needs around them:
#
#     rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])  # 1/6
#     torch.cuda.set_device(local_rank)  # 2/6
#     dist.init_process_group("nccl")
#     sampler = DistributedSampler(dataset)  # 3/6
#     loader = DataLoader(dataset, batch_size=64, sampler=sampler)
#     ddp = DistributedDataParallel(model.cuda())  # 4/6
#     optimizer = torch.optim.Adam(model.parameters())
#     for epoch in range(2):
#         sampler.set_epoch(epoch)
#         for images, labels in loader:
#             cross_entropy(ddp(images.cuda()), labels.cuda()).backward()  # 5/6
#             optimizer.step()
#             optimizer.zero_grad()
#     dist.all_reduce(correct)  # 6/6: right answers, summed over all ranks; rank 0 prints them
#     dist.destroy_process_group()
#
# Two lines of a log, of rank 0 and of rank 1. Each has the loss and the img/s of its own images:
#
#     [CPU 0] Epoch 2 | Step 6 | Loss: 1.9705 | 11.2 img/s | data 35.7 ms | step 590.6 ms | ETA 1s
#     [CPU 1] Epoch 2 | Step 6 | Loss: 2.9396 | 11.2 img/s | data 21.6 ms | step 587.1 ms | ETA 1s
#
# The first part of this file, up to "Part two", is the lesson: it can be read alone. Part two has
# what the first part calls, and begins with a table of contents.

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
import warnings
import zlib
from collections import Counter, deque, namedtuple
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time

if sys.platform == "win32":
    raise SystemExit("demo_coco_resnet18.py needs Linux or macOS: on Windows start it inside WSL2")

try:
    import torch
    import torch.distributed as dist
    import torchvision
    from PIL import Image
    from pycocotools.coco import COCO
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset, DistributedSampler
    from torchvision.transforms import RandomResizedCrop, v2
    from torchvision.transforms.v2.functional import resize
except Exception as error:  # packages that do not fit together raise errors of any type
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    text = f"what requirements.txt lists does not load: {error} (in {where})"
    raise SystemExit(f"demo_coco_resnet18.py: {text}") from None

# What to change first. Each is the default of the option with its name; --help lists all options.
NUM_EPOCHS = 2  # passes over the images
BATCH_SIZE = 64  # images of one process in one forward pass (a micro-batch)
LR = 1e-3  # learning rate of Adam
IMAGE_SIZE = 224  # pixels a side
SEED = 0  # decides the first weights, the order of the images and the crops
TIMEOUT = 300  # seconds without an answer after which a process counts as lost
LOG_EVERY = {"cpu": 5, "cuda": 50, "mps": 5}  # steps from one log line to the next, by device


def main(process):
    """All ranks: every process runs all of this. `process` says which one it is."""
    args = parse_arguments(sys.argv[1:])
    read_environment(process)  # 1/6
    join_process_group(args, process)  # 2/6
    check_checkpoint(args, process)  # an earlier run's file is continued, or not touched

    # Rank 0 reads, every rank receives: only the images have to be on every node.
    log_from_rank_0(process, "Reading the annotations" if not args.dummy else "Random images")
    train_set = from_rank_0(lambda: read_image_list(args.annotation_path) or DUMMY_SET)
    val_set = from_rank_0(lambda: read_image_list(args.val_annotation_path, train_set))
    # All ranks end here if one has other arguments than rank 0, or lacks an image. (One with
    # another --backend does not come so far: it could not join the group.)
    check_settings(args)
    check_images(args, process, train_set, val_set)
    checkpoint = read_checkpoint(args, process)  # None if the run starts from the beginning
    # The number of steps, the precision, and what else depends on the hardware and the images.
    fill_in_arguments(args, process, len(train_set.names), checkpoint)
    train_loader = make_train_loader(args, process, train_set)  # 3/6
    val_loader = make_val_loader(args, process, val_set)

    model = build_model(args, process, train_set, load=checkpoint is None)
    ddp = wrap_model(args, process, model)  # 4/6
    # ddp holds the model, so both have the same weights. The optimizer can take them from either.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    training = Training(args, process, train_set, model, ddp, optimizer)
    if checkpoint:  # every rank has the same one, so the replicas stay equal
        load_checkpoint(training, checkpoint)
    catch_stop_signals(process)  # from now on such a signal saves, and ends all ranks
    start_workers(train_loader, val_loader)  # the processes that load images
    end_on_second_interrupt(process)
    rebuild_buckets(training)  # a pass over blank images: this fixes DDP's bucket order
    log_run(training, val_set)
    start_profiler(training)  # with --profile

    for epoch in epochs_left(training):  # 1, 2, ..., unless the run was resumed
        train_one_epoch(training, train_loader, epoch)  # 5/6
        # Like all calls in main, each rank makes this one, though only rank 0 writes.
        save_checkpoint(training)
        if val_loader is not None:
            evaluate(training, val_loader, epoch)  # 6/6
    # The proof that the replicas are still equal: the run fails if they are not.
    log_summary(training)
    check_saved(training)  # it also fails if the last checkpoint could not be written
    # Then the caller, run_and_exit at the end of this file, calls leave_process_group.


@dataclass
class ProcessInfo:
    """This process's rank and node position, and the device that it computes on."""

    launcher: str = "python"  # or srun, mpirun, torchrun (also where RANK was set by hand)
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = ""  # what moves tensors between processes: nccl (GPUs) or gloo (CPUs)
    parent: int = field(default_factory=os.getppid)  # the process that has started this one
    stop: int = 0  # number of the stop signal that has come

    @property
    def gpu(self):
        return self.device.type == "cuda"  # NVIDIA or AMD

    @property
    def one_node(self):
        return self.world_size == self.local_world_size

    @property
    def memory_format(self):
        """channels_last is, by PyTorch's documentation, faster on tensor cores."""
        with_ddp = self.device.type in DEVICES_WITH_DDP
        return torch.channels_last if with_ddp else torch.contiguous_format

    @property
    def exchange_device(self):
        """Where the numbers of a collective call are put: NCCL only accepts GPU tensors."""
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
    train_set: "ImageSet"  # names and labels of the images, and the classes
    model: torch.nn.Module
    ddp: torch.nn.Module  # the model in DDP: the same weights, in the same memory
    optimizer: torch.optim.Optimizer
    step: int = 0  # optimizer steps so far
    agree_at_step: int = 0  # the step after which the ranks next agree to go on
    interval: int = 1  # steps from the last agreement to the next
    due_line: "DueLine | None" = None  # a log line that is not written yet
    loss_sum: torch.Tensor | float = 0.0  # in this epoch, over this rank's images
    not_saved: str = ""  # on rank 0: why the last checkpoint could not be written

    def __post_init__(self):
        # Backward ends with the first layer: its gradient is the last one to be ready.
        self.timer = StepTimer(self.process, next(self.model.parameters()))
        self.profiler = None  # with --profile: start_profiler
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
    # For mpirun, srun and plain python find_launcher sets the variables that torchrun sets.
    process.launcher = find_launcher()
    process.rank = int(os.environ["RANK"])  # over all nodes: 0 to world_size - 1
    process.world_size = int(os.environ["WORLD_SIZE"])  # the number of processes, not of nodes
    process.local_rank = int(os.environ["LOCAL_RANK"])  # on its own node, from 0
    process.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    set_meeting_point(process)  # MASTER_ADDR and MASTER_PORT, if the given ones are unusable


def join_process_group(args, process):
    """All ranks: chooses the device, and joins the group. Raises UserError or NotConnected.

    The process group: the processes that make collective calls together, here all of them.
    """
    # The backend moves tensors between the processes: NVIDIA's library NCCL between GPUs, one for
    # each process; Gloo between CPUs, or between processes that share a GPU.
    process.backend = choose_backend(args, process)
    # DDP 2/6: each process takes a GPU of its own, by its local rank. Otherwise all would take
    # GPU 0: NCCL refuses that, and the other GPUs would be idle.
    if args.device in ("auto", "cuda") and torch.cuda.is_available():
        # (A process that sees one GPU alone finds it as GPU 0: the remainder of a division by 1.)
        process.device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(process.device)
    prepare_hardware(args, process)  # settings of PyTorch; a Mac's GPU
    # All processes meet at MASTER_ADDR:MASTER_PORT, which torchrun has set, and exchange addresses
    # through a store. If a process has not come after --timeout seconds, the others end with
    # NotConnected, exit code 1. (Before that torchrun has waited for the other nodes. If a node
    # does not come, torchrun fails after 15 minutes, and this script never starts.)
    with connecting_ranks(args, process):
        dist.init_process_group(  # rank, world size and the address are in the environment
            process.backend,
            timeout=timedelta(seconds=args.timeout),
            # NCCL then forms its communicator here, and not in the first collective call.
            device_id=process.device if process.backend == "nccl" else None,
        )
        # The first collective call opens the connections for data. item() waits for its end.
        probe = torch.ones(1, device=process.exchange_device)
        dist.all_reduce(probe)
        probe.item()


def make_train_loader(args, process, train_set):
    """The batches of this rank's share of the training images."""
    if args.dummy:
        return DummyLoader(args, process, train_set)
    dataset = CocoFirstCategory(args, args.coco_image_path, train_set, random_crop)
    # DDP 3/6: the sampler gives each rank its own share of the images. Every rank shuffles the
    # full list identically, by seed and epoch. Of N ranks, rank r takes number r, r + N, ...
    # Each step has a collective call (5/6), so all ranks must make the same number of steps, and
    # all shares have the same length: of 10 images each of 4 ranks gets 3, with two repeated as
    # padding. EpochSampler is PyTorch's DistributedSampler with two additions. It yields (epoch,
    # index), so that the dataset crops an image differently in each epoch. And a share can begin
    # later, in a run that resumes, or end earlier, as in make_val_loader.
    # (DistributedSampler shuffles by seed + epoch: seeds that are far apart share no order.)
    seed = args.seed * 2**20
    sampler = EpochSampler(dataset, process.world_size, process.rank, seed=seed)
    return make_loader(args, process, dataset, sampler, args.workers)


def make_val_loader(args, process, val_set):
    """The batches of this rank's share of the validation images, or None."""
    if not val_set:
        return None
    dataset = CocoFirstCategory(args, args.val_image_path, val_set, center_crop)
    sampler = EpochSampler(dataset, process.world_size, process.rank, shuffle=False)
    # Padding would count some images twice. DistributedSampler puts it at the end of some shares:
    # these end one image earlier here: of 10 images 4 ranks get 3, 3, 2 and 2. That does no harm:
    # the ranks exchange no gradients, and meet only after batches that all of them have, and at
    # the end (6/6).
    sampler.end = len(dataset) // process.world_size
    if process.rank < len(dataset) % process.world_size:
        sampler.end += 1
    return make_loader(args, process, dataset, sampler, args.workers)


class CocoFirstCategory(Dataset):
    """Images, each with the category of its first annotation as its label.

    The label ignores all other objects in the image. Do not expect a high accuracy: the task is
    there to make the ranks work on real images.

    A key is (epoch, index). Key and seed alone decide how an image is cropped, so it looks the
    same on whichever rank, and in a resumed run. For another kind of data write a Dataset with
    such keys and with `labels`, and functions in place of read_image_list and look_for_images.
    """

    def __init__(self, args, folder, image_set, crop):
        self.size, self.seed = args.image_size, args.seed
        self.folder, self.names, self.labels = folder, image_set.names, image_set.labels
        self.packed = PackedImages(folder, self.names) if os.path.isfile(folder) else None
        self.crop = crop  # a function of an image, (3, height, width), and the size

    def __len__(self):
        return len(self.names)

    def __getitem__(self, key):
        """An image, uint8 (size, size, 3), and its label. Raises LoneUserError or OSError."""
        epoch, index = key
        if self.packed:
            image = self.packed.read(index)
        else:
            image = load_image(os.path.join(self.folder, self.names[index]))
        # Python's hash of a tuple of integers is the same in every process. torch.manual_seed
        # would do as well, but it also seeds the GPUs, which would make a crop a third slower.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**32)
        rows = self.crop(image.permute(2, 0, 1), self.size).permute(1, 2, 0)
        return rows, self.labels[index]


def make_loader(args, process, dataset, sampler, workers):
    """The batches of a share. Worker processes load them while the device computes."""
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        num_workers=workers,
        # NOTE: by default Python 3.14 starts workers through a server process. A stop signal to
        # all processes would end that one, and with it the workers. (DDP's docstring warns of
        # forks with NCCL. These workers use neither NCCL nor CUDA, and begin before the first
        # backward pass: start_workers. Tested with NCCL over sockets, not over InfiniBand.)
        multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        worker_init_fn=ignore_stop_signals,
        persistent_workers=workers > 0,
        pin_memory=process.gpu,
        timeout=min(args.timeout, MOST_LOADER_SECONDS) if workers else 0,
    )


def build_model(args, process, train_set, load=True):
    """All ranks: ResNet-18 on this process's device.

    load: whether rank 0 loads the weights of --weights. Until 4/6 no other rank has them.
    """
    torch.manual_seed(args.seed)  # makes a run repeatable; DDP (4/6) makes the ranks equal
    # For another model change this line, load_weights and download_weights, and the timer in
    # Training if the first parameter is not the last one that gets a gradient. With dropout each
    # rank also needs a seed of its own after 4/6: with equal seeds, all ranks would drop the same
    # units.
    model = torchvision.models.resnet18(num_classes=len(train_set.categories))
    with errors_end_all_ranks():
        if process.rank == 0 and load and args.weights != "none":
            load_weights(args, process, model, train_set)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()
    return model.to(process.device, memory_format=process.memory_format)


def wrap_model(args, process, model):
    """All ranks: the model in DDP. On a Mac's GPU: the model itself."""
    if process.device.type not in DEVICES_WITH_DDP:
        model.no_sync = nullcontext  # the only name of DDP's that is called below
        return model
    # DDP 4/6: DDP copies rank 0's weights into the model of every rank, here and now, so that all
    # start equal. ddp(images) then computes what model(images) does, and its backward pass also
    # averages the gradients (5/6), which travel in buckets: those of several layers together.
    # Validation has no gradients: it calls model(images).
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,  # avoids a second copy of all gradients
        bucket_cap_mb=args.bucket_cap_mb,  # a bucket: gradients that are sent together
    )
    # Each rank has batch-norm statistics of its own images. By default DDP copies rank 0's to all
    # ranks before each forward pass. Once an epoch is enough: share_statistics. (As an argument
    # above it would, in some versions of PyTorch, also leave them out of the first copy.)
    ddp.broadcast_buffers = False
    if args.grad_compression != "none":  # each gradient has 2 bytes while it travels, not 4
        hooks = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }
        ddp.register_comm_hook(None, hooks[args.grad_compression])
    return ddp


# With N processes a step covers N times as many images, so an epoch has 1/N as many steps:
#     images per step (global batch size) = world size x batch size x accumulate steps
# A step of N processes does what one process would do with all these images, but also sends
# gradients, and waits for the slowest process. Three things differ: batch norm sees the images of
# its own process only (without --sync_bn), an epoch may end with repeated images (3/6), and
# floating-point sums may differ in the last bits (with --grad_compression in more of them). The
# learning rate does not depend on N unless you ask for --lr_scaling.
def train_one_epoch(training, loader, epoch):
    """All ranks: trains what is left of an epoch: all of it, unless the run was resumed in it."""
    args, process, ddp, timer = training.args, training.process, training.ddp, training.timer
    # Seed and epoch decide the order of the images, and so the shares. Without this call each
    # epoch would repeat the first one.
    loader.sampler.set_epoch(epoch)
    steps_done = training.step - (epoch - 1) * args.steps_per_epoch  # 0, unless it was resumed
    loader.sampler.start = steps_done * args.accumulate_steps * args.batch_size
    batches, began = on_device(process, loader), perf_counter()
    training.loss_sum, images_seen = torch.zeros((), device=process.device), 0
    timer.start_step()  # it measures the wait for data, and how long averaging holds up a step
    while training.step < min(args.max_steps, epoch * args.steps_per_epoch):
        # Of this rank's share. An epoch's last step may have fewer images and micro-batches.
        images_left = len(loader.sampler) - images_seen
        images_in_step = min(args.accumulate_steps * args.batch_size, images_left)
        micro_batches = math.ceil(images_in_step / args.batch_size)
        lr_factor = min(1, (training.step + 1) / max(1, args.warmup_steps))  # rises to 1
        for group in training.optimizer.param_groups:
            group["lr"] = args.lr * lr_factor
        loss_of_step = torch.zeros((), device=process.device)
        for micro_batch in range(micro_batches):
            timer.mark("wait for data")
            images, labels = next(batches)
            timer.mark("data arrived")
            # The gradients of the micro-batches add up on this rank. Only the last backward pass
            # has to send them: in no_sync DDP sends nothing, which saves the other all-reduces.
            # The forward pass must be in no_sync as well: in it DDP prepares to send, or not.
            is_last = micro_batch == micro_batches - 1
            with nullcontext() if is_last else ddp.no_sync():
                logits = forward(training, ddp, images)
                # This micro-batch's share of the rank's mean loss.
                loss = cross_entropy(logits, labels, reduction="sum") / images_in_step
                # DDP 5/6: backward works from the last layer to the first. As soon as the
                # gradients of some layers (a bucket) are ready, DDP starts to average them over
                # all ranks (an all-reduce), while backward goes on with the layers before. An
                # all-reduce waits for the slowest rank, and the optimizer for the last all-reduce.
                # All ranks have the same number of images, n. So the mean over N ranks is the
                # gradient of the mean loss over the whole batch (g: gradient of an image's loss):
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
        log_due_line(training)  # of the step before, on a GPU, which still computes this one
        timer.end_step(images_in_step)
        if training.profiler:
            profile_step(training)
        note_line(training, epoch, loss_of_step)  # in the steps of --log_every
        save_due = args.checkpoint_every and training.step % args.checkpoint_every == 0
        if save_due or training.step >= training.agree_at_step:
            # A stop signal may come to one rank alone. Here all learn of it, after the same step.
            stop_together(training, timer.last_step_seconds())
        if save_due:
            save_checkpoint(training)
            timer.start_step()  # the time to save is not part of a step
    share_statistics(training)
    stop_together(training, timer.last_step_seconds())
    log_epoch(training, epoch, steps_done + 1, images_seen, began)


# One step of two ranks in time; rank 1 computes more slowly. The all-reduce of a bucket (5/6)
# begins when both ranks have its gradients:
#     rank 0   data | forward | backward | ......... exposed ......... | optimizer
#     rank 1   data |   forward   |       backward      | .. exposed . | optimizer
#     network                         [ bucket 1 ]      [  bucket 2  ]
#     marks    1    2                    3 of rank 0    3 of rank 1    4           5
# The timer's marks: 1 wait for data, 2 data arrived, 3 own gradients (PyTorch makes this one, when
# backward has reached the first layer), 4 gradients averaged, 5 end_step.
# The log has the times between them. data: 1 to 2. exposed communication: 3 to 4, in which a rank
# computes nothing, but waits for slower ranks and for the network. What the network does before 3
# (each rank's own 3) is hidden: that rank still computes, though the network takes some of its
# device. compute: the rest up to 5, with what follows the step before: a log line, an agreement of
# the ranks. Here rank 0 seems to communicate for longer, because of rank 1: the shortest exposed
# time of all ranks is what the network costs. (--sync_bn also waits for other ranks, in compute.)


def on_device(process, batches):
    """The batches, with images and labels on this process's device.

    A GPU copies them in a stream of their own, while another stream computes the step before. The
    computing stream waits for the copy.
    """
    if not process.gpu:
        for batch in batches:
            yield [part.to(process.device) for part in batch]
        return
    copying = torch.cuda.Stream()
    for batch in batches:
        with torch.cuda.stream(copying):
            batch = [part.to(process.device, non_blocking=True) for part in batch]
        computing = torch.cuda.current_stream()
        computing.wait_stream(copying)
        for part in batch:
            part.record_stream(computing)  # its memory is in use there
        yield batch


def share_statistics(training):
    """All ranks: take rank 0's batch-norm statistics, so that all validate the same model."""
    if training.process.world_size > 1:
        for buffer in training.model.buffers():
            dist.broadcast(buffer, src=0)


def forward(training, model, images):
    """All ranks, in training: logits, float32 (n, classes), of images, uint8 (n, size, size, 3).

    With --sync_bn the ranks exchange the statistics of their images in it.
    """
    process, precision = training.process, training.args.precision
    # cuDNN tries out which convolutions are the fastest, for each shape of a batch anew: not
    # worth it for the shorter batch at an epoch's end.
    torch.backends.cudnn.benchmark = len(images) == training.args.batch_size
    images = images.to(process.device, non_blocking=process.gpu).permute(0, 3, 1, 2)
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
    # DDP 6/6: each rank has counted its own share. all_reduce sums the counts; every rank gets the
    # result, and rank 0 alone logs it.
    counts = torch.tensor([correct, images_seen], device=process.exchange_device)
    dist.all_reduce(counts)
    if process.rank == 0:
        log_validation(training, loader, epoch, *counts.tolist(), began)


def save_checkpoint(training):
    """All ranks: rank 0 writes the checkpoint, if one is asked for. Raises UserError.

    The others wait for it. A write that fails is logged, and does not end the run: check_saved
    does, at its end.
    """
    path, process = training.args.checkpoint, training.process
    with errors_end_all_ranks():
        if not all(parameter.isfinite().all() for parameter in training.model.parameters()):
            text = f"weights not finite after step {training.step}, which is not saved"
            raise UserError(f"{text}: {BEGIN_AGAIN}")
        if path and process.rank == 0:
            try:
                write_checkpoint(training, path)
                training.not_saved = ""
            except UserError as error:
                training.not_saved = str(error)
                log(process, f"WARNING: {error}")


def check_saved(training, before=""):
    """All ranks: raises UserError if the last checkpoint could not be written."""
    with errors_end_all_ranks():
        if training.not_saved:
            raise UserError(before + training.not_saved)


def digest_of_weights(values):
    """A SHA-256 of tensors. If those of all ranks are the same, so are the replicas."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- What all ranks do together
#
# Classes of errors (at the end of this file). UserError: something that a user can fix.
# LoneUserError: the same, of which the other ranks do not know. PeerLost: another rank is gone.
# NotConnected: the ranks have not met. Stopped: a stop signal came.


def all_gather(value):
    """All ranks: a list of the ranks' values, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce_max(*values):
    """All ranks: for each of these numbers the largest that any rank has, as a list."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


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
    collective call, and fail with an error about a lost connection. (That is what happens after
    any other exception: it skips the exchange, and torchrun or the timeout ends the others.)
    """
    error = ""
    try:
        yield
    except UserError as failure:
        error = str(failure)
    if not all_reduce_max(bool(error))[0]:  # nearly always: the texts need not travel
        return
    errors = all_gather(error)
    failed = [rank for rank, text in enumerate(errors) if text]
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
    if torch.__version__ < (2, 8):
        # NOTE: there destroy_process_group holds Python's lock while it waits for Gloo's threads,
        # and one that still frees the last tensors waits for this lock. Now it gets it.
        time.sleep(0.5)
    # NOTE: this frees DDP. Threads of the group could crash the interpreter at exit.
    gc.collect()
    dist.destroy_process_group()


# ==== Part two: what part one calls. Part one can be read without it.
#
# Where is ...? In the order of this part:
#     an option, its default, its check            make_parser, parse_arguments
#     what must be the same on all ranks           check_settings
#     torchrun, srun or mpirun: the rank           find_launcher
#     the choice of bf16, fp16 or fp32             fast_precision
#     where the ranks meet, what if one is missing set_meeting_point, connecting_ranks
#     an image's label, validation's classes       list_labelled, match_classes
#     a damaged image, a missing one               load_image, look_for_images
#     pretrained weights                           load_weights
#     what Summary and the log lines measure       StepTimer
#     a stop signal, a lost torchrun               catch_stop_signals, agree
#     what a checkpoint holds, who may resume      write_checkpoint, SAME_ON_RESUME
#     the lines and records of the log             log_run, log_step, log_summary
#     which errors are one line, exit codes        UserError, run_and_exit
#
# Another model: build_model. Another data set: CocoFirstCategory, read_image_list,
# look_for_images. Another optimizer or scheduler: main, lr_factor in train_one_epoch; if it has a
# state, write_checkpoint and load_checkpoint; for its options SAME_ON_RESUME.

# ---- Arguments: their defaults and limits, and what follows from them

DUMMY_STEPS = 100  # with --dummy
LR_BATCH = 64  # the global batch size for which --lr is meant, with --lr_scaling linear
MOST_WORKERS = 16  # each worker has batches in shared memory
DATA_PATHS = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
# These may differ from node to node.
PER_NODE = [*DATA_PATHS, "checkpoint", "profile", "workers"]


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)

    def add(name, help, **settings):
        text = help + ("" if settings.get("default") is None else " (default: %(default)s)")
        group.add_argument(name, help=text, **settings)

    group = parser.add_argument_group("data")
    text = "random images, one batch that repeats: a load for networks; its loss means nothing"
    add("--dummy", text, action="store_true")
    add("--coco_image_path", "folder of the training images, or their packed file")
    add("--annotation_path", "their COCO instances file")
    add("--val_image_path", "folder of the validation images, or their packed file")
    add("--val_annotation_path", "their COCO instances file")
    add("--image_size", "pixels a side", type=at_least(int, 33), default=IMAGE_SIZE)
    text = "loader processes per rank, of training and as many of validation; unset: 1 on a CPU, "
    text += f"else by cores, at most {MOST_WORKERS}"
    add("--workers", text, type=NATURAL)
    group = parser.add_argument_group("training")
    text = f"passes over the images; unset: {NUM_EPOCHS}, with --dummy {DUMMY_STEPS} steps"
    add("--num_epochs", text, type=POSITIVE)
    add("--batch_size", "images per rank and micro-batch", type=POSITIVE, default=BATCH_SIZE)
    add("--global_batch_size", "instead: images per step of all ranks", type=POSITIVE)
    add("--accumulate_steps", "micro-batches in a step, per rank", type=POSITIVE, default=1)
    add("--lr", "learning rate of Adam", type=at_least(float, 1e-9), default=LR)
    text = f"linear: --lr times global batch size / {LR_BATCH}, a rule that was found for SGD"
    add("--lr_scaling", text, choices=["none", "linear"], default="none")
    add("--warmup_steps", "steps in which the learning rate rises", type=NATURAL, default=0)
    add("--weights", "imagenet, none, or a FILE with a state dict", default="imagenet")
    add("--seed", "decides first weights, order, crops", type=NATURAL, default=SEED)
    add("--max_steps", "stop after this number of optimizer steps", type=POSITIVE)
    group = parser.add_argument_group("hardware")
    choices = ["auto", *PRECISIONS]
    add("--precision", "auto: the fastest one", choices=choices, default="auto")
    add("--compile", "torch.compile the model", action="store_true")
    add("--sync_bn", "batch norm over the images of all GPUs", action="store_true")
    devices, text = ["auto", "cpu", "cuda", "mps"], "auto: NVIDIA GPU or CPU; mps: Mac's GPU"
    add("--device", text, choices=devices, default="auto")
    group = parser.add_argument_group("communication")
    backends, text = ["auto", "nccl", "gloo"], "auto: nccl on NVIDIA GPUs, else gloo"
    add("--backend", text, choices=backends, default="auto")
    text = "seconds without an answer after which a process counts as lost"
    add("--timeout", text, type=at_least(float, 0.1), default=float(TIMEOUT))
    add("--bucket_cap_mb", "MiB in one all-reduce; unset: DDP's", type=at_least(float, 0.1))
    hooks, text = ["none", "fp16", "bf16"], "to send each gradient with 2 bytes"
    add("--grad_compression", text, choices=hooks, default="none")
    group = parser.add_argument_group("output")
    text = f"steps from one log line to the next; unset: {LOG_EVERY['cpu']}, on a GPU "
    add("--log_every", f"{text}{LOG_EVERY['cuda']}", type=POSITIVE)
    add("--checkpoint", "FILE, saved at the end of each epoch and on a stop signal")
    add("--checkpoint_every", "also every N optimizer steps; 0: not", type=NATURAL, default=0)
    add("--resume", "continue from --checkpoint if that file exists", action="store_true")
    add("--profile", "FOLDER for a trace of each rank, of its 8th to 10th step", metavar="FOLDER")
    return parser


def at_least(number_type, least):
    """A type for add_argument: an int or float that is not below `least`."""

    def convert(text):
        value = number_type(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least:g}")
        if value >= 2**31:
            raise argparse.ArgumentTypeError(f"{text} is not below {2**31}")
        return value

    convert.__name__ = number_type.__name__  # argparse then says "invalid int value"
    return convert


NATURAL, POSITIVE = at_least(int, 0), at_least(int, 1)  # types of options


def parse_arguments(argv):
    """The arguments. Wrong ones end the process with one line and exit code 2."""
    parser = make_parser()

    def refuse(text):
        text = f"{parser.prog}: error: {text}; see --help"
        record_end(UserError(text))
        parser.exit(EXIT_USER, text + "\n")

    parser.error = refuse  # one line, without argparse's usage
    # Dashes inside a name are accepted: --batch-size is --batch_size.
    argv = [re.sub(r"^--[a-z-]+", lambda m: "--" + m[0][2:].replace("-", "_"), a) for a in argv]
    args = parser.parse_args(argv)
    for name in [*DATA_PATHS, "checkpoint", "profile", "weights"]:
        if getattr(args, name) == "":  # as "$COCO" is where nobody has set it
            refuse(f"--{name} is empty: give a path")
    check_data_options(args, refuse)
    for option, given in (("resume", args.resume), ("checkpoint_every", args.checkpoint_every)):
        if given and not args.checkpoint:
            refuse(f"--{option} needs --checkpoint FILE")
    if args.compile and (args.bucket_cap_mb or 1) < 1:
        refuse("--compile needs --bucket_cap_mb 1 or more: PyTorch's first bucket has 1 MB")
    return args


def check_data_options(args, refuse):
    if args.dummy:
        for name in DATA_PATHS:
            if getattr(args, name):
                refuse(f"--dummy reads no data: leave --{name} out")
        if args.workers or args.weights not in ("imagenet", "none"):
            refuse("--dummy loads no images and no weights: leave --workers and --weights out")
        args.weights, args.workers = "none", 0
    elif not (args.coco_image_path and args.annotation_path):
        refuse("give --coco_image_path and --annotation_path, or --dummy")
    if bool(args.val_image_path) != bool(args.val_annotation_path):
        refuse("--val_image_path and --val_annotation_path go together: give both")


def check_settings(args):
    """All ranks: raises UserError unless all were started alike."""
    settings = {f"--{name}": value for name, value in vars(args).items() if name not in PER_NODE}
    for name in ("checkpoint", "profile", "val_image_path"):  # needs collective calls
        settings[f"--{name} given"] = bool(getattr(args, name))
    settings["PyTorch"] = str(torch.__version__)
    first = from_rank_0(lambda: settings)
    with errors_end_all_ranks():
        for name, value in first.items():
            if settings.get(name) != value:
                text = f"{name} is {settings.get(name)} here, but {value} on rank 0"
                raise UserError(f"{text}: start all ranks alike")


def fill_in_arguments(args, process, image_count, checkpoint=None):
    """All ranks: sets what depends on the hardware, the number of images and the checkpoint."""
    args.cores = set_threads(process)
    args.log_every = args.log_every or LOG_EVERY[process.device.type]
    if args.workers is None:
        workers = args.cores - (2 if args.cores > 4 else 1) if process.gpu else 1
        args.workers = max(1, min(workers, MOST_WORKERS))
    # Collective calls in here depend on arguments. All ranks have the same ones: check_settings.
    with errors_end_all_ranks():
        if args.sync_bn and not process.gpu:
            raise UserError("--sync_bn needs NVIDIA GPUs: PyTorch has no other SyncBatchNorm")
        if args.device == "mps" and args.grad_compression != "none":
            raise UserError("--grad_compression needs DDP, which --device mps does not use")
        if args.grad_compression == "bf16" and not (torch.version.cuda or torch.version.hip):
            raise UserError("--grad_compression bf16 needs a PyTorch with CUDA: give fp16")
        set_batch_sizes(args, process)
    set_steps(args, image_count)
    if args.lr_scaling == "linear":
        base, args.lr = args.lr, args.lr * args.global_batch_size / LR_BATCH
        text = f"--lr {base:g} x {args.global_batch_size} / {LR_BATCH} = {args.lr:g}"
        log_from_rank_0(process, text)
    if args.precision == "auto" and checkpoint:
        args.precision = checkpoint["settings"].get("--precision", "fp32")
    elif args.precision == "auto":  # the fastest one that suits all ranks
        args.precision = min(all_gather(fast_precision(args, process)), key=PRECISIONS.index)


def set_batch_sizes(args, process):
    """global_batch_size: images of all ranks in a step. batch_size: of a micro-batch."""
    micro_batches = process.world_size * args.accumulate_steps  # of all ranks in a step
    global_batch = args.global_batch_size or args.batch_size * micro_batches
    if global_batch % micro_batches:
        text = f"--global_batch_size {global_batch} is not a multiple of {micro_batches}"
        raise UserError(f"{text}, the number of micro-batches of all ranks in a step")
    args.global_batch_size, args.batch_size = global_batch, global_batch // micro_batches


def set_steps(args, image_count):
    """steps_per_epoch, num_epochs, and max_steps: optimizer steps of the whole run."""
    args.steps_per_epoch = math.ceil(image_count / args.global_batch_size)
    if args.dummy and not args.num_epochs:
        args.max_steps = args.max_steps or DUMMY_STEPS
        args.num_epochs = math.ceil(args.max_steps / args.steps_per_epoch)
    args.num_epochs = args.num_epochs or NUM_EPOCHS
    all_steps = args.num_epochs * args.steps_per_epoch
    args.max_steps = min(all_steps, args.max_steps or all_steps)


# ---- Launchers and devices: who started this process, and on what it computes

# The same four numbers, as each launcher names them.
TORCHRUN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
OPEN_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
# SLURM_NTASKS is the number of tasks of the job. srun starts those of a job step.
SRUN = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"]
# What init_process_group needs of a process that meets nobody, with a port that is free (0).
ALONE = dict(zip(TORCHRUN, "0101", strict=True)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ALONE["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # if a shell inside of a torchrun has it
# On a Mac's GPU, mps, one process trains without DDP and without channels_last.
DEVICES_WITH_DDP = ["cpu", "cuda"]
PRECISIONS = ["fp32", "fp16", "bf16"]  # a GPU that is fast in one is fast in those before it


def find_launcher():
    """Who started this process. Sets torchrun's variables where another launcher did not."""
    env, job = os.environ, ""
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in env:
        launcher = "torchrun"  # or another scheduler, or a user
        if env.get("LOCAL_RANK", "0") == "0":  # without torchrun: one process on each node
            env.setdefault("LOCAL_RANK", "0")
            env.setdefault("LOCAL_WORLD_SIZE", "1")
    elif "OMPI_COMM_WORLD_RANK" in env:
        launcher = "mpirun"
        env.update(zip(TORCHRUN, (env.get(name, "") for name in OPEN_MPI), strict=True))
        # The job's name in Open MPI 5, and in 4.
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    elif env.get("PMI_SIZE", tasks) != tasks:
        text = "started by another launcher (MPICH, Intel MPI?): use torchrun, srun or Open MPI"
        raise UserError(f"{text}, or set {', '.join(TORCHRUN)} for each process")
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:  # no batch script has both
        launcher = "srun"
        env.update(zip(TORCHRUN, (env.get(name, "") for name in SRUN), strict=True))
        env["LOCAL_WORLD_SIZE"] = str(len(env["LOCAL_WORLD_SIZE"].split(",")))  # of this node
        job = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    else:
        env.update(ALONE)
        return "python"
    if job:  # a port of its own: other jobs may use the node
        env.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 12000))
    check_numbers(env, launcher)
    return launcher


def check_numbers(env, launcher):
    """Raises UserError unless torchrun's four variables are numbers that fit."""
    try:
        rank, world_size, local_rank, local_world_size = (int(env[name]) for name in TORCHRUN)
    except (KeyError, ValueError) as error:
        names = ", ".join(TORCHRUN)
        text = f"this process was started by {launcher}, or with RANK set"
        raise UserError(f"{text}, but not all of {names} are whole numbers") from error
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size:
        text = f"RANK is {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of "
        raise UserError(f"{text}LOCAL_WORLD_SIZE {local_world_size}: each has to be below")


def choose_backend(args, process):
    """nccl or gloo. Raises UserError if this node's hardware is not what the options need."""
    gpus = usable_gpus(args)
    backend = ("nccl" if gpus else "gloo") if args.backend == "auto" else args.backend
    # Some set-ups show each process its own GPU alone.
    chosen = process.launcher in ("srun", "mpirun") or "CUDA_VISIBLE_DEVICES" in os.environ
    if backend == "nccl" and process.local_world_size > gpus and not (gpus == 1 and chosen):
        text = f"--backend nccl: {process.local_world_size} processes for {gpus} GPU(s) here"
        raise UserError(f"{text}: start one for each GPU, or use --backend gloo")
    if args.device == "mps" and (process.world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps needs a Mac, and one process")
    return backend


def prepare_hardware(args, process):
    """Settings of PyTorch for this device and backend."""
    if args.device == "mps":
        process.device = torch.device("mps")
        log(process, "One process on a Mac's GPU, without DDP, which has no backend for it")
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32, also in convolutions
    # NOTE: by its source (not measured), the new process group of NCCL in PyTorch 2.15 makes
    # backward wait for each all-reduce. 0 selects the former one, in which they overlap.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")


def set_threads(process):
    """All ranks: the number of CPU cores for this process.

    PyTorch gets as many threads, unless OMP_NUM_THREADS says how many.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    mine = socket.gethostname(), sorted(cores)
    # Ranks of a node may share cores or have their own. (Nodes may have the same name.)
    sharing = min(all_gather(mine).count(mine), process.local_world_size)
    own = max(1, min(len(cores) // sharing, cpu_quota() // process.local_world_size))
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1 if it starts several processes
        torch.set_num_threads(own)
    return own


def cpu_quota():
    """How many cores the CPU quota of a container is worth, rounded up: cgroup v2's or v1's."""
    text = ""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        with suppress(OSError):
            text += Path("/sys/fs/cgroup", name).read_text()
    found = re.match(r"(\d+)\s+(\d+)", text)  # without a quota: max, or -1
    return math.ceil(int(found[1]) / int(found[2])) if found else sys.maxsize


def usable_gpus(args):
    """The number of NVIDIA GPUs to choose from. Raises UserError if PyTorch cannot use them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()  # warns of the reason, the first time
    if args.device in ("cpu", "mps"):
        return 0
    gpus = torch.cuda.device_count()
    # NOTE: a GPU that PyTorch cannot use must not be replaced by the CPU in silence.
    if not usable and (gpus or args.device == "cuda" or gpu_is_present()):
        text = f"PyTorch {torch.__version__} "
        text += f"cannot use this node's {counted(gpus, 'GPU')}" if gpus else "sees no GPU here"
        for warning in caught[:1]:  # without a URL, or the place in PyTorch's source
            reason = re.split(r" Please update| \(Triggered", str(warning.message))[0]
            text += f": {reason}"
        text += " | see nvidia-smi, CUDA_VISIBLE_DEVICES and docs/running.md (Faults)"
        raise UserError(f"{text}, or give --device cpu")
    return gpus


def gpu_is_present():
    """Whether this node has an NVIDIA GPU, by its device file or WSL's driver, and shows it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/usr/lib/wsl/lib").glob("libcuda.so*")]
    return bool(files) and not hidden


def fast_precision(args, process):
    """bf16 if the hardware multiplies faster in it, fp16 on older tensor cores, else fp32."""
    if process.gpu:
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability() >= (7, 0) else "fp32"
    if process.device.type == "mps":
        return "fp32"
    # CPUs with bf16 instructions multiply several times faster in it, others many times slower.
    # Between them is room enough: a machine that is busy gives the same answer.
    seconds = {torch.float32: [], torch.bfloat16: []}
    end = perf_counter() + 0.1
    while not seconds[torch.bfloat16] or perf_counter() < end:
        for dtype in seconds:
            matrix = torch.ones(256, 256, dtype=dtype)
            began = perf_counter()
            torch.mm(matrix, matrix)
            seconds[dtype].append(perf_counter() - began)
    # The fastest measurements are those that other programs have not disturbed.
    args.bf16_speed_up = min(seconds[torch.float32]) / min(seconds[torch.bfloat16])  # for Run
    return "bf16" if args.bf16_speed_up >= 1.5 else "fp32"


# ---- Meeting: where the processes find each other, and what is said if they do not


def set_meeting_point(process):
    """Sets MASTER_ADDR and MASTER_PORT where torchrun has not. Raises UserError."""
    if process.one_node:
        # On one node they meet at its own address. torchrun would give its name, which does not
        # resolve on every machine.
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if not os.environ.get("MASTER_ADDR"):
        text = "MASTER_ADDR is not set: export it, with an address or the name of rank 0's node"
        raise UserError(f"{text} (mpirun -x MASTER_ADDR; for srun see docs/running.md)")
    port = os.environ.setdefault("MASTER_PORT", "29500")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UserError(f"MASTER_PORT is {port!r}: give a free port of rank 0's node, 1 to 65535")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if restarts and process.one_node:
        # NOTE: torchrun --max-restarts keeps its store, with the addresses of the start before.
        # So rank 0 opens another one. (On several nodes torchrun itself must not share its store:
        # --rdzv_backend=c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node.)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        # (At a port far away: other jobs may have the next ones.)
        os.environ["MASTER_PORT"] = str(1024 + (int(port) + 997 * restarts) % 64000)


# NCCL's own words where two ranks have one GPU, until version 2.29 and since.
ONE_GPU_TWICE = ["Duplicate GPU detected", "Multiple Ranks are using the same GPU"]


@contextmanager
def connecting_ranks(args, process):
    """A block in which the ranks meet and connect. Raises NotConnected or LoneUserError.

    NOTE: PyTorch's timeout is not enough. Gloo may wait several times as long for an address that
    does not answer, and NCCL waits for ever. So a timer ends the process.
    """
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    interface = f"{process.backend.upper()}_SOCKET_IFNAME"
    now = os.environ.get(interface, "not set")
    advice = f"Has each rank started, with {place} as rank 0's address and port, and with "
    advice += f"{process.backend} on its {process.device.type}? Is {interface} ({now}) the "
    advice += "interface between the nodes, and open in their firewalls? Try tools/preflight.py"
    late = NotConnected(f"no connection to all ranks in {args.timeout:g} s. {advice}")
    timer = threading.Timer(args.timeout + 5, end_process, (EXIT_FAILED, process, late))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        cause = one_line(error)
        if any(words in cause for words in ONE_GPU_TWICE):
            text = f"{cause}: two ranks have the same GPU: start one process for each GPU"
            raise LoneUserError(text) from error
        raise NotConnected(f"{cause.rstrip('.')}. {advice}") from error
    finally:
        timer.cancel()


# ---- Annotation files: from COCO's JSON to file names, labels and classes

# The images that have a label: their file names, and their labels, which are indices of
# `categories`, {id: name}. `unlabelled` counts the images without an annotation: left out.
ImageSet = namedtuple("ImageSet", "names labels categories unlabelled")
# With --dummy: as many images and classes as COCO has.
DUMMY_SET = ImageSet(range(117_266), [], {n: f"class {n}" for n in range(80)}, 0)
SEE = "tools/check_coco.py says more"


def read_image_list(path, train_set=None):
    """ImageSet of a COCO instances file; None without a path. Raises UserError.

    train_set: that of the training images, for validation images: their labels are then those of
    its classes.
    """
    if not path:
        return None
    gc.disable()  # it would search millions of new objects again and again
    try:
        coco = COCO()
        coco.dataset = json.loads(Path(path).read_bytes())
        with redirect_stdout(None):  # pycocotools prints
            coco.createIndex()
        image_set = list_labelled(coco)
        return match_classes(image_set, train_set) if train_set else image_set
    except OSError as error:
        raise UserError(f"annotation file {path}: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"annotation file {path}: {error} ({SEE})") from error
    except MemoryError:
        raise
    except Exception as error:  # a file of another kind makes errors of any type
        text = f"annotation file {path} is not a COCO instances file"
        raise UserError(f"{text}: {one_line(error)} ({SEE})") from error
    finally:
        gc.enable()


def list_labelled(coco):
    """ImageSet of what pycocotools has indexed. Raises UserError where it would train wrongly."""
    images, annotations = coco.dataset["images"], coco.dataset["annotations"]
    for name in ("images", "categories"):
        entries = coco.dataset[name]
        if len({entry["id"] for entry in entries}) < len(entries):
            raise UserError(f"two of its {name} have the same id: each needs one of its own")
    kinds = {type(image["id"]) for image in images}
    kinds |= {type(annotation["image_id"]) for annotation in annotations}
    if len(kinds) > 1:  # pycocotools would leave images out in silence
        raise UserError("its images have ids of several types: give them one")
    categories = {category: coco.cats[category]["name"] for category in sorted(coco.cats)}
    label_of = {category: label for label, category in enumerate(categories)}
    names, labels = [], []
    for image in images:
        of_it = coco.imgToAnns.get(image["id"])
        if not of_it:
            continue
        # The label is the category of the first annotation in the file, crowds included.
        category = of_it[0]["category_id"]
        if category not in label_of:
            raise UserError(f"an annotation has the category {category!r}, which does not exist")
        if not isinstance(image["file_name"], str):
            raise UserError(f"an image has the file_name {image['file_name']}, which is no text")
        names.append(image["file_name"])
        labels.append(label_of[category])
    if not names:
        raise UserError("no image has an annotation: no image_id is the id of an image")
    return ImageSet(names, labels, categories, len(images) - len(names))


def match_classes(val_set, train_set):
    """The ImageSet with labels of the training classes of the same names. Raises UserError."""
    train_names, val_names = (list(found.categories.values()) for found in (train_set, val_set))
    used, label_of = {*train_set.labels}, {}
    for label in {*val_set.labels}:
        same = [n for n, name in enumerate(train_names) if name == val_names[label]]
        same = [n for n in same if n in used] or same  # classes without images do not count
        if len(same) != 1:
            text = f"it has images of the class {val_names[label]!r}, and the training images have"
            raise UserError(f"{text} {len(same)} classes of this name: give both files one")
        label_of[label] = same[0]
    if len({*label_of.values()}) < len(label_of):
        raise UserError("two of its classes that have images have the same name: rename one")
    labels = [label_of[label] for label in val_set.labels]
    return ImageSet(val_set.names, labels, train_set.categories, val_set.unlabelled)


# ---- Images: from a file to a batch

# Mean and standard deviation of ImageNet's red, green and blue, on a scale of 0 to 255.
MEAN = 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
MOST_LOADER_SECONDS = 2_000_000  # 23 days; poll() counts milliseconds in 32 bits
# PyTorch warns of more workers than cores. Who asks for them wants them.
warnings.filterwarnings("ignore", message="This DataLoader will create")
if len(tempfile.gettempdir()) > 60:  # the sockets of loader workers lie there: 107 characters
    tempfile.tempdir = "/tmp"


def load_image(path):
    """uint8 (height, width, 3), RGB. Raises OSError, and LoneUserError for a damaged image."""
    content = Path(path).read_bytes()  # its OSError: the storage may be gone
    try:
        return decode(content)
    except MemoryError:
        raise
    except Exception as error:  # damaged images raise errors of any type
        reason = one_line(error).partition(" <_io")[0]
        if isinstance(error, Image.DecompressionBombError):
            reason = f"it is too large: {reason}"
        text = f"image {path} cannot be decoded: {reason} (tools/check_coco.py --decode finds all "
        text += "of them; put a readable image under this name and --resume)"
        raise LoneUserError(" ".join(text.splitlines())) from error


def decode(content):
    """uint8 (height, width, 3), RGB, of a file's bytes: its first frame, as Pillow shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow also warns of images that it can decode
        image = Image.open(BytesIO(content))
        if image.mode[0] in "IF":  # I, I;16, F: 16 or 32 bits, which convert("RGB") would clip
            raise ValueError(f"its pixels have more than 8 bits (mode {image.mode})")
        if image.mode != "RGB":  # convert would copy the image in any case
            image = image.convert("RGB")
        # As pil_to_tensor, with a copy less. PyTorch warns that nobody may write to these bytes.
        pixels = torch.frombuffer(image.tobytes(), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3)


class PackedImages:
    """Images as raw RGB pixels in one file, written by tools/prepare_coco.py --packed.

    PATH.index has a line for each image: its name, first byte, height and width.
    """

    def __init__(self, path, names):
        """Raises UserError unless the file has all these images."""
        with as_user_error(f"{path}.index, of tools/prepare_coco.py --packed, cannot be read"):
            lines = map(json.loads, Path(f"{path}.index").read_text("utf-8").splitlines())
            places = {name: where for name, *where in lines}
            first, height, width = max(places.values())  # of the last image
            size, needed = os.path.getsize(path), first + 3 * height * width
        if size != needed:
            text = f"{path} has {size} bytes, but {path}.index is of a file with {needed}"
            raise UserError(f"{text}: copy both again, or make both anew")
        missing = [name for name in names if name not in places]
        refuse_missing(f"packed file {path}", names, missing)
        self.places = torch.tensor([places[name] for name in names])  # (images, 3)
        self.path, self.file = path, None  # each process opens it when it first reads

    def read(self, number):
        """uint8 (height, width, 3), RGB."""
        if self.file is None:
            self.file = os.open(self.path, os.O_RDONLY)
        first, height, width = self.places[number].tolist()
        image = torch.empty(height, width, 3, dtype=torch.uint8)
        # NOTE: mmap would end in SIGBUS if the storage fails. This is an OSError.
        if os.preadv(self.file, [image.numpy()], first) < image.numel():
            raise OSError(f"{self.path} has become shorter")
        return image


def random_crop(image, size):
    """A random part of an image, resized to (3, size, size), and flipped in half of all cases."""
    top, left, height, width = RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
    part = image[:, top : top + height, left : left + width]
    # A copy of the rows is faster to resize. With a torchvision for PyTorch before 2.9 it is
    # slower, on CPUs with AVX512.
    if torch.__version__ >= (2, 9):
        part = part.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    part = resize(part, [size, size])
    return part.flip(2) if torch.rand(1) < 0.5 else part


def center_crop(image, size):
    """For validation: the middle of an image whose shorter side is a little longer than size."""
    sides = image.shape[1:]
    if max(sides) > 8 * min(sides):  # resized as a whole, a long thin image could fill the memory
        image = v2.functional.center_crop(image, [min(side, 8 * min(sides)) for side in sides])
    return v2.functional.center_crop(resize(image, [size * 8 // 7]), [size, size])


class EpochSampler(DistributedSampler):
    """PyTorch's DistributedSampler, of whose share a part is used, with keys (epoch, index).

    NOTE: set_epoch does not reach the dataset, because copies of it live in the loader's worker
    processes. So the epoch is in the key.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start, self.end = 0, None  # the part of this rank's share that is used

    def __iter__(self):
        part = islice(super().__iter__(), self.start, self.end)
        return ((self.epoch, index) for index in part)

    def __len__(self):
        return len(range(self.num_samples)[self.start : self.end])


class DummyLoader:
    """With --dummy: one batch of random images on the device. Nothing is read or waited for."""

    def __init__(self, args, process, train_set):
        self.sampler = EpochSampler(train_set.names, process.world_size, process.rank)
        torch.manual_seed(args.seed + process.rank)  # build_model seeds anew, for the weights
        shape = args.batch_size, args.image_size, args.image_size, 3
        self.images = torch.randint(256, shape, dtype=torch.uint8, device=process.device)
        self.labels = torch.randint(len(DUMMY_SET.categories), shape[:1], device=process.device)

    def __iter__(self):
        """The batch, for as many images as the share has. The last one may be shorter."""
        for first in range(0, len(self.sampler), len(self.images)):
            left = len(self.sampler) - first
            yield self.images[:left], self.labels[:left]


def ignore_stop_signals(_=None):
    """For loader workers: SLURM signals all processes of a job, but the ranks decide."""
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


def check_images(args, process, train_set, val_set):
    """All ranks: raises UserError if an image is missing. The first rank of each node looks."""
    if args.dummy:
        return
    count = len(train_set.names) + len(val_set.names if val_set else [])
    log_from_rank_0(process, f"Looking for {counted(count, 'image')}")
    with errors_end_all_ranks():
        if process.local_rank == 0:
            look_for_images(args.coco_image_path, train_set.names)
            if val_set:
                look_for_images(args.val_image_path, val_set.names)


def look_for_images(folder, names):
    """Raises UserError if the folder, or the packed file, lacks one of the images."""
    if os.path.isfile(folder):
        PackedImages(folder, names)
    elif os.path.isdir(folder):
        refuse_missing(f"folder of images {folder}", names, missing_images(folder, names))
    else:
        raise UserError(f"the folder of images {folder} is not there")


def refuse_missing(where, names, missing):
    """Raises UserError if some of the names are missing there."""
    if missing:
        text = f"lacks {len(missing)} of {len(names)} listed images, the first is {missing[0]}"
        raise UserError(f"the {where} {text} ({SEE})")


def missing_images(folder, names):
    """The names of which the folder has no file. A link to nothing is none."""
    # Listing each folder once is faster than looking for each of 118,287 files.
    files = {}
    for subfolder in {os.path.dirname(name) for name in names}:
        try:
            with os.scandir(os.path.join(folder, subfolder)) as entries:
                files[subfolder] = {entry.name for entry in entries if entry.is_file()}
        except (OSError, ValueError):  # ValueError: a name that no file can have
            files[subfolder] = set()
    return [name for name in names if os.path.basename(name) not in files[os.path.dirname(name)]]


# ---- Weights: where a model begins


def load_weights(args, process, model, train_set):
    """Loads ImageNet's weights or a file's, without a last layer of other classes."""
    source, names = args.weights, list(train_set.categories.values())
    log(process, f"Loading weights: --weights {source}")
    with as_user_error(f"--weights {source}: these are not weights of ResNet-18"):
        state = download_weights(args, process) if source == "imagenet" else read_file(source)
        their_names = list(state.get("categories") or names)  # a checkpoint has more than weights
        state = state.get("model", state.get("state_dict", state))
        # A model that was saved inside of DDP has such names.
        state = {name.removeprefix("module."): value for name, value in state.items()}
        if source == "imagenet" or len(state["fc.weight"]) != len(names) or their_names != names:
            text = f"the last layer, of {len(state['fc.weight'])} other classes, is left out"
            log(process, f"--weights {source}: {text}: {len(names)} classes here")
            state |= {"fc.weight": model.fc.weight, "fc.bias": model.fc.bias}
        model.load_state_dict(state)


def download_weights(args, process):
    """ImageNet weights, downloaded unless an earlier download has left them."""
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    folder = f"{torch.hub.get_dir()}/checkpoints"
    where = f"download {weights.url} into {folder} (TORCH_HOME moves this folder)"
    if not os.path.exists(os.path.join(folder, os.path.basename(weights.url))):
        text = (
            f"the other ranks wait {args.timeout:g} s for it (--timeout). On a slow network first"
        )
        log(process, f"Downloading 45 MB of ImageNet weights: {text} {where}")
    prefix = "no ImageNet weights: on a machine with internet access "
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
    try:
        with as_user_error(f"{prefix}{where}, or use --weights none"):
            return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    finally:
        socket.setdefaulttimeout(before)


def read_file(path):
    """A dict that torch.save has written. Code in the file is not run. Raises UserError."""
    with as_user_error(f"cannot read {path}, which torch.save should have written"):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise UserError(f"{path} has no weights by their names, but a {type(state).__name__}")
        return state


def rebuild_buckets(training):
    """All ranks: a forward and a backward pass over blank images, before any step.

    After its first backward pass DDP changes which gradients are in which bucket. The buckets
    decide the order in which the ranks' gradients are added, and so the last bits of the sums.
    Without this pass a resumed run would differ from an uninterrupted one in the last bits.
    """
    before = [buffer.clone() for buffer in training.model.buffers()]
    args, size = training.args, training.args.image_size
    share = math.ceil(len(training.train_set.names) / training.process.world_size)
    blank = torch.zeros(min(args.batch_size, share), size, size, 3, dtype=torch.uint8)
    forward(training, training.ddp, blank).sum().backward()
    training.optimizer.zero_grad()
    for buffer, old in zip(training.model.buffers(), before, strict=True):
        buffer.copy_(old)  # undoes what the blank images did to the batch-norm statistics


# ---- Time: how long each part of a step takes, for the log; and PyTorch's profiler

MOST_STEPS = 1000  # of which the times are kept: the last ones
UNMEASURED_STEPS = 3  # the first ones, which are slower
# Times in seconds, and the number of this rank's images. cpu: CPU time of the whole process.
StepTime = namedtuple("StepTime", "data exposed whole images cpu", defaults=[0])


class StepTimer:
    """Measures the parts of each step, by the clock of the device.

    data: the wait for images. exposed: the exposed communication, from the moment when this rank
    has all its own gradients until they are averaged. In this time a rank computes nothing: it
    sends and receives, and waits for slower ranks. The rest is called compute. A step includes
    what follows the step before: a log line, an agreement. One process exposes nothing.
    """

    def __init__(self, process, last_gradient):
        """last_gradient: the parameter whose gradient is the last one to be ready."""
        self.device_type, self.alone = process.device.type, process.world_size == 1
        self.unread = []  # (marks, CPU seconds, number of images): a GPU may not have finished
        self.made = 0  # steps that are read
        self.train_seconds = 0.0  # of all steps that were not profiled
        self.times = deque(maxlen=MOST_STEPS)  # StepTimes, without those of the first steps
        self.new = deque(maxlen=MOST_STEPS)  # of steps since the last log line
        self.start_step()
        last_gradient.register_post_accumulate_grad_hook(lambda _: self.mark("own gradients"))

    def now(self):
        """This moment. A GPU runs behind the script: there, the moment when it gets here."""
        if self.device_type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
            return moment
        if self.device_type == "mps":
            torch.mps.synchronize()
        return perf_counter()

    def start_step(self):
        """What happened before is not part of the next step."""
        self.cpu = process_time()
        self.marks = {"begin": [self.now()]}  # of a name: a moment for each micro-batch

    def mark(self, name):
        self.marks.setdefault(name, []).append(self.now())

    def end_step(self, image_count):
        marks, cpu = self.marks, self.cpu
        self.start_step()
        marks["end"] = self.marks["begin"]
        self.unread.append((marks, self.cpu - cpu, image_count))

    def last_step_seconds(self):
        self.read()
        return self.times[-1].whole if self.times else 1

    def since_last_line(self):
        """The StepTimes of the steps after those of the last call."""
        self.read()
        new = [*self.new]
        self.new.clear()
        return new

    def read(self):
        """Fills in the StepTimes; waits for a GPU."""
        if self.device_type == "cuda" and self.unread:
            self.unread[-1][0]["end"][0].synchronize()
        for marks, cpu, image_count in self.unread:
            last = {name: moments[-1] for name, moments in marks.items()}
            data = sum(map(self.seconds, marks["wait for data"], marks["data arrived"]))
            exposed = 0
            if not self.alone:
                exposed = self.seconds(last["own gradients"], last["gradients averaged"])
            whole = self.seconds(last["begin"], last["end"])
            if self.made == UNMEASURED_STEPS:  # until then there is nothing better
                self.times.clear()
            self.made += 1
            self.train_seconds += whole
            for times in (self.times, self.new):
                times.append(StepTime(data, exposed, whole, image_count, cpu))
        self.unread.clear()

    def seconds(self, begin, end):
        return begin.elapsed_time(end) / 1e3 if self.device_type == "cuda" else end - begin


def mean_time(times):
    """The StepTime of an average step; zeros without any step."""
    return StepTime(*map(fmean, zip(*times, strict=True))) if times else StepTime(0, 0, 0, 0)


def link_and_wait(ranks):
    """Of the exposed communication of each rank in each step: (the link's part, the mean wait for
    other ranks).

    In each step the rank that came last has not waited: its time, the least of all, is the link's.
    As noise makes the least of many smaller, this is a lower bound.
    """
    if not ranks[0]:  # resumed at its end, it has made no step
        return 0.0, 0.0
    least = fmean(map(min, zip(*ranks, strict=True)))
    return least, fmean(map(fmean, ranks)) - least


# Steps: before the profiler starts, while it starts, and in the trace.
PROFILED = {"wait": 5, "warmup": 2, "active": 3}


def start_profiler(training):
    """All ranks: with --profile each writes a trace after the steps of PROFILED."""
    args, process, needed = training.args, training.process, sum(PROFILED.values())
    if not args.profile:
        return
    if args.max_steps - training.step < needed:
        text = (
            f"no --profile: it needs {needed} steps, and {args.max_steps - training.step} are left"
        )
        log_from_rank_0(process, f"WARNING: {text}")
        return
    if not process.gpu:  # Kineto, the profiler's library, would print errors about that
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with errors_end_all_ranks(), as_user_error(f"--profile {args.profile} cannot be written"):
        os.makedirs(args.profile, exist_ok=True)

    def write(profiler):
        path = os.path.join(args.profile, f"rank{process.rank}.json.gz")
        # (No later step has to wait for a rank that still writes.)
        with errors_end_all_ranks(), as_user_error(f"--profile {path} cannot be written"):
            profiler.export_chrome_trace(path)

    schedule = torch.profiler.schedule(**PROFILED, repeat=1)
    training.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    training.profiler.start()


def profile_step(training):
    """All ranks: the profiler's step has ended. One that it has slowed down is in no average."""
    action = training.profiler.current_action
    training.profiler.step()
    if action != torch.profiler.ProfilerAction.NONE:
        training.timer.unread.pop()
        training.timer.start_step()
    if action == torch.profiler.ProfilerAction.RECORD_AND_SAVE:
        stop_profiler(training)


def stop_profiler(training):
    """All ranks, after the same step. One that is left at work could crash Python's end."""
    if training.profiler:
        training.profiler.stop()
        training.profiler = None


# ---- Going on, or not: what the ranks agree on between steps

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# What is ignored from the start (nohup, the background of a script) stays ignored. Not USR1, which
# SLURM sends before a time limit: the launchers ignore it for torchrun, which would die of it.
STOP_SIGNALS = [n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
STOP_SIGNALS.append(signal.SIGUSR1)
PARENT_ENDED = 1000  # in place of a signal's number: this plus the number of the rank
MOST_STEPS_WITHOUT_AGREEMENT = 50


def catch_stop_signals(process):
    """A stop signal is only noted, in process.stop. At the next agreement all ranks stop."""

    def note(signal_number, _):
        process.stop = signal_number

    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, note)


def end_on_second_interrupt(process):
    """A second Ctrl-C, a second or more after the first, ends this process at once.

    (Under srun one Ctrl-C arrives twice: from srun and from torchrun.) In a collective call Python
    does not get to a handler, but its thread can read the byte that each signal writes.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch():
        first = math.inf
        while writer and (number := reader.recv(1)):
            if number[0] == signal.SIGINT and perf_counter() - first >= 1:
                end_process(128 + signal.SIGINT, process)
            elif number[0] == signal.SIGINT:
                first = min(first, perf_counter())

    threading.Thread(target=watch, daemon=True).start()


def parent_has_ended(process):
    """A torchrun that is killed leaves its ranks behind, with another parent."""
    # A rank that was started by hand, with RANK set, may go on when its shell has ended.
    by_hand = process.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ
    watched = process.launcher != "python" and not by_hand
    return watched and os.getppid() != process.parent


def agree(training, seconds):
    """All ranks: a stop signal's number that any of them has had, or 0. Raises UserError.

    seconds: of the last step. The ranks agree again after `interval` steps: about once a second,
    because here they wait for each other and for their GPUs. It follows from the slowest rank's
    seconds, so it is the same on all ranks. It doubles at most each time, because the next steps
    may be slower.
    """
    stop = training.process.stop
    if not stop and parent_has_ended(training.process):
        stop = PARENT_ENDED + training.process.rank
    not_finite = not math.isfinite(training.loss_sum)  # as a number: a maximum may leave out NaN
    stop, not_finite, slowest = all_reduce_max(stop, not_finite, seconds)
    limit = min(2 * training.interval, MOST_STEPS_WITHOUT_AGREEMENT)
    training.interval = max(1, min(limit, int(1 / max(slowest, 1e-9))))
    training.agree_at_step = training.step + training.interval
    if not_finite:
        raise UserError(f"a loss up to step {training.step} is not finite: {BEGIN_AGAIN}")
    return int(stop)


def stop_together(training, seconds):
    """All ranks: end the run here if any of them has had a stop signal."""
    log_due_line(training)
    if stop := agree(training, seconds):
        stop_training(training, stop)


def stop_training(training, stop):
    """All ranks: saves, and ends the run. Raises Stopped, PeerLost or UserError."""
    if stop >= PARENT_ENDED:
        why = f"the parent process (torchrun?) of rank {stop - PARENT_ENDED} has ended"
    else:
        why = f"Stopped on {signal.Signals(stop).name}"
    stop_profiler(training)
    save_checkpoint(training)
    check_saved(training, f"{why}, but ")
    saved = bool(training.args.checkpoint)
    text = f"step {training.step} | {'saved' if saved else 'not saved: no --checkpoint'}"
    if stop >= PARENT_ENDED:
        dist.barrier()  # all leave only now
        raise PeerLost(f"{why} | {text}")
    raise Stopped(f"{why} | {text}", saved)


def batches_until_stop(training, loader):
    """All ranks: the loader's batches. After some of them the ranks agree to go on."""
    # After the same batches on all ranks, which the shortest share has, too; and at the end.
    images_of_shortest = len(loader.dataset) // training.process.world_size
    shortest = math.ceil(images_of_shortest / training.args.batch_size)
    training.interval, agree_at_batch, began = 1, 1, perf_counter()
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == agree_at_batch <= shortest:
            stop_together(training, perf_counter() - began)
            agree_at_batch += training.interval
        began = perf_counter()
    stop_together(training, perf_counter() - began)
    # A step of training takes longer than a batch here: the next one tells how long.
    training.interval, training.agree_at_step = 1, training.step + 1


# ---- Checkpoint: what is saved, and who may resume from it

# A run can resume only with the same values of these. The number of processes may differ, if
# --global_batch_size keeps a step's images the same.
SAME_ON_RESUME = ["global_batch_size", "image_size", "lr", "warmup_steps", "precision"]
SAME_ON_RESUME += ["grad_compression", "sync_bn", "seed"]
BEGIN_AGAIN = "begin again with a lower --lr, and another --checkpoint"


def settings_of(training):
    """{name: value} of what a run must have in common with the run that it resumes."""
    train_set = training.train_set
    data = "".join(map(str, (train_set.names, train_set.labels)))
    settings = {f"--{name}": getattr(training.args, name) for name in SAME_ON_RESUME}
    settings["number of classes"] = len(train_set.categories)
    settings["data set"] = hashlib.sha256(data.encode(errors="replace")).hexdigest()[:12]
    return settings


def check_checkpoint(args, process):
    """All ranks: raises UserError if an earlier run's file is there, or none can be written."""
    path = args.checkpoint
    with errors_end_all_ranks():
        if not path or process.rank > 0:
            return  # out of the block: this rank, too, learns of rank 0's error
        if not os.path.basename(path) or (os.path.exists(path) and not os.path.isfile(path)):
            raise UserError(f"checkpoint {path} is not a regular file: name another one")
        if os.path.exists(path) and not args.resume:
            text = "give --resume to continue from it, or another FILE"
            raise UserError(f"checkpoint {path} is there already: {text}")
        folder, name = os.path.split(os.path.realpath(path))
        with (
            as_user_error(f"checkpoint {path} cannot be written"),
            tempfile.TemporaryDirectory(dir=folder) as trial,
        ):  # as write_checkpoint does it
            Path(trial, f"{name}.new").touch()
            os.replace(Path(trial, f"{name}.new"), Path(trial, name))


def write_checkpoint(training, path):
    """The old file stays until the new one is complete. Raises UserError."""
    state = {
        "settings": settings_of(training),
        "categories": list(training.train_set.categories.values()),
        "step": training.step,
        "model": training.model.state_dict(),  # in ddp's, names would begin with "module."
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    what = f"checkpoint {path} not saved at step {training.step}"
    what += ", an older one is kept" if os.path.exists(path) else ""
    target = os.path.realpath(path)  # a link stays one
    new = f"{target}.new"
    try:
        with as_user_error(what), open(new, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it replaces the old one
            os.replace(new, target)
    finally:
        with suppress(OSError):
            Path(new).unlink(missing_ok=True)  # an incomplete one, if the disk is full


def read_checkpoint(args, process):
    """All ranks: what --checkpoint has; None if there is nothing to resume. Raises UserError."""
    path = args.checkpoint
    if not args.resume:
        return None
    state = from_rank_0(lambda: read_file(path) if os.path.exists(path) else None)
    keys = {"settings": dict, "step": int, "model": dict, "optimizer": dict, "scaler": dict}
    if state is not None and not all(
        isinstance(state.get(key), kind) for key, kind in keys.items()
    ):
        raise UserError(f"checkpoint {path} is not one of this demo")
    return state


def epochs_left(training):
    """The numbers of the epochs from the present one to the last one."""
    # The checkpoint of an epoch is saved before its validation. A run that resumes from it has no
    # step of that epoch left, but validates it.
    steps_per_epoch = training.args.steps_per_epoch
    first = max(1, math.ceil(training.step / steps_per_epoch))
    last = math.ceil(training.args.max_steps / steps_per_epoch)
    return range(first, last + 1)


def load_checkpoint(training, state):
    """All ranks: restores what was saved. Raises UserError.

    With the same number of processes, options and hardware a resumed run equals an uninterrupted
    one, bit for bit. The order of the images and their crops depend on seed, epoch and index alone
    (EpochSampler, CocoFirstCategory), DDP adds up in the same order (rebuild_buckets), and the
    rest is in the file. Exceptions are GPUs, where cuDNN chooses algorithms by their speed
    (forward), and perhaps --compile. A model with dropout would also need the state of torch's
    random generators.
    """
    path, optimizer = training.args.checkpoint, training.optimizer
    with errors_end_all_ranks(), as_user_error(f"checkpoint {path} is not one of this demo"):
        for name, value in settings_of(training).items():
            saved = state["settings"].get(name)
            if saved != value:
                text = f"checkpoint {path} was saved with {name} {saved}, not {value}"
                raise UserError(f"{text}: resume with the same")
        training.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        training.scaler.load_state_dict(state["scaler"])
        training.step = state["step"]
    # NOTE: Adam's averages may have been saved in another memory format than the weights have
    # here. The fused optimizer would take wrong elements.
    for parameter, averages in optimizer.state.items():
        for name, value in averages.items():
            if value.shape == parameter.shape:
                averages[name] = torch.empty_like(parameter).copy_(value)


# ---- Log: lines for people, and a line of JSON beside some of them for programs

STDOUT, STDERR = 1, 2  # file descriptors
# Of the environment: what may change the speed or the network of a run.
LOGGED = ("NCCL_", "GLOO_", "OMP_", "GOMP_", "MALLOC_", "TORCH_NCCL_", "TORCH_DIST_")


def log(process, text, to=STDOUT):
    """Writes a line in one piece, so that the lines of several ranks do not mix."""
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    line = f"{process.name} {text}\n".encode(errors="replace")
    with suppress(OSError):  # a full disk, or a reader that has gone, does not end a training
        while line:  # once, unless a pipe takes a part of a long line only
            line = line[os.write(to, line) :]


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


def facts_of_run(args, process, parameters):
    """All ranks: what runs, on what hardware, with which settings. Also for step_log.py."""
    device = torch.cuda.get_device_name() if process.gpu else os.uname().machine
    if process.device.type == "mps":
        device = f"MPS of {device}"
    # Each rank is one of so many on its node.
    ranks = all_gather((socket.gethostname(), device, 1 / process.local_world_size))
    hosts, devices, shares = zip(*ranks, strict=True)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": torch.cuda.nccl.version() if process.backend == "nccl" else None,
        },
        **vars(args),
        "launcher": process.launcher,
        "backend": process.backend,
        "hosts": hosts,
        "devices": devices,
        "nodes": round(sum(shares)),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "node_cores": os.cpu_count(),
        "parameters": sum(map(torch.numel, parameters)),
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(LOGGED)},
    }


def log_run(training, val_set):
    """All ranks: rank 0 writes the facts of the run, and those of its data."""
    args, process, train_set = training.args, training.process, training.train_set
    images, padding = len(train_set.names), -len(train_set.names) % process.world_size
    record = facts_of_run(args, process, training.model.parameters()) | {
        "start_step": training.step,
        "classes": len(train_set.categories),
        "images": images,
        "images_without_annotations": train_set.unlabelled,
        "padding": padding,
        "val_images": len(val_set.names) if val_set else None,
    }
    log_from_rank_0(process, f"Run {json.dumps(record)}")
    batch = min(args.global_batch_size, images + padding)
    words = f"{counted(process.world_size, 'process', 'processes')} on "
    words += f"{counted(record['nodes'], 'node')}, {process.backend}, {args.precision}; "
    words += f"{counted(args.max_steps, 'step')} of {counted(batch, 'image')}; "
    if args.dummy:
        words += "one batch of random images that repeats (--dummy): its loss means nothing"
    else:
        words += f"{images} labelled images"
        words += f", {train_set.unlabelled} without a label" if train_set.unlabelled else ""
        words += f", {padding} repeated to make all shares equal" if padding else ""
    if training.step:
        words += f". Resumed from {args.checkpoint} at step {training.step}"
        words += ": no step is left" if training.step >= args.max_steps else ""
    elif args.resume:
        words += f". No checkpoint {args.checkpoint} yet: the run starts from the beginning"
    log_from_rank_0(process, f"Run: {words}")
    if len(train_set.categories) == 1:
        text = "there is one class alone: the loss is 0 and Top-1 100 %, whatever is learned"
        log_from_rank_0(process, f"WARNING: {text}")


# The log line of a step that a GPU may not have finished. `copied`: when the loss is on the CPU.
DueLine = namedtuple("DueLine", "epoch step loss copied")


def note_line(training, epoch, loss):
    """Makes the line of a step due. A GPU still computes the step: there the next one logs it."""
    training.due_line = due_line(training.args, training.timer, epoch, training.step, loss)
    if not training.process.gpu:
        log_due_line(training)


def due_line(args, timer, epoch, step, loss):
    """A DueLine in steps 1, 6, 11, ... with --log_every 5, and in the last one; else None."""
    if (step - 1) % args.log_every and step != args.max_steps:
        return None
    return DueLine(epoch, step, loss.to("cpu", non_blocking=loss.is_cuda), timer.now())


def log_due_line(training):
    """Logs the due line, if there is one."""
    line, training.due_line = training.due_line, None
    if line:
        log_step(training.process, training.timer, line, training.args.max_steps)


def log_step(process, timer, line, max_steps):
    """Logs a step: the loss of this rank's images; img/s and times since the last line."""
    if process.gpu:
        line.copied.synchronize()
    mean = mean_time(timer.since_last_line())
    text = f"Epoch {line.epoch} | Step {line.step} | Loss: {line.loss.item():.4f} | "
    if not mean.images:  # all steps since the last line were profiled
        log(process, f"{text}profiled")
        return
    seconds = (max_steps - line.step) * mean.whole
    left = duration(seconds, 0) if seconds < 100 * 86400 else "over 100 days"
    text += f"{mean.images / mean.whole:.1f} img/s | data {1e3 * mean.data:.1f} ms | "
    log(process, f"{text}step {1e3 * mean.whole:.1f} ms | ETA {left}")


def log_epoch(training, epoch, first_step, images_seen, began):
    """This rank's part of an epoch; in a resumed run of its steps from `first_step` on."""
    seconds = perf_counter() - began
    if images_seen:  # none if the run was resumed at the end of the epoch
        steps = training.args.steps_per_epoch
        done = training.step - (epoch - 1) * steps
        state = "complete" if done == steps else f"ends at step {done}"
        state += f" of {steps}" if done < steps and not training.args.dummy else ""
        state += f" from step {first_step}" if first_step > 1 else ""
        text = f"Epoch {epoch} {state} | Avg loss: {training.loss_sum.item() / images_seen:.4f} | "
        log(training.process, f"{text}{images_seen / seconds:.1f} img/s | {seconds:.2f}s")


def log_validation(training, loader, epoch, correct, seen, began):
    """Top-1: the accuracy. Baseline: the accuracy of always guessing the most frequent class."""
    most_frequent = max(Counter(loader.dataset.labels).values())
    text = f"Epoch {epoch} validation | Top-1: {100 * correct / seen:.2f}% | {seen} images | "
    text += f"{perf_counter() - began:.2f}s | baseline {100 * most_frequent / seen:.2f}%"
    log(training.process, text)


def facts_of_rank(process, timer, digest):
    """What this rank's Summary is made of: its times are of the last 1,000 steps at most."""
    timer.read()
    mean = mean_time(timer.times)
    parts = {
        "rank": process.rank,
        "data_ms": 1e3 * mean.data,
        "compute_ms": 1e3 * (mean.whole - mean.data - mean.exposed),
        "exposed_ms": 1e3 * mean.exposed,
        "step_ms": 1e3 * mean.whole,
        "cpu_ms": 1e3 * mean.cpu,  # CPU time of the process, of all its threads
    }
    return {
        "parts": parts,
        "exposed": [step.exposed for step in timer.times],
        "images": sum(step.images for step in timer.times),
        "peak": torch.cuda.max_memory_allocated() if process.gpu else 0,
        "digest": digest,
    }


def log_summary(training):
    """All ranks: rank 0 writes what the run did. Raises UserError if the replicas differ."""
    sent = bytes_of_gradients(training.args, training.model.parameters())
    digest = digest_of_weights(training.model.state_dict().values())
    log_times(training.process, training.timer, training.step, digest, sent)


def bytes_of_gradients(args, parameters):
    """Of all gradients while they travel."""
    return (4 if args.grad_compression == "none" else 2) * sum(map(torch.numel, parameters))


def log_times(process, timer, steps_made, digest, gradient_bytes):
    """All ranks: rank 0 writes the run's times. Raises UserError if the digests differ.

    gradient_bytes: what each rank hands to the all-reduces of a step. Also for step_log.py.
    """
    facts = all_gather(facts_of_rank(process, timer, digest))
    ranks = [one["parts"] for one in facts]
    link, wait = link_and_wait([one["exposed"] for one in facts])
    steps = sorted(step.whole for step in timer.times) or [0]
    peak = max(one["peak"] for one in facts)
    identical = len({one["digest"] for one in facts}) == 1
    means = {name: fmean(one[name] for one in ranks) for name in ranks[0] if name != "rank"}
    summary = {
        "steps": steps_made,
        "train_s": timer.train_seconds,
        "measured_steps": len(timer.times),  # the figures below are of these
        "img_per_s": sum(one["images"] for one in facts) / max(sum(steps), 1e-9),
        **means,
        "median_step_ms": 1e3 * median(steps),
        "slowest_of_100_step_ms": 1e3 * steps[int(0.99 * len(steps))],
        "link_ms": 1e3 * link,  # a lower bound
        "wait_ms": 1e3 * wait,
        "ranks": ranks,
        "wire_bytes_per_step": gradient_bytes if process.world_size > 1 else 0,
        "peak_gpu_bytes": peak or None,  # of tensors, on the rank with the most
        "weights_sha256": facts[0]["digest"],
        "replicas_identical": identical,
    }
    log_from_rank_0(process, f"Summary {json.dumps(summary)}")
    words = f"{counted(steps_made, 'step')}"
    if timer.times:
        words += f", {summary['img_per_s']:.1f} img/s; a step of {means['step_ms']:.0f} ms is "
        words += f"{means['data_ms']:.0f} data + {means['compute_ms']:.0f} compute"
    if timer.times and process.world_size > 1:
        words += f" + {means['exposed_ms']:.0f} exposed communication"
    words += f"; at most {peak / 2**30:.2f} GiB of a GPU's memory" if peak else ""
    words += f"; replicas identical: {identical}" if process.world_size > 1 else ""
    log_from_rank_0(process, f"Summary: {words}")
    if not identical:  # all ranks have all digests
        raise UserError("the replicas differ, which must not happen: do not use this checkpoint")


def log_end(process, began):
    """The last line: this rank has succeeded."""
    total = perf_counter() - began
    log(process, f"Cleanup complete. Total wall time: {duration(total)} ({total:.3f}s)")


# ---- Errors and the end: one line for an error, and ranks that end together

# Exit codes. torchrun turns every nonzero code into 1; the demo's launchers return them.
EXIT_FAILED = 1  # a failure outside, a bug, or stopped by a signal without a --checkpoint
EXIT_USER = 2  # bad input, such as a wrong argument: UserError
EXIT_STOPPED = os.EX_TEMPFAIL  # 75: stopped by a signal, and saved to --checkpoint


class UserError(Exception):
    """Something that a user can fix: one line that says what is wrong, where, and what to do."""


class LoneUserError(UserError):
    """One that this rank alone has met. The others lose the connection to it."""


class PeerLost(Exception):
    """The connection to another rank, or torchrun, is lost. Another start may help."""


class NotConnected(PeerLost):
    """The ranks have not reached each other: nothing has begun."""


class Stopped(Exception):
    """A stop signal ends all ranks before the training is over. The text says what is saved."""

    def __init__(self, text, saved):
        self.code = EXIT_STOPPED if saved else EXIT_FAILED
        super().__init__(f"{text} | exit code {self.code}")


def record_end(error):
    """Tells torchrun how this rank ended: its --log-dir keeps the error's class and text.

    One of the classes above, or any other, which is this rank's own.
    """
    with suppress(OSError):  # a full disk
        get_error_handler().record_exception(error)


@contextmanager
def as_user_error(prefix):
    """Turns any error of the block, except full memory, into a UserError: prefix and cause."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "DataLoader worker" in str(error):  # a killed one is told of wherever the process is
            raise
        # torch.save hides the error of a full disk behind its own.
        cause = error if error.__suppress_context__ else error.__context__ or error
        raise UserError(f"{prefix}: {one_line(cause)}") from error


def one_line(error):
    """The most telling line of an error; its type if it has no words."""
    text = str(error)
    for mark in ("Last error:", "WeightsUnpickler error:"):  # of NCCL, and of torch.load
        text = text.rpartition(mark)[2].strip()
    text = re.sub(r":\n\s*", ": ", text, count=1)  # a line that announces the next one
    if isinstance(error, KeyError):
        text = f"no {text}"
    if isinstance(error, OSError) and error.strerror:  # without its number
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if "Traceback" in text:  # an error of a loader worker: the last line has type and text
        text = re.sub(r"^[\w.]+: ", "", text.splitlines()[-1])
    return ([*text.splitlines(), ""][0] or type(error).__name__)[:500]


def classified(error):
    """The error as UserError, Stopped, PeerLost, or as it is if it is this rank's own."""
    text = one_line(error)
    if isinstance(error, LoneUserError):
        return LoneUserError(text)
    if isinstance(error, (UserError, Stopped, PeerLost)):
        return error
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if full or "out of memory" in text or "can't allocate memory" in text:
        return LoneUserError(f"{text}: the memory is full. A smaller --batch_size needs less")
    if "/gloo/" in text or "pair closure" in text or isinstance(error, dist.DistError):
        return PeerLost(f"another rank has ended, or does not answer: {text}")
    return error


def run_and_exit(main, log_wall_time=True):
    """All ranks: run main(process), and end with its exit code. Also for probe_link.py."""
    process, code, began = ProcessInfo(), 0, perf_counter()
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until catch_stop_signals: no traceback
    try:
        main(process)
    except Exception as error:
        error = classified(error)
        if isinstance(error, LoneUserError) or not isinstance(error, (UserError, Stopped)):
            end_process(EXIT_USER if isinstance(error, UserError) else EXIT_FAILED, process, error)
        # All ranks have this error. One line on each node is enough, unless they have not met.
        code = error.code if isinstance(error, Stopped) else EXIT_USER
        if isinstance(error, Stopped) or process.local_rank == 0 or not dist.is_initialized():
            log_error(process, error)
        record_end(error)
    end_workers()  # after an error some may still run
    try:
        leave_process_group()
    except Exception as error:  # with a code the reason is logged already
        end_process(code or EXIT_FAILED, process, None if code else classified(error))
    if code == 0 and log_wall_time:
        log_end(process, began)
    ignore_stop_signals()  # Python takes its handlers away before it ends: one could still kill it
    sys.exit(code)


def log_error(process, error):
    """The line of an error. An unknown one may be a bug: its traceback is logged before it."""
    if isinstance(error, Stopped):
        log(process, str(error))
        return
    known = isinstance(error, (UserError, PeerLost, OSError, EOFError))
    known = known or "DataLoader" in str(error)  # of a worker that is killed, or too slow
    if not known:
        for line in "".join(traceback.format_exception(error)).splitlines():
            log(process, line, STDERR)
    text = one_line(error)
    if "shared memory" in text:
        text += ": enlarge /dev/shm (docker: --shm-size=1g), or use --workers 0"
    log(process, f"ERROR: {'' if known else f'{type(error).__name__}: '}{text}", STDERR)


def end_workers():
    """Loader workers ignore SIGTERM: they could outlive this process, or keep it from ending."""
    # PyTorch's handler of this signal, for dead loader workers, could raise another error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def end_process(code, process, error=None):
    """Ends a process that cannot leave with the others, because it may wait for them for ever."""
    if error:
        log_error(process, error)
        record_end(error)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(main)
