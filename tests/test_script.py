"""The script's parts: the machine, gradients, times, errors, log lines, options and meeting."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from support import forks
from support.datasets import OPTIONS, arguments, image_list, make_set
from support.forks import changed, run_forked
from support.launchers import FAST
from support.processes import SCRIPT, Run, run_demo

CPU, CUDA, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))


@pytest.fixture
def alone(demo, monkeypatch) -> ModuleType:
    """The script in one process, which has joined no group."""
    monkeypatch.setattr(demo, "all_gather", lambda value: [value])
    monkeypatch.setattr(demo, "all_reduce_max", lambda *values: [*values])
    return demo


# --- The machine -------------------------------------------------------------------------------


def test_precision_and_kernels_are_those_of_the_hardware(demo, monkeypatch):
    for has_bf16, capability, expected in (
        (True, (8, 0), "bf16"),
        (False, (7, 0), "fp16"),
        (False, (6, 1), "fp32"),
    ):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda own=has_bf16, **_: own)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=capability: own)
        assert demo.fast_precision(None, demo.ProcessInfo(device=CUDA)) == expected
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    demo.prepare_hardware(arguments(demo), demo.ProcessInfo())
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.slow
def test_a_cpu_without_bf16_instructions_trains_in_fp32(tmp_path):
    """Here they are hidden from PyTorch's libraries."""
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    words = [*make_set(tmp_path, 8), *FAST, "--max_steps", 1, "--precision", "auto"]
    run = run_demo(words, launcher="python", env=env)
    assert run.json_line("Run")["precision"] == "fp32"


def test_a_run_that_is_resumed_keeps_its_precision(alone, monkeypatch):
    monkeypatch.setattr(alone, "fast_precision", lambda *_: "bf16")
    for checkpoint, expected in ((None, "bf16"), ({"settings": {"--precision": "fp32"}}, "fp32")):
        args = arguments(alone, "--precision", "auto")
        alone.fill_in_arguments(args, alone.ProcessInfo(), 10, checkpoint)
        assert args.precision == expected


def test_workers_and_the_distance_of_log_lines_depend_on_the_machine(alone, monkeypatch):
    for device, cores, options, workers, log_every in (
        (CPU, 8, [], 1, 5),
        (CUDA, 1, [], 1, 50),
        (CUDA, 4, [], 3, 50),
        (CUDA, 5, [], 3, 50),
        (CUDA, 64, [], 16, 50),
        (CUDA, 64, ["--workers", 9, "--log_every", 3], 9, 3),
    ):
        monkeypatch.setattr(alone, "set_threads", lambda _, own=cores: own)
        args = arguments(alone, "--precision", "fp32", *options)
        args.workers = args.workers or None
        alone.fill_in_arguments(args, alone.ProcessInfo(device=device), 10)
        assert (args.workers, args.log_every) == (workers, log_every), (device, cores)


