"""The figures of `cao spectrum`: the density of eigenvalues with its outliers, and where the top ones sit."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from cao_lab.reporting.figures import styled
from cao_lab.reporting.palette import CURVED, PLAIN
from cao_lab.spectrum.config import Spectrum

DENSITY, LARGE, SMALL = "#444444", CURVED[0], PLAIN["sgd"]
SHARE_WORTH_A_NUMBER = 0.05


@styled
def density_figure(spectrum: Spectrum) -> Figure:
    """Draw the density on a logarithmic scale, with the eigenvalues found at both ends as ticks below it.

    The band is ± two standard errors. The dotted line is as high as a single eigenvalue's smoothed peak: what stays
    below it is the tail of something else.
    """
    figure = Figure(figsize=(7.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    points, density = np.array(spectrum.density.points), np.array(spectrum.density.density)
    single = 1 / (spectrum.parameters * spectrum.density.width * math.sqrt(2 * math.pi))
    floor = single / 8
    error = 2 * np.nan_to_num(np.array(spectrum.density.standard_error))
    low, high = np.maximum(density - error, floor), np.maximum(density + error, floor)
    axes.fill_between(points, floor, np.maximum(density, floor), color=DENSITY, alpha=0.12, linewidth=0)
    axes.fill_between(points, low, high, where=high > floor, color=DENSITY, alpha=0.3, linewidth=0)
    shown = np.where(density > floor, density, np.nan)
    axes.plot(points, shown, color=DENSITY, linewidth=1.1, label="density ± 2 standard errors")
    axes.axhline(single, color=DENSITY, linewidth=0.8, linestyle=(0, (1, 2)), label="height of a single eigenvalue")
    axes.set_yscale("log")
    axes.set_ylim(floor / 6, 2.5 * density.max())
    axes.margins(x=0.18)
    draw_eigenvalues(axes, spectrum, floor / 2.4)
    axes.set(xlabel="eigenvalue λ", ylabel="density of eigenvalues", title=density_title(spectrum))
    axes.legend(loc="upper right")
    return figure


def draw_eigenvalues(axes: Axes, spectrum: Spectrum, height: float) -> None:
    """Mark the eigenvalues at both ends in a row below the density, and write the outermost beside them."""
    count = len(spectrum.largest)
    ends = (
        (spectrum.largest, LARGE, f"{count} largest", "λ₁", 7),
        (spectrum.smallest, SMALL, f"{count} smallest", "λₙ", -7),
    )
    for pairs, colour, label, name, offset in ends:
        values = [pair.value for pair in pairs]
        row = [height] * count
        axes.plot(values, row, linestyle="none", marker="|", markersize=9, color=colour, label=label)
        axes.annotate(
            f"{name} = {values[0]:.3g}",
            (values[0], height),
            xytext=(offset, 0),
            textcoords="offset points",
            ha="left" if offset > 0 else "right",
            va="center",
            color=colour,
            fontsize=8,
        )


def density_title(spectrum: Spectrum) -> str:
    """Return what is shown: whose matrix, over how much."""
    return f"{spectrum.target}: {spectrum.curvature}, {spectrum.samples} samples, {spectrum.mode} mode"


@styled
def layers_figure(spectrum: Spectrum) -> Figure:
    """Draw the share of each parameter tensor (row) in each of the top eigenvectors (column)."""
    shares = np.array([layer.shares for layer in spectrum.layers])
    rows, columns = shares.shape
    figure = Figure(figsize=(3.2 + 0.48 * columns, 1.4 + 0.21 * rows), layout="constrained")
    axes = figure.add_subplot()
    # The square root shows shares of a few per cent, and leaves most of the colours to the large ones.
    image = axes.imshow(shares, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    for row, column in zip(*np.nonzero(shares >= SHARE_WORTH_A_NUMBER), strict=True):
        share = shares[row, column]
        colour = "white" if share > 0.35 else "#222222"
        axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    axes.grid(visible=False)
    axes.set_yticks(range(rows), [layer.name for layer in spectrum.layers], fontsize=7)
    axes.set_xticks(range(columns), [f"{pair.value:.3g}" for pair in spectrum.largest], fontsize=7, rotation=45)
    axes.set(xlabel="eigenvalue λ of the eigenvector", title="share of each tensor in the top eigenvectors (%)")
    bar: Any = figure.colorbar(image, ax=axes, ticks=[0, 0.05, 0.2, 0.5, 1], pad=0.02, aspect=30)
    bar.ax.set_yticklabels(["0 %", "5 %", "20 %", "50 %", "100 %"], fontsize=7)
    return figure
