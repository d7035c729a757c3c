"""Eigensolvers as values, of anything that multiplies columns by @: the paper's subspace iteration, and Lanczos."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import (
    HERE,
    Eigenpairs,
    Space,
    Which,
    check_which,
    column_major,
    full_precision,
    generator_for,
    has_converged,
    in_float64,
    multiply_in_place,
    orthonormalize,
    precise,
    rayleigh_ritz,
    row_pieces,
    small_eigh,
)


@runtime_checkable
class SymmetricOperator(Protocol):
    """Anything that multiplies a block of columns: a dense matrix, a Hessian, a Gauss-Newton matrix."""

    def __matmul__(self, columns: Tensor, /) -> Tensor:
        """Return the operator's product with each column."""
        ...


@runtime_checkable
class Solver(Protocol):
    """How eigenpairs are found.

    One that takes no `space` serves where all parameters are in one process: `space` is passed only where they are
    spread over several, and only a solver that takes its inner products from there is right.
    """

    def __call__(
        self, operator: SymmetricOperator, start: Tensor, space: Space = HERE, *, overwrite_start: bool = False
    ) -> Eigenpairs:
        """Return as many eigenpairs as there are start columns, or more, the most wanted first."""
        ...


def solved(solve: Solver, operator: SymmetricOperator, start: Float[Tensor, "n k"], space: Space) -> Eigenpairs:
    """Return what a solver finds from a start that it may overwrite; it is told of the space only if that is spread."""
    if space.mesh is None:
        return solve(operator, start, overwrite_start=True)
    try:
        signature(solve).bind(operator, start, space=space, overwrite_start=True)
    except TypeError:
        raise ValueError(
            f"parameters that are spread over processes need an eigensolver that takes space=, got {solve!r}; let its "
            "inner products and norms be those of the space, or use Lanczos or SubspaceIteration"
        ) from None
    return solve(operator, start, space=space, overwrite_start=True)


@dataclass(frozen=True)
class SubspaceIteration:
    """Orthogonal iteration with a Rayleigh-Ritz step at its end (the paper's Algorithm 2).

    Each iteration costs k products, the Rayleigh-Ritz step k more. For the largest algebraic values the operator is
    shifted by the most negative Ritz value seen, so that the largest values have the largest magnitude.
    """

    iterations: int = 3
    """Iterations T_pow; with a tolerance, the most that are made."""
    tolerance: float | None = None
    """Stop once every relative residual ‖Av − λv‖/|λ| is below this."""
    which: Which = "magnitude"
    """Which eigenvalues are wanted: of largest magnitude, or the largest."""

    def __post_init__(self) -> None:
        """Refuse to look for both ends."""
        check_which(self.which)
        if self.which == "both-ends":
            raise ValueError(
                'SubspaceIteration needs which to be "magnitude" or "algebraic", got "both-ends"; use Lanczos for both '
                "ends, since powers of an operator favour the larger of the two"
            )

    def __call__(
        self,
        operator: SymmetricOperator,
        start: Float[Tensor, "n k"],
        space: Space = HERE,
        *,
        overwrite_start: bool = False,
    ) -> Eigenpairs:
        """Return as many eigenpairs as there are start columns; overwriting these saves a copy of them."""
        width = start.shape[1]
        is_measured = self.tolerance is not None or self.which == "algebraic"
        is_rough = not is_measured and self.iterations > 0
        basis = orthonormalize(start if overwrite_start else column_major(start), is_rough=is_rough, space=space)
        shift = 0.0
        for iteration in range(self.iterations + 1):
            image = (operator @ basis).detach()
            is_last = iteration == self.iterations
            if is_last or is_measured:
                values, rotation, residuals = rayleigh_ritz(basis, image, self.which, space)
                if is_last or has_converged(values, residuals, self.tolerance, self.which):
                    break
                if self.which == "algebraic":
                    shift = max(shift, -float(values.min()))
                    image = image + shift * basis
            # Into the start's own memory, which its caller holds anyway: two n × k blocks are alive, but for the shift.
            is_rough = not is_measured and iteration + 1 < self.iterations
            basis.copy_(orthonormalize(image, is_rough=is_rough, space=space))
            del image
        return Eigenpairs(values, multiply_in_place(basis, rotation), residuals, (iteration + 1) * width)


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

    def __post_init__(self) -> None:
        """Refuse to look for what has no name."""
        check_which(self.which)

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
        self.projected = torch.zeros(0, 0, dtype=torch.float64)
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
        block /= lengths.where(~is_lost, 1)
        # Orthonormalising columns that are nearly dependent may bring back what was removed; one column is not.
        for _ in range(min(2, block.shape[1])):
            remove_components(block, basis, self.space)
            block = orthonormalize(block, space=self.space)
        self._rows[size : size + block.shape[1]] = block.T
        # Into memory that is there. An operator may hand back the very columns that it was given.
        self.residual = block.copy_((self.operator @ block).detach())
        self.products += block.shape[1]
        coupling = in_float64(remove_components(self.residual, self._rows[: size + block.shape[1]], self.space))
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
    """Make the columns orthogonal to orthonormal rows, in place, and return the coefficients taken out."""
    taken = torch.zeros(len(rows), columns.shape[1], dtype=precise(columns.device), device=columns.device)
    for _ in range(2):  # Twice is enough to reach rounding, even where the products are not summed in float64.
        coefficients = space.total(rows @ columns)
        columns.addmm_(rows.T, coefficients, alpha=-1)
        taken += coefficients
    return taken


SolverName: TypeAlias = Literal["subspace", "lanczos"]
SOLVERS: dict[str, Callable[[int, float | None], Solver]] = {"subspace": SubspaceIteration, "lanczos": Lanczos}
"""The words that stand for solvers."""


def eigensolver_for(setting: str | Solver, iterations: int, tolerance: float | None = None) -> Solver:
    """Return the solver that a word, with its iterations and tolerance, or a solver stands for."""
    return SOLVERS[setting](iterations, tolerance) if isinstance(setting, str) else setting
