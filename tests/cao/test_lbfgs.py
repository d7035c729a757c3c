"""SketchedLBFGS against scipy and torch on standard functions, in closed form on quadratics, and its contract."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from lbfgs_ranks import MANY, WORLD, points, run_rank, solution_of_rank, solve
from scipy import optimize
from small_models import flat_params, seeded
from torch import Tensor, nn

from cao import CAO, GaussNewton, HagerZhang, LeastSquares, SketchedLBFGS

Loss = Callable[[Tensor], Tensor]


class Problem:
    """One parameter vector, a loss of it, and a closure that counts its calls."""

    def __init__(self, loss: Loss, start: list[float] | Tensor, dtype: torch.dtype = torch.float64) -> None:
        self.theta = torch.as_tensor(start, dtype=dtype).clone().requires_grad_()
        self._loss = loss
        self.calls = 0

    def loss(self) -> Tensor:
        return self._loss(self.theta)

    def value(self) -> float:
        return self.loss().item()

    def closure(self) -> Tensor:
        self.calls += 1
        self.theta.grad = None
        loss = self.loss()
        loss.backward()
        return loss


def rosenbrock_residuals(x: Tensor) -> Tensor:
    return torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])


def rosenbrock(x: Tensor) -> Tensor:
    return rosenbrock_residuals(x).square().sum()


def beale(x: Tensor) -> Tensor:
    return sum((c - x[0] * (1 - x[1] ** k)) ** 2 for k, c in ((1, 1.5), (2, 2.25), (3, 2.625)))  # type: ignore[return-value]


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    first = 100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
    return first + 10.1 * ((b - 1) ** 2 + (d - 1) ** 2) + 19.8 * (b - 1) * (d - 1)


def powell_singular(x: Tensor) -> Tensor:
    a, b, c, d = x
    return (a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4


STANDARD = {
    "rosenbrock": (rosenbrock, [-1.2, 1.0]),
    "long rosenbrock": (rosenbrock, [-1.2, 1.0] * 10),
    "beale": (beale, [1.0, 1.0]),
    "wood": (wood, [-3.0, -1.0, -3.0, -1.0]),
    "powell singular": (powell_singular, [3.0, -1.0, 0.0, 1.0]),
}


def evaluations_to(problem: Problem, optimizer: SketchedLBFGS, target: float, most: int = 2000) -> int:
    while problem.value() > target and problem.calls < most:
        optimizer.step(problem.closure)
    assert problem.value() <= target
    return problem.calls


def scipy_evaluations_to(loss: Loss, start: list[float], target: float) -> int:
    values: list[float] = []

    def value_and_gradient(x: object) -> tuple[float, object]:
        theta = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = loss(theta)
        values.append(value.item())
        return values[-1], torch.autograd.grad(value, theta)[0].numpy()

    options = {"maxcor": 100, "ftol": 0, "gtol": 0}
    optimize.minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return next(index for index, value in enumerate(values, start=1) if value <= target)


@pytest.mark.parametrize("name", STANDARD)
def test_plain_lbfgs_needs_about_as_many_evaluations_as_scipys(name: str) -> None:
    loss, start = STANDARD[name]
    problem = Problem(loss, start)
    optimizer = SketchedLBFGS([problem.theta], max_iter=1)
    ours = evaluations_to(problem, optimizer, 1e-12) - optimizer.status.iterations  # One more at the start of a step.
    assert ours <= 1.5 * scipy_evaluations_to(loss, start, 1e-12) + 5


def test_a_sketch_makes_a_long_rosenbrock_valley_short() -> None:
    start = [-1.2, 1.0] * 10
    plain, sketched = Problem(rosenbrock, start), Problem(rosenbrock, start)
    source = LeastSquares(lambda: rosenbrock_residuals(sketched.theta), [sketched.theta])
    evaluations = evaluations_to(sketched, SketchedLBFGS([sketched.theta], source=source), 1e-12)
    assert evaluations < evaluations_to(plain, SketchedLBFGS([plain.theta]), 1e-12)


MISRA_1A = [
    (77.6, 10.07), (114.9, 14.73), (141.1, 17.94), (190.8, 23.93), (239.9, 29.61), (289.0, 35.18), (332.8, 40.02),
    (378.4, 44.82), (434.8, 50.76), (477.3, 55.05), (536.8, 61.01), (593.1, 66.40), (689.1, 75.47), (760.0, 81.78),
]  # fmt: skip
"""Pressure and volume, from the statistical reference datasets of NIST."""


@pytest.mark.parametrize("start", [[500.0, 0.0001], [250.0, 0.0005]])
def test_a_fit_of_two_parameters_ends_at_the_certified_values_of_nist(start: list[float]) -> None:
    pressure, volume = torch.tensor(MISRA_1A, dtype=torch.float64).T

    def residuals(theta: Tensor) -> Tensor:
        return theta[0] * (1 - torch.exp(-theta[1] * pressure)) - volume

    problem = Problem(lambda theta: residuals(theta).square().sum(), start)
    source = LeastSquares(lambda: residuals(problem.theta), [problem.theta])
    optimizer = SketchedLBFGS([problem.theta], source=source, max_iter=100, max_eval=200)
    optimizer.step(problem.closure)
    assert problem.theta.tolist() == pytest.approx([2.3894212918e02, 5.5015643181e-04], rel=1e-6)
    assert problem.value() == pytest.approx(1.2455138894e-01, rel=1e-9)


def test_a_complete_sketch_of_a_quadratic_is_newtons_step() -> None:
    problem, matrix = quadratic(torch.logspace(-6, 6, 8, dtype=torch.float64))
    source = Dense(matrix, [problem.theta])
    optimizer = SketchedLBFGS([problem.theta], source=source, refresh=1, max_iter=2, max_eval=10)
    first = problem.value()
    optimizer.step(problem.closure)
    # The second step leaves what rounding and regularisation leave of the first.
    assert problem.value() < 1e-10 * first


def quadratic(values: Tensor) -> tuple[Problem, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    matrix = vectors @ torch.diag(values) @ vectors.T
    return Problem(lambda x: x @ matrix @ x / 2, torch.ones(len(values))), matrix


class Dense:
    def __init__(self, matrix: Tensor, params: list[Tensor]) -> None:
        self.matrix, self.params = matrix, params

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns


def iterations_on(problem: Problem, optimizer: SketchedLBFGS, target: float) -> int:
    while problem.value() > target and optimizer.status.iterations < 100:
        optimizer.step(problem.closure)
    return optimizer.status.iterations


@pytest.mark.parametrize("remaining", [1, 2, 4])
def test_a_sketched_quadratic_takes_about_as_many_iterations_as_eigenvalues_remain(remaining: int) -> None:
    # Thirty captured values, and five copies of each remaining one: BFGS counts distinct values if searches are exact.
    rest = torch.linspace(1, 2, remaining, dtype=torch.float64).repeat(5)
    captured = torch.logspace(4, 6, 30, dtype=torch.float64)
    (sketched, matrix), (plain, _) = (quadratic(torch.cat([captured, rest])) for _ in range(2))
    exact = {"max_iter": 1, "line_search": HagerZhang(decrease=0.4999, curvature=1e-6)}
    source = Dense(matrix, [sketched.theta])
    optimizer = SketchedLBFGS([sketched.theta], source=source, rank=30, refresh=1000, **exact)  # type: ignore[arg-type]
    target = 1e-12 * sketched.value()
    # A few more until the damping has been fitted.
    assert iterations_on(sketched, optimizer, target) <= remaining + 7
    assert optimizer.status.refreshes == 1
    assert iterations_on(plain, SketchedLBFGS([plain.theta], **exact), target) > 25  # type: ignore[arg-type]


def small_network(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), dtype
    )
    inputs = torch.linspace(-1, 1, 40, dtype=dtype).unsqueeze(1)
    return model, lambda: (model(inputs) - torch.sin(4 * inputs)) / math.sqrt(40)


def closure_of(
    model: nn.Module, residuals: Callable[[], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residuals().square().sum()
        loss.backward()
        return loss

    return closure


def fitted(kind: str, dtype: torch.dtype = torch.float64, steps: int = 8) -> tuple[float, SketchedLBFGS]:
    """Fit a small network with one kind of source, and return the loss and the optimizer."""
    model, residuals = small_network(dtype)
    params = list(model.parameters())
    inputs = torch.linspace(-1, 1, 40, dtype=dtype).unsqueeze(1)
    sources = {
        "none": None,
        "residuals": LeastSquares(residuals, params),
        "products": LeastSquares(residuals, params, max_jacobian_size=0),
        "loss": lambda: residuals().square().sum(),
        "gauss-newton": GaussNewton(model, inputs, lambda out: (out - torch.sin(4 * inputs)).square().mean()),
    }
    optimizer = SketchedLBFGS(params, source=sources[kind])  # type: ignore[arg-type]
    closure = closure_of(model, residuals, optimizer)
    for _ in range(steps):
        optimizer.step(closure)
    return closure().item(), optimizer


@pytest.mark.parametrize("kind", ["residuals", "products", "loss", "gauss-newton"])
def test_every_source_of_curvature_lowers_the_loss_further(kind: str) -> None:
    plain, _ = fitted("none", steps=12)
    sketched, optimizer = fitted(kind, steps=12)
    assert sketched < plain / 3
    assert optimizer.status.refreshes > 0
    assert optimizer.status.conditioning_removed > 10


def test_a_source_may_list_the_parameters_in_another_order() -> None:
    model, residuals = small_network()
    params = list(model.parameters())
    optimizer = SketchedLBFGS(params, source=LeastSquares(residuals, params[::-1]))
    closure = closure_of(model, residuals, optimizer)
    for _ in range(8):
        optimizer.step(closure)
    assert closure().item() < fitted("none")[0] / 3


def test_a_source_of_other_parameters_is_refused() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    other = torch.ones(2, requires_grad=True)
    source = LeastSquares(lambda: rosenbrock_residuals(other), [other])
    optimizer = SketchedLBFGS([problem.theta], source=source, refresh=1)
    with pytest.raises(ValueError, match="exactly the optimizer's trainable parameters"):
        optimizer.step(problem.closure)


def test_float32_gains_from_a_sketch_too() -> None:
    plain, _ = fitted("none", torch.float32)
    sketched, _ = fitted("residuals", torch.float32)
    assert sketched < plain / 3


def test_a_constant_below_the_loss_does_not_multiply_the_sketches() -> None:
    refreshes = []
    for constant in (0.0, -1.0):
        model, residuals = small_network()
        problem = Problem(
            lambda _, constant=constant, residuals=residuals: residuals().square().sum() + constant, [0.0]
        )
        source = LeastSquares(residuals, model.parameters())
        optimizer = SketchedLBFGS(model.parameters(), source=source, memory="pairs", finish=None, max_iter=400)
        optimizer.step(lambda optimizer=optimizer, problem=problem: (optimizer.zero_grad(), problem.closure())[1])
        refreshes.append(optimizer.status.refreshes)
    assert refreshes[1] < 1.6 * refreshes[0]


def test_sketches_take_half_of_the_cost_at_most_even_if_each_iteration_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cao.lbfgs.has_slowed", lambda trace, price: True)
    problem = Problem(rosenbrock, [-1.2, 1.0] * 10)
    source = LeastSquares(lambda: rosenbrock_residuals(problem.theta), [problem.theta])
    optimizer = SketchedLBFGS([problem.theta], source=source, max_iter=60, max_eval=80)
    optimizer.step(problem.closure)
    status = optimizer.status
    last = 1.25 * status.products / status.refreshes
    assert 1.25 * status.products / (1.25 * status.products + problem.calls) > 0.4
    assert 1.25 * status.products - last <= problem.calls


def offset_quadratic(x: Tensor) -> Tensor:
    """A minimum whose last eight digits the value cannot show."""
    return 1 + (torch.logspace(0, -4, len(x), dtype=x.dtype) * x.square()).sum() / 2


def test_slopes_lead_on_where_torchs_search_stalls() -> None:
    ours, theirs = (Problem(offset_quadratic, torch.ones(30)) for _ in range(2))
    optimizer = SketchedLBFGS([ours.theta], max_iter=300, max_eval=300)
    optimizer.step(ours.closure)
    settings = {"max_iter": 300, "max_eval": 300, "history_size": 100, "tolerance_grad": 0, "tolerance_change": 0}
    torch.optim.LBFGS([theirs.theta], line_search_fn="strong_wolfe", **settings).step(theirs.closure)  # type: ignore[arg-type]
    ours.closure(), theirs.closure()
    assert float(ours.theta.grad.norm()) < 1e-2 * float(theirs.theta.grad.norm())  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("interruption", [1, 2])
@pytest.mark.parametrize("history", [5, 7, 10, 30, 50, 100])
@pytest.mark.parametrize("odd", [False, True])
def test_a_saved_history_of_any_length_resumes_bit_for_bit(
    dtype: torch.dtype, interruption: int, history: int, odd: bool
) -> None:
    start = torch.linspace(-1, 1, 132 + odd, dtype=dtype)
    first, second = Problem(rosenbrock, start, dtype), Problem(rosenbrock, start, dtype)
    one, other = (SketchedLBFGS([p.theta], history_size=history, max_iter=60) for p in (first, second))
    for _ in range(interruption):
        one.step(first.closure)
    file = io.BytesIO()
    torch.save((first.theta.detach(), one.state_dict()), file)
    theta, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second.theta.data.copy_(theta)
    other.load_state_dict(state)
    one.step(first.closure)
    other.step(second.closure)
    assert torch.equal(first.theta, second.theta)
    assert one.status == other.status


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("interruption", [1, 3])
@pytest.mark.parametrize("memory", ["auto", "pairs", "dense"])
def test_a_saved_run_resumes_bit_for_bit(memory: Any, dtype: torch.dtype, interruption: int) -> None:
    def start() -> tuple[nn.Module, SketchedLBFGS, Callable[[], Tensor]]:
        model, residuals = small_network(dtype)
        source = LeastSquares(residuals, model.parameters())
        optimizer = SketchedLBFGS(model.parameters(), source=source, max_iter=30, memory=memory)
        return model, optimizer, closure_of(model, residuals, optimizer)

    model, optimizer, closure = start()
    for _ in range(interruption):
        optimizer.step(closure)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(2):
        optimizer.step(closure)
    other_model, other_optimizer, other_closure = start()
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other_model.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    for _ in range(2):
        other_optimizer.step(other_closure)
    assert torch.equal(flat_params(model), flat_params(other_model))
    # The source has not been asked again if no sketch was due.
    ours, theirs = (each.status._replace(derivative="") for each in (optimizer, other_optimizer))
    assert ours == theirs
    assert optimizer.status.refreshes > (memory != "dense")
    assert optimizer.status.memory == "dense" or memory != "dense"


def test_a_loss_that_ends_in_nan_is_backed_away_from() -> None:
    def barrier(x: Tensor) -> Tensor:
        return (x - torch.log(x)).sum() + 1e4 * (x[0] - 0.01) ** 2

    problem = Problem(barrier, [5.0, 1e-3, 40.0])
    optimizer = SketchedLBFGS([problem.theta], max_iter=100, lr=50.0)
    optimizer.step(problem.closure)
    assert problem.theta.detach()[1:].tolist() == pytest.approx([1.0, 1.0])
    assert bool(problem.theta.isfinite().all())


def test_a_start_that_is_not_finite_is_left_alone_and_reported() -> None:
    problem = Problem(lambda x: x.log().sum(), [-1.0, 2.0])
    optimizer = SketchedLBFGS([problem.theta])
    optimizer.step(problem.closure)
    assert problem.theta.tolist() == [-1.0, 2.0]
    assert problem.calls == 1
    assert "not finite" in optimizer.status.reason


def test_a_search_that_cannot_succeed_ends_and_is_not_repeated() -> None:
    problem = Problem(lambda x: x.square().sum(), [1.0, 2.0])

    def misleading() -> Tensor:
        loss = problem.closure()
        problem.theta.grad.neg_()  # type: ignore[union-attr]
        return loss

    optimizer = SketchedLBFGS([problem.theta], source=problem.loss, max_iter=100, max_eval=10_000)
    optimizer.step(misleading)
    assert optimizer.status.reason == "no step lowers the loss"
    assert optimizer.status.refreshes == 1
    assert problem.theta.tolist() == [1.0, 2.0]
    calls = problem.calls
    assert calls <= 2 + 3 * HagerZhang().max_evaluations
    optimizer.step(misleading)
    assert problem.calls == calls + 1


@pytest.mark.parametrize(
    ("source", "refresh"),
    [
        (lambda theta: None, "auto"),
        (lambda theta: lambda: theta.square().sum(), "auto"),
        (lambda theta: LeastSquares(lambda: theta * 1, [theta]), 1),
        (lambda theta: Dense(torch.full((2, 2), torch.nan, dtype=torch.float64), [theta]), "auto"),
        (lambda theta: Dense(torch.full((2, 2), torch.nan, dtype=torch.float64), [theta]), 1),
    ],
    ids=["none", "loss", "every iteration", "not finite", "not finite, every iteration"],
)
@pytest.mark.parametrize("good_iterations", [0, 2])
def test_no_point_is_tried_twice_after_a_failed_search(
    source: Callable[[Tensor], object], refresh: int | str, good_iterations: int
) -> None:
    problem = Problem(lambda x: (x**4).sum(), [1.0, 2.0])
    settings = {"source": source(problem.theta), "refresh": refresh, "max_eval": 1000}
    optimizer = SketchedLBFGS([problem.theta], max_iter=100, **settings)  # type: ignore[arg-type]
    visited = []

    def misleading() -> Tensor:
        loss = problem.closure()
        visited.append(tuple(problem.theta.tolist()))
        if optimizer.status.iterations >= good_iterations:
            problem.theta.grad.neg_()  # type: ignore[union-attr]
        return loss

    optimizer.step(misleading)
    assert optimizer.status.reason == "no step lowers the loss"
    # A source of another loss makes the closure be called again at the first sketch, which is at the start.
    tried = visited[visited[0] == visited[1] :]
    # The shortest steps differ by less than a position can show.
    seen = [point for point in tried if point != pytest.approx(problem.theta.tolist(), rel=1e-12, abs=0)]
    assert len(set(seen)) == len(seen) > 10
    assert optimizer.status.refreshes <= (good_iterations + 2 if settings["source"] else 0)


def test_after_a_dead_end_a_changed_loss_is_minimised_again() -> None:
    problem = Problem(lambda x: x.square().sum(), [0.0, 0.0])
    optimizer = SketchedLBFGS([problem.theta], max_iter=50)
    optimizer.step(problem.closure)
    problem._loss = lambda x: (x - 3).square().sum()
    optimizer.step(problem.closure)
    assert problem.theta.tolist() == pytest.approx([3.0, 3.0])


def test_step_returns_the_first_loss_and_keeps_its_limits() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    optimizer = SketchedLBFGS([problem.theta], max_iter=3)
    first = problem.value()
    assert optimizer.step(problem.closure).item() == first
    assert optimizer.status.evaluations == problem.calls
    patient = SketchedLBFGS([problem.theta], max_iter=3, max_eval=100)
    patient.step(problem.closure)
    assert patient.status.iterations == 3
    assert patient.status.reason == "max_iter"
    short = SketchedLBFGS([problem.theta], max_iter=50, max_eval=5)
    problem.calls = 0
    short.step(problem.closure)
    assert short.status.reason == "max_eval"
    assert 5 <= problem.calls <= 5 + HagerZhang().max_evaluations


@pytest.mark.parametrize(("setting", "reason"), [("tolerance_grad", "tolerance_grad"), ("tolerance_change",) * 2])
def test_tolerances_end_a_step(setting: str, reason: str) -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    optimizer = SketchedLBFGS([problem.theta], max_iter=1000, **{setting: 1e-3})  # type: ignore[arg-type]
    optimizer.step(problem.closure)
    assert optimizer.status.reason == reason
    assert problem.value() < 1e-3


def test_parameters_without_a_gradient_stay_where_they_are() -> None:
    moving, frozen, unused = (torch.full((2,), 2.0, requires_grad=grad) for grad in (True, False, True))

    def closure() -> Tensor:
        moving.grad = None
        loss = (moving * frozen - 1).square().sum()
        loss.backward()
        return loss

    SketchedLBFGS([frozen, moving, unused], max_iter=30).step(closure)
    assert moving.tolist() == pytest.approx([0.5, 0.5])
    assert frozen.tolist() == unused.tolist() == [2.0, 2.0]


def test_frozen_parameters_may_be_passed_to_both() -> None:
    model, residuals = small_network()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer = SketchedLBFGS(model.parameters(), source=LeastSquares(residuals, model.parameters()))
    closure = closure_of(model, residuals, optimizer)
    first = closure().item()
    for _ in range(5):
        optimizer.step(closure)
    assert optimizer.status.refreshes > 0
    assert closure().item() < 1e-3 * first


@pytest.mark.parametrize("index", [0, -1])
def test_freezing_or_unfreezing_in_the_middle_is_refused(index: int) -> None:
    model, residuals = small_network()
    params = list(model.parameters())
    optimizer = SketchedLBFGS(params)
    params[1].requires_grad_(False)  # Before the first step it does no harm.
    closure = closure_of(model, residuals, optimizer)
    optimizer.step(closure)
    params[index].requires_grad_(False)
    with pytest.raises(ValueError, match="4 parameters require a gradient, and 5 did at the first step"):
        optimizer.step(closure)
    params[index].requires_grad_()
    params[1].requires_grad_()
    with pytest.raises(ValueError, match="6 parameters require a gradient, and 5 did"):
        optimizer.step(closure)


def test_a_fixed_interval_begins_with_a_sketch() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0] * 10)
    optimizer = SketchedLBFGS([problem.theta], source=problem.loss, refresh=50, max_iter=1)
    optimizer.step(problem.closure)
    assert optimizer.status.refreshes == 1


def test_a_longer_history_in_the_middle_is_used() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0] * 10)
    optimizer = SketchedLBFGS([problem.theta], history_size=2)
    optimizer.step(problem.closure)
    optimizer.param_groups[0]["history_size"] = 50
    assert evaluations_to(problem, optimizer, 1e-12) < 300


def test_a_copy_goes_on_without_the_source() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    source = LeastSquares(lambda: rosenbrock_residuals(problem.theta), [problem.theta])
    optimizer = SketchedLBFGS([problem.theta], source=source)
    optimizer.step(problem.closure)
    other, duplicate = copy.deepcopy((problem, optimizer))
    assert duplicate.source is None
    assert duplicate.status == optimizer.status._replace(derivative="")  # It is the source that knows.
    with pytest.warns(UserWarning, match=r"set optimizer\.source"):
        duplicate.step(other.closure)


def test_a_copy_that_is_given_a_source_says_nothing() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    optimizer = SketchedLBFGS([problem.theta], source=problem.loss, line_search=HagerZhang(curvature=0.8))
    other, duplicate = copy.deepcopy((problem, optimizer))
    assert duplicate.line_search == optimizer.line_search
    duplicate.source = other.loss
    duplicate.step(other.closure)


class _Group(torch.distributed.ProcessGroup):
    pass


def test_a_process_group_stays_with_a_deep_copy_and_is_missed_in_a_pickle() -> None:
    group = _Group(0, 1)
    optimizer = SketchedLBFGS([torch.zeros(2, requires_grad=True)], process_group=group)
    assert copy.deepcopy(optimizer).process_group is group
    assert pickle.loads(pickle.dumps(optimizer)).process_group == "lost"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive and finite, got inf"),
        ({"lr": "1"}, "lr must be positive and finite, got '1'"),
        ({"max_iter": "20"}, "max_iter must be a positive integer, got '20'"),
        ({"max_eval": True}, "max_eval must be a positive integer, got True"),
        ({"rank": True}, "rank must be a positive integer, got True"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"tolerance_change": None}, "tolerance_change must not be negative, got None"),
        ({"max_iter": 0}, "max_iter must be a positive integer"),
        ({"history_size": "auto"}, "history_size must be a positive integer, got 'auto'"),
        ({"memory": "sparse"}, 'memory must be "auto", "pairs" or "dense", got \'sparse\''),
        ({"rank": -1}, "rank must be a positive integer"),
        ({"refresh": 1.5}, "refresh must be a positive integer"),
        ({"tolerance_grad": -1.0}, "tolerance_grad must not be negative"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SketchedLBFGS([torch.zeros(2, requires_grad=True)], **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3.0, "got float"),
        (nn.Linear(1, 1), "got the module Linear; pass GaussNewton"),
        (LeastSquares, "got the class LeastSquares; pass an instance"),
        (torch.zeros(()), "got a tensor, whose graph belongs to one position; pass a function"),
    ],
    ids=["number", "module", "class", "tensor"],
)
def test_what_has_no_curvature_is_refused_as_a_source(source: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"source must be LeastSquares, .*{message}"):
        SketchedLBFGS([torch.zeros(2, requires_grad=True)], source=source)  # type: ignore[arg-type]


def test_what_cannot_be_optimised_is_refused() -> None:
    with pytest.raises(ValueError, match="one parameter group"):
        SketchedLBFGS(
            [{"params": [torch.zeros(2, requires_grad=True)]}, {"params": [torch.ones(2, requires_grad=True)]}]
        )
    with pytest.raises(ValueError, match="requires a gradient"):
        SketchedLBFGS([torch.zeros(2)])
    theta = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="another optimizer"):
        SketchedLBFGS([theta]).load_state_dict(torch.optim.SGD([theta], 0.1).state_dict())


@pytest.mark.parametrize(
    ("theta", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), "parameters must be real, got one of torch.complex128"),
        (torch.zeros(2, device="meta"), "parameters must hold data"),
    ],
    ids=["complex", "meta"],
)
def test_parameters_that_it_could_not_move_are_refused(theta: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SketchedLBFGS([theta.requires_grad_()])


def test_whole_numbers_of_numpy_are_taken() -> None:
    optimizer = SketchedLBFGS([torch.zeros(2, requires_grad=True)], rank=np.int64(2), max_iter=np.int32(4))  # type: ignore[arg-type]
    assert [type(optimizer.param_groups[0][name]) for name in ("rank", "max_iter", "max_eval")] == [int, int, int]


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "got NoneType"), ("1", "got str"), (torch.ones(2), r"got shape \(2,\)"), (1j, "got complex")],
)
def test_a_closure_must_return_the_loss(returned: object, message: str) -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    with pytest.raises(ValueError, match=f"the closure must return the loss, one real number, {message}"):
        SketchedLBFGS([problem.theta]).step(lambda: (problem.closure(), returned)[1])


def test_a_closure_without_a_backward_pass_is_explained() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    with pytest.raises(ValueError, match=r"left no gradient; let it call loss\.backward"):
        SketchedLBFGS([problem.theta]).step(problem.loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_state_of_another_model_is_refused_and_none_of_it_is_kept(dtype: torch.dtype) -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0, 1.0])
    optimizer = SketchedLBFGS([problem.theta])
    optimizer.step(problem.closure)
    other = SketchedLBFGS([torch.zeros(2 if dtype == torch.float64 else 3, dtype=dtype, requires_grad=True)])
    with pytest.raises(ValueError, match=r"another model: it has 3 parameters in torch\.float64, this one"):
        other.load_state_dict(optimizer.state_dict())
    assert other.status.reason == "not started"


def test_a_cao_and_a_sketched_lbfgs_refuse_each_others_state() -> None:
    theta = torch.zeros(2, requires_grad=True)
    one, other = SketchedLBFGS([theta]), CAO([theta], 0.1)
    for optimizer, state in ((one, other.state_dict()), (other, one.state_dict()), (one, {})):
        with pytest.raises(ValueError, match="got one of another optimizer"):
            optimizer.load_state_dict(state)


def test_residuals_that_are_not_finite_leave_plain_lbfgs() -> None:
    problem = Problem(rosenbrock, [-1.2, 1.0])
    source = LeastSquares(lambda: rosenbrock_residuals(problem.theta) * math.nan, [problem.theta])
    optimizer = SketchedLBFGS([problem.theta], source=source, refresh=1)
    for _ in range(5):
        optimizer.step(problem.closure)
    assert problem.value() < 1e-8
    assert optimizer.status.rank == 0
    assert optimizer.status.refreshes > 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes came to."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}") for rank in range(WORLD)]


def test_two_processes_take_the_steps_of_one_on_all_points(ranks: list[Any]) -> None:
    (first, *_), (second, *_) = ranks
    assert torch.equal(first, second)
    torch.testing.assert_close(first, solve(points(MANY)), rtol=1e-5, atol=1e-6)


def test_a_closure_that_fails_in_one_process_leaves_no_other_waiting(ranks: list[Any]) -> None:
    (_, first, *_), (_, second, *_) = ranks
    assert second == "this process cannot"
    assert "failed in 1 other process" in first


def test_processes_with_curvature_of_different_price_refresh_together(ranks: list[Any]) -> None:
    (_, _, first, _), (_, _, second, _) = ranks
    assert first == second >= 2


def test_points_of_two_processes_grow_together(ranks: list[Any]) -> None:
    (*_, first), (*_, second) = ranks
    assert first == second
    assert [points for points, *_ in first] == [6, 12, 24, 24, 6]


@pytest.mark.slow
def test_four_processes_take_the_steps_of_one_on_all_points(tmp_path: Path) -> None:
    mp.spawn(solution_of_rank, (str(tmp_path), 4), nprocs=4)
    solutions = [torch.load(tmp_path / f"rank{rank}") for rank in range(4)]
    assert all(torch.equal(solutions[0], other) for other in solutions[1:])
    torch.testing.assert_close(solutions[0], solve(points(MANY)), rtol=1e-5, atol=1e-6)


def test_the_search_of_torchs_lbfgs_is_taken_for_ours_and_any_other_word_is_refused():
    params = [torch.nn.Parameter(torch.ones(2))]
    SketchedLBFGS(params, line_search_fn="strong_wolfe")
    with pytest.raises(ValueError, match=r'line_search_fn must be "strong_wolfe" or None, got \'backtracking\''):
        SketchedLBFGS(params, line_search_fn="backtracking")
    with pytest.raises(TypeError, match=r"line_search must be a search such as HagerZhang\(\), got 'strong_wolfe'"):
        SketchedLBFGS(params, line_search="strong_wolfe")
