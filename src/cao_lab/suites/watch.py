"""Does the ratio to the edge of stability tell that a training is about to diverge, and what does it cost to know?

The rules, fixed before the runs that they judge; they were chosen on seed 100:

- Four small networks (`TASKS`) with SGD (momentum 0.9) and with AdamW, seeds 1 to 10. For each, one run in which the
  rate rises by a factor of 1,000 over 1,200 steps; its last rate is that at which it diverged, or the highest. Then two
  runs of 400 steps at a third of that rate and at that rate, after a warm-up of 50 steps.
- A run diverges at the first of ten consecutive batches whose loss is above the best mean of ten so far by a quarter of
  the first loss, or at a loss that is not finite; there it ends.
- `Sharpness` watches each run twice, with 1 % and with 10 % of the time (processor time; what the other watch and the
  references take is left out). `plain` is off, so that all looks go to the ratio.
- Alarms: the first step at which the ratio, followed by the rate between looks, is above 1, or above 2; at which the
  norm of the gradient is above 5, or 20, times the median of its last hundred; at which the loss is above 3, or 10,
  times its median. Gradient and loss are heard from the twentieth step on.
- Ahead: the part of the runs that diverge, not before step 30, in which an alarm is at least ten steps earlier. False:
  the part of the runs that do not diverge in which it sounds. Lead: the median of the steps by which it is earlier in
  the runs that diverge, a missing or late one counting as 0.
- Accuracy: |λ/λ* − 1| of each look of the 1 % watch, and of every fifth of the other; λ* is `top_eigenpairs` to 1 % of
  the same loss in the same metric.
- Runs this short pay for one look at 1 % of the time. So each network is also trained for 6,000 steps, with seed 1 and
  at a fixed rate of 0.1 (SGD) or 0.003 (AdamW), and the goals of accuracy and cost are judged there. (This rule was
  added when seed 1 of the others had been seen.)
- Goals: at 1 % of the time, λ within 10 % in the median, and the share of the time at most 1 %; the ratio above 1 ahead
  in 80 % of the runs, false in at most 10 %, with a longer lead than the gradient's norm at 5.
"""

import csv
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from tqdm import tqdm

from cao import Hessian, Reading, Sharpness, top_eigenpairs
from cao.curvature.operators import Scaled
from cao.edges import known_as, metric_of
from cao.linalg.flat import FlatParams
from cao_lab.config import Execution
from cao_lab.log.writing import RunLog
from cao_lab.runs.provenance import new_header
from cao_lab.sweeps.problems import SmallTask, digits, lstm, mlp, transformer
from cao_lab.sweeps.sweep import batch_of

Run: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]
"""A row about a run, and a row for each look that was compared with the truth."""
SEEDS = range(1, 11)
BUDGETS = {"1%": 0.01, "10%": 0.10}
RISING_STEPS, FIXED_STEPS, LONG_STEPS, WARM_UP, RISE = 1_200, 400, 6_000, 50, 1_000.0
FIXED = {"third": 1 / 3, "same": 1.0}
"""The fixed rates, by the one at which the rising one diverged."""
LONG = {"sgd": 0.1, "adamw": 0.003}
"""The fixed rates of long runs."""
OPTIMIZERS: dict[str, tuple[Callable[[list[Tensor]], Optimizer], float]] = {
    "sgd": (lambda params: SGD(params, lr=1.0, momentum=0.9), 10.0),
    "adamw": (lambda params: AdamW(params, lr=1.0), 1.0),
}
"""How each is built, and its highest rate."""


class Residual(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, images: Float[Tensor, "n width 4 4"]) -> Float[Tensor, "n width 4 4"]:
        """Return the images with what was found added."""
        return torch.relu(images + self.layers(images))


def resnet() -> SmallTask:
    """A residual network with batch norm on digits."""
    pixels, labels = digits()
    stem = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8))
    model = nn.Sequential(*stem, nn.ReLU(), Residual(8), Residual(8), nn.Flatten(), nn.Linear(128, 10))
    return SmallTask(model, pixels, labels, cross_entropy)


