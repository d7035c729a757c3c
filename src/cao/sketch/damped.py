"""P = (B + ηI)⁻¹ of a sketch B = V diag(λ) Vᵀ, applied: to a whole vector, and in a step on stretches of parameters."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from cao.linalg import flat
from cao.linalg.columns import HERE, Eigenpairs, Space
from cao.linalg.flat import local, storage_order

NegativeCurvature: TypeAlias = Literal["magnitude", "clip", "signed"]
Scaling: TypeAlias = Literal["inverse-damping", "unit"]
State: TypeAlias = Mapping[Tensor, dict[str, Any]]

# Under the paper's rule, a value this close to −η (relative to the larger of |λ| and η) would make P blow up.
SINGULAR = 1e-6
# Large parameters are worked on in stretches of this many numbers, which stay in the cache between operations.
STRETCH = 1 << 20


@dataclass(frozen=True)
class Damped:
    """P = (B + ηI)⁻¹ of a sketch B = V diag(λ) Vᵀ: the only place where it is applied.

    It is (I + V diag(gains) Vᵀ)/divisor, from 1/(λ + η) = (1 − λ/(λ + η))/η: captured directions gain −λ/(λ + η).
    """

    vectors: Float[Tensor, "n k"] | None
    """None for a step on parameters, which has their rows in stretches."""
    gains: Float[Tensor, " k"]
    divisors: Float[Tensor, " k"]
    """What captured directions are divided by: λ + η, or (λ + η)/η for ηP."""
    divisor: float
    """What the complement is divided by: η, or 1 for ηP, with which it takes an SGD step."""
    brake: float = 1.0
    """A factor that makes every step shorter."""

    @classmethod
    def of(
        cls,
        values: Float[Tensor, " k"],
        vectors: Float[Tensor, "n k"] | None,
        damping: float,
        *,
        negative_curvature: NegativeCurvature = "magnitude",
        scaling: Scaling = "inverse-damping",
        brake: float = 1.0,
    ) -> "Damped":
        """Return (B + ηI)⁻¹, or η(B + ηI)⁻¹ with unit scaling.

        For λ stands |λ|, max(λ, 0), or, by the paper's rule, λ itself. A direction in which λ + η vanishes to within
        rounding is left to the complement.
        """
        curvature = {"magnitude": values.abs(), "clip": values.clamp_min(0), "signed": values}[negative_curvature]
        curvature = torch.where(is_singular(curvature, damping), 0, curvature)
        shifted, divisor = curvature + damping, damping if scaling == "inverse-damping" else 1.0
        return cls(vectors, -(curvature / shifted), shifted * (divisor / damping), divisor, brake)

    @property
    def base(self) -> float:
        """What the complement is multiplied by."""
        return 1 / self.divisor * self.brake

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return P times a vector or a block of columns."""
        V = cast(Tensor, self.vectors)
        gains, divisors = (d.to(V) if columns.ndim == 1 else d.to(V).unsqueeze(1) for d in (self.gains, self.divisors))
        if V.shape[0] == V.shape[1]:
            # There is no complement; its rounding errors, divided by η, would drown the rest.
            return V @ (V.T @ columns / divisors) * self.brake
        return (columns + V @ (gains * (V.T @ columns))) / self.divisor * self.brake

    def dense(self) -> Float[Tensor, "n n"]:
        """Return the whole matrix."""
        V = cast(Tensor, self.vectors)
        if V.shape[0] == V.shape[1]:
            return (V / self.divisors.to(V)) @ V.T * self.brake
        return self @ torch.eye(len(V), dtype=V.dtype, device=V.device)

    def step(
        self, stretches: Sequence["Stretch"], max_update_norm: float | None = None, space: Space = HERE
    ) -> Tensor | None:
        """Move every parameter: buf ← P̄(β·buf + g), θ ← θ − lr·base·buf, for P = base·P̄ and P̄ = I + V diag(gains) Vᵀ.

        Momentum goes through the preconditioner, which keeps it stable when the sketch changes (docs/theory.md);
        without momentum this is θ ← θ − lr·P g. With different rates D^-½ P̄ D^½ stands for P̄, since diag(lr)·P need
        not descend.

        An entry of the gradient that is not finite would spread to all parameters through V: then P̄ = I is taken, and
        the tensor returned, which is not read here so that nothing waits for the device, is false.
        """
        clip, base, gains = None, self.base, self.gains.tolist()
        if max_update_norm is not None:
            weights, _ = projected(stretches, gains, lambda stretch: stretch.slope(None), space)
            clip = clip_factor(stretches, weights, max_update_norm / base, space)
        for stretch in stretches:
            if stretch.buffers:
                torch._foreach_mul_(stretch.buffers, stretch.settings["momentum"])
                stretch.add(stretch.buffers, 1.0, stretch.slope(clip), ())
        weights, is_finite = projected(stretches, gains, lambda stretch: stretch.average(clip), space)
        # Backwards, because what was multiplied last is still in the cache.
        for stretch in reversed(stretches):
            stretch.move(base, weights, clip)
        if stretches and stretches[0].settings["nesterov"]:
            weights, _ = projected(stretches, gains, lambda stretch: stretch.look_ahead(clip), space)
            for stretch in stretches:
                factor = -float(stretch.settings["lr"]) * base
                stretch.add(stretch.params, factor, stretch.look_ahead(clip), weights)
        return is_finite


