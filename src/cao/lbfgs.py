"""L-BFGS in the metric of a sketch: the full-batch solver for problems whose spectrum falls steeply."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from cao.combinations import MeanOverRanks
from cao.curvature import LossFunction, ParameterOperator, unflatten
from cao.linalg import random_columns, subspace_iteration
from cao.line_search import HagerZhang, Point
from cao.quasi_newton import Pairs, SketchedInverse, fitted_damping
from cao.sources import operator_for

RANK, REFRESH, SCALING_PAIRS, FIRST = 60, 100, 5, 20


class Status(NamedTuple):
    """What the optimizer has done since it was made, and why its last step ended."""

    reason: str
    iterations: int
    evaluations: int
    refreshes: int
    products: int
    rank: int
    conditioning_removed: float


class Iterate(NamedTuple):
    """A position, and the loss and its gradient there."""

    position: Float[Tensor, " n"]
    value: float
    gradient: Float[Tensor, " n"]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every entry of the gradient are finite."""
        return math.isfinite(self.value) and bool(self.gradient.sum().isfinite())


class SketchedLBFGS(Optimizer):
    """L-BFGS whose initial matrix is the inverse of a sketch of the curvature.

    It replaces `torch.optim.LBFGS` by a change of one word, and is at its best with a source of curvature::

        source = LeastSquares(residuals, model.parameters())
        optimizer = SketchedLBFGS(model.parameters(), source=source)
        for _ in range(100):
            optimizer.step(closure)  # zero_grad, loss, backward, return the loss
        print(optimizer.status)

    The loss must be the same function at every call: full batch, no dropout.

    Args:
        params: parameters, in one group.
        lr: first step that each line search tries.
        source: where curvature comes from: `LeastSquares`, `GaussNewton`, any operator that carries its `params`, or a
            function that returns the loss without a backward pass. Without one this is plain L-BFGS.
        max_iter: iterations per call of `step`.
        max_eval: evaluations per call of `step`, by default max_iter · 1.25.
        history_size: pairs of steps and gradient changes that are kept.
        rank: eigenpairs in the sketch.
        refresh: iterations between sketches.
        tolerance_grad: stop if no entry of the gradient is larger.
        tolerance_change: stop if neither the loss nor a parameter has changed by more.
        line_search: the search along each direction.
        seed: seed of the first sketch's random start; no global random stream is used.
        process_group: group over which losses, gradients and curvature are averaged when torch.distributed is
            initialised.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        *,
        source: LossFunction | ParameterOperator | None = None,
        max_iter: int = 20,
        max_eval: int | None = None,
        history_size: int = 100,
        rank: int | Literal["auto"] = "auto",
        refresh: int | Literal["auto"] = "auto",
        tolerance_grad: float = 0.0,
        tolerance_change: float = 0.0,
        line_search: HagerZhang | None = None,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
            "history_size": history_size,
            "rank": rank,
            "refresh": refresh,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "seed": seed,
        }
        check_settings(defaults)
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(f"SketchedLBFGS takes one parameter group, got {len(self.param_groups)}")
        self.source, self.line_search, self.process_group = source, line_search or HagerZhang(), process_group
        self._params = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        self.param_groups[0]["progress"] = {
            "reason": "not started",
            "iterations": 0,
            "evaluations": 0,
            "refreshes": 0,
            "products": 0,
            "age": 0,
            "damping": 0.0,
            "failures": 0,
            "stalled_at": math.nan,
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take up to `max_iter` iterations and return the loss that they started from."""
        settings, progress = self.param_groups[0], self._progress
        objective = Objective(torch.enable_grad()(closure), self._params, self.process_group)
        here = objective(objective.position())
        first, progress["reason"] = objective.loss, "max_iter"
        for _ in range(settings["max_iter"]):
            budget = settings["max_eval"] - objective.evaluations
            if reason := self._reason_to_stop(here, budget):
                progress["reason"] = reason
                break
            if self._is_refresh_due():
                self._refresh()
            there = self._advance(objective, here, budget)
            progress["failures"] = 0 if there else progress["failures"] + 1
            progress["stalled_at"] = here.value
            if there:
                progress["iterations"] += 1
                progress["age"] += 1
                has_moved = change_between(here, there) > settings["tolerance_change"]
                here = there
                if not has_moved:
                    progress["reason"] = "tolerance_change"
                    break
        progress["evaluations"] += objective.evaluations
        return first

    @property
    def status(self) -> Status:
        """What the optimizer has done so far."""
        progress, (values, _) = self._progress, self._sketch
        return Status(
            *(progress[name] for name in Status._fields[:5]),
            rank=len(values),
            conditioning_removed=float(1 + values.max() / progress["damping"]) if len(values) else 1.0,
        )

    @property
    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = self.param_groups[0]["progress"]
        return progress

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self._params[0]]
        return state

    @property
    def _sketch(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues and, as rows, the eigenvectors in use."""
        state, like = self._state, self._params[0]
        if "values" not in state:
            return like.new_zeros(0), like.new_zeros(0, sum(p.numel() for p in self._params))
        return state["values"], state["vectors"]

    def _reason_to_stop(self, here: Iterate, budget: int) -> str:
        """Return why no further iteration should be tried, or nothing."""
        progress = self._progress
        if not here.is_finite:
            return "the loss or its gradient is not finite"
        if float(here.gradient.abs().max()) <= self.param_groups[0]["tolerance_grad"]:
            return "tolerance_grad"
        if progress["failures"] > 2 and here.value == progress["stalled_at"]:
            return "no step lowers the loss"
        return "max_eval" if budget <= 0 else ""

    def _advance(self, objective: "Objective", here: Iterate, budget: int) -> Iterate | None:
        """Search along the quasi-Newton direction and remember the pair; without success forget all pairs."""
        direction = self._direction(here.gradient)
        slope, lr = float(here.gradient @ direction), self.param_groups[0]["lr"]
        visited: dict[float, Iterate] = {}

        def evaluate(step: float) -> Point:
            visited[step] = there = objective(here.position + step * direction)
            return Point(step, there.value, float(there.gradient @ direction))

        found = None
        if slope < 0:
            rounding = 10 * torch.finfo(here.gradient.dtype).eps * abs(here.value)
            found = self.line_search(evaluate, Point(0.0, here.value, slope), lr, rounding, budget)
        if found is None:
            self._pairs.clear()
            objective.move(here.position)
            return None
        there = visited[found.step]
        objective.move(there.position)
        step, change = there.position - here.position, there.gradient - here.gradient
        if float(step @ change) > torch.finfo(step.dtype).eps * float(step.norm() * change.norm()):
            self._pairs.add(step, change, self.param_groups[0]["history_size"])
        return there

    @property
    def _pairs(self) -> Pairs:
        return Pairs(self._state)

    def _direction(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        progress, values, vectors = self._progress, *self._sketch
        if len(self._pairs):
            progress["damping"] = fitted_damping(values, vectors, *self._pairs.newest(SCALING_PAIRS))
        elif not progress["damping"]:
            progress["damping"] = max(1.0, float(gradient.abs().sum()))  # As torch's L-BFGS begins.
        initial = SketchedInverse(values, vectors, progress["damping"])
        return self._pairs.inverse_hessian_product(gradient, initial).neg_()

    def _is_refresh_due(self) -> bool:
        if self.source is None:
            return False
        progress, every = self._progress, self.param_groups[0]["refresh"]
        every = REFRESH if every == "auto" else every
        return progress["age"] >= (every if progress["refreshes"] else FIRST)

    @torch.enable_grad()
    def _refresh(self) -> None:
        """Find the curvature's largest eigenpairs where the parameters are now."""
        progress, state, settings = self._progress, self._state, self.param_groups[0]
        assert self.source is not None
        operator = linearized(operator_for(self.source, self._params))
        if dist.is_available() and dist.is_initialized():
            operator = MeanOverRanks(operator, self.process_group)
        rank = RANK if settings["rank"] == "auto" else settings["rank"]
        size = sum(p.numel() for p in self._params)
        if "vectors" in state:
            start = state["vectors"].T
        else:
            generator = torch.Generator(self._params[0].device).manual_seed(settings["seed"])
            start = random_columns(size, min(rank, size), generator, self._params[0].dtype)
        pairs = subspace_iteration(operator, start, 2)
        self._pairs.clear()
        progress["age"] = 0
        progress["refreshes"] += 1
        progress["products"] += pairs.products
        if pairs.is_finite:
            state["values"], state["vectors"] = pairs.values.abs(), pairs.vectors.T


class Objective:
    """A closure as a function of the flat position, which counts its calls."""

    def __init__(
        self, closure: Callable[[], Any], params: Sequence[Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        self.closure, self.params, self.group = closure, params, group
        self.loss: Any = None
        self.evaluations = 0

    def __call__(self, position: Float[Tensor, " n"]) -> Iterate:
        """Move the parameters there and return the loss and the gradient."""
        self.move(position)
        self.loss = self.closure()
        self.evaluations += 1
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self.params]
        numbers = torch.cat(
            [*(piece.reshape(-1) for piece in pieces), torch.as_tensor(self.loss).reshape(1).to(pieces[0])]
        )
        return Iterate(position, float(self.loss), numbers[:-1])

    def move(self, position: Float[Tensor, " n"]) -> None:
        """Put the parameters at a position."""
        for param, piece in zip(self.params, unflatten(position, self.params), strict=True):
            param.copy_(piece)

    def position(self) -> Float[Tensor, " n"]:
        """Return where the parameters are."""
        return torch.cat([p.reshape(-1) for p in self.params])


def change_between(here: Iterate, there: Iterate) -> float:
    """Return the larger of the changes of the loss and of any parameter."""
    return max(abs(there.value - here.value), float((there.position - here.position).abs().max()))


def linearized(operator: ParameterOperator) -> ParameterOperator:
    """Return the operator fixed at the present parameters, if it knows how to."""
    fix = getattr(operator, "linearize", None)
    return operator if fix is None else fix()


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work."""
    for name in ("lr",):
        if not settings[name] > 0:
            raise ValueError(f"{name} must be positive, got {settings[name]}")
    for name in ("tolerance_grad", "tolerance_change"):
        if not settings[name] >= 0:
            raise ValueError(f"{name} must not be negative, got {settings[name]}")
    for name in ("max_iter", "max_eval", "history_size", "rank", "refresh"):
        value = settings[name]
        if value != "auto" and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
