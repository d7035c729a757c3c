"""What damping and the refresh interval do."""

from pandas import DataFrame

from cao_lab.protocol import RATIO_MARGIN, START_MARGIN, start_loss
from cao_lab.reporting.analysis import sensitivity
from cao_lab.reporting.intervals import Interval, paired_ratio, variance_ratio
from cao_lab.reporting.judges.curves import early_means
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    bounded_ratio,
    direction,
    equality,
    said,
    shared_confidence,
    untested,
)


def damping_effect(setting: Setting) -> Finding:
    """Holds if epochs to the primary threshold at the largest η over those at the smallest, paired over refresh
    intervals and seeds, have an interval above 1; does not hold if below 1; undecided otherwise. With P as written η
    divides the rate on the whole complement, so that this cannot tell damping from a smaller rate.
    """
    epochs = ends_ratio(setting, "damping", "crossing_epoch")
    return (
        Finding(direction(epochs), f"epochs, largest η over smallest: {said(epochs)}")
        if epochs.count
        else untested("two values of η")
    )


def refresh_effect(setting: Setting) -> Finding:
    """Holds if the longest refresh interval needs more epochs to the primary threshold than the shortest, and the
    shortest more seconds an epoch than the longest, paired over η and seeds, both by intervals (97.5 %) beyond 1; does
    not hold if one lies on the other side of 1 or the epochs lie within ± 10 %: then there is nothing to balance.
    """
    epochs = ends_ratio(setting, "refresh_every", "crossing_epoch", parts=2)
    seconds = ends_ratio(setting, "refresh_every", "seconds_per_epoch", parts=2)
    if not epochs.count:
        return untested("two refresh intervals")
    is_flat = equality(epochs, 1 / RATIO_MARGIN, RATIO_MARGIN) is Verdict.HOLDS
    stale = Verdict.FAILS if is_flat else direction(epochs)
    cheaper = direction(Interval(1 / seconds.center, 1 / seconds.high, 1 / seconds.low, seconds.counts))
    evidence = f"longest m over shortest: epochs {said(epochs)}, seconds an epoch {said(seconds)}"
    return Finding(all_of([stale, cheaper]), evidence)


def ends_ratio(setting: Setting, knob: str, unit: str, parts: int = 1) -> Interval:
    """Return a quantity at a knob's largest value over that at its smallest, paired over all else."""
    if setting.goal is None:
        return paired_ratio({}, {})
    cells = sensitivity(setting.epochs, setting.goal.hits)
    other = "refresh_every" if knob == "damping" else "damping"
    high, low = (cells[cells[knob] == end].set_index([other, "seed"]) for end in (cells[knob].max(), cells[knob].min()))
    if cells[knob].nunique() < 2:
        return paired_ratio({}, {})
    confidence = shared_confidence(parts)
    if unit == "crossing_epoch":
        return bounded_ratio(high, low, confidence, is_paired=True)
    return paired_ratio(high[unit], low[unit], confidence)


def damping_variance(setting: Setting) -> Finding:
    """Holds if the variance over seeds of the early mean train loss, pooled over refresh intervals, is smaller at the
    largest η than at the smallest, by Fisher's interval of the ratio below 1; does not hold if it lies above 1;
    undecided otherwise.
    """
    groups = {
        end: [
            list(early_means(cell))
            for _, cell in setting.epochs[setting.epochs["damping"] == end].groupby("refresh_every")
        ]
        for end in (setting.epochs["damping"].min(), setting.epochs["damping"].max())
    }
    if len(groups) < 2:
        return untested("two values of η")
    small, large = groups.values()
    ratio = variance_ratio(small, large)
    if not ratio.count:
        return untested("two seeds")
    return Finding(direction(ratio), f"variance, smallest η over largest: {said(ratio)}")


def small_damping(setting: Setting) -> Finding:
    """Holds if at the smallest η some run diverged, or had an epoch above its start, and none did so at the largest;
    does not hold if no run of either did; undecided otherwise.
    """
    shaken = {
        end: unstable_share(setting, end) for end in (setting.epochs["damping"].min(), setting.epochs["damping"].max())
    }
    if len(shaken) < 2:
        return untested("two values of η")
    (few, small), (many, large) = shaken.values()
    verdict = Verdict.HOLDS if few and not many else Verdict.UNDECIDED if few or many else Verdict.FAILS
    return Finding(verdict, f"{few} of {small} runs unstable at the smallest η, {many} of {large} at the largest")


def unstable_share(setting: Setting, damping: float) -> tuple[int, int]:
    """Return how many of the ended runs at one η diverged or went above their start, and how many there are."""
    rows = setting.epochs[(setting.epochs["damping"] == damping) & setting.epochs["has_ended"]]
    runs = [run for _, run in rows.groupby("run")]
    return sum(is_unstable(setting.task, run) for run in runs), len(runs)


def is_unstable(task: str, run: DataFrame) -> bool:
    """Say whether a run diverged, or had an epoch whose train loss lies above its start."""
    losses = run["train_loss"].to_numpy()
    start = start_loss(task, losses.tolist(), run["steps_per_epoch"].iloc[0])
    return bool(run["status"].iloc[0] == "diverged" or not (losses <= START_MARGIN * start).all())
