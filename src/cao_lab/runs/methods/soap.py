"""SOAP, of pytorch_optimizer."""

# ruff: noqa: PLC0415

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import tyro

from cao_lab.runs.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.method import Method


@dataclass(frozen=True)
class SOAPConfig(Settings):
    """SOAP (pytorch_optimizer): Adam in the eigenbasis of Shampoo's preconditioner."""

    name: tyro.conf.Suppress[Literal["soap"]] = "soap"
    lr: float = 3e-3
    """Learning rate."""
    beta1: float = 0.95
    """Decay of the gradient's mean."""
    beta2: float = 0.95
    """Decay of the gradient's mean square and of the preconditioner."""
    weight_decay: float = 0.01
    """Weight decay, decoupled."""
    update_every: int = 10
    """Steps from one eigenbasis to the next."""

    at_least_one: ClassVar[tuple[str, ...]] = ("update_every",)

    def build(self, model: "nn.Module", seed: int) -> "Method":
        """Build pytorch_optimizer's SOAP."""
        from cao_lab.runs.method import baseline, first_order, trainable

        optimizer = baseline("SOAP")(
            trainable(model),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            precondition_frequency=self.update_every,
        )
        return first_order(optimizer)
