"""How full-batch solvers are compared: ratios of one problem and seed, goals about their median, and their curves.

The goals were fixed before the runs of the suite `scientific`, whose rules are in `cao_lab.suites.scientific`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cao_lab.facts import suites_of
from cao_lab.log.checks import one_line
from cao_lab.log.header import read_all, read_solve
from cao_lab.log.records import SolveRecord, SolveRun
from cao_lab.reporting.figures import plain, styled

OURS = "sketched-lbfgs"
TITLES = {
    OURS: "SketchedLBFGS",
    "sketched-lbfgs-pairs": "SketchedLBFGS, pairs only",
    "sketched-lbfgs-dense": "SketchedLBFGS, dense only",
    "ssbroyden": "SSBroyden",
    "ssbfgs": "SSBFGS",
    "scipy-bfgs": "BFGS, dense",
    "levenberg-marquardt": "Levenberg–Marquardt",
    "target-ratio": "Gauss–Newton by target ratio",
    "engd-w": "ENGD-W",
    "spring": "SPRING",
    "scipy-lbfgsb": "L-BFGS-B (scipy)",
    "scipy-lbfgsb-400": "L-BFGS-B (scipy), 400 pairs",
    "torch-lbfgs": "L-BFGS (torch)",
    "nncg": "NNCG (deepxde)",
    "lbfgs-nncg": "L-BFGS, then NNCG",
    "lbfgs-nncg-damping0.01": "L-BFGS, then NNCG, μ = 0.01",
    "lbfgs-nncg-damping0.001": "L-BFGS, then NNCG, μ = 0.001",
    "lbfgs-nncg-30": "L-BFGS, then NNCG, 30 products per step",
    "lbfgs-nncg-100": "L-BFGS, then NNCG, 100 products per step",
    "soap": "SOAP",
    "soap-0.001": "SOAP, lr 0.001",
    "soap-0.01": "SOAP, lr 0.01",
    "adam": "Adam",
    "cao": "CAO",
}
"""All methods, in the order in which they are shown."""
STROKES = {
    OURS: ("#c2185b", "-", 2.2),
    "ssbroyden": ("#263238", "-", 1.6),
    "ssbfgs": ("#263238", (0, (4, 1.6)), 1.2),
    "levenberg-marquardt": ("#ef6c00", "-", 1.4),
    "target-ratio": ("#8d6e63", "-", 1.4),
    "scipy-bfgs": ("#7b1fa2", "-", 1.2),
    "scipy-lbfgsb": ("#1565c0", "-", 1.6),
    "torch-lbfgs": ("#5c6bc0", "-", 1.2),
    "nncg": ("#00695c", "-", 1.2),
    "lbfgs-nncg": ("#00695c", (0, (4, 1.6)), 1.2),
    "soap": ("#827717", "-", 1.2),
    "adam": ("#2e8b57", "-", 1.2),
    "cao": ("#e64a19", "-", 1.2),
}
"""Colour, dash and width; methods without one are left to the tables."""
PLACES = 200
Spent = Literal["billed", "seconds"]
AXES = {"billed": "evaluations, products at their price", "seconds": "seconds"}
NNCG_RUNS = ("nncg", "lbfgs-nncg", "lbfgs-nncg-damping0.01", "lbfgs-nncg-damping0.001")
ALL_PEERS = ()
"""As the list of those to compare with: everybody else there is."""

WRONG = 0.5
"""A relative L2 error above which a solution is called wrong; chosen after the runs, before they were counted by it."""
DRAWS = 2_000
ERRORS = (1e-1, 1e-2, 1e-3)
"""Relative L2 errors to reach."""

Measure = Callable[[SolveRun, SolveRun], float]


def last(run: SolveRun) -> SolveRecord:
    """Return where a run stands."""
    return run.records[-1]


def loss_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our final loss over theirs."""
    return quotient(last(ours).loss, last(theirs).loss)


