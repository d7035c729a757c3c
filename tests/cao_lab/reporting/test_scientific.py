"""Ratios, goals, tables and figures of full-batch solvers, from made-up logs whose answers are known."""

import math
from pathlib import Path

import pytest
from synthetic_logs import Run, write_run
from synthetic_solves import write_solve

from cao_lab.log.records import SolveRun
from cao_lab.reporting.report import write_report
from cao_lab.reporting.scientific import (
    ALL_PEERS,
    GOALS,
    IN_EQUAL_SECONDS,
    NNCG_RUNS,
    OURS,
    STROKES,
    TITLES,
    After,
    Goal,
    billed_until,
    error_ratio,
    interval_over_problems,
    load_solves,
    loss_figure,
    loss_ratio,
    loss_ratio_at_equal_seconds,
    lowest_error_ratio,
    median_curve,
    outcome,
    profile_figure,
    ratios,
    share_of_evaluations,
    share_of_seconds,
    times_the_fastest,
)
from cao_lab.reporting.scientific_tables import SHORT, goals_table, pace, progress_table, solver_tables
from cao_lab.reporting.tabular import short
from cao_lab.suites.scientific import METHODS
from cao_lab.suites.scientific2 import METHODS as RING
from cao_lab.suites.scientific2 import crossing


def loaded(logs: Path) -> dict[str, SolveRun]:
    missing: list[str] = []
    runs = load_solves(logs, missing)
    assert missing == []
    return {run.label: run for run in runs}


def test_the_goals_are_those_that_were_set() -> None:
    assert [goal.most for goal in GOALS] == [1 / 50, 1 / 10, 1, 1 / 10, 1 / 10, 1 / 2, 1 / 3]
    assert {OURS, *NNCG_RUNS, *(peer for goal in GOALS for peer in goal.peers)} <= set(METHODS)
    assert {label for label in METHODS if "nncg" in label} == set(NNCG_RUNS)


def test_final_losses_and_errors_are_compared_at_the_end(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(1, 0, 1, 1), (100, 5, 1e-4, 0.02)])
    write_solve(tmp_path, "adam", [(1, 0, 1, 1), (100, 9, 1e-2, 0.1)])
    runs = loaded(tmp_path)
    assert loss_ratio(runs[OURS], runs["adam"]) == pytest.approx(0.01)
    assert error_ratio(runs[OURS], runs["adam"]) == pytest.approx(0.2)


def test_lowest_errors_are_compared_whenever_they_were_seen(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(1, 0, 1, 1), (50, 2, 1e-2, 0.01), (100, 5, 1e-4, 0.02)])
    write_solve(tmp_path, "adam", [(1, 0, 1, 1), (100, 9, 1e-2, 0.1)])
    runs = loaded(tmp_path)
    assert lowest_error_ratio(runs[OURS], runs["adam"]) == pytest.approx(0.1)


def test_at_equal_seconds_the_first_to_end_sets_the_time(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(1, 0, 1, 1), (50, 4, 1e-3, 1), (100, 8, 1e-6, 1)])
    write_solve(tmp_path, "nncg", [(1, 0, 1, 1), (90, 3, 1e-1, 1), (100, 5, 1e-2, 1)])
    runs = loaded(tmp_path)
    assert loss_ratio_at_equal_seconds(runs[OURS], runs["nncg"]) == pytest.approx(1e-3 / 1e-2)
    assert loss_ratio_at_equal_seconds(runs["nncg"], runs[OURS]) == pytest.approx(1e-2 / 1e-3)


def test_a_stalled_run_is_compared_for_as_long_as_the_other_runs(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(1, 0, 1, 1), (100, 8, 1e-6, 1)])
    write_solve(tmp_path, "nncg", [(1, 0, 1, 1), (5, 1, 1e-2, 1), (100, 1, 1e-2, 1)], ended="stalled: no step")
    runs = loaded(tmp_path)
    assert loss_ratio_at_equal_seconds(runs[OURS], runs["nncg"]) == pytest.approx(1e-4)


def timed(logs: Path, label: str, rows: list[tuple[float, float, float, float]], task: str = "wave-3x20") -> None:
    budget = {"evaluations": None, "seconds": 10.0}
    write_solve(logs, label, rows, suite="scientific-2", task=task, seed=31, budget=budget)


