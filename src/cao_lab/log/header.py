"""Reads run.json: as it stands for the run that goes on, checked for the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cao_lab.log.checks import count, folder_name, folder_path, mapping, number, one_line, text, wrong
from cao_lab.log.reading import UNREADABLE, read_json, refused
from cao_lab.log.records import FORMAT, METHOD_SETTINGS, STATUSES, LogError, RunRecord, Setting, label_part

OPTIMIZER_NUMBERS = ("lr", "momentum", "rank", "refresh_every")
OPTIMIZER_TEXTS = ("scaling", "sketch")

SHORT = 10
"""Digits that tell a commit from others."""
Checked = TypeVar("Checked")


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the content of a run.json, or None if there is none."""
    path = folder / "run.json"
    try:
        header = mapping("its content", read_json(path))
        text("status", header.get("status"))
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise LogError(f"{folder}: {refused(path, error)}; move the folder away to start afresh") from error
    return header


def read_run(folder: Path) -> RunRecord:
    """Return what a run was, with every value checked that a report depends on."""
    path = folder / "run.json"
    try:
        return run_record(mapping("its content", read_json(path)))
    except FileNotFoundError as error:
        raise LogError("no run.json") from error
    except UNREADABLE as error:
        raise refused(path, error) from error


def run_record(header: dict[str, Any]) -> RunRecord:
    """Check the values of run.json; a key that is not there is None."""
    if header.get("format") != FORMAT:
        raise wrong("format", str(FORMAT), header.get("format"))
    if header.get("status") not in STATUSES:
        raise wrong("status", f"one of {', '.join(STATUSES)}", header.get("status"))
    config = mapping("config", header.get("config"))
    label = folder_name("label", header.get("label"))
    optimizer = optimizer_settings(mapping("config.optimizer", config.get("optimizer")))
    method = {name: setting(f"config.{name}", config.get(name)) for name in METHOD_SETTINGS}
    return RunRecord(
        status=header["status"],
        suite=folder_path("suite", header.get("suite")),
        task=folder_name("task", header.get("task")),
        label=label,
        seed=count("seed", header.get("seed")),
        epochs=count("config.epochs", config.get("epochs"), at_least=1),
        curvature=optional(text, "config.curvature", config.get("curvature")),
        optimizer=optimizer,
        changed=changed_settings(label, optimizer | method),
        steps_per_epoch=optional(count, "steps_per_epoch", header.get("steps_per_epoch")),
        command=optional(text, "command", header.get("command")),
        versions=versions(optional(mapping, "versions", header.get("versions")) or {}),
        git_commit=optional(text, "git_commit", header.get("git_commit")),
        commits=commits(header),
        device=optional(text, "device", header.get("device")),
        message=optional(message, "message", header.get("message")),
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
