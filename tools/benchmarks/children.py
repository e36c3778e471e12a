"""A process that is measured: main() of the script in $BENCHMARK_SCRIPT, with changes by name.

    children.py CHANGE+CHANGE OPTIONS of the script

What a change finds out it prints as one line, `FIGURES {...}`.
"""

import importlib.util
import itertools
import json
import math
import os
import resource
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "demo_coco_resnet18.py"
GPU = Path("/dev/nvidiactl").exists()
MOST_READ = 20000  # pictures: of a larger set not all are held in memory
PHASES = {  # by the function of the script that ends each
    "set_up": "launcher and imports",
    "from_rank_0": "rendezvous",
    "complete_arguments": "image list",
    "build_model": "check of images",
    "start_or_resume": "weights and DDP",
    "train_epoch": "workers, warm-up pass",
    "finish_step": "first batch and step",
}


def load_script():
    """The module of the script that $BENCHMARK_SCRIPT names, by default the one beside tools/."""
    file = Path(os.environ.get("BENCHMARK_SCRIPT", SCRIPT))
    spec = importlib.util.spec_from_file_location("demo", file)
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    sys.argv[0] = str(file)
    spec.loader.exec_module(demo)
    return demo


def show(**figures):
    os.write(1, f"FIGURES {json.dumps(figures)}\n".encode())


# --- Other loaders -----------------------------------------------------------------------------


class Changed:
    """Stands for the loader of a process; a subclass says which batches it gives."""

    def __init__(self, loader, process):
        self.sampler, self.dataset, self.loader = loader.sampler, loader.dataset, loader
        self.process = process


class Host(Changed):
    """Gives its loader's first batch for ever, copied to the device in each step, as all are."""

    def __init__(self, loader, process):
        super().__init__(loader, process)
        loader.sampler.set_epoch(1)
        self.batch = next(iter(loader))

    def __iter__(self):
        return itertools.repeat(self.batch)


class Resident(Host):
    """The same, and its images stay on the device."""

    def __init__(self, loader, process):
        super().__init__(loader, process)
        images, *rest = self.batch
        self.batch = (images.to(process.device), *rest)


class Emptied(Changed):
    """Throws away what its loader has ready after the first, slow steps.

    Meanwhile all buffers have filled: of two batches for each worker. Where the device is quicker
    than the workers, training would be too fast until these are used up, after 2 workers / (1 -
    rate of the workers / rate of the device) steps: the nearer the rates, the longer.
    """

    FIRST = 3  # steps

    def __iter__(self):
        return self.emptied(iter(self.loader))  # now, and not at the first batch: it forks

    def emptied(self, batches):
        yield from itertools.islice(batches, self.FIRST)
        # two ready for each worker, and the one at which it is meanwhile
        for _ in itertools.islice(batches, 3 * self.loader.num_workers):
            pass
        yield from batches


class Ahead(Changed):
    """Copies each batch to the GPU while the one before is computed."""

    def __iter__(self):
        return self.copied(iter(self.loader)) if self.process.gpu else iter(self.loader)

    def copied(self, batches):
        import torch

        stream, ready = torch.cuda.Stream(), []
        for images, *rest in batches:
            with torch.cuda.stream(stream):
                ready.append((images.to("cuda", non_blocking=True), stream.record_event(), *rest))
            if len(ready) == 2:
                images, copied, *rest = ready.pop(0)
                torch.cuda.current_stream().wait_event(copied)
                images.record_stream(torch.cuda.current_stream())
                yield images, *rest


LOADERS = {"resident": Resident, "host": Host, "emptied": Emptied, "ahead": Ahead}


def change_loader(demo, kind):
    """Has the script train from a loader of this kind."""
    make = demo.make_loader
    demo.make_loader = lambda args, process, *rest: kind(make(args, process, *rest), process)


# --- Other settings of PyTorch -----------------------------------------------------------------


def cudnn(demo):
    demo.torch.backends.cudnn.benchmark = True


def unbatched(demo):
    demo.ddp_options = lambda args: {"bucket_cap_mb": args.bucket_cap_mb}


# --- A part of it alone ------------------------------------------------------------------------


