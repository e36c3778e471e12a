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
from collections.abc import Callable, Iterator
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
    long,
    long_among,
    require,
    run_demo,
)

FAST = shlex.split("--weights none --image_size 40 --workers 0 --precision fp32 --timeout 30")
PART_ONE = 350  # lines, which a person reads in one sitting
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean, standard deviation of its pixels


# --- What runs in forked processes -----------------------------------------------------------


def watched(demo, result, names: str, look: Callable):
    """The script's main; writes what look(*arguments) says at each call of these functions of it,
    each time anew: a loader worker has a list of its own.
    """
    found = []

    def call(name, function, *arguments):
        found.append([name, look(*arguments)])
        write(result, found)
        return function(*arguments)

    for name in names.split():
        setattr(demo, name, functools.partial(call, name, getattr(demo, name)))
    run_to_the_end(demo)


def index_of(demo, result, path, categories=None):
    found = demo.read_image_list(path, categories)
    names = [os.fsdecode(name) for name in found.names.tolist()]
    write(result, [names, found.labels.tolist(), [*found.categories], found.unlabelled])


def shards(demo, result, epochs):
    """By epoch, the loader's samples in their order: [position, digest of the pixels]."""
    args, process = demo.parse_arguments(sys.argv[1:]), demo.Process()
    demo.read_environment(process)
    image_list = demo.read_image_list(args.annotation_path)
    loader = demo.make_loader(args, process, image_list, None)
    found = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        positions = [position for _, position in loader.sampler]
        images, labels = map(np.concatenate, zip(*loader, strict=True))
        assert (labels == image_list.labels[positions]).all()
        digests = [hashlib.sha256(image.tobytes()).hexdigest() for image in images]
        found.append([*zip(positions, digests, strict=True)])
    write(result, found)


def sixteen(ignored):
    """Images uint8, small because float64 is slow, and labels, -100 for the `ignored` ones."""
    import torch

    source = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8, generator=source)
    labels = torch.randint(0, 80, (16,), generator=source)
    labels[list(ignored)] = -100
    return images, labels


