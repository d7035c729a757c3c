"""The numbers of the suite robust, on logs whose answers are known."""

import math

import pytest

from cao_lab.log.records import Sweep, SweepRecord
from cao_lab.reporting.robust import (
    ARROW,
    duels,
    duels_table,
    edge_figure,
    effort_figure,
    goals_table,
    rates_figure,
)

RATES = (0.1, 1.0, 10.0)


def run(method, lr, losses, seconds):
    return [SweepRecord(method, lr, step, loss, seconds, 0, 0) for step, loss in enumerate(losses)]


def sweep(seed, ours, theirs, problem="mlp", kind="full"):
    """Return a sweep with the given losses for each rate, of CAO and of SGD."""
    records = [
        record
        for method, curves, seconds in (("cao", ours, 3.0), ("sgd", theirs, 2.0))
        for lr, losses in zip(RATES, curves, strict=True)
        for record in run(method, lr, losses, seconds)
    ]
    return Sweep("finished", "robust", problem, "sweep", seed, None, kind, 2, tuple(records))


@pytest.fixture
def duel():
    theirs = [(4.0, 3.0, 2.0), (4.0, 2.0, 1.0), (4.0, 40.0, math.nan)]
    ours = [(4.0, 3.0, 2.0), (4.0, 1.0, 0.5), (4.0, 2.0, 1.05)]
    (found,) = duels([sweep(1, ours, theirs), sweep(2, ours, theirs)])
    return found


def test_the_base_at_its_best_rate_is_the_measure(duel):
    assert duel.best.lr == 1.0
    assert duel.loss_ratio == pytest.approx(0.5)
    assert duel.time_ratio == pytest.approx(1.5)


def test_a_rate_works_within_ten_percent_of_the_bases_best(duel):
    assert duel.works(duel.base) == 1
    assert duel.works(duel.ours) == 2
    assert duel.width_ratio == 2


def test_steps_are_counted_to_the_bases_best_loss(duel):
    assert duel.step_ratio == pytest.approx(1 / 2)


def test_a_run_above_its_first_loss_or_without_a_number_has_diverged(duel):
    assert [rate.diverged for rate in duel.base] == [0, 0, 2]
    assert duel.base[-1].final == math.inf


def test_one_seed_that_diverges_spoils_its_rate():
    good, bad = (4.0, 2.0, 1.0), (4.0, 5.0, 6.0)
    (found,) = duels([sweep(1, [good] * 3, [good] * 3), sweep(2, [good, good, bad], [good] * 3)])
    assert [rate.diverged for rate in found.ours] == [0, 0, 1]
    assert found.width_ratio == pytest.approx(2 / 3)


def test_the_tables_have_every_goal_and_every_problem_and_the_figure_a_panel_each(duel):
    small = duels([sweep(1, [(4.0, 2.0, 1.0)] * 3, [(4.0, 2.0, 1.0)] * 3, "lstm", "mini")])
    goals = goals_table([duel, *small])
    assert list(goals.cells["measured"]) == ["1", "0.75", "1.5", "1", "0", "0.5", "1.5"]
    assert list(goals.cells["reached"]) == ["yes", "yes", "no", "yes", "yes", "yes", "no"]
    assert list(duels_table([duel, *small]).cells["problem"]) == ["mlp", "lstm"]
    assert [axes.get_title(loc="left") for axes in rates_figure([duel, *small]).axes] == [
        "mlp (full batch)",
        "lstm (mini batch)",
    ]


def test_a_rate_that_diverged_has_an_arrow_at_the_upper_edge_in_its_methods_colour(duel):
    (axes,) = rates_figure([duel]).axes
    curves = {line.get_label(): line for line in axes.lines}
    (arrow,) = (line for line in axes.lines if line.get_marker() == ARROW["marker"] and len(line.get_xdata()))
    assert list(arrow.get_xdata()) == [10.0]
    assert arrow.get_color() == curves["SGD, momentum 0.9"].get_color()
    (_, height), *_ = axes.transAxes.inverted().transform(arrow.get_transform().transform(arrow.get_xydata()))
    assert 0.9 < height < 1


def test_the_legend_names_the_line_of_the_start_and_the_arrow(duel):
    figure = rates_figure([duel])
    (axes,) = figure.axes
    (start,) = (line for line in axes.lines if line.get_label() == "loss before the first step")
    assert set(start.get_ydata()) == {4.0}
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["SGD, momentum 0.9", "CAO, defaults", "loss before the first step", "a seed diverged"]


def test_the_figure_of_the_rules_shows_what_was_captured_and_what_it_cost():
    def with_effort(seed, captured, products):
        records = [
            SweepRecord(method, 0.1, step, 1.0, 1.0, step * products, captured)
            for method in ("cao", "sgd")
            for step in (0, 5, 10)
        ]
        return Sweep("finished", "robust", "mlp", "sweep", seed, None, "full", 10, tuple(records))

    found = duels([with_effort(1, 2, 1), with_effort(2, 4, 3)])
    captured, products, *_ = effort_figure(found).axes
    assert list(captured.lines[0].get_ydata()) == [3.0]
    assert list(products.lines[0].get_ydata()) == [2.0]


def test_a_captured_direction_stays_below_the_edge_in_the_picture():
    (axes,) = edge_figure().axes
    captured = axes.lines[1].get_ydata()
    assert max(captured) < 1
    assert captured[0] == pytest.approx(0.01 / 1.01)
