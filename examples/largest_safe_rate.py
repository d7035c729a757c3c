"""The largest safe learning rate: let it rise until the sharpness meets the edge of stability, then take half.

Run it with `python examples/largest_safe_rate.py`; it takes a minute and writes out/largest_safe_rate.png.
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from cao import Sharpness

RISE_BY = 1.01  # The rate rises by a hundredth per step.


def batches() -> DataLoader[tuple[Tensor, ...]]:
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    return DataLoader(data, batch_size=256, shuffle=True, drop_last=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def rate_at_the_edge(picture: Path, log: Path | None = None) -> float:
    """Let the rate rise until the sharpness is at the edge of stability, draw how, and return the rate."""
    model = network()
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    # A short run may look as often as it likes.
    watch = Sharpness(optimizer, every=10, budget=None, tell=[log] if log else [])
    while not watch.ratio > 1:
        for inputs, labels in batches():
            loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            watch(loss)
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= RISE_BY
    picture.parent.mkdir(parents=True, exist_ok=True)
    watch.plot().savefig(picture, dpi=140)
    print(watch.line())
    return next(reading.lr for reading in watch.readings if reading.ratio > 1)


def loss_after(rate: float, epochs: int) -> float:
    model = network()
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(epochs):
        for inputs, labels in batches():
            loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item() if math.isfinite(loss.item()) else math.inf


def main(epochs: int, out: Path, log: Path | None = None) -> None:
    edge = rate_at_the_edge(out, log)
    for part in (0.05, 0.5, 5.0):
        print(f"{part:g} of the rate at the edge, {part * edge:.3g}: loss {loss_after(part * edge, epochs):.3g}")
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/largest_safe_rate.png"))
    parser.add_argument("--log", type=Path, help="where to write what was seen, for cao watch and cao report")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.out, arguments.log)
