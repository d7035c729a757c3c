"""Proposition 1: how fast gradients vanish, and what gradient noise and same-batch sketches leave behind."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from cao import SubspaceIteration
from cao.curvature.hessian import Hessian
from cao.linalg.columns import HERE, Eigenpairs
from cao.sketch.damped import precondition
from cao_lab.theory.network import RidgeNetwork
from cao_lab.theory.problems import CosineMixture, eigenpairs, generator, normal
from cao_lab.theory.table import Pairs, Statement, prediction, refutation, upper_bound


@dataclass(frozen=True)
class Setting:
    """What the bounds depend on: L, η, the largest captured curvature Λ, and the noise σ of the gradients."""

    smoothness: float
    damping: float
    captured: float
    noise: float = 0.0


def stationarity_bound(gap: float, lr: float, steps: int, setting: Setting) -> float:
    """Return (Λ + η)(Δ/αT + αLσ²/2η²)/(1 − αL/2η), a bound on the mean of E‖∇f‖² over T steps."""
    L, eta = setting.smoothness, setting.damping
    floor = lr * L * setting.noise**2 / (2 * eta**2)
    return (setting.captured + eta) * (gap / (lr * steps) + floor) / (1 - lr * L / (2 * eta))


def tuned_lr(gap: float, steps: int, setting: Setting) -> float:
    """Return min(η/L, (η/σ)√(2Δ/LT)), the learning rate that balances progress and noise over T steps."""
    L, eta = setting.smoothness, setting.damping
    return min(eta / L, eta / setting.noise * math.sqrt(2 * gap / (L * steps)))


def tuned_bound(gap: float, steps: int, setting: Setting) -> float:
    """Return (1 + Λ/η)(2LΔ/T + 2σ√(2LΔ/T)), the bound on the mean of E‖∇f‖² at the tuned learning rate."""
    rate = 2 * setting.smoothness * gap / steps
    return (1 + setting.captured / setting.damping) * (rate + 2 * setting.noise * math.sqrt(rate))


def bias_bound(noise: float, captured: float, damping: float) -> float:
    """Return Λσ/(2η(Λ + η)), a bound on ‖E[P̂ĝ] − E[P̂]g‖ when sketch and gradient share a batch."""
    return captured * noise / (2 * damping * (captured + damping))


@dataclass(frozen=True)
class Descent:
    """A finished run: ‖∇f‖² at every step, the gap it started from, and the largest |λ| captured."""

    squares: Float[Tensor, " steps"]
    gap: float
    captured: float


def descend(
    function: CosineMixture, lr: float, steps: int, *, damping: float = 1.0, noise: float = 0.0, seed: int = 0
) -> Descent:
    """Run CAO's step with rank 2, refreshed every 10 steps, and Gaussian gradient noise of E‖ξ‖² = σ²."""
    source = generator(seed)
    n = function.frequencies.shape[1]
    point = start = normal(generator(0), n)
    squares, captured = [], 0.0
    for step in range(steps):
        if step % 10 == 0:
            sketch = eigenpairs(function.hessian(point), 2)
            captured = max(captured, float(sketch.values.abs().max()))
        gradient = function.gradient(point)
        squares.append(gradient @ gradient)
        noisy = gradient + noise / n**0.5 * normal(source, n) if noise else gradient
        point = point - lr * precondition(noisy, sketch, damping)
    return Descent(torch.stack(squares), function.value(start) - function.minimum, captured)


def rows() -> Iterator[Statement]:
    """Check the rate, the floor and the bias."""
    yield from exact_gradients()
    yield from noisy_gradients()
    yield from same_batch_sketch()


