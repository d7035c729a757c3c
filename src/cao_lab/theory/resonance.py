"""Momentum with a sketch that changes: what resonates, and how long a sketch must stay."""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from cao_lab.theory.momentum import (
    MOMENTA,
    Order,
    radius,
    random_positive,
    random_sketch,
    step_matrix,
    unit_preconditioner,
)
from cao_lab.theory.problems import generator, uniform
from cao_lab.theory.table import Pairs, Statement, lower_bound, prediction, upper_bound


def dwell_time(momentum: float, slow: float, fast: float) -> float:
    """Return m(β) = (artanh τ(s) − artanh τ(s′))/ln(1/β) for τ(s) = (1 + β − s)/2√β: staying longer is stable.

    Along one direction s = αλ_eff jumps between `slow` and `fast`, both between (1 − √β)² and (1 + √β)².
    """
    slow_tilt, fast_tilt = ((1 + momentum - s) / (2 * math.sqrt(momentum)) for s in (slow, fast))
    return (math.atanh(slow_tilt) - math.atanh(fast_tilt)) / -math.log(momentum)


def growth(segments: Sequence[tuple[Float[Tensor, "n n"], int]]) -> float:
    """Return the factor per step by which repeating these segments, each a matrix and how often, grows in the end."""
    product = torch.eye(len(segments[0][0]), dtype=torch.float64)
    for matrix, count in segments:
        product = torch.linalg.matrix_power(matrix, count) @ product
    return math.pow(radius(product), 1 / sum(count for _, count in segments))


def rows() -> Iterator[Statement]:
    """Check the counterexample, the dwell time, and how much of the rate each order bears."""
    yield from alternating_axes()
    yield from dwelling()
    yield from captured_in_turns()


def alternating_axes() -> Iterator[Statement]:
    """Show that two exact sketches in turns diverge with momentum on the update, and what does not."""
    problem = "H = I, k = 1, λ/η = 100, β = 0.9, the sketch turns every 5 steps, 30 % of 2(1+β)/L"
    statement = "Momentum on the update: growth per step ≥ 1 below the rate that k = 0 bears"
    yield lower_bound(statement, problem, [(1.0, turning(0.9, 5, "update"))])
    statement = "Without a sketch, without momentum, and with momentum through P: growth per step < 1"
    shrinking = turning(0.9, 5, "update", rank=0), turning(0.0, 5, "update"), turning(0.9, 5, "through")
    yield upper_bound(statement, "the same", [(1.0, factor) for factor in shrinking])
    statement = "Momentum on the raw gradient grows as momentum on the update does, through the same sketches backwards"
    yield prediction(statement, "100 random H ≻ 0, four random sketches", reversed_growth(), 1e-6)


def turning(momentum: float, dwell: int, order: Order, rank: int = 1) -> float:
    """Return the growth on H = I of sketches of the two axes in turns, at 30 % of the stable rate, with λ/η = 100."""
    hessian = torch.eye(2, dtype=torch.float64)
    axes = rank * torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    lr = 0.3 * 2 * (1 + momentum)
    sketches = [unit_preconditioner(torch.diag(axis), 0.01) for axis in axes]
    return growth([(step_matrix(hessian, P, lr, momentum, order), dwell) for P in sketches])


def reversed_growth() -> Pairs:
    """Yield the growth of a sequence with momentum on the update, and of the reverse with momentum on the gradient."""
    source = generator(40)
    for trial in range(100):
        hessian, momentum, lr = random_positive(source, 3), MOMENTA[trial % 3], 10 ** uniform(source, -3, 0)
        Ps = [unit_preconditioner(random_sketch(source, 3), 1.0) for _ in range(4)]
        forth = [(step_matrix(hessian, P, lr, momentum, "update"), 1) for P in Ps]
        back = [(step_matrix(hessian, P, lr, momentum, "gradient"), 1) for P in reversed(Ps)]
        yield growth(forth), growth(back)


def dwelling() -> Iterator[Statement]:
    """Check the dwell time against all pairs of stays."""
    statement = (
        "Dwell time: stays longer than (artanh τ_c − artanh τ_u)/ln(1/β) are stable, as longest mean stay that grows"
    )
    yield upper_bound(statement, "60 random β and pairs of αλ_eff, all pairs of stays", unstable_stays())


