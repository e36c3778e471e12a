"""The script's training, data and numbers: real processes, one and several ranks."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.cgroups import CGROUPS, make_cgroups
from support.datasets import (
    COCO_IDS,
    data_args,
    instances,
    make_set,
    numbered,
    truncate,
    write_images,
)
from support.forks import (
    BATCH_NORMS,
    PARAMETER_TENSORS,
    PARAMETERS,
    STATE_TENSORS,
    ForkServer,
    Job,
    prepared,
    run_to_the_end,
    start,
    validation_batch,
    write,
)
from support.processes import (
    LONG,
    MALLOC,
    SCRIPT,
    Run,
    counter,
    long,
    require,
    run_demo,
    wait_until,
)

FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --timeout 30")
PART_ONE = 345  # lines, which a person reads in one sitting
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean, standard deviation of its pixels


# --- What runs in forked processes -----------------------------------------------------------


def digest_of(state: Mapping) -> str:
    """Of tensors by name, apart from the script's own."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def index_of(demo, result, path, categories=None):
    image_list = demo.read_image_list(path, categories)
    names = [os.fsdecode(name) for name in image_list.names]
    labels = [int(label) for label in image_list.labels]
    kinds = [type(image_list.names).__name__, type(image_list.labels).__name__]
    categories = [int(category) for category in image_list.categories]
    write(result, [names, labels, categories, image_list.unlabelled, kinds])


def shards(demo, result, epochs):
    """By epoch, the loader's samples in their order: [position, label, digest of the pixels]."""
    args, process = demo.parse_arguments(sys.argv[1:]), demo.Process()
    demo.read_environment(process)
    image_list = demo.read_image_list(args.annotation_path)
    loader = demo.make_loader(args, process, image_list, None)
    found = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        images = [(image, label) for batch in loader for image, label in zip(*batch, strict=True)]
        found.append(
            [
                [position, int(label), hashlib.sha256(image.numpy().tobytes()).hexdigest()]
                for (_, position), (image, label) in zip(loader.sampler, images, strict=True)
            ]
        )
        assert all(label == image_list.labels[position] for position, label, _ in found[-1])
    write(result, found)


def sixteen(ignored):
    """Images uint8, small because float64 is slow, and labels, -100 for the `ignored` ones."""
    import torch

    source = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8, generator=source)
    labels = torch.randint(0, 80, (16,), generator=source)
    labels[list(ignored)] = -100
    return images, labels


def plain_gradients(demo, result, weights, ignored=(), parts=16):
    """Gradients of the second update over the joined batch, by plain PyTorch: those of the mean of
    the means of its micro-batches of `parts` images. One without labels counts as one of loss 0.
    """
    import torch
    from torchvision.models import resnet18

    torch.set_default_dtype(torch.float64)
    model = resnet18(num_classes=80).eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    images, labels = sixteen(ignored)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    images = (images / 255 - mean) / std
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        micro_batches = list(zip(images.split(parts), labels.split(parts), strict=True))
        for some, theirs in micro_batches:
            if (used := theirs >= 0).any():
                loss = torch.nn.functional.cross_entropy(model(some[used]), theirs[used])
                (loss / len(micro_batches)).backward()
        optimizer.step()
    np.savez(f"{result}.npz", **{n: p.grad.numpy() for n, p in model.named_parameters()})


def gradients(demo, result, parts, wanted=None, ignored=(), count=False):
    """The same by the script, with the 16 images shared evenly among the ranks: the names of those
    that are not as in the file `wanted`, and how many are not zero.

    parts: images in a rank's micro-batch. count: the all-reduces of an update, too.
    Batch norm is in eval mode: in training mode it would see other batches. All is computed in
    float64: in float32 rounding moves some activation across a ReLU's edge, now and then.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_default_dtype(torch.float64)
    demo.MEAN, demo.STD = demo.MEAN.double(), demo.STD.double()
    run = prepared(demo)
    run.ddp.eval()
    share = 16 // run.process.world_size
    own = slice(run.process.rank * share, (run.process.rank + 1) * share)
    images, labels = (values[own] for values in sixteen(ignored))
    labels = [part.numpy() for part in labels.split(parts)]
    micro_batches = list(zip(images.split(parts), labels, strict=True))
    # Adam divides by the gradient's own size, which makes rounding errors of tiny ones large.
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=run.args.lr)
    found = {}

    def keep_gradients(*_):
        found.update((n, p.grad.numpy().copy()) for n, p in run.model.named_parameters())

    run.optimizer.register_step_pre_hook(keep_gradients)
    losses = [demo.train_step(run, micro_batches).item()]
    watch = profile(activities=[ProfilerActivity.CPU]) if count else contextlib.nullcontext()
    with watch as profiled:
        losses.append(demo.train_step(run, micro_batches).item())
    far = []
    if wanted:
        with np.load(wanted) as arrays:
            far = [n for n in arrays if not np.allclose(found[n], arrays[n], 1e-5, 1e-5)]
            assert [*arrays] == [*found]
    not_zero = sum(bool(value.any()) for value in found.values())
    events = profiled.key_averages() if count else ()
    sent = sum(event.count for event in events if "all_reduce" in event.key)
    write(result, {"sent": sent, "losses": losses, "far": far, "not_zero": not_zero})


def train(demo, result, nudge=False):
    """The script's main; what it did is looked at from outside, through PyTorch's own hooks."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torchvision.models import ResNet

    models, rates, first = [], [], []
    construct = ResNet.__init__

    def keep(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        models.append(self)

    def look(optimizer, *_):
        if not first:  # parameters alone: batch norm has seen the first batch already
            first.append(digest_of(dict(models[0].named_parameters())))
        rates.append(optimizer.param_groups[0]["lr"])
        if nudge:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0][0, 0, 0, 0] += 1e-3

    ResNet.__init__ = keep
    register_optimizer_step_pre_hook(look)
    run_to_the_end(demo)
    write(result, {"before": first[0], "after": digest_of(models[0].state_dict()), "rates": rates})


def loaded(demo, result, file):
    """Whether this rank's weights, before the first step, are the file's: true by name."""
    import torch

    state = prepared(demo).model.state_dict()
    wanted = torch.load(file, weights_only=True)
    write(result, {name: torch.equal(value, state[name]) for name, value in wanted.items()})


def make_weights(demo, result, path, classes=80, seed=7):
    import torch
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    torch.save(resnet18(num_classes=classes).state_dict(), path)


def ranking(demo, result, weights, folder, annotations):
    """Of each image by itself, the classes from the likeliest to the least likely."""
    import torch
    from torchvision.models import resnet18

    model = resnet18(num_classes=80).eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    image_list = demo.read_image_list(annotations)
    images, _ = validation_batch(demo, folder, image_list, 40)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    with torch.inference_mode():
        scores = [model(((image / 255 - mean) / std)[None])[0] for image in images]
    write(result, [score.argsort(descending=True).tolist() for score in scores])


def validation(demo, result):
    run = prepared(demo)
    demo.validate(run, 1)


def alone(demo, path, size, seed=None):
    """The batch that the script makes of one image file, which has the label 7: in training with
    that seed, or in validation.
    """
    import numpy as np

    folder, name = os.path.split(path)
    image_list = demo.ImageList(np.array([os.fsencode(name)]), np.array([7]), COCO_IDS, 0)
    if seed is None:
        return validation_batch(demo, folder, image_list, size)
    options = {"coco_image_path": folder, "val_image_path": None, "image_size": size, "seed": seed}
    data = demo.FirstCategory(argparse.Namespace(**options), demo.Process(), image_list, None)
    return data.__getitems__([(3, 0)])


def run_record(demo, result):
    """What a run logs before its first step."""
    prepared(demo)


