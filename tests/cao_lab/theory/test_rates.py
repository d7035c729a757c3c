"""Proposition 1, Theorem 1 and wrong sketches, against dense matrices."""

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_discrete_lyapunov

from cao import SubspaceIteration
from cao.sketch.damped import precondition
from cao_lab.theory import contraction, sketches, stationarity
from cao_lab.theory.problems import CosineMixture, dense_preconditioner, eigenpairs, generator, normal, orthonormal
from cao_lab.theory.stability import relative_curvature
from cao_lab.theory.stationarity import Setting, bias_bound, descend, stationarity_bound, tuned_bound, tuned_lr

seeds = st.integers(0, 10**6)
dampings = st.floats(1e-2, 1e1)
spectra = st.lists(st.floats(1e-2, 1e2), min_size=3, max_size=8, unique=True).map(
    lambda values: torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
)
quick = settings(max_examples=40, deadline=None, derandomize=True)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seeds, st.floats(0.1, 10), st.floats(0.05, 1.9))
def test_squared_gradients_average_below_the_bound_at_every_length(seed, damping, fraction):
    function = CosineMixture.random(5, 10, generator(seed))
    lr = fraction * damping / function.smoothness
    run = descend(function, lr, 100, damping=damping)
    means = run.squares.cumsum(0) / torch.arange(1, 101)
    setting = Setting(function.smoothness, damping, run.captured)
    bounds = [stationarity_bound(run.gap, lr, steps, setting) for steps in range(1, 101)]
    assert (means <= torch.tensor(bounds)).all()


@given(st.floats(0.01, 1.9), st.floats(0.1, 10))
def test_the_noise_floor_is_reached_by_the_stationary_variance_of_a_parabola(rate, noise):
    variance = rate * noise**2 / (2 - rate)
    assert stationarity_bound(0.0, rate, 1, Setting(1.0, 1.0, 0.0, noise)) == pytest.approx(variance)


@given(st.floats(0.1, 100), st.integers(1, 10**6), st.floats(0.1, 100), dampings, st.floats(0.01, 10))
def test_the_tuned_bound_is_no_smaller_than_the_bound_at_the_tuned_rate(gap, steps, smoothness, damping, noise):
    setting = Setting(smoothness, damping, smoothness, noise)
    lr = tuned_lr(gap, steps, setting)
    assert stationarity_bound(gap, lr, steps, setting) <= (1 + 1e-9) * tuned_bound(gap, steps, setting)


@quick
@given(seeds, dampings, st.integers(2, 6))
def test_bias_of_a_shared_batch_stays_below_its_bound(seed, damping, batches):
    source = generator(seed)
    gradients = normal(source, batches, 5)
    pairs = [eigenpairs(10 * sketches.random_symmetric(source, 5), 2) for _ in range(batches)]
    mean = gradients.mean(dim=0)
    bias = torch.stack([precondition(g - mean, p, damping) for g, p in zip(gradients, pairs, strict=True)]).mean(dim=0)
    noise = float((gradients - mean).square().sum(dim=1).mean().sqrt())
    captured = max(float(p.values.abs().max()) for p in pairs)
    assert bias.norm() <= bias_bound(noise, captured, damping) * (1 + 1e-9)


@quick
@given(spectra, dampings, seeds, st.floats(0.01, 1.9))
def test_any_fixed_sketch_contracts_least_squares_by_its_relative_curvature(spectrum, damping, seed, fraction):
    source = generator(seed)
    n = len(spectrum) + 3
    vectors = orthonormal(source, n, len(spectrum))
    root, hessian = (vectors * spectrum.sqrt()) @ vectors.T, (vectors * spectrum) @ vectors.T
    stale = eigenpairs(sketches.random_symmetric(source, n), 2)
    P = dense_preconditioner(stale.values.abs(), stale.vectors, damping)
    relative = torch.linalg.eigvalsh(root @ P @ root)[-len(spectrum) :]
    lr = fraction * damping / float(spectrum[0])
    point = normal(source, n)
    after = point - lr * P @ (hessian @ point)
    factor = (1 - lr * relative).square().max()
    assert after @ hessian @ after <= factor * (point @ hessian @ point) * (1 + 1e-9)
    assert relative[0] >= spectrum[-1] / (stale.values.abs().max() + damping) * (1 - 1e-6)


@quick
@given(spectra, dampings, st.floats(0.01, 1))
def test_at_a_fixed_rate_more_rank_never_contracts_faster(spectrum, damping, fraction):
    lr = fraction * damping / float(spectrum[0])
    factors = [contraction.quadratic_factor(spectrum, k, damping, lr) for k in range(len(spectrum))]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(factors))


@quick
@given(spectra, st.floats(1, 100), st.data())
def test_enough_damping_makes_more_rank_help(spectrum, excess, data):
    rank = data.draw(st.integers(1, len(spectrum) - 1))
    damping = excess * contraction.sufficient_damping(spectrum, rank)
    before, after = (contraction.condition_number(spectrum, k, damping) for k in (rank - 1, rank))
    assert after <= before * (1 + 1e-9)
    least = float(spectrum[-1])
    expected = max(damping * float(spectrum[0]) / (float(spectrum[0]) + damping), float(spectrum[rank])) / least
    assert after == pytest.approx(expected)


