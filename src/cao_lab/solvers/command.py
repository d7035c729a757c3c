"""`cao solve`: one problem, one method, with a progress bar, a log and a figure."""

import csv
import json
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from math import inf, isnan
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from cao_lab.config import output_folder
from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.config import SolveConfig
from cao_lab.solvers.figures import convergence_figure
from cao_lab.solvers.method import Method
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.solvers.solving import solve
from cao_lab.solvers.user_problem import load_problem
from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class Line:
    """A line of the log: a record, and the method it is of; what is spent counts from the start of all phases."""

    method: str
    record: Record


def phases(config: SolveConfig) -> list[tuple[Method, Budget]]:
    """Return the methods to run, one after the other, and what each may spend."""
    chosen: tuple[Method, Budget] = (METHODS[config.method], Budget(config.evaluations, config.seconds or inf))
    if config.adam == 0:
        return [chosen]
    return [(Adam(config.adam_lr, is_decaying=False), Budget(config.adam)), chosen]


def run_solve(config: SolveConfig) -> str:
    """Carry `cao solve` out: minimise, write all files, and return what to print."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    problem = load_problem(config.target)
    folder = output_folder(config.out or Path("out", "solve", f"{problem.name}-{config.method}"))
    with (folder / "records.csv").open("w", newline="") as log:
        lines = watched(solve_in_phases(problem, config), log, progress_bar(config))
    write_solution(lines, problem, config, folder)
    return f"{summary(lines[-1].record)}\nwritten to {folder}: records.csv, solve.json, solve.png, params.pt"


def watched(lines: Generator[Line, None, None], log: TextIO, bar: "tqdm[Any]") -> list[Line]:
    """Return all lines, logged and shown as they come; an interruption ends them early, and what there is is kept."""
    seen: list[Line] = []
    writer = csv.DictWriter(log, ["method", *(field.name for field in fields(Record))])
    writer.writeheader()

    def keep(line: Line) -> None:
        seen.append(line)
        writer.writerow({"method": line.method, **asdict(line.record)})
        log.flush()
        show(bar, line.record)

    with bar, closing(lines):
        try:
            for line in lines:
                keep(line)
        except KeyboardInterrupt:
            if not seen:
                raise
            keep(replace(seen[-1], record=replace(seen[-1].record, status="interrupted")))
    return seen


def solve_in_phases(problem: Problem, config: SolveConfig) -> Generator[Line, None, None]:
    """Run the phases, each from where the last one ended, and let their bills add up."""
    last = None
    for method, budget in phases(config):
        before = last
        for record in solve(problem, method, budget, records=config.records):
            last = record if before is None else after(before, record)
            yield Line(method.name, last)


def after(before: Record, record: Record) -> Record:
    """Return a record with what was spent before it added."""
    return replace(
        record,
        evaluations=before.evaluations + record.evaluations,
        products=before.products + record.products,
        setups=before.setups + record.setups,
        billed=before.billed + record.billed,
        seconds=before.seconds + record.seconds,
    )


def progress_bar(config: SolveConfig) -> "tqdm[Any]":
    """Return a bar over everything there is to bill; hidden where nobody watches."""
    return tqdm(
        desc=config.method,
        total=config.adam + config.evaluations,
        unit=" evaluations",
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}% |{bar:16}| [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    )


def show(bar: "tqdm[Any]", record: Record) -> None:
    """Move the bar to a record."""
    bar.set_postfix_str(f"loss {record.loss:.3g}" + (f" error {record.error:.2g}" if record.error >= 0 else ""))
    bar.update(record.billed - bar.n)


def write_solution(lines: list[Line], problem: Problem, config: SolveConfig, folder: Path) -> None:
    """Write the settings and the outcome, the figure, and the parameters."""
    last = lines[-1].record
    outcome = {
        "config": {**asdict(config), "out": str(folder)},
        "parameters": problem.size,
        "outcome": {**asdict(last), "error": None if isnan(last.error) else last.error},
        "stalled": next((line.record.status for line in lines if line.record.status.startswith("stalled")), None),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    (folder / "solve.json").write_text(json.dumps(outcome, indent=2) + "\n")
    curves = {line.method: [other.record for other in lines if other.method == line.method] for line in lines}
    convergence_figure(curves, problem.name).savefig(folder / "solve.png")
    torch.save([p.detach() for p in problem.params], folder / "params.pt")


def summary(record: Record) -> str:
    """Return the outcome in one line."""
    error = f", relative error {record.error:.3g}" if record.error >= 0 else ""
    cost = f"{record.evaluations} evaluations, {record.products} products, {record.seconds:.1f} s"
    return f"loss {record.loss:.4g}{error} after {cost} ({record.status})"