def unstable_stays() -> Pairs:
    """Yield m(β) and the longest mean stay of two alternating ones that does not shrink."""
    source = generator(41)
    for _ in range(60):
        momentum = uniform(source, 0.5, 0.95)
        low, high = (1 - math.sqrt(momentum)) ** 2, (1 + math.sqrt(momentum)) ** 2
        slow, fast = sorted(uniform(source, low, high) for _ in range(2))
        predicted = dwell_time(momentum, slow, fast)
        stays, factors = stay_factors(momentum, slow, fast, 2 * math.ceil(predicted) + 2)
        unstable = stays[torch.ge(factors, 1)]
        yield predicted, float(unstable.max()) if len(unstable) else 0.0


def stay_factors(momentum: float, slow: float, fast: float, longest: int) -> tuple[Tensor, Tensor]:
    """Return the mean stay and the spectral radius of every alternation of 1 to `longest` steps at s and at s′."""
    slow_powers, fast_powers = (matrix_powers(oscillator(s, momentum), longest) for s in (slow, fast))
    counts = torch.arange(1, longest + 1, dtype=torch.float64)
    return (counts[:, None] + counts) / 2, radii(slow_powers[:, None] @ fast_powers)


def radii(matrices: Float[Tensor, "*batch 2 2"]) -> Float[Tensor, "*batch"]:
    """Return the spectral radii of many matrices of two rows."""
    half = matrices.diagonal(dim1=-2, dim2=-1).sum(-1) / 2
    root = (half.square() - torch.linalg.det(matrices)).to(torch.complex128).sqrt()
    return torch.maximum((half + root).abs(), (half - root).abs())


def oscillator(s: float, momentum: float) -> Float[Tensor, "2 2"]:
    """Return the map (x, x₋) → ((1 + β − s)x − βx₋, x) of heavy ball along one direction."""
    return torch.tensor([[1 + momentum - s, -momentum], [1.0, 0.0]], dtype=torch.float64)


def matrix_powers(matrix: Float[Tensor, "n n"], most: int) -> Float[Tensor, "most n n"]:
    """Return the first to the last power."""
    powers = [matrix]
    for _ in range(most - 1):
        powers.append(matrix @ powers[-1])
    return torch.stack(powers)


def captured_in_turns() -> Iterator[Statement]:
    """Measure how much of the rate of k = 0 a direction bears that is captured in turns; nothing is proved of that."""
    statement = "Captured in turns: part of 2(1+β)/λ that is stable, momentum through P against on the update"
    for ratio, name in ((10.0, "λ/η = 10"), (100.0, "λ/η = 100"), (None, "η = 1/α against (1+β)/α")):
        for least in (1, 5, 20):
            problem = f"{name}, β = 0.9, all pairs of stays of {least} to {least + 19} steps"
            trial = stable_part(0.9, ratio, least, "update"), stable_part(0.9, ratio, least, "through")
            yield lower_bound(statement, problem, [trial])
    statement = "Captured in turns, momentum through P, η = 1/α: part of 2(1+β)/λ that is stable"
    problem = "β = 0.5, 0.9 and 0.99, all pairs of stays of 3 to 22 steps"
    yield lower_bound(statement, problem, [(0.99, stable_part(beta, None, 3, "through")) for beta in MOMENTA])


def stable_part(momentum: float, ratio: float | None, least: int, order: Order) -> float:
    """Return the part of 2(1 + β)/λ below which all pairs of stays shrink, in steps of 1 %; no ratio is the edge."""
    for percent in range(1, 100):
        rate = percent / 100 * 2 * (1 + momentum)
        softening = rate / (1 if order == "through" else 1 + momentum) if ratio is None else ratio
        free, captured = (turn_powers(rate, gain, momentum, order, least) for gain in (1.0, 1 / (1 + softening)))
        if float(radii(free[:, None] @ captured).max()) >= 1:
            return (percent - 1) / 100
    return 0.99


def turn_powers(rate: float, gain: float, momentum: float, order: Order, least: int) -> Float[Tensor, "20 2 2"]:
    """Return the powers of a step along one direction, from the least stay on."""
    curvature, P = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), gain, dtype=torch.float64)
    return matrix_powers(step_matrix(curvature, P, rate, momentum, order), least + 19)[least - 1 :]
