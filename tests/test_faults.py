"""What a run does when something goes wrong: one fault a test, with real processes.

Ranks are forked, in namespaces where a test needs two nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.datasets import Payload, make_set, truncate
from support.forks import FOR_ONE_CHECKPOINT, ForkServer, shared, write
from support.nodes import NEW_MOUNTS, mount, own_namespaces, small_disk
from support.processes import (
    LONG,
    Run,
    free_port,
    long_among,
    processes,
    require,
    wait_until,
)

FAST = shlex.split("--weights none --image_size 40 --batch_size 4 --workers 0 --precision fp32")
FAST += ["--log_every", "1"]
STOPPED = 75  # the script's exit code after a stop signal
NOTICED = 20  # seconds: a silent peer is noticed after --timeout 8, the rest is a slow machine


# --- What is done to the script in a forked process ------------------------------------------


def before_step(demo, step: int, rank: int, call: str, **options) -> None:
    """One rank calls a function of this file before this step."""
    train_step = demo.train_step

    def changed(run, micro_batches):
        if (run.step + 1, run.process.rank) == (step, rank):
            globals()[call](run, **options)
        return train_step(run, micro_batches)

    demo.train_step = changed


def fault(call: Callable, step: int = 2, rank: int = 0, **options) -> partial:
    """`before_step`, for `before` of `ForkServer.start`."""
    return partial(before_step, step=step, rank=rank, call=call.__name__, **options)


def pause(run, seconds: float) -> None:
    time.sleep(seconds)


def stop_signal(run) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def bad_loss(run) -> None:
    """The loss of this rank is NaN, and with it every weight after this step."""
    run.model.register_forward_hook(lambda model, images, logits: logits * float("nan"))


def bad_update(run) -> None:
    """The loss of this step is finite, but its update makes a weight NaN."""
    run.model.fc.bias.register_hook(lambda gradient: gradient * float("nan"))


def slow_validation(run) -> None:
    """Each batch that this rank validates takes a second longer, and is told of."""

    def slow(model, images):
        if not model.training:
            os.write(1, b"validating\n")
            time.sleep(1)

    run.model.register_forward_pre_hook(slow)


def bug(run, text: str) -> None:
    """While a worker that is killed for it holds a lock that Python's own exit waits for."""
    run.loader._iterator._workers_done_event._cond.acquire()
    raise RuntimeError(text)


def lose_workers_and_tell_late(run) -> None:
    """This error is told so late that the loader's workers have been ended meanwhile: SIGCHLD,
    and what PyTorch would raise on it, come in between.
    """
    demo = sys.modules["demo"]
    log = demo.log

    def late(process, text, to=1):
        for worker in demo.torch.multiprocessing.active_children():
            worker.kill()
        time.sleep(1)
        log(process, text, to)

    demo.log = late
    raise ConnectionResetError("Connection reset on purpose")


def lose_the_store(run, serves: bool) -> None:
    """Needs something of a store that does not answer, or is not there."""
    from datetime import timedelta

    import torch.distributed as dist

    wait = timedelta(seconds=1)
    place = {"host_name": "127.0.0.1", "port": free_port(), "timeout": wait}
    store = dist.TCPStore(**place, is_master=serves, wait_for_workers=False)
    store.get("a key that nobody sets")


def two_sums_at_once(run) -> None:
    """Waits for the second of two sums that no other rank takes part in: when the first is over
    its time, Gloo ends what else its connections are at.
    """
    import torch
    import torch.distributed as dist

    first = dist.all_reduce(torch.ones(9), async_op=True)
    time.sleep(0.5)
    second = dist.all_reduce(torch.ones(9), async_op=True)
    second.wait()
    first.wait()


def small_shm(demo, size: str) -> None:
    own_namespaces(NEW_MOUNTS)
    mount("tmpfs", "/dev/shm", "tmpfs", f"size={size}")


def end_after_arguments(demo) -> None:
    """All ranks end when the arguments are complete: what comes next is the comparison."""
    demo.compare_ranks = lambda *_: sys.exit(0)


# --- Fixtures and helpers --------------------------------------------------------------------


