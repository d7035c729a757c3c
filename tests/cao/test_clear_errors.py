"""Mistakes and models that CAO cannot serve: each is answered where it is made, with a way out."""

import inspect
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_models import Quadratic, descend, smooth_network
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch_versions import has_fully_shard

from cao import CAO
from cao.autograd.gathering import gathered


def params(size: int = 3, **settings) -> list[Tensor]:
    return [torch.zeros(size, requires_grad=True, **settings)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": True}, r'rank must be a nonnegative whole number or "auto", got True'),
        ({"refresh_every": True}, r"refresh_every must be .*, got True"),
        ({"lr": float("inf")}, r"lr must be .*, got inf"),
        ({"lr": torch.tensor(torch.inf)}, r"lr must be .*, got tensor\(inf\)"),
        ({"damping": float("inf")}, r"damping must be .*, got inf"),
        ({"weight_decay": float("inf")}, r"weight_decay must be .*, got inf"),
    ],
)
def test_settings_that_pass_for_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CAO(params(), **{"lr": 0.1, **settings})


@pytest.mark.parametrize("name", ["rank", "refresh_every", "power_iterations", "seed"])
def test_whole_numbers_of_numpy_are_accepted_and_saved_as_python_ones(name, tmp_path):
    problem = Quadratic()
    optimizer = CAO(problem.params, 1e-3, **{"rank": 1, name: np.int64(2)})
    descend(problem, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    saved = torch.load(tmp_path / "state", weights_only=True)
    assert type(saved["param_groups"][0][name]) is int
    reference = Quadratic()
    assert torch.equal(problem.theta, descend(reference, CAO(reference.params, 1e-3, **{"rank": 1, name: 2}), 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float8_e4m3fn}, r"float8_e4m3fn"),
        ({"device": "meta"}, r"meta .*to_empty"),
    ],
)
def test_parameters_without_arithmetic_or_storage_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CAO(params(**settings), 0.1)


def test_a_model_that_is_frozen_altogether_is_told_so():
    model = smooth_network()
    loss = model(torch.ones(1, 3, dtype=torch.float64)).sum()
    optimizer = CAO(model.parameters(), 0.1)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"all parameters are frozen.*requires_grad"):
        optimizer.refresh(loss)


def test_refresh_if_due_tells_whether_there_is_a_new_sketch():
    problem = Quadratic()
    optimizer = CAO(problem.params, 1e-3, refresh_every=1)
    assert optimizer.refresh_if_due(problem.loss())
    problem.loss().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="non-finite"):
        assert not optimizer.refresh_if_due(problem.loss() * torch.nan)


SETTINGS_OF_SGD = ("dampening", "differentiable", "foreach", "fused", "maximize", "nesterov")


@pytest.mark.parametrize("name", SETTINGS_OF_SGD)
def test_what_sgd_takes_cao_takes_or_says_why_not(name):
    settings = {"momentum": 0.9, name: 0.5} if name == "dampening" else {"momentum": 0.9, name: True}
    settings |= {"dampening": 0.0} if name == "nesterov" else {}
    problem, reference = Quadratic(), Quadratic()
    refusal = ""
    try:
        ours = descend(problem, CAO(problem.params, 0.01, **settings, rank=0, scaling="unit"), 4)
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        assert name in refusal
        assert "unexpected keyword" not in refusal
    else:
        theirs = descend(reference, torch.optim.SGD(reference.params, 0.01, **settings), 4)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_no_other_setting_of_sgd_is_missing():
    ours, theirs = (set(inspect.signature(optimizer).parameters) for optimizer in (CAO, torch.optim.SGD))
    assert theirs - ours <= set(SETTINGS_OF_SGD)


@pytest.mark.parametrize(("name", "value"), [("metric", "adam"), ("keep_sketch", False), ("skip_non_finite", True)])
def test_what_was_retired_is_refused_with_the_reason(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported: "):
        CAO(Quadratic().params, 0.01, **{name: value})


def test_a_default_of_sgd_that_is_spelt_out_is_taken_and_an_option_of_nobody_is_not():
    CAO(Quadratic().params, 0.01, dampening=0.0, foreach=None, fused=None, differentiable=False, maximize=False)
    with pytest.raises(TypeError, match="CAO has no option 'learning_rate'"):
        CAO(Quadratic().params, 0.01, learning_rate=0.1)


def calls_while(run) -> int:
    """Return how many functions are called, in Python and below it."""
    count = 0

    def note(_frame, event: str, _argument) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_construction_costs_the_same_for_each_group():
    def extra_calls(groups: int) -> int:
        """Return what CAO does beyond torch's own optimizers, whose construction is quadratic itself."""
        listed = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(groups)]
        ours = calls_while(lambda: CAO([dict(group) for group in listed], 0.1))
        return ours - calls_while(lambda: torch.optim.SGD([dict(group) for group in listed], 0.1))

    assert extra_calls(200) < 2.5 * extra_calls(100)


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@has_fully_shard
@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("as_source", [lambda loss: loss(), lambda loss: loss], ids=["loss", "function"])
def test_a_model_sharded_after_the_optimizer_was_built_is_recognised(as_source):
    model = nn.Linear(3, 2)
    optimizer = CAO(model.parameters(), 0.1)
    torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"not before fully_shard.*pass a function that returns the loss"):
        optimizer.refresh_if_due(as_source(lambda: model(torch.ones(2, 3)).square().sum()))


def test_parameters_without_numbers_are_not_called_frozen():
    with pytest.raises(ValueError, match="all parameters that require a gradient are empty"):
        CAO([torch.zeros(0, requires_grad=True)], 0.1).refresh(torch.zeros(()))


def test_a_step_of_a_model_that_is_frozen_does_nothing_and_training_goes_on_afterwards():
    param = torch.ones(3)
    optimizer = CAO([param], 0.1)
    optimizer.step()
    assert torch.equal(param, torch.ones(3))
    param.requires_grad_()
    loss = param.square().sum()
    optimizer.refresh_if_due(loss)
    loss.backward()
    optimizer.step()
    assert float(param.detach().max()) < 1


def test_a_fully_shard_of_another_torch_is_refused_by_version():
    with (
        pytest.raises(RuntimeError, match=rf"fully_shard of torch {re.escape(torch.__version__)} keeps its"),
        gathered(SimpleNamespace(_fsdp_param_group=None)),
    ):
        pass
