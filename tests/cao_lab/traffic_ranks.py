"""What each of several processes does in the test of traffic; a module that a new process can import."""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from traffic_table import counted

from cao import CAO

RANK = 3
WORLD = 4


def traffic_of(kind: str, ranks: int) -> tuple[list, list]:
    """Return what a refresh, not the first one, and a step have sent among so many of the processes."""
    mesh = init_device_mesh("cpu", (WORLD // ranks, ranks), mesh_dim_names=("apart", "together"))["together"]
    torch.manual_seed(0)
    # The numbers of rows divide by 4, so that no shard is padded.
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    settings: dict[str, Any] = {"rank": RANK, "refresh_every": 1, "damping": 1.0, "power_iterations": 3}
    if kind == "sharded":
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, process_group=mesh.get_group())
        settings["process_group"] = mesh.get_group()
    optimizer = CAO(model.parameters(), 0.1, **settings)
    inputs = torch.randn(16, 16)
    for _ in range(2):
        with counted() as refresh:
            optimizer.refresh(lambda: model(inputs).logsumexp(dim=1).mean())
        optimizer.zero_grad()
        model(inputs).logsumexp(dim=1).mean().backward()
        with counted() as step:
            optimizer.step()
    return refresh, step


def run_rank(rank: int, directory: str) -> None:
    """Count what both kinds of model send, and leave it in a file."""
    torch.set_num_threads(1)
    gc.freeze()  # A refresh looks through all objects for replicated models; there are none among those of now.
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    found = {(kind, ranks): traffic_of(kind, ranks) for kind in ("replicated", "sharded") for ranks in (2, 4)}
    torch.save(found, f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
