"""What SketchedLBFGS's settings, source of curvature, parameters and saved state must satisfy."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from cao.operators import ParameterOperator
from cao.settings import is_count, is_number, is_positive

SOURCES = "LeastSquares, GaussNewton, an operator that has params, or a function that returns the loss"


def check_solver_settings(settings: dict[str, Any]) -> None:
    """Refuse settings that cannot work."""
    for name in ("max_iter", "max_eval", "history_size", "rank", "refresh"):
        value = settings[name]
        is_left_open = value == "auto" if name in ("rank", "refresh") else name == "max_eval" and value is None
        if not is_left_open and not is_count(value):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
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


def check_trainable(params: Sequence[Tensor], progress: dict[str, Any]) -> None:
    """Refuse to go on with other parameters than the pairs and the sketch are about; the first call notes which."""
    now = [index for index, param in enumerate(params) if param.requires_grad]
    before = progress.setdefault("trainable", now)
    if now != before:
        raise ValueError(
            f"{len(now)} parameters require a gradient, and {len(before)} did at the first step, or not the same "
            "ones; make a new SketchedLBFGS, and a new source, after freezing or unfreezing"
        )


def check_state(state_dict: dict[str, Any], params: Sequence[Tensor]) -> None:
    """Refuse the state of another optimizer or model, before any of it is loaded."""
    if not any("stalled_at" in group.get("progress", ()) for group in state_dict.get("param_groups", ())):
        raise ValueError("the state dict must be one of SketchedLBFGS, got one of another optimizer")
    size, dtype = sum(p.numel() for p in params), torch.cat([p.new_empty(0) for p in params]).dtype
    for entries in state_dict["state"].values():
        for name in ("steps", "vectors"):
            saved = entries.get(name)
            if saved is not None and (saved.shape[1] != size or saved.dtype != dtype):
                raise ValueError(
                    f"the state dict is of another model: it has {saved.shape[1]} parameters in {saved.dtype}, "
                    f"this one {size} in {dtype}"
                )
