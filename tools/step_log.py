"""This demo's log for a training loop of your own with DDP, for compare_logs.py.

docs/networks.md ("Any program's log") has the five lines that a loop needs, on all ranks. Times
and log lines are those of demo_coco_resnet18.py, whose packages it needs.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import demo_coco_resnet18 as demo
import torch.distributed as dist


class AveragedParameters:
    """What the script's functions ask of a model, for the parameters that DDP averages."""

    def __init__(self, ddp):
        self.averaged = [each for each in ddp.module.parameters() if each.requires_grad]

    def parameters(self):
        return iter(self.averaged)

    def state_dict(self):
        return {number: each.detach().float() for number, each in enumerate(self.averaged)}


class StepLog:
    """Writes Run, step lines and, if its block ends after max_steps, Summary and the last line.

    ddp: the model in DistributedDataParallel. Its first parameter that is trained must be that of
    the first layer, whose gradient is the last one to be ready.
    max_steps: optimizer steps of the loop. global_batch_size: samples of a step, over all ranks.
    settings: log_every, and what else Run shall say. With grad_compression="bf16" a gradient has
    2 bytes and not 4.
    """

    # The script's functions take a StepLog for their Training.

    def __init__(self, ddp, *, max_steps, global_batch_size, **settings):
        device = next(ddp.module.parameters()).device
        settings = {
            "log_every": demo.LOG_EVERY[device.type],
            "grad_compression": "none",
        } | settings
        counts = {"max_steps": max_steps, "global_batch_size": global_batch_size}
        self.args = argparse.Namespace(**settings, **counts)
        self.model = AveragedParameters(ddp)
        self.process = demo.ProcessInfo(
            demo.find_launcher(), dist.get_rank(), dist.get_world_size()
        )
        # Without a launcher one process has started the others, on its own node.
        spawned = self.process.launcher == "python"
        world_size = self.process.world_size
        self.process.local_rank = self.process.rank if spawned else int(os.environ["LOCAL_RANK"])
        self.process.local_world_size = (
            world_size if spawned else int(os.environ["LOCAL_WORLD_SIZE"])
        )
        self.process.device = device
        self.process.backend = dist.get_backend()
        self.timer = demo.StepTimer(self.process, self.model)
        self.step = self.epoch = 0
        self.due_line = None

    def __enter__(self):
        self.began = perf_counter()
        demo.log_from_rank_0(self.process, "Run " + json.dumps(demo.facts_of_run(self)))
        return self

    def batches(self, loader):
        """The loader's batches, with the wait for each one measured. Each call is an epoch."""
        batches = iter(loader)
        self.epoch += 1
        self.timer.start_step()
        self.timer.wait_for_data()
        for batch in batches:
            self.timer.data_arrived()
            yield batch
            self.timer.wait_for_data()

    def averaged(self):
        """To be called after a step's last backward pass, before the optimizer."""
        self.timer.gradients_averaged()

    def end_step(self, loss, samples):
        """To be called after the optimizer. loss, a tensor, and samples are of this rank.

        Raises RuntimeError if a mark of this step is missing.
        """
        step = self.timer.step
        marks = {"data arrived": step.arrivals, "own gradients": step.own_gradients}
        marks["gradients averaged"] = step.averaged
        for mark, moment in marks.items():
            if not moment:
                text = f"StepLog: step {self.step + 1} has no mark of {mark!r}"
                raise RuntimeError(f"{text}: docs/networks.md has the lines of a loop")
        self.step += 1
        demo.log_due_line(self)
        self.timer.end_step(samples)
        demo.note_line(self, self.epoch, loss.detach())

    def __exit__(self, error, *_):
        if error is not None:
            return
        steps = {*demo.all_gather(self.step)}
        if steps != {self.args.max_steps} or steps == {0}:
            made = f"{max(steps)} of {self.args.max_steps} steps"
            text = f"Stopped after {made}: give StepLog the loop's number as max_steps"
            demo.log_from_rank_0(self.process, text)
            return
        demo.log_due_line(self)
        demo.log_summary(self)
        demo.log_end(self.process, self.began)
