"""The paper's checkable claims, and the rule by which logs decide each.

The rules were fixed before the runs that they judge; what was changed later is told in docs/notebook.md.

A judge's docstring is its rule, word for word as the report prints it. Intervals are Student's t at 95 % over
seeds, paired; durations are compared by the logarithm of their ratio, at the interpolated crossing of the threshold.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pandas import DataFrame, Series

from cao_lab.facts import PAPER_MODELS, PAPER_TASK, SuiteKind, judged_datasets, suites_of
from cao_lab.protocol import ACCURACY_MARGIN, EARLY_SHARE, RATIO_MARGIN
from cao_lab.reporting.analysis import final_results, run_costs, sensitivity, stable_windows
from cao_lab.reporting.intervals import Interval, difference_interval, interval, ratio_interval
from cao_lab.reporting.logreader import RUN_KEY
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import (
    Finding,
    Verdict,
    all_of,
    bounded_ratio,
    compare,
    direction,
    equality,
    said,
    sooner,
    untested,
    with_control,
)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, and the function that judges it in a setting."""

    name: str
    statement: str
    judge: Callable[[Setting], Finding]
    kinds: tuple[SuiteKind, ...] = ("comparison", "tuned")
    """The kinds of suites in which it is judged; the others ask questions of their own."""
    tasks: tuple[str, ...] = judged_datasets()
    """How the names of the tasks begin on which it is judged."""

    @property
    def rule(self) -> str:
        """The rule in words: the judge's docstring."""
        return " ".join((inspect.getdoc(self.judge) or "").split())


def speed(setting: Setting) -> Finding:
    """Holds if the interval of Adam's epochs to the primary threshold over CAO's (k = 1) lies above 1 and
    the control at the same effective rate (matched SGD, or rank 0 as P = I/η; tuned SGD where all are tuned)
    needs more epochs than CAO. Only because of the learning rate if the control needs, with confidence, at most
    10 % more. Does not hold if the interval lies below 1. Undecided otherwise, or without a control.
    """
    return (
        untested("a declared threshold")
        if setting.thresholds is None
        else compare(setting, "adam", "matched", setting.thresholds.primary)
    )


def factor(setting: Setting) -> Finding:
    """Holds if the whole interval of Adam's epochs over CAO's (k = 1) is at least 2.95/1.1; does not hold if
    the whole interval is below that; undecided otherwise. It asks for the size of the gain, not for its cause, and
    below the paper's size for that at the threshold declared there.
    """
    if absent := setting.lacking("cao", "adam"):
        return untested(*absent)
    if setting.thresholds is None:
        return untested("a declared threshold")
    gain, note = sooner(setting, "adam", "cao", setting.thresholds.primary)
    bar = 2.95 / RATIO_MARGIN
    verdict = Verdict.HOLDS if gain.low >= bar else Verdict.FAILS if gain.high < bar else Verdict.UNDECIDED
    return Finding(verdict, f"To train loss {setting.thresholds.primary:g}, Adam needs {said(gain)} CAO's epochs{note}")


def threshold_range(setting: Setting) -> Finding:
    """The rule for the speed over Adam at every declared threshold, the worst verdict counts. Thresholds that
    neither CAO nor Adam reached, or that a run reached in its first epoch, cannot tell and are left out.
    """
    if setting.thresholds is None:
        return untested("a declared threshold")
    found = {level: compare(setting, "adam", "matched", level) for level in setting.thresholds.sweep}
    told = {level: one for level, one in found.items() if one.can_tell}
    levels = {verdict: [f"{level:g}" for level, one in told.items() if one.verdict is verdict] for verdict in Verdict}
    each = "; ".join(f"{verdict} at {', '.join(some)}" for verdict, some in levels.items() if some)
    verdict = all_of(one.verdict for one in told.values()) if told else Verdict.UNDECIDED
    return Finding(verdict, each or "no declared threshold can tell")


