"""A training loop in one process: python plain.py"""

import time

import torch
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

IMAGES = 16
EPOCHS = 3
BATCH_SIZE = 8  # images in a step
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


device = torch.device("cpu")  # with a GPU: torch.device("cuda")
data = make_data()
# Like shuffle=True, but in an order that ddp.py can repeat.
sampler = RandomSampler(data, generator=torch.Generator())
loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

torch.manual_seed(0)  # the same first weights in every run
model = Sequential(
    Conv2d(1, WIDTH, 3),
    ReLU(),
    AdaptiveAvgPool2d(2),  # four numbers per channel: the mean of each quarter
    Flatten(),
    Linear(4 * WIDTH, 4),  # one output for each label
).to(device)
print(f"first weights: sum {parameters_to_vector(model.parameters()).sum():.4f}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # high, as the model is tiny

for epoch in range(EPOCHS):
    if epoch == 1:
        start = time.perf_counter()  # the first epoch is slower, and not counted
    sampler.generator.manual_seed(epoch)  # a different order in each epoch
    seen = []  # numbers of the images
    results = torch.zeros(3, device=device)  # images, sum of their losses, right answers
    for numbers, images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss = cross_entropy(outputs, labels)  # softmax included, mean over the images
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += numbers.tolist()
        correct = (outputs.argmax(1) == labels).sum().item()
        results += torch.tensor([len(labels), len(labels) * loss.item(), correct]).to(device)
    print(f"epoch {epoch}: images {seen}")
    n, loss_sum, right = results.tolist()
    print(f"epoch {epoch}: loss {loss_sum / n:.4f}, {int(right)} of {int(n)} right")
seconds = (time.perf_counter() - start) / (EPOCHS - 1)
print(f"last weights: sum {parameters_to_vector(model.parameters()).sum():.4f}")
print(f"seconds an epoch: {seconds:.4f}")
