"""Every method lowers a loss, and is billed for exactly what it did."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor

import cao
from cao_lab.solvers.budget import Budget
from cao_lab.solvers.config import SolveError
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.methods.dense import ScipyBFGS
from cao_lab.solvers.methods.nncg import NNCG, deepxde_module
from cao_lab.solvers.objective import default_dtype, flat, set_point
from cao_lab.solvers.price import Price
from cao_lab.solvers.solving import adam_phase, solve
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.problem import Problem, ProblemConfig, least_squares

TINY = ProblemConfig(width=5, depth=2, interior=40, initial=9, boundary=5)
AVAILABLE = [name for name in METHODS if name != "sketched-lbfgs" or hasattr(cao, "SketchedLBFGS")]
# At its default of 1,000 products per step NNCG takes one or two steps within a small budget.
FAST = {name: replace(method, max_products=20) if "nncg" in name else method for name, method in METHODS.items()}
every_method = pytest.mark.parametrize("name", AVAILABLE)


def tiny(equation: str = "regression") -> Problem:
    """A problem of 51 parameters; without its error, whose grid is larger than all the rest."""
    return replace(EQUATIONS[equation].problem(TINY), error=None)


def linear() -> tuple[Problem, float]:
    """Linear least squares with eigenvalues from 1 to 10, and its least loss by LAPACK."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(12, 8, dtype=torch.float64, generator=generator)).Q
    matrix = basis * torch.linspace(1, 10, 8, dtype=torch.float64).sqrt()
    target = torch.randn(12, dtype=torch.float64, generator=generator)
    x = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    solution = torch.linalg.lstsq(matrix, target).solution
    least = float((matrix @ solution - target).square().sum())
    return least_squares("linear", [x], lambda: (matrix @ x - target,)), least


