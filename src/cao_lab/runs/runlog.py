"""The log of one run on disk: a JSON header and CSV rows that are only ever appended, under a lock."""

import csv
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal, Self

FORMAT = 1

Status = Literal["running", "interrupted", "finished", "diverged", "failed"]


class LogError(ValueError):
    """A log folder that cannot be used, and why."""


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


class RowFile:
    """A CSV file of one kind of record, to which rows are appended and from which only the end is ever cut."""

    def __init__(self, path: Path, record: type[EpochRecord] | type[RefreshRecord]) -> None:
        self.path = path
        self.columns = [field.name for field in fields(record)]
        self.rows = 0

    def append(self, records: Iterable[EpochRecord | RefreshRecord]) -> None:
        """Append one line a record, each written whole."""
        records = list(records)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(self.columns)
            writer.writerows(astuple(record) for record in records)
        self.rows += len(records)

    def cut_back(self, rows: int) -> None:
        """Keep the header and the first rows, dropping what came later and any half-written line."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content.split(b"\n")[:-1]
        if rows:
            self._check(lines, rows)
        kept = lines[: rows + 1] if rows else []
        if content:
            os.truncate(self.path, sum(len(line) + 1 for line in kept))
        self.rows = rows

    def _check(self, lines: list[bytes], rows: int) -> None:
        """Refuse a file in which the rows that a checkpoint counts on are not as they were written."""
        advice = f"put a copy of it back, or remove {self.path.parent} to begin the run anew"
        if len(lines) <= rows:
            raise LogError(f"{self.path} has fewer than the {rows} rows that its checkpoint remembers; {advice}")
        if lines[0] != ",".join(self.columns).encode():
            raise LogError(f"{self.path} does not begin with the names of its columns; {advice}")
        for number, line in enumerate(lines[1 : rows + 1], start=2):
            if b"\r" in line or line.count(b",") != len(self.columns) - 1:
                raise LogError(f"{self.path} is damaged in line {number}; {advice}")

    def sync(self) -> None:
        """Make sure that the rows have reached the disk."""
        if self.path.exists():
            sync(self.path)


class RunLog:
    """The folder of one run. Whoever holds it is the only one: a second process is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epochs = RowFile(folder / "epochs.csv", EpochRecord)
        self.refreshes = RowFile(folder / "refreshes.csv", RefreshRecord)
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        """Make the folder and take its lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "run.lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise LogError(f"another process is working on {self.folder}; wait for it or stop it") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back; the operating system does it for a process that was killed."""
        if self._lock is not None:
            self._lock.close()

    @property
    def header(self) -> dict[str, Any] | None:
        """What run.json says, or None if there is no such file."""
        return read_header(self.folder)

    def write_header(self, header: dict[str, Any]) -> None:
        """Replace run.json as a whole."""
        text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
        temporary = self.folder / "run.json.new"
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(self.folder / "run.json")
        sync(self.folder)

    def update_header(self, **changes: Any) -> None:
        """Change some keys of run.json."""
        self.write_header({**(self.header or {}), **changes})

    def cut_back(self, epochs: int, refreshes: int) -> None:
        """Return both files to the rows that a checkpoint remembers."""
        self.epochs.cut_back(epochs)
        self.refreshes.cut_back(refreshes)

    def sync(self) -> None:
        """Make sure that all rows have reached the disk."""
        self.epochs.sync()
        self.refreshes.sync()


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the content of a run.json, or None if there is none."""
    path = folder / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # JSON that is nested too deeply, and numbers of too many digits.
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path} cannot be read ({error}); move {folder} away to start afresh") from error
    if not isinstance(content, dict) or not isinstance(content.get("status"), str):
        raise LogError(f"{path} is not the header of a run; move {folder} away to start afresh")
    return content


def sync(path: Path) -> None:
    """Wait until a file or a folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
