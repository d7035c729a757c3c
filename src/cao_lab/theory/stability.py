"""The widened stable range: the largest learning rate at which a minimum attracts, predicted and measured."""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cao import CAO, Eigenpairs, Hessian, Lanczos
from cao.linalg.columns import HERE
from cao_lab.theory.network import trained_network
from cao_lab.theory.problems import (
    Quadratic,
    dense_preconditioner,
    eigenpairs,
    generator,
    integer,
    normal,
    random_spectra,
    uniform,
)
from cao_lab.theory.table import Pairs, Statement, lower_bound, prediction, refutation, upper_bound

STEPS = 150
BISECTIONS = 7


def relative_curvature(spectrum: Float[Tensor, " n"], rank: int, damping: float) -> tuple[float, float]:
    """Return the smallest non-zero and the largest eigenvalue of P^½HP^½, for exact pairs of a descending H ⪰ 0."""
    shifts = torch.cat([spectrum[:rank], torch.zeros_like(spectrum[rank:])]) + damping
    relative = (spectrum / shifts)[spectrum > 0]
    return float(relative.min()), float(relative.max())


def stable_lr(spectrum: Float[Tensor, " n"], rank: int, damping: float, momentum: float = 0.0) -> float:
    """Return 2(1 + β) min(1 + η/λ₁, η/λₖ₊₁)."""
    return 2 * (1 + momentum) / relative_curvature(spectrum, rank, damping)[1]


def widening(spectrum: Float[Tensor, " n"], rank: int, damping: float) -> float:
    """Return min(1 + λ₁/η, λ₁/λₖ₊₁), the stable range of the effective rate α/η over that of SGD."""
    top = float(spectrum[0])
    return min(1 + top / damping, top / float(spectrum[rank]))


def balanced_damping(spectrum: Float[Tensor, " n"], rank: int) -> float:
    """Return λ₁λₖ₊₁/(λ₁ − λₖ₊₁), below which less damping widens the range of α/η no further."""
    top, residual = float(spectrum[0]), float(spectrum[rank])
    return top * residual / (top - residual)


def rows() -> Iterator[Statement]:
    """Check the stable range on quadratics and on a network."""
    yield prediction(
        "Stable range: α < 2(1+β) min(1+η/λ₁, η/λₖ₊₁)",
        "50 random quadratics, β = 0, 0.5 or 0.9, run densely",
        random_ranges(),
        tolerance=0.02,
    )
    yield from narrow_gap()
    yield from wide_gap()
    yield upper_bound(
        "η = λₖ, converged pairs: L_P ≤ 1, so that every α < 2 is stable",
        "200 random spectra, all k",
        automatically_damped(),
    )
    yield from digits_network()


def random_ranges() -> Pairs:
    """Yield predicted and measured stable ranges of random positive semidefinite quadratics."""
    source = generator(6)
    for trial in range(50):
        n = integer(source, 2, 12)
        rank, damping = integer(source, 0, n - 1), 10 ** uniform(source, -2, 1)
        spectrum = 10 ** (3 * torch.rand(n, generator=source, dtype=torch.float64) - 1)
        spectrum = spectrum.sort(descending=True).values
        momentum = (0.0, 0.5, 0.9)[trial % 3]
        measured = measured_range(spectrum, rank, damping, momentum, source)
        yield stable_lr(spectrum, rank, damping, momentum), measured


def measured_range(
    spectrum: Float[Tensor, " n"], rank: int, damping: float, momentum: float, source: torch.Generator
) -> float:
    """Return the largest α that does not diverge, from runs at many α side by side, in two passes."""
    quadratic = Quadratic.with_spectrum(spectrum, source)
    sketch = eigenpairs(quadratic.hessian, rank)
    matrix = dense_preconditioner(sketch.values, sketch.vectors, damping) @ quadratic.hessian
    start = normal(source, len(spectrum))
    low, high = damping / float(spectrum[0]), 1e5 * damping / float(spectrum[0])
    for _ in range(3):
        rates = torch.logspace(math.log10(low), math.log10(high), 60, dtype=torch.float64)
        first = int(grows(matrix, start, rates, momentum).nonzero()[0])
        low, high = float(rates[max(first - 1, 0)]), float(rates[first])
    return math.sqrt(low * high)


def grows(
    matrix: Float[Tensor, "n n"], start: Float[Tensor, " n"], rates: Float[Tensor, " r"], momentum: float
) -> Tensor:
    """Tell for each α whether e ← e − α·velocity ends further from 0 than it began."""
    points = start.repeat(len(rates), 1)
    velocity = torch.zeros_like(points)
    for _ in range(500):
        velocity = momentum * velocity + points @ matrix.T
        points = (points - rates[:, None] * velocity).clamp(-1e100, 1e100)
    return torch.gt(points.norm(dim=1), start.norm())


def automatically_damped() -> Pairs:
    """Yield 1 and L_P at the smallest captured value as damping."""
    for spectrum, _, _ in random_spectra(19):
        for rank in range(1, len(spectrum)):
            yield 1.0, relative_curvature(spectrum, rank, float(spectrum[rank - 1]))[1]


