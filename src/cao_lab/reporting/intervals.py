"""Comparisons of two methods over seeds: ratios, differences and spreads, each with its confidence interval.

The intervals are Welch's: runs of two methods on the same seed share weights and batches, but their results turned out
to be uncorrelated, and pairing then only costs degrees of freedom. A sweep pairs, over its other knob.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from pandas import Series
from scipy import stats
from scipy.special import stdtrit

from cao_lab.protocol import CONFIDENCE

Values: TypeAlias = Series | Mapping[int, float]
"""Numbers by seed."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Interval:
    """A comparison and its confidence interval; with fewer than two values on a side the ends are unknown (NaN)."""

    center: float
    low: float
    high: float
    counts: tuple[int, int] = (0, 0)
    """Values on either side."""
    spread: float = math.nan
    """Standard deviation of the difference between two single runs, of logarithms where it is a ratio."""
    noise: float = math.nan
    """What one method, run twice, differs by at most on a seed: a factor, or a difference; NaN if nobody knows."""
    is_ratio: bool = True
    confidence: float = CONFIDENCE

    @property
    def count(self) -> int:
        """The values on the side that has fewer."""
        return min(self.counts)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the difference is larger than that of a method from itself."""
        size = max(self.center, 1 / self.center) if self.is_ratio and self.center else abs(self.center)
        return math.isnan(self.noise) or size > self.noise

    def seeds_for(self, margin: float) -> float:
        """Return how many seeds of either method an interval within ± the margin takes, given its spread."""
        if not math.isfinite(self.spread):
            return math.nan

        def reach(n: int) -> float:
            return t_quantile(2 * n - 2, self.confidence) * self.spread / math.sqrt(n)

        return next((n for n in range(2, MOST_SEEDS) if reach(n) <= margin), math.inf)


def welch(left: Sequence[float], right: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the difference of two means with Welch's interval."""
    counts = (len(left), len(right))
    center = float(np.mean(left) - np.mean(right)) if min(counts) else math.nan
    if min(counts) < 2:
        return Interval(center, math.nan, math.nan, counts, is_ratio=False)
    variances = [float(np.var(side, ddof=1)) for side in (left, right)]
    shares = [variance / count for variance, count in zip(variances, counts, strict=True)]
    total = sum(shares)
    # Two sides without any spread have an interval without width, whatever their degrees of freedom.
    loss = sum(share**2 / (count - 1) for share, count in zip(shares, counts, strict=True))
    reach = t_quantile(total**2 / loss, confidence) * math.sqrt(total) if loss else 0.0 * total
    ends, spread = (center - reach, center + reach), math.sqrt(sum(variances))
    return Interval(center, *ends, counts, spread, is_ratio=False, confidence=confidence)


@cache
def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors an interval reaches to either side."""
    return float(stdtrit(freedom, (1 + confidence) / 2))


def ratio_interval(numerator: Values, denominator: Values, confidence: float = CONFIDENCE) -> Interval:
    """Return the ratio of geometric means and its interval: exp of Welch's interval of the logarithms."""
    # A run that diverged can stand for infinity; then the ends are unknown, as they should be.
    with np.errstate(invalid="ignore", divide="ignore"):
        return exponential(welch(logarithms(numerator), logarithms(denominator), confidence))


def all_ratios(values: Float64[np.ndarray, "*_ n seeds"]) -> Float64[np.ndarray, "*_ n n 3"]:
    """Return the ratio of every row's geometric mean to every other's with Welch's interval, NaN where it is unknown.

    These are the ratios and ends of `ratio_interval`, for thousands of pairs at once.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(values)
        is_known = ~np.isnan(logs)
        counts = is_known.sum(axis=-1)
        means = np.where(is_known, logs, 0).sum(axis=-1) / counts
        squares = np.where(is_known, logs - means[..., None], 0) ** 2
        shares = squares.sum(axis=-1) / (counts - 1) / counts
        total, loss = (each[..., :, None] + each[..., None, :] for each in (shares, shares**2 / (counts - 1)))
        reach = np.where(loss == 0, 0, stdtrit(total**2 / loss, (1 + CONFIDENCE) / 2)) * np.sqrt(total)
        center = means[..., :, None] - means[..., None, :]
        return np.asarray(np.exp(np.stack([center, center - reach, center + reach], axis=-1)))


def paired_ratio(numerator: Values, denominator: Values, confidence: float = CONFIDENCE) -> Interval:
    """Return the geometric mean of the ratios of values that share a key, and its interval by Student's t."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = [float(np.log(np.divide(left, right))) for left, right in paired(numerator, denominator)]
        count, center = len(logs), float(np.mean(logs)) if logs else math.nan
        reach = math.nan
        if count > 1:
            reach = t_quantile(count - 1, confidence) * float(np.std(logs, ddof=1)) / math.sqrt(count)
        return exponential(Interval(center, center - reach, center + reach, (count, count), confidence=confidence))


