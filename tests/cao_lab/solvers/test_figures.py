"""The figure of a run: every loss can be seen, whatever its sign."""

import math

import pytest
from matplotlib.figure import Figure

from cao_lab.solvers.budget import Record
from cao_lab.solvers.figures import convergence_figure


def drawn(losses: list[float], errors: list[float] | None = None) -> Figure:
    errors = errors or [math.nan] * len(losses)
    records = [
        Record(i, 0, 0, float(i), i / 10, loss, error, 0.0, 0.0, "running")
        for i, (loss, error) in enumerate(zip(losses, errors, strict=True), start=1)
    ]
    return convergence_figure({"method": records}, "title")


def heights(figure: Figure) -> list[float]:
    """Where the points of the first curve are drawn, 0 at the bottom of the left panel and 1 at its top."""
    axes = figure.axes[0]
    figure.draw_without_rendering()
    places = axes.transAxes.inverted().transform(axes.transData.transform(axes.lines[0].get_xydata()))
    return [float(height) for _, height in places]


@pytest.mark.parametrize("losses", [[1e3, 1.0, 1e-20], [4.0, 1e-9, 0.0], [0.0], [5.0, -1.0, -5.0], [-1e3, -1e18]])
def test_every_loss_is_in_the_picture(losses: list[float]) -> None:
    places = heights(drawn(losses))
    assert all(0 < place < 1 for place in places)
    assert places == sorted(places, reverse=True)
    assert len({*places}) == len(losses)


@pytest.mark.parametrize(
    ("losses", "scale", "label"),
    [
        ([4.0, 1e-9], "log", "loss"),
        ([4.0, 1e-9, 0.0], "symlog", "loss (linear from 0 to 1e-09)"),
        ([4.0, -2.0], "linear", "loss (linear scale)"),
    ],
)
def test_a_scale_that_is_not_logarithmic_is_named(losses: list[float], scale: str, label: str) -> None:
    axes = drawn(losses).axes
    assert [part.get_yscale() for part in axes] == [scale, scale]
    assert axes[0].get_ylabel() == label


def test_an_error_of_zero_is_in_the_picture_too() -> None:
    assert drawn([4.0, 1.0], [0.5, 0.0]).axes[0].get_yscale() == "symlog"


def test_a_single_point_has_a_marker() -> None:
    assert drawn([4.0]).axes[0].lines[0].get_marker() == "."