def decoded(demo, result, path):
    """The label (or, of a refused image, the mark) and mean colours of an image; memory used."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images, labels = alone(demo, path, 40)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    write(result, [int(labels[0]), images[0].float().mean((1, 2)).tolist(), used * 1024])


def each_decoded(demo, result, paths, by_pillow):
    """Of each image by its path: label, mean colours, shape.

    by_pillow: as of a torchvision without its decoders.
    """
    if by_pillow:
        del demo.torchvision.io.decode_image
    found = {}
    for path in paths:
        images, labels = alone(demo, path, 40)
        shape = list(demo.decode(np.fromfile(path, np.uint8)).shape)
        found[path] = [int(labels[0]), images[0].float().mean((1, 2)).tolist(), shape]
    write(result, found)


def against_torchvision(demo, result, path):
    """The largest difference to what torchvision's transforms make of an image, in levels."""
    import torch
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    found = {}
    for seed in [None, *range(20)]:
        if seed is None:
            theirs = v2.Compose([v2.Resize(64), v2.CenterCrop(56)])
        else:
            theirs = v2.Compose([v2.RandomResizedCrop(56), v2.RandomHorizontalFlip()])
            torch.manual_seed(hash((seed, 3, 0)) % 2**32)
        expected, ours = theirs(decode_image(path, "RGB")).int(), alone(demo, path, 56, seed)[0][0]
        found[str(seed)] = [list(ours.shape), int((ours - expected).abs().max())]
    write(result, found)


def phases(demo, result):
    """The script's main; what this rank's file in $DEMO_PHASES says when functions are called."""
    found, file = [], Path(os.environ["DEMO_PHASES"], os.environ["RANK"])

    def watch(place, name):
        original = getattr(place, name)

        def watched(*args, **kwargs):
            found.append([name, file.read_text() if file.exists() else None])
            return original(*args, **kwargs)

        setattr(place, name, watched)

    watch(demo.dist, "init_process_group")
    watch(demo, "check_images")
    watch(demo.FirstCategory, "__getitems__")
    watch(demo, "train_step")
    run_to_the_end(demo)
    write(result, found)


def workers(demo, result):
    """The script's main; at each function's call, the number of loader workers, and of the batches
    that they have been asked for.
    """
    import torch

    found = []

    def watch(name):
        original = getattr(demo, name)

        def watched(run, *others):
            asked = run.loader._iterator._tasks_outstanding
            found.append([name, len(torch.multiprocessing.active_children()), asked])
            return original(run, *others)

        setattr(demo, name, watched)

    for name in ("log_run", "train_step", "validate"):
        watch(name)
    run_to_the_end(demo)
    write(result, found)


def graphs_by_step(demo, result):
    """The script's main; after each step, and at the end, how many graphs torch.compile has made.
    No code is made of them, which would take a minute.
    """
    import torch
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="eager")
    found, train_step = [], demo.train_step

    def counted(run, micro_batches):
        total = train_step(run, micro_batches)
        found.append(counters["stats"]["unique_graphs"])
        return total

    demo.train_step = counted
    run_to_the_end(demo)
    write(result, [*found, counters["stats"]["unique_graphs"]])


def threads_at_the_end(demo, result):
    """The script's main; names of Gloo's threads before the group is destroyed, and after main."""

    def names():
        found = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                found.append(path.read_text().strip())
        return [name for name in found if "gloo" in name]

    found, destroy = [], demo.dist.destroy_process_group
    demo.dist.destroy_process_group = lambda: (found.append(names()), destroy())
    try:
        start(demo)
    finally:
        deadline = time.monotonic() + 2  # one that has been joined is listed a moment longer
        while names() and time.monotonic() < deadline:
            time.sleep(0.01)
        write(result, [*found, names()])


def step_times(demo, result, steps):
    """What the script's timer makes of steps' moments, given as (images, moments)."""
    timer = demo.StepTimer(demo.Process())
    timer.unread = [tuple(step) for step in steps]
    timer.read()
    assert not timer.unread
    write(result, [list(step) for step in timer.steps])


def moments(demo, result):
    """The script's main; of each step the number of images and of backward passes it has timed."""
    kept, passes = [], []
    end_step, note_own = demo.StepTimer.end_step, demo.StepTimer.note_own_gradients

    def keep(timer, images):
        end_step(timer, images)
        _, step = timer.unread[-1]
        kept.append([images, sum(step["begin"] < moment for moment in passes)])
        passes.clear()

    def count(timer, parameter):
        note_own(timer, parameter)
        passes.append(timer.moments["own gradients"])

    demo.StepTimer.end_step, demo.StepTimer.note_own_gradients = keep, count
    run_to_the_end(demo)
    write(result, kept)


def computes_best(demo, result, best):
    """The precision that the script chooses on hardware that is fastest in `best`."""

    def complete_and_end(args, *others):
        complete_arguments(args, *others)
        write(result, args.precision)
        sys.exit(0)

    complete_arguments, demo.complete_arguments = demo.complete_arguments, complete_and_end
    demo.fastest_precision = lambda _: best
    start(demo)


def sentences(demo, result, runs):
    """Run records in words."""
    write(result, [demo.run_in_words(facts) for facts in runs])


def quotas(demo, result, folders):
    """The script's count of cores by quotas, of cgroups that are files like any other."""
    found = []
    for folder in map(Path, folders):
        places = str(folder / "proc/self/cgroup"), str(folder / "sys/fs/cgroup")
        cores = demo.cores_by_quota(*places)
        found.append(None if cores == math.inf else cores)
    write(result, found)


def cores_within(demo, result, cgroup, places):
    """This process's cores after it has entered a cgroup, in each of the places
    [launcher, processes on the node, cores that it is bound to].
    """
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    all_cores, found = os.sched_getaffinity(0), []
    for launcher, size, bound in places:
        process = demo.Process(launcher=launcher, local_world_size=size)
        os.sched_setaffinity(0, sorted(all_cores)[: bound or None])
        demo.share_cpu(process)
        found.append(process.cores)
        os.sched_setaffinity(0, all_cores)
    write(result, found)


def gpu_with_cores(demo, result, cores):
    """What the script says of a process that has a GPU and so many cores."""
    device = demo.torch.device("cuda", 0)
    process = demo.Process(launcher="srun", cores=cores, device=device)
    args = argparse.Namespace(workers=None, batch_size=1, image_size=33, accumulate_steps=1)
    demo.complete_workers(args, process)
    write(result, args.workers)


def adapted(demo, result):
    """What --sync_bn makes of the model: kinds of layers, and whether all tensors are the same."""
    model = demo.torchvision.models.resnet18(num_classes=80)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    args = argparse.Namespace(sync_bn=True, compile=False)
    demo.adapt_model(args, demo.Process(), model)
    kinds = Counter(type(layer).__name__ for layer in model.modules())
    after = {name: value.data_ptr() for name, value in model.state_dict().items()}
    same = before == after and parameters == [id(p) for p in model.parameters()]
    write(result, [kinds["BatchNorm2d"], kinds["SyncBatchNorm"], same])


def on_a_mac(demo, result):
    """The script's main with --device mps, as if this were a Mac; it computes on the CPU.

    Writes the device, what stands in DDP's place, how often the GPU was waited for, and whether
    all tensors have the usual layout.
    """
    import torch

    name, wrapper, waits, layouts = [], [], [], []
    complete_device, wrap_model = demo.complete_device, demo.wrap_model
    torch.backends.mps.is_available = lambda: True
    torch.mps.synchronize = lambda: waits.append(1)

    def device_that_is_here(args, process):
        complete_device(args, process)
        name.append(process.name)
        process.device = torch.device("cpu")

    def look(args, process, model):
        ddp = wrap_model(args, process, model)
        wrapper.append(type(ddp).__name__)
        model.conv1.register_forward_pre_hook(
            lambda layer, images: layouts.append(
                images[0].is_contiguous() and layer.weight.is_contiguous()
            )
        )
        return ddp

    demo.complete_device, demo.wrap_model = device_that_is_here, look
    demo.Process.mps = property(lambda _: bool(name))
    run_to_the_end(demo)
    write(result, [*name, *wrapper, len(waits), all(layouts)])