def plain_model(path):
    import torch
    from torchvision.models import resnet18

    model = resnet18(num_classes=80).eval()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def plainly_updated(weights, ignored, parts):
    """The model after two updates over the joined batch, by plain PyTorch: by the mean of the
    means of its micro-batches of `parts` images. One without labels counts as one of loss 0.
    """
    import torch
    from torchvision.transforms.functional import normalize

    model = plain_model(weights)
    images, labels = sixteen(ignored)
    images = normalize(images / 255, *IMAGENET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        micro_batches = list(zip(images.split(parts), labels.split(parts), strict=True))
        for some, theirs in micro_batches:
            if (used := theirs >= 0).any():
                loss = torch.nn.functional.cross_entropy(model(some[used]), theirs[used])
                (loss / len(micro_batches)).backward()
        optimizer.step()
    return model


def updates(demo, result, parts, plain_parts, ignored):
    """The same by the script, with the 16 images shared evenly among the ranks, of which a
    micro-batch has `parts`: names of weights that differ, and this rank's losses.

    Batch norm is in eval mode: in training mode it would see other batches. All is computed in
    float64: in float32 rounding moves some activation across a ReLU's edge, now and then.
    """
    import torch

    torch.set_default_dtype(torch.float64)
    demo.MEAN, demo.STD = demo.MEAN.double(), demo.STD.double()
    run = prepared(demo)
    run.ddp.eval()
    share = 16 // run.process.world_size
    own = slice(run.process.rank * share, (run.process.rank + 1) * share)
    images, labels = (values[own].split(parts) for values in sixteen(ignored))
    micro_batches = list(zip(images, (part.numpy() for part in labels), strict=True))
    # Adam divides by the gradient's own size, which makes rounding errors of tiny ones large.
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
    losses = [demo.train_step(run, micro_batches).item() for _ in range(2)]
    wanted = dict(plainly_updated(run.args.weights, ignored, plain_parts).named_parameters())
    found = dict(run.model.named_parameters())
    assert found.keys() == wanted.keys()
    # 0.01 times what gradients may differ by
    far = [n for n in found if not torch.allclose(found[n], wanted[n], rtol=0, atol=1e-7)]
    write(result, [far, losses])


def all_reduces(demo, result):
    """How many there are in a step of one micro-batch, and of two."""
    from torch.profiler import ProfilerActivity, profile

    run, found = prepared(demo), []
    batches = list(run.loader)[:2]
    for micro_batches in (batches[:1], batches):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            demo.train_step(run, micro_batches)
        events = [event for event in profiled.key_averages() if "all_reduce" in event.key]
        found.append(sum(event.count for event in events))
    write(result, found)


def train(demo, result, nudge=False):
    """Before each step and at the end: the digest of the model, and the learning rate."""
    import torch

    def look(run, *_):
        digest = hashlib.sha256()
        for value in run.model.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
        if nudge:
            with torch.no_grad():
                run.model.fc.bias[0] += 1e-3
        return [digest.hexdigest(), run.optimizer.param_groups[0]["lr"]]

    watched(demo, result, "train_step summarize", look)


def loaded(demo, result, file):
    """Whether this rank's weights, before the first step, are the file's: true by name."""
    import torch

    state = prepared(demo).model.state_dict()
    wanted = torch.load(file, weights_only=True)
    write(result, {name: torch.equal(value, state[name]) for name, value in wanted.items()})


def make_weights(demo, result, path, classes=80):
    import torch
    from torchvision.models import resnet18

    torch.manual_seed(7)
    torch.save(resnet18(num_classes=classes).state_dict(), path)


def ranking(demo, result, weights, folder, annotations):
    """Of each image by itself, the classes from the likeliest to the least likely."""
    import torch
    from torchvision.transforms.functional import normalize

    model = plain_model(weights)
    images, _ = validation_batch(demo, folder, demo.read_image_list(annotations), 40)
    with torch.inference_mode():
        scores = [model(image[None])[0] for image in normalize(images / 255, *IMAGENET)]
    write(result, [score.argsort(descending=True).tolist() for score in scores])


def validation(demo, result):
    demo.validate(prepared(demo), 1)


def load(demo, paths, size=40, epoch=1, seed=0):
    """What the script makes of image files: (images, a list: was each decoded?)."""
    args = argparse.Namespace(image_size=size, seed=seed)
    keys = [(epoch, position) for position in range(len(paths))]
    return demo.load_images(args, demo.Process(), keys, paths)


def run_record(demo, result):
    """What a run logs before its first step."""
    prepared(demo)


def each_decoded(demo, result, folder, by_pillow):
    """Of each image by its name: shape, mean colours.

    by_pillow: as of a torchvision without its decoders.
    """
    if by_pillow:
        del demo.torchvision.io.decode_image
    found = {}
    for path in Path(folder).iterdir():
        image = demo.decode(np.fromfile(path, np.uint8))
        found[path.name] = [list(image.shape), image.float().mean((1, 2)).tolist()]
    write(result, found)


def against_torchvision(demo, result, path):
    """The largest difference to what torchvision's transforms make of an image, in levels: in
    validation, and in training with several seeds.
    """
    import torch
    from torchvision.io import decode_image
    from torchvision.transforms import v2

    validating = v2.Compose([v2.Resize(64), v2.CenterCrop(56)])
    training = v2.Compose([v2.RandomResizedCrop(56), v2.RandomHorizontalFlip()])
    cases = [(validating, demo.VALIDATION, 0), *((training, 3, seed) for seed in range(20))]
    found = []
    for transform, epoch, seed in cases:
        torch.manual_seed(hash((seed, epoch, 0)) % 2**32)
        expected = transform(decode_image(path, "RGB")).int()
        ours, _ = load(demo, [path], 56, epoch, seed)
        assert ours[0].shape == expected.shape == (3, 56, 56)
        found.append(int((ours[0] - expected).abs().max()))
    write(result, found)


def workers(demo, result):
    """The number of loader workers, and of the batches that they have been asked for."""

    def look(run, *_):
        alive = demo.torch.multiprocessing.active_children()
        return [len(alive), run.loader._iterator._tasks_outstanding]

    watched(demo, result, "fix_bucket_order log_run train_step validate", look)


def graphs_by_step(demo, result):
    """How many graphs torch.compile has made; no code is made of them: it would take a minute."""
    import torch
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="eager")
    watched(demo, result, "finish_step summarize", lambda *_: counters["stats"]["unique_graphs"])


def threads_at_the_end(demo, result):
    """The script's main; how many threads Gloo has before its end and after main."""

    def count():
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                names.append(path.read_text())
        return sum("gloo" in name for name in names)

    found, destroy = [], demo.dist.destroy_process_group
    demo.dist.destroy_process_group = lambda: (found.append(count()), destroy())
    try:
        start(demo)
    finally:
        deadline = time.monotonic() + 2  # one that has been joined is listed a moment longer
        while count() and time.monotonic() < deadline:
            time.sleep(0.01)
        write(result, [*found, count()])


def step_times(demo, result, images, moments):
    """What the script's timer makes of a step's moments."""
    timer = demo.StepTimer(demo.Process())
    timer.unread = [(images, moments)]
    timer.read()
    assert not timer.unread
    write(result, timer.steps)


def computes_best(demo, result, best):
    """The precision that the script chooses on hardware that is fastest in `best`."""
    demo.fastest_precision = lambda _: best
    write(result, prepared(demo).args.precision)


def quotas(demo, result, folders):
    """The script's count of cores by quotas, of cgroups that are files like any other."""
    places = [(f"{folder}/proc/self/cgroup", f"{folder}/sys/fs/cgroup") for folder in folders]
    write(result, [demo.cores_by_quota(*place) for place in places])


def cores_within(demo, result, cgroup, places):
    """This process's cores, in a cgroup if one is named, in each of the places
    [launcher, processes on the node, cores that it is bound to].
    """
    if cgroup:
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
    """Kinds of layers that --sync_bn makes of the model."""
    model = demo.torchvision.models.resnet18(num_classes=80)
    demo.adapt_model(argparse.Namespace(sync_bn=True, compile=False), demo.Process(), model)
    write(result, Counter(type(layer).__name__ for layer in model.modules()))


