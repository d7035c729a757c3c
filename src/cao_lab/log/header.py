"""Reads the first record of a log, run.json: as it stands for a run that goes on, checked for a report."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from cao_lab.log.checks import count, folder_name, folder_path, mapping, number, one_line, text, wrong
from cao_lab.log.reading import UNREADABLE, read_json, read_rows, refused
from cao_lab.log.records import (
    FORMATS,
    KINDS,
    METHOD_SETTINGS,
    STATUSES,
    Kind,
    LogError,
    RunRecord,
    Setting,
    SolveRecord,
    SolveRun,
    Sweep,
    SweepRecord,
    label_part,
)

NAME = "run.json"
OLDER_NAMES: dict[str, Kind] = {"solve.json": "solver", "sweep.json": "sweep"}
"""What the header of some kinds was called in format 1."""
RECORDS: dict[Kind, str] = {"solver": "records.csv", "sweep": "losses.csv"}
"""Where the rows of these kinds are."""
OPTIMIZER_NUMBERS = ("lr", "momentum", "rank", "refresh_every")
OPTIMIZER_TEXTS = ("scaling", "sketch")

SHORT = 10
"""Digits that tell a commit from others."""
Checked = TypeVar("Checked")
Found = TypeVar("Found")


class OtherKindError(LogError):
    """A log of another kind of run than was asked for."""


def header_path(folder: Path) -> Path:
    """Return where the header of a log is, or would be."""
    older = (folder / name for name in OLDER_NAMES)
    return folder / NAME if (folder / NAME).exists() else next((path for path in older if path.exists()), folder / NAME)


def found_header(path: Path) -> dict[str, Any]:
    """Return the content of a header in the form of today, whatever its format."""
    header = mapping("its content", read_json(path))
    kind = OLDER_NAMES.get(path.name, "training")
    if path.name == "sweep.json":  # Written when the sweep was over, without the keys that all others had.
        suite = [*path.absolute().parents][:3][-1].name or "sweeps"
        place = {"suite": suite, "task": header.get("problem"), "label": "sweep"}
        header = {"format": 1, "status": "finished", **place, "batches": header.get("kind"), **header, "kind": kind}
    return header if "kind" in header else {**header, "kind": kind}


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the header of a log, or None if there is none."""
    path = header_path(folder)
    try:
        header = found_header(path)
        text("status", header.get("status"))
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise LogError(f"{folder}: {refused(path, error)}; move the folder away to start afresh") from error
    return header


def read_checked(folder: Path, kind: Kind, check: Callable[[dict[str, Any]], Found]) -> Found:
    """Return what a check makes of a header, which must be of a kind."""
    path = header_path(folder)
    try:
        header = found_header(path)
        if header["kind"] not in KINDS:
            raise wrong("kind", f"one of {', '.join(KINDS)}", header["kind"])
        if header["kind"] != kind:
            raise OtherKindError(f"{path.name} is of a run of kind {header['kind']}")
        return check(header)
    except FileNotFoundError as error:
        raise LogError(f"no {NAME}") from error
    except OtherKindError:
        raise
    except UNREADABLE as error:
        raise refused(path, error) from error


def read_run(folder: Path) -> RunRecord:
    """Return what a training run was, with every value checked that a report depends on."""
    return read_checked(folder, "training", run_record)


def read_solve(folder: Path) -> SolveRun:
    """Return the run of a solver, every value checked; a torn last line is dropped."""
    records = tuple(read_rows(folder / RECORDS["solver"], SolveRecord).records)
    return read_checked(folder, "solver", lambda header: solve_run(header, records))


def read_sweep(folder: Path) -> Sweep:
    """Return a sweep over rates, every value checked."""
    records = tuple(read_rows(folder / RECORDS["sweep"], SweepRecord).records)
    return read_checked(folder, "sweep", lambda header: sweep_of(header, records))


def read_all(folder: Path, read: Callable[[Path], Found], missing: list[str]) -> list[Found]:
    """Return all logs of a suite that can be read; a damaged one costs itself and a sentence."""
    found = []
    names = (NAME, *OLDER_NAMES)
    for path in sorted({path.parent for name in names for path in folder.glob(f"**/seed*/{name}")}):
        try:
            found.append(read(path))
        except OtherKindError:
            continue
        except LogError as error:
            missing.append(one_line(f"{path.relative_to(folder.parent).as_posix()}: {error}, left out"))
    return found


def read_sweeps(folder: Path, missing: list[str]) -> list[Sweep]:
    """Return all sweeps of a suite that are over."""
    return [sweep for sweep in read_all(folder, read_sweep, missing) if sweep.status == "finished"]


