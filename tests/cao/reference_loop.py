"""What the documented loop comes to on ten batches, for other people's loops to be compared with."""

import pytest
import torch
from small_models import batch, flat_params, smooth_network, train
from torch import Tensor, nn

from cao import CAO

SETTINGS = {"rank": 2, "refresh_every": 3, "damping": 0.5, "momentum": 0.9}
BATCHES = [batch(8, seed=seed) for seed in range(10)]


def plain_loop() -> tuple[Tensor, CAO]:
    """Return the parameters that the documented loop leads to, over four refreshes, and its optimizer."""
    model = smooth_network()
    optimizer = CAO(model.parameters(), 0.1, **SETTINGS)
    train(model, optimizer, BATCHES)
    assert optimizer.counters.refreshes == 4
    return flat_params(model), optimizer


def assert_as_in_the_plain_loop(model: nn.Module, optimizer: CAO) -> None:
    params, reference = plain_loop()
    torch.testing.assert_close(flat_params(model), params, rtol=1e-10, atol=1e-12)
    assert optimizer.counters == reference.counters
    assert optimizer.sketch.values == pytest.approx(reference.sketch.values, rel=1e-9)
