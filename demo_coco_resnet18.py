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
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
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
from time import perf_counter, process_time

if sys.platform == "win32":
    raise SystemExit("demo_coco_resnet18.py needs Linux or macOS: on Windows start it inside WSL2")

import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from pycocotools.coco import COCO
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2.functional import resize

# What to change first. Each is the default of the option with its name; --help lists all options.
NUM_EPOCHS = 2  # passes over the images
BATCH_SIZE = 64  # images of one process in one forward pass (a micro-batch)
LR = 1e-3  # learning rate of Adam
IMAGE_SIZE = 224  # pixels a side
SEED = 0  # decides the first weights, the order of the images and the crops
TIMEOUT = 300  # seconds without an answer after which a process counts as lost
LOG_EVERY = 5  # steps from one log line to the next


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
    # All ranks end here if one lacks an image, or was started with other arguments than rank 0.
    image_sizes = check_start(args, process, train_set, val_set)
    checkpoint = read_checkpoint(args, process)  # None if the run starts from the beginning
    # The number of steps, the precision, and what else depends on the hardware and the images.
    fill_in_arguments(args, process, len(train_set.names), checkpoint)
    train_loader = make_train_loader(args, process, train_set)  # 3/6
    val_loader = make_val_loader(args, process, val_set)

    model = build_model(args, process, train_set, load=checkpoint is None)
    ddp, powersgd = wrap_model(args, process, model)  # 4/6
    # ddp holds the model, so both have the same weights. The optimizer can take them from either.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    training = Training(args, process, train_set, image_sizes, model, ddp, optimizer, powersgd)
    if checkpoint:  # every rank has the same one, so the replicas stay equal
        load_checkpoint(training, checkpoint)
    catch_stop_signals(training)  # from now on such a signal saves, and ends all ranks
    start_workers(train_loader, val_loader)  # the processes that load images
    rebuild_buckets(training)  # a pass over blank images: this fixes DDP's bucket order
    log_run(training, val_set)

    for epoch in epochs_left(training):  # 1, 2, ..., unless the run was resumed
        train_one_epoch(training, train_loader, epoch)  # 5/6
        # Like all calls in main, each rank makes this one, though only rank 0 writes.
        save_checkpoint(training, is_last=training.step == args.max_steps)
        if val_loader is not None:
            evaluate(training, val_loader, epoch)  # 6/6
    # The proof that the replicas are still equal: the run fails if they are not.
    log_summary(training, digests_of_replicas(model))
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
    restarts: int = 0  # by torchrun --max-restarts
    run: str = ""  # torchrun's folder for this run, the same one in all its restarts
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
        """channels_last makes convolutions faster."""
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
    image_sizes: str  # a digest of the sizes of some training images
    model: torch.nn.Module
    ddp: torch.nn.Module  # the model in DDP: the same weights, in the same memory
    optimizer: torch.optim.Optimizer
    powersgd: powerSGD_hook.PowerSGDState | None  # with --grad_compression powersgd
    step: int = 0  # optimizer steps so far
    agree_at_step: int = 0  # the step after which the ranks next agree to go on
    interval: int = 1  # steps from the last agreement to the next
    due_line: "DueLine | None" = None  # a log line that is not written yet
    loss_sum: torch.Tensor | float = 0.0  # in this epoch, over this rank's images

    def __post_init__(self):
        self.damage, self.val_damage = Damage(), Damage()
        self.owns_checkpoint = False  # until this run has loaded or saved it
        self.timer = StepTimer(self.process.device, self.model)
        self.profiler = start_profiler(self.args, self.process) if self.args.profile else None
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
    read_restarts(process)
    set_meeting_point(process)  # MASTER_ADDR and MASTER_PORT, if the given ones are unusable


def join_process_group(args, process):
    """All ranks: chooses the device, and joins the group. Raises UserError or StartError.

    The process group: the processes that make collective calls together, here all of them.
    """
    # The backend moves tensors between the processes: NVIDIA's library NCCL between GPUs, one for
    # each process; Gloo between CPUs, or between processes that share a GPU.
    process.backend = choose_backend(args, process)
    # DDP 2/6: each process takes a GPU of its own, by its local rank. Otherwise all would take
    # GPU 0: NCCL refuses that, and the other GPUs would be idle.
    if args.device in ("auto", "cuda") and torch.cuda.is_available():
        # (%: a process that sees one GPU alone finds it as GPU 0.)
        process.device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(process.device)
    prepare_hardware(args, process)  # settings of PyTorch; a Mac's GPU
    # All processes meet at MASTER_ADDR:MASTER_PORT, which torchrun has set, and exchange addresses
    # through a store. If a process has not come after --timeout seconds, the others end with a
    # StartError, exit code 1. (Before that torchrun has waited for the other nodes. If a node does
    # not come, torchrun fails after 15 minutes, and this script never starts.)
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
    dataset = CocoFirstCategory(args, process, args.coco_image_path, train_set, random_crop)
    # DDP 3/6: the sampler gives each rank its own share of the images. Every rank shuffles the
    # full list identically, by seed and epoch. Of N ranks, rank r takes number r, r + N, ...
    # Each step has a collective call (5/6), so all ranks must make the same number of steps, and
    # all shares have the same length: of 10 images each of 4 ranks gets 3, with two repeated as
    # padding. EpochSampler is PyTorch's DistributedSampler with two additions. It yields (epoch,
    # index), so that the dataset crops an image differently in each epoch. And a share can begin
    # later, in a run that resumes, or end earlier, as in make_val_loader.
    sampler = EpochSampler(dataset, process.world_size, process.rank, seed=args.seed)
    return make_loader(args, process, dataset, sampler, args.workers)


