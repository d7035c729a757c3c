"""What an optimizer's settings and progress amount to at this moment: policies, damping, preconditioner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cao import advice
from cao.policies.damping import Damping, Pace
from cao.policies.rank import Rank
from cao.policies.refresh import Refresh
from cao.policies.shorthands import damping_policy, rank_policy, refresh_policy
from cao.preconditioner import Preconditioner
from cao.sketch import Progress


class Rules:
    """The settings of all groups as rules, which know how far the optimizer has come."""

    def __init__(self, groups: Sequence[Mapping[str, Any]], progress: Progress) -> None:
        self.groups, self.settings, self.progress = groups, groups[0], progress

    @property
    def damping(self) -> Damping:
        """How much damping."""
        return damping_policy(self.settings["damping"])

    @property
    def rank(self) -> Rank:
        """How many directions."""
        return rank_policy(self.settings["rank"])

    @property
    def refresh(self) -> Refresh:
        """When to refresh."""
        return refresh_policy(self.settings["refresh_every"])

    @property
    def first_steps(self) -> int:
        """Steps before the first sketch: Adam's metric is known after one."""
        return max(int(self.settings["warmup_steps"]), 0 if self.settings["metric"] is None else 1)

    @property
    def weight_decay(self) -> float:
        """The curvature that weight decay adds everywhere."""
        return max(0.0 if group["decoupled_weight_decay"] else group["weight_decay"] for group in self.groups)

    @property
    def pace(self) -> Pace:
        """The rate and momentum of the fastest group, as those of heavy-ball momentum."""
        lr, momentum = (max(float(group[name]) for group in self.groups) for name in ("lr", "momentum"))
        metric = self.settings["metric"]
        if metric is not None:
            lr, momentum = lr * (1 - metric.beta1), metric.beta1
        return Pace(lr, momentum, self.settings["nesterov"], self.progress.spread)

    def eta(self, caution: float = 0.0) -> float:
        """Return the damping η."""
        return self.damping.at_step(self.progress.damping, self.pace, caution)

    def preconditioner(self, caution: float = 0.0) -> Preconditioner:
        """Return P."""
        sketch, used, eta = self.progress.sketch, self.progress.captured, self.eta(caution)
        values = torch.tensor(sketch.values[:used] if sketch else [], dtype=torch.float64)
        vectors = sketch.rows[:used].T if sketch else torch.zeros(0, 0)
        signs, scaling = self.settings["negative_curvature"], self.settings["scaling"]
        whole = Preconditioner.of(values, vectors, eta, negative_curvature=signs, scaling=scaling)
        return whole.slowed(self.damping.brake(eta, self.pace))

    def check_edge(self, values: Tensor, captured: int, size: int) -> None:
        """Warn where the rate is beyond the edge of stability, of a captured direction or of the next ones."""
        curvatures = values.clamp_min(0) if self.settings["negative_curvature"] == "clip" else values.abs()
        # A fixed sketch is stable if and only if rate·base·H ≺ edge + 2B/η.
        rate, edge = self.pace.rate * self.preconditioner().base, replace(self.pace, spread=0.0).edge
        sharpest = curvatures[0] if captured else 0.0
        inside = float(rate * sharpest * edge / (edge + 2 * sharpest / self.eta()))
        outside = 0.0 if captured == size else float(rate * curvatures[min(captured, len(curvatures) - 1)])
        where = "a captured direction" if inside > edge else "directions just outside the sketch"
        self.warn("edge", advice.on_the_edge(max(inside, outside), edge, where))

    def check_freshness(self) -> None:
        """Refuse a step if the curvature was never looked at, and warn if the last look was long ago."""
        if self.settings["rank"] == 0:
            return
        if self.progress.attempts == 0:
            raise RuntimeError(
                "step() has no curvature to use: call optimizer.refresh_if_due(loss) before loss.backward(), in every "
                "iteration (or set rank=0 for first-order steps)"
            )
        if self.refresh.is_overdue(self.progress):
            self.warn("age", advice.on_age(self.progress.age))

    def warn(self, kind: str, message: str | None) -> None:
        """Warn, once for each kind."""
        advice.warn_once(kind, message, self.progress.has_warned)
