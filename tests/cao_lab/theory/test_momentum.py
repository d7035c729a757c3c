"""Momentum with a sketch that changes and damping at the edge, against plain loops, scipy and torch's SGD."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cao_lab.theory import edge, momentum, resonance
from cao_lab.theory.momentum import random_positive, random_sketch
from cao_lab.theory.problems import CosineMixture, generator, normal

seeds = st.integers(0, 10**6)
betas = st.sampled_from([0.3, 0.5, 0.9, 0.97])
dampings = st.floats(0.1, 10)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def final_distance(order, *, beta, lr, stay, steps=400, damping=0.01):
    """Run ½‖θ‖² in the plane with exact sketches of one axis, then the other, by a plain loop."""
    point, buffer = np.array([1.0, -0.5]), np.zeros(2)
    for step in range(steps):
        gains = np.ones(2)
        gains[step // stay % 2] = 1 / (1 + 1 / damping)
        buffer = gains * (beta * buffer + point) if order == "through" else beta * buffer + gains * point
        point = point - lr * buffer
    return np.linalg.norm(point)


def test_exact_sketches_that_alternate_make_momentum_on_the_update_diverge():
    lr = 0.3 * 2 * 1.9
    assert final_distance("update", beta=0.9, lr=lr, stay=5) > 1e6
    assert final_distance("update", beta=0.0, lr=0.3 * 2, stay=5) < 1e-3
    assert final_distance("through", beta=0.9, lr=lr, stay=5) < 0.05
    assert resonance.turning(0.9, 5, "update") > 1 > resonance.turning(0.9, 5, "through")


@quick
@given(seeds, betas, st.integers(1, 4), st.sampled_from(["update", "gradient", "through"]))
def test_the_step_matrix_is_one_step_of_each_order(seed, beta, n, order):
    source = generator(seed)
    hessian, P = random_positive(source, n), momentum.unit_preconditioner(random_sketch(source, n), 1.0)
    point, buffer, lr = normal(source, n), normal(source, n), 0.3
    new = {
        "update": beta * buffer + P @ hessian @ point,
        "gradient": beta * buffer + hessian @ point,
        "through": P @ (beta * buffer + hessian @ point),
    }[order]
    moved = point - lr * (P @ new if order == "gradient" else new)
    state = momentum.step_matrix(hessian, P, lr, beta, order) @ torch.cat([point, buffer])
    assert torch.allclose(state, torch.cat([moved, new]))


def test_without_a_sketch_every_order_is_torch_sgd():
    hessian, lr = random_positive(generator(3), 4), 0.05
    point = torch.nn.Parameter(normal(generator(4), 4))
    states = {
        order: torch.cat([point.detach(), torch.zeros(4).double()]) for order in ("update", "gradient", "through")
    }
    optimizer = torch.optim.SGD([point], lr, momentum=0.9)
    for _ in range(20):
        point.grad = hessian @ point.detach()
        optimizer.step()
        for order, state in states.items():
            states[order] = momentum.step_matrix(hessian, torch.eye(4).double(), lr, 0.9, order) @ state
    for state in states.values():
        assert torch.allclose(state[:4], point.detach())


@quick
@given(seeds, betas, st.lists(st.tuples(st.floats(0.02, 0.98), st.integers(0, 3)), min_size=2, max_size=6))
def test_sketches_that_stay_longer_than_the_dwell_time_shrink_in_any_order(seed, beta, visits):
    low, high = (1 - math.sqrt(beta)) ** 2, (1 + math.sqrt(beta)) ** 2
    rates = [low + share * (high - low) for share, _ in visits]
    product = np.eye(2)
    for before, rate, (_, extra) in zip([rates[-1], *rates], rates, visits, strict=False):
        stay = math.floor(abs(resonance.dwell_time(beta, *sorted((before, rate))))) + 1 + extra
        step = np.array([[1 + beta - rate, -beta], [1, 0]])
        product = np.linalg.matrix_power(step, stay) @ product
    assert np.abs(np.linalg.eigvals(product)).max() < 1


def test_the_dwell_time_of_the_counterexample_is_longer_than_its_stay():
    rate = 0.3 * 2 * 1.9
    assert resonance.dwell_time(0.9, rate / 101, rate) == pytest.approx(24.83, abs=0.01)
    assert final_distance("update", beta=0.9, lr=rate, stay=25, steps=2000) < 1e-3


def pencil_radius(hessian, inverse, lr, beta):
    """Return the largest |z| with det(P⁻¹(z² − z) − β(z − 1) + αHz) = 0, by scipy's generalised eigenvalues."""
    n = len(hessian)
    eye, zero = np.eye(n), np.zeros((n, n))
    left = np.block([[zero, eye], [-beta * eye, inverse + beta * eye - lr * hessian]])
    return np.abs(scipy.linalg.eigvals(left, np.block([[eye, zero], [zero, inverse]]))).max()


