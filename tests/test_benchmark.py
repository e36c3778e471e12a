"""tools/benchmark.py: what it runs, in which order, and what it says of the figures.

Most runs are made up: their speed would say nothing here. Their commands are parsed as real ones.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import demo_coco_resnet18 as demo
import pytest

import benchmark as tool
from run import cpu_variables
from support.datasets import instances, numbered
from support.processes import ROOT, SCRIPT

TINY = ["--steps", 2, "--batch_size", 4]
ONCE = [*TINY, "--rounds", 1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, sample: Path):
    """What a command prints after its first lines, which name machine and data. `prints`: in place
    of runs, a function of a run's words and of the script's arguments.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def measure(command: str, *words: object, prints: Callable | None = None) -> str:
        def run(command: list, _processes: int = 1) -> str:
            words = [str(word) for word in command]
            if words[0] == "git":
                return ""
            first = next(n for n, word in enumerate(words) if word.startswith("--num_epochs"))
            return prints(words, demo.parse_arguments(words[first:]))

        if prints:
            monkeypatch.setattr(tool, "run", run)
        tool.main([command, "--data", str(sample), *map(str, words)])
        first, images, rest = capsys.readouterr().out.split("\n", 2)
        assert first.startswith(f"{command}: ") and ", commit " in first
        assert images == f"{sample}: 94 labelled images"
        return rest

    return measure


def summary(**content: object) -> str:
    return f"[CPU 0] Summary {json.dumps(content)}\n"


@pytest.mark.parametrize("content", [None, "x", "{}", '{"images": [], "annotations": []}'])
def test_a_folder_without_an_instances_file_is_one_line(tmp_path, content):
    path = tmp_path / "annotations/instances_train2017.json"
    path.parent.mkdir()
    line = "[Errno 2] No such file or directory: "
    if content:
        path.write_text(content)
        line = f"{path} has no labelled images: "
    with pytest.raises(SystemExit, match=f"^benchmark.py: error: {re.escape(line)}"):
        tool.main(["step", "--data", str(tmp_path)])


def test_gpu_without_a_gpu_is_one_line(benchmark):
    with pytest.raises(SystemExit, match="error: PyTorch finds no NVIDIA GPU here: run gpu where"):
        benchmark("gpu")


def test_a_run_has_the_launchers_variables_and_its_failure_is_told(monkeypatch):
    """On a GPU they set nothing but the threads."""
    for name in ("MALLOC_MMAP_MAX_", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "9")
    monkeypatch.setattr(tool.run_py, "usable_cores", lambda: 6)
    names = "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"
    code = f"import os, sys; sys.exit(str([os.environ.get(name) for name in {names}]))"
    for gpus, found in ((False, "'3', '9', '0'"), (True, "'3', '9', None")):
        monkeypatch.setattr(tool.run_py, "runs_on_gpus", lambda _, gpus=gpus: gpus)
        with pytest.raises(tool.UserError, match=rf"^exit code 1: .*\n\[{found}\]\n$"):
            tool.run([sys.executable, "-c", code], 2)
    words = " ".join(f"{name}={value}" for name, value in cpu_variables({}).items())
    assert f"export {words}\n" in (ROOT / "docs/speed.md").read_text()


STEP = """\
this script: 40.0 img/s
HEAD: 20.0 img/s
img/s, this script / HEAD: 2.000 (1.600 to 4.000 in 3 round(s))
"""


def test_a_commits_script_is_measured_in_turns_and_compared(benchmark):
    """The ratio is this script's rate to the other one's."""
    rates = {"this": [32, 40, 80], "that": [20, 10, 20]}
    order = []

    def run(words, _args):
        order.append("this" if words[1] == str(SCRIPT) else "that")
        return summary(img_per_s=rates[order[-1]].pop(0))

    out = benchmark("step", *TINY, "--against", "HEAD", prints=run)
    assert order == ["this", "that", "that", "this", "this", "that"]
    assert out.startswith("round 1 of 3: this script: 32.0 img/s\nround 1 of 3: HEAD: 20.0 ")
    assert out.endswith(STEP)


GPU = """\
bf16, fed: 20.0 img/s
bf16, resident: 40.0 img/s
img/s, bf16, fed / bf16, resident: 0.500 (0.500 to 0.500 in 1 round(s))
"""
KERNELS = """\
the GPU's kernels in the profiled steps: 4.0 ms, of which
 75.0%       3.0 ms      2 times  conv
 25.0%       1.0 ms      1 times  bn
"""
TRACE = [("kernel", "conv", 2000), ("kernel", "conv", 1000), ("kernel", "bn", 1000)]
TRACE.append(("cpu_op", "add", 9000))


