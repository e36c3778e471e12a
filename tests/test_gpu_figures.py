"""The figures of `tools/benchmark.py gpu` against a simulation whose rates are known.

Nothing here is timed: a loader, its workers and a device are simulated event by event, on a clock
of their own. Each part runs as it does on a GPU, with the tool's own changes of the loader and its
own arithmetic, and each row that it yields has to be the rate that was put in, within 2 %.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmark
from benchmarks import children, figures, gpu, links, one_machine, runner, settings
from support.processes import LONG
from test_benchmark import LINE

CLOSE = 0.02


class Loader:
    """Workers that make batches in turn, each with two ready at most, as PyTorch's DataLoader.

    `clock.now` goes on to when the batch that is asked for is there.
    """

    def __init__(self, clock, workers: int, seconds: float) -> None:
        self.clock, self.num_workers, self.seconds = clock, workers, seconds
        self.sampler = types.SimpleNamespace(set_epoch=lambda epoch: None)
        self.dataset = None

    def __iter__(self) -> Iterator:
        return self.batches(self.clock.now)

    def batches(self, begin: float) -> Iterator:
        made, taken = [], []
        for n in itertools.count():
            free = made[n - self.num_workers] if n >= self.num_workers else begin
            asked = taken[n - 2 * self.num_workers] if n >= 2 * self.num_workers else begin
            made.append(max(free, asked) + self.seconds)
            self.clock.now = max(self.clock.now, made[-1])
            taken.append(self.clock.now)
            yield None, range(self.clock.batch_size)


class Device:
    """Trains one step after another; the script is up to `ahead` steps in advance of it.

    A log line makes the script wait for the device, and the device for `line_s` longer.
    """

    def __init__(self, clock, seconds: float, first: float, ahead: int, line_s: float) -> None:
        self.clock, self.seconds, self.first = clock, seconds, first
        self.ahead, self.line_s, self.ends = ahead, line_s, []

    def train(self, batches: Iterator, args, rank: int = 0) -> str:
        """The step lines of a run."""
        begin, text, since = self.clock.now, "", []
        for number in range(1, args.max_steps + 1):
            reached = max(self.clock.now, self.ends[-1] if self.ends else begin)
            next(batches)
            start = max(self.clock.now, reached)  # the device has done the step before
            end = start + (self.seconds if number > 1 else self.first)
            since.append((start - reached, end - (self.ends[-1] if self.ends else begin)))
            self.ends.append(end)
            if (number - 1) % args.log_every == 0 or number == args.max_steps:
                data, step = (1e3 * sum(x) / len(x) for x in zip(*since, strict=True))
                text += LINE.format(rank, number, data, step)
                since = []
                self.clock.now = max(self.clock.now, end) + self.line_s
            elif number > self.ahead:
                self.clock.now = max(self.clock.now, self.ends[-1 - self.ahead])
        return text


class Bench:
    """In the place of the tool's: a simulation answers in place of each process.

    All rates are in images per second: of a worker by kind of picture, and of the device by
    precision, the larger the batch the higher, up to `device`.
    """

    def __init__(self, args, workers, device, prepared, original, first=30.0, line_s=0.0):
        self.args, self.workers, self.device = args, workers, device
        self.loaders = {"prepared": prepared, "original": original}
        self.first, self.line_s, self.said = first, line_s, []

    def device_rate(self, size: int, precision: str = "auto", compiled: bool = False) -> float:
        rate = self.device * size / (size + 32)
        return rate * (0.25 if precision == "fp32" else 1) * (1.1 if compiled else 1)

    def loader_rate(self, folder: str) -> float:
        return self.loaders["prepared" if "prepared" in folder else "original"]

    def script(self, how, options, processes=0, launch=(), **env) -> str:
        args = types.SimpleNamespace(precision="auto", compile=False, workers=None)
        for name, _, value in (word[2:].partition("=") for word in options):
            setattr(args, name, int(value) if value.isdigit() else value or True)
        args.workers = self.workers if args.workers is None else args.workers
        self.clock = types.SimpleNamespace(now=0.0, batch_size=args.batch_size)
        changes = how.split("+")[1:]
        seconds = args.batch_size * max(1, args.workers) / self.loader_rate(args.coco_image_path)
        loader = Loader(self.clock, args.workers, seconds * max(1, processes))
        if "loader" in changes:
            return self.loader_alone(loader, args)
        return self.run(
            changes, loader, args, max(1, processes), int(env.get("BENCHMARK_WARM", 1))
        )

    def loader_alone(self, loader: Loader, args) -> str:
        """By the tool's own clock readings, on the clock of this simulation."""
        shown, demo = [], types.SimpleNamespace(keep_memory=lambda: None)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(children.time, "perf_counter", lambda: self.clock.now)
            patch.setattr(children, "show", lambda **figures: shown.append(figures))
            children.time_loader(demo, loader, args.max_steps)
        return f"FIGURES {json.dumps(shown[0])}\n"

    def run(self, changes: list[str], loader: Loader, args, processes: int, warm: int) -> str:
        rate = self.device_rate(args.batch_size, args.precision, args.compile)
        seconds = args.batch_size / rate * processes  # those that share a device take turns
        facts = {"world_size": processes, "devices": ["GPU"], "backend": "nccl"}
        text = (
            f"[GPU 0] Run {json.dumps(facts | {'precision': 'bf16', 'workers': args.workers})}\n"
        )
        for rank in range(processes):
            self.clock.now = 0.0
            device = Device(self.clock, seconds, self.first, 4, self.line_s)
            text += device.train(self.batches(changes, loader), args, rank)
        counted = device.ends[warm - 1 :]
        step, busy = 1e3 * (counted[-1] - counted[0]) / (len(counted) - 1), 1e3 * seconds
        split = {"compute_ms": busy, "exposed_ms": 0, "data_ms": step - busy, "step_ms": step}
        return text + f"FIGURES {json.dumps({'ms': busy})}\n[GPU 0] Summary {json.dumps(split)}\n"

    def batches(self, changes: list[str], loader: Loader) -> Iterator:
        if "resident" in changes or "host" in changes:
            return itertools.repeat((None, range(self.clock.batch_size)))
        return iter(children.Emptied(loader, None) if "emptied" in changes else loader)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Data that nobody reads; returns how to make a Bench of so many workers and rates."""
    monkeypatch.setattr(children, "GPU", True)
    monkeypatch.setattr(settings, "pictures", lambda bench, images: Path("/data"))
    monkeypatch.setattr(settings, "prepared", lambda bench, folder: Path("/data-prepared"))

    def make(workers: int, *rates: float, **more: float) -> Bench:
        monkeypatch.setattr(settings, "cores_of_a_run", lambda: workers + 1)
        return Bench(benchmark.parse_arguments(["gpu"]), workers, *rates, **more)

    return make


# Workers; what the device, and the workers on prepared and original pictures, can do (img/s).
RATES = {
    "the loader is slower": (15, 12_700, 7_800, 3_000),
    "the device is slower": (15, 2_500, 20_000, 7_000),
    "both are nearly equal": (15, 9_000, 7_950, 8_050),
    "one worker": (1, 4_000, 1_400, 470),
    "many workers": (47, 6_000, 40_000, 5_100),
}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("first", [0.5, 60])
def test_fed_and_loader_rows_tell_the_rates(on_a_gpu, rates, first):
    """However slow the first step is, in which the loader's buffers fill."""
    bench = on_a_gpu(*rates, first=first)
    rows = {row["what"]: row for row in gpu.fed_input(bench)}
    device = bench.device_rate(256)
    assert rows["resident batch of 256"]["demo"] == pytest.approx(device, rel=CLOSE)
    for name, loader in bench.loaders.items():
        alone = rows[f"{name}: loader of {rates[0]} workers / resident batch"]
        assert alone["demo"] == pytest.approx(loader, rel=CLOSE)
        assert alone["reference"] == pytest.approx(device, rel=CLOSE)
        fed = rows[f"{name}: fed / the lower of both"]
        assert fed["demo"] == pytest.approx(min(loader, device), rel=CLOSE)
        assert fed["ratio"] == pytest.approx(1, rel=2 * CLOSE)


