"""What ranks do in a run: the order of images, stops, what is resumed, and failures.

Where the model does not matter it is a small one (support/quick.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from support.datasets import instances, make_set, numbered
from support.forks import QUICK, Forked, changed, run_forked
from support.launchers import FAST
from support.processes import Run, assert_none_left, processes, wait_until


def load(checkpoint: Path) -> dict:
    import torch  # takes seconds, which most of these tests do not need

    return torch.load(checkpoint, weights_only=True)


# --- A run of one process ----------------------------------------------------------------------

# It prints the key of each image that it reads, how many workers it has before the first backward
# pass, of each forward pass whether DDP makes it, for training, and with gradients, and how many
# models in DDP are left when the group is destroyed.
WATCHED = r"""
import gc

def read(dataset, key):
    print(f"KEY {key[0]} {key[1]}\n", end="")
    return plain_read(dataset, key)

def rebuild(training):
    print(f"WORKERS {len(demo.multiprocessing.active_children())}\n", end="")
    plain_rebuild(training)

def forward(training, model, images):
    logits, of_training = plain_forward(training, model, images), training.model.training
    print(f"FORWARD {model is training.ddp} {of_training} {logits.requires_grad}\n", end="")
    return logits

def destroy():
    gc.collect()
    left = [found for found in gc.get_objects() if type(found) is demo.DistributedDataParallel]
    print(f"LEFT {len(left)}\n", end="")
    plain_destroy()

plain_forward, demo.forward = demo.forward, forward
plain_read = demo.CocoFirstCategory.__getitem__
demo.CocoFirstCategory.__getitem__ = read
plain_rebuild, demo.rebuild_buckets = demo.rebuild_buckets, rebuild
plain_destroy, demo.dist.destroy_process_group = demo.dist.destroy_process_group, destroy
"""


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory) -> Run:
    """22 images in batches of 4 are 6 steps an epoch. The timeout is longer than a loader can
    wait, and --max_steps more than two epochs have.
    """
    folder = tmp_path_factory.mktemp("two_epochs")
    words = [*make_set(folder, 22, val=3), *FAST, "--num_epochs", 2, "--log_every", 3]
    words += ["--workers", 1, "--timeout", 1e7, "--max_steps", 99]
    (run,) = run_forked([(0, words)], program=changed(folder / "watched.py", WATCHED))
    return run


def test_each_epoch_has_each_image_once_in_another_order(two_epochs):
    """And no image is read that nobody uses. Those of the validation have 0 as epoch."""
    keys = [tuple(map(int, found)) for found in re.findall(r"KEY (\d+) (\d+)", two_epochs.out)]
    val, first, second = ([index for of, index in keys if of == epoch] for epoch in range(3))
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second
    assert val == [0, 1, 2] * 2


def test_training_is_by_ddp_and_validation_by_its_model(two_epochs):
    """And the validation keeps nothing for gradients, which would take memory."""
    found = re.findall(r"FORWARD (\w+) (\w+) (\w+)", two_epochs.out)
    step = ("True", "True", "True")
    epoch = [step] * 6 + [("False", "False", "False")]
    assert found == [step, *epoch, *epoch]  # the first one is of rebuild_buckets


def test_workers_precede_backward_and_ddp_goes_before_the_group(two_epochs):
    """The pass starts threads, after which a fork may hang."""
    assert {"WORKERS 2", "LEFT 0"} <= {*two_epochs.lines()}


def test_figures_of_a_run_agree(two_epochs):
    summary = two_epochs.json_line("Summary")
    assert summary["steps"] == 12
    assert summary["measured_steps"] == 12 - 3  # the last one of each epoch has 2 images
    images = summary["img_per_s"] * summary["step_ms"] / 1e3 * 9
    assert images == pytest.approx(44 - 3 * 4)
    (times,) = summary["ranks"]
    parts = times["data_ms"] + times["compute_ms"] + times["exposed_ms"]
    assert parts == pytest.approx(times["step_ms"])
    assert 0.1 < summary["step_ms"] / (1e3 * summary["train_s"] / 12) < 2  # the first one is slow
    assert [step for _, step, _ in two_epochs.steps()] == [1, 4, 7, 10, 12]
    fields = r"\| ([\d.]+) img/s \| data ([\d.]+) ms \| step ([\d.]+) ms"
    for found in re.findall(fields, two_epochs.out):
        rate, data, step = map(float, found)
        assert 0 < data < step
        assert 1 < rate * step / 1e3 < 4.1  # images in a step


def test_that_one_class_alone_cannot_be_learned_is_said(tmp_path):
    words = [*make_set(tmp_path, 8), *FAST, "--max_steps", 1]
    (tmp_path / "instances.json").write_text(json.dumps(instances(numbered(8), ids=[7])))
    (run,) = run_forked([(0, words)], QUICK, expect=None)
    assert re.search(r"(?i)\b(one|single|1) class\b", run.output)


# --- Stops -------------------------------------------------------------------------------------


STOPS = [pytest.param(name, marks=pytest.mark.slow) for name in ("SIGUSR1", "SIGINT", "SIGHUP")]


@pytest.mark.parametrize("name", ["SIGTERM", *STOPS])
def test_a_stop_signal_to_all_processes_saves_and_ends_with_75(tmp_path, name):
    """As SLURM sends it. PyTorch lets SIGTERM end loader workers, and then the run. What is saved
    resumes to the weights of a run that was not stopped.
    """
    words = [*make_set(tmp_path, 22), *FAST, "--num_epochs", 99, "--workers", 1]
    saves = ["--checkpoint", tmp_path / "c.pt"]
    with Forked(0, [*words, *saves], program=QUICK) as started:
        started.wait_for(r"\| Step 3 ")
        rank = started.rank_pid(0)
        workers = [found.pid for found in processes(started.test_id) if found.parent == rank]
        for pid in [*workers, rank]:
            os.kill(pid, signal.Signals[name])
            time.sleep(0.3)
        run = started.finish(30, expect=75)
    assert workers
    end = re.fullmatch(
        rf"Stopped on {name} \| step (\d+) \| saved \| exit code 75", run.lines(0)[-1]
    )
    assert load(tmp_path / "c.pt")["step"] == int(end[1]) >= 3
    words += ["--max_steps", int(end[1]) + 2]
    runs = run_forked([(0, [*words, *saves, "--resume"]), (0, words)], QUICK)
    resumed, unbroken = (run.json_line("Summary")["weights_sha256"] for run in runs)
    assert resumed == unbroken


# From step 3 on rank 0 waits in a collective call for rank 1.
HANGS = """
def hang(training, *rest):
    while training.step == 3 and os.environ["RANK"] == "1":
        time.sleep(0.05)
    plain(training, *rest)

