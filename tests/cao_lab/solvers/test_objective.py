"""The meter: what is billed, what is not, which point is kept, and how a run ends. Time is a counter here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from threadpoolctl import threadpool_info
from torch import Tensor

from cao_lab.solvers import clock as clock_module
from cao_lab.solvers import objective as objective_module
from cao_lab.solvers import price as price_module
from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.methods import METHODS
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.solvers.objective import Objective
from cao_lab.solvers.price import Price, Products, hessian_product, measured_price
from cao_lab.solvers.solving import solve
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.problem import Problem, ProblemConfig


class Clock:
    """A clock that moves only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(objective_module, "computing_seconds", clock)
    monkeypatch.setattr(price_module, "computing_seconds", clock)
    return clock


def bowl(start: float = 1.0) -> Problem:
    """x², with x itself as the error."""
    x = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    return Problem("bowl", [x], lambda: x.square().sum(), error=lambda: float(x.detach()))


def slow(problem: Problem, clock: Clock, evaluation: float, error: float = 0.0) -> Problem:
    """The problem, with evaluations that take their time."""

    def loss() -> Tensor:
        clock.advance(evaluation)
        return problem.loss()

    def measure() -> float:
        clock.advance(error)
        assert problem.error is not None
        return problem.error()

    return replace(problem, loss=loss, error=measure)


@dataclass(frozen=True)
class Visiting:
    """Evaluates at given points, and ends there."""

    points: tuple[float, ...]
    name = "visiting"

    def products(self, problem: Problem) -> Products | None:
        return None

    def minimize(self, objective: Objective) -> str:
        for point in self.points:
            objective.params[0].data.fill_(point)
            objective.closure()
        return "out of points"


def test_a_budget_of_seconds_ends_a_run(clock: Clock) -> None:
    *_, last = solve(slow(bowl(), clock, 1.0), Adam(), Budget(seconds=10))
    assert (last.evaluations, last.seconds, last.status) == (10, 10, "spent")


def test_what_a_method_does_before_its_first_evaluation_is_not_billed(clock: Clock) -> None:
    objective = Objective(slow(bowl(), clock, 1.0), Budget(seconds=10))
    clock.advance(1000)
    objective.closure()
    assert objective.seconds == 1


def test_the_first_budget_to_be_spent_counts(clock: Clock) -> None:
    *_, last = solve(slow(bowl(), clock, 1.0), Adam(), Budget(evaluations=7, seconds=10))
    assert last.evaluations == 7


def test_measuring_the_error_is_not_billed(clock: Clock) -> None:
    records = list(solve(slow(bowl(), clock, 1.0, error=100.0), Adam(), Budget(seconds=10), records=5))
    assert clock.now > 500
    assert (records[-1].evaluations, records[-1].seconds) == (10, 10)


def test_looking_at_a_record_is_not_billed(clock: Clock) -> None:
    seconds = []
    for record in solve(slow(bowl(), clock, 1.0), Adam(), Budget(seconds=10)):
        clock.advance(1000)
        seconds.append(record.seconds)
    assert seconds[-1] == 10


def test_a_record_shows_the_best_point_and_its_error() -> None:
    records = list(solve(bowl(), Visiting((3.0, -1.0, 2.0, 0.5, 4.0)), Budget(100), records=100))
    assert [record.loss for record in records] == [9, 1, 1, 0.25, 0.25, 0.25, 0.25]
    assert [record.error for record in records] == [3, -1, -1, 0.5, 0.5, 0.5, 0.5]


def test_the_parameters_are_left_at_the_best_point() -> None:
    problem = bowl()
    list(solve(problem, Visiting((3.0, -1.0, 2.0)), Budget(100)))
    assert problem.params[0].item() == -1


def test_measuring_the_error_leaves_the_method_where_it_was() -> None:
    problem = bowl()
    stream = solve(problem, Visiting((1.0, 3.0, 2.0)), Budget(100), records=100)
    assert [problem.params[0].item() for record in stream if record.status == "running"] == [1, 3, 2]


def test_a_stalled_method_idles_to_the_end_of_its_budget_and_says_so() -> None:
    records = list(solve(bowl(), Visiting((1.0, 0.5)), Budget(evaluations=100, seconds=1e6)))
    stalled, idle = records[-2:]
    assert (stalled.status, stalled.billed) == ("stalled: out of points", 2)
    assert (idle.status, idle.billed, idle.seconds, idle.loss) == ("idle", 100, 1e6, 0.25)
    assert idle.evaluations == 2


