"""Every statement of docs/theory.md, checked by numbers."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cao_lab.theory import contraction, descent, sketches, stability, stationarity
from cao_lab.theory.figures import draw_all

SECTIONS = {
    "descent": descent.rows,
    "stable range": stability.rows,
    "stationarity": stationarity.rows,
    "contraction": contraction.rows,
    "sketches": sketches.rows,
}


def check_theory(logs: Path, out: Path) -> pd.DataFrame:
    """Check every statement, write `theory.csv` into the logs and the figures into `out`, and return the table."""
    rows = []
    for section in (bar := tqdm(SECTIONS, disable=None)):
        bar.set_description(section)
        rows += [asdict(row) for row in SECTIONS[section]()]
    table = pd.DataFrame(rows)
    logs.mkdir(parents=True, exist_ok=True)
    table.to_csv(logs / "theory.csv", index=False, float_format="%.6g")
    draw_all(out)
    return table
