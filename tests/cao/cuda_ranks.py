"""What each of two processes does in the test of NCCL; a module that a new process can import."""

import torch
import torch.distributed as dist
from small_models import flat_params, smooth_network
from torch.nn.parallel import DistributedDataParallel
from two_ranks import SETTINGS, WORLD, shares, train_from

from cao import CAO


def run_rank(rank: int, directory: str) -> None:
    """Train a replica on a GPU of its own, and leave the end in a file."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(smooth_network().to(rank), device_ids=[rank])
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    train_from("loss", model, optimizer, [(inputs.to(rank), labels.to(rank)) for inputs, labels in shares(rank)])
    torch.save(flat_params(model).cpu(), f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()
