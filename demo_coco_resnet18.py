#!/usr/bin/env python3
"""ResNet-18 on COCO with DistributedDataParallel (DDP): one script from a laptop to a cluster.

An image's label is the category of its first annotation (80 classes). Each process trains on its
own share of the images; DDP averages the gradients in the backward pass, so all replicas stay
equal. The six steps that make a training script distributed are marked 1/6 to 6/6.

One GPU (or the CPU where there is none):
    torchrun --standalone --nnodes=1 --nproc_per_node=1 demo_coco_resnet18.py \\
        --coco_image_path DIR --annotation_path FILE --num_epochs 2
Two nodes: this on both, with NODE_RANK 0 and 1 (here WORLD_SIZE counts nodes, not processes):
    torchrun --nnodes="$WORLD_SIZE" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \\
        --rdzv_id=123 --rdzv_backend=static --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" \\
        demo_coco_resnet18.py --coco_image_path DIR --annotation_path FILE
Exit codes: 0 done, 1 error, 2 wrong arguments, 75 stopped by a signal (--resume goes on).
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
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.transforms import v2

CLASSES = 80
IGNORED = -100  # label of an image that cannot be decoded: cross entropy leaves it out
MAX_DAMAGED = 0.01  # share of the images; more of them end the run
MAX_PIXELS = 2**26  # a larger image is refused before it is decoded and fills the memory
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as its weights expect
LR_BATCH = 64  # the global batch that --lr is meant for when --lr_scaling is used
UNTIMED_STEPS = 3  # the first steps of a process are slower: they stay out of the averages
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start it again later
MINIMA = {"image_size": 33, "workers": 0, "warmup_steps": 0, "seed": 0, "checkpoint_every": 0,
          "lr": 1e-9, "timeout": 0.1, "bucket_cap_mb": 0.1}  # of the other numbers: 1
# What a checkpoint keeps, and the arguments that a run must share with the one it resumes.
IDENTITY = ["global_batch_size", "image_size", "lr", "warmup_steps", "sync_bn", "seed",
            "precision"]
PROGRESS, STATEFUL = ["epoch", "step", "epoch_step", "losses"], ["model", "optimizer", "scaler"]
# Errors that come from outside of the script: the network, other ranks, loader workers, limits.
OUTSIDE = "(?i)gloo|nccl|connection|timed ?out|socket|store|DataLoader worker|open files|no space"
# Variables with rank, world size, rank on the node, processes on the node. mpirun stands before
# srun, through which it may itself start processes.
LAUNCHERS = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    "mpirun": [f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "srun": ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]}

class UserError(Exception):
    """What a user can mend: one line that says what is wrong, where, and what to do."""

class Stopped(Exception):
    """All ranks agreed to stop; the text is the reason."""

# --- arguments ---
def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("data").add_argument
    add("--coco_image_path", required=True, metavar="DIR", help="folder of the training images")
    add("--annotation_path", required=True, metavar="FILE", help="their COCO instances file")
    add("--val_image_path", metavar="DIR", help="folder of the validation images")
    add("--val_annotation_path", metavar="FILE", help="their COCO instances file")
    add("--image_size", type=int, default=224, help="pixels a side")
    add("--workers", type=int, help="decoders per process; unset: its cores, on a CPU 1")
    add = parser.add_argument_group("training").add_argument
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
    add = parser.add_argument_group("speed").add_argument
    add("--precision", choices=("auto", "fp32", "tf32", "fp16", "bf16"), default="auto",
        help="auto: bf16 where the hardware has it, fp16 on older tensor cores, else fp32")
    add("--compile", action="store_true", help="torch.compile the model")
    add = parser.add_argument_group("distributed").add_argument
    add("--backend", choices=("auto", "nccl", "gloo", "mpi"), default="auto", help="nccl or gloo")
    add("--timeout", type=float, default=300, help="seconds until a silent peer counts as lost")
    add("--bucket_cap_mb", type=float, default=25, help="MiB of gradients in one all-reduce")
    add = parser.add_argument_group("output").add_argument
    add("--log_every", type=int, default=5, help="optimizer steps from log line to log line")
    add("--checkpoint", metavar="FILE", help="saved at each epoch's end and at a stop signal")
    add("--checkpoint_every", type=int, default=0, help="and every N optimizer steps; 0: not")
    add("--resume", action="store_true", help="go on from --checkpoint if that file exists")
    return parser

def parse_arguments(argv=None):
    """The arguments; ends with one line and exit code 2 where they are wrong."""
    parser = make_parser()
    parser.error = lambda text: parser.exit(2, f"{parser.prog}: error: {text}; see --help\n")
    argv = sys.argv[1:] if argv is None else argv  # dashes inside a name are taken for underscores
    args = parser.parse_args([re.sub(r"(?<=^--[a-z])[a-z-]+", lambda m: m[0].replace("-", "_"), a)
                              for a in argv])
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
    lock: object = None  # on the checkpoint, held by rank 0
    parent: int = field(default_factory=os.getppid)

    @property
    def cores(self):
        """Of this process: srun and mpirun may have bound it to some, else all share them."""
        usable = len(os.sched_getaffinity(0))
        bound = self.launcher in ("srun", "mpirun") and usable < os.cpu_count()
        return usable if bound else max(1, usable // self.local_world_size)

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
    try:
        job = Job(launcher, *(int(re.match(r"\d+", env[name])[0]) for name in names))
        if launcher == "srun":  # the first node, and a port of its own for each step of each job
            first = re.match(r"([^\[,]+)\[?(\d*)", env["SLURM_STEP_NODELIST"])
            port = int(env["SLURM_JOB_ID"]) * 16 + int(env["SLURM_STEP_ID"])
            env.setdefault("MASTER_ADDR", first[1] + first[2])
            env.setdefault("MASTER_PORT", str(20000 + port % 20000))
    except (KeyError, TypeError) as error:
        raise UserError(f"{launcher} should set {', '.join(names)}: check {error}") from None
    if not 0 <= job.rank < job.world_size:
        raise UserError(f"{names[0]} {job.rank} is not below {names[1]} {job.world_size}")
    if "MASTER_ADDR" not in env:
        raise UserError("MASTER_ADDR is not set: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ...")
    env.setdefault("MASTER_PORT", "29500")
    return job

def choose_device(args, job):
    """(device, backend) for this process. Raises UserError where the machine lacks it."""
    if args.backend == "mpi" and not dist.is_mpi_available():
        raise UserError("--backend mpi: this PyTorch was built without MPI: use nccl or gloo")
    if not torch.cuda.is_available():
        if args.backend == "nccl":
            raise UserError("--backend nccl: no NVIDIA GPU found here: use --backend gloo")
        mps = torch.backends.mps.is_available() and job.world_size == 1
        return torch.device("mps" if mps else "cpu"), args.backend.replace("auto", "gloo")
    gpus, backend = torch.cuda.device_count(), args.backend.replace("auto", "nccl")
    own = job.launcher == "srun" and gpus == 1  # --gpus-per-task shows each task its own GPU
    if backend == "nccl" and job.local_world_size > gpus and not own:
        raise UserError(f"{job.local_world_size} processes for {gpus} GPU(s) on this node: start "
                        "one for each GPU, or share with --backend gloo")
    return torch.device("cuda", job.local_rank % gpus), backend

def set_up(args, job):
    """Chooses the device and joins the process group. Raises UserError."""
    # DDP 2/6: first the device, then the process group, with a limit to silent waiting
    job.device, job.backend = choose_device(args, job)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(job.cores)
    try:
        dist.init_process_group(
            job.backend, rank=job.rank, world_size=job.world_size,
            store=dist.HashStore() if job.launcher == "python" else None,
            timeout=timedelta(seconds=args.timeout),
            device_id=job.device if job.backend == "nccl" else None)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(f"rendezvous at {where}: did all nodes start, with the address of rank 0? "
                        f"{first_line(error)}") from None

def gather(value):
    """The value of each rank, in the order of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

