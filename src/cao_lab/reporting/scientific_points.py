"""What more points do to the errors of full-batch solvers."""

from collections.abc import Sequence
from typing import NamedTuple

from pandas import DataFrame

from cao_lab.log.solves import SolveRun
from cao_lab.reporting.scientific import OURS, contests, last, name, quotient
from cao_lab.reporting.tabular import Table, short


class PointsRow(NamedTuple):
    """Errors of one problem and seed with few points and with many."""

    task: str
    seed: int
    ours_few: float
    ours_many: float
    change: float
    best_few: float
    best_many: float
    ratio_few: float
    ratio_many: float


POINTS_HEADS = {
    "ours_few": "ours, 1,000 points", "ours_many": "ours, 4,000", "change": "change",
    "best_few": "best peer, 1,000", "best_many": "best peer, 4,000",
    "ratio_few": "ours / best, 1,000", "ratio_many": "ours / best, 4,000",
}  # fmt: skip


def points_table(few: Sequence[SolveRun], many: Sequence[SolveRun]) -> Table:
    """Return what four times the points do to the errors, of ours and of the best of the others that had them too."""
    before, after = contests(few), contests(many)
    rows = [points_row(*key, before[key], after[key]) for key in sorted(before.keys() & after.keys())]
    numbers = DataFrame(rows)
    groups = [*((name(str(task)), own) for task, own in numbers.groupby("task")), ("all", numbers)]
    cells = [
        {"problem": title} | {head: short(own[key].median()) for key, head in POINTS_HEADS.items()}
        for title, own in groups
    ]
    caption = "Relative L2 error with 1,000 and with 4,000 points inside, medians over seeds, column by column."
    return Table("scientific-points", caption, DataFrame(cells), numbers)


def points_row(task: str, seed: int, few: dict[str, SolveRun], many: dict[str, SolveRun]) -> PointsRow:
    """Compare one problem and seed with few points and with many."""
    peers = many.keys() & few.keys() - {OURS}
    ours_few, ours_many = (last(runs[OURS]).error for runs in (few, many))
    best_few, best_many = (min(last(runs[peer]).error for peer in peers) for runs in (few, many))
    return PointsRow(
        task,
        seed,
        ours_few,
        ours_many,
        change=quotient(ours_many, ours_few),
        best_few=best_few,
        best_many=best_many,
        ratio_few=quotient(ours_few, best_few),
        ratio_many=quotient(ours_many, best_many),
    )
