import pytest
import torch
from small_models import Quadratic, descend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cao import CAO


def after_a_spoilt_step(value: float, **settings) -> tuple[Quadratic, CAO, Tensor, Tensor]:
    """Return a problem after a step whose gradient had one bad entry, its optimizer, and θ and g before that step."""
    problem = Quadratic(sizes=(2, 4))
    optimizer = CAO(problem.params, 0.01, rank=2, damping=0.5, **settings)
    descend(problem, optimizer, 2)
    before = problem.theta
    problem.params[0].grad, problem.params[1].grad = (part.clone() for part in problem.gradient(before).split([2, 4]))
    problem.params[0].grad[1] = value
    optimizer.step()
    return problem, optimizer, before, problem.gradient(before)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scaling", ["inverse-damping", "unit"])
def test_a_gradient_with_one_bad_entry_takes_a_first_order_step_elsewhere(value, scaling):
    problem, _, before, gradient = after_a_spoilt_step(value, scaling=scaling)
    base = 1 / 0.5 if scaling == "inverse-damping" else 1.0
    expected = before - 0.01 * base * gradient
    good = torch.arange(6) != 1
    torch.testing.assert_close(problem.theta[good], expected[good])
    assert not problem.theta[1].isfinite()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_keeps_the_bad_entry_to_itself(value, momentum):
    problem, _, _, _ = after_a_spoilt_step(value, max_update_norm=0.1, momentum=momentum)
    assert problem.theta.isfinite().tolist() == [True, False, True, True, True, True]


def test_momentum_keeps_the_bad_entry_to_itself():
    problem, optimizer, _, _ = after_a_spoilt_step(torch.inf, momentum=0.9)
    good = torch.arange(6) != 1
    assert problem.theta[good].isfinite().all()
    buffers = torch.cat([optimizer.state[p]["momentum_buffer"] for p in problem.params])
    assert buffers[good].isfinite().all()


def test_a_non_finite_gradient_is_counted():
    _, optimizer, _, _ = after_a_spoilt_step(torch.inf)
    assert optimizer.counters.non_finite_steps == 1


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's number is asked for by the host, which would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"max_update_norm": 1.0}, {"weight_decay": 0.1}])
def test_a_step_never_waits_for_the_device(settings):
    problem = Quadratic(sizes=(2, 4))
    optimizer = CAO(problem.params, 0.01, rank=2, damping=0.5, **settings)
    descend(problem, optimizer, 1)
    problem.loss().backward()
    with HostReads() as reads:
        float(torch.ones(()))
        optimizer.step()
    assert reads.count == 1, "only our own"
