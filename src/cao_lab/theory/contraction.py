"""Theorem 1: how fast the loss contracts under a PL inequality, and when capturing more curvature helps."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from cao.sketch.damped import precondition
from cao_lab.theory.problems import (
    WavyLeastSquares,
    dense_preconditioner,
    eigenpairs,
    generator,
    normal,
    orthonormal,
    random_spectra,
    uniform,
)
from cao_lab.theory.stability import relative_curvature
from cao_lab.theory.stationarity import floor_of
from cao_lab.theory.table import Pairs, Statement, lower_bound, refutation, upper_bound


def loss_factor(pl: float, lr: float, smoothness: float, damping: float, captured: float) -> float:
    """Return 1 − 2μα(1 − αL/2η)/(Λ + η), by which a step multiplies f − f* at most; 1 − γ is its m-th power."""
    return 1 - 2 * pl * lr * (1 - lr * smoothness / (2 * damping)) / (captured + damping)


def quadratic_factor(spectrum: Float[Tensor, " n"], rank: int, damping: float, lr: float) -> float:
    """Return max (1 − αs)² over s between μ_P and L_P: the exact worst factor of a step on f − f*."""
    low, high = relative_curvature(spectrum, rank, damping)
    return max((1 - lr * low) ** 2, (1 - lr * high) ** 2)


def best_lr(spectrum: Float[Tensor, " n"], rank: int, damping: float) -> float:
    """Return 2/(L_P + μ_P), at which that factor is least."""
    return 2 / sum(relative_curvature(spectrum, rank, damping))


def condition_number(spectrum: Float[Tensor, " n"], rank: int, damping: float) -> float:
    """Return κ_P = L_P/μ_P; the best factor of a step is ((κ_P − 1)/(κ_P + 1))²."""
    low, high = relative_curvature(spectrum, rank, damping)
    return high / low


def sufficient_damping(spectrum: Float[Tensor, " n"], rank: int) -> float:
    """Return λₖλᵣ/(λₖ − λᵣ), from which on κ_P never grows up to rank k; λᵣ is the least non-zero curvature."""
    last, least = float(spectrum[rank - 1]), float(spectrum[spectrum > 0][-1])
    return last * least / (last - least)


def rows() -> Iterator[Statement]:
    """Check the contraction on problems with many minimisers."""
    yield from wavy_least_squares()
    yield from least_squares()
    yield from more_rank_at_a_fixed_lr()
    yield from more_rank_at_its_best_lr()
    yield from noisy_contraction()


def wavy_least_squares() -> Iterator[Statement]:
    """Check the worst-case γ on a PL function that is not convex, with stale sketches."""
    statement = "Theorem 1′: f−f* shrinks by (1−2μα(1−αL/2η)/(Λ+η))^m between refreshes"
    yield upper_bound(statement, "20 wavy least squares, 5 of 12 dimensions flat, k = 2, m = 10", wavy_factors())


def wavy_factors() -> Pairs:
    """Yield bound and observation of the loss over each of 10 refresh intervals."""
    for seed in range(20):
        source = generator(seed)
        function = WavyLeastSquares(normal(source, 7, 12))
        damping = 10 ** uniform(source, -1, 1) * function.smoothness / 10
        lr, point = damping / function.smoothness, 2 * normal(source, 12)
        for _ in range(10):
            sketch = eigenpairs(function.hessian(point), 2)
            captured, before = float(sketch.values.abs().max()), function.value(point)
            for _ in range(10):
                point = point - lr * precondition(function.gradient(point), sketch, damping)
            bound = loss_factor(function.pl, lr, function.smoothness, damping, captured) ** 10
            yield bound, function.value(point) / before


def overparameterised(source: torch.Generator, samples: int = 8, n: int = 20) -> Float[Tensor, "m n"]:
    """Draw least-squares data with fewer samples than unknowns and curvatures spread over three decades."""
    scales = math.sqrt(samples) * torch.logspace(1, -0.5, samples, dtype=torch.float64)
    left, right = orthonormal(source, samples, samples), orthonormal(source, n, samples)
    return torch.matmul(left * scales, right.T)


def least_squares() -> Iterator[Statement]:
    """Check the exact factor, and that it is reached, on least squares with a subspace of minimisers."""
    data = overparameterised(generator(9))
    hessian = data.T @ data / len(data)
    spectrum = torch.linalg.eigvalsh(hessian).flip(0).clamp_min(0)
    spectrum = torch.where(spectrum > 1e-10, spectrum, 0)
    for rank in (0, 1, 3):
        damping = 1.0
        lr = best_lr(spectrum, rank, damping)
        predicted = quadratic_factor(spectrum, rank, damping, lr)
        problem = f"least squares, 8 samples, 20 unknowns, k = {rank}, η = 1, best α, 50 steps"
        observed = worst_loss_factor(hessian, rank, damping, lr)
        yield upper_bound(
            "Theorem 1′ (quadratics): a step shrinks f−f* by ((κ_P−1)/(κ_P+1))²", problem, [(predicted, observed)]
        )


def worst_loss_factor(hessian: Float[Tensor, "n n"], rank: int, damping: float, lr: float) -> float:
    """Return the mean factor a step on the loss over 50 steps, from the worst of all starts along eigenvectors."""
    sketch = eigenpairs(hessian, rank)
    values, points = torch.linalg.eigh(hessian)
    points = points[:, values > 1e-10]
    P = dense_preconditioner(sketch.values, sketch.vectors, damping)
    before = (points * (hessian @ points)).sum(dim=0)
    for _ in range(50):
        points = points - lr * P @ (hessian @ points)
    after = (points * (hessian @ points)).sum(dim=0)
    return math.exp(math.log(float((after / before).max())) / 50)


def more_rank_at_a_fixed_lr() -> Iterator[Statement]:
    """Show that at a fixed α that rank 0 bears too, γ falls with k."""
    spectrum = torch.tensor([10.0, 8.0, 4.0], dtype=torch.float64)
    factors = [quadratic_factor(spectrum, rank, 2.0, 2.0 / 10) for rank in (0, 1)]
    claim = "Printed (Theorem 1): γ grows with k (fixed α), as (1−γ) at k = 1 against k = 0"
    yield refutation(upper_bound(claim, "quadratic (10, 8, 4), η = 2, α = η/λ₁", [(factors[0], factors[1])]))
    statement = "Theorem 1″: at a fixed α ≤ η/λ₁, 1−γ never falls as k grows"
    yield lower_bound(statement, "200 random spectra, all k", fixed_lr_factors())


def fixed_lr_factors() -> Pairs:
    """Yield the factors at k and at k + 1 for the same α ≤ η/λ₁."""
    for spectrum, damping, source in random_spectra(10):
        lr = uniform(source, 0, 1) * damping / float(spectrum[0])
        factors = [quadratic_factor(spectrum, rank, damping, lr) for rank in range(len(spectrum))]
        yield from pairwise(factors)


def more_rank_at_its_best_lr() -> Iterator[Statement]:
    """Show that too little damping lets γ fall with k even at the best α, and check the condition that rules it out."""
    spectrum = torch.tensor([10.0, 9.9, 1.0], dtype=torch.float64)
    kappas = [condition_number(spectrum, rank, 0.1) for rank in (0, 1)]
    claim = "Printed (Theorem 1): γ grows with k (best α each), as κ_P at k = 1 against k = 0"
    yield refutation(upper_bound(claim, "quadratic (10, 9.9, 1), η = 0.1", [(kappas[0], kappas[1])]))
    sharper = [condition_number(torch.tensor([top, 1.0, 0.1], dtype=torch.float64), 1, 5.0) for top in (10.0, 100.0)]
    claim = "Printed (Theorem 1): γ grows with sharper top eigenvalues, as κ_P at λ₁ = 100 against λ₁ = 10"
    yield refutation(upper_bound(claim, "quadratic (λ₁, 1, 0.1), k = 1, η = 5", [(sharper[0], sharper[1])]))
    statement = "Theorem 1″: κ_P never grows up to rank k once η ≥ λₖλᵣ/(λₖ−λᵣ)"
    yield upper_bound(statement, "200 random spectra, all k", damped_condition_numbers())


def damped_condition_numbers() -> Pairs:
    """Yield κ_P at k − 1 and at k, at a damping that is sufficient for k."""
    for spectrum, _, source in random_spectra(11):
        for rank in range(1, len(spectrum)):
            damping = sufficient_damping(spectrum, rank) * 10 ** uniform(source, 0, 2)
            yield condition_number(spectrum, rank - 1, damping), condition_number(spectrum, rank, damping)


def noisy_contraction() -> Iterator[Statement]:
    """Check the floor that noise leaves under PL, and contraction without a floor under interpolation."""
    problem = "x²/2 with noise σ = 1, k = 0, α/η = 0.5, limit of E f"
    rate = 0.5
    square = 1.0
    for _ in range(200):
        square = (1 - rate) ** 2 * square + rate**2
    yield refutation(upper_bound("Printed (Theorem 1): E f−f* contracts to 0", problem, [(0.0, square / 2)]))
    floor = rate**2 / 2 / (1 - loss_factor(1.0, rate, 1.0, 1.0, 0.0))
    statement = "Theorem 1‴: E f−f* tends to at most αLσ²(Λ+η)/(4μη²(1−αL/2η))"
    yield upper_bound(statement, problem, [(floor, square / 2)])
    statement = "Theorem 1‴ (relative): E f−f* tends to at most α tr(HPΣP)/(4μ_P(1−αL_P/2))"
    problem = "Λx²/2, captured, with noise σ = 1 at its floor, Λ = 0.1 to 1000, η = 1, α = 0.5"
    yield upper_bound(statement, problem, [captured_floor(top, 1.0, 0.5) for top in (0.1, 1.0, 10.0, 1000.0)])
    statement = "Theorem 1‴: one-sample gradients, interpolation: E f shrinks by 1−2αμ/(Λ+η)+α²LL_max/η²"
    yield upper_bound(statement, "least squares, 8 samples, 20 unknowns, k = 2, 50 points", interpolation_factors())


def captured_floor(top: float, damping: float, lr: float) -> tuple[float, float]:
    """Return the relative bound and E f at its floor, in one captured direction, where μ_P = L_P = Λ/(Λ + η)."""
    gain = 1 / (top + damping)
    relative = top * gain
    bound = lr * top * gain**2 / (4 * relative * (1 - lr * relative / 2))
    return bound, top / 2 * floor_of(1 - lr * relative, lr * gain)


def interpolation_factors() -> Pairs:
    """Yield bound and exact expectation of one step's factor on the loss, over all one-sample gradients."""
    source = generator(12)
    data = normal(source, 8, 20)
    hessian = data.T @ data / 8
    values = torch.linalg.eigvalsh(hessian)
    L, pl, largest = float(values[-1]), float(values[values > 1e-10][0]), float(data.square().sum(dim=1).max())
    sketch = eigenpairs(hessian, 2)
    for _ in range(50):
        damping, point = L * 10 ** uniform(source, -2, 1), normal(source, 20)
        lr = pl * damping**2 / ((L + damping) * L * largest)
        bound = 1 - 2 * lr * pl / (L + damping) + lr**2 * L * largest / damping**2
        gradients = data * (data @ point)[:, None]
        P = dense_preconditioner(sketch.values, sketch.vectors, damping)
        nexts = data @ (point - lr * gradients @ P).T
        yield bound, float(nexts.square().mean() / (data @ point).square().mean())
