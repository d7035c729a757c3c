"""Saving the state of a run so that a kill, a power cut or a full disk at any instant leaves a whole checkpoint."""

import errno
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from cao_lab.log.writing import sync

State = dict[str, Any]
Restored = TypeVar("Restored")


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


def load(folder: Path, warn: Callable[[str], None], restore: Callable[[State], Restored]) -> Restored | None:
    """Return what `restore` makes of the newest whole checkpoint, or None if there is none.

    One that is damaged, or that `restore` finds incomplete, is reported and passed over.
    """
    for path in (current(folder), previous(folder)):
        if not path.exists():
            continue
        try:
            return restored(path, restore)
        except CheckpointError as error:
            warn(f"{error}; it is passed over")
    return None


def restored(path: Path, restore: Callable[[State], Restored]) -> Restored:
    """Return what `restore` makes of one checkpoint."""
    state = read(path)
    try:
        return restore(state)
    except torch.OutOfMemoryError:
        raise
    # What is missing or of another kind shows as one of these where it is used.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not whole ({in_one_line(error)})") from error


def read(path: Path) -> State:
    """Return the content of one checkpoint, every byte of it checked."""
    try:
        # torch.load skips the archive's checksums, so they are verified first.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    # Damage shows in as many ways as there are bytes; whatever it is, the file is of no use.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged ({in_one_line(error)})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged in {damaged}" if damaged else f"{path} is not a checkpoint of a run")
    return state


def to_bytes(state: State) -> bytes:
    """Return a state as it is sent to another process."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> State:
    """Return what `to_bytes` was given, on the CPU."""
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def forget_previous(folder: Path) -> None:
    """Remove the fallback of a finished run."""
    previous(folder).unlink(missing_ok=True)
