"""The whole Jacobian of residuals at points, from what linear layers do with each row of their input."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cao.autograd.derivatives import Gradient, derivative

Residuals: TypeAlias = Callable[[], list[Tensor]]
"""A function that returns the residuals as vectors."""

# Each residual of a point takes a backward pass; with more of them, the products of a sketch are cheaper than J.
MOST_PER_POINT = 8


class PointwiseJacobian:
    """Computes J for the price of a few gradients, where each point of a vector has one residual.

    The gradient with respect to the weights of a linear layer is a sum of outer products, one for each row and for each
    time that the row passes through the layer: once forwards and, where residuals contain derivatives, several times
    backwards. One backward pass from the sum of a residual vector gives the factors. The products of each row make a
    row of J. Which residual a row belongs to is found from a second pass, of the residuals weighted by their numbers,
    and remembered as long as it leads to the right J.
    """

    def __init__(self, residuals: Residuals, params: Sequence[Tensor]) -> None:
        self.residuals, self.params = residuals, params
        self.per_point = 1
        """How many residuals a point has on average, by the last call."""
        self._places: dict[tuple[int, int], list[Tensor | None]] = {}

    def __call__(self) -> Float[Tensor, "m n"] | None:
        """Return J where the parameters are now, column after column of the residuals.

        None if it cannot be formed in this way, as where a point has two residuals in one vector or a parameter is used
        outside linear layers, or if points have so many residuals that it would be expensive.
        """
        try:
            layers, vectors = self._passed()
            if self.per_point > MOST_PER_POINT:
                return None
            for _ in range(2 if self._places else 1):
                jacobian = self._formed(layers, vectors)
                if self._is_right(jacobian):
                    return jacobian
                self._places.clear()  # Those that were found elsewhere may have changed.
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            pass  # Such as residuals that contain derivatives by the weights, which have none here.
        return None

    def _passed(self) -> "tuple[RowLayers, list[Tensor]]":
        """Return the residuals, and what they have passed through."""
        with RowLayers(self.params) as layers:
            vectors = self.residuals()
        self.per_point = max(1, round(sum(map(len, vectors)) / max(1, layers.points)))
        return layers, vectors

    def _formed(self, layers: "RowLayers", vectors: list[Tensor]) -> Float[Tensor, "m n"]:
        """Put the gradients of all rows into their places."""
        sizes = [p.numel() for p in self.params]
        jacobian = self.params[0].new_zeros(sum(map(len, vectors)), sum(sizes))
        for number, block in enumerate(jacobian.split([len(vector) for vector in vectors])):
            shares, slopes = block.split(sizes, dim=1), layers.slopes(vectors[number], torch.ones_like(vectors[number]))
            places = self._located(number, slopes, layers, vectors[number])
            for owner, slope, place in zip(layers.owners, slopes, places, strict=True):
                if owner is not None and slope is not None and place is not None:
                    shares[owner].index_add_(0, place.clamp_min(0), slope.flatten(1))
        return jacobian

    def _located(self, number: int, slopes: Gradient, layers: "RowLayers", vector: Tensor) -> list[Tensor | None]:
        """Return which residual of a vector each row belongs to; remembered until a row without a place has a slope."""
        places = self._places.get((number, len(vector)), [])
        if len(places) != len(slopes) or not all(map(is_placed, slopes, places)):
            numbers = torch.arange(len(vector), dtype=vector.dtype, device=vector.device)
            numbered = layers.slopes(vector, numbers)
            places = [places_of(*pair, len(vector)) for pair in zip(slopes, numbered, strict=True)]
            self._places[number, len(vector)] = places
        return places

    def _is_right(self, jacobian: Float[Tensor, "m n"]) -> bool:
        """Whether Jᵀu, for a random u, is what reverse mode says; what is not finite says nothing."""
        vectors = self.residuals()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(len(v), generator=generator, dtype=torch.float64).to(v) for v in vectors]
        parts = derivative(vectors, self.params, weights)
        expected = torch.cat([flat_or_zero(part, p) for part, p in zip(parts, self.params, strict=True)])
        error = (jacobian.T @ torch.cat(weights) - expected).norm()
        return not bool(error > torch.finfo(expected.dtype).eps ** 0.5 * expected.norm())


class RowLayers(TorchFunctionMode):
    """Remembers each passage of rows through a linear layer, for gradients with a row for each of them."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._params = [param for param in params if param.requires_grad]
        self._numbers = {id(param): index for index, param in enumerate(params) if param.requires_grad}
        self._passages: list[Passage] = []
        self._rows: Counter[int] = Counter()

    @property
    def points(self) -> int:
        """The most rows that any layer received."""
        return max(self._rows.values(), default=0)

    @property
    def owners(self) -> list[int | None]:
        """The numbers of the parameters that `slopes` has gradients of; None for those that are not asked for."""
        return [owner for passage in self._passages for owner in passage.owners]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember a linear layer, and compute anything else as ever."""
        call = self._linear if function is functional.linear else function
        return call(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        owners = self._numbers.get(id(weight)), self._numbers.get(id(bias))
        # A weight that is computed from parameters has a gradient that is not noted.
        is_other = any(
            owner is None and operand is not None and operand.requires_grad
            for owner, operand in zip(owners, (weight, bias), strict=True)
        )
        if input.ndim != 2 or owners == (None, None) or is_other or not torch.is_grad_enabled():
            return functional.linear(input, weight, bias)
        self._passages.append(Passage(owners))
        self._rows[id(weight)] += len(input)
        outputs: Tensor = Forwards.apply(input, weight, bias, self._passages[-1])  # type: ignore[no-untyped-call]
        return outputs

    def slopes(self, vector: Float[Tensor, " m"], weights: Float[Tensor, " m"]) -> list[Tensor | None]:
        """Return the gradients of a weighted sum, row by row, in the order of their owners."""
        for passage in self._passages:
            passage.begin()
        if any(part is not None for part in derivative([vector], self._params, [weights])):
            raise ValueError("a parameter is used outside linear layers")
        return [slope for passage in self._passages for slope in passage.end()]


class Passage:
    """One call of a linear layer: the parameters it used and, while a gradient is taken, the factors of each row."""

    def __init__(self, owners: tuple[int | None, int | None]) -> None:
        self.owners = owners
        self._is_open = False
        self._factors: list[tuple[Tensor, Tensor]] = []
        self._shift: Tensor | None = None

    def begin(self) -> None:
        """Listen to a backward pass."""
        self._is_open, self._factors, self._shift = True, [], None

    def note(self, outputs: Float[Tensor, "m o"], inputs: Float[Tensor, "m i"], *, has_bias: bool) -> None:
        """Note that outer products are part of the gradient of the weights, and whether the outputs are the bias's."""
        if self._is_open:
            self._factors.append((outputs.detach(), inputs.detach()))
            self._shift = outputs.detach() if has_bias else self._shift

    def end(self) -> tuple[Float[Tensor, "m o i"] | None, Float[Tensor, "m o"] | None]:
        """Return the gradients of the weights and of the bias, row by row; None where there is none."""
        factors, shift = self._factors, self._shift
        self._is_open, self._factors, self._shift = False, [], None
        if not factors:
            return None, None
        outputs, inputs = zip(*factors, strict=True)
        weight, bias = self.owners
        products = None if weight is None else torch.bmm(torch.stack(outputs, dim=2), torch.stack(inputs, dim=1))
        return products, None if bias is None else shift