@pytest.mark.parametrize("rates", [RATES["the loader is slower"], RATES["the device is slower"]])
def test_rows_of_several_ranks_are_the_jobs_rate(on_a_gpu, rates):
    """Two processes on one GPU: together they are as fast as one."""
    bench = on_a_gpu(*rates)
    one, two = gpu.train(bench)
    true = min(bench.loaders["original"], bench.device_rate(256))
    assert (one["what"][0], two["what"][0]) == ("1", "2")
    assert [one["demo"], two["demo"]] == pytest.approx([true, true], rel=CLOSE)


@pytest.mark.parametrize(("part", "factor"), [(gpu.step, 4), (gpu.compiled, 1.1)])
def test_resident_rows_tell_the_devices_rate(on_a_gpu, part, factor):
    """At each size; lines in which the GPU waits, a seventh of a step of 64, are rare."""
    bench = on_a_gpu(15, 12_700, 7_800, 3_000, line_s=0.001)
    rows = list(part(bench))
    assert [row["what"].split()[3].strip(":") for row in rows] == ["256", "64", "512", "128"]
    for row, size in zip(rows, bench.args.batch_sizes, strict=True):
        compiled = part is gpu.compiled
        assert row["demo"] == pytest.approx(bench.device_rate(size, compiled=compiled), rel=CLOSE)
        assert row["ratio"] == pytest.approx(factor, rel=CLOSE)


