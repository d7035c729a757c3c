"""`cao.fit`: parameters that make residuals small, as one call."""

from time import perf_counter
from typing import Any, Literal, TypeAlias

from cao.curvature.hessian import LossFunction
from cao.curvature.least_squares import ResidualFunction
from cao.fitting.losses import Loss
from cao.fitting.problem import Problem
from cao.fitting.progress import Callback, Observer, Tolerances
from cao.fitting.result import Fit
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

    ::

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
            this share of it. All three tolerances may be 0, and then only rounding ends a fit.
        xtol: end where a whole Gauss–Newton step is shorter than this share of the parameters' length.
        gtol: end where no column of the Jacobian has a larger cosine with the residuals than this.
        max_evaluations: evaluations of the residuals at most, 100 for each number and 5,000 at most if not given.
        callback: is called with a `State` after each iteration, and may return True to end the fit. Weights in the
            residuals may change there.
        verbose: print a line for each iteration, or for each sketch.
    """
    began = perf_counter()
    variables, shape = Variables(params, bounds), Loss(loss, scale)
    most = min(100 * variables.size, 5_000) if max_evaluations is None else max_evaluations
    tolerances, observer = Tolerances(ftol, xtol, gtol, most), Observer(callback, verbose)
    check_method(method)
    problem = Problem(residuals, variables, shape)  # type: ignore[arg-type]
    problem.check_start()
    solver: Any = TrustRegion(problem, tolerances, observer)
    reason = solver.run()
    return Fit(
        loss=solver.local.loss,
        gradient_norm=float(solver.slope(solver.local).abs().max()),
        reason=reason,
        iterations=solver.iterations,
        evaluations=solver.evaluations,
        jacobians=solver.jacobians,
        seconds=perf_counter() - began,
        history=observer.history,
        method="trust-region",
        _variables=variables,
        _problem=problem,
        _position=variables.position(),
        _local=solver.local,
    )


def check_method(method: str) -> None:
    """Refuse a method that there is not."""
    if method not in ("auto", "trust-region", "sketched-lbfgs"):
        raise ValueError(f'method must be "auto", "trust-region" or "sketched-lbfgs", got {method!r}')