plain, demo.note_line = demo.note_line, hang
"""


@pytest.mark.slow
def test_a_second_sigint_ends_a_rank_that_waits_for_another(tmp_path):
    words = [*make_set(tmp_path, 64), *FAST, "--num_epochs", 999, "--checkpoint", "c.pt"]
    program = changed(tmp_path / "hangs.py", HANGS)
    with Forked(2, words, program=program, cwd=tmp_path) as started:
        started.wait_for(r"CPU 0\] .*\| Step 2 ")
        time.sleep(1)
        rank = started.rank_pid(0)
        for pause in (0.2, 2):  # under srun one Ctrl-C arrives twice
            os.kill(rank, signal.SIGINT)
            time.sleep(pause)
        assert rank in started.pids()
        os.kill(rank, signal.SIGINT)
        wait_until(lambda: rank not in started.pids(), 5, "the end of rank 0")


# A step of training takes half a second, a batch of validation next to nothing.
SLOW_STEPS = """
plain = demo.forward
def forward(training, model, images):
    if model is training.ddp:
        time.sleep(0.5)
    return plain(training, model, images)
demo.forward = forward
"""


def test_a_stop_comes_within_seconds_where_steps_are_slow(tmp_path):
    """Also after a validation, whose batches are quick."""
    words = [*make_set(tmp_path, 64, val=256), *FAST, "--num_epochs", 20]
    with Forked(2, words, program=changed(tmp_path / "slow.py", SLOW_STEPS)) as started:
        started.wait_for("Epoch 1 validation")
        started.signal(signal.SIGTERM)
        run = started.finish(60, expect=1)
    end = r"Stopped on SIGTERM \| step (\d+) \| not saved: no --checkpoint \| exit code 1"
    for rank in (0, 1):
        step = int(re.fullmatch(end, run.lines(rank)[-1])[1])
        assert 8 <= step <= 12, run.tail()  # an epoch has 8


def test_ranks_whose_torchrun_is_killed_save_and_end(tmp_path):
    words = [*make_set(tmp_path, 22), *FAST, "--num_epochs", 99, "--checkpoint", tmp_path / "c.pt"]
    with Forked(2, words, {"TORCHELASTIC_RUN_ID": "1"}, QUICK) as started:
        started.wait_for(r"\| Step 2 ")
        os.kill(started.pid, signal.SIGKILL)
        end = r"the parent process \(torchrun\?\) of rank \d has ended \| step \d+ \| saved"
        wait_until(lambda: len(re.findall(end, started.text())) == 2, 10, "the end of both ranks")
        assert_none_left(started.test_id)
    assert (tmp_path / "c.pt").exists()


def test_ranks_started_by_hand_go_on_when_their_shell_has_ended(tmp_path):
    """RANK is set, and there is no torchrun that they could have lost."""
    words = [*make_set(tmp_path, 22), *FAST, "--num_epochs", 60]
    with Forked(2, words, program=QUICK) as started:
        started.wait_for(r"\| Step 2 ")
        os.kill(started.pid, signal.SIGKILL)
        assert "Epoch 30 " not in started.text()
        done = r"CPU \d\] Cleanup complete"
        wait_until(lambda: len(re.findall(done, started.text())) == 2, 60, "the end of both ranks")
        assert_none_left(started.test_id)


SLOW_VALIDATION = """
def slow(path):
    if "val_images" in path and os.environ["RANK"] == "1":
        time.sleep(1)
    return plain(path)

