"""Five eigenpairs of a whole batch's Hessian: this library against hessian-eigenthings and scipy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn.functional import cross_entropy

from cao import Eigenpairs, Hessian, Lanczos
from cao_lab.bench.rows import Row, Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import Task
from cao_lab.bench.timing import Times, always, interleaved, ratio
from cao_lab.bench.trained import cold_start, trained

COUNT = 5
TOLERANCE = 1e-2
TARGET = 0.7
OURS, SCIPY, SCIPY_ON_OURS, PEER = "cao", "eigsh", "eigsh on our operator", "hessian-eigenthings"
# Not a dependency of the laboratory: it takes part where it is installed.
THEIR_MODULE = "hessian_eigenthings"


@dataclass
class Contestant:
    """A solver, and the eigenpairs it found last."""

    solve: Callable[[], Eigenpairs]
    found: Eigenpairs | None = field(default=None)

    def __call__(self) -> None:
        """Solve from the beginning, forward pass included."""
        self.found = self.solve()


def race_rows(sizes: Sizes) -> Rows:
    """Time all contestants, interleaved, and hold their results to the same residual."""
    task = trained(sizes).task
    contestants = contestants_for(task, sizes.solver_products)
    cases = {name: always(contestant) for name, contestant in contestants.items()}
    # Each case is many products long and is its own warm-up.
    times = interleaved(cases, sizes.race_rounds, untimed=0)
    peers = [name for name in (SCIPY, PEER) if name in times]
    best = min(peers, key=lambda name: estimate(times[name]).value)
    told = "; ".join(description(name, contestants[name], times, task) for name in contestants)
    note = f"top {COUNT} by magnitude, width {sizes.width}, batch {sizes.batch}, against {best}; {told}"
    return [
        ratio(times, OURS, best).row(f"top{COUNT}_time_over_best_peer", note, target=TARGET),
        agreement_row(contestants),
        *[peer_row(times, name) for name in contestants if name != OURS],
    ]


def contestants_for(task: Task, max_products: int) -> dict[str, Contestant]:
    """Return the solvers that are installed; the peers run on an operator that starts from the model every time."""
    contestants = {
        OURS: Contestant(lambda: ours(task, max_products)),
        SCIPY: Contestant(lambda: by_eigsh(plain_product(task), task)),
        SCIPY_ON_OURS: Contestant(lambda: by_eigsh(graph_product(task), task)),
    }
    if find_spec(THEIR_MODULE):
        steps = steps_needed(task, max_products)
        contestants[PEER] = Contestant(lambda: by_eigenthings(task, steps))
    return contestants


def agreement_row(contestants: dict[str, Contestant]) -> Row:
    """Return how far the contestants' eigenvalues lie apart: small residuals alone could be those of other pairs."""
    values = torch.stack([c.found.values.double().cpu() for c in contestants.values() if c.found is not None])
    apart = ((values - values[0]).abs() / values[0].abs()).max()
    note = "largest relative distance of any contestant's eigenvalues from ours, order by order"
    return Row(f"top{COUNT}_eigenvalues_apart", float(apart), None, None, "", note, 1)


def peer_row(times: Times, name: str) -> Row:
    """Return our time over that of one contestant."""
    label = name.replace(" ", "_").replace("-", "_")
    return ratio(times, OURS, name).row(f"top{COUNT}_time_over_{label}", f"our time over that of {name}")


def description(name: str, contestant: Contestant, times: Times, task: Task) -> str:
    """Return seconds, products and the largest true residual of a contestant."""
    assert contestant.found is not None
    residual = largest_residual(contestant.found, task)
    products, seconds = contestant.found.products, estimate(times[name]).value
    return f"{name} {seconds:.2f} s, {products} products, residual {residual:.1e}"


def largest_residual(pairs: Eigenpairs, task: Task) -> float:
    """Return the largest ‖Hv − λv‖/|λ|, from products of its own."""
    images = Hessian(task.loss(), task.params) @ pairs.vectors
    return float(((images - pairs.vectors * pairs.values).norm(dim=0) / pairs.values.abs()).max())


