"""Pictures of the rules that set themselves: the edge by its formula, rank and cost as the suite robust has them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cao_lab.reporting.figures import styled
from cao_lab.reporting.robust import BASES, COLOURS, NAMES, Contest


@styled
def edge_figure() -> Figure:
    """Draw how fast a direction moves, α times its effective curvature, over what SGD makes of it, αλ."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = figure.add_subplot()
    sharpness = np.geomspace(0.01, 100, 200)
    axes.plot(sharpness, sharpness, "--", color=COLOURS["sgd"], label="outside the sketch, as in SGD: αλ")
    axes.plot(sharpness, sharpness / (1 + sharpness), color=COLOURS["cao"], label="captured: αλ / (1 + αλ)")
    for beta, style in ((0.0, ":"), (0.9, "-.")):
        edge = 2 * (1 + beta)
        axes.axhline(edge, color="#555555", linewidth=0.9, linestyle=style, label=f"edge 2(1 + β), β = {beta:g}")
    axes.axvspan(0.5, 100, color=COLOURS["cao"], alpha=0.06, label="where a direction is captured, αλ ≥ ½")
    axes.set(xscale="log", yscale="log", xlabel="αλ", ylabel="α × effective curvature", ylim=(0.01, 100))
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


@styled
def effort_figure(found: Sequence[Contest]) -> Figure:
    """Draw how many directions CAO captured at each rate, and how many products with the curvature it took for that."""
    figure = Figure(figsize=(9.6, 3.4 * len(BASES)))
    panels = figure.subplots(len(BASES), 2, squeeze=False)
    for row, method in zip(panels, BASES, strict=True):
        own = [contest for contest in found if contest.method == method]
        draw_by_rate(row[0], own, "captured", "most directions in use")
        draw_by_rate(row[1], own, "products", "products per step")
        row[0].set_title(NAMES[method], loc="left", fontsize=10)
    panels[0][1].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def draw_by_rate(axes: Axes, found: Sequence[Contest], quantity: str, label: str) -> None:
    """Draw a quantity of CAO's runs over the rate, a line for each problem, full lines for full and large batches."""
    for contest in found:
        style = "o--" if contest.kind == "mini" else "o-"
        rates = [rate.lr for rate in contest.ours]
        values = [getattr(rate, quantity) for rate in contest.ours]
        axes.plot(rates, values, style, markersize=3, label=f"{contest.problem} ({contest.kind} batch)")
    axes.set(xscale="log", xlabel="learning rate", ylabel=label, ylim=(0, None))
