"""What a user should hear about a run: each warning once, with a figure and a remedy, from the line that caused it."""

import inspect
import warnings


def warn_once(kind: str, message: str, warned: list[str]) -> None:
    """Warn, unless that was said before, at the user's own line."""
    if kind in warned:
        return
    warned.append(kind)
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("cao.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def on_asymmetry(asymmetry: float, warned: list[str]) -> None:
    """Tell that a Hessian is none."""
    warn_once(
        "asymmetry",
        f"the second derivatives of this loss are wrong: its Hessian is asymmetric by {asymmetry:.2g} of its size. "
        "Some function in the graph has no correct double backward. GaussNewton needs none",
        warned,
    )


def on_the_edge(rate: float, edge: float, where: str, warned: list[str]) -> None:
    """Tell that the effective step, in units of the inverse curvature, is beyond the edge of stability."""
    warn_once(
        "edge",
        f"the effective step along {where} may be {rate:.3g} times the inverse curvature, beyond the edge of "
        f"stability, {edge:.3g}: the loss may oscillate or diverge. Divide lr by {rate / edge:.2g} or more, raise "
        'damping by as much, capture more directions with a larger rank, or leave damping to "edge"',
        warned,
    )


def on_age(age: int, warned: list[str]) -> None:
    """Tell that nobody refreshes the sketch."""
    warn_once(
        "age",
        f"the sketch of the curvature is {age} steps old, twice as old as refresh_every allows; "
        "call optimizer.refresh_if_due(loss) in every iteration",
        warned,
    )


def on_lost_source() -> None:
    """Tell that a copy has no source of curvature."""
    message = (
        "a copy or a pickle of SketchedLBFGS has no source of curvature, because that speaks of the model copied from; "
        "set optimizer.source, or it goes on as plain L-BFGS over its last sketch"
    )
    warn_once("source", message, [])


def on_failure(has_sketch: bool, warned: list[str]) -> None:
    """Tell that a refresh was in vain."""
    goes_on = "the last good sketch" if has_sketch else "first-order steps until a refresh succeeds"
    message = f"a refresh of the curvature came out non-finite and was discarded; training goes on with {goes_on}"
    warn_once("failure", message, warned)
