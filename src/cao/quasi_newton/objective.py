"""A training closure as a function of one flat position."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.curvature.operators import agreed
from cao.linalg.flat import FlatParams


@dataclass(frozen=True)
class Iterate:
    """A position, and the loss and its gradient there."""

    position: Float[Tensor, " n"]
    value: float
    gradient: Float[Tensor, " n"]
    largest: float
    """The gradient's entry of largest magnitude, as a magnitude; NaN if any entry is."""
    slope: float = math.nan
    """The slope along the direction that led here, if there was one."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every entry of the gradient are finite."""
        return math.isfinite(self.value) and math.isfinite(self.largest)


class Objective:
    """A closure as a function of the flat position, averaged over processes if there are several."""

    def __init__(self, closure: Callable[[], Any], params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self.closure, self.params, self.group = closure, params, group
        self.loss: Any = None

    def __call__(self, position: Float[Tensor, " n"], direction: Float[Tensor, " n"] | None = None) -> Iterate:
        """Move the parameters there, and return the loss, the gradient and its slope: one read from the device."""
        self.move(position)
        if dist.is_available() and dist.is_initialized():
            numbers = agreed(self._evaluated, self.group, position.device)
            dist.all_reduce(numbers, group=self.group)
            numbers /= dist.get_world_size(self.group)
        else:
            numbers = self._evaluated()
        gradient = numbers[:-1]
        facts = [numbers[-1], gradient.abs().max()]
        if direction is not None:
            facts.append(gradient @ direction)
        value, largest, *slope = torch.stack(facts).tolist()
        return Iterate(position, value, gradient, largest, *slope)

    def _evaluated(self) -> Float[Tensor, " n+1"]:
        """Return the gradient, and behind it the loss, as this process sees them."""
        self.loss = self.closure()
        value = number_of(self.loss)
        if all(p.grad is None for p in self.params):
            raise ValueError("the closure left no gradient; let it call loss.backward() before it returns the loss")
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self.params]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        return torch.cat([flat, value.to(flat)])

    def move(self, position: Float[Tensor, " n"]) -> None:
        """Put the parameters at a position."""
        for param, piece in zip(self.params, FlatParams(self.params).split(position), strict=True):
            param.copy_(piece)

    def position(self) -> Float[Tensor, " n"]:
        """Return where the parameters are."""
        return torch.cat([p.reshape(-1) for p in self.params])


def number_of(loss: Any) -> Float[Tensor, " 1"]:
    """Return what a closure has returned as a vector of one number."""
    number = torch.as_tensor(loss).detach() if isinstance(loss, Tensor | Real) or hasattr(loss, "__array__") else None
    if number is None or number.numel() != 1 or number.is_complex():
        got = type(loss).__name__ if number is None else f"shape {tuple(number.shape)} of {number.dtype}"
        raise ValueError(f"the closure must return the loss, one real number, got {got}")
    return number.reshape(1)


def change_between(here: Iterate, there: Iterate) -> float:
    """Return the larger of the changes of the loss and of any parameter."""
    return max(abs(there.value - here.value), float((there.position - here.position).abs().max()))