def on_a_mac(demo, result):
    """The script's main with --device mps, as if this were a Mac: it computes on the CPU, DDP
    cannot be used, and the C library is not glibc.

    Writes how often the GPU was waited for, and whether all tensors have the usual layout.
    """
    import torch

    waits, usual = [], []
    complete_device, convolve = demo.complete_device, torch.nn.Conv2d.forward

    def device_that_is_here(args, process):
        complete_device(args, process)
        process.device, demo.Process.mps = torch.device("cpu"), True

    def look(layer, images):
        usual.append(images.is_contiguous() and layer.weight.is_contiguous())
        return convolve(layer, images)

    def no_library(_):
        raise OSError("no such library")

    torch.backends.mps.is_available = lambda: True
    torch.mps.synchronize = lambda: waits.append(1)
    torch.nn.Conv2d.forward = look
    demo.complete_device, demo.ctypes.CDLL = device_that_is_here, no_library
    demo.DistributedDataParallel = None
    run_to_the_end(demo)
    write(result, [len(waits), all(usual)])


def kept_sizes(demo, result, names):
    """Sizes in MiB of tensors whose memory stays here when they are gone."""
    import resource

    def page_faults(size):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        demo.torch.ones(size * 2**20, dtype=demo.torch.uint8)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def stays(size):
        # The first has to take it anew. So may some more: what is aligned does not fit where
        # another of its size has been, until two such places join.
        pages = size * 2**20 / resource.getpagesize()
        return any(page_faults(size) < pages / 4 for _ in range(20))

    watched(demo, result, names, lambda *_: [size for size in (24, 200) if stays(size)])


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


def test_first_means_first_in_the_file_and_labels_count_from_0(demo, tmp_path):
    content = instances(["b.jpg", "a.jpg", "c.jpg", "d.jpg"], [None] * 4, ids=[90, 7, 33])
    content["annotations"] = [
        {"id": 9, "image_id": 101, "category_id": 33, "iscrowd": 1},
        {"id": 3, "image_id": 100, "category_id": 90, "iscrowd": 0},
        {"id": 1, "image_id": 101, "category_id": 7, "iscrowd": 0},
        {"id": 2, "image_id": 103, "category_id": 7, "iscrowd": 0},
    ]
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(content))
    names, labels, categories, unlabelled = demo.run(call=index_of, path=str(path)).result()
    assert categories == [7, 33, 90]  # sorted, whatever the order in the file
    assert dict(zip(names, labels, strict=True)) == {"b.jpg": 2, "a.jpg": 1, "d.jpg": 0}
    assert unlabelled == 1
    ids = {"categories": [5, 7, 33, 90]}  # those of training, if it is for validation
    assert demo.run(call=index_of, path=str(path), **ids).result()[1] == [3, 2, 1]


def test_real_coco_trains_and_counts(demo, tiny_coco):
    argv = [*data_args(tiny_coco, val=True), *FAST, "--batch_size", 8, "--max_steps", 1]
    job = demo.run(argv, 2)
    facts = job.json_line("Run")
    assert (facts["images"], facts["images_without_annotations"]) == (49, 1)
    assert (facts["val_images"], facts["padding"]) == (48, 1)
    assert re.search(r"validation \| Top-1: .*% \| 48 images", job.out)


# --- Shards and pixels -----------------------------------------------------------------------


def samples(demo, argv, nproc=1, workers=0, seed=0, epochs=(1, 2)) -> list[list[list]]:
    """By rank and epoch: [position, digest of the pixels] in order."""
    argv = [*argv, *FAST, "--batch_size", 4, "--workers", workers, "--seed", seed]
    job = demo.run(argv, nproc, call=shards, torchrun=True, epochs=list(epochs))
    return [job.result(rank) for rank in range(nproc)]


@pytest.fixture(scope="module")
def one_rank(demo, small):
    return samples(demo, small)[0]


