"""Ends, trace and density of a spectrum against dense matrices, closed forms, scipy and hessian-eigenthings."""

import math
from collections.abc import Iterator

import hessian_eigenthings
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cao
from cao import GaussNewton, Hessian, extreme_eigenpairs, spectral_density, top_eigenpairs, trace

torch.set_num_threads(1)


class Bare:
    """An operator that says nothing of itself."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    """Return a dense symmetric matrix with the given eigenvalues and random eigenvectors."""
    size = len(values)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator(seed))).Q
    return (basis * values.double()) @ basis.T


def semicircle_matrix(size: int) -> Tensor:
    """Return a matrix of the Gaussian orthogonal ensemble, whose spectrum fills [−2, 2]."""
    noise = torch.randn(size, size, dtype=torch.float64, generator=generator())
    return (noise + noise.T) / math.sqrt(2 * size)


def small_network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))
    return network.to(dtype)


def small_batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(40, 6, generator=generator(1), dtype=dtype)
    return inputs, torch.randint(3, (40,), generator=generator(2))


def smoothed_reference(eigenvalues: Tensor, points: Tensor, width: float) -> Tensor:
    """Return the density of known eigenvalues, smoothed by torch's own normal distribution."""
    return torch.distributions.Normal(eigenvalues, width).log_prob(points[:, None]).exp().mean(dim=1)


def test_top_eigenpairs_are_those_of_scipy() -> None:
    matrix = semicircle_matrix(300)
    pairs = top_eigenpairs(matrix, 6, tolerance=1e-8, max_products=2000)
    reference = eigsh(matrix.numpy(), k=6, which="LA", return_eigenvectors=False)
    assert np.allclose(pairs.values, np.sort(reference)[::-1], atol=1e-10)


def test_largest_magnitude_finds_a_negative_value_first() -> None:
    matrix = with_spectrum(torch.tensor([-9.0, 5.0, 3.0, *[0.1] * 47]))
    pairs = top_eigenpairs(matrix, 2, which="magnitude")
    assert pairs.values.tolist() == pytest.approx([-9.0, 5.0], rel=1e-6)


def test_both_ends_come_from_one_krylov_space() -> None:
    matrix = with_spectrum(torch.cat([torch.tensor([-3.0, -2.0, 7.0, 20.0]), torch.linspace(-0.5, 0.5, 96)]))
    largest, smallest = extreme_eigenpairs(matrix, 2, tolerance=1e-8)
    assert largest.values.tolist() == pytest.approx([20.0, 7.0])
    assert smallest.values.tolist() == pytest.approx([-3.0, -2.0])
    assert largest.products == smallest.products < 40


def test_restarts_hold_memory_and_still_converge() -> None:
    # 300 evenly spaced values need far more products than the basis of 40 columns has room for.
    matrix = with_spectrum(torch.linspace(0, 1, 300, dtype=torch.float64))
    pairs = top_eigenpairs(matrix, 3, tolerance=1e-7, max_products=2000)
    assert pairs.products > 80
    assert pairs.values.tolist() == pytest.approx([1.0, 298 / 299, 297 / 299], abs=1e-10)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30, unique=True), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_residuals_are_true_and_vectors_orthonormal(values: list[float], k: int) -> None:
    matrix = with_spectrum(torch.tensor(values))
    pairs = top_eigenpairs(matrix, min(k, len(values)))
    true = (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)
    assert torch.allclose(pairs.residuals, true, atol=1e-10)
    gram = pairs.vectors.T @ pairs.vectors
    assert torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-10)


def test_residuals_admit_that_the_products_ran_out() -> None:
    pairs = top_eigenpairs(with_spectrum(torch.linspace(0, 1, 300, dtype=torch.float64)), 2, max_products=5)
    assert pairs.products == 5
    assert float(pairs.residuals.min()) > 1e-2


@pytest.mark.parametrize("matrix", [torch.eye(7), torch.zeros(7, 7)], ids=["identity", "zero"])
def test_a_spectrum_without_spread_is_no_trouble(matrix: Tensor) -> None:
    largest, smallest = extreme_eigenpairs(matrix, 3)
    assert torch.allclose(largest.values, matrix[0, 0].expand(3))
    assert torch.allclose(smallest.values, matrix[0, 0].expand(3))
    density = spectral_density(matrix)
    assert torch.trapezoid(density.density, density.points).item() == pytest.approx(1, abs=1e-3)


def test_non_finite_products_end_the_search_at_once() -> None:
    pairs = top_eigenpairs(torch.full((50, 50), torch.nan), 3)
    assert pairs.products == 1
    assert not pairs.is_finite()


