"""When SketchedLBFGS takes corrected Gauss-Newton steps: where they lower the loss faster, at what they cost."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from cao.curvature.least_squares import LeastSquares
from cao.curvature.linearized import ExplicitLinearized
from cao.quasi_newton.corrected import LocalModel, Place, Trial
from cao.quasi_newton.objective import Iterate, Objective
from cao.sketch.paying import has_slowed, jacobian_price, within_reach

# Prices in evaluations of loss and gradient, measured on networks of 900 to 1,400 parameters with 1,000 to 10,000
# points, by the operations: min(m, n)/120 for the product JᵀJ, k³/17mn for its eigenvectors.
GRAM, EIGENVECTORS = 1 / 120, 1 / 17
# What a decomposition of J itself costs more.
EXACT = 2.5
# An evaluation of the residuals without gradient, and a product of Jᵀ with them.
ATTEMPT = 0.6
# So many attempts are expected of a step before the first is made.
EXPECTED = 15
# A step is not tried before this share of the whole cost pays for it.
SHARE = 0.2
# Steps over which the decrease is compared with that before.
STEPS = 3
# A phase that was slower is tried again when the whole cost has grown by this factor.
PATIENCE = 2.0
# Phases at most.
TRIES = 12
# The first radius, as a share of the parameters' length; the search for the longest step does the rest.
FIRST_RADIUS = 0.1


@dataclass
class Finish:
    """What is known of corrected steps and of the decrease before them: plain numbers, saved with the optimizer."""

    price: float = math.inf
    """What a step is expected to cost, in evaluations."""
    spent: float = 0.0
    """What all of them have cost."""
    is_on: bool = False
    steps: int = 0
    tries: int = 0
    not_before: float = 0.0
    """The whole cost at which the next try may begin."""
    radius: float = math.nan
    is_exact: bool = False
    """Whether J itself is decomposed, since JᵀJ does not resolve the damping any more."""
    rate: float = 0.0
    """The decrease of the loss's logarithm per evaluation before this phase."""
    began: list[float] = field(default_factory=list)
    """The whole cost and the loss where this phase began."""
    trace: list[list[float]] = field(default_factory=list)
    """The same at the last steps of the phase, or since the last one was left."""
    has_changed: bool = False
    """Whether the loss has become another function: then a step is worth a try, as all else was learnt before."""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Finish":
        """Return the one whose fields are the entries of a dict, not copied: what is written is saved there."""
        finish = cls.__new__(cls)
        finish.__dict__ = saved
        return finish

    def note_price(self, operator: object, is_alone: bool) -> None:
        """Learn from a sketch whether steps are possible, in one process and in float64, and what they cost."""
        if isinstance(operator, ExplicitLinearized) and operator.jacobian.dtype == torch.float64 and is_alone:
            self.price = jacobian_price(operator) + self._factoring(*operator.jacobian.shape) + EXPECTED * ATTEMPT
        else:
            self.price = math.inf

    def is_due(self, cost: float, here: Iterate) -> bool:
        """Whether the next step is a corrected one, given the whole cost so far; each iteration must ask."""
        if math.isinf(self.price) or not here.value > 0:
            return self.is_on
        is_new, self.has_changed = self.has_changed, False
        if is_new and self.trace:  # What was before is told as if the function had been the new one.
            factor = here.value / self.trace[-1][1]
            self.trace = [[then, factor * value] for then, value in self.trace]
            self.began = [factor * value if place else value for place, value in enumerate(self.began)]
        if not self.is_on:
            self.trace.append([cost, here.value])
            self.trace = within_reach(self.trace, self.price)
            is_allowed = self.tries < TRIES and cost >= max(self.price / SHARE, self.not_before)
            if is_allowed and (is_new or has_slowed(self.trace, self.price)):
                self.is_on, self.tries = True, self.tries + 1
                before = [point for point in self.trace if cost - point[0] >= self.price / 2] or self.trace[:1]
                self.rate, self.began = rate_between(before[-1], self.trace[-1]), self.trace[-1]
                self.trace = [self.began]
        return self.is_on

    def advance(self, source: LeastSquares, objective: Objective, here: Iterate) -> Iterate | None:
        """Take a corrected step; None if none lowers the loss, and then the parameters are where they were."""
        try:
            found = self._longest(source, objective, here)
            there = objective(found.end.position) if found and found.ratio > 0 else None
        except BaseException:
            objective.move(here.position)
            raise
        if there and there.is_finite and there.value < here.value:
            self.steps += 1
            return there
        objective.move(here.position)
        return None

    def judge(self, cost: float, there: Iterate | None) -> None:
        """Leave the phase if it is slower than what was there before, or if no step lowers the loss."""
        if there is None:
            is_over, self.is_exact = self.is_exact, True
        else:
            self.trace = [*self.trace[-STEPS:], [cost, there.value]]
            is_over = len(self.trace) > 2 and rate_between(self.trace[0], self.trace[-1]) < self.rate
        if is_over:
            has_paid = len(self.trace) > 1 and rate_between(self.began, self.trace[-1]) >= self.rate
            self.not_before = cost if has_paid else PATIENCE * cost
            self.is_on, self.is_exact, self.trace = False, False, []

    def _longest(self, source: LeastSquares, objective: Objective, here: Iterate) -> Trial | None:
        objective.move(here.position)
        with torch.enable_grad():
            operator = source.linearize()
        if not (isinstance(operator, ExplicitLinearized) and operator.jacobian.isfinite().all()):
            return None

        def residuals(position: torch.Tensor) -> torch.Tensor:
            objective.move(position)
            return source.values()

        r = operator.residuals
        model = LocalModel(residuals, Place(here.position, r, float(r @ r)), operator.jacobian, exact=self.is_exact)
        if math.isnan(self.radius):
            self.radius = FIRST_RADIUS * float(here.position.norm()) or 1.0
        found = model.longest(self.radius)
        self.price = jacobian_price(operator) + self._factoring(*operator.jacobian.shape) + ATTEMPT * model.evaluations
        self.spent += self.price
        self.radius = found.radius
        self.is_exact = self.is_exact or found.damping <= 3 * model.factors.floor
        return found

    def _factoring(self, m: int, n: int) -> float:
        k = min(m, n)
        return (EXACT if self.is_exact else 1) * (GRAM * k + EIGENVECTORS * k**3 / (m * n))


def rate_between(before: list[float], now: list[float]) -> float:
    """Return the decrease of the loss's logarithm per evaluation from one point of a trace to another."""
    if not now[1] > 0:
        return math.inf
    return math.log(before[1] / now[1]) / (now[0] - before[0]) if now[0] > before[0] else 0.0
