"""ENGD-W and SPRING: Gauss–Newton steps of a fixed damping, the second with momentum (arXiv 2505.12149)."""

from dataclasses import dataclass
from typing import NoReturn

import torch

from cao_lab.solvers.jacobian import Damped, damped_solve, jacobian_of
from cao_lab.solvers.objective import Objective, flat, set_flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class NaturalGradient:
    """φ ← μφ + (JᵀJ + λI)⁻¹Jᵀ(r − μJφ), then θ ← θ − ηφ with the best η of a grid, as energy natural gradients do.

    Without momentum it is ENGD-W, with it SPRING. Its authors tune λ, μ and the rate for each problem. Here λ was
    chosen among 1e-3, 1e-4, 1e-6 and 1e-8 on `burgers` with seed 100, where the largest was the best; μ = 0.9 made no
    headway.
    """

    momentum: float = 0.0
    damping: float = 1e-3
    halvings: int = 30
    """The grid is 1, 1/2, 1/4, …, so many times."""

    @property
    def name(self) -> str:
        """The name tells whether there is momentum."""
        return "spring" if self.momentum else "engd-w"

    def products(self, problem: Problem) -> Products | None:
        """Return a damped solve, and the Jacobian that comes before."""
        return damped_solve(problem, self.name)

    @torch.no_grad()
    def minimize(self, objective: Objective) -> NoReturn:
        """Step until the budget is spent."""
        jacobian_at = jacobian_of(objective.problem, self.name)
        objective.graph()
        update = torch.zeros_like(flat(objective.params))
        while True:
            jacobian, residuals = jacobian_at()
            objective.bill(1, setups=1)
            update *= self.momentum
            update += self.solved(Damped(jacobian), residuals - jacobian @ update)
            search(objective, update, self.halvings)

    def solved(self, matrix: Damped, residuals: torch.Tensor) -> torch.Tensor:
        """Return a damped solution; where rounding leaves the matrix indefinite, with more damping."""
        damping = self.damping
        while (step := matrix.step(residuals, damping)) is None:
            damping *= 10
        return step


def search(objective: Objective, update: torch.Tensor, halvings: int) -> None:
    """Go to the best point of a grid along −update."""
    here = flat(objective.params)
    losses = {}
    for rate in (0.5**power for power in range(halvings + 1)):
        set_flat(objective.params, here - rate * update)
        losses[rate] = float(objective.graph())
    best = min(losses, key=lambda rate: losses[rate] if losses[rate] == losses[rate] else float("inf"))
    set_flat(objective.params, here - best * update)


METHODS = (NaturalGradient(), NaturalGradient(momentum=0.3))
