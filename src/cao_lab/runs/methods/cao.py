"""CAO with the paper's settings, and with its own defaults over SGD."""

# ruff: noqa: PLC0415

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.assumptions import (
    BASE_LR,
    CLIP_UPDATE,
    DAMPING,
    POWER_ITERATIONS,
    WARM_START,
    WARMUP_STEPS,
    WEIGHT_DECAY,
)
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.settings import ConfigError, Settings

if TYPE_CHECKING:
    from torch import nn

    from cao import CAO
    from cao_lab.runs.loss import BatchLoss
    from cao_lab.runs.stepper import OnRefresh, Stepper

# Products for the log at each refresh: the first eigenvalues that the sketch does not capture.
PRODUCTS_FOR_THE_LOG = 6
UNKNOWN_TO_CAO = ("name", "sketch", "tolerance", "warmup_steps")


@dataclass(frozen=True)
class CAOConfig(Settings):
    """CAO: steps preconditioned in the top eigenspace of the Hessian, refreshed from time to time."""

    name: tyro.conf.Suppress[Literal["cao"]] = "cao"
    lr: float = BASE_LR
    """Learning rate α. With scaling=inverse-damping the complement moves at α/η."""
    rank: int = 1
    """Eigenpairs k in the sketch."""
    refresh_every: int = 400
    """Steps m from one sketch to the next."""
    damping: float = DAMPING
    """Damping η."""
    power_iterations: int = POWER_ITERATIONS
    """Sweeps T_pow of a refresh, each of k products."""
    tolerance: float | None = None
    """Stop the sweeps when every residual is below this share of its eigenvalue."""
    warm_start: bool = WARM_START
    """Start a refresh from the last subspace; the paper starts from random vectors."""
    eigensolver: Literal["subspace", "lanczos"] = "subspace"
    """Algorithm 2 (subspace iteration), or the block Lanczos method that the paper's text names."""
    negative_curvature: Literal["magnitude", "clip", "signed"] = "magnitude"
    """For λ < 0 use |λ|, 0, or λ itself; the last is the paper's rule and may step uphill."""
    scaling: Literal["inverse-damping", "unit"] = "inverse-damping"
    """(B + ηI)⁻¹ as the paper's text has it, or η times that, with which rank 0 is SGD."""
    max_update_norm: float | None = CLIP_UPDATE
    """Clip the preconditioned gradient to this norm c."""
    momentum: float = 0.0
    """Momentum; the paper has none."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay."""
    warmup_steps: int = WARMUP_STEPS
    """Plain SGD steps before the first sketch."""
    sketch: Literal["top", "random", "projected-out"] = "top"
    """The top eigenpairs; or a control: random directions with the true λ, or the top ones with λ → ∞."""

    always_in_label: ClassVar[tuple[str, ...]] = ("rank",)

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build CAO, which is refreshed with the matrix that the run's config names."""
        from cao import CAO
        from cao.linalg.eigensolvers import eigensolver_for
        from cao_lab.runs.refresh import counted, has_fresh_sketch, loss_with_a_look, refresh
        from cao_lab.runs.stepper import trainable

        params = trainable(model)
        size = sum(p.numel() for p in params)
        if self.rank > size:
            raise ConfigError(f"rank must not exceed the number of parameters, got {self.rank} for {size}")
        settings = {key: value for key, value in asdict(self).items() if key not in UNKNOWN_TO_CAO}
        # The loss's curvature is that of all processes already.
        if self.tolerance is not None:
            settings["eigensolver"] = eigensolver_for(self.eigensolver, self.power_iterations, self.tolerance)
        optimizer = CAO(params, seed=seed, process_group=False, **settings)
        self._warm_up(optimizer)

        def step(batch_loss: "BatchLoss", on_refresh: "OnRefresh") -> None:
            optimizer.zero_grad()
            loss_with_a_look(
                optimizer, batch_loss, lambda operator: refresh(optimizer, operator, self, on_refresh)
            ).backward()
            optimizer.step()
            self._warm_up(optimizer)

        return counted(optimizer, step, lambda: optimizer.is_refresh_due or has_fresh_sketch(optimizer))

    def _warm_up(self, optimizer: "CAO") -> None:
        """Let the next step be one of plain SGD until the warm-up is over."""
        if not self.warmup_steps:
            return
        is_over = optimizer.counters.steps >= self.warmup_steps
        for group in optimizer.param_groups:
            group["rank"], group["scaling"] = (self.rank, self.scaling) if is_over else (0, "unit")

    def gradients_per_step(self, product: float) -> float:
        """Return a gradient and the share of a refresh, with the products for the log."""
        if self.rank == 0:
            return 1.0
        products = self.rank * (self.power_iterations + 1) + PRODUCTS_FOR_THE_LOG
        return 1.0 + products * product / self.refresh_every


@dataclass(frozen=True)
class CAODefaultsConfig(SGDConfig):
    """CAO with its defaults: the steps of SGD, except along directions that are too sharp for the rate."""

    name: tyro.conf.Suppress[Literal["cao-defaults"]] = "cao-defaults"  # type: ignore[assignment]
    refresh_every: int | None = None
    """Steps from one sketch to the next; None lets the rules decide."""

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build CAO over SGD, its gradients clipped as SGD's are."""
        from cao import CAO
        from cao_lab.runs.stepper import trainable

        optimizer = CAO(
            trainable(model),
            self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            seed=seed,
            process_group=False,
            refresh_every="auto" if self.refresh_every is None else self.refresh_every,
        )
        return with_rules(optimizer, self.max_gradient_norm, self.weight_decay)


def with_rules(optimizer: "CAO", max_gradient_norm: float | None, decay: float = 0.0) -> "Stepper":
    """Return the method that lets CAO look at the curvature when its rules ask, and clips its base's gradient."""
    from cao_lab.runs.refresh import counted, has_fresh_sketch, loss_with_a_look, refresh_by_rule
    from cao_lab.runs.stepper import clip_gradients

    def step(batch_loss: "BatchLoss", on_refresh: "OnRefresh") -> None:
        optimizer.zero_grad()
        loss_with_a_look(
            optimizer, batch_loss, lambda operator: refresh_by_rule(optimizer, operator, on_refresh)
        ).backward()
        clip_gradients(optimizer, max_gradient_norm, decay)
        optimizer.step()

    return counted(optimizer, step, lambda: has_fresh_sketch(optimizer))
