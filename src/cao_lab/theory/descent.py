"""Lemma 1, Lemma 2 and Corollary 1: what one step does."""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cao.linalg.columns import Eigenpairs
from cao.sketch.damped import NegativeCurvature, precondition
from cao_lab.theory.problems import (
    CosineMixture,
    Quadratic,
    dense_preconditioner,
    eigenpairs,
    generator,
    integer,
    normal,
    orthonormal,
    random_mixtures,
    uniform,
)
from cao_lab.theory.table import Pairs, Statement, lower_bound, prediction, refutation, upper_bound

Policy = Literal["magnitude", "clip"]
TRIALS = 200


def descent_lr(smoothness: float, damping: float) -> float:
    """Return 2η/L, below which every step with 0 ≺ P ⪯ I/η descends."""
    return 2 * damping / smoothness


def printed_descent_lr(smoothness: float, damping: float) -> float:
    """Return the paper's global sufficient learning rate η²/(L(L + η))."""
    return damping**2 / (smoothness * (smoothness + damping))


def guaranteed_decrease(power: float, lr: float, smoothness: float, damping: float) -> float:
    """Return α(1 − αL/2η)⟨g, Pg⟩, the least by which a step with 0 ≺ P ⪯ I/η lowers the loss."""
    return lr * (1 - lr * smoothness / (2 * damping)) * power


def rows() -> Iterator[Statement]:
    """Check what the theory says about one step."""
    yield from lemma_1()
    yield from lemma_2()
    yield from lemma_2_for_policies()
    yield from saddles()
    yield from corollary_1()
    yield from corollary_1_limits()


def lemma_1() -> Iterator[Statement]:
    """Check the descent inequality through the curvature that a step meets."""
    statement = "Lemma 1: f(θ−αd) ≤ f − α⟨g,d⟩ + Lα²‖d‖²/2, as curvature met ≤ L"
    yield upper_bound(statement, f"{TRIALS} random cosine mixtures, random d and α", curvature_met())
    quadratic = Quadratic(torch.diag(torch.tensor([5.0, 1.0], dtype=torch.float64)))
    step = torch.tensor([1.0, 0.0], dtype=torch.float64)
    observed = met(quadratic, 2 * step, step, 0.3)
    yield upper_bound(statement, "quadratic (5, 1), d along the sharper axis", [(5.0, observed)])


def curvature_met() -> Pairs:
    """Yield L and the curvature that a random step of a random function meets."""
    for function, source in random_mixtures(TRIALS, seed=1):
        n = function.frequencies.shape[1]
        lr = 10 ** uniform(source, -2, 1)
        yield function.smoothness, met(function, normal(source, n), normal(source, n), lr)


def met(function: CosineMixture | Quadratic, point: Float[Tensor, " n"], step: Float[Tensor, " n"], lr: float) -> float:
    """Return c such that f(θ − αd) = f(θ) − α⟨g, d⟩ + cα²‖d‖²/2."""
    change = function.value(point - lr * step) - function.value(point)
    return 2 * (change + lr * float(function.gradient(point) @ step)) / (lr**2 * float(step @ step))


def lemma_2() -> Iterator[Statement]:
    """Check the identity for every B, the norm for B ⪰ 0, and show both claims about P false for other B."""
    yield prediction(
        "Lemma 2: ⟨g,Pg⟩ = Σ⟨g,vᵢ⟩²/(λᵢ+η) + ‖g⊥‖²/η, for every λᵢ ≠ −η",
        f"{TRIALS} random sketches of both signs, library against dense inverse",
        (power_pair(generator(seed)) for seed in range(TRIALS)),
    )
    norms = [(1 / eta, spectral_norm(dense_preconditioner(s.values.abs(), s.vectors, eta))) for s, eta in sketches(2)]
    yield upper_bound("Lemma 2: ‖P‖ ≤ 1/η for B ⪰ 0", f"{TRIALS} random sketches", norms)
    axis = torch.eye(2, 1, dtype=torch.float64)
    near, beyond = (
        dense_preconditioner(torch.tensor([value], dtype=torch.float64), axis, 1.0) for value in (-0.9, -2.0)
    )
    claim = "Printed (A2, §3.2): ‖P‖ ≤ 1/η for any η > 0, even with negative curvature"
    yield refutation(upper_bound(claim, "B = diag(−0.9, 0), η = 1", [(1.0, spectral_norm(near))]))
    smallest = float(torch.linalg.eigvalsh(beyond)[0])
    yield refutation(lower_bound("Printed (A2): P ≻ 0 for any η > 0", "B = diag(−2, 0), η = 1", [(0.0, smallest)]))
    yield refutation(upper_bound("Printed (A2, Cor. 1): small steps descend for any η > 0", *climb_of_a_signed_step()))