TASKS: dict[str, tuple[Callable[[], SmallTask], int]] = {
    "mlp": (mlp, 128), "lstm": (lstm, 64), "resnet": (resnet, 32), "transformer": (partial(transformer, width=16), 4),
}  # fmt: skip
"""How each is built, and its batch."""


@dataclass
class Above:
    """An alarm that sounds when a number is above a bound."""

    bound: float
    step: int | None = None

    def hear(self, step: int, value: float) -> None:
        """Note the first step at which the number is too large."""
        if self.step is None and self.is_high(value):
            self.step = step

    def is_high(self, value: float) -> bool:
        """Whether a number is too large; one that is not known is not."""
        return value > self.bound


@dataclass
class Spike(Above):
    """An alarm that sounds when a number is above so many times the median of its last hundred."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def is_high(self, value: float) -> bool:
        """Whether a number is too large, or not finite, once twenty are known."""
        is_high = len(self.seen) >= 20 and not value <= self.bound * median(self.seen)
        self.seen.append(value)
        return is_high


@dataclass
class Divergence:
    """Where a training is lost: at the first of ten batches whose loss is above the best by a quarter of the first."""

    first: float = math.nan
    best: float = math.inf
    bad: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def is_lost(self, loss: float) -> bool:
        """Whether the training is lost with this batch, having begun to be `bad` batches ago."""
        self.first = loss if math.isnan(self.first) else self.first
        is_bad = not loss <= min(self.best, self.first) + self.first / 4
        self.bad = self.bad + 1 if is_bad else 0
        self.last.append(loss)
        if len(self.last) == 10:
            self.best = min(self.best, fmean(self.last))
        return self.bad == 10 or not math.isfinite(loss)


def alarms() -> dict[str, Above]:
    """Return all alarms, silent."""
    ratios: dict[str, Above] = {f"ratio {name} {bound}": Above(bound) for name in BUDGETS for bound in (1, 2)}
    return ratios | {
        **{f"gradient {factor}": Spike(factor) for factor in (5, 20)},
        **{f"loss {factor}": Spike(factor) for factor in (3, 10)},
    }


def watched(task_name: str, optimizer_name: str, seed: int, rate_at: Callable[[int], float], steps: int) -> Run:
    """Train once, and return what happened."""
    torch.manual_seed(seed)
    (build, batch), (optimizer_for, _) = TASKS[task_name], OPTIMIZERS[optimizer_name]
    task, order = build(), torch.Generator().manual_seed(seed)
    params: list[Tensor] = list(task.model.parameters())
    optimizer = optimizer_for(params)
    watches = {
        name: Sharpness(optimizer, budget=budget, plain=False, patience=steps) for name, budget in BUDGETS.items()
    }
    heard, divergence, looks, lost = alarms(), Divergence(), [], None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate_at(step)
        loss = task.loss(batch_of(task, batch, order))
        optimizer.zero_grad()
        if divergence.is_lost(loss.item()):
            lost = step + 1 - divergence.bad
            break
        for name, watch in watches.items():
            began = time.process_time()
            reading = watch(loss)
            if reading and (name == "1%" or len(watch.readings) % 5 == 1):
                looks.append({"budget": name, "step": step} | compared(reading, optimizer, loss))
            spent = time.process_time() - began
            for other in watches.values():
                other.leave_out(spent - (reading.seconds if reading and other is watch else 0.0))
        loss.backward()
        hear(
            heard,
            step,
            watches,
            float(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])),
            loss.item(),
        )
        optimizer.step()
    row = {"steps": step + 1, "lr": rate_at(step), "diverged": "" if lost is None else lost}
    row |= {name: "" if alarm.step is None else alarm.step for name, alarm in heard.items()}
    for name, watch in watches.items():
        products = sum(reading.products for reading in watch.readings)
        row |= {f"share {name}": watch.share, f"looks {name}": len(watch.readings), f"products {name}": products}
    return row, looks


def hear(heard: dict[str, Above], step: int, watches: dict[str, Sharpness], gradient: float, loss: float) -> None:
    """Give each alarm what it listens to."""
    for name, alarm in heard.items():
        kind, *rest = name.split()
        alarm.hear(step, watches[rest[0]].ratio if kind == "ratio" else gradient if kind == "gradient" else loss)


def compared(reading: Reading, optimizer: Optimizer, loss: Tensor) -> dict[str, float]:
    """Return what a look saw beside a converged eigenvalue of the same loss."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    metric = metric_of(optimizer, known_as(optimizer), FlatParams(params))
    truth = top_eigenpairs(Scaled(Hessian(loss, params), metric.diagonal), tolerance=0.01)
    return {"seen": reading.preconditioned, "true": float(truth.values[0]), "products": reading.products}


