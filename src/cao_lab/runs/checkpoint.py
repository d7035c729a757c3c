"""Saving the state of a run so that a kill, a power cut or a full disk at any instant leaves a whole checkpoint."""

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cao_lab.log.writing import sync

State = dict[str, Any]


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read."""


def current(folder: Path) -> Path:
    """Return where the newest checkpoint of a run is."""
    return folder / "checkpoint.pt"


def previous(folder: Path) -> Path:
    """Return where the one before it is."""
    return folder / "checkpoint.previous.pt"


def save(state: State, folder: Path) -> None:
    """Write a checkpoint beside the old one, and let it take the old one's place only when it is whole."""
    temporary = folder / "checkpoint.pt.new"
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
        sync(temporary)
    # A full disk reaches us as OSError from the file or as RuntimeError from torch's writer.
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        reason = "the disk is full" if is_full else str(error).splitlines()[0]
        raise CheckpointError(
            f"cannot write a checkpoint to {folder}: {reason}; the one before it is intact, "
            "make room and start the same command again"
        ) from error
    if current(folder).exists():
        current(folder).replace(previous(folder))
    temporary.replace(current(folder))
    sync(folder)


def load(folder: Path, warn: Callable[[str], None]) -> State | None:
    """Return the newest whole checkpoint, or None if there is none; a damaged one is reported and passed over."""
    for path in (current(folder), previous(folder)):
        if not path.exists():
            continue
        try:
            return read(path)
        except CheckpointError as error:
            warn(f"{error}; it is passed over")
    return None


def read(path: Path) -> State:
    """Return the content of one checkpoint, every byte of it checked."""
    try:
        # torch.load skips the archive's checksums, so they are verified first.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged in {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    # Damage shows in as many ways as there are bytes; whatever it is, the file is of no use.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint of a run")
    return state


def forget_previous(folder: Path) -> None:
    """Remove the fallback of a finished run."""
    previous(folder).unlink(missing_ok=True)
