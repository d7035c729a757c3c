"""The figure of the largest eigenvalues over training, with the edge of stability."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogFormatterSciNotation, MaxNLocator, NullLocator
from pandas import DataFrame
from scipy.optimize import isotonic_regression

from cao_lab.facts import method_info
from cao_lab.reporting.figures import PLAIN_NUMBERS, drawable, plain, styled, title, x_label
from cao_lab.reporting.palette import in_order
from cao_lab.reporting.rates import stability_edge

MOST_LABELS = 7
LABEL_HEIGHT = 0.07
"""Share of a panel that a small label takes."""
LABEL_WIDTH = 0.78
"""Inches to the right of a panel that the name of an edge takes."""
MOST_TICKS = 8
ROUND_OFF = 1e-7
"""An eigenvalue that is smaller than the largest by this factor is none that float32 could know."""
AROUND_ZERO = 0.1
"""Share of the eigenvalues, the smallest, that may lie on the linear part of a scale with both signs."""


class End(NamedTuple):
    """Where a curve ends, and what to call it there."""

    epoch: float
    value: float
    name: str
    colour: Any


@styled
def eigenvalue_figure(refreshes: DataFrame, largest: int = 6) -> Figure:
    """Draw λ₁ … λ_{k+1} over training, one panel a method, with the edge of stability dashed.

    Mean over seeds; the first eigenvalue that is not captured is grey. An edge exists for SGD and CAO alone. Where
    there are too many methods, those of the highest ranks are drawn.
    """
    order = in_order(refreshes)
    names = order.sort_values("rank", ascending=False, kind="stable")[:largest].sort_index()["name"]
    shown = drawable(refreshes[refreshes["name"].isin(names)], "eigenvalue")
    columns, rows = min(len(names), 3), -(-len(names) // 3)
    figure, grid = panels(rows, columns)
    scale_eigenvalues(grid.flat[0], heights_drawn(shown))
    grid.flat[0].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axes, name in zip(grid.flat, names, strict=False):
        draw_eigenvalues(axes, shown[shown["name"] == name])
        axes.set_title(plain(name), fontsize=8.5)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
        # The last panel of a column that is not full has to show the epochs.
        axes.tick_params(labelbottom=place + columns >= len(names))
    figure.supxlabel(x_label(refreshes, "epoch"), fontsize=9)
    figure.supylabel("eigenvalue", fontsize=9)
    figure.suptitle(title(refreshes), x=0.01, ha="left", fontsize=10)
    return figure


def panels(rows: int, columns: int) -> tuple[Figure, np.ndarray]:
    """Return an empty figure of panels that share their axes, with room for names to the right of each."""
    width, height = 3.4 * max(columns, 1.6), 2.3 * rows + 0.9
    figure = Figure(figsize=(width, height))
    panel = (width - 0.8 - columns * LABEL_WIDTH) / columns
    figure.subplots_adjust(
        left=0.8 / width, right=1 - LABEL_WIDTH / width, bottom=0.5 / height, top=1 - 0.6 / height,
        wspace=LABEL_WIDTH / panel, hspace=0.3,
    )  # fmt: skip
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)


def heights_drawn(shown: DataFrame) -> Float64[np.ndarray, " n"]:
    """Return all heights that curves and edges have."""
    means = shown.groupby(["name", "index", "epoch"])["eigenvalue"].mean()
    edges = stability_edge(shown[shown["optimizer"].map(lambda name: method_info(name).has_edge)])
    heights = np.concatenate([means.to_numpy(float), edges.to_numpy(float)])
    return np.asarray(heights[np.isfinite(heights)], dtype=float)


def draw_eigenvalues(axes: Axes, rows: DataFrame) -> None:
    """Draw the eigenvalues of one method and the edge of stability."""
    shades = matplotlib.colormaps["plasma"]
    captured = rows["is_captured"].astype(bool)
    ends: list[End] = []
    for index, group in rows.groupby("index"):
        mean = group.groupby("epoch")["eigenvalue"].mean()
        number = float(str(index))
        colour = shades(min(0.9, 0.1 + 0.12 * (number - 1))) if captured[group.index].any() else "#9aa0a6"
        axes.plot(mean.index, mean, color=colour, linewidth=1.2, marker="." if len(mean) == 1 else "none")
        if np.isfinite(mean.iloc[-1]):
            ends.append(End(mean.index[-1], float(mean.iloc[-1]), f"λ{number:.0f}", colour))
    # Of many, the first two and the last two are enough to tell the others.
    labelled = ends if len(ends) <= MOST_LABELS else [*ends[:2], *ends[-2:]]
    label_ends(axes, [*labelled, *draw_edge(axes, rows)])
    if rows["epoch"].nunique() == 1:
        axes.set_xlim(-0.5, 1)


def draw_edge(axes: Axes, rows: DataFrame) -> list[End]:
    """Draw the edge of stability where there is one, and return its end."""
    # Automatic damping moves the edge at every refresh.
    edge = stability_edge(rows).groupby(rows["epoch"]).mean()
    if not (method_info(rows["optimizer"].iloc[0]).has_edge and np.isfinite(edge).all()):
        return []
    dash: dict[str, Any] = {"color": "#444444", "linewidth": 0.9, "linestyle": (0, (4, 2))}
    axes.axhline(edge.iloc[0], **dash) if edge.nunique() == 1 else axes.plot(edge.index, edge, **dash)
    return [End(edge.index[-1], float(edge.iloc[-1]), edge_name(rows), "#444444")]


def edge_name(rows: DataFrame) -> str:
    """Return the formula of the edge: α is divided by η where P is as the paper writes it."""
    is_divided = rows["optimizer"].iloc[0] == "cao" and rows["scaling"].iloc[0] == "inverse-damping"
    return f"2{'η' if is_divided else ''}{'(1+β)' if rows['momentum'].iloc[0] > 0 else ''}/α"


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write the names of curves to the right of their ends, with a thin line to each that had to give way."""
    low, high = axes.get_ylim()
    points = [(end.epoch, min(max(end.value, low), high)) for end in ends]
    into_panel = axes.transData + axes.transAxes.inverted()
    heights = [float(into_panel.transform(point)[1]) for point in points]
    # From the top; curves that the eye cannot tell apart keep the order of their names.
    order = sorted(range(len(ends)), key=lambda at: -round(heights[at], 2))
    for at, place in zip(order, spread_out([heights[at] for at in order]), strict=True):
        has_moved = abs(place - heights[at]) > LABEL_HEIGHT / 4
        leader = {"arrowstyle": "-", "color": ends[at].colour, "linewidth": 0.5, "shrinkA": 0.5, "shrinkB": 0}
        axes.annotate(
            ends[at].name, points[at], (1.05, place), textcoords="axes fraction", color=ends[at].colour, fontsize=7,
            va="center", arrowprops=leader if has_moved else None, annotation_clip=False,
        )  # fmt: skip


