"""A line search that does not stall: Wolfe's conditions, by slopes alone where values have lost their digits."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# How near to an end of a bracket, in widths, the next step may be.
CLOSEST = 0.01


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
    """A line search that accepts by the conditions of Hager and Zhang (2005), and interpolates by cubics.

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
        low, high, lowest, width = origin, None, origin, math.inf
        for _ in range(self.max_evaluations):
            point = evaluate(step)
            if point.is_finite:
                if self.accepts(point, origin, limit):
                    return point
                lowest = min(lowest, point, key=lambda seen: seen.value)
            if point.is_finite and point.value <= limit and point.slope < 0:
                low = point
            else:
                high = point
            old_width, width = width, high.step - low.step if high else math.inf
            if high is None:
                step *= self.growth
            elif not point.is_finite:
                step = low.step + width / 10
            elif width > 2 / 3 * old_width or not high.is_finite:
                step = low.step + width / 2
            else:
                step = interpolated(low, high, rounding)
            if not low.step < step < (high.step if high else math.inf):
                break  # The bracket has no number left inside.
        return lowest if lowest.value < origin.value else None

    def accepts(self, point: Point, origin: Point, limit: float) -> bool:
        """Whether Wolfe's conditions hold, in their exact or their approximate form."""
        is_decrease = point.value - origin.value <= self.decrease * point.step * origin.slope
        is_flat_decrease = point.value <= limit and point.slope <= (2 * self.decrease - 1) * origin.slope
        return point.slope >= self.curvature * origin.slope and (is_decrease or is_flat_decrease)


def interpolated(low: Point, high: Point, rounding: float) -> float:
    """Return where the cubic through two points has its minimum, but never close to an end of the bracket.

    Where the values have no digits to tell the points apart, the slopes decide, by a secant step.
    """
    width = high.step - low.step
    rise = (high.value - low.value) / width
    if abs(high.value - low.value) <= rounding:
        rise = (low.slope + high.slope) / 2  # As of a parabola with these slopes, whose cubic is itself.
    bend = low.slope + high.slope - 3 * rise
    root = math.sqrt(max(bend * bend - low.slope * high.slope, 0.0))
    share = (
        (bend + root - low.slope) / (high.slope - low.slope + 2 * root) if high.slope - low.slope + 2 * root else 0.5
    )
    return low.step + width * min(max(share, CLOSEST), 1 - CLOSEST)
