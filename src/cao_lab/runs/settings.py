"""What the settings of every optimizer have in common."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from cao_lab.runs.stepper import Stepper

# Products of two settings must not overflow single precision.
LARGEST_NUMBER = 1e30


class ConfigError(Exception):
    """A run or settings that cannot be meant; no ValueError, which tyro would put into words of its own."""


@dataclass(frozen=True)
class Settings:
    """The settings of an optimizer, whatever it is."""

    name: str
    lr: float

    needs_full_batch: ClassVar[bool] = False
    can_be_shared: ClassVar[bool] = True
    always_in_label: ClassVar[tuple[str, ...]] = ()
    at_least_one: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse settings that make no sense with any data."""
        for field, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field} must be finite, got {value}")
            if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
                raise ConfigError(f"{field} must be at most {LARGEST_NUMBER:g}, got {value:g}")
            if field in self.at_least_one and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")
            if field in ("lr", "adamw_lr") and value < 0:
                raise ConfigError(f"{field} must not be negative, got {value}")
            if field == "max_gradient_norm" and value is not None and value <= 0:
                raise ConfigError(f"{field} must be positive, or None, got {value}")

    def build(self, model: "nn.Module", seed: int) -> "Stepper":
        """Build the optimizer for the trainable parameters of a model."""
        raise NotImplementedError

    def gradients_per_step(self, product: float) -> float:
        """Return what a step costs in gradients, a product with the curvature costing `product` of them."""
        return 1.0
