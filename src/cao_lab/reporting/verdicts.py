"""From intervals to verdicts: the few rules that every claim is judged by."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pandas import DataFrame

from cao_lab.protocol import CONFIDENCE, RATIO_MARGIN
from cao_lab.reporting.intervals import Interval, Values, paired_ratio, ratio_interval, with_noise
from cao_lab.reporting.setting import Setting


class Verdict(StrEnum):
    """What logs say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    RATE = "holds only because of the learning rate"
    TIE = "a tie"
    UNDECIDED = "undecided"
    UNTESTABLE = "not testable here"
    UNTESTED = "not tested here"


PART_NAMES = {
    "cao": "CAO (k = 1)", "rank3": "CAO (k = 3)", "rank5": "CAO (k = 5)", "sgd": "SGD", "adam": "Adam",
    "rank0-unit": "CAO (k = 0, d = g)", "signed": "CAO with signed λ", "lanczos": "CAO by Lanczos",
    "warm-up": "CAO after a phase of SGD", "adaptive": "CAO with its rules", "fixed": "the same at a fixed interval",
}  # fmt: skip
"""What to call a part that nobody plays."""


@dataclass(frozen=True)
class Finding:
    """A verdict and the numbers behind it."""

    verdict: Verdict
    evidence: str

    @property
    def can_tell(self) -> bool:
        """Whether the runs could have decided at all; if not, a claim of many parts leaves this one out."""
        return self.verdict is not Verdict.UNTESTABLE


def untested(*absent: str) -> Finding:
    """Return the finding for runs that are not there."""
    return Finding(Verdict.UNTESTED, f"no ended runs of {' and '.join(PART_NAMES.get(one, one) for one in absent)}")


def untestable(reason: str) -> Finding:
    """Return the finding for runs that could not have decided, however they came out."""
    return Finding(Verdict.UNTESTABLE, reason)


def shared_confidence(parts: int) -> float:
    """Return the confidence of each interval of a claim of several parts, so that all together keep 95 %."""
    return 1 - (1 - CONFIDENCE) / parts


def said(ratio: Interval) -> str:
    """Return an interval of ratios in words, with the number of seeds and the noise."""
    return f"{bare(ratio)} ({how_many(ratio)}, {noise_of(ratio)})" if ratio.count else "unknown"


def bare(ratio: Interval) -> str:
    """Return an interval of ratios in words."""
    return f"{ratio.center:.2f}×{between(ratio, '.2f')}".replace("inf", "∞")


def points(difference: Interval) -> str:
    """Return a difference of accuracies in words, in points, with the number of seeds and the noise."""
    scaled = [100 * end for end in (difference.center, difference.low, difference.high, difference.noise)]
    told = replace(difference, center=scaled[0], low=scaled[1], high=scaled[2], noise=scaled[3])
    return f"{told.center:+.2f} points{between(told, '+.2f')} ({how_many(told)}, {noise_of(told)})"


def between(found: Interval, form: str) -> str:
    """Return the ends of an interval."""
    return f" [{found.low:{form}}, {found.high:{form}}]" if found.count > 1 else " without an interval"


def how_many(found: Interval) -> str:
    """Return how many runs a comparison is of."""
    return f"n = {' + '.join(str(count) for count in found.counts)}"


def noise_of(found: Interval) -> str:
    """Return in words how far a method is from itself."""
    unit = "×" if found.is_ratio else " points"
    return "noise unknown" if math.isnan(found.noise) else f"noise {found.noise:.2f}{unit}"


def in_common(found: Sequence[Interval]) -> str:
    """Return what many comparisons share: their confidence, the number of runs, and the largest noise among them."""
    widest = max(found, key=lambda one: -1.0 if math.isnan(one.noise) else one.noise)
    noise = "noise unknown" if math.isnan(widest.noise) else f"{noise_of(widest)} at most"
    return f"intervals of {100 * widest.confidence:.2f} %, {how_many(widest)}, {noise}"


def resolution(found: Iterable[Interval], margin: float, name: str) -> str:
    """Return how many seeds a margin takes in every comparison, where these were too few."""
    needed = max((one.seeds_for(margin) for one in found if one.count < one.seeds_for(margin)), default=math.nan)
    return f"; {name} takes {needed:.0f} seeds" if math.isfinite(needed) else ""


def bounded_ratio(
    slow: DataFrame, fast: DataFrame, confidence: float = CONFIDENCE, *, is_paired: bool = False
) -> Interval:
    """Return the ratio of first hits, where some runs may never have arrived.

    Who never reached the threshold counts with the whole budget: the ratio is then a bound that understates the
    difference, and the interval is open on that side. Where nobody arrived, nothing is said.
    """
    if is_paired:
        both = DataFrame({"slow": slow["epoch"], "fast": fast["epoch"]}).reindex(slow.index.intersection(fast.index))
        arrived = both.index[both.notna().any(axis=1)]
        slow, fast = slow[slow.index.isin(arrived)], fast[fast.index.isin(arrived)]
    if not (slow["epoch"].notna().any() or fast["epoch"].notna().any()):
        return ratio_interval({}, {})
    compare_them = paired_ratio if is_paired else ratio_interval
    ratio = compare_them(arrival(slow), arrival(fast), confidence)
    if slow["epoch"].isna().any():
        ratio = replace(ratio, high=math.inf)
    return replace(ratio, low=0.0) if fast["epoch"].isna().any() else ratio


