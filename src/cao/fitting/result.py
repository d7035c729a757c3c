"""What a fit has found, how certain it is, and what it cost."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from cao.fitting.covariance import inverse_gram, rank_of
from cao.fitting.problem import Local, Problem
from cao.fitting.progress import Ending, State
from cao.fitting.variables import Variables
from cao.report import Report

# 1 GiB in float64: more than that is no Jacobian to decompose.
LARGEST_JACOBIAN = 1 << 27
FEW = 10


@dataclass
class Fit:
    """A fit that has ended; the parameters themselves hold the best values."""

    loss: float
    gradient_norm: float
    """The largest entry of the gradient at the end, without those that a bound holds."""
    reason: Ending
    iterations: int
    evaluations: int
    """How often the residuals were computed for their loss."""
    jacobians: int
    """How often their Jacobian was computed; 0 where sketches took its place."""
    seconds: float
    history: list[State]
    method: str
    _variables: Variables = field(repr=False)
    _problem: Problem | None = field(repr=False)
    """None after the fit of a loss function, which has no residuals."""
    _position: Tensor = field(repr=False)
    _local: Local | None = field(default=None, repr=False)

    @property
    def converged(self) -> bool:
        """Whether nothing was left to do."""
        return self.reason.is_convergence

    @property
    def params(self) -> dict[str, Tensor]:
        """The fitted parameters by name."""
        return self._variables.named

    def covariance(
        self, params: Iterable[str | Tensor] | None = None, *, noise: float | None = None
    ) -> Float[Tensor, "k k"]:
        """Return the covariance of the parameters, or of some of them beside all others, in their order as one vector.

        It is noise² (JᵀJ)⁻¹ at the end of the fit: right where the residuals are nearly linear over it. `noise` is the
        standard deviation of a residual; without one it is estimated, √(loss / (residuals − rank)). What the residuals
        do not determine has an infinite variance. A robust loss is taken with its curvature at the end. A bound that
        holds a parameter is not taken into account.
        """
        local, chosen = self._at_end(), torch.arange(self._variables.size)
        if params is not None:
            _, chosen = self._variables.where([params] if isinstance(params, str | Tensor) else params)
        if noise is None:
            noise = self._noise(local)
        elif not (isinstance(noise, int | float) and noise > 0):
            raise ValueError(f"noise must be a positive number, the standard deviation of a residual; got {noise!r}")
        jacobian = local.jacobian.double()
        return noise**2 * inverse_gram(jacobian, chosen.to(jacobian.device)).cpu()

    def stderr(self, params: Iterable[str | Tensor] | None = None, *, noise: float | None = None) -> dict[str, Tensor]:
        """Return the standard errors, as tensors of the parameters' shapes by name."""
        wanted = list(self.params) if params is None else [params] if isinstance(params, str | Tensor) else list(params)
        names, _ = self._variables.where(wanted)
        errors = self.covariance(names, noise=noise).diagonal().sqrt()
        parts = errors.split([self.params[name].numel() for name in names])
        return {name: part.view(self.params[name].shape) for name, part in zip(names, parts, strict=True)}

    def report(self) -> Report:
        """Return what was found, what it cost, and advice: `print(fit.report())`."""
        rows = {
            "ended": f"{'converged' if self.converged else 'not converged'}: {self.reason}",
            "loss": f"{self.loss:.6g}, largest entry of its gradient {self.gradient_norm:.2g}",
            "cost": f"{self.evaluations:,} evaluations, {self.jacobians:,} Jacobians, {self.seconds:.2g} s",
        }
        if self._variables.size <= FEW:
            errors = self.stderr() if self._can_estimate() else {}
            rows |= {name: described(p.detach(), errors.get(name)) for name, p in self.params.items()}
        return Report(f"fit of {self._variables.size:,} numbers by {self.method}", rows, list(self._advice()))

    def _advice(self) -> Iterable[str]:
        if any(p.dtype != torch.float64 for p in self.params.values()):
            yield "some parameters are in float32, which leaves a fit about four digits: use float64"
        for name, is_on_bound in self._variables.is_on_bound().items():
            if is_on_bound:
                yield f"{name} is on its bound, which its standard error does not know of"
        if self.reason is Ending.MAX_EVALUATIONS:
            yield "the evaluations were spent: call fit again, which goes on from here, or raise max_evaluations"
        if self.reason is Ending.NO_DECREASE:
            yield "are the residuals smooth, and computed by torch alone? Their derivative promises what no step brings"
        if self._local is not None:
            rank, size = rank_of(self._local.jacobian), self._variables.size
            if rank < size:
                yield (
                    f"the residuals determine {rank} of {size} directions of the parameters: hold some of them, or add "
                    "residuals that say what is known, such as weight * (p - expected)"
                )

    def _can_estimate(self) -> bool:
        local = self._local
        return local is not None and len(local.residuals) > rank_of(local.jacobian)

    def _noise(self, local: Local) -> float:
        """Return the estimated standard deviation of a residual."""
        count, rank = len(local.residuals), rank_of(local.jacobian)
        if count <= rank:
            raise ValueError(
                f"{count} residuals leave nothing to estimate the noise from, since they determine as many directions; "
                "pass noise=…, the standard deviation of a residual"
            )
        return math.sqrt(local.loss / (count - rank))

    def _at_end(self) -> Local:
        """Return residuals and Jacobian at the end of the fit, computed once."""
        if self._problem is None:
            raise ValueError("a loss function has no residuals to take a covariance from; pass fit the residuals")
        if self._local is None:
            if self._problem.numbers > LARGEST_JACOBIAN:
                raise ValueError(
                    f"the Jacobian has {self._problem.numbers:,} numbers, more than the {LARGEST_JACOBIAN:,} that a "
                    "covariance is computed from; fit with fewer residuals, or require gradients of fewer parameters"
                )
            now = self._variables.position()
            self._variables.move(self._position)
            try:
                self._local = self._problem.linearize()
            finally:
                self._variables.move(now)
        return self._local


def described(value: Tensor, error: Tensor | None) -> str:
    """Return numbers with their standard errors."""
    values = value.flatten().tolist()
    if error is None:
        return ", ".join(f"{number:.6g}" for number in values)
    return ", ".join(f"{number:.6g} ± {spread:.2g}" for number, spread in zip(values, error.flatten(), strict=True))
