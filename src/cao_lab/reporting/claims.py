"""The paper's checkable claims: each in our words, the judge whose rule decides it, and where it is judged.

The rules were fixed before the runs that they judge; what was changed later is told in docs/notebook.md. A judge's
docstring is its rule, word for word as the report prints it. Intervals are Welch's at 95 % over seeds; where a claim
has several parts they share the 5 %, and each η is a question of its own. Durations are compared by the logarithm of
their ratio, at the interpolated crossing of the threshold. No verdict is finer than the noise: what two names of one
method differ by on a seed.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pandas import DataFrame

from cao_lab.facts import PAPER_MODELS, PAPER_TASK, SuiteKind, judged_datasets, suites_of
from cao_lab.reporting.judges.accuracy import final_accuracy, saturation, sgd_gap
from cao_lab.reporting.judges.cost import linear_in_rank, memory_overhead, time_overhead
from cao_lab.reporting.judges.curves import consistently_below, early_loss, early_variance
from cao_lab.reporting.judges.sensitivity import damping_effect, damping_variance, refresh_effect, small_damping
from cao_lab.reporting.judges.speed import (
    adaptive_refresh,
    as_printed,
    curvature_off,
    factor,
    rank_insensitivity,
    speed,
    threshold_range,
)
from cao_lab.reporting.judges.stability import (
    no_divergence,
    positive_definite,
    skew,
    stable_range,
    sufficient_damping,
)
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict

Judge: TypeAlias = Callable[[Setting], Finding | dict[str, Finding]]
"""Gives a finding, or one for each part of the claim, by its name."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, and the function that judges it in a setting."""

    name: str
    statement: str
    judge: Judge
    kinds: tuple[SuiteKind, ...] = ("comparison", "tuned")
    """The kinds of suites in which it is judged; the others ask questions of their own."""
    tasks: tuple[str, ...] = judged_datasets()
    """How the names of the tasks begin on which it is judged."""
    by_damping: bool = False
    """Whether it is judged at each η that was run: the paper states no value."""
    uncounted: str | None = None
    """Why it is shown and not counted, if so."""

    @property
    def rule(self) -> str:
        """The rule in words: the judge's docstring."""
        return " ".join((inspect.getdoc(self.judge) or "").split())

    def findings(self, setting: Setting) -> Iterator[tuple[str, Finding]]:
        """Yield what a setting shows, by η and by part where there are several."""
        for arm, one in (setting.arms if self.by_damping else {"": setting}).items():
            found = self.judge(one)
            for part, finding in ({"": found} if isinstance(found, Finding) else found).items():
                yield arm or part, finding