def ring(logs: Path) -> list[SolveRun]:
    """Ours is ahead after a tenth of the time and behind at the end; on the second problem it is wrong."""
    timed(logs, OURS, [(1, 0, 1, 1), (9, 0.9, 1e-2, 0.05), (50, 5, 1e-4, 0.02), (99, 10.1, 8e-5, 5e-3)])
    timed(logs, "ssbroyden", [(1, 0, 1, 1), (9, 1.1, 1e-2, 0.05), (50, 5, 2e-5, 8e-3), (99, 10, 1e-5, 2e-3)])
    timed(logs, OURS, [(1, 0, 1, 1), (99, 10, 1e-6, 1.7)], task="burgers-3x20")
    timed(logs, "ssbroyden", [(1, 0, 1, 1), (99, 10, 1e-6, 1e-3)], task="burgers-3x20")
    missing: list[str] = []
    runs = load_solves(logs, missing)
    assert missing == []
    return runs


def test_in_equal_seconds_each_share_of_the_time_has_its_ratio(tmp_path: Path) -> None:
    runs = {run.label: run for run in ring(tmp_path) if run.task == "wave-3x20"}
    ours, theirs = runs[OURS], runs["ssbroyden"]
    assert After(0.1)(ours, theirs) == pytest.approx(1e-2)
    assert After(0.5)(ours, theirs) == pytest.approx(5)
    assert After(0.5, "error")(ours, theirs) == pytest.approx(2.5)
    assert share_of_seconds(ours, theirs) == pytest.approx(10.1 / 5)


def test_the_ring_has_goals_a_row_per_method_and_a_profile(tmp_path: Path) -> None:
    runs = ring(tmp_path)
    tables = {table.name: table for table in solver_tables(runs)}
    assert list(tables) == [f"scientific-2-{what}" for what in ("goals", "methods", "loss", "error")]
    assert len(tables["scientific-2-goals"].cells) == len(IN_EQUAL_SECONDS)
    rows = tables["scientific-2-methods"].cells.set_index("")
    assert rows.loc["SketchedLBFGS", ["runs", "loss, 100 %", "s to 0.1", "wrong"]].tolist() == ["2", "–", "never", "1"]
    # At the end ours has 1e-4 (its last record came too late) over 1e-5, and the same loss on the other problem.
    assert rows.loc["SSBroyden", ["loss, 100 %", "wrong"]].tolist() == ["5.5", "0"]
    assert rows.loc["SSBroyden", "95 % of the last two"].startswith("1–10; ")
    assert times_the_fastest(runs, OURS, 1e-2) == [math.inf, pytest.approx(2.02)]
    figure = profile_figure(runs)
    assert [len(axes.get_lines()) for axes in figure.axes[:3]] == [2, 2, 2]


def test_widths_of_the_crossover_stand_beside_each_other(tmp_path: Path) -> None:
    for width, loss in ((20, 1e-6), (200, 1e-3)):
        write_solve(tmp_path, OURS, [(100, 1, loss, 1)], suite="crossover", task=f"burgers-3x{width}", seed=31)
    (table,) = solver_tables(load_solves(tmp_path, []))
    assert table.cells.set_index("").loc["SketchedLBFGS"].to_dict() == {
        "burgers-3x20": "**1.0e-6**", "burgers-3x200": "**1.0e-3**",
    }  # fmt: skip


def test_evaluations_are_counted_to_the_loss_at_which_the_peer_ends(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(1, 0, 1, 1), (20, 1, 5e-3, 1), (30, 2, 1e-3, 1), (100, 8, 1e-6, 1)])
    write_solve(tmp_path, "scipy-lbfgsb", [(1, 0, 1, 1), (80, 3, 2e-3, 1), (100, 5, 2e-3, 1)])
    runs = loaded(tmp_path)
    # The peer had its final loss at 80, and is not charged for standing still.
    assert share_of_evaluations(runs[OURS], runs["scipy-lbfgsb"]) == pytest.approx(30 / 80)
    assert share_of_evaluations(runs["scipy-lbfgsb"], runs[OURS]) == math.inf
    assert billed_until(runs[OURS], 1e-9) == math.inf


def test_against_several_the_best_of_them_counts(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(100, 8, 1e-4, 0.3)])
    write_solve(tmp_path, "nncg", [(100, 8, 1e-1, 0.1)])
    write_solve(tmp_path, "lbfgs-nncg", [(100, 8, 1e-3, 0.6)])
    write_solve(tmp_path, "adam", [(100, 8, 1e-5, 0.9)])
    runs = loaded(tmp_path).values()
    assert list(ratios(runs, Goal("", NNCG_RUNS, loss_ratio, 1)).values()) == pytest.approx([0.1])
    assert list(ratios(runs, Goal("", ALL_PEERS, error_ratio, 1)).values()) == pytest.approx([3.0])


