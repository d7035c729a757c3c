"""The rules by which sketches choose their time and their rank."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from cao.curvature.linearized import ExplicitLinearized
from cao.sketch.paying import (
    LARGEST_EXPLICIT_RANK,
    LARGEST_RANK,
    eigenpairs,
    first_price,
    has_settled,
    has_slowed,
    is_affordable,
    next_rank,
    start_columns,
    within_reach,
)


def best_cycle(rate: float, fading: float, price: float) -> int:
    """Return the number of evaluations between sketches with the best gain per evaluation, by trying them all.

    The loss, or its logarithm, falls by rate · fading (1 − exp(−t / fading)) within t evaluations of a sketch.
    """
    gains = {n: rate * fading * (1 - math.exp(-n / fading)) / (n + price) for n in range(1, 2000)}
    return max(gains, key=gains.__getitem__)


@pytest.mark.parametrize(
    "loss", [lambda gain: math.exp(-gain), lambda gain: -3.0 - gain], ids=["logarithm", "negative"]
)
@pytest.mark.parametrize("fading", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("price", [2.0, 10.0, 90.0])
def test_a_new_sketch_is_due_when_it_pays_best(price: float, fading: float, loss: Callable[[float], float]) -> None:
    trace: list[list[float]] = []
    for evaluations in range(2000):
        trace.append([evaluations, loss(0.1 * fading * (1 - math.exp(-evaluations / fading)))])
        if has_slowed(trace, price):
            break
    best = best_cycle(0.1, fading, price)
    # The present rate is an average over half the price, and lags by no more.
    assert best <= evaluations <= best + price / 2 + 2


def test_a_loss_that_falls_steadily_needs_no_new_sketch() -> None:
    trace = [[evaluations, math.exp(-0.01 * evaluations)] for evaluations in range(500)]
    assert not any(has_slowed(trace[:end], 10.0) for end in range(1, 500))


@pytest.mark.parametrize("price", [3.0, 10.0, 90.0])
def test_a_trace_that_is_cut_decides_as_a_whole_one_does(price: float) -> None:
    generator = random.Random(0)
    whole: list[list[float]] = []
    cut: list[list[float]] = []
    evaluations, value, decisions = 0, 1.0, []
    for _ in range(1000):
        evaluations, value = evaluations + generator.choice([1, 1, 2, 5]), value * generator.uniform(0.9, 1.0)
        whole.append([evaluations, value])
        cut = within_reach([*cut, [evaluations, value]], price)
        assert has_slowed(cut, price) == has_slowed(whole, price)
        decisions.append(has_slowed(whole, price))
    assert len(set(decisions)) == 2
    assert len(cut) <= price / 2 + 3


@pytest.mark.parametrize("losses", [(3, -1, 2), (3, 1, -2), (-3, 1, 2), (1, 0, 1), (3, -1, -2)])
def test_a_loss_that_changes_its_sign_is_compared_by_itself(losses: tuple[float, ...]) -> None:
    trace = [[float(10 * index), float(value)] for index, value in enumerate(losses)]
    recent, average = (losses[1] - losses[2]) / 10, (losses[0] - losses[2]) / (20 + 10.0)
    assert has_slowed(trace, 10.0) == (recent < average)


def test_no_two_seeds_share_a_stream() -> None:
    columns = {
        (seed, count): start_columns(None, torch.zeros(5), 2, seed, count) for seed in (0, 1) for count in (0, 1)
    }
    sums = {float(block.sum()) for block in columns.values()}
    assert len(sums) == 4


def test_sketches_may_take_half_of_the_whole_cost() -> None:
    assert is_affordable(0.0, 0)
    assert is_affordable(100.0, 100)
    assert not is_affordable(101.0, 100)


def test_the_rank_covers_what_lies_above_the_damping_with_a_reserve() -> None:
    products, explicit = Diagonal(), ExplicitLinearized(torch.eye(3), torch.zeros(3), [torch.zeros(3)])
    values = torch.logspace(2, -7, 10)
    assert next_rank(products, values, 0.5) == 3 * 3 // 2 + 8
    assert next_rank(products, torch.ones(60), 0.5) == LARGEST_RANK
    assert next_rank(explicit, torch.ones(120), 0.5) == LARGEST_EXPLICIT_RANK
    assert next_rank(products, values, math.inf) == 10
    assert next_rank(products, values[:0], math.inf) == LARGEST_RANK // 2


def test_start_columns_are_the_known_vectors_and_random_ones() -> None:
    known = torch.eye(5)[:2]
    columns = start_columns(known, torch.zeros(5), 4, 1)
    assert torch.equal(columns[:, :2], known.T)
    assert columns[:, 2:].norm() > 0
    assert torch.equal(columns, start_columns(known, torch.zeros(5), 4, 1))
    assert start_columns(known, torch.zeros(5), 1, 1).shape == (5, 1)
    assert start_columns(None, torch.zeros(5), 9, 1).shape == (5, 5)


class Diagonal:
    """An operator that knows nothing but products."""

    params = (torch.zeros(5),)

    def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.tensor([8.0, 4.0, 2.0, 1.0, 0.0], dtype=columns.dtype)[:, None] * columns


def test_products_of_any_operator_are_billed() -> None:
    start = start_columns(None, torch.zeros(5, dtype=torch.float64), 5, 0)
    pairs, price = eigenpairs(Diagonal(), start, None)
    assert pairs.values.tolist() == pytest.approx([8, 4, 2, 1, 0], abs=1e-9)
    assert price == 1.25 * pairs.products == 12.5 == first_price(Diagonal(), "auto", 5)


def test_a_jacobian_is_billed_by_the_residuals_of_a_point() -> None:
    jacobian = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for per_point, expected in ((1, 10), (3, 30)):
        operator = ExplicitLinearized(jacobian, jacobian[:, 0], [torch.zeros(3, dtype=torch.float64)], per_point)
        pairs, price = eigenpairs(operator, torch.eye(3, dtype=torch.float64), None)
        assert pairs.values.tolist() == pytest.approx([18, 8, 2])
        assert price == expected


@pytest.mark.parametrize("window", [20.0, 300.0])
@pytest.mark.parametrize(("decades", "settles"), [(0.9, True), (1.1, False)])
def test_sketches_have_settled_when_the_loss_falls_by_less_than_ten_within_the_window(
    decades: float, settles: bool, window: float
) -> None:
    landmarks = [[cost, 10 ** (-decades * cost / window)] for cost in range(1000)]
    assert not any(has_settled(landmarks[:end], window) for end in range(1, int(window) + 1))
    assert has_settled(landmarks, window) == settles
