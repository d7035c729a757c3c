"""SketchedLBFGS on a device that is not here: it takes the very steps of the processor, with few reads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_device import OnDevice, SimulatedDevice, held_by, moved
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from cao import GaussNewton, LeastSquares, SketchedLBFGS
from cao.quasi_newton.corrected import LocalModel, Trial, place_at
from cao.quasi_newton.objective import Objective

Put = Callable[[Any], Any]


def here(thing: Any) -> Any:
    return thing


def there(thing: Any) -> Any:
    return moved(thing) if isinstance(thing, nn.Module) else OnDevice(thing)


class Fit:
    """A small network fitted to a function, here or on the device."""

    def __init__(self, put: Put, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.model = put(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype))
        inputs = torch.randn(30, 2, generator=generator, dtype=dtype)
        self.targets = put((3 * inputs[:, :1]).sin() * inputs[:, 1:])
        self.inputs = put(inputs)
        self.params: list[Tensor] = list(self.model.parameters())

    def residuals(self) -> Tensor:
        return (self.model(self.inputs) - self.targets) / 30**0.5

    def loss(self) -> Tensor:
        return self.residuals().square().sum()

    def closure(self) -> Tensor:
        for param in self.params:
            param.grad = None
        loss = self.loss()
        loss.backward()
        return loss

    def source(self, kind: str | None) -> Any:
        sources: dict[str | None, Callable[[], Any]] = {
            None: lambda: None,
            "function": lambda: self.loss,
            "Jacobian": lambda: LeastSquares(self.residuals, self.params),
            "products": lambda: LeastSquares(self.residuals, self.params, max_jacobian_size=1),
            "Gauss-Newton": lambda: GaussNewton(
                self.model, self.inputs, lambda outputs: mse_loss(outputs, self.targets), self.params
            ),
        }
        return sources[kind]()


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([held_by(param.detach()).reshape(-1) for param in params])


FORMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "no source": (None, {"history_size": 4}),
    "no source, dense": (None, {"memory": "dense"}),
    "pairs over a Jacobian": ("Jacobian", {"memory": "pairs", "refresh": 3, "finish": None, "history_size": 4}),
    "dense over a Jacobian": ("Jacobian", {"memory": "dense", "refresh": 3, "finish": None}),
    "products": ("products", {"refresh": 3, "rank": 4}),
    "a Hessian": ("function", {"refresh": 3, "rank": 4}),
    "Gauss-Newton": ("Gauss-Newton", {"refresh": 3, "rank": 4}),
}


def solver_for(fit: Fit, form: str, max_iter: int = 1) -> SketchedLBFGS:
    kind, settings = FORMS[form]
    return SketchedLBFGS(fit.params, source=fit.source(kind), max_iter=max_iter, max_eval=100, **settings)


def trained(put: Put, form: str, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return where some steps of one iteration each lead."""
    fit = Fit(put, dtype)
    optimizer = solver_for(fit, form)
    for _ in range(steps):
        optimizer.step(fit.closure)
    return flat(fit.params)


@pytest.mark.parametrize("form", FORMS)
def test_the_steps_are_those_of_the_processor_also_where_they_are_resumed(form: str) -> None:
    with SimulatedDevice():
        fit, again = Fit(there), Fit(there)
        optimizer, resumed = solver_for(fit, form), solver_for(again, form)
        for _ in range(5):
            optimizer.step(fit.closure)
        again.model.load_state_dict(fit.model.state_dict())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            resumed.step(again.closure)
        there_ = flat(again.params)
    assert torch.equal(there_, trained(here, form, 7))


# What the host waits for, at the most (docs/performance.md).
READS_PER_EVALUATION, READS_PER_SKETCH = 3, 9


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_takes_three_reads_from_the_device(form: str) -> None:
    with SimulatedDevice() as device:
        fit = Fit(there)
        optimizer = solver_for(fit, form, max_iter=7)
        optimizer.step(fit.closure)
        status = optimizer.status
    assert status.iterations == 7
    # Without a sketch the first step's length is read, too.
    allowed = READS_PER_EVALUATION * status.evaluations + READS_PER_SKETCH * status.refreshes + 1
    assert device.reads.total() <= allowed


@pytest.mark.parametrize("form", FORMS)
def test_a_device_without_float64_takes_the_same_steps_to_rounding(form: str) -> None:
    with SimulatedDevice(has_float64=False):
        there_ = trained(there, form, 3, torch.float32)
    torch.testing.assert_close(there_, trained(here, form, 3, torch.float32), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["Jacobian", "products", "Gauss-Newton"])
def test_products_with_least_squares_are_those_of_the_processor(kind: str) -> None:
    columns = torch.randn(21, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with SimulatedDevice():
        there_ = held_by(Fit(there).source(kind) @ OnDevice(columns))
    assert torch.equal(there_, Fit(here).source(kind) @ columns)


@pytest.mark.parametrize("exact", [False, True])
def test_a_corrected_step_is_that_of_the_processor_with_two_reads_per_evaluation(exact: bool) -> None:
    def longest(put: Put) -> tuple[LocalModel, Trial]:
        fit = Fit(put)
        objective = Objective(fit.closure, fit.params, None)
        start = objective.position()

        def residuals(position: Tensor) -> Tensor:
            with torch.no_grad():
                objective.move(position)
            return fit.residuals().detach().flatten()

        source = fit.source("Jacobian").linearize()
        model = LocalModel(residuals, place_at(residuals, start), source.jacobian, exact=exact)
        return model, model.longest(0.5)

    with SimulatedDevice() as device, torch.no_grad():
        model, found = longest(there)
        assert device.reads.total() <= 3 * model.evaluations + 10
        end = held_by(found.end.position)
    with torch.no_grad():
        _, expected = longest(here)
    assert found.ratio > 0.1
    assert torch.equal(end, expected.end.position)
