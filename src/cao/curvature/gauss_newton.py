"""The generalised Gauss-Newton matrix of a model's loss as an operator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from cao.autograd.derivatives import NoSecondDerivativeError, derivative, gradient_graph
from cao.autograd.isolation import isolated_forward, replaced_parameters
from cao.curvature.hessian import checked_loss
from cao.linalg.flat import FlatParams, distinct


class GaussNewton:
    """The generalised Gauss-Newton matrix Jᵀ(∇²ℓ)J of a loss ℓ of a model's outputs.

    It is positive semidefinite where ℓ is convex in the outputs, as cross-entropy and squared error are. J v comes from
    forward mode, which stores no activations, so that a product needs no more memory than a training step. For layers
    without a forward derivative reverse mode is used twice, and for those that can be differentiated only once, central
    differences of the outputs. Nothing is computed before the first product, and the model's buffers and all
    random streams stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        loss_of_outputs: Callable[[Tensor], Tensor],
        params: Iterable[Tensor] | None = None,
    ) -> None:
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.inputs = inputs
        self.loss_of_outputs = loss_of_outputs
        known = list(self.model.parameters())
        self.flat = FlatParams(distinct([p for p in known if p.requires_grad] if params is None else params))
        self.params = self.flat.params
        unknown = [tuple(p.shape) for p in self.params if not any(p is q for q in known)]
        if unknown:
            raise ValueError(f"params must be parameters of the model, got others of shapes {unknown}")
        self._use_forward_mode = True
        self._use_differences = False
        self._is_checked = False

    @torch.enable_grad()
    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column: J by forward mode, ∇²ℓ at the outputs, Jᵀ by reverse mode."""
        self.flat.check(columns)
        directions = [self.flat.split(column) for column in columns.T]
        # Before the graph of the outputs exists, so that the two are never in memory together.
        tangents = self._forward_tangents(directions)
        with isolated_forward(self.params[0].device):
            outputs = self._outputs()
            leaf = outputs.detach().requires_grad_()
            loss = checked_loss(self.loss_of_outputs(leaf))
        if tangents is None:
            tangents = self._other_tangents(outputs, directions)
        slope = gradient_graph(loss, [leaf])
        rows, energies = [], torch.zeros_like(columns[0])
        for index, tangent in enumerate(tangents):
            (weighted,) = derivative(slope, [leaf], [tangent.to(leaf.dtype)])
            weights = torch.zeros_like(leaf) if weighted is None else weighted
            is_last = index == len(tangents) - 1
            rows.append(self._pulled(outputs, weights, columns, keep_graph=not is_last))
            energies[index] = (weights * tangent).sum()
        product = (torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)).T
        return product if self._is_trusted(columns, product, energies, leaf.dtype) else self @ columns

    def loss(self) -> Tensor:
        """Return the loss where the parameters are now."""
        return checked_loss(self.loss_of_outputs(self._outputs()))

    def _pulled(self, outputs: Tensor, weights: Tensor, like: Tensor, *, keep_graph: bool) -> Float[Tensor, " n"]:
        """Return Jᵀu, in a vector that is made after the backward pass, which needs the most memory."""
        parts = derivative([outputs], self.params, [weights], keep_graph=keep_graph)
        row = like.new_zeros(self.flat.length)
        self.flat.add_to(row, parts)
        return row

    def reordered(self, params: Sequence[Tensor]) -> "GaussNewton":
        """Return this matrix over the same parameters in another order, which saves a copy of the columns."""
        other = copy(self)
        other.flat = FlatParams(params)
        other.params = other.flat.params
        return other

    def _outputs(self) -> Tensor:
        if isinstance(self.inputs, Mapping):
            outputs = self.model(**self.inputs)
        else:
            outputs = self.model(*(self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)))
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"the model must return a tensor, got {type(outputs).__name__}; wrap it in a module that does"
            )
        return outputs

    def _forward_tangents(self, directions: list[list[Tensor]]) -> list[Tensor] | None:
        """Return J v for each direction, or None, from then on, if a layer has no forward derivative."""
        if not self._use_forward_mode:
            return None
        try:
            return [self._forward_tangent(direction) for direction in directions]
        except RuntimeError as error:  # NotImplementedError is one too.
            if not isinstance(error, NotImplementedError) and "forward gradient" not in str(error):
                raise
            self._use_forward_mode = False
            return None

    def _forward_tangent(self, direction: list[Tensor]) -> Tensor:
        device = self.params[0].device
        with isolated_forward(device), torch.no_grad(), forward_ad.dual_level():
            dual = {p: forward_ad.make_dual(p.detach(), v) for p, v in zip(self.params, direction, strict=True)}
            with replaced_parameters(self.model, dual):
                primal, tangent = forward_ad.unpack_dual(self._outputs())
            return torch.zeros_like(primal) if tangent is None else tangent

    def _is_trusted(self, columns: Tensor, product: Tensor, energies: Tensor, precision: torch.dtype) -> bool:
        """Compare vᵀ(Mv) with (Jv)ᵀ∇²ℓ(Jv), once, and turn from forward mode if they differ.

        They do if the model uses torch.no_grad(), which forward mode does not heed.
        """
        if self._is_checked or not self._use_forward_mode:
            return True
        self._is_checked = True
        seen = torch.stack([torch.dot(v, target) for v, target in zip(columns.T, product.T, strict=True)])
        margin = max(1e-3, 10 * torch.finfo(precision).eps) * energies.abs().max()
        self._use_forward_mode = bool(((seen - energies).abs() <= margin).all())
        return self._use_forward_mode

    def _other_tangents(self, outputs: Tensor, directions: list[list[Tensor]]) -> list[Tensor]:
        """Return J v for each direction by reverse mode or, from the first time that it fails, by differences."""
        if not self._use_differences:
            with suppress(NoSecondDerivativeError):
                tangents = [self._reverse_tangent(outputs, direction) for direction in directions]
                if self._is_adjoint(outputs, directions, tangents):
                    return tangents
            self._use_differences = True
        tangents = [self._difference(direction) for direction in directions]
        if not self._is_adjoint(outputs, directions, tangents):
            raise NoSecondDerivativeError(
                "it has no forward derivative either, and central differences of the outputs contradict its backward "
                "pass; give the Function of that layer a jvp"
            )
        return tangents

    def _is_adjoint(self, outputs: Tensor, directions: list[list[Tensor]], tangents: list[Tensor]) -> bool:
        """Whether ⟨u, J v⟩ = ⟨Jᵀu, v⟩ for a random u: the right side needs a first derivative only."""
        generator = torch.Generator(outputs.device).manual_seed(0)
        probe = torch.empty_like(outputs).normal_(generator=generator)
        reached = list(zip(derivative([outputs], self.params, [probe]), self.params, strict=True))
        for direction, tangent in zip(directions, tangents, strict=True):
            expected = self.flat.dot((torch.zeros_like(p) if part is None else part for part, p in reached), direction)
            seen, length = self.flat.space.mean(torch.stack([(probe * tangent).sum(), tangent.norm()]))
            if not bool((seen - expected).abs() <= 0.02 * torch.maximum(length, expected.abs())):
                return False
        return True

    def _difference(self, direction: list[Tensor]) -> Tensor:
        precision = torch.finfo(direction[0].dtype).eps
        length = max(float(self.flat.norm(direction)), precision)
        step = precision ** (1 / 3) / length  # Where truncation and rounding are of one size.
        ends = []
        for sign in (1, -1):
            moved = {p: p.detach() + sign * step * v for p, v in zip(self.params, direction, strict=True)}
            with isolated_forward(self.params[0].device), torch.no_grad(), replaced_parameters(self.model, moved):
                ends.append(self._outputs())
        difference: Tensor = (ends[0] - ends[1]) / (2 * step)
        return difference

    def _reverse_tangent(self, outputs: Tensor, direction: list[Tensor]) -> Tensor:
        # Jᵀu is linear in u, so its derivative in u along v is J v.
        free = torch.zeros_like(outputs, requires_grad=True)
        pulled = derivative([outputs], self.params, [free], create_graph=True)
        (tangent,) = derivative(pulled, [free], direction)
        return torch.zeros_like(outputs) if tangent is None else tangent
