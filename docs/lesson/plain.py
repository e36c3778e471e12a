"""A training loop in one process: python plain.py"""

import time

import torch
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

IMAGES = 16
EPOCHS = 3
BATCH_SIZE = 8  # images in a step
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


device = torch.device("cpu")
data = make_data()
sampler = RandomSampler(data, generator=torch.Generator())
loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

torch.manual_seed(0)
layers = Conv2d(1, WIDTH, 3), ReLU(), AdaptiveAvgPool2d(2), Flatten(), Linear(4 * WIDTH, 4)
model = Sequential(*layers).to(device)
print(f"first weights: sum {all_weights(model).sum():.4f}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(EPOCHS):
    if epoch == 1:
        start = time.perf_counter()  # the first epoch is slower, and not counted
    sampler.generator.manual_seed(epoch)  # a different order in each epoch
    seen = []  # numbers of the images
    results = torch.zeros(3, device=device)  # images, sum of their losses, right answers
    for numbers, images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss = cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
        right = (outputs.argmax(1) == labels).sum().item()
        results += torch.tensor([len(labels), len(labels) * loss.item(), right]).to(device)
    print(f"epoch {epoch}: images {seen}")
    n, loss_sum, right = results.tolist()
    print(f"epoch {epoch}: loss {loss_sum / n:.4f}, {right:.0f} of {n:.0f} right")
seconds = (time.perf_counter() - start) / (EPOCHS - 1)
print(f"last weights: sum {all_weights(model).sum():.4f}")
print(f"seconds an epoch: {seconds:.4f}")
