"""The call, its bounds and its endings, against scipy."""

import math
import re

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares, nnls

import cao
from cao import Ending

T = torch.linspace(0, 3, 40, dtype=torch.float64)


def noise(count: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).requires_grad_()


DECAY = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.02 * noise(40)
WAVE = 1.5 * torch.sin(2.3 * T + 0.4) + 0.3 * noise(40, 101)
STEP = 3 / (1 + torch.exp(-3 * (T - 1.4))) + 0.1 * noise(40, 102)


def decay(p):
    return p[0] * torch.exp(-p[1] * T) + p[2] - DECAY


def wave(p):
    return p[0] * torch.sin(p[1] * T + p[2]) - WAVE


def step(p):
    return p[0] / (1 + torch.exp(-p[2] * (T - p[1]))) - STEP


def scaled(p):
    return p[0] * 1e-6 * torch.exp(-p[1] * 1e5 * T) + p[2] * 1e3 - DECAY


PROBLEMS = {
    "decay": (decay, (1.0, 0.1, 0.0)),
    "decay from afar": (decay, (100.0, 5.0, 10.0)),
    "wave": (wave, (1.0, 2.0, 0.0)),
    "step": (step, (1.0, 1.0, 1.0)),
    "badly scaled": (scaled, (1e6, 1e-6, 0.0)),
}


def by_scipy(residuals, start, **options):
    def values(x):
        return residuals(torch.as_tensor(x)).numpy()

    def jacobian(x):
        return torch.autograd.functional.jacobian(residuals, torch.as_tensor(x)).numpy()

    tight = {"xtol": 1e-12, "ftol": 1e-12, "gtol": 1e-12, "x_scale": "jac"}
    return least_squares(values, np.array(start), jacobian, **tight | options)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_minimum_is_that_of_scipy(name):
    residuals, start = PROBLEMS[name]
    p = leaf(*start)
    found = cao.fit(lambda: residuals(p), [p])
    expected = by_scipy(residuals, start)
    assert found.converged
    assert found.loss == pytest.approx(2 * expected.cost, rel=1e-9)
    np.testing.assert_allclose(p.detach(), expected.x, rtol=1e-5)


