"""One optimizer step over 16 fixed images, as the script makes it; appended to quick.py, or alone.

It saves what the step took from the weights, and which of DDP's buckets were sent. Batch norm is
in eval mode: in training it would see the images of each rank alone.
"""

import sys
from types import SimpleNamespace

import demo_coco_resnet18 as demo
import torch

run_and_exit = demo.run_and_exit


def main(process):
    args = demo.parse_arguments(sys.argv[2:])
    demo.read_environment(process)
    demo.join_process_group(args, process)
    demo.fill_in_arguments(args, process, 16)
    model = demo.build_model(args, process, SimpleNamespace(categories=range(80)))
    model.bn1.running_mean += process.rank  # DDP gives all ranks those of rank 0
    ddp = demo.wrap_model(args, process, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    training = demo.Training(args, process, None, model, ddp, optimizer)
    model.eval()
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(256, (16, 40, 40, 3), dtype=torch.uint8, generator=noise)
    labels = torch.randint(80, (16,), generator=noise)
    own = slice(process.rank, None, process.world_size)
    with torch.no_grad():
        logits = demo.forward(training, model, images[own]).cpu()
        demo.log(process, f"LOSS {demo.cross_entropy(logits, labels[own]):.4f}")
    sent = []
    if process.world_size > 1:
        ddp.register_comm_hook(sent, note)
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    demo.train_one_epoch(training, Batches(images[own], labels[own], args.batch_size), 1)
    if process.rank == 0:
        after = dict(model.named_parameters())
        found = {name: before[name] - after[name].detach() for name in before}
        cap = ddp.bucket_bytes_cap
        torch.save({"gradients": found, "buckets": sent, "cap": cap}, sys.argv[1])


def note(sent, bucket):
    sent.append(bucket.index())
    return demo.default_hooks.allreduce_hook(None, bucket)


class Batches(list):
    """A loader, which is its own sampler."""

    def __init__(self, images, labels, size):
        super().__init__(zip(images.split(size), labels.split(size), strict=True))
        self.sampler, self.set_epoch = self, lambda epoch: None
        self.count = len(images)

    def __len__(self):
        return self.count
