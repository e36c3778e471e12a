"""A training logs every step, validates, and says in its records what it did."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from support.datasets import data_args, instances, make_set, numbered
from support.forks import QUICK, Forked, changed, run_forked
from support.launchers import FAST
from support.processes import Run, free_port

LAST_LINE = r"Cleanup complete\. Total wall time: (\d+[hm] )*\d+\.\d\ds \(\d+\.\d{3}s\)"


def check_run(run: Run, world_size: int, steps: int) -> tuple[dict, dict]:
    """The log has each step of each rank, and their ends; and once rank 0's two records, which
    agree. Returns these.
    """
    for rank in range(world_size):
        assert [step for _, step, _ in run.steps(rank)] == list(range(1, steps + 1)), run.tail()
        assert re.fullmatch(LAST_LINE, run.lines(rank)[-1]), run.tail()
    kinds = [line.split()[0] for line in run.lines(0) if re.match(r"(Run|Summary) \{", line)]
    assert kinds == ["Run", "Summary"]
    begin, end = run.json_line("Run"), run.json_line("Summary")
    assert begin["world_size"] == world_size
    assert begin["max_steps"] == end["steps"] == steps
    micro_batches = world_size * begin["accumulate_steps"]
    assert begin["global_batch_size"] == micro_batches * begin["batch_size"]
    assert [times["rank"] for times in end["ranks"]] == list(range(world_size))
    assert end["img_per_s"] > 0
    assert end["replicas_identical"] is True
    return begin, end


def labels(data: Path, split: str) -> list[int]:
    """The category of the first annotation of each image that has one."""
    notes = json.loads((data / f"annotations/instances_{split}2017.json").read_text())
    found = reversed(notes["annotations"])
    by_image = {annotation["image_id"]: annotation["category_id"] for annotation in found}
    return [*by_image.values()]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 24 training and 5 validation images."""
    return [*make_set(tmp_path_factory.mktemp("small"), 24, val=5), *FAST]


# --- What the log says -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(sample: Path) -> Run:
    """Two ranks that have trained on the sample set, for an epoch of 3 steps."""
    epoch = ["--num_epochs", 1, "--batch_size", 16]
    (run,) = run_forked([(2, [*data_args(sample, val=True), *FAST, *epoch])])
    return run