def make_val_loader(args, process, val_set):
    """The batches of this rank's share of the validation images, or None."""
    if not val_set:
        return None
    dataset = CocoFirstCategory(args, process, args.val_image_path, val_set, center_crop)
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
    such keys and with `labels`, and functions in place of read_image_list and check_images.
    """

    def __init__(self, args, process, folder, image_set, crop):
        self.size, self.seed, self.process = args.image_size, args.seed, process
        self.folder, self.names, self.labels = folder, image_set.names, image_set.labels
        self.packed = PackedImages(folder, self.names) if os.path.isfile(folder) else None
        self.crop = crop  # a function of an image, (3, height, width), and the size

    def __len__(self):
        return len(self.names)

    def __getitem__(self, key):
        """An image, uint8 (size, size, 3), its label, and whether its file is damaged."""
        epoch, index = key
        if self.packed:
            image, damaged = self.packed.read(index), False
        else:
            image, damaged = self.load_image(os.path.join(self.folder, self.names[index]))
        # Python's hash of integers is the same in every process. torch.manual_seed would do as
        # well, but it also seeds the GPUs, which would make a crop a third slower.
        torch.default_generator.manual_seed(hash((self.seed, epoch, index)) % 2**32)
        rows = self.crop(image.permute(2, 0, 1), self.size).permute(1, 2, 0)
        return rows, self.labels[index], damaged

    def load_image(self, path):
        """uint8 (height, width, 3), RGB; and whether it is a black one, for a damaged image."""
        content = Path(path).read_bytes()  # its OSError ends the run: the storage may be gone
        try:
            return decode(content), False
        except Exception as error:  # damaged images raise errors of any type
            reason = one_line(error).partition(" <_io")[0]
            text = f"image {path} is damaged, a black one takes its place"
            log(self.process, f"WARNING: {text}: {reason}")
            return torch.zeros(self.size, self.size, 3, dtype=torch.uint8), True


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
    # For another model change this line, load_weights and download_weights, and StepTimer if its
    # first parameter is not the last one that gets a gradient. With dropout each rank also needs
    # a seed of its own after 4/6: with equal seeds, all ranks would drop the same units.
    model = torchvision.models.resnet18(num_classes=len(train_set.categories))
    with errors_end_all_ranks():
        if process.rank == 0 and load and args.weights != "none":
            load_weights(process, model, args.weights, train_set)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.compile:
        model.compile()
    return model.to(process.device, memory_format=process.memory_format)


def wrap_model(args, process, model):
    """All ranks: the model in DDP, and the state of --grad_compression powersgd or None."""
    if process.device.type not in DEVICES_WITH_DDP:
        model.no_sync = nullcontext  # the only name of DDP's that is called below
        return model, None
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
    return ddp, compress_gradients(args, ddp)


# With N processes a step covers N times as many images, so an epoch has 1/N as many steps:
#     images per step (global batch size) = world size x batch size x accumulate steps
# A step of N processes does what one process would do with all these images, but also sends
# gradients, and waits for the slowest process. Three things differ: batch norm sees the images of
# its own process only, an epoch may end with repeated images (3/6), and floating-point sums may
# differ in the last bits. The learning rate does not depend on N unless you ask for --lr_scaling.
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
            timer.mark("waiting for data")
            images, labels, damaged = next(batches)
            timer.mark("data arrived")
            training.damage.add(damaged)
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
        log_save_or_stop(training, epoch, loss_of_step, images_in_step)  # what is due
    share_statistics(training)
    agree_to_continue(training, timer.last_step_seconds())  # all go on, or on a signal all end
    log_epoch(training, epoch, steps_done + 1, images_seen, began)


# One step of two ranks in time; rank 1 computes more slowly. The all-reduce of a bucket (5/6)
# begins when both ranks have its gradients:
#     rank 0   data | forward | backward | ......... exposed ......... | optimizer
#     rank 1   data |   forward   |       backward      | .. exposed . | optimizer
#     network                         [ bucket 1 ]      [  bucket 2  ]
#     marks    1    2                    3 of rank 0    3 of rank 1    4           5
# The timer's marks: 1 "waiting for data", 2 "data arrived", 3 "own gradients" (the timer sets it,
# when backward has reached the first layer), 4 "gradients averaged", 5 "end" (log_save_or_stop).
# The log has the times between them. data: 1 to 2. exposed communication: 3 to 4, in which a rank
# computes nothing, but waits for slower ranks and for the network. What the network does before 3
# is hidden: no rank waits for it, though it takes some of the device from backward. compute: the
# rest, up to 5. Here rank 0 seems to communicate for longer, because of rank 1: the shortest
# exposed time of all ranks is what the network costs.


def on_device(process, batches):
    """The batches, with images and labels on this process's device.

    A GPU copies them in a stream of their own, while another stream computes the step before. The
    computing stream waits for the copy.
    """
    copying = torch.cuda.Stream() if process.gpu else None
    for *batch, damaged in batches:
        with torch.cuda.stream(copying):  # None: no stream
            batch = [part.to(process.device, non_blocking=process.gpu) for part in batch]
        if process.gpu:
            torch.cuda.current_stream().wait_stream(copying)
            for part in batch:
                part.record_stream(torch.cuda.current_stream())  # its memory is in use there
        yield *batch, damaged


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
    for images, labels, damaged in batches_until_stop(training, loader):
        training.val_damage.add(damaged)
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


def save_checkpoint(training, is_last):
    """All ranks: check that the weights are finite. Rank 0 writes the checkpoint, if asked for.

    is_last: whether the run ends now. Only then is a failed write fatal. Raises UserError.
    """
    args, process = training.args, training.process
    with errors_end_all_ranks():
        if not all(parameter.isfinite().all() for parameter in training.model.parameters()):
            text = f"weights not finite after step {training.step}: lower --lr; not saved"
            raise UserError(text)
        if args.checkpoint and process.rank == 0:
            if os.path.exists(args.checkpoint) and not training.owns_checkpoint:
                text = f"another run has written {args.checkpoint} since this one began"
                raise UserError(f"{text}: give another FILE")
            try:
                write_checkpoint(training, args.checkpoint)
                training.owns_checkpoint = True
            except UserError as error:
                if is_last:
                    raise
                log(process, f"WARNING: {error}: the run goes on")


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
    collective call, and fail with an error about a lost connection. (That is what happens after
    any other exception: it skips the exchange, and torchrun or the timeout ends the others.)
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
#     what must be the same on all ranks           check_start
#     torchrun, srun or mpirun: the rank           find_launcher
#     the choice of bf16, fp16 or fp32             fast_precision
#     where the ranks meet, what if one is missing set_meeting_point, connecting_ranks
#     an image's label, validation's classes       list_labelled, match_classes
#     a damaged image, a missing one               decode, check_images
#     pretrained weights                           load_weights
#     fewer bytes to send                          compress_gradients
#     what Summary and the log lines measure       StepTimer
#     a stop signal, a lost torchrun               catch_stop_signals, agree_to_continue
#     what a checkpoint holds, who may resume      write_checkpoint, SAME_ON_RESUME
#     the lines and records of the log             log_run, log_step, log_summary
#     which errors are one line, exit codes        ADVICE, UserError, run_and_exit
#
# Another model: build_model. Another data set: CocoFirstCategory, read_image_list, check_images.
# Another optimizer or scheduler: main, lr_factor in train_one_epoch; if it has a state,
# write_checkpoint and load_checkpoint; for its options SAME_ON_RESUME.

# ---- Arguments: their defaults and limits, and what follows from them

DUMMY_STEPS = 100  # with --dummy
LR_BATCH = 64  # the global batch size for which --lr is meant, with --lr_scaling linear
MOST_WORKERS = 16  # each worker has batches in shared memory
DATA_PATHS = ["coco_image_path", "annotation_path", "val_image_path", "val_annotation_path"]
# These may differ from node to node.
PER_NODE = [*DATA_PATHS, "checkpoint", "profile", "workers"]


def make_parser():
    form = argparse.ArgumentDefaultsHelpFormatter
    text = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(description=text, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--dummy", action="store_true", help="random images, in place of data: nothing is read")
    add("--coco_image_path", help="folder of the training images, or their packed file")
    add("--annotation_path", help="their COCO instances file")
    add("--val_image_path", help="folder of the validation images, or their packed file")
    add("--val_annotation_path", help="their COCO instances file")
    add("--image_size", type=at_least(int, 33), default=IMAGE_SIZE, help="pixels a side")
    text = f"loader processes per rank; unset: 1 on a CPU, else by cores, at most {MOST_WORKERS}"
    add("--workers", type=NATURAL, help=text)
    add = parser.add_argument_group("training").add_argument
    text = f"passes over the images; unset: {NUM_EPOCHS}, with --dummy {DUMMY_STEPS} steps"
    add("--num_epochs", type=POSITIVE, help=text)
    add("--batch_size", type=POSITIVE, default=BATCH_SIZE, help="images per rank and micro-batch")
    add("--global_batch_size", type=POSITIVE, help="instead: images per step of all ranks")
    add("--accumulate_steps", type=POSITIVE, default=1, help="micro-batches in a step, per rank")
    add("--lr", type=at_least(float, 1e-9), default=LR, help="learning rate of Adam")
    text = f"linear: --lr times global batch size / {LR_BATCH}, a rule that was found for SGD"
    add("--lr_scaling", choices=["none", "linear"], default="none", help=text)
    add("--warmup_steps", type=NATURAL, default=0, help="steps in which the learning rate rises")
    add("--weights", default="imagenet", help="imagenet, none, or a FILE with a state dict")
    add("--seed", type=NATURAL, default=SEED, help="decides first weights, order, crops")
    add("--max_steps", type=POSITIVE, help="stop after this number of optimizer steps")
    add = parser.add_argument_group("hardware").add_argument
    add("--precision", choices=["auto", *PRECISIONS], default="auto", help="auto: the fastest one")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--sync_bn", action="store_true", help="batch norm over the images of all GPUs")
    devices, text = ["auto", "cpu", "cuda", "mps"], "auto: NVIDIA GPU or CPU; mps: Mac's GPU"
    add("--device", choices=devices, default="auto", help=text)
    add = parser.add_argument_group("communication").add_argument
    backends = ["auto", "nccl", "gloo"]
    add("--backend", choices=backends, default="auto", help="auto: nccl on NVIDIA GPUs, else gloo")
    text = "seconds without an answer after which a process counts as lost"
    add("--timeout", type=at_least(float, 0.1), default=float(TIMEOUT), help=text)
    add("--bucket_cap_mb", type=at_least(float, 0.1), help="MiB in one all-reduce; unset: DDP's")
    hooks = ["none", "fp16", "bf16", "powersgd"]
    add("--grad_compression", choices=hooks, default="none", help="to send less of the gradients")
    add = parser.add_argument_group("output").add_argument
    text = "steps from one log line to the next"
    add("--log_every", type=POSITIVE, default=LOG_EVERY, help=text)
    add("--checkpoint", help="FILE, saved at the end of each epoch and on a stop signal")
    add("--checkpoint_every", type=NATURAL, default=0, help="also every N optimizer steps; 0: not")
    add("--resume", action="store_true", help="continue from --checkpoint if that file exists")
    add("--profile", metavar="FOLDER", help="FOLDER for a trace of each rank, of steps 8 to 10")
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
        record_end("shared", text)
        parser.exit(EXIT_USER, text + "\n")

    parser.error = refuse  # one line, without argparse's usage
    # Dashes inside a name are accepted: --batch-size is --batch_size.
    argv = [re.sub(r"^--[a-z-]+", lambda m: "--" + m[0][2:].replace("-", "_"), a) for a in argv]
    args = parser.parse_args(argv)
    check_data_options(args, refuse)
    for option, given in (("resume", args.resume), ("checkpoint_every", args.checkpoint_every)):
        if given and not args.checkpoint:
            refuse(f"--{option} needs --checkpoint FILE")
    if args.grad_compression == "powersgd" and args.bucket_cap_mb:
        refuse("--grad_compression powersgd needs one bucket, and sets --bucket_cap_mb itself")
    if args.compile and (args.bucket_cap_mb or 1) < 1:
        refuse("--compile needs --bucket_cap_mb 1 or more: PyTorch's first bucket has 1 MB")
    return args


def check_data_options(args, refuse):
    for name in DATA_PATHS:
        if getattr(args, name) == "":  # as "$COCO" is where nobody has set it
            refuse(f"--{name} is empty: give a path")
        if args.dummy and getattr(args, name):
            refuse(f"--dummy reads no data: leave --{name} out")
    if not args.dummy and not (args.coco_image_path and args.annotation_path):
        refuse("give --coco_image_path and --annotation_path, or --dummy")
    if bool(args.val_image_path) != bool(args.val_annotation_path):
        refuse("--val_image_path and --val_annotation_path go together: give both")
    if args.dummy and (args.workers or args.weights not in ("imagenet", "none")):
        refuse("--dummy loads no images and no weights: leave --workers and --weights out")
    if args.dummy:
        args.weights, args.workers = "none", 0
        if not args.num_epochs:  # as many as the steps need, with any number of processes
            args.num_epochs = args.max_steps = args.max_steps or DUMMY_STEPS
    args.num_epochs = args.num_epochs or NUM_EPOCHS


def check_start(args, process, train_set, val_set):
    """All ranks: raises UserError unless all have the same settings, and all images.

    Returns a digest of the sizes of some images, which tells resized images from the originals.
    """
    settings = {f"--{name}": value for name, value in vars(args).items() if name not in PER_NODE}
    for name in ("checkpoint", "profile", "val_image_path"):  # needs collective calls
        settings[f"--{name} given"] = bool(getattr(args, name))
    settings["PyTorch"] = str(torch.__version__)
    check_same(settings)
    if args.dummy:
        return digest()
    count = len(train_set.names) + len(val_set.names if val_set else [])
    log_from_rank_0(process, f"Looking for {counted(count, 'image')}")
    with errors_end_all_ranks():
        sizes, sizes_digest = check_images(args.coco_image_path, train_set.names)
        _, val_digest = check_images(args.val_image_path, val_set.names) if val_set else ([], "")
    if max(map(min, sizes)) < args.image_size:
        text = "the images are smaller than --image_size: prepared for a smaller one?"
        log_from_rank_0(process, f"WARNING: {text}")
    check_same({"sizes of the images": sizes_digest, "those for validation": val_digest})
    return sizes_digest


def check_same(settings):
    """All ranks: raises UserError unless all have the same settings, {name: value}."""
    with errors_end_all_ranks():
        for name, value in from_rank_0(lambda: settings).items():
            if settings.get(name) != value:
                text = f"{name} is {settings.get(name)} here, but {value} on rank 0"
                raise UserError(f"{text}: start all ranks alike")


def fill_in_arguments(args, process, image_count, checkpoint=None):
    """All ranks: sets what depends on the hardware, the number of images and the checkpoint."""
    args.cores = set_threads(process)
    # Collective calls in here depend on arguments. All ranks have the same ones: check_start.
    with errors_end_all_ranks():
        if args.sync_bn and not process.gpu:
            raise UserError("--sync_bn needs NVIDIA GPUs: PyTorch has no other SyncBatchNorm")
        if args.device == "mps" and args.grad_compression != "none":
            raise UserError("--grad_compression needs DDP, which --device mps does not use")
        micro_batches = process.world_size * args.accumulate_steps  # of all ranks in a step
        global_batch = args.global_batch_size or args.batch_size * micro_batches
        if global_batch % micro_batches:
            text = f"--global_batch_size {global_batch} is not a multiple of {micro_batches}"
            raise UserError(f"{text}, the number of micro-batches of all ranks in a step")
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
        workers = args.cores - (2 if args.cores > 4 else 1) if process.gpu else 1
        args.workers = max(1, min(workers, MOST_WORKERS))
    if args.precision == "auto":  # that of the checkpoint, or the fastest one that suits all ranks
        saved = checkpoint and checkpoint["settings"].get("--precision", "fp32")
        fast = None if saved else all_gather(fast_precision(args, process))
        args.precision = saved or min(fast, key=PRECISIONS.index)
    if args.grad_compression == "powersgd":
        args.bucket_cap_mb = 1024  # NOTE: over Gloo PowerSGD hangs with two buckets
        if args.precision == "fp16":  # it would not recover from an overflow
            raise UserError("--grad_compression powersgd needs --precision bf16 or fp32, not fp16")


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
    env = os.environ
    launcher, names = launcher_and_variables(env)
    if launcher == "python":
        env.update(ALONE)
        return launcher
    for name, other_name in zip(TORCHRUN, names, strict=True):
        env[name] = env.get(other_name, "")
    job = None
    if launcher == "srun":
        job = read_job_step(env)
    elif launcher == "mpirun":  # the job's name in Open MPI 5, and in 4
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
    by_mpich = "MPI_LOCALRANKID" in env  # or by Intel MPI; both may use srun
    in_step = "SLURM_STEP_ID" in env and "SLURM_PROCID" in env  # no batch script has both
    if in_step and not by_mpich:
        return "srun", SRUN
    if by_mpich or env.get("PMI_SIZE", "1") != "1":
        text = "started by another launcher (MPICH, Intel MPI?): use torchrun, srun or Open MPI"
        raise UserError(f"{text}, or set {', '.join(TORCHRUN)} for each process")
    return "python", []


def read_job_step(env):
    """The number of SLURM's job step; sets what srun does not set. Raises UserError."""
    try:
        env["LOCAL_WORLD_SIZE"] = str(len(env["SLURM_GTIDS"].split(",")))  # this node's ranks
        if not env.get("MASTER_ADDR"):
            env["MASTER_ADDR"] = first_node(env["SLURM_STEP_NODELIST"])
        return int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"])
    except (LookupError, ValueError) as error:
        text = f"{', '.join(SRUN)} or SLURM_STEP_NODELIST is missing or wrong"
        raise UserError(f"inside a SLURM step, but {text}: start with srun") from error


