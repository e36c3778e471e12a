"""A training started in any documented way logs every step, validates, and resumes exactly."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import sys
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from support.datasets import data_args, instances, make_set, numbered, truncate
from support.forks import QUICK, Forked, changed, run_forked
from support.launchers import FAST
from support.nodes import NamespacePair
from support.processes import SCRIPT, Run, free_port

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


def first_categories(data: Path, split: str) -> dict[int, int]:
    """{image: category of its first annotation}, of the images that have one."""
    notes = json.loads((data / f"annotations/instances_{split}2017.json").read_text())
    found = reversed(notes["annotations"])
    return {annotation["image_id"]: annotation["category_id"] for annotation in found}


def labelled(data: Path, split: str) -> int:
    """The number of images with a label."""
    return len(first_categories(data, split))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for 24 training and 5 validation images."""
    return [*make_set(tmp_path_factory.mktemp("small"), 24, val=5), *FAST]


@pytest.fixture(scope="module")
def two_ranks(sample: Path) -> Run:
    """Two ranks that have trained on the sample set, for an epoch of 3 steps."""
    epoch = ["--num_epochs", 1, "--batch_size", 16]
    (run,) = run_forked([(2, [*data_args(sample, val=True), *FAST, *epoch])])
    return run


def test_two_ranks_log_all_steps_and_agreeing_records(two_ranks, sample):
    """The last step is shorter, which counts in the mean loss."""
    count = labelled(sample, "train")
    check_ranks(two_ranks, [0, 1], steps=3)
    check_records(two_ranks, 2, steps=3, images=count)
    images = [16, 16, (count + 1) // 2 - 32]
    assert 0 < images[2] < 16
    for rank in (0, 1):
        losses = [n * loss for n, (_, _, loss) in zip(images, two_ranks.steps(rank), strict=True)]
        (mean,) = re.findall(rf"CPU {rank}\] Epoch 1 complete \| Avg loss: (\S+)", two_ranks.out)
        assert float(mean) == pytest.approx(sum(losses) / sum(images), abs=2e-4)


@pytest.mark.slow
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
    (baseline,) = re.findall(r"\| baseline (\S+)%$", two_ranks.out, re.MULTILINE)
    most = max(Counter(first_categories(sample, "val").values()).values())
    assert float(baseline) == pytest.approx(100 * most / count, abs=0.01)


def words_of(run: Run, kind: str) -> str:
    """The line for people beside rank 0's record of this kind."""
    (line,) = (line for line in run.lines(0) if line.startswith(f"{kind}: "))
    return line


@pytest.fixture(scope="module")
def dummy() -> Run:
    """One process with random images."""
    words = ["--dummy", "--image_size", 40, "--batch_size", 4, "--max_steps", 2]
    (run,) = run_forked([(0, [*words, "--precision", "fp32"])], QUICK)
    return run


def test_one_process_alone_communicates_nothing(dummy):
    summary = dummy.json_line("Summary")
    assert not summary["exposed_ms"] and not summary["wire_bytes_per_step"]


def test_of_one_process_alone_no_communication_is_told(dummy):
    assert not re.search("exposed|communication|bytes", words_of(dummy, "Summary"))


def test_the_run_line_says_that_the_loss_of_random_images_means_nothing(dummy):
    assert "loss" in words_of(dummy, "Run")


def test_random_images_have_no_epochs_of_which_the_log_tells(dummy):
    assert "2 steps" in words_of(dummy, "Summary")
    assert "0 epochs" not in dummy.out and "of 29317" not in dummy.out


def test_the_run_line_tells_nothing_that_is_not_so(small):
    (run,) = run_forked([(0, [*small, "--max_steps", 1])], QUICK)
    assert "24 labelled images" in words_of(run, "Run")
    assert not re.search("0 repeated|Not resumed", run.out)


def test_nodes_are_counted_where_each_process_has_local_rank_0(small):
    """As with torchrun --virtual-local-rank."""
    place = {"LOCAL_RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    (run,) = run_forked([(2, [*small, "--max_steps", 1], place)], QUICK)
    assert run.json_line("Run")["nodes"] == 1


# Says which rank lists the folder of images.
LISTED = """
def note(event, found):
    if event in ("os.scandir", "os.listdir") and str(found[0]).rstrip("/").endswith("/images"):
        print(f"{os.environ['RANK']} LOOKS\\n", end="")

sys.addaudithook(note)
"""


def test_only_the_first_rank_of_a_node_looks_for_the_images(small, tmp_path):
    program = changed(tmp_path / "listed.py", LISTED)
    words, own_node = [*small, "--max_steps", 1], {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    two_nodes, one_node = run_forked([(2, words, own_node), (2, words)], program)
    assert {*re.findall(r"(\d) LOOKS", two_nodes.out)} == {"0", "1"}
    assert {*re.findall(r"(\d) LOOKS", one_node.out)} == {"0"}


# Says how often the process has opened an image before the first epoch, and at the end.
OPENED = "BEFORE", "AFTER"
OPENS = """
def note(event, found):
    opened.extend([event] * (event == "open" and str(found[0]).endswith(".jpg")))

def train(*arguments):
    print(f"BEFORE {len(opened)}\\n", end="")
    plain_train(*arguments)
    print(f"AFTER {len(opened)}\\n", end="")

opened = []
sys.addaudithook(note)
plain_train, demo.train_one_epoch = demo.train_one_epoch, train
"""


def test_a_start_does_not_open_all_images(tmp_path):
    """COCO has 118,287."""
    words = [*make_set(tmp_path, 150), *FAST, "--num_epochs", 1, "--max_steps", 2]
    (run,) = run_forked([(0, words)], program=changed(tmp_path / "opens.py", OPENS))
    before, after = (int(re.search(rf"^{word} (\d+)", run.out, re.M)[1]) for word in OPENED)
    assert before <= 64 and after == before + 2 * 4


# --- Resume, and ImageNet's weights ------------------------------------------------------------


@pytest.mark.slow
def test_resumed_with_another_number_of_ranks_goes_on_at_the_same_global_batch(small, tmp_path):
    """And a finished run that is resumed makes no step."""
    words = [*small, "--checkpoint", tmp_path / "c.pt", "--resume"]
    alone, shared = [*words, "--batch_size", 8], [*words, "--batch_size", 4, "--max_steps", 4]
    runs = [(0, [*alone, "--max_steps", 2]), (2, shared), (0, [*alone, "--max_steps", 4])]
    _, resumed, finished = run_forked(runs, program=QUICK)
    assert [step for _, step, _ in resumed.steps(1)] == [3, 4]
    assert not finished.steps(0)
    ends = [run.json_line("Summary")["weights_sha256"] for run in (resumed, finished)]
    assert ends[0] == ends[1]


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
            assert torch.allclose(found[name], weights, rtol=0, atol=1e-7), name


# --- Options and data --------------------------------------------------------------------------

OPTIONS = [
    "--accumulate_steps 2 --lr_scaling linear --warmup_steps 2 --workers 1 --seed 7 --max_steps 2",
    "--log_every 2 --checkpoint_every 1 --checkpoint run.pt --resume --precision fp16 "
    "--grad_compression fp16 --batch_size 1 --max_steps 2",
    "--global_batch_size 8 --accumulate_steps 2 --bucket_cap_mb 5 --timeout 60 --backend gloo "
    "--precision bf16 --grad_compression bf16 --max_steps 3",
]


def check_options(run: Run, options: str) -> None:
    """The run has used these options, and has come to its end."""
    record = run.json_line("Run")
    assert run.json_line("Summary")["steps"] == record["max_steps"]
    micro_batches = record["world_size"] * record["accumulate_steps"]
    assert record["global_batch_size"] == micro_batches * record["batch_size"]
    for name, value in re.findall(r"--(\w+)(?: ([\w.]+))?", options):
        assert str(record[name]).removesuffix(".0") == (value or "True")


@pytest.mark.slow
def test_options_train_and_stand_in_the_run_record(small, tmp_path):
    runs = [(0, [*small, *shlex.split(options)]) for options in OPTIONS]
    for run, options in zip(run_forked(runs, program=QUICK, cwd=tmp_path), OPTIONS, strict=True):
        check_options(run, options)


def test_dummy_trains_on_random_images_without_any_data(tmp_path):
    """Each rank has its own. A resumed run goes on, but not on other images."""
    words = ["--dummy", "--image_size", 40, "--batch_size", 4, "--log_every", 1]
    words += ["--precision", "fp32", "--checkpoint", tmp_path / "run.pt", "--resume"]
    data = make_set(tmp_path / "set", 8)
    runs = [(2, [*words, "--max_steps", steps]) for steps in (3, 5)]
    runs += [(0, [*words[1:], *data, "--global_batch_size", 8])]
    first, second, other = run_forked(runs, program=QUICK, expect=None)
    check_ranks(first, [0, 1], steps=3)
    check_records(first, 2, steps=3, images=117_266)
    assert (
        "; 3 steps of 8 images; one batch of random images that repeats (--dummy): " in first.out
    )
    losses = [[loss for _, _, loss in first.steps(rank)] for rank in (0, 1)]
    assert not set(losses[0]) & set(losses[1])
    record, summary = first.json_line("Run"), first.json_line("Summary")
    assert (record["dummy"], record["weights"], record["workers"]) == (True, "none", 0)
    assert record["classes"] == 80 and summary["data_ms"] < summary["step_ms"] / 5
    assert [step for _, step, _ in second.steps(1)] == [4, 5]
    assert other.returncode == 2 and "was saved with data set" in other.out


# Rank 1 becomes ten times slower from step 30 on.
SLOWER = """
def note_line(training, *arguments):
    time.sleep(0.1 if training.process.rank == 1 and training.step >= 30 else 0.01)
    plain_after_step(training, *arguments)

def agree(training, seconds):
    stop = plain_agree(training, seconds)
    demo.log(training.process, f"AGREED {training.step} {training.interval}")
    return stop

plain_after_step, demo.note_line = demo.note_line, note_line
plain_agree, demo.agree = demo.agree, agree
"""


@pytest.mark.slow
def test_ranks_agree_in_the_same_steps_though_one_becomes_slower(tmp_path):
    program = changed(tmp_path / "slower.py", SLOWER)
    words = ["--dummy", "--image_size", 40, "--batch_size", 2, "--max_steps", 120]
    (run,) = run_forked([(2, words)], program=program)
    steps, other = (
        [tuple(map(int, line.split()[1:])) for line in run.lines(rank) if line[:6] == "AGREED"]
        for rank in (0, 1)
    )
    assert steps == other and steps[-1][0] == 120
    # From the first step on at most twice as far each time, up to 50 steps.
    assert steps[0][1] <= 2
    for (step, interval), (later, following) in itertools.pairwise(steps[:-1]):
        assert later == step + interval and following <= min(2 * interval, 50)
    assert min(interval for step, interval in steps if step > 60) <= 10


def test_two_runs_of_plain_python_at_once_do_not_meet(small):
    """Each has a port of its own, whatever MASTER_PORT says."""
    words = [*small, "--max_steps", 2]
    port = {"MASTER_PORT": str(free_port())}
    with Forked(0, words, port, QUICK) as one, Forked(0, words, port, QUICK) as other:
        for started in (one, other):
            check_ranks(started.finish(), [0], steps=2)


def test_compression_halves_the_bytes_of_a_step(small):
    (run,) = run_forked([(2, [*small, "--grad_compression", "fp16", "--max_steps", 1])], QUICK)
    parameters = run.json_line("Run")["parameters"]
    assert run.json_line("Summary")["wire_bytes_per_step"] == 2 * parameters


@pytest.mark.slow
def test_compiled_model_trains(small):
    with Forked(0, [*small, "--max_steps", 2, "--compile"], program=QUICK) as started:
        check_options(started.finish(300), "--compile --max_steps 2")


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
    runs = [(0, [*small, "--max_steps", 1, *more]) for more in (["--compile"], [])]
    for run, expected in zip(run_forked(runs, program, timeout=300), (True, False), strict=True):
        ((_, _, loss),) = run.steps(0)
        assert (loss == pytest.approx(math.log(80), abs=1e-4)) == expected


def test_a_pytorch_for_cpus_says_that_it_has_no_compression_by_bf16(small, tmp_path):
    program = changed(tmp_path / "cpu.py", "torch.version.cuda = torch.version.hip = None")
    words = [*small, "--max_steps", 1, "--grad_compression", "bf16"]
    (run,) = run_forked([(1, words)], program=program, expect=2)
    assert "Traceback" not in run.out
    assert "needs a PyTorch with CUDA: give fp16" in run.lines(0)[-1]


@pytest.mark.slow
def test_real_coco_images_train(tiny_coco):
    options = ["--image_size", 64, "--batch_size", 10, "--num_epochs", 1]
    (run,) = run_forked([(0, [*data_args(tiny_coco, val=True), *FAST, *options])])
    check_ranks(run, [0], steps=5)
    assert f"% | {labelled(tiny_coco, 'val')} images | " in run.out


@pytest.mark.parametrize("folder", ["images", "val_images"])
def test_a_damaged_image_ends_the_run_of_one_process_with_one_line(tmp_path, folder):
    words = [*make_set(tmp_path, 8, val=4), *FAST, "--workers", 1, "--num_epochs", 1]
    truncate(tmp_path / folder / "0002.jpg")
    (run,) = run_forked([(0, words)], program=QUICK, expect=2)
    (line,) = [line for line in run.lines() if "0002.jpg" in line]
    assert re.match(r"\[CPU 0\] ERROR: image \S+0002\.jpg cannot be decoded: .*--decode", line)
    assert "Traceback" not in run.output


# By its clock a micro-batch takes a second, a validation an hour.
MADE_CLOCK = """
def forward(*arguments):
    now[0] += 1
    return plain_forward(*arguments)

def evaluate(training, *arguments):
    (group,) = training.optimizer.param_groups
    kind = type(training.optimizer).__name__
    demo.log(training.process, f"OPTIMIZER {kind} {group['lr']:.4f} {group['weight_decay']}")
    now[0] += 3600
    plain_evaluate(training, *arguments)

now = [0]
time.tzset()
demo.perf_counter = lambda: now[0]
plain_forward, demo.forward = demo.forward, forward
plain_evaluate, demo.evaluate = demo.evaluate, evaluate
"""


def test_a_step_with_fewer_micro_batches_and_a_validation_of_fewer_images_than_ranks(tmp_path):
    """18 training images, one without a label, and two for validation; three
    ranks. In an epoch each rank has a step of 4 images, and one of 2.
    """
    words = [*make_set(tmp_path, 18, val=2), *FAST, "--batch_size", 2, "--accumulate_steps", 2]
    words += ["--num_epochs", 2, "--warmup_steps", 5, "--image_size", 64]
    content = instances(numbered(18), [*range(1, 12), 13, 14, 15, 16, 17, 18, None])
    (tmp_path / "instances.json").write_text(json.dumps(content))
    program = changed(tmp_path / "clock.py", MADE_CLOCK)
    variables = {"TZ": "EAST-9", "OMP_NUM_THREADS": "1"}
    (run,) = run_forked([(3, words, variables)], program=program)
    check_ranks(run, [0, 1, 2], steps=4)
    record, summary = run.json_line("Run"), run.json_line("Summary")
    assert (record["images_without_annotations"], record["padding"]) == (1, 1)
    assert record["env"]["OMP_NUM_THREADS"] == "1"
    started = datetime.strptime(record["started"], "%Y-%m-%dT%H:%M:%SZ")
    assert abs(datetime.now(timezone.utc).replace(tzinfo=None) - started) < timedelta(hours=1)
    assert summary["replicas_identical"] is True
    found = re.findall(r"CPU 2\] Epoch .* \| step (\S+) ms \| ETA (.*)", run.out)
    assert found == [("2000.0", "6s"), ("1000.0", "2s"), ("2000.0", "2s"), ("1000.0", "0s")]
    assert len(re.findall(r"complete \| Avg loss: \S+ \| 2\.0 img/s \| 3\.00s", run.out)) == 6
    assert re.findall(r"CPU 0\] OPTIMIZER (.*)", run.out) == ["Adam 0.0004 0", "Adam 0.0008 0"]
    assert len(re.findall(r"Epoch \d validation \| .* \| 2 images \|", run.out)) == 2


# Says of how many images each forward pass is.
COUNTED = """
def forward(training, model, images):
    demo.log(training.process, f"FORWARD of {len(images)}")  # in one piece
    return plain(training, model, images)
plain, demo.forward = demo.forward, forward
"""


def test_the_pass_before_the_first_step_has_as_many_images_as_a_step(tmp_path):
    """Not more than there are, which would take memory and time."""
    words = [*make_set(tmp_path, 9), *FAST, "--num_epochs", 1, "--batch_size", 4000]
    (run,) = run_forked([(2, words)], program=changed(tmp_path / "counted.py", COUNTED))
    assert re.findall("FORWARD of (.*)", run.out) == ["5"] * 4
