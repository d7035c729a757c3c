"""Where training ends: test accuracy."""

from pandas import Series

from cao_lab.protocol import ACCURACY_MARGIN
from cao_lab.reporting.analysis import final_results
from cao_lab.reporting.intervals import difference_interval
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, equality, untested


def final_accuracy(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) final test accuracy minus Adam's lies within ± 1 point; does not
    hold if it lies wholly outside, on either side; undecided otherwise. A diverged run counts as accuracy 0.
    """
    found = difference_interval(last_accuracy(setting, "cao"), last_accuracy(setting, "adam"))
    if not found.count:
        return untested("CAO and adam")
    verdict = equality(found, -ACCURACY_MARGIN, ACCURACY_MARGIN)
    ends = f" [{100 * found.low:+.2f}, {100 * found.high:+.2f}]" if found.count > 1 else " (1 seed, no interval)"
    return Finding(verdict, f"CAO − Adam: {100 * found.center:+.2f} points{ends}, seeds: {found.count}")


def last_accuracy(setting: Setting, part: str) -> Series:
    """Return the final test accuracy by seed, 0 for a diverged run."""
    return final_results(setting.of(part)).set_index("seed")["test_accuracy"].fillna(0.0)
