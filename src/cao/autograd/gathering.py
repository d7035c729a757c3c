"""Models under fully_shard (FSDP2), run on parameters that are gathered within the graph, so that it has derivatives."""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def gathered_parameters() -> Iterator[None]:
    """Let modules under fully_shard run on whole parameters that are functions of their shards.

    fully_shard gathers parameters outside the graph and hands out gradients in a hook, so that neither the sharded
    parameters nor their gradients can be differentiated. Here its hooks find nothing to do; each parameter is gathered
    by an operation whose derivative is the shard of the mean gradient.
    """
    with ExitStack() as stack:
        met: set[Any] = set()

        def meet(root: nn.Module, _inputs: Any) -> None:
            for state in states_in(root):
                if state not in met:
                    met.add(state)
                    stack.enter_context(gathered(state))

        if "torch.distributed.fsdp" in sys.modules:
            stack.callback(register_module_forward_pre_hook(meet).remove)
        yield


def states_in(root: nn.Module) -> list[Any]:
    """Return what fully_shard knows about each of its modules."""
    sharded = sys.modules["torch.distributed.fsdp"].FSDPModule
    return [module._get_fsdp_state() for module in root.modules() if isinstance(module, sharded)]


@contextmanager
def gathered(state: Any) -> Iterator[None]:
    """Put whole parameters in the place of those that fully_shard manages, and let its hooks pass by."""
    groups, training_state = state._fsdp_param_groups, state._training_state
    parameters = [(param, *place) for group in groups for param in group.fsdp_params for place in places_of(param)]
    originals = [module._parameters[name] for _, module, name in parameters]
    try:
        # In this state, which is that of a recomputation in the backward pass, the hooks only see to the parameters.
        state._fsdp_param_groups, state._training_state = [], type(training_state).PRE_BACKWARD
        for (param, module, name), original in zip(parameters, originals, strict=True):
            # Between a forward and a backward pass it may be gathered already, outside the graph.
            shard = param.sharded_param if original is getattr(param, "_unsharded_param", None) else original
            whole = Gathered.apply(shard, Layout.of(param, shard))
            module._parameters[name] = whole.to(param.mp_policy.param_dtype or whole.dtype)
        yield
    finally:
        state._fsdp_param_groups, state._training_state = groups, training_state
        for (_, module, name), original in zip(parameters, originals, strict=True):
            module._parameters[name] = original


def places_of(param: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that hold a parameter, and its name there."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


@dataclass(frozen=True)
class Layout:
    """How a parameter is spread: over processes with different data, and within these perhaps by tensor parallelism."""

    like: Any
    """A tensor that is placed as the parameter is."""
    dims: int
    """How many dimensions of its mesh, the first ones, are those of different data."""
    inner: Any
    """The placement of the gathered parameter, None if every process holds it whole."""

    @classmethod
    def of(cls, param: Any, shard: Any) -> "Layout":
        """Return the layout of a parameter that fully_shard manages."""
        if param.mesh_info.is_spmd_mesh:
            raise ValueError("fully_shard with dp_mesh_dims is not supported; give it the mesh of the data dimensions")
        return cls(shard.detach(), param.mesh_info.mesh.ndim, param._unsharded_dtensor_spec)

    def gather(self, shard: Any) -> Any:
        """Return the whole parameter, or its tensor-parallel shard."""
        replicated = [tensor_module().Replicate()] * self.dims
        piece = shard.redistribute(placements=[*replicated, *self.like.placements[self.dims :]]).to_local()
        return piece.view_as(piece) if self.inner is None else placed(piece, self.inner, self.inner.placements)

    def scatter(self, gradient: Any) -> Any:
        """Return the shards of the mean of all processes' gradients."""
        tensor = tensor_module()
        if self.inner is not None:
            gradient = gradient.redistribute(placements=self.inner.placements).to_local()
        summed = [*[tensor.Partial()] * self.dims, *self.like.placements[self.dims :]]
        total = placed(gradient, self.like, summed).redistribute(placements=self.like.placements)
        return total / math.prod(self.like.device_mesh.shape[: self.dims])


def placed(piece: Tensor, like: Any, placements: Any) -> Any:
    """Return this process's piece of a tensor as that tensor."""
    mesh = like.mesh if hasattr(like, "tensor_meta") else like.device_mesh
    shape, stride = like.shape, like.stride if hasattr(like, "tensor_meta") else like.stride()
    return tensor_module().DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def tensor_module() -> Any:
    """Return torch.distributed.tensor, which is loaded wherever there are shards."""
    return sys.modules["torch.distributed.tensor"]


class Gathered(Function):
    """A parameter from its shards; its derivative is the shard of the mean gradient.

    It and `Scattered` are each other's derivatives where the mean of all processes' losses is differentiated.
    """

    @staticmethod
    def forward(ctx: Any, shard: Any, layout: Layout) -> Any:  # type: ignore[override]
        """Return the whole parameter."""
        ctx.layout = layout
        return layout.gather(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        """Return the shard of the mean gradient."""
        return Scattered.apply(gradient, ctx.layout), None


class Scattered(Function):
    """Shards of the mean of all processes' gradients."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, layout: Layout) -> Any:  # type: ignore[override]
        """Return this process's shard."""
        ctx.layout = layout
        return layout.scatter(gradient)

    @staticmethod
    def backward(ctx: Any, shard: Any) -> Any:  # type: ignore[override]
        """Return the whole of what the shards are parts of."""
        return Gathered.apply(shard, ctx.layout), None
