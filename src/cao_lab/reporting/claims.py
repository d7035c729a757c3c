"""The paper's checkable claims: each in our words, the judge whose rule decides it, and where it is judged.

The rules were fixed before the runs that they judge; what was changed later is told in docs/notebook.md. A judge's
docstring is its rule, word for word as the report prints it. Intervals are Student's t at 95 % over seeds, paired;
durations are compared by the logarithm of their ratio, at the interpolated crossing of the threshold.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from pandas import DataFrame

from cao_lab.facts import PAPER_MODELS, PAPER_TASK, SuiteKind, judged_datasets, suites_of
from cao_lab.reporting.judges.accuracy import final_accuracy
from cao_lab.reporting.judges.cost import memory_overhead, time_overhead
from cao_lab.reporting.judges.sensitivity import damping_effect, refresh_effect
from cao_lab.reporting.judges.speed import (
    curvature_off,
    early_loss,
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

    @property
    def rule(self) -> str:
        """The rule in words: the judge's docstring."""
        return " ".join((inspect.getdoc(self.judge) or "").split())


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
