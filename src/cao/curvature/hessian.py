"""The exact Hessian of a mini-batch loss as an operator, and what a source may be."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor

from cao.autograd.derivatives import Gradient, Graph, derivative, gradient_graph
from cao.autograd.isolation import as_plain_models, cloned_buffers, isolated_forward
from cao.curvature.operators import ParameterOperator, Scaled, in_order, linearized
from cao.linalg.flat import FlatParams, distinct, is_spread

LossFunction: TypeAlias = Callable[[], Tensor | Iterable[Tensor]]


def operator_for(
    source: Tensor | LossFunction | ParameterOperator, params: Sequence[Tensor], scale: float = 1.0
) -> ParameterOperator:
    """Return the source of a refresh, divided by its scale, as an operator on exactly these parameters, in order."""
    operator: ParameterOperator
    if isinstance(source, Tensor) or not isinstance(source, ParameterOperator):
        operator = Hessian(source, params)  # It says what else it cannot take.
    else:
        operator = in_order(
            linearized(source), params, "the operator must act on exactly the optimizer's trainable parameters"
        )
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
        self.flat = FlatParams(distinct(params))
        self.params = self.flat.params
        self._source = checked_loss(source) if isinstance(source, Tensor) else checked_function(source)
        self._graph: Graph | None = None
        self.gradient: Gradient | None = None
        """That of a loss that was given with its graph, once there was a product."""
        self._parts: int | None = None

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the Hessian's product with each column, all of them from one graph."""
        product = self.flat.zeros_like(columns)
        if isinstance(self._source, Tensor):
            # A checkpointed graph runs parts of its forward pass again, a distributed one talks to the other processes.
            if self._graph is None:
                self._graph = Graph([self._source])
                self._replicas = {sink.ddp_weakref() for sink in self._graph.named("_DDPSinkBackward")} - {None}
            with cloned_buffers(), as_plain_models(self._replicas):
                self.gradient = self.gradient or gradient_graph(self._source, self.params, self._graph)
                if self.flat.space.mesh is not None:
                    check_shards(self.gradient, self.params)
                add_products(product, self.gradient, self.flat, columns)
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
