"""Fits of many parameters, and of losses that are no sum of squares, by SketchedLBFGS."""

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.curvature.hessian import LossFunction
from cao.curvature.least_squares import LeastSquares
from cao.fitting.interior import Interior, InteriorHessian, InteriorLeastSquares
from cao.fitting.problem import Local, Problem
from cao.fitting.progress import Ending, Observer, State, Tolerances
from cao.fitting.variables import Variables
from cao.lbfgs import SketchedLBFGS
from cao.quasi_newton.progress import Reason

ENDINGS = {
    Reason.TOLERANCE_GRAD: Ending.GTOL,
    Reason.ROUNDING: Ending.ROUNDING,
    Reason.NO_DECREASE: Ending.NO_DECREASE,
    Reason.NOT_FINITE: Ending.NOT_FINITE,
    Reason.NOT_ONE_FUNCTION: Ending.NOT_ONE_FUNCTION,
}
Source: TypeAlias = LeastSquares | Callable[[], Tensor]

# One iteration of a quasi-Newton method may be short for many reasons, and ten in a row for one.
PATIENCE = 10


class Visit(NamedTuple):
    """A position of the solver's variables, and the loss and its gradient there."""

    position: Float[Tensor, " n"]
    loss: float
    gradient: Float[Tensor, " n"]


class Sketched:
    """Drives SketchedLBFGS iteration by iteration.

    Each of its steps begins with an evaluation where the last one ended; it is the same, unless a callback may have
    changed the loss, and then it is not computed again.
    """

    name = "sketched-lbfgs"
    local: Local | None = None
    """Nothing is known of the Jacobian at the end."""
    jacobians = 0

    def __init__(
        self,
        source: Source,
        problem: Problem | None,
        variables: Variables,
        tolerances: Tolerances,
        observer: Observer,
    ) -> None:
        self.source, self.problem, self.variables = source, problem, variables
        self.tolerances, self.observer = tolerances, observer
        self.interior = Interior(variables)
        self.evaluations = self.iterations = self.quiet = 0
        self.visits: list[Visit] = []
        self.here: Visit | None = None
        self.first = 0.0
        self.began = perf_counter()
        self.solver = SketchedLBFGS(self.interior.params, source=self._inner_source(), max_iter=1, max_eval=100)

    def run(self) -> Ending:
        """Fit, leave the parameters at the best position, and say why it ended."""
        gradients = [p.grad for p in self.variables.params]
        try:
            while True:
                ending = self._advance()
                if ending:
                    return ending
        finally:
            self.interior.enter()
            for p, gradient in zip(self.variables.params, gradients, strict=True):
                p.grad = gradient

    def _inner_source(self) -> LeastSquares | InteriorHessian | LossFunction:
        if not self.interior.has_bounds:
            return self.source
        if isinstance(self.source, LeastSquares):
            return InteriorLeastSquares(self.source, self.interior)
        return InteriorHessian(self.source, self.interior)

    def _advance(self) -> Ending | None:
        """Take one iteration, and say whether it is the last one."""
        before = self.here
        self.visits = [before] if before and not self.observer.callback else []
        self.solver.step(self._closure)
        there = self._where_it_is()
        self.here = there
        status, start = self.solver.status, before or self.visits[0]
        self.first = self.first or float(start.gradient.abs().max())
        if status.reason is not Reason.MAX_ITER and status.reason is not Reason.MAX_EVAL:
            return ENDINGS[status.reason]
        has_moved = not torch.equal(there.position, start.position)
        if has_moved:
            self.iterations += 1
            if self._is_stopped(start, there, status.refreshes):
                return Ending.STOPPED
        if self.evaluations >= self.tolerances.evaluations:
            return Ending.MAX_EVALUATIONS
        return self._ending_between(start, there) if has_moved else None

    def _is_stopped(self, start: Visit, there: Visit, refreshes: int) -> bool:
        self.interior.enter()
        state = State(
            iteration=self.iterations,
            evaluations=self.evaluations,
            jacobians=0,
            loss=there.loss,
            gradient_norm=float(start.gradient.abs().max()),
            step=float((there.position - start.position).norm()),
            seconds=perf_counter() - self.began,
            refreshes=refreshes,
        )
        return self.observer.is_stopped_by(state)

    def _ending_between(self, start: Visit, there: Visit) -> Ending | None:
        """Whether the gradient is small, or loss or parameters have stood still for a while."""
        if float(there.gradient.abs().max()) <= self.tolerances.gtol * self.first:
            return Ending.GTOL
        stands = start.loss - there.loss <= self.tolerances.ftol * abs(start.loss)
        step = float((there.position - start.position).norm())
        rests = step <= self.tolerances.xtol * float(there.position.norm())
        self.quiet = self.quiet + 1 if (stands and self.tolerances.ftol) or rests else 0
        if self.quiet < PATIENCE:
            return None
        return Ending.FTOL if stands else Ending.XTOL

    @torch.enable_grad()
    def _closure(self) -> Tensor:
        """Return the loss where the variables are, and leave its gradient in them."""
        position = self._position()
        known = self.visits[0] if len(self.visits) == 1 and not self.observer.callback else None
        if known is None or known is not self.here or not torch.equal(known.position, position):
            known = self._evaluated(position)
        self.visits.append(known)
        sizes = [u.numel() for u in self.interior.params]
        for u, part in zip(self.interior.params, known.gradient.split(sizes), strict=True):
            u.grad = part.view(u.shape).to(u, copy=True)
        return known.gradient.new_tensor(known.loss)

    def _evaluated(self, position: Float[Tensor, " n"]) -> Visit:
        self.interior.enter()
        self.evaluations += 1
        if isinstance(self.source, LeastSquares):
            residuals = self.source.residuals()
            assert self.problem is not None
            self.problem.check_count(len(residuals))
            loss = residuals.square().sum()
        else:
            loss = self.source()
        parts = torch.autograd.grad(loss, self.variables.params, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([(part * s).reshape(-1) for part, s in zip(parts, self.interior.slopes(), strict=True)])
        return Visit(position, float(loss.detach()), gradient)

    def _position(self) -> Float[Tensor, " n"]:
        return torch.cat([u.detach().reshape(-1) for u in self.interior.params])

    def _where_it_is(self) -> Visit:
        position = self._position()
        return next(visit for visit in reversed(self.visits) if torch.equal(visit.position, position))

    @property
    def loss(self) -> float:
        """The loss where it ended."""
        return math.nan if self.here is None else self.here.loss

    @property
    def gradient_norm(self) -> float:
        """The largest entry of the gradient where it ended."""
        return math.nan if self.here is None else float(self.here.gradient.abs().max())
