"""What each of two processes does where distributed training is out of the ordinary; a new process can import it."""

import copy
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_models import batch, flat_params, loss_of, losses_of_parts, noisy_network, smooth_network
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from cao import CAO

WORLD = 2
SETTINGS = {"rank": 2, "refresh_every": 2, "damping": 0.5, "power_iterations": 3}
STEPS = 4
Outcome = Any


def share(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return this rank's half of a batch."""
    inputs, labels = batch(16, seed=seed)
    return inputs.chunk(WORLD)[rank], labels.chunk(WORLD)[rank]


def refusal_of(action: Callable[[], object]) -> str:
    """Return the name and message of the error that an action ends in, nothing if it ends well."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def brief_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a group of its own for a case that may break it, or leave a process waiting."""
    return dist.new_group(ranks, timeout=datetime.timedelta(seconds=4), backend="gloo")


def warm_up(optimizer: CAO, *, is_over: bool) -> None:
    """Let the next step be one of plain SGD until the warm-up is over."""
    for group in optimizer.param_groups:
        group["rank"], group["scaling"] = (SETTINGS["rank"], "inverse-damping") if is_over else (0, "unit")


def static_graph(kind: str, warmup_steps: int, build: Callable[[], nn.Module], rank: int) -> Outcome:
    """Train under DDP(static_graph=True); return the gradient of each step, and the end."""
    replica = DistributedDataParallel(build(), static_graph=True)
    optimizer = CAO(replica.parameters(), 0.1, **SETTINGS)
    gradients = []
    for step in range(STEPS):
        warm_up(optimizer, is_over=step >= warmup_steps)
        data = share(rank, step)
        loss = loss_of(replica, data)
        sources = {
            "loss": loss,
            "wrapped": lambda data=data: loss_of(replica, data),
            "unwrapped": lambda data=data: loss_of(replica.module, data),
            "parts": lambda data=data: losses_of_parts(replica, data, 4),
        }
        optimizer.zero_grad()
        optimizer.refresh_if_due(sources[kind])
        loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in replica.parameters()]))
        optimizer.step()
    return torch.stack(gradients), flat_params(replica), optimizer.counters.refreshes


def outside_the_group(rank: int) -> Outcome:
    """Name a group that the last process is not in."""
    group = brief_group([0])
    model, data = smooth_network(), share(rank, 0)
    held: list[CAO] = []

    def refresh() -> None:
        held.append(CAO(model.parameters(), 0.1, **SETTINGS, process_group=group))
        held[0].refresh(loss_of(model, data))

    refusal = refusal_of(refresh)
    return refusal, held[0].sketch.values if held and held[0].sketch else []


def copied_group(rank: int) -> Outcome:
    """Copy an optimizer whose group is this process alone: its curvature must stay its own."""
    groups = [brief_group([member]) for member in range(WORLD)]
    model = smooth_network()
    pair = (model, CAO(model.parameters(), 0.1, **SETTINGS, process_group=groups[rank]))
    other, optimizer = copy.deepcopy(pair)
    optimizer.refresh(loss_of(other, share(rank, 0)))
    return optimizer.sketch.values