plain, demo.load_image = demo.load_image, slow
"""


@pytest.mark.slow
def test_a_stop_in_a_slow_validation_saves_and_is_validated_later(tmp_path):
    """A minute of it would be left."""
    words = [*make_set(tmp_path, 8, val=120), *FAST, "--num_epochs", 1]
    words += ["--checkpoint", tmp_path / "c.pt", "--resume"]
    with Forked(2, words, program=changed(tmp_path / "slow.py", SLOW_VALIDATION)) as started:
        started.wait_for("Epoch 1 complete")
        os.kill(started.rank_pid(0), signal.SIGTERM)
        run = started.finish(40, expect=75)
    for rank in (0, 1):
        assert run.lines(rank)[-1] == "Stopped on SIGTERM | step 1 | saved | exit code 75"
    assert " validation | " not in run.out
    (resumed,) = run_forked([(2, words)], program=QUICK)
    assert re.search(r"Epoch 1 validation \| .* \| 120 images", resumed.out)
    assert not resumed.steps(0)


# --- A run that is resumed ----------------------------------------------------------------------

# Each checkpoint stays, under its step's number. In fp16 the first step overflows, and makes the
# scaler's factor smaller. Each rank prints which weights it validates. Meanwhile the ranks agree
# to go on as often as they can.
KEEPING = """
def keep(training, path):
    plain(training, f"{path}.{training.step}")

def scaler(*arguments, **options):
    return plain_scaler(*arguments, init_scale=2.0**40, backoff_factor=2.0**-30, **options)

def evaluate(training, *rest):
    digest = demo.digest_of_weights(training.model.state_dict().values())
    print(f"VALIDATES {digest}\\n", end="")
    plain_evaluate(training, *rest)

plain, demo.write_checkpoint = demo.write_checkpoint, keep
plain_evaluate, demo.evaluate = demo.evaluate, evaluate
plain_scaler, demo.torch.amp.GradScaler = demo.torch.amp.GradScaler, scaler
demo.MOST_STEPS_WITHOUT_AGREEMENT = 1
"""


@pytest.mark.parametrize(
    ("ranks", "precision", "scale"),
    [
        (1, "fp32", None),
        (3, "fp32", None),
        pytest.param(1, "fp16", 2**10, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_in_mid_epoch_ends_as_an_unbroken_one(tmp_path, ranks, precision, scale):
    """With the same weights, bit for bit: a sum of three depends on the order, which DDP's buckets
    decide. An epoch has two steps, of up to two micro-batches, and is validated once, by ranks of
    which the last one has a batch less.
    """
    words = [*make_set(tmp_path, 8 * ranks - 1, val=8), *FAST, "--batch_size", 2, "--seed", 1]
    words += ["--accumulate_steps", 2, "--workers", 1, "--max_steps", 4, "--checkpoint_every", 3]
    words += ["--precision", precision, "--timeout", 30]
    program = changed(tmp_path / "keeping.py", KEEPING)
    last = ["--checkpoint", tmp_path / "c.pt.3", "--resume"]
    runs = [(ranks, [*words, "--checkpoint", tmp_path / "c.pt"]), (ranks, [*words, *last])]
    unbroken, resumed = run_forked(runs, program=program)
    saved = {path.name: load(path) for path in tmp_path.glob("c.pt.*")}
    assert saved.keys() >= {"c.pt.2", "c.pt.3", "c.pt.4"} and "c.pt.1" not in saved
    assert saved["c.pt.3"]["scaler"].get("scale") == scale
    assert [(epoch, step) for epoch, step, _ in resumed.steps(0)] == [(2, 4)]
    ends = [run.json_line("Summary")["weights_sha256"] for run in (unbroken, resumed)]
    assert ends[0] == ends[1]
    assert re.findall(r"Epoch (\d) validation", unbroken.out) == ["1", "2"]
    assert len({*re.findall(r"VALIDATES (\w+)", unbroken.out)}) == 2, "not one for all ranks"
    assert re.findall(r"Epoch (\d) validation", resumed.out) == ["2"]


@pytest.mark.slow
def test_resumed_with_other_numbers_of_processes_each_image_comes_once(tmp_path):
    """An epoch of 16 images in 4 steps: the first by two processes, then by four and one. A
    checkpoint has no trace of DDP.
    """
    words = [*make_set(tmp_path, 16), *FAST, "--num_epochs", 1, "--workers", 0, "--resume"]
    words += ["--global_batch_size", 4, "--checkpoint", tmp_path / "c.pt", "--max_steps"]
    program = changed(tmp_path / "watched.py", WATCHED)
    runs = run_forked([(2, [*words, 1]), (4, [*words, 2]), (0, [*words, 4])], program)
    keys = [re.findall(r"KEY 1 (\d+)", run.out) for run in runs]
    assert [*map(len, keys)] == [4, 4, 8]
    assert {int(key) for run in keys for key in run} == {*range(16)}
    assert {"conv1.weight", "fc.bias"} < load(tmp_path / "c.pt")["model"].keys()


# --- Two ranks ---------------------------------------------------------------------------------

# Rank 0 of bf16 hardware, rank 1 of older hardware, which is also slower at its end.
UNLIKE = """
def main(process):
    args = demo.parse_arguments(sys.argv[1:])
    demo.read_environment(process)
    demo.join_process_group(args, process)
    demo.fast_precision = lambda args, place: ["bf16", "fp32"][place.rank]
    demo.fill_in_arguments(args, process, 10)
    time.sleep(process.rank)
    demo.log(process, f"precision {args.precision}")
