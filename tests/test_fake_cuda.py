"""What the script does on a GPU, as far as it can be seen without one.

A fake CUDA tensor has a shape, a type and a device, and no data: each operation checks that all of
its tensors are on one device. The backward pass and DDP need a real one, and autocast switches
itself off without: precision on a GPU is not run here.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import types

import pytest

from support.datasets import make_set
from support.forks import prepared, write
from support.processes import LONG, WITH_LONG

FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32")
IGNORED = -100  # label of a damaged image


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return make_set(tmp_path_factory.mktemp("data"), 40)


# --- What runs in forked processes -----------------------------------------------------------


def fake_step(demo, result, damaged):
    """The script's train_step on a GPU that is not there; writes the devices of what it makes.

    damaged: all images are, so that there is no loss. Fake labels do not know, and are told.
    """
    import numpy as np
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    class Told(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.any:
                return not damaged
            return function(*args, **(kwargs or {}))

    def scale(loss):
        found.append(str(loss.device))
        return types.SimpleNamespace(backward=lambda: None)  # which needs a real device

    found, from_numpy, fake = [], torch.from_numpy, FakeTensorMode()
    demo.MEAN, demo.STD = map(fake.from_tensor, (demo.MEAN, demo.STD))
    torch.from_numpy = lambda values: fake.from_tensor(from_numpy(values))
    nothing = types.SimpleNamespace(
        step=lambda *_: None, update=lambda: None, zero_grad=lambda: None, scale=scale
    )
    with fake:
        with torch.device("cuda"):
            model = demo.torchvision.models.resnet18(num_classes=80)
        model.no_sync = contextlib.nullcontext
        run = types.SimpleNamespace(
            args=argparse.Namespace(precision="fp32"),
            process=demo.Process(device=torch.device("cuda")),
            timer=types.SimpleNamespace(note_moment=lambda name: None),
            model=model,
            ddp=model,
            scaler=nothing,
            optimizer=nothing,
        )
        images, labels = torch.zeros(4, 3, 40, 40, dtype=torch.uint8), np.zeros(4, np.int64)
        with Told():
            loss = demo.train_step(run, 2 * [(images, labels)])
        logits = demo.forward(run, run.model, images)
    write(result, [*found, str(loss.device), str(logits.device), str(logits.dtype)])


def settings_of(demo, result, ranks):
    """What is left set in PyTorch by what the script says of precision and compiling."""
    import torch

    args = argparse.Namespace(precision="fp32", grad_compression="none")
    process = demo.Process(world_size=ranks)
    demo.complete_precision(args, process, ["fp32"] * ranks)
    args = argparse.Namespace(sync_bn=False, compile=True, batch_size=4)
    demo.adapt_model(args, process, torch.nn.Linear(1, 1))
    cudnn = torch.backends.cudnn
    tf32 = cudnn.allow_tf32, "tf32" in (cudnn.conv.fp32_precision, torch.backends.fp32_precision)
    write(result, [*tf32, torch._dynamo.config.optimize_ddp is True])


def bucket_bytes(demo, result):
    """Of DDP's buckets in the order in which they are sent, when it has arranged them."""

    def note(_, bucket):
        found.append(4 * bucket.buffer().numel())
        return demo.default_hooks.allreduce_hook(None, bucket)

    found, demo.compress_gradients = [], lambda args, ddp: ddp.register_comm_hook(None, note)
    run = prepared(demo)
    found.clear()
    images = demo.torch.zeros(4, 3, 40, 40, dtype=demo.torch.uint8)
    demo.train_step(run, [(images, demo.np.zeros(4, int))])
    write(result, found)


def lines_of(demo, result, given, gpus):
    """--log_every where some of the ranks have a GPU, and what --help says of it."""
    args = argparse.Namespace(log_every=given)
    demo.complete_lines(args, gpus)
    write(result, [args.log_every, demo.make_parser().format_help()])


# --- Where tensors are -----------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_keeps_to_the_gpu(demo, damaged):
    """Images, labels, mean, standard deviation, loss: a single one elsewhere raises an error."""
    found = demo.run(call=fake_step, damaged=damaged).result()
    cuda = "cuda:0"
    assert found == [cuda, cuda, cuda, cuda, "torch.float32"]


# --- What is set -----------------------------------------------------------------------------


@LONG
@pytest.mark.parametrize("ranks", [1, 2])
def test_settings_of_torch(demo, ranks):
    """TF32 is off and may be asked for: PyTorch's compiler does so. One process has nothing to
    send, so its graph stays whole.
    """
    found = demo.run(call=settings_of, ranks=ranks).result()
    assert found == [False, False, ranks == 2]


SIZES = {  # bytes of each bucket of the whole network, and of the small one
    "unset": ([9_605_440, 26_494_976, 8_769_792], [2_576_704, 2_490_880]),
    "25": ([29_016_384, 15_853_824], [5_067_584]),
}


@pytest.mark.parametrize("given", SIZES)
def test_buckets_are_ddps_own_unless_a_size_is_given(demo, data, given):
    """Its own: a small one first, and so a smaller one last, which nothing is left to hide."""
    argv = [*data, *FAST, "--timeout", 30]
    argv += [] if given == "unset" else ["--bucket_cap_mb", given]
    job = demo.run(argv, 2, call=bucket_bytes)
    assert job.result() == SIZES[given][not WITH_LONG]


@LONG
@pytest.mark.parametrize("size", ["unset", 25])
def test_resume_with_four_ranks_is_exact_with_any_buckets(demo, data, tmp_path, size):
    argv = [*data, *FAST, "--timeout", 60, "--batch_size", 2, "--log_every", 1]
    argv += [] if size == "unset" else ["--bucket_cap_mb", size]
    whole = demo.run([*argv, "--max_steps", 2], 4)
    argv += ["--checkpoint", tmp_path / "saved.pt", "--resume"]
    parts = [demo.run([*argv, "--max_steps", stop], 4) for stop in (1, 2)]
    (tmp_path / "saved.pt").unlink()
    for rank in range(4):
        assert [step for part in parts for step in part.steps(rank)] == whole.steps(rank)
    assert len({run.json_line("Summary")["weights_sha256"] for run in (whole, parts[-1])}) == 1


@pytest.mark.parametrize(
    ("given", "gpus", "steps"),
    [(None, [True, True], 20), (None, [True, False], 5), (None, [False], 5), (7, [True], 7)],
)
def test_lines_are_rarer_on_gpus(demo, given, gpus, steps):
    """The same on all ranks, as they compare their settings."""
    chosen, text = demo.run(call=lines_of, given=given, gpus=gpus).result()
    assert chosen == steps
    assert "unset: 5, on GPUs 20" in " ".join(text.split())