def test_a_goal_is_about_the_median_of_all_or_about_the_worst_problem() -> None:
    values = {("a", 1): 0.1, ("a", 2): 0.2, ("a", 3): 9.0, ("b", 1): 0.3, ("b", 2): 0.4, ("b", 3): 0.5}
    assert outcome(values, Goal("", (), loss_ratio, 1)) == pytest.approx(0.35)
    assert outcome(values, Goal("", (), loss_ratio, 1, is_on_every_problem=True)) == 0.4
    assert math.isnan(outcome({}, Goal("", (), loss_ratio, 1)))


def test_the_interval_of_a_median_is_that_of_problems_drawn_anew() -> None:
    values = {(task, seed): float(level) for level, task in enumerate("abcde") for seed in (1, 2, 3)}
    # A problem's seeds stay together: of five drawn the median is the third, at most 0 or at least 4 with probability
    # P(Bin(5, 1/5) >= 3) = 0.058, so that both ends are the outermost problems.
    assert interval_over_problems(values) == (0, 4)
    assert interval_over_problems({("a", 1): 1.0, ("a", 2): 3.0}) == (2, 2)
    assert all(math.isnan(end) for end in interval_over_problems({}))


def test_a_wrong_solution_is_counted_also_where_its_loss_is_the_lowest(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(100, 8, 1e-8, 1.7)])
    write_solve(tmp_path, "soap", [(100, 8, 1e-4, 0.1)], seed=2)
    write_solve(tmp_path, "adam", [(100, 8, 1e-1, 1.0)])
    write_solve(tmp_path, "nncg", [(100, 8, 1e-8, 1.7)], task="wave-2x8")
    (table,) = (one for one in solver_tables(load_solves(tmp_path, [])) if one.name == "scientific-methods")
    counted = {row.label: (row.wrong, row.unseen) for row in table.numbers.itertuples()}
    assert counted == {OURS: (1, 1), "soap": (0, 0), "adam": (1, 0), "nncg": (1, 0)}


def test_runs_that_are_unfinished_or_damaged_are_told_and_judge_nothing(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(100, 8, 1e-4, 0.3)])
    write_solve(tmp_path, "adam", [(40, 8, 1e-9, 0.3)], status="running", ended=None)
    write_solve(tmp_path, "soap", [(40, 8, 1e-9, 0.3)], seed=2, parameters="many")
    missing: list[str] = []
    runs = load_solves(tmp_path, missing)
    missing.sort()
    assert [sentence.split(":")[0] for sentence in missing] == [
        "scientific/wave-3x20/adam/seed1",
        "scientific/wave-3x20/soap/seed2",
    ]
    assert "running after 40 of 100 evaluations" in missing[0]
    assert ratios(runs, Goal("", ALL_PEERS, loss_ratio, 1)) == {}


def two_problems(logs: Path) -> list[SolveRun]:
    """Two problems with two seeds: ours halves every loss of L-BFGS-B on one, and doubles it on the other."""
    for task, factor in (("wave-3x20", 0.5), ("burgers-3x20", 2.0)):
        for seed in (1, 2):
            for label, loss in ((OURS, factor * 1e-4 * seed), ("scipy-lbfgsb", 1e-4 * seed), ("adam", 1e-2)):
                rows = [(1, 0.0, 1.0, 1.0), (100, 5.0 if label == OURS else 4.0, loss, loss**0.5)]
                write_solve(logs, label, rows, task=task, seed=seed)
    return load_solves(logs, [])


def test_goals_are_told_with_figure_range_and_verdict(tmp_path: Path) -> None:
    cells = goals_table("scientific", two_problems(tmp_path), GOALS).cells
    assert cells.iloc[1].tolist() == [
        "final loss against scipy's L-BFGS-B",
        "≤ 1/10",
        "1.2",
        "0.5 – 2",
        "0.5 – 2",
        "no",
    ]
    assert cells.iloc[2].tolist() == ["the same on the worst problem", "≤ 1", "2", "–", "0.5 – 2", "no"]
    assert cells.iloc[0].tolist()[2:] == ["–", "–", "– – –", "no"]  # Nobody ran torch's.


