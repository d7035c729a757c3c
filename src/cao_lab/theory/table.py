"""Rows of the theory table: a bound, what was observed, and the verdict that follows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

Pairs = Iterable[tuple[float, float]]
"""Trials of one statement, each as (bound, observed)."""

ROUNDING = 1e-9
TIGHT = 1e-6


@dataclass(frozen=True)
class Statement:
    """One checked statement; of many trials, the one that came closest to breaking it.

    The slack is the distance to the bound relative to the bound (absolute where the bound is 0), negative where the
    statement fails; of a predicted number it is minus the relative error.
    """

    statement: str
    problem: str
    bound: float
    observed: float
    slack: float
    verdict: str


def upper_bound(statement: str, problem: str, trials: Pairs) -> Statement:
    """Check that what was observed never exceeds the bound."""
    return closest(statement, problem, [(b, o, relative(b - o, b)) for b, o in trials])


def lower_bound(statement: str, problem: str, trials: Pairs) -> Statement:
    """Check that what was observed never falls below the bound."""
    return closest(statement, problem, [(b, o, relative(o - b, b)) for b, o in trials])


def prediction(statement: str, problem: str, trials: Pairs, tolerance: float = ROUNDING) -> Statement:
    """Check that what was observed equals the predicted number up to a relative tolerance."""
    row = closest(statement, problem, [(b, o, -abs(relative(o - b, b))) for b, o in trials])
    return replace(row, verdict="agrees" if row.slack >= -tolerance else "violated")


def refutation(row: Statement) -> Statement:
    """Turn the check of a statement as the paper prints it into the verdict on that statement."""
    return replace(row, verdict="false as printed" if row.verdict == "violated" else "not refuted")


def closest(statement: str, problem: str, trials: list[tuple[float, float, float]]) -> Statement:
    """Return the row of the trial with the least slack."""
    bound, observed, slack = min(trials, key=lambda trial: trial[2])
    # Differences below rounding are noise, and would differ between machines.
    slack = 0.0 if abs(slack) < ROUNDING else slack
    verdict = "violated" if slack < 0 else "tight" if slack < TIGHT else "holds"
    return Statement(statement, problem, bound, observed, slack, verdict)


def relative(difference: float, bound: float) -> float:
    """Return the difference in units of the bound, or itself where the bound is 0."""
    return difference / abs(bound) if bound else difference