def is_singular(values: Float[Tensor, " k"], damping: float) -> Tensor:
    """Tell, for each value, whether λ + η vanishes to within rounding."""
    return (values + damping).abs() < SINGULAR * values.abs().clamp_min(damping)


def precondition(
    gradient: Float[Tensor, " n"],
    sketch: Eigenpairs,
    damping: float,
    *,
    negative_curvature: NegativeCurvature = "magnitude",
    scaling: Scaling = "inverse-damping",
) -> Float[Tensor, " n"]:
    """Return P g for a sketch: (B + ηI)⁻¹ g, or η(B + ηI)⁻¹ g with unit scaling."""
    inverse = Damped.of(sketch.values, sketch.vectors, damping, negative_curvature=negative_curvature, scaling=scaling)
    return inverse @ gradient


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
    root: float
    """The entries of D^½ here: √(lr / largest lr), times the scale of the rows."""
    scale: float
    """The factor of entries here in the rows, by which norms count them too."""
    dtype: torch.dtype
    """The precision of the sketch, or of the gradient where it does not reach."""

    def slope(self, clip: Tensor | None) -> Float[Tensor, " n"]:
        """Return the gradient with weight decay and clipping, in the precision of the sketch."""
        gradient = self.gradient
        decay = self.settings["weight_decay"]
        if decay != 0:
            gradient = gradient.add(flattened(self.params), alpha=decay)
        gradient = gradient.to(self.dtype)
        return gradient if clip is None else gradient * clip

    def average(self, clip: Tensor | None) -> Float[Tensor, " n"]:
        """Return what the step follows: the momentum buffer, or without momentum the slope."""
        return flattened(self.buffers) if self.buffers else self.slope(clip)

    def look_ahead(self, clip: Tensor | None) -> Float[Tensor, " n"]:
        """Return what Nesterov's step follows."""
        slope = self.slope(clip)
        return slope.add(flattened(self.buffers), alpha=self.settings["momentum"]) if self.buffers else slope

    def add(self, targets: list[Tensor], factor: float, vector: Tensor | None, weights: Sequence[Tensor]) -> None:
        """Add factor · (vector + V·weights) to targets that are shaped like the parameters."""
        target = targets[0]
        # Term by term, without a vector for the sum, where the target is one flat piece of the right precision.
        is_direct = len(targets) == 1 and target.ndim == 1 and (not self.rows or self.dtype == target.dtype)
        total = target if is_direct else torch.zeros_like(self.gradient, dtype=self.dtype)
        scale = factor if is_direct else 1.0
        if vector is not None:
            total.add_(vector, alpha=scale)
        # Outside the sketch there are weights, but no rows.
        for row, weight in zip(self.rows, weights, strict=False):
            total.addcmul_(row, weight, value=scale / self.root)
        if not is_direct:
            pieces = total.to(target.dtype).split([each.numel() for each in targets])
            # Most small parameters are vectors, and a view of a piece takes as long as the piece.
            parts = [p if each.ndim == 1 else p.view(each.shape) for p, each in zip(pieces, targets, strict=True)]
            torch._foreach_add_(targets, parts, alpha=factor)

    def move(self, base: float, weights: Sequence[Tensor], clip: Tensor | None) -> None:
        """Apply the sketch's part of the update, and the learning rate; Nesterov's step looks ahead first."""
        factor, is_plain = -float(self.settings["lr"]) * base, not self.settings["nesterov"]
        if not self.buffers:
            if is_plain:
                self.add(self.params, factor, self.slope(clip), weights)
            return
        if self.rows:
            self.add(self.buffers, 1.0, None, weights)
        if is_plain:
            torch._foreach_add_(self.params, self.buffers, alpha=factor)


def gradient_norm(params: Sequence[Tensor], space: Space) -> float:
    """Return the norm of the whole gradient, at the price of a host synchronisation; replicas have the same."""
    parts = [local(p.grad, p).norm() * space.scale(p) for p in params if p.grad is not None]
    return float(space.length(torch.stack(parts).norm())) if parts else 0.0


