#!/usr/bin/env python3
"""ResNet-18 on COCO with DistributedDataParallel (DDP): one script from a laptop to a cluster.

An image's label is the category of its first annotation (80 classes). Each process trains on its
own share of the images; DDP averages the gradients in the backward pass, so all replicas stay
equal. The six steps that make a training script distributed are marked 1/6 to 6/6.

One process, on a GPU, or on the CPU where there is none (launch_multinode.sh: several nodes):
    torchrun --standalone demo_coco_resnet18.py --coco_image_path DIR --annotation_path FILE
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import namedtuple
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from pycocotools.coco import COCO
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info
from torchvision.transforms import RandomResizedCrop

CLASSES = 80
IGNORED = -100  # label of an image that cannot be decoded: cross entropy's own ignore_index
MAX_DAMAGED = 0.01  # share of the images; more of them end the run
Image.MAX_IMAGE_PIXELS = 2**25  # twice as many are refused: decoded, they would fill the memory
MEAN, STD = 255 * torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
LR_BATCH = 64  # the global batch that --lr is meant for when --lr_scaling is used
WARM_UP = 3  # steps that are left out of averages, and that PowerSGD leaves alone
PROBE_MS = 5000  # a probe starts no other round after that
MINIMA = {"image_size": 33, "workers": 0, "warmup_steps": 0, "seed": 0, "checkpoint_every": 0,
          "probe_steps": 0, "lr": 1e-9, "timeout": 0.1, "bucket_cap_mb": 0.1}  # of the others: 1
# What a checkpoint keeps, and the arguments that a run must share with the one it resumes.
SAME = ["global_batch_size", "image_size", "lr", "warmup_steps", "sync_bn", "seed", "precision",
        "grad_compression", "powersgd_rank"]
MEMORY = ["error_dict", "p_memory_dict", "q_memory_dict"]  # of PowerSGD, from step to step
PROGRESS, STATEFUL = ["epoch", "step", "losses"], ["model", "optimizer", "scaler"]
# errors from outside of the script: the network, other ranks, loader workers, limits
OUTSIDE = "(?i)gloo|nccl|connection|time(d )?out|socket|store|DataLoader worker|open file|space"
# Rank, world size, rank on the node, processes on it. mpirun is first: it may start through srun.
LAUNCHERS = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    "mpirun": [f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "srun": ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]}

class UserError(Exception):
    """What a user can mend: one line that says what is wrong, where, and what to do."""

@contextlib.contextmanager
def explain(what):
    """Makes one UserError, `what` and the cause, of any other error in the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything; torch.save wraps the disk's
        cause = error if error.__suppress_context__ else error.__context__ or error
        text = " ".join(f"{type(cause).__name__}: {cause}".split("\n")[:2])
        raise UserError(f"{what}: {text[:300]}") from None

# --- arguments ---
def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--coco_image_path", required=True, metavar="DIR", help="folder of the training images")
    add("--annotation_path", required=True, metavar="FILE", help="their COCO instances file")
    add("--val_image_path", metavar="DIR", help="folder of the validation images")
    add("--val_annotation_path", metavar="FILE", help="their COCO instances file")
    add("--image_size", type=int, default=224, help="pixels a side")
    add("--workers", type=int, help="decoders per process; unset: its cores, on a CPU 1")
    add("--num_epochs", type=int, default=2, help="passes over the images")
    add("--batch_size", type=int, default=64, help="images per process and micro-batch")
    add("--global_batch_size", type=int, help="images per step of all processes together")
    add("--accumulate_steps", type=int, default=1, help="micro-batches per optimizer step")
    add("--lr", type=float, default=1e-3, help="learning rate of Adam")
    add("--lr_scaling", choices=("none", "linear", "sqrt"), default="none",
        help=f"multiply --lr by (global batch / {LR_BATCH}), or by its root")
    add("--warmup_steps", type=int, default=0, help="steps in which the rate rises to its value")
    add("--weights", default="imagenet", help="imagenet, none, or a state-dict FILE")
    add("--sync_bn", action="store_true", help="batch norm over all processes (CUDA only)")
    add("--seed", type=int, default=0, help="of weights, order and crops")
    add("--max_steps", type=int, help="stop after this many optimizer steps in all")
    add("--precision", choices=("auto", "fp32", "tf32", "fp16", "bf16"), default="auto",
        help="auto: bf16 where the hardware has it, fp16 on older tensor cores, else fp32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--backend", choices=("auto", "nccl", "gloo", "mpi"), default="auto", help="nccl or gloo")
    add("--timeout", type=float, default=300, help="seconds until a silent peer counts as lost")
    add("--bucket_cap_mb", type=float, default=25, help="MiB of gradients in one all-reduce")
    add("--grad_compression", choices=("none", "fp16", "bf16", "powersgd"), default="none",
        help="what gradients are sent as")
    add("--powersgd_rank", type=int, default=8, help="of the matrices that PowerSGD sends")
    add("--probe_steps", type=int, default=5, help="at most, to measure link and step; 0: not")
    add("--log_every", type=int, default=5, help="optimizer steps from log line to log line")
    add("--checkpoint", metavar="FILE", help="saved at each epoch's end and at a stop signal")
    add("--checkpoint_every", type=int, default=0, help="and every N optimizer steps; 0: not")
    add("--resume", action="store_true", help="go on from --checkpoint if that file exists")
    return parser

def parse_arguments(argv):
    """The arguments; ends with one line and exit code 2 where they are wrong."""
    parser = make_parser()
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    args = parser.parse_args([re.sub(r"(?<=^--[a-z])[a-z-]+", lambda m: m[0].replace("-", "_"), a)
                              for a in argv])  # dashes inside a name are taken for underscores
    for name, value in vars(args).items():
        if type(value) in (int, float) and not MINIMA.get(name, 1) <= value < 2**31:
            parser.error(f"--{name} {value} is not at least {MINIMA.get(name, 1)}")
    if (args.val_image_path is None) != (args.val_annotation_path is None):
        parser.error("--val_image_path and --val_annotation_path go together: give both")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    return args

