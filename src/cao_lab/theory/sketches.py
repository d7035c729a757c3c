"""Stale, noisy and unconverged sketches: how much curvature the step still meets."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cao import SubspaceIteration
from cao.linalg.columns import Eigenpairs
from cao_lab.theory.network import trained_network
from cao_lab.theory.problems import (
    CosineMixture,
    dense_preconditioner,
    eigenpairs,
    generator,
    integer,
    largest_eigenvalue,
    normal,
    orthonormal,
    uniform,
)
from cao_lab.theory.table import Pairs, Statement, lower_bound, upper_bound

TRIALS = 200


def exact_curvature(values: Float[Tensor, " k"], residual: float, damping: float) -> float:
    """Return max(λ₁/(λ₁ + η), λ⊥/η), the largest eigenvalue of P^½HP^½ when the sketch is exact."""
    top = float(values.max()) if len(values) else 0.0
    return max(top / (top + damping) if top > 0 else 0.0, residual / damping)


def curvature_with_error(values: Float[Tensor, " k"], residual: float, damping: float, error: float) -> float:
    """Bound λmax(P̂^½HP̂^½) for the exact sketch of an Ĥ with H ⪯ Ĥ + δI: the price of δ is δ/η."""
    return exact_curvature(values, residual, damping) + error / damping


def curvature_at_angle(true: Float[Tensor, " n"], used: Float[Tensor, " k"], sine: float, damping: float) -> float:
    """Bound λmax(P̂^½HP̂^½) when the sketched subspace is off by an angle; true values descend, used are ≥ 0."""
    top, residual = float(true[0]), max(float(true[len(used)]), 0.0)
    least, most = float(used.min()), float(used.max())
    seen = top * ((1 - sine**2) / (least + damping) + sine**2 / damping)
    coupling = math.sqrt(top * residual) * sine * most / (damping * (most + damping))
    return max(seen, residual / damping) + coupling


def curvature_with_residuals(pairs: Eigenpairs, residual: float, damping: float) -> float:
    """Bound λmax(P̂^½HP̂^½) for Ritz pairs by magnitude: each residual r = ‖Hv − λv‖ adds r²/(η(|λ| + η)) in squares."""
    coupling = pairs.residuals.square() / (damping * (pairs.values.abs() + damping))
    return exact_curvature(pairs.values, residual, damping) + float(coupling.sum().sqrt())


def relative_sharpness(hessian: Float[Tensor, "n n"], P: Float[Tensor, "n n"]) -> float:
    """Return λmax(P^½HP^½) by a Cholesky factor of P, which has the same eigenvalues."""
    factor = torch.linalg.cholesky(P)
    return largest_eigenvalue(factor.T @ hessian @ factor)


def rows() -> Iterator[Statement]:
    """Check what a wrong sketch costs."""
    statement = "Any sketch: λmax(P̂^½HP̂^½) ≤ L/η, never worse than k = 0"
    yield upper_bound(statement, f"{TRIALS} random H of both signs, unrelated sketch", unrelated())
    statement = "Noisy sketch: λmax(P̂^½HP̂^½) ≤ max(λ̂₁/(λ̂₁+η), λ̂⊥/η) + δ/η"
    yield upper_bound(statement, f"{TRIALS} random H of both signs, exact sketch of H + E, magnitude", noisy())
    yield upper_bound(statement, "the same, k = 1, E = −δvvᵀ on the first direction left out", [sharp_noise()])
    yield from tilted()
    statement = "Davis-Kahan: sin θ ≤ δ/(λₖ − λₖ₊₁ − δ)"
    yield upper_bound(statement, f"{TRIALS} random H and E, δ < gap/2", subspace_errors())
    statement = "Unconverged sketch: … ≤ max(λ̂₁/(λ̂₁+η), λmax(N)/η) + √(Σ rᵢ²/(η(λ̂ᵢ+η)))"
    yield upper_bound(statement, f"{TRIALS} random H, 0 to 3 subspace iterations", unconverged())
    yield from automatic_damping()
    statement = "Stale sketch: … ≤ max(λ̂₁/(λ̂₁+η), λ̂⊥/η) + L_H‖θ−θᵣ‖/η"
    yield upper_bound(statement, f"{TRIALS} cosine mixtures, ‖θ−θᵣ‖ = 0.001 to 1", stale())
    yield upper_bound(
        "Mini-batch sketch: λmax(P̂^½HP̂^½) ≤ max(λ̂₁/(λ̂₁+η), λ̂⊥/η) + δ/η",
        "digits network at its minimum, 3 batches of 20, k = 6, η = 0.1",
        mini_batch(),
    )
    statement = "Mini-batch error: δ ≤ matrix Bernstein at 99 %, as 99th percentile"
    yield upper_bound(statement, "least squares, 500 samples, n = 10, b = 20, 80 and 320", bernstein())


def random_symmetric(source: torch.Generator, n: int) -> Float[Tensor, "n n"]:
    """Draw a symmetric matrix of both signs whose eigenvalues span four decades."""
    vectors = orthonormal(source, n, n)
    values = normal(source, n).sign() * 10 ** (4 * torch.rand(n, generator=source, dtype=torch.float64) - 2)
    return (vectors * values) @ vectors.T


def unrelated() -> Pairs:
    """Yield L/η and what a step meets when the sketch has nothing to do with H."""
    source = generator(13)
    for _ in range(TRIALS):
        n, damping = integer(source, 2, 12), 10 ** uniform(source, -2, 1)
        hessian, other = random_symmetric(source, n), random_symmetric(source, n)
        sketch = eigenpairs(other, integer(source, 1, n))
        P = dense_preconditioner(sketch.values.abs(), sketch.vectors, damping)
        yield spectral_radius(hessian) / damping, relative_sharpness(hessian, P)


def spectral_radius(hessian: Float[Tensor, "n n"]) -> float:
    """Return the largest magnitude of an eigenvalue."""
    return float(torch.linalg.eigvalsh(hessian).abs().max())


def noisy() -> Pairs:
    """Yield bound and observation for the exact sketch of a perturbed H."""
    source = generator(14)
    for _ in range(TRIALS):
        n, damping = integer(source, 2, 12), 10 ** uniform(source, -2, 1)
        hessian, noise = random_symmetric(source, n), random_symmetric(source, n)
        noise = noise * 10 ** uniform(source, -3, 0)
        yield sketch_trial(hessian, hessian + noise, integer(source, 1, n - 1), damping)


def sketch_trial(
    hessian: Float[Tensor, "n n"], sketched: Float[Tensor, "n n"], rank: int, damping: float, error: float | None = None
) -> tuple[float, float]:
    """Return bound and observation for the exact sketch of one matrix, used on another."""
    sketch = eigenpairs(sketched, rank)
    rest = sketched - (sketch.vectors * sketch.values) @ sketch.vectors.T
    error = max(largest_eigenvalue(hessian - sketched), 0.0) if error is None else error
    bound = curvature_with_error(sketch.values, max(largest_eigenvalue(rest), 0.0), damping, error)
    P = dense_preconditioner(sketch.values.abs(), sketch.vectors, damping)
    return bound, relative_sharpness(hessian, P)


def sharp_noise() -> tuple[float, float]:
    """Return the trial in which the error lies along the sharpest direction that the sketch leaves out."""
    hessian = torch.diag(torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64))
    error = torch.diag(torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64))
    return sketch_trial(hessian, hessian - error, 1, 0.3)


def tilted() -> Iterator[Statement]:
    """Check the bound for a sketch off by an angle, and its lower companion for k = 1."""
    statement = "Tilted sketch: … ≤ max(λ₁(cos²θ/(λ̂ₖ+η) + sin²θ/η), λₖ₊₁/η) + √(λ₁λₖ₊₁) sin θ λ̂₁/(η(λ̂₁+η))"
    trials = [tilted_trial(generator(1000 + seed)) for seed in range(TRIALS)]
    yield upper_bound(statement, f"{TRIALS} random H ⪰ 0, θ random, exact λ", [(b, o) for b, o, _ in trials])
    statement = "Tilted sketch, k = 1: … ≥ λ₁(cos²θ/(λ̂₁+η) + sin²θ/η)"
    yield lower_bound(statement, "the trials with k = 1", [(low, o) for _, o, low in trials if low])


def tilted_trial(source: torch.Generator) -> tuple[float, float, float]:
    """Return upper bound, observation, and for k = 1 the lower bound (otherwise 0) of a tilted exact sketch."""
    n, damping = integer(source, 3, 12), 10 ** uniform(source, -2, 1)
    rank = integer(source, 1, (n - 1) // 2)
    values = (10 ** (3 * torch.rand(n, generator=source, dtype=torch.float64) - 1)).sort(descending=True).values
    vectors = orthonormal(source, n, n)
    used = tilt(vectors, rank, uniform(source, 0, 1.57))
    sine = float(torch.linalg.svdvals(vectors[:, rank:].T @ used)[0])
    P = dense_preconditioner(values[:rank], used, damping)
    observed = relative_sharpness((vectors * values) @ vectors.T, P)
    low = float(values[0] * ((1 - sine**2) / (values[0] + damping) + sine**2 / damping)) if rank == 1 else 0.0
    return curvature_at_angle(values, values[:rank], sine, damping), observed, low


def tilt(vectors: Float[Tensor, "n n"], rank: int, angle: float) -> Float[Tensor, "n k"]:
    """Rotate the first k vectors by an angle towards the k that follow."""
    return math.cos(angle) * vectors[:, :rank] + math.sin(angle) * vectors[:, rank : 2 * rank]


def subspace_errors() -> Pairs:
    """Yield the Davis-Kahan bound and the sine of the largest angle between the subspaces of H and H + E."""
    source = generator(15)
    for _ in range(TRIALS):
        n = integer(source, 2, 12)
        rank = integer(source, 1, n - 1)
        hessian, noise = random_symmetric(source, n), normal(source, n, n)
        values = torch.linalg.eigvalsh(hessian).flip(0)
        gap = float(values[rank - 1] - values[rank])
        noise = (noise + noise.T) / spectral_radius(noise + noise.T) * uniform(source, 0, 0.5) * gap
        true = eigenpairs(hessian, n, which="algebraic").vectors[:, rank:]
        used = eigenpairs(hessian + noise, rank, which="algebraic").vectors
        delta = spectral_radius(noise)
        yield delta / (gap - delta), float(torch.linalg.svdvals(true.T @ used)[0])


def unconverged() -> Pairs:
    """Yield bound and observation for Ritz pairs after few subspace iterations."""
    source = generator(16)
    for trial in range(TRIALS):
        n, damping = integer(source, 2, 12), 10 ** uniform(source, -2, 1)
        hessian = random_symmetric(source, n)
        pairs = SubspaceIteration(trial % 4)(hessian, normal(source, n, integer(source, 1, n - 1)))
        yield ritz_trial(hessian, pairs, damping)


def ritz_trial(hessian: Float[Tensor, "n n"], pairs: Eigenpairs, damping: float) -> tuple[float, float]:
    """Return bound and observation for Ritz pairs of H, with negative values by magnitude."""
    V = pairs.vectors
    outside = torch.eye(len(hessian), dtype=torch.float64) - V @ V.T
    left_out = max(largest_eigenvalue(outside @ hessian @ outside), 0.0)
    P = dense_preconditioner(pairs.values.abs(), V, damping)
    return curvature_with_residuals(pairs, left_out, damping), relative_sharpness(hessian, P)


def residual_damping(pairs: Eigenpairs) -> float:
    """Return |λ̂ₖ| + ρ with ρ² = Σ rᵢ², the damping with which α = 1 is stable if it is above what is left out."""
    return float(pairs.values.abs().min() + pairs.residuals.norm())


def automatic_damping() -> Iterator[Statement]:
    """Show that η = λ̂ₖ of unconverged pairs is no damping, and check the one that adds their residuals."""
    hessian = torch.diag(torch.tensor([100.0, 99.0, 0.0, 0.0], dtype=torch.float64))
    start = torch.tensor([[1.0, 0.0], [0.0, 0.1], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    pairs = SubspaceIteration(0)(hessian, start)
    P = dense_preconditioner(pairs.values.abs(), pairs.vectors, float(pairs.values.abs().min()))
    statement = "Unconverged pairs, η = λ̂ₖ: λmax(P̂^½HP̂^½) ≥ 2, so that α = 1 diverges"
    problem = "spectrum (100, 99, 0, 0), k = 2, a start near the second direction's complement, no iteration"
    yield lower_bound(statement, problem, [(2.0, relative_sharpness(hessian, P))])
    statement = "Ritz value plus residual, η = |λ̂ₖ|+ρ ≥ λmax(N): … ≤ 1 + ρ/√(η(|λ̂ₖ|+η)) < 2, so that α = 1 is stable"
    yield upper_bound(
        statement, f"{TRIALS} random H, 0 to 3 subspace iterations, where η ≥ λmax(N)", residually_damped()
    )


def residually_damped() -> Pairs:
    """Yield bound and observation at the damping from Ritz value and residuals, if nothing left out is above it."""
    source = generator(21)
    for trial in range(TRIALS):
        n = integer(source, 2, 12)
        hessian = random_symmetric(source, n)
        pairs = SubspaceIteration(trial % 4)(hessian, normal(source, n, integer(source, 1, n - 1)))
        damping, least = residual_damping(pairs), float(pairs.values.abs().min())
        outside = torch.eye(n, dtype=torch.float64) - pairs.vectors @ pairs.vectors.T
        if largest_eigenvalue(outside @ hessian @ outside) <= damping:
            P = dense_preconditioner(pairs.values.abs(), pairs.vectors, damping)
            coupling = (damping - least) / math.sqrt(damping * (least + damping))
            yield 1 + coupling, relative_sharpness(hessian, P)


def stale() -> Pairs:
    """Yield bound and observation for a sketch taken elsewhere, with the drift bounded by the Hessian's smoothness."""
    source = generator(17)
    for _ in range(TRIALS):
        n, damping = integer(source, 2, 12), 10 ** uniform(source, -1, 2)
        function = CosineMixture.random(n, integer(source, 2, 20), source)
        old, direction = normal(source, n), normal(source, n)
        distance = 10 ** uniform(source, -3, 0)
        new = old + distance * direction / direction.norm()
        error = function.hessian_smoothness * distance
        yield sketch_trial(function.hessian(new), function.hessian(old), integer(source, 1, n - 1), damping, error)


