"""A folder of logs as tables: what ran, what every epoch gave, and what is missing or broken."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from cao_lab.facts import SEARCHING, suites_of
from cao_lab.log.checks import one_line
from cao_lab.log.header import OtherKindError, read_run
from cao_lab.log.reading import WholeRows, read_rows
from cao_lab.log.records import EpochRecord, LogError, Record, RefreshRecord, RunRecord, columns
from cao_lab.protocol import ends_above_start, final_train_losses
from cao_lab.reporting.beside import load_bench, load_theory
from cao_lab.reporting.names import MIXED, display_names

RUN_KEY = ["suite", "task", "label", "seed"]
ENDED = ("finished", "diverged")
OPTIMIZER_FIELDS = {
    "name": "optimizer", "lr": "base_lr", "momentum": "momentum", "rank": "rank", "damping": "damping",
    "refresh_every": "refresh_every", "scaling": "scaling", "sketch": "sketch",
    "negative_curvature": "negative_curvature", "eigensolver": "eigensolver", "warmup_steps": "warmup_steps",
}  # fmt: skip
CLIPS = ("max_update_norm", "max_gradient_norm")
NUMBERS = [
    "seed", "base_lr", "momentum", "rank", "damping", "refresh_every", "budget", "steps_per_epoch", "warmup_steps",
    "clip",
]  # fmt: skip
BESIDE = [
    *RUN_KEY, "name", "status", "has_ended", "budget", *OPTIMIZER_FIELDS.values(), "clip", "curvature",
    "steps_per_epoch",
]  # fmt: skip
NOT_NUMBERS = ("peak_memory_source", "is_captured")


class ReportError(Exception):
    """Nothing to report on, said in one line."""


@dataclass(frozen=True)
class Logs:
    """Everything that a folder of logs holds."""

    runs: DataFrame
    """One row per run: its configuration, provenance and state."""
    epochs: DataFrame
    """One row per epoch of a run, with the run's columns repeated, and `seconds` since its start."""
    refreshes: DataFrame
    """One row per eigenvalue, with the run's columns repeated."""
    theory: DataFrame
    bench: DataFrame
    missing: tuple[str, ...]
    """One sentence for everything that is not as it should be."""


def load_logs(folder: Path) -> Logs:
    """Read every run below a folder; a damaged run costs itself and a sentence, never the report."""
    missing: list[str] = []
    found = [run for path in run_folders(folder, missing) if (run := load_run(path, folder, missing)) is not None]
    if not found:
        hint = f" ({missing[0]})" if missing else ""
        where = one_line(f"{folder}{hint}")
        raise ReportError(f"no runs in {where}: run `cao suite demo` first, or name another folder")
    found.sort(key=lambda run: [run.row[key] for key in RUN_KEY])
    found = list(without_copies(found, missing))
    runs = DataFrame([run.row for run in found])
    runs["name"] = display_names([run.record for run in found])
    runs[NUMBERS] = runs[NUMBERS].apply(pd.to_numeric, errors="coerce")
    epochs = stacked([run.epochs for run in found], EpochRecord, runs)
    epochs["seconds"] = epochs.groupby("run")["train_seconds"].cumsum()
    runs = with_progress(runs, epochs)
    missing += [*unfinished(runs), *missing_seeds(runs)]
    refreshes = stacked([run.refreshes for run in found], RefreshRecord, runs)
    theory, bench = load_theory(folder, missing), load_bench(folder, missing)
    return Logs(runs, epochs, refreshes, theory, bench, tuple(one_line(sentence) for sentence in missing))


def run_folders(folder: Path, missing: list[str]) -> list[Path]:
    """Return the folders below that hold a part of a run, in a fixed order."""
    if not folder.is_dir():
        raise ReportError(f"{one_line(str(folder))} is not a folder: name the one that holds the logs")

    def note(error: OSError) -> None:
        missing.append(f"{Path(error.filename).relative_to(folder)} cannot be read ({error.strerror}), left out")

    walk = os.walk(folder, onerror=note)
    try:
        return sorted(Path(path) for path, *names in walk if {"run.json", "epochs.csv"} & {*names[0], *names[1]})
    except RecursionError as error:
        where = one_line(str(folder))
        raise ReportError(f"{where} has folders within folders a thousand deep: name the one of the logs") from error


@dataclass(frozen=True)
class LoadedRun:
    """One run as its files tell it."""

    name: str
    """Its folder."""
    record: RunRecord
    row: dict[str, Any]
    epochs: Sequence[EpochRecord]
    refreshes: Sequence[RefreshRecord]


