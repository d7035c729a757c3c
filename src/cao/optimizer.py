"""CAO: when to refresh the sketch of the curvature, how to step with it, what to save."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cao.combinations import MeanOverRanks
from cao.linalg import Eigenpairs, column_major, lanczos, random_columns, subspace_iteration
from cao.preconditioner import NegativeCurvature, Scaling, base_gain, correction_gains, is_singular
from cao.progress import Counters, Sketch, automatic_damping
from cao.settings import (
    SKETCH_SETTINGS,
    Eigensolver,
    check_eigenpairs,
    check_gradients,
    check_parameters,
    check_settings,
)
from cao.sources import Source, operator_for
from cao.storage import Layout, forget_rows, sketch_dtype, storage_order, store_rows, stored_rows
from cao.update import Stretch, stretches_of, take_step


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
        refresh_every: steps m between refreshes.
        damping: η > 0, or "auto": at each refresh η is the smallest captured |λ|, so that P H ≤ 1 outside a converged
            sketch and lr=1 is the natural step. This is for full-batch and large-batch problems: under gradient noise a
            step of that length is too long.
        power_iterations: iterations T_pow of the eigensolver, the most it takes if there is a tolerance.
        tolerance: stop iterating once every relative residual ‖Hv − λv‖/|λ| is below this.
        warm_start: start a refresh from the last subspace instead of a random one.
        eigensolver: "subspace" iteration (the paper's Algorithm 2), or block "lanczos", which converges in fewer
            products and holds power_iterations + 1 times the vectors.
        negative_curvature: "magnitude" uses |λ|, "clip" max(λ, 0), "signed" λ itself as the paper does, with which a
            step may go uphill.
        scaling: "inverse-damping" is P; "unit" is ηP, so that the complement takes exactly an SGD step.
        max_update_norm: clip the update P g at this norm, each group counted by its rate over the largest.
        momentum: heavy-ball momentum on the update.
        weight_decay: added to the gradient as weight_decay · parameter, or decoupled as in AdamW.
        decoupled_weight_decay: shrink the parameters directly instead.
        warmup_steps: plain SGD steps before the first sketch.
        maximize: climb instead of descend.
        seed: seed of the random start vectors; no global random stream is used.
        process_group: group over which curvature is averaged when torch.distributed is initialised.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        rank: int = 1,
        refresh_every: int = 400,
        damping: float | Literal["auto"] = 0.1,
        power_iterations: int = 3,
        tolerance: float | None = None,
        warm_start: bool = True,
        eigensolver: Eigensolver = "subspace",
        negative_curvature: NegativeCurvature = "magnitude",
        scaling: Scaling = "inverse-damping",
        max_update_norm: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        warmup_steps: int = 0,
        maximize: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
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
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "warmup_steps": warmup_steps,
            "maximize": maximize,
            "seed": seed,
        }
        check_settings(defaults)
        self.process_group = process_group
        self._layout: Layout | None = None
        super().__init__(params, defaults)
        size = sum(p.numel() for p in self._parameters())
        if rank > size:
            raise ValueError(f"rank must not exceed the number of parameters, got rank {rank} for {size} parameters")
        # In a parameter group, because load_state_dict leaves groups as they are but casts the tensors in `state`.
        self.param_groups[0]["progress"] = {
            **dict.fromkeys(Counters._fields, 0),
            "attempts": 0,
            "attempted_at": -1,
            "refreshed_at": -1,
            "values": [],
            "residuals": [],
            "damping": 1.0 if damping == "auto" else damping,
            "has_warned": [],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle or a deep copy; a process group belongs to a process and does not travel."""
        self.__dict__.setdefault("process_group", None)
        self._layout = None
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings of the sketch must be those of the other groups."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            for name in SKETCH_SETTINGS:
                if group[name] != self.param_groups[0][name]:
                    raise ValueError(
                        f"{name} must be the same in all parameter groups, because one sketch covers them all; "
                        f"got {group[name]} after {self.param_groups[0][name]}"
                    )
            check_parameters(self._parameters())
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def is_refresh_due(self) -> bool:
        """Whether the next call of `refresh_if_due` will refresh: at most once a step, and not during the warm-up."""
        settings, progress = self._settings, self._progress
        if settings["rank"] == 0 or progress["steps"] < settings["warmup_steps"]:
            return False
        if progress["attempted_at"] == progress["steps"]:
            return False
        has_sketch = progress["refreshed_at"] >= 0
        return not has_sketch or progress["steps"] - progress["attempted_at"] >= settings["refresh_every"]

    @property
    def sketch(self) -> Sketch | None:
        """The curvature in use, None before the first successful refresh."""
        progress = self._progress
        if progress["refreshed_at"] < 0:
            return None
        return Sketch(list(progress["values"]), list(progress["residuals"]), self._damping, progress["refreshed_at"])

    @property
    def counters(self) -> Counters:
        """What the optimizer has done so far."""
        return Counters(**{name: self._progress[name] for name in Counters._fields})

    def refresh_if_due(self, source: Source) -> bool:
        """Refresh the sketch if it is time to, and tell whether it was; call it before `loss.backward()`.

        The source is the loss of the training forward pass (undivided and unscaled); a function that runs a forward
        pass of its own and returns a loss, or yields the losses of the parts of a batch; an operator that carries its
        `params`, such as `GaussNewton`; or ready `Eigenpairs`. A function or an operator is evaluated only if a refresh
        is due.
        """
        if not self.is_refresh_due:
            return False
        self.refresh(source)
        return True

    def refresh(self, source: Source) -> None:
        """Refresh the sketch now. No gradient, parameter, buffer or global random stream is touched."""
        if self._settings["rank"] == 0:
            return
        progress = self._progress
        pairs = self._eigenpairs(source)
        # Not counted before this line, so that a refresh stays due if its source was refused.
        progress["attempts"] += 1
        progress["attempted_at"] = progress["steps"]
        progress["hessian_products"] += pairs.products
        if pairs.is_finite:
            self._adopt(pairs)
            return
        progress["failed_refreshes"] += 1
        self._warn_once(
            "failure",
            "a refresh of the curvature came out non-finite and was discarded; training goes on with "
            + ("the last good sketch" if self.sketch else "first-order steps until a refresh succeeds"),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, after evaluating the closure if there is one; return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_freshness()
        settings, progress = self._settings, self._progress
        is_warming_up = progress["steps"] < settings["warmup_steps"]
        base = 1.0 if is_warming_up else base_gain(self._damping, settings["scaling"])
        take_step(list(self._stretches()), base, self._gains(), settings["max_update_norm"])
        progress["steps"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore everything that decides the next steps, the sketch in the precision it was saved in."""
        if not any("progress" in group for group in state_dict["param_groups"]):
            raise ValueError("the state dict must be one of CAO, got one of another optimizer")
        has_sketch = any(group.get("progress", {}).get("values") for group in state_dict["param_groups"])
        if has_sketch and not any("vector_0" in entries for entries in state_dict["state"].values()):
            raise ValueError(
                "the state dict has the eigenvalues of a sketch but no vectors; save optimizer.state_dict() whole"
            )
        super().load_state_dict(state_dict)
        # torch has cast every tensor to its parameter's dtype, which would coarsen the sketch of a bfloat16 model.
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        for index, param in zip(saved, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if name.startswith("vector_"):
                    self.state[param][name] = value.to(param.device, copy=True)
        self._layout = None

    @property
    def _settings(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _progress(self) -> dict[str, Any]:
        progress: dict[str, Any] = self.param_groups[0]["progress"]
        return progress

    @property
    def _damping(self) -> float:
        chosen: float | str = self._settings["damping"]
        return self._progress["damping"] if isinstance(chosen, str) else chosen

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _eigenpairs(self, source: Source) -> Eigenpairs:
        params = [p for p in self._parameters() if p.requires_grad]
        size, rank = sum(p.numel() for p in params), self._settings["rank"]
        if isinstance(source, Eigenpairs):
            check_eigenpairs(source, size, rank)
            vectors = column_major(source.vectors.detach()).to(params[0].device, sketch_dtype(params))
            return Eigenpairs(source.values, vectors, source.residuals, source.products)
        if rank > size:
            raise ValueError(f"rank must not exceed the number of trainable parameters, got rank {rank} for {size}")
        operator = operator_for(source, params)
        if dist.is_available() and dist.is_initialized():
            operator = MeanOverRanks(operator, self.process_group)
        solve = lanczos if self._settings["eigensolver"] == "lanczos" else subspace_iteration
        iterations, tolerance = self._settings["power_iterations"], self._settings["tolerance"]
        # No name for the start columns here: the solver overwrites them, and may drop them.
        return solve(operator, self._start_columns(params), iterations, tolerance=tolerance, overwrite_start=True)

    def _start_columns(self, params: Sequence[Tensor]) -> Tensor:
        """Return the last subspace, or random columns drawn from the seed and the number of the refresh."""
        rank, dtype, progress = self._settings["rank"], sketch_dtype(params), self._progress
        generator = torch.Generator(params[0].device)
        generator.manual_seed(hash((self._settings["seed"], progress["attempts"])))
        if not self._settings["warm_start"] or progress["refreshed_at"] < 0:
            return random_columns(sum(p.numel() for p in params), rank, generator, dtype)
        rows, values = stored_rows(self.state, params, rank), progress["values"]
        for index, row in enumerate(rows):
            # A direction without curvature, or outside these parameters, might be mapped to zero for ever.
            has_curvature = index < len(values) and values[index] != 0 and bool(row.any())
            if not has_curvature:
                row.normal_(generator=generator)
        return rows.T

    def _adopt(self, pairs: Eigenpairs) -> None:
        params = [p for p in self._parameters() if p.requires_grad]
        progress, sign = self._progress, -1 if self._settings["maximize"] else 1
        values = sign * pairs.values.double().cpu()
        if self._settings["damping"] == "auto":
            progress["damping"] = automatic_damping(values, pairs.values.dtype, progress["damping"])
        progress["values"], progress["residuals"] = values.tolist(), pairs.residuals.tolist()
        progress["refreshed_at"] = progress["steps"]
        progress["refreshes"] += 1
        progress["indefinite_refreshes"] += int((values + self._damping < 0).any())
        if self._settings["negative_curvature"] == "signed":
            progress["singular_directions"] += int(is_singular(values, self._damping).sum())
        forget_rows(self.state)
        self._layout = Layout(params, pairs.vectors.T.contiguous())
        store_rows(self.state, self._layout.params, self._layout.rows)

    @property
    def _uses_sketch(self) -> bool:
        has_sketch: bool = self._progress["refreshed_at"] >= 0
        return has_sketch and self._progress["steps"] >= self._settings["warmup_steps"]

    def _gains(self) -> list[float]:
        progress, settings = self._progress, self._settings
        if not self._uses_sketch:
            return []
        values = torch.tensor(progress["values"], dtype=torch.float64)
        gains = correction_gains(values, self._damping, settings["negative_curvature"], settings["scaling"])
        return gains.tolist()

    def _stretches(self) -> Iterator[Stretch]:
        """Yield what moves in this step: all parameters that have a gradient and a learning rate."""
        layout = self._current_layout() if self._uses_sketch else None
        if layout is None:
            self._reserve()
        highest = max(float(group["lr"]) for group in self.param_groups)
        for group in self.param_groups:
            lr = float(group["lr"])
            check_gradients(group["params"])
            # A group with rate 0 stands still, outside the sketch; its momentum goes on, as in SGD.
            is_still = lr == 0 and highest > 0
            rate = 1.0 if is_still or highest == 0 else math.sqrt(lr / highest)
            yield from stretches_of(group, rate, None if is_still else layout, self._momentum_buffer)

    def _current_layout(self) -> Layout:
        """Return where the sketch is: after a checkpoint or a copy, shares become views of one matrix again."""
        if self._layout is None:
            params = storage_order(p for p in self._parameters() if "vector_0" in self.state[p])
            # As many as were found: the rank may have been set anew since.
            self._layout = Layout(params, stored_rows(self.state, params, len(self._progress["values"])))
            store_rows(self.state, params, self._layout.rows)
        return self._layout

    def _reserve(self) -> None:
        """Let zeros hold the sketch's place in the state, so that a checkpoint can be loaded into it."""
        params = [p for p in self._parameters() if p.grad is not None and "vector_0" not in self.state[p]]
        if self._settings["rank"] > 0 and params and self._progress["refreshed_at"] < 0:
            store_rows(self.state, params, stored_rows(self.state, params, self._settings["rank"]))

    def _momentum_buffer(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _check_freshness(self) -> None:
        settings, progress = self._settings, self._progress
        is_moving = any(float(group["lr"]) != 0 for group in self.param_groups)
        if settings["rank"] == 0 or progress["steps"] < settings["warmup_steps"] or not is_moving:
            return
        if progress["attempts"] == 0:
            raise RuntimeError(
                "step() has no curvature to use: call optimizer.refresh_if_due(loss) before loss.backward(), in every "
                "iteration (or set rank=0 for first-order steps)"
            )
        age = progress["steps"] - progress["attempted_at"]
        if age >= 2 * settings["refresh_every"]:
            self._warn_once(
                "age",
                f"the sketch of the curvature is {age} steps old, with refresh_every={settings['refresh_every']}; "
                "call optimizer.refresh_if_due(loss) in every iteration",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._progress["has_warned"]:
            self._progress["has_warned"].append(kind)
            warnings.warn(message, stacklevel=3)
