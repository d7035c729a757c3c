"""What a log consists of: the format's number, the states of a run, and a row of each CSV file."""

from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias, get_args

FORMAT = 2
FORMATS = (1, FORMAT)
"""Those that can be read. Before 2 each kind of run had a header of its own, in a file of its own name."""

Kind: TypeAlias = Literal["training", "solver", "sweep", "alarms"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Status = Literal["running", "interrupted", "finished", "diverged", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)


Finite: TypeAlias = Annotated[float, "finite"]
"""A number that is never NaN or infinite, whatever becomes of the run."""


MemorySource: TypeAlias = Literal["cuda", "process"]
"""Where memory was measured."""


class LogError(ValueError):
    """A log that cannot be used, and why, in one line."""


Setting: TypeAlias = str | float | bool | None
"""A setting of a method; a whole number is one too."""
METHOD_SETTINGS = ("schedule", "precision", "curvature", "curvature_samples")
"""Settings of a run, beside those of its optimizer, that belong to the method."""


@dataclass(frozen=True)
class EpochRecord:
    """One row of epochs.csv; docs/log-format.md says what each column means."""

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    test_loss: float
    test_accuracy: float | None
    lr: Finite
    train_seconds: Finite
    peak_memory_mib: Finite
    peak_memory_source: MemorySource
    gradient_evaluations: int
    hessian_products: int
    refreshes: int


@dataclass(frozen=True)
class RefreshRecord:
    """One row of refreshes.csv: an eigenvalue as it was before a step."""

    step: int
    epoch: Finite
    index: int
    eigenvalue: float
    residual: float
    is_captured: bool
    damping: float | None
    hessian_products: int


@dataclass(frozen=True)
class SolveRecord:
    """One row of records.csv: what a full-batch solver has spent, and its best point so far."""

    evaluations: int
    """Calls of the loss, with or without its gradient."""
    products: int
    """Products of the curvature with a vector."""
    setups: int
    """What blocks of products needed first, such as a Jacobian: how often."""
    billed: Finite
    """Evaluations, plus products and setups at their price."""
    seconds: Finite
    """Time spent by the method and its evaluations, but not on measuring errors."""
    loss: float
    """The lowest loss seen."""
    error: float
    """The relative error at the point with that loss; NaN if the problem has no error measure."""


@dataclass(frozen=True)
class SweepRecord:
    """One row of losses.csv: a run at a rate, after some steps."""

    method: str
    lr: Finite
    step: int
    loss: float
    """Of the training set, or of a fixed part of it."""
    seconds: Finite
    """Processor time of all steps so far, evaluations not counted."""
    products: int
    """Products with the curvature so far."""
    captured: int
    """Directions that the last step made use of."""


Record: TypeAlias = EpochRecord | RefreshRecord | SolveRecord | SweepRecord


def columns(record: type[Record]) -> list[str]:
    """Return the columns of a kind of record."""
    return [field.name for field in fields(record)]


def optional(record: type[Record]) -> list[str]:
    """Return the columns that older logs may lack: those with a default."""
    return [field.name for field in fields(record) if field.default is not MISSING]


@dataclass(frozen=True)
class Header:
    """What the first record of every log says, whatever kind of run it is of; what older logs lack is None."""

    status: Status
    suite: str
    task: str
    label: str
    seed: int
    git_commit: str | None


@dataclass(frozen=True)
class RunRecord(Header):
    """What run.json says of a training run, as far as a report depends on it."""

    epochs: int
    """The budget."""
    curvature: str | None
    optimizer: dict[str, Any]
    """The optimizer's name and settings."""
    changed: dict[str, Setting]
    """The settings of the method that differed from their defaults, and so stand in the label."""
    steps_per_epoch: int | None
    command: str | None
    versions: dict[str, str]
    commits: tuple[str, ...]
    """The commits of the code that it ran on, shortened: one, unless it was resumed on another."""
    device: str | None
    message: str | None


@dataclass(frozen=True)
class SolveRun(Header):
    """A run of a full-batch solver."""

    evaluations: float
    """The budget: evaluations, products and setups at their price; infinite where seconds alone end a run."""
    seconds: float
    """The budget of seconds, infinite where there is none."""
    parameters: int
    price: float
    """Evaluations that a product costs; 0 if the method makes none."""
    setup_price: float
    ended: str | None
    """spent, or "stalled: " and why; None while it runs."""
    records: tuple[SolveRecord, ...]


@dataclass(frozen=True)
class Sweep(Header):
    """All runs of one problem from one start, at every rate of several methods."""

    batches: str
    """full, large or mini."""
    steps: int
    records: tuple[SweepRecord, ...]


def label_part(field: str, value: object) -> str:
    """Return how a setting stands in a label: rank3 for a number, scaling=unit for a word."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{field}{'' if is_number else '='}{written(value)}"


def written(value: object) -> str:
    """Return how the value of a setting is written."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value).lower()