def first_node(nodes):
    """The first name of SLURM's list of nodes: node01 of node[01-04,07]. Raises UserError."""
    found = re.fullmatch(r"([\w.-]+)(\[(\d+)[\d,-]*\])?(,.*)?", nodes)
    if not found:  # such as rack[1-2]n[1-4]
        text = f"export MASTER_ADDR, with the first node of {nodes} (scontrol show hostnames)"
        raise UserError(text)
    return found[1] + (found[3] or "")


def choose_backend(args, process):
    """nccl or gloo. Raises UserError if this node's hardware is not what the options need."""
    gpus = usable_gpus(args)
    backend = ("nccl" if gpus else "gloo") if args.backend == "auto" else args.backend
    # Some set-ups show each process its own GPU alone.
    own_gpu = process.launcher in ("srun", "mpirun") and gpus == 1
    if backend == "nccl" and process.local_world_size > gpus and not own_gpu:
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
    torch.backends.cudnn.benchmark = True  # tries out which convolutions are the fastest
    # NOTE: by its source (not measured), the new process group of NCCL in PyTorch 2.15 makes
    # backward wait for each all-reduce. 0 selects the former one, in which they overlap.
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")


def set_threads(process):
    """All ranks: the number of CPU cores for this process. PyTorch gets as many threads."""
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
    if gpus and not usable:
        reason = str(caught[0].message) if caught else "without a reason from PyTorch"
        reason = reason.partition(" (Triggered internally")[0].partition(" Please update")[0]
        text = f"PyTorch {torch.__version__} cannot use this node's {counted(gpus, 'GPU')}: "
        text += f"{reason} | Install a build for this driver (UV_TORCH_BACKEND=auto, or a wheel "
        text += "for CUDA 12.x: driver 525 or newer; 13: 580), a newer driver, or --device cpu"
        raise UserError(text)
    if args.device == "cuda" and not gpus:
        text = f"--device cuda: PyTorch {torch.__version__} sees no GPU: see nvidia-smi, "
        text += "CUDA_VISIBLE_DEVICES, and whether its build is for CPUs. Or give --device cpu"
        raise UserError(text)
    return gpus


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
    for _ in range(50):
        for dtype in seconds:
            matrix = torch.ones(256, 256, dtype=dtype)
            began = perf_counter()
            torch.mm(matrix, matrix)
            seconds[dtype].append(perf_counter() - began)
    # The fastest measurements are those that other programs have not disturbed.
    args.bf16_speed_up = min(seconds[torch.float32]) / min(seconds[torch.bfloat16])  # for Run
    return "bf16" if args.bf16_speed_up >= 1.5 else "fp32"


