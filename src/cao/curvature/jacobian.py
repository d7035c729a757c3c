"""The whole Jacobian of residuals at points, from what linear layers do with each row of their input."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.autograd.derivatives import derivative
from cao.curvature.linearized import ExplicitLinearized, GraphLinearized
from cao.curvature.row_layers import NoJacobianError, RowLayers, Rows, observed
from cao.linalg.flat import FlatParams

Residuals: TypeAlias = Callable[[], list[Tensor]]
"""A function that returns the residuals as vectors."""

# Each residual of a point takes a backward pass; with more of them, the products of a sketch are cheaper than J.
MOST_PER_POINT = 8
# So does each number outside linear layers, and a sketch without J has no more columns.
MOST_OUTSIDE = 64


class PointwiseJacobian:
    """Computes J for the price of a few gradients, where each point of a vector has one residual.

    The gradient with respect to the weights of a linear layer is a sum of outer products, one for each row and for each
    time that the row passes through the layer: once forwards and, where residuals contain derivatives, several times
    backwards. One backward pass from the sum of a residual vector gives the factors. The products of each row make a
    row of J. Which residual a row belongs to is found from a second pass, of the residuals weighted by their numbers,
    and remembered as long as it leads to the right J. A few numbers outside linear layers, such as coefficients of an
    equation, have their columns one by one, by reverse mode twice.
    """

    def __init__(self, residuals: Residuals, params: Sequence[Tensor]) -> None:
        self.residuals, self.params = residuals, params
        self._places: dict[tuple[int, int], list[Tensor]] = {}

    def __call__(self) -> ExplicitLinearized:
        """Return J where the parameters are now, column after column of the residuals.

        A NoJacobianError tells why not, as where a point has two residuals in one vector or many parameters are used
        outside linear layers, or if points have so many residuals that it would be expensive.
        """
        layers, vectors = self._passed()
        per_point = max(1, round(sum(map(len, vectors)) / (layers.points or torch.inf)))
        if per_point > MOST_PER_POINT:
            raise NoJacobianError(f"points have {per_point} residuals each, more than {MOST_PER_POINT}")
        for _ in range(2 if self._places else 1):
            jacobian, outside = self._formed(layers, vectors)
            if self._is_right(jacobian):
                return ExplicitLinearized(jacobian, torch.cat(vectors).detach(), self.params, per_point, outside)
            self._places.clear()  # Those that were found elsewhere may have changed.
        raise NoJacobianError("a residual depends on several points, or a vector has several residuals of one point")

    def _passed(self) -> tuple[RowLayers, list[Tensor]]:
        """Return the residuals, and what they have passed through."""
        with observed(), RowLayers(self.params) as layers:
            vectors = self.residuals()
        return layers, vectors if layers.points else [torch.cat(vectors)]

    def _formed(self, layers: RowLayers, vectors: list[Tensor]) -> tuple[Float[Tensor, "m n"], int]:
        """Put the gradients of all rows into their places; return how many numbers lie outside linear layers, too."""
        flat = FlatParams(self.params)
        jacobian = torch.zeros(sum(map(len, vectors)), flat.length, dtype=flat.dtype, device=flat.device)
        shares, outside = jacobian.split(flat.sizes, dim=1), set[int]()
        for number, block in enumerate(jacobian.split([len(vector) for vector in vectors])):
            rows, others = layers.slopes(vectors[number], torch.ones_like(vectors[number]))
            outside.update(others)
            for part, places in zip(rows, self._located(number, rows, layers, vectors[number]), strict=True):
                part.add_to(block.split(flat.sizes, dim=1)[part.owner], places)
        if outside:
            columns = single_columns(vectors, [self.params[index] for index in outside])
            for index, share in zip(outside, columns, strict=True):
                shares[index].add_(share)
        return jacobian, sum(flat.sizes[index] for index in outside)

    def _located(self, number: int, rows: list[Rows], layers: RowLayers, vector: Tensor) -> list[Tensor]:
        """Return which residual of a vector each row belongs to; remembered until a row without a place has a slope."""
        places = self._places.get((number, len(vector)), [])
        if len(places) != len(rows) or not all(part.is_placed(at) for part, at in zip(rows, places, strict=True)):
            numbers = torch.arange(len(vector), dtype=vector.dtype, device=vector.device)
            numbered, _ = layers.slopes(vector, numbers)
            places = [part.places(other, len(vector)) for part, other in zip(rows, numbered, strict=True)]
            self._places[number, len(vector)] = places
        return places

    def _is_right(self, jacobian: Float[Tensor, "m n"]) -> bool:
        """Whether Jᵀu, for a random u, is what reverse mode says; what is not finite says nothing."""
        vectors = self.residuals()
        if sum(map(len, vectors)) != len(jacobian):
            return False
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(len(v), generator=generator, dtype=torch.float64).to(v) for v in vectors]
        lengths = torch.stack([block.norm() for block in jacobian.split([len(v) for v in vectors])])
        # All vectors count alike, or a light one could be wrong beside a heavy one.
        longest, least = lengths.max(), torch.finfo(lengths.dtype).eps
        lifts = (longest / lengths.clamp_min(least * longest)).nan_to_num(1.0)
        weights = [lift * weight for lift, weight in zip(lifts, weights, strict=True)]
        expected = torch.zeros_like(jacobian[0])
        FlatParams(self.params).add_to(expected, derivative(vectors, self.params, weights))
        error = (jacobian.T @ torch.cat(weights) - expected).norm()
        is_double = all(p.dtype == torch.float64 for p in self.params)
        rounding = torch.finfo(torch.float64 if is_double else torch.float32).eps
        return not bool(error > rounding**0.5 * expected.norm())


def single_columns(vectors: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the Jacobian's columns of each of these parameters, by reverse mode twice for each number in them."""
    sizes = [p.numel() for p in params]
    if sum(sizes) > MOST_OUTSIDE:
        raise NoJacobianError(f"{sum(sizes):,} parameters lie outside linear layers, more than {MOST_OUTSIDE}")
    with observed():
        residuals = torch.cat(list(vectors))
        identity = torch.eye(sum(sizes), dtype=residuals.dtype, device=residuals.device)
        columns: Tensor = GraphLinearized(residuals, params).push(identity)
    return torch.split(columns, sizes, dim=1)
