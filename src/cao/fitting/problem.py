"""A fit as functions of a position: its loss, and its residuals with their Jacobian."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cao.curvature.least_squares import LARGEST_JACOBIAN, LeastSquares, ResidualFunction
from cao.curvature.linearized import ExplicitLinearized, Linearized
from cao.fitting.losses import Loss
from cao.fitting.variables import Variables

ONE_BY_ONE = 64


@dataclass(frozen=True)
class Local:
    """What is known of the residuals at one position, weighted so that 2JᵀJ is the curvature of the loss."""

    loss: float
    jacobian: Float[Tensor, "m n"]
    residuals: Float[Tensor, " m"]

    @property
    def gradient(self) -> Float[Tensor, " n"]:
        """The gradient of the loss, in float64 on the CPU."""
        return 2 * (self.jacobian.T @ self.residuals).double().cpu()


class Problem:
    """Residuals of the parameters under a loss, which must keep their number."""

    def __init__(self, residuals: ResidualFunction, variables: Variables, loss: Loss) -> None:
        # A few columns are computed one by one, which needs no check of each Jacobian.
        largest = 0 if variables.size <= ONE_BY_ONE else LARGEST_JACOBIAN
        self.source = LeastSquares(residuals, variables.params, max_jacobian_size=largest)
        self.residuals, self.variables, self.shape = residuals, variables, loss
        self.count: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers the Jacobian has, once there were residuals."""
        return (self.count or 0) * self.variables.size

    def squares(self) -> LeastSquares:
        """Return a source of curvature for a solver that knows no loss but the sum of squares."""
        if self.shape.is_linear:
            return LeastSquares(self.residuals, self.variables.params)
        return LeastSquares(self._as_squares, self.variables.params)

    def _as_squares(self) -> list[Tensor]:
        result = self.residuals()
        return [self.shape.as_squares(part) for part in ([result] if isinstance(result, Tensor) else result)]

    def loss(self) -> float:
        """Return the loss where the parameters are."""
        residuals = self.source.values()
        self.check_count(len(residuals))
        return float(self.shape.of(residuals.double()))

    def linearize(self) -> Local:
        """Return residuals and Jacobian where the parameters are."""
        linearized = self.source.linearize()
        residuals = linearized.residuals.detach()
        self.check_count(len(residuals))
        jacobian = jacobian_of(linearized, self.variables.size)
        residuals_factor, rows_factor = self.shape.corrected(residuals)
        return Local(
            float(self.shape.of(residuals.double())), rows_factor[:, None] * jacobian, residuals_factor * residuals
        )

    def check_start(self) -> None:
        """Refuse to begin where the loss is not finite."""
        loss = self.loss()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at the start; choose parameters where all residuals are finite")

    def check_count(self, count: int) -> None:
        """Refuse residuals of another number than before."""
        if self.count not in (None, count):
            raise ValueError(
                f"there were {self.count} residuals at the start, and now there are {count}; return the same number at "
                "every call, with zero for what does not count"
            )
        self.count = count


def jacobian_of(linearized: Linearized, size: int) -> Float[Tensor, "m n"]:
    """Return the whole Jacobian, from products with fewer columns than it has rows, or the reverse."""
    if isinstance(linearized, ExplicitLinearized):
        return linearized.jacobian
    residuals = linearized.residuals.detach()
    if len(residuals) < size:
        return linearized.pull(torch.eye(len(residuals)).to(residuals)).T
    return linearized.push(torch.eye(size).to(residuals))
