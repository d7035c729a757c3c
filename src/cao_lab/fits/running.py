"""Running the suite, one file of results for each collection, and reading them."""

import csv
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np
import torch

from cao_lab.fits.meter import Meter, Spent
from cao_lab.fits.methods import METHODS, FitMethod
from cao_lab.fits.problems import Array, FitProblem, collection, nist
from cao_lab.fits.rules import HALF_WIDTH

COLUMNS = ("problem", "method", "size", "start", "lowest", "digits", "bill", "seconds", "ended", "trace")


@dataclass(frozen=True)
class Result:
    """What a method has reached on a problem."""

    suite: str
    problem: str
    method: str
    size: int
    start: float
    lowest: float
    digits: float
    """Digits of the certified value that the worst parameter has; NaN where nothing is certified."""
    bill: int
    seconds: float
    ended: str
    trace: Sequence[tuple[int, float]]


def problems(folder: Path) -> dict[str, list[FitProblem]]:
    """Return all problems by collection; the bounded ones are those of Moré and Wild in a box around the start."""
    wild = list(collection("more_wild"))
    return {
        "nist": list(nist(folder)),
        "more-wild": wild,
        "more-wild-bounded": [boxed(problem) for problem in wild],
        "cartis-roberts": list(collection("cartis_roberts")),
    }


def boxed(problem: FitProblem) -> FitProblem:
    """Return the problem within a box that excludes what is far from the start."""
    reach = HALF_WIDTH * np.maximum(1.0, np.abs(problem.start))
    return replace(problem, suite="more-wild-bounded", bounds=(problem.start - reach, problem.start + reach))


def carry_out(folder: Path, logs: Path) -> Iterator[str]:
    """Run what has no log yet, and yield a line for each problem."""
    torch.set_num_threads(1)
    logs.mkdir(parents=True, exist_ok=True)
    for suite, members in problems(folder).items():
        path = logs / f"{suite}.csv"
        known = {one.problem for one in read_file(path)} if path.exists() else set()
        for problem in members:
            if problem.name not in known:
                ran = [solved(problem, name, method) for name, method in METHODS.items() if is_able(method, problem)]
                write(path, ran)
                yield f"{suite} {problem.name}: " + ", ".join(f"{one.method} {one.lowest:.6g}" for one in ran)


def is_able(method: FitMethod, problem: FitProblem) -> bool:
    """Whether a method can take a problem."""
    return problem.bounds is None or method.takes_bounds


def solved(problem: FitProblem, name: str, method: FitMethod) -> Result:
    """Run a method on a problem."""
    meter = Meter(problem, by_gradients=method.by_gradients)
    began = process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            method.run(meter)
        ended = "stopped"
    except Spent:
        ended = "spent"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    first = problem.residuals(problem.start)
    return Result(
        problem.suite,
        problem.name,
        name,
        len(problem.start),
        float(first @ first),
        meter.lowest,
        digits(meter.best, problem.certified),
        meter.bill,
        process_time() - began,
        ended,
        meter.trace,
    )


def digits(found: Array, certified: Array | None) -> float:
    """Return how many digits the worst parameter has, at most 11, as the certified values do."""
    if certified is None:
        return float("nan")
    errors = np.abs(found - certified) / np.abs(certified)
    return float(-np.log10(np.clip(errors, 1e-11, 1.0).max()))


def write(path: Path, results: Sequence[Result]) -> None:
    """Add results to those of their collection."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        for one in results:
            trace = " ".join(f"{bill}:{loss:.17g}" for bill, loss in thinned(one.trace))
            numbers = (one.size, f"{one.start:.17g}", f"{one.lowest:.17g}", f"{one.digits:.2f}", one.bill)
            writer.writerow((one.problem, one.method, *numbers, f"{one.seconds:.3f}", one.ended, trace))


def thinned(trace: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a trace without steps that bring less than a hundredth of what is still to come."""
    kept: list[tuple[int, float]] = []
    last = trace[-1][1] if trace else 0.0
    for bill, loss in trace:
        if not kept or loss == last or kept[-1][1] - loss >= 1e-2 * (kept[-1][1] - last):
            kept.append((bill, loss))
    return kept


def read(logs: Path) -> list[Result]:
    """Read all results."""
    return [result for path in sorted(logs.glob("*.csv")) for result in read_file(path)]


def read_file(path: Path) -> Iterator[Result]:
    """Read a collection's results."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            pairs = [part.split(":") for part in row["trace"].split()]
            yield Result(
                path.stem,
                row["problem"],
                row["method"],
                int(row["size"]),
                float(row["start"]),
                float(row["lowest"]),
                float(row["digits"]),
                int(row["bill"]),
                float(row["seconds"]),
                row["ended"],
                [(int(bill), float(loss)) for bill, loss in pairs],
            )
