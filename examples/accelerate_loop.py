"""CAO in a loop of Accelerate: our `Accelerator` for theirs, and the loop is the documented one.

Run it with `python examples/accelerate_loop.py` after `pip install accelerate`, or under `accelerate launch`; it takes
a few seconds. The loss is divided by the accumulation steps, and scaled under fp16, inside `accelerator.backward`: pass
it to `refresh_if_due` before that.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cao import CAO
from cao.integrations.accelerate import Accelerator


def main(epochs: int = 5) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(
        network,
        CAO(network.parameters(), lr=0.1, momentum=0.9),
        DataLoader(data, batch_size=64, shuffle=True, drop_last=True),
    )
    for epoch in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                optimizer.refresh_if_due(loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, largest eigenvalue {optimizer.sketch.values[0]:.1f}")


if __name__ == "__main__":
    main()
