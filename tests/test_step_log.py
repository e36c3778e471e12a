"""tools/step_log.py: docs/networks.md's loop in a program that has nothing of the demo."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch

import compare_logs
import step_log
from analysis.logs import read_log
from analysis.runs import make_run, wrong_sum
from support.pages import PAGES
from support.processes import ROOT, start

(LOOP,) = re.findall(r"```python\n(from step_log .*?)```", PAGES["docs/networks.md"].text, re.S)
# A frozen layer, and batch norm, whose statistics differ between ranks.
PROGRAM = """
import contextlib, time
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [torch.nn.Linear(8, 100), torch.nn.Linear(100, 1000), torch.nn.BatchNorm1d(1000)]
layers[0].requires_grad_(False)
ddp = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(1000, 4)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
fast_loader = DataLoader(TensorDataset(torch.rand(48, 8), torch.arange(48) % 4), batch_size=4)


class SlowLoader:
    def __iter__(self):
        for batch in fast_loader:
            time.sleep(seconds_of_data)
            yield batch


def slow_step(*_):
    time.sleep(seconds_of_compute)


loader = SlowLoader()
optimizer.register_step_post_hook(slow_step)
"""
TRAINED = 100 * 1000 + 1000 + 2 * 1000 + 1000 * 4 + 4
NEXT = """
dist.barrier()
if dist.get_rank() == 0:
    print("NEXT", flush=True)
dist.barrier()
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    """Of the page's loop on two ranks: with slow images, with slow work, with more and with fewer
    steps than it makes as max_steps, with an error at its end, without line 4.
    """
    loop = LOOP.replace(
        "max_steps=200, global_batch_size=128", "max_steps=12, global_batch_size=8"
    )
    assert loop != LOOP and len(re.findall(r"# \d", LOOP)) == 5
    failed = indent(f"{loop}    raise ValueError\n", "    ")
    loops = {
        "images": f"seconds_of_data, seconds_of_compute = 0.1, 0\n{loop}",
        "work": f"seconds_of_data, seconds_of_compute = 0, 0.2\n{loop}",
        "half": "seconds_of_compute = 0\n" + loop.replace("max_steps=12", "max_steps=24"),
        "more": loop.replace("max_steps=12", "max_steps=11"),
        "failed": f"with contextlib.suppress(ValueError):\n{failed}",
        "lacking": loop.replace("log.averaged()", "pass"),
    }
    folder = tmp_path_factory.mktemp("loops")
    (folder / "mine.py").write_text(PROGRAM + NEXT.join(loops.values()))
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
    command.append(folder / "mine.py")
    env = {"PYTHONPATH": str(ROOT / "tools"), "OMP_NUM_THREADS": "1"}
    with start(command, env=env, cwd=folder) as started:
        out = started.finish(expect=1).out
    for name, text in zip(loops, out.split("NEXT\n"), strict=True):
        (folder / f"{name}.log").write_text(text)
    return folder


@pytest.mark.slow
def test_logs_of_a_loop_with_the_pages_five_lines_are_compared(logs, capsys):
    logs = [str(logs / f"{name}.log") for name in ("images", "work")]
    assert compare_logs.main(logs) == 0
    out = capsys.readouterr().out
    assert re.search("waiting for images, the largest part", out)
    assert re.search("computing, the largest part", out) and "not identical" not in out
    images, work = (make_run(name, read_log(log)) for name, log in zip("ab", logs, strict=True))
    assert (images.processes, images.nodes) == (2, 1)
    assert (images.setting("max_steps"), images.setting("global_batch_size")) == (12, 8)
    assert images.log.last_step == {0: 12, 1: 12}
    assert images.gradient_bytes == 4 * TRAINED
    assert images.figures["data_ms"] >= 100 and work.figures["compute_ms"] >= 200
    assert wrong_sum(work) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("half", "12 of 24"), ("more", "12 of 11")])
def test_a_loop_of_other_steps_than_max_steps_is_incomplete(logs, capsys, name, steps):
    assert compare_logs.main([str(logs / f"{name}.log")]) == 1
    said = f"it says: Stopped after {steps} steps: give StepLog the loop's number as max_steps"
    assert said in capsys.readouterr().out
    assert "Cleanup complete" not in (logs / f"{name}.log").read_text()


@pytest.mark.slow
def test_a_loop_that_fails_or_lacks_a_line_has_no_end(logs):
    """And which line that is, is said."""
    failed, lacking = ((logs / f"{name}.log").read_text() for name in ("failed", "lacking"))
    for text in (failed, lacking):
        assert "Run {" in text and "Summary" not in text and "Cleanup complete" not in text
    said = "RuntimeError: StepLog: step 1 has no mark of 'gradients averaged': docs/networks.md"
    assert said in lacking


def test_a_spawned_loop_has_one_node_and_no_step_between_epochs(monkeypatch, capfd):
    """Rank 1 of two, which no launcher has started. By the clock here a step takes a second, and
    what follows an epoch a minute.
    """
    now, demo = [0], step_log.demo
    monkeypatch.setattr(demo, "perf_counter", lambda: now[0])
    monkeypatch.setattr(demo, "find_launcher", lambda: "python")
    for name, value in {"get_rank": 1, "get_world_size": 2, "get_backend": "gloo"}.items():
        monkeypatch.setattr(step_log.dist, name, lambda value=value: value)
    ddp = SimpleNamespace(module=torch.nn.Linear(1, 1))
    log = step_log.StepLog(ddp, max_steps=4, global_batch_size=8)
    assert (log.process.local_rank, log.process.local_world_size) == (1, 2)
    for _ in range(2):
        for _ in log.batches("ab"):
            now[0] += 1
            ddp.module(torch.ones(1)).backward()
            log.averaged()
            log.end_step(torch.zeros(()), 4)
        now[0] += 60
    log.timer.read()
    assert log.timer.train_seconds == 4
    assert "[CPU 1] Epoch 2 | Step 4 | " in capfd.readouterr().out  # also if no step follows
