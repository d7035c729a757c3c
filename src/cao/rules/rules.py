"""What an optimizer's settings and progress amount to at this moment: policies, damping, preconditioner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cao import advice
from cao.rules.damping import DAMPINGS, Damping, Fixed, Pace
from cao.rules.rank import RANKS, Exactly, Rank
from cao.rules.refresh import REFRESHES, Every, Refresh
from cao.sketch.damped import Damped, NegativeCurvature, Scaling
from cao.sketch.sketch import Progress

Policy = TypeVar("Policy")


class Policies(NamedTuple):
    """What the optimizer decides by itself."""

    damping: Damping
    rank: Rank
    refresh: Refresh


def policies_of(settings: Mapping[str, Any]) -> Policies:
    """Return the policies that the settings are, or that their words and numbers stand for."""
    return Policies(
        policy_of(settings["damping"], DAMPINGS, lambda number: Fixed(float(number))),
        policy_of(settings["rank"], RANKS, lambda number: Exactly(int(number))),
        policy_of(settings["refresh_every"], REFRESHES, lambda number: Every(int(number))),
    )


def policy_of(setting: Any, words: Mapping[str, Policy], from_number: Callable[[Any], Policy]) -> Policy:
    """Return the policy that a setting is, or that its word or number stands for."""
    if isinstance(setting, str):
        return words[setting]
    # Not asked whether it is a policy: that takes longer than a small model's step, and was checked at the border.
    return from_number(setting) if isinstance(setting, Real | Tensor) else setting


class Factors(NamedTuple):
    """P = base · (I + V diag(gains) Vᵀ), without its vectors."""

    base: float
    gains: Sequence[float]


# Most steps have the factors of the step before.
@lru_cache(maxsize=16)
def factors_of(
    values: tuple[float, ...], damping: float, brake: float, negative_curvature: NegativeCurvature, scaling: Scaling
) -> Factors:
    """Return the factors of a preconditioner that is made shorter by a brake."""
    eigenvalues = torch.tensor(values, dtype=torch.float64)
    nowhere = eigenvalues.new_zeros(0, len(values))
    whole = Damped.of(eigenvalues, nowhere, damping, negative_curvature=negative_curvature, scaling=scaling)
    base = 1 / whole.divisor * brake
    # Rounded as in the runs whose logs are shipped.
    return Factors(base, (whole.gains * (1 / whole.divisor) * brake / base).tolist())


class Rules:
    """The settings of all groups as rules, which know how far the optimizer has come."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], progress: Progress) -> None:
        self.groups, self.settings, self.progress = groups, groups[0], progress
        self.damping, self.rank, self.refresh = policies_of(self.settings)

    @property
    def pace(self) -> Pace:
        """The rate and momentum of the fastest group, as those of heavy-ball momentum."""
        lr, momentum = (max(float(group[name]) for group in self.groups) for name in ("lr", "momentum"))
        return Pace(lr, momentum, self.settings["nesterov"], self.progress.spread)

    def eta(self) -> float:
        """Return the damping η."""
        # A rank that was set to 0 ends the sketch, and with it what was measured of the rest.
        measured = None if self.settings["rank"] == 0 else self.progress.damping
        return self.damping.at_step(measured, self.pace)

    @property
    def rank_in_use(self) -> int:
        """The number k of captured directions; 0 before there is a sketch, and for first-order steps."""
        return 0 if self.settings["rank"] == 0 else self.progress.captured

    def factors(self) -> Factors:
        """Return the factors of P, made shorter where the damping asks for that."""
        sketch, eta = self.progress.sketch, self.eta()
        values = tuple(sketch.values[: self.rank_in_use]) if sketch else ()
        brake = self.damping.brake(eta, self.pace)
        return factors_of(values, eta, brake, self.settings["negative_curvature"], self.settings["scaling"])

    @property
    def edge(self) -> float:
        """The edge of stability, were every batch's curvature the same."""
        return replace(self.pace, spread=0.0).edge

    def strains(self, curvatures: Sequence[float], outside: float) -> tuple[float, float]:
        """Return rate · λ of the sharpest captured direction and of one outside the sketch, to hold against the edge.

        A fixed sketch is stable if and only if rate · base · H ≺ edge + 2B/η: the strain of a captured direction is
        scaled so that it, too, is to be compared with the edge.
        """
        rate, edge = self.pace.rate * self.factors().base, self.edge
        sharpest = curvatures[0] if self.progress.captured else 0.0
        return rate * sharpest * edge / (edge + 2 * sharpest / self.eta()), rate * outside

    def curvatures(self, values: Sequence[float]) -> list[float]:
        """Return what the preconditioner makes of eigenvalues, before damping."""
        is_clipped = self.settings["negative_curvature"] == "clip"
        return [max(value, 0.0) if is_clipped else abs(value) for value in values]

    def next_curvature(self, values: Sequence[float], captured: int, size: int) -> float:
        """Return the sharpest curvature outside the sketch, as far as the eigenvalues found can tell."""
        if captured == size:
            return 0.0
        # Where all that was found is captured, the rest has no larger magnitude than the smallest of it.
        return self.curvatures([values[captured] if captured < len(values) else min(values, key=abs)])[0]

    def check_edge(self, values: Sequence[float], captured: int, size: int) -> None:
        """Warn where the rate is beyond the edge of stability, of a captured direction or of the next ones."""
        edge, next_one = self.edge, self.next_curvature(values, captured, size)
        inside, outside = self.strains(self.curvatures(values), next_one)
        if max(inside, outside) > edge:
            where = "a captured direction" if inside > edge else "directions just outside the sketch"
            message = advice.beyond_the_edge(max(inside, outside), edge, where)
            advice.warn_once("edge", message, self.progress.has_warned)

    def check_freshness(self) -> None:
        """Refuse a step if the curvature was never looked at, and warn if the last look was long ago."""
        if self.settings["rank"] == 0:
            return
        if self.progress.attempts == 0:
            raise RuntimeError(
                "step() has no curvature to use: call optimizer.refresh_if_due(loss) before loss.backward(), in every "
                "iteration (or set rank=0 for first-order steps); under Lightning CAOCallback does so among the "
                "Trainer's callbacks, under transformers CAOTrainer instead of Trainer"
            )
        if self.refresh.is_overdue(self.progress):
            advice.warn_once("age", advice.too_old(self.progress.age), self.progress.has_warned)