def page_faults(demo, result, steps, give_back):
    """Page faults of some steps after the first three.

    give_back: as with another C library than glibc, which has no mallopt.
    """
    import resource

    def no_library(_):
        raise OSError("no such library")

    if give_back:
        demo.ctypes.CDLL = no_library
    run = prepared(demo)
    batch, before = next(iter(run.loader)), 0
    run.timer.restart()
    for step in range(3 + steps):
        if step == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run.timer.note_moment("waiting for data")
        run.timer.note_moment("data")
        demo.finish_step(run, demo.train_step(run, [batch]), [batch])
    write(result, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def stays(demo, size):
    """Whether the memory of a tensor of so many MiB stays here when it is gone."""
    import resource

    def page_faults_of_one():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        demo.torch.ones(size * 2**20, dtype=demo.torch.uint8)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # The first has to take it anew. So may some more: what is aligned does not fit where another
    # of its size has been, until two such places join.
    pages = size * 2**20 / resource.getpagesize()
    return any(page_faults_of_one() < pages / 4 for _ in range(20))


def kept_sizes(demo, result):
    """Sizes in MiB whose memory stays when a tensor is gone: after set_up, after each step."""

    def note():
        kept.append([size for size in (24, 200) if stays(demo, size)])

    kept, set_up, finish_step = [], demo.set_up, demo.finish_step

    def after_set_up(*given):
        set_up(*given)
        note()

    def after_step(*given):
        finish_step(*given)
        note()

    demo.set_up, demo.finish_step = after_set_up, after_step
    run_to_the_end(demo)
    write(result, kept)


def sizes_kept_by_worker(demo, result):
    """The same of the loader's one worker, before its first batch."""
    load_images = demo.load_images

    def after_note(*given):
        if demo.get_worker_info() and not Path(f"{result}.json").exists():
            write(result, [size for size in (24, 200) if stays(demo, size)])
        return load_images(*given)

    demo.load_images = after_note
    run_to_the_end(demo)


# --- Small data sets -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """The options for 37 small images: a number that no number of ranks here divides."""
    return make_set(tmp_path_factory.mktemp("small"), 37)


@pytest.fixture(scope="module")
def with_val(small) -> list[str]:
    """The same images for validation, too."""
    return [*small, "--val_image_path", small[1], "--val_annotation_path", small[3]]


# --- Labels ----------------------------------------------------------------------------------


def expected_index(path: Path) -> tuple[list[str], list[int], list[int], int]:
    """The label rule, read from the JSON with nothing but a loop."""
    content = json.loads(path.read_text())
    ids = sorted(category["id"] for category in content["categories"])
    first: dict[int, int] = {}
    for annotation in content["annotations"]:
        first.setdefault(annotation["image_id"], annotation["category_id"])
    named = [(i["file_name"], first[i["id"]]) for i in content["images"] if i["id"] in first]
    left_out = len(content["images"]) - len(named)
    return [name for name, _ in named], [ids.index(c) for _, c in named], ids, left_out


@pytest.mark.parametrize(("split", "labelled", "without"), [("train", 49, 1), ("val", 48, 2)])
def test_label_is_the_category_of_the_first_annotation(demo, tiny_coco, split, labelled, without):
    path = tiny_coco / "annotations" / f"instances_{split}2017.json"
    names, labels, categories, unlabelled, kinds = demo.run(call=index_of, path=str(path)).result()
    assert (names, labels, categories, unlabelled) == expected_index(path)
    assert (len(names), unlabelled) == (labelled, without)
    assert categories == COCO_IDS and len(set(labels)) > 10
    assert kinds == ["ndarray", "ndarray"]  # a list of objects would be copied into each worker


def test_first_means_first_in_the_file_crowd_included(demo, tmp_path):
    content = instances(["b.jpg", "a.jpg", "c.jpg", "d.jpg"], [None] * 4, ids=[90, 7, 33])
    content["annotations"] = [
        {"id": 9, "image_id": 101, "category_id": 33, "iscrowd": 1},
        {"id": 3, "image_id": 100, "category_id": 90, "iscrowd": 0},
        {"id": 1, "image_id": 101, "category_id": 7, "iscrowd": 0},
        {"id": 2, "image_id": 103, "category_id": 7, "iscrowd": 0},
        {"id": 4, "image_id": 100, "category_id": 7, "iscrowd": 0},
    ]
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    names, labels, categories, unlabelled, _ = demo.run(call=index_of, path=str(path)).result()
    assert categories == [7, 33, 90]  # sorted, whatever the order in the file
    assert dict(zip(names, labels, strict=True)) == {"b.jpg": 2, "a.jpg": 1, "d.jpg": 0}
    assert unlabelled == 1


def test_validation_uses_the_categories_of_training(demo, tmp_path):
    path = tmp_path / "val.json"
    path.write_text(json.dumps(instances(["a.jpg"], [33], ids=[33])))
    found = demo.run(call=index_of, path=str(path), categories=[7, 33, 90]).result()
    assert found[1] == [1]


@pytest.mark.parametrize("nproc", [*long(1), 2])
def test_real_coco_trains_and_counts(demo, tiny_coco, nproc):
    argv = [*data_args(tiny_coco, val=True), *FAST, "--batch_size", 8, "--max_steps", 1]
    job = demo.run(argv, nproc)
    facts = job.json_line("Run")
    assert (facts["images"], facts["images_without_annotations"]) == (49, 1)
    assert (facts["val_images"], facts["padding"]) == (48, 49 % nproc)
    assert facts["world_size"] == nproc
    (line,) = (line for line in job.lines(0) if line.startswith("Run: "))
    assert f"; 49 have labels, 1 does not, {'1 comes' if nproc == 2 else '0 come'} twice " in line
    (found,) = re.findall(r"validation \| Top-1: (.*)% \| 48 images", job.out)
    right = float(found) * 48 / 100
    assert right == pytest.approx(round(right), abs=0.01)  # a whole number of images


# --- Shards and pixels -----------------------------------------------------------------------


def samples(demo, argv, nproc=1, workers=0, seed=0, epochs=(1, 2)) -> list[list[list]]:
    """By rank and epoch: [position, label, digest of the pixels] in order."""
    argv = [*argv, *FAST, "--batch_size", 4, "--workers", workers, "--seed", seed]
    job = demo.run(argv, nproc, call=shards, torchrun=True, epochs=list(epochs))
    return [job.result(rank) for rank in range(nproc)]


@pytest.fixture(scope="module")
def one_rank(demo, small):
    return samples(demo, small)[0]


@pytest.mark.parametrize("nproc", [2, *long(3)])
def test_shards_are_disjoint_and_complete_and_change_by_epoch(demo, small, one_rank, nproc):
    found = samples(demo, small, nproc)
    pixels = [{position: digest for position, _, digest in epoch} for epoch in one_rank]
    for epoch in (0, 1):
        positions = [[sample[0] for sample in rank[epoch]] for rank in found]
        assert {len(own) for own in positions} == {-(-37 // nproc)}
        seen = Counter(p for own in positions for p in own)
        assert set(seen) == set(range(37))
        assert sum(seen.values()) - 37 == -37 % nproc  # the padding, and nothing else, is repeated
        assert max(seen.values()) == 2
        for rank in found:  # each sample looks as it does to a single process
            assert all(digest == pixels[epoch][position] for position, _, digest in rank[epoch])
    orders = [[sample[0] for sample in epoch] for rank in found for epoch in rank]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_pixels_are_a_function_of_seed_epoch_and_sample(demo, small, one_rank):
    first, second = one_rank
    assert [s[0] for s in first] != sorted(s[0] for s in first)  # shuffled
    assert [s[0] for s in first] != [s[0] for s in second]
    both = [{position: digest for position, _, digest in epoch} for epoch in one_rank]
    assert all(both[0][p] != both[1][p] for p in range(37))  # another crop each epoch
    assert len(set(both[0].values())) == 37
    assert samples(demo, small, workers=2)[0] == one_rank
    other = samples(demo, small, seed=1, epochs=[1])[0][0]
    assert [s[0] for s in other] != [s[0] for s in first]
    assert all(both[0][position] != digest for position, _, digest in other)


# --- Gradients -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(demo, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.pt"
    demo.run(call=make_weights, path=str(path))
    return path


@pytest.fixture(scope="module")
def plain(demo, weights) -> Callable[..., Job]:
    """Plain PyTorch's gradients, as a file for `gradients`; each kind is made once."""

    @functools.cache
    def make(**options) -> Job:
        return demo.run(call=plain_gradients, weights=str(weights), **options)

    return make


def assert_gradients(demo, argv, weights, wanted: Job, nproc=1, **options) -> Job:
    """The script's gradients, on all ranks, are those wanted."""
    # Batch and image size are of the warm-up pass alone, which takes long in float64.
    argv = [*argv, *FAST, "--weights", weights, "--batch_size", 1, "--image_size", 33]
    argv += ["--lr", 0.01]
    file = str(wanted.folder / "result0.npz")
    job = demo.run(argv, nproc, call=gradients, wanted=file, **options)
    for rank in range(nproc):
        assert job.result(rank)["far"] == [] and job.result(rank)["not_zero"] == PARAMETER_TENSORS
    return job


@pytest.mark.parametrize(("nproc", "parts"), [(2, 8), (1, 8), pytest.param(1, 16, marks=LONG)])
def test_accumulation_equals_the_larger_batch(demo, small, weights, plain, nproc, parts):
    """So do two ranks, each with a part of it."""
    assert_gradients(demo, small, weights, plain(), nproc, parts=parts)


@LONG
def test_shorter_last_micro_batch_counts_as_much_as_a_whole_one(demo, small, weights, plain):
    """A step is the mean of its micro-batches' means: with 12 and 4 images each of the 4 has three
    times the weight of one of the 12.
    """
    assert_gradients(demo, small, weights, plain(parts=12), parts=12)
    wanted, joined = plain(parts=12).arrays(), plain().arrays()
    assert max(np.abs(wanted[name] - joined[name]).max() for name in joined) > 1e-3


@LONG
def test_accumulation_on_two_ranks_sends_gradients_once(demo, small, weights, plain):
    jobs = [
        assert_gradients(demo, small, weights, plain(), 2, parts=parts, count=True)
        for parts in (8, 4)
    ]
    assert jobs[0].result()["sent"] == jobs[1].result()["sent"] > 0


@LONG
def test_image_without_label_has_no_gradient(demo, small, weights, plain):
    # One in each micro-batch: the mean of their means is then the mean of all images with labels.
    out = (2, 5, 9, 14)
    assert_gradients(demo, small, weights, plain(ignored=out), 2, parts=4, ignored=out)


@LONG
@pytest.mark.parametrize("nproc", [1, 2])
def test_micro_batch_without_labels_leaves_the_others(demo, small, weights, plain, nproc):
    """The second half of the images has none: a micro-batch of one rank, or all of rank 1's. What
    the first half says arrives, halved by the mean, and on both ranks.
    """
    options = {"ignored": tuple(range(8, 16)), "parts": 8}
    wanted, first = plain(**options).arrays(), plain(ignored=options["ignored"]).arrays()
    # of the second update, so not quite half: the first one's step was halved too
    halves = np.concatenate([(2 * wanted[name] - first[name]).ravel() for name in wanted])
    assert np.abs(halves).max() < 0.5 * max(np.abs(first[name]).max() for name in first)
    job = assert_gradients(demo, small, weights, plain(**options), nproc, **options)
    for rank in range(nproc):  # no NaN, which would end the run
        assert all(loss == 0 if rank else 1 < loss < 10 for loss in job.result(rank)["losses"])


@LONG
@pytest.mark.parametrize("nproc", [*long(1), 2])
def test_step_without_any_label_has_gradients_of_zero(demo, small, weights, nproc):
    argv = [*small, *FAST, "--weights", weights, "--batch_size", 1]
    job = demo.run(argv, nproc, call=gradients, parts=4, ignored=list(range(16)))
    for rank in range(nproc):
        assert job.result(rank)["losses"] == [0, 0] and job.result(rank)["not_zero"] == 0


# --- Training --------------------------------------------------------------------------------


def test_replicas_are_equal_after_training(demo, small):
    argv = [*small, *FAST, "--batch_size", 10, "--num_epochs", 1, "--lr", 0.01]
    job = demo.run(argv, 2, call=train)
    assert job.json_line("Summary")["replicas_identical"] is True
    first, second = job.result(0), job.result(1)
    assert first["before"] == second["before"]
    assert first["after"] == second["after"] != first["before"]  # batch-norm statistics included


@LONG
def test_replicas_that_drift_apart_are_reported(demo, small):
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 2]
    nudge = [{"options": {"nudge": rank == 1}} for rank in (0, 1)]
    job = demo.run(argv, 2, call=train, of_rank=lambda rank: nudge[rank])
    assert job.result(0)["after"] != job.result(1)["after"]
    assert job.json_line("Summary")["replicas_identical"] is False


@LONG
def test_run_is_a_function_of_its_seed(demo, small):
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 3, "--log_every", 1]
    runs = [demo.run([*argv, "--seed", seed], call=train) for seed in (3, 3, 4)]
    losses = [[loss for _, _, loss in job.steps()] for job in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert all(a != b for a, b in zip(losses[0], losses[2], strict=True))
    assert runs[0].result() == runs[1].result()  # weights before and after
    assert runs[0].result()["before"] != runs[2].result()["before"]
    # DDP's broadcast makes replicas equal; the seed makes them the same as one process's.
    two = demo.run([*argv, "--seed", 3], 2, call=train)
    assert two.result(1)["before"] == runs[0].result()["before"]


@pytest.fixture(scope="module")
def cut_short(demo, small) -> Job:
    """37 images in batches of 13 are 3 steps an epoch, the last of 11: step 5 lies in the second
    of five epochs.
    """
    argv = [*small, *FAST, "--batch_size", 13, "--num_epochs", 5, "--max_steps", 5]
    return demo.run([*argv, "--log_every", 1])


def test_steps_stop_at_max_steps_across_epochs(cut_short):
    steps = [(epoch, step) for epoch, step, _ in cut_short.steps()]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert cut_short.json_line("Run")["steps_per_epoch"] == 3
    assert cut_short.json_line("Run")["max_steps"] == cut_short.json_line("Summary")["steps"] == 5
    complete = [line for line in cut_short.lines(0) if re.match(r"Epoch \d complete", line)]
    assert [line[:7] for line in complete] == ["Epoch 1", "Epoch 2"]


@pytest.mark.parametrize(("epoch", "sizes"), [(1, [13, 13, 11]), (2, [13, 13])])
def test_epoch_line_counts_each_image_of_its_epoch_once(cut_short, epoch, sizes):
    """Also of a smaller last batch."""
    losses = [loss for number, _, loss in cut_short.steps() if number == epoch]
    mean = np.average(losses, weights=sizes)
    (line,) = (line for line in cut_short.lines(0) if line.startswith(f"Epoch {epoch} complete"))
    assert float(re.search(r"Avg loss: ([\d.]+)", line)[1]) == pytest.approx(mean, abs=2e-4)
    speed, seconds = re.search(r"([\d.]+) img/s \| ([\d.]+)s", line).groups()
    rounding = 0.005 * float(speed) + 0.05 * float(seconds)  # of an epoch that took 0.1 s much
    assert float(speed) * float(seconds) == pytest.approx(sum(sizes), abs=1.1 * rounding)


def batch_of(facts: Mapping) -> tuple[int, int, int]:
    """Of the Run record: images per process and micro-batch, micro-batches, images of a step."""
    return facts["batch_size"], facts["accumulate_steps"], facts["global_batch_size"]


@pytest.mark.parametrize(
    "options",
    [
        ["--global_batch_size", 16, "--accumulate_steps", 2],
        # per process; and dashes are taken too
        *long(["--batch-size", 4, "--accumulate-steps=2"]),
    ],
    ids=["global", "of a process"],
)
def test_batch_is_shared_by_ranks_and_micro_batches(demo, small, options):
    run = demo.run([*small, *FAST, *options], 2, call=run_record).json_line("Run")
    assert batch_of(run) == (4, 2, 16)
    assert run["steps_per_epoch"] == 3


@LONG
def test_learning_rate_warms_up(demo, small):
    argv = [*small, *FAST, "--batch_size", 8, "--lr", 1e-3, "--warmup_steps", 2]
    job = demo.run([*argv, "--max_steps", 3], call=train)
    assert job.result()["rates"] == pytest.approx([5e-4, 1e-3, 1e-3])


@LONG
def test_linear_rule_scales_the_learning_rate(demo, small):
    """Where it is 64 images a step, the rate stays; warm-up rises to what comes out."""
    argv = [*small, *FAST, "--batch_size", 4, "--accumulate_steps", 4, "--max_steps", 3]
    argv += ["--lr_scaling", "linear", "--lr", 0.01, "--warmup_steps", 2]
    job = demo.run(argv, call=train)
    assert job.json_line("Run")["lr"] == 0.01 * 16 / 64
    assert "--lr 0.01 x 16 / 64 = 0.0025" in job.lines(0)
    assert job.result()["rates"] == pytest.approx([0.00125, 0.0025, 0.0025])


@pytest.mark.parametrize(
    ("best", "precision", "line"),
    [
        (["bf16", "fp32"], "fp32", "auto is fp32, which all ranks do (1 could do bf16)"),
        (["fp16", "bf16"], "fp16", "auto is fp16, which all ranks do (1 could do bf16)"),
        (["bf16", "bf16"], "bf16", ""),
    ],
)
def test_auto_precision_is_what_all_ranks_do_well(demo, small, best, precision, line):
    argv = [*small, *FAST, "--precision", "auto"]
    own = [{"options": {"best": name}} for name in best]
    job = demo.run(argv, 2, call=computes_best, of_rank=lambda rank: own[rank])
    assert [job.result(rank) for rank in (0, 1)] == [precision] * 2
    told = [text for text in job.lines() if "--precision" in text]
    assert told == ([f"[CPU 0] --precision {line}"] if line else [])


def test_numbers_are_followed_by_the_right_form(demo):
    """Of processes, nodes, steps, images of a step, images with and without labels, repeated."""
    names = (
        "world_size nodes max_steps global_batch_size images images_without_annotations padding"
    )
    kinds = {"backend": "gloo", "precision": "fp32"}
    runs = [dict.fromkeys(names.split(), number) | kinds for number in (1, 2)]
    assert demo.run(call=sentences, runs=runs).result() == [
        "1 process on 1 node, gloo, fp32; 1 step of 1 image; "
        "1 has a label, 1 does not, 1 comes twice an epoch",
        "2 processes on 2 nodes, gloo, fp32; 2 steps of 2 images; "
        "2 have labels, 2 do not, 2 come twice an epoch",
    ]


def test_cores_are_counted_by_the_least_quota(demo, tmp_path):
    """As tools/launcher/cores.sh counts them: its test has the same cases."""
    folders = {case: tmp_path / str(n) for n, case in enumerate(CGROUPS)}
    wanted = [make_cgroups(folder, case) for case, folder in folders.items()]
    assert demo.run(call=quotas, folders=[*map(str, folders.values())]).result() == wanted


@contextlib.contextmanager
def cgroup_of_cores(cores: int | None) -> Iterator[Path]:
    """A cgroup of this machine that has a quota of so many cores, or none."""
    require(os.geteuid() == 0, "a cgroup of its own needs root")
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    top = one if one.is_dir() else two
    own = top / f"demo-{os.getpid()}-{next(counter)}"
    try:
        own.mkdir()
        if top == one:
            (own / "cpu.cfs_quota_us").write_text(str(100_000 * cores if cores else -1))
        else:
            (own / "cpu.max").write_text(f"{100_000 * cores if cores else 'max'} 100000")
    except OSError as error:
        with contextlib.suppress(OSError):
            own.rmdir()
        require(False, f"a cgroup with a quota cannot be made here: {error}")
    try:
        yield own
    finally:
        wait_until(lambda: not (own / "cgroup.procs").read_text(), 10, "the end of its processes")
        own.rmdir()


def test_quota_of_a_real_cgroup_bounds_cores_and_threads(demo):
    places, found = [["python", 1, 0], ["torchrun", 2, 0], ["srun", 2, 1]], {}
    for cores in (1, 999, None):
        with cgroup_of_cores(cores) as cgroup:
            job = demo.run(call=cores_within, cgroup=str(cgroup), places=places)
            found[cores] = job.result()
    assert found[1] == [1, 1, 1]
    assert found[999] == found[None] and found[None][2] == 1
    assert found[None][0] > 1 or len(os.sched_getaffinity(0)) == 1


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (9, 8)])
def test_gpu_with_one_core_is_one_warning(demo, cores, workers):
    job = demo.run(call=gpu_with_cores, cores=cores)
    assert job.result() == workers
    told = [line for line in job.lines(0) if line.startswith("WARNING: one core for this process")]
    assert len(told) == (cores == 1) and all("--cpus-per-task" in line for line in told)


