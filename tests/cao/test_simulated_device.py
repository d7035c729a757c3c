"""On a device that is not here: tensors of two devices never meet, nothing is read without need, float64 is avoided."""

import copy
from typing import Any

import pytest
import torch
from simulated_device import OnDevice, SimulatedDevice, held_by, moved
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cao import (
    CAO,
    AtTheEdge,
    ByNeed,
    Every,
    Fixed,
    GaussNewton,
    Hessian,
    Lanczos,
    OnDrift,
    SubspaceIteration,
)
from cao.linalg.columns import orthonormalize
from cao.linalg.spectrum import spectral_density, top_eigenpairs, trace

FIXED: dict[str, Any] = {"rank": 3, "refresh_every": 3, "damping": 0.5}
FORMS: dict[str, dict[str, Any]] = {
    "default rules": {"momentum": 0.9},
    "subspace iteration": FIXED,
    "to a tolerance": {**FIXED, "eigensolver": SubspaceIteration(8, 1e-2, "algebraic"), "negative_curvature": "clip"},
    "lanczos": {**FIXED, "eigensolver": Lanczos(10, tolerance=1e-3), "warm_start": False},
    "the paper": {**FIXED, "max_update_norm": 0.1, "weight_decay": 1e-3, "negative_curvature": "signed"},
    "damping at the edge": {**FIXED, "damping": AtTheEdge(), "nesterov": True, "momentum": 0.9},
    "a rank that sets itself": {"lr": 2.0, "rank": ByNeed(), "refresh_every": OnDrift(longest=5)},
    "unit scaling": {**FIXED, "refresh_every": Every(2), "damping": Fixed(0.5), "scaling": "unit", "momentum": 0.9},
}
SOURCES = ("loss", "function", "parts", "Gauss-Newton", "eigenpairs")


class Training:
    """A small network on twenty points, here or on the device."""

    def __init__(self, settings: dict[str, Any], *, is_here: bool, source: str = "loss") -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.inputs = torch.randn(20, 4) * torch.tensor([5.0, 2.0, 1.0, 0.5])
        self.targets = torch.arange(20) % 3
        if not is_here:
            self.model = moved(self.model)
            self.inputs, self.targets = OnDevice(self.inputs), OnDevice(self.targets)
        first, second = list(self.model[0].parameters()), list(self.model[2].parameters())  # type: ignore[index]
        groups = [{"params": first}, {"params": second, "lr": 0.5 * settings.get("lr", 0.1)}]
        self.optimizer = CAO(groups, **{"lr": 0.1, **settings})
        self.source = source

    def loss(self, points: slice = slice(None)) -> Tensor:
        return cross_entropy(self.model(self.inputs[points]), self.targets[points])

    def curvature(self, loss: Tensor) -> Any:
        params = list(self.model.parameters())
        if self.source == "eigenpairs":
            return top_eigenpairs(Hessian(loss, params), 3, 0.1) if self.optimizer.is_refresh_due else loss
        return {
            "loss": loss,
            "function": self.loss,
            "parts": lambda: (self.loss(slice(first, first + 5)) for first in range(0, 20, 5)),
            "Gauss-Newton": GaussNewton(self.model, self.inputs, lambda out: cross_entropy(out, self.targets)),
        }[self.source]

    def step(self) -> bool:
        """Take a step, and return whether there was a new sketch before it."""
        loss = self.loss()
        self.optimizer.zero_grad()
        is_new = self.optimizer.refresh_if_due(self.curvature(loss))
        loss.backward()
        self.optimizer.step()
        return is_new

    def steps(self, count: int = 5) -> list[Tensor]:
        """Take steps, and return where they lead."""
        for _ in range(count):
            self.step()
        return [held_by(param).detach().clone() for param in self.model.parameters()]


CASES = [*((form, "loss") for form in FORMS), *(("subspace iteration", source) for source in SOURCES[1:]),
         ("default rules", "Gauss-Newton")]  # fmt: skip


@pytest.mark.parametrize(("form", "source"), CASES)
def test_an_accelerator_takes_the_very_steps_of_the_processor(form: str, source: str) -> None:
    with SimulatedDevice():
        there = Training(FORMS[form], is_here=False, source=source).steps()
    here = Training(FORMS[form], is_here=True, source=source).steps()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(there, here, strict=True))


@pytest.mark.parametrize(("form", "source"), CASES)
def test_a_device_without_float64_takes_the_same_steps_to_rounding(form: str, source: str) -> None:
    with SimulatedDevice(has_float64=False):
        there = Training(FORMS[form], is_here=False, source=source).steps()
    for ours, theirs in zip(there, Training(FORMS[form], is_here=True, source=source).steps(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_on_a_device_goes_on_as_on_the_processor(form: str) -> None:
    with SimulatedDevice():
        first = Training(FORMS[form], is_here=False)
        first.steps(4)
        saved = copy.deepcopy(first.optimizer.state_dict())
        again = Training(FORMS[form], is_here=False)
        again.model.load_state_dict(first.model.state_dict())
        again.optimizer.load_state_dict(saved)
        there = again.steps(2)
    here = Training(FORMS[form], is_here=True).steps(6)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(there, here, strict=True))


# What the host waits for, at the most (docs/performance.md): with each refresh, and with each look between refreshes.
READS_PER_REFRESH = {"subspace iteration": 10, "the paper": 10, "unit scaling": 10, "default rules": 18}
READS_PER_LOOK = 2


@pytest.mark.parametrize("form", READS_PER_REFRESH)
def test_a_training_waits_for_the_device_only_where_the_curvature_is_looked_at(form: str) -> None:
    with SimulatedDevice() as device:
        training = Training(FORMS[form], is_here=False)
        for step in range(8):
            looks = training.optimizer.counters.looks
            device.reads.clear()
            is_new = training.step()
            reads = device.reads.total()
            # The first step compares its gradient with that of the refresh.
            allowed = (READS_PER_REFRESH[form] if is_new else 0) + (step == 0)
            assert reads <= allowed + READS_PER_LOOK * (training.optimizer.counters.looks - looks)


def test_where_batches_agree_the_default_rule_reads_one_norm_per_step() -> None:
    with SimulatedDevice() as device:
        training = Training({"lr": 1e-3}, is_here=False)
        training.steps(4)
        for _ in range(4):
            looks, before = training.optimizer.counters.looks, device.reads.total()
            training.step()
            looks = training.optimizer.counters.looks - looks
            assert device.reads.total() - before <= 1 + READS_PER_LOOK * looks


@pytest.mark.parametrize(
    "settings", [{}, {"max_update_norm": 0.1}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}]
)
def test_steps_ask_the_device_for_the_same_operations_whatever_the_data(settings: dict[str, Any]) -> None:
    """What a CUDA graph needs: no allocation depends on data, and nothing is read."""
    with SimulatedDevice() as device:
        training = Training({**FIXED, "refresh_every": 10, **settings}, is_here=False)
        asked = []
        for _ in range(4):
            loss = training.loss()
            training.optimizer.zero_grad(set_to_none=False)
            training.optimizer.refresh_if_due(loss)
            loss.backward()
            device.operations.clear()
            training.optimizer.step()
            asked.append(list(device.operations))
    assert asked[1] == asked[2] == asked[3]


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
