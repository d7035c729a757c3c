import random

import numpy
import pytest
import torch
from torch import nn

from cao.autograd.isolation import isolated_forward, replaced_parameters

CPU = torch.device("cpu")


def test_buffers_are_the_same_objects_with_the_same_values_afterwards():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
    with isolated_forward(CPU):
        model(torch.randn(5, 3))
        assert model[1].num_batches_tracked == 1
    for name, buffer in model.named_buffers():
        original, value, version = before[name]
        assert buffer is original
        assert torch.equal(buffer, value)
        assert buffer._version == version


def test_buffers_come_back_after_an_error():
    model = nn.BatchNorm1d(4)
    original = model.running_mean
    with pytest.raises(ValueError, match="expected 2D or 3D input"), isolated_forward(CPU):
        model(torch.randn(4))
    assert model.running_mean is original


def test_a_pending_backward_survives():
    model = nn.BatchNorm1d(4).eval()
    inputs = torch.randn(5, 4, requires_grad=True)
    pending = model(inputs).square().sum()
    with isolated_forward(CPU):
        model.train()(inputs)
    pending.backward()


def test_modules_that_share_a_buffer_share_its_clone():
    class Counter(nn.Module):
        def __init__(self, count: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return inputs

    count = torch.zeros(())
    model = nn.Sequential(Counter(count), Counter(count))
    with isolated_forward(CPU):
        model(torch.ones(1))
        assert model[0].count is model[1].count
        assert model[0].count == 2
    assert count == 0


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), numpy.random.rand()


def test_random_streams_do_not_move_and_repeat_inside():
    inside = []
    for _ in range(2):
        with isolated_forward(CPU):
            inside.append(draw())
    assert inside[0] == inside[1] == draw()


def test_no_hook_is_left_behind():
    with isolated_forward(CPU):
        pass
    assert not nn.modules.module._global_forward_pre_hooks


def test_parameters_come_back_even_where_a_module_is_registered_twice():
    layer = nn.Linear(3, 3)
    model, weight = nn.Sequential(layer, layer), layer.weight
    with replaced_parameters(model, {weight: torch.zeros(3, 3)}):
        assert torch.equal(model(torch.ones(3)), layer.bias)
    assert model[0].weight is model[1].weight is weight


def test_buffers_of_a_scripted_model_come_back():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with isolated_forward(CPU):
        model(torch.randn(5, 3))
    assert model.state_dict()["1.num_batches_tracked"] == 0
