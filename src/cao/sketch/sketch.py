"""The sketch of the curvature, what an optimizer has done so far, and how both are laid out and renewed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.flat import FlatParams, storage_order
from cao.rules.refresh import Track

# How much of a fresh random direction each vector of a warm start is given, relative to its length. Where the Hessian
# is block diagonal, iteration alone would never lead out of the blocks that the last subspace lies in.
FRESH_SHARE = 0.01


@dataclass(frozen=True)
class Sketch:
    """The curvature in use: eigenpairs over the trainable parameters, and the damping that goes with them."""

    values: list[float]
    """Eigenvalues λ, the sharpest first: the largest |λ|, or with the rule "clip" the largest λ."""
    residuals: list[float]
    """‖Hv − λv‖ of each pair."""
    damping: float
    """The damping η chosen at this refresh."""
    step: int
    """The step it was taken at."""
    params: FlatParams = field(compare=False, repr=False)
    """The parameters it covers, in the optimizer's order."""
    rows: Float[Tensor, "k n"] = field(compare=False, repr=False)
    """The vectors as the rows of one matrix, over the parameters in storage order."""
    age: int = 0
    """Steps taken since then."""

    @cached_property
    def storage(self) -> FlatParams:
        """The parameters in the order of the rows."""
        return FlatParams(storage_order(self.params.params))

    @cached_property
    def places(self) -> dict[Tensor, int]:
        """Where each parameter begins in the rows."""
        storage = self.storage
        return dict(zip(storage.params, accumulate(storage.sizes, initial=0), strict=False))

    @property
    def vectors(self) -> Float[Tensor, "n k"]:
        """The eigenvectors as columns, over the parameters in the optimizer's order; a copy."""
        return self.params.scaled(self.storage.reorder(self.rows.T, self.params), -1)

    def start(self, storage: FlatParams, rank: int, generator: torch.Generator) -> Float[Tensor, "n k"]:
        """Return start columns for the next refresh: these vectors, each with a share of a fresh random direction.

        A direction without curvature, or outside the parameters, is replaced: it might be mapped to zero for ever.
        """
        start = storage.space.random(storage.size, rank, generator, storage.dtype)
        start *= FRESH_SHARE / storage.size**0.5
        for column, row, value in zip(start.T, self.rows, self.values, strict=False):
            if value == 0:
                continue
            for param, piece in zip(storage.params, column.split(storage.sizes), strict=True):
                place = self.places.get(param)
                if place is not None:
                    piece += row[place : place + len(piece)].to(piece)
        return start


class Counters(NamedTuple):
    """What the optimizer has done so far."""

    steps: int
    """Steps taken; one at a rate of zero does not count."""
    refreshes: int
    """Successful refreshes."""
    hessian_products: int
    indefinite_refreshes: int
    """Refreshes at which the paper's (B + ηI)⁻¹ would not have been positive definite."""
    failed_refreshes: int
    """Refreshes that came out non-finite and were discarded."""
    singular_directions: int
    """Directions treated as part of the complement, because λ + η vanished under the signed rule."""
    non_finite_steps: int
    """Steps whose gradient was not finite, taken without the sketch."""
    looks: int
    """Looks at the curvature between refreshes with refresh_every="auto", of one or two products each."""


@dataclass
class Progress(Track):
    """What an optimizer has done so far, and its sketch: one object, so that whatever wraps the optimizer shares it."""

    refreshes: int = 0
    """Successful refreshes."""
    hessian_products: int = 0
    indefinite_refreshes: int = 0
    """Refreshes at which the paper's (B + ηI)⁻¹ would not have been positive definite."""
    failed_refreshes: int = 0
    """Refreshes that came out non-finite and were discarded."""
    singular_directions: int = 0
    """Directions left to the complement because λ + η vanished under the signed rule."""
    non_finite_steps: int | Tensor = 0
    """Steps whose gradient was not finite, taken without the sketch."""
    attempts: int = 0
    damping: Any = None
    """The state of the damping rule: what it has measured at the last refresh."""
    seen: Any = None
    """The state of the rule for refreshes."""
    looks: int = 0
    """Looks at the curvature between refreshes."""
    largest_rate: float = 0.0
    """The largest learning rate of any step."""
    turned: float = 0.0
    """The share of the sketch in use that lies outside the one before it."""
    has_warned: list[str] = field(default_factory=list)
    source_gradient: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parameters with the gradient of the loss that the first refresh was given, until the next step; not saved."""
    parts: int = 1
    """How many losses `refresh_if_due` was given in that step, whose gradients are added up; not saved."""
    seconds: float = 0.0
    """What refreshes and looks have taken, by the clock on the wall."""
    sketch: Sketch | None = None

    @property
    def counters(self) -> Counters:
        """The counts that are public."""
        return Counters(**{name: int(getattr(self, name)) for name in Counters._fields})

    def count(self, products: int) -> None:
        """Count products with the curvature."""
        self.hessian_products += products
        # The first sketch is what the method costs to begin with; a budget can only bound what comes after it.
        self.later_products += products if self.attempts > 1 or self.looks else 0


def timed(refresh: Callable[..., bool]) -> Callable[..., bool]:
    """Add the time of each refresh, which ends by reading numbers from the device, to its optimizer's progress."""

    @wraps(refresh)
    def watched(optimizer: Any, *arguments: Any, **settings: Any) -> bool:
        began = time.perf_counter()
        try:
            return refresh(optimizer, *arguments, **settings)
        finally:
            optimizer._progress.seconds += time.perf_counter() - began

    return watched
