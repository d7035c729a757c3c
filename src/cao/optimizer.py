"""CAO: when to refresh the sketch of the curvature, when to step with it, what to save."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao.autograd.isolation import check_not_joining
from cao.curvature import LossFunction, operator_for
from cao.flat import FlatParams
from cao.linalg import Eigenpairs, generator_for, random_columns
from cao.operators import AllReduced, ParameterOperator, Scaled, SymmetryProbe, agreed, check_replicas
from cao.policies import Damping, Refresh, Solver, damping_policy, eigensolver_for, plain, refresh_policy, restored
from cao.preconditioner import NegativeCurvature, Preconditioner, Scaling, is_singular
from cao.settings import (
    SKETCH_SETTINGS,
    check_gradients,
    check_parameters,
    check_settings,
    check_unsupported,
    is_numpy_number,
    is_positive,
)
from cao.sketch import Progress, Sketch, check_eigenpairs, loaded_sketch, saved_shares
from cao.step import stretches_of, take_step
from cao.trial import caution_after

Source: TypeAlias = Tensor | LossFunction | ParameterOperator | Eigenpairs
# Beyond this relative asymmetry a "Hessian" is no Hessian; bfloat16 alone leaves about 0.01.
ASYMMETRIC = 0.05


class Counters(NamedTuple):
    """What the optimizer has done so far."""

    steps: int
    """Steps taken; one at a rate of zero does not count."""
    refreshes: int
    """Successful refreshes."""
    hessian_products: int
    indefinite_refreshes: int
    """Refreshes at which the paper's (B + ηI)⁻¹ would not have been positive definite."""
    failed_refreshes: int
    """Refreshes that came out non-finite and were discarded."""
    singular_directions: int
    """Directions left to the complement because λ + η vanished under the signed rule."""
    non_finite_steps: int
    """Steps whose projected gradient was not finite: taken to first order, or skipped."""
    rejected_steps: int
    """Steps that overshot and were taken back, with damping="auto"."""