def exact_gradients() -> Iterator[Statement]:
    """Check the O(1/T) rate with its constant, and that c < 2 is needed."""
    functions = [CosineMixture.random(8, 24, generator(seed)) for seed in range(10)]
    runs = [descend(function, 1 / function.smoothness, 1000) for function in functions]
    for steps in (10, 100, 1000):
        statement = "Proposition 1: mean ‖∇f‖² ≤ (Λ+η)Δ/(αT(1−αL/2η))"
        problem = f"10 cosine mixtures, k = 2, η = 1, α = η/L, T = {steps}"
        pairs = zip(functions, runs, strict=True)
        yield upper_bound(statement, problem, [stationarity_trial(f, run, steps) for f, run in pairs])
    slopes = [(-1.0, slope(r)) for r in runs]
    yield prediction("Proposition 1: log-log slope of mean ‖∇f‖²", "the same, T = 100 to 1000", slopes, 0.1)
    claim = "Printed (appendix): min ‖∇f‖² falls like 1/T for any c in α ≤ cη/L"
    yield refutation(upper_bound(claim, "x²/2, k = 0, c = 2, T = 1000", [(1 / 1000, smallest_at_the_limit())]))


def stationarity_trial(function: CosineMixture, run: Descent, steps: int) -> tuple[float, float]:
    """Return bound and observation over the first steps of a run without noise at η = 1, α = η/L."""
    setting = Setting(function.smoothness, 1.0, run.captured)
    return stationarity_bound(run.gap, 1 / function.smoothness, steps, setting), mean_of(run, steps)


def mean_of(run: Descent, steps: int) -> float:
    """Return the mean of ‖∇f‖² over the first steps."""
    return float(run.squares[:steps].mean())


def slope(run: Descent) -> float:
    """Return the log-log slope of the mean of ‖∇f‖² over the last decade of steps."""
    return float(torch.tensor(mean_of(run, 1000) / mean_of(run, 100)).log10())


def smallest_at_the_limit() -> float:
    """Return the least ‖∇f‖² that α = 2η/L ever reaches on x²/2 from x = 1."""
    point, squares = 1.0, []
    for _ in range(1000):
        squares.append(point**2)
        point -= 2 * point
    return min(squares)


def noisy_gradients() -> Iterator[Statement]:
    """Check the noise floor: exactly on a parabola, where it is tight, and in the mean on a mixture."""
    steps, rate = 10**5, 0.5
    observed = mean_square_on_parabola(rate, steps)
    problem = "x²/2 with noise σ = 1 from x = 1, k = 0, α/η = 0.5, T = 10⁵"
    floor = stationarity_bound(0.5, rate, steps, Setting(1.0, 1.0, 0.0, noise=1.0))
    exact = stationarity_bound(0.5, rate, steps, Setting(1.0, 1.0, 0.0))
    yield refutation(upper_bound("Printed (Prop. 1): mean E‖∇f‖² is O(Δ/αT)", problem, [(exact, observed)]))
    yield from relative_floor()
    statement = "Proposition 1′: mean E‖∇f‖² ≤ O(Δ/αT) + (Λ+η)αLσ²/(2η²(1−αL/2η))"
    yield upper_bound(statement, problem, [(floor, observed)])
    yield upper_bound(statement, "cosine mixture, σ = 5, 8 runs, T = 500", [noisy_mixture(500, tuned=False)])
    statement = "Proposition 1′: mean E‖∇f‖² ≤ (1+Λ/η)(2LΔ/T + 2σ√(2LΔ/T)) at the tuned α"
    trials = [noisy_mixture(steps, tuned=True) for steps in (100, 500)]
    yield upper_bound(statement, "cosine mixture, σ = 5, 8 runs, T = 100 and 500", trials)


def mean_square_on_parabola(rate: float, steps: int) -> float:
    """Return the mean of E x² under x ← x − rate·(x + ξ) from x = 1, with E ξ² = 1, without sampling."""
    square, total = 1.0, 0.0
    for _ in range(steps):
        total += square
        square = (1 - rate) ** 2 * square + rate**2
    return total / steps


