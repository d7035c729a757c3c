"""Refresh by drift: when the curvature has turned, not when a clock says so, and within a budget."""

import copy
import io

import pytest
import torch
from small_models import Quadratic, batch, flat_params, smooth_network, train

from cao import CAO, OnDrift
from cao.prices import HESSIAN_PRODUCT
from cao.rules.refresh import CREDIT, Look, Seen, Track

SHARP = (50.0, 20.0, 1.0, 0.5, 0.3, 0.1)


def steps_with_refresh(problem: Quadratic, optimizer: CAO, steps: int) -> list[int]:
    """Return the steps at which the sketch was renewed."""
    refreshed = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = problem.loss()
        if optimizer.refresh_if_due(loss):
            refreshed.append(step)
        loss.backward()
        optimizer.step()
    return refreshed


def test_a_curvature_that_stays_is_looked_at_ever_more_rarely_and_not_sketched_again():
    problem = Quadratic(SHARP)
    optimizer = CAO(problem.params, 0.1, refresh_every=OnDrift(longest=100))
    assert steps_with_refresh(problem, optimizer, 90) == [0]
    assert optimizer.counters.looks == 7  # 1, 2, 4, 8, 16, 32, 64 steps after it.
    products = optimizer.counters.hessian_products
    assert steps_with_refresh(problem, optimizer, 30) == [10]
    assert optimizer.counters.hessian_products > products


def test_a_curvature_that_turns_is_noticed_at_the_next_look():
    problem = Quadratic(SHARP)
    optimizer = CAO(problem.params, 0.1)
    assert steps_with_refresh(problem, optimizer, 20) == [0]
    problem.matrix = problem.matrix.flip(0, 1)
    refreshed = steps_with_refresh(problem, optimizer, 40)
    assert refreshed[0] <= 12
    optimizer.refresh(problem.loss())
    assert optimizer.sketch.values == pytest.approx([50.0, 20.0], rel=1e-3)


def test_a_watched_direction_that_becomes_sharp_is_captured():
    problem = Quadratic((3.0, 1.0, 0.5, 0.3, 0.2, 0.1))
    optimizer = CAO(problem.params, 0.1)
    steps_with_refresh(problem, optimizer, 5)
    assert optimizer.captured == 0
    problem.matrix = 10 * problem.matrix
    steps_with_refresh(problem, optimizer, 20)
    assert optimizer.captured == 2
    assert optimizer.sketch.values == pytest.approx([30.0, 10.0])


def test_a_direction_outside_the_sketch_that_becomes_unstable_is_noticed_by_the_steps_along_it():
    problem = Quadratic((50.0, 1.0, 0.5, 0.3, 0.2, 0.1))
    optimizer = CAO(problem.params, 0.1, momentum=0.5)
    steps_with_refresh(problem, optimizer, 40)
    assert optimizer.captured == 1
    _, vectors = torch.linalg.eigh(problem.matrix)
    problem.matrix = problem.matrix + 60 * torch.outer(vectors[:, 2], vectors[:, 2])
    steps_with_refresh(problem, optimizer, 40)
    assert optimizer.captured == 2


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.2])
def test_batches_that_disagree_are_given_no_more_than_the_budget(budget):
    generator = torch.Generator().manual_seed(0)
    problem = Quadratic(SHARP)
    optimizer = CAO(problem.params, 0.1, refresh_every=OnDrift(budget=budget))
    for _ in range(1_000):
        basis = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
        problem.matrix = basis @ torch.diag(torch.tensor(SHARP, dtype=torch.float64)) @ basis.T
        steps_with_refresh(problem, optimizer, 1)
    # Each look is allowed before it is taken, so the last one may go beyond.
    first, last = 6, 6 + 2
    between = optimizer.counters.hessian_products - first - last
    assert between * HESSIAN_PRODUCT <= budget * 1_000 + CREDIT


def test_noise_is_what_a_look_sees_after_one_step_and_may_only_rise_slowly():
    rule, seen, track = OnDrift(), None, Track(steps=1, attempted_at=0, looked_at=0, captured=1)
    for drift, noise in ((0.9, 0.9), (0.3, 0.3), (0.9, 0.375)):
        _, seen = rule.wants_refresh(seen, track, lambda drift=drift: Look(drift, 0.1))
        assert seen.noise == pytest.approx(noise)


@pytest.mark.parametrize(("steps", "is_renewed"), [(1_999, False), (2_000, True)])
def test_a_sketch_is_renewed_for_its_age_only_when_that_is_paid_for(steps, is_renewed):
    policy, products = OnDrift(budget=0.05), round(0.05 * 2_000 / HESSIAN_PRODUCT)
    track, seen = Track(steps, 0, steps - 1, later_products=products), Seen(interval=400, first_looks=1, noise=0.9)
    assert policy.is_due(seen, track) == is_renewed
    assert policy.wants_refresh(seen, track, lambda: Look(0.0, 0.0))[0] == is_renewed


