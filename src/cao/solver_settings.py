"""What SketchedLBFGS's settings, source of curvature, parameters and saved state must satisfy."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from cao.checks import is_count, is_number, is_positive
from cao.curvature.operators import ParameterOperator
from cao.quasi_newton.progress import Progress

SOURCES = "LeastSquares, GaussNewton, an operator that has params, or a function that returns the loss"


def check_solver_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work."""
    for name in ("max_iter", "max_eval", "history_size", "rank", "refresh"):
        value = settings[name]
        is_left_open = value == "auto" if name in ("rank", "refresh") else name == "max_eval" and value is None
        if not is_left_open and not is_count(value):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if settings["finish"] not in ("auto", None):
        raise ValueError(f'finish must be "auto" or None, got {settings["finish"]!r}')
    if settings["memory"] not in ("auto", "pairs", "dense"):
        raise ValueError(f'memory must be "auto", "pairs" or "dense", got {settings["memory"]!r}')
    if not is_positive(settings["lr"]):
        raise ValueError(f"lr must be positive and finite, got {settings['lr']!r}")
    for name in ("tolerance_grad", "tolerance_change"):
        if not (is_number(settings[name]) and settings[name] >= 0):
            raise ValueError(f"{name} must not be negative, got {settings[name]!r}")
    if not isinstance(settings["seed"], Integral):
        raise ValueError(f"seed must be a whole number, got {settings['seed']!r}")


def check_source(source: object) -> None:
    """Refuse a source that has no curvature to give, or that of one position only."""
    if isinstance(source, type):
        raise TypeError(f"source must be {SOURCES}, got the class {source.__name__}; pass an instance of it")
    if isinstance(source, nn.Module) and not isinstance(source, ParameterOperator):
        raise TypeError(
            f"source must be {SOURCES}, got the module {type(source).__name__}; pass GaussNewton(model, inputs, "
            "loss_of_outputs), or a function that runs the model and returns the loss"
        )
    if isinstance(source, Tensor):
        raise TypeError(
            f"source must be {SOURCES}, got a tensor, whose graph belongs to one position; pass a function that "
            "computes it anew"
        )
    if source is not None and not callable(source) and not isinstance(source, ParameterOperator):
        raise TypeError(f"source must be {SOURCES}, got {type(source).__name__}")


def check_trainable(params: Sequence[Tensor], progress: Progress) -> None:
    """Refuse to go on with other parameters than the pairs and the sketch are about; the first call notes which."""
    now = [index for index, param in enumerate(params) if param.requires_grad]
    if not now:
        raise ValueError("no parameter requires a gradient any more; unfreeze one with requires_grad_()")
    before = progress.trainable = progress.trainable or now
    progress.shapes = [list(param.shape) for param in params]
    if now != before:
        raise ValueError(
            f"{len(now)} parameters require a gradient, and {len(before)} did at the first step, or not the same "
            "ones; make a new SketchedLBFGS, and a new source, after freezing or unfreezing"
        )


def check_state(state_dict: dict[str, Any], params: Sequence[Tensor]) -> None:
    """Refuse the state of another optimizer or model, before any of it is loaded."""
    groups = state_dict.get("param_groups", ())
    saved: dict[str, Any] = next((group["progress"] for group in groups if "progress" in group), {})
    if "stalled_at" not in saved:
        raise ValueError("the state dict must be one of SketchedLBFGS, got one of another optimizer")
    trainable = [p for p in params if p.requires_grad]
    size, dtype = sum(p.numel() for p in trainable), torch.cat([p.new_empty(0) for p in trainable]).dtype
    for entries in state_dict["state"].values():
        for name in ("steps", "vectors", "dense"):
            rows = entries.get(name)
            if rows is not None and (rows.shape[1] != size or rows.dtype != dtype):
                raise ValueError(
                    f"the state dict is of another model: it has {rows.shape[1]} parameters in {rows.dtype}, "
                    f"this one {size} in {dtype}"
                )
    shapes = [list(p.shape) for p in params]
    if saved["shapes"] not in (None, shapes):
        raise ValueError(
            f"the state dict is of other parameters, or in another order: it has the shapes {saved['shapes']}, this "
            f"optimizer {shapes}"
        )
    if saved["iterations"] and not state_dict["state"]:
        raise ValueError("the state dict has no state; save optimizer.state_dict() whole")
