"""Tables of full-batch solvers: goals, ratios, losses and errors of each problem, and what the methods cost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import median
from typing import NamedTuple

from pandas import DataFrame

from cao_lab.log.solves import SolveRun
from cao_lab.reporting.scientific import (
    ASIDE,
    GOALS,
    OURS,
    Goal,
    contests,
    is_stalled,
    last,
    name,
    outcome,
    ratios,
    task_medians,
)
from cao_lab.reporting.scientific_points import points_table
from cao_lab.reporting.tabular import Table, short

TITLES = {
    OURS: "SketchedLBFGS",
    "scipy-bfgs": "BFGS, dense",
    "scipy-lbfgsb": "L-BFGS-B (scipy)",
    "torch-lbfgs": "L-BFGS (torch)",
    "nncg": "NNCG (deepxde)",
    "lbfgs-nncg": "L-BFGS, then NNCG",
    "lbfgs-nncg-damping0.01": "L-BFGS, then NNCG, μ = 0.01",
    "lbfgs-nncg-damping0.001": "L-BFGS, then NNCG, μ = 0.001",
    "soap": "SOAP",
    "adam": "Adam",
    "cao": "CAO",
}
"""All methods, in the order in which they are shown."""
SHORT = ("loss / torch", "loss / L-BFGS-B", None, "loss / NNCG", "loss / NNCG tuned", "error / best", "evaluations")
"""Heads of the columns of ratios, one per goal; None for one that is about the same ratios."""


class GoalRow(NamedTuple):
    """A goal, and what came of it."""

    goal: str
    most: float
    measured: float
    least: float
    """The least of the problems' medians."""
    largest: float
    pairs: int
    """Problems and seeds that were compared."""


class MethodRow(NamedTuple):
    """What became of all runs of one method."""

    label: str
    runs: int
    lowest_loss: int
    lowest_error: int
    stalled: int
    out_of_time: int
    pace: float
    """Its seconds per billed evaluation over Adam's."""


def solver_tables(runs: Sequence[SolveRun]) -> list[Table]:
    """Return all tables that there are runs for."""
    small = [run for run in runs if run.suite == "scientific"]
    more_points = [run for run in runs if run.suite == "scientific-points"]
    full_width = [run for run in runs if run.suite == "rathore" and run.records]
    tables = [goals_table(small), ratio_table(small), loss_table(small), error_table(small), method_table(small)]
    return [
        *(tables if contests(small) else []),
        *([points_table(small, more_points)] if contests(small) and contests(more_points) else []),
        *([progress_table(full_width)] if full_width else []),
    ]


def goals_table(runs: Sequence[SolveRun]) -> Table:
    """Return what was to be reached, what was, and between which problems it varies."""
    rows = [goal_row(runs, goal) for goal in (*GOALS, ASIDE)]
    cells = [
        {
            "SketchedLBFGS": row.goal,
            "to reach": f"≤ {Fraction(row.most).limit_denominator(100)}",
            "measured": short(row.measured),
            "problems": f"{short(row.least)} – {short(row.largest)}",
            "reached": "yes" if row.measured <= row.most else "no",
        }
        for row in rows
    ]
    caption = "Goals: ratios of ours to theirs, median over problems and seeds; the range is that of problems' medians."
    return Table("scientific-goals", caption, DataFrame(cells), DataFrame(rows))


def goal_row(runs: Sequence[SolveRun], goal: Goal) -> GoalRow:
    """Return what came of one goal."""
    values = ratios(runs, goal)
    medians = task_medians(values).values()
    least, largest = min(medians, default=math.nan), max(medians, default=math.nan)
    return GoalRow(goal.name, goal.most, outcome(values, goal), least, largest, len(values))


def ratio_table(runs: Sequence[SolveRun]) -> Table:
    """Return the ratios behind the goals, problem by problem."""
    columns = {head: ratios(runs, goal) for head, goal in zip(SHORT, GOALS, strict=True) if head}
    medians = {head: task_medians(values) for head, values in columns.items()}
    cells = [
        {"problem": name(task)} | {head: short(by_task.get(task, math.nan)) for head, by_task in medians.items()}
        for task in tasks(runs)
    ]
    numbers = [
        {"task": key[0], "seed": key[1]} | {head: values.get(key, math.nan) for head, values in columns.items()}
        for key in contests(runs)
    ]
    caption = "Ratios of ours to theirs behind the goals, median over seeds; below 1 ours is better."
    return Table("scientific-ratios", caption, DataFrame(cells), DataFrame(numbers))


def loss_table(runs: Sequence[SolveRun]) -> Table:
    """Return the final loss of every method on every problem."""
    caption = "Final loss, median over seeds; the lowest of each problem bold."
    return value_table("scientific-loss", caption, runs, "loss")


