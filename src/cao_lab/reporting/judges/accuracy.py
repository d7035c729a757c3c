"""Where training ends: test accuracy."""

from pandas import Series

from cao_lab.protocol import ACCURACY_MARGIN, CONFIDENCE
from cao_lab.reporting.analysis import final_results
from cao_lab.reporting.intervals import Interval, difference_interval, with_noise
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, equality, points, resolution, untested


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


def accuracy_difference(setting: Setting, part: str, other: str, confidence: float = CONFIDENCE) -> Interval:
    """Return the difference of the final test accuracies of two parts, beside the noise."""
    accuracies = by_label(setting)
    own, others = (accuracies.get(setting.labels.get(name, ""), Series(dtype=float)) for name in (part, other))
    return with_noise(difference_interval(own, others, confidence), setting.twice(by_label))


def by_label(setting: Setting) -> dict[str, Series]:
    """Return the final test accuracies of each label by seed, 0 for a diverged run."""
    finals = final_results(setting.epochs)
    return {str(label): rows.set_index("seed")["test_accuracy"].fillna(0.0) for label, rows in finals.groupby("label")}