# --- distributed set-up ---
@dataclass
class Job:
    """This process's place among the others, and what it is doing."""
    launcher: str = "python"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    backend: str = ""
    phase: str = "rendezvous"
    stop: str = ""  # why this process asks all ranks to stop
    parent: int = field(default_factory=os.getppid)
    cores: int = 1  # of this process

def read_environment():
    """The Job that the launcher's variables describe; completes MASTER_*. Raises UserError."""
    # DDP 1/6: rank and world size come from the launcher, through the environment
    env = os.environ
    for launcher, names in LAUNCHERS.items():
        # a batch script has SLURM's variables too, but is one process: srun alone makes steps
        if names[0] in env and (launcher != "srun" or "SLURM_STEP_ID" in env):
            break
    else:
        return Job()
    with explain(f"{launcher} should set {', '.join(names)}"):
        job = Job(launcher, *(int(re.match(r"\d+", env[name])[0]) for name in names))
        if launcher == "srun":  # the first node, and a port of its own for each step of each job
            first = re.match(r"([^\[,]+)\[?(\d*)", env["SLURM_STEP_NODELIST"])
            port = int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"])
            env.setdefault("MASTER_ADDR", first[1] + first[2])
            env.setdefault("MASTER_PORT", str(20000 + port % 20000))
    if not 0 <= job.rank < job.world_size:
        raise UserError(f"{names[0]} {job.rank} is not below {names[1]} {job.world_size}")
    if "MASTER_ADDR" not in env:
        raise UserError("MASTER_ADDR is not set: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ...")
    env.setdefault("MASTER_PORT", "29500")
    return job

