"""How soon CAO reaches a train loss: against Adam, at many thresholds, by rank, without curvature, as printed."""

import math

from pandas import DataFrame, Series

from cao_lab.facts import PAPER_THRESHOLDS
from cao_lab.protocol import ACCURACY_MARGIN, AS_PRINTED, RATIO_MARGIN
from cao_lab.reporting.intervals import ratio_interval
from cao_lab.reporting.judges.accuracy import accuracy_difference
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    bare,
    compare,
    direction,
    equality,
    in_common,
    points,
    resolution,
    said,
    shared_confidence,
    sooner,
    untestable,
    untested,
)

UNDECLARED = untested("a declared threshold")


def speed(setting: Setting) -> Finding:
    """Holds if the interval of Adam's epochs to the primary threshold over CAO's (k = 1) lies above 1 and the control
    at the same effective rate (matched SGD, or rank 0 as P = I/η; tuned SGD without momentum where all are tuned) needs
    more epochs than CAO. Only because of the learning rate if the control needs, with confidence, at most 10 % more.
    Does not hold if the interval lies below 1. A tie if it lies within ± 10 %, and the noise too. Not testable where
    neither arrives. Undecided otherwise, without a control, or within the noise.
    """
    return UNDECLARED if setting.thresholds is None else compare(setting, "adam", "matched", setting.thresholds.primary)


def factor(setting: Setting) -> Finding:
    """Holds if the whole interval of Adam's epochs over CAO's (k = 1) to the paper's train loss of 0.75 is at least
    2.95/1.1; does not hold if the whole interval is below that; undecided otherwise. It asks for the size of the gain,
    not for its cause. Not testable where neither reaches that loss.
    """
    level = PAPER_THRESHOLDS.primary
    if absent := setting.lacking("cao", "adam"):
        return untested(*absent)
    gain, note = sooner(setting, "adam", "cao", level)
    if not gain.count:
        lowest = setting.epochs["train_loss"].min()
        return untestable(f"nobody comes near a train loss of {level:g}: the lowest of any method is {lowest:.3g}")
    bar = 2.95 / RATIO_MARGIN
    verdict = Verdict.HOLDS if gain.low >= bar else Verdict.FAILS if gain.high < bar else Verdict.UNDECIDED
    return Finding(verdict, f"To train loss {level:g}, Adam needs {said(gain)} CAO's epochs{note}")


def threshold_range(setting: Setting) -> Finding:
    """The rule for the speed over Adam at every declared threshold, the worst verdict counts; with m thresholds each
    interval has the confidence 1 − 0.05/m. Thresholds that neither CAO nor Adam reached, or that a run reached in its
    first epoch, cannot tell and are left out.
    """
    if setting.thresholds is None:
        return UNDECLARED
    if absent := setting.lacking("cao", "adam"):
        return untested(*absent)
    levels = setting.thresholds.sweep
    found = {level: compare(setting, "adam", "matched", level, len(levels)) for level in levels}
    told = {level: one.verdict for level, one in found.items() if one.can_tell}
    if not told:
        return untestable("no declared threshold can tell")
    names = {verdict: [f"{level:g}" for level, one in told.items() if one is verdict] for verdict in Verdict}
    each = "; ".join(f"{verdict} at {', '.join(some)}" for verdict, some in names.items() if some)
    gains = [sooner(setting, "adam", "cao", level, shared_confidence(len(levels)))[0] for level in told]
    return Finding(all_of(told.values()), f"{each} ({in_common(gains)})")


