"""Whether CAO stays stable: no divergence, a positive definite P, a wider range of rates."""

import math

from cao_lab.protocol import RATIO_MARGIN
from cao_lab.reporting.analysis import stable_windows
from cao_lab.reporting.intervals import ratio_interval
from cao_lab.reporting.logreader import RUN_KEY
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict, said, untested


def no_divergence(setting: Setting) -> Finding:
    """Holds if CAO runs with the paper's sketch have ended and none diverged, to a loss that is not finite; does not
    hold if one did. Suites that try rates at which runs fail on purpose are left out.
    """
    runs = setting.epochs[(setting.epochs["optimizer"] == "cao") & (setting.epochs["sketch"] == "top")]
    ended = runs[runs["has_ended"]].drop_duplicates(RUN_KEY)
    if ended.empty:
        return untested("CAO")
    diverged = int((ended["status"] == "diverged").sum())
    verdict = Verdict.FAILS if diverged else Verdict.HOLDS
    return Finding(verdict, f"{diverged} of {len(ended)} CAO runs diverged")


def positive_definite(setting: Setting) -> Finding:
    """Does not hold if at some refresh of a CAO run on the Hessian a captured λ ≤ −η, for then (B + ηI)⁻¹ as the
    paper writes it is not positive definite; holds if there were refreshes and none did so.
    """
    rows = setting.refreshes
    captured = rows["is_captured"].astype(bool)
    rows = rows[captured & (rows["curvature"] != "gauss-newton") & (rows["optimizer"] == "cao")]
    if rows.empty:
        return untested("CAO with refreshes")
    indefinite = (rows["eigenvalue"] <= -rows["damping"]).groupby([rows[key] for key in [*RUN_KEY, "step"]]).any()
    verdict = Verdict.FAILS if indefinite.any() else Verdict.HOLDS
    return Finding(verdict, f"{int(indefinite.sum())} of {len(indefinite)} refreshes captured a λ ≤ −η")


def stable_range(setting: Setting) -> Finding:
    """Holds if on every seed, for some k ≥ 1, the largest α/η that reached the declared loss is more than 10 %
    above the smallest rate at which rank 0 failed; does not hold if on every seed no k ≥ 1 has a window more than
    10 % above rank 0's largest working rate; undecided otherwise, or with a single seed. SGD without momentum stands
    in for rank 0.
    """
    windows = stable_windows(setting.epochs).fillna(
        {"rank": 0, "momentum": 0, "largest_stable": 0, "smallest_unstable": math.inf}
    )
    plain = windows[(windows["rank"] == 0) & (windows["momentum"] == 0)].groupby("seed").max(numeric_only=True)
    ranked = windows[windows["rank"] >= 1].groupby("seed").max(numeric_only=True)
    pairs = plain.add_suffix("_plain").join(ranked.add_suffix("_cao"), how="inner")
    if pairs.empty:
        return untested("rank 0 and a rank of 1 or more")
    wider = pairs["largest_stable_cao"] > RATIO_MARGIN * pairs["smallest_unstable_plain"]
    same = pairs["smallest_unstable_cao"] <= RATIO_MARGIN * pairs["largest_stable_plain"]
    verdict = Verdict.HOLDS if wider.all() else Verdict.FAILS if same.all() else Verdict.UNDECIDED
    if len(pairs) == 1:
        verdict = Verdict.UNDECIDED
    ratio = ratio_interval(pairs["largest_stable_cao"], pairs["largest_stable_plain"])
    return Finding(verdict, f"largest working α/η, best k ≥ 1 over k = 0: {said(ratio)}")
