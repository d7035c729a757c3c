"""Watch an optimizer: what each refresh found and what it cost."""

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from cao.cao import CAO
from cao.sketch.making import Source


class Refreshed(NamedTuple):
    """What an optimizer knows after an attempt to refresh its sketch."""

    step: int
    """Steps taken before it."""
    sharpness: float
    """The largest |λ| in the sketch; NaN before the first successful refresh."""
    rank: int
    """Eigenpairs in the sketch."""
    damping: float
    refreshes: int
    """Successful refreshes so far."""
    hessian_products: int
    seconds: float
    """Time spent in this refresh."""
    total_seconds: float
    """Time spent in refreshes since watching began."""


class Watch:
    """Calls a function after every attempt to refresh; `remove` ends it.

    The optimizer's refreshes are timed. Copies and pickles of the optimizer are not watched.
    """

    def __init__(self, optimizer: CAO, tell: Callable[[Refreshed], object] | None = None) -> None:
        if not isinstance(optimizer, CAO):
            raise TypeError(
                f"watch needs a CAO optimizer, got {type(optimizer).__name__}; if that wraps one, pass the CAO inside"
            )
        self.optimizer, self.tell = optimizer, tell
        self.latest: Refreshed | None = None
        self._refresh, self._total_seconds, self._is_on = optimizer._refresh, 0.0, True
        optimizer._refresh = self._timed_refresh  # type: ignore[method-assign]

    def remove(self) -> None:
        """Stop watching; a watch that began later goes on."""
        self._is_on = False
        refresh = self.optimizer._refresh
        while isinstance(watch := getattr(refresh, "__self__", None), Watch) and not watch._is_on:
            refresh = watch._refresh
        self.optimizer._refresh = refresh  # type: ignore[method-assign]

    def _timed_refresh(self, source: Source, scale: float | Tensor, *, is_asked: bool) -> bool:
        if not self._is_on:
            return self._refresh(source, scale, is_asked=is_asked)
        before, start = self.optimizer.counters, perf_counter()
        # It ends by reading numbers from the device, so that a GPU is done by then.
        is_new = self._refresh(source, scale, is_asked=is_asked)
        seconds = perf_counter() - start
        self._total_seconds += seconds
        if not is_new and self.optimizer.counters.failed_refreshes == before.failed_refreshes:
            return False  # Only a look, which found that the sketch still fits.
        self.latest = refreshed(self.optimizer, seconds, self._total_seconds)
        if self.tell is not None:
            self.tell(self.latest)
        return is_new


def watch(optimizer: CAO, tell: Callable[[Refreshed], object]) -> Watch:
    """Call `tell` after every attempt to refresh: `watch(optimizer, print)`."""
    return Watch(optimizer, tell)


def refreshed(optimizer: CAO, seconds: float, total_seconds: float) -> Refreshed:
    """Return what the optimizer knows now."""
    sketch, counters = optimizer.sketch, optimizer.counters
    return Refreshed(
        step=counters.steps,
        sharpness=max(map(abs, sketch.values)) if sketch else math.nan,
        rank=len(sketch.values) if sketch else 0,
        damping=sketch.damping if sketch else math.nan,
        refreshes=counters.refreshes,
        hessian_products=counters.hessian_products,
        seconds=seconds,
        total_seconds=total_seconds,
    )


def scalars(event: Refreshed | None) -> dict[str, float]:
    """Return the numbers with names for loggers, such as `cao/sharpness`; none before the first refresh."""
    if event is None:
        return {}
    return {f"cao/{name}": float(value) for name, value in event._asdict().items() if name != "step"}