@pytest.mark.parametrize("nproc", [2, *long(3)])
def test_shards_are_disjoint_and_complete_and_change_by_epoch(demo, small, one_rank, nproc):
    found = samples(demo, small, nproc)
    for epoch in (0, 1):
        assert {len(rank[epoch]) for rank in found} == {-(-37 // nproc)}
        seen = Counter(position for rank in found for position, _ in rank[epoch])
        assert set(seen) == set(range(37))
        assert sum(seen.values()) - 37 == -37 % nproc  # the padding, and nothing else, is repeated
        assert max(seen.values()) == 2
        for rank in found:  # each sample looks as it does to a single process
            assert all(sample in one_rank[epoch] for sample in rank[epoch])
    orders = {tuple(position for position, _ in epoch) for rank in found for epoch in rank}
    assert len(orders) == 2 * nproc


def test_pixels_are_a_function_of_seed_epoch_and_sample(demo, small, one_rank):
    epochs = [dict(epoch) for epoch in (*one_rank, *samples(demo, small, seed=1, epochs=[2])[0])]
    assert len({tuple(order) for order in (range(37), *epochs)}) == 4  # each shuffled by itself
    for position in range(37):  # another crop in each epoch, and with another seed
        assert len({pixels[position] for pixels in epochs}) == 3
    assert len(set(epochs[0].values())) == 37
    assert samples(demo, small, workers=2)[0] == one_rank


# --- Gradients -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(demo, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "w.pt"
    demo.run(call=make_weights, path=str(path))
    return path


# Ranks, images in their micro-batches and in those of plain PyTorch, images without a label.
UPDATES = {
    "two ranks": (2, 8, 16, []),
    "accumulated": (1, 8, 16, []),
    # With 12 and 4 images each of the 4 has three times the weight of one of the 12.
    "shorter last micro-batch": (1, 12, 12, []),
    # The mean of the micro-batches' means is then the mean of all images with labels.
    "no label of one in each micro-batch": (2, 4, 16, [2, 5, 9, 14]),
    # What the others say arrives, halved by the mean, and on both ranks.
    "no label in a micro-batch": (1, 8, 8, [*range(8, 16)]),
    "no label on rank 1": (2, 8, 8, [*range(8, 16)]),
    "no label": (2, 4, 16, [*range(16)]),
}


@pytest.mark.parametrize("case", long_among(UPDATES, [*UPDATES][2:]))
def test_updates_are_those_of_the_larger_batch(demo, small, weights, case):
    """The mean of all ranks and micro-batches, and no NaN where there is no label."""
    nproc, parts, plain_parts, ignored = UPDATES[case]
    # Batch and image size are of the warm-up pass alone, which takes long in float64.
    argv = [*small, *FAST, "--weights", weights, "--batch_size", 1, "--image_size", 33]
    options = {"parts": parts, "plain_parts": plain_parts, "ignored": ignored}
    job = demo.run(argv, nproc, call=updates, **options)
    for rank in range(nproc):
        far, losses = job.result(rank)
        assert far == []
        unlabelled = {*range(16 // nproc * rank, 16 // nproc * (rank + 1))} <= {*ignored}
        assert all(loss == 0 if unlabelled else 1 < loss < 10 for loss in losses), losses


@LONG
def test_accumulation_on_two_ranks_sends_gradients_once(demo, small):
    job = demo.run([*small, *FAST, "--batch_size", 4], 2, call=all_reduces)
    one, two = job.result()
    assert one == two > 0


# --- Training --------------------------------------------------------------------------------


def weights_of(job: Job, rank: int = 0) -> list[str]:
    """Of `train`: digests before each step and at the end."""
    return [weights for _, (weights, _) in job.result(rank)]


def test_replicas_are_equal_after_training(demo, small):
    argv = [*small, *FAST, "--batch_size", 10, "--num_epochs", 1, "--lr", 0.01]
    job = demo.run(argv, 2, call=train)
    assert job.json_line("Summary")["replicas_identical"] is True
    first, second = weights_of(job, 0), weights_of(job, 1)
    assert first[0] == second[0]
    assert first[-1] == second[-1] != first[0]  # batch-norm statistics included


@LONG
def test_replicas_that_drift_apart_are_reported(demo, small):
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 2]
    job = demo.run(argv, 2, call=train, of_rank=lambda rank: {"options": {"nudge": rank == 1}})
    assert weights_of(job, 0)[-1] != weights_of(job, 1)[-1]
    assert job.json_line("Summary")["replicas_identical"] is False


@LONG
def test_first_weights_are_of_the_seed(demo, small):
    """That the same seed gives the same run: test_faults.py, where one is resumed."""
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 1]
    first, second = (demo.run([*argv, "--seed", seed], call=train) for seed in (3, 4))
    assert weights_of(first)[0] != weights_of(second)[0]


def assert_mean_loss(job: Job, rank: int, epoch: int, sizes: list[int]) -> str:
    """The line of an epoch, whose mean loss is that of its steps with so many images each."""
    losses = [loss for number, _, loss in job.steps(rank) if number == epoch]
    (line,) = (line for line in job.lines(rank) if line.startswith(f"Epoch {epoch} complete"))
    mean = float(re.search(r"Avg loss: ([\d.]+)", line)[1])
    assert mean == pytest.approx(np.average(losses, weights=sizes), abs=2e-4)
    return line


def test_max_steps_ends_an_epoch_whose_line_counts_each_image_once(demo, small):
    """37 images in batches of 13 are 3 steps an epoch, the last of 11: step 5 lies in the second
    of five epochs.
    """
    argv = [*small, *FAST, "--batch_size", 13, "--num_epochs", 5, "--max_steps", 5]
    job = demo.run([*argv, "--log_every", 1])
    steps = [(epoch, step) for epoch, step, _ in job.steps()]
    assert steps == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    facts = job.json_line("Run")
    assert (facts["steps_per_epoch"], facts["max_steps"]) == (3, 5)
    assert job.json_line("Summary")["steps"] == 5 and "Epoch 3" not in job.out
    for epoch, sizes in ((1, [13, 13, 11]), (2, [13, 13])):
        line = assert_mean_loss(job, 0, epoch, sizes)
        speed, seconds = map(float, re.search(r"([\d.]+) img/s \| ([\d.]+)s", line).groups())
        rounding = 0.005 * speed + 0.05 * seconds  # of an epoch that took 0.1 s much
        assert speed * seconds == pytest.approx(sum(sizes), abs=1.1 * rounding)


# Per process, too; and dashes are taken.
BATCHES = ["--global_batch_size 16 --accumulate_steps 2", "--batch-size 4 --accumulate-steps=2"]


@pytest.mark.parametrize("options", long_among(BATCHES, BATCHES[1:]))
def test_batch_is_shared_by_ranks_and_micro_batches(demo, small, options):
    argv = [*small, *FAST, *options.split()]
    facts = demo.run(argv, 2, call=run_record).json_line("Run")
    names = ("batch_size", "accumulate_steps", "global_batch_size", "steps_per_epoch")
    assert [facts[name] for name in names] == [4, 2, 16, 3]


@LONG
def test_learning_rate_is_scaled_and_warms_up(demo, small):
    """The linear rule keeps it where it is 64 images a step; warm-up rises to what comes out."""
    argv = [*small, *FAST, "--batch_size", 4, "--accumulate_steps", 4, "--max_steps", 3]
    argv += ["--lr_scaling", "linear", "--lr", 0.01, "--warmup_steps", 2]
    job = demo.run(argv, call=train)
    assert job.json_line("Run")["lr"] == 0.01 * 16 / 64
    assert "--lr 0.01 x 16 / 64 = 0.0025" in job.lines(0)
    rates = [rate for name, (_, rate) in job.result() if name == "train_step"]
    assert rates == pytest.approx([0.00125, 0.0025, 0.0025])


@pytest.mark.parametrize(
    ("best", "precision"),
    [(["bf16", "fp32"], "fp32"), (["fp16", "bf16"], "fp16"), (["bf16", "bf16"], "bf16")],
)
def test_auto_precision_is_what_all_ranks_do_well(demo, small, best, precision):
    argv = [*small, *FAST, "--precision", "auto", "--batch_size", 1, "--image_size", 33]
    own = [{"options": {"best": name}} for name in best]
    job = demo.run(argv, 2, call=computes_best, of_rank=lambda rank: own[rank])
    assert [job.result(rank) for rank in (0, 1)] == [precision] * 2
    line = f"[CPU 0] --precision auto is {precision}, which all ranks do (1 could do bf16)"
    told = [text for text in job.lines() if "--precision" in text]
    assert told == ([] if precision == "bf16" else [line])


def test_cores_are_counted_by_the_least_quota(demo, tmp_path):
    """Of all cgroups above a process the least quota counts."""
    folders = {case: tmp_path / str(n) for n, case in enumerate(CGROUPS)}
    wanted = [make_cgroups(folder, case) or math.inf for case, folder in folders.items()]
    assert demo.run(call=quotas, folders=[*map(str, folders.values())]).result() == wanted


def test_quota_of_a_real_cgroup_bounds_cores(demo, cgroup_of_one_core):
    places = [["python", 1, 0], ["torchrun", 2, 0], ["srun", 2, 1]]
    within, without = (
        demo.run(call=cores_within, cgroup=cgroup, places=places).result()
        for cgroup in (str(cgroup_of_one_core), None)
    )
    assert within == [1, 1, 1] and without[2] == 1
    assert without[0] > 1 or len(os.sched_getaffinity(0)) == 1


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (9, 8)])
def test_gpu_with_one_core_is_one_warning(demo, cores, workers):
    job = demo.run(call=gpu_with_cores, cores=cores)
    assert job.result() == workers
    told = [line for line in job.lines(0) if line.startswith("WARNING: one core for this process")]
    assert len(told) == (cores == 1) and all("--cpus-per-task" in line for line in told)


