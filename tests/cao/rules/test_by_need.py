"""Rank by need: what a plain step overshoots is captured, and nothing else."""

import pytest
import torch
from small_models import Quadratic
from torch.optim import SGD

from cao import CAO, ByNeed


@pytest.mark.parametrize(("lr", "captured"), [(0.06, 1), (0.15, 2), (0.3, 3), (1.0, 4)])
def test_directions_are_captured_from_half_the_inverse_rate_on(lr, captured):
    problem = Quadratic((9.0, 4.0, 2.0, 1.0, 0.3, 0.1))
    optimizer = CAO(problem.params, lr)
    optimizer.refresh(problem.loss())
    assert optimizer.sketch.values == pytest.approx([9.0, 4.0, 2.0, 1.0][:captured])
    assert optimizer.captured == captured


def test_no_more_than_the_largest_rank_are_captured_and_the_next_one_is_the_measure_of_the_rest():
    problem = Quadratic((9.0, 8.0, 7.0, 6.0, 5.0, 4.0))
    optimizer = CAO(problem.params, 1.0, rank=ByNeed(largest=2))
    optimizer.refresh(problem.loss())
    assert optimizer.sketch.values == pytest.approx([9.0, 8.0])
    assert optimizer.sketch.damping == pytest.approx(7.0 / (0.5 * 2))


def test_the_rank_grows_and_shrinks_with_the_rate():
    problem = Quadratic((9.0, 4.0, 2.0, 1.0, 0.3, 0.1))
    optimizer = CAO(problem.params, 0.06)
    ranks = []
    for lr in (0.06, 1.0, 0.06):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.refresh(problem.loss())
        ranks.append(optimizer.captured)
    assert ranks == [1, 4, 1]


def test_without_need_the_step_is_first_order_and_the_sharpest_direction_is_watched():
    problem, reference = Quadratic(), Quadratic()
    optimizer, first_order = CAO(problem.params, 0.01), SGD(reference.params, 0.01)
    optimizer.refresh(problem.loss())
    problem.loss().backward()
    reference.loss().backward()
    optimizer.step()
    first_order.step()
    assert torch.equal(problem.theta, reference.theta)
    # Four products have found it roughly, which is enough to know that it is not sharp.
    assert optimizer.sketch.values == pytest.approx([9.0], rel=0.1)


def test_a_model_smaller_than_the_reserve_works():
    problem = Quadratic((3.0,))
    optimizer = CAO(problem.params, 1.0)
    optimizer.refresh(problem.loss())
    problem.loss().backward()
    optimizer.step()
    assert optimizer.sketch.values == pytest.approx([3.0])


@pytest.mark.parametrize(("lr", "products"), [(0.001, 4), (0.06, 12)])
def test_a_refresh_ends_early_where_nothing_can_be_sharp(lr, products):
    problem = Quadratic(torch.linspace(0.1, 9.0, 40).tolist())
    optimizer = CAO(problem.params, lr)
    optimizer.refresh(problem.loss())
    assert optimizer.counters.hessian_products == products
    assert (optimizer.captured > 0) == (products == 12)
