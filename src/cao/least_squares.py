"""The Gauss-Newton matrix 2JᵀJ of a sum of squared residuals, such as those of a physics-informed network."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.autograd.derivatives import derivative
from cao.autograd.isolation import isolated_forward
from cao.flat import FlatParams
from cao.jacobian import PointwiseJacobian
from cao.linalg import Eigenpairs
from cao.shards import check_whole

ResidualFunction: TypeAlias = Callable[[], Tensor | Sequence[Tensor]]

# 256 MiB in float64; computing a Jacobian takes a few times its own memory.
LARGEST_JACOBIAN = 1 << 25


class LeastSquares:
    """The operator 2JᵀJ of the loss Σ r², from a function that returns the residuals r: one tensor or several.

    Weight the residuals so that the loss is the sum of their squares. They may contain derivatives of a network, taken
    by `torch.autograd.grad(..., create_graph=True)`. `linearize` fixes the operator at the present parameters. J is
    formed in memory if it has at most `max_jacobian_size` numbers and if each point (a row of a linear layer's input)
    enters one entry of each residual vector; the columns of a matrix count as vectors. Products are then matrix
    products. Otherwise reverse mode is used twice, through one graph.
    """

    def __init__(
        self, residuals: ResidualFunction, params: Iterable[Tensor], *, max_jacobian_size: int = LARGEST_JACOBIAN
    ) -> None:
        if not callable(residuals):
            raise ValueError(
                f"residuals must be a function that returns one tensor or several, got {type(residuals).__name__}"
            )
        self.params = list(params)
        check_whole(self.params, "LeastSquares", "GaussNewton")
        self.max_jacobian_size = max_jacobian_size
        self._residuals = residuals
        self._jacobian = PointwiseJacobian(self.residuals, self.params)
        self._is_explicit: bool | None = None

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column, where the parameters are now."""
        return self.linearize() @ columns

    @torch.enable_grad()
    def linearize(self) -> "Linearized":
        """Return the operator fixed at the present parameters, with what its products share done once."""
        if self._is_explicit is None:
            size = sum(p.numel() for p in self.params) * sum(map(len, self.residuals()))
            self._is_explicit = size <= self.max_jacobian_size and self._jacobian.is_right()
        if self._is_explicit:
            return ExplicitLinearized(self._jacobian(), self.params)
        return GraphLinearized(torch.cat(self.residuals()), self.params)

    def residuals(self) -> list[Tensor]:
        """Return the residuals as vectors: one per tensor, or per column of a tensor."""
        with isolated_forward(self.params[0].device):
            result = self._residuals()
        tensors = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, Iterable) else []
        check_residuals(tensors)
        return [column for tensor in tensors for column in columns_of(tensor)]


class Linearized:
    """2JᵀJ at one position, from products with J and with Jᵀ."""

    params: Sequence[Tensor]

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        raise NotImplementedError

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        raise NotImplementedError

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column."""
        return self.pull(self.push(columns)).mul_(2)

    def eigenpairs(self, start: Float[Tensor, "n k"]) -> Eigenpairs:
        """Approximate the k largest eigenpairs by one pass over J and one over Jᵀ, from any start columns.

        They are singular values of J within the span of J·start: no square of J is formed, so that small eigenvalues
        keep their digits, in float32 above all.
        """
        images = torch.linalg.qr(self.push(start)).Q
        basis, triangle = torch.linalg.qr(self.pull(images))
        if not bool(triangle.isfinite().all()):  # Which torch refuses to decompose; so do we, in our own way.
            lost = triangle.new_full((len(triangle),), torch.nan)
            return Eigenpairs(lost, basis, lost, start.shape[1])
        rotation, singular, _ = torch.linalg.svd(triangle)
        return Eigenpairs(2 * singular.square(), basis @ rotation, torch.zeros_like(singular), start.shape[1])


class ExplicitLinearized(Linearized):
    """A Jacobian in memory."""

    def __init__(self, jacobian: Float[Tensor, "m n"], params: Sequence[Tensor]) -> None:
        self.jacobian, self.params = jacobian, params

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        return self.jacobian @ columns.to(self.jacobian)

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        return (columns.T @ self.jacobian).T


class GraphLinearized(Linearized):
    """A graph of residuals, differentiated by reverse mode alone: Jᵀu is linear in u, and its derivative in u is J.

    Both graphs are made once for all columns. Forward mode would have to run the residuals again for each column, and
    to build the graph of the derivatives inside them each time: it was five times slower, and took more memory.
    """

    def __init__(self, residuals: Float[Tensor, " m"], params: Sequence[Tensor]) -> None:
        self.residuals, self.params = residuals, params
        self._weights = torch.zeros_like(residuals, requires_grad=True)
        self._pulled = derivative([residuals], params, [self._weights], create_graph=True)

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        images = torch.zeros_like(self.residuals).repeat(columns.shape[1], 1)
        for column, image in zip(columns.T, images, strict=True):
            (tangent,) = derivative(self._pulled, [self._weights], FlatParams(self.params).split(column))
            if tangent is not None:
                image.copy_(tangent)
        return images.T

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        pulled = columns.new_zeros(columns.shape[1], sum(p.numel() for p in self.params))
        for column, target in zip(columns.T, pulled, strict=True):
            FlatParams(self.params).add_to(target, derivative([self.residuals], self.params, [column]))
        return pulled.T


def check_residuals(tensors: Sequence[object]) -> None:
    """Refuse what has no Jacobian, saying what was got."""
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError("residuals must return one tensor or several; the loss is the sum of their squares")
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"residuals must be in float32 or float64, got {tensor.dtype}")
    if not any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise ValueError("the residuals have no graph; compute them from the parameters, without .detach() or no_grad")


def columns_of(tensor: Tensor) -> list[Tensor]:
    """Return a tensor's columns as vectors; a vector or a number is its own."""
    return [tensor.reshape(-1)] if tensor.ndim < 2 else list(tensor.reshape(len(tensor), -1).unbind(1))
