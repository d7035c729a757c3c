"""Contests of full-batch solvers as parts of a suite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from pkgutil import resolve_name

import torch

from cao_lab.config import ConfigError, Execution
from cao_lab.facts import SUITES, suites_of
from cao_lab.solvers.contest import Contest, carry_out, is_over, prices
from cao_lab.suites.launch import LocalProcesses
from cao_lab.suites.runner import run_works

CONTESTS: dict[str, Sequence[Contest]] = {
    name: resolve_name(f"cao_lab.suites.{SUITES[name].runs}") for name in suites_of(["solvers"])
}


@dataclass(frozen=True)
class ContestRun:
    """A contest as a part of a suite."""

    contest: Contest
    suite: str

    @property
    def folder(self) -> Path:
        """Where its log lies, or what all its logs have in common."""
        labels, seed = list(self.contest.methods), f"seed{self.contest.size.seed}"
        return Path(self.suite, self.contest.folder(labels[0]) if len(labels) == 1 else Path(self.contest.task, seed))

    @property
    def size(self) -> int:
        """Its methods."""
        return len(self.contest.methods)

    def done(self, logs: Path) -> int:
        """Return how many methods are over."""
        return sum(is_over(self.contest, label, logs / self.suite) for label in self.contest.methods)

    def outcome(self, logs: Path) -> str | None:
        """Return `finished` if the logs of all methods say so."""
        return "finished" if self.done(logs) == self.size else None

    def carry_out(self, execution: Execution) -> int:
        """Run all methods, one after the other."""
        torch.set_num_threads(execution.threads or torch.get_num_threads())
        for _ in carry_out(self.contest, self.suite, execution.logs / self.suite):
            pass
        return 0


def run_suite(name: str, execution: Execution, jobs: int) -> int:
    """Carry one of our suites out and return the exit code."""
    return run_contests(name, CONTESTS[name], execution, jobs)


def list_suite(name: str, execution: Execution) -> Iterator[str]:
    """Yield a line for each run of one of our suites."""
    return list_contests(name, CONTESTS[name], execution)


def run_contests(suite: str, contests: Sequence[Contest], execution: Execution, jobs: int) -> int:
    """Carry a suite out and return the exit code."""
    if jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    works = [ContestRun(contest, suite) for contest in contests]
    waiting = [work.contest for work in works if work.outcome(execution.logs) is None]
    measure_prices(waiting, execution.logs / suite, execution.threads or LocalProcesses(jobs).threads)
    return run_works(works, execution, jobs, suite, "method")


def measure_prices(contests: Sequence[Contest], folder: Path, threads: int) -> None:
    """Measure what products cost before anything else runs, with the threads that the runs will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for contest in contests:
        prices(contest, folder)
    torch.set_num_threads(before)


def list_contests(suite: str, contests: Sequence[Contest], execution: Execution) -> Iterator[str]:
    """Yield a line for each run of a suite: its folder, and whether it is over."""
    for contest in contests:
        for label in contest.methods:
            state = "over" if is_over(contest, label, execution.logs / suite) else "to run"
            yield f"{state:>8}  {Path(suite) / contest.folder(label)}"
    evaluations = sum(one.adam + len(one.methods) * one.budget.evaluations for one in contests)
    seconds = sum(len(one.methods) * one.budget.seconds for one in contests)
    yield f"{evaluations:,.0f} evaluations in all" if isfinite(evaluations) else f"{seconds / 3600:.1f} hours in all"
