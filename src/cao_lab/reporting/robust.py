"""The suite robust: what CAO and its base reach at each rate, held against the goals; and the rules behind it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation
from pandas import DataFrame

from cao_lab.log.records import Sweep, SweepRecord
from cao_lab.reporting.figures import styled
from cao_lab.reporting.tabular import Table

BASES = {"cao": "sgd", "cao-adam": "adamw"}
NAMES = {"sgd": "SGD, momentum 0.9", "cao": "CAO, defaults", "adamw": "AdamW", "cao-adam": "CAO in Adam's metric"}
COLOURS = {"sgd": "#1f77b4", "cao": "#c2185b", "adamw": "#2a9d8f", "cao-adam": "#e64a19"}
ARROW: dict[str, Any] = {"linestyle": "none", "marker": r"$\uparrow$", "markersize": 7, "markeredgewidth": 0.2}
WITHIN = 1.10
"""A rate works if its loss is within this factor of the base's best."""


@dataclass(frozen=True)
class Rate:
    """A method on one problem at one rate, over all seeds."""

    lr: float
    losses: tuple[float, ...]
    """Mean over the seeds, by evaluation; infinite from the first one on that is not finite."""
    diverged: int
    """Seeds that end above their first loss, or not finite."""
    seeds: int
    seconds: float
    products: float
    """Products with the curvature per step, mean over the seeds."""
    captured: float
    """The most directions in use at an evaluation, mean over the seeds."""

    @property
    def final(self) -> float:
        """The last loss; infinite if a seed diverged."""
        return math.inf if self.diverged else self.losses[-1]


@dataclass(frozen=True)
class Duel:
    """CAO and its base on one problem."""

    problem: str
    kind: str
    method: str
    ours: tuple[Rate, ...]
    base: tuple[Rate, ...]

    @property
    def best(self) -> Rate:
        """The base at its best rate."""
        return min(self.base, key=lambda rate: rate.final)

    @property
    def at_best(self) -> Rate:
        """Ours at the base's best rate."""
        return next(rate for rate in self.ours if rate.lr == self.best.lr)

    @property
    def loss_ratio(self) -> float:
        """Our final loss over the base's, at the base's best rate."""
        return self.at_best.final / self.best.final

    @property
    def width_ratio(self) -> float:
        """The rates that work for us over those that work for the base."""
        return self.works(self.ours) / self.works(self.base)

    @property
    def step_ratio(self) -> float:
        """Our steps to the base's best final loss, at the rate that is best for that, over the base's."""
        goal, last = self.best.final, len(self.best.losses) - 1
        hits = [i for rate in self.ours for i, loss in enumerate(rate.losses) if loss <= goal]
        return min(hits) / last if hits else math.inf

    @property
    def time_ratio(self) -> float:
        """Our seconds over the base's, at the base's best rate."""
        return self.at_best.seconds / self.best.seconds

    def works(self, rates: Sequence[Rate]) -> int:
        """Count the rates whose loss is within a margin of the base's best."""
        return sum(rate.final <= WITHIN * self.best.final for rate in rates)


def duels(sweeps: Sequence[Sweep]) -> list[Duel]:
    """Return all duels that every seed's log has."""
    problems = dict.fromkeys(sweep.task for sweep in sweeps)
    found = []
    for method, base in BASES.items():
        for problem in problems:
            own = [sweep for sweep in sweeps if sweep.task == problem]
            ours, theirs = rates_of(own, method), rates_of(own, base)
            if ours and theirs:
                found.append(Duel(problem, own[0].batches, method, ours, theirs))
    return found


def rates_of(sweeps: Sequence[Sweep], method: str) -> tuple[Rate, ...]:
    """Return a method's results by rate, over the seeds of one problem."""
    rates = sorted({record.lr for sweep in sweeps for record in sweep.records if record.method == method})
    return tuple(rate_of([list(runs_at(sweep, method, lr)) for sweep in sweeps], lr) for lr in rates)


def runs_at(sweep: Sweep, method: str, lr: float) -> Iterator[SweepRecord]:
    """Yield the records of one run."""
    return (record for record in sweep.records if (record.method, record.lr) == (method, lr))