@pytest.mark.parametrize("name", ["torch-lbfgs", "scipy-lbfgsb", "scipy-bfgs"])
def test_a_quasi_newton_method_at_a_minimum_stalls(name: str) -> None:
    *_, stalled, idle = solve(bowl(0.0), METHODS[name], Budget(50))
    assert stalled.status.startswith("stalled: ")
    assert stalled.evaluations < 10
    assert idle.billed == 50


def test_a_method_that_finds_no_finite_loss_any_more_is_stopped() -> None:
    records = list(solve(bowl(), Visiting((1.0, *[math.nan] * 1000)), Budget(10_000)))
    assert records[-2].status == "stalled: no finite loss in 50 evaluations"
    assert records[-1].loss == 1


def falling(slope: float) -> Problem:
    """A loss without a minimum."""
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    return Problem("falling", [x], lambda: slope * x.sum())


@pytest.mark.parametrize(("slope", "lowest"), [(1.0, -1e13), (1e6, -1e13)])
def test_a_loss_without_a_lower_bound_ends_a_run(slope: float, lowest: float) -> None:
    records = list(solve(falling(slope), Visiting((1.0, -1e11, lowest, 0.0)), Budget(10_000), records=10_000))
    assert records[-2].status.startswith(f"stalled: the loss is unbounded below, it has reached {slope * lowest:.1e}")
    assert records[-2].evaluations == 3


def test_a_loss_that_is_large_from_the_start_may_be_as_large_and_negative() -> None:
    records = list(solve(falling(1e15), Visiting((1.0, -1e3)), Budget(10_000)))
    assert records[-2].status == "stalled: out of points"


def test_a_run_that_fails_shows_first_what_it_reached() -> None:
    problem = bowl()

    def loss() -> Tensor:
        if problem.params[0].item() == 0.5:
            raise RuntimeError("half")
        return problem.loss()

    records = solve(replace(problem, loss=loss), Visiting((3.0, 2.0, 1.0, 0.5)), Budget(10_000), records=1)
    assert [next(records).loss, next(records).loss] == [9, 1]
    with pytest.raises(RuntimeError, match="half"):
        next(records)
    assert problem.params[0].item() == 1


def test_a_run_whose_error_cannot_be_measured_any_more_has_none() -> None:
    def error() -> float:
        if problem.params[0].item() == 1:
            raise RuntimeError("no error")
        return 7.0

    problem = replace(bowl(), error=error)
    records = solve(problem, Visiting((3.0, 1.0)), Budget(100), records=100)
    assert next(records).error == 7
    failed = next(records)
    assert (failed.status, failed.loss, math.isnan(failed.error)) == ("failed", 1, True)


def test_the_first_evaluation_is_made_whatever_the_time() -> None:
    *_, last = solve(bowl(), Adam(), Budget(100, seconds=1e-12))
    assert (last.evaluations, last.loss, last.status) == (1, 1, "spent")


def test_records_are_spread_over_the_budget() -> None:
    records = list(solve(bowl(), Adam(), Budget(1000), records=10))
    assert 10 <= len(records) <= 12
    assert records[0].evaluations == 1
    assert records[-1].evaluations == 1000


def test_products_are_billed_at_their_price() -> None:
    objective = Objective(bowl(), Budget(100), price=Price(2.5, setup=7.0))
    objective.closure()
    objective.bill(4, setups=2)
    assert objective.billed == 1 + 2.5 * 4 + 7 * 2


def test_nothing_is_computed_once_the_budget_is_spent() -> None:
    objective = Objective(bowl(), Budget(10), price=Price(2.5, setup=7.0))
    with pytest.raises(objective_module.BudgetSpent):
        objective.bill(4)
    with pytest.raises(objective_module.BudgetSpent):
        objective.closure()
    assert objective.evaluations == 0


def test_the_price_is_the_time_of_a_product_over_that_of_an_evaluation(clock: Clock) -> None:
    products = Products(lambda: clock.advance(12.0), count=4, setup=lambda: clock.advance(40.0))
    assert measured_price(slow(bowl(), clock, 2.0), products) == Price(1.5, setup=20)


