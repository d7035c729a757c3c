"""The figure of a solver's run: loss against what it was billed, and against time."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, log10

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cao_lab.solvers.budget import Record

FEW = 20


def convergence_figure(runs: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Draw the lowest loss of each run so far, over evaluations and over seconds.

    Errors, if known, are dashed, and losses at points held out dotted. The scale is logarithmic; if there is a
    zero it is linear below the smallest number that is not, and if a loss is negative it is linear everywhere.
    """
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw(left, runs, "billed")
    draw(right, runs, "seconds")
    left.set(xlabel="evaluations (products at their price)")
    set_scale(left, [value for records in runs.values() for record in records for value in drawn(record)])
    right.set(xlabel="seconds")
    right.locator_params(axis="x", nbins=5)
    left.legend(frameon=False)
    figure.suptitle(title)
    return figure


def draw(axes: Axes, runs: Mapping[str, Sequence[Record]], spent: str) -> None:
    """Draw all runs over one measure of what was spent."""
    for name, records in runs.items():
        places = [getattr(record, spent) for record in records]
        # A line of few points is hard to see, and of one it is invisible.
        marker = "." if len(records) < FEW else ""
        (line,) = axes.plot(places, [record.loss for record in records], label=name, marker=marker)
        if not all(isnan(record.error) for record in records):
            errors = [record.error for record in records]
            axes.plot(places, errors, linestyle="--", color=line.get_color(), label=f"{name}, error", marker=marker)
        if not all(isnan(record.held_out) for record in records):
            held_out = [record.held_out for record in records]
            axes.plot(places, held_out, linestyle=":", color=line.get_color(), label=f"{name}, held out", marker=marker)
    axes.grid(alpha=0.3)


def drawn(record: Record) -> tuple[float, float, float]:
    """Return what is drawn of a record."""
    return record.loss, record.error, record.held_out


def set_scale(axes: Axes, values: Sequence[float]) -> None:
    """Choose a scale on which all values can be seen, and say which if it is not logarithmic."""
    numbers = [value for value in values if isfinite(value)]
    smallest = min((value for value in numbers if value > 0), default=1.0)
    if min(numbers) > 0:
        axes.set_yscale("log")
        axes.set_ylabel("loss")
    elif min(numbers) == 0 and max(numbers) > smallest:
        # The linear part has a tenth of the height, so that the ticks of the rest keep clear of the zero.
        axes.set_yscale("symlog", linthresh=smallest, linscale=max(1.0, log10(max(numbers) / smallest) / 10))
        axes.set_ylim(bottom=-smallest / 3)
        axes.set_ylabel(f"loss (linear from 0 to {smallest:.0e})")
    else:
        axes.set_ylabel("loss (linear scale)")
