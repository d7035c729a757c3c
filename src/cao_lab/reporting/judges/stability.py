"""Whether CAO stays stable: no divergence, a positive definite P, a wider range of rates; and what dominates H."""

import math

import numpy as np
from pandas import DataFrame, Series
from scipy import stats

from cao_lab.protocol import CONFIDENCE, LARGEST_RISK, RATIO_MARGIN, fresh
from cao_lab.reporting.intervals import Interval, paired_ratio, ratio_interval, with_noise
from cao_lab.reporting.logreader import RUN_KEY
from cao_lab.reporting.rates import stable_windows
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    bare,
    direction,
    said,
    shared_confidence,
    tie_or,
    untestable,
    untested,
)

SKEW = 10.0
"""A few directions dominate if the largest eigenvalue is more than so many times the first that five leave out."""


def no_divergence(setting: Setting) -> Finding:
    """Holds if no CAO run with the paper's sketch diverged, to a loss that is not finite or that ends more than 10 %
    above the start, and there are so many that with 95 % confidence fewer than one in ten does (29 runs); does not hold
    if one did; undecided with fewer runs. Suites that try rates at which runs fail on purpose are left out, and runs
    without the paper's clip.
    """
    runs = setting.epochs[(setting.epochs["optimizer"] == "cao") & (setting.epochs["sketch"] == "top")]
    runs = runs[~np.isinf(runs["clip"].astype(float))]
    ended = runs[runs["has_ended"]].drop_duplicates(RUN_KEY)
    if ended.empty:
        return untested("CAO")
    diverged = int((ended["status"] == "diverged").sum())
    most = largest_share(diverged, len(ended))
    verdict = Verdict.FAILS if diverged else Verdict.HOLDS if most <= LARGEST_RISK else Verdict.UNDECIDED
    needed = next(count for count in range(1, 1000) if largest_share(0, count) <= LARGEST_RISK)
    more = f"; at most 10 % takes {needed} runs without one" if verdict is Verdict.UNDECIDED else ""
    told = f"{diverged} of {len(ended)} CAO runs diverged (with 95 % confidence at most {100 * most:.0f} %)"
    return Finding(verdict, told + more)


def largest_share(count: int, total: int) -> float:
    """Return the one-sided upper limit of Clopper and Pearson for a share of which a count was seen."""
    return float(stats.beta.ppf(CONFIDENCE, count + 1, total - count)) if count < total else 1.0


def positive_definite(setting: Setting) -> Finding:
    """Does not hold if at some refresh of a CAO run on the Hessian a captured λ ≤ −η, for then (B + ηI)⁻¹ as the paper
    writes it is not positive definite; holds if there were refreshes and none did so. Where rates were tuned, fresh
    seeds count alone.
    """
    rows = captured_by_cao(setting)
    if rows.empty:
        return untested("CAO with refreshes")
    indefinite = (rows["eigenvalue"] <= -rows["damping"]).groupby([rows[key] for key in [*RUN_KEY, "step"]]).any()
    verdict = Verdict.FAILS if indefinite.any() else Verdict.HOLDS
    return Finding(verdict, f"{int(indefinite.sum())} of {len(indefinite)} refreshes captured a λ ≤ −η")


def captured_by_cao(setting: Setting) -> DataFrame:
    """Return the eigenvalues of the Hessian that CAO captured, where rates were tuned those of fresh seeds alone."""
    rows = fresh(setting.refreshes, setting.suite)
    captured = rows["is_captured"].astype(bool)
    return rows[captured & (rows["curvature"] != "gauss-newton") & (rows["optimizer"] == "cao")]


def sufficient_damping(setting: Setting) -> Finding:
    """A theorem: B + ηI is positive definite if and only if η exceeds every −λ that B has captured. What it would have
    taken is read from all refreshes of CAO on the Hessian.
    """
    rows = captured_by_cao(setting)
    if rows.empty:
        return untested("CAO with refreshes")
    lowest = float(rows["eigenvalue"].min())
    return Finding(
        Verdict.HOLDS,
        f"a theorem; here it would have taken η > {max(0.0, -lowest):.3g}, and η was at most {rows['damping'].max():g}",
    )


