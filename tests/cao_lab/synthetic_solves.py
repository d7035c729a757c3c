"""Logs of solvers made up by a formula, for tests only: no number here was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = "evaluations,products,setups,billed,seconds,loss,error"
Row = tuple[float, float, float, float]
"""What was billed, seconds, loss and error."""


def write_solve(
    logs: Path, label: str, rows: Sequence[Row], *, task: str = "wave-3x20", seed: int = 1, **header: Any
) -> Path:
    """Write a run's folder as a contest would."""
    suite = header.get("suite", "scientific")
    folder = logs / suite / task / label / f"seed{seed}"
    folder.mkdir(parents=True)
    content = {
        "format": 1, "status": "finished", "suite": suite, "task": task, "label": label, "seed": seed,
        "budget": {"evaluations": 100.0, "seconds": 60.0}, "price": {"product": 0.5, "setup": 5.0},
        "parameters": 921, "ended": "spent", "git_commit": "0123abc",
    } | header  # fmt: skip
    (folder / "solve.json").write_text(json.dumps(content))
    lines = [f"{billed:.0f},0,0,{billed},{seconds},{loss},{error}" for billed, seconds, loss, error in rows]
    (folder / "records.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    return folder
