"""A line search that does not stall: Wolfe's conditions, by slopes alone where values have lost their digits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """What is known of the objective at one step along a direction."""

    step: float
    value: float
    slope: float

    @property
    def is_finite(self) -> bool:
        """Whether both numbers can be compared."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


@dataclass(frozen=True)
class HagerZhang:
    """The line search of Hager and Zhang (2005): secant steps on the slope, within a bracket.

    A step is accepted on Wolfe's conditions, or on their approximate form, which compares slopes and so still works
    where the decrease of the objective drowns in rounding. A point that is not finite counts as too far.
    """

    decrease: float = 0.1
    """Share of the predicted decrease that a step must bring (their δ)."""
    curvature: float = 0.9
    """Share of the first slope that may be left (their σ)."""
    growth: float = 5.0
    """Factor by which steps grow until a minimum is bracketed (their ρ)."""
    max_evaluations: int = 25

    def __call__(
        self, evaluate: Callable[[float], Point], origin: Point, step: float, rounding: float = 0.0
    ) -> Point | None:
        """Return an acceptable point, else the lowest one seen, or None if no point was below the origin.

        `rounding` is the error of the objective's values.
        """
        limit = origin.value + rounding
        low, high, replaced, lowest = origin, None, None, origin
        for _ in range(self.max_evaluations):
            point = evaluate(step)
            if point.is_finite:
                if self.accepts(point, origin, limit):
                    return point
                lowest = min(lowest, point, key=lambda seen: seen.value)
            width = high.step - low.step if high else math.inf
            if point.is_finite and point.value <= limit and point.slope < 0:
                low, replaced = point, low
            else:
                high, replaced = point, high
            step = self._next_step(low, high, point, replaced, width)
            if not low.step < step < (high.step if high else math.inf):
                break  # The bracket has no number left inside.
        return lowest if lowest.value < origin.value else None

    def accepts(self, point: Point, origin: Point, limit: float) -> bool:
        """Whether Wolfe's conditions hold, in their exact or their approximate form."""
        is_decrease = point.value - origin.value <= self.decrease * point.step * origin.slope
        is_flat_decrease = point.value <= limit and point.slope <= (2 * self.decrease - 1) * origin.slope
        return point.slope >= self.curvature * origin.slope and (is_decrease or is_flat_decrease)

    def _next_step(
        self, low: Point, high: Point | None, newest: Point, replaced: Point | None, old_width: float
    ) -> float:
        if high is None:
            return low.step * self.growth
        width = high.step - low.step
        if not high.is_finite:
            return low.step + width / (10 if newest is high else 2)
        middle = low.step + width / 2
        # Bisection serves where slopes say nothing (a hump lies between) or where secants have shrunk too little.
        if high.slope < 0 or width > 2 / 3 * old_width:
            return middle
        for other in (replaced, low if newest is high else high):
            step = secant(newest, other) if other is not None and other.is_finite else math.nan
            if low.step < step < high.step:
                return step
        return middle


def secant(first: Point, second: Point) -> float:
    """Return where the line through two slopes is zero; NaN if it never is."""
    rise = second.slope - first.slope
    return (first.step * second.slope - second.step * first.slope) / rise if rise else math.nan
