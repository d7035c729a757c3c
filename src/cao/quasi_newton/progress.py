"""What SketchedLBFGS has done and seen, and why its last step ended."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Reason(StrEnum):
    """Why a step ended."""

    NOT_STARTED = "not started"
    MAX_ITER = "max_iter"
    MAX_EVAL = "max_eval"
    TOLERANCE_GRAD = "tolerance_grad"
    TOLERANCE_CHANGE = "tolerance_change"
    ROUNDING = "minimal to rounding"
    NO_DECREASE = "no step lowers the loss"
    NOT_FINITE = "the loss or its gradient is not finite"
    NOT_ONE_FUNCTION = "the loss is not the same at every call"

    @property
    def is_convergence(self) -> bool:
        """Whether nothing is left to do, by a tolerance or by rounding."""
        return self in (Reason.TOLERANCE_GRAD, Reason.TOLERANCE_CHANGE, Reason.ROUNDING)


@dataclass
class Progress:
    """What SketchedLBFGS has done and seen: plain numbers, which are saved as an entry of its parameter group."""

    price: float
    """What the next sketch is expected to cost, in evaluations."""
    reason: str = Reason.NOT_STARTED.value
    iterations: int = 0
    evaluations: int = 0
    refreshes: int = 0
    products: int = 0
    paid: float = 0.0
    """What all sketches have cost, in evaluations."""
    trace: list[list[float]] = field(default_factory=list)
    """Evaluations and losses since the last sketch."""
    finish: dict[str, Any] = field(default_factory=dict)
    """What is known of corrected Gauss-Newton steps."""
    landmarks: list[list[float]] = field(default_factory=list)
    """The cost so far, in evaluations, and the loss at each sketch."""
    last_refresh: int = 0
    """The iteration of the last sketch."""
    least_damping: float = math.inf
    """The smallest damping that was fitted since."""
    first: float = math.nan
    """The first loss."""
    last: float = math.nan
    """The loss where the last step ended."""
    decrease: float = 0.0
    """What the last iteration brought."""
    lowest: float = math.inf
    smallest: float = math.inf
    """The range of the gradient's largest entry since the lowest loss: from here …"""
    largest: float = 0.0
    """… to here."""
    quiet: int = 0
    """Iterations since then that left this range alone."""
    failures: int = 0
    """Searches that failed in a row."""
    stalled_at: float = math.nan
    """The loss where the first of them failed."""
    marks: list[list[float]] = field(default_factory=list)
    """Evaluations and losses, each at twice the evaluations of the one before."""
    hoped: float = math.inf
    """The decrease that it promised, per unit of the step."""
    contradiction: list[float] = field(default_factory=list)
    repeats: bool = False
    """Whether the closure was seen to return the same loss twice."""
    warned: list[str] = field(default_factory=list)
    residuals: int = 0
    """How many numbers the loss is the sum of the squares of, as far as the source knows."""
    trainable: list[int] | None = None
    shapes: list[list[int]] | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "Progress":
        """Return the progress whose fields are the entries of a dict, not copied: what is written is saved there."""
        progress = cls.__new__(cls)
        progress.__dict__ = saved
        return progress

    def start_anew(self) -> None:
        """Forget what was seen of a loss that has become another function."""
        self.trace, self.landmarks, self.marks, self.contradiction = [], [], [], []
        self.decrease, self.failures, self.last = 0.0, 0, math.nan


FLAT = 10.0
"""A sketch that improves the conditioning by less is of little use."""


class Status(NamedTuple):
    """What the optimizer has done since it was made, and why its last step ended."""

    reason: Reason
    converged: bool
    """Whether the last step ended because nothing is left to do, by a tolerance or by rounding."""
    iterations: int
    evaluations: int
    """Calls of the closure."""
    refreshes: int
    products: int
    """Columns multiplied by the curvature."""
    rank: int
    conditioning_removed: float
    """1 + the largest eigenvalue in the sketch over the damping: how much the sketch improves the conditioning."""
    memory: str
    """What is kept of steps and gradient changes: "pairs", or a "dense" matrix."""
    derivative: str
    """The kind of derivative that the source of curvature is made of, and why not a better one, if it says so."""
    phase: str
    """What the next step is expected to be made of: "L-BFGS", or "corrected Gauss-Newton"."""
    corrected_steps: int
    corrected_cost: float
    """What corrected Gauss-Newton steps have cost beside calls of the closure, in evaluations."""
    contradiction: tuple[float, ...]
    """Two losses that the closure returned at the same parameters, if it did."""
    stuck_at: float
    """The size of the residuals over that at the start, where they have stopped falling far from zero; else 0."""
    comparisons: tuple[tuple[int, float, float], ...]
    """Points in use, and mean squares there and at points held out, as often as a source of growing points compared."""

    @property
    def is_flat(self) -> bool:
        """Whether the sketch is of little use, though the end is not reached."""
        return self.refreshes > 0 and self.conditioning_removed < FLAT and not self.converged
