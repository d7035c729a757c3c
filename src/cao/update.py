"""One step of CAO on flat stretches of parameters: d = P g, its clipping, momentum, and the move."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cao.storage import Layout

# Large parameters are worked on in stretches of this many numbers, which stay in a core's cache between operations;
# smaller ones are joined until they are as many, which saves calls.
STRETCH = 1 << 17


@dataclass(frozen=True)
class Stretch:
    """A part of a large parameter, or several small ones that are neighbours in the sketch."""

    params: list[Tensor]
    buffers: list[Tensor]
    """Momentum buffers, shaped like the parameters; empty without momentum."""
    gradient: Float[Tensor, " n"]
    rows: Float[Tensor, "k n"] | None
    """The sketched eigenvectors' entries here; None where the sketch does not reach."""
    settings: Mapping[str, Any]
    rate: float
    """√(lr / largest lr): the group's entry in D^½."""

    def directed_gradient(self) -> Float[Tensor, " n"]:
        """Return the gradient with its sign and weight decay, in the precision of the sketch."""
        gradient = -self.gradient if self.settings["maximize"] else self.gradient
        decay = 0.0 if self.settings["decoupled_weight_decay"] else self.settings["weight_decay"]
        if decay != 0:
            gradient = gradient.add(flattened(self.params), alpha=decay)
        return gradient if self.rows is None else gradient.to(self.rows.dtype)

    def update(self, base: float, weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
        """Return this stretch of d = base·g + V·weights."""
        gradient = self.directed_gradient()
        if self.rows is None:
            return gradient if base == 1 else gradient * base
        return torch.addmv(gradient, self.rows.T, weights, beta=base, alpha=1 / self.rate)

    def move(self, update: Float[Tensor, " n"]) -> None:
        """Apply decoupled weight decay, momentum and the learning rate."""
        lr, momentum = float(self.settings["lr"]), self.settings["momentum"]
        updates = unflattened(update, self.params)
        if self.settings["decoupled_weight_decay"] and self.settings["weight_decay"] != 0:
            torch._foreach_mul_(self.params, 1 - lr * self.settings["weight_decay"])
        if momentum != 0:
            torch._foreach_mul_(self.buffers, momentum)
            torch._foreach_add_(self.buffers, updates)
            updates = self.buffers
        torch._foreach_add_(self.params, updates, alpha=-lr)


def take_step(stretches: Sequence[Stretch], base: float, gains: Sequence[float], max_update_norm: float | None) -> None:
    """Move every parameter by −lr times its (clipped, momentum-averaged) share of d = base·g + V diag(gains) Vᵀ g.

    With different rates the symmetric form d = D^-½ P D^½ g is taken, since diag(lr)·P need not descend.
    """
    weights = correction_weights(stretches, gains)
    clip = None if max_update_norm is None else clip_factor(stretches, base, weights, max_update_norm)
    for stretch in stretches:
        update = stretch.update(base, weights)
        stretch.move(update if clip is None else update * clip)


def correction_weights(stretches: Sequence[Stretch], gains: Sequence[float]) -> Float[Tensor, " k"]:
    """Return diag(gains) Vᵀ D^½ g, on the parameters' device."""
    reached = [(stretch, stretch.rows) for stretch in stretches if stretch.rows is not None]
    if not reached:
        return torch.zeros(len(gains))
    total = torch.zeros_like(reached[0][1][:, 0])
    for stretch, rows in reached:
        total.addmv_(rows, stretch.directed_gradient(), alpha=stretch.rate)
    return total * torch.tensor(gains, dtype=total.dtype).to(total.device, non_blocking=True)


def clip_factor(
    stretches: Sequence[Stretch], base: float, weights: Float[Tensor, " k"], max_update_norm: float
) -> Tensor:
    """Return min(1, c/‖d‖) without a round trip to the host; each stretch of d is made and dropped again.

    What stands still, with a rate of 0, does not count in the norm.
    """
    moving = [stretch for stretch in stretches if float(stretch.settings["lr"]) != 0]
    norms = [stretch.update(base, weights).norm() for stretch in moving]
    if not norms:
        return torch.ones(())
    return torch.clamp(max_update_norm / torch.stack(norms).norm(), max=1.0)


def stretches_of(
    group: Mapping[str, Any], rate: float, layout: Layout | None, buffer_of: Callable[[Tensor], Tensor]
) -> Iterator[Stretch]:
    """Cut and join a group's parameters that have a gradient into stretches."""
    places = {} if layout is None else layout.places

    def stretch(params: list[Tensor], gradient: Tensor, buffers: list[Tensor], start: int | None) -> Stretch:
        rows = None
        if layout is not None and start is not None:
            rows = layout.rows[:, start : start + gradient.numel()]
        return Stretch(params, buffers, gradient, rows, group, rate)

    for run in neighbours([p for p in group["params"] if p.grad is not None], places):
        gradients = [gradient_of(p) for p in run]
        buffers = [buffer_of(p) for p in run] if group["momentum"] != 0 else []
        start = places.get(run[0])
        if len(run) > 1 or not all(tensor.is_contiguous() for tensor in (*run, *gradients, *buffers)):
            yield stretch(run, flattened(gradients), buffers, start)
            continue
        pieces = [tensor.view(-1).split(STRETCH) for tensor in (*run, *gradients, *buffers)]
        for index, (param, gradient, *buffer) in enumerate(zip(*pieces, strict=True)):
            yield stretch([param], gradient, buffer, None if start is None else start + index * STRETCH)


def neighbours(params: Iterable[Tensor], places: Mapping[Tensor, int]) -> Iterator[list[Tensor]]:
    """Join small parameters that follow each other in the sketch, or are all outside it, up to a stretch."""
    run: list[Tensor] = []
    size, end = 0, None
    for param in params:
        start, count = places.get(param), param.numel()
        if run and (start != end or size + count > STRETCH):
            yield run
            run, size = [], 0
        run.append(param)
        size, end = size + count, None if start is None else start + count
    if run:
        yield run


def gradient_of(param: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert param.grad is not None
    return param.grad


def flattened(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Return the tensors as one vector, a view where that is possible."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflattened(vector: Float[Tensor, " n"], like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors of given shapes."""
    if len(like) == 1:
        return [vector.view(like[0].shape)]
    pieces = vector.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
