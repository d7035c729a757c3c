"""The report of an optimizer: its figures are those of plain arithmetic, its advice fits the situation."""

import math

import pytest
import torch
from small_models import Quadratic, batch, descend, fixed, loss_of, smooth_network, train

from cao import CAO, ByNeed, Eigenpairs, LeastSquares, SketchedLBFGS

CURVED = (9.0, 4.0, 2.0, 1.0)
EXACT = {"eigensolver": "lanczos", "power_iterations": 5}


def told(optimizer: CAO | SketchedLBFGS) -> str:
    return " ".join(str(optimizer.report()).split())


def along(*axes: int, values: tuple[float, ...] = (9.0,)) -> Eigenpairs:
    """Return eigenpairs along axes of four parameters."""
    columns = torch.eye(4, dtype=torch.float64)[:, list(axes)]
    return Eigenpairs(torch.tensor(values, dtype=torch.float64), columns, torch.zeros(len(values)), 0)


def test_the_rows_are_what_the_optimizer_did():
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.01, rank=2, refresh_every=5, damping=1.0, **EXACT)
    descend(problem, optimizer, 12)
    products = optimizer.counters.hessian_products
    report = optimizer.report()
    assert report.title == "CAO after 12 steps"
    assert report.rows["refreshes"] == "3, and 0 looks in between; the last one at step 10"
    assert report.rows["sketch"] == "rank 2, λ = 9, 4"
    assert report.rows["cost"].startswith(f"{products} Hessian products, about {products * 4 / 12:.2g} gradients per")
    assert repr(report) == str(report)


def test_the_time_of_refreshes_is_told_and_saved(monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.01, rank=2, refresh_every=5, damping=1.0, **EXACT)
    descend(problem, optimizer, 12)
    assert optimizer.report().rows["cost"].endswith("; 9 s")  # Three refreshes of three seconds.
    other = CAO(Quadratic(CURVED).params, 0.01, rank=2)
    other.load_state_dict(optimizer.state_dict())
    assert other.report().rows["cost"].endswith("; 9 s")


@pytest.mark.parametrize(("momentum", "edge"), [(0.0, 2.0), (0.5, 3.0)])
def test_stability_is_the_rate_times_the_curvature_beside_the_edge(momentum, edge):
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.4, momentum=momentum, rank=4, refresh_every=5, **EXACT)
    optimizer.refresh(problem.loss())
    # Everything is captured. A plain step is stable below `edge`, this one below edge + 2λα: the ratio, times the edge.
    captured = 0.4 * 9 * edge / (edge + 2 * 9 * 0.4)
    assert optimizer.report().rows["stability"] == (
        f"lr·λ₁ = 3.6 without the sketch, at most {captured:.3g} with it; the edge of stability is {edge:.3g}"
    )
    assert f"lr·λ₁ is 3.6, beyond the edge, {edge:.3g}: without the sketch" in told(optimizer)


def test_the_paper_s_scaling_is_told_by_its_effective_rate():
    problem = Quadratic(CURVED)
    optimizer = fixed(problem.params, 0.1, rank=1, damping=0.1, **EXACT)
    with pytest.warns(UserWarning, match="edge of stability"):
        optimizer.refresh(problem.loss())
    # Outside the sketch the rate is 0.1/0.1 = 1, and the curvature is at most the 9 that was captured.
    assert "(lr/η)·λ₁ = 9 without the sketch, at most 9 with it" in told(optimizer)
    assert "may be 9 times the inverse curvature, beyond the edge of stability, 2" in told(optimizer)


def test_a_rate_that_is_too_large_outside_the_sketch_is_told_with_the_rate_that_is_not():
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 2.0, rank=ByNeed(largest=1, products=8))
    optimizer.refresh(problem.loss())
    # The next curvature, 4, may use half of the edge 2: a rate of 1/4 instead of 2.
    assert "of its length, as at lr=0.25: a larger rank allows" in told(optimizer)
    assert "all 1 directions are in use: ByNeed(largest=2) allows more" in told(optimizer)


def test_where_nothing_is_sharp_the_report_says_so():
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.01)
    optimizer.refresh(problem.loss())
    assert optimizer.report().rows["sketch"] == "none in use, the sharpest direction in view, λ = 9"
    assert optimizer.report().advice == ["no direction is too sharp for lr, so these are the steps of plain SGD"]


