"""A folder of logs as tables: what ran, what every epoch gave, and what is missing or broken."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from cao_lab.protocol import PROBING_SUITES, final_train_losses

FORMAT = 1
RUN_KEY = ["suite", "task", "label", "seed"]
ENDED = ("finished", "diverged")
EPOCH_COLUMNS = [
    "epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "train_seconds",
    "peak_memory_mib", "peak_memory_source", "gradient_evaluations", "hessian_products", "refreshes",
]  # fmt: skip
REFRESH_COLUMNS = [
    "step", "epoch", "index", "eigenvalue", "residual", "is_captured", "damping", "hessian_products",
]  # fmt: skip
OPTIMIZER_FIELDS = {
    "name": "optimizer", "lr": "base_lr", "momentum": "momentum", "rank": "rank", "damping": "damping",
    "refresh_every": "refresh_every", "scaling": "scaling", "sketch": "sketch", "nesterov": "nesterov",
}  # fmt: skip
CONFIG_FIELDS = {"dataset": "dataset", "model": "model", "epochs": "budget", "curvature": "curvature"}
NUMBERS = ["seed", "base_lr", "momentum", "rank", "damping", "refresh_every", "budget", "steps_per_epoch"]


BESIDE = [
    *RUN_KEY, "name", "status", "has_ended", "budget", "optimizer", "base_lr", "momentum", "rank", "damping",
    "refresh_every", "scaling", "sketch", "curvature", "steps_per_epoch",
]  # fmt: skip
TEXTS = ("peak_memory_source", "is_captured")
NAMES = {
    "cao": "CAO", "sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lbfgs": "L-BFGS", "adahessian": "AdaHessian",
    "soap": "SOAP", "muon": "Muon",
}  # fmt: skip


class ReportError(Exception):
    """Nothing to report on, said in one line."""


@dataclass(frozen=True)
class Logs:
    """Everything that a folder of logs holds."""

    runs: DataFrame
    """One row a run: its path, configuration, provenance and state."""
    epochs: DataFrame
    """One row an epoch of a run, with the run's columns repeated, and `seconds` since its start."""
    refreshes: DataFrame
    """One row an eigenvalue, with the run's columns repeated."""
    theory: DataFrame
    bench: DataFrame
    missing: tuple[str, ...]
    """One sentence for everything that is not as it should be."""


def load_logs(folder: Path) -> Logs:
    """Read every run below a folder; a damaged run costs itself and a sentence, never the report."""
    missing: list[str] = []
    found = [run for path in run_folders(folder) if (run := load_run(path, folder, missing)) is not None]
    if not found:
        hint = f" ({missing[0]})" if missing else ""
        raise ReportError(f"no runs in {folder}{hint}: run `cao suite demo` first, or name another folder")
    found.sort(key=lambda run: [run.row[key] for key in RUN_KEY])
    found = list(without_copies(found, missing))
    runs = DataFrame([run.row for run in found])
    runs["name"] = display_names(runs)
    runs[NUMBERS] = runs[NUMBERS].apply(pd.to_numeric, errors="coerce")
    epochs = stacked([run.epochs for run in found], EPOCH_COLUMNS, runs)
    epochs["seconds"] = epochs.groupby("run")["train_seconds"].cumsum()
    runs = with_progress(runs, epochs)
    missing += [*unfinished(runs), *missing_seeds(runs)]
    refreshes = stacked([run.refreshes for run in found], REFRESH_COLUMNS, runs)
    theory, bench = load_theory(folder, missing), load_bench(folder, missing)
    return Logs(runs, epochs, refreshes, theory, bench, tuple(missing))


def load_runs(folder: Path) -> DataFrame:
    """Return the tidy table of all runs: one row an epoch, with the run's configuration beside it."""
    return load_logs(folder).epochs


