"""Ratios, goals, tables and figures of full-batch solvers, from made-up logs whose answers are known."""

import math
from pathlib import Path

import pytest
from synthetic_solves import write_solve

from cao_lab.log.solves import SolveRun
from cao_lab.reporting.scientific import (
    ALL_PEERS,
    GOALS,
    NNCG_RUNS,
    OURS,
    Goal,
    billed_until,
    error_ratio,
    load_solves,
    loss_ratio,
    loss_ratio_at_equal_seconds,
    outcome,
    ratios,
    share_of_evaluations,
)
from cao_lab.suites.scientific import METHODS


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


def test_runs_that_are_unfinished_or_damaged_are_told_and_judge_nothing(tmp_path: Path) -> None:
    write_solve(tmp_path, OURS, [(100, 8, 1e-4, 0.3)])
    write_solve(tmp_path, "adam", [(40, 8, 1e-9, 0.3)], status="running", ended=None)
    write_solve(tmp_path, "soap", [(40, 8, 1e-9, 0.3)], seed=2, parameters="many")
    missing: list[str] = []
    runs = load_solves(tmp_path, missing)
    assert [sentence.split(":")[0] for sentence in missing] == [
        "scientific/wave-3x20/adam/seed1",
        "scientific/wave-3x20/soap/seed2",
    ]
    assert "running after 40 of 100 evaluations" in missing[0]
    assert ratios(runs, Goal("", ALL_PEERS, loss_ratio, 1)) == {}
