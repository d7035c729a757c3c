"""CAO in a loop of Lightning Fabric, whose `setup` keeps `refresh_if_due` within reach by itself.

Run it with `python examples/fabric_loop.py` after `pip install lightning`; it takes a few seconds. The loss is scaled
under fp16 inside `fabric.backward`: pass it to `refresh_if_due` before that.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cao import CAO


def main(epochs: int = 5) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(network, CAO(network.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=128, shuffle=True, drop_last=True))
    for epoch in range(epochs):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            optimizer.refresh_if_due(loss)
            fabric.backward(loss)
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, largest eigenvalue {optimizer.sketch.values[0]:.1f}")


if __name__ == "__main__":
    main()
