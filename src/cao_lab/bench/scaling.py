"""How the optimizer's own work and memory grow with the number of parameters and with the rank."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from cao import CAO
from cao_lab.bench.allocation import AllocationMeter
from cao_lab.bench.rows import Row, Rows, estimate
from cao_lab.bench.sizes import Sizes
from cao_lab.bench.task import LR, device
from cao_lab.bench.timing import Action, Case, always, interleaved

TARGET = 1.1
"""A slope of 1 is linear growth; the rest allows for caches, which small problems fit into and large ones do not."""


class Diagonal:
    """A diagonal matrix: its product is one multiplication a number, so that all else is the eigensolver's."""

    def __init__(self, param: nn.Parameter) -> None:
        self.params = [param]
        self.diagonal = torch.linspace(-1, 2, param.numel(), device=param.device)
        self.products = 0

    def __matmul__(self, columns: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        """Return the product with each column, contiguous in memory."""
        self.products += columns.shape[1]
        return (columns.T * self.diagonal).T


def scaling_rows(sizes: Sizes) -> Rows:
    """Fit the growth of refresh and step in n, at rank 1 and at rank 8, and in k."""
    low, high = 1, min(8, max(sizes.ranks))
    return [
        *growth_rows("n", {n: (n, low) for n in sizes.parameters}, sizes, f"k = {low}", f"_k{low}"),
        *growth_rows("n", {n: (n, high) for n in sizes.parameters[:-1]}, sizes, f"k = {high}", f"_k{high}"),
        *growth_rows(
            "k", {k: (sizes.rank_parameters, k) for k in sizes.ranks}, sizes, f"n = {sizes.rank_parameters:.0e}"
        ),
    ]


def growth_rows(
    variable: str, points: Mapping[int, tuple[int, int]], sizes: Sizes, fixed: str, suffix: str = ""
) -> Rows:
    """Time refresh and step at every point (n, k), interleaved, and return the slopes of log time over log variable."""
    rows = []
    for name, make in (("refresh", refresh_action), ("step", step_action)):
        cases = {str(x): repeated(make(n, k), repetitions(n, k)) for x, (n, k) in points.items()}
        times = interleaved(cases, sizes.scaling_rounds)
        seconds = {x: [t / repetitions(*points[x]) for t in times[str(x)]] for x in points}
        rows.append(slope_row(f"{name}_slope_in_{variable}{suffix}", variable, seconds, fixed))
    return rows


def slope_row(name: str, variable: str, seconds: Mapping[int, Sequence[float]], fixed: str) -> Row:
    """Fit one slope a round."""
    xs = list(seconds)
    slopes = [log_log_slope(xs, round_) for round_ in zip(*seconds.values(), strict=True)]
    cost = ", ".join(f"{x:.0e}: {1e3 * estimate(seconds[x]).value:.3g} ms" for x in xs)
    note = f"slope of log time over log {variable}, {fixed}; 1 is linear ({cost})"
    return estimate(slopes).row(name, note, target=TARGET, unit="exponent")


def log_log_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def refresh_action(n: int, k: int) -> Action:
    """Return a refresh of CAO with default settings on a diagonal matrix."""
    param = nn.Parameter(torch.zeros(n, device=device()))
    optimizer, operator = CAO([param], LR, rank=k, refresh_every=400, damping=0.1), Diagonal(param)
    return lambda: optimizer.refresh(operator)


def step_action(n: int, k: int) -> Action:
    """Return a step of CAO with a sketch."""
    param = nn.Parameter(torch.zeros(n, device=device()))
    optimizer = CAO([param], LR, rank=k, power_iterations=0, refresh_every=10**9, damping=0.1)
    optimizer.refresh(Diagonal(param))
    param.grad = torch.ones_like(param)
    return optimizer.step


def repetitions(n: int, k: int) -> int:
    """Return how often a small problem is repeated, so that the clock sees more than its own noise."""
    return min(10, math.ceil(10**6 / (n * k)))


def repeated(action: Callable[[], object], times: int) -> Case:
    """Return an action done several times over."""

    def all_of_them() -> None:
        for _ in range(times):
            action()

    return always(all_of_them)


def allocation_rows(sizes: Sizes) -> Rows:
    """Count the floats that are alive between refreshes and at the peak of one."""
    n = sizes.parameters[-2]  # Large against the blocks of rows that the eigensolver works on.
    rows = []
    for k in sorted({1, min(8, max(sizes.ranks))}):
        held, peak = floats_per_parameter(n, k)
        rows += [
            Row(f"floats_between_refreshes_k{k}", held, k + 1, None, "n", "parameters and sketch, gradient freed", 1),
            Row(
                f"floats_during_refresh_k{k}", peak, 2 * k + 4, None, "n",
                "peak of a refresh from a warm start, parameters included, gradient freed, the operator's own not", 1,
            ),
        ]  # fmt: skip
    return rows


def floats_per_parameter(n: int, k: int) -> tuple[float, float]:
    """Return, in multiples of n, the floats held between refreshes and the most held during the second one."""
    with AllocationMeter() as meter:
        param = nn.Parameter(torch.zeros(n, device=device()))
        operator = Diagonal(param)
        own = meter.live_bytes - 4 * n
        optimizer = CAO([param], LR, rank=k, refresh_every=1, damping=0.1)
        for _ in range(2):
            meter.reset_peak()
            optimizer.refresh(operator)
            peak = meter.peak_bytes
            param.grad = torch.zeros_like(param)
            optimizer.step()
            optimizer.zero_grad()
        return (meter.live_bytes - own) / (4 * n), (peak - own) / (4 * n)
