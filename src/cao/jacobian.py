"""The whole Jacobian of residuals at points: every row of a layer's input gets weights of its own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cao.autograd.derivatives import Gradient, derivative

Residuals: TypeAlias = Callable[[], list[Tensor]]
"""A function that returns the residuals as vectors."""


class PointwiseJacobian:
    """Computes J for the price of a few gradients, where each point of a vector has one residual.

    While the residuals are computed, each row of the input of a linear layer is given a copy of the layer's weights.
    The gradient of the sum of a residual vector with respect to the copies has one row per point: the rows of J. Which
    residual a row belongs to is found once, from a second gradient, of the residuals weighted by their numbers.
    """

    def __init__(self, residuals: Residuals, params: Sequence[Tensor]) -> None:
        self.residuals, self.params = residuals, params
        self._places: list[list[Tensor | None]] = []

    def __call__(self) -> Float[Tensor, "m n"]:
        """Return J where the parameters are now."""
        with RowWeights(self.params) as weights:
            vectors = self.residuals()
        owners, copies = [owner for owner, _ in weights.copies], [copy for _, copy in weights.copies]
        slopes = [derivative([vector], copies, [torch.ones_like(vector)]) for vector in vectors]
        if not self._has_places(slopes):
            numbers = [torch.arange(len(vector)).to(vector) for vector in vectors]
            numbered = [derivative([v], copies, [weight]) for v, weight in zip(vectors, numbers, strict=True)]
            self._places = [list(map(places_of, *parts)) for parts in zip(slopes, numbered, strict=True)]
        blocks = zip(vectors, slopes, self._places, strict=True)
        return torch.cat([self._block(len(vector), owners, parts, places) for vector, parts, places in blocks])

    def _has_places(self, slopes: list[list[Tensor | None]]) -> bool:
        """Whether the place of every row that has a slope has been found."""
        known = [place for places in self._places for place in places]
        parts = [part for row in slopes for part in row]
        return len(known) == len(parts) and all(map(is_placed, parts, known))

    def is_right(self) -> bool:
        """Whether Jᵀu, for a random u, is what reverse mode says: false if a point has two residuals in one vector."""
        try:
            jacobian = self()
        except (RuntimeError, ValueError, IndexError):
            return False
        vectors = self.residuals()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(len(v), generator=generator, dtype=torch.float64).to(v) for v in vectors]
        parts = derivative(vectors, self.params, weights)
        expected = torch.cat([flat_or_zero(part, p) for part, p in zip(parts, self.params, strict=True)])
        error = (jacobian.T @ torch.cat(weights) - expected).norm()
        return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * expected.norm())

    def _block(self, count: int, owners: list[int], parts: Gradient, places: list[Tensor | None]) -> Tensor:
        sizes = [p.numel() for p in self.params]
        block = self.params[0].new_zeros(count, sum(sizes))
        shares = block.split(sizes, dim=1)
        for owner, part, place in zip(owners, parts, places, strict=True):
            if part is not None and place is not None:
                shares[owner].index_add_(0, place.clamp_min(0), part.flatten(1))
        return block


class RowWeights(TorchFunctionMode):
    """Computes linear layers with a copy of the weights for each row of the input, and remembers the copies."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._owners = {id(param): index for index, param in enumerate(params)}
        self.copies: list[tuple[int, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a linear layer row by row, and anything else as ever."""
        call = self._linear if function is functional.linear else function
        return call(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.ndim != 2:
            return functional.linear(input, weight, bias)
        outputs = torch.bmm(self._copied(weight, len(input)), input.unsqueeze(2)).squeeze(2)
        return outputs if bias is None else outputs + self._copied(bias, len(input))

    def _copied(self, param: Tensor, count: int) -> Tensor:
        copy = param.expand(count, *param.shape)
        if id(param) in self._owners and param.requires_grad:
            copy = copy.detach().requires_grad_()
            self.copies.append((self._owners[id(param)], copy))
        return copy


def places_of(slopes: Tensor | None, numbered: Tensor | None) -> Tensor | None:
    """Return the number of each row's residual, by which its numbered slope is the larger; −1 where it has no slope."""
    if slopes is None or numbered is None:
        return None
    slopes, numbered = slopes.flatten(1), numbered.flatten(1)
    # Scaled, because squares of small slopes would vanish.
    scale = slopes.abs().amax(dim=1, keepdim=True)
    shapes = slopes / scale
    places = (shapes * numbered / scale).sum(dim=1) / shapes.square().sum(dim=1)
    return places.nan_to_num(-1.0, -1.0, -1.0).round().long()


def is_placed(slopes: Tensor | None, places: Tensor | None) -> bool:
    """Whether every row with a slope has a place."""
    if slopes is None or places is None:
        return slopes is None
    return len(slopes) == len(places) and not bool(slopes[places < 0].any())


def flat_or_zero(part: Tensor | None, param: Tensor) -> Tensor:
    """Return a gradient as a vector; zeros where there is none."""
    return param.new_zeros(param.numel()) if part is None else part.reshape(-1)
