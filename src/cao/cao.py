"""CAO: when to refresh the sketch of the curvature, when to step with it, what to save."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao import advice
from cao.checks import check_one_sketch, check_parameters, check_settings, check_unknown, is_numpy_number
from cao.linalg.columns import Eigenpairs
from cao.linalg.eigensolvers import Solver, SolverName
from cao.linalg.flat import FlatParams, space_of, storage_order
from cao.report import Report, report_on_cao
from cao.rules.damping import Damping, DampingName
from cao.rules.rank import Rank, RankName
from cao.rules.refresh import Refresh, RefreshName
from cao.rules.rules import Rules, rule_of
from cao.sketch.damped import NegativeCurvature, Scaling, gradient_norm, stretches_of
from cao.sketch.making import (
    Group,
    Source,
    adopt,
    check_request,
    check_scale,
    found_pairs,
    given_pairs,
    is_stale,
    note_part,
    shared_operator,
)
from cao.sketch.sketch import Counters, Progress, Sketch, timed
from cao.state import add_progress, check_saved, hooked_load, load_progress, without_progress

PAPER: Mapping[str, Any] = {
    "power_iterations": 10,
    "warm_start": False,
    "max_update_norm": 50.0,
    "weight_decay": 5e-4,
}
"""What the paper leaves open, as its reproduction assumes it (`cao_lab.assumptions` says why)."""


class CAO(Optimizer):
    """Curvature-adaptive optimization by low-rank sketches of the Hessian.

    From time to time the top eigenpairs of the Hessian are found by Hessian-vector products; in between, gradients are
    multiplied by P = (V diag(λ) Vᵀ + ηI)⁻¹. Use it like any torch optimizer, with one more line::

        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    Give it the learning rate and the momentum that you would give SGD. By default it takes the steps of SGD, except
    along directions that are too sharp for that rate. `CAO.paper` has the settings of the paper instead.

    Args:
        params: parameters or parameter groups; `lr`, `momentum` and `weight_decay` may differ by group.
        lr: learning rate α. With inverse-damping scaling, the complement of the sketch moves at the rate α/η.
        rank: number k of eigenpairs, 0 for a first-order method; or a policy, such as "auto" (`ByNeed()`): the
            directions in which a plain step would overshoot.
        refresh_every: steps m between refreshes; or a policy, such as "auto" (`OnDrift()`): when the sketch no longer
            fits the curvature, within a budget.
        damping: η > 0; or a policy. "auto" (`AtTheEdge()`) is η = 1/lr, with which no captured direction is unstable,
            or more if the other directions are too sharp for lr.
        power_iterations: iterations T_pow of the eigensolver.
        warm_start: start a refresh from the last subspace, with a small share of fresh random directions, instead of
            from random vectors.
        eigensolver: "subspace" iteration (the paper's Algorithm 2), or block "lanczos", which converges in fewer
            products but stores power_iterations + 1 times as many vectors; or a solver, such as `Lanczos(10)` or
            `SubspaceIteration(30, tolerance=1e-3)`, which knows its iterations by itself. None
            chooses by the rank: "subspace" for a number, a short Lanczos run for "auto".
        negative_curvature: "magnitude" uses |λ|, "clip" uses max(λ, 0), "signed" uses λ itself as the paper does, so
            that a step may go uphill. None chooses by the damping: "clip" for "auto", otherwise "magnitude".
        scaling: "inverse-damping" is P; "unit" is ηP, so that the complement takes exactly an SGD step. None chooses by
            the damping: "unit" for "auto", otherwise "inverse-damping".
        max_update_norm: clip the update P g at this norm; each group is weighted by its rate over the largest rate.
        momentum: heavy-ball momentum, which goes through the preconditioner: buf ← P(β·buf + g).
        nesterov: use Nesterov's form of momentum.
        weight_decay: added to the gradient as weight_decay · parameter, as torch.optim.SGD does.
        seed: seed of the random start vectors; no global random stream is used.
        process_group: group over which curvature is averaged when torch.distributed is initialised; None is the
            default group, and False means no averaging.
        unknown: nothing; other options of torch.optim.SGD are refused, with the reason.

    A step whose gradient is not finite is taken without the sketch, like SGD's, so that one bad entry does not spread.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        rank: int | RankName | Rank = "auto",
        refresh_every: int | RefreshName | Refresh = "auto",
        damping: float | DampingName | Damping = "auto",
        power_iterations: int = 3,
        warm_start: bool = True,
        eigensolver: SolverName | Solver | None = None,
        negative_curvature: NegativeCurvature | None = None,
        scaling: Scaling | None = None,
        max_update_norm: float | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        seed: int = 0,
        process_group: dist.ProcessGroup | Literal[False] | None = None,
        **unknown: Any,
    ) -> None:
        check_unknown(unknown)
        defaults = {
            "lr": lr,
            "rank": rank,
            "refresh_every": refresh_every,
            "damping": damping,
            "power_iterations": power_iterations,
            "warm_start": warm_start,
            "eigensolver": eigensolver,
            "negative_curvature": negative_curvature,
            "scaling": scaling,
            "max_update_norm": max_update_norm,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "seed": seed,
        }
        check_settings(defaults)
        rule: Damping = rule_of("damping", damping)
        defaults["scaling"] = scaling or rule.scaling
        defaults["negative_curvature"] = negative_curvature or rule.negative_curvature
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
        lr: float = 0.01,
        *,
        rank: int = 1,
        refresh_every: int = 400,
        damping: float = 0.1,
        **settings: Any,
    ) -> "CAO":
        """Return CAO with the settings of the paper's reproduction, `PAPER`, and steps of lr · (B + ηI)⁻¹ g.

        Outside the sketch they are steps of SGD at the rate lr/η, 0.1.
        """
        return cls(params, lr, rank=rank, refresh_every=refresh_every, damping=damping, **{**PAPER, **settings})

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
        rules, progress = self._rules, self._progress
        if rules.settings.rank == 0 or progress.looked_at == progress.steps:
            return False
        return progress.sketch is None or rules.refresh.is_due(progress.seen, progress)

    @property
    def sketch(self) -> Sketch | None:
        """The curvature in use, None before the first successful refresh."""
        progress, sketch = self._progress, self._progress.sketch
        eta, _ = self._rules.eta_and_brake()
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
        return report_on_cao(self._rules)

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
        note_part(self._progress)
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
        rules, progress, params = self._rules, self._progress, self._parameters()
        rules.check_step(params)
        if progress.source_gradient:
            check_scale(progress)
        space = space_of(params)
        progress.seen = rules.refresh.heed(progress.seen, progress, lambda: gradient_norm(params, space))
        # Algorithm 1, lines 6 to 15, on stretches of θ:
        # g ← ∇ℓ + λθ;  d ← P g with P = (B + ηI)⁻¹, which is g/η for k = 0;  d ← min(1, c/‖d‖) d;  θ ← θ − α d.
        P, c = rules.damped(), rules.settings.max_update_norm
        stretches = list(stretches_of(self.param_groups, progress.sketch if len(P.gains) else None, self.state, space))
        is_finite = P.step(stretches, c, space)
        if is_finite is not None:
            # A tensor on the parameters' device, which is read only when somebody asks for the counters.
            progress.non_finite_steps = progress.non_finite_steps + is_finite.logical_not()
        # At a rate of zero nothing moves: torch.distributed.checkpoint steps so, to see what the state will hold.
        progress.steps += rules.pace.rate > 0
        progress.largest_rate = max(progress.largest_rate, rules.pace.rate)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the next steps, as plain numbers and tensors shaped like the parameters."""

        def add(_: Optimizer, saved: dict[str, Any]) -> None:
            add_progress(saved, self._progress, self._parameters())

        # The first of the hooks, which may change all that is saved.
        handle = self.register_state_dict_post_hook(add, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, the sketch in the precision it was saved in."""
        loaded: dict[str, Any] = {}

        def check(_: Optimizer, changed: dict[str, Any]) -> dict[str, Any]:
            check_saved(changed, self._parameters())
            loaded.update(changed)
            return without_progress(changed, self.param_groups[0])

        def restore(_: Optimizer) -> None:
            load_progress(loaded, self._progress, self._parameters())

        with hooked_load(self, check, restore):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a deep copy holds; a process group belongs to a process and does not travel."""
        group = "lost" if isinstance(self.process_group, dist.ProcessGroup) else self.process_group
        return {**super().__getstate__(), "_progress": self._progress, "process_group": group}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CAO":
        """Return a copy in this process, where the process group is what it was."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.process_group = self.process_group
        return other

    @property
    def _rules(self) -> Rules:
        return Rules(self.param_groups, self._progress)

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @timed
    def _refresh(self, source: Source, scale: float | Tensor, *, is_asked: bool) -> bool:
        """Let the top eigenpairs of the curvature be the sketch B = V diag(λ) Vᵀ (Algorithm 1, lines 3 to 5)."""
        progress, rank = self._progress, self.param_groups[0]["rank"]
        if rank == 0:
            return False
        params = FlatParams(p for p in self._parameters() if p.requires_grad)
        check_request(scale, params, rank)
        scale = float(scale)
        if isinstance(source, Eigenpairs):
            pairs = given_pairs(source, scale, params, rank)
        else:
            storage = FlatParams(storage_order(params.params))
            H = shared_operator(source, scale, storage, self.process_group)
            if not is_asked and progress.sketch and not is_stale(H, progress.sketch, self._rules, self.state):
                return False
            pairs = found_pairs(H, self._rules)
        # Not counted before this line, so that a refresh stays due if its source was refused.
        progress.attempts += 1
        progress.attempted_at = progress.looked_at = progress.steps
        progress.count(pairs.products)
        if pairs.is_finite(params.space):
            adopt(pairs, params, self._rules)
            return True
        progress.failed_refreshes += 1
        advice.warn_once("failure", advice.failed(progress.sketch is not None), progress.has_warned)
        return False
