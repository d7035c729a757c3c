"""One step of CAO on flat stretches of parameters: d = P g, its clipping, momentum, and the move."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cao.storage import SMALL, Layout, storage_order

# Large parameters are worked on in stretches of this many numbers, which stay in the cache between operations.
STRETCH = 1 << 20


@dataclass(frozen=True)
class Stretch:
    """A part of a large parameter, or several small ones that are neighbours in the sketch."""

    params: list[Tensor]
    buffers: list[Tensor]
    """Momentum buffers, shaped like the parameters; empty without momentum."""
    gradient: Float[Tensor, " n"]
    rows: Sequence[Float[Tensor, " n"]]
    """The sketched eigenvectors' entries here; none where the sketch does not reach."""
    settings: Mapping[str, Any]
    rate: float
    """√(lr / largest lr): the group's entry in D^½."""

    def directed_gradient(self) -> Float[Tensor, " n"]:
        """Return the gradient with its sign and weight decay, in the precision of the sketch."""
        gradient = -self.gradient if self.settings["maximize"] else self.gradient
        decay = 0.0 if self.settings["decoupled_weight_decay"] else self.settings["weight_decay"]
        if decay != 0:
            gradient = gradient.add(flattened(self.params), alpha=decay)
        is_precise = not self.rows or gradient.dtype == self.rows[0].dtype
        return gradient if is_precise else gradient.to(self.rows[0].dtype)

    def add_update(self, target: Tensor, factor: float, base: float, weights: Sequence[Tensor]) -> None:
        """Add factor · d to a target, where d = base·g + V·weights."""
        target.add_(self.directed_gradient(), alpha=factor * base)
        self._add_corrections(target, factor, weights)

    def update(self, base: float, weights: Sequence[Tensor]) -> Float[Tensor, " n"]:
        """Return this stretch of d, as a new vector."""
        update = self.directed_gradient() * base
        self._add_corrections(update, 1.0, weights)
        return update

    def _add_corrections(self, target: Tensor, factor: float, weights: Sequence[Tensor]) -> None:
        # Outside the sketch there are weights, but no rows.
        for row, weight in zip(self.rows, weights, strict=False):
            target.addcmul_(row, weight, value=factor / self.rate)

    def move(self, base: float, weights: Sequence[Tensor], clip: Tensor | None) -> None:
        """Apply decoupled weight decay, momentum and the learning rate."""
        lr, momentum = float(self.settings["lr"]), self.settings["momentum"]
        if self.settings["decoupled_weight_decay"] and self.settings["weight_decay"] != 0:
            torch._foreach_mul_(self.params, 1 - lr * self.settings["weight_decay"])
        if momentum != 0:
            torch._foreach_mul_(self.buffers, momentum)
        targets, factor = (self.params, -lr) if momentum == 0 else (self.buffers, 1.0)
        if clip is None and self._is_direct(targets):
            self.add_update(targets[0], factor, base, weights)
        else:
            update = self.update(base, weights)
            updates = unflattened(update if clip is None else update * clip, self.params)
            torch._foreach_add_(targets, updates, alpha=factor)
        if momentum != 0:
            torch._foreach_add_(self.params, self.buffers, alpha=-lr)

    def _is_direct(self, targets: Sequence[Tensor]) -> bool:
        """Whether the update can be added term by term, without a vector of its own."""
        is_precise = not self.rows or self.rows[0].dtype == targets[0].dtype
        return len(targets) == 1 and targets[0].ndim == 1 and is_precise


def take_step(stretches: Sequence[Stretch], base: float, gains: Sequence[float], max_update_norm: float | None) -> None:
    """Move every parameter by −lr times its (clipped, momentum-averaged) share of d = base·g + V diag(gains) Vᵀ g.

    With different rates the symmetric form d = D^-½ P D^½ g is taken, since diag(lr)·P need not descend.
    """
    weights = correction_weights(stretches, gains)
    clip = None if max_update_norm is None else clip_factor(stretches, base, weights, max_update_norm)
    # Backwards, because what was multiplied last is still in the cache.
    for stretch in reversed(stretches):
        stretch.move(base, weights, clip)


