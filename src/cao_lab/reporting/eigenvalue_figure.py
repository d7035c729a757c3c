"""The figure of the largest eigenvalues over training, with the edge of stability."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from pandas import DataFrame

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import LARGEST_DRAWN
from cao_lab.reporting.figures import PLAIN_NUMBERS, drawable, plain, styled, title, x_label
from cao_lab.reporting.palette import in_order
from cao_lab.reporting.rates import stability_edge

MOST_LABELS = 7
LABEL_HEIGHT = 0.07
"""Share of a panel that a small label takes."""


@styled
def eigenvalue_figure(refreshes: DataFrame, largest: int = 6) -> Figure:
    """Draw λ₁ … λ_{k+1} over training, one panel a method, with the edge of stability dashed.

    Mean over seeds; the first eigenvalue that is not captured is grey. An edge exists for SGD and CAO alone. Where
    there are too many methods, those of the highest ranks are drawn.
    """
    order = in_order(refreshes)
    names = order.sort_values("rank", ascending=False, kind="stable")[:largest].sort_index()["name"]
    columns, rows = min(len(names), 3), -(-len(names) // 3)
    width, height = 3.3 * max(columns, 1.6), 2.3 * rows + 0.9
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.8 / width, right=1 - 0.35 / width, bottom=0.5 / height, top=1 - 0.6 / height, wspace=0.18, hspace=0.3
    )
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    scale_eigenvalues(grid.flat[0], refreshes[refreshes["name"].isin(names)]["eigenvalue"].to_numpy())
    for axes, name in zip(grid.flat, names, strict=False):
        draw_eigenvalues(axes, drawable(refreshes[refreshes["name"] == name], "eigenvalue"))
        axes.set_title(plain(name), fontsize=8.5)
    for place, axes in enumerate(grid.flat):
        axes.set_visible(place < len(names))
        # The last panel of a column that is not full has to show the epochs.
        axes.tick_params(labelbottom=place + columns >= len(names))
    figure.supxlabel(x_label(refreshes, "epoch"), fontsize=9)
    figure.supylabel("eigenvalue", fontsize=9)
    figure.suptitle(title(refreshes), x=0.01, ha="left", fontsize=10)
    return figure


def draw_eigenvalues(axes: Axes, rows: DataFrame) -> None:
    """Draw the eigenvalues of one method and the edge of stability."""
    shades = matplotlib.colormaps["plasma"]
    captured = rows["is_captured"].astype(bool)
    ends: list[tuple[float, str, Any]] = []
    for index, group in rows.groupby("index"):
        mean = group.groupby("epoch")["eigenvalue"].mean()
        number = float(str(index))
        colour = shades(min(0.9, 0.1 + 0.12 * (number - 1))) if captured[group.index].any() else "#9aa0a6"
        axes.plot(mean.index, mean, color=colour, linewidth=1.2, marker="." if len(mean) == 1 else "none")
        if np.isfinite(mean.iloc[-1]):
            ends.append((float(mean.iloc[-1]), f"λ{number:.0f}", colour))
    # Of many, the first two and the last two are enough to tell the others.
    label_ends(axes, ends if len(ends) <= MOST_LABELS else [*ends[:2], *ends[-2:]])
    # Automatic damping moves the edge at every refresh.
    edge = stability_edge(rows).groupby(rows["epoch"]).mean()
    if method_info(rows["optimizer"].iloc[0]).has_edge and np.isfinite(edge).all():
        dash: dict[str, Any] = {"color": "#444444", "linewidth": 0.9, "linestyle": (0, (4, 2))}
        axes.axhline(edge.iloc[0], **dash) if edge.nunique() == 1 else axes.plot(edge.index, edge, **dash)
        place, across = (0.02, edge.iloc[len(edge) // 2]), axes.get_yaxis_transform()
        behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5}
        axes.annotate(edge_name(rows), place, xycoords=across, fontsize=7, color="#444444", va="bottom", bbox=behind)
    if rows["epoch"].nunique() == 1:
        axes.set_xlim(-0.5, 1)


def edge_name(rows: DataFrame) -> str:
    """Return the formula of the edge: α is divided by η where P is as the paper writes it."""
    is_divided = rows["optimizer"].iloc[0] == "cao" and rows["scaling"].iloc[0] == "inverse-damping"
    return f"2{'η' if is_divided else ''}{'(1+β)' if rows['momentum'].iloc[0] > 0 else ''}/α"


def label_ends(axes: Axes, ends: list[tuple[float, str, Any]]) -> None:
    """Write the names of curves to the right of their ends, one above the other where they lie too close."""
    lowest = -np.inf
    for value, name, colour in sorted(ends, key=lambda end: end[0]):
        _, height = axes.transAxes.inverted().transform(axes.transData.transform((0.0, value)))
        lowest = max(float(height), lowest + LABEL_HEIGHT)
        axes.annotate(name, (1.02, lowest), xycoords="axes fraction", color=colour, fontsize=7, va="center")


def scale_eigenvalues(axes: Axes, eigenvalues: np.ndarray) -> None:
    """Choose a scale on which eigenvalues of all sizes and signs can be read, the limits with it."""
    found = eigenvalues[np.isfinite(eigenvalues) & (np.abs(eigenvalues) <= LARGEST_DRAWN)]
    sizes = np.abs(found) if found.size else np.ones(1)
    largest = max(float(sizes.max()), 1e-12)
    # Three decades up to the largest are told apart, fewer if all are large; what is smaller lies around zero.
    linear = 10.0 ** np.floor(np.log10(max(largest / 100, float(np.quantile(sizes, 0.02)))))
    axes.set_yscale("symlog", linthresh=linear, linscale=0.5)
    decades = linear * 10.0 ** np.arange(0, 6)
    ticks = [tick for tick in decades if tick <= 3 * largest]
    has_negative = found.min(initial=0.0) < -linear
    negative = [-tick for tick in ticks if has_negative and -tick >= 3 * found.min()]
    axes.set_ylim(1.5 * found.min() if has_negative else -linear / 2, 3 * largest)
    axes.yaxis.set_major_locator(FixedLocator([*negative, 0.0, *ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
