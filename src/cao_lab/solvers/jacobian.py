"""The whole Jacobian of a problem's residuals, and steps from it, for the methods that need nothing else."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

import cao
from cao_lab.solvers.config import SolveError
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

LARGEST = 1 << 27
"""Numbers in a Jacobian: 1 GiB in float64."""

Vector = Float[Tensor, " n"]
Matrix = Float[Tensor, "m n"]


def jacobian_of(problem: Problem, name: str) -> Callable[[], tuple[Matrix, Vector]]:
    """Return a function that returns J and the residuals, whose squares sum to the loss, where the parameters are."""
    params = [p for p in problem.params if p.requires_grad]
    if problem.residuals is None:
        raise SolveError(f"{name} needs residuals, not a loss alone")
    source = cao.LeastSquares(problem.residuals, params, max_jacobian_size=LARGEST)

    def linearized() -> tuple[Matrix, Vector]:
        here = source.linearize()
        jacobian = getattr(here, "jacobian", None)
        if jacobian is None:
            raise SolveError(f"{name} needs a Jacobian in memory; {source.derivative}")
        return jacobian, here.residuals.detach()

    return linearized


def damped_solve(problem: Problem, name: str) -> Products:
    """Return a Jacobian as what is done first, and a damped solve with it as the product."""
    jacobian, residuals = jacobian_of(problem, name)()
    return Products(lambda: Damped(jacobian).step(residuals, 1.0), setup=jacobian_of(problem, name))


class Damped:
    """(JᵀJ + μI)⁻¹Jᵀr = Jᵀ(JJᵀ + μI)⁻¹r for many μ and r, by whichever of the two matrices is smaller."""

    def __init__(self, jacobian: Matrix) -> None:
        self.jacobian = jacobian
        self.is_wide = len(jacobian) < jacobian.shape[1]
        self.gram = jacobian @ jacobian.T if self.is_wide else jacobian.T @ jacobian

    def step(self, residuals: Vector, damping: float) -> Vector | None:
        """Return the solution, or None where rounding leaves the matrix indefinite."""
        matrix = self.gram.clone()
        matrix.diagonal().add_(damping)
        factor, failure = torch.linalg.cholesky_ex(matrix)
        if failure:
            return None
        right = residuals if self.is_wide else self.jacobian.T @ residuals
        solution = torch.cholesky_solve(right[:, None], factor)[:, 0]
        return self.jacobian.T @ solution if self.is_wide else solution