def early_loss(setting: Setting) -> Finding:
    """Holds if the mean train loss over the first 40 % of the budget is lower for CAO (k = 1) than for Adam and
    for SGD, each by an interval of per-seed ratios above 1, and the control's is more than CAO's. Only because
    of the learning rate if the control's is, with confidence, at most 10 % more. Does not hold if an interval
    lies below 1. Undecided otherwise.
    """
    if absent := setting.lacking("cao", "adam", "sgd"):
        return untested(*absent)
    means = {part: early_means(setting.of(part)) for part in ("cao", "adam", "sgd", "matched")}
    ratios = {part: ratio_interval(means[part], means["cao"]) for part in ("adam", "sgd", "matched")}
    verdicts = [with_control(ratios[part], ratios["matched"]) for part in ("adam", "sgd")]
    told = "; ".join(
        f"{setting.name(part)} has {said(ratio)} CAO's loss" for part, ratio in ratios.items() if ratio.count
    )
    return Finding(all_of(verdicts), told)


def early_means(epochs: DataFrame) -> Series:
    """Return each ended run's mean train loss over the early window, by seed; a diverged one is infinite."""
    early = epochs[epochs["has_ended"] & (epochs["epoch"] <= np.ceil(EARLY_SHARE * epochs["budget"]))]
    means: Series = early.assign(loss=early["train_loss"].fillna(np.inf)).groupby("seed")["loss"].mean()
    return means


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


def rank_insensitivity(setting: Setting) -> Finding:
    """Holds if for k = 3 and k = 5 both the epochs to the primary threshold lie within ± 10 % and the final test
    accuracy within ± 1 point of k = 1, by intervals; does not hold if one of the four intervals lies wholly
    outside its margin; undecided otherwise.
    """
    if absent := setting.lacking("cao", "rank3", "rank5"):
        return untested(*absent)
    if setting.thresholds is None:
        return untested("a declared threshold")
    verdicts, told = [], []
    for rank in ("rank3", "rank5"):
        epochs, note = sooner(setting, rank, "cao", setting.thresholds.primary)
        points = difference_interval(last_accuracy(setting, rank), last_accuracy(setting, "cao"))
        verdicts += [equality(epochs, 1 / RATIO_MARGIN, RATIO_MARGIN)]
        verdicts += [equality(points, -ACCURACY_MARGIN, ACCURACY_MARGIN)]
        told.append(f"{setting.name(rank)}: epochs {said(epochs)}{note}, accuracy {100 * points.center:+.2f} points")
    return Finding(all_of(verdicts), "; ".join(told) + " (against k = 1)")


def curvature_off(setting: Setting) -> Finding:
    """Holds if k = 0 as in Algorithm 1 (d = g) needs more epochs to the primary threshold than k = 1, by the
    interval of ratios, and k = 0 as in the text (P = I/η) does too. Only because of the learning rate if the
    latter needs, with confidence, at most 10 % more. Does not hold if Algorithm 1's k = 0 is as fast or faster.
    """
    if setting.thresholds is None:
        return untested("a declared threshold")
    return compare(setting, "rank0-unit", "rank0-inverse", setting.thresholds.primary)


