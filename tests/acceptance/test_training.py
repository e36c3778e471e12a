"""A training started in any documented way logs every step, validates, and resumes exactly."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from support.datasets import data_args, make_set, truncate
from support.forks import ForkedRun, run_forked
from support.launchers import FAST, changed_project
from support.nodes import NamespacePair
from support.processes import (
    LONG,
    SCRIPT,
    Run,
    demo_command,
    run_demo,
    start,
)

LAST_LINE = r"Cleanup complete\. Total wall time: (\d+[hm] )*\d+\.\d\ds \(\d+\.\d{3}s\)"


def check_ranks(run: Run, ranks: list[int], steps: int) -> None:
    """The log has each step of these ranks, and their end."""
    for rank in ranks:
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, steps + 1)), run.tail()
        assert re.fullmatch(LAST_LINE, run.lines(rank)[-1]), run.tail()


def check_records(run: Run, world_size: int, steps: int, images: int) -> None:
    """The two records of rank 0 stand once in the log, and agree with what was asked for."""
    kinds = [line.split()[0] for line in run.lines(0) if re.match(r"(Run|Summary) \{", line)]
    assert kinds == ["Run", "Summary"]
    begin, end = run.json_line("Run"), run.json_line("Summary")
    assert (begin["world_size"], begin["images"]) == (world_size, images)
    assert begin["max_steps"] == end["steps"] == steps
    assert begin["global_batch_size"] == world_size * begin["batch_size"]
    assert [times["rank"] for times in end["ranks"]] == list(range(world_size))
    assert end["img_per_s"] > 0
    assert end["replicas_identical"] is True


def weights(run: Run) -> str:
    """The digest of the weights at the end."""
    return run.json_line("Summary")["weights_sha256"]


def labelled(data: Path, split: str) -> int:
    """The number of images with a label."""
    notes = json.loads((data / f"annotations/instances_{split}2017.json").read_text())
    return len({found["image_id"] for found in notes["annotations"]})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 44 training images, of which two ranks make 6 steps an epoch."""
    return [*make_set(tmp_path_factory.mktemp("small"), 44), *FAST]


@pytest.fixture(scope="module")
def two_ranks(sample: Path) -> Run:
    """Two ranks that have trained by torchrun on the sample set, for an epoch of 3 steps."""
    epoch = ["--num_epochs", 1, "--batch_size", 16]
    return run_demo([*data_args(sample, val=True), *FAST, *epoch], nproc=2)


# --- Each way to start it ----------------------------------------------------------------------


def test_two_ranks_by_torchrun_log_all_steps_and_agreeing_records(two_ranks, sample):
    check_ranks(two_ranks, [0, 1], steps=3)
    check_records(two_ranks, 2, steps=3, images=labelled(sample, "train"))


@LONG
def test_without_the_launcher_a_node_that_is_loopback_to_itself_names_the_variable_that_helps(
    small,
):
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    command = [sys.executable, SCRIPT, *small, "--timeout", 5]
    with NamespacePair() as pair:
        pair.usual_hosts()
        ranks = [pair.popen(n, command, env=place | {"RANK": str(n)}) for n in (0, 1)]
        for rank in ranks:
            assert re.search("ERROR: .*GLOO_SOCKET_IFNAME", rank.finish(60, expect=1).out)


# --- What the log says -------------------------------------------------------------------------

STEP = r"Epoch 1 \| Step \d+ \| Loss: \d+\.\d{4} \| \d+\.\d img/s"
STEP += r" \| data \d+\.\d ms \| step \d+\.\d ms \| ETA (\d+[hm] )*\d+s"
EPOCH = r"Epoch 1 complete \| Avg loss: \d+\.\d{4} \| \d+\.\d img/s \| \d+\.\d\ds"
VALIDATION = r"Epoch 1 validation \| Top-1: \d+\.\d\d% \| \d+ images \| \d+\.\d\ds"
VALIDATION += r" \| baseline \d+\.\d\d%"


@pytest.mark.parametrize(
    ("mark", "pattern", "ranks"),
    [("| Step ", STEP, "01"), (" complete | ", EPOCH, "01"), (" validation | ", VALIDATION, "0")],
    ids=["step", "epoch", "validation"],
)
def test_lines_have_the_fields_that_readme_shows(two_ranks, mark, pattern, ranks):
    """Of every rank, except the validation, which rank 0 alone writes."""
    found = [line for line in two_ranks.lines() if mark in line]
    assert {line[:8] for line in found} == {f"[CPU {rank}] " for rank in ranks}
    assert all(re.fullmatch(pattern, line[8:]) for line in found), found