def error_table(runs: Sequence[SolveRun]) -> Table:
    """Return the final error of every method on every problem."""
    caption = "Relative L2 error at the final loss, median over seeds; the lowest of each problem bold."
    return value_table("scientific-error", caption, runs, "error")


def value_table(title: str, caption: str, runs: Sequence[SolveRun], column: str) -> Table:
    """Return one value of every method on every problem, with all seeds among the numbers."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for (task, seed), by_label in contests(runs).items():
        for label, run in by_label.items():
            values.setdefault((task, label), {})[seed] = float(getattr(last(run), column))
    numbers = [
        {"task": task, "label": label, "seed": seed, column: value}
        for (task, label), seeds in values.items()
        for seed, value in seeds.items()
    ]
    medians = {key: median(seeds.values()) for key, seeds in values.items()}
    best = {task: min(value for (other, _), value in medians.items() if other == task) for task in tasks(runs)}
    cells = [
        {"": TITLES.get(label, label)} | {name(task): cell(medians.get((task, label)), best[task]) for task in best}
        for label in labels(runs)
    ]
    return Table(title, caption, DataFrame(cells), DataFrame(numbers))


def method_table(runs: Sequence[SolveRun]) -> Table:
    """Return how often each method wins and stalls, and how many seconds it takes for the same bill."""
    found = list(contests(runs).values())
    rows = [method_row(label, [by_label for by_label in found if label in by_label]) for label in labels(runs)]
    cells = [
        {
            "": TITLES.get(row.label, row.label),
            "lowest loss": f"{row.lowest_loss} of {row.runs}",
            "lowest error": f"{row.lowest_error} of {row.runs}",
            "stalled": str(row.stalled),
            "out of time": str(row.out_of_time),
            "seconds for the same bill, Adam's = 1": short(row.pace),
        }
        for row in rows
    ]
    caption = "How often each method has the lowest loss or error of a problem and seed, how it ends, and its time."
    return Table("scientific-methods", caption, DataFrame(cells), DataFrame(rows))


def method_row(label: str, found: list[dict[str, SolveRun]]) -> MethodRow:
    """Count over all problems and seeds that a method has run on."""
    done = [by_label[label] for by_label in found]
    paces = [pace(by_label[label]) / pace(by_label["adam"]) for by_label in found if "adam" in by_label]
    return MethodRow(
        label,
        runs=len(found),
        lowest_loss=sum(best_label(by_label, "loss") == label for by_label in found),
        lowest_error=sum(best_label(by_label, "error") == label for by_label in found),
        stalled=sum(map(is_stalled, done)),
        out_of_time=sum(not is_stalled(run) and last(run).billed < run.evaluations for run in done),
        pace=median(paces) if paces else math.nan,
    )


def progress_table(runs: Sequence[SolveRun]) -> Table:
    """Return how far runs at full width have come, finished or not."""
    cells = [
        {
            "problem": name(run.task),
            "method": TITLES.get(run.label, run.label),
            "evaluations": f"{last(run).billed:,.0f}",
            "hours": f"{last(run).seconds / 3600:.2f}",
            "loss": short(last(run).loss),
            "error": short(last(run).error),
            "state": (run.ended or run.status).partition(":")[0],
        }
        for run in runs
    ]
    numbers = [{"task": run.task, "label": run.label, "seed": run.seed, **asdict(last(run))} for run in runs]
    caption = "Runs at the width of Rathore et al. (2024), as far as they have come."
    return Table("rathore-progress", caption, DataFrame(cells), DataFrame(numbers))


def pace(run: SolveRun) -> float:
    """Return seconds per evaluation that was billed, without the row in which a stalled run idles to the end."""
    record = run.records[-2] if is_stalled(run) and len(run.records) > 1 else last(run)
    return record.seconds / record.billed if record.billed and record.seconds else math.nan


def best_label(by_label: dict[str, SolveRun], column: str) -> str:
    """Return who has the lowest value of a problem and seed."""
    return min(by_label, key=lambda label: float(getattr(last(by_label[label]), column)))


def tasks(runs: Iterable[SolveRun]) -> list[str]:
    """Return the tasks of finished runs, in order."""
    return sorted({task for task, _ in contests(runs)})


def labels(runs: Iterable[SolveRun]) -> list[str]:
    """Return the labels of finished runs, those with a title first."""
    found = {label for by_label in contests(runs).values() for label in by_label}
    return [label for label in TITLES if label in found] + sorted(found - set(TITLES))


def cell(value: float | None, best: float) -> str:
    """Return a number, bold if it is the best, and a dash if there is none."""
    if value is None:
        return "–"
    return f"**{short(value)}**" if value == best else short(value)
