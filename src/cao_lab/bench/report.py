"""What a benchmark leaves behind: rows as JSON, a table to read, a figure to look at."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure

from cao_lab.bench.rows import Row
from cao_lab.bench.task import device
from cao_lab.runs.provenance import circumstances, now

REACHED, MISSED = "#009e73", "#d55e00"
FARTHEST = 4.0
"""Times its target at which a value is drawn at the latest."""


def write_rows(rows: Sequence[Row], out: Path) -> None:
    """Write bench.json into a folder."""
    text = json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)
    (out / "bench.json").write_text(text + "\n", encoding="utf-8")


def write_summary(rows: Sequence[Row], out: Path, title: str) -> None:
    """Write bench.md and bench.png into the same folder."""
    (out / "bench.md").write_text(f"# {title}\n\n{when_and_with_what()}\n\n{table(rows)}", encoding="utf-8")
    target_figure(rows, title).savefig(out / "bench.png", dpi=150)


def when_and_with_what() -> str:
    """Return the circumstances of the benchmark in a sentence."""
    found = circumstances(device())
    tools = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    commit = (found["git_commit"] or "unknown")[:12]
    return f"{now()}, {found['device']}, {found['threads']} threads, {tools}, commit {commit}."


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| name | value | target | spread | samples | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.name, with_unit(row), verdict(row), short(row.spread), str(row.samples), row.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_unit(row: Row) -> str:
    """Return the value with its unit, unless that is a mere ratio."""
    return short(row.value) if row.unit == "ratio" else f"{short(row.value)} {row.unit}"


def verdict(row: Row) -> str:
    """Return the target and whether it is reached."""
    return "–" if row.target is None else f"≤ {short(row.target)} {'✓' if row.is_reached else '✗'}"


def short(number: float | None) -> str:
    """Return a number in four digits, a dash for none."""
    return "–" if number is None else f"{number:.4g}"


def target_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw every value over its target: left of the line is reached; what lies too far right stands at the edge."""
    judged = [row for row in rows if row.target]
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(judged)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(judged):
        target, colour = row.target or 1.0, REACHED if row.is_reached else MISSED
        x = min(row.value / target, FARTHEST)
        axes.errorbar(x, place, xerr=(row.spread or 0.0) / 2 / target, fmt="o", color=colour)
        # On a ground of its own, or the line of the target would cross it.
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.annotate(
            with_unit(row), (x, place), (6, 3), textcoords="offset points", fontsize=7, color=colour, bbox=ground
        )
    axes.axvline(1, color="#444444", linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    names = [f"{row.name.replace('_', ' ')}  ≤ {short(row.target)}" for row in judged]
    axes.set_yticks(range(len(judged)), names, fontsize=7)
    axes.set_ylim(len(judged) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    axes.set(xlabel="value / target, bars: interquartile range", title=title)
    return figure
