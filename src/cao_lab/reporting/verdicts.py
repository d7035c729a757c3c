"""From intervals to verdicts: the few rules that every claim is judged by."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from pandas import DataFrame

from cao_lab.protocol import RATIO_MARGIN
from cao_lab.reporting.intervals import Interval, ratio_interval
from cao_lab.reporting.setting import Setting


class Verdict(StrEnum):
    """What logs say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    RATE = "holds only because of the learning rate"
    UNDECIDED = "undecided"
    UNTESTED = "not tested here"


PART_NAMES = {
    "cao": "CAO (k = 1)", "rank3": "CAO (k = 3)", "rank5": "CAO (k = 5)", "sgd": "SGD", "adam": "Adam",
    "rank0-unit": "CAO (k = 0, d = g)",
}  # fmt: skip
"""What to call a part that nobody plays."""


@dataclass(frozen=True)
class Finding:
    """A verdict and the numbers behind it."""

    verdict: Verdict
    evidence: str
    can_tell: bool = True
    """Whether the runs could have decided at all; if not, a claim of many parts leaves this one out."""


def untested(*absent: str) -> Finding:
    """Return the finding for runs that are not there."""
    return Finding(Verdict.UNTESTED, f"no ended runs of {' and '.join(PART_NAMES.get(one, one) for one in absent)}")


def said(ratio: Interval) -> str:
    """Return an interval of ratios in words."""
    if ratio.count == 0:
        return "an unknown multiple of"
    if ratio.count < 2:
        return f"{ratio.center:.2f}× (one seed, no interval)"
    return f"{ratio.center:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]".replace("inf", "∞")


def bounded_ratio(slow: DataFrame, fast: DataFrame) -> Interval:
    """Return the ratio of first hits of runs that share an index, where some may never have arrived.

    Where only one of a pair reached the threshold, the other counts with its whole budget: the ratio is then a bound
    that understates the difference, and the interval is open on that side. Where neither did, the pair says nothing.
    """
    pairs = slow.add_suffix("_slow").join(fast.add_suffix("_fast"), how="inner")
    pairs = pairs[pairs["epoch_slow"].notna() | pairs["epoch_fast"].notna()]
    ends = [pairs[f"crossing_epoch_{side}"].fillna(pairs[f"budget_{side}"]) for side in ("slow", "fast")]
    ratio = ratio_interval(ends[0], ends[1])
    if pairs["epoch_slow"].isna().any():
        ratio = replace(ratio, high=math.inf)
    return replace(ratio, low=0.0) if pairs["epoch_fast"].isna().any() else ratio


def sooner(setting: Setting, slow: str, fast: str, threshold: float) -> tuple[Interval, str]:
    """Return how many times sooner one part reaches the threshold, in epochs, with a note on seeds that never did."""
    hits = setting.hits(threshold)
    first, second = (hits[hits["label"] == setting.labels[part]].set_index("seed") for part in (slow, fast))
    note = f" (reached on {arrivals(second)} seeds against {arrivals(first)}: a bound)"
    has_all = bool(first["epoch"].notna().all()) and bool(second["epoch"].notna().all())
    return bounded_ratio(first, second), "" if has_all else note


def arrivals(hits: DataFrame) -> str:
    """Return how many runs reached the threshold, of how many."""
    return f"{hits['epoch'].count()} of {len(hits)}"


def direction(ratio: Interval) -> Verdict:
    """Return holds if the whole interval lies above 1, does not hold if below, else undecided."""
    if ratio.low > 1:
        return Verdict.HOLDS
    return Verdict.FAILS if ratio.high <= 1 else Verdict.UNDECIDED


def equality(found: Interval, low: float, high: float) -> Verdict:
    """Return holds if the interval lies inside the margin, does not hold if wholly outside, else undecided."""
    if low <= found.low and found.high <= high:
        return Verdict.HOLDS
    return Verdict.FAILS if found.high < low or found.low > high else Verdict.UNDECIDED


def with_control(gain: Interval, control: Interval) -> Verdict:
    """Weigh a gain against what the control at the same effective rate needs, as a ratio to CAO.

    The control does as well if with confidence it needs at most 10 % more than CAO.
    """
    if direction(gain) is not Verdict.HOLDS:
        return direction(gain)
    if control.high <= RATIO_MARGIN:
        return Verdict.RATE
    return Verdict.HOLDS if control.low > 1 else Verdict.UNDECIDED


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim with several parts: the worst of theirs."""
    order = (Verdict.FAILS, Verdict.UNDECIDED, Verdict.UNTESTED, Verdict.RATE, Verdict.HOLDS)
    return min(verdicts, key=order.index, default=Verdict.UNTESTED)


def can_tell(setting: Setting, names: Iterable[str], threshold: float) -> bool:
    """Say whether no run reached a threshold in its first epoch, where its crossing cannot be placed."""
    hits = setting.hits(threshold)
    asked = hits["label"].isin([setting.labels.get(name) for name in names])
    return not (hits.loc[asked, "epoch"] <= 1).any()


def compare(setting: Setting, slow: str, control: str, threshold: float) -> Finding:
    """Judge whether CAO reaches a threshold sooner than another, and not by its rate alone."""
    if absent := setting.lacking("cao", slow):
        return untested(*absent)
    if not can_tell(setting, ("cao", slow, control), threshold):
        evidence = f"Train loss {threshold:g} was reached in a first epoch: too soon to tell"
        return Finding(Verdict.UNDECIDED, evidence, can_tell=False)
    gain, note = sooner(setting, slow, "cao", threshold)
    if gain.count == 0:
        evidence = f"Train loss {threshold:g} was reached by neither on any common seed"
        return Finding(Verdict.UNDECIDED, evidence, can_tell=False)
    evidence = f"To train loss {threshold:g}, {setting.name(slow)} needs {said(gain)} CAO's epochs{note}"
    if control not in setting.labels:
        verdict = Verdict.UNDECIDED if direction(gain) is Verdict.HOLDS else direction(gain)
        return Finding(verdict, f"{evidence}; no control at the same effective rate")
    rival, rival_note = sooner(setting, control, "cao", threshold)
    against = f"the control {setting.name(control)} needs {said(rival)}{rival_note}"
    return Finding(with_control(gain, rival), f"{evidence}; {against}")
