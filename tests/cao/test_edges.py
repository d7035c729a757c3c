"""The edge of each optimizer, held against torch's own optimizer on a quadratic just below and just above it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from cao import Sharpness

STEPS = 300
Build = Callable[[list[Any]], Optimizer]
DECOUPLED = {"weight_decay": 0.4, "decoupled_weight_decay": True}
CASES: dict[str, Build] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "dampening without momentum": lambda params: SGD(params, lr=0.1, dampening=0.5),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "dampening": lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda params: SGD(params, lr=0.1, momentum=0.8, nesterov=True),
    "weight decay": lambda params: SGD(params, lr=0.1, momentum=0.5, weight_decay=3.0),
    "maximize": lambda params: SGD(params, lr=0.1, maximize=True),
    "adam": lambda params: Adam(params, lr=0.1, betas=(0.9, 0.99), eps=0.1),
    "adam, coupled decay": lambda params: Adam(params, lr=0.1, betas=(0.8, 0.99), weight_decay=0.4),
    "adamw": lambda params: AdamW(params, lr=0.1, betas=(0.9, 0.99), weight_decay=4.0),
    "amsgrad": lambda params: Adam(params, lr=0.1, betas=(0.5, 0.99), amsgrad=True),
    "nadam": lambda params: NAdam(params, lr=0.1, betas=(0.9, 0.99)),
    "nadam, decoupled": lambda params: NAdam(params, lr=0.5, betas=(0.7, 0.99), **DECOUPLED),
    "radam": lambda params: RAdam(params, lr=0.1, betas=(0.9, 0.99)),
    "radam, decoupled": lambda params: RAdam(params, lr=0.5, betas=(0.9, 0.99), **DECOUPLED),
    "adamax": lambda params: Adamax(params, lr=0.1, betas=(0.9, 0.99)),
    "rmsprop": lambda params: RMSprop(params, lr=0.1, eps=0.1),
    "rmsprop, centred, momentum": lambda params: RMSprop(params, lr=0.1, momentum=0.9, centered=True, weight_decay=0.3),
    "adagrad": lambda params: Adagrad(params, lr=0.1, lr_decay=0.1, weight_decay=0.3),
}


def freeze(optimizer: Optimizer, step: int) -> None:
    """Hold still what is not linear: the size of past gradients, and with it bias correction, in which `step` counts.

    v is what makes v̂ the same before and in the coming step, whose own gradient is tiny.
    """
    for param, own in optimizer.state.items():
        wanted = torch.linspace(0.5, 2.0, param.numel(), dtype=param.dtype)
        beta2 = next(g["betas"][1] for g in optimizer.param_groups) if "exp_avg" in own else 0.0
        for name in ("exp_avg_sq", "max_exp_avg_sq"):
            if name in own:
                own[name].copy_(wanted * (1 - beta2**step))
        for name, value in (("exp_inf", wanted), ("square_avg", wanted), ("sum", wanted), ("grad_avg", wanted / 4)):
            if name in own:
                own[name].copy_(value)
        if "mu_product" in own:
            own["mu_product"].fill_(0.3)
        if "step" in own:
            own["step"].fill_(step)


def hold_for_step(optimizer: Optimizer, step: int) -> None:
    """Undo, beforehand, what the coming step does to a held v: it decays it, and corrects it for one step more."""
    for own in optimizer.state.values():
        for group in optimizer.param_groups:
            beta2 = group["betas"][1] if "betas" in group else group.get("alpha", 1.0)
            for name in ("exp_avg_sq", "max_exp_avg_sq"):
                if name in own:
                    decay = 1.0 if name.startswith("max") else beta2
                    own[name].mul_((1 - beta2 ** (step + 1)) / (1 - beta2**step) / decay)
            for name in ("exp_inf", "square_avg", "grad_avg"):
                if name in own:
                    own[name].div_(beta2)
        break


def started(build: Build, size: int, start: float) -> tuple[Tensor, Optimizer]:
    """Return a point, and an optimizer that has a state."""
    theta = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    optimizer = build([theta])
    theta.grad = torch.zeros_like(theta)
    optimizer.step()
    theta.detach().fill_(start)
    return theta, optimizer


def growth(build: Build, hessian: Tensor, step: int) -> float:
    """Return by what factor torch's optimizer makes a tiny point longer in the later half of its steps."""
    theta, optimizer = started(build, len(hessian), 1e-9)
    lengths = [float(theta.detach().norm())]
    # The gradient of a longer one would no longer be small beside what v is held at.
    while len(lengths) < STEPS and lengths[-1] < 1e-4:
        theta.grad = hessian @ theta.detach()
        freeze(optimizer, step)
        hold_for_step(optimizer, step)
        optimizer.step()
        lengths.append(float(theta.detach().norm()))
    return max(lengths[-20:]) / max(lengths[len(lengths) // 2 :][:20])


def ratio_of(build: Build, hessian: Tensor, step: int) -> float:
    """Return the ratio that is read at a state that is held still."""
    theta, optimizer = started(build, len(hessian), 0.0)
    freeze(optimizer, step)
    watch = Sharpness(optimizer, budget=None, tolerance=1e-6, max_products=100)
    return watch.look(theta @ hessian @ theta / 2).ratio


@pytest.mark.parametrize("step", [5, 100_000], ids=["early", "late"])
@pytest.mark.parametrize("name", CASES)
def test_torchs_own_optimizer_loses_its_stability_where_the_ratio_is_one(name: str, step: int) -> None:
    build, sign = CASES[name], -1 if name == "maximize" else 1
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    hessian = sign * basis @ torch.diag(torch.tensor([4.0, 2, 1, 0.5], dtype=torch.float64)) @ basis.T
    scale = 1.0
    for _ in range(8):  # More than once only for weight decay, which does not scale.
        scale /= ratio_of(build, scale * hessian, step)
    assert growth(build, 0.98 * scale * hessian, step) < 0.9
    assert growth(build, 1.02 * scale * hessian, step) > 1.1