def set_up(args, job):
    """Chooses the device and the backend, and joins the process group. Raises UserError."""
    # DDP 2/6: first the device, then the process group, with a limit to silent waiting
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    job.backend = args.backend.replace("auto", "nccl" if gpus else "gloo")
    if job.backend == "mpi" and not dist.is_mpi_available():
        raise UserError("--backend mpi: this PyTorch was built without MPI: use nccl or gloo")
    own = job.launcher == "srun" and gpus == 1  # --gpus-per-task shows each task its own GPU
    if job.backend == "nccl" and job.local_world_size > gpus and not own:
        raise UserError(f"--backend nccl: {job.local_world_size} processes for {gpus} GPU(s) on "
                        "this node: start one for each GPU, or use --backend gloo")
    if gpus:
        job.device = torch.device("cuda", job.local_rank % gpus)
        torch.cuda.set_device(job.device)
    elif torch.backends.mps.is_available() and job.world_size == 1:
        job.device = torch.device("mps")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bound = job.launcher in ("srun", "mpirun") and cores < os.cpu_count()  # has cores of its own
    job.cores = cores if bound else max(1, cores // job.local_world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(job.cores)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    with explain(f"rendezvous at {where}: did all nodes start, with the address of rank 0?"):
        dist.init_process_group(
            job.backend, timeout=timedelta(seconds=args.timeout), rank=job.rank,
            world_size=job.world_size, device_id=job.device if job.backend == "nccl" else None,
            store=dist.HashStore() if job.launcher == "python" else None)

def gather(*values):
    """For each value the list of what it is on all ranks, in the order of the ranks."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    return zip(*ranks, strict=True)

@contextlib.contextmanager
def together(job, phase):
    """A block that all ranks run: a UserError of one ends all of them, with one line, no hang."""
    job.phase, error = phase, None
    try:
        yield
    except UserError as failure:
        error = str(failure)
    (errors,) = gather(error)
    if failed := [rank for rank, text in enumerate(errors) if text]:
        which = f" (rank {', '.join(map(str, failed))})" if len(failed) < len(errors) else ""
        raise UserError(errors[failed[0]] + which)

def from_rank0(job, phase, make):
    """Rank 0 reads, every rank receives: what make() returns, or its UserError."""
    with together(job, phase):
        result = [make() if job.rank == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]

# --- log ---
def log(job, text, descriptor=1):
    """Writes one line in one piece: the lines of several ranks do not mix."""
    kind = job.device.type.replace("cuda", "gpu").upper()
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    os.write(descriptor, f"[{kind} {job.rank}] {text}\n".encode(errors="replace"))

def duration(seconds, digits=2):
    """'4h 8m 59.79s' for 14939.79."""
    m, rest = divmod(round(seconds, digits), 60)
    h, m = divmod(int(m), 60)
    return f"{h}h " * (h > 0) + f"{m}m " * (h + m > 0) + f"{rest:.{digits}f}s"

def log_run(run, index, val_index, resumed):
    """Rank 0 writes what runs, on what, with which settings, and on which data."""
    args, job, n = run.args, run.job, sum(p.numel() for p in run.model.parameters())
    name = torch.cuda.get_device_name() if job.device.type == "cuda" else os.uname().machine
    hosts, devices, local = gather(socket.gethostname(), name, job.local_rank)
    about = {
        "demo": "coco_resnet18", "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__,
                     "torchvision": torchvision.__version__, "cuda": torch.version.cuda,
                     "nccl": torch.cuda.nccl.version() if job.backend == "nccl" else None},
        **vars(args), "launcher": job.launcher, "backend": job.backend, "hosts": hosts,
        "devices": devices, "nodes": local.count(0), "world_size": job.world_size, "parameters": n,
        "threads": torch.get_num_threads(), "steps": args.max_steps, "start_step": run.step,
        "batch": {"per_process": args.batch_size, "accumulate_steps": args.accumulate_steps,
                  "global": args.global_batch_size}, "images": len(index.names),
        "images_without_annotations": index.unlabelled, "padding": -len(index.names) % len(hosts),
        "gradient_bytes": 4 * n, "val_images": len(val_index.names) if val_index else 0,
        "env": {k: v for k, v in sorted(os.environ.items()) if re.match("NCCL_|GLOO_|OMP_", k)}}
    if job.rank == 0:
        log(job, "Run " + json.dumps(about))
        log(job, f"Data: {len(index.names)} labelled of {len(index.names) + index.unlabelled} "
            f"images, {about['padding']} of them twice an epoch. {resumed}")

# --- data ---
# Names (n,) bytes and labels (n,) in 0..79 as arrays (118,287 objects would be copied into each
# worker), COCO's ids of these labels, and the number of images without annotations.
Index = namedtuple("Index", "names labels categories unlabelled")

def read_index(path, ids=None):
    """Index of a COCO instances file; ids: categories of the training set. Raises UserError."""
    with explain(f"annotation file {path} is no usable COCO instances file"):
        gc.disable()  # it would walk millions of new objects; prepare enables it without them
        with open(path, "rb") as file, contextlib.redirect_stdout(None):  # pycocotools prints
            coco = COCO()  # it would make millions of floats, of polygons that nothing here reads
            coco.dataset = json.load(file, parse_float={}.get)  # None for each, in half the time
            coco.createIndex()
        ids, images = ids or sorted(coco.cats), coco.dataset["images"]
        # the label is the category of the first annotation in the file, crowds included
        labelled = [(image["file_name"], annotations[0]["category_id"]) for image in images
                    if (annotations := coco.imgToAnns.get(image["id"]))]
        unknown = {a["category_id"] for a in coco.dataset["annotations"]}.difference(ids)
        outside = [n for n, _ in labelled if os.path.isabs(n) or ".." in n.split("/")]
        for wrong, what in ((len(ids) > CLASSES, f"{len(ids)} categories, not {CLASSES}"),
                            (unknown, f"annotations of unknown categories {str(unknown)[:60]}"),
                            (None in {*coco.imgs, *coco.imgToAnns}, "ids that are no integers"),
                            (not labelled, "no image has an annotation, nothing to train on"),
                            (outside, f"file name {outside[:1]} leaves the image folder")):
            if wrong:
                raise ValueError(what)
        names = np.array([os.fsencode(name) for name, _ in labelled])
        labels = np.searchsorted(ids, [category for _, category in labelled])
        return Index(names, labels, ids, len(images) - len(labelled))

def check_images(folder, index):
    """Raises UserError unless all images are there; returns {file: bytes} of some of them."""
    names = [os.fsdecode(name) for name in index.names]
    with explain("images: check the path"):  # NOTE: a look at each would be 118,287 requests
        present = {os.path.join(sub, entry) for sub in set(map(os.path.dirname, names))
                   for entry in os.listdir(os.path.join(folder, sub))}
        if missing := [name for name in names if name not in present]:
            raise UserError(f"{len(missing)} of {len(names)} listed images are not in {folder}, "
                            f"the first is {missing[0]}: check the path")
        return {f"bytes of image {name}": os.path.getsize(f"{folder}/{name}")
                for name in names[::1 + len(names) // 64]}

def decode(path):
    """uint8 (3, height, width), RGB. Raises whatever a decoder raises on a damaged file."""
    with contextlib.suppress(RuntimeError):  # Pillow knows more formats
        return torchvision.io.decode_image(path, "RGB")
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)

class FirstCategory(Dataset):
    """For keys (epoch, position): images uint8 (n, 3, size, size), labels (n,), positions (n,)."""
    def __init__(self, folder, index, size, seed=None):
        self.folder, self.index, self.size, self.seed = folder, index, size, seed

    def crop(self, image, key):
        """(top, left, height, width, flip) of an opened image: key and seed alone set them."""
        if self.seed is None:  # for validation the middle, 7/8 of the shorter side
            side = max(1, min(image.size) * 7 // 8)
            return (image.height - side) // 2, (image.width - side) // 2, side, side, False
        torch.default_generator.manual_seed(hash((self.seed, *key)) % 2**32)
        crop = RandomResizedCrop.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
        return *crop, torch.rand(()).item() < 0.5

    def __getitems__(self, keys):  # a loader asks this for a batch, not for images one by one
        images = torch.zeros(len(keys), self.size, self.size, 3, dtype=torch.uint8)
        images = (images.share_memory_() if get_worker_info() else images).permute(0, 3, 1, 2)
        labels, positions, headers = np.full(len(keys), IGNORED), np.array(keys)[:, 1], {}
        # one kind of work for all of them, then the next: decoding empties a core's caches
        for n, name in enumerate(self.index.names[positions]):
            path = os.path.join(self.folder, os.fsdecode(name))
            with contextlib.suppress(Exception), Image.open(path) as headers[n]:
                pass  # damaged data raises anything, here or below; its label tells
        crops = {n: self.crop(image, keys[n]) for n, image in headers.items()}
        for n, (top, left, height, width, flip) in crops.items():
            with contextlib.suppress(Exception):
                crop = decode(headers[n].filename)[None, :, top:top + height, left:left + width]
                crop = crop.contiguous(memory_format=torch.channels_last)
                image = interpolate(crop, (self.size, self.size), mode="bilinear", antialias=True)
                images[n] = image.flip(3) if flip else image
                labels[n] = self.index.labels[positions[n]]
        return images, labels, positions

class EpochSampler(DistributedSampler):
    """Gives the dataset's keys, and leaves out what a resumed epoch has already seen."""
    skip = 0
    def __iter__(self):
        return ((self.epoch, i) for i in islice(super().__iter__(), self.skip, None))

def quiet(_):
    """In a loader worker: SLURM sends its stop signal to all processes, but the ranks decide."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def make_loaders(args, job, index, val_index):
    """(training loader, validation loader or None) for this rank."""
    options = dict(batch_size=args.batch_size, num_workers=args.workers, worker_init_fn=quiet,
                   pin_memory=job.device.type == "cuda", persistent_workers=args.workers > 0,
                   collate_fn=tuple)  # __getitems__ makes a batch, not its parts
    dataset = FirstCategory(args.coco_image_path, index, args.image_size, args.seed)
    # DDP 3/6: each rank draws its own share, in an order that set_epoch changes every epoch
    sampler = EpochSampler(index.names, job.world_size, job.rank, seed=args.seed)
    loader, val_loader = DataLoader(dataset, sampler=sampler, **options), None
    if val_index:  # without DistributedSampler: its padding would count some images twice
        keys = [(0, i) for i in range(job.rank, len(val_index.names), job.world_size)]
        dataset = FirstCategory(args.val_image_path, val_index, args.image_size)
        val_loader = DataLoader(dataset, sampler=keys, **options)
    return loader, val_loader

def resolve_arguments(args, job, images):
    """Fills in what depends on the machine and on the number of images. Raises UserError."""
    parts = job.world_size * args.accumulate_steps
    size = args.global_batch_size or args.batch_size * parts
    if size % parts:
        raise UserError(f"--global_batch_size {size} is no multiple of {parts} (ranks x batches)")
    args.global_batch_size, args.batch_size = size, size // parts
    args.steps_per_epoch = math.ceil(images / size)
    args.max_steps = min(args.num_epochs * args.steps_per_epoch, args.max_steps or sys.maxsize)
    args.lr *= (size / LR_BATCH) ** {"none": 0, "linear": 1, "sqrt": 0.5}[args.lr_scaling]
    cuda, cpuinfo = job.device.type == "cuda", Path("/proc/cpuinfo")
    if not cuda and (args.sync_bn or args.precision == "tf32"):
        raise UserError("--sync_bn and --precision tf32 need CUDA, an NVIDIA GPU: leave them out")
    args.workers = (job.cores if cuda else 1) if args.workers is None else args.workers
    if args.workers and len(folder := tempfile.gettempdir()) > 75:  # of 107 in a socket's name
        raise UserError(f"TMPDIR {folder} is too long for loader workers: export TMPDIR=/tmp")
    if args.precision == "auto":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else (
            cpuinfo.exists() and re.search(r" (avx512|amx)_bf16\b", cpuinfo.read_text()))
        fp16 = cuda and torch.cuda.get_device_capability(job.device) >= (7, 0)  # tensor cores
        args.precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if args.grad_compression == "powersgd" and args.precision == "fp16":
        raise UserError("PowerSGD would keep an overflow of --precision fp16: use bf16 or fp32")
    for part in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        part.fp32_precision = "tf32" if args.precision == "tf32" else "ieee"

# --- model ---
def load_file(path, what):
    """The dict that torch.save wrote; code in the file is not run. Raises UserError."""
    with explain(f"{what} {path} cannot be read, or holds more than tensors and plain values"):
        state = torch.load(path, map_location="cpu", weights_only=True)
    return state if isinstance(state, dict) else {}

def load_weights(model, source):
    """Copies ImageNet's weights, or those of a file, into the model. Raises UserError."""
    if source == "imagenet":
        url, folder = torchvision.models.ResNet18_Weights.DEFAULT.url, torch.hub.get_dir()
        socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
        with explain(f"no ImageNet weights: fetch {url} where there is internet and put it into "
                     f"{folder}/checkpoints, or use --weights none"):
            state = torch.hub.load_state_dict_from_url(
                url, map_location="cpu", progress=False, check_hash=True, weights_only=True)
    else:
        state = load_file(source, "weights file")
    ours = {k: v for k, v in model.state_dict().items() if k.startswith("fc.")}
    with explain(f"weights file {source} does not fit ResNet-18"):
        model.load_state_dict(ours | {k: v for k, v in state.get("model", state).items()
                                      if k not in ours or len(v) == CLASSES})  # another task's

def build_model(args, job):
    """(model on the device, DDP around it, PowerSGD's state or None), the same on all ranks."""
    torch.manual_seed(args.seed)
    model = torchvision.models.resnet18(num_classes=CLASSES)
    with together(job, "weights"):
        if job.rank == 0 and args.weights != "none":
            load_weights(model, args.weights)
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(job.device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    if job.device.type == "mps":  # a single process, and no backend moves its tensors
        model.no_sync = contextlib.nullcontext
        return model, model, None
    kind, state = args.grad_compression, None
    # DDP 4/6: takes over rank 0's weights, and averages the gradients of all ranks from now on
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True,  # NOTE: over Gloo PowerSGD hangs with two buckets
        bucket_cap_mb=1024 if kind == "powersgd" else args.bucket_cap_mb)
    ddp.broadcast_buffers = False  # else a late rank holds the others up in their forward pass
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, args.powersgd_rank, WARM_UP,
                                            orthogonalization_epsilon=1e-8)
        # in bf16 the hook has half the memory traffic, which is most of what it costs a CPU
        hook, half = powerSGD_hook.powerSGD_hook, args.precision == "bf16"
        ddp.register_comm_hook(state, default_hooks.bf16_compress_wrapper(hook) if half else hook)
    elif kind != "none":
        ddp.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
    return model, ddp, state

