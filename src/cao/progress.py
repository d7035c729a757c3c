"""What the optimizer tells of itself: the sketch in use and its counters."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sketch(NamedTuple):
    """The curvature in use: eigenvalues, their residuals ‖Hv − λv‖, the damping η and the step it was taken at."""

    values: list[float]
    residuals: list[float]
    damping: float
    step: int


class Counters(NamedTuple):
    """What the optimizer has done so far."""

    steps: int
    refreshes: int
    """Successful refreshes."""
    hessian_products: int
    indefinite_refreshes: int
    """Refreshes at which the paper's (B + ηI)⁻¹ would not have been positive definite."""
    failed_refreshes: int
    """Refreshes that came out non-finite and were discarded."""
    singular_directions: int
    """Directions left to the complement because λ + η vanished under the signed rule."""


def automatic_damping(values: Tensor, dtype: torch.dtype, previous: float) -> float:
    """Return the smallest captured |λ|, at least ε times the largest; the previous damping if all are zero."""
    magnitudes = values.abs()
    largest = float(magnitudes.max())
    return max(float(magnitudes.min()), torch.finfo(dtype).eps * largest) if largest > 0 else previous