def spread_out(heights: Sequence[float]) -> Float64[np.ndarray, " n"]:
    """Return places for labels, from the top down and inside the panel, as near to their heights as labels allow."""
    steps = LABEL_HEIGHT * np.arange(len(heights))
    if not len(heights):
        return steps
    # The nearest places in a given order are an isotonic regression; it centres a stack on the curves it names.
    top = isotonic_regression(np.asarray(heights) + steps, increasing=False).x
    return np.clip(top, LABEL_HEIGHT / 2 + steps[-1], 1 - LABEL_HEIGHT / 2) - steps


def scale_eigenvalues(axes: Axes, heights: Float64[np.ndarray, " n"]) -> None:
    """Choose a scale on which eigenvalues of all sizes can be read, and signs if there are two; the limits with it."""
    sizes = np.abs(heights[heights != 0])
    largest = float(sizes.max(initial=0.0)) or 1.0
    if (heights > 0).all():
        low = max(float(heights.min(initial=largest)), ROUND_OFF * largest)
        # At least a decade, so that there are ticks to read a flat curve by.
        margin = max(1.5, float(np.sqrt(10 * low / largest)))
        axes.set(yscale="log", ylim=(low / margin, largest * margin))
        ticks = round_numbers(*axes.get_ylim())
    else:
        smallest = float(np.quantile(sizes, AROUND_ZERO)) if sizes.size else 1.0
        linear = 10.0 ** np.floor(np.log10(max(smallest, ROUND_OFF * largest)))
        axes.set_yscale("symlog", linthresh=linear, linscale=1.0)
        axes.set_ylim(min(3 * heights.min(), -linear), max(3 * heights.max(), linear))
        ticks = signed_powers(linear, *axes.get_ylim())
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    is_short = all(tick == 0 or 1e-3 <= abs(tick) <= 1e3 for tick in ticks)
    powers = LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(np.inf, np.inf))
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS if is_short else powers)


def round_numbers(low: float, high: float) -> list[float]:
    """Return the powers of ten between two positive numbers, few enough to be read; 2 and 5 with them where few."""
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    step = -(-len(decades) // MOST_TICKS)
    leads = (1, 2, 5) if high < 300 * low else (1,)
    ticks = [lead * 10.0**decade for decade in decades if decade % step == 0 for lead in leads]
    return [tick for tick in ticks if low <= tick <= high]


def signed_powers(linear: float, low: float, high: float) -> list[float]:
    """Return zero and the powers of ten on both sides of it, few enough to be read."""
    above, below = (max(0, int(np.floor(np.log10(max(end, linear) / linear) + 1e-9))) + 1 for end in (high, -low))
    step = -(-(above + below) // MOST_TICKS)
    powers = [linear * 10.0**decade for decade in range(step - 1, max(above, below), step)]
    return [tick for tick in (*(-power for power in reversed(powers)), 0.0, *powers) if low <= tick <= high]