@quick
@given(seeds, betas, dampings, st.integers(2, 5))
def test_momentum_through_any_fixed_sketch_is_stable_just_below_its_limit(seed, beta, damping, n):
    source = generator(seed)
    hessian, sketch = random_positive(source, n), random_sketch(source, n)
    limit = momentum.limit_through(hessian, sketch, damping, beta)
    inverse = np.eye(n) + sketch.numpy() / damping
    assert pencil_radius(hessian.numpy(), inverse, 0.999 * limit, beta) < 1
    assert pencil_radius(hessian.numpy(), inverse, 1.001 * limit, beta) > 1
    assert limit >= 2 * (1 + beta) / np.linalg.eigvalsh(hessian.numpy())[-1] * (1 - 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds, betas)
def test_energy_falls_at_the_safe_rate_whatever_the_sketches(seed, beta):
    source = generator(seed)
    function = CosineMixture.random(4, 6, source)
    lr, point, buffer = 2 * (1 - beta) / function.smoothness, normal(source, 4), torch.zeros(4).double()
    energy = float("inf")
    for _ in range(30):
        buffer = torch.linalg.solve(torch.eye(4) + random_sketch(source, 4), beta * buffer + function.gradient(point))
        point = point - lr * buffer
        before, energy = energy, function.value(point) + lr * beta / 2 * float(buffer @ buffer)
        assert energy <= before + 1e-12


@quick
@given(seeds, betas, st.floats(0.01, 100), st.integers(2, 5), st.sampled_from(["update", "through"]))
def test_damping_at_the_edge_bears_twice_the_sketch_and_the_rate_of_no_sketch(seed, beta, lr, n, order):
    source = generator(seed)
    sketch = random_sketch(source, n).numpy()
    hessian = 2 * sketch + 2 * (1 + beta) / lr * np.eye(n)
    gains = np.linalg.inv(np.eye(n) + sketch / edge.edge_damping(lr, beta, order))
    inverse = np.linalg.inv(gains)
    for factor, is_stable in ((0.999, True), (1.001, False)):
        if order == "through":
            radius = pencil_radius(factor * hessian, inverse, lr, beta)
        else:
            step = np.block([[(1 + beta) * np.eye(n) - lr * factor * gains @ hessian, -beta * np.eye(n)],
                             [np.eye(n), np.zeros((n, n))]])  # fmt: skip
            radius = np.abs(np.linalg.eigvals(step)).max()
        assert (radius < 1) == is_stable


@given(st.floats(0.01, 100), st.floats(0, 100), st.floats(0, 100), betas)
def test_the_rate_that_a_residual_allows_solves_its_equation(least, left_out, residual, beta):
    c = 2 * (1 + beta) / edge.lr_by_residual(least, left_out + 1e-3, residual, beta)
    assert (least - residual + c) * (c - left_out - 1e-3) == pytest.approx(residual**2, rel=1e-6, abs=1e-6)
    assert c >= left_out
    exact = edge.lr_by_residual(least, left_out + 1e-3, 0.0, beta)
    assert exact == pytest.approx(2 * (1 + beta) / (left_out + 1e-3))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.sampled_from([0.0, 0.5, 0.9]), st.floats(0.01, 3), st.sampled_from([0.9, 1.1]))
def test_noisy_curvature_shrinks_in_the_mean_square_just_below_its_limit(beta, spread, part):
    rate = part * edge.noisy_limit(beta, spread)
    # Two equally likely curvatures have any mean and variance: average the squares over both exactly, by Kronecker.
    steps = [np.array([[1 + beta - rate * factor, -beta], [1, 0]]) for factor in (1 - spread**0.5, 1 + spread**0.5)]
    radius = np.abs(np.linalg.eigvals(sum(np.kron(step, step) for step in steps) / 2)).max()
    assert (radius < 1) == (part < 1)
