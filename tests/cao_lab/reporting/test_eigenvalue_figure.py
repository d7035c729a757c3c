"""The figure of eigenvalues shows all of them, with names that stand beside their curves."""

from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, write_suite

from cao_lab.reporting.eigenvalue_figure import eigenvalue_figure
from cao_lab.reporting.logreader import load_logs


def refreshes_of(folder: Path, *runs: Run) -> DataFrame:
    return load_logs(write_suite(folder, runs)).refreshes


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def test_eigenvalues_are_drawn_with_the_edge_of_stability(tmp_path: Path) -> None:
    runs = [Run([3.0, 2.0], seed=seed, eigenvalues=[10.0 + 2 * seed, 4.0]) for seed in (0, 1)]
    lines = axes_of(eigenvalue_figure(refreshes_of(tmp_path, *runs))).lines
    assert [line.get_ydata()[0] for line in lines] == [11.0, 4.0, pytest.approx(20.0)]


@pytest.mark.parametrize(
    ("config", "name"),
    [(SGD, "2(1+β)/α"), (CAO, "2η/α"), (CAO | {"momentum": 0.9}, "2η(1+β)/α"), (CAO | {"scaling": "unit"}, "2/α")],
)
def test_the_edge_is_named_by_the_formula_that_is_drawn(config: dict[str, object], name: str, tmp_path: Path) -> None:
    figure = eigenvalue_figure(refreshes_of(tmp_path, Run([3.0, 2.0], "one", 0, config, eigenvalues=[10.0])))
    assert name in [text.get_text() for text in axes_of(figure).texts]


def spectrum_of(folder: Path, *spectra: list[float]) -> Figure:
    """Return the figure of made-up methods, each with its eigenvalues, after it was drawn once."""
    runs = [Run([3.0, 2.0], f"one{k}", 0, CAO | {"rank": k}, eigenvalues=found) for k, found in enumerate(spectra, 1)]
    figure = eigenvalue_figure(refreshes_of(folder, *runs))
    FigureCanvasAgg(figure).draw()
    return figure


def names_beside(axes: Axes) -> dict[str, Bbox]:
    return {text.get_text(): Text.get_window_extent(text) for text in axes.texts}


WIDE = [9e5, 8.9e5, 8.8e5, 12.0, 0.3, 0.2]
WIDE_WITH_BOTH_SIGNS = [9e5, -8e5, 300.0, 2.0, -0.2, 0.1]


@pytest.mark.parametrize("eigenvalues", [WIDE, [3.01, 3.0, 3.0, 3.0, 3.0, 2.99], WIDE_WITH_BOTH_SIGNS, [1e-9, -2e-9]])
def test_names_stand_beside_their_panel_in_order_and_apart(eigenvalues: list[float], tmp_path: Path) -> None:
    axes = axes_of(spectrum_of(tmp_path, eigenvalues))
    found = names_beside(axes)
    centres = [(box.y0 + box.y1) / 2 for box in found.values()]
    assert min(before - after for before, after in pairwise(centres)) > 0.7 * found["λ1"].height
    assert all(box.x0 > axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1 for box in found.values())
    by_height = sorted(eigenvalues, key=lambda value: -value)
    named = [name for name in found if name.startswith("λ")]
    assert [eigenvalues[int(name[1:]) - 1] for name in named] == by_height


def test_names_of_curves_that_meet_are_centred_on_them_and_lines_lead_there(tmp_path: Path) -> None:
    axes = axes_of(spectrum_of(tmp_path, [5.0, 5.0, 5.0], [500.0], [0.05]))
    middle = axes.transData.transform((0, 5.0))[1]
    named = [text for text in axes.texts if text.get_text() in ("λ1", "λ2", "λ3")]
    upper, _, lower = (names_beside(axes)[name] for name in ("λ1", "λ2", "λ3"))
    assert (upper.y1 + lower.y0) / 2 == pytest.approx(middle, abs=upper.height)
    assert [text.arrow_patch is not None for text in named] == [True, False, True]
    assert [text.xy for text in named] == [(1.0, 5.0)] * 3


def test_names_leave_the_next_panel_and_the_edge_of_the_figure_free(tmp_path: Path) -> None:
    momentum = CAO | {"momentum": 0.9}
    runs = [Run([3.0, 2.0], f"k{k}", 0, momentum | {"rank": k}, eigenvalues=[9.0, 4.0]) for k in (1, 2, 3)]
    figure = eigenvalue_figure(refreshes_of(tmp_path, *runs))
    FigureCanvasAgg(figure).draw()
    ends = [max(box.x1 for box in names_beside(axes).values()) for axes in figure.axes]
    limits = [*(axes.get_tightbbox(for_layout_only=False).x0 for axes in figure.axes[1:]), figure.bbox.x1]
    assert all(end < limit for end, limit in zip(ends, limits, strict=True))


def test_eigenvalues_of_one_sign_have_a_logarithmic_axis_that_holds_them_all(tmp_path: Path) -> None:
    axes = axes_of(spectrum_of(tmp_path, WIDE))
    assert axes.get_yscale() == "log"
    assert all(axes.bbox.y0 < axes.transData.transform((0, value))[1] < axes.bbox.y1 for value in WIDE)


def test_small_eigenvalues_of_both_signs_are_not_pressed_onto_zero(tmp_path: Path) -> None:
    axes = axes_of(spectrum_of(tmp_path, WIDE_WITH_BOTH_SIGNS))
    heights = sorted(axes.transData.transform((0, value))[1] for value in (*WIDE_WITH_BOTH_SIGNS, 0.0))
    assert min(after - before for before, after in pairwise(heights)) > 0.02 * axes.bbox.height


def test_round_off_does_not_stretch_a_logarithmic_axis(tmp_path: Path) -> None:
    low, high = axes_of(spectrum_of(tmp_path, [100.0, 3.0, 1e-17])).get_ylim()
    assert 1e-7 < low < 3.0
    assert high > 100.0


@pytest.mark.parametrize("eigenvalues", [WIDE, WIDE_WITH_BOTH_SIGNS, [30.0, 12.0], [30.1, 30.0], [-4.0, 0.0]])
def test_ticks_of_eigenvalues_have_one_format_and_leave_room_for_their_axis(
    eigenvalues: list[float], tmp_path: Path
) -> None:
    figure = spectrum_of(tmp_path, eigenvalues)
    shown = [label for label in axes_of(figure).get_yticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in shown]
    assert len(shown) >= 3
    assert len({"10^" in label.get_text() for label in shown if label.get_text() != r"$\mathdefault{0}$"}) == 1
    assert not any("e" in label.get_text().replace("mathdefault", "").replace("times", "") for label in shown)
    assert min(after.y0 - before.y1 for before, after in pairwise(boxes)) > -2
    (axis,) = (text for text in figure.texts if text.get_text() == "eigenvalue")
    assert min(box.x0 for box in boxes) > axis.get_window_extent().x1


def test_adam_has_no_edge(tmp_path: Path) -> None:
    refreshes = refreshes_of(tmp_path, Run([3.0, 2.0], "adam", 0, ADAM, eigenvalues=[10.0]))
    assert len(axes_of(eigenvalue_figure(refreshes)).lines) == 1
