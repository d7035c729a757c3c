"""L-BFGS over a sketch of the curvature: the full-batch solver for problems whose spectrum falls steeply."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao import advice
from cao.checks import check_parameters, is_count
from cao.curvature.hessian import LossFunction, operator_for
from cao.curvature.least_squares import LeastSquares
from cao.curvature.linearized import Linearized
from cao.curvature.operators import ParameterOperator
from cao.finishing import Finish
from cao.linalg.flat import check_whole
from cao.quasi_newton.agreement import check_scale, is_same, loss_of
from cao.quasi_newton.dense import Dense
from cao.quasi_newton.line_search import HagerZhang, Point
from cao.quasi_newton.memory import Memory, is_dense_affordable
from cao.quasi_newton.objective import Iterate, Objective, change_between
from cao.quasi_newton.pairs import ON_CPU, Pairs
from cao.quasi_newton.progress import Progress, Reason, Status
from cao.quasi_newton.stopping import PATIENCE, begin, differ, reason_to_stop, stuck_at, watch
from cao.report import Report, report_on_lbfgs
from cao.sketch.paying import (
    eigenpairs,
    first_price,
    has_settled,
    has_slowed,
    is_affordable,
    largest_of_all,
    next_rank,
    settling_window,
    start_columns,
    within_reach,
)
from cao.solver_settings import check_solver_settings, check_source, check_state, check_trainable
from cao.state import hooked_load


class SketchedLBFGS(Optimizer):
    """L-BFGS whose initial matrix is the inverse of a sketch of the curvature.

    It takes the place of `torch.optim.LBFGS`, and is at its best with a source of curvature::

        source = LeastSquares(residuals, model.parameters())
        optimizer = SketchedLBFGS(model.parameters(), source=source)
        for _ in range(100):
            optimizer.step(closure)  # zero_grad, loss, backward, return the loss
        print(optimizer.report())

    The loss must be the same function at every call: full batch, no dropout. The source must be about this loss, and
    about no multiple of it, which is refused at the first sketch. Without tolerances a step ends early only where
    nothing but rounding is left: the loss has reached no new low for twenty iterations, ten of them over a new sketch,
    and its gradient stays within one range. If the closure raises, the parameters are put back to the last point that
    was accepted.

    Args:
        params: parameters, in one group.
        lr: the first step length that each line search tries.
        source: where curvature comes from: `LeastSquares`, `GaussNewton`, any operator that has `params`, or a
            function that returns the loss without a backward pass. Without one this is plain L-BFGS.
        max_iter: iterations per call of `step`.
        max_eval: evaluations per call of `step`, by default max_iter · 1.25; a line search is always finished.
        memory: what is kept of steps and gradient changes. "pairs" keeps the last ones, over the sketch; "dense" a
            self-scaled matrix of P² numbers for P parameters, over the first sketch, which is not renewed unless a
            search fails; "auto" begins with pairs and makes the matrix of sketch and pairs when further sketches have
            stopped to pay, where there is a source and P² is affordable.
        history_size: how many pairs are kept.
        rank: eigenpairs in the sketch; "auto" keeps those above the smallest damping that was fitted to the pairs.
        refresh: iterations between sketches, the first at the start; "auto" refreshes when the loss falls more slowly
            than it did on average since the last sketch, the cost of that sketch included, and sketches have not taken
            half of the whole cost.
        finish: "auto" takes Gauss-Newton steps, long ones that are corrected before they are judged, where they lower
            the loss faster at what they cost: near the end, with a `LeastSquares` that forms its Jacobian, in float64
            and one process. None never does.
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
        memory: Literal["auto", "pairs", "dense"] = "auto",
        history_size: int = 100,
        rank: int | Literal["auto"] = "auto",
        refresh: int | Literal["auto"] = "auto",
        finish: Literal["auto"] | None = "auto",
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
            "memory": memory,
            "history_size": history_size,
            "rank": rank,
            "refresh": refresh,
            "finish": finish,
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
        self._left_at: Iterate | None = None
        super().__init__(params, defaults)
        price = first_price(source, rank, self._size)
        self.param_groups[0]["progress"] = vars(Progress(price, finish=vars(Finish())))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group there can be."""
        if self.param_groups:
            raise ValueError(
                "SketchedLBFGS takes one parameter group, because one direction moves all parameters; make a new one "
                "with all parameters in one list"
            )
        super().add_param_group(param_group)
        if not sum(p.numel() for p in self._params):
            raise ValueError("SketchedLBFGS needs a parameter that requires a gradient, got none")
        check_parameters(self._params, self._params[0].device)
        check_whole(self._params, "SketchedLBFGS", 'CAO with damping="auto", or DistributedDataParallel')

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take up to `max_iter` iterations and return the loss that they started from."""
        settings, progress = self.param_groups[0], self._progress
        self._check_copy()
        check_trainable(settings["params"], progress)
        objective = Objective(torch.enable_grad()(closure), self._params, self.process_group)
        here = self._start(objective)
        first = objective.loss
        most_evaluations = progress.evaluations - 1 + settings["max_eval"]
        may_correct = settings["finish"] == "auto" and isinstance(self.source, LeastSquares)
        reason: Reason | None = Reason.MAX_ITER
        for _ in range(settings["max_iter"]):
            reason = reason_to_stop(progress, here, settings["tolerance_grad"])
            if reason:
                break
            if may_correct and self._finish.is_due(self._cost, here):
                there = self._correct(objective, here)
            else:
                if self._is_dense_due(here):
                    Dense.of(self._state, self._pairs)
                elif self._is_refresh_due(here):
                    self._refresh(objective, here)
                there = self._advance(objective, here)
            if there and settings["tolerance_change"] and change_between(here, there) < settings["tolerance_change"]:
                reason = Reason.TOLERANCE_CHANGE
            elif progress.evaluations >= most_evaluations:
                reason = Reason.MAX_EVAL
            here = there or here
            if reason:
                break
        progress.reason = (reason or Reason.MAX_ITER).value
        self._left_at = here
        return first

    def resampled(self) -> None:
        """Tell that the loss has become another function, such as one of more points.

        A dense matrix stays, and so do the pairs until the next sketch, which is due and begins with the last one; so
        are corrected steps where they are possible. No loss is compared with one of before.
        """
        self._progress.start_anew()
        self._finish.has_changed = True
        self._left_at = None

    @property
    def status(self) -> Status:
        """What the optimizer has done so far."""
        progress, pairs, finish = self._progress, self._pairs, self._finish
        has_sketch = len(pairs.values) > 0
        reason = Reason(progress.reason)
        return Status(
            reason=reason,
            converged=reason.is_convergence,
            iterations=progress.iterations,
            evaluations=progress.evaluations,
            refreshes=progress.refreshes,
            products=progress.products,
            rank=len(pairs.values),
            conditioning_removed=1 + float(pairs.values.max()) / pairs.damping if has_sketch else 1.0,
            memory=self._memory.name,
            derivative=str(getattr(self.source, "derivative", "")),
            phase="corrected Gauss-Newton" if finish.is_on else "L-BFGS",
            corrected_steps=finish.steps,
            corrected_cost=finish.spent,
            contradiction=tuple(progress.contradiction),
            stuck_at=stuck_at(progress) if isinstance(self.source, LeastSquares) else 0.0,
            comparisons=tuple(getattr(self.source, "comparisons", ())),
        )

    def report(self) -> Report:
        """Return what the optimizer did, what it cost and what it advises: `print(optimizer.report())`."""
        return report_on_lbfgs(self.status, self.source is not None, self.param_groups[0]["params"][0].dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, bit for bit."""
        # Hooks may change what is loaded. Ours comes last of those before, and first of those after.
        loaded: dict[str, Any] = {}

        def check(_: Optimizer, changed: dict[str, Any]) -> None:
            check_state(changed, self.param_groups[0]["params"])
            loaded.update(changed)

        def restore(_: Optimizer) -> None:
            # torch has cast every tensor to the parameter's dtype and device; some are in float64, or on the CPU.
            for saved in loaded["state"].values():
                for name, value in saved.items():
                    if isinstance(value, Tensor):
                        device = "cpu" if name in ON_CPU else self._params[0].device
                        self._state[name] = value.to(device, copy=True)

        with hooked_load(self, check, restore):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy holds: no source, which speaks of this model, and no process group."""
        group = "lost" if isinstance(self.process_group, dist.ProcessGroup) else self.process_group
        own = {"source": None, "line_search": self.line_search, "process_group": group}
        return {**super().__getstate__(), **own, "_has_lost_source": self.source is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, a deep copy or a state dict."""
        defaults = {"source": None, "line_search": HagerZhang(), "process_group": None}
        for name, value in {**defaults, "_has_lost_source": False, "_left_at": None}.items():
            self.__dict__.setdefault(name, value)
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
    def _size(self) -> int:
        return sum(p.numel() for p in self._params)

    @property
    def _progress(self) -> Progress:
        return Progress.of(self.param_groups[0]["progress"])

    @property
    def _state(self) -> dict[str, Any]:
        """What is kept, with the first parameter that was trained; it may be frozen by now."""
        params = self.param_groups[0]["params"]
        trained = self._progress.trainable or [index for index, p in enumerate(params) if p.requires_grad] or [0]
        state: dict[str, Any] = self.state[params[trained[0]]]
        return state

    @property
    def _pairs(self) -> Pairs:
        return Pairs(self._state, self.param_groups[0]["history_size"])

    @property
    def _memory(self) -> Memory:
        """A dense matrix if there is one, else pairs."""
        return Dense(self._state) if "dense" in self._state else self._pairs

    @property
    def _finish(self) -> Finish:
        return Finish.of(self._progress.finish)

    def _start(self, objective: Objective) -> Iterate:
        """Return where the step begins, and look whether the loss there is what it was when the last one ended."""
        progress, left = self._progress, self._left_at
        here = objective(objective.position())
        progress.evaluations += 1
        begin(progress, here)
        has_changed = left and differ(left.value, here.value, here.gradient)
        if has_changed and not progress.repeats and torch.equal(left.position, here.position):  # type: ignore[union-attr]
            self._check_repeats(objective, here)  # Another loss in each step is no mistake.
        return here

    def _check_repeats(self, objective: Objective, here: Iterate) -> None:
        """Evaluate once more where the parameters were, and say so if the loss is another."""
        again, progress = objective(here.position), self._progress
        progress.evaluations += 1
        progress.repeats = not differ(again.value, here.value, here.gradient)
        if not progress.repeats:
            progress.contradiction = [here.value, again.value]
            advice.warn_once("contradiction", advice.contradiction(here.value, again.value), progress.warned)

    @torch.no_grad()
    def _check_source(self, objective: Objective, here: Iterate, operator: ParameterOperator) -> None:
        """Where the source's loss is not the closure's, look whether the closure has one, and if so which multiple."""
        loss, progress = loss_of(self.source, operator, here, self.process_group), self._progress
        if is_same(loss, here.value):
            return
        if not progress.repeats:
            self._check_repeats(objective, here)
        if progress.repeats:
            check_scale(self.source, loss, here, self._params, self.process_group)

    def _advance(self, objective: Objective, here: Iterate) -> Iterate | None:
        """Search along the quasi-Newton direction and return where that led; None if it failed."""
        progress, pairs, memory = self._progress, self._pairs, self._memory
        if not pairs.is_known:
            pairs.damping = max(1.0, float(here.gradient.abs().sum()))  # As torch's L-BFGS begins.
        direction = -(memory @ here.gradient)
        visited: dict[float, Iterate] = {}

        def evaluate(step: float) -> Point:
            visited[step] = there = objective(here.position + step * direction, direction)
            return Point(step, there.value, there.slope)

        origin = Point(0.0, here.value, float(here.gradient @ direction))
        rounding = 10 * torch.finfo(here.gradient.dtype).eps * abs(here.value)
        try:
            first = memory.first_step(self.param_groups[0]["lr"], origin.slope, progress.decrease)
            found = self.line_search(evaluate, origin, first, rounding) if origin.slope < 0 else None
        except BaseException:  # Of the closure, or of someone who presses Ctrl-C.
            objective.move(here.position)
            raise
        finally:
            progress.evaluations += len(visited)
        if found is None:
            self._take_failure(objective, here, -origin.slope)
            return None
        there = visited[found.step]
        objective.move(there.position)
        memory.learn(there.position - here.position, there.gradient - here.gradient, -found.step * here.gradient)
        progress.iterations += 1
        progress.failures, progress.decrease = 0, here.value - there.value
        progress.least_damping = min(progress.least_damping, pairs.damping)
        watch(progress, there)
        if progress.quiet == PATIENCE:
            self._check_repeats(objective, there)
            memory.forget()
        return there

    def _correct(self, objective: Objective, here: Iterate) -> Iterate | None:
        """Take a corrected Gauss-Newton step; where they are left, there is a new sketch."""
        progress, finish = self._progress, self._finish
        there = finish.advance(self.source, objective, here)  # type: ignore[arg-type]
        progress.evaluations += 1
        if there:
            progress.iterations += 1
            progress.failures = 0
            watch(progress, there)
        finish.judge(self._cost, there)
        # A dense matrix has learnt more than a sketch would tell, also of where these steps have led.
        if not finish.is_on and "dense" not in self._state:
            self._refresh(objective, there or here)
        return there

    @property
    def _cost(self) -> float:
        """The whole cost so far, in evaluations."""
        return self._progress.evaluations + self._progress.paid + self._finish.spent

    def _take_failure(self, objective: Objective, here: Iterate, hoped: float) -> None:
        """Let the next search be another one: over a new sketch or without the pairs, then in very short steps."""
        progress, memory = self._progress, self._memory
        objective.move(here.position)
        is_first = not (progress.failures and here.value == progress.stalled_at)
        progress.failures = 1 if is_first else progress.failures + 1
        progress.stalled_at = here.value
        if is_first:
            progress.hoped = hoped
            self._check_repeats(objective, here)
        can_change = memory.has_learnt or self._can_sketch
        memory.forget()
        if progress.failures == 2 or not can_change:
            self._shorten_steps()

    def _shorten_steps(self) -> None:
        """Let the next search be the last one at this point."""
        pairs = self._pairs
        pairs.damping = 1e3 * max([pairs.damping, *pairs.values.tolist()])
        self._progress.failures = max(self._progress.failures, 2)

    @property
    def _can_sketch(self) -> bool:
        """Whether there is a source, and no sketch has been tried where the parameters are."""
        progress = self._progress
        has_moved = progress.refreshes == 0 or progress.iterations > progress.last_refresh
        return self.source is not None and has_moved

    def _is_refresh_due(self, here: Iterate) -> bool:
        progress, every = self._progress, self.param_groups[0]["refresh"]
        if progress.failures or self.source is None:
            return bool(progress.failures == 1 and self._can_sketch)
        trace = [*progress.trace, [progress.evaluations, here.value]]
        progress.trace = within_reach(trace, progress.price)
        if progress.quiet == PATIENCE and self._can_sketch:
            return True
        if "dense" in self._state:
            return False
        if every != "auto":
            is_first = progress.refreshes == 0
            return bool(is_first or progress.iterations - progress.last_refresh >= every)
        # Where rounding decides, every loss is as low as the last: that is for the sketch after ten quiet iterations.
        is_quiet, is_new = progress.quiet > 0, len(trace) == 1 and progress.refreshes > 0
        has_reason = is_new or has_slowed(trace, progress.price)
        return not is_quiet and is_affordable(progress.paid, progress.evaluations) and has_reason

    def _is_dense_due(self, here: Iterate) -> bool:
        """Whether a dense matrix is to take over what has been learnt."""
        progress, settings = self._progress, self.param_groups[0]
        if settings["memory"] == "pairs" or "dense" in self._state or not self._pairs.has_learnt:
            return False
        if settings["memory"] == "dense":
            return self.source is None or progress.refreshes > 0
        if self.source is None or settings["refresh"] != "auto":
            return False
        if not is_dense_affordable(self._size, progress.residuals):
            return False
        landmarks = [*progress.landmarks, [self._cost, here.value]]
        return has_settled(landmarks, settling_window(self._size, progress.price))

    @torch.enable_grad()
    def _refresh(self, objective: Objective, here: Iterate) -> None:
        """Sketch the curvature where the parameters are now; a sketch that is not finite is discarded.

        The failed search that asked for it would then repeat itself, so steps are shortened.
        """
        progress, settings, memory = self._progress, self.param_groups[0], self._pairs
        source = self.source.linearize() if isinstance(self.source, LeastSquares) else self.source
        operator = operator_for(source, self._params)  # type: ignore[arg-type]
        rank = settings["rank"]
        if rank == "auto":
            rank = next_rank(operator, memory.values, progress.least_damping)
            rank = int(largest_of_all(rank, here.gradient.device, self.process_group))
        start = start_columns(memory.vectors, here.gradient, rank, settings["seed"], progress.refreshes)
        pairs, progress.price = eigenpairs(operator, start, self.process_group)
        count = source.residuals.numel() if isinstance(source, Linearized) else 0
        progress.residuals = int(largest_of_all(count, start.device, self.process_group))
        if progress.refreshes == 0:
            self._check_source(objective, here, operator)
        progress.refreshes += 1
        progress.last_refresh = progress.iterations
        progress.products += pairs.products
        self._finish.note_price(operator, not (dist.is_available() and dist.is_initialized()))
        progress.paid += progress.price
        progress.trace = [[progress.evaluations, here.value]]
        progress.landmarks.append([self._cost, here.value])
        progress.least_damping = math.inf
        if pairs.is_finite():
            memory.adopt(pairs.values.abs(), pairs.vectors.T.clone(memory_format=torch.contiguous_format))
        elif progress.failures:
            self._shorten_steps()