@contextlib.contextmanager
def together(job, phase):
    """A block that all ranks run: a UserError of one ends all of them, with one line, no hang."""
    job.phase, error = phase, None
    try:
        yield
    except UserError as failure:
        error = str(failure)
    errors = gather(error)
    failed = [rank for rank, text in enumerate(errors) if text]
    if failed:
        which = f" (rank {', '.join(map(str, failed))})" if len(failed) < len(errors) else ""
        raise UserError(errors[failed[0]] + which)

def from_rank0(job, phase, make):
    """Rank 0 reads, every rank receives: what make() returns, or its UserError."""
    result = [None]
    with together(job, phase):
        if job.rank == 0:
            result = [make()]
    dist.broadcast_object_list(result)
    return result[0]

# --- log ---
def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]

def log(job, text, descriptor=1):
    """Writes one line in one piece: the lines of several ranks do not mix."""
    kind = {"cuda": "GPU"}.get(job.device.type, job.device.type.upper())
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file name can hold anything
    os.write(descriptor, f"[{kind} {job.rank}] {text}\n".encode(errors="replace"))

def duration(seconds, digits=2):
    """'4h 8m 59.79s' for 14939.79."""
    m, rest = divmod(round(seconds, digits), 60)
    h, m = divmod(int(m), 60)
    return f"{h}h " * (h > 0) + f"{m}m " * (h + m > 0) + f"{rest:.{digits}f}s"

