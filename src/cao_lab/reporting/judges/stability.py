"""Whether CAO stays stable: no divergence, a positive definite P, a wider range of rates."""

import math

from pandas import DataFrame, Series
from scipy import stats

from cao_lab.protocol import CONFIDENCE, LARGEST_RISK, RATIO_MARGIN, fresh
from cao_lab.reporting.intervals import Interval, ratio_interval, with_noise
from cao_lab.reporting.logreader import RUN_KEY
from cao_lab.reporting.rates import stable_windows
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict, said, shared_confidence, untestable, untested


def no_divergence(setting: Setting) -> Finding:
    """Holds if no CAO run with the paper's sketch diverged, to a loss that is not finite or that ends more than 10 %
    above the start, and there are so many that with 95 % confidence fewer than one in ten does (29 runs); does not hold
    if one did; undecided with fewer runs. Suites that try rates at which runs fail on purpose are left out.
    """
    runs = setting.epochs[(setting.epochs["optimizer"] == "cao") & (setting.epochs["sketch"] == "top")]
    ended = runs[runs["has_ended"]].drop_duplicates(RUN_KEY)
    if ended.empty:
        return untested("CAO")
    diverged = int((ended["status"] == "diverged").sum())
    most = largest_share(diverged, len(ended))
    verdict = Verdict.FAILS if diverged else Verdict.HOLDS if most <= LARGEST_RISK else Verdict.UNDECIDED
    return Finding(
        verdict, f"{diverged} of {len(ended)} CAO runs diverged (with 95 % confidence at most {100 * most:.0f} %)"
    )


def largest_share(count: int, total: int) -> float:
    """Return the one-sided upper limit of Clopper and Pearson for a share of which a count was seen."""
    return float(stats.beta.ppf(CONFIDENCE, count + 1, total - count)) if count < total else 1.0


def positive_definite(setting: Setting) -> Finding:
    """Does not hold if at some refresh of a CAO run on the Hessian a captured λ ≤ −η, for then (B + ηI)⁻¹ as the paper
    writes it is not positive definite; holds if there were refreshes and none did so. Where rates were tuned, fresh
    seeds count alone.
    """
    rows = fresh(setting.refreshes, setting.suite)
    captured = rows["is_captured"].astype(bool)
    rows = rows[captured & (rows["curvature"] != "gauss-newton") & (rows["optimizer"] == "cao")]
    if rows.empty:
        return untested("CAO with refreshes")
    indefinite = (rows["eigenvalue"] <= -rows["damping"]).groupby([rows[key] for key in [*RUN_KEY, "step"]]).any()
    verdict = Verdict.FAILS if indefinite.any() else Verdict.HOLDS
    return Finding(verdict, f"{int(indefinite.sum())} of {len(indefinite)} refreshes captured a λ ≤ −η")


def stable_range(setting: Setting) -> Finding:
    """A rate α/η works if all losses of the last quarter of the epochs lie below the declared loss and none of any
    epoch above the start. Holds if for some k ≥ 1 the interval of its largest working rate over that of rank 0 lies
    above 1.1, at a confidence of 1 − 0.05/m for m ranks, and the ratio is beyond the noise: the larger of what rank 0
    and SGD without momentum differ by, which are one method and stand in for each other, and of the widest gap between
    a rate that works and the next that was tried. Does not hold if for every k ≥ 1 it lies below 1.1; undecided
    otherwise. Not testable where no rate failed by instability, or rank 0 has a single seed.
    """
    windows = stable_windows(setting.epochs)
    plain = edges_of_rank_0(windows)
    ranks = sorted(windows.loc[windows["rank"] >= 1, "rank"].unique())
    if plain.empty or not ranks:
        return untested("rank 0 and a rank of 1 or more")
    ratios = {rank: widening(windows, rank, shared_confidence(len(ranks))) for rank in ranks}
    told = "; ".join(f"k = {rank:.0f}: {said(ratio)}" for rank, ratio in ratios.items())
    evidence = f"largest working α/η over that of k = 0: {told}"
    if not windows["unstable"].any():
        return untestable(f"no run was unstable, the others were too slow; {evidence}")
    if len(plain) < 2:
        return untestable(f"one seed; {evidence}")
    wider = [ratio.low > RATIO_MARGIN and ratio.is_beyond_noise for ratio in ratios.values()]
    same = [ratio.high <= RATIO_MARGIN for ratio in ratios.values()]
    verdict = Verdict.HOLDS if any(wider) else Verdict.FAILS if all(same) else Verdict.UNDECIDED
    return Finding(verdict, evidence)


def widening(windows: DataFrame, rank: float, confidence: float) -> Interval:
    """Return how many times the largest working rate of rank 0 that of another rank is, beside the noise."""
    plain = edges_of_rank_0(windows)
    gaps = windows["smallest_unstable"], windows["largest_stable"]
    twice = [(plain, edges(windows, "sgd")), gaps]
    return with_noise(ratio_interval(edges(windows, "cao", rank), plain, confidence), twice)


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
