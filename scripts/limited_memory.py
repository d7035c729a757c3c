"""Self-scaled Broyden updates in limited form beside pairs over the sketch, where a dense matrix is too large.

    OMP_NUM_THREADS=1 python scripts/limited_memory.py front 100 20

Each update is H₊ = H/τ + a matrix of rank two in the span of s and Hy, so that H = γH₀ + WᵀDW with the vectors in the
rows of W and blocks of two by two in D: exact as long as none is dropped. H₀ is the inverse of a damped sketch. When
there is no room left a new sketch is made, and all updates are dropped. SketchedLBFGS makes the first third of the way.
"""

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from time import process_time

import torch
from torch import Tensor, nn

from cao import Damped, HagerZhang, LeastSquares, SketchedLBFGS
from cao.quasi_newton.dense import broyden_coefficients
from cao.quasi_newton.line_search import Point

WIDTH, INSIDE, BORDER, RANK = 50, 800, 200, 128
SHARES = (0.34, 0.6, 1.0)


class Unrolled:
    """H = γH₀ + WᵀDW, to which self-scaled updates are added until there are as many as there is room for."""

    def __init__(self, initial: Callable[[Tensor], Tensor], size: int, capacity: int) -> None:
        self.initial, self.scale, self.count = initial, 1.0, 0
        self.rows = torch.zeros(2 * capacity, size, dtype=torch.float64)
        self.blocks = torch.zeros(capacity, 2, 2, dtype=torch.float64)

    @property
    def is_full(self) -> bool:
        """Whether there is no room left."""
        return self.count == len(self.blocks)

    def __matmul__(self, gradient: Tensor) -> Tensor:
        """Return the product with a gradient."""
        rows, blocks = self.rows[: 2 * self.count], self.blocks[: self.count]
        inner = torch.bmm(blocks, (rows @ gradient).view(-1, 2, 1)).view(-1)
        return self.scale * self.initial(gradient) + inner @ rows

    def learn(self, step: Tensor, change: Tensor, image: Tensor) -> None:
        """Learn a pair, and H⁻¹ times its step."""
        product = self @ change
        along, across, bent = float(step @ change), float(change @ product), float(step @ image)
        if not (along > 1e-16 * float(step.norm() * change.norm()) and across > 0 and bent > 0):
            return
        share, tau = broyden_coefficients(bent / along, across / along, len(step))
        part = share / tau
        block = [
            [1 / along + part * across / along**2, -part / along],
            [-part / along, -1 / (tau * across) + part / across],
        ]
        self.scale, self.blocks = self.scale / tau, self.blocks / tau
        self.rows[2 * self.count], self.rows[2 * self.count + 1] = step, product
        self.blocks[self.count] = self.blocks.new_tensor(block)
        self.count += 1


def slope(values: Tensor, x: Tensor) -> Tensor:
    """Return ∂u/∂x at each point."""
    return torch.autograd.grad(values.sum(), x, create_graph=True)[0]


def truth(kind: str, x: Tensor, t: Tensor) -> Tensor:
    """Return a front of Burgers' equation at ν = 0.01, or heat in three waves."""
    if kind == "front":
        return 0.5 - 0.5 * torch.tanh((x - 0.25 - 0.5 * t) / 0.04)
    waves = [
        c * torch.sin(m * math.pi * x) * torch.exp(-0.05 * (m * math.pi) ** 2 * t)
        for m, c in ((1, 1.0), (2, -0.5), (4, 0.7))
    ]
    return torch.stack(waves).sum(dim=0)


