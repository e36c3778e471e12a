"""compare_logs.py --trace: one profiled step of each rank, from traces made up; test_profile.py
has real ones.
"""

from __future__ import annotations

import gzip
import json
import re

import pytest
from pytest import approx

from analysis.logs import UserError
from analysis.trace import read_traces
from test_compare_logs import png_size, run_tool

MAIN, GLOO, STREAM, NCCL_STREAM = 11, 12, 7, 20  # threads of a process, streams of a GPU


def event(category, name, thread, begin_ms, end_ms):
    times = {"ts": 5e6 + 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms)}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread} | times


def step(number, begin_ms, end_ms, category="user_annotation"):
    return event(category, f"ProfilerStep#{number}", MAIN, begin_ms, end_ms)


# A step of 100 ms: 70 of compute and 40 of all-reduce, 20 of these beside compute.
ON_CPU = [
    step(6, 0, 100),
    step(7, 100, 200),
    event("user_annotation", "DistributedDataParallel.forward", MAIN, 105, 140),
    event("cpu_op", "aten::conv2d", MAIN, 110, 140),
    event("cpu_op", "aten::convolution", MAIN, 111, 139),
    event("cpu_op", "autograd::engine::evaluate_function: ConvolutionBackward0", MAIN, 140, 170),
    event("cpu_op", "c10d::allreduce_", MAIN, 170, 175),
    event("user_annotation", "gloo:all_reduce", GLOO, 150, 180),
    event("user_annotation", "gloo:all_reduce", GLOO + 1, 160, 190),
    event("cpu_op", "aten::copy_", GLOO, 150, 200),
    event("cpu_op", "aten::add_", MAIN, 190, 210),
    {"ph": "i", "name": "an event without a duration"},
]
# The script is done with step 7 before the GPU begins it.
ON_GPU = [
    step(7, 0, 50),
    step(7, 100, 200, "gpu_user_annotation"),
    event("cpu_op", "aten::conv2d", MAIN, 0, 50),
    event("kernel", "sm90_xmma_fprop_implicit_gemm", STREAM, 110, 170),
    event("kernel", "void at::native::vectorized_elementwise_kernel", STREAM, 190, 210),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(nccl)", NCCL_STREAM, 150, 190),
    event("kernel", "ncclDevKernel_Broadcast_RING_LL(nccl)", NCCL_STREAM, 100, 110),
    event("gpu_user_annotation", "nccl:all_reduce", NCCL_STREAM, 140, 200),
]


def save(folder, **traces):
    for name, events in traces.items():
        with gzip.open(folder / f"{name}.json.gz", "wt") as file:
            json.dump({"schemaVersion": 1, "traceEvents": events}, file)


@pytest.mark.guards("trace-overlap", "trace-gpu-step", "profiled-step")
@pytest.mark.parametrize("events", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_compute_and_all_reduce_of_a_step_and_how_much_is_at_once(tmp_path, events):
    save(tmp_path, rank0=events, rank10=[*events, step(8, 200, 300)], other=[])
    steps = read_traces(tmp_path)
    assert [(one.rank, one.number, one.seconds) for one in steps] == [(0, 7, 0.1), (10, 7, 0.1)]
    for one in steps:
        assert sum(end - begin for begin, end in one.compute) == approx(0.07)
        assert one.all_reduce == [approx((0.05, 0.09))] and one.beside_s == approx(0.02)


def test_picture_and_a_line_for_each_rank(tmp_path):
    pytest.importorskip("matplotlib")
    save(tmp_path, rank0=ON_CPU, rank1=ON_CPU)
    out, _, _ = run_tool("--trace", tmp_path, "--plot", tmp_path / "step.png")
    line = (
        "rank 1: ProfilerStep#7 of 100 ms: compute 70.0 ms, all-reduce 40.0 ms, of which 20.0 ms"
    )
    assert out.splitlines()[1] == f"{line} beside compute"
    assert png_size(tmp_path / "step.png") == (1440, 448)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("none", "--trace none: no such folder"),
        (".", "no rank0.json.gz, rank1.json.gz, ... in this folder"),
        ("bad", "rank0.json.gz: not a trace of torch.profiler: "),
        ("two", "no profiled step that all of its 2 traces have"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, monkeypatch, folder, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/rank0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [')[:20])
    (tmp_path / "two").mkdir()
    save(tmp_path / "two", rank0=[step(1, 0, 1)], rank1=[step(2, 0, 1)])
    with pytest.raises(UserError, match=re.escape(said)):
        read_traces(folder)
