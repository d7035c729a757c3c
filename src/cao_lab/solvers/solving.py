"""Run a method on a problem, within a budget."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, isfinite

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from cao_lab.solvers.budget import Budget, Record
from cao_lab.solvers.clock import Clock
from cao_lab.solvers.method import Method
from cao_lab.solvers.methods.first_order import Adam
from cao_lab.solvers.objective import BudgetSpent, Lost, Objective, point_of
from cao_lab.solvers.price import Price, measured_price
from cao_lab.solvers.streaming import Emitter, streamed
from cao_lab.tasks.pde.problem import Problem


def solve(
    problem: Problem,
    method: Method,
    budget: Budget,
    *,
    price: Price | None = None,
    records: int = 200,
    clock: Clock | None = None,
) -> Iterator[Record]:
    """Minimise the loss from where the parameters are, and leave them at the best point found.

    Yields about as many records as asked for, spread evenly over the budget, the first at the start. The price of
    products is measured if it is not given. Time is that of `computing_seconds` if no other clock is given.
    """
    price = price_for(method, problem, clock=clock) if price is None else price
    threads = torch.get_num_threads()

    def work(emit: Emitter[Record]) -> None:
        objective = Objective(
            problem, budget, price=price, records=records, on_record=emit, on_evaluation=emit.check, clock=clock
        )
        # OpenMP has a limit for each thread; numpy, which scipy's methods compute with, has one for all.
        with threadpool_limits(threads):
            run(method, objective, emit)

    return streamed(work)


def price_for(
    method: Method, problem: Problem, *, repeats: int = 11, limit: float = inf, clock: Clock | None = None
) -> Price:
    """Measure what a method's products cost, within about so many seconds; nothing if it makes none."""
    products = method.products(problem)
    return Price() if products is None else measured_price(problem, products, repeats, limit, clock)


def run(method: Method, objective: Objective, emit: Callable[[Record], None]) -> None:
    """Run a method to the end of its budget; a method that stalls idles until then, and says so."""
    try:
        status = f"stalled: {method.minimize(objective)}"
    except BudgetSpent:
        status = "spent"
    except Lost as lost:
        status = f"stalled: {lost}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if objective.evaluations:
            emit(last_record(objective, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"))
        raise
    finally:
        objective.take_best()
    last = objective.record(status)
    emit(last)
    if status != "spent":
        emit(idle_to_the_end(last, objective.budget))


def last_record(objective: Objective, status: str) -> Record:
    """Return where a run stands that ended before its time; its error is unknown if measuring it is what fails."""
    try:
        return objective.record(status)
    except Exception:
        objective.problem = replace(objective.problem, error=None)
        return objective.record(status)


def idle_to_the_end(record: Record, budget: Budget) -> Record:
    """Return the record of a stalled run at the end of its budget."""
    billed = budget.evaluations if isfinite(budget.evaluations) else record.billed
    seconds = budget.seconds if isfinite(budget.seconds) else record.seconds
    return replace(record, billed=max(billed, record.billed), seconds=max(seconds, record.seconds), status="idle")


def adam_phase(problem: Problem, evaluations: int, lr: float = 1e-3) -> list[Tensor]:
    """Spend evaluations on Adam, and return the best point, which all methods are to start from."""
    if evaluations > 0:
        deque(solve(problem, Adam(lr, is_decaying=False), Budget(evaluations), records=1), maxlen=0)
    return point_of([p for p in problem.params if p.requires_grad])