def power_pair(source: torch.Generator) -> tuple[float, float]:
    """Return ⟨g, Pg⟩ by a dense inverse and by the library, for a sketch whose λᵢ + η keep away from 0."""
    sketch, damping = random_sketch(source)
    shifted = sketch.values + damping
    values = torch.where(shifted.abs() < 0.1 * damping, damping, sketch.values)
    sketch = Eigenpairs(values, sketch.vectors, sketch.residuals)
    gradient = normal(source, sketch.vectors.shape[0])
    dense = dense_preconditioner(values, sketch.vectors, damping) @ gradient
    ours = precondition(gradient, sketch, damping, negative_curvature="signed")
    return float(gradient @ dense), float(gradient @ ours)


def random_sketch(source: torch.Generator) -> tuple[Eigenpairs, float]:
    """Draw a sketch of both signs, whose values span four decades, and a damping."""
    n = integer(source, 1, 12)
    k = integer(source, 1, n)
    signs = torch.randn(k, generator=source).sign()
    values = signs * 10 ** (4 * torch.rand(k, generator=source, dtype=torch.float64) - 2)
    sketch = Eigenpairs(values, orthonormal(source, n, k), torch.zeros(k, dtype=torch.float64))
    return sketch, 10 ** uniform(source, -2, 1)


def sketches(seed: int) -> Iterator[tuple[Eigenpairs, float]]:
    """Yield random sketches with their dampings."""
    source = generator(seed)
    for _ in range(TRIALS):
        yield random_sketch(source)


def spectral_norm(matrix: Float[Tensor, "n n"]) -> float:
    """Return the largest singular value."""
    return float(torch.linalg.matrix_norm(matrix, ord=2))


def climb_of_a_signed_step() -> tuple[str, Pairs]:
    """Return a bounded 2-smooth function on which the signed step climbs however small α is."""
    function = CosineMixture(*(torch.tensor(x, dtype=torch.float64) for x in ([2.0], [[1.0]], [0.0])))
    point = torch.tensor([0.1], dtype=torch.float64)
    sketch = eigenpairs(function.hessian(point), 1)
    update = precondition(function.gradient(point), sketch, 1.0, negative_curvature="signed")
    changes = [function.value(point - lr * update) - function.value(point) for lr in (1e-4, 1e-2, 0.4)]
    return "f(x) = 2 cos x at x = 0.1, exact sketch, η = 1", [(0.0, change) for change in changes]


def lemma_2_for_policies() -> Iterator[Statement]:
    """Check the two-sided bound that each sign policy gives for sketches of both signs."""
    policies: tuple[Policy, ...] = ("magnitude", "clip")
    for policy in policies:
        spectra = [(policy_spectrum(s, eta, policy), captured(s, policy), eta) for s, eta in sketches(3)]
        problem = f"{TRIALS} random sketches of both signs, library"
        highs = [(1 / eta, float(values[-1])) for values, _, eta in spectra]
        lows = [(1 / (largest + eta), float(values[0])) for values, largest, eta in spectra]
        yield upper_bound(f"Lemma 2′: λmax(P) ≤ 1/η with {policy}", problem, highs)
        yield lower_bound(f"Lemma 2′: λmin(P) ≥ 1/(Λ+η) with {policy}", problem, lows)


def policy_spectrum(sketch: Eigenpairs, damping: float, policy: Policy) -> Float[Tensor, " n"]:
    """Return the eigenvalues of the library's P, in ascending order."""
    columns = torch.eye(sketch.vectors.shape[0], dtype=torch.float64)
    images = [precondition(column, sketch, damping, negative_curvature=policy) for column in columns]
    spectrum: Tensor = torch.linalg.eigvalsh(torch.stack(images))
    return spectrum


def captured(sketch: Eigenpairs, policy: Policy) -> float:
    """Return Λ, the largest curvature that P divides by."""
    values = sketch.values.abs() if policy == "magnitude" else sketch.values.clamp_min(0)
    return float(values.max())


def saddles() -> Iterator[Statement]:
    """Show that the signed step is drawn into a saddle, and check how fast the others leave it."""
    lr, damping, nu = 0.4, 1.0, 2.0
    problem = "½(x² − 2y²), η = 1, α = 0.4, 20 steps"
    claim = "Printed (§4): damping prevents stalling at saddles, as distance ratio ≥ 1"
    yield refutation(lower_bound(claim, problem, [(1.0, escape("signed", lr, damping, nu) ** 20)]))
    rates: dict[NegativeCurvature, float] = {"magnitude": 1 + lr * nu / (nu + damping), "clip": 1 + lr * nu / damping}
    for policy, rate in rates.items():
        statement = f"Saddle: {policy} leaves it by 1 + αν/{'(ν+η)' if policy == 'magnitude' else 'η'} a step"
        yield prediction(statement, problem, [(rate, escape(policy, lr, damping, nu))])


