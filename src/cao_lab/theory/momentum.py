"""Three orders of momentum and preconditioning, and what momentum through P guarantees whatever the sketches are."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cao_lab.theory.problems import (
    CosineMixture,
    eigenpairs,
    generator,
    integer,
    largest_eigenvalue,
    normal,
    orthonormal,
    uniform,
)
from cao_lab.theory.table import Pairs, Statement, lower_bound, prediction, upper_bound

Order = Literal["update", "gradient", "through"]
"""Momentum on the update, m ← βm + Pg; on the gradient, m ← βm + g and θ ← θ − αPm; through P, m ← P(βm + g)."""

MOMENTA = (0.5, 0.9, 0.99)


def unit_preconditioner(sketch: Float[Tensor, "n n"], damping: float) -> Float[Tensor, "n n"]:
    """Return P = (I + B/η)⁻¹, which leaves the complement of the sketch alone."""
    inverse: Tensor = torch.linalg.inv(identity_like(sketch) + sketch / damping)
    return inverse


def step_matrix(
    hessian: Float[Tensor, "n n"], P: Float[Tensor, "n n"], lr: float, momentum: float, order: Order
) -> Float[Tensor, "2n 2n"]:
    """Return the map (θ, m) → (θ⁺, m⁺) of one step on ½θᵀHθ."""
    eye = identity_like(hessian)
    kept, added, moved = {"update": (eye, P, eye), "gradient": (eye, eye, P), "through": (P, P, eye)}[order]
    buffer = torch.cat([added @ hessian, momentum * kept], dim=1)
    point = torch.cat([eye, torch.zeros_like(eye)], dim=1) - lr * moved @ buffer
    return torch.cat([point, buffer])


def radius(matrix: Float[Tensor, "n n"]) -> float:
    """Return the spectral radius."""
    return float(torch.linalg.eigvals(matrix).abs().max())


def limit_through(
    hessian: Float[Tensor, "n n"], sketch: Float[Tensor, "n n"], damping: float, momentum: float
) -> float:
    """Return the largest stable α of momentum through a fixed P: αH ≺ 2((1 + β)I + B/η)."""
    return 2 / relative_top(hessian, (1 + momentum) * identity_like(sketch) + sketch / damping)


def safe_through(hessian: Float[Tensor, "n n"], sketch: Float[Tensor, "n n"], damping: float, momentum: float) -> float:
    """Return the α up to which energy falls whatever sketches came before: αH ⪯ 2((1 − β)I + B/η)."""
    return 2 / relative_top(hessian, (1 - momentum) * identity_like(sketch) + sketch / damping)


def relative_top(matrix: Float[Tensor, "n n"], metric: Float[Tensor, "n n"]) -> float:
    """Return the least s with A ⪯ sM."""
    inverse = torch.linalg.inv(torch.linalg.cholesky(metric))
    return largest_eigenvalue(inverse @ matrix @ inverse.T)


def identity_like(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the identity of the same size."""
    return torch.eye(len(matrix), dtype=matrix.dtype)


def rows() -> Iterator[Statement]:
    """Check what momentum through P guarantees, for sketches that change and for one that stays."""
    yield from any_sketches()
    yield from one_sketch()


def random_positive(source: torch.Generator, n: int) -> Float[Tensor, "n n"]:
    """Draw a positive definite matrix whose eigenvalues span three decades, up to about 10."""
    vectors = orthonormal(source, n, n)
    values = 10 ** (3 * torch.rand(n, generator=source, dtype=torch.float64) - 2)
    return (vectors * values) @ vectors.T


def random_sketch(source: torch.Generator, n: int) -> Float[Tensor, "n n"]:
    """Draw a positive semidefinite matrix of random rank that need not resemble anything."""
    rank = integer(source, 1, n)
    values = 10 ** (4 * torch.rand(rank, generator=source, dtype=torch.float64) - 2)
    vectors = orthonormal(source, n, rank)
    return (vectors * values) @ vectors.T


def any_sketches() -> Iterator[Statement]:
    """Check on functions that are not convex what holds whatever the sketches are."""
    statement = "Momentum through P: f + αβ‖m‖²/2 falls by ≥ αm⁺ᵀ((1−β)I + B/η − αH/2)m⁺, any sketches"
    problem = "12 cosine mixtures, a random sketch at every step, β = 0.5, 0.9 or 0.99, 100 steps"
    yield lower_bound(statement, problem, [pair for seed in range(12) for pair in decreases(seed)])
    statement = "Momentum through P: mean ‖∇f‖² ≤ 2(1+Λ/η+β²)Δ/(αT(1−β−αL/2))"
    yield upper_bound(statement, "the same, k = 2, α = (1−β)/L", [stationarity_with_momentum(s) for s in range(12)])