# ---- Meeting: where the processes find each other, and what is said if they do not


def read_restarts(process):
    """How often torchrun --max-restarts has restarted this run, and a name of the run."""
    process.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    # It is RUN/attempt_N/RANK/error.json. Of RUN torchrun says that it is unique.
    process.run = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rsplit("/", 3)[0]


def set_meeting_point(process):
    """Sets MASTER_ADDR and MASTER_PORT where torchrun has not. Raises UserError."""
    if process.one_node:
        # On one node they meet at its own address. torchrun would give its name, which does not
        # resolve on every machine.
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR is not set: export it (mpirun -x), with rank 0's address")
    port = os.environ.setdefault("MASTER_PORT", "29500")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UserError(f"MASTER_PORT is {port!r}: give a free port of rank 0's node, 1 to 65535")
    if process.restarts and process.one_node:
        # NOTE: torchrun --max-restarts keeps its store, with the addresses of the start before.
        # So rank 0 opens another one. (On several nodes torchrun itself must not share its store:
        # --rdzv_backend=c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node.)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        # (At a port far away: other jobs may have the next ones.)
        os.environ["MASTER_PORT"] = str(1024 + (int(port) + 997 * process.restarts) % 64000)


@contextmanager
def connecting_ranks(args, process):
    """A block in which the ranks meet and connect. Raises StartError.

    NOTE: PyTorch's timeout is not enough. Gloo may wait several times as long for an address that
    does not answer, and NCCL waits for ever. So a timer ends the process.
    """
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    meeting = f"rendezvous at {place}: did all nodes start, with rank 0's address and port?"
    interface = f"{process.backend.upper()}_SOCKET_IFNAME"
    connection = f"{process.backend} on the {process.device.type} of {socket.gethostname()}"
    late = f"ERROR: no connection to all ranks in {args.timeout:g} s. "
    if process.backend == "nccl" and process.one_node:
        late += "Does the direct path between the GPUs fail (NCCL_P2P_DISABLE=1 proves it; then "
        late += "see IOMMU and ACS)? Has a rank ended?"
    else:
        late += f"First the {meeting} Then {connection}: do the others use {process.backend}, "
        late += "too? A firewall between the nodes, or the wrong interface "
        late += f"(export {interface}=NAME)? Try tools/preflight.py"
    timer = threading.Timer(args.timeout + 5, end_process, (EXIT_FAILED, process, late))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        cause = one_line(error)
        network = isinstance(error, dist.DistNetworkError)
        if network or "clients joined" in cause or "server socket" in cause:  # the latter: 2.6
            text = f"{meeting} {cause}"
        elif "wait timeout" in cause:  # for another rank's address, in the store where they met
            text = f"another rank does not connect to this one, {connection}: has it ended, or "
            text += f"another backend or device? {cause}"
        else:
            text = f"{connection} cannot connect to the other ranks: {cause}"
            advice = advice_on(cause) if process.backend == "nccl" else []  # Gloo's fits any cause
            if advice:
                text += f": {advice[0]}"
            elif interface in os.environ or not process.one_node:
                now = os.environ.get(interface, "not set")
                text += f" | Is {interface} ({now}) the interface between the nodes? A firewall?"
        raise StartError(text) from error
    finally:
        timer.cancel()


# ---- Annotation files: from COCO's JSON to file names, labels and classes

# The images that have a label: their file names, and their labels, which are indices of
# `categories`, {id: name}. `unlabelled` counts the images without an annotation: left out.
ImageSet = namedtuple("ImageSet", "names labels categories unlabelled")
# With --dummy: as many images and classes as COCO has.
DUMMY_SET = ImageSet(range(117_266), [], {n: f"class {n}" for n in range(80)}, 0)
SEE = "tools/check_coco.py says more"
INSTANCES = "give an instances file, such as instances_train2017.json"
# What training needs of a file, in COCO's own types. tools/prepare_coco.py takes others, too.
FIELDS = {
    "images": {"id": int, "file_name": str},
    "categories": {"id": int, "name": str},
    "annotations": {"id": int, "image_id": int, "category_id": int},
}


