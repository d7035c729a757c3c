"""Damping at the edge: captured directions that no curvature makes unstable, and how far a sketch may drift."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from cao_lab.theory.momentum import (
    MOMENTA,
    Order,
    identity_like,
    last_stable,
    radius,
    random_positive,
    random_sketch,
    relative_top,
    step_matrix,
    unit_preconditioner,
)
from cao_lab.theory.problems import eigenpairs, generator, integer, largest_eigenvalue, normal, orthonormal, uniform
from cao_lab.theory.table import Pairs, Statement, lower_bound, prediction, upper_bound


def edge_damping(lr: float, momentum: float, order: Order) -> float:
    """Return η = 1/α for momentum through P, and (1 + β)/α for momentum on the update."""
    return 1 / lr if order == "through" else (1 + momentum) / lr


def edge_step(
    hessian: Float[Tensor, "n n"], sketch: Float[Tensor, "n n"], lr: float, momentum: float, order: Order = "through"
) -> Float[Tensor, "2n 2n"]:
    """Return the map of one step with damping at the edge."""
    P = unit_preconditioner(sketch, edge_damping(lr, momentum, order))
    return step_matrix(hessian, P, lr, momentum, order)


def tolerated(sketch: Float[Tensor, "n n"], lr: float, momentum: float) -> Float[Tensor, "n n"]:
    """Return 2B + 2(1 + β)/α I, above which a Hessian makes edge damping with this sketch unstable."""
    return 2 * sketch + 2 * (1 + momentum) / lr * identity_like(sketch)


def tolerated_drift(next_value: float, lr: float, momentum: float) -> float:
    """Return 2(1 + β)/α − λₖ₊₁, by which the Hessian may grow before an exact sketch of it is unstable."""
    return 2 * (1 + momentum) / lr - next_value


def lr_by_residual(least: float, left_out: float, residual: float, momentum: float) -> float:
    """Return 2(1 + β)/c for the larger c with (λₖ − ρ + c)(c − λ⊥) = ρ²: any smaller α is stable."""
    kept = least - residual
    edge = (left_out - kept + math.hypot(kept + left_out, 2 * residual)) / 2
    return 2 * (1 + momentum) / edge


def noisy_limit(momentum: float, spread: float) -> float:
    """Return the αλ below which E x² shrinks outside the sketch, if batches' curvatures have variance (c/b)λ²."""
    return 2 * (1 + momentum) / (1 + spread * (1 + momentum) / (1 - momentum))


def rows() -> Iterator[Statement]:
    """Check edge damping on captured directions, on stale sketches, the bounds on drift, and what noise leaves."""
    yield from captured_exactly()
    yield from stale_sketches()
    yield from drift()
    yield from noise()


def captured_exactly() -> Iterator[Statement]:
    """Check how fast a captured direction shrinks, from a third of the rate 1/α to a million times beyond."""
    problem = "αλ from 0.3 to 10⁶, β = 0.5, 0.9 and 0.99"
    trials = [(momentum, c) for momentum in MOMENTA for c in torch.logspace(-0.5, 6, 27, dtype=torch.float64).tolist()]
    statement = "Edge damping, momentum through P, η = 1/α: a captured direction shrinks by √(β/(1+αλ)) per step"
    pairs = [(math.sqrt(b / (1 + c)), captured_factor(c, b, "through")) for b, c in trials]
    yield prediction(statement, problem, pairs, 1e-6)
    statement = "Edge damping without momentum, η = 1/α: a captured direction shrinks by 1/(1+αλ) per step"
    pairs = [(1 / (1 + c), captured_factor(c, 0.0, "through")) for _, c in trials]
    yield prediction(statement, "αλ from 0.3 to 10⁶", pairs, 1e-6)
    statement = "Edge damping, momentum on the update, η = (1+β)/α: a captured direction shrinks by √β per step"
    yield prediction(statement, problem, [(math.sqrt(b), captured_factor(c, b, "update")) for b, c in trials], 1e-6)
    statement = "Edge damping, Nesterov through P, η = 1/α: a captured direction shrinks, as factor per step"
    yield upper_bound(statement, problem, [(1.0, nesterov_factor(c, b)) for b, c in trials])


