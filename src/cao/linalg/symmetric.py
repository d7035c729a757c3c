"""What a symmetric operator is: anything that multiplies a block of columns by @."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from cao.linalg.space import HERE, Space


@runtime_checkable
class SymmetricOperator(Protocol):
    """Anything that multiplies a block of columns: a dense matrix, a Hessian, a Gauss-Newton matrix."""

    def __matmul__(self, columns: Tensor, /) -> Tensor:
        """Return the operator's product with each column."""
        ...


class Deflated:
    """(I − VVᵀ) A (I − VVᵀ): an operator without the directions of an orthonormal basis V."""

    def __init__(self, operator: SymmetricOperator, basis: Float[Tensor, "n k"], space: Space = HERE) -> None:
        self.operator, self.basis, self.space = operator, basis, space

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product outside the basis."""
        return self._outside(self.operator @ self._outside(columns))

    def _outside(self, columns: Tensor) -> Tensor:
        return columns - self.basis @ self.space.total(self.basis.T @ columns)
