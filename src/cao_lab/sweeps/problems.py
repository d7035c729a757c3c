"""Eight small problems: each a model, its data in memory, a batch size and a number of steps."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Shaped
from sklearn import datasets
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from cao_lab.tasks import text
from cao_lab.tasks.data import load, prepare
from cao_lab.tasks.resnet import resnet18
from cao_lab.tasks.transformer import Transformer

BatchKind: TypeAlias = Literal["full", "large", "mini"]
# Losses are those of so many training samples, the same at every rate.
EVALUATED = 512


@dataclass(frozen=True)
class SmallTask:
    """A model at its start, and the training set."""

    model: nn.Module
    inputs: Shaped[Tensor, "n ..."]
    targets: Shaped[Tensor, "n ..."]
    loss_of: Callable[[Tensor, Tensor], Tensor]

    def loss(self, rows: Shaped[Tensor, " b"]) -> Float[Tensor, ""]:
        """Return the mean loss of some samples."""
        return self.loss_of(self.model(self.inputs[rows]), self.targets[rows])

    @torch.no_grad()
    def evaluated(self) -> float:
        """Return the loss of the training set, or of its first samples."""
        return float(self.loss(torch.arange(min(len(self.inputs), EVALUATED))))


@dataclass(frozen=True)
class Recipe:
    """A task as it is trained."""

    name: str
    kind: BatchKind
    batch: int | None
    """Samples per step; None takes them all."""
    steps: int
    build: Callable[[Path | None], SmallTask]
    """Builds the task from torch's random stream; CIFAR is read from a folder."""


def regression(_: Path | None) -> SmallTask:
    """A linear model of the progress of diabetes, inputs and target standardised."""
    inputs, targets = datasets.load_diabetes(return_X_y=True)
    return SmallTask(nn.Linear(inputs.shape[1], 1), standardised(inputs), standardised(targets[:, None]), mse_loss)


def classification(_: Path | None) -> SmallTask:
    """A linear classifier of breast cancer, inputs standardised."""
    inputs, targets = datasets.load_breast_cancer(return_X_y=True)
    return SmallTask(nn.Linear(inputs.shape[1], 2), standardised(inputs), torch.tensor(targets), cross_entropy)


def mlp(_: Path | None = None) -> SmallTask:
    """A tanh network on digits."""
    pixels, labels = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return SmallTask(model, pixels, labels, cross_entropy)


def autoencoder(_: Path | None) -> SmallTask:
    """Digits through eight numbers and back."""
    pixels, _labels = digits()
    sizes = (64, 32, 8, 32, 64)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return SmallTask(nn.Sequential(*layers[:-1]), pixels, pixels, mse_loss)


def cnn(_: Path | None) -> SmallTask:
    """Two convolutions with batch norm on digits; the statistics are those of the batch, at evaluation too."""
    pixels, labels = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16, track_running_stats=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    return SmallTask(model, pixels, labels, cross_entropy)


class RowReader(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, pixels: Float[Tensor, "n 64"]) -> Float[Tensor, "n 10"]:
        """Return logits, from what is remembered after the last row."""
        return self.head(self.memory(pixels.view(-1, 8, 8))[0][:, -1])  # type: ignore[no-any-return]


def lstm(_: Path | None = None) -> SmallTask:
    """An LSTM on digits."""
    pixels, labels = digits()
    return SmallTask(RowReader(), pixels, labels, cross_entropy)


def transformer(_: Path | None = None, width: int = 32) -> SmallTask:
    """A small transformer on the text of Python's own manual."""
    windows = torch.tensor(text.windows()[0]).long()
    model = Transformer(text.CLASSES, text.CONTEXT, width)
    return SmallTask(model, windows[:, :-1], windows[:, 1:], cross_entropy)


def resnet(data: Path | None) -> SmallTask:
    """ResNet-18 of width 8 on 2,000 images of CIFAR-10."""
    images = load("cifar10", data, 2_000)
    inputs = prepare(images, images.train_inputs)
    model = resnet18(10, width=8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return SmallTask(model, inputs, images.train_targets.long(), cross_entropy)


def standardised(values: object) -> Float[Tensor, "n features"]:
    """Return columns of mean 0 and standard deviation 1."""
    columns = torch.tensor(values, dtype=torch.float64)
    return ((columns - columns.mean(0)) / columns.std(0)).float()


def digits() -> tuple[Float[Tensor, "n 64"], Shaped[Tensor, " n"]]:
    """Return scikit-learn's digits, with pixels of mean 0 between −1 and 1."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    scaled = torch.tensor(pixels, dtype=torch.float32) / 16
    return scaled - scaled.mean(0), torch.tensor(labels)


PROBLEMS = (
    Recipe("linear-regression", "full", None, 200, regression),
    Recipe("logistic-regression", "full", None, 200, classification),
    Recipe("mlp", "full", None, 300, mlp),
    Recipe("autoencoder", "large", 512, 300, autoencoder),
    Recipe("cnn", "large", 512, 150, cnn),
    Recipe("lstm", "mini", 64, 400, lstm),
    Recipe("transformer", "mini", 32, 200, transformer),
    Recipe("resnet", "mini", 128, 60, resnet),
)