def run_folders(folder: Path) -> list[Path]:
    """Return the folders below that hold a part of a run, in a fixed order."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: name the one that holds the logs")
    return sorted({path.parent for name in ("run.json", "epochs.csv") for path in folder.rglob(name)})


@dataclass(frozen=True)
class RunFiles:
    """One run as its files tell it, numbers still text."""

    name: str
    """Its folder."""
    row: dict[str, Any]
    epochs: list[list[str]]
    refreshes: list[list[str]]


def load_run(path: Path, folder: Path, missing: list[str]) -> RunFiles | None:
    """Return what a run's folder holds, or nothing if what the run was cannot be known."""
    name = path.relative_to(folder).as_posix()
    try:
        row = run_row(json.loads((path / "run.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        missing.append(f"{name}: no run.json, left out")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        missing.append(f"{name}: run.json cannot be read ({error or type(error).__name__}), left out")
    else:
        epochs = load_rows(path / "epochs.csv", EPOCH_COLUMNS, name, missing)
        if row["status"] == "finished" and [one[0] for one in epochs] != [str(n + 1) for n in range(row["budget"])]:
            row["has_ended"] = False
            missing.append(
                f"{name}: finished, but epochs.csv is not whole ({len(epochs)} of {row['budget']} epochs), left out"
            )
        return RunFiles(name, row, epochs, load_rows(path / "refreshes.csv", REFRESH_COLUMNS, name, missing))
    return None


def without_copies(runs: Iterable[RunFiles], missing: list[str]) -> Iterator[RunFiles]:
    """Yield each run once: the copy of a run, in a backup say, is no further seed."""
    seen: dict[tuple[Any, ...], str] = {}
    for run in runs:
        key = tuple(run.row[column] for column in RUN_KEY)
        if key in seen:
            missing.append(f"{run.name}: the same run as {seen[key]}, left out")
        else:
            seen[key] = run.name
            yield run


def run_row(header: dict[str, Any]) -> dict[str, Any]:
    """Flatten run.json into one row; fields of other optimizers are empty."""
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, this reader knows {FORMAT}")
    config, optimizer = header["config"], header["config"]["optimizer"]
    row = {key: header[key] for key in RUN_KEY} | {"seed": int(header["seed"]), "status": header["status"]}
    row |= {column: optimizer.get(field) for field, column in OPTIMIZER_FIELDS.items()}
    row |= {column: config.get(field) for field, column in CONFIG_FIELDS.items()}
    # A CAO log from before a control existed means the control's neutral value.
    if row["optimizer"] == "cao":
        row |= {"sketch": row["sketch"] or "top", "momentum": row["momentum"] or 0.0}
    for key in ("command", "git_commit", "device", "threads", "message", "parameters", "steps_per_epoch"):
        row[key] = header.get(key)
    row["versions"] = ", ".join(f"{name} {version}" for name, version in (header.get("versions") or {}).items())
    return row | {"has_ended": header["status"] in ENDED}


def display_names(runs: DataFrame) -> list[str]:
    """Return what to call each run's method: its label without the fields that its siblings share.

    Siblings are the runs of the same optimizer on the same task; CAO always keeps its rank.
    """
    # A field starts with its name, followed by `=` or a digit: `sketch=projected-out` and `lr1e-05` stay whole.
    fields = [re.split(r"-(?=[a-z_]+(?:=|\d))", str(label))[1:] for label in runs["label"]]
    siblings = [tuple(key) for key in runs[["suite", "task", "optimizer"]].to_numpy()]
    names = []
    for own, key, optimizer in zip(fields, siblings, runs["optimizer"], strict=True):
        shared = set.intersection(*(set(other) for other, its in zip(fields, siblings, strict=True) if its == key))
        rank = [f"k={field.removeprefix('rank')}" for field in own if re.fullmatch(r"rank\d+", field)]
        kept = [spelled(field) for field in own if field not in shared and not re.fullmatch(r"rank\d+", field)]
        names.append(" ".join([NAMES.get(str(optimizer), str(optimizer)), *rank]) + "".join(f", {one}" for one in kept))
    return names


def spelled(field: str) -> str:
    """Return `sketch=random` as "sketch random" and `lr0.1` as "lr 0.1"."""
    return re.sub(r"^([a-z_]+)=?", lambda match: match[1].replace("_", " ") + " ", field)


def load_rows(path: Path, columns: list[str], name: str, missing: list[str]) -> list[list[str]]:
    """Read a CSV of which the last line may be torn, which is dropped: its last number may lack digits."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    whole, _, rest = text.rpartition("\n")
    if rest:
        missing.append(f"{name}: the last line of {path.name} is torn, dropped")
    header, *rows = csv.reader(whole.splitlines()) if whole else [[]]
    places = [header.index(column) if column in header else len(header) for column in columns]
    return [[[*row, ""][place] for place in places] for row in rows if len(row) == len(header)]


def stacked(tables: list[list[list[str]]], columns: list[str], runs: DataFrame) -> DataFrame:
    """Stack the runs' rows, make them numbers, and put each run's number (`run`) and configuration beside them."""
    numbers = [number for number, rows in enumerate(tables) for _ in rows]
    table = DataFrame([row for rows in tables for row in rows], columns=columns)
    for column in columns:
        if column not in TEXTS:
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
    # A refresh has a damping of its own, which under `damping="auto"` is the only one.
    beside = [column for column in BESIDE if column not in columns]
    configured = runs[beside].iloc[numbers].reset_index(drop=True)
    return pd.concat([table.assign(run=numbers), configured], axis=1).dropna(subset="epoch", ignore_index=True)


def with_progress(runs: DataFrame, epochs: DataFrame) -> DataFrame:
    """Add how far each run came: epochs completed and its final train loss."""
    completed = epochs.groupby("run")["epoch"].max().reindex(runs.index, fill_value=0)
    return runs.assign(epochs_completed=completed, final_train_loss=final_train_losses(epochs))


def unfinished(runs: DataFrame) -> Iterator[str]:
    """Say of every run that did not come to its end how far it came."""
    for run in runs[runs["status"] != "finished"].itertuples():
        reason = f" ({run.message})" if isinstance(run.message, str) else ""
        done = f"{run.epochs_completed:.0f} of {run.budget:.0f} epochs"
        yield f"{run.suite}/{run.task}/{run.label}/seed{run.seed}: {run.status} after {done}{reason}"


def missing_seeds(runs: DataFrame) -> Iterator[str]:
    """Say which seeds a label lacks that others of its task have; suites that search vary them on purpose."""
    searched = runs["suite"].isin(PROBING_SUITES)
    for (suite, task), group in runs[~searched].groupby(["suite", "task"]):
        seeds = set(group["seed"])
        for label, own in group.groupby("label")["seed"]:
            if absent := sorted(seeds - set(own)):
                numbers = ", ".join(str(seed) for seed in absent)
                yield f"{suite}/{task}/{label}: {len(own)} of {len(seeds)} seeds, without {numbers}"


def load_theory(folder: Path, missing: list[str]) -> DataFrame:
    """Return the theory's table, empty if `cao theory` has not been run."""
    return read_beside(folder / "theory.csv", pd.read_csv, missing)


def load_bench(folder: Path, missing: list[str]) -> DataFrame:
    """Return the benchmark's rows, empty if `cao bench` has not been run."""
    return read_beside(folder / "bench.json", read_bench, missing)


def read_bench(path: Path) -> DataFrame:
    """Return the rows that have a name and a value."""
    rows = DataFrame(json.loads(path.read_text(encoding="utf-8")))
    if not {"name", "value"} <= set(rows.columns):
        raise ValueError("its rows have no name and value")
    return rows.assign(value=pd.to_numeric(rows["value"])).dropna(subset="value")


def read_beside(path: Path, read: Callable[[Path], DataFrame], missing: list[str]) -> DataFrame:
    """Read a table that lies beside the runs; one that is not there is empty, a broken one costs a sentence."""
    if not path.exists():
        return DataFrame()
    try:
        return read(path)
    except (ValueError, TypeError) as error:
        missing.append(f"{path.name} cannot be read ({error}), left out")
        return DataFrame()
