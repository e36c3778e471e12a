"""The same loop with DDP: torchrun starts it, once for each process"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # SGD would import it later, and so keep the process group alive
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGES = 16
EPOCHS = 3
BATCH_SIZE = 8  # images in a step, over all ranks
WIDTH = 8  # channels of the convolution


def make_data():
    """16 images of noise. One quarter of each is brighter: its number, 0 to 3, is the label."""
    numbers = torch.arange(IMAGES)
    labels = numbers % 4
    images = torch.rand(IMAGES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for n in range(IMAGES):
        row, column = 8 * (labels[n] // 2), 8 * (labels[n] % 2)
        images[n, :, row : row + 8, column : column + 8] += 1
    return TensorDataset(numbers, images, labels)


def all_weights(model):
    """All weights of the model in one vector."""
    return torch.cat([weights.detach().flatten() for weights in model.parameters()])


def say(text):
    """Writes a line in one piece: the lines of several processes do not mix."""
    sys.stdout.write(f"[rank {rank}] {text}\n")


# DDP 1/6: torchrun starts the processes and tells each its rank through the environment.
rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])
world_size = int(os.environ["WORLD_SIZE"])
# DDP 2/6: each process takes a device of its own, then joins the group of all processes.
device = torch.device("cpu")  # with GPUs: torch.device("cuda", local_rank)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # with GPUs: "nccl"
data = make_data()
# DDP 3/6: each rank gets its own share of the images.
sampler = DistributedSampler(data, world_size, rank)
loader = DataLoader(data, batch_size=BATCH_SIZE // world_size, sampler=sampler)

torch.manual_seed(0)
layers = Conv2d(1, WIDTH, 3), ReLU(), AdaptiveAvgPool2d(2), Flatten(), Linear(4 * WIDTH, 4)
model = Sequential(*layers).to(device)
say(f"first weights: sum {all_weights(model).sum():.4f}")
# DDP 4/6: rank 0's weights are copied to all ranks. ddp shares them with model.
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(EPOCHS):
    if epoch == 1:
        start = time.perf_counter()  # the first epoch is slower, and not counted
    sampler.set_epoch(epoch)  # a different order in each epoch
    seen = []  # numbers of the images
    results = torch.zeros(3, device=device)  # images, sum of their losses, right answers
    for numbers, images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = ddp(images)
        loss = cross_entropy(outputs, labels)
        # DDP 5/6: backward also averages the gradients over all ranks.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
        right = (outputs.argmax(1) == labels).sum().item()
        results += torch.tensor([len(labels), len(labels) * loss.item(), right]).to(device)
    say(f"epoch {epoch}: images {seen}, loss {results[1] / results[0]:.4f}")
    # DDP 6/6: the results of all ranks are added up, and rank 0 writes them.
    dist.all_reduce(results)
    n, loss_sum, right = results.tolist()
    if rank == 0:
        say(f"epoch {epoch}, all ranks: loss {loss_sum / n:.4f}, {right:.0f} of {n:.0f} right")
seconds = (time.perf_counter() - start) / (EPOCHS - 1)
weights = all_weights(model)
say(f"last weights: sum {weights.sum():.4f}")
everyone = [torch.empty_like(weights) for _ in range(world_size)]
dist.all_gather(everyone, weights)
if rank == 0:
    say(f"seconds an epoch: {seconds:.4f}")
    say(f"replicas identical: {all(torch.equal(weights, other) for other in everyone)}")
# The group ends its threads once nothing refers to it. Threads that still run could make Python
# crash when it exits.
del ddp, outputs, loss
dist.destroy_process_group()