# --- interconnect ---
def read_counters(root="/sys/class"):
    """{interface: (kind, stated Gb/s or None, bytes sent, bytes received)} of this node."""
    def number(path):
        with contextlib.suppress(OSError, ValueError, IndexError):  # down, it states no speed
            return max(0, float(path.read_text().split()[0]))
        return 0
    found, kinds = {}, {1: "ethernet", 32: "ipoib", 772: "loopback"}  # linux/if_arp.h
    for net in Path(root).glob("net/*"):
        found[net.name] = (kinds.get(number(net / "type"), "other"), number(net / "speed") / 1e3,
                           *(number(net / f"statistics/{way}_bytes") for way in ("tx", "rx")))
    for port in Path(root).glob("infiniband/*/ports/*"):  # these count words of 4 bytes
        found[f"{port.parts[-3]}:{port.name}"] = ("infiniband", number(port / "rate"), *(
            4 * number(port / f"counters/port_{way}_data") for way in ("xmit", "rcv")))
    return found

def traffic(job, before):
    """What each node's interfaces carried since `before`, the busiest first."""
    mine = [{"name": name, "kind": kind, "speed_Gbps": speed or None,
             "tx_bytes": int(tx - before[name][2]), "rx_bytes": int(rx - before[name][3])}
            for name, (kind, speed, tx, rx) in read_counters().items() if name in before]
    mine.sort(key=lambda interface: -interface["tx_bytes"] - interface["rx_bytes"])
    hosts, nodes, local = gather(socket.gethostname(), mine, job.local_rank)
    return [{"host": host, "interfaces": [i for i in node if i["tx_bytes"] + i["rx_bytes"]]}
            for host, node, rank in zip(hosts, nodes, local, strict=True) if rank == 0]