def describe_run(run, index, val_index):
    """The Run record: what runs, on what, with which settings."""
    args, job, sizes = run.args, run.job, [p.numel() for p in run.model.parameters()]
    name = torch.cuda.get_device_name() if job.device.type == "cuda" else os.uname().machine
    hosts, devices, local = zip(*gather((socket.gethostname(), name, job.local_rank)), strict=True)
    return {
        "demo": "coco_resnet18", "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__,
                     "torchvision": torchvision.__version__, "cuda": torch.version.cuda,
                     "nccl": torch.cuda.nccl.version() if job.backend == "nccl" else None},
        **vars(args), "launcher": job.launcher, "backend": job.backend, "hosts": hosts,
        "devices": devices, "nodes": local.count(0), "world_size": job.world_size,
        "batch": {"per_process": args.batch_size, "accumulate_steps": args.accumulate_steps,
                  "global": args.global_batch_size},
        "images": len(index.names), "images_without_annotations": index.unlabelled,
        "padding": -len(index.names) % job.world_size,
        "val_images": len(val_index.names) if val_index else 0, "steps": args.max_steps,
        "start_step": run.step, "threads": torch.get_num_threads(), "parameters": sum(sizes),
        "gradient_bytes": 4 * sum(sizes),
        "env": {k: v for k, v in sorted(os.environ.items()) if re.match("NCCL_|GLOO_|OMP_", k)}}

# --- data ---
# Plain arrays, as 118,287 objects would be copied into each worker: names (n,) bytes, labels (n,)
# int64 in 0..79, COCO's ids of these labels, and the number of images without annotations.
Index = namedtuple("Index", "names labels categories unlabelled")

def read_index(path, ids=None):
    """Index of a COCO instances file; ids: categories of the training set. Raises UserError."""
    try:
        gc.disable()  # it would walk millions of new objects again and again
        with contextlib.redirect_stdout(None):  # pycocotools prints its progress
            coco = COCO(path)
        ids, images = ids or sorted(coco.cats), coco.dataset["images"]
        # the label is the category of the first annotation in the file, crowds included
        labelled = [(image["file_name"], annotations[0]["category_id"]) for image in images
                    if (annotations := coco.imgToAnns.get(image["id"]))]
        unknown = {a["category_id"] for a in coco.dataset["annotations"]}.difference(ids)
        outside = [n for n, _ in labelled if os.path.isabs(n) or ".." in n.split("/")]
        for wrong, what in ((len(ids) > CLASSES, f"{len(ids)} categories, not {CLASSES}"),
                            (unknown, f"annotations of unknown categories {str(unknown)[:60]}"),
                            (not labelled, "no image has an annotation, nothing to train on"),
                            (outside, f"file name {outside[:1]} leaves the image folder")):
            if wrong:
                raise ValueError(what)
        names = np.array([os.fsencode(name) for name, _ in labelled])
        labels = np.searchsorted(ids, [category for _, category in labelled])
        return Index(names, labels, ids, len(images) - len(labelled))
    except (OSError, ValueError, AssertionError, AttributeError, LookupError, TypeError,
            RecursionError) as error:
        raise UserError(f"annotation file {path} is no usable COCO instances file: "
                        f"{type(error).__name__}: {first_line(error)}") from None
    finally:
        gc.enable()

