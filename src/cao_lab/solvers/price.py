"""What a product costs in evaluations, measured."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from cao_lab.tasks.pde.problem import Problem


@dataclass(frozen=True)
class Products:
    """Some products of a matrix of curvature with vectors, made together."""

    make: Callable[[], object]
    count: int = 1


def measured_price(problem: Problem, products: Products, repeats: int = 7) -> float:
    """Return the time of a product over the time of an evaluation with its gradient: the medians, taken in turns."""

    def evaluation() -> None:
        torch.autograd.grad(problem.loss(), list(problem.params), allow_unused=True)

    seconds(products.make), seconds(evaluation)  # The first of each is slower.
    pairs = [(seconds(products.make), seconds(evaluation)) for _ in range(repeats)]
    return median(a for a, _ in pairs) / median(b for _, b in pairs) / products.count


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


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