def rising(highest: float) -> Callable[[int], float]:
    """Return a rate that rises to the highest."""
    return lambda step: highest * RISE ** (step / RISING_STEPS - 1)


def fixed(rate: float) -> Callable[[int], float]:
    """Return a rate that is warmed up to, and stays."""
    return lambda step: rate * min(1.0, (step + 1) / WARM_UP)


def runs_of(task: str, optimizer: str, seed: int) -> Iterator[Run]:
    """Train at a rising rate, and then at fixed ones."""
    row, looks = watched(task, optimizer, seed, rising(OPTIMIZERS[optimizer][1]), RISING_STEPS)
    yield {"schedule": "rising"} | row, looks
    for name, part in FIXED.items():
        again, seen = watched(task, optimizer, seed, fixed(part * row["lr"]), FIXED_STEPS)
        yield {"schedule": name} | again, seen


def long_run_of(task: str, optimizer: str, seed: int) -> Iterator[Run]:
    """Train for long at a fixed rate."""
    row, looks = watched(task, optimizer, seed, fixed(LONG[optimizer]), LONG_STEPS)
    yield {"schedule": "long"} | row, looks


def run_suite(_: str, execution: Execution, jobs: int) -> int:
    """Carry out what is not over yet, seed by seed; one training at a time, because all write into the same files."""
    torch.set_num_threads(execution.threads or 1)  # Times are the processor's.
    for folder, train, run in waiting(execution):
        tqdm.write(f"  running  {name_of(folder, *run)}")
        write_down(folder, list(train(*run)), *run)
    return 0


def list_suite(_: str, execution: Execution) -> Iterator[str]:
    """Yield a line for each training that is not over."""
    yield from (f"  to run   {name_of(folder, *run)}" for folder, _, run in waiting(execution))


def name_of(folder: Path, task: str, optimizer: str, seed: int) -> str:
    """Return what to call a training."""
    return f"{folder.name}/{task}/{optimizer}/seed{seed}"


def waiting(execution: Execution) -> Iterator[tuple[Path, Callable[..., Iterator[Run]], tuple[str, str, int]]]:
    """Yield what is not over yet: where its log goes, how it is trained, and network, optimizer and seed."""
    logs = execution.logs / "watch"
    for folder, seeds, train in ((logs / "long", SEEDS[:1], long_run_of), (logs, SEEDS, runs_of)):
        yield from ((folder, train, run) for run in unfinished(folder / "runs.csv", seeds))


def write_down(folder: Path, runs: list[Run], task: str, optimizer: str, seed: int) -> None:
    """Write down the runs of one network and one start."""
    about = {"task": task, "optimizer": optimizer, "seed": seed}
    with RunLog(folder) as log:
        if log.header is None:
            log.write_header(new_header("alarms", ("watch", "networks", folder.name, 0), {}, torch.device("cpu")))
        append(
            folder / "looks.csv", [about | {"schedule": row["schedule"]} | look for row, seen in runs for look in seen]
        )
        append(folder / "runs.csv", [about | row for row, _ in runs])


def unfinished(path: Path, seeds: Sequence[int]) -> list[tuple[str, str, int]]:
    """Return the trainings that a log does not have yet."""
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    done = {(row["task"], row["optimizer"], int(row["seed"])) for row in rows}
    wanted = [(task, optimizer, seed) for seed in seeds for task in TASKS for optimizer in OPTIMIZERS]
    return [each for each in wanted if each not in done]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a CSV file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
