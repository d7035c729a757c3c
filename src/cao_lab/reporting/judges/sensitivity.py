"""What damping and the refresh interval do."""

from cao_lab.protocol import RATIO_MARGIN
from cao_lab.reporting.analysis import sensitivity
from cao_lab.reporting.intervals import Interval, interval, ratio_interval
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict, all_of, bounded_ratio, direction, equality, said, untested


def damping_effect(setting: Setting) -> Finding:
    """Holds if epochs to the primary threshold at the largest η over those at the smallest, paired over refresh
    intervals and seeds, have an interval above 1; does not hold if below 1; undecided otherwise. With P as written
    η divides the rate on the whole complement, so that this cannot tell damping from a smaller rate.
    """
    epochs = ends_ratio(setting, "damping", "crossing_epoch")
    return (
        Finding(direction(epochs), f"epochs, largest η over smallest: {said(epochs)}")
        if epochs.count
        else untested("two values of η")
    )


def refresh_effect(setting: Setting) -> Finding:
    """Holds if the longest refresh interval needs more epochs to the primary threshold than the shortest, and the
    shortest more seconds an epoch than the longest, paired over η and seeds, both by intervals beyond 1; does not
    hold if one lies on the other side of 1 or the epochs lie within ± 10 %: then there is nothing to balance.
    """
    epochs = ends_ratio(setting, "refresh_every", "crossing_epoch")
    seconds = ends_ratio(setting, "refresh_every", "seconds_per_epoch")
    if not epochs.count:
        return untested("two refresh intervals")
    is_flat = equality(epochs, 1 / RATIO_MARGIN, RATIO_MARGIN) is Verdict.HOLDS
    stale = Verdict.FAILS if is_flat else direction(epochs)
    cheaper = direction(Interval(1 / seconds.center, 1 / seconds.high, 1 / seconds.low, seconds.count))
    evidence = f"longest m over shortest: epochs {said(epochs)}, seconds an epoch {said(seconds)}"
    return Finding(all_of([stale, cheaper]), evidence)


def ends_ratio(setting: Setting, knob: str, unit: str) -> Interval:
    """Return a quantity at a knob's largest value over that at its smallest, paired over all else."""
    if setting.goal is None:
        return interval([])
    cells = sensitivity(setting.epochs, setting.goal.hits)
    other = "refresh_every" if knob == "damping" else "damping"
    high, low = (cells[cells[knob] == end].set_index([other, "seed"]) for end in (cells[knob].max(), cells[knob].min()))
    if cells[knob].nunique() < 2:
        return interval([])
    return bounded_ratio(high, low) if unit == "crossing_epoch" else ratio_interval(high[unit], low[unit])
