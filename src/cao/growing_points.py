"""Residuals at points that are drawn as they are needed: more of them once those in use are overfitted."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from cao.checks import is_count, is_number
from cao.curvature.least_squares import LeastSquares
from cao.curvature.operators import agreed

Points: TypeAlias = Tensor | Sequence[Tensor]

# A linear fit of p parameters to m points has a held-out mean square of (m + p)/(m − p) times the fitted one: with this
# factor, points are added until there are three for each parameter that the problem makes use of.
FACTOR = 2.0
# The seed of points that are held out; those in use have the seeds after it.
HELD_OUT_SEED = 0


class Comparison(NamedTuple):
    """Mean squares of the residuals at the points in use, and at points that are not."""

    points: int
    """How many are in use."""
    fitted: float
    held_out: float


class GrowingPoints(LeastSquares):
    """A `LeastSquares` whose points grow in number when they are fitted better than points that are held out.

    The loss is the sum of the mean squares of all tensors that `residuals(points)` returns, so that it stays the same
    when points are added. `grow` compares it with the same at points that no step sees, and doubles the points in use
    where the held-out one is larger by the factor::

        source = GrowingPoints(residuals, model.parameters(), draw)
        optimizer = SketchedLBFGS(model.parameters(), source=source)
        for _ in range(100):
            optimizer.step(closure)  # zero_grad, and return source.backward()
            if source.grow():
                optimizer.resampled()

    Few points make the beginning cheap, and points are added, never exchanged, because those in use have been learnt.

    Args:
        residuals: a function of points, without weights by their number.
        params: the parameters.
        draw: `draw(n, seed)` returns n points, as a tensor with a row for each or as several tensors, such as one for
            each side, whose lengths grow with n. Another seed must give other points.
        count: points in use at first.
        held_out: points to compare with.
        most: points are not doubled beyond this number.
        factor: how many times larger the held-out mean square may be.
        chunk: more points than this are evaluated and differentiated in parts, one after the other.
        max_jacobian_size: as for `LeastSquares`.
    """

    def __init__(
        self,
        residuals: Callable[[Any], Tensor | Sequence[Tensor]],
        params: Iterable[Tensor],
        draw: Callable[[int, int], Points],
        *,
        count: int = 500,
        held_out: int = 1_000,
        most: int = 100_000,
        factor: float = FACTOR,
        chunk: int = 10_000,
        **settings: Any,
    ) -> None:
        for name, number in (("count", count), ("held_out", held_out), ("most", most), ("chunk", chunk)):
            if not is_count(number):
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        if not (is_number(factor) and factor > 1):
            raise ValueError(f"factor must be larger than 1, got {factor!r}")
        if not callable(draw):
            raise ValueError(f"draw must be a function of a number and a seed, got {type(draw).__name__}")
        self._at, self._draw, self.factor, self.most, self.chunk = residuals, draw, factor, most, chunk
        self.comparisons: list[Comparison] = []
        """What `grow` has seen, at each call."""
        self._held_out = self._drawn(held_out, HELD_OUT_SEED)
        self._start(count)
        super().__init__(lambda: self._weighted(self._in_use), params, **settings)
        self._settings = settings
        self._divide()

    @property
    def points(self) -> Points:
        """The points in use, as `draw` returns them."""
        return self._as_drawn(self._in_use)

    def terms(self) -> list[Tensor]:
        """Return the residuals at the points in use, weighted so that the loss is the sum of their squares."""
        return self._tensors()

    def loss(self) -> Tensor:
        """Return the sum of mean squares at the points in use, with its graph."""
        return torch.stack([part.square().sum() for part in self.terms()]).sum()

    @property
    def is_overfitted(self) -> bool:
        """Whether the points in use were fitted better than those held out, by the factor, when last compared."""
        return bool(self.comparisons) and self.comparisons[-1].held_out > self.factor * self.comparisons[-1].fitted

    def grow(self) -> bool:
        """Compare, and double the points in use if they are overfitted; return whether any were added."""
        self.comparisons.append(Comparison(self.count, *self._compared().tolist()))
        if not self.is_overfitted or 2 * self.count > self.most:
            return False
        self._double()
        self._divide()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return how many points are in use, and all comparisons: the points are drawn again from their seeds."""
        return {"start": self._first, "count": self.count, "comparisons": [list(seen) for seen in self.comparisons]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw the points that were in use."""
        self._start(state["start"])
        while self.count < state["count"]:
            self._double()
        self._divide()
        self.comparisons = [Comparison(*seen) for seen in state["comparisons"]]

    def _start(self, count: int) -> None:
        self._first, self.count, self._in_use = count, count, self._drawn(count, HELD_OUT_SEED + 1)
        others = self._drawn(count, HELD_OUT_SEED)
        if all(torch.equal(one, other) for one, other in zip(self._in_use, others, strict=True)):
            raise ValueError("draw returned the same points for the seeds 0 and 1; let the seed decide which are drawn")

    def _double(self) -> None:
        doublings = (self.count // self._first).bit_length()
        more = self._drawn(self.count, HELD_OUT_SEED + 1 + doublings)
        self._in_use = [joined(one, other) for one, other in zip(self._in_use, more, strict=True)]
        self.count *= 2

    def _divide(self) -> None:
        """Make a source of its own of each chunk, if there are more points than one may hold."""
        number = min(-(-self.count // self.chunk), *map(len, self._in_use), self.count)
        if number == 1:
            self._parts = []
            return
        split = [part.detach().tensor_split(number) for part in self._in_use]
        chunks = [
            [piece.requires_grad_(whole.requires_grad) for piece, whole in zip(pieces, self._in_use, strict=True)]
            for pieces in zip(*split, strict=True)
        ]
        # How many residuals there are in all is known when each chunk has been looked at.
        counts = [[tensor.numel() for tensor in self._evaluated(chunk)] for chunk in chunks]
        sizes = [sum(numbers) for numbers in zip(*counts, strict=True)]
        self._parts = [
            LeastSquares(partial(self._weighted, chunk, sizes), self.params, **self._settings) for chunk in chunks
        ]

    def _drawn(self, count: int, seed: int) -> list[Tensor]:
        """Draw points; each process has its own."""
        if dist.is_available() and dist.is_initialized():
            seed = seed * dist.get_world_size() + dist.get_rank()
        points = self._draw(count, seed)
        self._is_one = isinstance(points, Tensor)
        parts = [points] if isinstance(points, Tensor) else list(points) if isinstance(points, Iterable) else []
        if not parts or not all(isinstance(part, Tensor) and part.ndim and len(part) for part in parts):
            raise ValueError(
                f"draw({count}, {seed}) must return a tensor with a row for each point, or several, got "
                f"{[tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]}"
            )
        return parts

    def _as_drawn(self, parts: list[Tensor]) -> Points:
        return parts[0] if self._is_one else tuple(parts)

    def _evaluated(self, parts: list[Tensor]) -> list[Tensor]:
        """Return the residuals at some points."""
        with torch.enable_grad():  # They may contain derivatives of a network.
            result = self._at(self._as_drawn(parts))
        return [result] if isinstance(result, Tensor) else list(result)

    def _weighted(self, parts: list[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the residuals at some points, over the root of their number, or of that of all points."""
        tensors = self._evaluated(parts)
        sizes = sizes or [tensor.numel() for tensor in tensors]
        return [tensor / max(size, 1) ** 0.5 for tensor, size in zip(tensors, sizes, strict=True)]

    def _compared(self) -> Float64[Tensor, "2"]:
        """Return the mean squares at the points in use and at those held out, the means over all processes."""

        def compute() -> Tensor:
            others = torch.stack([part.detach().square().sum() for part in self._weighted(self._held_out)]).sum()
            return torch.stack([self.values().square().sum(), others]).double()

        if not (dist.is_available() and dist.is_initialized()):
            return compute()
        numbers = agreed(compute, None, self.params[0].device)
        dist.all_reduce(numbers)
        return numbers / dist.get_world_size()


def joined(some: Tensor, others: Tensor) -> Tensor:
    """Return both draws together; what may be differentiated by stays so."""
    return torch.cat([some.detach(), others.detach()]).requires_grad_(some.requires_grad)
