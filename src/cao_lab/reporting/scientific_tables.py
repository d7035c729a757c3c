"""Tables of full-batch solvers: goals, ratios, losses and errors of each problem, more points, and what it costs."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from statistics import median
from typing import Any

from pandas import DataFrame

from cao_lab.log.records import SolveRun
from cao_lab.reporting.scientific import (
    ASIDE,
    ERRORS,
    GOALS,
    IN_EQUAL_SECONDS,
    OURS,
    TITLES,
    WRONG,
    After,
    Goal,
    contests,
    interval_over_problems,
    is_stalled,
    is_wrong,
    last,
    looks_right,
    name,
    outcome,
    quotient,
    ratios,
    seconds_until,
    task_medians,
)
from cao_lab.reporting.tabular import Table, short

SHORT = ("loss / torch", "loss / L-BFGS-B", None, "loss / NNCG", "loss / NNCG tuned", "error / best", "evaluations")
"""Heads of the columns of ratios, one per goal; None for one that is about the same ratios."""
IN_SECONDS = ("scientific-2", "scientific-2-points")
"""Suites whose runs all have the same seconds."""
POINTS_HEADS = {
    "ours_few": "ours, 1,000 points", "ours_many": "ours, 4,000", "change": "change",
    "best_few": "best peer, 1,000", "best_many": "best peer, 4,000",
    "ratio_few": "ours / best, 1,000", "ratio_many": "ours / best, 4,000",
}  # fmt: skip


def solver_tables(runs: Sequence[SolveRun]) -> list[Table]:
    """Return all tables that there are runs for."""
    small = [run for run in runs if run.suite == "scientific"]
    timed = {suite: [run for run in runs if run.suite == suite] for suite in IN_SECONDS}
    more_points = [run for run in runs if run.suite == "scientific-points"]
    wide = [run for run in runs if run.suite == "crossover"]
    full_width = [run for run in runs if run.suite == "rathore" and run.records]
    losses = value_table("loss", "Final loss", small)
    errors = value_table("error", "Relative L2 error at the final loss", small)
    tables = [
        goals_table("scientific", small, (*GOALS, ASIDE)),
        ratio_table(small),
        losses,
        errors,
        method_table(small),
    ]
    return [
        *(tables if contests(small) else []),
        *([points_table(small, more_points)] if contests(small) and contests(more_points) else []),
        *([progress_table(full_width)] if full_width else []),
        *([value_table("loss", "Final loss by width", wide, "crossover", str)] if contests(wide) else []),
        *(table for suite, own in timed.items() if contests(own) for table in timed_tables(suite, own)),
    ]


def goals_table(suite: str, runs: Sequence[SolveRun], goals: Sequence[Goal]) -> Table:
    """Return what was to be reached, what was, and between which problems it varies."""
    rows = [goal_row(runs, goal) for goal in goals]
    cells = [
        {
            "SketchedLBFGS": row["goal"],
            "to reach": f"≤ {most(row['most'])}",
            "measured": short(row["measured"]),
            "95 % over problems": "–" if math.isnan(row["low"]) else f"{short(row['low'])} – {short(row['high'])}",
            "problems": f"{short(row['least'])} – {short(row['largest'])}",
            "reached": "yes" if row["measured"] <= row["most"] else "no",
        }
        for row in rows
    ]
    caption = (
        "Goals: ratios of ours to theirs, median over problems and seeds, its interval if problems are drawn anew, and "
        "the range of the problems' medians."
    )
    return Table(f"{suite}-goals", caption, DataFrame(cells), DataFrame(rows))


def most(bound: float) -> str:
    """Return a bound as a goal names it: a fraction below one, a number above."""
    return str(Fraction(bound).limit_denominator(100)) if bound <= 1 else short(bound)


def timed_tables(suite: str, runs: Sequence[SolveRun]) -> list[Table]:
    """Return goals in equal seconds, and how ours compares with each method."""
    rows = [timed_row(label, runs) for label in labels(runs)]
    heads = ("loss, 10 %", "loss, 30 %", "loss, 100 %", "error, 100 %")
    cells = [
        {
            "": TITLES.get(row["label"], row["label"]),
            "runs": str(row["runs"]),
            **{head: "–" if row["label"] == OURS else short(row[head]) for head in heads},
            "95 % of the last two": row["intervals"],
            **{f"s to {goal:g}": short(row[f"s to {goal:g}"]) for goal in ERRORS},
            "wrong": str(row["wrong"]),
            "stalled": str(row["stalled"]),
        }
        for row in rows
    ]
    caption = (
        "Ours over theirs after shares of the time, median over problems and seeds, with intervals if problems are "
        "drawn anew; below 1 ours is better. Then median seconds to relative L2 errors (never: in half of the runs or "
        f"fewer), and how many runs end wrong, at an error above {WRONG}, or could not go on."
    )
    return [
        goals_table(suite, runs, IN_EQUAL_SECONDS),
        Table(f"{suite}-methods", caption, DataFrame(cells), DataFrame(rows)),
        value_table("loss", "Final loss", runs, suite),
        value_table("error", "Relative L2 error at the final loss", runs, suite),
    ]


def timed_row(label: str, runs: Sequence[SolveRun]) -> dict[str, Any]:
    """Compare ours with one method in equal seconds."""
    own = [by_label[label] for by_label in contests(runs).values() if label in by_label]
    measures = (After(0.1), After(0.3), After(1.0), After(1.0, "error"))
    found = [ratios(runs, Goal("", (label,), measure, 1)) for measure in measures]
    values = {
        f"{measure.column}, {100 * measure.share:.0f} %": median(ratio.values()) if ratio else math.nan
        for measure, ratio in zip(measures, found, strict=True)
    }
    bounds = ["–".join(map(short, interval_over_problems(ratio))) for ratio in found[2:] if ratio]
    return {
        "label": label,
        "runs": len(own),
        **values,
        "intervals": "; ".join(bounds) or "–",
        **{f"s to {goal:g}": median(seconds_until(run, goal) for run in own) for goal in ERRORS},
        "wrong": sum(map(is_wrong, own)),
        "stalled": sum(map(is_stalled, own)),
    }


def goal_row(runs: Sequence[SolveRun], goal: Goal) -> dict[str, Any]:
    """Return what came of one goal, the range of the problems' medians, and the interval if problems are drawn anew."""
    values = ratios(runs, goal)
    medians = task_medians(values).values()
    least, largest = min(medians, default=math.nan), max(medians, default=math.nan)
    # What holds on the worst problem has no such interval.
    low, high = (math.nan, math.nan) if goal.is_on_every_problem else interval_over_problems(values)
    return {
        "goal": goal.name, "most": goal.most, "measured": outcome(values, goal), "least": least, "largest": largest,
        "low": low, "high": high, "pairs": len(values),
    }  # fmt: skip


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


