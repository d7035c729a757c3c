"""How soon CAO reaches a train loss: against Adam, at many thresholds, early on, by rank, and without curvature."""

import numpy as np
from pandas import DataFrame, Series

from cao_lab.protocol import ACCURACY_MARGIN, EARLY_SHARE, RATIO_MARGIN
from cao_lab.reporting.intervals import difference_interval, ratio_interval
from cao_lab.reporting.judges.accuracy import last_accuracy
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    compare,
    equality,
    said,
    sooner,
    untested,
    with_control,
)


def speed(setting: Setting) -> Finding:
    """Holds if the interval of Adam's epochs to the primary threshold over CAO's (k = 1) lies above 1 and
    the control at the same effective rate (matched SGD, or rank 0 as P = I/η; tuned SGD where all are tuned)
    needs more epochs than CAO. Only because of the learning rate if the control needs, with confidence, at most
    10 % more. Does not hold if the interval lies below 1. Undecided otherwise, or without a control.
    """
    return (
        untested("a declared threshold")
        if setting.thresholds is None
        else compare(setting, "adam", "matched", setting.thresholds.primary)
    )


def factor(setting: Setting) -> Finding:
    """Holds if the whole interval of Adam's epochs over CAO's (k = 1) is at least 2.95/1.1; does not hold if
    the whole interval is below that; undecided otherwise. It asks for the size of the gain, not for its cause, and
    below the paper's size for that at the threshold declared there.
    """
    if absent := setting.lacking("cao", "adam"):
        return untested(*absent)
    if setting.thresholds is None:
        return untested("a declared threshold")
    gain, note = sooner(setting, "adam", "cao", setting.thresholds.primary)
    bar = 2.95 / RATIO_MARGIN
    verdict = Verdict.HOLDS if gain.low >= bar else Verdict.FAILS if gain.high < bar else Verdict.UNDECIDED
    return Finding(verdict, f"To train loss {setting.thresholds.primary:g}, Adam needs {said(gain)} CAO's epochs{note}")


def threshold_range(setting: Setting) -> Finding:
    """The rule for the speed over Adam at every declared threshold, the worst verdict counts. Thresholds that
    neither CAO nor Adam reached, or that a run reached in its first epoch, cannot tell and are left out.
    """
    if setting.thresholds is None:
        return untested("a declared threshold")
    found = {level: compare(setting, "adam", "matched", level) for level in setting.thresholds.sweep}
    told = {level: one for level, one in found.items() if one.can_tell}
    levels = {verdict: [f"{level:g}" for level, one in told.items() if one.verdict is verdict] for verdict in Verdict}
    each = "; ".join(f"{verdict} at {', '.join(some)}" for verdict, some in levels.items() if some)
    verdict = all_of(one.verdict for one in told.values()) if told else Verdict.UNDECIDED
    return Finding(verdict, each or "no declared threshold can tell")


def early_loss(setting: Setting) -> Finding:
    """Holds if the mean train loss over the first 40 % of the budget is lower for CAO (k = 1) than for Adam and
    for SGD, each by an interval of per-seed ratios above 1, and the control's is more than CAO's. Only because
    of the learning rate if the control's is, with confidence, at most 10 % more. Does not hold if an interval
    lies below 1. Undecided otherwise.
    """
    if absent := setting.lacking("cao", "adam", "sgd"):
        return untested(*absent)
    means = {part: early_means(setting.of(part)) for part in ("cao", "adam", "sgd", "matched")}
    ratios = {part: ratio_interval(means[part], means["cao"]) for part in ("adam", "sgd", "matched")}
    verdicts = [with_control(ratios[part], ratios["matched"]) for part in ("adam", "sgd")]
    told = "; ".join(
        f"{setting.name(part)} has {said(ratio)} CAO's loss" for part, ratio in ratios.items() if ratio.count
    )
    return Finding(all_of(verdicts), told)


def early_means(epochs: DataFrame) -> Series:
    """Return each ended run's mean train loss over the early window, by seed; a diverged one is infinite."""
    early = epochs[epochs["has_ended"] & (epochs["epoch"] <= np.ceil(EARLY_SHARE * epochs["budget"]))]
    means: Series = early.assign(loss=early["train_loss"].fillna(np.inf)).groupby("seed")["loss"].mean()
    return means


def rank_insensitivity(setting: Setting) -> Finding:
    """Holds if for k = 3 and k = 5 both the epochs to the primary threshold lie within ± 10 % and the final test
    accuracy within ± 1 point of k = 1, by intervals; does not hold if one of the four intervals lies wholly
    outside its margin; undecided otherwise.
    """
    if absent := setting.lacking("cao", "rank3", "rank5"):
        return untested(*absent)
    if setting.thresholds is None:
        return untested("a declared threshold")
    verdicts, told = [], []
    for rank in ("rank3", "rank5"):
        epochs, note = sooner(setting, rank, "cao", setting.thresholds.primary)
        points = difference_interval(last_accuracy(setting, rank), last_accuracy(setting, "cao"))
        verdicts += [equality(epochs, 1 / RATIO_MARGIN, RATIO_MARGIN)]
        verdicts += [equality(points, -ACCURACY_MARGIN, ACCURACY_MARGIN)]
        told.append(f"{setting.name(rank)}: epochs {said(epochs)}{note}, accuracy {100 * points.center:+.2f} points")
    return Finding(all_of(verdicts), "; ".join(told) + " (against k = 1)")


def curvature_off(setting: Setting) -> Finding:
    """Holds if k = 0 as in Algorithm 1 (d = g) needs more epochs to the primary threshold than k = 1, by the
    interval of ratios, and k = 0 as in the text (P = I/η) does too. Only because of the learning rate if the
    latter needs, with confidence, at most 10 % more. Does not hold if Algorithm 1's k = 0 is as fast or faster.
    """
    if setting.thresholds is None:
        return untested("a declared threshold")
    return compare(setting, "rank0-unit", "rank0-inverse", setting.thresholds.primary)
