"""What each of two processes does in the tests of distributed training; a module that a new process can import."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from small_models import batch, flat_params, loss_of, losses_of_parts, noisy_network, smooth_network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from cao import CAO, GaussNewton

SETTINGS = {"rank": 2, "refresh_every": 3, "damping": 0.5, "momentum": 0.9, "power_iterations": 4}
WORLD = 2


def source_of(kind: str, model: nn.Module, data: tuple[Tensor, Tensor], loss: Tensor):
    if kind == "loss":
        return loss
    if kind == "gauss-newton":
        return GaussNewton(model, data[0], lambda outputs: cross_entropy(outputs, data[1]))
    return lambda: losses_of_parts(model, data, 4)


def train_from(kind: str, model: nn.Module, optimizer: CAO, batches: list[tuple[Tensor, Tensor]]) -> None:
    for data in batches:
        loss = loss_of(model, data)
        optimizer.zero_grad()
        optimizer.refresh_if_due(source_of(kind, model, data, loss))
        loss.backward()
        optimizer.step()


def shares(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's half of each batch."""
    batches = [batch(16, seed=seed) for seed in range(8)]
    return [(inputs.chunk(WORLD)[rank], labels.chunk(WORLD)[rank]) for inputs, labels in batches]


def run_rank(rank: int, directory: str) -> None:
    """Train replicas in each of the ways the tests ask about, and leave the ends in files."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    ends = {}
    for name, build in (("smooth", smooth_network), ("noisy", noisy_network)):
        for kind in ("loss", "parts", "gauss-newton"):
            torch.manual_seed(rank)
            model = DistributedDataParallel(build())
            optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
            train_from(kind, model, optimizer, shares(rank))
            ends[f"{name} {kind}"] = (
                flat_params(model),
                (optimizer.sketch.values, optimizer.sketch.residuals, optimizer.sketch.damping),
                tuple(optimizer.counters),
            )
    ends["failure"], ends["buffers"] = failed_refresh(rank), buffers_around_a_refresh(rank)
    ends["accumulated"] = accumulated(DistributedDataParallel(smooth_network()), rank)
    torch.save(ends, f"{directory}/rank{rank}")
    dist.barrier()  # A process that leaves first may abort the other.
    dist.destroy_process_group()


def accumulated(model: DistributedDataParallel, rank: int, parts: int = 2) -> tuple[Tensor, tuple[int, ...]]:
    """Take steps whose gradients are added up over parts of a share, and travel with the last of them."""
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    for inputs, labels in shares(rank):
        optimizer.zero_grad()
        for number, data in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True), start=1):
            with nullcontext() if number == parts else model.no_sync():
                loss = loss_of(model, data) / parts
                optimizer.refresh_if_due(loss, scale=1 / parts)
                loss.backward()
        optimizer.step()
    return flat_params(model), tuple(optimizer.counters)


def failed_refresh(rank: int) -> tuple[int, ...]:
    """Let the loss of one rank only be no number."""
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    optimizer.refresh(loss_of(model, batch()) * (torch.nan if rank == 1 else 1.0))
    return tuple(optimizer.counters)


def buffers_around_a_refresh(rank: int) -> list[list[Tensor]]:
    """Refresh through the wrapped model between a forward and its backward, when statistics differ by rank."""
    model, data = DistributedDataParallel(noisy_network()), shares(rank)[0]
    loss = loss_of(model, data)
    before = [buffer.clone() for buffer in model.buffers()]
    CAO(model.parameters(), 0.1).refresh(lambda: loss_of(model, data))
    after = [buffer.clone() for buffer in model.buffers()]
    loss.backward()
    return [before, after]