def stable_range(setting: Setting) -> Finding | dict[str, Finding]:
    """A rate α/η works if all losses of the last quarter of the epochs lie below the declared loss and none of any
    epoch above the start. For each k ≥ 1: holds if the interval of its largest working rate over that of rank 0 lies
    above 1, at a confidence of 1 − 0.05/m for m ranks, and the ratio is beyond the noise: the larger of what rank 0 and
    SGD without momentum differ by, which are one method and stand in for each other, and of the widest gap between a
    rate that works and the next that was tried. Does not hold if the interval lies below 1; a tie if it lies within
    ± 10 %; undecided otherwise. Whether a widening clears 10 %, which is our margin, is told. Not testable where no
    rate failed by instability, or rank 0 has a single seed.
    """
    windows = stable_windows(setting.epochs)
    plain = edges_of_rank_0(windows)
    ranks = sorted(windows.loc[windows["rank"] >= 1, "rank"].unique())
    if plain.empty or not ranks:
        return untested("rank 0 and a rank of 1 or more")
    ratios = {f"k = {rank:.0f}": widening(windows, rank, shared_confidence(len(ranks))) for rank in ranks}
    told = {rank: f"largest working α/η over that of k = 0: {said(ratio)}" for rank, ratio in ratios.items()}
    if not windows["unstable"].any():
        return {rank: untestable(f"no run was unstable, the others were too slow; {told[rank]}") for rank in ratios}
    if len(plain) < 2:
        return {rank: untestable(f"one seed; {told[rank]}") for rank in ratios}
    return {
        rank: Finding(tie_or(direction(ratio), ratio), told[rank] + beside_our_margin(ratio))
        for rank, ratio in ratios.items()
    }


def beside_our_margin(ratio: Interval) -> str:
    """Say of a widening whether it clears our margin, which the paper does not ask for."""
    if direction(ratio) is not Verdict.HOLDS:
        return ""
    return "; by more than 10 %" if ratio.low > RATIO_MARGIN else "; that it is more than 10 % is not shown"


def widening(windows: DataFrame, rank: float, confidence: float) -> Interval:
    """Return how many times the largest working rate of rank 0 that of another rank is, beside the noise."""
    plain = edges_of_rank_0(windows)
    gaps = windows["smallest_unstable"], windows["largest_stable"]
    twice = [(plain, edges(windows, "sgd")), gaps]
    return with_noise(ratio_interval(edges(windows, "cao", rank), plain, confidence), twice)


def skew(setting: Setting) -> Finding:
    """Holds if with k = 5 the ratio of the largest |λ| to that of the first eigenvalue that the sketch leaves out, a
    geometric mean over the refreshes of a run after its first epoch, lies above 10 by its interval over seeds; does not
    hold if it lies below; undecided otherwise.
    """
    if absent := setting.lacking("rank5"):
        return untested(*absent)
    rows = setting.refreshes[
        (setting.refreshes["label"] == setting.labels["rank5"]) & (setting.refreshes["epoch"] >= 1)
    ]
    sizes = rows.assign(size=rows["eigenvalue"].abs()).pivot_table(
        index=["seed", "step"], columns="index", values="size"
    )
    if not {1, 6} <= set(sizes.columns):
        return untested("six eigenvalues at a refresh")
    ratios = (sizes[1] / sizes[6]).dropna().groupby(level="seed").agg(stats.gmean)
    found = paired_ratio(ratios, dict.fromkeys(ratios.index, 1.0))
    verdict = Verdict.HOLDS if found.low > SKEW else Verdict.FAILS if found.high < SKEW else Verdict.UNDECIDED
    return Finding(verdict, f"|λ₁| is {bare(found)} |λ₆| (n = {len(ratios)})")


def edges_of_rank_0(windows: DataFrame) -> Series:
    """Return the largest working rates of rank 0, or of SGD, which is the same method."""
    found = edges(windows, "cao", 0)
    return edges(windows, "sgd") if found.empty else found


def edges(windows: DataFrame, optimizer: str, rank: float | None = None) -> Series:
    """Return the largest working rates of one method by seed, without momentum; none where no rate worked."""
    own = windows[(windows["optimizer"] == optimizer) & (windows["momentum"].fillna(0) == 0)]
    own = own if rank is None else own[own["rank"] == rank]
    found = own.set_index("seed")["largest_stable"]
    return found.where(found > 0, math.nan).dropna()