def check_images(folder, index):
    """Raises UserError unless all images are there; returns {file: bytes} of some of them."""
    names = [os.fsdecode(name) for name in index.names]
    try:  # NOTE: a listing is one request to a file server, a look at each image would be 118,287
        present = {os.path.join(sub, entry) for sub in set(map(os.path.dirname, names))
                   for entry in os.listdir(os.path.join(folder, sub))}
        if missing := [name for name in names if name not in present]:
            raise UserError(f"image {missing[0]} is listed but not in {folder} ({len(missing)} of "
                            f"{len(names)} are missing): check the path")
        return {f"bytes of image {name}": os.path.getsize(f"{folder}/{name}")
                for name in names[::1 + len(names) // 64]}
    except OSError as error:
        raise UserError(f"images: {error.filename}: {error.strerror}: check the path") from None

def decode(path):
    """uint8 (3, height, width), RGB. Raises whatever a decoder raises on a damaged file."""
    Image.MAX_IMAGE_PIXELS = None  # Pillow would only warn
    with Image.open(path) as image:  # reads the header, decodes nothing yet
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
        try:
            return torchvision.io.decode_image(path, torchvision.io.ImageReadMode.RGB)
        except RuntimeError:  # Pillow knows more formats
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

class FirstCategory(Dataset):
    """(image uint8 (3, size, size), label, position) for the key (epoch, position).

    A seed augments, as a function of (seed, epoch, position) alone: not of worker, rank or resume.
    """

    def __init__(self, folder, index, size, seed=None):
        self.folder, self.index, self.size, self.seed = folder, index, size, seed
        self.transform = v2.Compose(
            [v2.Resize(size * 8 // 7), v2.CenterCrop(size)] if seed is None else
            [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.index.names)

    def __getitem__(self, key):
        epoch, position = key
        torch.default_generator.manual_seed(hash((self.seed or 0, epoch, position)) % 2**32)
        try:
            path = os.path.join(self.folder, os.fsdecode(self.index.names[position]))
            return self.transform(decode(path)), int(self.index.labels[position]), position
        except Exception:  # decoders raise anything on damaged data; the training loop names it
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), IGNORED, position

class EpochSampler(DistributedSampler):
    """Gives the dataset's keys, and leaves out what a resumed epoch has already seen."""

    skip = 0

    def __iter__(self):
        return ((self.epoch, i) for i in islice(super().__iter__(), self.skip, None))

def make_loaders(args, job, index, val_index):
    """(training loader, validation loader or None) for this rank."""
    options = {"batch_size": args.batch_size, "num_workers": args.workers,
               "pin_memory": job.device.type == "cuda", "persistent_workers": args.workers > 0}
    dataset = FirstCategory(args.coco_image_path, index, args.image_size, args.seed)
    # DDP 3/6: each rank draws its own share, in an order that set_epoch changes every epoch
    sampler = EpochSampler(dataset, job.world_size, job.rank, seed=args.seed)
    loader, val_loader = DataLoader(dataset, sampler=sampler, **options), None
    if val_index:  # without DistributedSampler: its padding would count some images twice
        keys = [(0, i) for i in range(job.rank, len(val_index.names), job.world_size)]
        dataset = FirstCategory(args.val_image_path, val_index, args.image_size)
        val_loader = DataLoader(dataset, sampler=keys, **options)
    return loader, val_loader

def resolve_arguments(args, job, images):
    """Fills in what depends on the machine and on the number of images. Raises UserError."""
    parts = job.world_size * args.accumulate_steps
    args.global_batch_size = args.global_batch_size or args.batch_size * parts
    args.batch_size, rest = divmod(args.global_batch_size, parts)
    if rest:
        raise UserError(f"--global_batch_size {args.global_batch_size} is not a multiple of "
                        f"{parts} (processes x accumulate_steps)")
    args.steps_per_epoch = math.ceil(images / args.global_batch_size)
    args.max_steps = min(args.num_epochs * args.steps_per_epoch, args.max_steps or sys.maxsize)
    args.precision = choose_precision(args.precision, job.device)
    if args.workers is None:
        args.workers = job.cores if job.device.type == "cuda" else 1
    scale = args.global_batch_size / LR_BATCH
    args.lr *= {"none": 1, "linear": scale, "sqrt": math.sqrt(scale)}[args.lr_scaling]
    if args.sync_bn and job.device.type != "cuda":
        raise UserError("--sync_bn works on CUDA alone: leave it out here")

# --- model ---
def choose_precision(name, device):
    """What --precision auto means on this device. Raises UserError."""
    cuda, cpuinfo = device.type == "cuda", Path("/proc/cpuinfo")
    if name == "tf32" and not cuda:
        raise UserError("--precision tf32 is a mode of NVIDIA GPUs: use fp32 or bf16 here")
    for part in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        part.fp32_precision = "tf32" if name == "tf32" else "ieee"
    if name != "auto":
        return name
    if cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "fp32"
    return "bf16" if cuda or (cpuinfo.exists() and re.search(
        r" (avx512|amx)_bf16\b", cpuinfo.read_text())) else "fp32"

def load_file(path, what):
    """The dict that torch.save wrote; code in the file is not run. Raises UserError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return state if isinstance(state, dict) else {}
    except Exception as error:  # a damaged file can raise anything
        reason = getattr(error, "strerror", None) or "damaged, or holds more than plain values"
        raise UserError(f"{what} {path} cannot be read: {reason}") from None

def load_weights(model, source):
    """Copies ImageNet's weights, or those of a file, into the model. Raises UserError."""
    if source == "imagenet":
        url, cache = ResNet18_Weights.DEFAULT.url, f"{torch.hub.get_dir()}/checkpoints"
        source = f"{cache}/{os.path.basename(url)}"
        socket.setdefaulttimeout(20)  # a network that swallows packets must not hang the run
        try:
            if not os.path.exists(source):
                os.makedirs(cache, exist_ok=True)
                torch.hub.download_url_to_file(url, source, url[-12:-4], progress=False)
        except (OSError, RuntimeError) as error:
            raise UserError(f"no ImageNet weights ({first_line(error)}): fetch {url} where there "
                            f"is internet, put it into {cache}, or use --weights none") from None
    state = load_file(source, "weights file")
    try:
        ours = {k: v for k, v in model.state_dict().items() if k.startswith("fc.")}
        model.load_state_dict(ours | {
            k: v for k, v in state.get("model", state).items()  # a checkpoint of ours will do
            if k not in ours or len(v) == CLASSES})  # another task's last layer will not
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"weights file {source} does not fit ResNet-18: {reason}") from None

def build_model(args, job):
    """(model on the device, DDP around it), the same on all ranks."""
    torch.manual_seed(args.seed)
    model = resnet18(num_classes=CLASSES)
    with together(job, "weights"):
        if job.rank == 0 and args.weights != "none":
            load_weights(model, args.weights)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(job.device, memory_format=torch.channels_last)
    if args.compile:
        model.compile()
    if job.device.type == "mps":  # a single process, and no backend moves its tensors
        return model, model
    # DDP 4/6: takes over rank 0's weights, and averages the gradients of all ranks from now on
    return model, nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=args.bucket_cap_mb, gradient_as_bucket_view=True)

# --- training ---
@dataclass
class Run:
    """What the training loop works on, and how far it is."""

    args: argparse.Namespace
    job: Job
    model: nn.Module
    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: DataLoader
    val_loader: DataLoader
    epoch: int = 1
    step: int = 0  # optimizer steps in all
    images: int = 0  # of this rank, since the process started
    epoch_step: int = 0  # of these in this epoch
    epoch_loss: list = field(default_factory=lambda: [0.0, 0, 0])  # sum, images in it, damaged
    losses: list = field(default_factory=list)  # {epoch, loss[, top1, top5, images]} of all ranks
    damaged: set = field(default_factory=set)  # names, over all epochs
    times: list = field(default_factory=list)  # (seconds waited for data, in all) by step
    identity: dict = field(default_factory=dict)  # what a run that resumes this one has to share

def forward(run, model, images):
    """Logits float32 (n, 80) of images uint8 (n, 3, size, size), normalized on the device."""
    device = run.job.device
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.args.precision)
    mean, std = (255 * torch.tensor(v, device=device).view(3, 1, 1) for v in (MEAN, STD))
    images = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        return model((images - mean) / std).float()

def optimizer_step(run, group):
    """One update from a list of micro-batches: (sum of the labelled images' losses, number)."""
    labelled = sum(int((labels != IGNORED).sum()) for _, labels, _ in group)
    total = torch.zeros((), device=run.job.device)
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = run.args.lr * min(1, (run.step + 1) / max(1, run.args.warmup_steps))
    for count, (images, labels, _) in enumerate(group, 1):
        # gradients of all but the last micro-batch add up locally: one all-reduce for the step
        with contextlib.nullcontext() if count == len(group) else run.ddp.no_sync():
            logits, labels = forward(run, run.ddp, images), labels.to(run.job.device)
            loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED,
                                               reduction="sum")
            # DDP 5/6: gradients are all-reduced while earlier layers still compute theirs
            run.scaler.scale(loss / max(1, labelled)).backward()
        total += loss.detach()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    return total, labelled

