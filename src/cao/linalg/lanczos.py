"""Block Lanczos with full reorthogonalisation."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import (
    Eigenpairs,
    Which,
    column_major,
    full_precision,
    has_converged,
    orthonormalize,
    row_pieces,
    small_eigh,
)
from cao.linalg.space import HERE, Space, generator_for, in_float64, precise
from cao.linalg.symmetric import SymmetricOperator


@dataclass(frozen=True)
class Lanczos:
    """Block Lanczos with full reorthogonalisation, and thick restarts where memory is bounded (Wu and Simon 2000).

    Every column of the basis costs one product. It takes fewer products than subspace iteration and more memory.
    """

    iterations: int = 3
    """Blocks after the first; with a tolerance, the most that are made."""
    tolerance: float | None = None
    """Stop once every relative residual is below this."""
    which: Which = "magnitude"
    """Which eigenvalues are wanted."""
    count: int | None = None
    """Eigenpairs to return; by default as many as there are start columns."""
    capacity: int | None = None
    """Columns of the basis at which the more wanted half is kept and the rest dropped; by default none is."""
    floor: float | None = None
    """Stop after two blocks if the first value, its residual included, is below this, and so nothing is wanted."""

    def __call__(
        self,
        operator: SymmetricOperator,
        start: Float[Tensor, "n b"],
        space: Space = HERE,
        *,
        overwrite_start: bool = False,
    ) -> Eigenpairs:
        """Return the most wanted eigenpairs of the block Krylov space of the start columns."""
        width = start.shape[1]
        count = self.count or width
        capacity = min(self.capacity or width * (self.iterations + 1), space.count(start))
        krylov = KrylovSpace(operator, start if overwrite_start else column_major(start), capacity, space)
        del start
        for iteration in range(self.iterations + 1):
            krylov.grow()
            values, rotation = small_eigh(krylov.projected, self.which)
            best, turn = values[:count], rotation[:, :count]
            residuals = krylov.residual_norms(turn)
            is_done = len(best) == count and has_converged(best, residuals, self.tolerance, self.which)
            if self.floor is not None and iteration > 0:
                is_done = is_done or bool(best[0] + residuals[0] < self.floor)
            if is_done or iteration == self.iterations or krylov.is_exhausted or not bool(residuals.isfinite().all()):
                break
            if krylov.is_full:
                kept = (capacity + count) // 2
                krylov.shrink(values[:kept], rotation[:, :kept])
        vectors = krylov.combine(turn)
        return Eigenpairs(best.to(vectors), vectors, residuals.to(vectors), krylov.products)


class KrylovSpace:
    """An orthonormal basis V that grows by blocks of products with an operator A, and the projection T = VᵀAV.

    AV = VT + R Eᵀ, where E picks the newest columns: what A does beyond the basis is one block, the residual R. The
    basis is one matrix of fixed capacity, so that orthogonalisation is a matrix product and memory is known beforehand.
    """

    def __init__(
        self, operator: SymmetricOperator, start: Float[Tensor, "n b"], capacity: int, space: Space = HERE
    ) -> None:
        self.operator, self.space = operator, space
        self.residual = start
        self.products = 0
        self.projected = in_float64(start.new_zeros(0, 0))
        self._rows, self._size = start.new_empty(capacity, start.shape[0]), space.count(start)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another block; a basis of everything has room for a narrower last one."""
        capacity = len(self._rows)
        return capacity < self._size and len(self.projected) + self.residual.shape[1] > capacity

    @property
    def is_exhausted(self) -> bool:
        """Whether the basis spans everything there is."""
        return len(self.projected) == self._size

    @property
    def is_invariant(self) -> bool:
        """Whether the operator does not lead out of the space, up to rounding."""
        return float(self.space.norms(self.residual).norm()) <= self._rounding

    def grow(self) -> None:
        """Add the directions of the residual, or random ones where it vanishes, at the cost of a product each."""
        size = len(self.projected)
        basis, block = self._rows[:size], self.residual[:, : len(self._rows) - size]
        lengths = self.space.norms(block)
        is_lost = lengths <= self._rounding
        if bool(is_lost.any()):
            generator = generator_for(block.device, self.products)
            noise = self.space.random(block.shape[0], block.shape[1], generator, block.dtype)
            block = torch.where(is_lost, noise, block)
        block = block / lengths.where(~is_lost, 1)
        # Orthonormalising columns that are nearly dependent may bring back what was removed; one column is not.
        for _ in range(min(2, block.shape[1])):
            remove_components(block, basis, self.space)
            block = orthonormalize(block, space=self.space)
        self._rows[size : size + block.shape[1]] = block.T
        # A copy, because an operator may hand back the very columns that it was given.
        self.residual = column_major((self.operator @ block).detach())
        self.products += block.shape[1]
        coupling = remove_components(self.residual, self._rows[: size + block.shape[1]], self.space)
        grown = coupling.new_zeros(len(coupling), len(coupling))
        grown[:size, :size], grown[:, size:], grown[size:, :size] = self.projected, coupling, coupling[:size].T
        self.projected = grown

    @full_precision()
    def residual_norms(self, rotation: Float[Tensor, "m k"]) -> Float[Tensor, " k"]:
        """Return ‖A V s − V T s‖ for columns s: what the newest columns' images have outside the basis."""
        newest = rotation[-self.residual.shape[1] :].to(self.residual)
        return self.space.norms(self.residual @ newest).to(rotation.device)

    @full_precision()
    def shrink(self, values: Float[Tensor, " k"], rotation: Float[Tensor, "m k"]) -> None:
        """Keep only the given Ritz pairs; the residual, which they share, is the next block as before."""
        old, new = rotation.shape
        turn = rotation.T.to(self._rows)
        for (piece,) in row_pieces(self._rows.T):
            piece[:new] = turn @ piece[:old]
        self.projected = values.diag()

    @full_precision()
    def combine(self, rotation: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return combinations of the basis, each contiguous in memory."""
        return (rotation.T.to(self._rows) @ self._rows[: len(self.projected)]).T

    @property
    def _rounding(self) -> float:
        largest = float(self.projected.abs().max()) if len(self.projected) else 0.0
        return 10 * torch.finfo(self._rows.dtype).eps * largest


@full_precision()
def remove_components(
    columns: Float[Tensor, "n b"], rows: Float[Tensor, "m n"], space: Space = HERE
) -> Float[Tensor, "m b"]:
    """Make the columns orthogonal to orthonormal rows, in place, and return the coefficients taken out, in float64."""
    taken = torch.zeros(len(rows), columns.shape[1], dtype=precise(columns.device), device=columns.device)
    for _ in range(2):  # Twice is enough to reach rounding, even where the products are not summed in float64.
        coefficients = space.total(rows @ columns)
        columns.addmm_(rows.T, coefficients, alpha=-1)
        taken += coefficients
    return in_float64(taken)
