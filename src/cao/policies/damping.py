"""How much damping: rules as values."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cao.eigensolvers import Lanczos
from cao.linalg import ROWS, Eigenpairs, generator_for, random_columns, total
from cao.operators import Deflated, SymmetricOperator
from cao.preconditioner import NegativeCurvature, Scaling


@runtime_checkable
class Damping(Protocol):
    """How η is chosen: a number measured at each refresh, and what becomes of it at each step."""

    is_on_trial: ClassVar[bool]
    """Whether each step is judged by the next gradient, and taken back where it overshot."""
    scaling: ClassVar[Scaling]
    """What the rule is made for, where the user does not say otherwise."""
    negative_curvature: ClassVar[NegativeCurvature]
    """The same for directions of negative curvature."""

    def need(self, pace: "Pace") -> float:
        """Return the smallest curvature that is worth capturing."""
        ...

    def at_refresh(
        self, pairs: Eigenpairs, kept: int, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float | None, int]:
        """Return what was measured for a new sketch, None if nothing could be, and the products it has cost.

        Of the pairs found, the first are kept.
        """
        ...

    def at_step(self, measured: float | None, pace: "Pace", caution: float) -> float:
        """Return η for a step; caution is what the trial of the last step asks for, 0 without trials."""
        ...

    def brake(self, damping: float, pace: "Pace") -> float:
        """Return the factor by which the whole step is shortened, 1 if it is not."""
        ...


@dataclass(frozen=True)
class Pace:
    """How fast a step is, and how much its curvature varies."""

    rate: float
    """The rate of a plain step of heavy-ball momentum: lr, or lr(1 − β₁) in Adam's metric."""
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

    is_on_trial: ClassVar[bool] = False
    scaling: ClassVar[Scaling] = "inverse-damping"
    negative_curvature: ClassVar[NegativeCurvature] = "magnitude"

    value: float

    def need(self, pace: Pace) -> float:
        """Return η: directions below it move as the complement does."""
        return self.value

    def at_refresh(
        self, pairs: Eigenpairs, kept: int, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float, int]:
        """Measure nothing."""
        return self.value, 0

    def at_step(self, measured: float | None, pace: Pace, caution: float) -> float:
        """Return the chosen value."""
        return self.value

    def brake(self, damping: float, pace: Pace) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class AtTheEdge:
    """Damping at the edge of stability: a step of SGD wherever that is stable, and no faster elsewhere.

    The step is (B + ηI)⁻¹ g with η = 1/lr: a captured direction moves at lr/(1 + lr·λ), which is stable for every λ,
    and all others move at lr. If the curvature outside the sketch is too sharp for that, η is larger, so that it uses
    `safety` of what the edge of stability allows. The rule follows every schedule of lr.
    """

    is_on_trial: ClassVar[bool] = False
    scaling: ClassVar[Scaling] = "unit"
    negative_curvature: ClassVar[NegativeCurvature] = "clip"

    safety: float = 0.5
    """The share of the edge that a direction outside the sketch may use."""

    def need(self, pace: Pace) -> float:
        """Return 1/lr, above which a plain step overshoots."""
        return 1 / pace.rate if pace.rate > 0 else math.inf

    def at_refresh(
        self, pairs: Eigenpairs, kept: int, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float, int]:
        """Return the curvature that is to be expected outside the sketch, weight decay included."""
        following = min(kept, len(pairs.values) - 1)
        has_all = kept == ROWS.get().count(pairs.vectors)
        # A Ritz value may fall short of the eigenvalue it stands for by its residual.
        outside = 0.0 if has_all else float(pairs.values[following].abs() + pairs.residuals[following])
        # 1/(λ + η) is formed as 1/η less a correction: what rounding leaves of λ₁ is outside the sketch too.
        rounding = 8 * torch.finfo(pairs.vectors.dtype).eps * float(pairs.values.abs().max())
        return max(outside, rounding) + weight_decay, 0

    def at_step(self, measured: float | None, pace: Pace, caution: float) -> float:
        """Return 1/lr, or what keeps the curvature outside the sketch below the edge."""
        return max(self.need(pace), (measured or 0.0) / (self.safety * pace.edge))

    def brake(self, damping: float, pace: Pace) -> float:
        """Return the rate 1/η over the rate that was asked for."""
        # At a rate of zero, or one so small that its inverse overflows, both are infinite.
        return self.need(pace) / damping if math.isfinite(damping) else 1.0


@dataclass(frozen=True)
class FromSpectrum:
    """Damping at the curvature that the sketch leaves out, for full-batch problems at lr=1.

    η is the largest of the smallest captured |λ|, the norm ‖R‖ of all residuals, and the curvature found outside the
    sketch by a few more products; weight decay, which adds to the curvature everywhere, comes on top. So, converged or
    not, P leaves a curvature below 2 in every direction: R couples the sketch to its complement, and with η ≥ ‖R‖ and
    η ≥ ‖C‖, where C is the complement's curvature, ‖P^½HP^½‖ ≤ 1 + ‖R‖/√(η(λ+η)) < 2.

    That is true of the curvature at the refresh. Because it changes, in any network, every step is checked
    (`cao.trial`): one that overshot is taken back, and η is raised until steps succeed again.
    """

    is_on_trial: ClassVar[bool] = True
    scaling: ClassVar[Scaling] = "inverse-damping"
    negative_curvature: ClassVar[NegativeCurvature] = "magnitude"

    products: int = 4
    """Lanczos steps that look for curvature outside the sketch."""

    def need(self, pace: Pace) -> float:
        """Return 0: each captured direction makes all others faster."""
        return 0.0

    def at_refresh(
        self, pairs: Eigenpairs, kept: int, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float | None, int]:
        """Return η from the pairs and, if there is an operator to multiply by, from its complement."""
        outside, products = (0.0, 0) if operator is None else self._outside(pairs.vectors, operator)
        magnitudes = pairs.values.abs()
        # Below √ε·λ₁ a step would amplify the rounding of the gradient in flat directions to the size of a step.
        rounding = torch.finfo(magnitudes.dtype).eps ** 0.5 * float(magnitudes.max())
        measured = max(float(magnitudes.min()), float(pairs.residuals.norm()), outside, rounding)
        return (measured + weight_decay) or None, products

    def at_step(self, measured: float | None, pace: Pace, caution: float) -> float:
        """Return what was measured, or more where the last steps call for caution."""
        return max(1.0 if measured is None else measured, caution)

    def brake(self, damping: float, pace: Pace) -> float:
        """Return 1."""
        return 1.0

    def _outside(self, vectors: Float[Tensor, "n k"], operator: SymmetricOperator) -> tuple[float, int]:
        size, rank = ROWS.get().count(vectors), vectors.shape[1]
        if size == rank:
            return 0.0, 0
        start = random_columns(size, 1, generator_for(vectors.device, size, rank), vectors.dtype)
        start -= vectors @ total(vectors.T @ start)
        solve = Lanczos(min(self.products, size - rank) - 1)
        found = solve(Deflated(operator, vectors), start, overwrite_start=True)
        # A Ritz value may fall short of the eigenvalue it stands for by its residual.
        return float(found.values.abs()[0] + found.residuals[0]), found.products


DampingName: TypeAlias = Literal["edge", "auto"]
DAMPINGS: dict[str, Damping] = {"edge": AtTheEdge(), "auto": FromSpectrum()}
"""The words that stand for rules."""
