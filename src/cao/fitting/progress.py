"""What a fit tells while it runs, and why it ended."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Ending(StrEnum):
    """Why a fit ended."""

    GTOL = "gtol: the gradient is as good as zero"
    FTOL = "ftol: the loss falls no more"
    XTOL = "xtol: the parameters move no more"
    ROUNDING = "only rounding is left to minimise"
    MAX_EVALUATIONS = "max_evaluations are spent"
    STOPPED = "stopped by the callback"
    NO_DECREASE = "no step lowers the loss, though its gradient promises it"
    NOT_FINITE = "the loss or its gradient is not finite"
    NOT_ONE_FUNCTION = "the loss is not the same at every call"

    @property
    def is_convergence(self) -> bool:
        """Whether nothing is left to do."""
        return self in (Ending.GTOL, Ending.FTOL, Ending.XTOL, Ending.ROUNDING)


@dataclass(frozen=True)
class State:
    """Where a fit stands after an iteration; the parameters themselves hold the new values."""

    iteration: int
    evaluations: int
    jacobians: int
    """How many Jacobians were computed; 0 where sketches take their place."""
    loss: float
    gradient_norm: float
    """The largest entry of the gradient where the iteration began, without those that a bound holds."""
    step: float
    """The length of the step."""
    seconds: float
    refreshes: int = 0
    """Sketches of the curvature so far, for many parameters."""

    def __str__(self) -> str:
        """Return a line of a log."""
        return (
            f"{self.iteration:6} iterations {self.evaluations:6} evaluations  loss {self.loss:<12.6g} "
            f"gradient {self.gradient_norm:<9.3g} step {self.step:<9.3g} {self.seconds:.1f} s"
        )


Callback: TypeAlias = Callable[[State], object]


class Observer:
    """Keeps the history, shows it if asked, and lets the callback stop the fit."""

    def __init__(self, callback: Callback | None, is_verbose: bool) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be a function of the state, got {type(callback).__name__}")
        self.callback, self.is_verbose = callback, is_verbose
        self.history: list[State] = []

    def is_stopped_by(self, state: State) -> bool:
        """Note an iteration, and return whether it is to be the last one."""
        is_shown = state.jacobians or not self.history or state.refreshes > self.history[-1].refreshes
        self.history.append(state)
        if self.is_verbose and is_shown:
            sys.stdout.write(f"{state}\n")
            sys.stdout.flush()
        try:
            return self.callback is not None and self.callback(state) is True
        except StopIteration:
            return True


@dataclass(frozen=True)
class Tolerances:
    """When nothing is left to do, and how many evaluations may be spent; 0 stands for rounding."""

    ftol: float
    xtol: float
    gtol: float
    evaluations: int

    def __post_init__(self) -> None:
        """Refuse what is no tolerance."""
        for name in ("ftol", "xtol", "gtol"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}")
        if not (isinstance(self.evaluations, int) and self.evaluations > 0):
            raise ValueError(f"max_evaluations must be a positive whole number, got {self.evaluations!r}")
