"""A watch on a device that is not here: it sees what it would see on the processor, and reads nothing between looks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_device import OnDevice, SimulatedDevice, moved
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from cao import GaussNewton, Reading, Sharpness

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "sgd": lambda params: SGD(params, 0.5, momentum=0.9),
    "adamw": lambda params: AdamW(params, 0.01),
    "rmsprop": lambda params: RMSprop(params, 0.01),
    "adagrad": lambda params: Adagrad(params, 0.1),
    "two rates": lambda params: SGD([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], 0.5),
}
# Numbers that the host waits for, at the most (docs/performance.md).
PER_LOOK, PER_PRODUCT = 7, 5


def watched(name: str, kind: str, *, is_there: bool, device: SimulatedDevice | None = None) -> list[Reading]:
    """Return what a watch sees that looks at every second step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, targets = torch.randn(20, 4), torch.arange(20) % 3
    if is_there:
        model, inputs, targets = moved(model), OnDevice(inputs), OnDevice(targets)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    watch = Sharpness(optimizer, every=2, budget=None)
    for _ in range(13):
        loss = cross_entropy(model(inputs), targets)
        sources: dict[str, Any] = {
            "loss": loss,
            "function": lambda: cross_entropy(model(inputs), targets),
            "Gauss-Newton": GaussNewton(model, inputs, lambda outputs: cross_entropy(outputs, targets)),
        }
        optimizer.zero_grad()
        before = device.reads.total() if device else 0
        seen = watch(sources[kind])
        reads = device.reads.total() - before if device else 0
        assert reads <= (PER_LOOK + PER_PRODUCT * seen.products if seen else 0)
        loss.backward()
        optimizer.step()
        assert not device or device.reads.total() == before + reads
    return watch.readings


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "loss") for name in OPTIMIZERS), ("sgd", "function"), ("adamw", "Gauss-Newton")]
)
@pytest.mark.parametrize("has_float64", [True, False])
def test_a_watch_sees_what_it_would_see_on_the_processor(name: str, kind: str, has_float64: bool) -> None:
    with SimulatedDevice(has_float64=has_float64) as device:
        there = watched(name, kind, is_there=True, device=device)
    here = watched(name, kind, is_there=False)
    assert len(there) >= 2
    for ours, theirs in zip(there, here, strict=True):
        assert ours[:6] == pytest.approx(theirs[:6], rel=1e-9 if has_float64 else 1e-3)
