"""Levenberg–Marquardt with the whole Jacobian, a Cholesky factor per trial, and Nielsen's damping."""

from dataclasses import dataclass
from math import isfinite

import torch

from cao_lab.solvers.jacobian import Damped, damped_solve, jacobian_of
from cao_lab.solvers.objective import Objective, flat, set_flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class LevenbergMarquardt:
    """As Madsen, Nielsen and Tingleff (2004) write it; trials are evaluated without gradients."""

    first_damping: float = 1e-3
    """In units of the largest diagonal entry of JᵀJ at the start."""
    name = "levenberg-marquardt"

    def products(self, problem: Problem) -> Products | None:
        """Return a damped solve, and the Jacobian that comes before."""
        return damped_solve(problem, self.name)

    @torch.no_grad()
    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or until no step changes the parameters."""
        jacobian_at = jacobian_of(objective.problem, self.name)
        here, loss = flat(objective.params), float(objective.graph())
        jacobian, residuals = jacobian_at()
        damping, growth = self.first_damping * float(jacobian.square().sum(0).max()), 2.0
        while isfinite(damping):
            objective.bill(0, setups=1)
            matrix, gradient = Damped(jacobian), jacobian.T @ residuals
            gain = -1.0
            while not gain > 0 and isfinite(damping):
                objective.bill(1)
                step = matrix.step(residuals, damping)
                if step is not None:
                    if torch.equal(here - step, here):
                        return "no step changes the parameters"
                    set_flat(objective.params, here - step)
                    trial = float(objective.graph())
                    gain = (loss - trial) / float(step @ (damping * step + gradient))
                if gain > 0:
                    damping, growth = damping * max(1 / 3, 1 - (2 * gain - 1) ** 3), 2.0
                else:
                    damping, growth = damping * growth, 2 * growth
            here, loss = flat(objective.params), trial
            jacobian, residuals = jacobian_at()
        return "the damping has grown beyond all bounds"


METHODS = (LevenbergMarquardt(),)