def test_compression_is_refused_where_ddp_or_pytorch_lacks_it(alone, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    for options, line in (
        (["--device", "mps", "--grad_compression", "fp16"], "--device mps does not use"),
        (["--grad_compression", "bf16"], "needs a PyTorch with CUDA: give fp16"),
    ):
        with pytest.raises(alone.UserError, match=line):
            alone.fill_in_arguments(arguments(alone, *options), alone.ProcessInfo(), 8)


def test_each_process_takes_the_gpu_of_its_local_rank(demo, monkeypatch):
    """One that is shown a single GPU takes that."""
    chosen = []
    monkeypatch.setattr(demo, "choose_backend", lambda *_: "gloo")
    monkeypatch.setattr(demo, "prepare_hardware", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(demo.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(demo.dist, "all_reduce", lambda *_: None)
    for gpus in (4, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=gpus: own)
        for local_rank in (0, 1):
            process = demo.ProcessInfo(rank=4 + local_rank, world_size=8, local_rank=local_rank)
            demo.join_process_group(arguments(demo), process)
            assert process.device == chosen[-1]
    assert [device.index for device in chosen] == [0, 1, 0, 0]


def test_only_processes_that_see_one_gpu_each_may_outnumber_gpus(demo, monkeypatch):
    """As srun and mpirun may show them, or torchrun --virtual-local-rank."""
    monkeypatch.setattr(demo, "usable_gpus", lambda _: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    places = {name: demo.ProcessInfo(name, local_world_size=4) for name in ("srun", "torchrun")}
    assert demo.choose_backend(arguments(demo), places["srun"]) == "nccl"
    with pytest.raises(demo.UserError, match="4 processes for 1 GPU"):
        demo.choose_backend(arguments(demo), places["torchrun"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert demo.choose_backend(arguments(demo), places["torchrun"]) == "nccl"


def test_what_ranks_exchange_and_log_names_the_device(demo):
    """NCCL and Gloo do not take each other's tensors. A line has the rank, not a GPU's number."""
    gpu = torch.device("cuda", 1)
    places = [demo.ProcessInfo(device=gpu, backend=name) for name in ("nccl", "gloo")]
    assert [place.exchange_device for place in places] == [gpu, CPU]
    names = [demo.ProcessInfo(rank=3, device=device).name for device in (gpu, CPU, MPS)]
    assert names == ["[GPU 3]", "[CPU 3]", "[MPS 3]"]


# Each rank's node and cores, and the cores that each of them gets.
ON_NODES = {
    "torchrun": ([("a", [0, 1, 2, 3])] * 2 + [("b", [0, 1, 2, 3])] * 2, [2, 2, 2, 2]),
    "bound": ([("a", [0, 1]), ("a", [2, 3])], [2, 2]),
    "more ranks than cores": ([("a", [0])] * 2, [1, 1]),
    "nodes of one name": ([("localhost", [0, 1, 2, 3])] * 4, [2, 2, 2, 2]),
}


@pytest.mark.parametrize(("ranks", "expected"), ON_NODES.values(), ids=ON_NODES)
def test_ranks_that_have_the_same_cores_share_them(demo, monkeypatch, ranks, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # PyTorch's threads stay as they are
    monkeypatch.setattr(demo, "cpu_quota", lambda: sys.maxsize)
    monkeypatch.setattr(demo, "all_gather", lambda value: ranks)
    place, found = demo.ProcessInfo(local_world_size=2), []
    for host, cores in ranks:
        own = {*cores}
        monkeypatch.setattr(demo.os, "sched_getaffinity", lambda _, own=own: own, raising=False)
        monkeypatch.setattr(demo.socket, "gethostname", lambda own=host: own)
        found.append(demo.set_threads(place))
    assert found == expected
    monkeypatch.setattr(demo, "cpu_quota", lambda: 2)
    assert demo.set_threads(place) == 1


# --- Gradients ---------------------------------------------------------------------------------

ONE_STEP = Path(forks.__file__).with_name("one_step.py").read_text()
REFERENCE = (1, "--batch_size 16")


@pytest.fixture(scope="module")
def one_step(tmp_path_factory) -> Callable[..., tuple[Run, dict]]:
    """Of a step of SGD with a learning rate of 1: its run; and what it took from the weights, and
    which of DDP's buckets were sent.
    """
    folder = tmp_path_factory.mktemp("one_step")
    program = changed(folder / "one_step.py", ONE_STEP)

    @functools.cache
    def step(ranks: int, options: str) -> tuple[Run, dict]:
        path = folder / f"{ranks} {options}.pt"
        words = [*OPTIONS, *FAST, "--num_epochs", 1, "--lr", 1, *options.split()]
        (run,) = run_forked([(ranks, [path, *words])], program=program)
        return run, torch.load(path)

    return step


def loss_before(run: Run, rank: int = 0) -> float:
    """Of a rank's own images, with the first weights."""
    return float(re.search(rf"\[CPU {rank}\] LOSS (.*)", run.out)[1])


def assert_equal_gradients(found: dict, expected: dict, factor: float = 1) -> None:
    for name, values in expected["gradients"].items():
        difference = (found["gradients"][name] - factor * values).abs().max()
        assert difference <= 1e-3 * factor * values.abs().max(), name


@pytest.mark.parametrize(
    "options",
    [
        "--batch_size 8",
        "--batch_size 4 --accumulate_steps 2",
        "--batch_size 3 --accumulate_steps 3 --bucket_cap_mb 5",
    ],
)
def test_gradients_of_two_ranks_are_those_of_twice_the_batch(options, one_step):
    """Each bucket of them is sent once, and each rank logs the loss of its own images. The last
    micro-batch may be shorter.
    """
    _, expected = one_step(*REFERENCE)
    run, found = one_step(2, options)
    assert sorted(found["buckets"]) == list(range(len(found["buckets"])))
    assert (found["cap"] == 5 * 2**20) == ("bucket" in options)
    assert_equal_gradients(found, expected)
    losses = [loss_before(run, rank) for rank in (0, 1)]
    assert losses[0] != losses[1]
    for rank, loss in enumerate(losses):
        assert run.steps(rank) == [(1, 1, pytest.approx(loss, abs=2e-4))]


@pytest.mark.parametrize(
    ("options", "factor"),
    [("--warmup_steps 2", 1 / 2), ("--accumulate_steps 4 --lr_scaling linear", 16 / 64)],
)
def test_learning_rate_warms_up_and_is_scaled(options, factor, one_step):
    """SGD's step is the gradient times the learning rate. It is scaled by the images of a step."""
    _, expected = one_step(*REFERENCE)
    _, found = one_step(1, f"--global_batch_size 16 {options}")
    assert_equal_gradients(found, expected, factor)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_compressed_gradients_are_rounded_to_two_bytes(one_step, name):
    """Here of a model with other first weights, by its seed."""
    run, found = one_step(1, f"--batch_size 16 --seed 1 --grad_compression {name}")

    def are_rounded(to: torch.dtype) -> bool:
        pairs = ((values, values.to(to).float()) for values in found["gradients"].values())
        return all(torch.allclose(*pair, rtol=0, atol=2e-7) for pair in pairs)

    assert are_rounded({"bf16": torch.bfloat16, "fp16": torch.float16}[name])
    assert are_rounded(torch.bfloat16) == (name == "bf16")
    assert loss_before(run) != loss_before(one_step(*REFERENCE)[0])


# --- On a GPU that is not there ----------------------------------------------------------------


class Copies(torch.overrides.TorchFunctionMode):
    """Notes copies to another device. What waits for a GPU is an error."""

    def __init__(self) -> None:
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.to and args[1:] and args[0].device != args[1]:
            self.made.append((str(args[1]), kwargs.get("non_blocking")))
        assert function not in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item)
        return function(*args, **kwargs)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.skipif(
    torch.__version__ < "2.11", reason="fake tensors of a GPU need one before 2.11"
)
def test_steps_wait_for_the_gpu_at_log_lines_alone(demo, monkeypatch, name, dtype):
    """In every fifth step, by fake tensors, which have a device and no data: each operation checks
    that all of its tensors are on one device. Backward and DDP need a real one.
    """
    args = arguments(demo, "--precision", name, "--accumulate_steps", 2, "--batch_size", 4)
    args.log_every, args.steps_per_epoch, args.max_steps = 5, 12, 99
    gpu, cuda, inputs, logged = torch.device("cuda", 0), MagicMock(), [], []
    for function in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, function, getattr(cuda, function))
    computing = cuda.current_stream.return_value
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda own, other: cuda.record(other))
    monkeypatch.setattr(demo.torch, "autocast", cuda.autocast)
    monkeypatch.setattr(demo, "stop_together", lambda *_: None)
    monkeypatch.setattr(demo, "log_epoch", lambda *_: None)

    def log_due_line(found):
        """A line is written in the step after its own, when the GPU has another to compute."""
        if found.due_line:
            logged.append((found.due_line.step, found.step))
            found.due_line = None

    monkeypatch.setattr(demo, "log_due_line", log_due_line)
    training = MagicMock(args=args, step=0, agree_at_step=99, profiler=None, due_line=None)
    training.process = demo.ProcessInfo(device=gpu)
    loader = MagicMock()
    loader.sampler.__len__.return_value = 24 * 4
    with torch._subclasses.FakeTensorMode(), Copies() as copies:
        with gpu:
            model = demo.torchvision.models.resnet18(num_classes=80)
        model.no_sync = MagicMock()
        model.conv1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        training.model = training.ddp = model
        training.mean, training.std = (torch.ones(3, 1, 1, device=gpu) for _ in range(2))
        batch = torch.zeros(4, 40, 40, 3, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        loader.__iter__.return_value = iter([batch] * 24)
        demo.train_one_epoch(training, loader, 1)
    assert logged == [(1, 2), (6, 7), (11, 12)]
    assert computing.wait_stream.call_args_list == [call(cuda.Stream.return_value)] * 24
    assert cuda.record.call_args_list == [call(computing)] * 2 * 24
    losses = [scaled.args[0] for scaled in training.scaler.scale.call_args_list]
    assert len(losses) == len(inputs) == 24
    assert {tensor.device for tensor in [*losses, *inputs, training.loss_sum]} == {gpu}
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in inputs)
    # Images and labels to the GPU, and losses, for lines.
    assert sorted(copies.made) == [("cpu", True)] * 3 + [("cuda:0", True)] * 2 * 24
    assert cuda.autocast.call_args_list == [call("cuda", dtype=dtype, enabled=True)] * 24


# --- Time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "peak"), [(CUDA, 3 * 2**30), (CPU, None)])
def test_the_summary_leaves_the_first_steps_out(demo, monkeypatch, device, peak, capfd):
    """Of the rank with the most. The other one has 1 GiB, and waits a second longer."""

    def of_two(own):
        other = own | {"peak": own["peak"] and 2**30, "exposed": [2] * len(own["exposed"])}
        return [other, own]

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(demo, "all_gather", of_two)
    args = arguments(demo, "--grad_compression", "fp16" if peak else "none")
    training = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1), step=103)
    training.process = demo.ProcessInfo(device=device, world_size=2)
    training.timer = demo.StepTimer(
        demo.ProcessInfo(world_size=2), next(training.model.parameters())
    )
    measured = [(3, 1, 1)] * 98 + [(4, 1, 1), (2, 1, 1)]
    for seconds, data, exposed in [(99, 9, 9)] * 3 + measured:
        marks = {"wait for data": [0], "data arrived": [data], "own gradients": [0]}
        marks |= {"begin": [0], "gradients averaged": [exposed], "end": [seconds]}
        training.timer.unread.append((marks, 2, 4))
    demo.log_summary(training)
    record, text = capfd.readouterr().out.splitlines()
    summary = json.loads(record.partition("Summary ")[2])
    assert summary["peak_gpu_bytes"] == peak
    parts = [summary[f"{name}_ms"] for name in ("data", "compute", "exposed", "step")]
    assert parts == [1000, 1000, 1000, 3000] and summary["measured_steps"] == 100
    assert summary["img_per_s"] == pytest.approx(2 * 4 / 3)
    assert (summary["median_step_ms"], summary["slowest_of_100_step_ms"]) == (3000, 4000)
    assert (summary["link_ms"], summary["wait_ms"]) == (1000, 500)
    assert summary["cpu_ms"] == 2000
    assert summary["wire_bytes_per_step"] == 2 * (2 if peak else 4)
    assert ("; at most 3.00 GiB of a GPU's memory; replicas" in text) == (device == CUDA)
    assert text.endswith("replicas identical: True")


def test_parts_of_a_step_are_told_by_its_moments(demo):
    """Of two micro-batches both wait for data, and the last one's gradients are sent."""
    timer = demo.StepTimer(demo.ProcessInfo(world_size=2), torch.ones(1, requires_grad=True))
    marks = {"begin": [0], "wait for data": [1, 7], "data arrived": [3, 8]}
    marks |= {"own gradients": [5, 11], "gradients averaged": [15], "end": [20]}
    timer.unread.append((marks, 7, 4))
    timer.read()
    assert [*timer.times] == [demo.StepTime(data=3, exposed=4, whole=20, images=4, cpu=7)]
    assert not timer.unread


def test_times_of_1000_steps_are_kept(demo):
    """Own gradients are noted when the first layer's are ready."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    timer = demo.StepTimer(demo.ProcessInfo(world_size=2), next(model.parameters()))
    for count, kept in ((3, 3), (1, 1), (1500, 1000)):
        for _ in range(count):
            timer.mark("wait for data")
            timer.mark("data arrived")
            model[1](torch.ones(1)).sum().backward()
            assert "own gradients" not in timer.marks
            model(torch.ones(1)).sum().backward()
            assert "own gradients" in timer.marks
            timer.mark("gradients averaged")
            timer.end_step(4)
        timer.read()
        assert len(timer.times) == kept
    assert len(timer.new) == 1000 and timer.made == 1504


# --- Between steps -----------------------------------------------------------------------------


def test_ranks_agree_every_50_steps_or_once_a_second_of_the_slowest(demo, monkeypatch):
    training = SimpleNamespace(process=demo.ProcessInfo(), loss_sum=0.0, step=9, interval=1)
    found = []
    for slowest in [1e-4] * 8 + [0.1]:
        monkeypatch.setattr(demo, "all_reduce_max", lambda a, b, own: [a, b, max(own, slowest)])  # noqa: B023
        assert demo.agree(training, 1e-4) == 0
        found.append(training.interval)
        assert training.agree_at_step == 9 + training.interval
    assert found == [2, 4, 8, 16, 32, 50, 50, 50, 10]


def test_weights_that_are_not_finite_are_not_saved(alone, tmp_path):
    args = arguments(alone, "--checkpoint", tmp_path / "c.pt")
    training = SimpleNamespace(args=args, process=alone.ProcessInfo(), step=5)
    training.model = torch.nn.Linear(1, 1)
    training.model.bias.data[0] = float("inf")
    with pytest.raises(alone.UserError, match="weights not finite after step 5"):
        alone.save_checkpoint(training)


def test_nodes_are_counted_where_each_process_has_local_rank_0(demo, monkeypatch):
    """As torchrun --virtual-local-rank has it."""
    monkeypatch.setattr(demo, "all_gather", lambda value: [value] * 4)
    for on_each, nodes in ((2, 2), (4, 1)):
        process = demo.ProcessInfo(world_size=4, local_world_size=on_each)
        assert demo.facts_of_run(arguments(demo), process, [])["nodes"] == nodes


def test_a_line_has_the_times_since_the_line_before(demo):
    timer = demo.StepTimer(demo.ProcessInfo(), torch.ones(1, requires_grad=True))
    for count in (2, 1):
        for _ in range(count):
            timer.mark("wait for data")
            timer.mark("data arrived")
            timer.end_step(4)
        assert len(timer.since_last_line()) == count


def test_a_resumed_run_with_too_few_steps_for_a_trace_says_so(alone, capfd, tmp_path):
    args = arguments(alone, "--profile", tmp_path / "none")
    training = SimpleNamespace(args=args, process=alone.ProcessInfo(), step=5, profiler=None)
    args.max_steps = 14
    alone.start_profiler(training)
    assert "WARNING: no --profile: it needs 10 steps, and 9 are left" in capfd.readouterr().out
    assert training.profiler is None and not [*tmp_path.iterdir()]


def test_the_timer_of_a_start_ends_with_it(demo, monkeypatch):
    """It would end a training that takes longer."""
    ended = []
    monkeypatch.setattr(demo, "end_process", lambda *_: ended.append("late"))
    for seconds, expected in ((0, []), (0.3, ["late"])):
        with demo.connecting_ranks(SimpleNamespace(timeout=-4.9), demo.ProcessInfo()):
            time.sleep(seconds)
        time.sleep(0.3)
        assert ended == expected


def test_a_time_left_of_centuries_is_no_number_of_hours(demo, capfd):
    timer = SimpleNamespace(since_last_line=lambda: [demo.StepTime(0, 0, 2, 8)])
    line = demo.DueLine(1, 5, torch.zeros(()), None)
    for steps, left in ((10, "10s"), (10**9, "over 100 days")):
        demo.log_step(demo.ProcessInfo(), timer, line, steps)
        assert capfd.readouterr().out.endswith(f"| ETA {left}\n")


def test_a_folder_without_rename_is_refused_at_the_start(alone, monkeypatch, tmp_path):
    """As on some mounts of object stores."""

    def fail(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", fail)
    args = arguments(alone, "--checkpoint", tmp_path / "c.pt")
    with pytest.raises(alone.UserError, match="cannot be written: Operation not permitted"):
        alone.check_checkpoint(args, alone.ProcessInfo())
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_older_one(demo, monkeypatch, tmp_path):
    """So that one of both is whole after a power failure."""
    calls = MagicMock()
    monkeypatch.setattr(demo, "settings_of", lambda _: {})
    monkeypatch.setattr(demo.os, "fsync", calls.fsync)
    monkeypatch.setattr(demo.os, "replace", calls.replace)
    state = SimpleNamespace(state_dict=dict)
    training = SimpleNamespace(model=state, optimizer=state, scaler=state, step=5)
    training.train_set = SimpleNamespace(categories={})
    demo.write_checkpoint(training, tmp_path / "c.pt")
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]


def test_adams_averages_take_the_layout_of_their_weights(alone, monkeypatch):
    """A fused step reads both by position, and a Mac's GPU saves them in another layout."""
    monkeypatch.setattr(alone, "settings_of", lambda _: {})
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    averages = state["optimizer"]["state"][0]
    averages |= {name: value.contiguous() for name, value in averages.items()}
    training = MagicMock(model=model, optimizer=optimizer)
    alone.load_checkpoint(training, state | {"scaler": {}, "settings": {}})
    for name in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[model.weight][name].stride() == model.weight.stride()
        torch.testing.assert_close(optimizer.state[model.weight][name], averages[name])


def test_nodes_with_other_versions_of_pytorch_are_refused(alone, monkeypatch):
    monkeypatch.setattr(alone, "from_rank_0", lambda read: read() | {"PyTorch": "2.6.0"})
    line = f"PyTorch is {torch.__version__} here, but 2.6.0 on rank 0"
    with pytest.raises(alone.UserError, match=re.escape(line)):
        alone.check_settings(arguments(alone))


# --- Errors ------------------------------------------------------------------------------------

ENDS = [  # an error, and the class of what ends the run
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "LoneUserError"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), "LoneUserError"),
    (MemoryError(), "LoneUserError"),
    (RuntimeError("Application timeout caused pair closure"), "PeerLost"),
    (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection reset"), "PeerLost"),
    (torch.distributed.DistBackendError("NCCL error"), "PeerLost"),
    (RuntimeError("anything else"), "RuntimeError"),
]


@pytest.mark.parametrize(("error", "kind"), ENDS)
def test_errors_are_told_apart_by_who_can_help(demo, error, kind):
    """A full memory would be full again; a lost rank may come back; the rest is this rank's."""
    found = demo.classified(error)
    assert type(found).__name__ == kind
    assert ("--batch_size" in str(found)) == (kind == "LoneUserError")


def test_full_memory_and_a_small_dev_shm_have_their_remedy(demo, capfd):
    for kind in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(kind), demo.as_user_error("c.pt is not one of this demo"):
            raise kind("out of memory")
    error = RuntimeError("This might be caused by insufficient shared memory (shm).")
    demo.log_error(demo.ProcessInfo(), error)
    assert "enlarge /dev/shm" in capfd.readouterr().err.splitlines()[-1]


# --- Log lines and arguments -------------------------------------------------------------------


def test_a_log_line_is_one_write_of_printable_characters(demo):
    """So that the lines of several ranks do not mix. Each write to this socket is a message."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with reader, writer:
        demo.log(demo.ProcessInfo(rank=3), "Gerät\n\x1b[1m\udcff", to=writer.fileno())
        assert reader.recv(999).decode() == "[CPU 3] Gerät??[1m?\n"
        reader.close()
        demo.log(demo.ProcessInfo(), "nobody reads this", to=writer.fileno())


def test_a_line_of_which_a_pipe_takes_parts_is_whole(demo, monkeypatch, capfd):
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[:99]))
    demo.log(demo.ProcessInfo(), "long" * 999)
    assert capfd.readouterr().out == f"[CPU 0] {'long' * 999}\n"


def test_only_the_download_of_weights_has_a_limit_in_seconds(demo, monkeypatch):
    """What it brings is checked."""
    found, kind = [], demo.torchvision.models.ResNet18_Weights.__mro__[1]

    def note(*_, **how):
        found.append((socket.getdefaulttimeout(), how.get("check_hash")))

    monkeypatch.setattr(kind, "get_state_dict", note)
    demo.download_weights(arguments(demo), demo.ProcessInfo())
    assert found == [(20, True)] and socket.getdefaulttimeout() is None


def test_options_have_these_defaults_and_may_be_written_with_dashes(demo):
    args = arguments(demo)
    assert (args.image_size, args.batch_size) == (224, 64)
    assert (args.lr, args.seed, args.timeout) == (1e-3, 0, 300)
    args = arguments(demo, "--batch-size", 3, "--lr_scaling=linear", "--image-size=50")
    assert (args.batch_size, args.lr_scaling, args.image_size) == (3, "linear", 50)
    args = arguments(demo, "--workers", 1, "--timeout", 3)
    assert demo.make_train_loader(args, demo.ProcessInfo(), image_list(demo, 8)).timeout == 3


def test_dummy_makes_100_steps_unless_steps_or_epochs_are_given(demo):
    """Otherwise two epochs are trained, here of 640 images."""
    for words, steps in (
        (OPTIONS, 20),
        (["--dummy"], 100),
        (["--dummy", "--max_steps", "7"], 7),
        (["--dummy", "--num_epochs", "2"], 20),
    ):
        args = demo.parse_arguments(words)
        args.global_batch_size = 64
        demo.set_steps(args, 640)
        assert args.max_steps == steps


def test_dummy_takes_no_option_of_images(demo, capsys):
    for more in (["--workers", "1"], ["--weights", "x.pt"]):
        with pytest.raises(SystemExit):
            demo.parse_arguments(["--dummy", *more])
        assert "--dummy loads no images and no weights" in capsys.readouterr().err


def test_help_names_no_default_that_says_nothing(demo):
    text = " ".join(demo.make_parser().format_help().split())
    assert "(default: 64)" in text
    assert "(default: None)" not in text and "(default: False)" not in text


# --- A start that fails: by the texts of the store, and of NCCL ----------------------------------

NCCL = """NCCL error in: /pytorch/torch/csrc/c10d/NCCLUtils.cpp:94, {kind}, NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""
ONE_GPU = "two ranks have the same GPU: start one process for each GPU"
FAILED_STARTS = [  # the backend, the cause, and the advice
    ("nccl", "socketPollConnect: connect to 10.0.0.2<51000> failed: No route to host", "IFNAME"),
    ("nccl", "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
    # Until NCCL 2.29, and since.
    ("nccl", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60", ONE_GPU),
    ("nccl", "Multiple Ranks are using the same GPU: rank 1 and rank 0 both on CUDA", ONE_GPU),
    ("gloo", "Timed out after 21 seconds waiting for clients. 1/2 clients joined.", "gloo on its"),
    ("gloo", "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1", "gloo on its cpu"),
]


@pytest.mark.parametrize(("backend", "cause", "advice"), FAILED_STARTS)
def test_why_ranks_do_not_connect_is_one_line_with_advice(demo, backend, cause, advice):
    """Two ranks on one GPU are not started again, which another failure of the network is."""
    text = (NCCL if backend == "nccl" else "") + cause
    place = demo.ProcessInfo(world_size=2, backend=backend)
    kind = demo.LoneUserError if advice == ONE_GPU else demo.NotConnected
    with pytest.raises(kind) as found, demo.connecting_ranks(arguments(demo), place):
        raise torch.distributed.DistBackendError(text)
    (line,) = str(found.value).splitlines()
    assert line.startswith(cause.rstrip(".")) and advice in line


def test_ranks_that_do_not_connect_end_after_the_timeout(demo, monkeypatch):
    timer, end = MagicMock(), MagicMock()
    monkeypatch.setattr(demo, "end_process", end)
    monkeypatch.setattr(demo.threading, "Timer", timer)
    timer.return_value.start = lambda: timer.call_args.args[1](*timer.call_args.args[2])
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    place = demo.ProcessInfo(world_size=2, backend="gloo")
    with demo.connecting_ranks(arguments(demo), place):
        pass
    code, _, error = end.call_args.args
    assert code == demo.EXIT_FAILED and isinstance(error, demo.NotConnected)
    assert "10.0.0.1:4711" in str(error) and "GLOO_SOCKET_IFNAME" in str(error)


# --- The file ----------------------------------------------------------------------------------


def test_six_steps_stand_once_and_in_order():
    assert re.findall(r"# DDP (\d)/6", SCRIPT.read_text()) == list("123456")


def test_script_keeps_to_what_is_public():
    found = re.findall(r".*(?:\._[a-z]|ctypes|DEMO\w|/proc/|/sys/).*", SCRIPT.read_text())
    quota = 'text += Path("/sys/fs/cgroup", name).read_text()'
    assert {line.strip() for line in found} == {"os._exit(code)", quota}
