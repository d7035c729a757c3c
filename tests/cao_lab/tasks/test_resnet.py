"""The networks are those of the paper in size, and as flexible as small machines need."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cao_lab.tasks.resnet import resnet18, resnet34

Builder = Callable[..., nn.Module]


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_paper_s_networks_have_their_numbers_of_parameters() -> None:
    assert parameters_of(resnet18(10)) == 11_173_962
    assert parameters_of(resnet34(10)) == 21_282_122


@pytest.mark.parametrize(("builder", "layers"), [(resnet18, 18), (resnet34, 34)])
def test_the_name_counts_the_layers_with_weights(builder: Builder, layers: int) -> None:
    model = builder(10, width=2)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(convolutions) + len(linear) == layers


@pytest.mark.parametrize("builder", [resnet18, resnet34])
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 8), (3, 15)])
def test_images_of_any_size_from_8_up_become_logits(builder: Builder, channels: int, size: int) -> None:
    model = builder(7, width=4, channels=channels)
    assert model(torch.randn(3, channels, size, size)).shape == (3, 7)


def test_the_stages_halve_the_image_and_the_stem_does_not() -> None:
    model = resnet18(10, width=2)
    images = model.stem(torch.randn(2, 3, 32, 32))
    shapes = [tuple(images.shape[1:])]
    for stage in model.stages:
        images = stage(images)
        shapes.append(tuple(images.shape[1:]))
    assert shapes == [(2, 32, 32), (2, 32, 32), (4, 16, 16), (8, 8, 8), (16, 4, 4)]


def test_a_block_adds_its_shortcut_before_the_last_relu() -> None:
    block = resnet18(10, width=2).stages[0][0]
    nn.init.zeros_(block.residual[-1].weight)
    images = torch.randn(2, 2, 8, 8)
    assert torch.equal(block(images), images.clamp(min=0))


def test_the_loss_can_be_differentiated_twice() -> None:
    model = resnet18(10, width=2)
    loss = cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.arange(4))
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    product = torch.autograd.grad(gradient, list(model.parameters()), [torch.ones_like(g) for g in gradient])
    assert all(block.isfinite().all() for block in product)