def test_sync_bn_changes_every_batch_norm_and_no_tensor(demo):
    """That it works is for GPUs to show: torchrun --nproc_per_node=2 ... --sync_bn."""
    assert demo.run(call=adapted).result() == [0, BATCH_NORMS, True]


def test_run_on_a_mac_is_without_ddp(demo, with_val):
    """All but the device itself, which `--device mps` on a Mac would show."""
    argv = [*with_val, *FAST, "--batch_size", 8, "--max_steps", 2, "--log_every", 1]
    usual, mac = demo.run(argv), demo.run([*argv, "--device", "mps"], call=on_a_mac)
    name, wrapper, waits, contiguous = mac.result()
    assert (name, wrapper, contiguous) == ("[MPS 0]", "WithoutDDP", True)
    assert waits >= 2 * 5  # moments of a step
    assert "One process on a Mac's GPU, without DDP, which has no backend there" in mac.out
    assert mac.json_line("Run")["devices"][0].startswith("MPS of ")
    losses = [[loss for _, _, loss in job.steps()] for job in (usual, mac)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01) and len(losses[0]) == 2
    assert mac.json_line("Summary")["replicas_identical"] is True


def test_parts_of_a_step_are_told_by_its_moments(demo):
    """In seconds: data wait, exposed communication, step; and images."""
    moments = {"begin": 10.0, "waiting for data": 10.5, "data": 11.5}
    moments |= {"own gradients": 14.5, "averaged": 16.5, "end": 20.0}
    assert demo.run(call=step_times, steps=[[4, moments]]).result() == [[1.0, 2.0, 10.0, 4]]