def escape(policy: NegativeCurvature, lr: float, damping: float, nu: float) -> float:
    """Return the mean factor a step by which the distance from a saddle with curvature −ν grows."""
    quadratic = Quadratic(torch.diag(torch.tensor([1.0, -nu], dtype=torch.float64)))
    sketch = eigenpairs(quadratic.hessian, 1)
    point = torch.tensor([0.0, 1e-3], dtype=torch.float64)
    for _ in range(20):
        update = precondition(quadratic.gradient(point), sketch, damping, negative_curvature=policy)
        point = point - lr * update
    return math.exp(math.log(float(point.norm()) / 1e-3) / 20)


def corollary_1() -> Iterator[Statement]:
    """Check the decrease that the paper's learning rates and ours guarantee."""
    problem = f"{TRIALS} random cosine mixtures, sketch from elsewhere, magnitude"
    printed = "Corollary 1: decrease ≥ αλmin(P)‖g‖²/2 at α = "
    yield lower_bound(printed + "λmin(P)/(L‖P‖²)", problem, decreases("printed local"))
    yield lower_bound(printed + "η²/(L(L+η))", problem, decreases("printed global"))
    yield lower_bound("Corollary 1′: decrease ≥ αλmin(P)‖g‖²/2 at α = η/L", problem, decreases("ours"))
    statement = "Corollary 1′: decrease ≥ α(1−αL/2η)⟨g,Pg⟩ for random α < 2η/L"
    yield lower_bound(statement, problem, decreases("any"))
    ratios = [
        ((L + eta) / eta, descent_lr(L, eta) / 2 / printed_descent_lr(L, eta))
        for L, eta in ((1.0, 1.0), (10.0, 0.1), (100.0, 0.01))
    ]
    yield prediction("Corollary 1′: same decrease, α larger by (L+η)/η", "L/η = 1, 100, 10⁴", ratios)


def decreases(rule: str) -> Pairs:
    """Yield the guaranteed and the observed decrease of one step under a rule for α."""
    for function, source in random_mixtures(TRIALS, seed=4):
        n = function.frequencies.shape[1]
        damping, L = 10 ** uniform(source, -2, 1), function.smoothness
        sketch = eigenpairs(function.hessian(normal(source, n)), integer(source, 1, n))
        point = normal(source, n)
        gradient = function.gradient(point)
        P = dense_preconditioner(sketch.values.abs(), sketch.vectors, damping)
        spectrum = torch.linalg.eigvalsh(P)
        low, high = float(spectrum[0]), float(spectrum[-1])
        rates = {
            "printed local": low / (L * high**2),
            "printed global": printed_descent_lr(L, damping),
            "ours": descent_lr(L, damping) / 2,
            "any": uniform(source, 0.01, 1) * descent_lr(L, damping),
        }
        lr = rates[rule]
        bound = lr * low * float(gradient @ gradient) / 2
        if rule == "any":
            bound = guaranteed_decrease(float(gradient @ P @ gradient), lr, L, damping)
        yield bound, function.value(point) - function.value(point - lr * (P @ gradient))


def corollary_1_limits() -> Iterator[Statement]:
    """Check that 2η/L cannot be raised, and what a negative captured value does to it under `signed`."""
    L, damping = 4.0, 0.5
    unseen = largest_descending_lr(L, 1 / damping)
    yield prediction("Corollary 1′: 2η/L is tight", "Lx²/2 outside the sketch", [(2 * damping / L, unseen)], 1e-6)
    nu = 0.4
    signed = largest_descending_lr(L, 1 / (damping - nu))
    yield prediction(
        "signed, −η < λ < 0: the range shrinks to 2(η+λ)/L",
        "Lx²/2 now, λ = −0.8η when sketched",
        [(2 * (damping - nu) / L, signed)],
        1e-6,
    )
    yield upper_bound("Clipping: at most Δ/(αηc²(1−αL/2η)) steps are clipped", *clipped_steps())


def largest_descending_lr(curvature: float, scale: float) -> float:
    """Return by bisection the largest α for which a step α·scale·g on ½·curvature·x² does not climb."""
    low, high = 0.0, 10 / (curvature * scale)
    for _ in range(60):
        middle = (low + high) / 2
        climbs = abs(1 - middle * scale * curvature) > 1
        low, high = (low, middle) if climbs else (middle, high)
    return low


def clipped_steps() -> tuple[str, Pairs]:
    """Return a problem, the bound on the number of clipped steps, and their number."""
    source = generator(5)
    function = CosineMixture.random(10, 30, source)
    damping, limit, L = 1.0, 5.0, function.smoothness
    lr, point, count = damping / L, normal(source, 10), 0
    gap = function.value(point) - function.minimum
    for _ in range(500):
        update = precondition(function.gradient(point), eigenpairs(function.hessian(point), 2), damping)
        count += float(update.norm()) > limit
        point = point - lr * min(1.0, limit / float(update.norm())) * update
    bound = gap / (lr * damping * limit**2 * (1 - lr * L / (2 * damping)))
    return "cosine mixture, n = 10, k = 2, c = 5, 500 steps", [(math.floor(bound), count)]