def time_overhead(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) mean seconds an epoch over SGD's lies at or below 1.18 × 1.1; does
    not hold if it lies wholly above; undecided otherwise.
    """
    return overhead(setting, "seconds_per_epoch", 1.18)


def memory_overhead(setting: Setting) -> Finding:
    """Holds if the interval of CAO's (k = 1) peak memory over SGD's lies at or below 2.4 × 1.1; does not hold if
    it lies wholly above; undecided otherwise. Not tested where memory is that of the whole process, which
    holds Python, torch and the data besides.
    """
    finding = overhead(setting, "peak_memory_mib", 2.4)
    if (setting.epochs["peak_memory_source"] == "cuda").all():
        return finding
    return Finding(Verdict.UNTESTED, f"{finding.evidence}; memory of the process, not of the allocator")


def overhead(setting: Setting, unit: str, claimed: float) -> Finding:
    """Judge a cost that the paper gives as a ratio to SGD: at most that, with 10 % to spare."""
    costs = {part: run_costs(setting.of(part)).set_index("seed")[unit] for part in ("cao", "sgd")}
    ratio = ratio_interval(costs["cao"], costs["sgd"])
    if not ratio.count:
        return untested(*(setting.lacking("cao", "sgd") or ["CAO and SGD on a common seed"]))
    verdict = equality(ratio, -math.inf, claimed * RATIO_MARGIN)
    every = f"{setting.of('cao')['refresh_every'].iloc[0]:.0f}"
    told = f"{said(ratio)} SGD's {unit.replace('_', ' ').removesuffix(' mib')}, with a refresh every {every} steps"
    return Finding(verdict, told)


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


CIFAR = judged_datasets(PAPER_MODELS)
CLAIMS = (
    Claim("speed", "CAO (k = 1) reaches the train-loss threshold in fewer epochs than Adam.", speed),
    Claim("factor", "On CIFAR-100 with ResNet-18, loss 0.75, it does so 2.95 times sooner (19 against 56 epochs).",
          factor, tasks=(PAPER_TASK,)),
    Claim("threshold range", "The speedup over Adam holds at thresholds from 0.6 to 1.0, not only at 0.75 "
          "(0.9: 16 against 31 epochs, 1.0: 14 against 23).", threshold_range),
    Claim("early loss", "CAO's train loss lies below SGD's and Adam's, early in training and on every network.",
          early_loss),
    Claim("final accuracy", "CAO ends with Adam's test accuracy (CIFAR-100/ResNet-18: 0.65 and 0.66).", final_accuracy),
    Claim("rank", "The rank hardly matters among k = 1, 3, 5.", rank_insensitivity),
    Claim("no curvature", "Without curvature (k = 0) convergence is slower.", curvature_off),
    Claim("time", "An epoch of CAO (k = 1) takes 1.18 times as long as one of SGD.", time_overhead),
    Claim("memory", "CAO (k = 1) needs 2.4 times the peak memory of SGD.", memory_overhead),
    Claim("damping", "A larger damping η slows progress (η from 0.001 to 0.1).", damping_effect,
          ("sweep",), CIFAR),
    Claim("refresh", "The refresh interval m trades cost against freshness (m from 200 to 800).", refresh_effect,
          ("sweep",), CIFAR),
    Claim("stability", "CAO does not diverge on these tasks.", no_divergence, ("comparison", "sweep")),
    Claim("positive definite", "Damping η > 0 keeps P positive definite, also under negative curvature.",
          positive_definite, ("comparison", "sweep", "tuned")),
    Claim("stable range", "Preconditioning widens the range of stable step sizes.", stable_range, ("stability",)),
)  # fmt: skip


def audit(found: list[Setting]) -> DataFrame:
    """Judge every claim in every setting that speaks to it; the paper's own setting is always listed.

    One row a claim and setting: claim, statement, rule, suite, task, verdict, evidence.
    """
    rows = []
    for claim in CLAIMS:
        fitting = [one for one in found if one.kind in claim.kinds and one.task.startswith(claim.tasks)]
        home = suites_of(claim.kinds)[0]
        if not any(one.suite == home for one in fitting):
            task = "any task" if claim.kinds == ("stability",) else PAPER_TASK
            rows.append((claim, home, task, Finding(Verdict.UNTESTED, f"no logs of suite {home}")))
        rows += [(claim, one.suite, one.task, claim.judge(one)) for one in fitting]
    columns = ["claim", "statement", "rule", "suite", "task", "verdict", "evidence"]
    told = [(c.name, c.statement, c.rule, suite, task, str(f.verdict), f.evidence) for c, suite, task, f in rows]
    return DataFrame(told, columns=columns)
