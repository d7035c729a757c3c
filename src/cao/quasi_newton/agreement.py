"""Whether the source of curvature speaks of the loss that the closure returns, or of a multiple of it."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.autograd.isolation import isolated_forward
from cao.curvature.gauss_newton import GaussNewton
from cao.curvature.least_squares import LeastSquares
from cao.curvature.linearized import Linearized
from cao.curvature.operators import ParameterOperator, agreed
from cao.quasi_newton.objective import Iterate

# Losses or gradients that differ by less than this share are taken for equal, or for parallel.
CLOSE = 1e-3


def loss_of(source: Any, operator: Any, here: Iterate, group: Any) -> float:
    """Return the loss that the source speaks of; NaN if it knows products only."""
    if isinstance(source, ParameterOperator) and not isinstance(source, LeastSquares | GaussNewton):
        return math.nan

    def compute_loss() -> Tensor:
        numbers = operator.loss if isinstance(operator, Linearized) else evaluated(source, here, [])
        return numbers.reshape(1).to(here.gradient)

    return float(averaged(compute_loss, here, group))


def is_same(loss: float, other: float) -> bool:
    """Whether two losses are one; what is not a number says nothing."""
    return not abs(loss - other) > CLOSE * abs(other)


def check_scale(source: Any, loss: float, here: Iterate, params: list[Tensor], group: Any) -> None:
    """Refuse a source whose loss is a multiple of the closure's: one of the two must be a mistake.

    Both the loss and its gradient must be that multiple. A constant or a further term in one of them, such as a weight
    decay that is not among the residuals, is no mistake. The gradient costs one evaluation.
    """
    gradient = averaged(lambda: evaluated(source, here, params), here, group)[:-1]
    factor = float(gradient @ here.gradient / here.gradient.square().sum())
    is_parallel = float((gradient - factor * here.gradient).norm()) <= CLOSE * float(gradient.norm())
    if is_parallel and abs(loss - factor * here.value) <= CLOSE * abs(loss):
        residuals = f", or multiply the residuals by {abs(factor) ** -0.5:.6g}" * isinstance(source, LeastSquares)
        raise ValueError(
            f"the source's loss must be the closure's, got {factor:.6g} times it ({loss:.6g} and {here.value:.6g} at "
            f"the same parameters); let both return the same loss{residuals}"
        )


@torch.enable_grad()
def evaluated(source: Any, here: Iterate, params: list[Tensor]) -> Float[Tensor, " n+1"]:
    """Return the gradient of the source's loss and behind it the loss, a mean if it is a function that yields many."""
    with isolated_forward(here.gradient.device):
        if isinstance(source, LeastSquares):
            result = source.residuals().square().sum()
        else:
            result = source.loss() if isinstance(source, GaussNewton) else source()
        rows = []
        for loss in [result] if isinstance(result, Tensor) else result:
            parts = torch.autograd.grad(loss, params, allow_unused=True) if params else ()
            pieces = [torch.zeros_like(p) if part is None else part for p, part in zip(params, parts, strict=True)]
            rows.append(torch.cat([piece.detach().reshape(-1).to(here.gradient) for piece in [*pieces, loss]]))
    return torch.stack(rows).mean(dim=0)


def averaged(compute: Callable[[], Tensor], here: Iterate, group: Any) -> Tensor:
    """Return the mean over all processes of what each computes."""
    if not (dist.is_available() and dist.is_initialized()):
        return compute()
    numbers = agreed(compute, group, here.gradient.device)
    dist.all_reduce(numbers, group=group)
    return numbers / dist.get_world_size(group)
