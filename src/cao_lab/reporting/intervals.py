"""Means over seeds, paired ratios and differences, each with Student's confidence interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from pandas import Series
from scipy import stats

from cao_lab.protocol import CONFIDENCE

Values: TypeAlias = Series | Mapping[int, float]
"""Numbers by seed."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval; with fewer than two values the ends are unknown (NaN)."""

    center: float
    low: float
    high: float
    count: int


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values with Student's t-interval."""
    count = len(values)
    center = float(np.mean(values)) if count else math.nan
    if count < 2:
        return Interval(center, math.nan, math.nan, count)
    reach = t_quantile(count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(center, center - reach, center + reach, count)


@cache
def t_quantile(freedom: int) -> float:
    """Return how many standard errors an interval reaches to either side."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def ratio_interval(numerator: Values, denominator: Values) -> Interval:
    """Return the geometric mean of per-seed ratios and its interval: exp of the t-interval of their logs."""
    # A run that diverged can stand for infinity; then the ends are unknown, as they should be.
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = interval([float(np.log(np.divide(left, right))) for left, right in paired(numerator, denominator)])
        return Interval(float(np.exp(logs.center)), float(np.exp(logs.low)), float(np.exp(logs.high)), logs.count)


def difference_interval(left: Values, right: Values) -> Interval:
    """Return the mean of per-seed differences and its interval."""
    return interval([first - second for first, second in paired(left, right)])


def paired(left: Values, right: Values) -> list[tuple[float, float]]:
    """Return the values of two series that share a key (the seed), where both have one."""
    others = dict(right.items())
    pairs = [(value, others.get(key, math.nan)) for key, value in left.items()]
    return [pair for pair in pairs if not any(math.isnan(value) for value in pair)]
