"""Where conditions are imposed: points inside a rectangle and on its sides."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

Column = Float[Tensor, "n 1"]
Place = tuple[Column, Column]
"""The two coordinates of some points."""

FIRST_GRID, SECOND_GRID = 257, 101
"""Nodes of the grid that interior points are drawn from and errors are taken over."""


@dataclass(frozen=True)
class Points:
    """Points inside and on the four sides, all of them open to differentiation.

    The second coordinate is time where there is one: `bottom` is then its start.
    """

    interior: Place
    bottom: Place
    top: Place
    left: Place
    right: Place

    @property
    def sides(self) -> Place:
        """All four sides together."""
        places = (self.bottom, self.top, self.left, self.right)
        return torch.cat([x for x, _ in places]), torch.cat([t for _, t in places])


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of two coordinates, each with its range."""

    first: tuple[float, float]
    second: tuple[float, float]

    @cached_property
    def grid(self) -> Place:
        """All nodes of the grid, ends included, in float64; the second coordinate varies fastest."""
        return mesh(line(self.first, FIRST_GRID), line(self.second, SECOND_GRID))

    def points(self, interior: int, bottom: int, side: int, seed: int, dtype: torch.dtype) -> Points:
        """Draw interior points from the grid without replacement, and space the others equally.

        As in Rathore et al., interior points may have the last value of the second coordinate, but no other border.
        """
        x, t = mesh(line(self.first, FIRST_GRID)[1:-1], line(self.second, SECOND_GRID)[1:])
        if not 1 <= interior <= len(x):
            raise ValueError(f"interior must be from 1 to {len(x)}, got {interior}")
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:interior]
        (low, high), (start, end) = self.first, self.second
        along, across = line(self.first, bottom), line(self.second, side)
        return Points(
            tracked(x[chosen], t[chosen], dtype),
            tracked(along, torch.full_like(along, start), dtype),
            tracked(along, torch.full_like(along, end), dtype),
            tracked(torch.full_like(across, low), across, dtype),
            tracked(torch.full_like(across, high), across, dtype),
        )


def line(ends: tuple[float, float], count: int) -> Column:
    """Return equally spaced values from one end to the other."""
    return torch.linspace(*ends, count, dtype=torch.float64)[:, None]


def mesh(x: Column, t: Column) -> Place:
    """Return every pair of an x and a t."""
    return x.repeat_interleave(len(t), dim=0), t.repeat(len(x), 1)


def tracked(x: Column, t: Column, dtype: torch.dtype) -> Place:
    """Return points that derivatives can be taken at."""
    return x.to(dtype).requires_grad_(), t.to(dtype).requires_grad_()


def derivative(value: Column, coordinate: Column) -> Column:
    """Return the derivative of each value by its own coordinate, ready to be differentiated again."""
    (slope,) = torch.autograd.grad(value, coordinate, torch.ones_like(value), create_graph=True)
    return slope
