"""Reads the files of a log; what is not as the format says is refused in one line, here and nowhere else."""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from cao_lab.log.checks import count, folder_name, number, one_line, wrong
from cao_lab.log.records import Finite, LogError, MemorySource, Record

MOST_BYTES = 2**28
"""A larger file is no log, and would fill the memory."""
UNREADABLE = (ValueError, OSError, RecursionError)
"""What reading a damaged file raises; a LogError is a ValueError."""
PLAIN = re.compile(r"[0-9A-Za-z.,+-]*")
"""All characters of a row as training writes it."""

Kind = TypeVar("Kind", bound=Record)


def read_text(path: Path) -> str:
    """Return the text of a file to the letter; anything else at its place is refused."""
    # A pipe would keep us waiting, and a link can lead nowhere or round in circles.
    if os.path.lexists(path) and not path.is_file():
        raise LogError("it is not a file")
    if path.stat().st_size > MOST_BYTES:
        raise LogError(f"it is larger than {MOST_BYTES // 2**20} MiB")
    # Not Path.read_text, which takes a carriage return within a line for the end of it.
    return path.read_bytes().decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(read_text(path))


def refused(path: Path, error: Exception) -> LogError:
    """Return the one line in which a file is refused, whatever was wrong with it."""
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    reason = error.strerror or reason if isinstance(error, OSError) else reason
    return LogError(f"{path.name} cannot be read ({one_line(reason)})")


@dataclass(frozen=True)
class WholeRows(Generic[Kind]):
    """The rows of a CSV file that were written whole."""

    records: list[Kind]
    is_torn: bool = False
    """Whether a half-written line at the end was dropped: its last number may lack digits."""


def read_rows(path: Path, record: type[Kind]) -> WholeRows[Kind]:
    """Return the rows of a CSV file, none if there is no such file."""
    try:
        *lines, rest = read_text(path).split("\n")
        return WholeRows(list(parsed(lines, record)), bool(rest))
    except FileNotFoundError:
        return WholeRows([])
    except UNREADABLE as error:
        raise refused(path, error) from error


def parsed(lines: list[str], record: type[Kind]) -> Iterator[Kind]:
    """Yield the records in the lines of a CSV file, of which the first names the columns.

    A column whose field has a default was added after the first logs were written, and may be missing.
    """
    if not lines:
        return
    header = lines[0].removesuffix("\r").split(",")
    needed = [field for field in fields(record) if field.default is MISSING or field.name in header]
    if lost := [field.name for field in needed if header.count(field.name) != 1]:
        raise LogError(f"its first line lacks {', '.join(lost)}")
    columns = [(field.name, PARSERS[field.type], header.index(field.name)) for field in needed]
    for place, line in enumerate(lines[1:], start=2):
        cells = line.removesuffix("\r").split(",")
        if len(cells) != len(header) or not PLAIN.fullmatch(line.removesuffix("\r")):
            raise LogError(f"line {place} is damaged: {one_line(line)[:60]}")
        try:
            yield record(**{name: parse(cells[at]) for name, parse, at in columns})
        except ValueError as error:
            raise LogError(f"line {place} is damaged: {error}") from error


def whole_number(cell: str) -> int:
    """Return the count that stands in a cell."""
    return count("a count", int(cell) if cell.isdigit() else cell)


def flag(cell: str) -> bool:
    """Return what `True` and `False` stand for."""
    if cell not in ("True", "False"):
        raise wrong("a flag", "True or False", cell)
    return cell == "True"


def memory_source(cell: str) -> str:
    """Return where memory was measured."""
    if cell not in get_args(MemorySource):
        raise wrong("the source of memory", "cuda or process", cell)
    return cell


PARSERS: dict[Any, Callable[[str], Any]] = {
    int: whole_number,
    float: float,
    Finite: lambda cell: number("a number", float(cell)),
    float | None: lambda cell: float(cell) if cell else None,
    bool: flag,
    MemorySource: memory_source,
    str: lambda cell: folder_name("a name", cell),
}
"""How a cell is read, by the type of its column."""
