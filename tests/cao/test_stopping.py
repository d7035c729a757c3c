"""Where SketchedLBFGS stops by itself, and what it says of closures and sources that contradict themselves."""

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from scipy import optimize
from torch import Tensor

from cao import GaussNewton, LeastSquares, SketchedLBFGS
from cao.quasi_newton.objective import Iterate
from cao.quasi_newton.progress import Progress
from cao.quasi_newton.stopping import stuck_at, watch

TIMES = torch.linspace(0, 3, 40, dtype=torch.float64)
DATA = 2 * torch.exp(-1.3 * TIMES) + 0.5 + 0.02 * torch.cos(37 * TIMES)


def curve_residuals(theta: Tensor) -> Tensor:
    return theta[0] * torch.exp(-theta[1] * TIMES) + theta[2] - DATA


class Fit:
    """Three parameters of a curve, and the closure of their sum of squares, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
        self.factor, self.calls = factor, 0
        self.source = LeastSquares(lambda: curve_residuals(self.theta), [self.theta])

    def closure(self) -> Tensor:
        self.calls += 1
        self.theta.grad = None
        loss = self.factor * curve_residuals(self.theta).square().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("has_source", [True, False])
@pytest.mark.parametrize("max_iter", [1, 20, 5000])
def test_a_fit_ends_at_the_optimum_of_scipy_and_stays_there(has_source: bool, max_iter: int) -> None:
    fit = Fit()
    optimizer = SketchedLBFGS(
        [fit.theta], source=fit.source if has_source else None, max_iter=max_iter, max_eval=10_000
    )
    while not optimizer.status.converged and fit.calls < 1000:
        optimizer.step(fit.closure)
    assert optimizer.status.converged
    assert optimizer.status.refreshes < 10
    assert fit.calls < 300
    best = optimize.least_squares(
        lambda x: curve_residuals(torch.from_numpy(x)).numpy(), [1.0, 1.0, 1.0], xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    assert fit.theta.tolist() == pytest.approx(best.x.tolist(), rel=1e-7)
    calls, place = fit.calls, fit.theta.detach().clone()
    optimizer.step(fit.closure)
    assert fit.calls == calls + 1
    assert torch.equal(fit.theta, place)
    assert "converged: minimal to rounding" in str(optimizer.report())


def test_a_low_within_rounding_of_the_lowest_is_no_new_low() -> None:
    progress, gradient = Progress(price=1.0), torch.ones(2, dtype=torch.float64)
    for number in range(11):
        watch(progress, Iterate(gradient, 1.0 - number * 2.0**-53, gradient, largest=1.0))
    assert progress.quiet == 10
    watch(progress, Iterate(gradient, 1.0 - 1e-14, gradient, largest=1.0))
    assert progress.quiet == 0


def test_another_loss_after_convergence_is_minimised_again() -> None:
    fit = Fit()
    optimizer = SketchedLBFGS([fit.theta], max_iter=5000, max_eval=10_000)
    optimizer.step(fit.closure)
    assert optimizer.status.converged

    def other() -> Tensor:
        fit.theta.grad = None
        loss = (fit.theta - 3).square().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Another loss in another step is no contradiction.
        optimizer.step(other)
    assert fit.theta.tolist() == pytest.approx([3.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_way_off_a_saddle_is_no_end(dtype: torch.dtype) -> None:
    # The loss does not show the first steps from 1e-12: they change it by less than its last digit.
    x = torch.tensor([1e-12, 0.0], dtype=dtype, requires_grad=True)
    optimizer = SketchedLBFGS([x], max_iter=1000, max_eval=10_000)

    def closure() -> Tensor:
        x.grad = None
        loss = 1 + (x[0] ** 2 - 1) ** 2 + x[1] ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    assert abs(float(x[0])) == pytest.approx(1.0, rel=1e-3)


def test_a_slow_descent_is_no_end() -> None:
    # Each step brings a few parts in 10⁴, over hundreds of iterations.
    x = torch.full((200,), 1.0, dtype=torch.float64, requires_grad=True)
    weights = torch.logspace(0, -9, 200, dtype=torch.float64)
    optimizer = SketchedLBFGS([x], max_iter=400, max_eval=10_000, history_size=3)

    def closure() -> Tensor:
        x.grad = None
        loss = (weights * (x**4 + x**2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.status.iterations == 400


def noisy_closure(theta: Tensor, optimizer_steps: list[int]) -> Tensor:
    theta.grad = None
    points = torch.rand(20, generator=torch.Generator().manual_seed(len(optimizer_steps)), dtype=torch.float64)
    optimizer_steps.append(0)
    loss = (theta[0] * points + theta[1] - points.square()).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("max_iter", [1, 20, 2000])
def test_a_closure_with_new_points_at_each_call_is_named(max_iter: int) -> None:
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer, calls = SketchedLBFGS([theta], max_iter=max_iter, max_eval=5000), []  # type: ignore[var-annotated]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            optimizer.step(lambda: noisy_closure(theta, calls))
    (text,) = [str(warning.message) for warning in caught]
    assert "at the same parameters: L-BFGS needs one function" in text
    assert len(calls) == optimizer.status.evaluations < 5 * 5000
    (only,) = optimizer.report().advice
    assert "Draw points or batches once" in only


def test_a_closure_with_new_points_is_named_at_the_first_sketch_of_a_source_that_keeps_its_own() -> None:
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    points = torch.linspace(0, 1, 20, dtype=torch.float64)
    source = LeastSquares(lambda: theta[0] * points + theta[1] - points.square(), [theta])
    optimizer, calls = SketchedLBFGS([theta], source=source, refresh=1, max_iter=2), []  # type: ignore[var-annotated]
    with pytest.warns(UserWarning, match="at the same parameters: L-BFGS needs one function"):
        optimizer.step(lambda: noisy_closure(theta, calls))
    assert len(calls) == optimizer.status.evaluations
    (only,) = optimizer.report().advice
    assert "Draw points or batches once" in only


@pytest.mark.parametrize("factor", [1 / 40, 10.0])
def test_a_gauss_newton_source_of_a_multiple_is_refused_too(factor: float) -> None:
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    inputs = torch.rand(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    source = GaussNewton(model, inputs, lambda outputs: (outputs - 1).square().sum())
    optimizer = SketchedLBFGS(model.parameters(), source=source, refresh=1, max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = factor * (model(inputs) - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(ValueError, match=f"got {1 / factor:.6g} times it"):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", ["residuals", "products", "function", "batches"])
@pytest.mark.parametrize("factor", [1 / 40, 0.5, 10.0])
def test_a_source_that_is_a_multiple_of_the_closure_is_refused(kind: str, factor: float) -> None:
    fit = Fit(factor)
    source = {
        "residuals": fit.source,
        "products": LeastSquares(lambda: curve_residuals(fit.theta), [fit.theta], max_jacobian_size=0),
        "function": lambda: curve_residuals(fit.theta).square().sum(),
        "batches": lambda: (curve_residuals(fit.theta)[half].square().sum() * 2 for half in (slice(20), slice(20, 40))),
    }[kind]
    optimizer = SketchedLBFGS([fit.theta], source=source, refresh=5, max_iter=50)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"got {1 / factor:.6g} times it"):
        optimizer.step(fit.closure)


@pytest.mark.parametrize("extra", ["constant", "weight decay", "other points"])
def test_a_source_may_lack_a_term_or_a_constant_of_the_closure(extra: str) -> None:
    fit = Fit()

    def closure() -> Tensor:
        loss = fit.closure()
        if extra == "weight decay":
            decay = 0.1 * fit.theta.square().sum()
            decay.backward()
            return loss + decay
        return loss + (extra == "constant")

    half = LeastSquares(lambda: math.sqrt(2) * curve_residuals(fit.theta)[::2], [fit.theta])
    source = half if extra == "other points" else fit.source
    optimizer = SketchedLBFGS([fit.theta], source=source, refresh=5, max_iter=20)
    optimizer.step(closure)
    assert optimizer.status.refreshes > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", range(2, 12))
def test_a_closure_that_raises_leaves_the_last_accepted_point(error: type[BaseException], when: int) -> None:
    fit = Fit()
    optimizer = SketchedLBFGS([fit.theta], lr=50.0, max_iter=100)
    accepted = [fit.theta.detach().clone()]
    seen = []

    def closure() -> Tensor:
        if fit.calls + 1 == when:
            raise error
        loss = fit.closure()
        seen.append((fit.theta.detach().clone(), loss.item()))
        return loss

    with pytest.raises(error):
        optimizer.step(closure)
    place = next(value for theta, value in seen if torch.equal(theta, fit.theta))
    assert place == min(value for _, value in seen)
    assert optimizer.status.evaluations >= len(seen)
    assert not torch.equal(fit.theta, accepted[0]) or optimizer.status.iterations == 0


def test_frozen_parameters_are_named_and_may_be_unfrozen() -> None:
    fit = Fit()
    optimizer = SketchedLBFGS([fit.theta])
    fit.theta.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter requires a gradient any more; unfreeze"):
        optimizer.step(lambda: torch.zeros(()))
    assert "not started" in str(optimizer.report())
    fit.theta.requires_grad_()
    optimizer.step(fit.closure)
    assert optimizer.status.iterations > 0
    before = optimizer.status
    fit.theta.requires_grad_(False)
    assert optimizer.status == before


def test_parameters_without_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a parameter that requires a gradient"):
        SketchedLBFGS([torch.zeros(0, requires_grad=True)])


def moved() -> tuple[list[Tensor], SketchedLBFGS]:
    parts = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4,), (6,))]
    optimizer = SketchedLBFGS(parts)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(((k + 1) * (part - k)).pow(4).sum() for k, part in enumerate(parts))
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    optimizer.step(closure)
    return parts, optimizer


def test_the_state_of_reordered_parameters_is_refused() -> None:
    parts, optimizer = moved()
    other = SketchedLBFGS([parts[1], parts[0], parts[2]])
    with pytest.raises(ValueError, match="or in another order"):
        other.load_state_dict(optimizer.state_dict())


def test_a_state_without_its_tensors_is_refused() -> None:
    parts, optimizer = moved()
    with pytest.raises(ValueError, match=r"save optimizer\.state_dict\(\) whole"):
        SketchedLBFGS(parts).load_state_dict({**optimizer.state_dict(), "state": {}})


def test_a_hook_before_loading_may_unwrap_and_change_what_is_loaded() -> None:
    parts, optimizer = moved()
    other = SketchedLBFGS(parts)
    other.register_load_state_dict_pre_hook(lambda _, wrapped: copy.deepcopy(wrapped["inner"]))
    other.load_state_dict({"inner": optimizer.state_dict()})
    assert other.status == optimizer.status
    for name, value in optimizer.state[parts[0]].items():
        assert torch.equal(torch.as_tensor(other.state[parts[0]][name]), torch.as_tensor(value))


def test_the_kind_of_derivative_that_the_source_names_is_told() -> None:
    fit = Fit()
    optimizer = SketchedLBFGS([fit.theta], source=fit.source, refresh=1, max_iter=2)
    optimizer.step(fit.closure)
    fit.source.derivative = "products: a reason"
    assert optimizer.status.derivative == "products: a reason"
    assert optimizer.report().rows["derivative"] == "products: a reason"


def advice_after(residuals: Callable[[Tensor], Tensor], start: list[float], steps: int = 10) -> str:
    theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = SketchedLBFGS([theta], source=LeastSquares(lambda: residuals(theta), [theta]))

    def closure() -> Tensor:
        theta.grad = None
        loss = residuals(theta).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return str(optimizer.report())


def freudenstein_roth(x: Tensor) -> Tensor:
    a, b = x
    return torch.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def test_a_wrong_minimum_is_told_and_the_right_one_is_not() -> None:
    # The loss falls from 400.5 to a local minimum of 48.98, or to zero: Moré, Garbow and Hillstrom, problem 2.
    assert "stopped falling at 35% of their size at the start" in advice_after(freudenstein_roth, [0.5, -2.0])
    assert "stopped falling" not in advice_after(freudenstein_roth, [6.0, 3.0])


def test_noise_is_named_where_a_fit_ends_at_it_and_a_good_fit_is_left_in_peace() -> None:
    noise = torch.randn(40, generator=torch.Generator().manual_seed(100), dtype=torch.float64)

    def residuals(theta: Tensor, size: float) -> Tensor:
        return theta[0] + theta[1] * TIMES - size * noise

    assert "With noise in the data a fit ends so" in advice_after(lambda theta: residuals(theta, 1.0), [3.0, 1.0])
    assert "stopped falling" not in advice_after(lambda theta: residuals(theta, 0.01), [3.0, 1.0])


def test_a_minimum_at_the_start_is_no_wrong_one() -> None:
    assert "stopped falling" not in advice_after(lambda theta: torch.cat([theta, torch.ones(1).double()]), [0.0, 1e-9])


@pytest.mark.parametrize(
    ("marks", "last", "expected"),
    [
        ([[100, 0.9], [200, 0.52]], 0.5, 0.5**0.5),  # It stands still.
        ([[100, 0.9], [200, 0.6]], 0.5, 0.0),  # It falls.
        ([[100, 0.9], [200, 5.1e-4]], 5e-4, 0.0),  # It is near to zero.
        ([[300, 0.52]], 0.5, 0.0),  # It was not watched for long enough.
    ],
)
def test_a_plateau_is_told_while_it_lasts(marks: list[list[float]], last: float, expected: float) -> None:
    progress = Progress(price=1.0, first=1.0, last=last, evaluations=400, marks=marks)
    assert stuck_at(progress) == expected