def posed(kind: str, seed: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """Return a network and its residuals on the unit square."""
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    hidden = [layer for pair in pairwise([2, WIDTH, WIDTH, WIDTH]) for layer in (nn.Linear(*pair), nn.Tanh())]
    network = nn.Sequential(*hidden, nn.Linear(WIDTH, 1)).double()
    x, t = (torch.rand(INSIDE, 1, generator=generator).double().requires_grad_() for _ in range(2))
    along = torch.rand(BORDER, 1, generator=generator).double()
    side = torch.arange(BORDER)[:, None] % 3
    border_x = torch.where(side == 0, 0.0, torch.where(side == 1, 1.0, along))
    border_t = torch.where(side == 2, 0.0, along)

    def residuals() -> tuple[Tensor, Tensor]:
        values = network(torch.cat([x, t], dim=1))
        across = slope(values, x)
        carried, viscosity = (values * across, 0.01) if kind == "front" else (0.0, 0.05)
        inside = slope(values, t) + carried - viscosity * slope(across, x)
        border = network(torch.cat([border_x, border_t], dim=1)) - truth(kind, border_x, border_t)
        return inside / math.sqrt(INSIDE), border / math.sqrt(BORDER)

    return network, residuals


class Descent:
    """Steps over an unrolled memory, from where the parameters are."""

    def __init__(self, source: LeastSquares, capacity: int) -> None:
        self.source, self.capacity, self.search = source, capacity, HagerZhang()
        self.position = nn.utils.parameters_to_vector(source.params).detach()
        self.value, self.gradient = self.at(self.position)
        self.decrease, self.vectors = 0.0, torch.randn(len(self.position), RANK, dtype=torch.float64)
        self.memory = self.renewed()

    def at(self, position: Tensor) -> tuple[float, Tensor]:
        """Return the loss and its gradient."""
        nn.utils.vector_to_parameters(position, self.source.params)
        with torch.enable_grad():
            loss = self.source.residuals().square().sum()
        parts = torch.autograd.grad(loss, self.source.params)
        return float(loss.detach()), torch.cat([part.reshape(-1) for part in parts])

    def renewed(self) -> Unrolled:
        """Return an empty memory over a new sketch."""
        nn.utils.vector_to_parameters(self.position, self.source.params)
        pairs = self.source.linearize().eigenpairs(self.vectors)
        self.vectors = pairs.vectors
        damped = Damped.of(pairs.values, pairs.vectors, float(pairs.values.min()))
        return Unrolled(lambda vector: damped @ vector, len(self.position), self.capacity)

    def advance(self) -> None:
        """Take one step."""
        if self.memory.is_full:
            self.memory = self.renewed()
        direction = -(self.memory @ self.gradient)
        start = Point(0.0, self.value, float(direction @ self.gradient))
        seen: dict[float, tuple[float, Tensor]] = {}

        def evaluate(step: float) -> Point:
            value, gradient = seen[step] = self.at(self.position + step * direction)
            return Point(step, value, float(gradient @ direction))

        first = min(1.0, -2.02 * self.decrease / start.slope) if self.decrease > 0 else 1.0
        found = self.search(evaluate, start, first)
        if found is None:
            self.memory = self.renewed()
            return
        value, gradient = seen[found.step]
        self.memory.learn(found.step * direction, gradient - self.gradient, -found.step * self.gradient)
        self.decrease, self.position = self.value - value, self.position + found.step * direction
        self.value, self.gradient = value, gradient


def run(kind: str, seed: int, seconds: float, capacity: int | None) -> None:
    """Minimise, and print the loss at each share of the time; without a capacity by pairs to the end."""
    network, residuals = posed(kind, seed)
    params = list(network.parameters())
    source = LeastSquares(residuals, params)
    optimizer = SketchedLBFGS(params, source=source, max_iter=1, memory="pairs", finish=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([part.square().sum() for part in residuals()]).sum()
        loss.backward()
        return loss.detach()

    begun, losses, iterations = process_time(), [], []
    descent: Descent | None = None
    for share in SHARES:
        count, value = 0, math.nan
        while process_time() - begun < share * seconds:
            if descent:
                descent.advance()
                value = descent.value
            else:
                value = float(optimizer.step(closure))
            count += 1
        losses.append(f"{value:.2e}")
        iterations.append(str(count))
        if capacity and not descent:
            descent = Descent(source, capacity)
    name = f"unrolled, {capacity}" if capacity else "pairs"
    sys.stdout.write(f"{kind} {seed} {name}: {', '.join(losses)}; iterations {', '.join(iterations)}\n")
    sys.stdout.flush()


def main() -> None:
    """Compare pairs with unrolled updates of two capacities."""
    kind, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    for capacity in (None, 300, 900):
        run(kind, seed, seconds, capacity)


if __name__ == "__main__":
    main()
