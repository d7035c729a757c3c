"""The methods, each with the tightest tolerances that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

import cao
from cao_lab.fits.meter import Meter, Run

EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class FitMethod:
    """A method: how it runs on a meter, whether it takes gradients rather than Jacobians, and whether bounds."""

    run: Run
    by_gradients: bool = False
    takes_bounds: bool = False


def ours(meter: Meter) -> None:
    """Run cao.fit."""
    p = torch.tensor(meter.problem.start).requires_grad_()
    bounds = meter.problem.bounds
    box = None if bounds is None else {p: (torch.from_numpy(bounds[0]), torch.from_numpy(bounds[1]))}
    cao.fit(
        lambda: meter.tensor(p), [p], bounds=box, method="trust-region",
        ftol=0, xtol=0, gtol=0, max_evaluations=meter.most,
    )  # fmt: skip


def scipys(method: Literal["trf", "dogbox", "lm"], x_scale: Literal["jac"] | float = 1.0) -> Run:
    """Return scipy.optimize.least_squares with a method of its."""

    def run(meter: Meter) -> None:
        bounds = meter.problem.bounds or (-np.inf, np.inf)
        least_squares(
            meter.residuals, meter.problem.start, meter.jacobian, bounds=bounds, method=method, x_scale=x_scale,
            ftol=EPS, xtol=EPS, gtol=EPS, max_nfev=meter.most,
        )  # fmt: skip

    return run


def torch_lbfgs(meter: Meter) -> None:
    """Run torch.optim.LBFGS with its line search."""
    p = torch.tensor(meter.problem.start).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [p], max_iter=meter.most, max_eval=meter.most, tolerance_grad=0, tolerance_change=0,
        history_size=100, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = meter.tensor(p).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def pytorch_minimize(meter: Meter) -> None:
    """Run torchmin.least_squares, a trust region."""
    from torchmin import least_squares as minimize  # noqa: PLC0415

    options = {"ftol": EPS, "xtol": EPS, "gtol": EPS, "max_nfev": meter.most, "tr_solver": "exact"}
    minimize(meter.tensor, torch.tensor(meter.problem.start), **options)


def torch_levenberg_marquardt(meter: Meter) -> None:
    """Run torch-levenberg-marquardt with its defaults, until it says that it is stuck."""
    from torch_levenberg_marquardt.training import LevenbergMarquardtModule  # noqa: PLC0415

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(torch.tensor(meter.problem.start))

        def forward(self, _: Tensor) -> Tensor:
            return meter.tensor(self.p)

    class Module(LevenbergMarquardtModule):  # type: ignore[misc]
        def _compute_jacobian(self, inputs: Tensor, targets: Tensor, _: object = None) -> tuple[Tensor, Tensor, Tensor]:
            outputs = self.model(inputs)
            here = self.model.p.detach().numpy()
            residuals = self.loss_fn.residuals(outputs, targets).reshape(-1, 1)
            # Its residuals are targets − outputs or the reverse; the Jacobian follows them.
            sign = float(torch.sign((residuals.flatten() * outputs).sum()) or 1.0)
            return sign * torch.from_numpy(meter.jacobian(here)), residuals, outputs

    model = Model()
    with torch.no_grad():
        zeros = torch.zeros_like(model(torch.zeros(1)))
        solver = Module(model)
        is_over = False
        while not is_over:
            _, _, is_over, _ = solver.training_step(zeros, zeros)


METHODS: Mapping[str, FitMethod] = {
    "cao.fit": FitMethod(ours, takes_bounds=True),
    "scipy trf": FitMethod(scipys("trf"), takes_bounds=True),
    "scipy trf, scaled": FitMethod(scipys("trf", "jac"), takes_bounds=True),
    "scipy dogbox": FitMethod(scipys("dogbox"), takes_bounds=True),
    "scipy dogbox, scaled": FitMethod(scipys("dogbox", "jac"), takes_bounds=True),
    "scipy lm": FitMethod(scipys("lm", "jac")),
    "torch L-BFGS": FitMethod(torch_lbfgs, by_gradients=True),
    "pytorch-minimize": FitMethod(pytorch_minimize),
    "torch-levenberg-marquardt": FitMethod(torch_levenberg_marquardt),
}