@pytest.fixture
def ranks(demo: ForkServer) -> Iterator[ForkServer]:
    """Where ranks are forked; whatever a test has left running is killed."""
    yield demo
    demo.clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 48 images, in small steps."""
    return [*FAST, *make_set(tmp_path_factory.mktemp("data"), 48)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: a checkpoint has 135 MB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def load(path: str) -> dict:
    """A checkpoint, as plain values."""
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


def told(demo, result, path):
    """Of a checkpoint what `saved_in` tells."""
    state = load(path)
    # but for statistics of images that a diverging network has seen
    weights = {name: v for name, v in state["model"].items() if "running_" not in name}
    bad = [name for name, v in weights.items() if not v.double().isfinite().all()]
    facts = {name: state.get(name) for name in ("step", "scaler", "facts")}
    write(result, facts | {"not_finite": bad})


def saved_in(path: Path) -> dict:
    """The step, the facts, the state of fp16's scaler and the weights that are not finite of a
    checkpoint, read in a forked process: pytest's own would import torch, which takes seconds.
    """
    return shared().run(call=told, path=str(path)).result()


def errors(run: Run) -> list[str]:
    """The lines by which the ranks say what is wrong."""
    return [line for line in run.output.splitlines() if re.match(r"\[CPU \d+\] ERROR: ", line)]


def the_error(run: Run) -> str:
    """The one line that says what is wrong; fails where it is not alone."""
    found = errors(run)
    assert len(found) == 1 and "Traceback" not in run.output, run.tail()
    return found[0]


def said(text: str, pattern: str) -> str:
    """The line of a text that matches; fails without."""
    match = re.search(f"^.*(?:{pattern}).*$", text, re.MULTILINE)
    assert match, f"no {pattern!r} in:\n{text[-6000:]}"
    return match[0]


# --- Stop signals ----------------------------------------------------------------------------


def stopped_at(text: str, name: str, path: Path, nproc: int = 2) -> int:
    """The step at which every rank says that it stopped, which is the checkpoint's."""
    found = re.findall(rf"^\[CPU (\d)\] Stopped on {name} \| step (\d+)", text, re.MULTILINE)
    step = saved_in(path)["step"]
    assert sorted(found) == [(str(rank), str(step)) for rank in range(nproc)], text[-6000:]
    return step


@LONG
def test_stop_signal_during_validation(ranks, folder):
    """It may take long: the rest of it is left out, and no step is made after it.

    To one rank. To a launcher and to all: tests/acceptance/test_stop_signals.py, test_slurm.py.
    """
    path, data = folder / "c.pt", make_set(folder / "set", 16, val=48)
    argv = [*FAST, *data, "--num_epochs", 99, "--checkpoint", path, "--timeout", 20]
    run = ranks.start(argv, 2, before=[fault(slow_validation, rank=1)])
    run.wait_for("^validating$")
    run.signal(1, signal.SIGINT)
    ended = run.finish(15, expect=STOPPED)
    assert stopped_at(ended.out, "SIGINT", path) == 2
    assert ended.out.count("validating") < 6 and "validation |" not in ended.out


def opened(fifo: Path) -> int | None:
    """A descriptor to write to the FIFO once somebody reads from it."""
    with contextlib.suppress(OSError):
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return None


def test_stop_signal_before_the_first_step(ranks, data, folder):
    """While rank 0 waits for a file server, say: nothing is lost, so they may end at once."""
    fifo = folder / "instances.json"
    os.mkfifo(fifo)
    argv = [*data, f"--annotation_path={fifo}", "--checkpoint", folder / "c.pt", "--timeout", 20]
    run = ranks.start(argv, 2)
    writer = wait_until(lambda: opened(fifo), 20, "rank 0 to read")
    try:
        for rank in (0, 1):
            run.signal(rank, signal.SIGTERM)
        run.finish(10, expect=None)
    finally:
        os.close(writer)


