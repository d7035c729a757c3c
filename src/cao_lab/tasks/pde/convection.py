"""Convection: a sine travels six of its wavelengths in unit time (Rathore et al. 2024)."""

from math import pi

import torch
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

SPEED = 40.0


def exact(x: Column, t: Column) -> Column:
    """Return sin(x − 40t)."""
    return torch.sin(x - SPEED * t)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_t + 40 u_x inside, the initial condition, and the jump between the periodic ends."""
    x, t = points.interior
    value = u(x, t)
    equation = derivative(value, t) + SPEED * derivative(value, x)
    return equation, u(*points.bottom) - exact(*points.bottom).detach(), u(*points.right) - u(*points.left)


CONVECTION = Equation("convection", Rectangle((0, 2 * pi), (0, 1)), residuals, exact)
