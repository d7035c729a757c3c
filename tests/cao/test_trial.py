import math

import pytest
import torch
from sklearn.datasets import load_digits
from small_models import step_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cao import CAO, Eigenpairs, GaussNewton


def digits() -> tuple[Tensor, Tensor]:
    inputs, labels = load_digits(return_X_y=True)
    return torch.tensor(inputs[:300] / 16, dtype=torch.float32), torch.tensor(labels[:300])


CASES = [(10, "hessian"), (20, "hessian"), (20, "gauss-newton"), (60, "gauss-newton")]


def losses_on_digits(rank: int, kind: str, steps: int, **settings) -> list[float]:
    torch.manual_seed(0)
    inputs, labels = digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = CAO.paper(model.parameters(), 1.0, rank=rank, damping="auto", **settings)
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        operator = GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, labels))
        optimizer.refresh_if_due(operator if kind == "gauss-newton" else loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("rank", "kind"), [(10, "hessian"), (20, "hessian"), (20, "gauss-newton"), (60, "gauss-newton")]
)
def test_automatic_damping_trains_a_network_on_a_full_batch_from_sketches_that_have_not_converged(rank, kind):
    losses = losses_on_digits(rank, kind, 30, refresh_every=6)
    assert max(losses) < 20
    assert losses[-1] < 0.2


def test_automatic_damping_survives_a_sketch_that_is_never_renewed():
    losses = losses_on_digits(20, "hessian", 40, refresh_every=1000)
    assert max(losses) < 20
    assert losses[-1] < losses[0] / 2


def test_automatic_damping_survives_a_singular_hessian_with_weight_decay():
    param = torch.ones(6, dtype=torch.float64, requires_grad=True)
    optimizer = CAO.paper([param], 1.0, rank=4, damping="auto", weight_decay=1e-3, refresh_every=1)
    for _ in range(60):
        step_on(param[:2].square().sum(), optimizer)
    # The minimum of θ₁² + θ₂² + ½·10⁻³‖θ‖² is zero; the flat directions shrink by weight decay alone.
    assert param.detach().abs().max() < 1e-3


def steep(param: Tensor) -> Tensor:
    """Return a loss whose curvature, 1 at zero, grows fast: a Newton step from afar at that curvature overshoots."""
    return (param.square() / 2 + 100 * param**4).sum()


def at_the_curvature_of_zero(**settings) -> tuple[Tensor, CAO]:
    param = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = CAO.paper([param], 1.0, damping="auto", refresh_every=10_000, **settings)
    one = torch.ones(1, dtype=torch.float64)
    optimizer.refresh(Eigenpairs(one * 1e-3, one.reshape(1, 1), 0 * one))
    return param, optimizer


def test_a_step_that_overshot_is_taken_back_and_repeated_with_more_damping():
    param, optimizer = at_the_curvature_of_zero()
    visited = []
    for _ in range(3):
        step_on(steep(param), optimizer)
        visited.append(param.item())
    assert abs(visited[0]) > 10
    assert optimizer.counters.rejected_steps == 2
    # Every repetition starts from 1 again, against the same gradient.
    assert visited[0] < visited[1] < visited[2] < 1


def test_the_minimum_is_reached_from_a_hopeless_curvature():
    param, optimizer = at_the_curvature_of_zero()
    for _ in range(60):
        step_on(steep(param), optimizer)
    assert abs(param.item()) < 1e-3


def test_a_step_to_a_point_without_a_gradient_is_taken_back():
    param, optimizer = at_the_curvature_of_zero()
    for _ in range(40):
        step_on(-(param + 2).log().sum() + param.square().sum(), optimizer)
    # 2θ = 1/(θ + 2), beside a pole at −2, where the loss is no number.
    assert param.item() == pytest.approx((math.sqrt(6) - 2) / 2, abs=1e-3)
    assert optimizer.counters.rejected_steps > 0


def test_trials_are_part_of_the_state():
    ends = []
    for is_resumed in (False, True):
        param, optimizer = at_the_curvature_of_zero()
        step_on(steep(param), optimizer)
        if is_resumed:
            saved = optimizer.state_dict()
            param = param.detach().clone().requires_grad_()
            optimizer = CAO.paper([param], 1.0)
            optimizer.load_state_dict(saved)
        for _ in range(5):
            step_on(steep(param), optimizer)
        ends.append(param.item())
    assert ends[0] == ends[1]
