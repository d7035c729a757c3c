"""Corrected Gauss-Newton steps against lstsq, scipy and bisection, and when SketchedLBFGS takes them."""

import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import optimize
from small_models import flat_params
from torch import Tensor, nn

from cao import LeastSquares, SketchedLBFGS
from cao.finishing import TRIES, Finish
from cao.quasi_newton.corrected import Factors, LocalModel, Trial, place_at
from cao.quasi_newton.objective import Iterate

WIDE, TALL = (6, 15), (15, 6)


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def misra(theta: Tensor, x: Tensor) -> Tensor:
    """NIST's Misra1a: b₁(1 − exp(−b₂x))."""
    return theta[0] * (1 - torch.exp(-theta[1] * x))


def thurber(theta: Tensor, x: Tensor) -> Tensor:
    """A ratio of polynomials, as NIST's Thurber and Hahn1."""
    return (theta[0] + theta[1] * x + theta[2] * x**2) / (1 + theta[3] * x + theta[4] * x**2)


FITS = {
    "misra": (misra, [2.3, 0.6], [1.0, 0.1]),
    "ratio": (thurber, [1.0, 2.0, 0.5, 0.7, 0.3], [0.3, 0.3, 0.3, 0.3, 0.3]),
}


def minimized(residuals, start: Tensor, steps: int, *, exact: bool = False) -> tuple[list[float], Tensor]:  # type: ignore[no-untyped-def]
    """Take steps, and return all losses and where they lead."""
    here, radius = place_at(residuals, start), 1.0
    losses = [here.loss]
    for _ in range(steps):
        jacobian = torch.autograd.functional.jacobian(residuals, here.position)
        found = LocalModel(residuals, here, jacobian, exact=exact).longest(radius)
        radius = found.radius
        here = found.end if found.ratio > 0 else here
        losses.append(here.loss)
    return losses, here.position


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_a_long_step_solves_a_linear_problem(shape: tuple[int, int], exact: bool) -> None:
    matrix, right = random_matrix(*shape), random_matrix(shape[0], 1, seed=1)[:, 0]
    start = torch.zeros(shape[1], dtype=torch.float64)
    here = place_at(lambda x: matrix @ x - right, start)
    found = LocalModel(lambda x: matrix @ x - right, here, matrix, exact=exact).longest(1e3)
    expected = torch.linalg.lstsq(matrix, right, driver="gelsd").solution
    torch.testing.assert_close(found.end.position, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.ratio, 1.0, rtol=1e-9, atol=0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_a_step_has_the_length_that_was_asked_for(shape: tuple[int, int], exact: bool) -> None:
    matrix, right = random_matrix(*shape), random_matrix(shape[0], 1, seed=1)[:, 0]
    hessian, gradient = (matrix.T @ matrix).numpy(), (matrix.T @ right).numpy()

    def excess(logarithm: float) -> float:
        return float(
            np.linalg.norm(np.linalg.solve(hessian + math.exp(logarithm) * np.eye(len(hessian)), gradient)) - 0.1
        )

    expected = math.exp(optimize.brentq(excess, -15, 15, xtol=1e-13))
    model = LocalModel(
        lambda x: matrix @ x + right, place_at(lambda x: right, torch.zeros(shape[1]).double()), matrix, exact=exact
    )
    damping = model.factors.damping(model.slope, 0.1)
    assert damping == pytest.approx(expected, rel=1e-7)
    direct = -np.linalg.solve(hessian + damping * np.eye(len(hessian)), gradient)
    np.testing.assert_allclose(model.step(damping).numpy(), direct, rtol=1e-8)
    assert np.linalg.norm(direct) == pytest.approx(0.1, rel=1e-7)


def test_a_predicted_decrease_is_that_of_the_linear_model() -> None:
    matrix, right = random_matrix(*TALL), random_matrix(TALL[0], 1, seed=1)[:, 0]
    model = LocalModel(lambda x: right, place_at(lambda x: right, torch.zeros(TALL[1]).double()), matrix)
    after = right + matrix @ model.step(0.3)
    assert model.decrease(0.3) == pytest.approx(float(right @ right - after @ after), rel=1e-12)


def test_singular_values_resolve_what_their_squares_do_not() -> None:
    values = torch.tensor([1.0, 1e-5, 1e-11], dtype=torch.float64)
    left, right = (torch.linalg.qr(random_matrix(n, 3, seed=n)).Q for n in (9, 3))
    jacobian = left * values @ right.T
    smallest = [float(Factors.of(jacobian, exact=exact).squares.min().sqrt()) for exact in (False, True)]
    assert smallest[1] == pytest.approx(1e-11, rel=1e-3)
    assert smallest[0] != pytest.approx(1e-11, rel=0.5)


@pytest.mark.parametrize("name", FITS)
def test_a_small_fit_ends_where_scipy_does(name: str) -> None:
    function, truth, start = FITS[name]
    x = torch.linspace(0.1, 6, 40, dtype=torch.float64)
    data = function(torch.tensor(truth, dtype=torch.float64), x) + 0.01 * random_matrix(40, 1)[:, 0]

    def residuals(theta: Tensor) -> Tensor:
        return function(theta, x) - data

    known = optimize.least_squares(
        lambda theta: residuals(torch.from_numpy(theta)).numpy(), truth, xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    losses, _ = minimized(residuals, torch.tensor(start, dtype=torch.float64), 12)
    assert losses[-1] == pytest.approx(2 * known.cost, rel=1e-9)
    assert all(after <= before for before, after in pairwise(losses))


def test_corrections_make_long_steps_pay_in_a_curved_valley(monkeypatch: pytest.MonkeyPatch) -> None:
    def valley(x: Tensor) -> Tensor:
        return torch.stack([30 * (x[1] - torch.sin(3 * x[0])), 30 * (x[2] - x[0] ** 2), x[0] - 4])

    start = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)
    with_corrections, _ = minimized(valley, start, 10)
    monkeypatch.setattr("cao.quasi_newton.corrected.CORRECTIONS", 0)
    without, _ = minimized(valley, start, 10)
    assert with_corrections[-1] < 1e-12 * without[-1]


def test_a_step_that_is_not_finite_is_refused() -> None:
    def residuals(x: Tensor) -> Tensor:
        return torch.log(x)

    here = place_at(residuals, torch.full((1,), 8.0, dtype=torch.float64))
    trial: Trial = LocalModel(residuals, here, torch.full((1, 1), 0.125, dtype=torch.float64)).attempt(100.0)
    assert trial.ratio == -math.inf


class Fit:
    """A network fitted to a smooth function, with the optimizer that fits it."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, decay: float = 0.0, points: int = 150, **settings: object
    ) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)).to(
            dtype
        )
        self.x = torch.linspace(-1, 1, points, dtype=dtype)[:, None]
        self.y, self.decay = torch.sin(4 * self.x) + self.x**2, decay
        self.source = LeastSquares(self.residuals, self.network.parameters())
        settings = {"max_iter": 1, **settings}
        self.optimizer = SketchedLBFGS(self.network.parameters(), source=self.source, **settings)  # type: ignore[arg-type]

    def residuals(self) -> Tensor:
        return ((self.network(self.x) - self.y) / math.sqrt(len(self.x)))[:, 0]

    def loss(self) -> Tensor:
        return self.residuals().square().sum() + self.decay * sum(p.square().sum() for p in self.network.parameters())

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def run(self, evaluations: int) -> list[float]:
        losses = []
        while self.optimizer.status.evaluations < evaluations and not self.optimizer.status.converged:
            losses.append(float(self.optimizer.step(self.closure).detach()))
        return losses

    def run_to_a_corrected_step(self) -> None:
        while not self.optimizer.status.corrected_steps:
            self.optimizer.step(self.closure)


def test_corrected_steps_end_far_lower_at_the_same_cost() -> None:
    plain, finished = Fit(finish=None, points=40), Fit(points=40)  # Fewer residuals than parameters, too.
    for fit in (plain, finished):
        while fit.optimizer._cost < 400:
            fit.optimizer.step(fit.closure)
    assert plain.optimizer.status.corrected_steps == 0
    assert finished.optimizer.status.corrected_steps > 0
    assert finished.loss().item() < 1e-2 * plain.loss().item()


def test_the_loss_never_rises() -> None:
    fit = Fit()
    losses = fit.run(200)
    rounding = 1e-14
    assert all(after <= before * (1 + rounding) for before, after in pairwise(losses))


def test_report_and_status_tell_of_corrected_steps() -> None:
    fit = Fit()
    assert fit.optimizer.status.phase == "L-BFGS"
    fit.run_to_a_corrected_step()
    status = fit.optimizer.status
    assert status.corrected_cost > 0
    assert f"now {status.phase}" in str(fit.optimizer.report())


def test_resumed_in_the_phase_every_step_is_the_same() -> None:
    fit = Fit()
    fit.run_to_a_corrected_step()
    file = io.BytesIO()
    torch.save([fit.optimizer.state_dict(), fit.network.state_dict()], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    again = Fit()
    again.network.load_state_dict(weights)
    again.optimizer.load_state_dict(state)
    for _ in range(8):
        fit.optimizer.step(fit.closure)
        again.optimizer.step(again.closure)
        assert torch.equal(flat_params(fit.network), flat_params(again.network))
    assert fit.optimizer.status == again.optimizer.status


def test_in_float32_there_are_no_corrected_steps() -> None:
    fit = Fit(torch.float32)
    fit.run(150)
    assert fit.optimizer.status.corrected_steps == 0


def test_a_term_that_the_source_lacks_does_not_mislead() -> None:
    fit, plain = Fit(decay=1e-6), Fit(decay=1e-6, finish=None)
    losses, others = fit.run(300), plain.run(300)
    assert losses[-1] < 1.05 * min(others)
    assert all(after <= before * (1 + 1e-14) for before, after in pairwise(losses))


def test_an_error_in_the_residuals_puts_the_parameters_back() -> None:
    fit = Fit()
    fit.run_to_a_corrected_step()
    assert fit.optimizer._finish.is_on
    before, calls, values = flat_params(fit.network).clone(), [], fit.source.values

    def fails() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("interrupted")
        return values()

    fit.source.values = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="interrupted"):
        fit.optimizer.step(fit.closure)
    assert torch.equal(flat_params(fit.network), before)


def test_a_phase_that_is_slower_is_left_and_seldom_tried_again() -> None:
    finish = Finish(price=10.0, is_on=True, rate=0.5, tries=1, began=[100.0, 1.0], trace=[[100.0, 1.0]])
    value = 1.0
    for step in range(1, 3):
        value *= 0.9  # A tenth of a decade over ten evaluations is slower than 0.5 per evaluation.
        finish.judge(100.0 + 10 * step, at(value))
    assert not finish.is_on
    begun = []
    for cost in range(130, 300_000, 10):
        if finish.is_due(float(cost), at(1.0)):
            begun.append(cost)
            finish.is_exact = True
            finish.judge(cost + 10.0, None)
    assert len(begun) <= TRIES - 1
    assert all(later > 1.9 * earlier for earlier, later in pairwise(begun))


def test_finish_is_checked() -> None:
    with pytest.raises(ValueError, match='finish must be "auto" or None, got True'):
        SketchedLBFGS([torch.ones(1, requires_grad=True)], finish=True)  # type: ignore[arg-type]


def at(value: float) -> Iterate:
    return Iterate(torch.zeros(1), value, torch.ones(1), 1.0)


def test_a_damping_is_found_where_rounding_leaves_every_step_too_long() -> None:
    slope = torch.tensor([1.7786e-71, 2.2102e-71], dtype=torch.float64)
    squares = torch.tensor([3.1634e-140, 4.8848e-140], dtype=torch.float64)
    factors = Factors(squares, torch.eye(2, dtype=torch.float64), 4.9e-154)
    damping = factors.damping(slope, 57.3934985714962)
    assert damping == pytest.approx(float(slope.norm()) / 57.3934985714962, rel=1e-6)
