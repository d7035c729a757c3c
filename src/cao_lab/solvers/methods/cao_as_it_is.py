"""CAO over the full batch, with automatic damping: what the sketch does without L-BFGS."""

from dataclasses import dataclass
from typing import NoReturn

from cao import CAO
from cao_lab.solvers.objective import Objective
from cao_lab.solvers.price import Products, hessian_product
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class FullBatchCAO:
    """CAO with a sketch of the Hessian of the whole loss."""

    rank: int = 20
    refresh_every: int = 50
    lr: float = 1.0
    max_update_norm: float | None = 1.0
    name = "cao"

    def products(self, problem: Problem) -> Products | None:
        """Return a product with the Hessian."""
        return hessian_product(problem)

    def minimize(self, objective: Objective) -> NoReturn:
        """Take steps until the budget is spent."""
        optimizer = CAO(
            objective.params,
            lr=self.lr,
            rank=min(self.rank, objective.problem.size),
            refresh_every=self.refresh_every,
            damping="auto",
            max_update_norm=self.max_update_norm,
        )
        while True:
            loss = objective.graph()
            optimizer.zero_grad()
            before = optimizer.counters.hessian_products
            optimizer.refresh_if_due(loss)
            objective.bill(optimizer.counters.hessian_products - before)
            loss.backward(inputs=objective.params)
            optimizer.step()


METHODS = (FullBatchCAO(),)