def read_image_list(path, train_set=None):
    """ImageSet of a COCO instances file; None without a path. Raises UserError.

    train_set: that of the training images, for validation images: their labels are then those of
    its classes.
    """
    if not path:
        return None
    coco = COCO()
    gc.disable()  # it would search millions of new objects again and again
    try:
        coco.dataset = json.loads(Path(path).read_bytes())
        check_instances(coco.dataset)
        with redirect_stdout(None):  # pycocotools prints
            coco.createIndex()
        image_set = list_labelled(coco)
        return match_classes(image_set, train_set) if train_set else image_set
    except OSError as error:
        raise UserError(f"annotation file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        text = f"annotation file {path} is not JSON, or not complete"
        raise UserError(f"{text} ({SEE})") from error
    except UserError as error:
        raise UserError(f"annotation file {path}: {error} ({SEE})") from error
    finally:
        gc.enable()


def check_instances(content):
    """Raises UserError where training on this content of a file would fail, or be wrong."""
    for name, fields in FIELDS.items():
        entries = content.get(name) if isinstance(content, dict) else None
        if not entries or not isinstance(entries, list):
            raise UserError(f"it has no list of {name}: {INSTANCES}")
        for key, kind in fields.items():
            values = [entry.get(key) if isinstance(entry, dict) else None for entry in entries]
            wrong = sum(type(value) is not kind or value == "" for value in values)
            if wrong:
                text = f"{wrong} of {len(entries)} {name} have no {key} that is "
                text += "text" if kind is str else "a whole number"
                raise UserError(f"{text}: {INSTANCES}" if wrong == len(entries) else text)
            if key == "id" and name != "annotations" and len({*values}) < len(values):
                raise UserError(f"two of its {name} have the same id: each needs one of its own")
    for image in content["images"]:
        name = image["file_name"]
        if os.path.isabs(name) or ".." in name.split("/") or "\\" in name:
            raise UserError(f"{name} is no path in the image folder, with / between its parts")


def list_labelled(coco):
    """ImageSet of what pycocotools has indexed. Raises UserError."""
    categories = {category: coco.cats[category]["name"] for category in sorted(coco.cats)}
    label_of = {category: label for label, category in enumerate(categories)}
    # The label is the category of the first annotation in the file, crowds included.
    first = {image: of_it[0]["category_id"] for image, of_it in coco.imgToAnns.items()}
    images = coco.dataset["images"]
    labelled = [image for image in images if image["id"] in first]
    if not labelled:
        raise UserError("no image has an annotation: no image_id is the id of an image")
    used = [first[image["id"]] for image in labelled]
    unknown = [category for category in used if category not in label_of]
    if unknown:
        text = f"{len(unknown)} of {len(used)} labelled images have a category_id that is no id of"
        raise UserError(f"{text} a category, such as {unknown[0]}")
    names = [image["file_name"] for image in labelled]
    labels = [label_of[category] for category in used]
    return ImageSet(names, labels, categories, len(images) - len(names))


def match_classes(image_set, train_set):
    """The ImageSet with labels of the training classes of the same names. Raises UserError."""
    check_names(train_set, " among the training images")
    check_names(image_set)
    train_names, names = (list(found.categories.values()) for found in (train_set, image_set))
    # Of two training classes of one name, that with images comes last.
    used_last = [*range(len(train_names)), *train_set.labels]
    label_of = {train_names[label]: label for label in used_last}
    lacking = [names[label] for label in image_set.labels if names[label] not in label_of]
    if lacking:
        text = f"it has images of the class {lacking[0]!r}, which the training classes lack"
        raise UserError(f"{text}: give both files the same names")
    labels = [label_of[names[label]] for label in image_set.labels]
    return ImageSet(image_set.names, labels, train_set.categories, image_set.unlabelled)


def check_names(image_set, where=""):
    """Raises UserError if two classes that have images have the same name."""
    names = list(image_set.categories.values())
    used = Counter(names[label] for label in {*image_set.labels})
    twice = [name for name, count in used.items() if count > 1]
    if twice:
        text = f"two categories with images{where} are called {twice[0]!r}"
        raise UserError(f"{text}: rename one, because names tell them apart")


# ---- Images: from a file to a batch

# Mean and standard deviation of ImageNet's red, green and blue, on a scale of 0 to 255.
MEAN = 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
MOST_LOADER_SECONDS = 2_000_000  # 23 days; poll() counts milliseconds in 32 bits


def decode(content):
    """uint8 (height, width, 3), RGB, of a file's bytes: its first frame, as Pillow shows it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow also warns of images that it can decode
        image = Image.open(BytesIO(content))
        if has_more_bits(image):
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
        # NOTE: mmap would end in SIGBUS if the storage fails. This is an OSError.
        pixels = bytearray(os.pread(self.file, 3 * height * width, first))
        if len(pixels) < 3 * height * width:
            raise OSError(f"{self.path} has become shorter")
        return torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3)


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
    return v2.functional.center_crop(resize(image, [size * 8 // 7]), [size, size])


def has_more_bits(image):
    """Whether a pixel has more than 8 bits a colour. convert("RGB") would clip its values."""
    return image.mode[0] in "IF"  # I, I;16, F: grey images of 16 or 32 bits


@dataclass
class Damage:
    """How many images this rank has had, and how many of them were damaged."""

    images: int = 0
    damaged: torch.Tensor | int = 0

    def add(self, damaged):
        """damaged: bool (n,), of a batch. It is in the CPU's memory: no GPU is waited for."""
        self.images += len(damaged)
        self.damaged += damaged.sum()

    def is_too_much(self):
        return self.images >= 100 and self.damaged > self.images / 10


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
            images, labels = self.images[:left], self.labels[:left]
            yield images, labels, torch.zeros(len(images), dtype=torch.bool)  # none is damaged


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


def check_images(folder, names):
    """Some images' sizes, and a digest that tells one data set's images from another's.

    Raises UserError if an image is missing, or those that it looks at are unusable.
    """
    some = slice(None, None, 1 + len(names) // 64)
    if os.path.isfile(folder):
        packed = PackedImages(folder, names)
        return packed.places[some, 1:].tolist(), digest("packed", names, packed.places.tolist())
    if not os.path.isdir(folder):
        raise UserError(f"the folder of images {folder} is not there")
    refuse_missing(f"folder of images {folder}", names, missing_images(folder, names))
    sizes, clipped, one_is_whole = [], [], False
    for name in names[some]:
        path = Path(folder, name)
        with as_user_error(f"image {path} cannot be read"):
            content = path.read_bytes()
        with warnings.catch_warnings(), suppress(Exception):  # a damaged image has no size
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(content)) as image:
                sizes.append(image.size)
                clipped += [name] if has_more_bits(image) else []
            one_is_whole = one_is_whole or decode(content) is not None
    if clipped:
        text = f"{clipped[0]} in {folder} has pixels of more than 8 bits, which would be clipped"
        raise UserError(f"{text}: convert such images (tools/prepare_coco.py does)")
    if not one_is_whole:
        text = f"all {len(names[some])} images that were looked at in {folder} are damaged"
        raise UserError(f"{text}, the first is {names[0]}: copy them again")
    return sizes, digest(sizes)


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


# ---- Weights and compression: where a model begins, and how it sends less


def load_weights(process, model, source, train_set):
    """Loads ImageNet's weights or a file's, without a last layer of other classes."""
    log(process, f"Loading weights: --weights {source}")
    with as_user_error(f"--weights {source}: these are not weights of ResNet-18"):
        state = download_weights() if source == "imagenet" else read_file(source)
        if not isinstance(state, dict):
            raise UserError(f"--weights {source}: these are not weights of ResNet-18")
        names = list(train_set.categories.values())
        their_names = list(state.get("categories") or names)  # a checkpoint has more than weights
        state = state.get("model", state)
        if source == "imagenet" or len(state["fc.weight"]) != len(names) or their_names != names:
            text = f"the last layer, of {len(state['fc.weight'])} other classes, is left out"
            log(process, f"--weights {source}: {text}: {len(names)} classes here")
            state |= {"fc.weight": model.fc.weight, "fc.bias": model.fc.bias}
        model.load_state_dict(state)


def download_weights():
    """ImageNet weights, downloaded unless an earlier download has left them."""
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    prefix = (
        f"no ImageNet weights: on a machine with internet access download {weights.url} into "
        f"{torch.hub.get_dir()}/checkpoints (TORCH_HOME moves this folder), or use --weights none"
    )
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
    try:
        with as_user_error(prefix):
            return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    finally:
        socket.setdefaulttimeout(before)


def read_file(path):
    """What torch.save has written. Code in the file is not run. Raises UserError."""
    with as_user_error(f"cannot read {path}, which torch.save should have written"):
        return torch.load(path, map_location="cpu", weights_only=True)


POWERSGD_RANK = 8  # a lower one would send less, less exactly


def compress_gradients(args, ddp):
    """Makes DDP send less, as --grad_compression says. Returns PowerSGD's state, or None.

    fp16 and bf16 round each gradient to 2 bytes, for sending only. PowerSGD sends two thin
    matrices instead of each large one, and adds the error to the gradients of the next step. This
    error-feedback buffer is not saved, so a run that resumes differs a little.
    """
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if args.grad_compression in hooks:
        ddp.register_comm_hook(None, hooks[args.grad_compression])
    if args.grad_compression != "powersgd":
        return None
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
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


def bytes_per_step(training):
    """Bytes that each rank hands to the all-reduces of a step, after compression."""
    args, powersgd = training.args, training.powersgd
    sent_as = args.precision if powersgd else args.grad_compression
    size = sum(map(torch.numel, training.model.parameters())) * (2 if "16" in sent_as else 4)
    _, before, after = powersgd.compression_stats() if powersgd else (1, 1, 1)
    return size * after // before if before else size


# ---- Time: how long each part of a step takes, for the log; and PyTorch's profiler

MOST_GATHERED = 1000  # steps, the last ones, of which ranks compare their exposed communication
UNMEASURED_STEPS = 3  # the first ones are slower. PowerSGD does not begin before they are over
# Three times in seconds, and the number of this rank's images.
StepTime = namedtuple("StepTime", "data exposed whole images cpu", defaults=[0])


class StepTimer:
    """Measures the parts of each step, by the clock of the device.

    data: the wait for images. exposed: the exposed communication, from the moment when this rank
    has all its own gradients until they are averaged. In this time a rank computes nothing: it
    sends and receives, and waits for slower ranks. The rest is called compute. A step includes
    what follows the step before: a log line, an agreement.
    """

    def __init__(self, device, model):
        self.device_type = device.type
        self.moments = {}  # of the present step: a list for each name
        self.unread = []  # (moments, number of images) of steps that a GPU may not have finished
        self.step_times = []
        self.logged = 0  # how many of them have been in a log line
        # Backward ends with the first layer: its gradient is the last one to be ready.
        next(model.parameters()).register_post_accumulate_grad_hook(
            lambda parameter: self.mark("own gradients")
        )

    def mark(self, name):
        """Notes this moment."""
        self.moments.setdefault(name, []).append(self.now())

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
        self.moments = {"cpu": [process_time()]}
        self.mark("begin")

    def end_step(self, image_count):
        self.mark("end")
        self.moments["cpu"].append(process_time())
        self.unread.append((self.moments, image_count))
        # The next step's:
        self.moments = {"begin": self.moments["end"], "cpu": self.moments["cpu"][-1:]}

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
            self.unread[-1][0]["end"][0].synchronize()
        for moments, image_count in self.unread:
            # One wait for each micro-batch. The gradients of the last one complete the sum.
            waits = zip(moments["waiting for data"], moments["data arrived"], strict=True)
            data = sum(self.seconds(begin, end) for begin, end in waits)
            own, averaged = moments["own gradients"][-1], moments["gradients averaged"][0]
            exposed = self.seconds(own, averaged)
            whole = self.seconds(moments["begin"][0], moments["end"][0])
            cpu = moments["cpu"][1] - moments["cpu"][0]
            self.step_times.append(StepTime(data, exposed, whole, image_count, cpu))
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


def start_profiler(args, process):
    """PyTorch's profiler. It does nothing in the first steps, see PROFILED."""
    if not process.gpu:  # Kineto, the profiler's library, would print errors about that
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def write(profiler):
        """All ranks: write their traces, after the same step."""
        path = os.path.join(args.profile, f"rank{process.rank}.json.gz")
        # All wait for the slowest to write: then no later step does.
        with errors_end_all_ranks(), as_user_error(f"--profile {path} cannot be written"):
            profiler.export_chrome_trace(path)
        if process.rank == 0:
            by = "self_device_time_total" if process.gpu else "self_cpu_time_total"
            table = profiler.key_averages().table(by, row_limit=10, max_name_column_width=60)
            for line in table.splitlines():
                log(process, f"Profile | {line}")

    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(**PROFILED, repeat=1), on_trace_ready=write
    )
    profiler.start()
    return profiler


