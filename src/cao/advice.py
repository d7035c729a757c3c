"""Warnings about a run: each one once, with a figure and a remedy, at the line that caused it."""

import inspect
import warnings

# Packages whose lines are not the user's own.
INNER = ("cao.", "torch.", "lightning.", "pytorch_lightning.", "transformers.", "accelerate.", "deepxde.")


def warn_once(kind: str, message: str, warned: list[str]) -> None:
    """Warn at the user's own line, unless it was said before."""
    if kind in warned:
        return
    warned.append(kind)
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def asymmetric(asymmetry: float) -> str:
    """Say that a Hessian is not symmetric."""
    return (
        f"the second derivatives of this loss are wrong: its Hessian is asymmetric by {asymmetry:.2g} of its size. "
        "Some function in the graph has no correct double backward. GaussNewton needs no double backward"
    )


def beyond_the_edge(rate: float, edge: float, where: str) -> str:
    """Say that the effective step, in units of the inverse curvature, is beyond the edge of stability."""
    return (
        f"the effective step along {where} may be {rate:.3g} times the inverse curvature, beyond the edge of "
        f"stability, {edge:.3g}: the loss may oscillate or diverge. Divide lr by {rate / edge:.2g} or more, raise "
        'damping by as much, capture more directions with a larger rank, or use damping="auto"'
    )


def too_old(age: int) -> str:
    """Say that the sketch is not being refreshed."""
    return (
        f"the sketch of the curvature is {age} steps old, twice as old as refresh_every allows; "
        "call optimizer.refresh_if_due(loss) in every iteration"
    )


def failed(has_sketch: bool) -> str:
    """Say that a refresh failed."""
    goes_on = "the last good sketch" if has_sketch else "first-order steps until a refresh succeeds"
    return f"a refresh of the curvature was non-finite and was discarded; training continues with {goes_on}"


def scaled(factor: float, norm: float) -> str:
    """Say that a step's gradient is a multiple of that of the loss whose curvature was taken."""
    is_clipped = factor < 1 and abs(norm - round(norm, 1)) < 1e-3 * norm
    clipping = f" If gradients are clipped at a norm of {round(norm, 1):g}, nothing is wrong" if is_clipped else ""
    return (
        f"the gradient at step() is {factor:.3g} times that of the loss given to refresh_if_due: if this loss was "
        f"multiplied by a number for the backward pass, the curvature is wrong by as much, and needs that number, as "
        f"scale={1 / factor:.6g} if none was given.{clipping}"
    )


def accumulated(parts: int, factor: float) -> str:
    """Say that a step adds up the gradients of several losses, and that the curvature is that of one of them."""
    return (
        f"the gradients of {parts} losses were added up before this step, to {factor:.3g} times that of the first one, "
        f"whose curvature was taken: it is about {parts} times too small. Pass scale={1 / parts:.6g} to refresh_if_due"
    )


def without_source() -> str:
    """Say that a copy of SketchedLBFGS has no source of curvature."""
    return (
        "a copy or a pickle of SketchedLBFGS has no source of curvature, because the source belongs to the model that "
        "was copied; set optimizer.source, or it goes on as plain L-BFGS over its last sketch"
    )


def contradiction(first: float, second: float) -> str:
    """Say that a closure is not one function."""
    return (
        f"the closure returned {first:.6g} and then {second:.6g} at the same parameters: L-BFGS needs one "
        "function. Draw points or batches once, outside of the closure, and switch off dropout"
    )