# --- The start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        # --workers may differ
        (["--lr", "0.25", "--workers", "1"], r"--lr: 0\.25 here, 0\.001 on rank 0: "),
        # All ranks take part in saving: the others would wait elsewhere.
        (["--checkpoint", "c.pt"], "--checkpoint given: True here, False on rank 0: "),
    ],
    ids=["argument", "checkpoint"],
)
def test_other_start_on_one_node(ranks, data, there, wanted):
    argv = [data, [*data, *there]]
    ended = ranks.run(nproc=2, of_rank=lambda rank: {"argv": argv[rank]}, expect=1)
    assert re.search(rf"ERROR: {wanted}start all alike \(rank 1\)$", the_error(ended))


# --- Inside a rank ---------------------------------------------------------------------------


@LONG
def test_sigkill_of_a_data_loader_worker(ranks, data):
    run = ranks.start([*data, "--num_epochs", 99, "--workers", 1, "--timeout", 8], 2)
    run.wait_for(r"^\[CPU 1\] .*Step 3 ")
    workers = [p.pid for p in processes(ranks.test_id) if p.parent == run.pids[1]]
    os.kill(workers[0], signal.SIGKILL)
    ended = run.finish(NOTICED, expect=1)
    # PyTorch tells it in several ways, by what its main process was at.
    why = "DataLoader worker .*(killed|exited)|Connection reset"
    said(ended.output, rf"\[CPU 1\] ERROR: in .*step \d+: .*({why})")


# What the script takes for an error from outside, each by what really raises it: Gloo's own path
# and "pair closure" and the types of a store's errors here, above a loader worker that is killed.


@LONG
@pytest.mark.parametrize(
    ("more", "words"),
    [([], "/gloo/.*Timed out"), ([fault(two_sums_at_once)], "(?!.*/gloo/).*pair closure")],
    ids=["alone", "beside another"],
)
def test_gloos_error_of_a_silent_peer_is_from_outside(ranks, data, more, words):
    before = [fault(pause, rank=1, seconds=600), *more]
    run = ranks.start([*data, "--timeout", 3], 2, before=before)
    run.wait_for(r"^\[CPU 0\] ERROR: |Traceback", NOTICED)
    run.signal(1, signal.SIGKILL)
    line = the_error(run.finish(NOTICED, expect=[1, -9]))
    assert re.match(rf"\[CPU 0\] ERROR: in step 2: .*?{words}", line), line


def error_file(path: Path) -> dict:
    """What a rank has left, in torchrun's own form: its text and the extra information."""
    content = json.loads(path.read_text())["message"]
    extra = content["extraInfo"]
    assert isinstance(extra["timestamp"], float) and 0 <= time.time() - extra["timestamp"] < 60
    return {"text": content["message"], **extra}


LIKE_FROM_OUTSIDE = "worker of a DataLoader, no store for this, no space in the list, bad socket"
# How a run ends: what is done to it, and its options.
ENDS = {
    "arguments": ([], ["--lr", "0"]),
    "user": ([], ["--annotation_path", "none.json"]),
    "stop": ([fault(stop_signal)], []),
    "no store": ([fault(lose_the_store, serves=False)], []),
    "silent store": ([fault(lose_the_store, serves=True)], []),
    "lost workers": ([fault(lose_workers_and_tell_late)], ["--workers", 1]),
    "bug": ([fault(bug, text=LIKE_FROM_OUTSIDE)], ["--workers", 1]),
}
TOLD = {  # exit code; kind, phase and text in the error file
    "arguments": (2, "user", "start", ".*: error: --lr .*; see --help"),
    "user": (1, "user", "image list broadcast", r"ERROR: .*none\.json.*"),
    "stop": (
        75,
        "asked",
        r"step \d+",
        r"Stopped on SIGTERM \| step \d+ \| exit code 75 \| not saved: no --checkpoint",
    ),
    "no store": (1, "lost", "step 2", "ERROR: in step 2: .*connect.*"),
    "silent store": (1, "lost", "step 2", "ERROR: in step 2: .*[Tt]ime.*"),
    "lost workers": (1, "lost", "step 2", "ERROR: in step 2: Connection reset on purpose"),
    "bug": (1, "bug", "step 2", f"RuntimeError: {LIKE_FROM_OUTSIDE}"),
}