def test_sync_bn_changes_every_batch_norm(demo):
    """That it works is for GPUs to show: torchrun --nproc_per_node=2 ... --sync_bn."""
    kinds = demo.run(call=adapted).result()
    assert kinds["SyncBatchNorm"] == BATCH_NORMS and "BatchNorm2d" not in kinds


def test_run_on_a_mac_is_without_ddp(demo, with_val):
    """All but the device itself, which `--device mps` on a Mac would show."""
    argv = [*with_val, *FAST, "--batch_size", 8, "--max_steps", 2, "--log_every", 1]
    plain, mac = demo.run(argv), demo.run([*argv, "--device", "mps"], call=on_a_mac)
    waits, usual = mac.result()
    assert waits >= 2 * 5 and usual  # moments of a step
    assert "[MPS 0] One process on a Mac's GPU, without DDP, which has no backend" in mac.out
    assert mac.json_line("Run")["devices"][0].startswith("MPS of ")
    losses = [[loss for _, _, loss in job.steps()] for job in (plain, mac)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01) and len(losses[0]) == 2
    assert mac.json_line("Summary")["replicas_identical"] is True


def test_parts_of_a_step_are_told_by_its_moments(demo):
    """In seconds: data wait, exposed communication, step; and images."""
    moments = {"begin": 10.0, "waiting for data": 10.5, "data": 11.5}
    moments |= {"own gradients": 14.5, "averaged": 16.5, "end": 20.0}
    found = demo.run(call=step_times, images=4, moments=moments).result()
    assert found == [[1.0, 2.0, 10.0, 4]]