def moment(device):
    """Now; on a GPU, which works behind the script, when it gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

def measure(run, *works):
    """Milliseconds (rounds, works), means over the ranks; the first round is the warm-up."""
    rounds = []
    while len(rounds) <= run.args.probe_steps and (len(rounds) < 2 or np.sum(rounds) < PROBE_MS):
        times = []
        for work in works:
            dist.barrier()
            start = time.perf_counter()
            work()
            torch.get_device_module(run.job.device).synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        rounds.append(np.mean(next(gather(times)), axis=0))
    return np.array(rounds)

def probe_link(run):
    """Times all-reduces of as many bytes as the gradients have, and finds what carried them."""
    nbytes, n = 4 * sum(p.numel() for p in run.model.parameters()), run.job.world_size
    gradients = torch.zeros(nbytes // 4, device=run.job.device)
    dist.all_reduce(gradients)  # makes the connections
    before = read_counters()
    times = measure(run, lambda: dist.all_reduce(gradients))
    ms, nodes = float(np.median(times[1:])), traffic(run.job, before)
    for interface in [interface for node in nodes for interface in node["interfaces"]]:
        rate = 8e-6 * max(interface["tx_bytes"], interface["rx_bytes"]) / (len(times) * ms)
        speed = interface["speed_Gbps"]
        interface |= {"wire_Gbps": rate, "share": rate / speed if speed else None}
    # as nccl-tests defines them: bytes over time, and what each rank's link then has to carry
    return {"all_reduce_bytes": nbytes, "all_reduce_ms": ms, "algbw_GBps": nbytes / ms / 1e6,
            "busbw_GBps": nbytes / ms / 1e6 * 2 * (n - 1) / n, "nodes": nodes}

def probe(run):
    """What the link delivers and what a step costs, measured without a trace in the run."""
    args, sampler, run.job.phase = run.args, run.loader.sampler, "probe"
    buffers, memory = [b.clone() for b in run.model.buffers()], powersgd_memory(run)
    with torch.random.fork_rng(devices=[]):  # crops draw from it
        keys, n = list(islice(sampler, args.batch_size * args.accumulate_steps)), args.batch_size
        group = [run.loader.dataset.__getitems__(keys[i:i + n]) for i in range(0, len(keys), n)]
    # DDP orders its buckets by its first pass: let no step be that one, or a resumed run differs
    backward(run, group)
    found = probe_link(run) if args.probe_steps and run.job.world_size > 1 else None
    if found:
        if run.powersgd:
            run.powersgd.iter = WARM_UP  # it compresses from now on
        step, alone = np.median(measure(run, lambda: backward(run, group), lambda: backward(
            run, group, sync=False))[1:], axis=0)
        found |= {"step_ms": step, "no_sync_ms": alone, "exposed_ms": max(0, step - alone)}
    for buffer, value in zip(run.model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    powersgd_memory(run, memory)
    run.moments.clear()
    run.optimizer.zero_grad()
    return found

def powersgd_memory(run, memory=None):
    """What PowerSGD remembers, as tensors on the CPU; goes back to `memory` if that is given."""
    state = run.powersgd
    if state and memory:
        state.iter = memory["iter"]
        state.rng.seed(0)  # it draws once, when it starts
        for name in MEMORY:
            setattr(state, name, {k: v.to(run.job.device) for k, v in memory[name].items()})
    return state and {"iter": state.iter} | {
        name: {k: v.to("cpu", copy=True) for k, v in getattr(state, name).items()}
        for name in MEMORY}

# --- training ---
@dataclass
class Run:
    """What the training loop works on, and how far it is."""
    args: argparse.Namespace
    job: Job
    model: torch.nn.Module
    ddp: torch.nn.Module
    powersgd: powerSGD_hook.PowerSGDState | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: DataLoader
    val_loader: DataLoader
    epoch: int = 1
    step: int = 0  # optimizer steps in all
    epoch_loss: list = field(default_factory=lambda: [0.0, 0, 0])  # sum, images in it, damaged
    losses: list = field(default_factory=list)  # {epoch, loss[, top1, top5, images]} of all ranks
    damaged: set = field(default_factory=set)  # names, over all epochs
    times: list = field(default_factory=list)  # (seconds for data, in all, images) by step
    exposed: list = field(default_factory=list)  # seconds that nothing but an all-reduce went on
    moments: list = field(default_factory=list)  # at which backward passes had all gradients
    counters: dict = field(default_factory=dict)  # at the start of the training
    identity: dict = field(default_factory=dict)  # what a run that resumes this one has to share

def forward(run, model, images):
    """Logits float32 (n, 80) of images uint8 (n, 3, size, size), normalized as ImageNet's."""
    device = run.job.device
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.args.precision)
    images, mean, std = (t.to(device, non_blocking=True) for t in (images, MEAN, STD))
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        return model((images - mean) / std).float()

