"""Shampoo, of pytorch_optimizer."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.assumptions import WEIGHT_DECAY
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class ShampooConfig(Settings):
    """Shampoo (pytorch_optimizer): Kronecker factors of the gradient's second moment, one per dimension."""

    name: tyro.conf.Suppress[Literal["shampoo"]] = "shampoo"
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = WEIGHT_DECAY
    """Weight decay, added to the gradient."""
    update_every: int = 1
    """Steps from one preconditioner to the next; it does not move before the first."""

    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build pytorch_optimizer's Shampoo; the state of its scalable one holds objects, which no checkpoint may."""
        from cao_lab.runs.method import baseline, first_order, trainable

        optimizer = baseline("Shampoo")(
            trainable(model),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            preconditioning_compute_steps=self.update_every,
        )
        return first_order(optimizer)
