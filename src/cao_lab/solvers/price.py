"""What curvature costs in evaluations, measured."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

import torch

from cao_lab.solvers.clock import Clock, computing_seconds
from cao_lab.tasks.pde.problem import Problem

Work = Callable[[], object]


class Price(NamedTuple):
    """Times of a product, and of what a block of products needs first, over that of a loss with its gradient."""

    product: float = 0.0
    setup: float = 0.0


@dataclass(frozen=True)
class Products:
    """Some products of a matrix of curvature with vectors, to be timed."""

    make: Work
    count: int = 1
    setup: Work | None = None
    """What has to be done once before them, such as computing a Jacobian; not part of `make`."""
    one: Work | None = None
    """One product alone, if `make` is several."""


def measured_price(
    problem: Problem, products: Products, repeats: int = 11, limit: float = inf, clock: Clock | None = None
) -> Price:
    """Return the price of products on this machine: the medians of ratios of times that are taken in turns.

    After `limit` seconds no further turn begins. If several products would take longer than that, one is timed.
    """
    clock = clock or computing_seconds
    deadline = clock() + limit
    if limit < inf and products.one and products.count * seconds(products.one, clock) > limit:
        products = Products(products.one, setup=products.setup)

    def evaluation() -> None:
        torch.autograd.grad(problem.loss(), list(problem.params), allow_unused=True)

    works = [evaluation, products.make, products.setup or (lambda: None)]
    rounds = [[seconds(work, clock) for work in works]]
    while len(rounds) <= repeats and clock() < deadline:
        rounds.append([seconds(work, clock) for work in works])
    # The first round is slower, and counts only if it is the only one.
    rounds = rounds[1:] or rounds
    product = median(several / one for one, several, _ in rounds) / products.count
    return Price(product, median(setup / one for one, _, setup in rounds) if products.setup else 0.0)


def seconds(work: Work, clock: Clock) -> float:
    """Return how long it takes."""
    start = clock()
    work()
    return clock() - start


def hessian_product(problem: Problem) -> Products:
    """Return one product with the Hessian of the loss, from a graph that is made once for many."""
    params = list(problem.params)
    gradient = torch.autograd.grad(problem.loss(), params, create_graph=True, materialize_grads=True)
    direction = [torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) for p in params]
    live = [(part, v) for part, v in zip(gradient, direction, strict=True) if part.requires_grad]

    def product() -> object:
        outputs, weights = [part for part, _ in live], [v for _, v in live]
        return torch.autograd.grad(outputs, params, weights, retain_graph=True, allow_unused=True)

    return Products(product)
