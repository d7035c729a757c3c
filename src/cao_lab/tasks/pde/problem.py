"""What a solver needs to know of a problem, and how an equation on a rectangle becomes one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cao import GrowingPoints
from cao_lab.tasks.pde.network import Tanh
from cao_lab.tasks.pde.points import Column, Points, Rectangle

Field = Callable[[Tensor, Tensor], Tensor]
"""A function of two coordinates, given as columns: a network, or an exact solution."""


@dataclass(frozen=True)
class Problem:
    """A loss to minimise over some parameters, and how far their solution is from the truth."""

    name: str
    params: Sequence[Tensor]
    loss: Callable[[], Float[Tensor, ""]]
    residuals: Callable[[], tuple[Tensor, ...]] | None = None
    """Tensors whose squares sum to the loss, if it is a sum of squares."""
    error: Callable[[], float] | None = None
    """The relative L2 error of the solution, if the truth is known."""
    solution: Field | None = None
    points: GrowingPoints | None = None
    """Where the residuals are taken, if that may grow."""

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.params)


def least_squares(
    name: str,
    params: Sequence[Tensor],
    residuals: Callable[[], tuple[Tensor, ...]],
    error: Callable[[], float] | None = None,
    solution: Field | None = None,
) -> Problem:
    """Return the problem whose loss is the sum of the squares of all residuals."""
    return Problem(name, params, lambda: sum_of_squares(residuals()), residuals, error, solution)


def sum_of_squares(residuals: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Return the sum of the squares of all entries."""
    return torch.stack([part.square().sum() for part in residuals]).sum()


@dataclass(frozen=True)
class ProblemConfig:
    """The size of a problem: its network, its points, its precision."""

    width: int = 30
    """Units of each hidden layer."""
    depth: int = 3
    """Hidden layers."""
    interior: int = 2_000
    """Points inside the rectangle, drawn from a grid of 255 × 100."""
    initial: int = 257
    """Equally spaced points at the start of time."""
    boundary: int = 101
    """Equally spaced points on each side."""
    seed: int = 0
    """Seed of the network and of the points."""
    dtype: Literal["float64", "float32"] = "float64"


SMALL = ProblemConfig()
"""For two cores: 1,981 parameters and more residuals than that."""
RATHORE = ProblemConfig(width=200, interior=10_000)
"""As in Rathore et al. 2024: 81,201 parameters."""


@dataclass(frozen=True)
class Equation:
    """A differential equation on a rectangle, with its side conditions and its solution."""

    name: str
    domain: Rectangle
    residuals: Callable[[Field, Points], tuple[Tensor, ...]]
    """What must vanish, one tensor per condition."""
    reference: Callable[[Column, Column], Column]
    """The solution at the points of `Rectangle.grid`, or anywhere if it has a closed form."""
    ansatz: Callable[[Field], Field] = lambda network: network
    """The field that is made of a network; it may satisfy some conditions by construction."""

    def problem(self, config: ProblemConfig = SMALL) -> Problem:
        """Return the problem of finding the solution with a network."""
        dtype = getattr(torch, config.dtype)
        network = Tanh(config.width, config.depth, config.seed).to(dtype)
        points = self.domain.points(config.interior, config.initial, config.boundary, config.seed, dtype)
        field = self.ansatz(network)
        return least_squares(
            self.name,
            list(network.parameters()),
            lambda: weighted(self.residuals(field, points)),
            lambda: self.relative_error(field, dtype),
            field,
        )

    @torch.no_grad()
    def relative_error(self, field: Field, dtype: torch.dtype = torch.float64) -> float:
        """Return ‖u − u*‖ / ‖u*‖ over the whole grid."""
        x, t = self.domain.grid
        difference = field(x.to(dtype), t.to(dtype)).double() - self.truth
        return float(difference.norm() / self.truth.norm())

    @cached_property
    def truth(self) -> Column:
        """The solution on the grid, in float64."""
        return self.reference(*self.domain.grid)


def weighted(residuals: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Scale residuals so that the sum of their squares is the sum of their mean squares."""
    return tuple(part / part.numel() ** 0.5 for part in residuals)
