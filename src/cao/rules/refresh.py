"""When the sketch is renewed: rules as values, and what they have seen so far."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

# What a product with the Hessian costs, in gradients; 2 to 5 were measured (docs/performance.md).
PRICE = 4.0
# What may be spent beyond a budget, in gradients: a few sketches, for the start and to find out what is noise.
CREDIT = 200.0
# Steps over which the gradient's norm is averaged.
HORIZON = 10


@dataclass
class Track:
    """What a refresh rule uses: plain numbers, which are saved with the optimizer."""

    steps: int = 0
    attempted_at: int = -1
    """The step of the last attempt to refresh."""
    looked_at: int = -1
    """The step of the last look at the curvature, a refresh included."""
    captured: int = 0
    """Directions of the sketch that steps make use of."""
    later_products: int = 0
    """Products since the first refresh."""
    interval: int = 0
    """Steps to the next look, as a rule has set it; 0 before it has."""
    first_looks: int = 0
    """Looks one step after a refresh, from which noise and spread are known."""
    noise: float = 0.0
    """How much the curvature of one batch differs from that of the next, as `Look.drift` measures it."""
    spread: float = 0.0
    """The relative variance of the curvature along a captured direction from batch to batch."""
    gradient: float = 0.0
    """The running mean of the gradient's norm; 0 before there is one."""
    is_alarmed: bool = False
    """Whether the last gradient was far larger than that."""

    @property
    def age(self) -> int:
        """Steps since the last attempt to refresh."""
        return self.steps - self.attempted_at

    @property
    def is_first_look(self) -> bool:
        """Whether there was no look at the curvature since the last attempt to refresh."""
        return self.looked_at == self.attempted_at


@dataclass(frozen=True)
class Look:
    """What one or two products show about a sketch that is in use."""

    drift: float
    """‖Hq − Bq‖/‖Bq‖ for a random mix q of the captured vectors."""
    change: float
    """qᵀHq/qᵀBq − 1: how much the curvature there has grown."""
    is_unstable: bool = False
    """Whether the last step went, outside the sketch, along a curvature beyond the edge of stability."""
    is_needed: bool = False
    """Whether a direction that is only watched has become so sharp that it should be captured."""

    @property
    def is_finite(self) -> bool:
        """Whether it shows anything: one at a loss that overflowed does not, and is taken again."""
        return math.isfinite(self.drift) and math.isfinite(self.change)


@runtime_checkable
class Refresh(Protocol):
    """When the sketch is renewed."""

    def heed(self, track: Track, gradient_norm: Callable[[], float]) -> None:
        """Take note of a step's gradient; to ask for its norm waits for the device."""
        ...

    def is_due(self, track: Track) -> bool:
        """Whether to look at the curvature now, which may end in a refresh."""
        ...

    def wants_refresh(self, track: Track, look: Callable[[], Look]) -> bool:
        """Whether to refresh now; a look costs one or two products."""
        ...

    def is_overdue(self, track: Track) -> bool:
        """Whether a look has been due for so long that `refresh_if_due` does not seem to be called."""
        ...


@dataclass(frozen=True)
class Every:
    """A refresh at a fixed interval."""

    steps: int

    def heed(self, track: Track, gradient_norm: Callable[[], float]) -> None:
        """Take no note."""

    def is_due(self, track: Track) -> bool:
        """Whether the interval has passed."""
        return track.age >= self.steps

    def wants_refresh(self, track: Track, look: Callable[[], Look]) -> bool:
        """Refresh without a look."""
        return True

    def is_overdue(self, track: Track) -> bool:
        """Whether the interval has passed twice."""
        return track.age >= 2 * self.steps


