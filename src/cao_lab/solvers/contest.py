"""A contest: all methods solve one problem from one start, one after the other in one process, and leave logs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from cao_lab.log.header import read_header
from cao_lab.log.records import LogError, SolveRecord
from cao_lab.log.writing import RunLog
from cao_lab.runs.provenance import new_header, now
from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.method import Method
from cao_lab.solvers.objective import set_point
from cao_lab.solvers.price import Price
from cao_lab.solvers.solving import adam_phase, price_for, solve
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.problem import Problem, ProblemConfig

TIMINGS = 21


@dataclass(frozen=True)
class Contest:
    """One equation with one seed, the methods that solve it, and what each of them may spend."""

    equation: str
    size: ProblemConfig
    """Its seed is the seed of the contest."""
    methods: Mapping[str, Method]
    """By the label that their logs have."""
    adam: int
    """Evaluations of Adam before all others begin where it has come to."""
    budget: Budget
    records: int = 100

    @property
    def task(self) -> str:
        """The problem, whatever solves it."""
        return f"{self.equation}-{self.size.depth}x{self.size.width}"

    def folder(self, label: str) -> Path:
        """Where a method's log lies below the folder of the suite."""
        return Path(self.task, label, f"seed{self.size.seed}")

    def problem(self) -> Problem:
        """Return the problem, at its first point."""
        return EQUATIONS[self.equation].problem(self.size)

    def identity(self, label: str) -> dict[str, Any]:
        """Return all that decides the numbers of a run, as plain data; prices are measured, and follow."""
        return {
            "equation": self.equation,
            "size": asdict(self.size),
            "method": {"name": self.methods[label].name, **asdict(self.methods[label])},  # type: ignore[call-overload]
            "adam": self.adam,
            "budget": {
                "evaluations": finite_or_none(self.budget.evaluations),
                "seconds": finite_or_none(self.budget.seconds),
            },
        }


def prices(contest: Contest, folder: Path) -> dict[str, Price]:
    """Return what curvature costs each kind of method on this problem: as measured once, in a file for all seeds.

    Where seconds alone count it has no price.
    """
    kinds = {type(method).__name__: method for method in contest.methods.values()}
    if contest.budget.evaluations == inf:
        return dict.fromkeys(kinds, Price())
    path = folder / contest.task / "prices.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if kinds.keys() - known.keys():
        problem = contest.problem()
        missing = {kind: method for kind, method in kinds.items() if kind not in known}
        known |= {kind: price_for(method, problem, repeats=TIMINGS)._asdict() for kind, method in missing.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(known, indent=2)}\n")
    return {kind: Price(**price) for kind, price in known.items()}


def is_over(contest: Contest, label: str, folder: Path) -> bool:
    """Whether the log says that this very run needs no more work."""
    try:
        header = read_header(folder / contest.folder(label)) or {}
    except LogError:
        return False
    expected = json.loads(json.dumps(contest.identity(label)))
    return header.get("status") == "finished" and all(header.get(key) == value for key, value in expected.items())


def carry_out(contest: Contest, suite: str, folder: Path) -> Iterator[str]:
    """Run the methods that are not over, and yield the label of each when it is."""
    waiting = [label for label in contest.methods if not is_over(contest, label, folder)]
    if not waiting:
        return
    known, problem = prices(contest, folder), contest.problem()
    start = adam_phase(problem, contest.adam)
    for label in waiting:
        set_point([p for p in problem.params if p.requires_grad], start)
        method = contest.methods[label]
        price = known[type(method).__name__]
        records = solve(problem, method, contest.budget, price=price, records=contest.records)
        facts = {"price": price._asdict(), "parameters": problem.size, "ended": None}
        place = (suite, contest.task, label, contest.size.seed)
        header = new_header("solver", place, contest.identity(label) | facts, torch.device("cpu"))
        write_log(records, header, folder / contest.folder(label))
        yield label


def write_log(records: Iterable[Record], header: dict[str, Any], folder: Path) -> None:
    """Write the log of a run as it goes: whenever it is killed, what was written is a log."""
    with RunLog(folder, records=SolveRecord) as log:
        log.cut_back(records=0)
        log.write_header(header)
        ended = None
        for record in records:
            ended = ended if record.status == "idle" else record.status
            log.records.append([record])
        log.update_header(status="finished", ended=ended, ended_at=now())


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it."""
    return None if value == inf else value


def with_seed(contest: Contest, seed: int) -> Contest:
    """Return the contest with another network and other points."""
    return replace(contest, size=replace(contest.size, seed=seed))