@given(spectra, dampings, st.data())
def test_the_best_rate_gives_the_textbook_factor(spectrum, damping, data):
    rank = data.draw(st.integers(0, len(spectrum) - 1))
    kappa = contraction.condition_number(spectrum, rank, damping)
    lr = contraction.best_lr(spectrum, rank, damping)
    expected = ((kappa - 1) / (kappa + 1)) ** 2
    assert contraction.quadratic_factor(spectrum, rank, damping, lr) == pytest.approx(expected, abs=1e-12)


@quick
@given(seeds, dampings, st.floats(1e-3, 10), st.integers(1, 5))
def test_an_error_of_the_hessian_costs_no_more_than_itself_over_the_damping(seed, damping, size, rank):
    source = generator(seed)
    hessian, noise = sketches.random_symmetric(source, 6), sketches.random_symmetric(source, 6)
    delta = size * sketches.spectral_radius(noise)
    bound, observed = sketches.sketch_trial(hessian, hessian + size * noise, rank, damping, delta)
    assert observed <= bound * (1 + 1e-9) + 1e-12


@quick
@given(seeds)
def test_a_tilted_sketch_meets_curvature_between_its_two_bounds(seed):
    upper, observed, lower = sketches.tilted_trial(generator(seed))
    assert lower * (1 - 1e-9) <= observed <= upper * (1 + 1e-9)


@quick
@given(spectra, dampings, st.floats(0, 1))
def test_a_small_enough_angle_costs_at_most_a_factor_of_three(spectrum, damping, fraction):
    sine = fraction * float(spectrum[1] / spectrum[0]) ** 0.5
    exact = relative_curvature(spectrum, 1, damping)[1]
    assert sketches.curvature_at_angle(spectrum, spectrum[:1], sine, damping) <= 3 * exact * (1 + 1e-9)


@quick
@given(seeds, dampings, st.integers(0, 4), st.integers(1, 5))
def test_residuals_bound_what_an_unconverged_sketch_misses(seed, damping, iterations, rank):
    source = generator(seed)
    hessian = sketches.random_symmetric(source, 6)
    pairs = SubspaceIteration(iterations)(hessian, normal(source, 6, rank))
    bound, observed = sketches.ritz_trial(hessian, pairs, damping)
    assert observed <= bound * (1 + 1e-6) + 1e-9


@quick
@given(seeds, st.integers(0, 4), st.integers(1, 5))
def test_a_full_step_is_stable_once_residuals_are_added_to_the_damping(seed, iterations, rank):
    source = generator(seed)
    hessian = sketches.random_symmetric(source, 6)
    pairs = SubspaceIteration(iterations)(hessian, normal(source, 6, rank))
    damping = sketches.residual_damping(pairs)
    left_out = torch.linalg.svd(pairs.vectors).U[:, rank:]
    assume(float(torch.linalg.eigvalsh(left_out.T @ hessian @ left_out)[-1]) <= damping)
    P = dense_preconditioner(pairs.values.abs(), pairs.vectors, damping)
    assert torch.linalg.eigvals(P @ hessian).real.max() < 2


@quick
@given(spectra, dampings, st.floats(0.05, 1.9), seeds, st.data())
def test_noise_keeps_a_quadratic_below_its_relative_floors(spectrum, damping, fraction, seed, data):
    rank = data.draw(st.integers(0, len(spectrum) - 1))
    gains = 1 / (torch.cat([spectrum[:rank], torch.zeros(len(spectrum) - rank)]) + damping)
    low, high = relative_curvature(spectrum, rank, damping)
    root = normal(generator(seed), len(spectrum), len(spectrum))
    lr, P, H = fraction / high, torch.diag(gains), torch.diag(spectrum)
    kick = lr * P @ root @ root.T @ P * lr
    stationary = torch.from_numpy(solve_discrete_lyapunov((torch.eye(len(H)) - lr * P @ H).numpy(), kick.numpy()))
    noise = float(torch.trace(H @ P @ root @ root.T @ P))
    slack = 1 - lr * high / 2
    assert torch.trace(H @ P @ H @ stationary) <= lr * noise / (2 * slack) * (1 + 1e-6)
    assert torch.trace(H @ stationary) / 2 <= lr * noise / (4 * low * slack) * (1 + 1e-6)


@given(st.floats(1e-3, 1e3), dampings, st.floats(0.01, 1.9))
def test_a_captured_parabola_attains_its_relative_floors(top, damping, lr):
    for bound, observed in (
        stationarity.captured_floor(top, damping, lr),
        contraction.captured_floor(top, damping, lr),
    ):
        assert observed <= bound * (1 + 1e-9)
    s = top / (top + damping)
    variance = lr / (top + damping) ** 2 / (s * (2 - lr * s))
    assert stationarity.captured_floor(top, damping, lr)[0] == pytest.approx(top * s * variance)
    assert contraction.captured_floor(top, damping, lr)[0] == pytest.approx(top / 2 * variance)


def test_matrix_bernstein_solves_its_tail_equation():
    variance, largest, size, n, failure = 3.0, 7.0, 50, 10, 0.01
    error = sketches.bernstein_error(variance, largest, size, n, failure)
    tail = 2 * n * torch.tensor(-size * error**2 / 2 / (variance + largest * error / 3)).exp()
    assert float(tail) == pytest.approx(failure, rel=1e-4)
