"""Writes the log of a run of any kind: a JSON header and CSV rows that are only ever appended, under a lock."""

import csv
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from cao_lab.log.header import NAME, OLDER_NAMES, read_header
from cao_lab.log.locking import Lock
from cao_lab.log.reading import parsed, refused
from cao_lab.log.records import EpochRecord, LogError, Record, RefreshRecord, columns, optional


class RowFile:
    """A CSV file of one kind of record, to which rows are appended and from which only the end is ever cut."""

    def __init__(self, path: Path, record: type[Record]) -> None:
        self.path = path
        self.record = record
        self.columns = columns(record)
        """Those of the file, once that is known: an older log goes on without the columns that it lacks."""
        self.rows = 0

    def append(self, records: Iterable[Record]) -> None:
        """Append one line a record, each written whole."""
        records = list(records)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n", extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(asdict(record) for record in records)
        self.rows += len(records)

    def cut_back(self, rows: int) -> None:
        """Keep the header and the first rows, dropping what came later and any half-written line."""
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = content.split(b"\n")[:-1][: rows + 1] if rows else []
        self.check(kept, rows)
        if content:
            os.truncate(self.path, sum(len(line) + 1 for line in kept))
        self.rows = rows

    def check(self, lines: list[bytes], rows: int) -> None:
        """Refuse to go on behind rows that are missing, or that a report could not read."""
        advice = f"put a copy of it back, or remove {self.path.parent} to begin the run anew"
        if len(lines) <= rows > 0:
            raise LogError(f"{self.path} has fewer than the {rows} rows that its checkpoint remembers; {advice}")
        # To the byte: a report may read a copy with other line ends, but a run would go on with two kinds of them.
        if lines:
            found = lines[0].decode(errors="replace").split(",")
            if found != [name for name in columns(self.record) if name in found or name not in optional(self.record)]:
                raise LogError(f"{self.path} does not begin with the names of its columns; {advice}")
            self.columns = found
        try:
            list(parsed([line.decode() for line in lines], self.record))
        except ValueError as error:
            raise LogError(f"{self.path.parent}: {refused(self.path, error)}; {advice}") from error

    def sync(self) -> None:
        """Make sure that the rows have reached the disk."""
        if self.path.exists():
            sync(self.path)


class RunLog:
    """The folder of one run. Whoever holds it is the only one: a second process is refused."""

    def __init__(self, folder: Path, **records: type[Record]) -> None:
        self.folder = folder
        kinds = records or {"epochs": EpochRecord, "refreshes": RefreshRecord}
        self.files = {name: RowFile(folder / f"{name}.csv", record) for name, record in kinds.items()}
        """The rows by the names of their files; by default those of a training run."""
        self._lock = Lock(folder)

    def __getattr__(self, name: str) -> RowFile:
        """Return a file of rows by its name."""
        if name == "files" or name not in self.files:
            raise AttributeError(name)
        return self.files[name]

    def open(self) -> None:
        """Make the folder and take its lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()

    def close(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> Self:
        """Open the log."""
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log."""
        self.close()

    def check_lock(self) -> None:
        """Refuse to go on if another process has taken the folder over."""
        self._lock.check()

    @property
    def header(self) -> dict[str, Any] | None:
        """What run.json says, or None if there is no such file."""
        return read_header(self.folder)

    def write_header(self, header: dict[str, Any]) -> None:
        """Replace run.json as a whole."""
        self.check_lock()
        text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
        temporary = self.folder / f"{NAME}.new"
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(self.folder / NAME)
        for name in OLDER_NAMES:
            (self.folder / name).unlink(missing_ok=True)
        sync(self.folder)

    def update_header(self, **changes: Any) -> None:
        """Change some keys of run.json; a run that could not write it has not begun, and the next one may."""
        if (header := self.header) is not None:
            self.write_header({**header, **changes})

    def cut_back(self, **rows: int) -> None:
        """Return files to the rows that a checkpoint remembers."""
        for name, count in rows.items():
            self.files[name].cut_back(count)

    def sync(self) -> None:
        """Make sure that all rows have reached the disk."""
        for file in self.files.values():
            file.sync()


def sync(path: Path) -> None:
    """Wait until a file or a folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
