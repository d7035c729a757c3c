"""L-BFGS over a sketch of the curvature: the full-batch solver for problems whose spectrum falls steeply."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao import advice
from cao.curvature import LossFunction, operator_for
from cao.least_squares import LeastSquares
from cao.line_search import HagerZhang, Point
from cao.objective import Iterate, Objective, change_between
from cao.operators import ParameterOperator
from cao.quasi_newton import InverseHessian
from cao.refreshes import (
    eigenpairs,
    first_price,
    has_slowed,
    is_affordable,
    largest_of_all,
    next_rank,
    start_columns,
    within_reach,
)
from cao.reports import Report, report_on_lbfgs
from cao.settings import check_parameters, is_count
from cao.shards import check_whole
from cao.solver_settings import check_solver_settings, check_source, check_state, check_trainable

# A search that fails is followed by one over a new sketch or without the pairs, if there is a sketch to make or a pair
# to forget, by one in very short steps, and by none.
FAILURES_TO_STOP = 3


class Status(NamedTuple):
    """What the optimizer has done since it was made, and why its last step ended."""

    reason: str
    iterations: int
    evaluations: int
    """Calls of the closure."""
    refreshes: int
    products: int
    """Columns multiplied by the curvature."""
    rank: int
    conditioning_removed: float
    """1 + the largest eigenvalue in the sketch over the damping: how much the sketch improves the conditioning."""


class SketchedLBFGS(Optimizer):
    """L-BFGS whose initial matrix is the inverse of a sketch of the curvature.

    It takes the place of `torch.optim.LBFGS`, and is at its best with a source of curvature::

        source = LeastSquares(residuals, model.parameters())
        optimizer = SketchedLBFGS(model.parameters(), source=source)
        for _ in range(100):
            optimizer.step(closure)  # zero_grad, loss, backward, return the loss
        print(optimizer.report())

    The loss must be the same function at every call: full batch, no dropout.

    Args:
        params: parameters, in one group.
        lr: the first step length that each line search tries.
        source: where curvature comes from: `LeastSquares`, `GaussNewton`, any operator that has `params`, or a
            function that returns the loss without a backward pass. Without one this is plain L-BFGS.
        max_iter: iterations per call of `step`.
        max_eval: evaluations per call of `step`, by default max_iter · 1.25; a line search is always finished.
        history_size: how many pairs of steps and gradient changes are kept.
        rank: eigenpairs in the sketch; "auto" keeps those above the smallest damping that was fitted to the pairs.
        refresh: iterations between sketches; "auto" refreshes when the loss falls more slowly than it did on average
            since the last sketch, the cost of that sketch included, and sketches have not taken half of the whole cost.
        tolerance_grad: stop if no entry of the gradient is larger than this.
        tolerance_change: stop if neither the loss nor any parameter has changed by more than this.
        line_search: the search along each direction.
        line_search_fn: "strong_wolfe", as torch.optim.LBFGS takes it, changes nothing: there is always a search.
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
        line_search_fn: Literal["strong_wolfe"] | None = None,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_eval,
            "history_size": history_size,
            "rank": rank,
            "refresh": refresh,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "seed": seed,
        }
        check_solver_settings(defaults)
        check_source(source)
        if line_search_fn not in (None, "strong_wolfe"):
            raise ValueError(f'line_search_fn must be "strong_wolfe" or None, got {line_search_fn!r}')
        if line_search is not None and not callable(line_search):
            raise TypeError(f"line_search must be a search such as HagerZhang(), got {line_search!r}")
        if max_eval is None:
            defaults["max_eval"] = max_iter * 5 // 4
        # A state dict holds numbers of Python only, so that it loads with weights_only=True.
        defaults = {name: int(value) if is_count(value) else value for name, value in defaults.items()}
        self.source, self.line_search = source, line_search or HagerZhang()
        self.process_group: Any = process_group
        self._has_lost_source = False
        super().__init__(params, defaults)
        self.param_groups[0]["progress"] = {
            "reason": "not started",
            "iterations": 0,
            "evaluations": 0,
            "refreshes": 0,
            "products": 0,
            "price": first_price(source, rank, sum(p.numel() for p in self._params)),
            "paid": 0.0,
            "trace": [],
            "last_refresh": 0,
            "least_damping": math.inf,
            "failures": 0,
            "stalled_at": math.nan,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group there can be."""
        if self.param_groups:
            raise ValueError(
                "SketchedLBFGS takes one parameter group, because one direction moves all parameters; make a new one "
                "with all parameters in one list"
            )
        super().add_param_group(param_group)
        if not self._params:
            raise ValueError("SketchedLBFGS needs a parameter that requires a gradient, got none")
        check_parameters(self._params, self._params[0].device)
        check_whole(self._params, "SketchedLBFGS", 'CAO with damping="auto", or DistributedDataParallel')

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take up to `max_iter` iterations and return the loss that they started from."""
        settings, progress = self._settings, self._progress
        self._check_copy()
        check_trainable(settings["params"], progress)
        objective = Objective(torch.enable_grad()(closure), self._params, self.process_group)
        here = objective(objective.position())
        first = objective.loss
        most_evaluations = progress["evaluations"] + settings["max_eval"]
        progress["evaluations"] += 1
        for _ in range(settings["max_iter"]):
            progress["reason"] = self._reason_to_stop(here)
            if progress["reason"]:
                return first
            if self._is_refresh_due(here):
                self._refresh(here)
            there = self._advance(objective, here)
            if there and change_between(here, there) < settings["tolerance_change"]:
                progress["reason"] = "tolerance_change"
                return first
            here = there or here
            if progress["evaluations"] >= most_evaluations:
                progress["reason"] = "max_eval"
                return first
        progress["reason"] = "max_iter"
        return first

    @property
    def status(self) -> Status:
        """What the optimizer has done so far."""
        progress, inverse = self._progress, self._inverse
        has_sketch = len(inverse.values) > 0
        return Status(
            reason=progress["reason"],
            iterations=progress["iterations"],
            evaluations=progress["evaluations"],
            refreshes=progress["refreshes"],
            products=progress["products"],
            rank=len(inverse.values),
            conditioning_removed=1 + float(inverse.values.max()) / inverse.damping if has_sketch else 1.0,
        )

    def report(self) -> Report:
        """Return what the optimizer did, what it cost and what it advises: `print(optimizer.report())`."""
        return report_on_lbfgs(self.status._asdict(), self.source is not None, self._params[0].dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, bit for bit."""
        check_state(state_dict, self._params)
        super().load_state_dict(state_dict)
        # torch has cast every tensor to the parameter's dtype, but some small ones are kept in float64.
        for saved in state_dict["state"].values():
            device = self._params[0].device
            self._state.update({k: v.to(device, copy=True) for k, v in saved.items() if isinstance(v, Tensor)})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy holds: no source, which speaks of this model, and no process group."""
        group = "lost" if isinstance(self.process_group, dist.ProcessGroup) else self.process_group
        own = {"source": None, "line_search": self.line_search, "process_group": group}
        return {**super().__getstate__(), **own, "_has_lost_source": self.source is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, a deep copy or a state dict."""
        for name, value in (("source", None), ("line_search", HagerZhang()), ("process_group", None)):
            self.__dict__.setdefault(name, value)
        self.__dict__.setdefault("_has_lost_source", False)
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SketchedLBFGS":
        """Return a copy in this process, where the process group is what it was."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.process_group = self.process_group
        return other

    def _check_copy(self) -> None:
        """Say what a copy or a pickle has left behind."""
        if self.process_group == "lost" and dist.is_available() and dist.is_initialized():
            raise ValueError("a process group does not travel with a pickle; set optimizer.process_group again")
        if self._has_lost_source and self.source is None:
            self._has_lost_source = False
            advice.warn_once("source", advice.without_source(), [])

    @property
    def _params(self) -> list[Tensor]:
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    @property
    def _settings(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = self.param_groups[0]["progress"]
        return progress

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self._params[0]]
        return state

    @property
    def _inverse(self) -> InverseHessian:
        return InverseHessian(self._state)

    def _reason_to_stop(self, here: Iterate) -> str:
        """Return why no further iteration should be tried, or nothing."""
        progress = self._progress
        if not here.is_finite:
            return "the loss or its gradient is not finite"
        if float(here.gradient.abs().max()) <= self._settings["tolerance_grad"]:
            return "tolerance_grad"
        has_stalled = progress["failures"] == FAILURES_TO_STOP and here.value == progress["stalled_at"]
        return "no step lowers the loss" if has_stalled else ""

    def _advance(self, objective: Objective, here: Iterate) -> Iterate | None:
        """Search along the quasi-Newton direction and return where that led; None if it failed."""
        progress, inverse = self._progress, self._inverse
        if not inverse.is_known:
            inverse.damping = max(1.0, float(here.gradient.abs().sum()))  # As torch's L-BFGS begins.
        direction = -(inverse @ here.gradient)
        visited: dict[float, Iterate] = {}

        def evaluate(step: float) -> Point:
            visited[step] = there = objective(here.position + step * direction)
            return Point(step, there.value, float(there.gradient @ direction))

        origin = Point(0.0, here.value, float(here.gradient @ direction))
        rounding = 10 * torch.finfo(here.gradient.dtype).eps * abs(here.value)
        found = self.line_search(evaluate, origin, self._settings["lr"], rounding) if origin.slope < 0 else None
        progress["evaluations"] += len(visited)
        if found is None:
            objective.move(here.position)
            self._take_failure(here)
            return None
        there = visited[found.step]
        objective.move(there.position)
        inverse.add(there.position - here.position, there.gradient - here.gradient, self._settings["history_size"])
        progress["iterations"] += 1
        progress["failures"] = 0
        progress["least_damping"] = min(progress["least_damping"], inverse.damping)
        return there

    def _take_failure(self, here: Iterate) -> None:
        """Let the next search be another one: over a new sketch or without the pairs, then in very short steps."""
        progress, inverse = self._progress, self._inverse
        progress["failures"] = progress["failures"] + 1 if here.value == progress["stalled_at"] else 1
        progress["stalled_at"] = here.value
        can_change = inverse.has_pairs or self._can_sketch
        inverse.forget_pairs()
        if progress["failures"] == 2 or not can_change:
            self._shorten_steps()

    def _shorten_steps(self) -> None:
        """Let the next search be the last one at this point."""
        inverse = self._inverse
        inverse.damping = 1e3 * max([inverse.damping, *inverse.values.tolist()])
        self._progress["failures"] = max(self._progress["failures"], 2)

    @property
    def _can_sketch(self) -> bool:
        """Whether there is a source, and no sketch has been tried where the parameters are."""
        progress = self._progress
        has_moved = progress["refreshes"] == 0 or progress["iterations"] > progress["last_refresh"]
        return self.source is not None and has_moved

    def _is_refresh_due(self, here: Iterate) -> bool:
        progress, every = self._progress, self._settings["refresh"]
        if progress["failures"] or self.source is None:
            return bool(progress["failures"] == 1 and self._can_sketch)
        trace = [*progress["trace"], [progress["evaluations"], here.value]]
        progress["trace"] = within_reach(trace, progress["price"])
        if every != "auto":
            return bool(progress["iterations"] - progress["last_refresh"] >= every)
        return is_affordable(progress["paid"], progress["evaluations"]) and has_slowed(trace, progress["price"])

    @torch.enable_grad()
    def _refresh(self, here: Iterate) -> None:
        """Sketch the curvature where the parameters are now; a sketch that is not finite is discarded.

        The failed search that asked for it would then repeat itself, so steps are shortened.
        """
        progress, settings, inverse = self._progress, self._settings, self._inverse
        source = self.source.linearize() if isinstance(self.source, LeastSquares) else self.source
        operator = operator_for(source, self._params)  # type: ignore[arg-type]
        rank = settings["rank"]
        if rank == "auto":
            rank = next_rank(operator, inverse.values, progress["least_damping"])
            rank = int(largest_of_all(rank, here.gradient.device, self.process_group))
        start = start_columns(inverse.vectors, here.gradient, rank, settings["seed"] + progress["refreshes"])
        pairs, progress["price"] = eigenpairs(operator, start, self.process_group)
        progress["refreshes"] += 1
        progress["last_refresh"] = progress["iterations"]
        progress["products"] += pairs.products
        progress["paid"] += progress["price"]
        progress["trace"] = [[progress["evaluations"], here.value]]
        progress["least_damping"] = math.inf
        if pairs.is_finite:
            inverse.adopt(pairs.values.abs(), pairs.vectors.T.contiguous())
        elif progress["failures"]:
            self._shorten_steps()
