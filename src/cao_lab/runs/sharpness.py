"""Eigenvalues for the log: those an optimizer captured, the next ones it did not, and those it never asks for."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cao import Eigenpairs
from cao.curvature import ParameterOperator
from cao.linalg import SymmetricOperator, lanczos, random_columns
from cao_lab.log.records import RefreshRecord

# Lanczos steps beyond the number of eigenvalues wanted: enough for their first digits, and cheap.
EXTRA_PRODUCTS = 5


class Deflated:
    """An operator from which the directions of an orthonormal basis are taken out, on both sides."""

    def __init__(self, operator: SymmetricOperator, basis: Float[Tensor, "n k"]) -> None:
        self.operator, self.basis = operator, basis

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return (I − VVᵀ) A (I − VVᵀ) times each column."""
        return self._outside(self.operator @ self._outside(columns))

    def _outside(self, columns: Tensor) -> Tensor:
        return columns - self.basis @ (self.basis.T @ columns)


def eigenvalues_outside(
    operator: ParameterOperator, basis: Float[Tensor, "n k"] | None, count: int, seed: int
) -> Eigenpairs:
    """Approximate the eigenpairs of largest magnitude outside a basis, in count + 5 products."""
    size = sum(p.numel() for p in operator.params)
    first = operator.params[0]
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    generator = torch.Generator(first.device).manual_seed(seed)
    start = random_columns(size, 1, generator, dtype)
    count = min(count, size - (0 if basis is None else basis.shape[1]))
    if basis is None:
        return lanczos(operator, start, count + EXTRA_PRODUCTS - 1, count=count)
    basis = basis.to(dtype)
    start = start - basis @ (basis.T @ start)
    return lanczos(Deflated(operator, basis), start, count + EXTRA_PRODUCTS - 1, count=count)


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
