"""tools/benchmark.py: what it runs, in which order, and what it says of the figures.

Most runs are made up: their speed would say nothing here. Their commands are parsed as real ones.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import demo_coco_resnet18 as demo
import pytest
from torch.distributed.run import get_args_parser

import benchmark as tool
from run import cpu_variables
from support.processes import LONG, ROOT, SCRIPT

TINY = ["--steps", 2, "--batch_size", 4]
ONCE = [*TINY, "--image_size", 40, "--rounds", 1, "--precision", "fp32"]
TORCHRUN = "torch.distributed.run"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, sample: Path):
    """What a command prints after its first line, which names the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def measure(command: str, *words: object) -> str:
        tool.main([command, "--data", str(sample), *map(str, words)])
        first, _, rest = capsys.readouterr().out.partition("\n")
        assert first.startswith(f"{command}: ")
        return rest

    return measure


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Puts a function of a run's words, and of the script's arguments, in place of runs."""

    def replace(prints: Callable[[list[str], Namespace], str]) -> None:
        def run(command):
            words = [str(word) for word in command]
            if words[0] == "git":
                return ""
            if TORCHRUN in words:
                parsed = get_args_parser().parse_args(words[3:])
                changed = [tool.__file__, "child", f"warm-up {3 + 2 * tool.cores()}", str(SCRIPT)]
                program = changed if "child" in words else [str(SCRIPT)]
                started = [parsed.training_script, *parsed.training_script_args]
                assert started[: len(program)] == program
            first = next(n for n, word in enumerate(words) if word.startswith("--num_epochs"))
            return prints(words, demo.parse_arguments(words[first:]))

        monkeypatch.setattr(tool, "run", run)

    return replace


def record(kind: str, **content: object) -> str:
    return f"[CPU 0] {kind} {json.dumps(content)}\n"


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


@pytest.mark.guards("benchmark-variables")
def test_a_run_has_the_variables_of_the_launchers_and_is_told_with_its_last_lines_if_it_fails(
    monkeypatch,
):
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "9")
    names = "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"
    code = f"import os, sys; sys.exit(str([os.environ[name] for name in {names}]))"
    with pytest.raises(tool.UserError, match=r"^exit code 1: .*\n\['0', '9'\]\n$"):
        tool.run([sys.executable, "-c", code])


STEP = """\
this script: 40.0 img/s
HEAD: 20.0 img/s
img/s, this script / HEAD: 2.000 (1.600 to 4.000 in 3 round(s))
"""


@pytest.mark.guards("benchmark-ratio", "benchmark-order", "benchmark-median", "benchmark-against")
def test_a_commits_script_is_measured_in_turns_and_compared_by_the_medians(benchmark, made_up):
    """The ratio is this script's rate to the other one's."""
    step_ms = {"this": [125, 100, 50], "that": [200, 400, 200]}
    order = []

    def run(words, _args):
        order.append("this" if words[1] == str(SCRIPT) else "that")
        return record("Summary", step_ms=step_ms[order[-1]].pop(0))

    made_up(run)
    out = benchmark("step", *TINY, "--against", "HEAD")
    assert order == ["this", "that", "that", "this", "this", "that"]
    assert out == STEP


GPU = """\
                             img/s     step     data  compute  exposed ms   peak
1 GPU(s), bf16, fed           20.0   200.00    60.00   140.00     0.00 ms   1.00 GB
1 GPU(s), bf16, resident      40.0   100.00     0.00   100.00     0.00 ms   1.00 GB
2 GPU(s), bf16, fed           40.0   200.00    60.00   140.00     0.00 ms   1.00 GB
2 GPU(s), bf16, resident      80.0   100.00     0.00   100.00     0.00 ms   1.00 GB
1 GPU(s), bf16, fed: 20.0 img/s
1 GPU(s), bf16, resident: 40.0 img/s
2 GPU(s), bf16, fed: 40.0 img/s
2 GPU(s), bf16, resident: 80.0 img/s
"""


@pytest.mark.guards("benchmark-torchrun", "benchmark-resident")
def test_gpu_prints_a_row_for_each_case(benchmark, made_up, monkeypatch):
    monkeypatch.setattr(tool, "gpu_count", lambda: 2)

    def run(_words, args):
        data = 0 if args.dummy else 60
        step = 100 if args.dummy else 200
        times = {"step_ms": step, "data_ms": data, "compute_ms": step - data, "exposed_ms": 0}
        return record("Summary", **times, peak_gpu_bytes=10**9)

    made_up(run)
    out = benchmark("gpu", *TINY, "--precision", "bf16", "--rounds", 1)
    assert out.startswith(GPU)
    ratio = "0.500 (0.500 to 0.500 in 1 round(s))"
    assert f"img/s, 1 GPU(s), bf16, fed / 1 GPU(s), bf16, resident: {ratio}\n" in out


@pytest.mark.guards("benchmark-job")
def test_job_is_that_of_the_talk_and_stands_beside_its_wall_time(benchmark, made_up, monkeypatch):
    monkeypatch.setattr(tool, "JOB_IMAGES", 6)

    def run(_words, args):
        found.append((args.num_epochs, args.global_batch_size))
        images = json.loads(Path(args.annotation_path).read_bytes())["images"]
        found.append(len(images))
        return record("Summary", steps=924, img_per_s=10_000)

    found = []
    made_up(run)
    out = benchmark("job")
    assert found == [(2, 256), 6]
    assert out.startswith("924 steps, 10000 img/s in them\nfrom start to end 0.")
    assert "over InfiniBand took 1165.0 s: " in out


@LONG
def test_gpu_really_runs_and_a_resident_batch_costs_no_loading(benchmark, monkeypatch):
    """By torchrun, here on a CPU."""
    monkeypatch.setattr(tool, "gpu_count", lambda: 1)
    out = benchmark("gpu", *ONCE)
    rows = re.findall(r"^1 GPU\(s\), fp32, (\w+) +[\d.]+ +([\d.]+) +([\d.]+) ", out, re.M)
    assert [kind for kind, *_ in rows] == ["fed", "resident"]
    step, data = map(float, rows[1][1:])
    assert data < step / 50, out  # a little on a busy machine


@LONG
@pytest.mark.parametrize("command", ["step", "input"])
def test_this_script_and_that_of_a_commit_are_really_measured(benchmark, command):
    out = benchmark(command, *ONCE, "--against", "HEAD")
    assert re.fullmatch(r"this script: .* img/s\nHEAD: .* img/s\nimg/s, .*\n", out)
    assert all(float(rate) > 0 for rate in re.findall(r": ([\d.]+) img/s$", out, re.M))


@pytest.mark.guards("faster-on-cpus")
def test_the_page_names_the_variables_of_the_launchers():
    words = " ".join(f"{name}={value}" for name, value in cpu_variables({}).items())
    assert f"export {words}\n" in (ROOT / "docs" / "speed.md").read_text()
    assert "GOMP_SPINCOUNT" not in cpu_variables({"OMP_WAIT_POLICY": "active"})
