"""Gauss-Newton steps that are long, and corrected with the factors they were made from before they are judged.

The loss is a narrow, curved valley. A step long enough to matter leaves its floor: the loss at its end may be 1e4 times
that at its start, and nearly all of that lies along large singular values, for which the factors are still good. Judged
there the step would be refused, and the radius would shrink until the method crawls. Corrected there, at one evaluation
of the residuals and no derivative each, it ends below the start, and lengths ten times as long are taken.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from sys import float_info
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Share of the predicted decrease that a step must bring. Low, because length is worth more than decrease: what remains
# after a long step is a new, easy residual, and what remains after short ones is the hard part.
TARGET = 0.15
# Between one radius and the next; 1.3 and 1.6 were level.
GROWTH = 1.4
# Radii per step at most, which bounds the price of a bad start; two or three are usual.
TRIALS = 8
# Corrections per radius at most; three to five are used in the end, and 16 were no better.
CORRECTIONS = 8
# A correction that leaves more than this share of the loss was the last one.
ENOUGH = 0.8
# The damping of corrections, over the largest eigenvalue. 1e-8 and below raise the loss, because the factors are those
# of another point; 1e-4 to 1e-7 were alike.
CORRECTOR = 1e-6
# It is raised by this, once, if a correction does not lower the loss.
CAUTION = 100.0
# A step that multiplies the loss by more than this is not corrected: the factors say nothing there.
BLOWN = 1e6
# The smallest damping, over the largest eigenvalue, that JᵀJ resolves: its eigenvalues have errors of about 1e-15.
GRAM_FLOOR = 1e-14
# The same for squares of singular values of J, which have errors of about 1e-16.
SVD_FLOOR = 1e-30

Residuals = Callable[[Tensor], Tensor]
"""The residuals at a flat position, in the order of the Jacobian's rows."""


@dataclass(frozen=True)
class Factors:
    """JᵀJ = V diag(squares) Vᵀ, with Vᵀ in rows; what is below the floor is rounding."""

    squares: Float[Tensor, " k"]
    rows: Float[Tensor, "k n"]
    floor: float

    @classmethod
    def of(cls, jacobian: Float[Tensor, "m n"], *, exact: bool = False) -> "Factors":
        """Decompose JᵀJ, or JJᵀ if that is smaller; or J itself, exactly and for more than twice as much."""
        is_tall = len(jacobian) > jacobian.shape[1]
        if exact:
            triangle = torch.linalg.qr(jacobian, "r").R if is_tall else jacobian
            _, singular, rows = torch.linalg.svd(triangle, full_matrices=False)
            return cls(singular.square(), rows, max(SVD_FLOOR * float(singular[0]) ** 2, float_info.min))
        squares, vectors = torch.linalg.eigh(jacobian.T @ jacobian if is_tall else jacobian @ jacobian.T)
        floor = max(GRAM_FLOOR * float(squares[-1]), float_info.min)
        if is_tall:
            return cls(squares.clamp_min(0), vectors.T.contiguous(), floor)
        resolved = squares > floor
        squares, vectors = squares[resolved], vectors[:, resolved]
        return cls(squares, vectors.T @ jacobian / squares.sqrt()[:, None], floor)

    @property
    def largest(self) -> float:
        """The largest eigenvalue."""
        return float(self.squares.max())

    def damping(self, slope: Float[Tensor, " k"], radius: float) -> float:
        """Return the damping at which the step is so long, or the floor if that is not long enough.

        The length falls as the damping grows, and the interval is divided by its logarithm.
        """
        slope, squares = torch.stack([slope, self.squares]).cpu()  # One read from the device instead of eleven.
        low, high = math.log(self.floor), math.log(float(slope.norm()) / radius + self.floor)
        for _ in range(5):
            logs = torch.linspace(low, high, 101, dtype=slope.dtype)
            lengths = (slope / (squares + logs.exp()[:, None])).norm(dim=1)
            place = min(int((lengths > radius).sum()), 100)  # Rounding may leave even the last one too long.
            if place == 0:
                return self.floor
            low, high = logs[place - 1 : place + 1].tolist()
        return math.exp(high)


