"""How much damping: rules as values."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from cao.linalg.columns import Eigenpairs
from cao.sketch.damped import NegativeCurvature, Scaling


@runtime_checkable
class Damping(Protocol):
    """How η is chosen: what is measured at each refresh, and what becomes of it at each step.

    A rule is a frozen value. What it has measured is a state of its own: None at first, then what `at_refresh` returned
    last. It is saved with the optimizer, so it is to be made of numbers, strings, lists and dicts.
    """

    scaling: ClassVar[Scaling]
    """What the rule is made for, where the user does not say otherwise."""
    negative_curvature: ClassVar[NegativeCurvature]
    """The same for directions of negative curvature."""

    def need(self, pace: "Pace") -> float:
        """Return the smallest curvature that is worth capturing."""
        ...

    def at_refresh(self, state: Any, pairs: Eigenpairs, kept: int, size: int, weight_decay: float) -> Any:
        """Return the state after a refresh: what is to be known of a new sketch over so many parameters.

        Of the pairs found, the sharpest first, so many are kept.
        """
        ...

    def at_step(self, state: Any, pace: "Pace") -> tuple[float, float]:
        """Return η for a step, and the factor by which the whole step is shortened, 1 if it is not."""
        ...


@dataclass(frozen=True)
class Pace:
    """How fast a step is, and how much its curvature varies."""

    rate: float
    """The rate of a plain step of heavy-ball momentum."""
    momentum: float = 0.0
    nesterov: bool = False
    spread: float = 0.0
    """Relative variance of the curvature from batch to batch."""

    @property
    def edge(self) -> float:
        """The edge of stability: the largest stable rate · λ of a direction outside the sketch (docs/theory.md)."""
        beta = self.momentum
        if self.nesterov:
            return 2 * (1 + beta) / (1 + 2 * beta)
        return 2 * (1 + beta) / (1 + self.spread * (1 + beta) / (1 - beta))


@dataclass(frozen=True)
class Fixed:
    """A damping that the user has chosen."""

    scaling: ClassVar[Scaling] = "inverse-damping"
    negative_curvature: ClassVar[NegativeCurvature] = "magnitude"

    value: float

    def need(self, pace: Pace) -> float:
        """Return η: directions below it move as the complement does."""
        return self.value

    def at_refresh(self, state: Any, pairs: Eigenpairs, kept: int, size: int, weight_decay: float) -> None:
        """Measure nothing."""

    def at_step(self, state: Any, pace: Pace) -> tuple[float, float]:
        """Return the chosen value, and no brake."""
        return self.value, 1.0


@dataclass(frozen=True)
class AtTheEdge:
    """Damping at the edge of stability: a step of SGD wherever that is stable, and no faster elsewhere.

    The step is (B + ηI)⁻¹ g with η = 1/lr: a captured direction moves at lr/(1 + lr·λ), which is stable for every λ,
    and all others move at lr. If the curvature outside the sketch is too sharp for that, η is larger, so that it uses
    `safety` of what the edge of stability allows. The rule follows every schedule of lr.
    """

    scaling: ClassVar[Scaling] = "unit"
    negative_curvature: ClassVar[NegativeCurvature] = "clip"

    safety: float = 0.5
    """The share of the edge that a direction outside the sketch may use."""

    def need(self, pace: Pace) -> float:
        """Return 1/lr, above which a plain step overshoots."""
        return 1 / pace.rate if pace.rate > 0 else math.inf

    def at_refresh(self, state: Any, pairs: Eigenpairs, kept: int, size: int, weight_decay: float) -> float:
        """Return the curvature that is to be expected outside the sketch, weight decay included."""
        following = kept if kept < len(pairs.values) else int(pairs.values.abs().argmin())
        has_all = kept == size
        # A Ritz value may fall short of the eigenvalue it stands for by its residual. Negative curvature is SGD's.
        outside = 0.0 if has_all else max(float(pairs.values[following] + pairs.residuals[following]), 0.0)
        # 1/(λ + η) is formed as 1/η less a correction: what rounding leaves of λ₁ is outside the sketch too.
        rounding = 8 * torch.finfo(pairs.vectors.dtype).eps * float(pairs.values.abs().max())
        return max(outside, rounding) + weight_decay

    def at_step(self, state: Any, pace: Pace) -> tuple[float, float]:
        """Return 1/lr, or what keeps the curvature outside the sketch below the edge, and 1/η over lr as the brake."""
        # Nothing is known of the outside before a refresh, or from the state of another rule.
        need, outside = self.need(pace), state if isinstance(state, float) else 0.0
        damping = max(need, outside / (self.safety * pace.edge))
        # At a rate of zero, or one so small that its inverse overflows, both are infinite.
        return damping, need / damping if math.isfinite(damping) else 1.0


DampingName: TypeAlias = Literal["auto"]
DAMPINGS: dict[str, Damping] = {"auto": AtTheEdge()}
"""The words that stand for rules."""
