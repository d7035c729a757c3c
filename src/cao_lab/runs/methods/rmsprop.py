"""RMSProp: torch's own."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.assumptions import ADAM_LR, CLIP_GRADIENT, WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class RMSPropConfig(Settings):
    """RMSProp (torch.optim.RMSprop)."""

    name: tyro.conf.Suppress[Literal["rmsprop"]] = "rmsprop"
    lr: float = ADAM_LR
    """Learning rate."""
    alpha: float = 0.99
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build torch's RMSprop, its gradients clipped."""
        from torch.optim import RMSprop

        from cao_lab.runs.method import first_order, trainable

        decay = self.weight_decay
        optimizer = RMSprop(trainable(model), lr=self.lr, alpha=self.alpha, eps=self.eps, weight_decay=decay)
        return first_order(optimizer, self.max_gradient_norm, decay)