def name_damaged(run, loader, batch):
    """Names the images of a batch that could not be decoded, each once; returns their number."""
    _, labels, positions = batch
    names = [os.fsdecode(loader.dataset.index.names[p]) for p in positions[labels == IGNORED]]
    for name in set(names) - run.damaged:
        log(run.job, f"WARNING: image {name} is damaged: left out")
    run.damaged.update(names)
    return len(names)

def agree(run, recent):
    """All ranks go on, or all raise UserError or Stopped. Returns when to ask again, in steps.

    About once a second, as a GPU waits for it. Moves `recent` step results into the epoch's loss.
    """
    wrong, slowest = "", max((whole for _, whole in run.times[-len(recent):]), default=1)
    for step, (loss, labelled) in enumerate(recent, run.step - len(recent) + 1):
        run.epoch_loss[0] += loss.item()
        run.epoch_loss[1] += labelled
        if not wrong and not math.isfinite(run.epoch_loss[0]):
            wrong = f"rank {run.job.rank}: the loss of step {step} is not finite: lower --lr"
    recent.clear()
    if os.getppid() != run.job.parent:
        run.job.stop = run.job.stop or "the end of its parent process"
    mine = (run.job.stop, wrong, run.epoch_loss[2], slowest)
    stops, wrongs, damaged, slowest = zip(*gather(mine), strict=True)
    if sum(damaged) > MAX_DAMAGED * len(run.loader.dataset):
        wrongs += (f"{sum(damaged)} images are damaged, over {MAX_DAMAGED:.0%}: repair the data",)
    if any(wrongs):
        raise UserError(next(filter(None, wrongs)) + "; the last checkpoint is kept")
    if any(stops):
        save_checkpoint(run, last=True)
        raise Stopped(f"{next(filter(None, stops))} | step {run.step}")
    return max(1, int(1 / max(slowest)))