@LONG
@pytest.mark.parametrize("count", [*long(1), 3])
def test_timer_has_the_last_backward_pass_of_a_step(demo, small, count):
    argv = [*small, *FAST, "--batch_size", 2, "--accumulate_steps", count, "--max_steps", 4]
    kept = demo.run(argv, 2, call=moments).result()
    # 19 images of each rank: of one micro-batch each step, or of three, the last of which is cut
    images = [2] * 4 if count == 1 else [6, 6, 6, 1]
    assert kept == [[size, count if size > 1 else 1] for size in images]


@pytest.fixture(scope="module")
def glibc() -> Iterator[ForkServer]:
    """A Python of its own, whose allocator has none of the tests' settings."""
    require("CS_GNU_LIBC_VERSION" in os.confstr_names, "mallopt is glibc's")
    with ForkServer(dict.fromkeys(MALLOC)) as server:
        yield server


@LONG
def test_freed_memory_stays_with_the_process(glibc, small):
    """Else the kernel takes it back after each step, and gives it again page by page."""
    argv = [*small, *FAST, "--batch_size", 8, "--image_size", 112]
    kept, given_back = (
        glibc.run(argv, call=page_faults, steps=3, give_back=flag).result()
        for flag in (False, True)
    )
    assert given_back > 10_000, "these steps would not tell"
    assert kept < given_back / 4


