"""Models under fully_shard (FSDP2), run on parameters that are gathered within the graph, which so has derivatives."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad

from cao.threads import before_forward_passes

# Their names since torch 2.13, and before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def gathered_parameters() -> Iterator[None]:
    """Let modules under fully_shard run on whole parameters that are functions of their shards.

    fully_shard gathers parameters outside the graph and hands out gradients in a hook, so that neither the sharded
    parameters nor their gradients can be differentiated. Here its hooks find nothing to do; the parameters are gathered
    by an operation whose derivative is the shard of the mean gradient.
    """
    with ExitStack() as stack:
        met: set[Any] = set()

        def meet(module: nn.Module) -> None:
            state = module._get_fsdp_state() if isinstance(module, fsdp.FSDPModule) else None
            if state is not None and state not in met:
                met.add(state)
                stack.enter_context(gathered(state))

        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if hasattr(fsdp, "FSDPModule"):
            stack.enter_context(before_forward_passes(meet))
        yield


@contextmanager
def gathered(state: Any) -> Iterator[None]:
    """Put whole parameters in the place of those that fully_shard manages, and let its hooks pass by."""
    if not hasattr(state, "_fsdp_param_groups"):
        raise RuntimeError(
            f"fully_shard of torch {torch.__version__} keeps its parameters in another way than that of torch 2.13, "
            "which curvature needs; use torch 2.13, or DistributedDataParallel"
        )
    groups, training_state = state._fsdp_param_groups, state._training_state
    originals = [(module, name, module._parameters[name]) for group in groups for _, module, name in places_in(group)]
    try:
        # In this state, which is that of a recomputation in the backward pass, the hooks only see to the parameters.
        state._fsdp_param_groups, state._training_state = [], type(training_state).PRE_BACKWARD
        for group in groups:
            shards = [current_shard(param) for param in group.fsdp_params]
            wholes = dict(zip(group.fsdp_params, apply(Moved, Bucket(group), True, *shards), strict=True))
            for param, module, name in places_in(group):
                module._parameters[name] = wholes[param].to(param.mp_policy.param_dtype or wholes[param].dtype)
        yield
    finally:
        state._fsdp_param_groups, state._training_state = groups, training_state
        for module, name, original in originals:
            module._parameters[name] = original


def places_in(group: Any) -> Iterator[tuple[Any, nn.Module, str]]:
    """Yield the parameters of a group, with each module that holds one and its name there."""
    for param in group.fsdp_params:
        info = param._module_info
        yield param, info.module, info.param_name
        yield from ((param, *shared) for shared in zip(info.shared_modules, info.shared_param_names, strict=True))


def current_shard(param: Any) -> Tensor:
    """Return the shard that a module runs on, also between a forward and a backward pass, when it may be gathered."""
    info = param._module_info
    current: Tensor = info.module._parameters[info.param_name]
    return param.sharded_param if current is getattr(param, "_unsharded_param", None) else current


class Bucket:
    """The parameters of one group of fully_shard, gathered by one collective, their gradients reduced by another."""

    def __init__(self, group: Any) -> None:
        self.params, self.mesh = group.fsdp_params, group.mesh_info
        if getattr(self.mesh, "is_spmd_mesh", False):  # Unknown to torch before 2.13.
            raise ValueError("fully_shard with dp_mesh_dims is not supported; give it the mesh of the data dimensions")
        self.likes = [param.sharded_param.detach() for param in self.params]
        self.sizes = [param.padded_sharded_param_size.numel() for param in self.params]

    def gather(self, shards: Sequence[Any]) -> list[Any]:
        """Return whole parameters from shards; of tensor-parallel ones, this process's part."""
        own = torch.cat(
            [self._padded(shard, param).flatten() for shard, param in zip(shards, self.params, strict=True)]
        )
        joined = own.new_empty(self.mesh.shard_mesh_size * len(own))
        all_gather(joined, own, group=self.mesh.shard_process_group)
        rows = joined.view(-1, len(own)).split(self.sizes, dim=1)
        return [self._whole(pieces, param) for pieces, param in zip(rows, self.params, strict=True)]

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """Return shards of the mean of all processes' gradients."""
        pairs = zip(gradients, self.params, strict=True)
        rows = torch.cat([self._pieces(gradient, param) for gradient, param in pairs], dim=1)
        own = torch.empty_like(rows[0])
        reduce_scatter(own, rows.flatten(), group=self.mesh.shard_process_group)
        if hasattr(self.mesh, "replicate_process_group"):
            dist.all_reduce(own, group=self.mesh.replicate_process_group)
        own /= self.mesh.mesh.size()
        triples = zip(own.split(self.sizes), self.params, self.likes, strict=True)
        return [self._shard(piece, param, like) for piece, param, like in triples]

    def _padded(self, shard: Any, param: Any) -> Tensor:
        dim, size = param.fsdp_placement.dim, param.padded_sharded_param_size
        piece = torch.zeros(size) if shard is None else shard.to_local()
        return padded(piece.to(self.likes[0].to_local()), dim, size[dim])

    def _whole(self, rows: Tensor, param: Any) -> Any:
        dim, spec = param.fsdp_placement.dim, param._unsharded_dtensor_spec
        pieces = [row.view(param.padded_sharded_param_size) for row in rows]
        whole = torch.cat(pieces, dim).narrow(dim, 0, param._orig_size[dim]).contiguous()
        return whole if spec is None else placed(whole, spec.mesh, spec.placements, spec.shape, spec.stride)

    def _pieces(self, gradient: Any, param: Any) -> Tensor:
        """Return the pieces of a gradient, one row for each process."""
        dim, spec, size = param.fsdp_placement.dim, param._unsharded_dtensor_spec, param.padded_sharded_param_size
        if gradient is None:
            gradient = self.likes[0].to_local().new_zeros(param._orig_size)
        elif spec is not None:
            gradient = gradient.redistribute(placements=spec.placements).to_local()
        processes = self.mesh.shard_mesh_size
        chunks = padded(gradient, dim, processes * size[dim]).chunk(processes, dim)
        return torch.stack([chunk.flatten() for chunk in chunks])

    def _shard(self, piece: Tensor, param: Any, like: Any) -> Any:
        dim = param.fsdp_placement.dim
        shard = piece.view(param.padded_sharded_param_size).narrow(dim, 0, like.to_local().shape[dim])
        return placed(shard, like.device_mesh, like.placements, like.shape, like.stride())


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return the tensor with zeros at the end of a dimension."""
    missing = size - tensor.shape[dim]
    return pad(tensor, [0, 0] * (tensor.ndim - dim - 1) + [0, missing]) if missing else tensor


def placed(piece: Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> Any:
    """Return this process's piece of a tensor as that tensor."""
    tensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    return tensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def apply(function: Any, *arguments: Any) -> Any:
    """Apply a Function, which torch has given no types."""
    return function.apply(*arguments)


class Moved(Function):
    """Parameters gathered from their shards, or gradients scattered into shards of their mean.

    The two are each other's derivatives where the mean of all processes' losses is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, is_gathering: bool, *tensors: Any) -> Any:
        """Return the whole parameters, or this process's shards."""
        ctx.bucket, ctx.is_gathering = bucket, is_gathering
        ctx.set_materialize_grads(False)
        return tuple(bucket.gather(tensors) if is_gathering else bucket.scatter(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients, moved the other way."""
        return None, None, *apply(Moved, ctx.bucket, not ctx.is_gathering, *gradients)