def captured_factor(curvature: float, momentum: float, order: Order) -> float:
    """Return the factor per step along an exactly captured direction, at α = 1."""
    hessian = torch.full((1, 1), curvature, dtype=torch.float64)
    return radius(edge_step(hessian, hessian, 1.0, momentum, order))


def nesterov_factor(curvature: float, momentum: float) -> float:
    """Return the same for m ← P(βm + g), θ ← θ − αP(g + βm)."""
    gain = 1 / (1 + curvature)
    buffer = torch.tensor([gain * curvature, gain * momentum], dtype=torch.float64)
    point = torch.tensor([1 - gain * curvature, 0.0], dtype=torch.float64) - gain * momentum * buffer
    return radius(torch.stack([point, buffer]))


def stale_sketches() -> Iterator[Statement]:
    """Check which Hessians a sketch that stays can bear, related to it or not."""
    statement = "Edge damping: one sketch is stable just for H ≺ 2B + 2(1+β)/α, as largest factor on H"
    yield prediction(statement, "60 random H and sketches, momentum through P and on the update", stale_trials(), 1e-5)


def stale_trials() -> Pairs:
    """Yield predicted and measured factor by which H can be multiplied until a step with a fixed sketch grows."""
    source = generator(50)
    for trial in range(60):
        n, momentum, lr = integer(source, 2, 5), MOMENTA[trial % 3], 10 ** uniform(source, -1, 1)
        hessian, sketch = random_positive(source, n), random_sketch(source, n)
        order: Order = "update" if trial % 2 else "through"
        predicted = 1 / relative_top(hessian, tolerated(sketch, lr, momentum))
        step = partial(multiplied_step, hessian, sketch, lr, momentum, order=order)
        yield predicted, last_stable(step, 4 * predicted)


def multiplied_step(
    hessian: Float[Tensor, "n n"],
    sketch: Float[Tensor, "n n"],
    lr: float,
    momentum: float,
    factor: float,
    *,
    order: Order,
) -> Float[Tensor, "2n 2n"]:
    """Return the map of one step when the Hessian has grown by a factor since it was sketched."""
    return edge_step(factor * hessian, sketch, lr, momentum, order)


def drift() -> Iterator[Statement]:
    """Check by how much a Hessian may grow after an exact sketch, and how residuals tell."""
    statement = "Drift: an exact sketch stays stable while H ⪯ Hᵣ + δI, δ < 2(1+β)/α − λₖ₊₁, as largest stable δ"
    source = generator(51)
    trials = [grown(source, trial) for trial in range(60)]
    yield lower_bound(statement, "60 random Hᵣ and growths, momentum through P", trials)
    worst = grown(source, 1, is_worst=True)
    yield lower_bound(statement, "the same, growth along the first direction left out", [worst])
    statement = "Drift by residual: α < 2(1+β)/c is stable, (λₖ−ρ+c)(c−λ⊥) = ρ², ρ = ‖HV−VΛ‖, as largest stable α"
    problem = "60 random Hᵣ and changes, momentum through P"
    yield lower_bound(statement, problem, [residual_trial(source, trial) for trial in range(60)])
    statement = "Drift by one product: E k‖Hq−Bq‖² = ‖HV−VΛ‖²_F for a random unit mix q of the sketch"
    yield prediction(statement, "n = 8, k = 3, 20,000 mixes", [mixed_residual(source)], 0.02)


def exact_sketch(hessian: Float[Tensor, "n n"], rank: int) -> Float[Tensor, "n n"]:
    """Return B of the top pairs."""
    pairs = eigenpairs(hessian, rank)
    return (pairs.vectors * pairs.values) @ pairs.vectors.T


def grown(source: torch.Generator, trial: int, *, is_worst: bool = False) -> tuple[float, float]:
    """Return the tolerated and the largest stable growth in one direction, at half the rate of the exact sketch."""
    n, momentum = integer(source, 3, 6), MOMENTA[trial % 3]
    rank, hessian = integer(source, 1, n - 1), random_positive(source, n)
    pairs = eigenpairs(hessian, rank + 1)
    change = torch.outer(pairs.vectors[:, rank], pairs.vectors[:, rank]) if is_worst else random_sketch(source, n)
    change = change / largest_eigenvalue(change)
    lr, sketch = (1 + momentum) / float(pairs.values[rank]), exact_sketch(hessian, rank)
    high = 4 * largest_eigenvalue(tolerated(sketch, lr, momentum))
    measured = last_stable(lambda size: edge_step(hessian + size * change, sketch, lr, momentum), high)
    return tolerated_drift(float(pairs.values[rank]), lr, momentum), measured