def mini_batch() -> Pairs:
    """Yield bound and observation for sketches of the network's Hessian from single batches."""
    minimum = trained_network()
    minimum.network.place(minimum.point)
    for batch in minimum.network.batches()[:3]:
        yield sketch_trial(minimum.hessian, minimum.network.hessian(batch), 6, 0.1)


def bernstein() -> Pairs:
    """Yield matrix Bernstein's bound at 99 % and the 99th percentile of ‖Ĥ − H‖ over 300 batches."""
    source = generator(18)
    data = normal(source, 500, 10)
    hessian = data.T @ data / 500
    deviations = data[:, :, None] * data[:, None, :] - hessian
    largest = float(torch.linalg.eigvalsh(deviations).abs().max())
    variance = largest_eigenvalue((deviations @ deviations).mean(dim=0))
    for size in (20, 80, 320):
        picks = torch.randint(500, (300, size), generator=source)
        errors = torch.linalg.eigvalsh(deviations[picks].mean(dim=1)).abs().max(dim=1).values
        yield bernstein_error(variance, largest, size, 10), float(errors.quantile(0.99))


def bernstein_error(variance: float, largest: float, size: int, n: int, failure: float = 0.01) -> float:
    """Return the error that a mean of `size` independent matrices exceeds with at most this probability."""
    log = math.log(2 * n / failure)
    linear = largest * log / (3 * size)
    return linear + math.sqrt(linear**2 + 2 * variance * log / size)