@pytest.mark.parametrize("case", long_among(ENDS, ["silent store"]))
def test_error_file_tells_the_kind(ranks, data, folder, case):
    """And the output the same, once: of a bug with a traceback."""
    (before, more), (code, kind, phase, text) = ENDS[case], TOLD[case]
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    ended = ranks.run([*data, *more], before=before, env=env, expect=code, timeout=NOTICED)
    found = error_file(folder / "error.json")
    assert (found["kind"], found["rank"]) == (kind, 0)
    assert re.fullmatch(phase, found["phase"])
    assert re.fullmatch(rf"\[CPU 0\] {text}", found["text"])
    assert len(re.findall(f"{text}$", ended.output, re.MULTILINE)) == 1, ended.tail()
    assert ("Traceback (most recent call last)" in ended.output) == (kind == "bug"), ended.tail()


def test_error_file_that_cannot_be_written_hides_nothing(ranks, data, folder):
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "nowhere" / "error.json")}
    ended = ranks.run([*data, "--annotation_path", "none.json"], env=env, expect=1)
    assert "none.json" in the_error(ended)


def test_tiny_shared_memory_lowers_the_number_of_workers(ranks, data):
    """Unless it was given: then the line says how to mend it."""
    require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [part for part in data if part not in ("--workers", "0")]
    argv += ["--batch_size", 10, "--max_steps", 2]  # a batch takes 47 KB
    tiny, less = (partial(small_shm, size=size) for size in ("40k", "100k"))
    ended = ranks.run(argv, before=[tiny])
    assert ended.json_line("Run")["workers"] == 0 and len(ended.steps()) == 2
    line = r"^\[CPU 0\] WARNING: /dev/shm has .*: --workers 0 in place of 1; .*--shm-size=1g"
    assert len(re.findall(line, ended.out, re.MULTILINE)) == ended.out.count("WARNING") == 1
    # Enough for one process, but not for each of two; without a limit; closed to all who write.
    for size, nproc, warnings in (("240k", 1, 0), ("240k", 2, 1), ("0", 1, 0), ("64m,ro", 1, 1)):
        before = [partial(small_shm, size=size), end_after_arguments]
        ended = ranks.run(argv, nproc, before=before)
        assert len(re.findall(line, ended.out, re.MULTILINE)) == warnings, size
    ended = ranks.run([*argv, "--workers", 3], before=[tiny], expect=1)
    assert re.search("/dev/shm .* --shm-size=1g.* --workers 0", the_error(ended))
    ended = ranks.run([*argv, "--workers", 3], before=[less, end_after_arguments])
    said(ended.output, "WARNING: /dev/shm .* --workers 3 may end by a bus error; .*--shm-size")


@LONG
def test_workers_that_the_shared_memory_has_room_for_do_not_fill_it(ranks, data):
    """Two batches of each, of this step and the one before: a little more, and none is missing.

    In a slow first step the workers get ahead as far as they may.
    """
    require(os.geteuid() == 0, "a /dev/shm of its own needs root")
    argv = [*data, "--image_size", 224, "--accumulate_steps", 2, "--workers", 2, "--max_steps", 3]
    batch = 4 * 3 * 224 * 224
    fits = partial(small_shm, size=str(8 * batch + 2**16))  # and what is not of batches
    ended = ranks.run(argv, before=[fits, fault(pause, step=1, seconds=1)])
    assert "/dev/shm" not in ended.out and len(ended.steps()) == 3


@pytest.mark.parametrize(
    ("nproc", "fault", "words"),
    [
        # The loss shows it one step later, when the bad weights could have been saved.
        (1, fault(bad_update), "step [23]"),
        pytest.param(2, fault(bad_loss, rank=1), "a loss up to step [23] is not fin", marks=LONG),
    ],
    ids=["update", "loss of one rank"],
)
def test_what_is_not_finite_is_not_saved(ranks, data, folder, nproc, fault, words):
    path = folder / "c.pt"
    argv = [*data, "--checkpoint", path, "--checkpoint_every", 1, "--timeout", 20]
    line = the_error(ranks.run(argv, nproc, before=[fault], expect=1))
    assert re.search(f"{words}.*: lower --lr", line), line
    state = saved_in(path)
    assert (state["step"], state["not_finite"]) == (1, [])