def value_table(
    column: str,
    what: str,
    runs: Sequence[SolveRun],
    suite: str = "scientific",
    title: Callable[[str], str] = name,
) -> Table:
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
        {"": TITLES.get(label, label)} | {title(task): cell(medians.get((task, label)), best[task]) for task in best}
        for label in labels(runs)
    ]
    caption = f"{what}, median over seeds; the lowest of each problem bold."
    return Table(f"{suite}-{column}", caption, DataFrame(cells), DataFrame(numbers))


def method_table(runs: Sequence[SolveRun]) -> Table:
    """Return how often each method wins and stalls, and how many seconds it takes for the same bill."""
    found = list(contests(runs).values())
    rows = [method_row(label, found) for label in labels(runs)]
    cells = [
        {
            "": TITLES.get(row["label"], row["label"]),
            "lowest loss": f"{row['lowest_loss']} of {row['runs']}",
            "lowest error": f"{row['lowest_error']} of {row['runs']}",
            "stalled": str(row["stalled"]),
            "out of time": str(row["out_of_time"]),
            "wrong": str(row["wrong"]),
            "not told by the loss": str(row["unseen"]),
            "seconds for the same bill, Adam's = 1": short(row["pace"]),
        }
        for row in rows
    ]
    caption = (
        "How often each method has the lowest loss or error of a problem and seed, how it ends, how often at a wrong "
        f"solution (a relative L2 error above {WRONG}), how often although a run of that problem with a higher loss is "
        "not wrong, and its time."
    )
    return Table("scientific-methods", caption, DataFrame(cells), DataFrame(rows))


def method_row(label: str, found: list[dict[str, SolveRun]]) -> dict[str, Any]:
    """Count over all problems and seeds that a method has run on."""
    everybody = [run for by_label in found for run in by_label.values()]
    found = [by_label for by_label in found if label in by_label]
    done = [by_label[label] for by_label in found]
    paces = [pace(by_label[label]) / pace(by_label["adam"]) for by_label in found if "adam" in by_label]
    return {
        "label": label,
        "runs": len(found),
        "lowest_loss": sum(best_label(by_label, "loss") == label for by_label in found),
        "lowest_error": sum(best_label(by_label, "error") == label for by_label in found),
        "stalled": sum(map(is_stalled, done)),
        "out_of_time": sum(not is_stalled(run) and last(run).billed < run.evaluations for run in done),
        "wrong": sum(map(is_wrong, done)),
        "unseen": sum(is_wrong(run) and looks_right(run, everybody) for run in done),
        "pace": median(paces) if paces else math.nan,
    }


def points_table(few: Sequence[SolveRun], many: Sequence[SolveRun]) -> Table:
    """Return what four times the points do to the errors, of ours and of the best of the others that had them too."""
    before, after = contests(few), contests(many)
    numbers = DataFrame([points_row(key, before[key], after[key]) for key in sorted(before.keys() & after.keys())])
    groups = [*((name(str(task)), own) for task, own in numbers.groupby("task")), ("all", numbers)]
    cells = [
        {"problem": title} | {head: short(own[key].median()) for key, head in POINTS_HEADS.items()}
        for title, own in groups
    ]
    caption = "Relative L2 error with 1,000 and with 4,000 points inside, medians over seeds, column by column."
    return Table("scientific-points", caption, DataFrame(cells), numbers)


def points_row(key: tuple[str, int], few: dict[str, SolveRun], many: dict[str, SolveRun]) -> dict[str, Any]:
    """Compare the errors of one problem and seed with few points and with many."""
    peers = many.keys() & few.keys() - {OURS}
    ours = [last(runs[OURS]).error for runs in (few, many)]
    best = [min(last(runs[peer]).error for peer in peers) for runs in (few, many)]
    ratios_to_best = [quotient(own, other) for own, other in zip(ours, best, strict=True)]
    values = (*key, *ours, quotient(ours[1], ours[0]), *best, *ratios_to_best)
    return dict(zip(("task", "seed", *POINTS_HEADS), values, strict=True))


def progress_table(runs: Sequence[SolveRun]) -> Table:
    """Return how far runs at full width have come, finished or not."""
    cells = [
        {
            "problem": name(run.task),
            "method": TITLES.get(run.label, run.label),
            "evaluations": f"{last(run).evaluations:,}",
            "billed": f"{last(run).billed:,.0f}",
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
