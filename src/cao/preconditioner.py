"""(B + ηI)⁻¹ of a spectral sketch B = V diag(λ) Vᵀ, and what to do where the curvature is negative."""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg import Eigenpairs

NegativeCurvature: TypeAlias = Literal["magnitude", "clip", "signed"]
Scaling: TypeAlias = Literal["inverse-damping", "unit"]

# Under the paper's rule, a value this close to −η (relative to the larger of |λ| and η) would make P blow up.
SINGULAR = 1e-6


def effective_curvature(values: Float[Tensor, " k"], rule: NegativeCurvature) -> Float[Tensor, " k"]:
    """Return the curvature that stands in for λ: |λ|, max(λ, 0), or λ itself, which is the paper's rule."""
    if rule == "magnitude":
        return values.abs()
    return values.clamp_min(0) if rule == "clip" else values


def is_singular(values: Float[Tensor, " k"], damping: float) -> Tensor:
    """Tell, for each value, whether λ + η vanishes to within rounding."""
    return (values + damping).abs() < SINGULAR * values.abs().clamp_min(damping)


def base_gain(damping: float, scaling: Scaling) -> float:
    """Return the factor that P applies to the complement of the sketch."""
    return 1 / damping if scaling == "inverse-damping" else 1.0


def correction_gains(
    values: Float[Tensor, " k"], damping: float, rule: NegativeCurvature, scaling: Scaling
) -> Float[Tensor, " k"]:
    """Return c such that P g = base·g + V diag(c) Vᵀ g.

    From 1/(λ + η) − 1/η = −λ/(λ + η) · 1/η. A direction in which λ + η vanishes is left to the complement.
    """
    curvature = effective_curvature(values, rule)
    gains = -curvature / (curvature + damping) * base_gain(damping, scaling)
    return torch.where(is_singular(curvature, damping), torch.zeros_like(gains), gains)


def precondition(
    gradient: Float[Tensor, " n"],
    sketch: Eigenpairs,
    damping: float,
    *,
    negative_curvature: NegativeCurvature = "magnitude",
    scaling: Scaling = "inverse-damping",
) -> Float[Tensor, " n"]:
    """Return (B + ηI)⁻¹ g for B = V diag(λ) Vᵀ, or η(B + ηI)⁻¹ g with unit scaling.

    Captured directions are scaled by 1/(λ + η), the orthogonal complement by 1/η.
    """
    gains = correction_gains(sketch.values, damping, negative_curvature, scaling)
    correction = sketch.vectors @ (gains * (sketch.vectors.T @ gradient))
    return base_gain(damping, scaling) * gradient + correction