def rate_of(runs: Sequence[Sequence[SweepRecord]], lr: float) -> Rate:
    """Return one method at one rate, over the seeds that have it."""
    whole = [run for run in runs if run]
    rows = zip(*curves(whole), strict=True)
    losses = [mean(loss if math.isfinite(loss) else math.inf for loss in row) for row in rows]
    diverged = sum(not run[-1].loss <= run[0].loss for run in whole)
    seconds, products = (mean(getattr(run[-1], name) for run in whole) for name in ("seconds", "products"))
    captured = mean(max(record.captured for record in run) for run in whole)
    return Rate(lr, tuple(losses), diverged, len(whole), seconds, products / whole[0][-1].step, captured)


def curves(runs: Sequence[Sequence[SweepRecord]]) -> list[list[float]]:
    """Return the losses of runs, which all have as many."""
    return [[record.loss for record in run] for run in runs]


def goals_table(found: Sequence[Duel]) -> Table:
    """Return the goals of the suite, what was reached, and for how many problems."""
    rows = []
    for method, base in BASES.items():
        own = [duel for duel in found if duel.method == method]
        if not own:
            continue
        batched = [duel for duel in own if duel.kind != "mini"]
        small = [duel for duel in own if duel.kind == "mini"]
        losses, widths = [c.loss_ratio for c in own], [c.width_ratio for c in own]
        diverged = [sum(rate.diverged for c in own for rate in getattr(c, side)) for side in ("ours", "base")]
        runs = sum(rate.seeds for c in own for rate in c.base)
        steps, times = [c.step_ratio for c in batched], [c.time_ratio for c in small]
        goals = (
            ("final loss at the base's best rate, largest", "≤ 1.02", max(losses), max(losses) <= 1.02),
            ("the same, median", "< 1", median(losses), median(losses) < 1),
            ("width of the working rates, median", "≥ 2", median(widths), median(widths) >= 2),
            ("the same, smallest", "≥ 1", min(widths), min(widths) >= 1),
            (f"diverged runs of {runs}, over the base's", "≤ 1/3", diverged[0] / max(diverged[1], 1),
             3 * diverged[0] <= diverged[1]),
            ("steps to the base's best loss, full and large batches, median", "≤ 0.7", median(steps or [math.nan]),
             median(steps or [math.nan]) <= 0.7),
            ("time of a step, small batches, largest", "≤ 1.05", max(times or [math.nan]),
             max(times or [math.nan]) <= 1.05),
        )  # fmt: skip
        rows += [(f"{NAMES[method]} / {NAMES[base]}", *goal) for goal in goals]
    numbers = DataFrame(rows, columns=["method", "what", "goal", "measured", "is_reached"])
    cells = numbers.assign(
        measured=[f"{value:.3g}" for value in numbers["measured"]],
        is_reached=["yes" if value else "no" for value in numbers["is_reached"]],
    ).rename(columns={"is_reached": "reached"})
    return Table("robust-goals", "The goals of the suite robust, and what was measured.", cells, numbers)


def duels_table(found: Sequence[Duel]) -> Table:
    """Return every duel's numbers."""
    rows = [
        {
            "problem": duel.problem,
            "batch": duel.kind,
            "method": NAMES[duel.method],
            "base's best rate": duel.best.lr,
            "base's loss": duel.best.final,
            "loss ratio": duel.loss_ratio,
            "best loss": min(rate.final for rate in duel.ours),
            "rates that work": f"{duel.works(duel.ours)} against {duel.works(duel.base)}",
            "diverged": f"{sum(r.diverged for r in duel.ours)} against {sum(r.diverged for r in duel.base)}",
            "step ratio": duel.step_ratio,
            "time ratio": duel.time_ratio,
        }
        for duel in found
    ]
    numbers = DataFrame(rows)
    cells = numbers.map(lambda value: f"{value:.3g}" if isinstance(value, float) else value)
    cells = cells.replace("inf", "not reached")
    return Table("robust-problems", "CAO with defaults against its base, problem by problem.", cells, numbers)


@styled
def rates_figure(found: Sequence[Duel]) -> Figure:
    """Draw the final loss over the rate, a panel for each problem: SGD and AdamW, and CAO on each.

    A rate at which a seed diverged has no final loss, and an arrow at the upper edge.
    """
    problems = list(dict.fromkeys(duel.problem for duel in found))
    columns = min(4, len(problems))
    rows = math.ceil(len(problems) / columns)
    figure = Figure(figsize=(3.1 * max(columns, 2), 2.6 * rows + 0.7), layout="constrained")
    for index, problem in enumerate(problems):
        axes = figure.add_subplot(rows, columns, index + 1)
        draw_rates(axes, [duel for duel in found if duel.problem == problem])
        if index % columns == 0:
            axes.set_ylabel("final training loss")
        if index >= len(problems) - columns:
            axes.set_xlabel("learning rate")
    named = {str(line.get_label()): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
    named["a seed diverged"] = Line2D([], [], color="#555555", **ARROW)
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=4)
    return figure


