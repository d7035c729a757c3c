"""The Allen–Cahn equation: two phases separate, with walls between them, as in deepxde's examples."""

from functools import cache
from math import pi

import numpy as np
import torch
from jaxtyping import Float64
from scipy import fft
from torch import Tensor

from cao_lab.tasks.pde.points import FIRST_GRID, SECOND_GRID, Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

DIFFUSION, REACTION = 1e-3, 5.0
MODES, STEPS_PER_ROW = 1_024, 5
CONTOUR = 32
"""Points of the contour integrals that the coefficients of ETDRK4 are computed by."""

Vector = Float64[np.ndarray, " m"]


def start(x: Tensor) -> Tensor:
    """Return x² cos(πx), which is −1 at both ends."""
    return x**2 * torch.cos(pi * x)


def ansatz(network: Field) -> Field:
    """Return a field that has the right start and ends whatever the network is.

    As conditions of their own they are traded for the equation, and L-BFGS ends at a small loss and a wrong solution.
    """
    return lambda x, t: start(x) + t * (1 - x**2) * network(x, t)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_t − 10⁻³ u_xx − 5(u − u³) inside."""
    x, t = points.interior
    value = u(x, t)
    bend = derivative(derivative(value, x), x)
    return (derivative(value, t) - DIFFUSION * bend - REACTION * (value - value**3),)


def reference(x: Column, t: Column) -> Column:
    """Return the spectral solution at the nodes of the grid."""
    column = ((x + 1) / 2 * (FIRST_GRID - 1)).round().long()
    row = (t * (SECOND_GRID - 1)).round().long()
    return torch.from_numpy(spectral_solution())[row, column]


@cache
def spectral_solution(modes: int = MODES, steps_per_row: int = STEPS_PER_ROW) -> Float64[np.ndarray, "times places"]:
    """Return u on the grid, by sines in space and ETDRK4 in time (Cox & Matthews; Kassam & Trefethen).

    The sines are those of u + 1, which vanishes at both ends.
    """
    x = np.linspace(-1, 1, modes + 1)[1:-1]
    state: Vector = fft.dst(x**2 * np.cos(pi * x) + 1, type=1)
    step = 1 / ((SECOND_GRID - 1) * steps_per_row)
    coefficients = etdrk4_coefficients(-step * DIFFUSION * (pi / 2 * np.arange(1, modes)) ** 2)
    rows = [state]
    for _ in range(SECOND_GRID - 1):
        for _ in range(steps_per_row):
            state = etdrk4_step(state, step, coefficients)
        rows.append(state)
    values = fft.idst(np.stack(rows), type=1, axis=1) - 1
    inner = values[:, modes // (FIRST_GRID - 1) - 1 :: modes // (FIRST_GRID - 1)]
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=-1.0)


def reaction(state: Vector) -> Vector:
    """Return the sines of 5(u − u³)."""
    u = fft.idst(state, type=1) - 1
    modes: Vector = fft.dst(REACTION * (u - u**3), type=1)
    return modes


def etdrk4_step(state: Vector, step: float, coefficients: list[Vector]) -> Vector:
    """Take one step: the diffusion exactly, the reaction to fourth order."""
    whole, half, stage, first, middle, last = coefficients
    force = reaction(state)
    a = half * state + step * stage * force
    force_a = reaction(a)
    b = half * state + step * stage * force_a
    force_b = reaction(b)
    c = half * a + step * stage * (2 * force_b - force)
    force_c = reaction(c)
    after: Vector = whole * state + step * (first * force + 2 * middle * (force_a + force_b) + last * force_c)
    return after


def etdrk4_coefficients(z: Vector) -> list[Vector]:
    """Return e^z, e^(z/2) and the four weights, as means over a circle around z, where nothing cancels."""
    circle = np.exp(1j * pi * (np.arange(CONTOUR) + 0.5) / CONTOUR)
    w = z[:, None] + circle
    exponential = np.exp(w)
    weights = (
        (np.exp(w / 2) - 1) / w,
        (-4 - w + exponential * (4 - 3 * w + w**2)) / w**3,
        (2 + w + exponential * (w - 2)) / w**3,
        (-4 - 3 * w - w**2 + exponential * (4 - w)) / w**3,
    )
    return [np.exp(z), np.exp(z / 2), *(weight.mean(axis=1).real for weight in weights)]


ALLEN_CAHN = Equation("allen-cahn", Rectangle((-1, 1), (0, 1)), residuals, reference, ansatz)
