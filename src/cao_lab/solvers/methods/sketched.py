"""L-BFGS in the metric of a sketch: `cao.SketchedLBFGS`, with its defaults."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cao
from cao_lab.solvers.objective import Objective, flat
from cao_lab.solvers.price import Products, hessian_product
from cao_lab.tasks.pde.problem import Problem

TIMED_COLUMNS = 10


@dataclass(frozen=True)
class Sketched:
    """SketchedLBFGS on the Gauss-Newton matrix of the residuals, or on the Hessian of a plain loss."""

    history_size: int = 100
    seed: int = 0
    name = "sketched-lbfgs"

    def products(self, problem: Problem) -> Products | None:
        """Return a block of products with the matrix it sketches."""
        if problem.residuals is None:
            return hessian_product(problem)
        params = list(problem.params)
        matrix = library("LeastSquares")(problem.residuals, params)
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randn(problem.size, TIMED_COLUMNS, dtype=params[0].dtype, generator=generator)
        return Products(lambda: matrix @ columns, TIMED_COLUMNS)

    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or until a step leaves the parameters where they were."""
        problem = objective.problem
        residuals = problem.residuals
        source = problem.loss if residuals is None else library("LeastSquares")(residuals, objective.params)
        optimizer = library("SketchedLBFGS")(
            objective.params, source=source, history_size=self.history_size, seed=self.seed
        )

        def closure() -> Tensor:
            objective.bill_products(optimizer.status.products - objective.products)
            return objective.closure()

        before = None
        while before is None or not torch.equal(before, flat(objective.params)):
            before = flat(objective.params)
            optimizer.step(closure)
        return str(optimizer.status)


def library(name: str) -> Any:
    """Return a class of the library by its name."""
    found = getattr(cao, name, None)
    if found is None:
        raise ValueError(f"this version of cao has no {name}; choose another method")
    return found