def test_the_price_is_a_median(clock: Clock) -> None:
    durations: Iterator[float] = iter([50.0, 3.0, 3.0, 3.0, 99.0, *[3.0] * 7])
    assert measured_price(slow(bowl(), clock, 2.0), Products(lambda: clock.advance(next(durations)))) == Price(1.5)


def test_measuring_a_price_ends_at_its_limit(clock: Clock) -> None:
    products = Products(lambda: clock.advance(12.0), count=4, setup=lambda: clock.advance(40.0))
    # A turn takes 54 seconds; the second begins before the limit, the third does not.
    assert measured_price(slow(bowl(), clock, 2.0), products, limit=100) == Price(1.5, setup=20)
    assert clock.now == 108


def test_one_product_is_timed_if_several_take_longer_than_the_limit(clock: Clock) -> None:
    products = Products(lambda: pytest.fail("too slow"), count=20, one=lambda: clock.advance(3.0))
    assert measured_price(slow(bowl(), clock, 2.0), products, limit=10) == Price(1.5)
    assert clock.now <= 20


def test_a_price_without_a_limit_is_that_of_all_products_and_all_turns(clock: Clock) -> None:
    products = Products(lambda: clock.advance(12.0), count=4, one=lambda: pytest.fail("not what suites measure"))
    measured_price(slow(bowl(), clock, 2.0), products, repeats=21)
    assert clock.now == 22 * 14


@pytest.mark.parametrize("residuals", [True, False])
def test_one_timed_product_is_the_first_of_the_block(residuals: bool) -> None:
    problem = EQUATIONS["wave"].problem(ProblemConfig(width=4, depth=1, interior=10, initial=5, boundary=3))
    products = METHODS["sketched-lbfgs"].products(problem if residuals else replace(problem, residuals=None))
    assert products is not None
    assert products.one is not None
    torch.testing.assert_close(products.one(), products.make()[:, :1])


def test_a_timed_product_is_one_with_the_hessian() -> None:
    problem = EQUATIONS["wave"].problem(ProblemConfig(width=4, depth=1, interior=10, initial=5, boundary=3))
    params = list(problem.params)
    vectors = [torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) for p in params]
    h = 1e-5

    def gradient(sign: int) -> list[Tensor]:
        with torch.no_grad():
            for p, v in zip(params, vectors, strict=True):
                p += sign * h * v
        result = torch.autograd.grad(problem.loss(), params)
        with torch.no_grad():
            for p, v in zip(params, vectors, strict=True):
                p -= sign * h * v
        return list(result)

    product = hessian_product(problem).make()
    expected = [(up - down) / (2 * h) for up, down in zip(gradient(1), gradient(-1), strict=True)]
    for got, wanted in zip(product, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_price_is_measured_and_recorded_if_not_given() -> None:
    problem = EQUATIONS["regression"].problem(ProblemConfig(width=4, depth=1, interior=10, initial=5, boundary=3))
    *_, last = solve(problem, METHODS["nncg"], Budget(20))
    assert last.price > 0
    assert last.billed == last.evaluations + last.price * last.products


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({}, "needs a number of evaluations or of seconds"), ({"evaluations": 0}, "evaluations must be positive, got 0")],
)
def test_a_budget_without_end_or_beginning_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(**arguments)


def test_a_record_is_plain_data() -> None:
    record = next(solve(bowl(), Adam(), Budget(5)))
    assert record == Record(1, 0, 0, 1.0, record.seconds, 1.0, 1.0, 0.0, 0.0, "running")


@pytest.mark.parametrize(("threads", "clock"), [(1, "the processor's"), (2, "on the wall")])
def test_the_clock_is_the_processors_where_there_is_one_thread(
    threads: int, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "process_time", lambda: "the processor's")
    monkeypatch.setattr(clock_module, "perf_counter", lambda: "on the wall")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert clock_module.computing_seconds() == clock


@dataclass(frozen=True)
class Counting:
    """Notes how many threads torch's OpenMP and numpy's matrix products would use where the method runs."""

    seen: list[int]
    name = "counting"

    def products(self, problem: Problem) -> Products | None:
        return None

    def minimize(self, objective: Objective) -> str:
        self.seen.extend(pool["num_threads"] for pool in threadpool_info())
        objective.closure()
        return "counted"


def test_a_method_has_the_threads_of_whoever_asked_for_it() -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)  # Which is nobody's default.
    try:
        list(solve(bowl(), Counting(seen), Budget(5)))
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}