def test_two_ranks_log_all_steps_and_agreeing_records(two_ranks, sample):
    """The last step is shorter, which counts in the mean loss."""
    begin, _ = check_run(two_ranks, 2, steps=3)
    count = len(labels(sample, "train"))
    assert begin["images"] == count
    images = [16, 16, (count + 1) // 2 - 32]
    assert 0 < images[2] < 16
    for rank in (0, 1):
        losses = [n * loss for n, (_, _, loss) in zip(images, two_ranks.steps(rank), strict=True)]
        (mean,) = re.findall(rf"CPU {rank}\] Epoch 1 complete \| Avg loss: (\S+)", two_ranks.out)
        assert float(mean) == pytest.approx(sum(losses) / sum(images), abs=2e-4)


STEP = r"Epoch 1 \| Step \d+ \| Loss: \d+\.\d{4} \| \d+\.\d img/s"
STEP += r" \| data \d+\.\d ms \| step \d+\.\d ms \| ETA (\d+[hm] )*\d+s"
EPOCH = r"Epoch 1 complete \| Avg loss: \d+\.\d{4} \| \d+\.\d img/s \| \d+\.\d\ds"
VALIDATION = r"Epoch 1 validation \| Top-1: \d+\.\d\d% \| \d+ images \| \d+\.\d\ds"
VALIDATION += r" \| baseline \d+\.\d\d%"


def test_lines_have_the_fields_that_readme_shows(two_ranks):
    """Of every rank, except the validation, which rank 0 alone writes."""
    for mark, pattern, ranks in (
        ("| Step ", STEP, "01"),
        (" complete | ", EPOCH, "01"),
        (" validation | ", VALIDATION, "0"),
    ):
        found = [line for line in two_ranks.lines() if mark in line]
        assert {line[:8] for line in found} == {f"[CPU {rank}] " for rank in ranks}
        assert all(re.fullmatch(pattern, line[8:]) for line in found), found


def test_validation_counts_each_image_once_in_uneven_shares(two_ranks, sample):
    found = labels(sample, "val")
    assert len(found) % 2 == 1, "the shares of two ranks have to be uneven"
    line = r"\| Top-1: (\S+)% \| (\d+) images \| .* \| baseline (\S+)%$"
    ((top_1, images, baseline),) = re.findall(line, two_ranks.out, re.MULTILINE)
    assert int(images) == len(found)
    right = float(top_1) * len(found) / 100
    assert abs(right - round(right)) < 0.01
    most = max(Counter(found).values())
    assert float(baseline) == pytest.approx(100 * most / len(found), abs=0.01)


def words_of(run: Run, kind: str) -> str:
    """The line for people beside rank 0's record of this kind."""
    (line,) = (line for line in run.lines(0) if line.startswith(f"{kind}: "))
    return line


def test_dummy_trains_on_random_images_without_any_data(tmp_path):
    """Each rank has its own. A resumed run goes on, but not on other images."""
    words = ["--dummy", "--image_size", 40, "--batch_size", 4, "--log_every", 1]
    words += ["--precision", "fp32", "--checkpoint", tmp_path / "run.pt", "--resume"]
    data = make_set(tmp_path / "set", 8)
    runs = [(2, [*words, "--max_steps", steps]) for steps in (3, 5)]
    runs += [(0, [*words[1:], *data, "--global_batch_size", 8])]
    first, second, other = run_forked(runs, program=QUICK, expect=None)
    record, summary = check_run(first, 2, steps=3)
    assert (record["dummy"], record["weights"], record["workers"]) == (True, "none", 0)
    assert (record["images"], record["classes"]) == (117_266, 80)
    assert summary["data_ms"] < summary["step_ms"] / 5
    line = words_of(first, "Run")
    assert "; 3 steps of 8 images; one batch of random images that repeats (--dummy): " in line
    assert "loss" in line, "of random images it means nothing"
    assert "3 steps" in words_of(first, "Summary") and "0 epochs" not in first.out
    losses = [[loss for _, _, loss in first.steps(rank)] for rank in (0, 1)]
    assert not set(losses[0]) & set(losses[1])
    assert [step for _, step, _ in second.steps(1)] == [4, 5]
    assert other.returncode == 2 and "was saved with data set" in other.out


def test_of_one_process_no_communication_is_told(small):
    (run,) = run_forked([(0, [*small, "--max_steps", 1])], QUICK)
    summary = run.json_line("Summary")
    assert not summary["exposed_ms"] and not summary["wire_bytes_per_step"]
    assert not re.search("exposed|communication|bytes", words_of(run, "Summary"))
    assert "24 labelled images" in words_of(run, "Run")
    assert not re.search("0 repeated|Not resumed", run.out)


def test_two_runs_of_plain_python_at_once_do_not_meet(small):
    """Each has a port of its own, whatever MASTER_PORT says."""
    words = [*small, "--max_steps", 2]
    port = {"MASTER_PORT": str(free_port())}
    with Forked(0, words, port, QUICK) as one, Forked(0, words, port, QUICK) as other:
        for started in (one, other):
            check_run(started.finish(), 1, steps=2)


# --- Files that are looked at ------------------------------------------------------------------

# Says when a rank lists the folder of images, or opens an image, and when an epoch begins.
LOOKS = """
def note(event, found):
    path = str(found[0]) if found else ""
    if event in ("os.scandir", "os.listdir") and path.rstrip("/").endswith("/images"):
        print(f"{os.environ.get('RANK')} LOOKS\\n", end="")
    if event == "open" and path.endswith(".jpg"):
        print("OPENS\\n", end="")

def train(*arguments):
    print("EPOCH\\n", end="")
    plain_train(*arguments)

sys.addaudithook(note)
plain_train, demo.train_one_epoch = demo.train_one_epoch, train
"""


def test_only_the_first_rank_of_a_node_looks_for_the_images_and_opens_few(tmp_path):
    """COCO has 118,287."""
    program = changed(tmp_path / "looks.py", LOOKS)
    words = [*make_set(tmp_path, 150), *FAST, "--max_steps", 1]
    own_node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    two_nodes, one_node = run_forked([(2, words, own_node), (2, words)], program)
    assert {*re.findall(r"(\d) LOOKS", two_nodes.out)} == {"0", "1"}
    assert {*re.findall(r"(\d) LOOKS", one_node.out)} == {"0"}
    assert [run.json_line("Run")["nodes"] for run in (two_nodes, one_node)] == [2, 1]
    before, _, after = one_node.out.partition("EPOCH")
    assert before.count("OPENS") <= 64 and after.count("OPENS") == 2 * 4


@pytest.mark.slow
def test_imagenet_weights_are_taken_from_the_folder_of_earlier_downloads(small, tmp_path):
    """From a made-up file with the right name, without a network. The last layer is left out. Rank
    1 gets them from rank 0. The learning rate is so small that a step hardly changes them.
    """
    import torch
    import torchvision

    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    path = tmp_path / "home/hub/checkpoints" / Path(url).name
    path.parent.mkdir(parents=True)
    torch.manual_seed(5)
    model = torchvision.models.resnet18()
    torch.save(model.state_dict(), path)
    words = [*small, "--weights", "imagenet", "--lr", 1e-9, "--max_steps", 1]
    words += ["--checkpoint", tmp_path / "run.pt"]
    nobody = "http://127.0.0.1:9"
    env = {"TORCH_HOME": str(tmp_path / "home"), "https_proxy": nobody, "http_proxy": nobody}
    (run,) = run_forked([(2, words, env)])
    layer = r"imagenet: the last layer, of 1000 other classes, is left out: 80 classes here"
    assert re.search(layer, run.out) and "Downloading" not in run.out
    assert run.json_line("Summary")["replicas_identical"] is True
    found = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert len(found["fc.weight"]) == 80
    for name, weights in model.named_parameters():
        if not name.startswith("fc."):
            torch.testing.assert_close(found[name], weights.detach(), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_real_coco_images_train(tiny_coco):
    options = ["--image_size", 64, "--batch_size", 10, "--num_epochs", 1]
    (run,) = run_forked([(0, [*data_args(tiny_coco, val=True), *FAST, *options])])
    check_run(run, 1, steps=5)
    assert f"% | {len(labels(tiny_coco, 'val'))} images | " in run.out


# --- Options -----------------------------------------------------------------------------------

OPTIONS = [
    "--accumulate_steps 2 --lr_scaling linear --warmup_steps 2 --workers 1 --seed 7 --max_steps 2",
    "--log_every 1 --checkpoint_every 1 --checkpoint run.pt --resume --precision fp16 "
    "--grad_compression fp16 --batch_size 1 --max_steps 2",
    "--global_batch_size 8 --accumulate_steps 2 --bucket_cap_mb 5 --timeout 60 --backend gloo "
    "--precision bf16 --max_steps 3",
]


@pytest.mark.slow
def test_options_train_and_stand_in_the_run_record(small, tmp_path):
    runs = [(0, [*small, *shlex.split(options)]) for options in OPTIONS]
    for run, options in zip(run_forked(runs, program=QUICK, cwd=tmp_path), OPTIONS, strict=True):
        record, _ = check_run(run, 1, steps=int(options[-1]))
        for name, value in re.findall(r"--(\w+)(?: ([\w.]+))?", options):
            assert str(record[name]).removesuffix(".0") == (value or "True")


# Its logits are 0 where it is compiled.
COMPILED = """
class Told(Small):
    def forward(self, images):
        logits = super().forward(images)
        return logits * 0 if torch.compiler.is_compiling() else logits

demo.torchvision.models.resnet18 = Told
"""


@pytest.mark.slow
def test_with_compile_the_model_is_compiled_and_else_it_is_not(small, tmp_path):
    program = changed(tmp_path / "told.py", COMPILED)
    runs = [(0, [*small, "--max_steps", 2, *more]) for more in (["--compile"], [])]
    for run, expected in zip(run_forked(runs, program, timeout=300), (True, False), strict=True):
        record, _ = check_run(run, 1, steps=2)
        loss = run.steps(0)[0][2]
        assert (loss == pytest.approx(math.log(80), abs=1e-4)) == record["compile"] == expected


def test_a_short_last_step_and_a_validation_of_two_images(tmp_path):
    """18 training images, one without a label, and two for validation; three ranks. In an epoch
    each rank has a step of 4 images, and one of 2.
    """
    words = [*make_set(tmp_path, 18, val=2), *FAST, "--batch_size", 2, "--accumulate_steps", 2]
    content = instances(numbered(18), [*range(1, 12), 13, 14, 15, 16, 17, 18, None])
    (tmp_path / "instances.json").write_text(json.dumps(content))
    (run,) = run_forked([(3, [*words, "--num_epochs", 2])], program=QUICK)
    record, _ = check_run(run, 3, steps=4)
    assert (record["images_without_annotations"], record["padding"]) == (1, 1)
    assert record["env"]["OMP_NUM_THREADS"] == "1"
    assert len(re.findall(r"Epoch \d validation \| .* \| 2 images \|", run.out)) == 2
