"""The figures of one task in a suite, which there are and of which runs; and those of sweeps and searches for rates."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from pandas import DataFrame

from cao_lab.facts import PAPER_TASK, SEARCHING
from cao_lab.protocol import EARLY_SHARE
from cao_lab.reporting.analysis import Goal, sensitivity
from cao_lab.reporting.eigenvalue_figure import eigenvalue_figure
from cao_lab.reporting.figures import PLAIN_NUMBERS, curve_figure, plain, rank_ablation, styled, title
from cao_lab.reporting.names import method_name
from cao_lab.reporting.palette import CONTROLS, CURVED
from cao_lab.reporting.setting import Setting

MAIN_PARTS = ("sgd", "adam", "adamw", "cao", "cao-momentum", "matched")
CONTROL_PARTS = ("cao", "matched", "rank0-unit", "rank0-inverse", "random", "projected-out")
WATCHED_PARTS = ("sgd", "adam", "cao", "cao-momentum", "rank3", "rank5")
FEW_METHODS = 8
BESIDE = 0.02
"""Decades between two curves, so that their bars can be told apart."""
PANEL_WIDTH, LETTER_WIDTH = 4.0, 0.08
"""Inches, names and all."""
LEADS = (
    tuple(lead / 10 for lead in range(10, 100)), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5),
    (1, 3), (1,),
)  # fmt: skip
"""First digits that an axis may label, the finest first."""


def setting_figures(setting: Setting) -> dict[str, "partial[Figure]"]:
    """Return the figures that there are data for, by kind: a new figure is a line here."""
    runs, goal = plotted(setting), setting.goal
    figures = {
        "train-loss": partial(curve_figure, runs, goal=goal),
        "train-loss-seconds": partial(curve_figure, runs, x="seconds", goal=goal),
    }
    if runs["test_accuracy"].notna().any():
        figures["test-accuracy"] = partial(curve_figure, runs, "test_accuracy")
    # The paper has these two for its main setting only.
    if setting.task.startswith(PAPER_TASK):
        early = math.ceil(EARLY_SHARE * runs["budget"].max())
        figures["train-loss-early"] = partial(curve_figure, runs, goal=goal, last_epoch=early)
        figures["train-accuracy"] = partial(curve_figure, runs, "train_accuracy")
    ranks = rank_ablation(setting.epochs)
    if ranks["rank"].nunique() > 1:
        figures["rank-ablation"] = partial(curve_figure, ranks, goal=goal)
    controls = of_parts(setting, CONTROL_PARTS)
    if controls["label"].nunique() > 2:
        figures["controls"] = partial(curve_figure, controls, goal=goal)
    if setting.kind == "sweep" and goal is not None:
        figures["sweep"] = partial(sweep_figure, setting.epochs, goal)
    if len(setting.refreshes):
        figures["eigenvalues"] = partial(eigenvalue_figure, watched(setting))
    return figures


def watched(setting: Setting) -> DataFrame:
    """Return the eigenvalues to draw: those of the main methods, or of each at its best where rates were searched."""
    main = [setting.labels.get(part) for part in WATCHED_PARTS]
    labels = main if setting.kind != "optimum" else setting.best["label"].unique()
    chosen = setting.refreshes[setting.refreshes["label"].isin(labels)]
    return setting.refreshes if chosen.empty else chosen


def of_parts(setting: Setting, names: tuple[str, ...]) -> DataFrame:
    """Return the runs of the methods that play certain parts."""
    return setting.epochs[setting.epochs["label"].isin([setting.labels.get(name) for name in names])]


def plotted(setting: Setting) -> DataFrame:
    """Return the runs to draw: all methods if few, else the main ones, or the best where rates were searched."""
    main = of_parts(setting, MAIN_PARTS)
    has_few = setting.kind in SEARCHING or len(setting.by_label) <= FEW_METHODS or main.empty
    return setting.best if has_few else main


@styled
def sweep_figure(epochs: DataFrame, goal: Goal) -> Figure:
    """Draw epochs to the threshold and final train loss over damping, mean and standard deviation over seeds."""
    cells = sensitivity(epochs, goal.hits)
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_cells(left, cells, "crossing_epoch", f"epochs to train loss {goal.loss:.4g}")
    draw_cells(right, cells, "train_loss", "final train loss")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(title(epochs), x=0.01, ha="left", fontsize=10)
    return figure


def draw_cells(axes: Axes, cells: DataFrame, column: str, name: str) -> None:
    """Draw one quantity over damping: a curve for each refresh interval, and a dashed one for rank 0."""
    for place, ((rank, interval), rows) in enumerate(cells.groupby(["rank", "refresh_every"])):
        by_damping = rows.groupby("damping")[column]
        spread = by_damping.std().fillna(0.0)
        told = f"CAO k={rank:.0f}, m = {interval:.0f}" if rank else "CAO k=0, no curvature"
        colour = CURVED[(place - 1) % len(CURVED)] if rank else CONTROLS[0]
        axes.errorbar(
            spread.index * 10 ** (BESIDE * place), by_damping.mean(), yerr=spread, label=told, color=colour,
            marker="o", markersize=4, capsize=2, linestyle="-" if rank else "--",
        )  # fmt: skip
    dampings = sorted(cells["damping"].unique())
    axes.set(xscale="log", xlabel="damping η", ylabel=name)
    axes.set_xticks(dampings, [f"{damping:g}" for damping in dampings])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)


@styled
def stable_window_figure(windows: DataFrame) -> Figure:
    """Draw, for each task and method, the largest effective rate that works, the next that fails, and the predicted.

    Seeds lie closely below each other.
    """
    tasks = sorted(windows["task"].unique())
    height = 1.8 + 0.2 * windows.groupby("task").size().max()
    figure = Figure(figsize=(PANEL_WIDTH * max(len(tasks), 2), height), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        draw_windows(axes, windows[windows["task"] == task])
        axes.set_title(plain(task))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_windows(axes: Axes, rows: DataFrame) -> None:
    """Draw the windows of one task: a row per seed, those of one method together."""
    methods = [plain(method_name(row)) for _, row in rows.iterrows()]
    distinct = list(dict.fromkeys(methods))
    seeds = sorted(rows["seed"].unique())
    between = min(0.25, 0.75 / len(seeds))
    shift = {seed: between * (place - (len(seeds) - 1) / 2) for place, seed in enumerate(seeds)}
    places = [distinct.index(method) + shift[seed] for method, seed in zip(methods, rows["seed"], strict=True)]
    for place, low, high in zip(places, rows["largest_stable"], rows["smallest_unstable"], strict=True):
        axes.plot([low, high], [place, place], color="#c2185b", linewidth=1.2)
    axes.plot(rows["largest_stable"], places, "o", color="#c2185b", label="largest that works")
    axes.plot(rows["smallest_unstable"], places, "x", color="#555555", label="next that fails")
    axes.plot(rows["predicted_first"], places, "<", color="#1565c0", mfc="none", label="predicted at the start")
    axes.plot(rows["predicted_median"], places, "D", color="#1565c0", mfc="none", label="predicted over the run")
    predicted = rows[["predicted_first", "predicted_median"]].notna().any(axis=1)
    for place, works, is_predicted in zip(places, rows["largest_stable"], predicted, strict=True):
        said = "no rate works" if np.isnan(works) else "" if is_predicted else "no prediction"
        axes.annotate(said, (1.0, place), xycoords=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7)
    axes.set(xscale="log", xlabel="effective rate α/η")
    label_rates(axes, PANEL_WIDTH - LETTER_WIDTH * max(map(len, distinct)) - 0.4)
    axes.set_yticks(range(len(distinct)), distinct)
    axes.invert_yaxis()


def label_rates(axes: Axes, inches: float) -> None:
    """Label a logarithmic axis of so many inches as finely as labels fit, by powers alone where none do."""
    low, high = np.log10(axes.get_xlim())
    decades = range(math.floor(low), math.ceil(high))
    for leads in LEADS:
        ticks = [
            lead * 10.0**decade for decade in decades for lead in leads if low <= math.log10(lead) + decade <= high
        ]
        widths = [LETTER_WIDTH * (len(f"{tick:g}") + 1) for tick in ticks]
        places = [inches * math.log10(tick) / (high - low) for tick in ticks]
        room = [after - before for before, after in pairwise(places)]
        needed = [(before + after) / 2 for before, after in pairwise(widths)]
        if room and np.all(np.array(room) >= needed):
            axes.xaxis.set_major_locator(FixedLocator(ticks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
            return
