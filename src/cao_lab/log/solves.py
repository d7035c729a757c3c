"""The log of a full-batch solver's run: solve.json says what it was, records.csv how far it came."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from cao_lab.log.checks import count, folder_name, folder_path, mapping, number, text, wrong
from cao_lab.log.header import optional
from cao_lab.log.reading import UNREADABLE, read_json, read_rows, refused
from cao_lab.log.records import FORMAT, LogError, SolveRecord

HEADER, RECORDS = "solve.json", "records.csv"
SolveStatus: TypeAlias = Literal["running", "finished", "failed"]
SOLVE_STATUSES: tuple[SolveStatus, ...] = get_args(SolveStatus)


@dataclass(frozen=True)
class SolveRun:
    """A run as a report needs it."""

    status: SolveStatus
    suite: str
    task: str
    label: str
    seed: int
    evaluations: float
    """The budget: evaluations, products and setups at their price."""
    parameters: int
    price: float
    """Evaluations that a product costs; 0 if the method makes none."""
    setup_price: float
    ended: str | None
    """spent, or "stalled: " and why; None while it runs."""
    git_commit: str | None
    records: tuple[SolveRecord, ...]


def read_solve(folder: Path) -> SolveRun:
    """Return the run in a folder, every value checked; a torn last line is dropped."""
    path = folder / HEADER
    try:
        header = mapping("its content", read_json(path))
        return solve_run(header, tuple(read_rows(folder / RECORDS, SolveRecord).records))
    except FileNotFoundError as error:
        raise LogError(f"no {HEADER}") from error
    except UNREADABLE as error:
        raise error if isinstance(error, LogError) and RECORDS in str(error) else refused(path, error) from error


def solve_run(header: dict[str, Any], records: tuple[SolveRecord, ...]) -> SolveRun:
    """Check the values of solve.json."""
    if header.get("format") != FORMAT:
        raise wrong("format", str(FORMAT), header.get("format"))
    if header.get("status") not in SOLVE_STATUSES:
        raise wrong("status", f"one of {', '.join(SOLVE_STATUSES)}", header.get("status"))
    price = mapping("price", header.get("price"))
    return SolveRun(
        status=header["status"],
        suite=folder_path("suite", header.get("suite")),
        task=folder_name("task", header.get("task")),
        label=folder_name("label", header.get("label")),
        seed=count("seed", header.get("seed")),
        evaluations=number("budget.evaluations", mapping("budget", header.get("budget")).get("evaluations")),
        parameters=count("parameters", header.get("parameters"), at_least=1),
        price=number("price.product", price.get("product")),
        setup_price=number("price.setup", price.get("setup")),
        ended=optional(text, "ended", header.get("ended")),
        git_commit=optional(text, "git_commit", header.get("git_commit")),
        records=records,
    )
