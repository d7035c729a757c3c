"""`cao.fit`: parameters that make residuals small, as one call."""

import math
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeGuard

from torch import Tensor

from cao.autograd.isolation import isolated_forward
from cao.curvature.hessian import LossFunction
from cao.curvature.least_squares import LARGEST_JACOBIAN, ResidualFunction
from cao.fitting.losses import Loss
from cao.fitting.problem import Problem
from cao.fitting.progress import Callback, Observer, Tolerances
from cao.fitting.result import Fit
from cao.fitting.sketched import Sketched
from cao.fitting.trust_region import TrustRegion
from cao.fitting.variables import Bounds, Named, Variables

Method: TypeAlias = Literal["auto", "trust-region", "sketched-lbfgs"]

# Parameters up to which a step of the trust region, with its whole Jacobian, is the shorter way.
FEW = 200


def fit(
    residuals: ResidualFunction | LossFunction,
    params: Named,
    *,
    bounds: Bounds | None = None,
    loss: str = "linear",
    scale: float = 1.0,
    method: Method = "auto",
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    max_evaluations: int | None = None,
    callback: Callback | None = None,
    verbose: bool = False,
) -> Fit:
    """Make a sum of squared residuals small, and leave the best parameters in place.

    For example::

        found = cao.fit(lambda: a * torch.exp(-k * t) - data, {"a": a, "k": k}, bounds={"k": (0, None)})
        print(found.report())

    Args:
        residuals: a function that returns one tensor or several; the loss is the sum of their squares, the same at
            every call. One tensor without dimensions is taken as a loss itself.
        params: tensors that require gradients, as for an optimizer, or tensors by name.
        bounds: (lower, upper) of a parameter, which is given by its name or as a tensor; None is no bound.
        loss: what is summed over residuals r at scale s: "linear", r²; "huber", "soft_l1" or "cauchy", s²ρ((r/s)²)
            with scipy's ρ, which outliers cannot dominate.
        scale: the size of a residual that is no outlier.
        method: "trust-region", Levenberg–Marquardt on the whole Jacobian; "sketched-lbfgs", `SketchedLBFGS`; "auto"
            takes the first up to 200 numbers, and the other beyond that and for a loss function.
        ftol: end where neither the last step nor, as far as the Jacobian tells, any other lowers the loss by more than
            this share of it. All three tolerances may be 0, and then only rounding ends a fit. `SketchedLBFGS` asks
            for ten short steps in a row, for `xtol` too.
        xtol: end where a whole Gauss–Newton step is shorter than this share of the parameters' length.
        gtol: end where no column of the Jacobian has a larger cosine with the residuals than this; `SketchedLBFGS` ends
            where no entry of the gradient is larger than this share of the largest at the start.
        max_evaluations: evaluations of the residuals at most, 100 for each number and 5,000 at most if not given.
        callback: is called with a `State` after each iteration, and may return True to end the fit. Weights in the
            residuals may change there.
        verbose: print a line for each iteration, or for each sketch.
    """
    began = perf_counter()
    variables, shape, observer = Variables(params, bounds), Loss(loss, scale), Observer(callback, verbose)
    most = min(100 * variables.size, 5_000) if max_evaluations is None else max_evaluations
    tolerances = Tolerances(ftol, xtol, gtol, most)
    if method not in ("auto", "trust-region", "sketched-lbfgs"):
        raise ValueError(f'method must be "auto", "trust-region" or "sketched-lbfgs", got {method!r}')
    value = start_of(residuals, variables)
    problem: Problem | None = None
    source: Any = residuals
    if is_loss(value):
        check_loss(value, method, shape)
    else:
        problem = Problem(residuals, variables, shape)  # type: ignore[arg-type]
        problem.check_start()
        source = problem.squares()
    is_small = problem is not None and variables.size <= FEW and problem.numbers <= LARGEST_JACOBIAN
    solver: TrustRegion | Sketched
    if problem and (method == "trust-region" or (method == "auto" and is_small)):
        solver = TrustRegion(problem, tolerances, observer)
    else:
        solver = Sketched(source, problem, variables, tolerances, observer)
    reason = solver.run()
    return Fit(
        loss=solver.loss,
        gradient_norm=solver.gradient_norm,
        reason=reason,
        iterations=solver.iterations,
        evaluations=solver.evaluations,
        jacobians=solver.jacobians,
        seconds=perf_counter() - began,
        history=observer.history,
        method=solver.name,
        _variables=variables,
        _problem=problem,
        _position=variables.position(),
        _local=solver.local,
    )


def start_of(function: object, variables: Variables) -> object:
    """Return what the function returns at the start."""
    if not callable(function):
        raise ValueError(
            f"residuals must be a function that returns one tensor or several, got {type(function).__name__}"
        )
    with isolated_forward(variables.flat.device):
        return function()


def is_loss(value: object) -> TypeGuard[Tensor]:
    """Whether a function returned a loss rather than residuals."""
    return isinstance(value, Tensor) and value.ndim == 0


def check_loss(value: Tensor, method: str, shape: Loss) -> None:
    """Refuse what needs residuals where there is a loss alone."""
    if not value.requires_grad:
        raise ValueError("the loss has no graph; compute it from the parameters, without .detach() or no_grad")
    if not math.isfinite(float(value.detach())):
        raise ValueError(f"the loss is {float(value.detach())} at the start; choose parameters where it is finite")
    if method == "trust-region" or not shape.is_linear:
        needs = 'method="trust-region"' if method == "trust-region" else f'loss="{shape.name}"'
        raise ValueError(f"{needs} needs residuals, got one number without dimensions; return the residuals themselves")
