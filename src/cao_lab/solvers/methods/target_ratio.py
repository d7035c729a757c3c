"""Gauss–Newton sketched on both sides, its step the longest that keeps a ratio: after DSGNAR (arXiv 2607.02194)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, log

import torch
from jaxtyping import Float
from scipy.fft import dct, idct
from torch import Tensor

from cao_lab.solvers.jacobian import jacobian_of
from cao_lab.solvers.objective import Objective, flat, set_flat
from cao_lab.solvers.price import Products
from cao_lab.tasks.pde.problem import Problem

Vector = Float[Tensor, " n"]
Matrix = Float[Tensor, "m n"]
HALVINGS = 50
"""Of the interval in which the logarithm of a damping is sought."""


@dataclass(frozen=True)
class TargetRatio:
    """Written from a description of the method, not from its code.

    Each step sees the parameters through a randomised cosine transform and the residuals through a count sketch, and
    decomposes what is left by singular values. Of `radii` step lengths about the last one it takes the longest up to
    which the decrease is at least `ratio` of the predicted one, and goes on from there.
    """

    share: float = 0.5
    """Size of the sketch over the number of parameters."""
    least: int = 100
    """Fewer parameters are not sketched."""
    rows: int = 4
    """Residuals kept per dimension of the parameters, where there are more. Its authors keep one, of many more points:
    with 1,330 residuals for 921 parameters that left no step of any length with the ratio asked for."""
    ratio: float = 0.15
    radii: int = 24
    window: float = 10.0
    """The radii reach from the last one divided by this to the last one multiplied by it."""
    first_radius: float = 1.0
    seed: int = 0
    name = "target-ratio"

    def products(self, problem: Problem) -> Products | None:
        """Return the model of a step, and the Jacobian that comes before."""
        jacobian_at = jacobian_of(problem, self.name)
        jacobian, residuals = jacobian_at()
        generator = torch.Generator().manual_seed(self.seed)
        return Products(lambda: self.model(jacobian, residuals, generator), setup=jacobian_at)

    @torch.no_grad()
    def minimize(self, objective: Objective) -> str:
        """Step until the budget is spent, or until the radius has vanished."""
        jacobian_at, generator = jacobian_of(objective.problem, self.name), torch.Generator().manual_seed(self.seed)
        here, loss, radius = flat(objective.params), float(objective.graph()), self.first_radius

        def loss_after(step: Vector) -> float:
            set_flat(objective.params, here + step)
            return float(objective.graph())

        while radius > torch.finfo(here.dtype).tiny:
            set_flat(objective.params, here)
            jacobian, residuals = jacobian_at()
            objective.bill(1, setups=1)
            model = self.model(jacobian, residuals, generator)
            lengths = [radius * self.window ** (2 * i / (self.radii - 1) - 1) for i in range(self.radii)]
            length = longest(lengths, partial(model.ratio, loss=loss, loss_after=loss_after), self.ratio)
            radius = length or radius / self.window
            if length:
                here = here + model.step(model.damping(length))
                loss = loss_after(torch.zeros_like(here))
        return "the radius has vanished"

    def model(self, jacobian: Matrix, residuals: Vector, generator: torch.Generator) -> "Model":
        """Sketch both sides, each anew."""
        size = max(self.least, round(self.share * jacobian.shape[1]))
        rows = torch.cat([jacobian, residuals[:, None]], dim=1)
        if self.rows * size < len(rows):
            rows = count_sketch(rows, self.rows * size, generator)
        lift = Cosines(jacobian.shape[1], size, generator)
        return Model(lift.seen(rows[:, :-1]), rows[:, -1], lift.lifted)


class Model:
    """|Az + b|² for a sketched Jacobian A and residuals b, and its minimisers on spheres."""

    def __init__(self, matrix: Matrix, residuals: Vector, lifted: Callable[[Vector], Vector]) -> None:
        left, self.singular, self.right = torch.linalg.svd(matrix, full_matrices=False)
        self.part, self.lifted = left.T @ residuals, lifted

    def damping(self, length: float) -> float:
        """Return the damping at which a step is so long, or almost none where no step is."""
        high = log(float(self.singular[0]) * float(self.part.norm()) / length + 1e-300)
        low = high - 100.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if float(self.coordinates(exp(middle)).norm()) > length else (low, middle)
        return exp(high)

    def coordinates(self, damping: float) -> Vector:
        """Return a damped step in terms of the right singular vectors."""
        coordinates: Vector = -self.singular / (self.singular.square() + damping) * self.part
        return coordinates

    def step(self, damping: float) -> Vector:
        """Return a damped step."""
        return self.lifted(self.right.T @ self.coordinates(damping))

    def ratio(self, length: float, loss: float, loss_after: Callable[[Vector], float]) -> float:
        """Return by how much the loss falls over what the sketched model promises."""
        damping = self.damping(length)
        left = damping / (self.singular.square() + damping)
        promised = float((self.part.square() * (1 - left.square())).sum())
        return (loss - loss_after(self.step(damping))) / promised if promised > 0 else -1.0


def longest(lengths: list[float], ratio: Callable[[float], float], least: float) -> float | None:
    """Return up to where ratios stay at least so large, interpolated; None if even the first is smaller.

    Lengths after the first that fails need no trial: what counts is the running minimum.
    """
    before: tuple[float, float] | None = None
    for length in lengths:
        now = ratio(length)
        if not now >= least:
            return before and crossing(before, (length, now), least)
        before = length, now
    return lengths[-1]


def crossing(before: tuple[float, float], after: tuple[float, float], least: float) -> float:
    """Return where a line through two ratios, over the logarithm of the length, has fallen so far."""
    (short, high), (long, low) = before, after
    share = (high - least) / (high - low) if low > -float("inf") else 0.0
    return short * exp(share * log(long / short))


def count_sketch(rows: Matrix, size: int, generator: torch.Generator) -> Matrix:
    """Add each row, its sign random, to one of so many."""
    buckets = torch.randint(size, (len(rows),), generator=generator)
    signs = random_signs(len(rows), generator).to(rows)
    return torch.zeros(size, rows.shape[1], dtype=rows.dtype).index_add_(0, buckets, signs[:, None] * rows)


class Cosines:
    """An orthonormal basis of a random subspace: some rows of a cosine transform, after random signs."""

    def __init__(self, length: int, size: int, generator: torch.Generator) -> None:
        self.signs = random_signs(length, generator)
        self.chosen = torch.randperm(length, generator=generator)[:size]

    def seen(self, rows: Matrix) -> Matrix:
        """Return each row's coordinates in the basis."""
        return torch.from_numpy(dct((rows * self.signs).numpy(), norm="ortho"))[:, self.chosen]

    def lifted(self, coordinates: Vector) -> Vector:
        """Return the vector with these coordinates."""
        whole = torch.zeros(len(self.signs), dtype=coordinates.dtype)
        whole[self.chosen] = coordinates
        return torch.from_numpy(idct(whole.numpy(), norm="ortho")) * self.signs


def random_signs(size: int, generator: torch.Generator) -> Vector:
    """Return ones with random signs."""
    return 2 * torch.randint(2, (size,), generator=generator, dtype=torch.float64) - 1


METHODS = (TargetRatio(),)