def counted(problem: Problem) -> tuple[Problem, list[float]]:
    """The problem, and a list that gets every value of its loss."""
    seen: list[float] = []

    def loss() -> Tensor:
        value = problem.loss()
        seen.append(float(value.detach()))
        return value

    return replace(problem, loss=loss), seen


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The products with a matrix of curvature, seen where all derivatives are taken.

    A regression has no derivatives of its own; a gradient is taken with a graph or has no weights.
    """
    calls: list[int] = []
    grad = torch.autograd.grad

    def watched(outputs: Any, inputs: Any, grad_outputs: Any = None, *rest: Any, **options: Any) -> Any:
        if grad_outputs is not None and not options.get("create_graph"):
            calls.append(1)
        return grad(outputs, inputs, grad_outputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    return calls


@every_method
def test_a_method_lowers_the_loss(name: str) -> None:
    problem = tiny()
    records = list(solve(problem, FAST[name], Budget(100), price=Price(0.2)))
    assert records[-1].loss < 0.97 * records[0].loss


@every_method
def test_a_method_solves_linear_least_squares(name: str) -> None:
    problem, least = linear()
    method = replace(FAST[name], rank=4) if hasattr(FAST[name], "rank") else FAST[name]
    method = replace(method, lr=0.1) if name in ("adam", "soap") else method
    *_, last = solve(problem, method, Budget(400), price=Price(0.1))
    assert last.loss == pytest.approx(least, rel=1e-6)


@every_method
def test_evaluations_are_those_of_an_independent_count(name: str) -> None:
    problem, seen = counted(tiny())
    *_, last = solve(problem, FAST[name], Budget(60), price=Price(0.1))
    assert last.evaluations == len(seen) > 10
    assert last.loss == min(seen)


@pytest.mark.parametrize("name", ["nncg"])
def test_products_are_those_of_an_independent_count(name: str, products: list[int]) -> None:
    *_, last = solve(tiny(), FAST[name], Budget(60), price=Price(0.1))
    assert last.products == len(products) > 40


@pytest.mark.parametrize("name", ["torch-lbfgs", "scipy-lbfgsb", "scipy-bfgs", "adam", "soap"])
def test_a_method_without_products_is_billed_for_none(name: str) -> None:
    *_, last = solve(tiny(), METHODS[name], Budget(30))
    assert (last.products, last.price, last.billed) == (0, 0, 30)


@every_method
def test_the_budget_is_spent_and_not_overdrawn(name: str) -> None:
    *_, last = solve(tiny(), FAST[name], Budget(60), price=Price(0.5))
    assert last.status == "spent"
    assert last.billed == last.evaluations + 0.5 * last.products
    # A block of products is billed when it is made.
    assert 60 <= last.billed < 60 + 0.5 * 100


@pytest.mark.parametrize("name", ["torch-lbfgs", "scipy-lbfgsb", "scipy-bfgs", "nncg", "adam"])
@pytest.mark.parametrize("equation", ["wave", "burgers"])
def test_residuals_with_derivatives_of_their_own_are_no_hindrance(name: str, equation: str) -> None:
    problem, seen = counted(tiny(equation))
    *_, last = solve(problem, FAST[name], Budget(25), price=Price(0.1))
    assert last.evaluations == len(seen)
    assert last.loss <= seen[0]


@every_method
def test_a_run_repeats_itself_bit_for_bit(name: str) -> None:
    outcomes = {tuple(solve(tiny(), FAST[name], Budget(40), price=Price(0.5)))[-1].loss for _ in range(2)}
    assert len(outcomes) == 1


def test_torch_lbfgs_does_what_torch_does() -> None:
    ours, theirs = tiny(), tiny()
    *_, last = solve(ours, METHODS["torch-lbfgs"], Budget(60))
    optimizer = torch.optim.LBFGS(
        theirs.params,
        max_iter=80,
        history_size=100,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )
    problem, seen = counted(theirs)
    optimizer.step(closure_of(problem, optimizer))
    # With two threads rounding depends on where a tensor lies, and sixty evaluations make more of it.
    assert last.loss == pytest.approx(min(seen[:60]), rel=1e-9)


def closure_of(problem: Problem, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(("name", "method"), [("scipy-lbfgsb", "L-BFGS-B"), ("scipy-bfgs", "BFGS")])
def test_scipy_methods_do_what_scipy_does(name: str, method: str) -> None:
    ours, theirs = tiny(), tiny()
    *_, last = solve(ours, METHODS[name], Budget(60))
    problem, seen = counted(theirs)

    def loss_and_gradient(point: Any) -> tuple[float, Any]:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(point.copy()), theirs.params)
        loss = problem.loss()
        return float(loss.detach()), flat(list(torch.autograd.grad(loss, theirs.params))).numpy()

    start = torch.nn.utils.parameters_to_vector(theirs.params).detach().numpy().copy()
    extra = {"maxcor": 100, "ftol": 0, "maxls": 50} if method == "L-BFGS-B" else {}
    options = {"gtol": 0, "maxiter": 70, **extra}
    scipy.optimize.minimize(loss_and_gradient, start, jac=True, method=method, options=options)
    # With two threads rounding depends on where a tensor lies, and sixty evaluations make more of it.
    assert last.loss == pytest.approx(min(seen[:60]), rel=1e-9)


def test_nncg_does_what_deepxde_does() -> None:
    ours, theirs = tiny(), tiny()
    *_, last = solve(ours, FAST["nncg"], Budget(20), price=Price(1e-9))
    problem, seen = counted(theirs)
    optimizer = deepxde_module().NNCG(theirs.params, rank=50, mu=0.1, cg_max_iters=20, line_search_fn="armijo")
    with default_dtype(torch.float64), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        while len(seen) < 20:
            # A sketch that cannot be factorised is followed by another.
            with suppress(torch.linalg.LinAlgError):
                optimizer.step(problem.loss)
    assert last.loss == pytest.approx(min(seen[:20]), rel=1e-9)


def test_lbfgs_comes_before_nncg_where_it_is_told_to(products: list[int]) -> None:
    problem, seen = counted(tiny())
    before_the_first_product = []

    def loss() -> Tensor:
        if not products:
            before_the_first_product.append(1)
        return problem.loss()

    list(solve(replace(problem, loss=loss), NNCG(lbfgs_share=0.5, max_products=20), Budget(200), price=Price(0.5)))
    # Steps of 20 iterations, some with a second evaluation, until half is spent; one more evaluation for NNCG's graph.
    assert 100 <= len(before_the_first_product) <= 150
    assert len(seen) > len(before_the_first_product)


def test_nncg_leaves_default_precision_and_random_stream_alone() -> None:
    state = torch.random.get_rng_state()
    kinds = {
        torch.get_default_dtype() for _ in solve(tiny(), METHODS["nncg"], Budget(100), price=Price(0.5), records=50)
    }
    assert kinds == {torch.get_default_dtype()} == {torch.float32}
    assert torch.equal(torch.random.get_rng_state(), state)


def test_nncg_without_deepxde_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cao_lab.solvers.methods.nncg.find_spec", lambda name: None)
    with pytest.raises(SolveError, match=r"pip install 'cao-optimizer\[peers\]'"):
        list(solve(tiny(), METHODS["nncg"], Budget(10), price=Price(1)))


def test_sketched_lbfgs_is_billed_for_all_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub(torch.optim.LBFGS):
        """L-BFGS that claims a refresh with seven products, and half an evaluation more, whenever it evaluates."""

        calls = 0

        def __init__(self, params: Any, source: Any, seed: int, memory: str, **settings: Any) -> None:
            super().__init__(params, line_search_fn="strong_wolfe", **settings)

        @property
        def status(self) -> SimpleNamespace:
            self.calls += 1
            done = {"products": 7 * self.calls, "refreshes": self.calls, "corrected_cost": self.calls / 2}
            return SimpleNamespace(**done, reason="none")

    monkeypatch.setattr(cao, "SketchedLBFGS", Stub, raising=False)
    monkeypatch.setattr(cao, "LeastSquares", lambda residuals, params: None, raising=False)
    *_, last = solve(tiny(), METHODS["sketched-lbfgs"], Budget(100), price=Price(0.5, setup=3.0))
    # An evaluation comes with 7 products, a setup and a half: 8 in all; the thirteenth is stopped before it begins.
    assert (last.evaluations, last.products, last.setups) == (12, 91, 13)
    assert last.billed == 12 + 91 * 0.5 + 13 * 3 + 13 * 0.5


def test_a_dense_matrix_too_large_is_refused() -> None:
    with pytest.raises(SolveError, match="up to 20 parameters, got 51"):
        list(solve(tiny(), ScipyBFGS(max_size=20), Budget(10)))


def test_all_start_from_the_point_that_the_same_adam_phase_ends_at() -> None:
    problem = tiny()
    point = adam_phase(problem, 50, lr=1e-2)
    expected = float(problem.loss().detach())
    for name in AVAILABLE:
        set_point(list(problem.params), point)
        assert next(solve(problem, METHODS[name], Budget(20), price=Price(1))).loss == expected


def test_an_adam_phase_of_nothing_changes_nothing() -> None:
    problem = tiny()
    before = flat(list(problem.params))
    adam_phase(problem, 0)
    assert torch.equal(before, flat(list(problem.params)))


def test_the_adam_phase_is_torchs_adam() -> None:
    ours, theirs = tiny(), tiny()
    adam_phase(ours, 30, lr=1e-2)
    optimizer = torch.optim.Adam(theirs.params, lr=1e-2)
    problem, seen = counted(theirs)
    for _ in range(30):
        closure_of(problem, optimizer)()
        optimizer.step()
    assert float(ours.loss().detach()) == pytest.approx(min(seen), rel=1e-12)
