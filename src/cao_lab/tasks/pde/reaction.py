"""Reaction: logistic growth at every place for itself (Rathore et al. 2024)."""

from math import pi

import torch
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

RATE = 5.0


def exact(x: Column, t: Column) -> Column:
    """Return the logistic curve that starts at a bell of width π/4 around π."""
    start = torch.exp(-0.5 * ((x - pi) / (pi / 4)) ** 2)
    grown = start * torch.exp(RATE * t)
    return grown / (grown + 1 - start)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_t − 5u(1 − u) inside, the initial condition, and the jump between the periodic ends."""
    x, t = points.interior
    value = u(x, t)
    equation = derivative(value, t) - RATE * value * (1 - value)
    return equation, u(*points.bottom) - exact(*points.bottom).detach(), u(*points.right) - u(*points.left)


REACTION = Equation("reaction", Rectangle((0, 2 * pi), (0, 1)), residuals, exact)
