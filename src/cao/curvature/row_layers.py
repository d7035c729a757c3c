"""Linear layers that remember the rows that pass through them, for gradients with a row for each of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cao.autograd.derivatives import derivative

# Rows of J are put into their places piece by piece, of so many numbers: 32 MiB in float64.
LARGEST_PIECE = 1 << 22


class NoJacobianError(Exception):
    """Says why the Jacobian cannot be formed from the rows of linear layers."""


class RowLayers(TorchFunctionMode):
    """Remembers each passage of rows through a linear layer, for gradients with a row for each of them."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._params = params
        self._numbers = {id(param): index for index, param in enumerate(params) if param.numel()}
        self._passages: list[Passage] = []
        self._rows: Counter[int] = Counter()

    @property
    def points(self) -> int:
        """The most rows that any layer received."""
        return max(self._rows.values(), default=0)

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
        if torch.is_autocast_enabled(input.device.type):
            raise NoJacobianError("residuals are computed under autocast")
        self._passages.append(Passage(owners))
        self._rows[id(weight)] += len(input)
        outputs: Tensor = Forwards.apply(input, weight, bias, self._passages[-1])  # type: ignore[no-untyped-call]
        return outputs

    def slopes(self, vector: Float[Tensor, " m"], weights: Float[Tensor, " m"]) -> tuple[list["Rows"], list[int]]:
        """Return the gradients of a weighted sum, row by row, and the parameters that have others too, by number."""
        for passage in self._passages:
            passage.begin()
        with observed():
            others = derivative([vector], self._params, [weights])
        rows = [part for passage in self._passages for part in passage.end()]
        return rows, [index for index, part in enumerate(others) if part is not None]


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

    def end(self) -> "list[Rows]":
        """Return the gradients of the weights and of the bias, row by row, where there are any."""
        factors, shift = self._factors, self._shift
        self._is_open, self._factors, self._shift = False, [], None
        weight, bias = self.owners
        rows = []
        if factors and weight is not None:
            outputs, inputs = zip(*factors, strict=True)
            rows.append(Rows(weight, torch.stack(outputs, dim=2), torch.stack(inputs, dim=1)))
        if shift is not None and bias is not None:
            rows.append(Rows(bias, shift.unsqueeze(2), None))
        return rows


class Rows(NamedTuple):
    """Gradients of one parameter with a row for each row of a layer's input: sums of outer products, or of a bias."""

    owner: int
    outputs: Float[Tensor, "m o f"]
    inputs: Float[Tensor, "m f i"] | None

    def pieces(self) -> Iterator[slice]:
        """Cut the rows so that no piece has many numbers."""
        width = self.outputs.shape[1] * (1 if self.inputs is None else self.inputs.shape[2])
        count = max(1, LARGEST_PIECE // width)
        return (slice(first, first + count) for first in range(0, len(self.outputs), count))

    def gradients(self, chosen: slice | Tensor) -> Float[Tensor, "p n"]:
        """Return the gradients of some of the rows."""
        outputs = self.outputs[chosen]
        return (outputs if self.inputs is None else torch.bmm(outputs, self.inputs[chosen])).flatten(1)

    def add_to(self, target: Float[Tensor, "r n"], places: Int[Tensor, " m"]) -> None:
        """Add each row to the row of the target that is its place."""
        for piece in self.pieces():
            target.index_add_(0, places[piece].clamp_min(0), self.gradients(piece).to(target.dtype))

    def places(self, numbered: "Rows", count: int) -> Int[Tensor, " m"]:
        """Return the number of each row's residual, the factor to its numbered gradients; −1 where there is none."""
        pieces = [places_of(self.gradients(piece), numbered.gradients(piece), count) for piece in self.pieces()]
        return torch.cat(pieces)

    def is_placed(self, places: Int[Tensor, " m"]) -> bool:
        """Whether every row with a gradient has a place."""
        return len(places) == len(self.outputs) and not bool(self.gradients(places < 0).any())


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


def places_of(slopes: Float[Tensor, "m n"], numbered: Float[Tensor, "m n"], count: int) -> Int[Tensor, " m"]:
    """Return the factors between slopes of one row and the other, as far as they are numbers below the count."""
    # Scaled, because squares of small slopes would vanish.
    scale = slopes.abs().amax(dim=1, keepdim=True)
    shapes = slopes / scale
    places = (shapes * numbered / scale).sum(dim=1) / shapes.square().sum(dim=1)
    places = places.nan_to_num(-1.0, -1.0, -1.0).round().long()
    return places.where(places < count, -1)


@contextmanager
def observed() -> Iterator[None]:
    """Let what fails while layers are observed be the reason why there is no Jacobian, but for a lack of memory.

    Residuals that contain derivatives by the weights fail, which have none here, and so do some transforms of torch.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NoJacobianError) or lacks_memory(error):
            raise
        line = (str(error).splitlines() or [""])[0]
        raise NoJacobianError(f"linear layers cannot be observed ({type(error).__name__}: {line})") from error


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that memory is exhausted: on the processor torch has no class for it."""
    words = ("out of memory", "you tried to allocate")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)