def test_trace_of_a_small_matrix_is_exact() -> None:
    matrix = semicircle_matrix(20)
    result = trace(matrix)
    assert result.value == pytest.approx(float(matrix.trace()), abs=1e-10)
    assert result.standard_error == 0


def test_trace_scatters_as_its_standard_error_says() -> None:
    matrix = with_spectrum(torch.cat([torch.linspace(10, 100, 10), torch.linspace(-1, 1, 190)]))
    results = [trace(matrix, seed=seed) for seed in range(100)]
    scores = torch.tensor([(r.value - float(matrix.trace())) / r.standard_error for r in results])
    # The mean of 100 standard scores has a deviation of 0.1; with 20 probes each, a score's is about 1.05.
    assert abs(float(scores.mean())) < 0.35
    assert 0.8 < float(scores.std()) < 1.35


def test_trace_gains_from_the_dominant_directions() -> None:
    # Plain Hutchinson with 60 signs would have an error near √(2/60)·‖A‖ ≈ 36.
    matrix = with_spectrum(torch.cat([torch.full((4,), 100.0), torch.zeros(196)]))
    assert trace(matrix).value == pytest.approx(400, abs=1e-8)


def test_density_of_the_gaussian_orthogonal_ensemble_is_a_semicircle() -> None:
    density = spectral_density(semicircle_matrix(1000), probes=64, iterations=40, width=0.2)
    law = (4 - density.points**2).clamp_min(0).sqrt() / (2 * math.pi)
    inside = density.points.abs() < 1.6  # Smoothing rounds off the edges.
    # Tolerance: 4 % of the peak, which is 1/π.
    assert float((density.density - law)[inside].abs().max()) < 0.04 / math.pi


def test_density_of_a_sample_covariance_is_that_of_marchenko_and_pastur() -> None:
    size, ratio = 600, 0.25
    samples = torch.randn(int(size / ratio), size, dtype=torch.float64, generator=generator())
    density = spectral_density(samples.T @ samples / len(samples), probes=64, iterations=40, width=0.1)
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    law = ((high - density.points) * (density.points - low)).clamp_min(0).sqrt()
    law /= 2 * math.pi * ratio * density.points.abs()
    inside = (density.points > low + 0.35) & (density.points < high - 0.25)
    # Tolerance: 4 % of the peak.
    assert float((density.density - law)[inside].abs().max()) < 0.04 * float(law[inside].max())


def test_density_of_a_prescribed_spectrum_within_its_error_bar() -> None:
    eigenvalues = torch.cat([torch.linspace(-1, 1, 380), torch.linspace(4, 5, 15), torch.tensor([9.0, -4.0] * 2)])
    density = spectral_density(with_spectrum(eigenvalues), probes=64, iterations=64, width=0.2)
    expected = smoothed_reference(eigenvalues.double(), density.points, 0.2)
    error = (density.density - expected).abs()
    assert torch.trapezoid(density.density, density.points).item() == pytest.approx(1, abs=1e-4)
    assert float((error <= 3 * density.standard_error + 1e-6).double().mean()) > 0.95
    assert float(error.max()) < 0.05 * float(expected.max())


def test_a_quadrature_over_the_whole_space_reproduces_every_eigenvalue() -> None:
    eigenvalues = torch.linspace(-1, 3, 30, dtype=torch.float64)
    density = spectral_density(with_spectrum(eigenvalues), probes=1, iterations=100)
    assert torch.allclose(density.nodes[0], eigenvalues, atol=1e-10)
    assert bool(density.standard_error.isnan().all())


def test_moments_of_the_quadrature_are_those_of_the_start_vector() -> None:
    matrix = semicircle_matrix(80)
    density = spectral_density(matrix, probes=1, iterations=6)
    start = torch.randn(80, generator=generator(), dtype=torch.float64)
    start /= start.norm()
    for degree in range(12):
        moment = float(start @ torch.linalg.matrix_power(matrix, degree) @ start)
        assert float(density.nodes[0] ** degree @ density.weights[0]) == pytest.approx(moment, abs=1e-12)


