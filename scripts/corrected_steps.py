"""SketchedLBFGS with and without corrected Gauss-Newton steps, on design problems: loss and error over seconds.

    OMP_NUM_THREADS=1 python scripts/corrected_steps.py heat 100 20

The problems are smooth, with exact solutions or none, other coefficients and other seeds than those of the suites.
Seconds are the processor's; looking at the error is not counted.
"""

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from time import process_time
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cao import LeastSquares, SketchedLBFGS

Field = Callable[[Tensor, Tensor], Tensor]
INSIDE, BORDER = 3000, 600
SHARES = (0.1, 0.3, 1.0)


class Problem(NamedTuple):
    """A network, its residuals at fixed points, and its relative error if the solution is known."""

    network: nn.Module
    residuals: Callable[[], tuple[Tensor, ...]]
    error: Callable[[], float]


def slope(values: Tensor, x: Tensor) -> Tensor:
    """Return ∂u/∂x at each point."""
    return torch.autograd.grad(values.sum(), x, create_graph=True)[0]


def posed(
    interior: Callable[[Field, Tensor, Tensor], Tensor], truth: Field, seed: int, *, is_elliptic: bool
) -> Problem:
    """Pose an equation on the unit square, with the truth on the border: on all of it, or without the end of time."""
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    sizes = [2, 20, 20, 20]
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(20, 1)).double()

    def u(x: Tensor, y: Tensor) -> Tensor:
        values: Tensor = network(torch.cat([x, y], dim=1))
        return values

    x, y = (torch.rand(INSIDE, 1, generator=generator).double().requires_grad_() for _ in range(2))
    along = torch.rand(BORDER, 1, generator=generator).double()
    side = torch.arange(BORDER)[:, None] % (4 if is_elliptic else 3)
    border_x = torch.where(side == 0, 0.0, torch.where(side == 1, 1.0, along))
    border_y = torch.where(side == 2, 0.0, torch.where(side == 3, 1.0, along))
    values = truth(border_x, border_y).detach()

    def residuals() -> tuple[Tensor, ...]:
        border = u(border_x, border_y) - values
        return interior(u, x, y) / math.sqrt(INSIDE), border / math.sqrt(BORDER)

    def error() -> float:
        grid = torch.linspace(0, 1, 65, dtype=torch.float64)
        points = torch.cartesian_prod(grid, grid).split(1, dim=1)
        with torch.no_grad():
            return float((u(*points) - truth(*points)).norm() / truth(*points).norm())

    return Problem(network, residuals, error)


def poisson(seed: int) -> Problem:
    """Return −Δu = f with u = eˣ sin πx sin 3πy."""

    def truth(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x) * torch.sin(math.pi * x) * torch.sin(3 * math.pi * y)

    def interior(u: Field, x: Tensor, y: Tensor) -> Tensor:
        values, exact = u(x, y), truth(x, y)
        residual = sum(slope(slope(f, z), z) * sign for f, sign in ((values, 1), (exact, -1)) for z in (x, y))
        return torch.as_tensor(residual)

    return posed(interior, truth, seed, is_elliptic=True)


def heat(seed: int) -> Problem:
    """Return u_t = 0.05 u_xx with three decaying waves."""

    def truth(x: Tensor, t: Tensor) -> Tensor:
        waves = ((1, 1.0), (2, -0.5), (4, 0.7))
        return torch.as_tensor(
            sum(c * torch.sin(m * math.pi * x) * torch.exp(-0.05 * (m * math.pi) ** 2 * t) for m, c in waves)
        )

    def interior(u: Field, x: Tensor, t: Tensor) -> Tensor:
        values = u(x, t)
        return slope(values, t) - 0.05 * slope(slope(values, x), x)

    return posed(interior, truth, seed, is_elliptic=False)


def travelling(seed: int, kind: Literal["burgers", "allen-cahn"]) -> Problem:
    """Return Burgers' equation at ν = 0.02 with a travelling front, or u_t = Du_xx + 4u(1 − u²) with one."""
    viscosity, diffusion, rate = 0.02, 0.01, 4.0

    def truth(x: Tensor, t: Tensor) -> Tensor:
        if kind == "burgers":
            return 0.5 - 0.5 * torch.tanh((x - 0.25 - 0.5 * t) / (4 * viscosity))
        speed = 3 * math.sqrt(diffusion * rate / 2)
        return 0.5 - 0.5 * torch.tanh((x - 0.25 - speed * t) * math.sqrt(rate / (8 * diffusion)))

    def interior(u: Field, x: Tensor, t: Tensor) -> Tensor:
        values = u(x, t)
        across = slope(values, x)
        if kind == "burgers":
            return slope(values, t) + values * across - viscosity * slope(across, x)
        return slope(values, t) - diffusion * slope(across, x) - rate * values * (1 - values**2)

    return posed(interior, truth, seed, is_elliptic=False)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "poisson": poisson,
    "heat": heat,
    "burgers": lambda seed: travelling(seed, "burgers"),
    "allen-cahn": lambda seed: travelling(seed, "allen-cahn"),
}


def run(name: str, seed: int, seconds: float, finish: Literal["auto"] | None) -> None:
    """Minimise, and print a line at each share of the time."""
    problem = PROBLEMS[name](seed)
    optimizer = SketchedLBFGS(
        problem.network.parameters(),
        source=LeastSquares(problem.residuals, problem.network.parameters()),
        max_iter=1,
        finish=finish,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([part.square().sum() for part in problem.residuals()]).sum()
        loss.backward()
        return loss

    begun, paused = process_time(), 0.0
    for share in SHARES:
        while process_time() - begun - paused < share * seconds and not optimizer.status.converged:
            loss = float(optimizer.step(closure).detach())
        now = process_time()
        status = optimizer.status
        print(  # noqa: T201
            f"| {name}, {seed}, {finish} | {now - begun - paused:.0f} s | {loss:.1e} | {problem.error():.1e} | "
            f"{status.evaluations} | {status.corrected_steps} for {status.corrected_cost:.0f} | {status.phase} |",
            flush=True,
        )
        paused += process_time() - now


if __name__ == "__main__":
    for choice in ("auto", None):
        run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), choice)
