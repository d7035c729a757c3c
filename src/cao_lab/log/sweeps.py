"""The log of a sweep over rates: sweep.json says what it was, losses.csv how each run went."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from cao_lab.log.records import LogError

HEADER, RECORDS = "sweep.json", "losses.csv"


@dataclass(frozen=True)
class SweepRecord:
    """One row of losses.csv: a run at a rate, after some steps."""

    method: str
    lr: float
    step: int
    loss: float
    """Of the training set, or of a fixed part of it."""
    seconds: float
    """Processor time of all steps so far, evaluations not counted."""
    products: int
    """Products with the curvature so far."""
    captured: int
    """Directions that the last step made use of."""


@dataclass(frozen=True)
class Sweep:
    """All runs of one problem from one start."""

    problem: str
    kind: str
    steps: int
    seed: int
    records: tuple[SweepRecord, ...]


def read_sweeps(folder: Path) -> list[Sweep]:
    """Return all sweeps below a folder that are whole."""
    return [read_sweep(path.parent) for path in sorted(folder.glob(f"*/seed*/{HEADER}"))]


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder."""
    try:
        header = json.loads((folder / HEADER).read_text())
        with (folder / RECORDS).open(newline="") as file:
            records = tuple(
                SweepRecord(
                    row["method"], float(row["lr"]), int(row["step"]), float(row["loss"]), float(row["seconds"]),
                    int(row["products"]), int(row["captured"]),
                )
                for row in csv.DictReader(file)
            )  # fmt: skip
        return Sweep(header["problem"], header["kind"], int(header["steps"]), int(header["seed"]), records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LogError(f"{folder} is no log of a sweep: {error}") from error