def test_step_on_a_gpu_tells_the_rates_as_well(on_a_gpu):
    """The subcommand for every machine, whose lines are one for each step only on a CPU."""
    bench = on_a_gpu(15, 12_700, 7_800, 3_000, line_s=0.001)
    bench.args, bench.peak = benchmark.parse_arguments(["step", "--repeats", "1"]), 1.0
    bench.args.batch_size = 256
    rows = {row["what"]: row for row in one_machine.measure_step(bench)}
    device, fed = bench.device_rate(256), rows["as shipped / resident batch"]
    assert fed["demo"] == pytest.approx(bench.loaders["original"], rel=CLOSE)
    assert fed["reference"] == pytest.approx(device, rel=CLOSE)
    waiting = rows["as shipped: share of a step that waits for data"]["demo"]
    assert waiting == pytest.approx(100 * (1 - fed["demo"] / device), rel=CLOSE)


def test_split_is_told_after_the_buffers_are_empty(on_a_gpu):
    bench = on_a_gpu(15, 12_700, 7_800, 3_000)
    rows = {row["what"]: row for row in gpu.split(bench)}
    device, loader = bench.device_rate(256), bench.loaders["original"]
    waiting = rows["fed: waiting for data"]["demo"]
    assert waiting == pytest.approx(100 * (1 - loader / device), rel=CLOSE)
    assert rows["fed: no kernel running"]["demo"] == pytest.approx(waiting, rel=CLOSE)
    assert rows["resident: waiting for data"]["demo"] == pytest.approx(0, abs=0.1)


def test_candidates_are_compared_with_what_is_shipped(on_a_gpu):
    """The simulation gains by none of them, but loses by lines in which the GPU waits."""
    bench = on_a_gpu(15, 12_700, 7_800, 3_000, line_s=0.001)
    rows = {row["what"]: row for row in gpu.candidates(bench)}
    assert len(rows) == len(gpu.CANDIDATES) + 6
    for what in gpu.CANDIDATES.values():
        assert rows[f"{what} / as shipped"]["ratio"] == pytest.approx(1)
    step = 256e3 / bench.device_rate(256)
    assert rows["--log_every 1 / 20"]["ratio"] == pytest.approx(step / (step + 1), rel=CLOSE)
    assert rows["--log_every 50 / 20"]["ratio"] == pytest.approx(1, rel=CLOSE)
    assert rows["fed, torchrun --numa-binding=node / without"]["ratio"] == pytest.approx(1)
    assert rows["fed by 13 workers / by 15, as shipped"]["ratio"] == pytest.approx(1, rel=CLOSE)


# --- What is counted --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 7, 15, 16, 31, 63])
def test_steps_are_counted_by_what_the_loader_holds(on_a_gpu, workers):
    args = settings.fed(on_a_gpu(workers, 1, 1, 1).args)
    assert args.warm_steps >= 4 * workers and args.steps >= 10 * workers
    assert args.log_every >= settings.LINE_EVERY  # a line makes the GPU wait
    assert args.steps % workers == 0  # whole waves
    assert (args.warm_steps - 1) % args.log_every == args.steps % args.log_every == 0  # at a line
    thrown_away, ready = 3 * workers, 2 * workers
    images = args.batch_size * (args.warm_steps + args.steps + thrown_away + ready)
    assert settings.needed(args) > images


def test_a_quota_leaves_fewer_workers(monkeypatch):
    """Waves are counted by the number of workers that the script starts."""
    script = types.SimpleNamespace(cores_by_quota=lambda: 4.0)
    monkeypatch.setattr(children, "GPU", True)
    monkeypatch.setattr(settings, "own_cores", lambda: 16)
    monkeypatch.setattr(children, "load_script", lambda: script)
    monkeypatch.setattr(settings, "cores_of_a_run", settings.cores_of_a_run.__wrapped__)
    assert settings.worker_count(benchmark.parse_arguments(["gpu"])) == 3
    script.cores_by_quota = lambda: math.inf
    assert settings.worker_count(benchmark.parse_arguments(["gpu"])) == 15
    assert settings.worker_count(benchmark.parse_arguments(["gpu", "--workers", "5"])) == 5