def heeded(policy: OnDrift, seen: Seen, track: Track, gradients: list[float]) -> list[bool]:
    """Return after which of the gradients a look is due."""
    due = []
    for gradient in gradients:
        seen = policy.heed(seen, track, lambda gradient=gradient: gradient)
        due.append(policy.is_due(seen, track))
    return due


def test_a_gradient_that_grows_suddenly_calls_for_a_refresh_within_twice_the_budget():
    policy, gradients = OnDrift(exact_budget=0.5), [1.0, 1.1, 0.8, 2.5, 4.0, 4.0, 4.2]
    for share, is_heard in ((0.4, True), (0.9, True), (1.1, False)):
        products = round((share * 1_000 + CREDIT) / HESSIAN_PRODUCT)
        track, seen = Track(1_000, 990, 999, later_products=products), Seen(interval=100, first_looks=1, noise=0.1)
        assert heeded(policy, seen, track, gradients) == [False] * 4 + [is_heard] + [False] * 2


def test_where_batches_disagree_gradients_are_not_asked_for():
    track, seen = Track(steps=10, looked_at=9), Seen(interval=100, first_looks=1, noise=0.9)
    seen = OnDrift().heed(seen, track, lambda: pytest.fail("the norm was asked for"))
    assert not OnDrift().is_due(seen, track)


def test_a_gradient_that_is_not_finite_is_not_remembered():
    track, seen = Track(steps=10, looked_at=9), Seen(interval=100, first_looks=1, noise=0.1)
    assert heeded(OnDrift(), seen, track, [1.0, float("nan"), float("inf"), 1.0, 5.0]) == [False] * 4 + [True]


def test_steps_that_become_unstable_between_looks_are_noticed_by_the_gradient():
    problem = Quadratic((50.0, 1.0, 0.5, 0.3, 0.2, 0.1))
    optimizer = CAO(problem.params, 0.1)
    steps_with_refresh(problem, optimizer, 70)  # The next look would come 58 steps later.
    _, vectors = torch.linalg.eigh(problem.matrix)
    problem.matrix = problem.matrix + 60 * torch.outer(vectors[:, 2], vectors[:, 2])
    assert steps_with_refresh(problem, optimizer, 15)
    assert optimizer.captured == 2


def test_a_run_that_was_saved_goes_on_bit_for_bit():
    def trained(model, optimizer, seeds):
        for seed in seeds:
            train(model, optimizer, [batch(seed=seed)])

    whole = smooth_network()
    trained(whole, CAO(whole.parameters(), 3.0, momentum=0.9), range(30))
    for stop in (1, 2, 9, 20):
        model = smooth_network()
        optimizer = CAO(model.parameters(), 3.0, momentum=0.9)
        trained(model, optimizer, range(stop))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(model)
        resumed = CAO(other.parameters(), 1.0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        trained(other, resumed, range(stop, 30))
        assert torch.equal(flat_params(other), flat_params(whole))


def test_nobody_who_looks_in_time_is_warned_and_a_loop_without_refreshes_is(recwarn):
    problem = Quadratic(SHARP)
    optimizer = CAO(problem.params, 0.001, refresh_every=OnDrift(longest=10))
    steps_with_refresh(problem, optimizer, 50)
    assert not recwarn
    for _ in range(30):
        problem.loss().backward()
        optimizer.step()
    assert "twice as old" in str(recwarn.pop(UserWarning).message)


def test_a_look_at_a_loss_that_overflowed_is_taken_again_and_not_learnt():
    problem = Quadratic(SHARP)
    optimizer = CAO(problem.params, 0.1)
    steps_with_refresh(problem, optimizer, 1)
    for factor in (torch.nan, torch.inf):
        assert not optimizer.refresh_if_due(problem.loss() * factor)
    saved = optimizer.state_dict()["param_groups"][0]["progress"]["seen"]
    assert (saved["noise"], saved["spread"], saved["first_looks"]) == (0.0, 0.0, 0)
    steps_with_refresh(problem, optimizer, 3)
    saved = optimizer.state_dict()["param_groups"][0]["progress"]["seen"]
    assert saved["first_looks"] == 1
    assert saved["noise"] < 1e-3


def test_a_loss_without_curvature_teaches_nothing_but_that():
    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = CAO([theta], 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = theta.sum() + 0 * theta.square().sum()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
    saved = optimizer.state_dict()["param_groups"][0]["progress"]["seen"]
    assert saved["noise"] == saved["spread"] == 0.0
    assert optimizer.counters.looks <= 4


def test_a_parameter_that_joins_is_sketched_at_the_next_look():
    problem = Quadratic(SHARP, sizes=(4, 2))
    problem.params[1].requires_grad_(False)
    optimizer = CAO(problem.params, 0.1)
    steps_with_refresh(problem, optimizer, 1)
    problem.params[1].requires_grad_(True)
    assert steps_with_refresh(problem, optimizer, 1) == [0]
    assert optimizer.sketch.vectors.shape[0] == 6