def rank_insensitivity(setting: Setting) -> Finding:
    """Holds if for k = 3 and k = 5 both the epochs to the primary threshold lie within ± 10 % and the final test
    accuracy within ± 1 point of k = 1, by intervals of 98.75 %, as there are four; does not hold if one of the four
    lies wholly outside its margin; undecided otherwise, or where a margin is finer than the noise.
    """
    if absent := setting.lacking("cao", "rank3", "rank5"):
        return untested(*absent)
    if setting.thresholds is None:
        return UNDECLARED
    epochs, accuracies, told, confidence = [], [], [], shared_confidence(4)
    for rank in ("rank3", "rank5"):
        ratio, note = sooner(setting, rank, "cao", setting.thresholds.primary, confidence)
        difference = accuracy_difference(setting, rank, "cao", confidence)
        told.append(f"{setting.name(rank)}: epochs {said(ratio)}{note}, accuracy {points(difference)}")
        epochs.append(ratio)
        accuracies.append(difference)
    verdicts = [equality(one, 1 / RATIO_MARGIN, RATIO_MARGIN) for one in epochs]
    verdicts += [equality(one, -ACCURACY_MARGIN, ACCURACY_MARGIN) for one in accuracies]
    more = resolution(epochs, math.log(RATIO_MARGIN), "± 10 %") + resolution(accuracies, ACCURACY_MARGIN, "± 1 point")
    return Finding(all_of(verdicts), "; ".join(told) + f" (against k = 1){more}")


def curvature_off(setting: Setting) -> Finding:
    """Holds if k = 0 as in Algorithm 1 (d = g) needs more epochs to the primary threshold than k = 1, by the interval
    of ratios, and k = 0 as in the text (P = I/η) does too. Only because of the learning rate if the latter needs, with
    confidence, at most 10 % more. Does not hold if Algorithm 1's k = 0 is as fast or faster.
    """
    if setting.thresholds is None:
        return UNDECLARED
    return compare(setting, "rank0-unit", "rank0-inverse", setting.thresholds.primary)


def as_printed(setting: Setting) -> Finding:
    """Holds if CAO (k = 1) with signed λ as the paper prints P, with block Lanczos as its text has it, and after a
    brief phase of SGD each needs epochs to the primary threshold within ± 10 % of our main setting's, by intervals of
    98.3 %, as there are three: then the other verdicts speak for the paper's own form. Does not hold if one lies wholly
    outside; undecided otherwise, or where the noise is larger.
    """
    found = [name for name in AS_PRINTED if name in setting.labels]
    if absent := setting.lacking("cao") or setting.lacking(*AS_PRINTED):
        return untested(*absent)
    if setting.thresholds is None:
        return UNDECLARED
    confidence, level = shared_confidence(len(AS_PRINTED)), setting.thresholds.primary
    epochs = {name: sooner(setting, name, "cao", level, confidence) for name in found}
    told = "; ".join(f"{name}: epochs {said(ratio)}{note}" for name, (ratio, note) in epochs.items())
    ratios = [ratio for ratio, _ in epochs.values()]
    more = resolution(ratios, math.log(RATIO_MARGIN), "± 10 %")
    return Finding(all_of(equality(one, 1 / RATIO_MARGIN, RATIO_MARGIN) for one in ratios), told + more)


def adaptive_refresh(setting: Setting) -> Finding:
    """Holds if CAO with its rules needs, with confidence, at most 10 % more epochs to the primary threshold than with a
    fixed interval and all else equal, and fewer products in the whole budget, by intervals of 97.5 %; does not hold if
    it needs more than that, or more products; undecided otherwise, or within the noise.
    """
    if absent := setting.lacking("adaptive", "fixed"):
        return untested(*absent)
    if setting.thresholds is None:
        return UNDECLARED
    confidence = shared_confidence(2)
    epochs, note = sooner(setting, "adaptive", "fixed", setting.thresholds.primary, confidence)
    saved = ratio_interval(products(setting.of("fixed")), products(setting.of("adaptive")), confidence)
    told = f"adaptive over fixed: epochs {said(epochs)}{note}; products, fixed over adaptive: {bare(saved)}"
    return Finding(all_of([equality(epochs, 0.0, RATIO_MARGIN), direction(saved)]), told)


def products(epochs: DataFrame) -> Series:
    """Return the Hessian products of each ended run, by seed; one for none, so that a ratio can be taken."""
    last = epochs[epochs["has_ended"]].drop_duplicates("run", keep="last").set_index("seed")
    spent: Series = last["hessian_products"].clip(lower=1.0)
    return spent
