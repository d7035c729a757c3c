"""The paper's checkable claims: each in our words, the judge whose rule decides it, and where it is judged.

The rules were fixed before the runs that they judge; what was changed later is told in docs/notebook.md. A judge's
docstring is its rule, word for word as the report prints it. Intervals are Welch's at 95 % over seeds; where a claim
has several parts they share the 5 %. Durations are compared by the logarithm of their ratio, at the interpolated
crossing of the threshold. No verdict is finer than the noise: what two names of one method differ by on a seed.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from pandas import DataFrame

from cao_lab.facts import PAPER_MODELS, PAPER_TASK, SuiteKind, judged_datasets, suites_of
from cao_lab.reporting.judges.accuracy import final_accuracy
from cao_lab.reporting.judges.cost import linear_in_rank, memory_overhead, time_overhead
from cao_lab.reporting.judges.curves import consistently_below, early_loss, early_variance
from cao_lab.reporting.judges.sensitivity import damping_effect, damping_variance, refresh_effect, small_damping
from cao_lab.reporting.judges.speed import (
    as_printed,
    curvature_off,
    factor,
    rank_insensitivity,
    speed,
    threshold_range,
)
from cao_lab.reporting.judges.stability import no_divergence, positive_definite, stable_range
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.verdicts import Finding, Verdict


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
    part_of: str | None = None
    """The claim of which this asks the same comparison again; it is shown, and not counted."""

    @property
    def rule(self) -> str:
        """The rule in words: the judge's docstring."""
        return " ".join((inspect.getdoc(self.judge) or "").split())


CIFAR = judged_datasets(PAPER_MODELS)
CLAIMS = (
    Claim("speed", "CAO (k = 1) reaches the train-loss threshold in fewer epochs than Adam.", speed),
    Claim("factor", "On CIFAR-100 with ResNet-18, loss 0.75, it does so 2.95 times sooner (19 against 56 epochs).",
          factor, tasks=(PAPER_TASK,), part_of="speed"),
    Claim("threshold range", "The speedup over Adam holds at thresholds from 0.6 to 1.0, not only at 0.75 "
          "(0.9: 16 against 31 epochs, 1.0: 14 against 23).", threshold_range, part_of="speed"),
    Claim("early loss", "CAO's train loss lies below SGD's and Adam's, early in training and on every network.",
          early_loss),
    Claim("whole curve", "CAO's train loss lies consistently below SGD's and Adam's.", consistently_below),
    Claim("early variance", "Early in training CAO's loss varies less than SGD's and Adam's.", early_variance),
    Claim("final accuracy", "CAO ends with Adam's test accuracy (CIFAR-100/ResNet-18: 0.65 and 0.66).", final_accuracy),
    Claim("rank", "The rank hardly matters among k = 1, 3, 5.", rank_insensitivity),
    Claim("no curvature", "Without curvature (k = 0) convergence is slower.", curvature_off),
    Claim("as printed", "CAO with P, eigensolver and SGD phase as the paper has them trains like our main setting.",
          as_printed),
    Claim("time", "An epoch of CAO (k = 1, m = 400) takes 1.18 to 1.22 times as long as one of SGD.", time_overhead),
    Claim("cost of rank", "The cost of curvature is approximately linear in k.", linear_in_rank),
    Claim("memory", "CAO (k = 1) needs 2.4 to 2.8 times the peak memory of SGD.", memory_overhead),
    Claim("damping", "A larger damping η slows progress (η from 0.001 to 0.1).", damping_effect,
          ("sweep",), CIFAR),
    Claim("damping and variance", "A larger damping η reduces variance.", damping_variance, ("sweep",), CIFAR),
    Claim("small damping", "A very small damping η destabilises.", small_damping, ("sweep",), CIFAR),
    Claim("refresh", "The refresh interval m trades cost against freshness (m from 200 to 800).", refresh_effect,
          ("sweep",), CIFAR),
    Claim("stability", "CAO does not diverge on these tasks.", no_divergence, ("comparison", "sweep")),
    Claim("positive definite", "Damping η > 0 keeps P positive definite, also under negative curvature.",
          positive_definite, ("comparison", "sweep", "tuned")),
    Claim("stable range", "Preconditioning widens the range of stable step sizes.", stable_range, ("stability",)),
)  # fmt: skip


def audit(found: list[Setting]) -> DataFrame:
    """Judge every claim in every setting that speaks to it; the paper's own setting is always listed.

    One row a claim and setting: claim, statement, rule, suite, task, verdict, evidence, and whether it is counted.
    """
    rows = []
    for claim in CLAIMS:
        fitting = [one for one in found if one.kind in claim.kinds and one.task.startswith(claim.tasks)]
        home = suites_of(claim.kinds)[0]
        if not any(one.suite == home for one in fitting):
            task = "any task" if claim.kinds == ("stability",) else PAPER_TASK
            rows.append((claim, home, task, Finding(Verdict.UNTESTED, f"no logs of suite {home}")))
        rows += [(claim, one.suite, one.task, claim.judge(one)) for one in fitting]
    columns = ["claim", "statement", "rule", "suite", "task", "verdict", "evidence", "is_counted"]
    told = [
        (claim.name, claim.statement, claim.rule, suite, task, str(found.verdict), found.evidence, not claim.part_of)
        for claim, suite, task, found in rows
    ]
    return DataFrame(told, columns=columns)