def relative_floor() -> Iterator[Statement]:
    """Show what of the floor is attained when Λ > 0, and that the one in the norm of P is tight for every Λ."""
    statement = "Proposition 1′: share of the floor that is attained, η/(Λ+η)"
    problem = "L = 10 outside the sketch, with the noise; Λ = 0.1 to 10 captured, without; η = 1, α = 0.1"
    trials: Pairs = [(1 / (top + 1), attained_share(top)) for top in (0.1, 1.0, 10.0)]
    yield prediction(statement, problem, trials, 1e-6)
    statement = "Proposition 1′ (relative): mean E⟨g,Pg⟩ ≤ O(Δ/αT) + α tr(HPΣP)/(2(1−αL_P/2))"
    problem = "Λx²/2, captured, with noise σ = 1 at its floor, Λ = 0.1 to 1000, η = 1, α = 0.5"
    yield upper_bound(statement, problem, [captured_floor(top, 1.0, 0.5) for top in (0.1, 1.0, 10.0, 1000.0)])


def attained_share(top: float) -> float:
    """Return E‖∇f‖² at its floor over the bound of Proposition 1′, with L = 10 outside the sketch and Λ inside."""
    smoothness, damping, lr = 10.0, 1.0, 0.1
    rate = lr * smoothness / damping
    observed = floor_of(1 - rate, lr / damping) * smoothness**2
    return observed / stationarity_bound(0.0, lr, 1, Setting(smoothness, damping, top, noise=1.0))


def captured_floor(top: float, damping: float, lr: float) -> tuple[float, float]:
    """Return the bound in the norm of P and E⟨g, Pg⟩ at its floor, in one captured direction."""
    gain = 1 / (top + damping)
    bound = lr * top * gain**2 / (2 * (1 - lr * top * gain / 2))
    return bound, floor_of(1 - lr * top * gain, lr * gain) * top**2 * gain


def floor_of(factor: float, kick: float) -> float:
    """Return the limit of E x² under x ← factor·x + kick·ξ with E ξ² = 1, by iterating it."""
    square = 0.0
    for _ in range(2000):
        square = factor**2 * square + kick**2
    return square


def noisy_mixture(steps: int, *, tuned: bool) -> tuple[float, float]:
    """Return the bound and the observed mean of ‖∇f‖² over 16 noisy runs."""
    function, noise = CosineMixture.random(8, 24, generator(0)), 5.0
    setting = Setting(function.smoothness, 1.0, 0.0, noise)
    gap = function.value(normal(generator(0), 8)) - function.minimum
    lr = tuned_lr(gap, steps, setting) if tuned else 0.5 / function.smoothness
    runs = [descend(function, lr, steps, noise=noise, seed=seed) for seed in range(8)]
    setting = replace(setting, captured=max(run.captured for run in runs))
    bound = tuned_bound(gap, steps, setting) if tuned else stationarity_bound(gap, lr, steps, setting)
    return bound, sum(mean_of(run, steps) for run in runs) / len(runs)


def same_batch_sketch() -> Iterator[Statement]:
    """Measure the bias of a sketch that shares its batch with the gradient, over all batches of a partition."""
    statement = "Same-batch bias: ‖E[P̂ĝ] − E[P̂]g‖ ≤ Λσ/(2η(Λ+η))"
    noise, top, damping = 2.0, 10.0, 0.1
    two = (noise / damping - noise / (top + damping)) / 2
    problem = "two equally likely batches, (λ, ĝ−g) = (0, 2) or (10, −2), η = 0.1"
    yield upper_bound(statement, problem, [(bias_bound(noise, top, damping), two)])
    for damping in (0.1, 1.0):
        bias, drift, bound = network_bias(damping)
        problem = f"digits network at its start, 10 batches of 20, k = 1, η = {damping:g}"
        yield upper_bound(statement, problem, [(bound, bias)])
        yield upper_bound("Same-batch bias against the drift ‖E[P̂]g‖", problem, [(drift, bias)])
    statement = "Proposition 1″: mean E‖∇f‖² ≤ 4(Λ+η)Δ/αT + 2(Λ+η)Lασ²/η² + Λ²σ²/(2mη²)"
    problem = "batches x²/2 ± sin(2x)/2, η = 0.5, m = 1 and 10, 2000 runs, T = 2000"
    yield upper_bound(statement, problem, [biased_trial(refresh_every) for refresh_every in (1, 10)])
    yield from biased_limit()


