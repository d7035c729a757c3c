"""A small tanh network on the digits, trained to a strict minimum whose whole Hessian is known."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cao.curvature.hessian import Hessian
from cao_lab.theory.problems import generator, normal

IMAGES, HIDDEN, RIDGE, BATCHES = 200, 6, 5e-3, 10


class RidgeNetwork(nn.Module):
    """Cross-entropy of 64 → 6 → 10 tanh units on 200 digits, plus a ridge that makes its minima strict."""

    def __init__(self) -> None:
        super().__init__()
        digits = load_digits()
        self.images = torch.from_numpy(digits.data[:IMAGES] / 16)
        self.labels = torch.from_numpy(digits.target[:IMAGES])
        self.layers = nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)).double()
        self.place(0.3 * normal(generator(0), self.size))

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def place(self, point: Float[Tensor, " n"]) -> None:
        """Set the parameters, which get their own memory."""
        vector_to_parameters(point.clone(), self.parameters())

    def loss(self, batch: slice = slice(None)) -> Tensor:
        """Return the loss of a part of the images at the present parameters."""
        outputs = self.layers(self.images[batch])
        ridge = sum((p.square().sum() for p in self.parameters()), torch.zeros(()))
        return nn.functional.cross_entropy(outputs, self.labels[batch]) + RIDGE / 2 * ridge

    def batches(self) -> Sequence[slice]:
        """Return a partition of the images."""
        size = IMAGES // BATCHES
        return [slice(begin, begin + size) for begin in range(0, IMAGES, size)]

    def gradient(self, batch: slice = slice(None)) -> Float[Tensor, " n"]:
        """Return the gradient at the present parameters."""
        return parameters_to_vector(torch.autograd.grad(self.loss(batch), list(self.parameters())))

    def hessian(self, batch: slice = slice(None)) -> Float[Tensor, "n n"]:
        """Return the dense Hessian at the present parameters."""
        dense = Hessian(self.loss(batch), self.parameters()) @ torch.eye(self.size, dtype=torch.float64)
        return (dense + dense.T) / 2

    def value_and_gradient(self, point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return the loss and its gradient at a point, as scipy wants them."""
        self.place(torch.from_numpy(point))
        return self.loss().item(), self.gradient().numpy()


@dataclass(frozen=True)
class Minimum:
    """A network at a strict minimum: its parameters, its Hessian there, and that Hessian's spectrum, descending."""

    network: RidgeNetwork
    point: Float[Tensor, " n"]
    hessian: Float[Tensor, "n n"]
    spectrum: Float[Tensor, " n"]


@cache
def trained_network() -> Minimum:
    """Train by L-BFGS and polish by Newton steps, until the gradient is rounding."""
    network = RidgeNetwork()
    start = parameters_to_vector(network.parameters()).detach().numpy()
    found = minimize(
        network.value_and_gradient,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 1e-16, "gtol": 1e-6},
    )
    point = torch.from_numpy(found.x)
    for _ in range(2):
        network.place(point)
        hessian = network.hessian()
        point = point - torch.linalg.solve(hessian, network.gradient())
    network.place(point)
    return Minimum(network, point, hessian, torch.linalg.eigvalsh(hessian).flip(0))