def test_the_hessian_of_a_network_agrees_with_its_dense_spectrum() -> None:
    network, (inputs, labels) = small_network().eval(), small_batch()
    params = list(network.parameters())
    operator = Hessian(cross_entropy(network(inputs), labels), params)
    size = sum(p.numel() for p in params)
    dense = operator @ torch.eye(size, dtype=torch.float64)
    reference = torch.linalg.eigvalsh(dense)
    largest, smallest = extreme_eigenpairs(operator, 3, tolerance=1e-7)
    assert torch.allclose(largest.values, reference.flip(0)[:3], atol=1e-9)
    assert torch.allclose(smallest.values, reference[:3], atol=1e-9)
    assert trace(operator, products=3 * size).value == pytest.approx(float(reference.sum()), abs=1e-9)


def test_hessian_eigenthings_gives_the_same_in_eval_mode() -> None:
    network, (inputs, labels) = small_network().eval(), small_batch()
    loss = hessian_eigenthings.supervised_loss(cross_entropy)
    theirs = hessian_eigenthings.HessianOperator(model=network, dataloader=[(inputs, labels)], loss_fn=loss)
    reference = hessian_eigenthings.lanczos(theirs, k=3, which="LA", max_iter=50, tol=1e-10, seed=0)
    ours = top_eigenpairs(Hessian(lambda: cross_entropy(network(inputs), labels), network.parameters()), 3, 1e-8)
    assert torch.allclose(ours.values, reference.eigenvalues.double().sort(descending=True).values, atol=1e-8)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_nothing_about_the_model_changes(is_training: bool, curvature: str) -> None:
    network, (inputs, labels) = small_network().train(is_training), small_batch()
    cross_entropy(network(inputs), labels).backward()
    before = everything(network)
    if curvature == "hessian":
        operator: cao.SymmetricOperator = Hessian(lambda: part_losses(network, inputs, labels), network.parameters())
    else:
        operator = GaussNewton(network, inputs, lambda outputs: cross_entropy(outputs, labels))
    extreme_eigenpairs(operator, 2)
    top_eigenpairs(operator, 1)
    trace(operator)
    spectral_density(operator, probes=2, iterations=5)
    assert_same(before, everything(network))


def part_losses(network: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[Tensor]:
    for part in (slice(0, 20), slice(20, 40)):
        yield cross_entropy(network(inputs[part]), labels[part])


def everything(network: nn.Module) -> dict[str, object]:
    """Return all that a measurement could disturb: state, gradients, modes, identities and random streams."""
    return {
        **{name: value.clone() for name, value in network.state_dict().items()},
        **{f"{name}.grad": p.grad.clone() for name, p in network.named_parameters() if p.grad is not None},
        **{f"{name}.training": module.training for name, module in network.named_modules()},
        **{f"{name}.id": id(value) for name, value in network.state_dict(keep_vars=True).items()},
        "torch": torch.get_rng_state(),
        # Python's own stream is tested with isolation: the tests' type checker draws from it at any time.
        "numpy": np.random.get_state()[1].tolist(),
    }


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, name


def test_the_same_seed_gives_the_same_numbers() -> None:
    matrix = semicircle_matrix(50)
    first, second = spectral_density(matrix, seed=3), spectral_density(matrix, seed=3)
    assert torch.equal(first.density, second.density)
    assert trace(matrix, products=9, seed=1) == trace(matrix, products=9, seed=1)
    assert trace(matrix, products=9, seed=1) != trace(matrix, products=9, seed=2)


def test_an_operator_without_parameters_needs_its_size() -> None:
    matrix = torch.diag(torch.arange(1.0, 11.0))
    assert float(top_eigenpairs(Bare(matrix), size=10).values) == pytest.approx(10)
    with pytest.raises(ValueError, match="Bare has no params to read its size from; pass size="):
        trace(Bare(matrix))
    with pytest.raises(ValueError, match="the operator has 10 rows, got size=9"):
        trace(matrix, size=9)


@pytest.mark.parametrize("k", [0, 11])
def test_impossible_numbers_of_eigenpairs_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be from 1 to the operator's 10 rows, got {k}"):
        extreme_eigenpairs(torch.eye(10), k)


def test_too_few_products_for_the_eigenpairs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_products must be at least 5 for k = 5, got 3"):
        top_eigenpairs(torch.eye(10), 5, max_products=3)
    with pytest.raises(ValueError, match="max_products must be at least 4 for k = 2, got 3"):
        extreme_eigenpairs(torch.eye(10), 2, max_products=3)


def test_an_operator_may_carry_a_graph() -> None:
    matrix = torch.diag(torch.arange(1.0, 13.0)).requires_grad_()
    assert trace(matrix, products=60).value == pytest.approx(78.0)
    pairs = top_eigenpairs(matrix, 1)
    assert not pairs.values.requires_grad
    assert float(pairs.values[0]) == pytest.approx(12.0, rel=1e-4)