def train_epoch(run):
    """The rest of an epoch, or the steps that --max_steps leaves of it."""
    args, recent, next_talk = run.args, [], 0
    run.loader.sampler.set_epoch(run.epoch)
    run.loader.sampler.skip = run.epoch_step * args.accumulate_steps * args.batch_size
    batches, line_images, line_step = iter(run.loader), run.images, run.step
    end = line_end = time.perf_counter()
    while run.epoch_step < args.steps_per_epoch and run.step < args.max_steps:
        run.job.phase = f"the data of step {run.step + 1}"
        start, group = end, list(islice(batches, args.accumulate_steps))
        run.job.phase = f"step {run.step + 1}"
        waited = time.perf_counter() - start
        run.epoch_loss[2] += sum(name_damaged(run, run.loader, batch) for batch in group)
        recent.append(optimizer_step(run, group))
        run.step, run.epoch_step = run.step + 1, run.epoch_step + 1
        run.images += sum(len(labels) for _, labels, _ in group)
        line_due = (run.step - 1) % args.log_every == 0 or run.step == args.max_steps
        loss = recent[-1][0].item() / max(1, recent[-1][1]) if line_due else 0  # waits for a GPU
        end = time.perf_counter()
        run.times.append((waited, end - start))
        if line_due:
            steps, seconds = run.step - line_step, end - line_end
            waited = sum(data for data, _ in run.times[-steps:])
            log(run.job, f"Epoch {run.epoch} | Step {run.step} | Loss: {loss:.4f} | "
                f"{(run.images - line_images) / seconds:.1f} img/s | "
                f"data {1e3 * waited / steps:.1f} ms | step {1e3 * seconds / steps:.1f} ms | "
                f"ETA {duration((args.max_steps - run.step) * seconds / steps, digits=0)}")
            line_images, line_step, line_end = run.images, run.step, end
        save = args.checkpoint_every and run.step % args.checkpoint_every == 0
        if save or run.step >= next_talk or run.epoch_step == args.steps_per_epoch:
            next_talk = run.step + agree(run, recent)
        if save:
            save_checkpoint(run)
    agree(run, recent)

@torch.inference_mode()
def validate(run):
    """Top-1 and top-5 in percent over all labelled validation images, each counted once."""
    start, counts = time.perf_counter(), torch.zeros(3, dtype=torch.int64)
    run.model.eval()
    for batch in run.val_loader:
        images, labels, _ = batch
        name_damaged(run, run.val_loader, batch)
        hits = forward(run, run.model, images).cpu().topk(5).indices == labels[:, None]
        counts += torch.stack([hits[:, 0].sum(), hits.sum(), (labels != IGNORED).sum()])
    run.model.train()
    *hits, images = sum(gather(counts)).tolist()
    top1, top5 = (100 * n / max(1, images) for n in hits)
    # DDP 6/6: rank 0 alone writes what all ranks found (main has the tear-down)
    if run.job.rank == 0:
        log(run.job, f"Epoch {run.epoch} validation | Top-1: {top1:.2f}% | Top-5: {top5:.2f}% | "
            f"{images} images | {time.perf_counter() - start:.2f}s")
    return {"top1": top1, "top5": top5, "images": images}

