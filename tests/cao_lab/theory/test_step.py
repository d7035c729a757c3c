"""Lemma 1, Lemma 2, Corollary 1 and the stable range, against dense matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cao.linalg.columns import Eigenpairs
from cao.sketch.damped import precondition
from cao_lab.theory.descent import descent_lr, guaranteed_decrease, printed_descent_lr
from cao_lab.theory.problems import (
    CosineMixture,
    WavyLeastSquares,
    dense_preconditioner,
    eigenpairs,
    generator,
    normal,
    orthonormal,
)
from cao_lab.theory.stability import balanced_damping, relative_curvature, stable_lr, widening

seeds = st.integers(0, 10**6)
dampings = st.floats(1e-2, 1e1)
positive_spectra = st.lists(st.floats(1e-2, 1e2), min_size=2, max_size=8, unique=True).map(
    lambda values: torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
)
signed_values = st.lists(st.floats(-1e2, 1e2), min_size=1, max_size=6).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def sketch_of(values, seed, extra=2):
    vectors = orthonormal(generator(seed), len(values) + extra, len(values))
    return Eigenpairs(values, vectors, torch.zeros_like(values))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seeds)
def test_the_mixtures_derivatives_are_those_of_autograd_and_obey_its_constants(seed):
    source = generator(seed)
    function = CosineMixture.random(4, 6, source)
    point, other = normal(source, 4), normal(source, 4)
    value = lambda x: (function.amplitudes * (function.frequencies @ x + function.phases).cos()).sum()  # noqa: E731
    hessian = torch.autograd.functional.hessian(value, point)
    assert torch.allclose(torch.autograd.functional.jacobian(value, point), function.gradient(point))
    assert torch.allclose(hessian, function.hessian(point))
    assert torch.linalg.matrix_norm(hessian, ord=2) <= function.smoothness
    drift = torch.linalg.matrix_norm(function.hessian(other) - hessian, ord=2)
    assert drift <= function.hessian_smoothness * (other - point).norm()


@quick
@given(seeds, st.floats(0.01, 100))
def test_wavy_least_squares_satisfies_the_pl_inequality(seed, scale):
    source = generator(seed)
    function = WavyLeastSquares(normal(source, 3, 5))
    point = scale * normal(source, 5)
    assert function.gradient(point).square().sum() / 2 >= function.pl * function.value(point)


def test_one_wave_satisfies_the_pl_inequality_on_a_fine_grid():
    x = np.linspace(1e-3, 30, 10**6)
    ratio = (2 * x + 3 * np.sin(2 * x)) ** 2 / (2 * (x**2 + 3 * np.sin(x) ** 2))
    assert 1 / 11 <= ratio.min() <= 0.18


@quick
@given(signed_values, dampings, seeds)
def test_the_signed_preconditioner_is_indefinite_just_when_a_value_is_below_minus_the_damping(values, damping, seed):
    values = torch.where((values + damping).abs() < 1e-3, 1.0, values)
    sketch = sketch_of(values, seed)
    smallest = torch.linalg.eigvalsh(dense_preconditioner(values, sketch.vectors, damping))[0]
    assert (smallest < 0) == bool((values < -damping).any())


@quick
@given(signed_values, dampings, seeds)
def test_power_of_a_signed_step_is_the_sum_in_lemma_2(values, damping, seed):
    values = torch.where((values + damping).abs() < 1e-3, 1.0, values)
    sketch = sketch_of(values, seed)
    gradient = normal(generator(seed), sketch.vectors.shape[0])
    along = sketch.vectors.T @ gradient
    outside = gradient - sketch.vectors @ along
    expected = (along.square() / (values + damping)).sum() + outside.square().sum() / damping
    ours = gradient @ precondition(gradient, sketch, damping, negative_curvature="signed")
    size = (along.square() / (values + damping).abs()).sum() + gradient.square().sum() / damping
    assert abs(ours - expected) <= 1e-10 * size


@pytest.mark.parametrize(("policy", "used"), [("magnitude", torch.abs), ("clip", lambda x: x.clamp_min(0))])
@quick
@given(signed_values, dampings, seeds)
def test_policies_keep_the_preconditioner_between_its_bounds(policy, used, values, damping, seed):
    sketch = sketch_of(values, seed)
    columns = torch.eye(sketch.vectors.shape[0], dtype=torch.float64)
    P = torch.stack([precondition(c, sketch, damping, negative_curvature=policy) for c in columns])
    spectrum = torch.linalg.eigvalsh(P)
    assert spectrum[-1] <= (1 + 1e-9) / damping
    assert spectrum[0] >= (1 - 1e-9) / (used(values).max() + damping)


@quick
@given(signed_values, dampings, seeds)
def test_the_square_of_the_preconditioner_is_below_itself_over_the_damping(values, damping, seed):
    P = dense_preconditioner(values.abs(), sketch_of(values, seed).vectors, damping)
    assert torch.linalg.eigvalsh(P / damping - P @ P)[0] >= -1e-10 / damping**2


@quick
@given(seeds, dampings, st.integers(1, 5), st.floats(0.01, 0.999))
def test_a_step_below_the_limit_lowers_the_loss_by_what_is_guaranteed(seed, damping, rank, fraction):
    source = generator(seed)
    function = CosineMixture.random(6, 8, source)
    sketch, point = eigenpairs(function.hessian(normal(source, 6)), rank), normal(source, 6)
    gradient = function.gradient(point)
    update = precondition(gradient, sketch, damping)
    lr = fraction * descent_lr(function.smoothness, damping)
    decrease = function.value(point) - function.value(point - lr * update)
    assert decrease >= guaranteed_decrease(float(gradient @ update), lr, function.smoothness, damping) - 1e-12


@given(st.floats(1e-3, 1e3), dampings)
def test_the_printed_learning_rate_is_smaller_by_the_stated_factor(smoothness, damping):
    ratio = descent_lr(smoothness, damping) / 2 / printed_descent_lr(smoothness, damping)
    assert ratio == pytest.approx((smoothness + damping) / damping)


def heavy_ball_radius(spectrum, rank, damping, momentum, lr):
    vectors = orthonormal(generator(0), len(spectrum), len(spectrum))
    hessian = (vectors * spectrum) @ vectors.T
    product = dense_preconditioner(spectrum[:rank], vectors[:, :rank], damping) @ hessian
    eye = torch.eye(len(spectrum), dtype=torch.float64)
    top = torch.cat([eye - lr * product, -lr * momentum * eye], dim=1)
    return torch.linalg.eigvals(torch.cat([top, torch.cat([product, momentum * eye], dim=1)])).abs().max()


@quick
@given(positive_spectra, dampings, st.sampled_from([0.0, 0.5, 0.9, 0.95]), st.data())
def test_heavy_ball_is_stable_just_below_the_predicted_rate_and_not_above(spectrum, damping, momentum, data):
    rank = data.draw(st.integers(0, len(spectrum) - 1))
    limit = stable_lr(spectrum, rank, damping, momentum)
    assert heavy_ball_radius(spectrum, rank, damping, momentum, 0.999 * limit) < 1
    assert heavy_ball_radius(spectrum, rank, damping, momentum, 1.001 * limit) > 1


@quick
@given(positive_spectra, dampings, st.data())
def test_the_effective_rate_widens_by_the_stated_factor_and_never_narrows(spectrum, damping, data):
    rank = data.draw(st.integers(1, len(spectrum) - 1))
    factor = stable_lr(spectrum, rank, damping) / damping / (2 / float(spectrum[0]))
    assert factor == pytest.approx(widening(spectrum, rank, damping))
    assert factor >= 1


@quick
@given(positive_spectra, st.data())
def test_less_than_the_balanced_damping_widens_no_further_and_more_widens_less(spectrum, data):
    rank = data.draw(st.integers(1, len(spectrum) - 1))
    balanced, most = balanced_damping(spectrum, rank), float(spectrum[0] / spectrum[rank])
    assert widening(spectrum, rank, balanced) == pytest.approx(most)
    assert widening(spectrum, rank, balanced / 3) == pytest.approx(most)
    assert widening(spectrum, rank, 3 * balanced) < most


@quick
@given(positive_spectra, st.data())
def test_automatic_damping_makes_every_rate_below_two_stable(spectrum, data):
    rank = data.draw(st.integers(1, len(spectrum) - 1))
    assert relative_curvature(spectrum, rank, float(spectrum[rank - 1]))[1] <= 1
