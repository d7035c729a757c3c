"""Covariances and standard errors, against scipy, dense inverses and simulation."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit
from torch import nn

import cao

T = torch.linspace(0, 3, 40, dtype=torch.float64)


def random(*shape: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curve(t, a, k, c):
    return a * np.exp(-k * t) + c


def fitted(data: torch.Tensor) -> tuple[cao.Fit, dict[str, torch.Tensor]]:
    start = {"a": 1.0, "k": 1.0, "c": 0.0}
    names = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in start.items()}
    a, k, c = names.values()
    return cao.fit(lambda: a * torch.exp(-k * T) + c - data, names), names


def test_the_covariance_is_that_of_curve_fit():
    data = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * random(40)
    found, _ = fitted(data)
    _, expected = curve_fit(curve, T.numpy(), data.numpy(), (1, 1, 0), ftol=1e-12, xtol=1e-12)
    np.testing.assert_allclose(found.covariance(), expected, rtol=1e-4)
    errors = found.stderr()
    np.testing.assert_allclose([float(errors[name]) for name in "akc"], np.sqrt(np.diag(expected)), rtol=1e-4)


def test_a_known_noise_takes_the_place_of_the_estimate():
    data = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * random(40)
    found, _ = fitted(data)
    sigma = np.full(40, 0.2)
    _, expected = curve_fit(
        curve, T.numpy(), data.numpy(), (1, 1, 0), sigma, absolute_sigma=True, ftol=1e-12, xtol=1e-12
    )
    np.testing.assert_allclose(found.covariance(noise=0.2), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="noise must be a positive number"):
        found.covariance(noise=-1)


def test_some_parameters_have_the_covariance_that_they_have_among_all():
    data = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * random(40)
    found, names = fitted(data)
    whole = found.covariance()
    np.testing.assert_allclose(found.covariance(["c", "a"]), whole[[2, 0]][:, [2, 0]], rtol=1e-8)
    np.testing.assert_allclose(found.covariance(names["k"]), whole[1:2, 1:2], rtol=1e-8)
    with pytest.raises(ValueError, match=r"one of params \(a, k, c\) or its name, got 'd'"):
        found.covariance(["d"])


def test_intervals_of_95_per_cent_hold_the_truth_that_often():
    truth, runs, inside = {"a": 2.5, "k": 1.3, "c": 0.5}, 40, 0
    for run in range(runs):
        found, names = fitted(2.5 * torch.exp(-1.3 * T) + 0.5 + 0.05 * random(40, seed=200 + run))
        errors = found.stderr()
        # Student's t for 37 degrees of freedom.
        inside += sum(abs(p.item() - truth[name]) <= 2.026 * float(errors[name]) for name, p in names.items())
    # Three standard deviations, as if the three intervals of a run held the truth together.
    assert inside / (3 * runs) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / runs))


def test_what_only_a_sum_is_known_of_has_an_infinite_variance():
    a, b, c = (torch.tensor(1.0, dtype=torch.float64, requires_grad=True) for _ in range(3))
    data = random(40)
    found = cao.fit(lambda: (a + b) + c * T - data, {"a": a, "b": b, "c": c})
    covariance = found.covariance()
    assert covariance[0, 0] == covariance[1, 1] == math.inf
    assert bool(covariance[0, 1].isnan())
    design = torch.stack([torch.ones_like(T), T], dim=1)
    expected = found.loss / 38 * torch.linalg.inv(design.T @ design)[1, 1]
    assert float(covariance[2, 2]) == pytest.approx(float(expected))
    assert "2 of 3 directions" in str(found.report())


def network_and_coefficient(width: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(100)
        net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return net, torch.tensor(1.0, dtype=torch.float64, requires_grad=True), torch.linspace(-1, 1, 60).double()[:, None]


def test_a_coefficient_beside_a_network_has_the_variance_of_the_whole_inverse():
    net, slope, x = network_and_coefficient(3)
    data = torch.sin(3 * x) + 2 * x.square() + 0.1 * random(60, 1)
    found = cao.fit(
        lambda: net(x) + slope * x.square() - data, [("slope", slope), *net.named_parameters()], max_evaluations=4
    )
    names = [name for name, _ in net.named_parameters()]

    def model(coefficient, *values):
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), x) + coefficient * x.square()

    here = (slope.detach(), *(p.detach() for p in net.parameters()))
    parts = torch.autograd.functional.jacobian(model, here)
    jacobian = torch.cat([part.reshape(60, -1) for part in parts], dim=1)
    expected = found.loss / (60 - jacobian.shape[1]) * torch.linalg.inv(jacobian.T @ jacobian)[0, 0]
    assert float(found.covariance(["slope"])) == pytest.approx(float(expected), rel=1e-4)


def test_a_network_that_can_imitate_the_coefficient_leaves_it_undetermined():
    net, slope, x = network_and_coefficient(40)
    data = torch.sin(3 * x) + 2 * x.square()
    names = [("slope", slope), *net.named_parameters()]
    found = cao.fit(lambda: net(x) + slope * x.square() - data, names, max_evaluations=30)
    assert float(found.stderr(["slope"], noise=0.1)["slope"]) > 1