def test_validation_counts_each_labelled_image_once_where_shares_are_uneven(two_ranks, sample):
    count = labelled(sample, "val")
    assert count % 2 == 1, "the shares of two ranks have to be uneven"
    ((top_1, images),) = re.findall(r"\| Top-1: (\S+)% \| (\d+) images", two_ranks.out)
    assert int(images) == count
    right = float(top_1) * count / 100
    assert abs(right - round(right)) < 0.01


# --- Resume, and ImageNet's weights ------------------------------------------------------------


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    """A folder with made-up weights where torchvision looks for ImageNet's, and their model."""
    folder = tmp_path_factory.mktemp("imagenet")
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    path = folder / "home/hub/checkpoints" / Path(url).name
    path.parent.mkdir(parents=True)
    torch.manual_seed(5)
    model = torchvision.models.resnet18()
    torch.save(model.state_dict(), path)
    return folder, model


@pytest.fixture(scope="module")
def forked(small, imagenet, tmp_path_factory) -> dict[str, list[Run]]:
    """Runs that need no launcher, by name. All share one start of Python."""
    tmp_path = tmp_path_factory.mktemp("forked")
    runs: dict[str, list[ForkedRun]] = {}
    words = [*make_set(tmp_path / "44", 44), *FAST, "--workers", 1, "--accumulate_steps", 2]
    words += ["--batch_size", 2]
    for ranks in (1, 3):
        saves = [*words, "--checkpoint", tmp_path / f"{ranks}.pt", "--resume"]
        lengths = [(words, 6), (saves, 5), (saves, 6)]  # of three ranks in the second epoch
        runs[f"mid-epoch {ranks}"] = [(ranks, [*w, "--max_steps", n]) for w, n in lengths]
    words = [*make_set(tmp_path / "24", 24, val=5), *FAST, "--checkpoint", tmp_path / "c.pt"]
    words += ["--resume"]
    runs["other ranks"] = [
        (0, [*words, "--batch_size", 8, "--max_steps", 2]),
        (2, [*words, "--batch_size", 4, "--max_steps", 4]),
        (0, [*words, "--batch_size", 8, "--max_steps", 4]),
    ]
    folder, _ = imagenet
    words = [*small, "--weights", "imagenet", "--lr", 1e-9, "--max_steps", 1]
    words += ["--checkpoint", folder / "run.pt"]
    nobody = "http://127.0.0.1:9"
    env = {"TORCH_HOME": str(folder / "home"), "https_proxy": nobody, "http_proxy": nobody}
    runs["imagenet"] = [(2, words, env)]
    runs["options"] = [(0, [*small, *shlex.split(options)]) for options in OPTIONS]
    ended = iter(run_forked([run for some in runs.values() for run in some], cwd=tmp_path))
    return {name: [next(ended) for _ in some] for name, some in runs.items()}


@LONG
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_resumed_in_mid_epoch_ends_with_the_weights_of_an_unbroken_one(forked, ranks):
    """A sum of three depends on their order, which DDP's buckets decide."""
    unbroken, _, resumed = forked[f"mid-epoch {ranks}"]
    per_epoch = unbroken.json_line("Run")["steps_per_epoch"]
    assert per_epoch == {1: 11, 3: 4}[ranks]
    epoch = 1 + 5 // per_epoch
    assert [(of, step) for of, step, _ in resumed.steps(0)] == [(epoch, 6)]
    assert weights(resumed) == weights(unbroken)


@LONG
def test_stopped_by_sigterm_and_resumed_ends_with_the_weights_of_an_unbroken_run(tmp_path):
    """The signal goes to torchrun, which itself then ends with 1."""
    words = [*make_set(tmp_path / "set", 600), *FAST, "--batch_size", 2]
    saves = [*words, "--checkpoint", tmp_path / "run.pt"]
    with start(demo_command(saves, nproc=2)) as started:
        started.wait_for(r"\[CPU 1\] Epoch 1 \| Step 2 ")
        started.signal(signal.SIGTERM)
        stopped = started.finish(60, expect=1)
    steps = re.findall(r"\[CPU \d\] Stopped on SIGTERM \| step (\d+)", stopped.out)
    assert len(steps) == 2 and steps[0] == steps[1]
    end = ["--max_steps", int(steps[0]) + 2]
    unbroken, resumed = run_forked([(2, [*words, *end]), (2, [*saves, *end, "--resume"])])
    assert resumed.json_line("Run")["start_step"] == int(steps[0])
    assert weights(resumed) == weights(unbroken)


