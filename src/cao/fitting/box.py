"""Linear least squares within a box, by an active set."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Box(NamedTuple):
    """A lower and an upper bound for each number, infinite where there is none."""

    low: Float[Tensor, " n"]
    high: Float[Tensor, " n"]

    def holds(self, q: Float[Tensor, " n"]) -> bool:
        """Whether a position is inside."""
        return bool(((q >= self.low) & (q <= self.high)).all())

    def held(
        self, q: Float[Tensor, " n"], slope: Float[Tensor, " n"], rounding: Float[Tensor, " n"] | float = 0.0
    ) -> Bool[Tensor, " n"]:
        """Say which entries are at a side of the box where a function with this slope does not fall inside."""
        return ((q <= self.low) & (slope >= -rounding)) | ((q >= self.high) & (slope <= rounding))


def boxed_least_squares(
    matrix: Float[Tensor, "m n"], constant: Float[Tensor, " m"], box: Box, start: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the q of smallest ‖A q + c‖ in the box, for A of full column rank.

    The entries that are free are solved for at once. Those that would leave the box are stopped at its side, and one
    that is held there although the sum falls inside is let go. Each round lowers the sum or adds to what is held.
    """
    q = start.clamp(box.low, box.high)
    rounding = 1e-14 * matrix.norm(dim=0) * constant.norm()
    free = ~box.held(q, matrix.T @ (matrix @ q + constant), rounding)
    for _ in range(10 * (len(q) + 1)):
        q, hit = towards_free_minimum(matrix, constant, q, free, box)
        free &= ~hit
        if hit.any():
            continue
        slope = matrix.T @ (matrix @ q + constant)
        pull = torch.where(free | box.held(q, slope, rounding), 0.0, slope.abs())
        if not pull.any():
            break
        free[pull.argmax()] = True
    return q


def towards_free_minimum(
    matrix: Float[Tensor, "m n"],
    constant: Float[Tensor, " m"],
    q: Float[Tensor, " n"],
    free: Bool[Tensor, " n"],
    box: Box,
) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
    """Go to the minimum over the free entries, or as far as the box allows; say which have come to its side."""
    if not free.any():
        return q, torch.zeros_like(free)
    held = torch.where(free, 0.0, q)
    target = held.clone()
    target[free] = torch.linalg.lstsq(matrix[:, free], -(matrix @ held + constant)).solution
    move = target - q
    side = torch.where(move > 0, box.high, box.low)
    room = torch.where(move == 0, torch.inf, (side - q) / move)
    share = room.min()
    if share >= 1:
        return target, torch.zeros_like(free)
    hit = free & (room <= share)
    return torch.where(hit, side, q + share * move), hit