def core(demo):
    """Keeps this process to one core, with its workers, which inherit it."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def read_all(folder):
    """Reads a folder's pictures, so that they come from memory when the loader's time is taken."""
    for entry in itertools.islice(os.scandir(folder), MOST_READ):
        if entry.is_file():
            Path(entry).read_bytes()


def loader(demo):
    """The loader alone, in place of training."""
    read_all(demo.parse_arguments(sys.argv[1:]).coco_image_path)
    demo.train_epoch = lambda run, epoch: time_loader(demo, run.loader, run.args.max_steps)


def time_loader(demo, loader, steps):
    """Shows images/s of a loader over the last two thirds of so many batches, and ends."""
    demo.keep_memory()  # as training does in its second step
    loader.sampler.set_epoch(1)
    batches = iter(loader)
    for _ in itertools.islice(batches, steps // 3):
        pass
    begin = time.perf_counter()
    images = sum(len(batch[1]) for batch in itertools.islice(batches, steps - steps // 3))
    show(img_per_s=images / (time.perf_counter() - begin))
    sys.exit()


def decode(demo):
    """torchvision's decoder alone, in one thread; img/s as of a loader."""
    from torchvision.io import ImageReadMode, decode_image

    args = demo.parse_arguments(sys.argv[1:])
    demo.torch.set_num_threads(1)
    read_all(args.coco_image_path)
    count = args.max_steps * args.batch_size
    files = [entry.path for entry in os.scandir(args.coco_image_path)][:count]
    for file in files[: count // 3]:
        decode_image(file, ImageReadMode.RGB)
    begin = time.perf_counter()
    for file in files[count // 3 :]:
        decode_image(file, ImageReadMode.RGB)
    show(img_per_s=len(files[count // 3 :]) / (time.perf_counter() - begin))
    sys.exit()


def pycocotools(demo):
    """Seconds to index an instances file as tutorials do."""
    from pycocotools.coco import COCO

    begin = time.perf_counter()
    COCO(demo.parse_arguments(sys.argv[1:]).annotation_path)
    show(**{"image list": time.perf_counter() - begin})
    sys.exit()


# --- More than the log tells -------------------------------------------------------------------


def phases(demo):
    """Shows the seconds of each phase up to the first step's end, and the peak memory then."""
    moments = [float(os.environ["BENCHMARK_BEGAN"])]  # one clock in all processes of a machine

    def end_phase(name, function, *args):
        if len(moments) == 1 + list(PHASES).index(name):
            moments.append(time.monotonic())
            if len(moments) > len(PHASES):
                spans = (b - a for a, b in itertools.pairwise(moments))
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
                found = dict(zip(PHASES.values(), spans, strict=True))
                show(rank=int(os.environ["RANK"]), phases=found, peak=peak)
        return function(*args)

    for name in PHASES:
        inner = getattr(demo, name)
        setattr(demo, name, lambda *args, name=name, inner=inner: end_phase(name, inner, *args))


def profile(demo):
    """Shows the ms of a step in which a kernel ran; has the Summary count from the same step on.

    The profiler starts in the last step before those: that takes long, and is none of their time.
    """
    import torch
    from torch.profiler import ProfilerActivity

    step, end, kind = demo.train_step, demo.summarize, "CUDA" if GPU else "CPU"
    profiler = torch.profiler.profile(activities=[getattr(ProfilerActivity, kind)])
    demo.WARM_UP = int(os.environ["BENCHMARK_WARM"])  # steps that the Summary leaves out
    first = demo.WARM_UP - 1

    def profiled_step(run, micro_batches):
        if run.step == first:
            profiler.start()
        return step(run, micro_batches)

    def profiled_end(run):
        profiler.stop()
        # an annotation, such as the optimizer's step, covers the gaps between its kernels, too
        kernels = [e for e in profiler.events() if not e.is_user_annotation]
        spans = [e.time_range for e in kernels if e.device_type.name == kind]
        busy = union((span.start, span.end) for span in spans)
        show(ms=busy / 1e3 / (run.args.max_steps - first))
        end(run)

    demo.train_step, demo.summarize = profiled_step, profiled_end


def union(spans):
    """How long at least one of (begin, end) lasted."""
    total, reached = 0, -math.inf
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


CHANGES = {
    "cudnn": cudnn,
    "unbatched": unbatched,
    "core": core,
    "loader": loader,
    "decode": decode,
    "pycocotools": pycocotools,
    "phases": phases,
    "profile": profile,
}


if __name__ == "__main__":
    names = sys.argv.pop(1).split("+")
    demo = load_script()
    for name in names:
        if name in LOADERS:
            change_loader(demo, LOADERS[name])
        else:
            CHANGES[name](demo)
    demo.one_line_errors(demo.main)
