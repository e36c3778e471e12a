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


class StepLog:
    """Writes Run, step lines and, if its block ends after max_steps, Summary and the last line.

    ddp: the model in DistributedDataParallel. Its first parameter that is trained must be that of
    the first layer, whose gradient is the last one to be ready.
    max_steps: optimizer steps of the loop. global_batch_size: samples of a step, over all ranks.
    settings: log_every, and what else Run shall say. With grad_compression="bf16" a gradient has
    2 bytes and not 4.
    """

    def __init__(self, ddp, *, max_steps, global_batch_size, **settings):
        # Those that DDP averages.
        self.parameters = [each for each in ddp.module.parameters() if each.requires_grad]
        device = self.parameters[0].device
        defaults = {"log_every": demo.LOG_EVERY[device.type], "grad_compression": "none"}
        counts = {"max_steps": max_steps, "global_batch_size": global_batch_size}
        self.args = argparse.Namespace(**(defaults | settings | counts))
        launcher, world_size = demo.find_launcher(), dist.get_world_size()
        # Without a launcher one process has started the others, on its own node.
        spawned = launcher == "python"
        self.process = demo.ProcessInfo(
            launcher,
            dist.get_rank(),
            world_size,
            dist.get_rank() if spawned else int(os.environ["LOCAL_RANK"]),
            world_size if spawned else int(os.environ["LOCAL_WORLD_SIZE"]),
            device,
            dist.get_backend(),
        )
        self.timer = demo.StepTimer(self.process, self.parameters[0])
        self.step = self.epoch = 0
        self.due_line = None  # of a step that a GPU may not have finished

    def __enter__(self):
        self.began = perf_counter()
        record = demo.facts_of_run(self.args, self.process, self.parameters)
        demo.log_from_rank_0(self.process, "Run " + json.dumps(record))
        return self

    def batches(self, loader):
        """The loader's batches, with the wait for each one measured. Each call is an epoch."""
        batches = iter(loader)
        self.epoch += 1
        self.timer.start_step()
        self.timer.mark("wait for data")
        for batch in batches:
            self.timer.mark("data arrived")
            yield batch
            self.timer.mark("wait for data")

    def averaged(self):
        """To be called after a step's last backward pass, before the optimizer."""
        self.timer.mark("gradients averaged")

    def end_step(self, loss, samples):
        """To be called after the optimizer. loss, a tensor, and samples are of this rank.

        Raises RuntimeError if a mark of this step is missing.
        """
        for mark in ("data arrived", "own gradients", "gradients averaged"):
            if mark not in self.timer.marks:
                text = f"StepLog: step {self.step + 1} has no mark of {mark!r}"
                raise RuntimeError(f"{text}: docs/networks.md has the lines of a loop")
        self.log_due_line()
        self.timer.end_step(samples)
        self.step += 1
        self.due_line = demo.due_line(self.args, self.timer, self.epoch, self.step, loss.detach())
        if not self.process.gpu:  # a GPU still computes the step: there the next one logs it
            self.log_due_line()

    def log_due_line(self):
        if self.due_line:
            demo.log_step(self.process, self.timer, self.due_line, self.args.max_steps)
        self.due_line = None

    def __exit__(self, error, *_):
        if error is not None:
            return
        self.log_due_line()
        steps = {*demo.all_gather(self.step)}
        if steps != {self.args.max_steps} or steps == {0}:
            made = f"{max(steps)} of {self.args.max_steps} steps"
            text = f"Stopped after {made}: give StepLog the loop's number as max_steps"
            demo.log_from_rank_0(self.process, text)
            return
        sent = demo.bytes_of_gradients(self.args, self.parameters)
        digest = demo.digest_of_weights(each.detach().float() for each in self.parameters)
        demo.log_times(self.process, self.timer, self.step, digest, sent)
        demo.log_end(self.process, self.began)