def arrival(hits: DataFrame) -> Values:
    """Return when each run crossed the threshold, the budget for one that never did."""
    return hits["crossing_epoch"].fillna(hits["budget"])


def sooner(
    setting: Setting, slow: str, fast: str, threshold: float, confidence: float = CONFIDENCE
) -> tuple[Interval, str]:
    """Return how many times sooner one part reaches the threshold, in epochs, with a note on seeds that never did."""
    hits = setting.hits(threshold)
    first, second = (hits[hits["label"] == setting.labels[part]].set_index("seed") for part in (slow, fast))
    ratio = with_noise(
        bounded_ratio(first, second, confidence), setting.twice(lambda one: crossings(one.hits(threshold)))
    )
    has_all = bool(first["epoch"].notna().all()) and bool(second["epoch"].notna().all())
    note = f" (reached on {arrivals(second)} seeds against {arrivals(first)}: a bound)"
    return ratio, "" if has_all else note


def crossings(hits: DataFrame) -> dict[str, Values]:
    """Return when the runs of each label crossed a threshold, by seed."""
    found: dict[str, dict[int, float]] = {}
    for label, seed, epoch in hits[["label", "seed", "crossing_epoch"]].itertuples(index=False):
        found.setdefault(str(label), {})[seed] = epoch
    return dict(found)


def arrivals(hits: DataFrame) -> str:
    """Return how many runs reached the threshold, of how many."""
    return f"{hits['epoch'].count()} of {len(hits)}"


def direction(ratio: Interval) -> Verdict:
    """Return holds if the whole interval lies above 1, does not hold if below, else undecided, as within the noise."""
    if not ratio.is_beyond_noise:
        return Verdict.UNDECIDED
    if ratio.low > 1:
        return Verdict.HOLDS
    return Verdict.FAILS if ratio.high <= 1 else Verdict.UNDECIDED


def equality(found: Interval, low: float, high: float) -> Verdict:
    """Return holds if the interval lies inside the margin, does not hold if wholly outside, else undecided.

    A margin that is finer than the noise confirms nothing, and a difference within the noise refutes nothing.
    """
    if low <= found.low and found.high <= high:
        return Verdict.UNDECIDED if found.noise > high else Verdict.HOLDS
    is_outside = found.high < low or found.low > high
    return Verdict.FAILS if is_outside and found.is_beyond_noise else Verdict.UNDECIDED


def tie_or(verdict: Verdict, found: Interval) -> Verdict:
    """Return a tie where a comparison is undecided, because neither is faster by more than 10 %; else the verdict."""
    is_tie = verdict is Verdict.UNDECIDED and equality(found, 1 / RATIO_MARGIN, RATIO_MARGIN) is Verdict.HOLDS
    return Verdict.TIE if is_tie else verdict


def with_control(gain: Interval, control: Interval) -> Verdict:
    """Weigh a gain against what the control at the same effective rate needs, as a ratio to CAO.

    The control does as well if with confidence it needs at most 10 % more than CAO.
    """
    if direction(gain) is not Verdict.HOLDS:
        return direction(gain)
    if control.high <= RATIO_MARGIN:
        return Verdict.RATE
    return Verdict.HOLDS if control.low > 1 and control.is_beyond_noise else Verdict.UNDECIDED


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim with several parts: the worst of theirs."""
    order = (
        Verdict.FAILS, Verdict.TIE, Verdict.UNDECIDED, Verdict.UNTESTABLE, Verdict.UNTESTED, Verdict.RATE,
        Verdict.HOLDS,
    )  # fmt: skip
    return min(verdicts, key=order.index, default=Verdict.UNTESTED)


def can_tell(setting: Setting, names: Iterable[str], threshold: float) -> bool:
    """Say whether no run reached a threshold in its first epoch, where its crossing cannot be placed."""
    hits = setting.hits(threshold)
    asked = hits["label"].isin([setting.labels.get(name) for name in names])
    return not (hits.loc[asked, "epoch"] <= 1).any()


def compare(setting: Setting, slow: str, control: str, threshold: float, parts: int = 1) -> Finding:
    """Judge whether CAO reaches a threshold sooner than another, and not by its rate alone."""
    if absent := setting.lacking("cao", slow):
        return untested(*absent)
    if not can_tell(setting, ("cao", slow, control), threshold):
        return untestable(f"Train loss {threshold:g} was reached in a first epoch: too soon to tell")
    confidence = shared_confidence(parts)
    gain, note = sooner(setting, slow, "cao", threshold, confidence)
    if gain.count == 0:
        return untestable(f"Train loss {threshold:g} was reached by neither on any seed")
    evidence = f"To train loss {threshold:g}, {setting.name(slow)} needs {said(gain)} CAO's epochs{note}"
    if control not in setting.labels:
        verdict = Verdict.UNDECIDED if direction(gain) is Verdict.HOLDS else tie_or(direction(gain), gain)
        return Finding(verdict, f"{evidence}; no control at the same effective rate")
    rival, rival_note = sooner(setting, control, "cao", threshold, confidence)
    against = f"the control {setting.name(control)} needs {said(rival)}{rival_note}"
    more = resolution([gain, rival], math.log(RATIO_MARGIN), "± 10 %")
    return Finding(tie_or(with_control(gain, rival), gain), f"{evidence}; {against}{more}")
