"""Damping at the edge: a step of SGD where that is stable, a stable one elsewhere."""

import pytest
import torch
from small_models import Quadratic, batch, descend, flat_params, smooth_network, train
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from cao import CAO, AtTheEdge, Eigenpairs
from cao.rules.damping import Pace

EXACT = {"eigensolver": "lanczos", "power_iterations": 5}


def exact_pairs(problem: Quadratic, rank: int) -> Eigenpairs:
    values, vectors = torch.linalg.eigh(problem.matrix)
    order = values.argsort(descending=True)[:rank]
    return Eigenpairs(values[order], vectors[:, order], torch.zeros(rank, dtype=torch.float64))


@pytest.mark.parametrize("lr", [0.05, 0.3])
def test_a_step_is_the_inverse_of_the_captured_curvature_plus_the_inverse_rate(lr):
    problem = Quadratic((9.0, 5.0, 0.4, 0.3, 0.2, 0.1))
    optimizer = CAO(problem.params, lr, rank=3)
    start = problem.theta
    optimizer.refresh(exact_pairs(problem, 3))
    problem.loss().backward()
    optimizer.step()
    pairs = exact_pairs(problem, 3)
    sketch = (pairs.vectors * pairs.values) @ pairs.vectors.T
    expected = start - torch.linalg.solve(sketch + torch.eye(6).double() / lr, problem.gradient(start))
    torch.testing.assert_close(problem.theta, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("sharpest", [1e2, 1e5, 1e8])
def test_no_captured_curvature_is_too_sharp(momentum, sharpest):
    problem = Quadratic((sharpest, 1.0, 0.8, 0.6, 0.5, 0.4))
    optimizer = CAO(problem.params, 0.5, momentum=momentum, **EXACT, rank=2)
    minimum = torch.linalg.solve(problem.matrix, -problem.slope)
    for _ in range(300):
        optimizer.zero_grad()
        loss = problem.loss()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(problem.theta, minimum, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_curvature_beyond_the_sketch_slows_the_step_down_to_a_share_of_the_edge(momentum):
    """Six sharp directions, one of them captured: at this rate SGD diverges."""
    problem = Quadratic((90.0, 80.0, 70.0, 60.0, 50.0, 40.0))
    optimizer = CAO(problem.params, 1.0, momentum=momentum, rank=1)
    optimizer.refresh(exact_pairs(problem, 1))
    assert optimizer.sketch.damping == pytest.approx(90 / (0.5 * 2 * (1 + momentum)))
    for _ in range(600):
        optimizer.zero_grad()
        problem.loss().backward()
        optimizer.step()
    torch.testing.assert_close(problem.theta, torch.linalg.solve(problem.matrix, -problem.slope))


def test_it_follows_the_schedule_and_is_sgd_to_the_bit_where_nothing_is_sharp():
    ends = []
    for build in (lambda params: CAO(params, 0.1, momentum=0.9), lambda params: SGD(params, 0.1, momentum=0.9)):
        model = smooth_network()
        optimizer = build(model.parameters())
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)
        for seed in range(40):
            train(model, optimizer, [batch(seed=seed)])
            scheduler.step()
        ends.append(flat_params(model))
    assert torch.equal(*ends)


def test_negative_curvature_is_left_to_sgd():
    problem, reference = (
        Quadratic((-9.0, -4.0, 1e-3, 1e-3, 1e-3, 1e-3)),
        Quadratic((-9.0, -4.0, 1e-3, 1e-3, 1e-3, 1e-3)),
    )
    ours, theirs = CAO(problem.params, 0.1, rank=2), SGD(reference.params, 0.1)
    ours.refresh(problem.loss())
    problem.loss().backward()
    reference.loss().backward()
    ours.step()
    theirs.step()
    torch.testing.assert_close(problem.theta, reference.theta)


def test_batches_that_disagree_move_the_edge_as_the_theory_says():
    """Proposition 7: the largest αλ for which E x² does not grow, by the spectral radius of its second moments."""
    for spread in (0.0, 0.1, 1.0):
        edge = Pace(1.0, 0.9, spread=spread).edge
        assert spectral_radius(0.99 * edge, 0.9, spread) < 1 < spectral_radius(1.01 * edge, 0.9, spread)


def spectral_radius(rate: float, momentum: float, spread: float) -> float:
    """Return the growth of E[x², xx′, x′²] for x₊ = (1 + β − s)x − βx′, where s has mean `rate` and a variance."""
    mean = 1 + momentum - rate
    moments = torch.tensor([
        [mean**2 + spread * rate**2, -2 * momentum * mean, momentum**2],
        [mean, -momentum, 0.0],
        [1.0, 0.0, 0.0],
    ])  # fmt: skip
    return float(torch.linalg.eigvals(moments).abs().max())


@pytest.mark.parametrize(
    "settings", [{"scaling": "inverse-damping"}, {"scaling": "inverse-damping", "damping": AtTheEdge()}]
)
def test_another_scaling_is_refused(settings):
    with pytest.raises(ValueError, match=r'damping="auto" needs scaling to be "unit", got \'inverse-damping\''):
        CAO(Quadratic().params, 0.1, **settings)


@pytest.mark.parametrize("lr", [1e-310, 5e-324])
def test_a_rate_too_small_to_be_inverted_moves_nothing(lr):
    problem = Quadratic(sizes=(2, 4))
    optimizer = CAO(problem.params, lr, momentum=0.9)
    before = problem.theta
    descend(problem, optimizer, 3)
    torch.testing.assert_close(problem.theta, before, rtol=0, atol=1e-300)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounding_of_the_sharpest_direction_does_not_make_a_float32_problem_diverge(momentum):
    torch.manual_seed(0)
    inputs = torch.randn(200, 10) * torch.logspace(-2, 3, 10)
    targets, model = inputs @ torch.randn(10, 1), torch.nn.Linear(10, 1)
    optimizer = CAO(model.parameters(), 10.0, momentum=momentum)
    losses = []
    for _ in range(300):
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-6 * losses[0]


@pytest.mark.parametrize(("spectrum", "rank"), [((3.0, -50.0), 1), ((20.0, -50.0), "auto"), ((3.0, -50.0, 1.0), 2)])
def test_negative_curvature_does_not_shorten_the_step(spectrum, rank):
    problem = Quadratic(spectrum)
    optimizer, start = CAO(problem.params, 0.1, rank=rank), problem.theta
    optimizer.refresh(problem.loss())
    problem.loss().backward()
    optimizer.step()
    values, vectors = torch.linalg.eigh(problem.matrix)
    # SGD's rate, but for the captured direction of curvature 20, and for those of 3 that are captured.
    captured = (values >= 5) | ((values == values.max()) & (rank == 2))
    rates = torch.where(captured, 0.1 / (1 + 0.1 * values), 0.1)
    expected = start - vectors @ (rates * (vectors.T @ problem.gradient(start)))
    torch.testing.assert_close(problem.theta, expected, rtol=1e-3, atol=1e-3)


def test_what_the_sketch_leaves_out_is_bounded_by_the_smallest_magnitude_that_it_has():
    """The rest has |λ| ≤ 20, of whatever sign: half of the edge 2 allows a rate of 1/20, half of what was asked for."""
    problem = Quadratic((-50.0, 20.0, 0.1, 0.1))
    optimizer = CAO(problem.params, 0.1, rank=2, **EXACT)
    optimizer.refresh(problem.loss())
    assert optimizer.sketch.damping == pytest.approx(20, rel=1e-3)
    assert optimizer.sketch.values == pytest.approx([20.0, -50.0], rel=1e-3)


def test_by_need_the_sharpest_are_captured_in_whatever_order_a_solver_returns_them():
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = CAO([theta], 0.1)
    values = torch.tensor([-30.0, 20.0, 15.0], dtype=torch.float64)
    optimizer.refresh(Eigenpairs(values, torch.eye(4, 3, dtype=torch.float64), torch.zeros(3), 0))
    assert optimizer.captured == 2
    assert optimizer.sketch.values == [20.0, 15.0]
    assert torch.equal(optimizer.sketch.vectors, torch.eye(4, dtype=torch.float64)[:, 1:3])
