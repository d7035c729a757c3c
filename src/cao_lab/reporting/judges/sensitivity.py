"""What damping and the refresh interval do."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from pandas import DataFrame, Series

from cao_lab.protocol import RATIO_MARGIN, START_MARGIN, start_loss
from cao_lab.reporting.analysis import sensitivity
from cao_lab.reporting.intervals import Interval, paired_ratio, variance_ratio, with_noise_of_mean
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


def by_curvature(setting: Setting, *, is_clipped: bool = True) -> tuple[Setting, Setting]:
    """Return a sweep's cells, and its runs of rank 0, which take the same rates and have no curvature.

    Runs without the clip are no part of the sweep.
    """
    rows = setting.epochs[np.isinf(setting.epochs["clip"].astype(float)) != is_clipped]
    has_curvature = rows["rank"] > 0
    cells, plain = (replace(setting, epochs=rows[chosen]) for chosen in (has_curvature, ~has_curvature))
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
    not hold if one lies on the other side of 1 or the epochs lie within ± 10 %: then there is nothing to balance. The
    noise is that of a mean of as many pairs.
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
        return with_noise_of_mean(bounded_ratio(high, low, confidence, is_paired=True), twice)
    return paired_ratio(high[unit], low[unit], confidence)


def damping_variance(setting: Setting) -> dict[str, Finding]:
    """Over seeds: the variance of the early mean train loss, pooled over refresh intervals, by Fisher's interval.
    Within a run: the root mean square of the second differences of log train loss over the last half of the epochs,
    paired over refresh intervals and seeds. Each holds if the ratio of the smallest η to the largest has an interval
    above 1, and that of rank 0 one at or below 1. Only because of the learning rate if that of rank 0 lies above 1 too.
    Does not hold if the interval lies below 1; undecided otherwise, or without rank 0.
    """
    return {
        "over seeds": smaller_is_larger("variance", *map(ends_variance, by_curvature(setting))),
        "within a run": smaller_is_larger("fluctuation", *map(ends_fluctuation, by_curvature(setting))),
    }


def smaller_is_larger(what: str, ratio: Interval, plain: Interval) -> Finding:
    """Judge whether something is larger at the smallest η than at the largest, beyond what rank 0 shows."""
    if not ratio.count:
        return untested("two values of η with two seeds each")
    told = f"{what}, smallest η over largest: {bare(ratio)} ({how_many(ratio)})"
    control = f"of rank 0: {bare(plain)} ({how_many(plain)})" if plain.count else "no control of rank 0"
    return Finding(beyond_the_rate(direction(ratio), direction(plain)), f"{told}; {control}")


def ends_fluctuation(setting: Setting) -> Interval:
    """Return how much a run's losses fluctuate at the smallest η over that at the largest, paired over all else."""
    return paired_ends(setting, {run: fluctuation(own) for run, own in ended_runs_of(setting)})


def fluctuation(run: DataFrame) -> float:
    """Return the root mean square of the second differences of log train loss, over the last half of the epochs."""
    losses = run["train_loss"].to_numpy()
    logs = np.log(losses[len(losses) // 2 :])
    return float(np.sqrt(np.mean(np.diff(logs, 2) ** 2))) if len(logs) > 2 else math.nan


def ended_runs_of(setting: Setting) -> Iterator[tuple[int, DataFrame]]:
    """Yield each ended run with its epochs."""
    for run, own in setting.epochs[setting.epochs["has_ended"]].groupby("run"):
        yield int(str(run)), own


def paired_ends(setting: Setting, values: Mapping[int, float]) -> Interval:
    """Return a quantity of runs at the smallest η over that at the largest, paired over refresh intervals and seeds."""
    runs = setting.epochs.drop_duplicates("run")
    runs = runs.assign(value=runs["run"].map(values)).dropna(subset=["value"])
    ends = ends_of_damping(setting)
    if len(ends) < 2:
        return paired_ratio({}, {})
    small, large = (runs[runs["damping"] == end].set_index(["refresh_every", "seed"])["value"] for end in ends)
    return paired_ratio(small, large)


def ends_variance(setting: Setting) -> Interval:
    """Return the variance over seeds of the early loss at the smallest η over that at the largest."""
    rows = setting.epochs
    groups = [
        [list(early_means(cell)) for _, cell in rows[rows["damping"] == end].groupby("label")]
        for end in ends_of_damping(setting)
    ]
    return variance_ratio(groups[0], groups[-1]) if len(groups) > 1 else variance_ratio([], [])


def small_damping(setting: Setting) -> dict[str, Finding]:
    """The estimate: holds if the relative residual ‖Hv − λv‖/|λ| of the first captured pair, a geometric mean over the
    refreshes of a run after its first epoch, is larger at the smallest η than at the largest by an interval above 1,
    paired over refresh intervals and seeds; does not hold if the interval lies below 1 or within ± 10 %. There is no
    control, for rank 0 has no estimate. With and without the clip: holds if at the smallest η some run diverged, or
    had an epoch above its start, and none did so at the largest, and no run of rank 0 did so at the smallest. Only
    because of the learning rate if one of rank 0 did. Does not hold if no run of either η did; undecided otherwise, or
    without rank 0.
    """
    return {
        "the estimate": shaken_estimate(by_curvature(setting)[0]),
        "without the clip": shaken_runs(setting, is_clipped=False),
        "with the clip": shaken_runs(setting, is_clipped=True),
    }


def shaken_estimate(setting: Setting) -> Finding:
    """Judge whether the sketch is less accurate at the smallest η."""
    first, second = (pairs_of(setting, index) for index in (1, 2))
    residuals = paired_ends(setting, run_means(first, first["residual"] / first["eigenvalue"].abs()))
    if not residuals.count:
        return untested("two values of η with refreshes")
    is_same = equality(residuals, 1 / RATIO_MARGIN, RATIO_MARGIN) is Verdict.HOLDS
    verdict = Verdict.FAILS if is_same else direction(residuals)
    gaps = (first["eigenvalue"].abs() - second["eigenvalue"].abs().reindex(first.index)).abs()
    angles = np.degrees(np.arcsin((first["residual"] / gaps).clip(upper=1.0)))
    small, large = (angles[first["damping"] == end].median() for end in ends_of_damping(setting))
    told = f"relative residual, smallest η over largest: {bare(residuals)} ({how_many(residuals)})"
    return Finding(verdict, f"{told}; angle to the eigenvector at most {small:.0f}° and {large:.0f}° (medians)")


def pairs_of(setting: Setting, index: int) -> DataFrame:
    """Return one eigenvalue of each refresh after the first epoch, by run and step."""
    rows = setting.refreshes[setting.refreshes["run"].isin(setting.epochs["run"].unique())]
    chosen = (rows["index"] == index) & (rows["epoch"] >= 1) & (rows["rank"] > 0) & rows["has_ended"]
    return rows[chosen].set_index(["run", "step"])


def run_means(rows: DataFrame, values: Series) -> dict[int, float]:
    """Return the geometric mean of a quantity over the refreshes of each run."""
    return {int(run): float(mean) for run, mean in np.exp(np.log(values).groupby(level="run").mean()).items()}


def shaken_runs(setting: Setting, *, is_clipped: bool) -> Finding:
    """Judge whether runs at the smallest η become unstable, and only with curvature."""
    cells, plain = by_curvature(setting, is_clipped=is_clipped)
    ends = ends_of_damping(cells)
    if len(ends) < 2:
        return untested("two values of η" if is_clipped else "two values of η without the clip")
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
