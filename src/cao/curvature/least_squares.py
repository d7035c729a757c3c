"""The Gauss-Newton matrix 2JᵀJ of a sum of squared residuals, such as those of a physics-informed network."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from cao.autograd.derivatives import Graph, NoSecondDerivativeError
from cao.autograd.isolation import isolated_forward
from cao.curvature.jacobian import PointwiseJacobian
from cao.curvature.linearized import ForwardLinearized, GraphLinearized, Linearized, PartwiseLinearized
from cao.curvature.row_layers import NoJacobianError, lacks_memory
from cao.linalg.columns import full_precision
from cao.linalg.flat import FlatParams, check_whole, distinct

ResidualFunction: TypeAlias = Callable[[], Tensor | Sequence[Tensor]]

# 256 MiB in float64; computing a Jacobian takes a few times its own memory.
LARGEST_JACOBIAN = 1 << 25


class LeastSquares:
    """The operator 2JᵀJ of the loss Σ r², from a function that returns the residuals r: one tensor or several.

    Weight the residuals so that the loss is the sum of their squares. They may contain derivatives of a network, taken
    by `torch.autograd.grad(..., create_graph=True)`. `linearize` fixes the operator at the present parameters. J is
    formed in memory if it has at most `max_jacobian_size` numbers, if each point (a row of a linear layer's input)
    enters one entry of each residual vector, and of at most eight on average, and if at most 64 numbers lie outside
    linear layers; the columns of a matrix count as vectors. Products are then matrix products. Otherwise reverse mode
    is used twice, through one graph, and where that is impossible forward mode; `derivative` says what is in use, and
    why. J is compared with the gradient of reverse mode each time that it is formed, products once; what differs is
    not used.

    Several functions, such as one for every few thousand points, are evaluated and differentiated one after the other,
    and nothing is kept of one while the next is at work: memory is that of the largest. `backward` does the same for
    the closure. A sketch then takes each Jacobian twice.
    """

    derivative = "none yet"
    """What the last linearization was made of: "Jacobian", or "products: …" and why there is no Jacobian."""

    def __init__(
        self,
        residuals: ResidualFunction | Sequence[ResidualFunction],
        params: Iterable[Tensor],
        *,
        max_jacobian_size: int = LARGEST_JACOBIAN,
    ) -> None:
        functions = residuals if isinstance(residuals, Sequence) else [residuals]
        wrong: list[object] = [each for each in functions if not callable(each)] or [functions] * (not functions)
        if wrong:
            raise ValueError(
                "residuals must be a function that returns one tensor or several, or several such functions, got "
                f"{type(wrong[0]).__name__}"
            )
        self.params = [p for p in distinct(params) if p.requires_grad]
        if not self.params:
            raise ValueError("LeastSquares needs a parameter that requires a gradient, got none")
        check_whole(self.params, "LeastSquares", "GaussNewton")
        self.max_jacobian_size = max_jacobian_size
        self._parts: list[LeastSquares] = []
        if len(functions) > 1:
            self._parts = [LeastSquares(each, self.params, max_jacobian_size=max_jacobian_size) for each in functions]
        self._residuals = functions[0]
        self._jacobian = PointwiseJacobian(self.columns, self.params)
        self._kind: Callable[[], Linearized] | None = None

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column, where the parameters are now."""
        return self.linearize() @ columns

    @full_precision()
    @torch.enable_grad()
    def linearize(self) -> Linearized:
        """Return the operator fixed at the present parameters, with what its products share done once.

        Of several functions nothing is kept: their operator is always where the parameters are.
        """
        if self._parts:
            self.derivative = f"{len(self._parts)} parts, one after the other"
            return PartwiseLinearized([part.linearize for part in self._parts], self.values(), self.params)
        self._kind = self._kind or self._choose()
        return self._kind()

    def _choose(self) -> Callable[[], Linearized]:
        """Return the first kind of derivative that may be right here."""
        residuals = self.residuals()
        if Graph([residuals]).has_reentrant_checkpoint:  # What is inside would look constant.
            raise NoSecondDerivativeError("a reentrant checkpoint is incompatible with .grad()")
        size = sum(p.numel() for p in self.params) * len(residuals)
        if size <= self.max_jacobian_size:
            return self._explicit
        return self._products(
            f"the Jacobian has {size:,} numbers, more than max_jacobian_size={self.max_jacobian_size:,}"
        )

    def _products(self, reason: str) -> Callable[[], Linearized]:
        """Return the first kind of product that is right here; the reason is why there is no Jacobian."""
        with suppress(NoSecondDerivativeError):
            if self._through_a_graph().is_adjoint():
                self.derivative = f"products: {reason}"
                return self._through_a_graph
        self._check_precision()
        if not self._forward().is_adjoint():
            raise NoSecondDerivativeError("its forward derivative, too, contradicts its backward pass")
        self.derivative = f"products, by forward mode: {reason}"
        return self._forward

    def _explicit(self) -> Linearized:
        is_lasting = True
        try:
            linearized = self._jacobian()
            self.derivative = "Jacobian"
            return linearized
        except NoJacobianError as error:
            reason = str(error)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            reason, is_lasting = "there is too little memory for the Jacobian", False
        kind = self._products(reason)
        if is_lasting:
            self._kind = kind
        return kind()

    def _check_precision(self) -> None:
        """Refuse residuals that are computed in half precision on the way, whose rounding no derivative survives."""
        seen: set[torch.dtype] = set()

        def note(tensor: Tensor) -> Tensor:
            seen.add(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self._tensors()
        if halves := seen & {torch.bfloat16, torch.float16}:
            raise ValueError(
                f"residuals must be computed in float32 or float64, got {halves.pop()} on the way; let the function of "
                "the residuals run outside torch.autocast, on a model in float32 or float64"
            )

    def _through_a_graph(self) -> Linearized:
        return GraphLinearized(self.residuals(), self.params)

    def _forward(self) -> Linearized:
        return ForwardLinearized(self.residuals, self.params)

    def backward(self) -> Float[Tensor, ""]:
        """Add the loss's gradient to that of the parameters, function by function, and return the loss."""
        losses = []
        for part in self._parts or [self]:
            loss = part.residuals().square().sum()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def residuals(self) -> Float[Tensor, " m"]:
        """Return all residuals as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in self._tensors()])

    def columns(self) -> list[Tensor]:
        """Return the residuals as vectors of points: one per tensor, or per column of a tensor."""
        return [column for tensor in self._tensors() for column in columns_of(tensor)]

    def values(self) -> Float[Tensor, " m"]:
        """Return the residuals without their graph, in the order of a Jacobian's rows."""
        if self._parts:
            return torch.cat([part.values() for part in self._parts])
        with torch.enable_grad():  # They may contain derivatives of a network.
            return torch.cat(self.columns()).detach()

    def _tensors(self) -> list[Tensor]:
        if self._parts:
            return [tensor for part in self._parts for tensor in part._tensors()]
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