def profile_step(training):
    """All ranks: tells the profiler that a step has ended. After the last one it writes."""
    action = training.profiler.current_action  # of the step that has ended
    training.profiler.step()
    if action != torch.profiler.ProfilerAction.NONE:
        # A profiled step takes longer than others: no average has it.
        training.timer.unread.pop()
        training.timer.start_step()
    if action == torch.profiler.ProfilerAction.RECORD_AND_SAVE:
        training.profiler = None


# ---- Going on, or not: what happens between steps; a stop signal ends all ranks together

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]  # USR1: SLURM's, at a time limit
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup makes a process ignore it
    STOP_SIGNALS.append(signal.SIGHUP)
PARENT_ENDED = 1000  # stands for a signal's number, and is above all of them
MOST_STEPS_WITHOUT_AGREEMENT = 50


def catch_stop_signals(training):
    """A stop signal is only noted, in process.stop. agree_to_continue then stops all ranks."""

    def note(signal_number, _):
        training.process.stop = signal_number

    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, note)


def log_save_or_stop(training, epoch, loss, image_count):
    """All ranks: logs, agrees to go on and saves, each in the steps in which it is due."""
    args, timer = training.args, training.timer
    log_step(training)  # of the step before, if its line is due: a GPU computes this one meanwhile
    timer.end_step(image_count)
    if training.profiler:
        profile_step(training)
    # Steps 1, 6, 11, ... with --log_every 5, and the last one; each rank, of its own images.
    if (training.step - 1) % args.log_every == 0 or training.step == args.max_steps:
        copied = loss.to("cpu", non_blocking=training.process.gpu)
        training.due_line = DueLine(epoch, training.step, copied, timer.now())
    if not training.process.gpu:
        log_step(training)
    save_due = args.checkpoint_every and training.step % args.checkpoint_every == 0
    if save_due or training.step >= training.agree_at_step:
        seconds = timer.last_step_seconds()
        training.agree_at_step = training.step + agree_to_continue(training, seconds)
    if save_due:
        save_checkpoint(training, is_last=False)
        timer.start_step()  # the time to save is not part of a step


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

    seconds: of the last step. Returns after how many steps the ranks agree again: about once a
    second, because here they wait for each other and for their GPUs. The number follows from the
    slowest rank's seconds, so it is the same on all ranks. It doubles at most each time, because
    the next steps may be slower.
    """
    log_step(training)
    process, stop = training.process, training.process.stop
    # A torchrun that is killed leaves its ranks behind, with another parent. A rank that was
    # started by hand, with RANK set, may go on when its shell has ended.
    started_by_hand = process.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ
    watched = process.launcher != "python" and not started_by_hand
    if not stop and watched and os.getppid() != process.parent:
        stop = PARENT_ENDED
    not_finite = not math.isfinite(training.loss_sum)  # as a number: a maximum may leave out NaN
    # A stop signal may come to one rank alone. Here all learn of it, after the same step.
    damaged = training.damage.is_too_much() or training.val_damage.is_too_much()
    facts = torch.tensor([stop, not_finite, damaged, seconds], dtype=torch.float64)
    facts = facts.to(process.exchange_device)
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    stop, not_finite, damaged, slowest = facts.tolist()
    if not_finite:
        raise UserError(f"a loss up to step {training.step} is not finite: lower --lr")
    if damaged:
        text = "over 1 in 10 of the images that a rank has read are damaged"
        raise UserError(f"{text}, see the warnings: copy them again")
    if stop:
        save_checkpoint(training, is_last=True)
        raise Stopped(training, int(stop))
    limit = min(2 * training.interval, MOST_STEPS_WITHOUT_AGREEMENT)
    training.interval = max(1, min(limit, int(1 / max(slowest, 1e-9))))
    return training.interval


# ---- Checkpoint: what is saved, and who may resume from it

CHECKPOINT_BYTES = 135e6  # about: 11.2 million weights, and Adam's two averages of each, by 4
# A run can resume only with the same values of these. The number of processes may differ, if
# --global_batch_size keeps a step's images the same.
SAME_ON_RESUME = ["global_batch_size", "image_size", "lr", "warmup_steps", "precision"]
SAME_ON_RESUME += ["grad_compression", "sync_bn", "seed"]


def settings_of(training):
    """{name: value} of what a run must have in common with the run that it resumes."""
    settings = {f"--{name}": getattr(training.args, name) for name in SAME_ON_RESUME}
    settings["--powersgd_rank"] = POWERSGD_RANK  # an option of earlier versions
    settings["number of classes"] = len(training.train_set.categories)
    settings["data set"] = digest(training.train_set.names, training.train_set.labels)
    settings["sizes of the images"] = training.image_sizes
    return settings


def digest(*parts):
    """The first digits of a SHA-256."""
    return hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()[:12]


def check_checkpoint(args, process):
    """All ranks: raises UserError if nothing can be saved, or if an earlier run's file is there.

    torchrun --max-restarts repeats the first command, without --resume. Its ranks then continue
    what this run has written, and nothing else.
    """
    # Those of rank 0's torchrun. On another node it may have started its first ranks.
    process.restarts = max(all_gather(process.restarts))
    runs = {*all_gather(process.run)} - {""} if process.restarts else set()
    args.resume = from_rank_0(lambda: may_resume(args, process, runs)) or args.resume


def may_resume(args, process, runs):
    """Whether this run continues --checkpoint, which may be of `runs`. Raises UserError."""
    path = args.checkpoint
    if not path:
        return False
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"checkpoint {path} is not a regular file: name another one")
    with as_user_error(f"checkpoint {path} cannot be written"):
        tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()
    needed = CHECKPOINT_BYTES * (1 if os.path.exists(path) else 2)  # the new one beside the old
    free = shutil.disk_usage(os.path.dirname(path) or ".").free
    if free < needed:
        text = f"checkpoint {path} needs {needed / 1e6:.0f} MB, but {free / 1e6:.0f} MB are free"
        log(process, f"WARNING: {text}")
    if args.resume or not os.path.exists(path):
        return args.resume
    saved = read_file(path) if runs else None
    if not isinstance(saved, dict) or saved.get("run") not in runs:
        text = "give --resume to continue from it, or another FILE"
        raise UserError(f"checkpoint {path} is there already: {text}")
    return True


def write_checkpoint(training, path):
    """The old file stays until the new one is complete. Raises UserError."""
    state = {
        "settings": settings_of(training),
        "run": training.process.run,
        "categories": list(training.train_set.categories.values()),
        "step": training.step,
        "model": training.model.state_dict(),  # in ddp's, names would begin with "module."
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
    }
    what = f"checkpoint {path} not saved at step {training.step}"
    what += ", an older one is kept" if os.path.exists(path) else ""
    new = f"{path}.{os.getpid()}.new"  # another run may save to the same path
    try:
        with as_user_error(what), open(new, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it replaces the old one
            os.replace(new, path)
    finally:
        with suppress(OSError):
            Path(new).unlink(missing_ok=True)  # an incomplete one, if the disk is full


def read_checkpoint(args, process):
    """All ranks: what --checkpoint has; None if there is nothing to resume. Raises UserError."""
    if not args.resume:
        return None
    path = args.checkpoint
    state = from_rank_0(lambda: read_file(path) if os.path.exists(path) else None)
    keys = {"settings", "step", "model", "optimizer", "scaler"}
    is_own = isinstance(state, dict) and keys <= state.keys()
    if state is not None and not (is_own and isinstance(state["settings"], dict)):
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
    rest is in the file. Exceptions are PowerSGD, GPUs, where cuDNN chooses algorithms by their
    speed (prepare_hardware), and perhaps --compile. A model with dropout would also need the state
    of torch's random generators.
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
        training.owns_checkpoint = True


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


def facts_of_run(training):
    """All ranks: what runs, on what hardware, with which settings. Also for step_log.py."""
    process = training.process
    device = torch.cuda.get_device_name() if process.gpu else os.uname().machine
    if process.device.type == "mps":
        device = f"MPS of {device}"
    nccl = torch.cuda.nccl.version() if process.backend == "nccl" else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl},
        **vars(training.args),
        "launcher": process.launcher,
        "backend": process.backend,
        "hosts": all_gather(socket.gethostname()),
        "devices": all_gather(device),
        "nodes": all_gather(process.local_rank).count(0),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "node_cores": os.cpu_count(),
        "parameters": sum(map(torch.numel, training.model.parameters())),
        "start_step": training.step,
        "env": {k: v for k, v in sorted(os.environ.items()) if k.startswith(LOGGED)},
    }


def log_record(process, name, record, words):
    """Rank 0 writes a record: as JSON for programs, and as words with its values for people."""
    log_from_rank_0(process, f"{name} {json.dumps(record)}")
    log_from_rank_0(process, f"{name}: {words.format(**record)}")


def log_run(training, val_set):
    """All ranks: rank 0 writes the facts of the run, and those of its data."""
    args, process, train_set = training.args, training.process, training.train_set
    record = facts_of_run(training) | {
        "classes": len(train_set.categories),
        "images": len(train_set.names),
        "images_without_annotations": train_set.unlabelled,
        "picture_sizes": training.image_sizes,  # a digest: equal in runs with the same images
        "padding": -len(train_set.names) % process.world_size,
        "val_images": len(val_set.names) if val_set else None,
    }
    words = f"{counted(process.world_size, 'process', 'processes')} on "
    words += f"{counted(record['nodes'], 'node')}, {{backend}}, {{precision}}; "
    words += f"{counted(args.max_steps, 'step')} of {counted(args.global_batch_size, 'image')}; "
    if args.dummy:
        words += "random images (--dummy). "
    else:
        words += "{images} labelled images, {images_without_annotations} without a label, "
        words += "{padding} repeated as padding. "
    if training.step:
        words += "Resumed from {checkpoint} at step {start_step}"
    elif args.resume:
        words += "No checkpoint {checkpoint} yet: the run starts from the beginning"
    else:
        words += "Not resumed"
    log_record(process, "Run", record, words)


# The log line of a step that a GPU may not have finished. `copied`: when the loss is on the CPU.
DueLine = namedtuple("DueLine", "epoch step loss copied")


def log_step(training):
    """Logs the due line: the loss of this rank's images; img/s and times since the last line."""
    line, training.due_line = training.due_line, None
    if line is None:
        return
    if training.process.gpu:
        line.copied.synchronize()
    args, mean = training.args, mean_time(training.timer.since_last_line())
    text = f"Epoch {line.epoch} | Step {line.step} | Loss: {line.loss.item():.4f} | "
    if not mean.images:  # all steps since the last line were profiled
        log(training.process, f"{text}profiled")
        return
    left = duration((args.max_steps - line.step) * mean.whole, 0)
    text += f"{mean.images / mean.whole:.1f} img/s | data {1e3 * mean.data:.1f} ms | "
    log(training.process, f"{text}step {1e3 * mean.whole:.1f} ms | ETA {left}")


