"""`cao solve`: one problem, one method or several, with a progress bar, a log and a figure."""

import csv
import json
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from math import inf, isfinite, isnan
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import torch
from tqdm import tqdm

from cao_lab.config import output_folder
from cao_lab.log.locking import Lock
from cao_lab.runs.provenance import new_header, now
from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.config import SolveConfig, SolveError
from cao_lab.solvers.figures import convergence_figure
from cao_lab.solvers.method import Method
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.solvers.objective import flat, point_of, set_point
from cao_lab.solvers.solving import price_for, solve
from cao_lab.solvers.user_problem import explanation, line_in_file, load_problem
from cao_lab.tasks.pde.problem import Problem

MEASURING_SECONDS = 5.0
"""How long to measure what a product costs, or a tenth of --seconds if that is less."""
CONVERGED = {
    "tolerance_grad": "the gradient is zero",
    "the gradient is zero": "the gradient is zero",
    "tolerance_change": "the loss changes no more",
    "minimal to rounding": "minimal to rounding",
}
"""What methods say where nothing is left to do, and the words for it; scipy says "CONVERGENCE: " and why."""
FEW = 10
"""Parameters that a line has room for."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Line:
    """A line of the log: a record, and the method it is of; what is spent counts from the start of all phases."""

    method: str
    record: Record
    spent: float
    """The share of the whole budget that is spent, measuring included."""


def phases(config: SolveConfig) -> list[tuple[Method, int]]:
    """Return the methods to run, one after the other, and the evaluations that each may spend."""
    first = [(Adam(config.adam_lr, is_decaying=False), config.adam)] if config.adam else []
    return [*first, (METHODS[config.method], config.evaluations)]


def run_solve(config: SolveConfig) -> tuple[str, int]:
    """Carry `cao solve` out: minimise, write all files, and return what to print and the exit code."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Whole paths, because the user's code may go to another folder.
    target = whole_target(config.target)
    out = config.out or default_folder(target, config.method.replace(",", "-"))
    config = replace(config, target=target, out=out)
    folder = output_folder(out).absolute()
    with Lock(folder):
        check_owner(folder, target)
        if "," in config.method:
            return solve_by_each(folder, config)
        return solve_into(folder, load_problem(target), config)


def solve_by_each(folder: Path, config: SolveConfig) -> tuple[str, int]:
    """Minimise by several methods from one start, each in a folder of its own, and draw them in one picture."""
    assert config.out is not None
    start: list[torch.Tensor] | None = None
    messages, curves, code = [], {}, 0
    for name in config.method.split(","):
        problem = load_problem(config.target)
        start = start or point_of(list(problem.params))
        set_point(list(problem.params), start)
        one = replace(config, method=name, out=config.out / name)
        lines: list[Line] = []
        message, code = solve_into(output_folder(folder / name), problem, one, lines)
        messages.append(f"{name}: {message}")
        curves[name] = [line.record for line in lines if line.record.status != "idle"]
        convergence_figure(curves, problem.name).savefig(folder / "solve.png")
        if code:
            break
    header = new_header("solver", ("solve", problem.name, config.method, 0), facts_of(config), torch.device("cpu"))
    (folder / "solve.json").write_text(json.dumps(header | {"status": "finished", "ended_at": now()}, indent=2) + "\n")
    return "\n".join([*messages, f"all of them: {config.out / 'solve.png'}"]), code


def whole_target(target: str) -> str:
    """Return the target, a file by its whole path."""
    path, colon, name = target.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon and path else target


def default_folder(target: str, method: str) -> Path:
    """Return where results go that have no folder of their own: by file, function and method."""
    path, _, name = target.rpartition(":")
    return Path("out", "solve", "-".join([*([Path(path).stem] if path else []), name, method]))


