"""The Gauss-Newton matrix 2JᵀJ of a sum of squared residuals, such as those of a physics-informed network."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.autograd.derivatives import NoSecondDerivativeError, has_reentrant_checkpoint
from cao.autograd.isolation import isolated_forward
from cao.flat import FlatParams
from cao.jacobian import PointwiseJacobian
from cao.linearized import ExplicitLinearized, ForwardLinearized, GraphLinearized, Linearized
from cao.shards import check_whole

ResidualFunction: TypeAlias = Callable[[], Tensor | Sequence[Tensor]]

# 256 MiB in float64; computing a Jacobian takes a few times its own memory.
LARGEST_JACOBIAN = 1 << 25


class LeastSquares:
    """The operator 2JᵀJ of the loss Σ r², from a function that returns the residuals r: one tensor or several.

    Weight the residuals so that the loss is the sum of their squares. They may contain derivatives of a network, taken
    by `torch.autograd.grad(..., create_graph=True)`. `linearize` fixes the operator at the present parameters. J is
    formed in memory if it has at most `max_jacobian_size` numbers and if each point (a row of a linear layer's input)
    enters one entry of each residual vector, and of at most eight on average; the columns of a matrix count as vectors.
    Products are then matrix products. Otherwise reverse mode is used twice, through one graph, and where that is
    impossible forward mode. J is compared with the gradient of reverse mode each time that it is formed, products once;
    what differs is not used.
    """

    def __init__(
        self, residuals: ResidualFunction, params: Iterable[Tensor], *, max_jacobian_size: int = LARGEST_JACOBIAN
    ) -> None:
        if not callable(residuals):
            raise ValueError(
                f"residuals must be a function that returns one tensor or several, got {type(residuals).__name__}"
            )
        self.params = [p for p in params if p.requires_grad]
        if not self.params:
            raise ValueError("LeastSquares needs a parameter that requires a gradient, got none")
        check_whole(self.params, "LeastSquares", "GaussNewton")
        self.max_jacobian_size = max_jacobian_size
        self._residuals = residuals
        self._jacobian = PointwiseJacobian(self.columns, self.params)
        self._kind: Callable[[], Linearized] | None = None

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column, where the parameters are now."""
        return self.linearize() @ columns

    @torch.enable_grad()
    def linearize(self) -> Linearized:
        """Return the operator fixed at the present parameters, with what its products share done once."""
        self._kind = self._kind or self._choose()
        return self._kind()

    def _choose(self) -> Callable[[], Linearized]:
        """Return the first kind of derivative that may be right here."""
        residuals = self.residuals()
        if has_reentrant_checkpoint(residuals):  # What is inside would look constant.
            raise NoSecondDerivativeError("a reentrant checkpoint is incompatible with .grad()")
        size = sum(p.numel() for p in self.params) * len(residuals)
        return self._explicit if size <= self.max_jacobian_size else self._products()

    def _products(self) -> Callable[[], Linearized]:
        """Return the first kind of product that is right here."""
        with suppress(NoSecondDerivativeError):
            if self._through_a_graph().is_adjoint():
                return self._through_a_graph
        if not self._forward().is_adjoint():
            raise NoSecondDerivativeError("its forward derivative, too, contradicts its backward pass")
        return self._forward

    def _explicit(self) -> Linearized:
        jacobian = self._jacobian()
        if jacobian is not None:
            return ExplicitLinearized(jacobian, self.params, self._jacobian.per_point)
        self._kind = self._products()  # For good.
        return self._kind()

    def _through_a_graph(self) -> Linearized:
        return GraphLinearized(self.residuals(), self.params)

    def _forward(self) -> Linearized:
        return ForwardLinearized(self.residuals, self.params)

    def residuals(self) -> Float[Tensor, " m"]:
        """Return all residuals as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in self._tensors()])

    def columns(self) -> list[Tensor]:
        """Return the residuals as vectors of points: one per tensor, or per column of a tensor."""
        return [column for tensor in self._tensors() for column in columns_of(tensor)]

    def _tensors(self) -> list[Tensor]:
        with isolated_forward(self.params[0].device):
            result = self._residuals()
        tensors = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, Iterable) else []
        check_residuals(tensors)
        return [tensor.to(FlatParams(self.params).dtype) for tensor in tensors]


def check_residuals(tensors: Sequence[object]) -> None:
    """Refuse what has no Jacobian, saying what was got."""
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError("residuals must return one tensor or several; the loss is the sum of their squares")
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"residuals must be in float32 or float64, got {tensor.dtype}")
    if not any(isinstance(tensor, Tensor) and tensor.numel() for tensor in tensors):
        raise ValueError("the residuals are empty; return at least one number")
    if not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise ValueError("the residuals have no graph; compute them from the parameters, without .detach() or no_grad")


def columns_of(tensor: Tensor) -> list[Tensor]:
    """Return a tensor's columns as vectors; a vector or a number is its own, and a tensor without entries has none."""
    if not tensor.numel():
        return []
    return [tensor.reshape(-1)] if tensor.ndim < 2 else list(tensor.reshape(len(tensor), -1).unbind(1))