def log_epoch(training, epoch, first_step, images_seen, began):
    """This rank's part of an epoch; in a resumed run of its steps from `first_step` on."""
    seconds = perf_counter() - began
    if images_seen:  # none if the run was resumed at the end of the epoch
        steps = training.args.steps_per_epoch
        done = training.step - (epoch - 1) * steps
        state = "complete" if done == steps else f"ends at step {done} of {steps}"
        state += f" from step {first_step}" if first_step > 1 else ""
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
    measured = times[UNMEASURED_STEPS:] or times
    mean = mean_time(measured)
    parts = {
        "data_ms": 1e3 * mean.data,
        "compute_ms": 1e3 * (mean.whole - mean.data - mean.exposed),
        "exposed_ms": 1e3 * mean.exposed,
        "step_ms": 1e3 * mean.whole,
        "cpu_ms": 1e3 * mean.cpu,  # CPU time of the process, of all its threads
    }
    ranks = all_gather({"rank": process.rank, **parts})
    link, wait = link_and_wait(all_gather([time.exposed for time in measured[-MOST_GATHERED:]]))
    images = sum(all_gather(sum(time.images for time in measured)))
    seconds = sum(time.whole for time in measured)
    damaged = sum(all_gather(int(training.damage.damaged + training.val_damage.damaged)))
    peak = max(all_gather(torch.cuda.max_memory_allocated() if process.gpu else 0))
    summary = {
        "epochs": training.step // training.args.steps_per_epoch,
        "steps": training.step,
        "train_s": sum(time.whole for time in times),
        "measured_steps": len(measured),  # the figures below are of these
        "img_per_s": images / max(seconds, 1e-9),
        **{name: fmean(rank[name] for rank in ranks) for name in parts},
        # NOTE: PowerSGD computes and communicates in one call: no moment is between the two.
        "link_ms": None if training.powersgd else 1e3 * link,  # a lower bound
        "wait_ms": None if training.powersgd else 1e3 * wait,
        "ranks": ranks,
        "wire_bytes_per_step": bytes_per_step(training),
        "peak_gpu_bytes": peak or None,  # of tensors, on the rank with the most
        "weights_sha256": digests[0],
        "replicas_identical": len(set(digests)) == 1,
        "damaged_images": damaged,  # each as often as it was read, by training and validation
    }
    exposed = "compression and communication" if training.powersgd else "exposed communication"
    words = f"{counted(summary['epochs'], 'epoch')}, {counted(training.step, 'step')}, "
    words += "{img_per_s:.1f} img/s; a step of {step_ms:.0f} ms is {data_ms:.0f} data + "
    words += f"{{compute_ms:.0f}} compute + {{exposed_ms:.0f}} {exposed}; "
    words += f"at most {peak / 2**30:.2f} GiB of a GPU's memory; " if peak else ""
    words += "{damaged_images} of the images were damaged; " if damaged else ""
    words += "replicas identical: {replicas_identical}"
    log_record(process, "Summary", summary, words)
    if not summary["replicas_identical"]:  # all ranks have all digests
        raise UserError("the replicas differ, which must not happen: do not use this checkpoint")