def error_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our final error over theirs."""
    return quotient(last(ours).error, last(theirs).error)


def lowest_error_ratio(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our lowest error over theirs, whenever each had it."""
    return quotient(*(min(row.error for row in run.records) for run in (ours, theirs)))


def loss_ratio_at_equal_seconds(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our loss over theirs when the first of the two ends; a stalled run does not end."""
    seconds = min(end_seconds(ours), end_seconds(theirs))
    return quotient(loss_after(ours, seconds), loss_after(theirs, seconds))


def share_of_evaluations(ours: SolveRun, theirs: SolveRun) -> float:
    """Return what we were billed until we had their final loss, over what they were; infinite if we never had it."""
    goal = last(theirs).loss
    return quotient(billed_until(ours, goal), billed_until(theirs, goal))


@dataclass(frozen=True)
class After:
    """Our loss or error over theirs after a share of a run's seconds."""

    share: float
    column: Literal["loss", "error"] = "loss"

    def __call__(self, ours: SolveRun, theirs: SolveRun) -> float:
        """Return the ratio."""
        return quotient(*(float(getattr(after(run, self.share * run.seconds), self.column)) for run in (ours, theirs)))


def share_of_seconds(ours: SolveRun, theirs: SolveRun) -> float:
    """Return our seconds to an error of 1e-2 over theirs; equal where neither came to it."""
    return quotient(seconds_until(ours, 1e-2), seconds_until(theirs, 1e-2))


def seconds_until(run: SolveRun, error: float) -> float:
    """Return when a run first had an error this low; infinite if it never had."""
    return next((row.seconds for row in run.records if row.error <= error), math.inf)


def end_seconds(run: SolveRun) -> float:
    """Return when a run ended: never, if it stalled and more seconds would change nothing."""
    return math.inf if is_stalled(run) else last(run).seconds


def is_stalled(run: SolveRun) -> bool:
    """Whether the method could not go on."""
    return bool(run.ended and run.ended.startswith("stalled"))


def loss_after(run: SolveRun, seconds: float) -> float:
    """Return the lowest loss a run had after so many seconds."""
    return after(run, seconds).loss


def after(run: SolveRun, seconds: float) -> SolveRecord:
    """Return where a run stood after so many seconds: the first record if it had none by then."""
    return [row for row in run.records if row.seconds <= seconds or row is run.records[0]][-1]


def billed_until(run: SolveRun, loss: float) -> float:
    """Return what was billed at the first record at or below a loss; infinite if there is none."""
    return next((row.billed for row in run.records if row.loss <= loss), math.inf)


def quotient(ours: float, theirs: float) -> float:
    """Return a ratio; nothing over nothing is equal."""
    if ours == theirs:
        return 1.0
    return ours / theirs if theirs else math.inf


@dataclass(frozen=True)
class Goal:
    """What is to be reached: a ratio to the best of some peers, at most so large in the median."""

    name: str
    peers: tuple[str, ...]
    measure: Measure
    most: float
    is_on_every_problem: bool = False
    """Whether the largest of the problems' medians is meant, and not the median of all."""


GOALS = (
    Goal("final loss against torch's L-BFGS", ("torch-lbfgs",), loss_ratio, 1 / 50),
    Goal("final loss against scipy's L-BFGS-B", ("scipy-lbfgsb",), loss_ratio, 1 / 10),
    Goal("the same on the worst problem", ("scipy-lbfgsb",), loss_ratio, 1.0, is_on_every_problem=True),
    Goal("loss at equal seconds against NNCG, defaults", ("nncg",), loss_ratio_at_equal_seconds, 1 / 10),
    Goal("loss at equal seconds against NNCG, tuned", NNCG_RUNS, loss_ratio_at_equal_seconds, 1 / 10),
    Goal("L2 error against the best of all peers", ALL_PEERS, error_ratio, 1 / 2),
    Goal("evaluations to the loss at which L-BFGS-B ends", ("scipy-lbfgsb",), share_of_evaluations, 1 / 3),
)
IN_EQUAL_SECONDS = (
    *(Goal(f"loss after {100 * share:.0f} % of the time", ALL_PEERS, After(share), 1 / 2) for share in (0.1, 0.3, 1.0)),
    *(
        Goal(
            f"the same after {100 * share:.0f} %, worst problem", ALL_PEERS, After(share), 1.2, is_on_every_problem=True
        )
        for share in (0.1, 0.3, 1.0)
    ),
    Goal("L2 error at the end", ALL_PEERS, After(1.0, "error"), 1 / 2),
    Goal("(seconds to an L2 error of 1e-2)", ALL_PEERS, share_of_seconds, 1 / 2),
)
"""Goals of `scientific-2`, against the best of all peers; the last is one for growing points, and only shown."""
ASIDE = Goal("(L2 error, had every run stopped at its lowest)", ALL_PEERS, lowest_error_ratio, 1 / 2)
"""No goal, but asked because one was missed: would it have been reached with the best rule for stopping?"""


def contests(runs: Iterable[SolveRun]) -> dict[tuple[str, int], dict[str, SolveRun]]:
    """Return the finished runs of each task and seed by their labels."""
    found: dict[tuple[str, int], dict[str, SolveRun]] = {}
    for run in runs:
        if run.status == "finished" and run.records:
            found.setdefault((run.task, run.seed), {})[run.label] = run
    return found


def ratios(runs: Iterable[SolveRun], goal: Goal) -> dict[tuple[str, int], float]:
    """Return the ratio of each task and seed that has us and a peer: to the peer against which it is largest."""
    found = {}
    for key, by_label in contests(runs).items():
        peers = [run for label, run in by_label.items() if label != OURS and label in (goal.peers or by_label)]
        if OURS in by_label and peers:
            found[key] = max(goal.measure(by_label[OURS], peer) for peer in peers)
    return found


def task_medians(values: dict[tuple[str, int], float]) -> dict[str, float]:
    """Return the median over seeds of each task."""
    tasks = dict.fromkeys(task for task, _ in values)
    return {name: median(value for (task, _), value in values.items() if task == name) for name in tasks}


def outcome(values: dict[tuple[str, int], float], goal: Goal) -> float:
    """Return the number that a goal is about; not a number if nothing was run."""
    if not values:
        return math.nan
    return max(task_medians(values).values()) if goal.is_on_every_problem else median(values.values())


def is_wrong(run: SolveRun) -> bool:
    """Whether a run ended in a wrong solution."""
    return last(run).error > WRONG


def looks_right(run: SolveRun, runs: Iterable[SolveRun]) -> bool:
    """Whether its loss does not tell: a run of the same problem ended at a higher one, and was not wrong."""
    return any(other.task == run.task and last(other).loss > last(run).loss and not is_wrong(other) for other in runs)


def interval_over_problems(values: dict[tuple[str, int], float]) -> tuple[float, float]:
    """Return the 95 % interval of the median if problems are drawn anew, each with all its seeds."""
    by_task: dict[str, list[float]] = {}
    for (task, _), value in values.items():
        by_task.setdefault(task, []).append(value)
    problems, draw = list(by_task.values()), Random(0)
    medians = sorted(median(chain(*draw.choices(problems, k=len(problems)))) for _ in range(DRAWS if problems else 0))
    return (medians[DRAWS // 40], medians[-1 - DRAWS // 40]) if medians else (math.nan, math.nan)


def load_solves(logs: Path, missing: list[str]) -> list[SolveRun]:
    """Read all runs of suites of solvers; a damaged one costs itself and a sentence."""
    found = [run for suite in suites_of(["solvers"]) for run in read_all(logs / suite, read_solve, missing)]
    for run in found:
        if run.status != "finished":
            place = f"{run.suite}/{run.task}/{run.label}/seed{run.seed}"
            spent = f"{last(run).billed:.0f}" if run.records else "none"
            missing.append(one_line(f"{place}: {run.status} after {spent} of {run.evaluations:.0f} evaluations"))
    return found


def name(task: str) -> str:
    """Return the problem of a task: its name without the size."""
    return task.rpartition("-")[0] or task


@styled
def loss_figure(runs: Sequence[SolveRun], spent: Spent) -> Figure:
    """Draw the lowest loss so far, one panel per problem; a line is the median over seeds."""
    tasks = sorted({run.task for run in runs})
    columns = min(len(tasks), 4)
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.5 * max(columns, 2), 2.1 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, task in zip(panels, tasks, strict=False):
        draw_panel(axes, [run for run in runs if run.task == task], spent)
        axes.set_title(plain(name(task)), fontsize=9)
    for axes in list(panels)[len(tasks) :]:
        axes.set_axis_off()
    figure.supxlabel(AXES[spent], fontsize=9)
    figure.supylabel("loss", fontsize=9)
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=5)
    return figure


def draw_panel(axes: Axes, runs: Sequence[SolveRun], spent: Spent) -> None:
    """Draw all methods of one problem."""
    for label, (colour, dash, width) in STROKES.items():
        begun = [run for run in runs if run.label == label and run.records]
        own = [run for run in begun if run.status == "finished"] or begun
        if own:
            places, losses = median_curve(own, spent)
            order = 3.0 if label == OURS else 2.0
            title = TITLES.get(label, label)
            axes.plot(places, losses, color=colour, linestyle=dash, linewidth=width, label=title, zorder=order)
    axes.set_yscale("log")
    # A stalled run is drawn for as long as others run, and not to the end of a budget that nobody needed.
    axes.set_xlim(0, max((getattr(last(run), spent) for run in runs if not is_stalled(run)), default=None))


@styled
def profile_figure(runs: Sequence[SolveRun]) -> Figure:
    """Draw performance profiles: how many problems are solved to an error in so many times the fastest's seconds."""
    figure = Figure(figsize=(3 * len(ERRORS), 3.2), layout="constrained")
    for axes, goal in zip(figure.subplots(1, len(ERRORS), sharey=True), ERRORS, strict=True):
        slowness = {label: times_the_fastest(runs, label, goal) for label in STROKES}
        for label, times in slowness.items():
            colour, dash, width = STROKES[label]
            places = np.sort([time for time in times if math.isfinite(time)])
            if times:
                shares = np.arange(1, len(places) + 1) / len(times)
                title = TITLES.get(label, label)
                axes.step(places, shares, where="post", color=colour, linestyle=dash, linewidth=width, label=title)
        axes.set(xscale="log", xlabel="times the fastest", ylim=(0, 1.02))
        axes.set_title(f"error {goal:g}", fontsize=9)
    figure.axes[0].set_ylabel("share of problems")
    handles = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4)
    return figure


def times_the_fastest(runs: Iterable[SolveRun], label: str, error: float) -> list[float]:
    """Return a method's seconds to an error over the fastest's, on every problem and seed that anybody solved so far.

    Infinite where the method did not.
    """
    found = []
    for by_label in contests(runs).values():
        fastest = min(seconds_until(run, error) for run in by_label.values())
        if label in by_label and math.isfinite(fastest):
            found.append(quotient(seconds_until(by_label[label], error), fastest))
    return found


def median_curve(runs: Sequence[SolveRun], spent: Spent) -> tuple[Float64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Return the median over runs of the lowest loss so far, up to where the first of them ends."""
    end = min(getattr(run.records[-1], spent) for run in runs)
    places = np.linspace(0, end, PLACES)
    curves = []
    for run in runs:
        seen = np.array([getattr(row, spent) for row in run.records])
        losses = np.array([row.loss for row in run.records])
        curves.append(losses[np.maximum(np.searchsorted(seen, places, side="right") - 1, 0)])
    return places, np.median(curves, axis=0)
