"""What each of two processes does in the test of distributed L-BFGS; a module that a new process can import."""

from typing import Any

import torch
import torch.distributed as dist
from small_models import flat_params, smooth_network
from torch import Tensor, nn

from cao import GrowingPoints, LeastSquares, SketchedLBFGS

WORLD = 2


def fitted(model: nn.Module, points: Tensor, largest_jacobian: int = 1 << 25, **settings: Any) -> SketchedLBFGS:
    """Fit a network to a function of the points by one step, and return the optimizer."""
    params = list(model.parameters())

    def residuals() -> Tensor:
        difference: Tensor = model(points) - points[:, :2].sin()
        return difference / len(points) ** 0.5

    source = LeastSquares(residuals, params, max_jacobian_size=largest_jacobian)
    optimizer = SketchedLBFGS(params, source=source, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = residuals().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer


def solve(points: Tensor) -> Tensor:
    """Take eight iterations, and return where they led."""
    model = smooth_network()
    # The rank is that of the whole matrix, so that every eigensolver finds the same sketch.
    optimizer = fitted(model, points, rank=26, refresh=3, max_iter=8, max_eval=99)
    assert optimizer.status.refreshes == 3
    return flat_params(model)


def points(count: int = 24) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# So many points for 26 parameters that the order of a sum stays a matter of rounding.
MANY = 240


def error_of_a_step(rank: int) -> str:
    """Let the closure fail in one process only, and return what this one is told."""
    theta = torch.ones(2, requires_grad=True)

    def closure() -> Tensor:
        if rank == 1:
            raise ArithmeticError("this process cannot")
        theta.grad = torch.ones(2)
        return theta.sum()

    try:
        SketchedLBFGS([theta]).step(closure)
    except (ArithmeticError, RuntimeError) as error:
        return str(error)
    return "no error"


def refreshes_with_a_jacobian_in_one_process(rank: int) -> int:
    """Let one process form a Jacobian and the other make products, which differ in price and in largest rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    inputs, largest_jacobian = points().chunk(WORLD)[rank], 0 if rank else 1 << 25
    return fitted(model, inputs, largest_jacobian, max_iter=1_000, max_eval=1_000).status.refreshes


def solution_of_rank(rank: int, directory: str, world: int) -> None:
    """Take eight iterations on this rank's share of the points, in as many processes as are asked for."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    torch.save(solve(points(MANY).chunk(world)[rank]), f"{directory}/rank{rank}")
    dist.barrier()
    dist.destroy_process_group()


def growing(rank: int) -> list[tuple[int, float, float]]:
    """Let points grow that each process draws for itself, and return what was compared."""
    model = smooth_network()
    first, second = (
        GrowingPoints(
            lambda x: model(x) - x[:, :2].sin(),
            model.parameters(),
            lambda n, seed: torch.rand(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
            count=6,
            most=24,
            factor=factor,
        )
        for factor in (1.001, 1e9)
    )
    optimizer = SketchedLBFGS(model.parameters(), source=first)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return first.backward()

    for _ in range(4):
        optimizer.step(closure)
        if first.grow():
            optimizer.resampled()
    second.grow()
    return [tuple(each) for each in (*first.comparisons, *second.comparisons)]


def run_rank(rank: int, directory: str) -> None:
    """Do all of the above on this rank's half of the points, and leave what came of it in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    solution = solve(points(MANY).chunk(WORLD)[rank])
    outcome = solution, error_of_a_step(rank), refreshes_with_a_jacobian_in_one_process(rank), growing(rank)
    torch.save(outcome, f"{directory}/rank{rank}")
    dist.barrier()  # A process that leaves first may abort the other.
    dist.destroy_process_group()
