"""Parameters as one flat vector: their order, size, precision and device, and how columns are cut and joined."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from cao.linalg.shards import is_spread, local, placed, space_of

# Parameters of no more numbers than this are small: a call costs more than a copy of them.
SMALL = 1 << 14


def storage_order(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters with the small ones last, so that they are neighbours and move in few calls.

    Last, because the sizes of large ones are mostly round, and their shares of a vector stay aligned in memory.
    """
    return sorted(params, key=lambda param: param.numel() <= SMALL)


class FlatParams:
    """Parameters in one order, seen as one vector of the length of them all.

    Of parameters that are spread over processes, the vector in each process is made of their pieces there.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.pieces = [local(p) for p in self.params]
        self.sizes = [piece.numel() for piece in self.pieces]
        self.length = sum(self.sizes)
        """Numbers in this process."""
        self.size = sum(p.numel() for p in self.params)
        """Numbers in all of them."""
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.params) else torch.float32
        """The precision that curvature is kept in."""
        self.space = space_of(self.params)
        """Where their columns lie."""
        self.scales = [self.space.scale(p) for p in self.params]
        """Factors of the parameters' pieces in vectors: 1, or less where other processes hold the same piece."""

    @classmethod
    def in_storage_order(cls, params: Iterable[Tensor]) -> "FlatParams":
        """Return the parameters in the order of the sketch."""
        return cls(storage_order(params))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    def check_group(self, group: dist.ProcessGroup | None) -> None:
        """Refuse to average over processes that hold different shards."""
        if self.space.mesh is None or group is None:
            return
        shared = set(dist.get_process_group_ranks(group)).intersection(self.space.mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise ValueError(
                "process_group has processes that hold different shards; leave it out, since sharded parameters are "
                "averaged over their own mesh, or name a group of processes that hold the same shards"
            )

    def split(self, vector: Float[Tensor, " n"], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Cut a vector into tensors of the parameters' shapes, and of their types or the given one."""
        return [
            placed((part if scale == 1 else part / scale).view(piece.shape).to(dtype or piece.dtype), param)
            for part, scale, piece, param in zip(
                vector.split(self.sizes), self.scales, self.pieces, self.params, strict=True
            )
        ]

    def join(self, parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
        """Return tensors of the parameters' shapes as one vector, in the precision that curvature is kept in."""
        pieces = self.entries(parts).split(self.sizes)
        return torch.cat(
            [piece if scale == 1 else piece * scale for piece, scale in zip(pieces, self.scales, strict=True)]
        )

    def entries(self, parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
        """Return the entries of such tensors here as they are, such as those of a diagonal."""
        pieces = [local(part.detach(), p) for part, p in zip(parts, self.params, strict=True)]
        return torch.cat([piece.reshape(-1).to(self.dtype) for piece in pieces])

    def add_to(self, target: Float[Tensor, " n"], parts: Sequence[Tensor | None]) -> None:
        """Add tensors of the parameters' shapes to a vector; None adds nothing."""
        for piece, part, scale, param in zip(target.split(self.sizes), parts, self.scales, self.params, strict=True):
            if part is None:
                continue
            if part.is_sparse:
                raise ValueError(
                    "curvature needs dense gradients, got a sparse one; build the embedding with sparse=False"
                )
            piece.add_(local(part.detach(), param).reshape(-1), alpha=scale)

    def dot(self, parts: Iterable[Tensor], others: Iterable[Tensor]) -> Tensor:
        """Return the inner product of tensors of the parameters' shapes."""
        pairs = zip(parts, others, self.params, self.scales, strict=True)
        return self.space.total(
            torch.stack([scale**2 * (local(a, p).flatten() @ local(b, p).flatten()) for a, b, p, scale in pairs]).sum()
        )

    def norm(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the norm of tensors of the parameters' shapes."""
        pairs = zip(parts, self.params, self.scales, strict=True)
        return self.space.length(torch.stack([local(part, p).norm() * scale for part, p, scale in pairs]).norm())

    def average(self, rows: Float[Tensor, "k n"], group: dist.ProcessGroup | None) -> None:
        """Average, in place, vectors of products that each process has computed from its own share of the batch.

        Where parameters are spread over processes, autograd has averaged the products of shards. Those of parameters
        that every process holds whole are averaged over the mesh, and all of them over a group that the user has named.
        """
        if self.space.mesh is None or group is not None:
            dist.all_reduce(rows, group=group)
            rows /= dist.get_world_size(group)
        if self.space.mesh is not None:
            for piece, param in zip(rows.split(self.sizes, dim=1), self.params, strict=True):
                if not is_spread(param):
                    piece.copy_(self.space.mean(piece))

    def zeros_like(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return zero columns to accumulate a product in, each contiguous in memory."""
        if columns.ndim != 2 or columns.shape[0] != self.length:
            raise ValueError(f"expected columns of shape ({self.length}, k), got {tuple(columns.shape)}")
        return columns.new_zeros(columns.shape[1], columns.shape[0]).T

    def scaled(self, columns: Float[Tensor, "n k"], power: int) -> Float[Tensor, "n k"]:
        """Return columns with the scales of the parameters put into them (1), or taken out (−1)."""
        if all(scale == 1 for scale in self.scales):
            return columns
        pieces = zip(columns.split(self.sizes), self.scales, strict=True)
        return torch.cat([piece * scale**power for piece, scale in pieces])

    def reorder(self, columns: Float[Tensor, "n k"], other: "FlatParams") -> Float[Tensor, "n k"]:
        """Return the columns with each parameter's rows moved from its place here to its place in the other order."""
        pieces = dict(zip(self.params, columns.T.split(self.sizes, dim=1), strict=True))
        return torch.cat([pieces[p] for p in other.params], dim=1).T
