"""BFGS with a dense matrix, step for step scipy's, but for some thousand parameters in bearable time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

# scipy exports neither; its BFGS is built on them.
from scipy.optimize._optimize import _line_search_wolfe12, _LineSearchError  # type: ignore[attr-defined]

from cao_lab.solvers.config import SolveError
from cao_lab.solvers.objective import Objective, flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

Vector = Float64[np.ndarray, " n"]
Matrix = Float64[np.ndarray, "n n"]


@dataclass(frozen=True)
class ScipyBFGS:
    """scipy's BFGS: its line search, its first matrix and its first step.

    scipy multiplies three dense matrices per iteration; here the same update is written as the sum of three outer
    products, which takes P² instead of P³ operations, so that seconds can be compared.
    """

    max_size: int = 10_000
    name = "scipy-bfgs"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> str:
        """Run until the budget is spent, or the search fails."""
        check_size(objective, self.max_size, self.name)
        return descend(objective, lambda inverse, step, change, _: update(inverse, step, change))


def check_size(objective: Objective, most: int, name: str) -> None:
    """Refuse parameters whose square is not affordable."""
    size = sum(p.numel() for p in objective.params)
    if size > most:
        raise SolveError(f"{name} holds a dense matrix and takes up to {most} parameters, got {size}")


def descend(objective: Objective, learn: Callable[[Matrix, Vector, Vector, Vector], None]) -> str:
    """Follow −Hg by scipy's line search; what is learnt is told H, the step, the gradient's change, and H⁻¹ step."""
    here = flat(objective.params).double().numpy()
    value_at, gradient_at = remembering(objective.at)
    value, gradient = value_at(here), gradient_at(here)
    value_before = value + np.linalg.norm(gradient) / 2  # So that the first step has a length of about one.
    inverse = np.eye(len(here))
    while gradient.any():
        direction = -inverse @ gradient
        try:
            step, _, _, value, value_before, after = _line_search_wolfe12(
                value_at, gradient_at, here, direction, gradient, value, value_before, amin=1e-100, amax=1e100
            )
        except _LineSearchError:
            return "the line search found no better point"
        here = here + step * direction
        after = gradient_at(here) if after is None else after
        learn(inverse, step * direction, after - gradient, -step * gradient)
        gradient = after
    return "the gradient is zero"


def update(inverse: Matrix, step: Vector, change: Vector) -> None:
    """Let the inverse Hessian H map a change of the gradient to the step that made it: BFGS, in place.

    (I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ = H + wsᵀ + swᵀ with w = ½(ρ + ρ²yᵀHy)s − ρHy.
    """
    curvature = step @ change
    rho = 1 / curvature if curvature else 1_000.0  # As scipy does.
    image = inverse @ change
    weights = (rho + rho**2 * (change @ image)) / 2 * step - rho * image
    correction = np.outer(weights, step)
    inverse += correction
    inverse += correction.T


def remembering(
    both: Callable[[Vector], tuple[float, Vector]],
) -> tuple[Callable[[Vector], float], Callable[[Vector], Vector]]:
    """Return value and gradient as two functions that share an evaluation if they are asked for the same point."""
    last: list[tuple[Vector, float, Vector]] = []

    def at(point: Vector) -> tuple[Vector, float, Vector]:
        if not last or not np.array_equal(last[0][0], point):
            last[:] = [(point.copy(), *both(point))]
        return last[0]

    return lambda point: at(point)[1], lambda point: at(point)[2]


METHODS = (ScipyBFGS(),)