class Place(NamedTuple):
    """A position, the residuals and the sum of their squares."""

    position: Float[Tensor, " n"]
    residuals: Float[Tensor, " m"]
    loss: float


class Trial(NamedTuple):
    """Where a step of some length leads, once corrected, and which share of the predicted decrease that brings."""

    radius: float
    damping: float
    end: Place
    ratio: float


class LocalModel:
    """What is known at a position: the Jacobian, its factors, and the gradient in their basis."""

    def __init__(
        self, residuals: Residuals, start: Place, jacobian: Float[Tensor, "m n"], *, exact: bool = False
    ) -> None:
        self._residuals, self.start, self.jacobian = residuals, start, jacobian
        self.factors = Factors.of(jacobian, exact=exact)
        self.slope = self._slope(start)
        self.evaluations = 0
        """Calls of the residuals."""

    def longest(self, radius: float) -> Trial:
        """Return the longest step that brings its share, looked for from this radius, or one that falls short of it.

        A longer step goes on from where the shorter one was corrected to.
        """
        found, tried = self.attempt(radius), 1
        if found.ratio >= TARGET:
            while tried < TRIALS and found.damping > self.factors.floor:
                longer, tried = self.attempt(found.radius * GROWTH, found), tried + 1
                if not longer.ratio >= TARGET:
                    break
                found = longer
        while not found.ratio >= TARGET and tried < TRIALS:
            found, tried = self.attempt(found.radius / GROWTH ** (1 if tried < 3 else 3)), tried + 1
        return found

    def attempt(self, radius: float, shorter: Trial | None = None) -> Trial:
        """Step so far, on from the end of a shorter step if there is one, and correct."""
        damping = self.factors.damping(self.slope, radius)
        position = self.start.position + self.step(damping)
        if shorter:
            position = shorter.end.position + self.step(damping) - self.step(shorter.damping)
        end = self._at(position)
        if end.loss < BLOWN * self.start.loss:
            end = self._corrected(end, max(CORRECTOR * self.factors.largest, damping))
        predicted = self.decrease(damping)
        is_sound = math.isfinite(end.loss) and predicted > 0
        return Trial(radius, damping, end, (self.start.loss - end.loss) / predicted if is_sound else -math.inf)

    def step(self, damping: float) -> Float[Tensor, " n"]:
        """Return −(JᵀJ + λI)⁻¹Jᵀr."""
        return self._solved(self.slope, damping)

    def decrease(self, damping: float) -> float:
        """Return the decrease of |r + Jp|² that this step brings."""
        squares = self.factors.squares
        return float((self.slope.square() * (squares + 2 * damping) / (squares + damping).square()).sum())

    def _corrected(self, end: Place, damping: float) -> Place:
        """Return where chord steps lead: these factors, with the residuals of where the last one ended."""
        is_cautious = False
        for _ in range(CORRECTIONS):
            there = self._at(end.position + self._solved(self._slope(end), damping))
            if there.loss < end.loss:
                is_last, end = there.loss > ENOUGH * end.loss, there
            else:
                is_last, is_cautious, damping = is_cautious, True, CAUTION * damping
            if is_last:
                break
        return end

    def _slope(self, place: Place) -> Float[Tensor, " k"]:
        return self.factors.rows @ (self.jacobian.T @ place.residuals)

    def _solved(self, slope: Float[Tensor, " k"], damping: float) -> Float[Tensor, " n"]:
        return -(slope / (self.factors.squares + damping)) @ self.factors.rows

    def _at(self, position: Float[Tensor, " n"]) -> Place:
        self.evaluations += 1
        return place_at(self._residuals, position)


def place_at(residuals: Residuals, position: Float[Tensor, " n"]) -> Place:
    """Evaluate the residuals at a position."""
    values = residuals(position)
    return Place(position, values, float(values @ values))
