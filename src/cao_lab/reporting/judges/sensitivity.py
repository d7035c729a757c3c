"""What damping and the refresh interval do."""

from dataclasses import replace

from pandas import DataFrame

from cao_lab.protocol import RATIO_MARGIN, START_MARGIN, start_loss
from cao_lab.reporting.analysis import sensitivity
from cao_lab.reporting.intervals import Interval, paired_ratio, variance_ratio, with_noise
from cao_lab.reporting.judges.curves import early_means
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    bare,
    bounded_ratio,
    crossings,
    direction,
    equality,
    how_many,
    said,
    shared_confidence,
    untested,
)


def damping_effect(setting: Setting) -> Finding:
    """Holds if epochs to the primary threshold at the largest η over those at the smallest, paired over refresh
    intervals and seeds, have an interval above 1, and those of rank 0 one at or below 1. Only because of the learning
    rate if rank 0 has one above 1 too: with P as written η divides the rate on the whole complement, and rank 0 has no
    curvature to damp. Does not hold if the interval lies below 1; undecided otherwise, or without rank 0.
    """
    epochs, plain = (ends_ratio(one, "damping", "crossing_epoch") for one in by_curvature(setting))
    if not epochs.count:
        return untested("two values of η")
    told = f"epochs, largest η over smallest: {said(epochs)}; {of_rank_0(plain)}"
    return Finding(beyond_the_rate(direction(epochs), direction(plain)), told)


def by_curvature(setting: Setting) -> tuple[Setting, Setting]:
    """Return a sweep's cells, and its runs of rank 0, which take the same rates and have no curvature."""
    has_curvature = setting.epochs["rank"] > 0
    cells, plain = (replace(setting, epochs=setting.epochs[chosen]) for chosen in (has_curvature, ~has_curvature))
    return cells, plain


def of_rank_0(ratio: Interval) -> str:
    """Return what the control shows, in words."""
    return f"of rank 0: {said(ratio)}" if ratio.count else "no control of rank 0"


def beyond_the_rate(effect: Verdict, of_control: Verdict) -> Verdict:
    """Weigh an effect of η against what rank 0 shows: the same effect is one of the rate, none is one of curvature."""
    if effect is not Verdict.HOLDS:
        return effect
    return {Verdict.HOLDS: Verdict.RATE, Verdict.FAILS: Verdict.HOLDS}.get(of_control, Verdict.UNDECIDED)


def refresh_effect(setting: Setting) -> Finding:
    """Holds if the longest refresh interval needs more epochs to the primary threshold than the shortest, and the
    shortest more seconds an epoch than the longest, paired over η and seeds, both by intervals (97.5 %) beyond 1; does
    not hold if one lies on the other side of 1 or the epochs lie within ± 10 %: then there is nothing to balance.
    """
    cells, _ = by_curvature(setting)
    epochs = ends_ratio(cells, "refresh_every", "crossing_epoch", parts=2)
    seconds = ends_ratio(cells, "refresh_every", "seconds_per_epoch", parts=2)
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
    level, cells = setting.goal.loss, sensitivity(setting.epochs, setting.goal.hits)
    other = "refresh_every" if knob == "damping" else "damping"
    high, low = (cells[cells[knob] == end].set_index([other, "seed"]) for end in (cells[knob].max(), cells[knob].min()))
    if cells[knob].nunique() < 2:
        return paired_ratio({}, {})
    confidence = shared_confidence(parts)
    if unit == "crossing_epoch":
        twice = setting.twice(lambda one: crossings(one.hits(level)))
        return with_noise(bounded_ratio(high, low, confidence, is_paired=True), twice)
    return paired_ratio(high[unit], low[unit], confidence)


def damping_variance(setting: Setting) -> Finding:
    """Holds if the variance over seeds of the early mean train loss, pooled over refresh intervals, is larger at the
    smallest η than at the largest, by Fisher's interval of the ratio above 1, and rank 0 has one at or below 1. Only
    because of the learning rate if that of rank 0 lies above 1 too. Does not hold if the interval lies below 1;
    undecided otherwise, or without rank 0.
    """
    variance, plain = (ends_variance(one) for one in by_curvature(setting))
    if not variance.count:
        return untested("two values of η with two seeds each")
    told = f"variance, smallest η over largest: {bare(variance)} ({how_many(variance)})"
    control = f"of rank 0: {bare(plain)} ({how_many(plain)})" if plain.count else "no control of rank 0"
    return Finding(beyond_the_rate(direction(variance), direction(plain)), f"{told}; {control}")


def ends_variance(setting: Setting) -> Interval:
    """Return the variance over seeds of the early loss at the smallest η over that at the largest."""
    rows = setting.epochs
    groups = [
        [list(early_means(cell)) for _, cell in rows[rows["damping"] == end].groupby("label")]
        for end in ends_of_damping(setting)
    ]
    return variance_ratio(groups[0], groups[-1]) if len(groups) > 1 else variance_ratio([], [])


def small_damping(setting: Setting) -> Finding:
    """Holds if at the smallest η some run diverged, or had an epoch above its start, and none did so at the largest,
    and no run of rank 0 did so at the smallest. Only because of the learning rate if one of rank 0 did. Does not hold
    if no run of either η did; undecided otherwise, or without rank 0.
    """
    (cells, plain), ends = by_curvature(setting), ends_of_damping(setting)
    if len(ends) < 2:
        return untested("two values of η")
    (few, small), (many, large) = (unstable_share(cells, end) for end in ends)
    shaken, controls = unstable_share(plain, ends[0])
    effect = Verdict.HOLDS if few and not many else Verdict.UNDECIDED if few or many else Verdict.FAILS
    of_control = Verdict.UNDECIDED if not controls else Verdict.HOLDS if shaken else Verdict.FAILS
    told = f"{few} of {small} runs unstable at the smallest η, {many} of {large} at the largest"
    control = f"{shaken} of {controls} of rank 0 at the smallest" if controls else "no control of rank 0"
    return Finding(beyond_the_rate(effect, of_control), f"{told}; {control}")


def ends_of_damping(setting: Setting) -> list[float]:
    """Return the smallest and the largest η of a sweep, one if there is no other."""
    dampings = setting.epochs["damping"].dropna()
    return sorted({float(dampings.min()), float(dampings.max())}) if len(dampings) else []


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
