"""A problem to solve: one of the laboratory's by name, or what a function of the user's returns."""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cao import GrowingPoints
from cao_lab.solvers.config import SolveError
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.problem import Problem, least_squares
from cao_lab.user_code import user_function

RETURNS = "it must return (params, loss or residuals[, error[, draw]])"


def load_problem(target: str) -> Problem:
    """Return the problem that the command line names, checked at its start."""
    problem = EQUATIONS[target].problem() if target in EQUATIONS else problem_of_function(target)
    loss = called(problem.loss, target)
    if not math.isfinite(value := float(loss.detach())):
        raise SolveError(f"{target}: the loss is {value} at the start; choose parameters where it is finite")
    gradient = called(lambda: torch.autograd.grad(loss, list(problem.params), allow_unused=True), target)
    again = float(called(problem.loss, target).detach())
    if not math.isclose(value, again, rel_tol=1e-4, abs_tol=1e-12):
        # Dropout, or points that are drawn anew.
        raise SolveError(f"{target}: the loss is {value:.6g}, then {again:.6g}; it must be the same at every call")
    if all(part is None for part in gradient):
        raise SolveError(f"{target}: the loss does not depend on params; compute it from the tensors that you return")
    return problem


def problem_of_function(target: str) -> Problem:
    """Call the user's function, and return the problem it describes."""
    function = user_function(
        target, f"is no problem; write path.py:function, or one of {', '.join(EQUATIONS)}", RETURNS
    )
    return as_problem(called(function, target), target)


def as_problem(result: Any, target: str) -> Problem:
    """Return what the user's function returned as a problem, if it is of use."""
    if isinstance(result, Problem):
        return result
    if not isinstance(result, tuple) or len(result) not in (2, 3, 4):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise SolveError(f"{target} returned {got}; {RETURNS}")
    params, function, error, draw = (*result, None, None)[:4]
    params = checked_params(params, target)
    wrong = [each for each in (function, error, draw) if not callable(each) and (each is not None or each is function)]
    if wrong:
        raise SolveError(f"{target} returned {type(wrong[0]).__name__} where a function was expected; {RETURNS}")
    name = target.rpartition(":")[2]
    error = checked_error(error, target) if error else None
    if draw:
        points = called(lambda: GrowingPoints(function, params, draw), target)
        return replace(least_squares(name, params, lambda: tuple(points.terms()), error), points=points)
    value = called(function, target)
    if is_graph(value) and value.ndim == 0:
        return Problem(name, params, function, error=error)
    parts = as_tuple(value)
    if not all(is_graph(part) for part in parts) or not any(part.numel() for part in parts):
        raise SolveError(
            f"{target}: the function must return a scalar loss or tensors of residuals, real and computed from params, "
            f"got {described(value)}"
        )
    return least_squares(name, params, lambda: as_tuple(function()), error)


def checked_error(error: Callable[[], Any], target: str) -> Callable[[], float]:
    """Return the error function as one that returns a float, after a first call."""

    def measured() -> float:
        return as_number(called(error, target), target)

    measured()
    return measured


def as_number(value: Any, target: str) -> float:
    """Return what the error function returned as a number; it may be a tensor or an array with one entry."""
    number = value.item() if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1 else value
    if not isinstance(number, Real):
        raise SolveError(f"{target}: the error function must return a number, got {described(value)}")
    return float(number)


def checked_params(params: Any, target: str) -> Sequence[Tensor]:
    """Return the parameters that can be optimised, of a module or a list."""
    found = list(params.parameters() if isinstance(params, nn.Module) else params if is_iterable(params) else [params])
    for value in found:
        if not isinstance(value, Tensor):
            raise SolveError(f"{target} returned {type(value).__name__} among its params; they must be tensors")
    kept = [p for p in found if p.requires_grad and p.is_leaf]
    if not kept:
        raise SolveError(f"{target} returned no params to optimise; they must be leaves with requires_grad=True")
    return kept


def is_iterable(value: Any) -> bool:
    """Whether it is a collection of tensors rather than one."""
    return hasattr(value, "__iter__") and not isinstance(value, Tensor)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return residuals as a tuple, be they one tensor or several."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def is_graph(value: Any) -> bool:
    """Whether it is a tensor of real numbers that can be differentiated."""
    return isinstance(value, Tensor) and value.requires_grad and not value.is_complex()


def described(value: Any) -> str:
    """Name what was got, tensors by their shape and whether they have a graph."""
    if isinstance(value, list | tuple):
        return f"({', '.join(described(part) for part in value)})"
    if isinstance(value, Tensor):
        kind = "a complex tensor" if value.is_complex() else "a tensor"
        return f"{kind} of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a graph'}"
    return type(value).__name__


def called(function: Callable[[], Any], target: str) -> Any:
    """Call a function of the user's; if it fails, say so in one line."""
    try:
        with torch.enable_grad():
            return function()
    except (Exception, SystemExit) as error:
        raise SolveError(explanation(error, target)) from error


def explanation(error: BaseException, target: str) -> str:
    """Tell an error in one line: what it is and, if it passed through the user's file, where."""
    if isinstance(error, SolveError):
        return str(error)
    reason = (str(error).splitlines() or [""])[0]
    line = line_in_file(error, target)
    place = f" in line {line}" if line else ""
    return f"{target} failed ({type(error).__name__}{place}: {reason})"


def line_in_file(error: BaseException, target: str) -> int | None:
    """Return the line of the user's file in which an error was raised, by itself or by what it called."""
    path = Path(target.rpartition(":")[0]).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if Path(frame.filename).resolve() == path), None)
