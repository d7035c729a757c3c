"""Peak memory of SketchedLBFGS with few points, with many at once, and with many in chunks.

    OMP_NUM_THREADS=1 python scripts/points_memory.py

Each case is a process of its own, tanh 3 × 20 and Poisson's equation, one sketch and two evaluations; the memory that
the process has before its first evaluation is subtracted.
"""

import resource
import subprocess
import sys
from itertools import pairwise

import torch
from torch import Tensor, nn

from cao import GrowingPoints, SketchedLBFGS

CASES = [(4_000, 10_000), (100_000, 100_000), (100_000, 10_000), (100_000, 4_000)]


def slope(values: Tensor, x: Tensor) -> Tensor:
    """Return the gradient at each point."""
    return torch.autograd.grad(values.sum(), x, create_graph=True)[0]


def peak() -> float:
    """Return the most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(count: int, chunk: int) -> None:
    """Take one iteration, and print what it took."""
    hidden = [layer for pair in pairwise([2, 20, 20, 20]) for layer in (nn.Linear(*pair), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(20, 1)).double()

    def draw(n: int, seed: int) -> Tensor:
        return torch.rand(n, 2, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()

    def residuals(x: Tensor) -> Tensor:
        gradient = slope(network(x), x)
        return slope(gradient[:, 0], x)[:, 0] + slope(gradient[:, 1], x)[:, 1] - 1

    source = GrowingPoints(residuals, network.parameters(), draw, count=count, chunk=chunk, most=count)
    optimizer = SketchedLBFGS(network.parameters(), source=source, max_iter=1, refresh=1, rank=8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return source.backward()

    before = peak()
    optimizer.step(closure)
    sys.stdout.write(f"{count:,} points, {chunk:,} at a time: {peak() - before:,.0f} MiB ({source.derivative})\n")


def main() -> None:
    """Measure one case, or all of them, each in a process."""
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), int(sys.argv[2]))
        return
    for case in CASES:
        subprocess.run([sys.executable, __file__, *map(str, case)], check=True)


if __name__ == "__main__":
    main()
