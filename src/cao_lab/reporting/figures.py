"""The report's figures: each function takes tables and returns a figure, for any dataset, model and threshold."""

from pathlib import Path
from textwrap import fill

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from pandas import DataFrame

from cao_lab.facts import method_info
from cao_lab.reporting.analysis import LARGEST_DRAWN, Goal, seed_band, stability_edge
from cao_lab.reporting.names import method_name
from cao_lab.reporting.palette import Stroke, in_order, strokes

STYLE = Path(__file__).with_name("cao.mplstyle")
LEGEND_WIDTH = 28
"""Letters that fit beside the axes."""
PLAIN_NUMBERS = StrMethodFormatter("{x:g}")
styled = matplotlib.style.context(STYLE)
AXES = {
    "train_loss": "train loss", "train_accuracy": "train accuracy", "test_accuracy": "test accuracy",
    "test_loss": "test loss", "epoch": "epochs", "seconds": "seconds of training",
}  # fmt: skip


@styled
def curve_figure(
    runs: DataFrame, column: str, x: str = "epoch", goal: Goal | None = None, last_epoch: float | None = None
) -> Figure:
    """Draw a quantity over training: mean over seeds with a band of one standard deviation, single seeds thin.

    The mean ends where the first seed ends; a single seed is marked †, a run that diverged ends in a cross. With a
    goal, a dot marks the mean first-hit epoch, hollow if not every seed reached it.
    """
    figure = Figure()
    axes = figure.add_subplot()
    shown = drawable(runs if last_epoch is None else runs[runs["epoch"] <= last_epoch], column)
    for name, stroke in strokes(runs).items():
        draw_method(axes, shown[shown["name"] == name], column, x, stroke)
    if goal is not None:
        draw_goal(axes, runs, x, goal, last_epoch)
    if column.endswith("loss") and (shown[column] > 0).all() and spans_decades(shown[column].to_numpy()):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    axes.set(xlabel=AXES[x], ylabel=AXES[column], title=title(runs))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves, names = axes.get_legend_handles_labels()
    if curves:
        wrapped = [fill(name, LEGEND_WIDTH) for name in names]
        axes.legend(curves, wrapped, loc="upper left", bbox_to_anchor=(1.01, 1.02))
    return figure


def drawable(rows: DataFrame, column: str) -> DataFrame:
    """Return rows in which numbers so large that an axis would overflow are infinite, and so not drawn."""
    return rows.assign(**{column: rows[column].mask(rows[column].abs() > LARGEST_DRAWN, np.inf)})


def spans_decades(values: np.ndarray) -> bool:
    """Say whether positive values spread over more than a factor of 30."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.max() > 30 * finite.min())


def title(runs: DataFrame) -> str:
    """Return what the runs are about: task and suite."""
    return plain(f"{runs['task'].iloc[0]}  ({runs['suite'].iloc[0]})")


def plain(name: str) -> str:
    """Return a name in which matplotlib finds no mathematics."""
    return name.replace("$", r"\$")


def draw_method(axes: Axes, runs: DataFrame, column: str, x: str, stroke: Stroke) -> None:
    """Draw one method: each seed thin, their mean and band strong."""
    finite = runs[np.isfinite(runs[column])]
    if finite.empty:
        return
    seeds = runs["seed"].nunique()
    dash = (0, (4, 1.6)) if stroke.is_dashed else "-"
    for _, run in finite.groupby("run"):
        if seeds > 1:
            axes.plot(run[x], run[column], color=stroke.colour, linewidth=0.6, alpha=0.3)
        if run["status"].iloc[0] == "diverged":
            axes.plot(run[x].iloc[-1], run[column].iloc[-1], marker="x", color=stroke.colour, linestyle="none")
    band = seed_band(runs, column, x)
    label = plain(f"{runs['name'].iloc[0]}{' †' if seeds == 1 else ''}")
    order = 2.0 if stroke.is_dashed else 2.5
    axes.plot(band["x"], band["mean"], color=stroke.colour, linestyle=dash, label=label, zorder=order)
    if seeds > 1:
        low, high = band["mean"] - band["std"], band["mean"] + band["std"]
        axes.fill_between(band["x"], low, high, color=stroke.colour, alpha=0.15, linewidth=0)


def draw_goal(axes: Axes, runs: DataFrame, x: str, goal: Goal, last_epoch: float | None) -> None:
    """Draw the loss to reach and, on it, where each method first reached it."""
    axes.axhline(goal.loss, color="#444444", linewidth=0.8, linestyle=(0, (2, 2)))
    hits = goal.hits.merge(runs.drop_duplicates("run")[["run", "name"]], on="run")
    for name, stroke in strokes(runs).items():
        own = hits.loc[hits["name"] == name, x]
        place = own.mean()
        if own.count() and (last_epoch is None or place <= last_epoch):
            face = stroke.colour if own.notna().all() else "white"
            order = 3.0 if stroke.is_dashed else 3.5
            axes.plot(place, goal.loss, "o", markersize=5.5, color=stroke.colour, markerfacecolor=face, zorder=order)


def train_loss_figure(runs: DataFrame, goal: Goal | None = None, last_epoch: float | None = None) -> Figure:
    """Draw train loss over epochs, to the end or in an early window."""
    return curve_figure(runs, "train_loss", goal=goal, last_epoch=last_epoch)


def rank_ablation_figure(runs: DataFrame, goal: Goal | None = None) -> Figure:
    """Draw train loss for CAO's ranks, everything else as in its main setting."""
    return train_loss_figure(rank_ablation(runs), goal)