"""


def test_precision_is_the_fastest_one_that_suits_all_ranks(tmp_path):
    """And a rank that is done waits for the others."""
    words = ["--coco_image_path", "any", "--annotation_path", "any", "--precision", "auto"]
    (run,) = run_forked([(2, words)], program=changed(tmp_path / "unlike.py", UNLIKE))
    assert [run.lines(rank)[0] for rank in (0, 1)] == ["precision fp32"] * 2
    assert run.out.index("[CPU 1] precision") < run.out.index("[CPU 0] Cleanup complete")


# One rank has other statistics of batch norm: no parameter, but a part of the model.
DRIFT = """
def drifted(training):
    training.model.bn1.running_mean += demo.dist.get_rank()
    plain(training)

plain, demo.log_summary = demo.log_summary, drifted
"""


def test_ranks_that_end_with_different_weights_fail(tmp_path):
    words = [*make_set(tmp_path, 16), *FAST, "--max_steps", 1]
    (run,) = run_forked([(2, words)], program=changed(tmp_path / "drift.py", DRIFT), expect=2)
    assert run.output.count("ERROR: the replicas differ") == 1
    assert run.json_line("Summary")["replicas_identical"] is False
    assert "replicas identical: False" in run.out


NAN = """
def not_a_number(*inputs, **options):
    factor = os.environ["LOSS"] if os.environ["RANK"] == "1" else 1
    return plain(*inputs, **options) * float(factor)

plain, demo.cross_entropy = demo.cross_entropy, not_a_number
"""


def test_a_loss_of_one_rank_that_is_not_finite_ends_the_run(tmp_path):
    words, program = [*make_set(tmp_path, 16), *FAST], changed(tmp_path / "nan.py", NAN)
    runs = [(2, words, {"LOSS": value}) for value in ("nan", "inf")]
    for run in run_forked(runs, program=program, expect=2):
        line = r"ERROR: a loss up to step 1 is not finite: .*lower --lr, and another --checkpoint"
        assert re.search(line, run.out)


# After the first step the loader worker reads an image for a minute.
BUSY_WORKER = """
def slow(dataset, key):
    time.sleep(60 * next(dataset.reads))
    return plain(dataset, key)

def fail(*_):
    raise RuntimeError("of this rank alone")

plain, demo.CocoFirstCategory.__getitem__ = demo.CocoFirstCategory.__getitem__, slow
demo.CocoFirstCategory.reads = iter([0, 0, 0, 0, 1])
demo.note_line = fail
"""


def test_loader_workers_end_with_a_rank_that_fails(tmp_path):
    """They ignore SIGTERM."""
    words = [*make_set(tmp_path, 8), *FAST, "--workers", 1]
    program = changed(tmp_path / "busy.py", BUSY_WORKER)
    (run,) = run_forked([(0, words)], program=program, expect=1)
    assert "ERROR: RuntimeError: of this rank alone" in run.out
