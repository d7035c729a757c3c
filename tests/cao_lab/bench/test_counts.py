"""What the benchmark counts: medians, ratios, slopes, bytes, products and forward passes."""

import pytest
import torch
from floats_held import AllocationMeter, Diagonal, floats_per_parameter
from torch import nn

from cao import CAO, Eigenpairs, GaussNewton, Lanczos
from cao_lab.bench.defaults import gaussian_mixture, mean_ratio
from cao_lab.bench.epoch import epoch_row, growth_row, log_log_slope, products_of_refresh
from cao_lab.bench.memory import peak_bytes
from cao_lab.bench.memory_case import train
from cao_lab.bench.rows import Estimate, Row, estimate
from cao_lab.bench.sizes import FULL
from cao_lab.bench.task import CURVATURES, BatchTask, random_task
from cao_lab.bench.timing import always, interleaved, ratio


def small_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return BatchTask(model, torch.randn(20, 6), torch.randint(3, (20,)), parts=2)


def count_forwards(model):
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_an_estimate_is_the_median_and_the_interquartile_range():
    assert estimate([1.0, 2.0, 3.0, 4.0, 100.0]) == Estimate(3.0, 2.0, 5)
    assert estimate([7.0]) == Estimate(7.0, None, 1)


def test_a_row_reaches_its_target_at_the_target():
    assert Row("a", 1.0, 1.0, None, "ratio", "", 1).is_reached
    assert not Row("a", 1.1, 1.0, None, "ratio", "", 1).is_reached
    assert Row("a", 1.0, None, None, "ratio", "", 1).is_reached is None


def test_cases_take_turns_and_the_first_round_is_not_timed():
    order = []
    cases = {name: always(lambda name=name: order.append(name)) for name in "abc"}
    times = interleaved(cases, rounds=2)
    assert "".join(order) == "abcbcacab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_ratios_are_taken_within_a_round():
    assert ratio({"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}, "a", "b").value == 2.0


def test_a_refresh_counts_in_a_stretch_although_it_falls_into_one_chunk():
    assert mean_ratio({"cao": [1.0, 2.0, 4.0], "sgd": [1.0, 2.0, 1.0]}) == Estimate(2.0, 1.5, 3)


def test_an_epoch_is_its_steps_and_its_share_of_a_refresh():
    times = {"gauss-newton": [8.0], "sgd": [2.0], "gradient": [2.0]}
    row = epoch_row(Estimate(1.01, None, 1), times, "gauss-newton", FULL, rank=1)
    assert row.value == pytest.approx((391 * 1.01 * 2 + 391 / 400 * 8) / (391 * 2))


def test_the_growth_with_the_rank_is_taken_from_the_refreshes_of_one_curvature():
    times = {1: {"hessian": [2.0, 2.0], "parts": [9.0, 9.0]}, 5: {"hessian": [10.0, 50.0], "parts": [9.0, 9.0]}}
    row = growth_row(times, "hessian", FULL)
    assert row.value == pytest.approx(1.5)  # The median of 1 and 2.


def test_a_slope_is_the_exponent_of_a_power_law():
    assert log_log_slope([1, 10, 100], [3, 30, 300]) == pytest.approx(1)
    assert log_log_slope([1, 10, 100], [3, 300, 30_000]) == pytest.approx(2)


def test_the_meter_counts_tensors_until_they_are_freed():
    with AllocationMeter() as meter:
        kept = torch.zeros(1000)
        view = kept[:10]
        temporary = kept + 1
        del temporary
        assert (meter.live_bytes, meter.peak_bytes) == (4000, 8000)
        del kept
        assert meter.live_bytes == 4000
        del view
        assert meter.live_bytes == 0


def test_between_refreshes_the_parameters_and_the_sketch_are_held():
    for rank in (1, 4):
        held, peak = floats_per_parameter(100_000, rank)
        assert held == pytest.approx(rank + 1, abs=0.01)
        assert peak > held


def test_a_refresh_holds_two_blocks_of_vectors_and_the_last_sketch():
    k = 8
    assert floats_per_parameter(10**6, k)[1] < 3 * k + 4


def test_a_refresh_takes_the_products_that_prices_are_divided_by():
    for rank in (1, 5):
        param = nn.Parameter(torch.zeros(50))
        operator = Diagonal(param)
        CAO([param], 0.1, rank=rank, damping=0.1).refresh(operator)
        assert operator.products == products_of_refresh(rank)


@pytest.mark.parametrize(("curvature", "forwards"), [("hessian", 1), ("gauss-newton", 8), ("parts", 8)])
def test_forward_passes_of_a_refresh(curvature, forwards):
    task = small_task()
    calls = count_forwards(task.model)
    CAO(task.params, 0.1, rank=1, damping=0.1).refresh(task.source(curvature))
    assert len(calls) == forwards


def test_parts_are_exact_without_batch_norm():
    task = small_task()
    column = torch.randn(sum(p.numel() for p in task.params), 1)
    torch.testing.assert_close(task.operator("parts") @ column, task.operator("hessian") @ column)


def test_a_step_in_parts_holds_less_than_one_with_the_whole_graph():
    peaks = {}
    for case in ("sgd", "parts", "hessian"):
        task = random_task(width=2, batch=16, parts=4, side=16)
        with AllocationMeter() as meter:
            train(case, task)
        peaks[case] = meter.peak_bytes
    assert peaks["sgd"] < peaks["hessian"]
    assert peaks["parts"] < peaks["hessian"]


def test_a_child_process_tells_its_peak(monkeypatch):
    # Threads that wait by spinning would slow a loaded machine down.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert peak_bytes("bare", 1, 2, 1) > 10 * 2**20


def test_a_child_that_fails_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(RuntimeError, match="measuring the memory of sgd failed"):
        peak_bytes("sgd", 0, 2, 1)


def test_the_stand_in_for_cifar_has_its_shape_and_can_be_told_apart():
    data = gaussian_mixture(200)
    assert data.train_inputs.shape == (200, 3, 32, 32)
    assert data.train_inputs.dtype == torch.uint8
    images = data.train_inputs.float().flatten(1)
    means = torch.stack([images[data.train_targets == label].mean(dim=0) for label in range(10)])
    nearest = torch.cdist(images, means).argmin(dim=1)
    assert (nearest == data.train_targets).float().mean() > 0.9


def test_every_curvature_can_refresh_a_resnet():
    for kind in CURVATURES:
        task = random_task(width=1, batch=4, parts=2, side=8)
        pairs = Lanczos(1)(task.operator(kind), torch.ones(sum(p.numel() for p in task.params), 1))
        assert isinstance(pairs, Eigenpairs)
        assert pairs.is_finite()


def test_a_refresh_by_the_default_rules_holds_few_vectors_beside_its_basis():
    """Of twelve, with no copy in another order, none of a block, and none that lives on with the one that is kept."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4), nn.Linear(4, 600), nn.Linear(600, 1))
    size = sum(p.numel() for p in model.parameters())
    optimizer = CAO(model.parameters(), 1e-3)
    with AllocationMeter() as meter:
        optimizer.refresh(GaussNewton(model, torch.randn(2, 600), lambda outputs: outputs.square().mean()))
    assert optimizer.captured == 0
    assert meter.peak_bytes / (4 * size) < 22
    assert optimizer.sketch.rows.untyped_storage().nbytes() == 4 * size
