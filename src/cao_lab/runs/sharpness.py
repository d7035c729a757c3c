"""Eigenvalues for the log: those an optimizer captured, the next ones it did not, and those it never asks for."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from cao import Eigenpairs, Lanczos
from cao.curvature.operators import ParameterOperator
from cao.linalg.columns import generator_for
from cao.linalg.flat import FlatParams
from cao_lab.log.records import RefreshRecord

# Lanczos steps beyond the number of eigenvalues wanted: enough for their first digits, and cheap.
EXTRA_PRODUCTS = 5


def eigenvalues_outside(
    operator: ParameterOperator, basis: Float[Tensor, "n k"] | None, count: int, seed: int
) -> Eigenpairs:
    """Approximate the eigenpairs of largest magnitude outside a basis, in count + 5 products."""
    flat = FlatParams(operator.params)
    start = flat.space.random(flat.size, 1, generator_for(flat.device, seed), flat.dtype)
    count = min(count, flat.size - (0 if basis is None else basis.shape[1]))
    solve = Lanczos(count + EXTRA_PRODUCTS - 1, count=count)
    if basis is None:
        return solve(operator, start)
    basis = basis.to(flat.dtype)
    return solve(Outside(operator, basis), start - basis @ (basis.T @ start))


class Outside:
    """(I − VVᵀ) A (I − VVᵀ): an operator without the directions of an orthonormal basis V."""

    def __init__(self, operator: ParameterOperator, basis: Float[Tensor, "n k"]) -> None:
        self.operator, self.basis = operator, basis

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product outside the basis."""
        return self._outside(self.operator @ self._outside(columns))

    def _outside(self, columns: Tensor) -> Tensor:
        return columns - self.basis @ (self.basis.T @ columns)


def rows(
    captured: Eigenpairs | None,
    others: Eigenpairs,
    *,
    step: int,
    steps_per_epoch: int,
    damping: float | None,
    hessian_products: int,
) -> list[RefreshRecord]:
    """Return the rows of one moment: the captured eigenvalues first, then the others."""
    pairs = [(*pair, True) for pair in values_and_residuals(captured)]
    pairs += [(*pair, False) for pair in values_and_residuals(others)]
    epoch = step / steps_per_epoch
    return [
        RefreshRecord(step, epoch, index, value, residual, is_captured, damping, hessian_products)
        for index, (value, residual, is_captured) in enumerate(pairs, start=1)
    ]


def values_and_residuals(pairs: Eigenpairs | None) -> Sequence[tuple[float, float]]:
    """Return the pairs as plain numbers."""
    return [] if pairs is None else list(zip(pairs.values.tolist(), pairs.residuals.tolist(), strict=True))