def correction_weights(stretches: Sequence[Stretch], gains: Sequence[float]) -> list[Tensor]:
    """Return diag(gains) Vᵀ D^½ g, as scalars on the parameters' device."""
    totals: list[list[Tensor]] = [[] for _ in gains]
    for stretch in stretches:
        if stretch.rows:
            gradient = stretch.directed_gradient()
            for row, parts in zip(stretch.rows, totals, strict=True):
                product = torch.dot(row, gradient)
                parts.append(product if stretch.rate == 1 else product * stretch.rate)
    return [torch.stack(parts).sum() * gain for parts, gain in zip(totals, gains, strict=True) if parts]


def clip_factor(stretches: Sequence[Stretch], base: float, weights: Sequence[Tensor], max_update_norm: float) -> Tensor:
    """Return min(1, c/‖d‖) without a round trip to the host; each stretch of d is made and dropped again.

    With different rates a stretch counts by its own over the largest: it is the move that is clipped. D^-½ alone would
    let a group that hardly moves stop all others.
    """
    rates = [float(stretch.settings["lr"]) for stretch in stretches]
    moving = [(stretch, rate / max(rates)) for stretch, rate in zip(stretches, rates, strict=True) if rate != 0]
    norms = [stretch.update(base, weights).norm() * share for stretch, share in moving]
    if not norms:
        return torch.ones(())
    return torch.clamp(max_update_norm / torch.stack(norms).norm(), max=1.0)


def stretches_of(
    group: Mapping[str, Any], rate: float, layout: Layout | None, buffer_of: Callable[[Tensor], Tensor]
) -> Iterator[Stretch]:
    """Cut and join a group's parameters that have a gradient into stretches."""
    places = {} if layout is None else layout.places

    def stretch(params: list[Tensor], gradient: Tensor, buffers: list[Tensor], start: int | None) -> Stretch:
        rows: Sequence[Tensor] = ()
        if layout is not None and start is not None:
            rows = layout.rows.narrow(1, start, gradient.numel()).unbind()
        return Stretch(params, buffers, gradient, rows, group, rate)

    gradients_of = {p: p.grad for p in group["params"] if p.grad is not None}
    for run in neighbours(storage_order(gradients_of), places):
        gradients = [gradients_of[p] for p in run]
        buffers = [buffer_of(p) for p in run] if group["momentum"] != 0 else []
        start = places.get(run[0])
        if len(run) > 1 or not all(tensor.is_contiguous() for tensor in (*run, *gradients, *buffers)):
            yield stretch(run, flattened(gradients), buffers, start)
            continue
        pieces = [tensor.view(-1).split(STRETCH) for tensor in (*run, *gradients, *buffers)]
        for index, (param, gradient, *buffer) in enumerate(zip(*pieces, strict=True)):
            yield stretch([param], gradient, buffer, None if start is None else start + index * STRETCH)


def neighbours(params: Iterable[Tensor], places: Mapping[Tensor, int]) -> Iterator[list[Tensor]]:
    """Join small parameters of one dtype that are neighbours in the sketch, or all outside it, up to a stretch."""
    run: list[Tensor] = []
    size, end = 0, None
    for param in params:
        start, count = places.get(param), param.numel()
        is_other = start != end or (bool(run) and param.dtype != run[-1].dtype)
        if run and (is_other or count > SMALL or size + count > STRETCH):
            yield run
            run, size = [], 0
        run.append(param)
        # A large parameter is no neighbour: its own size fills the stretch.
        size, end = size + (count if count <= SMALL else STRETCH), None if start is None else start + count
    if run:
        yield run


def flattened(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Return the tensors as one vector, a view where that is possible."""
    flat: Tensor = tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)
    return flat


def unflattened(vector: Float[Tensor, " n"], like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors of given shapes."""
    return list(_unflatten_dense_tensors(vector, like))