# --- Checkpoints -----------------------------------------------------------------------------


def test_full_disk(ranks, data, folder):
    with small_disk(folder / "disk", FOR_ONE_CHECKPOINT) as disk:
        path = disk / "c.pt"
        argv = [*data, "--checkpoint", path, "--checkpoint_every", 1, "--max_steps", 3]
        ended = ranks.run(argv, expect=1)
        assert re.search(f"{path} .*No space left", the_error(ended))
        said(ended.output, r"WARNING: .*not saved at step 2")
        assert [step for _, step, _ in ended.steps()] == [1, 2, 3], "the run went on"
        assert saved_in(path)["step"] == 1
        assert sorted(os.listdir(disk)) == ["c.pt", "c.pt.lock"]


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[str]:
    """Options for four images, one step an epoch."""
    return [*FAST, *make_set(tmp_path_factory.mktemp("four"), 4)]


@pytest.fixture(scope="module")
def saved(demo, four, tmp_path_factory) -> Iterator[Path]:
    """A checkpoint after step 1, at the end of an epoch."""
    folder = tmp_path_factory.mktemp("saved")
    demo.run([*four, "--checkpoint", folder / "c.pt", "--max_steps", 1])
    yield folder / "c.pt"
    shutil.rmtree(folder)


def refused(ranks, path: Path, argv: Sequence[object], nproc: int = 1) -> str:
    """The line by which a checkpoint is not resumed from; it stays as it was."""
    before = path.read_bytes()
    options = ["--checkpoint", path, "--resume", "--max_steps", 5, "--timeout", 20]
    ended = ranks.run([*argv, *options], nproc, expect=1)
    assert path.read_bytes() == before
    return the_error(ended)


def change(demo, result, path, kind, payload=None) -> None:
    state = load(path)
    if kind == "truncated":
        truncate(Path(path))
        return
    if kind == "incomplete":
        del state["optimizer"]
    elif kind == "malicious":
        state["epoch"] = Payload(Path(payload))
    demo.torch.save(state, path)


@pytest.mark.parametrize("kind", ["truncated", "incomplete", "malicious"])
def test_bad_checkpoint(ranks, four, folder, saved, kind):
    path, payload = shutil.copy(saved, folder / "c.pt"), folder / "payload"
    ranks.run(call=change, path=str(path), kind=kind, payload=str(payload))
    assert str(path) in refused(ranks, path, four, 2 if kind == "truncated" else 1)
    assert not payload.exists(), "code in the file was run"


CHANGED = {  # what is given now: the end of the line
    "--lr 0.002": "has --lr 0.001, not 0.002: give --lr 0.001",
    "--precision bf16": "has --precision fp32, not bf16: give --precision fp32",
    "--grad_compression bf16": "not bf16: give --grad_compression none",
    "--powersgd_rank 3": "has --powersgd_rank 8, not 3: give --powersgd_rank 8",
    # of 4 images a step
    "--lr 0.001 --lr_scaling linear": "not 6.25e-05: give --lr 0.001 without --lr_scaling",
}


@pytest.mark.parametrize("given", long_among(CHANGED, [*CHANGED][2:]))
def test_resume_with_another_option_is_refused(ranks, four, saved, given):
    assert refused(ranks, saved, [*four, *given.split()]).endswith(CHANGED[given])


@pytest.mark.parametrize(
    ("what", "count", "size"),
    [("data set", 8, (48, 40)), ("sizes of the images", 4, (42, 35))],
)
def test_resume_with_other_data_is_refused(ranks, folder, saved, what, count, size):
    line = refused(ranks, saved, [*FAST, *make_set(folder / "other", count, size=size)])
    assert re.search(rf"has {what} \w{{12}}, not \w{{12}}: use the same$", line), line


