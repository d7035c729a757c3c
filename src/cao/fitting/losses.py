"""Losses that outliers cannot dominate: Σ s²ρ((r/s)²), with ρ as scipy names them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Rho: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""ρ, ρ' and ρ'' of squared residuals, z."""

# The least curvature of a residual, as a share of ρ': far out it is negative, and a fit needs a positive one.
LEAST_CURVATURE = 1e-2


def huber(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ρ is z up to 1, then 2√z − 1."""
    root = z.clamp_min(1).sqrt()
    inside = z <= 1
    return (
        torch.where(inside, z, 2 * root - 1),
        1 / root,
        torch.where(inside, torch.zeros_like(z), -0.5 / root**3),
    )


def soft_l1(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ρ is 2√(1 + z) − 2, written without cancellation."""
    root = (1 + z).sqrt()
    return 2 * z / (root + 1), 1 / root, -0.5 / root**3


def cauchy(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ρ is ln(1 + z)."""
    return z.log1p(), 1 / (1 + z), -1 / (1 + z) ** 2


LOSSES: Mapping[str, Rho | None] = {"linear": None, "huber": huber, "soft_l1": soft_l1, "cauchy": cauchy}


@dataclass(frozen=True)
class Loss:
    """Σ s²ρ((r/s)²) of residuals r at scale s; "linear" is Σ r²."""

    name: str
    scale: float

    def __post_init__(self) -> None:
        """Refuse what is no loss."""
        if self.name not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.name!r}")
        if not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf):
            raise ValueError(
                f"scale must be a positive number, the size of a residual that is no outlier; got {self.scale!r}"
            )

    @property
    def is_linear(self) -> bool:
        """Whether this is the plain sum of squares."""
        return LOSSES[self.name] is None

    def of(self, residuals: Float[Tensor, " m"]) -> Tensor:
        """Return the loss, a number."""
        rho = LOSSES[self.name]
        if rho is None:
            return residuals.square().sum()
        return self.scale**2 * rho((residuals / self.scale).square())[0].sum()

    def corrected(self, residuals: Float[Tensor, " m"]) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """Return factors of the residuals and of the rows of their Jacobian.

        With them 2Jᵀr is the gradient of the loss, and 2JᵀJ its curvature as far as that comes from J (Triggs et al.,
        2000): the rows carry √(ρ' + 2zρ''), and the residuals ρ' over it.
        """
        rho = LOSSES[self.name]
        if rho is None:
            return torch.ones_like(residuals), torch.ones_like(residuals)
        z = (residuals / self.scale).square()
        _, slope, bend = rho(z)
        rows = torch.maximum(slope + 2 * z * bend, LEAST_CURVATURE * slope).sqrt()
        return slope / rows, rows

    def as_squares(self, residuals: Tensor) -> Tensor:
        """Return residuals whose plain sum of squares is this loss, for a solver that knows no other."""
        rho = LOSSES[self.name]
        if rho is None:
            return residuals
        z = (residuals / self.scale).square()
        # ρ(z)/z → 1; a square root has no derivative at 0, so the quotient is taken a little beside it.
        z = z.clamp_min(torch.finfo(z.dtype).tiny ** 0.5)
        return residuals * (rho(z)[0] / z).sqrt()
