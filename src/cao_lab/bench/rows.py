"""What a benchmark says: a row with its value, its target and the spread of the samples behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np


@dataclass(frozen=True)
class Row:
    """One measured quantity; smaller is better in every row that has a target."""

    name: str
    value: float
    target: float | None
    """The value to stay at or below; None where the figure is only reported."""
    spread: float | None
    """Interquartile range of the samples; None for a single one."""
    unit: str
    note: str
    samples: int

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is reached; None if there is none."""
        # A counter of eight bytes beside ten million parameters is not a target missed.
        return None if self.target is None else self.value <= self.target * (1 + 1e-6)


@dataclass(frozen=True)
class Estimate:
    """The median of samples and their interquartile range."""

    value: float
    spread: float | None
    samples: int

    def row(self, name: str, note: str, *, target: float | None = None, unit: str = "ratio") -> Row:
        """Return the row that tells of this estimate."""
        return Row(name, self.value, target, self.spread, unit, note, self.samples)

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate of a multiple of the quantity."""
        return Estimate(self.value * factor, None if self.spread is None else self.spread * factor, self.samples)

    def plus(self, other: "Estimate") -> "Estimate":
        """Return the estimate of a sum; the spreads add, as if they always erred to the same side."""
        spread = None if None in (self.spread, other.spread) else (self.spread or 0.0) + (other.spread or 0.0)
        return Estimate(self.value + other.value, spread, min(self.samples, other.samples))


Rows: TypeAlias = list[Row]


def estimate(samples: Sequence[float]) -> Estimate:
    """Return median and interquartile range."""
    low, median, high = (float(q) for q in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Estimate(median, high - low if len(samples) > 1 else None, len(samples))
