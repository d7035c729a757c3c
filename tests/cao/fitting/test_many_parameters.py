"""Fits that SketchedLBFGS carries out, with the same bounds, losses and endings."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares, minimize, nnls
from torch import nn

import cao
from cao import Ending


def random(*shape: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_network() -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(100)
        net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    return net, torch.linspace(0, 2, 50).double()[:, None]


def test_many_numbers_are_left_to_the_sketch():
    p = torch.zeros(300, dtype=torch.float64, requires_grad=True)
    matrix, target = random(400, 300), random(400)
    found = cao.fit(lambda: matrix @ p - target, [p], ftol=0, xtol=0, gtol=1e-12)
    assert (found.method, found.jacobians, found.converged) == ("sketched-lbfgs", 0, True)
    expected = torch.linalg.lstsq(matrix, target).solution
    torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)
    assert p.grad is None


@pytest.mark.parametrize("count", [10, 300])
def test_positive_linear_least_squares_are_those_of_nnls(count):
    matrix, target = random(2 * count, count), random(2 * count, seed=101)
    expected, length = nnls(matrix.numpy(), target.numpy())
    p = torch.ones(count, dtype=torch.float64, requires_grad=True)
    options = {"method": "sketched-lbfgs", "max_evaluations": 3_000, "ftol": 0, "xtol": 0}
    found = cao.fit(lambda: matrix @ p - target, [p], bounds={p: (0, None)}, **options)
    assert found.converged
    assert found.loss == pytest.approx(length**2, rel=1e-8)
    np.testing.assert_allclose(p.detach(), expected, atol=1e-5)
    assert bool((p >= 0).all())


def test_all_kinds_of_bounds_give_the_minimum_of_scipy():
    low, high = np.array([-1.0, -np.inf, 0.2, -np.inf]), np.array([0.5, 0.3, np.inf, np.inf])
    p = torch.tensor([0.5, 0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    matrix, target = random(9, 4), random(9, seed=101)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        return matrix @ x + 0.1 * (matrix @ x) ** 2 - target

    box = (torch.as_tensor(low), torch.as_tensor(high))
    found = cao.fit(lambda: residuals(p), [p], bounds={p: box}, method="sketched-lbfgs", ftol=1e-14)
    x0 = np.array([0.4, 0.0, 1.0, 1.0])
    expected = least_squares(lambda x: residuals(torch.as_tensor(x)).numpy(), x0, bounds=(low, high), xtol=1e-12)
    assert found.converged
    assert found.loss == pytest.approx(2 * expected.cost, rel=1e-6)


def test_a_bounded_coefficient_is_found_beside_a_network():
    """The equation u'' = −κ u holds for sin(1.5 t) with κ = 2.25; beyond its bound it stays there."""
    for upper, expected in ((None, 2.25), (2.0, 2.0)):
        net, t = small_network()
        t.requires_grad_()
        kappa = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        data = torch.sin(1.5 * t.detach())

        def residuals(net=net, t=t, kappa=kappa, data=data):
            u = net(t)
            (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), t, create_graph=True)
            return bend + kappa * u, 10 * (u - data)

        found = cao.fit(
            residuals,
            [("kappa", kappa), *net.named_parameters()],
            bounds={"kappa": (0, upper)},
            method="sketched-lbfgs",
            max_evaluations=150,
        )
        assert kappa.item() == pytest.approx(expected, abs=0.05)
        assert found.loss < 5


@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy"])
def test_robust_losses_have_the_minimum_of_scipy(loss):
    matrix, target = random(60, 8), random(60, seed=101)
    target[::7] += 10
    p = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    options = {"loss": loss, "scale": 0.7, "ftol": 1e-14, "gtol": 1e-10}
    found = cao.fit(lambda: [matrix @ p - target], [p], method="sketched-lbfgs", **options)
    near = least_squares(
        lambda x: matrix.numpy() @ x - target.numpy(),
        p.detach().numpy(),
        loss=loss,
        f_scale=0.7,
        xtol=1e-12,
        ftol=1e-14,
    )
    assert found.converged
    assert found.loss == pytest.approx(2 * near.cost, rel=1e-8)
    again = cao.fit(lambda: [matrix @ p - target], [p], loss=loss, scale=0.7)
    assert again.loss == pytest.approx(found.loss, rel=1e-8)


@pytest.mark.parametrize("bounds", [None, (-1.5, 0.8)])
def test_a_loss_alone_is_minimised(bounds):
    p = torch.tensor([-1.2, 0.5], dtype=torch.float64, requires_grad=True)

    def rosenbrock(x):
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2 + 3

    found = cao.fit(lambda: rosenbrock(p), [p], bounds=bounds and {p: bounds}, max_evaluations=500)
    expected = minimize(
        lambda x: rosenbrock(torch.as_tensor(x)).numpy(), [-1.2, 0.5], bounds=bounds and [bounds, bounds], tol=1e-12
    )
    assert found.method == "sketched-lbfgs"
    assert found.converged
    assert found.loss == pytest.approx(expected.fun, rel=1e-7)
    with pytest.raises(ValueError, match="a loss function has no residuals"):
        found.covariance()


def test_a_loss_alone_is_not_given_what_needs_residuals():
    p = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match='method="trust-region" needs residuals'):
        cao.fit(lambda: p.square().sum(), [p], method="trust-region")
    with pytest.raises(ValueError, match='loss="huber" needs residuals'):
        cao.fit(lambda: p.square().sum(), [p], loss="huber")
    with pytest.raises(ValueError, match="the loss is nan at the start"):
        cao.fit(lambda: (p - 2).log().sum(), [p])


def test_no_position_is_evaluated_twice():
    net, t = small_network()
    seen = []

    def residuals():
        seen.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        return net(t) - torch.sin(3 * t)

    found = cao.fit(residuals, net.parameters(), method="sketched-lbfgs", max_evaluations=60)
    assert found.reason is Ending.MAX_EVALUATIONS
    assert len(found.history) > 20
    assert found.evaluations < 1.6 * found.iterations
    assert found.loss == min(state.loss for state in found.history)


def test_what_ended_is_where_the_parameters_are():
    net, t = small_network()
    found = cao.fit(lambda: net(t) - torch.sin(3 * t), net.parameters(), method="sketched-lbfgs", max_evaluations=40)
    assert found.loss == pytest.approx(float((net(t) - torch.sin(3 * t)).detach().square().sum()), rel=1e-12)
    assert math.isfinite(found.gradient_norm)