def ours(task: Task, max_products: int) -> Eigenpairs:
    """Solve by this library's Lanczos on the graph of one forward pass."""
    hessian = Hessian(task.loss(), task.params)
    return Lanczos(max_products - 1, count=COUNT, tolerance=TOLERANCE)(hessian, cold_start(task, 0))


def by_eigsh(product: Callable[[Tensor], Tensor], task: Task, tolerance: float = TOLERANCE) -> Eigenpairs:
    """Solve by scipy's implicitly restarted Lanczos."""
    start = cold_start(task, 0)[:, 0]
    products = 0

    def multiply(column: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        return product(torch.from_numpy(column.reshape(-1).astype(np.float32)).to(start.device)).cpu().numpy()

    operator = LinearOperator((len(start), len(start)), matvec=multiply, dtype=np.float32)
    values, vectors = eigsh(operator, k=COUNT, which="LM", tol=tolerance, v0=start.cpu().numpy())
    order = np.argsort(-np.abs(values))
    columns = torch.from_numpy(vectors[:, order].copy()).to(start)
    found = torch.from_numpy(values[order].copy()).to(start)
    return Eigenpairs(found, columns, torch.full_like(found, torch.nan), products)


def plain_product(task: Task) -> Callable[[Tensor], Tensor]:
    """Return the Hessian product that anybody writes first: forward, backward, backward again."""

    def product(column: Tensor) -> Tensor:
        gradient = torch.autograd.grad(task.loss(), task.params, create_graph=True)
        pieces = column.split([p.numel() for p in task.params])
        weights = [piece.view(p.shape) for piece, p in zip(pieces, task.params, strict=True)]
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(gradient, task.params, weights)])

    return product


def graph_product(task: Task) -> Callable[[Tensor], Tensor]:
    """Return the product of this library's Hessian, whose graph is built once."""
    hessian = Hessian(task.loss(), task.params)
    return lambda column: (hessian @ column.unsqueeze(1))[:, 0]


def eigenthings_operator(task: Task) -> Any:
    """Return hessian-eigenthings' Hessian of the batch."""
    theirs = import_module(THEIR_MODULE)
    loss = theirs.supervised_loss(cross_entropy)
    return theirs.HessianOperator(task.model, [(task.inputs, task.targets)], loss)


def by_eigenthings(task: Task, steps: int) -> Eigenpairs:
    """Solve by hessian-eigenthings' Lanczos, told beforehand how many steps it needs."""
    operator, solve = eigenthings_operator(task), import_module(THEIR_MODULE).lanczos
    result = solve(operator, k=COUNT, max_iter=steps, tol=TOLERANCE, reorthogonalize=True, seed=0)
    return Eigenpairs(result.eigenvalues, result.eigenvectors.T, result.residuals, result.iterations)


def steps_needed(task: Task, max_products: int) -> int:
    """Return the fewest steps after which hessian-eigenthings' Lanczos has all residuals below the tolerance.

    It cannot stop by itself, so this is found beforehand and costs it nothing.
    """
    generator = torch.Generator().manual_seed(0)
    operator = eigenthings_operator(task)
    start = torch.randn(operator.size, generator=generator).to(operator.device)
    found = import_module(THEIR_MODULE).lanczos_tridiagonal(operator, start, max_products)
    below = torch.cat([found.betas, found.betas.new_tensor([found.last_beta])])
    for steps in range(COUNT, len(found.alphas) + 1):
        matrix = torch.diag(found.alphas[:steps])
        matrix += torch.diag(found.betas[: steps - 1], 1) + torch.diag(found.betas[: steps - 1], -1)
        values, vectors = torch.linalg.eigh(matrix.double())
        wanted = values.abs().argsort(descending=True)[:COUNT]
        if bool((below[steps - 1] * vectors[-1, wanted].abs() < TOLERANCE * values[wanted].abs()).all()):
            return steps
    return max_products
