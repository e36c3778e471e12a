"""The same loop with DDP: torchrun starts it, once for each process"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGES = 16
EPOCHS = 3
BATCH_SIZE = 8  # images in a step, over all ranks
WIDTH = 8  # channels of the convolution


def make_data():
    """16 images of noise. One quarter of each is brighter: its number, 0 to 3, is the label."""
    numbers = torch.arange(IMAGES)  # only to print which images a step uses
    labels = numbers % 4
    images = torch.rand(IMAGES, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for n in range(IMAGES):
        row, column = divmod(n % 4, 2)
        images[n, 0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1  # brighter
    return TensorDataset(numbers, images, labels)


# DDP 1/6: torchrun starts the processes and tells each its rank through the environment.
rank = int(os.environ["RANK"])
local_rank = int(os.environ["LOCAL_RANK"])  # only GPUs need it
world_size = int(os.environ["WORLD_SIZE"])


def say(text):
    """Prints text and line end at once: the lines of several processes do not mix."""
    print(f"[rank {rank}] {text}\n", end="", flush=True)


# DDP 2/6: each process takes a device of its own, then joins the group of all processes.
device = torch.device("cpu")  # with GPUs: torch.device("cuda", local_rank)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # with GPUs: "nccl"
data = make_data()
# DDP 3/6: each rank gets its own share of the images.
sampler = DistributedSampler(data, world_size, rank)
loader = DataLoader(data, batch_size=BATCH_SIZE // world_size, sampler=sampler)

torch.manual_seed(0)  # the same first weights in every run
model = Sequential(
    Conv2d(1, WIDTH, 3),
    ReLU(),
    AdaptiveAvgPool2d(2),  # of each channel four numbers: the means of its quarters
    Flatten(),
    Linear(4 * WIDTH, 4),  # one output for each label
).to(device)
say(f"first weights: sum {parameters_to_vector(model.parameters()).sum():.4f}")
# DDP 4/6: rank 0's weights are copied to all ranks. ddp shares them with model.
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # high, as the model is tiny

for epoch in range(EPOCHS):
    if epoch == 1:
        start = time.perf_counter()  # the first epoch is slower, and not counted
    sampler.set_epoch(epoch)  # a different order in each epoch
    seen = []  # numbers of the images
    results = torch.zeros(3, device=device)  # images, sum of their losses, right answers
    for numbers, images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        # DDP 5/6: forward through ddp, so that backward averages the gradients over all ranks.
        outputs = ddp(images)
        loss = cross_entropy(outputs, labels)  # softmax included, mean over the images
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += numbers.tolist()
        correct = (outputs.argmax(1) == labels).sum().item()
        results += torch.tensor([len(labels), len(labels) * loss.item(), correct]).to(device)
    say(f"epoch {epoch}: images {seen}, loss {results[1] / results[0]:.4f}")
    # DDP 6/6: the results of all ranks are added up, and rank 0 writes them.
    dist.all_reduce(results)
    n, loss_sum, right = results.tolist()
    if rank == 0:
        say(f"epoch {epoch}: loss {loss_sum / n:.4f}, {int(right)} of {int(n)} right")
seconds = (time.perf_counter() - start) / (EPOCHS - 1)
weights = parameters_to_vector(model.parameters()).detach()  # numbers without gradients
everyone = [torch.zeros_like(weights) for _ in range(world_size)]  # space to receive in
dist.all_gather(everyone, weights)
if rank == 0:
    identical = all(torch.equal(weights, other) for other in everyone)  # bit for bit
    say(f"last weights: sum {weights.sum():.4f}")
    say(f"seconds an epoch: {seconds:.4f}")
    say(f"replicas identical: {identical}")
dist.destroy_process_group()
os._exit(0)  # not part of DDP: on a busy machine a thread of Gloo could crash Python's normal exit
