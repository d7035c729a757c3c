"""Burgers' equation at a viscosity of 0.01/π: a sine steepens into a shock (Basdevant et al. 1986)."""

from math import pi

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from cao_lab.tasks.pde.points import Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

VISCOSITY = 0.01 / pi
REACH, NODES = 12.0, 401
"""Half-width, in units of √(4νt), and nodes of the quadrature."""


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_t + u u_x − ν u_xx inside, the initial condition −sin(πx), and the values at both ends."""
    x, t = points.interior
    value = u(x, t)
    slope = derivative(value, x)
    equation = derivative(value, t) + value * slope - VISCOSITY * derivative(slope, x)
    start = -torch.sin(pi * points.bottom[0]).detach()
    return equation, u(*points.bottom) - start, u(*points.left), u(*points.right)


def cole_hopf(x: Column, t: Column) -> Column:
    """Return the exact solution, by quadrature."""
    solution = torch.empty_like(x)
    for time in t.unique():
        solution[t == time] = torch.from_numpy(cole_hopf_row(float(time), x[t == time].numpy()))
    return solution


def cole_hopf_row(time: float, x: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return u(x, t) = −E[sin(πy)] over y = x − z√(4νt) with density ∝ exp(−z² − cos(πy)/(2πν)).

    The trapezoidal rule converges exponentially here, because the integrand is analytic and decays like a Gaussian.
    """
    if time == 0:
        return -np.sin(pi * x)
    z = np.linspace(-REACH, REACH, NODES)
    y = x[:, None] - z * np.sqrt(4 * VISCOSITY * time)
    exponent = -(z**2) - np.cos(pi * y) / (2 * pi * VISCOSITY)
    weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    mean: Float64[np.ndarray, " n"] = (np.sin(pi * y) * weight).sum(axis=1) / weight.sum(axis=1)
    return -mean


BURGERS = Equation("burgers", Rectangle((-1, 1), (0, 1)), residuals, cole_hopf)