@pytest.fixture(scope="module")
def glibc() -> Iterator[ForkServer]:
    """A Python of its own, whose allocator has none of the tests' settings."""
    require("CS_GNU_LIBC_VERSION" in os.confstr_names, "mallopt is glibc's")
    with ForkServer(dict.fromkeys(MALLOC)) as server:
        yield server


@LONG
@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ("start_or_resume finish_step", [[], [], [], [24, 200]]),
        ("load_images", [[24]] * 3),  # what lives longer than a batch is there
    ],
    ids=["rank", "loader worker"],
)
def test_memory_is_kept_when_all_is_there_that_lives_longer_than_a_step(glibc, small, names, kept):
    """Of what comes before (weights, buckets, Adam's state) each has a mapping of its own. Else
    the kernel takes it back after each step, and gives it again page by page.
    """
    argv = [*small, *FAST, "--batch_size", 13, "--num_epochs", 1, "--workers", 1]
    found = glibc.run(argv, call=kept_sizes, names=names).result()
    assert [sizes for _, sizes in found] == kept


@pytest.mark.parametrize("kind", [*long("none", "powersgd"), "error"])
def test_threads_end_before_python(demo, small, kind):
    """One that lets go of a tensor while Python ends would abort the process."""
    argv = [*small, *FAST, "--batch_size", 4, "--max_steps", 4]
    no_checkpoint = ["--checkpoint", small[3], "--resume"]
    argv += no_checkpoint if kind == "error" else ["--grad_compression", kind]
    job = demo.run(argv, 2, expect=int(kind == "error"), call=threads_at_the_end)
    for rank in (0, 1):
        before, after = job.result(rank)
        assert before > 1 and not after


def test_one_set_of_workers_serves_training_and_validation(demo, with_val):
    """And they decode nothing before an epoch begins: the first ones could be of no use.

    NOTE: a fork beside a thread that just ran a backward pass has hung a worker.
    """
    argv = [*with_val, *FAST, "--workers", 2, "--batch_size", 10, "--num_epochs", 2]
    job = demo.run(argv, 2, call=workers)
    assert job.out.count("validation | ") == 2
    epoch = ["train_step", "train_step", "validate"]
    for rank in (0, 1):
        names, facts = zip(*job.result(rank), strict=True)
        assert [*names] == ["fix_bucket_order", "log_run", *epoch, *epoch]
        assert {count for count, _ in facts} == {2}
        assert facts[0][1] == facts[1][1] == 0


@LONG
def test_what_is_compiled_is_compiled_once(demo, with_val):
    """Not again for an epoch's short last batch, nor for validation."""
    argv = [*with_val, *FAST, "--compile", "--batch_size", 8, "--max_steps", 7]
    job = demo.run(argv, call=graphs_by_step)
    assert job.out.count("validation | ") == 2
    (graphs,) = {graphs for _, graphs in job.result()}
    assert graphs > 0


# --- Validation ------------------------------------------------------------------------------


# With one image two of the ranks have none.
@pytest.mark.parametrize(("count", "nproc"), [(7, 3), pytest.param(1, 3, marks=LONG)])
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
    job = demo.run([*argv, "--weights", weights, "--batch_size", 2], nproc, call=validation)
    right = 100 * place.count(0) / count
    assert f"validation | Top-1: {right:.2f}% | {count} images | " in job.out, job.out


# --- Weights ---------------------------------------------------------------------------------


def test_weights_that_only_rank_0_can_read_reach_rank_1(demo, small, weights, tmp_path):
    """Of other classes, or of ImageNet: test_classes.py."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    shutil.copy(weights, nodes[0])
    argv = [*small, *FAST, "--weights", weights.name]
    job = demo.run(
        argv, 2, call=loaded, file=str(weights), of_rank=lambda rank: {"cwd": nodes[rank]}
    )
    for rank in (0, 1):
        same = job.result(rank)
        assert len(same) == STATE_TENSORS and all(same.values())
    assert [*nodes[1].iterdir()] == []


# --- Damaged images --------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path) -> tuple[Path, list[str]]:
    """104 small images: one of them is less than 1 %."""
    return tmp_path / "images", [*make_set(tmp_path, 104), *FAST, "--batch_size", "26"]


def test_damaged_image_is_left_out_and_named(demo, many):
    folder, argv = many
    found = samples(demo, argv, 2)
    seen = [{s[0] for s in found[1 - epoch][epoch]} for epoch in (0, 1)]
    # Another rank meets it in the second epoch.
    damaged = min(seen[0] & seen[1])
    path = folder / numbered(104)[damaged]
    truncate(path)
    job = demo.run([*argv, "--num_epochs", 2, "--log_every", 1], 2)
    for rank in (0, 1):  # each that meets it says so, why, and on stdout
        (line,) = (line for line in job.lines(rank) if str(path) in line)
        assert re.fullmatch(rf"WARNING: image {path} is damaged, left out: .+", line), line
    assert job.json_line("Summary")["replicas_identical"] is True
    # The mean loss of the epoch is that of the other images.
    (at,) = (n for n, sample in enumerate(found[1][0]) if sample[0] == damaged)
    assert_mean_loss(job, 1, 1, [25 if n == at // 26 else 26 for n in range(2)])
    assert "nan" not in job.out.lower()


def brightness(demo, result, paths):
    """Of each image of one batch: was it decoded, how bright is it; bytes of memory used."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images, sound = load(demo, paths, epoch=demo.VALIDATION)
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    write(result, [sound, images.float().mean((1, 2, 3)).tolist(), used])


