"""The settings as rules, at this moment: damping, preconditioner, how far the rate is from the edge of stability."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from cao import advice
from cao.linalg.eigensolvers import Solver
from cao.rules.damping import DAMPINGS, Damping, Fixed, Pace
from cao.rules.rank import RANKS, Exactly, Rank
from cao.rules.refresh import REFRESHES, Every, Refresh, Seen
from cao.sketch.damped import Damped, NegativeCurvature, Scaling
from cao.sketch.sketch import Progress

NUMBERS: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], Any]]] = {
    "damping": (DAMPINGS, lambda number: Fixed(float(number))),
    "rank": (RANKS, lambda number: Exactly(int(number))),
    "refresh_every": (REFRESHES, lambda number: Every(int(number))),
}
"""The settings that are rules: the words for each, and what a number stands for."""


@dataclass(frozen=True)
class Settings:
    """What the groups of one optimizer share, because there is one sketch over all of them."""

    rank: int | str | Rank
    refresh_every: int | str | Refresh
    damping: float | str | Damping
    power_iterations: int
    warm_start: bool
    eigensolver: str | Solver | None
    negative_curvature: NegativeCurvature
    scaling: Scaling
    max_update_norm: float | None
    seed: int
    nesterov: bool


SHARED = tuple(each.name for each in fields(Settings))


def rule_of(name: str, setting: Any) -> Any:
    """Return the rule that a setting is, or that its word or number stands for."""
    words, from_number = NUMBERS[name]
    if isinstance(setting, str):
        return words[setting]
    # Not asked whether it is a rule: that takes longer than a small model's step, and was checked at the border.
    return from_number(setting) if isinstance(setting, Real | Tensor) else setting


# Most steps have the preconditioner of the step before.
@lru_cache(maxsize=16)
def damped_for(
    values: tuple[float, ...], damping: float, brake: float, negative_curvature: NegativeCurvature, scaling: Scaling
) -> Damped:
    """Return P = (B + ηI)⁻¹ for a step on parameters, made shorter by a brake."""
    kinds: dict[str, Any] = {"negative_curvature": negative_curvature, "scaling": scaling}
    P = Damped.of(torch.tensor(values, dtype=torch.float64), None, damping, **kinds, brake=brake)
    # Rounded as in the runs whose logs are shipped.
    return replace(P, gains=P.gains * (1 / P.divisor) * brake / P.base)


class Rules:
    """The settings of all groups as rules, which know how far the optimizer has come."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], progress: Progress) -> None:
        self.groups, self.progress = groups, progress
        self.settings = settings = Settings(*(groups[0][name] for name in SHARED))
        self.damping: Damping = rule_of("damping", settings.damping)
        self.rank: Rank = rule_of("rank", settings.rank)
        self.refresh: Refresh = rule_of("refresh_every", settings.refresh_every)
        lr, momentum = (max(float(group[name]) for group in groups) for name in ("lr", "momentum"))
        spread = progress.seen.spread if isinstance(progress.seen, Seen) else 0.0
        # Those of the fastest group, as of heavy-ball momentum.
        self.pace = Pace(lr, momentum, settings.nesterov, spread)

    def eta_and_brake(self) -> tuple[float, float]:
        """Return the damping η, and the factor by which steps are shortened."""
        # A rank that was set to 0 ends the sketch, and with it what was measured of the rest.
        return self.damping.at_step(None if self.settings.rank == 0 else self.progress.damping, self.pace)

    def damped(self) -> Damped:
        """Return P = (B + ηI)⁻¹ of the captured directions, made shorter where the damping asks for that."""
        sketch, rank = self.progress.sketch, 0 if self.settings.rank == 0 else self.progress.captured
        values = tuple(sketch.values[:rank]) if sketch else ()
        return damped_for(values, *self.eta_and_brake(), self.settings.negative_curvature, self.settings.scaling)

    def curvatures(self, values: Sequence[float]) -> list[float]:
        """Return what the preconditioner makes of eigenvalues, before damping."""
        is_clipped = self.settings.negative_curvature == "clip"
        return [max(value, 0.0) if is_clipped else abs(value) for value in values]

    def strains(
        self, values: Sequence[float], captured: int, size: int, most: float = math.inf
    ) -> tuple[float, float, float]:
        """Return rate · λ of the sharpest captured direction and of one outside the sketch, and the edge of stability.

        The one outside is the sharpest that the eigenvalues found can tell of, at most so sharp. A fixed sketch is
        stable if and only if rate · base · H ≺ edge + 2B/η: the strain of a captured direction is scaled so that it,
        too, is to be compared with the edge.
        """
        edge = replace(self.pace, spread=0.0).edge  # Were every batch's curvature the same.
        # Where all that was found is captured, the rest has no larger magnitude than the smallest of it.
        following = values[captured] if captured < len(values) else min(values, key=abs)
        sharpest, outside = self.curvatures([values[0], following])
        sharpest, outside = sharpest if captured else 0.0, 0.0 if captured == size else outside
        rate, (eta, _) = self.pace.rate * self.damped().base, self.eta_and_brake()
        return rate * sharpest * edge / (edge + 2 * sharpest / eta), rate * min(outside, most), edge

    def check_edge(self, values: Sequence[float], captured: int, size: int) -> None:
        """Warn where the rate is beyond the edge of stability, of a captured direction or of the next ones."""
        inside, outside, edge = self.strains(values, captured, size)
        if max(inside, outside) > edge:
            where = "a captured direction" if inside > edge else "directions just outside the sketch"
            message = advice.beyond_the_edge(max(inside, outside), edge, where)
            advice.warn_once("edge", message, self.progress.has_warned)

    def check_step(self, params: Sequence[Tensor]) -> None:
        """Refuse sparse gradients, and a step before any look at the curvature; warn if the last look was long ago."""
        gradients = [param.grad for param in params if param.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise ValueError("CAO needs dense gradients, got a sparse one; build the embedding with sparse=False")
        # Without any gradient, or at a rate of zero, nothing moves, and SGD takes no offence.
        if self.settings.rank == 0 or not gradients or self.pace.rate == 0:
            return
        if self.progress.attempts == 0:
            raise RuntimeError(
                "step() has no curvature to use: call optimizer.refresh_if_due(loss) before loss.backward(), in every "
                "iteration (or set rank=0 for first-order steps); under Lightning CAOCallback does so among the "
                "Trainer's callbacks, under transformers CAOTrainer instead of Trainer"
            )
        if self.refresh.is_overdue(self.progress.seen, self.progress):
            advice.warn_once("age", advice.too_old(self.progress.age), self.progress.has_warned)
