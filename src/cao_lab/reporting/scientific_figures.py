"""Figures of full-batch solvers: the loss of every method on every problem, over evaluations and over seconds."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cao_lab.log.solves import SolveRun
from cao_lab.reporting.figures import plain, styled
from cao_lab.reporting.scientific import OURS, is_stalled, last, name
from cao_lab.reporting.scientific_tables import TITLES

STROKES = {
    OURS: ("#c2185b", "-", 2.2),
    "scipy-bfgs": ("#7b1fa2", "-", 1.2),
    "scipy-lbfgsb": ("#1565c0", "-", 1.6),
    "torch-lbfgs": ("#5c6bc0", "-", 1.2),
    "nncg": ("#00695c", "-", 1.2),
    "lbfgs-nncg": ("#00695c", (0, (4, 1.6)), 1.2),
    "soap": ("#827717", "-", 1.2),
    "adam": ("#2e8b57", "-", 1.2),
    "cao": ("#e64a19", "-", 1.2),
}
"""Colour, dash and width; methods without one are left to the tables."""
PLACES = 200
Spent = Literal["billed", "seconds"]
AXES = {"billed": "evaluations, products at their price", "seconds": "seconds"}


@styled
def loss_figure(runs: Sequence[SolveRun], spent: Spent) -> Figure:
    """Draw the lowest loss so far, one panel per problem; a line is the median over seeds."""
    tasks = sorted({run.task for run in runs})
    columns = min(len(tasks), 4)
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.5 * max(columns, 2), 2.1 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, task in zip(panels, tasks, strict=False):
        draw_panel(axes, [run for run in runs if run.task == task], spent)
        axes.set_title(plain(name(task)), fontsize=9)
    for axes in list(panels)[len(tasks) :]:
        axes.set_axis_off()
    figure.supxlabel(AXES[spent], fontsize=9)
    figure.supylabel("loss", fontsize=9)
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=5)
    return figure


def draw_panel(axes: Axes, runs: Sequence[SolveRun], spent: Spent) -> None:
    """Draw all methods of one problem."""
    for label, (colour, dash, width) in STROKES.items():
        begun = [run for run in runs if run.label == label and run.records]
        own = [run for run in begun if run.status == "finished"] or begun
        if own:
            places, losses = median_curve(own, spent)
            order = 3.0 if label == OURS else 2.0
            title = TITLES.get(label, label)
            axes.plot(places, losses, color=colour, linestyle=dash, linewidth=width, label=title, zorder=order)
    axes.set_yscale("log")
    # A stalled run is drawn for as long as others run, and not to the end of a budget that nobody needed.
    axes.set_xlim(0, max((getattr(last(run), spent) for run in runs if not is_stalled(run)), default=None))


def median_curve(runs: Sequence[SolveRun], spent: Spent) -> tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Return the median over runs of the lowest loss so far, up to where the first of them ends."""
    end = min(getattr(run.records[-1], spent) for run in runs)
    places = np.linspace(0, end, PLACES)
    curves = []
    for run in runs:
        seen = np.array([getattr(row, spent) for row in run.records])
        losses = np.array([row.loss for row in run.records])
        curves.append(losses[np.maximum(np.searchsorted(seen, places, side="right") - 1, 0)])
    return places, np.median(curves, axis=0)
