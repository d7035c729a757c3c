"""What a method is billed on a problem, and the lowest loss it has reached by then."""

from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cao_lab.fits.problems import Array, FitProblem
from cao_lab.fits.rules import BUDGET, GRADIENT, SECONDS


class Spent(BaseException):
    """The budget is spent; no error, so that no method takes it for one of the residuals."""


class Meter:
    """The residuals of a problem, with a bill; what is asked for twice in a row at one position is free."""

    def __init__(self, problem: FitProblem, *, by_gradients: bool = False) -> None:
        self.problem = problem
        self.size = len(problem.start)
        self.price = GRADIENT if by_gradients else self.size
        self.most = BUDGET * (self.size + 1)
        self.bill, self.lowest, self.best = 0, np.inf, problem.start
        self.trace: list[tuple[int, float]] = []
        """Where the lowest loss was lowered: the bill, and the loss."""
        self.began = process_time()
        self._values: tuple[Array, Array] | None = None
        self._slopes: tuple[Array, Array] | None = None

    def residuals(self, x: Array) -> Array:
        """Return the residuals."""
        if self._values is None or not np.array_equal(self._values[0], x):
            self._charge(1)
            with np.errstate(all="ignore"):
                values = self.problem.residuals(np.array(x))
                loss = float(values @ values)
            self._values = (np.array(x), values)
            if loss < self.lowest:
                self.lowest, self.best = loss, np.array(x)
                self.trace.append((self.bill, loss))
        return self._values[1]

    def jacobian(self, x: Array) -> Array:
        """Return their Jacobian."""
        if self._slopes is None or not np.array_equal(self._slopes[0], x):
            self._charge(self.price)
            with np.errstate(all="ignore"):
                self._slopes = (np.array(x), self.problem.jacobian(np.array(x)))
        return self._slopes[1]

    def tensor(self, x: Tensor) -> Tensor:
        """Return the residuals as torch differentiates them."""
        result: Tensor = Differentiable.apply(x, self)  # type: ignore[no-untyped-call]
        return result

    def _charge(self, price: int) -> None:
        if self.bill + price > self.most or process_time() - self.began > SECONDS:
            raise Spent
        self.bill += price


class Differentiable(torch.autograd.Function):
    """Residuals whose derivative is the meter's Jacobian."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter) -> Tensor:
        """Return the residuals."""
        ctx.x, ctx.meter = x.detach().numpy().copy(), meter
        return torch.from_numpy(meter.residuals(ctx.x).copy())

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor, None]:
        """Return Jᵀ times weights, which can be differentiated once more."""
        return weights[0] @ torch.from_numpy(ctx.meter.jacobian(ctx.x)), None


Run = Callable[[Meter], object]
