"""Whether the gradient that a step sees is that of the loss whose curvature was taken, or a multiple of it."""

import math

import torch
from torch import Tensor

from cao import advice
from cao.curvature.operators import ParameterOperator
from cao.linalg.space import precise
from cao.sketch.sketch import Progress

# Gradients of one loss agree in direction to more than this cosine; a factor within these bounds is not told of.
PARALLEL, SMALLEST, LARGEST = 0.9999, 0.5, 2.0


def gradient_of(operator: ParameterOperator) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters with the gradient of the loss whose graph an operator differentiates, if it has one."""
    parts = zip(operator.params, getattr(operator, "gradient", None) or (), strict=False)
    return [(param, part.detach()) for param, part in parts if part is not None]


def check_scale(progress: Progress) -> None:
    """Warn, at the step after the first refresh, if its gradient is a multiple of the one that the refresh saw.

    That step waits for the device, and no other one does.
    """
    known, progress.source_gradient = progress.source_gradient, []
    pairs = [(param.grad, part) for param, part in known if param.grad is not None]
    if not pairs:
        return
    best = precise(pairs[0][0].device)
    parts = [torch.stack([(a * b).sum(), a.square().sum(), b.square().sum()]).to(best) for a, b in pairs]
    product, ours, theirs = torch.stack(parts).sum(dim=0).tolist()
    if not (ours > 0 and theirs > 0 and product > PARALLEL * math.sqrt(ours) * math.sqrt(theirs)):
        return
    factor = math.sqrt(ours / theirs)
    if math.isfinite(factor) and not SMALLEST < factor < LARGEST:
        advice.warn_once("scale", advice.scaled(factor, math.sqrt(ours)), progress.has_warned)
