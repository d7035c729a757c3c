"""CAO: when to refresh the sketch of the curvature, when to step with it, what to save."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao import advice
from cao.eigensolvers import Solver, SolverName
from cao.flat import FlatParams, rows_of
from cao.linalg import Eigenpairs, over
from cao.metric import AdamMetric
from cao.operators import Scaled
from cao.policies.damping import Damping, DampingName
from cao.policies.rank import Rank, RankName
from cao.policies.refresh import Refresh, RefreshName
from cao.preconditioner import NegativeCurvature, Scaling
from cao.reports import Report, report_on_cao
from cao.rules import Rules, policies_of
from cao.saving import add_progress, check_saved, load_progress, translate_momentum, without_progress
from cao.settings import check_one_sketch, check_parameters, check_settings, check_unsupported, is_numpy_number
from cao.sketch import Counters, Progress, Sketch
from cao.sketching import Group, Source, adopt, check_request, found_pairs, given_pairs, is_stale, shared_operator
from cao.step import check_gradients, gradient_norm, has_finite_gradients, stretches_of, take_step
from cao.trial import caution_after


class CAO(Optimizer):
    """Curvature-adaptive optimization by low-rank sketches of the Hessian.

    From time to time the top eigenpairs of the Hessian are found by Hessian-vector products; in between, gradients are
    multiplied by P = (V diag(λ) Vᵀ + ηI)⁻¹. Use it like any torch optimizer, with one more line::

        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    Give it the learning rate and the momentum that you would give SGD (or, with `metric="adam"`, the rate for Adam). By
    default it takes the steps of SGD or Adam, except along directions that are too sharp for that rate. `CAO.paper` has
    the settings of the paper instead.

    Args:
        params: parameters or parameter groups; `lr`, `momentum` and `weight_decay` may differ by group.
        lr: learning rate α. With inverse-damping scaling, the complement of the sketch moves at the rate α/η.
        rank: number k of eigenpairs, 0 for a first-order method; or a policy, such as "auto" (`ByNeed()`): the
            directions in which a plain step would overshoot.
        refresh_every: steps m between refreshes; or a policy, such as "auto" (`OnDrift()`): when the sketch no longer
            fits the curvature, within a budget.
        damping: η > 0; or a policy. "edge" (`AtTheEdge()`) is η = 1/lr, with which no captured direction is unstable,
            or more if the other directions are too sharp for lr. "auto" (`FromSpectrum()`), for full batches at lr=1,
            is the curvature that the sketch leaves out, so that lr=1 is the natural step; a step that overshot is taken
            back and η is raised. It stores two more vectors, and is of no use with noisy gradients.
        power_iterations: iterations T_pow of the eigensolver, or their maximum if there is a tolerance.
        tolerance: stop iterating once every relative residual ‖Hv − λv‖/|λ| is below this.
        warm_start: start a refresh from the last subspace, with a small share of fresh random directions, instead of
            from random vectors.
        keep_sketch: hold on to the sketch until a refresh has found the next one, so that a failed refresh changes
            nothing. False drops it before the first product, and saves k vectors at the peak of memory; after a refresh
            that failed or raised, steps are first-order until one succeeds.
        eigensolver: "subspace" iteration (the paper's Algorithm 2), or block "lanczos", which converges in fewer
            products but stores power_iterations + 1 times as many vectors; or a solver such as `Lanczos(10)`. None
            chooses by the rank: "subspace" for a number, a short Lanczos run for "auto".
        negative_curvature: "magnitude" uses |λ|, "clip" uses max(λ, 0), "signed" uses λ itself as the paper does, so
            that a step may go uphill. None chooses by the damping: "clip" for "edge", otherwise "magnitude".
        scaling: "inverse-damping" is P; "unit" is ηP, so that the complement takes exactly an SGD step. None chooses by
            the damping: "unit" for "edge", otherwise "inverse-damping".
        max_update_norm: clip the update P g at this norm; each group is weighted by its rate over the largest rate.
        metric: None for plain gradients; "adam" (`AdamMetric(beta1, beta2, eps)`) for Adam's: without a sketch the step
            is Adam's, or AdamW's with `decoupled_weight_decay`, and the sketch is of D^½HD^½ with D = 1/(√v̂ + ε).
        momentum: heavy-ball momentum, which goes through the preconditioner: buf ← P(β·buf + g).
        nesterov: use Nesterov's form of momentum.
        weight_decay: added to the gradient as weight_decay · parameter, or decoupled as in AdamW.
        decoupled_weight_decay: shrink the parameters directly instead.
        warmup_steps: plain SGD steps before the first sketch.
        maximize: climb instead of descend.
        skip_non_finite: skip a step whose gradient is not finite, which costs one host synchronisation per step. By
            default such a step is taken without the sketch, like SGD's, so that one bad entry does not spread.
        seed: seed of the random start vectors; no global random stream is used.
        process_group: group over which curvature is averaged when torch.distributed is initialised; None is the
            default group, and False means no averaging.
        dampening, foreach, fused, differentiable: options of torch.optim.SGD that are refused, with the reason.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        rank: int | RankName | Rank = "auto",
        refresh_every: int | RefreshName | Refresh = "auto",
        damping: float | DampingName | Damping = "edge",
        power_iterations: int = 3,
        tolerance: float | None = None,
        warm_start: bool = True,
        keep_sketch: bool = True,
        eigensolver: SolverName | Solver | None = None,
        negative_curvature: NegativeCurvature | None = None,
        scaling: Scaling | None = None,
        max_update_norm: float | None = None,
        metric: Literal["adam"] | AdamMetric | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        warmup_steps: int = 0,
        maximize: bool = False,
        skip_non_finite: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | Literal[False] | None = None,
        dampening: float = 0.0,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_unsupported(dampening=dampening, foreach=foreach, fused=fused, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "rank": rank,
            "refresh_every": refresh_every,
            "damping": damping,
            "power_iterations": power_iterations,
            "tolerance": tolerance,
            "warm_start": warm_start,
            "keep_sketch": keep_sketch,
            "eigensolver": eigensolver,
            "negative_curvature": negative_curvature,
            "scaling": scaling,
            "max_update_norm": max_update_norm,
            "metric": AdamMetric() if metric == "adam" else metric,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "warmup_steps": warmup_steps,
            "maximize": maximize,
            "skip_non_finite": skip_non_finite,
            "seed": seed,
        }
        check_settings(defaults)
        policy = policies_of(defaults).damping
        defaults["scaling"] = scaling or policy.scaling
        defaults["negative_curvature"] = negative_curvature or policy.negative_curvature
        self.process_group: Group = process_group
        # One object that is never replaced: wrappers of an optimizer copy its attributes, and must share this one.
        self._progress = Progress()
        super().__init__(params, defaults)
        size = sum(p.numel() for p in self._parameters())
        if isinstance(rank, int) and rank > size:
            raise ValueError(f"rank must not exceed the number of parameters, got rank {rank} for {size} parameters")

    @classmethod
    def paper(
        cls,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 0.1,
        *,
        rank: int = 1,
        refresh_every: int = 400,
        damping: float = 0.1,
        **settings: Any,
    ) -> "CAO":
        """Return CAO with the settings of the paper: fixed rank, interval and damping, and steps of lr · (B + ηI)⁻¹ g.

        Outside the sketch they are steps of SGD at the rate lr/η.
        """
        return cls(params, lr, rank=rank, refresh_every=refresh_every, damping=damping, **settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings of the sketch must be those of the other groups."""
        super().add_param_group(param_group)
        group, first = self.param_groups[-1], self.param_groups[0]
        # A state dict holds numbers of Python only, so that it loads with weights_only=True.
        group.update({name: value.item() for name, value in group.items() if is_numpy_number(value)})
        try:
            check_settings(group)
            check_one_sketch(group, first)
            # The first group may be empty.
            device = next((param.device for each in self.param_groups for param in each["params"]), None)
            check_parameters(group["params"], device)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def is_refresh_due(self) -> bool:
        """Whether the next call of `refresh_if_due` will look at the curvature: at most once per step.

        A look ends in a refresh, unless the rule of `refresh_every` finds that the sketch still fits.
        """
        rules, progress = Rules(self.param_groups, self._progress), self._progress
        if rules.settings["rank"] == 0 or progress.steps < rules.first_steps:
            return False
        if progress.looked_at == progress.steps:
            return False
        return progress.sketch is None or rules.refresh.is_due(progress)

    @property
    def sketch(self) -> Sketch | None:
        """The curvature in use, None before the first successful refresh."""
        progress, sketch = self._progress, self._progress.sketch
        eta = Rules(self.param_groups, progress).eta()
        return sketch and replace(sketch, damping=eta, age=progress.steps - sketch.step)

    @property
    def captured(self) -> int:
        """How many directions of the sketch are in use; the sharpest one is watched even if none is in use."""
        return self._progress.captured

    @property
    def counters(self) -> Counters:
        """What the optimizer has done so far."""
        return self._progress.counters

    def report(self) -> Report:
        """Return what the optimizer did, what it cost and what it advises: `print(optimizer.report())`."""
        return report_on_cao(Rules(self.param_groups, self._progress))

    def refresh_if_due(self, source: Source, *, scale: float | Tensor = 1.0) -> bool:
        """Refresh the sketch if one is due, and return whether there is a new one; call it before `loss.backward()`.

        The source is one of: the loss of the training forward pass; a function that runs its own forward pass and
        returns a loss, or yields the losses of the parts of a batch; an operator that has `params`, such as
        `GaussNewton`; or `Eigenpairs` computed elsewhere. Functions and operators are evaluated only if a refresh is
        due.

        If the loss was multiplied by a number for the backward pass, pass that number: `scale=1 / n` for a loss divided
        by n accumulation steps, `scale=scaler.get_scale()` for one scaled by a `GradScaler`. The curvature is that of
        loss / scale.
        """
        return self.is_refresh_due and self._refresh(source, scale, is_asked=False)

    def refresh(self, source: Source, *, scale: float | Tensor = 1.0) -> bool:
        """Refresh the sketch now, and return whether there is a new one.

        No gradient, parameter, buffer or global random stream is touched.
        """
        return self._refresh(source, scale, is_asked=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, after evaluating the closure if there is one; return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with over(rows_of(self._parameters())):
            self._step()
        return loss

    def _step(self) -> None:
        is_moving = any(float(group["lr"]) != 0 for group in self.param_groups)
        rules, progress = Rules(self.param_groups, self._progress), self._progress
        settings, is_warming_up = rules.settings, progress.steps < rules.first_steps
        if is_moving and not is_warming_up:
            rules.check_freshness()
        check_gradients(self._parameters())
        rules.refresh.heed(progress, lambda: gradient_norm(self._parameters()))
        caution = caution_after(self.param_groups, self.state, progress) if rules.damping.is_on_trial else 0.0
        if settings["skip_non_finite"] and not has_finite_gradients(self._parameters()):
            progress.non_finite_steps += 1
            return
        factors = rules.factors(caution)
        base = 1.0 if is_warming_up else factors.base
        metric = settings["metric"]
        if metric is not None:
            metric.update(self.param_groups, self.state)
        is_first_order = is_warming_up or not progress.captured or settings["rank"] == 0
        sketch = None if is_first_order else progress.sketch
        stretches = list(stretches_of(self.param_groups, sketch, self.state))
        is_finite = take_step(stretches, base, factors.gains, settings["max_update_norm"])
        if metric is not None:
            metric.move(self.param_groups, self.state, base)
        if is_finite is not None:
            # A tensor on the parameters' device, which is read only when somebody asks for the counters.
            progress.non_finite_steps = progress.non_finite_steps + is_finite.logical_not()
        # At a rate of zero nothing moves: torch.distributed.checkpoint steps so, to see what the state will hold.
        progress.steps += is_moving

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the next steps, as plain numbers and tensors shaped like the parameters."""
        saved = super().state_dict()
        add_progress(saved, self._progress, self._parameters())
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, the sketch in the precision it was saved in."""
        check_saved(state_dict, self._parameters())
        super().load_state_dict(without_progress(state_dict))
        load_progress(state_dict, self._progress, self._parameters())
        translate_momentum(state_dict, Rules(self.param_groups, self._progress), self.state)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy holds; a process group belongs to a process and does not travel."""
        group = "lost" if isinstance(self.process_group, dist.ProcessGroup) else self.process_group
        return {**super().__getstate__(), "_progress": self._progress, "process_group": group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, a deep copy or a state dict, in which newer settings may be missing."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)
            group.setdefault("skip_non_finite", False)
            group.setdefault("metric", None)
            group.setdefault("keep_sketch", True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CAO":
        """Return a copy in this process, where the process group is what it was."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.process_group = self.process_group
        return other

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _refresh(self, source: Source, scale: float | Tensor, *, is_asked: bool) -> bool:
        rules, progress = Rules(self.param_groups, self._progress), self._progress
        rank, metric = rules.settings["rank"], rules.settings["metric"]
        if rank == 0:
            return False
        params = FlatParams(p for p in self._parameters() if p.requires_grad)
        check_request(scale, params, rank)
        # What is sketched is the curvature of what is minimised.
        scale = -float(scale) if rules.settings["maximize"] else float(scale)
        storage = FlatParams.in_storage_order(params.params)
        with over(storage.rows):
            if isinstance(source, Eigenpairs):
                operator, pairs = None, given_pairs(source, scale, params, rank)
            else:
                operator = shared_operator(source, scale, storage, self.process_group)
                if metric is not None:
                    operator = Scaled(operator, metric.diagonal(storage, self.state))
                if not is_asked and progress.sketch and not is_stale(operator, progress.sketch, rules, self.state):
                    return False
                pairs = found_pairs(operator, rules)
            # Not counted before this line, so that a refresh stays due if its source was refused.
            progress.attempts += 1
            progress.attempted_at = progress.looked_at = progress.steps
            progress.count(pairs.products)
            if pairs.is_finite:
                adopt(pairs, operator, params, rules)
                return True
        progress.failed_refreshes += 1
        advice.warn_once("failure", advice.failed(progress.sketch is not None), progress.has_warned)
        return False
