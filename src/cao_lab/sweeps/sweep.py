"""One problem from one start, trained by each method at each rate, one after the other in one process."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from cao import CAO
from cao_lab.log.header import read_header
from cao_lab.log.reading import read_rows
from cao_lab.log.records import LogError, SweepRecord
from cao_lab.log.writing import RunLog
from cao_lab.runs.provenance import new_header, now
from cao_lab.sweeps.problems import Recipe, SmallTask

Build = Callable[[list[Tensor], float], Optimizer]


@dataclass(frozen=True)
class Swept:
    """An optimizer as a function of its rate alone, and the rates."""

    build: Build
    rates: tuple[float, ...]

    def look(self, optimizer: Any, loss: Tensor) -> None:
        """Look at the loss before its backward pass, as only CAO does."""

    def curvature(self, optimizer: Any) -> tuple[int, int]:
        """Return the products it has made so far, and the directions it captures."""
        return 0, 0


class Sketched(Swept):
    """CAO with some settings."""

    def look(self, optimizer: CAO, loss: Tensor) -> None:
        """Refresh the sketch if it is time to."""
        optimizer.refresh_if_due(loss)

    def curvature(self, optimizer: CAO) -> tuple[int, int]:
        """Return what the optimizer counts."""
        return optimizer.counters.hessian_products, optimizer.captured


def half_decades(first: int, count: int = 9) -> tuple[float, ...]:
    """Return rates √10 apart, from a power of ten on."""
    return tuple(float(f"{10 ** (first + step / 2):.3g}") for step in range(count))


SGD_RATES, ADAM_RATES = half_decades(-3), half_decades(-4)
METHODS: Mapping[str, Swept] = {
    "sgd": Swept(lambda params, lr: SGD(params, lr, momentum=0.9), SGD_RATES),
    "cao": Sketched(lambda params, lr: CAO(params, lr, momentum=0.9), SGD_RATES),
    "adamw": Swept(AdamW, ADAM_RATES),
}
"""CAO with its defaults, below its base, and AdamW."""
EVALUATIONS = 10
"""How often in a run the loss of the training set is taken."""


def carry_out(problem: Recipe, seed: int, folder: Path, data: Path | None = None) -> Iterator[str]:
    """Train at every rate that the log does not have yet, and write each run down, whole, when it is over."""
    with RunLog(folder / problem.name / f"seed{seed}", losses=SweepRecord) as log:
        header = log.header
        if header is None:
            facts = {"batches": problem.kind, "batch": problem.batch, "steps": problem.steps}
            place = (folder.name, problem.name, "sweep", seed)
            log.write_header(new_header("sweep", place, facts, torch.device("cpu")))
        elif header["status"] == "finished":
            return
        known = runs_in(log)
        for label, method in METHODS.items():
            for rate in method.rates:
                if (label, rate) not in known:
                    log.losses.append(train(problem, seed, label, rate, data))
                    log.sync()
                    yield f"{problem.name} seed {seed} {label} {rate:g}"
        log.update_header(status="finished", ended_at=now())


def is_over(problem: Recipe, seed: int, folder: Path) -> bool:
    """Whether the log says that a sweep needs no more work."""
    try:
        return (read_header(folder / problem.name / f"seed{seed}") or {}).get("status") == "finished"
    except LogError:
        return False


def runs_in(log: RunLog) -> set[tuple[str, float]]:
    """Return the runs that a log has, and cut off what an interruption has left of another."""
    records = read_rows(log.losses.path, SweepRecord).records
    whole = len(records) // (EVALUATIONS + 1) * (EVALUATIONS + 1)
    log.cut_back(losses=whole)
    return {(record.method, record.lr) for record in records[:whole]}


def train(problem: Recipe, seed: int, label: str, rate: float, data: Path | None = None) -> list[SweepRecord]:
    """Return the loss at the start and after each tenth of the steps; training goes on even if it is not finite."""
    torch.manual_seed(seed)
    task = problem.build(data)
    method = METHODS[label]
    optimizer = method.build(list(task.model.parameters()), rate)
    order = torch.Generator().manual_seed(seed)
    spent = 0.0
    records = [SweepRecord(label, rate, 0, task.evaluated(), 0.0, 0, 0)]
    for step in range(1, problem.steps + 1):
        started = time.process_time()
        take_step(task, method, optimizer, batch_of(task, problem.batch, order))
        spent += time.process_time() - started
        if step * EVALUATIONS % problem.steps < EVALUATIONS:
            records.append(SweepRecord(label, rate, step, task.evaluated(), spent, *method.curvature(optimizer)))
    return records


def take_step(task: SmallTask, method: Swept, optimizer: Optimizer, rows: Tensor) -> None:
    """Take one step, as a user would write it."""
    loss = task.loss(rows)
    optimizer.zero_grad()
    method.look(optimizer, loss)
    loss.backward()
    optimizer.step()


def batch_of(task: SmallTask, size: int | None, order: torch.Generator) -> Tensor:
    """Return the rows of the next batch, drawn without replacement."""
    count = len(task.inputs)
    return torch.arange(count) if size is None else torch.randperm(count, generator=order)[:size]
