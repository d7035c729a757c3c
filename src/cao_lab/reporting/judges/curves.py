"""What the curves of train loss look like: early on, all along, and how far seeds lie apart."""

import math

import numpy as np
from pandas import DataFrame, Series

from cao_lab.protocol import EARLY_SHARE, RATIO_MARGIN
from cao_lab.reporting.intervals import Interval, Values, ratio_interval, seeds_to_tell, variance_ratio, with_noise
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    bare,
    direction,
    how_many,
    in_common,
    resolution,
    said,
    shared_confidence,
    untested,
    with_control,
)

RIVALS = ("adam", "sgd")
TOLD_APART = 6.0
"""A factor between variances for which the number of seeds is told that it takes."""


def early_loss(setting: Setting) -> Finding:
    """Holds if the mean train loss over the first 40 % of the budget is lower for CAO (k = 1) than for Adam and for
    SGD, each by an interval of ratios (97.5 %, as there are two) above 1, and the control's is more than CAO's. Only
    because of the learning rate if the control's is, with confidence, at most 10 % more. Does not hold if an interval
    lies below 1. Undecided otherwise, or within the noise.
    """
    if absent := setting.lacking("cao", *RIVALS):
        return untested(*absent)
    means = {part: early_means(setting.of(part)) for part in ("cao", *RIVALS, "matched")}
    confidence, twice = shared_confidence(len(RIVALS)), setting.twice(early_means_by_label)
    ratios = {
        part: with_noise(ratio_interval(means[part], means["cao"], confidence), twice) for part in (*RIVALS, "matched")
    }
    verdicts = [with_control(ratios[part], ratios["matched"]) for part in RIVALS]
    told = "; ".join(
        f"{setting.name(part)} has {said(ratio)} CAO's loss" for part, ratio in ratios.items() if ratio.count
    )
    more = resolution([ratios["matched"]], math.log(RATIO_MARGIN), "± 10 %")
    return Finding(all_of(verdicts), told + more)


def early_means_by_label(setting: Setting) -> dict[str, Values]:
    """Return each ended run's mean train loss over the early window, by label and seed."""
    return {label: early_means(epochs) for label, epochs in setting.by_label.items()}


def early_means(epochs: DataFrame) -> Series:
    """Return each ended run's mean train loss over the early window, by seed; a diverged one is infinite."""
    early = epochs[epochs["has_ended"] & (epochs["epoch"] <= np.ceil(EARLY_SHARE * epochs["budget"]))]
    means: Series = early.assign(loss=early["train_loss"].fillna(np.inf)).groupby("seed")["loss"].mean()
    return means


def consistently_below(setting: Setting) -> Finding:
    """Holds if at every epoch the interval of the ratio of Adam's mean train loss to CAO's (k = 1), and that of SGD's,
    lies above 1, at a confidence of 1 − 0.05/m for m comparisons; does not hold if one lies below 1; undecided
    otherwise, or within the noise at that epoch. It asks for the order of the curves, not for its cause.
    """
    if absent := setting.lacking("cao", *RIVALS):
        return untested(*absent)
    budget = int(setting.epochs["budget"].max())
    twice = setting.twice(lambda one: {label: losses_by_epoch(own) for label, own in one.by_label.items()})
    confidence = shared_confidence(len(RIVALS) * budget)
    losses = {part: losses_by_epoch(setting.of(part)) for part in ("cao", *RIVALS)}
    ratios = {part: epoch_ratios(losses[part], losses["cao"], twice, confidence) for part in RIVALS}
    verdicts, told = [], []
    for part in RIVALS:
        own = [direction(ratio) for ratio in ratios[part]]
        above = sum(one is Verdict.HOLDS for one in own)
        below = sum(one is Verdict.FAILS for one in own)
        told.append(f"{setting.name(part)}: above CAO's at {above} of {len(own)} epochs, below at {below}")
        verdicts += own
    seen = in_common([ratio for part in RIVALS for ratio in ratios[part]])
    return Finding(all_of(verdicts), f"{'; '.join(told)} ({seen})")


def epoch_ratios(
    losses: DataFrame, of_cao: DataFrame, twice: list[tuple[DataFrame, DataFrame]], confidence: float
) -> list[Interval]:
    """Return epoch by epoch how many times CAO's train loss another's is, beside the noise."""
    return [
        with_noise(
            ratio_interval(losses.loc[at], of_cao.loc[at], confidence),
            [(one.loc[at], same.loc[at]) for one, same in twice if at in one.index and at in same.index],
        )
        for at in losses.index.intersection(of_cao.index)
    ]


def losses_by_epoch(epochs: DataFrame) -> DataFrame:
    """Return train losses with a row per epoch and a column per seed."""
    return epochs.pivot_table(index="epoch", columns="seed", values="train_loss")


def early_variance(setting: Setting) -> Finding:
    """Holds if the variance over seeds of the mean train loss over the first 40 % of the budget is larger for Adam and
    for SGD than for CAO (k = 1), each by Fisher's interval (97.5 %, as there are two) of the ratio above 1; does not
    hold if one lies below 1; undecided otherwise. Three seeds a method tell variances apart that differ by a factor of
    79.
    """
    if absent := setting.lacking("cao", *RIVALS):
        return untested(*absent)
    losses = {part: list(early_means(setting.of(part))) for part in ("cao", *RIVALS)}
    ratios = {part: variance_ratio([losses[part]], [losses["cao"]], shared_confidence(len(RIVALS))) for part in RIVALS}
    if not all(ratio.count for ratio in ratios.values()):
        return untested("two seeds")
    told = "; ".join(
        f"{setting.name(part)} has {bare(ratio)} ({how_many(ratio)}) CAO's variance" for part, ratio in ratios.items()
    )
    verdict = all_of(direction(ratio) for ratio in ratios.values())
    needed = seeds_to_tell(TOLD_APART, shared_confidence(len(RIVALS)))
    more = f"; to tell a factor of {TOLD_APART:g} takes {needed} seeds" if verdict is Verdict.UNDECIDED else ""
    return Finding(verdict, told + more)
