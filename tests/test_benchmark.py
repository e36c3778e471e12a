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
    """What a command prints after its first line, which names the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def measure(command: str, *words: object) -> str:
        tool.main([command, "--data", str(sample), *map(str, words)])
        first, images, rest = capsys.readouterr().out.split("\n", 2)
        assert first.startswith(f"{command}: ") and ", commit " in first
        assert images == f"{sample}: 94 labelled images"
        return rest

    return measure


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Puts a function of a run's words, and of the script's arguments, in place of runs."""

    def replace(prints: Callable[[list[str], Namespace], str]) -> None:
        def run(command, _processes=1):
            words = [str(word) for word in command]
            if words[0] == "git":
                return ""
            first = next(n for n, word in enumerate(words) if word.startswith("--num_epochs"))
            return prints(words, demo.parse_arguments(words[first:]))

        monkeypatch.setattr(tool, "run", run)

    return replace


def summary(**content: object) -> str:
    return f"[CPU 0] Summary {json.dumps(content)}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("gpu", "PyTorch finds no NVIDIA GPU here: run gpu where nvidia-smi lists one"),
        ("step --data none", "[Errno 2] No such file or directory: "),
    ],
)
def test_what_cannot_run_ends_in_one_line(benchmark, words, line):
    command, *others = words.split()
    with pytest.raises(SystemExit) as ended:
        benchmark(command, "--steps", 1, *others)
    (said,) = ended.value.code.splitlines()
    assert said.startswith(f"benchmark.py: error: {line}")


@pytest.mark.parametrize("content", ["x", "{}", '{"images": [], "annotations": []}'])
def test_a_file_that_is_no_instances_file_is_one_line(tmp_path, content):
    path = tmp_path / "annotations/instances_train2017.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(SystemExit, match=f"^benchmark.py: error: {path} has no labelled images: "):
        tool.main(["step", "--data", str(tmp_path)])


def test_a_run_has_the_variables_of_the_launchers_and_is_told_with_its_last_lines_if_it_fails(
    monkeypatch,
):
    """On a GPU they set nothing but the threads."""
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "9")
    monkeypatch.setattr(tool.run_py, "usable_cores", lambda: 6)
    names = "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"
    code = f"import os, sys; sys.exit(str([os.environ.get(name) for name in {names}]))"
    for gpus, found in ((False, "'3', '9', '0'"), (True, "'3', '9', None")):
        monkeypatch.setattr(tool.run_py, "runs_on_gpus", lambda _, gpus=gpus: gpus)
        with pytest.raises(tool.UserError, match=rf"^exit code 1: .*\n\[{found}\]\n$"):
            tool.run([sys.executable, "-c", code], 2)


STEP = """\
this script: 40.0 img/s
HEAD: 20.0 img/s
img/s, this script / HEAD: 2.000 (1.600 to 4.000 in 3 round(s))
"""


def test_a_commits_script_is_measured_in_turns_and_compared_by_the_medians(benchmark, made_up):
    """The ratio is this script's rate to the other one's."""
    rates = {"this": [32, 40, 80], "that": [20, 10, 20]}
    order = []

    def run(words, _args):
        order.append("this" if words[1] == str(SCRIPT) else "that")
        return summary(img_per_s=rates[order[-1]].pop(0))

    made_up(run)
    out = benchmark("step", *TINY, "--against", "HEAD")
    assert order == ["this", "that", "that", "this", "this", "that"]
    assert out.startswith("round 1 of 3: this script: 32.0 img/s\nround 1 of 3: HEAD: 20.0 ")
    assert out.endswith(STEP)


GPU = """\
round 1 of 1: bf16, fed: 20.0 img/s, step_ms 200.0, data_ms 60.0, peak_gpu_bytes 9,000.0
round 1 of 1: bf16, resident: 40.0 img/s, step_ms 100.0, peak_gpu_bytes 9,000.0
bf16, fed: 20.0 img/s
bf16, resident: 40.0 img/s
img/s, bf16, fed / bf16, resident: 0.500 (0.500 to 0.500 in 1 round(s))
the GPU's kernels in the profiled steps: 4.0 ms, of which
 75.0%       3.0 ms      2 times  conv
 25.0%       1.0 ms      1 times  bn
"""
TRACE = [("kernel", "conv", 1000), ("kernel", "bn", 1000), ("cpu_op", "add", 9000)]


def test_gpu_prints_a_line_for_each_case_and_the_kernels_that_take_most(
    benchmark, made_up, monkeypatch
):
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tool, "CASES", {"bf16, fed": {}, "bf16, resident": {"dummy": True}})

    def run(_words, args):
        if args.profile:
            events = [dict(cat=kind, name=name, dur=us) for kind, name, us in TRACE]
            events.append({"cat": "kernel", "name": "conv", "dur": 2000})
            Path(args.profile).mkdir()
            path = Path(args.profile) / "rank0.json.gz"
            path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
        data = 0 if args.dummy else 60
        step = 100 if args.dummy else 200
        times = {"step_ms": step, "data_ms": data, "peak_gpu_bytes": 9_000}
        return summary(img_per_s=4e3 / step, **times)

    made_up(run)
    out = benchmark("gpu", *ONCE)
    assert out == GPU