def check_owner(folder: Path, target: str) -> None:
    """Refuse to overwrite the result of another problem."""
    try:
        owner = json.loads((folder / "solve.json").read_text())["config"]["target"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        owner = "something else"
    if owner != target:
        raise SolveError(f"{folder} holds the result of {owner}; name another folder with --out, or remove it")


def solve_into(folder: Path, problem: Problem, config: SolveConfig, lines: list[Line] | None = None) -> tuple[str, int]:
    """Minimise, with all files in a folder that is ours; the lines of the log are added to a list, if one is given."""
    bar = progress_bar(config)
    lines = [] if lines is None else lines
    try:
        with (folder / "records.csv").open("w", newline="") as log:
            watch(solve_in_phases(problem, config, bar.set_postfix_str), lines, log, bar)
    except (Exception, SystemExit) as error:
        written = write_solution(lines, problem, config, folder)
        if not is_users(error, config.target):
            raise
        raise SolveError(f"{explanation(error, config.target)}; {written}") from error
    last = ended(lines).record
    written = write_solution(lines, problem, config, folder)
    return f"{summary(last, problem)}\n{written}", INTERRUPTED if last.status == "interrupted" else 0


def is_users(error: BaseException, target: str) -> bool:
    """Whether the user's file raised an error, or made torch raise it: torch cannot differentiate every graph twice."""
    is_of_torch = ":" in target and isinstance(error, RuntimeError)
    return is_of_torch or isinstance(error, SolveError) or line_in_file(error, target) is not None


def watch(lines: Generator[Line, None, None], seen: list[Line], log: TextIO, bar: "tqdm[Any]") -> None:
    """Log, show and collect all lines as they come; an interruption ends them early."""
    writer = csv.DictWriter(log, ["method", *(field.name for field in fields(Record))])
    writer.writeheader()

    def keep(line: Line) -> None:
        seen.append(line)
        writer.writerow({"method": line.method, **asdict(line.record)})
        log.flush()
        show(bar, line)

    with bar, closing(lines):
        try:
            for line in lines:
                keep(line)
        except KeyboardInterrupt:
            if not seen:
                raise
            if seen[-1].record.status != "interrupted":
                keep(replace(seen[-1], record=replace(seen[-1].record, status="interrupted")))


def solve_in_phases(
    problem: Problem, config: SolveConfig, announce: Callable[[str], object]
) -> Generator[Line, None, None]:
    """Run the phases, each from where the last one ended, and let their bills add up."""
    last, measuring, whole = None, 0.0, Budget(config.adam + config.evaluations, config.seconds or inf)
    for method, evaluations in phases(config):
        before = last
        left = whole.seconds - measuring - (0.0 if before is None else before.seconds)
        if left <= 0:
            return
        announce("measuring what a product costs")
        started = perf_counter()
        price = price_for(method, problem, limit=min(MEASURING_SECONDS, left / 10), clock=perf_counter)
        took = perf_counter() - started
        measuring += took
        budget = Budget(evaluations, max(left - took, 1e-9))
        records = solve(problem, method, budget, price=price, records=config.records, clock=perf_counter)
        if method is not METHODS[config.method]:
            # What the first phase leaves of its time is for the next one.
            records = (record for record in records if record.status != "idle")
        for record in records:
            last = record if before is None else after(before, record)
            yield Line(method.name, last, whole.spent(last.billed, measuring + last.seconds))


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
    """Return a bar over the share of the budget that is spent; hidden where nobody watches."""
    return tqdm(
        desc=config.method,
        total=1.0,
        disable=not sys.stderr.isatty(),
        dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}% |{bar:16}| [{elapsed}<{remaining}{postfix}]",
    )


def show(bar: "tqdm[Any]", line: Line) -> None:
    """Move the bar to a line of the log."""
    record = line.record
    error = "" if isnan(record.error) else f", error {record.error:.2g}"
    bar.set_postfix_str(f"{record.evaluations} evaluations, loss {record.loss:.3g}{error}", refresh=False)
    # The last products may cost more than what was left for them.
    bar.update(min(line.spent, 1.0) - bar.n)


def ended(lines: list[Line]) -> Line:
    """Return the last line that is of work, and says why it ended."""
    return next(line for line in reversed(lines) if line.record.status != "idle")


def write_solution(lines: list[Line], problem: Problem, config: SolveConfig, folder: Path) -> str:
    """Write settings and outcome, figure and parameters, if anything was reached, and return what was written."""
    if not lines:
        return "nothing was reached"
    last = ended(lines).record
    facts = {
        **facts_of(config),
        "parameters": problem.size,
        "outcome": {**asdict(last), **{name: finite(getattr(last, name)) for name in ("error", "held_out")}},
        "stalled": next((line.record.status for line in lines if line.record.status.startswith("stalled")), None),
    }
    header = new_header("solver", ("solve", problem.name, config.method, 0), facts, torch.device("cpu"))
    status = last.status if last.status in ("interrupted", "failed") else "finished"
    whole = header | {"status": status, "ended_at": now()}
    (folder / "solve.json").write_text(json.dumps(whole, indent=2) + "\n")
    worked = [line for line in lines if line.record.status != "idle"]
    curves = {line.method: [other.record for other in worked if other.method == line.method] for line in worked}
    convergence_figure(curves, problem.name).savefig(folder / "solve.png")
    torch.save([p.detach() for p in problem.params], folder / "params.pt")
    return f"written to {config.out}: records.csv, solve.json, solve.png, params.pt"


def facts_of(config: SolveConfig) -> dict[str, Any]:
    """Return the settings as JSON can hold them."""
    return {"config": {**asdict(config), "out": str(config.out)}}


def summary(record: Record, problem: Problem) -> str:
    """Return the outcome in one line, with the gradient's norm, and the parameters if they are few."""
    kind = "" if problem.residuals is None else " (a sum of squares)"
    error = "" if isnan(record.error) else f", error {record.error:.3g}"
    cost = f"{record.evaluations} evaluations, {record.products} products, {record.seconds:.1f} s"
    values = f"; gradient norm {gradient_norm(problem):.2g}"
    if problem.size <= FEW:
        values += f", parameters {', '.join(f'{value:.6g}' for value in flat(list(problem.params)).tolist())}"
    held_out = "" if isnan(record.held_out) else f", {record.held_out:.3g} held out from {record.points:,} points"
    return f"loss {record.loss:.4g}{kind}{held_out}{error} after {cost} ({why_ended(record.status)}){values}"


def finite(number: float) -> float | None:
    """Return the number, or None, which JSON has a word for."""
    return number if isfinite(number) else None


def gradient_norm(problem: Problem) -> float:
    """Return the norm of the loss's gradient where the parameters are."""
    gradient = torch.autograd.grad(problem.loss(), list(problem.params), materialize_grads=True)
    return float(torch.stack([part.norm() for part in gradient]).norm())


def why_ended(status: str) -> str:
    """Return in words for a person why a run ended."""
    reason = status.removeprefix("stalled: ")
    if reason in CONVERGED:
        return f"converged: {CONVERGED[reason]}"
    if reason.startswith("CONVERGENCE: "):
        return reason.lower().replace("convergence", "converged")
    return {"spent": "budget spent"}.get(status, status if reason == status else f"stopped early: {reason}")