def load_run(path: Path, folder: Path, missing: list[str]) -> LoadedRun | None:
    """Return what a run's folder holds, or nothing if a part of it cannot be trusted."""
    name = path.relative_to(folder).as_posix()
    try:
        record = read_run(path)
        epochs = read_rows(path / "epochs.csv", EpochRecord)
        refreshes = read_rows(path / "refreshes.csv", RefreshRecord)
    except OtherKindError:
        return None
    except LogError as error:
        missing.append(f"{name}: {error}, left out")
        return None
    missing += [f"{name}: the last line of {file} is torn, dropped" for file in torn(epochs, refreshes)]
    row = run_row(record)
    if record.status == "finished" and not is_whole(epochs.records, record.epochs):
        row["has_ended"] = False
        done = f"{len(epochs.records)} of {record.epochs} epochs"
        missing.append(f"{name}: finished, but epochs.csv is not whole ({done}), left out")
    losses = [epoch.train_loss for epoch in epochs.records]
    if record.status == "finished" and ends_above_start(record.task, losses, record.steps_per_epoch):
        row["status"] = "diverged"
        if record.suite not in suites_of(["stability"]):
            missing.append(f"{name}: finished at a loss of {losses[-1]:.3g}, above its start: counted as diverged")
    if len(record.commits) > 1:
        missing.append(f"{name}: resumed on other code ({', '.join(record.commits)}), marked {MIXED}")
    return LoadedRun(name, record, row, epochs.records, refreshes.records)


def torn(epochs: WholeRows[EpochRecord], refreshes: WholeRows[RefreshRecord]) -> list[str]:
    """Return the files of a run of which the last line was dropped."""
    return ["epochs.csv"] * epochs.is_torn + ["refreshes.csv"] * refreshes.is_torn


def is_whole(epochs: Sequence[EpochRecord], budget: int) -> bool:
    """Say whether there is a row for each epoch of the budget."""
    return len(epochs) == budget and [row.epoch for row in epochs] == list(range(1, budget + 1))


def without_copies(runs: Iterable[LoadedRun], missing: list[str]) -> Iterator[LoadedRun]:
    """Yield each run once: the copy of a run, in a backup say, is no further seed."""
    seen: dict[tuple[Any, ...], str] = {}
    for run in runs:
        key = tuple(run.row[column] for column in RUN_KEY)
        if key in seen:
            missing.append(f"{run.name}: the same run as {seen[key]}, left out")
        else:
            seen[key] = run.name
            yield run


def run_row(run: RunRecord) -> dict[str, Any]:
    """Flatten run.json into one row; fields of other optimizers are empty."""
    row = {key: getattr(run, key) for key in (*RUN_KEY, "status", "curvature", "steps_per_epoch")}
    row |= {column: run.optimizer.get(field) for field, column in OPTIMIZER_FIELDS.items()}
    row["clip"] = next((norm_or_none(run.optimizer[field]) for field in CLIPS if field in run.optimizer), None)
    # A CAO log from before a control existed means the control's neutral value.
    if row["optimizer"] == "cao":
        row |= {"sketch": row["sketch"] or "top", "momentum": row["momentum"] or 0.0}
    row |= {key: getattr(run, key) for key in ("command", "git_commit", "device", "message")}
    row["versions"] = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return row | {"budget": run.epochs, "has_ended": run.status in ENDED}


def norm_or_none(norm: float | None) -> float:
    """Return the norm at which was clipped: none at all is an infinite one."""
    return math.inf if norm is None else norm


def stacked(tables: Sequence[Sequence[Record]], record: type[Record], runs: DataFrame) -> DataFrame:
    """Stack the runs' rows, and put each run's number (`run`) and configuration beside them."""
    own = columns(record)
    numbers = [number for number, rows in enumerate(tables) for _ in rows]
    table = DataFrame([attrgetter(*own)(row) for rows in tables for row in rows], columns=own)
    table = table.astype({column: float for column in own if column not in NOT_NUMBERS})
    # A refresh has a damping of its own, which under `damping="auto"` is the only one.
    beside = [column for column in BESIDE if column not in own]
    configured = runs[beside].iloc[numbers].reset_index(drop=True)
    return pd.concat([table.assign(run=numbers), configured], axis=1)


def with_progress(runs: DataFrame, epochs: DataFrame) -> DataFrame:
    """Add how far each run came: epochs completed and its final train loss."""
    completed = epochs.groupby("run")["epoch"].max().reindex(runs.index, fill_value=0)
    return runs.assign(epochs_completed=completed, final_train_loss=final_train_losses(epochs))


def unfinished(runs: DataFrame) -> Iterator[str]:
    """Say of every run that did not come to its end how far it came."""
    # A run that finished above its start has been told of, and has no message.
    is_short = (runs["epochs_completed"] < runs["budget"]) | runs["message"].notna()
    for run in runs[(runs["status"] != "finished") & is_short].itertuples():
        reason = f" ({run.message})" if isinstance(run.message, str) else ""
        done = f"{run.epochs_completed:.0f} of {run.budget:.0f} epochs"
        yield f"{run.suite}/{run.task}/{run.label}/seed{run.seed}: {run.status} after {done}{reason}"


def missing_seeds(runs: DataFrame) -> Iterator[str]:
    """Say which seeds a label lacks that others of its task have; suites that search vary them on purpose."""
    searched = runs["suite"].isin(suites_of(SEARCHING))
    for (suite, task), group in runs[~searched].groupby(["suite", "task"]):
        seeds = set(group["seed"])
        for label, own in group.groupby("label")["seed"]:
            if absent := sorted(seeds - set(own)):
                numbers = ", ".join(str(seed) for seed in absent)
                yield f"{suite}/{task}/{label}: {len(own)} of {len(seeds)} seeds, without {numbers}"
