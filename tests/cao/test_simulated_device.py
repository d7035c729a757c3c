"""On a device that is not here: tensors of two devices never meet, nothing is read without need, float64 is avoided."""

from typing import Any

import pytest
import torch
from simulated_device import OnDevice, SimulatedDevice, held_by, moved
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cao import CAO, Lanczos
from cao.linalg.columns import orthonormalize
from cao.linalg.spectrum import spectral_density, top_eigenpairs, trace

FIXED = {"rank": 3, "refresh_every": 3, "damping": 0.5}
FORMS = {
    "default rules": {"momentum": 0.9},
    "subspace iteration": FIXED,
    "lanczos": {**FIXED, "eigensolver": Lanczos(10, tolerance=1e-3)},
    "the paper": {**FIXED, "max_update_norm": 0.1, "weight_decay": 1e-3, "negative_curvature": "signed"},
    "damping at the edge": {**FIXED, "damping": "auto"},
    "a rank that sets itself": {"lr": 2.0},
}


def trained(settings: dict[str, Any], *, is_here: bool) -> list[Tensor]:
    """Return a small network's parameters after eight steps, here or on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, targets = torch.randn(20, 4) * torch.tensor([5.0, 2.0, 1.0, 0.5]), torch.arange(20) % 3
    if not is_here:
        model, inputs, targets = moved(model), OnDevice(inputs), OnDevice(targets)
    optimizer = CAO(model.parameters(), **{"lr": 0.1, **settings})
    for _ in range(8):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        optimizer.refresh_if_due(loss)
        loss.backward()
        optimizer.step()
    return [held_by(param.detach()) for param in model.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_an_accelerator_takes_the_very_steps_of_the_processor(form: str) -> None:
    with SimulatedDevice():
        there = trained(FORMS[form], is_here=False)
    for ours, theirs in zip(there, trained(FORMS[form], is_here=True), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_a_device_without_float64_takes_the_same_steps_to_rounding(form: str) -> None:
    with SimulatedDevice(has_float64=False):
        there = trained(FORMS[form], is_here=False)
    for ours, theirs in zip(there, trained(FORMS[form], is_here=True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"max_update_norm": 0.1}, {"momentum": 0.9, "nesterov": True}])
def test_a_step_between_refreshes_reads_nothing_from_the_device(settings: dict[str, Any]) -> None:
    with SimulatedDevice() as device:
        model, inputs = moved(nn.Linear(4, 3)), OnDevice(torch.randn(5, 4))
        optimizer = CAO(model.parameters(), 0.1, **{**FIXED, "refresh_every": 10, **settings})
        for step in range(3):
            loss = model(inputs).square().sum()
            optimizer.zero_grad()
            optimizer.refresh_if_due(loss)
            loss.backward()
            device.reads.clear()
            optimizer.step()
            # The first one compares its gradient with that of the refresh.
            assert step == 0 or not device.reads


@pytest.mark.parametrize("has_float64", [True, False])
def test_a_spectrum_on_a_device_is_that_of_a_dense_solve(has_float64: bool) -> None:
    basis = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(0))).Q
    values = torch.linspace(-3, 5, 40)
    with SimulatedDevice(has_float64=has_float64):
        matrix = OnDevice((basis * values) @ basis.T)
        pairs = top_eigenpairs(matrix, 2, 1e-4)
        assert pairs.values.device == matrix.device
        found, traced, density = (
            pairs.values.tolist(),
            trace(matrix, products=150),
            spectral_density(matrix, probes=2, iterations=20),
        )
    assert found == pytest.approx([5.0, 5 - 8 / 39], rel=1e-3)
    assert traced.value == pytest.approx(40.0, rel=1e-3)
    assert held_by(density.points).min() < -3 < 5 < held_by(density.points).max()


@pytest.mark.parametrize("condition", [1e1, 1e2, 3e2, 1e3, 1e4, 1e6, 1e8])
def test_nearly_dependent_columns_become_orthonormal_without_float64(condition: float) -> None:
    columns = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0)).T.contiguous().T
    columns[:, 1:] = columns[:, :1] + columns[:, 1:] / condition
    with SimulatedDevice(has_float64=False):
        basis = held_by(orthonormalize(OnDevice(columns.clone()))).double()
    assert (basis.T @ basis - torch.eye(4).double()).abs().max() < 3e-6
    outside = columns.double() - basis @ (basis.T @ columns.double())
    assert outside.norm() < 1e-5 * columns.norm()


def test_the_simulation_refuses_what_a_device_would() -> None:
    with SimulatedDevice(has_float64=False) as device:
        there, here = OnDevice(torch.ones(3)), torch.ones(3)
        with pytest.raises(RuntimeError, match="two devices meet"):
            there + here
        with pytest.raises(TypeError, match="no float64"):
            there.double()
        with pytest.raises(TypeError, match="no float64"):
            there.to("cpu", torch.float64)
        assert not device.reads
        assert float(there.sum()) == 3
        assert bool((there == there.cpu().to(there.device)).all())
    assert device.reads.total() == 3
