"""What each of several processes does in the tests of sharded parameters; a module that a new process can import."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_models import batch, flat, loss_of, losses_of_parts, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from cao import CAO, GaussNewton

STEPS = 8
PLAN = {"2": ColwiseParallel(), "4": RowwiseParallel()}
FIXED = {"rank": 3, "refresh_every": 3, "damping": 0.5, "power_iterations": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {**FIXED, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {**FIXED, "momentum": 0.9, "nesterov": True},
    "clipped": {**FIXED, "max_update_norm": 0.05, "skip_non_finite": True},
    "adam": {**FIXED, "metric": "adam", "weight_decay": 0.01, "decoupled_weight_decay": True, "damping": "edge"},
    "auto damping": {"rank": 3, "refresh_every": 3, "damping": "auto", "eigensolver": "lanczos", "lr": 1.0},
    "all automatic": {"momentum": 0.9, "lr": 0.5},
    "rank 0": {"rank": 0, "momentum": 0.9, "scaling": "unit", "damping": 1.0},
    "adam, rank 0": {"rank": 0, "metric": "adam", "lr": 0.01, "scaling": "unit", "damping": 1.0},
}


def deep_network() -> nn.Module:
    """A network of which no two processes, let alone four, hold equal shares."""
    sizes = [(3, 5), (5, 4), (4, 5), (5, 2)]
    return seeded(lambda: nn.Sequential(*[layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())][:-1]))


def fully_sharded(mesh: Any, model: nn.Module) -> nn.Module:
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_network(kind: str) -> tuple[nn.Module, int, int]:
    """Return a model spread over all processes, and which of how many shares of the data this one has."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind == "fully sharded":
        return fully_sharded(init_device_mesh("cpu", (world,)), deep_network()), rank, world
    if kind == "tensor parallel":
        return parallelize_module(deep_network(), init_device_mesh("cpu", (world,)), PLAN), 0, 1
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
    if kind == "replicated shards":
        return fully_sharded(mesh, deep_network()), rank, world
    model = parallelize_module(deep_network(), mesh["inner"], PLAN)
    return fully_sharded(mesh["outer"], model), mesh.get_coordinate()[0], 2


KINDS = {2: ("fully sharded", "tensor parallel"), 4: ("fully sharded", "replicated shards", "both")}


def data_of(share: int, shares: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return a share of each batch."""
    batches = [batch(16, seed=seed) for seed in range(first, first + STEPS)]
    return [(inputs.chunk(shares)[share], labels.chunk(shares)[share]) for inputs, labels in batches]


def gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor]) -> GaussNewton:
    return GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))


SOURCES: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Any]] = {
    "function": lambda model, data: lambda: loss_of(model, data),
    "parts": lambda model, data: lambda: losses_of_parts(model, data, 2),
    "gauss-newton": gauss_newton,
}


def train(model: nn.Module, optimizer: CAO, batches: list[tuple[Tensor, Tensor]], kind: str = "function") -> None:
    for data in batches:
        source = SOURCES[kind](model, data)
        loss = loss_of(model, data)
        optimizer.zero_grad()
        # Between the two passes, where fully_shard holds gathered parameters.
        optimizer.refresh_if_due(source)
        loss.backward()
        optimizer.step()


def optimizer_for(model: nn.Module, name: str) -> CAO:
    return CAO(model.parameters(), **{"lr": 0.1, **SETTINGS[name]})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_params(model: nn.Module) -> Tensor:
    return flat([whole(param) for param in model.parameters()])


def end_of(model: nn.Module, optimizer: CAO) -> tuple[Tensor, list[float], tuple[int, ...]]:
    return whole_params(model), optimizer.sketch.values if optimizer.sketch else [], tuple(optimizer.counters)


def run_rank(rank: int, world: int, directory: str) -> None:
    """Train in each of the ways the tests ask about, and leave the ends in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    ends = {}
    for kind in KINDS[world]:
        for name in SETTINGS:
            model, share, shares = sharded_network(kind)
            optimizer = optimizer_for(model, name)
            train(model, optimizer, data_of(share, shares))
            ends[kind, name] = end_of(model, optimizer)
        for source in ("parts", "gauss-newton"):
            model, share, shares = sharded_network(kind)
            optimizer = optimizer_for(model, "momentum")
            train(model, optimizer, data_of(share, shares), source)
            ends[kind, source] = end_of(model, optimizer)
    torch.save(ends, f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
