"""How a table is written: cells for people as Markdown and LaTeX, numbers for programs as CSV."""

import math
from dataclasses import dataclass
from pathlib import Path

from pandas import DataFrame

NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Table:
    """A table twice: as text for people, as numbers for programs."""

    name: str
    caption: str
    cells: DataFrame
    numbers: DataFrame


def spread(mean: float, std: float, count: int, seeds: int, digits: int = 2) -> str:
    """Return "mean ± std", a single seed marked †, fewer seeds than there should be said."""
    if count == 0:
        return f"{NOT_REACHED} (0 of {seeds} seeds)"
    text = f"{mean:.{digits}f}†" if count == 1 else f"{mean:.{digits}f} ± {std:.{digits}f}"
    return text if count == seeds else f"{text} ({count} of {seeds} seeds)"


def ratio(center: float, low: float, high: float) -> str:
    """Return a ratio with its interval, or a dash where there is no pair to take one of, or one of nothing."""
    if not 0 < center < math.inf:
        return "–"
    return f"{center:.2f}×†" if math.isnan(low) else f"{center:.2f}× [{low:.2f}, {high:.2f}]"


def markdown(cells: DataFrame) -> str:
    """Return a table as Markdown; a bar inside a cell is escaped."""
    rows = [list(cells.columns), ["---"] * cells.shape[1], *cells.astype(str).to_numpy().tolist()]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def captioned(table: Table) -> str:
    """Return a table as Markdown below its caption."""
    return f"{table.caption}\n\n{markdown(table.cells)}"


LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "{": r"\{", "}": r"\}", "$": r"\$",
    "±": r"$\pm$", "×": r"$\times$", "†": r"$^{\dagger}$", "η": r"$\eta$", "α": r"$\alpha$", "–": "--", "≤": r"$\le$",
    "λ": r"$\lambda$", "−": "$-$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
})  # fmt: skip


def latex(table: Table) -> str:
    """Return a table as LaTeX with booktabs."""

    def line(cells: list[str]) -> str:
        return " & ".join(cell.translate(LATEX) for cell in cells) + r" \\"

    body = [line([str(cell) for cell in row]) for row in table.cells.to_numpy().tolist()]
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{table.caption.translate(LATEX)}}}",
        rf"\begin{{tabular}}{{{'l' * table.cells.shape[1]}}}", r"\toprule", line(list(table.cells.columns)),
        r"\midrule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_table(table: Table, folder: Path) -> None:
    """Write a table three times: Markdown and LaTeX for people, CSV with the numbers behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.name}.md").write_text(captioned(table), encoding="utf-8")
    (folder / f"{table.name}.tex").write_text(latex(table), encoding="utf-8")
    table.numbers.to_csv(folder / f"{table.name}.csv", index=False, lineterminator="\n", float_format="%.10g")


def short(value: float) -> str:
    """Return a number with two digits: 0.25, 3.1, 240, 2.4e-7."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    if value == 0 or 0.01 <= abs(value) < 99.5:
        return f"{value:.2g}"
    if 99.5 <= abs(value) < 1000:
        return f"{value:.0f}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"
