"""How full-batch solvers are compared: ratios of one problem and seed, and goals about their median.

The goals were fixed before the runs of the suite `scientific`, whose rules are in `cao_lab.suites.scientific`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cao_lab.facts import suites_of
from cao_lab.log.checks import one_line
from cao_lab.log.records import LogError, SolveRecord
from cao_lab.log.solves import HEADER, SolveRun, read_solve

OURS = "sketched-lbfgs"
NNCG_RUNS = ("nncg", "lbfgs-nncg", "lbfgs-nncg-damping0.01", "lbfgs-nncg-damping0.001")
ALL_PEERS = ()
"""As the list of those to compare with: everybody else there is."""

Measure = Callable[[SolveRun, SolveRun], float]


def last(run: SolveRun) -> SolveRecord:
    """Return where a run stands."""
    return run.records[-1]


def loss_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our final loss over theirs."""
    return quotient(last(ours).loss, last(theirs).loss)


def error_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our final error over theirs."""
    return quotient(last(ours).error, last(theirs).error)


def lowest_error_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our lowest error over theirs, whenever each had it."""
    return quotient(*(min(row.error for row in run.records) for run in (ours, theirs)))


def loss_ratio_at_equal_seconds(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our loss over theirs when the first of the two ends; a stalled run does not end."""
    seconds = min(end_seconds(ours), end_seconds(theirs))
    return quotient(loss_after(ours, seconds), loss_after(theirs, seconds))


def share_of_evaluations(ours: SolveRun, theirs: SolveRun) -> float:
    """Return what we were billed until we had their final loss, over what they were; infinite if we never had it."""
    goal = last(theirs).loss
    return quotient(billed_until(ours, goal), billed_until(theirs, goal))


def end_seconds(run: SolveRun) -> float:
    """Return when a run ended: never, if it stalled and more seconds would change nothing."""
    return math.inf if is_stalled(run) else last(run).seconds


def is_stalled(run: SolveRun) -> bool:
    """Whether the method could not go on."""
    return bool(run.ended and run.ended.startswith("stalled"))


def loss_after(run: SolveRun, seconds: float) -> float:
    """Return the lowest loss a run had after so many seconds; the first record's if it had none by then."""
    return [row.loss for row in run.records if row.seconds <= seconds or row is run.records[0]][-1]


def billed_until(run: SolveRun, loss: float) -> float:
    """Return what was billed at the first record at or below a loss; infinite if there is none."""
    return next((row.billed for row in run.records if row.loss <= loss), math.inf)


def quotient(ours: float, theirs: float) -> float:
    """Return a ratio; nothing over nothing is equal."""
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


@dataclass(frozen=True)
class Goal:
    """What is to be reached: a ratio to the best of some peers, at most so large in the median."""

    name: str
    peers: tuple[str, ...]
    measure: Measure
    most: float
    is_on_every_problem: bool = False
    """Whether the largest of the problems' medians is meant, and not the median of all."""


GOALS = (
    Goal("final loss against torch's L-BFGS", ("torch-lbfgs",), loss_ratio, 1 / 50),
    Goal("final loss against scipy's L-BFGS-B", ("scipy-lbfgsb",), loss_ratio, 1 / 10),
    Goal("the same on the worst problem", ("scipy-lbfgsb",), loss_ratio, 1.0, is_on_every_problem=True),
    Goal("loss at equal seconds against NNCG, defaults", ("nncg",), loss_ratio_at_equal_seconds, 1 / 10),
    Goal("loss at equal seconds against NNCG, tuned", NNCG_RUNS, loss_ratio_at_equal_seconds, 1 / 10),
    Goal("L2 error against the best of all peers", ALL_PEERS, error_ratio, 1 / 2),
    Goal("evaluations to the loss at which L-BFGS-B ends", ("scipy-lbfgsb",), share_of_evaluations, 1 / 3),
)
ASIDE = Goal("(L2 error, had every run stopped at its lowest)", ALL_PEERS, lowest_error_ratio, 1 / 2)
"""No goal, but asked because one was missed: would it have been reached with the best rule for stopping?"""


def contests(runs: Iterable[SolveRun]) -> dict[tuple[str, int], dict[str, SolveRun]]:
    """Return the finished runs of each task and seed by their labels."""
    found: dict[tuple[str, int], dict[str, SolveRun]] = {}
    for run in runs:
        if run.status == "finished" and run.records:
            found.setdefault((run.task, run.seed), {})[run.label] = run
    return found


def ratios(runs: Iterable[SolveRun], goal: Goal) -> dict[tuple[str, int], float]:
    """Return the ratio of each task and seed that has us and a peer: to the peer against which it is largest."""
    found = {}
    for key, by_label in contests(runs).items():
        peers = [run for label, run in by_label.items() if label != OURS and label in (goal.peers or by_label)]
        if OURS in by_label and peers:
            found[key] = max(goal.measure(by_label[OURS], peer) for peer in peers)
    return found


def task_medians(values: dict[tuple[str, int], float]) -> dict[str, float]:
    """Return the median over seeds of each task."""
    tasks = dict.fromkeys(task for task, _ in values)
    return {name: median(value for (task, _), value in values.items() if task == name) for name in tasks}


def outcome(values: dict[tuple[str, int], float], goal: Goal) -> float:
    """Return the number that a goal is about; not a number if nothing was run."""
    if not values:
        return math.nan
    return max(task_medians(values).values()) if goal.is_on_every_problem else median(values.values())


def load_solves(logs: Path, missing: list[str]) -> list[SolveRun]:
    """Read all runs of suites of solvers; a damaged one costs itself and a sentence."""
    found = []
    for suite in suites_of(["solvers"]):
        for path in sorted((logs / suite).glob(f"*/*/*/{HEADER}")):
            name = path.parent.relative_to(logs).as_posix()
            try:
                run = read_solve(path.parent)
            except LogError as error:
                missing.append(one_line(f"{name}: {error}, left out"))
                continue
            found.append(run)
            if run.status != "finished":
                spent = f"{last(run).billed:.0f}" if run.records else "none"
                missing.append(one_line(f"{name}: {run.status} after {spent} of {run.evaluations:.0f} evaluations"))
    return found


def name(task: str) -> str:
    """Return the problem of a task: its name without the size."""
    return task.rpartition("-")[0] or task