@LONG
def test_memory_is_kept_when_all_is_there_that_lives_longer_than_a_step(glibc, small):
    """Of what comes before (weights, buckets, Adam's state) each has a mapping of its own."""
    argv = [*small, *FAST, "--batch_size", 2, "--max_steps", 3]
    assert glibc.run(argv, call=kept_sizes).result() == [[], [], [24, 200], [24, 200]]


@LONG
def test_memory_of_a_batch_is_kept_by_a_loader_worker(glibc, small):
    argv = [*small, *FAST, "--batch_size", 2, "--max_steps", 2, "--workers", 1]
    assert glibc.run(argv, call=sizes_kept_by_worker).result() == [24]


def test_phases_stand_in_a_file_of_each_rank(demo, small, tmp_path):
    """Rank 0 may not write its own, which is no reason to end."""
    folders = [{"env": {"DEMO_PHASES": str(tmp_path / name)}} for name in ("nowhere", "")]
    argv = [*small, *FAST, "--batch_size", 4, "--max_steps", 2]
    job = demo.run(argv, 2, call=phases, of_rank=lambda rank: folders[rank])
    assert {text for _, text in job.result(0)} == {None}
    assert job.result(1) == [
        ["init_process_group", "rendezvous"],
        ["check_images", "check of the images"],
        ["__getitems__", "the data of step 1"],
        ["train_step", "step 1"],
        ["__getitems__", "the data of step 2"],
        ["train_step", "step 2"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("kind", [*long("none", "powersgd"), "error"])
def test_threads_end_before_python(demo, small, tmp_path, kind):
    """One that lets go of a tensor while Python ends would abort the process."""
    argv = [*small, *FAST, "--batch_size", 4, "--max_steps", 4]
    if kind == "error":
        (tmp_path / "file").write_text("no checkpoint")
        argv += ["--checkpoint", tmp_path / "file", "--resume"]
    else:
        argv += ["--grad_compression", kind]
    job = demo.run(argv, 2, expect=int(kind == "error"), call=threads_at_the_end)
    for rank in (0, 1):
        before, after = job.result(rank)
        assert len(before) > 1 and not after


def test_one_set_of_workers_serves_training_and_validation(demo, with_val):
    """And they decode nothing before an epoch begins: the first ones could be of no use."""
    argv = [*with_val, *FAST, "--workers", 2, "--batch_size", 20, "--num_epochs", 2]
    job = demo.run(argv, call=workers)
    found = job.result()
    assert job.out.count("validation | ") == 2
    epoch = ["train_step", "train_step", "validate"]
    assert [name for name, _, _ in found] == ["log_run", *epoch, *epoch]
    assert {count for _, count, _ in found} == {2}
    assert found[0][2] == 0


@LONG
def test_what_is_compiled_is_compiled_once(demo, with_val):
    """Not again for an epoch's short last batch, nor for validation."""
    argv = [*with_val, *FAST, "--compile", "--batch_size", 8, "--max_steps", 7]
    job = demo.run(argv, call=graphs_by_step)
    assert job.out.count("validation | ") == 2
    (graphs,) = {*job.result()}
    assert graphs > 0


# --- Validation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "nproc"),
    [
        (7, 3),
        pytest.param(1, 3, marks=LONG),  # two ranks have none
        pytest.param(13, 2, marks=LONG),
        pytest.param(13, 1, marks=LONG),
    ],
)
def test_validation_counts_each_image_once(demo, small, weights, tmp_path, count, nproc):
    """The truth is made: the labels of images are chosen by what the weights say of each alone.

    In batches of 2 some ranks have fewer batches than others, or none.
    """
    folder, file = tmp_path / "val", tmp_path / "val.json"
    write_images(folder, numbered(count), seed=5)
    file.write_text(json.dumps(instances(numbered(count))))
    paths = {"weights": str(weights), "folder": str(folder), "annotations": str(file)}
    ranks = demo.run(call=ranking, **paths).result()
    place = [(0, 1, 79)[i % 3] for i in range(count)]  # the best, the second, the last
    labels = [COCO_IDS[order[p]] for order, p in zip(ranks, place, strict=True)]
    file.write_text(json.dumps(instances(numbered(count), labels)))
    argv = [*small, *FAST, "--val_image_path", folder, "--val_annotation_path", file]
    right = 100 * place.count(0) / count
    job = demo.run([*argv, "--weights", weights, "--batch_size", 2], nproc, call=validation)
    (line,) = (line for line in job.out.splitlines() if " validation |" in line)
    wanted = f"validation | Top-1: {right:.2f}% | {count} images | "
    assert wanted in line, line


# --- Weights ---------------------------------------------------------------------------------


def test_weights_that_only_rank_0_can_read_reach_rank_1(demo, small, weights, tmp_path):
    here, elsewhere = tmp_path / "node0", tmp_path / "node1"
    here.mkdir()
    elsewhere.mkdir()
    shutil.copy(weights, here / "w.pt")
    argv = [*small, *FAST, "--weights", "w.pt"]
    place = [{"cwd": here}, {"cwd": elsewhere}]
    file = str(here / "w.pt")
    job = demo.run(argv, 2, call=loaded, file=file, of_rank=lambda rank: place[rank])
    for rank in (0, 1):
        assert len(job.result(rank)) == STATE_TENSORS and all(job.result(rank).values())


@LONG
def test_imagenet_weights_come_from_rank_0s_cache(demo, small, tmp_path):
    """A file of another task: all but the last layer is taken."""
    cache = tmp_path / "node0" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    file = cache / "resnet18-f37072fd.pth"
    demo.run(call=make_weights, path=str(file), classes=1000)
    homes = [{"env": {"TORCH_HOME": str(tmp_path / f"node{rank}")}} for rank in (0, 1)]
    argv = [*small, *FAST, "--weights", "imagenet"]
    job = demo.run(argv, 2, call=loaded, file=str(file), of_rank=lambda rank: homes[rank])
    for rank in (0, 1):
        same = job.result(rank)
        assert [name for name in same if not same[name]] == ["fc.weight", "fc.bias"]
    assert not (tmp_path / "node1").exists()


# --- Damaged images --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> tuple[Path, list[str]]:
    """104 small images: one of them is less than 1 %."""
    folder = tmp_path_factory.mktemp("many")
    return folder / "images", make_set(folder, 104)


def copy_of(many, tmp_path: Path) -> tuple[Path, list[str]]:
    folder = tmp_path / "images"
    shutil.copytree(many[0], folder)
    return folder, ["--coco_image_path", str(folder), *many[1][2:]]


def test_damaged_image_is_left_out_and_named(demo, many, tmp_path):
    folder, argv = copy_of(many, tmp_path)
    found = samples(demo, argv, 2)
    seen = [{s[0] for s in found[1 - epoch][epoch]} for epoch in (0, 1)]
    # Another rank meets it in the second epoch.
    damaged = min(seen[0] & seen[1])
    path = folder / numbered(104)[damaged]
    truncate(path)
    argv += [*FAST, "--batch_size", 26, "--num_epochs", 2, "--log_every", 1]
    job = demo.run(argv, 2)
    # Each rank that meets it says so, why, and on stdout.
    named = {rank: [x for x in job.lines(rank) if str(path) in x] for rank in (0, 1)}
    for lines in named.values():
        (line,) = lines
        assert re.fullmatch(rf"WARNING: image {path} is damaged, left out: .+", line), line
    assert job.json_line("Summary")["replicas_identical"] is True
    # The mean loss of the epoch is that of the other images.
    (at,) = (n for n, sample in enumerate(found[1][0]) if sample[0] == damaged)
    losses = [loss for epoch, _, loss in job.steps(1) if epoch == 1]
    mean = np.average(losses, weights=[25 if n == at // 26 else 26 for n in range(2)])
    (line,) = (line for line in job.lines(1) if line.startswith("Epoch 1 complete"))
    assert float(re.search(r"Avg loss: ([\d.]+)", line)[1]) == pytest.approx(mean, abs=2e-4)
    assert "nan" not in job.out.lower()


def together_and_alone(demo, result, paths):
    """Of each image of one batch: was it decoded, is it what it is alone, and how bright is it."""
    args = argparse.Namespace(image_size=40, seed=0)
    keys = [(1, n) for n in range(len(paths))]
    images, sound = demo.load_images(args, demo.Process(), keys, paths)
    same = []
    for n, path in enumerate(paths):
        one, _ = demo.load_images(args, demo.Process(), keys[n : n + 1], [path])
        same.append(bool((images[n] == one[0]).all()))
    write(result, [sound, same, images.float().mean((1, 2, 3)).tolist()])


def test_each_kind_of_damage_leaves_the_other_images_of_a_batch_alone(demo, tmp_path):
    names = ["a.jpg", "missing.jpg", "text.jpg", "short.jpg", "folder.jpg", "b.jpg"]
    paths = [str(tmp_path / name) for name in names]
    write_images(tmp_path, [names[0], names[3], names[5]])
    truncate(Path(paths[3]))
    Path(paths[2]).write_text("no picture")
    Path(paths[4]).mkdir()
    job = demo.run(call=together_and_alone, paths=paths)
    sound, same, brightness = job.result()
    assert sound == [True, False, False, False, False, True]
    assert all(same)
    assert [mean > 0 for mean in brightness] == sound  # a damaged one is black
    for n, path in enumerate(paths):
        told = [line for line in job.lines(0) if path in line]
        assert len(told) == (0 if sound[n] else 2)  # in the batch, and alone
        assert all(" is damaged, left out: " in line and " 0x" not in line for line in told)


@LONG
def test_more_than_one_percent_damaged_ends_the_run(demo, many, tmp_path):
    folder, argv = copy_of(many, tmp_path)
    for name in numbered(104)[20:24]:
        truncate(folder / name)
    argv += [*FAST, "--batch_size", 26, "--num_epochs", 1]
    job = demo.run(argv, 2, expect=1)
    (line,) = job.err.splitlines()
    assert line.startswith("[CPU ") and "ERROR: " in line and "damaged" in line
    assert "Summary" not in job.out and "Cleanup" not in job.out


@pytest.mark.parametrize("by_pillow", [False, True])
def test_every_kind_of_picture_decodes_to_rgb(demo, tmp_path, by_pillow):
    """Pillow takes what torchvision will not, and both see the same colours."""
    colours = {"RGB": (200, 100, 50), "L": 120, "CMYK": (55, 155, 205, 0), "P": 3, "RGBA": None}
    for mode, colour in colours.items():
        kinds = {"P": ["gif", "png"], "RGBA": ["png"], "CMYK": ["jpg"]}.get(mode, ["jpg", "bmp"])
        for kind in kinds:
            picture = Image.new(mode, (40, 30), colour or (200, 100, 50, 255))
            picture.save(tmp_path / f"{mode}.{kind}")
    paths = [str(path) for path in tmp_path.iterdir()]
    found = demo.run(call=each_decoded, paths=paths, by_pillow=by_pillow).result()
    assert len(found) == 8
    for path, (label, colours_seen, size) in found.items():
        assert label == 7 and size == [3, 30, 40], (path, size)
        if Path(path).stem.startswith("RGB"):
            assert colours_seen == pytest.approx([200, 100, 50], abs=1), path


@pytest.mark.parametrize("shape", [(90, 70), (70, 90), (64, 64), (300, 60)], ids=str)
def test_crops_are_those_of_torchvision(demo, tmp_path, shape):
    """In training to the last bit; in validation the same part of the image, seen as sharp."""
    picture = Image.linear_gradient("L").resize(shape)
    other = Image.radial_gradient("L").resize(shape)
    Image.merge("RGB", [picture, other, picture.rotate(90).resize(shape)]).save(tmp_path / "a.png")
    job = demo.run(call=against_torchvision, path=str(tmp_path / "a.png"))
    found = job.result()
    assert {tuple(size) for size, _ in found.values()} == {(3, 56, 56)}
    assert found.pop("None")[1] <= 8
    assert {difference for _, difference in found.values()} == {0}


# --- The script as a user starts it ----------------------------------------------------------

SECONDS = r"(\d+h )?(\d+m )?\d+\.\d\ds"
LINES = {
    "Run": r"Run \{.*\}",
    "Run in words": r"Run: .*",
    "Step": r"Epoch \d+ \| Step \d+ \| Loss: \d+\.\d{4} \| \d+\.\d img/s \| data \d+\.\d ms \| "
    r"step \d+\.\d ms \| ETA (\d+h )?(\d+m )?\d+s",
    "Epoch": rf"Epoch \d+ complete \| Avg loss: \d+\.\d{{4}} \| \d+\.\d img/s \| {SECONDS}",
    "Validation": rf"Epoch \d+ validation \| Top-1: \d+\.\d\d% \| \d+ images \| {SECONDS}",
    "Summary": r"Summary \{.*\}",
    "Summary in words": r"Summary: .*",
    "Cleanup": rf"Cleanup complete\. Total wall time: {SECONDS} \(\d+\.\d{{3}}s\)",
}


@pytest.mark.parametrize("how", ["forked", *long("torchrun")])
def test_whole_run(demo, sample, how):
    """Two epochs on two ranks with loader workers; started by torchrun, too, as README does."""
    argv = [*data_args(sample, val=True), "--weights", "none", "--image_size", 40]
    argv += ["--batch_size", 12, "--num_epochs", 2, "--workers", 1]
    run = demo.run(argv, 2) if how == "forked" else run_demo(argv, nproc=2, split=True)
    assert run.err == ""  # no warning
    assert run.out.count("loading annotations") <= 1  # pycocotools' chatter
    assert run.out.count("index created") <= 1
    check_lines(run)
    check_records(run, sample)


def check_lines(run: Run) -> None:
    kinds: dict[int, Counter] = {0: Counter(), 1: Counter()}
    for line in run.lines():
        match = re.fullmatch(r"\[CPU ([01])\] (.*)", line)
        assert match, f"not a line of the log: {line!r}"
        kind = [name for name, form in LINES.items() if re.fullmatch(form, match[2])]
        assert kind, f"unknown line: {line!r}"
        kinds[int(match[1])].update(kind)
    steps = {"Step": 3, "Epoch": 2, "Cleanup": 1}
    assert kinds[1] == Counter(steps), "rank 1 alone writes what each rank does"
    once = {name: 1 for name in ("Run", "Run in words", "Summary", "Summary in words")}
    assert kinds[0] == Counter(steps | once | {"Validation": 2})
    assert "Cleanup complete. Total wall time: " in run.lines()[-1]
    for rank in (0, 1):
        # 95 images over 2 ranks in batches of 12: 4 steps an epoch; the 5th from 1, and the last.
        assert [(e, s) for e, s, _ in run.steps(rank)] == [(1, 1), (2, 6), (2, 8)]
        assert run.lines(rank)[-1].startswith("Cleanup complete")
    losses = [[loss for _, _, loss in run.steps(rank)] for rank in (0, 1)]
    assert losses[0] != losses[1]  # each its own share


def check_records(run: Run, sample: Path) -> None:
    facts, summary = run.json_line("Run"), run.json_line("Summary")
    wanted = expected_index(sample / "annotations" / "instances_train2017.json")
    wanted_val = expected_index(sample / "annotations" / "instances_val2017.json")
    labelled, val = len(wanted[0]), len(wanted_val[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["started"])
    assert facts["images"] == labelled and facts["images_without_annotations"] == wanted[3]
    assert facts["padding"] == labelled % 2 and facts["val_images"] == val
    assert (facts["world_size"], facts["nodes"], facts["backend"]) == (2, 1, "gloo")
    assert len(facts["hosts"]) == len(facts["devices"]) == 2
    assert batch_of(facts) == (12, 1, 24)
    said = f"Run: 2 processes on 1 node, gloo, {facts['precision']}; 8 steps of 24 images; "
    assert (labelled, wanted[3]) == (95, 1)
    said += "95 have labels, 1 does not, 1 comes twice an epoch. "
    assert f"{said}Not resumed" in run.lines(0)
    assert facts["precision"] in ("fp32", "bf16")  # what auto chose, not the word auto
    assert (facts["image_size"], facts["workers"], facts["seed"]) == (40, 1, 0)
    assert (facts["max_steps"], facts["steps_per_epoch"], facts["start_step"]) == (8, 4, 0)
    assert facts["parameters"] == PARAMETERS
    assert summary["wire_bytes_per_step"] == 4 * PARAMETERS
    assert re.fullmatch(r"[0-9a-f]{12}", facts["picture_sizes"])
    assert facts["env"]["OMP_NUM_THREADS"] == "1" and facts["threads"] == 1
    logged = "NCCL_|GLOO_|OMP_|TORCH_NCCL_|TORCH_DIST_"
    assert all(re.match(logged, name) for name in facts["env"])
    for name in ("torch", "cuda", "nccl"):
        assert name in facts["versions"]
    for name in ("compile", "bucket_cap_mb", "lr", "weights", "num_epochs"):
        assert name in facts
    assert (summary["epochs"], summary["steps"]) == (2, 8)
    assert summary["replicas_identical"] is True
    assert re.fullmatch(r"[0-9a-f]{64}", summary["weights_sha256"])
    validations = re.findall(r"Epoch (\d) validation .* \| (\d+) images", run.out)
    assert validations == [("1", str(val)), ("2", str(val))]
    wall = float(re.search(r"\(([\d.]+)s\)$", run.lines(0)[-1])[1])
    assert 0 < summary["train_s"] < wall < run.seconds
    assert summary["img_per_s"] == pytest.approx(192 / summary["train_s"], rel=0.01)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    for times in (summary, *summary["ranks"]):
        parts = [times[f"{name}_ms"] for name in ("data", "compute", "exposed")]
        assert all(0 < part < times["step_ms"] for part in parts), times
        assert sum(parts) == pytest.approx(times["step_ms"]), times
    for name in ("step_ms", "data_ms", "compute_ms", "exposed_ms"):
        assert summary[name] == pytest.approx(np.mean([rank[name] for rank in summary["ranks"]]))
    times = [summary[f"{name}_ms"] for name in ("step", "data", "compute", "exposed")]
    said = "Summary: 2 epochs, 8 steps, {:.1f} img/s; a step of {:.0f} ms is {:.0f} data + "
    said += "{:.0f} compute + {:.0f} exposed communication; replicas identical: True"
    assert said.format(summary["img_per_s"], *times) in run.lines(0)
    for rank in (0, 1):
        first, second = map(float, re.findall(r"Avg loss: ([\d.]+)", "".join(run.lines(rank))))
        assert second < first


def test_torchrun_trains_on_two_ranks(small):
    """The real one: by default all other tests have a stand-in of it, or forked ranks."""
    run = run_demo([*small, *FAST, "--batch_size", 8, "--max_steps", 2, "--log_every", 1], nproc=2)
    for rank in (0, 1):
        assert [step for _, step, _ in run.steps(rank)] == [1, 2]
        assert run.lines(rank)[-1].startswith("Cleanup complete")
    facts, summary = run.json_line("Run"), run.json_line("Summary")
    assert (facts["launcher"], facts["world_size"], facts["nodes"]) == ("torchrun", 2, 1)
    assert summary["replicas_identical"] is True
    assert summary["wire_bytes_per_step"] == 4 * facts["parameters"] == 44_870_208


@LONG
def test_plain_python_trains(demo, small):
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 1]
    run = run_demo(argv, launcher="python", split=True)
    assert run.err == "" and run.json_line("Run")["world_size"] == 1
    assert run.lines()[-1].startswith("[CPU 0] Cleanup complete. Total wall time: ")


def test_help_says_what_each_option_is(demo):
    text = demo.run(["--help"]).out
    options = (
        "coco_image_path annotation_path val_image_path val_annotation_path image_size workers "
        "num_epochs batch_size global_batch_size accumulate_steps lr lr_scaling warmup_steps "
        "weights seed max_steps precision compile sync_bn device backend timeout bucket_cap_mb "
        "log_every checkpoint checkpoint_every resume"
    )
    blocks = {m[1]: m[0] for m in re.finditer(r"(?m)^  --(\w+)\b.*(\n {8,}.*)*", text)}
    assert {*options.split()} <= {*blocks}
    for name, block in blocks.items():
        assert len(block.split()) > 4, f"--{name} has no help"
    for name, default in {
        "image_size": "224",
        "num_epochs": "2",
        "batch_size": "64",
        "accumulate_steps": "1",
        "weights": "imagenet",
        "precision": "auto",
        "backend": "auto",
        "bucket_cap_mb": r"25(\.0)?",
        "log_every": "5",
        "lr": "0.001",
        "seed": "0",
    }.items():
        assert re.search(rf"default:\s+{default}\)", blocks[name]), blocks[name]
    for name, unit in {"timeout": "second", "bucket_cap_mb": "MiB", "image_size": "pixel"}.items():
        assert unit in blocks[name]


def test_importing_the_script_runs_nothing(demo):
    assert demo.imported == {"printed": "", "threads": 1, "group": False}


def test_script_fits_on_its_pages():
    source = SCRIPT.read_text()
    (fold,) = (i for i, line in enumerate(source.splitlines()) if line.startswith("# PART TWO: "))
    assert fold - 1 <= PART_ONE  # the banner begins one line earlier
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    assert len(functions) > 50
    sizes = {n.name: n.end_lineno - n.lineno + 1 for n in functions}
    assert {name: size for name, size in sizes.items() if size > 40} == {}


@LONG
def test_six_steps_stand_once_and_in_order_before_the_fold():
    marks = re.findall(r"# DDP (\d)/6: |^# (PART TWO): ", SCRIPT.read_text(), re.MULTILINE)
    assert ["".join(mark) for mark in marks] == [*"123456", "PART TWO"]
    assert len(re.findall(r"\bDDP \d/\d", SCRIPT.read_text())) == 6


@LONG
def test_script_imports_nothing_from_this_repository():
    tree = ast.parse(SCRIPT.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not any(n.level for n in froms)
    tops = {name.partition(".")[0] for name in {*names, *(n.module for n in froms)}}
    allowed = {*sys.stdlib_module_names, *shlex.split("numpy torch torchvision PIL pycocotools")}
    assert tops - allowed == set()


@LONG
def test_docstring_has_the_commands_as_one_types_them():
    text = re.sub(r"\s*\\\n\s*", " ", ast.get_docstring(ast.parse(SCRIPT.read_text())))
    commands = [line.split() for line in text.splitlines() if "torchrun --" in line]
    assert len(commands) == 3
    for command in commands:
        assert command[0] == "torchrun" and "demo_coco_resnet18.py" in command
    assert {"--nproc_per_node=1", "--standalone"} <= set(commands[0])
    assert {"--nproc_per_node=gpu", "--standalone"} <= set(commands[1])
    static = {"--nnodes=2", "--node_rank=0", "--nproc_per_node=2", "--rdzv_backend=static"}
    static |= {"--rdzv_endpoint=10.0.0.1:29500", "--rdzv_id=123"}
    assert static <= set(commands[2]) and "--node_rank=1" in text
