"""The log of a sweep over rates: sweep.json says what it was, losses.csv how each run went."""

from dataclasses import dataclass
from pathlib import Path

from cao_lab.log.checks import count, folder_name, mapping, one_line
from cao_lab.log.reading import UNREADABLE, read_json, read_rows, refused
from cao_lab.log.records import LogError, SweepRecord

HEADER, RECORDS = "sweep.json", "losses.csv"


@dataclass(frozen=True)
class Sweep:
    """All runs of one problem from one start."""

    problem: str
    kind: str
    steps: int
    seed: int
    records: tuple[SweepRecord, ...]


def read_sweeps(folder: Path, missing: list[str]) -> list[Sweep]:
    """Return all sweeps below a folder that are whole; a damaged one costs itself and a sentence."""
    found = []
    for path in sorted(folder.glob(f"*/seed*/{HEADER}")):
        try:
            found.append(read_sweep(path.parent))
        except LogError as error:
            name = path.parent.relative_to(folder.parent).as_posix()
            missing.append(one_line(f"{name}: {error}, left out"))
    return found


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder, every value checked."""
    records = read_rows(folder / RECORDS, SweepRecord).records
    try:
        header = mapping("its content", read_json(folder / HEADER))
        return Sweep(
            problem=folder_name("problem", header.get("problem")),
            kind=folder_name("kind", header.get("kind")),
            steps=count("steps", header.get("steps"), at_least=1),
            seed=count("seed", header.get("seed")),
            records=tuple(records),
        )
    except UNREADABLE as error:
        raise refused(folder / HEADER, error) from error
