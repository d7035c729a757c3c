"""Parameters as one flat vector: their order, size, precision and device, and how columns are cut and joined."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# Parameters of no more numbers than this are small: a call costs more than a copy of them.
SMALL = 1 << 14


class FlatParams:
    """Parameters in one order, seen as one vector of the length of them all."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.sizes = [p.numel() for p in self.params]
        self.size = sum(self.sizes)

    @classmethod
    def in_storage_order(cls, params: Iterable[Tensor]) -> "FlatParams":
        """Return the parameters with the small ones last, so that they are neighbours and move in few calls.

        Last, because the sizes of large ones are mostly round, and their shares of a vector stay aligned in memory.
        """
        return cls(sorted(params, key=lambda param: param.numel() <= SMALL))

    @property
    def dtype(self) -> torch.dtype:
        """The precision that curvature is kept in: float64 if any parameter has it, else float32."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.params) else torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    def split(self, vector: Float[Tensor, " n"]) -> list[Tensor]:
        """Cut a vector into tensors of the parameters' shapes and types."""
        pieces = vector.split(self.sizes)
        return [piece.view(p.shape).to(p.dtype) for piece, p in zip(pieces, self.params, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
        """Return tensors of the parameters' shapes as one vector, in the precision that curvature is kept in."""
        return torch.cat([part.detach().reshape(-1).to(self.dtype) for part in parts])

    def add_to(self, target: Float[Tensor, " n"], parts: Sequence[Tensor | None]) -> None:
        """Add tensors of the parameters' shapes to a vector; None adds nothing."""
        for piece, part in zip(target.split(self.sizes), parts, strict=True):
            if part is None:
                continue
            if part.is_sparse:
                raise ValueError(
                    "curvature needs dense gradients, got a sparse one; build the embedding with sparse=False"
                )
            piece += part.reshape(-1)

    def zeros_like(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return zero columns to accumulate a product in, each contiguous in memory."""
        if columns.ndim != 2 or columns.shape[0] != self.size:
            raise ValueError(f"expected columns of shape ({self.size}, k), got {tuple(columns.shape)}")
        return columns.new_zeros(columns.shape[1], columns.shape[0]).T

    def reorder(self, columns: Float[Tensor, "n k"], other: "FlatParams") -> Float[Tensor, "n k"]:
        """Return the columns with each parameter's rows moved from its place here to its place in the other order."""
        pieces = dict(zip(self.params, columns.T.split(self.sizes, dim=1), strict=True))
        return torch.cat([pieces[p] for p in other.params], dim=1).T
