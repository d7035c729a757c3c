"""The figure of a solver's run: loss against what it was billed, and against time."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cao_lab.solvers.budget import Record


def convergence_figure(runs: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Draw the lowest loss of each run so far, over evaluations and over seconds; errors, if known, are dashed."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, runs, "billed")
    draw(right, runs, "seconds")
    left.set(xlabel="evaluations (products at their price)", ylabel="loss")
    right.set(xlabel="seconds")
    left.legend(frameon=False)
    figure.suptitle(title)
    return figure


def draw(axes: Axes, runs: Mapping[str, Sequence[Record]], spent: str) -> None:
    """Draw all runs over one measure of what was spent."""
    for name, records in runs.items():
        places = [getattr(record, spent) for record in records]
        (line,) = axes.plot(places, [record.loss for record in records], label=name)
        if any(record.error >= 0 for record in records):
            errors = [record.error for record in records]
            axes.plot(places, errors, linestyle="--", color=line.get_color(), label=f"{name}, relative error")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