def paired_difference(left: Values, right: Values, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean difference of values that share a key, and its interval by Student's t."""
    differences = [one - other for one, other in paired(left, right)]
    count, center = len(differences), float(np.mean(differences)) if differences else math.nan
    reach = (
        t_quantile(count - 1, confidence) * float(np.std(differences, ddof=1)) / count**0.5 if count > 1 else math.nan
    )
    return Interval(center, center - reach, center + reach, (count, count), is_ratio=False, confidence=confidence)


def exponential(logs: Interval) -> Interval:
    """Return the ratio of which the logarithm is given."""
    center, low, high = (float(np.exp(end)) for end in (logs.center, logs.low, logs.high))
    return replace(logs, center=center, low=low, high=high, is_ratio=True)


def difference_interval(left: Values, right: Values, confidence: float = CONFIDENCE) -> Interval:
    """Return the difference of two means and its interval."""
    return welch(known(left), known(right), confidence)


def variance_ratio(
    numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]], confidence: float = CONFIDENCE
) -> Interval:
    """Return the ratio of two variances, each pooled over groups of runs alike, with the interval of Fisher's F."""
    above, below = pooled(numerator), pooled(denominator)
    counts = (sum(map(len, numerator)), sum(map(len, denominator)))
    if not (above.freedom and below.freedom and below.variance):
        return Interval(math.nan, math.nan, math.nan, (0, 0))
    center, tail = above.variance / below.variance, (1 - confidence) / 2
    least, most = (float(stats.f.ppf(end, above.freedom, below.freedom)) for end in (tail, 1 - tail))
    return Interval(center, center / most, center / least, counts, confidence=confidence)


def seeds_to_tell(factor: float, confidence: float = CONFIDENCE) -> int:
    """Return how many seeds of either method it takes until variances that are seen this far apart are told apart."""
    return next(n for n in range(2, MOST_SEEDS) if stats.f.ppf((1 + confidence) / 2, n - 1, n - 1) < factor)


@dataclass(frozen=True)
class Pooled:
    """A variance and its degrees of freedom."""

    variance: float
    freedom: int


def pooled(groups: Sequence[Sequence[float]]) -> Pooled:
    """Return the variance within groups."""
    freedom = sum(max(0, len(group) - 1) for group in groups)
    squares = sum(float(np.var(group) * len(group)) for group in groups if len(group) > 1)
    return Pooled(squares / freedom if freedom else math.nan, freedom)


def with_noise(found: Interval, twice: Iterable[tuple[Values, Values]]) -> Interval:
    """Put beside a comparison what a method differs from itself by at most on a seed, where it was run twice.

    Values that are the same to the last bit tell nothing: both came to be by the same operations, on one machine.
    """
    pairs = [pair for one, same in twice for pair in paired(one, same) if pair[0] != pair[1]]
    if found.is_ratio:
        sizes = [max(left / right, right / left) for left, right in pairs if left > 0 and right > 0]
    else:
        sizes = [abs(left - right) for left, right in pairs]
    return replace(found, noise=max(sizes, default=math.nan))


def with_noise_of_mean(found: Interval, twice: Iterable[tuple[Values, Values]]) -> Interval:
    """Put beside a mean of paired ratios what a method, run twice, would differ from itself by in as large a mean.

    That of the mean of n pairs is the root mean square of the single differences, at 97.5 % of Student's t, over √n.
    """
    pairs = [pair for one, same in twice for pair in paired(one, same) if pair[0] != pair[1] and min(pair) > 0]
    if not pairs or not found.count:
        return replace(found, noise=math.nan)
    logs = np.log(np.array(pairs))
    size = math.sqrt(float(np.mean((logs[:, 0] - logs[:, 1]) ** 2)))
    return replace(found, noise=math.exp(t_quantile(len(pairs)) * size / math.sqrt(found.count)))


def logarithms(values: Values) -> list[float]:
    """Return the logarithms of the values that are known."""
    return [float(np.log(value)) for value in known(values)]


def known(values: Values) -> list[float]:
    """Return the values that are numbers."""
    return [float(value) for _, value in values.items() if not math.isnan(value)]


def paired(left: Values, right: Values) -> list[tuple[float, float]]:
    """Return the values of two series that share a key, where both have one."""
    others = dict(right.items())
    pairs = [(value, others.get(key, math.nan)) for key, value in left.items()]
    return [pair for pair in pairs if not any(math.isnan(value) for value in pair)]
