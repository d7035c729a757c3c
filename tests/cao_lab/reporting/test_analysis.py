"""What is computed from logs agrees with loops, closed forms and scipy."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import DataFrame, Series, concat
from pandas.testing import assert_frame_equal
from scipy import stats
from synthetic_logs import ADAM, CAO, SGD, Run, suite_of_runs, write_suite

from cao_lab.facts import CURVATURES
from cao_lab.reporting import analysis, rates
from cao_lab.reporting.intervals import (
    all_ratios,
    difference_interval,
    paired_ratio,
    ratio_interval,
    variance_ratio,
    welch,
    with_noise,
)
from cao_lab.reporting.logreader import load_logs

SAMPLES = st.lists(st.floats(-5, 5), min_size=2, max_size=6).filter(lambda values: np.std(values) > 0.01)


def table(folder: Path, *runs: Run) -> DataFrame:
    return load_logs(write_suite(folder, runs)).epochs


def first_hits(epochs: DataFrame, threshold: float, prices: Mapping[str, float] = CURVATURES) -> DataFrame:
    return analysis.first_epoch_below(analysis.ended_with_costs(epochs, prices), [threshold])


def hit(folder: Path, losses: list[float], threshold: float) -> Series:
    return first_hits(table(folder, Run(losses)), threshold).iloc[0]


def test_the_first_epoch_at_or_below_the_threshold_counts(tmp_path: Path) -> None:
    found = hit(tmp_path, [4.0, 3.0, 2.0, 3.0, 1.0], 2.0)
    assert (found["epoch"], found["seconds"], found["crossing_epoch"]) == (3, 6.0, 3.0)


def test_the_crossing_is_interpolated_between_epochs(tmp_path: Path) -> None:
    found = hit(tmp_path, [4.0, 3.0, 1.0], 2.5)
    assert (found["epoch"], found["crossing_epoch"], found["crossing_seconds"]) == (3, 2.25, 4.5)


def test_never_reached_is_missing_and_not_the_last_epoch(tmp_path: Path) -> None:
    found = hit(tmp_path, [4.0, 3.0], 2.0)
    assert found[["epoch", "seconds", "crossing_epoch", "gradient_cost"]].isna().all()
    assert found["budget"] == 2


def test_a_loss_that_is_not_a_number_reaches_nothing(tmp_path: Path) -> None:
    assert math.isnan(hit(tmp_path, [4.0, math.nan], 2.0)["epoch"])


def test_a_first_epoch_below_the_threshold_has_no_crossing_before_it(tmp_path: Path) -> None:
    assert hit(tmp_path, [1.0, 0.5], 2.0)["crossing_epoch"] == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=12), st.floats(0.1, 5))
def test_first_hits_agree_with_a_loop(losses: list[float], threshold: float) -> None:
    epochs = DataFrame({"train_loss": losses, "epoch": np.arange(1.0, len(losses) + 1)})
    epochs = epochs.assign(seconds=epochs["epoch"], run=0, has_ended=True, budget=99, curvature="hessian")
    epochs = epochs.assign(gradient_evaluations=0, hessian_products=0, suite="s", task="t", label="l", seed=0)
    epochs = epochs.assign(optimizer="sgd", steps_per_epoch=40)
    expected = next((epoch for epoch, loss in enumerate(losses, start=1) if loss <= threshold), math.nan)
    found = first_hits(epochs, threshold).iloc[0]
    assert found["epoch"] == expected or (math.isnan(found["epoch"]) and math.isnan(expected))
    assert not found["crossing_epoch"] > found["epoch"]


def test_many_thresholds_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    ended = analysis.ended_with_costs(load_logs(write_suite(tmp_path, suite_of_runs())).epochs, CURVATURES)
    together = analysis.first_epoch_below(ended, [4.0, 1.0, 2.5])
    alone = [analysis.first_epoch_below(ended, [threshold]) for threshold in (4.0, 1.0, 2.5)]
    assert_frame_equal(together, concat(alone, ignore_index=True))


def test_a_run_that_has_not_ended_is_left_out(tmp_path: Path) -> None:
    epochs = table(tmp_path, Run([1.0], status="running"), Run([1.0], seed=1))
    assert first_hits(epochs, 2.0)["seed"].tolist() == [1]


def test_curvature_products_count_at_their_price(tmp_path: Path) -> None:
    epochs = table(tmp_path, Run([4.0, 1.0]))
    assert first_hits(epochs, 2.0, {"hessian": 3.0})["gradient_cost"].tolist() == [80 + 3 * 22]


def test_a_measured_price_replaces_the_assumption(tmp_path: Path) -> None:
    bench = DataFrame([{"name": "hessian_product_per_gradient", "value": 5.0}])
    nothing = table(tmp_path, Run([1.0]))
    assert analysis.product_prices(nothing, bench) == {"hessian": 5.0, "gauss-newton": 2.1}
    assert analysis.product_prices(nothing, DataFrame()) == {"hessian": 3.2, "gauss-newton": 2.1}


def test_a_task_whose_runs_tell_the_price_of_a_product_is_billed_at_that(tmp_path: Path) -> None:
    # An epoch of 40 gradients takes SGD 2 seconds; CAO's takes 1.1 more for 11 products of 0.1 s, two gradients each.
    epochs = table(tmp_path, Run([4.0, 3.0], "sgd", 0, SGD, seconds=2.0), Run([4.0, 3.0], seconds=3.1))
    bench = DataFrame([{"name": "hessian_product_per_gradient", "value": 5.0}])
    assert analysis.product_prices(epochs, bench) == {"hessian": pytest.approx(2.0), "gauss-newton": 2.1}


@settings(deadline=None, max_examples=50)
@given(SAMPLES, SAMPLES, st.sampled_from([0.9, 0.95, 0.99]))
def test_the_interval_is_welchs(left: list[float], right: list[float], confidence: float) -> None:
    expected = stats.ttest_ind(left, right, equal_var=False).confidence_interval(confidence)
    found = welch(left, right, confidence)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.counts == (len(left), len(right))


@settings(deadline=None, max_examples=20)
@given(SAMPLES, SAMPLES)
def test_all_pairs_at_once_have_the_interval_of_each(left: list[float], right: list[float]) -> None:
    rows = np.full((2, 6), math.nan)
    rows[0, : len(left)], rows[1, : len(right)] = np.exp(left), np.exp(right)
    expected = stats.ttest_ind(left, right, equal_var=False).confidence_interval()
    center, low, high = all_ratios(rows)[0, 1]
    assert center == pytest.approx(math.exp(np.mean(left) - np.mean(right)))
    assert (low, high) == (pytest.approx(np.exp(expected.low)), pytest.approx(np.exp(expected.high)))


def test_of_all_pairs_those_with_a_single_value_have_no_interval() -> None:
    found = all_ratios(np.array([[2.0, math.nan], [1.0, 1.0], [4.0, 4.0], [math.nan, math.nan]]))
    assert found[0, 1].tolist() == [2.0, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True)]
    assert found[2, 1] == pytest.approx([4.0, 4.0, 4.0])
    assert np.isnan(found[3]).all()


def test_two_sides_without_spread_have_an_interval_without_width() -> None:
    found = welch([2.0, 2.0], [1.0, 1.0])
    assert (found.low, found.center, found.high) == (1.0, 1.0, 1.0)


def test_pairs_have_students_interval() -> None:
    left, right = {1: 8.0, 2: 6.0, 3: 5.0}, {3: 2.0, 2: 3.0, 1: 2.0}
    logs = np.log([4.0, 2.0, 2.5])
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    found = paired_ratio(left, right)
    assert (found.low, found.high) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))


def test_variances_have_fishers_interval() -> None:
    above, below = [[1.0, 3.0, 8.0], [2.0, 4.0]], [[1.0, 1.5, 2.5, 2.0]]
    center = ((26 + 2) / 3) / (1.25 / 3)
    found = variance_ratio(above, below)
    assert found.center == pytest.approx(center)
    assert found.low == pytest.approx(center / stats.f.ppf(0.975, 3, 3))
    assert found.high == pytest.approx(center * stats.f.ppf(0.975, 3, 3))


def test_noise_is_the_largest_difference_of_a_method_from_itself() -> None:
    ratio, difference = ratio_interval({0: 2.0}, {0: 1.0}), difference_interval({0: 2.0}, {0: 1.0})
    one, same = {0: 4.0, 1: 1.0, 2: 9.0}, {0: 2.0, 1: 3.0}
    assert with_noise(ratio, [(one, same)]).noise == 3.0
    assert with_noise(difference, [(one, same)]).noise == 2.0
    assert with_noise(ratio, [(one, same), ({0: 5.0}, {0: 1.0})]).noise == 5.0
    assert math.isnan(with_noise(ratio, [(one, {})]).noise)


def test_runs_that_are_the_same_to_the_last_bit_tell_no_noise() -> None:
    ratio, one = ratio_interval({0: 2.0}, {0: 1.0}), {0: 4.0, 1: 1.0}
    assert math.isnan(with_noise(ratio, [(one, one)]).noise)
    assert with_noise(ratio, [(one, {0: 4.0, 1: 2.0})]).noise == 2.0


@pytest.mark.parametrize(
    ("confidence", "margin", "seeds"),
    [(0.95, 0.1, 4), (0.95, 0.05, 9), (0.95, 0.001, math.inf), (0.99, 0.1, 6), (0.99, 0.05, 16)],
)
def test_the_seeds_for_a_margin_are_those_of_an_interval_as_wide(
    confidence: float, margin: float, seeds: float
) -> None:
    found = welch([0.0, 0.1], [0.0, 0.0], confidence)
    assert found.seeds_for(margin) == seeds
    if seeds < math.inf:
        tail = (1 + confidence) / 2
        reach = [stats.t.ppf(tail, 2 * n - 2) * found.spread / math.sqrt(n) for n in (seeds - 1, seeds)]
        assert reach[1] <= margin < reach[0]


def test_the_papers_speedup_from_the_papers_epochs() -> None:
    found = ratio_interval(Series([55.0, 56.0, 57.0]), Series([19.0, 19.0, 19.0]))
    assert found.center == pytest.approx(2.947, abs=1e-3)
    assert found.low < 2.947 < found.high


def test_ratios_skip_who_never_arrived() -> None:
    found = ratio_interval(Series([8.0, 2.0, math.nan]), Series([1.0, 4.0, 2.0]))
    assert (found.center, found.counts) == (pytest.approx(4 / 2), (2, 3))


def test_one_pair_has_no_interval() -> None:
    found = ratio_interval(Series([2.0]), Series([1.0]))
    assert found.center == 2
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_time_to_threshold_says_how_many_seeds_reached_it(tmp_path: Path) -> None:
    runs = [Run([4.0, 2.0], "adam", 0, ADAM), Run([4.0, 3.0], "adam", 1, ADAM)]
    runs += [Run([2.0, 1.0], "cao", seed, CAO) for seed in (0, 1)]
    hits = first_hits(table(tmp_path, *runs), 2.5)
    found = analysis.time_to_threshold(hits, "adam").set_index("label")
    assert found["reached"].tolist() == [1, 2]
    # Adam crosses at 1.75 of its epochs on the one seed that arrives, CAO in its first on both.
    assert found.loc["cao", "epoch_speedup"] == pytest.approx(1.75)
    assert found.loc["cao", "epoch_speedup_pairs"] == 1


def test_a_diverged_run_has_no_final_result(tmp_path: Path) -> None:
    epochs = table(tmp_path, Run([4.0, 3.0]), Run([4.0, math.inf], seed=1, status="diverged"))
    finals = analysis.final_results(epochs)
    assert finals["train_loss"].isna().tolist() == [False, True]
    assert analysis.mean_and_std(finals, "train_loss")[["count", "seeds"]].to_numpy().tolist() == [[1, 2]]


def test_costs_are_ratios_to_the_baseline_of_the_same_seed(tmp_path: Path) -> None:
    runs = [Run([4.0], "sgd", seed, SGD, seconds=2.0) for seed in (0, 1)]
    runs += [Run([4.0], "cao", seed, CAO, seconds=3.0) for seed in (0, 1)]
    found = analysis.cost_ratios(analysis.run_costs(table(tmp_path, *runs)), "sgd").set_index("label")
    assert found.loc["cao", "seconds_per_epoch_ratio"] == pytest.approx(1.5)
    assert found.loc["cao", "peak_memory_mib_ratio"] == pytest.approx(1.0)


def test_the_edge_of_stability_takes_the_effective_rate_and_momentum(tmp_path: Path) -> None:
    runs = [Run([1.0], "a", 0, SGD), Run([1.0], "b", 0, CAO), Run([1.0], "c", 0, CAO | {"scaling": "unit"})]
    epochs = table(tmp_path, *runs)
    assert rates.effective_rate(epochs).tolist() == pytest.approx([0.01, 0.1, 0.01])
    assert rates.stability_edge(epochs).tolist() == pytest.approx([380.0, 20.0, 200.0])


def test_a_stable_window_ends_between_the_last_that_works_and_the_next_that_fails(tmp_path: Path) -> None:
    runs = [
        Run([2.2, 1.0 if rate < 0.5 else 3.0], f"sgd-lr{rate}", 0, SGD | {"lr": rate}, "stable-range", "digits-mlp")
        for rate in (0.1, 0.4, 0.6, 0.8)
    ]
    found = rates.stable_windows(table(tmp_path, *runs)).iloc[0]
    assert (found["largest_stable"], found["smallest_unstable"], found["trials"]) == (0.4, 0.6, 4)


def test_the_predicted_rate_is_where_a_quadratic_turns_unstable(tmp_path: Path) -> None:
    def limit(eigenvalues: list[float], config: dict[str, Any]) -> tuple[float, float]:
        run = Run([2.2, 1.0], "one", 0, config, "stable-range", "digits-mlp", eigenvalues=eigenvalues)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        logs = load_logs(write_suite(folder, [run]))
        found = rates.predicted_windows(logs.epochs, logs.refreshes).iloc[0]
        return found["predicted_first"], found["predicted_median"]

    # λ = 8 has the limit 2/8; captured at η = 0.1 it has 2/8 + 2/0.1; along negative ones no rate contracts.
    assert limit([8.0, 4.0], SGD | {"momentum": 0.0}) == pytest.approx((0.25, 0.25))
    assert limit([8.0, 4.0], CAO) == pytest.approx((0.5, 0.5))
    assert limit([8.0, 0.05], CAO) == pytest.approx((20.25, 20.25))
    # A captured negative one is no limit; a negative one outside tells nothing of the positive ones behind it.
    assert limit([-8.0, 4.0], CAO) == pytest.approx((0.5, 0.5))
    assert math.isnan(limit([8.0, -4.0], CAO)[0])
    assert limit([-8.0, 4.0], SGD | {"momentum": 0.0}) == pytest.approx((0.5, 0.5))


def test_a_first_refresh_that_tells_no_limit_is_not_replaced_by_a_later_one() -> None:
    rows = [("one", 0, 8.0, True), ("one", 0, -4.0, False), ("one", 40, 8.0, True), ("one", 40, 4.0, False)]
    refreshes = DataFrame(rows, columns=["run", "step", "eigenvalue", "is_captured"]).assign(damping=0.1)
    first, later = rates.quadratic_limits(refreshes)["one"]
    assert math.isnan(first)
    assert later == pytest.approx(0.5)


def test_a_band_ends_with_its_shortest_run(tmp_path: Path) -> None:
    epochs = table(tmp_path, Run([4.0, 3.0, 2.0]), Run([2.0, 1.0], seed=1), Run([3.0, math.nan], seed=2))
    band = analysis.seed_band(epochs, "train_loss")
    assert band["mean"].tolist() == [3.0]
    assert band["std"].tolist() == [1.0]


def test_a_band_does_not_reach_below_the_lowest_run(tmp_path: Path) -> None:
    """The mean less the standard deviation would be 1.1 − 1.8 in the first epoch, which no logarithm has."""
    epochs = table(tmp_path, Run([0.1, 1.0]), Run([0.1, 2.0], seed=1), Run([3.1, 3.0], seed=2))
    band = analysis.seed_band(epochs, "train_loss")
    assert band["low"].tolist() == [0.1, 1.0]
    assert (band["mean"] - band["std"]).tolist() == pytest.approx([1.1 - 3**0.5, 1.0])


def test_a_refresh_in_one_epoch_of_ten_is_in_the_mean(tmp_path: Path) -> None:
    folder = write_suite(tmp_path, [Run([3.0] * 10, seconds=1.0)])
    (path,) = folder.rglob("epochs.csv")
    path.write_text(path.read_text().replace(",1.0,500.0,", ",11.0,500.0,", 1))
    assert analysis.run_costs(load_logs(folder).epochs)["seconds_per_epoch"].tolist() == [2.0]


def test_the_loss_of_a_full_batch_was_seen_before_its_step(tmp_path: Path) -> None:
    epochs = table(tmp_path, Run([4.0, 3.0, 1.0, 0.5], optimizer=SGD, seconds=2.0)).assign(steps_per_epoch=1)
    found = first_hits(epochs, 1.0).iloc[0]
    # Two steps of 40 evaluations (in these made-up logs) and 2 seconds, then one evaluation that shows the loss.
    assert found[["epoch", "seconds", "gradient_cost"]].tolist() == [2, 4.0, 81.0]


def test_epochs_of_lbfgs_are_not_compared(tmp_path: Path) -> None:
    lbfgs = Run([4.0, 1.0], "lbfgs", 0, {"name": "lbfgs", "lr": 1.0})
    hits = first_hits(table(tmp_path, lbfgs, Run([4.0, 1.0], "sgd", 0, SGD)), 1.0)
    rows = analysis.time_to_threshold(hits, "sgd").set_index("label")
    assert rows["epoch_mean"].to_dict() == {"lbfgs": 2, "sgd": 2}
    assert math.isnan(rows.loc["lbfgs", "epoch_speedup"])


def test_sensitivity_has_a_row_a_cell(tmp_path: Path) -> None:
    runs = [
        Run([1.0, 0.5], f"cao-{damping}-{every}", 0, CAO | {"damping": damping, "refresh_every": every}, "sensitivity")
        for damping in (0.01, 0.1) for every in (200, 400)
    ]  # fmt: skip
    epochs = table(tmp_path, *runs)
    found = analysis.sensitivity(epochs, first_hits(epochs, 0.75))
    assert found[["damping", "refresh_every", "epoch"]].to_numpy().tolist() == [
        [0.01, 200, 2], [0.01, 400, 2], [0.1, 200, 2], [0.1, 400, 2],
    ]  # fmt: skip


def test_an_undeclared_threshold_lies_halfway_on_a_log_scale(tmp_path: Path) -> None:
    assert analysis.undeclared_threshold(table(tmp_path, Run([4.0, 2.0, 1.0]))) == pytest.approx(2.0)


def test_a_whole_suite_has_a_hit_for_every_run(tmp_path: Path) -> None:
    epochs = load_logs(write_suite(tmp_path, suite_of_runs())).epochs
    assert len(first_hits(epochs, 3.0)) == 36
