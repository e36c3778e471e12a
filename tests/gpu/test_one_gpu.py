"""On one GPU: precisions, resume, times by the GPU's clock, a full memory, the lesson."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from support.datasets import make_set
from support.forks import run_forked
from support.gpus import CHANGED, GPUS, VISIBLE, errors, needs_gpus, start_program
from support.launchers import FAST
from support.processes import ROOT, Run, free_port, run_demo

pytestmark = needs_gpus(1)
PRECISIONS = ["fp32", "bf16", "fp16"]
EPOCHS, STEPS = 8, 4  # steps of an epoch
SIZE = [*FAST, "--image_size", "64", "--batch_size", "16"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """Options for 64 training images, in 4 steps an epoch, and 10 validation images."""
    images = make_set(tmp_path_factory.mktemp("small"), 64, val=10)
    return [*images, *SIZE]


def epoch_losses(run: Run) -> list[float]:
    """The mean loss of each epoch."""
    return [float(loss) for loss in re.findall(r"Epoch \d+ complete \| Avg loss: (\S+)", run.out)]


def read(checkpoint: Path) -> dict:
    return torch.load(checkpoint, map_location="cpu", weights_only=True)


# --- Precisions, compiler -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory) -> dict[str, tuple[Run, Path]]:
    """By precision: a run of 8 epochs, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    files = {precision: folder / f"{precision}.pt" for precision in PRECISIONS}
    words = [*small, "--num_epochs", EPOCHS, "--workers", 1]  # forked after CUDA has started
    runs = [(0, [*words, "--precision", p, "--checkpoint", files[p]]) for p in PRECISIONS]
    ended = run_forked(runs, env=VISIBLE, expect=None)
    return {p: (run, files[p]) for p, run in zip(PRECISIONS, ended, strict=True)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_falls_in_each_precision(precision, trained):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    run, _ = trained[precision]
    assert run.returncode == 0, run.tail()
    record = run.json_line("Run")
    assert (record["precision"], record["backend"]) == (precision, "nccl")
    assert record["devices"] == [torch.cuda.get_device_name(0)]
    assert [step for _, step, _ in run.steps()] == list(range(1, EPOCHS * STEPS + 1))
    # Weights, gradients and Adam's two averages are four times 45 MB.
    assert run.json_line("Summary")["peak_gpu_bytes"] > 180e6
    assert re.search(r"at most \d+\.\d\d GiB of a GPU's memory; replicas", run.out)
    losses = epoch_losses(run)
    assert len(losses) == EPOCHS and losses[-1] < losses[0] - 0.3, losses
    assert len(re.findall(r"^\[GPU 0\] Epoch \d validation .* \| 10 images", run.out, re.M)) == 8


def test_fp16_scales_the_loss_and_skips_few_steps(trained):
    """GradScaler counts the steps since the last one that it skipped. Others need no scaler."""
    run, path = trained["fp16"]
    assert run.returncode == 0, run.tail()
    scaler = read(path)["scaler"]
    assert scaler["scale"] >= 2 and scaler["_growth_tracker"] >= STEPS
    assert read(trained["fp32"][1])["scaler"] == {}


# Half of the blocks, as the compiler takes its time.
COMPILED = f"""{CHANGED}
def resnet18(num_classes):
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)

models = demo.torchvision.models
models.resnet18 = resnet18
demo.run_and_exit(demo.main)
"""


def test_compiled_model_trains_and_validates(small):
    """The compiler writes C code that includes Python.h, and calls the system's C compiler."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # as Triton
        pytest.skip("torch.compile needs a C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("torch.compile needs Python.h, of Python's development package")
    command = [sys.executable, "-c", COMPILED, *small, "--compile", "--num_epochs", 4]
    with start_program(command, PYTHONWARNINGS=None) as started:  # the compiler's own are not ours
        run = started.finish(300)
    losses = epoch_losses(run)
    assert len(losses) == 4 and losses[-1] < losses[0], losses
    assert run.json_line("Run")["compile"] is True
    assert len(re.findall(r"validation \| .* \| 10 images", run.out)) == 4


# --- Resume -------------------------------------------------------------------------------------


# The script, which keeps the checkpoint of each step.
KEEPING = f"""{CHANGED}
def write_checkpoint(training, path):
    plain(training, f"{{path}}.{{training.step}}")

def prepare_hardware(*arguments):
    plain_preparation(*arguments)
    torch.backends.cudnn.benchmark = False  # it could choose other kernels in the next process
    torch.backends.cudnn.deterministic = True

plain, demo.write_checkpoint = demo.write_checkpoint, write_checkpoint
plain_preparation, demo.prepare_hardware = demo.prepare_hardware, prepare_hardware
main, run_and_exit = demo.main, demo.run_and_exit
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_resumed_in_mid_epoch_stays_near_an_unbroken_one(precision, small, tmp_path):
    """Not bit for bit: cuDNN may add up in another order."""
    (tmp_path / "keeping.py").write_text(KEEPING)
    words = [*small, "--batch_size", 8, "--precision", precision, "--lr", 1e-4, "--max_steps", 6]
    words += ["--checkpoint_every", 3, "--resume", "--checkpoint"]

    def trained(path: str) -> Run:
        """A run with this checkpoint, which goes on from it if it is there."""
        runs = [(0, [*words, tmp_path / path])]
        return run_forked(runs, program=tmp_path / "keeping.py", env=VISIBLE)[0]

    unbroken, resumed = trained("unbroken"), trained("unbroken.3")
    assert resumed.json_line("Run")["start_step"] == 3
    assert [step for _, step, _ in resumed.steps()] == [4, 5, 6]
    for (_, _, loss), (_, _, wanted) in zip(resumed.steps(), unbroken.steps()[3:], strict=True):
        assert loss == pytest.approx(wanted, rel=0.02)
    begin, end, again = (read(tmp_path / f"unbroken.{steps}") for steps in ("3", "6", "3.6"))
    assert again["scaler"] == end["scaler"]
    before, expected, found = (all_weights(state["model"]) for state in (begin, end, again))
    # With Adam's averages at zero in step 4 this is 1.3. A change of the weights by one part in
    # 1000 makes it 0.3.
    assert (found - expected).norm() < 0.6 * (expected - before).norm()


def all_weights(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """In one vector, without batch norm's statistics."""
    counted = {name: value for name, value in state.items() if "running" not in name}
    return torch.cat([value.flatten() for value in counted.values() if value.is_floating_point()])


# --- Time by the GPU's clock --------------------------------------------------------------------

DATA, COMPUTE, EXPOSED = 0.2, 0.1, 0.05  # seconds that each part of a step is made longer
CLOCK = f"""{CHANGED}
import time

def busy(seconds):
    torch.cuda._sleep(int(seconds * cycles))

def cycles_per_second():
    # In the first one the GPU may still run at a lower clock.
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(3 * 10**8)
        end.record()
        end.synchronize()
    return 3e8 / (begin.elapsed_time(end) / 1e3)

def all_reduce(state, bucket):
    if bucket.is_last():
        busy({EXPOSED})
    return demo.default_hooks.allreduce_hook(None, bucket)
"""
# The loader sleeps; the GPU waits in the forward pass, and before the last bucket's all-reduce.
DELAYED = f"""{CLOCK}
def wrap_model(args, process, model):
    global cycles
    cycles = cycles_per_second()
    ddp = plain_wrap(args, process, model)
    ddp.register_comm_hook(None, all_reduce)
    return ddp

def forward(*arguments):
    busy({COMPUTE})
    return plain_forward(*arguments)

def read(dataset, key):
    time.sleep({DATA} / 16)
    return plain_read(dataset, key)

plain_wrap, demo.wrap_model = demo.wrap_model, wrap_model
plain_forward, demo.forward = demo.forward, forward
plain_read, demo.CocoFirstCategory.__getitem__ = demo.CocoFirstCategory.__getitem__, read
demo.run_and_exit(demo.main)
"""


def test_parts_of_a_step_are_those_of_the_gpus_clock_and_add_up(tmp_path):
    """16 images a step. The first steps are left out of the averages."""
    data = [*make_set(tmp_path, 160), *SIZE, "--num_epochs", 1]
    with start_program([sys.executable, "-c", DELAYED, *data]) as started:
        run = started.finish()
    summary = run.json_line("Summary")
    check_lengths(summary)
    ((wall,),) = [re.findall(r"Epoch 1 complete .* (\S+)s$", run.out, re.M)]
    assert 0.8 < summary["train_s"] / float(wall) < 1.05
    assert summary["steps"] == 10


def check_lengths(summary: dict) -> None:
    """They are as long as they were made, and add up."""
    parts = [summary[f"{name}_ms"] / 1e3 for name in ("data", "compute", "exposed")]
    assert sum(parts) == pytest.approx(summary["step_ms"] / 1e3)
    # The loader works while the GPU still computes the step before: that part is no wait.
    hidden = COMPUTE + EXPOSED
    for found, least, most in zip(
        parts, (DATA - hidden, COMPUTE, EXPOSED), (DATA, COMPUTE, EXPOSED), strict=True
    ):
        assert 0.7 * least < found < 1.8 * most, parts


# docs/networks.md's loop, made longer in the same places.
OWN_LOOP = f"""{CLOCK}
import os
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

class Loader:
    def __iter__(self):
        for _ in range(10):
            time.sleep({DATA})
            yield torch.rand(16, 1000).cuda(), torch.zeros(16, dtype=torch.long).cuda()

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
cycles = cycles_per_second()
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
layers = [torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 10)]
ddp = DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
ddp.module.register_forward_hook(lambda *_: busy({COMPUTE}))
ddp.register_comm_hook(None, all_reduce)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
"""


def test_parts_of_a_step_of_an_own_loop_are_those_of_the_gpus_clock(tmp_path):
    page = (ROOT / "docs/networks.md").read_text()
    (loop,) = re.findall(r"```python\n(from step_log .*?)```", page, re.S)
    loop = loop.replace(
        "max_steps=200, global_batch_size=128", "max_steps=10, global_batch_size=16, log_every=1"
    )
    program = tmp_path / "mine.py"
    end = "\ndel ddp, log, loss\ndist.destroy_process_group()\n"
    program.write_text(OWN_LOOP + loop.replace("(loader)", "(Loader())") + end)
    command = [sys.executable, program, free_port()]
    paths = [str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with start_program(command, PYTHONPATH=os.pathsep.join(paths)) as started:
        run = started.finish()
    check_lengths(run.json_line("Summary"))
    assert run.json_line("Run")["backend"] == "nccl"


def test_profile_has_the_gpus_kernels(small, tmp_path):
    words = [*small, "--num_epochs", 4, "--profile", tmp_path]
    (run,) = run_forked([(0, words)], env=VISIBLE)
    lines = re.findall(r"^\[GPU 0\] Profile \| +\S.* \d+ *$", run.out, re.M)
    assert len(lines) == 10, run.tail()
    with gzip.open(tmp_path / "rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert len([event for event in events if event.get("cat") == "kernel"]) > 300


# --- Errors -------------------------------------------------------------------------------------

# The script, on a GPU of which it may have half a gibibyte.
FULL = f"""{CHANGED}
def prepare_hardware(args, process):
    plain(args, process)
    total = torch.cuda.get_device_properties(process.device).total_memory
    torch.cuda.set_per_process_memory_fraction(2**29 / total, process.device)

plain, demo.prepare_hardware = demo.prepare_hardware, prepare_hardware
demo.run_and_exit(demo.main)
"""


def test_a_full_gpu_memory_is_one_line_with_advice(small):
    """2048 images of 224 pixels are 1.2 GB as float32."""
    words = [*small, "--batch_size", 2048, "--image_size", 224]
    with start_program([sys.executable, "-c", FULL, *words]) as started:
        run = started.finish(expect=2)
    (line,) = errors(run)
    assert line == run.lines()[-1] and "Traceback" not in run.out
    assert re.match(r"\[GPU 0\] ERROR: .*out of memory.*smaller --batch_size", line)


# --- Without the GPU, and the lesson ------------------------------------------------------------


def test_device_cpu_trains_on_the_cpu_though_there_is_a_gpu(small):
    """Two processes, with which NCCL would need two GPUs."""
    words = [*small, "--device", "cpu", "--max_steps", 2]
    run = run_demo(words, nproc=2, env=VISIBLE)
    record = run.json_line("Run")
    assert (record["backend"], record["device"], record["log_every"]) == ("gloo", "cpu", 1)
    assert not set(record["devices"]) & {torch.cuda.get_device_name(n) for n in range(GPUS)}
    assert all(len(run.steps(rank)) == 2 for rank in (0, 1)) and "[GPU" not in run.out
    assert run.json_line("Summary")["replicas_identical"] is True


LESSON = ROOT / "docs/lesson"
# Its comments say what to write in place of what stands before them.
WITH_GPUS = {
    'torch.device("cpu")  # with GPUs: torch.device("cuda", local_rank)': (
        'torch.device("cuda", local_rank)'
    ),
    '"gloo", timeout=timedelta(seconds=20))  # with GPUs: "nccl"': (
        '"nccl", timeout=timedelta(seconds=20))'
    ),
}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_gpus(2))])
def test_ddp_of_the_lesson_trains_by_its_comments_on_gpus(ranks, tmp_path):
    """And gets the results of plain.py, which trains on the CPU."""
    text = (LESSON / "ddp.py").read_text()
    for before, after in WITH_GPUS.items():
        assert text.count(before) == 1, f"{before!r} is not in ddp.py"
        text = text.replace(before, after)
    program = tmp_path / "ddp.py"
    program.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--local-addr=127.0.0.1", f"--nproc_per_node={ranks}", program]
    with start_program(command) as started:
        run = started.finish()
    with start_program([sys.executable, LESSON / "plain.py"]) as started:
        plain = started.finish()
    assert "[rank 0] replicas identical: True" in run.out
    expected = results(plain)
    assert len(expected) == 3
    for found, wanted in zip(results(run), expected, strict=True):
        assert found == pytest.approx(wanted, abs=0.03)


def results(run: Run) -> list[tuple[float, ...]]:
    """Loss and right answers of each epoch, over all ranks."""
    found = re.findall(r"loss (\S+), (\d+) of 16 right", run.out)
    return [(float(loss), float(right)) for loss, right in found]