def narrow_gap() -> Iterator[Statement]:
    """Show a spectrum on which CAO's range of α is a fifth of SGD's, though its range of α/η is twice as wide."""
    spectrum, damping = torch.tensor([100.0, 50.0, 1.0], dtype=torch.float64), 0.1
    problem = "quadratic (100, 50, 1), k = 1, η = 0.1, CAO itself"
    measured = quadratic_range(spectrum, 1, damping)
    sgd = 2 / 100
    yield prediction("Stable range of α", problem, [(stable_lr(spectrum, 1, damping), measured)], 0.02)
    claim = "Printed (Prop. 1): the stable range of α is wider than SGD's"
    yield refutation(lower_bound(claim, problem, [(sgd, measured)]))
    statement = "Widening in α/η: min(1+λ₁/η, λ₁/λₖ₊₁)"
    yield prediction(statement, problem, [(widening(spectrum, 1, damping), measured / damping / sgd)], 0.02)


def wide_gap() -> Iterator[Statement]:
    """Check a spectrum with one dominant direction, at and above the balanced damping, and with momentum."""
    spectrum = torch.tensor([100.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    for damping in (balanced_damping(spectrum, 1), 10.0):
        measured = quadratic_range(spectrum, 1, damping) / damping / (2 / 100)
        problem = f"quadratic (100, 1, 0.5, 0.1), k = 1, η = {damping:.3g}, CAO itself"
        predicted = widening(spectrum, 1, damping)
        yield prediction("Widening in α/η: min(1+λ₁/η, λ₁/λₖ₊₁)", problem, [(predicted, measured)], 0.02)
    # At this damping the first direction left out decides, which momentum on the update and through P treat alike.
    problem = "quadratic (100, 1, 0.5, 0.1), k = 1, η = 0.5, β = 0.9, CAO itself"
    trial = stable_lr(spectrum, 1, 0.5, 0.9), quadratic_range(spectrum, 1, 0.5, 0.9)
    yield prediction("Stable range of α with momentum: × (1+β)", problem, [trial], 0.02)


def digits_network() -> Iterator[Statement]:
    """Compare the stable range around a minimum of a network with the prediction from its spectrum."""
    minimum = trained_network()
    for rank, damping, momentum in ((0, 0.1, 0.0), (1, 0.1, 0.0), (6, 0.1, 0.0), (6, 0.05, 0.9)):
        problem = f"digits network, n = {len(minimum.point)}, k = {rank}, η = {damping:g}, β = {momentum:g}, CAO itself"
        trial = stable_lr(minimum.spectrum, rank, damping, momentum), network_range(rank, damping, momentum)
        yield prediction("Stable range of α at a minimum", problem, [trial], 0.03)


def network_range(rank: int, damping: float, momentum: float) -> float:
    """Return the largest α at which CAO comes back to the network's minimum from nearby."""
    minimum = trained_network()
    network, sketch = minimum.network, network_sketch(rank)
    start = minimum.point + 1e-6 * normal(generator(7), len(minimum.point))

    def diverges(lr: float) -> bool:
        network.place(start)
        optimizer = CAO(network.parameters(), lr, rank=rank, damping=damping, momentum=momentum)
        return has_grown(optimizer, sketch, lambda: network.loss().backward())

    return bisect(diverges, 0.7 * damping / float(minimum.spectrum[0]))


def network_sketch(rank: int) -> Eigenpairs:
    """Return converged pairs of the network's Hessian at its minimum, found as CAO finds them."""
    minimum = trained_network()
    minimum.network.place(minimum.point)
    hessian = Hessian(minimum.network.loss(), minimum.network.parameters())
    start = HERE.random(len(minimum.point), max(rank, 1), generator(0), torch.float64)
    return Lanczos(100, tolerance=1e-6)(hessian, start)


def quadratic_range(spectrum: Float[Tensor, " n"], rank: int, damping: float, momentum: float = 0.0) -> float:
    """Return the largest α at which CAO comes back to the minimum of a quadratic."""
    source = generator(8)
    quadratic, start = Quadratic.with_spectrum(spectrum, source), normal(source, len(spectrum))
    sketch = eigenpairs(quadratic.hessian, rank)

    def diverges(lr: float) -> bool:
        point = nn.Parameter(start.clone())
        optimizer = CAO([point], lr, rank=rank, damping=damping, momentum=momentum)

        def set_gradient() -> None:
            point.grad = quadratic.gradient(point.detach())

        return has_grown(optimizer, sketch, set_gradient)

    return bisect(diverges, 0.7 * damping / float(spectrum[0]))


def has_grown(optimizer: CAO, sketch: Eigenpairs, set_gradient: Callable[[], None]) -> bool:
    """Step with one sketch and tell whether the gradient has grown; stop early once it has exploded."""
    optimizer.refresh(sketch)
    norms = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        set_gradient()
        if step % 25 == 0:
            norms.append(gradient_norm(optimizer))
            if norms[-1] > 100 * norms[0]:
                break
        optimizer.step()
    return norms[-1] > norms[0]


def gradient_norm(optimizer: CAO) -> float:
    """Return the norm of the gradient over all parameters."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return float(torch.cat([gradient.reshape(-1) for gradient in gradients]).norm())


def bisect(diverges: Callable[[float], bool], converging: float) -> float:
    """Return the border between learning rates that converge and those that diverge, in geometric steps."""
    low = converging
    while not diverges(4 * low):
        low *= 4
    high = 4 * low
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if diverges(middle) else (middle, high)
    return math.sqrt(low * high)
