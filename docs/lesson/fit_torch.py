"""The same line with PyTorch, which computes the gradients: python fit_torch.py"""

import torch

device = torch.device("cpu")  # with a GPU: torch.device("cuda")
x = torch.arange(8, device=device) / 8
y = 3 * x + 1  # the labels: w = 3 and b = 1 would be right
w, b = (torch.zeros(1, device=device, requires_grad=True) for _ in range(2))
optimizer = torch.optim.SGD([w, b], lr=0.2)

for epoch in range(100):
    for batch in (slice(0, 4), slice(4, 8)):
        output = w * x[batch] + b
        loss = ((output - y[batch]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 33 == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, w {w.item():.4f}, b {b.item():.4f}")
