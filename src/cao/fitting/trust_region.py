"""Levenberg–Marquardt in a trust region, within bounds, for a few parameters."""

import math
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from cao.fitting.box import Box
from cao.fitting.problem import Local, Problem
from cao.fitting.progress import Ending, Observer, State, Tolerances
from cao.fitting.steps import Steps

# The first radius in lengths of the scaled parameters, what is accepted, and what is trusted.
FIRST_RADIUS = 1.0
ACCEPTED = 1e-4
POOR, GOOD = 0.25, 0.75


class TrustRegion:
    """Moré's form of Levenberg–Marquardt (1978), whose step is exact within the bounds, too.

    Parameters are measured in units that make the largest length so far of each column of the Jacobian one. The step
    minimises the linearized sum of squares within the trust region and the box at once, so that it knows which bounds
    hold, and the end is that of Gauss–Newton.
    """

    name = "trust-region"

    def __init__(self, problem: Problem, tolerances: Tolerances, observer: Observer) -> None:
        self.problem, self.variables = problem, problem.variables
        self.tolerances, self.observer = tolerances, observer
        self.evaluations = self.jacobians = self.iterations = 0
        self.began = perf_counter()
        self.radius, self.damping, self.first = math.inf, 0.0, 0.0
        self.position = self.variables.position()
        self.longest = torch.zeros_like(self.position)
        self.local: Local | None = None

    def run(self) -> Ending:
        """Fit, leave the parameters at the best position, and say why it ended."""
        ending: Ending | None = None
        try:
            while True:
                local = self.local or self._linearize()
                ending = ending or self._ending_at(local)
                if ending:
                    return ending
                ending = self._advance(local)
        finally:
            self.variables.move(self.position)

    @property
    def loss(self) -> float:
        """The loss where the fit stands."""
        return math.nan if self.local is None else self.local.loss

    @property
    def gradient_norm(self) -> float:
        """The largest entry of the gradient there, without those that a bound holds."""
        return math.nan if self.local is None else float(self.slope(self.local).abs().max())

    def slope(self, local: Local) -> Float[Tensor, " n"]:
        """Return the gradient, without entries that a bound holds."""
        gradient = local.gradient
        return torch.where(self.variables.box.held(self.position, gradient), 0.0, gradient)

    def _linearize(self) -> Local:
        """Return residuals and Jacobian where the fit stands, and let the units of the parameters grow with it."""
        local = self.local = self.problem.linearize()
        self.jacobians += 1
        self.evaluations += self.jacobians == 1
        columns = local.jacobian.norm(dim=0).double().cpu()
        if math.isfinite(local.loss) and bool(columns.isfinite().all()):
            self.longest = torch.maximum(self.longest, columns)
        return local

    @property
    def _units(self) -> Float[Tensor, " n"]:
        """What each parameter is multiplied with; one that nothing depends on stays where it is in any unit."""
        return torch.where(self.longest > 0, self.longest, 1.0)

    @property
    def _precision(self) -> float:
        """The rounding of a loss, as a share of it."""
        return 10 * float(torch.finfo(self.variables.flat.dtype).eps)

    @property
    def _size(self) -> float:
        return float((self.longest * self.position).norm())

    def _ending_at(self, local: Local) -> Ending | None:
        """Whether the fit ends here: by the largest cosine between the residuals and a column, as in MINPACK."""
        slope = self.slope(local)
        if not (math.isfinite(local.loss) and bool(slope.isfinite().all())):
            return Ending.NOT_FINITE
        lengths = 2 * local.jacobian.norm(dim=0).double().cpu() * float(local.residuals.norm())
        cosines = torch.where(slope == 0, 0.0, slope.abs() / lengths)
        if float(cosines.max()) <= self.tolerances.gtol:
            return Ending.GTOL
        self.first = self.first or local.loss
        if local.loss <= self._precision**2 * self.first:
            return Ending.ROUNDING
        return Ending.MAX_EVALUATIONS if self.evaluations >= self.tolerances.evaluations else None

    def _advance(self, local: Local) -> Ending | None:
        """Try steps until one lowers the loss; return why there should be no other, if there is a reason."""
        units, origin, slope = self._units, self.position, self.gradient_norm
        steps = steps_from(local, units, origin, self.variables.box)
        if steps.hope <= self._precision * local.loss:
            return Ending.ROUNDING
        if math.isinf(self.radius):
            self.radius = FIRST_RADIUS * (self._size or 1.0)
        while True:
            q, self.damping = steps.within(self.radius, self.damping)
            position = self.variables.move(origin + q / units)
            loss = self.problem.loss()
            self.evaluations += 1
            predicted, actual = steps.decrease(q), local.loss - loss
            ratio = actual / predicted if math.isfinite(loss) and predicted > 0 else -math.inf
            length = float(q.norm())
            self._resize(ratio, length)
            ending = self._ending_after(steps, local.loss, actual, length)
            if ratio > ACCEPTED:
                self.position, self.local = position, None
                self.iterations += 1
                ending = self._shown(slope, loss, float((position - origin).norm())) or ending
            else:
                self.variables.move(origin)
            if ending or ratio > ACCEPTED:
                return ending
            if self.evaluations >= self.tolerances.evaluations:
                return Ending.MAX_EVALUATIONS

    def _shown(self, slope: float, loss: float, step: float) -> Ending | None:
        state = State(
            iteration=self.iterations,
            evaluations=self.evaluations,
            jacobians=self.jacobians,
            loss=loss,
            gradient_norm=slope,
            step=step,
            seconds=perf_counter() - self.began,
        )
        return Ending.STOPPED if self.observer.is_stopped_by(state) else None

    def _resize(self, ratio: float, length: float) -> None:
        """Change the radius by how well the loss was predicted."""
        if ratio <= POOR:
            self.radius = min(length, self.radius) / 4
            self.damping *= 4
        elif ratio >= GOOD and self.damping > 0:
            self.radius *= 2
            self.damping /= 2

    def _ending_after(self, steps: Steps, loss: float, actual: float, length: float) -> Ending | None:
        """Whether nothing is left to do after a trial: a small decrease alone may be due to a small radius."""
        least = max(self.tolerances.ftol, self._precision) * loss
        if actual <= least and steps.hope <= least:
            return Ending.FTOL
        if self.damping == 0 and length <= max(self.tolerances.xtol, self._precision) * self._size:
            return Ending.XTOL
        if actual <= 0 and self.radius <= self._precision * self._size:
            return Ending.NO_DECREASE if steps.hope > math.sqrt(self._precision) * loss else Ending.ROUNDING
        return None


def steps_from(local: Local, units: Float[Tensor, " n"], origin: Float[Tensor, " n"], box: Box) -> Steps:
    """Return the steps around a position, in the parameters' units, by the R of J = QR alone."""
    basis, triangle = torch.linalg.qr(local.jacobian)
    constant = (basis.T @ local.residuals).double().cpu()
    around = Box(units * (box.low - origin), units * (box.high - origin))
    return Steps(triangle.double().cpu() / units, constant, around)
