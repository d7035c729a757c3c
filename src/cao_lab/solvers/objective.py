"""A problem's loss with a meter on it: whoever minimises it is billed, and its best point is kept."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.clock import Clock, computing_seconds
from cao_lab.solvers.price import Price
from cao_lab.tasks.pde.problem import Problem

NO_PRICE = Price()
HOPELESS = 50
"""Evaluations in a row without a finite loss after which a method has lost its way."""
BOTTOMLESS = 1e12
"""A loss below minus this, times the first loss if that is larger than one, is taken to have no lower bound."""


class BudgetSpent(Exception):  # noqa: N818  # not an error
    """The budget is spent; it ends a method from within."""


class Lost(Exception):  # noqa: N818
    """The loss is not finite and does not become so again, or it has no lower bound."""


class Objective:
    """A metered loss, in the three forms that methods ask for: a closure, a graph, and a function of a flat vector."""

    def __init__(
        self,
        problem: Problem,
        budget: Budget,
        *,
        price: Price = NO_PRICE,
        records: int = 200,
        on_record: Callable[[Record], None] = lambda record: None,
        on_evaluation: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.problem, self.budget, self.price = problem, budget, price
        self.params = [p for p in problem.params if p.requires_grad]
        self.evaluations = self.products = self.setups = 0
        self.others = 0.0
        self.best_loss = math.inf
        self.best_point = point_of(self.params)
        self._records, self._on_record, self._next_record = records, on_record, 0.0
        self._on_evaluation, self._clock = on_evaluation, clock or computing_seconds
        self._not_finite = 0
        self._least_plausible = -math.inf
        self._dtype = torch.get_default_dtype()
        self._paused = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float:
        """Time since the first evaluation began, without pauses; optimizers import a lot before that."""
        return 0.0 if self._started is None else self._clock() - self._started - self._paused

    @property
    def billed(self) -> float:
        """Evaluations, plus products and setups at their price, and what the method says else it has cost."""
        return self.evaluations + self.others + self.price.product * self.products + self.price.setup * self.setups

    @property
    def spent(self) -> float:
        """The share of the budget that is spent."""
        return self.budget.spent(self.billed, self.seconds)

    def graph(self) -> Float[Tensor, ""]:
        """Return the loss with its graph, for a method that differentiates it by itself."""
        self._check_budget()
        with default_dtype(self._dtype), torch.enable_grad():
            loss = self.problem.loss()
        self._book(float(loss.detach()))
        return loss

    def closure(self) -> Float[Tensor, ""]:
        """Return the loss and leave its gradient in the parameters, as the closure of a torch optimizer does."""
        self._check_budget()
        with default_dtype(self._dtype), torch.enable_grad():
            loss = self.problem.loss()
            gradient = torch.autograd.grad(loss, self.params, materialize_grads=True)
        for parameter, part in zip(self.params, gradient, strict=True):
            parameter.grad = part
        self._book(float(loss.detach()))
        return loss.detach()

    def at(self, point: Float64[np.ndarray, " n"]) -> tuple[float, Float64[np.ndarray, " n"]]:
        """Return the loss and its gradient at a flat point, as scipy wants them."""
        set_flat(self.params, torch.from_numpy(point))
        loss = self.closure()
        gradient = torch.cat([p.grad.reshape(-1) for p in self.params if p.grad is not None])
        return float(loss), gradient.double().cpu().numpy()

    def bill(self, products: int, setups: int = 0, others: float = 0.0) -> None:
        """Add to the bill, the others in evaluations; to be called as soon as they are made."""
        self.others += others
        self.products += products
        self.setups += setups
        self._check_budget()

    def record(self, status: str) -> Record:
        """Return where the run stands; what this costs is not billed."""
        seconds = self.seconds
        with self._pause():
            error = self._best_error()
        return Record(
            self.evaluations,
            self.products,
            self.setups,
            self.billed,
            seconds,
            self.best_loss,
            error,
            self.price.product,
            self.price.setup,
            status,
            *self._last_comparison(),
        )

    def _last_comparison(self) -> tuple[int, float]:
        seen = self.problem.points.comparisons if self.problem.points else []
        return (seen[-1].points, seen[-1].held_out) if seen else (0, math.nan)

    def resampled(self) -> None:
        """Forget the best point, because the loss is of other points now."""
        self.best_loss = math.inf

    def take_best(self) -> None:
        """Put the best point into the parameters."""
        set_point(self.params, self.best_point)

    def _check_budget(self) -> None:
        self._on_evaluation()
        if self._started is None:
            self._started = self._clock()
        # The first evaluation is always made: without it there would be no loss to show.
        if self.spent >= 1 and self.billed > 0:
            raise BudgetSpent

    def _book(self, loss: float) -> None:
        self.evaluations += 1
        self._not_finite = 0 if math.isfinite(loss) else self._not_finite + 1
        if self._not_finite >= HOPELESS:
            raise Lost(f"no finite loss in {HOPELESS} evaluations")
        if math.isfinite(loss) and loss < self.best_loss:
            self.best_loss = loss
            self.best_point = point_of(self.params)
        self._check_bottom(loss)
        if self.spent >= self._next_record:
            self._next_record = self.spent + 1 / self._records
            record = self.record("running")
            with self._pause():
                self._on_record(record)

    def _check_bottom(self, loss: float) -> None:
        if self.evaluations == 1:
            self._least_plausible = -BOTTOMLESS * max(1.0, abs(loss))
        if loss < self._least_plausible:
            raise Lost(
                f"the loss is unbounded below, it has reached {loss:.1e}; if it is a residual, return (residual,)"
            )

    def _best_error(self) -> float:
        if self.problem.error is None:
            return math.nan
        # The data is exchanged, not overwritten: graphs that the method still holds stay valid.
        current = [p.data for p in self.params]
        try:
            for parameter, best in zip(self.params, self.best_point, strict=True):
                parameter.data = best
            return self.problem.error()
        finally:
            for parameter, data in zip(self.params, current, strict=True):
                parameter.data = data

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Stop the clock, and give the problem back the default precision it was made under."""
        since = self._clock()
        try:
            with default_dtype(self._dtype):
                yield
        finally:
            self._paused += self._clock() - since


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have a type for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def point_of(params: list[Tensor]) -> list[Tensor]:
    """Return a copy of the parameters' values."""
    return [p.detach().clone() for p in params]


@torch.no_grad()
def set_point(params: list[Tensor], point: list[Tensor]) -> None:
    """Copy values into the parameters."""
    for parameter, value in zip(params, point, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def set_flat(params: list[Tensor], point: Float[Tensor, " n"]) -> None:
    """Copy a flat vector into the parameters."""
    pieces = point.split([p.numel() for p in params])
    set_point(params, [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)])


def flat(params: list[Tensor]) -> Float[Tensor, " n"]:
    """Return the parameters' values as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in params])
