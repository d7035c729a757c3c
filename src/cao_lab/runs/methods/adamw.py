"""Adam with decoupled weight decay: torch's own."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.assumptions import ADAM_LR, CLIP_GRADIENT
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class AdamWConfig(Settings):
    """Adam with decoupled weight decay (torch.optim.AdamW)."""

    name: tyro.conf.Suppress[Literal["adamw"]] = "adamw"
    lr: float = ADAM_LR
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the gradient's mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Weight decay, decoupled from the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient to this norm."""

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build torch's AdamW, its gradients clipped."""
        from torch.optim import AdamW

        from cao_lab.runs.method import first_order, trainable

        betas = (self.beta1, self.beta2)
        optimizer = AdamW(trainable(model), lr=self.lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)
        return first_order(optimizer, self.max_gradient_norm)
