"""Reads logs back: what is not as the format says is refused in one line, here and nowhere else."""

import json
from pathlib import Path
from typing import Any

from cao_lab.log.records import LogError


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the content of a run.json, or None if there is none."""
    path = folder / "run.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise LogError(f"{path} cannot be read ({error}); move {folder} away to start afresh") from error
    if not isinstance(content, dict):
        raise LogError(f"{path} must hold an object, got {type(content).__name__}")
    return content
