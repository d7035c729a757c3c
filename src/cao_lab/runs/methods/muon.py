"""Muon, of pytorch_optimizer."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro

from cao_lab.assumptions import ADAM_LR
from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class MuonConfig(Settings):
    """Muon (pytorch_optimizer): orthogonalised momentum for hidden weights, AdamW for the rest."""

    name: tyro.conf.Suppress[Literal["muon"]] = "muon"
    lr: float = 0.02
    """Learning rate of the hidden weight matrices."""
    momentum: float = 0.95
    """Momentum."""
    weight_decay: float = 0.01
    """Weight decay, decoupled."""
    adamw_lr: float = ADAM_LR
    """Learning rate of the first and last layer, gains and biases."""

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build pytorch_optimizer's Muon, which is told which weights are hidden."""
        from cao_lab.runs.method import baseline, first_order, trainable

        params = trainable(model)
        matrices = [p for p in params if p.ndim >= 2]
        # The first and last layers are not hidden, and go to AdamW with the gains and biases.
        hidden = {id(p) for p in matrices[1:-1]}
        groups = [
            {"params": [p for p in params if id(p) in hidden], "lr": self.lr, "use_muon": True},
            {"params": [p for p in params if id(p) not in hidden], "lr": self.adamw_lr, "use_muon": False},
        ]
        optimizer = baseline("Muon")(
            [{**group, "weight_decay": self.weight_decay} for group in groups if group["params"]],
            momentum=self.momentum,
        )
        return first_order(optimizer)