def draw_rates(axes: Axes, found: Sequence[Duel]) -> None:
    """Draw all methods on one problem, and the loss that they start from."""
    for duel in found:
        for method, rates in ((BASES[duel.method], duel.base), (duel.method, duel.ours)):
            look: dict[str, Any] = {"color": COLOURS[method], "zorder": 3 if method == duel.method else 2}
            style = "o-" if method == duel.method else "o--"
            losses = [rate.final for rate in rates]
            axes.plot([rate.lr for rate in rates], losses, style, label=NAMES[method], markersize=3, **look)
            mark_diverged(axes, [rate.lr for rate in rates if rate.diverged], method)
    first = found[0]
    axes.axhline(
        first.best.losses[0], color="#777777", linewidth=0.9, linestyle=":", label="loss before the first step"
    )
    axes.margins(y=0.12)
    axes.set(xscale="log", yscale="log", title=f"{first.problem} ({first.kind} batch)")
    axes.title.set_fontsize(9)


def mark_diverged(axes: Axes, rates: Sequence[float], method: str) -> None:
    """Mark rates at the upper edge of the axes; arrows of several methods at one rate stand side by side."""
    points = 4 * (list(COLOURS).index(method) - (len(COLOURS) - 1) / 2)
    beside = ScaledTranslation(points / 72, 0, axes.figure.dpi_scale_trans)
    axes.plot(rates, [0.96] * len(rates), color=COLOURS[method], transform=axes.get_xaxis_transform() + beside, **ARROW)


@styled
def edge_figure() -> Figure:
    """Draw how fast a direction moves, α times its effective curvature, over what SGD makes of it, αλ."""
    figure = Figure(figsize=(6.4, 3.6))
    axes = figure.add_subplot()
    sharpness = np.geomspace(0.01, 100, 200)
    axes.plot(sharpness, sharpness, "--", color=COLOURS["sgd"], label="outside the sketch, as in SGD: αλ")
    axes.plot(sharpness, sharpness / (1 + sharpness), color=COLOURS["cao"], label="captured: αλ / (1 + αλ)")
    for beta, style in ((0.0, ":"), (0.9, "-.")):
        edge = 2 * (1 + beta)
        axes.axhline(edge, color="#555555", linewidth=0.9, linestyle=style, label=f"edge 2(1 + β), β = {beta:g}")
    axes.axvspan(0.5, 100, color=COLOURS["cao"], alpha=0.06, label="where a direction is captured, αλ ≥ ½")
    axes.set(xscale="log", yscale="log", xlabel="αλ", ylabel="α × effective curvature", ylim=(0.01, 100))
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


@styled
def effort_figure(found: Sequence[Duel]) -> Figure:
    """Draw how many directions CAO captured at each rate, and how many products with the curvature it took for that."""
    figure = Figure(figsize=(9.6, 3.4 * len(BASES)))
    panels = figure.subplots(len(BASES), 2, squeeze=False)
    for row, method in zip(panels, BASES, strict=True):
        own = [duel for duel in found if duel.method == method]
        draw_by_rate(row[0], own, "captured", "most directions in use")
        draw_by_rate(row[1], own, "products", "products per step")
        row[0].set_title(NAMES[method], loc="left", fontsize=10)
    panels[0][1].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def draw_by_rate(axes: Axes, found: Sequence[Duel], quantity: str, label: str) -> None:
    """Draw a quantity of CAO's runs over the rate, a line for each problem, full lines for full and large batches."""
    for duel in found:
        style = "o--" if duel.kind == "mini" else "o-"
        rates = [rate.lr for rate in duel.ours]
        values = [getattr(rate, quantity) for rate in duel.ours]
        axes.plot(rates, values, style, markersize=3, label=f"{duel.problem} ({duel.kind} batch)")
    axes.set(xscale="log", xlabel="learning rate", ylabel=label, ylim=(0, None))
