"""L-BFGS in the metric of a sketch: `cao.SketchedLBFGS`, with its defaults."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

import cao
from cao_lab.solvers.methods.quasi_newton import ENDLESS
from cao_lab.solvers.objective import Objective, flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

TIMED_COLUMNS = 20
BETWEEN_COMPARISONS = 20
"""Iterations after which points that may grow are compared with those that are held out."""


@dataclass(frozen=True)
class Sketched:
    """SketchedLBFGS on the Gauss-Newton matrix of the residuals, or on the Hessian of a plain loss."""

    history_size: int = 100
    seed: int = 0
    name = "sketched-lbfgs"
    memory: ClassVar[Literal["auto", "pairs", "dense"]] = "auto"

    def products(self, problem: Problem) -> Products | None:
        """Return a block of products with the matrix it sketches, and what a refresh does before."""
        params = list(problem.params)
        count = min(TIMED_COLUMNS, problem.size)
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(problem.size, count, dtype=params[0].dtype, generator=generator)
        if problem.residuals is None:
            return Products(
                lambda: cao.Hessian(problem.loss, params) @ columns,
                count,
                one=lambda: cao.Hessian(problem.loss, params) @ columns[:, :1],
            )
        matrix = cao.LeastSquares(problem.residuals, params)
        here = matrix.linearize()
        return Products(lambda: here @ columns, count, matrix.linearize, one=lambda: here @ columns[:, :1])

    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or until a step leaves the parameters where they were; let points grow."""
        problem = objective.problem
        residuals, points = problem.residuals, problem.points
        optimizer = cao.SketchedLBFGS(
            objective.params,
            source=points or (problem.loss if residuals is None else cao.LeastSquares(residuals, objective.params)),
            max_iter=ENDLESS if points is None else BETWEEN_COMPARISONS,
            max_eval=ENDLESS,
            memory=self.memory,
            history_size=self.history_size,
            seed=self.seed,
        )

        def closure() -> Tensor:
            status = optimizer.status
            others = status.corrected_cost - objective.others
            objective.bill(status.products - objective.products, status.refreshes - objective.setups, others)
            return objective.closure()

        before, has_grown = None, False
        while before is None or has_grown or not torch.equal(before, flat(objective.params)):
            before = flat(objective.params)
            optimizer.step(closure)
            if points:
                objective.bill(0, others=1)  # Residuals at two sets of points, and no gradient.
                if has_grown := points.grow():
                    optimizer.resampled()
                    objective.resampled()
        return str(optimizer.status.reason)


class SketchedPairs(Sketched):
    """With pairs to the end."""

    name = "sketched-lbfgs-pairs"
    memory = "pairs"


class SketchedDense(Sketched):
    """With a dense matrix from the first sketch on."""

    name = "sketched-lbfgs-dense"
    memory = "dense"


METHODS = (Sketched(),)
