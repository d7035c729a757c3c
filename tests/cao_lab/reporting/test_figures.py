"""Figures are compared by the data they draw, not by their pixels."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame
from synthetic_logs import ADAM, CAO, SGD, Run, suite_of_runs, write_suite

from cao_lab.facts import CURVATURES
from cao_lab.reporting import figures
from cao_lab.reporting.analysis import Goal, ended_with_costs, first_epoch_below
from cao_lab.reporting.logreader import Logs, load_logs
from cao_lab.reporting.rates import predicted_windows
from cao_lab.reporting.setting import settings
from cao_lab.reporting.suite_figures import stable_window_figure, sweep_figure


def logs_of(folder: Path, *runs: Run) -> Logs:
    return load_logs(write_suite(folder, runs))


def goal(runs: DataFrame, loss: float) -> Goal:
    return Goal(loss, first_epoch_below(ended_with_costs(runs, CURVATURES), [loss]))


def curves(figure: Figure) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes_of(figure).lines if not str(line.get_label()).startswith("_")}


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def dots(figure: Figure) -> list[tuple[float, float, object]]:
    lines = [line for line in axes_of(figure).lines if line.get_marker() == "o"]
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_markerfacecolor()) for line in lines]


@pytest.fixture
def two_seeds(tmp_path: Path) -> DataFrame:
    runs = [Run([4.0, 2.0, 1.0], "adam", 0, ADAM), Run([3.0, 2.0, 2.0], "adam", 1, ADAM), Run([2.0, 1.0, 0.5])]
    return logs_of(tmp_path, *runs).epochs


def test_the_mean_over_seeds_is_drawn_and_a_single_seed_marked(two_seeds: DataFrame) -> None:
    drawn = curves(figures.curve_figure(two_seeds))
    assert list(drawn) == ["Adam", "CAO k=1 †"]
    assert drawn["Adam"].get_ydata().tolist() == [3.5, 2.0, 1.5]
    assert drawn["Adam"].get_xdata().tolist() == [1, 2, 3]


def test_a_dot_marks_the_first_hit_and_is_hollow_if_a_seed_never_arrived(two_seeds: DataFrame) -> None:
    found = dots(figures.curve_figure(two_seeds, goal=goal(two_seeds, 1.0)))
    assert [(x, y) for x, y, _ in found] == [(3.0, 1.0), (2.0, 1.0)]
    assert found[0][2] == "white"
    assert found[1][2] != "white"


def test_a_dot_lies_on_the_mean_curve(two_seeds: DataFrame) -> None:
    figure = figures.curve_figure(two_seeds, goal=goal(two_seeds, 2.3))
    # Adam's mean falls from 3.5 to 2 between the epochs 1 and 2.
    assert dots(figure)[0][:2] == (pytest.approx(1 + 1.2 / 1.5), 2.3)


def test_a_step_of_a_full_batch_is_called_a_step_and_its_loss_is_that_before_it(two_seeds: DataFrame) -> None:
    figure = figures.curve_figure(two_seeds.assign(steps_per_epoch=1))
    assert axes_of(figure).get_xlabel() == "steps"
    assert curves(figure)["Adam"].get_xdata().tolist() == [0, 1, 2]


def test_a_run_that_rises_far_above_its_start_leaves_the_frame(tmp_path: Path) -> None:
    runs = [Run([4.0, 2.0, 1.0], "adam", 0, ADAM), Run([4.0, 1e9, 1e13])]
    figure = figures.curve_figure(logs_of(tmp_path, *runs).epochs)
    assert axes_of(figure).get_ylim()[1] < 10
    assert list(curves(figure)) == ["Adam †", "CAO k=1 † ↑"]


def test_a_single_epoch_is_drawn_as_a_point(tmp_path: Path) -> None:
    (curve,) = curves(figures.curve_figure(logs_of(tmp_path, Run([3.0])).epochs)).values()
    assert (curve.get_marker(), curve.get_markevery()) == (".", None)


def test_the_early_window_ends_where_it_should(two_seeds: DataFrame) -> None:
    figure = figures.curve_figure(two_seeds, goal=goal(two_seeds, 1.0), last_epoch=2)
    assert curves(figure)["Adam"].get_xdata().tolist() == [1, 2]
    assert [x for x, _, _ in dots(figure)] == [2.0]


def test_wall_clock_has_seconds_on_its_axis(two_seeds: DataFrame) -> None:
    figure = figures.curve_figure(two_seeds, x="seconds", goal=goal(two_seeds, 1.0))
    assert curves(figure)["Adam"].get_xdata().tolist() == [2.0, 4.0, 6.0]
    assert axes_of(figure).get_xlabel() == "seconds of training"


def test_seconds_have_ticks_between_whole_numbers_and_epochs_have_none(tmp_path: Path) -> None:
    epochs = logs_of(tmp_path, Run([4.0, 2.0, 1.0], seconds=0.8)).epochs
    seconds, steps = (axes_of(figures.curve_figure(epochs, "train_loss", x)).get_xticks() for x in ("seconds", "epoch"))
    assert sum(0.8 <= tick <= 2.4 for tick in seconds) >= 4
    assert all(tick == round(tick) for tick in steps)


def test_one_seed_that_leaves_the_frame_marks_its_method(tmp_path: Path) -> None:
    runs = [Run([4.0, 2.0, end], "adam", seed, ADAM) for seed, end in enumerate((1.0, 1e9, 1.0))]
    assert list(curves(figures.curve_figure(logs_of(tmp_path, *runs).epochs))) == ["Adam ↑"]


def test_where_the_mean_never_arrives_dots_lie_on_the_seeds_that_do(tmp_path: Path) -> None:
    losses = ([4.0, 2.0, 1.0], [4.0, 3.0, 1.5], [4.0, 4.0, 40.0])
    epochs = logs_of(tmp_path, *(Run(list(one), "adam", seed, ADAM) for seed, one in enumerate(losses))).epochs
    found = dots(figures.curve_figure(epochs, goal=goal(epochs, 1.75)))
    assert [x for x, _, _ in found] == pytest.approx([2.25, 2 + 1.25 / 1.5])
    assert {face for _, _, face in found} == {"white"}


def test_epochs_of_several_iterations_have_no_dot_and_say_so(tmp_path: Path) -> None:
    runs = [Run([4.0, 2.0, 1.0], "lbfgs", 0, {"name": "lbfgs", "lr": 1.0}, steps_per_epoch=1), Run([4.0, 3.0, 2.0])]
    epochs = logs_of(tmp_path, *runs).epochs
    over_epochs, over_seconds = (
        figures.curve_figure(epochs, x=x, goal=goal(epochs, 2.5)) for x in ("epoch", "seconds")
    )
    assert [len(dots(figure)) for figure in (over_epochs, over_seconds)] == [1, 2]
    assert "L-BFGS †, steps of several iterations" in curves(over_epochs)
    assert "L-BFGS †" in curves(over_seconds)


def test_the_legend_names_the_threshold(two_seeds: DataFrame) -> None:
    legend = axes_of(figures.curve_figure(two_seeds, goal=goal(two_seeds, 1.25))).get_legend()
    assert legend is not None
    assert legend.get_texts()[-1].get_text() == "threshold 1.25"


def test_a_diverged_run_ends_in_a_cross(tmp_path: Path) -> None:
    epochs = logs_of(tmp_path, Run([3.0, 2.0, math.nan], status="diverged")).epochs
    crosses = [line for line in axes_of(figures.curve_figure(epochs)).lines if line.get_marker() == "x"]
    assert crosses[0].get_xydata().tolist() == [[2.0, 2.0]]


def test_the_rank_ablation_holds_everything_but_the_rank(tmp_path: Path) -> None:
    epochs = logs_of(tmp_path, *suite_of_runs()).epochs
    drawn = curves(figures.curve_figure(figures.rank_ablation(epochs), goal=goal(epochs, 3.0)))
    ranks = ["CAO k=0", "CAO k=0, scaling unit", "CAO k=1", "CAO k=3", "CAO k=5"]
    assert list(drawn) == [*ranks, "threshold 3"]


def test_the_rank_ablation_leaves_out_what_differs_in_more_than_the_rank(tmp_path: Path) -> None:
    as_printed = {"negative_curvature": "signed", "eigensolver": "lanczos", "warmup_steps": 40}
    usual = {"negative_curvature": "magnitude", "eigensolver": "subspace", "warmup_steps": 0}
    ranks = [Run([4.0, 2.0], f"rank{k}", 0, CAO | usual | {"rank": k}) for k in (1, 3)]
    others = [Run([4.0, 2.0], key, 0, CAO | usual | {key: value}) for key, value in as_printed.items()]
    drawn = curves(figures.curve_figure(figures.rank_ablation(logs_of(tmp_path, *ranks, *others).epochs)))
    assert list(drawn) == ["CAO k=1 (rank1) †", "CAO k=3 †"]


def test_any_column_of_the_logs_can_be_drawn(two_seeds: DataFrame) -> None:
    figure = figures.curve_figure(two_seeds, "test_accuracy")
    assert curves(figure)["CAO k=1 †"].get_ydata().tolist() == [0.6, 0.8, 0.9]


def test_stable_windows_show_both_ends_and_the_predictions(tmp_path: Path) -> None:
    runs = [
        Run(
            [2.2, 1.0 if rate < 0.5 else 3.0], f"{label}-{rate}", 0, config | {"lr": rate}, "stable-range",
            "digits-mlp", eigenvalues=[8.0, 4.0],
        )
        for rate in (0.1, 0.4, 0.8)
        for label, config in (("sgd", SGD), ("cao", CAO | {"damping": 1.0}))
    ]  # fmt: skip
    logs = logs_of(tmp_path, *runs)
    axes = axes_of(stable_window_figure(predicted_windows(logs.epochs, logs.refreshes)))
    drawn = [line.get_xdata().tolist() for line in axes.lines[-4:]]
    assert drawn == [[0.4, 0.4], [0.8, 0.8], [0.5, 0.25], [0.5, 0.25]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CAO k=1", "SGD, momentum 0.9"]


@pytest.mark.parametrize("rates", [(0.9, 1.2, 1.5), (0.1, 1.0, 3.0), (0.004, 0.03, 2.0), (1e-6, 1e-3, 10.0)])
def test_rates_can_be_read_between_labels_that_do_not_overlap(rates: tuple[float, ...], tmp_path: Path) -> None:
    losses = ([2.2, 1.0], [2.2, 1.0], [2.2, 9.0])
    runs = [
        Run(own, f"{task}-{rate}", 0, SGD | {"lr": rate}, "stable-range", task, eigenvalues=[2 / rates[0]])
        for task in ("digits-mlp", "digits-linear")
        for own, rate in zip(losses, rates, strict=True)
    ]
    logs = logs_of(tmp_path, *runs)
    figure = stable_window_figure(predicted_windows(logs.epochs, logs.refreshes))
    FigureCanvasAgg(figure).draw()
    axes = axes_of(figure)
    low, high = axes.get_xlim()
    labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high and label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert len(labels) >= 3
    assert min(after.x0 - before.x1 for before, after in pairwise(boxes)) > 0


def test_a_long_name_is_wrapped_and_fits_into_the_figure(tmp_path: Path) -> None:
    epochs = settings(logs_of(tmp_path, Run([3.0, 2.0])))[0].epochs
    figure = figures.curve_figure(epochs.assign(name="CAO k=10, lr 0.00316, momentum 0.9, sketch projected-out"))
    FigureCanvasAgg(figure).draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text().count("\n") >= 1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_a_method_has_the_same_colour_whoever_is_drawn_with_it(tmp_path: Path) -> None:
    epochs = settings(logs_of(tmp_path, *suite_of_runs()))[0].epochs
    some = epochs[epochs["label"].isin(["cao-rank5", "sgd-lr0.1-momentum0"])]
    everyone, few = (curves(figures.curve_figure(runs)) for runs in (epochs, some))
    assert {name: line.get_color() for name, line in few.items()}.items() <= {
        name: line.get_color() for name, line in everyone.items()
    }.items()


def test_a_colour_that_begins_anew_has_markers_along_its_curve(tmp_path: Path) -> None:
    runs = [Run([4.0, 2.0, 1.0], f"rank{k}", 0, CAO | {"rank": k}) for k in range(1, 7)]
    drawn = curves(figures.curve_figure(logs_of(tmp_path, *runs).epochs)).values()
    assert [line.get_marker() for line in drawn] == ["None"] * 4 + ["s"] * 2
    assert {line.get_linestyle() for line in drawn} == {"-"}


def test_a_sweep_shows_each_interval_over_damping_and_rank_0_dashed(tmp_path: Path) -> None:
    runs = [
        Run([4.0, loss - damping], f"cao-rank{rank}-refresh_every{every}-damping{damping}", seed,
            CAO | {"rank": rank, "damping": damping, "refresh_every": every}, "mini-sensitivity")
        for rank, every in ((0, 40), (1, 40), (1, 80))
        for damping in (0.01, 0.1)
        for seed, loss in enumerate((3.0, 3.2))
    ]  # fmt: skip
    (found,) = settings(load_logs(write_suite(tmp_path, runs)))
    assert found.goal is not None
    _, losses = sweep_figure(found.epochs, found.goal).axes
    curves = {str(one.get_label()): one.lines[0] for one in losses.containers}
    assert list(curves) == ["CAO k=0, no curvature", "CAO k=1, m = 40", "CAO k=1, m = 80"]
    assert [line.get_linestyle() for line in curves.values()] == ["--", "-", "-"]
    assert all(line.get_ydata() == pytest.approx([3.09, 3.0]) for line in curves.values())


def test_seeds_of_one_method_lie_nearer_to_each_other_than_to_another_method() -> None:
    windows = DataFrame([
        {"task": "digits-mlp", "optimizer": "cao", "rank": rank, "momentum": 0.0, "seed": seed, "largest_stable": 1.0,
         "smallest_unstable": 2.0, "predicted_first": 1.5, "predicted_median": 1.5, "name": f"CAO k={rank}"}
        for rank in (0, 1) for seed in range(8)
    ])  # fmt: skip
    (axes,) = stable_window_figure(windows).axes
    first, second = np.split(next(line for line in axes.lines if line.get_marker() == "o").get_ydata(), 2)
    assert second.min() - first.max() > np.diff(first).max()
