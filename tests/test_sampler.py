"""What the loader gives, epoch by epoch: set_epoch decides the order, and nothing else does."""

from __future__ import annotations

import shlex

import pytest

from support.datasets import make_set
from support.forks import run_to_the_end, write
from support.processes import long

FAST = shlex.split("--weights none --image_size 40 --precision fp32 --timeout 30 --batch_size 4")


def passes_over_the_loader(demo, result, set_epoch):
    """The script's main; of each pass over the loader the keys that its sampler has given, as
    [epoch, position].

    set_epoch: whether the sampler listens to it.
    """
    found, keys_of = [], demo.ResumableSampler.__iter__

    def noted(sampler):
        found.append([])
        for key in keys_of(sampler):
            found[-1].append(list(key))
            yield key

    demo.ResumableSampler.__iter__ = noted
    if not set_epoch:
        demo.ResumableSampler.set_epoch = lambda sampler, epoch: None
    run_to_the_end(demo)
    write(result, [keys for keys in found if keys])  # workers start with none


def positions(keys):
    return [position for _, position in keys]


@pytest.mark.parametrize("workers", [1, *long(0)])
@pytest.mark.parametrize("set_epoch", [True, False])
def test_without_set_epoch_each_epoch_repeats_the_first(demo, tmp_path, workers, set_epoch):
    """Then, too, each rank has its own share, and validation all of its images, each once."""
    argv = [*make_set(tmp_path, 16, val=5), *FAST, "--workers", workers, "--num_epochs", 2]
    job = demo.run(argv, 2, call=passes_over_the_loader, set_epoch=set_epoch)
    assert job.json_line("Summary")["steps"] == 4
    ranks = [job.result(rank) for rank in (0, 1)]
    for first, validation, second, again in ranks:
        assert (positions(first) == positions(second)) is not set_epoch
        assert {epoch for epoch, _ in first} == ({1} if set_epoch else {0})
        assert {epoch for epoch, _ in second} == ({2} if set_epoch else {0})
        assert validation == again
    for number, images in ((0, 16), (1, 5), (2, 16)):
        shares = [positions(rank[number]) for rank in ranks]
        assert sorted(shares[0] + shares[1]) == list(range(images))
