"""An optimizer as the training loop sees it: a step on the loss of a batch, and what curvature it has used so far."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cao import Eigenpairs
from cao.curvature.operators import ParameterOperator
from cao_lab.runs.loss import BatchLoss
from cao_lab.runs.settings import ConfigError


@dataclass(frozen=True)
class Refreshed:
    """A refresh that has just been made, while its graph is alive: the matrix, and how to get its true eigenpairs."""

    operator: ParameterOperator
    eigenpairs: Callable[[], Eigenpairs]
    damping: float


OnRefresh = Callable[[Refreshed], None]


@dataclass(frozen=True)
class Stepper:
    """An optimizer, how it takes a step, and what curvature it has used so far."""

    optimizer: Optimizer
    step: Callable[[BatchLoss, OnRefresh], None]
    hessian_products: Callable[[], int] = lambda: 0
    refreshes: Callable[[], int] = lambda: 0
    tells_its_eigenvalues: Callable[[], bool] = lambda: False
    """Whether a refresh belongs to the step that is being taken, so that nobody else has to look at the curvature."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer may move."""
    return [p for p in model.parameters() if p.requires_grad]


def first_order(optimizer: Optimizer, max_gradient_norm: float | None = None, decay: float = 0.0) -> Stepper:
    """Return the method whose step is a gradient, a clip and an update."""

    def step(batch_loss: BatchLoss, _: OnRefresh) -> None:
        optimizer.zero_grad()
        batch_loss().backward()
        clip_gradients(optimizer, max_gradient_norm, decay)
        optimizer.step()

    return Stepper(optimizer, step)


def clip_gradients(optimizer: Optimizer, max_norm: float | None, decay: float) -> None:
    """Clip what an optimizer is about to step with, if it is to be clipped."""
    if max_norm is not None:
        clip_with_decay((p for group in optimizer.param_groups for p in group["params"]), decay, max_norm)


@torch.no_grad()
def clip_with_decay(params: Iterable[Tensor], decay: float, max_norm: float) -> None:
    """Change the gradients so that g + decay·θ, which the optimizer is about to form, is clipped at `max_norm`.

    Clipping after the weight decay is what Algorithm 1 does, and so SGD is clipped exactly as CAO of rank 0.
    """
    moving = [p for p in params if p.grad is not None]
    full = [p.grad.add(p, alpha=decay) for p in moving if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(full)
    shrink = (max_norm / norm).clamp(max=1.0)
    for p, gradient in zip(moving, full, strict=True):
        p.grad = gradient.mul_(shrink).sub_(p, alpha=decay)


def optimizer_class(made_by: str) -> Any:
    """Return a class of torch, or of pytorch_optimizer, which is not installed by default."""
    try:
        return resolve_name(made_by)
    except ImportError as error:
        name = made_by.rpartition(":")[2]
        raise ConfigError(f"{name} needs the extra `baselines`: pip install 'cao-optimizer[baselines]'") from error
