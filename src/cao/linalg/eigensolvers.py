"""Eigensolvers as values, and the paper's subspace iteration."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import (
    Eigenpairs,
    Which,
    column_major,
    has_converged,
    multiply_in_place,
    orthonormalize,
    rayleigh_ritz,
)
from cao.linalg.lanczos import Lanczos
from cao.linalg.space import HERE, Space
from cao.linalg.symmetric import SymmetricOperator


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


SolverName: TypeAlias = Literal["subspace", "lanczos"]
SOLVERS: dict[str, Callable[[int, float | None], Solver]] = {"subspace": SubspaceIteration, "lanczos": Lanczos}
"""The words that stand for solvers."""


def eigensolver_for(setting: str | Solver, iterations: int, tolerance: float | None = None) -> Solver:
    """Return the solver that a word, with its iterations and tolerance, or a solver stands for."""
    return SOLVERS[setting](iterations, tolerance) if isinstance(setting, str) else setting
