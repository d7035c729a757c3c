"""What SketchedLBFGS spends on itself: the share of an iteration that is not evaluating the loss."""

import time
from collections.abc import Callable

import torch

from cao import SketchedLBFGS
from cao.quasi_newton.pairs import Pairs
from cao_lab.bench.rows import Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.solvers.objective import flat
from cao_lab.tasks.pde import EQUATIONS
from cao_lab.tasks.pde.problem import ProblemConfig

RANK, HISTORY = 60, 100
SEED = 0


def solver_rows(sizes: Sizes) -> Rows:
    """Measure the share on convection as in Rathore et al. 2024, with a full history and a full sketch."""
    config = ProblemConfig(width=sizes.solver_width, interior=sizes.solver_points)
    problem = EQUATIONS["convection"].problem(config)
    shares = own_shares(list(problem.params), problem.loss, sizes.solver_iterations)
    note = (
        f"{problem.size:,} parameters, {sizes.solver_points:,} points, rank {RANK}, history {HISTORY}, one evaluation "
        "per iteration; a refresh spends a smaller share on itself"
    )
    return [estimate(shares).row("lbfgs_own_share_of_iteration", note, target=0.15, unit="of the time")]


def own_shares(params: list[torch.Tensor], loss: Callable[[], torch.Tensor], iterations: int) -> list[float]:
    """Return for each iteration what the optimizer took for itself, over that and the time of one evaluation."""
    evaluations: list[float] = []
    optimizer = SketchedLBFGS(params, max_iter=1, max_eval=1000, memory="pairs", history_size=HISTORY)
    fill(optimizer, params)

    def closure() -> torch.Tensor:
        start = time.perf_counter()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        evaluations.append(time.perf_counter() - start)
        return value

    shares = []
    for _ in range(iterations + 1):
        evaluations.clear()
        start = time.perf_counter()
        optimizer.step(closure)
        own = time.perf_counter() - start - sum(evaluations)
        shares.append(own / (own + min(evaluations)))
    return shares[1:]  # The first is slower, and not counted.


def fill(optimizer: SketchedLBFGS, params: list[torch.Tensor]) -> None:
    """Give the optimizer a sketch and pairs, those of a quadratic, as it has them after many iterations."""
    generator = torch.Generator().manual_seed(SEED)
    like = flat(params)
    inverse = Pairs(optimizer.state[params[0]], HISTORY)
    vectors = torch.linalg.qr(torch.randn(len(like), RANK, generator=generator, dtype=like.dtype)).Q.T.contiguous()
    values = torch.logspace(6, 3, RANK, dtype=torch.float64)
    inverse.damping = float(values[-1])
    inverse.adopt(values, vectors)
    for _ in range(HISTORY):
        step = torch.randn(len(like), generator=generator, dtype=like.dtype)
        change = inverse.damping * step + vectors.T @ (values.to(like) * (vectors @ step))
        inverse.learn(step, change)
