"""The tables that other commands leave beside the runs: theory.csv and bench.json."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pandas import DataFrame

from cao_lab.log.checks import mapping, number, text, wrong
from cao_lab.log.header import optional
from cao_lab.log.reading import UNREADABLE, read_json, read_text, refused

THEORY_NUMBERS = ("bound", "observed", "slack")


def load_theory(folder: Path, missing: list[str]) -> DataFrame:
    """Return the theory's table, empty if `cao theory` has not been run."""
    return read_beside(folder / "theory.csv", read_theory, missing)


def load_bench(folder: Path, missing: list[str]) -> DataFrame:
    """Return the benchmark's rows, empty if `cao bench` has not been run."""
    return read_beside(folder / "bench.json", read_bench, missing)


def read_beside(path: Path, read: Callable[[Path], DataFrame], missing: list[str]) -> DataFrame:
    """Read a table that lies beside the runs; one that is not there is empty, a broken one costs a sentence."""
    try:
        return read(path)
    except FileNotFoundError:
        return DataFrame()
    except (*UNREADABLE, csv.Error) as error:
        missing.append(f"{refused(path, error)}, left out")
        return DataFrame()


def read_theory(path: Path) -> DataFrame:
    """Return the statements with their bounds and verdicts."""
    header, *rows = [*csv.reader(read_text(path).splitlines(), strict=True)] or [[]]
    if not header or len(set(header)) < len(header):
        raise wrong("its first line", "the names of columns", header)
    if torn := [row for row in rows if len(row) != len(header)]:
        raise wrong("every row", f"{len(header)} cells long", torn[0])
    cells = [[theory_cell(name, cell) for name, cell in zip(header, row, strict=True)] for row in rows]
    return DataFrame(cells, columns=[text("a column", name) for name in header])


def theory_cell(name: str, cell: str) -> float | str | None:
    """Return a bound or an observation as a number, all else as text."""
    return float(cell) if name in THEORY_NUMBERS and cell else text(name, cell) or None


def read_bench(path: Path) -> DataFrame:
    """Return the rows that have a value."""
    content = read_json(path)
    if not isinstance(content, list):
        raise wrong("its content", "a list of rows", content)
    rows = [bench_row(mapping("a row", row)) for row in content]
    return DataFrame([row for row in rows if row["value"] is not None])


def bench_row(row: dict[str, Any]) -> dict[str, Any]:
    """Check one row: a name, a value, and what is said beside them."""
    if not {"name", "value"} <= row.keys():
        raise wrong("a row", "given a name and a value", row)
    said = {text("a key", key): bench_cell(key, value) for key, value in row.items()}
    return said | {"name": text("name", row["name"]), "value": optional(number, "value", row["value"])}


def bench_cell(name: str, value: Any) -> float | str | None:
    """Return a text, a number or nothing, which is all that a table can show."""
    if isinstance(value, str):
        return text(name, value)
    optional(number, name, value)
    return value  # type: ignore[no-any-return]  # a whole number stays one
