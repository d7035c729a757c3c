"""CAO with its own defaults, over SGD and over AdamW: each has its base's settings, and those of no sketch."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.runs.methods.adamw import AdamWConfig
from cao_lab.runs.methods.sgd import SGDConfig

if TYPE_CHECKING:
    from torch import nn

    from cao import CAO
    from cao_lab.runs.method import Method, Objective, OnRefresh


@dataclass(frozen=True)
class CAODefaultsConfig(SGDConfig):
    """CAO with its defaults: the steps of SGD, except along directions that are too sharp for the rate."""

    name: tyro.conf.Suppress[Literal["cao-defaults"]] = "cao-defaults"  # type: ignore[assignment]

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build CAO over SGD, its gradients clipped as SGD's are."""
        from cao import CAO
        from cao_lab.runs.method import trainable

        optimizer = CAO(
            trainable(model),
            self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            seed=seed,
            process_group=False,
        )
        return with_rules(optimizer, self.max_gradient_norm, self.weight_decay)


@dataclass(frozen=True)
class CAOAdamConfig(AdamWConfig):
    """CAO in Adam's metric: the steps of AdamW, except along directions that are too sharp for them."""

    name: tyro.conf.Suppress[Literal["cao-adam"]] = "cao-adam"  # type: ignore[assignment]

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build CAO over AdamW, its gradients clipped as AdamW's are."""
        from cao import CAO, AdamMetric
        from cao_lab.runs.method import trainable

        optimizer = CAO(
            trainable(model),
            self.lr,
            metric=AdamMetric(self.beta1, self.beta2, self.eps),
            weight_decay=self.weight_decay,
            decoupled_weight_decay=True,
            seed=seed,
            process_group=False,
        )
        return with_rules(optimizer, self.max_gradient_norm)


def with_rules(optimizer: "CAO", max_gradient_norm: float | None, decay: float = 0.0) -> "Method":
    """Return the method that lets CAO look at the curvature when its rules ask for it, and clips its base's gradient.

    The log is told of sketches of the Hessian alone: in Adam's metric they are those of another matrix.
    """
    from cao_lab.runs.method import clip_gradients
    from cao_lab.runs.refresh import counted, has_fresh_sketch, loss_with_a_look, refresh_by_rule

    has_own_metric = optimizer.param_groups[0]["metric"] is not None

    def step(objective: "Objective", on_refresh: "OnRefresh") -> None:
        optimizer.zero_grad()
        told = (lambda _: None) if has_own_metric else on_refresh
        loss_with_a_look(optimizer, objective, lambda operator: refresh_by_rule(optimizer, operator, told)).backward()
        clip_gradients(optimizer, max_gradient_norm, decay)
        optimizer.step()

    return counted(optimizer, step, lambda: not has_own_metric and has_fresh_sketch(optimizer))
