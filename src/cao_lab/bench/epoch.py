"""The price of curvature in time: an epoch of CAO against one of SGD, and one product against one gradient."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cao import CAO
from cao_lab.assumptions import POWER_ITERATIONS
from cao_lab.bench.rows import Estimate, Row, Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import CURVATURES, LR, BatchTask, Curvature, optimizer_with_sketch, random_task
from cao_lab.bench.timing import Action, Case, Times, always, interleaved, ratio
from cao_lab.facts import product_price_row

REFRESH_EVERY = 400
TARGETS = {1: 1.05, 5: 1.15}
SLOPE_TARGET = 1.1
"""A slope of 1 is linear growth; the rest allows for caches, which small problems fit into and large ones do not."""
RANKS = tuple(TARGETS)
GRADIENT = "gradient"


def epoch_rows(sizes: Sizes) -> Rows:
    """Measure training steps and refreshes of every curvature and rank, and put them together to epochs."""
    task = random_task(sizes.width, sizes.batch, sizes.parts)
    steps = step_ratios(task, RANKS, sizes.step_rounds)
    times = {rank: refresh_times(task, CURVATURES, rank, sizes.refresh_rounds) for rank in RANKS}
    return [
        *(epoch_row(steps[rank], times[rank], kind, sizes, rank=rank) for rank in RANKS for kind in CURVATURES),
        *(price_row(times[1], kind, sizes) for kind in CURVATURES),
        *(growth_row(times, kind, sizes) for kind in CURVATURES),
    ]


def step_ratios(task: BatchTask, ranks: Sequence[int], rounds: int) -> dict[int, Estimate]:
    """Estimate the time of CAO's training step between refreshes over SGD's, by rank."""
    cases = {"sgd": always(sgd_step(task.copy()))}
    cases |= {f"cao {rank}": always(cao_step(task.copy(), rank)) for rank in ranks}
    times = interleaved(cases, rounds)
    return {rank: ratio(times, f"cao {rank}", "sgd") for rank in ranks}


def sgd_step(task: BatchTask) -> Action:
    """Return a whole training step with SGD, in the order of CAO's."""
    optimizer = torch.optim.SGD(task.params, LR)

    def step() -> None:
        loss = task.training_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def cao_step(task: BatchTask, rank: int) -> Action:
    """Return a whole training step with CAO, no refresh being due."""
    optimizer = optimizer_with_sketch(task.params, rank)

    def step() -> None:
        loss = task.training_loss()
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()

    return step


def refresh_times(task: BatchTask, curvatures: Sequence[Curvature], rank: int, rounds: int) -> Times:
    """Time refreshes from a warm start, beside a gradient and an SGD step."""
    cases: dict[str, Case] = {GRADIENT: always(task.gradient), "sgd": always(sgd_step(task.copy()))}
    cases |= {kind: refresh_case(task.copy(), kind, rank) for kind in curvatures}
    return interleaved(cases, rounds)


def refresh_case(task: BatchTask, curvature: Curvature, rank: int) -> Case:
    """Return the refresh of a CAO with default settings; the forward pass of a loss is the training step's own."""
    optimizer = CAO(task.params, LR, rank=rank, refresh_every=REFRESH_EVERY, damping=0.1)

    def prepared() -> Action:
        source = task.source(curvature)
        return lambda: optimizer.refresh(source)

    return prepared


def products_of_refresh(rank: int) -> int:
    """Return the products of a refresh of CAO with default settings."""
    iterations: int = CAO([torch.zeros(rank)], LR, rank=rank).defaults["power_iterations"]
    return rank * (iterations + 1)


def epoch_row(step: Estimate, times: Times, curvature: Curvature, sizes: Sizes, *, rank: int) -> Row:
    """Return (391 steps + 391/400 of a refresh) / (391 steps of SGD) = step ratio + refresh / (400 SGD steps)."""
    refresh = ratio(times, curvature, "sgd")
    epoch = step.plus(refresh.scaled(1 / REFRESH_EVERY))
    sweeps = products_of_refresh(rank) // rank
    longer = step.value + refresh.value * (POWER_ITERATIONS + 1) / sweeps / REFRESH_EVERY
    note = (
        f"width {sizes.width}, batch {sizes.batch}; a step is {step.value:.3f} SGD steps, "
        f"a refresh of {products_of_refresh(rank)} products {refresh.value:.1f}, one every {REFRESH_EVERY}; "
        f"with {POWER_ITERATIONS} power iterations it would be {longer:.3f}"
    )
    target = TARGETS[rank] if curvature == "gauss-newton" else None
    return epoch.row(f"epoch_time_over_sgd_k{rank}_{underscored(curvature)}", note, target=target)


def price_row(times: Times, curvature: Curvature, sizes: Sizes) -> Row:
    """Return what one product costs on average within a refresh of rank 1, in gradients."""
    products = products_of_refresh(1)
    prices = [refresh / products / g for refresh, g in zip(times[curvature], times[GRADIENT], strict=True)]
    name = product_price_row(curvature)
    note = (
        f"width {sizes.width}, batch {sizes.batch}; a refresh of rank 1 divided by its {products} products, over "
        "forward and backward pass"
    )
    return estimate(prices).row(name, note, unit="gradients")


def growth_row(times: Mapping[int, Times], curvature: Curvature, sizes: Sizes) -> Row:
    """Return how a refresh grows with k where the products are a network's and not free."""
    ranks, refreshes = list(times), [of_rank[curvature] for of_rank in times.values()]
    slopes = [log_log_slope(ranks, round_) for round_ in zip(*refreshes, strict=True)]
    cost = ", ".join(
        f"{k}: {1e3 * estimate(seconds).value:.3g} ms" for k, seconds in zip(ranks, refreshes, strict=True)
    )
    note = f"slope of log time over log k, ResNet-18 of width {sizes.width}; 1 is linear ({cost})"
    return estimate(slopes).row(
        f"refresh_slope_in_k_{underscored(curvature)}", note, target=SLOPE_TARGET, unit="exponent"
    )


def log_log_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def underscored(name: str) -> str:
    """Return a name as rows spell it."""
    return name.replace("-", "_")
