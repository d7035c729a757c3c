"""Steps on trial, for damping that measures its own success: a step that overshot is taken back and made shorter.

Between two gradients g and g′ at the ends of a step s, the loss has changed by about ½(g + g′)ᵀs. So the agreement
g′ᵀs / gᵀs is 1 where the slope has not changed, 0 at the minimum along the step, and −1 where the loss is as high as
before. No value of the loss is needed, and a gradient that is not finite counts as a failure.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cao.flat import FlatParams
from cao.sketch import Progress

# The reduction of the loss is a quarter of what the first slope promised; below that the step is taken back.
OVERSHOT = -0.5
# How trust is lost and won back, and the least caution that is worth remembering.
CAUTION_AFTER_FAILURE, CAUTION_AFTER_SUCCESS, LEAST_CAUTION = 4.0, 0.5, 1e-6


State = Mapping[Tensor, dict[str, Any]]
Moving = tuple[Tensor, Tensor, Mapping[str, Any]]
"""A parameter, its gradient and its group."""


def caution_after(groups: Sequence[Mapping[str, Any]], state: State, progress: Progress) -> float:
    """Judge the last step, take it back if it failed, and return the damping that caution asks for in the next one.

    That is f·√(λ₁‖g‖/‖θ‖): the regularisation √(M‖g‖) of Newton's method with a bound M on the change of curvature,
    for which λ₁/‖θ‖ stands (curvature changes where parameters change by their own size), and a factor f that each
    failure raises and each success lowers. It costs two vectors of memory and a host synchronisation per step.
    """
    moving = [(p, p.grad, group) for group in groups for p in group["params"] if p.grad is not None]
    judge([each for each in moving if "last_param" in state[each[0]]], state, progress)
    for param, gradient, _ in moving:
        state[param]["last_param"], state[param]["last_gradient"] = param.clone(), gradient.clone()
    if progress.sketch is None or not moving:
        return 0.0
    flat = FlatParams(param for param, *_ in moving)
    gradient_norm, parameter_norm = (
        float(flat.norm(tensors)) for tensors in ([slope(*each) for each in moving], flat.params)
    )
    if parameter_norm == 0 or not math.isfinite(gradient_norm):
        return 0.0
    return progress.caution * math.sqrt(abs(progress.sketch.values[0]) * gradient_norm / parameter_norm)


def judge(moved: Sequence[Moving], state: State, progress: Progress) -> None:
    """Compare the slopes at both ends of the last step, and undo it if it overshot."""
    if not moved:
        return
    flat, owns = FlatParams(param for param, *_ in moved), [state[param] for param, *_ in moved]
    begins = [(own["last_param"], own["last_gradient"], each[2]) for own, each in zip(owns, moved, strict=True)]

    def change() -> Iterator[Tensor]:
        # One parameter at a time, so that no vector of all of them is held for it.
        return (param - own["last_param"] for param, own in zip(flat.params, owns, strict=True))

    slopes = ((slope(*end) for end in ends) for ends in (begins, moved))
    first, second = torch.stack([flat.dot(parts, change()) for parts in slopes]).tolist()
    # A step that did not go downhill, such as none at all, promised nothing.
    agreement = second / first if first < 0 else 0.0
    if math.isfinite(second) and agreement >= OVERSHOT:
        if agreement > 0:
            progress.caution = max(progress.caution * CAUTION_AFTER_SUCCESS, LEAST_CAUTION)
        return
    progress.caution *= CAUTION_AFTER_FAILURE
    progress.rejected_steps += 1
    for param, gradient, _ in moved:
        param.copy_(state[param]["last_param"])
        gradient.copy_(state[param]["last_gradient"])
        if "momentum_buffer" in state[param]:
            state[param]["momentum_buffer"].zero_()


def slope(param: Tensor, gradient: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Return the gradient of what is minimised: with its sign, and with weight decay that is not decoupled."""
    directed = -gradient if settings["maximize"] else gradient
    decay = 0.0 if settings["decoupled_weight_decay"] else settings["weight_decay"]
    return directed.add(param, alpha=decay) if decay else directed