class Forwards(Function):
    """A linear layer, x ↦ x Wᵀ + b, whose backward pass notes its factors and is itself such a function."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, passage: Passage) -> Tensor:
        """Return the layer's outputs."""
        ctx.save_for_backward(inputs, weight)
        ctx.passage, ctx.has_bias = passage, bias is not None
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        """Return the gradient of the input alone; those of the parameters are in the passage, row by row."""
        inputs, weight = ctx.saved_tensors
        ctx.passage.note(slope, inputs, has_bias=ctx.has_bias)
        onwards = Backwards.apply(slope, weight, ctx.passage) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        return onwards, None, None, None


class Backwards(Function):
    """The way back through a linear layer, x ↦ x W, whose backward pass notes its factors too, and leads forwards."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, weight: Tensor, passage: Passage) -> Tensor:
        """Return the gradient of the layer's inputs."""
        ctx.save_for_backward(slope, weight)
        ctx.passage = passage
        return slope @ weight

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> Any:
        """Return the gradient of the slope alone."""
        slope, weight = ctx.saved_tensors
        ctx.passage.note(slope, change, has_bias=False)
        onwards = Forwards.apply(change, weight, None, ctx.passage) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        return onwards, None, None


def places_of(slopes: Tensor | None, numbered: Tensor | None, count: int) -> Tensor | None:
    """Return the number of each row's residual, the factor between its two slopes; −1 where there is none."""
    if slopes is None or numbered is None:
        return None
    slopes, numbered = slopes.flatten(1), numbered.flatten(1)
    # Scaled, because squares of small slopes would vanish.
    scale = slopes.abs().amax(dim=1, keepdim=True)
    shapes = slopes / scale
    places = (shapes * numbered / scale).sum(dim=1) / shapes.square().sum(dim=1)
    places = places.nan_to_num(-1.0, -1.0, -1.0).round().long()
    return places.where(places < count, -1)


def is_placed(slopes: Tensor | None, places: Tensor | None) -> bool:
    """Whether every row with a slope has a place."""
    if slopes is None or places is None:
        return slopes is None
    return len(slopes) == len(places) and not bool(slopes[places < 0].any())


def flat_or_zero(part: Tensor | None, param: Tensor) -> Tensor:
    """Return a gradient as a vector; zeros where there is none."""
    return param.new_zeros(param.numel()) if part is None else part.reshape(-1)
