"""Parameters as one flat vector: order, precision, cutting and joining; of one process, or spread over several."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.nn.parameter import is_lazy

from cao.linalg.columns import HERE, Space

# Parameters of no more numbers than this are small: a call costs more than a copy of them.
SMALL = 1 << 14


def storage_order(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters with the small ones last, so that they are neighbours and move in few calls.

    Last, because the sizes of large ones are mostly round, and their shares of a vector stay aligned in memory.
    """
    return sorted(params, key=lambda param: param.numel() <= SMALL)


def distinct(params: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters without repetitions, such as those of tied layers; refuse what has no shape yet."""
    found = list(dict.fromkeys(params))
    if any(map(is_lazy, found)):
        raise ValueError("a parameter of a lazy module has no shape yet; run the model once, then build this from it")
    return found


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
        self.device = self.params[0].device if self.params else torch.get_default_device()
        self.space = space_of(self.params)
        """Where their columns lie."""
        self.scales = [self.space.scale(p) for p in self.params]
        """Factors of the parameters' pieces in vectors: 1, or less where other processes hold the same piece."""

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
        self.check(columns)
        return columns.new_zeros(columns.shape[1], columns.shape[0]).T

    def check(self, columns: Float[Tensor, "n k"]) -> None:
        """Refuse columns of another length."""
        if columns.ndim != 2 or columns.shape[0] != self.length:
            raise ValueError(f"expected columns of shape ({self.length}, k), got {tuple(columns.shape)}")

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


# Random numbers are drawn this many at a time: a multiple of 16, for which torch's stream on a CPU is the same in
# pieces as in one.
DRAWN_AT_ONCE = 1 << 20


def is_spread(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, each process holding a shard or a replica."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any, like: Any = None) -> Tensor:
    """Return what this process holds of a tensor, sharing its memory; placed as another tensor is, if one is given."""
    if not is_spread(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        if like is not None and tensor.placements != like.placements:
            tensor = tensor.redistribute(like.device_mesh, like.placements)
        return tensor.to_local()  # type: ignore[no-any-return]


def placed(piece: Tensor, like: Any) -> Tensor:
    """Return this process's piece of a tensor as that tensor, placed as another one is."""
    if not is_spread(like):
        return piece
    placement = {"shape": like.shape, "stride": like.stride()}
    tensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    return tensor.from_local(piece, like.device_mesh, like.placements, run_check=False, **placement)  # type: ignore[no-any-return]


def own_piece(whole: Tensor, like: Any) -> Tensor:
    """Return this process's piece of a tensor that every process has whole."""
    if not is_spread(like):
        return whole
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    # Without a source rank, nothing is sent: each process cuts out its own.
    return local(distribute(whole.view(like.shape), like.device_mesh, like.placements, src_data_rank=None))


def check_whole(params: Sequence[Tensor], what: str, instead: str) -> None:
    """Refuse sharded parameters where every process needs all of them."""
    if any(map(is_spread, params)):
        raise ValueError(f"{what} does not support sharded parameters (DTensor); use {instead}")


def space_of(params: Sequence[Tensor]) -> Space:
    """Return the space of columns over the parameters, which must all lie on one mesh of processes, or all here."""
    meshes = [param.device_mesh for param in params if is_spread(param)]  # type: ignore[attr-defined]
    if not meshes:
        return HERE
    widest = max(meshes, key=lambda mesh: mesh.size())
    ranks = set(widest.mesh.flatten().tolist())
    if any(not ranks.issuperset(mesh.mesh.flatten().tolist()) for mesh in meshes):
        raise ValueError("sharded parameters must share one device mesh, or parts of one; got meshes that only overlap")
    return SpreadSpace(params, widest)


class SpreadSpace(Space):
    """A space whose rows are spread over the processes of a mesh, those of each parameter as the parameter is.

    Entries that several processes hold are scaled by 1/√copies in flat vectors, so that a sum over all processes counts
    each of them once.
    """

    def __init__(self, params: Sequence[Tensor], mesh: Any) -> None:
        self.params, self.mesh = params, mesh
        self.size = sum(param.numel() for param in params)

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum over all processes, the same bits in each."""
        summed = numbers.clone(memory_format=torch.contiguous_format)
        for group in self.mesh.get_all_groups():
            dist.all_reduce(summed, group=group)
        return summed

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean over all processes."""
        mean: Tensor = self.total(numbers) / self.mesh.size()
        return mean

    def length(self, norms: Tensor) -> Tensor:
        """Return the lengths of columns of which each process knows the norm of its part."""
        return self.total(norms.square()).sqrt()

    def scale(self, param: Any) -> float:
        """Return 1/√copies, by the number of processes that hold the same entries of the parameter."""
        if not is_spread(param):
            return self.mesh.size() ** -0.5  # type: ignore[no-any-return]
        shards = [param.device_mesh.size(dim) for dim, place in enumerate(param.placements) if not place.is_replicate()]
        return (math.prod(shards) / self.mesh.size()) ** 0.5  # type: ignore[no-any-return]

    def count(self, columns: Float[Tensor, "n k"]) -> int:
        """Return the number of all parameters' entries, each counted once."""
        return self.size

    def random(
        self, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "n k"]:
        """Draw this process's rows of the columns that one process would draw for all.

        Every process draws all n·k numbers, a few at a time, and keeps its own: the start of a refresh does not depend
        on how many processes there are.
        """
        stream = NormalStream(columns * self.size, generator, dtype)
        drawn = []
        for _ in range(columns):
            pieces = [own_piece(stream.take(param.numel()), param) for param in self.params]
            drawn.append(torch.cat([piece.flatten() * self.scale(p) for p, piece in self._with(pieces)]))
        return torch.stack(drawn).T

    def basis(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return an orthonormal basis by Householder's reflections in each process, and then of what is left of all."""
        factor = self._stacked(torch.linalg.qr(columns, mode="r").R)
        triangle = torch.linalg.qr(factor, mode="r").R
        lengths = factor.norm(dim=0)
        is_lost = triangle.diagonal().abs() <= 10 * torch.finfo(columns.dtype).eps * lengths
        if bool(is_lost.any()):
            # Reflections would fill up with directions of their own, different in processes that hold the same entries.
            generator = torch.Generator(columns.device).manual_seed(0)
            noise = self.random(len(columns), columns.shape[1], generator, columns.dtype)
            columns = torch.where(is_lost, noise, columns)
        own = torch.linalg.qr(columns)
        joined = torch.linalg.qr(self._stacked(own.R)).Q
        start = self._position() * columns.shape[1]
        basis: Tensor = own.Q @ joined[start : start + own.R.shape[0]]
        return basis

    def _with(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.params, pieces, strict=True)

    def _position(self) -> int:
        """Return this process's number within the mesh."""
        return int((self.mesh.mesh.flatten() == dist.get_rank()).nonzero())

    def _stacked(self, factor: Float[Tensor, "j k"]) -> Float[Tensor, "m k"]:
        """Return the small factors of all processes below one another."""
        height = factor.shape[1]
        stack = factor.new_zeros(self.mesh.size() * height, height)
        start = self._position() * height
        stack[start : start + factor.shape[0]] = factor
        return self.total(stack)


class NormalStream:
    """A known number of standard normal numbers, drawn piece by piece as if all at once."""

    def __init__(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        self.left, self.generator, self.dtype = count, generator, dtype
        self._drawn = torch.empty(0, device=generator.device, dtype=dtype)

    def take(self, count: int) -> Float[Tensor, " n"]:
        """Return the next numbers."""
        pieces = [self._drawn]
        while sum(map(len, pieces)) < count:
            # The last piece is longer rather than short: torch draws fewer than 16 numbers in another way.
            size = self.left if self.left < 2 * DRAWN_AT_ONCE else DRAWN_AT_ONCE
            self.left -= size
            options: dict[str, Any] = {"device": self.generator.device, "dtype": self.dtype}
            pieces.append(torch.randn(size, generator=self.generator, **options))
        numbers, self._drawn = torch.cat(pieces).tensor_split([count])
        return numbers
