"""Model parallelism: two halves of a model on two devices, in one process: python halves.py"""

import time

import torch
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import mse_loss

devices = [torch.device("cpu"), torch.device("cpu")]  # with GPUs: "cuda:0" and "cuda:1"
torch.manual_seed(0)
halves = [Sequential(Linear(512, 512), ReLU(), Linear(512, 512)).to(device) for device in devices]
optimizer = torch.optim.SGD([*halves[0].parameters(), *halves[1].parameters()], lr=0.5)
images, labels = torch.rand(2, 1024, 512)
busy = [0.0, 0.0]  # seconds in which each device computes


def timed(device, compute, *arguments):
    start = time.perf_counter()
    result = compute(*arguments)  # with a GPU: torch.cuda.synchronize(devices[device]) after it
    busy[device] += time.perf_counter() - start
    return result


start = time.perf_counter()
for step in range(3):
    middle = timed(0, halves[0], images.to(devices[0]))
    received = middle.detach().to(devices[1]).requires_grad_()  # crosses the cable
    loss = mse_loss(timed(1, halves[1], received), labels.to(devices[1]))
    optimizer.zero_grad()
    timed(1, loss.backward)
    timed(0, middle.backward, received.grad.to(devices[0]))  # crosses the cable, too
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
seconds = time.perf_counter() - start
for device in (0, 1):
    print(f"device {device} computes {100 * busy[device] / seconds:.0f} % of the time")