def common(header: dict[str, Any]) -> dict[str, Any]:
    """Check what all headers have."""
    if header.get("format") not in FORMATS:
        raise wrong("format", " or ".join(str(one) for one in FORMATS), header.get("format"))
    if header.get("status") not in STATUSES:
        raise wrong("status", f"one of {', '.join(STATUSES)}", header.get("status"))
    return {
        "status": header["status"],
        "suite": folder_path("suite", header.get("suite")),
        "task": folder_name("task", header.get("task")),
        "label": folder_name("label", header.get("label")),
        "seed": count("seed", header.get("seed")),
        "git_commit": optional(text, "git_commit", header.get("git_commit")),
    }


def run_record(header: dict[str, Any]) -> RunRecord:
    """Check the header of a training run; a key that is not there is None."""
    shared, config = common(header), mapping("config", header.get("config"))
    optimizer = optimizer_settings(mapping("config.optimizer", config.get("optimizer")))
    method = {name: setting(f"config.{name}", config.get(name)) for name in METHOD_SETTINGS}
    return RunRecord(
        **shared,
        epochs=count("config.epochs", config.get("epochs"), at_least=1),
        curvature=optional(text, "config.curvature", config.get("curvature")),
        optimizer=optimizer,
        changed=changed_settings(shared["label"], optimizer | method),
        steps_per_epoch=optional(count, "steps_per_epoch", header.get("steps_per_epoch")),
        command=optional(text, "command", header.get("command")),
        versions=versions(optional(mapping, "versions", header.get("versions")) or {}),
        commits=commits(header),
        device=optional(text, "device", header.get("device")),
        message=optional(message, "message", header.get("message")),
    )


def solve_run(header: dict[str, Any], records: tuple[SolveRecord, ...]) -> SolveRun:
    """Check the header of a solver's run."""
    price, budget = mapping("price", header.get("price")), mapping("budget", header.get("budget"))
    seconds = optional(number, "budget.seconds", budget.get("seconds"))
    is_timed = seconds is not None and budget.get("evaluations") is None
    return SolveRun(
        **common(header),
        evaluations=inf if is_timed else number("budget.evaluations", budget.get("evaluations")),
        seconds=inf if seconds is None else seconds,
        parameters=count("parameters", header.get("parameters"), at_least=1),
        price=number("price.product", price.get("product")),
        setup_price=number("price.setup", price.get("setup")),
        ended=optional(text, "ended", header.get("ended")),
        records=records,
    )


def sweep_of(header: dict[str, Any], records: tuple[SweepRecord, ...]) -> Sweep:
    """Check the header of a sweep."""
    return Sweep(
        **common(header),
        batches=folder_name("batches", header.get("batches")),
        steps=count("steps", header.get("steps"), at_least=1),
        records=records,
    )


def optimizer_settings(found: dict[str, Any]) -> dict[str, Setting]:
    """Check the settings of an optimizer."""
    settings = {text("a setting", name): setting(f"config.optimizer.{name}", value) for name, value in found.items()}
    text("config.optimizer.name", settings.get("name"))
    for name in OPTIMIZER_NUMBERS:
        optional(number, f"config.optimizer.{name}", settings.get(name))
    for name in OPTIMIZER_TEXTS:
        optional(text, f"config.optimizer.{name}", settings.get(name))
    # Of runs from before it was retired.
    if settings.get("damping") != "auto":
        optional(number, "config.optimizer.damping", settings.get("damping"))
    return settings


def changed_settings(label: str, settings: dict[str, Setting]) -> dict[str, Setting]:
    """Return the settings that a label names: those that were not the defaults when the run was made."""
    return {name: value for name, value in settings.items() if f"-{label_part(name, value)}-" in f"-{label}-"}


def setting(name: str, value: Any) -> Setting:
    """Return a text, a finite number, a truth value or nothing."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(name, value)
    number(name, value)
    return value  # type: ignore[no-any-return]  # a whole number stays one


def commits(header: dict[str, Any]) -> tuple[str, ...]:
    """Return the code that a run began on and was resumed on, each commit once."""
    resumed = header.get("resumed") or []
    if not isinstance(resumed, list):
        raise wrong("resumed", "a list", resumed)
    found = [header.get("git_commit"), *(mapping("resumed", one).get("git_commit") for one in resumed)]
    return tuple(dict.fromkeys(text("git_commit", one)[:SHORT] for one in found if one is not None))


def versions(found: dict[str, Any]) -> dict[str, str]:
    """Check the versions of what a run was carried out with."""
    return {text("versions", name): text("versions", version) for name, version in found.items()}


def optional(check: Callable[[str, Any], Checked], name: str, value: Any) -> Checked | None:
    """Check a value that older logs may lack."""
    return None if value is None else check(name, value)


def message(name: str, value: Any) -> str:
    """Return in one line why a run failed, which may have been said in several."""
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return one_line(value)