CIFAR = judged_datasets(PAPER_MODELS)
AGAIN = "the comparison with Adam again"
OUR_BAR = "a remark without a size, and the bar is ours"
CLAIMS = (
    Claim("speed", "CAO (k = 1) reaches the train-loss threshold in fewer epochs than Adam.", speed, by_damping=True),
    Claim("factor", "On CIFAR-100 with ResNet-18, loss 0.75, it does so 2.95 times sooner (19 against 56 epochs).",
          factor, tasks=(PAPER_TASK,), by_damping=True, uncounted=AGAIN),
    Claim("threshold range", "The speedup over Adam holds at thresholds from 0.6 to 1.0, not only at 0.75 "
          "(0.9: 16 against 31 epochs, 1.0: 14 against 23).", threshold_range, by_damping=True, uncounted=AGAIN),
    Claim("early loss", "CAO's train loss lies below SGD's and Adam's, early in training and on every network.",
          early_loss, by_damping=True),
    Claim("whole curve", "CAO's train loss lies consistently below SGD's and Adam's.", consistently_below,
          by_damping=True),
    Claim("early variance", "Early in training CAO's loss varies less than SGD's and Adam's.", early_variance),
    Claim("final accuracy", "CAO ends with Adam's test accuracy (CIFAR-100/ResNet-18: 0.65 and 0.66).", final_accuracy,
          by_damping=True),
    Claim("SGD's accuracy", "SGD ends below CAO (CIFAR-100/ResNet-18: 0.58 and 0.65).", sgd_gap, by_damping=True),
    Claim("saturation", "Test accuracy saturates early.", saturation, uncounted=OUR_BAR),
    Claim("rank", "The rank hardly matters among k = 1, 3, 5.", rank_insensitivity),
    Claim("no curvature", "Without curvature (k = 0) convergence is slower.", curvature_off, by_damping=True),
    Claim("as printed", "CAO with P, eigensolver and SGD phase as the paper has them trains like our main setting.",
          as_printed, uncounted="our question, and no claim of the paper"),
    Claim("skew", "The Hessian is highly skewed, so that a few directions suffice.", skew, ("comparison",), CIFAR,
          uncounted=OUR_BAR),
    Claim("time", "An epoch of CAO (k = 1, m = 400) takes 1.18 to 1.22 times as long as one of SGD.", time_overhead,
          uncounted="T_pow was derived from it"),
    Claim("cost of rank", "The cost of curvature is approximately linear in k.", linear_in_rank),
    Claim("memory", "CAO (k = 1) needs 2.4 to 2.8 times the peak memory of SGD.", memory_overhead),
    Claim("damping", "A larger damping η slows progress (η from 0.001 to 0.1).", damping_effect,
          ("sweep",), CIFAR),
    Claim("damping and variance", "A larger damping η reduces variance.", damping_variance, ("sweep",), CIFAR),
    Claim("small damping", "At very small damping η noise destabilises the estimate, so that gradients are clipped.",
          small_damping, ("sweep",), CIFAR),
    Claim("refresh", "The refresh interval m trades cost against freshness (m from 200 to 800).", refresh_effect,
          ("sweep",), CIFAR),
    Claim("adaptive refresh", "Adaptive refresh is a promising extension.", adaptive_refresh, ("comparison",), CIFAR),
    Claim("stability", "CAO does not diverge on these tasks.", no_divergence, ("comparison", "sweep")),
    Claim("positive definite", "Damping keeps P positive definite for any η > 0, also under negative curvature.",
          positive_definite, ("comparison", "sweep", "tuned")),
    Claim("sufficient damping", "With sufficiently large η, P is positive definite also under negative curvature.",
          sufficient_damping, ("comparison", "sweep", "tuned"), uncounted="a theorem"),
    Claim("stable range", "Preconditioning widens the range of stable step sizes.", stable_range, ("stability",)),
)  # fmt: skip


def audit(found: list[Setting]) -> DataFrame:
    """Judge every claim in every setting that speaks to it; the paper's own setting is always listed.

    One row per claim, setting, and η or part: claim, statement, rule, suite, task, part, verdict, evidence, and whether
    it is counted.
    """
    rows: list[tuple[Claim, str, str, str, Finding]] = []
    for claim in CLAIMS:
        fitting = [one for one in found if one.kind in claim.kinds and one.task.startswith(claim.tasks)]
        home = suites_of(claim.kinds)[0]
        if not any(one.suite == home for one in fitting):
            task = "any task" if claim.kinds == ("stability",) else PAPER_TASK
            rows.append((claim, home, task, "", Finding(Verdict.UNTESTED, f"no logs of suite {home}")))
        rows += [(claim, one.suite, one.task, part, shown) for one in fitting for part, shown in claim.findings(one)]
    columns = ["claim", "statement", "rule", "suite", "task", "part", "verdict", "evidence", "is_counted"]
    told = [
        (claim.name, claim.statement, stated(claim), suite, task, part, str(shown.verdict), shown.evidence,
         claim.uncounted is None)
        for claim, suite, task, part, shown in rows
    ]  # fmt: skip
    return DataFrame(told, columns=columns)


def stated(claim: Claim) -> str:
    """Return the rule of a claim, and why it is not counted, if so."""
    return claim.rule + (f" Not counted: {claim.uncounted}." if claim.uncounted else "")
