"""P = (B + ηI)⁻¹ of a spectral sketch B = V diag(λ) Vᵀ, and what to do where the curvature is negative."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg import Eigenpairs

NegativeCurvature: TypeAlias = Literal["magnitude", "clip", "signed"]
Scaling: TypeAlias = Literal["inverse-damping", "unit"]

# Under the paper's rule, a value this close to −η (relative to the larger of |λ| and η) would make P blow up.
SINGULAR = 1e-6


@dataclass(frozen=True)
class Preconditioner:
    """P = base·I + V diag(gains) Vᵀ: captured directions are scaled by base + gain, everything else by the base."""

    vectors: Float[Tensor, "n k"]
    gains: Float[Tensor, " k"]
    base: float

    @classmethod
    def of(
        cls,
        values: Float[Tensor, " k"],
        vectors: Float[Tensor, "n k"],
        damping: float,
        *,
        negative_curvature: NegativeCurvature = "magnitude",
        scaling: Scaling = "inverse-damping",
    ) -> "Preconditioner":
        """Return (B + ηI)⁻¹, or η(B + ηI)⁻¹ with unit scaling.

        From 1/(λ + η) − 1/η = −λ/(λ + η) · 1/η. For λ stands |λ|, max(λ, 0), or, by the paper's rule, λ itself. A
        direction in which λ + η vanishes to within rounding is left to the complement.
        """
        curvature = {"magnitude": values.abs(), "clip": values.clamp_min(0), "signed": values}[negative_curvature]
        base = 1 / damping if scaling == "inverse-damping" else 1.0
        gains = -curvature / (curvature + damping) * base
        return cls(vectors, torch.where(is_singular(curvature, damping), torch.zeros_like(gains), gains), base)

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return P times a vector or a block of columns."""
        gains = self.gains if columns.ndim == 1 else self.gains.unsqueeze(1)
        return self.base * columns + self.vectors @ (gains * (self.vectors.T @ columns))

    def power(self, exponent: float) -> "Preconditioner":
        """Return P to a power, such as P^½ or P⁻¹; P must be positive definite."""
        base = self.base**exponent
        return Preconditioner(self.vectors, (self.base + self.gains) ** exponent - base, base)


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
    preconditioner = Preconditioner.of(
        sketch.values, sketch.vectors, damping, negative_curvature=negative_curvature, scaling=scaling
    )
    return preconditioner @ gradient