def test_times_of_a_line_are_those_of_all_its_steps():
    lines = [(1, 900, 1000), (21, 1, 10), (41, 2, 20), (51, 8, 80)]
    text = "".join(LINE.format(0, *line) for line in lines)
    args = types.SimpleNamespace(batch_size=8, warm_steps=21, steps=30)
    # by hand: 20 steps of 20 ms and 10 of 80 ms
    found = figures.speed(text, args)
    assert found["img_per_s"] == pytest.approx(1e3 * 8 * 30 / 1200)
    assert found["waiting"] == pytest.approx(100 * 120 / 1200)
    args.steps = 31
    with pytest.raises(runner.Failure, match="30 steps after the warm-up, not 31"):
        figures.speed(text, args)


def test_what_the_loader_has_ready_is_thrown_away_once():
    class Counting:
        sampler, dataset, num_workers, begun = 1, 2, 2, 0

        def __iter__(self):
            self.begun += 1
            return iter(range(20))

    loader = Counting()
    emptied = children.Emptied(loader, None)
    assert (emptied.sampler, emptied.dataset) == (1, 2)
    batches = iter(emptied)
    assert loader.begun == 1  # its workers are forked now, not at the first batch
    assert list(batches) == [0, 1, 2, *range(9, 20)]


def test_profiler_starts_outside_the_counted_steps(monkeypatch):
    """Starting it takes long; what it counts is divided by all the steps that it has seen."""
    told = []
    profiler = types.SimpleNamespace(
        start=lambda: told.append("start"), stop=lambda: told.append("stop"), events=list
    )
    fake = types.SimpleNamespace(profile=lambda activities: profiler)
    fake.ProfilerActivity = types.SimpleNamespace(CUDA=1, CPU=2)
    torch = types.SimpleNamespace(profiler=fake)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.profiler", fake)
    monkeypatch.setenv("BENCHMARK_WARM", "5")
    monkeypatch.setattr(children, "union", lambda spans: 6_000)  # microseconds
    monkeypatch.setattr(children, "show", lambda ms: told.append(ms))
    demo = types.SimpleNamespace(WARM_UP=3)
    demo.train_step = lambda run, batches: told.append(run.step)
    demo.summarize = lambda run: told.append(f"counted from {demo.WARM_UP}")
    children.profile(demo)
    run = types.SimpleNamespace(args=types.SimpleNamespace(max_steps=7))
    for run.step in range(7):
        demo.train_step(run, [])
    demo.summarize(run)
    # step 4 is not counted, 5 and 6 are: 6 ms of kernels in three steps
    assert told == [0, 1, 2, 3, "start", 4, 5, 6, "stop", 2.0, "counted from 5"]


# --- By the cost model ------------------------------------------------------------------------


def test_modelled_step_sends_buckets_one_after_another():
    """By hand: 4 ms forward, 8 backward, and buckets that take 2, 3 and 10 ms to send."""
    byte_ms = 1e3 / links.cost_model.payload_rate(1)
    early, late = (2 / byte_ms, 0.25), (3 / byte_ms, 1.0)  # 2 ms from 2 on, 3 ms from 8 on
    assert links.modelled_step([early, late], 1) == pytest.approx(4 + 8 + 3)
    assert links.modelled_step([early], 1) == pytest.approx(4 + 8)  # hidden
    slow = (10 / byte_ms, 0.25)  # from 2 to 12, and the next one after it
    assert links.modelled_step([slow, late], 1) == pytest.approx(4 + 12 + 3)
    assert links.modelled_step([early, late], 10) == pytest.approx(4 + 8 + 0.3)


@LONG
def test_buckets_of_the_model_are_those_that_ddp_makes():
    """The sizes that test_fake_cuda.py has seen DDP send."""
    own = links.resnet_buckets([links.MIB, 25 * links.MIB])
    assert [size for size, _ in own] == [9_605_440, 26_494_976, 8_769_792]
    assert [size for size, _ in links.resnet_buckets([25 * links.MIB])] == [29_016_384, 15_853_824]
    shares = [share for _, share in own]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] == 1
