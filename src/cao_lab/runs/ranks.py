"""The processes that carry out one run together, as torchrun starts them; without it there is one.

This is the only place that knows torch.distributed. What it gives to a single process is what that process has already.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from cao.curvature.operators import AllReduced, ParameterOperator
from cao_lab.config import ConfigError, Execution, RunConfig
from cao_lab.tasks.data import Share

Told = TypeVar("Told")


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run. All of them call each method, in the same order."""

    rank: int = 0
    count: int = 1

    @property
    def share(self) -> Share:
        """This process's part of every batch."""
        return Share(self.rank, self.count)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the log."""
        return self.rank == 0

    def replica(self, model: nn.Module) -> nn.Module:
        """Return the model, its gradients averaged over all processes."""
        if self.count == 1:
            return model
        # torch regroups the gradients after the first backward pass, unless it has to look for unused parameters. Three
        # or more processes would add in another order from then on, and a run that was resumed would show it.
        return DistributedDataParallel(model, find_unused_parameters=True)

    def mean_operator(self, operator: ParameterOperator) -> ParameterOperator:
        """Return the mean of all processes' operators."""
        return operator if self.count == 1 else AllReduced(operator, None)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes."""
        if self.count > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.count
        return value

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums of numbers over all processes, on the device still."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def largest(self, value: int, device: torch.device) -> int:
        """Return the largest of a number over all processes."""
        if self.count == 1:
            return value
        most = torch.tensor(value, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def in_turn(self, own: list[Told]) -> list[Told]:
        """Return the entries of all processes' lists, where each took every `count`-th of one list."""
        if self.count == 1:
            return own
        lists: list[list[Told]] = [[] for _ in range(self.count)]
        dist.all_gather_object(lists, own)
        return [lists[place % self.count][place // self.count] for place in range(sum(map(len, lists)))]

    def first_says(self, compute: Callable[[], Told]) -> Told:
        """Return what the first process computes, or raise in every process what it raised."""
        if self.count == 1:
            return compute()
        word: list[tuple[Told | None, Exception | None]] = [(None, None)]
        if self.is_first:
            try:
                word = [(compute(), None)]
            except Exception as caught:
                word = [(None, caught)]
        dist.broadcast_object_list(word)
        said, error = word[0]
        if error is not None:
            raise error
        return said  # type: ignore[return-value]

    def share_buffers(self, model: nn.Module) -> None:
        """Give every process the first one's buffers, such as the running statistics of batch norm."""
        for buffer in model.buffers() if self.count > 1 else ():
            dist.broadcast(buffer, 0)


ALONE = Ranks()


@contextmanager
def joined_ranks(config: RunConfig, execution: Execution) -> Iterator[Ranks]:
    """Join the processes that torchrun has started for this run, and part from them at its end."""
    count = ranks_started()
    if count == 1:
        yield ALONE
        return
    check_config(config, count)
    store, rank, _ = next(rendezvous("env://"))
    # torchrun keeps its store when it starts killed processes again, with the addresses of the dead in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"cao attempt {attempt}", store)  # type: ignore[attr-defined]  # public all the same
    dist.init_process_group(backend_for(execution), store=own, rank=rank, world_size=count)
    try:
        yield Ranks(rank, count)
        dist.barrier()
    finally:
        # The replica holds on to the group, and must be gone before it.
        gc.collect()
        dist.destroy_process_group()


def ranks_started() -> int:
    """Return how many processes torchrun has started; one without it."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def check_config(config: RunConfig, count: int) -> None:
    """Refuse a run that cannot be divided evenly."""
    for name in ("batch_size", "curvature_samples"):
        value = getattr(config, name)
        if value is not None and value % count:
            option = f"--{name.replace('_', '-')} {value - value % count or count}"
            raise ConfigError(f"{name} must be a multiple of torchrun's {count} processes, got {value}; try {option}")
    if not config.optimizer.can_be_shared:
        name = config.optimizer.name
        raise ConfigError(f"{name} takes its curvature from one process's graph; start it without torchrun")


def backend_for(execution: Execution) -> str:
    """Return how the processes are to talk: NCCL between GPUs, gloo otherwise, or what was asked for."""
    has_gpu = execution.device != "cpu" and torch.cuda.is_available()
    if execution.backend == "auto":
        return "nccl" if has_gpu else "gloo"
    if execution.backend == "nccl" and not (has_gpu and dist.is_nccl_available()):
        raise ConfigError("--backend nccl needs GPUs and a torch built with NCCL, and here are none; use gloo or auto")
    return execution.backend
