"""What the script says of a step's parts and of compressed gradients, held against arithmetic by
hand and against the kernel's counters: real ranks, real network namespaces.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import shlex
import time
from collections.abc import Callable

import numpy as np
import pytest

import counters
from analysis import runs
from support.datasets import make_set
from support.forks import Job, prepared, run_to_the_end, start, write
from support.nodes import NamespacePair
from support.processes import LONG, Run, long

FAST = shlex.split(
    "--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32 --timeout 30 "
    "--log_every 1"
)
WHOLE = 3  # steps that PowerSGD leaves alone and that stay out of the averages
GRADIENT_BYTES = 44_870_208  # 4 * 11,217,552 parameters
RANK = 8  # PowerSGD's, where no option says so


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """The options for 40 images: 5 steps an epoch for two ranks."""
    return make_set(tmp_path_factory.mktemp("data"), 40)


# --- What runs in forked processes -----------------------------------------------------------


def shapes(demo, result):
    """Of the parameters, as torchvision has them."""
    from torchvision.models import resnet18

    write(result, [parameter.shape for parameter in resnet18(num_classes=80).parameters()])


def with_counters(demo, result):
    """The script on a node of a `NamespacePair`; what the node's interfaces carried from the
    beginning of its first epoch to its end.
    """
    train_epoch, before = demo.train_epoch, []

    def counted(run, epoch):
        if not before:
            demo.dist.barrier()  # what came before has arrived
            before.append(counters.read_counters())
        return train_epoch(run, epoch)

    demo.train_epoch = counted
    run_to_the_end(demo)
    carried = counters.difference(before[0], counters.read_counters())
    write(result, carried["interfaces"])


def slow(demo, result, name="", ms=0):
    """The script; each call of that function of it takes so much longer."""
    if name:
        function = getattr(demo, name)
        setattr(demo, name, lambda *given: (time.sleep(ms / 1e3), function(*given))[1])
    start(demo)


def warm_up_again(demo, result):
    """Fails where one more warm-up pass leaves anything changed that later steps depend on."""
    import torch

    def state():
        parts = [run.model.state_dict(), run.optimizer.state_dict(), run.scaler.state_dict()]
        parts += [[parameter.grad for parameter in run.model.parameters()], torch.get_rng_state()]
        parts += [np.random.get_state()[1], [module.training for module in run.ddp.modules()]]
        parts += [[run.epoch, run.step, run.sums, run.timer.steps]]
        if run.powersgd:
            names = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")
            parts += [getattr(run.powersgd, name) for name in names]
        return parts

    run = prepared(demo)
    before = copy.deepcopy(state())
    demo.fix_bucket_order(run)
    torch.testing.assert_close(state(), before, rtol=0, atol=0)


# --- Two nodes -------------------------------------------------------------------------------


def check_split(run: Run) -> dict:
    """The parts of a step add up for each rank, and are those of the step lines; the Summary."""
    summary, names = run.json_line("Summary"), ("data_ms", "compute_ms", "exposed_ms")
    for part in [summary, *summary["ranks"]]:
        assert sum(part[name] for name in names) == pytest.approx(part["step_ms"], rel=0.05)
        assert min(part[name] for name in names) >= 0 and part["compute_ms"] > 0
    for rank, part in enumerate(summary["ranks"]):
        assert part["rank"] == rank
        shown = re.findall(r"data ([\d.]+) ms \| step ([\d.]+) ms", "\n".join(run.lines(rank)))
        assert len(shown) > WHOLE
        means = np.array(shown, float)[WHOLE:].mean(axis=0)
        # The lines have one decimal place.
        assert [part["data_ms"], part["step_ms"]] == pytest.approx(means, abs=0.06)
    return summary


def check_carried(interfaces: list[dict], count: float) -> None:
    """What joins two nodes, which has sent `count` bytes and received as many; and headers."""
    link = interfaces[0]
    assert (link["name"], link["kind"], link["speed_Gbps"]) == ("eth0", "ethernet", 10)
    for way in ("tx_bytes", "rx_bytes"):
        assert count < link[way] < 1.1 * count, link


RATE = 0.5  # Gb/s: so slow that a busy machine's pauses do not decide
LEAST_MS = 8e-6 * GRADIENT_BYTES / RATE  # of an all-reduce between two nodes at this rate


@LONG
def test_steps_at_a_known_rate(demo, data):
    """On a link between two nodes: what goes over it, and what a step then waits for."""
    argv = [*data, *FAST, "--max_steps", 5]
    with NamespacePair("500mbit") as nodes:
        job = demo.run(argv, 2, call=with_counters, nodes=nodes)
    for rank in (0, 1):
        check_carried(job.result(rank), 5 * GRADIENT_BYTES)
    # What computing cannot hide of the all-reduce is exposed, on each of two equal nodes.
    for rank in check_split(job)["ranks"]:
        assert rank["exposed_ms"] + rank["compute_ms"] > 0.95 * LEAST_MS
        assert rank["exposed_ms"] > 0.4 * LEAST_MS


# --- The pass before the first step ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", *long("powersgd")])
def test_warm_up_pass_leaves_each_value_of_a_rank_as_it_was(demo, data, kind):
    """What it leaves of PowerSGD in a resumed run is tested where that is resumed."""
    demo.run([*data, *FAST, "--grad_compression", kind], 2, call=warm_up_again)


@pytest.mark.parametrize("kind", ["none", *long("powersgd")])
def test_one_process_waits_for_nobody(demo, data, kind):
    argv = [*data, *FAST, "--grad_compression", kind, "--max_steps", 4]
    summary = check_split(demo.run(argv, torchrun=True))
    assert len(summary["ranks"]) == 1
    # What is left is what DDP does after a backward pass, and PowerSGD's work.
    assert kind == "powersgd" or summary["exposed_ms"] < 0.5 * summary["step_ms"]


# --- Where a step's time goes ----------------------------------------------------------------


@LONG
@pytest.mark.parametrize(("name", "ms"), [("forward", 500), ("decode", 50)])
def test_slow_rank_is_named_and_the_other_waits_for_it(demo, data, name, ms):
    of_rank = [{}, {"options": {"name": name, "ms": ms}}]
    argv = [*data, *FAST, "--max_steps", 8]
    summary = check_split(demo.run(argv, 2, call=slow, of_rank=lambda rank: of_rank[rank]))
    quick, slower = summary["ranks"]
    assert runs.find_straggler(runs.split_of_ranks(summary)) == 1, summary
    assert quick["exposed_ms"] > 1.5 * slower["exposed_ms"], summary
    if name == "decode":
        assert slower["data_ms"] > 3 * quick["data_ms"], summary
    else:
        behind = slower["compute_ms"] - quick["compute_ms"]
        assert behind > quick["compute_ms"] and quick["exposed_ms"] > 0.6 * behind, summary
    assert quick["step_ms"] == pytest.approx(slower["step_ms"], rel=0.1)  # all at one pace


# --- Compressed gradients --------------------------------------------------------------------


@pytest.fixture(scope="module")
def compressed_bytes(demo) -> Callable[[int], int]:
    """What PowerSGD of a rank sends, from the shapes: of a matrix n x m two factors with as many
    columns as its rank, where that is less than half; all else as it is.
    """
    matrices = [(s[0], math.prod(s[1:])) for s in demo.run(call=shapes).result()]
    assert 4 * sum(n * m for n, m in matrices) == GRADIENT_BYTES

    def of_rank(rank: int) -> int:
        factors = [((n + m) * min(rank, n, m), n * m) for n, m in matrices]
        return 4 * sum(small if 2 * small < whole else whole for small, whole in factors)

    return of_rank


KINDS = {kind: ["--grad_compression", kind] for kind in ("none", "fp16", "bf16", "powersgd")}
KINDS["powersgd in bf16"] = [*KINDS["powersgd"], "--precision", "bf16"]
KINDS["powersgd of rank 3"] = [*KINDS["powersgd"], "--powersgd_rank", 3]


@pytest.fixture(scope="module")
def by_kind(demo, data) -> Callable[[str], Job]:
    """Six steps with a compression, on two nodes.

    One bucket for all: what is sent as what it is is then added up in the same order.
    """
    argv = [*data, *FAST, "--max_steps", 6, "--bucket_cap_mb", 1024]

    @functools.cache
    def run(kind: str) -> Job:
        with NamespacePair() as nodes:
            return demo.run([*argv, *KINDS[kind]], 2, call=with_counters, nodes=nodes)

    return run


@LONG
@pytest.mark.parametrize("kind", KINDS)
def test_compressed_gradients_train_alike_and_send_less(by_kind, compressed_bytes, kind):
    """By arithmetic, and by the counters: with two ranks a ring sends as many bytes each way as
    are reduced; the rest is headers.
    """
    run, plain = by_kind(kind), by_kind("none")
    summary = check_split(run)
    assert summary["replicas_identical"] is True
    alike = kind != "powersgd in bf16"  # the same precision
    for rank in (0, 1):
        assert [step for _, step, _ in run.steps(rank)] == [1, 2, 3, 4, 5, 6]
        found, wanted = ([loss for _, _, loss in r.steps(rank)] for r in (run, plain))
        if alike:
            assert found[0] == wanted[0]  # before any gradient was sent
            assert found[:4] == pytest.approx(wanted[:4], abs=0.05), (found, wanted)
            assert kind == "none" or found != wanted
        if alike and "powersgd" in kind:  # it leaves the first steps alone
            assert found[: WHOLE + 1] == wanted[: WHOLE + 1]
            assert found[WHOLE + 1] != wanted[WHOLE + 1]
    rank = 3 if kind.endswith("3") else RANK
    sent = compressed_bytes(rank) if "powersgd" in kind else GRADIENT_BYTES
    reduced = WHOLE * (GRADIENT_BYTES + sent)
    if "16" in kind:
        sent, reduced = sent // 2, reduced // 2
    assert summary["wire_bytes_per_step"] == sent
    for rank in (0, 1):
        check_carried(run.result(rank), reduced)


# --- Interrupted and resumed -----------------------------------------------------------------


@LONG
def test_resumed_run_starts_powersgd_anew(demo, data, tmp_path, compressed_bytes):
    """Its first steps are uncompressed, so a part that ends before they are over equals a run
    without it, bit for bit. A longer one compresses, and all replicas stay equal.
    """
    argv, checkpoint = [*data, *FAST, "--bucket_cap_mb", 1024], tmp_path / "saved.pt"
    plain = demo.run([*argv, "--max_steps", 7], 2)
    argv += ["--grad_compression", "powersgd", "--checkpoint", checkpoint, "--resume"]
    parts = [demo.run([*argv, "--max_steps", stop], 2) for stop in (2, 7)]
    for rank in (0, 1):
        steps, wanted = [s for part in parts for s in part.steps(rank)], plain.steps(rank)
        assert [step for _, step, _ in steps] == list(range(1, 8))
        assert steps[:6] == wanted[:6]  # the loss of step 6 was there before it was compressed
        assert steps[6] != wanted[6] and steps[6][2] == pytest.approx(wanted[6][2], abs=0.05)
    ends = [part.json_line("Summary") for part in parts]
    assert [end["replicas_identical"] for end in ends] == [True] * 2
    sent = [end["wire_bytes_per_step"] for end in ends]
    assert sent == [GRADIENT_BYTES, compressed_bytes(RANK)]
    # Weights and Adam's two, each as large as the gradients; nothing of the ranks' PowerSGD.
    assert 3 * GRADIENT_BYTES < checkpoint.stat().st_size < 3.2 * GRADIENT_BYTES
    checkpoint.unlink()
