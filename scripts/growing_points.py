"""Points that grow, beside fixed ones, on design problems: loss, error and points over seconds of the processor.

    OMP_NUM_THREADS=1 python scripts/growing_points.py front 100 30

A front, a bump and a peak by their equations, and waves by their values; tanh 3 × 20, sums of mean squares, float64,
Adam for 200 steps first.
"""

import math
import sys
from itertools import pairwise
from time import process_time

import torch
from torch import Tensor, nn

from cao import GrowingPoints, SketchedLBFGS

ITERATIONS = 20
# Widths: of the front of Burgers' equation, by its viscosity, of a bump that is carried along, of a peak.
VISCOSITY, BUMP, PEAK = 0.006, 0.05, 0.06


def slope(values: Tensor, x: Tensor) -> Tensor:
    """Return ∂u/∂x at each point."""
    return torch.autograd.grad(values.sum(), x, create_graph=True)[0]


def truth(kind: str, x: Tensor, t: Tensor) -> Tensor:
    """Return the solution: a front, a bump on its way, a peak, or waves of several lengths."""
    if kind == "front":
        return 0.5 - 0.5 * torch.tanh((x - 0.25 - 0.5 * t) / (4 * VISCOSITY))
    if kind == "bump":
        return torch.exp(-(((x - 0.2 - 0.6 * t) / BUMP) ** 2))
    if kind == "peak":
        return torch.exp(-((x - 0.35) ** 2 + (t - 0.6) ** 2) / PEAK**2)
    return torch.sin(4 * math.pi * x * t) + 0.3 * torch.sin(15 * math.pi * x) * torch.cos(9 * math.pi * t)


def equation(kind: str, network: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """Return what must vanish inside."""
    values: Tensor = network(torch.cat([x, t], dim=1))
    if kind == "waves":
        return values - truth(kind, x, t)
    across = slope(values, x)
    if kind == "front":
        return slope(values, t) + values * across - VISCOSITY * slope(across, x)
    if kind == "bump":
        return slope(values, t) + 0.6 * across
    source = slope(slope(truth(kind, x, t), x), x) + slope(slope(truth(kind, x, t), t), t)
    return 0.01 * (slope(across, x) + slope(slope(values, t), t) - source)


def draw(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points inside, and a fifth of them at the start of the second coordinate and on both sides."""
    generator = torch.Generator().manual_seed(seed)
    x, t = (torch.rand(n, 1, generator=generator).double().requires_grad_() for _ in range(2))
    along = torch.rand(max(n // 5, 3), 1, generator=generator).double()
    side = torch.arange(len(along))[:, None] % 3
    border_x = torch.where(side == 0, 0.0, torch.where(side == 1, 1.0, along))
    return x, t, border_x, torch.where(side == 2, 0.0, along)


def run(kind: str, seed: int, seconds: float, count: int, factor: float | None) -> None:
    """Minimise with points that grow by a factor, or with as many as at first, and print how it goes."""
    torch.manual_seed(seed)
    hidden = [layer for pair in pairwise([2, 20, 20, 20]) for layer in (nn.Linear(*pair), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(20, 1)).double()
    params = list(network.parameters())

    def residuals(points: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, t, border_x, border_t = points
        border = network(torch.cat([border_x, border_t], dim=1)) - truth(kind, border_x, border_t)
        return equation(kind, network, x, t), border

    source = GrowingPoints(
        residuals, params, lambda n, s: draw(n, 1000 * seed + s), count=count, factor=factor or 1e300, most=16_000
    )
    optimizer = SketchedLBFGS(params, source=source, max_iter=ITERATIONS)
    adam = torch.optim.Adam(params)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = source.loss()
        loss.backward()
        return loss.detach()

    def error() -> float:
        grid = torch.linspace(0, 1, 101, dtype=torch.float64)
        x, t = torch.cartesian_prod(grid, grid).split(1, dim=1)
        with torch.no_grad():
            exact = truth(kind, x, t)
            return float((network(torch.cat([x, t], dim=1)) - exact).norm() / exact.norm())

    for _ in range(200):
        adam.step(closure)
    begun, paused, said = process_time(), 0.0, []
    shares = iter((0.1, 0.3, 0.6, 1.0))
    share = next(shares)
    while True:
        optimizer.step(closure)
        if source.grow():
            optimizer.resampled()
        now = process_time()
        if now - begun - paused > share * seconds:
            last = source.comparisons[-1]
            said.append(f"{last.fitted:.1e} {last.held_out:.1e} {error():.1e} ({source.count:,})")
            paused += process_time() - now
            if share == 1.0:
                break
            share = next(shares)
    name = f"from {count:,} by {factor}" if factor else f"fixed {count:,}"
    sys.stdout.write(f"{kind} {seed} {name}: {' | '.join(said)} [{optimizer.status.memory}]\n")
    sys.stdout.flush()


def main() -> None:
    """Print fitted, held-out, error and points at a tenth, 30 %, 60 % and all of the time, for each way."""
    kind, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    ways = [(int(count), float(factor) or None) for count, factor in (way.split(":") for way in sys.argv[4:])]
    for count, factor in ways or [(500, None), (2000, None), (8000, None), (500, 2.0)]:
        run(kind, seed, seconds, count, factor)


if __name__ == "__main__":
    main()
