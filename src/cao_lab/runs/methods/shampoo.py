"""Shampoo, of pytorch_optimizer."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.assumptions import BASE_LR
from cao_lab.runs.methods.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.methods.method import Method


@dataclass(frozen=True)
class ShampooConfig(Settings):
    """Shampoo (pytorch_optimizer's ScalableShampoo): Kronecker factors of the gradient's second moment."""

    name: tyro.conf.Suppress[Literal["shampoo"]] = "shampoo"
    lr: float = BASE_LR
    """Learning rate; its steps are as long as SGD's."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the preconditioner."""
    weight_decay: float = 0.01
    """Weight decay, decoupled."""
    update_every: int = 10
    """Steps from one preconditioner to the next."""

    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build pytorch_optimizer's scalable Shampoo."""
        from cao_lab.runs.methods.method import baseline, first_order, trainable

        optimizer = baseline("ScalableShampoo")(
            trainable(model),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            decoupled_weight_decay=True,
            preconditioning_compute_steps=self.update_every,
        )
        return first_order(optimizer)
