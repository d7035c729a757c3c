"""Curves of the curvature in TensorBoard: `watch(optimizer, to_tensorboard(SummaryWriter()))`."""

from collections.abc import Callable
from typing import Protocol

from cao.integrations.watching import Refreshed, scalars


class ScalarWriter(Protocol):
    """What is needed of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one point of a curve."""


def to_tensorboard(writer: ScalarWriter) -> Callable[[Refreshed], None]:
    """Return a function that writes each refresh: sharpness, rank, damping, refreshes, products and time."""

    def tell(event: Refreshed) -> None:
        for name, value in scalars(event).items():
            writer.add_scalar(name, value, event.step)

    return tell
