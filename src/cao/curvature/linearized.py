"""2JᵀJ of residuals at one position, from products with J and with Jᵀ, by three kinds of derivative."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from cao.autograd.derivatives import NoSecondDerivativeError, derivative
from cao.linalg.columns import Eigenpairs, full_precision
from cao.linalg.flat import FlatParams


class Linearized:
    """2JᵀJ at one position, from products with J and with Jᵀ."""

    params: Sequence[Tensor]
    residuals: Float[Tensor, " m"]
    jacobians: int = 0
    """How often a sketch forms the Jacobian; zero if it never does."""
    per_point: int = 1
    """How many residuals a point has, which decides what a Jacobian costs, …"""
    single_columns: int = 0
    """… beside how many of its columns are computed one by one."""

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Σ r² at that position."""
        return self.residuals.detach().square().sum()

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        raise NotImplementedError

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        raise NotImplementedError

    @full_precision()
    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column."""
        return self.pull(self.push(columns)).mul_(2)

    def is_adjoint(self) -> bool:
        """Whether ⟨u, J v⟩ = ⟨Jᵀu, v⟩ for random u and v: the right side needs a first derivative only."""
        generator = torch.Generator().manual_seed(0)
        flat = FlatParams(self.params)
        direction = torch.randn(flat.length, 1, generator=generator, dtype=torch.float64).to(flat.device, flat.dtype)
        image = self.push(direction)
        probe = torch.randn(image.shape, generator=generator, dtype=torch.float64).to(image)
        pulled = self.pull(probe)
        error = (probe * image).sum() - (pulled * direction).sum()
        scale = torch.maximum(probe.norm() * image.norm(), pulled.norm() * direction.norm())
        # What is not finite says nothing about the derivatives.
        return not bool(error.abs() > torch.finfo(image.dtype).eps ** 0.5 * scale)

    @full_precision()
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

    jacobians = 1

    def __init__(
        self,
        jacobian: Float[Tensor, "m n"],
        residuals: Float[Tensor, " m"],
        params: Sequence[Tensor],
        per_point: int = 1,
        single_columns: int = 0,
    ) -> None:
        self.jacobian, self.residuals, self.params = jacobian, residuals, params
        self.per_point, self.single_columns = per_point, single_columns

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        return self.jacobian @ columns.to(self.jacobian)

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        return (columns.T @ self.jacobian).T


class GraphLinearized(Linearized):
    """A graph of residuals, differentiated by reverse mode alone: Jᵀu is linear in u, and its derivative in u is J.

    Both graphs are made once for all columns. Forward mode would have to run the residuals again for each column, and
    to build the graph of the derivatives inside them each time: it was three times slower, and took more memory.
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
        return pulled_back(self.residuals, self.params, columns)


class ForwardLinearized(Linearized):
    """Forward mode for J, for residuals that reverse mode cannot differentiate twice; they run once for each column."""

    def __init__(self, residuals: Callable[[], Float[Tensor, " m"]], params: Sequence[Tensor]) -> None:
        self._run, self.params = residuals, params
        self.residuals = residuals()

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        return torch.stack([self._tangent(FlatParams(self.params).split(column)) for column in columns.T], dim=1)

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        return pulled_back(self.residuals, self.params, columns)

    def _tangent(self, direction: Sequence[Tensor]) -> Float[Tensor, " m"]:
        try:
            with forward_ad.dual_level(), tangents_on(self.params, direction):
                primal, tangent = forward_ad.unpack_dual(self._run())
        except RuntimeError as error:  # NotImplementedError is one too.
            if not isinstance(error, NotImplementedError) and "forward gradient" not in str(error):
                raise
            reason = f"it has no forward derivative either: {str(error).splitlines()[0]}"
            raise NoSecondDerivativeError(reason) from error
        return torch.zeros_like(primal) if tangent is None else tangent.detach()


class PartwiseLinearized(Linearized):
    """A sum of 2JᵀJ over parts of the residuals, each linearized anew for each product, and nothing of it kept."""

    def __init__(
        self, parts: Sequence[Callable[[], Linearized]], residuals: Float[Tensor, " m"], params: Sequence[Tensor]
    ) -> None:
        self._parts, self.residuals, self.params = parts, residuals, params
        first = parts[0]()
        self.jacobians, self.per_point, self.single_columns = 2 * first.jacobians, first.per_point, first.single_columns

    def push(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        """Return J times each column."""
        return torch.cat([linearize().push(columns) for linearize in self._parts])

    def pull(self, columns: Float[Tensor, "m k"]) -> Float[Tensor, "n k"]:
        """Return Jᵀ times each column."""
        done, total = 0, None
        for linearize in self._parts:
            part = linearize()
            pulled = part.pull(columns[done : done + len(part.residuals)])
            total, done = pulled if total is None else total.add_(pulled), done + len(part.residuals)
        assert total is not None
        return total

    @full_precision()
    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column, by one linearization of each part."""
        products = (linearize() @ columns for linearize in self._parts)
        total = next(products).clone()
        for product in products:
            total += product
        return total


@contextmanager
def tangents_on(params: Sequence[Tensor], direction: Sequence[Tensor]) -> Iterator[None]:
    """Let parameters carry tangents within a dual level; their values, and graphs that hold them, stay as they are.

    Written in place, since a function of no arguments cannot be given other parameters.
    """
    with ExitStack() as stack:
        for param, tangent in zip(params, direction, strict=True):
            stack.enter_context(_unsafe_preserve_version_counter(param))
            with torch.no_grad():
                param.copy_(forward_ad.make_dual(param.detach().clone(), tangent.to(param).clone()))
        yield


def pulled_back(
    residuals: Float[Tensor, " m"], params: Sequence[Tensor], columns: Float[Tensor, "m k"]
) -> Float[Tensor, "n k"]:
    """Return Jᵀ times each column, through the graph of the residuals."""
    flat = FlatParams(params)
    pulled = columns.new_zeros(columns.shape[1], flat.length)
    for column, target in zip(columns.T, pulled, strict=True):
        flat.add_to(target, derivative([residuals], params, [column]))
    return pulled.T
