"""SGD with momentum: torch's own."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.assumptions import BASE_LR, CLIP_GRADIENT, WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class SGDConfig(Settings):
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    name: tyro.conf.Suppress[Literal["sgd"]] = "sgd"
    lr: float = BASE_LR
    """Learning rate."""
    momentum: float = 0.9
    """Momentum; 0 turns it off."""
    nesterov: bool = False
    """Use Nesterov's form of momentum."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    max_gradient_norm: float | None = CLIP_GRADIENT
    """Clip the gradient (weight decay included) to this norm."""

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build torch's SGD, its gradients clipped."""
        from torch.optim import SGD

        from cao_lab.runs.method import first_order, trainable

        optimizer = SGD(
            trainable(model),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )
        return first_order(optimizer, self.max_gradient_norm, self.weight_decay)