class CAO(Optimizer):
    """Curvature-adaptive optimization by periodic low-rank Hessian sketching.

    Every `refresh_every` steps the top eigenpairs of the Hessian are found by Hessian-vector products; in between,
    gradients are multiplied by P = (V diag(λ) Vᵀ + ηI)⁻¹. Use it as any torch optimizer, with one more line::

        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    Args:
        params: parameters or parameter groups; `lr`, `momentum` and `weight_decay` may differ by group.
        lr: learning rate α. With inverse-damping scaling the complement of the sketch moves at a rate of α/η.
        rank: number k of eigenpairs; 0 is a first-order method.
        refresh_every: steps m between refreshes, or a policy such as `Every(400)`.
        damping: η > 0; or a policy, such as "auto" (`FromSpectrum()`): at each refresh η is the curvature that the
            sketch leaves out, so that lr=1 is the natural step; a step that overshot is taken back, its gradient with
            it, and η raised. This is for full batches, and keeps two vectors more: under gradient noise neither a step
            of that length nor its trial has a meaning.
        power_iterations: iterations T_pow of the eigensolver, the most it takes if there is a tolerance.
        tolerance: stop iterating once every relative residual ‖Hv − λv‖/|λ| is below this.
        warm_start: start a refresh from the last subspace, with a small share of fresh random directions, instead of
            from random vectors.
        eigensolver: "subspace" iteration (the paper's Algorithm 2), or block "lanczos", which converges in fewer
            products and holds power_iterations + 1 times the vectors; or a solver such as `Lanczos(10)`.
        negative_curvature: "magnitude" uses |λ|, "clip" max(λ, 0), "signed" λ itself as the paper does, with which a
            step may go uphill.
        scaling: "inverse-damping" is P; "unit" is ηP, so that the complement takes exactly an SGD step.
        max_update_norm: clip the update P g at this norm, each group counted by its rate over the largest.
        momentum: heavy-ball momentum, which goes through the preconditioner: buf ← P(β·buf + g).
        nesterov: use Nesterov's form of momentum.
        weight_decay: added to the gradient as weight_decay · parameter, or decoupled as in AdamW.
        decoupled_weight_decay: shrink the parameters directly instead.
        warmup_steps: plain SGD steps before the first sketch.
        maximize: climb instead of descend.
        skip_non_finite: skip a step whose gradient is not finite, at the price of one host synchronisation per step. By
            default such a step is taken to first order, like SGD's, so that one bad entry spoils no other.
        seed: seed of the random start vectors; no global random stream is used.
        process_group: group over which curvature is averaged when torch.distributed is initialised; None is the
            default group, False averages over none.
        dampening, foreach, fused, differentiable: refused with the reason, where torch.optim.SGD takes them.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        rank: int = 1,
        refresh_every: int | Refresh = 400,
        damping: float | Literal["auto"] | Damping = 0.1,
        power_iterations: int = 3,
        tolerance: float | None = None,
        warm_start: bool = True,
        eigensolver: Literal["subspace", "lanczos"] | Solver = "subspace",
        negative_curvature: NegativeCurvature = "magnitude",
        scaling: Scaling = "inverse-damping",
        max_update_norm: float | None = None,
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
            "eigensolver": eigensolver,
            "negative_curvature": negative_curvature,
            "scaling": scaling,
            "max_update_norm": max_update_norm,
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
        self.process_group: dist.ProcessGroup | Literal[False, "lost"] | None = process_group
        # One object that is never replaced: wrappers of an optimizer copy its attributes, and must share this one.
        self._progress = Progress()
        super().__init__(params, defaults)
        size = sum(p.numel() for p in self._parameters())
        if rank > size:
            raise ValueError(f"rank must not exceed the number of parameters, got rank {rank} for {size} parameters")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings of the sketch must be those of the other groups."""
        super().add_param_group(param_group)
        group, first = self.param_groups[-1], self.param_groups[0]
        # A state dict holds numbers of Python only, so that it loads with weights_only=True.
        group.update({name: value.item() for name, value in group.items() if is_numpy_number(value)})
        try:
            check_settings(group)
            for name in SKETCH_SETTINGS:
                if group[name] != first[name]:
                    raise ValueError(
                        f"{name} must be the same in all parameter groups, because one sketch covers them all; "
                        f"got {group[name]} after {first[name]}"
                    )
            check_parameters(group["params"], first["params"][0].device)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def is_refresh_due(self) -> bool:
        """Whether the next call of `refresh_if_due` will refresh: at most once per step, and not during the warm-up."""
        settings, progress = self.param_groups[0], self._progress
        if settings["rank"] == 0 or progress.steps < settings["warmup_steps"]:
            return False
        if progress.attempted_at == progress.steps:
            return False
        age = progress.steps - progress.attempted_at
        return progress.sketch is None or refresh_policy(settings["refresh_every"]).is_due(age)

    @property
    def sketch(self) -> Sketch | None:
        """The curvature in use, None before the first successful refresh."""
        sketch = self._progress.sketch
        return sketch and replace(sketch, damping=self._damping(), age=self._progress.steps - sketch.step)

    @property
    def counters(self) -> Counters:
        """What the optimizer has done so far."""
        return Counters(**{name: int(getattr(self._progress, name)) for name in Counters._fields})

    def refresh_if_due(self, source: Source, *, scale: float | Tensor = 1.0) -> bool:
        """Refresh the sketch if it is time to, and tell whether there is a new one; call it before `loss.backward()`.

        The source is the loss of the training forward pass; a function that runs a forward pass of its own and returns
        a loss, or yields the losses of the parts of a batch; an operator that carries its `params`, such as
        `GaussNewton`; or ready `Eigenpairs`. A function or an operator is evaluated only if a refresh is due.

        A loss that was multiplied by a number for the backward pass must say so: `scale=1 / n` for a loss divided by n
        accumulation steps, `scale=scaler.get_scale()` for one scaled by a `GradScaler`. The curvature is that of the
        loss itself, loss / scale.
        """
        return self.is_refresh_due and self.refresh(source, scale=scale)

    def refresh(self, source: Source, *, scale: float | Tensor = 1.0) -> bool:
        """Refresh the sketch now, and tell whether there is a new one.

        No gradient, parameter, buffer or global random stream is touched.
        """
        settings, progress = self.param_groups[0], self._progress
        if not is_positive(scale):
            raise ValueError(f"scale must be a positive number, got {scale!r}")
        if settings["rank"] == 0:
            return False
        params = FlatParams(p for p in self._parameters() if p.requires_grad)
        pairs, operator = self._eigenpairs(source, float(scale), params)
        # Not counted before this line, so that a refresh stays due if its source was refused.
        progress.attempts += 1
        progress.attempted_at = progress.steps
        progress.hessian_products += pairs.products
        if pairs.is_finite:
            self._adopt(pairs, operator, params)
            return True
        progress.failed_refreshes += 1
        self._warn_once(
            "failure",
            "a refresh of the curvature came out non-finite and was discarded; training goes on with "
            + ("the last good sketch" if progress.sketch else "first-order steps until a refresh succeeds"),
        )
        return False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, after evaluating the closure if there is one; return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_moving = any(float(group["lr"]) != 0 for group in self.param_groups)
        settings, progress = self.param_groups[0], self._progress
        is_warming_up = progress.steps < settings["warmup_steps"]
        if is_moving and not is_warming_up and settings["rank"] > 0:
            self._check_freshness()
        check_gradients(self._parameters())
        caution = 0.0
        if damping_policy(settings["damping"]).is_on_trial:
            caution = caution_after(self.param_groups, self.state, progress)
        sketch = None if is_warming_up else progress.sketch
        stretches = list(stretches_of(self.param_groups, sketch, self.state))
        if settings["skip_non_finite"] and not torch.stack([s.gradient.isfinite().all() for s in stretches]).all():
            progress.non_finite_steps += 1
            return loss
        preconditioner = self._preconditioner(caution)
        base = 1.0 if is_warming_up else preconditioner.base
        gains = (preconditioner.gains / preconditioner.base).tolist()
        is_finite = take_step(stretches, base, gains, settings["max_update_norm"])
        if is_finite is not None:
            # A tensor on the parameters' device, which is read only when somebody asks for the counters.
            progress.non_finite_steps = progress.non_finite_steps + is_finite.logical_not()
        # At a rate of zero nothing moves: torch.distributed.checkpoint steps so, to see what the state will hold.
        progress.steps += is_moving
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the next steps, as plain numbers and tensors shaped like the parameters."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.update({name: plain(value) for name, value in group.items()})
        saved["param_groups"][0]["progress"] = self._progress.saved()
        params = self._parameters()
        shares = saved_shares(self._progress.sketch, params, self.param_groups[0]["rank"])
        for index, param in enumerate(params):
            if param in shares:
                saved["state"][index] = {**saved["state"].get(index, {}), **shares[param]}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, the sketch in the precision it was saved in."""
        groups = state_dict["param_groups"]
        progress = next((group["progress"] for group in groups if "progress" in group), None)
        if progress is None:
            raise ValueError("the state dict must be one of CAO, got one of another optimizer")
        shares, others = {}, {}
        for index, entries in state_dict["state"].items():
            shares[index] = {name: value for name, value in entries.items() if name.startswith("vector_")}
            others[index] = {name: value for name, value in entries.items() if name not in shares[index]}
        if progress["values"] and not any(shares.values()):
            raise ValueError(
                "the state dict has the eigenvalues of a sketch but no vectors; save optimizer.state_dict() whole"
            )
        own = [{name: restored(value) for name, value in group.items() if name != "progress"} for group in groups]
        # torch casts all that it loads to the parameters' dtype, which would coarsen the sketch of a bfloat16 model.
        super().load_state_dict({**state_dict, "state": others, "param_groups": own})
        indices = [index for group in groups for index in group["params"]]
        vectors = {p: shares[i] for i, p in zip(indices, self._parameters(), strict=True) if shares.get(i)}
        self._progress.load(progress, loaded_sketch(progress, vectors))
        if "format" not in progress and self.param_groups[0]["scaling"] == "inverse-damping":
            # Version 0.1 kept momentum with the factor 1/η, which is now applied at the step.
            for entries in self.state.values():
                if "momentum_buffer" in entries:
                    entries["momentum_buffer"].mul_(self._damping())

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "CAO":
        """Return a copy in this process, where the process group is what it was."""
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.process_group = self.process_group
        return other

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _damping(self, caution: float = 0.0) -> float:
        lr, momentum = (max(float(group[name]) for group in self.param_groups) for name in ("lr", "momentum"))
        policy = damping_policy(self.param_groups[0]["damping"])
        return policy.at_step(self._progress.damping or 1.0, lr, momentum, caution)

    def _preconditioner(self, caution: float = 0.0) -> Preconditioner:
        settings, sketch = self.param_groups[0], self._progress.sketch
        values = torch.tensor(sketch.values if sketch else [], dtype=torch.float64)
        vectors = sketch.rows.T if sketch else torch.zeros(0, 0)
        rules = {name: settings[name] for name in ("negative_curvature", "scaling")}
        return Preconditioner.of(values, vectors, self._damping(caution), **rules)

    def _eigenpairs(
        self, source: Source, scale: float, params: FlatParams
    ) -> tuple[Eigenpairs, ParameterOperator | None]:
        """Return new eigenpairs over the parameters in storage order, and the operator they are of."""
        settings, progress, storage = self.param_groups[0], self._progress, FlatParams.in_storage_order(params.params)
        if params.size == 0:
            raise ValueError(
                "all parameters are frozen: there is no curvature where no parameter has requires_grad=True"
            )
        if isinstance(source, Eigenpairs):
            check_eigenpairs(source, params.size, settings["rank"])
            vectors = params.reorder(source.vectors.detach(), storage).to(storage.device, storage.dtype)
            return replace(
                source, values=source.values / scale, residuals=source.residuals / scale, vectors=vectors
            ), None
        operator = self._operator(source, scale, storage)
        probe = SymmetryProbe(operator)
        solve = eigensolver_for(settings["eigensolver"], settings["power_iterations"], settings["tolerance"])
        # No name for the start columns: the solver overwrites them, and may drop them.
        pairs = solve(operator if progress.attempts else probe, self._start(storage), overwrite_start=True)
        if progress.attempts == 0 and probe.asymmetry > ASYMMETRIC:
            self._warn_once(
                "asymmetry",
                f"the second derivatives of this loss are wrong: its Hessian is asymmetric by {probe.asymmetry:.2g} of "
                "its size. Some function in the graph has no correct double backward (torch.nn.utils.weight_norm has "
                "none; torch.nn.utils.parametrizations.weight_norm has one). GaussNewton needs none",
            )
        return pairs, operator

    def _operator(self, source: Source, scale: float, storage: FlatParams) -> ParameterOperator:
        """Return the source as an operator on exactly these parameters, averaged over the processes of the group."""

        def build() -> ParameterOperator:
            if self.param_groups[0]["rank"] > storage.size:
                rank = self.param_groups[0]["rank"]
                raise ValueError(
                    f"rank must not exceed the number of trainable parameters, got rank {rank} for {storage.size}"
                )
            operator = operator_for(source, storage.params)  # type: ignore[arg-type]  # Eigenpairs never come here.
            return operator if scale == 1 else Scaled(operator, 1 / scale)

        group = self.process_group
        if group is False or not (dist.is_available() and dist.is_initialized()):
            return build()
        if group == "lost":
            raise ValueError("a process group does not travel with a pickle; set optimizer.process_group again")
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not in process_group; pass the group of its replicas, or False")
        check_not_joining(storage.params)
        check_replicas(storage.params, group)
        return AllReduced(agreed(build, group, storage.device), group)

    def _start(self, storage: FlatParams) -> Tensor:
        """Return the last subspace, or random columns, drawn from the seed and the number of the refresh."""
        settings, progress = self.param_groups[0], self._progress
        generator = generator_for(storage.device, int(settings["seed"]), progress.attempts)
        if settings["warm_start"] and progress.sketch is not None:
            return progress.sketch.start(storage, settings["rank"], generator)
        return random_columns(storage.size, settings["rank"], generator, storage.dtype)

    def _adopt(self, pairs: Eigenpairs, operator: ParameterOperator | None, params: FlatParams) -> None:
        settings, progress = self.param_groups[0], self._progress
        decay = max(0.0 if group["decoupled_weight_decay"] else group["weight_decay"] for group in self.param_groups)
        measured, products = damping_policy(settings["damping"]).at_refresh(pairs, operator, decay)
        # Without any curvature there is nothing to measure.
        progress.damping = measured or progress.damping or 1.0
        progress.hessian_products += products
        progress.refreshes += 1
        values = pairs.values.double().cpu() * (-1 if settings["maximize"] else 1)
        residuals, rows = pairs.residuals.tolist(), pairs.vectors.T.contiguous()
        progress.sketch = Sketch(values.tolist(), residuals, progress.damping, progress.steps, params, rows)
        progress.indefinite_refreshes += int((values + self._damping() < 0).any())
        if settings["negative_curvature"] == "signed":
            progress.singular_directions += int(is_singular(values, self._damping()).sum())
        self._check_edge(values.abs(), len(values) == params.size)

    def _check_edge(self, magnitudes: Tensor, is_complete: bool) -> None:
        """Warn where the rate is beyond the stability edge 2(1+β)/λ, of a captured direction or of the next ones."""
        lr, momentum = (max(float(group[name]) for group in self.param_groups) for name in ("lr", "momentum"))
        damping, base = self._damping(), self._preconditioner().base
        # A fixed sketch is stable if and only if lr·base·H ≺ edge + 2B/η.
        edge = 2 * (1 + momentum) / (1 + 2 * momentum * self.param_groups[0]["nesterov"])
        captured = lr * base * magnitudes[0] * edge / (edge + 2 * magnitudes[0] / damping)
        following = 0.0 if is_complete else lr * base * magnitudes[-1]
        rate = max(float(captured), float(following))
        if rate > edge:
            where = "a captured direction" if captured > edge else "directions just outside the sketch"
            self._warn_once(
                "edge",
                f"the effective step along {where} may be {rate:.3g} times the inverse curvature, beyond the edge of "
                f"stability, {edge:.3g}: the loss may oscillate or diverge. Divide lr by {rate / edge:.2g} or more, "
                "raise damping by as much, or capture more directions with a larger rank",
            )

    def _check_freshness(self) -> None:
        settings, progress = self.param_groups[0], self._progress
        if progress.attempts == 0:
            raise RuntimeError(
                "step() has no curvature to use: call optimizer.refresh_if_due(loss) before loss.backward(), in every "
                "iteration (or set rank=0 for first-order steps)"
            )
        age = progress.steps - progress.attempted_at
        # A policy that is due already at half the age has been waiting for as long again.
        if age % 2 == 0 and refresh_policy(settings["refresh_every"]).is_due(age // 2):
            self._warn_once(
                "age",
                f"the sketch of the curvature is {age} steps old, twice as old as refresh_every allows; "
                "call optimizer.refresh_if_due(loss) in every iteration",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind in self._progress.has_warned:
            return
        self._progress.has_warned.append(kind)
        frame, level = inspect.currentframe(), 1
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("cao.", "torch.")):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, stacklevel=level)