def backward(run, group, sync=True):
    """Gradients of a list of micro-batches: (sum of the labelled images' losses, number)."""
    labelled = sum(int((labels != IGNORED).sum()) for _, labels, _ in group)
    total = torch.zeros((), device=run.job.device)
    for count, (images, labels, _) in enumerate(group, 1):
        # gradients of all but the last micro-batch add up locally: one all-reduce for the step
        with contextlib.nullcontext() if sync and count == len(group) else run.ddp.no_sync():
            labels = torch.from_numpy(labels).to(run.job.device, non_blocking=True)
            loss = cross_entropy(forward(run, run.ddp, images), labels, reduction="sum")
            # DDP 5/6: gradients are all-reduced while earlier layers still compute theirs
            run.scaler.scale(loss / max(1, labelled)).backward()
        total += loss.detach()
    return total, labelled

def optimizer_step(run, group):
    """One update: backward's result, and the moments at which all-reduce was alone and done."""
    warm = min(1, (run.step + 1) / max(1, run.args.warmup_steps))
    run.optimizer.param_groups[0]["lr"] = run.args.lr * warm
    result = (*backward(run, group), run.moments[-1], moment(run.job.device))
    run.moments.clear()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return result

def name_damaged(run, loader, labels, positions):
    """Names the images of a batch that could not be decoded, each once; returns their number."""
    names = [os.fsdecode(loader.dataset.index.names[p]) for p in positions[labels == IGNORED]]
    for name in set(names) - run.damaged:
        log(run.job, f"WARNING: image {name} is damaged: left out")
    run.damaged.update(names)
    return len(names)

def agree(run, recent):
    """All ranks go on, or all end. Returns when to ask again, in steps. Raises UserError."""
    slowest, bad = max((whole for _, whole, _ in run.times[-len(recent):]), default=1), math.inf
    for step, (loss, labelled, start, end) in enumerate(recent, run.step - len(recent) + 1):
        run.epoch_loss[0] += loss.item()
        run.epoch_loss[1] += labelled
        bad = bad if math.isfinite(run.epoch_loss[0]) else min(bad, step)
        run.exposed.append(end - start if type(end) is float else start.elapsed_time(end) / 1e3)
    if os.getppid() != run.job.parent:
        run.job.stop = run.job.stop or "the end of its parent process"
    stops, bads, damaged, slowest = gather(run.job.stop, bad, run.epoch_loss[2], slowest)
    if (bad := min(bads)) < math.inf:
        raise UserError(f"rank {bads.index(bad)}: loss of step {bad} is not finite: lower --lr")
    if sum(damaged) > MAX_DAMAGED * len(run.loader.sampler.dataset):
        raise UserError(f"{sum(damaged)} images are damaged, over {MAX_DAMAGED:.0%}: repair them")
    if reason := next(filter(None, stops), ""):
        save_checkpoint(run, last=True)
        log(run.job, f"Stopped on {reason} | step {run.step} | exit code {os.EX_TEMPFAIL}")
        sys.exit(os.EX_TEMPFAIL)  # 75, by sysexits.h: start it again later
    return max(1, int(1 / max(slowest)))  # about every second: a GPU waits while ranks talk

def train_epoch(run):
    """The rest of an epoch, or the steps that --max_steps leaves of it."""
    args, recent, next_talk, shown = run.args, [], 0, len(run.times)
    run.loader.sampler.set_epoch(run.epoch)
    seen = run.step % args.steps_per_epoch  # steps of this epoch, when it is resumed
    run.loader.sampler.skip = seen * args.accumulate_steps * args.batch_size
    batches, end = iter(run.loader), time.perf_counter()
    while run.step < min(args.max_steps, run.epoch * args.steps_per_epoch):
        run.job.phase = f"the data of step {run.step + 1}"
        start, begin = end, time.perf_counter()
        group = list(islice(batches, args.accumulate_steps))
        run.job.phase, waited = f"step {run.step + 1}", time.perf_counter() - begin
        run.epoch_loss[2] += sum(name_damaged(run, run.loader, *batch[1:]) for batch in group)
        recent.append(optimizer_step(run, group))
        run.step += 1
        line_due = (run.step - 1) % args.log_every == 0 or run.step == args.max_steps
        loss = recent[-1][0].item() / max(1, recent[-1][1]) if line_due else 0  # waits for a GPU
        end = time.perf_counter()
        run.times.append((waited, end - start, sum(len(labels) for _, labels, _ in group)))
        if line_due:
            data, step, images = np.mean(run.times[shown:], axis=0)
            log(run.job, f"Epoch {run.epoch} | Step {run.step} | Loss: {loss:.4f} | "
                f"{images / step:.1f} img/s | data {1e3 * data:.1f} ms | step {1e3 * step:.1f} ms"
                f" | ETA {duration((args.max_steps - run.step) * step, digits=0)}")
            shown = len(run.times)
        save = args.checkpoint_every and run.step % args.checkpoint_every == 0
        if save or run.step >= next_talk:
            next_talk, recent = run.step + agree(run, recent), []
        if save:
            save_checkpoint(run)
            end = time.perf_counter()  # no part of the next step
    agree(run, recent)

