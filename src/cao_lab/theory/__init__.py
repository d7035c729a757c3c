"""Every statement of docs/theory.md, checked numerically."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

import pandas as pd
import torch
from tqdm import tqdm

from cao_lab.theory import contraction, descent, edge, momentum, resonance, sketches, stability, stationarity
from cao_lab.theory.figures import draw_all

SECTIONS = {
    "descent": descent.rows,
    "stable range": stability.rows,
    "stationarity": stationarity.rows,
    "contraction": contraction.rows,
    "sketches": sketches.rows,
    "resonance": resonance.rows,
    "momentum": momentum.rows,
    "edge": edge.rows,
}

WORDS = ("statement", "problem")
"""Columns that can be long."""


def check_theory(logs: Path, out: Path) -> pd.DataFrame:
    """Check every statement, write `theory.csv` into the logs and the figures into `out`, and return the table."""
    rows = []
    with single_thread():
        for section in (bar := tqdm(SECTIONS, disable=None)):
            bar.set_description(section)
            rows += [asdict(row) for row in SECTIONS[section]()]
        draw_all(out)
    table = pd.DataFrame(rows)
    logs.mkdir(parents=True, exist_ok=True)
    table.to_csv(logs / "theory.csv", index=False, float_format="%.6g")
    return table


def shown(table: pd.DataFrame, logs: Path, width: int) -> str:
    """Return how many statements have which verdict, and then each of them, within so many columns."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in table["verdict"].value_counts().items())
    room = (width - 50) // 2
    short = table.assign(**{name: [shorten(text, room, placeholder="…") for text in table[name]] for name in WORDS})
    rows = short.to_string(index=False, float_format="{:.3g}".format)
    return f"{len(table)} statements: {counts}; see {logs / 'theory.csv'}\n{rows}"


@contextmanager
def single_thread() -> Iterator[None]:
    """Keep torch to one thread: matrices this small lose by more, and sums come out in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
