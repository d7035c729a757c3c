"""AdaGrad: torch's own."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.assumptions import CLIP_GRADIENT, WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class AdaGradConfig(Settings):
    """AdaGrad (torch.optim.Adagrad)."""

    name: tyro.conf.Suppress[Literal["adagrad"]] = "adagrad"
    lr: float = 0.01
    """Learning rate."""
    eps: float = 1e-10
    """Added to the denominator."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build torch's Adagrad, its gradients clipped."""
        from torch.optim import Adagrad

        from cao_lab.runs.method import first_order, trainable

        optimizer = Adagrad(trainable(model), lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        return first_order(optimizer, self.max_gradient_norm, self.weight_decay)