def residual_trial(source: torch.Generator, trial: int) -> tuple[float, float]:
    """Return the α that the residual of an old sketch allows, and the largest stable one."""
    n, momentum = integer(source, 3, 6), MOMENTA[trial % 3]
    rank, old = integer(source, 1, n - 1), random_positive(source, n)
    hessian = old + 10 ** uniform(source, -2, 1) * random_positive(source, n)
    pairs = eigenpairs(old, n)
    inside, outside = pairs.vectors[:, :rank], pairs.vectors[:, rank:]
    residual = float(torch.linalg.matrix_norm(hessian @ inside - inside * pairs.values[:rank], ord=2))
    left_out = largest_eigenvalue(outside.T @ hessian @ outside)
    predicted = lr_by_residual(float(pairs.values[rank - 1]), left_out, residual, momentum)
    sketch = exact_sketch(old, rank)
    return predicted, last_stable(lambda lr: edge_step(hessian, sketch, lr, momentum), 1e3 * predicted)


def mixed_residual(source: torch.Generator) -> tuple[float, float]:
    """Return ‖HV − VΛ‖²_F and the mean of k‖Hq − Bq‖² over random unit vectors q in the span of V."""
    hessian, vectors, values = random_positive(source, 8), orthonormal(source, 8, 3), normal(source, 3).abs()
    mixes = normal(source, 3, 20_000)
    residuals = hessian @ vectors - vectors * values
    products = residuals @ (mixes / mixes.norm(dim=0))
    return float(residuals.square().sum()), 3 * float(products.square().sum(dim=0).mean())


def noise() -> Iterator[Statement]:
    """Check the limits that batches of different curvature set, through the exact recursion of second moments."""
    spreads = torch.logspace(-3, 2, 11, dtype=torch.float64).tolist()
    trials = [(momentum, spread) for momentum in MOMENTA for spread in spreads]
    statement = "Noisy curvature, not captured: E x² shrinks just for αλ < 2(1+β)/(1 + (c/b)(1+β)/(1−β))"
    pairs = [(noisy_limit(b, c), last_stable(partial(second_moments, momentum=b, spread=c), 4.0)) for b, c in trials]
    yield prediction(statement, "c/b from 0.001 to 100, β = 0.5, 0.9 and 0.99", pairs, 1e-6)
    for order in ("through", "update"):
        bound = "1" if order == "through" else "(1−β)/(1+β)"
        damping = "1/α, momentum through P" if order == "through" else "(1+β)/α, momentum on the update"
        statement = f"Noisy curvature, captured, η = {damping}: every αλ shrinks for c/b ≤ {bound}, as largest c/b"
        yield lower_bound(statement, "αλ from 0.3 to 10⁶, β = 0.5, 0.9 and 0.99", bearable_spreads(order))


def bearable_spreads(order: Order) -> Pairs:
    """Yield the c/b up to which a captured direction of any curvature is stable, and that for one curvature."""
    for momentum in MOMENTA:
        promised = 1.0 if order == "through" else (1 - momentum) / (1 + momentum)
        for curvature in torch.logspace(-0.5, 6, 14, dtype=torch.float64).tolist():
            gain = 1 / (1 + curvature / edge_damping(1.0, momentum, order))
            kept = gain * momentum if order == "through" else momentum
            yield promised, last_stable(partial(second_moments, curvature * gain, kept), 1e3)


def second_moments(rate: float, momentum: float, spread: float) -> Float[Tensor, "3 3"]:
    """Return the map of E(x², xx₋, x₋²) under x⁺ = (1 + β − s)x − βx₋, where s has the variance (c/b)s²."""
    mean = 1 + momentum - rate
    square = mean**2 + spread * rate**2
    rows = [[square, -2 * mean * momentum, momentum**2], [mean, -momentum, 0.0], [1.0, 0.0, 0.0]]
    return torch.tensor(rows, dtype=torch.float64)
