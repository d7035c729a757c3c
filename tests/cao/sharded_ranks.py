"""What each of several processes does in the tests of sharded parameters; a module that a new process can import."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import batch, flat, loss_of, losses_of_parts, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from cao import CAO, Eigenpairs, GaussNewton

STEPS = 3
PLAN = {"2": ColwiseParallel(), "4": RowwiseParallel()}
FIXED = {"rank": 3, "refresh_every": 2, "damping": 0.5, "power_iterations": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {**FIXED, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {**FIXED, "momentum": 0.9, "nesterov": True},
    "clipped": {**FIXED, "max_update_norm": 0.05},
    "at the edge": {**FIXED, "momentum": 0.3, "weight_decay": 0.01, "damping": "auto"},
    "all automatic": {"momentum": 0.9, "lr": 0.5},
    "rank 0": {"rank": 0, "momentum": 0.9, "scaling": "unit", "damping": 1.0},
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


CASES = {
    2: [
        *(("fully sharded", name, "function") for name in SETTINGS),
        *(("fully sharded", "momentum", source) for source in ("parts", "gauss-newton")),
        *(("tensor parallel", name, "function") for name in ("momentum", "at the edge")),
        *(("tensor parallel", "momentum", source) for source in ("loss", "gauss-newton")),
    ],
    4: [
        ("fully sharded", "momentum", "function"),
        ("fully sharded", "all automatic", "function"),
        ("replicated shards", "clipped", "function"),
        ("replicated shards", "at the edge", "function"),
        ("both", "momentum", "function"),
        ("both", "clipped", "function"),
    ],
}


def data_of(share: int, shares: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return a share of each batch."""
    batches = [batch(16, seed=seed) for seed in range(first, first + STEPS)]
    return [(inputs.chunk(shares)[share], labels.chunk(shares)[share]) for inputs, labels in batches]


def gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor]) -> GaussNewton:
    return GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))


SOURCES: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Any]] = {
    "loss": loss_of,
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


def save(model: nn.Module, optimizer: CAO, path: str) -> None:
    dcp.save(get_state(model, optimizer), checkpoint_id=path)


def load(model: nn.Module, optimizer: CAO, path: str) -> None:
    state = get_state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def get_state(model: nn.Module, optimizer: CAO) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def continued(checkpoint: str, settings: str) -> tuple[Tensor, list[float], tuple[int, ...]]:
    """Go on from a checkpoint of two processes, which these write themselves, with as many as there are here."""
    model, share, shares = sharded_network("fully sharded")
    optimizer = optimizer_for(model, settings)
    if dist.get_world_size() == 2:
        train(model, optimizer, data_of(share, shares))
        save(model, optimizer, checkpoint)
    else:
        load(model, optimizer, checkpoint)
    train(model, optimizer, data_of(share, shares, first=STEPS))
    return end_of(model, optimizer)


def first_order(kind: type[torch.optim.Optimizer], **settings: Any) -> Tensor:
    """Train by one of torch's optimizers, under the same sharding."""
    model, share, shares = sharded_network("fully sharded")
    optimizer = kind(model.parameters(), **settings)
    for data in data_of(share, shares):
        optimizer.zero_grad()
        loss_of(model, data).backward()
        optimizer.step()
    return whole_params(model)


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refused_loss() -> str:
    """Refresh from a loss that fully_shard has computed already."""
    model, share, shares = sharded_network("fully sharded")
    optimizer = optimizer_for(model, "momentum")
    loss = loss_of(model, data_of(share, shares)[0])
    message = refusal(lambda: optimizer.refresh(loss))
    loss.backward()
    return message


def numbers_held() -> int:
    """Return how many numbers this process keeps for the sketch and for momentum."""
    model, share, shares = sharded_network("fully sharded")
    optimizer = optimizer_for(model, "momentum")
    train(model, optimizer, data_of(share, shares)[:1])
    buffers = [optimizer.state[param]["momentum_buffer"].to_local() for param in model.parameters()]
    vectors = [saved[f"vector_{i}"].to_local() for saved in optimizer.state_dict()["state"].values() for i in range(3)]
    return sum(tensor.numel() for tensor in buffers + vectors)


def refused_group() -> str:
    """Ask for an average over processes that hold different shards."""
    model, share, shares = sharded_network("fully sharded")
    data = data_of(share, shares)[0]
    optimizer = CAO(model.parameters(), 0.1, process_group=dist.group.WORLD, **FIXED)
    return refusal(lambda: optimizer.refresh(lambda: loss_of(model, data)))


def given_eigenpairs() -> float:
    """Hand an optimizer its own sketch, read out, and return by how much its vectors differ from before."""
    model, share, shares = sharded_network("replicated shards")
    data = data_of(share, shares)[0]
    optimizer = optimizer_for(model, "momentum")
    optimizer.refresh(lambda: loss_of(model, data))
    sketch = optimizer.sketch
    values, residuals = (torch.tensor(numbers).double() for numbers in (sketch.values, sketch.residuals))
    optimizer.refresh(Eigenpairs(values, sketch.vectors, residuals))
    return float((optimizer.sketch.rows - sketch.rows).abs().max())


def vanishing_curvature() -> tuple[list[float], Tensor, Tensor]:
    """Sketch more directions than have curvature; return VᵀV, and the largest difference between replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    model = seeded(lambda: nn.Linear(3, 2))
    fully_shard(model, mesh=mesh)
    optimizer = CAO(model.parameters(), 0.1, **{**FIXED, "rank": 5})
    optimizer.refresh(lambda: model(torch.eye(3).double()[:1]).square().sum())
    rows = optimizer.sketch.rows
    gram = rows @ rows.T
    dist.all_reduce(gram)
    largest, smallest = rows.clone(), rows.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(0))
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.get_group(0))
    return optimizer.sketch.values, gram, (largest - smallest).abs().max()


def run_rank(rank: int, world: int, directory: str, checkpoint: str) -> None:
    """Train in each of the ways the tests ask about, and leave the ends in a file."""
    torch.set_num_threads(1)
    gc.freeze()  # A refresh looks through all objects for replicated models; there are none among those of now.
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    ends: dict[Any, Any] = {}
    for kind, name, source in CASES[world]:
        model, share, shares = sharded_network(kind)
        optimizer = optimizer_for(model, name)
        train(model, optimizer, data_of(share, shares), source)
        ends[kind, name, source] = end_of(model, optimizer)
    for settings in ("momentum", "at the edge"):
        ends["continued", settings] = continued(f"{checkpoint}/{settings}", settings)
    ends["refused loss"], ends["refused group"], ends["held"] = refused_loss(), refused_group(), numbers_held()
    if world == 2:
        ends["SGD"] = first_order(torch.optim.SGD, lr=0.1, momentum=0.9)
    else:
        ends["vanishing"], ends["given"] = vanishing_curvature(), given_eigenpairs()
    torch.save(ends, f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
