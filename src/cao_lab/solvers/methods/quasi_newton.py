"""The quasi-Newton methods that everybody has: L-BFGS of torch and of scipy."""

from dataclasses import dataclass
from typing import Any

import torch
from scipy import optimize

from cao_lab.solvers.objective import Objective, flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

ENDLESS = 10**9


@dataclass(frozen=True)
class TorchLBFGS:
    """torch.optim.LBFGS with strong Wolfe search, its tolerances at zero so that only a stall ends it."""

    history_size: int = 100
    lr: float = 1.0
    name = "torch-lbfgs"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or until a step leaves the parameters where they were."""
        optimizer = self.optimizer(objective, ENDLESS)
        before = None
        while before is None or not torch.equal(before, flat(objective.params)):
            before = flat(objective.params)
            optimizer.step(objective.closure)
        return "the line search returns a step of zero"

    def optimizer(self, objective: Objective, max_iter: int) -> torch.optim.LBFGS:
        """Return torch's optimizer, to take so many iterations per step."""
        return torch.optim.LBFGS(
            objective.params,
            lr=self.lr,
            max_iter=max_iter,
            max_eval=ENDLESS,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            history_size=self.history_size,
            line_search_fn="strong_wolfe",
        )


@dataclass(frozen=True)
class ScipyLBFGSB:
    """L-BFGS-B of scipy, with Moré–Thuente search and tolerances of zero."""

    history_size: int = 100
    max_search: int = 50
    name = "scipy-lbfgsb"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> str:
        """Run until the budget is spent, or the search fails."""
        start = flat(objective.params).double().numpy()
        settings: Any = {
            "maxcor": self.history_size,
            "ftol": 0,
            "gtol": 0,
            "maxfun": ENDLESS,
            "maxiter": ENDLESS,
            "maxls": self.max_search,
        }
        return str(optimize.minimize(objective.at, start, jac=True, method="L-BFGS-B", options=settings).message)


METHODS = (TorchLBFGS(), ScipyLBFGSB())
