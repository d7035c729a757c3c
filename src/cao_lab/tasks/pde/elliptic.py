"""Poisson's and Helmholtz' equation on a square, with solutions made of sines."""

from math import pi

import torch
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

WAVENUMBER = 1.0


def poisson_exact(x: Column, y: Column) -> Column:
    """Return sin(2πx) sin(2πy)."""
    return torch.sin(2 * pi * x) * torch.sin(2 * pi * y)


def helmholtz_exact(x: Column, y: Column) -> Column:
    """Return sin(πx) sin(4πy)."""
    return torch.sin(pi * x) * torch.sin(4 * pi * y)


def laplacian(value: Column, x: Column, y: Column) -> Column:
    """Return u_xx + u_yy."""
    return derivative(derivative(value, x), x) + derivative(derivative(value, y), y)


def poisson_residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return Δu + 8π² sin(2πx) sin(2πy) inside, and the values on the border."""
    x, y = points.interior
    force = -8 * pi**2 * poisson_exact(x, y).detach()
    return laplacian(u(x, y), x, y) - force, u(*points.sides)


def helmholtz_residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return Δu + u + (17π² − 1) sin(πx) sin(4πy) inside, and the values on the border."""
    x, y = points.interior
    value = u(x, y)
    force = (WAVENUMBER**2 - 17 * pi**2) * helmholtz_exact(x, y).detach()
    return laplacian(value, x, y) + WAVENUMBER**2 * value - force, u(*points.sides)


POISSON = Equation("poisson", Rectangle((0, 1), (0, 1)), poisson_residuals, poisson_exact)
HELMHOLTZ = Equation("helmholtz", Rectangle((-1, 1), (-1, 1)), helmholtz_residuals, helmholtz_exact)