def test_gpu_prints_each_case_and_the_kernels_that_take_most(benchmark, monkeypatch):
    """What a loader has in stock when the training begins is not measured, and an epoch has enough
    images, or one of four ends within the steps.
    """
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 1)

    def run(words, args):
        (warm_up,) = [word for word in words if word.startswith("warm-up ")]
        assert args.max_steps - 2 == int(warm_up.removeprefix("warm-up ")) > tool.WARM_UP
        if args.profile:
            events = [dict(cat=kind, name=name, dur=us) for kind, name, us in TRACE]
            Path(args.profile).mkdir()
            path = Path(args.profile) / "rank0.json.gz"
            path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        if args.dummy:
            return summary(img_per_s=40, step_ms=100, peak_gpu_bytes=9_000)
        images = len(json.loads(Path(args.annotation_path).read_bytes())["images"])
        epochs = args.max_steps / -(-images // args.batch_size)
        assert epochs <= args.num_epochs and bool(images % args.batch_size) == (epochs > 1)
        return summary(img_per_s=20, step_ms=200, data_ms=60)

    out = benchmark("gpu", *ONCE, prints=run)
    begin = "round 1 of 1: bf16, "
    assert f"{begin}fed: 20.0 img/s, step_ms 200.0, data_ms 60.0\n" in out
    assert f"{begin}resident: 40.0 img/s, step_ms 100.0, peak_gpu_bytes 9,000.0\n" in out
    assert {*GPU.splitlines()} <= {*out.splitlines()} and out.endswith(KERNELS)
    assert [*tool.CASES] == re.findall(r"^round 1 of 1: (.*): \S+ img/s", out, re.M)


def test_packed_images_are_measured_with_the_annotations_beside_them(tmp_path):
    path = tmp_path / "annotations/instances_train2017.json"
    path.parent.mkdir()
    path.write_text(json.dumps(instances(numbered(3))))
    words = tool.make_data(Namespace(folder=path.parent), tmp_path / "train2017.rgb", 5)
    assert words[1] == tmp_path / "train2017.rgb"
    assert len(json.loads(Path(words[3]).read_text())["images"]) == 5


def test_job_is_that_of_the_talk_and_stands_beside_its_wall_time(benchmark, monkeypatch):
    monkeypatch.setattr(tool, "JOB_IMAGES", 6)

    def run(_words, args):
        images = json.loads(Path(args.annotation_path).read_bytes())["images"]
        assert (args.num_epochs, args.global_batch_size, len(images)) == (2, 256, 6)
        end = "[CUDA 0] Cleanup complete. Total wall time: 2.00s (2.000s)\n"
        return end + summary(steps=924, img_per_s=10_000, train_s=1.5)

    out = benchmark("job", prints=run)
    assert out.startswith("924 steps, 10000 img/s in them\nfrom start to end 0.")
    assert " s: -2.0 before the script, 0.5 its start and end, 1.5 training\n" in out
    assert "over InfiniBand took 1165.0 s: " in out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["step", "input"])
def test_this_script_and_that_of_a_commit_are_really_measured(benchmark, command):
    out = benchmark(command, *ONCE, "--against", "HEAD")
    first, second = re.findall(r"^round 1 of 1: (.*): [\d.]+ img/s", out, re.M)
    assert (first, second) == ("this script", "HEAD")
    assert all(float(rate) > 0 for rate in re.findall(r": ([\d.]+) img/s$", out, re.M))


@pytest.mark.slow
def test_gpu_is_really_measured_by_torchrun(benchmark, monkeypatch):
    """Here on a CPU, where a batch that is resident costs no loading."""
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 1)
    cases = {"fed": {"precision": "fp32", "num_epochs": 4}}
    cases["bf16, resident"] = {"precision": "fp32", "dummy": True}
    monkeypatch.setattr(tool, "CASES", cases)
    out = benchmark("gpu", "--steps", 20, "--batch_size", 4, "--rounds", 1)
    step, data = re.findall(r"resident: .* step_ms ([\d.]+)(?:, data_ms ([\d.]+))?", out)[0]
    assert float(data or 0) < float(step) / 50, out  # a little on a busy machine
