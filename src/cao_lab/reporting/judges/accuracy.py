"""Where training ends, and whether it is there early: test accuracy."""

import math

import numpy as np
from pandas import DataFrame, Series

from cao_lab.protocol import ACCURACY_MARGIN, CONFIDENCE, EARLY_SHARE
from cao_lab.reporting.analysis import final_results
from cao_lab.reporting.intervals import Interval, difference_interval, paired_difference, with_noise
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    equality,
    points,
    resolution,
    shared_confidence,
    untested,
)

PAPERS = ("sgd", "adam", "cao")


def final_accuracy(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) final test accuracy minus Adam's lies within ± 1 point; does not hold if
    it lies wholly outside, on either side; undecided otherwise, or where the noise is larger. A diverged run counts as
    accuracy 0.
    """
    found = accuracy_difference(setting, "cao", "adam")
    if not found.count:
        return untested("CAO and adam")
    more = resolution([found], ACCURACY_MARGIN, "± 1 point")
    return Finding(equality(found, -ACCURACY_MARGIN, ACCURACY_MARGIN), f"CAO − Adam: {points(found)}{more}")


def sgd_gap(setting: Setting) -> Finding:
    """Holds if the interval of SGD's final test accuracy minus CAO's (k = 1) lies below −1 point; does not hold if it
    lies above; undecided otherwise, or within the noise. A diverged run counts as accuracy 0.
    """
    found = accuracy_difference(setting, "sgd", "cao")
    if not found.count:
        return untested("SGD and CAO")
    is_below, is_above = found.high < -ACCURACY_MARGIN, found.low > -ACCURACY_MARGIN
    is_decided = (is_below or is_above) and found.is_beyond_noise
    verdict = Verdict.UNDECIDED if not is_decided else Verdict.HOLDS if is_below else Verdict.FAILS
    return Finding(verdict, f"SGD − CAO: {points(found)}{resolution([found], ACCURACY_MARGIN, '± 1 point')}")


def saturation(setting: Setting) -> Finding:
    """Holds if for SGD, Adam and CAO (k = 1) the final test accuracy lies at most 1 point above that at the end of the
    early window (40 % of the budget), by the interval over seeds (98.3 %, as there are three), paired by seed; does not
    hold if one interval lies wholly above 1 point; undecided otherwise.
    """
    if absent := setting.lacking(*PAPERS):
        return untested(*absent)
    confidence = shared_confidence(len(PAPERS))
    gains = {part: later_gain(setting.of(part), confidence) for part in PAPERS}
    verdicts = [equality(gain, -math.inf, ACCURACY_MARGIN) for gain in gains.values()]
    told = "; ".join(f"{setting.name(part)} gains {points(gain)}" for part, gain in gains.items())
    return Finding(all_of(verdicts), f"after the early window {told}")


def later_gain(epochs: DataFrame, confidence: float) -> Interval:
    """Return by how much the test accuracy of one method rises after the early window, seed by seed."""
    ended = epochs[epochs["has_ended"]]
    early = ended[ended["epoch"] == np.ceil(EARLY_SHARE * ended["budget"])].set_index("seed")["test_accuracy"]
    return paired_difference(final_results(ended).set_index("seed")["test_accuracy"], early, confidence)


def accuracy_difference(setting: Setting, part: str, other: str, confidence: float = CONFIDENCE) -> Interval:
    """Return the difference of the final test accuracies of two parts, beside the noise."""
    accuracies = by_label(setting)
    own, others = (accuracies.get(setting.labels.get(name, ""), Series(dtype=float)) for name in (part, other))
    return with_noise(difference_interval(own, others, confidence), setting.twice(by_label))


def by_label(setting: Setting) -> dict[str, Series]:
    """Return the final test accuracies of each label by seed, 0 for a diverged run."""
    finals = final_results(setting.epochs)
    return {str(label): rows.set_index("seed")["test_accuracy"].fillna(0.0) for label, rows in finals.groupby("label")}
