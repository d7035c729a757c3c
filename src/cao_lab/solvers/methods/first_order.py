"""Adam and SOAP over the full batch, their rate falling to zero along a cosine if not told otherwise."""

from dataclasses import dataclass
from math import cos, pi
from typing import NoReturn

import torch
from torch.optim import Optimizer

from cao_lab.solvers.objective import Objective
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam."""

    lr: float = 1e-3
    is_decaying: bool = True
    name = "adam"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> NoReturn:
        """Take steps until the budget is spent."""
        descend(torch.optim.Adam(objective.params, lr=self.lr), objective, self.is_decaying)


@dataclass(frozen=True)
class Soap:
    """SOAP of pytorch_optimizer: Adam in the eigenbasis of Shampoo's preconditioner."""

    lr: float = 3e-3
    precondition_every: int = 10
    name = "soap"

    def products(self, problem: Problem) -> Products | None:
        """Return None: it makes no products."""
        return None

    def minimize(self, objective: Objective) -> NoReturn:
        """Take steps until the budget is spent."""
        from pytorch_optimizer import SOAP  # noqa: PLC0415  # an extra

        # Its default decay of 0.01 is for classifiers: here it would add an error of its own.
        optimizer = SOAP(objective.params, lr=self.lr, weight_decay=0.0, precondition_frequency=self.precondition_every)
        descend(optimizer, objective)


def descend(optimizer: Optimizer, objective: Objective, is_decaying: bool = True) -> NoReturn:
    """Take one step per evaluation, forever; the objective ends it."""
    lr = optimizer.param_groups[0]["lr"]
    while True:
        if is_decaying:
            optimizer.param_groups[0]["lr"] = lr * (1 + cos(pi * objective.spent)) / 2
        objective.closure()
        optimizer.step()


METHODS = (Adam(), Soap())
