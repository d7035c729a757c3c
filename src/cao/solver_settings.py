"""What SketchedLBFGS's settings and its source of curvature must satisfy, checked once, when they are passed in."""

from numbers import Integral
from typing import Any

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
