"""What to call a method: by its optimizer, its rank, and what tells it from the others of its task."""

import math
from collections import Counter
from collections.abc import Sequence

from pandas import Series

from cao_lab.assumptions import DAMPING
from cao_lab.facts import method_info
from cao_lab.log.records import RunRecord, Setting, written

MIXED = "‡"
"""Marks a method of which a run was resumed on other code than it began with."""


def display_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return what to call each run's method: its changed settings without those that all its siblings share.

    Siblings are the runs of the same optimizer on the same task; a rank is always told.
    """
    families = [(run.suite, run.task, run.optimizer["name"]) for run in runs]
    shared = dict(zip(families, (set(run.changed.items()) for run in runs), strict=True))
    for family, run in zip(families, runs, strict=True):
        shared[family] &= set(run.changed.items())
    names = [name_of(run, shared[family]) for family, run in zip(families, runs, strict=True)]
    mixed = {(run.suite, run.task, run.label) for run in runs if len(run.commits) > 1}
    marks = [f" {MIXED}" if (run.suite, run.task, run.label) in mixed else "" for run in runs]
    return [name + mark for name, mark in zip(told_apart(names, runs), marks, strict=True)]


def name_of(run: RunRecord, shared: set[tuple[str, Setting]]) -> str:
    """Return "CAO k=1, sketch random" for a run whose siblings share all else."""
    rank = run.optimizer.get("rank")
    title = method_info(run.optimizer["name"]).title + ("" if rank is None else f" k={rank:g}")
    told = {field: value for field, value in run.changed.items() if (field, value) not in shared and field != "rank"}
    return "".join([title, *(f", {field.replace('_', ' ')} {written(value)}" for field, value in told.items())])


def told_apart(names: list[str], runs: Sequence[RunRecord]) -> list[str]:
    """Add the label to a name that two methods of a task would share, so that their curves are never taken for one."""
    methods = {(run.suite, run.task, run.label, name) for run, name in zip(runs, names, strict=True)}
    owners = Counter((suite, task, name) for suite, task, _, name in methods)
    return [
        name if owners[run.suite, run.task, name] == 1 else f"{name} ({run.label})"
        for run, name in zip(runs, names, strict=True)
    ]


def method_name(row: Series) -> str:
    """Return what to call a method of which the rate was searched, marked if a run of it was resumed on other code."""
    is_mixed = row.get("is_mixed", str(row.get("name", "")).endswith(MIXED))
    rank = "" if math.isnan(row["rank"]) else f" k={row['rank']:.0f}"
    momentum = f", momentum {row['momentum']:g}" if row["momentum"] > 0 else ""
    # Rules that choose the damping have no number here.
    eta = row.get("damping", math.nan)
    damping = "" if math.isnan(eta) or eta == DAMPING else f", η = {eta:g}"
    return f"{method_info(row['optimizer']).title}{rank}{momentum}{damping}{f' {MIXED}' if is_mixed else ''}"
