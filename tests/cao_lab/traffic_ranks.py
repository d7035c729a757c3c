"""What each of several processes does in the test of traffic; a module that a new process can import."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cao import CAO
from cao_lab.bench.traffic import counted

RANK = 3
SIZES = [(15, 32), (31, 8)]  # With a bias, each layer has a multiple of 8 rows and so equal shards.


def traffic_of(kind: str) -> tuple[list, list]:
    """Return what a refresh, not the first one, and a step have sent."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = CAO(model.parameters(), 0.1, rank=RANK, refresh_every=1, damping=1.0, power_iterations=3)
    inputs = torch.randn(16, 16)
    for _ in range(2):
        with counted() as refresh:
            optimizer.refresh(lambda: model(inputs).logsumexp(dim=1).mean())
        optimizer.zero_grad()
        model(inputs).logsumexp(dim=1).mean().backward()
        with counted() as step:
            optimizer.step()
    return refresh, step


def run_rank(rank: int, world: int, directory: str) -> None:
    """Count what both kinds of model send, and leave it in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    found = {kind: traffic_of(kind) for kind in ("replicated", "sharded")}
    torch.save(found, f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
