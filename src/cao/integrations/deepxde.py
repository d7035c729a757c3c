"""SketchedLBFGS with DeepXDE: `model.compile(sketched_lbfgs(model))` instead of `model.compile("L-BFGS")`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cao.curvature.least_squares import LeastSquares
from cao.lbfgs import SketchedLBFGS


def sketched_lbfgs(model: Any, variables: Sequence[Tensor] = (), **settings: Any) -> SketchedLBFGS:
    """Return an optimizer for `dde.Model.compile`, its curvature from the residuals of the model's PDE and conditions.

    The loss must be DeepXDE's default, the mean squared error; you may pass `loss_weights` to `compile`. The backend
    must be PyTorch, and every iteration must use all points. `variables` are the external trainable variables of an
    inverse problem. One iteration of `model.train` is `max_iter` iterations of L-BFGS.
    """
    params = [*model.net.parameters(), *variables]
    return SketchedLBFGS(params, source=LeastSquares(lambda: checked_residuals(model), params), **settings)


def checked_residuals(model: Any) -> list[Tensor]:
    """Return the residuals, compared with the training loss once after each `compile`."""
    if vars(model).get("_cao_checked") is not model.outputs_losses_train:
        check_loss(model)
        model._cao_checked = model.outputs_losses_train
    return residuals_of(model)


def check_loss(model: Any) -> None:
    """Refuse a loss that is not the sum of the residuals' squares."""
    state = model.train_state
    losses = model.outputs_losses_train(state.X_train, state.y_train, state.train_aux_vars)[1].detach()
    own = torch.stack([part.detach().square().sum() for part in residuals_of(model)])
    if losses.shape != own.shape or not torch.allclose(losses, own, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"sketched_lbfgs needs DeepXDE's mean squared errors as the loss, got {losses.tolist()} where they are "
            f'{own.tolist()}; compile with loss="MSE", without an L1 regularizer'
        )


def residuals_of(model: Any) -> list[Tensor]:
    """Return the residuals at the training points, weighted so that the training loss is the sum of their squares."""
    from deepxde import gradients  # noqa: PLC0415  # DeepXDE chooses its backend, and says so, when it is imported.

    weights = model.loss_weights
    if weights is not None and min(weights) < 0:
        raise ValueError(f"loss_weights must not be negative, got {weights}: a loss that is lowered has no residuals")
    inputs = points_of(model.train_state.X_train)
    targets = model.train_state.y_train
    targets = None if targets is None else torch.as_tensor(targets)
    auxiliary = model.train_state.train_aux_vars
    model.net.auxiliary_vars = None if auxiliary is None else torch.as_tensor(auxiliary)
    outputs = model.net(inputs)
    # A loss function that leaves the mean of squares undone: DeepXDE knows where its residuals are.
    parts = model.data.losses_train(targets, outputs, root_mean_part, inputs, model, aux=[model.net])
    gradients.clear()
    parts = parts if isinstance(parts, list) else [parts]
    return [math.sqrt(weight) * part for weight, part in zip(weights or [1.0] * len(parts), parts, strict=True)]


def points_of(points: Any) -> Tensor | tuple[Tensor, ...]:
    """Return points to differentiate by: one array, or a tuple such as the functions and places of a DeepONet."""
    if isinstance(points, tuple):
        return tuple(torch.as_tensor(array).requires_grad_() for array in points)
    return torch.as_tensor(points).requires_grad_()


def root_mean_part(target: Tensor, output: Tensor) -> Tensor:
    """Return what has the mean squared error as the sum of its squares."""
    return (output - target) / math.sqrt(output.numel())
