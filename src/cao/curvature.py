"""The Hessian and the Gauss-Newton matrix of a mini-batch loss, as operators that multiply blocks of columns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from cao.autograd.derivatives import Gradient, NoSecondDerivativeError, derivative, gradient_graph, replicas_in
from cao.autograd.isolation import as_plain_models, cloned_buffers, isolated_forward, replaced_parameters
from cao.flat import FlatParams
from cao.linalg import ROWS
from cao.operators import ParameterOperator, Scaled, in_order
from cao.shards import is_spread

LossFunction: TypeAlias = Callable[[], Tensor | Iterable[Tensor]]


def operator_for(
    source: Tensor | LossFunction | ParameterOperator, params: Sequence[Tensor], scale: float = 1.0
) -> ParameterOperator:
    """Return the source of a refresh, divided by its scale, as an operator on exactly these parameters, in order."""
    operator: ParameterOperator
    if isinstance(source, Tensor) or not isinstance(source, ParameterOperator):
        operator = Hessian(source, params)  # It says what else it cannot take.
    else:
        operator = in_order(source, params, "the operator must act on exactly the optimizer's trainable parameters")
    return operator if scale == 1 else Scaled(operator, 1 / scale)


class Hessian:
    """The exact Hessian of a loss with respect to parameters.

    The source is the loss of a forward pass, whose graph stays usable for the backward pass that follows; or a
    function that returns a loss; or a function that yields one loss for each of several equal parts of a batch: then
    the Hessian is that of their mean, and only one part's graph is in memory at a time. A function is called once for
    each block of columns; buffers and random streams are restored afterwards. It must run its own forward pass and
    give the same losses each time.
    """

    def __init__(self, source: Tensor | LossFunction, params: Iterable[Tensor]) -> None:
        self.flat = FlatParams(params)
        self.params = self.flat.params
        self._source = checked_loss(source) if isinstance(source, Tensor) else checked_function(source)
        self._gradient: Gradient | None = None
        self._parts: int | None = None

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the Hessian's product with each column, all of them from one graph."""
        product = self.flat.zeros_like(columns)
        if isinstance(self._source, Tensor):
            # A checkpointed graph runs parts of its forward pass again, a distributed one talks to the other processes.
            with cloned_buffers(), as_plain_models(replicas_in(self._source)):
                self._gradient = self._gradient or gradient_graph(self._source, self.params)
                check_shards(self._gradient, self.params)
                add_products(product, self._gradient, self.flat, columns)
            return product
        with isolated_forward(self.params[0].device):
            parts = self._add_parts(product, columns, self._source)
        return product.div_(parts)

    def _add_parts(self, product: Tensor, columns: Tensor, function: LossFunction) -> int:
        result = function()
        is_several = isinstance(result, Iterable) and not isinstance(result, Tensor)
        losses: Iterator[Any] = iter(result if is_several else [result])
        del result
        parts = 0
        # No name may hold on to a loss here: one part's graph must be gone before the next is computed.
        while (gradient := next_gradient(losses, self.params)) is not None:
            add_products(product, gradient, self.flat, columns, keep_graph=False)
            del gradient
            parts += 1
        if parts == 0 or parts != (self._parts or parts):
            raise ValueError(
                f"the source must yield the same losses at every call, got {parts} where "
                f"{self._parts or 'at least 1'} were expected; let each call return a new generator"
            )
        self._parts = parts
        return parts


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
        self.flat = FlatParams([p for p in known if p.requires_grad] if params is None else params)
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
        product = self.flat.zeros_like(columns)
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
        energies = torch.zeros_like(product[0])
        for index, (tangent, target) in enumerate(zip(tangents, product.T, strict=True), start=1):
            (weighted,) = derivative(slope, [leaf], [tangent.to(leaf.dtype)])
            if weighted is not None:
                is_last = index == len(tangents)
                self.flat.add_to(target, derivative([outputs], self.params, [weighted], keep_graph=not is_last))
                energies[index - 1] = (weighted * tangent).sum()
        return product if self._is_trusted(columns, product, energies, leaf.dtype) else self @ columns

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
            seen, length = ROWS.get().mean(torch.stack([(probe * tangent).sum(), tangent.norm()]))
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


def checked_loss(loss: Tensor) -> Tensor:
    """Return the loss if second derivatives can start from it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss must be a scalar tensor, got {got}; reduce it to one number first")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph; compute it from the parameters with gradients enabled, "
            "and pass it before .item() or .detach()"
        )
    return loss


def checked_function(source: object) -> LossFunction:
    """Return the source if it can be called repeatedly."""
    if not callable(source):
        raise ValueError(
            f"curvature needs a loss tensor or a function that returns or yields losses, got {type(source).__name__}; "
            "pass a generator function itself, not the generator it returns, which can be read only once"
        )
    return source


def next_gradient(losses: Iterator[Tensor], params: Sequence[Tensor]) -> Gradient | None:
    """Return the gradient graph of the next loss, or None after the last."""
    for loss in losses:
        return gradient_graph(checked_loss(loss), params)
    return None


def check_shards(gradient: Gradient, params: Sequence[Tensor]) -> None:
    """Refuse a graph that does not lead to sharded parameters, whose curvature would be taken for zero."""
    lost = sum(part is None and is_spread(param) for part, param in zip(gradient, params, strict=True))
    if lost:
        raise ValueError(
            f"the graph of this loss does not lead to {lost} of the sharded parameters, which fully_shard has gathered "
            "outside of it; pass a function that returns the loss, which runs the model anew"
        )


def add_products(
    product: Tensor, gradient: Gradient, flat: FlatParams, columns: Tensor, *, keep_graph: bool = True
) -> None:
    """Add the Hessian's product with each column to the columns of `product`."""
    for index, (column, target) in enumerate(zip(columns.T, product.T, strict=True), start=1):
        is_kept = keep_graph or index < columns.shape[1]
        flat.add_to(target, derivative(gradient, flat.params, flat.split(column), keep_graph=is_kept))