def train(run):
    """All epochs that are left, with a checkpoint and a validation after each."""
    args = run.args
    while run.step < args.max_steps or run.epoch_step == args.steps_per_epoch:
        start, before = time.perf_counter(), run.images
        train_epoch(run)
        seconds, (loss, labelled, damaged) = time.perf_counter() - start, run.epoch_loss
        log(run.job, f"Epoch {run.epoch} complete | Avg loss: {loss / max(1, labelled):.4f} | "
            f"{(run.images - before) / seconds:.1f} img/s | {seconds:.2f}s" +
            f" | damaged {damaged}" * (damaged > 0))
        sums, names = zip(*gather((run.epoch_loss, run.damaged)), strict=True)
        run.damaged = set().union(*names)
        for buffer in run.model.buffers():  # batch-norm statistics differ: rank 0's count
            dist.broadcast(buffer, 0)
        save_checkpoint(run, last=run.step == args.max_steps)
        loss = sum(s[0] for s in sums) / max(1, sum(s[1] for s in sums))
        top = validate(run) if run.val_loader else {}
        run.losses.append({"epoch": run.epoch, "loss": loss} | top)
        if run.epoch_step < args.steps_per_epoch:
            break  # by --max_steps
        run.epoch, run.epoch_step, run.epoch_loss = run.epoch + 1, 0, [0.0, 0, 0]

def summarize(run, started, train_seconds):
    """The Summary record; finds out whether all replicas are equal, bit for bit."""
    digest = hashlib.sha256()
    for value in run.model.state_dict().values():
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    times = np.mean(run.times[UNTIMED_STEPS:] or run.times or [(0, 0)], axis=0) * 1e3
    mine = (digest.hexdigest(), times.tolist(), run.images, run.damaged)
    digests, times, images, damaged = zip(*gather(mine), strict=True)
    data, step = np.mean(times, axis=0).tolist()
    return {"epochs": run.epoch - 1, "steps": run.step, "wall_s": time.perf_counter() - started,
            "train_s": train_seconds, "images": sum(images),
            "img_per_s": sum(images) / train_seconds, "step_ms": step, "data_ms": data,
            "data_share": data / max(step, 1e-9),
            "ranks": [{"rank": r, "data_ms": d, "step_ms": s} for r, (d, s) in enumerate(times)],
            "loss_by_epoch": [e["loss"] for e in run.losses],
            "val": [e for e in run.losses if "top1" in e], "damaged": len(set().union(*damaged)),
            "replicas_identical": len(set(digests)) == 1, "weights_sha256": digests[0]}

# --- checkpoint ---
def lock_checkpoint(path):
    """An open file that keeps other runs from this checkpoint until the process ends."""
    try:
        lock = open(f"{path}.lock", "w")  # noqa: SIM115
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock, not passed on to workers
        return lock
    except OSError as error:
        raise UserError(f"checkpoint {path}: in use by another run, or its folder cannot be "
                        f"written to: {error.strerror}: choose another path") from None

def save_checkpoint(run, last=False):
    """Rank 0 writes; the old file stays until the new one is whole. Raises UserError if last."""
    path, error, epoch_losses = run.args.checkpoint, "", gather(run.epoch_loss)
    if not all(parameter.isfinite().all() for parameter in run.model.parameters()):
        raise UserError(f"weights are not finite after step {run.step}: lower --lr; the last "
                        "checkpoint is kept")
    if path and run.job.rank == 0:
        state = {name: getattr(run, name) for name in PROGRESS}
        state |= {name: getattr(run, name).state_dict() for name in STATEFUL}
        try:
            with open(f"{path}.new", "wb") as file:
                torch.save(state | {"identity": run.identity, "epoch_losses": epoch_losses}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.new", path)
        except (OSError, RuntimeError) as failure:  # torch.save wraps the disk's error
            reason = first_line(failure.__context__ or failure)
            error = f"checkpoint {path} not saved at step {run.step}: {reason}"
            log(run.job, f"WARNING: {error}; an older one is kept", descriptor=2)
            with contextlib.suppress(OSError):
                os.unlink(f"{path}.new")
    if last and from_rank0(run.job, "checkpoint", lambda: error):
        raise UserError(error or "the checkpoint was not saved")

def load_checkpoint(run):
    """Goes on where the checkpoint was saved; only rank 0 reads the file. Returns what to log."""
    path, job = run.args.checkpoint, run.job
    state = from_rank0(job, "checkpoint",
                       lambda: load_file(path, "checkpoint") if os.path.exists(path) else None)
    if state is None:
        return f"No checkpoint {path} yet: the run starts afresh"
    with together(job, "checkpoint"):
        if "identity" not in state:
            raise UserError(f"checkpoint {path} is not one of this demo: choose another path")
        for name, value in run.identity.items():
            then = state["identity"].get(name)
            if then != value:
                raise UserError(f"checkpoint {path} has {name} {then}, this run {value}: use the "
                                "same, or another --checkpoint")
        try:
            for name in STATEFUL:
                getattr(run, name).load_state_dict(state[name])
            for name in PROGRESS:
                setattr(run, name, state[name])
            old, now = state["epoch_losses"], job.world_size
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"checkpoint {path} does not fit: {first_line(error)}") from None
    same = len(old) == now  # else all ranks go on from the mean
    run.epoch_loss = old[job.rank] if same else [sum(c) / now for c in zip(*old, strict=True)]
    return f"Resumed from {path} at epoch {run.epoch}, step {run.step}" + (
        f"; it was saved by {len(old)} processes, now there are {now}" * (not same))