def log_end(process, began):
    """The last line: this rank has succeeded."""
    total = perf_counter() - began
    log(process, f"Cleanup complete. Total wall time: {duration(total)} ({total:.3f}s)")


# ---- Errors and the end: one line for an error, and ranks that end together

# Exit codes. torchrun turns every nonzero code into 1; the demo's launchers return them.
EXIT_FAILED = 1  # a failure outside, a bug, or an error on a single rank, such as out of memory
EXIT_USER = 2  # bad input, such as a wrong argument: UserError, with which all ranks end
EXIT_STOPPED = os.EX_TEMPFAIL  # 75: stopped by a signal, and saved to --checkpoint if given
OTHER_RANK = "another rank has ended, or does not answer"
# Puzzling errors of PyTorch and NCCL: a part of the text, and what to do.
ADVICE = [
    ("out of memory", "use a smaller --batch_size"),
    ("shared memory", "enlarge /dev/shm (docker: --shm-size=1g), or use --workers 0"),
    ("unable to find an engine", "is the GPU's memory full? Use a smaller --batch_size"),
    ("no kernel image", "this PyTorch has no code for this GPU: install a build that has"),
    ("DataLoader worker (pid", "something outside has ended it: is the memory full?"),
    ("DataLoader timed out", "does the storage of the images still answer?"),
    ("Duplicate GPU", "two ranks have the same GPU: start one process for each GPU"),
    ("invalid device ordinal", "NCCL needs to see all GPUs of a node: is it --gpus-per-task?"),
    ("Too many open files", "raise the limit (ulimit -n), or use --workers 0"),
    ("getpwuid", "the user has no name on this machine: export USER, with any name"),
    ("BF16 all reduce", "this PyTorch has no CUDA: give fp16, or powersgd with --precision fp32"),
    ("C++ compiler found", "install g++ (or set CXX), or leave --compile out"),
    ("find C compiler", "install gcc (or set CC), or leave --compile out"),  # Triton, on GPUs
    ("unhandled system error", "NCCL_DEBUG=INFO says more"),
    ("/gloo/", OTHER_RANK),
    ("pair closure", OTHER_RANK),
]


class UserError(Exception):
    """Something that a user can fix: one line that says what is wrong, where, and what to do."""


class StartError(Exception):
    """The ranks do not meet or connect. Another start may help."""


class Stopped(Exception):
    """All ranks end before the training does. The checkpoint, if one is asked for, is saved."""

    def __init__(self, training, stop):
        # Nodes whose launcher can start again should do so after the end of a torchrun.
        by_parent = stop == PARENT_ENDED
        self.code = EXIT_FAILED if by_parent else EXIT_STOPPED
        cause = "the end of its parent process" if by_parent else signal.Signals(stop).name
        text = f"Stopped on {cause} | step {training.step} | exit code {self.code}"
        text += "" if training.args.checkpoint else " | not saved: no --checkpoint"
        super().__init__(text)


def record_end(word, text):
    """Tells torchrun, whose --log-dir keeps it, how this rank ended.

    word: own (this rank's error), shared (all ranks'), peer (a lost connection), stopped.
    """
    with suppress(OSError):  # a full disk
        get_error_handler().record_exception(RuntimeError(f"{word}: {text}"))


@contextmanager
def as_user_error(prefix):
    """Turns any error of the block, except full memory, into a UserError: prefix and cause."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
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
    """All ranks: run main(process), and end with its exit code. Also for probe_link.py."""
    process, code, began = ProcessInfo(), 0, perf_counter()
    try:
        try:
            main(process)
        except Stopped as stop:
            code = stop.code
            word = "stopped" if code == EXIT_STOPPED else "peer"
            record_end(word, f"{process.name} {stop}")
            log(process, str(stop))
        except StartError as error:
            end_process(EXIT_FAILED, process, f"ERROR: {error}")
        except UserError as error:
            code = EXIT_USER
            record_end("shared", f"{process.name} ERROR: {error}")
            # Connected ranks share their errors: one line on each node is enough.
            if process.local_rank == 0 or not dist.is_initialized():
                log(process, f"ERROR: {error}", STDERR)
        end_workers()  # after an error some may still run
        leave_process_group()
        if code == 0 and log_wall_time:
            log_end(process, began)
    except Exception as error:
        end_workers()
        # With a code the reason is logged already: this is only a connection lost after it.
        text = "" if code else explain(process, error)
        end_process(code or EXIT_FAILED, process, text, "peer" if OTHER_RANK in text else "own")
    ignore_stop_signals()  # Python takes its handlers away before it ends: one could still kill it
    sys.exit(code)


def advice_on(text):
    """What to do about an error with this text: a list of one sentence, or of none."""
    return [what_to_do for part, what_to_do in ADVICE if part in text][:1]


def explain(process, error):
    """The line for an error that the other ranks do not know. A bug's traceback is logged."""
    advice = advice_on(str(error))
    name = ""
    if not advice and not isinstance(error, (OSError, EOFError, dist.DistError)):
        name = f"{type(error).__name__}: "
        for line in traceback.format_exc().splitlines():
            log(process, line, STDERR)
    return f"ERROR: {name}" + ": ".join([one_line(error), *advice])


def end_workers():
    """Loader workers ignore SIGTERM: they could outlive this process, or keep it from ending."""
    # PyTorch's handler of this signal, for dead loader workers, could raise another error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in multiprocessing.active_children():
        worker.kill()


def end_process(code, process=None, text="", word="own"):
    """Ends a process that cannot end by itself, because it may wait for others for ever."""
    if text:
        record_end(word, f"{process.name} {text}")
        log(process, text, STDERR)
    os._exit(code)


if __name__ == "__main__":
    run_and_exit(main)
