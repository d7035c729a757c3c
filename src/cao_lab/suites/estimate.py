"""What a suite would do and how long it would take, from one measured step of each of its tasks."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from cao_lab.config import Execution, RunConfig, SlurmOptions
from cao_lab.facts import CURVATURES, product_price_row
from cao_lab.runs.methods.first_order import SGDConfig
from cao_lab.runs.session import choose_device
from cao_lab.runs.sharpness import EXTRA_PRODUCTS
from cao_lab.runs.stopping import StopRequest
from cao_lab.runs.training import Training
from cao_lab.suites import find_suite, rounds_of
from cao_lab.suites.runner import SuiteRunner, TrainingRun, slurm_launcher
from cao_lab.tasks.data import load
from cao_lab.tasks.pickles import DataError

# The first step is slower than the others; of the rest the fastest is the one that nothing else disturbed.
MOST_STEPS = 5
ENOUGH_SECONDS = 2.0
# A process has to import torch before it can begin.
START_SECONDS = 4.0
# A forward pass is about a third of a gradient.
FORWARD_PRICE = 1 / 3


@dataclass(frozen=True)
class Measured:
    """The price of a task: seconds of a gradient step, steps of an epoch, evaluation of an epoch in such steps."""

    step_seconds: float
    steps_per_epoch: int
    batch: int
    """Samples of a step."""
    evaluation_steps: float


class EnoughMeasured(Exception):  # noqa: N818  # not an error
    """The steps that were to be timed have been taken."""


def list_runs(name: str, execution: Execution, jobs: int, slurm: SlurmOptions | None = None) -> Iterator[str]:
    """Yield a line for each run of a suite's first round, a total, and what would be submitted to Slurm."""
    folder, suite = find_suite(name)
    launcher = slurm_launcher(slurm, jobs, execution, folder) if slurm else None
    runner = SuiteRunner(execution, jobs, StopRequest(), launcher)
    torch.set_num_threads(runner.threads)
    prices: dict[str, Measured | None] = {}
    products = product_prices(execution.logs)
    total, count, missing = 0.0, 0, []
    for config in (replace(config, suite=folder) for config in next(rounds_of(suite), [])):
        if TrainingRun(config).outcome(execution.logs):
            yield f"{'over':>8}  {config.folder}"
            continue
        if config.task not in prices:
            prices[config.task] = measured(config, execution)
        count += 1
        price = prices[config.task]
        seconds = math.nan if price is None else START_SECONDS + run_seconds(config, price, products)
        missing += [config.dataset] if price is None else []
        total += 0 if price is None else seconds
        yield f"{'unknown' if price is None else duration(seconds):>8}  {config.folder}"
    if len(missing) < count or not count:
        counted = ", ".join(f"a {kind} product counts as {price:.1f} gradients" for kind, price in products.items())
        yield f"{duration(total / jobs):>8}  in all with {jobs} at a time; {counted}"
    if missing:
        yield f"{'':>8}  {without_data(missing)}"
    if callable(suite):
        yield "          then more, depending on these"
    if launcher and count:
        yield launcher.described(count)


def without_data(datasets: list[str]) -> str:
    """Return how to get the data that some runs lack."""
    commands = "; ".join(f"cao data {name} --data-dir DIR" for name in sorted(set(datasets)))
    return f"for {len(datasets)} runs the data are not here; get them, then add --data-dir DIR: {commands}"


def measured(config: RunConfig, execution: Execution) -> Measured | None:
    """Time a few steps of SGD on the task, the first left out; None if the data are missing."""
    try:
        dataset = load(config.dataset, execution.data_dir, config.train_samples)
    except DataError:
        return None
    plain = replace(config, optimizer=SGDConfig(lr=0.0), monitor_curvature=0, epochs=MOST_STEPS)
    training = Training(plain, dataset, choose_device(execution.device))
    times: list[float] = []

    def note_time(training: Training) -> None:
        times.append(time.perf_counter())
        if training.progress.step == MOST_STEPS or (len(times) > 1 and times[-1] - times[0] > ENOUGH_SECONDS):
            raise EnoughMeasured

    with suppress(EnoughMeasured):
        list(training.epochs(note_time))
    size = len(dataset.train_inputs)
    batch = config.batch_size or size
    evaluation = FORWARD_PRICE * len(dataset.test_inputs) / batch
    fastest = min(after - before for before, after in pairwise(times))
    return Measured(fastest, math.ceil(size / batch), batch, evaluation)


def product_prices(logs: Path) -> dict[str, float]:
    """Return the price of a product of each kind in gradients: as `cao bench` has measured it, or assumed."""
    try:
        rows = json.loads((logs / "bench.json").read_text(encoding="utf-8"))
        measured = {row["name"]: float(row["value"]) for row in rows if row["value"] is not None}
    except (OSError, ValueError, TypeError, KeyError):
        measured = {}
    return {kind: measured.get(product_price_row(kind), price) for kind, price in CURVATURES.items()}


def run_seconds(config: RunConfig, price: Measured, products: Mapping[str, float] = CURVATURES) -> float:
    """Return what a run would take, a curvature product at its price."""
    product = products[config.curvature]
    scale = (config.curvature_samples or price.batch) / price.batch
    gradients = price.steps_per_epoch * config.optimizer.gradients_per_step(product * scale)
    gradients += price.evaluation_steps
    if config.monitor_curvature:
        gradients += (config.monitor_curvature + EXTRA_PRODUCTS) * product
    return config.epochs * gradients * price.step_seconds


def duration(seconds: float) -> str:
    """Return hours, minutes or seconds, whichever is readable."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
