import pytest
import torch
from small_models import step_on
from torch import Tensor

from cao import CAO, Eigenpairs


class TwoBlocks:
    """5‖a‖² + ½h‖b‖²: no product with the Hessian leads from one block into the other."""

    def __init__(self) -> None:
        self.a, self.b = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def loss(self, curvature: float) -> Tensor:
        return 5 * self.a.square().sum() + curvature * self.b.square().sum() / 2

    def settled(self, rank: int, **settings) -> CAO:
        """Return an optimizer whose sketch is exact at h = 1, without the least component in b."""
        optimizer = CAO([self.a, self.b], rank=rank, **{"lr": 1e-3, **settings})
        vectors = torch.eye(8, rank, dtype=torch.float64)
        values, residuals = torch.full((2, rank), 10.0, dtype=torch.float64)
        optimizer.refresh(Eigenpairs(values, vectors, residuals * 0))
        return optimizer


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("eigensolver", ["subspace", "lanczos"])
@pytest.mark.parametrize("growth", [[1000.0], [3.0, 30.0, 300.0, 1000.0]], ids=["at once", "step by step"])
def test_a_curvature_that_grows_outside_the_sketch_is_found_within_five_refreshes(growth, eigensolver, rank):
    problem = TwoBlocks()
    optimizer = problem.settled(rank, eigensolver=eigensolver)
    for curvature in growth + [1000.0] * 4:
        optimizer.refresh(problem.loss(curvature))
    assert optimizer.sketch.values == pytest.approx([1000.0] * rank, rel=1e-2)


def test_training_goes_on_when_the_curvature_of_another_block_grows():
    problem = TwoBlocks()
    optimizer = problem.settled(4, lr=0.1, refresh_every=4, damping=1.0)
    for _ in range(4):
        step_on(problem.loss(1.0), optimizer)
    for _ in range(150):
        step_on(problem.loss(1000.0), optimizer)
    assert problem.loss(1000.0).item() < 1e-3


def test_a_settled_sketch_stays_and_fresh_directions_cost_at_most_one_product_a_sweep():
    problem = TwoBlocks()
    optimizer = problem.settled(2)
    for _ in range(5):
        optimizer.refresh(problem.loss(1.0))
        assert optimizer.sketch.values == pytest.approx([10.0] * 2, rel=1e-6)
    assert optimizer.counters.hessian_products <= 5 * 4 * (2 + 1)