@dataclass(frozen=True)
class OnDrift:
    """A refresh when the sketch no longer fits the curvature, within a budget.

    One product with a random combination of the captured vectors shows how far they have turned. The first look comes
    one step after a refresh, when only the batch has changed, so it measures noise. Later looks are compared with it.
    Their intervals grow as long as they find nothing, or nothing but noise.

    Where batches agree, a gradient that grows suddenly is a sign that steps have become unstable, and calls for a
    refresh at once, within twice the budget. Its norm is then read at every step, which waits for the device.
    """

    bound: float = 0.5
    """The drift ‖Hq − Bq‖/‖Bq‖ that is too much."""
    shortest: int = 1
    """Steps between looks, at the least."""
    longest: int = 400
    """Steps between looks, and between refreshes, at the most, if the budget allows."""
    budget: float = 0.05
    """How much curvature may cost, relative to the gradients; the first sketch is not counted."""
    exact_budget: float = 0.5
    """The same if batches agree on the curvature, as full ones do."""
    alarm: float = 3.0
    """How much larger than its running mean a gradient is that calls for a refresh at once, if batches agree."""

    def heed(self, track: Track, gradient_norm: Callable[[], float]) -> None:
        """Compare the gradient with its running mean, which it then becomes part of."""
        if self._is_noisy(track) or not math.isfinite(norm := gradient_norm()):
            return
        mean = track.gradient or norm
        track.is_alarmed = norm > self.alarm * mean
        track.gradient = norm if track.is_alarmed else mean + (norm - mean) / HORIZON

    def is_due(self, track: Track) -> bool:
        """Whether it is time to look again and the budget allows it."""
        is_alarmed = self._is_alarmed(track)
        if self._unpaid(track) > CREDIT + (self.exact_budget * track.steps if is_alarmed else 0.0):
            return False
        wait = 1 if track.is_first_look else max(track.interval, self.shortest)
        return is_alarmed or track.steps - track.looked_at >= wait or self._is_old(track)

    def wants_refresh(self, track: Track, look: Callable[[], Look]) -> bool:
        """Whether the sketch has turned, is too old, or no longer keeps the steps stable."""
        is_first, is_stale = track.is_first_look, self._is_old(track) or self._is_alarmed(track)
        if not is_stale:
            seen = look()
            if not seen.is_finite:
                return False
            if is_first:
                self._learn(track, seen)
            # A direction that is only watched may turn.
            has_turned = not is_first and track.captured > 0 and seen.drift > self.bound
            is_stale = seen.is_unstable or seen.is_needed or has_turned
        is_calm = not is_stale and track.captured == 0
        if self._is_noisy(track) or not is_stale:
            track.interval = min(max((4 if is_calm else 2) * track.interval, self.shortest), self.longest)
        else:
            track.interval = max(track.interval // 2, self.shortest)
        return is_stale

    def _is_noisy(self, track: Track) -> bool:
        """Whether batches disagree on the curvature, or it is not known yet."""
        return track.first_looks == 0 or track.noise > self.bound

    def _unpaid(self, track: Track) -> float:
        """Return what curvature has cost beyond the budget, in gradients."""
        share = self.budget if self._is_noisy(track) else self.exact_budget
        return track.later_products * PRICE - share * track.steps

    def _is_old(self, track: Track) -> bool:
        """Whether the sketch is to be renewed for its age; the credit is not for that."""
        return track.age >= self.longest and self._unpaid(track) <= 0

    def _is_alarmed(self, track: Track) -> bool:
        """Whether the gradient has grown suddenly, which noise does not explain."""
        return track.is_alarmed and not self._is_noisy(track)

    def _learn(self, track: Track, seen: Look) -> None:
        """Learn from a first look what is noise.

        A large step changes the curvature too, so the smallest drift seen counts, and may rise only slowly. The first
        look of all, after the longest step, says nothing about the spread.
        """
        is_new = track.first_looks == 0
        track.noise = seen.drift if is_new else min(seen.drift, 1.25 * track.noise)
        squared = 0.0 if is_new else (track.spread + seen.change**2) / 2
        track.spread = min(squared, track.noise**2)
        track.first_looks += 1

    def is_overdue(self, track: Track) -> bool:
        """Whether there was no look for twice the longest interval."""
        return track.steps - track.looked_at >= 2 * self.longest and self.is_due(track)


RefreshName: TypeAlias = Literal["auto"]
REFRESHES: dict[str, Refresh] = {"auto": OnDrift()}
"""The words that stand for rules."""
