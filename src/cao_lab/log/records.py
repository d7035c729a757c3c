"""What a log consists of: the format's number, the states of a run, and a row of each CSV file."""

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

FORMAT = 1

Status = Literal["running", "interrupted", "finished", "diverged", "failed"]


class LogError(ValueError):
    """A log that cannot be used, and why, in one line."""


@dataclass(frozen=True)
class EpochRecord:
    """One row of epochs.csv; docs/log-format.md says what each column means."""

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    test_loss: float
    test_accuracy: float | None
    lr: float
    train_seconds: float
    peak_memory_mib: float
    peak_memory_source: str
    gradient_evaluations: int
    hessian_products: int
    refreshes: int


@dataclass(frozen=True)
class RefreshRecord:
    """One row of refreshes.csv: an eigenvalue as it was before a step."""

    step: int
    epoch: float
    index: int
    eigenvalue: float
    residual: float
    is_captured: bool
    damping: float | None
    hessian_products: int


Record: TypeAlias = EpochRecord | RefreshRecord


def columns(record: type[Record]) -> list[str]:
    """Return the columns of a kind of record."""
    return [field.name for field in fields(record)]
