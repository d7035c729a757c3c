"""The step of a trust region: the smallest ‖A q + c‖ within a box, among steps of at most a given length."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from cao.fitting.box import Box, boxed_least_squares

# How far from the radius the length of a step may be, as in MINPACK.
SLACK = 0.1
ROUNDS = 60


@dataclass(frozen=True)
class Steps:
    """Steps q(λ) that minimise ‖A q + c‖² + λ‖q‖² within a box that contains zero; their length falls with λ."""

    matrix: Float[Tensor, "k n"]
    constant: Float[Tensor, " k"]
    box: Box

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return singular values, right vectors as columns, and coefficients of c along the left ones."""
        left, values, right = torch.linalg.svd(self.matrix, full_matrices=False)
        return values, right.T, left.T @ self.constant

    @property
    def _rounding(self) -> float:
        """The size of a singular value that is nothing but rounding."""
        return float(torch.finfo(self.matrix.dtype).eps * max(self.matrix.shape) * self._factors[0].max())

    def damped(self, damping: float, near: Tensor | None = None) -> Float[Tensor, " n"]:
        """Return q(λ); for λ = 0 the shortest one."""
        values, right, coefficients = self._factors
        squares = values.square() + damping
        inverse = torch.where((values > self._rounding) | (damping > 0), values / squares, 0.0).nan_to_num(0.0)
        q = -right @ (inverse * coefficients)
        if self.box.holds(q):
            return q
        # A damping of no more than rounding leaves one solution where A alone has many.
        root = max(damping**0.5, self._rounding, torch.finfo(q.dtype).tiny)
        below = root * torch.eye(len(q), dtype=q.dtype)
        padded = torch.cat([self.constant, torch.zeros_like(q)])
        matrix = torch.cat([self.matrix, below])
        return boxed_least_squares(matrix, padded, self.box, q if near is None else near)

    def within(self, radius: float, damping: float) -> tuple[Float[Tensor, " n"], float]:
        """Return the step of about this length, or the undamped one if it is no longer, and its λ; one is guessed."""
        q = self.damped(0.0)
        if q.norm() <= (1 + SLACK) * radius:
            return q, 0.0
        # Beyond this damping every step is shorter.
        least, most = 0.0, float((self.matrix.T @ self.constant).norm()) / radius
        seen: list[tuple[float, float]] = []
        damping = min(damping, most) or 1e-3 * most
        for _ in range(ROUNDS):
            q = self.damped(damping, q)
            length = float(q.norm())
            if abs(length - radius) <= SLACK * radius:
                break
            least, most = (damping, most) if length > radius else (least, damping)
            seen = [*seen[-1:], (damping, length)]
            damping = guess(seen, radius, least, most)
        return q, damping

    def decrease(self, q: Float[Tensor, " n"]) -> float:
        """Return ‖c‖² − ‖A q + c‖², without cancellation."""
        image = self.matrix @ q
        return float(-(2 * self.constant + image) @ image)

    @cached_property
    def hope(self) -> float:
        """What the whole step could bring, apart from directions that are all but undetermined."""
        values = self._factors[0]
        return self.decrease(self.damped(float(torch.finfo(values.dtype).eps * values.max().square())))


def guess(seen: list[tuple[float, float]], radius: float, least: float, most: float) -> float:
    """Return the next λ: a secant through the last two lengths on logarithmic scales, if it stays in the bracket."""
    if len(seen) == 2 and min(length for _, length in seen) > 0 and seen[0][1] != seen[1][1]:
        (first, longer), (second, shorter) = seen
        slope = math.log(first / second) / math.log(longer / shorter)
        # As a logarithm, since two lengths that are nearly equal lead far away.
        candidate = math.log(second) + slope * math.log(radius / shorter)
        if math.log(max(1.1 * least, 1e-4 * most)) < candidate < math.log(0.9 * most):
            return math.exp(candidate)
    return math.sqrt(least * most) if least > 0 else 0.01 * most
