"""What the optimizer decides by itself, each rule a value: how much damping, when to refresh, which eigensolver."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cao.eigensolvers import Lanczos, SubspaceIteration
from cao.linalg import Eigenpairs, generator_for, random_columns
from cao.operators import Deflated, SymmetricOperator


@runtime_checkable
class Damping(Protocol):
    """How η is chosen: a number measured at each refresh, and what becomes of it at each step."""

    is_on_trial: ClassVar[bool]
    """Whether each step is judged by the next gradient, and taken back where it overshot."""

    def at_refresh(
        self, pairs: Eigenpairs, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float, int]:
        """Return what was measured for a new sketch, 0 if there is no curvature, and the products it has cost."""
        ...

    def at_step(self, measured: float, lr: float, momentum: float, caution: float) -> float:
        """Return η for a step; caution is what the trial of the last step asks for, 0 without trials."""
        ...


@runtime_checkable
class Refresh(Protocol):
    """When the sketch is renewed."""

    def is_due(self, age: int) -> bool:
        """Whether to refresh this many steps after the last attempt."""
        ...


@runtime_checkable
class Solver(Protocol):
    """How eigenpairs are found."""

    def __call__(self, operator: SymmetricOperator, start: Tensor, *, overwrite_start: bool = False) -> Eigenpairs:
        """Return as many eigenpairs as there are start columns."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A damping that the user has chosen."""

    is_on_trial: ClassVar[bool] = False
    value: float

    def at_refresh(
        self, pairs: Eigenpairs, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float, int]:
        """Measure nothing."""
        return self.value, 0

    def at_step(self, measured: float, lr: float, momentum: float, caution: float) -> float:
        """Return the chosen value."""
        return self.value


@dataclass(frozen=True)
class FromSpectrum:
    """Damping at the curvature that the sketch leaves out, for full-batch problems at lr=1.

    η is the largest of the smallest captured |λ|, the largest residual, and the curvature found outside the sketch
    by a few more products; weight decay, which adds to the curvature everywhere, comes on top. So, converged or not, P
    leaves a curvature below 2 in every direction: with η ≥ ‖R‖ and η ≥ ‖C‖, where R couples the sketch to its
    complement and C is the complement's curvature, ‖P^½HP^½‖ ≤ 1 + ‖R‖/√(η(λ+η)) < 2.

    That is true of the curvature at the refresh. Where it changes, as in any network, steps are on trial (`cao.trial`):
    one that overshot is taken back, and η is raised until steps succeed again.
    """

    is_on_trial: ClassVar[bool] = True

    products: int = 4
    """Lanczos steps that look for curvature outside the sketch."""

    def at_refresh(
        self, pairs: Eigenpairs, operator: SymmetricOperator | None, weight_decay: float
    ) -> tuple[float, int]:
        """Return η from the pairs and, if there is an operator to multiply by, from its complement."""
        outside, products = (0.0, 0) if operator is None else self._outside(pairs.vectors, operator)
        magnitudes = pairs.values.abs()
        # Below √ε·λ₁ a step would amplify the rounding of the gradient in flat directions to the size of a step.
        rounding = torch.finfo(magnitudes.dtype).eps ** 0.5 * float(magnitudes.max())
        measured = max(float(magnitudes.min()), float(pairs.residuals.max()), outside, rounding)
        return measured + weight_decay, products

    def at_step(self, measured: float, lr: float, momentum: float, caution: float) -> float:
        """Return what was measured, or more where the last steps call for caution."""
        return max(measured, caution)

    def _outside(self, vectors: Float[Tensor, "n k"], operator: SymmetricOperator) -> tuple[float, int]:
        size, rank = vectors.shape
        if size == rank:
            return 0.0, 0
        start = random_columns(size, 1, generator_for(vectors.device, size, rank), vectors.dtype)
        start -= vectors @ (vectors.T @ start)
        solve = Lanczos(min(self.products, size - rank) - 1)
        found = solve(Deflated(operator, vectors), start, overwrite_start=True)
        # A Ritz value may fall short of the eigenvalue it stands for by its residual.
        return float(found.values.abs()[0] + found.residuals[0]), found.products


@dataclass(frozen=True)
class Every:
    """A refresh at a fixed interval."""

    steps: int

    def is_due(self, age: int) -> bool:
        """Whether the interval has passed."""
        return age >= self.steps


def damping_policy(setting: float | str | Damping) -> Damping:
    """Return the damping that a number, the word "auto" or a policy stands for."""
    if isinstance(setting, str):
        return FromSpectrum()
    return setting if isinstance(setting, Damping) else Fixed(float(setting))


def refresh_policy(setting: int | Refresh) -> Refresh:
    """Return the rule that an interval or a policy stands for."""
    return setting if isinstance(setting, Refresh) else Every(setting)


def eigensolver_for(setting: str | Solver, iterations: int, tolerance: float | None) -> Solver:
    """Return the solver that a word, with its iterations and tolerance, or a solver stands for."""
    if isinstance(setting, str):
        return (Lanczos if setting == "lanczos" else SubspaceIteration)(iterations, tolerance)
    return setting


SAVED = {cls.__name__: cls for cls in (Fixed, FromSpectrum, Every, SubspaceIteration, Lanczos)}
"""What a state dict can name; a policy of a user's own is not saved, and stays as it was constructed."""


def plain(setting: Any) -> Any:
    """Return a setting as plain data for a state dict: a policy becomes its name and its fields."""
    if type(setting) in SAVED.values():
        return {"policy": type(setting).__name__, **asdict(setting)}
    return setting


def restored(setting: Any) -> Any:
    """Return the setting that `plain` made plain data of."""
    if not isinstance(setting, dict) or "policy" not in setting:
        return setting
    fields = {name: value for name, value in setting.items() if name != "policy"}
    if setting["policy"] not in SAVED:
        raise ValueError(f"the state dict names the policy {setting['policy']!r}, which this version does not have")
    return SAVED[setting["policy"]](**fields)
