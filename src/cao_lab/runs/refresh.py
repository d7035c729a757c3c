"""A refresh of CAO within a run: the sketch, or a control in its place, and what the log is told of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cao import CAO, Eigenpairs, Sketch
from cao.curvature.operators import ParameterOperator
from cao.linalg.columns import HERE, generator_for, orthonormalize
from cao.linalg.eigensolvers import eigensolver_for
from cao.linalg.flat import FlatParams
from cao_lab.runs.loss import BatchLoss
from cao_lab.runs.stepper import OnRefresh, Refreshed, Stepper

if TYPE_CHECKING:
    from cao_lab.runs.methods.cao import CAOConfig

# λ → ∞ for the projected-out control: λ/(λ + η) is 1 to the last bit of float32.
INFINITE_CURVATURE = 1e12


def loss_with_a_look(optimizer: CAO, batch_loss: BatchLoss, look: Callable[[ParameterOperator], object]) -> Tensor:
    """Return the loss of a step, having looked at the curvature if that is due."""
    if optimizer.is_refresh_due and not batch_loss.is_curvature_of_the_graph:
        # Before the forward pass, so that memory never holds its graph and those of the curvature together.
        look(batch_loss.curvature(None))
    loss = batch_loss(is_differentiated_twice=optimizer.is_refresh_due)
    if optimizer.is_refresh_due:
        look(batch_loss.curvature(loss))
    return loss


def refresh(optimizer: CAO, operator: ParameterOperator, config: "CAOConfig", on_refresh: OnRefresh) -> None:
    """Refresh the sketch, or put a control in its place, and tell of it if something finite came out."""
    generator = generator_for(operator.params[0].device, optimizer.param_groups[0]["seed"], optimizer.counters.steps)
    true = None if config.sketch == "top" else top_eigenpairs(operator, config, generator)
    if optimizer.refresh(operator if true is None else control(true, config, generator)):
        tell(optimizer, operator, on_refresh, true)


def refresh_by_rule(optimizer: CAO, operator: ParameterOperator, on_refresh: OnRefresh) -> None:
    """Let the optimizer decide whether its sketch still fits, and tell of a new one."""
    if optimizer.refresh_if_due(operator):
        tell(optimizer, operator, on_refresh)


def tell(optimizer: CAO, operator: ParameterOperator, on_refresh: OnRefresh, true: Eigenpairs | None = None) -> None:
    """Tell of the sketch in use, or of the eigenpairs that a control stands for."""
    if (sketch := optimizer.sketch) is not None:
        # Putting the vectors together takes memory that only the log needs, so that is left to whoever writes it.
        on_refresh(Refreshed(operator, lambda: true or captured_eigenpairs(sketch), sketch.damping))


def counted(optimizer: CAO, step: Callable[[BatchLoss, OnRefresh], None], tells: Callable[[], bool]) -> Stepper:
    """Return the method of an optimizer that counts its products itself; `tells` as in `tells_its_eigenvalues`."""
    return Stepper(
        optimizer,
        step,
        hessian_products=lambda: optimizer.counters.hessian_products,
        refreshes=lambda: optimizer.counters.refreshes,
        tells_its_eigenvalues=tells,
    )


def has_fresh_sketch(optimizer: CAO) -> bool:
    """Whether the sketch in use was made for the step that comes next."""
    return optimizer.sketch is not None and optimizer.sketch.age == 0


def captured_eigenpairs(sketch: Sketch) -> Eigenpairs:
    """Return the sketch in use as eigenpairs."""
    vectors = sketch.vectors
    return Eigenpairs(vectors.new_tensor(sketch.values), vectors, vectors.new_tensor(sketch.residuals))


def top_eigenpairs(operator: ParameterOperator, config: "CAOConfig", generator: torch.Generator) -> Eigenpairs:
    """Return what CAO itself would have found from a cold start."""
    flat = FlatParams(operator.params)
    solve = eigensolver_for(config.eigensolver, config.power_iterations, config.tolerance)
    return solve(operator, flat.space.random(flat.size, config.rank, generator, flat.dtype))


def control(true: Eigenpairs, config: "CAOConfig", generator: torch.Generator) -> Eigenpairs:
    """Return random directions with the true eigenvalues, or the true directions with infinite ones."""
    if config.sketch == "projected-out":
        return replace(true, values=torch.full_like(true.values, INFINITE_CURVATURE))
    size, rank = true.vectors.shape
    return replace(true, vectors=orthonormalize(HERE.random(size, rank, generator, true.vectors.dtype)))