@pytest.mark.parametrize(("angle", "is_told"), [(0.0, False), (40.0, False), (60.0, True), (90.0, True)])
def test_a_sketch_that_turns_faster_than_it_is_refreshed_is_told(angle, is_told):
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = CAO([theta], 0.01, rank=1, refresh_every=10)
    optimizer.refresh(along(0))
    turned = along(0)
    turned.vectors[0], turned.vectors[1] = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    optimizer.refresh(turned)
    share = math.sin(math.radians(angle)) ** 2
    assert (f"turns faster than you refresh: {share:.0%} of it lies outside" in told(optimizer)) == is_told


def test_vectors_that_change_places_within_a_sketch_have_not_turned_it():
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = CAO([theta], 0.01, rank=2, refresh_every=10)
    optimizer.refresh(along(0, 1, values=(9.0, 8.0)))
    optimizer.refresh(along(1, 0, values=(9.0, 8.0)))
    assert "turns faster" not in told(optimizer)


def test_residuals_as_large_as_half_an_eigenvalue_are_told():
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = CAO([theta], 0.01, rank=1, refresh_every=10, damping=1.0)
    pairs = along(0)
    pairs.residuals[0] = 6.3
    optimizer.refresh(pairs)
    assert "a residual is 0.7 of its λ. Raise power_iterations" in told(optimizer)


def test_a_loop_without_refreshes_is_told_what_to_call():
    assert "call optimizer.refresh_if_due(loss) before loss.backward()" in told(CAO(Quadratic().params, 0.1))
    assert "first-order" in told(CAO(Quadratic().params, 0.1, rank=0))


def test_failures_are_counted():
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="non-finite"):
        optimizer.refresh(loss_of(model, batch()) * torch.nan)
    assert "all 1 refreshes were non-finite" in told(optimizer)
    train(model, optimizer, [batch()])
    optimizer.refresh(loss_of(model, batch()))
    assert "1 of 2 refreshes were non-finite and discarded" in told(optimizer)


def test_a_report_changes_nothing_and_survives_a_checkpoint():
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.3, refresh_every=2, rank=1)
    descend(problem, optimizer, 5)
    before = str(optimizer.report())
    other = CAO(Quadratic(CURVED).params, 0.3, refresh_every=2, rank=1)
    other.load_state_dict(optimizer.state_dict())
    assert str(other.report()) == before == str(optimizer.report())


def test_lbfgs_reports_what_its_status_says():
    problem = Quadratic(CURVED)
    root = torch.linalg.cholesky(problem.matrix).T
    source = LeastSquares(lambda: root @ problem.params[0], problem.params)
    optimizer = SketchedLBFGS(problem.params, source=source, rank=2, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (root @ problem.params[0]).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    status = optimizer.status
    assert optimizer.report().title == f"SketchedLBFGS after {status.iterations} iterations"
    assert optimizer.report().rows["cost"] == f"{status.evaluations} evaluations, {status.products} products"
    assert "plain L-BFGS: pass source" not in told(optimizer)


def test_lbfgs_without_a_source_and_in_single_precision_is_told():
    optimizer = SketchedLBFGS([torch.zeros(2, requires_grad=True)])
    assert "plain L-BFGS: pass source=LeastSquares(…)" in told(optimizer)
    assert "torch.float32: use float64" in told(optimizer)


def test_the_sharpest_direction_is_the_one_of_largest_curvature_not_of_largest_magnitude():
    problem = Quadratic((-10.0, 5.0, 0.1, 0.1))
    optimizer = CAO(problem.params, 0.1, rank=2, **EXACT)
    optimizer.refresh(problem.loss())
    assert "lr·λ₁ = 0.5 without the sketch" in optimizer.report().rows["stability"]
    assert "outside the sketch are too sharp" not in told(optimizer)


@pytest.mark.parametrize("settings", [{"rank": 1, **EXACT}, {}])
def test_where_no_curvature_is_positive_no_largest_one_is_named(settings):
    problem = Quadratic((-50.0, 3.0, 0.1, 0.1) if settings else (-3.0, -5.0))
    optimizer = CAO(problem.params, 0.1, **settings)
    descend(problem, optimizer, 1)
    assert optimizer.report().rows["stability"] == "no positive curvature was found; the edge of stability is 2"


def test_after_a_schedule_has_ended_the_report_is_of_the_largest_rate():
    problem = Quadratic(CURVED)
    optimizer = CAO(problem.params, 0.1, rank=1, **EXACT)
    descend(problem, optimizer, 3)
    before = optimizer.report().rows
    optimizer.param_groups[0]["lr"] = 0.0
    assert {name: optimizer.report().rows[name] for name in ("damping", "stability")} == {
        name: before[name] for name in ("damping", "stability")
    }
    assert "inf" not in told(optimizer)