def network_bias(damping: float) -> tuple[float, float, float]:
    """Return ‖E[P̂ĝ] − E[P̂]g‖, ‖E[P̂]g‖ and the bound, over the batches of a partition of the digits."""
    network = RidgeNetwork()
    gradients = [network.gradient(batch) for batch in network.batches()]
    mean = torch.stack(gradients).mean(dim=0)
    sketches = [batch_sketch(network, batch) for batch in network.batches()]
    captured = max(float(sketch.values.abs().max()) for sketch in sketches)
    noise = math.sqrt(float(torch.stack([(g - mean).square().sum() for g in gradients]).mean()))
    pairs = list(zip(gradients, sketches, strict=True))
    bias = torch.stack([precondition(g - mean, sketch, damping) for g, sketch in pairs]).mean(dim=0)
    drift = torch.stack([precondition(mean, sketch, damping) for sketch in sketches]).mean(dim=0)
    return float(bias.norm()), float(drift.norm()), bias_bound(noise, captured, damping)


def batch_sketch(network: RidgeNetwork, batch: slice) -> Eigenpairs:
    """Sketch the Hessian of one batch as CAO does."""
    start = HERE.random(network.size, 1, generator(0), torch.float64)
    return SubspaceIteration(20)(Hessian(network.loss(batch), network.parameters()), start)


def biased_trial(refresh_every: int) -> tuple[float, float]:
    """Return bound and observation on batches x²/2 ± sin(2x)/2, whose gradients x ± cos 2x have σ = 1, with Λ = 3."""
    top, damping, steps, source = 3.0, 0.5, 2000, generator(20)
    lr = damping**2 / (2 * (top + damping))
    points, total = torch.full((2000,), 3.0, dtype=torch.float64), 0.0
    for step in range(steps):
        total += float(points.square().mean())
        signs = normal(source, len(points)).sign()
        if step % refresh_every == 0:
            gains = 1 / ((1 - 2 * signs * (2 * points).sin()).abs() + damping)
        points = points - lr * gains * (points + signs * (2 * points).cos())
    progress, noise = 4 * (top + damping) * 4.5 / (lr * steps), 2 * (top + damping) * lr / damping**2
    return progress + noise + top**2 / (2 * refresh_every * damping**2), total / steps


def biased_limit() -> Iterator[Statement]:
    """Show that with a refresh at every step the bias alone keeps the gradient from vanishing, however small α is.

    The batches are x and Λx²/2 − x, each with probability ½; the mean iterate tends to −1/η. Their gradients differ
    from the mean by 1 − Λx/2, which on the way from 0 grows to σ = 1 + Λ/2η; in that σ, ∇f = −Λσ/(Λ + 2η) there.
    """
    top, damping = 1.0, 0.5
    noise = 1 + top / (2 * damping)
    limit = top * noise / (top + 2 * damping)
    problem = "batches x and x²/2 − x, η = 0.5, σ = 2, m = 1, T = 10⁵"
    trials: Pairs = [(limit, abs(top / 2 * biased_mean(1.0, top, damping, rate))) for rate in (1e-2, 1e-3)]
    yield prediction("Same-batch sketch, m = 1: |E ∇f| tends to Λσ/(Λ+2η) for every α", problem, trials, 1e-6)


def biased_mean(noise: float, top: float, damping: float, rate: float) -> float:
    """Return E x after 10⁵ steps from 0 at α = rate·η."""
    mean = 0.0
    for _ in range(10**5):
        drift = (noise / damping + (top * mean - noise) / (top + damping)) / 2
        mean -= rate * damping * drift
    return mean
