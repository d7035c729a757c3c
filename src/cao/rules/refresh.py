"""When the sketch is renewed: rules as values, what they are told and what they have seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from cao.prices import HESSIAN_PRODUCT

# What may be spent beyond a budget, in gradients: a few sketches, for the start and to find out what is noise.
CREDIT = 200.0
# Steps over which the gradient's norm is averaged.
HORIZON = 10


@dataclass
class Track:
    """What a refresh rule is told of a run."""

    steps: int = 0
    attempted_at: int = -1
    """The step of the last attempt to refresh."""
    looked_at: int = -1
    """The step of the last look at the curvature, a refresh included."""
    captured: int = 0
    """Directions of the sketch that steps make use of."""
    later_products: int = 0
    """Products since the first refresh."""

    @property
    def age(self) -> int:
        """Steps since the last attempt to refresh."""
        return self.steps - self.attempted_at


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
    """When the sketch is renewed.

    A rule is a frozen value. What it has seen is a state of its own: None at first, then what the rule returned last.
    It is saved with the optimizer, so it is to be made of numbers, strings, lists and dicts.
    """

    def heed(self, state: Any, track: Track, gradient_norm: Callable[[], float]) -> Any:
        """Return the state after a step's gradient; to ask for its norm waits for the device."""
        ...

    def is_due(self, state: Any, track: Track) -> bool:
        """Whether to look at the curvature now, which may end in a refresh."""
        ...

    def wants_refresh(self, state: Any, track: Track, look: Callable[[], Look]) -> tuple[bool, Any]:
        """Return whether to refresh now, and the state after that; a look costs one or two products."""
        ...

    def is_overdue(self, state: Any, track: Track) -> bool:
        """Whether a look has been due for so long that `refresh_if_due` does not seem to be called."""
        ...


@dataclass(frozen=True)
class Every:
    """A refresh at a fixed interval, without a look; it has no state."""

    steps: int

    def heed(self, state: Any, track: Track, gradient_norm: Callable[[], float]) -> None:
        """Take no note."""

    def is_due(self, state: Any, track: Track) -> bool:
        """Whether the interval has passed."""
        return track.age >= self.steps

    def wants_refresh(self, state: Any, track: Track, look: Callable[[], Look]) -> tuple[bool, None]:
        """Refresh."""
        return True, None

    def is_overdue(self, state: Any, track: Track) -> bool:
        """Whether the interval has passed twice."""
        return track.age >= 2 * self.steps


@dataclass(frozen=True)
class Seen:
    """The state of `OnDrift`."""

    interval: int = 0
    """Steps to the next look; 0 before there was one."""
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

    @classmethod
    def of(cls, state: Any) -> "Seen":
        """Return the state if it is one, and that of the beginning for None or for the state of another rule."""
        return state if isinstance(state, cls) else cls()


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

    def heed(self, state: Any, track: Track, gradient_norm: Callable[[], float]) -> Seen:
        """Compare the gradient with its running mean, which it then becomes part of."""
        seen = Seen.of(state)
        if self._is_noisy(seen) or not math.isfinite(norm := gradient_norm()):
            return seen
        mean = seen.gradient or norm
        is_alarmed = norm > self.alarm * mean
        return replace(seen, is_alarmed=is_alarmed, gradient=norm if is_alarmed else mean + (norm - mean) / HORIZON)

    def is_due(self, state: Any, track: Track) -> bool:
        """Whether it is time to look again and the budget allows it."""
        seen = Seen.of(state)
        is_alarmed = self._is_alarmed(seen)
        if self._unpaid(seen, track) > CREDIT + (self.exact_budget * track.steps if is_alarmed else 0.0):
            return False
        is_first = track.looked_at == track.attempted_at
        wait = 1 if is_first else max(seen.interval, self.shortest)
        return is_alarmed or track.steps - track.looked_at >= wait or self._is_old(seen, track)

    def wants_refresh(self, state: Any, track: Track, look: Callable[[], Look]) -> tuple[bool, Seen]:
        """Whether the sketch has turned, is too old, or no longer keeps the steps stable."""
        seen = Seen.of(state)
        is_stale = self._is_old(seen, track) or self._is_alarmed(seen)
        if not is_stale:
            found = look()
            if not found.is_finite:
                return False, seen
            is_first = track.looked_at == track.attempted_at
            if is_first:
                seen = self._learnt(seen, found)
            # A direction that is only watched may turn.
            has_turned = not is_first and track.captured > 0 and found.drift > self.bound
            is_stale = found.is_unstable or found.is_needed or has_turned
        interval = seen.interval // 2
        if self._is_noisy(seen) or not is_stale:
            is_calm = not is_stale and track.captured == 0
            interval = min((4 if is_calm else 2) * seen.interval, self.longest)
        return is_stale, replace(seen, interval=max(interval, self.shortest))

    def is_overdue(self, state: Any, track: Track) -> bool:
        """Whether there was no look for twice the longest interval."""
        return track.steps - track.looked_at >= 2 * self.longest and self.is_due(state, track)

    def _is_noisy(self, seen: Seen) -> bool:
        """Whether batches disagree on the curvature, or it is not known yet."""
        return seen.first_looks == 0 or seen.noise > self.bound

    def _unpaid(self, seen: Seen, track: Track) -> float:
        """Return what curvature has cost beyond the budget, in gradients."""
        share = self.budget if self._is_noisy(seen) else self.exact_budget
        return track.later_products * HESSIAN_PRODUCT - share * track.steps

    def _is_old(self, seen: Seen, track: Track) -> bool:
        """Whether the sketch is to be renewed for its age; the credit is not for that."""
        return track.age >= self.longest and self._unpaid(seen, track) <= 0

    def _is_alarmed(self, seen: Seen) -> bool:
        """Whether the gradient has grown suddenly, which noise does not explain."""
        return seen.is_alarmed and not self._is_noisy(seen)

    def _learnt(self, seen: Seen, found: Look) -> Seen:
        """Return what is known of noise after a first look.

        A large step changes the curvature too, so the smallest drift seen counts, and may rise only slowly. The first
        look of all, after the longest step, says nothing about the spread.
        """
        is_new = seen.first_looks == 0
        noise = found.drift if is_new else min(found.drift, 1.25 * seen.noise)
        squared = 0.0 if is_new else (seen.spread + found.change**2) / 2
        return replace(seen, noise=noise, spread=min(squared, noise**2), first_looks=seen.first_looks + 1)


RefreshName: TypeAlias = Literal["auto"]
REFRESHES: dict[str, Refresh] = {"auto": OnDrift()}
"""The words that stand for rules."""
