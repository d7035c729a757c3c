"""What each of two processes does in the tests of a distributed watch; a module that a new process can import."""

from typing import Any

import torch
import torch.distributed as dist
from small_models import batch, loss_of, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from cao import Reading, Sharpness
from cao.watch import Clock

EXACT: dict[str, Any] = {"budget": None, "tolerance": 1e-9, "max_products": 100}
WORLD, STEPS = 2, 13


def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def optimizer_for(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.05, weight_decay=0.1, foreach=False)


def readings_of(model: nn.Module, optimizer: Optimizer, share: slice, kind: str, **settings: Any) -> list[Reading]:
    """Train on a share of each batch, and return what a watch saw."""
    watch = Sharpness(optimizer, **settings)
    for step in range(STEPS):
        data = tuple(each[share] for each in batch(16, seed=step))
        loss = loss_of(model, data)
        optimizer.zero_grad()
        watch(loss if kind == "loss" else lambda data=data: loss_of(model, data))
        loss.backward()
        optimizer.step()
    again = Sharpness(optimizer, **settings)
    again.load_state_dict(watch.state_dict())
    data = tuple(each[share] for each in batch(16, seed=STEPS))
    again.look(lambda: loss_of(model, data))
    return again.readings


def run_rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    half = slice(8 * rank, 8 * rank + 8)
    ends = {}
    for kind in ("loss", "function"):
        model = DistributedDataParallel(network())
        ends[f"ddp {kind}"] = readings_of(model, optimizer_for(model), half, kind, **EXACT)
    sharded = network()
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    ends["fsdp function"] = readings_of(sharded, optimizer_for(sharded), half, "function", **EXACT)
    now = [0.0]

    def tick(clock: Clock) -> float:
        now[0] += 1 + rank  # Each call of the clock is a while later, and in one process longer.
        return now[0]

    Clock._now = tick  # type: ignore[method-assign]
    model = DistributedDataParallel(network())
    ends["budget"] = readings_of(model, optimizer_for(model), half, "loss", budget=0.2)
    torch.save(
        {name: [tuple(reading) for reading in readings] for name, readings in ends.items()}, f"{directory}/{rank}"
    )
    dist.barrier()  # A process that leaves first may abort the other.
    dist.destroy_process_group()
