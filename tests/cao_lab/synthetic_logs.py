"""Logs made up by a formula, for tests only: no number here was measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCH_HEADER = (
    "epoch,step,train_loss,train_accuracy,test_loss,test_accuracy,lr,train_seconds,"
    "peak_memory_mib,peak_memory_source,gradient_evaluations,hessian_products,refreshes"
)
REFRESH_HEADER = "step,epoch,index,eigenvalue,residual,is_captured,damping,hessian_products"
CAO = {
    "name": "cao", "lr": 0.01, "rank": 1, "refresh_every": 40, "damping": 0.1, "momentum": 0.0, "sketch": "top",
    "scaling": "inverse-damping",
}  # fmt: skip
SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": False}
ADAM = {"name": "adam", "lr": 0.001}


@dataclass(frozen=True)
class Run:
    """One made-up run; `losses` decide everything that the test is about."""

    losses: Sequence[float]
    label: str = "cao-rank1"
    seed: int = 0
    optimizer: dict[str, Any] = field(default_factory=lambda: CAO)
    suite: str = "mini"
    task: str = "cifar100-resnet18w16-n5000"
    status: str = "finished"
    accuracies: Sequence[float] | None = None
    seconds: float = 2.0
    budget: int | None = None
    eigenvalues: Sequence[float] = ()
    steps_per_epoch: int = 40

    @property
    def products(self) -> int:
        """Curvature products of an epoch: one refresh of 11 for each captured pair."""
        return 11 * int(self.optimizer.get("rank", 0))


def write_run(logs: Path, run: Run) -> Path:
    """Write a run's folder as training would."""
    folder = logs / run.suite / run.task / run.label / f"seed{run.seed}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(header(run), indent=1))
    (folder / "epochs.csv").write_text("\n".join([EPOCH_HEADER, *epoch_lines(run)]) + "\n")
    if run.eigenvalues:
        (folder / "refreshes.csv").write_text("\n".join([REFRESH_HEADER, *refresh_lines(run)]) + "\n")
    return folder


def header(run: Run) -> dict[str, Any]:
    """Return the content of run.json."""
    dataset, model = run.task.split("-")[:2]
    config = {"dataset": dataset, "model": model, "epochs": run.budget or len(run.losses), "curvature": "hessian"}
    return {
        "format": 1, "status": run.status, "suite": run.suite, "task": run.task, "label": run.label, "seed": run.seed,
        "config": config | {"optimizer": run.optimizer}, "parameters": 1000, "steps_per_epoch": run.steps_per_epoch,
        "command": f"cao train {run.optimizer['name']} --seed {run.seed}",
        "versions": {"python": "3.11", "torch": "2.x"}, "git_commit": "0123abc",
        "device": "cpu", "threads": 1, "started_at": "2000-01-01T00:00:00Z",
        "ended_at": None, "message": None,
    }  # fmt: skip


def epoch_lines(run: Run) -> list[str]:
    """Return the rows of epochs.csv."""
    accuracies = run.accuracies or [max(0.0, 1 - loss / 5) for loss in run.losses]
    lines = []
    for epoch, (loss, accuracy) in enumerate(zip(run.losses, accuracies, strict=True), start=1):
        values = (epoch, 40 * epoch, loss, accuracy, loss + 0.1, accuracy, run.optimizer["lr"], run.seconds, 500.0)
        lines.append(",".join(str(value) for value in (*values, "process", 40 * epoch, run.products * epoch, epoch)))
    return lines


def refresh_lines(run: Run) -> list[str]:
    """Return the rows of refreshes.csv: the same eigenvalues at the start of every epoch, the last not captured."""
    rank, damping = run.optimizer.get("rank", 0), run.optimizer.get("damping", "")
    return [
        f"{40 * epoch},{epoch}.0,{index},{value},0.01,{index <= rank},{damping},{run.products * (epoch + 1)}"
        for epoch in range(len(run.losses))
        for index, value in enumerate(run.eigenvalues, start=1)
    ]


def decay(half_life: float, epochs: int = 20, start: float = 4.6, jitter: float = 0.0) -> list[float]:
    """Return a loss that halves every so many epochs; `jitter` bends it, differently for each seed."""
    rates = [math.log(2) / half_life * (1 + jitter) for _ in range(epochs)]
    return [round(start * math.exp(-rate * epoch), 6) for epoch, rate in enumerate(rates, start=1)]


def suite_of_runs(suite: str = "mini", task: str = "cifar100-resnet18w16-n5000", epochs: int = 20) -> list[Run]:
    """Return a made-up suite with all parts: CAO sooner than Adam and SGD, its controls as they are named."""
    methods = {
        "adam": (ADAM, 16.0), "adamw": ({"name": "adamw", "lr": 0.001}, 17.0), "sgd": (SGD, 20.0),
        "sgd-lr0.1-momentum0": (SGD | {"lr": 0.1, "momentum": 0.0}, 9.0),
        "cao-rank0": (CAO | {"rank": 0}, 9.0), "cao-rank0-scaling=unit": (CAO | {"rank": 0, "scaling": "unit"}, 30.0),
        "cao-rank1": (CAO, 8.0), "cao-rank3": (CAO | {"rank": 3}, 8.05), "cao-rank5": (CAO | {"rank": 5}, 7.95),
        "cao-rank1-momentum0.9": (CAO | {"momentum": 0.9}, 6.0),
        "cao-rank1-sketch=random": (CAO | {"sketch": "random"}, 9.1),
        "cao-rank1-sketch=projected-out": (CAO | {"sketch": "projected-out"}, 8.6),
    }  # fmt: skip
    return [
        Run(
            decay(half_life, epochs, jitter=0.02 * (seed - 1)), label, seed, optimizer, suite, task,
            seconds=2.0 + 0.3 * optimizer.get("rank", 0),
            eigenvalues=[30.0, 12.0, -4.0, 3.0, 2.0, 1.5][: optimizer.get("rank", 0) + 1],
        )
        for label, (optimizer, half_life) in methods.items()
        for seed in range(3)
    ]  # fmt: skip


def write_suite(logs: Path, runs: Sequence[Run]) -> Path:
    """Write many runs and return the folder of logs."""
    for run in runs:
        write_run(logs, run)
    return logs