@torch.inference_mode()
def validate(run):
    """Top-1 and top-5 in percent over all labelled validation images, each counted once."""
    start, counts = time.perf_counter(), np.zeros(3, int)
    run.model.eval()
    for images, labels, positions in run.val_loader:
        name_damaged(run, run.val_loader, labels, positions)
        hits = forward(run, run.model, images).topk(5).indices.cpu().numpy() == labels[:, None]
        counts += [hits[:, 0].sum(), hits.sum(), (labels != IGNORED).sum()]
    run.model.train()
    *hits, images = sum(next(gather(counts))).tolist()
    top1, top5 = (100 * n / max(1, images) for n in hits)
    # DDP 6/6: rank 0 alone writes what all ranks found (main has the tear-down)
    if run.job.rank == 0:
        log(run.job, f"Epoch {run.epoch} validation | Top-1: {top1:.2f}% | Top-5: {top5:.2f}% | "
            f"{images} images | {time.perf_counter() - start:.2f}s")
    return {"top1": top1, "top5": top5, "images": images}

def train(run):
    """All epochs that are left, with a checkpoint and a validation after each."""
    while run.step < run.args.max_steps or run.step == run.epoch * run.args.steps_per_epoch:
        start, before = time.perf_counter(), len(run.times)
        train_epoch(run)
        seconds, (loss, labelled, damaged) = time.perf_counter() - start, run.epoch_loss
        rate = sum(images for _, _, images in run.times[before:]) / seconds
        log(run.job, f"Epoch {run.epoch} complete | Avg loss: {loss / max(1, labelled):.4f} | "
            f"{rate:.1f} img/s | {seconds:.2f}s" + f" | damaged {damaged}" * (damaged > 0))
        sums, names = gather(run.epoch_loss, run.damaged)
        run.damaged = set().union(*names)
        for buffer in run.model.buffers() if run.job.world_size > 1 else ():
            dist.broadcast(buffer, 0)  # batch-norm statistics differ between ranks: rank 0's count
        save_checkpoint(run, last=run.step == run.args.max_steps)
        loss, labelled, _ = np.sum(sums, axis=0).tolist()
        top = validate(run) if run.val_loader else {}
        run.losses.append({"epoch": run.epoch, "loss": loss / max(1, labelled)} | top)
        run.epoch, run.epoch_loss = run.epoch + 1, [0.0, 0, 0]