def test_losses_of_every_method_are_shown_and_the_lowest_is_bold(tmp_path: Path) -> None:
    tables = {table.name: table for table in solver_tables(two_problems(tmp_path))}
    losses = tables["scientific-loss"].cells.set_index("")
    assert losses.loc["SketchedLBFGS"].tolist() == ["3.0e-4", "**7.5e-5**"]
    assert losses.loc["L-BFGS-B (scipy)"].tolist() == ["**1.5e-4**", "1.5e-4"]
    assert len(tables["scientific-loss"].numbers) == 12
    methods = tables["scientific-methods"].cells.set_index("")
    assert methods.loc["SketchedLBFGS"].tolist() == ["2 of 4", "2 of 4", "0", "0", "0", "0", "1.2"]
    ratios_ = tables["scientific-ratios"].cells.set_index("problem")
    assert ratios_["loss / L-BFGS-B"].to_dict() == {"burgers": "2", "wave": "0.5"}


def test_the_time_of_a_stalled_run_is_that_before_it_idled(tmp_path: Path) -> None:
    rows = [(1, 0, 1, 1), (20, 2, 0.1, 1), (100, 120, 0.1, 1)]
    write_solve(tmp_path, "torch-lbfgs", rows, ended="stalled: no step")
    assert pace(loaded(tmp_path)["torch-lbfgs"]) == 0.1


def test_errors_with_more_points_stand_beside_those_with_few(tmp_path: Path) -> None:
    for suite, ours, peer in (("scientific", 0.4, 0.2), ("scientific-points", 0.1, 0.3)):
        write_solve(tmp_path, OURS, [(100, 1, 1e-6, ours)], suite=suite)
        write_solve(tmp_path, "soap", [(100, 1, 1e-3, peer)], suite=suite)
    # Adam was not run with more points, and compares with nobody.
    write_solve(tmp_path, "adam", [(100, 1, 1e-3, 0.01)])
    tables = {table.name: table for table in solver_tables(load_solves(tmp_path, []))}
    rows = tables["scientific-points"].cells.to_numpy().tolist()
    assert rows == [[title, "0.4", "0.1", "0.25", "0.2", "0.3", "2", "0.33"] for title in ("wave", "all")]


def test_unfinished_runs_at_full_width_are_shown_as_far_as_they_came(tmp_path: Path) -> None:
    rows = [(1, 0, 1, 1), (1500, 1800, 2e-5, 0.3)]
    write_solve(tmp_path, OURS, rows, suite="rathore", task="wave-3x200", status="running", ended=None)
    cells = progress_table(load_solves(tmp_path, [])).cells
    assert cells.iloc[0].tolist() == ["wave", "SketchedLBFGS", "1,500", "1,500", "0.50", "2.0e-5", "0.3", "running"]


def test_every_method_has_a_title_and_every_goal_a_column() -> None:
    # The logs have a method that is retired.
    assert set(TITLES) == {*METHODS, *RING, *crossing(20), "cao"}
    assert len(SHORT) == len(GOALS)
    assert set(STROKES) <= set(TITLES)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (3.14159, "3.1"), (99.4, "99"), (240.0, "240"), (2.44e-7, "2.4e-7"), (12_345, "1.2e4"), (0, "0")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text
    assert (short(math.nan), short(math.inf)) == ("–", "never")


def test_a_curve_is_the_median_of_the_lowest_losses_so_far(tmp_path: Path) -> None:
    for seed, loss in enumerate((1e-1, 1e-3, 1e-2)):
        write_solve(tmp_path, OURS, [(1, 0, 1, 1), (50, 1, loss, 1), (100 + seed, 2, 1e-9, 1)], seed=seed)
    places, losses = median_curve(load_solves(tmp_path, []), "billed")
    assert (places[0], places[-1]) == (0, 100)
    assert losses[places < 50] == pytest.approx(1)
    assert losses[(places > 50) & (places < 100)] == pytest.approx(1e-2)


def test_a_figure_has_a_panel_per_problem_and_a_line_per_method(tmp_path: Path) -> None:
    for spent in ("billed", "seconds"):
        figure = loss_figure(two_problems(tmp_path / spent), spent)
        panels = [axes for axes in figure.axes if axes.get_lines()]
        assert [axes.get_title(loc="left") for axes in panels] == ["burgers", "wave"]
        assert {line.get_label() for line in panels[0].get_lines()} == {"SketchedLBFGS", "L-BFGS-B (scipy)", "Adam"}


def test_a_report_has_them_beside_the_training_runs(tmp_path: Path) -> None:
    two_problems(tmp_path / "logs")
    write_run(tmp_path / "logs", Run([3.0, 2.0]))
    page = write_report(tmp_path / "logs", tmp_path / "report").read_text()
    assert "scientific-goals" in page
    assert (tmp_path / "report/figures/scientific/loss.png").is_file()
    assert (tmp_path / "report/tables/scientific-loss.md").is_file()
