"""A Krylov space of fixed memory: Lanczos with full reorthogonalisation, thick restarts and quadrature on top."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg import (
    Eigenpairs,
    SymmetricOperator,
    bordered,
    full_precision,
    product,
    random_columns,
    row_pieces,
    small_eigh,
)

Quadrature = tuple[Float[Tensor, " m"], Float[Tensor, " m"]]
"""Nodes and weights, the nodes ascending."""
Order = Callable[[Tensor], Tensor]
"""Ritz values to indices, the most wanted first."""
Bound = Callable[[Tensor], Tensor]
"""Wanted Ritz values to the residuals that are small enough."""
# A seed that no caller is likely to have drawn the start vector from: the same vector again would lead nowhere.
RESTART_STREAM = 0x9E3779B9


class KrylovSpace:
    """An orthonormal basis V that grows by products with an operator A, and the projection T = VᵀAV.

    AV = VT + r eᵀ, where e is the last unit vector: what A does beyond the basis is one vector, the residual r. The
    basis is one matrix of fixed capacity, so that orthogonalisation is a matrix product and memory is known beforehand.
    """

    def __init__(self, operator: SymmetricOperator, start: Float[Tensor, "n 1"], capacity: int) -> None:
        self.operator = operator
        self.residual = start[:, 0].clone()
        self.projected = torch.zeros(0, 0, dtype=torch.float64, device=start.device)
        self._rows = start.new_empty(min(capacity, len(start)), len(start))

    def __len__(self) -> int:
        """Return the dimension."""
        return len(self.projected)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another direction."""
        return len(self) == len(self._rows)

    @property
    def is_invariant(self) -> bool:
        """Whether the operator does not lead out of the space, up to rounding."""
        rounding = 10 * torch.finfo(self.residual.dtype).eps * float(self.projected.abs().max())
        return float(self.residual.norm()) <= rounding

    def grow(self) -> None:
        """Add the direction of the residual, at the cost of one product."""
        size = len(self)
        direction = self.residual / self.residual.norm()
        remove_components(direction, self._rows[:size])
        self._rows[size] = direction / direction.norm()
        # A copy, because an operator may hand back the very column that it was given.
        self.residual = product(self.operator, self._rows[size].unsqueeze(1))[:, 0].clone()
        taken = remove_components(self.residual, self._rows[: size + 1])
        self.projected = bordered(self.projected, taken.unsqueeze(1))

    @full_precision()
    def shrink(self, values: Float[Tensor, " k"], rotation: Float[Tensor, "m k"]) -> None:
        """Keep only the given Ritz pairs; the residual, which they share, is the next direction as before."""
        old, new = rotation.shape
        turn = rotation.T.to(self._rows.dtype)
        for piece in row_pieces(self._rows.T):
            piece[:new] = turn @ piece[:old]
        self.projected = values.diag()

    @full_precision()
    def combine(self, rotation: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return combinations of the basis, each contiguous in memory."""
        return (rotation.T.to(self._rows.dtype) @ self._rows[: len(self)]).T


@full_precision()
def remove_components(column: Float[Tensor, " n"], rows: Float[Tensor, "m n"]) -> Float[Tensor, " m"]:
    """Make a column orthogonal to orthonormal rows, in place, and return the coefficients taken out."""
    taken = torch.zeros(len(rows), dtype=torch.float64, device=column.device)
    for _ in range(2):  # Twice is enough to reach rounding.
        coefficients = rows @ column
        column.addmv_(rows.T, coefficients, alpha=-1)
        taken += coefficients
    return taken


def restarted_lanczos(
    operator: SymmetricOperator,
    start: Float[Tensor, "n 1"],
    count: int,
    *,
    order: Order,
    bound: Bound,
    max_products: int,
) -> Eigenpairs:
    """Find the `count` most wanted eigenpairs by Lanczos with thick restarts (Wu and Simon 2000).

    Whenever max(40, 3·count) basis vectors are full, the more wanted half of the Ritz vectors is kept. It ends when
    all residuals are within their bound, or at `max_products`.
    """
    capacity = max(40, 3 * count)
    generator = torch.Generator(start.device).manual_seed(RESTART_STREAM)
    space = KrylovSpace(operator, start, capacity)
    for products in range(1, max_products + 1):
        space.grow()
        values, rotation = small_eigh(space.projected)
        wanted = order(values)
        best = wanted[:count]
        residuals = (space.residual.norm() * rotation[-1, best].abs()).to(start.dtype)
        has_converged = len(best) == count and is_within(residuals, bound(values[best]), values)
        is_exhausted = products == max_products or len(space) == len(start) or not bool(residuals.isfinite().all())
        if has_converged or is_exhausted:
            break
        if space.is_full:
            kept = wanted[: (capacity + count) // 2]
            space.shrink(values[kept], rotation[:, kept])
        if space.is_invariant:
            space.residual = random_columns(len(start), 1, generator, start.dtype)[:, 0].clone()
    vectors = space.combine(rotation[:, best])
    return Eigenpairs(values[best].to(start.dtype), vectors, residuals, products)


def is_within(residuals: Tensor, bounds: Tensor, values: Tensor) -> bool:
    """Whether every residual is within its bound, or is rounding of the largest value."""
    rounding = 10 * torch.finfo(residuals.dtype).eps * values.abs().max()
    return bool((residuals <= bounds.clamp_min(rounding)).all())


def lanczos_quadrature(operator: SymmetricOperator, start: Float[Tensor, "n 1"], iterations: int) -> Quadrature:
    """Return nodes and weights of the Gauss quadrature of uᵀ f(A) u for the unit vector u along `start`."""
    space = KrylovSpace(operator, start, iterations)
    space.grow()
    # In an invariant space the quadrature is exact, and there is nothing to grow into.
    while not space.is_full and not space.is_invariant:
        space.grow()
    nodes, rotation = small_eigh(space.projected)
    return nodes, rotation[0].square()
