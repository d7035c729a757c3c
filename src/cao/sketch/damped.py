"""P = (B + ηI)⁻¹ of a spectral sketch B = V diag(λ) Vᵀ, and what to do where the curvature is negative."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import Eigenpairs

NegativeCurvature: TypeAlias = Literal["magnitude", "clip", "signed"]
Scaling: TypeAlias = Literal["inverse-damping", "unit"]

# Under the paper's rule, a value this close to −η (relative to the larger of |λ| and η) would make P blow up.
SINGULAR = 1e-6


@dataclass(frozen=True)
class Damped:
    """P = (B + ηI)⁻¹ of a sketch B = V diag(λ) Vᵀ: the only place where it is applied to a whole vector.

    It is (I + V diag(gains) Vᵀ)/divisor, from 1/(λ + η) = (1 − λ/(λ + η))/η: captured directions gain −λ/(λ + η).
    """

    vectors: Float[Tensor, "n k"]
    gains: Float[Tensor, " k"]
    divisor: float
    """η, or 1 for ηP, with which the complement takes an SGD step."""

    @classmethod
    def of(
        cls,
        values: Float[Tensor, " k"],
        vectors: Float[Tensor, "n k"],
        damping: float,
        *,
        negative_curvature: NegativeCurvature = "magnitude",
        scaling: Scaling = "inverse-damping",
    ) -> "Damped":
        """Return (B + ηI)⁻¹, or η(B + ηI)⁻¹ with unit scaling.

        For λ stands |λ|, max(λ, 0), or, by the paper's rule, λ itself. A direction in which λ + η vanishes to within
        rounding is left to the complement.
        """
        curvature = {"magnitude": values.abs(), "clip": values.clamp_min(0), "signed": values}[negative_curvature]
        gains = -(curvature / (curvature + damping))
        gains = torch.where(is_singular(curvature, damping), torch.zeros_like(gains), gains)
        return cls(vectors, gains.to(vectors), damping if scaling == "inverse-damping" else 1.0)

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return P times a vector or a block of columns."""
        gains = self.gains if columns.ndim == 1 else self.gains.unsqueeze(1)
        return (columns + self.vectors @ (gains * (self.vectors.T @ columns))) / self.divisor


def is_singular(values: Float[Tensor, " k"], damping: float) -> Tensor:
    """Tell, for each value, whether λ + η vanishes to within rounding."""
    return (values + damping).abs() < SINGULAR * values.abs().clamp_min(damping)


def precondition(
    gradient: Float[Tensor, " n"],
    sketch: Eigenpairs,
    damping: float,
    *,
    negative_curvature: NegativeCurvature = "magnitude",
    scaling: Scaling = "inverse-damping",
) -> Float[Tensor, " n"]:
    """Return P g for a sketch: (B + ηI)⁻¹ g, or η(B + ηI)⁻¹ g with unit scaling."""
    inverse = Damped.of(sketch.values, sketch.vectors, damping, negative_curvature=negative_curvature, scaling=scaling)
    return inverse @ gradient