def summarize(run, started):
    """The Summary record; finds out whether all replicas are equal, bit for bit."""
    args, digest = run.args, hashlib.sha256()
    for value in run.model.state_dict().values():
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    _, seconds, images = np.sum(run.times or [(0, 0, 0)], axis=0).tolist()
    timed = [(data, step - data - exposed, exposed, step)
             for (data, step, _), exposed in zip(run.times, run.exposed, strict=True)]
    timed = timed[WARM_UP:] or timed or [[0] * 4]  # the first steps are slower
    digests, times, images, damaged = gather(
        digest.hexdigest(), 1e3 * np.mean(timed, axis=0), int(images), run.damaged)
    names, images = ("data_ms", "compute_ms", "exposed_ms", "step_ms"), sum(images)
    ranks = [{"rank": r} | dict(zip(names, t.tolist(), strict=True)) for r, t in enumerate(times)]
    split = dict(zip(names, np.mean(times, axis=0).tolist(), strict=True))
    busy = [rank["data_ms"] + rank["compute_ms"] for rank in ranks]
    usual = sorted(busy)[(len(ranks) - 1) // 2]
    sent_as, steps = args.precision if run.powersgd else args.grad_compression, len(run.times)
    plain = sum(map(torch.numel, run.model.parameters())) * (2 if "16" in sent_as else 4)
    _, before, after = run.powersgd.compression_stats() if run.powersgd else (1, 1, 1)
    wire = plain * after // before if before else plain
    whole = max(0, min(steps, WARM_UP - run.step + steps)) if run.powersgd else 0
    return {"epochs": run.step // args.steps_per_epoch, "steps": run.step, "images": images,
            "wall_s": time.perf_counter() - started, "train_s": seconds, **split, "ranks": ranks,
            "img_per_s": images / max(seconds, 1e-9), "wire_bytes_per_step": wire,
            **{f"{name[:-3]}_share": split[name] / max(split["step_ms"], 1e-9)
               for name in names[:3]}, "loss_by_epoch": [e["loss"] for e in run.losses],
            "val": [e for e in run.losses if "top1" in e], "weights_sha256": digests[0],
            "damaged": len(set().union(*damaged)), "replicas_identical": len(set(digests)) == 1,
            "all_reduced_bytes": whole * plain + (steps - whole) * wire,
            "straggler": busy.index(max(busy)) if max(busy) > 1.2 * usual else None,
            "traffic": traffic(run.job, run.counters)}

# --- checkpoint ---
def save_checkpoint(run, last=False):
    """Rank 0 writes; the old file stays until the new one is whole. Raises UserError if last."""
    path = run.args.checkpoint
    epoch_losses, memories = gather(run.epoch_loss, powersgd_memory(run) if path else None)
    if not all(parameter.isfinite().all() for parameter in run.model.parameters()):
        raise UserError(f"weights not finite after step {run.step}: lower --lr; checkpoint kept")
    with together(run.job, "checkpoint"):
        if path and run.job.rank == 0:
            new, state = f"{path}.new", {"identity": run.identity, "epoch_losses": epoch_losses,
                                         "powersgd": memories}
            state |= {name: getattr(run, name) for name in PROGRESS}
            state |= {name: getattr(run, name).state_dict() for name in STATEFUL}
            try:
                what = f"checkpoint {path} not saved at step {run.step}"
                with explain(what), open(new, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(new, path)
            except UserError as error:
                log(run.job, f"WARNING: {error}; an older one is kept", descriptor=2)
                with contextlib.suppress(OSError):
                    os.unlink(new)
                if last:
                    raise

def load_checkpoint(run):
    """Goes on where the checkpoint was saved; only rank 0 reads the file. Returns what to log."""
    path, job = run.args.checkpoint, run.job
    state = from_rank0(job, "checkpoint",
                       lambda: load_file(path, "checkpoint") if os.path.exists(path) else None)
    if state is None:
        return f"No checkpoint {path} yet: the run starts afresh"
    with together(job, "checkpoint"), explain(f"checkpoint {path} is not one of this demo"):
        for name, value in run.identity.items():
            if (then := state["identity"].get(name)) != value:
                raise UserError(f"checkpoint {path} has {name} {then}, not {value}: use the same")
        for name in STATEFUL:
            getattr(run, name).load_state_dict(state[name])
        for name in PROGRESS:
            setattr(run, name, state[name])
        old, now, memories = state["epoch_losses"], job.world_size, state["powersgd"]
        if run.powersgd:
            if len(old) != now:  # each error is what its rank still owes to the mean of all
                errors = [memory["error_dict"] for memory in memories]
                memories = [memories[0] | {"error_dict": {
                    key: sum(e[key] for e in errors) / len(old) for key in errors[0]}}] * now
            powersgd_memory(run, memories[job.rank])
    run.epoch_loss = old[job.rank] if len(old) == now else (np.sum(old, 0) / now).tolist()
    return f"Resumed from {path} at step {run.step}; processes then {len(old)}, now {now}"

# --- main ---
def prepare(args, job):
    """(Run, training index, validation index or None): everything up to the first step."""
    index = from_rank0(job, "index broadcast", lambda: read_index(args.annotation_path))
    val_index = from_rank0(job, "index broadcast", lambda: args.val_annotation_path and read_index(
        args.val_annotation_path, index.categories))
    gc.enable()
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    mine = {"PyTorch": torch.__version__, "the script's hash": script}
    mine |= {f"--{name}": value for name, value in vars(args).items()
             if not name.endswith("path") and name not in ("workers", "checkpoint")}
    with together(job, "check of the images"):
        mine |= check_images(args.coco_image_path, index)
        if val_index and args.val_image_path:
            check_images(args.val_image_path, val_index)
        if job.rank == 0 and args.checkpoint:
            with explain(f"checkpoint {args.checkpoint}: in use by another run, or not writable"):
                lock = os.open(f"{args.checkpoint}.lock", os.O_CREAT | os.O_WRONLY, 0o666)
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers do not inherit it
    first = from_rank0(job, "comparison of the ranks", lambda: mine)
    with together(job, "comparison of the ranks"):
        for name, value in mine.items():
            if value != first[name]:
                raise UserError(f"{name}: {value} here, {first[name]} on rank 0: start all alike")
        resolve_arguments(args, job, len(index.names))
    model, ddp, powersgd = build_model(args, job)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(job.device.type, enabled=args.precision == "fp16")
    run = Run(args, job, model, ddp, powersgd, optimizer, scaler,
              *make_loaders(args, job, index, val_index))
    moments = run.moments  # NOTE: a hook that knows run would keep its loader workers alive
    next(model.parameters()).register_post_accumulate_grad_hook(  # the first layer is the last
        lambda _: moments.append(moment(job.device)))
    data = hashlib.sha256(index.names.tobytes() + index.labels.tobytes()).hexdigest()[:12]
    run.identity = {f"--{name}": getattr(args, name) for name in SAME} | {"data set": data}
    return run, index, val_index

@record
def main():
    started, args, job, code = time.perf_counter(), parse_arguments(sys.argv[1:]), Job(), 0
    try:
        job = read_environment()
        set_up(args, job)
        run, index, val_index = prepare(args, job)
        log_run(run, index, val_index, load_checkpoint(run) if args.resume else "Not resumed")
        for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # loader workers inherit it
            signal.signal(stop, lambda n, _: setattr(job, "stop", signal.Signals(n).name))
        for loader in filter(None, (run.loader, run.val_loader)):
            iter(loader)  # NOTE: forks its workers: may hang once a backward pass has threads
        found = probe(run) if job.world_size > 1 or run.powersgd else None
        if found and job.rank == 0:
            log(job, "Probe " + json.dumps(found))
        run.counters = read_counters()
        train(run)
        summary = summarize(run, started)
        if job.rank == 0:
            log(job, "Summary " + json.dumps(summary))
            time.sleep(0.3 * ("SLURM_STEP_ID" in os.environ))  # srun mixes lines of over 1 KB
    except UserError as error:
        code = 1
        if job.local_rank == 0 or not dist.is_initialized():  # else all have the same error
            log(job, f"ERROR: {error}", descriptor=2)
    except SystemExit as stop:
        code = stop.code
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch would raise one more in here
        for worker in torch.multiprocessing.active_children():
            worker.kill()  # Python's exit would wait for it: it takes no SIGTERM
        if not isinstance(error, RuntimeError | OSError) or not re.search(OUTSIDE, str(error)):
            raise  # not from a collective or a loader: a bug
        log(job, f"ERROR: in {job.phase}: " + str(error).strip().splitlines()[-1][:300], 2)
        os._exit(1)  # a tear-down could wait for ranks that are gone
    if dist.is_initialized():
        dist.barrier()  # who leaves first has the launcher end the others: let them write
        run = None  # DDP refers to the group, whose threads end with the last reference:
        gc.collect()  # one that lets go of a tensor while Python ends aborts the process
        dist.destroy_process_group()
    if code == 0:
        seconds = time.perf_counter() - started
        log(job, f"Cleanup complete. Total wall time: {duration(seconds)} ({seconds:.3f}s)")
    sys.exit(code)

if __name__ == "__main__":
    main()
