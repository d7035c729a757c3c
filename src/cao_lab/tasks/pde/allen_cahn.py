"""The Allen–Cahn equation: two phases separate, with sharp walls between them (Raissi et al. 2019)."""

from functools import cache
from math import pi

import numpy as np
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from cao_lab.tasks.pde.points import FIRST_GRID, SECOND_GRID, Column, Points, Rectangle, derivative
from cao_lab.tasks.pde.problem import Equation, Field

DIFFUSION, REACTION = 1e-4, 5.0
# The start has a kink at the periodic ends, so that the modes decay slowly at first: many are taken.
MODES, STEPS_PER_ROW = 2_048, 5
CONTOUR = 32
"""Points of the contour integrals that the coefficients of ETDRK4 are computed by."""


def start(x: Tensor) -> Tensor:
    """Return x² cos(πx)."""
    return x**2 * torch.cos(pi * x)


def residuals(u: Field, points: Points) -> tuple[Tensor, ...]:
    """Return u_t − 10⁻⁴ u_xx − 5(u − u³) inside, the initial condition, and the jumps of u and u_x at the ends."""
    x, t = points.interior
    value = u(x, t)
    bend = derivative(derivative(value, x), x)
    equation = derivative(value, t) - DIFFUSION * bend - REACTION * (value - value**3)
    left, right = u(*points.left), u(*points.right)
    slope_jump = derivative(right, points.right[0]) - derivative(left, points.left[0])
    return equation, u(*points.bottom) - start(points.bottom[0]).detach(), right - left, slope_jump


def reference(x: Column, t: Column) -> Column:
    """Return the spectral solution at the nodes of the grid."""
    column = ((x + 1) / 2 * (FIRST_GRID - 1)).round().long()
    row = (t * (SECOND_GRID - 1)).round().long()
    return torch.from_numpy(spectral_solution())[row, column]


@cache
def spectral_solution(modes: int = MODES, steps_per_row: int = STEPS_PER_ROW) -> Float64[np.ndarray, "times places"]:
    """Return u on the grid, by Fourier modes in space and ETDRK4 in time (Cox & Matthews; Kassam & Trefethen)."""
    x = -1 + 2 * np.arange(modes) / modes
    state = np.fft.rfft(x**2 * np.cos(pi * x))
    step = 1 / ((SECOND_GRID - 1) * steps_per_row)
    linear = -DIFFUSION * (pi * np.arange(modes // 2 + 1)) ** 2
    coefficients = etdrk4_coefficients(step * linear)
    rows = [state]
    for _ in range(SECOND_GRID - 1):
        for _ in range(steps_per_row):
            state = etdrk4_step(state, step, coefficients)
        rows.append(state)
    values = np.fft.irfft(np.stack(rows), n=modes, axis=1)[:, :: modes // (FIRST_GRID - 1)]
    return np.concatenate([values, values[:, :1]], axis=1)


def reaction(state: Complex128[np.ndarray, " m"]) -> Complex128[np.ndarray, " m"]:
    """Return the modes of 5(u − u³)."""
    u = np.fft.irfft(state)
    modes: Complex128[np.ndarray, " m"] = np.fft.rfft(REACTION * (u - u**3))
    return modes


def etdrk4_step(
    state: Complex128[np.ndarray, " m"], step: float, coefficients: list[Float64[np.ndarray, " m"]]
) -> Complex128[np.ndarray, " m"]:
    """Take one step: the diffusion exactly, the reaction to fourth order."""
    whole, half, stage, first, middle, last = coefficients
    force = reaction(state)
    a = half * state + step * stage * force
    force_a = reaction(a)
    b = half * state + step * stage * force_a
    force_b = reaction(b)
    c = half * a + step * stage * (2 * force_b - force)
    force_c = reaction(c)
    after: Complex128[np.ndarray, " m"] = whole * state + step * (
        first * force + 2 * middle * (force_a + force_b) + last * force_c
    )
    return after


def etdrk4_coefficients(z: Float64[np.ndarray, " m"]) -> list[Float64[np.ndarray, " m"]]:
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


ALLEN_CAHN = Equation("allen-cahn", Rectangle((-1, 1), (0, 1)), residuals, reference)
