"""CAO with its own defaults, over SGD: it has SGD's settings, and none of a sketch."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

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


def with_rules(optimizer: "CAO", max_gradient_norm: float | None, decay: float = 0.0) -> "Method":
    """Return the method that lets CAO look at the curvature when its rules ask, and clips its base's gradient."""
    from cao_lab.runs.method import clip_gradients
    from cao_lab.runs.refresh import counted, has_fresh_sketch, loss_with_a_look, refresh_by_rule

    def step(objective: "Objective", on_refresh: "OnRefresh") -> None:
        optimizer.zero_grad()
        loss_with_a_look(
            optimizer, objective, lambda operator: refresh_by_rule(optimizer, operator, on_refresh)
        ).backward()
        clip_gradients(optimizer, max_gradient_norm, decay)
        optimizer.step()

    return counted(optimizer, step, lambda: has_fresh_sketch(optimizer))
