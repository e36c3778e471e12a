"""docs/lesson/parallel.md and its programs: bytes, times and losses are as by hand."""

from __future__ import annotations

import math
import re
import shutil
import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import mse_loss

from support.lesson import run_programs
from support.pages import PAGES, PARALLEL
from support.processes import ROOT, free_port, start

LESSON, PAGE = ROOT / "docs" / "lesson", PAGES[PARALLEL]
METHODS = ["DDP", "ZeRO", "FSDP"]
if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
    METHODS.remove("FSDP")


def outputs(folder, program: str, numbers: list[int]) -> dict[int, str]:
    """{ranks: what they print}."""
    shutil.copy(LESSON / program, folder)
    return {ranks: run_programs(folder, {program: (ranks,)})[program].out for ranks in numbers}


def table(head: str) -> list[list[str]]:
    """The rows of the page's table with this first cell, without its head."""
    text = PAGE.text.partition(f"| {head} |")[2].partition("\n\n")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return [[cell.strip() for cell in cells] for cells in lines]


def test_memory_of_two_models_follows_from_the_bytes_of_a_weight():
    """16 bytes of Adam in mixed precision, of which ZeRO divides 12, 14 or all among 64 GPUs."""
    wanted = {"DDP": 16, "ZeRO-1": 4 + 12 / 64, "ZeRO-2": 2 + 14 / 64, "ZeRO-3, FSDP": 16 / 64}
    wanted |= {"tensor parallelism": 2, "the same, ZeRO-1 between nodes": (4 + 12 / 8) / 8}
    rows, text = table("stage"), " ".join(PAGE.text.split())
    assert [row[0] for row in rows] == [*wanted] and "on N = 64 GPUs in 8 nodes" in text
    for (name, size), (_, _, formula, *shown, _) in zip(wanted.items(), rows, strict=True):
        assert eval(formula.replace("N", "64")) == size, name
        for count, cell in zip((0.28, 70), shown, strict=True):
            figure = cell.removesuffix(" GB").replace(",", "")
            digits = len(figure.partition(".")[2])
            assert figure == f"{count * size:.{digits}f}", (name, cell)
    assert "280 million weights need 4.48 GB, 70 billion need 1,120 GB" in text
    assert "more than 1,120 / 80 = 14 GPUs" in text
    activations = re.findall(
        r"^- \d+ layers of .*: ([\d,· ]+) bytes = ([\d.]+) GB$", PAGE.text, re.M
    )
    for product, shown in activations:
        size = math.prod(int(factor.replace(",", "")) for factor in product.split(" · "))
        assert f"{size / 1e9:.1f}" == shown
    assert len(activations) == 2
    assert f"7 · (4 + 12/8) + 20 = {7 * (4 + 12 / 8) + 20} GB. " in text
    assert f"DDP needs 7 · 16 + 20 = {7 * 16 + 20} GB" in text


def by_hand(method: str, ranks: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and Adam's state, which counts the steps of each tensor."""
    layer, layers = 4 * 256 * 256, 8
    if method == "DDP":
        return layers * layer, layers * layer, layers * (2 * layer + 4)
    if method == "ZeRO":  # whole tensors
        return layers * layer, layers * layer, layers // ranks * (2 * layer + 4)
    part = layer // ranks
    return layers * part, layers * part, layers * (2 * part + 4)


@pytest.mark.parametrize("numbers", [[1, 2], pytest.param([1, 4], marks=pytest.mark.slow)])
def test_each_rank_keeps_the_bytes_by_hand_and_all_train_alike(numbers, tmp_path):
    losses = set()
    shown = {method: figures for method, *figures in table("method")}  # of two ranks
    for ranks, out in outputs(tmp_path, "shard.py", numbers).items():
        for method in METHODS:
            kept = by_hand(method, ranks)
            weights, gradients, state = (f"{count:,}" for count in kept)
            sent = f"{4 * 256 * 256 * 8 * (2 if method == 'DDP' else 3) * (ranks - 1) // ranks:,}"
            line = f"{method}: weights {weights}, gradients {gradients}, optimizer {state} bytes; "
            line += f"sends {sent} bytes a step\n"
            assert [f"[rank {rank}] {line}" in out for rank in range(ranks)] == [True] * ranks, out
            assert ranks != 2 or shown[method] == [weights, gradients, state, sent]
        assert "[rank 0] all train alike: True\n" in out
        found = re.findall(r"^\[rank 0\] \w+: losses (.*)$", out, re.MULTILINE)
        assert len(found) == len(METHODS)
        losses |= {tuple(round(float(loss), 4) for loss in text.split(", ")) for text in found}
    assert len(losses) == 1  # whatever the method and the number of ranks
    first, second, third = losses.pop()
    assert first > second > third


@pytest.mark.slow
def test_two_halves_train_as_one_model_and_wait_in_turns(tmp_path):
    with start([sys.executable, LESSON / "halves.py"], cwd=tmp_path) as started:
        out = started.finish().out
    torch.manual_seed(0)
    layers = [Sequential(Linear(512, 512), ReLU(), Linear(512, 512)) for _ in range(2)]
    model = Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    images, labels = torch.rand(2, 1024, 512)
    for step in range(3):
        loss = mse_loss(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert f"step {step}: loss {loss.item():.4f}\n" in out
    shares = [int(share) for share in re.findall(r"^device \d computes (\d+) %", out, re.M)]
    assert len(shares) == 2 and sum(shares) <= 101 and min(shares) > 20, out


@pytest.mark.slow
def test_spawn_starts_the_two_ranks_of_ddp(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.text, re.M | re.S)
    assert program.count('"29500"') == 1
    (tmp_path / "spawn.py").write_text(program.replace("29500", str(free_port())))
    shutil.copy(LESSON / "ddp.py", tmp_path)
    with start([sys.executable, "spawn.py"], cwd=tmp_path) as started:
        out = started.finish().out
    assert "[rank 1] epoch 2: " in out and "replicas identical: True" in out


@pytest.mark.slow
def test_ring_and_tree_take_the_time_of_the_model_and_cross(tmp_path):
    """The programs check their sums. A busy machine adds time, and never takes any away: no bound
    from above, nor an order of two measured times, holds on each.
    """
    cells = {row[0]: dict(zip((4, 8), (row[1:3], row[3:]), strict=True)) for row in table("bytes")}
    for ranks, out in outputs(tmp_path, "all_reduce.py", [4, 8]).items():
        found = re.findall(r"^ *([\d,]+) bytes, (\w+): +(\d+) ms, by hand +(\d+) ms$", out, re.M)
        assert len(found) == 6
        turns = {"ring": 2 * (ranks - 1), "tree": 2 * (ranks.bit_length() - 1)}
        for size, way, shown, model in found:
            piece = int(size.replace(",", "")) / (ranks if way == "ring" else 1)
            wanted = turns[way] * (5 + piece / 10e6 * 1e3)
            assert int(model) == pytest.approx(wanted, abs=0.51)
            assert int(shown) >= int(model) - 1
            assert cells[size][ranks][way == "tree"].endswith(f" ({model})")
        # The page's times, measured and by hand, cross as it says.
        for size, first in (("8,000", "tree"), ("512,000", "ring")):
            ring, tree = (list(map(int, re.findall(r"\d+", cell))) for cell in cells[size][ranks])
            fast, slow = (ring, tree) if first == "ring" else (tree, ring)
            assert fast[0] < slow[0] and fast[1] < slow[1]
