"""SketchedLBFGS with DeepXDE: `model.compile(sketched_lbfgs(model))` instead of `model.compile("L-BFGS")`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cao.lbfgs import SketchedLBFGS
from cao.least_squares import LeastSquares


def sketched_lbfgs(model: Any, variables: Sequence[Tensor] = (), **settings: Any) -> SketchedLBFGS:
    """Return an optimizer for `dde.Model.compile`, its curvature from the residuals of the model's PDE and conditions.

    The loss must be DeepXDE's default, the mean squared error; you may pass `loss_weights` to `compile`. The backend
    must be PyTorch, and every iteration must use all points. `variables` are the external trainable variables of an
    inverse problem. One iteration of `model.train` is `max_iter` iterations of L-BFGS.
    """
    params = [*model.net.parameters(), *variables]
    return SketchedLBFGS(params, source=LeastSquares(lambda: residuals_of(model), params), **settings)


def residuals_of(model: Any) -> list[Tensor]:
    """Return the residuals at the training points, weighted so that the training loss is the sum of their squares."""
    from deepxde import gradients  # noqa: PLC0415  # DeepXDE chooses its backend, and says so, when it is imported.

    inputs = torch.as_tensor(model.train_state.X_train).requires_grad_()
    targets = model.train_state.y_train
    targets = None if targets is None else torch.as_tensor(targets)
    auxiliary = model.train_state.train_aux_vars
    model.net.auxiliary_vars = None if auxiliary is None else torch.as_tensor(auxiliary)
    outputs = model.net(inputs)
    # A loss function that leaves the mean of squares undone: DeepXDE knows where its residuals are.
    parts = model.data.losses_train(targets, outputs, root_mean_part, inputs, model, aux=[model.net])
    gradients.clear()
    parts = parts if isinstance(parts, list) else [parts]
    weights = model.loss_weights or [1.0] * len(parts)
    return [math.sqrt(weight) * part for weight, part in zip(weights, parts, strict=True)]


def root_mean_part(target: Tensor, output: Tensor) -> Tensor:
    """Return what has the mean squared error as the sum of its squares."""
    return (output - target) / math.sqrt(output.numel())
