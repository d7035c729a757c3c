"""Adam's metric: Adam where nothing is sharp, Newton's step of the scaled curvature where something is."""

import copy

import pytest
import torch
from small_models import Quadratic, batch, descend, flat_params, loss_of, seeded, smooth_network, step_on, train
from torch import nn
from torch.optim import Adam, AdamW

from cao import CAO, AdamMetric


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("reference", "settings"),
    [
        (lambda params: AdamW(params, 0.01, weight_decay=0.1), {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (lambda params: Adam(params, 0.01, weight_decay=0.1), {"weight_decay": 0.1}),
        (lambda params: Adam(params, 0.01, maximize=True), {"maximize": True}),
        (lambda params: Adam(params, 0.01, (0.5, 0.9), 1e-3), {"metric": AdamMetric(0.5, 0.9, 1e-3)}),
    ],
)
def test_without_a_sketch_it_is_adam_to_the_bit(reference, settings, dtype):
    ends = []
    for build in (lambda params: CAO(params, 0.01, rank=0, **{"metric": "adam", **settings}), reference):
        model = smooth_network(dtype)
        optimizer = build(model.parameters())
        for seed in range(20):
            train(model, optimizer, [batch(dtype=dtype, seed=seed)])
        ends.append(flat_params(model))
    assert torch.equal(*ends)


def test_where_nothing_is_sharp_the_defaults_are_adamw_to_the_bit():
    ends = []
    for build in (
        lambda params: CAO(params, 1e-3, metric="adam", weight_decay=0.01, decoupled_weight_decay=True),
        lambda params: AdamW(params, 1e-3),
    ):
        model = smooth_network()
        optimizer = build(model.parameters())
        for seed in range(20):
            train(model, optimizer, [batch(seed=seed)])
        ends.append(flat_params(model))
    assert torch.equal(*ends)


def test_the_sketch_is_of_the_hessian_scaled_on_both_sides():
    problem = Quadratic((90.0, 40.0, 20.0, 10.0, 5.0, 2.0), sizes=(2, 4))
    optimizer = CAO(problem.params, 0.1, rank=3, metric="adam", eigensolver="lanczos", power_iterations=5)
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        gradients.append(torch.cat([p.grad for p in problem.params]))
        optimizer.param_groups[0]["warmup_steps"] = 10  # Plain Adam, so that the metric is known in closed form.
        optimizer.step()
    optimizer.param_groups[0]["warmup_steps"] = 0
    means = sum(0.001 * 0.999 ** (2 - i) * g.square() for i, g in enumerate(gradients)) / (1 - 0.999**3)
    root = torch.diag((means.sqrt() + 1e-8).rsqrt())
    optimizer.refresh(problem.loss())
    expected = torch.linalg.eigvalsh(root @ problem.matrix @ root).flip(0)[:3]
    torch.testing.assert_close(torch.tensor(optimizer.sketch.values).double(), expected)


def test_a_step_is_the_damped_newton_step_of_the_scaled_problem():
    problem = Quadratic((90.0, 40.0, 20.0, 10.0, 5.0, 2.0), sizes=(2, 4))
    lr, beta = 0.1, 0.9
    optimizer = CAO(problem.params, lr, rank=6, metric="adam", eigensolver="lanczos", power_iterations=5)
    descend(problem, optimizer, 10)
    means = [torch.cat([optimizer.state[p][name] for p in problem.params]) for name in ("exp_avg", "exp_avg_sq")]
    start = problem.theta
    optimizer.zero_grad()
    loss = problem.loss()
    optimizer.refresh_if_due(loss)
    metric = 1 / ((means[1] / (1 - 0.999**10)).sqrt() + 1e-8)
    loss.backward()
    gradient = problem.gradient(start)
    optimizer.step()
    average = beta * means[0] + (1 - beta) * gradient
    square = 0.999 * means[1] + 0.001 * gradient.square()
    new = 1 / ((square / (1 - 0.999**11)).sqrt() + 1e-8)
    # The sketch is of the old metric, the step in the new one; the damping is 1/(lr(1 − β₁)).
    scaled = torch.diag(metric.sqrt()) @ problem.matrix @ torch.diag(metric.sqrt())
    factor = torch.linalg.inv(torch.eye(6).double() + lr * (1 - beta) * scaled)
    passed = new.rsqrt() * (factor @ (new.sqrt() * average))
    torch.testing.assert_close(problem.theta, start - lr * new * passed / (1 - beta**11))


@pytest.mark.parametrize("lr", [0.1, 0.3])
def test_a_rate_beyond_adams_edge_is_borne(lr):
    """Adam's steps grow to the size lr near the minimum; damped by the sketch they do not leave it."""
    ends = {}
    for name in ("adam", "cao"):
        problem = Quadratic((1e4, 1.0, 0.8, 0.6, 0.5, 0.4))
        betas = (0.0, 0.99)
        if name == "adam":
            optimizer = Adam(problem.params, lr, betas)
        else:
            optimizer = CAO(problem.params, lr, metric=AdamMetric(*betas))
        for _ in range(400):
            optimizer.zero_grad()
            loss = problem.loss()
            if name == "cao":
                optimizer.refresh_if_due(loss)
            loss.backward()
            optimizer.step()
        minimum = torch.linalg.solve(problem.matrix, -problem.slope)
        offset = problem.theta - minimum
        ends[name] = float(offset @ problem.matrix @ offset / 2)
    assert ends["cao"] < 0.1 * ends["adam"]


def test_a_copy_and_a_state_dict_go_on_bit_for_bit():
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.3, metric="adam")
    for seed in range(7):
        train(model, optimizer, [batch(seed=seed)])
    ends = []
    for kind in ("copy", "state"):
        other = copy.deepcopy(model)
        resumed = CAO(other.parameters(), 1.0, metric="adam" if kind == "copy" else None)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for seed in range(7, 20):
            train(other, resumed, [batch(seed=seed)])
        ends.append(flat_params(other))
    for seed in range(7, 20):
        train(model, optimizer, [batch(seed=seed)])
    assert all(torch.equal(end, flat_params(model)) for end in ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, r"Adam's metric needs momentum to be 0, got 0.9"),
        ({"max_update_norm": 1.0}, r"Adam's metric needs max_update_norm to be None, got 1.0"),
        ({"damping": "auto"}, r'damping="auto" needs metric to be None'),
        ({"metric": "rmsprop"}, r"metric must be None, \"adam\" or an AdamMetric, got 'rmsprop'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CAO(Quadratic().params, 0.1, **{"metric": "adam", **settings})


@pytest.mark.parametrize(("beta1", "first"), [(0.0, 1), (0.5, 2), (0.9, 10)])
def test_the_first_sketch_waits_until_momentum_has_seen_enough_batches(beta1, first):
    problem = Quadratic()
    optimizer = CAO(problem.params, 1e-3, metric=AdamMetric(beta1))
    descend(problem, optimizer, first)
    assert optimizer.sketch is None
    descend(problem, optimizer, 1)
    assert optimizer.sketch is not None


def test_curvature_that_only_its_own_batch_has_does_not_slow_adam_down():
    """Units of a ReLU network that a batch does not switch on have no gradient, and Adam's metric is large there."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 32, generator=draw).sub(0.8).relu()
    labels = (inputs @ torch.randn(32, 5, generator=draw)).argmax(1)
    ends = []
    for build in (Adam, lambda params, lr: CAO(params, lr, metric="adam")):
        model = seeded(lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 5)), torch.float32)
        optimizer, order = build(model.parameters(), 1e-3), torch.Generator().manual_seed(1)
        for _ in range(150):
            rows = torch.randint(600, (16,), generator=order)
            step_on(loss_of(model, (inputs[rows], labels[rows])), optimizer)
        ends.append(float(loss_of(model, (inputs, labels))))
    assert optimizer.counters.refreshes > 0
    assert ends[1] == pytest.approx(ends[0], rel=0.01)


def test_bad_settings_of_the_metric_are_refused():
    with pytest.raises(ValueError, match=r"beta2 to be at least 0 and below 1, got 1.0"):
        AdamMetric(beta2=1.0)
    with pytest.raises(ValueError, match=r"eps to be positive, got 0.0"):
        AdamMetric(eps=0.0)