def test_each_kind_of_damage_is_named_and_leaves_the_others_of_a_batch(demo, tmp_path):
    names = ["a.jpg", "missing.jpg", "text.jpg", "short.jpg", "folder.jpg", "b.jpg"]
    paths = [str(tmp_path / name) for name in names]
    write_images(tmp_path, [names[0], names[3], names[5]])
    truncate(Path(paths[3]))
    Path(paths[2]).write_text("no picture")
    Path(paths[4]).mkdir()
    job = demo.run(call=brightness, paths=paths)
    sound, means, _ = job.result()
    assert sound == [True, False, False, False, False, True]
    assert [mean > 0 for mean in means] == sound  # a damaged one is black
    told = job.lines(0)
    assert len(told) == 4
    for line, path in zip(sorted(told), sorted(paths[1:5]), strict=True):
        assert line.startswith(f"WARNING: image {path} is damaged, left out: "), line
        assert " 0x" not in line


@pytest.mark.parametrize("by_pillow", [False, True])
def test_every_kind_of_picture_decodes_to_rgb(demo, tmp_path, by_pillow):
    """Pillow takes what torchvision will not, and both see the same colours."""
    rgb = Image.new("RGB", (40, 30), (200, 100, 50))
    kinds = {"RGB": "jpg bmp", "L": "jpg bmp", "CMYK": "jpg", "P": "gif png", "RGBA": "png"}
    names = [f"{mode}.{kind}" for mode, of_mode in kinds.items() for kind in of_mode.split()]
    for name in names:
        rgb.convert(name.partition(".")[0]).save(tmp_path / name)
    found = demo.run(call=each_decoded, folder=str(tmp_path), by_pillow=by_pillow).result()
    assert found.keys() == {*names}
    for name, (shape, colours) in found.items():
        assert shape == [3, 30, 40], name
        if name.startswith("RGB"):
            assert colours == pytest.approx([200, 100, 50], abs=1), name


@pytest.mark.parametrize("shape", [(90, 70), (70, 90), (300, 60)], ids=str)
def test_crops_are_those_of_torchvision(demo, tmp_path, shape):
    """In training to the last bit; in validation the same part of the image, seen as sharp."""
    picture = Image.linear_gradient("L").resize(shape)
    other = Image.radial_gradient("L").resize(shape)
    Image.merge("RGB", [picture, other, picture.rotate(90).resize(shape)]).save(tmp_path / "a.png")
    job = demo.run(call=against_torchvision, path=str(tmp_path / "a.png"))
    validating, *training = job.result()
    assert validating <= 8 and {*training} == {0}


# --- The script as a user starts it ----------------------------------------------------------

SECONDS = r"(\d+h )?(\d+m )?\d+\.\d\ds"
LINES = {
    "Run": r"Run \{.*\}",
    "Run in words": r"Run: .*",
    "Step": r"Epoch \d+ \| Step \d+ \| Loss: \d+\.\d{4} \| \d+\.\d img/s \| data \d+\.\d ms \| "
    r"step \d+\.\d ms \| ETA (\d+h )?(\d+m )?\d+s",
    "Epoch": rf"Epoch \d+ complete \| Avg loss: \d+\.\d{{4}} \| \d+\.\d img/s \| {SECONDS}",
    "Validation": rf"Epoch \d+ validation \| Top-1: \d+\.\d\d% \| 19 images \| {SECONDS} \| "
    r"baseline \d+\.\d\d%",
    "Summary": r"Summary \{.*\}",
    "Summary in words": r"Summary: .*",
    "Cleanup": rf"Cleanup complete\. Total wall time: {SECONDS} \(\d+\.\d{{3}}s\)",
}


@pytest.fixture(scope="module")
def whole(demo, sample) -> Run:
    """Two epochs on two ranks with loader workers."""
    argv = [*data_args(sample, val=True), "--weights", "none", "--image_size", 40]
    return demo.run([*argv, "--batch_size", 12, "--num_epochs", 2, "--workers", 1], 2)


