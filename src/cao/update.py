"""One step of CAO on a list of tensors: d = P g, its clipping, momentum, and the move."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Move:
    """A parameter that moves in this step, and what moves it."""

    param: Tensor
    gradient: Tensor
    vectors: Sequence[Tensor]
    """The parameter's share of each sketched eigenvector; empty where the sketch does not reach."""
    lr: float
    momentum: float
    shrinkage: float
    """lr · weight decay where that is decoupled."""
    rate: float
    """√(lr / largest lr): the group's entry in D^½."""
    state: dict[str, Any]


def take_step(moves: Sequence[Move], base: float, gains: Sequence[float], max_update_norm: float | None) -> None:
    """Move every parameter by −lr times its (momentum-averaged, clipped) share of d = base·g + V diag(gains) Vᵀ g.

    With different rates the symmetric form d = D^-½ P D^½ g is taken, since diag(lr)·P need not descend.
    """
    weights = [along * gain for along, gain in zip(projections(moves, len(gains)), gains, strict=True)]
    clip = None if max_update_norm is None else clip_factor(moves, base, weights, max_update_norm)
    if clip is not None:
        weights = [weight * clip for weight in weights]
    scaled_base = base if clip is None else base * clip
    for move in moves:
        move_parameter(move, scaled_base, weights)


def projections(moves: Sequence[Move], count: int) -> list[Tensor]:
    """Return ⟨vᵢ, D^½ g⟩ for each sketched vector, as scalars on the parameters' device."""
    reached = [move for move in moves if move.vectors]
    if not reached:
        return [torch.zeros(()) for _ in range(count)]
    return [torch.stack([_projection(move, index) for move in reached]).sum() for index in range(count)]


def _projection(move: Move, index: int) -> Tensor:
    vector = move.vectors[index]
    return torch.dot(vector.reshape(-1), move.gradient.reshape(-1).to(vector.dtype)) * move.rate


def clip_factor(moves: Sequence[Move], base: float, weights: Sequence[Tensor], max_update_norm: float) -> Tensor:
    """Return min(1, c/‖d‖) without a round trip to the host; each tensor's share of d is made and dropped again."""
    norms = [update_of(move, base, weights).norm() for move in moves]
    return torch.clamp(max_update_norm / torch.stack(norms).norm(), max=1.0)


def update_of(move: Move, base: float | Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return a parameter's share of d, in the precision of the sketch."""
    if not move.vectors:
        return move.gradient * base
    update = move.gradient.to(move.vectors[0].dtype) * base
    for vector, weight in zip(move.vectors, weights, strict=True):
        update.addcmul_(vector, weight, value=1 / move.rate)
    return update


def add_update(target: Tensor, move: Move, base: float | Tensor, weights: Sequence[Tensor], factor: float) -> None:
    """Add factor · d to the target, without a temporary unless the precisions differ."""
    if move.vectors and move.vectors[0].dtype != target.dtype:
        target.add_(update_of(move, base, weights), alpha=factor)
        return
    if isinstance(base, Tensor):
        target.addcmul_(move.gradient, base, value=factor)
    else:
        target.add_(move.gradient, alpha=factor * base)
    for vector, weight in zip(move.vectors, weights, strict=bool(move.vectors)):
        target.addcmul_(vector, weight, value=factor / move.rate)


def move_parameter(move: Move, base: float | Tensor, weights: Sequence[Tensor]) -> None:
    """Apply decoupled weight decay and momentum, if any, and the learning rate."""
    if move.shrinkage != 0:
        move.param.mul_(1 - move.shrinkage)
    if move.momentum == 0:
        add_update(move.param, move, base, weights, -move.lr)
        return
    buffer = move.state.get("momentum_buffer")
    if buffer is None:
        buffer = move.state["momentum_buffer"] = update_of(move, base, weights).to(move.param.dtype, copy=True)
    else:
        buffer.mul_(move.momentum)
        add_update(buffer, move, base, weights, 1.0)
    move.param.add_(buffer, alpha=-move.lr)
