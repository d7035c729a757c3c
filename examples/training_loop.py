"""The drop-in loop: an ordinary training loop on scikit-learn's digits, with one more line.

Run it with `python examples/training_loop.py`; it takes a few seconds and resumes from its own checkpoint.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from cao import CAO


def main(epochs: int, checkpoint: Path) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    loader = DataLoader(data, batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = CAO(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    for epoch in range(first, epochs):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            optimizer.refresh_if_due(loss)  # The only new line.
            loss.backward()
            optimizer.step()
        sharpness = optimizer.sketch.values[0] if optimizer.sketch else float("nan")
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, sharpness {sharpness:.1f}, captured {optimizer.captured}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, checkpoint)
    print(optimizer.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/training_loop.pt"))
    arguments = parser.parse_args()
    arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    main(arguments.epochs, arguments.checkpoint)
