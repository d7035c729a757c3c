"""The figures of one setting, a task in a suite: which there are, and of which runs."""

import math
from functools import partial

from matplotlib.figure import Figure
from pandas import DataFrame

from cao_lab.facts import PAPER_TASK, SEARCHING
from cao_lab.protocol import EARLY_SHARE
from cao_lab.reporting.eigenvalue_figure import eigenvalue_figure
from cao_lab.reporting.figures import (
    curve_figure,
    rank_ablation,
    rank_ablation_figure,
    train_loss_figure,
    wall_clock_figure,
)
from cao_lab.reporting.setting import Setting
from cao_lab.reporting.sweep_figure import sweep_figure

MAIN_PARTS = ("sgd", "adam", "adamw", "cao", "cao-momentum", "matched")
CONTROL_PARTS = ("cao", "matched", "rank0-unit", "rank0-inverse", "random", "projected-out")
WATCHED_PARTS = ("sgd", "adam", "cao", "cao-momentum", "rank3", "rank5")
FEW_METHODS = 8


def setting_figures(setting: Setting) -> dict[str, "partial[Figure]"]:
    """Return the figures that there are data for, by kind: a new figure is a line here."""
    runs, goal = plotted(setting), setting.goal
    figures = {
        "train-loss": partial(train_loss_figure, runs, goal),
        "train-loss-seconds": partial(wall_clock_figure, runs, goal),
    }
    if runs["test_accuracy"].notna().any():
        figures["test-accuracy"] = partial(curve_figure, runs, "test_accuracy")
    # The paper has these two for its main setting only.
    if setting.task.startswith(PAPER_TASK):
        early = math.ceil(EARLY_SHARE * runs["budget"].max())
        figures["train-loss-early"] = partial(train_loss_figure, runs, goal, early)
        figures["train-accuracy"] = partial(curve_figure, runs, "train_accuracy")
    if rank_ablation(setting.epochs)["rank"].nunique() > 1:
        figures["rank-ablation"] = partial(rank_ablation_figure, setting.epochs, goal)
    controls = of_parts(setting, CONTROL_PARTS)
    if controls["label"].nunique() > 2:
        figures["controls"] = partial(train_loss_figure, controls, goal)
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