def rank_ablation(runs: DataFrame) -> DataFrame:
    """Return the CAO runs that differ from each other in rank alone, both forms of rank 0 among them."""
    cao = runs[(runs["optimizer"] == "cao") & (runs["sketch"] == "top") & (runs["momentum"] == 0)]
    kept = cao[(cao["scaling"] == "inverse-damping") | (cao["rank"] == 0)]
    rest = kept[["base_lr", "damping", "refresh_every"]]
    return kept[(rest == rest.mode().iloc[0]).all(axis=1)] if len(kept) else kept


def wall_clock_figure(runs: DataFrame, goal: Goal | None = None) -> Figure:
    """Draw train loss over seconds of training."""
    return curve_figure(runs, "train_loss", x="seconds", goal=goal)


@styled
def eigenvalue_figure(refreshes: DataFrame, largest: int = 6) -> Figure:
    """Draw λ₁ … λ_{k+1} over training, one panel a method, with the stability edge 2(1+β)/α_eff dashed.

    Mean over seeds; the first eigenvalue that is not captured is grey. An edge exists for SGD and CAO alone. Where
    there are too many methods, those of the highest ranks are drawn.
    """
    order = in_order(refreshes).sort_values("rank", ascending=False, kind="stable")["name"]
    names = sorted(order[:largest])
    columns, rows = min(len(names), 3), -(-len(names) // 3)
    figure = Figure(figsize=(3.1 * max(columns, 1.6), 2.3 * rows + 0.9))
    height = 2.3 * rows + 0.9
    figure.subplots_adjust(left=0.1, right=0.97, bottom=0.5 / height, top=1 - 0.6 / height, wspace=0.08, hspace=0.25)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        draw_eigenvalues(axes, drawable(refreshes[refreshes["name"] == name], "eigenvalue"))
        axes.set_title(plain(name), fontsize=8.5)
    for axes in list(grid.flat)[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("epochs", fontsize=9)
    figure.supylabel("eigenvalue", fontsize=9)
    figure.suptitle(title(refreshes), x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def draw_eigenvalues(axes: Axes, rows: DataFrame) -> None:
    """Draw the eigenvalues of one method and the edge of stability."""
    shades = matplotlib.colormaps["plasma"]
    captured = rows["is_captured"].astype(bool)
    for index, group in rows.groupby("index"):
        mean = group.groupby("epoch")["eigenvalue"].mean()
        colour = shades(0.1 + 0.12 * (float(str(index)) - 1)) if captured[group.index].any() else "#9aa0a6"
        axes.plot(mean.index, mean, color=colour, linewidth=1.2)
        axes.annotate(f"λ{float(str(index)):.0f}", (mean.index[-1], mean.iloc[-1]), color=colour, fontsize=7)
    edge = stability_edge(rows).iloc[0]
    if method_info(rows["optimizer"].iloc[0]).has_edge and np.isfinite(edge):
        axes.axhline(edge, color="#444444", linewidth=0.9, linestyle=(0, (4, 2)))
        axes.annotate("2(1+β)/α", (0, edge), fontsize=7, color="#444444", va="bottom")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)


@styled
def stable_window_figure(windows: DataFrame) -> Figure:
    """Draw, for each task and method, the largest effective rate that works, the next that fails, and the predicted.

    Seeds lie closely below each other.
    """
    tasks = sorted(windows["task"].unique())
    figure = Figure(figsize=(8.0, 1.8 + 0.2 * windows.groupby("task").size().max()), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        rows = windows[windows["task"] == task]
        methods = [plain(method_name(row)) for _, row in rows.iterrows()]
        distinct = list(dict.fromkeys(methods))
        seeds = sorted(rows["seed"].unique())
        shift = {seed: 0.25 * (place - (len(seeds) - 1) / 2) for place, seed in enumerate(seeds)}
        places = [distinct.index(method) + shift[seed] for method, seed in zip(methods, rows["seed"], strict=True)]
        for place, low, high in zip(places, rows["largest_stable"], rows["smallest_unstable"], strict=True):
            axes.plot([low, high], [place, place], color="#c2185b", linewidth=1.2)
        axes.plot(rows["largest_stable"], places, "o", color="#c2185b", label="largest that works")
        axes.plot(rows["smallest_unstable"], places, "x", color="#555555", label="next that fails")
        axes.plot(rows["predicted_first"], places, "<", color="#1565c0", mfc="none", label="predicted at the start")
        axes.plot(rows["predicted_median"], places, "D", color="#1565c0", mfc="none", label="predicted over the run")
        axes.set(xscale="log", xlabel="effective rate α/η", title=plain(task))
        axes.set_yticks(range(len(distinct)), distinct)
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