def test_lines_of_a_whole_run(whole):
    kinds: dict[int, Counter] = {0: Counter(), 1: Counter()}
    for line in whole.lines():
        match = re.fullmatch(r"\[CPU ([01])\] (.*)", line)
        assert match, f"not a line of the log: {line!r}"
        kind = [name for name, form in LINES.items() if re.fullmatch(form, match[2])]
        assert kind, f"unknown line: {line!r}"
        kinds[int(match[1])].update(kind)
    steps = {"Step": 3, "Epoch": 2, "Cleanup": 1}
    assert kinds[1] == Counter(steps), "rank 1 alone writes what each rank does"
    once = {name: 1 for name in ("Run", "Run in words", "Summary", "Summary in words")}
    assert kinds[0] == Counter(steps | once | {"Validation": 2})
    for rank in (0, 1):
        # 95 images over 2 ranks in batches of 12: 4 steps an epoch; the 5th from 1, and the last.
        assert [(e, s) for e, s, _ in whole.steps(rank)] == [(1, 1), (2, 6), (2, 8)]
        assert whole.lines(rank)[-1].startswith("Cleanup complete")
        first, second = map(float, re.findall(r"Avg loss: ([\d.]+)", "".join(whole.lines(rank))))
        assert second < first
    assert whole.steps(0)[0] != whole.steps(1)[0]  # each its own share


def test_run_record_of_a_whole_run(whole):
    """That none of its fields is missing: test_records.py."""
    facts = whole.json_line("Run")
    wanted = {"images": 95, "images_without_annotations": 1, "padding": 1, "val_images": 19}
    wanted |= {"world_size": 2, "nodes": 1, "backend": "gloo", "threads": 1, "workers": 1}
    wanted |= {"batch_size": 12, "accumulate_steps": 1, "global_batch_size": 24, "seed": 0}
    wanted |= {"image_size": 40, "max_steps": 8, "steps_per_epoch": 4, "start_step": 0}
    wanted |= {"parameters": PARAMETERS}
    assert {name: facts[name] for name in wanted} == wanted
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["started"])
    assert len(facts["hosts"]) == len(facts["devices"]) == 2
    assert facts["precision"] in ("fp32", "bf16")  # what auto chose, not the word auto
    said = f"Run: 2 processes on 1 node, gloo, {facts['precision']}; 8 steps of 24 images; "
    said += "95 have labels, 1 does not, 1 comes twice an epoch. Not resumed"
    assert said in whole.lines(0)
    assert facts["env"]["OMP_NUM_THREADS"] == "1"
    logged = "NCCL_|GLOO_|OMP_|TORCH_NCCL_|TORCH_DIST_"
    assert all(re.match(logged, name) for name in facts["env"])


def test_summary_of_a_whole_run(whole):
    """Its parts add up: test_interconnect.py."""
    summary = whole.json_line("Summary")
    assert (summary["epochs"], summary["steps"], summary["replicas_identical"]) == (2, 8, True)
    assert summary["wire_bytes_per_step"] == 4 * PARAMETERS
    wall = float(re.search(r"\(([\d.]+)s\)$", whole.lines(0)[-1])[1])
    assert 0 < summary["train_s"] < wall < whole.seconds
    assert summary["img_per_s"] == pytest.approx(192 / summary["train_s"], rel=0.01)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    names = ("step_ms", "data_ms", "compute_ms", "exposed_ms")
    for name in names:
        assert all(rank[name] > 0 for rank in summary["ranks"]), summary
        assert summary[name] == pytest.approx(np.mean([rank[name] for rank in summary["ranks"]]))
    said = "Summary: 2 epochs, 8 steps, {:.1f} img/s; a step of {:.0f} ms is {:.0f} data + "
    said += "{:.0f} compute + {:.0f} exposed communication; replicas identical: True"
    figures = [summary[name] for name in ("img_per_s", *names)]
    assert said.format(*figures) in whole.lines(0)


@pytest.mark.parametrize(
    ("launcher", "nproc"), [("torchrun", 2), pytest.param("python", 1, marks=LONG)]
)
def test_whole_network_trains_as_a_user_starts_it(small, launcher, nproc):
    """The real torchrun: by default all other tests have a stand-in of it, or forked ranks.

    And a worker, which ends when nothing knows its loader any more, a hook of DDP's included.
    """
    argv = [*small, *FAST, "--batch_size", 8, "--max_steps", 2, "--log_every", 1]
    run = run_demo([*argv, "--workers", 1], nproc, launcher=launcher, split=True)
    assert run.err == ""  # no warning
    for rank in range(nproc):
        assert [step for _, step, _ in run.steps(rank)] == [1, 2]
        assert run.lines(rank)[-1].startswith("Cleanup complete. Total wall time: ")
    facts, summary = run.json_line("Run"), run.json_line("Summary")
    assert (facts["launcher"], facts["world_size"], facts["nodes"]) == (launcher, nproc, 1)
    assert summary["replicas_identical"] is True
    assert summary["wire_bytes_per_step"] == 4 * facts["parameters"] == 44_870_208


def test_help_has_meaning_unit_and_default(demo):
    """Of all options: docs/options.md, which test_pages.py holds against the parser."""
    text = " ".join(demo.run(["--help"]).out.split())
    assert "seconds until a silent peer counts as lost (default: 300)" in text


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
