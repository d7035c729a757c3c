"""What CAO sends between processes: collectives counted as they happen, and the formulas that they obey.

    python scripts/traffic_table.py

prints the table of docs/scale-details.md, for a model of 10⁹ parameters. The tests hold the formulas to what is sent.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from cao.autograd import gathering

# How often a ring sends what it is given, less one part in as many as there are processes; and how often a tree is
# climbed.
SENDINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind and size."""

    kind: str
    """all_reduce, all_gather or reduce_scatter."""
    size: int
    """Bytes of the whole that is reduced, gathered or scattered."""
    count: int = 1


Traffic = Sequence[Collectives]


def bytes_sent(traffic: Traffic, ranks: int) -> float:
    """Return what each process sends where the backend uses rings, as for large tensors."""
    return sum(SENDINGS[each.kind] * each.size * each.count for each in traffic) * (ranks - 1) / ranks


def latencies(traffic: Traffic, ranks: int) -> int:
    """Return how many messages have to wait for one another where the backend uses trees, as for small tensors."""
    return sum(SENDINGS[each.kind] * each.count for each in traffic) * math.ceil(math.log2(ranks))


@contextmanager
def counted() -> Iterator[list[Collectives]]:
    """Count the library's own collectives; those of DistributedDataParallel and fully_shard pass by."""
    seen: list[Collectives] = []
    with ExitStack() as stack:
        for module, kind in ((dist, "all_reduce"), (gathering, "all_gather"), (gathering, "reduce_scatter")):
            stack.enter_context(patch.object(module, kind, recorded(getattr(module, kind), kind, seen)))
        yield seen


def recorded(collective: Any, kind: str, seen: list[Collectives]) -> Any:
    """Return the collective, keeping a list of what passes through it."""

    def call(*tensors: Any, **options: Any) -> Any:
        whole = tensors[1] if kind == "reduce_scatter" else tensors[0]
        seen.append(Collectives(kind, whole.numel() * whole.element_size()))
        return collective(*tensors, **options)

    return call


def replicated_refresh(n: int, rank: int, iterations: int = 3) -> Traffic:
    """Return what a refresh by subspace iteration sends where every process has all n float32 parameters."""
    blocks = iterations + 1
    return [*agreement(blocks), Collectives("all_reduce", 4 * n * rank, blocks)]


def sharded_refresh(n: int, rank: int, iterations: int = 3, groups: int = 1) -> Traffic:
    """Return what a refresh by subspace iteration sends where fully_shard has sharded float32 parameters.

    They are in equal groups, gathered one at a time. A block of columns costs a forward and a backward pass, and each
    column another two.
    """
    blocks = iterations + 1
    passes = blocks * (1 + rank) * groups
    return [
        *agreement(blocks),
        Collectives("all_gather", 4 * n // groups, passes),
        Collectives("reduce_scatter", 4 * n // groups, passes),
        # Each basis but the last is a rough one, from one matrix of inner products; then the Ritz values, and what the
        # new sketch has in common with the old one.
        Collectives("all_reduce", 8 * rank**2, iterations + 4),
        Collectives("all_reduce", 8 * rank),  # The residuals.
        Collectives("all_reduce", 4),  # Whether all is finite.
    ]


def agreement(blocks: int) -> Traffic:
    """Return what it costs to see that no process has failed, before the first product and after each block."""
    return [Collectives("all_reduce", 24, 2), Collectives("all_reduce", 4, 1 + blocks)]


def sharded_step(rank: int) -> Traffic:
    """Return what the projections of a step send, beyond what a step of SGD does."""
    return [Collectives("all_reduce", 4 * rank)]


def sgd_step(n: int, *, is_sharded: bool) -> Traffic:
    """Return what SGD sends: one all-reduce of the gradient, or two gatherings of the parameters and a scattering."""
    if not is_sharded:
        return [Collectives("all_reduce", 4 * n)]
    return [Collectives("all_gather", 4 * n, 2), Collectives("reduce_scatter", 4 * n)]


def table(n: int, rank: int, every: int, ranks: Sequence[int]) -> str:
    """Return a table of what a step of SGD, a step of CAO and a refresh send per process."""
    lines = [
        "| parameters | ranks | SGD step | CAO step, besides | refresh | refresh / SGD steps in between |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for is_sharded, name in ((False, "replicated (DDP)"), (True, "sharded (FSDP2)")):
        sgd = sgd_step(n, is_sharded=is_sharded)
        step = sharded_step(rank) if is_sharded else []
        refresh = (sharded_refresh if is_sharded else replicated_refresh)(n, rank)
        for count in ranks:
            share = bytes_sent(refresh, count) / bytes_sent(sgd, count) / every
            cells = [f"{cell(each, count)}" for each in (sgd, step, refresh)]
            lines.append(f"| {name} | {count} | {' | '.join(cells)} | {share:.1%} |")
    return "\n".join(lines)


def cell(traffic: Traffic, ranks: int) -> str:
    """Return bytes and latencies as the table shows them."""
    size = bytes_sent(traffic, ranks)
    shown = f"{size / 1e9:.2f} GB" if size >= 1e6 else f"{size:.0f} B"
    return f"{shown}, {latencies(traffic, ranks)}" if traffic else "–"


if __name__ == "__main__":
    sys.stdout.write(table(n=10**9, rank=8, every=400, ranks=(8, 64, 256, 1024)) + "\n")