def projected(
    stretches: Sequence[Stretch], gains: Sequence[float], vector_of: Callable[[Stretch], Tensor], space: Space
) -> tuple[list[Tensor], Tensor | None]:
    """Return diag(gains) Vᵀ D^½ x as scalars on the device, all zero if any is not finite, and whether all are."""
    products = []
    for stretch in stretches:
        if stretch.rows:
            vector = vector_of(stretch).to(stretch.dtype)
            dots = [torch.dot(row, vector) for row in stretch.rows]
            products.append(dots if stretch.root == 1 else [dot * stretch.root for dot in dots])
    if not products:
        return [], None
    sums = space.total(torch.stack([torch.stack(parts).sum() for parts in zip(*products, strict=True)]))
    is_finite = sums.isfinite().all()
    sums = torch.where(is_finite, sums, 0.0)
    return [total * gain for total, gain in zip(sums.unbind(), gains, strict=True)], is_finite


def clip_factor(stretches: Sequence[Stretch], weights: Sequence[Tensor], limit: float, space: Space) -> Tensor:
    """Return min(1, limit/‖P̄g‖) without a round trip to the host; each stretch of P̄g is made and dropped again.

    With different rates a stretch counts by its own over the largest: it is the move that is clipped. D^-½ alone would
    let a group that hardly moves stop all others.
    """
    rates = [float(stretch.settings["lr"]) for stretch in stretches]
    norms = []
    for stretch, rate in zip(stretches, rates, strict=True):
        if rate != 0:
            update = torch.zeros_like(stretch.gradient, dtype=stretch.dtype)
            stretch.add([update], 1.0, stretch.slope(None), weights)
            norms.append(update.norm() * (stretch.scale * rate / max(rates)))
    if not norms:
        return torch.ones(())
    # An entry that is not a number leaves the others where they are, as one that is infinite does.
    return torch.clamp(limit / space.length(torch.stack(norms).norm()), max=1.0).nan_to_num(nan=0.0)


@runtime_checkable
class Vectors(Protocol):
    """The eigenvectors of a sketch, as rows, in which each parameter begins at its place."""

    @property
    def rows(self) -> Float[Tensor, "k n"]:
        """The rows."""
        ...

    @property
    def places(self) -> Mapping[Tensor, int]:
        """The places."""
        ...


def stretches_of(
    groups: Sequence[Mapping[str, Any]], sketch: Vectors | None, state: State, space: Space = HERE
) -> Iterator[Stretch]:
    """Cut and join all parameters that have a gradient into stretches."""
    highest = max(float(group["lr"]) for group in groups)
    for group in groups:
        lr, has_momentum = float(group["lr"]), group["momentum"] != 0
        # A group with rate 0 stands still, outside the sketch; its momentum goes on, as in SGD.
        is_still = lr == 0 and highest > 0
        rate = 1.0 if is_still or highest == 0 else math.sqrt(lr / highest)
        places = {} if is_still or sketch is None else sketch.places
        for run in neighbours(group["params"], places, space):
            own, gradients = [local(p) for p in run], [local(p.grad, p) for p in run]
            for p in run if has_momentum else ():
                if "momentum_buffer" not in state[p]:
                    state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [local(state[p]["momentum_buffer"]) for p in run] if has_momentum else []
            place, scale = places.get(run[0]), space.scale(run[0])
            if len(run) > 1 or not all(tensor.is_contiguous() for tensor in (*own, *gradients, *buffers)):
                pieces = [(own, flattened(gradients), buffers)]
            else:
                cut = [tensor.view(-1).split(STRETCH) for tensor in (*own, *gradients, *buffers)]
                pieces = [([param], gradient, buffer) for param, gradient, *buffer in zip(*cut, strict=True)]
            sizes = [gradient.numel() for _, gradient, _ in pieces]
            blocks: Sequence[Sequence[Tensor]] = [()] * len(pieces)
            if sketch is not None and place is not None:
                blocks = [block.unbind() for block in sketch.rows.narrow(1, place, sum(sizes)).split(sizes, dim=1)]
            for (params, gradient, averages), rows in zip(pieces, blocks, strict=True):
                precision = (rows[0] if rows else gradient).dtype
                yield Stretch(params, averages, gradient, rows, group, rate * scale, scale, precision)


def neighbours(params: Iterable[Tensor], places: Mapping[Tensor, int], space: Space) -> Iterator[list[Tensor]]:
    """Join small parameters of one dtype that are neighbours in the sketch, or all outside it, up to a stretch."""
    run: list[Tensor] = []
    size, end, last_kind = 0, None, None
    for param in storage_order(p for p in params if p.grad is not None):
        start, count, kind = places.get(param), local(param).numel(), (param.dtype, space.scale(param))
        if run and (start != end or kind != last_kind or count > flat.SMALL or size + count > STRETCH):
            yield run
            run, size = [], 0
        run.append(param)
        last_kind = kind
        # A large parameter is no neighbour: its own size fills the stretch.
        size, end = size + (count if count <= flat.SMALL else STRETCH), None if start is None else start + count
    if run:
        yield run


def flattened(tensors: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Return the tensors as one vector, a view where that is possible."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)
