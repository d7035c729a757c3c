"""What is trained while it is measured: a ResNet-18 on CIFAR, or on images of the same shape."""

import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cao import CAO, Eigenpairs, Hessian
from cao.curvature.operators import ParameterOperator
from cao.linalg.columns import HERE, orthonormalize
from cao_lab.runs.curvature import SampledLoss
from cao_lab.runs.session import choose_device
from cao_lab.tasks.problems import channels_last
from cao_lab.tasks.resnet import resnet18

Curvature: TypeAlias = Literal["gauss-newton", "hessian", "parts"]
CURVATURES: tuple[Curvature, ...] = get_args(Curvature)

DEVICE = "CAO_BENCH_DEVICE"
"""The environment variable by which the processes that measure memory know the device, too."""

LR = 1e-3
"""Small enough for any number of steps to stay finite; no timing depends on it."""


@dataclass(frozen=True)
class BatchTask:
    """A model and one batch, and the curvature of its loss there in the forms that are compared.

    As in the laboratory's runs, training and Gauss-Newton products have the channels last, second derivatives do not.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    parts: int

    @property
    def params(self) -> list[nn.Parameter]:
        """The model's parameters, all of them trainable."""
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        """Run the model and return the mean loss, for second derivatives."""
        return cross_entropy(self.model(self.inputs), self.targets)

    def training_loss(self) -> Tensor:
        """Run the model and return the mean loss, for a gradient."""
        return cross_entropy(self.model(channels_last(self.inputs, self.model)), self.targets)

    def source(self, curvature: Curvature) -> Tensor | ParameterOperator:
        """Return what `CAO.refresh` is given; the Hessian's is the loss of a forward pass made here."""
        return self.loss() if curvature == "hessian" else self.operator(curvature)

    def operator(self, curvature: Curvature) -> ParameterOperator:
        """Return the curvature as an operator; the Hessian's graph is built here."""
        if curvature == "hessian":
            return Hessian(self.loss(), self.params)
        if curvature == "gauss-newton":
            whole = [(channels_last(self.inputs, self.model), self.targets)]
            return SampledLoss(self.model, cross_entropy, whole).curvature("gauss-newton")
        size = len(self.inputs) // self.parts
        parts = list(zip(self.inputs.split(size), self.targets.split(size), strict=True))
        return SampledLoss(self.model, cross_entropy, parts).curvature("hessian")

    def gradient(self) -> None:
        """Compute the gradient, forward and backward, as a training step does."""
        self.model.zero_grad()
        self.training_loss().backward()

    def copy(self) -> "BatchTask":
        """Return the same task with a model of its own."""
        return BatchTask(deepcopy(self.model), self.inputs, self.targets, self.parts)


def random_task(width: int, batch: int, parts: int, side: int = 32) -> BatchTask:
    """Return a ResNet-18 and a batch of noise, for what does not depend on the numbers."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch, 3, side, side, generator=generator)
    targets = torch.randint(10, (batch,), generator=generator)
    return BatchTask(seeded_resnet(width, classes=10).to(device()), inputs.to(device()), targets.to(device()), parts)


def seeded_resnet(width: int, classes: int) -> nn.Module:
    """Build a ResNet-18 whose weights are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return resnet18(classes, width)


def device() -> torch.device:
    """Return the device that was asked for, or the GPU if there is one."""
    return choose_device(os.environ.get(DEVICE, "auto"))


def random_sketch(size: int, rank: int) -> Eigenpairs:
    """Return orthonormal columns with the eigenvalues 1, 2, …, as a ready source of a refresh."""
    columns = HERE.random(size, rank, torch.Generator(device()).manual_seed(0))
    values = torch.arange(1.0, rank + 1, device=device())
    return Eigenpairs(values, orthonormalize(columns), torch.zeros_like(values))


def optimizer_with_sketch(params: list[nn.Parameter], rank: int) -> CAO:
    """Return a CAO that has its sketch and will not ask for another one soon."""
    optimizer = CAO(params, LR, rank=rank, refresh_every=10**9, damping=0.1)
    optimizer.refresh(random_sketch(sum(p.numel() for p in params), rank))
    return optimizer