def decreases(seed: int) -> Pairs:
    """Yield guaranteed and observed decrease of the energy at each step, at the largest rate with a guarantee."""
    source, momentum = generator(100 + seed), MOMENTA[seed % 3]
    function = CosineMixture.random(5, 10, source)
    above = (function.frequencies.T * function.amplitudes.abs()) @ function.frequencies
    sketches = [random_sketch(source, 5) for _ in range(100)]
    lr = min(safe_through(above, sketch, 1.0, momentum) for sketch in sketches)
    point, buffer = normal(source, 5), torch.zeros(5, dtype=torch.float64)
    for sketch in sketches:
        before = function.value(point) + lr * momentum / 2 * float(buffer @ buffer)
        buffer = unit_preconditioner(sketch, 1.0) @ (momentum * buffer + function.gradient(point))
        point = point - lr * buffer
        after = function.value(point) + lr * momentum / 2 * float(buffer @ buffer)
        slack = (1 - momentum) * identity_like(sketch) + sketch - lr / 2 * above
        guaranteed = lr * float(buffer @ slack @ buffer)
        # Near a minimum both are rounding.
        if guaranteed > 1e-6:
            yield guaranteed, before - after


def stationarity_with_momentum(seed: int, steps: int = 100) -> tuple[float, float]:
    """Return bound and observed mean of ‖∇f‖² with random sketches of rank 2 at every step, η = 1."""
    source, momentum = generator(200 + seed), MOMENTA[seed % 3]
    function = CosineMixture.random(5, 10, source)
    lr, point = (1 - momentum) / function.smoothness, normal(source, 5)
    gap, buffer, total, captured = function.value(point) - function.minimum, torch.zeros_like(point), 0.0, 0.0
    for _ in range(steps):
        pairs = eigenpairs(function.hessian(normal(source, 5)), 2)
        captured = max(captured, float(pairs.values.abs().max()))
        gradient = function.gradient(point)
        total += float(gradient @ gradient) / steps
        P = unit_preconditioner((pairs.vectors * pairs.values.abs()) @ pairs.vectors.T, 1.0)
        buffer = P @ (momentum * buffer + gradient)
        point = point - lr * buffer
    slack = 1 - momentum - lr * function.smoothness / 2
    return 2 * (1 + captured + momentum**2) * gap / (lr * steps * slack), total


def one_sketch() -> Iterator[Statement]:
    """Check the exact range of a sketch that stays, right or wrong."""
    trials = list(fixed_sketches())
    statement = "Momentum through P, one sketch, exact or wrong: stable just for H ≺ (2/α)((1+β)I + B/η), as largest α"
    problem = "100 random H ≻ 0 and unrelated sketches, β = 0.5, 0.9 or 0.99"
    yield prediction(statement, problem, [(limit, measured) for limit, measured, _ in trials], 1e-5)
    statement = "Momentum through P, one sketch: largest stable α ≥ 2(1+β)/L, never below k = 0"
    yield lower_bound(statement, problem, [(plain, measured) for _, measured, plain in trials])


def fixed_sketches() -> Iterator[tuple[float, float, float]]:
    """Yield predicted and measured largest α, and that of k = 0."""
    source = generator(42)
    for trial in range(100):
        n, momentum, damping = integer(source, 2, 5), MOMENTA[trial % 3], 10 ** uniform(source, -1, 1)
        hessian, sketch = random_positive(source, n), random_sketch(source, n)
        limit, P = limit_through(hessian, sketch, damping, momentum), unit_preconditioner(sketch, damping)
        measured = last_stable(partial(step_matrix, hessian, P, momentum=momentum, order="through"), 4 * limit)
        yield limit, measured, 2 * (1 + momentum) / largest_eigenvalue(hessian)


def last_stable(step: Callable[[float], Float[Tensor, "n n"]], high: float) -> float:
    """Return the number up to which the step shrinks, by bisection below one at which it grows."""
    low = 0.0
    for _ in range(42):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(step(middle)) < 1 else (low, middle)
    return low
