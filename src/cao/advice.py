"""Warnings about a run: each one once, with a figure and a remedy, at the line that caused it."""

import inspect
import warnings

# Packages whose lines are not the user's own.
INNER = ("cao.", "torch.", "lightning.", "pytorch_lightning.", "transformers.", "accelerate.", "deepxde.")
# Beyond this relative asymmetry a "Hessian" is no Hessian; bfloat16 alone leaves about 0.01.
ASYMMETRIC = 0.05


def warn_once(kind: str, message: str | None, warned: list[str]) -> None:
    """Warn at the user's own line, unless there is nothing to say or it was said before."""
    if message is None or kind in warned:
        return
    warned.append(kind)
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def on_asymmetry(asymmetry: float) -> str | None:
    """Say that a Hessian is not symmetric."""
    if not asymmetry > ASYMMETRIC:  # Silent for NaN too: a failed refresh has a warning of its own.
        return None
    return (
        f"the second derivatives of this loss are wrong: its Hessian is asymmetric by {asymmetry:.2g} of its size. "
        "Some function in the graph has no correct double backward (torch.nn.utils.weight_norm, for one; use "
        "torch.nn.utils.parametrizations.weight_norm). GaussNewton needs no double backward"
    )


def on_the_edge(rate: float, edge: float, where: str) -> str | None:
    """Say that the effective step, in units of the inverse curvature, is beyond the edge of stability."""
    if rate <= edge:
        return None
    return (
        f"the effective step along {where} may be {rate:.3g} times the inverse curvature, beyond the edge of "
        f"stability, {edge:.3g}: the loss may oscillate or diverge. Divide lr by {rate / edge:.2g} or more, raise "
        'damping by as much, capture more directions with a larger rank, or use damping="edge"'
    )


def on_age(age: int) -> str:
    """Say that the sketch is not being refreshed."""
    return (
        f"the sketch of the curvature is {age} steps old, twice as old as refresh_every allows; "
        "call optimizer.refresh_if_due(loss) in every iteration"
    )


def on_failure(has_sketch: bool) -> str:
    """Say that a refresh failed."""
    goes_on = "the last good sketch" if has_sketch else "first-order steps until a refresh succeeds"
    return f"a refresh of the curvature was non-finite and was discarded; training continues with {goes_on}"