@LONG
def test_resumed_with_another_number_of_ranks_goes_on_at_the_same_global_batch(forked):
    """And a finished run that is resumed makes no step."""
    _, resumed, finished = forked["other ranks"]
    assert [step for _, step, _ in resumed.steps(1)] == [3, 4]
    assert not finished.steps(0)
    assert weights(resumed) == weights(finished)


@LONG
def test_imagenet_weights_are_taken_from_the_folder_of_earlier_downloads(forked, imagenet):
    """From a made-up file with the right name, without a network. The last layer is left out. Rank
    1 gets them from rank 0. The learning rate is so small that a step hardly changes them.
    """
    folder, model = imagenet
    (run,) = forked["imagenet"]
    layer = r"imagenet: the last layer, of 1000 other classes, is left out: 80 classes here"
    assert re.search(layer, run.out) and "Downloading" not in run.out
    assert run.json_line("Summary")["replicas_identical"] is True
    found = torch.load(folder / "run.pt", weights_only=True)["model"]
    assert len(found["fc.weight"]) == 80
    for name, weights in model.named_parameters():
        if not name.startswith("fc."):
            assert torch.allclose(found[name], weights, rtol=0, atol=1e-7), name


# --- Options and data --------------------------------------------------------------------------

OPTIONS = [
    "--accumulate_steps 2 --lr_scaling linear --warmup_steps 2 --workers 1 --seed 7 "
    "--grad_compression powersgd --powersgd_rank 2 --max_steps 6",  # it begins at step 4
    "--log_every 2 --checkpoint_every 1 --checkpoint run.pt --resume --precision fp16 "
    "--grad_compression fp16 --batch_size 1 --max_steps 2",  # on a CPU fp16 takes its time
    "--global_batch_size 8 --bucket_cap_mb 5 --timeout 60 --backend gloo --precision bf16 "
    "--grad_compression bf16 --max_steps 3",
]


def check_options(run: Run, options: str) -> None:
    """The run has used these options, and has come to its end."""
    record = run.json_line("Run")
    assert run.json_line("Summary")["steps"] == record["max_steps"]
    for name, value in re.findall(r"--(\w+)(?: ([\w.]+))?", options):
        assert str(record[name]).removesuffix(".0") == (value or "True")


@LONG
def test_options_train_and_stand_in_the_run_record(forked):
    for run, options in zip(forked["options"], OPTIONS, strict=True):
        check_options(run, options)


# The compiler takes a minute for ResNet-18. This has a shortcut, too, and two buckets.
SMALL = """
class Small(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(3, 256, 3, stride=4), torch.nn.ReLU())
        self.block = torch.nn.Conv2d(256, 256, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(256)
        self.fc = torch.nn.Linear(256, num_classes)

    def forward(self, images):
        images = self.first(images)
        return self.fc((images + self.norm(self.block(images))).relu().mean((2, 3)))

torchvision.models.resnet18 = Small

"""


@LONG
def test_compiled_model_trains(small, tmp_path):
    program = changed_project(tmp_path, SMALL) / SCRIPT.name
    words = [*small, "--max_steps", 2, "--compile", "--bucket_cap_mb", 1]
    with start([sys.executable, program, *words]) as started:
        check_options(started.finish(300), "--compile --max_steps 2")


@LONG
def test_real_coco_images_train(tiny_coco):
    options = ["--image_size", 64, "--batch_size", 10, "--num_epochs", 1]
    run = run_demo([*data_args(tiny_coco, val=True), *FAST, *options], launcher="python")
    check_ranks(run, [0], steps=5)
    assert f"% | {labelled(tiny_coco, 'val')} images | " in run.out


@LONG
def test_without_a_launcher_a_damaged_image_is_named_in_a_warning_and_training_goes_on(tmp_path):
    arguments = [*make_set(tmp_path, 100), *FAST, "--batch_size", 25, "--num_epochs", 1]
    damaged = tmp_path / "images/0042.jpg"
    truncate(damaged)
    run = run_demo(arguments, launcher="python", damaged=True)
    check_ranks(run, [0], steps=4)
    check_records(run, 1, steps=4, images=100)
    assert [line for line in run.lines() if "WARNING" in line and str(damaged) in line]