# --- main ---
def prepare(args, job):
    """(Run, training index, validation index or None): everything up to the first step."""
    index = from_rank0(job, "index broadcast", lambda: read_index(args.annotation_path))
    val_index = from_rank0(job, "index broadcast", lambda: args.val_annotation_path and read_index(
        args.val_annotation_path, index.categories))
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    mine = {"PyTorch": torch.__version__, "the script's hash": script}
    mine |= {f"--{name}": value for name, value in vars(args).items()
             if not name.endswith("path") and name not in ("workers", "checkpoint")}
    with together(job, "check of the images"):
        mine |= check_images(args.coco_image_path, index)
        if val_index and args.val_image_path:
            check_images(args.val_image_path, val_index)
        if job.rank == 0 and args.checkpoint:
            job.lock = lock_checkpoint(args.checkpoint)
    first = from_rank0(job, "comparison of the ranks", lambda: mine)
    with together(job, "comparison of the ranks"):
        for name, value in mine.items():
            if value != first[name]:
                raise UserError(f"{name}: {value} here, {first[name]} on rank 0: start all alike")
        resolve_arguments(args, job, len(index.names))
    model, ddp = build_model(args, job)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(job.device.type, enabled=args.precision == "fp16")
    run = Run(args, job, model, ddp, optimizer, scaler, *make_loaders(args, job, index, val_index))
    data = hashlib.sha256(index.names.tobytes() + index.labels.tobytes()).hexdigest()[:12]
    run.identity = {f"--{name}": getattr(args, name) for name in IDENTITY} | {"data set": data}
    return run, index, val_index

def work(args, job, started):
    """The whole run, on every rank."""
    run, index, val_index = prepare(args, job)
    resumed = args.resume and load_checkpoint(run)
    about = describe_run(run, index, val_index)
    if job.rank == 0:
        log(job, "Run " + json.dumps(about))
        log(job, f"Data: {len(index.names)} labelled of {len(index.names) + index.unlabelled} "
            "images" + f", {about['padding']} twice an epoch" * (about["padding"] > 0))
        if resumed:
            log(job, resumed)
    # until here a signal just ends the process; loader workers start later and inherit this
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, lambda number, _: setattr(job, "stop", signal.Signals(number).name))
    start = time.perf_counter()
    train(run)
    summary = summarize(run, started, time.perf_counter() - start)
    if job.rank == 0:
        log(job, "Summary " + json.dumps(summary))

@record
def main():
    started, args, job, code = time.perf_counter(), parse_arguments(), Job(), 0
    try:
        job = read_environment()
        set_up(args, job)
        work(args, job, started)
        seconds = time.perf_counter() - started
        log(job, f"Cleanup complete. Total wall time: {duration(seconds)} ({seconds:.3f}s)")
    except UserError as error:
        code = 1
        if job.rank == 0 or not dist.is_initialized():  # else all ranks have the same error
            log(job, f"ERROR: {error}", descriptor=2)
    except Stopped as reason:
        code = EXIT_STOPPED
        log(job, f"Stopped on {reason} | exit code {code}")
    except (RuntimeError, OSError) as error:  # from a collective or a loader; else it is a bug
        if not re.search(OUTSIDE, str(error)):
            raise
        reason = str(error).strip().splitlines()[-1][:300]  # the first is of a worker's traceback
        log(job, f"ERROR: in {job.phase}: {reason}", descriptor=2)
        os._exit(1)  # a tear-down could wait for ranks that are gone
    if dist.is_initialized():
        dist.barrier()  # who leaves first has the launcher end the others: let them write
        dist.destroy_process_group()
    sys.exit(code)

if __name__ == "__main__":
    main()
