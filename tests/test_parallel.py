"""docs/lesson/parallel.md and its programs: bytes, times and losses are as by hand."""

from __future__ import annotations

import re

import pytest
from torch.distributed.fsdp import FSDPModule

from support.forks import run_forked
from support.pages import HOMEWORK, PAGES
from support.processes import LONG, ROOT

PAGE = PAGES["docs/lesson/parallel.md"]
METHODS = ["DDP", "ZeRO", "FSDP"]
if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
    METHODS.remove("FSDP")
# Runs a program of the lesson.
WRAPPER = """
import runpy, sys

def main():
    runpy.run_path(sys.argv[1])

def run_and_exit(main):
    main()
    sys.exit()
"""


def outputs(folder, program: str, numbers: list[int]) -> dict[int, str]:
    """{ranks: what they print}."""
    wrapper = folder / "wrapper.py"
    wrapper.write_text(WRAPPER)
    path = ROOT / "docs" / "lesson" / program
    runs = run_forked([(ranks, [path]) for ranks in numbers], program=wrapper)
    return {ranks: run.out for ranks, run in zip(numbers, runs, strict=True)}


def table(head: str) -> list[list[str]]:
    """The rows of the page's table with this first cell, without its head."""
    text = PAGE.text.partition(f"| {head} |")[2].partition("\n\n")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return [[cell.strip() for cell in cells] for cells in lines]


@pytest.mark.guards("page-pays")
def test_speed_up_follows_from_the_times_of_the_homework():
    """If nothing is hidden, a step takes its compute and its all-reduce, one after the other."""
    text = " ".join(PAGE.text.partition("**When DDP pays.**")[2].partition("\n\n")[0].split())
    (compute,) = re.findall(r"(\d+) ms of compute", text)
    alone = 2 * int(compute)
    assert f"2 · {compute} = {alone} ms" in text
    times = dict(re.findall(r"^\| (\d+ Gb/s) \| (\d+) ms", PAGES[HOMEWORK].text, re.M))
    for rate in ("10 Gb/s", "1 Gb/s"):
        together = int(compute) + int(times[rate])
        assert f" {times[rate]} ms" in text.replace("[", " ") and f" {together} ms" in text
        assert f" {alone} / {together} = {alone / together:.2f} times" in text


def by_hand(method: str, ranks: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and Adam's state, which counts the steps of each tensor."""
    layer, layers = 4 * 256 * 256, 8
    if method == "DDP":
        return layers * layer, layers * layer, layers * (2 * layer + 4)
    if method == "ZeRO":  # whole tensors
        return layers * layer, layers * layer, layers // ranks * (2 * layer + 4)
    part = layer // ranks
    return layers * part, layers * part, layers * (2 * part + 4)


@pytest.mark.guards("shard-local", "shard-mean", "shard-rows", "page-shard")
@pytest.mark.parametrize("numbers", [[1, 2], pytest.param([1, 4], marks=LONG)])
def test_each_rank_keeps_the_bytes_of_the_arithmetic_and_all_train_alike(numbers, tmp_path):
    losses = set()
    shown = {(row[0], int(n)): row[2:5] for row in table("method") for n in row[1].split(",")}
    for ranks, out in outputs(tmp_path, "shard.py", numbers).items():
        for method in METHODS:
            kept = by_hand(method, ranks)
            weights, gradients, state = (f"{count:,}" for count in kept)
            line = f"{method}: weights {weights}, gradients {gradients}, optimizer {state} bytes\n"
            assert [f"[rank {rank}] {line}" in out for rank in range(ranks)] == [True] * ranks, out
            if ranks > 1 or method == "DDP":
                assert shown[method, ranks] == [weights, gradients, state]
        assert "[rank 0] all train alike: True\n" in out
        found = re.findall(r"^\[rank 0\] \w+: losses (.*)$", out, re.MULTILINE)
        assert len(found) == len(METHODS)
        losses |= {tuple(round(float(loss), 4) for loss in text.split(", ")) for text in found}
    assert len(losses) == 1  # whatever the method and the number of ranks
    first, second, third = losses.pop()
    assert first > second > third


@pytest.mark.guards("ring-pieces", "ring-cable", "tree-down", "page-ring")
def test_ring_and_tree_take_the_time_of_the_model_and_cross(tmp_path):
    """The programs check their sums. A busy machine adds time, and never takes any away."""
    cells = {row[0]: dict(zip((4, 8), (row[1:3], row[3:]), strict=True)) for row in table("bytes")}
    for ranks, out in outputs(tmp_path, "all_reduce.py", [4, 8]).items():
        found = re.findall(r"^ *([\d,]+) bytes, (\w+): +(\d+) ms, by hand +(\d+) ms$", out, re.M)
        assert len(found) == 6
        measured = {(size, way): int(shown) for size, way, shown, _ in found}
        turns = {"ring": 2 * (ranks - 1), "tree": 2 * (ranks.bit_length() - 1)}
        for size, way, shown, model in found:
            piece = int(size.replace(",", "")) / (ranks if way == "ring" else 1)
            wanted = turns[way] * (5 + piece / 10e6 * 1e3)
            assert int(model) == pytest.approx(wanted, abs=0.51)
            assert int(shown) >= int(model) - 1
            assert cells[size][ranks][way == "tree"].endswith(f" ({model})")
        assert measured["512,000", "ring"] < measured["512,000", "tree"]
        if ranks == 8:  # four are too near to each other on a busy machine: 31 and 23 ms
            assert measured["8,000", "tree"] < measured["8,000", "ring"]