def test_what_a_gpus_loader_has_in_stock_is_not_measured_and_images_are_enough(monkeypatch):
    """Each case can be run, and an epoch of four ends within its steps, with a short batch."""
    counts, cases = [], {}
    monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 2)
    data = ["--coco_image_path=x", "--annotation_path=y"]
    monkeypatch.setattr(tool, "make_data", lambda *words: counts.append(words[-1]) or [*data])
    monkeypatch.setattr(tool, "measure", lambda _, found: cases.update(found))
    monkeypatch.setattr(tool, "run", lambda _: "")
    monkeypatch.setattr(tool, "print_kernels", lambda _: None)
    folder = Path("x")
    tool.measure_gpu(Namespace(batch_size=4, steps=8, data=["x"], folder=folder))
    fed = [name for name in cases if "fed" in name]
    for name, command in cases.items():
        words = [*map(str, command)]
        (text,) = re.findall(r"warm-up (\d+)", " ".join(words))
        args = demo.parse_arguments(words[words.index(str(SCRIPT)) + 1 :])
        assert args.max_steps == int(text) + 8 and int(text) > tool.WARM_UP
        if name in fed:
            count, batch = counts[fed.index(name)], args.batch_size
            epochs = args.max_steps / -(-count // batch)
            assert epochs <= args.num_epochs and bool(count % batch) == (epochs > 1)


def test_packed_images_are_measured_with_the_annotations_beside_them(tmp_path):
    (tmp_path / "annotations").mkdir()
    content = json.dumps(instances(numbered(3)))
    (tmp_path / "annotations/instances_train2017.json").write_text(content)
    (tmp_path / "run").mkdir()
    args = Namespace(folder=tmp_path / "run")
    words = tool.make_data(args, tmp_path / "train2017.rgb", 5)
    assert words[1] == tmp_path / "train2017.rgb"
    assert len(json.loads(Path(words[3]).read_text())["images"]) == 5


def test_job_is_that_of_the_talk_and_stands_beside_its_wall_time(benchmark, made_up, monkeypatch):
    monkeypatch.setattr(tool, "JOB_IMAGES", 6)

    def run(_words, args):
        found.append((args.num_epochs, args.global_batch_size))
        images = json.loads(Path(args.annotation_path).read_bytes())["images"]
        found.append(len(images))
        return "[CUDA 0] Cleanup complete. Total wall time: 2.00s (2.000s)\n" + summary(
            steps=924, img_per_s=10_000, train_s=1.5
        )

    found = []
    made_up(run)
    out = benchmark("job")
    assert found == [(2, 256), 6]
    assert out.startswith("924 steps, 10000 img/s in them\n")
    assert re.search(
        r"^from start to end 0\.\d s: -2\.0 before the script, 0\.5 its start", out, re.M
    )
    assert "over InfiniBand took 1165.0 s: " in out


# The other two need a commit, which a copy of the project does not have.
GPU_ALONE = pytest.param("gpu")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["step", "input", GPU_ALONE])
def test_this_script_and_that_of_a_commit_are_really_measured(benchmark, monkeypatch, command):
    """gpu by torchrun, here on a CPU, where a batch that is resident costs no loading."""
    if command == "gpu":
        monkeypatch.setattr(tool.torch.cuda, "device_count", lambda: 1)
        cases = {"fed": {"precision": "fp32", "num_epochs": 4}}
        cases["bf16, resident"] = {"precision": "fp32", "dummy": True}
        monkeypatch.setattr(tool, "CASES", cases)
    once = ["--steps", 20, "--batch_size", 4, "--rounds", 1] if command == "gpu" else ONCE
    out = benchmark(command, *once, "--against", "HEAD")
    first, second = re.findall(r"^round 1 of 1: (.*): [\d.]+ img/s", out, re.M)
    assert (first, second) == ("this script", "HEAD") or command == "gpu"
    assert all(float(rate) > 0 for rate in re.findall(r": ([\d.]+) img/s$", out, re.M))
    if command == "gpu":
        step, data = re.findall(r"resident: .* step_ms ([\d.]+)(?:, data_ms ([\d.]+))?", out)[0]
        assert float(data or 0) < float(step) / 50, out  # a little on a busy machine


def test_the_page_names_the_variables_of_the_launchers():
    words = " ".join(f"{name}={value}" for name, value in cpu_variables({}).items())
    assert f"export {words}\n" in (ROOT / "docs" / "speed.md").read_text()
    assert "GOMP_SPINCOUNT" not in cpu_variables({"OMP_WAIT_POLICY": "active"})