def test_resume_of_a_finished_run_makes_no_step(ranks, four, saved):
    """Nor does it tell a mean loss of the epoch, of which it has seen no image."""
    ended = ranks.run([*four, "--checkpoint", saved, "--resume", "--max_steps", 1])
    assert "Resumed from" in ended.out and "Epoch 1 complete" not in ended.out
    assert not ended.steps() and ended.json_line("Summary")["steps"] == 1
    state = saved_in(saved)
    assert state["step"] == 1
    # By this compare_logs.py tells runs on pictures of another size apart.
    assert ended.json_line("Run")["picture_sizes"] == state["facts"]["sizes of the images"]


@LONG
def test_fp16_scales_its_loss_and_goes_on_with_that_scale(ranks, data, folder):
    """Its range is small: the loss is scaled, and a step whose gradients overflow is left out."""
    path = folder / "c.pt"
    argv = [*data, "--precision", "fp16", "--checkpoint", path, "--resume"]
    scales = []
    for steps in (2, 4):
        run = ranks.run([*argv, "--max_steps", steps])
        assert all(0 < loss < 20 for _, _, loss in run.steps(0))
        state = saved_in(path)
        assert state["not_finite"] == []
        scales.append((state["scaler"]["scale"], state["scaler"]["_growth_tracker"]))
    (first, good), later = scales
    # A step that overflows halves the scale; how many of the first ones do, the machine decides.
    assert first * 2 ** (2 - good) == 2**16
    assert later == (first, good + 2)


@pytest.mark.parametrize(
    ("nproc", "stops"),
    [(2, [3]), pytest.param(1, [1, 3], marks=LONG)],
    ids=["2 ranks", "1 rank, two stops"],
)
def test_interrupted_and_resumed_equals_uninterrupted(ranks, folder, nproc, stops):
    """Bit for bit, with a worker and accumulation; stopped in mid-epoch, of three epochs."""
    path, argv = folder / "c.pt", [*FAST, *make_set(folder / "set", 16), "--num_epochs", 3]
    argv += ["--global_batch_size", 8, "--accumulate_steps", 2, "--workers", 1, "--timeout", 20]
    argv += ["--max_steps", 5]
    whole = ranks.run(argv, nproc)
    facts = whole.json_line("Run")
    assert (facts["max_steps"], facts["steps_per_epoch"]) == (5, 2)
    argv += ["--checkpoint", path, "--resume"]
    argv += ["--checkpoint_every", stops[0]]  # then they agree, too
    parts = []
    for step in stops:
        before = [fault(stop_signal, step, nproc - 1)]
        parts.append(ranks.run(argv, nproc, before=before, expect=STOPPED))
        assert stopped_at(parts[-1].output, "SIGTERM", path, nproc) == step
    parts.append(ranks.run(argv, nproc))
    assert "starts afresh" in parts[0].out
    assert all("Resumed from" in part.out for part in parts[1:])
    for rank in range(nproc):
        assert [line for part in parts for line in part.steps(rank)] == whole.steps(rank)
    last = parts[-1].json_line("Summary")
    assert last["weights_sha256"] == whole.json_line("Summary")["weights_sha256"]
    complete = r"^\[CPU 0\] Epoch (\d) complete \| Avg loss: ([\d.]+)"
    means = re.findall(complete, parts[-1].out, re.M)
    assert means
    for epoch, mean in means:  # of a resumed epoch, that of the steps since
        own = [loss for number, _, loss in parts[-1].steps() if number == int(epoch)]
        assert float(mean) == pytest.approx(np.mean(own), abs=2e-4)


@LONG
def test_resume_with_another_number_of_ranks(ranks, folder):
    argv = [*FAST, *make_set(folder / "set", 16), "--global_batch_size", 4]  # 4 steps an epoch
    argv += ["--checkpoint", folder / "c.pt", "--resume", "--timeout", 20]
    steps = []
    for nproc, last in ((2, 3), (1, 6), (2, 7)):
        ended = ranks.run([*argv, "--max_steps", last], nproc)
        steps += [step for _, step, _ in ended.steps()]
    said(ended.output, "Resumed from .* at step 6$")
    assert steps == [1, 2, 3, 4, 5, 6, 7]


# --- Restarts --------------------------------------------------------------------------------
