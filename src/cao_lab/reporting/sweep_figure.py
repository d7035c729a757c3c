"""The figure of a sweep over damping and refresh interval, beside rank 0 at the same rates."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from pandas import DataFrame

from cao_lab.reporting.analysis import Goal, sensitivity
from cao_lab.reporting.figures import PLAIN_NUMBERS, styled, title
from cao_lab.reporting.palette import CONTROLS, CURVED

BESIDE = 0.02
"""Decades between two curves, so that their bars can be told apart."""


@styled
def sweep_figure(epochs: DataFrame, goal: Goal) -> Figure:
    """Draw epochs to the threshold and final train loss over damping, mean and standard deviation over seeds."""
    cells = sensitivity(epochs, goal.hits)
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_cells(left, cells, "crossing_epoch", f"epochs to train loss {goal.loss:.4g}")
    draw_cells(right, cells, "train_loss", "final train loss")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title(epochs), x=0.01, ha="left", fontsize=10)
    return figure


def draw_cells(axes: Axes, cells: DataFrame, column: str, name: str) -> None:
    """Draw one quantity over damping: a curve for each refresh interval, and a dashed one for rank 0."""
    for place, ((rank, interval), rows) in enumerate(cells.groupby(["rank", "refresh_every"])):
        by_damping = rows.groupby("damping")[column]
        spread = by_damping.std().fillna(0.0)
        told = f"CAO k={rank:.0f}, m = {interval:.0f}" if rank else "CAO k=0, no curvature"
        colour = CURVED[(place - 1) % len(CURVED)] if rank else CONTROLS[0]
        axes.errorbar(
            spread.index * 10 ** (BESIDE * place), by_damping.mean(), yerr=spread, label=told, color=colour,
            marker="o", markersize=4, capsize=2, linestyle="-" if rank else "--",
        )  # fmt: skip
    dampings = sorted(cells["damping"].unique())
    axes.set(xscale="log", xlabel="damping η", ylabel=name)
    axes.set_xticks(dampings, [f"{damping:g}" for damping in dampings])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