def models_of_their_own(rank: int, process_group: object) -> Outcome:
    """Train another model in each process, as a search over settings would."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        model = nn.Linear(3, 2).double()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS, process_group=process_group)
    refusal = refusal_of(lambda: optimizer.refresh(loss_of(model, share(rank, 0))))
    return refusal, optimizer.sketch.values if optimizer.sketch else [], flat_params(model)


def models_of_other_sizes(rank: int) -> Outcome:
    model = nn.Linear(3, 2 + rank).double()
    optimizer = CAO(model.parameters(), 0.1, process_group=brief_group())
    return refusal_of(lambda: optimizer.refresh(loss_of(model, share(rank, 0))))


def error_on_one_rank(rank: int, kind: str) -> Outcome:
    """Let the source fail in the second process only; then refresh again, all being well."""
    model, calls = smooth_network(), []
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS, process_group=brief_group())

    def source() -> Tensor:
        calls.append(None)
        if rank == 1 and len(calls) == (1 if kind == "at once" else 3):
            raise OSError("the disk is gone")
        return loss_of(model, share(rank, 0))

    bad = loss_of(model, share(rank, 0)).expand(2) if rank == 1 else source
    first = refusal_of(lambda: optimizer.refresh(bad if kind == "bad source" else source))
    is_due = optimizer.is_refresh_due
    second = refusal_of(lambda: optimizer.refresh(lambda: loss_of(model, share(rank, 0))))
    return first, is_due, second, optimizer.sketch.values if optimizer.sketch else []


def sharded(rank: int, use_orig_params: bool) -> Outcome:
    """Wrap a model in the older FullyShardedDataParallel."""
    model = FullyShardedDataParallel(
        smooth_network(),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        process_group=brief_group(),
    )

    def train() -> None:
        optimizer = CAO(model.parameters(), 0.1, process_group=brief_group())
        optimizer.refresh_if_due(loss_of(model, share(rank, 0)))

    return refusal_of(train)


def zero_redundancy(rank: int) -> Outcome:
    """Let each process hold the optimizer of its own part of the parameters."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(3, 3) for _ in range(WORLD))).double())

    def train() -> None:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=CAO, lr=0.1, **{"rank": 1, "process_group": brief_group()}
        )
        optimizer.optim.refresh_if_due(loss_of(model, share(rank, 0)))

    return refusal_of(train)


def uneven_inputs(rank: int) -> Outcome:
    """Let the first process have fewer batches than the others, so that a refresh falls after its last."""
    replica = DistributedDataParallel(smooth_network(), process_group=brief_group())
    optimizer = CAO(replica.parameters(), 0.1, **SETTINGS, process_group=brief_group())

    def train() -> None:
        with replica.join():
            for step in range(1 if rank == 0 else 3):
                loss = loss_of(replica, share(rank, step))
                optimizer.zero_grad()
                optimizer.refresh_if_due(loss)
                loss.backward()
                optimizer.step()

    return refusal_of(train), flat_params(replica)


def static_cases() -> dict[str, Callable[[int], Outcome]]:
    ways = [("loss", 0), ("loss", 2), ("wrapped", 0), ("wrapped", 2), ("unwrapped", 0), ("parts", 0)]
    settings = [(*way, smooth_network) for way in ways] + [(*way, noisy_network) for way in (ways[0], ways[2])]
    return {
        f"static {kind} {warmup} {build.__name__}": lambda rank, case=(kind, warmup, build): static_graph(*case, rank)
        for kind, warmup, build in settings
    }


CASES: dict[str, Callable[[int], Outcome]] = {
    **static_cases(),
    "outside the group": outside_the_group,
    "copied group": copied_group,
    "own models, shared": lambda rank: models_of_their_own(rank, None),
    "own models, opted out": lambda rank: models_of_their_own(rank, False),
    **{
        f"error {kind}": lambda rank, kind=kind: error_on_one_rank(rank, kind)
        for kind in ("at once", "in a later sweep", "bad source")
    },
    "fsdp": lambda rank: sharded(rank, False),
    "fsdp with original parameters": lambda rank: sharded(rank, True),
    # The last, because a mismatch of collectives ends a process.
    "zero redundancy": zero_redundancy,
    "other sizes": models_of_other_sizes,
    "uneven inputs": uneven_inputs,
}


def run_rank(rank: int, directory: str) -> None:
    """Go through all cases, and leave the outcome of each in a file before the next."""
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    for number, (name, case) in enumerate(CASES.items()):
        outcome: Outcome
        try:
            outcome = case(rank)
        except Exception as error:
            outcome = error
        torch.save((name, outcome), f"{directory}/{rank}-{number}")
        dist.barrier()
    dist.destroy_process_group()