@pytest.mark.parametrize("loss", ["huber", "soft_l1", "cauchy"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_robust_losses_have_the_minimum_of_scipy(name, loss):
    residuals, start = PROBLEMS[name]
    data = torch.zeros(40, dtype=torch.float64)
    data[::9] = 2.0  # Outliers.
    p = leaf(*start)
    found = cao.fit(lambda: residuals(p) + data, [p], loss=loss, scale=0.1, ftol=1e-12)
    near = by_scipy(lambda x: residuals(x) + data, p.detach().numpy(), loss=loss, f_scale=0.1)
    assert found.converged
    assert found.loss == pytest.approx(2 * near.cost, rel=1e-8)


@pytest.mark.parametrize("name", ["decay", "wave", "step"])
def test_no_more_evaluations_than_scipys_levenberg_marquardt(name):
    residuals, start = PROBLEMS[name]
    p = leaf(*start)
    found = cao.fit(lambda: residuals(p), [p])
    lm = by_scipy(residuals, start, method="lm", ftol=1e-8, xtol=1e-8, gtol=1e-8).nfev
    assert found.evaluations <= lm + 1  # Ours counts the one at the start.


BOUNDED = {
    "decay": (decay, (1.0, 0.1, 0.1), [(0, 2), (0, 5), (0, 0.4)]),
    "decay, one side": (decay, (1.0, 0.1, 1.0), [(None, None), (None, None), (0.7, None)]),
    "wave": (wave, (1.0, 2.0, 0.0), [(None, 1.2), (None, None), (-0.1, 0.1)]),
    "step from a corner": (step, (4.0, 1.0, 1.0), [(4.0, 6.0), (0.0, 2.0), (None, 2.0)]),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_give_the_minimum_of_scipy(name):
    residuals, start, bounds = BOUNDED[name]
    low = [-math.inf if pair[0] is None else pair[0] for pair in bounds]
    high = [math.inf if pair[1] is None else pair[1] for pair in bounds]
    p = leaf(*start)
    box = (torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))
    found = cao.fit(lambda: residuals(p), [p], bounds={p: box})
    expected = by_scipy(residuals, start, bounds=(low, high))
    assert found.converged
    assert found.loss == pytest.approx(2 * expected.cost, rel=1e-7)
    assert bool((p.detach() >= box[0]).all() and (p.detach() <= box[1]).all())


@pytest.mark.parametrize("count", [3, 12, 40])
def test_positive_linear_least_squares_are_those_of_nnls_in_one_step(count):
    matrix, target = noise(60 * count).view(60, count), noise(60, 101)
    expected, length = nnls(matrix.numpy(), target.numpy())
    p = torch.ones(count, dtype=torch.float64, requires_grad=True)
    found = cao.fit(lambda: matrix @ p - target, [p], bounds={p: (0, None)})
    np.testing.assert_allclose(p.detach(), expected, atol=1e-12)
    assert found.loss == pytest.approx(length**2)
    assert found.evaluations <= 3


def test_named_parameters_are_bounded_by_name():
    a, k = torch.tensor(1.0, dtype=torch.float64, requires_grad=True), leaf(0.1)
    found = cao.fit(lambda: a * torch.exp(-k * T) - DECAY, {"a": a, "k": k}, bounds={"k": (0, 0.5)})
    assert k.item() == 0.5
    assert "k is on its bound" in str(found.report())


def test_a_parameter_that_nothing_depends_on_stays_and_is_reported():
    p, idle = leaf(1.0, 0.1, 0.0), leaf(7.0)
    found = cao.fit(lambda: decay(p), {"p": p, "idle": idle})
    assert found.converged
    assert idle.item() == 7
    assert float(found.stderr()["idle"]) == math.inf
    assert "3 of 4 directions" in str(found.report())


def test_more_parameters_than_residuals_are_fitted_to_zero():
    p = leaf(0.3, 0.2, 0.1, 0.5)
    found = cao.fit(lambda: torch.stack([p[0] * p[1] - 1, p[2] + p[3] ** 2 - 3]), [p])
    assert found.converged
    assert found.loss < 1e-20
    with pytest.raises(ValueError, match="2 residuals leave nothing to estimate the noise from"):
        found.covariance()
    assert "2 of 4 directions" in str(found.report())


def test_a_step_to_where_residuals_are_not_finite_is_taken_back():
    p = leaf(5.0)
    found = cao.fit(lambda: torch.log(p) - torch.tensor([-3.0]).double(), [p])  # Gauss-Newton steps below zero.
    assert found.converged
    assert p.item() == pytest.approx(math.exp(-3))


def test_parameters_are_left_at_the_best_position_when_the_residuals_raise():
    p, calls, best = leaf(1.0, 0.1, 0.0), [], []

    def residuals():
        calls.append(p.detach().clone())
        if len(calls) > 9:
            raise KeyboardInterrupt
        return decay(p)

    with pytest.raises(KeyboardInterrupt):
        cao.fit(residuals, [p], callback=lambda _: best.append(p.detach().clone()))
    assert torch.equal(p.detach(), best[-1])


REFUSED = [
    ({"bounds": {"p": (2, 1)}}, "must have lower < upper, got (2, 1)"),
    ({"bounds": {"p": (2, None)}}, "p starts at 1, outside its bounds (2, inf)"),
    ({"bounds": {"p": 3}}, "must be (lower, upper)"),
    ({"bounds": {"p": (math.nan, None)}}, "got NaN"),
    ({"bounds": {"q": (0, None)}}, "must be one of params (p) or its name, got 'q'"),
    ({"bounds": {"p": (torch.zeros(3), None)}}, "have its shape (1,), got (3,)"),
    ({"loss": "l1"}, "loss must be one of linear, huber, soft_l1, cauchy, got 'l1'"),
    ({"scale": 0}, "scale must be a positive number"),
    ({"ftol": -1}, "ftol must be at least 0"),
    ({"max_evaluations": 0}, "max_evaluations must be a positive whole number"),
    ({"method": "lm"}, 'method must be "auto"'),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_meant_is_refused(options, message):
    p = leaf(1.0)
    with pytest.raises(ValueError, match=re.escape(message)):
        cao.fit(lambda: p - torch.ones(2), {"p": p}, **options)


def test_residuals_that_are_not_finite_at_the_start_are_refused():
    p = leaf(-1.0)
    with pytest.raises(ValueError, match="the loss is nan at the start"):
        cao.fit(lambda: p.log() - torch.ones(2), [p])


def test_residuals_that_change_their_number_are_refused():
    p = leaf(1.0, 1.0, 1.0)
    calls = []

    def residuals():
        calls.append(0)
        return decay(p)[: 40 - (len(calls) > 8)]

    with pytest.raises(ValueError, match="40 residuals at the start, and now there are 39"):
        cao.fit(residuals, [p])


def test_a_derivative_that_is_wrong_is_no_convergence():
    p = leaf(1.0, 0.1, 0.0)
    found = cao.fit(lambda: (2 * decay(p)).detach() - decay(p), [p])
    assert found.reason is Ending.NO_DECREASE
    assert not found.converged


def test_single_precision_is_fitted_and_advised_against():
    p = torch.tensor([1.0, 0.1, 0.0], requires_grad=True)
    found = cao.fit(lambda: decay(p.double()), [p], bounds={p: (-0.1, None)})
    assert found.converged
    assert found.loss == pytest.approx(2 * by_scipy(decay, (1.0, 0.1, 0.0)).cost, rel=1e-4)
    assert "float32" in str(found.report())


def test_nothing_is_evaluated_after_convergence():
    p = leaf(1.0, 0.1, 0.0)
    first = cao.fit(lambda: decay(p), [p], ftol=0, xtol=0)
    assert first.converged
    again = cao.fit(lambda: decay(p), [p])
    assert again.converged
    assert (again.evaluations, again.jacobians) == (1, 1)


def test_spent_evaluations_are_no_convergence():
    p = leaf(100.0, 5.0, 10.0)
    found = cao.fit(lambda: decay(p), [p], max_evaluations=3)
    assert found.reason is Ending.MAX_EVALUATIONS
    assert found.evaluations == 3
    assert not found.converged
