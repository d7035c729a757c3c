"""Steps within a radius and a box, against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear

from cao.fitting.box import Box, boxed_least_squares
from cao.fitting.steps import Steps, guess


def random(*shape: int, seed: int = 100) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(100, 106))
def test_least_squares_in_a_box_are_those_of_scipy(seed):
    matrix, constant = random(12, 7, seed=seed), random(12, seed=seed + 50)
    low, high = -0.2 * random(7, seed=seed + 60).abs(), 0.2 * random(7, seed=seed + 70).abs()
    low[0], high[1] = -math.inf, math.inf
    found = boxed_least_squares(matrix, constant, Box(low, high), torch.zeros(7, dtype=torch.float64))
    expected = lsq_linear(matrix.numpy(), -constant.numpy(), (low.numpy(), high.numpy()), method="bvls", tol=1e-14)
    np.testing.assert_allclose(found, expected.x, atol=1e-10)


@pytest.mark.parametrize("is_boxed", [False, True])
@pytest.mark.parametrize("radius", [1e-3, 0.1, 0.5, 1e3])
def test_a_step_has_the_radius_or_is_the_minimum(radius, is_boxed):
    matrix, constant = random(12, 7), random(12, seed=101)
    side = torch.full((7,), 0.05 if is_boxed else math.inf, dtype=torch.float64)
    steps = Steps(matrix, constant, Box(-side, side))
    q, damping = steps.within(radius, 0.0)
    assert bool((q.abs() <= side).all())
    whole = steps.damped(0.0)
    if whole.norm() <= radius:
        assert damping == 0
        torch.testing.assert_close(q, whole)
    else:
        assert float(q.norm()) == pytest.approx(radius, rel=0.11)
        # No other step of this length within the box brings more: λ says what a longer one would.
        free = q.abs() < side
        slope = matrix.T @ (matrix @ q + constant) + damping * q
        assert float(slope[free].abs().max()) < 1e-9


def test_a_secant_through_lengths_that_are_nearly_equal_is_not_followed():
    least, most = 0.5, 1e3
    found = guess([(1.0, 1.0 + 1e-15), (0.5, 1.0)], 1e-3, least, most)
    assert least < found < most
    found = guess([(1.0, 1.0), (0.5, 1.0 + 1e-12)], 1e-6, least, most)
    assert least < found < most
